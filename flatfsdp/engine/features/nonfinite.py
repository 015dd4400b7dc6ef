"""Detection of the first value that is infinite or not a number: its rank, its unit, its parameter.

[Note: findings] A detector checks values in the order in which a step computes them, and each rank records the first
one that is not finite. At the end of a forward, and of a backward, all ranks exchange these findings, two numbers each:
so all of them raise at the same point, and none waits for one that has stopped. If nothing is sharded, forwards are
local to each rank; their findings are reported at the end of the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ...api import check_bool
from ...errors import NonFiniteError, UsageError, fail, ranks_by_value, ranks_in_words
from ..agreement.agreement import Agreement, agreement_of
from ..base import _torch
from ..base._functorch import levels_of
from ..base.events import Observer
from ..base.nested_tensors import tensors_in
from ..models.rest import check_outside, outermost_model
from ..runtime.model import Model
from ..runtime.unit import Unit

PARAMETER, INPUT, OUTPUT, GRADIENT, REDUCED = range(5)  # sources of values, in the order of a step
_IN_WORDS = (  # with the name of a unit or a parameter
    "parameter {} before the forward",
    "an input of unit {}",
    "an output of unit {}",
    "the gradient of {} before its reduction",
    "the reduced gradient of {}",
)


class Finding(NamedTuple):
    """One value that is not finite, as numbers with the same meaning on all ranks.

    Attributes:
        order: the number of values that the rank had checked.
        unit: its index in the model; kind, leaf: numbers of the handle and of the leaf, for a parameter's value.
        is_nan: else it is infinite.
    """

    order: int
    stage: int
    unit: int
    kind: int
    leaf: int
    is_nan: bool

    @property
    def number(self) -> int:
        """All fields but `order`, in one integer."""
        return (((self.unit << 8 | self.kind) << 24 | self.leaf) << 3 | self.stage) << 1 | self.is_nan

    @classmethod
    def of(cls, order: int, number: int) -> Finding:
        """The finding with these numbers."""
        position, stage, is_nan = number >> 4, number >> 1 & 7, bool(number & 1)
        return cls(order, stage, position >> 32, position >> 24 & 0xFF, position & 0xFFFFFF, is_nan)

    def describe(self, units: Sequence[Unit]) -> str:
        """The value and its place, in words."""
        unit = units[self.unit]
        name = unit.label
        if self.stage not in (INPUT, OUTPUT):
            path = unit.handles[self.kind].layout.params[self.leaf].name
            name = repr(unit.entries.fqn(path))
        return f"{'nan' if self.is_nan else 'inf'} in {_IN_WORDS[self.stage].format(name)}"


class NonFiniteDetector(Observer):
    """Records the first value that is not finite, inside `detect_nonfinite()`."""

    requested_by = "detect_nonfinite()"

    def __init__(self, model: Model, *, infinities: bool) -> None:
        self._agreement = agreement_of(model.agreement)
        self._units = model.units
        self._positions = {id(unit): position for position, unit in enumerate(model.units)}
        self._infinities = infinities
        self._looked = 0
        self._found: Finding | None = None

    def forward_begins(self, unit: Unit, inputs: Any, *, outermost: bool) -> None:
        """Check all parameters when the outermost forward begins, and the inputs of each forward."""
        if outermost:
            self._looked, self._found = 0, None
            for each in self._units:
                for kind, handle in enumerate(each.handles):
                    for index, view in enumerate(handle.at_rest.views):
                        self._look(PARAMETER, each, view, kind, index)
        for tensor in tensors_in(inputs):
            self._look(INPUT, unit, levels_of(tensor)[-1])

    def forward_ended(self, unit: Unit, output: Any, *, outermost: bool) -> None:
        """Check the outputs. At the end of the outermost forward collective over all axes, unless forwards are local.

        Raises:
            NonFiniteError: at the end of the outermost forward, on every rank if it is collective.
        """
        for tensor in tensors_in(output):
            self._look(OUTPUT, unit, levels_of(tensor)[-1])
        if not outermost:
            return
        if self._agreement.compares_forwards and not self._agreement.forwards_are_local:
            self._raise_together("a forward")
        elif self._found is not None and not torch.is_grad_enabled():
            raise NonFiniteError(f"this rank's forward has {self._found.describe(self._units)}")

    def gradient_came(self, unit: Unit, kind: int, index: int, grad: torch.Tensor) -> None:
        """Check a gradient as this rank computed it."""
        self._look(GRADIENT, unit, grad, kind, index)

    def reduced(self, unit: Unit) -> None:
        """Check the reduced gradients of `unit`."""
        for kind, (handle, grads) in enumerate(zip(unit.handles, unit.grads, strict=True)):
            for flat in grads.reduced:
                for index, view in enumerate(handle.at_rest.views_of(flat)):
                    self._look(REDUCED, unit, view, kind, index)

    def backward_ends(self) -> None:
        """Check the reduced gradients of all units. Collective over all axes.

        Raises:
            NonFiniteError: on every rank.
        """
        for unit in self._units:
            self.reduced(unit)
        self._raise_together("a step")

    def _look(self, stage: int, unit: Unit, tensor: torch.Tensor, kind: int = 0, index: int = 0) -> None:
        self._looked += 1
        if self._found is None and (is_nan := worst(tensor)) is not None and (is_nan or self._infinities):
            self._found = Finding(self._looked, stage, self._positions[id(unit)], kind, index, is_nan)

    def _raise_together(self, what: str) -> None:
        mine, self._found = self._found, None
        if reported := of_all_ranks(mine, self._agreement, self._units):
            fail(NonFiniteError(f"{what} has {reported}"))


def of_all_ranks(mine: Finding | None, agreement: Agreement, units: Sequence[Unit]) -> str:
    """The findings of all ranks, in words, in their order; "" if there are none. Collective over all axes."""
    code, extra = (mine.order + 1, mine.number) if mine is not None else (0, 0)
    answers = agreement.peers.numbers_of_ranks(code, extra)
    found = {rank: Finding.of(code - 1, extra) for rank, (code, extra) in answers.items() if code}
    if not found:
        return ""
    in_order = sorted(found, key=lambda rank: (found[rank].order, rank))
    alike = ranks_by_value({rank: found[rank].describe(units) for rank in in_order})
    reported = [f"{words} on {ranks_in_words(sorted(those))}" for words, those in alike.items()]
    clean = sorted(answers.keys() - found.keys())
    more = [f"nothing else on {ranks_in_words(clean)}"] if clean else []
    return "; ".join([f"{reported[0]}, first of all" if len(reported) > 1 else reported[0], *reported[1:4], *more])


def worst(tensor: torch.Tensor) -> bool | None:
    """True if `tensor` has a NaN, False if only infinities, None if all is finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    with torch.no_grad(), _torch.as_plain_tensors():
        values = tensor.detach()
        values = values.coalesce().values() if values.is_sparse else values
        if bool(torch.isfinite(values).all()):
            return None
        return bool(torch.isnan(values).any())


def first_gradient(units: Sequence[Unit]) -> Finding | None:
    """The first gradient of this rank that is not finite, as the optimizer would see it."""
    for position, unit in enumerate(units):
        for kind, handle in enumerate(unit.handles):
            for index, grad in enumerate(handle.face.grads_of_leaves()):
                if grad is not None and (is_nan := worst(grad)) is not None:
                    return Finding(0, REDUCED, position, kind, index, is_nan)
    return None


@contextmanager
def detect_nonfinite(model: nn.Module, *, infinities: bool = True) -> Iterator[None]:
    """A context in which a forward or a backward that computes NaN or inf raises, and names the place of the first one.

    It checks parameters before the forward, inputs and outputs of each unit, the gradient of each parameter as this
    rank computed it, and the reduced gradients. The error names rank, unit and parameter, and is raised on every rank
    at the same point: at the end of the forward or of the backward, which does not change `.grad`. Outside of the
    context nothing is checked, at no cost; inside, each value is read once more, which synchronizes the host with the
    device.

    Every rank must enter it; the next forward checks this. Inside, each forward and backward exchanges two numbers.

    Args:
        model: the outermost wrapper.
        infinities: whether inf and -inf are errors as well; False for models that produce them on purpose, as in a
            mask.

    Raises:
        NonFiniteError: inside, from a forward or a backward.
        ConfigTypeError: `model` is not a wrapper, or `infinities` is not a bool.
        UsageError: `model` is a nested wrapper; inside itself, a forward or a backward.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> model = flatfsdp.FullyShardedDataParallel(torch.nn.Linear(2, 1))
        >>> with flatfsdp.detect_nonfinite(model):
        ...     model(torch.full((4, 2), torch.inf))
        Traceback (most recent call last):
        flatfsdp.errors.NonFiniteError: a forward has inf in an input of unit <root> on rank 0
    """
    name = "detect_nonfinite"
    inner = outermost_model(model, name)
    check_bool(f"{name}: infinities", infinities)
    check_outside(inner.outermost, f"{name}()")
    if inner.observers.find(NonFiniteDetector) is not None:
        raise UsageError(f"{name}() was entered while it was already active; one context is enough")
    detector = NonFiniteDetector(inner, infinities=infinities)
    inner.observers.add(detector)
    inner.setup.options_changed()
    try:
        yield
    finally:
        inner.observers.remove(detector)
        inner.setup.options_changed()
