"""`regroup`: a model and its optimizer move to other ranks, in memory and in place.

[Note: regroup] The parameters stay the same objects, and so do the optimizer, its param groups, modules and their
hooks. What belongs to a set of ranks is made anew ([Note: regrouped units]). Elements go directly from a rank that has
them to the ranks that need them ([Note: transfers]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..api import HYBRIDS
from ..engine.agreement.object_collectives import on_all_ranks
from ..engine.agreement.process_groups import given_ranks, mesh_over, plan_in
from ..engine.device.streams import accelerator
from ..engine.guards.optimizer_hooks import wholes_of
from ..engine.models.walks import units_in
from ..engine.runtime.unit import Unit
from ..engine.state.named_param import named_state
from ..engine.state.optim.descriptions import KeptWhole, alike, shown, value_of
from ..engine.state.optim.param_map import OptimizedParam, ParamMap, groups_of
from ..engine.wrapping.regrouping import Regrouping, Target, at_rest, release
from ..errors import AgreementError, ConfigValueError, UsageError, by_ranks, refuse_type
from ..messages import meet_and_gather
from .holding import KEPT, Entry, Facts, Holding, Value, buffers_of, whole
from .transfer import MOVES, Moved, assign, transfer

T = TypeVar("T")

CALL = "called regroup()"
LEFT = (
    "this rank has left the model in regroup(), and has nothing of it any more. Join again, by regroup() with "
    "holdings=(), before you use it"
)
LOST = ". regroup() had begun: the model has no values any more on the new ranks. Build it again and load a checkpoint"


class NoValuesError(AgreementError):
    """A rank has failed when regroup() had begun, and all ranks know it: the model has no values any more."""


def regroup(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: Any,
    over: dist.ProcessGroup | None = None,
    holdings: Iterable[Holding] | None = None,
) -> Moved:
    """Move a sharded model and its optimizer to other ranks, between two steps.

    Parameters stay the same objects, so that the optimizer, its param groups and schedulers stay valid. Shards, the
    states of the optimizer and buffers have the values that a checkpoint would have given them, bit for bit. Each
    element is sent once to each rank that needs it and lacks it; beside the old and the new shards, a rank needs memory
    for messages only if these go through another device. Collective over `over`.

    Args:
        model: the outermost module of a model (`FullyShardedDataParallel`, or sharded by `fully_shard`).
        optimizer: that of the model.
        group: the ranks over which it is sharded from now on: a process group; for the hybrid strategies a pair (shard
            group, replicate group) or a 2-D device mesh (replicate, shard). None on a rank that leaves.
        over: the ranks that take part: all that have shards, and all that get some; None for all ranks.
        holdings: what this rank brings; None for what it has, `()` on a rank that joins: it has built and wrapped the
            model over `group`, or over itself alone on the meta device.

    Returns:
        What this rank has sent and received.

    Raises:
        UsageError: the model cannot be moved, or not now, or no rank has some element. Nothing was changed.
        AgreementError: on the other ranks, if that is so on some; on all ranks, if one fails later (out of memory), and
            the model has lost its values.
    """
    ranks = dist.group.WORLD if over is None else over
    given, mesh = _given(group)
    made = _Regroup(model, optimizer, ranks, None if holdings is None else [*holdings])
    with torch.inference_mode(False):
        if given is None:
            return made.leave()
        return made.move(_targets(units_in(model), given, mesh))


def _given(group: Any) -> tuple[Any, Any]:
    """The process group, or the pair of them, and the mesh of the argument `group`."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group, None
    if isinstance(group, tuple) and len(group) == 2 and all(isinstance(each, dist.ProcessGroup) for each in group):
        return group, None
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim == 1:
            return group.get_group(), group
        if group.ndim == 2:
            return (group.get_group(1), group.get_group(0)), group
    return refuse_type("regroup: group", group, "a process group, a pair of them, a 1-D or 2-D device mesh, or None")


def _targets(units: Sequence[Unit], given: Any, mesh: Any) -> Callable[[Unit], Target]:
    """The new ranks of each unit. Creates the communicators for reductions, collective over `given`: also a rank that
    wraps its model over that waits there."""
    if not units:
        raise UsageError("regroup(): model: expected a sharded model, found no sharded module in it")
    for unit in units:
        hybrid = unit.groups.strategy in HYBRIDS
        if hybrid is not isinstance(given, tuple):
            expected = "a pair (shard group, replicate group), or a 2-D device mesh" if hybrid else "one process group"
            raise ConfigValueError(
                f"regroup: group: unit {unit.label} has the strategy {unit.groups.strategy.name}; expected {expected}"
            )
        for one in given if hybrid else (given,):
            if dist.get_rank(one) < 0:
                raise ConfigValueError(
                    f"regroup: group: rank {dist.get_rank()} is not in it. Pass None on a rank that leaves"
                )
    found = {}
    for unit in units:
        key = unit.groups.strategy, unit.groups.device
        if key not in found:
            found[key] = plan_in(unit.groups.strategy, given, unit.groups.device)

    def target(unit: Unit) -> Target:
        groups, before = found[unit.groups.strategy, unit.groups.device], unit.built.device_mesh
        if mesh is not None or before is None:
            return Target(groups, mesh)
        if isinstance(given, tuple):
            raise ConfigValueError(
                f"regroup: group: unit {unit.label} lies on a device mesh of 2 dimensions; pass the new mesh"
            )
        return Target(groups, mesh_over(groups, before.device_type, [*given_ranks(groups)], before.mesh_dim_names))

    return target


class _Report(NamedTuple):
    """The holdings and the needs of one rank, and the parameters of which it needs states, too.

    Attributes:
        check_values: the setting of this name; "" of a rank that leaves.
    """

    brings: tuple[Facts, ...]
    needs: tuple[Entry, ...]
    stepped: frozenset[str]
    has_optimizer: bool
    check_values: str


@dataclass
class _Regroup:
    """One call."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    over: Any
    holdings: list[Holding] | None

    def leave(self) -> Moved:
        """The call of a rank that leaves."""

        def prepare() -> _Report:
            at_rest(self.model)
            return self._report((), "")

        moved, _ = self._exchange(prepare, lambda reports: None)
        release(units_in(self.model), LEFT)
        if self.optimizer is not None:
            self.optimizer.state.clear()
        self._all(MOVES, lambda: None)
        return moved

    def move(self, target_of: Callable[[Unit], Target]) -> Moved:
        """The call of a rank of the new group."""
        regrouping: list[Regrouping] = []

        def prepare() -> _Report:
            regrouping.append(Regrouping(self.model, target_of))
            return self._report(self._wants(regrouping[0]), regrouping[0].check_values)

        filling = _Filling(self.model, self.optimizer)

        def rebuild(reports: Sequence[_Report]) -> None:
            if self.holdings == []:
                release(regrouping[0].units, LEFT)  # its values are of no use: their memory goes first
            chosen = [each.check_values for each in reports if each.check_values and each.brings]
            regrouping[0].rebuild(check_values=chosen[0] if chosen else regrouping[0].check_values)
            filling.begin([facts for each in reports for facts in each.brings])

        moved, _ = self._exchange(prepare, rebuild, filling.target)
        self._all(MOVES, filling.end, begun=True)
        return moved

    def _report(self, needs: Iterable[Entry], check_values: str) -> _Report:
        if self.holdings is None:
            self.holdings = [Holding.of(self.model, self.optimizer)]
        stepped = frozenset[str]()
        if self.optimizer is not None:
            stepped = frozenset(ParamMap(self.model, groups_of(self.model, self.optimizer)).by_name)
        brings = tuple(each.facts for each in self.holdings)
        return _Report(brings, tuple(needs), stepped, self.optimizer is not None, check_values)

    def _wants(self, regrouping: Regrouping) -> Iterable[Entry]:
        """The needs of this rank in its new place."""
        at = {}
        for unit, layouts, target in zip(regrouping.units, regrouping.layouts, regrouping.targets, strict=True):
            for kind, layout in enumerate(layouts):
                for index, spec in enumerate(layout.params):
                    at[id(unit), kind, spec.name] = layout.span_in_param(index, target.groups.shard.rank)
        for named in named_state(self.model):
            if named.unit is None:
                yield whole(named.name, named.leaf)
                continue
            spec = named.spec
            span = at[id(named.unit), named.kind, named.handle.layout.params[named.index].name]
            if not span.is_empty:
                yield Entry(named.name, "", named.leaf.dtype, spec.shape, spec.stride, span.start, span.numel)
        for name, _, _, buffer in buffers_of(self.model):
            yield whole(name, buffer)

    def _exchange(
        self,
        prepare: Callable[[], _Report],
        rebuild: Callable[[Sequence[_Report]], None],
        target: Callable[[Entry], tuple[torch.Tensor, int]] | None = None,
    ) -> tuple[Moved, Sequence[_Report]]:
        reports = self._all("compares what ranks have and need", prepare)
        have = {rank: each.has_optimizer for rank, each in enumerate(reports)}
        if len(set(have.values())) > 1:
            words = {rank: "with an optimizer" if found else "without one" for rank, found in have.items()}
            raise UsageError(f"regroup(): ranks call it differently: {by_ranks(words)}. Pass it on all or on none")
        moves = assign(
            [each.brings for each in reports], [each.needs for each in reports], [each.stepped for each in reports]
        )
        _agreed_values([facts for each in reports for facts in each.brings])
        self._all("makes room for its new shards", lambda: rebuild(reports), begun=True)
        assert self.holdings is not None
        serves_host = "cpu" in str(dist.get_backend_config(self.over))
        device = torch.device("cpu") if serves_host else accelerator() or torch.device("cpu")
        moved = transfer(moves, self.holdings, target or _nowhere, self.over, device)
        self.holdings = None  # the old shards
        return moved, reports

    def _all(self, doing: str, work: Callable[[], T], *, begun: bool = False) -> list[T]:
        """`work` on every rank; if it fails on one, this fails on all. `begun`: the old shards are gone."""

        def problem(failed: Mapping[int, str], own: Exception | None) -> Exception:
            words = by_ranks(failed, ": ")
            return NoValuesError(f"{words}{LOST}") if begun else own or AgreementError(words)

        exchange = partial(meet_and_gather, group=self.over, call=CALL, waiting=f"{doing} in regroup()")
        alone = dist.get_world_size(self.over) == 1
        return [*on_all_ranks(work, None if alone else exchange, raises=problem, objects=True).values()]


def _nowhere(entry: Entry) -> tuple[torch.Tensor, int]:
    raise AssertionError(entry)


def _agreed_values(brought: Iterable[Facts]) -> tuple[dict[str, dict[str, Value]], tuple[dict[str, Any], ...]]:
    """The values and the settings of param groups that all of `brought` share.

    Raises:
        UsageError: they differ.
    """
    values: dict[str, dict[str, Value]] = {}
    groups: tuple[dict[str, Any], ...] = ()
    for facts in brought:
        groups = groups or facts.groups
        for name, found in facts.values.items():
            first = values.setdefault(name, found)
            for state in first.keys() | found.keys():
                one, other = first.get(state), found.get(state)
                if one is None or other is None or not alike(one.value, other.value):
                    both = " and ".join("nothing" if each is None else shown(each.value) for each in (one, other))
                    raise UsageError(
                        f"regroup(): optimizer state {state!r} of {name!r} differs between ranks: {both}. Every rank "
                        "must step its optimizer equally often"
                    )
    return values, groups


class _Filling:
    """The new shards and states of one rank, while they are filled."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._targets: dict[tuple[str, str], tuple[torch.Tensor, int]] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # targets that are not row-major, and what is filled
        self._made: list[tuple[torch.Tensor, dict[str, Any]]] = []  # parameters with their new states
        self._groups: tuple[dict[str, Any], ...] = ()

    def target(self, entry: Entry) -> tuple[torch.Tensor, int]:
        """1-D memory for the elements of a tensor, and the first of them."""
        return self._targets[entry.name, entry.state]

    def begin(self, brought: Sequence[Facts]) -> None:
        """Make memory for everything; the units are rebuilt."""
        for named in named_state(self._model):
            if named.unit is None:
                self._whole(named.name, "", _off_meta(named.leaf, self._device))
            else:
                memory = named.local_view(named.handle.shard.detach())
                self._targets[named.name, ""] = memory, named.span_in_param.start
        for name, module, attribute, buffer in buffers_of(self._model):
            if buffer.is_meta:
                buffer = module._buffers[attribute] = torch.empty_like(buffer, device=self._device)
            self._whole(name, "", buffer)
        if self._optimizer is None:
            return
        values, self._groups = _agreed_values(brought)
        states: dict[str, dict[str, Entry]] = {}
        for each in (entry for facts in brought for entry in facts.entries if entry.state):
            states.setdefault(each.name, {})[each.state] = each
        for param in ParamMap(self._model, groups_of(self._model, self._optimizer)):
            shaped: dict[str, Entry] = {}
            for named in param.params:
                shaped |= states.get(named.name, {})
            others = next((values[named.name] for named in param.params if named.name in values), {})
            if param.reports and (shaped or others):
                state: dict[str, Any] = {name: self._new(param, each) for name, each in shaped.items()}
                state |= {name: _placed(each, param) for name, each in others.items()}
                self._made.append((param.parameter, state))

    @property
    def _device(self) -> torch.device:
        return units_in(self._model)[-1].resources.device.device

    def _whole(self, name: str, state: str, tensor: torch.Tensor) -> None:
        target = tensor.detach()
        if not target.is_contiguous():
            self._copies.append((target, torch.empty(target.shape, dtype=target.dtype, device=target.device)))
            target = self._copies[-1][1]
        self._targets[name, state] = target.view(-1), 0

    def _new(self, param: OptimizedParam, entry: Entry) -> torch.Tensor:
        """A state without values, of the parameter's shape or of its own."""
        if param.handle is None:
            made = torch.empty_like(param.parameter, dtype=entry.dtype)
            self._whole(param.name, entry.state, made)
            return made
        at_rest = param.at_rest
        if entry.kind == KEPT:
            made = torch.empty(entry.shape, dtype=entry.dtype, device=at_rest.device)
            self._whole(param.name, entry.state, made)
            return made.as_subclass(KeptWhole)
        flat = torch.zeros(at_rest.numel(), dtype=entry.dtype, device=at_rest.device)
        for named in param.params:
            local = param.handle.face.elements_in(named.index, flat)
            self._targets[named.name, entry.state] = local, named.span_in_param.start
        return param.like_holder(flat if at_rest.dim() == 1 else flat.as_strided(at_rest.shape, at_rest.stride()))

    def end(self) -> None:
        """Everything is filled: the optimizer has its new states."""
        with torch.no_grad():
            for target, filled in self._copies:
                target.copy_(filled)
        if self._optimizer is None:
            return
        for parameter in [key for key in self._optimizer.state if isinstance(key, torch.Tensor)]:
            del self._optimizer.state[parameter]
        for parameter, state in self._made:
            self._optimizer.state[parameter] = state
        if (wholes := wholes_of(self._optimizer)) is not None:
            wholes.ranks_changed()
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=False):
            for key, value in settings.items():
                if key not in group or not alike(value_of(group[key]), value):
                    group[key] = value


def _placed(found: Value, param: OptimizedParam) -> Any:
    value = value_of(found.value)
    return value.to(param.at_rest.device) if found.on_device else value


def _off_meta(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    if leaf.is_meta:
        made = nn.Parameter(torch.empty_like(leaf, device=device), leaf.requires_grad)
        vars(made).update(vars(leaf))
        torch.utils.swap_tensors(leaf, made)
    return leaf
