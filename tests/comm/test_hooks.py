"""Gradients averaged by users' hooks: as without them, under every strategy; and errors of ranks that do not agree."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torchs

from flatfsdp import FullyShardedDataParallel, MixedPrecision, comm_hooks
from flatfsdp.engine.features.coalescing import uncoalesced
from flatfsdp.errors import AgreementError, FlatFSDPWarning
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import (
    ALL,
    HYBRID,
    Net,
    Setting,
    data,
    differences,
    full_gradients,
    joined,
    loss_of,
    seeded,
    unsynced,
)
from tests.harness.meshes import replicas_of_shards
from tests.harness.models import WIDTH, Feedforward
from tests.harness.thorough import is_thorough, some

pytestmark = pytest.mark.distributed

REPLICATED = (Setting("NO_SHARD", True), Setting("NO_SHARD", False, doubled=True))
SHARDED = tuple(setting for setting in (*ALL, Setting(offload=True)) if setting.strategy != "NO_SHARD")
EXACT, FP16, BF16 = 2e-6, 4e-3, 3e-2  # relative errors of gradients, by how they travel


def register(model: Any, hook: Callable[..., Any], state: Callable[[Any], Any]) -> None:
    """Register `hook` with `state(process group)` on a wrapped model that has none."""
    if isinstance(model, FullyShardedDataParallel) and inspect.unit(model).comm_hook is None:
        model.register_comm_hook(state(model.process_group), hook)


def backward(model: Any, rank: int, step: int, micro: int = 0) -> Tensor:
    loss = loss_of(model(data(rank, step, micro)))
    loss.backward()
    return loss.detach()


# -- the same numbers --------------------------------------------------------------------------------------------------


def program(model: Any, rank: int, step: int, *, hook: Any, state: Any, micros: str = "s") -> list[Tensor]:
    """Microbatches: s for one that reduces, n for one that does not, p for a partial sum."""
    register(model, hook, state)
    losses = []
    for micro, kind in enumerate(micros):
        if isinstance(model, FullyShardedDataParallel):
            model.set_requires_all_reduce(kind != "p")
        if kind == "n":
            with unsynced(model):
                losses.append(backward(model, rank, step, micro))
        else:
            losses.append(backward(model, rank, step, micro))
    return losses


def trained(
    rank: int, world: int, hook: Any, state: Any, under: tuple[Setting, ...], bound: float, micros: str
) -> list[str]:
    run = partial(program, hook=hook, state=state, micros=micros)
    return differences(rank, world, Net, run, under=under, bound=bound)


OWN = [
    (comm_hooks.allreduce_hook, EXACT),
    (comm_hooks.reduce_scatter_hook, EXACT),
    (comm_hooks.fp16_compress_hook, FP16),
    (comm_hooks.bf16_compress_hook, BF16),
]
TORCHS = [
    (torchs.reduce_scatter_hook, EXACT, SHARDED),
    (torchs.allreduce_hook, EXACT, REPLICATED),
    (torchs.fp16_compress_hook, FP16, (*SHARDED, *REPLICATED)),
    (torchs.bf16_compress_hook, BF16, (*SHARDED, *REPLICATED)),
]


def name_of(value: Any) -> str | None:
    return getattr(value, "__name__", None)


UNDER = {
    2: (*SHARDED, *REPLICATED),
    3: (SHARDED[0], SHARDED[3], REPLICATED[1]),
    4: (SHARDED[0], REPLICATED[1], *HYBRID),
}


def spare(world: int, pairs: list[Any]) -> list[Any]:
    """Without every other one in a world of more than two ranks, others in three than in four."""
    return pairs if world == 2 or is_thorough() else pairs[world % 2 :: 2]


@pytest.mark.parametrize(("world", "hook", "bound"), [(w, *each) for w in UNDER for each in spare(w, OWN)], ids=name_of)
def test_our_hooks(hook: Any, bound: float, world: int, run: Run) -> None:
    under = some(UNDER[world], 3, OWN.index((hook, bound)))
    assert not joined(run(world, trained, hook, comm_hooks.DefaultState, under, bound, "s"))


@pytest.mark.parametrize(
    ("world", "hook", "bound", "under"), [(w, *each) for w in UNDER for each in spare(w, TORCHS)], ids=name_of
)
def test_torchs_hooks(hook: Any, bound: float, under: tuple[Setting, ...], world: int, run: Run) -> None:
    if world > 2:
        under = HYBRID[:2] if world == 4 and under is not REPLICATED else under[-2:]
    elif under is not REPLICATED:
        under = some(under, 3, TORCHS.index((hook, bound, under)))
    state = torchs.LowPrecisionState if "compress" in hook.__name__ else torchs.DefaultState
    assert not joined(run(world, trained, hook, state, under, bound, "s"))


@pytest.mark.parametrize("micros", ["nns", "sns", "ss", "pps", "nps"])
def test_accumulation(micros: str, pool2: Run, pool4: Run) -> None:
    pair, hybrid = (comm_hooks.reduce_scatter_hook, comm_hooks.DefaultState), micros in ("pps", "nps")
    if is_thorough() or not hybrid:
        under = some((*SHARDED[:2], *REPLICATED), 2, len(micros))
        assert not joined(pool2(trained, *pair, under, EXACT, micros))
    if is_thorough() or hybrid:
        assert not joined(pool4(trained, *pair, HYBRID[:2], EXACT, micros))


class Own:
    """A hook of a user's own, as a callable that is its own state: asynchronous, with tensors replaced and kept."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.seen: list[tuple[Tensor, ...]] = []

    def __call__(self, state: Any, *tensors: Tensor) -> Any:
        self.seen.append(tensors)
        mean = tensors[0].double() / dist.get_world_size(self.group)
        work = dist.all_reduce(mean, group=self.group, async_op=True)
        if tensors[-1].is_floating_point():
            tensors[-1].fill_(float("nan"))
        return Later(self.group, mean, work, tensors[-1])


class Later:
    """The result is there after `wait`, under another `.data`."""

    def __init__(self, group: Any, mean: Tensor, work: Any, result: Tensor) -> None:
        self.group, self.mean, self.work, self.result = group, mean, work, result

    def wait(self) -> None:
        self.work.wait()
        rank = dist.get_rank(self.group) if self.result.numel() < self.mean.numel() else 0
        self.result.data = self.mean.view(-1, self.result.numel())[rank].float()


def calling(state: Any, *tensors: Tensor) -> Any:
    return state(state, *tensors)


def kept_and_asynchronous(rank: int, world: int, under: tuple[Setting, ...]) -> list[str]:
    made: list[Own] = []

    def own(group: Any) -> Own:
        made.append(Own(group))
        return made[-1]

    lines = differences(rank, world, Net, partial(program, hook=calling, state=own), under=under, bound=EXACT)
    for each in made:
        assert all(tensor.sum() == tensor.sum() for tensors in each.seen for tensor in tensors[1:])
    return lines


def test_a_hook_may_return_a_work_and_keep_what_it_is_given(pool2: Run, pool4: Run) -> None:
    assert not joined(pool2(kept_and_asynchronous, some((*SHARDED, *REPLICATED), 2)))
    assert not joined(pool4(kept_and_asynchronous, HYBRID[:2]))


def gradients(rank: int, strategy: str, reduce: torch.dtype, *, hooked: bool) -> dict[str, Tensor]:
    mixed = MixedPrecision(reduce_dtype=reduce)
    model = Setting(strategy).wrap(seeded(Net), (Feedforward,), mixed_precision=mixed)
    if hooked:
        register(model, comm_hooks.reduce_scatter_hook, comm_hooks.DefaultState)
    backward(model, rank, 0)
    return full_gradients(model)


def in_low_precision(rank: int, world: int, strategy: str) -> list[str]:
    lines = []
    for reduce, bound in ((torch.float16, FP16), (torch.bfloat16, BF16)):
        found, expected = (gradients(rank, strategy, reduce, hooked=hooked) for hooked in (True, False))
        for name, grad in found.items():
            assert grad.dtype == torch.float32
            if (grad - expected[name]).norm() > bound * expected[name].norm():
                lines.append(f"{reduce}: {name} is off")
    return lines


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_low_precision_reductions(strategy: str, pool4: Run) -> None:
    assert not joined(pool4(in_low_precision, strategy))


def given_to_hooks(rank: int, world: int) -> None:
    """A hook sees this rank's own gradients: not scaled, padded with zeros."""
    plain = seeded(lambda: nn.Linear(WIDTH, 3))
    loss_of(plain(data(rank, 0))).backward()
    local = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    seen: list[Tensor] = []

    def hook(state: Any, *tensors: Tensor) -> None:
        seen.extend(tensors)
        comm_hooks.reduce_scatter_hook(state, tensors[0].clone(), tensors[1])

    for reduce in (torch.float32, torch.float16):
        model = Setting(orig=False).wrap(
            seeded(lambda: nn.Linear(WIDTH, 3)), (), mixed_precision=MixedPrecision(reduce_dtype=reduce)
        )
        register(model, hook, comm_hooks.DefaultState)
        loss_of(model(data(rank, 0))).backward()
        grad, shard = seen[-2:]
        assert (grad.dtype, shard.dtype, grad.dim(), shard.dim()) == (reduce, reduce, 1, 1)
        assert grad.numel() == world * shard.numel() >= local.numel()
        assert torch.equal(grad[: local.numel()], local.to(reduce)) and not grad[local.numel() :].any()


def test_what_hooks_are_given(pool3: Run) -> None:
    pool3(given_to_hooks)


# -- no order in common with gathers -----------------------------------------------------------------------------------


class Skipping(nn.Module):
    """The backward of the first rank does not reach the last block.

    There the second block's gather comes after the last one's reduction, elsewhere ahead of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Feedforward(WIDTH, 17), Feedforward(WIDTH, 9), Feedforward(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(2 * self.first(x))
        y = self.last(x)
        return 2 * x + (y.detach() if dist.get_rank() == 0 else y)


def skipping(rank: int, world: int, under: tuple[Setting, ...]) -> list[str]:
    lines = []
    for setting in under:
        with uncoalesced():
            model, plain = (setting.wrap(seeded(Skipping), (Feedforward,)) for _ in range(2))
        register(model, comm_hooks.reduce_scatter_hook, comm_hooks.DefaultState)
        order: list[str] = []
        for step in range(2):
            backward(plain, rank, step)
            with inspect.events(model).listening() as events:
                backward(model, rank, step)
            order = [f"{e.kind} {e.unit}" for e in events if e.kind in ("gather", "reduce")]
        if "FULL" in setting.strategy:
            moved = order.index("reduce last"), len(order) - 1 - order[::-1].index("gather second")
            assert (moved[0] < moved[1]) == (rank == 0), order
        expected = full_gradients(plain)
        for name, grad in full_gradients(model).items():
            if not torch.allclose(grad, expected[name], rtol=1e-5, atol=1e-7):
                lines.append(f"{setting}: {name} is off")
    return lines


def test_hooks_and_gathers_interleave_differently_on_ranks(pool2: Run) -> None:
    assert not joined(pool2(skipping, SHARDED))


# -- failures ----------------------------------------------------------------------------------------------------------


class Bang(Exception):
    """The exception that the hooks of these tests raise."""


def failing(rank: int, world: int, late: bool, under: tuple[Setting, ...]) -> list[str]:
    """A hook that raises on all ranks in one of the units, now before and now after it has communicated."""

    def hook(state: dict[str, Any], *tensors: Tensor) -> None:
        state["calls"] += 1
        if state["fails"] and state["calls"] == 2 and not late:
            raise Bang
        comm_hooks.reduce_scatter_hook(state["state"], *tensors)
        if state["fails"] and state["calls"] == 2 and late:
            raise Bang

    def program(model: Any, rank: int, step: int) -> list[Tensor]:
        register(model, hook, lambda group: {"state": comm_hooks.DefaultState(group)})
        if isinstance(model, FullyShardedDataParallel):
            chosen = inspect.unit(model).comm_hook
            assert chosen is not None
            chosen.state.update(calls=0, fails=True)
            with pytest.raises(Bang):
                backward(model, rank, step, 1)
            chosen.state.update(fails=False)
        return [backward(model, rank, step)]

    return differences(rank, world, Net, program, under=under, bound=EXACT)


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
@pytest.mark.parametrize("late", [False, True])
def test_a_step_in_which_a_hook_failed_was_not(late: bool, pool2: Run, pool4: Run) -> None:
    assert not joined(pool2(failing, late, some((*SHARDED, *REPLICATED), 2, late)))
    assert not joined(pool4(failing, late, some(HYBRID[:2], 2, late)))


def registering(rank: int, world: int, strategy: str, hooks: tuple[Any, Any], after: int) -> str:
    model = Setting(strategy).wrap(seeded(Net), (Feedforward,))
    for step in range(after):
        backward(model, rank, step)
    if hooks[rank] is not None:
        register(model, hooks[rank], comm_hooks.DefaultState)
    with pytest.raises(AgreementError) as caught:
        backward(model, rank, after)
    return str(caught.value)


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_ranks_that_register_different_hooks_get_an_error(strategy: str, after: int, pool2: Run) -> None:
    for report in pool2(registering, strategy, (comm_hooks.allreduce_hook, comm_hooks.fp16_compress_hook), after):
        assert "a communication hook, allreduce_hook" in report and "a communication hook, fp16_compress_hook" in report


def test_a_rank_that_registers_no_hook_gets_an_error(pool2: Run) -> None:
    for report in pool2(registering, "FULL_SHARD", (comm_hooks.allreduce_hook, None), 0):
        assert "schedule: rank 0: a communication hook, allreduce_hook; rank 1: as built" in report


# -- copies ------------------------------------------------------------------------------------------------------------


class Counting:
    """A state with a process group, and something to count."""

    def __init__(self, group: Any) -> None:
        self.inner = comm_hooks.DefaultState(group)
        self.calls = 0

    def reduce(self, state: Any, *tensors: Tensor) -> None:
        assert state is self
        self.calls += 1
        comm_hooks.reduce_scatter_hook(self.inner, *tensors)


def copied(rank: int, world: int) -> list[str]:
    """A copy has a hook and a state of its own, shared by its units, and trains like its original."""
    lines = []
    for setting in (Setting(), Setting("NO_SHARD"), *(HYBRID[:1] if world == 4 else ())):
        model = setting.wrap(seeded(Net), (Feedforward,))
        state = Counting(model.process_group)
        model.register_comm_hook(state, state.reduce)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2], model.blocks[1]])
        model.blocks[0].set_all_reduce_hook(lambda total: total.mul_(2))
        backward(model, rank, 0)
        model.zero_grad()
        twin: Any = copy.deepcopy(model)
        hooks = {id(inspect.unit(each).comm_hook) for each in FullyShardedDataParallel.fsdp_modules(twin)}
        hook = inspect.unit(twin).comm_hook
        before, own = state.calls, hook.state.calls
        backward(twin, rank, 1)
        if len(hooks) != 1 or state.calls != before or hook.state.calls != 2 * own:
            lines.append(f"{setting}: {len(hooks)} hooks, {state.calls} calls of {before}, {hook.state.calls} of {own}")
        backward(model, rank, 1)
        expected = full_gradients(model)
        lines += [f"{setting}: {n}" for n, grad in full_gradients(twin).items() if not torch.equal(grad, expected[n])]
    return lines


def test_copies_have_copies_of_hooks(pool2: Run, pool4: Run) -> None:
    assert not joined(pool2(copied))
    assert not joined(pool4(copied))


def dropped(rank: int, world: int) -> list[str]:
    """State that cannot be copied or pickled is dropped with a warning; lists of units are kept."""
    model = Setting().wrap(seeded(Net), (Feedforward,))
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2], model.blocks[1]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0], model])
    model.register_comm_hook({"cannot be copied": (x for x in ())}, print)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlatFSDPWarning)
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
    plain = Setting().wrap(seeded(Net), (Feedforward,))
    backward(plain, rank, 0)
    for each in (twin, loaded):
        assert inspect.unit(each).comm_hook is None
        backward(each, rank, 0)
        first, last = inspect.unit(each.blocks[0]), inspect.unit(each.blocks[2])
        assert first.forward_prefetch == ["blocks.2", "blocks.1"]
        assert last.backward_prefetch == ["blocks.0", ""] and last.prefetches_own
        expected = full_gradients(plain)
        assert all(torch.equal(grad, expected[name]) for name, grad in full_gradients(each).items())
    part = copy.deepcopy(model.blocks[2])
    assert not inspect.unit(part).backward_prefetch
    return [str(each.message) for each in caught if issubclass(each.category, FlatFSDPWarning)]


@pytest.mark.filterwarnings("ignore:.*communication:flatfsdp.errors.FlatFSDPWarning")
def test_copies_miss_hooks_in_words_and_have_lists(pool2: Run) -> None:
    hook, hooks = sorted(text for report in pool2(dropped) for text in report)  # once per job
    assert "does not have the value that was passed to register_comm_hook()" in hook
    assert "does not contain its communication and all-reduce hooks" in hooks


# -- all-reduce hooks -------------------------------------------------------------------------------------------------


def with_all_reduce_hooks(rank: int, world: int) -> None:
    """An all-reduce hook receives the result of a communication hook, and may return a work."""
    mesh = replicas_of_shards()
    replicas, shards = mesh.get_group(0), mesh.get_group(1)
    ours = FullyShardedDataParallel(seeded(Net), shards, auto_wrap_policy={Feedforward}, use_orig_params=True)
    register(ours, comm_hooks.reduce_scatter_hook, comm_hooks.DefaultState)
    for wrapper in FullyShardedDataParallel.fsdp_modules(ours):
        wrapper.set_all_reduce_hook(lambda total: dist.all_reduce(total.div_(2), group=replicas, async_op=True))
    hybrid = Setting("HYBRID_SHARD").wrap(seeded(Net), (Feedforward,))
    for model in (ours, hybrid):
        backward(model, rank, 0)
    expected = full_gradients(hybrid)
    for name, grad in full_gradients(ours).items():
        torch.testing.assert_close(grad, expected[name])


def test_a_hybrid_of_hooks(pool4: Run) -> None:
    pool4(with_all_reduce_hooks)
