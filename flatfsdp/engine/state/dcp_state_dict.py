"""torch's `get_state_dict` and `set_state_dict` for models of this package, with or without `as_torch.install()`.

[Note: get_state_dict] torch.distributed.checkpoint.state_dict knows one wrapper, torch's own. It would treat a model of
this package as unsharded, and save each rank's pieces of the optimizer's state as if they were full tensors. First of
all it reads `_fqn_modifiers` of every module, including wrappers of this package; at that moment we replace some of its
functions. From then on they look for both wrappers, and use each model's own class. This does not import torch's FSDP.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ...api import HYBRIDS
from ..base.fqns import WRAPPED, clean, fqn
from ..models.walks import units_in

MODULE = "torch.distributed.checkpoint.state_dict"


class _Either(type):
    """The metaclass of a class that stands for torch's wrapper and ours."""

    torchs: Any
    ours: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.ours, cls.torchs))

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        def of_model(*args: Any, **kwargs: Any) -> Any:
            model: nn.Module = args[0] if args else kwargs["module" if "module" in kwargs else "model"]
            found = next((type(each) for each in model.modules() if isinstance(each, cls.ours)), cls.torchs)
            return getattr(found, name)(*args, **kwargs)

        return of_model


def register_wrappers(ours: type) -> None:
    """Make torch's functions recognize wrappers of the class `ours`, if torch's module is loaded. Idempotent."""
    module = sys.modules.get(MODULE)
    torchs = getattr(module, "FSDP", None)
    if torchs is None or isinstance(torchs, _Either) or issubclass(torchs, ours):
        return
    names = vars(module)
    names["FSDP"] = _Either("FSDP", (), {"torchs": torchs, "ours": ours})
    for name, made in replacements(ours).items():
        if name in names:  # some versions of torch lack some of them
            names[name] = made(names[name])


def replacements(ours: type) -> dict[str, Callable[[Any], Any]]:
    """Other replacements there: by name, a function that extends torch's own one to wrappers of the class `ours`."""
    return {
        "HYBRID_SHARDING_STRATEGIES": lambda torchs_own: [*HYBRIDS, *torchs_own],
        "_get_module_fsdp_state_if_fully_sharded_module": lambda torchs_own: (
            lambda module: module if isinstance(module, ours) else torchs_own(module)
        ),
        "_get_fqns": _names_of,
        "_iterate_valid_model_state": _iterate_of,
        "_load_optim_state_dict": _load_of,
        "_unflatten_optim_state_dict": lambda torchs_own: _unflatten_of(torchs_own, ours),
    }


def _ties(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """torch treats a parameter as tied if modules list it at several places; a flat parameter is listed at one. This
    yields the paths at which `model` has parameters of flat ones, for each that it has at several places."""
    units = units_in(model)
    handles = [handle for unit in units for handle in unit.handles]
    shared = [(handle.face.holder_of(0), handle.leaves) for handle in handles if handle.face.shares_holder]
    flats = {id(leaf): flat for flat, leaves in shared for leaf in leaves}
    refs = [each for unit in units for each in (*unit.param_refs, *unit.shared_refs) if id(each.leaf) in flats]
    times = Counter(id(each.leaf) for each in refs)
    tied = [each for each in refs if times[id(each.leaf)] > 1]
    paths = {id(module): path for path, module in model.named_modules()} if tied else {}
    yield from ((fqn(paths[id(each.module)], each.attribute), flats[id(each.leaf)]) for each in tied)


def _iterate_of(torchs_own: Callable[..., Iterator[tuple[str, Any]]]) -> Callable[..., Iterator[tuple[str, Any]]]:
    def iterate(model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from torchs_own(model, *args, **kwargs)
        yield from _ties(model)

    return iterate


def _load_of(torchs_own: Callable[..., None]) -> Callable[..., None]:
    """When `info` was made, torch's own `_iterate_valid_model_state` may not have been replaced yet."""

    def load(model: nn.Module, optimizers: Any, state_dict: Any, info: Any) -> None:
        for path, flat in _ties(model):
            names = vars(sys.modules[MODULE])["_get_fqns"](model, path)
            info.fqn_param_mapping[flat].update(names)
            info.shared_params_mapping.update(dict.fromkeys(names, flat))
        torchs_own(model, optimizers, state_dict, info)

    return load


def _unflatten_of(torchs_own: Callable[..., dict[str, Any]], ours: type) -> Callable[..., dict[str, Any]]:
    """torch reads the states of a parameter from this rank's optimizer, which has none for a parameter without elements
    on the rank. Here the state dict decides."""

    def unflatten(optim: Any, flattened: dict[str, Any], info: Any) -> dict[str, Any]:
        unflattened = torchs_own(optim, flattened, info)
        if not any(isinstance(module, ours) for module in info.fsdp_modules):
            return unflattened
        states: dict[str, dict[str, Any]] = {name: {} for name in unflattened["state"]}
        for key, value in flattened.items():
            section, *names = key.split(".")
            length = next((n for n in range(len(names) - 1, 0, -1) if ".".join(names[:n]) in states), None)
            if section != "state" or length is None:
                continue
            entry = states[".".join(names[:length])]
            for each in names[length:-1]:  # of a state that is a dict
                entry = entry.setdefault(each, {})
            entry[names[-1]] = value
        return {**unflattened, "state": states}

    return unflatten


def _names_of(torchs_own: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """torch expects one flat parameter per unit, with the names of wrappers in its name. It keeps the names of other
    wrappers around units (of checkpoints)."""

    def names_of(model: Any, name: str, *args: Any, **kwargs: Any) -> set[str]:
        path, _, last = name.rpartition(".")
        flat = getattr(model.get_submodule(path), last, None) if last.startswith("_flat_param") else None
        if flat is None or not hasattr(flat, "_fqns"):  # an original parameter may have such a name
            found = torchs_own(model, name, *args, **kwargs)
            return {".".join(part for part in each.split(".") if part != WRAPPED) for each in found}
        prefix = f"{clean(path)}." if clean(path) else ""
        return {prefix + inside for inside in flat._fqns}

    return names_of
