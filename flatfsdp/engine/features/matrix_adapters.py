"""Tensors that optimizers have to see completely, matrices or whole ones, and the costs of a step on one of them.

[Note: adapters] An optimizer that is not element-wise looks at norms, rows or products of matrices. An `Adapter` has
these: `MATRICES` divides a tensor of three dimensions into one matrix for each expert, `TENSORS` leaves tensors of any
shape whole. Known optimizers have one in `ADAPTERS`; for others users choose it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import UsageError
from ..flat.flat_param import FlatParamHandle
from ..flat.layout_views import dense, stored_in_order
from ..layout.layout import ParamSpec, Span
from ..planning.grains import Shape, matrix_cost
from ..runtime.unit import Unit


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor that an optimizer steps on: a parameter, or one matrix of it.

    Attributes:
        span: its elements, in the order of the parameter's memory.
        shape, stride: as it is shown to the optimizer; stride is None if it is row-major.
        expert: its number among several matrices of the parameter; None if it is the parameter.
    """

    span: Span
    shape: Shape
    stride: tuple[int, ...] | None
    expert: int | None = None

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """`flat`, its elements in memory order, in its shape."""
        return flat.view(self.shape) if self.stride is None else flat.as_strided(self.shape, self.stride)

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        """The elements of `value`, of its shape, in the order of the parameter's memory: in place if it has that."""
        stride = self.stride or tuple(torch.empty(self.shape, device="meta").stride())
        return dense(stored_in_order(value.detach(), stride))


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter that an optimizer steps on as whole matrices.

    Attributes:
        parameter: the holder, of which this rank may have nothing.
        unit, kind, index: its place in the model: leaf `index` of `unit.handles[kind]`.
        group: the number of its param group.
        name: for messages.
    """

    parameter: nn.Parameter
    unit: Unit
    kind: int
    index: int
    group: int
    name: str

    @property
    def handle(self) -> FlatParamHandle:
        """The handle that it belongs to."""
        return self.unit.handles[self.kind]

    @property
    def spec(self) -> ParamSpec:
        """The layout's entry."""
        return self.handle.layout.params[self.index]

    @property
    def start(self) -> int:
        """The first element of the parameter that this rank has."""
        return self.handle.layout.span_in_param(self.index, self.handle.rank).start

    def own(self) -> torch.Tensor:
        """This rank's elements of the parameter, in memory order, as a view."""
        return dense(self.handle.face.local_of(self.parameter).detach())

    def like_own(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a gradient, or of a state that has one for each of the parameter's, in the order of
        `own`; a view if they are stored in that order."""
        local = self.handle.face.local_of(value).detach()
        return dense(stored_in_order(local, self.handle.face.local_of(self.parameter).stride()))

    def gradient(self) -> torch.Tensor:
        """This rank's elements of the gradient, in the order of `own`. Precondition: there is a gradient.

        Raises:
            UsageError: it cannot be sent together with the parameter.
        """
        assert self.parameter.grad is not None
        grad = self.handle.face.local_of(self.parameter.grad)
        if grad.layout is not torch.strided or grad.dtype != self.parameter.dtype:
            raise UsageError(
                f"matrix_steps: the gradient of {self.name} is not a dense tensor of {self.parameter.dtype}, as the "
                "parameter is. Use matrix_steps without keep_low_precision_grads=True"
            )
        return self.like_own(self.parameter.grad)


class Entry(NamedTuple):
    """One matrix: its parameter, and how an optimizer sees it."""

    slot: Slot
    seen: Seen

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, of which tensor parallelism may store a part here."""
        part = self.slot.spec.part
        return self.seen.shape if part is None else tuple(part.shape)

    def within(self, flat: torch.Tensor, span: Span) -> torch.Tensor:
        """The elements `span` of the matrix, all of them this rank's, in `flat`, which is ordered like `Slot.own`."""
        return flat.narrow(0, self.seen.span.start + span.start - self.slot.start, span.numel)


class Whole(NamedTuple):
    """One matrix at its owner.

    Attributes:
        entry: which one.
        numbers: those that ranks began with, of all elements, in memory order: a tensor for each that they send.
    """

    entry: Entry
    numbers: tuple[torch.Tensor, ...]


def _whole(spec: ParamSpec) -> list[Seen]:
    return [Seen(Span(0, spec.numel), spec.shape, spec.stride)]


def _matrices(spec: ParamSpec) -> list[Seen]:
    if len(spec.shape) == 2:
        return _whole(spec)
    if len(spec.shape) != 3:
        raise UsageError(
            f"its shape is {spec.shape}, but this optimizer steps on matrices (2 dimensions) and on tensors of experts "
            "(3 dimensions: one matrix for each). Give it to another optimizer"
        )
    if spec.stride is not None:
        raise UsageError(
            f"its experts, shape {spec.shape} with stride {spec.stride}, are not one after the other in memory. Make "
            "it contiguous before wrapping"
        )
    experts, *shape = spec.shape
    size = prod(shape)
    return [Seen(Span(0, size).shift(size * number), tuple(shape), None, number) for number in range(experts)]


def roots_cost(shape: Shape) -> int:
    """About the multiplications of a Shampoo step: a square for each dimension is computed, its root, and applied."""
    return sum(2 * prod(shape) * size + size**3 for size in shape)


@dataclass(frozen=True)
class Adapter:
    """The tensors that an optimizer sees.

    Attributes:
        seen: the tensors of one parameter.
        cost: of a step on one of these shapes.
        check: raises UsageError for a param group and a dtype with which the optimizer would go wrong.
        in_parts: whether only a part of its step needs whole matrices. [Note: Muon in parts]
    """

    seen: Callable[[ParamSpec], list[Seen]]
    cost: Callable[[Shape], int]
    check: Callable[[Mapping[str, Any], torch.dtype], None] = lambda group, dtype: None
    in_parts: bool = False


def check_muon(group: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Refuse settings with which torch's Muon goes wrong."""
    if dtype.is_complex:
        raise UsageError(f"its dtype is {dtype}, but torch's Muon steps on real matrices")
    # Without nesterov the update is the momentum itself, which is not copied if it is in bfloat16 already.
    if dtype == torch.bfloat16 and not group.get("nesterov", True):
        raise UsageError(
            "torch's Muon with nesterov=False divides the momentum of bfloat16 parameters by its norm, in place, at "
            "every step. Use nesterov=True, or keep the parameters in float32 (MixedPrecision computes in bfloat16)"
        )


MATRICES = Adapter(_matrices, matrix_cost)
TENSORS = Adapter(_whole, prod)
ROOTS = Adapter(_whole, roots_cost)
NAMED: Mapping[str, Adapter] = {"matrices": MATRICES, "tensors": TENSORS, "shampoo": ROOTS}
ADAPTERS: Mapping[type[torch.optim.Optimizer], Adapter] = {
    torch.optim.Muon: Adapter(_matrices, matrix_cost, check_muon, in_parts=True),
    torch.optim.Adafactor: TENSORS,
}
