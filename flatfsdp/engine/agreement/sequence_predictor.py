"""Prediction of the next symbol of a stream from its past; pure.

[Note: predicted order] All ranks feed the same agreed stream to their own `SequencePredictor`, so all have the same
expectations without an exchange. If two ranks diverge, at least one of them does an op that its predictor did not
expect, and detects that at no cost. This is the only requirement; a better predictor only makes surprises rarer.

Inside a forward the next symbol is predicted from the unit that runs and the number of its runs in this forward.
Between forwards and backwards, it is the symbol after the longest earlier run of symbols that equals the end of the
stream: windows of gradient accumulation, or models that are trained in turns, are no surprise once they have been seen.
Of several such runs the earliest counts: in a series of equal steps, most steps were followed by another one, and only
the last one by the end of the series. If there is no such run, the stream's beginning is expected after an iteration.
"""

from __future__ import annotations

SYMBOLS = 4096  # different symbols, beyond which everything is forgotten, on every rank at the same symbol
PAST = 4096  # symbols of the past that are kept, at most; at least half as many


class SequencePredictor:
    """Predicts the next symbol (an integer) of a stream; call `learn` with each symbol of it."""

    def __init__(self) -> None:
        self._inside: dict[tuple[int, int], int] = {}
        self._ends: set[int] = set()  # symbols that ended a forward: which one it is depends on the forward's beginning
        self._visits: dict[int, int] = {}  # of this forward: number of visits by unit
        self._now: tuple[int, int] | None = None  # in a forward: the unit that runs, and the number of this visit
        # The symbols outside of forwards, a character for each: searching text is fast in Python.
        self._past = ""
        self._letters: dict[int, str] = {}
        self._symbols: list[int] = []  # by the code of its character
        self._begun = 0  # the index in the past before which no run begins
        self._follower: int | None = None  # the index in the past of the predicted symbol
        self._first: int | None = None
        self._completed = False  # the last symbol completes an iteration

    def expected(self) -> int | None:
        """The predicted next symbol; None if there is no similar past."""
        if self._now is not None:
            found = self._inside.get(self._now)
            if found not in self._ends or self._follower is None:
                return found
        if self._follower is not None:
            return self._symbols[ord(self._past[self._follower])]
        return self._first if self._completed else None

    def learn(self, symbol: int, *, unit: int | None = None, completes: bool = False) -> None:
        """Append `symbol`. `unit`: it entered this unit of a forward; None: it ended a forward, or was outside of one.

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
        """After an interruption of the stream: do not use earlier symbols to predict the next one."""
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
        """Find the symbol after the longest earlier run in the past that equals its end."""
        if len(self._past) == PAST:
            self._past, self._begun = self._past[PAST // 2 :], max(0, self._begun - PAST // 2)
        self._follower = None
        past, end = self._past, len(self._past)
        seen, most = 0, end - self._begun  # a run of `seen` symbols was found; none of more than `most` exists
        while seen < most:
            length = (seen + most + 1) // 2
            found = past.find(past[end - length :], 0, end - 1)
            if found < 0:
                most = length - 1
            else:
                seen, self._follower = length, found + length
