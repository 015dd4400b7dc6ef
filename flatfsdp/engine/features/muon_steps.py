"""Steps of torch's Muon, of which owners compute only what needs whole matrices.

[Note: Muon in parts] Muon's momentum, weight decay and the addition of the update are element-wise. Only the
orthogonalization between them needs the whole matrix, and torch computes it in bfloat16 from beginning to end. So each
rank keeps the momentum of its own elements, as the state of any element-wise optimizer; owners get the momentum in
bfloat16, and send back the update in bfloat16: 4 bytes an element in place of 12, and the bits of torch's own step.

Of a matrix that tensor parallelism splits, each of its ranks has a part, which data parallelism splits again. Owners of
parts of one matrix are the same rank of each data-parallel group, since these groups have equal layouts. They gather
the whole, and all orthogonalize it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..base._dtensor import is_dtensor
from ..base._torch import muon_functions
from ..guards.optimizer_hooks import OfOptimizer, check_shapes
from ..layout.layout import Span
from ..state.parts import assembled, cut
from .matrix_adapters import Entry, Slot, Whole, check_muon
from .own_steps import IN_PARTS

MOMENTUM = "momentum_buffer"  # as in the state of torch's Muon


class MuonSteps(OfOptimizer):
    """The steps of torch's Muon on matrices, as `OwnSteps` takes those of other classes. [Note: Muon in parts]"""

    sent = 1
    in_parts = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._orthogonalize, self._adjusted = muon_functions()

    def dtype_of(self, slot: Slot) -> torch.dtype:
        """That in which Muon orthogonalizes."""
        return torch.bfloat16

    def state_of(self, entry: Entry) -> int:
        """`IN_PARTS` if this rank has the momentum of its elements."""
        return IN_PARTS if self.optimizer.state.get(entry.slot.parameter) else 0

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Make the momentum of distributed tensors of which this rank has no elements, too: it is one of the whole.

        Raises:
            UsageError: settings, which a state dict may have brought, with which a step goes wrong.
        """
        for slot in {entry.slot: None for entry in entries}:
            check_muon(self.optimizer.param_groups[slot.group], slot.parameter.dtype)
            if is_dtensor(slot.parameter):
                self._momentum_of(slot)

    def begin(self, entry: Entry, span: Span) -> Sequence[torch.Tensor]:
        """Update the momentum, and return what is orthogonalized."""
        group, parameter = self.optimizer.param_groups[entry.slot.group], entry.slot.parameter
        check_shapes(self.optimizer.state[parameter], parameter, entry.slot.name)
        gradient = entry.within(entry.slot.gradient(), span)
        momentum = entry.within(self._momentum_of(entry.slot), span)
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return (update.bfloat16(),)

    def _momentum_of(self, slot: Slot) -> torch.Tensor:
        """The momentum of this rank's elements, in the order of `Slot.own`, as a view of the optimizer's state."""
        state, gradient = self.optimizer.state[slot.parameter], slot.parameter.grad
        assert gradient is not None
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        found = slot.like_own(state[MOMENTUM])
        if found.data_ptr() != slot.handle.face.local_of(state[MOMENTUM]).data_ptr():  # stored in another order
            state[MOMENTUM] = torch.empty_like(slot.parameter)
            found = slot.like_own(state[MOMENTUM]).copy_(found)
        return found

    def compute(self, wholes: Sequence[Whole]) -> Sequence[torch.Tensor]:
        """Orthogonalize these matrices. Collective over the ranks of tensor parallelism, of parts: owners of the parts
        of a matrix all get the whole of it, and keep the result for their part."""
        inputs = [
            assembled(slot.unit, slot.kind, slot.index, seen.view(momentum)) for (slot, seen), (momentum,) in wholes
        ]
        results = []
        for ((slot, seen), _), whole in zip(wholes, inputs, strict=True):
            group = self.optimizer.param_groups[slot.group]
            made = self._orthogonalize(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
            results.append(seen.flat(cut(made, slot.spec)))
        return results

    def end(self, entry: Entry, span: Span, result: torch.Tensor) -> None:
        """Decay this rank's elements of the parameter, and add the update."""
        group = self.optimizer.param_groups[entry.slot.group]
        rate = group["lr"].squeeze() if isinstance(group["lr"], torch.Tensor) else group["lr"]
        own = entry.within(entry.slot.own(), span)
        own.mul_(1 - rate * group["weight_decay"])
        own.add_(result, alpha=-self._adjusted(rate, group["adjust_lr_fn"], torch.Size(entry.shape)))

    def state_before_first_step(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """This rank's part of the state before its first step."""
        slot = entries[0].slot
        return {MOMENTUM: torch.zeros_like(slot.handle.at_rest.views[slot.index])}
