"""Parameters that stay among a few ranks between forward and backward: the results are those of one process.

The programs are those of other tests; here they run on four ranks, or six, of which two or three are neighbours.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from flatfsdp.errors import AgreementError
from tests.base.test_autograd import CORNERS, _far
from tests.conftest import Run
from tests.harness import parity
from tests.harness.corners import Net, Setting, data, differences, joined, loss_of, seeded
from tests.harness.matrix import hostile_world
from tests.harness.models import Feedforward
from tests.harness.reference import Recipe
from tests.harness.thorough import some, spread
from tests.runtime import test_exceptions as exceptions
from tests.wrapping.test_copies import copied

pytestmark = pytest.mark.distributed

PAIRS = (
    Setting(orig=True, doubled=True, post_forward=2),
    Setting("SHARD_GRAD_OP", orig=False, offload=True, post_forward=2, rows=True),
)


def like_one_process(found: list[list[str]]) -> None:
    """No line but about the rounding of another order of sums."""
    assert not joined([[line for line in lines if "differs by a norm" not in line or _far(line)] for lines in found])


def corner(rank: int, world: int, name: str) -> list[str]:
    it = CORNERS[name]
    return differences(rank, world, it.build, it.program, units=it.units, under=PAIRS, steps=it.steps, bound=it.bound)


CHOSEN = (
    "a_forward_without_gradients_before_the_backward",
    "a_module_that_calls_itself",
    "a_unit_several_times_in_a_forward",
    "backward_that_is_differentiated_again",
    "checkpoint_around_two_units_not_reentrant",
    "checkpoint_inside_a_unit_around_a_unit_reentrant",
    "frozen_middle",
    "outputs_that_are_views",
    "parameters_unused_on_alternate_ranks",
    "retained_graph_twice",
    "two_forwards_two_backwards_crossed",
    "units_that_no_rank_reaches",
)


@pytest.mark.parametrize("name", some(CHOSEN, 3))
def test_corners(name: str, pool4: Run) -> None:
    like_one_process(pool4(corner, name, timeout=60))


@pytest.mark.parametrize(("ranks", "case"), spread([(4, 2), (6, 3)], ["tied", "dtypes", "nested"]))
def test_models(case: str, ranks: tuple[int, int]) -> None:
    world, post_forward = ranks
    parity.check(world, Recipe(case, steps=2), reshard_after_forward=post_forward, use_orig_params=world == 6)


@pytest.mark.parametrize("accumulate", ["no_sync", "communicate"])
def test_low_precision_and_accumulation(accumulate: str) -> None:
    recipe = Recipe("nested", steps=2, micro=3, accumulate=accumulate, compute=torch.bfloat16, reduce=torch.float32)
    parity.check(4, recipe, context=hostile_world, reshard_after_forward=2)


def changing(model: Any, rank: int, step: int) -> list[torch.Tensor]:
    """Other neighbours in every step, chosen between a forward and its backward, too."""
    for wrapper, chosen in ((model, (2, True, False)), (model.blocks[1] if step else model, (True, 2, 2))):
        if hasattr(wrapper, "set_reshard_after_forward"):
            wrapper.set_reshard_after_forward(chosen[step])
    loss = loss_of(model(data(rank, step)))
    if hasattr(model, "set_reshard_after_forward"):
        model.set_reshard_after_forward((False, 2, True)[step])
    loss.backward()
    return [loss.detach()]


def changed(rank: int, world: int) -> list[str]:
    return differences(rank, world, Net, changing, under=(Setting(), Setting("SHARD_GRAD_OP", orig=False)), steps=3)


def test_choices_that_change(pool4: Run) -> None:
    like_one_process(pool4(changed, timeout=60))


def caught(rank: int, world: int, place: str) -> list[str]:
    program = partial(exceptions.program, place=place, earlier=False, twice=True)
    return differences(rank, world, exceptions.build, program, units=(exceptions.Trapped,), under=PAIRS)


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
@pytest.mark.parametrize("place", ["between units", "between forward and backward", "backward inside a unit"])
def test_failed_steps(place: str, pool4: Run) -> None:
    like_one_process(pool4(caught, place, timeout=60))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(how: str, pool4: Run) -> None:
    assert not joined(pool4(copied, how, PAIRS[:1], timeout=60))


def differing(rank: int, world: int, early: bool) -> str:
    """Ranks choose other neighbours: waiting for each other, some among two and some among four, would never end."""
    model = Setting().wrap(seeded(Net), (Feedforward,))
    if not early:
        loss_of(model(data(rank, 0))).backward()
    model.set_reshard_after_forward(2 if rank == 1 else 4)
    with pytest.raises(AgreementError) as texts:
        loss_of(model(data(rank, 1))).backward()
    return str(texts.value)


@pytest.mark.parametrize("early", [True, False])
def test_ranks_that_choose_differently_get_an_error(early: bool, pool4: Run) -> None:
    for text in pool4(differing, early, timeout=60):
        assert "rank 1" in text and "reshard_after_forward=2" in text and "reshard_after_forward=True" in text


def dropping(rank: int, world: int) -> str:
    """One rank's optimizer steps between forward and backward: its backward would gather over all, the others' not."""
    model = Setting(post_forward=2).wrap(seeded(Net), (Feedforward,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = loss_of(model(data(rank, 0)))
    if rank == 2:
        optimizer.step()
    with pytest.raises(AgreementError) as texts:
        loss.backward()
    return str(texts.value)


def test_ranks_that_hold_other_post_forward_shards_get_an_error(pool4: Run) -> None:
    for text in pool4(dropping, timeout=60):
        assert "rank 2 began a backward" in text and "; 4 units with post-forward shards" in text
