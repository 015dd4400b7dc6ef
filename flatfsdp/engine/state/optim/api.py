"""The wrapper's static methods for the state of an optimizer, with FSDP1's names, arguments and defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ....errors import ConfigValueError, refuse_type
from ...config.state_dict_configs import OptimStateKeyType, default_carrier
from ..model.types import StateDictRequest, settings_of
from .descriptions import value_of
from .loading import load
from .param_map import ParamMap, check_dict, groups_of
from .saving import state_by_name

OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class OptimStates:
    """An optimizer's state by the names of parameters, independent of number of ranks and wrapping.

    A state dict of names is `{"state": {name: {state: value}}, "param_groups": [...]}`, where param groups also list
    names. A state that is not a tensor of its parameter's shape (a step count) is one value for a parameter, on the
    CPU. A saved and loaded optimizer continues exactly, even on another number of ranks.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The state of `optim` by names, of the kind that `set_state_dict_type` chose for `model`. Collective.

        ``FULL_STATE_DICT``: full tensors, gathered one state of one unit at a time; with `rank0_only` the dicts of
        other ranks are empty. Otherwise values are `OwnedInterval`s, this rank's elements of each state: making them
        sends descriptions only, and `torch.distributed.checkpoint` saves them and loads into them; or the form that
        `ShardedOptimStateDictConfig(sharded_as=...)` chooses, which is gathered like full tensors. Tensors are on the
        CPU with `offload_to_cpu`, which is the default, and never share memory with the optimizer's.

        An optimizer that has not stepped on any rank has the state that it would start its first step from: it is
        found by a step of a copy on zeros, which temporarily takes the memory of parameters, gradients and state.

        Args:
            model: the model on which the optimizer was built, usually the outermost wrapper.
            optim: the optimizer.
            optim_state_dict: a changed result of `optim.state_dict()`; None to call that.
            group: the ranks of which the first gets the dict, if only one rank gets it; None for the model's.

        Raises:
            UsageError: a state without the shape of its parameter if that is split over ranks; a parameter that does
                not belong to the model.
            AgreementError: ranks differ in the states of a parameter, or in their values.

        Example (in a process group of one rank; before the first step, so with initial state):
            >>> from flatfsdp import FullyShardedDataParallel
            >>> model = FullyShardedDataParallel(nn.Linear(2, 1))
            >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            >>> saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            >>> saved["param_groups"][0]["params"], saved["state"]["weight"]["exp_avg"], saved["state"]["bias"]["step"]
            (['weight', 'bias'], tensor([[0., 0.]]), tensor(0.))
            >>> loadable = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved)
            >>> optimizer.load_state_dict(loadable)
        """
        wanted = StateDictRequest.of(settings_of(model).optim_state_dict_config)
        return state_by_name(model, optim, optim_state_dict, wanted, group=group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """The argument for `optim.load_state_dict()`, made from a state dict of names. Collective.

        Values may be full tensors, `OwnedInterval`s of this rank's elements, torch's DTensors and ShardedTensors: from
        `optim_state_dict()` here or of FSDP1, for any number of ranks and any wrapping, or from a single process. With
        `FullOptimStateDictConfig(rank0_only=True)` only rank 0 needs the dict, and sends each rank its
        shards.

        A dict without "param_groups" gives one without; loaded directly, the optimizer keeps its own. Parameters that
        no unit manages may be missing in both, and have no state then.

        With flat parameters (`use_orig_params=False`) the parameters in one share their states: tensors that are
        missing for some are zeros; single values must be there for all, and equal.

        Args:
            model, optim: as for `optim_state_dict`.
            optim_state_dict: the dict of names; it is not changed.
            is_named_optimizer: whether the optimizer's keys are names of `model.named_parameters()`, not numbers.
            load_directly: whether to load it, too.
            group: the ranks of which the first has the dict, if only one rank has it; None for the model's.

        Raises:
            ConfigTypeError, ConfigValueError: a dict without "state", names or states that are not
                this model's; the message names them.
            AgreementError: ranks have different dicts, or that of another rank is wrong.
        """
        from_first = StateDictRequest.of(settings_of(model).optim_state_dict_config).rank0_only
        loadable = load(model, optim, optim_state_dict, from_first=from_first, by_name=is_named_optimizer, group=group)
        if load_directly:
            own = {} if "param_groups" in loadable else {"param_groups": optim.state_dict()["param_groups"]}
            optim.load_state_dict({**loadable, **own})
        return loadable

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """`optim_state_dict` with full tensors on the CPU, independent of the setting of `model`. Collective.

        Args:
            model, optim, group: as for `optim_state_dict`.
            optim_input: the input from which the optimizer was built, if its own param groups are not to be used.
            rank0_only: whether the dicts of ranks other than the first are empty.
        """
        wanted = StateDictRequest("whole", rank0_only=rank0_only)
        return state_by_name(model, optim, None, wanted, optim_input=optim_input, group=group)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """`optim_state_dict` with this rank's `OwnedInterval`s, independent of the setting of `model`; under
        `flatfsdp.as_torch` with torch's classes, as in FSDP1. Collective.

        `model`, `optim` and `group` are as there.
        """
        return state_by_name(model, optim, None, StateDictRequest(default_carrier()), group=group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` for a dict of full tensors that every rank has. No communication.

        Args:
            full_optim_state_dict: the dict.
            model: as for `optim_state_dict`.
            optim_input: the input from which the optimizer was built; None for the param groups of `optim`, or without
                that for `model.parameters()`.
            optim: the optimizer.
        """
        return load(model, optim, full_optim_state_dict, optim_input=optim_input, alone=True)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` for a sharded dict, independent of the setting of `model`. Collective.

        Args:
            sharded_optim_state_dict: this rank's.
            model, optim: as for `optim_state_dict`.
        """
        return load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` for a dict of full tensors that only the first rank has. Collective.

        The first rank sends shard by shard, others receive their own only.

        Args:
            full_optim_state_dict: the dict; ignored on other ranks.
            model, optim_input, optim: as for `shard_full_optim_state_dict`.
            group: the ranks of which the first has it; None for the model's.
        """
        return load(model, optim, full_optim_state_dict, optim_input=optim_input, from_first=True, group=group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """A state dict of names with the numbers of the optimizer over `model`, or the reverse. No communication.

        It converts between the dicts here and those of single processes, whose optimizers use numbers only: `model` and
        its optimizer are then the unwrapped ones.

        Args:
            optim_state_dict: the dict; returned unchanged if it has such keys already.
            optim_state_key_type: `OptimStateKeyType.PARAM_NAME` or `.PARAM_ID`.
            model, optim_input, optim: as for `shard_full_optim_state_dict`.

        Raises:
            ConfigTypeError, ConfigValueError: a key that the optimizer does not know; an optimizer of flat parameters,
                which are not one parameter each.
        """
        return _rekeyed(optim_state_dict, optim_state_key_type, model, groups_of(model, optim, optim_input))


def _rekeyed(
    state_dict: dict[str, Any], key_type: Any, model: nn.Module, groups: list[list[torch.Tensor]]
) -> dict[str, Any]:
    """`state_dict` with keys of `key_type`; itself if it has them already. Tensors are not copied. No communication.

    `groups`: the parameters of each param group of the optimizer over `model`, whose numbers are used.
    """
    chosen = _key_type(key_type)
    checked = check_dict(state_dict)
    groups_of_dict = checked.get("param_groups", ())
    keys = [*checked["state"], *(key for group in groups_of_dict for key in group["params"])]
    types = {type(key) for key in keys}
    if not types <= {int} and not types <= {str}:
        raise ConfigValueError(
            f"optim_state_dict: expected names or numbers as keys, found {', '.join(sorted(k.__name__ for k in types))}"
        )
    if types <= {str if chosen is OptimStateKeyType.PARAM_NAME else int}:
        return state_dict
    param_map = ParamMap(model, groups)
    flat = next((param for param in param_map if len(param.params) > 1), None)
    if flat is not None:
        raise ConfigValueError(
            f"rekey_optim_state_dict: parameter {flat.key} of the optimizer is a flat parameter of {len(flat.params)} "
            f"parameters, {flat.name!r} the first, so numbers and names do not correspond one to one. Pass the "
            "unwrapped model with its optimizer; for a wrapped model, convert with optim_state_dict() and "
            "optim_state_dict_to_load()"
        )
    new: dict[Any, Any]
    if chosen is OptimStateKeyType.PARAM_NAME:
        new = {param.key: param.name for param in param_map}
    else:
        new = {name: param.key for param in param_map for name in param.params[0].names}
    unknown = sorted({key for key in keys if key not in new}, key=str)
    if unknown:
        raise ConfigValueError(
            f"optim_state_dict: the optimizer has no parameters {', '.join(map(repr, unknown[:5]))}; its parameters "
            f"are {', '.join(repr(key) for key in list(new)[:5])}, ... Pass the model and the optimizer (or "
            "optim_input) that the dict belongs to"
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
