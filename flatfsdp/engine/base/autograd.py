"""The only file that registers hooks and callbacks with autograd. It handles callbacks, not units.

[Note: hooks] Hooks are registered on tensors, not implemented as identity Functions: users may not modify an output of
a custom Function in place, while a tensor hook survives that. Callbacks on objects that outlive a step reference their
owner weakly: a closure on a leaf is never freed, not even by the garbage collector.

[Note: first hooks] Autograd runs the hooks of a tensor in order of registration, then `retain_grad`, the pre-hooks of
its node, the node, and the post-hooks of the node. A hook that reads weights of a unit on the unit's own output needs
them gathered. So the engine's hook on an output goes before those that the forward has registered; among the engine's
own the order of registration stays: a unit that has read the tensor ends its backward before others gather.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import itemgetter, methodcaller, setitem
from typing import Any

import torch
from torch import nn

from . import _functorch, _torch

_SEQUENCE = methodcaller("_sequence_nr")

# The post-accumulate hooks of one tensor, by their ids; lives as long as the tensor.
Registry = dict[int, Callable[[torch.Tensor], None]]


class LeafHook:
    """Base class of the engine's post-accumulate hooks, by which they differ from users'. Leaves outlive models: a
    hook refers to its own weakly."""

    __slots__ = ()

    def __call__(self, leaf: torch.Tensor) -> None:
        """The gradient of `leaf` was accumulated."""


# Stands in a registry for a hook that is muted: a function in C that drops the leaf.
_muted = deque[Any](maxlen=0).append


def is_ours(hook: object) -> bool:
    """Whether a hook in the registry of a leaf is the engine's own."""
    return isinstance(hook, LeafHook) or hook is _muted


class LeafHooks:
    """The engine's hooks on leaves that can be muted together. Autograd then calls no Python code for each gradient."""

    def __init__(self) -> None:
        self._registries: list[dict[int, Any]] = []
        self._keys: list[int] = []
        self._hooks: list[LeafHook] = []
        self._silence = repeat(_muted)

    def watch(self, leaf: nn.Parameter, hook: LeafHook) -> Registry:
        """Call `hook` whenever `leaf.grad` has been accumulated; returns the registry of all post-accumulate hooks of
        `leaf`."""
        handle = leaf.register_post_accumulate_grad_hook(hook)
        registry = _torch.hooks_on(leaf)
        assert registry is not None
        self._registries.append(registry)
        self._keys.append(handle.id)
        self._hooks.append(hook)
        return registry

    def mute(self) -> None:
        """Call none of them until `sound`."""
        deque(map(setitem, self._registries, self._keys, self._silence), 0)

    def sound(self) -> None:
        """End `mute`."""
        deque(map(setitem, self._registries, self._keys, self._hooks), 0)


class PostponedHook:
    """A user-defined hook that is skipped for the unsharded gradient, and run on the sharded one instead."""

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> None:
        return


def defer_user_hooks(leaves: Iterable[nn.Parameter]) -> None:
    """Defer user-defined post-accumulate hooks of `leaves` to `run_user_hooks`; their handles still remove them."""
    for hooks in _torch.accumulate_hooks(leaves):
        defer(hooks)


def defer(registry: dict[int, Any]) -> None:
    """Defer the hooks in `registry` to `run_deferred`, except the engine's own."""
    for key, hook in registry.items():
        if not (is_ours(hook) or isinstance(hook, PostponedHook)):
            registry[key] = PostponedHook(hook)


def run_deferred(registry: dict[int, Any], *args: Any) -> None:
    """Run the deferred hooks in `registry` with `args`."""
    for hook in tuple(registry.values()):
        if isinstance(hook, PostponedHook):
            hook.hook(*args)


def run_user_hooks(leaves: Sequence[torch.Tensor], holders: Sequence[torch.Tensor]) -> None:
    """Run the deferred hooks of those `leaves` whose holders have a `.grad`, which is the sharded gradient now."""
    for leaf, holder in zip(leaves, holders, strict=True):
        for hooks in _torch.accumulate_hooks([leaf]) if holder.grad is not None else ():
            run_deferred(hooks, holder)


def run_hooks(parameters: Sequence[torch.Tensor]) -> None:
    """Run user-defined post-accumulate hooks of `parameters` into which autograd itself does not accumulate."""
    for parameter in parameters:
        if (registry := _torch.hooks_on(parameter)) and parameter.grad is not None:
            for hook in tuple(registry.values()):
                hook(parameter)


def user_hooked(parameters: Iterable[torch.Tensor]) -> list[int]:
    """The indices of those of `parameters` that have a user-defined post-accumulate hook."""
    return [
        index
        for index, hooks in enumerate(map(_torch.hooks_on, parameters))
        if hooks and not all(map(is_ours, hooks.values()))
    ]


def before_leaf(leaf: nn.Parameter, callback: Callable[[], None]) -> Any:
    """Call `callback` before a gradient is accumulated into `leaf`."""

    return leaf.register_hook(lambda grad: callback())


def follow(leaf: torch.Tensor, holder: torch.Tensor) -> None:
    """Run the hooks of `register_hook()` on `holder` on the gradients of `leaf` from now on."""
    leaf.register_hook(functools.partial(_run_hooks_of, weakref.ref(holder)))


def _run_hooks_of(holder: weakref.ref[torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
    found = holder()
    with _torch.as_plain_tensors():
        registered = hooks_of_users(found) if found is not None else []
    for hook in registered:
        made = hook(grad)
        grad = grad if made is None else made
    return grad


_our_ids = itertools.count(-1, -1)  # of hooks on tensors; users' hooks have the ids of their handles, from 0 on


def hooks_of_users(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """The hooks that users have registered by `register_hook()` of `tensor`."""
    return [hook for number, hook in (_torch.has_hooks(tensor) or {}).items() if number >= 0]


def users_have_hooked(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of `tensors` has such a hook."""
    return any([registered and max(registered) >= 0 for registered in map(_torch.has_hooks, tensors)])


def before_gradients_of(leaf: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> Callable[[], object]:
    """Call `callback` with each gradient of `leaf`, which may also require none yet. Returns a function that ends
    that."""
    ours = next(_our_ids)
    if (registered := _torch.has_hooks(leaf)) is not None:
        registered[ours] = callback
    else:
        leaf._backward_hooks = OrderedDict({ours: callback})
    return remover(leaf, ours)


def is_captured(leaf: torch.Tensor) -> bool:
    """Whether the running graph task returns the gradient of `leaf` (`torch.autograd.grad`) instead of accumulating
    it."""
    with _torch.as_plain_tensors():
        return _torch.is_captured(torch.autograd.graph.get_gradient_edge(leaf).node)


def before_backward_of(tensor: torch.Tensor, callback: Callable[[torch.Tensor], None], *, first: bool = False) -> int:
    """Call `callback` with the gradient with respect to `tensor` before autograd propagates it: for as long as the
    graph of a non-leaf `tensor` lives. Returns the id of the hook.

    With `first`, it runs before all hooks that users have registered or will register. [Note: first hooks]
    """
    ours = next(_our_ids)
    if type(tensor) is torch.Tensor and tensor.grad_fn is not None and not _torch.has_hooks(tensor):
        tensor._backward_hooks = OrderedDict({ours: callback})  # the removable handle is most of the cost of a hook
        tensor.grad_fn._register_hook_dict(tensor)
        return ours
    with _torch.as_plain_tensors():
        handle = tensor.register_hook(callback)
        registered: Any = _torch.has_hooks(tensor)
    registered[ours] = registered.pop(handle.id)
    if first:
        for users in [each for each in registered if each >= 0]:
            registered[users] = registered.pop(users)  # `move_to_end` changes an order that autograd does not see
    return ours


def is_watched(tensor: torch.Tensor, ours: int) -> bool:
    """Whether the hook with this id of `before_backward_of` is on the value that `tensor` has now: an in-place
    operation leaves hooks on the value before."""
    return ours in (_torch.has_hooks(tensor) or ())


def remover(leaf: torch.Tensor, ours: int) -> Callable[[], object]:
    """A function that removes the hook with this id from `leaf`, which it does not keep alive."""
    registered = weakref.ref(_torch.has_hooks(leaf))

    def remove() -> None:
        if (found := registered()) is not None:
            found.pop(ours, None)

    return remove


def before_backward_of_base(view: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> None:
    """Call `callback` before autograd runs the node that computed the base of `view`, and hooks of users on it. An
    in-place operation on a view makes autograd derive the view from its base again, which bypasses the hooks on the
    view."""
    base = view._base
    if base is not None and base.grad_fn is not None:
        before_backward_of(base, callback, first=True)


def before_forward(module: nn.Module, hook: Callable[[nn.Module, Any], None]) -> None:
    """Call `hook` with `module` and its arguments before each of its forwards."""
    module.register_forward_pre_hook(hook)


def will_accumulate(leaf: torch.Tensor) -> bool:
    """Whether the running graph task computes, or has computed, a gradient for `leaf`."""
    with _torch.as_plain_tensors():  # the leaf may be a hidden parameter
        if not leaf.requires_grad:  # a hook has frozen it since the backward began
            return False
        return _torch.will_accumulate(torch.autograd.graph.get_gradient_edge(leaf).node)


def customs_before(nodes: Iterable[Any], node: Any = None) -> list[Any]:
    """The nodes of custom autograd Functions that a backward reaches from `nodes`. With `node`: only those whose
    forward ran before that of `node`."""
    latest = math.inf if node is None else node._sequence_nr()
    return [each for each in customs_in(downstream(nodes)) if each._sequence_nr() < latest]


def customs_in(nodes: Iterable[Any]) -> list[Any]:
    """Those of `nodes` that are of custom autograd Functions."""
    return [each for each in nodes if isinstance(each, torch.autograd.function.BackwardCFunction)]


def accumulates_in(nodes: Iterable[Any], leaves: Iterable[torch.Tensor]) -> bool:
    """Whether the running graph task accumulates gradients of any of `leaves` in `nodes`: these may be older than the
    present accumulators of the leaves, which `will_accumulate` asks about."""
    known = set(map(id, leaves))
    ends = (each for each in nodes if id(getattr(each, "variable", None)) in known)
    return any(map(_torch.will_accumulate, ends))


def flows_past(nodes: Iterable[Any], leaves: Iterable[torch.Tensor]) -> bool:
    """Whether a backward reaches leaves other than `leaves` from `nodes`."""
    known = {id(None), *map(id, leaves)}
    ends = (each for each in downstream(nodes) if not each.next_functions)
    return any(id(getattr(each, "variable", None)) not in known for each in ends)


def downstream(nodes: Iterable[Any]) -> Iterator[Any]:
    """`nodes` and all nodes that a backward reaches from them."""
    seen: set[Any] = {None}
    left = [each for each in nodes if each not in seen]
    seen.update(left)
    while left:
        each = left.pop()
        yield each
        for following, _ in each.next_functions:
            if following not in seen:
                seen.add(following)
                left.append(following)


class CustomFunctions:
    """Nodes of custom autograd Functions, for as long as their graphs live, with a record of whether the running graph
    task has finished them."""

    def __init__(self) -> None:
        self._ran_in: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def add(self, nodes: Iterable[Any], ran: Callable[[], None]) -> None:
        """Call `ran` whenever a graph task has finished one of `nodes`."""
        for node in nodes:
            if node not in self._ran_in:
                self._ran_in[node] = -1
                node.register_hook(functools.partial(_custom_ran, self._ran_in, weakref.ref(node), ran))

    def are_to_come(self) -> bool:
        """Whether the running graph task will reach one of the nodes, or is running one."""
        task = _torch.graph_task()
        return any([ran_in != task and _torch.will_compute(node) for node, ran_in in self._ran_in.items()])


def _custom_ran(
    ran_in: weakref.WeakKeyDictionary[Any, int], node: weakref.ref[Any], ran: Callable[[], None], *grads: Any
) -> None:
    ran_in[node()] = _torch.graph_task()
    ran()


class _Edges(torch.autograd.Function):
    """A Function that is used only for its node, whose next functions are the nodes of all inputs."""

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)  # of a dtype that has gradients


def _nodes_of(leaves: Sequence[torch.Tensor]) -> tuple[list[Any], list[int]]:
    """The nodes that accumulate the gradients of `leaves`, None for those that require none, and the reference counts
    of these."""
    enabled = torch.is_grad_enabled()
    if not enabled:
        torch.set_grad_enabled(True)
    try:
        # `Function.apply` checks every argument in Python, for functorch.
        made: Any = super(torch.autograd.Function, _Edges).apply(*leaves)
    finally:
        if not enabled:
            torch.set_grad_enabled(False)
    if (node := made.grad_fn) is None:
        return [], []
    nodes = [*map(itemgetter(0), node.next_functions)]
    # Counted while `node` lives: nodes that C++ also holds may have one more reference.
    return nodes, list(map(sys.getrefcount, nodes))


_unheld = 0  # the reference count, at that point, of a node without other references; measured when first needed


def held_nodes(leaves: Sequence[torch.Tensor], counts: Sequence[int]) -> dict[int, Any]:
    """The gradient accumulation nodes of `leaves` that other Python code holds references to; by the id of the leaf.
    `counts`: the use counts of `leaves`."""
    global _unheld
    leaves = [leaf for leaf, count in zip(leaves, counts, strict=True) if count > 1]  # others have no node
    if not leaves:
        return {}
    if not _unheld:
        _, (_unheld,) = _nodes_of([torch.empty(0, requires_grad=True)])
    nodes, references = _nodes_of(leaves)
    if not nodes or max(references) == _unheld:  # nearly always, after calls in C alone
        return {}
    found = zip(leaves, nodes, references, strict=True)
    return {id(leaf): node for leaf, node, count in found if count > _unheld and node is not None}


# Returns the hooks of a node, or None when the node is gone.
HooksOfNode = Callable[[], "dict[int, Any] | None"]


def hooks_of_node(node: Any) -> tuple[HooksOfNode, HooksOfNode]:
    """Weak references to the live dictionaries of the hooks that run before and after `node`."""
    found = []
    for register in node.register_prehook, node.register_hook:
        handle = register(_nothing)
        handle.remove()
        found.append(handle.hooks_dict_ref)
    before, after = found
    return before, after


def _nothing(*args: Any) -> None:
    return


class MultiGradHook:
    """Calls a callback once per backward, when this backward has computed all of its gradients for the tensors.

    [Note: arrivals] In torch's own `register_multi_grad_hook` each tensor's hook references the nodes of all tensors: a
    cycle through the graph, with all activations in it, that only the garbage collector breaks. Here the hooks
    reference this object weakly, and hooks on tensors computed from these keep it alive: as the graph itself does.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], callback: Callable[[], None]) -> None:
        self._nodes = [tensor.grad_fn for tensor in tensors]
        self._callback = callback
        self._missing: dict[int, int] = {}  # by graph task

    def arrive(self, grad: torch.Tensor) -> None:
        """Count one gradient that has been computed."""
        task = _torch.graph_task()
        missing = self._missing.get(task)
        if missing is None:
            missing = sum(node is None or _torch.will_compute(node) for node in self._nodes)
        self._missing[task] = missing - 1
        if missing == 1:
            del self._missing[task]
            self._callback()

    def precedes(self, output: torch.Tensor) -> bool:
        """Whether `output` was computed after all tensors of this hook, so that its hooks may keep this object alive.
        In backwards, where each thread numbers its own nodes, that is assumed of every output."""
        node = output.grad_fn
        later = node is not None and (_torch.in_backward() or node._sequence_nr() > max(map(_SEQUENCE, self._nodes)))
        return bool(later)


def after_backward_to(
    tensors: Sequence[torch.Tensor], callback: Callable[[], None]
) -> tuple[list[Callable[[], object]], MultiGradHook | None]:
    """Call `callback` once per backward, when that has computed all of its gradients for `tensors`.

    Returns functions that remove the hooks from leaves, and an object (or None) to keep alive, downstream of `tensors`,
    for as long as the hooks shall work. Leaves among non-leaf tensors are ignored. If all tensors are leaves, the
    callback runs only if all of their gradients are computed: nothing shows whether an `autograd.grad` will reach a
    leaf.
    """
    inner = [tensor for tensor in tensors if tensor.grad_fn is not None]
    if len(inner) == 1:
        before_backward_of(inner[0], lambda grad: callback())
        return [], None
    arrivals = MultiGradHook(inner or tensors, callback)
    if not inner:  # leaves, which hold no graph
        return [remover(tensor, before_backward_of(tensor, arrivals.arrive)) for tensor in tensors], None
    this = weakref.ref(arrivals)

    def one_arrived(grad: torch.Tensor) -> None:
        if (found := this()) is not None:
            found.arrive(grad)

    for tensor in inner:
        before_backward_of(tensor, one_arrived)
    return [], arrivals


class BackwardCompletion:
    """A callback that runs one of two functions, depending on how the running graph task ended.

    [Note: failure] Autograd runs no callback after an exception, but it releases its callbacks: if this object is
    destroyed without having been called, the backward has failed. That happens before the exception reaches the user.
    """

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended = ended
        self._failed = failed
        self._called = False

    def __call__(self) -> None:
        if _functorch.in_transform():
            with _functorch.outside():
                return self()
        self._called = True
        try:
            self._ended()
        except BaseException:  # not in the destructor, which would run late: the traceback keeps this object alive
            self._failed()
            raise

    def __del__(self) -> None:
        if not self._called:
            with _functorch.outside():
                self._failed()


def at_end_of_backward(ended: Callable[[], None], failed: Callable[[], None]) -> None:
    """Call `ended` when the running graph task has ended, or `failed` when an exception ended it."""
    _torch.at_end_of_backward(BackwardCompletion(ended, failed))
