"""Estimate the memory and traffic of each rank of a run of any size, without starting it.

The model is made on the meta device, sharded and trained in a dry run (`flatfsdp.dry_run`): no rank, no accelerator
and no memory is needed. For an accelerator, activations are estimated from the shapes of a batch of the run's samples;
elsewhere their size can only be measured in a real step, where autograd's hooks count the saved tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import flatfsdp
from flatfsdp.elastic import kept_bytes
from flatfsdp.errors import ConfigValueError, UsageError
from flatfsdp.trainer.arguments import ElasticArguments, FSDPArguments, Task, TrainingArguments
from flatfsdp.trainer.data_loading import Loader
from flatfsdp.trainer.fused_loss import fused
from flatfsdp.trainer.instantiate import collate_for, make
from flatfsdp.trainer.model.sharding import shard
from flatfsdp.trainer.objectives import Objective, objective_for
from flatfsdp.trainer.optimizers import make_optimizer
from flatfsdp.trainer.terminal import size_in_words

# The engine's kinds of memory, with their names in the table and in its order.
_WORDS = {
    "shard": "parameters (shards)",
    "unsharded": "parameters, gathered",
    "post_forward_shard": "parameters, kept by neighbors",
    "host copy": "parameters, kept on the host",
    "arrived": "gradients, from autograd",
    "slots": "gradients, to reduce",
    "partial": "gradients, to all-reduce",
    "reduced": "gradients, reduced (shards)",
    "exchange": "reduction scratch",
    "staging": "small units, coalesced",
    "quantized": "quantized, in transit",
    "residual": "gradients, rounding errors",
    "matrices": "matrices, exchanged",
}
_KINDS = {
    "all_gather": "all-gather, parameters",
    "reduce_scatter": "reduce-scatter, gradients",
    "all_reduce": "all-reduce, gradients",
    "all_to_all": "all-to-all, matrices",
    "scalar": "norms and agreements",
}
_ON_HOST = frozenset({"shard", "reduced", "host copy"})  # with offload


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory and traffic of rank 0 of a run. The others differ by padding, and on gloo, the ranks between the first and
    the last need the same amount of scratch again while a reduction runs.

    Attributes:
        ranks, microbatches: of the run, and of each of its steps.
        accelerator: whether it runs on accelerators with NCCL, or on CPUs with gloo.
        cpu_offload: whether shards, their gradients and the optimizer's state are in host memory.
        optimizer: the class of the optimizer.
        optimizer_unknown: the reason why the optimizer's state cannot be estimated; "" where it can.
        units: the units of the model, as `flatfsdp.summary` shows them.
        plan: the figures, in bytes.
        activations: which modules hold them, as text; "" where they are not estimated.
        activations_unknown: the reason why they cannot be estimated; "" where they can, or nobody asked.
        kept, parity: with `[elastic]`, what a rank keeps in host memory for lost ones, and sends per step for it.
    """

    ranks: int
    microbatches: int
    accelerator: bool
    cpu_offload: bool
    optimizer: str
    optimizer_unknown: str
    units: str
    plan: flatfsdp.Plan
    activations: str = ""
    activations_unknown: str = ""
    kept: int = 0
    parity: int = 0

    def render(self) -> str:
        """The estimate as text: the units, memory and traffic of a rank, and the parts that are left out."""
        parts = (self._memory(), *self._with_activations(), self._traffic(), self._left_out())
        return "\n\n".join((self._title(), self.units, *map("\n".join, parts)))

    def _title(self) -> str:
        where = "accelerators, NCCL" if self.accelerator else "CPUs, gloo"
        steps = f", {self.microbatches} microbatches per step" if self.microbatches > 1 else ""
        return f"{self.ranks:,} rank{'s' * (self.ranks > 1)} ({where}), {self.optimizer}{steps}"

    def _memory(self) -> list[str]:
        plan = self.plan
        state = sum(plan.optimizer.values())
        always = [(f"optimizer: {', '.join(plan.optimizer)}", state), ("buffers", plan.buffers)]
        held = {"shard": plan.params, "residual": plan.residuals}
        stepping = {"reduced": plan.grads, "matrices": plan.matrices}
        # whether the peak is in the optimizer's step
        in_step = sum(stepping.values()) + sum(held.values()) > sum(plan.at_peak.values())
        at_peak = held | stepping if in_step else plan.at_peak
        rows = [("each rank holds", "between steps", "at the peak")]
        for kind in [*_WORDS, *(at_peak.keys() - _WORDS.keys())]:
            if count := at_peak.get(kind, 0):
                between = size_in_words(held.get(kind, 0))
                rows.append((_WORDS.get(kind, kind), between, size_in_words(count)))
        rows += [(name, size_in_words(count), size_in_words(count)) for name, count in always if count]
        rows.append(("total, without activations", size_in_words(plan.between_steps), size_in_words(plan.peak)))
        if self.cpu_offload and self.accelerator:
            host = sum(count for kind, count in at_peak.items() if kind in _ON_HOST)
            rows.append(("of which on the host", size_in_words(plan.params + state), size_in_words(host + state)))
        if self.kept:
            rows.append(("for lost ranks, on the host", *2 * (size_in_words(self.kept),)))
        return _aligned(rows, right=(1, 2))

    def _with_activations(self) -> Iterator[list[str]]:
        if self.plan.reserved is not None and self.plan.in_use is not None:
            peaks = size_in_words(self.plan.in_use), size_in_words(self.plan.reserved)
            rows = [("the accelerator's memory, with activations", "in use", "reserved"), ("peak of a step", *peaks)]
            yield _aligned(rows, right=(1, 2))
            yield self.activations.split("\n")

    def _traffic(self) -> list[str]:
        traffic = self.plan.comm.items()
        rows = [(_KINDS.get(kind, kind), f"{calls:,}", size_in_words(size)) for kind, (calls, size) in traffic]
        rows += [("for lost ranks, state", "", size_in_words(self.parity))] if self.parity else []
        rows = rows or [("nothing", "", "")]
        return _aligned([("sent per step", "calls", "bytes"), *rows], right=(1, 2))

    def _left_out(self) -> Iterator[str]:
        if self.plan.reserved is not None:
            left_out = "in what is reserved: the context of CUDA, the communication library, compiled code."
        else:
            left_out = "activations; temporary memory of the optimizer step; torch, the backend and fragmentation."
        yield f"Not included{':' * (self.plan.reserved is None)} {left_out}"
        for what, why in (("the optimizer's state", self.optimizer_unknown), ("activations", self.activations_unknown)):
            if why:
                yield f"Not included, either: {what}: {why}"
        yield "Each unit is assumed to run once, in the order in which the model declares them."


def forecast(
    make_model: Callable[[], nn.Module],
    *,
    fsdp: FSDPArguments,
    training: TrainingArguments,
    ranks: int,
    task: Task | None = None,
    elastic: ElasticArguments | None = None,
) -> MemoryEstimate:
    """Estimate the memory and traffic of rank 0 in each training step of a run on `ranks` ranks.

    Nothing is communicated, and neither memory nor an accelerator is needed. Call it before `init_process_group()`,
    or in another process.

    Args:
        make_model: called once, under `torch.device("meta")`.
        fsdp: how the model is sharded.
        training: how it is trained; only the optimizer, microbatches, clipping and the device matter ("auto": that of
            this machine).
        ranks: the number of ranks of the run.
        task: whose data and objective activations are estimated with, by `loss_of_samples`; None: without activations.
        elastic: what it keeps for lost ranks.

    Raises:
        ConfigTypeError, ConfigValueError: as in the run: arguments that contradict the model or the number of ranks; a
            `task` without an accelerator.
        UsageError: this process is a rank of a job already.
    """
    if ranks < 1:
        raise ConfigValueError(f"forecast: ranks: got {ranks}. Accepted: a whole number from 1")
    with torch.device("meta"):
        model = make_model()
    accelerator, microbatches = _on_accelerators(training), _microbatches(training, ranks)
    loss = None if task is None else loss_of_samples(task, training, model)
    activations = ""
    with flatfsdp.dry_run(ranks, accelerator=accelerator, activations=task is not None) as recorded:
        sharded = shard(model, fsdp, device=torch.device("cpu"))
        optimizer = make_optimizer(sharded, training)

        def plan_of(optimizer: Any, loss: Loss | None) -> flatfsdp.Plan:
            sharded.zero_grad()
            return flatfsdp.memory_plan(
                sharded, optimizer, microbatches=microbatches, max_norm=training.clip, loss=loss
            )

        plan, unknown, unseen = _with_what_works(plan_of, optimizer, loss)
        if loss is not None and not unseen:
            loss(sharded).backward()
            activations = str(recorded)
        units = flatfsdp.summary(sharded, compact=True)
    kind = type(optimizer).__name__
    offload = fsdp.cpu_offload
    kept = (0, 0)
    if elastic is not None and elastic.enabled:
        state = plan.between_steps
        # A launcher for several machines has set the number of ranks on each.
        machines = 1 if fsdp.replicates else max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
        sent = state // elastic.every if machines > 1 else 0
        kept = kept_bytes(state, ranks=ranks, machines=machines, group=elastic.group), sent
    return MemoryEstimate(
        ranks, microbatches, accelerator, offload, kind, unknown, units, plan, activations, unseen, *kept
    )


Loss = Callable[[Any], Tensor]  # of a model
_Made = TypeVar("_Made")


def _with_what_works(made: Callable[[Any, Any], _Made], optimizer: Any, loss: Any) -> tuple[_Made, str, str]:
    """`made(optimizer, loss)`, with None for those of the two that do not work in a dry run, and the reasons."""
    try:
        return made(optimizer, loss), "", ""
    except UsageError:
        found = []
    for alone in ((optimizer, None), (None, loss)):
        try:
            made(*alone)
            found.append("")
        except UsageError as error:
            found.append(str(error))
    unknown, unseen = found
    return made(None if unknown else optimizer, None if unseen else loss), unknown, unseen


def loss_of_samples(task: Task, training: TrainingArguments, model: nn.Module) -> Loss:
    """The loss, inside a dry run, of a sharded `model` for a microbatch of the first samples of the run, which are read
    here. Whole numbers keep their values, which a model may look at; others have shapes alone.

    Raises:
        ConfigValueError: there are no samples. Exceptions of the data propagate.
    """
    objective = make(task, "objective") or objective_for(model)
    data = make(task, "train_data")
    options: dict[str, Any] = {"shuffle": training.shuffle, "seed": training.seed}
    with Loader(data, batch=training.batch, collate=collate_for(task), weigh=objective.weight, **options) as loader:
        step = loader.next_step()
    if step is None:
        raise ConfigValueError("train_data: there is no sample to estimate activations with")
    inputs = step.microbatches[0].inputs

    @functools.lru_cache(1)
    def objective_of(sharded: Any) -> Objective:
        return fused(objective, sharded) if training.fused_loss else objective

    return lambda sharded: objective_of(sharded).loss(sharded, _without_values(inputs))


def _without_values(inputs: Any) -> Any:
    """`inputs` with tensors of the dry run in place of all floating-point tensors in dicts, lists and tuples."""
    if isinstance(inputs, Tensor):
        return torch.empty(inputs.shape, dtype=inputs.dtype) if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {key: _without_values(value) for key, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*map(_without_values, inputs))
    return type(inputs)(map(_without_values, inputs)) if isinstance(inputs, (list, tuple)) else inputs


def _on_accelerators(training: TrainingArguments) -> bool:
    return training.device != "cpu" and (training.device != "auto" or torch.accelerator.is_available())


def _microbatches(training: TrainingArguments, ranks: int) -> int:
    if training.global_batch is None:
        return training.accumulate
    return -(-training.global_batch // (training.batch * ranks))


def compared(
    make_model: Callable[[], nn.Module],
    *,
    fsdp: FSDPArguments,
    training: TrainingArguments,
    ranks: int,
    node: int = 8,
    memory: int | None = None,
    task: Task | None = None,
) -> str:
    """Ways to shard the model of a run on `ranks` ranks, with a recommendation, as text: `flatfsdp.advise` with the
    settings of the run except `strategy`, `replicas` and `layout`, and with the units "none", "auto" and its own.

    Args:
        make_model, fsdp, training, task: as for `forecast`.
        node: ranks on a node.
        memory: bytes that a rank has, with a `task` for all that the allocator reserves.

    Raises:
        ConfigTypeError, ConfigValueError, UsageError: as `flatfsdp.advise`.
    """
    with torch.device("meta"):
        model = make_model()
    in_place = fsdp.front == "fully_shard"

    def sharded(copied: nn.Module, way: flatfsdp.Way) -> Any:
        strategy = "full_shard" if way.replicas == 1 else "no_shard" if way.shards == 1 else "hybrid_shard"
        replicas = way.replicas if strategy == "hybrid_shard" else None
        chosen = dataclasses.replace(fsdp, strategy=strategy, replicas=replicas, units=way.policy, layout=way.given)
        return shard(copied, chosen, device=torch.device("cpu"))

    def advice(optimizer: Callable[[Any], Any] | None, loss: Loss | None) -> flatfsdp.Advice:
        return flatfsdp.advise(
            model,
            ranks=ranks,
            optimizer=optimizer,
            memory=memory,
            node=node,
            units={"none": "none", "auto": "auto", **({} if fsdp.units == "auto" else {str(fsdp.units): fsdp.units})},
            layouts={"rows": "rows"} if in_place else None,
            shard=sharded,
            accelerator=_on_accelerators(training),
            microbatches=_microbatches(training, ranks),
            max_norm=training.clip,
            loss=loss,
        )

    loss = None if task is None else loss_of_samples(task, training, model)
    found, unknown, unseen = _with_what_works(advice, lambda it: make_optimizer(it, training), loss)
    reasons = (("the optimizer's state", unknown), ("activations", unseen))
    return "\n\n".join([str(found), *(f"Not included: {what}: {why}" for what, why in reasons if why)])


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` on the meta device, for `forecast`: `model.to("meta")` would untie tied parameters."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _aligned(rows: Sequence[tuple[str, ...]], *, right: tuple[int, ...]) -> list[str]:
    """`rows` as lines of aligned columns; those in `right` are right-aligned."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if number in right else cell.ljust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


@dataclass(eq=False)
class SavedActivations:
    """Tensors that autograd saves for backwards.

    Attributes:
        peak_bytes: their largest total size at one time: of whole storages, each once, without parameters.
    """

    peak_bytes: int = 0
    _bytes: int = 0
    _uses: Counter[int] = field(default_factory=Counter)
    _parameters: set[int] = field(default_factory=set)

    def keep(self, tensor: Tensor) -> _SavedTensor:
        """Count a tensor that an operation saves."""
        saved, storage = _SavedTensor(tensor), tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()  # equal for all views, and unique while one of them is alive
        if key not in self._parameters and not isinstance(tensor, nn.Parameter):
            self._uses[key] += 1
            self._bytes += size if self._uses[key] == 1 else 0
            self.peak_bytes = max(self.peak_bytes, self._bytes)
            weakref.finalize(saved, self._drop, key, size)
        return saved

    def _drop(self, key: int, size: int) -> None:
        self._uses[key] -= 1
        self._bytes -= 0 if self._uses[key] else size

    def note_parameters(self, module: nn.Module, _: Any) -> None:
        """Record the parameters of a module that is about to run, and so has them unsharded."""
        self._parameters.update(each.untyped_storage()._cdata for each in module.parameters(recurse=False))


@dataclass(eq=False)
class _SavedTensor:
    """A tensor for as long as an operation saves it."""

    tensor: Tensor


@contextmanager
def activations_counted() -> Iterator[SavedActivations]:
    """A context that counts the activations of forwards and backwards inside."""
    activations = SavedActivations()
    noting = register_module_forward_pre_hook(activations.note_parameters)
    try:
        with torch.autograd.graph.saved_tensors_hooks(activations.keep, lambda kept: kept.tensor):
            yield activations
    finally:
        noting.remove()
