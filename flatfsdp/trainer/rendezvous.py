"""A separate store for each start of the ranks under torchrun.

torchrun restarts ranks, after a failure or with more or fewer nodes, with the same store, which still holds the keys of
earlier starts: addresses without a listener, and watchdog reports of processes that have ended. Nothing in the
environment distinguishes one start from the next on all nodes. So rank 0 draws a name, and each rank requests it with a
random number: an answer with that number cannot be an old one.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flatfsdp.errors import UsageError

PATIENCE = timedelta(minutes=30)  # as that of torch's process groups
_PAUSE = 0.05  # seconds between two polls


@contextmanager
def store_of_this_start() -> Iterator[dist.Store | None]:
    """A context with the store for making the process group; None where torchrun keeps none.

    Raises:
        UsageError: rank 0 has not started.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield None
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = dist.TCPStore(address, port, is_master=False, timeout=PATIENCE)
    common: Any = dist.PrefixStore("flatfsdp-starts", agents)
    if rank:
        yield dist.PrefixStore(f"flatfsdp-start-{_request(common, rank)}", agents)
        return
    name, over = uuid.uuid4().hex, threading.Event()
    answering = threading.Thread(target=_answer, args=(common.clone(), world, name, over), daemon=True)
    answering.start()
    try:
        yield dist.PrefixStore(f"flatfsdp-start-{name}", agents)
    finally:
        over.set()
        answering.join()


def _request(store: dist.Store, rank: int) -> str:
    number = uuid.uuid4().hex
    store.set(f"request/{rank}", number)
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while time.monotonic() < deadline:
        answered, _, name = _read(store, f"answer/{rank}").partition(" ")
        if answered == number:
            return name
        time.sleep(_PAUSE)
    raise UsageError(f"rank 0 has not started within {PATIENCE.total_seconds() / 60:g} minutes; check its output")


def _answer(store: dist.Store, world: int, name: str, over: threading.Event) -> None:
    """Answer the ranks until the process group exists: a request may be an earlier start's, and be replaced."""
    answered: dict[int, str] = {}
    while not over.wait(_PAUSE):
        for rank in range(1, world):
            number = _read(store, f"request/{rank}")
            if number and answered.get(rank) != number:
                store.set(f"answer/{rank}", f"{number} {name}")
                answered[rank] = number


def _read(store: dist.Store, key: str) -> str:
    """The value of `key`; "" without one."""
    return store.get(key).decode() if store.check([key]) else ""
