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
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from ..base._functorch import inside
from ..base.nested_tensors import Known, containers_in, map_tensors, survey
from ..schedule.forward_schedule import ForwardPass

_VERSION, _REQUIRES_GRAD = attrgetter("_version"), attrgetter("requires_grad")

_PLAIN = {torch.Tensor}

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


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

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor], containers: dict[int, Any]) -> None:
        """`make` returns the substitute of a tensor; the tensor itself if it needs none."""
        self.containers = containers
        self._make = make
        self._pairs: dict[int, _Pair] = {}  # by the id of the original
        self._copies: list[tuple[Any, Any]] = []  # of containers that cannot be written to, with their originals
        self._present = False

    def take_places(self, inputs: Inputs) -> Inputs:
        """`inputs` with substitutes."""
        args, kwargs = inputs
        known: Known = {}
        self._present = True
        try:
            args = tuple([self._map(self._of, each, known) for each in args])
            return args, {name: self._map(self._of, each, known) for name, each in kwargs.items()}
        finally:
            self._copies = [(old, new) for old, new in known.values() if new is not old]

    def return_places(self) -> None:
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

    def take_places_again(self) -> None:
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


class Given:
    """The inputs of one call.

    Attributes:
        args, kwargs: with substitutes, if there are any.
        substitutes: None: no tensor has one.
    """

    # Assigned after the construction: a constructor would be one more call in each forward of a unit.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    substitutes: Substitutes | None = None
    # The tensors, and the containers except tuples by their ids, when first asked for.
    _found: tuple[list[torch.Tensor], dict[int, Any]] | None = None
    _known: Sequence[torch.Tensor] = ()  # all, and all substitutes
    _versions: Sequence[int] = ()  # of the originals

    def __contains__(self, key: object) -> bool:
        """Whether `key` is the id of a container, which remains the same object if the forward returns it."""
        return key in self._survey()[1]

    def _survey(self) -> tuple[list[torch.Tensor], dict[int, Any]]:
        if self._found is None:
            self._found = survey((*self.args, *self.kwargs.values()) if self.kwargs else self.args)
        return self._found

    @property
    def dtype(self) -> torch.dtype | None:
        """That of the first floating-point tensor."""
        return next((tensor.dtype for tensor in self._survey()[0] if tensor.is_floating_point()), None)

    def substitute(self, *, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Give the forward tensors on `device`, and floating-point ones in `dtype` (None: as they are). Differentiable.
        The caller may overwrite the originals at once, even pinned ones."""

        def needs(tensor: torch.Tensor) -> bool:
            return (device is not None and tensor.device != device) or (
                dtype is not None and tensor.dtype != dtype and tensor.is_floating_point()
            )

        def make(tensor: torch.Tensor) -> torch.Tensor:
            if not needs(tensor):
                return tensor
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():  # what is made inside has no version, to show writes
                    return tensor.to(device or tensor.device, target)
            return inside(tensor.to, device or tensor.device, target)

        tensors, containers = self._survey()
        if any([needs(tensor) for tensor in tensors]):
            self.substitutes = Substitutes(make, containers)
            self.args, self.kwargs = self.substitutes.take_places((self.args, self.kwargs))

    def return_places(self) -> None:
        """Let the originals return to the containers of the caller."""
        if self.substitutes is not None:
            self.substitutes.return_places()

    def trained(self) -> list[torch.Tensor]:
        """The tensors that require a gradient, as the forward gets them."""
        if self._found is None:
            values = (*self.args, *self.kwargs.values()) if self.kwargs else self.args
            # Plain tensors, as most units have, are found without a call.
            self._found = (list(values), {}) if set(map(type, values)) == _PLAIN else survey(values)
        self._known = originals = tensors = self._found[0]
        if self.substitutes is not None:
            tensors = survey((*self.args, *self.kwargs.values()))[0]
            self._known = originals + tensors
        try:
            self._versions = list(map(_VERSION, originals))
        except RuntimeError:  # some were made in inference mode
            self._versions = []
        return list(filter(_REQUIRES_GRAD, tensors))

    def made(self) -> list[torch.Tensor]:
        """The tensors with a graph that the forward has written to the inputs: more outputs. Precondition: `trained`
        was called before it."""
        originals, containers = self._found or self._survey()
        found: list[torch.Tensor] = []
        if self._versions and (versions := list(map(_VERSION, originals))) != self._versions:
            found = [each for each, a, b in zip(originals, versions, self._versions, strict=True) if a != b]
        if containers:
            known = set(map(id, self._known))
            found += [tensor for tensor in survey(containers.values())[0] if id(tensor) not in known]
        return [tensor for tensor in found if tensor.grad_fn is not None] if found else found


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


@dataclass(eq=False)
class KeptSubstitutes:
    """The substitutes of the forwards that a backward may recompute in part.

    Attributes:
        kept: those of calls with containers, with the unit, and the pass that lives as long as its graph (None: the
            running backward).
    """

    kept: list[tuple[object, Substitutes, weakref.ref[ForwardPass] | None]] = field(default_factory=list)
    _again: list[Substitutes] = field(default_factory=list)  # in the places of their originals now

    def keep(self, unit: object, substitutes: Substitutes, running: ForwardPass | None) -> None:
        """A forward of `unit` has ended, of which a graph remains."""
        if substitutes.containers:
            self.kept.append((unit, substitutes, weakref.ref(running) if running is not None else None))

    def before_backward(self, unit: object) -> None:
        """A backward reaches `unit`."""
        for each, substitutes, _ in self.kept:
            if each is unit and substitutes not in self._again:
                self._again.append(substitutes)
                substitutes.take_places_again()

    def after_backward(self) -> None:
        """The backward has ended, or failed."""
        while self._again:
            self._again.pop().return_places()
        self.kept = [kept for kept in self.kept if kept[2] is not None]

    def drop_unused(self, *, all_kept: bool) -> None:
        """Drop those whose graph is gone, and containers that neither the program nor a checkpoint refers to: outputs
        in them keep that graph. `all_kept`: a backward has used the graphs."""
        self.kept = [] if all_kept else [kept for kept in self.kept if kept[2] is None or kept[2]() is not None]
        own = Counter([key for _, each, _ in self.kept for key in each.containers])
        (alone,) = map(sys.getrefcount, [[]])
        for _, each, _ in self.kept:
            counts = [*map(sys.getrefcount, each.containers.values())]
            used = [count > alone - 1 + own[key] for key, count in zip(each.containers, counts, strict=True)]
            each.containers = {
                key: found for (key, found), is_used in zip(each.containers.items(), used, strict=True) if is_used
            }
        self.kept = [kept for kept in self.kept if kept[1].containers]
