"""The watch of this process, and contexts for code that waits for other ranks or fails together with them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from ...errors import AgreementError
from ..base import _torch
from ..base import wait_limits as waits
from ..base.per_group import for_group
from .process_exit import at_end, in_words
from .status_report import NORMALLY, ExitRecord, Progress, numbers_of
from .store import StoreClient
from .termination import explain_termination
from .watchdog import Watchdog, close_watch, is_lost_connection


def current_watch() -> Watchdog:
    """The watch of the default process group."""
    return for_group(dist.group.WORLD, "watch", _new_watch)


def _new_watch() -> Watchdog:
    world, store, rank = dist.group.WORLD, StoreClient(), dist.get_rank()
    made = Watchdog(store, rank=rank, world=dist.get_world_size(), time_limit=_torch.time_limit(world))
    at_end(functools.partial(_publish_exit_record, weakref.ref(made), made.progress, store, rank))
    _torch.when_destroyed(world, functools.partial(close_watch, weakref.ref(made), destroyed=True))
    explain_termination(store, rank, dist.get_world_size())
    return made


def _publish_exit_record(
    watch: weakref.ref[Watchdog],
    progress: dict[str, Progress],
    store: StoreClient,
    rank: int,
    error: BaseException | None,
) -> None:
    """At the end of the process, notify the others, also ranks that poll after this one destroyed its process group."""
    found = watch()
    if found is not None:
        found.finish_works(failed=error is not None)
    last = found.last_step() if found is not None else ""
    words = f"{NORMALLY}{last}" if error is None else f"ended with {in_words(error)}{last}"
    cause = str(error) if isinstance(error, AgreementError) else None
    if store.unanswered_for() > 1.0:  # the process could not end
        return
    with contextlib.suppress(RuntimeError):
        ExitRecord(rank, words, cause, numbers_of(progress)).publish(store, alarm=error is not None)


def expecting(ranks: Sequence[int], what: str) -> contextlib.AbstractContextManager[None]:
    """A context for code that waits for `ranks`: it is reported if they wait elsewhere.

    `what` completes "rank 0 ...". The context does nothing for one rank and for fake process groups.
    """
    if len(ranks) == 1 or "fake" in str(dist.get_backend_config()):
        return contextlib.nullcontext()
    return current_watch().waiting(ranks, what)


def fail_together(what: str) -> contextlib.AbstractContextManager[Callable[[BaseException], None]]:
    """A context for code that all ranks run: an exception that leaves it on one rank reaches the ranks that wait.

    It is for programs that catch exceptions and continue, like notebooks; exceptions that end a process reach the other
    ranks without it. The failing rank raises its own exception. Another rank that is inside the context and has waited
    for some seconds in a collective (of a model, or of the program's own in a `collective_region`) prints an
    `AgreementError` with the failed rank and its exception, and raises it from the next step of its model. If its wait
    does not end, its process is ended. If all ranks fail, each raises its own exception.

    Enter it equally often on all ranks. Nothing is communicated unless one fails.

    Args:
        what: a name for the code, the same on all ranks; completes "rank 0 failed in ...".

    Returns:
        A context manager that yields a function `report`: `report(error)` reports an exception before it is raised.

    Example:
        >>> import flatfsdp
        >>> with flatfsdp.fail_together("the evaluation"):
        ...     pass  # forwards, and the processing of their outputs
    """
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    if alone or "fake" in str(dist.get_backend_config()):
        return contextlib.nullcontext(lambda error: None)
    return current_watch().fail_together(what)


@contextlib.contextmanager
def collective_region() -> Iterator[None]:
    """A context for code that waits for other ranks in a collective of the program's own.

    Reports then distinguish the waiting rank from one that computes (see `set_collective_timeout`), and a broken
    connection is explained. Not collective, and fast enough for every step.

    Raises:
        LostRankError: instead of the backend's error, if a connection broke: names the rank that ended and its
            exception, as far as they are known.

    Example:
        >>> import flatfsdp, torch
        >>> tokens = torch.tensor(512)
        >>> with flatfsdp.collective_region():
        ...     torch.distributed.all_reduce(tokens)
    """
    try:
        with waits.blocked(theirs=True):
            yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise current_watch().explain(error) from error
