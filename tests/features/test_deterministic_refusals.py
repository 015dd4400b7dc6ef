"""What `deterministic_sums=True` refuses: microbatches that make no whole, and what sums in an order of its own."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import ConfigTypeError, ConfigValueError, FlatFSDPError, UsageError
from tests.conftest import Run
from tests.harness.experts import Mixture
from tests.harness.meshes import named_mesh
from tests.harness.tensor_parallel import sharded as tensor_parallel

pytestmark = pytest.mark.distributed

INPUT = torch.ones(2, 5)


def wrapped(**options: Any) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    return FullyShardedDataParallel(nn.Linear(5, 3), **{"use_orig_params": True, "deterministic_sums": True} | options)


def run_one(model: nn.Module, index: int | None, of: int) -> None:
    with flatfsdp.microbatch(index, of=of):
        model(INPUT).sum().backward()


def words_of(program: Callable[[], object]) -> str:
    try:
        program()
    except FlatFSDPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- microbatches ------------------------------------------------------------------------------------------------------


def no_microbatch(model: Any, rank: int) -> None:
    model(INPUT).sum().backward()


def twice(model: Any, rank: int) -> None:
    run_one(model, rank, 4)
    run_one(model, rank, 4)


def on_two_ranks(model: Any, rank: int) -> None:
    run_one(model, 0, 2)


def other_number(model: Any, rank: int) -> None:
    run_one(model, rank, 4)
    run_one(model, rank + 2, 5)


def other_number_on_a_rank(model: Any, rank: int) -> None:
    run_one(model, rank, 4 + rank)


def gap(model: Any, rank: int) -> None:
    run_one(model, 2 * rank, 4)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def gap_clipped(model: Any, rank: int) -> None:
    run_one(model, 2 * rank, 4)
    model.clip_grad_norm_(1.0)


def all_under_no_sync(model: Any, rank: int) -> None:
    with model.no_sync():
        run_one(model, rank, 2)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def dropped(model: Any, rank: int) -> None:
    run_one(model, rank, 4)
    with model.no_sync():
        run_one(model, rank + 2, 4)
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    run_one(model, None, 4)


def joined(model: Any, rank: int) -> None:
    with flatfsdp.join(model) as joined:
        for _ in joined(range(1 + rank)):
            run_one(model, rank, 2)


def clipped_and_stepped(model: Any, rank: int) -> None:
    flatfsdp.optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run_one(model, rank, 2)
    model.clip_grad_norm_(1.0)


def with_another_model(model: Any, rank: int) -> None:
    other = wrapped(deterministic_sums=False)
    other(INPUT).sum().backward()
    run_one(model, rank, 2)
    torch.nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 1.0)


def without_the_mode(model: Any, rank: int) -> None:
    run_one(wrapped(deterministic_sums=False), rank, 2)


def fused_on_cpu(model: Any, rank: int) -> None:
    run_one(model, rank, 2)
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True).step()


def other_power(model: Any, rank: int) -> None:
    run_one(model, rank, 2)
    model.clip_grad_norm_(1.0, 3.0)


def other_threads(model: Any, rank: int) -> None:
    run_one(model, rank, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        run_one(model, rank, 2)
    finally:
        torch.set_num_threads(before)


def hooked(model: Any, rank: int) -> None:
    model.set_all_reduce_hook(lambda total: None)


def hooked_in_spite(model: Any, rank: int) -> None:
    words_of(lambda: model.set_all_reduce_hook(lambda total: None))
    run_one(model, rank, 2)


def divided(model: Any, rank: int) -> None:
    model.set_gradient_divide_factor(3.0)


def partial_sums(model: Any, rank: int) -> None:
    model.set_requires_all_reduce(False)


def communication_hook(model: Any, rank: int) -> None:
    model.register_comm_hook(None, lambda state, grad: None)


PROGRAMS: list[tuple[Callable[[Any, int], None], str]] = [
    (no_microbatch, "outside of flatfsdp.microbatch"),
    (twice, "a backward of this microbatch has run in this step"),
    (on_two_ranks, "microbatch 0 of 2 ran on ranks 0, 1"),
    (other_number, "earlier microbatches of this step had of=4"),
    (other_number_on_a_rank, "rank 0 has of=4, rank 1 has of=5"),
    (gap, "of 4 microbatches, microbatches 1, 3 did not come"),
    (gap_clipped, "microbatches 1, 3 did not come"),
    (all_under_no_sync, "outside of no_sync()"),
    (dropped, "was dropped between microbatches"),
    (joined, "flatfsdp.join() weighs"),
    (clipped_and_stepped, "no_step() of the OptimizerInBackward"),
    (with_another_model, "some of these models have deterministic_sums=True"),
    (without_the_mode, "no backward of a model with deterministic_sums=True ran inside"),
    (fused_on_cpu, "fused steps on CPUs"),
    (other_power, "norm_type 3 "),
    (other_threads, ", and did so with torch"),
    (hooked, "a communication hook sums gradients"),
    (hooked_in_spite, "a communication hook sums gradients"),
    (divided, "set_gradient_divide_factor() was called"),
    (partial_sums, "set_requires_all_reduce(False) was called"),
    (communication_hook, "a communication hook sums gradients"),
]


def refused(rank: int, world: int, program: Callable[[Any, int], None]) -> str:
    model = wrapped()
    return words_of(lambda: program(model, rank))


@pytest.mark.parametrize(("program", "words"), PROGRAMS, ids=[each.__name__ for each, _ in PROGRAMS])
def test_refused(run: Run, program: Callable[[Any, int], None], words: str) -> None:
    for message in run(2, refused, program):
        assert words in message


def not_all(rank: int, world: int) -> str:
    """A module of fully_shard() that does not reduce with the others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    flatfsdp.fully_shard(net[0], deterministic_sums=True)
    model = flatfsdp.fully_shard(net, deterministic_sums=True)
    net[0].set_requires_gradient_sync(False)

    def program() -> None:
        run_one(model, rank, 2)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    return words_of(program)


def adafactor(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model = flatfsdp.fully_shard(nn.Linear(5, 3), deterministic_sums=True)
    run_one(model, rank, 2)
    return words_of(torch.optim.Adafactor(model.parameters()).step)


def test_matrices_in_parts(run: Run) -> None:
    for message in run(2, adafactor):
        assert "matrix_steps()" in message


def test_some_units_reduce(run: Run) -> None:
    for message in run(2, not_all):
        assert "unit '0' did not reduce its gradients" in message


class Twice(nn.Module):
    """Its weight's gradient comes a second time from a segment that is recomputed in a task of its own, if that is on,
    which earlier backwards have not shown."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.recomputes = nn.Linear(5, 5), False

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return self.inner(checkpoint(self.inner, x, use_reentrant=True) if self.recomputes else self.inner(x))


def reentrant(rank: int, world: int) -> str:
    """A unit whose gradients come again when they have been reduced."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Twice(), sharding_strategy="NO_SHARD", use_orig_params=True, deterministic_sums=True
    )

    def program() -> None:
        for number in range(3):
            model.module.recomputes = number == 2
            run_one(model, rank, 2)
            model.zero_grad()

    return words_of(program)


def test_reentrant_parts(run: Run) -> None:
    for message in run(2, reentrant):
        assert "came in two parts" in message


def reentrant_under_no_sync(rank: int, world: int) -> list[str]:
    """Gradients that come in parts for the first time when those before them are still in their place; then in the next
    step; then in one of parts alone."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Twice(), use_orig_params=True, deterministic_sums=True)

    def program(recomputed: Container[int], stop: int = 4) -> None:
        with model.no_sync():
            for index in range(stop):
                model.module.recomputes = index in recomputed
                run_one(model, index, 4)

    words = []
    for recomputed in ((), (1,), (1,), range(4)):
        words.append(words_of(lambda recomputed=recomputed: program(recomputed)))
        model.zero_grad()
    return words


def test_parts_that_were_added_one_by_one(run: Run) -> None:
    ((before, first, *later),) = run(1, reentrant_under_no_sync)
    assert "came in two parts" in first
    assert {before, *later} == {"no error"}


# -- settings ----------------------------------------------------------------------------------------------------------


def set_on_one_rank(rank: int, world: int) -> str:
    model = wrapped(deterministic_sums=rank == 0)
    return words_of(lambda: run_one(model, rank, 2))


def with_other_threads(rank: int, world: int) -> str:
    before = torch.get_num_threads()
    torch.set_num_threads(1 + rank)
    try:
        model = wrapped()
        return words_of(lambda: run_one(model, rank, 2))
    finally:
        torch.set_num_threads(before)


def test_other_settings(run: Run) -> None:
    for message in run(2, set_on_one_rank):
        assert "deterministic_sums=True with torch" in message
    for message in run(2, with_other_threads):
        assert "1 threads" in message and "2 threads" in message


# -- models ------------------------------------------------------------------------------------------------------------


def two_meshes(**options: Any) -> Any:
    net = Mixture()
    for block in net.blocks:
        flatfsdp.fully_shard(block.experts, mesh=named_mesh(2, 1)["shard"], **options)
    return flatfsdp.fully_shard(net, mesh=named_mesh(2), **options)


MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any], Tensor, str]] = {}


def model_of(build: Callable[[], nn.Module]) -> Callable[..., nn.Module]:
    return lambda **options: FullyShardedDataParallel(build(), **options)


MODELS["bf16 sums"] = (
    model_of(lambda: nn.Linear(5, 4)),
    {"mixed_precision": torch.bfloat16},
    INPUT,
    "reduce_dtype=torch.float32",
)
MODELS["synchronized batch norm"] = (
    model_of(lambda: nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4, track_running_stats=False))),
    {},
    INPUT,
    "normalizes a batch of all ranks",
)
MODELS["few bits"] = (
    model_of(lambda: nn.Linear(5, 4)),
    {"mixed_precision": MixedPrecision(reduce_dtype=torch.float32, reduce_bits=8)},
    INPUT,
    "in few bits",
)
MODELS["several meshes"] = (two_meshes, {}, torch.ones(2, 8), "spread over other ranks")
MODELS["DTensors"] = (
    lambda **options: tensor_parallel((1, 2), **options),
    {},
    torch.zeros(2, 6, dtype=torch.long),
    "stored in another form",
)


def build_refused(rank: int, world: int, name: str) -> str:
    build, options, given, _ = MODELS[name]
    model = build(deterministic_sums=True, **options)

    def program() -> None:
        with flatfsdp.microbatch(rank, of=world):
            model(given)

    return words_of(program)


@pytest.mark.parametrize("name", MODELS)
def test_refused_models(run: Run, name: str) -> None:
    for message in run(2, build_refused, name):
        assert MODELS[name][3] in message


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "of", "error"),
    [(0, 0, ConfigValueError), (0, "3", ConfigTypeError), (-1, 3, ConfigValueError), (3, 3, ConfigValueError)],
)
def test_arguments(index: int, of: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="microbatch"), flatfsdp.microbatch(index, of=of):
        pass


def test_one_at_a_time() -> None:
    with (
        pytest.raises(UsageError, match="no backward of a model"),
        flatfsdp.microbatch(0, of=2),
        pytest.raises(UsageError, match="inside of"),
        flatfsdp.microbatch(1, of=2),
    ):
        pass
