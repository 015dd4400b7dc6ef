"""Models that share some of their process groups, of which two ranks of one group run them in different orders: every
rank ends in words, within seconds."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatfsdp
from tests.agreement.test_agreement import Net, step, wrap
from tests.agreement.test_shared_groups import WORLDS, built
from tests.harness import fresh
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.process

LIMIT = 60.0  # seconds for all ranks to end once they have started; on idle cores it takes 5


def opposite(rank: int, ranks: int, world: str, before: int) -> None:
    """All groups of shards run the models in one order, but not all of them in the same."""
    dist.init_process_group("gloo")
    flatfsdp.set_collective_timeout(report_after=1000)  # no report of a wait is needed
    models = built(world)
    for _ in range(before):
        for model in models:
            step(model)
    for _ in range(2):
        for model in models if rank < ranks // 2 else models[::-1]:
            step(model)


def reported(outcomes: list[fresh.Outcome]) -> list[str]:
    """What each rank ended with."""
    messages = []
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 1, (rank, outcome)
        found = re.search(r"AgreementError: (ranks? .*)", f"{outcome.output}\n{outcome.error or ''}")
        assert found is not None, (rank, outcome)
        messages.append(found[1])
    return messages


# One of each way to share groups; the others' groups are among these.
USUAL = ("replicas", "replicas beside shards over their group", "own groups of units")
OTHERS = sorted(WORLDS.keys() - {"shards beside replicas", *USUAL})


@pytest.mark.ranks(4, opposite, of=["world"], before=2, timeout=LIMIT)
@pytest.mark.parametrize("world", [*USUAL, *(OTHERS if is_thorough() else [])])
def test_every_rank_ends_in_words(outcomes: list[fresh.Outcome], world: str) -> None:
    for rank, message in enumerate(reported(outcomes)):
        one, other = rank % 2, rank % 2 + 2  # those of its group
        what = "began a (forward|backward)"
        words = rf"ranks run their models in different orders: rank {one} {what} of .*; rank {other} {what} of "
        assert re.match(words, message), (rank, message)


@pytest.mark.ranks(4, opposite, of=["world"], before=0, timeout=LIMIT)
@pytest.mark.parametrize("world", ["replicas", "replicas beside shards over their group"])
def test_so_it_does_in_the_first_iteration(outcomes: list[fresh.Outcome], world: str) -> None:
    places = "ranks wait for each other in different places: "
    words = "ranks 0, 1 first runs the model " if world == "replicas" else places
    for message in reported(outcomes):
        assert message.startswith(words), message


class Cut(Net):
    """A rank's backward may not reach the block that runs first."""

    def forward(self, x: torch.Tensor, cut: bool = False) -> torch.Tensor:  # type: ignore[override]
        for index, block in enumerate(self.blocks):
            x = block(x.detach() if cut and index == 1 else x)
        return x


def in_one_backward(rank: int, ranks: int, before: int) -> None:
    """One backward through two models that share the groups of shards, and not all ranks; rank 1 lacks a unit of the
    one that it reaches first, which it reduces after those of the other."""
    dist.init_process_group("gloo")
    flatfsdp.set_collective_timeout(report_after=1000)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    beside = wrap(Cut(), process_group=mesh.get_group("shards"), join_units_below=0)
    model = wrap(Cut(), sharding_strategy="HYBRID_SHARD", device_mesh=mesh, join_units_below=0)
    for index in range(before + 2):
        cut = rank == 1 and index >= before
        (beside(torch.ones(2, 4)).sum() * model(torch.ones(2, 4), cut).sum()).backward()


@pytest.mark.ranks(4, in_one_backward, of=["before"], timeout=LIMIT)
@pytest.mark.parametrize("before", [0, 2])
def test_one_backward_through_models_of_other_ranks(outcomes: list[fresh.Outcome], before: int) -> None:
    words = (
        r"ranks run their models in different orders: rank 0 gathered in its backward the units .*, and reduced "
        r"'blocks.2', 'blocks.1', 'blocks.0' of Cut \(.*\), then .*; rank 1 gathered .*, and reduced "
        r"'blocks.2', 'blocks.1' of Cut \(.*\), then 'blocks.2', 'blocks.1', 'blocks.0' of Cut .*, then 'blocks.0' of "
    )
    for message in reported(outcomes[:2]):
        assert re.match(words, message), message
    assert [outcome.exit_code for outcome in outcomes] == [1] * 4


class Around(Net):
    """Runs another model in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.other: list[nn.Module] = []

    def forward(self, x: torch.Tensor, at: int = 0) -> torch.Tensor:  # type: ignore[override]
        for index, block in enumerate(self.blocks):
            if index == at:
                with torch.no_grad():
                    x = x + self.other[0](x)
            x = block(x)
        return x


def inside_of_a_forward(rank: int, ranks: int, before: int) -> None:
    """A model that is called in the forward of another one, at two places."""
    dist.init_process_group("gloo")
    flatfsdp.set_collective_timeout(report_after=5)
    torch.manual_seed(0)
    net = Around()
    model = wrap(net, join_units_below=0)
    net.other = [wrap(Net(), join_units_below=0)]
    for index in range(before + 2):
        places = (0, 1, 2) if index < before else (1, 2, 0) if rank else (2, 1, 0)
        for at in places:
            step(model, at=at)


@pytest.mark.ranks(2, inside_of_a_forward, of=["before"], timeout=LIMIT)
@pytest.mark.parametrize("before", [0, 2])
def test_a_model_in_the_forward_of_another_one(outcomes: list[fresh.Outcome], before: int) -> None:
    for message in reported(outcomes):
        assert "ranks" in message, message
