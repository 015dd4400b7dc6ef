"""Parameters that are tied after `fully_shard`, before the first forward, as tools do that load weights: training is
that of one process whose parameters are tied, and of torch's `fully_shard` where that follows such ties."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

import flatfsdp
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.meshes import adamw

pytestmark = pytest.mark.distributed

TOKENS, WIDTH = 12, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


def net() -> Any:
    torch.manual_seed(3)
    return Net()


def tie(model: Any) -> None:
    model.head.weight = model.embedding.weight


def apart(package: Any, model: Any) -> Any:
    """Each layer is a unit."""
    for layer in (model.embedding, model.middle, model.head):
        package.fully_shard(layer)
    return package.fully_shard(model)


def in_one(package: Any, model: Any) -> Any:
    """Both layers are in the unit of the whole."""
    package.fully_shard(model.middle)
    return package.fully_shard(model)


def backwards(package: Any, model: Any) -> Any:
    """The one that is tied belongs to the outer unit."""
    package.fully_shard(model.embedding)
    return package.fully_shard(model)


def from_meta(package: Any, model: Any) -> Any:
    """Loaded by assignment, a new object for each name, and tied then."""
    state = model.state_dict()
    with torch.device("meta"):
        empty: Any = Net()
    apart(package, empty)
    split = {
        k: distribute_tensor(v, p.device_mesh, p.placements)
        for (k, v), p in zip(state.items(), empty.state_dict().values(), strict=True)
    }
    empty.load_state_dict(split, assign=True)
    return empty


def steps(model: Any, ranks: list[int], count: int = 3) -> list[float]:
    optimizer = adamw(model.parameters(), 0.05)
    losses = []
    for step in range(count):
        for rank in ranks:
            generator = torch.Generator().manual_seed(10 * step + rank)
            tokens = torch.randint(0, TOKENS, (5,), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1)) / len(ranks)
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(model: Any) -> list[Tensor]:
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


MADE: list[Callable[[Any, Any], Any]] = [apart, in_one, backwards, from_meta]


def like_one(rank: int, world: int) -> list[str]:
    one = net()
    tie(one)
    steps(one, list(range(world)))
    expected, found = whole(one), []
    for make in MADE:
        ours = make(flatfsdp, net())
        tie(ours)
        steps(ours, [rank])
        if len(list(ours.parameters())) != 3 or ours.head.weight is not ours.embedding.weight:
            found.append(f"{make.__name__}: not tied any more")
        elif not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole(ours), expected, strict=True)):
            found.append(f"{make.__name__}: other parameters than in one process")
        if make is not from_meta:
            torchs = make(theirs, net())
            tie(torchs)
            steps(torchs, [rank])
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole(ours), whole(torchs), strict=True)):
                found.append(f"{make.__name__}: other parameters than torch's")
    return found


def test_like_one_process(pool2: Run) -> None:
    assert pool2(like_one, timeout=60) == [[], []]


def copied(rank: int, world: int) -> list[str]:
    """Copies and pickles are tied, too; a part without the owner is refused."""
    ours = apart(flatfsdp, net())
    tie(ours)
    steps(ours, [rank], 1)
    found = []
    for name, twin in (("copy", copy.deepcopy(ours)), ("pickle", pickle.loads(pickle.dumps(ours)))):
        if twin.head.weight is not twin.embedding.weight:
            found.append(f"{name}: not tied")
        plain = copy.deepcopy(ours)
        if steps(twin, [rank], 2) != steps(plain, [rank], 2):
            found.append(name)
    with pytest.raises(UsageError, match="not inside the module that is copied"):
        copy.deepcopy(ours.head)
    return found


def test_copies(pool2: Run) -> None:
    assert pool2(copied) == [[], []]


def refused(rank: int, world: int) -> list[str]:
    """Ties that the engine cannot follow raise errors, and no rank waits."""
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def later() -> None:
        model = apart(flatfsdp, net())
        steps(model, [rank], 1)
        tie(model)
        steps(model, [rank], 1)

    def one_object_in_two_places() -> None:
        model = in_one(flatfsdp, net())
        steps(model, [rank], 1)
        spec = model.head.weight
        new = nn.Parameter(distribute_tensor(torch.ones(TOKENS, WIDTH), spec.device_mesh, spec.placements))
        model.head.weight = model.embedding.weight = new
        steps(model, [rank], 1)

    def both_ways() -> None:
        model: Any = flatfsdp.fully_shard(nn.Sequential(*(flatfsdp.fully_shard(nn.Linear(4, 4)) for _ in range(2))))
        weight, bias, expected = model[0].weight, model[1].bias, copy.deepcopy(model)(torch.ones(1, 4))
        model[0].weight = model[1].weight
        model[1].bias = model[0].bias
        try:
            model(torch.ones(1, 4))
        finally:  # nothing was tied
            model[0].weight, model[1].bias = weight, bias
            assert torch.equal(model(torch.ones(1, 4)), expected)

    def elsewhere() -> None:
        model = net()
        flatfsdp.fully_shard(model.embedding, mesh=mesh)
        flatfsdp.fully_shard(model)
        tie(model)
        steps(model, [rank], 1)

    def before() -> None:
        model = net()
        tie(model)
        flatfsdp.fully_shard(model.embedding)
        flatfsdp.fully_shard(model.head)

    found = []
    for what, words in (
        (before, "'weight' of Linear is tied to a parameter of another unit .*as a list"),
        (later, "'weight' of unit 'head' was changed after wrapping: it was tied to 'embedding.weight'"),
        (one_object_in_two_places, "'head.weight' of unit <root> was changed .*tied to 'embedding.weight'"),
        (both_ways, "tied to '0.bias' after fully_shard.*neither comes first"),
        (elsewhere, "'head.weight' of unit <root> was tied to 'embedding.weight' .*over other ranks"),
    ):
        try:
            with pytest.raises(UsageError, match=words):
                what()
        except BaseException as error:
            found.append(f"{what.__name__}: {error}")
    return found


def test_refused(pool2: Run) -> None:
    assert pool2(refused) == [[], []]
