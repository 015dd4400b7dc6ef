"""The watch of this process, and the code that waits for other ranks, or fails together with them."""

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
from .status_report import NORMALLY, ExitRecord
from .store import StoreClient
from .watchdog import Watchdog, close_watch, is_lost_connection


def current_watch() -> Watchdog:
    """The watch of the default process group."""
    return for_group(dist.group.WORLD, "watch", _new_watch)


def _new_watch() -> Watchdog:
    world, store, rank = dist.group.WORLD, StoreClient(), dist.get_rank()
    made = Watchdog(store, rank=rank, world=dist.get_world_size(), time_limit=_torch.time_limit(world))
    at_end(functools.partial(_publish_exit_record, weakref.ref(made), store, rank))
    _torch.when_destroyed(world, functools.partial(close_watch, weakref.ref(made)))
    return made


def _publish_exit_record(
    watch: weakref.ref[Watchdog], store: StoreClient, rank: int, error: BaseException | None
) -> None:
    """The process ends: notify the others, also those who look for this rank after it destroyed its process group."""
    found = watch()
    last = found.last_step() if found is not None else ""
    words = f"{NORMALLY}{last}" if error is None else f"ended with {in_words(error)}{last}"
    cause = str(error) if isinstance(error, AgreementError) else None
    if store.unanswered_for() > 1.0:  # this process would not come to its end
        return
    with contextlib.suppress(RuntimeError):
        ExitRecord(rank, words, cause).publish(store, alarm=error is not None)


def expecting(ranks: Sequence[int], what: str) -> contextlib.AbstractContextManager[None]:
    """The enclosed code waits for `ranks`: report it if they are waiting elsewhere.

    `what` completes "rank 0 ...". Process groups that move nothing wait for nobody.
    """
    if len(ranks) == 1 or "fake" in str(dist.get_backend_config()):
        return contextlib.nullcontext()
    return current_watch().waiting(ranks, what)


def fail_together(what: str) -> contextlib.AbstractContextManager[Callable[[BaseException], None]]:
    """A context for what all ranks run: an exception on one of them, which leaves it, reaches those that wait for it.

    For programs that catch exceptions and live on, like notebooks; one that ends a process reaches the others anyway.
    The rank that fails raises what it has. Another one, if it is inside, too, and has been waiting for some seconds in
    a collective (of a model, or of the program's in `collective_region`), prints an `AgreementError` with that rank and
    its exception, and raises it from the next step of its model. Where nothing wakes it, its process ends. Ranks that
    all fail, in whatever way, raise each their own.

    Enter it equally often on all ranks. Nothing is communicated unless one fails.

    Args:
        what: a name for it, the same on all ranks; completes "rank 0 failed in ...".

    Returns:
        What `with ... as report` gives: `report(error)` reports an exception that is still to be raised.

    Example:
        >>> import flatfsdp
        >>> with flatfsdp.fail_together("the evaluation"):
        ...     pass  # forwards, and what is made of their outputs
    """
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    if alone or "fake" in str(dist.get_backend_config()):
        return contextlib.nullcontext(lambda error: None)
    return current_watch().fail_together(what)


@contextlib.contextmanager
def collective_region() -> Iterator[None]:
    """The enclosed code waits for other ranks, in a collective of the program's own.

    Reports separate such a rank from one that computes (see `set_collective_timeout`), and a connection that breaks is
    explained. Not collective, and quick enough for every step.

    Raises:
        LostRankError: in place of the backend's error, where a connection broke: which rank ended, and with what, as
            far as that is known.

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
