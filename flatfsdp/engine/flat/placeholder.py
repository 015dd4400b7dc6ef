"""What stands in a module for a parameter while its state dict is made or loaded.

[Note: placeholders] Modules make and load their state dicts themselves: they may have hooks that rename, and methods of
their own. So that they can, without a unit being gathered, they hold *placeholders* meanwhile: parameters with the
shape, dtype and device of the unsharded ones, and without memory. In a state dict that a module has made a placeholder
marks which parameter belongs there. Where a state dict is loaded, `copy_` into one is kept, to be carried out on the
shard. A module that does anything else reads values, which a placeholder does not have: `PlaceholderReadError` is then
raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError

# What queries a tensor, or attaches something to it, without reading its elements.
_QUERIES = frozenset(
    "__get__ __set__ __delete__ __repr__ __hash__ __len__ __format__ size dim ndimension numel nelement stride "
    "storage_offset element_size is_contiguous is_floating_point is_complex is_signed get_device data_ptr "
    "untyped_storage requires_grad_ register_hook register_post_accumulate_grad_hook".split()
)
# Properties that are the elements in another form.
_READ = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))


def is_query(func: Callable[..., Any]) -> bool:
    """Whether `func`, as `__torch_function__` gets it, reads and writes no elements of the tensors that it is given."""
    return getattr(func, "__name__", "") in _QUERIES and property_of(func) not in _READ


def name_of(func: Callable[..., Any]) -> str:
    """What users call `func`: "add()", or ".data" of a property."""
    return f".{property_of(func)}" if property_of(func) else f"{getattr(func, '__name__', func)}()"


def property_of(func: Callable[..., Any]) -> str:
    """Which property of a tensor `func` gets or sets; "" for what does not."""
    is_access = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
    return getattr(getattr(func, "__self__", None), "__name__", "") if is_access else ""


class PlaceholderReadError(UsageError):
    """Something was done with a placeholder that takes the parameter's values."""


class Placeholder(nn.Parameter):
    """A parameter's place in a module.

    Attributes:
        leaf: the parameter that it stands for.
        received: what was copied into it; None for nothing.
    """

    leaf: nn.Parameter
    received: torch.Tensor | None
    _receives: bool

    @staticmethod
    def of(
        leaf: nn.Parameter, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, receives: bool
    ) -> Placeholder:
        """A placeholder for `leaf`, which is unsharded of this shape; `receives`: whether `copy_` into it is kept."""
        nothing = torch.empty((), dtype=dtype, device=device).expand(tuple(shape))  # all its elements are one
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
            if type(args[1]) is not Placeholder:  # whose value comes from elsewhere
                target.received = args[1]
            return target
        raise PlaceholderReadError(
            f"{name_of(func)} of a parameter whose state dict is being made or loaded: it shows no values now. Call "
            "state_dict() or load_state_dict() of the wrapper that it is in, which shows modules values that they read"
        )
