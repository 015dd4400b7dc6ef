"""Links from outputs of units to the units that read them, which show the end of a unit's own backward.

[Note: gradient flow] A call's backward has finished when the gradient of its input has arrived. If that input is
another unit's output, the hook that begins that unit's backward shows this, too, and the graph needs one hook less.
Tensors are known by their identity, and held weakly: a link lasts as long as the forward that it belongs to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch

from ..base import _functorch
from ..base import autograd as hooks
from ..flat.states import FORWARD
from ..schedule.forward_schedule import ForwardPass
from .backward_hooks import OutputHook, UnitHooks
from .unit import Unit
from .unit_state import ForwardCall


class GradientFlow:
    """The links of the forwards that one backward may cover, and the hooks on leaves of the program."""

    def __init__(self) -> None:
        self._output_hooks: dict[int, tuple[weakref.ref[torch.Tensor], OutputHook]] = {}  # by id of the tensor
        self._readers: dict[int, tuple[weakref.ref[torch.Tensor], Unit]] = {}  # by id of the tensor
        self._leaf_hooks: list[Callable[[], object]] = []  # functions that remove them

    def begin_forward(self) -> None:
        """Drop the tensors of the previous forward."""
        self._readers.clear()
        self._output_hooks.clear()

    def unhook(self) -> None:
        """Remove hooks when a new record begins: leaves outlive the graphs of their hooks."""
        for remove in self._leaf_hooks:
            remove()
        self._leaf_hooks = []

    def watch_inputs(
        self, unit: Unit, held: UnitHooks, inputs: list[torch.Tensor], began: int | None
    ) -> ForwardCall | None:
        """A call of `unit` begins, at this tick: let the gradients of its trained `inputs` show that its backward has
        finished; None if it has none. `held`: what hooks hold of the unit.

        The parameters' own gradients do not show it: frozen ones have none, and a detached use, or a segment recomputed
        inside the module, reads a parameter after its gradient has arrived. If an earlier call of another unit also
        read an input, its gradient arrives only after the backward of that unit; it is awaited only for lack of others.
        """
        awaited = []
        for tensor in inputs:
            known = self._readers.get(id(tensor))
            # A unit in whose forward this one runs has read it, too.
            if known is None or known[0]() is not tensor or known[1].phase is FORWARD:
                known = self._readers[id(tensor)] = weakref.ref(tensor), unit
            if known[1] is unit:
                awaited.append(tensor)
        if not awaited and inputs and unit.has_frozen:
            awaited = inputs
        if not awaited:
            return None
        call = ForwardCall()
        call.began = began
        if len(awaited) == 1:
            call.on_device = awaited[0].device == unit.resources.device.device
            output = self._output_hooks.get(id(awaited[0]))
            if output is not None and output[0]() is awaited[0]:  # that of another unit
                output[1].readers.append((held, call))
                return call
        this = weakref.ref(call)

        def arrived() -> None:
            if _functorch.in_transform():
                with _functorch.outside():
                    return arrived()
            if (known := this()) is not None:
                held.inputs_ready(known)

        registered, call.watch = hooks.after_backward_to(awaited, arrived)
        if all(tensor.grad_fn is None for tensor in awaited):
            call.outlasts = True
            self._leaf_hooks += registered
        return call

    def hook_output(
        self,
        output: torch.Tensor,
        held: UnitHooks,
        call: ForwardCall | None,
        running: ForwardPass | None,
        watch: object,
    ) -> None:
        """Let a gradient of `output` begin the backward of the unit of `held`, and end that of its readers. The hook
        holds `watch`, and the `running` pass; one serves all units that return this tensor."""
        known = self._output_hooks.get(id(output))
        if known is not None and known[0]() is output and hooks.is_watched(output, known[1].id):
            known[1].returners.insert(0, (held, call))
            if watch is not None:
                hooks.before_backward_of(output, functools.partial(lambda held, grad: None, watch))
            return
        made = OutputHook()
        made.readers, made.returners = [], [(held, call)]
        self._output_hooks[id(output)] = weakref.ref(output), made
        # The graph holds the forward pass that created it. Not the model: that keeps the error of a backward, which
        # holds the graph, and garbage collection does not find this reference cycle.
        reached = functools.partial(made.reached, held=(running, watch))
        made.id = hooks.before_backward_of(output, reached, first=True)
        if output.grad_fn is None:
            self._leaf_hooks.append(hooks.remover(output, made.id))
        elif output._is_view():
            hooks.before_backward_of_base(output, made.reached_past_it)
