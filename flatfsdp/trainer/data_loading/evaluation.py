"""One pass over a dataset, in its order, by all ranks together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from .loader import Loader
from .sample_reader import Collate, Microbatch


def evaluation(
    dataset: Any,
    *,
    batch: int,
    collate: Collate | None = None,
    limit: int | None = None,
    mode: str = "sharded",
    workers: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[Microbatch]:
    """This rank's microbatches of `dataset`, read once in its order; equally many on all ranks. Collective.

    Every sample is in one microbatch of one rank. Where that leaves a rank without one, its microbatch is a stand-in
    (`ids` empty), to be weighed 0. Arguments and errors are those of `Loader`.

    Args:
        limit: the first `limit * batch` samples only: so many batches over all ranks together, that what is evaluated
            does not depend on how many ranks there are. None: all.
    """
    loader = Loader(
        dataset,
        batch=batch,
        collate=collate,
        shuffle=False,
        epochs=1,
        limit=None if limit is None else limit * batch,
        mode=mode,
        workers=workers,
        process_group=process_group,
    )
    return _microbatches(loader)


def _microbatches(loader: Loader) -> Iterator[Microbatch]:
    with loader:
        while (step := loader.next_step()) is not None:
            yield from step.microbatches
