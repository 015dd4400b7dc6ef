"""The dtypes of parameters, inputs, buffers and gradients in each place; and the scaler's agreement."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, MixedPrecision, ShardedGradScaler
from flatfsdp.engine.watchdog import store as stores
from flatfsdp.errors import AgreementError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import at_rest, full_gradients, full_parameters, joined

pytestmark = pytest.mark.distributed

LOW, HALF, FULL, WIDE = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Probe(nn.Module):
    """Notes the dtypes that its forward meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.full((6,), 1 / 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {
            "input": x.dtype,
            "weight": self.linear.weight.dtype,
            "mean": self.mean.dtype,
            "count": self.count.dtype,
        }
        return self.linear(x.to(self.linear.weight.dtype))


class Nested(nn.Module):
    """A probe inside a probe; the tensors passed between them are fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Probe()
        self.outer = Probe()

    def forward(self, x: Tensor) -> Tensor:
        self.entered = x.dtype
        return self.outer(self.inner(x.to(WIDE)).to(WIDE))


def wrap(net: nn.Module, precision: MixedPrecision | None, orig: bool = True, **options: Any) -> Any:
    return FullyShardedDataParallel(net, mixed_precision=precision, use_orig_params=orig, **options)


ROWS = torch.linspace(-1, 1, 24).view(4, 6)


def dtypes(rank: int, world: int, precision: MixedPrecision, orig: bool) -> dict[str, Any]:
    net = Nested()
    net.inner = wrap(net.inner, precision, orig)
    model = wrap(net, precision, orig)
    model(ROWS).float().sum().backward()
    return {
        "root input": net.entered,
        "inner": net.inner.module.seen,
        "outer": net.outer.seen,
        "parameters": {p.dtype for p in model.parameters()},
        "gradients": {p.grad.dtype for p in model.parameters() if p.grad is not None},
        "buffers at rest": {n: b.dtype for n, b in model.named_buffers()},
    }


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("cast_inputs", [True, False])
@pytest.mark.parametrize("cast_root", [True, False])
def test_param_dtype_and_inputs(orig: bool, cast_inputs: bool, cast_root: bool, pool2: Run) -> None:
    precision = MixedPrecision(LOW, FULL, LOW, cast_forward_inputs=cast_inputs, cast_root_forward_inputs=cast_root)
    for found in pool2(dtypes, precision, orig):
        # The field of the root alone decides about the root, that of the others about the others.
        assert found["root input"] == (LOW if cast_root else FULL)
        assert found["inner"]["input"] == (LOW if cast_inputs else WIDE)
        assert found["outer"]["input"] == WIDE
        for probe in ("inner", "outer"):
            assert found[probe]["weight"] == found[probe]["mean"] == LOW
            assert found[probe]["count"] == torch.long
        assert found["parameters"] == found["gradients"] == {FULL}
        at_rest = found["buffers at rest"]
        assert {n: at_rest[n] for n in at_rest if n.endswith("mean")} == {"inner.mean": FULL, "outer.mean": FULL}


@pytest.mark.parametrize("orig", [True, False])
def test_kept_low_precision_gradients(orig: bool, pool2: Run) -> None:
    assert not joined(pool2(kept_gradients, orig))


def kept_gradients(rank: int, world: int, orig: bool) -> list[str]:
    """`.grad` is in the reduce dtype, adds up there, and an optimizer steps with it."""
    lines = []
    models = [
        wrap(_seeded(Probe), MixedPrecision(LOW, LOW, keep_low_precision_grads=keep), orig) for keep in (True, False)
    ]
    low, full = models
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(ROWS + rank).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, p in full_parameters(low).items():
            if not torch.equal(p, full_parameters(full)[name]):
                lines.append(f"{name} was stepped differently")
    for model, expected in ((low, LOW), (full, FULL)):
        for _ in range(2):
            model(ROWS).float().sum().backward()
        found = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        if found != {expected}:
            lines.append(f"gradients of {found}, expected {expected}")
        model.clip_grad_norm_(1e-3)
    for name, grad in full_gradients(low).items():
        if grad.dtype != LOW:
            lines.append(f"the whole gradient of {name} has {grad.dtype}")
    return lines


def kept_in_half(rank: int, world: int, orig: bool, accumulate: bool) -> list[str]:
    """In every step gradients beyond the range of fp16 are scaled before they are cast."""
    lines = []
    recipe = MixedPrecision(reduce_dtype=HALF, accumulate_dtype=FULL, keep_low_precision_grads=True)
    model = wrap(nn.Linear(6, 1, bias=False), recipe, orig)
    for step in range(3):
        if accumulate:
            with model.no_sync():
                model(torch.zeros(1, 6)).sum().backward()
        if {p.grad.dtype for p in model.parameters() if p.grad is not None} - {HALF}:
            lines.append(f"step {step}: what a window shows is not in fp16")
        model(torch.full((1, 6), 1e5 if rank == 0 else 1.0)).sum().backward()
        (parameter,) = model.parameters()
        if parameter.grad.dtype != HALF or not (parameter.grad.float() / 50000 - 1).abs().max() < 1e-3:
            lines.append(f"step {step}: {parameter.grad}")
        lines += at_rest(model)
        model.zero_grad()
    return lines


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
def test_kept_gradients_are_scaled_before_they_are_cast(orig: bool, accumulate: bool, pool2: Run) -> None:
    assert not joined(pool2(kept_in_half, orig, accumulate))


def _seeded(build: Any) -> Any:
    torch.manual_seed(11)
    return build()


def in_eval(rank: int, world: int) -> list[str]:
    lines = []
    plain = _seeded(Probe).eval()
    model = wrap(_seeded(Probe), MixedPrecision(LOW, LOW, LOW, full_precision_in_eval=True))
    model(ROWS).float().sum().backward()
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            if not torch.equal(model(ROWS), plain(ROWS)):
                lines.append("evaluation is not in full precision")
        if set(model.module.seen.values()) != {FULL, torch.long}:
            lines.append(f"in eval, saw {model.module.seen}")
        model.train()
        model(ROWS).float().sum().backward()
        if model.module.seen["weight"] != LOW:
            lines.append("training is not in low precision")
    return lines


def test_full_precision_in_eval(pool2: Run) -> None:
    assert not joined(pool2(in_eval))


class Norms(nn.Module):
    """A batch norm between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.before = x.dtype
        x = self.norm(x)
        self.after = x.dtype
        return self.last(x)


def islands(rank: int, world: int, orig: bool) -> list[str]:
    """Batch norms compute and keep their statistics in full precision."""
    lines = []
    precision = MixedPrecision(LOW, FULL, LOW)
    model = wrap(_seeded(Norms), precision, orig, auto_wrap_policy={nn.Linear})
    inner = model.module
    first = _seeded(Norms).first.to(LOW)
    oracle = nn.BatchNorm1d(6)
    for step in range(3):
        x = ROWS * (step + 1) + rank
        model(x).float().square().mean().backward()
        oracle(first(x.to(LOW)).detach().float())
        if (inner.before, inner.after) != (LOW, LOW):
            lines.append(f"around the norm: {inner.before}, {inner.after}")
    norm = inner.norm.module
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        if not torch.equal(getattr(norm, name), getattr(oracle, name)):
            lines.append(f"{name} differs")
    if not any(isinstance(m, FullyShardedDataParallel) and m.module is norm for m in model.modules()):
        lines.append("the norm is no unit")
    return lines


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
@pytest.mark.parametrize("orig", [True, False])
def test_batch_norms_are_islands(orig: bool, pool2: Run) -> None:
    assert not joined(pool2(islands, orig))


class Statistic(nn.Module):
    """A buffer that a forward adds small numbers to, and one that it only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("fixed", torch.full((3,), 1 / 3))
        self.register_buffer("sum", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.sum += 1
        return x * self.scale * self.fixed


def buffers(rank: int, world: int) -> list[str]:
    model = wrap(Statistic(), MixedPrecision(LOW, LOW, LOW))
    lines = []
    for step in range(3):
        output = model(torch.ones(2, 3))
        if output.dtype != LOW or not torch.equal(output.float(), torch.full((2, 3), 1 / 3, dtype=LOW).float()):
            lines.append(f"computed {output}")
        output.float().sum().backward()
        if not torch.equal(model.fixed, torch.full((3,), 1 / 3)):
            lines.append("a buffer that is only read lost precision")
        if not torch.equal(model.sum, torch.full((3,), step + 1.0)):
            lines.append(f"a buffer that is written is {model.sum.tolist()} after step {step}")
    return lines


def test_buffers_keep_their_precision(pool2: Run) -> None:
    assert not joined(pool2(buffers))


# --- the scaler -------------------------------------------------------------------------------------------------------


def scaled(rank: int, world: int, orig: bool, bad_rank: int | None) -> list[str]:
    """Scaled training equals unscaled training; an infinity on one rank's shard skips the step on all."""
    lines = []
    model, plain = (wrap(_seeded(Probe), None, orig) for _ in range(2))
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.125) for m in (model, plain))
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(3):
        for each, its in ((model, optimizer), (plain, other)):
            its.zero_grad()
            loss = each(ROWS + rank).square().mean()
            (scaler.scale(loss) if each is model else loss).backward()
        if step == 1 and rank == bad_rank:
            for p in model.parameters():
                if p.grad is not None and p.grad.numel():
                    p.grad.view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        if step != 1 or bad_rank is None:
            other.step()
    if scaler.get_scale() != (1024.0 if bad_rank is None else 512.0):
        lines.append(f"rank {rank}: scale {scaler.get_scale()}")
    found, expected = full_parameters(model), full_parameters(plain)
    return lines + [f"rank {rank}: {n} differs" for n in expected if not torch.equal(found[n], expected[n])]


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_the_scaler_agrees(orig: bool, bad_rank: int | None, pool2: Run) -> None:
    assert not joined(pool2(scaled, orig, bad_rank))


def left_alone(rank: int, world: int) -> tuple[str, str]:
    """The operation that a rank reports as it waits in the scaler, and its error when the connection is lost."""
    gc.collect()  # a model that failed in a backward of an earlier test would be at work still
    model = wrap(_seeded(Probe), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = ShardedGradScaler("cpu")
    doing = []

    def lost(*_: Any, **__: Any) -> None:
        doing.append(inspect.doing())
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    scaler.scale(model(ROWS).square().mean()).backward()
    with (
        patch.object(stores, "PERIOD", 0.02),
        patch.object(torch.distributed, "all_reduce", lost),
        pytest.raises(AgreementError) as raised,
    ):
        scaler.unscale_(optimizer)
    return doing[0], str(raised.value)


def test_who_is_alone_in_the_scaler_reports_it(run: Run) -> None:
    for doing, text in run(2, left_alone):
        assert doing.startswith("waiting in ShardedGradScaler.unscale_(), in step 1")
        assert "a connection to another rank broke" in text


class One(nn.Module):
    """A single element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def padding_only(rank: int, world: int, overflow: bool) -> list[Any]:
    model = wrap(One(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1)).sum() * (float("inf") if overflow else 1.0)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [scaler.get_scale(), full_parameters(model)["scale"].tolist()]


@pytest.mark.parametrize("overflow", [True, False])
def test_ranks_of_nothing_but_padding_scale_too(overflow: bool, pool3: Run) -> None:
    assert pool3(padding_only, overflow) == [[4.0, [1.0]] if overflow else [8.0, [0.5]]] * 3


def half_gradients(rank: int, world: int) -> list[str]:
    """fp16 gradients that the user keeps are unscaled, too."""
    model = wrap(_seeded(Probe), MixedPrecision(HALF, HALF, keep_low_precision_grads=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=16.0)
    before = full_parameters(model)
    scaler.scale(model(ROWS).float().sum()).backward()
    scaler.unscale_(optimizer)
    norm = model.clip_grad_norm_(1e6)
    scaler.step(optimizer)
    lines = [] if 1.0 < norm < 100.0 else [f"norm {norm}"]
    return lines + [n for n, p in full_parameters(model).items() if torch.equal(p, before[n])]


def test_kept_half_gradients_are_unscaled(pool2: Run) -> None:
    assert not joined(pool2(half_gradients))


class Turning(nn.Module):
    """A weight of complex numbers, beside one of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.turn).imag


def turned(rank: int, world: int, orig: bool) -> list[str]:
    """Gradients of complex parameters keep their imaginary parts in reductions and accumulations in fp32."""
    found = []
    for precision in (None, MixedPrecision(reduce_dtype=FULL, accumulate_dtype=FULL)):
        model = wrap(_seeded(Turning), precision, orig)
        with model.no_sync():
            model(ROWS + rank).square().sum().backward()
        model(ROWS - rank).square().sum().backward()
        found.append(full_gradients(model))
    expected, reduced = found
    return [name for name, grad in expected.items() if grad is None or not torch.equal(grad, reduced[name])]


@pytest.mark.parametrize("orig", [True, False])
def test_complex_gradients_are_reduced_whole(orig: bool, pool2: Run) -> None:
    assert not joined(pool2(turned, orig))
