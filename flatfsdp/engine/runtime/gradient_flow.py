"""Links from outputs of units to the units that read them, which show the end of a unit's own backward.

[Note: gradient flow] A call's backward has finished when the gradient of its input has arrived. If that input is
another unit's output, the hook that begins that unit's backward shows this, too, and the graph needs one hook less.
Tensors are known by their identity, and held weakly: a link lasts as long as the forward that it belongs to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ...errors import UsageError, fail
from ..base import _functorch, _torch
from ..base.autograd import is_watched
from ..flat.states import FORWARD
from .backward_hooks import UnitHooks
from .unit import Unit, refuse_without_model
from .unit_state import ForwardCall


class OutputHook:
    """The units that are notified when a gradient reaches one tensor.

    Attributes:
        readers: units with this input, and their calls, whose backward has finished then.
        returners: units that returned it, whose backward begins then: the last, around or after the others, first.
        task: the last graph task in which a gradient reached it.
        id: of the hook on the tensor, by which it is known that no in-place operation has replaced the value since.
    """

    __slots__ = ("id", "readers", "returners", "task")

    def __init__(self) -> None:
        self.readers: list[tuple[UnitHooks, ForwardCall]] = []
        self.returners: list[tuple[UnitHooks, ForwardCall | None]] = []
        self.task: int | None = None
        self.id = 0

    def reached(self, grad: object, held: object = None) -> None:
        """A gradient has arrived. `held`: lives as long as the graph.

        Raises:
            UsageError: a unit or its model was deleted.
        """
        if _functorch.in_transform():  # a backward inside of it
            with _functorch.outside():
                return self.reached(grad)
        self.task = _torch.graph_task()
        for reader, call in self.readers:  # they reshard before anything is gathered
            if (unit := reader.unit()) is not None:
                if (driver := reader.driver()) is None:
                    refuse_without_model(unit)
                driver.inputs_ready(unit, call)
        for returner, returned in self.returners:
            if (unit := returner.unit()) is None:
                fail(
                    UsageError(
                        "a backward through a wrapped module whose wrapper has been deleted since its forward, as in "
                        "FullyShardedDataParallel(module)(x).sum().backward(): nothing would average the gradients. "
                        "Keep a reference to the wrapper until the backward is over"
                    )
                )
            if (driver := returner.driver()) is None:
                refuse_without_model(unit)
            driver.before_backward(unit, returned)

    def reached_past_it(self, grad: object) -> None:
        """A gradient has reached the base of the tensor, a view; ignored if one has reached the view in this task."""
        if self.task != _torch.graph_task():
            self.reached(grad)


class GradientFlow:
    """The links of the forwards that one backward may cover, and the hooks on leaves of the program."""

    def __init__(self) -> None:
        self._output_hooks: dict[int, tuple[weakref.ref[torch.Tensor], OutputHook]] = {}  # by id of the tensor
        self._readers: dict[int, tuple[weakref.ref[torch.Tensor], Unit]] = {}  # by id of the tensor
        self._leaf_hooks: list[Callable[[], object]] = []

    def begin_forward(self) -> None:
        """Drop the tensors of the previous forward."""
        self._readers.clear()
        self._output_hooks.clear()

    def unhook(self) -> None:
        """Remove hooks when a new record begins: leaves outlive the graphs of their hooks."""
        for remove in self._leaf_hooks:
            remove()
        self._leaf_hooks = []

    def unhook_later(self, removers: list[Callable[[], object]]) -> None:
        """Call these, which remove hooks from leaves of the program, at the next `unhook`."""
        self._leaf_hooks += removers

    def output_hook(self, output: torch.Tensor) -> OutputHook:
        """The hook of this output of a unit; one for all units that return it."""
        known = self._output_hooks.get(id(output))
        if known is None or known[0]() is not output or not is_watched(output, known[1].id):
            known = self._output_hooks[id(output)] = weakref.ref(output), OutputHook()
        return known[1]

    def follow_output(self, tensor: torch.Tensor, hooks: UnitHooks, call: ForwardCall) -> bool:
        """If `tensor` is an output of another unit, let its gradient end the backward of `call`, of the unit of
        `hooks`, too; False otherwise."""
        known = self._output_hooks.get(id(tensor))
        if known is None or known[0]() is not tensor:
            return False
        known[1].readers.append((hooks, call))
        return True

    def first_reader(self, tensor: torch.Tensor, unit: Unit) -> bool:
        """Whether `unit` is the first with the input `tensor`, except for units in whose forward it runs."""
        known = self._readers.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1].phase is FORWARD:
            known = self._readers[id(tensor)] = weakref.ref(tensor), unit
        return known[1] is unit
