"""Hooks of users that await sharded gradients, on parameters and on their AccumulateGrad nodes; attached to each model.

Autograd would run them on this rank's unsharded gradient. They are deferred when a backward begins, and run when the
sharded `.grad` is final; those that would never run are refused.

[Note: accumulators] A leaf's gradients are accumulated by a node of autograd, its *accumulator*, which is created when
a graph first needs it, and lives as long as a graph or the program holds it:
`p.expand_as(p).grad_fn.next_functions[0][0]`. Hooks on a held accumulator do not run on this rank's unsharded gradient;
they run when the parameter's sharded `.grad` is final. Accumulators that only graphs hold are not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import UsageError, fail
from ..base import _torch
from ..base import autograd as hooks
from ..base.events import Observer
from ..flat.faces import Face, adoptions
from ..flat.flat_param import FlatParamHandle
from ..runtime.finish import Finished
from ..runtime.model import Model, model_of
from ..runtime.unit import Unit

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


class GradientHooks(Observer):
    """The hooks of users that await gradients of one model.

    Attributes:
        expects_gradients: the handles with hooks of accumulators, or with optimizers, that await sharded gradients.
    """

    def __init__(self) -> None:
        self.expects_gradients: set[FlatParamHandle] = set()
        self._held: dict[FlatParamHandle, list[HeldAccumulator]] = {}
        self._stepped: dict[FlatParamHandle, list[nn.Parameter]] = {}  # by optimizers of their own
        # When holders that are no leaves, and leaves, were last found to have no hooks of users.
        self._unhooked_as_of: dict[FlatParamHandle, tuple[int, int]] = {}
        self._followed: dict[FlatParamHandle, set[int]] = {}  # on whose gradients hooks of their holders run
        # When the program was last found to hold no accumulator of a unit, by torch's count of hooks.
        self._none_held_as_of: dict[Unit, int] = {}

    def adopt(self, other: GradientHooks) -> None:
        """Take over what was found in a part of the model."""
        self.expects_gradients |= other.expects_gradients
        self._held |= other._held
        self._followed |= other._followed

    # -- points ------------------------------------------------------------------------------------------------------

    def training_begins(self, units: Sequence[Unit]) -> None:
        """Find held accumulators.

        Raises:
            UsageError: hooks, or optimizers, that would never run.
        """
        if self._stepped or _torch.applies_in_backward():
            self._find_optimizers([handle for unit in units for handle in unit.handles])
        refusal = self._look(units)
        if refusal:
            raise UsageError(refusal)

    def backward_begins(self, units: Sequence[Unit]) -> None:
        """Defer hooks, also of accumulators that were taken since the forward.

        Raises:
            UsageError: hooks that would never run.
        """
        refusal = self._look(units)
        if refusal:
            fail(UsageError(refusal))
        # Each registration of a hook, on any tensor, increments a counter of torch. So parameters are looked at only if
        # it has increased since they had no hooks, or if a user's parameter has become a holder.
        as_of = RemovableHandle.next_id, adoptions.count
        for unit in units:
            for handle, watched in zip(unit.handles, unit.leaves.hooked, strict=True):
                if self._unhooked_as_of.get(handle) != as_of:
                    self._defer(unit, handle, on_leaves=_are_hooked(watched))

    def gradients_complete(self, finished: Finished) -> None:
        """Run the hooks of handles whose sharded gradients are final, and step each parameter's optimizers."""
        for unit, complete in finished:
            for handle, watched in zip(unit.handles, unit.leaves.hooked, strict=True):
                if handle not in complete:
                    continue
                if self._unhooked_as_of.get(handle) == (RemovableHandle.next_id, adoptions.count):
                    continue
                face = handle.face
                if self._holders_have_hooks(handle, on_leaves=(on_leaves := _are_hooked(watched))):
                    hooks.run_hooks(face.holders)
                if on_leaves:
                    hooks.run_user_hooks(handle.leaves, [*map(face.holder_of, range(len(handle.leaves)))])
            for handle in complete if self.expects_gradients else ():
                for held in self._held.get(handle, ()):
                    held.run()
                for leaf in self._stepped.get(handle, ()):
                    if leaf.grad is not None:
                        for optimizer in getattr(leaf, _OPTIMIZERS):
                            optimizer.step()
                        leaf.grad = None

    # -- hooks of parameters -----------------------------------------------------------------------------------------

    def _holders_have_hooks(self, handle: FlatParamHandle, *, on_leaves: bool) -> bool:
        """Whether holders that are no leaves have hooks, of either kind. If neither they nor leaves (`on_leaves`) have,
        when that was found is recorded."""
        holders = _holders_apart(handle.face)
        with _torch.as_plain_tensors():
            found = hooks.users_have_hooked(holders) or any(map(_torch.hooks_on, holders))
        if not (found or on_leaves):
            self._unhooked_as_of[handle] = RemovableHandle.next_id, adoptions.count
        return found

    def _defer(self, unit: Unit, handle: FlatParamHandle, *, on_leaves: bool) -> None:
        """Prevent hooks from running on the gradients of this rank. `on_leaves`: some leaves have any.

        Raises:
            UsageError: for a hook that would never run, since autograd computes gradients of the leaves, and `.grad` is
                set on their holders.
        """
        on_holders = self._holders_have_hooks(handle, on_leaves=on_leaves)
        if (on_leaves or on_holders) and not handle.face.originals_get_grads:
            _check_hooks(unit, handle)
            return
        if on_leaves:
            hooks.defer_user_hooks(handle.leaves)
        if on_holders:
            self._follow(handle)

    def _follow(self, handle: FlatParamHandle) -> None:
        """Let hooks of `register_hook()` on holders run on the gradients of their leaves. [Note: two lives]"""
        followed = self._followed.setdefault(handle, set())
        with _torch.as_plain_tensors():  # holders refuse to be used
            for index, (leaf, holder) in enumerate(zip(handle.leaves, handle.face.holders, strict=True)):
                # A frozen one has no gradient now; torch refuses hooks on it.
                if leaf.requires_grad and index not in followed and hooks.hooks_of_users(holder):
                    followed.add(index)
                    hooks.follow(leaf, holder)

    # -- accumulators ------------------------------------------------------------------------------------------------

    def _look(self, units: Sequence[Unit]) -> str | None:
        """Find held accumulators; returns the reason to refuse their hooks, if any. They matter once they have some."""
        now = RemovableHandle.next_id
        if list(map(self._none_held_as_of.get, units)).count(now) == len(units):
            return None
        for unit in units:
            watched = any(map(_torch.has_backward_hooks, {each for entry in unit.entries for each in entry.modules()}))
            for grads in unit.grads:
                grads.watched = watched
        handles, leaves = [handle for unit in units for handle in unit.handles], []
        for handle in handles:
            leaves += handle.leaves
            leaves += _holders_apart(handle.face)
        with _torch.as_plain_tensors():
            counts = list(map(_torch.use_count, leaves))
            found = hooks.held_nodes(leaves, counts) if max(counts, default=2) > 1 else {}
        if found:
            for handle in handles:
                self._add(handle, found)
        if self._held:
            self._postpone()
            return _why_not(self._held)
        self._none_held_as_of.update(dict.fromkeys(units, now))
        return None

    def _add(self, handle: FlatParamHandle, found: dict[int, Any]) -> None:
        """Record those of the nodes `found`, by id of their leaf, that are of leaves of `handle`."""
        known = self._held.setdefault(handle, [])
        seen = {id(held.after()) for held in known}
        face, specs = handle.face, zip(handle.leaves, handle.layout.params, strict=True)
        distinct = [(holder, face.name_of_holder(i)) for i, holder in enumerate(_holders_apart(face))]
        for leaf, name in [*distinct, *((leaf, repr(spec.name)) for leaf, spec in specs)]:
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
            if stepped and not face.originals_get_grads:
                raise UsageError(
                    f"unit {handle.label}: _apply_optimizer_in_backward() was called on parameters that were "
                    f"flattened, or on {face.words.holder}, and would never step: autograd accumulates no gradient "
                    f"there. Step with flatfsdp.optimizer_in_backward(model, optimizer){face.words.or_remedy}"
                )
            if stepped:
                self._stepped[handle] = [each for each in face.originals if hasattr(each, _OPTIMIZERS)]
        self.expects_gradients = {*self._held, *self._stepped}


def attach_gradient_hooks(model: Model, nested: Iterable[Unit]) -> None:
    """Let hooks of users on parameters of `model`, which is new, await sharded gradients. `nested`: units that it will
    take over, with what their models have found."""
    made = GradientHooks()
    for each in dict.fromkeys(map(model_of, nested)):
        if (found := each.observers.find(GradientHooks)) is not None:
            made.adopt(found)
    model.observers.add(made)


def _check_hooks(unit: Unit, handle: FlatParamHandle) -> None:
    """Refuse hooks on leaves and holders without a `.grad` of their own that would never run."""
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


def _holders_apart(face: Face) -> Sequence[nn.Parameter]:
    """The holders, unless they are the leaves."""
    return () if face.holders_are_leaves else face.holders


def _are_hooked(watched: Mapping[int, hooks.Registry]) -> bool:
    """Whether leaves with the engine's hooks, in these registries, have other hooks."""
    return sum(map(len, watched.values())) > len(watched)


def _why_not(held: dict[FlatParamHandle, list[HeldAccumulator]]) -> str | None:
    """The reason to refuse hooks on held accumulators, if any."""
    for handle, known in held.items():
        where, words = f"of unit {handle.label}", handle.face.words
        for each in known:
            if each.after() and not handle.face.originals_get_grads:
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
