"""Inputs of forwards that are cast, or moved to another device, in the containers of the caller.

[Note: substitutes] A tensor that is cast for the forward of a unit has a *substitute* there: one, under however many
names it is given. Lists, mappings and dataclasses are the caller's own objects, in which substitutes take the places of
their originals for the time of the forward. After it, also after an exception, each original returns to where its
substitute is then, and gets the values that the forward has written to that; entries that the forward has written stay.
Tuples, frozen dataclasses and read-only mappings cannot be written to: the forward gets copies of them, with the same
lists and dictionaries inside.

A checkpoint inside of the forward refers to the containers, and reads them again when its part is recomputed. So the
substitutes also take these places from the time when a backward reaches the unit until that backward is over.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base import _torch
from ..base._functorch import inside
from ..base.events import Observer
from ..base.nested_tensors import Known, containers_in, map_tensors
from ..runtime.inputs import Given, Inputs
from ..runtime.model import Model, model_of
from ..runtime.unit import Unit
from ..schedule.forward_schedule import ForwardPass


@dataclass(slots=True)
class _Pair:
    """A tensor and its substitute, with the version and the graph of that when the values of both were last equal."""

    original: torch.Tensor
    substitute: torch.Tensor
    version: int
    node: Any


class Substitutes:
    """The substitutes in one call.

    Attributes:
        containers: those of the caller, by their ids.
    """

    # Assigned after the construction, as those of `Given`.
    containers: dict[int, Any]
    _make: Callable[[torch.Tensor], torch.Tensor]
    _pairs: dict[int, _Pair]  # by the id of the original
    _copies: Sequence[tuple[Any, Any]] = ()  # of containers that cannot be written to, with their originals
    _present = False

    def swap_in(
        self, make: Callable[[torch.Tensor], torch.Tensor], containers: dict[int, Any], inputs: Inputs
    ) -> Inputs:
        """`inputs` with substitutes. `make` returns that of a tensor; the tensor itself if it needs none."""
        self.containers, self._make, self._pairs = containers, make, {}
        args, kwargs = inputs
        known: Known = {}
        self._present = True
        try:
            args = tuple([self._map(self._of, each, known) for each in args])
            return args, {name: self._map(self._of, each, known) for name, each in kwargs.items()}
        finally:
            self._copies = [(old, new) for old, new in known.values() if new is not old]

    def swap_out(self) -> None:
        """Let the originals return, with the values that were written to their substitutes."""
        if not self._present:
            return
        self._present = False
        for pair in self._pairs.values():
            if pair.substitute._version != pair.version:
                inside(_write_back, pair)
        if self.containers:
            # What the forward has put into the containers may have substitutes in it, too.
            self.containers = containers_in((*self.containers.values(),))
            self._replace({id(pair.substitute): pair.original for pair in self._pairs.values()}, back=True)

    def swap_in_again(self) -> None:
        """Let the substitutes take the places of those originals that are in the containers now."""
        self._present = True
        self._replace({key: pair.substitute for key, pair in self._pairs.items()}, back=False)

    def _replace(self, tensors: dict[int, torch.Tensor], *, back: bool) -> None:
        pairs = [(new, old) for old, new in self._copies] if back else self._copies
        known: Known = {id(each): (each, other) for each, other in pairs}
        for each in self.containers.values():
            self._map(lambda tensor: tensors.get(id(tensor), tensor), each, known)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor], tree: Any, known: Known) -> Any:
        return map_tensors(change, tree, in_place=self.containers, known=known)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        if (pair := self._pairs.get(id(tensor))) is not None:
            return pair.substitute
        made = self._make(tensor)
        if made is not tensor:
            self._pairs[id(tensor)] = _Pair(tensor, made, made._version, made.grad_fn)
        return made


class SharedGiven(Given):
    """The inputs of one call, of which the caller has the same containers as the forward."""

    _substitutes: Substitutes | None = None

    def _cast(self, make: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        assert self._found is not None  # in this call
        self._substitutes = made = Substitutes()
        return made.swap_in(make, self._found[1], (self.args, self.kwargs))

    def ended(self, unit: Unit | None) -> None:
        if (substitutes := self._substitutes) is None:
            return
        substitutes.swap_out()
        if unit is not None and substitutes.containers and torch.is_grad_enabled():
            model = model_of(unit)
            running = model.iteration.record.running
            kept = model.observers.find(KeptSubstitutes)
            if kept is None:
                kept = KeptSubstitutes(model)
                model.observers.add(kept)
            kept.kept.append((unit, substitutes, weakref.ref(running) if running is not None else None))


def _write_back(pair: _Pair) -> None:
    """Write the values of a substitute, which the forward has written, to its original."""
    original, written = pair.original, pair.substitute
    with_graph = written.grad_fn is not pair.node
    pair.version, pair.node = written._version, written.grad_fn
    if with_graph and original.is_leaf and original.requires_grad:
        return  # written as an intermediate result: torch refuses to write to such a leaf
    if any(step == 0 and size > 1 for size, step in zip(original.shape, original.stride(), strict=True)):
        return  # expanded; the same
    with torch.inference_mode(original.is_inference()), torch.set_grad_enabled(with_graph):
        if original.shape != written.shape:  # by `out=`
            original.resize_(written.shape)
        original.copy_(written if with_graph else written.detach())


class KeptSubstitutes(Observer):
    """The substitutes of the forwards that a backward may recompute in part; attached while there are any.

    Attributes:
        kept: those of calls with containers, with the unit, and the pass that lives as long as its graph (None: the
            running backward).
    """

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self.kept: list[tuple[Unit, Substitutes, weakref.ref[ForwardPass] | None]] = []
        self._again: list[Substitutes] = []  # in the places of their originals now

    def unit_reached(self, unit: Unit) -> None:
        """Let the substitutes take their places again."""
        for each, substitutes, _ in self.kept:
            if each is unit and substitutes not in self._again:
                self._again.append(substitutes)
                substitutes.swap_in_again()

    def graph_left(self) -> None:
        """Let the originals return."""
        while self._again:
            self._again.pop().swap_out()
        self.kept = [kept for kept in self.kept if kept[2] is not None]

    def step_begins(self, unit: Unit | None) -> bool:
        """Drop those whose graph is gone, and containers that neither the program nor a checkpoint refers to: outputs
        in them keep that graph."""
        model = self._model()
        if unit is None or model is None or _torch.in_backward():
            return False
        used_up = torch.is_grad_enabled() and model.iteration.record.consumed  # a backward has used the graphs
        self.kept = [] if used_up else [kept for kept in self.kept if kept[2] is None or kept[2]() is not None]
        own = Counter([key for _, each, _ in self.kept for key in each.containers])
        (alone,) = map(sys.getrefcount, [[]])
        for _, each, _ in self.kept:
            counts = [*map(sys.getrefcount, each.containers.values())]
            used = [count > alone - 1 + own[key] for key, count in zip(each.containers, counts, strict=True)]
            each.containers = {
                key: found for (key, found), is_used in zip(each.containers.items(), used, strict=True) if is_used
            }
        self.kept = [kept for kept in self.kept if kept[1].containers]
        if not (self.kept or self._again):
            model.observers.remove(self)
        return False
