"""Audits: flipped bits are named with rank, unit, parameter and step, and nothing else raises an alarm."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import AuditError, FlatFSDPError
from tests.conftest import Run
from tests.features.test_deterministic_sums import aligned, in_turns, rounds, unevenly, unsynchronized
from tests.harness.meshes import named_mesh, shared_mesh
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.distributed


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
            x = x + block(nn.functional.dropout(x, 0.1))
        return self.rare(x) if rarely else x


UNIT_OF = {"first": "<root>", "blocks.0.0": "'blocks.0'", "blocks.0.2": "'blocks.0'", "blocks.1.0": "'blocks.1'"}


def wrapped(net: nn.Module, mesh: tuple[int, int] | None = None, **options: Any) -> FullyShardedDataParallel:
    if mesh is not None:
        options["device_mesh"] = shared_mesh(*mesh)
    options = {"use_orig_params": True, "auto_wrap_policy": {nn.Sequential}, "deterministic_sums": True} | options
    return FullyShardedDataParallel(net, **options)


def sharded(net: Any, **options: Any) -> Any:
    for block in net.blocks:
        flatfsdp.fully_shard(block, deterministic_sums=True, **options)
    return flatfsdp.fully_shard(net, deterministic_sums=True, **options)


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


def flipped_in_microbatches(rank: int, world: int, wrap: Any, accumulates: bool, flips: int) -> list[str]:
    """Flip bits in an audited microbatch of a random rank. Returned: what was missed."""
    training = Training(rank, world, wrap, world, in_turns, accumulates, 1)
    draw, missed = random.Random(f"{world} {accumulates}"), []
    training.step()
    for _ in range(flips):
        layer, culprit = draw.choice([*UNIT_OF]), draw.randrange(world)
        of_gradient = world == 1 or draw.random() < 0.5  # one rank computes with the shard itself
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
@pytest.mark.parametrize("name", [name for name in WRAPS if name != "NO_SHARD"])
def test_flipped_in_microbatches(run: Run, name: str, accumulates: bool) -> None:
    flips = 200 if is_thorough() else 6
    for world in (1, 2, 3):
        for missed in run(world, flipped_in_microbatches, WRAPS[name], accumulates, flips):
            assert not missed


def local_of(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def flipped_at_rest(rank: int, world: int, wrap: Any, flips: int) -> list[str]:
    """Flip bits of parameters and of optimizer states between steps. Returned: what was missed."""
    training = Training(rank, world, wrap, 2 * world, aligned, True, 1000)
    draw, missed = random.Random(f"{world} at rest"), []
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
    flips = 200 if is_thorough() else 8
    for world in (1, 2, 3):
        for missed in run(world, flipped_at_rest, WRAPS[name], flips):
            assert not missed


def sharded_on_mesh(net: Any) -> Any:
    return sharded(net, mesh=named_mesh(2, 2))


def test_flipped_in_hybrids(run: Run) -> None:
    hybrid = partial(wrapped, mesh=(2, 2), sharding_strategy="HYBRID_SHARD")
    for wrap in (hybrid, sharded_on_mesh):
        for missed in run(4, flipped_in_microbatches, wrap, True, 4) + run(4, flipped_at_rest, wrap, 4):
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


def quiet(rank: int, world: int, wrap: Any, steps: int) -> list[str]:
    """Alarms in steps without a fault: some are dropped, states are loaded, parameters are written to."""
    draw, alarms = random.Random(f"{world} quiet"), []
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


@pytest.mark.parametrize("name", WRAPS)
def test_no_alarm(run: Run, name: str) -> None:
    for world in (1, 2, 3):
        for alarms in run(world, quiet, WRAPS[name], 3000 if is_thorough() else 20, timeout=3000):
            assert not alarms


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


def refused(rank: int, world: int, how: str) -> str:
    model = wrapped(Counting() if how == "buffers" else nn.Linear(5, 3), deterministic_sums=how != "no mode")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(index: int) -> None:
        with flatfsdp.microbatch(index, of=world):
            model(torch.ones(2, 5)).sum().backward()

    try:
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
        ("buffers", "UsageError: Audit: a forward writes to buffers (count)"),
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
