"""Gradients on their way from the leaves to the shard: awaited, arrived, reduced, and shown as `.grad`.

They collect in slots; unreduced gradients and partial sums last until the next backward (`gradient_slots.py`).

[Note: muted hooks] A small gradient whose unit reads its parameters once only has to wait until all of the unit's have
come. If the gradient of the unit's input shows that, nobody needs to know of each: the hooks on the leaves are muted
meanwhile, and all gradients are picked up there at once. Then the hooks sound again, for those that are missing. Units
with modules whose backward hooks could look at these gradients have no muted hooks.

[Note: rollback] Reduced gradients become `.grad` only at the end of a backward (`Gradients.finalize_grads`); until then
a failed backward can be forgotten.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from itertools import compress, repeat
from operator import is_not, methodcaller
from typing import Any, NoReturn

import torch

from ...errors import UsageError, fail
from ..base import _torch
from ..base.autograd import LeafHooks
from ..config.precision import gradient_scaling
from ..device.memory import FlatBuffer
from ..device.streams import in_host_memory
from .faces import Sums, own_grad, set_own_grad
from .flat_param import FlatParamHandle
from .gradient_slots import Accumulation, GradientSlots, Marks, SlotMemory, Window
from .reduction import Carried, ReductionInput, release_inputs
from .states import UNSHARDED
from .views import ParamViews

_FREE = methodcaller("free")


class Gradients:
    """All gradient state of one handle.

    Attributes:
        expected: indices of the leaves whose gradients this backward awaits.
        arrived: those that came.
        missing: those that are still awaited.
        collects_in: autograd's graph task in which gradients that come for the first time are only collected, if any.
        reducing: the reductions of this backward; always the same list.
        slots: where gradients go that arrive now; memory: the buffers for them.
        repeats: whether the gradient of one leaf has come more than once in a backward, so far.
        outlive_params: whether the parameters are not read any more when all gradients have come.
        accumulation: the state that lasts from backward to backward.
        completes: whether the reductions in flight are more than partial sums.
        contributed: leaves for which this rank added a gradient to the current reductions, or to earlier ones.
        absent: leaves of which none did, on any rank: `.grad` stays unchanged. [Note: unused]
        carried: what reductions leave to later ones, if something is attached that keeps it; else None.
        marks: what users see of unreduced gradients.
        hooks: on the leaves; muted: whether gradients stay there until `pick_up`. [Note: muted hooks]
        watched: whether code of users runs meanwhile, which would see unreduced gradients there.
    """

    def __init__(self, handle: FlatParamHandle, views: ParamViews) -> None:
        self.handle = handle
        self.collects_in: int | None = None
        self.reducing: list[ReductionInput] = []
        self._forget_expectations()
        self.accumulation = Accumulation(handle)
        self.carried: Carried | None = None
        self.marks = Marks()
        self.memory = SlotMemory(handle, views, self.reducing)
        self.slots = GradientSlots(self.memory, handle.precision.reduce, 1.0)
        self._factor_of_sum = 1.0
        self._hooked = False  # [Note: communication hooks]
        self.outlive_params = False
        self.completes = True
        self.repeats = False
        self._begun = False  # a backward has, and its gradients are not `.grad` yet
        self.hooks, self.muted, self.watched = LeafHooks(), False, False
        self._taken: Mapping[int, torch.Tensor] | None = None

    def _forget_expectations(self) -> None:
        self.expected: frozenset[int] = frozenset()
        self.arrived: set[int] = set()
        self.missing: set[int] = set()
        self.contributed: set[int] = set()
        self.absent: frozenset[int] = frozenset()

    # -- a backward begins -------------------------------------------------------------------------------------------

    def stash_grads(self) -> None:
        """Take the `.grad` of parameters that are their own leaves away until `finalize_grads` or `unstash_grads`."""
        if not self._begun:
            self._begun = True
            if self.slots.buffer is not None and not self.marks.take_back(self.slots):
                self._drop_slots()
            if (release := self.handle.face.release) is not None and release():
                self.handle.face.release = None
        if self._taken is None:
            found = list(map(own_grad, self.handle.leaves))
            some = found.count(None) != len(found)
            self._taken = self.handle.face.take_grads() if some else {}
            if some and not self.handle.face.holders_are_leaves:
                self._refuse_assigned([i for i, grad in enumerate(found) if grad is not None])

    @property
    def is_stashed(self) -> bool:
        """Whether `stash_grads` has taken `.grad` away, so that autograd adds nothing to it."""
        return self._taken is not None

    def _refuse_assigned(self, indices: list[int]) -> NoReturn:
        """Refuse gradients that a forward has assigned to leaves, where they would be lost."""
        self._taken = None
        names = ", ".join(repr(self.handle.layout.params[i].name) for i in indices)
        fail(
            UsageError(
                f"the .grad of {names} of unit {self.handle.label} was assigned inside of a forward, where modules "
                "compute with a copy of the whole parameter: the gradient would be lost with it. Assign the gradient "
                "of this rank's shard before the forward or after the backward, to the parameter that "
                "model.parameters() lists"
            )
        )

    def expect_gradients(
        self,
        expected: frozenset[int],
        *,
        world: int,
        divide_by: float | None,
        weight: float,
        sync: bool,
        share: bool,
        hooked: bool,
        may_wait: Callable[[], bool],
        collects_in: int | None,
    ) -> bool:
        """Await the gradients of `expected`, and take part with those that earlier backwards left; `world` ranks will
        be averaged, unless `divide_by` gives another divisor of their sum.

        `weight`: the weight of this rank's gradients; with 0 all are dropped. `share`: the memory of parameters whose
        gradients have come may be overwritten. `hooked`: a communication hook gets the gradients, unscaled, and their
        memory. `may_wait`: whether memory for them should be allocated late. [Note: late slots] `collects_in`: as of
        `let_collect`. Returns whether this handle takes part in the next reduction.
        """
        if self._taken is None:
            self.stash_grads()
        awaited = self.accumulation.awaited
        self.expected = expected | awaited if awaited else expected
        self.arrived = set()
        self.missing = set(expected)
        precision = self.handle.precision
        factor, self._factor_of_sum = gradient_scaling(world, precision.reduce, divide_by)
        self._hooked = hooked
        if hooked:
            share, factor = False, 1.0
        slots = self.slots
        slots.factor = factor * weight
        slots.dtype = precision.reduce if sync else precision.accumulate
        handle = self.handle
        slots.shares = (
            share
            and slots.buffer is None
            and handle.state is UNSHARDED
            and not handle.is_unsharded_at_rest  # there the slots' memory becomes the reduced gradient's
            and handle.unsharded.flat.dtype == precision.reduce
        )
        is_wide = sync and slots.dtype.itemsize > precision.compute.itemsize
        slots.may_wait = may_wait if is_wide and not handle.is_unsharded_at_rest else None
        self.outlive_params = share
        self.collects_in = collects_in if self.handle.is_small and slots.factor != 0 else None
        return bool(self.expected) or self.accumulation.pending

    # -- gradients arrive --------------------------------------------------------------------------------------------

    def let_collect(self, task: int | None) -> None:
        """Only collect gradients that arrive in this graph task, if there is one, and record their arrival."""
        if self.handle.is_small and self.slots.factor != 0:
            self.collects_in = task

    def mute(self) -> None:
        """Let gradients that are only collected in this graph task stay in the leaves."""
        if self.collects_in == _torch.graph_task() and not self.watched:
            self.muted = True
            self.hooks.mute()

    def pick_up(self, *, sound: bool) -> None:
        """Collect the gradients that have arrived in leaves since `mute`; `sound`: and end that."""
        leaves, slots = self.handle.leaves, self.slots
        if sound:  # first: other threads of autograd may go on meanwhile
            self.muted = False
            self.hooks.sound()
        with _torch.as_plain_tensors():  # leaves may be hidden
            grads: list[Any] = list(map(own_grad, leaves))
            found = dict(compress(enumerate(grads), map(is_not, grads, repeat(None))))
            deque(map(set_own_grad, map(leaves.__getitem__, found), repeat(None)), 0)
        if not (self.arrived or slots.collected):  # as nearly always
            slots.collected, self.arrived = found, set(found)
        else:
            self.repeats = self.repeats or not self.arrived.isdisjoint(found)
            if not slots.collected.keys().isdisjoint(found):
                slots.move_collected()
            slots.collected.update(found)
            self.arrived.update(found)
        self.missing.difference_update(found)

    def arrive(self, index: int, grad: torch.Tensor) -> None:
        """Move `grad` (of leaf `index`, compute dtype) into its slot, now or with the other small ones."""
        self.arrived.add(index)
        self.missing.discard(index)
        if self.slots.factor != 0:
            self.slots.put(index, grad)

    # -- the parameters' own memory ------------------------------------------------------------------------------------

    @property
    def occupies_params(self) -> bool:
        """Whether gradients lie in the memory of parameters of which others may still be read."""
        return self.slots.shares and self.slots.return_buffer is None and bool(self.arrived)

    def stop_sharing(self) -> None:
        """Give the gradients memory of their own, if none lies in a parameter's memory yet: parameters may be read
        after their gradients have come."""
        if self.slots.buffer is None:
            self.slots.shares = self.outlive_params = False

    def take_over_buffer(self, return_buffer: Callable[[FlatBuffer], None]) -> bool:
        """Keep the buffer, which the handle is about to give up, for the reduction, if gradients lie there.

        `return_buffer` gives its memory back. Precondition: slots are shared.
        """
        slots = self.slots
        if slots.return_buffer is not None or not self.arrived:
            slots.shares = False
            return False
        slots.move_collected(freeing=True)
        (slots.buffer or slots.open()).now_holds("slots")
        slots.return_buffer = return_buffer
        return True

    def return_inputs(self) -> None:
        """Wait for the reductions that read the unsharded buffer, which is needed again."""
        release_inputs(self.reducing)

    # -- reduction ---------------------------------------------------------------------------------------------------

    @property
    def participates(self) -> bool:
        """Whether this handle takes part in the next reduction."""
        return bool(self.expected) or self.accumulation.pending

    def keep_in_window(self) -> None:
        """End a backward without synchronization: all gradients stay in the window's buffer."""
        self.slots.move_collected()
        self._check_missing()
        if self.expected:
            self.accumulation.window_open, self.accumulation.awaited = True, self.expected

    def take_window(self) -> Window | None:
        """Take the gradients that the last backward has left; the next one begins with none. The caller owns them, and
        gives their memory back by `reuse`. None if it left none."""
        slots, kept, reduce = self.slots, self.accumulation, self.handle.precision.reduce
        if slots.buffer is None and not slots.collected:
            return None
        slots.close(reduce)
        kept.contributed = kept.contributed | slots.filled
        self.slots = GradientSlots(self.memory, reduce, slots.factor)
        return self.memory.forget(reduce)

    def reuse(self, window: Window) -> None:
        """Free a window that was taken."""
        self.memory.reuse(window)

    def start_reduction(self, *, completes: bool, hook: Callable[[torch.Tensor], Any] | None) -> ReductionInput:
        """A reduction's input: the gradients that arrived, with zeros for the others.

        `completes`: not only a partial sum. `hook` runs on the sum. Precondition: a shared buffer was taken over.
        """
        slots, handle, kept = self.slots, self.handle, self.accumulation
        reduce = handle.precision.reduce
        buffer = slots.close(reduce)
        if len(self.arrived) < len(self.expected):
            self._check_missing()
        if self.contributed or kept.contributed:
            self.contributed = slots.filled.union(self.contributed, kept.contributed)
        else:
            self.contributed = slots.filled
        if handle.is_unsharded_at_rest or self._hooked:
            self.memory.forget(reduce)
        return_buffer = slots.return_buffer
        self.slots = GradientSlots(self.memory, reduce, slots.factor)
        kept.window_open, kept.awaited = False, frozenset() if completes else self.expected
        self.completes = completes
        made = ReductionInput(
            handle,
            buffer,
            slots.segments,
            FlatBuffer.disown if self._hooked else return_buffer or _FREE,
            shares_unsharded_buffer=return_buffer is not None,
            scale=self._factor_of_sum if completes else 1.0,
            earlier=None if self.reducing else kept.partial,
            hook=hook if completes else None,
            downloads=completes and handle.options.offload and handle.options.pin_memory,
            carried=self.carried,
        )
        self.reducing.append(made)
        return made

    def _check_missing(self) -> None:
        with _torch.as_plain_tensors():  # leaves may be hidden
            self.handle.face.check_missing(self.expected - self.arrived)

    def missing_contributions(self) -> frozenset[int]:
        """Leaves for which this rank has contributed no gradient to current or future reductions."""
        return self.expected.difference(
            self.contributed, self.slots.filled, self.slots.collected, self.accumulation.contributed
        )

    @property
    def reduced(self) -> list[torch.Tensor]:
        """The results of finished reductions, scaled or not, and not settled: each of shape (shard_numel,)."""
        return [each.in_order() for each in self.reducing]

    # -- a backward ends ---------------------------------------------------------------------------------------------

    def finalize_grads(self, later: list[Callable[[], object]] | None = None) -> bool:
        """Wait for the reductions and make them `.grad`, added to earlier ones; True if they brought a gradient.

        `later`: do not wait. What does is added to it, and `.grad` has no values until it was called. This takes a
        reduction of a complete sum that comes in the optimizer's dtype to memory of its own. [Note: finishers]

        Precondition: users see the shard.
        """
        total: torch.Tensor | None = None
        for each in self.reducing:
            if later is not None:
                later.append(each.wait)
            result = each.wait() if later is None else each.result
            total = result if total is None else total.add_(result)
        downloaded = self.reducing[0].downloaded if len(self.reducing) == 1 else None
        self.reducing.clear()
        trained, contributed = self.expected - self.absent if self.absent else self.expected, self.contributed
        left_out = bool(self.absent) and not trained
        self._forget_expectations()
        if total is None:
            self.unstash_grads()
            self.marks.show(self.slots, self.accumulation.awaited)
            return False
        if self.accumulation.partial is not None or not self.completes:
            self.accumulation.keep_partial(*((None, set()) if self.completes else (total, contributed)))
        if left_out or not self.completes:
            self.unstash_grads()
            return False
        if downloaded is not None:
            total = downloaded
        elif self.handle.options.offload or total.dtype != self.handle.precision.grad:
            total = self._on_shard_device(total)
        taken, self._taken, self._begun = self._taken or {}, None, False
        if sums := self.handle.face.add_grads(total, trained, taken):
            _add(sums) if later is None else later.append(functools.partial(_add, sums))
        return True

    def _on_shard_device(self, total: torch.Tensor) -> torch.Tensor:
        """`total` in the optimizer's dtype, on the optimizer's device."""
        handle = self.handle
        if total.dtype != handle.precision.grad:
            total = total.to(handle.precision.grad)
        if not handle.options.offload:
            return total
        # If the CPU stands in for a device, the same copy is made.
        with in_host_memory():
            return total.to(handle.shard.device) if total.device != handle.shard.device else total.clone()

    def unstash_grads(self) -> None:
        """Undo `stash_grads`."""
        taken, self._taken, self._begun = self._taken or {}, None, False
        self.handle.face.give_grads(taken)

    def drop(self) -> None:
        """Forget a failed backward: arrived gradients, reductions in flight, the window."""
        for each in self.reducing:
            each.discard()
        self.reducing.clear()
        self._drop_slots()
        self._forget_expectations()

    def _drop_slots(self) -> None:
        self.marks.end(self.slots)
        self.slots.free()
        self.slots = GradientSlots(self.memory, self.handle.precision.reduce, self.slots.factor)
        self.accumulation.close_window()


def _add(sums: Sums) -> None:
    """Add the second of each pair to the first."""
    with _torch.no_grad():
        _torch.foreach_add_([old for old, _ in sums], [new for _, new in sums])
