"""Sums of powers of gradients that have the same bits on any number of ranks.

[Note: exact sums] A sum of floating-point numbers depends on its order, one of whole numbers does not. So magnitudes
are divided by the largest one, which all ranks know; each power, which is then at most 1, is cut off behind `DIGITS`
digits of `BITS` bits; and digits are added up by themselves: in float64 as long as that is exact, then as whole
numbers. What is cut off of an element is less than 2^-60 of the largest power. So nobody has to know where shards end,
which rank has which elements, or how modules are wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ..base import _torch

DIGITS, BITS = 3, 20
IN_CACHES, TOGETHER = 2**16, 2**22  # elements that are added up at once: on a CPU; elsewhere, exactly in float64


def scale_for(largest: torch.Tensor) -> torch.Tensor:
    """The factor, a float64 scalar, by which `largest`, which is finite, becomes 1, and no smaller magnitude more."""
    return 1.0 / largest.double().clamp(min=2.0**-1000)


def sum_of_powers(tensors: Iterable[torch.Tensor], p: int, scale: torch.Tensor) -> torch.Tensor:
    """The digits of the sum of |scale * v|^p over all elements v of `tensors`, none of them above 1; for p = 0 those of
    the number of non-zeros. int64 of shape (DIGITS,), on the device of `scale`, for fewer than 2^43 elements on all
    ranks: digits of different ranks are added up as they are."""
    total = torch.zeros(DIGITS, dtype=torch.int64, device=scale.device)
    tensors = [*tensors]
    most = min(IN_CACHES if scale.device.type == "cpu" else TOGETHER, sum(each.numel() for each in tensors))
    # One piece after the other in the same memory: new memory for each took 40 of 95 ms for 12M elements on a CPU.
    memory = torch.empty(2, most, dtype=torch.float64, device=scale.device)
    for pieces in _together(tensors, most):
        sizes = [piece.numel() for piece in pieces]
        values, rest = memory[:, : sum(sizes)]
        _torch.foreach_copy_([*values.split(sizes)], pieces)
        _power(values.mul_(scale), p, rest)
        for digit in total:
            whole = torch.floor(rest.mul_(2.0**BITS), out=values)
            digit += whole.sum().long()
            rest -= whole
    return total


def value_of(digits: torch.Tensor) -> torch.Tensor:
    """The number with these digits, a float64 scalar."""
    places = [2.0 ** (-BITS * place) for place in range(1, DIGITS + 1)]
    return (digits.double() * digits.new_tensor(places, dtype=torch.float64)).sum()


def magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, dense, or the magnitudes of its elements if they are complex."""
    dense = (tensor.to_dense() if tensor.is_sparse else tensor).detach()
    if not dense.is_complex():
        return dense
    real, imaginary = dense.real.double(), dense.imag.double()
    return (real * real + imaginary * imaginary).sqrt()  # `abs` rounds by where an element lies


def _together(tensors: Iterable[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """The elements of `tensors`, 1-D, in groups of at most so many; magnitudes of complex ones."""
    group, room = list[torch.Tensor](), most
    for tensor in tensors:
        left = magnitudes(tensor).reshape(-1)
        while left.numel():
            group.append(left[:room])
            left, room = left[room:], room - group[-1].numel()
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group


def _power(values: torch.Tensor, p: int, out: torch.Tensor) -> None:
    """|v|^p by products alone, which are rounded alike wherever an element lies in a tensor; `pow` is not."""
    if p == 0:
        torch.ne(values, 0, out=out)
    elif p % 2:
        torch.abs(values, out=out)
    else:
        torch.mul(values, values, out=out)
    for _ in range(2 - p % 2, p):
        out *= values
