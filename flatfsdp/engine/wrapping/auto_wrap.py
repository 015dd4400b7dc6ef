"""Wrap what a policy chooses inside a module, all of it or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from torch import nn

from ...api import Config
from ...errors import AgreementError, ConfigValueError
from ...wrap import apply_plan, plan_wrapping
from ..comm.process_groups import resolve_groups
from ..config.arguments import check_arguments
from ..runtime.module_tree import ignored_of
from ..runtime.param_registry import disown
from ..runtime.unit import Unit
from ..state.full_params import unwrap
from .init_sync import agree_to_undo, meeting_axes


def auto_wrapped(module: nn.Module, config: Config, make: Callable[..., nn.Module]) -> ExitStack:
    """Wrap what `config.auto_wrap_policy` chooses inside `module`, by `make(child, config, island=...)`.

    Closing the result undoes it; `pop_all()` keeps it.
    """
    policy = config.auto_wrap_policy
    if policy is None:
        return ExitStack()
    ignored_modules, ignored_params = ignored_of(module, config)
    nested = config.replace(auto_wrap_policy=None)
    kwargs = {
        f.name: getattr(nested, f.name) for f in fields(nested) if f.name not in ("ignored_modules", "ignored_params")
    }
    if config.device_mesh is not None:
        kwargs["process_group"] = None  # of the mesh, which units inherit
    plan = plan_wrapping(module, policy, kwargs=kwargs, ignored_modules=ignored_modules, ignored_params=ignored_params)
    islands = {id(planned.module) for planned in plan if planned.in_full_precision}
    made = _CreatedWrappers()

    def wrap(child: nn.Module, **overrides: Any) -> nn.Module:
        changed = {name for name, value in overrides.items() if value is not kwargs.get(name)}
        if {"ignored_modules", "ignored_states"} & changed:
            raise ConfigValueError(
                "auto_wrap_policy: it gives a unit ignored_modules or ignored_states of its own; give them to the "
                "outermost wrapper, which passes them to all units"
            )
        if "process_group" in changed:
            overrides["device_mesh"] = None
        checked = resolve_groups(check_arguments(child, **overrides)) if changed else nested
        own_config = checked.replace(ignored_modules=tuple(ignored_modules), ignored_params=tuple(ignored_params))
        return made.add(make(child, own_config, island=id(child) in islands))

    return apply_plan(plan, wrap, unmake=made.undo)


class _CreatedWrappers:
    """The wrappers that one constructor has made."""

    def __init__(self) -> None:
        self._count = 0
        self._parted = False  # other ranks keep theirs

    def add(self, wrapper: nn.Module) -> nn.Module:
        """One more."""
        self._count += 1
        return wrapper

    def undo(self, wrapper: nn.Module) -> None:
        """Give the module of the last `wrapper` its whole parameters back. Collective over the unit's axes.

        Raises:
            AgreementError: other ranks did not fail, so the shards that they hold do not come back.
        """
        unit: Unit = wrapper.__dict__["_unit"]
        disown(unit)
        count, self._count = self._count, self._count - 1
        if unit.groups.shard.size > 1:
            if self._parted:
                return
            try:
                agree_to_undo(count, meeting_axes(unit.groups, unit.resources.device), sys.exc_info()[1])
            except AgreementError:
                self._parted = True
                raise
        unwrap(unit)
