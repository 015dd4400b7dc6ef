"""Where a parameter may be cut: grains as users and optimizers state them, and as numbers of elements.

A layout knows the numbers only. [Note: grains]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import lcm, prod

from torch import nn

from ...errors import ConfigTypeError, ConfigValueError, refuse_type, refuse_value
from ..layout.layout import ParamSpec


@dataclass(frozen=True, slots=True)
class Elements:
    """Cuts at multiples of `count` elements, in the order of the parameter's memory: by default anywhere.

    Blocks of an optimizer that quantizes its states by 256 elements remain whole with `Elements(256)`.
    """

    count: int = 1

    def __post_init__(self) -> None:
        _check_count("Elements", count=self.count)

    def elements(self, param: ParamSpec) -> int:
        """The number of elements at whose multiples `param` may be cut."""
        return _at_most(param, self.count)


@dataclass(frozen=True, slots=True)
class Rows:
    """Cuts between groups of `count` rows: slices along the first dimension, or along the slowest one in memory.

    A row of a 3-D tensor of experts is one expert.
    """

    count: int = 1

    def __post_init__(self) -> None:
        _check_count("Rows", count=self.count)

    def elements(self, param: ParamSpec) -> int:
        """The number of elements at whose multiples `param` may be cut."""
        return _at_most(param, self.count * (param.numel // max(param.rows, 1)))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Cuts between blocks of `rows` rows of matrices, the last two dimensions in memory; or between rows of tiles.

    Without `columns`, rows are those of all matrices one after the other. With it, each matrix is divided into tiles of
    `rows` x `columns`. The last tiles of a matrix may be smaller, but only if there is just one matrix: the tiles of
    several are at equal distances only if `rows` divides the rows of each. Vectors have no blocks and are cut anywhere.
    """

    rows: int
    columns: int | None = None

    def __post_init__(self) -> None:
        _check_count("Blocks", rows=self.rows, **({} if self.columns is None else {"columns": self.columns}))

    def elements(self, param: ParamSpec) -> int:
        """The number of elements at whose multiples `param` may be cut.

        Raises:
            ConfigValueError: tiles do not divide the matrices.
        """
        if len(param.shape) < 2:
            return 1
        *outer, rows, row = param.shape if param.stride is None else (param.shape[dim] for dim in param.order)
        if self.columns is not None and any(size != 1 for size in outer) and rows % self.rows:
            raise ConfigValueError(
                f"parameter {param.name!r}: tiles of {self.rows} x {self.columns} do not divide the {rows} rows of "
                f"each matrix in shape {param.shape}, so they are not at equal distances. Use Rows(1), which keeps "
                f"each matrix whole, or tiles with a divisor of {rows} as the number of rows"
            )
        return _at_most(param, self.rows * row)


Shape = tuple[int, ...]
BUDGET = 0.05  # the padding that is worth a grain, as a part of the parameters' elements


def matrix_cost(shape: Shape) -> int:
    """The multiplications of one iteration of Newton and Schulz: of a matrix with its transpose, of the square that
    results with itself, and with the matrix; for each matrix of a tensor. For a vector its elements."""
    if len(shape) < 2:
        return prod(shape)
    least, most = sorted(shape[-2:])
    return prod(shape[:-2]) * (2 * least * least * most + least**3)


@dataclass(frozen=True, slots=True)
class Whole:
    """No cuts: one rank has the complete parameter. Ranks get about the same `cost` of these, over all units that one
    call wraps; units that are wrapped by calls of their own do not know of each other.

    Attributes:
        padding: the most that these may add to shards, as a part of the elements of their unit. More is refused.
        cost: of an optimizer's step on a tensor of some shape, in any unit.
    """

    padding: float = BUDGET
    cost: Callable[[Shape], int] = field(default=matrix_cost, repr=False)

    def __post_init__(self) -> None:
        padding: object = self.padding
        accepted = "a part of the elements, such as 0.05, or math.inf"
        if isinstance(padding, bool) or not isinstance(padding, (int, float)):
            refuse_type("Whole: padding", padding, accepted)
        if not padding >= 0:  # NaN is not, either
            refuse_value("Whole: padding", padding, accepted)
        if not callable(self.cost):
            refuse_type("Whole: cost", self.cost, "a function of a shape")

    def elements(self, param: ParamSpec) -> int:
        """The number of elements at whose multiples `param` may be cut: all."""
        return max(param.numel, 1)


@dataclass(frozen=True, slots=True)
class Preferred:
    """The cuts of `grain` where they add little padding to shards; else anywhere, those of large parameters first.

    Optimizers that see whole matrices prefer them whole: `matrix_steps` exchanges those that are cut.
    """

    grain: Elements | Rows | Blocks | Whole

    def elements(self, param: ParamSpec) -> int:
        """The number of elements at whose multiples `param` is best cut."""
        return self.grain.elements(param)


Grain = Elements | Rows | Blocks | Whole | Preferred


LEAST_QUANTIZED = 4096  # the elements from which on torchao quantizes the states of a parameter


def state_blocks(block: int = 256) -> Callable[[str, nn.Parameter], Grain | None]:
    """Grains for an optimizer that quantizes its states in blocks of `block` elements (see `block_states`): a value for
    `layout=`. Parameters of which it quantizes no states are cut anywhere."""
    grain = Elements(block)

    def grain_of(name: str, parameter: nn.Parameter) -> Grain | None:
        return grain if parameter.numel() >= LEAST_QUANTIZED and parameter.numel() % block == 0 else None

    return grain_of


def declared(name: str, parameter: nn.Parameter) -> Grain | None:
    """The grain that a parameter declares itself: a value for `layout=`, which is read for parameters without another
    grain in any mapping and function there.

    It is the attribute `fsdp_grain`; of packed weights as bitsandbytes' 4-bit ones, the bytes that share a scale.
    """
    found: Grain | None = getattr(parameter, "fsdp_grain", None)
    block = getattr(getattr(parameter, "quant_state", None), "blocksize", None)
    if found is None and isinstance(block, int):
        size = parameter.element_size()  # elements are stored as some dtype, two of the weight in each byte
        found = Elements(lcm(max(1, block // 2), size) // size)
    return found


def _at_most(param: ParamSpec, elements: int) -> int:
    numel = param.numel
    return elements if 0 < elements <= numel else max(1, numel)


def _check_count(grain: str, **counts: object) -> None:
    for argument, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise ConfigTypeError(f"{grain}: expected an int as {argument}, found {count!r} ({type(count).__name__})")
        if count < 1:
            raise ConfigValueError(f"{grain}: expected {argument} of at least 1, found {count}")
