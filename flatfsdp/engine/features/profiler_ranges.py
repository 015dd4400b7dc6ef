"""Ranges in a profiler's trace, by stage and unit: "flatfsdp::gather blocks.3".

[Note: profiler ranges] A range takes longer than many of the calls that it surrounds. So units and their reductions
open none until a profiler runs: then their methods are decorated, on the objects themselves, until it stops. This is
checked when a forward or a backward begins. torch's own profilers are detected; for external ones, the logger at DEBUG
switches the ranges on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, NamedTuple

from torch.profiler import record_function

from ...errors import ROOT, logger
from ..base import _torch
from ..base.events import Observer
from ..flat.reduction import Reduction
from ..flat.states import GATHERING
from ..runtime.backward_hooks import UnitHooks
from ..runtime.model import Model
from ..runtime.unit import Unit


class Range(NamedTuple):
    """The name of a range around a method, and the condition under which it is opened.

    Attributes:
        happens: whether the method will have an effect, for the object that has it.
        names: of the units, from this object and the arguments of the method.
        labels_reductions: whether the method returns reductions, which open ranges of their own.
    """

    stage: str
    happens: Callable[[Any], bool] = lambda owner: True
    names: Callable[..., Iterable[str]] = lambda unit, *args, **kwargs: (unit.position.name,)
    labels_reductions: bool = False


def _name_of_unit(owner: object, unit: Unit, *args: Any, **kwargs: Any) -> Iterable[str]:
    return (unit.position.name,)


def _name_of_hooks(owner: UnitHooks, *args: Any) -> Iterable[str]:
    return (unit.position.name,) if (unit := owner.unit()) is not None else ()


def _names_of_group(owner: object, units: Sequence[Unit], **kwargs: Any) -> Iterable[str]:
    return (unit.position.name for unit in units)


def _names_of_inputs(reduction: Reduction) -> Iterable[str]:
    return (each.handle.name for each in reduction.inputs)


STAGES_OF_UNITS: Mapping[str, Range] = {
    "launch_unshard": Range("gather", lambda unit: not unit.is_unsharded),
    "wait_unshard": Range("wait for gather", lambda unit: any(handle.state is GATHERING for handle in unit.handles)),
    "reshard": Range("reshard", lambda unit: not unit.is_sharded),
    "pick_up_grads": Range("gradient", lambda unit: any(grads.muted for grads in unit.grads)),
    "finalize_grads": Range("finalize gradients", lambda unit: any(grads.expected for grads in unit.grads)),
}
STAGES_OF_FORWARDS: Mapping[str, Range] = {"run": Range("forward", names=_name_of_unit)}
STAGES_OF_BACKWARDS: Mapping[str, Range] = {"before_backward": Range("before backward", names=_name_of_unit)}
STAGES_OF_HOOKS: Mapping[str, Range] = {"leaf_ready": Range("gradient", names=_name_of_hooks)}
STAGES_OF_GROUPS: Mapping[str, Range] = {
    "launch_coalesced": Range("gather", names=_names_of_group),
    "reduce": Range("reduce", names=_names_of_group, labels_reductions=True),
}
STAGES_OF_REDUCTIONS: Mapping[str, Range] = {
    "release_input": Range("wait for reduction", lambda reduction: not reduction.input_is_released, _names_of_inputs),
    "finish": Range("wait for all-reduce", lambda reduction: reduction.is_under_way, _names_of_inputs),
}


class ProfilerRanges(Observer):
    """Opens the ranges of one model while a profiler runs."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._checked: tuple[bool, int] | None = None  # whether a profiler ran, and the version of the model

    def step_begins(self, unit: Unit | None) -> bool:
        """Decorate methods, or stop that, if needed. Called at every step, and so without a loop over units."""
        wanted, model = _torch.profiler_runs() or logger.isEnabledFor(logging.DEBUG), self._model()
        if model is None or (wanted, model.setup.version) == self._checked:
            return False
        self._checked = wanted, model.setup.version
        # Some were of other models. Their `__dict__` is not asked: it would be made, and slow down every attribute.
        if all([(not isinstance(each.reshard, MethodType)) is wanted for each in model.units]):
            return False
        decorate = _decorate if wanted else _undecorate
        for each in model.units:
            decorate(each, STAGES_OF_UNITS)
            decorate(model.backwards.of_unit[each], STAGES_OF_HOOKS)
        decorate(model.forwards, STAGES_OF_FORWARDS)
        decorate(model.backwards, STAGES_OF_BACKWARDS)
        decorate(model.coalescer, STAGES_OF_GROUPS)
        return True


def _decorate(owner: object, stages: Mapping[str, Range]) -> None:
    for name, stage in stages.items():
        owner.__dict__[name] = _in_range(owner, name, stage)


def _undecorate(owner: object, stages: Mapping[str, Range]) -> None:
    for name in stages:
        owner.__dict__.pop(name, None)


def _in_range(owner: object, name: str, stage: Range) -> Callable[..., Any]:
    """The method of that `name`, in a range. Holds `owner` weakly: in a reference cycle it would live until garbage
    collection."""
    me, method = weakref.ref(owner), getattr(type(owner), name)

    def run(*args: Any, **kwargs: Any) -> Any:
        owner = me()
        names = stage.names(owner, *args, **kwargs)
        with _range(kwargs.get("method") or stage.stage, names) if stage.happens(owner) else nullcontext():
            result = method(owner, *args, **kwargs)
        if stage.labels_reductions:
            for reduction in result:
                _decorate(reduction, STAGES_OF_REDUCTIONS)
        return result

    return run


def _range(stage: str, units: Iterable[str]) -> AbstractContextManager[Any]:
    return record_function(f"flatfsdp::{stage} {'+'.join(dict.fromkeys(name or ROOT for name in units))}")
