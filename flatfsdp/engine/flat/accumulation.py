"""What gradients leave to the next backward: those that were not reduced, and those that were in part.

[Note: window] Without synchronization the slots stay, and the next microbatch adds to them: a *window*. Microbatches
without synchronization came before, so the next synchronized backward reduces, on every rank alike, whether or not
gradients arrived on this one.

[Note: partial sums] A reduction may stop after the shard axis: what several of them bring adds up, unscaled, until one
goes on along the replicate axis with all of it.

[Note: marks] Under no_sync the gradients live in a buffer that no user sees. A parameter without `.grad` is given this
rank's slice of it. Whoever sets a parameter's `.grad` to None or zero, or puts another in its place, drops that
parameter's gradients from the window at the next backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import UsageError
from .flat_param import FlatParamHandle
from .gradient_slots import GradientSlots
from .views import assign_grad


@dataclass(frozen=True, eq=False)
class WindowGrad:
    """The `.grad` of a parameter as a window left it, and which slots it stands for. [Note: marks]"""

    parameter: torch.Tensor
    grad: torch.Tensor
    version: int
    indices: tuple[int, ...]
    is_ours: bool  # made by the window, and not the sum of earlier synchronized gradients

    @property
    def is_there(self) -> bool:
        """Whether the parameter still has it."""
        return self.parameter.grad is self.grad


class Accumulation:
    """What lasts of one handle's gradients from backward to backward.

    Attributes:
        window_open: microbatches without synchronization came before. [Note: window]
        partial: shape (shard_numel,), reduce dtype. [Note: partial sums]
        contributed: leaves of which a gradient came to it on this rank.
    """

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle
        self.window_open = False
        self.partial: torch.Tensor | None = None
        self.contributed: set[int] = set()
        self._window_grads: list[WindowGrad] = []

    @property
    def pending(self) -> bool:
        """Whether something is left to reduce: the next backward that reduces does, on all ranks."""
        return self.window_open or self.partial is not None

    def keep_partial(self, total: torch.Tensor | None, contributed: set[int]) -> None:
        """Keep `total`, in place of what was kept; None for nothing."""
        tracker = self._handle.tracker
        if self.partial is not None:
            tracker.remove("partial", self.partial.numel() * self.partial.element_size())
        if total is not None:
            tracker.add("partial", total.numel() * total.element_size())
        self.partial, self.contributed = total, contributed

    def close_window(self) -> None:
        """There is no window any more."""
        self.window_open = False
        self._window_grads = []

    def show_window(self, slots: GradientSlots) -> None:
        """Show each parameter's share of the window as its `.grad`, so that `zero_grad` reaches what is kept unsharded.
        [Note: marks]"""
        if slots.buffer is None:
            return
        handle = self._handle
        own = slots.buffer.tensor.narrow(0, handle.rank * handle.layout.shard_numel, handle.layout.shard_numel)
        every = tuple(range(len(handle.leaves)))
        shares: list[tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = [(handle.flat_param, own, every)]
        if handle.use_orig_params:
            views = handle.at_rest.views_of(own)
            shares = [(handle.leaves[i], views[i], (i,)) for i in every if handle.leaves[i].requires_grad]
        for parameter, share, indices in shares:
            grad = parameter.grad
            if is_ours := grad is None:
                # `.data` has a version counter of its own: an edit of one mark is not one of its neighbours.
                grad = share.data.to(device=parameter.device, dtype=handle.precision.grad)
                assign_grad(parameter, grad)
            assert grad is not None
            self._window_grads.append(WindowGrad(parameter, grad, grad._version, indices, is_ours))

    def check_window(self, slots: GradientSlots) -> bool:
        """Drop from the window in `slots` what the user dropped; take back the marks that we made. True if nothing is
        left of it."""
        marks, self._window_grads = self._window_grads, []
        changed = [mark for mark in marks if mark.is_there and mark.grad._version != mark.version]
        edited = [mark for mark in changed if mark.grad.any()]
        ours = [self._handle.layout.params[i].name for mark in edited if mark.is_ours for i in mark.indices]
        if ours:
            raise UsageError(
                f"unit {self._handle.name or '<root>'!r}: the .grad of {', '.join(ours)} was edited after a backward "
                "under no_sync(). Until gradients are synchronised it shows only a piece of what has accumulated; edit "
                "it after a backward outside of no_sync(), or drop it with zero_grad()"
            )
        # An empty piece looks zero whatever was done to it; its neighbours show it.
        zeroed = [mark for mark in changed if not mark.grad.any() and (mark.grad.numel() or not edited)]
        dropped = [mark for mark in marks if mark in zeroed or not mark.is_there]
        for mark in marks:
            if mark.is_ours and mark.is_there:
                mark.parameter.grad = None
        for mark in dropped:
            slots.filled.difference_update(mark.indices)
        return bool(marks) and len(dropped) == len(marks)
