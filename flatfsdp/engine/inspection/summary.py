"""A description of a sharded model, for people (`summary`) and for programs (`stats`). Nothing here communicates."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

import torch
from torch import nn

from ...errors import ROOT, UsageError
from ..agreement.process_groups import extent_of, groups_in_words
from ..base._dtensor import local_bytes
from ..cpu.groups import waits_early
from ..features.persistent_params import persistence_of
from ..few_bits.quantized import RESIDUAL, residual_numels
from ..flat.flat_param import FlatParamHandle
from ..models.rest import models_of
from ..planning.planned import PlannedLayout
from ..runtime.model import Model
from ..runtime.model_facts import steppable_of
from ..runtime.unit import Unit


def summary(model: nn.Module, *, compact: bool = False) -> str:
    """The units of `model` as a table, with their parameters, bytes, padding and group plan.

    One row a unit, in the order of `model.named_modules()`:

    - *parameters*: elements that the unit owns, over all ranks; a tied parameter counts in the unit that owns it.
    - *bytes/rank*: the memory that each rank keeps for them between iterations, padding included.
    - *padding*: elements that pad the unit's flat parameters, over all ranks of the shard group.
    - *ranks*: shards x replicas; the lines below the table list the groups of this rank.
    - *kinds*: the dtypes of its flat parameters, `frozen` if nothing was trainable at construction, the dtype of
      computation, the dtype of communication (`by int8`, `gradients by 4 bits`), with error feedback the bytes of
      residuals (`residuals of`), whether each parameter is split by rows (`in rows`), and where frozen ones stay
      unsharded (`keep_frozen_unsharded`).

    A line below it gives the number of units whose reductions are *waited for early*, where they are issued: those for
    which a rank sends 1 MiB or more through memory that ranks share (`share_host_memory`). Whether they do is known
    after their first exchange.

    With `compact`, consecutive units that are alike share a row, and the common entries of all rows are listed below
    the table, which then fits into 80 columns if names are short.

    Raises:
        UsageError: no module in `model` is wrapped.
    """
    units, found = units_in_order(model), _units(model)
    header = ("unit", "module", "parameters", "bytes/rank", "padding", "strategy", "ranks", "kinds")
    total = [sum(column) for column in zip(*((u.parameters, u.bytes_per_rank, u.padding) for u in units), strict=True)]
    last = (f"{len(units)} unit{'s' * (len(units) != 1)}", "", *(f"{number:,}" for number in total), "", "", "")
    rows = [_cells_of_run(run) for run in _runs(units)] if compact else [*map(_cells, units)]
    common = _common(rows, 5) if compact else {}
    shown = [tuple(cell for column, cell in enumerate(row) if column not in common) for row in (header, *rows, last)]
    lines = aligned(shown, right=(2, 3, 4))
    lines += [f"each unit: {', '.join(common.values())}"] if common else []
    axes = [groups for _, unit in found for groups in unit.axes.all]
    lines += dict.fromkeys(f"ranks {extent_of(groups)}: {groups_in_words(groups)}" for groups in axes)
    lines += [] if compact else _early_waits([unit for _, unit in found])
    owned = {id(each) for _, unit in found for h in unit.handles for each in h.parameters}
    left = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in owned)
    if left:
        lines.append(f"not sharded: {left:,} parameters that no unit owns (ignored, or outside of every wrapper)")
    return "\n".join(lines)


def _early_waits(units: Sequence[Unit]) -> list[str]:
    """The number of `units` whose reductions are waited for where they are issued, as lines; none if it is zero."""
    waits = [_waits_early(unit) for unit in units if any(handle.options.trainable for handle in unit.handles)]
    lines = {True: "early waits", None: "early waits if ranks share memory"}
    counts = Counter(waits)
    return [
        f"{line}: the reductions of {counts[known]} of {len(waits)} units"
        for known, line in lines.items()
        if counts[known]
    ]


def _waits_early(unit: Unit) -> bool | None:
    """Whether some reduction of `unit` is waited for where it is issued; None if that is not known yet."""
    if unit.options.comm_hook is not None or unit.options.names_prefetch:
        return False
    sizes = dict.fromkeys(unit.axes.all, 0)
    for handle in unit.handles:
        if handle.options.trainable and handle.precision.reduce_bits is None:
            groups = unit.axes.of(handle)
            size = handle.layout.shard_numel * (groups.scatter.size - 1) * handle.precision.reduce.itemsize
            sizes[groups] = max(sizes[groups], size)
    known = [waits_early(groups.scatter, groups.device, size) for groups, size in sizes.items()]
    return any(known) or (None if None in known else False)


@dataclass(frozen=True)
class UnitSummary:
    """One row of `summary`: the figures of a unit.

    Attributes:
        name: the path of its module, "" for the outermost.
        module: the class of its module.
        parameters: elements that it owns, over all ranks.
        bytes_per_rank: of its shards, padding included.
        padding: elements that pad its flat parameters, over all ranks of the shard group.
        strategy: the name of its sharding strategy.
        ranks: shards x replicas.
        kinds: its flat parameters in words.
    """

    name: str
    module: str
    parameters: int
    bytes_per_rank: int
    padding: int
    strategy: str
    ranks: str
    kinds: str


def units_in_order(model: nn.Module) -> list[UnitSummary]:
    """The units of `model`, in the order of `model.named_modules()`.

    Raises:
        UsageError: no module in `model` is wrapped.
    """
    return [_summary_of(name, unit) for name, unit in _units(model)]


def _summary_of(name: str, unit: Unit) -> UnitSummary:
    parameters = sum(spec.numel for handle in unit.handles for spec in handle.layout.params)
    return UnitSummary(
        name=name,
        module=unit.entries.class_name,
        parameters=parameters,
        bytes_per_rank=sum(handle.shard_bytes for handle in unit.handles),
        padding=sum(handle.layout.padded_numel for handle in unit.handles) - parameters,
        strategy=unit.built.traits.strategy.name,
        ranks=", ".join(dict.fromkeys(map(extent_of, unit.axes.all))),
        kinds=", ".join(_kind(unit, handle) + _kept(unit, handle) for handle in unit.handles) or "none of its own",
    )


def _cells(unit: UnitSummary) -> tuple[str, ...]:
    numbers = (f"{number:,}" for number in (unit.parameters, unit.bytes_per_rank, unit.padding))
    return (unit.name or ROOT, unit.module, *numbers, unit.strategy, unit.ranks, unit.kinds)


def _runs(units: Sequence[UnitSummary]) -> Iterator[list[UnitSummary]]:
    """`units`, with consecutive ones that are alike in one list."""
    for _, run in groupby(units, lambda unit: replace(unit, name="")):
        yield list(run)


def _cells_of_run(run: Sequence[UnitSummary]) -> tuple[str, ...]:
    first, count = run[0], len(run)
    begin, end = first.name.split("."), run[-1].name.split(".")
    shared = list(takewhile(lambda pair: pair[0] == pair[1], zip(begin, end, strict=False)))
    last = ".".join(end[len(shared) :])
    name = f"{first.name} .. {last} ({count})" if count > 1 else first.name
    sums = {each: count * getattr(first, each) for each in ("parameters", "bytes_per_rank", "padding")}
    return _cells(replace(first, name=name, **sums))


def _common(rows: Sequence[tuple[str, ...]], start: int) -> dict[int, str]:
    """The columns from `start` on in which all rows have the same entry, and this entry."""
    columns = list(zip(*rows, strict=True))
    return {column: columns[column][0] for column in range(start, len(columns)) if len({*columns[column]}) == 1}


def stats(model: nn.Module) -> Stats:
    """Live figures of `model` on this rank: bytes by category, and the collectives since the last `reset()`.

    Raises:
        UsageError: no module in `model` is wrapped, or `model` is only a part of a larger wrapped model.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> model = flatfsdp.FullyShardedDataParallel(torch.nn.Linear(3, 5))
        >>> flatfsdp.stats(model)
        Stats(units=1, bytes_params=80, bytes_grads=0, bytes_unsharded=0, bytes_unsharded_peak=0, comm={})
    """
    return Stats(model)


def unsharded_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The full shape of each parameter of `model`, by its name in `model.named_parameters()`.

    Between steps the parameters of a wrapped model show this rank's part, without its shape. For optimizers that treat
    parameters by their number of dimensions, this function provides the full ones. A flat parameter (with
    `use_orig_params=False`), and a parameter that no unit owns, have the shape that they show.

    Raises:
        UsageError: no module in `model` is wrapped.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> model = flatfsdp.FullyShardedDataParallel(torch.nn.Linear(3, 5), use_orig_params=True)
        >>> flatfsdp.unsharded_shapes(model)
        {'weight': torch.Size([5, 3]), 'bias': torch.Size([5])}
    """
    shapes = {
        id(parameter): torch.Size(spec.shape)
        for _, unit in _units(model)
        for handle in unit.handles
        for parameters in (handle.face.originals, handle.leaves)
        for parameter, spec in zip(parameters, handle.layout.params, strict=True)
    }
    return {name: shapes.get(id(parameter), parameter.shape) for name, parameter in model.named_parameters()}


class Stats:
    """Figures of one model on this rank, read again at each access; made by `stats(model)`.

    Does not keep the model alive: once that is deleted, every figure raises `UsageError`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._models()

    @property
    def units(self) -> int:
        """The number of units."""
        return len(self._units())

    @property
    def bytes_params(self) -> int:
        """Bytes of this rank's shards, padding included."""
        return sum(model.resources.tracker.live["shard"] for model in self._models())

    @property
    def bytes_grads(self) -> int:
        """Bytes of the `.grad` of all parameters that units own; 0 after `zero_grad(set_to_none=True)`."""
        grads = [parameter.grad for unit in self._units() for parameter in steppable_of(unit)]
        return sum(local_bytes(grad) for grad in grads if grad is not None)

    @property
    def bytes_residuals(self) -> int:
        """Bytes of the errors of quantized gradients, with error feedback; 0 before the first."""
        return sum(model.resources.tracker.live[RESIDUAL] for model in self._models())

    @property
    def bytes_unsharded(self) -> int:
        """Bytes of unsharded parameters alive now, not counting the shards."""
        return sum(model.resources.tracker.live["unsharded"] for model in self._models())

    @property
    def bytes_unsharded_peak(self) -> int:
        """The peak of `bytes_unsharded` since the last `reset()`."""
        return sum(model.resources.tracker.peak("unsharded") for model in self._models())

    @property
    def bytes_peak(self) -> int:
        """The peak of the bytes of all categories together since `reset()`: shards, unsharded parameters, gradients in
        flight, buffers of collectives. It does not include `.grad`, nor memory of the program and its optimizer."""
        return sum(model.resources.tracker.peak_total for model in self._models())

    @property
    def bytes_at_peak(self) -> dict[str, int]:
        """Category to bytes at that time; their sum is `bytes_peak`.

        Categories: `shard`, `unsharded`, `post_forward_shard` (of parameters, between forward and backward), `arrived`
        (large gradients as they arrived, to be reduced in a wider dtype), `slots` (unsharded gradients), `exchange`
        (scratch of a reduction), `staging` (of several small units), `quantized` (data sent in few bits), `residual`
        (their errors), `reduced` (gradient shards before they become `.grad`), `partial` (sums that await an
        all-reduce), `summoned`, `host copy` (of `keep_frozen_unsharded`), and `matrices` (of `matrix_steps`).
        """
        return dict(sum((Counter(model.resources.tracker.at_peak) for model in self._models()), Counter()))

    @property
    def comm(self) -> dict[str, tuple[int, int]]:
        """Kind of collective to (number of calls, bytes) of this rank since the last `reset()`.

        Kinds: `all_gather` (of parameters), `reduce_scatter` and `all_reduce` (of gradients), `comm_hook` (calls of a
        communication hook), `all_to_all` (of `matrix_steps`), `broadcast`, and `scalar` for norms and
        agreements. Bytes are those of the unsharded side: an all-gather's output, a reduction's input; of all-to-alls,
        what this rank sends.
        """
        found: dict[str, tuple[int, int]] = {}
        for model in self._models():
            for collective, count in model.resources.comm_stats.counts.items():
                calls, size = found.get(collective, (0, 0))
                found[collective] = (calls + count, size + model.resources.comm_stats.bytes[collective])
        return found

    @property
    def bytes_staged(self) -> int:
        """Bytes that were copied into staging buffers since the last `reset()`, of the unsharded side: those of small
        units, or small parameters under `layout="rows"`, that are sent together. They also count in `comm`."""
        return sum(model.resources.comm_stats.staged for model in self._models())

    def reset(self) -> None:
        """Start counting collectives, and measuring peaks, from now."""
        for model in self._models():
            model.resources.comm_stats.reset()
            model.resources.tracker.reset_peaks()

    def __repr__(self) -> str:
        names = ("units", "bytes_params", "bytes_grads", "bytes_unsharded", "bytes_unsharded_peak", "comm")
        return f"Stats({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    def _units(self) -> list[Unit]:
        model = self._model()
        if model is None:
            raise UsageError("these stats belong to a model that was deleted; call flatfsdp.stats() on another")
        return [unit for _, unit in _units(model)]

    def _models(self) -> list[Model]:
        units = self._units()
        models = models_of(units)
        for model in models:
            if model.outermost not in units:
                this, unsharded = units[0].entries.class_name, model.outermost.entries.class_name
                raise UsageError(
                    f"stats() of {this}, which is a part of the wrapped {unsharded}: bytes and collectives are counted "
                    "for whole models. Pass the outermost module"
                )
        return models


def _units(model: nn.Module) -> list[tuple[str, Unit]]:
    """The units in `model` with the paths of their modules, in the order of `named_modules`."""
    paths: dict[Unit, list[str]] = {}  # of several entries, all
    for name, each in model.named_modules():
        if isinstance(unit := each.__dict__.get("_unit"), Unit):
            paths.setdefault(unit, []).append(name)
    if not paths:
        raise UsageError(
            f"no module in {type(model).__name__} is wrapped by FullyShardedDataParallel or was given to "
            "fully_shard(). Shard the model first, and pass the wrapper, or the model"
        )
    return [(", ".join(names), unit) for unit, names in paths.items()]


def _kind(unit: Unit, handle: FlatParamHandle) -> str:
    """For example "float32 frozen as bfloat16 by int8 in rows": dtype at rest, trainability, dtype in computation and
    in communication, layout."""
    precision = handle.precision
    frozen = "" if handle.options.trainable else " frozen"
    cast = f" as {_dtype(precision.compute)}" if precision.compute != precision.master else ""
    packed = f" by {_dtype(precision.gather)}" if precision.gather is not None else ""
    if not packed and unit.built.mixed_precision.gather_dtype is not None:  # integers and packed bytes
        packed = " gathered as stored"
    reduced = precision.reduce_bits is not None and handle.options.trainable
    bits = f", gradients by {precision.reduce_bits} bits" if reduced else ""
    if reduced and precision.error_feedback:
        numel = sum(residual_numels(handle.layout.shard_numel, unit.axes.of(handle)).values())
        bits += f", residuals of {numel * precision.reduce.itemsize:,} bytes"
    layout = handle.layout
    cut = {"flat": "", "rows": " in rows", "planned": " by grains"}[handle.options.layout]
    if isinstance(layout, PlannedLayout) and len(layout.segments) > 1:
        cut += f" in {len(layout.segments)} segments"
    if isinstance(layout, PlannedLayout) and layout.given_up:
        cut += f", {len(layout.given_up)} cut where their grains need too much padding"
    return f"{_dtype(precision.master)}{frozen}{cast}{packed}{bits}{cut}"


def _kept(unit: Unit, handle: FlatParamHandle) -> str:
    """The effect of `keep_frozen_unsharded` on `handle`, for the table."""
    where = persistence_of(unit, handle)
    return f", kept on the {where.value} ({handle.unsharded_bytes:,} bytes)" if where is not None else ""


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def aligned(rows: Sequence[tuple[str, ...]], *, right: tuple[int, ...]) -> list[str]:
    """`rows` as lines of columns, those of `right` flush right."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if number in right else cell.ljust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
