"""Parameters whose gradients are still being reduced, and are waited for where somebody reads them.

[Note: deferred gradients] After a backward that is not the last (`set_is_last_backward`) the reduction issued last goes
on beside what the user does next. Its parameters have their `.grad` already: what was there, to which the sum will be
added, or the memory that the sum arrives in. Nobody may look at it before, so the parameters are of a class whose
`.grad` waits. They are the same objects, and whoever drops a `.grad` drops what arrives in it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .write_tracker import FlatParameter, TracksWrites

_GRAD: Any = torch.Tensor.grad


def _once_there(access: Callable[..., Any]) -> Callable[..., Any]:
    def waited(parameter: Any, *value: Any) -> Any:
        wait_for_grad(parameter)
        return access(parameter, *value)

    return waited


class _DeferredGrad:
    """What a parameter does differently while its gradient is awaited."""

    grad = property(_once_there(_GRAD.__get__), _once_there(_GRAD.__set__), _once_there(_GRAD.__delete__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait_for_grad(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_for_grad(self)
        return self.__reduce_ex__(protocol)


class DeferredGradParameter(_DeferredGrad, TracksWrites, nn.Parameter):
    """What `nn.Parameter` objects are while their gradients are awaited; never constructed."""


class DeferredGradFlatParameter(_DeferredGrad, FlatParameter):
    """What `FlatParameter` objects are while their gradients are awaited; never constructed."""


_WHILE_AWAITED: dict[type, type] = {nn.Parameter: DeferredGradParameter, FlatParameter: DeferredGradFlatParameter}
_AFTERWARDS = {awaited: kind for kind, awaited in _WHILE_AWAITED.items()}

ARRIVALS: dict[int, weakref.ref[PendingGradients]] = {}  # by id of the parameter; empty: nothing is awaited


class PendingGradients:
    """Gradients that are awaited together."""

    def __init__(self, parameters: Sequence[nn.Parameter], finish: Callable[[], None]) -> None:
        """`finish` makes the `.grad` of `parameters` what it is to be; it is called where that is asked for."""
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
        del self._parameters, self._finish  # with the sum, which is no `.grad` where it was added to one
        for parameter in parameters:
            if (kind := _AFTERWARDS.get(type(parameter))) is not None:
                parameter.__class__ = kind
        try:
            finish()
        except BaseException:
            for parameter in parameters:
                parameter.grad = None
            raise


def can_defer(parameter: nn.Parameter) -> bool:
    """Whether a read of the parameter's `.grad` can be made to wait: not with a class of the user's."""
    return type(parameter) in _WHILE_AWAITED


def is_deferred(parameter: nn.Parameter) -> bool:
    """Whether the parameter's gradient is awaited."""
    return id(parameter) in ARRIVALS


def show_deferred(parameters: Iterable[nn.Parameter]) -> None:
    """Let those of `parameters` whose gradients are awaited wait for them again, as after they were hidden."""
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
