"""Doubles for tests: of transports, whose results arrive as late as possible, and of autograd, which releases failed
backwards late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from flatfsdp.engine.base import autograd
from flatfsdp.engine.comm.transport import Transport
from flatfsdp.engine.device.streams import PendingWork, Stream
from flatfsdp.engine.transports.staged import StagedTransport
from tests.harness import inspect


class DelayedTransport(StagedTransport):
    """A double that delivers late: outputs are NaN (or zero bytes) until `wait()`, even if the backend has already
    finished."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(**inspect.arguments_of(inner))
        self._inner = inner

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        hidden = torch.empty_like(output)
        return self._deliver(output, hidden, self._inner.all_gather_base(hidden, shard.clone(), stream))

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        hidden = torch.empty_like(output)
        return self._deliver(output, hidden, self._inner.reduce_scatter_base(hidden, full.clone(), stream), full)

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        hidden = [torch.empty_like(output) for output in outputs]
        pending = self._inner.all_gather_coalesced(hidden, [shard.clone() for shard in shards], stream)
        for output, arrived in zip(outputs, hidden, strict=True):
            pending = self._deliver(output, arrived, pending)
        return pending

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        hidden, copies = torch.empty_like(output), [full.clone() for full in fulls]
        return self._deliver(output, hidden, self._inner.reduce_scatter_coalesced(hidden, copies, stream), *fulls)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        hidden = tensor.clone()
        return self._deliver(tensor, hidden, self._inner.all_reduce(hidden, stream))

    def all_to_all(self, arrived: torch.Tensor, sent: torch.Tensor, stream: Stream) -> PendingWork:
        hidden = torch.empty_like(arrived)
        return self._deliver(arrived, hidden, self._inner.all_to_all(hidden, sent.clone(), stream), sent)

    @staticmethod
    def _deliver(output: torch.Tensor, hidden: torch.Tensor, inner: PendingWork, *keep: torch.Tensor) -> PendingWork:
        def arrive() -> None:
            output.copy_(hidden)

        if output.is_floating_point():
            output.fill_(float("nan"))
        return PendingWork(work=inner, keep=(output, hidden, *keep), finish=arrive)


@contextmanager
def backwards_released_late(held: list[object] | None = None) -> Iterator[None]:
    """A context whose backwards autograd holds until it ends, or until `held` is cleared: as it may do on an
    accelerator, where another thread releases a failed one while the program goes on."""
    kept: list[object] = [] if held is None else held

    class Late(autograd.BackwardCompletion):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept.append(self)

    with patch.object(autograd, "BackwardCompletion", Late):
        yield
