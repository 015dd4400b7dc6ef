"""Gradients on their way from the leaves to the shard.

[Note: gradient slots] As a leaf's gradient arrives it is moved, with the cast to the reduce dtype, into its *slot*: its
place in a flat buffer laid out like the parameter. Large ones are moved at once; small ones are collected up to
`COLLECT_BYTES` and moved by one call. When the unit's last expected gradient is in, the buffer is reduce-scattered
(`Reduction`). Slots that received nothing count as zero, and where that is so on all ranks their leaves get no gradient
([Note: unused]). Without synchronisation the buffer stays and the next
microbatch adds to it: a *window*.

[Note: slot sharing] A parameter whose gradient has arrived is read no more, so its own place in the unsharded buffer
can be its slot: the unit's memory is not needed twice. That takes equal dtypes, a backward that reduces and will not be
differentiated, and a unit of which an earlier backward has shown that each gradient comes once and in the backward's
own graph task; elsewhere (recomputation in tasks of their own) a parameter may be read after its gradient has come.
What is overwritten cannot be read unnoticed: saved views of it are refused by their version, the leaf itself is hidden
([Note: hidden]). A unit whose forward runs again before its reduction is refused, once: to gather anew would be a
collective that only those ranks issue which share.

[Note: partial sums] A reduction may stop after the shard axis: what several of them bring adds up, unscaled, until one
goes on along the replicate axis with all of it.

[Note: undo] Reduced gradients become `.grad` only at the end of a backward (`Gradients.settle`); until then a failed
backward can be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import UsageError
from ..base import _torch
from ..config.precision import gradient_scaling
from ..device.memory import FlatBuffer
from .flat_param import FlatParamHandle
from .layout_views import full_views
from .reduction import ReductionInput
from .views import ParamViews, assign_grad, check_gradients, take_grads

# A gradient of at most SMALL_BYTES is collected; at COLLECT_BYTES the collected ones are moved.
SMALL_BYTES = 64 * 1024
COLLECT_BYTES = 1024 * 1024


@dataclass(frozen=True, eq=False)
class WindowGrad:
    """The `.grad` of a parameter as a window left it, and which slots it stands for. [Note: marks]"""

    parameter: torch.Tensor
    grad: torch.Tensor
    version: int
    indices: tuple[int, ...]
    is_ours: bool  # made by the window, and not the sum of earlier synchronised gradients

    @property
    def is_there(self) -> bool:
        """Whether the parameter still has it."""
        return self.parameter.grad is self.grad


class Gradients:
    """All gradient state of one handle.

    Attributes:
        expected: indices of the leaves whose gradients this backward awaits.
        arrived: those that came.
        missing: those that are awaited still.
        collects_in: autograd's graph task in which gradients that come for the first time are only collected, if any.
        shares_slots: gradients go to the parameters' places. [Note: slot sharing]
        reducing: what this backward has handed over to reductions.
        contributed: leaves of which a gradient came to what is being reduced, or was reduced earlier, on this rank.
        absent: leaves of which none did, on any rank: `.grad` stays as it is. [Note: unused]
    """

    def __init__(self, handle: FlatParamHandle, views: ParamViews) -> None:
        self.handle = handle
        self._views = views
        self._numels = [spec.numel for spec in handle.layout.params]
        itemsize = handle.precision.compute.itemsize
        self._all_small = max(self._numels) * itemsize <= SMALL_BYTES and sum(self._numels) * itemsize <= COLLECT_BYTES
        self.collects_in: int | None = None
        self.expected: frozenset[int] = frozenset()
        self.arrived: set[int] = set()
        self.missing: set[int] = set()
        self._buffer: FlatBuffer | None = None
        self._buffers: dict[torch.dtype, tuple[FlatBuffer, list[torch.Tensor]]] = {}
        self._slots: list[torch.Tensor] = []
        self._filled: set[int] = set()
        self._collected: dict[int, torch.Tensor] = {}
        self._collected_bytes = 0
        self._before = self._after = 1.0
        self._hooked = False  # [Note: communication hooks]
        self.reducing: list[ReductionInput] = []
        self._stashed: dict[int, torch.Tensor] | None = None
        self._stand_ins: dict[int, tuple[torch.Tensor, int]] = {}
        self._accumulating = False
        self.shares_slots = False
        self.contributed: set[int] = set()
        self.absent: frozenset[int] = frozenset()
        self._return_buffer: Callable[[FlatBuffer], None] | None = None  # once the places are ours
        # Microbatches without synchronisation came before: the next synchronised backward reduces, on every rank alike,
        # whether or not gradients arrived on this one.
        self.window_open = False
        self._partial: torch.Tensor | None = None  # [Note: partial sums]: shape (shard_numel,), reduce dtype
        self._partly_contributed: set[int] = set()  # leaves of which a gradient came to it on this rank
        self._completes = True  # whether the reductions in flight are more than partial sums
        self._window_grads: list[WindowGrad] = []

    # -- a backward begins -------------------------------------------------------------------------------------------

    def stash_grads(self) -> None:
        """Take the `.grad` of all leaves away until `finalize_grads` or `unstash_grads`."""
        if self._stashed is None:
            self._check_window_grads()
            self._stashed = take_grads(self.handle.leaves)
        elif self._stand_ins:
            self._end_retention()

    def retain_for_double_backward(self) -> None:
        """The parameters stay whole until another backward, and what was taken cannot be shown meanwhile.

        A stand-in of the whole shape is shown instead: whoever drops it, by `zero_grad` say, drops what was taken.
        """
        for i in self._stashed or {}:
            leaf = self.handle.leaves[i]
            leaf.grad = torch.zeros_like(leaf)
            self._stand_ins[i] = leaf.grad, leaf.grad._version

    def _end_retention(self) -> None:
        for i, (stand_in, version) in self._stand_ins.items():
            leaf = self.handle.leaves[i]
            if leaf.grad is not stand_in or stand_in._version != version:
                assert self._stashed is not None
                del self._stashed[i]
            leaf.grad = None
        self._stand_ins = {}

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
    ) -> None:
        """Await the gradients of `expected`; `world` ranks will be averaged, unless their sum is to be divided by
        something else.

        `weight`: what this rank's count; with 0 whatever comes is dropped. `share`: the places of parameters whose
        gradients have come may be overwritten. `hooked`: a communication hook gets the gradients, unscaled, and their
        memory.
        """
        if self._stashed is None or self._stand_ins:
            self.stash_grads()
        self.expected = expected
        self.arrived = set()
        self.missing = set(expected)
        self.collects_in = None
        self._accumulating = not sync
        self._hooked = hooked
        self._before, self._after = gradient_scaling(world, self.handle.precision.reduce, divide_by)
        if hooked:
            share, self._before = False, 1.0
        self._before *= weight
        self.shares_slots = share and self._buffer is None and self.handle.can_hold(self.handle.precision.reduce)

    def skip_missing(self, indices: Iterable[int]) -> None:
        """Do not wait for the gradients of these leaves, which are zero on this rank."""
        self.missing.difference_update(indices)

    # -- gradients arrive --------------------------------------------------------------------------------------------

    def let_collect(self, task: int | None) -> None:
        """Nothing but their arrival is to be noted of gradients that come in this graph task, if there is one."""
        if self._all_small and self._before != 0:
            self.collects_in = task

    def collect(self, index: int) -> bool:
        """Take the gradient of leaf `index`, if this backward awaits it: `arrive` without its questions, for
        `collects_in`."""
        missing = self.missing
        leaf = self.handle.leaves[index]
        grad = leaf.grad
        if grad is None or index not in missing or index in self._collected:
            return False
        leaf.grad = None
        missing.remove(index)
        self.arrived.add(index)
        self._collected[index] = grad
        return True

    def arrive(self, index: int, grad: torch.Tensor) -> None:
        """Move `grad` (of leaf `index`, compute dtype) into its slot, now or with the other small ones."""
        self.arrived.add(index)
        self.missing.discard(index)
        if self._before == 0:
            return
        size = self._numels[index] * grad.element_size()
        if size > SMALL_BYTES:
            self._move({index: grad})
            return
        if index in self._collected:
            self._move_collected()
        self._collected[index] = grad
        self._collected_bytes += size
        if self._collected_bytes > COLLECT_BYTES:
            self._move_collected()

    def _move_collected(self, *, freeing: bool = False) -> None:
        if self._collected:
            collected, self._collected, self._collected_bytes = self._collected, {}, 0
            self._move(collected, freeing=freeing)

    def _move(self, grads: dict[int, torch.Tensor], *, freeing: bool = False) -> None:
        """Copy gradients, by index of their leaf, into their slots, or add them to what came before.

        `freeing`: the handle gives its buffer up next, and with it hides all leaves.
        """
        # Others of as many elements cannot be copied, but for those whose shape is the same without ones.
        if list(map(torch.Tensor.numel, grads.values())) != [self._numels[i] for i in grads]:
            check_gradients(self.handle, grads)
        self._open_buffer()
        again = self._filled & grads.keys() if self._filled else ()
        fresh = [i for i in grads if i not in again] if again else list(grads)
        if self.shares_slots and not freeing:
            self.handle.writes.on_overwrite(fresh)
            self._views.hide(fresh)
        if self._before != 1.0:
            grads = {i: grad * self._before for i, grad in grads.items()}
        slots = self._slots
        try:
            if fresh:
                _torch.foreach_copy_([slots[i] for i in fresh], [grads[i] for i in fresh])
            if again:
                _torch.foreach_add_([slots[i] for i in again], [grads[i] for i in again])
        except RuntimeError:
            check_gradients(self.handle, grads)
            raise
        self._filled.update(grads)

    def _open_buffer(self) -> None:
        if self._buffer is not None:
            return
        handle = self.handle
        if self.shares_slots:
            whole = handle.unsharded
            self._buffer, self._slots = whole.buffer, whole.views
            return
        dtype = handle.precision.accumulate if self._accumulating else handle.precision.reduce
        buffer, views = self._buffers.get(dtype, (None, []))
        if buffer is not None and buffer.allocated:
            # A late gradient while the buffer's reduction is in flight: that one first.
            for part in self.reducing:
                part.release_input()
        if buffer is None or (handle.is_unsharded_at_rest and buffer.tensor.numel() == 0):
            buffer = FlatBuffer(handle.layout.padded_numel, dtype, handle.device, tracker=handle.tracker, kind="slots")
            views = []
        buffer.allocate()
        if not views:
            views = full_views(buffer.tensor, handle.layout)
        self._buffers[dtype] = (buffer, views)
        self._buffer, self._slots = buffer, views
        for gap in handle.layout.gaps:
            buffer.tensor[gap.slice].zero_()

    # -- the parameters' own places ----------------------------------------------------------------------------------

    @property
    def occupies_params(self) -> bool:
        """Whether gradients lie in places of parameters of which others may still be read."""
        return self.shares_slots and self._return_buffer is None and bool(self.arrived)

    def take_over_buffer(self, return_buffer: Callable[[FlatBuffer], None]) -> bool:
        """The handle is about to give its buffer up: keep it for the reduction, if gradients lie there.

        `return_buffer` gives its memory back.
        """
        if not self.occupies_params:
            self.shares_slots = False
            return False
        self._move_collected(freeing=True)
        self._open_buffer()
        assert self._buffer is not None
        self._buffer.now_holds("slots")
        self._return_buffer = return_buffer
        return True

    def return_inputs(self) -> None:
        """The unsharded buffer is needed again: wait for the reductions that read it."""
        for part in self.reducing:
            part.release_input()

    # -- reduction ---------------------------------------------------------------------------------------------------

    @property
    def participates(self) -> bool:
        """Whether this handle takes part in the next reduction."""
        return bool(self.expected) or self.pending

    @property
    def pending(self) -> bool:
        """Whether earlier microbatches left something to reduce: the next backward that reduces does, on all ranks."""
        return self.window_open or self._partial is not None

    def keep_in_window(self) -> None:
        """The backward ends without synchronisation: all gradients are in the window's buffer."""
        self._move_collected()
        self.window_open = self.window_open or bool(self.expected)

    def start_reduction(self, *, completes: bool, hook: Callable[[torch.Tensor], Any] | None) -> ReductionInput:
        """What arrived, zeros for what did not, on its way into a reduction.

        `completes`: not only a partial sum. `hook` runs on the sum. Precondition: a place that gradients occupy was
        taken.
        """
        self._move_collected()
        if self._return_buffer is None:
            self.shares_slots = False  # nothing came: the places stay the parameters', whose memory may go at any time
        self._open_buffer()
        buffer = self._buffer
        assert buffer is not None
        filled = self._filled  # given up with the buffer
        self.contributed = (
            filled.union(self.contributed, self._partly_contributed)
            if self.contributed or self._partly_contributed
            else filled
        )
        if len(self._filled) < len(self._slots):
            for i, slot in enumerate(self._slots):
                if i not in self._filled:
                    slot.zero_()
        if buffer.tensor.dtype != self.handle.precision.reduce:
            wide, self._buffer, self._accumulating = buffer, None, False
            self._open_buffer()
            buffer = self._buffer
            assert buffer is not None
            buffer.tensor.copy_(wide.tensor)
            wide.free()
        if self.handle.is_unsharded_at_rest or self._hooked:
            del self._buffers[buffer.tensor.dtype]
        return_buffer = self._return_buffer
        give_back = FlatBuffer.disown if self._hooked else return_buffer or FlatBuffer.free
        self._forget_buffer()
        self._completes = completes
        part = ReductionInput(
            self.handle,
            buffer,
            give_back,
            scale=self._after if completes else 1.0,
            earlier=None if self.reducing else self._partial,
            hook=hook if completes else None,
            download=completes and self.handle.options.offload and self.handle.options.pin_memory,
            shares_unsharded_buffer=return_buffer is not None,
        )
        self.reducing.append(part)
        return part

    def missing_contributions(self) -> frozenset[int]:
        """Leaves of which this rank has brought no gradient to what was or will be reduced."""
        return self.expected.difference(self.contributed, self._filled, self._collected, self._partly_contributed)

    @property
    def reduced(self) -> list[torch.Tensor]:
        """What reductions that are over have brought, not scaled and not settled: each of shape (shard_numel,)."""
        return [part.result for part in self.reducing]

    # -- a backward ends ---------------------------------------------------------------------------------------------

    def finalize_grads(self) -> bool:
        """Wait for the reductions and make them `.grad`, added to what was there; True if they brought a gradient.

        Precondition: leaves show the shard.
        """
        if self._stand_ins:
            self._end_retention()
        total: torch.Tensor | None = None
        for part in self.reducing:
            result = part.wait()
            total = result if total is None else total.add_(result)
        downloaded = self.reducing[0].downloaded if len(self.reducing) == 1 else None
        self.reducing = []
        trained, contributed = self.expected - self.absent, self.contributed
        left_out = bool(self.absent) and not trained
        self._forget_expectations()
        if total is None:
            self.unstash_grads()
            self._show_window_grads()
            return False
        if self._partial is not None or not self._completes:
            self._replace_partial(*((None, set()) if self._completes else (total, contributed)))
        if left_out or not self._completes:
            self.unstash_grads()
            return False
        _add(self._show(downloaded if downloaded is not None else self._on_shard_device(total), trained))
        return True

    @property
    def can_finish_later(self) -> bool:
        """Whether what is being reduced can become `.grad` before it is there. [Note: awaited]"""
        handle = self.handle
        if len(self.reducing) != 1 or self._partial is not None:
            return False
        (part,) = self.reducing
        arrives_on_shard_device = part.dtype == handle.precision.grad and not handle.options.offload
        return arrives_on_shard_device and part.can_finish_later

    def finalize_grads_later(self) -> Callable[[], None]:
        """`finalize_grads` without waiting. Returns what waits; until then `.grad` is there, and its values are not.

        Preconditions: `can_finish_later`; leaves show the shard.
        """
        (part,) = self.reducing
        self.reducing = []
        trained = self.expected - self.absent
        left_out = bool(self.absent) and not trained
        self._forget_expectations()
        if left_out:
            self.unstash_grads()
        sums = [] if left_out else self._show(part.result, trained)

        def finish() -> None:
            part.wait()
            _add(sums)

        return finish

    def _show(self, total: torch.Tensor, trained: frozenset[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Make `total` the `.grad` of `trained` leaves, or show the old one again. Returns what is to be added up: old
        gradients with new ones."""
        handle = self.handle
        taken, self._stashed = self._stashed or {}, None
        if not handle.use_orig_params:
            flat = handle.flat_param
            if flat.grad is not None:
                return [(flat.grad, total)]
            assign_grad(flat, total)
            return []
        leaves, fits = handle.leaves, total.dtype == handle.shard.dtype
        sums = []
        for i, grad in handle.at_rest.pieces_of(total):
            if i not in trained:
                continue
            if i in taken:
                sums.append((taken[i], grad))
            elif fits:
                leaves[i].grad = grad
            else:
                assign_grad(leaves[i], grad)
        for i, old in taken.items():
            assign_grad(leaves[i], old)
        return sums

    def _on_shard_device(self, total: torch.Tensor) -> torch.Tensor:
        """`total` in the optimizer's dtype, where the optimizer steps."""
        handle = self.handle
        if total.dtype != handle.precision.grad:
            total = total.to(handle.precision.grad)
        if not handle.options.offload:
            return total
        # Where the CPU stands in for a device the same copy is made.
        return total.to(handle.shard.device) if total.device != handle.shard.device else total.clone()

    def _replace_partial(self, total: torch.Tensor | None, contributed: set[int]) -> None:
        tracker = self.handle.tracker
        if self._partial is not None:
            tracker.remove("partial", self._partial.numel() * self._partial.element_size())
        if total is not None:
            tracker.add("partial", total.numel() * total.element_size())
        self._partial, self._partly_contributed = total, contributed

    def _forget_expectations(self) -> None:
        self.expected = frozenset()
        self.arrived = set()
        self.missing = set()
        self.contributed = set()
        self.absent = frozenset()

    def unstash_grads(self) -> None:
        """Give the leaves back the `.grad` that was taken. Precondition: leaves show the shard."""
        taken, self._stashed = self._stashed or {}, None
        for i, grad in taken.items():
            assign_grad(self.handle.leaves[i], grad)

    def drop(self) -> bool:
        """Forget a failed backward: what arrived, what is in flight, the window. True if a window was lost."""
        lost = self.window_open
        self._collected = {}
        self._collected_bytes = 0
        for part in self.reducing:
            part.discard()
        self.reducing = []
        self._close_window()
        self._forget_expectations()
        return lost

    def _close_window(self) -> None:
        if self._return_buffer is not None and self._buffer is not None:
            self._return_buffer(self._buffer)
        elif self._buffer is not None and not self.shares_slots:
            self._buffer.free()
        self._forget_buffer()
        self._window_grads = []

    def _forget_buffer(self) -> None:
        self._buffer = None
        self._slots = []
        self._filled = set()
        self.shares_slots = False
        self._return_buffer = None
        self.window_open = False

    # -- windows -----------------------------------------------------------------------------------------------------

    def _show_window_grads(self) -> None:
        """Show each parameter's share of the window as its `.grad`, so that `zero_grad` reaches what is kept unsharded.

        [Note: marks] Under no_sync the gradients live in a buffer that no user sees. A parameter without `.grad` is
        given this rank's slice of it. Whoever sets a parameter's `.grad` to None or zero, or puts another in its place,
        drops that parameter's gradients from the window at the next backward.
        """
        if self._buffer is None:
            return
        handle = self.handle
        flat = self._buffer.tensor
        own = flat.narrow(0, handle.rank * handle.layout.shard_numel, handle.layout.shard_numel)
        every = tuple(range(len(handle.leaves)))
        shares: list[tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = [(handle.flat_param, own, every)]
        if handle.use_orig_params:
            views = handle.at_rest.views_of(own)
            shares = [(handle.leaves[i], views[i], (i,)) for i in every if handle.leaves[i].requires_grad]
        for parameter, share, indices in shares:
            if parameter.grad is None:
                # `.data` has a version counter of its own: an edit of one mark is not one of its neighbours.
                mark = share.data.to(device=parameter.device, dtype=handle.precision.grad)
                assign_grad(parameter, mark)
                self._window_grads.append(WindowGrad(parameter, mark, mark._version, indices, is_ours=True))
            else:
                self._window_grads.append(
                    WindowGrad(parameter, parameter.grad, parameter.grad._version, indices, is_ours=False)
                )

    def _check_window_grads(self) -> None:
        """Drop from the window what the user dropped; take back the marks that we made."""
        marks, self._window_grads = self._window_grads, []
        if self._buffer is None:
            return
        changed = [mark for mark in marks if mark.is_there and mark.grad._version != mark.version]
        edited = [mark for mark in changed if mark.grad.any()]
        ours = [self.handle.layout.params[i].name for mark in edited if mark.is_ours for i in mark.indices]
        if ours:
            raise UsageError(
                f"unit {self.handle.name or '<root>'!r}: the .grad of {', '.join(ours)} was edited after a backward "
                "under no_sync(). Until gradients are synchronised it shows only a piece of what has accumulated; edit "
                "it after a backward outside of no_sync(), or drop it with zero_grad()"
            )
        # An empty piece looks zero whatever was done to it; its neighbours tell.
        zeroed = [mark for mark in changed if not mark.grad.any() and (mark.grad.numel() or not edited)]
        dropped = [mark for mark in marks if mark in zeroed or not mark.is_there]
        for mark in marks:
            if mark.is_ours and mark.is_there:
                mark.parameter.grad = None
        for mark in dropped:
            self._filled.difference_update(mark.indices)
        if marks and len(dropped) == len(marks):
            self._close_window()


def _add(sums: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add to the first of each pair the second."""
    if sums:
        with _torch.no_grad():
            _torch.foreach_add_([old for old, _ in sums], [new for _, new in sums])


__all__ = ["COLLECT_BYTES", "SMALL_BYTES", "Gradients"]
