"""Collectives of NCCL itself, which a world of one rank does not use: an axis of one rank exchanges nothing.

Here such an axis still calls NCCL's collectives, of one rank; and two ranks on one card are tried, which NCCL refuses
unless its version supports NCCL_MULTI_RANK_GPU_ENABLE.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from flatfsdp.engine.agreement import process_groups
from flatfsdp.engine.comm.axes import Axis, served_as
from tools.benchmark import ranks
from tools.benchmark.ranks import World

from . import parity
from .card import Card, card_of
from .report import Report

# In float32, an axis of one rank has no unsharded form other than its shard.
ONE = (
    "bf16, FULL_SHARD",
    "bf16, SHARD_GRAD_OP",
    "backward_prefetch BACKWARD_MID",
    "small units joined, bf16",
    "freed memory poisoned, bf16",
    "offload, pinned, bf16",
    "fully_shard, bf16",
)
TWO = (
    "FULL_SHARD, flat parameters",
    "NO_SHARD, flat parameters",
    "bf16, FULL_SHARD",
    "small units joined, bf16",
    "two microbatches, deferred reductions",
    "freed memory poisoned, bf16",
    "offload, pinned",
    "fully_shard, bf16",
)


def run(report: Report, card: Card, *, brief: bool) -> None:
    """Try one rank, then two. Without a card, gloo takes the place of NCCL."""
    try:
        names = ONE[:1] if brief else ONE
        ranks.run(World(1, card.backend), with_collectives, report.path, card.kind, names, timeout=40.0)
        report.reload()
    except Exception as error:
        report.reload()
        report.failed("collectives of one rank by NCCL", "parity", error)
    with tempfile.TemporaryDirectory() as folder:
        store, names = str(Path(folder) / "store"), TWO[:1] if brief else TWO
        try:
            ranks.run(World(2, "none"), as_two, store, report.path, card.kind, names, timeout=40.0)
            report.reload()
            report.figure("two NCCL ranks on one card", "possible here" if card.is_real else "no card")
        except ranks.RankFailed as error:
            report.reload()
            words = f"not possible here: {str(error).strip().splitlines()[-1]}"[:300]
            report.goal(
                "two NCCL ranks on one card",
                "" if card.is_real else "as by NCCL",
                words,
                None if card.is_real else False,
            )


def with_collectives(rank: int, path: Path, kind: str, names: tuple[str, ...]) -> None:
    """A job: scenarios in which axes of one rank communicate. Collective."""
    with communicating_alone(), served_as("nccl"):
        parity.play_all(rank, path, kind, names, "NCCL, one rank: ")


@contextmanager
def communicating_alone() -> Iterator[None]:
    """Inside, axes of one rank use the backend of their group."""

    def axis(process_group: Any, device: Any) -> Axis:
        return Axis.of(process_group, device)

    with patch.object(process_groups, "_axis", axis):
        yield


def as_two(rank: int, store: str, path: Path, kind: str, names: tuple[str, ...]) -> None:
    """A job: one of two ranks on the same card."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    card = card_of(kind)
    card.begin()
    limit = timedelta(seconds=20)
    dist.init_process_group(card.backend, store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=limit)
    with served_as("nccl"):
        parity.play_all(rank, path, kind, names, "NCCL, two ranks: ")
