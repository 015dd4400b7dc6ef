"""A trial of optimizers of which it is not known that they are element-wise, before they step on parts of parameters.

Such an optimizer (LAMB, LARS, Shampoo) would compute something else on each number of ranks, and no error would show
it. So copies of it take a few steps on random numbers: on a matrix, and on two vectors with its elements. An
element-wise one comes to the same, up to rounding.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agreement.once_per_job import warn_once_per_job
from ..base._dtensor import is_dtensor
from ..base.overrides import is_memoryless
from ..guards import optimizer_hooks
from ..state.optim.optimizer_clone import copy_over, step_alone
from .fused_steps import is_fused

# The shape of a matrix, the element at which it is cut, and a number of steps. The second one has more than the 4,096
# elements from which on states are quantized, and is not cut between blocks; one of matrices would take long for it.
_TRIALS = ((8, 12), 41, 12), ((64, 80), 2111, 2)
_ROUNDING = 1e-3  # of the largest change


class _Trials:
    """Tries each optimizer once. A process has one of these."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step.

        Raises:
            UsageError: it is not element-wise, and ranks have parts of parameters that it steps on.
        """
        if type(optimizer).__module__.startswith(("torch.optim.", "flatfsdp.")) or optimizer in self._seen:
            return
        is_known = is_fused(optimizer) or optimizer in optimizer_hooks.steps_on_wholes
        if is_known or is_memoryless() or torch.compiler.is_compiling():
            return
        if {"state", "param_groups"} <= vars(optimizer).keys():  # else it passes steps on to another one, inside
            for parameter in _first_parts(optimizer):
                for trial in _TRIALS:
                    _try(optimizer, parameter, *trial)
        self._seen.add(optimizer)


TRIALS = _Trials()


def _first_parts(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The first parameter of each param group of which ranks have parts, on the device on which it is stepped on."""
    parts = set[int]()
    for _, handle in optimizer_hooks.handles_of(optimizer):
        for index in range(len(handle.layout.params)):
            holder = handle.face.holder_of(index)
            if not (handle.layout.is_uncut(index) or is_dtensor(holder)):
                parts.add(id(holder))
    for group in optimizer.param_groups:
        yield from [each for each in group["params"] if id(each) in parts][:1]


def _try(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, shape: tuple[int, int], cut: int, steps: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(shape, generator=generator).to(parameter.device) for _ in range(1 + steps)]
    flat = [each.view(-1) for each in numbers]
    name = type(optimizer).__name__
    try:
        with torch.compiler.set_stance("force_eager"):
            whole = _stepped(optimizer, parameter, numbers).view(-1)
            parts = [_stepped(optimizer, parameter, [each[s] for each in flat]) for s in (slice(cut), slice(cut, None))]
    except Exception as error:
        warn_once_per_job(
            f"it is not known whether {name} is element-wise, because a copy of it does not step on random numbers "
            f"({type(error).__name__}: {error}). If it looks at norms, rows or other elements, its steps on this "
            "rank's parts of parameters compute something else: use flatfsdp.matrix_steps()"
        )
        return
    most = (whole - flat[0]).abs().max()
    if (torch.cat(parts) - whole).abs().max() > _ROUNDING * most:
        raise UsageError(
            f"{name} is not element-wise: in a trial on random numbers its steps on two parts of a matrix differ from "
            "those on the whole, and ranks have parts of parameters. Let it step on whole ones with "
            "flatfsdp.matrix_steps(optimizer, sees=...), or wrap with layout= of flatfsdp.layout.Whole(). If it is "
            "element-wise after all, as one that draws random numbers, vouch for it with "
            "flatfsdp.fuse_optimizer_steps(optimizer, elementwise=True)"
        )


def _stepped(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, numbers: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The first of the `numbers` after steps of a copy of `optimizer` on it, in place of `parameter`, with the others
    as gradients."""
    made = nn.Parameter(numbers[0].clone())
    held = [each for group in optimizer.param_groups for each in group["params"]]
    stand_ins = {id(each): nn.Parameter(numbers[0].new_zeros(()), requires_grad=False) for each in held}
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    clone = copy_over(optimizer, {**stand_ins, id(parameter): made}, state)
    for gradient in numbers[1:]:
        made.grad = gradient.clone()
        step_alone(clone)
    return made.detach()
