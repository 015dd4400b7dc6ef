"""Public function for optimizers to step on local tensors: plain ones in memory of the shards.

[Note: fused steps] While the optimizer steps, a stand-in of it holds local tensors of parameters, those of adjacent
parameters as one (a *run*) with a joint gradient and a joint state if they are treated alike: one param group, equal
step counts, adjacent gradients. An elementwise optimizer then computes the same numbers, in one call in place of many,
and without the dispatch of DTensors. A DTensor that can be with no other is a run of one.

Programs see single parameters at all times: the optimizer is the same object, its param groups list the same
parameters, and its state of each has views of the joint state, and an element of its own for every 0-dim tensor (a step
count). So it can be read, saved, loaded and replaced as before. Before each step the facts by which runs were found are
compared with the present ones; after any change, runs are found again.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import wraps
from itertools import accumulate, chain, repeat
from operator import attrgetter, is_, itemgetter, sub
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from ...api import check_bool
from ...errors import UsageError, refuse_type
from ..base import _dtensor, _torch
from ..base.overrides import is_memoryless
from ..flat.faces import assign_grad
from ..flat.flat_param import FlatParamHandle
from ..layout.layout import Span
from ..models import param_registry as registry
from ..state.optim.optimizer_clone import Settings, clone_over, set_changes

ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""The optimizers of torch that update each element independently of the others."""

State = dict[str, Any]  # of one parameter
States = dict[Any, State]  # of an optimizer

_PLAIN = (NoneType, bool, int, float, str)  # immutable: several states may hold the same object
_GRAD, _DTYPE, _VERSION, _PARAMS = attrgetter("grad"), attrgetter("dtype"), attrgetter("_version"), itemgetter("params")
_POINTER, _OFFSET, _STRIDE = torch.Tensor.data_ptr, torch.Tensor.storage_offset, torch.Tensor.stride

_fused: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` steps on parameters of a shard together."""
    return optimizer in _fused


def _drop_grads_quickly(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer.zero_grad()` set gradients to None without reading them first, which would take longer.

    Not for a class that overrides `zero_grad` or `__getstate__`."""
    this, cls, torchs = weakref.ref(optimizer), type(optimizer), torch.optim.Optimizer
    dropped = torchs.zero_grad
    if (cls.zero_grad, cls.__getstate__) != (dropped, torchs.__getstate__) or "zero_grad" in vars(optimizer):
        return

    @wraps(dropped)
    def zero_grad(set_to_none: bool = True) -> None:
        found = this()
        assert found is not None
        if not set_to_none:
            dropped(found, set_to_none)
        else:
            with record_function(f"Optimizer.zero_grad#{cls.__name__}.zero_grad"), _torch.as_plain_tensors():
                for group in found.param_groups:
                    deque(map(setattr, group["params"], repeat("grad"), repeat(None)), 0)

    vars(optimizer)["zero_grad"] = zero_grad  # not in pickles and copies


class _FusedRun:
    """Adjacent parameters of a shard as one plain tensor.

    Attributes:
        members: the parameters, in order; group: the number of their param group.
        facts: what all of them have in common; None for a parameter that has to be stepped on itself.
        stop: the end of the last one in the shard.
        tensor: in the memory of all of them, padding between them included; set by `join`.
        state: the optimizer's state of `tensor`.
        counts: for each 0-dim value of it, an element for each member, since programs may change each separately.
    """

    tensor: nn.Parameter

    def __init__(self, parameter: nn.Parameter, group: int, span: Span, facts: tuple[Any, ...] | None) -> None:
        self.members, self.group, self.facts = [parameter], group, facts
        self._starts, self.stop = [span.start], span.stop
        self.state: State = {}
        self.counts: dict[str, torch.Tensor] = {}
        self._published: State = {}  # the values of `state` that the members' states show

    def add(self, parameter: nn.Parameter, span: Span) -> None:
        """Add the next member."""
        self.members.append(parameter)
        self._starts.append(span.start)
        self.stop = span.stop

    def join(self, shard: torch.Tensor, states: States) -> None:
        """Set `tensor` to a view of `shard`, and `state` to that of the members, whose `states` show it from now on."""
        first = self._starts[0]
        self.tensor = nn.Parameter(shard.narrow(0, first, self.stop - first))
        pairs = zip(_dtensor.locals_of(self.members), self._starts, strict=True)
        self._extents = [(each.shape, each.stride(), start - first) for each, start in pairs]
        for name, value in [*states.get(self.members[0], {}).items()]:
            self.state[name] = value
            if isinstance(value, torch.Tensor) and value.dim():
                values = _dtensor.locals_of(states[each][name] for each in self.members)
                self.state[name] = values[0].new_zeros(self.tensor.shape)
                for view, each in zip(self._split(self.state[name]), values, strict=True):
                    view.copy_(each)
                del value, values, each  # so that they are freed before the next are copied
            elif _is_number(value):
                self.state[name] = value.clone()
            self._put(name, states)

    def show_gradient(self) -> None:
        """Set `tensor.grad` to a view of the memory of the members' gradients."""
        (grad,) = _dtensor.locals_of([self.members[0].grad])
        assign_grad(self.tensor, grad.as_strided(self.tensor.shape, (1,), grad.storage_offset()))

    def publish(self, states: States) -> None:
        """Update the members' `states` with what the step has replaced in `state`.

        Raises:
            UsageError: a value is neither a number nor a tensor with one element per element of `tensor`.
        """
        for name, value in self.state.items():
            if self._published.get(name, self) is not value:
                self._put(name, states)
        for name in self._published.keys() - self.state.keys():
            del self._published[name]
            self.counts.pop(name, None)
            for each in self.members:
                states[each].pop(name, None)

    def _put(self, name: str, states: States) -> None:
        value = self.state[name]
        values: Iterable[Any] = repeat(value, len(self.members))
        if _is_number(value):
            self.counts[name] = value.expand(len(self.members)).clone()
            values = self.counts[name].unbind()
        elif isinstance(value, torch.Tensor) and value.shape == self.tensor.shape:
            values = map(_like, self._split(value), self.members)
        elif not isinstance(value, _PLAIN):
            found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise UsageError(
                f"fuse_optimizer_steps(): the optimizer keeps {name!r} ({found}) for {self.tensor.numel()} elements of "
                f"{len(self.members)} parameters; expected a number, or a tensor with one element for each of them. It "
                "cannot step on several parameters at once: do not use fuse_optimizer_steps() with it"
            )
        for each, own in zip(self.members, values, strict=True):
            states[each][name] = own
        self._published[name] = value

    def _split(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The members' elements of `value`, which is shaped like `tensor`, as views."""
        offset = value.storage_offset()
        return [value.as_strided(shape, stride, offset + start) for shape, stride, start in self._extents]


class _Plan:
    """The runs of an optimizer, and the facts from which they were found.

    Attributes:
        runs: each of two members or more, or of DTensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._listing = _listing(optimizer)
        found, self._absent, self._alone = _find_runs(optimizer)
        # Torch accepts no list of DTensors and other tensors: a group has runs of DTensors, or single ones.
        mixed = {run.group for run, _ in found if run.facts is None and _dtensor.is_dtensor(run.members[0])}
        mixed |= {number for number, alone in enumerate(self._alone) if any(map(_dtensor.is_dtensor, alone))}
        self.runs: list[_FusedRun] = []
        for run, handle in found:
            if run.group not in mixed if _dtensor.is_dtensor(run.members[0]) else len(run.members) > 1:
                self.runs.append(run)
                run.join(handle.shard, optimizer.state)
            else:
                self._alone[run.group] += run.members
        self.members = [each for run in self.runs for each in run.members]
        self._watched = [each for run, _ in found for each in run.members]
        starts = accumulate((len(run.members) for run, _ in found), initial=0)
        self._firsts = [start for start, (run, _) in zip(starts, found, strict=False) for _ in run.members]
        self._facts = self._now()
        self._remember(optimizer.state, publish=True)

    def holds(self, listing: tuple[list[int], list[nn.Parameter]], states: States) -> bool:
        """Whether no fact from which the runs were found has changed. Calls no Python function for each parameter but
        `hash`."""
        (sizes, listed), (expected, known) = listing, self._listing
        now = self._states_in(states)
        return (
            sizes == expected
            and _same(listed, known)
            and self._facts is not None
            and self._now() == self._facts
            and _same(now, self._states)
            and _same(_values(now), self._values)
            and list(map(_VERSION, self._counts)) == self._versions
        )

    def _now(self) -> tuple[list[Any], ...] | None:
        """Where parameters and gradients lie; None if a gradient is missing, or has no strides."""
        with _torch.as_plain_tensors():
            found, absent = list(map(_GRAD, self._watched)), list(map(_GRAD, self._absent))
        grads = _dtensor.locals_of(found)
        if not set(map(type, absent)) <= {NoneType} or not set(map(type, grads)) <= {torch.Tensor}:
            return None
        try:
            memory = list(map(_POINTER, grads))  # other addresses after each backward, but in one tensor for each run
            return (
                list(map(sub, memory, map(memory.__getitem__, self._firsts))),
                list(map(_OFFSET, grads)),
                list(map(_STRIDE, grads)),
                list(map(_DTYPE, grads)),
                list(map(_POINTER, _dtensor.locals_of(self._watched))),
            )
        except RuntimeError:  # a sparse gradient
            return None

    def begin(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """A stand-in that steps instead of `optimizer`. Precondition: the plan holds."""
        params: list[list[nn.Parameter]] = [[*each] for each in self._alone]
        for run in self.runs:
            run.show_gradient()
            params[run.group].append(run.tensor)
        made = clone_over(optimizer, params)
        made.state = defaultdict(dict, {run.tensor: run.state for run in self.runs})
        for key in chain((key for key in optimizer.state if not isinstance(key, torch.Tensor)), *self._alone):
            if key in optimizer.state:
                made.state[key] = optimizer.state[key]
        self._given = Settings(made)
        return made

    def end(self, made: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
        """Transfer the states of the stand-in `made`, which has stepped, and its other changes to `optimizer`."""
        states = optimizer.state
        before = len(states)
        for run in self.runs:
            run.tensor.grad = None
            run.state = made.state.pop(run.tensor, {})
        states.update(made.state)
        set_changes(optimizer, self._given.changes(made))
        with _torch.as_plain_tensors():
            torch.autograd.graph.increment_version(self.members)  # a write to the shard does not do this
        changed = not _same(_values([run.state for run in self.runs]), self._run_values)
        for run in self.runs if changed else ():
            run.publish(states)
        if len(states) != before:
            # As after steps without runs: programs that gather all states iterate in this order, and the members
            # without elements differ between ranks.
            ordered = {each: states.pop(each) for each in self._listing[1] if each in states} | states
            states.clear()
            states.update(ordered)
        for run in self.runs:
            for name, counts in run.counts.items():
                counts.copy_(run.state[name])
        self._remember(states, publish=changed)

    def _states_in(self, states: States) -> list[State | None]:
        return list(map(states.get, self.members))

    def _remember(self, states: States, *, publish: bool) -> None:
        """Record all that programs can see and change; `publish`: what is published now, other than step counts."""
        if publish:
            self._states = self._states_in(states)
            self._values = _values(self._states)
            self._run_values = _values([run.state for run in self.runs])
            self._counts = [counts for run in self.runs for counts in run.counts.values()]
        self._versions = list(map(_VERSION, self._counts))


class FusedSteps:
    """Fused steps of one optimizer; returned by `fuse_optimizer_steps`.

    It is constructed only there, and does not keep the optimizer alive.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        # By the first parameter: in a backward, each unit is stepped on by itself.
        self._plans: dict[int, _Plan] = {}
        self._plan: _Plan | None = None  # of the last step, if it had one
        self._stand_in: torch.optim.Optimizer | None = None
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._forget),
        )

    @property
    def runs(self) -> int:
        """The number of tensors that the last step used instead of parameters; 0 before the first."""
        return len(self._plan.runs) if self._plan is not None else 0

    @property
    def members(self) -> int:
        """The number of parameters that these tensors replaced."""
        return len(self._plan.members) if self._plan is not None else 0

    def remove(self) -> None:
        """Let the optimizer step on each parameter separately from now on."""
        for hook in self._hooks:
            hook.remove()
        self._forget()
        optimizer = self._optimizer()
        if optimizer is not None:
            _fused.discard(optimizer)
            if getattr(vars(optimizer).get("zero_grad"), "__wrapped__", None) is torch.optim.Optimizer.zero_grad:
                del vars(optimizer)["zero_grad"]

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """A pre-hook of `optimizer.step()`: replaces the optimizer by its stand-in if there are runs."""
        if self._stand_in is not None:  # that step failed
            self._forget()
        self._plan = None
        closure = len(args) > 1 or any(value is not None for value in kwargs.values())  # it computes the gradients
        if closure or is_memoryless():
            return None
        with torch.no_grad():
            plan = self._plan_of(optimizer)
            if not plan.runs:
                return None
            self._plan, self._stand_in = plan, plan.begin(optimizer)
        return (self._stand_in, *args[1:]), kwargs

    def _plan_of(self, optimizer: torch.optim.Optimizer) -> _Plan:
        listing = _, listed = _listing(optimizer)
        key = id(listed[0]) if listed else 0
        plan = self._plans.pop(key, None)
        if plan is None or not plan.holds(listing, optimizer.state):
            plan = None  # frees its tensors before anything is copied
            ids = set(map(id, listed))
            self._plans = {k: each for k, each in self._plans.items() if ids.isdisjoint(map(id, each.members))}
            plan = _Plan(optimizer)
        self._plans[key] = plan
        return plan

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A post-hook of `optimizer.step()`."""
        made, self._stand_in = self._stand_in, None
        if made is not None and self._plan is not None:
            with torch.no_grad():
                self._plan.end(made, optimizer)

    def _forget(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop all plans; also a post-hook of `optimizer.load_state_dict()`."""
        self._plans.clear()
        self._stand_in = self._plan = None


def _listing(optimizer: torch.optim.Optimizer) -> tuple[list[int], list[nn.Parameter]]:
    """Whether padding may lie inside of runs, and the sizes of the param groups; and all parameters."""
    groups = optimizer.param_groups
    lists = list(map(_PARAMS, groups))
    # Zeros stay zeros in torch's optimizers, but with eps=0 an update divides zero by zero.
    across = type(optimizer) in ELEMENTWISE and all([group.get("eps") != 0 for group in groups])
    return [across, *map(len, lists)], list(chain.from_iterable(lists))


def _find_runs(
    optimizer: torch.optim.Optimizer,
) -> tuple[list[tuple[_FusedRun, FlatParamHandle]], list[nn.Parameter], list[list[nn.Parameter]]]:
    """The runs, of one parameter and more, with their handles; parameters of wrapped models without a gradient; and
    the others, by param group."""
    (across, *_), listed = _listing(optimizer)
    if len(set(map(id, listed))) < len(listed):  # one is listed twice, and is stepped on twice
        return [], [], [[*group["params"]] for group in optimizer.param_groups]
    owners: dict[int, tuple[FlatParamHandle, int]] = {}
    held: dict[FlatParamHandle, dict[int, tuple[nn.Parameter, int]]] = {}
    absent, alone = list[nn.Parameter](), [list[nn.Parameter]() for _ in optimizer.param_groups]
    for number, group in enumerate(optimizer.param_groups):
        for each in group["params"]:
            unit = registry.owner_of(each) if id(each) not in owners else None
            for handle in unit.handles if unit is not None else ():
                if handle.gathers_elements and not handle.face.shares_holder:
                    owners |= {id(holder): (handle, i) for i, holder in enumerate(handle.face.holders)}
            if id(each) not in owners or not (each.numel() or _dtensor.is_dtensor(each)):
                alone[number].append(each)
            elif each.grad is None:
                absent.append(each)
            else:
                handle, index = owners[id(each)]
                held.setdefault(handle, {})[index] = each, number
    found: list[tuple[_FusedRun, FlatParamHandle]] = []
    for handle, members in held.items():
        last: _FusedRun | None = None
        for index in range(len(handle.leaves)):
            span = handle.layout.span_in_shard(index, handle.rank)
            if index not in members:
                last = None if not span.is_empty else last
                continue
            parameter, number = members[index]
            run = _FusedRun(parameter, number, span, _facts_of(parameter, number, optimizer.state, handle, index))
            joins = last is not None and last.facts == run.facts is not None and (across or last.stop == span.start)
            if joins and last is not None and not span.is_empty:
                last.add(parameter, span)
            else:
                found.append((run, handle))
                last = run if not span.is_empty else last
    return found, absent, alone


def _facts_of(
    parameter: nn.Parameter, number: int, states: States, handle: FlatParamHandle, index: int
) -> tuple[Any, ...] | None:
    """The facts that members of one run have in common: param group, states, and the storage of their gradients. None
    for a parameter that cannot be in a run."""
    span, view = handle.layout.span_in_shard(index, handle.rank), handle.at_rest.views[index]
    own, grad = _dtensor.locals_of([parameter])[0], _local_of(parameter.grad, parameter)
    # The state of a parameter without dimensions may be one for its element, or one for all elements.
    if grad is None or grad.stride() != own.stride() or not own.dim():
        return None
    if not span.is_empty and (own.data_ptr(), own.numel()) != (view.data_ptr(), view.numel()):
        return None  # it was replaced
    facts: list[Any] = []
    for name, value in states.get(parameter, {}).items():
        local = value if _is_number(value) else _local_of(value, parameter)
        if local is not None and (_is_number(value) or local.shape == own.shape):
            facts.append((name, local.dtype, local.device, local.item() if _is_number(value) else None))
        elif isinstance(value, _PLAIN):
            facts.append((name, type(value), value))
        else:
            return None
    lies = grad.untyped_storage().data_ptr(), grad.storage_offset() - span.start, grad.dtype
    return number, tuple(facts), lies


def _local_of(value: Any, parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of `value`; None if it is not a strided tensor, or not split like `parameter`."""
    if _dtensor.is_dtensor(parameter):
        value = _dtensor.local_of(value) if _dtensor.are_split_alike(value, parameter) else None
    return value if type(value) is torch.Tensor and value.layout is torch.strided else None


def _is_number(value: object) -> bool:
    """Whether `value` is a 0-dim tensor: one number for a whole parameter."""
    return isinstance(value, torch.Tensor) and not value.dim()


def _like(local: torch.Tensor, parameter: Any) -> Any:
    """`local`, this rank's, as a state of `parameter`."""
    if not _dtensor.is_dtensor(parameter):
        return local
    spec = _dtensor.spec_of(parameter)
    if local.dtype != parameter.dtype:
        spec = _dtensor.new_spec(spec.mesh, spec.placements, spec.shape, spec.stride, local.dtype)
    return _dtensor.dtensor(local, spec)


def _same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))


def _values(states: Iterable[State | None]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, filter(None, states))))


def fuse_optimizer_steps(optimizer: torch.optim.Optimizer, *, elementwise: bool = False) -> FusedSteps:
    """Let `optimizer.step()` take the parameters of a shard together: some long tensors in place of many short ones.

    For `use_orig_params=True` and `fully_shard`. An optimizer computes for microseconds on a small parameter, after
    tens of microseconds of overhead: with thousands of parameters that is most of its time. After this call, parameters
    that are adjacent in a unit's shard, are in one param group and have equal step counts are one tensor while it
    steps. Flat parameters (`use_orig_params=False`) are such tensors already: they, and parameters outside of wrapped
    models, step as before.

    Nothing else changes, except that `zero_grad()` takes less time. `optimizer` is the same object; its param groups
    list the same parameters, its state has an entry for each of them, of the same shapes, in the same memory: state
    dicts, checkpoints, schedulers, gradient scalers, clipping and hooks work as before. It may be called before the
    first step or later, before or after a checkpoint is loaded. The next step detects changes of groups, gradients that
    are None, and states that were loaded or replaced. A step with a closure is taken for each parameter separately.
    With `optimizer_in_backward` the parameters of each unit are fused.

    States of DTensors are DTensors with the same placements. In a param group with DTensors that cannot be fused, they
    step one by one: torch accepts no list that mixes DTensors and plain tensors.

    Results are bitwise equal in float32 and float64, with `foreach` or without. In bfloat16 and float16 (of the
    parameters themselves, not of `MixedPrecision`) and with `fused=True` on a CPU the last elements of a parameter,
    where vector instructions end, may be rounded differently in the last bit. Memory is the same, too, except for a few
    bytes per parameter; temporary tensors of the step have the length of a unit's shard, not of a parameter.

    A tensor of the state is a view of a longer one: `torch.save` of that tensor alone writes the longer one; clone it
    first.

    No communication. Copies and pickles of the optimizer step on each parameter separately.

    Args:
        optimizer: over parameters of models that were wrapped before. One of torch's AdamW, Adam, SGD, Adadelta,
            Adagrad, Adamax, ASGD, NAdam, RAdam, RMSprop and Rprop, or see `elementwise`.
        elementwise: asserts that another optimizer is element-wise: the new value of an element depends only on its
            value, gradient and state, on the settings of its param group and on numbers shared by all parameters of a
            group with equal step counts. Not true of LAMB, Adafactor, Muon or Shampoo.

    Raises:
        ConfigTypeError: `optimizer` is not a `torch.optim.Optimizer`, or `elementwise` is not a bool.
        UsageError: another optimizer, without `elementwise=True`; an optimizer that wraps another one; one whose steps
            are already fused; one that is `differentiable`.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> model = flatfsdp.FullyShardedDataParallel(torch.nn.Linear(4, 4), use_orig_params=True)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        >>> steps = flatfsdp.fuse_optimizer_steps(optimizer)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> steps.runs, steps.members, optimizer.state[model.weight]["exp_avg"].shape
        (1, 2, torch.Size([4, 4]))
    """
    name = "fuse_optimizer_steps"
    if not isinstance(optimizer, torch.optim.Optimizer):
        refuse_type(f"{name}: optimizer", optimizer, "an optimizer of torch.optim, or a class derived from it")
    check_bool(f"{name}: elementwise", elementwise)
    cls = type(optimizer)
    if cls not in ELEMENTWISE and not elementwise:
        known = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
        raise UsageError(
            f"{name}(): {cls.__module__}.{cls.__qualname__} is not known to be element-wise, as torch's {known} "
            "are; an optimizer that uses norms, rows or matrices of parameters would compute something else. If it is "
            "element-wise, pass fuse_optimizer_steps(optimizer, elementwise=True)"
        )
    if not {"state", "param_groups"} <= vars(optimizer).keys():
        raise UsageError(f"{name}(): this {cls.__name__} has no state of its own; pass the optimizer that it contains")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError(
            f"{name}(): a {cls.__name__} with differentiable=True must step on each parameter separately, in its graph"
        )
    if optimizer in _fused:
        raise UsageError(f"{name}(): this {cls.__name__} is already fused; call remove() of its FusedSteps first")
    _fused.add(optimizer)
    _drop_grads_quickly(optimizer)
    return FusedSteps(optimizer)
