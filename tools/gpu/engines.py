"""The compared engines, and the two worlds in which they are measured."""

from __future__ import annotations

from tools.benchmark.gpu import FAKE_RANKS
from tools.benchmark.ranks import World

OURS = ("flatfsdp", "flatfsdp-orig", "flatfsdp-front")
PEERS = ("fsdp1", "fsdp2")
ALONE = World(1, "")
FAKE = World(FAKE_RANKS, "fake")  # rank 0 of several, whose collectives move nothing
