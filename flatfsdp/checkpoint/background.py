"""Saving while training goes on: the state is copied to the host, then a thread writes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from ..errors import CheckpointError
from .host_copies import HostCopies
from .ranks import CheckpointRanks
from .saving import Contents, SaveRequest, save_contents


class Saving:
    """A save in progress; `flatfsdp.checkpoint.async_save` returns it."""

    def __init__(self, work: Callable[[], None]) -> None:
        executor = ThreadPoolExecutor(1, "flatfsdp checkpoint")
        self._saved = executor.submit(work)
        executor.shutdown(wait=False)  # the thread ends with the work, for which the interpreter waits at its end
        self._was_raised = False

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._saved.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete, at most `timeout` seconds. Not collective.

        Raises:
            CheckpointError: it could not be saved; on every rank.
            TimeoutError: it is not complete yet.
        """
        if not wait([self._saved], timeout).done:
            raise TimeoutError(
                f"the checkpoint that is saved in the background is not complete after {timeout} seconds. Call "
                "result() again to wait longer"
            )
        self._was_raised = True
        self._saved.result()

    def raise_unreported(self) -> None:
        """Raise an error that no `result` has raised."""
        error, was_raised, self._was_raised = self._saved.exception(), self._was_raised, True
        if error is not None and not was_raised:
            raise CheckpointError(f"the previous save in the background failed: {error}")


_last: weakref.WeakKeyDictionary[Any, Saving] = weakref.WeakKeyDictionary()
_hosts: weakref.WeakKeyDictionary[Any, HostCopies] = weakref.WeakKeyDictionary()


def host_of(ranks: CheckpointRanks) -> HostCopies:
    """The memory for copies of these ranks' state: read until the last save has ended, for which the next one waits."""
    return _hosts.setdefault(ranks.key, HostCopies())


def finish_before(ranks: CheckpointRanks, take: Callable[[], Contents]) -> Callable[[], Contents]:
    """Wait for the last background save. Returned: `take`, which raises that save's error if no `result` did."""
    last = _last.pop(ranks.key, None)
    if last is None:
        return take
    wait([last._saved])

    def take_if_all_is_well() -> Contents:
        last.raise_unreported()
        return take()

    return take_if_all_is_well


def start(ranks: CheckpointRanks, request: SaveRequest, take: Callable[[], Contents]) -> Saving:
    """Call `take` now, which copies the state to the host, and save the copies in a thread. Collective."""
    beside = ranks.beside()
    taken = _outcome(finish_before(ranks, take))
    saving = _last[ranks.key] = Saving(lambda: save_contents(beside, request, taken))
    return saving


def _outcome(work: Callable[[], Contents]) -> Callable[[], Contents]:
    """Call `work` now. Returned: a function with its outcome, for the thread, whose first exchange reports errors."""
    outcome: Future[Contents] = Future()
    try:
        outcome.set_result(work())
    except Exception as error:
        outcome.set_exception(error)
    return outcome.result
