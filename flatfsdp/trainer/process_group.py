"""The ranks of a run, and their exchange of values and failures on the host.

Work that may fail on only some ranks (a disk, a user-defined function) goes through `TrainerRanks.collective_call`, so
that no rank waits for another that has raised. All exchanges are on the host.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flatfsdp import collective_region
from flatfsdp.errors import AgreementError, CheckpointError, ConfigValueError, by_ranks, warn
from flatfsdp.messages import gather, on_all_ranks

T = TypeVar("T")

EXCHANGE = "exchanges values of a trainer or loader"

# A group that only accelerators communicate over gets a second one for the host, shared by all its users.
_on_host: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class LocalFailure:
    """An exception of this rank, to be raised once it is reported to the others.

    Attributes:
        doing: the failed operation, to follow "failed in".
    """

    doing: str
    error: Exception

    @property
    def words(self) -> str:
        """The message of the exception on the others."""
        return f"{self.doing} with {type(self.error).__name__}: {self.error}"


class TrainerRanks:
    """The ranks of a process group, or this process alone where there is none. Collective where it makes a group.

    Without a `group`, they are those of the default one, also when that was made anew after a loss.

    Attributes:
        group: the process group; None for the default one, or where there is none.
        host: a group of the same ranks whose collectives take CPU tensors; None for this process alone.
        rank, world: this rank's number in the group, and how many there are.

    Raises:
        ConfigValueError: this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._of: Any = None  # the group of these numbers
        self._numbers: tuple[int, int, Any] = 0, 1, None
        if group is not None and not (dist.is_available() and dist.is_initialized()):
            raise ConfigValueError(
                "process_group: got a group, but torch.distributed is not (or no longer) initialized. Call "
                "init_process_group() first, or leave the group out"
            )
        if self.rank < 0:
            raise ConfigValueError(
                f"process_group: rank {dist.get_rank()} is not in the group. Create this only on ranks of the group"
            )

    def _now(self) -> tuple[int, int, Any]:
        if not (dist.is_available() and dist.is_initialized()):
            return self._numbers
        group = self.group if self.group is not None else dist.group.WORLD
        if group is not self._of:
            rank, world = dist.get_rank(group), dist.get_world_size(group)
            self._of, self._numbers = group, (rank, world, _for_host(group) if world > 1 and rank >= 0 else None)
        return self._numbers

    @property
    def rank(self) -> int:
        return self._now()[0]

    @property
    def world(self) -> int:
        return self._now()[1]

    @property
    def host(self) -> Any:
        return self._now()[2]

    def rows(self, *numbers: int) -> list[list[int]]:
        """Every rank's `numbers`, in the same count on each. Collective."""
        if self.host is None:
            return [list(numbers)]
        own = torch.tensor(numbers)
        rows = [torch.empty_like(own) for _ in range(self.world)]
        with collective_region():
            dist.all_gather(rows, own, group=self.host)
        return [row.tolist() for row in rows]

    def values(self, value: T) -> list[T]:
        """Every rank's `value`, plain data. Collective.

        Raises:
            AgreementError: on every rank: some ranks make another call.
        """
        return [value] if self.host is None else gather(value, self.host, call=EXCHANGE)

    def collective_call(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank. Returned: the results in the order of ranks. Collective.

        Raises:
            CheckpointError: on every rank, where some raised; `doing` names the operation in the message.
        """

        def problem(failed: Mapping[int, str], own: Exception | None) -> CheckpointError:
            alike = len(failed) == self.world and len(set(failed.values())) == 1
            return CheckpointError(f"{doing}: {failed[0] if alike else by_ranks(failed, ': ')}")

        return on_all_ranks(work, self.host, call=EXCHANGE, raises=problem)

    def share(self, failure: LocalFailure | None) -> None:
        """Raise on all ranks where any has a `failure`. Collective.

        Raises:
            Exception: this rank's own, where it has one.
            AgreementError: on the other ranks, where some have one.
        """
        lines: list[str | None] = []
        with nullcontext() if failure is None else suppress(AgreementError):  # the others have ended: less important
            lines = self.values(None if failure is None else failure.words)
        if failure is not None:
            raise failure.error
        if failed := [f"rank {rank} failed in {words}" for rank, words in enumerate(lines) if words is not None]:
            raise AgreementError(f"{'; '.join(failed)}. The remaining ranks cannot continue")

    def warn(self, message: str) -> None:
        """Warn once for all ranks. No communication."""
        if self.rank == 0:
            warn(message)

    def members(self, group: dist.ProcessGroup | None) -> tuple[int, ...]:
        """The numbers of a group's ranks among these, in order. No communication.

        For None, only this rank's.
        """
        if group is None:
            return (self.rank,)
        own = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        return tuple(sorted(own.index(rank) for rank in dist.get_process_group_ranks(group)))


def node() -> str:
    """An identifier of this rank's node: its number, if torchrun set one, or the host's name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def warn_for_all(message: str) -> None:
    """Warn once of a fact that is the same on all ranks. No communication."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warn(message)


def _for_host(group: Any) -> Any:
    if "cpu" in str(dist.get_backend_config(group)):  # for example "cpu:gloo,cuda:nccl"
        return group
    if group not in _on_host:
        members = dist.get_process_group_ranks(group)
        # Groups made only by their members are named by their ranks, and an earlier group may have had that name.
        some = len(members) < dist.get_world_size()
        _on_host[group] = dist.new_group(members, backend="gloo", use_local_synchronization=some)
    return _on_host[group]
