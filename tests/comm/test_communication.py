"""Communication: closed forms of counts and bytes for worlds of 1 to 1024, and schedules.

The operations that torch's dispatcher sees are counted, not those that the engine reports.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatfsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from flatfsdp.engine.comm import transport as comm
from flatfsdp.engine.device.streams import DONE, PendingWork
from flatfsdp.engine.features.halfway import CountingHooks
from flatfsdp.engine.flat.reduction import ReductionInput
from flatfsdp.engine.transports import blocking
from flatfsdp.engine.transports.blocking import agree_on_maximum
from flatfsdp.engine.transports.staged import StagedTransport
from flatfsdp.wrap import ModuleWrapPolicy
from tests.harness import inspect
from tests.harness.calls import calls_of
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

WORLDS = [1, 2, 3, 7, 64, 1024]
WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Tower(nn.Module):
    """Three blocks between two layers of the root's own: four units.

    ``between`` is called when the root computes gradients of its own between those of ``b`` and ``a``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.a, self.b, self.c = Block(), Block(), Block()
        self.outlet = nn.Linear(WIDTH, 1)
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * self.a(self.inlet(x))
        if x.requires_grad:
            x.register_hook(lambda grad: self.between())
        return self.outlet(self.c(self.b(2 * x)))


UNITS = 4
NUMELS = [3 * WIDTH + 2 * 2 * WIDTH * WIDTH] * 3 + [WIDTH * WIDTH + WIDTH + WIDTH + 1]  # of a, b, c and the root


def wrapped(strategy: str, **options: Any) -> FullyShardedDataParallel:
    if "HYBRID" in strategy:
        shape = options.pop("mesh")
        options["device_mesh"] = dist.init_device_mesh("cpu", shape)
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        Tower(), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=policy, **options
    )


NAMES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "all_reduce"}


class Collectives(TorchDispatchMode):
    """Every operation on a process group inside the context: how many, and the bytes of the larger side. The bitmap of
    gradients at the end of a backward ([Note: unused]) is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            kind = NAMES.get(name, name)
            tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
            if kind == "all_reduce" and all(tensor.dtype == torch.uint8 for tensor in tensors):
                return func(*args, **(kwargs or {}))
            self.counts[kind] += 1
            self.bytes[kind] += max((x.numel() * x.element_size() for x in tensors), default=0)
        return func(*args, **(kwargs or {}))


def forward(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(3, WIDTH)).sum()
    return loss


def settled(model: FullyShardedDataParallel) -> None:
    """One step: one-time operations (agreement on layouts and order) are over."""
    forward(model).backward()
    model.zero_grad()


Passes = tuple[Counter[str], Counter[str]]


def counted(model: FullyShardedDataParallel, *, sync: bool = True) -> Passes:
    """The collectives of a forward and those of its backward."""
    with nullcontext() if sync else model.no_sync():
        with Collectives() as first:
            loss = forward(model)
        with Collectives() as second:
            loss.backward()
    return first.counts, second.counts


def expected(forward_gathers: int, backward_gathers: int, scatters: int, all_reduces: int) -> Passes:
    def only(**counts: int) -> Counter[str]:
        return Counter({name: count for name, count in counts.items() if count})

    return only(gather=forward_gathers), only(gather=backward_gathers, scatter=scatters, all_reduce=all_reduces)


N = UNITS
# A unit more in forward than in backward: the root, whose backward comes first, is not resharded.
CLOSED_FORMS: dict[str, dict[str, list[Passes]]] = {
    "FULL_SHARD": {
        "synced": [expected(N, N - 1, N, 0)] * 2,
        "window": [expected(N, N - 1, 0, 0), expected(N, N - 1, 0, 0), expected(N, N - 1, N, 0)],
    },
    "SHARD_GRAD_OP": {
        "synced": [expected(N, 0, N, 0)] * 2,
        # Parameters that no_sync leaves unsharded are not gathered again.
        "window": [expected(N, 0, 0, 0), expected(0, 0, 0, 0), expected(0, 0, N, 0), expected(N, 0, N, 0)],
    },
    "NO_SHARD": {
        "synced": [expected(0, 0, 0, N)] * 2,
        "window": [expected(0, 0, 0, 0), expected(0, 0, 0, 0), expected(0, 0, 0, N)],
    },
    "HYBRID_SHARD": {
        "synced": [expected(N, N - 1, N, N)] * 2,
        "window": [expected(N, N - 1, 0, 0), expected(N, N - 1, 0, 0), expected(N, N - 1, N, N)],
    },
    "_HYBRID_SHARD_ZERO2": {
        "synced": [expected(N, 0, N, N)] * 2,
        "window": [expected(N, 0, 0, 0), expected(0, 0, 0, 0), expected(0, 0, N, N), expected(N, 0, N, N)],
    },
}


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_counts_of_one_axis(strategy: str, world: int, use_orig_params: bool) -> None:
    with fake_world(world):
        model = wrapped(strategy, use_orig_params=use_orig_params)
        settled(model)
        check_closed_forms(model, strategy, alone=world == 1)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (8, 16)])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_counts_of_two_axes(strategy: str, mesh: tuple[int, int]) -> None:
    with fake_world(mesh[0] * mesh[1]):
        model = wrapped(strategy, mesh=mesh)
        settled(model)
        check_closed_forms(model, strategy)


def check_closed_forms(model: FullyShardedDataParallel, strategy: str, *, alone: bool = False) -> None:
    forms = CLOSED_FORMS[strategy]
    nothing = expected(0, 0, 0, 0)
    for synced in forms["synced"]:  # accumulation with communication too: the gradients are left where they are
        assert counted(model) == (nothing if alone else synced)
    for place, passes in enumerate(forms["window"]):
        sync = place >= 2  # two microbatches without, the third and all later ones with
        assert counted(model, sync=sync) == (nothing if alone else passes)


def padded(numels: list[int], world: int) -> list[int]:
    return [-(-numel // world) * world for numel in numels]


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("mixed", [None, MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)])
def test_bytes_of_full_shard(world: int, mixed: MixedPrecision | None) -> None:
    # Without use_orig_params there is no padding but that to the world size.
    size = 2 if mixed else 4
    with fake_world(world):
        model = wrapped("FULL_SHARD", mixed_precision=mixed)
        settled(model)
        with Collectives() as seen:
            forward(model).backward()
        whole = padded(NUMELS, world)
        assert seen.bytes == {"gather": (2 * sum(whole) - whole[-1]) * size, "scatter": sum(whole) * 4}
        memory = inspect.memory(model)
        assert dict(inspect.comm_stats(model).counts).keys() >= {"all_gather", "reduce_scatter"}
        assert memory.held == {"shard": 4 * sum(whole) // world}


@pytest.mark.parametrize("world", WORLDS[1:])
def test_bytes_of_no_shard(world: int) -> None:
    with fake_world(world):
        model = wrapped("NO_SHARD")
        settled(model)
        with Collectives() as seen:
            forward(model).backward()
        assert seen.bytes == {"all_reduce": 4 * sum(NUMELS)}
        assert inspect.memory(model).held == {"shard": 4 * sum(NUMELS)}


def test_bytes_of_hybrid_shard_8x16() -> None:
    with fake_world(128, rank=100):
        model = wrapped("HYBRID_SHARD", mesh=(8, 16))
        settled(model)
        with Collectives() as seen:
            forward(model).backward()
        whole = padded(NUMELS, 16)
        gathered = (2 * sum(whole) - whole[-1]) * 4
        assert seen.bytes == {"gather": gathered, "scatter": sum(whole) * 4, "all_reduce": sum(whole) * 4 // 16}
        assert inspect.memory(model).held == {"shard": 4 * sum(whole) // 16}


def test_one_collective_per_kind_for_any_number_of_parameters() -> None:
    def mixture() -> nn.Sequential:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(9)))
        model[:4].requires_grad_(False)
        return model

    with fake_world(4):
        model = FullyShardedDataParallel(mixture(), use_orig_params=True)
        settled(model)
        assert counted(model) == (Counter(gather=2), Counter(scatter=1))  # frozen ones are not reduced


@pytest.mark.parametrize("strategy", list(CLOSED_FORMS))
def test_constructors_do_not_communicate(strategy: str) -> None:
    with fake_world(8):
        wrapped(strategy, mesh=(2, 4)) if "HYBRID" in strategy else wrapped(strategy)  # makes the groups
        for synchronize in (False, True):
            options: dict[str, Any] = {"sync_module_states": synchronize}
            if "HYBRID" in strategy:
                options["mesh"] = (2, 4)
            with Collectives() as seen:
                wrapped(strategy, **options)
            axes = 2 if "HYBRID" in strategy else 1
            values = len(list(Tower().parameters())) * axes
            # With values to copy, each unit first makes sure that all ranks copy the same.
            assert seen.counts.keys() <= ({"broadcast_", "gather"} if synchronize else set())
            assert seen.counts["broadcast_"] == (values if synchronize else 0)
            assert seen.counts["gather"] <= UNITS * axes


# -- schedules ---------------------------------------------------------------------------------------------------------


def story(model: FullyShardedDataParallel, run: Callable[[], Any], *kinds: str) -> str:
    """The events of these kinds as they come; "compute:between" is the root's work between ``b`` and ``a``, and
    "let go" when a reduction has read its input."""
    trace = inspect.events(model)
    inner: Any = model.module
    inner.between = lambda: trace.record("compute", "between")
    release = ReductionInput.release_buffer

    def let_go(part: ReductionInput) -> None:
        trace.record("let go", part.handle.name)
        release(part)

    with trace.listening() as events, patch.object(ReductionInput, "release_buffer", let_go):
        run()
    return " ".join(f"{event.kind}:{event.unit or 'root'}" for event in events if event.kind in kinds)


@contextmanager
def tower(**options: Any) -> Iterator[FullyShardedDataParallel]:
    with fake_world(4):
        model = wrapped("FULL_SHARD", **options)
        settled(model)
        yield model


BACKWARD = ("gather", "backward", "grads", "reduce", "reshard", "end", "compute")


def test_backward_pre_gathers_the_next_unit_before_this_ones_gradients() -> None:
    with tower() as model:
        assert story(model, forward(model).backward, *BACKWARD) == (
            "gather:c backward:root gather:b backward:c grads:c reshard:c reduce:c "
            "gather:a backward:b grads:b reshard:b reduce:b compute:between backward:a grads:a reshard:a reduce:a "
            "grads:root reshard:root reduce:root end:root"
        )


def test_backward_post_gathers_the_next_unit_right_after_this_ones_gradients() -> None:
    with tower(backward_prefetch="BACKWARD_POST") as model:
        assert story(model, forward(model).backward, *BACKWARD) == (
            "backward:root gather:c backward:c grads:c reshard:c gather:b reduce:c "
            "backward:b grads:b reshard:b gather:a reduce:b "
            "compute:between backward:a grads:a reshard:a reduce:a grads:root reshard:root reduce:root end:root"
        )


def test_backward_mid_gathers_the_next_unit_half_way_and_reduces_the_one_before_until_then() -> None:
    with tower(backward_prefetch="BACKWARD_MID") as model:
        assert story(model, forward(model).backward, *BACKWARD, "let go") == (
            "gather:c backward:root backward:c gather:b grads:c reshard:c reduce:c "  # the root is around all of them
            "backward:b let go:c gather:a grads:b reshard:b reduce:b let go:b "  # nothing overlaps with the last one
            "compute:between backward:a grads:a reshard:a reduce:a "
            "grads:root reshard:root let go:a reduce:root let go:root end:root"
        )


def test_half_way_is_the_beginning_where_no_gradients_come_and_the_end_where_too_few_do() -> None:
    with tower(backward_prefetch="BACKWARD_MID", use_orig_params=True) as model:
        b, c = model.module.b, model.module.c
        c.requires_grad_(False)
        b.module.forward = lambda x: x + b.module.down(torch.cat([x, x], dim=1))  # without the larger half
        settled(model)
        assert story(model, forward(model).backward, *BACKWARD, "let go") == (
            "gather:c backward:root gather:b backward:c reshard:c "
            "backward:b grads:b reshard:b gather:a reduce:b let go:b "
            "compute:between backward:a grads:a reshard:a reduce:a "
            "grads:root reshard:root let go:a reduce:root let go:root end:root"
        )


def test_half_way_is_the_beginning_in_a_backward_that_brings_gradients_of_inputs_alone() -> None:
    found = []
    for prefetch in ("BACKWARD_PRE", "BACKWARD_MID"):
        with tower(backward_prefetch=prefetch) as model:
            x = torch.randn(3, WIDTH, requires_grad=True)
            loss = model(x).sum()
            found.append(story(model, lambda loss=loss, x=x: torch.autograd.grad(loss, x), *BACKWARD))
    assert found[0] == found[1] and "gather:b backward:c" in found[0]


@pytest.mark.parametrize(
    "options", [{"strategy": "SHARD_GRAD_OP"}, {"strategy": "NO_SHARD"}, {"reshard": False}], ids=str
)
def test_backward_mid_changes_nothing_where_nothing_is_to_be_gathered(options: dict[str, Any]) -> None:
    found = []
    with fake_world(4):
        for prefetch in ("BACKWARD_PRE", "BACKWARD_MID"):
            model = wrapped(options.get("strategy", "FULL_SHARD"), backward_prefetch=prefetch)
            if "reshard" in options:
                model.set_reshard_after_forward(options["reshard"])
            settled(model)
            found.append(story(model, forward(model).backward, *BACKWARD, "let go"))
    assert found[0] == found[1] and "reduce:b" in found[0]


def test_a_list_of_what_is_gathered_ahead_is_in_the_place_of_backward_mid() -> None:
    found = []
    for prefetch in (None, "BACKWARD_MID"):
        with tower(backward_prefetch=prefetch) as model:
            a, b, c = model.module.a, model.module.b, model.module.c
            for unit, ahead in ((model, [c]), (c, [b, a]), (b, [a]), (a, [b])):
                unit.set_modules_to_backward_prefetch(ahead)
            found.append(story(model, forward(model).backward, *BACKWARD, "let go"))
    assert found[0] == found[1] and "gather:b gather:a backward:c" in found[0]


def test_only_units_that_gather_half_way_count_what_comes() -> None:
    counted = CountingHooks.leaf_ready
    for prefetch in ("BACKWARD_PRE", "BACKWARD_POST", None, "BACKWARD_MID"):
        came: list[int] = []

        def count(leaves: CountingHooks, kind: int, index: int, leaf: torch.Tensor, came: list[int] = came) -> None:
            came.append(index)
            counted(leaves, kind, index, leaf)

        with patch.object(CountingHooks, "leaf_ready", count), tower(backward_prefetch=prefetch) as model:
            came.clear()
            forward(model).backward()
        assert len(came) == (4 * UNITS if prefetch == "BACKWARD_MID" else 0)


@pytest.mark.parametrize(
    ("prefetch", "most"), [("BACKWARD_PRE", 3), ("BACKWARD_POST", 3), ("BACKWARD_MID", 2), (None, 2)]
)
def test_whole_units_at_once_besides_the_root(prefetch: str | None, most: int) -> None:
    """In use, gathered ahead, or read by a reduction."""
    with tower(backward_prefetch=prefetch) as model:
        memory = inspect.memory(model)
        block, own = padded(NUMELS, 4)[0], padded(NUMELS, 4)[-1]
        found = 0

        def measure(event: inspect.Event) -> None:
            nonlocal found
            found = max(found, memory.live["unsharded"] + memory.live["slots"])

        with inspect.events(model).listening(measure):
            for _ in range(2):
                forward(model).backward()
        assert found == 4 * (own + most * block)


def test_without_backward_prefetch_a_unit_is_gathered_when_its_backward_begins() -> None:
    with tower(backward_prefetch=None) as model:
        assert story(model, forward(model).backward, *BACKWARD) == (
            "backward:root gather:c backward:c grads:c reshard:c reduce:c "
            "gather:b backward:b grads:b reshard:b reduce:b "
            "compute:between gather:a backward:a grads:a reshard:a reduce:a "
            "grads:root reshard:root reduce:root end:root"
        )


def test_forward_gathers_a_unit_when_it_is_entered() -> None:
    with tower() as model:
        assert story(model, lambda: forward(model), "gather", "forward", "reshard") == (
            "gather:root forward:root gather:a forward:a reshard:a gather:b forward:b reshard:b "
            "gather:c forward:c reshard:c"
        )


def test_forward_prefetch_gathers_the_next_unit_before_this_ones_forward() -> None:
    with tower(forward_prefetch=True) as model:
        assert story(model, lambda: forward(model), "gather", "forward", "reshard") == (
            "gather:root gather:a forward:root gather:b forward:a reshard:a gather:c forward:b reshard:b "
            "forward:c reshard:c"
        )


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, 2),
        ({"forward_prefetch": True}, 2),
        ({"backward_prefetch": "BACKWARD_POST"}, 1),
        ({"backward_prefetch": "BACKWARD_MID"}, 2),
        ({"backward_prefetch": None}, 1),
    ],
)
def test_besides_the_root_at_most_one_unit_is_ahead_of_the_one_in_use(options: dict[str, Any], bound: int) -> None:
    with tower(**options) as model:
        memory = inspect.memory(model)
        units = inspect.units(model)
        most = 0

        def count(event: inspect.Event) -> None:
            nonlocal most
            held = [u for u in units[:-1] if any(not flat.is_sharded for flat in u.flat_params)]
            most = max(most, len(held))

        memory.reset_peaks()
        with inspect.events(model).listening(count):
            for _ in range(2):
                forward(model).backward()
        assert most == bound
        block, own = padded(NUMELS, 4)[0], padded(NUMELS, 4)[-1]
        assert memory.peak("unsharded") == 4 * (bound * block + own)


def test_what_backward_gathers_ahead_and_does_not_use_is_freed_at_its_end() -> None:
    """The loss does not need `c`, which the other ranks' losses might."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Block(), Block(), Block()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.a(x)
            return self.b(x), self.c(x)

    with fake_world(4):
        model = FullyShardedDataParallel(Two(), auto_wrap_policy=ModuleWrapPolicy({Block}))
        for _ in range(2):
            first, second = model(torch.randn(3, WIDTH))
            with inspect.events(model).listening() as events:
                first.sum().backward()
            gathered = [event.unit for event in events if event.kind == "gather"]
            assert gathered == ["c", "b", "a"]  # in the order that all ranks share
            assert all(unit.is_sharded for unit in inspect.units(model))
            assert inspect.memory(model).live["unsharded"] == 0
            del second


def test_a_units_unsharded_storage_is_one_for_ever() -> None:
    """Saved views of a forward point into it when backward fills it again."""
    found: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    with tower(use_orig_params=True) as model:
        units = inspect.units(model)

        def look(event: inspect.Event) -> None:
            for unit in units:
                for flat in unit.flat_params:
                    if flat.is_unsharded:
                        found[unit.name].add((id(flat.unsharded), flat.unsharded.untyped_storage()._cdata))

        with inspect.events(model).listening(look):
            for _ in range(3):
                forward(model).backward()
                with torch.no_grad():
                    forward(model)
    assert {name: len(seen) for name, seen in found.items()} == {"": 1, "a": 1, "b": 1, "c": 1}


# -- values, with a group that answers as if all ranks were alike ------------------------------------------------------


class Alike(StagedTransport):
    """Every rank has the same gradients: sums in the dtype they come in, one rank after the other."""

    def __init__(self, inner: comm.Transport) -> None:
        super().__init__(**inspect.arguments_of(inner))

    def reduce_scatter_base(self, output: Tensor, full: Tensor, stream: Any) -> PendingWork:
        piece = full[: output.numel()]
        output.copy_(piece)
        for _ in range(self.group.size - 1):
            output.add_(piece)
        return DONE


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_fp16_reduction_of_healthy_gradients_does_not_overflow_at_world_64(strategy: str) -> None:
    largest = 60000.0  # fp16 ends at 65504: the sum of two is infinite already

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(640))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    with fake_world(64), comm.doubled(Alike):
        mixed = MixedPrecision(reduce_dtype=torch.float16)
        model = FullyShardedDataParallel(Steep(), None, strategy, mixed_precision=mixed, use_orig_params=True)
        model(torch.full((640,), largest)).backward()
        (parameter,) = model.parameters()
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, torch.full((10,), largest), rtol=5e-3, atol=0.0)


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0)])
def test_a_cpu_with_an_index_is_the_cpu(device: Any) -> None:
    with fake_world(2):
        model = FullyShardedDataParallel(Tower(), device_id=device)
        model(torch.randn(3, 6)).sum().backward()
        assert {parameter.device for parameter in model.parameters()} == {torch.device("cpu")}


@pytest.mark.parametrize(
    ("served", "expected"), [("cpu:gloo,meta:nccl", "cpu"), ("meta:nccl", "meta"), ("cpu:gloo", "cpu")]
)
def test_flags_travel_on_a_device_that_the_backend_serves(
    served: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a scaler on the CPU; the meta device stands in for an accelerator."""
    sent: list[str] = []

    def sending(tensor: torch.Tensor, **options: Any) -> None:
        sent.append(tensor.device.type)
        raise InterruptedError  # nothing comes back from the meta device

    with fake_world(2):
        monkeypatch.setattr(blocking, "accelerator", lambda: torch.device("meta"))
        monkeypatch.setattr(dist, "get_backend_config", lambda group: served)
        monkeypatch.setattr(dist, "all_reduce", sending)
        with pytest.raises(InterruptedError):
            agree_on_maximum({torch.device("cpu"): torch.zeros(())}, None)
    assert sent == [expected]


def test_wrapping_takes_time_in_proportion_to_the_blocks() -> None:
    def wrapping(blocks: int) -> int:
        net = nn.Sequential(*[Block() for _ in range(blocks)])
        return calls_of(lambda: FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({Block})))

    with fake_world(1):
        wrapping(2)  # one-time work
        assert wrapping(200) < 2.2 * wrapping(100)


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_bytes_after_a_backward_that_is_not_the_last(orig: bool) -> None:
    """The gradients of the unit that is reduced last, the root here, and its shard of them, until the next backward."""
    with fake_world(4):
        model = wrapped("FULL_SHARD", use_orig_params=orig)
        settled(model)
        live = inspect.memory(model).live
        for last in (False, False, True):
            model.set_is_last_backward(last)
            forward(model).backward()
            whole = 0 if last else 4 * inspect.flat_params(model)[-1].layout.padded_numel
            assert (live["slots"], live["reduced"]) == (whole, whole // 4)
            assert live["unsharded"] == 0


def bytes_of_live_tensors() -> int:
    """Of all there are, once per storage."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return sum({s._cdata: s.nbytes() for s in (each.untyped_storage() for each in tensors)}.values())


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_bytes_after_a_gradient_that_was_awaited_was_read(orig: bool) -> None:
    """As after any other backward: neither the whole gradients nor the sum that was added to `.grad` are left."""
    with fake_world(4):
        model = wrapped("FULL_SHARD", use_orig_params=orig)
        settled(model)
        found = []
        for last in (True, True, False, False):
            model.set_is_last_backward(last)
            forward(model).backward()
            assert any(p.grad is not None for p in model.parameters())
            found.append(bytes_of_live_tensors())
        assert len(set(found)) == 1


@pytest.mark.parametrize("world", [2, 1024])
def test_a_backward_that_is_not_the_last_issues_the_same(world: int) -> None:
    with fake_world(world):
        model = wrapped("FULL_SHARD")
        settled(model)
        schedules = []
        for last in (True, False):
            model.set_is_last_backward(last)
            with inspect.events(model).listening() as events:
                forward(model).backward()
            schedules.append(list(map(str, events)))
        assert schedules[0] == schedules[1]
