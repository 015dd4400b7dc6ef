"""Functions that initialise a module see it on the meta device, as they do under FSDP1, while it has memory already.

Programs guard such functions with `if not parameter.is_meta: return`, so that what is initialised elsewhere keeps its
values. Taken literally that would leave parameters without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_META = torch.device("meta")
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_ONLY_LOOK = {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point}


class MetaDeviceMode(TorchFunctionMode):
    """A context in which `tensors` say that they are on the meta device, each until something is done with it.

    What creates tensors beside them asks for their device, which is the true one unless `device` is set.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, device: bool) -> None:
        super().__init__()
        self._as_they_were = [(tensor, tensor.data_ptr(), tensor._version) for tensor in tensors]
        self._unused = {id(tensor) for tensor, _, _ in self._as_they_were}
        self._answers: dict[Any, Any] = {_IS_META: True, **({_DEVICE: _META} if device else {})}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._answers and id(args[0]) in self._unused:
            return self._answers[func]
        if func == _DATA or not (func in _ONLY_LOOK or getattr(func, "__name__", "") == "__get__"):
            for each in (*args, *(kwargs or {}).values()):
                self._unused.difference_update(map(id, each if isinstance(each, (list, tuple)) else (each,)))
        return func(*args, **(kwargs or {}))

    def untouched(self) -> list[torch.Tensor]:
        """Those with which nothing was done, by functions of torch or behind their back."""
        return [
            tensor
            for tensor, address, version in self._as_they_were
            if id(tensor) in self._unused and (tensor.data_ptr(), tensor._version) == (address, version)
        ]
