"""Values that ranks must have in common, compared: messages, costs, and operations that all ranks may do together."""

from __future__ import annotations

import copy
import gc
import math
import operator
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from flatfsdp.engine.schedule.issue_order import GatherOrder
from flatfsdp.errors import AgreementError, FlatFSDPWarning
from flatfsdp.wrap import ModuleWrapPolicy
from tests.conftest import Run
from tests.harness import inspect

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(x))


class Net(nn.Module):
    """Blocks of equal size, run in the requested order."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2), fail_at: int | None = None) -> torch.Tensor:
        for index in order:
            if index == fail_at:
                raise ValueError("out of luck")
            x = self.blocks[index](x)
        return x


def wrap(net: nn.Module, **kwargs: Any) -> FullyShardedDataParallel:
    kwargs.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block}))
    kwargs.setdefault("use_orig_params", True)
    return FullyShardedDataParallel(net, **kwargs)


def step(model: nn.Module, **kwargs: Any) -> None:
    model(torch.ones(2, 4), **kwargs).sum().backward()


def scalars(model: FullyShardedDataParallel) -> int:
    return inspect.comm_stats(model).counts["scalar"]


def message_of(job: Callable[[], None]) -> str:
    with pytest.raises(AgreementError) as caught:
        job()
    return str(caught.value)


def same(messages: Sequence[str]) -> str:
    """The message that all ranks ended with."""
    assert len(set(messages)) == 1, messages
    return messages[0]


# -- different models ------------------------------------------------------------------------------------------------


def construct(rank: int, world: int, case: str) -> str:
    odd = rank == world - 1
    net = Net()
    kwargs: dict[str, Any] = {}
    if case == "one block more" and odd:
        net = Net(4)
    elif case == "dtype" and odd:
        net.blocks[1].to(torch.bfloat16)
    elif case == "requires_grad" and odd:
        net.blocks[2].linear.bias.requires_grad_(False)
    elif case == "order" and odd:
        linear = net.blocks[0].linear
        linear._parameters = {name: linear._parameters[name] for name in ("bias", "weight")}
    elif case == "strategy" and odd:
        kwargs["sharding_strategy"] = "NO_SHARD"
    elif case == "policy" and odd:
        kwargs["auto_wrap_policy"] = ModuleWrapPolicy({nn.Linear})
    elif case == "use_orig_params" and odd:
        kwargs["use_orig_params"] = False
    elif case == "mixed precision" and odd:
        kwargs["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    elif case == "gather dtype":
        kwargs["mixed_precision"] = MixedPrecision(gather_dtype=torch.int8, reduce_bits=4 if odd else 8)
    elif case == "error feedback":
        kwargs["mixed_precision"] = MixedPrecision(reduce_bits=4, reduce_error_feedback=odd)
    elif case == "prefetch" and odd:
        kwargs["backward_prefetch"] = None
    model = wrap(net, **kwargs)
    return message_of(lambda: step(model))


ADVICE = ". Build the same module with the same arguments of FullyShardedDataParallel on every rank"


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        ("one block more", ": rank 0: unit <root> of class Net; rank 1: unit 'blocks.3' of class Block"),
        (
            "dtype",
            " in unit 'blocks.1', parameter linear.weight: rank 0: float32 (4, 4), requires_grad; "
            "rank 1: bfloat16 (4, 4), requires_grad",
        ),
        (
            "requires_grad",
            " in unit 'blocks.2', parameter linear.bias: rank 0: float32 (4,), requires_grad; "
            "rank 1: float32 (4,), no requires_grad",
        ),
        (
            "order",
            ": rank 0: unit 'blocks.0', parameter linear.weight float32 (4, 4), requires_grad; "
            "rank 1: unit 'blocks.0', parameter linear.bias float32 (4,), requires_grad",
        ),
        ("strategy", " in unit 'blocks.0', sharding_strategy: rank 0: FULL_SHARD; rank 1: NO_SHARD"),
        (
            "policy",
            ": rank 0: unit 'blocks.0' of class Block; rank 1: unit 'blocks.0.linear' of class Linear",
        ),
        ("use_orig_params", " in unit 'blocks.0', use_orig_params: rank 0: True; rank 1: False"),
        (
            "mixed precision",
            " in unit 'blocks.0', mixed_precision: rank 0: none; rank 1: param_dtype=torch.bfloat16",
        ),
        (
            "gather dtype",
            " in unit 'blocks.0', mixed_precision: rank 0: gather_dtype=torch.int8, reduce_bits=8; rank 1: "
            "gather_dtype=torch.int8, reduce_bits=4",
        ),
        (
            "error feedback",
            " in unit 'blocks.0', mixed_precision: rank 0: reduce_bits=4; rank 1: reduce_bits=4, "
            "reduce_error_feedback=True",
        ),
        (
            "prefetch",
            " in unit 'blocks.0', backward_prefetch: rank 0: BackwardPrefetch.BACKWARD_PRE by default; rank 1: None",
        ),
    ],
)
def test_different_models(pool2: Run, case: str, difference: str) -> None:
    text = same(pool2(construct, case))
    assert text == f"ranks construct different models; the first difference is{difference}{ADVICE}"


def copy_unlike(rank: int, world: int) -> str:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + rank))
    return message_of(lambda: FullyShardedDataParallel(net, sync_module_states=True))  # type: ignore[arg-type, return-value]


def test_values_are_not_copied_between_different_models(pool2: Run) -> None:
    text = same(pool2(copy_unlike))
    difference = " in a unit of class Sequential, 1.weight: rank 0: float32 (4, 4); rank 1: float32 (5, 4)"
    assert text == f"ranks construct different models; the first difference is{difference}{ADVICE}"


def construct_grid(rank: int, world: int) -> str:
    mesh = dist.init_device_mesh("cpu", (2, 2))
    net = Net(3 if rank < 3 else 2)
    model = wrap(net, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    return message_of(lambda: step(model, order=(0, 1)))


def test_one_rank_of_a_hybrid_grid_differs(run: Run) -> None:
    text = same(run(4, construct_grid))
    assert text == (
        "ranks construct different models; the first difference is: ranks 0, 1, 2: unit 'blocks.2' of class Block; "
        f"rank 3: unit <root> of class Net{ADVICE}"
    )


# -- different order, in the first iteration -------------------------------------------------------------------------


def part(rank: int, world: int, case: str) -> str:
    model = wrap(Net())
    odd = rank == 1

    def job() -> None:
        if case == "skips a unit":
            step(model, order=(0, 2) if odd else (0, 1, 2))
        elif case == "ends early":
            step(model, order=(0, 1) if odd else (0, 1, 2))
        elif case == "another order":
            step(model, order=(1, 0, 2) if odd else (0, 1, 2))
        elif case == "evaluates":
            with torch.set_grad_enabled(not odd):
                model(torch.ones(2, 4))
        elif case == "no backward":
            out = model(torch.ones(2, 4))
            model(torch.ones(2, 4)) if odd else out.sum().backward()
        elif case == "no_sync":
            out = model(torch.ones(2, 4))
            if odd:
                with model.no_sync():
                    out.sum().backward()
            else:
                out.sum().backward()

    return message_of(job)


PARTING = (
    ". All ranks must run the same units in the same order, with the same number of forwards and backwards, and catch "
    "an exception at the same point or not at all; rank-local data must not decide which units run"
)
REMEDY = ", except in modules given to ensure_unit_participation()"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("skips a unit", "rank 0 entered unit 'blocks.1'; rank 1 entered unit 'blocks.2'"),
        ("ends early", "rank 0 entered unit 'blocks.2'; rank 1 ended its forward"),
        ("another order", "rank 0 entered unit 'blocks.0'; rank 1 entered unit 'blocks.1'"),
        (
            "evaluates",
            "rank 0 began a training forward at unit <root>; rank 1 began an evaluation forward at unit <root>",
        ),
        (
            "no backward",
            "rank 0 began a backward through 4 units, 3 flat gradients; rank 1 began a training forward at unit <root>",
        ),
        (
            "no_sync",
            "rank 0 began a backward through 4 units, 3 flat gradients; "
            "rank 1 began a backward under no_sync() through 4 units, 3 flat gradients",
        ),
    ],
)
def test_ranks_part_in_their_first_iteration(pool2: Run, case: str, text: str) -> None:
    remedy = REMEDY if case in ("skips a unit", "ends early", "another order") else ""
    parting = {
        "no backward": ". Rank 1 skipped the backward that rank 0 began (as by `continue` after a loss that is not "
        "finite). Run a backward on all ranks or on none; rank-local data must not decide it",
        "no_sync": ". Rank 1 accumulated gradients under no_sync() where rank 0 reduced them. All ranks must make the "
        "same choice: if it depends on the number of the batch, a rank skipped a batch. Skip a batch on all ranks "
        "or on none",
    }.get(case, f"{PARTING}{remedy}")
    assert same(pool2(part, case)) == f"ranks diverged at step 1: {text}{parting}"


def deviate(rank: int, world: int) -> tuple[str, list[str]]:
    """All leave the agreed order, each in its own way; the units gathered meanwhile."""
    model = wrap(Net(), join_units_below=0)
    step(model)
    step(model)
    with inspect.events(model).listening() as events:
        message = message_of(lambda: step(model, order=((1, 0, 2), (2, 0, 1))[rank]))
    return message, [event.unit for event in events if event.kind == "gather"]


def test_no_unit_is_gathered_out_of_order_before_the_others_agree(pool2: Run) -> None:
    """Units of equal size would be gathered into each other."""
    messages, gathered = zip(*pool2(deviate), strict=True)
    text = "rank 0 entered unit 'blocks.1'; rank 1 entered unit 'blocks.2'"
    assert same(messages) == f"ranks diverged at step 3: {text}{PARTING}{REMEDY}"
    assert gathered == ([], [])


def call(rank: int, world: int, what: str, before: int) -> str:
    """Ranks call different things between iterations, or the same for different units."""
    model = wrap(Net(), join_units_below=0)
    for _ in range(before):
        step(model)
        model.clip_grad_norm_(1.0)

    def calls() -> None:
        if what == "norm":
            model.clip_grad_norm_(1.0, norm_type=(2.0, math.inf)[rank])
        if what == "limit":
            model.clip_grad_norm_(1.0 + rank)
        if what == "torchs":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0 + rank)
        if what == "clip" and rank == 1:
            model.clip_grad_norm_(1.0)
        with FullyShardedDataParallel.summon_full_params(
            model.blocks[rank] if what == "part" else model, with_grads=what == "gradients" and rank == 1
        ):
            pass

    return message_of(calls)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("clip", "rank 0 called summon_full_params(); rank 1 called clip_grad_norm_(max_norm=1.0)"),
        (
            "norm",
            "rank 0 called clip_grad_norm_(max_norm=1.0); rank 1 called clip_grad_norm_(max_norm=1.0, norm_type=inf)",
        ),
        ("limit", "rank 0 called clip_grad_norm_(max_norm=1.0); rank 1 called clip_grad_norm_(max_norm=2.0)"),
        ("torchs", "rank 0 called clip_grad_norm_(max_norm=1.0); rank 1 called clip_grad_norm_(max_norm=2.0)"),
        (
            "part",
            "rank 0 called summon_full_params() of unit 'blocks.0'; "
            "rank 1 called summon_full_params() of unit 'blocks.1'",
        ),
        ("gradients", "rank 0 called summon_full_params(); rank 1 called summon_full_params(with_grads=True)"),
    ],
)
def test_ranks_call_different_things_between_iterations(pool2: Run, what: str, text: str, before: int) -> None:
    """Their collectives would be taken for each other: of other sizes, for which gloo ends the process, or equal."""
    assert same(pool2(call, what, before)) == f"ranks diverged at step {max(1, before)}: {text}{PARTING}"


@contextmanager
def mixed_gathers(*, here: bool) -> Iterator[None]:
    """A backward gathers its first two units in the other order, on ranks where `here` is true."""

    def swapped(plan: Any, anchored: tuple[Any, ...], *args: Any, **kwargs: Any) -> None:
        first, second, *rest = anchored
        planned(plan, (second, first, *rest), *args, **kwargs)

    planned = GatherOrder.__init__
    with patch.object(GatherOrder, "__init__", swapped if here else planned):
        yield


def mix(rank: int, world: int, after: int, extra: int) -> tuple[str, bool]:
    """Rank 1 gathers two units in the other order in a backward, of which one has so many elements more; whether
    `.grad` is as before."""
    net = Net()
    net.blocks[1].extra = nn.Parameter(torch.zeros(extra), requires_grad=False) if extra else None
    model = wrap(net, join_units_below=0)
    for _ in range(after):
        step(model)
    before = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    with mixed_gathers(here=rank == 1):
        if after and rank == 0:  # a rank that goes on waits for no other, and detects it later
            step(model)
            while inspect.verdict_of(model)() is None:
                time.sleep(0.05)
        message = message_of(lambda: step(model))
    after_it = [parameter.grad for parameter in model.parameters()]
    kept = [one is other or torch.equal(one, other) for one, other in zip(before, after_it, strict=True)]  # type: ignore[arg-type]
    return message, all(kept)


MIXED = (
    "Values of different units were exchanged for each other, so the gradients of this backward are wrong: resume from "
    "an earlier checkpoint. Where ranks use different parts of a model, checkpoint activations of each of their units "
    "separately, not of several together or one inside another; otherwise please report this"
)


@pytest.mark.parametrize("extra", [0, 40])
@pytest.mark.parametrize("after", [0, 2])
def test_a_backward_that_mixed_units_brings_no_gradients(pool2: Run, after: int, extra: int) -> None:
    """Nothing else would notice."""
    messages, kept = zip(*pool2(mix, after, extra), strict=True)
    reduced = "and reduced 'blocks.2', 'blocks.1', 'blocks.0'"
    assert same(messages) == (
        f"ranks diverged at step {after + 1}: "
        f"rank 0 gathered in its backward the units 'blocks.2', 'blocks.1', 'blocks.0', {reduced}; "
        f"rank 1 gathered in its backward the units 'blocks.2', 'blocks.0', 'blocks.1', {reduced}. {MIXED}"
    )
    assert kept == (after == 0, True)


def mix_in_a_window(rank: int, world: int, mixed: int) -> tuple[str, bool]:
    """Rank 1 gathers two units in the other order in one of two backwards that do not reduce; whether the end of their
    window publishes no gradient."""
    model = Net()
    for module in (*model.blocks, model):
        flatfsdp.fully_shard(module)
    model.set_requires_gradient_sync(False)
    for number in range(2):
        with mixed_gathers(here=rank == 1 and number == mixed):
            step(model)
    model.set_requires_gradient_sync(True)
    message = message_of(lambda: step(model))
    return message, all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("mixed", [0, 1])
def test_so_does_the_end_of_a_window_in_which_a_backward_mixed_units(pool2: Run, mixed: int) -> None:
    """Under no_sync() nothing is reduced, and nothing compared: the gradients are."""
    messages, kept = zip(*pool2(mix_in_a_window, mixed), strict=True)
    message = same(messages)
    assert message.startswith("ranks diverged at step 3: rank 0 gathered in its backward the units")
    assert message.endswith(MIXED), message
    before = "'blocks.2', 'blocks.1', 'blocks.0' and " if mixed else ""
    assert f"under no_sync() before it {before}'blocks.2', 'blocks.0', 'blocks.1'" in message
    assert kept == (True, True)


# -- operations common to all ranks ----------------------------------------------------------------------------------


def costs(rank: int, world: int) -> list[int]:
    model = wrap(Net())
    seen = []

    def after(job: Callable[[], None]) -> None:
        job()
        seen.append(scalars(model))

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(2, 4))

    after(lambda: step(model))
    after(lambda: step(model))
    after(lambda: step(model, order=(2, 0, 1)))
    after(lambda: step(model, order=(2, 0, 1)))
    after(evaluate)
    after(lambda: step(model))
    after(lambda: step(model, order=(0, 0)))
    return seen


def test_orders_are_agreed_once(pool2: Run) -> None:
    """One exchange for the models and values, one for each of four units, the end of the forward, the backward and its
    operations; none later if all ranks do the same, except after something that has not happened before. And at the end
    of each backward the bitmap."""
    first = 1 + 4 + 3
    second = first + 1  # after a backward in another order
    third = second + 2  # the unit after the second visit of a block, and after the backward
    exchanges, bitmaps = [*[first] * 2, *[second] * 4, third], [1, 2, 3, 4, 4, 5, 6]
    assert pool2(costs) == [[*map(operator.add, exchanges, bitmaps)]] * 2


def accumulate(rank: int, world: int) -> list[int]:
    model = wrap(Net())
    notes = []
    for _ in range(6):
        for micro in range(4):
            out = model(torch.ones(2, 4)).sum()
            if micro < 3:
                with model.no_sync():
                    out.backward()
            else:
                out.backward()
        notes.append(inspect.meetings(model))
    return notes


def test_a_window_of_accumulation_is_predicted(pool2: Run) -> None:
    for notes in pool2(accumulate):
        assert notes[-1] == notes[-2] == notes[-3], notes


def abandon_together(rank: int, world: int, where: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    net = Net()
    models = wrap(copy.deepcopy(net)), wrap(net)
    for model in models:
        step(model)
    unlucky = models[0]
    if where == "forward":
        for _ in range(2):
            with pytest.raises(ValueError, match="out of luck"):
                step(unlucky, fail_at=1)
    else:

        def refuse(grad: torch.Tensor) -> None:
            raise ValueError("bad gradient")

        hook = unlucky.module.blocks[1].linear.weight.register_hook(refuse)
        for _ in range(2):
            with pytest.raises(ValueError, match="bad gradient"):
                step(unlucky)
        hook.remove()
    for model in models:
        step(model)
        step(model)
    return tuple([p.grad for p in model.parameters()] for model in models)  # type: ignore[return-value]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_ranks_abandon_an_iteration_at_the_same_point(pool2: Run, where: str) -> None:
    for unlucky, plain in pool2(abandon_together, where):
        for found, expected in zip(unlucky, plain, strict=True):
            assert (found is None and expected is None) or torch.equal(found, expected)


def without_shards(rank: int, world: int) -> int:
    model = wrap(Net(), sharding_strategy="NO_SHARD")
    step(model)
    with torch.no_grad():
        for _ in range(rank):
            model(torch.ones(2, 4), order=(rank,))
    step(model)
    return scalars(model)


def test_unsharded_forwards_are_a_rank_s_own_business(pool2: Run) -> None:
    # The models, the first backward and its operations, the replicas; two bitmaps.
    assert pool2(without_shards) == [4 + 2, 4 + 2]


class Cut(nn.Module):
    """Ends the graph behind its layer on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cuts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.detach() if self.cuts else y


def cut_off(rank: int, world: int) -> str:
    cut = Cut()
    cut.cuts = rank == 1
    model: Any = wrap(nn.Sequential(cut, nn.Linear(4, 4)), auto_wrap_policy={Cut}, sync_module_states=True)
    return message_of(lambda: model(torch.ones(2, 4)).sum().backward())


def test_an_output_without_gradient_is_distinguished_from_a_frozen_parameter(pool2: Run) -> None:
    text = same(pool2(cut_off))
    assert "The outputs of unit '0' require a gradient on rank 0, but not on rank 1" in text and "detach()" in text


# -- values ----------------------------------------------------------------------------------------------------------


@contextmanager
def warned() -> Iterator[list[str]]:
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(each.message) for each in caught if issubclass(each.category, FlatFSDPWarning)]


def begin(rank: int, world: int, case: str) -> tuple[list[str], int]:
    torch.manual_seed(rank)
    net = Net()
    if case == "one parameter":
        torch.manual_seed(0)
        net = Net()
        if rank == 1:
            with torch.no_grad():
                net.blocks[2].linear.bias[1] += 1
    kwargs: dict[str, Any] = {}
    if case in ("raise", "off"):
        kwargs["check_values"] = case
    if case == "sync_module_states":
        kwargs["sync_module_states"] = True
    model = wrap(net, **kwargs)
    if case == "loaded":
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
    elif case == "replaced":
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter.data, 0.5)
    elif case == "summoned":
        with FullyShardedDataParallel.summon_full_params(model):
            for parameter in model.parameters():
                parameter.data.fill_(0.5)
    elif case == "one loaded":
        model.module.blocks[0].linear.weight.data.fill_(0.5)
    with warned() as messages:
        if case == "evaluates first":
            with torch.no_grad():
                model(torch.ones(2, 4))
        try:
            step(model)
        except AgreementError as error:
            messages.append(f"raised: {error}")
        else:
            step(model)
    return messages, scalars(model)


def different(count: int, names: str) -> str:
    return (
        f"ranks begin with different values of {count} of 6 parameters: {names}. Gathered "
        "parameters consist of pieces of different models. Pass sync_module_states=True, give all ranks the same "
        'seed, or load a checkpoint before the first step; check_values="off" if this is intentional'
    )


ALL = different(6, "blocks.0.linear.weight, blocks.0.linear.bias, blocks.1.linear.weight and 3 more")


@pytest.mark.parametrize(
    ("case", "expected", "exchanges"),
    [
        ("warn", [ALL], 2 + 9),
        ("raise", [f"raised: {ALL}"], 2),
        ("off", [], 2 + 8),
        ("sync_module_states", [], 2 + 8),
        ("loaded", [], 2 + 9),
        ("replaced", [], 2 + 9),
        ("summoned", [], 2 + 11),  # the summons, then the values apart: the models were compared before
        (
            "one loaded",
            [different(5, "blocks.0.linear.bias, blocks.1.linear.weight, blocks.1.linear.bias and 2 more")],
            2 + 9,
        ),
        ("one parameter", [different(1, "blocks.2.linear.bias")], 2 + 9),
        ("evaluates first", [ALL], 2 + 10),
    ],
)
def test_values_to_begin_with(pool2: Run, case: str, expected: list[str], exchanges: int) -> None:
    for rank, (messages, count) in enumerate(pool2(begin, case)):
        assert messages == (expected if rank == 0 or case == "raise" else [])  # warnings are once per job
        assert count == exchanges  # with a bitmap in each of two steps


# -- the watch -------------------------------------------------------------------------------------------------------


def live_and_die(rank: int, world: int) -> list[list[str]]:
    def watches() -> list[str]:
        gc.collect()
        time.sleep(0.1)
        return [thread.name for thread in threading.enumerate() if thread.name == "flatfsdp watch"]

    models = [wrap(Net()), wrap(Net())]
    for model in models:
        step(model)
    del model
    seen = [watches()]
    models.pop()
    seen.append(watches())
    models.pop()
    seen.append(watches())
    return seen


def test_one_thread_watches_all_models_and_outlives_them(pool2: Run) -> None:
    """Other ranks may ask what this one did with a model that it has deleted."""
    assert pool2(live_and_die) == [[["flatfsdp watch"]] * 3] * 2


class CutBehindFrozen(nn.Module):
    """A frozen block and a trained one, from which no gradient flows back where it is `cut`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.trained = Block().requires_grad_(False), Block()

    def forward(self, x: torch.Tensor, cut: bool) -> torch.Tensor:
        x = self.frozen(x.clone().requires_grad_())
        y: torch.Tensor = self.trained(x)
        return x + (y.detach() if cut else y)


def reach_by_turns(rank: int, world: int) -> bool:
    """Whether gradients are those of one process where two forwards of a step bring none on any rank, then the second
    does on rank 0 and the first on the others."""
    alone = CutBehindFrozen()
    model = wrap(CutBehindFrozen(), join_units_below=0, backward_prefetch=None)
    inputs = torch.randn(world, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    for cuts in ([True] * 4, [True, False, False, True]):
        for net, ranks in ((model, [rank]), (alone, range(world))):
            for each in ranks:
                losses = [net(inputs[each, i], cuts[2 * (each > 0) + i]).square().sum() for i in range(2)]
                (sum(losses) * (1 if net is model else 1 / world)).backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        found = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        expected = [parameter.grad for parameter in alone.parameters() if parameter.requires_grad]
        return all(map(torch.allclose, found, expected))  # type: ignore[arg-type]


def test_gradients_that_come_first_behind_a_frozen_unit_are_not_waited_for_before_it(pool2: Run) -> None:
    """After a backward that brought none: a rank waited for the others to report whether theirs brings some, and they
    for a gather by that rank. Model 940139 of the random ones."""
    assert pool2(reach_by_turns) == [True, True]


class Early(Net):
    """Returns what its first block made, too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        first = self.blocks[0](x)
        return first, super().forward(first, order=(1, 2, 3, 4, 5))


def differentiate(rank: int, world: int) -> list[float]:
    """Gradients of inputs, which pass over units on one rank."""
    torch.manual_seed(0)
    model, found = wrap(Early(6), join_units_below=0, backward_prefetch=None), []
    for _ in range(3):
        x = torch.ones(2, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x)[rank].sum(), x)
        found.append(grad.sum().item())
    return found


def test_ranks_may_pass_over_other_units_where_no_gradient_comes_to_any(pool2: Run) -> None:
    for found in pool2(differentiate):
        assert len(set(found)) == 1 and found[0]


class Aside(Net):
    """Returns its input, too: a gradient of that reaches no parameter."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), 2 * x


def reach_nothing_last(rank: int, world: int) -> str:
    """The last backward reaches no parameter on rank 0, as was usual, whose model is deleted then."""
    torch.manual_seed(0)
    model = wrap(Aside(), sharding_strategy="NO_SHARD")
    for i in range(4):
        output, aside = model(torch.ones(2, 4, requires_grad=True))
        loss = (output if rank == 1 and i == 3 else aside).sum()
        if rank == 0 or i < 3:
            loss.backward()
    return message_of(loss.backward) if rank == 1 else ""


def test_a_rank_is_not_waited_for_once_its_model_is_deleted(pool2: Run) -> None:
    """Model 41013 of the random ones. The other rank still exists, and would say nothing more."""
    began = time.monotonic()
    began_with = "began a backward through 4 units, 3 flat gradients"
    message = f"rank 0 {began_with}, which computes no gradient of a parameter; rank 1 {began_with}"
    assert message in pool2(reach_nothing_last)[1]
    assert time.monotonic() - began < 30


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Beside(Net):
    """Returns what a frozen block made of its input, too, which a rank may pass through a custom Function before."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor, custom: bool) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x = self.blocks[0](Identity.apply(x) if custom else x)
        return super().forward(x, order=(1, 2, 3)), 2 * x


def through_customs(rank: int, world: int, ranks: int) -> list[torch.Tensor | None]:
    """Gradients after backwards that bring some to all ranks, or none; on the first `ranks`, all flow on to a custom
    Function, which might bring some."""
    torch.manual_seed(0)
    model = wrap(Beside(), join_units_below=0, backward_prefetch=None)
    for kind in "nnttntntt":
        output, aside = model(torch.ones(2, 4, requires_grad=True), rank < ranks)
        (output if kind == "t" else aside).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_ranks_may_learn_at_different_times_that_no_gradients_come(pool2: Run) -> None:
    expected = pool2(through_customs, 0)
    assert any(grad is not None for grad in expected[0])
    for ranks in (1, 2):
        for found, of_rank in zip(pool2(through_customs, ranks), expected, strict=True):
            for one, other in zip(found, of_rank, strict=True):
                assert one is other is None or torch.equal(one, other)
