"""The evaluation loss, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from flatfsdp import FullyShardedDataParallel, collective_region
from flatfsdp.trainer.data_loading import Microbatch
from flatfsdp.trainer.gradients import loss_of, weight_of
from flatfsdp.trainer.launch import RankContext
from flatfsdp.trainer.objectives.objectives import Objective
from flatfsdp.trainer.preemption import StopRequest


def evaluate(
    model: FullyShardedDataParallel,
    batches: Iterable[Microbatch],
    objective: Objective,
    *,
    world: RankContext,
    stop: StopRequest,
) -> tuple[dict[str, float], int]:
    """Mean loss over the tokens of all ranks' `batches`, equally many on each, and the number of these tokens.

    Collective; the same on all ranks. The model is left in the mode, training or not, that it was in.

    Returns:
        The two, and 0; or nothing, and who asked some rank to stop meanwhile ([Note: stopping]).
    """
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    was_training = model.training
    model.eval()
    asked: _StopFlag | None = None
    try:
        with torch.no_grad():
            for microbatch in batches:
                if asked is not None and (stopped_by := asked.by_anyone()):
                    return {}, stopped_by
                asked = _StopFlag(stop, world)
                sums[0] += loss_of(microbatch, objective, model, world)
                sums[1] += weight_of(microbatch, objective)
    finally:
        model.train(was_training)
    with collective_region():
        dist.all_reduce(sums)
    loss, weight = sums.tolist()
    return {"eval_loss": loss / max(weight, 1.0), "eval_tokens": int(weight)}, 0


class _StopFlag:
    """Whether some rank was asked to stop, on its way to all while the next forward runs."""

    def __init__(self, stop: StopRequest, world: RankContext) -> None:
        self._most = torch.tensor(float(stop.number), device=world.device)
        self._work = dist.all_reduce(self._most, dist.ReduceOp.MAX, async_op=True)

    def by_anyone(self) -> int:
        """0, or the highest number of a request."""
        if self._work is not None:
            with collective_region():
                self._work.wait()
        return int(self._most)
