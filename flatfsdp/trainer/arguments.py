"""The arguments of a run of the trainer: how the model is sharded, how it is trained, the model and the data.

Checks that need neither model nor ranks are made at construction; messages name the field, the given value, the
accepted values, and the nearest name. Values are in one normal form afterwards: names in lower case, dtypes as
`torch.dtype`, paths as `Path`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch

from flatfsdp import ShardingStrategy
from flatfsdp.trainer.settings import Field, Settings, dataclass, setting
from flatfsdp.trainer.settings.types import (
    Bits,
    CheckpointPolicy,
    Count,
    Data,
    DataMode,
    DType,
    Extremum,
    FilePath,
    Front,
    Layout,
    Module,
    Name,
    Named,
    NotNegative,
    Options,
    PackedDType,
    PlainValidator,
    Positive,
    Prefetch,
    Resume,
    SaveFormat,
    Steps,
    Text,
    Units,
    Whole,
)

__all__ = ["STRATEGIES", "FSDPArguments", "Task", "TrainingArguments", "check_run"]

STRATEGIES = {member.name.lower().strip("_"): member for member in ShardingStrategy}
"""The names of strategies in settings: FSDP's in lower case, without the underscore of the private one."""

_HYBRIDS = ("hybrid_shard", "hybrid_shard_zero2")

_ELEMENTWISE = "AdamW Adam SGD Adadelta Adagrad Adamax ASGD NAdam RAdam RMSprop Rprop"
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): getattr(torch.optim, name) for name in _ELEMENTWISE.split()
}
"""Optimizers of torch that are element-wise, so that results do not depend on the number of ranks."""

NOT_BY_NAME = {
    "adafactor": "Adafactor looks at rows and columns, of which a rank may have parts.",
    "muon": "Muon looks at whole matrices, of which a rank may have parts.",
    "lbfgs": "LBFGS calls the model several times in a step, which the trainer does not.",
    "sparseadam": "SparseAdam needs sparse gradients, and reduced ones are dense.",
}
"""Optimizers of torch that settings do not accept, each with the reason."""


def stay_then_decay(done: float, *, decay: float = 0.2) -> float:
    """The schedule "wsd" (warmup, stable, decay): 1, then linearly down to 0 over the last share `decay`.

    Source: MiniCPM, arXiv:2404.06395, section 4.
    """
    return min(1.0, (1.0 - done) / decay)


SCHEDULERS: Mapping[str, Callable[..., float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "wsd": stay_then_decay,
}
"""Names of schedules: the factor of the highest learning rate, by the finished share of the run after the warmup."""

Strategy = Annotated[str, PlainValidator(Name(tuple(STRATEGIES)))]
OptimizerName = Annotated[
    Any, PlainValidator(Name(OPTIMIZERS, "a callable (params, **options) -> Optimizer", callable, NOT_BY_NAME))
]
SchedulerName = Annotated[
    Any, PlainValidator(Name(SCHEDULERS, "a callable (optimizer, steps) -> LRScheduler", callable))
]


@dataclass(frozen=True, kw_only=True)
class FSDPArguments(Settings):
    """Sharding: settings for the arguments of `FullyShardedDataParallel`, or of `fully_shard`.

    Raises:
        ConfigTypeError, ConfigValueError: at construction, for a field or a combination that is not accepted.
    """

    front: Front = setting(
        "wrapper", "front of the engine: a FullyShardedDataParallel around the model, or fully_shard, with DTensors"
    )
    strategy: Strategy = setting("full_shard", "the parts of the state that are sharded over ranks, and when")
    reshard_after_forward: Count | bool | None = setting(
        None,
        "whether parameters are freed between forward and backward, or among how many ranks they stay; "
        "none for the strategy's own",
    )
    replicas: Count | None = setting(None, "copies of the model in the hybrid strategies; none for one per node")
    units: Units = setting("auto", "which submodules become units: auto, none, a path, a class; or several a,b")
    units_fallback: bool = setting(False, "where units names nothing, take the whole model as one unit")
    bf16: bool = setting(False, "compute in bf16 and sum gradients in fp32: param_dtype and reduce_dtype at once")
    fp16: bool = setting(False, "compute in fp16 with scaled losses and sum gradients in fp32: the same in fp16")
    param_dtype: DType | None = setting(None, "dtype to compute in, such as bf16; none for the parameters' own")
    reduce_dtype: DType | None = setting(
        None, "dtype in which gradients are summed over ranks; none for the one to compute in"
    )
    buffer_dtype: DType | None = setting(None, "dtype of buffers in computation; none for their own")
    gather_dtype: PackedDType | None = setting(
        None, "dtype in which parameters travel, int8 or fp8 with a scale for each 256; none for the one to compute in"
    )
    reduce_bits: Bits | None = setting(
        None, "bits of a number when gradients travel, 8 or 4 with a scale for each 256; none for reduce_dtype"
    )
    reduce_error_feedback: bool = setting(
        False, "add to gradients in reduce_bits the loss of earlier reductions, which is kept on the device"
    )
    cpu_offload: bool = setting(False, "keep shards, gradients and optimizer state in host memory")
    use_orig_params: bool = setting(True, "the optimizer sees the original parameters, or one flat parameter per unit")
    layout: Layout | None = setting(
        None,
        "ranks split all parameters of a unit as one, with the least padding (flat), or each of them by whole rows; "
        "none for the front's default: the wrapper flat, fully_shard rows",
    )
    activation_checkpointing: bool = setting(False, "compute the activations of each unit again in the backward")
    checkpoint_every: Count = setting(1, "with activation_checkpointing: of every so many units one")
    checkpoint_policy: CheckpointPolicy | None = setting(
        None,
        "with activation_checkpointing: which operations are computed again, as a policy_fn of "
        "torch.utils.checkpoint.create_selective_checkpoint_contexts; none for all",
    )
    compile: bool = setting(False, "compile each unit with torch.compile")
    keep_frozen_unsharded: bool = setting(
        False, "gather frozen parameters once and keep them whole, for adapters on a model that fits"
    )
    backward_prefetch: Prefetch | None = setting(
        "backward_pre", "when backward gathers the next unit (none for not before it is reached)"
    )
    forward_prefetch: bool = setting(False, "forward gathers the next unit early")
    limit_all_gathers: bool = setting(True, "gathers wait until the memory of earlier units is free")
    sync_module_states: bool = setting(False, "all ranks start from the parameters and buffers of rank 0")

    @property
    def scales_losses(self) -> bool:
        """Whether gradients are fp16 anywhere, so that small ones would underflow."""
        return torch.float16 in (self.param_dtype, self.reduce_dtype)

    def __post_init__(self) -> None:
        self._set_precision()
        for name in ("checkpoint_every", "checkpoint_policy"):
            if getattr(self, name) not in (1, None) and not self.activation_checkpointing:
                self.refuse(name, f"it belongs to {self.called('activation_checkpointing')}")
        if self.replicas is not None and self.strategy not in _HYBRIDS:
            self.refuse(
                "replicas", f"only {' and '.join(_HYBRIDS)} replicate, and {self.called('strategy')} is {self.strategy}"
            )
        if self.strategy in _HYBRIDS and self.replicas is None and self.units == "none":
            self.refuse("units", f"{self.called('strategy')} {self.strategy} needs units, or {self.called('replicas')}")
        if self.reduce_error_feedback and self.reduce_bits is None:
            self.refuse("reduce_error_feedback", f"without {self.called('reduce_bits')} gradients lose nothing")
        self._check_front()
        if self.strategy == "no_shard":
            for name in ("reshard_after_forward", "forward_prefetch", "gather_dtype"):
                if getattr(self, name):
                    self.refuse(name, f"with {self.called('strategy')} no_shard parameters are never gathered")

    def _check_front(self) -> None:
        if self.front != "fully_shard":
            return
        front = f"with {self.called('front')} fully_shard"
        if self.strategy == "no_shard":
            self.refuse("strategy", f"{front} parameters are always split over ranks; the wrapper can leave them whole")
        if not self.use_orig_params:
            self.refuse("use_orig_params", f"{front} each parameter is a DTensor; flat ones belong to the wrapper")
        if self.layout == "flat":
            self.refuse("layout", f"{front} ranks split each parameter by rows")

    def _set_precision(self) -> None:
        """Set the dtypes that `bf16` and `fp16` stand for."""
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if not getattr(self, name):
                continue
            for field, meant in (("param_dtype", dtype), ("reduce_dtype", torch.float32)):
                if getattr(self, field) not in (None, meant):
                    self.refuse(name, f"{self.called(field)} is {getattr(self, field)}")
                object.__setattr__(self, field, meant)


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(Settings):
    """Training, evaluation and checkpoints.

    A run ends at the first of its limits `steps`, `epochs` and `minutes`; without any, after one epoch.

    Raises:
        ConfigTypeError, ConfigValueError: at construction, for a field or a combination that is not accepted.
    """

    output: FilePath = setting(Path("train-out"), "folder of checkpoints, metrics and plots")
    steps: Count | None = setting(None, "end after so many optimizer steps")
    epochs: Count | None = setting(None, "end after so many passes over the data")
    minutes: Positive | None = setting(None, "end after so many minutes of training, by the clock of rank 0")

    batch: Count = setting(8, "samples per rank and microbatch")
    accumulate: Count = setting(1, "microbatches per step")
    global_batch: Count | None = setting(
        None, "samples per step over all ranks, in as many microbatches as that needs; in place of accumulate"
    )
    data_mode: DataMode = setting("sharded", "sharded: each rank reads its own samples; dispatch: rank 0 reads for all")
    shuffle: bool = setting(True, "take the samples of each epoch in a random order")
    workers: Whole = setting(0, "processes that read ahead, for each rank that reads")
    drop_last: bool = setting(False, "leave out the samples at the end that do not fill a step")

    optimizer: OptimizerName = setting(
        "adamw", "a name of torch.optim, or module:function called with parameters and optimizer_options"
    )
    lr: Positive = setting(1e-3, "highest learning rate")
    weight_decay: NotNegative = setting(0.01, "weight decay, of all but norms and biases")
    optimizer_options: Options = setting({}, "more arguments of the optimizer, such as betas=[0.9,0.95]")
    optimizer_in_backward: bool = setting(
        False, "step on each unit as soon as its gradients are reduced, and free them"
    )
    scheduler: SchedulerName = setting(
        "cosine",
        "schedule of the learning rate: constant, linear, cosine, wsd, or module:function called with optimizer and "
        "steps",
    )
    warmup: Annotated[NotNegative, Field(lt=1)] = setting(0.0, "share of the run in which the learning rate rises")
    warmup_steps: Whole = setting(0, "steps in which the learning rate rises, in place of warmup")
    min_lr: NotNegative = setting(0.0, "learning rate at which the schedule ends")
    decay: Annotated[Positive, Field(le=1)] | None = setting(
        None,
        "with the schedule wsd: share of the run after the warmup, at its end, in which the learning rate falls; none "
        "for 0.2",
    )
    clip: Positive | None = setting(None, "largest norm of the gradients over all ranks")
    fused_loss: bool = setting(False, "compute head and loss in chunks, so that the logits are never whole in memory")
    seed: Whole = setting(0, "seed of weights, order of samples and dropout")

    eval_every: Count | None = setting(None, "evaluate after every so many steps")
    eval_at_end: bool = setting(True, "evaluate at the end, where there is data to evaluate on")
    eval_batches: Count | None = setting(
        None, "evaluate on the first so many microbatches, over all ranks together; none for all"
    )

    save_every: Count | None = setting(None, "save a checkpoint after every so many steps")
    save_at_end: bool = setting(True, "save a checkpoint at the end")
    save_async: bool = setting(True, "write checkpoints while training continues")
    save_format: SaveFormat = setting("safetensors", "format of the weights in a checkpoint")
    save_on_each_node: bool = setting(False, "each node writes to a disk of its own, not all to a shared one")
    keep_last: Count = setting(2, "checkpoints that stay: the last so many")
    keep_best: Whole = setting(0, "checkpoints that stay besides: the best so many")
    best_by: Text = setting("eval_loss", "the metric that decides which is best")
    best_mode: Extremum = setting("min", "whether the smallest or the largest is best")
    resume: Resume | None = setting(
        None, "resume from a checkpoint, or begin with the weights of a Hugging Face folder: latest, best, or a path"
    )

    log_every: Count = setting(1, "log metrics after every so many steps")
    progress: bool = setting(True, "show a progress bar")
    callbacks: Named = setting(
        (),
        "more callbacks of the run: tensorboard, wandb, early_stop, loss_plot or module:function, with options "
        "as wandb:project=mine,mode=offline; in a file also as tables with a name",
    )
    early_stop: Count | None = setting(None, "end when best_by has not improved for so many evaluations in a row")
    profile: Steps | None = setting(None, "write a trace of these steps, as 10..12, into the output folder")
    peak_tflops: Positive | None = setting(
        None,
        "peak of a device, in 10^12 operations per second, for the utilization in metrics; none for that of its "
        "data sheet",
    )
    plot: bool = setting(False, "draw the losses as a picture in the output folder")
    device: Text = setting("auto", "cpu, cuda or another accelerator; auto takes an accelerator where there is one")
    ranks: Count | None = setting(None, "processes to start; none for one per accelerator, 2 on CPU")
    detect_nonfinite: bool = setting(
        False, "stop at the first NaN or inf and name the place; costs a look at every value"
    )

    @property
    def is_unlimited(self) -> bool:
        """Whether no limit is given."""
        return self.steps is None and self.epochs is None and self.minutes is None

    def __post_init__(self) -> None:
        if self.global_batch is not None and self.accumulate != 1:
            self.refuse("accumulate", f"{self.called('global_batch')} {self.global_batch} decides how many are needed")
        if self.clip is not None and self.optimizer_in_backward:
            self.refuse(
                "clip", f"with {self.called('optimizer_in_backward')} gradients are gone before their norm is known"
            )
        if self.keep_best and self.best_by.startswith("eval") and self.eval_every is None:
            self.refuse(
                "keep_best", f"{self.best_by} is known of evaluated checkpoints only: set {self.called('eval_every')}"
            )
        if self.early_stop is not None and self.eval_every is None:
            self.refuse("early_stop", f"nothing is evaluated meanwhile: set {self.called('eval_every')}")
        if self.eval_batches is not None and self.eval_every is None and not self.eval_at_end:
            self.refuse(
                "eval_batches", f"nothing is evaluated: set {self.called('eval_every')} or {self.called('eval_at_end')}"
            )
        for name in ("lr", "weight_decay", "params"):
            if name in self.optimizer_options:
                other = "the model's" if name == "params" else f"set by {self.called(name)}"
                self.refuse("optimizer_options", f"{name!r} is {other}")
        if not (isinstance(self.scheduler, str) and self.scheduler in SCHEDULERS):
            for name in ("warmup", "warmup_steps", "min_lr"):
                if getattr(self, name):
                    self.refuse(name, f"{self.called('scheduler')} {self.scheduler!r} sets all learning rates itself")
        if self.warmup and self.warmup_steps:
            self.refuse("warmup_steps", f"{self.called('warmup')} is {self.warmup}")
        for name, useless in (("decay", self.scheduler != "wsd"), ("min_lr", self.scheduler == "constant")):
            if useless and getattr(self, name):
                self.refuse(name, f"{self.called('scheduler')} {self.scheduler!r} makes no use of it")
        if self.min_lr > self.lr:
            self.refuse("min_lr", f"{self.called('lr')}, the highest, is {self.lr}")


@dataclass(frozen=True)
class Task(Settings):
    """The model and its data.

    The model, data, objective and tokenizer are objects, or functions that make them; `collate` is a
    function. Each may be named by a text: "package.module:name".

    Raises:
        ConfigTypeError, ConfigValueError: at construction, for a field that is none of these.
    """

    model: Module = setting(..., "the module, or a function that makes it")
    train_data: Data = setting(..., "the dataset to train on, or a function that makes it")
    eval_data: Data | None = setting(None, "the dataset to evaluate on, or a function that makes it")
    objective: Annotated[Any, PlainValidator(Name(thing="an objective or a function"))] | None = setting(
        None, "the objective to minimize; none for the model's own loss"
    )
    collate: Annotated[Any, PlainValidator(Name(thing="a function", is_thing=callable))] | None = setting(
        None, "makes a microbatch of a list of samples; none for torch's"
    )
    tokenizer: Annotated[Any, PlainValidator(Name(thing="a tokenizer, a processor or a function"))] | None = setting(
        None, "saved with the model"
    )
    metrics: Annotated[Any, PlainValidator(Name(thing="a function", is_thing=callable))] | None = setting(
        None, "more metrics of evaluations: from logits and a batch to sums, by name, over the tokens that count"
    )
    options: Options = setting({}, "arguments of these functions, by name")


def check_run(training: TrainingArguments, task: Task, fsdp: FSDPArguments) -> None:
    """Raise for settings of `training` that contradict the others.

    Raises:
        ConfigValueError: evaluations without data for them; steps in the backward of losses that are scaled.
    """
    if training.optimizer_in_backward and fsdp.scales_losses:
        training.refuse("optimizer_in_backward", "fp16 needs its losses scaled, and gradients looked at before a step")
    if task.eval_data is None:
        for name in ("eval_every", "eval_batches"):
            if getattr(training, name) is not None:
                training.refuse(name, "there is nothing to evaluate on: the task has no eval_data")
    if training.fused_loss and task.metrics is not None:
        training.refuse("fused_loss", "metrics are computed of logits, which are never whole then")
