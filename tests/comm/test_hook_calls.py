"""Communication hooks: the time and arguments of their calls, their memory and stream, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torchs

from flatfsdp import FullyShardedDataParallel, MixedPrecision, comm_hooks
from flatfsdp.engine.device import streams as seam
from flatfsdp.errors import ConfigTypeError, UsageError
from tests.comm.test_communication import UNITS, Collectives, forward, settled, story, tower, wrapped
from tests.device.test_streams import device_of, train
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.thorough import some
from tests.runtime.test_schedule_events import live, refused

pytestmark = pytest.mark.single_process

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


def made(strategy: str, **options: Any) -> FullyShardedDataParallel:
    return wrapped(strategy, **({"mesh": (2, 2)} if "HYBRID" in strategy else {}), **options)


def register(model: FullyShardedDataParallel, hook: Callable[..., Any]) -> None:
    model.register_comm_hook(comm_hooks.DefaultState(model.process_group), hook)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 16, 48, 64, 1024])
def test_factors_of_the_state(world: int) -> None:
    with fake_world(world) as group:
        ours, theirs = comm_hooks.DefaultState(group), torchs.DefaultState(group)
        for name in theirs.__slots__:
            assert getattr(ours, name) == getattr(theirs, name)
        assert ours.gradient_predivide_factor * ours.gradient_postdivide_factor == world
        with refused(ConfigTypeError, r"process_group: got None .*Pass model\.process_group"):
            comm_hooks.DefaultState(None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_take_the_place_of_reductions(strategy: str) -> None:
    with fake_world(4):
        model = made(strategy)
        calls: list[list[int]] = []
        model.register_comm_hook(None, lambda state, *tensors: calls.append([t.numel() for t in tensors]))
        settled(model)
        calls.clear()
        with Collectives() as seen:
            forward(model).backward()
        shards = {"NO_SHARD": 1, "HYBRID_SHARD": 2, "_HYBRID_SHARD_ZERO2": 2}.get(strategy, 4)
        assert len(calls) == UNITS
        for call in calls:
            assert call == ([call[0]] if shards == 1 else [call[0], call[0] // shards])
        assert seen.counts["scatter"] == 0
        assert seen.counts["all_reduce"] == (UNITS if "HYBRID" in strategy else 0)


def test_hooks_run_in_the_order_of_reductions() -> None:
    with tower() as model:
        model.register_comm_hook(None, lambda *given: inspect.events(model).record("hook"))
        assert story(model, forward(model).backward, "hook", "reduce", "grads") == (
            "grads:c reduce:c hook:root grads:b reduce:b hook:root grads:a reduce:a hook:root "
            "grads:root reduce:root hook:root"
        )


def test_one_rank_alone_has_its_gradients_hooked() -> None:
    with fake_world(1):
        model = wrapped("FULL_SHARD", use_orig_params=True)
        model.register_comm_hook(None, lambda state, grad: grad.zero_())
        forward(model).backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_what_a_hook_keeps_stays(strategy: str) -> None:
    with fake_world(4):
        kept: list[Tensor] = []

        def hook(state: Any, grad: Tensor, *shard: Tensor) -> None:
            grad.fill_(2)
            kept.append(grad[1:3])

        model = made(strategy)
        model.register_comm_hook(None, hook)
        for _ in range(3):
            forward(model).backward()
            model.zero_grad()
            assert live(model) == {"shard"}
        assert all(torch.equal(piece, torch.full((2,), 2.0)) for piece in kept)


# -- streams --------------------------------------------------------------------------------------------------------


def asynchronous(state: Any, *tensors: Tensor) -> Any:
    return seam._stand_in.value._pending(dist.all_reduce(tensors[0], group=state.process_group, async_op=True))


def replacing(state: Any, *tensors: Tensor) -> None:
    """Leaves its result in memory that it takes on its stream."""
    for tensor in tensors:
        tensor.data = tensor.data.to(torch.float64)
    comm_hooks.reduce_scatter_hook(state, *tensors)


HOOKS = [comm_hooks.allreduce_hook, comm_hooks.fp16_compress_hook, torchs.bf16_compress_hook, asynchronous, replacing]


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_happens_too_early(strategy: str, hook: Callable[..., Any]) -> None:
    others: list[dict[str, Any]] = [
        {}, {"mixed_precision": MixedPrecision(param_dtype=torch.float16)}, {"cpu_offload": True},
    ]  # fmt: skip
    for options in some(others, 3, STRATEGIES.index(strategy) + HOOKS.index(hook)):  # all pairs of the three
        with device_of() as device:
            model = made(strategy, use_orig_params=True, **options)
            register(model, hook)
            train(model, device)
            assert live(model) == {"shard"}
            del model
        assert device.races == []


# -- refused -----------------------------------------------------------------------------------------------------------


def test_what_is_no_hook_is_refused() -> None:
    with tower() as model:
        with refused(ConfigTypeError, "register_comm_hook: hook: got 1 .*Accepted: a callable"):
            model.register_comm_hook(None, 1)  # type: ignore[arg-type]
        with refused(UsageError, r"register_comm_hook\(\) was called on a nested unit \(Block\)"):
            register(model.module.a, comm_hooks.allreduce_hook)
        model.set_gradient_divide_factor(2)
        with refused(UsageError, r"of unit <root>: set_gradient_divide_factor\(\) was called, but a hook scales"):
            register(model, comm_hooks.allreduce_hook)


def test_hooks_are_registered_once() -> None:
    with tower() as model:
        register(model, comm_hooks.allreduce_hook)
        with refused(UsageError, "it already has one. Register a single hook for the whole life of the model"):
            register(model, comm_hooks.allreduce_hook)
        with refused(UsageError, "the model has a communication hook, which scales gradients"):
            model.module.a.set_gradient_divide_factor(2)


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
def test_hooks_are_not_registered_while_gradients_come() -> None:
    with tower() as model:
        with model.no_sync():
            forward(model).backward()
        with refused(UsageError, "gradients have accumulated that are not reduced yet"):
            register(model, comm_hooks.allreduce_hook)
        model.module.between = lambda: register(model, comm_hooks.allreduce_hook)
        with refused(UsageError, "was called inside a backward"):
            forward(model).backward()


def test_a_hybrid_of_one_shard_has_nothing_to_hook() -> None:
    with fake_world(4):
        model = wrapped("HYBRID_SHARD", mesh=(4, 1))
        with refused(UsageError, "its shard group, over which a hook reduces, contains only this rank. Use NO_SHARD"):
            register(model, comm_hooks.allreduce_hook)


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (
            lambda state, grad, shard: grad,
            "a communication hook returned .* and return either None or an object with a wait",
        ),
        (lambda state, grad, shard: setattr(shard, "data", grad), "left a gradient of shape .* expected"),
    ],
    ids=["returns", "shape"],
)
def test_what_a_hook_may_not_do(hook: Callable[..., Any], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with tower() as model:
        model.register_comm_hook(None, hook)
        with refused(UsageError, words):
            forward(model).backward()
        with torch.no_grad():
            forward(model)
        assert live(model) == {"shard"}
    assert "UsageError" in capfd.readouterr().err


def test_an_all_reduce_hook_returns_nothing_else_either() -> None:
    with tower() as model:
        model.set_all_reduce_hook(lambda total: total.add_(0))
        forward(model).backward()
        model.set_all_reduce_hook(lambda total: 2 * total)
        with refused(UsageError, "an all-reduce hook returned a value of type Tensor"):
            forward(model).backward()


def test_a_part_of_a_model_cannot_have_a_hook_alone() -> None:
    with fake_world(4):
        inner = wrapped("FULL_SHARD")
        register(inner, comm_hooks.allreduce_hook)
        outer = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(1, 1)))
        with refused(UsageError, "registered on a part of this model, before the whole model was wrapped: unit <root>"):
            forward(outer)
