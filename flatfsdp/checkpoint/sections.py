"""The sections of a checkpoint: this rank's intervals of a model, of its optimizer and of the residuals of quantized
gradients, and how they are loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..engine.agreement.once_per_job import warn_once_per_job
from ..engine.base.fqns import clean
from ..engine.config.state_dict_configs import ShardedOptimStateDictConfig, ShardedStateDictConfig
from ..engine.features.error_feedback import residuals_of
from ..engine.few_bits.quantized import Residuals, residual_numels
from ..engine.models.rest import check_idle, models_of, quiesce
from ..engine.models.spread import apart
from ..engine.models.walks import units_in
from ..engine.runtime.unit import Unit
from ..engine.state.model.types import sharing_memory
from ..engine.state.named_param import NamedParam, named_buffers, named_state, refuse_rows_of_their_class
from ..engine.state.optim.descriptions import value_of
from ..engine.state.optim.loading import TensorSpec
from ..engine.state.owned_interval import OwnedInterval
from ..errors import CheckpointError, ConfigValueError, UsageError, ranks_in_words, refuse_type
from ..fully_sharded_data_parallel import FullyShardedDataParallel
from .nested_state import flatten


class Section:
    """One section, under its name in the checkpoint. This class is for state dicts, which the user makes and loads.

    Attributes:
        state: nested mappings.
        ties: names in `state` of a parameter or buffer with several names, each with the first of them.
        buffers: names in `state` of buffers, whose values may differ between ranks.
        is_optional: the section may be missing in a checkpoint, or differ: it is not compared with `state`.
    """

    ties: Mapping[str, str] = MappingProxyType({})
    buffers: Collection[str] = ()
    is_optional = False

    def __init__(self, name: str, state: Mapping[str, Any]) -> None:
        self.name, self.state = name, state

    def take(self, *, in_use: bool) -> None:
        """Collect `state`, whose tensors may share the model's memory if `in_use`, or else are filled. Collective."""

    def select(self, names: Callable[[str], bool] | None) -> None:
        """Leave only the entries with these `names` in the `state` of a model."""
        if names is not None and self.name == "model":
            self.state = {name: each for name, each in self.state.items() if names(name)}
            self.ties = {name: first for name, first in self.ties.items() if {name, first} <= self.state.keys()}
            self.buffers = {name for name in self.buffers if name in self.state}

    def expect(self, there: Mapping[str, TensorSpec]) -> None:
        """Set `state` to the entries to load from a checkpoint with these tensors, by key ([Note: keys])."""

    def load(self, read: Mapping[str, Any]) -> None:
        """Load `read`, which is `state` with the values of the checkpoint. Collective."""
        _replace_values(self.state, read)


def _replace_values(state: Any, read: Any) -> None:
    """Replace plain values of `state` with those of `read`; its tensors have been filled."""
    if isinstance(state, list) and isinstance(read, list) and len(state) == len(read):
        keys: Iterable[Any] = range(len(state))
    elif isinstance(state, MutableMapping) and isinstance(read, Mapping):
        keys = [key for key in state if key in read]
    else:
        return
    for key in keys:
        if isinstance(state[key], Mapping | list) and isinstance(read[key], Mapping | list):
            _replace_values(state[key], read[key])
        elif not isinstance(state[key], torch.Tensor):
            state[key] = read[key]


# --- model ------------------------------------------------------------------------------------------------------------


class _ModelSection(Section):
    def __init__(self, model: nn.Module) -> None:
        super().__init__("model", {})
        self._model = model
        _refuse_apart(model)
        refuse_rows_of_their_class(units_in(model), "a checkpoint of flatfsdp")

    def take(self, *, in_use: bool) -> None:
        with _sharded(self._model), sharing_memory() if in_use else nullcontext():
            self._own: dict[str, Any] = self._model.state_dict()
        self._held = self._take_held(in_use=in_use)
        named = [each.names for each in named_state(self._model)]
        buffers = [each.names for each in named_buffers(self._model)]
        named += buffers
        known = {name for names in named for name in names}
        # Tensors that modules add to parameters and buffers. They may be in use, so copies of them are filled.
        self._added = {} if in_use else {key: each for key, each in self._own.items() if _is_added(key, each, known)}
        self._own.update((key, each.clone()) for key, each in self._added.items())
        # torch.compile around the outermost wrapper adds its prefix to names.
        self.state = {clean(key): each if _is_tensor(each) else value_of(each) for key, each in self._own.items()}
        self.buffers = {name for names in buffers for name in names}
        self.ties = {name: names[0] for names in named for name in names[1:] if {name, names[0]} <= self.state.keys()}

    def _take_held(self, *, in_use: bool) -> dict[str, NamedParam]:
        """Replace DTensors that modules hold in place of their units' parameters with this rank's intervals: DTensors
        have neither the layout of shards nor the rank that saves each. Returned: the parameters, by key."""
        units = [unit for unit in units_in(self._model) if unit.entries.in_place]
        # Shards then have the values that users assigned to parameters.
        quiesce(units, collective=False, check=lambda unit: check_idle(unit, "state_dict()"))
        params = named_state(self._model) if units else []
        named = {name: each for each in params if each.unit and each.unit.entries.in_place for name in each.names}
        held = {key: named[clean(key)] for key in self._own if clean(key) in named}
        made: dict[int, torch.Tensor] = {}  # tied names share one
        for key, value in self._own.items() if held else ():
            each = held.get(key)
            local = value if each is None else each.local_view(each.handle.shard.detach())
            if _is_tensor(value) and id(each or value) not in made:
                if not in_use:
                    local = torch.empty_like(local, device="cpu") if local.is_meta else local.to("cpu", copy=True)
                made[id(each or value)] = local if each is None else each.interval(local)
            self._own[key] = made.get(id(each or value), value)
        return held

    def load(self, read: Mapping[str, Any]) -> None:
        given = {**self._own, **{key: _as_held(each, self._own[key]) for key, each in self._held.items()}}
        for key, value in self._own.items():
            if not _is_tensor(value):  # extra state of a module, as it was saved
                given[key] = read.get(clean(key), value)
        on_meta = next((each.handle for each in self._held.values() if each.handle.shard.is_meta), None)
        if on_meta is not None:
            given |= self._held_by_no_unit(on_meta.device)
        with _sharded(self._model):
            incompatible = self._model.load_state_dict(given, strict=False, assign=on_meta is not None)
        missing, unread = incompatible.missing_keys, incompatible.unexpected_keys
        others = [key for key in unread if key not in self._added or not torch.equal(self._own[key], self._added[key])]
        if missing or others:
            raise CheckpointError(
                f"modules do not load their extra entries in the state dict: {', '.join((missing + others)[:3])} "
                f"({len(missing + others)} in all), which differ from their own. Build the model as in the run that "
                "saved it (a quantized base with the same weights), then load"
            )

    def _held_by_no_unit(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Parameters and buffers that no unit holds, with the loaded values, to be assigned by key: optimizers may hold
        them, so they keep their identity. Those on the meta device are made on `device`."""
        outside = (each for each in [*named_state(self._model), *named_buffers(self._model)] if each.unit is None)
        leaves = {name: each.leaf for each in outside for name in each.names}
        given: dict[str, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}  # tied names share one
        for key, value in self._own.items():
            leaf = leaves.get(clean(key))
            if leaf is None or not _is_tensor(value):
                continue
            if id(leaf) not in made:
                made[id(leaf)] = _filled(leaf, value, device)
            given[key] = made[id(leaf)]
        return given


def _as_held(named: NamedParam, owned: OwnedInterval) -> torch.Tensor:
    """This rank's interval `owned` of a parameter in the form that modules hold, for `load_state_dict()`."""
    handle = named.handle
    home = handle.shard.device
    if home.type == "meta":
        home = torch.device("cpu") if handle.options.offload else handle.device
    return handle.face.like_holder((named.index,), owned.local.to(home))


def _refuse_apart(model: nn.Module) -> None:
    """Refuse different parameters of ranks under one name. [Note: parameters apart]"""
    units = units_in(model)
    found = [(unit, each) for one in models_of(units) for unit, each in apart(one.units) if unit in units]
    if found:
        unit, handle = found[0]
        ranks = unit.axes.of(handle).shard.ranks
        raise UsageError(
            f"parameter {unit.entries.fqn(handle.layout.params[0].name)!r} is sharded over {ranks_in_words(ranks)} "
            "alone, and is not a DTensor on a mesh with the others: these have another parameter under its name, and a "
            "checkpoint holds only one. Make it a DTensor on the mesh of the ranks that hold its other parts, before "
            "it is sharded, or save your own state dicts"
        )


def _filled(leaf: torch.Tensor, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`leaf` with that value; for the meta device, its replacement on `device`."""
    if leaf.is_meta:
        placed = value.to(device)
        return nn.Parameter(placed, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else placed
    with torch.no_grad():
        return leaf.copy_(value)


def _is_added(key: str, value: Any, known: Collection[str]) -> bool:
    return _is_tensor(value) and not isinstance(value, OwnedInterval) and clean(key) not in known


# --- optimizer --------------------------------------------------------------------------------------------------------


class _OptimizerSection(Section):
    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        super().__init__("optimizer", {})
        self._optimizer, self._model = optimizer, model

    def take(self, *, in_use: bool) -> None:
        with _sharded(self._model), sharing_memory() if in_use else nullcontext():
            self.state = FullyShardedDataParallel.optim_state_dict(self._model, self._optimizer)

    def expect(self, there: Mapping[str, TensorSpec]) -> None:
        # The checkpoint decides which parameters have state: gradients may have been None at the save and not here.
        # This optimizer decides the entries of that state: state of another kind of optimizer is not loaded.
        prefix = f"{self.name}.state."
        if not any(key.startswith(prefix) for key in there):
            return
        stepped = {name for group in self.state["param_groups"] for name in group["params"]}
        named = {name: each for each in named_state(self._model) for name in each.names}
        found: dict[str, dict[str, TensorSpec]] = {}
        for key, described in there.items():
            if key.startswith(prefix):
                name = _longest(stepped & named.keys(), key.removeprefix(prefix))
                if name is not None:
                    found.setdefault(name, {})[key.removeprefix(f"{prefix}{name}.")] = described
        own = self.state["state"]
        tensors_of = {name: _tensors_in(values) for name, values in own.items()}
        state = {name: own[name] for name, tensors in tensors_of.items() if not tensors}
        for name, inside in found.items():
            if name in own:
                state[name] = own[name]
            elif inside.keys() in tensors_of.values():
                state[name] = {each: _target(named[name], described) for each, described in inside.items()}
        self.state = {**self.state, "state": state}

    def load(self, read: Mapping[str, Any]) -> None:
        with _sharded(self._model):
            FullyShardedDataParallel.optim_state_dict_to_load(
                self._model, self._optimizer, {"state": {}, **read}, load_directly=True
            )


def _tensors_in(values: Mapping[str, Any]) -> set[str]:
    return {key for key, value in flatten(values)[0].items() if _is_tensor(value)}


def _longest(names: Collection[str], key: str) -> str | None:
    """The longest of `names` that the `key` begins with: names may begin with other names."""
    path = key.split(".")
    candidates = (".".join(path[:end]) for end in range(len(path) - 1, 0, -1))
    return next((name for name in candidates if name in names), None)


def _target(named: NamedParam, described: TensorSpec) -> torch.Tensor:
    """Memory for this rank's interval of a state of its parameter's shape, or for all of a state of another shape."""
    if named.unit is None or not described.shape or described.shape != named.spec.whole.shape:
        return torch.empty(described.shape, dtype=described.dtype)
    return named.interval(torch.empty(named.span_in_param.numel, dtype=described.dtype))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _sharded(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, state dicts hold this rank's intervals: copies on the CPU, except inside `sharing_memory()`."""
    return FullyShardedDataParallel.state_dict_type(
        model,
        "SHARDED",
        ShardedStateDictConfig(offload_to_cpu=True, sharded_as="interval"),
        ShardedOptimStateDictConfig(offload_to_cpu=True, sharded_as="interval"),
    )


# --- residuals --------------------------------------------------------------------------------------------------------

# [Note: saved residuals] The residuals of quantized gradients ([Note: error feedback]) differ between ranks and lie in
# flat parameters, so they fit only the same ranks and the same wrapping. The keys of their tensors begin with a digest
# of both and the rank's number: a rank that finds no such keys begins at zero.


class _Kind(NamedTuple):
    """One flat parameter: its key, its residuals, and their dtype and number by axis."""

    key: str
    residuals: Residuals
    dtype: torch.dtype
    numels: Mapping[str, int]


class _ResidualSection(Section):
    """[Note: saved residuals]"""

    is_optional = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__("error_feedback", {})
        self._units = dict(_units(model))
        self._has_others = False

    def take(self, *, in_use: bool) -> None:
        # Otherwise the checkpoint decides which exist (`expect`).
        kinds = self._kinds() if in_use else ()
        self.state = {f"{kind.key}.{axis}": each.cpu() for kind in kinds for axis, each in kind.residuals.held.items()}

    def expect(self, there: Mapping[str, TensorSpec]) -> None:
        saved = {key.partition(".")[2] for key in there if key.startswith(f"{self.name}.")}
        mine = ((f"{kind.key}.{axis}", kind, numel) for kind in self._kinds() for axis, numel in kind.numels.items())
        self.state = {key: torch.empty(numel, dtype=kind.dtype) for key, kind, numel in mine if key in saved}
        self._has_others = bool(saved) and not self.state

    def load(self, read: Mapping[str, Any]) -> None:
        if self._has_others:
            warn_once_per_job(
                "the checkpoint has residuals of quantized gradients (reduce_error_feedback) from other ranks, or of "
                "units with another wrapping: residuals start at zero again"
            )
        for kind in self._kinds():
            own = {axis: self.state.get(f"{kind.key}.{axis}") for axis in kind.numels}
            kind.residuals.load({axis: each for axis, each in own.items() if each is not None})

    def _kinds(self) -> Iterator[_Kind]:
        facts = [(name, *_facts(unit)) for name, unit in self._units.items()]
        prefix = f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.{dist.get_rank()}"
        for name, unit in self._units.items():
            handles = [handle for handle in unit.handles if handle.precision.error_feedback]
            for number, (handle, residuals) in enumerate(zip(handles, residuals_of(unit), strict=True)):
                numels = residual_numels(handle.layout.shard_numel, unit.axes.of(handle))
                yield _Kind(f"{prefix}.{name or 'root'}.{number}", residuals, handle.precision.reduce, numels)


def _facts(unit: Unit) -> Iterator[object]:
    """The facts about `unit` that saved residuals must match."""
    for groups in unit.axes.all:
        for axis in (groups.shard, groups.replicate):
            yield axis and axis.ranks
    for handle in unit.handles:
        yield handle.layout.digest(), handle.precision.reduce


def _units(model: nn.Module) -> Iterator[tuple[str, Unit]]:
    for name, module in model.named_modules():
        if isinstance(unit := module.__dict__.get("_unit"), Unit):
            yield clean(name), unit


def _has_residuals(model: nn.Module) -> bool:
    """Whether gradients of `model` are reduced with error feedback."""
    return any(residuals_of(unit) for _, unit in _units(model))


def sections_of(model: Any, optimizer: Any) -> list[Section]:
    """The sections for the arguments that users give.

    Raises:
        ConfigTypeError, ConfigValueError: arguments of a wrong type, or an optimizer without its model.
    """
    found: list[Section] = []
    if isinstance(model, nn.Module):
        found.append(_ModelSection(model))
    elif isinstance(model, Mapping):
        found.append(Section("model", model))
    elif model is not None:
        refuse_type("model", model, "a module, or a state dict")
    if isinstance(optimizer, Optimizer):
        if not isinstance(model, nn.Module):
            raise ConfigValueError(
                "optimizer: its state is saved by the names of the model's parameters; pass model= as a module, too"
            )
        found.append(_OptimizerSection(optimizer, model))
    elif isinstance(optimizer, Mapping):
        found.append(Section("optimizer", optimizer))
    elif optimizer is not None:
        refuse_type("optimizer", optimizer, "an optimizer, or a state dict")
    if isinstance(model, nn.Module) and _has_residuals(model):
        found.append(_ResidualSection(model))
    return found
