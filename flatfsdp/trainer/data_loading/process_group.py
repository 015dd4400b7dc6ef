"""The ranks that load together; the failure of one is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from flatfsdp.errors import FlatFSDPError, by_ranks, warn
from flatfsdp.trainer.process_group import TrainerRanks

from .sample_reader import DataError, ReadFailure

T = TypeVar("T")


class LoadingRanks(TrainerRanks):
    """Ranks whose failures are those of data."""

    def together(self, work: Callable[[], T]) -> list[T]:
        """What `work` returned on every rank. Collective.

        Raises:
            FlatFSDPError: what it raised, on the rank where it did.
            DataError: on the others.
        """

        def problem(failed: Mapping[int, str], own: Exception | None) -> FlatFSDPError:
            return own if isinstance(own, FlatFSDPError) else DataError(by_ranks(failed, ": "))

        return self.on_all(work, raises=problem, describe=lambda error: ReadFailure.of(error).words)

    def raise_failures(self, failures: list[str | None], cause: Exception | None = None) -> None:
        """Raise on this rank what failed on any; nothing where none did.

        Raises:
            DataError: with the words of all ranks that failed, in order.
        """
        failed = {rank: words for rank, words in enumerate(failures) if words is not None}
        if failed:
            raise DataError(by_ranks(failed, ": ")) from cause

    def warn(self, message: str) -> None:
        """Warn once for all ranks."""
        if self.rank == 0:
            warn(message)
