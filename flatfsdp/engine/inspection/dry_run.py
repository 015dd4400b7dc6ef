"""One process that simulates a rank of a job of any size: everything but memory, values and other ranks.

[Note: dry run] The memory and traffic of a rank follow from the engine's own decisions, so a dry run takes them all:
units, schedule and accounting are those of any run. Tensors have shapes and no memory, and process groups send nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...errors import ConfigValueError, UsageError, rank_kept
from ..base import _torch
from ..comm import transport as comm
from ..comm.axes import served_as
from ..device.streams import standing_in
from ..features.fake_tensors import without_memory


@contextmanager
def dry_run(ranks: int, *, rank: int = 0, accelerator: bool = False) -> Iterator[None]:
    """A context in which this process is one rank of a job of `ranks`, on any machine, and models need no memory.

    Models that are wrapped inside (and made before, best on the meta device) are trained and read through `stats()` as
    usual, and give the figures of the real job: its bytes, its collectives. Tensors that are made inside have no
    values, so code that depends on values (`item()`, an `if` on a tensor) raises; neither tensors nor models are usable
    outside. Nothing is communicated.

    Args:
        ranks: the number of ranks of the job; those of a small one (up to 8) are assumed to be on one host.
        rank: the rank that this process simulates.
        accelerator: whether the job runs on accelerators with NCCL; none is needed here. Memory is then given back at
            the latest point that the engine permits. Otherwise it runs on CPUs with gloo. Tensors show "cpu" in
            both cases.

    Raises:
        ConfigValueError: `rank` is not one of the `ranks` ranks.
        UsageError: a process group exists: a dry run makes its own.

    Example:
        >>> import torch, flatfsdp
        >>> layer = torch.nn.Linear(65536, 65536, bias=False, device="meta")
        >>> with flatfsdp.dry_run(1024):
        ...     model = flatfsdp.FullyShardedDataParallel(layer)
        ...     model(torch.ones(1, 65536)).sum().backward()
        ...     flatfsdp.stats(model).bytes_params
        16777216
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise ConfigValueError(f"dry_run: expected ranks >= 1 and 0 <= rank < ranks, found rank {rank} of {ranks}")
    if comm.is_initialized():
        raise UsageError(
            "dry_run: this process is already a rank of a job. Call it in a process that has not called "
            "init_process_group()"
        )
    with ExitStack() as stack:
        stack.enter_context(rank_kept())
        stack.enter_context(_torch.fake_world(ranks, rank=rank))
        stack.enter_context(served_as("nccl" if accelerator else "gloo"))
        if accelerator:
            stack.enter_context(standing_in(SimulatedStreams()))
        stack.enter_context(without_memory())
        yield


class SimulatedEvent:
    """A point in a stream, which the device is never found to have passed; a wait for it takes no time."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


class SimulatedStream:
    """A stream without operations."""

    def record_event(self) -> SimulatedEvent:
        return SimulatedEvent()

    def wait_event(self, event: SimulatedEvent) -> None:
        pass

    def wait_stream(self, stream: SimulatedStream) -> None:
        pass


class SimulatedStreams:
    """The streams of an accelerator, which need not exist: no operation is ever found to be finished."""

    def __init__(self) -> None:
        self._current = [SimulatedStream()]

    def Stream(self, device: Any = None, *, priority: int = 0) -> SimulatedStream:
        return SimulatedStream()

    def current_stream(self, device: Any = None) -> SimulatedStream:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()
