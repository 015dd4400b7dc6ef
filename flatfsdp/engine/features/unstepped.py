"""A model that gets gradients while optimizers step on nothing, or on some of its flat parameters alone: one warning.

[Note: unstepped] Param groups are often picked by name: those that end in "bias" get no weight decay, the others some.
Names of flat parameters all end in `_flat_param`, so such groups are empty, which torch accepts, and the model stays
what it was. It comes only where nothing else explains it: between two backwards that reduced gradients of the model
an optimizer stepped that holds no parameter with a gradient; no optimizer stepped, or exists, that holds a parameter of
the model; and no parameter was written to. Games of two models, gradients that are only looked at, updates by hand and
optimizers of other libraries are none of it. Looked at are the backwards around the first step of any optimizer, and
nothing after them.

Where an optimizer steps on some flat parameters of the model, the same is looked for in each of the others: modules
inside of a unit list nothing, so that a group made of theirs is empty beside others that are not. Of original
parameters an optimizer that has some holds what the program chose.
"""

from __future__ import annotations

import gc
import weakref

import torch

from ...errors import few, one_rank_warns, warn_once
from ..base.events import Observer
from ..base.fqns import fqn
from ..flat.faces import FlatFace
from ..flat.flat_param import FlatParamHandle
from ..flat.param_refs import flat_name
from ..runtime.backward import Backward
from ..runtime.model import Model
from ..runtime.optimizer_hooks import looking

SAMPLED = 64  # elements of a shard that show a write which leaves no trace in versions


class _ParamSnapshot:
    """The parameters of one handle that has gradients, as a backward left them; `name`: that of the flat one."""

    def __init__(self, handle: FlatParamHandle, name: str) -> None:
        self._handle, self.name = handle, name
        self._versions = handle.writes.all
        self._sample = self._elements()

    @property
    def is_flat(self) -> bool:
        """Whether they are one flat parameter."""
        return self._handle.face.is_flat

    def is_in(self, held: set[int]) -> bool:
        """Whether an optimizer that holds these, by their ids, steps on any of them."""
        return not held.isdisjoint(map(id, self._handle.face.holders))

    def is_unchanged(self) -> bool:
        """Whether nobody has written to them. Waits for the device."""
        return self._handle.writes.all == self._versions and torch.equal(self._sample, self._elements())

    def _elements(self) -> torch.Tensor:
        shard = self._handle.shard
        return shard.detach()[:: max(1, shard.numel() // SAMPLED)].clone()


class UnsteppedCheck(Observer):
    """Looks after one model from its first gradients to the backward after an optimizer's first step."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._before: list[_ParamSnapshot] = []  # empty before the first gradients
        self._stepped = False  # any optimizer, since then
        self._in_vain = ""  # one that found no gradient, in words
        self._stepper = ""  # one that holds some of the model, in words; `_before` is of flat parameters since then

    def backward_ended(self, backward: Backward) -> None:
        """Gradients of a backward are there."""
        model = self._model()
        if model is None or not backward.sync:
            return
        if self._stepped:
            if self._stepper:
                _warn_of_some([each for each in self._before if each.is_unchanged()], model, self._stepper)
            elif self._in_vain and all(each.is_unchanged() for each in self._before):
                _warn(model, self._in_vain)
            self._end(model)
        elif not self._before and not backward.deferred:  # to read a deferred gradient is to wait for it
            self._before = [
                _ParamSnapshot(handle, fqn(unit.place.name, flat_name(kind)))
                for unit in model.units
                for kind, handle in enumerate(unit.handles)
                if any(p.grad is not None for p in handle.face.holders)
            ]
            if self._before:
                looking.add(weakref.ref(self, looking.discard))

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Sees whether it steps on this model, or on nothing."""
        model = self._model()
        if model is None or not self._before:
            return
        self._stepped = True
        groups = optimizer.param_groups
        empty = sum(not group["params"] for group in groups)
        if _holds_some_of(model, optimizer):
            held = _held_by(optimizer)
            self._before = [each for each in self._before if each.is_flat and not each.is_in(held)]
            what = f"{empty} of its {len(groups)} param groups are empty"
            self._stepper = f"{type(optimizer).__name__} has others ({what})"
            if not self._before:
                self._end(model)
        elif not any(parameter.grad is not None for group in groups for parameter in group["params"]):
            self._in_vain = (
                f"{type(optimizer).__name__} that stepped between them holds no parameter with a gradient "
                f"({empty} of its {len(groups)} param groups are empty)"
            )

    def _end(self, model: Model) -> None:
        looking.discard(weakref.ref(self))
        model.observers.remove(self)
        self._before = []


def _held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _every_optimizer() -> list[torch.optim.Optimizer]:
    return [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]


def _holds_some_of(model: Model, optimizer: torch.optim.Optimizer) -> bool:
    held = _held_by(optimizer)
    return any(id(parameter) in held for parameter in model.steppable)


def _warn_of_some(left: list[_ParamSnapshot], model: Model, stepper: str) -> None:
    held = set[int]().union(*map(_held_by, _every_optimizer() if left else ()))  # those that step later, too
    names = [each.name for each in left if not each.is_in(held)]
    if names:
        with one_rank_warns(this_rank=model.agreement.peers.is_first):
            warn_once(
                "unstepped in part",
                f"no optimizer steps on some flat parameters of this model ({few(names)}): they have got gradients in "
                f"two backwards, and the {stepper}. A flat parameter is listed by the module that is wrapped, and what "
                "is inside of that lists none of it. Take all of model.parameters(), wrap modules that need a param "
                f"group of their own{FlatFace.words.or_remedy}. If it is meant, requires_grad_(False) on them saves "
                "their gradients",
            )


def _warn(model: Model, in_vain: str) -> None:
    if any(_holds_some_of(model, each) for each in _every_optimizer()):
        return  # it steps later, after some backwards more perhaps
    cause = "Take them from model.named_parameters(), after wrapping"
    if any(handle.face.is_flat for unit in model.units for handle in unit.handles):
        names = [f"{unit.place.name}._flat_param".lstrip(".") for unit in model.units if unit.handles]
        cause = f"Names of flat parameters end in '_flat_param' ({few(names)}), {FlatFace.words.names}"
    with one_rank_warns(this_rank=model.agreement.peers.is_first):
        warn_once(
            "unstepped",
            "no optimizer steps on the parameters of this model: it has got gradients in two backwards, and the "
            f"{in_vain}. {cause}",
        )
