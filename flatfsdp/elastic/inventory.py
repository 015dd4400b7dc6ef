"""The elements that a rank has, at each refresh: found anew only when other tensors have them.

[Note: inventory] To find names, intervals and views of hundreds of tensors, and to encode them, takes half as long as
to copy them, and gives the same from step to step. So they are kept, with what they follow from: modules, parameters,
buffers, shards, and tensors of the optimizer. While these are the same objects at the same addresses, only what has not
the shape of a parameter (step counts, settings of groups) is read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from ..engine.base import _dtensor
from ..engine.base.plain_data import encode
from ..engine.guards.optimizer_hooks import wholes_of
from ..engine.models.walks import units_in
from ..engine.state.optim.param_map import OptimizedParam, ParamMap, groups_of
from .holding import Facts, Holding, Value, settings_of, value_in


class Inventory:
    """The elements of one rank."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self.forget()

    def forget(self) -> None:
        """Keep no tensor any more."""
        self._found: Holding | None = None
        self._entries = b""
        self._objects: list[Any] = []
        self._addresses: list[int] = []
        self._params: dict[str, OptimizedParam] = {}

    def holding(self) -> Holding:
        """The elements of this rank now, in place; the model is at rest.

        Raises:
            UsageError: as `Holding.of`.
        """
        sources = [*self._sources()]
        objects, memory = [each for each, _ in sources], [tensor for _, tensor in sources if tensor is not None]
        addresses, found = [tensor.data_ptr() for tensor in memory], self._found
        same = len(objects) == len(self._objects) and all(map(is_, objects, self._objects))
        if found is None or not same or addresses != self._addresses:
            self.forget()
            found = self._find(memory)
            self._objects, self._addresses = objects, addresses
            return found
        values: dict[str, dict[str, Value]] = {}
        for name, states in found.facts.values.items():
            param = self._params[name]
            state = self._states_of(param.parameter)
            now = param.pieces_of({each: state[each] for each in states})
            values[name] = {each: value_in(value) for each, value in now.items()}
        groups = tuple(settings_of(group) for group in self._groups)
        return Holding(Facts(found.facts.entries, values, groups), found.tensors)

    def _find(self, memory: Sequence[torch.Tensor]) -> Holding:
        found = Holding.of(self._model, self._optimizer)
        self._entries = encode(found.facts.entries)
        if self._optimizer is not None:
            self._params = {each.name: each for each in ParamMap(self._model, groups_of(self._model, self._optimizer))}
            if wholes_of(self._optimizer) is not None:
                return found  # with states of its own
        storages = {each.untyped_storage().data_ptr() for each in memory}
        in_place = all(each.untyped_storage().data_ptr() in storages for each in found.tensors)
        if in_place and all(each.data_ptr() or not each.numel() for each in memory):  # no class keeps them elsewhere
            self._found = found
        return found

    def _sources(self) -> Iterator[tuple[Any, torch.Tensor | None]]:
        """The objects that names and intervals follow from; with the memory of elements, where they have it."""
        for unit in units_in(self._model):
            yield from ((handle.shard, handle.shard) for handle in unit.handles)
        for module in self._model.modules():
            yield module, None
            for each in (*module._parameters.values(), *module._buffers.values()):
                yield each, _memory_of(each)
        for group in self._groups:
            for parameter in group["params"]:
                yield parameter, None
                for name, value in self._states_of(parameter).items():
                    yield name, None
                    memory = _memory_of(value)
                    yield (type(value) if memory is None else value), memory

    @property
    def _groups(self) -> Sequence[dict[str, Any]]:
        return self._optimizer.param_groups if self._optimizer is not None else ()

    def _states_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        assert self._optimizer is not None
        return self._optimizer.state.get(parameter, {})

    def encoded(self, facts: Facts) -> bytes:
        """The `facts` of the last holding, for `Facts.decoded`."""
        return encode((self._entries, facts.values, facts.groups))


def _memory_of(value: Any) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    return _dtensor.local_of(value) if _dtensor.is_dtensor(value) else value
