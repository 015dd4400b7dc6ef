"""Ranges in a profiler's trace, by stage and unit: "flatfsdp::gather blocks.3".

[Note: labels] A range costs more than much of what it would surround. So units and their reductions open none, until
somebody looks: then methods of each are decorated, on the objects themselves, until nobody looks any more. Whether
somebody looks is asked where a forward or a backward begins. torch's own profilers are seen; for those that attach from
outside, the logger at DEBUG says so.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.profiler import record_function

from ...errors import logger
from ..base import _torch
from ..base.events import Observer
from ..flat.reduction import Reduction
from ..flat.states import GATHERING

if TYPE_CHECKING:
    from ..runtime.model import Root
    from ..runtime.unit import Unit


class Stage(NamedTuple):
    """What a range is called and tells.

    Attributes:
        of: the units that it names, by the object whose method it surrounds, and what that is given.
        happens: whether anything is about to happen.
        labels_reductions: whether the method returns reductions, which open ranges of their own.
    """

    stage: str
    of: Callable[..., str]
    happens: Callable[[Any], bool] = lambda owner: True
    labels_reductions: bool = False


def _name(unit: Unit, *args: Any, **kwargs: Any) -> str:
    return unit.name or "<root>"


def _names(units: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(name or "<root>" for name in units))


def _names_of_units(owner: object, units: Sequence[Unit], **kwargs: Any) -> str:
    return _names(unit.name for unit in units)


def _names_of_parts(reduction: Reduction) -> str:
    return _names(part.handle.name for part in reduction.parts)


STAGES_OF_UNITS: Mapping[str, Stage] = {
    "run": Stage("forward", _name),
    "launch_unshard": Stage("gather", _name, lambda unit: not unit.is_unsharded),
    "wait_unshard": Stage("wait for gather", _name, lambda unit: any(h.state is GATHERING for h in unit.handles)),
    "reshard": Stage("reshard", _name, lambda unit: not unit.is_sharded),
    "before_backward": Stage("before backward", _name),
    "leaf_ready": Stage("gradient", _name),
    "reduce": Stage("reduce", _name, labels_reductions=True),
    "finalize_grads": Stage("settle", _name, lambda unit: any(grads.expected for grads in unit.grads)),
}
STAGES_OF_GROUPS: Mapping[str, Stage] = {
    "launch_coalesced": Stage("gather", _names_of_units),
    "reduce_coalesced": Stage("reduce", _names_of_units, labels_reductions=True),
}
STAGES_OF_REDUCTIONS: Mapping[str, Stage] = {
    "release_input": Stage("wait for reduction", _names_of_parts, lambda reduction: not reduction.input_is_released),
    "finish": Stage("wait for all-reduce", _names_of_parts, lambda reduction: reduction.is_under_way),
}


class ProfilerRanges(Observer):
    """Labels what a model does whenever somebody looks."""

    def step_begins(self, model: Root) -> bool:
        """Asked at every step: nothing here is a call for each unit."""
        wanted = _torch.profiler_runs() or logger.isEnabledFor(logging.DEBUG)
        units = [unit for unit in model.units if ("run" in unit.__dict__) is not wanted]
        if units:
            decorate = _decorate if wanted else _undecorate
            for unit in units:
                decorate(unit, STAGES_OF_UNITS)
            decorate(model.coalescer, STAGES_OF_GROUPS)
        return bool(units)


def _decorate(owner: object, stages: Mapping[str, Stage]) -> None:
    for name, stage in stages.items():
        owner.__dict__[name] = _in_range(owner, name, stage)


def _undecorate(owner: object, stages: Mapping[str, Stage]) -> None:
    for name in stages:
        owner.__dict__.pop(name, None)


def _in_range(owner: object, name: str, stage: Stage) -> Callable[..., Any]:
    """The method of that `name`, in a range. Holds `owner` weakly: in a circle it would live until the collector
    comes."""
    me, method = weakref.ref(owner), getattr(type(owner), name)

    def run(*args: Any, **kwargs: Any) -> Any:
        owner = me()
        with _range(kwargs.get("method") or stage.stage, stage.of(owner, *args, **kwargs), stage.happens(owner)):
            result = method(owner, *args, **kwargs)
        if stage.labels_reductions:
            for reduction in result:
                _decorate(reduction, STAGES_OF_REDUCTIONS)
        return result

    return run


def _range(stage: str, units: str, happens: bool) -> AbstractContextManager[Any]:
    """A range around a stage; none where nothing `happens` in it."""
    return record_function(f"flatfsdp::{stage} {units}") if happens else nullcontext()


def label_for_profilers(root: Root) -> None:
    """Label what the units of `root` do whenever somebody looks."""
    root.observers.add(ProfilerRanges())
