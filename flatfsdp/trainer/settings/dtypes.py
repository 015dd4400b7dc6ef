"""Dtypes by name: `bf16`, `half`, `float32`, ... as people write them in a command line or a file."""

from __future__ import annotations

import torch

from flatfsdp.errors import did_you_mean, refuse_type, refuse_value

__all__ = ["DTYPE_NAMES", "as_dtype", "dtype_name"]

_ALIASES: dict[torch.dtype, tuple[str, ...]] = {
    torch.bfloat16: ("bfloat16", "bf16"),
    torch.float16: ("float16", "fp16", "half"),
    torch.float32: ("float32", "fp32", "float", "single"),
    torch.float64: ("float64", "fp64", "double"),
}
_BY_NAME = {name: dtype for dtype, names in _ALIASES.items() for name in names}

DTYPE_NAMES = tuple(_BY_NAME)
"""Every name that `as_dtype` knows."""


def as_dtype(value: torch.dtype | str, *, argument: str = "dtype") -> torch.dtype:
    """The floating-point dtype that `value` is, or names: in any case, with or without `torch.` before it.

    Args:
        value: a dtype or one of `DTYPE_NAMES`.
        argument: what errors call it.

    Raises:
        ConfigTypeError: `value` is neither a dtype nor text.
        ConfigValueError: no such name, or a dtype that parameters are not computed in; the names are listed.
    """
    accepted = f"a floating-point dtype: {', '.join(DTYPE_NAMES)}"
    if isinstance(value, torch.dtype):
        return value if value in _ALIASES else refuse_value(argument, value, accepted)
    if not isinstance(value, str):
        refuse_type(argument, value, accepted)
    name = value.lower().removeprefix("torch.")
    if name not in _BY_NAME:
        refuse_value(argument, value, accepted, hint=did_you_mean(name, DTYPE_NAMES))
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The one name under which settings are written: `bfloat16`, `float16`, `float32` or `float64`."""
    return _ALIASES[dtype][0]
