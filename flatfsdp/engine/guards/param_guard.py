"""A parameter that does not show its value, and refuses to be used.

[Note: guarded parameters] A leaf has no memory while its unit is sharded. A holder is this rank's shard: from the
beginning of a forward to the end of its backward a term over `model.parameters()` would silently differ between ranks,
and be in no gradient. So for that time they have a class whose operations raise. They stay the same objects,
`Parameter`s, and pure queries (`.grad`, `requires_grad`, hooks) are answered; shape, strides, dtype and device are
those of this rank's shard, so that the number of elements is the same at any time. At rest holders can be used, for
example by optimizers. Autograd may record it; if a backward then brings a gradient to such a holder, it is refused
(`_refuse_gradients_of`).

[Note: shards by hand] Momentum encoders update their weights inside a forward, element by element and without a graph:
`k.mul_(m).add_(q, alpha=1 - m)`, or the same with `.data` or `detach()`. On every rank that is right for its shards,
independent of the views that the leaves show; so there, and nowhere else, such operations are executed on the shards. A
unit that was gathered before a write to one of its shards is gathered again. Not in a backward: a hook that reads
weights of a unit that is not gathered would multiply gradients by a shard.

For other reasons, too, parameters have another class for a time: the same objects, whose use is refused or noticed
meanwhile. A user-defined subclass of `nn.Parameter` gets a class of its own, which `isinstance` treats as the same.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import UsageError, fail
from ..base import _torch
from ..base import autograd as hooks
from ..base._dtensor import are_split_alike, is_dtensor, spec_of
from ..flat.faces import own_grad, set_own_grad
from ..flat.flat_param import FlatParamHandle
from ..flat.guard import ORIGINAL
from ..flat.views import change_classes
from ..flat.write_tracker import TracksWrites
from .deferred_grad import ARRIVALS, DeferredGradParameter, show_deferred, wait_for_grad
from .lost_writes import WriteGuard


class ClassVariants(dict[type, type]):
    """Maps the class of a parameter to its temporary class."""

    def __init__(self, variant: type[nn.Parameter]) -> None:
        """`variant` is that of `nn.Parameter`."""
        super().__init__({nn.Parameter: variant, variant: variant})
        self._variant = variant
        ORIGINAL[variant] = nn.Parameter

    def __missing__(self, cls: type) -> type:
        original = ORIGINAL.get(cls, cls)
        self[cls] = self._derived(original) if original is cls else self[original]
        return self[cls]

    def _derived(self, cls: type) -> type:
        """The variant of a user-defined class; the class itself if its objects cannot change their class."""
        if nn.Parameter not in cls.__mro__:
            return cls
        try:
            made = types.new_class(f"{self._variant.__name__}Of{cls.__name__}", (self._variant, cls))
            nn.Parameter.__new__(cls, torch.empty(0)).__class__ = made  # type: ignore[assignment]
        except (TypeError, RuntimeError):
            return cls
        ORIGINAL[made] = cls
        self[made] = made
        return made


class CopiedAsOriginal:
    """Copies of such an object have the class that the parameter had before."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        cls = type(self)
        self.__class__ = ORIGINAL[cls]
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = cls


class WriteTrackedParameter(CopiedAsOriginal, TracksWrites, nn.Parameter):
    """The class of `nn.Parameter` objects that show an unsharded form which will be freed, for code that requested it
    or holds it in the place of a flat parameter; never constructed."""


NOTICED = ClassVariants(WriteTrackedParameter)
NOTICED[DeferredGradParameter] = DeferredGradParameter  # it notices writes


class GradientOfHolder:
    """A private leaf outside of its unit's forward and backward. Its `.grad` is that of its holder: code that drops,
    clips or measures the gradients of parameters that it listed inside of a forward, or after `unshard()`, meets it at
    any time. [Note: two lives]"""

    @property
    def grad(self) -> torch.Tensor | None:
        return holder.grad if (holder := _holder_left(self)) is not None else own_grad(_tensor(self))

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if (holder := _holder_left(self)) is None:
            set_own_grad(_tensor(self), value)
            return
        if value is not None and not _is_laid_out_like(value, holder):
            raise UsageError(
                f"parameter {_names([_tensor(self)])}: its .grad was replaced by {_in_words(value)}. Expected the "
                f"gradient of {'it' if is_dtensor(holder) else 'its shard on this rank'}, {_in_words(holder)}"
            )
        holder.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def _is_laid_out_like(value: torch.Tensor, holder: torch.Tensor) -> bool:
    """Whether `value` has the shape of `holder`, and the same part of a whole tensor if that is a DTensor."""
    if value.shape != holder.shape or is_dtensor(value) != is_dtensor(holder):
        return False
    # On one rank all placements are the same.
    return not is_dtensor(holder) or are_split_alike(value, holder) or spec_of(value).mesh.size() == 1


def _in_words(value: torch.Tensor) -> str:
    if not is_dtensor(value):
        return f"a tensor of shape {tuple(value.shape)}"
    spec = spec_of(value)
    return f"a DTensor of shape {tuple(value.shape)} with placements {spec.placements} on {spec.mesh}"


def _tensor(leaf: Any) -> torch.Tensor:
    return leaf


def _holder_left(leaf: Any) -> nn.Parameter | None:
    """The parameter that stands for `leaf` at rest; None if its model is gone."""
    return holder_of(leaf) if has_handle(leaf) else None


class NoticedPrivate(GradientOfHolder, WriteTrackedParameter):
    """The class of such leaves that show an unsharded form; never constructed."""


PRIVATE_NOTICED = ClassVariants(NoticedPrivate)

# Operations that query a tensor, or attach something to it, without reading its elements.
_QUERIES = frozenset(
    "__get__ __set__ __delete__ __repr__ __hash__ __len__ __format__ size dim ndimension numel nelement stride "
    "storage_offset element_size is_contiguous is_floating_point is_complex is_signed get_device data_ptr "
    "untyped_storage requires_grad_ is_inference register_hook register_post_accumulate_grad_hook".split()
)
# Properties that are the elements in another form.
_READ = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))


def is_query(func: Callable[..., Any]) -> bool:
    """Whether `func`, as passed to `__torch_function__`, neither reads nor writes elements of its tensors."""
    return getattr(func, "__name__", "") in _QUERIES and property_of(func) not in _READ


def name_of(func: Callable[..., Any]) -> str:
    """The name of `func` for users: "add()", or ".data" for a property."""
    return f".{property_of(func)}" if property_of(func) else f"{getattr(func, '__name__', func)}()"


def property_of(func: Callable[..., Any]) -> str:
    """The name of the tensor property that `func` gets or sets; "" if it does neither."""
    is_access = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
    return getattr(getattr(func, "__self__", None), "__name__", "") if is_access else ""


# By their names, without the affixes of in-place, reflected and foreach variants.
_ELEMENTWISE = frozenset(
    "mul add sub div true_divide truediv lerp copy neg clamp clamp_min clamp_max zero fill addcmul addcdiv".split()
)


# Queries that this rank's shard answers: those that describe a tensor.
_OF_SHARD = frozenset(
    "shape ndim dtype device itemsize nbytes is_cpu is_cuda is_meta is_xpu size dim ndimension numel nelement stride "
    "storage_offset element_size is_contiguous is_floating_point is_complex is_signed get_device __len__".split()
)

_LAYOUT = frozenset("shape size dim numel nelement stride __len__ data data_ptr untyped_storage".split())


class UnusableParameter(nn.Parameter):
    """The class of `nn.Parameter` objects while they do not show their value; never constructed. Queries are answered
    for this rank's shard."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = property_of(func) or getattr(func, "__name__", "")
        if (name in _LAYOUT or _is_elementwise(func)) and not torch.is_grad_enabled():
            for each in args:
                if isinstance(each, UnusableParameter) and each.requires_grad:
                    _refuse_in_custom_function(each)
        if is_query(func):
            query = property_of(func)
            if query == "grad":
                wait_for_grad(args[0])
            elif (query or func.__name__) in _OF_SHARD:
                args, kwargs = tuple(map(_described, args)), {name: _described(value) for name, value in kwargs.items()}
            return super().__torch_function__(func, types, args, kwargs)
        if property_of(func) == "data" and (len(args) > 1 or not _torch.in_backward()):
            return data_of_shard(*args)
        if leads_to_accumulator(func, args):
            return _expanded(args[0])
        if not torch.is_grad_enabled() and _is_elementwise(func) and not _torch.in_backward():
            return _call_with_shards(func, args, kwargs)
        used = (*args, *kwargs.values())
        if func in (torch.autograd.grad, torch.autograd.backward):
            raise UsageError(_refusal_to_ask(name_of(func), used))
        raise UsageError(_refusal(name_of(func), used))

    def __repr__(self) -> str:  # type: ignore[override]
        shard = _described(self)
        found = f"shape={tuple(shard.shape)}, dtype={shard.dtype}, requires_grad={self.requires_grad}"
        return f"Parameter containing: this rank's shard, which cannot be read until the backward has ended ({found})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter of the shard; it belongs to no handle and hides nothing."""
        if id(self) not in memo:
            made = memo[id(self)] = nn.Parameter(shard_of(self).clone(), self.requires_grad)
            made.__class__ = ORIGINAL[type(self)]
            vars(made).update(vars(self))
        copied: nn.Parameter = memo[id(self)]
        return copied


class ExpandedParameter(torch.Tensor):
    """A hidden parameter after one operation of autograd: provides access to the parameter's autograd node."""

    leaf: nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if is_query(func):
            return super().__torch_function__(func, types, args, kwargs or {})
        used = (*args, *(kwargs or {}).values())
        names = _names(each.leaf for each in used if isinstance(each, ExpandedParameter))
        raise UsageError(
            f"{name_of(func)} computes with the result of expand_as() or view_as() of parameter {names}, which is "
            "sharded: that result only serves to find its AccumulateGrad node. Compute with full values in the "
            "forward of its module, or inside summon_full_params()"
        )


def leads_to_accumulator(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a parameter is expanded, or viewed, as itself."""
    return name_of(func) in ("expand_as()", "view_as()") and args[0] is args[-1]


def _expanded(leaf: nn.Parameter) -> torch.Tensor:
    """`leaf.expand_as(leaf)`, for code that looks for its accumulator. [Note: accumulators]"""
    with torch.enable_grad(), _torch.as_plain_tensors():
        return _as_expanded(leaf.expand_as(leaf), leaf)


def _as_expanded(made: torch.Tensor, leaf: nn.Parameter) -> torch.Tensor:
    made.__class__ = ExpandedParameter  # `as_subclass` would add an operation
    assert isinstance(made, ExpandedParameter)
    made.leaf = leaf
    return made


HIDDEN = ClassVariants(UnusableParameter)
HIDDEN[DeferredGradParameter] = UnusableParameter


class UnusablePrivate(GradientOfHolder, UnusableParameter):
    """The class of private leaves that show nothing; never constructed."""


PRIVATE_HIDDEN = ClassVariants(UnusablePrivate)


# The handle and index of leaves that may be hidden, by their ids: looked up when one is used.
_handles: dict[int, tuple[weakref.ref[FlatParamHandle], int]] = {}


def may_hide(handle: FlatParamHandle) -> Callable[[], object]:
    """Register the leaves of `handle`, which will be hidden, so that operations on them can look the handle up. Returns
    a function that gives users' parameters back, as the deletion of the handle does."""
    this = weakref.ref(handle)
    ids = [*map(id, handle.leaves), *map(id, handle.face.originals)]
    _handles.update({each: (this, index % len(handle.leaves)) for index, each in enumerate(ids)})
    undo = [*map(_refuse_gradients_of, handle.face.holders)] if handle.face.holders_refuse else []
    # Weakly: a parameter may have its model as an attribute.
    return weakref.finalize(handle, _forget, ids, this, [*map(weakref.ref, handle.face.showing)], undo)


def _forget(
    ids: Iterable[int],
    handle: weakref.ref[FlatParamHandle],
    holders: Iterable[weakref.ref[nn.Parameter]],
    undo: Iterable[Callable[[], object]],
) -> None:
    for each in ids:
        if (found := _handles.get(each)) and found[0] is handle:
            del _handles[each]
    if left := [holder for of_it in holders if (holder := of_it()) is not None]:
        change_classes(left, ORIGINAL)  # they are tensors of their own now
    for remove in undo:
        remove()


class ParamGuard(WriteGuard):
    """Refuses uses of parameters that do not show their value, and notices writes that would be lost."""

    hidden, private_hidden = HIDDEN, PRIVATE_HIDDEN
    noticed, private_noticed = NOTICED, PRIVATE_NOTICED
    awaited = ARRIVALS

    def register(self, handle: FlatParamHandle) -> Callable[[], object]:
        return may_hide(handle)

    def show_awaited(self, holders: Sequence[nn.Parameter]) -> None:
        show_deferred(holders)


GUARDED = ParamGuard()


def has_handle(leaf: torch.Tensor) -> bool:
    """Whether the model of `leaf` still exists."""
    return id(leaf) in _handles


def handle_and_index_of(leaf: torch.Tensor) -> tuple[FlatParamHandle, int]:
    """The handle that holds `leaf`, and the leaf's index there.

    Raises:
        UsageError: its model is gone.
    """
    found = _handles.get(id(leaf))
    if found is None or (handle := found[0]()) is None:
        raise UsageError(
            "a parameter was used that belonged to a model that was deleted, and whose values were deleted with it. "
            "Keep a reference to the outermost wrapper while any part of it is in use, or load the model's state dict "
            "into a new module"
        )
    return handle, found[1]


def holder_of(leaf: torch.Tensor) -> nn.Parameter:
    """The parameter that stands for `leaf` at rest."""
    handle, index = handle_and_index_of(leaf)
    return handle.face.holder_of(index)


def _refuse_gradients_of(holder: nn.Parameter) -> Callable[[], object]:
    """Refuse gradients of graphs over `holder`, which autograd would accumulate in its `.grad`: of a shard, and reduced
    by nothing. Returns a function that ends that. [Note: two lives]"""
    return hooks.before_gradients_of(holder, partial(_refuse_gradient, id(holder)))


def _refuse_gradient(key: int, grad: torch.Tensor) -> None:
    found = _handles.get(key)
    if found is None or (handle := found[0]()) is None:
        return  # its model is gone
    holder, spec = handle.face.originals[found[1]], handle.layout.params[found[1]]
    # One that was frozen since accumulates nothing, as in torch.
    if id(holder) == key and holder.requires_grad and not hooks.is_captured(holder):
        fail(
            UsageError(
                f"parameter {spec.name!r} of unit {handle.label} received a gradient of shape {tuple(grad.shape)}, "
                "which no rank would reduce. It was used outside the forward of its unit, where it shows this rank's "
                f"shard of {spec.shape}, or inside summon_full_params(): compute functions of parameters (for example "
                "an L2 penalty) inside the forward of the module that holds them, or under torch.no_grad()"
            )
        )


# -- shards by hand ----------------------------------------------------------------------------------------------------


def shard_of(leaf: torch.Tensor) -> torch.Tensor:
    """This rank's shard of `leaf`."""
    handle, index = handle_and_index_of(leaf)
    return handle.at_rest.views[index].detach()  # shares the shard's version counter, unlike `.data`


def _described(value: Any) -> Any:
    """A parameter's shard in its place; the parameter itself if its model is gone."""
    return shard_of(value) if isinstance(value, UnusableParameter) and has_handle(value) else value


def data_of_shard(leaf: torch.Tensor, *written: torch.Tensor) -> torch.Tensor | None:
    """The value of `leaf.data`; or a write to it, as `leaf.data = written` would do."""
    if _is_computing(leaf):
        raise UsageError(_refusal(".data", [leaf]))
    shard = shard_of(leaf)
    if not written:
        return shard
    value = _described(*written)
    if value.data_ptr() == shard.data_ptr() and value.shape == shard.shape and value.dtype == shard.dtype:
        return None  # as `leaf.data = leaf.data`
    if value.shape != shard.shape or value.dtype != shard.dtype:
        raise UsageError(
            f"the .data of parameter {_names([leaf])} was replaced, while it is sharded, by a tensor of shape "
            f"{tuple(value.shape)} and {value.dtype}; expected this rank's shard of it, {tuple(shard.shape)} and "
            f"{shard.dtype}. To replace full values, use summon_full_params() between steps"
        )
    with torch.no_grad():
        shard.copy_(value)
    return None


def _is_elementwise(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "").removeprefix("_foreach_").strip("_")
    return name == "detach" or name in _ELEMENTWISE or (name[:1] in ("i", "r") and name[1:] in _ELEMENTWISE)


def _call_with_shards(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `func` with each hidden parameter replaced by its shard."""
    shards: dict[int, torch.Tensor] = {}

    def shown(value: Any) -> Any:
        if isinstance(value, UnusableParameter):
            if id(value) not in shards:
                shards[id(value)] = shard_of(value)
            return shards[id(value)]
        if isinstance(value, (list, tuple)):
            return [shown(each) for each in value]
        return {key: shown(each) for key, each in value.items()} if isinstance(value, dict) else value

    used = (*args, *kwargs.values())
    if any(map(_is_computing, _hidden_in(used))):
        raise UsageError(_refusal(name_of(func), used))
    given, named = shown(args), shown(kwargs)
    _check_alike(func, used, (*given, *named.values()))
    result = func(*given, **named)
    # In place: return the parameter itself, as users expect.
    return args[0] if args and result is not None and result is given[0] else result


def _refuse_in_custom_function(leaf: torch.Tensor) -> None:
    """Raise if a custom autograd Function, which is called like a function of whole tensors, has got `leaf`: autograd
    would refuse the shape of its gradient, without names."""
    if (function := _torch.custom_function_of(leaf)) is not None:
        raise UsageError(
            f"the custom autograd Function {function} was given parameter {_names([leaf])} outside the forward of its "
            "unit, where it shows this rank's shard or nothing. Call the Function inside the forward of the module "
            "that holds the parameter, or call unshard() of that unit's wrapper before"
        )


def _check_alike(func: Callable[..., Any], used: Sequence[Any], given: Sequence[Any]) -> None:
    """Refuse operands that would broadcast, as a shard of one element does."""
    lists = [value for value in given if isinstance(value, list)]
    calls = list(zip(*lists, strict=False)) if lists else [given]
    for call in calls:
        shapes = {value.shape for value in call if isinstance(value, torch.Tensor) and value.dim()}
        if len(shapes) > 1:
            raise UsageError(
                f"{_refusal(name_of(func), used)}. Its operands have shapes {sorted(map(tuple, shapes))}: shards "
                "cannot be combined with full tensors"
            )


def _is_computing(holder: torch.Tensor) -> bool:
    """Whether modules compute with a copy of `holder`, the whole parameter, now."""
    handle, index = handle_and_index_of(holder)
    face = handle.face
    return face.computes and handle.unsharded.buffer is not None and face.originals[index] is holder


# -- refusals ----------------------------------------------------------------------------------------------------------


def _hidden_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, UnusableParameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _hidden_in(value)


def _names(leaves: Iterable[torch.Tensor]) -> str:
    named = []
    for leaf in {id(leaf): leaf for leaf in leaves}.values():
        handle, index = handle_and_index_of(leaf)
        named.append(f"{handle.layout.params[index].name!r} of unit {handle.label}")
    return ", ".join(named)


def _refusal(operation: str, arguments: Iterable[Any]) -> str:
    hidden = list(_hidden_in(arguments))
    if computing := [each for each in hidden if _is_computing(each)]:
        return (
            f"{operation} uses parameter {_names(computing)} through a reference that was kept, while its unit is "
            "unsharded: that object shows this rank's shard, and the module computes with the whole parameter, which "
            "it holds under the same name. Read it from the module (such as self.weight) each time"
        )
    return (
        f"{operation} reads parameter {_names(hidden) or '(unnamed)'} outside the forward of its unit, "
        "in a forward of the model or between that forward and its backward, where it is sharded. Use it in the "
        "forward of the module that holds it (this includes functions of parameters such as an L2 penalty), call "
        "unshard() of that unit's wrapper first, or make the module that uses it the unit; to look at values, use "
        "summon_full_params() between steps"
        + ("; in a hook on an output of its unit it is unsharded" if _torch.in_backward() else "")
    )


def _refusal_to_ask(operation: str, arguments: Iterable[Any]) -> str:
    return (
        f"{operation} needs the gradients of parameter {_names(_hidden_in(arguments))}, which are reduced over ranks "
        "as soon as they are computed and are available as .grad when the backward has ended. Call backward() without "
        "inputs= and read .grad; before the forward, freeze the parameters that should not be trained "
        "(requires_grad_(False))"
    )
