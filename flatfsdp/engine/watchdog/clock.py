"""The limits of waiting, judged by this process's own clock where the store does not answer.

[Note: silent store] A request to a store whose server is stopped, or cut off, does not return: no error, no time limit.
Then the watch can neither hear nor ask ([Note: watch]), and would not come to what needs no answer: for how long this
rank has been waiting. So a second thread looks at nothing but the clock and at since when the store has owed an answer.
While that is short it says nothing, since the watch can say more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .store import StoreClient


class Timekeeper:
    """The thread beside one watch. [Note: silent store]"""

    def __init__(
        self, store: StoreClient, *, period: Callable[[], float], patience: float, judge: Callable[[float], None]
    ) -> None:
        """Call `judge`, once per period, with the seconds for which the store has been silent, while these are more
        than `patience` periods."""
        self._store = store
        self._period = period
        self._patience = patience
        self._judge = judge
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._wanted: Callable[[], bool] = lambda: False
        self._thread: threading.Thread | None = None

    def start(self, wanted: Callable[[], bool]) -> None:
        """Look from now on, for as long as it is `wanted` or the store owes an answer."""
        with self._lock:
            self._wanted = wanted
            if self._thread is None and not self._over.is_set():
                self._thread = threading.Thread(target=self._run, name="flatfsdp watch's clock", daemon=True)
                self._thread.start()

    def stop(self) -> threading.Thread | None:
        """Look no more; the thread that comes to its end now."""
        self._over.set()
        return self._thread

    def _run(self) -> None:
        while not self._over.wait(self._period()) and self._goes_on():
            silent = self._store.silent_for()
            if silent > self._patience * self._period():
                self._judge(silent)

    def _goes_on(self) -> bool:
        with self._lock:
            if self._wanted() or self._store.silent_for():
                return True
            self._thread = None
            return False
