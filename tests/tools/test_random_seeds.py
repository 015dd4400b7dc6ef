"""The seeds of `tools/random_runs`."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest

from tools.run_random import FILES, drawn, in_turn, names_of, random_tests_in

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("kind", FILES)
def test_it_can_call_every_test_that_draws_its_seeds(kind: str) -> None:
    for file in FILES[kind]:
        found = random_tests_in(file)
        assert found
        for name, test in found.items():
            assert [*inspect.signature(test).parameters] == ["run", "seed"], f"{file}::{name}"


def test_no_model_is_drawn_twice() -> None:
    seeds = in_turn(drawn(names_of("models"), 500, 7), drawn(names_of("programs"), 200, 7))
    assert len(set(seeds)) == len(seeds) == 700
    assert len({seed.seed for seed in drawn(names_of("models"), 500, 7)}) == 500
    assert len({*drawn(names_of("sums"), 2000, 7)}) == 2000
    per_test = Counter(seed.test for seed in seeds)
    for kind, number in (("models", 500), ("programs", 200)):
        own = [per_test[test] for test in names_of(kind)]
        assert sum(own) == number
        assert max(own) - min(own) <= 1
    # Whatever was played by the time of an interruption is a sample of all.
    assert Counter(seed.test in names_of("models") for seed in seeds[:70]) == {True: 50, False: 20}
