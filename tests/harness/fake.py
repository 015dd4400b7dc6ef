"""One process that believes it is a rank of a world of any size: torch's fake process group.

Its collectives return at once and move nothing, so values mean nothing here. What can be tested: construction,
metadata, messages, and which collectives are issued in which order and size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - importing it registers the backend "fake"

from flatfsdp.engine.runtime.coalesced_collectives import apart


@contextmanager
def fake_world(world: int, rank: int = 0, *, joined: bool = False) -> Iterator[dist.ProcessGroup]:
    """The default process group is a fake one, this process its ``rank``; destroyed at exit.

    The store behind it is a real one that only this process writes to: waiting there for another rank runs into its
    timeout. Units have collectives of their own unless small ones are to be ``joined``.
    """
    assert not dist.is_initialized(), "a process group is left over from an earlier test"
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
    try:
        assert dist.group.WORLD is not None
        with nullcontext() if joined else apart():
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
