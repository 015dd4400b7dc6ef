"""Public function for optimizers over original parameters to step as fast as over flat ones. [Note: flat steps]"""

from __future__ import annotations

import weakref
from collections import deque
from functools import wraps
from itertools import repeat
from typing import Any

import torch
from torch.profiler import record_function

from ....api import check_bool
from ....errors import UsageError, refuse_type
from ...base import _torch
from ...device.fake_tensors import is_memoryless
from ...runtime import param_registry as registry
from ...runtime.optimizer_hooks import is_at_work
from .state import Pieces
from .stepper import RunPlan

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

_stepping_flat: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _drop_grads_quickly(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer.zero_grad()` set gradients to None without reading them first, which would take longer.

    Not for a class that overrides `zero_grad` or `__getstate__`."""
    this, kind, torchs = weakref.ref(optimizer), type(optimizer), torch.optim.Optimizer
    dropped = torchs.zero_grad
    if (kind.zero_grad, kind.__getstate__) != (dropped, torchs.__getstate__) or "zero_grad" in vars(optimizer):
        return

    @wraps(dropped)
    def zero_grad(set_to_none: bool = True) -> None:
        found = this()
        assert found is not None
        if not set_to_none:
            dropped(found, set_to_none)
        else:
            with record_function(f"Optimizer.zero_grad#{kind.__name__}.zero_grad"), _torch.as_plain_tensors():
                for group in found.param_groups:
                    deque(map(setattr, group["params"], repeat("grad"), repeat(None)), 0)

    vars(optimizer)["zero_grad"] = zero_grad  # not in pickles and copies


class FusedSteps:
    """Flat steps of one optimizer; returned by `fuse_optimizer_steps`.

    It is constructed only there, and does not keep the optimizer alive. `across_padding`: the optimizer does not change
    zeros with gradients of zero.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, across_padding: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._across_padding = across_padding
        # By id of the unit that steps in a backward; None: of all parameters.
        self._plans: dict[int | None, RunPlan] = {}
        self._pieces: Pieces = {}
        self._stand_in: torch.optim.Optimizer | None = None
        self._plan: RunPlan | None = None  # of the last step; None if that had none
        self._planned = 0  # how often runs were found
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
        return sum(len(run.members) for run in self._plan.runs) if self._plan is not None else 0

    def remove(self) -> None:
        """Let the optimizer step on each parameter separately from now on."""
        for hook in self._hooks:
            hook.remove()
        self._forget()
        optimizer = self._optimizer()
        if optimizer is not None:
            _stepping_flat.discard(optimizer)
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
            self._plan = plan
            self._stand_in = plan.begin(optimizer)
        return (self._stand_in, *args[1:]), kwargs

    def _plan_of(self, optimizer: torch.optim.Optimizer) -> RunPlan:
        key = None
        if is_at_work(optimizer):
            key = id(registry.owner_of(optimizer.param_groups[0]["params"][0]))
        self._plans = {each: plan for each, plan in self._plans.items() if (each is None) is (key is None)}
        plan = self._plans.pop(key, None)
        if plan is None or not plan.holds(optimizer, across_padding=self._across_padding):
            plan = None  # frees its tensors before anything is copied
            if key is None:
                held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
                for gone in self._pieces.keys() - held:
                    del self._pieces[gone]
            plan = RunPlan(optimizer, across_padding=self._across_padding, pieces=self._pieces)
            self._planned += 1
        self._plans[key] = plan
        return plan

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A post-hook of `optimizer.step()`."""
        stand_in, self._stand_in = self._stand_in, None
        if stand_in is not None and self._plan is not None:
            with torch.no_grad():
                self._plan.end(stand_in, optimizer)

    def _forget(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop all plans and published states; also a post-hook of `optimizer.load_state_dict()`."""
        self._plans.clear()
        self._pieces.clear()
        self._stand_in = self._plan = None


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
    kind = type(optimizer)
    if kind not in ELEMENTWISE and not elementwise:
        known = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
        raise UsageError(
            f"{name}(): {kind.__module__}.{kind.__qualname__} is not known to be element-wise, as torch's {known} "
            "are; an optimizer that uses norms, rows or matrices of parameters would compute something else. If it is "
            "element-wise, pass fuse_optimizer_steps(optimizer, elementwise=True)"
        )
    if not {"state", "param_groups"} <= vars(optimizer).keys():
        raise UsageError(f"{name}(): this {kind.__name__} has no state of its own; pass the optimizer that it contains")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError(
            f"{name}(): a {kind.__name__} with differentiable=True must step on each parameter separately, in its graph"
        )
    if optimizer in _stepping_flat:
        raise UsageError(f"{name}(): this {kind.__name__} is already fused; call remove() of its FusedSteps first")
    _stepping_flat.add(optimizer)
    _drop_grads_quickly(optimizer)
    return FusedSteps(optimizer, across_padding=kind in ELEMENTWISE)
