"""A model, or some of its flat parameters, that get gradients while no optimizer steps on them: one warning.

[Note: unstepped] Param groups are often selected by name: those that end in "bias" get no weight decay, the others
some. Names of flat parameters all end in `_flat_param`, so such groups are empty, which torch accepts, and the model is
not trained. Modules inside of a unit list no parameters, so that a group of theirs is empty while others are not. The
warning comes only if nothing else explains it: between two backwards that reduced gradients an optimizer stepped that
holds other parameters of the model, or none with a gradient; no optimizer that exists holds those without a step; and
they were not written to. This excludes adversarial training of two models, gradients that are only read, manual updates
and optimizers of other libraries. Only the backwards around the first step of any optimizer are checked.

An optimizer with some original parameters has those that the program selected, so these count only all together.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from itertools import chain

import torch

from ...errors import few, one_rank_warns, warn_once
from ..agreement.agreement import agreement_of
from ..base.events import Observer
from ..base.fqns import fqn
from ..base.overrides import is_memoryless
from ..flat.flat_param import FlatParamHandle
from ..flat.param_refs import flat_name
from ..guards.optimizer_hooks import looking
from ..runtime.backward import Backward
from ..runtime.model import Model
from ..runtime.model_facts import steppable_of

SAMPLED = 64  # compared elements of a shard: they show writes that change no version


class _ParamSnapshot:
    """The parameters of one handle with gradients, at the end of a backward; `name`: of the flat parameter."""

    def __init__(self, handle: FlatParamHandle, name: str) -> None:
        self._handle, self.name = handle, name
        self._versions = handle.writes.all
        self._sample = self._elements()

    @property
    def unnamed(self) -> str:
        """Why a search for parameters by their names finds none of them; "" if it does."""
        return self._handle.face.words.names

    def is_in(self, held: set[int]) -> bool:
        """Whether an optimizer whose parameters have the ids `held` steps on any of them."""
        return not held.isdisjoint(map(id, self._handle.face.holders))

    def is_unchanged(self) -> bool:
        """Whether they were not written to. Waits for the device."""
        if self._handle.writes.all != self._versions or is_memoryless():  # there are no values to compare
            return False
        return torch.equal(self._sample, self._elements())

    def _elements(self) -> torch.Tensor:
        shard = self._handle.shard
        return shard.detach()[:: max(1, shard.numel() // SAMPLED)].clone()


class UnsteppedCheck(Observer):
    """Observes one model from its first gradients to the backward after an optimizer's first step."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._before: list[_ParamSnapshot] = []  # empty before the first gradients
        self._stepped = False  # any optimizer, since then
        self._stepper = ""  # one that left parameters out, in words

    def backward_ended(self, backward: Backward) -> None:
        """Take the snapshots, or compare them."""
        model = self._model()
        if model is None or not backward.sync:
            return
        if self._stepped:
            if self._stepper:
                self._warn(model)
            looking.discard(self)
            model.observers.remove(self)
        elif not self._before and backward.finisher.pending is None:  # to read a deferred gradient would wait for it
            self._before = [
                _ParamSnapshot(handle, fqn(unit.position.name, flat_name(kind)))
                for unit in model.units
                for kind, handle in enumerate(unit.handles)
                if any(p.grad is not None for p in handle.face.holders)
            ]
            if self._before:
                looking.add(self)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record whether `optimizer` leaves out parameters of this model, or steps on no gradient."""
        if (model := self._model()) is None or not self._before:
            return
        self._stepped = True
        groups, held = optimizer.param_groups, _held_by([optimizer])
        empty = f"{sum(not group['params'] for group in groups)} of its {len(groups)} param groups are empty"
        if any(id(parameter) in held for parameter in chain.from_iterable(map(steppable_of, model.units))):
            self._stepper = f"{type(optimizer).__name__} that stepped between them holds other parameters ({empty})"
        elif not any(parameter.grad is not None for group in groups for parameter in group["params"]):
            self._stepper = self._stepper or (
                f"{type(optimizer).__name__} that stepped between them does not hold any parameter with a gradient "
                f"({empty})"
            )

    def _warn(self, model: Model) -> None:
        """Warn of parameters that were not written to, and that no optimizer holds, one that steps later included."""
        unchanged = [each for each in self._before if each.is_unchanged()]
        if not unchanged:
            return  # without a look at all objects of this process
        held = _held_by(each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer))
        left = [each for each in unchanged if not each.is_in(held)]
        whole = len(left) == len(self._before)
        left = [each for each in left if whole or each.unnamed]
        if not left:
            return
        names = few([each.name for each in left])
        cause = "Pass parameters to the optimizer that were taken from model.named_parameters() after wrapping"
        if why := next((each.unnamed for each in left if each.unnamed), ""):
            cause = (
                f"The names of flat parameters end in '_flat_param' ({names}), {why}. Only "
                "parameters() of a wrapped module returns its flat parameter; modules inside of it do not"
            )
        with one_rank_warns(this_rank=agreement_of(model.agreement).peers.is_first):
            warn_once(
                "unstepped",
                f"no optimizer steps on {'the' if whole else 'some flat'} parameters of this model: they received "
                f"gradients in two backwards, and the {self._stepper}. {cause}. If this is intended, call "
                "requires_grad_(False) on them to avoid computing their gradients",
            )


def _held_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    return {id(parameter) for each in optimizers for group in each.param_groups for parameter in group["params"]}
