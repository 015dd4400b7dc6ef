"""Error feedback: delivered gradients and the ranks' residuals add up to all gradients under every kind of training;
residuals take as many bytes as stated, and are part of copies, pickles and checkpoints."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision, ShardedGradScaler, checkpoint
from flatfsdp.engine.cpu.groups import over_gloo
from flatfsdp.errors import NonFiniteError
from tests.comm.test_quantized import Net, loss
from tests.conftest import Run
from tests.harness import inspect, pool
from tests.harness.corners import Setting, full_gradients, full_parameters, joined, seeded
from tests.harness.error_feedback import owed_by_all
from tests.harness.gradients import plain
from tests.harness.models import Feedforward
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.distributed

BF16 = torch.bfloat16
FEW = MixedPrecision(reduce_bits=4, reduce_error_feedback=True)
LARGE = Setting(large=True)


def wrapped(setting: Setting = LARGE, mixed: MixedPrecision = FEW, **more: Any) -> Any:
    return setting.wrap(seeded(Net), {Feedforward}, mixed_precision=mixed, **more)


class Account:
    """The gradients delivered to a model, and the expected ones: those of plain models, one for each rank."""

    def __init__(self, model: Any, rank: int, world: int) -> None:
        self.model, self.rank = model, rank
        self.plain = [seeded(Net) for _ in range(world)]
        self.delivered = {name: torch.zeros_like(p) for name, p in self.plain[0].named_parameters()}

    def backward(self, step: int) -> None:
        loss(self.model, self.rank, step).backward()
        for rank, model in enumerate(self.plain):
            loss(model, rank, step).backward()

    def settle(self) -> None:
        """Add the current gradients to `delivered`, and clear them."""
        for name, grad in full_gradients(self.model).items():
            if grad is not None:
                self.delivered[plain(name)] += grad
        self.model.zero_grad()

    def start_again(self, unit: str) -> None:
        """Set the delivered gradients and the residuals of a unit to zero."""
        for model in self.plain:
            for name, parameter in model.named_parameters():
                if name.startswith(unit):
                    self.delivered[name].zero_()
                    parameter.grad = None

    def check(self, rounding: float = 1e-5) -> Iterator[str]:
        """A line for each gradient that misses more than `rounding` of its largest element or has no residual."""
        for name, owed in owed_by_all(self.model).items():
            gradients = [dict(model.named_parameters())[name].grad for model in self.plain]
            exact = torch.stack([grad for grad in gradients if grad is not None]).sum(0) / len(gradients)
            size = float(exact.abs().max())
            missing = float((self.delivered[name] + owed - exact).abs().max())
            if not missing <= rounding * size:
                yield f"{name}: {missing:.3g} is missing of {size:.3g}"
            if rounding < 1e-4 and name.endswith("weight") and not 20 * missing < float(owed.abs().max()):
                yield f"{name}: nothing is owed"


def accounts(
    rank: int, world: int, setting: Setting, bits: int, reduce: torch.dtype, layout: str, shared: bool
) -> list[str]:
    """Over windows, and reductions into gradients that are there; of float32, to its rounding."""
    lines: list[str] = []
    mixed = MixedPrecision(reduce_dtype=reduce, reduce_bits=bits, reduce_error_feedback=True)
    with setting.doubles(), contextlib.nullcontext() if shared else over_gloo():
        account = Account(wrapped(replace(setting, rows=layout == "rows"), mixed), rank, world)
        for step in range(2):
            with account.model.no_sync():
                account.backward(step)
            account.backward(step + 10)
            if step % 2:
                account.backward(step + 20)
            account.settle()
            rounding = 1e-5 if reduce is torch.float32 else 0.01  # of the gradients delivered in it
            lines += [f"step {step}: {line}" for line in account.check(rounding)]
    return [f"rank {rank}: {setting}: {line}" for line in lines]


@pytest.mark.parametrize(
    ("world", "setting", "bits", "reduce", "layout"),
    [
        (2, Setting(), 4, torch.float32, "rows"),
        (2, Setting("NO_SHARD"), 4, torch.float32, "flat"),
        (2, Setting(orig=False, large=True, doubled=True), 4, BF16, "flat"),
        (3, Setting(large=True, offload=True), 4, torch.float32, "rows"),
        (3, Setting("NO_SHARD", orig=False, large=True, doubled=True), 8, torch.float64, "flat"),
        (4, Setting("HYBRID_SHARD", large=True), 8, torch.float32, "flat"),
        (4, Setting("HYBRID_SHARD"), 4, torch.float32, "rows"),
        (4, Setting("HYBRID_SHARD", orig=False), 4, torch.float32, "flat"),
    ],
    ids=str,
)
def test_what_was_delivered_and_what_is_owed_are_all_gradients(
    run: Run, world: int, setting: Setting, bits: int, reduce: torch.dtype, layout: str
) -> None:
    assert not joined(run(world, accounts, setting, bits, reduce, layout, shared=world != 3))


class Slope(nn.Module):
    """Gradients that stay the same: of one parameter a hundred, of the others one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))
        self.register_buffer("slope", torch.ones(40).scatter(0, torch.tensor([3, 33]), 100.0))

    def forward(self) -> Tensor:
        return self.weight @ self.slope


def small_numbers(rank: int, world: int, strategy: str, mixed: MixedPrecision) -> list[float]:
    """Distances after 60 steps of 1: of two elements with small gradients, then of the two large ones, over 100."""
    model = Setting(strategy).wrap(Slope(), (), mixed_precision=mixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(60):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = full_parameters(model)["weight"]
    return [*weight[[0, 39]].neg().tolist(), *(weight[[3, 33]].neg() / 100).tolist()]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_what_is_too_small_for_its_block_comes_later(pool2: Run, strategy: str) -> None:
    scale = 100 / 7
    for found in pool2(small_numbers, strategy, FEW):
        assert found == pytest.approx([60] * 4, abs=scale)
    for found in pool2(small_numbers, strategy, MixedPrecision(reduce_bits=4)):
        # A rank's own numbers are exact where it adds them up; the other's have not come.
        assert found[:2] == pytest.approx([30, 30] if strategy == "FULL_SHARD" else [0, 0], abs=1)


def held(rank: int, world: int, strategy: str, large: bool, reduce: torch.dtype) -> list[str]:
    """Bytes by the formula, in figures and in the summary; none before anything was lost."""
    mixed = MixedPrecision(reduce_dtype=reduce, reduce_bits=4, reduce_error_feedback=True)
    model = wrapped(Setting(strategy, large=large), mixed)
    figures = flatfsdp.stats(model)
    before = figures.bytes_residuals
    numels = [flat.layout.shard_numel for flat in inspect.flat_params(model)]
    pieces = {"FULL_SHARD": world - 1, "NO_SHARD": 1, "HYBRID_SHARD": 2}[strategy]
    expected = pieces * reduce.itemsize * sum(numels)
    lines = []
    loss(model, rank, 0).backward()
    for step in range(1, 3):
        figures.reset()
        loss(model, rank, step).backward()
        found = before, figures.bytes_residuals, figures.bytes_at_peak["residual"]
        if found != (0, expected, expected):
            lines.append(f"step {step}: {found} bytes, expected {expected}")
    table = flatfsdp.summary(model)
    words = [f"gradients by 4 bits, residuals of {pieces * reduce.itemsize * numel:,} bytes" for numel in numels]
    return lines if all(each in table for each in words) else [*lines, table]


@pytest.mark.parametrize(
    ("world", "strategy", "reduce"),
    [
        (2, "FULL_SHARD", torch.float32),
        (3, "FULL_SHARD", BF16),
        (3, "NO_SHARD", torch.float32),
        (4, "HYBRID_SHARD", torch.float32),
    ],
)
def test_bytes_of_what_is_owed(run: Run, world: int, strategy: str, reduce: torch.dtype) -> None:
    for large in (False, True):
        assert not joined(run(world, held, strategy, large, reduce))


def some_units(rank: int, world: int) -> list[str]:
    """Small units with it and without: they are joined with their like, and have separate residuals."""
    net = seeded(Net)
    net.blocks[1] = FullyShardedDataParallel(
        net.blocks[1], mixed_precision=MixedPrecision(reduce_bits=4), use_orig_params=True
    )
    account = Account(Setting().wrap(net, {Feedforward}, mixed_precision=FEW), rank, world)
    for step in range(3):
        account.backward(step)
        account.settle()
    calls, _ = flatfsdp.stats(account.model).comm["reduce_scatter"]
    lines = [] if calls == 3 * 2 else [f"{calls} reductions"]
    without = [name for name, owed in owed_by_all(account.model).items() if not owed.any()]
    if [name for name in without if not name.startswith("blocks.1.")] or len(without) != 6:
        lines.append(f"{without} owe nothing")
    return [*lines, *(line for line in account.check() if not line.startswith("blocks.1."))]


def test_some_units_have_it(pool3: Run) -> None:
    assert not joined(pool3(some_units))


# -- failures ----------------------------------------------------------------------------------------------------------


def not_finite(rank: int, world: int, strategy: str) -> list[str]:
    """A block that is NaN for a step is not delivered, and its residual stays unchanged."""
    model = wrapped(Setting(strategy, large=True))
    loss(model, rank, 0).backward()
    model.zero_grad()
    before = inspect.owed(model)[-1]
    broken = model.module.head.weight.register_hook(lambda grad: grad / 0 if rank == 1 else grad)
    loss(model, rank, 1).backward()
    broken.remove()
    found = {plain(name): grad for name, grad in full_gradients(model).items() if grad is not None}
    lines = ["what is not finite did not arrive"] if found["head.weight"].isfinite().any() else []
    after = inspect.owed(model)[-1]
    if not before.any() or torch.equal(after, before) != (rank == 1):
        lines.append("what is owed of the block")
    model.zero_grad()
    loss(model, rank, 2).backward()
    numbers = [*inspect.owed(model), *(grad for grad in full_gradients(model).values() if grad is not None)]
    lines += ["NaN stays"] if not all(each.isfinite().all() for each in numbers) else []
    return [f"rank {rank}: {line}" for line in lines]


def caught(rank: int, world: int) -> tuple[list[str], list[str]]:
    """A backward that fails leaves no residuals; the missing gradients, and the warnings."""
    account = Account(wrapped(), rank, world)
    account.backward(0)
    account.settle()
    model, lines = account.model, []
    with warnings.catch_warnings(record=True) as caught:
        for how in ("a hook fails", "what is not finite is found"):
            if how == "a hook fails":
                failing = model.module.blocks[0].register_forward_hook(_fail_in_backward)
                with pytest.raises(ZeroDivisionError):
                    loss(model, rank, 1).backward()
            else:
                failing = model.module.head.weight.register_hook(lambda grad: grad / 0)
                with flatfsdp.detect_nonfinite(model), pytest.raises(NonFiniteError):
                    loss(model, rank, 1).backward()
            failing.remove()
            for unit in ("blocks.1.", "blocks.0.", "head.")[: 1 if how == "a hook fails" else 3]:
                account.start_again(unit)  # others were not reduced
            account.backward(2)
            account.settle()
            lines += [f"{how}: {line}" for line in account.check()]
    return lines, [str(each.message) for each in caught]


def _fail_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    def fail(grad: Tensor) -> Tensor:
        raise ZeroDivisionError

    output.register_hook(fail)


def scaled(rank: int, world: int) -> list[str]:
    """The residual grows with a loss scale, and is dropped when that falls."""
    lines = []
    account = Account(wrapped(), rank, world)
    model = account.model
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(4):  # the scale grows after two steps, and again
        scaler.scale(loss(model, rank, step)).backward()
        for each, oracle in enumerate(account.plain):
            loss(oracle, each, step).backward()
        scaler.step(optimizer)  # which unscales
        account.settle()
        scaler.update()
        scale = scaler.get_scale()
        owed = {name: each / scale for name, each in owed_by_all(model).items()}
        for name, each in owed.items():
            exact = torch.stack([dict(o.named_parameters())[name].grad for o in account.plain]).mean(0)  # type: ignore[arg-type]
            if not float((account.delivered[name] + each - exact).abs().max()) <= 1e-5 * float(exact.abs().max()):
                lines.append(f"step {step}: {name}")
    if scaler.get_scale() != 4096.0:
        lines.append(f"the scale is {scaler.get_scale()}")
    model.module.head.weight.register_hook(lambda grad: grad / 0 if rank == 0 else grad)
    scaler.scale(loss(model, rank, 4)).backward()
    scaler.step(optimizer)
    scaler.update()
    owed = owed_by_all(model)
    return lines + [f"{name} is owed after a step that was skipped" for name, each in owed.items() if each.any()]


def test_a_block_that_is_not_finite_does_not_stay(pool2: Run) -> None:
    assert not joined(pool2(not_finite, "FULL_SHARD"))
    assert not joined(pool2(not_finite, "NO_SHARD"))


def test_what_a_failed_backward_has_lost_is_dropped(pool2: Run) -> None:
    results = pool2(caught)
    assert not joined([lines for lines, _ in results])
    texts = sorted(message.partition("feedback ")[2] for _, messages in results for message in messages)
    assert len(texts) == 2
    assert texts[0].startswith("(1 units, first 'blocks.1'). They are dropped, and so are the residuals of quantized")
    assert texts[1].startswith("(3 units, first 'blocks.0')")


def test_what_is_owed_follows_a_loss_scale(pool2: Run) -> None:
    assert not joined(pool2(scaled))


# -- where it goes along -----------------------------------------------------------------------------------------------


def alike(one: Any, other: Any, rank: int, first: int) -> Iterator[str]:
    """The residuals, parameters and gradients that differ between two models when both go on."""
    for what, found, expected in (
        ("what is owed", inspect.owed(one), inspect.owed(other)),
        ("parameters", [*full_parameters(one).values()], [*full_parameters(other).values()]),
    ):
        if not all(map(torch.equal, found, expected)):
            yield what
    for step in range(first, first + 2):
        gradients = []
        for model in (one, other):
            loss(model, rank, step).backward()
            gradients.append([grad for grad in full_gradients(model).values() if grad is not None])
            model.zero_grad()
        if not all(map(torch.equal, *gradients)):
            yield f"gradients of step {step}"


def copies(rank: int, world: int, setting: Setting) -> list[str]:
    model = wrapped(setting)
    for step in range(2):
        loss(model, rank, step).backward()
        model.zero_grad()
    lines = []
    for what, made in {"copy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}.items():
        if flatfsdp.stats(made).bytes_residuals != flatfsdp.stats(model).bytes_residuals:
            lines.append(f"{what}: bytes")
        lines += [f"{what}: {line}" for line in alike(made, copy.deepcopy(model), rank, 2)]
    before = [each.clone() for each in inspect.owed(model)]
    model.double()
    lines += ["cast: what is owed"] if not all(map(torch.equal, inspect.owed(model), before)) else []
    loss(model, rank, 2).backward()
    if flatfsdp.stats(model).bytes_residuals != 2 * flatfsdp.stats(made).bytes_residuals:
        lines.append("cast: bytes")
    return [f"rank {rank}: {line}" for line in lines]


def test_copies_and_pickles_owe_the_same(run: Run) -> None:
    assert not joined(run(2, copies, Setting(large=True)))
    assert not joined(run(4, copies, Setting("HYBRID_SHARD", orig=False)))


def partly_used(rank: int, world: int, strategy: str) -> list[str]:
    """A parameter that is not reached or is frozen gets no gradient, and its residual stays unchanged."""
    account = Account(wrapped(Setting(strategy, large=True)), rank, world)
    account.backward(0)
    account.settle()
    before, lines = owed_by_all(account.model), []
    inner = account.model.module
    for what in ("not reached", "frozen"):
        for model in (account.model, *account.plain):
            module = model.module if model is account.model else model
            if what == "frozen":
                module.blocks[1].requires_grad_(False)
            else:
                module.blocks[1].forward = lambda x: x
        account.backward(1)
        found = full_gradients(account.model)
        lines += [f"{what}: {name} has a gradient" for name in found if "blocks.1." in name and found[name] is not None]
        account.settle()
        owed = owed_by_all(account.model)
        changed = [name for name in owed if not torch.equal(owed[name], before[name])]
        lines += [f"{what}: what is owed of {name} has changed" for name in changed if "blocks.1." in name]
        lines += [f"{what}: {line}" for line in account.check()]
        for module in (inner, *account.plain):
            module.blocks[1].requires_grad_(True)
            module.blocks[1].__dict__.pop("forward", None)
    account.backward(2)
    account.settle()
    return [f"rank {rank}: {strategy}: {line}" for line in (*lines, *account.check())]


def test_what_no_gradient_comes_to_owes_what_it_owed(run: Run) -> None:
    assert not joined(run(2, partly_used, "FULL_SHARD"))
    assert not joined(run(2, partly_used, "NO_SHARD"))
    assert not joined(run(4, partly_used, "HYBRID_SHARD"))


class Trained:
    """A model and its optimizer, some steps on."""

    def __init__(self, rank: int, setting: Setting, mixed: MixedPrecision = FEW) -> None:
        self.rank, self.model = rank, wrapped(setting, mixed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, first: int) -> Trained:
        for step in range(first, first + 3):
            loss(self.model, self.rank, step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    @property
    def state(self) -> list[Tensor]:
        return [*full_parameters(self.model).values(), *inspect.owed(self.model)]


def save(rank: int, world: int, path: str, setting: Setting) -> None:
    trained = Trained(rank, setting).train(0)
    checkpoint.save(f"{path}/now", model=trained.model, optimizer=trained.optimizer)
    saving = checkpoint.async_save(f"{path}/later", model=trained.model, optimizer=trained.optimizer)
    states = [[each.clone() for each in trained.state]]
    states.append(trained.train(3).state)
    saving.result()
    torch.save(states, f"{path}/{rank}.pt")
    without = Trained(rank, setting, MixedPrecision(reduce_bits=4)).train(0)
    checkpoint.save(f"{path}/without", model=without.model, optimizer=without.optimizer)


def resume(rank: int, world: int, path: str, setting: Setting, exact: bool) -> tuple[list[str], list[str]]:
    """The states that differ after a load, and the warnings."""
    lines, texts = [], []
    for name in ("now", "later"):
        trained = Trained(rank, setting).train(7)
        with warnings.catch_warnings(record=True) as caught:
            checkpoint.load(f"{path}/{name}", model=trained.model, optimizer=trained.optimizer)
        texts += [str(each.message) for each in caught]
        if exact:
            for state in torch.load(f"{path}/{rank}.pt"):
                if not all(map(torch.equal, trained.state, state)):
                    lines.append(f"{name}: not as it was")
                trained.train(3)
        elif any(each.any() for each in inspect.owed(trained.model)):
            lines.append(f"{name}: what other ranks owed")
        trained.train(3)
    trained = Trained(rank, setting).train(7)
    checkpoint.load(f"{path}/without", model=trained.model, optimizer=trained.optimizer)
    if any(each.any() for each in inspect.owed(trained.model)):
        lines.append("without: what was owed before")
    plain = Trained(rank, setting, MixedPrecision()).train(7)
    checkpoint.load(f"{path}/now", model=plain.model, optimizer=plain.optimizer)
    return [f"rank {rank}: {line}" for line in lines], texts


@pytest.mark.parametrize(
    ("world", "setting", "reader", "others"),
    [
        (2, LARGE, 3, Setting()),
        *(
            [
                (4, Setting("HYBRID_SHARD"), 4, Setting("HYBRID_SHARD", orig=False)),
                (2, Setting("NO_SHARD"), 2, Setting()),
                (3, Setting(), 2, Setting("NO_SHARD")),
            ]
            if is_thorough()
            else []
        ),
    ],
    ids=str,
)
def test_a_checkpoint_has_what_is_owed(
    tmp_path: Path, world: int, setting: Setting, reader: int, others: Setting
) -> None:
    """Exact on the same ranks, wrapped alike; elsewhere residuals are dropped, with one warning for each load."""
    path = str(tmp_path)
    pool.run(world, save, path, setting)
    for ranks, wrapping, exact in (world, setting, True), (reader, others, False):
        results = pool.run(ranks, resume, path, wrapping, exact)
        assert not joined([lines for lines, _ in results])
        texts = [message for _, messages in results for message in messages]
        assert len(texts) == (0 if exact else 2), texts
        assert all("(reduce_error_feedback) from other ranks, or of units with another" in each for each in texts)
