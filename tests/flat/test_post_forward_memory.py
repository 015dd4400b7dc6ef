"""Parameters that stay among neighbours between forward and backward: the ranks of each gather, and the memory held.

Group sizes are read off the operations that torch's dispatcher sees: the output of a gather over its input.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.engine.device.streams import Stream
from flatfsdp.errors import ConfigTypeError, ConfigValueError
from flatfsdp.wrap import ModuleWrapPolicy
from tests.comm.test_communication import (
    NUMELS,
    UNITS,
    WIDTH,
    forward,
    padded,
    settled,
    story,
    tower,
    wrapped,
)
from tests.device.test_streams import OPTIONS, named, nothing, train
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice
from tests.runtime.test_schedule_events import evaluate, live, refused

pytestmark = pytest.mark.single_process

BF16 = torch.bfloat16


class Gathers(TorchDispatchMode):
    """Gathers inside the context by the size of their group: how many, the bytes they fill, and those they read."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()
        self.filled: Counter[int] = Counter()
        self.read: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._schema.name == "c10d::_allgather_base_":
            whole, own = args[:2]
            if whole.dtype is torch.int64:  # ranks agree on something
                return func(*args, **(kwargs or {}))
            size = whole.numel() // own.numel()
            self.counts[size] += 1
            self.filled[size] += whole.numel() * whole.element_size()
            self.read[size] += own.numel() * own.element_size()
        return func(*args, **(kwargs or {}))


def kept_bytes(model: FullyShardedDataParallel) -> int:
    """Bytes that are held between forward and backward, besides the shards and unsharded parameters."""
    return inspect.memory(model).live["post_forward_shard"]


@pytest.mark.parametrize(
    "mixed", [None, MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize(
    ("world", "count"), [(8, 2), (8, 4), (64, 8), (1024, 8), (1024, 512)], ids=lambda value: str(value)
)
def test_backward_gathers_among_neighbors(world: int, count: int, mixed: MixedPrecision | None) -> None:
    size = 2 if mixed else 4
    with fake_world(world, rank=world - 3):
        model = wrapped("FULL_SHARD", mixed_precision=mixed, reshard_after_forward=count)
        settled(model)
        whole = size * sum(padded(NUMELS, world))
        with Gathers() as first:
            loss = forward(model)
        assert (first.counts, first.filled, first.read) == ({world: UNITS}, {world: whole}, {world: whole // world})
        assert kept_bytes(model) == whole // count
        with Gathers() as second:
            loss.backward()
        assert (second.counts, second.filled, second.read) == ({count: UNITS}, {count: whole}, {count: whole // count})
        assert live(model) == {"shard"}


def test_neighbors_of_hybrids_share_the_shard_axis() -> None:
    with fake_world(16, rank=13):
        model = wrapped("HYBRID_SHARD", mesh=(2, 8), reshard_after_forward=4)
        settled(model)
        axis = inspect.unit(model.module.a).post_forward_axis
        assert axis.ranks == (12, 13, 14, 15) and axis.rank == 1
        with Gathers() as seen:
            forward(model).backward()
        assert seen.counts == {8: UNITS, 4: UNITS}


def test_units_share_groups_which_only_their_members_make() -> None:
    with fake_world(1024, rank=700), patch.object(dist, "new_group", wraps=dist.new_group) as made:
        model = wrapped("FULL_SHARD", reshard_after_forward=8)
        other = wrapped("FULL_SHARD", reshard_after_forward=8)
        before = made.call_count
        for each in (model, other, copy.deepcopy(model)):
            settled(each)
        assert [call.args[0] for call in made.call_args_list[before:]] == [list(range(696, 704))]
        model.set_reshard_after_forward(2)
        settled(model)
        assert [call.args[0] for call in made.call_args_list[before + 1 :]] == [[700, 701]]


def test_the_setter_is_the_argument() -> None:
    with fake_world(8):
        model = wrapped("SHARD_GRAD_OP")
        settled(model)
        assert gathered_by_backward(model) == {}
        model.set_reshard_after_forward(4, recurse=False)
        assert gathered_by_backward(model) == {4: 1}
        model.module.b.set_reshard_after_forward(2)
        assert gathered_by_backward(model) == {4: 1, 2: 1}
        twin: Any = copy.deepcopy(model)
        settled(twin)
        assert gathered_by_backward(twin) == {4: 1, 2: 1}
        model.set_reshard_after_forward(True)
        assert gathered_by_backward(model) == {8: UNITS}
        model.set_reshard_after_forward(False)
        assert gathered_by_backward(model) == {}


def gathered_by_backward(model: FullyShardedDataParallel) -> Counter[int]:
    loss = forward(model)
    with Gathers() as seen:
        loss.backward()
    return seen.counts


@pytest.mark.parametrize(("number", "meant"), [(1, False), (4, True)])
def test_one_rank_and_all_ranks_are_no_numbers(number: int, meant: bool) -> None:
    with fake_world(4):
        numbered, plain = (wrapped("FULL_SHARD", reshard_after_forward=each) for each in (number, meant))
        for model in (numbered, plain):
            settled(model)
        assert gathered_by_backward(numbered) == gathered_by_backward(plain)
        assert inspect.unit(numbered.module.a).options == inspect.unit(plain.module.a).options


def test_what_is_no_divisor_is_refused() -> None:
    accepted = "Accepted: True, False, or a divisor of the 12 ranks that share the parameters: 1, 2, 3, 4, 6, 12"
    with fake_world(12):
        model = wrapped("FULL_SHARD")
        for number in (5, 0, -2, 24):
            with refused(ConfigValueError, f"reshard_after_forward, of a Block: got {number}. {accepted}"):
                model.set_reshard_after_forward(number)
        with refused(ConfigTypeError, "set_reshard_after_forward: .*: got 2.0 .*Accepted: True, False, or a number"):
            model.set_reshard_after_forward(2.0)  # type: ignore[arg-type]
        plain = nn.Linear(WIDTH, WIDTH)
        with refused(ConfigValueError, f"reshard_after_forward: got 5. {accepted}"):
            FullyShardedDataParallel(plain, reshard_after_forward=5)
        assert isinstance(plain.weight, nn.Parameter) and plain.weight.shape == (WIDTH, WIDTH)  # as it was
        assert "reshard_after_forward" not in inspect.schedule_in_words(model)
        # In a model of several axes no wrapper is changed where one refuses.
        hybrid = wrapped("HYBRID_SHARD", mesh=(3, 4))
        with refused(ConfigValueError, "a divisor of the 4 ranks"):
            hybrid.set_reshard_after_forward(6)
        with refused(ConfigValueError, "a divisor of the 1 rank that holds the parameters: 1"):
            wrapped("NO_SHARD", reshard_after_forward=2)


def test_the_events_of_a_step() -> None:
    with tower(reshard_after_forward=2) as model:
        found = story(model, lambda: forward(model), "gather", "post_forward_shard", "reshard")
        assert found.replace("post_forward_shard", "kept") == (
            "gather:root gather:a kept:a reshard:a gather:b kept:b reshard:b gather:c kept:c reshard:c "
            "kept:root reshard:root"
        )
        loss = forward(model)
        block, *_, own = padded(NUMELS, 4)
        assert kept_bytes(model) == 4 * (3 * block + own) // 2
        held = []
        events = inspect.events(model)
        with events.listening(lambda event: held.append(kept_bytes(model)) if event.kind == "gathered" else None):
            assert story(model, loss.backward, "gather", "reshard", "reduce") == (
                "gather:root gather:c gather:b reshard:c reduce:c gather:a reshard:b reduce:b reshard:a reduce:a "
                "reshard:root reduce:root"
            )
        assert held == [4 * numel // 2 for numel in (3 * block, 2 * block, block, 0)]  # freed as each is gathered


def test_the_peak_of_a_step_is_a_sum_of_terms() -> None:
    with tower(reshard_after_forward=2) as model:
        memory, peaks = inspect.memory(model), []
        block, *_, own = padded(NUMELS, 4)
        for _ in range(3):
            memory.reset_peaks()
            forward(model).backward()
            model.zero_grad()
            peaks.append((memory.peak("post_forward_shard"), memory.peak("unsharded")))
        # Each unit's post-forward shard is there before its unsharded parameters go.
        assert peaks == [(4 * (3 * block + own) // 2, 4 * (own + 2 * block))] * 3


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_whatever_ends_an_iteration_frees_post_forward_shards(use_orig_params: bool) -> None:
    class Fails(Exception):
        pass

    def fail() -> None:
        raise Fails

    with fake_world(8):
        model = wrapped("FULL_SHARD", use_orig_params=use_orig_params, reshard_after_forward=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settled(model)
        inner: Any = model.module

        loss = forward(model)
        evaluate(model)
        assert live(model) == {"shard"}, "an evaluation"
        loss.backward()

        loss = forward(model)
        with FullyShardedDataParallel.summon_full_params(model):
            assert kept_bytes(model) == 0
        with Gathers() as seen:
            loss.backward()
        assert seen.counts == {8: UNITS}, "a backward after that gathers over all ranks"

        loss = forward(model)
        model.module.b.reshard()
        with Gathers() as seen:
            loss.backward()
        assert seen.counts == {8: 1, 2: UNITS - 1}

        loss = forward(model)
        model.module.b.unshard()
        assert live(model) == {"shard", "unsharded", "post_forward_shard"}
        with Gathers() as seen:
            loss.backward()
        assert seen.counts == {2: UNITS - 1}

        inner.between = fail
        loss = forward(model)
        with pytest.raises(Fails), pytest.warns(match="a backward failed"):
            loss.backward()
        inner.between = lambda: None
        evaluate(model)
        assert live(model) == {"shard"}, "a failed backward"

        hook = inner.outlet.register_forward_pre_hook(lambda module, args: fail())
        with pytest.raises(Fails):
            forward(model)
        hook.remove()
        assert live(model) == {"shard"}, "a failed forward"

        if use_orig_params:
            forward(model)
            optimizer.step()
            assert live(model) == {"shard"}, "an optimizer's step"


def test_a_second_backward_gathers_over_all_ranks() -> None:
    with fake_world(8):
        model = wrapped("FULL_SHARD", reshard_after_forward=2)
        settled(model)
        loss = forward(model)
        for expected in ({2: UNITS}, {8: UNITS}):
            with Gathers() as seen:
                loss.backward(retain_graph=True)
            assert seen.counts == expected


def test_a_second_forward_gathers_over_all_ranks() -> None:
    with fake_world(8):
        model = wrapped("FULL_SHARD", reshard_after_forward=2)
        settled(model)
        losses = [forward(model)]
        with Gathers() as seen:
            losses.append(forward(model))
        assert seen.counts == {8: UNITS}
        assert kept_bytes(model) == 4 * sum(padded(NUMELS, 8)) // 2
        with Gathers() as seen:
            torch.stack(losses).sum().backward()
        assert seen.counts == {2: UNITS}


def test_recomputation_gathers_among_neighbors() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), reshard_after_forward=2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    with fake_world(8):
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), Recomputed()))
        settled(model)
        assert gathered_by_backward(model) == {2: 1}
        assert live(model) == {"shard"}


@pytest.mark.filterwarnings("ignore:a backward failed")
def test_writes_between_forward_and_backward_are_refused() -> None:
    with tower(reshard_after_forward=2) as model:
        loss = forward(model)
        with torch.no_grad():
            model.module.c.flat_param.add_(1)
        with refused(RuntimeError, "modified by an inplace operation"):
            loss.backward()


def test_what_was_kept_by_post_forward_ranks_is_not_taken_for_what_the_shards_hold() -> None:
    with fake_world(4):
        net = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
        model = FullyShardedDataParallel(
            net, auto_wrap_policy=ModuleWrapPolicy({nn.Embedding}), reshard_after_forward=2
        )
        model.set_reshard_after_backward(False)

        def look_up() -> Tensor:
            loss: Tensor = model(torch.arange(3)).sum()
            return loss

        for write in (False, True):
            loss = look_up()
            if write:
                with torch.no_grad():
                    model[0].flat_param.add_(1)  # an embedding's backward does not mind
            loss.backward()
            assert ("gather:0" in story(model, look_up, "gather")) == write


def test_a_unit_that_backward_does_not_read_keeps_no_post_forward_shard() -> None:
    with tower(reshard_after_forward=2) as model:
        model.module.b.set_unshard_in_backward(False)
        block, *_, own = padded(NUMELS, 4)
        forward(model)
        assert kept_bytes(model) == 4 * (2 * block + own) // 2


def test_post_forward_shards_have_the_dtype_of_their_forward() -> None:
    mixed = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, full_precision_in_eval=True)
    with fake_world(8):
        model = wrapped("FULL_SHARD", mixed_precision=mixed, reshard_after_forward=2)
        settled(model)
        whole = sum(padded(NUMELS, 8))
        for training, size in ((True, 2), (False, 4)):
            model.train(training)
            loss = forward(model)
            assert kept_bytes(model) == size * whole // 2
            model.train(not training)
            with Gathers() as seen:
                loss.backward()
            assert seen.filled == {2: size * whole}


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
@pytest.mark.parametrize("options", OPTIONS, ids=named)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_nothing_happens_too_early(strategy: str, options: dict[str, Any]) -> None:
    with fake_world(8), FakeDevice() as device:
        mesh = {"mesh": (2, 4)} if "HYBRID" in strategy else {}
        model = wrapped(strategy, reshard_after_forward=2, **mesh, **options)
        train(model, device)
        assert live(model) - {"residual"} == {"shard"}
        del model
    assert device.races == []


def test_a_post_forward_shard_is_gathered_after_it_was_written() -> None:
    with fake_world(8), FakeDevice() as device, patch.object(Stream, "await_mark", nothing):
        train(wrapped("FULL_SHARD", reshard_after_forward=2, limit_all_gathers=False), device)
    assert any("_allgather_base_ on unshard may read before copy_ on compute" in race for race in device.races)
