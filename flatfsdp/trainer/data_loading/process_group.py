"""The ranks that load together; the failure of one is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from flatfsdp.errors import FlatFSDPError, warn
from flatfsdp.trainer.process_group import TrainerRanks, failures_in_words

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
        values, lines, failure = self.attempt(work, lambda error: ReadFailure.of(error).words)
        if isinstance(failure, FlatFSDPError):
            raise failure
        self.raise_failures(lines, failure)
        return values

    def raise_failures(self, failures: list[str | None], cause: Exception | None = None) -> None:
        """Raise on this rank what failed on any; nothing where none did.

        Raises:
            DataError: with the words of all ranks that failed, in order.
        """
        if words := failures_in_words(failures):
            raise DataError(words) from cause

    def warn(self, message: str) -> None:
        """Warn once for all ranks."""
        if self.rank == 0:
            warn(message)
