"""Exchanges through shared memory and over gloo: equal to torch's collectives and to sums in rank order, for every
order of waits, with the stated scratch."""

from __future__ import annotations

import contextlib
import random
import time
import weakref
from collections.abc import Iterator
from functools import reduce
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.engine.base import per_group
from flatfsdp.engine.comm.axes import Axis
from flatfsdp.engine.comm.comm_stats import CommStats
from flatfsdp.engine.comm.transport import Transport
from flatfsdp.engine.cpu import gloo, peers
from flatfsdp.engine.cpu.chunks import longest_chunk
from flatfsdp.engine.cpu.groups import of_group, over_gloo
from flatfsdp.engine.device.memory import MemoryTracker
from flatfsdp.engine.device.streams import Device, PendingWork
from flatfsdp.engine.wrapping.exchanges import EXCHANGES
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.memory import peak_bytes
from tests.harness.thorough import is_thorough, some

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
SIZES = [0, 1, 17, 60_000]  # elements of a piece; the last is not sent in one go
SUMMED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
ONLY_GATHERED = [torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]  # gloo knows few of them


def over(group: dist.ProcessGroup | None = None) -> Transport:
    return EXCHANGES.transport(
        Axis.of(group or dist.group.WORLD, CPU), Device(CPU), comm_stats=CommStats(), tracker=MemoryTracker()
    )


# How exchanges go, or why not through shared memory; "in place" are those of large tensors over gloo.
WAYS = ["shared memory", "gloo", "in place", "two hosts"]


@contextlib.contextmanager
def going(way: str, rank: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if way == "shared memory":
            of_group(dist.group.WORLD)  # asked once
        elif way != "two hosts":
            stack.enter_context(over_gloo())
            stack.enter_context(patch.object(gloo, "LARGE", 0 if way == "in place" else 2**40))
        else:
            stack.enter_context(patch.object(per_group, "_made", weakref.WeakKeyDictionary()))
            stack.enter_context(patch.object(peers, "_host", lambda: bytes([min(rank, 1)] * 16)))
        yield


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of very different sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)
    return (numbers * 1e-2).to(dtype)


def in_rank_order(world: int, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return reduce(torch.add, [values(numel, dtype, seed + rank) for rank in range(world)])


def wrong_answers(rank: int, world: int, way: str, thorough: bool) -> list[str]:
    """The exchanges with a wrong result."""
    with going(way, rank):
        transport, stream = over(), Device(CPU).new_stream("test")
        wrong = []
        for number, size in enumerate(SIZES):
            # Of the types every other one where there are more than three ranks, another half for the next size.
            step = 2 if world > 3 and not thorough else 1
            for dtype in (*SUMMED, *ONLY_GATHERED)[number % step :: step]:
                shard = values(size, dtype, rank)
                whole = torch.cat([values(size, dtype, each) for each in range(world)])
                output, in_place = torch.zeros_like(whole), torch.zeros_like(whole)
                transport.all_gather_base(output, shard, stream).wait()
                in_place.chunk(world)[rank].copy_(shard) if size else None
                slot = in_place.narrow(0, rank * size, size)
                transport.all_gather_base(in_place, slot, stream).wait()
                output, in_place, whole = (each.view(torch.uint8) for each in (output, in_place, whole))
                if not (torch.equal(output, whole) and torch.equal(in_place, whole)):
                    wrong.append(f"gather of {size} {dtype}")
                if dtype in ONLY_GATHERED:
                    continue
                total = in_rank_order(world, world * size, dtype, 7)
                piece = torch.empty(size, dtype=dtype)
                transport.reduce_scatter_base(piece, values(world * size, dtype, 7 + rank), stream).wait()
                if not torch.equal(piece, total.narrow(0, rank * size, size)):
                    wrong.append(f"reduce-scatter of {size} {dtype}")
                for numel in {size, world * size + 1}:  # pieces of different sizes, and fewer elements than ranks
                    tensor = values(numel, dtype, 11 + rank)
                    transport.all_reduce(tensor, stream).wait()
                    if not torch.equal(tensor, in_rank_order(world, numel, dtype, 11)):
                        wrong.append(f"all-reduce of {numel} {dtype}")
        for size in (1, 17, 2**21 // (world - 1) + 1001):  # the last in several chunks
            rows = torch.stack([values(size, torch.uint8, each) for each in range(world)])
            arrived = torch.zeros(world - 1, size, dtype=torch.uint8)
            sent = torch.stack([rows[rank] + each for each in range(world) if each != rank])
            transport.all_to_all(arrived, sent, stream).wait()
            if not torch.equal(arrived, torch.stack([rows[each] + rank for each in range(world) if each != rank])):
                wrong.append(f"all-to-all of {size} bytes")
        assert not any(inspect.memory_of(transport).live.values())
        return wrong


# Every way with ranks that are neither first nor last, and two, of which a sum over gloo arrives in its output.
SOME = [(2, "shared memory"), (2, "in place"), *((3, way) for way in WAYS)]


@pytest.mark.parametrize(("world", "way"), [*product((2, 3, 4, 5), WAYS)] if is_thorough() else SOME)
def test_exchanges_bring_what_collectives_bring_and_sum_in_rank_order(run: Run, world: int, way: str) -> None:
    assert run(world, wrong_answers, way, is_thorough()) == [[]] * world


def many_in_flight(rank: int, world: int, way: str) -> list[str]:
    """Gathers and reduce-scatters of different sizes, issued by a rank that is sometimes late, and waited for in an
    order that ranks do not share."""
    with going(way, rank):
        gathers, sums, stream = over(), over(dist.new_group()), Device(CPU).new_stream("test")
        order = random.Random(rank)
        wrong = []
        for turn in range(3):
            waits: list[tuple[str, PendingWork, Tensor, Tensor]] = []
            for k in range(12):
                if rank == world - 1 and k % 5 == turn:
                    time.sleep(0.03)
                size = (k + 1) * (7 if k % 2 else 4099)
                output = torch.full((world * size,), torch.nan)
                whole = torch.cat([values(size, torch.float32, 100 * k + each) for each in range(world)])
                shard = values(size, torch.float32, 100 * k + rank)
                waits.append((f"gather {k}", gathers.all_gather_base(output, shard, stream), output, whole))
                piece, full = torch.full((size,), torch.nan), values(world * size, torch.float32, 50 * k + rank)
                total = in_rank_order(world, world * size, torch.float32, 50 * k)[rank * size : (rank + 1) * size]
                if k % 3:
                    waits.append((f"reduce-scatter {k}", sums.reduce_scatter_base(piece, full, stream), piece, total))
                    continue
                pieces = [7, size // 2, size - 7 - size // 2]  # now several, of which some may be small
                rows = list(zip(*(each.split(pieces) for each in full.chunk(world)), strict=True))
                fulls = [torch.cat(row) for row in rows]
                waits.append((f"list {k}", sums.reduce_scatter_coalesced(piece, fulls, stream), piece, total))
                outputs = torch.full((world * size,), torch.nan).split([world * n for n in pieces])
                pending = gathers.all_gather_coalesced(outputs, shard.split(pieces), stream)
                parts = zip(*(each.split(pieces) for each in whole.chunk(world)), strict=True)
                for number, (output, part) in enumerate(zip(outputs, parts, strict=True)):
                    waits.append((f"gathered list {k}.{number}", pending, output, torch.cat(part)))
            order.shuffle(waits)
            for name, pending, found, expected in waits:
                pending.wait()
                if not torch.equal(found, expected):
                    wrong.append(f"{turn}: {name}")
    return wrong


@pytest.mark.parametrize(
    ("world", "way"), some([*product((2, 3), ("shared memory", "in place")), (4, "gloo"), (5, "shared memory")], 3)
)
def test_many_exchanges_in_flight_are_not_confused(run: Run, world: int, way: str) -> None:
    assert run(world, many_in_flight, way) == [[]] * world


def issued_alone(rank: int, world: int, way: str) -> None:
    """A rank issues an operation and notifies the others, which issue theirs on receipt."""
    with going(way, rank):
        of_group(dist.group.WORLD)  # asked once
        transport, stream, notes = over(), Device(CPU).new_stream("test"), dist.new_group()
        whole, piece = torch.zeros(world * 1000), torch.zeros(1000)
        for first in range(world):
            for issue in (
                lambda: transport.all_gather_base(whole, piece, stream),
                lambda: transport.reduce_scatter_base(piece, whole, stream),
                lambda: transport.all_reduce(whole, stream),
            ):
                if rank == first:
                    pending = issue()
                dist.broadcast(torch.zeros(1), first, group=notes)
                if rank != first:
                    pending = issue()
                pending.wait()


@pytest.mark.parametrize("way", WAYS)
def test_issuing_waits_for_nobody(way: str, pool2: Run) -> None:
    """Otherwise the job would not end: communication overlaps with the rank's next operations."""
    pool2(issued_alone, way)


def waited_for_last(rank: int, world: int, way: str) -> None:
    """Rank 0 has finished an operation before the others begin to wait for it."""
    with going(way, rank):
        of_group(dist.group.WORLD)  # asked once
        transport, stream, notes = over(), Device(CPU).new_stream("test"), dist.new_group()
        numel = outbox(rank, world) // 4 + 1000  # more than an outbox has room for
        whole, piece = torch.ones(world * numel), torch.ones(numel)
        for issue in (
            lambda: transport.all_gather_base(whole, piece, stream),
            lambda: transport.reduce_scatter_base(piece, whole, stream),
            lambda: transport.all_reduce(whole, stream),
        ):
            pending = issue()
            if rank == 0:
                pending.wait()
            dist.broadcast(torch.zeros(1), 0, group=notes)
            pending.wait()


def test_a_rank_that_does_not_come_to_a_wait_keeps_nobody_waiting(pool2: Run) -> None:
    """Otherwise the job would not end. (The second half of an all-reduce over gloo is issued at the wait for it.)"""
    pool2(waited_for_last, "shared memory")


def outbox(rank: int, world: int) -> int:
    """Bytes of this rank's."""
    shared = of_group(dist.group.WORLD)
    assert shared is not None
    return shared.capacity


PIECE = 256 * 1024  # elements


def memory(rank: int, world: int, way: str) -> dict[str, tuple[float, float]]:
    """Bytes that each exchange takes at its peak, in pieces: by the allocator, and by the ledger."""
    with going(way, rank):
        size = PIECE
        shard, piece, full = torch.randn(size), torch.randn(size), torch.randn(world * size)
        transport, stream = over(), Device(CPU).new_stream("test")
        of_group(dist.group.WORLD)  # asked once
        found = {}
        for name, exchange in {
            "gather": lambda: transport.all_gather_base(full, shard, stream).wait(),
            "reduce-scatter": lambda: transport.reduce_scatter_base(piece, full, stream).wait(),
            "all-reduce": lambda: transport.all_reduce(full, stream).wait(),
        }.items():
            inspect.memory_of(transport).reset_peaks()
            peak, left = peak_bytes(exchange)
            assert left == 0
            found[name] = round(peak / size / 4, 2), round(inspect.memory_of(transport).peak("exchange") / size / 4, 2)
        return found


@pytest.mark.parametrize(
    ("world", "way"), [(2, "gloo"), *((world, "in place") for world in (2, 3, 4, *((5, 8) if is_thorough() else ())))]
)
def test_scratch_over_gloo_is_the_pieces_of_peers(run: Run, world: int, way: str) -> None:
    """gloo itself takes a whole output for a gather of a small tensor. Ranks that are neither first nor last also hold
    a copy of what they send; of two ranks, a sum arrives in its output."""
    others = world - 1
    for rank, found in enumerate(run(world, memory, way)):
        sent = others if 0 < rank < world - 1 else 0
        arrived = others if world > 2 else 0
        in_place = sent + others + (rank > 1)  # and the sum of the terms before this rank's own
        assert found["gather"] == (world if way == "gloo" else 0, 0)
        assert found["reduce-scatter"] == (sent + arrived,) * 2
        assert found["all-reduce"] == (in_place, sent + others)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_scratch_in_shared_memory_is_a_chunk_of_a_sum_in_place(run: Run, world: int) -> None:
    """From the third rank on, whose own piece is not the first to be added."""
    (capacity, *_) = run(world, outbox)
    chunk = round(longest_chunk(capacity, 4 * (world - 1)) / PIECE, 2)
    for rank, found in enumerate(run(world, memory, "shared memory")):
        scratch = chunk if rank > 1 else 0
        assert found == {"gather": (0, 0), "reduce-scatter": (0, 0), "all-reduce": (scratch, scratch)}
