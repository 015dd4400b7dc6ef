"""Parts of a model that each rank runs as its data will have it: the numbers are those of one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.watchdog import store as stores
from flatfsdp.errors import AgreementError, ConfigValueError, UsageError
from tests.conftest import Run
from tests.harness.error_feedback import owed_by_all
from tests.harness.gradients import fill, gradients_of, names_of, together, unlike
from tests.harness.meshes import shared_mesh
from tests.harness.thorough import some, spread

pytestmark = pytest.mark.distributed

WIDTH = 6
Used = tuple[int, ...]  # the layers that a rank's data select, in order


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale)


class Tower(nn.Module):
    """Layers that run one after the other, inside a unit of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, image: Tensor, used: Used) -> Tensor:
        x = image + self.bias
        for index in used:
            x = self.layers[index](x)
        return x


class Pictured(nn.Module):
    """Text, and images where a batch has any; some of the tower's layers are left out at times, too."""

    def __init__(self) -> None:
        super().__init__()
        self.images = Tower()
        self.text = nn.Sequential(Layer(), Layer())

    @property
    def branch(self) -> nn.Module:
        return self.images

    def forward(self, x: Tensor, used: Used) -> Tensor:
        seen = self.images(x * 2, used) if used else 0
        return self.text(x + seen)


class Mixture(nn.Module):
    """Experts inside a block, which runs twice, the second time with fewer of them."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.block = Block()
        self.head = Layer()

    @property
    def branch(self) -> nn.Module:
        return self.block.experts

    def forward(self, x: Tensor, used: Used) -> Tensor:
        for call in range(2):
            if self.recompute is None:
                x = self.block(x, used[call:])
            else:
                x = checkpoint(self.block, x, used[call:], use_reentrant=self.recompute)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = Layer()
        self.experts = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor, used: Used) -> Tensor:
        x = self.before(x)
        return x + sum(self.experts[index](x) / (1 + index) for index in used)


class Chosen(nn.Module):
    """Layers of which each step uses others, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.last = Layer()

    @property
    def branch(self) -> nn.Module:
        return self.layers

    def forward(self, x: Tensor, used: Used) -> Tensor:
        x = self.first(x)
        for index in used:
            x = x + self.layers[index](x)
        return self.last(x)


# The layers that each rank's data select, step by step; further ranks do as the first one.
IN_ORDER: dict[type[nn.Module], list[list[Used]]] = {
    Pictured: [[(0, 1), ()], [(), ()], [(), (1,)], [(0,), (1,)], [(0, 1), (0, 1)]],
    Mixture: [[(0, 2), (1, 2)], [(1,), (1, 2)], [(), ()], [(), (0, 1, 2, 3)], [(0, 3), (3,)]],
    Chosen: [[(0, 1), (3, 4)], [(2,), ()], [(0, 4), (1, 2, 3)], [(), ()], [(4,), (0,)]],
}
IN_ANY_ORDER: dict[type[nn.Module], list[list[Used]]] = {
    Pictured: [[(1, 0, 1), ()], [(), ()], [(), (1, 0)], [(0, 0), (1,)], [(0, 1), (0, 1)]],
    Mixture: [[(2, 0), (1, 2)], [(1, 1), (2, 1)], [(), ()], [(), (3, 0, 2, 1)], [(3, 0, 3), (3,)]],
    Chosen: [[(1, 0), (4, 3, 4)], [(2, 2), ()], [(4, 0), (1, 3, 2)], [(), ()], [(4,), (0, 0, 0)]],
}


def data(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def wrap(net: nn.Module, **options: Any) -> FullyShardedDataParallel:
    options.setdefault("auto_wrap_policy", {Layer, Tower, Block})
    options.setdefault("use_orig_params", True)
    if "mesh" in options:
        options["device_mesh"] = shared_mesh(*options.pop("mesh"))
    return FullyShardedDataParallel(net, **options)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.5)


def differences(
    rank: int,
    world: int,
    kind: type[nn.Module],
    plan: Sequence[Sequence[Used]],
    any_order: bool,
    options: dict[str, Any],
    micro: int = 1,
    sync: bool = False,
) -> list[str]:
    """Train on `world` ranks and in one process on all their batches; the differences."""
    # A rank that waits for another's message gets it when that one next polls the stores.
    with patch.object(stores, "PERIOD", 0.25):
        return _differences(rank, world, kind, plan, any_order, options, micro, sync)


def _differences(
    rank: int,
    world: int,
    kind: type[nn.Module],
    plan: Sequence[Sequence[Used]],
    any_order: bool,
    options: dict[str, Any],
    micro: int,
    sync: bool,
) -> list[str]:
    torch.manual_seed(0)
    net = kind()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.4)
    inner = copy.deepcopy(net)
    wrapped_names = names_of(inner)
    model = wrap(inner, **options)
    before = model.text if kind is Later else None
    flatfsdp.ensure_unit_participation(model.branch, any_order=any_order, before=before)
    optimizers = [optimizer_of(each) for each in (model, net)]
    found = []
    names = [name for name, _ in net.named_parameters()]
    for step in range(0, len(plan), micro):
        for each in optimizers:
            each.zero_grad()
        for at in range(step, min(step + micro, len(plan))):
            mine = model(data(rank, at), plan[at][rank % len(plan[at])]).square().mean()
            last = sync or at + 1 >= min(step + micro, len(plan))
            with nullcontext() if last else model.no_sync():
                mine.backward()
            for other in range(world):
                loss = net(data(other, at), plan[at][other % len(plan[at])]).square().mean()
                if other == rank and not torch.allclose(loss, mine, rtol=1e-5):
                    found.append(f"{at}: loss {mine} for {loss}")
                (loss / world).backward()
        fill(net, together(model, wrapped_names))
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            grads = gradients_of(model)
        for name, expected in gradients_of(net).items():
            if difference := unlike(grads[name], expected, rtol=1e-4, atol=1e-6):
                found.append(f"{step}: gradient of {name}: {difference}")
        for each in optimizers:
            each.step()
        with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model):
            for name, p, expected in zip(names, model.parameters(), net.parameters(), strict=True):
                if not torch.allclose(p, expected, rtol=1e-4, atol=1e-5):
                    found.append(f"{step}: {name}: {p} for {expected}")
    return found[:5]


@pytest.mark.parametrize(("world", "case"), spread([2, 3], product([False, True], [Pictured, Mixture, Chosen])))
def test_parity_with_one_process(run: Run, world: int, case: tuple[bool, type[nn.Module]]) -> None:
    any_order, kind = case
    plan = (IN_ANY_ORDER if any_order else IN_ORDER)[kind]
    for options in some(({}, {"join_units_below": 0, "backward_prefetch": None}), 2, world + any_order):
        assert run(world, differences, kind, plan, any_order, options) == [[]] * world


@pytest.mark.parametrize(
    ("program", "options"),
    spread(
        [(Pictured, False), (Mixture, True), (Pictured, True), (Mixture, False)],
        [
            {"sharding_strategy": "SHARD_GRAD_OP"},
            {"sharding_strategy": "NO_SHARD"},
            {"cpu_offload": True, "forward_prefetch": True},
            {"use_orig_params": False, "backward_prefetch": "BACKWARD_POST"},
            {"use_orig_params": False, "backward_prefetch": "BACKWARD_MID"},
        ],
    ),
)
def test_parity_with_other_settings(pool2: Run, program: tuple[type[nn.Module], bool], options: dict[str, Any]) -> None:
    kind, any_order = program
    plan = (IN_ANY_ORDER if any_order else IN_ORDER)[kind]
    assert pool2(differences, kind, plan, any_order, options) == [[], []]


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("any_order", [False, True])
def test_accumulation(pool2: Run, any_order: bool, sync: bool) -> None:
    plan = (IN_ANY_ORDER if any_order else IN_ORDER)[Mixture]
    assert pool2(differences, Mixture, plan, any_order, {}, 2, sync) == [[], []]


@pytest.mark.parametrize(
    ("any_order", "options"),
    spread([False, True], [{"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}, {"reshard_after_forward": 2}]),
)
def test_four_ranks(pool4: Run, any_order: bool, options: dict[str, Any]) -> None:
    plan = (IN_ANY_ORDER if any_order else IN_ORDER)[Mixture]
    assert pool4(differences, Mixture, plan, any_order, options) == [[]] * 4


class Recomputed(Mixture):
    def __init__(self) -> None:
        super().__init__(recompute=False)


@pytest.mark.parametrize(
    ("most", "prefetch"), [(0, "BACKWARD_PRE"), (2**20, "BACKWARD_PRE"), (2**20, "BACKWARD_MID"), (0, None)]
)
def test_activation_checkpointing(pool2: Run, most: int, prefetch: str | None) -> None:
    """A rank that runs experts again gathers all of the block before the others have its experts' gradients."""
    plan = [*IN_ANY_ORDER[Mixture], [(), (3, 2)], [(1,), ()]]
    options = {"backward_prefetch": prefetch, "join_units_below": most}
    assert pool2(differences, Recomputed, plan, True, options) == [[], []]


class Flanked(nn.Module):
    """Layers of which each step uses others, between two that are recomputed reentrantly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Layer()
        self.first = Layer()
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.last = Layer()

    @property
    def branch(self) -> nn.Module:
        return self.layers

    def forward(self, x: Tensor, used: Used) -> Tensor:
        x = checkpoint(self.first, self.embedding(x), use_reentrant=True)
        for index in used:
            x = x + self.layers[index](x)
        return checkpoint(self.last, x, use_reentrant=True)


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("most", [0, 1 << 20])
def test_beside_what_is_recomputed_reentrantly(pool2: Run, any_order: bool, most: int) -> None:
    plan = (IN_ANY_ORDER if any_order else IN_ORDER)[Chosen]
    assert pool2(differences, Flanked, plan, any_order, {"join_units_below": most}) == [[], []]


# -- frozen, evaluated and copied units -------------------------------------------------------------------------------


class Frozen(Pictured):
    """A tower that is only looked through, where nothing in front of it is trained, and a trained layer behind it."""

    def __init__(self, without_graph: bool = True) -> None:
        super().__init__()
        self.without_graph = without_graph
        self.images.requires_grad_(False)

    def forward(self, x: Tensor, used: Used) -> Tensor:
        if not used:
            return self.text(x)
        with torch.no_grad() if self.without_graph else nullcontext():
            seen = self.images(x * 2, used)
        return self.text(x + seen)


class Looked(Frozen):
    """The same with a graph, in which there is nothing to train."""

    def __init__(self) -> None:
        super().__init__(without_graph=False)


class FrozenExperts(Mixture):
    """Experts through which gradients go on to layers that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.block.experts.requires_grad_(False)


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("kind", [Frozen, Looked, FrozenExperts])
def test_a_frozen_branch(pool2: Run, kind: type[nn.Module], any_order: bool) -> None:
    plan = (IN_ANY_ORDER if any_order else IN_ORDER)[kind.__mro__[1] if kind is not Looked else Pictured]
    assert pool2(differences, kind, plan, any_order, {}) == [[], []]


def trained_without_a_graph(rank: int, world: int) -> bool:
    """As a branch whose parameters no rank has a gradient for."""
    torch.manual_seed(0)
    net = Frozen()
    net.requires_grad_(True)
    model = wrap(net)
    flatfsdp.ensure_unit_participation(model.branch)
    for step in range(3):
        model(data(rank, step), (0,) if rank else ()).sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return all((p.grad is None) == name.startswith("images") for name, p in model.named_parameters())


def test_a_branch_that_ranks_run_without_gradients(pool2: Run) -> None:
    assert all(pool2(trained_without_a_graph))


def gathers_of_a_frozen_tower(rank: int, world: int) -> list[int]:
    counts = []
    for spared in (False, True):
        model = wrap(Frozen(), join_units_below=0)
        flatfsdp.ensure_unit_participation(model.branch)
        if spared:
            for unit in FullyShardedDataParallel.fsdp_modules(model.images):
                unit.set_unshard_in_backward(False)
        figures = flatfsdp.stats(model)
        for step in range(2):
            figures.reset()
            model(data(rank, step), (0,) if rank else ()).sum().backward()
        counts.append(figures.comm["all_gather"][0])
    return counts


def test_a_frozen_tower_may_be_spared_the_gathers_of_its_backward(pool2: Run) -> None:
    forward, backward = 5, 4  # the root has no parameters; of the text's layers the last is gathered twice, too
    assert pool2(gathers_of_a_frozen_tower) == [[forward + backward + 1, forward + 2]] * 2


def evaluate(rank: int, world: int, kind: type[nn.Module], any_order: bool, full_precision: bool) -> bool:
    torch.manual_seed(0)
    net = kind()
    mixed = flatfsdp.MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True) if full_precision else None
    model = wrap(copy.deepcopy(net), mixed_precision=mixed).eval()
    flatfsdp.ensure_unit_participation(model.branch, any_order=any_order)
    right = True
    for step, plan in enumerate((IN_ANY_ORDER if any_order else IN_ORDER)[kind]):
        with torch.no_grad():
            found, expected = model(data(rank, step), plan[rank]), net(data(rank, step), plan[rank])
        right = right and torch.allclose(found, expected, rtol=1e-5)
    return right and flatfsdp.stats(model).bytes_unsharded == 0


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("full_precision", [False, True])
@pytest.mark.parametrize("kind", [Pictured, Chosen])
def test_evaluation(pool2: Run, kind: type[nn.Module], any_order: bool, full_precision: bool) -> None:
    assert all(pool2(evaluate, kind, any_order, full_precision))


def in_low_precision(rank: int, world: int, any_order: bool) -> bool:
    """Against the same engine in a model that all ranks run, of which the others' part counts nothing."""

    def train(model: FullyShardedDataParallel, used: Used, weight: float) -> list[Tensor | None]:
        for step in range(2):
            model(data(rank, step), used).square().mean().backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return [p.grad.clone() if p.grad is not None else None for p in model.parameters()]

    torch.manual_seed(0)
    net = Chosen()
    mixed = flatfsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    branching, plain = (wrap(copy.deepcopy(net), mixed_precision=mixed) for _ in range(2))
    flatfsdp.ensure_unit_participation(branching.branch, any_order=any_order)
    found, expected = train(branching, (1, 3), 1.0), train(plain, (1, 3), 1.0)
    same = all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(found, expected, strict=True)
    )
    again = train(branching, (0,) if rank else (1, 2), 1.0)
    return same and all(g is None or bool(g.isfinite().all()) for g in again)


@pytest.mark.parametrize("any_order", [False, True])
def test_low_precision(pool2: Run, any_order: bool) -> None:
    assert all(pool2(in_low_precision, any_order))


def copied(rank: int, world: int) -> bool:
    torch.manual_seed(0)
    model = wrap(Later())
    flatfsdp.ensure_unit_participation(model.images, any_order=True, before=model.text)
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    losses = []
    for each in (model, twin, loaded):
        loss = each(data(rank, 0), (1, 0, 1) if rank else ()).sum()
        loss.backward()
        losses.append(loss.item())
    return len(set(losses)) == 1


class Later(Pictured):
    """The tower is registered behind the modules that run after it."""

    def __init__(self) -> None:
        super().__init__()
        self.images = self._modules.pop("images")


def test_copies_and_pickles_keep_it(pool2: Run) -> None:
    assert all(pool2(copied))


@pytest.mark.parametrize("any_order", [False, True])
def test_a_branch_that_is_registered_later_than_it_runs(pool2: Run, any_order: bool) -> None:
    plan = (IN_ANY_ORDER if any_order else IN_ORDER)[Pictured]
    assert pool2(differences, Later, plan, any_order, {}) == [[], []]


def stepped_in_backward(rank: int, world: int) -> bool:
    """Layers that no rank runs are not stepped: neither decay nor momentum moves them."""
    torch.manual_seed(0)
    net = Chosen()
    models = wrap(copy.deepcopy(net)), wrap(net)
    optimizers = [optimizer_of(model) for model in models]
    flatfsdp.optimizer_in_backward(models[0], optimizers[0])
    for model in models:
        flatfsdp.ensure_unit_participation(model.branch)
    for step, plan in enumerate(IN_ORDER[Chosen]):
        for model in models:
            model(data(rank, step), plan[rank]).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    return all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


def test_an_optimizer_that_steps_in_the_backward(pool2: Run) -> None:
    assert all(pool2(stepped_in_backward))


def differentiable(rank: int, world: int, any_order: bool) -> bool:
    """Gradients of a backward that may be differentiated."""
    torch.manual_seed(0)
    net = Chosen()
    model = wrap(copy.deepcopy(net))
    flatfsdp.ensure_unit_participation(model.branch, any_order=any_order)
    for step, plan in enumerate((IN_ANY_ORDER if any_order else IN_ORDER)[Chosen]):
        model(data(rank, step), plan[rank]).square().sum().backward(create_graph=True)
        for other in range(world):
            (net(data(other, step), plan[other]).square().sum() / world).backward(create_graph=True)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        found, expected = gradients_of(model), gradients_of(net)
    return not any(unlike(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)


@pytest.mark.filterwarnings("ignore:Using backward. with create_graph=True:UserWarning")
@pytest.mark.parametrize("any_order", [False, True])
def test_a_backward_that_may_be_differentiated(pool2: Run, any_order: bool) -> None:
    assert all(pool2(differentiable, any_order))


def differentiated(rank: int, world: int, any_order: bool, twice: bool) -> list[str]:
    """Gradients of inputs, which reach the tower on some ranks and nothing behind it; with `twice` in a penalty."""
    torch.manual_seed(0)
    net = Pictured()
    model = wrap(copy.deepcopy(net))
    flatfsdp.ensure_unit_participation(model.branch, any_order=any_order)

    def slope(net: nn.Module, x: Tensor, used: Used) -> tuple[Tensor, Tensor]:
        x.requires_grad_()
        output = net(x, used).square().sum()
        (found,) = torch.autograd.grad(output, x, create_graph=twice, retain_graph=True)
        return found, found.square().sum() if twice else output

    found = []
    for step, plan in enumerate((IN_ANY_ORDER if any_order else IN_ORDER)[Pictured]):
        for each in (model, net):
            each.zero_grad()
        mine, loss = slope(model, data(rank, step), plan[rank])
        loss.backward()
        for other in range(world):
            expected, loss = slope(net, data(other, step), plan[other])
            if other == rank and not torch.allclose(mine, expected, rtol=1e-4, atol=1e-6):
                found.append(f"{step}: {mine} for {expected}")
            (loss / world).backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            for (name, p), q in zip(model.named_parameters(), net.parameters(), strict=True):
                none = p.grad is None or q.grad is None
                if p.grad is not q.grad if none else not torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5):
                    found.append(f"{step}: gradient of {name}: {p.grad} for {q.grad}")
    return found


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_gradients_of_inputs(pool2: Run, any_order: bool, twice: bool) -> None:
    assert pool2(differentiated, any_order, twice) == [[], []]


def without_any(rank: int, world: int, mixed: flatfsdp.MixedPrecision | None) -> tuple[bool, bool]:
    """Gradients of inputs bring none of parameters, but ranks cannot know that: they reduce zeros, in a window too.
    Whether residuals stay the same, and whether the sum of the window does."""
    torch.manual_seed(0)
    net = Pictured()
    model = wrap(copy.deepcopy(net), mixed_precision=mixed)
    flatfsdp.ensure_unit_participation(model.branch)
    figures, used = flatfsdp.stats(model), (0, 1)

    def slope(step: int) -> None:
        x = data(rank, step).requires_grad_()
        torch.autograd.grad(model(x, used).sum(), x)

    model(data(rank, 0), used).square().sum().backward()
    model.zero_grad()
    owed = owed_by_all(model) if mixed else {}
    figures.reset()
    slope(1)
    assert figures.comm["reduce_scatter"][0]
    same = all(torch.equal(each, owed[name]) for name, each in (owed_by_all(model) if mixed else {}).items())
    same = same and all(p.grad is None for p in model.parameters())
    with model.no_sync():
        model(data(rank, 2), used).square().sum().backward()
    slope(3)
    model(data(rank, 4), used).square().sum().backward()
    for each in range(world):
        for step in (2, 4):
            (net(data(each, step), used).square().sum() / world).backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        pairs = list(zip(model.parameters(), net.parameters(), strict=True))
        return same, not any(unlike(p.grad, q.grad, rtol=1e-4, atol=1e-5) for p, q in pairs)


def test_a_backward_that_reduces_zeros_changes_no_residual_and_no_window(pool2: Run) -> None:
    assert pool2(without_any, None) == [(True, True)] * 2
    few = flatfsdp.MixedPrecision(reduce_bits=4, reduce_error_feedback=True)
    assert [same for same, _ in pool2(without_any, few)] == [True] * 2


def left_unsharded(rank: int, world: int, any_order: bool) -> bool:
    """After gradients of inputs, which one rank's tower brings."""
    torch.manual_seed(0)
    net = Pictured()
    model = wrap(copy.deepcopy(net), join_units_below=0)
    flatfsdp.ensure_unit_participation(model.branch, any_order=any_order)
    model.branch.set_reshard_after_backward(False)
    x, used = data(rank, 0).requires_grad_(), (0, 1) if rank == 0 else ()
    torch.autograd.grad(model(x, used).sum(), x)
    return torch.allclose(model(x, used), net(x, used), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("any_order", [False, True])
def test_what_stays_unsharded_does_so_on_all_ranks_where_no_gradients_come(pool2: Run, any_order: bool) -> None:
    """Else the next forward gathers on some, and other units there."""
    assert pool2(left_unsharded, any_order) == [True, True]


# -- costs -----------------------------------------------------------------------------------------------------------


def peaks(rank: int, world: int, any_order: bool) -> list[int]:
    """Bytes that are gathered at most, on a rank that runs all layers, one, or none, while the others run all."""
    found = []
    for used in ((0, 1, 2, 3, 4), (2,), ()):
        model = wrap(Chosen(), join_units_below=0, backward_prefetch=None)
        flatfsdp.ensure_unit_participation(model.branch, any_order=any_order)
        figures = flatfsdp.stats(model)
        for step in range(2):
            figures.reset()
            model(data(rank, step), used if rank == 0 else (0, 1, 2, 3, 4)).sum().backward()
        found.append(figures.bytes_unsharded_peak)
    return found


@pytest.mark.parametrize(("any_order", "layers"), [(False, 1), (True, 5)])
def test_memory(pool2: Run, any_order: bool, layers: int) -> None:
    """In order a layer at a time, in any order all of them."""
    layer = 4 * (WIDTH * WIDTH + 8 + WIDTH)  # each parameter begins on 16 bytes
    assert pool2(peaks, any_order) == [[layers * layer] * 3] * 2


def exchanges(rank: int, world: int) -> list[int]:
    model = wrap(Mixture())
    flatfsdp.ensure_unit_participation(model.branch)
    figures, seen = flatfsdp.stats(model), []
    for step, plan in enumerate(IN_ORDER[Mixture]):
        figures.reset()
        model(data(rank, step), plan[rank]).sum().backward()
        seen.append(figures.comm.get("scalar", (0, 0))[0])
        with torch.no_grad():
            model(data(rank, step), plan[rank])
    return seen


def test_a_learned_step_exchanges_only_the_bitmap(pool2: Run) -> None:
    for seen in pool2(exchanges):
        assert seen[2:] == [1] * 3


# -- errors ----------------------------------------------------------------------------------------------------------


def reported_at(job: Any) -> str:
    with pytest.raises((UsageError, ConfigValueError, AgreementError)) as caught:
        job()
    return str(caught.value)


def out_of_turn(rank: int, world: int, case: str) -> str:
    nets = {"reentrant": Mixture(recompute=True), "recomputed": Recomputed(), "later": Later(), "tied": Mixture()}
    net = nets.get(case, Mixture())
    if case == "tied":
        net.head.linear.weight = net.block.experts[2].linear.weight
    model = wrap(net)
    flatfsdp.ensure_unit_participation(model.branch, any_order=case == "reentrant")
    used = {"order": (1, 0), "again": (1, 1), "later": (0, 1)}.get(case, (0,))
    x = data(rank, 0).requires_grad_()
    return reported_at(lambda: model(x, () if case == "later" and rank == 0 else used).sum().backward())


AGAIN = (
    "unit 'block.experts.0' is recomputed inside a backward, for an activation checkpoint. It belongs to a part that "
    "was passed to ensure_unit_participation(), so other ranks may not run it, and they would not know that"
)
PLACE = "belongs to a part that was passed to ensure_unit_participation(), and it ran too late or too early: in each"


@pytest.mark.parametrize(
    ("case", "report"),
    [
        ("order", f"unit 'block.experts.0' {PLACE} forward of 'block', the units of the part must run once"),
        ("again", f"unit 'block.experts.1' {PLACE} forward of 'block', the units of the part must run once"),
        ("later", "ranks diverged at step 1: rank 0 entered unit 'text.0'; rank 1 entered unit 'images'"),
        ("recomputed", f"{AGAIN} the whole part is needed now. Declare the part with any_order=True"),
        (
            "reentrant",
            f"{AGAIN} its gradients are computed only now. Pass use_reentrant=False to torch.utils.checkpoint",
        ),
        (
            "tied",
            "unit 'block.experts.2' belongs to a part that was passed to ensure_unit_participation(), and has "
            "parameter",
        ),
    ],
)
def test_what_is_not_as_declared(pool2: Run, case: str, report: str) -> None:
    for message in pool2(out_of_turn, case):
        assert message.startswith(report), message


def wrong(rank: int, world: int) -> list[str]:
    model, bare = wrap(Mixture()), nn.ModuleList([Layer()])
    declare = flatfsdp.ensure_unit_participation
    messages = [
        reported_at(lambda: declare(bare)),
        reported_at(lambda: declare(model)),
        reported_at(lambda: declare(model.block.experts, before=model.block)),
        reported_at(lambda: declare(model.block.experts, before=model.head)),
    ]
    declare(model.block)
    return [*messages, reported_at(lambda: declare(model.block.experts, any_order=True))]


def test_wrong_arguments(pool2: Run) -> None:
    for messages in pool2(wrong):
        bare, outermost, around, outside, inside = messages
        assert "without any FullyShardedDataParallel inside" in bare
        assert "got the outermost FullyShardedDataParallel (Mixture)" in outermost
        assert "before: got a FullyShardedDataParallel" in around
        assert "before: got a FullyShardedDataParallel" in outside
        assert "inside a part that was declared before, with unit" in inside


def accumulated_beside_reentrant(rank: int, world: int) -> str:
    model = wrap(Flanked())
    flatfsdp.ensure_unit_participation(model.branch)
    with model.no_sync(), pytest.raises(UsageError) as caught:
        model(data(rank, 0), (rank,)).sum().backward()
    return str(caught.value)


def test_accumulation_beside_what_is_recomputed_reentrantly_is_refused(pool2: Run) -> None:
    for message in pool2(accumulated_beside_reentrant):
        assert message.startswith("unit 'last' is recomputed inside a backward without reduction")
        assert "use_reentrant=False" in message
