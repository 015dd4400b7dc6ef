"""Estimate the memory and traffic of each rank of a run of any size, before anything of it is built.

The model is made on the meta device, sharded and trained in a dry run (`flatfsdp.dry_run`): no rank, no accelerator
and no memory is needed. Activations are not estimated, as nothing is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

import flatfsdp
from flatfsdp import UnitSummary
from flatfsdp.errors import ConfigValueError, UsageError
from flatfsdp.trainer.arguments import FSDPArguments, TrainingArguments
from flatfsdp.trainer.byte_format import size_in_words
from flatfsdp.trainer.model.sharding import shard
from flatfsdp.trainer.optimizers import make_optimizer

__all__ = ["MemoryEstimate", "forecast", "on_meta"]

# What the engine holds, in the words of the table and in its order.
_WORDS = {
    "shard": "parameters (shards)",
    "unsharded": "parameters, gathered",
    "portion": "parameters, kept by neighbours",
    "host copy": "parameters, kept on the host",
    "slots": "gradients, to be reduced",
    "partial": "gradients, to be all-reduced",
    "reduced": "gradients, reduced (shards)",
    "exchange": "scratch of reductions",
    "staging": "small units, joined",
}
_KINDS = {
    "all_gather": "all-gather, parameters",
    "reduce_scatter": "reduce-scatter, gradients",
    "all_reduce": "all-reduce, gradients",
    "scalar": "norms",
}
_ON_HOST = frozenset({"shard", "reduced", "host copy"})  # with offload


@dataclass(frozen=True)
class MemoryEstimate:
    """What rank 0 of a run holds and sends, in bytes. The others differ by padding, and on gloo those between the first
    and the last by as much scratch again, while a reduction runs.

    Attributes:
        ranks, microbatches: of the run, and of each of its steps.
        accelerator: whether it runs on accelerators with NCCL, or on CPUs with gloo.
        cpu_offload: whether shards, their gradients and the optimizer's state are in host memory.
        optimizer: the class of the optimizer.
        units: the units of the model, as `flatfsdp.summary` shows them.
        parameters: shards, padding included.
        gradients: sharded gradients, from the end of a backward until the optimizer has stepped.
        optimizer_state: by the name of the state.
        optimizer_unknown: why the optimizer's state cannot be estimated; "" where it can.
        buffers: the model's buffers, and parameters that are not sharded.
        unsharded_peak: gathered parameters at their peak, as `flatfsdp.stats(model).bytes_unsharded_peak`.
        at_peak: what the engine holds where that is the most, by kind, as `flatfsdp.stats(model).bytes_at_peak`.
        between_steps: all of what is held when gradients are freed.
        peak: all of what is held at most, besides activations.
        traffic: kind of collective to (calls, bytes) of one step, as `flatfsdp.stats(model).comm`.
    """

    ranks: int
    microbatches: int
    accelerator: bool
    cpu_offload: bool
    optimizer: str
    units: tuple[UnitSummary, ...]
    parameters: int
    gradients: int
    optimizer_state: dict[str, int]
    optimizer_unknown: str
    buffers: int
    unsharded_peak: int
    at_peak: dict[str, int]
    between_steps: int
    peak: int
    traffic: dict[str, tuple[int, int]]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return asdict(self)

    def render(self) -> str:
        """All of it as text for people: the units, what a rank holds, what it sends, and what is left out."""
        blocks = (self._title(), *map("\n".join, (self._units(), self._memory(), self._traffic(), self._left_out())))
        return "\n\n".join(blocks)

    def _title(self) -> str:
        where = "accelerators, NCCL" if self.accelerator else "CPUs, gloo"
        steps = f", {self.microbatches} microbatches a step" if self.microbatches > 1 else ""
        return f"{_counted(self.ranks, 'rank')} ({where}), {self.optimizer}{steps}"

    def _units(self) -> list[str]:
        header = ("unit", "module", "parameters", "a rank holds", "padding", "strategy", "ranks", "kinds")
        rows = [*map(_row_of, _runs(self.units))]
        total = sum(unit.parameters for unit in self.units), sum(unit.padding for unit in self.units)
        numbers = f"{total[0]:,}", size_in_words(self.parameters), f"{total[1]:,}"
        last = (_counted(len(self.units), "unit"), "", *numbers, "", "", "")
        ends = {row[5:] for row in rows}
        shown, below = (5, [f"each unit: {', '.join(*ends)}"]) if len(ends) == 1 else (len(header), [])
        return [*_aligned([row[:shown] for row in (header, *rows, last)], right=(2, 3, 4)), *below]

    def _memory(self) -> list[str]:
        state = sum(self.optimizer_state.values())
        always = [(f"optimizer: {', '.join(self.optimizer_state)}", state), ("buffers", self.buffers)]
        peak = self.peak - state - self.buffers
        in_step = peak > sum(self.at_peak.values())  # of the optimizer, and not in a backward
        at_peak = {"shard": self.parameters, "reduced": self.gradients} if in_step else self.at_peak
        rows = [("each rank holds", "between steps", "at the peak")]
        for kind in [*_WORDS, *(at_peak.keys() - _WORDS.keys())]:
            if count := at_peak.get(kind, 0):
                between = size_in_words(self.parameters if kind == "shard" else 0)
                rows.append((_WORDS.get(kind, kind), between, size_in_words(count)))
        rows += [(name, size_in_words(count), size_in_words(count)) for name, count in always if count]
        rows.append(("total, besides activations", size_in_words(self.between_steps), size_in_words(self.peak)))
        if self.cpu_offload and self.accelerator:
            host = sum(count for kind, count in at_peak.items() if kind in _ON_HOST)
            rows.append(("of it on the host", size_in_words(self.parameters + state), size_in_words(host + state)))
        return _aligned(rows, right=(1, 2))

    def _traffic(self) -> list[str]:
        traffic = self.traffic.items()
        rows = [(_KINDS.get(kind, kind), f"{calls:,}", size_in_words(size)) for kind, (calls, size) in traffic]
        rows = rows or [("nothing", "", "")]
        return _aligned([("sent in a step", "calls", "of"), *rows], right=(1, 2))

    def _left_out(self) -> Iterator[str]:
        yield "Not in it: activations; what the optimizer needs while it steps; torch, the backend and fragmentation."
        if self.optimizer_unknown:
            yield f"Nor the optimizer's state: {self.optimizer_unknown}"
        yield "Units are taken to run once each, in the order in which the model declares them."


def forecast(
    make_model: Callable[[], nn.Module], *, fsdp: FSDPArguments, training: TrainingArguments, ranks: int
) -> MemoryEstimate:
    """What rank 0 of a run on `ranks` ranks will hold and send in each step of training.

    Nothing is communicated, and neither memory nor an accelerator is needed. It belongs before `init_process_group()`,
    or into another process.

    Args:
        make_model: called once, under `torch.device("meta")`.
        fsdp: how the model is sharded.
        training: how it is trained; of it count the optimizer, microbatches, clipping, and the device ("auto": as this
            machine has it).
        ranks: of the run.

    Raises:
        ConfigTypeError, ConfigValueError: as the run itself would: what contradicts the model or the number of ranks.
        UsageError: this process is a rank of a job already.
    """
    if ranks < 1:
        raise ConfigValueError(f"forecast: expected ranks of at least 1, found {ranks}")
    with torch.device("meta"):
        model = make_model()
    accelerator = training.device != "cpu" and (training.device != "auto" or torch.accelerator.is_available())
    microbatches = training.accumulate
    if training.global_batch is not None:
        microbatches = -(-training.global_batch // (training.batch * ranks))
    unknown = ""
    with flatfsdp.dry_run(ranks, accelerator=accelerator):
        sharded = shard(model, fsdp, device=torch.device("cpu"))
        optimizer = make_optimizer(sharded, training)
        try:
            plan = flatfsdp.memory_plan(sharded, optimizer, microbatches=microbatches, max_norm=training.clip)
        except UsageError as error:
            unknown = str(error)
            sharded.zero_grad()
            plan = flatfsdp.memory_plan(sharded, microbatches=microbatches, max_norm=training.clip)
    return MemoryEstimate(
        ranks=ranks,
        microbatches=microbatches,
        accelerator=accelerator,
        cpu_offload=fsdp.cpu_offload,
        optimizer=type(optimizer).__name__,
        units=plan.units,
        parameters=plan.params,
        gradients=plan.grads,
        optimizer_state=plan.optimizer,
        optimizer_unknown=unknown,
        buffers=plan.buffers,
        unsharded_peak=plan.unsharded_peak,
        at_peak=plan.at_peak,
        between_steps=plan.between_steps,
        peak=plan.peak,
        traffic=plan.comm,
    )


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` on the meta device, for `forecast`: `model.to("meta")` would untie its tied parameters."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


# --- text -------------------------------------------------------------------------------------------------------------


def _runs(units: Iterable[UnitSummary]) -> Iterator[list[UnitSummary]]:
    """`units`, with those that follow each other and are alike in one list."""
    for _, run in groupby(units, lambda unit: (unit.module, unit.parameters, unit.padding, unit.ranks, unit.kinds)):
        yield list(run)


def _row_of(run: Sequence[UnitSummary]) -> tuple[str, ...]:
    first, last = run[0], run[-1]
    name = first.name or "<root>"
    if len(run) > 1:
        name = f"{name} .. {last.name} ({len(run)})"
    numbers = (
        f"{sum(unit.parameters for unit in run):,}",
        size_in_words(sum(unit.bytes_per_rank for unit in run)),
        f"{sum(unit.padding for unit in run):,}",
    )
    return name, first.module, *numbers, first.strategy, first.ranks, first.kinds


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _aligned(rows: Sequence[tuple[str, ...]], *, right: tuple[int, ...]) -> list[str]:
    """`rows` as lines of columns, those of `right` flush right."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if number in right else cell.ljust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
