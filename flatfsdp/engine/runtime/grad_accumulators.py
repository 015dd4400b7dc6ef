"""Parameters whose AccumulateGrad nodes are held by the program, and the hooks on these nodes.

[Note: accumulators] A leaf's gradients are accumulated by a node of autograd, its *accumulator*, which is created when
a graph first needs it, and lives as long as a graph or the program holds it:
`p.expand_as(p).grad_fn.next_functions[0][0]`. Hooks on a held accumulator do not run on this rank's unsharded gradient;
they run when the parameter's sharded `.grad` is final. Accumulators that only graphs hold are not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ...errors import UsageError, fail
from ..base import _torch
from ..base import autograd as hooks
from ..flat.flat_param import FlatParamHandle
from .unit import Unit

# The attribute that torch's `_apply_optimizer_in_backward` sets on a parameter; FSDP1 steps these optimizers, too.
_OPTIMIZERS = "_in_backward_optimizers"


class HeldAccumulator:
    """The accumulator of one leaf, while the program holds it."""

    def __init__(self, leaf: nn.Parameter, node: Any, name: str) -> None:
        self.leaf = leaf
        self.name = name
        self.before, self.after = hooks.hooks_of_node(node)

    def postpone(self) -> bool:
        """Prevent the hooks from running on this rank's gradient; False if the node was deleted."""
        after = self.after()
        if after:
            hooks.defer(after)
        return after is not None

    def run(self) -> None:
        """Run the hooks on the sharded gradient, as autograd would."""
        after, grad = self.after(), self.leaf.grad
        if after and grad is not None:
            hooks.run_deferred(after, (), (grad,))


class GradAccumulators:
    """The accumulators of one model's parameters that the program holds.

    Attributes:
        expects_gradients: the handles with hooks or optimizers that await their sharded gradients.
    """

    def __init__(self) -> None:
        self.expects_gradients: set[FlatParamHandle] = set()
        self._held: dict[FlatParamHandle, list[HeldAccumulator]] = {}
        self._stepped: dict[FlatParamHandle, list[nn.Parameter]] = {}  # by optimizers of their own

    def adopt(self, other: GradAccumulators) -> None:
        """Take over the accumulators of a part of the model."""
        self.expects_gradients |= other.expects_gradients
        self._held |= other._held

    def look_before_forward(self, units: Sequence[Unit]) -> None:
        """Find held accumulators.

        Raises:
            UsageError: hooks, or optimizers, that would never run.
        """
        if self._stepped or _torch.applies_in_backward():
            self._find_optimizers([handle for unit in units for handle in unit.handles])
        refusal = self._look(units)
        if refusal:
            raise UsageError(refusal)

    def look_before_backward(self, units: Sequence[Unit]) -> None:
        """Find accumulators that were taken since the forward, and defer new hooks on those that are known.

        Raises:
            UsageError: hooks that would never run.
        """
        refusal = self._look(units)
        if refusal:
            fail(UsageError(refusal))

    def run(self, complete: Iterable[FlatParamHandle]) -> None:
        """The sharded gradients of the handles are final: run the hooks, and step each parameter's optimizers."""
        for handle in complete:
            for held in self._held.get(handle, ()):
                held.run()
            for leaf in self._stepped.get(handle, ()):
                if leaf.grad is not None:
                    for optimizer in getattr(leaf, _OPTIMIZERS):
                        optimizer.step()
                    leaf.grad = None

    def _look(self, units: Iterable[Unit]) -> str | None:
        """Find held accumulators; returns the reason to refuse their hooks, if any."""
        handles, leaves = [handle for unit in units for handle in unit.handles], []
        for handle in handles:
            leaves += handle.leaves
            leaves += handle.face.apart
        with _torch.as_plain_tensors():
            counts = list(map(_torch.use_count, leaves))
            found = hooks.held_nodes(leaves, counts) if max(counts, default=2) > 1 else {}
        if found:
            for handle in handles:
                self._add(handle, found)
        if self._held:
            self._postpone()
            return _why_not(self._held)
        return None

    def _add(self, handle: FlatParamHandle, found: dict[int, Any]) -> None:
        """Record those of the nodes `found`, by id of their leaf, that are of leaves of `handle`."""
        known = self._held.setdefault(handle, [])
        seen = {id(held.after()) for held in known}
        face, specs = handle.face, zip(handle.leaves, handle.layout.params, strict=True)
        apart = [(holder, face.name_of_holder(i)) for i, holder in enumerate(face.apart)]
        for leaf, name in [*apart, *((leaf, repr(spec.name)) for leaf, spec in specs)]:
            if (node := found.get(id(leaf))) is None:
                continue
            held = HeldAccumulator(leaf, node, name)
            if id(held.after()) not in seen:
                known.append(held)

    def _postpone(self) -> None:
        for handle, known in [*self._held.items()]:
            known[:] = [held for held in known if held.postpone()]
            if not known:
                del self._held[handle]
        self.expects_gradients = {*self._held, *self._stepped}

    def _find_optimizers(self, handles: Iterable[FlatParamHandle]) -> None:
        self._stepped = {}
        for handle in handles:
            face = handle.face
            stepped = [each for each in (*face.holders, *handle.leaves) if hasattr(each, _OPTIMIZERS)]
            if stepped and not face.graded:
                raise UsageError(
                    f"unit {handle.label}: _apply_optimizer_in_backward() was called on parameters that were "
                    f"flattened, or on {face.words.holder}, and would never step: autograd accumulates no gradient "
                    f"there. Step with flatfsdp.optimizer_in_backward(model, optimizer){face.words.or_remedy}"
                )
            if stepped:
                self._stepped[handle] = [each for each in face.graded if hasattr(each, _OPTIMIZERS)]
        self.expects_gradients = {*self._held, *self._stepped}


def _why_not(held: dict[FlatParamHandle, list[HeldAccumulator]]) -> str | None:
    """The reason to refuse hooks on held accumulators, if any."""
    for handle, known in held.items():
        where, words = f"of unit {handle.label}", handle.face.words
        for each in known:
            if each.after() and not handle.face.graded:
                return (
                    f"{each.name} {where} has a hook on its AccumulateGrad node, but with {words.setting} no "
                    "gradient is accumulated into it: the hook would never run. To step in the backward, use "
                    "flatfsdp.optimizer_in_backward(model, optimizer); to see the sharded gradient, "
                    f"register_post_accumulate_grad_hook() on {words.holder}{words.or_remedy}"
                )
            if each.before():  # on all ranks, although some nodes on some ranks would work
                return (
                    f"{each.name} {where} has a hook of register_prehook() on its AccumulateGrad node. If the node was "
                    "obtained while the parameter showed its shard, gradients arrive at another node, and the hook "
                    "would never run. register_hook() of the parameter sees the same gradient"
                )
    return None
