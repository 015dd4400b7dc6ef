"""Stand-ins for a module's parameters while its state dict is made or loaded.

[Note: placeholders] Modules make and load their state dicts themselves: they may have hooks that rename, and methods of
their own. To avoid a gather for that, modules hold *placeholders* meanwhile: parameters with the shape, dtype and
device of the unsharded ones, and without memory. In a state dict made by a module, a placeholder marks which parameter
belongs there. When a state dict is loaded, a `copy_` into a placeholder is recorded and later applied to the shard. Any
other operation of a module reads values, which a placeholder does not have: it raises `PlaceholderReadError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError

# Operations that query a tensor, or attach something to it, without reading its elements.
_QUERIES = frozenset(
    "__get__ __set__ __delete__ __repr__ __hash__ __len__ __format__ size dim ndimension numel nelement stride "
    "storage_offset element_size is_contiguous is_floating_point is_complex is_signed get_device data_ptr "
    "untyped_storage requires_grad_ register_hook register_post_accumulate_grad_hook".split()
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


class PlaceholderReadError(UsageError):
    """An operation on a placeholder needs the parameter's values."""


class Placeholder(nn.Parameter):
    """Holds a parameter's place in a module.

    Attributes:
        leaf: the parameter that it stands for.
        received: the tensor that was copied into it; None if none was.
    """

    leaf: nn.Parameter
    received: torch.Tensor | None
    _receives: bool

    @staticmethod
    def of(
        leaf: nn.Parameter, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, receives: bool
    ) -> Placeholder:
        """A placeholder for `leaf`, which is unsharded of this shape; `receives`: whether `copy_` into it is kept."""
        nothing = torch.empty((), dtype=dtype, device=device).expand(tuple(shape))  # all its elements share one
        made = Placeholder(nothing, requires_grad=leaf.requires_grad)
        made.leaf = leaf
        made.received = None
        made._receives = receives
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if is_query(func):
            return super().__torch_function__(func, types, args, kwargs or {})
        name = getattr(func, "__name__", "")
        target = args[0] if args else None
        if name == "detach":
            return target
        if name == "copy_" and isinstance(target, Placeholder) and target._receives:
            if type(args[1]) is not Placeholder:  # a placeholder's value has another source
                target.received = args[1]
            return target
        raise PlaceholderReadError(
            f"{name_of(func)} of a parameter whose state dict is being created or loaded: its values cannot be read "
            "now. Call state_dict() or load_state_dict() of the wrapper that contains it, which lets modules read its "
            "values"
        )
