"""Runs of places in a shard, against the definition: which neighbours may be together."""

from __future__ import annotations

import random
from itertools import pairwise

from flatfsdp.engine.layout.layout import Span
from flatfsdp.engine.layout.runs import ParamInShard, find_runs


def test_a_run_ends_where_the_kind_changes_and_where_more_than_padding_lies_between() -> None:
    places = [
        ParamInShard(Span(0, 6), "a"),
        ParamInShard(Span(6, 6), None),  # nothing of it is here
        ParamInShard(Span(8, 11), "a"),
        ParamInShard(Span(12, 14), "b"),
        ParamInShard(Span(16, 17), "b"),
        ParamInShard(Span(21, 22), "b"),
    ]
    assert find_runs(places, padding=3) == [[0, 2], [3, 4], [5]]
    assert find_runs(places, padding=0) == [[0], [2], [3], [4], [5]]
    assert find_runs(places, padding=4) == [[0, 2], [3, 4, 5]]


def test_what_has_no_kind_is_by_itself_and_divides_its_neighbors() -> None:
    places = [
        ParamInShard(Span(0, 1), "a"),
        ParamInShard(Span(1, 2), None),
        ParamInShard(Span(2, 3), None),
        ParamInShard(Span(3, 4), "a"),
    ]
    assert find_runs(places, padding=3) == [[0], [1], [2], [3]]


def test_runs_are_the_longest_sequences_of_which_each_two_neighbors_belong_together() -> None:
    numbers = random.Random(0)
    for _ in range(300):
        places, end = [], 0
        for _ in range(numbers.randrange(12)):
            start = end + numbers.choice((0, 0, 1, 3))
            end = start + numbers.choice((0, 1, 2, 5))
            places.append(ParamInShard(Span(start, end), numbers.choice((None, "a", "a", "a", "b"))))
        padding = numbers.randrange(4)
        found = find_runs(places, padding=padding)
        held = [index for index, place in enumerate(places) if not place.span.is_empty]
        assert [index for run in found for index in run] == held
        begins = {run[0] for run in found}
        for before, after in pairwise(held):
            one, other = places[before], places[after]
            together = one.kind == other.kind is not None and other.span.start - one.span.stop <= padding
            assert (after not in begins) == together
