"""The other ranks of one model, as the runtime sees them, and the values that it reports to them.

[Note: peers] The runtime reports what it is about to do, and what it did. `Peers` compares nothing: it trusts that all
ranks do the same. The agreement is attached to a model instead, when it is built, and compares everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from ...errors import warn
from .hashing import hash63

# A value that must be equal on all ranks: (its subject, the value, whether the subject is compared as well). Names of
# parameters are not compared: FSDP1 compares only their order and shapes, and ranks that ignore different numbers of
# modules in a list number the others differently. Plain tuples, since there are many.
Fact = tuple[str, str, bool]

# Checksums of a rank's initial values, by parameter; None for one that was written to since. The last number is equal
# on ranks that must have equal values.
Checksums = list[tuple[str, int | None, int]]

# Why a unit is gathered already when a forward enters it.
RUNS = " inside of its own forward"
STAYED = ", which had stayed unsharded"


def with_unsharded(owner: str) -> str:
    """That the unit `owner`, whose parameters the entered one uses, is gathered already."""
    return f", with unit {owner} unsharded"


class UnitEntry(NamedTuple):
    """A unit: its label in messages, and the range of its parameters among those of the model."""

    label: str
    parameters: range

    @property
    def mask(self) -> int:
        """A number with a bit for each of its parameters."""
        return (1 << self.parameters.stop) - (1 << self.parameters.start)


class BackwardPlan(NamedTuple):
    """The properties of a backward that ranks compare.

    Attributes:
        sync: False under `no_sync()`.
        brings: whether it brings gradients of parameters.
        begun, ended: units in the order in which they began their forward, and in which they last ended it with an
            output through which gradients can reach them.
        flats: flat gradients that it can compute, as (unit, kind).
        trained: a bit for each parameter that requires a gradient.
        post_forward: units that are gathered from a post-forward shard.
        schedule: the user-defined settings, in words.
    """

    sync: bool
    brings: bool
    begun: list[int]
    ended: list[int]
    flats: list[tuple[int, int]]
    trained: int
    post_forward: list[int]
    schedule: str


class Issued:
    """The collectives that backwards of one model have issued and that ranks have yet to compare.

    Attributes:
        gathered, reduced: units in order.
        without_sync: the different orders of gathers in earlier backwards under `no_sync()`; carried: a number for all
            of these, in order.
    """

    def __init__(self) -> None:
        self.gathered: list[int] = []
        self.reduced: list[int] = []
        self.without_sync: dict[tuple[int, ...], None] = {}
        self.carried = 0

    def carry_over(self) -> None:
        """A backward under `no_sync()` has ended: its gathers are compared at the end of the next one that reduces."""
        if self.gathered:
            gathered = tuple(self.gathered)
            self.without_sync[gathered] = None
            self.carried = hash63(f"{self.carried} {gathered}")
            self.gathered.clear()

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[object, ...]]:
        """The gathers and the reductions, and what was carried over, to be compared; none are left."""
        before = (self.carried, *self.without_sync) if self.carried else ()
        taken = tuple(self.gathered), tuple(self.reduced), before
        self.gathered.clear()
        self.reduced.clear()
        self.without_sync.clear()
        self.carried = 0
        return taken

    def clear(self) -> None:
        """They are not compared: this rank is alone, or their backward was abandoned."""
        self.take()


def bits_of(flags: Iterable[bool]) -> int:
    """A number with a bit for each flag, the lowest first."""
    return sum(flag << position for position, flag in enumerate(flags))


class Peers:
    """The other ranks of one model, which are trusted to do the same: nothing is compared. [Note: peers]

    Units are numbers here, in the order of the model.

    Attributes:
        stepped, loaded: whether an optimizer stepped, or a state dict was loaded, since the last step began; set by the
            code that does so.
        forwards_are_local: whether forwards do not communicate, so that ranks may differ in them.
        issued: the collectives of backwards.
        is_alone: whether there are no other ranks.
    """

    def __init__(self) -> None:
        self.issued = Issued()
        self.stepped = self.loaded = self.forwards_are_local = False
        self.is_alone = True

    @property
    def diverged(self) -> bool:
        """Whether ranks are known to differ, or to be lost."""
        return False

    # -- the model ---------------------------------------------------------------------------------------------------

    def compare_values(self, values: Callable[[], Checksums]) -> None:
        """Compare the initial values of all ranks, once."""

    # -- forwards ----------------------------------------------------------------------------------------------------

    def begin_forward(self, trained: Callable[[], tuple[bool, ...]], *, training: bool, device_type: str) -> None:
        """Begin an outermost forward. `trained`: whether each parameter requires a gradient now. `device_type`: the
        device type of autocast."""

    def check_order(self, unit: int, *, schedule: str, gathered: str = "") -> None:
        """Check that all ranks enter this unit next, and that all of them gather it or none does. `schedule`: the
        user-defined settings, in words. `gathered`: why the unit is gathered already."""

    def check_request(self, unit: int, method: str) -> None:
        """Check that all ranks call this `method`, with which the user gathers or frees this unit."""

    def end_forward(self) -> None:
        """End the outermost forward."""

    def resume_forward(self) -> None:
        """Continue a forward after a backward inside of it."""

    # -- backwards ---------------------------------------------------------------------------------------------------

    def check_backward(self, plan: Hashable, describe: Callable[[], BackwardPlan], *, reduces: bool) -> None:
        """Begin a backward, and check that it issues the same collectives on all ranks, and computes gradients of the
        same parameters. `plan`: equal for backwards that are equal on this rank; `describe` is called for a new one.
        `reduces`: whether it brings gradients, and any unit reduces them."""

    def check_issued(self, lacking: int) -> int:
        """Check, after a backward that reduces, that all ranks have issued the same collectives. `lacking`: a bit for
        each parameter of which this rank has no gradient; returns those of which no rank has one, as far as it is
        known: the gradients of others are zeros there."""
        self.issued.clear()
        return lacking if self.is_alone else 0

    def check_unforeseen(self) -> None:
        """Check, at the first gradient of a parameter in a backward of which ranks agreed that it brings none, that
        one came to all. Not collective."""

    def check_gathered(self) -> None:
        """Check, after a backward that brought no gradients, that all ranks have gathered the same units. Not
        collective, since some ranks may wait for a gather."""
        self.issued.clear()

    # -- between iterations ------------------------------------------------------------------------------------------

    def collective_call(
        self, call: str, units: Sequence[int] = (), *, always: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """A context: check that all ranks make this `call` of the API, between iterations, for the same `units`. If no
        unit is sharded, only an `always` call communicates."""
        return contextlib.nullcontext()

    def waiting(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """A context in which this rank may wait for others, in an iteration or between iterations."""
        return contextlib.nullcontext()

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. Collective over all axes, if ranks are compared."""
        return flag

    def warn(self, message: str, *, names_rank: bool = False) -> None:
        """Warn on one of the ranks that have this `message`. `names_rank`: it may exist only on this rank."""
        warn(message)

    # -- ends --------------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Return to the state between iterations, in which this rank does not wait for others."""

    def refuse(self, error: BaseException) -> None:
        """Record an `error` in a backward, to report it to other ranks: autograd does not pass it on."""

    def explain(self, error: BaseException) -> None:
        """Raise the error behind `error`, if it is a failure of the communication."""

    def abandon(self, error: BaseException | None) -> None:
        """Notify the others that `error` ended a forward, or raise the disagreement that caused it."""

    def publish_abandoned(self, error: BaseException | None) -> None:
        """Notify the others that an exception ended the iteration here, without waiting for them or raising."""
        self.issued.clear()

    def meet_abandoned(self) -> None:
        """If the last iteration was abandoned, wait until all ranks have abandoned it. Not collective."""
