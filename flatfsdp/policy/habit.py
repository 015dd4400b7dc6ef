"""What usually comes next, learned from a stream of symbols; pure.

[Note: habit] All ranks feed the same agreed stream to their own `Habit`, so all hold the same expectations without a
word. Where two ranks part ways, at least one of them does what its habit did not expect, and notices at no cost.
Nothing else is needed of the predictor; a better one only makes surprises rarer.

Inside a forward what follows is expected from the unit that runs and how often it has run in this forward. Between
forwards and backwards it is expected from the longest run of them that was seen before, so that a window of
accumulation is no surprise once it has been seen. Until then what completes an iteration is expected to be followed by
the stream's beginning.
"""

from __future__ import annotations

RUN = 8  # forwards and backwards that are looked back upon
CONTEXTS = 4096  # beyond it everything is forgotten, on every rank at the same symbol


class Habit:
    """Expects the next symbol (an integer) of a stream; `learn` each symbol that came."""

    def __init__(self) -> None:
        self._inside: dict[tuple[int, int], int] = {}
        self._between: dict[tuple[int, ...], int] = {}
        self._visits: dict[int, int] = {}  # of this forward: unit -> times
        self._now: tuple[int, int] | None = None  # in a forward: the unit that runs and which visit of it this is
        self._run: tuple[int, ...] = ()
        self._first: int | None = None
        self._completed = False  # the last symbol completes an iteration

    def expected(self) -> int | None:
        """The next symbol, None where nothing like the present was seen before."""
        if self._now is not None:
            return self._inside.get(self._now)
        for start in range(len(self._run)):
            found = self._between.get(self._run[start:])
            if found is not None:
                return found
        return self._first if self._completed else None

    def learn(self, symbol: int, *, unit: int | None = None, completes: bool = False) -> None:
        """`symbol` came. `unit`: it entered this unit of a forward; None: it ended a forward or was none.

        `completes`: an iteration may end here.
        """
        if self._first is None:
            self._first = symbol
        if self._now is not None:
            self._inside[self._now] = symbol
        else:
            for start in range(len(self._run)):
                self._between[self._run[start:]] = symbol
        self._completed = completes
        if unit is not None:
            visit = self._visits.get(unit, 0) + 1
            self._visits[unit] = visit
            self._now = (unit, visit)
            return
        self._visits.clear()
        self._now = None
        self._run = (*self._run, symbol)[-RUN:]
        if len(self._inside) + len(self._between) > CONTEXTS:
            self._inside.clear()
            self._between.clear()

    def forget_present(self) -> None:
        """The stream was cut off: nothing that came before says what comes next."""
        self._visits.clear()
        self._now = None
        self._run = ()
        self._completed = False
