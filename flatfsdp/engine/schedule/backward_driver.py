"""The interfaces of a backward schedule: to facts about units and the graph task, and to its actions; pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

U = TypeVar("U", bound=Hashable)
U_contra = TypeVar("U_contra", bound=Hashable, contravariant=True)


@dataclass(frozen=True, slots=True)
class UnitRules(Generic[U]):
    """The settings of a unit that are fixed before the backward, the same on all ranks.

    Attributes:
        prefetch: when the next group is gathered: when this unit is reached, half-way through its gradients, or when it
            is freed; None: not prefetched.
        targets: units to gather right after it instead of the next group.
        reads: whether its backward reads the parameters, so that they are gathered.
        reduces: whether its gradients are reduced, instead of accumulated unsharded.
        stays_unsharded: whether it is left unsharded after its part of the backward.
        owners: units whose parameters it uses, which are gathered whenever it is.
    """

    prefetch: Literal["before", "halfway", "after"] | None = "before"
    targets: tuple[U, ...] = ()
    reads: bool = True
    reduces: bool = True
    stays_unsharded: bool = False
    owners: tuple[U, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitFacts(Generic[U]):
    """Functions that return facts about a unit while a backward runs.

    Attributes:
        completed: whether every gradient has arrived that this backward awaits for it.
        expects_gradients: whether gradients are awaited, or all have arrived.
        has_gradients: whether any has arrived.
        is_over: whether the backward has finished its first call, and therefore all calls.
        is_used_once: whether in earlier backwards each of its gradients arrived once, and not in an inner graph task.
        is_unsharded: whether it is gathered, or its gather is in flight.
        is_trained: whether a parameter of it requires a gradient.
        elements: the number of elements of the gradients that it can get.
        awaits_gradients: whether the running graph task will compute gradients that it lacks.
        participates: whether it has gradients to reduce.
    """

    completed: Callable[[U], bool]
    expects_gradients: Callable[[U], bool]
    has_gradients: Callable[[U], bool]
    is_over: Callable[[U], bool]
    is_used_once: Callable[[U], bool]
    is_unsharded: Callable[[U], bool]
    is_trained: Callable[[U], bool]
    elements: Callable[[U], int]
    awaits_gradients: Callable[[U], bool]
    participates: Callable[[U], bool]


class Driver(Protocol[U_contra]):
    """The interface through which a schedule acts, and reads the state of the graph task.

    Attributes:
        double: `create_graph`: the parameters are needed again.
        brings: whether it brings gradients of parameters, as far as ranks have agreed: then all of them reduce.
    """

    double: bool
    brings: bool

    def in_inner_task(self) -> bool:
        """Whether a graph task inside of this backward's graph task runs."""

    def is_running(self, checkpoint: object) -> bool:
        """Whether the node whose backward runs is that of this reentrant checkpoint."""

    def will_recompute(self, checkpoint: object) -> bool:
        """Whether the running graph task reaches this reentrant checkpoint."""

    def gather(self, units: Sequence[U_contra], *, ahead: bool) -> None:
        """Issue the gather of those units of a group that are sharded, possibly `ahead` of their use."""

    def release_inputs(self) -> None:
        """Let reductions release their inputs, because a gather is about to allocate memory."""

    def participate(self, unit: U_contra) -> None:
        """Provide gradients of `unit`: zeros if this backward computes none."""

    def complete(self, unit: U_contra) -> None:
        """Stop awaiting gradients of `unit`."""

    def reduce(self, units: Sequence[U_contra]) -> None:
        """Issue the reduction of a group."""

    def end_turn(self) -> None:
        """Called when all reductions whose turn it is have been issued."""

    def reshard(self, unit: U_contra) -> None:
        """Free the unsharded parameters."""
