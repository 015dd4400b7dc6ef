"""The settings whose every combination must train like one process: legal cells, and a small array of all pairs.

    for cell in covering_array(legal_cells()):
        cell.check()

`CROSSED` also has the settings that change a backward: too many for all combinations, so that all pairs and a sample of
the others are tried, on four ranks. A combination without a meaning is not a cell: `illegal` returns
the reason. The engine accepts all cells.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import combinations, islice, product
from math import inf
from typing import Any, TypeVar

import torch

from flatfsdp.layout import Blocks, Elements, Grain, Rows, Whole
from tests.harness import parity
from tests.harness.reference import Recipe, Story

C = TypeVar("C")

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
PRECISIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "bf16": {"compute": torch.bfloat16},
    "fp16 reduce": {"reduce": torch.float16},
}
MODELS: dict[str, dict[str, Any]] = {
    "nested": {"case": "nested"},
    "flat": {"case": "mlp", "nested": False},
    "tied": {"case": "tied"},
    "frozen": {"case": "frozen"},
    "dtypes": {"case": "dtypes"},
    "tied and frozen": {"case": "tied and frozen"},
    "reached": {"case": "reached"},
}
PASSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_sync": {"micro": 3, "accumulate": "no_sync"},
    "communicate": {"micro": 3, "accumulate": "communicate"},
}


@dataclass(frozen=True)
class Cell:
    """One combination; each field is a factor, its default is used when other factors are tried alone."""

    strategy: str = "FULL_SHARD"
    world: int = 2
    use_orig_params: bool = False
    precision: str = "full"
    offload: bool = False
    model: str = "nested"
    passes: str = "plain"
    layout: str = "flat"
    checkpointing: str = "no checkpointing"
    stepping: str = "after the backward"
    prefetch: str = "BACKWARD_PRE"

    @property
    def recipe(self) -> Recipe:
        """The recipe: two steps, so that the second starts from the state after the first.

        Three for an optimizer in the backward, which only begins in the second backward.
        """
        settings = PRECISIONS[self.precision] | MODELS[self.model] | PASSES[self.passes]
        return Recipe(**settings, steps=3 if self.in_backward else 2, replicas=2 if self.hybrid else 1)

    @property
    def in_backward(self) -> bool:
        """Whether the optimizer steps in backwards."""
        return self.stepping == "in the backward"

    @property
    def hybrid(self) -> bool:
        """Whether the strategy has two axes."""
        return "HYBRID" in self.strategy

    @property
    def options(self) -> dict[str, Any]:
        """The wrapper's arguments."""
        options: dict[str, Any] = {
            "sharding_strategy": self.strategy,
            "use_orig_params": self.use_orig_params,
            "backward_prefetch": self.prefetch,
            "layout": grain_by_shape if self.layout == "grains" else self.layout,
        }
        if self.offload:
            options["cpu_offload"] = True
        if self.hybrid:
            options["mesh"] = (2, self.world // 2)
        if self.checkpointing != "no checkpointing":
            options["checkpointing"] = self.checkpointing
        return options

    def check(self, *, hostile: bool = False) -> Story:
        """Train on the pool and compare every bit with one process that runs the ranks' batches one after the other.

        gloo's exchange sums in rank order, so results are the same for every world. ``hostile``: under a
        communicator that delivers late and with freed memory poisoned.
        """
        context = hostile_world if hostile else nullcontext
        engine = parity.StepsInBackward() if self.in_backward else parity.FSDP()
        return parity.check(self.world, self.recipe, engine=engine, context=context, **self.options)

    def __str__(self) -> str:
        names: dict[str, Any] = {
            "use_orig_params": ("flat param", "orig params"),
            "offload": ("on device", "offload"),
            "layout": {"flat": "as one", "rows": "by rows", "grains": "by grains"},
        }
        levels = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = {name: level for name, level in levels.items() if name in FACTORS or level != getattr(Cell, name)}
        return ", ".join(names[name][level] if name in names else str(level) for name, level in shown.items())


FACTORS: dict[str, tuple[Any, ...]] = {
    "strategy": STRATEGIES,
    "world": (2, 3, 4),
    "use_orig_params": (False, True),
    "precision": tuple(PRECISIONS),
    "offload": (False, True),
    "model": ("nested", "flat", "tied", "frozen", "dtypes"),
    "passes": tuple(PASSES),
    "layout": ("flat", "rows"),
}
CROSSED: dict[str, tuple[Any, ...]] = FACTORS | {
    "world": (4,),
    "model": tuple(MODELS),
    "checkpointing": ("no checkpointing", *parity.CHECKPOINTING),
    "stepping": ("after the backward", "in the backward"),
    "prefetch": ("BACKWARD_PRE", "BACKWARD_MID"),
}


def grain_by_shape(name: str, parameter: torch.Tensor) -> Grain | None:
    """Some grain of each kind, and none: the same for tied parameters, which have several names."""
    grains = (Rows(), None, Whole(padding=inf), Blocks(2), Elements(3), Rows(2))
    return grains[sum(parameter.shape) % len(grains)]


@contextmanager
def hostile_world() -> Iterator[None]:
    """A context with collectives that deliver NaN until waited for, and buffers that are NaN before and after use."""
    from flatfsdp.engine.comm import transport as comm
    from flatfsdp.engine.device import memory as storage
    from tests.harness.delayed import DelayedTransport

    with comm.doubled(DelayedTransport), storage.poison():
        yield


def illegal(cell: Cell) -> str | None:
    """The reason why there is no such cell, or None."""
    if cell.hybrid and cell.world != 4:
        return "two axes of two ranks need a world of four"
    if cell.model == "reached" and cell.checkpointing == "reentrant checkpoints":
        return "what is recomputed reentrantly is reached by every rank's loss"
    if cell.model == "flat" and cell.checkpointing in ("checkpoints around units", "reentrant checkpoints"):
        return "nothing is wrapped inside, around which there could be a checkpoint"
    return None


@lru_cache(maxsize=1)
def legal_cells() -> tuple[Cell, ...]:
    """Every meaningful combination of all factors."""
    cells = (Cell(*levels) for levels in product(*FACTORS.values()))
    return tuple(cell for cell in cells if illegal(cell) is None)


Pair = tuple[tuple[str, Any], tuple[str, Any]]  # two factors' names, each with a level


def crossed_pairs() -> set[Pair]:
    """Every pair of levels of ``CROSSED`` that a meaningful combination has: with the defaults of all other factors."""
    return {
        ((one, level), (other, another))
        for one, other in combinations(CROSSED, 2)
        for level, another in product(CROSSED[one], CROSSED[other])
        if illegal(Cell(**{"world": 4, one: level, other: another})) is None
    }


def pairs_of(cell: Any, factors: Iterable[str] = CROSSED) -> frozenset[Pair]:
    """Every pair of levels that occurs in ``cell``."""
    return frozenset(combinations(((name, getattr(cell, name)) for name in factors), 2))


def covering_array(cells: Iterable[C], factors: Iterable[str] = CROSSED) -> list[C]:
    """A few of ``cells`` that cover all their pairs of levels; the same at every call.

    Greedy: each time the first of the cells with the most new pairs.
    """
    factors = list(factors)
    numbers: dict[tuple[str, Any], int] = {}  # of levels: their pairs are compared faster than those of `pairs_of`
    bits: dict[tuple[int, int], int] = {}
    remaining = {}
    for cell in cells:
        levels = [numbers.setdefault((name, getattr(cell, name)), len(numbers)) for name in factors]
        remaining[cell] = sum(1 << bits.setdefault(pair, len(bits)) for pair in combinations(levels, 2))
    uncovered = (1 << len(bits)) - 1
    chosen: list[C] = []
    while uncovered:
        best = max(remaining, key=lambda cell: (remaining[cell] & uncovered).bit_count())
        chosen.append(best)
        uncovered &= ~remaining.pop(best)
    return chosen


def crossed(count: int) -> list[Cell]:
    """``count`` cells with all settings, or more if that many cover all `crossed_pairs`, which come first. They are the
    same at every call."""
    drawn = random.Random(20261121)
    cells = [Cell(**{name: drawn.choice(levels) for name, levels in CROSSED.items()}) for _ in range(500)]
    cells = [cell for cell in dict.fromkeys(cells) if illegal(cell) is None]
    covering = covering_array(cells)
    others = (cell for cell in cells if cell not in covering)
    return [*covering, *islice(others, max(0, count - len(covering)))]


def each_alone() -> list[Cell]:
    """Every level alone: the others are the defaults (and a world of four, where the strategy needs it)."""
    cells = [Cell(**{name: level}) for name, levels in FACTORS.items() for level in levels]
    hybrids = [Cell(strategy=strategy, world=4) for strategy in STRATEGIES if "HYBRID" in strategy]
    return list(dict.fromkeys(cell for cell in [*cells, *hybrids] if illegal(cell) is None))
