"""Error feedback of units whose gradients are reduced in few bits, if that is set. [Note: error feedback]"""

from __future__ import annotations

from collections.abc import Sequence

from ..base.events import Observer
from ..base.peers import Peers
from ..few_bits.quantized import Residuals
from ..runtime.model import Model
from ..runtime.unit import Unit


def attach_residuals(model: Model) -> None:
    """Let reductions of the outermost unit of `model`, which is new, keep what they lose, for the kinds with error
    feedback; and drop what those of a failed backward have kept."""
    for grads in model.outermost.grads:
        handle = grads.handle
        if handle.precision.error_feedback:
            grads.carried = Residuals([span.numel for span in handle.layout.pieces_in_shard], handle.tracker)
    if any(isinstance(grads.carried, Residuals) for unit in model.units for grads in unit.grads):
        model.observers.add(LostResiduals(model.agreement))


def residuals_of(unit: Unit) -> list[Residuals]:
    """The residuals of gradients of `unit`, for each kind with error feedback; the caller's stream waits for them."""
    found = [grads.carried for grads in unit.grads if isinstance(grads.carried, Residuals)]
    streams = unit.resources.streams
    for stream in (streams.reduce, streams.replicate) if found else ():
        unit.resources.device.await_mark(stream.mark())
    return found


class LostResiduals(Observer):
    """Drops the residuals of reductions whose results are lost with a failed backward."""

    def __init__(self, agreement: Peers) -> None:
        self._agreement = agreement

    def gradients_lost(self, units: Sequence[Unit]) -> None:
        """Those of `units`."""
        owing = []
        for unit in units:
            lost = [grads.carried for grads in unit.grads if grads.reducing]
            found = [residuals for residuals in lost if isinstance(residuals, Residuals)]
            for residuals in found:
                residuals.rescale(0.0)
            if found:
                owing.append(unit.label)
        if owing and not self._agreement.diverged:
            self._agreement.warn(
                f"a backward failed after gradients had been reduced with error feedback ({len(owing)} units, first "
                f"{owing[0]}). They are dropped, and so are the residuals of quantized gradients of these units, "
                "which start at zero again",
                names_rank=True,
            )
