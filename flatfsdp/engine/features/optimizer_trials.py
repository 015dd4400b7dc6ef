"""Trials of optimizers on random numbers, before ranks have parts of what they step on.

Of parameters in parts, an optimizer that is not element-wise (LAMB, LARS, Shampoo) would compute something else on each
number of ranks. So would, of whole matrices in buckets of several ranks, one with a norm of all gradients, an estimate
of the learning rate from all of them (Prodigy), a counter that all share and that it changes in place (heavyball's
SOAP), or random numbers. No error would show it. So copies of an optimizer take a few steps: on a matrix, and on two
vectors with its elements; or on two matrices together, and on one after the other. Both come to the same, up to
rounding, and each rank finds the same, whatever it has.
"""

from __future__ import annotations

import copy
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
from ..state.optim.optimizer_clone import copy_over, random_states_kept, set_changes
from .fused_steps import is_fused
from .own_steps import step_over

# The shape of a matrix, the element at which it is cut, and a number of steps. The second one has more than the 4,096
# elements from which on states are quantized, and is not cut between blocks; one of matrices would take long for it.
_TRIALS = ((8, 12), 41, 12), ((64, 80), 2111, 2)
_ROUNDING = 1e-3  # of the largest change
_NOT_ELEMENTWISE = (
    "is not element-wise: in a trial on random numbers its steps on two parts of a matrix differ from those on the "
    "whole, and ranks have parts of parameters. Let it step on whole ones with "
    "flatfsdp.matrix_steps(optimizer, sees=...), or wrap with layout= of flatfsdp.layout.Whole(). If it is "
    "element-wise after all, as one that draws random numbers, vouch for it with "
    "flatfsdp.fuse_optimizer_steps(optimizer, elementwise=True)"
)
_NOT_OF_ONE_MATRIX = (
    "cannot be given to matrix_steps: in a trial on random numbers its steps on a matrix depend on other matrices. "
    "It has a value that follows from all of them, as a norm or an estimate of the learning rate, a counter for all "
    "that it changes in place, or random numbers, while each rank steps on some of the matrices. Use settings without "
    "it, or another optimizer"
)
_Numbers = Sequence[torch.Tensor]  # values of a tensor, and its gradient in each step


class _Trials:
    """Tries each optimizer once. A process has one of these."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step.

        Raises:
            UsageError: it is not element-wise, and ranks have parts of parameters that it steps on.
        """
        if _is_known(optimizer) or optimizer in self._seen:
            return
        if is_fused(optimizer) or optimizer in optimizer_hooks.steps_on_wholes or torch.compiler.is_compiling():
            return
        if {"state", "param_groups"} <= vars(optimizer).keys():  # else it passes steps on to another one, inside
            for parameter in _first_parts(optimizer):
                for shape, cut, steps in _TRIALS:
                    matrix = _numbers(parameter, shape, steps)
                    flat = [each.view(-1) for each in matrix]
                    parts = [[each[piece] for each in flat] for piece in (slice(cut), slice(cut, None))]
                    _compare(optimizer, parameter, [matrix], [[[each]] for each in parts], _NOT_ELEMENTWISE)
        self._seen.add(optimizer)


TRIALS = _Trials()


def try_on_matrices(optimizer: torch.optim.Optimizer) -> None:
    """Verify that steps on a matrix do not depend on other matrices. No communication.

    Raises:
        UsageError: they do.
    """
    for group in optimizer.param_groups if not _is_known(optimizer) else ():
        for parameter in group["params"][:1]:
            matrices = [_numbers(parameter, (8, 12), 12), [3 * each for each in _numbers(parameter, (10, 6), 12)]]
            _compare(optimizer, parameter, matrices, [[[each] for each in matrices]], _NOT_OF_ONE_MATRIX)


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith(("torch.optim.", "flatfsdp.")) or is_memoryless()


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


def _compare(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    together: Sequence[_Numbers],
    apart: Sequence[Sequence[Sequence[_Numbers]]],
    otherwise: str,
) -> None:
    """Compare steps on tensors `together` with those of copies of `optimizer` on the same elements `apart`, each copy
    in buckets."""
    name = type(optimizer).__name__
    try:
        found = _stepped(optimizer, parameter, [together])
        others = [each for buckets in apart for each in _stepped(optimizer, parameter, buckets)]
    except Exception as error:
        warn_once_per_job(
            f"it is not known whether {name} can step on this rank's share of what it steps on, because a copy of it "
            f"does not step on random numbers ({type(error).__name__}: {error}). What ranks compute depends on their "
            "number if it looks at norms, rows or other elements, and was not given whole matrices by "
            "flatfsdp.matrix_steps(); or at other matrices, where it was"
        )
        return
    begun = torch.cat([numbers[0].flatten() for numbers in together])
    one, other = (torch.cat([each.flatten() for each in of]) for of in (found, others))
    if (one - other).abs().max() > _ROUNDING * (one - begun).abs().max():
        raise UsageError(f"{name} {otherwise}")


def _numbers(parameter: torch.Tensor, shape: tuple[int, int], steps: int) -> _Numbers:
    """Gradients have a part that stays, with which estimates of the learning rate grow."""
    generator = torch.Generator().manual_seed(0)
    values, steady, *others = (torch.randn(shape, generator=generator) for _ in range(2 + steps))
    return [each.to(parameter.device) for each in (values, *(steady + 0.5 * other for other in others))]


def _stepped(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, buckets: Sequence[Sequence[_Numbers]]
) -> list[torch.Tensor]:
    """The values of all tensors after steps of a copy of `optimizer` on them in place of `parameter`, on the last
    bucket first: in another order than together."""
    made = [[nn.Parameter(numbers[0].clone()) for numbers in bucket] for bucket in buckets]
    held = [each for group in optimizer.param_groups for each in group["params"]]
    stand_ins = {id(each): nn.Parameter(parameter.new_zeros(()), requires_grad=False) for each in held}
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    state: Any = defaultdict(dict, copy.deepcopy(shared))
    clone = copy_over(optimizer, {**stand_ins, id(parameter): made[0][0]}, state)
    of_it = [any(each is parameter for each in group["params"]) for group in optimizer.param_groups]
    for group in clone.param_groups:
        if "lr" in group and not group["lr"]:  # as at the beginning of a warm-up: nothing would move
            group["lr"] = group["lr"] + 0.01
    with torch.compiler.set_stance("force_eager"):
        for step in range(1, len(buckets[0][0])):
            of_buckets = []
            for bucket, params in zip(reversed(buckets), reversed(made), strict=True):
                for each, numbers in zip(params, bucket, strict=True):
                    each.grad = numbers[step].clone()
                with random_states_kept(clone):
                    of_buckets.append(step_over(clone, [params if its else [] for its in of_it], clone.state))
            for changes in of_buckets:
                set_changes(clone, changes)
    return [each.detach() for params in made for each in params]
