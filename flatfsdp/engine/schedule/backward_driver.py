"""What the schedule of a backward reads of units and of the graph task, and what carries out its actions; pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

U = TypeVar("U", bound=Hashable)
U_contra = TypeVar("U_contra", bound=Hashable, contravariant=True)


@dataclass(frozen=True, slots=True)
class UnitRules(Generic[U]):
    """What was settled of a unit before the backward, the same on all ranks.

    Attributes:
        prefetch: when the next group is gathered: as this unit is reached, half-way through its gradients, or when it
            is freed; None: not ahead.
        targets: what is gathered right after it instead.
        reads: whether its backward reads the parameters, so that they are gathered.
        reduces: whether its gradients are reduced, and not added up unsharded.
        stays_unsharded: whether it is left unsharded after its part.
        owners: units of which it uses parameters, gathered whenever it is.
    """

    prefetch: Literal["before", "halfway", "after"] | None = "before"
    targets: tuple[U, ...] = ()
    reads: bool = True
    reduces: bool = True
    stays_unsharded: bool = False
    owners: tuple[U, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitFacts(Generic[U]):
    """What is read of a unit while a backward runs.

    Attributes:
        completed: whether every gradient has arrived that this backward awaits of it.
        expects_gradients: whether gradients are awaited, or all have come.
        has_gradients: whether any has come.
        is_over: whether its first call is over, and so all.
        is_used_once: whether each of its gradients came once, and in no graph task inside, in the backwards before.
        is_unsharded: whether it is gathered, or on its way.
        is_trained: whether a parameter of it requires a gradient.
        elements: of the gradients that it can get.
        awaits_gradients: whether the running graph task will bring gradients that it lacks.
        participates: whether there is something to reduce of it.
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
    """Carries out what a schedule decides, and knows the graph task.

    Attributes:
        double: `create_graph`: the parameters are needed again.
        gradient_has_arrived: a gradient of a parameter has come.
    """

    double: bool
    gradient_has_arrived: bool

    def in_inner_task(self) -> bool:
        """Whether a graph task inside of this backward's runs."""

    def is_running(self, checkpoint: object) -> bool:
        """Whether the node of the graph whose backward runs is that of this reentrant checkpoint."""

    def will_recompute(self, checkpoint: object) -> bool:
        """Whether the running graph task comes to this reentrant checkpoint."""

    def brings_gradients(self) -> bool:
        """Whether a gradient of a parameter has arrived or will."""

    def may_bring_more(self, unit: U_contra) -> bool:
        """Whether gradients of `unit` may come late, of calls in the record, though in backwards before none has."""

    def gradient_arrived(self, *, watched: bool) -> None:
        """Take part in this backward's reductions to the end."""

    def gather(self, units: Sequence[U_contra], *, ahead: bool) -> None:
        """Issue the gather of whatever is sharded of a group, maybe `ahead` of its use."""

    def release_inputs(self) -> None:
        """Let no reduction hold what it reads: a gather is about to take its memory."""

    def participate(self, unit: U_contra) -> None:
        """Let `unit` have gradients, zeros where this backward brings none."""

    def complete(self, unit: U_contra) -> None:
        """No gradient of `unit` is awaited any more."""

    def reduce(self, units: Sequence[U_contra]) -> None:
        """Issue the reduction of a group."""

    def end_turn(self) -> None:
        """Of reductions all were issued whose turn it is."""

    def reshard(self, unit: U_contra) -> None:
        """Free the unsharded parameters."""

    def report_no_gradients(self) -> None:
        """This backward passes over units without a gradient of any."""
