"""Faces whose holders are other objects than the leaves, each in the other's place in modules.

[Note: two lives] A *holder* is always this rank's piece of a parameter: listed at rest, and what optimizers step on.
Its *leaf* is in the modules' places while the unit is unsharded, and autograd accumulates in it. The user's own object
is the holder of a `PieceFace`, or was replaced by a `DTensorFace`. Two faces have no such pairs: the leaves of a
`FlatFace` are the user's own parameters, with one flat parameter as their holder; and where the shard is the whole
parameter and nothing is cast, leaf and holder are one object (`OriginalFace`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, NamedTuple

from torch import nn

from ..base import _torch
from .faces import Face
from .param_refs import ParamRef

_REQUIRES_GRAD = attrgetter("requires_grad")
_GET, _UPDATE = dict.get, dict.update


class _Contents(NamedTuple):
    """Contents of places: by place; and by module's dictionary, for one update of all of its places."""

    held: list[nn.Parameter]
    by_module: list[dict[str, nn.Parameter]]


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Places that are updated without a call of a Python function for each.

    Attributes:
        held: the present object of each; the dictionary of each, its key there, and the index of its parameter.
        modules: each dictionary once.
        at_rest, computing: their contents.
        others: places in modules with their own method for setting a parameter, such as recurrent ones.
    """

    held: list[nn.Parameter]
    dictionaries: list[dict[str, Any]]
    names: list[str]
    indices: list[int]
    modules: list[dict[str, Any]]
    at_rest: _Contents
    computing: _Contents
    others: list[tuple[ParamRef, int]]


class PairedFace(Face):
    """One holder for each leaf. [Note: two lives]

    Modules hold the leaves while a unit computes, else the holders. Their places change together, four times in a step.
    """

    leaves_are_private = True

    def __init__(self, leaves: Sequence[nn.Parameter], holders: list[nn.Parameter]) -> None:
        """`holders`: the list of them, which may change."""
        self.leaves = leaves
        self.holders = holders
        self.flagged: Sequence[nn.Parameter] = holders
        self._index = {id(leaf): i for i, leaf in enumerate(leaves)}
        self._places: list[tuple[ParamRef, int]] = []
        self._slots: _Slots | None = None
        self._listed: bool | None = None  # whether the places had the leaves when they were last changed
        self.computes = self._reached = False  # modules hold the leaves; also since flags were last followed
        self.flags = self._followed = tuple(map(_REQUIRES_GRAD, leaves))
        self.counters = []

    # -- modules -----------------------------------------------------------------------------------------------------

    def put(self, param_ref: ParamRef) -> None:
        index = self._index[id(param_ref.leaf)]
        self._slots = None  # its module may have another dictionary now
        if not any(param_ref is each for each, _ in self._places):
            self._places.append((param_ref, index))
            param_ref.keeps_place = True
        param_ref.hold((self.leaves if self.computes else self.holders)[index])

    def leave(self, param_ref: ParamRef) -> None:
        self._slots = None
        self._places = [each for each in self._places if each[0] is not param_ref]
        param_ref.hold_in([param_ref.held], 0)

    def compute(self) -> None:
        self.computes, self.flags, self.flagged = True, None, self.leaves
        if self._listed is not True:
            self._listed = True
            slots = self._slots or self._find_slots()
            if slots.others or any(map(is_not, map(_GET, slots.dictionaries, slots.names), slots.held)):
                self._hold_unless_replaced(slots, slots.computing, self.leaves)
            else:
                slots.held[:], by_module = slots.computing
                deque(map(_UPDATE, slots.modules, by_module), 0)

    def rest(self) -> None:
        if self.computes:
            with _torch.as_plain_tensors():  # leaves may be hidden
                if tuple(map(_REQUIRES_GRAD, self.leaves)) != self._followed:
                    self._reached = True
                    self.follow_requires_grad()
        self.computes = self._reached = False
        self.flags, self.flagged = self._followed, self.holders
        if self._listed is not False:
            self._listed = False
            slots = self._slots or self._find_slots()
            if slots.others or any(map(is_not, map(_GET, slots.dictionaries, slots.names), slots.held)):
                self._hold_unless_replaced(slots, slots.at_rest, self.holders)
            else:
                slots.held[:], by_module = slots.at_rest
                deque(map(_UPDATE, slots.modules, by_module), 0)

    def _hold_unless_replaced(self, slots: _Slots, contents: _Contents, parameters: Sequence[nn.Parameter]) -> None:
        """Let all places hold `contents`, those of `parameters`, except places where users have put another object:
        these are found at rest."""
        entries = zip(slots.dictionaries, slots.names, slots.held, contents.held, strict=True)
        for dictionary, name, before, now in entries:
            if dictionary.get(name) is before:
                dictionary[name] = now
        slots.held[:] = contents.held
        for param_ref, index in slots.others:
            if param_ref.current is param_ref.held:
                param_ref.hold(parameters[index])
            else:
                param_ref.held = parameters[index]

    def displaced(self) -> set[int]:
        """The indices of parameters in whose places modules hold other objects than the last shown. Modules with their
        own method for setting parameters are left out."""
        slots = self._slots or self._find_slots()
        found = map(_GET, slots.dictionaries, slots.names)
        others = map(is_not, found, slots.held)
        return set(compress(slots.indices, others))

    def take_back(self) -> None:
        slots = self._slots or self._find_slots()
        for dictionary, name, held in zip(slots.dictionaries, slots.names, slots.held, strict=True):
            if isinstance(dictionary.get(name), nn.Parameter):  # else it is a tensor made from the leaf, or deleted
                dictionary[name] = held

    def _find_slots(self) -> _Slots:
        refs, held = list[ParamRef](), list[nn.Parameter]()
        dictionaries, indices, others = list[dict[str, Any]](), list[int](), []
        for param_ref, index in self._places:
            module = param_ref.module_ref()
            if module is None or type(module).__setattr__ is not nn.Module.__setattr__:
                others.append((param_ref, index))
                continue
            refs.append(param_ref)
            held.append(param_ref.held)
            dictionaries.append(module._parameters)
            indices.append(index)
        for number, param_ref in enumerate(refs):
            param_ref.hold_in(held, number)
        names = [param_ref.attribute for param_ref in refs]
        modules = list({id(each): each for each in dictionaries}.values())

        def contents(parameters: Sequence[nn.Parameter]) -> _Contents:
            shown = [parameters[index] for index in indices]
            taken: dict[int, dict[str, nn.Parameter]] = {id(each): {} for each in modules}
            for dictionary, name, parameter in zip(dictionaries, names, shown, strict=True):
                taken[id(dictionary)][name] = parameter
            return _Contents(shown, list(taken.values()))

        at_rest, computing = contents(self.holders), contents(self.leaves)
        self._slots = _Slots(held, dictionaries, names, indices, modules, at_rest, computing, others)
        return self._slots

    # -- flags -------------------------------------------------------------------------------------------------------

    def follow_requires_grad(self, *, of_leaves: bool = True) -> None:
        with _torch.as_plain_tensors():
            asked = tuple(map(_REQUIRES_GRAD, self.holders))
            found = tuple(map(_REQUIRES_GRAD, self.leaves)) if self._reached else self._followed
        self._reached = self.computes
        if asked != found:
            # Users set it on the parameters that modules hold: the leaves between a forward and its backward, else the
            # holders. The flag that differs from their common value is the one that was set.
            flags = list(asked)
            for i, (one, other) in enumerate(zip(asked, found, strict=True)):
                if one is not other:
                    flags[i] = not self._followed[i]
                    self.holders[i].requires_grad_(flags[i])
                    self.leaves[i].requires_grad_(flags[i])
            asked = tuple(flags)
        self._followed = asked
        if not self.computes:
            self.flags = asked
