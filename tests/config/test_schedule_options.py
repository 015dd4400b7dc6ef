"""Users' options for the schedule, as data."""

from __future__ import annotations

import pytest

from flatfsdp.engine.config.schedule_options import AS_BUILT, Schedule, reshard_choice, reshard_choices
from flatfsdp.errors import ConfigValueError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("value", "shards", "meant"),
    [
        (None, 8, None),
        (True, 8, True),
        (False, 8, False),
        (1, 8, False),
        (2, 8, 2),
        (8, 8, True),
        (True, 1, True),
        (1, 1, False),
        (512, 1024, 512),
    ],
)
def test_resharding_to_one_rank_or_all_is_chosen_by_a_bool(value: int | None, shards: int, meant: int | None) -> None:
    found = reshard_choice("it", value, shards=shards)
    assert found == meant and type(found) is type(meant)


@pytest.mark.parametrize("value", [0, -1, 3, 16])
def test_other_numbers_are_refused(value: int) -> None:
    accepted = "True, False, or a divisor of the 8 ranks that share the parameters: 1, 2, 4, 8."
    with pytest.raises(ConfigValueError) as caught:
        reshard_choice("it", value, shards=8)
    assert str(caught.value) == f"it: got {value}. Accepted: {accepted}"


def test_a_number_is_for_the_meshes_that_are_larger() -> None:
    numbers = {
        (4, (8, 2)): 4,
        (4, (4, 2)): True,
        (4, (2, 4)): True,
        (2, (2, 4)): 2,
        (2, (2, 1)): True,
        (1, (4, 2)): False,
    }
    for (value, shards), meant in numbers.items():
        assert reshard_choices("it", value, shards=shards) is meant
    for value, ranks in ((8, 4), (3, 4), (4, 6)):
        with pytest.raises(ConfigValueError, match=f"divisor of the {ranks} ranks"):
            reshard_choices("it", value, shards=(2, ranks))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (AS_BUILT, None),
        (Schedule(reshard_after_forward=True), None),
        (Schedule(reshard_after_forward=False), None),
        (Schedule(reshard_after_forward=2), 2),
        (Schedule(reshard_after_forward=2, unshard_in_backward=False), None),
    ],
)
def test_neighbors_are_there_for_a_backward_that_reads(schedule: Schedule, expected: int | None) -> None:
    assert schedule.post_forward_ranks == expected


def test_what_is_as_built_is_not_reported() -> None:
    assert list(AS_BUILT.describe()) == []
    assert list(Schedule(reshard_after_forward=2, reduce=False).describe()) == [
        "reshard_after_forward=2",
        "reduce=False",
    ]
