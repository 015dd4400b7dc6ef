"""Two enums of two owners, and their legal transitions.

[Note: states] The *location of the data* belongs to a flat parameter (`ShardState`); the *phase of the iteration*
belongs to a unit (`Phase`). Neither is inferred from sizes or data pointers. A transition that the tables lack raises
an error with the end of the trace.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NoReturn, TypeVar

from ...errors import InternalError, UsageError, fail
from ..base.events import EventLog


class ShardState(enum.Enum):
    """Where a flat parameter's data is on this rank."""

    __hash__ = object.__hash__  # members are singletons; enum's own hash runs Python code in every step

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class Phase(enum.Enum):
    """The phase of a unit: between iterations, in its forward, before, in or after its backward, or summoned."""

    __hash__ = object.__hash__

    IDLE = "idle"
    FORWARD = "forward"
    PRE_BACKWARD = "pre-backward"  # gathered for backward; its gradients are arriving
    POST_BACKWARD = "post-backward"  # every expected gradient has arrived
    SUMMONED = "summoned"
    STEPPED = "stepped"  # an optimizer has stepped on it; nothing of its backward may touch it again


# Module-level names: access to a member of an enumeration takes 0.1 us in Python 3.11, and a step needs dozens.
SHARDED, GATHERING, UNSHARDED = ShardState
IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD, SUMMONED, STEPPED = Phase


SHARD_STEPS: Mapping[ShardState, frozenset[ShardState]] = {
    SHARDED: frozenset({GATHERING}),
    # An unused gather is waited for and freed.
    GATHERING: frozenset({UNSHARDED}),
    UNSHARDED: frozenset({SHARDED}),
}

PHASE_STEPS: Mapping[Phase, frozenset[Phase]] = {
    IDLE: frozenset({FORWARD, PRE_BACKWARD, SUMMONED}),
    # A module may be entered again inside its own forward (recursion); a recomputation enters forward from a backward
    # phase.
    FORWARD: frozenset({FORWARD, IDLE, PRE_BACKWARD, POST_BACKWARD}),
    PRE_BACKWARD: frozenset({PRE_BACKWARD, POST_BACKWARD, FORWARD, IDLE}),
    # A late gradient (reentrant checkpoint, second use) opens the unit again.
    POST_BACKWARD: frozenset({PRE_BACKWARD, FORWARD, POST_BACKWARD, STEPPED, IDLE}),
    STEPPED: frozenset({IDLE}),
    SUMMONED: frozenset({IDLE}),
}

S = TypeVar("S", ShardState, Phase)


def refuse_step(current: S, target: S, table: Mapping[S, frozenset[S]], who: str, events: EventLog | None) -> NoReturn:
    """Raise an `InternalError` with the end of the trace: the table does not lead from `current` to `target`. For a
    unit that was stepped already, raise a `UsageError`."""
    if current is STEPPED:
        happened = "forward ran again" if target is FORWARD else "backward continued"
        fail(
            UsageError(
                f"unit {who}: its {happened} after its parameters had been stepped in the same backward, which did "
                "not happen in earlier backwards. This backward would mix weights of two steps. Step such a model "
                "after the backward: call remove() of the object that optimizer_in_backward() returned"
            )
        )
    story = "; ".join(map(str, events.tail())) if events is not None else "no trace yet"
    raise InternalError(
        f"unit {who} cannot go from {current.value} to {target.value} (allowed: "
        f"{', '.join(sorted(s.value for s in table[current]))}). Last events: {story}"
    )


class Left(enum.Enum):
    """Users of leaves that show the unsharded parameters.

    COMPUTING: units compute with them. Others are left by forwards, or unsharded on request: modules hold them until
    the backward, among their parameters (LISTED) or not (HELD), or as long as the user wants (REQUESTED), or hold their
    holders again (SET_ASIDE).
    """

    COMPUTING = "computing"
    LISTED = "listed"
    HELD = "held"
    REQUESTED = "requested"
    SET_ASIDE = "set aside"
