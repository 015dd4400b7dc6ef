"""Collectives on Python values: all-gather, or broadcast from the first rank. For descriptions, not for data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ...errors import AgreementError, FlatFSDPError, by_ranks, current_rank
from ..base.plain_data import bytes_of, decode, encode, gathered
from ..comm.transport import Transport
from ..transports.blocking import broadcast, gather_now
from ..watchdog.regions import expecting
from .collective_calls import meet

T = TypeVar("T")


def _everyones(axes: Sequence[Transport], content: bytes, *, doing: str) -> dict[int, bytes]:
    """Every rank's `content` by global rank, in rank order. Collective over all axes, two exchanges each. [Note: calls]

    `doing` completes "rank 0 ..." while this rank waits for the others.
    """
    rank = axes[0].group.ranks[axes[0].group.rank]

    def gather(own: torch.Tensor) -> torch.Tensor:
        for axis in axes:
            own = gather_now(axis, own)
        return own

    with expecting(ranks_over(axes), doing):
        for axis in axes:
            meet(axis.group.process_group, axis.group.ranks, doing)
        messages = gathered(rank.to_bytes(8, "big") + content, axes[0].device.device, gather)
    return {int.from_bytes(each[:8], "big"): each[8:] for each in sorted(messages)}


def firsts(axes: Sequence[Transport], content: bytes) -> bytes:
    """The `content` of the rank that is the first on all axes. Collective over all axes, two broadcasts each."""
    if _is_alone(axes):
        return content
    device = axes[0].device.device
    payload = torch.frombuffer(bytearray(content or b"-"), dtype=torch.uint8).to(device)
    size = torch.tensor([payload.numel()], device=device)
    for axis in axes:
        broadcast(axis, size)
    if not is_first_of(axes):
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
    for axis in axes:
        broadcast(axis, payload)
    return bytes(bytes_of(payload.cpu()))


def all_or_none(axes: Sequence[Transport], work: Callable[[], T], *, doing: str, objects: bool = False) -> dict[int, T]:
    """The result of `work()` on every rank; if it fails on one, this fails on all. Collective over all axes.

    `doing` completes "rank 0 ...", and is the same on all ranks. `objects`: results may contain objects of user-defined
    classes. [Note: plain data] With fake process groups the result is only that of this rank.

    Raises:
        AgreementError: it failed on other ranks, with their messages; or they make another call.
    """
    if _is_alone(axes):
        return {current_rank(): work()}

    def exchange(content: bytes) -> dict[int, bytes]:
        return _everyones(axes, content, doing=doing)

    def problem(failed: Mapping[int, str], own: Exception | None) -> Exception:
        return own or AgreementError(by_ranks(failed, ": "))

    return on_all_ranks(work, exchange, raises=problem, objects=objects)


def description_of(error: Exception) -> str:
    """`error` in words: the message of a flatfsdp error; class and message of any other one."""
    return str(error) if isinstance(error, FlatFSDPError) else f"{type(error).__name__}: {error}"


def on_all_ranks(
    work: Callable[[], T],
    exchange: Callable[[bytes], Mapping[int, bytes]] | None,
    *,
    raises: Callable[[Mapping[int, str], Exception | None], Exception],
    describe: Callable[[Exception], str] = description_of,
    objects: bool = False,
) -> dict[int, T]:
    """The result of `work()` on every rank; if it fails on one, this fails on all. Collective like `exchange`.

    Args:
        exchange: all-gathers this rank's bytes; returns all, in the order of ranks. None if this rank, 0, is alone.
        raises: makes the exception to raise from the failed ranks with their descriptions and this rank's own
            exception, which it may return.
        describe: makes the description of an exception for the other ranks.
        objects: results may contain objects of user-defined classes. [Note: plain data]
    """
    error = None
    value: Any = None
    content = b""
    try:
        value = work()
        if exchange is not None:
            content = encode((value, None), objects=objects)
    except Exception as raised:  # reported to the others, which would otherwise wait forever
        error = raised
    reported = None if error is None else describe(error)
    try:
        answers = {0: (value, reported)}
        if exchange is not None:
            contents = exchange(content if error is None else encode((None, reported)))
            unpacked = {each: decode(each, objects=objects) for each in {*contents.values()}}  # most ranks' are equal
            answers = {rank: unpacked[each] for rank, each in contents.items()}
        if failed := {rank: words for rank, (_, words) in answers.items() if words is not None}:
            raise raises(failed, error)
    except Exception as problem:
        if problem is error or error is None:
            raise
        # Another traceback with the same message, above that of this error, would not help.
        raise problem from (error.__cause__ if isinstance(error, type(problem)) else error)
    finally:
        del error  # otherwise a cycle of error and frame keeps the model alive until the garbage collector runs
    return {rank: value for rank, (value, _) in answers.items()}


def ranks_over(axes: Sequence[Transport]) -> list[int]:
    """The global ranks on any of `axes`, in order."""
    return sorted({rank for axis in axes for rank in axis.group.ranks})


def is_first_of(axes: Sequence[Transport]) -> bool:
    """Whether this rank is the first on all of `axes`."""
    return all(axis.group.rank == 0 for axis in axes)


def _is_alone(axes: Sequence[Transport]) -> bool:
    return not axes or any(axis.group.backend == "fake" for axis in axes)
