"""The ranks of a run: what one of them finds or fails at, all of them know.

Whatever may fail on some ranks alone (a disk, a user's function) goes through `Ranks.tell`, so that no rank waits for
another that has raised.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from flatfsdp.errors import CheckpointError, FlatFSDPError

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The ranks of a process group, or this process alone where there is none.

    Attributes:
        group: the process group; None where there is none.
        rank, world: this rank's number in the group, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def tell(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Let every rank do its `work`; what each returned, in the order of ranks. Collective.

        Raises:
            CheckpointError: on every rank, where some raised; `doing` says in the message at what.
        """
        value: Any = None
        failure: Exception | None = None
        try:
            value = work()
        except Exception as error:  # the others must hear of it
            failure = error
        words = None if failure is None else _in_words(failure)
        answers: list[Any] = [(value, words)]
        if self.world > 1:
            answers = [None] * self.world
            dist.all_gather_object(answers, (value, words), group=self.group)
        failed = {rank: said for rank, (_, said) in enumerate(answers) if said is not None}
        if failed:
            if len(set(failed.values())) == 1 and len(failed) == self.world:
                raise CheckpointError(f"{doing}: {failed[0]}") from failure
            told = "; ".join(f"rank {rank}: {said}" for rank, said in failed.items())
            raise CheckpointError(f"{doing}: {told}") from failure
        return [value for value, _ in answers]

    def members(self, group: dist.ProcessGroup | None) -> tuple[int, ...]:
        """The numbers of a group's ranks among these, in order. No communication.

        None is this rank alone.
        """
        if group is None:
            return (self.rank,)
        own = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        return tuple(sorted(own.index(rank) for rank in dist.get_process_group_ranks(group)))


def node() -> str:
    """What tells this rank's node from others: its number, where torchrun gave one, or the host's name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, FlatFSDPError) else f"{type(error).__name__}: {error}"
