"""The error message for ranks whose ops differ at one position of their sequence; pure."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import few, ranks_by_value, ranks_in_words
from ..base.peers import STAYED, UnitEntry
from ..watchdog.status_report import ALIKE, SKIPPED, UNEVEN
from .ops import (
    BACKWARD,
    EVALUATION,
    IN_FORWARD,
    ISSUED,
    TRAINING,
    UNREDUCED,
    Op,
    StepConditions,
    forward_in_words,
)

Ranks = tuple[int, ...]

_REMEDY = ", except in modules given to ensure_unit_participation()"
_MIXED = (
    "Values of different units were exchanged for each other, so the gradients of this backward are wrong: resume from "
    "an earlier checkpoint. Where ranks use different parts of a model, checkpoint activations of each of their units "
    "separately, not of several together or one inside another; otherwise please report this"
)
_STAYED = (
    "A unit stays unsharded when no output of its forward requires a gradient, or when only some of its entries have "
    "run. Use detach(), torch.no_grad() and the entries of a unit in the same way on all ranks"
)


@dataclass(frozen=True)
class ModelNames:
    """The units of a model and the names of its parameters (computed when needed), for messages."""

    units: Sequence[UnitEntry] = ()
    parameters: Callable[[], Iterable[str]] = tuple


def divergence(ops: Mapping[Ranks, Op], step: int, names: ModelNames) -> str:
    """The message: the ops of all ranks in this step, and a remedy."""
    alike = {op.words for op in ops.values()}
    if len(alike) == 1:
        reported = f"ranks diverged at step {max(1, step)}, in which all {alike.pop()}"
        if unlike := _unlike_conditions({ranks: op.conditions for ranks, op in ops.items()}):
            return f"{reported}. {unlike}"
    else:
        did = "; ".join(f"{ranks_in_words(ranks)} {op.words}" for ranks, op in ops.items())
        reported = f"ranks diverged at step {max(1, step)}: {did}"
    if all(op.words.startswith(ISSUED) for op in ops.values()):
        return f"{reported}. {_MIXED}"
    if differently := _trained_differently(ops, names):
        return f"{reported}. {differently}"
    if any(STAYED in op.words for op in ops.values()):
        return f"{reported}. {_STAYED}"
    if skipped := _skipped({rank: op.words for ranks, op in ops.items() for rank in ranks}, step):
        return f"{reported}. {skipped}"
    remedy = _REMEDY if all(op.words.startswith(IN_FORWARD) for op in ops.values()) else ""
    return (
        f"{reported}. All ranks must run the same units in the same order, with the same number of forwards and "
        "backwards, and catch an exception at the same point or not at all; rank-local data must not decide which "
        f"units run{remedy}"
    )


def _skipped(did: Mapping[int, str], step: int) -> str:
    """The message about ranks that skipped a batch, or the backward of one, by what each rank `did`; "" for others."""
    training, evaluation = forward_in_words(TRAINING), forward_in_words(EVALUATION)
    trains = [rank for rank, words in did.items() if words.startswith(training)]
    backward = [rank for rank, words in did.items() if words.startswith(BACKWARD)]
    calls = [
        rank
        for rank, words in did.items()
        if words.startswith(evaluation) or (words.startswith("called ") and " of unit " not in words)
    ]
    without = [rank for rank in backward if did[rank].startswith(f"{BACKWARD}{UNREDUCED}")]
    if step and trains and calls and len(trains) + len(calls) == len(did):
        some = ranks_in_words(sorted(calls))
        return (
            f"Either {some} alone did what all ranks must do, or {some}, unlike {ranks_in_words(sorted(trains))}, "
            f"{SKIPPED}. {ALIKE}{UNEVEN}"
        )
    if backward and (ahead := sorted(trains + calls)) and len(backward) + len(ahead) == len(did):
        some = ranks_in_words(ahead)
        return (
            f"{some[0].upper()}{some[1:]} skipped the backward that {ranks_in_words(sorted(backward))} began (as by "
            "`continue` after a loss that is not finite). Run a backward on all ranks or on none; rank-local data must "
            "not decide it"
        )
    if without and len(without) < len(backward) == len(did):
        return (
            f"{ranks_in_words(sorted(without)).capitalize()} accumulated gradients under no_sync() where "
            f"{ranks_in_words(sorted(set(backward).difference(without)))} reduced them. All ranks must make the same "
            f"choice: if it depends on the number of the batch, a rank skipped a batch. {ALIKE}"
        )
    return ""


def _unlike_conditions(found: Mapping[Ranks, StepConditions]) -> str:
    """The conditions in which ranks differ, and the remedies; "" if there are none."""
    out = []
    if len(ranks := _by(found, "stepped")) > 1:
        out.append(
            f"{ranks[True]} took an optimizer step since the previous step; {ranks[False]} did not. Step on all "
            "ranks or on none; a rank's own data must not decide it, as with GradScaler: use ShardedGradScaler. If it "
            "depends on the number of the batch, as in gradient accumulation, a rank skipped a batch: skip it on all "
            "ranks or on none"
        )
    if len(ranks := _by(found, "loaded")) > 1:
        out.append(
            f"{ranks[True]} loaded a state dict since the previous step; {ranks[False]} did not. Load it on all "
            "ranks; to read it on one rank alone, load it with rank0_only=True or broadcast_from_rank0=True"
        )
    if len(ranks := _by(found, "autocast")) > 1:
        ways = [f"{f'computes in {dtype}' if dtype else 'is off'} on {ranks[dtype]}" for dtype in sorted(ranks)]
        out.append(f"autocast {', and '.join(ways)}. Enter the same context on all ranks")
    return ". ".join(text[0].upper() + text[1:] for text in out)


def _by(found: Mapping[Ranks, StepConditions], what: str) -> dict[Any, str]:
    """The ranks, in words, by their value of condition `what`."""
    values = {rank: getattr(each, what) for ranks, each in found.items() for rank in ranks}
    return {value: ranks_in_words(sorted(ranks)) for value, ranks in ranks_by_value(values).items()}


def _trained_differently(ops: Mapping[Ranks, Op], names: ModelNames) -> str:
    """The message about parameters that require gradients on some ranks only, in units that ran on all; "" for none."""
    backwards = {ranks: op for ranks, op in ops.items() if op.ran and op.trained}
    sets = {ranks: int(op.trained, 16) for ranks, op in backwards.items()}
    differ = functools.reduce(operator.or_, sets.values(), 0) & ~functools.reduce(operator.and_, sets.values(), -1)
    differ = functools.reduce(operator.and_, (int(op.ran, 16) for op in backwards.values()), differ)
    different = [name for index, name in enumerate(names.parameters()) if differ >> index & 1]
    if not different:
        return ""
    first = differ & -differ
    if all(bits & first or int(backwards[those].unreached or "0", 16) & first for those, bits in sets.items()):
        return _cut_off(first.bit_length() - 1, sets, names.units)
    some, others = _with_and_without(first, sets)
    return (
        f"Parameter {different[0]!r} requires a gradient on {some}, but not on {others}"
        f"{f'; ranks also differ in {few(different[1:])}' if different[1:] else ''}. Set requires_grad in the same "
        "way on all ranks, between the same two steps"
    )


def _cut_off(index: int, sets: Mapping[Ranks, int], units: Sequence[UnitEntry]) -> str:
    """The message about the unit of parameter `index`, whose outputs need a gradient on some ranks only."""
    unit = next(each for each in units if index in each.parameters)
    some, others = _with_and_without(1 << index, sets)
    return (
        f"The outputs of unit {unit.label} require a gradient on {some}, but not on {others}, where "
        "its parameters require one as well: something cuts the graph there, such as detach(), torch.no_grad() or a "
        "different choice of outputs. Do that on all ranks or on none"
    )


def _with_and_without(bit: int, sets: Mapping[Ranks, int]) -> tuple[str, str]:
    """The ranks whose sets have `bit`, and the other ranks, in words."""
    some = sorted(rank for ranks, bits in sets.items() if bits & bit for rank in ranks)
    others = sorted(rank for ranks, bits in sets.items() if not bits & bit for rank in ranks)
    return ranks_in_words(some), ranks_in_words(others)
