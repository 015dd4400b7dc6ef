"""The metrics of a step that all ranks share: loss, weight, a request to stop, rank 0's clock, the most memory held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp import collective_region
from flatfsdp.trainer.launch import RankContext


@dataclass(frozen=True)
class StepMetrics:
    """One step, the same on all ranks.

    Attributes:
        loss: mean over all ranks' tokens (or samples, ...) of the step; 0 where there were none.
        weight: their number.
        stop: 0, or the highest number of a request to stop ([Note: stopping]).
        seconds: rank 0's clock.
        peak_bytes: of the rank that has held most.
        grad_norm: as given.
    """

    loss: float
    weight: int
    stop: int
    seconds: float
    peak_bytes: int
    grad_norm: float | None


class MetricsReduction:
    """The metrics of a step on their way to every rank.

    Read one step later than sent, so that an accelerator never idles while the host waits for a number. All ranks read
    the same values, hence take the same decisions.

    What an accelerator computes, it copies to the host as soon as it is there: a copy that is asked for when the number
    is read would come after the step that is on its way by then, and leave nothing to do for the accelerator.

    Args:
        loss: the sum of this rank's, a scalar on the device.
        weight: of all ranks.
        stop, seconds, peak_bytes: this rank's.
        grad_norm: a scalar on the device, the same on all ranks; it is read with the others.
    """

    def __init__(
        self,
        loss: Tensor,
        weight: int,
        *,
        stop: int,
        seconds: float,
        peak_bytes: int,
        grad_norm: Tensor | None,
        world: RankContext,
    ) -> None:
        own = (float(stop), seconds if world.leads else 0.0, float(peak_bytes))
        self._weight = weight
        self._sum = loss.clone()
        self._most = torch.tensor(own, dtype=loss.dtype).to(loss.device, non_blocking=True)
        works = (
            dist.all_reduce(self._sum, async_op=True),
            dist.all_reduce(self._most, dist.ReduceOp.MAX, async_op=True),
        )
        self._works = [work for work in works if work is not None]
        self._norm = loss.new_empty(0) if grad_norm is None else grad_norm.detach().to(loss).view(1)
        self._copied: Any = None
        if loss.device.type != "cpu":
            found = self._arrived()  # for the accelerator; the host goes on
            self._found = torch.empty_like(found, device="cpu", pin_memory=True).copy_(found, non_blocking=True)
            self._copied = torch.get_device_module(loss.device).Event()
            self._copied.record()

    def read(self) -> StepMetrics:
        """What arrived, after waiting for it."""
        with collective_region():
            if self._copied is None:
                self._found = self._arrived()
            else:
                self._copied.synchronize()
        loss, stop, seconds, peak, *norm = self._found.tolist()
        grad_norm = norm[0] if norm else None
        return StepMetrics(loss / max(self._weight, 1), self._weight, int(stop), seconds, int(peak), grad_norm)

    def _arrived(self) -> Tensor:
        for work in self._works:
            work.wait()
        return torch.cat((self._sum[None], self._most, self._norm))
