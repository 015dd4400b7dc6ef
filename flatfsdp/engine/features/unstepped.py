"""A model that gets gradients while optimizers step on nothing: one warning.

[Note: unstepped] Param groups are often picked by name: those that end in "bias" get no weight decay, the others some.
Names of flat parameters all end in `_flat_param`, so such groups are empty, which torch accepts, and the model stays
what it was. It comes only where nothing else explains it: between two backwards that reduced gradients of the model
an optimizer stepped that holds no parameter with a gradient; no optimizer stepped, or exists, that holds a parameter of
the model; and no parameter was written to. Games of two models, gradients that are only looked at, updates by hand and
optimizers of other libraries are none of it. Looked at are the backwards around the first step of any optimizer, and
nothing after them.
"""

from __future__ import annotations

import gc
import weakref

import torch

from ...errors import few, one_rank_warns, warn_once
from ..base.events import Observer
from ..flat.faces import FlatFace
from ..flat.flat_param import FlatParamHandle
from ..runtime.backward import Backward
from ..runtime.model import Model
from ..runtime.optimizer_hooks import looking

SAMPLED = 64  # elements of a shard that show a write which leaves no trace in versions


class _ParamSnapshot:
    """The parameters of one handle that has gradients, as a backward left them."""

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle
        self._versions = handle.writes.all
        self._sample = self._elements()

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

    def backward_ended(self, backward: Backward) -> None:
        """Gradients of a backward are there."""
        model = self._model()
        if model is None or not backward.sync:
            return
        if self._stepped:
            if self._in_vain and all(each.is_unchanged() for each in self._before):
                _warn(model, self._in_vain)
            self._end(model)
        elif not self._before and not backward.deferred:  # whoever reads a gradient that lingers waits for it
            handles = [handle for unit in model.units for handle in unit.handles]
            self._before = [
                _ParamSnapshot(each) for each in handles if any(p.grad is not None for p in each.face.holders)
            ]
            if self._before:
                looking.add(weakref.ref(self, looking.discard))

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Sees whether it steps on this model, or on nothing."""
        model = self._model()
        if model is None or not self._before:
            return
        if _holds_some_of(model, optimizer):
            self._end(model)
            return
        self._stepped = True
        groups = optimizer.param_groups
        if not any(parameter.grad is not None for group in groups for parameter in group["params"]):
            empty = sum(not group["params"] for group in groups)
            self._in_vain = (
                f"{type(optimizer).__name__} that stepped between them holds no parameter with a gradient "
                f"({empty} of its {len(groups)} param groups are empty)"
            )

    def _end(self, model: Model) -> None:
        looking.discard(weakref.ref(self))
        model.observers.remove(self)
        self._before = []


def _holds_some_of(model: Model, optimizer: torch.optim.Optimizer) -> bool:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in held for parameter in model.steppable)


def _warn(model: Model, in_vain: str) -> None:
    every = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    if any(_holds_some_of(model, each) for each in every):
        return  # it steps later, after some backwards more perhaps
    cause = "Take them from model.named_parameters(), after wrapping"
    if any(handle.face.is_flat for unit in model.units for handle in unit.handles):
        names = [f"{unit.name}._flat_param".lstrip(".") for unit in model.units if unit.handles]
        cause = f"Names of flat parameters end in '_flat_param' ({few(names)}), {FlatFace.words.names}"
    with one_rank_warns(this_rank=model.agreement.peers.is_first):
        warn_once(
            "unstepped",
            "no optimizer steps on the parameters of this model: it has got gradients in two backwards, and the "
            f"{in_vain}. {cause}",
        )
