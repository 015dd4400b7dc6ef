"""The only file that registers hooks and callbacks with autograd. It knows callbacks, not units.

[Note: hooks] Hooks sit on tensors, not in identity Functions: an output of a custom Function may not be edited in place
by the user, a tensor hook survives that. Callbacks hold their owner weakly where the thing they hang on outlives a
step: a closure on a leaf is never freed, not even by the garbage collector.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn

from . import _functorch, _torch

_SEQUENCE = methodcaller("_sequence_nr")

# The post-accumulate hooks of one tensor, by their numbers; as alive as the tensor.
Registry = dict[int, Callable[[torch.Tensor], None]]


class LeafHook:
    """The post-accumulate hook of one leaf: calls `leaf_ready(kind, index, leaf)` of its owner, held weakly."""

    __slots__ = ("_index", "_kind", "_owner")

    def __init__(self, owner: Any, kind: int, index: int) -> None:
        self._owner = weakref.ref(owner)
        self._kind = kind
        self._index = index

    def __call__(self, leaf: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.leaf_ready(self._kind, self._index, leaf)


class PostponedHook:
    """A user's hook, kept from running on the unsharded gradient and run on the sharded one instead."""

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> None:
        return


def watch_leaf(leaf: nn.Parameter, owner: Any, kind: int, index: int) -> Registry:
    """Call `owner.leaf_ready(kind, index, leaf)` whenever `leaf.grad` has been accumulated; returns where all hooks of
    `leaf` are."""
    leaf.register_post_accumulate_grad_hook(LeafHook(owner, kind, index))
    registry = _torch.hooks_on(leaf)
    assert registry is not None
    return registry


def are_more_than_ours(registries: Collection[Registry]) -> bool:
    """Whether users have hooks in some of `registries`, of leaves that are watched."""
    return sum(map(len, registries)) > len(registries)


def defer_user_hooks(leaves: Iterable[nn.Parameter]) -> None:
    """Keep users' post-accumulate hooks of `leaves` for `run_user_hooks`; their own handles still remove them."""
    for hooks in _torch.accumulate_hooks(leaves):
        defer(hooks)


def defer(registry: dict[int, Any]) -> None:
    """Keep the hooks in `registry` for `run_deferred`, but for our own."""
    for key, hook in registry.items():
        if not isinstance(hook, (LeafHook, PostponedHook)):
            registry[key] = PostponedHook(hook)


def run_deferred(registry: dict[int, Any], *args: Any) -> None:
    """Run what `defer` kept, on `args`."""
    for hook in tuple(registry.values()):
        if isinstance(hook, PostponedHook):
            hook.hook(*args)


def run_user_hooks(leaves: Sequence[torch.Tensor]) -> None:
    """Run what `defer_user_hooks` kept, on those of `leaves` whose `.grad`, the sharded gradient now, is there."""
    for leaf in leaves:
        for hooks in _torch.accumulate_hooks([leaf]) if leaf.grad is not None else ():
            run_deferred(hooks, leaf)


def run_hooks(parameters: Sequence[torch.Tensor]) -> None:
    """Run users' post-accumulate hooks of `parameters`, into which autograd accumulates nothing."""
    for parameter in parameters:
        if (registry := _torch.hooks_on(parameter)) and parameter.grad is not None:
            for hook in tuple(registry.values()):
                hook(parameter)


def user_hooked(parameters: Iterable[torch.Tensor]) -> list[int]:
    """The indices of those of `parameters` that have a user-defined post-accumulate hook."""
    return [
        index
        for index, hooks in enumerate(map(_torch.hooks_on, parameters))
        if hooks and not all(isinstance(hook, LeafHook) for hook in hooks.values())
    ]


def before_leaf(leaf: nn.Parameter, callback: Callable[[], None]) -> Any:
    """Call `callback` before a gradient is accumulated into `leaf`."""

    return leaf.register_hook(lambda grad: callback())


# Calls a callback with the gradient with respect to a tensor whenever that is about to flow on; what it returns has
# `remove()`. Torch's own, because every unit calls it.
before_backward_of: Callable[[torch.Tensor, Callable[[torch.Tensor], None]], Any] = torch.Tensor.register_hook


def before_backward_of_result(tensor: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> None:
    """The same, for as long as the graph of `tensor` lives, which is no leaf: without what removes it."""
    if type(tensor) is not torch.Tensor or _torch.has_hooks(tensor):
        before_backward_of(tensor, callback)
        return
    tensor._backward_hooks = OrderedDict({-1: callback})  # where users' hooks go, too: by the numbers of their handles
    tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]


def before_backward_of_base(view: torch.Tensor, callback: Callable[[], None]) -> None:
    """Call `callback` whenever gradients are about to flow on to what computed the base of `view`: what is written into
    a view in place makes autograd derive it from its base anew, past the hooks on the view."""
    base = view._base
    if base is not None and base.grad_fn is not None:
        base.grad_fn.register_prehook(lambda grads: callback())


def before_forward(module: nn.Module, hook: Callable[[nn.Module, Any], None]) -> None:
    """Call `hook` with `module` and its arguments before each of its forwards."""
    module.register_forward_pre_hook(hook)


def will_accumulate(leaf: torch.Tensor) -> bool:
    """Whether the running graph task brings a gradient to `leaf`, or has brought it."""
    with _torch.as_plain_tensors():  # it may be hidden
        return _torch.will_accumulate(torch.autograd.graph.get_gradient_edge(leaf).node)


def shape_awaited(leaf: torch.Tensor) -> torch.Size:
    """The shape of `leaf` when the graphs that are alive first read it; its own where there are none."""
    return shape_admitted(torch.autograd.graph.get_gradient_edge(leaf).node)


shape_admitted = _torch.shape_awaited


def customs_before(nodes: Iterable[Any], node: Any = None, *, until: Iterable[Any] = ()) -> list[Any]:
    """The nodes of custom autograd Functions to which gradients of `nodes` flow on, not past those in `until`, of those
    that ran their forward before that of `node`, if one is given."""
    latest = math.inf if node is None else node._sequence_nr()
    customs = torch.autograd.function.BackwardCFunction
    return [each for each in _downstream(nodes, until) if isinstance(each, customs) and each._sequence_nr() < latest]


def flows_past(nodes: Iterable[Any], leaves: Iterable[torch.Tensor]) -> bool:
    """Whether gradients of `nodes` flow on to leaves besides `leaves`."""
    known = {id(None), *map(id, leaves)}
    ends = (each for each in _downstream(nodes) if not each.next_functions)
    return any(id(getattr(each, "variable", None)) not in known for each in ends)


def _downstream(nodes: Iterable[Any], until: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes to which gradients of `nodes` flow on, and these, not past those in `until`."""
    seen = {None, *until}
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
    """Nodes of custom autograd Functions, as long as their graphs live, and whether the running graph task is through
    with them."""

    def __init__(self) -> None:
        self._ran_in: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def add(self, nodes: Iterable[Any], ran: Callable[[], None]) -> None:
        """Call `ran` whenever a graph task is through with one of `nodes`."""
        for node in nodes:
            if node not in self._ran_in:
                self._ran_in[node] = -1
                node.register_hook(functools.partial(_custom_ran, self._ran_in, weakref.ref(node), ran))

    def are_to_come(self) -> bool:
        """Whether the running graph task comes to one of them, or runs one."""
        task = _torch.graph_task()
        return any([ran_in != task and _torch.will_compute(node) for node, ran_in in self._ran_in.items()])


def _custom_ran(
    ran_in: weakref.WeakKeyDictionary[Any, int], node: weakref.ref[Any], ran: Callable[[], None], *grads: Any
) -> None:
    ran_in[node()] = _torch.graph_task()
    ran()


class _Edges(torch.autograd.Function):
    """Of no use but for its node, whose next ones are those of all its inputs."""

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        return leaves[0].new_empty(0)


def _nodes_of(leaves: Sequence[torch.Tensor]) -> tuple[list[Any], list[int]]:
    """The nodes to which gradients of `leaves` come, all of which require one, and how many references each has."""
    enabled = torch.is_grad_enabled()
    if not enabled:
        torch.set_grad_enabled(True)
    try:
        # Function's own `apply` looks at every argument in Python, for functorch.
        made: Any = super(torch.autograd.Function, _Edges).apply(*leaves)
    finally:
        if not enabled:
            torch.set_grad_enabled(False)
    node = made.grad_fn
    nodes = [*map(itemgetter(0), node.next_functions)]
    # While that node lives: one that C++ holds, too, may have a reference more.
    return nodes, list(map(sys.getrefcount, nodes))


_REQUIRES_GRAD = attrgetter("requires_grad")
_unheld = 0  # references to a node that nobody else holds, where they are counted; found when it matters


def held_nodes(leaves: Sequence[torch.Tensor]) -> dict[int, Any]:
    """The nodes to which gradients of `leaves` come, of those where somebody holds the node in Python; by id of the
    leaf."""
    global _unheld
    counts = list(map(_torch.use_count, leaves))
    if max(counts, default=0) <= 1:
        return {}
    maybe_held = itertools.compress(leaves, map((1).__lt__, counts))  # of holders at rest none is, as a rule
    if not (leaves := [*filter(_REQUIRES_GRAD, maybe_held)]):
        return {}
    if not _unheld:
        _, (_unheld,) = _nodes_of([torch.empty(0, requires_grad=True)])
    nodes, references = _nodes_of(leaves)
    if max(references) == _unheld:
        return {}
    held = itertools.compress(zip(map(id, leaves), nodes, strict=True), map(_unheld.__lt__, references))
    return dict(held)


# Weakly: as alive as the node.
HooksOfNode = Callable[[], "dict[int, Any] | None"]


def hooks_of_node(node: Any) -> tuple[HooksOfNode, HooksOfNode]:
    """What gives the live dictionaries of hooks that run before and after `node`, as long as that is there."""
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
    """Called once per backward when the gradients of all its tensors that this backward computes are there.

    [Note: arrivals] torch's own `register_multi_grad_hook` lets each tensor's hook hold the nodes of all: a cycle
    through the graph that only the garbage collector breaks, and all activations in it. Here the hooks hold this object
    weakly, and whoever stands downstream of the tensors keeps it: what it holds then points the way the graph does.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], callback: Callable[[], None]) -> None:
        self._nodes = [tensor.grad_fn for tensor in tensors]
        self._callback = callback
        self._missing: dict[int, int] = {}  # by graph task

    def arrive(self, grad: torch.Tensor) -> None:
        """One of the gradients is there."""
        task = _torch.graph_task()
        missing = self._missing.get(task)
        if missing is None:
            missing = sum(node is None or _torch.will_compute(node) for node in self._nodes)
        self._missing[task] = missing - 1
        if missing == 1:
            del self._missing[task]
            self._callback()

    def precedes(self, output: torch.Tensor) -> bool:
        """Whether `output` was made after all tensors that are waited for: its hooks may hold this. In backwards, where
        threads number nodes of their own, all are taken for that."""
        node = output.grad_fn
        later = node is not None and (_torch.in_backward() or node._sequence_nr() > max(map(_SEQUENCE, self._nodes)))
        return bool(later)


def after_backward_to(
    tensors: Sequence[torch.Tensor], callback: Callable[[], None]
) -> tuple[list[Any], MultiGradHook | None]:
    """Call `callback` once per backward when the gradients of all `tensors` that it computes are there.

    Returns what removes the hooks, and what must be kept alive, downstream of `tensors`, for as long as they shall
    work. Leaves among other tensors are not waited for, and leaves alone only if all of their gradients are computed:
    nothing shows whether an `autograd.grad` will reach a leaf.
    """
    inner = [tensor for tensor in tensors if tensor.grad_fn is not None]
    if len(inner) == 1:
        return [before_backward_of(inner[0], lambda grad: callback())], None
    arrivals = MultiGradHook(inner or tensors, callback)
    if not inner:  # leaves, which hold no graph
        return [tensor.register_hook(arrivals.arrive) for tensor in tensors], None
    this = weakref.ref(arrivals)

    def one_arrived(grad: torch.Tensor) -> None:
        if (found := this()) is not None:
            found.arrive(grad)

    return [tensor.register_hook(one_arrived) for tensor in inner], arrivals


class BackwardCompletion:
    """Called once, by how the running graph task ended.

    [Note: failure] Autograd runs no callback after an exception, but it lets its callbacks go: an object that is
    destroyed without having been called is the sign of a failed backward, and it comes before the exception reaches the
    user.
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
        except BaseException:  # at once: the traceback keeps this object, and the destructor would come late
            self._failed()
            raise

    def __del__(self) -> None:
        if not self._called:
            with _functorch.outside():
                self._failed()


def at_end_of_backward(ended: Callable[[], None], failed: Callable[[], None]) -> None:
    """Call `ended` when the running graph task has ended, or `failed` when an exception ended it."""
    _torch.at_end_of_backward(BackwardCompletion(ended, failed))
