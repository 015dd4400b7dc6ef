"""Error feedback of units whose gradients are reduced in few bits, if that is set. [Note: error feedback]"""

from __future__ import annotations

from ..few_bits.quantized import Residuals
from ..runtime.unit import Unit


def attach_residuals(unit: Unit) -> None:
    """Let reductions of `unit`, which is new, keep what they lose, for the kinds with error feedback."""
    for grads in unit.grads:
        handle = grads.handle
        if handle.precision.error_feedback:
            grads.residuals = Residuals([place.numel for place in handle.layout.pieces_in_shard], handle.tracker)


def residuals_of(unit: Unit) -> list[Residuals]:
    """The residuals of gradients of `unit`, for each kind with error feedback; the caller's stream waits for them."""
    found = [grads.residuals for grads in unit.grads if isinstance(grads.residuals, Residuals)]
    streams = unit.resources.streams
    for stream in (streams.reduce, streams.replicate) if found else ():
        unit.resources.device.await_mark(stream.mark())
    return found
