"""The engine's story: a bounded list of events for error messages, tests and profilers.

[Note: trace] An event is (kind, unit, phase). Kinds come in the order in which a unit lives: `gather` (all-gather
issued), `gathered` (its result is in use), `forward`, `reshard`, `backward` (gradient computation of the unit begins),
`grads` (its last expected gradient arrived), `reduce` (reduction issued), `reduced` (its result is a shard), `step` (an
optimizer in backward steps), `end` (of a backward, unit "").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

KEPT = 512


class Event(NamedTuple):
    """One thing that the engine did: its kind, the unit's name and the phase in which it happened."""

    kind: str
    unit: str
    phase: str

    def __str__(self) -> str:
        return f"{self.kind} {self.unit or '<root>'} ({self.phase})"


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

        def hear(event: Event) -> None:
            seen.append(event)
            if listener is not None:
                listener(event)

        self._listeners.append(hear)
        self.append = self._notify
        try:
            yield seen
        finally:
            self._listeners.remove(hear)
            if not self._listeners:
                self.append = self._events.append
