"""NaN and inf: the rank that reports the first one, the message, and the agreement of ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision, ShardedGradScaler
from flatfsdp.engine.features import nonfinite
from flatfsdp.errors import ConfigTypeError, NonFiniteError, UsageError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import full_parameters, seeded
from tests.harness.meshes import replicas_of_shards
from tests.harness.models import WIDTH, Feedforward
from tests.harness.thorough import spread

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Two blocks and a head; the part that `bad` names fails."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feedforward(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)
        self.bad = ""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.bad == "activation":
                x = x / 0
            if self.bad == "gradient" and x.requires_grad:
                x.register_hook(lambda grad: grad * torch.nan)
        if self.bad == "overflow":
            x = x * 1e6
        return self.head(x)


def wrapped(world: int, kind: str, *, orig: bool = True, **options: Any) -> Any:
    if kind == "HYBRID_SHARD":
        options["device_mesh"] = replicas_of_shards()
    net = seeded(Net)
    return FullyShardedDataParallel(
        net, sharding_strategy=kind, auto_wrap_policy={Feedforward}, use_orig_params=orig, **options
    )


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: Any, rank: int, step: int = 0) -> None:
    model(batch(rank, step)).square().mean().backward()


def spoil(model: Any, name: str, value: float) -> None:
    """Write `value` into the last element of a parameter, wherever that is."""
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model):
        dict(model.named_parameters())[name].view(-1)[-1] = value


# --- detect_nonfinite -------------------------------------------------------------------------------------------------


def found(rank: int, world: int, kind: str, bad: str, by: int, options: dict[str, Any]) -> list[str]:
    """The error raised where one rank has a NaN or inf; gradients are kept, and the model trains on."""
    model = wrapped(world, kind, **options)
    texts = []
    train(model, rank, 1)
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with flatfsdp.detect_nonfinite(model):
        train(model, rank, 2)
        model.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = before[name].clone() if name in before else None
        if bad == "parameter":
            spoil(model, "blocks.1.up.weight", torch.nan)
        elif rank == by:
            model.module.bad = bad
        with pytest.raises(NonFiniteError) as caught:
            x = batch(rank, 3)
            if bad == "input" and rank == by:
                x[1, 1] = torch.inf
            model(x).square().mean().backward()
        texts.append(str(caught.value))
        model.module.bad = ""
        if bad == "parameter":
            spoil(model, "blocks.1.up.weight", 0.0)
        kept = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert kept.keys() == before.keys() and all(torch.equal(kept[name], before[name]) for name in before)
        train(model, rank, 4)
    return texts


# The fault, its rank, and the report.
SAID = {
    "parameter": (1, "a forward has nan in parameter 'blocks.1.up.weight' before the forward on rank"),
    "input": (1, "a forward has inf in an input of unit <root> on rank 1; nothing else on rank"),
    "activation": (0, "a forward has inf in an input of unit 'blocks.1' on rank 0; nothing else on rank"),
    "gradient": (
        1,
        "a step has nan in the gradient of 'blocks.1.down.bias' before its reduction on rank 1, first of all",
    ),
}


@pytest.mark.parametrize(
    ("on", "bad"), spread([(2, "FULL_SHARD"), (3, "SHARD_GRAD_OP"), (4, "HYBRID_SHARD")], SAID), ids=str
)
def test_every_rank_learns_where_the_first_one_was(run: Run, on: tuple[int, str], bad: str) -> None:
    world, kind = on
    by, text = SAID[bad]
    results = run(world, found, kind, bad, by, {})
    assert len({tuple(each) for each in results}) == 1
    (texts,) = results[0]
    assert texts.startswith(text)


def test_what_is_not_sharded_is_reported_at_the_end_of_the_backward(pool2: Run) -> None:
    first, second = pool2(found, "NO_SHARD", "input", 1, {"orig": False})
    assert first == second and first[0].startswith(
        "a step has inf in an input of unit <root> on rank 1, first of all; nan in the reduced gradient of 'blocks.0."
    )


def generating(rank: int, world: int) -> list[str]:
    """Ranks run different numbers of forwards, and get records of their own only."""
    model = wrapped(world, "FULL_SHARD")
    texts = []
    with flatfsdp.detect_nonfinite(model), flatfsdp.inference(model):
        for _ in range(2 + rank):
            model(batch(rank))
        model.module.bad = "activation" if rank == 1 else ""
        try:
            model(batch(rank))
        except NonFiniteError as error:
            texts.append(str(error))
        model.module.bad = ""
    return texts


def test_inside_inference_ranks_are_on_their_own(pool2: Run) -> None:
    good, (bad,) = pool2(generating)
    assert not good and bad.startswith("this rank's forward has inf in an input of unit 'blocks.1'")


HALF = {"mixed_precision": MixedPrecision(reduce_dtype=torch.float16)}


def overflowing(rank: int, world: int, in_backward: bool) -> str:
    """Gradients that the reduction's dtype cannot hold."""
    model = wrapped(world, "FULL_SHARD", **HALF)
    if in_backward:
        flatfsdp.optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.module.bad = "overflow"
    with flatfsdp.detect_nonfinite(model), pytest.raises(NonFiniteError) as caught:
        train(model, rank)
    return str(caught.value)


@pytest.mark.parametrize("in_backward", [False, True])
def test_what_the_reduction_makes_of_gradients_is_looked_at(pool2: Run, in_backward: bool) -> None:
    one, other = pool2(overflowing, in_backward)
    assert one == other
    assert one.startswith("a step has ") and "in the reduced gradient of 'blocks.0." in one


def evaluated(rank: int, world: int, kind: str) -> list[str]:
    model = wrapped(world, kind)
    texts = []
    with torch.no_grad(), flatfsdp.detect_nonfinite(model):
        model(batch(rank))
        x = batch(rank)
        x[0, 0] = torch.nan if rank == 1 else 0.0
        try:
            model(x)
        except NonFiniteError as error:
            texts.append(str(error))
        model(batch(rank))
    return texts


def test_an_evaluation_reports_it_too(pool2: Run) -> None:
    words = "nan in an input of unit <root>"
    assert pool2(evaluated, "FULL_SHARD") == [[f"a forward has {words} on rank 1; nothing else on rank 0"]] * 2
    assert pool2(evaluated, "NO_SHARD") == [[], [f"this rank's forward has {words}"]]


def masks(rank: int, world: int) -> int:
    """Intended infinities; and no value is checked outside of the context."""
    model = wrapped(world, "FULL_SHARD")
    with patch.object(nonfinite, "worst", side_effect=nonfinite.worst) as looks:
        train(model, rank)
        assert not looks.called
        with flatfsdp.detect_nonfinite(model, infinities=False):
            x = torch.full((4, WIDTH), torch.inf)
            with torch.no_grad(), pytest.raises(NonFiniteError, match=r"nan in an output of unit 'blocks\.0'"):
                model(x)
        return int(looks.call_count)


def test_infinities_may_be_meant(pool2: Run) -> None:
    assert min(pool2(masks)) > 10


def refused(rank: int, world: int) -> list[str]:
    model = wrapped(world, "FULL_SHARD")
    texts = []
    for kind, call in (
        (ConfigTypeError, lambda: flatfsdp.detect_nonfinite(nn.Linear(1, 1))),
        (ConfigTypeError, lambda: flatfsdp.detect_nonfinite(model, infinities=1)),  # type: ignore[arg-type]
        (UsageError, lambda: flatfsdp.detect_nonfinite(model.module.blocks[0])),
    ):
        with pytest.raises(kind) as caught, call():
            pass
        texts.append(str(caught.value))
    with flatfsdp.detect_nonfinite(model):
        texts.append(inspect.schedule_in_words(model))
        with pytest.raises(UsageError) as caught, flatfsdp.detect_nonfinite(model):
            pass
        texts.append(str(caught.value))
    assert inspect.non_finite_detector(model) is None and not inspect.schedule_in_words(model)
    return texts


def test_who_looks_is_compared_and_what_is_no_model_refused(pool2: Run) -> None:
    not_a_model, not_a_bool, nested, message, inside = pool2(refused)[0]
    assert not_a_model.startswith("detect_nonfinite: model: got Linear(")
    assert not_a_bool == "detect_nonfinite: infinities: got 1 (int). Accepted: True or False."
    assert nested.startswith("detect_nonfinite() was called on a nested unit (Feedforward); call it on the outermost")
    assert message == "detect_nonfinite()"
    assert inside == "detect_nonfinite() was entered while it was already active; one context is enough"


# --- clipping and scaling ---------------------------------------------------------------------------------------------


def clipped(rank: int, world: int, kind: str, orig: bool, norm_type: float, by: int) -> tuple[str, list[float], bool]:
    """The error, and the norm without one, where one rank's gradient has a NaN; whether gradients stay without one."""
    model = wrapped(world, kind, orig=orig)
    train(model, rank)
    norm = model.clip_grad_norm_(1e9, norm_type, error_if_nonfinite=True)
    assert torch.isfinite(norm)
    # Only this rank's piece; under NO_SHARD, where all have the same, that of every rank.
    if rank == by or kind == "NO_SHARD":
        pieces = [p for n, p in model.named_parameters() if p.grad is not None and p.grad.numel()]
        pieces[0].grad.view(-1)[0] = torch.nan
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(NonFiniteError) as caught:
        model.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    same = all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(before, after, strict=True))
    return str(caught.value), [float(model.clip_grad_norm_(1.0, norm_type))], same


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize(
    ("world", "kind", "orig"), [(2, "FULL_SHARD", True), (3, "FULL_SHARD", False), (2, "NO_SHARD", True)]
)
def test_a_norm_that_is_no_number_is_an_error_on_all_ranks(
    run: Run, world: int, kind: str, orig: bool, norm_type: float
) -> None:
    results = run(world, clipped, kind, orig, norm_type, world - 1)
    assert len({texts for texts, _, _ in results}) == 1 and all(same for _, _, same in results)
    assert all(str(norm) == "[nan]" for _, norm, _ in results)
    texts = results[0][0]
    assert texts.startswith(f"clip_grad_norm_: the norm of order {norm_type:g} of all gradients is nan: nan in ")
    where = "ranks 0, 1" if kind == "NO_SHARD" else f"rank {world - 1}; nothing else on rank"
    assert "nan in the reduced gradient of '" in texts
    assert f" on {where}" in texts


def too_large(rank: int, world: int) -> str:
    """Finite gradients of an infinite norm, in fp32."""
    model = wrapped(world, "FULL_SHARD")
    train(model, rank)
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else torch.full_like(parameter.grad, 1e30)
    with pytest.raises(NonFiniteError) as caught:
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(ConfigTypeError, match="error_if_nonfinite: got 1"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=1)
    return str(caught.value)


def test_a_norm_that_overflows_is_reported_as_such(pool2: Run) -> None:
    for text in pool2(too_large):
        assert "is inf: each gradient of the units is finite, so parameters outside of them cause it" in text


def skipped(rank: int, world: int, kind: str, by: int) -> tuple[float, bool]:
    """An overflow on one rank: is the step skipped here?"""
    model = wrapped(world, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=64.0)
    scaler.scale(model(batch(rank)).square().mean()).backward()
    if rank == by:
        next(p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()).view(-1)[0] = torch.inf
    before = full_parameters(model)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), all(torch.equal(before[n], p) for n, p in full_parameters(model).items())


@pytest.mark.parametrize(("world", "kind", "by"), [(3, "FULL_SHARD", 2), (4, "HYBRID_SHARD", 1), (2, "NO_SHARD", 0)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(run: Run, world: int, kind: str, by: int) -> None:
    assert run(world, skipped, kind, by) == [(32.0, True)] * world
