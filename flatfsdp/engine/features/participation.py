"""Declaration of the parts of a model that a rank may leave out, depending on its data. [Note: conditional units]"""

from __future__ import annotations

from torch import nn

from ...api import check_bool
from ...errors import ConfigValueError, refuse_type
from ..config.schedule_options import Branch
from ..config.unit_options import NO_TARGETS, PrefetchTargets
from ..models.rest import check_outside
from ..models.walks import units_in
from ..runtime.model import model_of
from ..runtime.module_tree import nesting
from ..runtime.unit import Unit
from .conditional_units import attach_conditional_units

_FUNCTION = "ensure_unit_participation"


def ensure_unit_participation(module: nn.Module, *, any_order: bool = False, before: nn.Module | None = None) -> None:
    """Allow each rank to run any subset of the wrappers in `module`, depending on its data.

    Examples are an image tower and batches without images, experts that get no token, and layers of which each step
    uses a few. In every forward of the wrapper around `module`, all ranks gather all wrappers in it, in the order of
    registration, whether they run them or not. They do so in backward, too, where a rank contributes zeros to the
    gradients of wrappers that it did not run. Gradients are the mean over ranks, as without branches. If no rank
    computed a gradient for a wrapper, `.grad` stays as it was (None after `zero_grad()`), as in one process: optimizers
    then skip the step, with weight decay and momentum.

    Wrappers outside run as before: `module` runs in the forward of the wrapper around it, and a rank runs all of its
    wrappers before the next wrapper outside of it that is registered later, or that is passed as `before`. If a rank
    runs one of them at another time, an error is raised on all ranks. Some trained parameters must be outside of
    `module`: a rank that runs none of it would have no graph for a backward.

    The cost is that of a model that always runs all of it: each wrapper is gathered in forward and in backward (frozen
    ones, too; `set_unshard_in_backward(False)` avoids the latter for a frozen tower at the model's beginning), and its
    gradients are reduced, as zeros after `torch.autograd.grad`. Once ranks have used different wrappers, each backward
    ends with one more collective, of a byte per parameter, for which the host of a rank waits that ran fewer. In order,
    memory is needed for one wrapper at a time; in any order all of `module` is gathered when a rank runs its first
    wrapper, and freed after the last one, in backward as well, with the memory of its gradients. Activation
    checkpointing of it requires `any_order=True` and `use_reentrant=False`. Units inside must not share parameters with
    other units.

    Without this call, a rank that leaves out a wrapper, or runs another one first, raises an error, as do the others.
    Otherwise ranks that all leave out the same wrappers (layers dropped by a common seed) would gather them in every
    step, and step on zero gradients, unlike one process.

    Call it on every rank, once the whole model is wrapped; later calls replace earlier ones for the same part. It
    applies to copies and pickles of the model, too.

    Args:
        module: a wrapper or a module with wrappers inside, such as a `ModuleList`. All of them take part.
        any_order: whether its wrappers may run several times and in a different order than they are registered;
            otherwise, each may run at most once, in that order.
        before: a module outside, which every rank runs, whose first wrapper is the next to run after `module`; inside
            the same wrapper. None for the wrapper that is registered next.

    Raises:
        ConfigTypeError: an argument is of another type.
        ConfigValueError: no wrapper inside, or the outermost one; a part of a declared `module`; `before` is not in the
            wrapper around `module`, or is a branch itself.
        UsageError: inside a forward or a backward.
    """
    for name, value, optional in (("module", module, False), ("before", before, True)):
        if not (isinstance(value, nn.Module) or (optional and value is None)):
            refuse_type(f"{_FUNCTION}: {name}", value, "a module that is wrapped or contains wrapped modules")
    check_bool(f"{_FUNCTION}: any_order", any_order)
    units = _wrapped_in(module, "module")
    check_outside(units[0], _FUNCTION)
    _check_whole(module, units)
    targets = NO_TARGETS if before is None else PrefetchTargets([_next_of(units, before)])
    branch = Branch(any_order)
    for unit in units:
        model_of(unit).setup.set_options(unit, branch_before=targets)
        model_of(unit).setup.set_schedule(unit, branch=branch)
    attach_conditional_units(model_of(units[0]))


def _wrapped_in(module: nn.Module, argument: str) -> list[Unit]:
    units = units_in(module)
    if not units:
        raise ConfigValueError(
            f"{_FUNCTION}: {argument}: got a {type(module).__name__} without any FullyShardedDataParallel inside. It "
            "is part of the unit around it and is gathered whenever that unit runs: wrap the modules that should be "
            "gathered separately, or do not declare it"
        )
    return units


def _check_whole(module: nn.Module, units: list[Unit]) -> None:
    model = model_of(units[0])
    if model.outermost in units:
        raise ConfigValueError(
            f"{_FUNCTION}: module: got the outermost FullyShardedDataParallel ({model.outermost.entries.class_name}), "
            "which every rank runs, or a part of a model that is not completely wrapped yet. Wrap the whole model, "
            "then pass the part that depends on a rank's data"
        )
    known = {unit.options.schedule.branch for unit in units} - {None}
    split = [unit for unit in model.units if unit.options.schedule.branch in known and unit not in units]
    if split:
        raise ConfigValueError(
            f"{_FUNCTION}: module: got a {type(module).__name__} inside a part that was declared before, with unit "
            f"{split[0].label}. Declare only the outer part"
        )


def _next_of(units: list[Unit], before: nn.Module) -> Unit:
    """The next unit to run after the branch of `units`."""
    inside = set(_wrapped_in(before, "before"))
    around = dict(nesting(model_of(units[0]).outermost))
    first = next((unit for unit in around if unit in inside), None)
    outer = next(around[unit] for unit in around if unit in units)
    above = around.get(first) if first is not None else None
    while above is not None and above is not outer:
        above = around.get(above)
    if first is None or above is None or first in units or first.options.schedule.branch is not None:
        raise ConfigValueError(
            f"{_FUNCTION}: before: got a {type(before).__name__}. Accepted: a module inside the wrapper around the "
            "part, but outside of the part, that every rank runs and that contains a FullyShardedDataParallel"
        )
    return first
