"""An exhaustive search of all interleavings of processes that share memory, in a small model of x86.

The searched code is the real code, on doubles of its shared memory. A double asks its `Replay` for each loaded value.
If there is no answer yet, an exception leaves the code, which is restarted later with the answers so far. So each
process is a value (its start, and its answers), and all interleavings can be followed from every state.

Stores go through a buffer of each process: other processes see them late, in order, and loads may overtake them
(x86-TSO). A `barrier`, and a system call, waits until the buffer is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple


class Paused(BaseException):
    """The code requests a value without an answer yet."""


class Wrong(AssertionError):
    """A violation. Its message is followed by the steps that led to it."""


class Request(NamedTuple):
    """The next action of a process.

    Attributes:
        kind: "load" of an address; "barrier"; "sleep" on an address if its value is still the one `seen`; "wake" the
            processes that sleep on an address; "again": restart as `local`; "end".
    """

    kind: str
    address: int = -1
    seen: int = 0
    local: Hashable = None


BARRIER, END = Request("barrier"), Request("end")


class Replay:
    """One run of a process's code, up to the first request without an answer.

    Attributes:
        stores: its stores since the last answer. request: its last request.
    """

    def __init__(self, answers: Sequence[int | None]) -> None:
        self._answers = deque(answers)
        self.stores: list[tuple[int, int]] = []
        self.request: Request | None = None

    def store(self, address: int, value: int) -> None:
        if self.request is None:  # not in a `finally` on the way out
            self.stores.append((address, value))

    def ask(self, request: Request) -> int:
        if self.request is None and self._answers and request.kind != "again":
            self.stores.clear()
            return self._answers.popleft() or 0
        self.request = self.request or request
        raise Paused

    def load(self, address: int) -> int:
        return self.ask(Request("load", address))


class Words:
    """Shared words from `first` on, for one process."""

    def __init__(self, replay: Replay, first: int) -> None:
        self._replay, self._first = replay, first

    def __getitem__(self, index: int) -> int:
        return self._replay.load(self._first + index)

    def __setitem__(self, index: int, value: int) -> None:
        self._replay.store(self._first + index, value)


Run = Callable[[Any, Replay], None]  # run(local, replay): the code of a process that starts as `local`


class _Process(NamedTuple):
    local: Hashable
    answers: tuple[int | None, ...]
    buffer: tuple[tuple[int, int], ...]
    sleeps: bool


State = tuple[int, ...]  # the numbers of the processes' values, and the memory


class Interleavings:
    """All states that processes over one memory can reach.

    Attributes:
        states: their number, once explored.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        begin: Sequence[Hashable],
        memory: int,
        *,
        together: Callable[[int], Hashable] = lambda address: address,
        in_order: bool = True,
    ) -> None:
        """`begin`: the processes' local states. `memory`: the number of words, all 0.

        `together`: consecutive loads from addresses with equal values of it are one step. `in_order`: if False,
        stores become visible in any order (unlike on x86).
        """
        self._runs = runs
        self._world = len(runs)
        self._together = together
        self._in_order = in_order
        self._known: dict[Hashable, tuple[tuple[tuple[int, int], ...], Request]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._processes: list[_Process] = []
        self._requests: list[Request] = []
        self._answers: dict[tuple[int, int], int] = {}
        numbers = [self._settled(index, _Process(local, (), (), False)) for index, local in enumerate(begin)]
        self._first: State = (*numbers, *[0] * memory)
        self.states = 0

    def explore(self, most: int = 2_000_000) -> None:
        """Visit every state.

        Raises:
            Wrong: the code raised it, or from some state not all processes can finish.
        """
        came_from: dict[State, list[State]] = {self._first: []}
        to_do, ended = [self._first], []
        while to_do:
            state = to_do.pop()
            try:
                following = list(self._following(state))
            except Wrong as wrong:
                raise Wrong(f"{wrong}\n{self._way_to(state, came_from)}") from None
            if not following and self._is_end(state):
                ended.append(state)
            for each in following:
                if each in came_from:
                    came_from[each].append(state)
                else:
                    came_from[each] = [state]
                    to_do.append(each)
            assert len(came_from) <= most, "too large a model"
        self.states = len(came_from)
        good, to_do = set(ended), ended
        while to_do:
            for each in came_from[to_do.pop()]:
                if each not in good:
                    good.add(each)
                    to_do.append(each)
        lost = [state for state in came_from if state not in good]
        if lost:
            stuck = next((state for state in lost if not any(self._following(state))), lost[-1])
            raise Wrong(f"they never come to an end\n{self._way_to(stuck, came_from)}")

    def _next(self, index: int, process: _Process) -> tuple[tuple[tuple[int, int], ...], Request]:
        key = index, process.local, process.answers
        if key not in self._known:
            replay = Replay(process.answers)
            try:
                self._runs[index](process.local, replay)
            except Paused:
                assert replay.request is not None
            self._known[key] = tuple(replay.stores), replay.request or END
        return self._known[key]

    def _settled(self, index: int, process: _Process) -> int:
        """`process` with its stores up to its next request."""
        while True:
            stores, request = self._next(index, process)
            buffer = process.buffer + stores
            if request.kind != "again":
                return self._number(index, process._replace(buffer=buffer), request)
            process = _Process(request.local, (), buffer, False)

    def _number(self, index: int, process: _Process, request: Request) -> int:
        number = self._numbers.setdefault((index, process), len(self._processes))
        if number == len(self._processes):
            self._processes.append(process)
            self._requests.append(request)
        return number

    def _following(self, state: State) -> Iterator[State]:
        for index in range(self._world):
            number = state[index]
            process, request = self._processes[number], self._requests[number]
            for at, (address, value) in enumerate(process.buffer[: 1 if self._in_order else None]):
                if any(earlier == address for earlier, _ in process.buffer[:at]):
                    continue
                rest = process.buffer[:at] + process.buffer[at + 1 :]
                flushed = list(state)
                flushed[index] = self._number(index, process._replace(buffer=rest), request)
                flushed[self._world + address] = value
                yield tuple(flushed)
            if process.sleeps:
                continue
            if request.kind == "load":
                yield (*state[:index], self._loaded(index, number, state), *state[index + 1 :])
            elif request.kind != "end" and not process.buffer:
                yield self._through(index, process, request, state)

    def _through(self, index: int, process: _Process, request: Request, state: State) -> State:
        """Execute a barrier, or a system call."""
        after = list(state)
        if request.kind == "sleep" and state[self._world + request.address] == request.seen:
            after[index] = self._number(index, process._replace(sleeps=True), request)
            return tuple(after)
        after[index] = self._answered(index, state[index], 0)
        for other in range(self._world) if request.kind == "wake" else ():
            theirs = state[other]
            if self._processes[theirs].sleeps and self._requests[theirs].address == request.address:
                after[other] = self._answered(other, theirs, 0)
        return tuple(after)

    def _loaded(self, index: int, number: int, state: State) -> int:
        request = self._requests[number]
        group, count = self._together(request.address), len(self._processes[number].answers)
        while request.kind == "load" and self._together(request.address) == group:
            value = state[self._world + request.address]
            for address, own in self._processes[number].buffer:
                if address == request.address:
                    value = own
            number, count = self._answered(index, number, value), count + 1
            if len(self._processes[number].answers) < count:  # it has restarted
                break
            request = self._requests[number]
        return number

    def _answered(self, index: int, number: int, answer: int) -> int:
        key = number, answer
        if key not in self._answers:
            process = self._processes[number]
            self._answers[key] = self._settled(
                index, process._replace(answers=(*process.answers, answer), sleeps=False)
            )
        return self._answers[key]

    def _is_end(self, state: State) -> bool:
        numbers = state[: self._world]
        return all(not self._processes[each].buffer and self._requests[each].kind == "end" for each in numbers)

    def _way_to(self, state: State, came_from: dict[State, list[State]]) -> str:
        way = [state]
        while way[-1] != self._first:
            way.append(came_from[way[-1]][0])
        lines = []
        for each in reversed(way):
            doing = [
                f"{self._processes[number].answers} then {self._requests[number]}" for number in each[: self._world]
            ]
            lines.append(f"{' | '.join(doing)}; memory {each[self._world :]}")
        return "\n".join(lines[-40:])
