"""A simulated card for engines that know nothing of dry runs: torch's CPU takes its place.

[Note: device] A torch without CUDA computes no gradients on a device of CUDA, fake or not. So tensors show the CPU, as
in a dry run, and `torch.cpu` has the streams, events and figures of a card. The device keeps up with the host: it has
passed every event that it is asked about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flatfsdp.engine.device.streams import standing_in
from flatfsdp.engine.features.fake_tensors import without_memory
from flatfsdp.engine.inspection.allocator import Settings
from flatfsdp.engine.inspection.assumed import kernels_of
from flatfsdp.engine.inspection.simulated import SimulatedDevice, SimulatedEvent

DEVICE = torch.device("cpu")
_CPU: Any = torch.cpu


class PassedEvent(SimulatedEvent):
    """A point in a stream, which the device has passed."""

    def record(self, stream: Any = None) -> None:
        pass

    wait = record

    def query(self) -> bool:
        return True


class Card(SimulatedDevice):
    """What engines look for in `torch.cuda`, beyond the interface of a simulated device."""

    Event = PassedEvent

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings or Settings())
        self._default = self.current_stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(_CPU, name)

    def default_stream(self, device: Any = None) -> Any:
        return self._default

    def synchronize(self, device: Any = None) -> None:
        pass

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """In the place of `Tensor.record_stream`."""
        if (block := self.storages.of(tensor.untyped_storage())) is not None:
            self.allocator.record_stream(block, stream)


@contextmanager
def simulated(settings: Settings | None = None) -> Iterator[Card]:
    """A context in which tensors on the CPU take memory of a card."""
    card = Card(settings)
    with ExitStack() as stack:
        stack.enter_context(standing_in(card))
        stack.enter_context(kernels_of(card))
        stack.enter_context(patch.object(torch, "cpu", card))
        method: Any = lambda tensor, stream: card.record_stream(tensor, stream)  # noqa: E731 - one that binds
        stack.enter_context(patch.object(Tensor, "record_stream", method))
        for module in ("_flat_param", "_runtime_utils"):  # FSDP1's function knows the devices that have streams
            where = f"torch.distributed.fsdp.{module}._no_dispatch_record_stream"
            stack.enter_context(patch(where, card.record_stream))
        stack.enter_context(card.storages.resizing())
        stack.enter_context(without_memory(card))
        yield card
