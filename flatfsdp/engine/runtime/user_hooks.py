"""User-defined hooks on the parameters of a unit: those that would never run, and those for sharded gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from torch.utils.hooks import RemovableHandle

from ...errors import UsageError, fail
from ..base import _torch
from ..base import autograd as hooks
from ..flat.faces import adoptions
from ..flat.flat_param import FlatParamHandle
from .unit import Unit


def defer_user_hooks(unit: Unit, kind: int, *, on_leaves: bool) -> None:
    """Prevent hooks from running on the gradients of this rank, before these arrive. `on_leaves`: some leaves have any.

    Raises:
        UsageError: for a hook that would never run, since autograd computes gradients of the leaves, and `.grad` is set
            on their holders.
    """
    handle, on_holders = unit.handles[kind], _holders_have_hooks(unit, kind)
    if on_leaves or on_holders:
        handle.face.take_hooks(partial(_check_hooks, unit, handle), on_leaves=on_leaves, on_holders=on_holders)


def _holders_have_hooks(unit: Unit, kind: int) -> bool:
    """Whether holders that are no leaves have hooks, of either kind; if not, when that was found is recorded."""
    holders = unit.handles[kind].face.apart
    with _torch.as_plain_tensors():
        found = hooks.users_have_hooked(holders) or any(map(_torch.hooks_on, holders))
    if not found:
        unit.leaves.unhooked_as_of[kind] = RemovableHandle.next_id, adoptions.count
    return found


def _check_hooks(unit: Unit, handle: FlatParamHandle) -> None:
    where, words = f"of unit {unit.label}", handle.face.words
    hooked = hooks.user_hooked(handle.leaves)
    if hooked:
        fail(
            UsageError(
                f"parameter {handle.layout.params[hooked[0]].name!r} {where} has a post-accumulate hook, but with "
                f"{words.setting} no gradient is accumulated into it: the hook would never run. Register it on "
                f"{words.holder}, which model.parameters() lists{words.or_remedy}"
            )
        )
    if hooks.users_have_hooked(handle.face.holders):
        fail(
            UsageError(
                f"{words.holder} {where} has a hook of register_hook(), but the backward computes gradients of the "
                "original parameters: it would never run. Use register_post_accumulate_grad_hook(), which sees the "
                "sharded gradient, or register_hook() on the parameters of the module inside, which sees this rank's"
            )
        )


def run_user_hooks(finished: Iterable[tuple[Unit, Collection[FlatParamHandle]]]) -> None:
    """Run user-defined post-accumulate hooks on the sharded gradients of units' handles that are complete."""
    for unit, complete in finished:
        for kind, handle in enumerate(unit.handles):
            if handle not in complete:
                continue
            face = handle.face
            as_of = RemovableHandle.next_id, adoptions.count
            if unit.leaves.unhooked_as_of.get(kind) != as_of and _holders_have_hooks(unit, kind):
                hooks.run_hooks(face.apart)
            registries = unit.leaves.hooked[kind].values()
            if sum(map(len, registries)) > len(registries):  # there are more than the engine's own
                hooks.run_user_hooks(handle.leaves, [*map(face.holder_of, range(len(handle.leaves)))])
