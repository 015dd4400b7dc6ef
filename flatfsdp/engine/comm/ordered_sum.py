"""Sums of more pieces than fit into scratch memory: a thread receives the next piece when one has been added.

[Note: ordered sums] A rank that adds up the pieces of W ranks, in rank order, should hold few of them at a time, and
can receive a piece only when there is room for it. If `wait()` made the room, a rank's wait would require that the
other ranks wait for the same sum, and ranks that wait in different places would deadlock. So a thread makes the room:
it runs the sums of a process group one after the other, in the order in which all ranks issue them.

The thread lives for as long as there are sums in flight.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ..device.streams import Work
from .pieces import Row, add


class OrderedSum:
    """The sum, in rank order, of `own` and of the rows received from all other ranks.

    The sum is accumulated in the first row of `room`, which has at least two rows. The first row received arrives
    there; later ones arrive in the other rows of `room`, which are reused as often as needed. [Note: rows]
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        own: Row,
        room: Sequence[Row],
        receive: Callable[[int, Row], Work],
    ) -> None:
        """`receive(peer, row)` posts a receive: called now for as many rows as `room` has, later in `run`."""
        self._rank, self._world = rank, world
        self._own, self._output = own, room[0]
        self._receive = receive
        self._expected = deque(peer for peer in range(world) if peer != rank)
        self._arriving: deque[tuple[Row, Work]] = deque()
        self._over: Future[None] = Future()
        for row in room:
            self._receive_into(row)

    def run(self) -> None:
        """Add up the rows as they arrive. Blocks until all ranks have sent; `wait` raises the errors of this."""
        try:
            self._add_up()
            self._over.set_result(None)
        except BaseException as error:
            self._over.set_exception(error)

    def wait(self) -> None:
        """Block until `run` has finished in its thread.

        Raises:
            RuntimeError: a connection broke.
        """
        self._over.result()

    def _add_up(self) -> None:
        total = self._own if self._rank == 0 else self._arrived()
        for rank in range(1, self._world):
            row = self._own if rank == self._rank else self._arrived()
            add(total, row, self._output)
            total = self._output
            if row is not self._own and row is not self._output:
                self._receive_into(row)

    def _arrived(self) -> Row:
        row, work = self._arriving[0]
        work.wait()
        self._arriving.popleft()  # not before: gloo aborts the process if a tensor is freed that it writes to
        return row

    def _receive_into(self, row: Row) -> None:
        if self._expected:
            self._arriving.append((row, self._receive(self._expected.popleft(), row)))


class SumWorker:
    """The thread of one process group, which runs sums in the order of submission."""

    def __init__(self) -> None:
        self._sums: deque[OrderedSum] = deque()
        self._lock = threading.Lock()
        self._is_running = False

    def submit(self, sum_: OrderedSum) -> None:
        """Run the sum after those submitted before. Every rank submits at the same point of the group's order."""
        with self._lock:
            self._sums.append(sum_)
            if not self._is_running:
                self._is_running = True
                # A daemon: the process must be able to exit if another rank has died.
                threading.Thread(target=self._run, name="flatfsdp sums", daemon=True).start()

    def _run(self) -> None:
        while (sum_ := self._next()) is not None:
            sum_.run()
            del sum_  # otherwise its tensors would live until the next sum

    def _next(self) -> OrderedSum | None:
        with self._lock:
            self._is_running = bool(self._sums)
            return self._sums.popleft() if self._sums else None
