"""Sums of powers of gradients that have the same bits on any number of ranks.

[Note: exact sums] A sum of floating-point numbers depends on its order, one of whole numbers does not. So magnitudes
are divided by the largest one, which all ranks know; each power, which is then at most 1, is cut off to a multiple of
2^-`BITS`; and these are added up as int64, which wraps around: what is left is the sum modulo 2^64. A second sum of the
same elements, in floating point, has errors that depend on the order, but shows how many times 2^64 are missing. So
nobody has to know where shards end, which rank has which elements, or how modules are wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ..base import _torch

BITS = 60
DIGIT = 2**32 - 1  # the bits of the two lower digits of a sum
IN_CACHES, TOGETHER = 2**16, 2**22  # elements that are added up at once: on a CPU; elsewhere


def scale_for(largest: torch.Tensor) -> torch.Tensor:
    """The factor, a float64 scalar, by which `largest`, which is finite, becomes 1, and no smaller magnitude more."""
    return 1.0 / largest.double().clamp(min=2.0**-960)


def sum_of_powers(tensors: Sequence[torch.Tensor], p: int, scale: torch.Tensor) -> torch.Tensor:
    """The sum of |scale * v|^p, p being 1 or 2, over all elements v of 1-D `tensors`, none of them above 1. int64,
    shape (3,), on the device of `scale`: digits in units of 2^-`BITS`, 2^(32-`BITS`) and 2^(64-`BITS`), of which there
    are several for one sum. Those of ranks are added up as they are."""
    most = min(IN_CACHES if scale.device.type == "cpu" else TOGETHER, sum(each.numel() for each in tensors))
    # One piece after the other in the same memory: new memory for each took 40 of 95 ms for 12M elements on a CPU.
    memory = torch.empty(2, most, dtype=torch.float64, device=scale.device)
    digits = torch.zeros(3, dtype=torch.int64, device=scale.device)
    for pieces in _together(tensors, most):
        sizes = [piece.numel() for piece in pieces]
        values, powers = memory[:, : sum(sizes)]
        _torch.foreach_copy_([*values.split(sizes)], pieces)
        values *= scale * 2.0 ** (BITS // p)
        # Products are rounded alike wherever an element lies in a tensor; `pow` is not.
        torch.abs(values, out=powers) if p == 1 else torch.mul(values, values, out=powers)
        wrapped = values.view(torch.int64).copy_(powers).sum()
        missing = ((powers.sum() - wrapped) * 2.0**-64).round().long()  # of at most 2^82, known to far less than 2^63
        digits += torch.stack([wrapped & DIGIT, wrapped >> 32, missing])
    return digits


def value_of(sums: torch.Tensor) -> torch.Tensor:
    """The sum, a float64 scalar, of which `sum_of_powers` has returned these, or several whose sum they are."""
    low, middle, high = sums
    middle = middle + (low >> 32)
    high, low, middle = high + (middle >> 32), low & DIGIT, middle & DIGIT  # these are the same for the same sum
    return (high.double() * 2.0**64 + (middle.double() * 2.0**32 + low.double())) * 2.0**-BITS


def side_by_side(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The elements of `tensors`, or the magnitudes of complex ones, as 1-D tensors: those that follow each other in one
    memory as one, since calls for each of many small ones take longer than the sums."""
    found, sizes, follows = list[torch.Tensor](), list[int](), None
    for tensor in tensors:
        flat = (tensor.to_dense() if tensor.is_sparse else tensor).detach().reshape(-1).contiguous()
        if flat.is_complex():
            real, imaginary = flat.real.double(), flat.imag.double()
            flat = (real * real + imaginary * imaginary).sqrt()  # `abs` rounds by where an element lies
        memory, start = (flat.untyped_storage()._cdata, flat.dtype), flat.storage_offset()
        if (memory, start) == follows:
            sizes[-1] += flat.numel()
        else:
            found.append(flat)
            sizes.append(flat.numel())
        follows = memory, start + flat.numel()
    return [each.as_strided((size,), (1,)) for each, size in zip(found, sizes, strict=True)]


def _together(tensors: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """The elements of `tensors`, 1-D, in groups of at most so many."""
    group, room = list[torch.Tensor](), most
    for left in tensors:
        while left.numel() > room:
            yield [*group, left[:room]]
            group, left, room = [], left[room:], most
        group.append(left)
        room -= left.numel()
    if group:
        yield group
