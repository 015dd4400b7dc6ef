"""The ranks that load together, and what they exchange on the host: numbers in each step, words when one fails."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flatfsdp import waiting_for_ranks
from flatfsdp.errors import ConfigValueError, FlatFSDPError, ranks_in_words, warn

from .reading import DataError, Failure

T = TypeVar("T")

# A group that only accelerators communicate over gets one beside it that the host does: one, whatever is loaded.
_on_host: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Ranks:
    """The ranks of a process group, or this process alone where there is none. Collective where it makes a group.

    Attributes:
        group: a process group whose collectives take tensors on the CPU; None for this process alone.
        rank, world: this rank's number in the group, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: Any = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            given = group if group is not None else dist.group.WORLD
            self.rank, self.world = dist.get_rank(given), dist.get_world_size(given)
            if self.rank < 0:
                raise ConfigValueError("process_group: this rank is not in the group that is to load data")
            self.group = _for_host(given) if self.world > 1 else None
        elif group is not None:
            raise ConfigValueError("process_group: torch.distributed is not initialised (or no more)")

    def rows(self, *numbers: int) -> list[list[int]]:
        """Every rank's `numbers`, as many on each. Collective."""
        if self.group is None:
            return [list(numbers)]
        own = torch.tensor(numbers)
        rows = [torch.empty_like(own) for _ in range(self.world)]
        with waiting_for_ranks():
            dist.all_gather(rows, own, group=self.group)
        return [row.tolist() for row in rows]

    def values(self, value: T) -> list[T]:
        """Every rank's `value`, pickled. Collective."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        with waiting_for_ranks():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, work: Callable[[], T]) -> list[T]:
        """What `work` returned on every rank. Collective.

        Raises:
            FlatFSDPError: what it raised, on the rank where it did.
            DataError: on the others.
        """
        value: Any = None
        error: Exception | None = None
        try:
            value = work()
        except Exception as raised:
            error = raised
        answers = self.values((value, None if error is None else Failure.of(error).words))
        if isinstance(error, FlatFSDPError):
            raise error
        self.tell([words for _, words in answers], error)
        return [value for value, _ in answers]

    def tell(self, failures: list[str | None], cause: Exception | None = None) -> None:
        """Raise on this rank what failed on any; nothing where none did.

        Raises:
            DataError: with the words of all ranks that failed, in order.
        """
        told: dict[str, list[int]] = {}
        for rank, words in enumerate(failures):
            if words is not None:
                told.setdefault(words, []).append(rank)
        if told:
            raise DataError("; ".join(f"{ranks_in_words(ranks)}: {words}" for words, ranks in told.items())) from cause

    def warn(self, message: str) -> None:
        """Warn once for all ranks."""
        if self.rank == 0:
            warn(message)


def _for_host(group: Any) -> Any:
    if "cpu" in str(dist.get_backend_config(group)):  # "cpu:gloo,cuda:nccl", say
        return group
    if group not in _on_host:
        members = dist.get_process_group_ranks(group)
        # Groups that their members alone make have names by their ranks, which an earlier group may have had.
        some = len(members) < dist.get_world_size()
        _on_host[group] = dist.new_group(members, backend="gloo", use_local_synchronization=some)
    return _on_host[group]
