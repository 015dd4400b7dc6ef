"""What users say about the schedule, as data."""

from __future__ import annotations

import pytest

from flatfsdp.engine.config.schedule_options import AS_BUILT, Schedule, reshard_choice
from flatfsdp.errors import ConfigValueError


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
def test_resharding_to_one_rank_or_all_is_said_by_a_bool(value: int | None, shards: int, meant: int | None) -> None:
    found = reshard_choice("it", value, shards=shards)
    assert found == meant and type(found) is type(meant)


@pytest.mark.parametrize("value", [0, -1, 3, 16])
def test_other_numbers_are_refused(value: int) -> None:
    accepted = "True, False, or a divisor of the 8 ranks that share the parameters: 1, 2, 4, 8."
    with pytest.raises(ConfigValueError) as caught:
        reshard_choice("it", value, shards=8)
    assert str(caught.value) == f"it: got {value}. Accepted: {accepted}"


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
def test_neighbours_are_there_for_a_backward_that_reads(schedule: Schedule, expected: int | None) -> None:
    assert schedule.post_forward_ranks == expected


def test_what_is_as_built_is_not_told() -> None:
    assert list(AS_BUILT.describe()) == []
    assert list(Schedule(reshard_after_forward=2, reduce=False).describe()) == [
        "reshard_after_forward=2",
        "reduce=False",
    ]
