"""Training under `fully_shard` is training in one process, in every combination: every bit of every loss, gradient and
parameter; and on two ranks it is training under torch's."""

from __future__ import annotations

import pytest

from tests.conftest import Run
from tests.harness.front import FACTORS, Cell, all_pairs, array, beside, illegal, legal_cells, torch_takes
from tests.harness.matrix import pairs_of
from tests.harness.thorough import is_thorough, seeds, some

pytestmark = pytest.mark.distributed

ARRAY = array()
TORCHS = some(array(torch_takes), 8)
MORE = [cell for seed in seeds(1, 30)[1:] for cell in legal_cells(50, seed)]


def test_the_array_covers_every_pair_that_occurs() -> None:
    covered = {pair for cell in ARRAY for pair in pairs_of(cell, FACTORS)}
    assert covered >= {pair for cell in legal_cells(1500, 1) for pair in pairs_of(cell, FACTORS)}
    assert covered <= all_pairs() and not any(map(illegal, ARRAY))


# Every pair takes a minute and a half of all ranks.
@pytest.mark.parametrize("cell", [*ARRAY, *MORE] if is_thorough() else ARRAY[::8], ids=str)
def test_all_pairs_of_settings(cell: Cell) -> None:
    cell.check(hostile=cell.offload)


@pytest.mark.parametrize("cell", ARRAY if is_thorough() else [], ids=str)
def test_all_pairs_in_a_hostile_world(cell: Cell) -> None:
    cell.check(hostile=True)


@pytest.mark.parametrize("cell", [*TORCHS, *filter(torch_takes, MORE)], ids=str)
def test_two_ranks_are_torchs_bit_for_bit(cell: Cell, pool2: Run) -> None:
    found = pool2(beside, cell)
    assert found == [[], []], cell
