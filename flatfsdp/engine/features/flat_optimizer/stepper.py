"""Steps of an optimizer over original parameters, taken on runs of a shard in place of single parameters.

[Note: flat steps] Adjacent parameters of a shard, whose gradients are adjacent, too, and which the optimizer treats
alike (one param group, equal step counts) are a *run*. While the optimizer steps, a stand-in of it holds one parameter
per run, a flat view of shard and gradient, and a flat state. An elementwise optimizer then computes the same numbers,
in one call instead of one for each parameter.

Programs see single parameters at all times: the optimizer is the same object, its param groups list the original
parameters, and its state of each holds views of the flat state, and an element of its own for every 0-dim tensor (a
step count). So it can be read, saved, loaded and replaced as before, and `step()` may use single parameters at any
time. Before each step the published states are compared with the present ones, by identity; after any change, runs are
found again.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter, is_, itemgetter, sub
from types import NoneType
from typing import Any

import torch
from torch import nn

from ...base import _dtensor, _torch
from ...flat.flat_param import FlatParamHandle
from ...layout.layout import Span
from ...layout.runs import ParamInShard, find_runs
from ...runtime import param_registry as registry
from ...state.optim.optimizer_clone import clone_over
from .state import PLAIN, FusableParam, FusedRun, Pieces, State, States, StepCounts, is_number

_GRAD, _DTYPE, _PARAMS = attrgetter("grad"), attrgetter("dtype"), itemgetter("params")
_POINTER, _OFFSET = torch.Tensor.data_ptr, torch.Tensor.storage_offset


class _Placement:
    """The addresses of the members of runs and of their gradients, which are equal as long as no tensor is replaced.

    For the members of some faces `shown()` is enough, without a look at each.
    """

    def __init__(self, runs: Sequence[FusedRun], single: Sequence[nn.Parameter]) -> None:
        """`single`: parameters in no run, which may be in one later."""
        self.members = [each for run in runs for each in run.members]
        found = {run.face: run.face.shown() for run in runs}
        self._shown = {
            face: kept
            for face, kept in found.items()
            if kept and all({*run.indices} <= {*kept.indices} for run in runs if run.face is face)
        }
        runs = [run for run in runs if run.face not in self._shown]
        self._lying = [each for run in runs for each in run.members[: run.lying]]
        self._beside = [each for run in runs for each in run.members[run.lying :]]  # without elements here
        self._single = single
        starts = accumulate((run.lying for run in runs), initial=0)
        self._firsts = [start for run, start in zip(runs, starts, strict=False) for _ in range(run.lying)]
        self._folded = [index for index, each in enumerate(self._lying) if each.dim() > 1]
        self._numbers = self._now()

    def holds(self) -> bool:
        """Whether all addresses are the same. False if a gradient is None."""
        if any(face.shown() is not kept for face, kept in self._shown.items()):
            return False
        try:
            return self._now() == self._numbers
        except (AttributeError, TypeError):  # a gradient is None, without offset and dtype
            return False

    def _now(self) -> tuple[list[Any], ...]:
        with _torch.as_plain_tensors():
            found = list(map(_GRAD, self._lying))
        grads = _dtensor.locals_of(found)
        offsets = list(map(_OFFSET, grads))
        memory = list(map(_POINTER, grads))  # other addresses after each backward, but in one tensor for each run
        return (
            offsets,
            list(map(_DTYPE, grads)),
            [grads[index].stride() for index in self._folded],
            list(map(sub, memory, map(memory.__getitem__, self._firsts))),
            list(map(_POINTER, _dtensor.locals_of(self._lying))),
            list(map(_POINTER, _dtensor.locals_of(self._single))),
            list(map(_OFFSET, _dtensor.locals_of(map(_GRAD, self._single)))),
            list(map(_DTYPE, map(_GRAD, self._beside))),
        )


class RunPlan:
    """The runs of an optimizer, and the facts from which they were found.

    Attributes:
        runs: each of two members or more, or of DTensors.
        alone: by param group, the parameters with a gradient that are in no run, and those outside of wrapped models.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, across_padding: bool, pieces: Pieces) -> None:
        """`pieces`: the published states of all parameters."""
        groups, states = optimizer.param_groups, optimizer.state
        self._sizes, self._listed = _listing(groups)
        self._across = _goes_across(groups, across_padding)
        candidates, self._absent, self.alone = _sorted_out(optimizer)
        self._beside = [key for key in states if not isinstance(key, torch.Tensor)]
        self._pieces = pieces
        for each in self._listed:
            if known := pieces.get(id(each)):  # without pieces that were replaced in its state
                state = states.get(each, {})
                pieces[id(each)] = {name: piece for name, piece in known.items() if state.get(name) is piece.view}
        self.runs, single = _divided(_runs_of(candidates, across_padding=self._across), self.alone)
        for run in self.runs:
            run.adopt(states, pieces)
        self._placement = _Placement(self.runs, single)
        self._counts: list[StepCounts] = []
        self._remember(states, publish=True)

    def holds(self, optimizer: torch.optim.Optimizer, *, across_padding: bool) -> bool:
        """Whether the runs are still valid: no fact from which they were found has changed.

        Makes no call of a Python function per parameter, except `hash`.
        """
        groups = optimizer.param_groups
        sizes, listed = _listing(groups)
        if sizes != self._sizes or not _same(listed, self._listed):
            return False
        if _goes_across(groups, across_padding) is not self._across:
            return False
        if not set(map(type, map(_GRAD, self._absent))) <= {NoneType} or not self._placement.holds():
            return False
        states = self._states_in(optimizer.state)
        if not _same(states, self._states) or not _same(_values(states), self._values):
            return False
        return [each.tensor._version for each in self._counts] == self._versions

    def begin(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """A stand-in that steps instead of `optimizer`. Precondition: the plan holds."""
        for run in self.runs:
            run.show_gradient()
        params: list[list[nn.Parameter]] = [list(each) for each in self.alone]
        for run in self.runs:
            params[run.group].append(run.parameter)
        made = clone_over(optimizer, params)
        made.state = defaultdict(dict, {run.parameter: run.state for run in self.runs})
        for key in chain(self._beside, *self.alone):
            if key in optimizer.state:
                made.state[key] = optimizer.state[key]
        self._given = dict(vars(made)), [dict(group) for group in made.param_groups]
        return made

    def end(self, stand_in: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
        """Transfer the states of `stand_in`, which has stepped, and its other changes to `optimizer`."""
        states = optimizer.state
        before = len(states)
        for run in self.runs:
            run.parameter.grad = None
            run.state = stand_in.state.pop(run.parameter, {})
        states.update(stand_in.state)
        attributes, settings = self._given
        optimizer.__dict__.update(_changed(vars(stand_in), attributes))
        for group, used, given in zip(optimizer.param_groups, stand_in.param_groups, settings, strict=True):
            group.update(_changed(used, given))
        with _torch.as_plain_tensors():
            torch.autograd.graph.increment_version(self._placement.members)  # a write to the shard does not do this
        changed = not _same(_values([run.state for run in self.runs]), self._run_values)
        if changed:
            for run in self.runs:
                run.check_divisible()
            for run in self.runs:
                run.publish(states, self._pieces)
        if len(states) != before:
            self._put_in_order(states)
        self._remember(states, publish=changed)

    def _put_in_order(self, states: States) -> None:
        """Sort `states` by param groups, as after steps without runs: programs that gather all states iterate in this
        order, and the members without elements differ between ranks."""
        ordered = {each: states[each] for each in self._listed if each in states}
        ordered |= {key: state for key, state in states.items() if key not in ordered}
        states.clear()
        states.update(ordered)

    def _states_in(self, states: States) -> list[State | None]:
        """The states of the members, in a fixed order."""
        members = self._placement.members
        if len(states) == len(self._keys) and _same(list(states), self._keys):  # so that none has to be hashed
            return list(states.values())
        return list(map(states.get, members))

    def _remember(self, states: States, *, publish: bool) -> None:
        """Record the published states; `publish`: and publish 0-dim states first; others already are."""
        if publish:
            named: dict[Any, list[FusedRun]] = {}
            for run in self.runs:
                for name, value in run.state.items():
                    if is_number(value):
                        named.setdefault((name, value.dtype, value.device), []).append(run)
            self._counts = [StepCounts(name, runs, states) for (name, _, _), runs in named.items()]
        for each in self._counts:
            each.publish()
        self._versions = [each.tensor._version for each in self._counts]
        if publish:
            self._keys = list(states) if len(states) == len(self._placement.members) else []
            self._states = self._states_in(states)
            self._values = _values(self._states)
            self._run_values = _values([run.state for run in self.runs])


# --- finding runs -----------------------------------------------------------------------------------------------------


def _listing(groups: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[nn.Parameter]]:
    lists = list(map(_PARAMS, groups))
    return list(map(len, lists)), list(chain.from_iterable(lists))


def _goes_across(groups: Iterable[Mapping[str, Any]], across_padding: bool) -> bool:
    # With eps=0 an update divides zero by zero.
    return across_padding and all([group.get("eps") != 0 for group in groups])


def _changed(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in given or value is not given[name]}


def _same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))


def _values(states: Iterable[State | None]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, filter(None, states))))


_known_spans: weakref.WeakKeyDictionary[FlatParamHandle, list[Span]] = weakref.WeakKeyDictionary()


def _spans(handle: FlatParamHandle) -> list[Span]:
    """The spans of the leaves of `handle` in its shard."""
    known = _known_spans.get(handle)
    if known is None:
        known = [handle.layout.span_in_shard(index, handle.rank) for index in range(len(handle.leaves))]
        _known_spans[handle] = known
    return known


def _sorted_out(
    optimizer: torch.optim.Optimizer,
) -> tuple[list[FusableParam], list[nn.Parameter], list[list[nn.Parameter]]]:
    """Candidates for runs; parameters of wrapped models without a gradient; and the others, by param group."""
    places: dict[int, tuple[FlatParamHandle, int]] = {}
    candidates: list[FusableParam] = []
    absent: list[nn.Parameter] = []
    alone: list[list[nn.Parameter]] = []
    for number, group in enumerate(optimizer.param_groups):
        alone.append([])
        for parameter in group["params"]:
            unit = registry.owner_of(parameter)
            if unit is not None and id(parameter) not in places:
                fusable = (each for each in unit.handles if each.has_memory and not each.face.is_flat)
                places |= {id(holder): (each, i) for each in fusable for i, holder in enumerate(each.face.holders)}
            if unit is None or id(parameter) not in places:
                alone[-1].append(parameter)
                continue
            if parameter.grad is None:
                absent.append(parameter)
                continue
            handle, index = places[id(parameter)]
            state = optimizer.state.get(parameter, {})
            span = _spans(handle)[index]
            candidates.append(FusableParam(parameter, number, handle, index, span, parameter.grad, state))
    return candidates, absent, alone


Kind = tuple[Any, ...] | None


def _runs_of(candidates: Sequence[FusableParam], *, across_padding: bool) -> Iterator[tuple[list[FusableParam], Kind]]:
    """`candidates` by run, with the kind that those of a run have in common; each one that is in no run alone."""
    numbers = _numbers(each.state for each in candidates)
    by_handle: dict[FlatParamHandle, dict[int, FusableParam]] = {}
    for each in candidates:
        members = by_handle.setdefault(each.handle, {})
        if each.index in members:  # listed twice, and to be stepped on twice
            yield [each], None
        else:
            members[each.index] = each
    for handle, members in by_handle.items():
        spans = _spans(handle)
        kinds = [_kind(members[index], numbers) if index in members else None for index in range(len(spans))]
        places = [ParamInShard(span, kind) for span, kind in zip(spans, kinds, strict=True)]
        # Members without elements here; DTensors have gradients nevertheless.
        empty: dict[Any, list[FusableParam]] = {}
        for index, each in members.items():
            if spans[index].is_empty:
                empty.setdefault(kinds[index] or index, []).append(each)
        # If each parameter is split separately, pieces of the first ranks are full: no rank steps over more.
        between = handle.layout.align - 1 if len(handle.layout.segments) == 1 else handle.layout.shard_numel
        for run in find_runs(places, padding=between if across_padding else 0):
            if run[0] in members:
                kind = kinds[run[0]]
                yield [*(members[index] for index in run), *empty.pop((*kind[:2], None) if kind else None, ())], kind
        yield from ((found, None if isinstance(kind, int) else kind) for kind, found in empty.items())


def _divided(
    found: Iterable[tuple[list[FusableParam], Kind]], alone: list[list[nn.Parameter]]
) -> tuple[list[FusedRun], list[nn.Parameter]]:
    """The runs, and the parameters in no run, which are added to `alone`, by group.

    torch accepts no list of DTensors and other tensors: a group has single DTensors, or runs of DTensors.
    """
    runs, single = list[FusedRun](), list[nn.Parameter]()
    spread = list[tuple[list[FusableParam], Kind]]()
    for members, kind in found:
        if members[0].handle.face.is_distributed:
            spread.append((members, kind))
        elif len(members) > 1:
            runs.append(FusedRun(members))
        else:
            single.append(members[0].parameter)
            alone[members[0].group].append(members[0].parameter)
    mixed = {members[0].group for members, kind in spread if kind is None}
    mixed |= {number for number, group in enumerate(alone) if any(map(_dtensor.is_dtensor, group))}
    for members, _ in spread:
        if members[0].group not in mixed:
            runs.append(FusedRun(members))
        else:
            single += [each.parameter for each in members]
            alone[members[0].group] += [each.parameter for each in members]
    return runs, single


def _numbers(states: Iterable[State]) -> dict[int, float]:
    """The values of 0-dim tensors, by their ids; each device is read once per dtype."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for state in states:
        for value in state.values():
            if is_number(value):
                alike.setdefault((value.dtype, value.device), []).append(value)
    return {
        id(tensor): number
        for same in alike.values()
        for tensor, number in zip(same, torch.stack(same).tolist(), strict=True)
    }


def _kind(candidate: FusableParam, numbers: Mapping[int, float]) -> Kind:
    """The facts that members of one run have in common: param group, states, and the storage of their gradients (None
    without elements here). None for a parameter that cannot be in a run."""
    parameter, span, place = candidate.parameter, candidate.span, candidate.handle.at_rest.views[candidate.index]
    own, grad = _part_of(parameter, parameter), _part_of(candidate.grad, parameter)
    if own is None or grad is None or not own.dim() or grad.stride() != own.stride():
        return None  # a state of a 0-dim parameter may be one for each element, or one for all
    lies = None
    if not span.is_empty:
        if own.data_ptr() != place.data_ptr() or own.numel() != place.numel():  # not the shard's: replaced
            return None
        lies = grad.untyped_storage().data_ptr(), grad.storage_offset() - span.start, grad.dtype
    elif not candidate.handle.face.is_distributed:
        return None
    facts = []
    for name, value in candidate.state.items():
        fact: Any
        if not isinstance(value, torch.Tensor):
            fact = type(value), value
            if not isinstance(value, PLAIN):
                return None
        else:
            part = value if is_number(value) else _part_of(value, parameter)
            if type(part) is not torch.Tensor or (part.dim() and part.shape != own.shape):
                return None
            fact = part.dtype, part.device, numbers.get(id(value))
        facts.append((name, fact))
    return candidate.group, tuple(facts), lies


def _part_of(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of `value`; None if it is not strided, of an unknown class, or not split like `parameter`."""
    if _dtensor.is_dtensor(parameter):
        part: Any = _dtensor.local_of(value) if _dtensor.are_split_alike(value, parameter) else None
    else:
        part = value
    known = value is parameter or type(part) is torch.Tensor
    return part if known and part is not None and part.layout is torch.strided else None
