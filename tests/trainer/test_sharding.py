"""A model sharded by the trainer's arguments: its units, its dtypes, its ranks; and activations computed again."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from flatfsdp import FullyShardedDataParallel, ShardingStrategy, stats, summary
from flatfsdp.errors import ConfigValueError, FlatFSDPWarning, UsageError
from flatfsdp.trainer.arguments import FSDPArguments
from flatfsdp.trainer.model.sharding import is_recomputed, recompute, shard
from flatfsdp.wrap import size_based_auto_wrap_policy
from tests.conftest import Run
from tests.harness.fake import fake_world
from tests.harness.models import CASES, Block

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
CASE = CASES["transformer"]
UNITS = ["blocks.0", "blocks.1"]


def joined(results: list[list[str]]) -> str:
    return "\n".join(line for lines in results for line in lines)


def arguments(**given: Any) -> FSDPArguments:
    return FSDPArguments(**given)


def trained(model: nn.Module, batches: list[Any]) -> list[Tensor]:
    """The loss of each batch, added up into gradients."""
    losses = []
    for batch in batches:
        loss = CASE.loss(model, batch)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return losses


# --- the wrapper ------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "flat parameters": {"use_orig_params": False},
    "kept until the backward": {"reshard_after_forward": False},
    "another strategy": {"strategy": "shard_grad_op", "backward_prefetch": "backward_post"},
    "whole": {"strategy": "no_shard"},
    "one unit": {"units": "none"},
    "computed again": {"activation_checkpointing": True, "forward_prefetch": True},
    "every second computed again": {"activation_checkpointing": True, "checkpoint_every": 2},
    "but for products computed again": {
        "activation_checkpointing": True,
        "checkpoint_policy": "tests.trainer.test_sharding:keep_products",
    },
    "on the host": {"cpu_offload": True, "sync_module_states": True},
}


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy that keeps the results of matrix products."""
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_what_a_policy_keeps_is_not_computed_again(pool2: Run) -> None:
    (every, kept, half), _ = pool2(products)
    assert kept < half < every


class Products(TorchDispatchMode):
    """Counts the matrix products that are computed."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return operation(*args, **(kwargs or {}))


def products(rank: int, world: int) -> list[int]:
    """Matrix products in a step: with all blocks recomputed, with products kept, with half of the blocks recomputed."""
    counts = []
    policy = "tests.trainer.test_sharding:keep_products"
    for given in ({}, {"checkpoint_policy": policy}, {"checkpoint_every": 2}):
        model = shard(stack(), arguments(activation_checkpointing=True, **given), device=CPU)
        with Products() as products:
            model(torch.randn(5, 6)).sum().backward()
        counts.append(products.count)
    return counts


@pytest.mark.parametrize("setting", SETTINGS)
def test_values_are_those_of_one_process(setting: str, pool2: Run) -> None:
    assert not joined(pool2(values, SETTINGS[setting]))


def test_what_is_the_same_on_all_ranks_is_warned_of_once(pool2: Run) -> None:
    (first, whole), (second, other) = pool2(warned_of_units)
    assert ("The model becomes a single unit" in first, second) == (True, "")
    assert whole == other == 1


def warned_of_units(rank: int, world: int) -> tuple[str, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlatFSDPWarning)
        model = shard(CASE.build(), arguments(units="nothing", units_fallback=True), device=CPU)
    return " ".join(str(each.message) for each in caught), stats(model).units


def test_hybrids_get_their_replicas(pool4: Run) -> None:
    for given in (
        {"strategy": "hybrid_shard", "replicas": 2},
        {"strategy": "hybrid_shard_zero2", "replicas": 2, "reshard_after_forward": 2},
    ):
        assert not joined(pool4(values, given, timeout=180))


def values(rank: int, world: int, given: dict[str, Any]) -> list[str]:
    return list(_values(rank, world, arguments(**given)))


def _values(rank: int, world: int, given: FSDPArguments) -> Iterator[str]:
    plain = CASE.build()
    names = list(plain.state_dict())
    losses = trained(plain, [CASE.batch(each, 0) for each in range(world)])
    model = shard(CASE.build(), given, device=CPU)
    if list(model.state_dict()) != names:
        yield f"names: {list(model.state_dict())}"
    if not torch.allclose(trained(model, [CASE.batch(rank, 0)])[0], losses[rank], rtol=1e-6):
        yield "another loss"
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert found.grad is not None and expected.grad is not None
            if not torch.allclose(found.grad, expected.grad, rtol=1e-5, atol=1e-7):
                yield f"gradient of {name}: off by {(found.grad - expected.grad).abs().max()}"


def test_arguments_reach_the_wrapper() -> None:
    with fake_world(4):
        dtypes = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "half"}
        model = shard(CASE.build(), arguments(strategy="shard_grad_op", **dtypes), device=CPU)
        found = FullyShardedDataParallel.fsdp_modules(model)
        assert [type(each.module) for each in found[1:]] == [Block, Block]
        assert all(each.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP for each in found)
        assert model(CASE.batch(0, 0)[0]).dtype == torch.bfloat16
        assert all(
            (each.mixed_precision.reduce_dtype, each.mixed_precision.buffer_dtype) == (torch.float32, torch.float16)
            for each in found
        )
        hybrid = shard(CASE.build(), arguments(strategy="hybrid_shard", replicas=2, units="Block"), device=CPU)
        assert "ranks 2 x 2" in str(summary(hybrid))


def test_a_model_on_the_meta_device_gets_its_values_on_this_one() -> None:
    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 2.0)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    with fake_world(2):
        shard(model, arguments(units="Linear"), device=CPU, param_init_fn=fill)
    assert torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).unique().tolist() == [2.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strategy": "hybrid_shard", "replicas": 3}, "replicas: got 3. Accepted: a divisor of the 4 ranks: 1, 2, 4."),
        ({"reshard_after_forward": 3}, "reshard_after_forward.* got 3. Accepted: True, False, or a divisor of the 4"),
        ({"activation_checkpointing": True, "units": "none"}, "activation_checkpointing: got True.*a single unit"),
    ],
)
def test_what_contradicts_the_model_or_the_ranks_is_refused_before_anything_is_wrapped(
    given: dict[str, Any], words: str
) -> None:
    model = CASE.build()
    with fake_world(4), pytest.raises(ConfigValueError, match=words):
        shard(model, arguments(**given), device=CPU)
    assert not any(isinstance(each, FullyShardedDataParallel) for each in model.modules())
    CASE.loss(model, CASE.batch(0, 0)).backward()


def test_a_missing_process_group_is_named() -> None:
    with pytest.raises(UsageError, match="no process group"):
        shard(CASE.build(), arguments(), device=CPU)


# --- computed again ---------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Counts its forwards; dropout, running statistics, keywords, and a method called as an argument of checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.tensor(1.0009765625))
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor, *, debug: float = 0.0) -> Tensor:
        self.calls += 1
        return self.drop(self.norm(self.linear(x * self.scale))) + debug


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noisy() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, debug=0.5)
        return x


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def run(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and buffers after a training step."""
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(5, 6)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], list(model.buffers())


def again(model: Stack) -> Stack:
    for layer in model.layers:
        recompute(layer)
    return model


def test_a_module_computed_again_draws_the_same_noise_and_follows_each_batch_once() -> None:
    model = again(again(stack()))
    expected, found = run(stack()), run(model)
    assert all(torch.equal(*pair) for pair in zip(found[0], expected[0], strict=True)) and found[0]
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True)) and found[1]
    assert [layer.calls for layer in model.layers] == [2, 2, 2]
    assert list(model.state_dict()) == list(stack().state_dict())
    with torch.no_grad():
        model(torch.randn(5, 6))
    assert [layer.calls for layer in model.layers] == [3, 3, 3]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_again_themselves(copied: Callable[[Stack], Stack]) -> None:
    model = again(stack())
    other = copied(model)
    run(other)
    assert [layer.calls for layer in other.layers] == [2, 2, 2]
    assert [layer.calls for layer in model.layers] == [0, 0, 0]


def test_a_deleted_model_is_gone_at_once() -> None:
    model = again(stack())
    run(model)
    layer = weakref.ref(model.layers[0])
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_units_inside_are_computed_again_and_are_gathered_as_before(pool2: Run) -> None:
    assert pool2(counted) == [([2, 2, 2], True)] * 2


def counted(rank: int, world: int) -> tuple[list[int], bool]:
    """Calls of each layer in a step with recomputation, and whether it takes the same gathers as one without."""
    gathers = []
    for checkpointing in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no low precision, so batch norms stay where they are
            model = shard(stack(), arguments(activation_checkpointing=checkpointing), device=CPU)
        figures = stats(model)
        run(model)
        figures.reset()
        for layer in model.layers:
            layer.module.calls = 0
        run(model)
        gathers.append(figures.comm["all_gather"])
    assert not is_recomputed(model.module)
    return [layer.calls for layer in model.layers], gathers[0] == gathers[1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_sharded_models_compute_again_themselves(copied: Callable[[Any], Any]) -> None:
    with fake_world(1):
        model = shard(stack(), arguments(activation_checkpointing=True), device=CPU)
        other = copied(model)
        expected, found = run(model)[0], run(other)[0]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)) and found
    assert [[layer.calls for layer in each.layers] for each in (model, other)] == [[2, 2, 2]] * 2


@pytest.mark.filterwarnings("ignore:mixed_precision. modules of BatchNorm1d")
def test_buffers_are_read_in_the_dtype_of_the_first_run() -> None:
    with fake_world(1):
        gradients = [
            run(shard(stack(), arguments(buffer_dtype="bf16", activation_checkpointing=again), device=CPU))[0]
            for again in (False, True)
        ]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_batch_norms_that_are_units_are_not_computed_again() -> None:
    with fake_world(2), pytest.warns(FlatFSDPWarning, match="become units of their own in full precision"):
        model = shard(
            stack(), arguments(activation_checkpointing=True, param_dtype="bf16", reduce_dtype="fp32"), device=CPU
        )
    layer = model.layers[0].module
    assert isinstance(layer, Noisy) and is_recomputed(layer)
    assert isinstance(layer.norm, FullyShardedDataParallel) and not is_recomputed(layer.norm.module)


def test_a_policy_that_chooses_nothing_to_compute_again_is_reported() -> None:
    with fake_world(2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = arguments(activation_checkpointing=True, units=size_based_auto_wrap_policy)
        shard(CASE.build(), given, device=CPU)
    assert "activation_checkpointing has no effect" in str(caught[-1].message)


def test_a_model_that_checkpoints_by_itself_is_refused() -> None:
    model = stack()
    model.layers[1].gradient_checkpointing = True
    with fake_world(2), pytest.raises(ConfigValueError, match=r"'layers\.1' has its own"):
        shard(model, arguments(activation_checkpointing=True), device=CPU)
