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

__all__ = ["STRATEGIES", "ElasticArguments", "FSDPArguments", "Task", "TrainingArguments", "check_run"]

STRATEGIES = {member.name.lower().strip("_"): member for member in ShardingStrategy}
"""The names of strategies in settings: FSDP's in lower case, without the underscore of the private one."""

_HYBRIDS = ("hybrid_shard", "hybrid_shard_zero2")

_ELEMENTWISE = "AdamW Adam SGD Adadelta Adagrad Adamax ASGD NAdam RAdam RMSprop Rprop"
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): getattr(torch.optim, name) for name in _ELEMENTWISE.split()
}
"""Optimizers of torch that are element-wise, so that results do not depend on the number of ranks."""

OF_MATRICES: dict[str, type[torch.optim.Optimizer]] = {"muon": torch.optim.Muon}
"""Optimizers of torch for matrices, which take steps on whole ones; AdamW steps on all other parameters."""

NOT_BY_NAME = {
    "adafactor": "Adafactor looks at rows and columns, of which a rank may have parts.",
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
    Any,
    PlainValidator(
        Name(OPTIMIZERS | OF_MATRICES, "a callable (params, **options) -> Optimizer", callable, NOT_BY_NAME)
    ),
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
        "wrapper", "engine API: wrapper for FullyShardedDataParallel, or fully_shard for parameters that are DTensors"
    )
    strategy: Strategy = setting(
        "full_shard", "sharding strategy: which parts of the training state are sharded across ranks, and when"
    )
    reshard_after_forward: Count | bool | None = setting(
        None,
        "whether to reshard parameters between forward and backward, or the number of ranks to reshard over "
        "(default: the strategy's)",
    )
    replicas: Count | None = setting(None, "number of model replicas in the hybrid strategies (default: one per node)")
    units: Units = setting(
        "auto", "submodules to shard as units: auto, none, a path or a class, or several separated by commas"
    )
    units_fallback: bool = setting(False, "shard the whole model as one unit if units= matches nothing")
    bf16: bool = setting(False, "compute in bf16 and reduce gradients in fp32; sets param_dtype and reduce_dtype")
    fp16: bool = setting(
        False, "compute in fp16 with loss scaling and reduce gradients in fp32; sets param_dtype and reduce_dtype"
    )
    param_dtype: DType | None = setting(None, "dtype to compute in, such as bf16 (default: the parameters' own dtype)")
    reduce_dtype: DType | None = setting(None, "dtype in which gradients are reduced (default: the compute dtype)")
    buffer_dtype: DType | None = setting(None, "dtype of buffers during computation (default: their own)")
    gather_dtype: PackedDType | None = setting(
        None,
        "dtype in which parameters are all-gathered: int8 or fp8 (float8_e4m3fn), with a scale per 256 "
        "values (default: the compute dtype)",
    )
    reduce_bits: Bits | None = setting(
        None,
        "bits per value in which gradients are reduced, 8 or 4, with a scale per 256 values (default: reduce_dtype)",
    )
    reduce_error_feedback: bool = setting(
        False, "carry the rounding errors of reduce_bits over to the next gradients; the errors stay on the device"
    )
    cpu_offload: bool = setting(False, "keep shards, gradients and optimizer state in host memory")
    use_orig_params: bool = setting(
        True, "give the optimizer the original parameters rather than one flat parameter per unit"
    )
    layout: Layout | None = setting(
        None,
        "how a unit is split across ranks: flat (all its parameters as a single flat one, with the least "
        "padding) or rows (each parameter by whole rows) (default: flat for the wrapper, rows for fully_shard)",
    )
    deterministic_sums: bool = setting(
        False, "compute the same bits on any number of ranks, with the same global_batch= and batch="
    )
    activation_checkpointing: bool = setting(False, "recompute the activations of each unit in the backward pass")
    checkpoint_every: Count = setting(1, "with activation_checkpointing: checkpoint only every Nth unit")
    checkpoint_policy: CheckpointPolicy | None = setting(
        None,
        "with activation_checkpointing: which operations to recompute, given as a policy_fn of "
        "create_selective_checkpoint_contexts in torch.utils.checkpoint (default: all)",
    )
    compile: bool = setting(False, "compile each unit with torch.compile")
    keep_frozen_unsharded: bool = setting(
        False, "gather frozen parameters once and keep them unsharded, for adapters on a model that fits in memory"
    )
    backward_prefetch: Prefetch | None = setting(
        "backward_pre",
        "when the backward pass prefetches the next unit: backward_pre (before the current unit), backward_mid "
        "(during it), backward_post (after it) or none (when it is needed)",
    )
    forward_prefetch: bool = setting(False, "also prefetch the next unit in the forward pass")
    limit_all_gathers: bool = setting(True, "delay all-gathers until the memory of earlier units has been freed")
    sync_module_states: bool = setting(False, "broadcast parameters and buffers from rank 0 at the start")

    @property
    def scales_losses(self) -> bool:
        """Whether gradients are fp16 anywhere, so that small ones would underflow."""
        return torch.float16 in (self.param_dtype, self.reduce_dtype)

    @property
    def replicates(self) -> bool:
        """Whether several ranks have the same shards."""
        return self.strategy in ("no_shard", *_HYBRIDS)

    def __post_init__(self) -> None:
        self._set_precision()
        for name in ("checkpoint_every", "checkpoint_policy"):
            if getattr(self, name) not in (1, None) and not self.activation_checkpointing:
                self.refuse(name, f"it applies only with {self.called('activation_checkpointing')}")
        if self.replicas is not None and self.strategy not in _HYBRIDS:
            self.refuse(
                "replicas", f"only {' and '.join(_HYBRIDS)} replicate, and {self.called('strategy')} is {self.strategy}"
            )
        if self.strategy in _HYBRIDS and self.replicas is None and self.units == "none":
            self.refuse("units", f"{self.called('strategy')} {self.strategy} needs units, or {self.called('replicas')}")
        if self.reduce_error_feedback and self.reduce_bits is None:
            self.refuse("reduce_error_feedback", f"without {self.called('reduce_bits')} there are no errors")
        self._check_front()
        if self.strategy == "no_shard":
            for name in ("reshard_after_forward", "forward_prefetch", "gather_dtype"):
                if getattr(self, name):
                    self.refuse(name, f"with {self.called('strategy')} no_shard, parameters are never gathered")

    def _check_front(self) -> None:
        if self.front != "fully_shard":
            return
        front = f"with {self.called('front')} fully_shard"
        if self.strategy == "no_shard":
            self.refuse("strategy", f"{front}, parameters are always sharded; the wrapper can leave them whole")
        if not self.use_orig_params:
            self.refuse("use_orig_params", f"{front}, each parameter is a DTensor; flat ones need the wrapper")
        if self.layout == "flat":
            self.refuse("layout", f"{front}, each parameter is split by rows")

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

    output: FilePath = setting(Path("train-out"), "folder for checkpoints, metrics and plots")
    steps: Count | None = setting(None, "stop after N optimizer steps")
    epochs: Count | None = setting(None, "stop after N passes over the data")
    minutes: Positive | None = setting(None, "stop after this many minutes of training, by rank 0's clock")

    batch: Count = setting(8, "samples per rank and microbatch")
    accumulate: Count = setting(1, "microbatches per optimizer step")
    global_batch: Count | None = setting(
        None, "samples per optimizer step across all ranks, in as many microbatches as needed; replaces accumulate="
    )
    data_mode: DataMode = setting("sharded", "sharded: each rank reads its own samples; dispatch: rank 0 reads for all")
    shuffle: bool = setting(True, "shuffle the samples in each epoch")
    workers: Whole = setting(0, "data-loading processes on each rank that reads data")
    drop_last: bool = setting(False, "drop the last samples of an epoch if they do not fill a step")

    optimizer: OptimizerName = setting(
        "adamw",
        "name of an optimizer in torch.optim (muon: for matrices, AdamW for the rest), or module:function, called with "
        "the parameters and optimizer_options",
    )
    lr: Positive = setting(1e-3, "peak learning rate")
    weight_decay: NotNegative = setting(0.01, "weight decay; norms and biases are excluded")
    optimizer_options: Options = setting({}, "additional arguments of the optimizer, such as betas=[0.9,0.95]")
    optimizer_in_backward: bool = setting(False, "step each unit as soon as its gradients are reduced, then free them")
    scheduler: SchedulerName = setting(
        "cosine",
        "learning rate schedule: constant, linear, cosine, wsd, or module:function, called with the "
        "optimizer and the number of steps",
    )
    warmup: Annotated[NotNegative, Field(lt=1)] = setting(0.0, "fraction of the run for warming up the learning rate")
    warmup_steps: Whole = setting(0, "number of warmup steps; replaces warmup=")
    min_lr: NotNegative = setting(0.0, "learning rate at the end of the schedule")
    decay: Annotated[Positive, Field(le=1)] | None = setting(
        None,
        "with scheduler=wsd: fraction of the run (without the warmup) at its end over which the learning rate "
        "decays (default: 0.2)",
    )
    clip: Positive | None = setting(None, "maximum gradient norm, computed across all ranks")
    fused_loss: bool = setting(False, "compute head and loss in chunks, so that the full logits are never in memory")
    seed: Whole = setting(0, "seed for the weights, the order of samples, and dropout")

    eval_every: Count | None = setting(None, "evaluate every N steps")
    eval_at_end: bool = setting(True, "evaluate at the end if there is evaluation data")
    eval_batches: Count | None = setting(
        None, "evaluate only the first N microbatches, counted across all ranks (default: all)"
    )

    save_every: Count | None = setting(None, "save a checkpoint every N steps")
    save_at_end: bool = setting(True, "save a checkpoint at the end")
    save_async: bool = setting(True, "write checkpoints in the background")
    save_format: SaveFormat = setting("safetensors", "format of the weights in a checkpoint")
    save_frozen: bool = setting(
        False, "for adapters: save the frozen weights of the base model in each checkpoint, rather than only its name"
    )
    save_on_each_node: bool = setting(False, "save to a local disk on each node rather than to a shared one")
    keep_last: Count = setting(2, "keep the last N checkpoints")
    keep_best: Whole = setting(0, "also keep the best N checkpoints")
    best_by: Text = setting("eval_loss", "metric that determines which checkpoints are best")
    best_mode: Extremum = setting("min", "whether lower (min) or higher (max) values of that metric are better")
    resume: Resume | None = setting(
        None, "checkpoint to resume from: latest, best or a path; or a Hugging Face folder of weights to start from"
    )

    log_every: Count = setting(1, "log metrics every N steps")
    progress: bool = setting(True, "show a progress bar")
    callbacks: Named = setting(
        (),
        "callbacks of the run: 'tensorboard', 'wandb', 'early_stop', 'loss_plot' or 'module:function', with "
        "options as in wandb:project=mine,mode=offline; in a file, also as tables with a name",
    )
    early_stop: Count | None = setting(None, "stop when best_by has not improved for N evaluations in a row")
    profile: Steps | None = setting(
        None, "record a profiler trace of these steps, such as 10..12, in the output folder"
    )
    peak_tflops: Positive | None = setting(
        None,
        "peak TFLOPS of a device, for the utilization in the metrics (default: the value in its data sheet)",
    )
    plot: bool = setting(False, "plot the loss to an image in the output folder")
    device: Text = setting("auto", "cpu, cuda or another accelerator; auto uses an accelerator if there is one")
    ranks: Count | None = setting(None, "processes to start (default: one per accelerator, or 2 on CPU)")
    audit_every: Count | None = setting(
        None, "with deterministic_sums: compute a microbatch of each rank again on another, every N steps"
    )
    detect_nonfinite: bool = setting(
        False, "stop at the first NaN or inf and report where it occurred; slow, because every value is checked"
    )

    @property
    def is_unlimited(self) -> bool:
        """Whether no limit is given."""
        return self.steps is None and self.epochs is None and self.minutes is None

    def __post_init__(self) -> None:
        if self.global_batch is not None and self.accumulate != 1:
            self.refuse("accumulate", f"{self.called('global_batch')} {self.global_batch} determines their number")
        if self.clip is not None and self.optimizer_in_backward:
            self.refuse(
                "clip", f"with {self.called('optimizer_in_backward')}, gradients are freed before their norm is known"
            )
        if self.optimizer_in_backward and self.optimizer in OF_MATRICES:
            self.refuse("optimizer_in_backward", f"{self.optimizer} steps on whole matrices, after all gradients")
        if self.keep_best and self.best_by.startswith("eval") and self.eval_every is None:
            self.refuse(
                "keep_best", f"{self.best_by} is known only for evaluated checkpoints: set {self.called('eval_every')}"
            )
        if self.early_stop is not None and self.eval_every is None:
            self.refuse("early_stop", f"nothing is evaluated during the run: set {self.called('eval_every')}")
        if self.eval_batches is not None and self.eval_every is None and not self.eval_at_end:
            self.refuse(
                "eval_batches", f"nothing is evaluated: set {self.called('eval_every')} or {self.called('eval_at_end')}"
            )
        for name in ("lr", "weight_decay", "params"):
            if name in self.optimizer_options:
                other = "are the model's parameters" if name == "params" else f"is set by {self.called(name)}"
                self.refuse("optimizer_options", f"{name!r} {other}")
        if not (isinstance(self.scheduler, str) and self.scheduler in SCHEDULERS):
            for name in ("warmup", "warmup_steps", "min_lr"):
                if getattr(self, name):
                    self.refuse(name, f"{self.called('scheduler')} {self.scheduler!r} sets all learning rates itself")
        if self.warmup and self.warmup_steps:
            self.refuse("warmup_steps", f"{self.called('warmup')} is {self.warmup}")
        for name, useless in (("decay", self.scheduler != "wsd"), ("min_lr", self.scheduler == "constant")):
            if useless and getattr(self, name):
                self.refuse(name, f"{self.called('scheduler')} {self.scheduler!r} does not use it")
        if self.min_lr > self.lr:
            self.refuse("min_lr", f"the peak learning rate, {self.called('lr')}, is {self.lr}")


@dataclass(frozen=True, kw_only=True)
class ElasticArguments(Settings):
    """Lost ranks: the others go on with the same step, without a restart, over gloo (`flatfsdp.elastic.survive`).

    Raises:
        ConfigTypeError, ConfigValueError: at construction, for a field that is not accepted.
    """

    of_flags = "elastic"

    enabled: bool = setting(False, "let the other ranks go on when one is lost, with the same step, without a restart")
    every: Count = setting(
        1,
        "steps between refreshes of what ranks keep of each other; at most so many are taken again after a loss",
    )
    group: Annotated[Count, Field(ge=2)] = setting(
        4, "ranks that keep each other's state, one of which can be lost between two refreshes"
    )
    least_ranks: Count = setting(1, "end the run when fewer ranks are left")
    lost_after: Positive = setting(60.0, "seconds without a sign of life after which a rank counts as lost")
    restarts: Whole = setting(
        0,
        "how many lost ranks the command starts again, all together, of those that it has started; they join the "
        "others between two steps",
    )

    def __post_init__(self) -> None:
        for name in ("every", "group", "least_ranks", "lost_after", "restarts"):
            if getattr(self, name) != getattr(type(self), name) and not self.enabled:
                self.refuse(name, f"it applies only with {self.called('enabled')}")


@dataclass(frozen=True)
class Task(Settings):
    """The model and its data.

    The model, data, objective and tokenizer are objects, or functions that make them; `collate` is a
    function. Each may be named by a text: "package.module:name".

    Raises:
        ConfigTypeError, ConfigValueError: at construction, for a field that is none of these.
    """

    model: Module = setting(
        ...,
        "the model, or a function that returns it, as module:name; or hf:NAME, a model of transformers "
        "(folder or name)",
    )
    train_data: Data = setting(
        ..., "the training dataset, or a function that returns it, as module:name; or text:PATH, jsonl:FILE, hf:DATASET"
    )
    eval_data: Data | None = setting(None, "the evaluation dataset, or a function that returns it")
    objective: Annotated[Any, PlainValidator(Name(thing="an objective or a function"))] | None = setting(
        None, "the objective to minimize (default: the loss that the model itself computes)"
    )
    collate: Annotated[Any, PlainValidator(Name(thing="a function", is_thing=callable))] | None = setting(
        None, "function that makes a microbatch from a list of samples (default: torch's)"
    )
    tokenizer: Annotated[Any, PlainValidator(Name(thing="a tokenizer, a processor or a function"))] | None = setting(
        None, "tokenizer or processor; it is saved with the model"
    )
    metrics: Annotated[Any, PlainValidator(Name(thing="a function", is_thing=callable))] | None = setting(
        None,
        "additional evaluation metrics: a function of logits and a batch that returns, by name, sums over the counted "
        "tokens",
    )
    options: Options = setting({}, "arguments for these functions, by name")


def check_run(
    training: TrainingArguments, task: Task, fsdp: FSDPArguments, elastic: ElasticArguments | None = None
) -> None:
    """Raise for settings of `training` that contradict the others.

    Raises:
        ConfigValueError: evaluations without data for them; steps in the backward of losses that are scaled; bits that
            would depend on the number of ranks; a model that cannot move to the ranks that are left after a loss.
    """
    if elastic is not None and elastic.enabled:
        for owner, name, stays in (
            (training, "optimizer_in_backward", training.optimizer_in_backward),
            (training, "detect_nonfinite", training.detect_nonfinite),
            (fsdp, "reduce_error_feedback", fsdp.reduce_error_feedback),
        ):
            if stays:
                owner.refuse(name, "with it, the others cannot go on yet when a rank is lost, as [elastic] demands")
    if fsdp.deterministic_sums and training.global_batch is None:
        fsdp.refuse(
            "deterministic_sums",
            f"a step would have more samples on more ranks. Set {training.called('global_batch')}",
        )
    if training.audit_every is not None and (training.optimizer_in_backward or not fsdp.deterministic_sums):
        needs = f"{fsdp.called('deterministic_sums')}, and no {training.called('optimizer_in_backward')}"
        training.refuse("audit_every", f"it needs {needs}")
    if training.optimizer_in_backward and fsdp.scales_losses:
        training.refuse("optimizer_in_backward", "with fp16, gradients must be checked before each step")
    if task.eval_data is None:
        for name in ("eval_every", "eval_batches"):
            if getattr(training, name) is not None:
                training.refuse(name, "there is nothing to evaluate on: eval_data is not set")
    if training.fused_loss and task.metrics is not None:
        training.refuse("fused_loss", "metrics= needs the full logits, which are then never in memory")
