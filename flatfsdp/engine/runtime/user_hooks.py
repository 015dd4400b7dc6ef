"""Hooks of users on the parameters of a unit: which would never run, and those that run on sharded gradients."""

from __future__ import annotations

from collections.abc import Collection

from ...errors import UsageError, fail
from ..base import _torch
from ..base import autograd as hooks
from ..flat.flat_param import FlatParamHandle
from .unit import Unit


def defer_user_hooks(unit: Unit, kind: int, *, on_leaves: bool) -> None:
    """Gradients are about to come: keep hooks from running on those of this rank. `on_leaves`: some leaves have any.

    Raises:
        UsageError: of a hook that would never run, where one parameter has the gradients and another one sees them
            pass.
    """
    handle = unit.handles[kind]
    if handle.face.holds_leaves:
        if on_leaves:
            hooks.defer_user_hooks(handle.leaves)
    else:
        with _torch.as_plain_tensors():
            on_holders = any(map(_torch.has_hooks, handle.face.holders))
        if on_leaves or on_holders:
            _check_hooks(unit, handle)


def _check_hooks(unit: Unit, handle: FlatParamHandle) -> None:
    where, words = f"of unit {unit.name or '<root>'!r}", handle.face.words
    hooked = hooks.user_hooked(handle.leaves)
    if hooked:
        fail(
            UsageError(
                f"parameter {handle.layout.params[hooked[0]].name!r} {where} has a post-accumulate hook, but with "
                f"{words.setting} no gradient is accumulated into it: the hook would never run. Register it on "
                f"{words.holder}, which model.parameters() lists{words.or_remedy}"
            )
        )
    if any(map(_torch.has_hooks, handle.face.holders)):
        fail(
            UsageError(
                f"{words.holder} {where} has a hook of register_hook(), but the backward computes gradients of the "
                "original parameters: it would never run. Use register_post_accumulate_grad_hook(), which sees the "
                "sharded gradient, or register_hook() on the parameters of the module inside, which sees this rank's"
            )
        )


def run_user_hooks(unit: Unit, complete: Collection[FlatParamHandle]) -> None:
    """Run users' post-accumulate hooks on the sharded gradients of the handles that are `complete`."""
    for kind, handle in enumerate(unit.handles):
        if handle not in complete:
            continue
        if not handle.face.holds_leaves:
            hooks.run_hooks(handle.face.holders)
        elif hooks.are_more_than_ours(unit.leaves.hooked[kind].values()):
            hooks.run_user_hooks(handle.leaves)
