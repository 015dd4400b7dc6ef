"""What usually comes next, learned from a stream of symbols; pure.

[Note: predicted order] All ranks feed the same agreed stream to their own `SequencePredictor`, so all hold the same
expectations without an exchange. Where two ranks diverge, at least one of them does what its predictor did not expect,
and notices at no cost. Nothing else is needed of the predictor; a better one only makes surprises rarer.

Inside a forward what follows is expected from the unit that runs and how often it has run in this forward. Between
forwards and backwards it is what followed the longest run of them that came before and ended like the present one: a
window of accumulation, or players that are trained in turns, are no surprise once they have been seen. Of several such
runs the earliest counts: of steps that were all alike most were followed by another, only the last ones by what ended
them. Where there is none, what completes an iteration is expected to be followed by the stream's beginning.
"""

from __future__ import annotations

SYMBOLS = 4096  # beyond it everything is forgotten, on every rank at the same symbol
PAST = 4096  # what is looked back upon: half as many symbols at the least


class SequencePredictor:
    """Expects the next symbol (an integer) of a stream; `learn` each symbol that came."""

    def __init__(self) -> None:
        self._inside: dict[tuple[int, int], int] = {}
        self._ends: set[int] = set()  # symbols that ended a forward: which one does hangs on what began it
        self._visits: dict[int, int] = {}  # of this forward: unit -> times
        self._now: tuple[int, int] | None = None  # in a forward: the unit that runs and which visit of it this is
        # What came between the units of forwards, a character for each symbol: texts are searched at no cost in Python.
        self._past = ""
        self._letters: dict[int, str] = {}
        self._symbols: list[int] = []  # by the number of its character
        self._begun = 0  # where in the past the present begins
        self._follower: int | None = None  # where the past has what followed a run like the present one
        self._first: int | None = None
        self._completed = False  # the last symbol completes an iteration

    def expected(self) -> int | None:
        """The next symbol, None where nothing like the present was seen before."""
        if self._now is not None:
            found = self._inside.get(self._now)
            if found not in self._ends or self._follower is None:
                return found
        if self._follower is not None:
            return self._symbols[ord(self._past[self._follower])]
        return self._first if self._completed else None

    def learn(self, symbol: int, *, unit: int | None = None, completes: bool = False) -> None:
        """`symbol` came. `unit`: it entered this unit of a forward; None: it ended a forward or was none.

        `completes`: an iteration may end here.
        """
        if self._first is None:
            self._first = symbol
        before, self._now = self._now, None
        if before is not None:
            self._inside[before] = symbol
            if unit is None:
                self._ends.add(symbol)
        self._completed = completes
        if unit is not None:
            visit = self._visits.get(unit, 0) + 1
            self._visits[unit] = visit
            self._now = (unit, visit)
            if before is not None:
                return
        else:
            self._visits.clear()
        letter = self._letters.get(symbol)
        if letter is None:
            letter = self._take_letter(symbol)
        follower, self._follower = self._follower, None
        if follower is not None and self._past[follower] == letter:
            self._follower = follower + 1
        self._past += letter
        if self._follower is None or len(self._past) == PAST:
            self._look_back()

    def forget_present(self) -> None:
        """The stream was cut off: nothing that came before predicts what comes next."""
        self._visits.clear()
        self._now = None
        self._begun = len(self._past)
        self._follower = None
        self._completed = False

    def _take_letter(self, symbol: int) -> str:
        if len(self._symbols) == SYMBOLS:
            self._inside.clear()
            self._ends.clear()
            self._letters.clear()
            self._symbols.clear()
            self._past, self._begun, self._follower = "", 0, None
        letter = self._letters[symbol] = chr(len(self._symbols))
        self._symbols.append(symbol)
        return letter

    def _look_back(self) -> None:
        """Find where the past goes on after the longest run in it that is like its own end."""
        if len(self._past) == PAST:
            self._past, self._begun = self._past[PAST // 2 :], max(0, self._begun - PAST // 2)
        self._follower = None
        past, end = self._past, len(self._past)
        seen, most = 0, end - self._begun  # a run of so many was seen before; none of more can be
        while seen < most:
            length = (seen + most + 1) // 2
            found = past.find(past[end - length :], 0, end - 1)
            if found < 0:
                most = length - 1
            else:
                seen, self._follower = length, found + length
