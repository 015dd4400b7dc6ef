"""The ranks that save or load together: all know each step's outcome before any rank goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ..engine.agreement.object_collectives import on_all_ranks, ranks_over
from ..engine.agreement.process_groups import new_group
from ..engine.models.rest import collective_call
from ..engine.models.spread import axes_of
from ..engine.models.walks import units_in
from ..engine.runtime.model import model_of
from ..errors import AgreementError, CheckpointError, ConfigValueError, by_ranks
from ..messages import meet_and_gather

T = TypeVar("T")

BRIEF = "in_brief"  # attribute of an error with many names: its summary

# A second group for each that has saved in the background: messages of the thread and of training must not mix.
_beside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class CheckpointRanks:
    """The ranks of a process group, or this process alone where there is none. They make one `call`. [Note: calls]

    Attributes:
        call: the text after "called" in the message of a rank that waits for the others.
        group: the process group; None where there is none.
        rank, world: this rank's number in the group, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, call: str = "flatfsdp.checkpoint") -> None:
        self.call = call
        self.group: Any = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.group = group if group is not None else dist.group.WORLD
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.rank < 0:
                raise ConfigValueError(
                    f"process_group: rank {dist.get_rank()} is not in the group that is to save or load. Call "
                    f"{call} on ranks of the group only"
                )
        elif group is not None:
            raise ConfigValueError(
                "process_group: got a group, but torch.distributed is not initialized (or no longer). Call "
                "init_process_group() first, or leave the group out"
            )

    @property
    def key(self) -> Any:
        """A key for state of these ranks: the process group, or this class where there is none."""
        return CheckpointRanks if self.group is None else self.group

    def beside(self) -> CheckpointRanks:
        """The same ranks over a second group, for a thread. Collective at a group's first call."""
        if self.group is None:
            return self
        if self.group not in _beside:
            members = tuple(dist.get_process_group_ranks(self.group))
            _beside[self.group] = new_group(
                members, "prepares to save in the background", like=self.group, backend="gloo"
            )
        return CheckpointRanks(_beside[self.group], self.call)

    def calling(self, model: object) -> AbstractContextManager[None]:
        """Require that all ranks make this call over `model`: no rank may wait in it for others that train.

        A model that has not run yet, or is sharded over ranks outside of these, does not take part.

        Raises:
            AgreementError: on every rank: some ranks make another call on the model.
        """
        units = [unit for unit in units_in(model) if model_of(unit).setup.ready] if isinstance(model, nn.Module) else []
        axes = axes_of(units)
        members = set(dist.get_process_group_ranks(self.group)) if axes else set()
        covered = members.issuperset(ranks_over(axes))
        return collective_call(units if covered else [], self.call, always=True)

    def agree(self, doing: str, call: str) -> None:
        """Require that every rank makes this `call`. Collective.

        Raises:
            CheckpointError: on every rank: some ranks make another one.
        """
        calls = dict(enumerate(self.exchange(doing, lambda: call)))
        if len(set(calls.values())) > 1:
            raise CheckpointError(
                f"{doing}: ranks make different calls ({by_ranks(calls, ': ')}); make the same one on all ranks"
            )

    def exchange(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank. Returned: the results in the order of ranks. Collective.

        Raises:
            CheckpointError: on every rank, where a rank failed or ended; `doing` names the step in the message.
            AgreementError: on every rank: some ranks make another call.
        """

        def problem(failed: Mapping[int, str], own: Exception | None) -> CheckpointError:
            return CheckpointError(f"{doing}: {self._in_words(failed, own)}")

        exchange = None if self.world == 1 else partial(self._gather, doing)
        return [*on_all_ranks(work, exchange, raises=problem, describe=_described).values()]

    def together(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank, as `exchange`, and return this rank's own result, of any type."""
        results: list[T] = []
        self.exchange(doing, lambda: results.append(work()))
        return results[0]

    def _in_words(self, failed: Mapping[int, str], failure: Exception | None) -> str:
        """A message about the failures by rank. If all ranks failed alike, the first reports in full, and the others in
        brief where there are many names: under a launcher, all tracebacks appear on one screen."""
        words, *others = set(failed.values())
        if others or len(failed) < self.world:
            return by_ranks(failed, ": ")
        if self.world == 1:
            return words
        brief = getattr(failure, BRIEF, "")
        if self.rank == 0 or not brief:
            return f"on all {self.world} ranks: {words}"
        first = dist.get_process_group_ranks(self.group)[0]
        return f"on all {self.world} ranks: {brief}; the error of rank {first} has the names"

    def _gather(self, doing: str, content: bytes) -> dict[int, bytes]:
        waiting = f"waits for the others while {doing}"
        try:
            return meet_and_gather(content, self.group, call=f"called {self.call}", waiting=waiting)
        except RuntimeError as error:  # a rank has ended, or did not arrive in time
            if type(error) is AgreementError:
                raise
            raise CheckpointError(f"{doing}: {error}") from error


def _described(error: Exception) -> str:
    # Messages of flatfsdp are complete; other errors are best described by their class.
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
