"""Lists of tensors that travel as one: the same values as one by one, on every way; which ones are staged."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp import comm_hooks
from flatfsdp.engine.comm import transport as comm
from flatfsdp.engine.comm.axes import Axis, served_as
from flatfsdp.engine.comm.comm_stats import CommStats
from flatfsdp.engine.comm.transport import Transport
from flatfsdp.engine.cpu.collectives import LARGE
from flatfsdp.engine.cpu.groups import over_gloo
from flatfsdp.engine.device.memory import MemoryTracker
from flatfsdp.engine.device.streams import Device
from flatfsdp.engine.features.comm_hook import HookReducer, comm_hook
from flatfsdp.engine.transports import staged
from flatfsdp.engine.transports.staged import SMALL
from flatfsdp.engine.wrapping.exchanges import EXCHANGES
from tests.comm.test_exchange import CPU, WAYS, going, in_rank_order, values
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.delayed import DelayedTransport
from tests.harness.fake import fake_world
from tests.harness.memory import peak_bytes
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.distributed

# Elements of a piece: none, few, and (`small_is`) enough to go in place; small ones side by side, and not.
LISTS = [
    [400, 3, 501, 0, 17, 600],
    [5, 1, 70],
    [0, 0],
    [900],
    [330, 9, 331],
    [0, 2],
    [12, 3, 501, 17, 40, 4],
]
DTYPES = [torch.float32, torch.bfloat16, torch.complex64]


def over(double: Callable[[Transport], Transport] | None = None) -> Transport:
    with comm.doubled(double) if double else contextlib.nullcontext():
        return EXCHANGES.transport(
            Axis.of(dist.group.WORLD, CPU), Device(CPU), comm_stats=CommStats(), tracker=MemoryTracker()
        )


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def in_one_storage(tensors: list[Tensor]) -> list[Tensor]:
    """Such ones, side by side, as units have them."""
    return list(torch.cat(tensors).split([each.numel() for each in tensors]))


@contextlib.contextmanager
def small_is(count: int) -> Iterator[None]:
    """A context in which tensors of at most `count` bytes are small."""
    with patch.object(staged, "SMALL", count):
        yield


def gathered_wrongly(transport: Transport, rank: int, world: int, sizes: list[int], dtype: torch.dtype) -> list[str]:
    """Lists whose shards lie in place, apart, and in other dtypes; two at once, and each again."""
    stream, wrong = Device(CPU).new_stream("test"), []
    shards_of = [[values(size, dtype, 100 * k + each) for k, size in enumerate(sizes)] for each in range(world)]
    wholes = [torch.cat(shards) for shards in zip(*shards_of, strict=True)]
    outputs, others = ([torch.full_like(whole, 77) for whole in wholes] for _ in range(2))
    others = in_one_storage(others)
    for turn in range(4):
        if turn == 2:
            shards_of[rank] = in_one_storage(shards_of[rank])
        apart, mixed = shards_of[rank], [*shards_of[rank]]
        for k, output in enumerate(outputs):
            if (turn + k) % 3 == 0:
                mixed[k] = output.fill_(77).narrow(0, rank * sizes[k], sizes[k]).copy_(apart[k])
            elif (turn + k) % 3 == 1:
                mixed[k] = apart[k].to(torch.complex128 if dtype.is_complex else torch.float64)
        waits = [transport.all_gather_coalesced(*each, stream) for each in ((outputs, mixed), (others, apart))]
        for each in waits[:: -1 if turn == 2 else 1]:
            each.wait()
        for k, whole in enumerate(wholes):
            if not all(torch.equal(bits(found), bits(whole)) for found in (outputs[k], others[k])):
                wrong.append(f"gather {turn} of {dtype}, number {k} of {sizes}")
            others[k].fill_(77)
    return wrong


def summed_wrongly(transport: Transport, rank: int, world: int, sizes: list[int], dtype: torch.dtype) -> list[str]:
    stream, wrong = Device(CPU).new_stream("test"), []
    for turn in range(2):
        fulls = [values(world * size, dtype, 100 * k + turn + rank) for k, size in enumerate(sizes)]
        fulls = in_one_storage(fulls) if turn else fulls
        outputs = [torch.full((sum(sizes),), 77, dtype=dtype) for _ in range(2)]
        waits = [transport.reduce_scatter_coalesced(output, fulls, stream) for output in outputs]
        for each in waits[:: -1 if turn else 1]:
            each.wait()
        totals = [in_rank_order(world, world * size, dtype, 100 * k + turn) for k, size in enumerate(sizes)]
        expected = torch.cat([total.narrow(0, rank * n, n) for total, n in zip(totals, sizes, strict=True)])
        if not all(torch.equal(bits(output), bits(expected)) for output in outputs):
            wrong.append(f"sum {turn} of {sizes} {dtype}")
    return wrong


def wrong_answers(rank: int, world: int, way: str, double: Callable[[Transport], Transport] | None = None) -> list[str]:
    with going(way, rank), small_is(1000):
        transport, wrong = over(double), []
        for number, sizes in enumerate(LISTS):
            for dtype in DTYPES if number < 2 else DTYPES[:1]:
                for check in (gathered_wrongly, summed_wrongly):
                    wrong += check(transport, rank, world, sizes, dtype)
        assert not any(inspect.memory_of(transport).live.values())
        return wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3, 5] if is_thorough() else [3])
def test_lists_bring_what_single_exchanges_bring(run: Run, world: int, way: str) -> None:
    assert run(world, wrong_answers, way) == [[]] * world


@pytest.mark.parametrize("way", ["shared memory", "in place"])
def test_lists_arrive_late(pool2: Run, way: str) -> None:
    assert pool2(wrong_answers, way, DelayedTransport) == [[]] * 2


def by_torchs_collectives(rank: int, world: int, plain: bool) -> list[str]:
    """As on a backend of which nothing is known, and with nothing but the nucleus; two ranks' sums have one order."""
    with going("gloo", rank), served_as("unknown"), small_is(1000):
        transport = over(lambda inner: Transport(**inspect.arguments_of(inner))) if plain else over()
        return [
            line
            for sizes in LISTS
            for check in (gathered_wrongly, summed_wrongly)
            for line in check(transport, rank, world, sizes, torch.float32)
        ]


@pytest.mark.parametrize("plain", [False, True], ids=["staged", "each alone"])
def test_lists_travel_by_collectives_of_torchs(pool2: Run, plain: bool) -> None:
    assert pool2(by_torchs_collectives, plain) == [[]] * 2


def on_one_rank(rank: int, world: int) -> list[str]:
    transport = EXCHANGES.transport(Axis.alone(), Device(CPU), comm_stats=CommStats(), tracker=MemoryTracker())
    return [
        line
        for sizes in LISTS
        for check in (gathered_wrongly, summed_wrongly)
        for line in check(transport, 0, 1, sizes, torch.float32)
    ]


def test_lists_on_an_axis_of_one_rank_are_copied(run: Run) -> None:
    assert run(1, on_one_rank) == [[]]


def test_small_tensors_are_staged_on_every_backend() -> None:
    """A model that was given other transports computes the same, only slower: counts show it alone."""
    small, device = [4 * (each + 1) for each in range(70)], Device(CPU)  # more than NCCL sends in one operation
    for backend in ("gloo", "nccl", "mpi", "of somebody"):
        with fake_world(4) as group, served_as(backend), over_gloo():
            stats = CommStats()
            made = EXCHANGES.transport(Axis.of(group, CPU), device, comm_stats=stats, tracker=MemoryTracker())
            outputs = [torch.zeros(4 * size) for size in small]
            shards, sums = [torch.zeros(size) for size in small], torch.zeros(sum(small))
            made.all_gather_coalesced(outputs, shards, device.new_stream("test")).wait()
            made.reduce_scatter_coalesced(sums, outputs, device.new_stream("test")).wait()
            assert stats.counts == {"all_gather": 1, "reduce_scatter": 1}, backend
            assert stats.staged == stats.bytes["all_gather"] + stats.bytes["reduce_scatter"] > 0, backend


# -- the cost ----------------------------------------------------------------------------------------------------------

UNIT = [300_000, 512, 200_000, 512, 9, 100_000]  # elements of a piece: three matrices, two norms, and a bias


def costs(rank: int, world: int, way: str) -> dict[str, tuple[int, ...]]:
    """Of each list: bytes staged, exchanges, bytes by these, and bytes of memory."""
    with going(way, rank):
        transport, stream = over(), Device(CPU).new_stream("test")
        outputs, shards = [torch.ones(world * size) for size in UNIT], [torch.ones(size) for size in UNIT]
        output = torch.ones(sum(UNIT))
        stats, found = inspect.comm_stats_of(transport), {}
        for name, exchange in {
            "all_gather": lambda: transport.all_gather_coalesced(outputs, shards, stream).wait(),
            "reduce_scatter": lambda: transport.reduce_scatter_coalesced(output, outputs, stream).wait(),
        }.items():
            exchange()
            before = stats.staged, stats.counts[name], stats.bytes[name]
            inspect.memory_of(transport).reset_peaks()
            peak, left = peak_bytes(exchange)
            after = stats.staged, stats.counts[name], stats.bytes[name]
            assert left == 0
            found[name] = (*(now - then for now, then in zip(after, before, strict=True)), peak)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_large_ones_are_not_staged(run: Run, world: int) -> None:
    small = sum(4 * world * size for size in UNIT if 4 * world * size <= SMALL)
    total = 4 * world * sum(UNIT)
    for found in run(world, costs, "shared memory"):
        assert found == {name: (0, 1, total, 0) for name in ("all_gather", "reduce_scatter")}
    for found in run(world, costs, "gloo"):  # one for the small ones together
        assert all(each[:3] == (small, 4, total) for each in found.values())


def waits_at_once(rank: int, world: int, sizes: list[int]) -> bool:
    transport, stream = over(), Device(CPU).new_stream("test")
    fulls = [torch.ones(world * size) for size in sizes]
    pending = transport.reduce_scatter_coalesced(torch.empty(sum(sizes)), fulls, stream)
    advances = pending.advances_in_waits
    pending.wait()
    return advances


def test_a_list_that_is_large_as_a_whole_goes_on_in_waits(pool2: Run) -> None:
    part = LARGE // 4 // 4
    assert pool2(waits_at_once, [part] * 4) == [True] * 2
    assert pool2(waits_at_once, [part] * 3) == [False] * 2


def kept(rank: int, world: int, way: str) -> list[bool]:
    """Whether tensors of a list stay alive after their last reference, next to one that is kept."""
    with going(way, rank):
        transport, stream, found = over(), Device(CPU).new_stream("test"), []
        stays = torch.ones(world * 4)
        for first in ([stays], []):
            outputs = [*first, torch.ones(world * 4), torch.ones(world * 9)]
            shards = [torch.ones(output.numel() // world) for output in outputs]
            transport.all_gather_coalesced(outputs, shards, stream).wait()
            transport.reduce_scatter_coalesced(torch.cat(shards), outputs, stream).wait()
            alive = [weakref.ref(each.untyped_storage()) for each in outputs[-2:]]
            del outputs
            gc.collect()
            found += [each() is not None for each in alive]
    return found


@pytest.mark.parametrize("way", ["shared memory", "gloo"])
def test_no_list_is_kept_alive(pool2: Run, way: str) -> None:
    assert pool2(kept, way) == [[False] * 4] * 2


# -- hooks -------------------------------------------------------------------------------------------------------------


def hooked(rank: int, world: int) -> list[str]:
    """A hook receives one gradient, with each rank's pieces of all segments in turn, and fills one shard."""
    transport, stream, seen = over(), Device(CPU).new_stream("test"), []
    state = comm_hooks.DefaultState(dist.group.WORLD)

    def hook(state: comm_hooks.DefaultState, grad: Tensor, shard: Tensor) -> None:
        seen.append((grad.clone(), shard.numel()))
        comm_hooks.reduce_scatter_hook(state, grad, shard)

    reducer = HookReducer(comm_hook(state, hook), transport, replicas=1)
    sizes, wrong = [3, 40_000, 0, 5], []
    fulls = [values(world * size, torch.float32, 10 * k + rank) for k, size in enumerate(sizes)]
    output = torch.full((sum(sizes),), torch.nan)
    reducer.reduce_scatter_coalesced(output, fulls, stream).wait()
    flat = torch.cat([full.chunk(world)[each] for each in range(world) for full in fulls])
    if not (torch.equal(seen[0][0], flat) and seen[0][1] == sum(sizes)):
        wrong.append("handed something else")
    means = [in_rank_order(world, world * n, torch.float32, 10 * k) / world for k, n in enumerate(sizes)]
    expected = torch.cat([mean.chunk(world)[rank] for mean in means])
    if not torch.allclose(output, expected, rtol=1e-5, atol=1e-4):
        wrong.append("another shard")
    if inspect.comm_stats_of(transport).staged != flat.nbytes:
        wrong.append("not counted as staged")
    assert not any(inspect.memory_of(transport).live.values())
    return wrong


def test_a_hook_sees_one_flat_gradient(pool3: Run) -> None:
    assert pool3(hooked) == [[]] * 3
