"""A training run, as seen by callbacks and the loop: its parts, the operations at any step, and its reports.

[Note: failing alone] If all ranks raise, each has its exception. If one raises alone, in a callback, an optimizer
or a scheduler, it takes part in the next regular exchange, which includes its failure: then all raise, without an
additional exchange per step. In an objective, it may have left the others in the middle of a model: the
engine reports it to them (`flatfsdp.fail_together`), and blocked ranks end their process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flatfsdp import Audit, ShardedGradScaler, Stats
from flatfsdp.elastic import Survived
from flatfsdp.trainer.arguments import ElasticArguments, FSDPArguments, Task, TrainingArguments
from flatfsdp.trainer.data_loading import Loader, Microbatch, Step, evaluation
from flatfsdp.trainer.data_loading.sample_reader import Collate
from flatfsdp.trainer.gradients import add_gradients, evaluate
from flatfsdp.trainer.launch import RankContext
from flatfsdp.trainer.objectives import Objective
from flatfsdp.trainer.optimizers import WarmupDecayLR
from flatfsdp.trainer.preemption import REQUESTED, StopRequest
from flatfsdp.trainer.process_group import LocalFailure, TrainerRanks
from flatfsdp.trainer.settings.references import resolve
from flatfsdp.trainer.state.run_checkpoints import RunCheckpoints
from flatfsdp.trainer.terminal import sizes_in_words


@dataclass(frozen=True)
class MemoryFootprint:
    """Bytes of one rank: its memory between steps, and the peak of unsharded memory."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    in_flight: int = 0

    @classmethod
    def measure(cls, stats: Stats, optimizer: torch.optim.Optimizer) -> MemoryFootprint:
        """Read `flatfsdp.stats` and the optimizer's tensors; call it while the gradients of a step exist."""
        values = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
        tensors = [value.to_local() if hasattr(value, "to_local") else value for value in values]  # for DTensors
        return cls(
            parameters=stats.bytes_params,
            gradients=stats.bytes_grads,
            optimizer=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            in_flight=stats.bytes_unsharded_peak,
        )

    def __str__(self) -> str:
        sizes = sizes_in_words(self.parameters, self.gradients, self.optimizer, self.in_flight).split(", ")
        names = ("params", "grads", "optim", "unsharded")
        return ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))


@dataclass(frozen=True)
class StepReport:
    """One step.

    Attributes:
        step: its number, from 1.
        loss: mean over the tokens of all ranks.
        tokens: their number: tokens, samples or other items counted by the objective.
        total_tokens: the number in all steps up to this one, including those before the run was resumed.
        lr: learning rate of the optimizer's first group in this step.
        grad_norm: over all ranks, before clipping; None without clipping.
        seconds: of training up to this step, by rank 0's clock, including those before the run was resumed.
        tokens_per_second: since the run was started or resumed.
        tflops: of a rank in that time, in 10^12 operations per second, by `utilization.flops_per_token`.
        utilization: its share of the device's peak; None where that is unknown.
        peak_bytes: of the rank with the highest peak: from the device's allocator, or, for a CPU, the process' largest
            resident set.
        done: the finished share of the run, 0 to 1.
        footprint: this rank's bytes, measured in its third step, or until then in an earlier one.
        ids: the samples that this rank has trained on in the step.
    """

    step: int
    loss: float
    tokens: int
    total_tokens: int
    lr: float
    grad_norm: float | None
    seconds: float
    tokens_per_second: float
    tflops: float
    utilization: float | None
    peak_bytes: int
    done: float
    footprint: MemoryFootprint
    ids: tuple[int, ...]

    def row(self) -> dict[str, Any]:
        """The fields for a row of a log."""
        rounded = {"seconds": round(self.seconds, 3), "tokens_per_second": round(self.tokens_per_second, 1)}
        left_out = ("done", "footprint", "ids", *(name for name, value in vars(self).items() if value is None))
        return {name: value for name, value in (vars(self) | rounded).items() if name not in left_out}


@dataclass
class Progress:
    """The progress of a run; the same on all ranks.

    Attributes:
        step: steps taken.
        tokens: trained on, as counted by the objective, up to the last step whose metrics have arrived.
        seconds: of training, by rank 0's clock, up to the same step.
        evaluated: the step of the last evaluation; -1 for none.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    evaluated: int = -1

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run that has ended.

    Attributes:
        steps: the total number of steps taken, including those before the run was resumed.
        tokens: trained on, likewise.
        seconds: of training, likewise.
        taken: the steps that this run took.
        tokens_per_second: in these steps.
        losses: of the first and the last of them; empty where there were none.
        evaluation: the metrics of the last one.
        stopped_by: 0 for the planned end, `preemption.REQUESTED`, or a signal's number.
        ended_by: a description of the reason: its steps, the data, the clock, or a request to stop.
        checkpoint: the last saved one, by this run or the one that it resumed from.
        footprint: this rank's bytes.
        communication: kind of collective to (calls, bytes) of this rank in one of its steps.
        survived: the losses of ranks that the run has survived, and the joins, with numbers of steps from 1.
    """

    steps: int
    tokens: int
    seconds: float
    taken: int
    tokens_per_second: float
    losses: tuple[float, ...]
    stopped_by: int
    checkpoint: Path | None
    footprint: MemoryFootprint
    ended_by: str = ""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    communication: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    survived: Sequence[Survived] = ()

    @property
    def exit_code(self) -> int:
        """The exit code for a program: 0, or 128 plus the number of the signal that ended the run early."""
        return 128 + self.stopped_by if self.stopped_by > REQUESTED else 0


@dataclass(frozen=True)
class ModelSize:
    """The size of a model before it was sharded.

    Attributes:
        parameters: the number of its parameters' elements.
        flops_per_token: the operations that it computes with them (`utilization`).
    """

    parameters: int
    flops_per_token: int


@dataclass(eq=False)
class Evaluation:
    """The data of a run's evaluations, and the last result.

    Attributes:
        data: the dataset; None for no evaluations.
        collate: makes microbatches; None for torch's.
        metrics: the metrics of the last evaluation.
    """

    data: Any
    collate: Collate | None
    metrics: dict[str, float] = field(default_factory=dict)

    def batches(self, training: TrainingArguments, *, whole: bool) -> Iterator[Microbatch]:
        """The microbatches of one evaluation; `whole`: whole batches. [Note: position]"""
        return evaluation(
            self.data,
            batch=training.batch,
            collate=self.collate,
            limit=training.eval_batches,
            mode=training.data_mode,
            workers=training.workers,
            whole_batches=whole,
        )


@dataclass(eq=False)
class Run:
    """A run. Its methods are collective, except `ask_to_stop`, `attempt` and `attempt_callbacks`.

    Attributes:
        task: the model and its data.
        training: the settings of training.
        fsdp: the settings of sharding.
        elastic: the settings for lost ranks.
        callbacks: in the order in which they are called.
        world: the position of this rank.
        size: the size of the model.
        model: the sharded model: the wrapper, or the model itself after `fully_shard`.
        objective: the loss to train on.
        optimizer: over the parameters of the sharded model.
        scaler: scales losses if gradients are fp16.
        scheduler: sets the learning rates.
        loader: reads the samples.
        evaluation: the evaluation data and the last metrics.
        checkpoints: the contents of checkpoints, and the last one.
        progress: the progress of the run.
        running: the step that runs, or has run last.
        audit: compares what ranks compute, if `training.audit_every` is set.
        aside: the folder of files that this run has set aside: later checkpoints when it branches off, and the logs of
            earlier runs (known to the rank that leads).
        written: other files written by callbacks, by a name for people; on the rank that leads.
        stop: whether this rank has to stop.
        report: reports an exception of this rank to the others, inside `flatfsdp.fail_together`.
    """

    task: Task
    training: TrainingArguments
    fsdp: FSDPArguments
    elastic: ElasticArguments
    callbacks: Sequence[Any]
    world: RankContext
    size: ModelSize
    model: Any
    objective: Objective
    optimizer: Optimizer
    scaler: ShardedGradScaler
    scheduler: LRScheduler
    loader: Loader
    evaluation: Evaluation
    checkpoints: RunCheckpoints
    progress: Progress
    running: Step | None = None
    audit: Audit | None = None
    aside: Path | None = None
    written: dict[str, Path] = field(default_factory=dict)
    stop: StopRequest = field(default_factory=StopRequest)
    report: Callable[[BaseException], None] = lambda error: None
    ranks: TrainerRanks = field(default_factory=TrainerRanks)

    @property
    def output(self) -> Path:
        """The run's folder: checkpoints `step-...`, and the files of callbacks."""
        return self.training.output

    @property
    def checkpoint(self) -> Path | None:
        """The last saved checkpoint, or the one that the run resumes from."""
        return self.checkpoints.last

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last evaluation."""
        return self.evaluation.metrics

    @property
    def begins(self) -> bool:
        """Whether this run is the first in its folder, without a checkpoint there to resume from."""
        return not self.checkpoints.goes_on

    @property
    def time_over(self) -> float:
        """The elapsed share of `training.minutes`, up to the last step with metrics; 0 without that limit."""
        return self.progress.seconds / 60 / self.training.minutes if self.training.minutes is not None else 0.0

    def planned_steps(self) -> int | None:
        """The total number of steps of the run; None where only time or the data ends it."""
        return planned_steps(self.training, self.loader, self.progress.step)

    def shown(self, path: Path) -> str:
        """`path`, below the output folder as written in the settings if it is in the run's folder."""
        return str(self.output / path.name if path.parent == self.checkpoints.manager.folder else path)

    def ask_to_stop(self) -> None:
        """End the run within three steps, on all ranks, as a signal would; any rank may call it."""
        self.stop.request()

    def evaluate(self) -> dict[str, float]:
        """Mean loss over the evaluation data, and its number of tokens; empty without such data, or if a stop
        was requested in the meantime. The result goes to callbacks and into the next checkpoint."""
        return self._evaluate()[0]

    def evaluate_once(self) -> int:
        """Evaluate, unless that was done after the last step; 0, or the number of a stop request in the meantime."""
        return self._evaluate()[1] if self.progress.evaluated < self.progress.step else 0

    def _evaluate(self) -> tuple[dict[str, float], int]:
        if self.evaluation.data is None:
            return {}, 0
        metrics, stopped_by = evaluate(
            self.model,
            self.evaluation.batches(self.training, whole=self.fsdp.deterministic_sums),
            self.objective,
            world=self.world,
            stop=self.stop,
            metrics=resolve(self.task.metrics, argument="metrics"),
            in_order=self.fsdp.deterministic_sums,
        )
        if metrics:
            self.evaluation.metrics, self.progress.evaluated = metrics, self.progress.step
            self.checkpoints.complete_at = -1  # a checkpoint of this step lacks the metrics
            self.call("on_evaluation", metrics)
        return metrics, stopped_by

    def save(self) -> Path:
        """Save a checkpoint of this step into the run's folder, and remove those that need not stay."""
        if self.audit is not None:
            self.audit.check()
        step = self.progress.step
        metrics = self.metrics if self.progress.evaluated == step else {}
        saved = self.checkpoints.save(step, model=self.model, optimizer=self.optimizer, metrics=metrics)
        self.call("on_save", saved.path, saved.stall_seconds)
        return saved.path

    def save_once(self) -> None:
        """Save, unless there is a complete checkpoint of the last step, including its metrics."""
        if self.checkpoints.complete_at < self.progress.step:
            self.save()

    def add_gradients(self, step: Step) -> torch.Tensor:
        """Those of the microbatches of a step, and its losses. Collective."""
        seed = self.training.seed if self.fsdp.deterministic_sums else None
        return add_gradients(self.model, step, self.objective, world=self.world, scale=self.scaler.scale, seed=seed)

    def begin_audit(self) -> None:
        """A step begins: make an audit of the model, if the settings ask for one and these ranks have none."""
        if self.training.audit_every is not None:
            self.audit = self.audit or Audit(self.model, self._run_again, every=self.training.audit_every)
            self.audit.step = self.progress.step + 1

    def _run_again(self, number: int) -> None:
        """Compute a microbatch of any rank of the running step."""
        assert self.running is not None
        self.add_gradients(self.loader.read(self.running, number))

    def state_of_run(self) -> dict[str, Any]:
        """Plain data that a rank that joins needs, and no checkpoint has."""
        return {"output": str(self.output), "metrics": self.metrics}

    def join(self, state: Mapping[str, Any]) -> None:
        """Go on with that of the others; the components are loaded already."""
        self.training = replace(self.training, output=Path(state["output"]))
        self.evaluation.metrics = dict(state["metrics"])
        self.checkpoints.manager.folder = self.output.absolute()
        if isinstance(self.scheduler, WarmupDecayLR):
            self.scheduler.follow(steps=self.planned_steps(), done=self.scheduler.done)

    def leave_ranks(self) -> None:
        """End what refers to the present ranks: some are lost, or join, and the model is about to move."""
        with suppress(RuntimeError):  # of samples that were on their way
            self.loader.close()
        if self.audit is not None:
            self.audit.remove()
            self.audit = None
        self.checkpoints.abandon()

    def follow_ranks(self) -> None:
        """Go on with the ranks that are there now. Collective."""
        self.world = RankContext.join(self.training.device)
        self.checkpoints.agree(self.ranks)

    def call(self, event: str, *values: Any) -> None:
        """Call the method `event` of all callbacks.

        Raises:
            Exception: from a callback on this rank; AgreementError, with that rank and its exception, on the others.
        """
        self.ranks.share(self.attempt_callbacks(event, *values))

    def attempt_callbacks(self, event: str, *values: Any) -> LocalFailure | None:
        """The same without an exchange. Returned: the failure of a callback, to be shared."""
        for callback in self.callbacks:
            work = partial(getattr(callback, event), self, *values)
            if failure := self.attempt(f"{type(callback).__name__}.{event}", work):
                return failure
        return None

    def attempt(self, doing: str, work: Callable[[], object]) -> LocalFailure | None:
        """Run `work`. Returned: its failure, to be shared."""
        try:
            work()
        except Exception as error:
            self.report(error)
            return LocalFailure(doing, error)
        return None


def planned_steps(training: TrainingArguments, loader: Loader, step: int = 0) -> int | None:
    """The total number of steps of a run that is after `step`; None where only time or the data ends it."""
    limits = [] if training.steps is None else [training.steps]
    if loader.steps_left is not None:
        limits.append(step + loader.steps_left)
    return min(limits, default=None)
