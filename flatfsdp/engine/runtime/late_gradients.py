"""Gradients that arrive late, and the custom Functions that may compute them.

[Note: late gradients] Autograd accumulates a gradient when all uses in its graph task have contributed. A segment that
a reentrant checkpoint recomputes inside of a unit's module contributes later, in a graph task of its own, when the
backward reaches it. Only the node of a custom Function shows such a checkpoint, and most of these nodes are others. So
a unit waits for pending custom Functions only if nothing shows the end of its part, and until a backward has shown that
none of them contributes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..base import _torch
from ..base import autograd as hooks
from .unit import Unit


def await_customs(unit: Unit, nodes: Iterable[Any], ran: Callable[[], None], running: Any = None) -> None:
    """Call `ran` when the backward has finished each custom Function to which gradients of `nodes`, of a call of
    `unit`, flow on; only those behind `running`, if that is given."""
    unit.leaves.customs.add(hooks.customs_before(nodes, running), ran)


def came(unit: Unit, ran: Callable[[], None]) -> None:
    """A running custom Function computed a gradient of `unit` in a graph task of its own."""
    own, leaves = unit.backward, unit.leaves
    if leaves.runs_late is False and own.ends_unseen and (running := _torch.custom_backward()) is not None:
        await_customs(unit, own.ends_unseen, ran, running)  # it was not expected
    leaves.runs_late = True


def expect_again(unit: Unit, completed: Collection[Unit]) -> None:
    """Wait for gradients of `unit`, and of units whose parameters it uses, that the running graph task computes, and
    that arrived before, or, of those `completed`, are no longer awaited."""
    for each in (unit, *unit.owning_units):
        each.pick_up_grads()
        each.backward.late_gradients = sum(
            hooks.will_accumulate(handle.leaves[i])
            for handle, _, grads in each.kinds
            for i in (grads.expected if each in completed else grads.arrived)
            if handle.leaves[i].requires_grad
        )


def has_all(unit: Unit) -> bool:
    """Whether each gradient of the running graph task has arrived, and no parameter is frozen or transformed."""
    # A gradient in a reentrant checkpoint's own graph task may arrive again in this one, from another call.
    elsewhere = unit.backward.task != _torch.graph_task()
    return unit.backward.late_gradients <= 0 and not any(
        views.extended
        or not leaf.requires_grad
        or ((elsewhere or i not in grads.arrived) and hooks.will_accumulate(leaf))
        for handle, views, grads in unit.kinds
        for i, leaf in enumerate(handle.leaves)
    )


def awaits_more(unit: Unit) -> bool:
    """Whether another contribution to gradients that arrived in inner tasks will, or may, come: a segment that is
    recomputed there may share parameters with the other modules of this unit."""
    own = unit.backward
    if _torch.graph_task() != own.task:
        return True
    for kind, index in own.arrived_in_inner_tasks:
        if hooks.will_accumulate(unit.handles[kind].leaves[index]):
            unit.grads[kind].missing.add(index)
    own.arrived_in_inner_tasks.clear()
    return any(grads.missing for grads in unit.grads)


def are_likely(nodes: Iterable[Any], units: Iterable[Unit]) -> bool:
    """Whether some of the graph's `nodes` that the backward will reach are of custom Functions that bring gradients:
    reentrant checkpoints, by their names, or any, if `units` have had gradients of theirs."""
    customs = hooks.customs_in(nodes)
    known = any([unit.leaves.single_use is False for unit in units])
    return any(known or "Checkpoint" in type(each).__name__ for each in customs)
