"""Gradients that come late: what is known of them, and what may bring them.

[Note: late gradients] Autograd accumulates a gradient when all uses in its graph task have brought their share. What a
reentrant checkpoint inside of a unit's module recomputes brings more of it, in a graph task of its own, when the
backward comes to that. Nothing shows such a checkpoint but the node of a custom Function, and most of these are
something else. So a unit waits for those that are to come in two cases only: where nothing shows the end of its part,
until a backward has shown that none brings gradients; and where graphs of several passes live, of which this backward
may come to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..base import _torch
from ..base import autograd as hooks
from ..base.nested_tensors import tensors_in
from .unit import Unit


def await_customs(unit: Unit, nodes: Iterable[Any], ran: Callable[[], None], running: Any = None) -> None:
    """Call `ran` when the backward is through with each custom Function that gradients of `nodes` flow on to, of a call
    of `unit`; those behind the one that is `running`, if one is."""
    unit.leaves.customs.add(hooks.customs_before(nodes, running), ran)


def came(unit: Unit, ran: Callable[[], None]) -> None:
    """A custom Function that runs brought a gradient of `unit` in a graph task of its own."""
    own, leaves = unit.backward, unit.leaves
    if leaves.runs_late is False and own.ends_unseen and (running := _torch.custom_backward()) is not None:
        await_customs(unit, own.ends_unseen, ran, running)  # it was not to be expected
    leaves.runs_late = True


def follow_customs(unit: Unit, ran: Callable[[], None], called: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `called` returns, the forward of `unit`: the custom Functions inside of it are to be known."""
    if not torch.is_grad_enabled() or unit.leaves.single_use is False:  # it waits for all of its calls
        return called(*args, **kwargs)
    given = [tensor.grad_fn for tensor in tensors_in((args, kwargs))]
    output = called(*args, **kwargs)
    made = [tensor.grad_fn for tensor in tensors_in(output)]
    unit.leaves.customs.add(hooks.customs_before(made, until=given), ran)
    return output


def count_late(unit: Unit) -> int:
    """How many gradients the running graph task brings that came before, or are awaited no more."""
    return sum(
        hooks.will_accumulate(handle.leaves[i])
        for handle, _, grads in unit.kinds
        for i in (grads.expected if unit.backward.completed else grads.arrived)
        if handle.leaves[i].requires_grad
    )


def has_all(unit: Unit) -> bool:
    """Whether each gradient that the running graph task brings has come, and no parameter is one that it may pass."""
    # What came in a reentrant checkpoint's own graph task may come again in this one, of another call.
    elsewhere = unit.backward.task != _torch.graph_task()
    return unit.backward.late_gradients <= 0 and not any(
        views.extended
        or not leaf.requires_grad
        or ((elsewhere or i not in grads.arrived) and hooks.will_accumulate(leaf))
        for handle, views, grads in unit.kinds
        for i, leaf in enumerate(handle.leaves)
    )


def awaits_more(unit: Unit) -> bool:
    """Whether gradients that came in tasks inside have another part to come, or may have: a segment that is recomputed
    there may share parameters with the rest of this unit's forward."""
    own = unit.backward
    if _torch.graph_task() != own.task:
        return True
    for kind, index in own.arrived_in_inner_tasks:
        if hooks.will_accumulate(unit.handles[kind].leaves[index]):
            unit.grads[kind].missing.add(index)
    own.arrived_in_inner_tasks.clear()
    return any(grads.missing for grads in unit.grads)
