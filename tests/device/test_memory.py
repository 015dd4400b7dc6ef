"""Bytes in flight as a sum of named terms, on the ledger; the same at every step.

Memory outside of the ledger, such as activations, is measured in `tests/device/test_memory_of_models.py`.
"""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, MixedPrecision, fully_shard, wrap
from flatfsdp.engine.cpu import collectives, exchange
from flatfsdp.engine.cpu.groups import over_gloo
from flatfsdp.engine.flat import gradient_slots as grads
from flatfsdp.engine.flat.gradients import Gradients
from flatfsdp.engine.flat.reduction import ReductionInput
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.memory import Recording

pytestmark = pytest.mark.distributed

WIDTH, DEPTH = 128, 4  # the gradient of a layer is too large to be collected with others
KINDS = ("shard", "unsharded", "slots", "exchange", "reduced")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Tower(nn.Module):
    """Blocks between an embedding and an untied head, which are the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


BLOCK = 4 * WIDTH * WIDTH  # elements
ROOT = 2 * 16 * WIDTH
MODEL = DEPTH * BLOCK + ROOT


def peaks(rank: int, world: int, options: dict[str, Any], micro: int) -> dict[int, dict[str, int]]:
    """The most bytes of each kind, and of all, in steps 2 and 8; every step ends with shards only."""
    torch.manual_seed(0)
    policy = wrap.ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(Tower(), auto_wrap_policy=policy, join_units_below=0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ledger = inspect.memory(model)
    found = {}
    for step in range(9):
        ledger.reset_peaks()
        for place in range(micro):
            tokens = torch.randint(16, (2, 3), generator=torch.Generator().manual_seed(step * 8 + rank))
            if place < micro - 1:
                with model.no_sync():
                    model(tokens).sum().backward()
            else:
                model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (2, 8):
            found[step] = {kind: ledger.peak(kind) for kind in KINDS} | {"all": ledger.peak_total}
        live = Counter({kind: count for kind, count in ledger.live.items() if count})
        assert live == {"shard": ledger.peak("shard")}, live
    return found


# (options, microbatches) -> elements by kind, and of all at once, on two ranks; a shard is half of a unit.
IN_FLIGHT: list[tuple[dict[str, Any], int, dict[str, int]]] = [
    (
        {"sharding_strategy": "FULL_SHARD"},
        1,
        {
            "shard": MODEL // 2,
            "unsharded": ROOT + 2 * BLOCK,  # the unit in use and the one ahead
            "slots": 2 * BLOCK,  # the unit that is reduced and the one that is filled
            "exchange": 0,  # values of other ranks are added from their own memory
            "reduced": MODEL // 2,  # gradient shards, until the end of the backward
            # The second block is in use, the first is ahead, the third is reduced: its gradients lie in its own place.
            "all": MODEL // 2 + ROOT + 3 * BLOCK + 2 * BLOCK // 2,
        },
    ),
    (
        {"sharding_strategy": "FULL_SHARD", "backward_prefetch": None},
        1,
        {
            "shard": MODEL // 2,
            "unsharded": ROOT + BLOCK,
            "slots": 2 * BLOCK,
            "exchange": 0,
            "reduced": MODEL // 2,
            # The first block is in use, the second is reduced.
            "all": MODEL // 2 + ROOT + 2 * BLOCK + 3 * BLOCK // 2,
        },
    ),
    (
        {"sharding_strategy": "FULL_SHARD", "backward_prefetch": "BACKWARD_MID"},
        1,
        {
            "shard": MODEL // 2,
            "unsharded": ROOT + 2 * BLOCK,  # the unit in use and the one ahead
            "slots": BLOCK + ROOT,  # one block is freed before another is filled; the root's come last
            "exchange": 0,
            "reduced": MODEL // 2,
            # The second block is reduced, the first is ahead: it is used when the second has been freed.
            "all": MODEL // 2 + ROOT + 2 * BLOCK + 3 * BLOCK // 2,
        },
    ),
    (
        {"sharding_strategy": "SHARD_GRAD_OP"},
        1,
        {
            "shard": MODEL // 2,
            "unsharded": MODEL,
            "slots": 2 * BLOCK,
            "exchange": 0,
            "reduced": MODEL // 2,
            "all": MODEL // 2 + MODEL + BLOCK // 2,  # the last block is reduced
        },
    ),
    (
        {"sharding_strategy": "FULL_SHARD"},
        3,
        {
            "shard": MODEL // 2,
            "unsharded": ROOT + 2 * BLOCK,
            "slots": MODEL,  # a window is unsharded
            "exchange": 0,
            "reduced": MODEL // 2,
            # The last block is reduced, the one before is in use, and another ahead.
            "all": MODEL // 2 + MODEL + ROOT + 2 * BLOCK + BLOCK // 2,
        },
    ),
    (
        # Gradients of another dtype than their parameters have buffers of their own, here of twice the bytes. They are
        # kept as they come until their reduction begins. [Note: late slots]
        {"sharding_strategy": "FULL_SHARD", "mixed_precision": MixedPrecision(reduce_dtype=torch.float64)},
        1,
        {
            "shard": MODEL // 2,
            "unsharded": ROOT + 2 * BLOCK,
            "slots": 2 * BLOCK,
            "exchange": 0,
            "reduced": 2 * MODEL // 2,
            # The second block is in use, the first is ahead, the third is reduced; the second's gradients wait (the
            # head's, too, which is small).
            "all": MODEL // 2 + ROOT + 2 * BLOCK + 2 * (BLOCK + 2 * BLOCK // 2) + BLOCK,
        },
    ),
    (
        {"sharding_strategy": "NO_SHARD"},
        1,
        {
            "shard": MODEL,
            "unsharded": 0,  # the shard is the whole
            "slots": MODEL,
            "exchange": 0,
            "reduced": 0,  # the slots themselves become the gradients
            "all": 2 * MODEL,  # the root is reduced
        },
    ),
]


def named(value: Any) -> str | None:
    if not isinstance(value, dict) or "shard" in value:
        return None
    return ", ".join("a wide reduction" if isinstance(each, MixedPrecision) else str(each) for each in value.values())


@pytest.mark.parametrize(("options", "micro", "elements"), IN_FLIGHT, ids=named)
def test_bytes_in_flight_are_a_stated_sum(
    pool2: Run, options: dict[str, Any], micro: int, elements: dict[str, int]
) -> None:
    for found in pool2(peaks, options, micro):
        assert found[2] == found[8]
        assert found[2] == {kind: 4 * count for kind, count in elements.items()}


def peaks_over_gloo(rank: int, world: int, options: dict[str, Any]) -> dict[int, dict[str, int]]:
    with over_gloo():
        return peaks(rank, world, options, 1)


@pytest.mark.parametrize(("strategy", "exchanged"), [("FULL_SHARD", 0), ("NO_SHARD", BLOCK // 2)])
def test_gloo_takes_memory_besides_for_an_all_reduce(pool2: Run, strategy: str, exchanged: int) -> None:
    """Memory for the other rank's values. Those of a reduce-scatter arrive in its output."""
    options = {"sharding_strategy": strategy}
    elements = next(expected for these, micro, expected in IN_FLIGHT if (these, micro) == (options, 1))
    at_end = ROOT if strategy == "NO_SHARD" else 0  # of which the reduction takes nothing, then
    for found in pool2(peaks_over_gloo, options):
        assert found[2] == found[8]
        changed = {"exchange": exchanged, "all": elements["all"] + exchanged - at_end}
        assert found[2] == {kind: 4 * count for kind, count in (elements | changed).items()}


def peaks_of_large(rank: int, world: int, options: dict[str, Any]) -> dict[int, dict[str, int]]:
    with patch.object(collectives, "LARGE", 1):
        return peaks(rank, world, options, 1)


def test_what_goes_on_in_waits_alone_holds_no_gradients_for_longer(pool2: Run) -> None:
    """A large reduction through memory that ranks share has ended before the backward goes on: one block less."""
    elements = {
        "shard": MODEL // 2,
        "unsharded": ROOT + 2 * BLOCK,
        "slots": BLOCK,
        "exchange": 0,
        "reduced": MODEL // 2,
        # The second block is reduced, and the first is ahead.
        "all": MODEL // 2 + ROOT + 2 * BLOCK + 3 * BLOCK // 2,
    }
    for found in pool2(peaks_of_large, {"sharding_strategy": "FULL_SHARD"}):
        assert found[2] == found[8]
        assert found[2] == {kind: 4 * count for kind, count in elements.items()}


def outboxes_of_a_step(rank: int, world: int, strategy: str) -> tuple[dict[str, bool], dict[str, bool]]:
    """The outboxes with pages before a backward, and after it, in the third step."""
    policy = wrap.ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        Tower(), auto_wrap_policy=policy, join_units_below=0, sharding_strategy=strategy, use_orig_params=True
    )
    with patch.object(exchange, "TRIM_AFTER", 60):  # no pages go because of the time
        for _ in range(3):
            loss = model(torch.zeros(2, 3, dtype=torch.int64)).sum()
            dist.barrier()  # all have read the gathered values
            limit = time.monotonic() + (10 if strategy == "SHARD_GRAD_OP" else 0)
            while any((before := inspect.outboxes(model)).values()) and time.monotonic() < limit:
                time.sleep(0.001)
            loss.backward()
            after = inspect.outboxes(model)
    return {name: held > 0 for name, held in before.items()}, {name: held > 0 for name, held in after.items()}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_no_outbox_has_pages_where_a_backward_begins_that_gathers_nothing(pool2: Run, strategy: str) -> None:
    """There a step is highest that frees no parameters after its forward."""
    resting = strategy == "SHARD_GRAD_OP"
    for before, after in pool2(outboxes_of_a_step, strategy):
        assert before == {"gather": not resting, "reduce": not resting}
        assert after == {"gather": not resting, "reduce": True}


def test_a_gradient_is_held_twice_only_between_its_reduction_and_the_end_of_its_backward() -> None:
    """The first microbatch's, and the one to be added to it: a backward that fails can still be discarded."""
    with fake_world(2):
        model = FullyShardedDataParallel(Tower(), auto_wrap_policy=wrap.ModuleWrapPolicy({Block}), use_orig_params=True)
        memory = inspect.memory(model)

        def microbatch() -> list[tuple[str, int]]:
            """Bytes of gradients that are not the user's yet, whenever a reduction is issued, and at the end."""
            loss = model(torch.zeros(2, 3, dtype=torch.int64)).sum()
            found: list[tuple[str, int]] = []
            with inspect.events(model).listening(lambda event: found.append((event.kind, memory.live["reduced"]))):
                loss.backward()
            return [(kind, count) for kind, count in found if kind in ("reduce", "end")]

        def held() -> list[int]:
            return [leaf.grad.untyped_storage().data_ptr() for leaf in model.parameters() if leaf.grad is not None]

        first, theirs = microbatch(), held()
        assert microbatch() == first == microbatch()
        reductions = [("reduce", 4 * index * BLOCK // 2) for index in range(DEPTH + 1)]
        assert first == [*reductions, ("end", 0)]
        # One gradient tensor is left, the earlier one: the one added to it has been freed.
        assert held() == theirs != []


def test_the_last_gradient_is_freed_before_its_unit_is_reduced() -> None:
    """The peak of a backward with one unit, whose inputs need no gradient: the last gradient of a leaf completes it."""
    rows, width = 1024, 256
    with Recording() as recording, fake_world(2):
        model = FullyShardedDataParallel(nn.Embedding(rows, width), use_orig_params=True)
        for number in range(3):
            loss = model(torch.zeros(1, dtype=torch.int64)).sum()
            recording.mark(f"before {number}")
            loss.backward()
            recording.mark(f"after {number}")
            model.zero_grad()
    usage, whole = recording.between("before 2", "after 2"), 4 * rows * width
    # The gradient moves into the parameter's place; half of it, the reduction's result, would come on top of both.
    assert usage.peak - usage.start < whole + whole // 4


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "NO_SHARD"}, {"cpu_offload": True}], ids=named)
def test_gradients_are_freed_without_the_collector(options: dict[str, Any]) -> None:
    waited: list[weakref.ref[torch.UntypedStorage]] = []
    wait = ReductionInput.wait

    def watched(part: ReductionInput) -> Tensor:
        result = wait(part)
        waited.append(weakref.ref(result.untyped_storage()))
        return result

    gc.collect()
    gc.disable()
    try:
        with fake_world(2), patch.object(ReductionInput, "wait", watched):
            model = FullyShardedDataParallel(Tower(), auto_wrap_policy=wrap.ModuleWrapPolicy({Block}), **options)
            model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
            model.zero_grad()
        assert len(waited) == DEPTH + 1
        assert [ref() for ref in waited] == [None] * len(waited)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "sizes", [[300, 200, 100], [120] * 40, [300, *[120] * 30, 10, 250]], ids=["large", "small", "both"]
)
def test_beside_the_slots_live_only_gradients_that_were_not_moved_yet(sizes: list[int]) -> None:
    class Stack(nn.Module):
        """Square matrices of these widths."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(size, size) for size in sizes)

        def forward(self, x: Tensor) -> Tensor:
            total = x.new_zeros(())
            for weight in self.weights:
                total = total + (x[: len(weight)] @ weight).square().mean()
            return total

    arrived: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    def alive() -> int:
        return sum(storage.nbytes() for ref in arrived if (storage := ref()) is not None)

    def sample(event: inspect.Event | None = None) -> None:
        nonlocal most
        most = max(most, alive())

    arrive = Gradients.arrive

    def watched(self: Gradients, index: int, grad: Tensor) -> None:
        arrived.append(weakref.ref(grad.untyped_storage()))
        sample()
        arrive(self, index, grad)
        sample()

    with fake_world(2), patch.object(Gradients, "arrive", watched):
        model = FullyShardedDataParallel(Stack(), use_orig_params=True)
        with inspect.events(model).listening(sample):
            model(torch.randn(max(sizes))).backward()
    assert len(arrived) == len(sizes)
    bytes_of = [4 * size * size for size in sizes]
    small = [count for count in bytes_of if count <= grads.SMALL_BYTES]
    collected = min(sum(small), grads.COLLECT_BYTES + max(small, default=0))  # the one that makes it full included
    largest = max([count for count in bytes_of if count > grads.SMALL_BYTES], default=0)
    assert most <= collected + largest
    assert most < sum(bytes_of)
    assert alive() == 0


class Watched(nn.Linear):
    """Looks at its weight by NumPy, as programs do that log it."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.detach().numpy().shape == (8, 8)
        return torch.tanh(super().forward(x))


def with_arrays(rank: int, world: int, front: bool) -> int:
    """Three steps of a model that makes arrays of whole parameters, as in one process."""
    plain, model = (nn.Sequential(*(Watched(8, 8) for _ in range(3))) for _ in range(2))
    for each in plain.parameters():
        dist.broadcast(each.data, 0)
    model.load_state_dict(plain.state_dict())
    sharded: nn.Module = model
    if front:
        for unit in model:
            fully_shard(unit)
        fully_shard(model)
    else:
        sharded = FullyShardedDataParallel(model, auto_wrap_policy={Watched}, use_orig_params=True)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (plain, sharded)]
    with warnings.catch_warnings(record=True):  # once in a process
        warnings.simplefilter("always")
        for _ in range(3):
            losses = []
            for each, optimizer in zip((plain, sharded), optimizers, strict=True):
                loss = each(torch.ones(2, 8)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses)
    return inspect.memory(sharded).live["unsharded"]


@pytest.mark.parametrize("front", (False, True), ids=("wrapper", "fully_shard"))
def test_memory_that_cannot_be_given_back_stays_and_is_counted(pool2: Run, front: bool) -> None:
    assert pool2(with_arrays, front) == [3 * (64 + 8) * 4] * 2


def with_an_array_too_late(rank: int, world: int) -> str:
    model: Any = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), auto_wrap_policy={nn.Linear}, use_orig_params=True
    )
    kept: list[Tensor] = []
    handle = model.module[0].module.register_forward_pre_hook(lambda module, _: kept.append(module.weight.detach()))
    model(torch.ones(2, 8)).sum().backward()
    handle.remove()
    assert kept[0].shape == (8, 8) and not kept[0].untyped_storage().nbytes()
    kept[0].numpy()  # of memory that is gone: nothing may look at it
    with pytest.raises(UsageError) as raised:
        model(torch.ones(2, 8))
    return str(raised.value)


def test_an_array_of_memory_that_was_given_back_is_found_at_the_next_gather(pool2: Run) -> None:
    for text in pool2(with_an_array_too_late):
        assert "a NumPy array was made from a view of a parameter whose memory had been freed" in text
