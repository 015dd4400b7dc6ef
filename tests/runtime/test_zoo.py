"""Typical models: training gives the results of one process, and unsupported models raise errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.corners import LR, Net, Setting, data, differences, joined, loss_of, seeded
from tests.harness.models import WIDTH, Feedforward

pytestmark = pytest.mark.distributed

UNDER = (Setting(doubled=True), Setting("SHARD_GRAD_OP", orig=False), Setting("NO_SHARD"))


class Layer(nn.Module):
    """A unit around some layer."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = make()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Dropping(nn.Module):
    """A layer with dropout, maybe recomputed with the same random numbers."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def inner(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.linear(x)), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.inner(x)
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return result


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Editing(nn.Module):
    """Changes its input and its output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return torch.relu_(self.linear(x))


class Tied(nn.Module):
    """One weight in three modules of three units; ties are made by a method, as transformers' models do it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first, self.second = Feedforward(WIDTH, WIDTH), Feedforward(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def tie_weights(self) -> None:
        self.head.weight = self.first.up.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(torch.tanh(self.embedding(x)))))


def tied_when_there(on: str) -> nn.Module:
    """Built on a device, given memory and values, and tied then."""
    with torch.device(on):
        model = Tied()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.tie_weights()
    return model


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "parametrized weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "parametrized spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "complex": Complex,
    "in place": Editing,
    "dropout": partial(Dropping, reentrant=None),
    "dropout, recomputed": partial(Dropping, reentrant=False),
    "dropout, recomputed reentrantly": partial(Dropping, reentrant=True),
}


def stacked(name: str) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer(LAYERS[name]) for _ in range(2)), nn.Linear(WIDTH, 3))


def program(model: Any, rank: int, step: int) -> Tensor:
    torch.manual_seed(100 * step + rank)  # every rank drops something else
    loss = loss_of(model(data(rank, step)))
    loss.backward()
    return loss.detach()


def like_one_process(rank: int, world: int, name: str) -> list[str]:
    # Products of a matrix with a vector round by where the matrix lies, on some processors.
    bound = 1e-6 if "spectral" in name else 0.0
    return differences(rank, world, partial(stacked, name), program, units=(Layer,), under=UNDER, steps=3, bound=bound)


@pytest.mark.parametrize("name", LAYERS)
def test_like_one_process(name: str, pool2: Run) -> None:
    assert not joined(pool2(like_one_process, name))


def tied(rank: int, world: int, on: str) -> list[str]:
    return differences(rank, world, partial(tied_when_there, on), program, under=UNDER, steps=3)


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_one_weight_in_three_modules(on: str, pool2: Run) -> None:
    assert not joined(pool2(tied, on))


def averaged(rank: int, world: int) -> list[str]:
    """torch's running averages of models, compared with those of one process."""
    lines = []
    for orig in (True, False):
        for average in (None, get_ema_multi_avg_fn(0.9)):
            models = seeded(Net), Setting(orig=orig).wrap(seeded(Net), (Feedforward,))
            means = [AveragedModel(model, multi_avg_fn=average) for model in models]
            for model, mean in zip(models, means, strict=True):
                optimizer = torch.optim.SGD(model.parameters(), lr=LR)
                for step in range(3):
                    loss_of(model(data(0, step))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    mean.update_parameters(model)
            with torch.no_grad():
                expected, found = (mean(data(1, 9)) for mean in means)
            if not torch.allclose(found, expected, atol=1e-6):
                lines.append(f"orig={orig}, {average}: another average")
    return lines


def test_averages_of_models(pool2: Run) -> None:
    assert not joined(pool2(averaged))


def products(_context: object, operation: object, *_: Any, **__: Any) -> CheckpointPolicy:
    saved = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(nn.Module):
    """Pairs of units, each pair in a checkpoint that saves products of matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.Sequential(*(Feedforward(WIDTH, 20 + i) for i in range(2))) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, products)
        for pair in self.pairs:
            x = checkpoint(pair, x, use_reentrant=False, context_fn=contexts)
        return x


def whole(model: Any, rank: int, step: int) -> Tensor:
    """Everything in one selective checkpoint."""
    contexts = partial(create_selective_checkpoint_contexts, products)
    loss = loss_of(checkpoint(model, data(rank, step), use_reentrant=False, context_fn=contexts))
    loss.backward()
    return loss.detach()


def selected(rank: int, world: int, all_in_one: bool) -> list[str]:
    make, step = (Net, whole) if all_in_one else (Selective, program)
    under = (*UNDER, Setting(large=True), Setting(rows=True))
    return differences(rank, world, make, step, units=(Feedforward,), under=under, steps=4)


@pytest.mark.parametrize("all_in_one", [False, True])
def test_selective_checkpoints_see_the_model_alone(all_in_one: bool, pool2: Run) -> None:
    """What the engine gathers and sums meanwhile differs between a forward and its recomputation."""
    assert not joined(pool2(selected, all_in_one))


class Asking(nn.Module):
    """A unit that each segment gathers by hand, before it calls it; `how`: the kind of its checkpoint."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feedforward(WIDTH, 20 + i) for i in range(3))
        self.how = CHECKPOINTS[how]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(partial(self._segment, block), x, **self.how())
        return x

    def _segment(self, block: Any, x: Tensor) -> Tensor:
        if isinstance(block, FullyShardedDataParallel):
            handle = block.unshard(async_op=True)
            x = x * 1.0
            handle.wait()
        return block(x)  # type: ignore[no-any-return]


CHECKPOINTS: dict[str, Any] = {
    "selective": lambda: {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, products),
    },
    "not reentrant": lambda: {"use_reentrant": False},
    "reentrant": lambda: {"use_reentrant": True},
}


def asked(rank: int, world: int, how: str) -> list[str]:
    return differences(rank, world, partial(Asking, how), recomputed_step, units=(Feedforward,), under=UNDER, steps=3)


def recomputed_step(model: Any, rank: int, step: int) -> Tensor:
    loss = loss_of(model(data(rank, step).requires_grad_()))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_units_are_gathered_by_hand_inside_of_checkpoints(how: str, pool2: Run) -> None:
    assert not joined(pool2(asked, how))


class Body(nn.Module):
    """Hands out features; the loss multiplies them with the weight of `out`, a unit that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Feedforward(WIDTH, 20), Feedforward(WIDTH, 21))
        self.out = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def fused(model: Any, rank: int, step: int) -> Tensor:
    """A loss that takes a weight, which `unshard()` makes whole for it, on alternate ranks."""
    features = model(data(rank, step))
    if isinstance(model, FullyShardedDataParallel):
        model.out.unshard()
    loss = loss_of(features @ model.out.weight.t() if (step + rank) % 2 else features)
    loss.backward()
    return loss.detach()


def outside(rank: int, world: int) -> list[str]:
    settings = (*UNDER, Setting(orig=False, offload=True))
    return differences(rank, world, Body, fused, units=(Feedforward, nn.Linear), under=settings, steps=4)


def test_a_weight_that_a_loss_takes(pool2: Run) -> None:
    assert not joined(pool2(outside))


# --- errors -----------------------------------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding(torch.arange(len(x)))


def refused(rank: int, world: int, what: str) -> str:
    orig = what != "a hook that never runs"
    model: Any = Setting(orig=orig).wrap(seeded(lambda: Net(block=Sparse if what == "sparse" else Feedforward)), ())
    with pytest.raises(UsageError) as caught:
        if what == "functional":
            values = {name: nn.Parameter(value + 1) for name, value in seeded(Net).named_parameters()}
            torch.func.functional_call(model, values, (data(rank, 0),))
        elif what == "a hook that never runs":
            model.blocks[0].up.weight.register_post_accumulate_grad_hook(print)
        loss_of(model(data(rank, 0))).backward()
    if what == "functional":
        with torch.no_grad():
            assert torch.equal(model(data(rank, 0)), seeded(Net)(data(rank, 0)))  # nothing was written to its shards
    return str(caught.value)


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sparse", "received a gradient of layout torch.sparse_coo; expected a dense layout"),
        ("functional", "torch.func.functional_call passed other tensors for 'blocks.0.norm.weight'"),
        ("a hook that never runs", "with use_orig_params=False no gradient is accumulated into it"),
    ],
)
def test_refused_in_words_on_every_rank(what: str, words: str, pool2: Run) -> None:
    for text in pool2(refused, what):
        assert words in text


def hooked(rank: int, world: int) -> list[str]:
    """Users' hooks on parameters: those of the tensor see this rank's whole gradient, the others the reduced shard."""
    lines = []
    for orig in (True, False):
        model: Any = Setting(orig=orig).wrap(seeded(Net), (Feedforward,))
        weight = model.blocks[0].module.up.weight
        watched = weight if orig else model.blocks[0].flat_param
        whole: list[Any] = []
        seen: list[Any] = []
        weight.register_hook(lambda grad, whole=whole: whole.append(tuple(grad.shape)))
        watched.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append((p is not None, p.grad.shape)))
        for step in range(2):
            loss_of(model(data(rank, step))).backward()
        if whole != [(20, WIDTH)] * 2:
            lines.append(f"orig={orig}: a tensor's hook saw {whole}")
        if seen != [(True, watched.shape)] * (2 if watched.numel() else 0):
            lines.append(f"orig={orig}: a post-accumulate hook saw {seen}")
        if not orig:
            watched.register_hook(print)
            with pytest.raises(UsageError, match=r"has a hook of register_hook\(\)"):
                loss_of(model(data(rank, 2))).backward()
    return lines


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
def test_users_hooks(pool2: Run) -> None:
    assert not joined(pool2(hooked))


# --- statistics over ranks --------------------------------------------------------------------------------------------


class SumOverRanks(torch.autograd.Function):
    """The sum over ranks, of values and of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    backward = forward


class NormOverRanks(nn.Module):
    """The computation of SyncBatchNorm, which torch has for accelerators only: statistics of all ranks' rows, in
    collectives of the module itself in forward and backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        world = dist.get_world_size()
        mean = SumOverRanks.apply(x.mean(0)) / world
        variance = SumOverRanks.apply((x - mean).square().mean(0)) / world
        self.running_mean.lerp_(mean.detach(), 0.1)
        return (x - mean) / (variance + 1e-5).sqrt() * self.weight + self.bias


def over_ranks(rank: int, world: int, strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), NormOverRanks(8)), nn.Sequential(nn.Linear(8, 8), NormOverRanks(8), nn.Tanh())
    )
    model = FullyShardedDataParallel(
        plain, auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Sequential),
        sharding_strategy=strategy, use_orig_params=True,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in range(3):
        x = torch.randn(4 * world, 6, generator=torch.Generator().manual_seed(step))[4 * rank :][:4]
        loss = (model(x) - 0.1 * torch.arange(8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_statistics_over_ranks_are_those_of_the_whole_batch(run: Run, strategy: str) -> None:
    world = 3
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    expected = []
    for step in range(3):
        x = torch.randn(4 * world, 6, generator=torch.Generator().manual_seed(step))
        loss = (plain(x) - 0.1 * torch.arange(8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    answers = run(world, over_ranks, strategy)
    losses = torch.tensor([losses for losses, _ in answers]).mean(0).tolist()
    assert losses == pytest.approx(expected, rel=1e-4)
    whole = plain.state_dict()
    for name, value in answers[0][1].items():
        torch.testing.assert_close(value, whole[name], rtol=1e-3, atol=1e-5, msg=name)
