"""The training loop of one rank, from the first batch of a run to its last step."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flatfsdp
from flatfsdp.trainer.data_loading import Step
from flatfsdp.trainer.gradients import add_gradients
from flatfsdp.trainer.launch import RankContext
from flatfsdp.trainer.optimizers import WarmupDecayLR
from flatfsdp.trainer.preemption import in_words
from flatfsdp.trainer.process_group import LocalFailure
from flatfsdp.trainer.run import MemoryFootprint, Run, StepReport, TrainingResult
from flatfsdp.trainer.utilization import peak_tflops

SETTLING_STEPS = 2  # these also agree on layouts and order; the next step shows the memory and traffic of a step


class Loop:
    """The steps of one run of `trainer`, which may be resumed from another.

    Attributes:
        taken: the number of steps taken.
        stopped_by: 0, or the number of the request that stopped all ranks ([Note: stopping]).
    """

    def __init__(self, trainer: Run) -> None:
        self._trainer = trainer
        self._planned = trainer.planned_steps()
        self._before = replace(trainer.progress)  # the progress of earlier runs
        self._started = time.monotonic()
        self.taken = 0
        self._stats = flatfsdp.stats(trainer.model)
        self._peak = peak_tflops(trainer.world.device, trainer.training.peak_tflops)
        self._footprint = MemoryFootprint()
        self._communication: dict[str, tuple[int, int]] = {}
        self._losses: list[float] = []  # of the first step, and of the last
        self.stopped_by = 0
        self._failure: LocalFailure | None = None  # not reported to the other ranks yet

    def run(self) -> None:
        """Take the steps that the limits allow. Collective."""
        trainer, training, progress = self._trainer, self._trainer.training, self._trainer.progress
        trainer.model.train()
        if progress.step and self._is_due(training.eval_every) and progress.evaluated < progress.step:
            self.stopped_by = trainer.evaluate_once()  # an evaluation that the previous run was stopped before
            if not self.stopped_by:
                trainer.save_once()
        arrive: Callable[[], None] | None = None
        while self._done(progress.step) < 1 and not self.stopped_by:
            step = trainer.loader.next_step(self._failure)
            if step is None:
                break
            failure = trainer.attempt_callbacks("on_step_begin", progress.step + 1)
            self._failure = self._failure or failure
            taken = self._take(step)
            if arrive is not None:
                arrive()
            arrive = taken
            evaluates, saves = self._is_due(training.eval_every), self._is_due(training.save_every)
            if evaluates or saves:
                arrive()
                arrive = None
                trainer.ranks.share(self._failure)
                if evaluates and not self.stopped_by:
                    self.stopped_by = trainer.evaluate_once()
                if saves:
                    trainer.save()
        if arrive is not None:
            arrive()
        trainer.ranks.share(self._failure)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self._trainer.progress.step % every == 0

    def result(self) -> TrainingResult:
        """The result of the run."""
        trainer, progress = self._trainer, self._trainer.progress
        return TrainingResult(
            steps=progress.step,
            tokens=progress.tokens,
            seconds=progress.seconds,
            taken=self.taken,
            tokens_per_second=self._speed(),
            losses=tuple(self._losses),
            stopped_by=self.stopped_by,
            ended_by=self._ended_by(),
            checkpoint=trainer.checkpoint,
            footprint=self._footprint,
            evaluation=trainer.metrics,
            communication=self._communication,
        )

    def _ended_by(self) -> str:
        training, step = self._trainer.training, self._trainer.progress.step
        if self.stopped_by:
            return f"{in_words(self.stopped_by)} requested a stop"
        if self._planned is not None and step >= self._planned:
            return "all planned steps completed"
        if self._trainer.time_over >= 1:
            planned = f", before all {self._planned:,} planned steps" if self._planned is not None else ""
            return f"the limit of {training.minutes:g} minutes was reached{planned}"
        return "the data ended"

    def _done(self, step: int) -> float:
        """The finished share of the run after `step`: 1 or more is the end. Time counts as of the last step whose
        metrics have arrived."""
        if self._planned == 0:
            return 1.0
        return max(self._trainer.time_over, 0.0 if self._planned is None else step / self._planned)

    def _take(self, step: Step) -> Callable[[], None]:
        """Take one step of the optimizer. Returned: a function that reads its metrics, which are still in transit."""
        trainer, world = self._trainer, self._trainer.world
        if self.taken <= SETTLING_STEPS:
            self._stats.reset()
        trainer.running = step
        if trainer.audit is not None:
            trainer.audit.step = trainer.progress.step + 1
        loss = add_gradients(
            trainer.model, step, trainer.objective, world=world, scale=trainer.scaler.scale, seed=trainer.step_seed
        )
        grad_norm = None
        if trainer.training.clip is not None:
            trainer.scaler.unscale_(trainer.optimizer)
            grad_norm = trainer.model.clip_grad_norm_(trainer.training.clip)
        lr = trainer.optimizer.param_groups[0]["lr"]
        self._failure = trainer.attempt("the step of its optimizer and scheduler", self._update)
        trainer.progress.step += 1
        self.taken += 1
        metrics = MetricsReduction(
            loss,
            step.weight,
            stop=trainer.stop.number,
            seconds=self._before.seconds + time.monotonic() - self._started,
            peak_bytes=peak_bytes(world.device),
            grad_norm=grad_norm,
            world=world,
        )
        ids = tuple(each for microbatch in step.microbatches for each in microbatch.ids)
        return partial(self._arrive, trainer.progress.step, metrics, lr, self._footprint, ids)

    def _update(self) -> None:
        """End a step whose gradients are complete: the steps of the optimizer and of the scheduler."""
        trainer = self._trainer
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()
        if self.taken <= SETTLING_STEPS:  # equal in all later steps, and slow: it visits all modules and states
            self._footprint = MemoryFootprint.measure(self._stats, trainer.optimizer)
            self._communication = self._stats.comm
        trainer.optimizer.zero_grad(set_to_none=True)
        if isinstance(trainer.scheduler, WarmupDecayLR):
            trainer.scheduler.done = self._done(trainer.progress.step + 1)  # for a run that is limited by the clock
        trainer.scheduler.step()

    def _arrive(
        self, number: int, metrics: MetricsReduction, lr: float, footprint: MemoryFootprint, ids: tuple[int, ...]
    ) -> None:
        """Process the metrics of a step, which have arrived from all ranks."""
        trainer, progress = self._trainer, self._trainer.progress
        loss, self.stopped_by, progress.seconds, most, grad_norm = metrics.read()
        progress.tokens += metrics.weight
        self._losses = [*self._losses[:1], loss]
        if number % trainer.training.log_every == 0:
            speed = self._speed()
            tflops = speed * trainer.size.flops_per_token / trainer.world.size / 1e12
            report = StepReport(
                step=number,
                loss=loss,
                tokens=metrics.weight,
                total_tokens=progress.tokens,
                lr=lr,
                grad_norm=grad_norm,
                seconds=progress.seconds,
                tokens_per_second=speed,
                tflops=tflops,
                utilization=None if self._peak is None else tflops / self._peak,
                peak_bytes=most,
                done=self._done(number),
                footprint=footprint,
                ids=ids,
            )
            self._failure = self._failure or trainer.attempt_callbacks("on_step", report)

    def _speed(self) -> float:
        progress = self._trainer.progress
        return (progress.tokens - self._before.tokens) / max(progress.seconds - self._before.seconds, 1e-9)


class MetricsReduction:
    """The metrics of a step, in transit to every rank.

    They are read one step later, so that an accelerator never idles while the host waits for a number. All ranks read
    the same values, and so make the same decisions.

    An accelerator's results are copied to the host as soon as they exist: a copy requested at the time of reading would
    be queued after the step in progress, and leave the accelerator without work.

    Args:
        loss: of this rank, as `add_gradients` returns it.
        weight: the total weight of all ranks.
        stop, seconds, peak_bytes: this rank's values.
        grad_norm: a scalar on the device, equal on all ranks; read together with the others.
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
        self.weight = weight
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
            found = self._arrived()  # on the accelerator; the host goes on
            self._found = torch.empty_like(found, device="cpu", pin_memory=True).copy_(found, non_blocking=True)
            self._copied = torch.get_device_module(loss.device).Event()
            self._copied.record()

    def read(self) -> tuple[float, int, float, int, float | None]:
        """Wait for the values: the mean loss (0 without any), the highest number of a request to stop, the clock of
        rank 0, the largest peak bytes of any rank, and the given norm."""
        with flatfsdp.collective_region():
            if self._copied is None:
                self._found = self._arrived()
            else:
                self._copied.synchronize()
        count = self._sum.numel()
        losses, (stop, seconds, peak, *norm) = self._found[:count].tolist(), self._found[count:].tolist()
        return sum(losses) / max(self.weight, 1), int(stop), seconds, int(peak), norm[0] if norm else None

    def _arrived(self) -> Tensor:
        for work in self._works:
            work.wait()
        return torch.cat((self._sum.view(-1), self._most, self._norm))


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process: from the device's allocator, or, for a CPU, the largest resident set."""
    if device.type == "cpu":
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return int(torch.get_device_module(device).max_memory_allocated(device))
