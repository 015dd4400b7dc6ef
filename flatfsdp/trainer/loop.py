"""The training loop of one rank, from the first batch of a run to its last step, evaluation and checkpoint.

[Note: stages] A run is a sequence of *stages*, each of which does what is due after the last step, and takes the next
one; the last stage does what is due at the end instead. With `[elastic]` a stage is a step of `survive`: if a rank is
lost in it, it is begun again by those that are left, from the state between two stages. So all that a stage has done,
and may do again, is part of that state or follows from it.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flatfsdp
from flatfsdp.elastic import Survived, survive
from flatfsdp.messages import start_unrecorded
from flatfsdp.trainer.data_loading import Step
from flatfsdp.trainer.launch import RankContext
from flatfsdp.trainer.optimizers import WarmupDecayLR
from flatfsdp.trainer.preemption import in_words
from flatfsdp.trainer.process_group import LocalFailure
from flatfsdp.trainer.run import MemoryFootprint, Run, StepReport, TrainingResult
from flatfsdp.trainer.state.components import Component, Sharing
from flatfsdp.trainer.utilization import peak_tflops

SETTLING_STEPS = 2  # these also agree on layouts and order; the next step shows the memory and traffic of a step


class Loop:
    """The steps of one run of `trainer`, which may be resumed from another.

    Attributes:
        stopped_by: 0, or the number of the request that stopped all ranks ([Note: stopping]).
    """

    def __init__(self, trainer: Run) -> None:
        self._trainer = trainer
        self._planned = trainer.planned_steps()
        self._before = replace(trainer.progress)  # the progress of earlier runs
        self._started = time.monotonic()
        self._settling_from = trainer.progress.step
        self._stats = flatfsdp.stats(trainer.model)
        self._peak = peak_tflops(trainer.world.device, trainer.training.peak_tflops)
        self._footprint = MemoryFootprint()
        self._communication: dict[str, tuple[int, int]] = {}
        self._losses: list[float] = []  # of the first step, and of the last
        self.stopped_by = 0
        self._failure: LocalFailure | None = None  # not reported to the other ranks yet
        self._arrives: Callable[[], None] = _nothing  # reads the metrics of the last step
        self._is_over = False
        self._survived: Sequence[Survived] = ()
        self._earlier: Sequence[Survived] = ()  # before this process has joined

    def run(self) -> None:
        """Take the steps that the limits allow, evaluate and save. Collective."""
        self._trainer.model.train()
        for stage in self._stages():
            with stage:
                self._stage()
            if self._is_over:
                break

    def _stages(self) -> Iterator[AbstractContextManager[Any]]:
        trainer, elastic = self._trainer, self._trainer.elastic
        if not elastic.enabled:
            yield from repeat(nullcontext())
        options = {name: value for name, value in vars(elastic).items() if name not in ("enabled", "restarts")}
        options |= {"steps": sys.maxsize, "state": {"run": self}, "before_change": trainer.leave_ranks}
        for step in survive(trainer.model, trainer.optimizer, **options):
            first = self._before.step + 1
            self._survived = [*self._earlier, *(each._replace(step=first + each.step) for each in step.survived)]
            yield step

    def state_dict(self) -> dict[str, Any]:
        """The state of the run between two stages, except model, optimizer and random numbers."""
        run = {"before": self._before.state_dict(), "survived": [each._asdict() for each in self._survived]}
        states = {each.name: each.save() for each in self._components()}
        return {"losses": self._losses, "components": states, "run": self._trainer.state_of_run() | run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to such a state, on other ranks, or begin with it on a rank that joins. Collective."""
        for component in self._components():
            component.load(state["components"][component.name])
        if self._trainer.world.joins:
            self._join(state["run"])
        self._losses, self.stopped_by, self._is_over = state["losses"], 0, False
        self._arrives, self._settling_from = _nothing, self._trainer.progress.step
        self._trainer.follow_ranks()
        self._failure = self._trainer.attempt_callbacks("on_other_ranks")

    def _join(self, run: Mapping[str, Any]) -> None:
        """Take over, from the other ranks, what they know since the run began."""
        trainer, progress = self._trainer, self._trainer.progress
        trainer.join(run)
        self._before.load_state_dict(run["before"])
        self._planned = trainer.planned_steps()
        self._started = time.monotonic() + self._before.seconds - progress.seconds
        self._earlier = [Survived(**each) for each in run["survived"]]

    def _components(self) -> list[Component]:
        return [each for each in self._trainer.checkpoints.components if each.sharing is Sharing.REPLICATED]

    def _stage(self) -> None:
        """[Note: stages]"""
        trainer, training, progress = self._trainer, self._trainer.training, self._trainer.progress
        # One of these is there if the previous run was stopped before its evaluation.
        again = trainer.checkpoints.complete_at == progress.step or trainer.checkpoints.broken_off
        evaluates, saves = self._is_due(training.eval_every), self._is_due(training.save_every) or again
        if evaluates or saves:
            self._settle()
            if evaluates and not self.stopped_by:
                self.stopped_by = trainer.evaluate_once()
            if saves:
                trainer.save_once()
        step = None
        if self._done(progress.step) < 1 and not self.stopped_by:
            step = trainer.loader.next_step(self._failure)
        if step is not None:
            failure = trainer.attempt_callbacks("on_step_begin", progress.step + 1)
            self._failure = self._failure or failure
            before, self._arrives = self._arrives, self._take(step)
            before()
            if trainer.elastic.enabled:  # metrics on their way are lost with a rank
                self._arrived()
            return
        self._settle()
        if training.eval_at_end and not self.stopped_by:
            self.stopped_by = trainer.evaluate_once()
        if training.save_at_end or self.stopped_by:
            trainer.save_once()
        trainer.checkpoints.manager.finish()
        self._is_over = True

    def _settle(self) -> None:
        """End the last step: its metrics, and failures. Collective."""
        self._arrived()
        self._trainer.ranks.share(self._failure)

    def _arrived(self) -> None:
        arrives, self._arrives = self._arrives, _nothing
        arrives()

    def _is_due(self, every: int | None) -> bool:
        step = self._trainer.progress.step
        return every is not None and step > 0 and step % every == 0

    def result(self) -> TrainingResult:
        """The result of the run."""
        trainer, progress = self._trainer, self._trainer.progress
        return TrainingResult(
            steps=progress.step,
            tokens=progress.tokens,
            seconds=progress.seconds,
            taken=progress.step - self._before.step,
            tokens_per_second=self._speed(),
            losses=tuple(self._losses),
            stopped_by=self.stopped_by,
            ended_by=self._ended_by(),
            checkpoint=trainer.checkpoint,
            footprint=self._footprint,
            evaluation=trainer.metrics,
            communication=self._communication,
            survived=self._survived,
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
        if self._settles:
            self._stats.reset()
        trainer.running = step
        trainer.begin_audit()
        loss = trainer.add_gradients(step)
        grad_norm = None
        if trainer.training.clip is not None:
            trainer.scaler.unscale_(trainer.optimizer)
            grad_norm = trainer.model.clip_grad_norm_(trainer.training.clip)
        lr = trainer.optimizer.param_groups[0]["lr"]
        failure = trainer.attempt("the step of its optimizer and scheduler", self._update)
        self._failure = self._failure or failure
        trainer.progress.step += 1
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
        if self._settles:  # equal in all later steps, and slow: it visits all modules and states
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

    @property
    def _settles(self) -> bool:
        return self._trainer.progress.step - self._settling_from <= SETTLING_STEPS

    def _speed(self) -> float:
        progress = self._trainer.progress
        return (progress.tokens - self._before.tokens) / max(progress.seconds - self._before.seconds, 1e-9)


def _nothing() -> None:
    pass


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
            start_unrecorded(dist.all_reduce, self._sum, async_op=True),
            start_unrecorded(dist.all_reduce, self._most, dist.ReduceOp.MAX, async_op=True),
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
