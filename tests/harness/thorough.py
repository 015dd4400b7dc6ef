"""The extent of random tests and of combinations of settings: some in every run, all with
``pytest --thorough``.

``--seed N`` changes the first seed, so that two thorough runs use different programs; the run's header shows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import TypeVar

import pytest

A, B = TypeVar("A"), TypeVar("B")


_VARIABLE = "FLATFSDP_TESTS_THOROUGH"  # for ranks


@dataclass
class _Extent:
    thorough: bool = _VARIABLE in os.environ
    first: int = 0


_extent = _Extent()


@dataclass
class Found:
    """What a test of a seed has found, beside that it is right: for reports of many seeds.

    Attributes:
        world: the number of ranks, if they are not those of a pool.
        refused: whether it ended in an error that the test expects of it.
        recoveries: the seconds of each recovery from a lost rank.
    """

    world: int = 0
    refused: bool = False
    recoveries: list[float] = field(default_factory=list)


found = Found()


def options(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="play all random models, programs, faults and settings")
    parser.addoption("--seed", type=int, default=0, help="the first seed that --thorough plays beside the usual ones")


def register(config: pytest.Config) -> None:
    """Called before test modules are imported, because their parameters depend on it."""
    _extent.thorough, _extent.first = config.getoption("--thorough"), config.getoption("--seed")
    os.environ.pop(_VARIABLE, None)
    if _extent.thorough:
        os.environ[_VARIABLE] = "1"


def header() -> str | None:
    return f"thorough, seeds from {_extent.first}" if _extent.thorough else None


def is_thorough() -> bool:
    return _extent.thorough


def seeds(few: int, many: int) -> list[int]:
    """`range(few)`, the same in every run; with --thorough also seeds from --seed on, `many` in total."""
    usual = list(range(few))
    if not _extent.thorough:
        return usual
    start = max(few, _extent.first)
    return usual + list(range(start, start + many - few))


def steps() -> int:
    """The steps of a training that is compared with another: the first, and one that begins where it ended; with
    --thorough also one after a step that was not the first."""
    return 3 if _extent.thorough else 2


def some(cases: Sequence[A], of: int, first: int = 0) -> Sequence[A]:
    """Every `of`-th case, from `first` on; with --thorough, all."""
    return cases if _extent.thorough else cases[first % of :: of]


def spread(worlds: Sequence[A], cases: Iterable[B]) -> list[tuple[A, B]]:
    """Each case in one of the worlds, in turn, so that each world has several; with --thorough, in each world."""
    cases = list(cases)
    return list(product(worlds, cases)) if _extent.thorough else list(zip(cycle(worlds), cases, strict=False))
