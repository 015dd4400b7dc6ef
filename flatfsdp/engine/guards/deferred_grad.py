"""Parameters whose gradients are still being reduced; reading such a gradient waits for it.

[Note: deferred gradients] After a backward that is not the last (`set_is_last_backward`) the reduction issued last
continues while user code runs. Its parameters have their `.grad` already: the earlier gradient, to which the sum will
be added, or the memory that will receive the sum. It must not be read earlier, so the parameters get a class whose
`.grad` waits. They are the same objects, and code that sets a `.grad` to None also drops the gradient still in flight.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..flat.write_tracker import FlatParameter, TracksWrites

_GRAD: Any = torch.Tensor.grad


def _once_there(access: Callable[..., Any]) -> Callable[..., Any]:
    def waited(parameter: Any, *value: Any) -> Any:
        wait_for_grad(parameter)
        return access(parameter, *value)

    return waited


class _DeferredGrad:
    """Members that a parameter overrides while its gradient is awaited."""

    grad = property(_once_there(_GRAD.__get__), _once_there(_GRAD.__set__), _once_there(_GRAD.__delete__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait_for_grad(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_for_grad(self)
        return self.__reduce_ex__(protocol)


class DeferredGradParameter(_DeferredGrad, TracksWrites, nn.Parameter):
    """The class of `nn.Parameter` objects while their gradients are awaited; never constructed."""


class DeferredGradFlatParameter(_DeferredGrad, FlatParameter):
    """The class of `FlatParameter` objects while their gradients are awaited; never constructed."""


_WHILE_AWAITED: dict[type, type] = {nn.Parameter: DeferredGradParameter, FlatParameter: DeferredGradFlatParameter}
_AFTERWARDS = {awaited: cls for cls, awaited in _WHILE_AWAITED.items()}

ARRIVALS: dict[int, weakref.ref[PendingGradients]] = {}  # by id of the parameter; empty: nothing is awaited


class PendingGradients:
    """Gradients that are awaited together."""

    def __init__(self, parameters: Sequence[nn.Parameter], finish: Callable[[], None]) -> None:
        """`finish` gives the `.grad` of `parameters` its final value; it is called when that value is requested."""
        self._parameters = parameters
        self._finish = finish
        ids = list(map(id, parameters))
        ARRIVALS.update(dict.fromkeys(ids, weakref.ref(self)))
        self._forget = weakref.finalize(self, _forget, ids)
        show_deferred(parameters)

    def wait(self) -> None:
        """Return when the gradients are there.

        Raises:
            RuntimeError: the communication failed. The parameters have no `.grad` then.
        """
        if not self._forget.alive:
            return
        self._forget()
        parameters, finish = self._parameters, self._finish
        del self._parameters, self._finish  # and the sum, which is not a `.grad` if it was added to one
        for parameter in parameters:
            if (cls := _AFTERWARDS.get(type(parameter))) is not None:
                parameter.__class__ = cls
        try:
            finish()
        except BaseException:
            for parameter in parameters:
                parameter.grad = None
            raise


def can_defer(parameter: nn.Parameter) -> bool:
    """Whether a read of the parameter's `.grad` can be made to wait: not if its class is user-defined."""
    return type(parameter) in _WHILE_AWAITED


def is_deferred(parameter: nn.Parameter) -> bool:
    """Whether the parameter's gradient is awaited."""
    return id(parameter) in ARRIVALS


def show_deferred(parameters: Iterable[nn.Parameter]) -> None:
    """Let those of `parameters` whose gradients are awaited wait for them again after they were hidden."""
    for parameter in parameters:
        if is_deferred(parameter):
            parameter.__class__ = _WHILE_AWAITED.get(type(parameter), type(parameter))


def wait_for_grad(parameter: object) -> None:
    """Wait for the gradient of `parameter`, if it is awaited."""
    if (found := ARRIVALS.get(id(parameter))) is not None and (arrival := found()) is not None:
        arrival.wait()


def _forget(ids: Iterable[int]) -> None:
    for each in ids:
        del ARRIVALS[each]
