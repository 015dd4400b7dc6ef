"""One process as a rank of a world of any size: torch's fake process group.

Its collectives return at once and move nothing, so values mean nothing here. Tests can check construction,
metadata, messages, and the order and size of issued collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - importing it registers the backend "fake"

from flatfsdp.engine.features.coalescing import uncoalesced


@contextmanager
def fake_world(world: int, rank: int = 0, *, joined: bool = False) -> Iterator[dist.ProcessGroup]:
    """A context in which the default process group is a fake one, with this process as ``rank``.

    Its store is a real one that only this process writes to: waiting for another rank there runs into the
    timeout. Units have separate collectives unless small ones are to be ``joined``.
    """
    assert not dist.is_initialized(), "a process group is left over from an earlier test"
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
    try:
        assert dist.group.WORLD is not None
        with nullcontext() if joined else uncoalesced():
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
