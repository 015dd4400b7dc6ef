"""Python values between ranks: everybody's to everybody, or the first rank's to all. For descriptions, not for data."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from .comm import Transport
from .errors import AgreementError, FlatFSDPError, current_rank
from .peers import ranks_in_words
from .watch import expecting

T = TypeVar("T")


def everyones(axes: Sequence[Transport], value: T, *, doing: str) -> dict[int, T]:
    """Every rank's `value` by global rank, in rank order. Collective over all axes, two exchanges each.

    `doing` completes "rank 0 ..." while this rank waits for the others. Process groups that move nothing (torch's fake
    ones) give this rank's alone.
    """
    rank = current_rank() if not axes else axes[0].group.ranks[axes[0].group.rank]
    if _is_alone(axes):
        return {rank: value}
    device = axes[0].device.device
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    with expecting(ranks_over(axes), doing):
        sizes = torch.tensor([rank, payload.numel()], device=device)
        for axis in axes:
            sizes = axis.gather_now(sizes)
        heads = sizes.view(-1, 2).tolist()
        block = torch.zeros(max(size for _, size in heads), dtype=torch.uint8, device=device)
        block[: payload.numel()] = payload.to(device)
        for axis in axes:
            block = axis.gather_now(block)
    rows = block.view(len(heads), -1).cpu().numpy()
    texts = {rank: row[:size].tobytes() for (rank, size), row in zip(heads, rows, strict=True)}
    return {rank: pickle.loads(texts[rank]) for rank in sorted(texts)}


def firsts(axes: Sequence[Transport], value: T) -> T:
    """The `value` of the rank that is the first on all axes. Collective over all axes, two broadcasts each."""
    if _is_alone(axes):
        return value
    device = axes[0].device.device
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    size = torch.tensor([payload.numel()], device=device)
    for axis in axes:
        axis.broadcast(size)
    if not is_first_of(axes):
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
    for axis in axes:
        axis.broadcast(payload)
    sent: T = pickle.loads(payload.cpu().numpy().tobytes())
    return sent


def together(axes: Sequence[Transport], work: Callable[[], T], *, doing: str) -> dict[int, T]:
    """What `work()` returned on every rank; where it fails on one, this fails on all. Collective over all axes.

    Raises:
        AgreementError: it failed on other ranks, and the message is theirs; or they are doing something else.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as raised:
        error = raised
    answers = everyones(axes, (doing, value, None if error is None else _told(error)), doing=doing)
    if error is not None:
        raise error
    if failed := [rank for rank, (_, _, text) in answers.items() if text is not None]:
        raise AgreementError(by_ranks({rank: f": {answers[rank][2]}" for rank in failed}))
    if any(other != doing for other, _, _ in answers.values()):
        told = by_ranks({rank: f" {other}" for rank, (other, _, _) in answers.items()})
        raise AgreementError(f"{told}. These calls are collective: all ranks must make the same, in the same order")
    return {rank: answer for rank, (_, answer, _) in answers.items()}  # type: ignore[misc]


def by_ranks(texts: Mapping[int, str]) -> str:
    """What ranks have to say, once for those that say the same: "rank 0 ...; ranks 1, 2 ..."."""
    alike: dict[str, list[int]] = {}
    for rank, text in texts.items():
        alike.setdefault(text, []).append(rank)
    return "; ".join(f"{ranks_in_words(ranks)}{text}" for text, ranks in alike.items())


def ranks_over(axes: Sequence[Transport]) -> list[int]:
    """The global ranks on any of `axes`, in order."""
    return sorted({rank for axis in axes for rank in axis.group.ranks})


def is_first_of(axes: Sequence[Transport]) -> bool:
    """Whether this rank is the first on all of them."""
    return all(axis.group.rank == 0 for axis in axes)


def _is_alone(axes: Sequence[Transport]) -> bool:
    return not axes or any(axis.group.backend == "fake" for axis in axes)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, FlatFSDPError) else f"{type(error).__name__}: {error}"
