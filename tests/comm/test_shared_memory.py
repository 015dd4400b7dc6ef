"""Exchanges through outboxes, by real processes: bit-equal to sums in rank order, for any delay of a rank and any
order of waits. The protocol alone is in `tests/comm/test_interleavings.py`, dead peers in
`tests/comm/test_shared_memory_faults.py`."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.comm.comm_stats import CommStats
from flatfsdp.engine.cpu import exchange as outboxes
from flatfsdp.engine.cpu import malloc, peers
from flatfsdp.engine.cpu.chunks import ChunkStream
from flatfsdp.engine.cpu.collectives import SharedMemoryExchange
from flatfsdp.engine.cpu.exchange import Attendant
from flatfsdp.engine.cpu.groups import connect, over_gloo, shares
from flatfsdp.engine.cpu.operations import Gather, Sum
from flatfsdp.engine.cpu.segments import MemorySegment
from flatfsdp.engine.device.memory import MemoryTracker
from flatfsdp.engine.device.streams import PendingWork
from flatfsdp.engine.transports.pieces import RankPieces, pieces_of_ranks
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.thorough import seeds

pytestmark = pytest.mark.distributed

TINY = 2048  # bytes of an outbox: a chunk has less than half
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int32, torch.int64, torch.uint8,
]  # fmt: skip
SIZES = [1, 3, 17, 1001]  # elements of a piece


def exchange(capacity: int = TINY, group: Any = None) -> SharedMemoryExchange:
    shared, why = connect(group or dist.group.WORLD, capacity=capacity)
    assert shared is not None, why
    return SharedMemoryExchange(shared, tracker=MemoryTracker(), comm_stats=CommStats())


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of very different sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 100, (numel,), generator=generator).to(dtype)
    numbers = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)
    return (numbers * 1e-2).to(dtype)


def total(world: int, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return reduce(torch.add, [values(numel, dtype, seed + rank) for rank in range(world)])


Exchanged = tuple[str, PendingWork, Tensor, Tensor]  # name, pending work, output, expected output


def issue(way: SharedMemoryExchange, what: str, rank: int, world: int, size: int, dtype: torch.dtype) -> Exchanged:
    name, seed = f"{what} of {size} {dtype}", 100 * size
    if what == "all-reduce":
        output, expected = values(size, dtype, seed + rank), total(world, size, dtype, seed)
        return name, way.all_reduce(output), output, expected
    if "list" in what:
        return name, *issue_list(way, what, rank, world, size, dtype)
    if what == "reduce-scatter":
        output, full = torch.zeros(size, dtype=dtype), values(world * size, dtype, seed + rank)
        expected = total(world, world * size, dtype, seed).chunk(world)[rank]
        return name, way.reduce_scatter(RankPieces([output]), pieces_of_ranks([full], world)), output, expected
    shards = [values(size, dtype, seed + each) for each in range(world)]
    output, shard = torch.zeros(world * size, dtype=dtype), shards[rank]
    if what == "gather in place":
        shard = output.chunk(world)[rank].copy_(shard)
    return name, way.gather(pieces_of_ranks([output], world), [shard]), output, torch.cat(shards)


def issue_list(
    way: SharedMemoryExchange, what: str, rank: int, world: int, size: int, dtype: torch.dtype
) -> tuple[PendingWork, Tensor, Tensor]:
    """An exchange of `size` elements as a list of several tensors of different sizes, some of them empty."""
    draw, seed = random.Random(size), 100 * size
    ends = sorted(draw.randint(0, size) for _ in range(draw.randint(0, 9)))
    sizes = [end - start for start, end in zip([0, *ends], [*ends, size], strict=True)]
    row = [values(n, dtype, seed + rank + 10 * k) for k, n in enumerate(sizes)]
    if what == "gather of a list":
        memory = torch.zeros(world * size, dtype=dtype)
        outputs = memory.split([world * n for n in sizes])
        expected = torch.cat([values(n, dtype, seed + r + 10 * k) for k, n in enumerate(sizes) for r in range(world)])
        return way.gather(pieces_of_ranks(outputs, world), row), memory, expected
    fulls = [values(world * n, dtype, seed + rank + 10 * k) for k, n in enumerate(sizes)]
    sums = [total(world, world * n, dtype, seed + 10 * k) for k, n in enumerate(sizes)]
    output, expected = torch.zeros(size, dtype=dtype), torch.cat([each.chunk(world)[rank] for each in sums])
    return way.reduce_scatter(RankPieces(output.split(sizes)), pieces_of_ranks(fulls, world)), output, expected


MODES: dict[str, Callable[[], Any]] = {
    "grad": nullcontext, "no grad": torch.no_grad, "inference": torch.inference_mode,
}  # fmt: skip
KINDS = ["gather", "gather in place", "reduce-scatter", "all-reduce", "gather of a list", "reduce-scatter of a list"]


def wrong(waits: list[Exchanged]) -> list[str]:
    """Wait in this order; the names of those with a wrong bit."""
    found = []
    for name, pending, output, expected in waits:
        pending.wait()
        if not torch.equal(output.view(torch.uint8), expected.contiguous().view(torch.uint8)):
            found.append(name)
    return found


def one_by_one(rank: int, world: int, capacity: int) -> list[str]:
    way, found = exchange(capacity), []
    for size in SIZES:
        for dtype in DTYPES:
            for what in KINDS:
                found += wrong([issue(way, what, rank, world, size, dtype)])
    for numel in (1, world - 1, world + 1, world * 1000 - 1):  # pieces of different sizes, and none for some ranks
        for dtype in DTYPES:
            found += wrong([issue(way, "all-reduce", rank, world, numel, dtype)])
    return found


@pytest.mark.parametrize(("world", "capacity"), [(2, TINY), (3, TINY), (4, TINY), (3, 4 * 1024 * 1024)])
def test_values_are_those_of_a_sum_in_rank_order(run: Run, world: int, capacity: int) -> None:
    assert run(world, one_by_one, capacity) == [[]] * world


@contextmanager
def delayed(draw: random.Random, share: float = 0.1) -> Iterator[None]:
    """This rank sleeps at times before it receives from its peers, and before and after it notifies them."""

    def late(plain: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            if draw.random() < share:
                time.sleep(draw.choice([0, 0.0003, 0.002]))
            result = plain(*args)
            if draw.random() < share:
                time.sleep(draw.choice([0, 0.0003, 0.002]))
            return result

        return slow

    with ExitStack() as stack:
        for name in ("to_post", "was_posted", "to_take", "was_taken"):
            stack.enter_context(patch.object(ChunkStream, name, late(getattr(ChunkStream, name))))
        yield


def at_random(rank: int, world: int, seed: int) -> list[str]:
    """Several groups' exchanges, all issued before the first is waited for, each rank in an order and modes of its
    own."""
    draw, own = random.Random(seed), random.Random(seed * 10 + rank)
    capacity = draw.choice([1024, TINY, 10_000])
    ways, found = [exchange(capacity), exchange(capacity)], []
    rest = patch.object(outboxes, "TRIM_AFTER", own.choice([0.0002, outboxes.TRIM_AFTER]))
    with rest, delayed(own, draw.choice([0.05, 0.3])):
        for _ in range(3):
            waits = []
            for number in range(draw.randint(1, 15)):
                size = draw.choice([1, 7, 400, 3000]) + number
                what, dtype, way = draw.choice(KINDS), draw.choice(DTYPES), draw.choice(ways)
                with MODES[own.choice([*MODES])]():
                    waits.append(issue(way, what, rank, world, size, dtype))
                if own.random() < 0.1:
                    time.sleep(own.choice([0.005, 0.02]))  # so long that the thread does it
            if own.random() < 0.8:
                own.shuffle(waits)
            with MODES[own.choice([*MODES])]():
                found += wrong(waits)
    return found


@pytest.mark.parametrize("seed", seeds(3, 200))
def test_many_under_way_with_delays_at_every_hand_shake(run: Run, seed: int) -> None:
    world = 2 + seed % 3
    assert run(world, at_random, seed) == [[]] * world


def overlapping_groups(rank: int, world: int) -> list[str]:
    """Ranks 0 and 1, 1 and 2, and all: every rank waits for another group first, with tensors larger than outboxes."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    ways: dict[str, tuple[SharedMemoryExchange, int, int]] = {"all": (exchange(), rank, world)}
    for number, group in enumerate(pairs):
        if rank in (number, number + 1):
            ways[f"pair {number}"] = (exchange(group=group), rank - number, 2)
    waits = {
        name: [issue(way, kind, own, size, 5000, torch.float32) for kind in KINDS]
        for name, (way, own, size) in ways.items()
    }
    first = {0: ["all", "pair 0"], 1: ["pair 1", "all", "pair 0"], 2: ["all", "pair 1"]}[rank]
    found = [each for name in first for each in wrong(waits[name])]
    for group in pairs:
        dist.destroy_process_group(group) if group != dist.GroupMember.NON_GROUP_MEMBER else None
    return found


def test_ranks_wait_for_different_groups_first(pool3: Run) -> None:
    assert pool3(overlapping_groups) == [[]] * 3


def by_threads(rank: int, world: int) -> list[str]:
    """Two threads, each with a group of its own."""
    ways, found = [exchange(), exchange()], []

    def work(way: SharedMemoryExchange) -> None:
        for _ in range(10):
            found.extend(wrong([issue(way, kind, rank, world, 1001, torch.float32) for kind in KINDS]))

    threads = [threading.Thread(target=work, args=(way,)) for way in ways]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def test_threads_exchange_over_groups_of_their_own(pool2: Run) -> None:
    assert pool2(by_threads) == [[]] * 2


def sent_later(rank: int, world: int) -> list[str]:
    """A rank issues, notifies the others by other means, and they issue then."""
    way, found = exchange(), []
    for first in range(world):
        for kind in KINDS:
            if rank == first:
                waits = [issue(way, kind, rank, world, 5000, torch.float32)]
            dist.broadcast(torch.zeros(1), first)
            if rank != first:
                waits = [issue(way, kind, rank, world, 5000, torch.float32)]
            found += wrong(waits)
    return found


def test_issuing_waits_for_nobody(pool3: Run) -> None:
    assert pool3(sent_later) == [[]] * 3


def forgotten(rank: int, world: int) -> list[str]:
    """Work without a waiter, larger than outboxes, progresses while a rank waits for something else."""
    way = exchange()
    for kind in KINDS:
        issue(way, kind, rank, world, 3000, torch.float32)
    return wrong([issue(way, kind, rank, world, 1001, torch.float32) for kind in KINDS])


def test_work_that_nobody_waits_for_does_no_harm(pool2: Run) -> None:
    assert pool2(forgotten) == [[]] * 2


def interrupted(rank: int, world: int) -> tuple[list[float], str]:
    """The last rank is interrupted when it has added up a piece of an all-reduce in place, and tries again."""
    way, tensor, text = exchange(), torch.full((world * 10,), rank + 1.0), "nothing"
    take = Sum.take

    def stop(self: Sum, *args: Any) -> None:
        take(self, *args)
        raise KeyboardInterrupt

    with patch.object(Attendant, "begin", lambda self: None):  # the thread would be through before
        if rank < world - 1:
            try:
                way.all_reduce(tensor).wait()
            except dist.DistError as error:
                text = str(error)
            dist.barrier()
            return [], text
        with patch.object(Sum, "take", stop), suppress(KeyboardInterrupt):
            way.all_reduce(tensor).wait()
        try:
            way.all_reduce(torch.ones(world)).wait()
        except dist.DistError as error:
            text = str(error)
        dist.barrier()
    return tensor.unique().tolist(), text


def test_what_was_interrupted_is_not_added_up_again(pool2: Run) -> None:
    (_, peer_text), (found, text) = pool2(interrupted, timeout=10)
    assert found == [2.0, 3.0]  # rank 0's piece as it was, this rank's with both
    assert (
        "rank 1 of the group was interrupted in the middle of an exchange, which cannot continue, by Keyboard" in text
    )
    assert "rank 1 of the group was interrupted in the middle of an exchange, and rank 0 is waiting for it" in peer_text


def shared_bytes() -> int:
    """Bytes of the shared memory that this process maps, each page counted once over all processes that map it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem:"))


def rests(rank: int, world: int, retains: bool) -> tuple[bool, list[str]]:
    """Whether the pages of an outbox are freed some time after an exchange; and the errors of the next one."""
    way, size = exchange(8 * 1024 * 1024), 2 * 1024 * 1024
    with patch.object(malloc, "_retains", retains):
        found = wrong([issue(way, "gather", rank, world, size, torch.float32)])
        dist.barrier()
        limit = time.monotonic() + (4 * outboxes.TRIM_AFTER if retains else 20)
        while (held := shared_bytes()) > 1024 * 1024 and time.monotonic() < limit:
            time.sleep(0.02)
        dist.barrier()
        found += wrong([issue(way, kind, rank, world, 1001, torch.float32) for kind in KINDS])
    return held > 1024 * 1024, found


@pytest.mark.parametrize("retains", [False, True])
def test_an_outbox_takes_no_memory_while_nothing_is_exchanged(retains: bool, pool2: Run) -> None:
    """Unless the process keeps freed memory."""
    assert pool2(rests, retains) == [(retains, [])] * 2


def patience(rank: int, world: int, processors: int) -> int:
    inspect.share_processors(False)
    try:
        with patch.object(os, "sched_getaffinity", return_value=set(range(processors))):
            return inspect.looks(exchange())
    finally:
        inspect.share_processors()


def test_who_shares_a_processor_sleeps_sooner(pool3: Run) -> None:
    alone, sharing = pool3(patience, 3), pool3(patience, 2)
    assert alone == [10 * each for each in sharing]


def idle(rank: int, world: int) -> tuple[float, list[str]]:
    """Seconds of a processor that each rank takes while all wait for the last one, for two seconds."""
    way = exchange()
    assert wrong([issue(way, "gather", rank, world, 100, torch.float32)]) == []
    dist.barrier()
    began = time.process_time()
    if rank == world - 1:
        time.sleep(2)
    found = wrong([issue(way, kind, rank, world, 1001, torch.float32) for kind in KINDS])
    return time.process_time() - began, found


def test_who_waits_for_long_sleeps(pool3: Run) -> None:
    for seconds, found in pool3(idle):
        assert found == []
        assert seconds < 1


def rests_soon(rank: int, world: int) -> tuple[bool, bool, list[str]]:
    """Whether rank 0, which is to rest while rank 1 has yet to read, keeps the pages until then, and no longer."""
    way, take = exchange(), Gather.take

    def late(self: Gather, *args: Any) -> None:
        time.sleep(0.3)
        take(self, *args)

    with patch.object(outboxes, "TRIM_AFTER", 60):
        with patch.object(Gather, "take", late) if rank == 1 else nullcontext():
            found = wrong([issue(way, "gather", rank, world, 100, torch.float32)])
            way.trim()
            kept = inspect.outbox_bytes(way) > 0
            limit = time.monotonic() + 10
            while (held := inspect.outbox_bytes(way)) and time.monotonic() < limit:
                time.sleep(0.01)
        dist.barrier()
        found += wrong([issue(way, kind, rank, world, 1001, torch.float32) for kind in KINDS])
    return kept, held > 0, found


def test_an_outbox_rests_soon_once_peers_have_read_it(pool2: Run) -> None:
    assert pool2(rests_soon) == [(True, False, []), (False, False, [])]


def without_memory(rank: int, world: int) -> str:
    """The last rank's outbox is at rest, and finds no memory when it is to be used again."""
    way, text = exchange(), "nothing"
    assert wrong([issue(way, "gather", rank, world, 17, torch.float32)]) == []
    dist.barrier()
    assert inspect.outbox_rests(way)
    failing = patch.object(MemorySegment, "take_pages", side_effect=OSError(12, "Cannot allocate memory"))
    with failing if rank == world - 1 else nullcontext():
        try:
            wrong([issue(way, "gather", rank, world, 17, torch.float32)])
        except dist.DistError as error:
            text = str(error)
    dist.barrier()
    return text


def test_a_rank_without_memory_for_its_outbox_ends_the_exchange_in_words(pool2: Run) -> None:
    peer, own = pool2(without_memory, timeout=10)
    assert "cannot allocate the 2048 bytes of the send buffer of rank 1 of the group: [Errno 12] Cannot" in own
    assert "rank 1 of the group was interrupted in the middle of an exchange, and rank 0 is waiting for it" in peer


def reused_at_once(rank: int, world: int, capacity: int) -> list[str]:
    """All ranks but the last overwrite tensors of an exchange when their wait has ended; the last reads late."""
    way, size, found = exchange(capacity), 1001, []
    doubles = [patch.object(kind, "take", slow(kind.take)) for kind in (Gather, Sum)] if rank == world - 1 else []
    with ExitStack() as stack:
        for each in doubles:
            stack.enter_context(each)
        for what in ("gather", "reduce-scatter", "all-reduce"):
            own, expected = values(world * size, torch.float32, rank), total(world, world * size, torch.float32, 0)
            if what == "gather":
                given, received = own[:size].clone(), torch.zeros(world * size)
                expected = torch.cat([values(world * size, torch.float32, each)[:size] for each in range(world)])
                pending = way.gather(pieces_of_ranks([received], world), [given])
            elif what == "reduce-scatter":
                given, received = own, torch.zeros(size)
                expected = expected.chunk(world)[rank]
                pending = way.reduce_scatter(RankPieces([received]), pieces_of_ranks([given], world))
            else:
                given = received = own
                pending = way.all_reduce(received)
            pending.wait()
            if not torch.equal(received, expected):
                found.append(what)
            for each in (given, received):
                each.fill_(torch.nan)
    return found


def slow(take: Callable[..., None]) -> Callable[..., None]:
    def late(*args: Any) -> None:
        time.sleep(0.02)
        take(*args)

    return late


@pytest.mark.parametrize("capacity", [TINY, 4 * 1024 * 1024])
@pytest.mark.parametrize("world", [2, 3])
def test_tensors_may_be_written_when_a_wait_has_ended_although_a_peer_reads_late(
    run: Run, world: int, capacity: int
) -> None:
    assert run(world, reused_at_once, capacity) == [[]] * world


def waits_elsewhere(rank: int, world: int, mode: str) -> list[str]:
    """Rank 1 waits for rank 0 by other means before it waits for pending work, which its thread progresses."""
    way = exchange()
    with MODES[mode]():
        waits = [issue(way, kind, rank, world, 5000, torch.float32) for kind in KINDS]
    if rank == 1:
        dist.barrier()
    found = wrong(waits)
    if rank == 0:
        dist.barrier()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_waits_by_other_means_while_its_peer_waits_for_it_here(mode: str, pool2: Run) -> None:
    assert pool2(waits_elsewhere, mode, timeout=10) == [[]] * 2


def on_two_hosts(rank: int, world: int) -> tuple[list[bool | None], bool]:
    """Which axes of a hybrid share memory if ranks 0 and 1 are on one host, and 2 and 3 on another; and whether its
    parameters are those of exchanges over gloo."""
    found = []
    for elsewhere in (nullcontext(), over_gloo()):
        with elsewhere, patch.object(peers, "_host", lambda: bytes([rank // 2]) * 16):
            mesh = dist.init_device_mesh("cpu", (2, 2))
            torch.manual_seed(0)
            model = FullyShardedDataParallel(
                nn.Sequential(nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 3)),
                sharding_strategy="HYBRID_SHARD",
                device_mesh=mesh,
                auto_wrap_policy={nn.Linear},
                use_orig_params=True,
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            axes = [shares(mesh.get_group(axis)) for axis in (1, 0)]
            with FullyShardedDataParallel.summon_full_params(model):
                found.append((axes, [p.detach().clone() for p in model.parameters()]))
    (axes, parameters), (_, plain) = found
    return axes, all(map(torch.equal, parameters, plain))


def test_the_shards_of_a_hybrid_share_memory_where_its_replicas_are_on_other_hosts(pool4: Run) -> None:
    assert pool4(on_two_hosts) == [([True, False], True)] * 4


def through(what: str) -> tuple[list[Tensor], set[bool]]:
    """Three steps of a model, with operation `what` after the first: its gradients and parameters, whole; and which of
    the groups that it used shared memory."""
    torch.manual_seed(0)
    layers = (nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 3))
    model: Any = FullyShardedDataParallel(nn.Sequential(*layers), auto_wrap_policy={nn.Linear}, use_orig_params=True)
    found: list[Tensor] = []
    kept: list[tuple[Tensor, Tensor]] = []
    rank, dtype = dist.get_rank(), torch.float32
    for step in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float32).to(dtype)
        model(x).square().sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        if step == 0:
            model, dtype, kept = done(what, model)
    with FullyShardedDataParallel.summon_full_params(model):
        found += [p.detach().clone() for p in model.parameters()]
    found += [view for view, _ in kept]
    assert all(torch.equal(view, copy_) for view, copy_ in kept), what
    groups = {unit.reduction_group for unit in inspect.units(model)}
    return found, {shares(group) is True for group in groups}


def done(what: str, model: Any) -> tuple[Any, torch.dtype, list[tuple[Tensor, Tensor]]]:
    """The model to continue with, its dtype, and views of the shards of a freed model, with their values."""
    if what == "to":
        return model.to(torch.float64), torch.float64, []
    if what == "share_memory":
        assert model.share_memory() is model
        assert all(p.is_shared() for p in model.parameters())
    if what == "deepcopy":
        model = copy.deepcopy(model)
    if what == "pickle":
        model = pickle.loads(pickle.dumps(model))
    if what == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        model = torch.load(file, weights_only=False)
    kept = []
    if what == "views":
        kept = [(view := p.detach()[1:], view.clone()) for p in model.parameters() if p.numel()]
        model = copy.deepcopy(model)  # the base of the views is freed
        gc.collect()
    return model, torch.float32, kept


def as_users_do(rank: int, world: int, what: str) -> list[bool]:
    found, shared = through(what)
    with over_gloo():
        plain, _ = through(what)
    assert len(found) == len(plain) > 10
    return [all(map(torch.equal, found, plain)), *shared]


@pytest.mark.parametrize("what", ["to", "share_memory", "deepcopy", "pickle", "torch.save", "views"])
def test_what_users_do_to_a_model_is_as_it_is_over_gloo(what: str, pool2: Run) -> None:
    assert pool2(as_users_do, what) == [[True, True]] * 2
