"""The engine's trace, a bounded list of events for error messages, tests and profilers; and observers of a step.

[Note: trace] An event is (name, unit, phase). For one unit they occur in this order: `gather` (all-gather issued),
`gathered` (its result is in use), `forward`, `reshard`, `backward` (gradient computation of the unit begins), `grads`
(its last expected gradient arrived), `reduce` (reduction issued), `step` (an optimizer in backward steps), `end` (of
a backward, unit ""). Others are recorded where these happen: `upload` (parameters come from memory that this rank
keeps), `post_forward_shard` and `keep` (such memory is filled), `consolidate` (a flat tensor is gathered for a state
dict).

[Note: observers] An *observer* is attached from outside and is called at a few points of a step; the model does not
depend on its type. At each point only those observers are called that define the method, so a point without observers
costs no call. At two points they may provide objects that the engine calls: the turns of a forward ([Note: turns]), the
finisher of a backward ([Note: finishers]).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

from ...errors import ROOT

KEPT = 512
T = TypeVar("T")


class Event(NamedTuple):
    """One action of the engine: its name, the unit's name and the phase in which it happened."""

    name: str
    unit: str
    phase: str

    def __str__(self) -> str:
        return f"{self.name} {self.unit or ROOT} ({self.phase})"


class EventLog:
    """The last events of one model; listeners see every event as it happens."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, str, str]] = deque(maxlen=KEPT)  # converted to `Event` when read
        self._listeners: list[Callable[[Event], None]] = []
        self.append = self._events.append  # takes the three parts of an event; `_notify` while there are listeners

    def record(self, name: str, unit: str, phase: str) -> None:
        """Append one event."""
        self.append((name, unit, phase))

    def _notify(self, event: tuple[str, str, str]) -> None:
        self._events.append(event)
        for listener in self._listeners:
            listener(Event(*event))

    def tail(self, count: int = 8) -> list[Event]:
        """The last `count` events, oldest first."""
        return [Event(*event) for event in list(self._events)[-count:]]

    @contextmanager
    def listening(self, listener: Callable[[Event], None] | None = None) -> Iterator[list[Event]]:
        """Collect the events that happen inside the context, and pass them to `listener`."""
        seen: list[Event] = []

        def record(event: Event) -> None:
            seen.append(event)
            if listener is not None:
                listener(event)

        self._listeners.append(record)
        self.append = self._notify
        try:
            yield seen
        finally:
            self._listeners.remove(record)
            if not self._listeners:
                self.append = self._events.append


class Observer:
    """Base class of observers; a subclass overrides the methods of the points that it needs. [Note: observers]

    Attributes:
        requested_by: the public function with which every rank attached it. Ranks compare it, and units with it stay in
            their model. "" for observers that need neither.
    """

    requested_by = ""

    @property
    def description(self) -> str:
        """A text that must be equal on all ranks; "" for nothing."""
        return self.requested_by

    def options_changed(self) -> None:
        """Called when a user has changed options of a unit."""

    def setup_begins(self, units: Any) -> None:
        """Called when the `units` of a model are named and connected, before they are compared with other ranks'; may
        raise, or change them."""

    def placed(self, units: Any, device: Any) -> None:
        """Called when tensors of `units`, which compute on `device`, may have moved; may raise."""

    def takes_over(self, units: Any) -> None:
        """Called before parameters of `units` are gathered or read, mostly between iterations: users may have assigned
        tensors instead of them; may raise."""

    def step_begins(self, unit: Any) -> bool:
        """Called before an outermost forward, of `unit`, or before a backward (then `unit` is None). Returns True if it
        replaced methods of the engine's objects: then the call of `unit` is repeated."""
        return False

    def before_first_gather(self) -> str:
        """Called before a forward gathers: a text, equal on all ranks, about an action that is to precede that."""
        return ""

    def first_gather_agreed(self) -> None:
        """Called when all ranks agree on the text: does the announced action, which may be collective."""

    def forward_begins(self, unit: Any, inputs: Any, *, outermost: bool) -> None:
        """Called when the forward of `unit` gets `inputs`; not in a recomputation."""

    def forward_ended(self, unit: Any, output: Any, *, outermost: bool) -> None:
        """Called when the forward of `unit` has computed `output`; not in a recomputation."""

    def training_begins(self, units: Any) -> None:
        """Called when a forward with gradients of a model of these `units` begins, or a user requests one of them
        outside of a forward; may raise."""

    def backward_reaches(self) -> None:
        """Called when a backward reaches a unit; may raise."""

    def unit_reached(self, unit: Any) -> None:
        """Called when a backward reaches `unit`, before its parameters are gathered."""

    def graph_left(self) -> None:
        """Called when the graph task of a backward has ended, before outstanding reductions, or has failed; then during
        exception handling."""

    def backward_agreed(self, *, reduces: bool) -> None:
        """Called when ranks have agreed on a backward, before it issues collectives: may be collective. `reduces`:
        whether any unit reduces gradients in it."""

    def forward_order(self, units: Any) -> Any:
        """Called if options of a unit have changed since the last forward: the turns of the model of these `units`;
        None if this observer does not define any."""

    def finisher(self, *, sync: bool) -> Any:
        """The finisher of the backward that begins; None if this observer does not define one. That of the last
        observer counts. `sync`: whether there are units that reduce."""

    def backward_begins(self, units: Any) -> None:
        """Called before gradients of the `units` of a model arrive in a backward; and for a unit that it reaches later
        if hooks were registered on any tensors since; may raise."""

    def gradient_came(self, unit: Any, kind: int, index: int, grad: Any) -> None:
        """Called for this rank's gradient of an unsharded parameter: of leaf `index` of a handle of `unit`."""

    def reduced(self, unit: Any) -> None:
        """Called when gradients of `unit`, on which an optimizer steps during the backward, were reduced."""

    def backward_ends(self) -> None:
        """Called when all gradients of a backward are reduced, before they become `.grad` (except those stepped on)."""

    def gradients_complete(self, finished: Any) -> None:
        """Called with units and those of their handles whose sharded gradients have become `.grad` and are complete."""

    def gradients_lost(self, units: Any) -> None:
        """Called when a backward over `units` has failed, before the gradients that it has reduced are dropped."""

    def backward_ended(self, backward: Any) -> None:
        """Called when the gradients of `backward` are complete, except for units that finish later."""


POINTS = tuple(name for name, value in vars(Observer).items() if callable(value))
_NOTHING_CALLED: dict[str, tuple[Callable[..., Any], ...]] = dict.fromkeys(POINTS, ())


@cache  # several observers are attached to each new unit
def _points_of(cls: Any) -> tuple[str, ...]:
    """The points whose methods that class of observers overrides."""
    return tuple(point for point in POINTS if getattr(cls, point) is not getattr(Observer, point))


class Observers:
    """The observers of one model: for each point, a tuple of the methods to call.

    An observer may remove itself while it is called.
    """

    options_changed: tuple[Callable[[], None], ...]
    setup_begins: tuple[Callable[[Any], None], ...]
    placed: tuple[Callable[[Any, Any], None], ...]
    takes_over: tuple[Callable[[Any], None], ...]
    step_begins: tuple[Callable[[Any], bool], ...]
    before_first_gather: tuple[Callable[[], str], ...]
    first_gather_agreed: tuple[Callable[[], None], ...]
    forward_begins: tuple[Callable[..., None], ...]
    forward_ended: tuple[Callable[..., None], ...]
    training_begins: tuple[Callable[..., None], ...]
    backward_reaches: tuple[Callable[[], None], ...]
    unit_reached: tuple[Callable[[Any], None], ...]
    graph_left: tuple[Callable[[], None], ...]
    backward_agreed: tuple[Callable[..., None], ...]
    forward_order: tuple[Callable[[Any], Any], ...]
    finisher: tuple[Callable[..., Any], ...]
    backward_begins: tuple[Callable[..., None], ...]
    gradient_came: tuple[Callable[..., None], ...]
    reduced: tuple[Callable[..., None], ...]
    backward_ends: tuple[Callable[..., None], ...]
    gradients_complete: tuple[Callable[..., None], ...]
    gradients_lost: tuple[Callable[[Any], None], ...]
    backward_ended: tuple[Callable[..., None], ...]

    def __init__(self) -> None:
        self.set()

    def set(self, *observers: Observer) -> None:
        """Replace all observers by these."""
        self.all = observers
        vars(self).update(_NOTHING_CALLED)
        for each in observers:
            cls: Any = type(each)
            for point in _points_of(cls):
                setattr(self, point, (*getattr(self, point), getattr(each, point)))

    def add(self, observer: Observer) -> None:
        """Call `observer` from now on."""
        self.set(*self.all, observer)

    def remove(self, observer: Observer) -> None:
        """Stop calling `observer`."""
        self.set(*[each for each in self.all if each is not observer])

    def find(self, cls: type[T]) -> T | None:
        """The first observer of that class; None if there is none."""
        for each in self.all:
            if isinstance(each, cls):
                return each
        return None

    def begin_step(self, unit: Any) -> bool:
        """Call `step_begins` of all observers; returns True if any replaced methods."""
        return any([observe(unit) for observe in self.step_begins])
