"""A model and its optimizer as parts of a checkpoint: what this rank owns of them, and how they take it back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..engine.base.fqns import clean
from ..engine.config.state_dict_configs import ShardedOptimStateDictConfig, ShardedStateDictConfig
from ..engine.state.model.held_in_place import as_held, params_held_in_place
from ..engine.state.model.types import sharing_memory
from ..engine.state.named_param import NamedParam, named_buffers, named_state
from ..engine.state.optim.descriptions import value_of
from ..engine.state.optim.load_plan import TensorSpec
from ..engine.state.owned_interval import OwnedInterval
from ..errors import CheckpointError, ConfigValueError, refuse_type
from ..fully_sharded_data_parallel import FullyShardedDataParallel
from .nested import flatten
from .residuals import ResidualSection, has_residuals
from .section import Section


class _ModelSection(Section):
    def __init__(self, model: nn.Module) -> None:
        super().__init__("model", {})
        self._model = model

    def take(self, *, in_use: bool) -> None:
        with _sharded(self._model), sharing_memory() if in_use else nullcontext():
            self._own: dict[str, Any] = self._model.state_dict()
        self._held = self._take_held(in_use=in_use)
        named = [each.names for each in named_state(self._model)]
        buffers = [each.names for each in named_buffers(self._model)]
        named += buffers
        known = {name for names in named for name in names}
        # What modules add beside parameters and buffers: it may be in use, and copies of it are filled.
        self._added = {} if in_use else {key: each for key, each in self._own.items() if _is_added(key, each, known)}
        self._own.update((key, each.clone()) for key, each in self._added.items())
        # Around the outermost wrapper modules of torch.compile show their prefix.
        self.state = {clean(key): each if _is_tensor(each) else value_of(each) for key, each in self._own.items()}
        self.buffers = {name for names in buffers for name in names}
        self.ties = {name: names[0] for names in named for name in names[1:] if {name, names[0]} <= self.state.keys()}

    def _take_held(self, *, in_use: bool) -> dict[str, NamedParam]:
        """Replace what modules hold of their units themselves by what this rank owns of it; the parameters, by key."""
        named = params_held_in_place(self._model)
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
        given = {**self._own, **{key: as_held(each, self._own[key]) for key, each in self._held.items()}}
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
                f"modules do not load what they add to the state dict: {', '.join((missing + others)[:3])} "
                f"({len(missing + others)} in all), and it is not what they have. Make the model as the run did that "
                "saved (a quantised base of the same weights), and load then"
            )

    def _held_by_no_unit(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Parameters and buffers outside of units themselves, with what was read, to be assigned by key: optimizers may
        hold them. Those on the meta device are made on `device`."""
        outside = (each for each in [*named_state(self._model), *named_buffers(self._model)] if each.unit is None)
        leaves = {name: each.leaf for each in outside for name in each.names}
        given: dict[str, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}  # one that has several names stays one
        for key, value in self._own.items():
            leaf = leaves.get(clean(key))
            if leaf is None or not _is_tensor(value):
                continue
            if id(leaf) not in made:
                made[id(leaf)] = _filled(leaf, value, device)
            given[key] = made[id(leaf)]
        return given


def _filled(leaf: torch.Tensor, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`leaf` with that value; on the meta device, what takes its place on `device`."""
    if leaf.is_meta:
        placed = value.to(device)
        return nn.Parameter(placed, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else placed
    with torch.no_grad():
        return leaf.copy_(value)


def _is_added(key: str, value: Any, known: Collection[str]) -> bool:
    return _is_tensor(value) and not isinstance(value, OwnedInterval) and clean(key) not in known


class _OptimizerSection(Section):
    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        super().__init__("optimizer", {})
        self._optimizer, self._model = optimizer, model

    def take(self, *, in_use: bool) -> None:
        with _sharded(self._model), sharing_memory() if in_use else nullcontext():
            self.state = FullyShardedDataParallel.optim_state_dict(self._model, self._optimizer)

    def expect(self, there: Mapping[str, TensorSpec]) -> None:
        # The checkpoint decides which parameters have state: whose gradients were None there and here may differ.
        # This optimizer decides which state they have: of another one it must not take any.
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
        kinds = {name: _tensors_in(values) for name, values in own.items()}
        state = {name: own[name] for name, tensors in kinds.items() if not tensors}
        for name, inside in found.items():
            if name in own:
                state[name] = own[name]
            elif inside.keys() in kinds.values():
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
    """Which of `names` the `key` begins with; the longest one, for names may begin with others."""
    parts = key.split(".")
    candidates = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((name for name in candidates if name in names), None)


def _target(named: NamedParam, described: TensorSpec) -> torch.Tensor:
    """Memory for what this rank owns of a state of a parameter; for all of a state of another shape."""
    if named.unit is None or not described.shape or described.shape != named.spec.whole.shape:
        return torch.empty(described.shape, dtype=described.dtype)
    return named.interval(torch.empty(named.span_in_param.numel, dtype=described.dtype))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _sharded(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, state dicts hold what this rank owns, in memory of its own on the CPU outside of `sharing_memory()`."""
    return FullyShardedDataParallel.state_dict_type(
        model,
        "SHARDED",
        ShardedStateDictConfig(offload_to_cpu=True, sharded_as="interval"),
        ShardedOptimStateDictConfig(offload_to_cpu=True, sharded_as="interval"),
    )


def parts_of(model: Any, optimizer: Any) -> list[Section]:
    """The parts, for arguments as users give them.

    Raises:
        ConfigTypeError, ConfigValueError: arguments of a wrong type, or an optimizer without its model.
    """
    parts: list[Section] = []
    if isinstance(model, nn.Module):
        parts.append(_ModelSection(model))
    elif isinstance(model, Mapping):
        parts.append(Section("model", model))
    elif model is not None:
        refuse_type("model", model, "a module, or a state dict")
    if isinstance(optimizer, Optimizer):
        if not isinstance(model, nn.Module):
            raise ConfigValueError(
                "optimizer: its state is saved by the names of the model's parameters; pass model= as a module, too"
            )
        parts.append(_OptimizerSection(optimizer, model))
    elif isinstance(optimizer, Mapping):
        parts.append(Section("optimizer", optimizer))
    elif optimizer is not None:
        refuse_type("optimizer", optimizer, "an optimizer, or a state dict")
    if isinstance(model, nn.Module) and has_residuals(model):
        parts.append(ResidualSection(model))
    return parts
