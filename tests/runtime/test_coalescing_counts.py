"""Small units that share their collectives: closed forms of counts, bytes and memory, and the order of events."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.engine.comm.axes import Axis, served_as
from flatfsdp.engine.comm.comm_stats import CommStats
from flatfsdp.engine.device.memory import MemoryTracker
from flatfsdp.engine.device.streams import Device
from flatfsdp.engine.flat.gradients import Gradients
from flatfsdp.engine.wrapping.exchanges import EXCHANGES
from tests.comm.test_communication import Collectives
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice

pytestmark = pytest.mark.single_process

WIDTH = 8
BLOCK = WIDTH * WIDTH + WIDTH  # elements, a multiple of 8
ROOT = WIDTH + WIDTH  # elements: a weight of shape (WIDTH,) twice
BLOCKS = 12


class Many(nn.Module):
    """BLOCKS small units between two parameters of the root's own; `large` makes one of them larger than a group."""

    def __init__(self, large: int | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        if large is not None:
            self.blocks[large] = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH))
        for block in self.blocks:
            block.is_block = True
        self.order = list(range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for i in self.order:
            x = torch.relu(self.blocks[i](x))
        return (x + self.shift).sum()


def _is_block(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or hasattr(module, "is_block")


def wrapped(module: Many, most: int, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, auto_wrap_policy=_is_block, join_units_below=most, **options)


def step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).backward()


FLOAT = 4
FOUR = 4 * BLOCK * FLOAT  # bytes of four blocks


@pytest.mark.parametrize("world", [2, 8, 64])
@pytest.mark.parametrize("orig", [False, True])
def test_one_collective_for_as_many_units_as_a_group_has_room_for(world: int, orig: bool) -> None:
    """Groups: the root with three blocks, which begins and ends first, then four by four; reductions end with it."""
    with fake_world(world, joined=True):
        model = wrapped(Many(), _padded(FOUR, world), use_orig_params=orig)
        memory = inspect.memory(model)
        units = inspect.units(model)
        with Collectives() as first:
            step(model)
        with Collectives() as second:
            step(model)
        sizes = {unit.name: sum(flat.layout.padded_numel for flat in unit.flat_params) * FLOAT for unit in units}
        everything = sum(sizes.values())
        assert first.counts["gather"] - second.counts["gather"] >= BLOCKS - 4  # the order of a forward is not known yet
        blocks = [f"blocks.{i}" for i in range(BLOCKS)]
        forward, backward = ["", *blocks], ["", *reversed(blocks)]
        assert second.counts["gather"] == groups_of(forward, sizes) + groups_of(backward, sizes)
        assert second.counts["scatter"] == groups_of(forward[::-1], sizes)
        assert second.bytes["gather"] == 2 * everything - sizes[""]
        assert second.bytes["scatter"] == everything
        assert inspect.comm_stats(model).staged > 0
        assert 0 < memory.peak("staging") <= 2 * _padded(FOUR, world)  # one gather and one reduction
        assert memory.live["staging"] == 0


def _padded(count: int, world: int) -> int:
    """Room for four blocks, each padded to the world."""
    return 4 * -(-BLOCK // world) * world * FLOAT if world > 8 else count


def groups_of(order: list[str], sizes: dict[str, int]) -> int:
    """The oracle: units one by one into the last group, if there is room for them."""
    most = 4 * max(size for name, size in sizes.items() if name)
    groups: list[list[str]] = [[]]
    for name in order:
        if sum(sizes[each] for each in groups[-1]) + sizes[name] > most:
            groups.append([])
        groups[-1].append(name)
    return len(groups)


def test_nothing_is_joined_where_users_do_not_want_it() -> None:
    with fake_world(8, joined=True):
        model = wrapped(Many(), 0)
        step(model)
        with Collectives() as found:
            step(model)
        assert found.counts == {"gather": 2 * BLOCKS + 1, "scatter": BLOCKS + 1}
        assert inspect.comm_stats(model).staged == 0


def test_a_large_unit_travels_alone_and_parts_its_neighbors() -> None:
    with fake_world(8, joined=True):
        model = wrapped(Many(large=2), 2**10)
        step(model)
        with Collectives() as found, inspect.events(model).listening() as events:
            model(torch.ones(2, WIDTH))
        gathered = [event.unit or "root" for event in events if event.kind == "gather"]
        assert gathered == ["root", *(f"blocks.{i}" for i in range(BLOCKS))]
        # Three blocks to a group: (root 0 1) (2) (3 4 5) (6 7 8) (9 10 11).
        assert found.counts["gather"] == 5


def test_what_is_joined_is_gathered_when_its_first_unit_is_needed_and_reduced_when_its_last_is_ready() -> None:
    with fake_world(8, joined=True):
        model = wrapped(Many(), FOUR, backward_prefetch=None)
        step(model)
        with inspect.events(model).listening() as events:
            step(model)
        text = " ".join(
            f"{event.kind[0]}{event.unit.removeprefix('blocks.') or 'R'}"
            for event in events
            if event.kind in ("gather", "forward", "backward", "reduce")
        )
        assert text == (
            "gR g0 g1 g2 fR f0 f1 f2 g3 g4 g5 g6 f3 f4 f5 f6 g7 g8 g9 g10 f7 f8 f9 f10 g11 f11 "
            "g11 g10 g9 bR b11 b10 b9 g8 g7 g6 g5 b8 r11 r10 r9 r8 b7 b6 b5 g4 g3 g2 g1 b4 r7 r6 r5 r4 b3 b2 b1 g0 b0 "
            "r3 r2 r1 r0 rR"
        )


def test_units_that_a_forward_leaves_out_are_freed_at_its_end() -> None:
    with fake_world(8, joined=True):
        model = wrapped(Many(), FOUR)
        step(model)
        module = model.module
        module.order = [0, 5, 6]  # with the root 1 and 2 are gathered, in vain
        ledger = inspect.memory(model)
        loss = model(torch.ones(2, WIDTH))
        assert ledger.live["unsharded"] == ROOT * FLOAT
        loss.backward()
        assert ledger.live["unsharded"] == 0
        with Collectives() as found:  # the order is known now: (root 0 5 6)
            model(torch.ones(2, WIDTH))
        assert found.counts["gather"] == 1


@pytest.mark.parametrize("options", [{}, {"forward_prefetch": True}], ids=str)
def test_a_group_counts_as_one_for_the_limiter(options: dict[str, Any]) -> None:
    """In use, ahead: the memory of two groups besides the root's, on a device that the host runs ahead of."""

    def peaks(*, limit: bool) -> list[int]:
        with fake_world(8, joined=True), FakeDevice() as device:
            model = wrapped(Many(), FOUR, limit_all_gathers=limit, **options)
            step(model)
            ledger = inspect.memory(model)
            ledger.reset_peaks()
            loss = model(torch.ones(2, WIDTH))
            forward = ledger.peak("unsharded")
            ledger.reset_peaks()
            loss.backward()
            assert device.races == []
            return [forward, ledger.peak("unsharded")]

    forward, backward = peaks(limit=True)
    assert FOUR + ROOT * FLOAT <= forward <= backward == 2 * FOUR + ROOT * FLOAT
    assert peaks(limit=False) == [BLOCKS * BLOCK * FLOAT + ROOT * FLOAT] * 2


def test_one_exchange_for_each_dtype() -> None:
    def build() -> nn.Module:
        model = Many()
        model.blocks[1].to(torch.bfloat16)
        model.blocks[1].register_forward_pre_hook(lambda module, args: args[0].to(torch.bfloat16))
        model.blocks[1].register_forward_hook(lambda module, args, output: output.float())
        return model

    with fake_world(8, joined=True):
        model = wrapped(build(), 2**20)
        step(model)
        with Collectives() as found:
            step(model)
        assert found.counts == {"gather": 4, "scatter": 2}


def test_gradients_of_replicas_are_all_reduced_as_one() -> None:
    with fake_world(8, joined=True):
        model = wrapped(Many(), 2**20, sharding_strategy="NO_SHARD")
        step(model)
        with Collectives() as found:
            step(model)
        assert found.counts == {"all_reduce": 1}
        assert found.bytes["all_reduce"] == (BLOCKS * BLOCK + ROOT) * FLOAT


def test_both_stages_of_a_hybrid_are_joined() -> None:
    with fake_world(8, joined=True):
        mesh = dist.init_device_mesh("cpu", (2, 4))
        model = wrapped(Many(), 2**20, sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
        step(model)
        with Collectives() as found:
            step(model)
        assert found.counts == {"gather": 2, "scatter": 1, "all_reduce": 1}
        assert found.bytes["all_reduce"] == (BLOCKS * BLOCK + ROOT) * FLOAT // 4


def test_compute_and_reduce_dtypes_are_those_of_the_exchange() -> None:
    with fake_world(8, joined=True):
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = wrapped(Many(), 2**20, mixed_precision=precision)
        step(model)
        with Collectives() as found:
            step(model)
        everything = BLOCKS * BLOCK + ROOT
        assert found.counts == {"gather": 2, "scatter": 1}
        assert found.bytes["gather"] == 2 * (2 * everything - ROOT)
        assert found.bytes["scatter"] == 4 * everything


def test_units_of_another_dtype_are_weighed_anew() -> None:
    with fake_world(8, joined=True):
        made, turned = wrapped(Many().double(), _padded(FOUR, 8)), wrapped(Many(), _padded(FOUR, 8))
        step(turned)
        turned.zero_grad()
        for parameter in turned.parameters():
            parameter.data = parameter.data.double()
        found = []
        for model in (made, turned):
            for _ in range(2):
                with Collectives() as collectives:
                    model(torch.ones(2, WIDTH, dtype=torch.float64)).backward()
            found.append((collectives.counts, collectives.bytes))
        assert found[0] == found[1]


def test_gradients_have_version_counters_of_their_own() -> None:
    """Writing to one must not look like writing to another: windows detect edits by versions."""
    with fake_world(8, joined=True):
        model = wrapped(Many(), 2**20)
        step(model)
        first, second = (p.grad for p in list(model.parameters())[:2])
        assert first is not None and second is not None
        before = second._version
        first.add_(1)
        assert second._version == before


def test_a_backend_that_groups_by_itself_needs_no_staging() -> None:
    with fake_world(4) as group, served_as("nccl"):
        cpu, traffic, ledger = Device(torch.device("cpu")), CommStats(), MemoryTracker()
        stream = cpu.new_stream("any")
        transport = EXCHANGES.transport(Axis.of(group, cpu.device), cpu, comm_stats=traffic, tracker=ledger)
        shards = [torch.full((2,), 3.0), torch.full((3,), 5.0)]
        outputs = [torch.zeros(8), torch.zeros(12)]
        nothing = torch.zeros(0)  # of parameters without elements, which do not hold up the others
        transport.all_gather_coalesced([nothing, *outputs], [nothing, *shards], stream).wait()
        # The fake group hands every rank's slot the own shard.
        assert [set(output.tolist()) for output in outputs] == [{3.0}, {5.0}]
        outputs.append(nothing)
        transport.reduce_scatter_coalesced(torch.empty(5), outputs, stream).wait()
        assert traffic.counts == {"all_gather": 1, "reduce_scatter": 1}
        assert traffic.bytes == {"all_gather": 80, "reduce_scatter": 80}
        assert traffic.staged == 0 and ledger.total == 0


def test_what_was_handed_over_is_given_back_if_its_reduction_is_not_issued() -> None:
    with fake_world(4, joined=True):
        model = wrapped(Many(), 2**20)
        step(model)
        model.zero_grad()
        ledger = inspect.memory(model)
        at_rest = dict(ledger.live)
        start_reduction = Gradients.start_reduction

        def fails(self: Gradients, **kwargs: Any) -> Any:
            if self.handle.name == "blocks.3":
                raise MemoryError("none left")
            return start_reduction(self, **kwargs)

        with patch.object(Gradients, "start_reduction", fails), pytest.raises(MemoryError, match="none left"):
            step(model)
        step(model)
        model.zero_grad()
        assert dict(ledger.live) == at_rest
