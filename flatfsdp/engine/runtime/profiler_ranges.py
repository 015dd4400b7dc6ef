"""Ranges in a profiler's trace, by stage and unit: "flatfsdp::gather blocks.3".

[Note: labels] A range costs more than much of what it would surround. So units and their reductions open none, until
somebody looks: then their classes become those below, which differ in nothing else. Whether somebody looks is asked
where a forward or a backward begins. torch's own profilers are seen; for those that attach from outside, the logger at
DEBUG says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.profiler import record_function

from ...errors import logger
from ..base import _torch
from ..flat.flat_param import FlatParamHandle
from ..flat.reduction import Reduction
from ..flat.states import GATHERING
from ..flat.views import ViewMode
from .unit import ForwardCall, Unit


def follow_profiler(units: Sequence[Unit]) -> bool:
    """Label what `units` do if somebody looks, else no more; True if that is a change."""
    kind = ProfiledUnit if _torch.profiler_runs() or logger.isEnabledFor(logging.DEBUG) else Unit
    if {*map(type, units)} == {kind}:  # asked at every step: nothing here is a call for each unit
        return False
    for unit in units:
        unit.__class__ = kind
    return True


def _range(stage: str, unit: str, *, happens: bool = True) -> AbstractContextManager[Any]:
    """A range around a stage; none where nothing `happens` in it."""
    return record_function(f"flatfsdp::{stage} {unit or '<root>'}") if happens else nullcontext()


def around(stage: str, units: Sequence[Unit]) -> AbstractContextManager[Any]:
    """A range around what `units` do together, if they are labelled."""
    if not isinstance(units[0], ProfiledUnit):
        return nullcontext()
    return _range(stage, _coalesced(unit.name for unit in units))


def follow(units: Sequence[Unit], reductions: list[Reduction]) -> list[Reduction]:
    """`reductions` of `units`, labelled if they are."""
    if isinstance(units[0], ProfiledUnit):
        for reduction in reductions:
            reduction.__class__ = ProfiledReduction
    return reductions


def _coalesced(names: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(name or "<root>" for name in names))


class ProfiledUnit(Unit):
    """A unit with a range around each of its stages."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, method: str | None = None) -> Any:
        with _range(method or "forward", self.name):
            return super().run(args, kwargs, method=method)

    def launch_unshard(self, *, ahead: bool = False) -> None:
        with _range("gather", self.name, happens=not self.is_unsharded):
            super().launch_unshard(ahead=ahead)

    def wait_unshard(self) -> None:
        under_way = any(handle.state is GATHERING for handle in self.handles)
        with _range("wait for gather", self.name, happens=under_way):
            super().wait_unshard()

    def reshard(self, mode: ViewMode) -> None:
        with _range("reshard", self.name, happens=not self.is_sharded):
            super().reshard(mode)

    def before_backward(self, call: ForwardCall | None = None) -> None:
        with _range("before backward", self.name):
            super().before_backward(call)

    def leaf_ready(self, kind: int, index: int) -> None:
        with _range("gradient", self.name):
            super().leaf_ready(kind, index)

    def reduce(self) -> list[Reduction]:
        with _range("reduce", self.name):
            return follow([self], super().reduce())

    def finalize_grads(self) -> list[FlatParamHandle]:
        with _range("settle", self.name, happens=any(grads.expected for grads in self.grads)):
            return super().finalize_grads()


class ProfiledReduction(Reduction):
    """A reduction with a range around each of its waits."""

    @property
    def _units(self) -> str:
        return _coalesced(part.handle.name for part in self._parts)

    def release_input(self) -> None:
        with _range("wait for reduction", self._units, happens=not self._halfway):
            super().release_input()

    def finish(self) -> None:
        under_way = self._replicate is not None or not self._second.done
        with _range("wait for all-reduce", self._units, happens=under_way):
            super().finish()
