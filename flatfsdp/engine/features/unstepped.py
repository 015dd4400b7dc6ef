"""A model that gets gradients while no optimizer steps on it, or only on some of its flat parameters: one warning.

[Note: unstepped] Param groups are often selected by name: those that end in "bias" get no weight decay, the others
some. Names of flat parameters all end in `_flat_param`, so such groups are empty, which torch accepts, and the model is
not trained. The warning comes only if nothing else explains this: between two backwards that reduced gradients of the
model an optimizer stepped that holds no parameter with a gradient; no optimizer stepped, or exists, that holds a
parameter of the model; and no parameter was written to. This excludes adversarial training of two models, gradients
that are only read, manual updates and optimizers of other libraries. Only the backwards around the first step of any
optimizer are checked.

If an optimizer steps on some flat parameters of the model, each of the others is checked in the same way: modules
inside of a unit list no parameters, so that a group of theirs is empty while other groups are not. For original
parameters this is not checked: an optimizer with some of them has those that the program selected.
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

SAMPLED = 64  # compared elements of a shard: they show writes that change no version


class _ParamSnapshot:
    """The parameters of one handle with gradients, at the end of a backward; `name`: of the flat parameter."""

    def __init__(self, handle: FlatParamHandle, name: str) -> None:
        self._handle, self.name = handle, name
        self._versions = handle.writes.all
        self._sample = self._elements()

    @property
    def is_flat(self) -> bool:
        """Whether they are one flat parameter."""
        return self._handle.face.is_flat

    def is_in(self, held: set[int]) -> bool:
        """Whether an optimizer whose parameters have the ids `held` steps on any of them."""
        return not held.isdisjoint(map(id, self._handle.face.holders))

    def is_unchanged(self) -> bool:
        """Whether they were not written to. Waits for the device."""
        return self._handle.writes.all == self._versions and torch.equal(self._sample, self._elements())

    def _elements(self) -> torch.Tensor:
        shard = self._handle.shard
        return shard.detach()[:: max(1, shard.numel() // SAMPLED)].clone()


class UnsteppedCheck(Observer):
    """Observes one model from its first gradients to the backward after an optimizer's first step."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._before: list[_ParamSnapshot] = []  # empty before the first gradients
        self._stepped = False  # any optimizer, since then
        self._in_vain = ""  # one that found no gradient, in words
        self._stepper = ""  # one that holds some of the model, in words; `_before` is of flat parameters since then

    def backward_ended(self, backward: Backward) -> None:
        """Take the snapshots, or compare them."""
        model = self._model()
        if model is None or not backward.sync:
            return
        if self._stepped:
            if self._stepper:
                _warn_of_some([each for each in self._before if each.is_unchanged()], model, self._stepper)
            elif self._in_vain and all(each.is_unchanged() for each in self._before):
                _warn(model, self._in_vain)
            self._end(model)
        elif not self._before and not backward.deferred:  # to read a deferred gradient would wait for it
            self._before = [
                _ParamSnapshot(handle, fqn(unit.place.name, flat_name(kind)))
                for unit in model.units
                for kind, handle in enumerate(unit.handles)
                if any(p.grad is not None for p in handle.face.holders)
            ]
            if self._before:
                looking.add(weakref.ref(self, looking.discard))

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record whether `optimizer` steps on this model, or on no gradient."""
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
            self._stepper = f"{type(optimizer).__name__} holds other parameters ({what})"
            if not self._before:
                self._end(model)
        elif not any(parameter.grad is not None for group in groups for parameter in group["params"]):
            self._in_vain = (
                f"{type(optimizer).__name__} that stepped between them does not hold any parameter with a gradient "
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
                f"no optimizer steps on some flat parameters of this model ({few(names)}): they received gradients in "
                f"two backwards, and the {stepper}. Only parameters() of a wrapped module returns its flat parameter; "
                "modules inside of it do not. Pass all of model.parameters() to the optimizer, wrap modules that need "
                f"their own param group{FlatFace.words.or_remedy}. If this is intended, call requires_grad_(False) on "
                "them to avoid computing their gradients",
            )


def _warn(model: Model, in_vain: str) -> None:
    if any(_holds_some_of(model, each) for each in _every_optimizer()):
        return  # it may step after more backwards
    cause = "Pass parameters to the optimizer that were taken from model.named_parameters() after wrapping"
    if any(handle.face.is_flat for unit in model.units for handle in unit.handles):
        names = [f"{unit.place.name}._flat_param".lstrip(".") for unit in model.units if unit.handles]
        cause = f"The names of flat parameters end in '_flat_param' ({few(names)}), {FlatFace.words.names}"
    with one_rank_warns(this_rank=model.agreement.peers.is_first):
        warn_once(
            "unstepped",
            "no optimizer steps on the parameters of this model: it received gradients in two backwards, and the "
            f"{in_vain}. {cause}",
        )
