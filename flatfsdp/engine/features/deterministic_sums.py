"""Sums of gradients that have the same bits on any number of ranks. [Note: deterministic sums]

[Note: deterministic sums] A step consists of the microbatches 0 to n - 1 of all ranks, each of them one forward and one
backward of one rank. Their gradients are added in the order of a tree over the indices ([Note: tree of microbatches])
and divided by n at the end. What a backward under `no_sync()` leaves is merged like the digits of a binary counter: the
next one adds to it if it has the other half of a sum, else it is taken away before. A reduction sends each rank its
pieces of the blocks that have remained, and each adds up what it gets. If that is not the whole step yet, it keeps its
piece of each block, and the reduction is a partial one ([Note: partial sums]): `.grad` is shown when it is complete.

Ranks learn who has which microbatches from one exchange, when a backward that reduces begins. A parameter without a
gradient in a microbatch counts as -0.0 there, which changes no bit of a sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...errors import UsageError, few
from ..agreement.agreement import agreement_of
from ..base import _torch
from ..base.events import Observer
from ..comm.sum_tree import SumTree
from ..guards import optimizer_hooks
from ..runtime.model import Model, model_of
from ..runtime.unit import Unit
from ..runtime.unit_state import Resolved
from .block_reducer import UNFORESEEN, BlockSums
from .deterministic_checks import WrittenBuffers, check_optimizer, check_options, check_units, kernels_of
from .microbatches import Ledger, Microbatch, Step, running


class DeterministicSums(Observer):
    """Attached to one model: follows the microbatches of its steps.

    Attributes:
        ledger: what is known of these.
    """

    def __init__(self, model: Model) -> None:
        self._ref = weakref.ref(model)
        self.ledger = Ledger(model)
        self._weight = 1.0
        self._backward: weakref.ref[Any] = weakref.ref(self)  # the last one that was seen
        self._partial: list[tuple[Unit, Resolved, Resolved]] = []
        self._has_reduced = False  # whether the last backward has
        self._kernels = ""  # by which this rank computes
        optimizer_hooks.looking.add(self)

    @property
    def description(self) -> str:
        return f"deterministic_sums=True with {kernels_of(self._model.resources.device)}"

    @property
    def _model(self) -> Model:
        """The model, which is there while it calls this object."""
        found = self._ref()
        assert found is not None
        return found

    # -- setup -------------------------------------------------------------------------------------------------------

    def setup_begins(self, units: Sequence[Unit]) -> None:
        check_units(units)
        for grads in (grads for unit in units for grads in unit.grads):
            grads.carried = BlockSums(grads, self.ledger)

    def options_changed(self) -> None:
        check_options(self._model.setup.units)

    # -- a microbatch ------------------------------------------------------------------------------------------------

    def training_begins(self, units: Sequence[Unit]) -> None:
        if running.value is None:
            return
        kernels = kernels_of(self._model.resources.device)
        self._kernels = self._kernels or kernels  # a switch may be set for microbatches alone
        if kernels != self._kernels:
            self.ledger.refuse(
                f"deterministic_sums=True: this rank computes with {kernels}, and did so with {self._kernels} in its "
                "first microbatch. Set threads and switches before, on all ranks alike"
            )

    def backward_reaches(self) -> None:
        model = self._model
        if model.iteration.backward is not None:
            return
        if model.backwards.weight != self._weight:
            raise UsageError(
                "deterministic_sums=True: the loop of flatfsdp.join() weighs the batches of ranks by itself. Leave it "
                "out: a rank without a microbatch runs any batch inside of microbatch(None, of=n)"
            )
        stands_in = running.value is not None and running.value.index is None
        self._weight = model.backwards.weight = 0.0 if stands_in else 1.0

    def backward_agreed(self, *, reduces: bool) -> None:
        """Of a reduction without a graph, of gradients that earlier backwards have left."""
        step = self.ledger.step
        if reduces and not _torch.in_backward() and step is not None and not step.is_complete:
            self._begin(None, reduces=True)

    def backward_begins(self, units: Sequence[Unit]) -> None:
        backward = self._model.iteration.backward
        if backward is None or backward is self._backward() or not backward.schedule.brings:
            return
        self._backward = weakref.ref(backward)
        if (microbatch := running.value) is None:
            self.ledger.refuse(
                "deterministic_sums=True: a backward ran outside of flatfsdp.microbatch(), which names the microbatch "
                "of the step it belongs to. Write: with flatfsdp.microbatch(index, of=n): loss = ...; loss.backward()"
            )
        microbatch.begun = True
        try:
            self._begin(microbatch, reduces=backward.sync)
        except UsageError as error:
            self._model.agreement.refuse(error)  # autograd does not pass it on to other ranks
            raise

    def _begin(self, microbatch: Microbatch | None, *, reduces: bool) -> None:
        """A backward begins; None: it only reduces."""
        ledger = self.ledger
        check_options(self._model.setup.units)  # again: a program may go on after an error
        self._restore()
        if ledger.step is not None and ledger.step.is_complete:
            self.check_complete("a backward of the next step")
            self.drop_step()
        with _torch.as_plain_tensors():  # parameters may refuse to be used
            self._follow_drops()
        if microbatch is not None and microbatch.again:
            if not reduces:
                ledger.refuse("a microbatch of an audit runs again while gradients are not to be synchronized")
            ledger.step = Step(SumTree(microbatch.of), exchanged=[{}])  # nobody adds anything
            self._sum_partially()
            return
        if ledger.step is None:
            if microbatch is None:
                return  # nothing to reduce
            ledger.step = Step(SumTree(microbatch.of))
        if microbatch is not None and (problem := ledger.step.begin(microbatch)):
            ledger.refuse(problem)
        index = microbatch.index if microbatch is not None else None
        with _torch.as_plain_tensors():
            for each in self._sums:
                each.begin(index, is_left=not self._has_reduced or each.since < len(ledger.step.exchanged))
        self._has_reduced = reduces
        if reduces:
            try:
                self._exchange(ledger.step)
            except RuntimeError as error:  # a connection broke: the report of another rank explains it
                self._model.agreement.explain(error)
                raise
            if not ledger.step.is_complete:
                self._sum_partially()

    @property
    def _sums(self) -> list[BlockSums]:
        every = [grads.carried for unit in self._model.units for grads in unit.grads]
        return [each for each in every if isinstance(each, BlockSums)]

    def _follow_drops(self) -> None:
        """Drop the step if users have dropped the gradients that its last backward has left in units."""
        step, dropped, left = self.ledger.step, [], False
        for grads in (each.grads for each in self._sums):
            filled = set(grads.slots.filled) if grads.accumulation.window_open else set()
            grads.stash_grads()  # drops what users have dropped
            left = left or bool(grads.slots.filled)
            if filled != grads.slots.filled:
                dropped.append(grads)
        if dropped and (left or (step is not None and step.exchanged)):
            self.ledger.refuse(
                f"deterministic_sums=True: .grad of unit {dropped[0].handle.label} was dropped between microbatches of "
                "a step, and other gradients of the step were not. To begin the step again, drop all by zero_grad() of "
                "the outermost module, on all ranks"
            )
        if dropped:
            self.drop_step()

    # -- ranks -------------------------------------------------------------------------------------------------------

    def _exchange(self, step: Step) -> None:
        """Learn the microbatches that all ranks have added. Collective."""
        groups, peers = self._model.outermost.groups, agreement_of(self._model.agreement).peers
        own = sorted(step.own - step.added_by([peers.rank]))
        run = range(own[0], own[-1] + 1, own[1] - own[0] if own[1:] else 1) if own else range(0)
        listed = 0 if own == [*run] else len(own)
        known = min(groups.shard.ranks), step.tree.leaves, listed, run.start, run.stop, run.step
        answers = peers.numbers_of_ranks(*known)
        if not self.ledger.groups:
            for rank, (first, *_) in answers.items():
                self.ledger.groups[rank] = frozenset(r for r, (other, *_) in answers.items() if other == first)
        sizes = {rank: leaves for rank, (_, leaves, *_) in answers.items()}
        if len(set(sizes.values())) > 1:
            texts = [f"rank {rank} has of={leaves}" for rank, leaves in sorted(sizes.items())]
            raise UsageError(f"deterministic_sums=True: microbatches of one step with different sizes: {few(texts)}")
        added = {rank: frozenset(range(*ends)) for rank, (_, _, _, *ends) in answers.items()}
        if lists := {rank: number for rank, (_, _, number, *_) in answers.items() if number}:  # no equal distances
            numbers = peers.numbers_of_ranks(*own[:listed], *[-1] * (max(lists.values()) - listed))
            added |= {rank: frozenset(numbers[rank]) - {-1} for rank in lists}
        step.exchange(added, of=1 if len(answers) == groups.world else groups.world)

    def _sum_partially(self) -> None:
        """Let the reductions of this backward be partial ones, since some microbatches are to come."""
        for unit in self._model.units:
            before = unit.resolved
            reducers = {handle: (scatter, None) for handle, (scatter, _) in before.reducers.items()}
            unit.resolved = replace(before, reducers=reducers, completes=frozenset())
            self._partial.append((unit, before, unit.resolved))

    def _restore(self) -> None:
        for unit, before, partial in self._partial:
            if unit.resolved is partial:
                unit.resolved = before
        self._partial.clear()

    # -- ends --------------------------------------------------------------------------------------------------------

    def backward_ends(self) -> None:
        """Refuse gradients that have come unforeseen. Keeps reductions from going on after a backward, too."""
        backward = self._model.iteration.backward
        if backward is None or backward.task == -1 or backward is self._backward():
            return
        if backward.schedule.brings:
            self.ledger.refuse(UNFORESEEN)

    def backward_ended(self, backward: Any) -> None:
        self._restore()

    def gradients_lost(self, units: Sequence[Unit]) -> None:
        self._restore()
        self.drop_step()

    def drop_step(self) -> None:
        """Drop all sums of the running step, partial ones too."""
        for each in self._sums:
            each.drop()
        self.ledger.step = None

    @contextmanager
    def again(self, index: int, of: int) -> Iterator[None]:
        """A context around the forward and the backward of a microbatch of a step that is complete: its gradients go
        through the reductions, where `Ledger.look` sees them, and are dropped there. Nothing is exchanged for them."""
        try:
            with running.being(Microbatch(index, of, again=True)):
                yield
        finally:
            self.drop_step()
            for each in self._sums:
                each.grads.accumulation.close_window()

    def check_complete(self, call: str) -> None:
        """Refuse a `call` that needs gradients while some microbatches of the step are to come, or if some units did
        not reduce theirs."""
        step = self.ledger.step
        if step is None:
            return
        if not step.is_complete:
            missing = step.missing
            which = f"microbatches {few(list(map(str, missing)))}" if missing else "a backward outside of no_sync()"
            raise UsageError(
                f"{call}: deterministic_sums=True, and the sum of the step's gradients is not complete: of "
                f"{step.tree.leaves} microbatches, {which} did not come. Run each index from 0 to "
                f"{step.tree.leaves - 1} on one rank, the last backward of each rank outside of no_sync(); or drop "
                "what has run of the step by zero_grad() of the outermost module, on all ranks. One that runs after "
                "the last of a step, also a stand-in, begins the next step"
            )
        for grads in (each.grads for each in self._sums):
            if grads.accumulation.pending:
                raise UsageError(
                    f"{call}: deterministic_sums=True, and unit {grads.handle.label} did not reduce its gradients of a "
                    "step whose microbatches have all run. Let all units reduce in the same backwards"
                )

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        if self._ref() not in optimizer_hooks.stepped_by(optimizer):
            return
        check_optimizer(optimizer)
        if not optimizer_hooks.is_at_work(optimizer):  # else in a backward, on gradients that are complete
            self.check_complete(f"{type(optimizer).__name__}.step()")


def attach_deterministic_sums(model: Model, nested: Iterable[Unit]) -> None:
    """Add up gradients of `model`, which is new, in the order of a tree, if that is set for it or for the models of the
    `nested` units, which become a part of it."""
    found = [model_of(unit).observers.find(DeterministicSums) is not None for unit in nested]
    if model.setup.settings.deterministic_sums or any(found):
        model.observers.add(DeterministicSums(model))
        model.observers.add(WrittenBuffers())
