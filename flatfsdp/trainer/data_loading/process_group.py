"""The ranks that load together, and how those are told that have not failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from flatfsdp.errors import FlatFSDPError, ranks_in_words, warn
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
        value: Any = None
        error: Exception | None = None
        try:
            value = work()
        except Exception as raised:
            error = raised
        answers = self.values((value, None if error is None else ReadFailure.of(error).words))
        if isinstance(error, FlatFSDPError):
            raise error
        self.tell_failures([words for _, words in answers], error)
        return [value for value, _ in answers]

    def tell_failures(self, failures: list[str | None], cause: Exception | None = None) -> None:
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
