"""Ways to shard a model, compared: each one's memory and traffic from a dry run of it, and a recommendation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import contains
from typing import Any

import torch
from torch import nn

from ...api import ShardingStrategy
from ...errors import ROOT, ConfigValueError, UsageError, refuse_type
from ...fully_sharded_data_parallel import FullyShardedDataParallel
from ...wrap import CustomPolicy
from ..agreement.process_groups import new_group
from ..features.optimizer_in_backward import OptimizerInBackward
from ..models.rest import outermost_model
from .dry_run import Plan, dry_run, memory_plan
from .summary import UnitSummary, aligned

LAYOUTS = {"flat": "flat", "rows": "rows"}


@dataclass(frozen=True)
class Way:
    """A way to shard a model.

    Attributes:
        shards, replicas: the numbers of ranks that hold different parts of a parameter, and of those that hold copies.
        units: the name of the units.
        layout: the name of the layout.
        policy, given: the `auto_wrap_policy` and the `layout` that these names stand for.
    """

    shards: int
    replicas: int
    units: str
    layout: str
    policy: Any = None
    given: Any = "flat"

    @property
    def words(self) -> str:
        """It in a few words."""
        return f"{self.shards:,} shards x {self.replicas:,} replicas, units {self.units!r}, layout {self.layout!r}"

    @property
    def axes(self) -> tuple[range, range]:
        """The ranks of the first one's shards, and of the copies of its part."""
        return range(self.shards), range(0, self.shards * self.replicas, self.shards)


@dataclass(frozen=True)
class Choice:
    """A way to shard a model with its figures for the first rank. All sizes are bytes.

    Attributes:
        way: what is chosen.
        plan: memory and traffic, as `memory_plan` returns them.
        inside, across: bytes that a rank receives in a step from ranks of its own node, and from those of other nodes,
            for parameters and gradients, if each rank sends directly to each other one. Rings and trees move as many
            bytes in all, over other links.
    """

    way: Way
    plan: Plan
    inside: int
    across: int

    @property
    def padding(self) -> float:
        """Padding as a part of the parameters' elements."""
        return sum(unit.padding for unit in self.plan.units) / max(1, sum(unit.parameters for unit in self.plan.units))

    @property
    def largest(self) -> UnitSummary:
        """The unit with the most parameters."""
        return max(self.plan.units, key=lambda unit: unit.parameters)

    @property
    def calls(self) -> int:
        """Collectives of a step."""
        return sum(calls for calls, _ in self.plan.comm.values())

    @property
    def overlaps(self) -> bool:
        """Whether one unit can be gathered while another one computes, or nothing is gathered."""
        return self.way.shards == 1 or sum(unit.parameters > 0 for unit in self.plan.units) > 1


@dataclass(frozen=True)
class Advice:
    """Ways to shard a model on some number of ranks, and the recommended one.

    Attributes:
        ranks, node, memory: as given to `advise`.
        choices: in the order in which they were tried.
        left_out: ways that the model, the arguments or the optimizer do not permit, with the reason.
        recommended: one of `choices`.
        sentence: the recommendation with its reason.
    """

    ranks: int
    node: int
    memory: int | None
    choices: tuple[Choice, ...]
    left_out: tuple[tuple[Way, str], ...]
    recommended: Choice
    sentence: str

    def __str__(self) -> str:
        whole = any(choice.plan.reserved is not None for choice in self.choices)
        peak = ("in use", "reserved") if whole else ("peak",)
        header = ("shards x replicas", "units", "layout", "between steps", *peak, "padding", "inside", "across")
        owners = ("owners",) if any(choice.plan.imbalance is not None for choice in self.choices) else ()
        rows: list[tuple[str, ...]] = [(*header, *owners, "largest unit", "")]
        for choice in self.choices:
            way, plan = choice.way, choice.plan
            peaks = (plan.in_use or 0, plan.reserved or 0) if whole else (plan.peak,)
            sizes = map(_size, (plan.between_steps, *peaks))
            sent = map(_size, (choice.inside, choice.across))
            mark = "<" if choice is self.recommended else ""
            name, unit = f"{way.shards} x {way.replicas}", choice.largest
            largest = f"{unit.name or ROOT}, {unit.parameters:,}"
            balance = (f"{plan.imbalance or 1:.2f}",) if owners else ()
            rows.append((name, way.units, way.layout, *sizes, f"{choice.padding:.2%}", *sent, *balance, largest, mark))
        lines = aligned(rows, right=tuple(range(3, 7 + len(peak) + len(owners))))
        lines += [f"left out: {way.words}: {why}" for way, why in self.left_out]
        lines.append(
            f"Bytes of each rank, {'with' if whole else 'without'} activations; received in a step from its own node, "
            f"of {self.node} ranks (inside), and from others (across)."
        )
        if owners:
            lines.append("Owners of whole matrices: the longest step of one, as a multiple of the mean.")
        return "\n".join([*lines, "", self.sentence])


def advise(
    model: nn.Module,
    *,
    ranks: int,
    optimizer: Callable[[Any], torch.optim.Optimizer | OptimizerInBackward] | None = None,
    memory: int | None = None,
    node: int = 8,
    units: Mapping[str, Any] | None = None,
    layouts: Mapping[str, Any] | None = None,
    shard: Callable[[nn.Module, Way], Any] | None = None,
    accelerator: bool = True,
    microbatches: int = 1,
    max_norm: float | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **options: Any,
) -> Advice:
    """Memory and traffic of `model` for each way to shard it over `ranks` ranks, and a recommendation.

    Each is the plan of a dry run, in which nothing is computed or sent: its figures are those of the real job, without
    activations. See `memory_plan` for what it assumes. With `memory`, the recommendation is the way that receives the
    least from other nodes, then inside of a node, of those whose peak is at most that; without, the one with the
    smallest peak. A model that is a single unit is recommended only if nothing else can be, since it gathers nothing
    while it computes.

    Args:
        model: before it is sharded, best on the meta device; it is copied there, and remains as it is.
        ranks: the number of ranks of the job.
        optimizer: makes the optimizer of a sharded model, as ``lambda model: torch.optim.AdamW(model.parameters())``;
            None: its states do not count.
        memory: bytes that a rank has for what is counted here.
        node: ranks on a node. Shards are over all ranks, over each number of nodes that divides them and is a power of
            two, over one node and halves of it, and over one rank.
        units: by name, policies for units as `auto_wrap_policy`, None for a single one. By default "model" (a single
            one), "blocks" (the members of the outermost lists of modules), and "layers" (the modules in blocks).
        layouts: by name, values of `layout=`; by default "flat" and "rows".
        shard: makes the sharded model of a copy of `model`, in another way than by `FullyShardedDataParallel`.
        accelerator: whether the job runs on accelerators, as for `dry_run`.
        microbatches, max_norm, loss: as for `memory_plan`. With a loss, `memory` is for all that the allocator
            reserves, activations included.
        options: further arguments of `FullyShardedDataParallel`, such as `mixed_precision`. Modules and parameters in
            them, in `units` and in `layouts` are those of `model`. Not with `shard`.

    Raises:
        ConfigTypeError, ConfigValueError: an argument, or no way is permitted.
        UsageError: this process is a rank of a job already, or a step of the optimizer reads values.

    Example:
        >>> import torch, flatfsdp
        >>> from torch import nn
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        >>> advice = flatfsdp.advise(model, ranks=16, optimizer=lambda it: torch.optim.AdamW(it.parameters()))
        >>> advice.recommended.way.shards, advice.recommended.way.units
        (16, 'blocks')
    """
    for name, value in (("ranks", ranks), ("node", node), ("memory", 1 if memory is None else memory)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigValueError(f"advise: {name}: got {value!r}. Accepted: a whole number from 1")
    for name, named in (("units", units), ("layouts", layouts)):
        if named is not None and (not isinstance(named, Mapping) or not named):
            refuse_type(f"advise: {name}", named, "a mapping from names, with at least one")
    _check_options(options, shard)
    # Read once for all ways.
    options = {name: [*value] if isinstance(value, Iterator) else value for name, value in options.items()}
    policies = units_of(model) if units is None else dict(units)
    found: list[Choice] = []
    left_out: list[tuple[Way, str]] = []
    for shards in shard_sizes(ranks, node):
        for unit, of_model in policies.items():
            for layout, given in (layouts or LAYOUTS).items():
                # What is given may name modules and parameters of the model.
                its, policy, its_layout, its_options = _on_meta(model, of_model, given, options)
                way = Way(shards, ranks // shards, unit, layout, policy, its_layout)
                with dry_run(ranks, accelerator=accelerator):
                    try:
                        sharded = shard(its, way) if shard is not None else _wrapped(its, way, its_options)
                        _check_traffic(sharded)
                    except (ConfigValueError, UsageError) as error:
                        left_out.append((way, str(error)))
                        continue
                    _leave_meta(sharded)
                    try:
                        made = None if optimizer is None else optimizer(sharded)
                    except (TypeError, ValueError, UsageError) as error:
                        left_out.append((way, f"its optimizer cannot be made: {type(error).__name__}: {error}"))
                        continue
                    plan = memory_plan(sharded, made, microbatches=microbatches, max_norm=max_norm, loss=loss)
                found.append(Choice(way, plan, *_received(plan, way, node)))
    if not found:
        raise ConfigValueError(f"advise: no way to shard the model is permitted. The first: {left_out[0][1]}")
    best, sentence = recommended(found, memory)
    return Advice(ranks, node, memory, tuple(found), tuple(left_out), best, sentence)


def shard_sizes(ranks: int, node: int) -> list[int]:
    """The numbers of shards to try, largest first: all ranks, powers of two of nodes, a node, halves of it, and one."""
    sizes = {1, ranks}
    size = node
    while size < ranks:
        sizes.add(size)
        size *= 2
    size = min(node, ranks)
    while size > 1:
        sizes.add(size)
        size = size // 2 if size % 2 == 0 else 1
    return sorted((each for each in sizes if ranks % each == 0), reverse=True)


def units_of(model: nn.Module) -> dict[str, Any]:
    """Policies for units of several sizes, by name: those that the lists of modules in `model` suggest."""
    blocks = {*_members(model)}
    inside = [child for block in blocks for child in block.children()]
    layers = {each for each in inside if not _is_list(each) and any(True for _ in each.parameters())}
    found: dict[str, Any] = {"model": None}
    for name, chosen in (("blocks", blocks), ("layers", layers)):
        if chosen:
            found[name] = CustomPolicy(partial(contains, chosen))
    return found


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists in `module` that have parameters."""
    for child in module.children() if not _is_list(module) else [module]:
        if not _is_list(child):
            yield from _members(child)
            continue
        for member in child.children():
            if _is_list(member):
                yield from _members(member)
            elif any(True for _ in member.parameters()):
                yield member


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module) is nn.Sequential


def _on_meta(model: nn.Module, *about: Any) -> tuple[Any, ...]:
    """A copy of `model` on the meta device, and of values in which modules and parameters of it are those of the copy.
    `model.to("meta")` would untie tied parameters."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))
        memo[id(parameter)] = made
    return copy.deepcopy((model, *about), memo)


def _leave_meta(model: nn.Module) -> None:
    """Let ignored parameters, and buffers, be on the device: in the dry run this takes no memory."""
    known: dict[torch.Tensor, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    made: Any = torch.empty_like(tensor, device="cpu")
                    made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
                    tensors[name] = known.setdefault(tensor, made)


# Arguments of `FullyShardedDataParallel` that differ between the ways, or that a dry run has no groups for.
_CHOSEN = ("process_group", "sharding_strategy", "auto_wrap_policy", "device_mesh", "layout")


def _check_options(options: Mapping[str, Any], shard: Any) -> None:
    if shard is not None and options:
        raise ConfigValueError(
            f"advise: got {', '.join(options)} with shard=, which makes the sharded model. Pass them to "
            "FullyShardedDataParallel or fully_shard there"
        )
    if chosen := [name for name in _CHOSEN if name in options]:
        raise ConfigValueError(
            f"advise: {chosen[0]}: got a value, but it differs between the ways that are compared. Pass units= for "
            "policies, layouts= for layouts, or shard= to make the sharded model of each way"
        )


def _check_traffic(model: Any) -> None:
    """Refuse a model with gathers among fewer ranks than there are shards: a plan has one number for both."""
    for unit in outermost_model(model, "advise").units:
        if 0 < (count := unit.options.schedule.post_forward_ranks or 0) < unit.groups.shard.size:
            raise ConfigValueError(
                f"reshard_after_forward={count}: some gathers are among fewer ranks than there are shards, and the "
                "bytes of both are one number in a plan. Accepted: True, False or None"
            )


def _wrapped(model: nn.Module, way: Way, options: Mapping[str, Any]) -> Any:
    strategy, groups = ShardingStrategy.FULL_SHARD, None
    if way.shards == 1:
        strategy = ShardingStrategy.NO_SHARD
    elif way.replicas > 1:
        strategy = ShardingStrategy.HYBRID_SHARD
        groups = tuple(new_group(tuple(each), "plans") for each in way.axes)
    return FullyShardedDataParallel(model, groups, strategy, auto_wrap_policy=way.policy, layout=way.given, **options)


def _received(plan: Plan, way: Way, node: int) -> tuple[int, int]:
    """Bytes that the first rank receives in a step from its own node, and from others.

    Of a gather of B bytes over n ranks it receives B / n from each of the others, as much in a reduction to shards; and
    twice that in a reduction to all, which is both. Of an exchange of matrices ([Note: matrix exchange]) it receives
    about what it sends, and as much from each of the others.
    """
    shards, replicas = way.axes
    inside = across = 0
    for kind, ranks, times, parts in (
        ("all_gather", shards, 1, len(shards)),
        ("reduce_scatter", shards, 1, len(shards)),
        ("all_reduce", replicas, 2, len(replicas)),
        ("all_to_all", shards, 1, max(1, len(shards) - 1)),
    ):
        size, near = plan.comm.get(kind, (0, 0))[1], sum(rank < node for rank in ranks)
        inside += times * size * (near - 1) // parts
        across += times * size * (len(ranks) - near) // parts
    return inside, across


def recommended(choices: list[Choice], memory: int | None) -> tuple[Choice, str]:
    """The choice to recommend, and the sentence that does."""
    able, overlap = [each for each in choices if each.overlaps], "overlap communication and "
    # Copies on all ranks overlap reductions, but need the most memory.
    if not any(each.way.shards > 1 if memory is None else each.plan.needed <= memory for each in able):
        able, overlap = choices, ""
    smallest = min(able, key=lambda each: (each.plan.needed, each.across, each.inside, each.calls))
    if memory is None:
        among = "ways that overlap communication" if overlap else "ways"
        return smallest, (
            f"Recommended: {smallest.way.words}: it has the smallest peak of {len(able)} {among}, "
            f"{_size(smallest.plan.needed)}; with memory=, the one of those that fit that receives the least would be."
        )
    fit = [each for each in able if each.plan.needed <= memory]
    if not fit:
        return smallest, (
            f"None of {len(choices)} ways fits into {_size(memory)}: the smallest peak is that of "
            f"{smallest.way.words}, {_size(smallest.plan.needed)}."
        )
    best = min(fit, key=lambda each: (each.across, each.inside, each.calls, each.plan.needed))
    return best, (
        f"Recommended: {best.way.words}: of the {len(fit)} of {len(choices)} ways that {overlap}fit "
        f"into {_size(memory)}, it receives the least from other nodes, {_size(best.across)} a step, then the least "
        f"inside of its node, {_size(best.inside)}, in the fewest collectives, {best.calls}; its peak is "
        f"{_size(best.plan.needed)}."
    )


def _size(count: int) -> str:
    """Bytes in words, such as "1.5 GiB"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.1f} {unit}"
    return f"{count} B"
