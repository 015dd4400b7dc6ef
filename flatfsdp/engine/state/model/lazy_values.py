"""Values of a state dict that are not at hand yet: modules that load them see their shape, and say where they go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ....errors import InternalError, UsageError
from ...base import _torch
from ...flat.placeholder import Placeholder, asks, name_of


class LazyValue(torch.Tensor):
    """A value that takes communication to be had. `copy_` of it into a placeholder is kept there; into another tensor
    it is carried out at once, in the order in which modules load, which is the same on all ranks.

    Attributes:
        value: what it is made of.
        why: completes "a value that ...".
    """

    value: Any
    why = "takes communication"

    @classmethod
    def of(cls, held: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """The value, of this shape and dtype, without memory."""
        self = torch.empty((), dtype=dtype).expand(tuple(shape)).as_subclass(cls)
        self.value = held
        return self

    def fetch_into(self, target: torch.Tensor) -> None:
        """Fill `target`. Collective."""
        raise InternalError(f"{type(self).__name__} does not say how it arrives")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what only asks; see `copy_`; refuse everything else."""
        if asks(func):
            with _torch.as_plain_tensors():
                return func(*args, **(kwargs or {}))
        name = name_of(func)
        if name == ".data":  # as modules ask for it that load parameters
            return args[0]
        if name == "copy_()" and isinstance(args[1], LazyValue):
            target, source = args[0], args[1]
            if isinstance(target, Placeholder):
                target.received = source
            else:
                with torch.no_grad(), _torch.as_plain_tensors():
                    source.fetch_into(target)
            return target
        raise UsageError(
            f"{name} of a value that {cls.why}, while its state dict is loaded: a hook or a _load_from_state_dict of "
            "a module computes with it. Give every rank a FULL_STATE_DICT, without rank0_only"
        )
