"""Parameters and gradients in the user's hands: summoned, replaced, clipped, dropped, averaged, stepped in groups."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import FlatFSDPError, FlatFSDPWarning, UsageError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import (
    ALL,
    HALVES,
    HYBRID_HALVES,
    Net,
    Setting,
    at_rest,
    chosen,
    data,
    full_gradients,
    full_parameters,
    joined,
    loss_of,
    seeded,
)
from tests.harness.models import WIDTH, Feedforward
from tests.harness.thorough import is_thorough, some

pytestmark = pytest.mark.distributed

summon = FullyShardedDataParallel.summon_full_params

WIDEST = torch.complex128


def train(model: Any, rank: int, step: int = 0) -> Tensor:
    loss = loss_of(model(data(rank, step)))
    loss.backward()
    return loss.detach()


def raised(act: Callable[[], object]) -> str:
    """The message of the FlatFSDPError that `act` raises; empty if it raises none."""
    try:
        act()
    except FlatFSDPError as error:
        return str(error)
    return ""


def unlike(found: dict[str, Tensor], expected: dict[str, Tensor], *, bound: float = 0.0) -> list[str]:
    """Names whose tensors differ."""
    assert found.keys() == expected.keys()
    return [
        name
        for name, tensor in expected.items()
        if not (found[name].to(WIDEST) - tensor.to(WIDEST)).norm() <= bound * tensor.to(WIDEST).norm()
    ]


# --- the norm of all gradients ----------------------------------------------------------------------------------------


class Patchwork(nn.Module):
    """Sharded, whole and ignored parameters of several dtypes; the fp64 one is a single element, held by one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded, self.whole, self.ignored = Feedforward(WIDTH, 19), Feedforward(WIDTH, 17), nn.Linear(WIDTH, WIDTH)
        self.low = nn.Parameter(torch.randn(WIDTH).bfloat16())
        self.wide = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.ignored(self.whole(self.sharded(x)))) * self.low.to(x.dtype)
        return (x * self.turn).imag * self.wide.to(x.dtype) + self.frozen.sum()


def patchwork(orig: bool) -> Any:
    module = seeded(Patchwork)
    module.sharded = FullyShardedDataParallel(module.sharded, use_orig_params=orig)
    module.whole = FullyShardedDataParallel(module.whole, use_orig_params=orig, sharding_strategy="NO_SHARD")
    return FullyShardedDataParallel(module, use_orig_params=orig, ignored_modules=[module.ignored])


def clipped(rank: int, world: int, p: float) -> list[str]:
    lines = []
    for orig, bound in itertools.product((True, False), (1e-2, 1e4)):
        model = patchwork(orig)
        train(model, rank)
        for parameter in model.ignored.parameters():  # only the user averages these
            parameter.grad = torch.full_like(parameter, 0.01)
        before = full_gradients(model)
        plain = seeded(Patchwork)
        trained = [(name, parameter) for name, parameter in plain.named_parameters() if parameter.requires_grad]
        for name, parameter in trained:
            parameter.grad = before[name].clone()
        norm = model.clip_grad_norm_(bound, p)
        # torch stacks norms of one dtype only.
        expected = torch.linalg.vector_norm(torch.cat([q.grad.to(WIDEST).flatten() for _, q in trained]), p)
        if not torch.isclose(norm.double(), expected, rtol=1e-6):
            lines.append(f"orig {orig}: norm {norm.item()}, expected {expected.item()}")
        scale = min(1.0, bound / (expected.item() + 1e-6))
        after = full_gradients(model)
        scaled = {name: grad * scale for name, grad in before.items()}
        lines += [f"orig {orig}, bound {bound}: {name}" for name in unlike(after, scaled, bound=3e-3)]
    return lines


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, float("inf")])
def test_clip_counts_each_gradient_once(p: float, pool2: Run) -> None:
    assert not joined(pool2(clipped, p))


def clipped_like_torch(rank: int, world: int, hybrid: bool) -> list[str]:
    lines = []
    for setting in chosen(clipped_like_torch, HYBRID_HALVES if hybrid else HALVES):
        with setting.doubles():
            model, plain = setting.wrap(seeded(Net), (Feedforward,)), seeded(Net)
            for p in (1.0, 2.0, float("inf")):
                model.zero_grad()
                train(model, rank)
                before = full_gradients(model)
                for name, parameter in plain.named_parameters():
                    parameter.grad = before[name].clone()
                norm = model.clip_grad_norm_(0.05, p)
                expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, p)
                if norm.dtype != expected.dtype or not torch.isclose(norm, expected, rtol=1e-6):
                    lines.append(f"{setting}, p={p}: norm {norm}, expected {expected}")
                of_plain = {name: q.grad for name, q in plain.named_parameters() if q.grad is not None}
                lines += [f"{setting}, p={p}: {name}" for name in unlike(full_gradients(model), of_plain, bound=1e-6)]
    return lines


@pytest.mark.parametrize("world", [2, 3, 4])
def test_clip_like_torch(world: int, run: Run) -> None:
    assert not joined(run(world, clipped_like_torch, world == 4))


def clipped_in_bf16(rank: int, world: int) -> list[str]:
    """Gradients kept in low precision: scaled by a norm that is rounded to them."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = FullyShardedDataParallel(seeded(Net), mixed_precision=precision, use_orig_params=True)
    train(model, rank)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    norm = model.clip_grad_norm_(0.01)
    scale = (0.01 / (norm.float() + 1e-6)).clamp(max=1.0)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(grad.dtype == torch.bfloat16 for grad in after)
    return [
        f"{i}" for i, (g, a) in enumerate(zip(grads, after, strict=True)) if (g * scale - a).norm() > 1e-2 * a.norm()
    ]


def test_clip_low_precision_gradients(pool2: Run) -> None:
    assert pool2(clipped_in_bf16) == [[], []]


def clipped_without(rank: int, world: int) -> tuple[float, list[str]]:
    model = Setting().wrap(seeded(Net), (Feedforward,))
    with warnings.catch_warnings(record=True) as texts:
        warnings.simplefilter("always")
        norm = model.clip_grad_norm_(1.0)
    return norm.item(), [str(w.message) for w in texts if issubclass(w.category, FlatFSDPWarning)]


def test_clip_without_gradients(pool2: Run) -> None:
    for norm, texts in pool2(clipped_without):
        assert norm == 0.0 and len(texts) == 1 and "no parameter of rank" in texts[0]


# --- whole parameters -------------------------------------------------------------------------------------------------


def summoned(rank: int, world: int, with_grads: bool, under: tuple[Setting, ...]) -> list[str]:
    """Every combination, in one of the settings, or in all: values seen inside, and the writes that are kept."""
    lines: list[str] = []
    for number, setting in enumerate(under):
        with setting.doubles():
            model = setting.wrap(seeded(Net), (Feedforward,))
            train(model, rank)
            for combination in some([*itertools.product((True, False), repeat=4)], 3, number):
                lines += (f"{setting} {line}" for line in _summoned(model, rank, with_grads, *combination))
    return lines


def _summoned(
    model: Any, rank: int, with_grads: bool, writeback: bool, rank0_only: bool, offload: bool, recurse: bool
) -> Iterator[str]:
    before, grads = full_parameters(model), full_gradients(model)
    what = f"{writeback=} {rank0_only=} {offload=} {recurse=}"
    sees = rank == 0 or not rank0_only
    with summon(
        model,
        recurse=recurse,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload,
        with_grads=with_grads,
    ):
        for name, parameter in model.named_parameters():
            if not sees or name not in before or (not recurse and name.startswith("blocks")):
                continue
            if not torch.equal(parameter.detach(), before[name]):
                yield f"{what}: {name} inside"
            if with_grads and (parameter.grad is None or not torch.equal(parameter.grad, grads[name])):
                yield f"{what}: gradient of {name} inside"
            with torch.no_grad():
                parameter.add_(1.0)
                if with_grads and parameter.grad is not None:
                    parameter.grad.mul_(2.0)
    kept = {name for name in before if writeback and (recurse or not name.startswith("blocks"))}
    written = {name: value + 1.0 if name in kept else value for name, value in before.items()}
    grown = {name: 2.0 * value if with_grads and name in kept else value for name, value in grads.items()}
    yield from (f"{what}: {name} after" for name in unlike(full_parameters(model), written))
    yield from (f"{what}: gradient of {name} after" for name in unlike(full_gradients(model), grown))
    yield from (f"{what}: {line}" for line in at_rest(model))
    for flat in inspect.flat_params(model):
        owned = sum(piece.in_shard.numel for piece in flat.layout.owned(flat.rank))
        if owned < flat.shard.numel() and flat.shard.count_nonzero() > owned:
            yield f"{what}: padding was written to"


@pytest.mark.parametrize("with_grads", [False, True])
def test_summon_in_all_combinations(with_grads: bool, pool2: Run) -> None:
    assert not joined(pool2(summoned, with_grads, ALL if is_thorough() else HALVES[with_grads], timeout=60))


def dropped(rank: int, world: int, original: bool) -> list[bool]:
    """Gradients that are dropped, and given, inside; by the rank that sees them."""
    found = []
    for rank0_only in (False, True):
        model = Setting(orig=original).wrap(seeded(Net), (Feedforward,))
        train(model, rank)
        grads = full_gradients(model)
        first, second, *others = grads
        with summon(model, rank0_only=rank0_only, with_grads=True):
            if rank == 0 or not rank0_only:
                named = dict(model.named_parameters())
                named[first].grad = None
                named[second].grad = torch.ones_like(named[second])
        now = full_gradients(model)
        found.append(now[first] is None if original else not bool(now[first].any()))
        found.append(bool(torch.equal(now[second], torch.ones_like(now[second]))))
        found += [torch.equal(now[name], grads[name]) for name in others]
    return found


@pytest.mark.parametrize("original", [True, False])
def test_gradients_that_are_dropped_inside_a_summon_are_gone(original: bool, pool2: Run) -> None:
    assert all(map(all, pool2(dropped, original, timeout=60)))


def given(rank: int, world: int, original: bool) -> bool:
    """Gradients that are given inside to parameters that had none."""
    model = Setting(orig=original).wrap(seeded(Net), (Feedforward,))
    with summon(model, with_grads=True):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, number)
    grads = full_gradients(model).values()
    return all(grad is not None and bool((grad == number).all()) for number, grad in enumerate(grads))


@pytest.mark.parametrize("original", [True, False])
def test_gradients_that_are_given_inside_a_summon_are_there_after_it(original: bool, pool2: Run) -> None:
    assert all(pool2(given, original, timeout=60))


def misplaced(rank: int, world: int) -> dict[str, str]:
    """The messages about unsharded parameters at a wrong time; then a good step, equal to one of an untouched model."""
    model, other = (Setting().wrap(seeded(Net), (Feedforward,)) for _ in range(2))
    train(other, rank)

    def summoned_again() -> None:
        with summon(model):
            pass

    texts = {}
    with summon(model):
        texts["inside itself"] = raised(summoned_again)
        texts["of a part inside itself"] = raised(lambda: summon(model.blocks[0]).__enter__())
        texts["forward inside"] = raised(lambda: model(data(rank, 0)))
    hook = model.blocks[1].register_forward_pre_hook(lambda module, args: summoned_again())
    texts["inside forward"] = raised(lambda: model(data(rank, 0)))
    hook.remove()
    output = model(data(rank, 0))
    output.register_hook(lambda grad: summoned_again())
    texts["inside backward"] = raised(lambda: loss_of(output).backward())
    output = loss_of(model(data(rank, 0)))
    with summon(model):
        texts["backward inside"] = raised(output.backward)
    train(model, rank)
    found, expected = full_gradients(model), full_gradients(other)
    assert not unlike(found, expected)
    return texts


def test_whole_parameters_at_a_wrong_time(pool2: Run) -> None:
    for text in pool2(misplaced):
        assert {name for name, message in text.items() if "summon_full_params" not in message} == set()


def replaced_inside(rank: int, world: int) -> tuple[str, list[str]]:
    """A replaced `.data` inside counts; one of a wrong shape is refused, and the model lives on."""
    model = Setting().wrap(seeded(Net), (Feedforward,))
    before = full_parameters(model)
    with summon(model):
        for parameter in model.parameters():
            parameter.data = parameter.data * 2

    def wrong() -> None:
        with summon(model):
            model.head.weight.data = torch.zeros(2, 2)

    doubled = unlike(full_parameters(model), {name: 2 * value for name, value in before.items()})
    texts = raised(wrong)
    train(model, rank)
    return texts, doubled


def test_data_replaced_inside_summon(pool2: Run) -> None:
    for texts, doubled in pool2(replaced_inside):
        assert "(2, 2)" in texts and not doubled


def parameters_replaced_inside(rank: int, world: int) -> list[str]:
    """Another Parameter assigned inside is kept, or dropped without `writeback`, like a write in place; the model lists
    at once the parameters that it computes with, and zero_grad() reaches them."""
    lines = []
    for orig, how in itertools.product((True, False), ({}, {"writeback": False}, {"rank0_only": True})):
        models = []
        for act in (lambda head: head.weight.data.mul_(0.75), _parameter):
            model = FullyShardedDataParallel(seeded(Net), use_orig_params=orig)
            train(model, rank)
            listed = [*map(id, model.parameters())]
            with summon(model, **how):
                if rank == 0 or not how.get("rank0_only"):
                    act(model.head)
                    late = torch.optim.SGD(model.head.parameters(), lr=1.0)
            if listed != [*map(id, model.parameters())]:
                lines.append(f"{orig}, {how}: other parameters")
            model.zero_grad()
            train(model, rank, 1)
            models.append(model)
        found, expected = map(full_parameters, reversed(models))
        lines += [f"{orig}, {how}: {name}" for name in unlike(found, expected)]
        found, expected = map(full_gradients, reversed(models))
        lines += [f"{orig}, {how}: the gradient of {name}" for name in unlike(found, expected)]
        if rank == 0 and "replaced 'head.weight'" not in (texts := raised(late.step)):
            lines.append(f"{orig}, {how}: {texts!r}")
    return lines


def test_parameters_replaced_inside_summon(pool2: Run) -> None:
    assert not joined(pool2(parameters_replaced_inside))


# --- replaced between steps -------------------------------------------------------------------------------------------


def replaced(rank: int, world: int) -> list[str]:
    """Shards replaced by `.data`, by another Parameter, in place, or as a flat parameter, are used in the next
    step."""
    ways: dict[str, Callable[[Any], None]] = {"in place": _in_place, "data": _data, "parameter": _parameter}
    lines = []
    for setting, (way, act) in itertools.product(chosen(replaced), ways.items()):
        if way == "parameter" and not setting.orig:
            continue
        with setting.doubles():
            model, plain = setting.wrap(seeded(Net), (Feedforward,)), seeded(Net)
            for when in ("before the first step", "between steps"):
                act(model)
                act(plain)
                if not torch.equal(model(data(rank, 0)), plain(data(rank, 0))):
                    lines.append(f"{setting}, {way}, {when}: another output")
                train(model, rank, 1)
                train(plain, rank, 1)
            expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
            lines += [f"{setting}, {way}: {name}" for name in unlike(full_parameters(model), expected)]
    return lines


@torch.no_grad()
def _in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.75)


def _data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.75


def _parameter(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach() * 0.75)


def test_replaced_between_steps(pool2: Run) -> None:
    assert not joined(pool2(replaced))


def refused(rank: int, world: int) -> list[str]:
    lines = []
    for setting in chosen(refused):
        model = setting.wrap(seeded(Net), (Feedforward,))
        train(model, rank)
        parameter = next(iter(model.parameters()))
        good = parameter.data
        parameter.data = torch.zeros(3, 1, 4)
        texts = raised(lambda: model(data(rank, 0)))  # noqa: B023
        if "(3, 1, 4)" not in texts:
            lines.append(f"{setting}: a wrong shape: {texts!r}")
        parameter.data = good
        train(model, rank, 1)
    return lines


def test_a_wrong_shape_is_refused(pool2: Run) -> None:
    assert not joined(pool2(refused))


def between(rank: int, world: int) -> list[str]:
    """Parameters written to between forward and backward, where they are kept whole: refused by us or by autograd."""
    lines = []
    for setting in chosen(between):
        with setting.doubles():
            model = setting.wrap(seeded(Net), (Feedforward,))
            train(model, rank)
            loss = loss_of(model(data(rank, 1)))
            try:
                with torch.no_grad():
                    for parameter in reversed(list(model.parameters())):  # the root's first: those are not hidden
                        parameter.mul_(0.5)
                loss.backward()
                lines.append(f"{setting}: the backward continued with other weights")
            except (UsageError, RuntimeError):
                pass
    return lines


def test_changed_between_forward_and_backward(pool2: Run) -> None:
    assert not joined(pool2(between))


class SelfWriting(nn.Linear):
    """Writes to its own weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


def written_inside(rank: int, world: int, setting: Setting, training: bool) -> str:
    model = setting.wrap(nn.Sequential(SelfWriting(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), (SelfWriting,))
    with torch.set_grad_enabled(training):
        return raised(lambda: model(data(rank, 0)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("setting", [s for s in ALL if s.strategy != "NO_SHARD"], ids=str)
def test_written_to_inside_a_forward(setting: Setting, training: bool, pool2: Run) -> None:
    for text in pool2(written_inside, setting, training):
        assert text.startswith("unit '0': parameters were written to inside a forward: weight.")


# --- optimizers -------------------------------------------------------------------------------------------------------


def grouped(rank: int, world: int) -> list[str]:
    """Groups by name and several optimizers step as on a plain model; both ways to drop gradients do."""
    lines = []
    for setting, to_none in itertools.product((s for s in ALL if s.orig), (True, False)):
        with setting.doubles():
            model, plain = setting.wrap(seeded(Net), (Feedforward,)), seeded(Net)
            both = [(each, *_optimizers(each)) for each in (model, plain)]
            for step in range(3):
                train(model, rank, step)
                grads = full_gradients(model)
                for name, parameter in plain.named_parameters():
                    parameter.grad = grads[name]
                for _, first, second in both:
                    for optimizer in (first, second):
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=to_none)
                    if to_none != all(p.grad is None for p in model.parameters()):
                        lines.append(f"{setting}, {to_none=}: gradients after zero_grad")
            expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
            lines += [f"{setting}, {to_none=}: {name}" for name in unlike(full_parameters(model), expected, bound=1e-6)]
    return lines


def _optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    head = [p for name, p in named.items() if name == "head.weight"]
    rest = [p for name, p in named.items() if not name.endswith("bias") and name != "head.weight"]
    adam = torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": head, "lr": 1e-3}], lr=1e-2)
    return adam, torch.optim.SGD(rest, lr=0.05, momentum=0.9)


def test_optimizers_with_groups_by_name(pool2: Run) -> None:
    assert not joined(pool2(grouped))


def averaged(rank: int, world: int) -> list[str]:
    """The evaluation of a running average of the weights, held in a copy, next to training."""
    lines = []
    for setting in chosen(averaged):
        with setting.doubles():
            model = setting.wrap(seeded(Net), (Feedforward,))
            ema = copy.deepcopy(model).eval().requires_grad_(False)
            average = full_parameters(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            plain = seeded(Net)
            for step in range(3):
                optimizer.zero_grad()
                train(model, rank, step)
                optimizer.step()
                with torch.no_grad():
                    for mean, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                        mean.lerp_(parameter, 0.5)
                    current = full_parameters(model)
                    average = {name: value.lerp(current[name], 0.5) for name, value in average.items()}
                    plain.load_state_dict(average)
                    if not torch.equal(ema(data(rank, step)), plain(data(rank, step))):
                        lines.append(f"{setting}, step {step}: another output of the average")
            lines += [f"{setting}: {line}" for line in at_rest(ema)]
    return lines


def test_evaluating_an_average_of_the_weights(pool2: Run) -> None:
    assert not joined(pool2(averaged))


# --- the wrapper as a module ------------------------------------------------------------------------------------------


def applied(rank: int, world: int) -> list[str]:
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.copy_(torch.arange(module.weight.numel()).view(module.weight.shape) / 100.0)
                module.bias.fill_(0.5)

    lines = []
    for setting in chosen(applied):
        model, plain = setting.wrap(seeded(Net), (Feedforward,)), seeded(Net)
        model.apply(initialize)
        plain.apply(initialize)
        expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        lines += [f"{setting}: {name}" for name in unlike(full_parameters(model), expected)]
        if not torch.equal(model(data(rank, 0)), plain(data(rank, 0))):
            lines.append(f"{setting}: another output")
    return lines


def test_apply_sees_whole_parameters(pool2: Run) -> None:
    assert not joined(pool2(applied))


def looked_at(rank: int, world: int) -> list[str]:
    plain = nn.Sequential(Feedforward(WIDTH, 18), nn.Linear(WIDTH, 3))
    plain.note = "mine"  # type: ignore[assignment]
    names = [name for name, _ in plain.named_parameters()]
    model = Setting().wrap(plain, (Feedforward,))
    lines = []
    if [name for name, _ in model.named_parameters()] != names:
        lines.append("other names")
    if model.note != "mine" or model[1] is not plain[1] or model.module is not plain:
        lines.append("attributes")
    if len(FullyShardedDataParallel.fsdp_modules(model)) != 2 or not model.check_is_root():
        lines.append("wrappers")
    if hasattr(model, "nothing_of_this_name"):
        lines.append("an attribute that does not exist")
    return lines


def test_the_wrapper_shows_its_module(pool2: Run) -> None:
    assert not joined(pool2(looked_at))


def flat_inside(rank: int, world: int) -> list[Any]:
    model = FullyShardedDataParallel(nn.Linear(3, 3), use_orig_params=False)  # 12 elements
    flat = model._flat_param
    model(torch.ones(1, 3)).sum().backward()
    before = flat.shape
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        seen = flat.shape, torch.equal(flat[:9].view(3, 3), model.module.weight)
        flat.mul_(0).add_(torch.arange(12.0))
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        flat.data = flat.detach() + 1  # in its place
    with FullyShardedDataParallel.summon_full_params(model, writeback=False), torch.no_grad():
        flat.zero_()
    with FullyShardedDataParallel.summon_full_params(model):
        found = model.module.weight.flatten().tolist() + model.module.bias.tolist()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step()
    return [before, *seen, found, flat.shape, model(torch.ones(1, 3)).tolist()]


def test_the_flat_parameter_is_whole_inside_and_what_is_written_to_it_is_kept(pool2: Run) -> None:
    expected = list(range(1, 13))
    for before, inside, is_alias, found, after, output in pool2(flat_inside):
        assert (before, inside, is_alias, found, after) == ((6,), (12,), True, expected, (6,))
        assert output == [[1.0 + 2 + 3 + 10, 4.0 + 5 + 6 + 11, 7.0 + 8 + 9 + 12]]
