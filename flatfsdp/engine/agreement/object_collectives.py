"""Python values between ranks: everybody's to everybody, or the first rank's to all. For descriptions, not for data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from ...errors import AgreementError, FlatFSDPError, current_rank, ranks_in_words
from ..base.plain_data import decode, encode
from ..comm.transport import Transport
from ..watchdog.watchdog import expecting
from .collective_calls import meet

T = TypeVar("T")


def _everyones(axes: Sequence[Transport], content: bytes, *, doing: str) -> dict[int, bytes]:
    """Every rank's `content` by global rank, in rank order. Collective over all axes, two exchanges each. [Note: calls]

    `doing` completes "rank 0 ..." while this rank waits for the others.
    """
    rank, device = axes[0].group.ranks[axes[0].group.rank], axes[0].device.device
    payload = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    with expecting(ranks_over(axes), doing):
        for axis in axes:
            meet(axis.group.process_group, axis.group.ranks, doing)
        sizes = torch.tensor([rank, payload.numel()], device=device)
        for axis in axes:
            sizes = axis.gather_now(sizes)
        heads = sizes.view(-1, 2).tolist()
        block = torch.zeros(max(size for _, size in heads), dtype=torch.uint8, device=device)
        block[: payload.numel()] = payload.to(device)
        for axis in axes:
            block = axis.gather_now(block)
    rows = block.view(len(heads), -1).cpu().numpy()
    found = {rank: row[:size].tobytes() for (rank, size), row in zip(heads, rows, strict=True)}
    return {rank: found[rank] for rank in sorted(found)}


def firsts(axes: Sequence[Transport], content: bytes) -> bytes:
    """The `content` of the rank that is the first on all axes. Collective over all axes, two broadcasts each."""
    if _is_alone(axes):
        return content
    device = axes[0].device.device
    payload = torch.frombuffer(bytearray(content or b"-"), dtype=torch.uint8).to(device)
    size = torch.tensor([payload.numel()], device=device)
    for axis in axes:
        axis.broadcast(size)
    if not is_first_of(axes):
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
    for axis in axes:
        axis.broadcast(payload)
    return bytes(payload.cpu().numpy().tobytes())


def all_or_none(axes: Sequence[Transport], work: Callable[[], T], *, doing: str, objects: bool = False) -> dict[int, T]:
    """What `work()` returned on every rank; where it fails on one, this fails on all. Collective over all axes.

    `doing` completes "rank 0 ...", and is the same on all. `objects`: users' own may be in it. [Note: plain data]
    Process groups that move nothing (torch's fake ones) bring nothing of other ranks.

    Raises:
        AgreementError: it failed on other ranks, and the message is theirs; or they are doing something else.
    """
    if _is_alone(axes):
        return {current_rank(): work()}
    error = None
    try:
        payload = encode((work(), None), objects=objects)
    except Exception as raised:
        error = raised
        payload = encode((None, _description_of(error)))
    contents = _everyones(axes, payload, doing=doing)
    unpacked = {each: decode(each, objects=objects) for each in set(contents.values())}  # most ranks say the same
    answers = {rank: unpacked[each] for rank, each in contents.items()}
    if error is not None:
        try:
            raise error
        finally:
            del error  # or it holds the frame that holds it, and with it the model, until the garbage collector comes
    if failed := [rank for rank, (_, text) in answers.items() if text is not None]:
        raise AgreementError(by_ranks({rank: f": {answers[rank][1]}" for rank in failed}))
    return {rank: answer for rank, (answer, _) in answers.items()}


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


def _description_of(error: Exception) -> str:
    return str(error) if isinstance(error, FlatFSDPError) else f"{type(error).__name__}: {error}"
