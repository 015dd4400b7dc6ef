"""Ops: the steps that a model does together with other ranks, each with a code and a description; pure.

The code is equal on all ranks that do the same. Units and parameters are numbers here: the index of a unit in the
model, and the bit of a parameter in a number.

[Note: conditions] Some differences between ranks change results without any communication: an optimizer's step, a
loaded state dict, autocast. If only one rank has it, all continue together, with pieces of different models or in
different precision. So the op of a forward includes these conditions ([Note: agreement]), at no cost while they are as
expected. If nothing is sharded, ranks may differ in forwards: then a backward's op includes those of its forward.
"""

from __future__ import annotations

import functools
import itertools
import json
import string
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..base.foreign_text import one_line, parse
from ..base.hashing import hash63
from ..base.peers import BackwardPlan, UnitEntry, bits_of

TRAINING, EVALUATION = "a training", "an evaluation"  # modes of forwards, with and without gradients
PLANS = 64  # the most plans of backwards whose ops are cached


class StepConditions(NamedTuple):
    """The conditions with which a step begins.

    `stepped`, `loaded`: whether an optimizer stepped, or a state dict was loaded, since the last step began.
    `autocast`: its dtype, "" if it is off.
    """

    stepped: bool = False
    loaded: bool = False
    autocast: str = ""


def autocast_on(device_type: str) -> str:
    """The dtype of autocast on devices of this type; "" if it is off."""
    if not torch.is_autocast_enabled(device_type):
        return ""
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


class Op(NamedTuple):
    """One step of the sequence: a number that is equal on all ranks, and its description.

    Sets of parameters have one bit for each, as a number in base 16. `ran`, `trained`: of a backward, the parameters of
    units that ran in its forwards, and those whose gradients it is to compute; of a training forward, all parameters,
    and those that require gradients. `conditions`: of a forward or a backward. [Note: conditions]
    `unreached`: of a backward, the parameters of units that ran and whose outputs needed no gradient; in a note only
    those among them that required one themselves.
    """

    code: int
    words: str
    ran: str = ""
    trained: str = ""
    conditions: StepConditions = StepConditions()
    unreached: str = ""

    def to_text(self, required: Sequence[bool] = ()) -> str:
        """The text of a note for other ranks. `required`: whether each parameter required a gradient in the forward."""
        if self.unreached:
            return self._replace(unreached=f"{int(self.unreached, 16) & bits_of(required):x}")._as_text()
        return self._as_text()

    def _as_text(self) -> str:
        return json.dumps(self[1:])

    @classmethod
    def of(cls, text: str) -> Op:
        """The op that a rank wrote as `text`; for any other text one with that description. [Note: trust]"""
        match parse(text):
            case [
                str(words),
                str(ran),
                str(trained),
                [bool(stepped), bool(loaded), str(autocast)],
                str(unreached),
            ] if set(ran + trained + unreached) <= set(string.hexdigits):
                return cls(-1, words, ran, trained, StepConditions(stepped, loaded, autocast), unreached)
        return cls(-1, one_line(text))


class LoggedOp(NamedTuple):
    """An op, its position in the sequence, and the number of iterations that began before it."""

    at: int
    op: Op
    step: int


UNFORESEEN = Op(
    hash63("unforeseen"), "computed a gradient in a backward that seemed to compute no gradient of a parameter"
)
ENDED = {mode: Op(hash63(f"ended {mode}"), "ended its forward") for mode in (TRAINING, EVALUATION)}
IN_FORWARD = ("entered unit ", "ended its forward")  # ops of ranks that differ only in the units that a forward runs
BACKWARD, UNREDUCED = "began a backward", " under no_sync()"
ENDED_WITHOUT = "ended a backward that computed no gradient of a parameter"
BRINGS_NONE = ", which computes no gradient of a parameter"
ISSUED = "gathered in its backward the units"


def forward_in_words(mode: str) -> str:
    """That a forward in this mode begins."""
    return f"began {mode} forward"


def entered(index: int, unit: UnitEntry, gathered: str = "") -> Op:
    """A forward enters a unit. `gathered`: why it is gathered already, other than by a prefetch; "" if it is not."""
    return Op(hash63(f"unit {index}{gathered}"), f"entered unit {unit.label}{gathered}")


def requested(index: int, unit: UnitEntry, method: str) -> Op:
    """A user calls a `method` that gathers or frees a unit."""
    return Op(hash63(f"{method} {index}"), f"called {method}() of unit {unit.label}")


def called(call: str, indices: Sequence[int], units: Sequence[UnitEntry]) -> Op:
    """A user's `call`, for the units with these `indices`; for none, or all, it is a call for the model."""
    if not indices or len(indices) == len(units):
        return Op(hash63(call), f"called {call}")
    others = f" and {len(indices) - 1} inside" if len(indices) > 1 else ""
    return Op(hash63(f"{call} {[*indices]}"), f"called {call} of unit {units[indices[0]].label}{others}")


@functools.lru_cache(maxsize=PLANS)
def opening(mode: str, unit: int, label: str, schedule: str, conditions: StepConditions, flags: tuple[bool, ...]) -> Op:
    """A forward in this mode begins; `flags`: whether each parameter requires a gradient in it."""
    trained = f"{bits_of(flags):x}" if flags else ""
    code = hash63(f"{mode} {unit} {schedule} {conditions} {trained}")
    words = f"{forward_in_words(mode)} at unit {label}{_with(schedule)}"
    return Op(code, words, f"{(1 << len(flags)) - 1:x}" if flags else "", trained, conditions)


def backward(
    plan: BackwardPlan, units: Sequence[UnitEntry], begun_with: tuple[StepConditions, Sequence[bool]] | None
) -> Op:
    """A backward begins. `begun_with`: if forwards are not compared, the conditions of its forward, and whether each
    parameter required a gradient in it."""
    conditions, trained = StepConditions(), plan.trained
    if begun_with is not None:
        conditions, flags = begun_with
        trained &= bits_of(flags)  # parameters that were frozen in the forward get no gradient
    how = "" if plan.sync else UNREDUCED
    words = f"{BACKWARD}{how} through {len(plan.ended)} units, {len(plan.flats)} flat gradients"
    words += _with(plan.schedule)
    if not plan.brings:
        words += BRINGS_NONE
    if plan.post_forward:
        words += f"; {len(plan.post_forward)} units with post-forward shards"
    ran, unreached = (
        f"{sum(units[index].mask for index in indices):x}"
        for indices in (set(plan.begun), set(plan.begun).difference(plan.ended))
    )
    compared = f"{plan.sync} {plan.brings} {plan.begun} {plan.ended} {plan.flats} {plan.post_forward} {plan.schedule}"
    return Op(hash63(f"{compared} {trained:x} {conditions}"), words, ran, f"{trained:x}", conditions, unreached)


Units = tuple[int, ...]


def issued(units: Sequence[UnitEntry], gathered: Units, reduced: Units | None, before: tuple[int | Units, ...]) -> Op:
    """A backward has issued the collectives of these units; `reduced` is None if it brought no gradients. `before`: a
    number for the gathers in earlier backwards under `no_sync()`, and their different orders."""

    def in_words(which: Units) -> str:
        return ", ".join([units[i].label for i in which]) or "none"

    words = f"{ISSUED} {in_words(gathered)}, and reduced {in_words(reduced or ())}"
    if reduced is None:
        words = f"{ENDED_WITHOUT}, and gathered {in_words(gathered) if gathered else 'no unit'}"
    if before:
        words += f"; under no_sync() before it {' and '.join(map(in_words, before[1:]))}"  # type: ignore[arg-type]
    return Op(hash63(f"issued {gathered} {reduced} {before[:1]}"), words)


class IssuedBy(NamedTuple):
    """A collective of a unit, known by its model and its number there."""

    model: str
    unit: int
    label: str


@functools.lru_cache(maxsize=PLANS)
def issued_by_all(gathered: tuple[IssuedBy, ...], reduced: tuple[IssuedBy, ...], before: int) -> Op:
    """Backwards of several models have issued these collectives. `before`: a number for those of earlier ones."""

    def in_words(which: tuple[IssuedBy, ...]) -> str:
        found = itertools.groupby(which, lambda each: each.model)
        return ", then ".join([f"{', '.join(each.label for each in own)} of {model}" for model, own in found]) or "none"

    words = f"{ISSUED} {in_words(gathered)}, and reduced {in_words(reduced)}"
    if before:
        words += ", and others in earlier backwards"
    return Op(hash63(f"issued {[each[:2] for each in gathered]} {[each[:2] for each in reduced]} {before}"), words)


def abandoned(issued: int, doing: str, because: str) -> Op:
    """An exception ended an iteration after `issued` collectives."""
    return Op(hash63(f"abandoned {issued}"), f"abandoned its iteration in {doing}{because}")


def _with(schedule: str) -> str:
    return f" with {schedule}" if schedule else ""
