"""Audits: flipped bits are named with rank, unit, parameter and step, and nothing else raises an alarm."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from flatfsdp.elastic import regroup
from flatfsdp.errors import AuditError, FlatFSDPError
from tests.conftest import Run
from tests.features.test_deterministic_sums import (
    aligned,
    in_turns,
    rounds,
    sharded,
    unevenly,
    unsynchronized,
    wrapped,
)
from tests.harness.meshes import named_mesh
from tests.harness.pool import JobFailed
from tests.harness.thorough import is_thorough, seeds

pytestmark = pytest.mark.distributed

QUIET = 25  # steps in which no alarm is to be raised
USUAL, QUIET_OF_USUAL = 9, 5  # seeds of every run, and their steps


@dataclass
class Fault:
    """A bit that flips on this rank in the next forward of `layer`: in its weight, or in the weight's gradient."""

    layer: str
    of_gradient: bool
    element: float
    bit: int


_next: list[Fault] = []


def flip(tensor: Any, element: float, bit: int) -> None:
    """Flip a bit of one byte, by its place from 0 to 1, in a way that counts no version."""
    local = tensor.detach()
    local = local if local.is_contiguous() else local.t()
    words = local.view(-1).view(torch.uint8).numpy()
    words[int(element * len(words))] ^= 1 << bit


class Layer(nn.Linear):
    name = ""

    def forward(self, x: Tensor) -> Tensor:
        fault = _next.pop() if _next and _next[0].layer == self.name else None
        weight: Any = self.weight
        if fault is not None and not fault.of_gradient:
            flip(weight.data, fault.element, fault.bit)
        y = super().forward(x)
        if fault is not None and fault.of_gradient:
            hook = weight.register_hook(lambda grad: flip(grad, fault.element, fault.bit) or hook.remove())
        return y


class Net(nn.Module):
    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(5, 11)
        self.blocks = nn.ModuleList(nn.Sequential(Layer(11, 17), nn.Tanh(), Layer(17, 11)) for _ in range(2))
        self.frozen = nn.Linear(11, 11).requires_grad_(False)
        self.rare = nn.Linear(11, 11)
        for name, module in self.named_modules():
            if isinstance(module, Layer):
                module.name = name

    def forward(self, x: Tensor, rarely: bool = False) -> Tensor:
        x = self.frozen(self.first(x))
        for block in self.blocks:
            x = x + self.call(block, nn.functional.dropout(x, 0.1))
        return self.rare(x) if rarely else x

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return found


UNIT_OF = {"first": "<root>", "blocks.0.0": "'blocks.0'", "blocks.0.2": "'blocks.0'", "blocks.1.0": "'blocks.1'"}


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "originals": wrapped,
    "flat": partial(wrapped, use_orig_params=False),
    "rows": partial(wrapped, layout="rows"),
    "SHARD_GRAD_OP": partial(wrapped, sharding_strategy="SHARD_GRAD_OP"),
    "NO_SHARD": partial(wrapped, sharding_strategy="NO_SHARD"),
    "large units": partial(wrapped, join_units_below=0),
    "offloaded": partial(wrapped, cpu_offload=CPUOffload(offload_params=True)),
    "bf16": partial(wrapped, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "fully_shard": sharded,
}


def worlds(name: str) -> tuple[int, ...]:
    """On how many ranks a wrap is audited: each front on all numbers, where one rank is alone and where two cannot
    outvote each other; its other settings on three."""
    return (1, 2, 3) if is_thorough() or name in ("originals", "fully_shard") else (3,)


class Training:
    """A loop with an audit."""

    def __init__(
        self, rank: int, world: int, wrap: Any, count: int, owners: Any, accumulates: bool, every: int
    ) -> None:
        torch.manual_seed(0)
        self.rank, self.count, self.accumulates = rank, count, accumulates
        self.own = [*rounds(owners(count, world), rank)]
        self.model = wrap(Net())
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.audit = flatfsdp.Audit(self.model, self.run, every=every)

    def run(self, index: int) -> None:
        torch.manual_seed(1000 * self.audit.step + index)
        x = torch.randn(4, 5)
        self.model(x, rarely=index % 3 == 1).float().square().mean().backward()

    def gradients(self) -> Iterator[None]:
        """The microbatches of a step; stops before each."""
        for index, last in self.own:
            yield
            with unsynchronized(self.model, last or not self.accumulates), flatfsdp.microbatch(index, of=self.count):
                self.run(index or 0)

    def step(self) -> None:
        for _ in self.gradients():
            pass
        self.optimizer.step()
        self.optimizer.zero_grad()

    def words_of_step(self) -> str:
        """The error of a step, or ""."""
        try:
            self.step()
        except AuditError as error:
            self.model.zero_grad()
            return str(error)
        return ""


def flipped_in_microbatches(
    rank: int, world: int, wrap: Any, accumulates: bool, flips: int, seed: str = "", is_whole: bool = False
) -> list[str]:
    """Flip bits in an audited microbatch of a random rank. Returned: what was missed."""
    training = Training(rank, world, wrap, world, in_turns, accumulates, 1)
    draw, missed = random.Random(f"{world} {accumulates} {seed}"), []
    training.step()
    for _ in range(flips):
        layer, culprit = draw.choice([*UNIT_OF]), draw.randrange(world)
        of_gradient = world == 1 or is_whole or draw.random() < 0.5  # else ranks compute with the shard itself
        fault = Fault(layer, of_gradient, draw.random(), draw.randrange(8))
        if rank == culprit:
            _next.append(fault)
        words, step = training.words_of_step(), training.audit.step
        parameter = f"{'the gradient of ' * of_gradient}parameter '{layer}.weight' of unit {UNIT_OF[layer]}"
        expected = f"step {step}: of microbatch {culprit} of {world}, rank {culprit} computed"
        if expected not in words or f"confirms: {parameter}" not in words or _next:
            missed.append(f"{fault}: {words}")
        if draw.random() < 0.3 and training.words_of_step():  # the same step again, without a fault
            missed.append("a false alarm")
        _next.clear()
    return missed


@pytest.mark.parametrize("accumulates", [True, False], ids=["no_sync", "reduced each time"])
@pytest.mark.parametrize("name", WRAPS)
def test_flipped_in_microbatches(run: Run, name: str, accumulates: bool) -> None:
    flips = 200 if is_thorough() else 2
    for world in worlds(name):
        for missed in run(
            world, flipped_in_microbatches, WRAPS[name], accumulates, flips, name, is_whole=name == "NO_SHARD"
        ):
            assert not missed


def recomputed(net: Any) -> Any:
    net.recomputes = True
    return wrapped(net)


def test_flipped_in_microbatches_that_are_recomputed(run: Run) -> None:
    """A recomputation ends by an exception inside of the forward of its unit."""
    for missed in run(2, flipped_in_microbatches, recomputed, False, 6):
        assert not missed


def local_of(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def flipped_at_rest(rank: int, world: int, wrap: Any, flips: int, seed: str = "") -> list[str]:
    """Flip bits of parameters and of optimizer states between steps. Returned: what was missed."""
    training = Training(rank, world, wrap, 2 * world, aligned, True, 1000)
    draw, missed = random.Random(f"{world} at rest {seed}"), []
    training.step()
    for _ in range(flips):
        culprit, when, element, bit = draw.randrange(world), draw.randrange(3), 0.9 * draw.random(), draw.randrange(8)
        of_state, place = draw.choice(["", "exp_avg", "exp_avg_sq", "step"]), draw.random()
        found: Any = [p for p in training.model.parameters() if local_of(p).numel()]
        if of_state:
            found = [training.optimizer.state[p][of_state] for p in found if p in training.optimizer.state]
        chosen = local_of(found[int(place * len(found))])
        words = ""
        try:
            for number, _ in enumerate(training.gradients()):
                if number == when and rank == culprit:
                    flip(chosen, element, bit)
            if when == 2 and rank == culprit:
                flip(chosen, element, bit)
            training.optimizer.step()
        except AuditError as error:
            words = str(error)
        expected = f"step {training.audit.step}: memory has changed since the last step"
        if not (
            words.startswith(expected) and f": rank {culprit}: {of_state}{' of ' * bool(of_state)}parameter" in words
        ):
            missed.append(f"{culprit} {when} {of_state}: {words}")
        training.model.zero_grad()
        if rank == culprit:
            flip(chosen, element, bit)  # as it was
        if words := training.words_of_step():
            missed.append(words)
    return missed


@pytest.mark.parametrize("name", WRAPS)
def test_flipped_at_rest(run: Run, name: str) -> None:
    flips = 200 if is_thorough() else 3
    for world in worlds(name):
        for missed in run(world, flipped_at_rest, WRAPS[name], flips, name):
            assert not missed


def sharded_on_mesh(net: Any) -> Any:
    return sharded(net, mesh=named_mesh(2, 2))


def test_flipped_in_hybrids(run: Run) -> None:
    hybrid = partial(wrapped, mesh=(2, 2), sharding_strategy="HYBRID_SHARD")
    for wrap in (hybrid, sharded_on_mesh):
        for missed in run(4, flipped_in_microbatches, wrap, True, 3) + run(4, flipped_at_rest, wrap, 3):
            assert not missed


class Noise(nn.Module):
    """Computes something else each time."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


def wrong(rank: int, world: int, culprit: int | None) -> list[str]:
    """Errors of steps in which a rank, or each, always computes something else than others."""
    training = Training(rank, world, wrapped, 5, in_turns, True, 2)
    words = [training.words_of_step()]
    if culprit in (rank, None):
        training.model.module.blocks[1].append(Noise())
    for _ in range(2):
        words.append(training.words_of_step())
    return words


def test_a_rank_that_computes_wrongly(run: Run) -> None:
    """With three ranks, two agree. With two, none is known to be right."""
    for world, culprit, named in ((3, 1, "rank 1"), (2, 1, "ranks 0, 1"), (2, None, "ranks 0, 1"), (1, None, "rank 0")):
        for first, *later in run(world, wrong, culprit):
            assert not first
            for words in later:
                assert words.startswith("step 2: of microbatch ")
                assert f"{named} computed what no other rank confirms: the output of unit 'blocks.1'" in words


def quiet(rank: int, world: int, wrap: Any, seed: int, steps: int) -> list[str]:
    """Alarms in steps without a fault: some are dropped, states are loaded, parameters are written to."""
    draw, alarms = random.Random(seed), []
    owners = draw.choice([aligned, in_turns, unevenly])
    training = Training(rank, world, wrap, draw.randint(1, 3 * world), owners, draw.random() < 0.5, draw.randint(1, 3))
    model, optimizer = training.model, training.optimizer
    for _ in range(steps):
        alarms.append(training.words_of_step())
        match draw.randrange(6):
            case 0:
                optimizer.load_state_dict(optimizer.state_dict())
            case 1:
                model.load_state_dict(model.state_dict())
            case 2:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.99)
            case 3:
                for _ in zip(training.gradients(), range(2), strict=False):
                    pass
                model.zero_grad()
            case 4:
                with torch.no_grad():
                    model(torch.ones(4, 5))
                training.audit.check()
            case 5 if isinstance(model, FullyShardedDataParallel):
                with model.summon_full_params(model):
                    next(model.parameters()).data.mul_(0.5)
    return [words for words in alarms if words]


@pytest.mark.parametrize("seed", seeds(USUAL, 600))
def test_no_alarm(run: Run, seed: int) -> None:
    """10,000 steps on several ranks with --thorough, or by `tools/random_runs --alarms 600`, which keeps its seeds."""
    world, name = (3, 2, 1)[(seed + seed // 9) % 3], [*WRAPS][seed % len(WRAPS)]
    steps = QUIET if is_thorough() or seed >= USUAL else QUIET_OF_USUAL
    for alarms in run(world, quiet, WRAPS[name], seed, steps):
        assert not alarms, f"{name} on {world} ranks"


def same_numbers(rank: int, world: int, every: int) -> list[Tensor]:
    """Parameters, and a random number, after some steps with an audit of every so many."""
    training = Training(rank, world, wrapped, 4, in_turns, True, every)
    for step in range(1, 6):
        training.audit.step = step
        training.step()
    return [*(p.detach().clone() for p in training.model.parameters()), torch.rand(3)]


def test_an_audit_changes_nothing(run: Run) -> None:
    for world in (1, 2):
        for one, other in zip(run(world, same_numbers, 2), run(world, same_numbers, 1000), strict=True):
            assert all(map(torch.equal, one, other))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1.0
        return self.layer(x) * self.count


class Replacing(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1.0
        return self.layer(x) * self.count


COUNTS: dict[str, Callable[[], nn.Module]] = {"buffers": Counting, "replaced buffers": Replacing}


def refused(rank: int, world: int, how: str) -> str:
    net = COUNTS[how]() if how in COUNTS else nn.Linear(5, 3)
    model = wrapped(net, deterministic_sums=how != "no mode")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(index: int) -> None:
        with flatfsdp.microbatch(index, of=world):
            model(torch.ones(2, 5)).sum().backward()

    try:
        if how == "in a microbatch":
            with flatfsdp.microbatch(rank, of=world):
                flatfsdp.Audit(model, run, every=1)
        if how == "in a step":
            run(rank)
            audit = flatfsdp.Audit(model, run, every=1)
            optimizer.step()
        if how == "step set in a step":
            audit = flatfsdp.Audit(model, run, every=2)
            run(rank)
            audit.step = 2
            optimizer.step()
        flatfsdp.Audit(model, run if how != "no function" else None, every=0 if how == "zero" else 1)  # type: ignore[arg-type]
        if how == "two":
            flatfsdp.Audit(model, run, every=1)
        if how == "in backward":
            flatfsdp.optimizer_in_backward(model, optimizer)
        run(rank)
        optimizer.step()
    except FlatFSDPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no mode", "UsageError: Audit(): expected a model with deterministic_sums=True and without an audit"),
        ("two", "UsageError: Audit(): expected a model with deterministic_sums=True and without an audit"),
        ("no function", "ConfigTypeError: Audit: run"),
        ("zero", "ConfigValueError: Audit: every"),
        ("in backward", "UsageError: Audit: an optimizer steps in backwards"),
        ("buffers", "UsageError: deterministic_sums=True: a forward writes to buffers (count)"),
        ("replaced buffers", "UsageError: deterministic_sums=True: a forward writes to buffers (count)"),
        ("in a microbatch", "UsageError: Audit() inside of microbatch("),
        ("in a step", "UsageError: Audit: step 1 is audited, and microbatches of it ran on ranks 0, 1 before"),
        ("step set in a step", "UsageError: Audit: step 2 is audited, and microbatches of it ran on ranks 0, 1 before"),
    ],
)
def test_refused(run: Run, how: str, words: str) -> None:
    for found in run(2, refused, how):
        assert found.startswith(words)


def with_optimizers(rank: int, world: int, kind: str) -> list[str]:
    """An audit with several optimizers, or with steps of other kinds: no alarm, and then a flipped bit."""
    torch.manual_seed(0)
    model = wrapped(Net())
    shapes = flatfsdp.unsharded_shapes(model)
    trained = [(p, len(shapes[name])) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for p, dims in trained if dims == 2]
    if kind == "muon":
        first: Any = flatfsdp.matrix_steps(partial(torch.optim.Muon, lr=0.02), matrices).optimizer
    else:
        first = torch.optim.AdamW(matrices, lr=1e-2)
        flatfsdp.fuse_optimizer_steps(first)
    optimizers = [torch.optim.AdamW([p for p, dims in trained if dims != 2]), first]

    def run(index: int) -> None:
        torch.manual_seed(index)
        with flatfsdp.microbatch(index, of=world):
            model(torch.randn(4, 5)).square().mean().backward()

    audit = flatfsdp.Audit(model, run, every=2)
    words = []
    for step in range(1, 6):
        assert audit.step == step
        run(rank)
        if step == 5:
            states = [value for p in matrices for value in first.state.get(p, {}).values() if isinstance(value, Tensor)]
            if rank == 0:
                flip(next(each for each in states if each.numel() > 1), 0.0, 3)
        try:
            for optimizer in optimizers:
                optimizer.step()
        except AuditError as error:
            words.append(str(error))
        model.zero_grad()
    return words


@pytest.mark.parametrize("kind", ["muon", "fused"])
def test_optimizers(run: Run, kind: str) -> None:
    for world in (1, 2):
        for words in run(world, with_optimizers, kind):
            assert len(words) == 1 and "rank 0: " in words[0] and " of parameter 'first.weight'" in words[0]


class Logged(flatfsdp.Audit):
    calls: list[int] = []  # noqa: RUF012
    number = 0

    def check(self) -> None:
        self.calls.append(self.number)
        super().check()


def audited_together(rank: int, world: int) -> list[int]:
    """The models that one optimizer steps, in the order in which they are compared, which is collective."""
    Logged.calls.clear()
    models = [wrapped(nn.Linear(5, 3)) for _ in range(12)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    for number in (7, 3, 11, 0, 5, 9, 1, 2, 10, 4, 8, 6):
        Logged(models[number], lambda index: None, every=1000).number = number
    with flatfsdp.microbatch(rank, of=world):
        for model in models:
            model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return Logged.calls


def test_ranks_compare_models_of_one_optimizer_in_the_same_order(run: Run) -> None:
    for calls in run(1, audited_together):
        assert calls == [7, 3, 11, 0, 5, 9, 1, 2, 10, 4, 8, 6]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eij->bej", x, self.weight)


def with_experts(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model = wrapped(Experts())
    muon = partial(torch.optim.Muon, lr=0.02)
    optimizer = flatfsdp.matrix_steps(muon, model.parameters(), sees="matrices").optimizer

    def run(index: int) -> None:
        with flatfsdp.microbatch(index, of=world):
            model(torch.full((2, 6), 1.0 + index)).square().mean().backward()

    audit = flatfsdp.Audit(model, run, every=1000)
    run(rank)
    optimizer.step()
    states = [each for p in model.parameters() for each in optimizer.state[p]["experts"].values()]
    if rank == world - 1:
        flip(states[-1]["momentum_buffer"], 0.5, 3)
    try:
        audit.check()
    except AuditError as error:
        return str(error)
    return ""


def test_states_of_matrices_of_one_parameter(run: Run) -> None:
    for words in run(2, with_experts):
        assert ": rank 1: experts" in words and " of parameter 'weight'" in words


def failed(rank: int, world: int) -> None:
    """Rank 0 cannot read the microbatch of another, which waits for it, and goes on."""
    model = wrapped(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(index: int) -> None:
        if rank == 0 and index != rank:
            raise ValueError("no such file")
        with flatfsdp.microbatch(index, of=world):
            model(torch.ones(2, 5)).sum().backward()

    flatfsdp.Audit(model, run, every=1)
    run(rank)
    with suppress(ValueError):
        optimizer.step()


def test_a_microbatch_that_cannot_be_computed_again_is_reported_on_all_ranks(run: Run) -> None:
    with pytest.raises(JobFailed, match=r"rank 0 abandoned its iteration in .* after ValueError: no such file; rank 1"):
        run(2, failed)


def accepted(rank: int, world: int, wrap: Any) -> list[str]:
    """Alarms after writes that torch does not count: not accepted, accepted, and after a flip since."""
    training = Training(rank, world, wrap, world, aligned, True, 1000)
    parameters = [p for p in training.model.parameters() if p.requires_grad]
    alarms = []
    for accepts, flips in ((False, False), (True, False), (True, True)):
        alarms.append(training.words_of_step())
        if wrap is sharded:
            with torch.no_grad():
                torch._foreach_mul_(parameters, 0.999)
        else:
            for parameter in parameters:
                parameter.data.mul_(0.999)
        if accepts:
            training.audit.accept()
        if flips and rank == 0:
            flip(local_of(parameters[0]), 0.0, 3)
        alarms.append(training.words_of_step())
        training.audit.accept()
    return alarms


@pytest.mark.parametrize("name", ["originals", "fully_shard"])
def test_writes_are_accepted(run: Run, name: str) -> None:
    for alarms in run(2, accepted, WRAPS[name]):
        assert [bool(words) for words in alarms] == [False, True, False, False, False, True]
        assert "rank 0: parameter" in alarms[1] and "call accept() of the audit" in alarms[1]
        assert alarms[5].count(" of unit ") == 1


def removed(rank: int, world: int) -> list[str]:
    """Alarms of a model without its audit, and with another one."""
    training = Training(rank, world, wrapped, world, aligned, True, 1)
    alarms = [training.words_of_step()]
    for _ in range(2):
        training.audit.remove()
    parameter = next(p for p in training.model.parameters() if p.numel())
    flip(parameter, 0.0, 3)
    alarms.append(training.words_of_step())
    training.audit.check()
    training.audit = flatfsdp.Audit(training.model, training.run, every=1)
    alarms.append(training.words_of_step())
    flip(parameter, 0.0, 3)
    alarms.append(training.words_of_step())
    training.audit.remove()
    training.model.zero_grad()
    regroup(training.model, group=torch.distributed.group.WORLD)
    return alarms


def test_an_audit_is_removed(run: Run) -> None:
    for alarms in run(2, removed):
        assert [bool(words) for words in alarms] == [False, False, False, True]
