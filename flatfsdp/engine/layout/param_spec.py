"""What a layout knows of one parameter: its name, its shape, and the order of its elements in memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from math import prod

from ...errors import ConfigValueError
from .part import Part


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the layout knows of one original parameter.

    ``stride`` is None for row-major parameters, whose elements lie in the flat space in row-major order. A dense
    parameter that is not row-major (channels_last) gives its stride and lies there in the order its own memory has, so
    that ``as_strided(shape, stride)`` on its span is the parameter. The row-major stride itself is normalised to None.
    A 1x1 convolution in channels_last keeps its stride: kernels read it though no element's place depends on it.
    ``part`` is None unless this is a part of a larger tensor. [Note: parts of wholes]

    Raises:
        ConfigValueError: a negative size, or a stride with gaps or overlaps (an expanded or sliced parameter).
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    part: Part | None = None

    def __setstate__(self, state: list[object]) -> None:
        for name, value in zip_longest(("name", "shape", "stride", "part"), state):  # older pickles have fewer
            object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if any(size < 0 for size in self.shape):
            raise ConfigValueError(f"parameter {self.name!r}: expected sizes of at least 0, found shape {self.shape}")
        if self.stride is None:
            return
        stride = tuple(int(step) for step in self.stride)
        if len(stride) != len(self.shape):
            raise ConfigValueError(
                f"parameter {self.name!r}: expected one stride per dimension of {self.shape}, found {stride}"
            )
        # The stride of a dimension of size one moves nothing, and in an empty parameter no stride does.
        moving = [] if self.numel == 0 else [dim for dim, size in enumerate(self.shape) if size > 1]
        step = 1
        for dim in sorted(moving, key=lambda dim: stride[dim]):
            if stride[dim] != step:
                raise ConfigValueError(
                    f"parameter {self.name!r}: expected its {self.numel} elements to fill their memory once, found "
                    f"shape {self.shape} with stride {stride}; give the module parameter.contiguous() instead"
                )
            step *= self.shape[dim]
        row_major = tuple(prod(max(size, 1) for size in self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        object.__setattr__(self, "stride", None if stride == row_major else stride)

    @property
    def numel(self) -> int:
        """Elements of the parameter: 1 for shape ``()``, 0 where a size is 0."""
        return prod(self.shape)

    @property
    def whole(self) -> ParamSpec:
        """The whole tensor that this is a part of, maybe itself."""
        return self if self.part is None else ParamSpec(self.name, self.part.shape, self.part.stride)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the slowest to the fastest in memory; (0, 1, ...) for row-major parameters."""
        dims = range(len(self.shape))
        if self.stride is None:
            return tuple(dims)
        stride = self.stride
        # A dimension of size one with the stride of another lies inside of it: the other's steps are no longer.
        return tuple(sorted(dims, key=lambda dim: (-stride[dim], self.shape[dim] == 1, dim)))

    @property
    def rows(self) -> int:
        """Into how many slices of equal size, each contiguous, the slowest dimension in memory divides it."""
        return self.shape[self.order[0]] if self.shape else 1
