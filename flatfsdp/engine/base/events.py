"""The engine's story: a bounded list of events for error messages, tests and profilers; and who looks on as it happens.

[Note: trace] An event is (kind, unit, phase). Kinds come in the order in which a unit lives: `gather` (all-gather
issued), `gathered` (its result is in use), `forward`, `reshard`, `backward` (gradient computation of the unit begins),
`grads` (its last expected gradient arrived), `reduce` (reduction issued), `reduced` (its result is a shard), `step` (an
optimizer in backward steps), `end` (of a backward, unit "").

[Note: observers] An *observer* is attached from outside and sees values at a few points of a step; the model knows none
by its type. At each point are called the methods of those observers that have one there, so what nobody looks at costs
no call. At two points they may hand down what acts in their place: the turns of a forward
([Note: turns]), the finisher of a backward ([Note: finishers]).
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
    """One thing that the engine did: its kind, the unit's name and the phase in which it happened."""

    kind: str
    unit: str
    phase: str

    def __str__(self) -> str:
        return f"{self.kind} {self.unit or ROOT} ({self.phase})"


class EventLog:
    """The last events of one model; listeners see every event as it happens."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, str, str]] = deque(maxlen=KEPT)  # made events when somebody looks
        self._listeners: list[Callable[[Event], None]] = []
        self.append = self._events.append  # takes the three parts of an event; `_notify` while somebody listens

    def record(self, kind: str, unit: str, phase: str) -> None:
        """Append one event."""
        self.append((kind, unit, phase))

    def _notify(self, event: tuple[str, str, str]) -> None:
        self._events.append(event)
        for listener in self._listeners:
            listener(Event(*event))

    def tail(self, count: int = 8) -> list[Event]:
        """The last `count` events, oldest first."""
        return [Event(*event) for event in list(self._events)[-count:]]

    @contextmanager
    def listening(self, listener: Callable[[Event], None] | None = None) -> Iterator[list[Event]]:
        """Collect (and hand to `listener`) the events that happen inside the context."""
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
    """Looks on, from outside; a class has methods of its own for the points that it wants to see. [Note: observers]

    Attributes:
        requested_by: the public function by which every rank attached it, which ranks compare and which keeps units in
            their model; "" for what needs neither.
    """

    requested_by = ""

    @property
    def description(self) -> str:
        """What ranks must have in common, in words; "" for nothing."""
        return self.requested_by

    def options_changed(self) -> None:
        """What users chose for a unit was changed."""

    def step_begins(self, unit: Any) -> bool:
        """An outermost forward, of `unit`, is about to begin, or a backward where that is None. True if methods of the
        engine's objects are others from now on: the call of `unit` is made again."""
        return False

    def before_first_gather(self) -> str:
        """A forward is about to gather: what this one will do before, in words that are equal on all ranks."""
        return ""

    def first_gather_agreed(self) -> None:
        """All ranks go on with that: does it. Collective as those words state."""

    def forward_begins(self, unit: Any, inputs: Any, *, outermost: bool) -> None:
        """The forward of `unit` is given `inputs`; not where it runs again for a backward."""

    def forward_ended(self, unit: Any, output: Any, *, outermost: bool) -> None:
        """The forward of `unit` has made `output`; not where it runs again for a backward."""

    def backward_reaches(self) -> None:
        """A backward has come to a unit; may refuse it."""

    def forward_order(self, units: Any) -> Any:
        """What users chose for a unit was changed since the last forward: the turns of the model of these `units`, None
        if they are no concern of this one."""

    def finisher(self, *, sync: bool) -> Any:
        """What finishes the backward that begins, None if that is no concern of this one. `sync`: whether there are
        units that reduce."""

    def gradient_came(self, unit: Any, kind: int, index: int, grad: Any) -> None:
        """This rank's gradient of an unsharded parameter has come: that of the leaf `index` of a handle of `unit`."""

    def reduced(self, unit: Any) -> None:
        """Gradients of `unit`, which an optimizer steps on while the backward goes on, were reduced."""

    def backward_ends(self) -> None:
        """All gradients of a backward are reduced; none has become `.grad`, but those that were stepped on."""

    def backward_ended(self, backward: Any) -> None:
        """The gradients of `backward` are there, but those of units that finish later."""


POINTS = tuple(name for name, value in vars(Observer).items() if callable(value))
_NOTHING_CALLED: dict[str, tuple[Callable[..., Any], ...]] = dict.fromkeys(POINTS, ())


@cache  # several are attached to each unit when it is made
def _points_of(kind: Any) -> tuple[str, ...]:
    """Where observers of that class have methods of their own."""
    return tuple(point for point in POINTS if getattr(kind, point) is not getattr(Observer, point))


class Observers:
    """The observers of one model: at each point, what is to be called there.

    An observer may leave while it is called.
    """

    options_changed: tuple[Callable[[], None], ...]
    step_begins: tuple[Callable[[Any], bool], ...]
    before_first_gather: tuple[Callable[[], str], ...]
    first_gather_agreed: tuple[Callable[[], None], ...]
    forward_begins: tuple[Callable[..., None], ...]
    forward_ended: tuple[Callable[..., None], ...]
    backward_reaches: tuple[Callable[[], None], ...]
    forward_order: tuple[Callable[[Any], Any], ...]
    finisher: tuple[Callable[..., Any], ...]
    gradient_came: tuple[Callable[..., None], ...]
    reduced: tuple[Callable[..., None], ...]
    backward_ends: tuple[Callable[..., None], ...]
    backward_ended: tuple[Callable[..., None], ...]

    def __init__(self) -> None:
        self.set()

    def set(self, *observers: Observer) -> None:
        """Have these, and no others."""
        self.all = observers
        vars(self).update(_NOTHING_CALLED)
        for each in observers:
            kind: Any = type(each)
            for point in _points_of(kind):
                setattr(self, point, (*getattr(self, point), getattr(each, point)))

    def add(self, observer: Observer) -> None:
        """Call `observer` from now on."""
        self.set(*self.all, observer)

    def remove(self, observer: Observer) -> None:
        """Call it no more."""
        self.set(*[each for each in self.all if each is not observer])

    def find(self, kind: type[T]) -> T | None:
        """The first of that `kind`."""
        for each in self.all:
            if isinstance(each, kind):
                return each
        return None

    def begin_step(self, unit: Any) -> bool:
        """Call all that have `step_begins`. True if methods changed."""
        return any([observe(unit) for observe in self.step_begins])
