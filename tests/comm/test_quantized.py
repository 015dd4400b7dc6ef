"""Parameters and gradients that are sent in few bits: the same values on all ranks, near full precision, in as many
bytes as stated; shards, and frozen parameters, in full precision."""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.comm_hooks import allreduce_hook
from flatfsdp.engine.config.arguments import check_arguments
from flatfsdp.engine.cpu.groups import over_gloo
from flatfsdp.errors import NonFiniteError, UsageError
from flatfsdp.examples.own_model import make_data, make_eval_data, make_model
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import Setting, full_gradients, full_parameters, joined, seeded
from tests.harness.gradients import averaged_over_ranks, plain
from tests.harness.models import Feedforward
from tests.harness.slow_link import slow_link
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.distributed

WIDTH, LR = 12, 0.05
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Net(nn.Module):
    """Units of several blocks of numbers, with odd ends, which note the parameters that they compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feedforward(WIDTH, 50) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.seen: dict[str, Tensor] = {}
        for name, module in (("head.", self.head), *((f"blocks.{i}.", b) for i, b in enumerate(self.blocks))):
            module.register_forward_pre_hook(Notes(self.seen, name, [own for own, _ in module.named_parameters()]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Notes:
    """Copies the parameters that a module sees, registered or not."""

    def __init__(self, seen: dict[str, Tensor], unit: str, names: list[str]) -> None:
        self.seen, self.unit, self.names = seen, unit, names

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.seen.update({self.unit + name: attrgetter(name)(module).detach().clone() for name in self.names})


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return model(data(rank, step).to(dtype)).float().square().mean()


def alike(tensors: dict[str, Tensor], what: str) -> Iterator[str]:
    """A line if `tensors` differ between ranks; all ranks hold all of them. Collective."""
    flat = torch.cat([tensor.flatten().float() for _, tensor in sorted(tensors.items())])
    others = [torch.empty_like(flat) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(others, flat)
    if not all(torch.equal(other, flat) for other in others):
        yield f"{what} differ between ranks"


def off(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> Iterator[str]:
    """Parameters that are farther from full precision than half a scale of the largest number of their unit (fp8: a
    sixteenth of their own)."""
    for unit in ("blocks.0.", "blocks.1.", "head."):
        names = [name for name in expected if name.startswith(unit)]
        largest = max(float(expected[name].abs().max()) for name in names)
        for name in names:
            bound = torch.full_like(expected[name], largest / 254 if dtype is torch.int8 else largest / 448 / 1024)
            if dtype is FP8:
                bound = torch.maximum(bound, expected[name].abs() / 16)
            if found[name].dtype is BF16:
                bound = bound + expected[name].abs() / 128
            if not ((found[name].float() - expected[name]).abs() <= bound * (1 + 1e-4)).all():
                yield f"{name} is off by more than {bound.max():.2g}"
            if torch.equal(found[name].float(), expected[name]) and "bias" not in name and "norm" not in name:
                yield f"{name} was not quantized"


def gathers(rank: int, world: int, setting: Setting, dtype: torch.dtype, compute: torch.dtype | None) -> list[str]:
    lines: list[str] = []
    with setting.doubles():
        mixed = MixedPrecision(compute, torch.float32, gather_dtype=dtype)
        model = setting.wrap(seeded(Net), {Feedforward}, mixed_precision=mixed)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        masters = full_parameters(model)
        for step in range(2):
            loss(model, rank, step).backward()
            seen = {name: tensor.clone() for name, tensor in model.module.seen.items()}
            lines += [*off(seen, masters, dtype), *alike(seen, "gathered parameters")]
            # The oracle: plain models of all ranks with the parameters that were gathered.
            gradients: dict[str, list[Tensor | None]] = {name: [] for name in masters}
            for each in range(world):
                oracle = seeded(Net).to(compute or torch.float32)
                oracle.load_state_dict(seen)
                loss(oracle, each, step).backward()
                for name, p in oracle.named_parameters():
                    gradients[name].append(None if p.grad is None else p.grad.float())
            for name, found in full_gradients(model).items():
                expected = averaged_over_ranks(gradients[plain(name)])
                if found is None or expected is None or not torch.equal(found, expected):
                    lines.append(f"step {step}: gradient of {name}")
                assert expected is not None
                masters[plain(name)].add_(expected, alpha=-LR)  # as SGD does, to the bit
            optimizer.step()
            optimizer.zero_grad()
            for name, tensor in full_parameters(model).items():
                if not torch.equal(tensor, masters[plain(name)]):
                    lines.append(f"step {step}: {name} has not kept full precision")
    return [f"rank {rank}: {setting}: {line}" for line in lines]


@pytest.mark.parametrize(
    ("world", "setting", "dtype", "compute"),
    [
        (2, Setting(), torch.int8, None),
        (2, Setting(orig=False, large=True, doubled=True), torch.int8, BF16),
        (3, Setting("SHARD_GRAD_OP", doubled=True), torch.int8, None),
        (3, Setting(orig=False, offload=True), FP8, None),
        (4, Setting("HYBRID_SHARD", large=True), FP8, BF16),
        (4, Setting(post_forward=2, large=True), torch.int8, None),
    ],
    ids=str,
)
def test_ranks_compute_with_the_same_values_near_their_shards(
    run: Run, world: int, setting: Setting, dtype: torch.dtype, compute: torch.dtype | None
) -> None:
    assert not joined(run(world, gathers, setting, dtype, compute))


def unquantized(rank: int, world: int) -> list[str]:
    """If each rank holds all parameters, nothing is gathered, and nothing quantized."""
    model = Setting("NO_SHARD").wrap(
        seeded(Net), {Feedforward}, mixed_precision=MixedPrecision(gather_dtype=torch.int8)
    )
    loss(model, rank, 0).backward()
    masters = full_parameters(model)
    return [name for name, tensor in model.module.seen.items() if not torch.equal(tensor, masters[name])]


def test_nothing_is_quantized_where_nothing_is_gathered(pool2: Run) -> None:
    with pytest.warns(UserWarning, match="gather_dtype has no effect with NO_SHARD"):
        check_arguments(nn.Linear(1, 1), sharding_strategy="NO_SHARD", mixed_precision=MixedPrecision(gather_dtype=FP8))
    assert not joined(pool2(unquantized))


def row_bytes(numel: int, bits: int = 8) -> int:
    """The formula: codes, filled up to whole words, and four bytes for each 256 numbers."""
    return -(-numel * bits // 32) * 4 + -(-numel // 256) * 4


def counted(rank: int, world: int) -> list[str]:
    """Bytes of gathers, of a model and of its copies and pickles."""
    mixed = MixedPrecision(gather_dtype=torch.int8)
    made = Setting(large=True).wrap(seeded(Net), {Feedforward}, mixed_precision=mixed)
    inner, *_ = shards = [sum(flat.layout.shard_numel for flat in unit.flat_params) for unit in inspect.units(made)]
    expected = 5, world * (4 * row_bytes(inner) + row_bytes(shards[-1]))
    assert len(shards) == 3 and expected[1] < 0.27 * 4 * world * (4 * inner + shards[-1])
    lines = []
    for name, model in {"model": made, "copy": copy.deepcopy(made), "pickle": pickle.loads(pickle.dumps(made))}.items():
        figures = flatfsdp.stats(model)
        for step in range(2):
            loss(model, rank, step).backward()
            calls, count = figures.comm["all_gather"]
            if (calls, count) != expected:
                lines.append(f"{name}: {calls} gathers of {count} bytes, expected {expected}")
            figures.reset()
    table = flatfsdp.summary(made)
    return lines if table.count("float32 by int8") == 3 else [*lines, table]


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_are_a_quarter_and_the_scales(run: Run, world: int) -> None:
    assert not joined(run(world, counted))


def not_finite(rank: int, world: int) -> list[str]:
    """A number that is not finite, in one rank's shard."""
    model = Setting(large=True).wrap(
        seeded(Net), {Feedforward}, mixed_precision=MixedPrecision(gather_dtype=torch.int8)
    )
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model):
        model.module.blocks[1].up.weight[-1, -1] = torch.inf
    with flatfsdp.detect_nonfinite(model), pytest.raises(NonFiniteError) as caught:
        loss(model, rank, 0)
    lines = (
        []
        if "has inf in parameter 'blocks.1.up.weight' before the forward" in str(caught.value)
        else [str(caught.value)]
    )
    loss(model, rank, 0).backward()
    seen = {name: tensor for name, tensor in model.module.seen.items() if not tensor.isfinite().all()}
    numbers = torch.cat([tensor.flatten() for tensor in seen.values()])
    if (
        not {"blocks.1.up.weight"}
        <= seen.keys()
        <= {name for name in model.module.seen if name.startswith("blocks.1.")}
    ):
        lines.append(f"not finite: {sorted(seen)}")
    if numbers.isinf().any() or not 100 < numbers.isnan().sum() <= 256:
        lines.append(f"{numbers.isnan().sum()} NaN")
    return lines


def test_a_block_that_is_not_finite_arrives_as_nan_and_its_parameter_is_named(pool2: Run) -> None:
    assert not joined(pool2(not_finite))


def mixed_model(rank: int, world: int) -> list[str]:
    """Units with and without, and kinds that are not floating point, side by side and joined."""
    net = seeded(Net)
    net.register_parameter("table", nn.Parameter(torch.arange(77, dtype=torch.int32), requires_grad=False))
    net.register_parameter("turn", nn.Parameter(torch.randn(99, dtype=torch.complex64), requires_grad=False))
    net.blocks[0] = FullyShardedDataParallel(net.blocks[0], use_orig_params=True)
    quantized = MixedPrecision(gather_dtype=torch.int8)
    model = Setting().wrap(net, {Feedforward}, mixed_precision=quantized)
    taken: dict[str, Tensor] = {}
    model.module.head.register_forward_pre_hook(
        lambda *_: taken.update(table=model.module.table.clone(), turn=model.module.turn.clone())
    )
    masters = full_parameters(model)
    lines = []
    for step in range(3):  # joined from the second on
        loss(model, rank, step).backward()
        seen = model.module.seen
        for name in masters.keys() - {"table", "turn"}:
            if torch.equal(seen[name], masters[name]) != name.startswith("blocks.0.") and name.endswith("weight"):
                lines.append(f"step {step}: {name}")
        if not torch.equal(taken["table"], masters["table"]):
            lines.append(f"step {step}: integers have changed")
        error = torch.view_as_real(taken["turn"] - masters["turn"]).abs().max()
        if not 0 < error <= torch.view_as_real(masters["turn"]).abs().max() / 254 * 1.0001:
            lines.append(f"step {step}: complex numbers are off by {error}")
    return [f"rank {rank}: {line}" for line in lines]


def test_units_with_and_without_it_and_other_kinds(pool3: Run) -> None:
    assert not joined(pool3(mixed_model))


# -- gradients ---------------------------------------------------------------------------------------------------------


def reductions(
    rank: int, world: int, setting: Setting, bits: int, reduce: torch.dtype, shared: bool = True
) -> list[str]:
    """Gradients are near those of full precision, by the scales of the hops, and the same on all ranks; under doubles,
    over a window and with some that are not there."""
    lines: list[str] = []
    hops = {"FULL_SHARD": 1, "NO_SHARD": 2, "HYBRID_SHARD": 3}[setting.strategy]
    with setting.doubles(), contextlib.nullcontext() if shared else over_gloo():
        model = setting.wrap(
            seeded(Net), {Feedforward}, mixed_precision=MixedPrecision(reduce_dtype=reduce, reduce_bits=bits)
        )
        oracles = [seeded(Net) for _ in range(world)]
        for step in range(3):
            with model.no_sync():
                loss(model, rank, step).backward()
            loss(model, rank, step + 10).backward()
            for each, oracle in enumerate(oracles):
                oracle.zero_grad()
                (loss(oracle, each, step) + loss(oracle, each, step + 10)).backward()
            found = {plain(name): grad for name, grad in full_gradients(model).items() if grad is not None}
            lines += alike(found, "gradients")
            units = ("blocks.0.", "blocks.1.", "head.") if setting.large else ("",)  # joined units share blocks
            for unit in units:
                names = [name for name in found if name.startswith(unit)]
                grads = [[dict(o.named_parameters())[name].grad for name in names] for o in oracles]
                largest = sum(max(float(grad.abs().max()) for grad in of_rank if grad is not None) for of_rank in grads)
                # Half a scale of each rank's numbers, and of their sums, which the hops before have changed.
                step_size = 1 / (2 * (2 ** (bits - 1) - 1))
                bound = ((1 + step_size) ** hops - 1) * largest / world * 1.001
                for name, *each in zip(names, *grads, strict=True):
                    exact = torch.stack([grad for grad in each if grad is not None]).mean(0)
                    error = float((found[name] - exact).abs().max())
                    limit = bound + float(exact.abs().max()) * (1e-5 if reduce is torch.float32 else 2**-6)
                    if error > limit:
                        lines.append(f"step {step}: gradient of {name} is off by {error:.3g}, more than {limit:.3g}")
                    if error == 0 and name.endswith("weight"):
                        lines.append(f"step {step}: gradient of {name} was not quantized")
            model.zero_grad()
    return [f"rank {rank}: {setting}: {line}" for line in lines]


@pytest.mark.parametrize(
    ("world", "setting", "bits", "reduce"),
    [
        (2, Setting(), 8, torch.float32),
        (2, Setting("NO_SHARD"), 4, torch.float32),
        (2, Setting(orig=False, large=True, doubled=True), 4, BF16),
        (3, Setting(large=True, offload=True), 4, torch.float32),
        (3, Setting("NO_SHARD", orig=False, large=True, doubled=True), 8, torch.float32),
        (4, Setting("HYBRID_SHARD", large=True), 8, torch.float32),
        (4, Setting("HYBRID_SHARD", orig=False), 4, torch.float16),
    ],
    ids=str,
)
def test_gradients_are_near_and_the_same_on_all_ranks(
    run: Run, world: int, setting: Setting, bits: int, reduce: torch.dtype
) -> None:
    assert not joined(run(world, reductions, setting, bits, reduce, shared=world != 3))


def reduced_bytes(rank: int, world: int, strategy: str, bits: int) -> list[str]:
    model = Setting(strategy, large=True).wrap(
        seeded(Net), {Feedforward}, mixed_precision=MixedPrecision(reduce_bits=bits)
    )
    figures = flatfsdp.stats(model)
    loss(model, rank, 0).backward()
    shards = [sum(flat.layout.shard_numel for flat in unit.flat_params) for unit in inspect.units(model)]
    hops: dict[str, tuple[int, list[int]]] = {}  # ranks, and numbers of each one's piece
    if strategy != "NO_SHARD":
        hops["reduce_scatter"] = (world if strategy == "FULL_SHARD" else 2), shards
    if strategy != "FULL_SHARD":
        ranks = world if strategy == "NO_SHARD" else 2
        hops["all_reduce"] = ranks, [-(-shard // ranks) for shard in shards]
    lines = []
    for kind, (ranks, pieces) in hops.items():
        expected = 3, ranks * sum(row_bytes(piece, bits) for piece in pieces)
        assert expected[1] < (bits + 1) / 32 * 4 * ranks * sum(pieces)
        if figures.comm[kind] != expected:
            lines.append(f"{kind}: {figures.comm[kind]}, expected {expected}")
    found = figures.comm.keys() - {"all_gather", "scalar", "broadcast"}
    return lines if found == hops.keys() else [*lines, f"{sorted(found)}"]


@pytest.mark.parametrize(
    ("world", "strategy"), [(2, "FULL_SHARD"), (3, "FULL_SHARD"), (3, "NO_SHARD"), (4, "HYBRID_SHARD")]
)
def test_bytes_of_gradients(run: Run, world: int, strategy: str) -> None:
    for bits in (8, 4):
        assert not joined(run(world, reduced_bytes, strategy, bits))


def refused_hook(rank: int, world: int) -> list[str]:
    model = Setting().wrap(seeded(Net), {Feedforward}, mixed_precision=MixedPrecision(reduce_bits=4))
    with pytest.raises(UsageError) as caught:
        model.register_comm_hook(None, allreduce_hook)
    return (
        []
        if "reduce_bits=4) determines how its gradients are sent, but a hook sends them itself" in str(caught.value)
        else [str(caught.value)]
    )


def bad_gradient(rank: int, world: int) -> list[str]:
    """It is named where it came, before it makes its whole block NaN on all ranks."""
    model = Setting(large=True).wrap(seeded(Net), {Feedforward}, mixed_precision=MixedPrecision(reduce_bits=4))
    model.module.seen.clear()
    model.module.head.weight.register_hook(lambda grad: grad / 0 if rank == 1 else grad)
    with flatfsdp.detect_nonfinite(model), pytest.raises(NonFiniteError) as caught:
        loss(model, rank, 0).backward()
    expected = "in the gradient of 'head.weight' before its reduction on rank 1"
    lines = [] if expected in str(caught.value) else [str(caught.value)]
    loss(model, rank, 0).backward()
    found = {name: grad for name, grad in full_gradients(model).items() if grad is not None}
    bad = [name for name, grad in found.items() if not grad.isfinite().all()]
    return lines if bad[-1:] == ["head.weight"] else [*lines, f"not finite: {bad}"]


def test_a_hook_is_refused_and_a_gradient_that_is_not_finite_named(pool2: Run) -> None:
    assert not joined(pool2(refused_hook))
    assert not joined(pool2(bad_gradient))


# -- training ----------------------------------------------------------------------------------------------------------


def evaluated(rank: int, world: int, precisions: list[MixedPrecision], steps: int) -> list[float]:
    """The loss on held-out data after training with AdamW, for each precision."""
    samples = torch.stack([sample["input_ids"] for sample in make_data(4000)])
    kept_back = torch.stack([sample["input_ids"] for sample in make_eval_data()])
    losses = []
    for precision in precisions:
        units = {nn.TransformerEncoderLayer}
        model = FullyShardedDataParallel(
            seeded(make_model), auto_wrap_policy=units, mixed_precision=precision, use_orig_params=True
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def loss_of(batch: Tensor, model: nn.Module = model) -> Tensor:
            return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

        for step in range(steps):
            generator = torch.Generator().manual_seed(step * world + rank)
            loss_of(samples[torch.randint(len(samples), (16,), generator=generator)]).backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(float(loss_of(kept_back)))
    return losses


INT8, FEW, FP8S = (
    MixedPrecision(gather_dtype=torch.int8, reduce_bits=8),
    MixedPrecision(gather_dtype=torch.int8, reduce_bits=4),
    MixedPrecision(gather_dtype=FP8, reduce_bits=4),
)


def test_a_transformer_learns_as_in_full_precision(run: Run) -> None:
    """Its loss on data that it has not seen is within 4 % of full precision's, and far below the beginning's."""
    tried = [INT8, FEW, FP8S] if is_thorough() else [FEW]
    for world, steps in [(2, 200), (3, 200)] if is_thorough() else [(2, 60)]:
        full, *losses = run(world, evaluated, [MixedPrecision(), *tried], steps, timeout=300)[0]
        assert full < 0.7  # of 2.3
        assert all(loss < 1.04 * full for loss in losses), (full, losses)


def over_a_slow_link(rank: int, world: int) -> list[str]:
    """A step takes at least the link's time for its bytes; with few bits that is a fifth, as counted there."""
    sent = {}
    lines = []
    for precision in (MixedPrecision(), FEW):
        with slow_link(1e6) as link:
            model = Setting(large=True).wrap(seeded(Net), {Feedforward}, mixed_precision=precision)
            loss(model, rank, 0).backward()
            before, begin = link.sent, time.monotonic()
            loss(model, rank, 1).backward()
            sent[precision] = link.sent - before
            if time.monotonic() - begin < sent[precision] / 1e6:
                lines.append(f"{precision}: too fast")
    full, few = sent.values()
    numbers = [sum(flat.layout.shard_numel for flat in unit.flat_params) for unit in inspect.units(model)]
    if full != 4 * (world - 1) * (3 * sum(numbers) - numbers[-1]):
        lines.append(f"{full} bytes in full precision")
    return lines if 0.2 < few / full < 0.25 else [*lines, f"{few / full:.2f}"]


def test_what_is_sent_through_a_slow_link(pool3: Run) -> None:
    assert not joined(pool3(over_a_slow_link))
