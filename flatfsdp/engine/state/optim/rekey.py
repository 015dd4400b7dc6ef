"""An optimizer's state dict by names, or by numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ....errors import ConfigValueError, refuse_type
from ...config.state_dict_configs import OptimStateKeyType
from .descriptions import value_of
from .load_plan import check_dict
from .param_map import ParamMap


def rekey(
    state_dict: dict[str, Any], key_type: Any, model: nn.Module, groups: list[list[torch.Tensor]]
) -> dict[str, Any]:
    """`state_dict` with keys of `key_type`; itself if it has them already. Tensors are not copied. No communication.

    `groups`: the parameters of each param group of the optimizer over `model` that counts them.
    """
    chosen = _key_type(key_type)
    checked = check_dict(state_dict)
    groups_of_dict = checked.get("param_groups", ())
    keys = [*checked["state"], *(key for group in groups_of_dict for key in group["params"])]
    kinds = {type(key) for key in keys}
    if not kinds <= {int} and not kinds <= {str}:
        raise ConfigValueError(
            f"optim_state_dict: expected names or numbers as keys, found {', '.join(sorted(k.__name__ for k in kinds))}"
        )
    if kinds <= {str if chosen is OptimStateKeyType.PARAM_NAME else int}:
        return state_dict
    holder = ParamMap(model, groups)
    flat = next((held for held in holder if len(held.params) > 1), None)
    if flat is not None:
        raise ConfigValueError(
            f"rekey_optim_state_dict: parameter {flat.key} of the optimizer is a flat parameter of "
            f"{len(flat.params)} parameters, {flat.name!r} the first, so numbers and names are not the same count. "
            "Give the model that is not wrapped, with its optimizer; for a wrapped one, optim_state_dict() and "
            "optim_state_dict_to_load() go from one to the other"
        )
    new: dict[Any, Any]
    if chosen is OptimStateKeyType.PARAM_NAME:
        new = {held.key: held.name for held in holder}
    else:
        new = {name: held.key for held in holder for name in held.params[0].names}
    unknown = sorted({key for key in keys if key not in new}, key=str)
    if unknown:
        raise ConfigValueError(
            f"optim_state_dict: the optimizer has no parameters {', '.join(map(repr, unknown[:5]))}; its own are "
            f"{', '.join(repr(key) for key in list(new)[:5])}, ... Give the model and the optimizer (or optim_input) "
            "that the dict is for"
        )
    param_groups = []
    for group in groups_of_dict:
        settings = {key: value_of(value) for key, value in group.items() if key != "params"}
        param_groups.append({**settings, "params": sorted(new[key] for key in group["params"])})
    state = {new[key]: entry for key, entry in checked["state"].items()}
    return {"state": state, "param_groups": param_groups} if "param_groups" in checked else {"state": state}


def _key_type(value: Any) -> OptimStateKeyType:
    if isinstance(value, OptimStateKeyType):
        return value
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if name not in OptimStateKeyType.__members__:
        refuse_type("optim_state_key_type", value, "OptimStateKeyType.PARAM_NAME or OptimStateKeyType.PARAM_ID")
    return OptimStateKeyType[str(name)]
