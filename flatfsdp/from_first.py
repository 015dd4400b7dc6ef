"""A state dict that only the first rank has, as a state dict on every rank.

Every rank gets the keys. Its values know their shape, and arrive where they are copied to: into a buffer at once, into
the shards of a unit all together (`consolidate.scatter`). Non-tensors are sent along with the keys.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from . import _torch
from .comm import Transport
from .consolidate import is_first
from .errors import UsageError
from .placeholder import ASKS, Placeholder
from .unit import Unit


class FromFirst(torch.Tensor):
    """A value of the first rank's state dict.

    Attributes:
        held: the value there, None on other ranks.
        send: carries a tensor from the first rank to all others, in place. Collective.
    """

    held: torch.Tensor | None
    send: Callable[[torch.Tensor], None]

    @staticmethod
    def of(
        shape: Sequence[int], dtype: torch.dtype, held: torch.Tensor | None, send: Callable[[torch.Tensor], None]
    ) -> FromFirst:
        """The value, of which every rank knows shape and dtype."""
        like = torch.empty((), dtype=dtype)
        self: FromFirst = like.expand(tuple(shape)).as_subclass(FromFirst)
        self.held, self.send = held, send
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what only asks; carry out `copy_` from this value; refuse everything else, which only one rank could
        do."""
        name = getattr(func, "__name__", str(func))
        if name in ASKS:
            with _torch.as_plain_tensors():
                return func(*args, **(kwargs or {}))
        if name == "copy_" and isinstance(args[1], FromFirst):
            target, source = args[0], args[1]
            if isinstance(target, Placeholder):
                target.received = source
            else:
                source._send_into(target)
            return target
        raise UsageError(
            f"{name}() of a value that only rank 0 has, while its state dict is loaded (rank0_only=True): a hook or a "
            "_load_from_state_dict of a module computes with it. Give every rank the state dict, without rank0_only"
        )

    def _send_into(self, target: torch.Tensor) -> None:
        with torch.no_grad(), _torch.as_plain_tensors():
            if self.held is not None:
                target.copy_(self.held)
            self.send(target.detach())


def spread(unit: Unit, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace `state_dict` below `prefix` by what the first rank has there. Collective over both axes of `unit`.

    Does nothing inside a wrapper for which it has been done.
    """
    keys = [key for key in state_dict if key.startswith(prefix)]
    if any(isinstance(state_dict[key], FromFirst) for key in keys):
        return
    first = is_first(unit)
    told: list[tuple[str, Any, Any]] = []
    for key in keys if first else ():
        value = state_dict[key]
        is_tensor = isinstance(value, torch.Tensor)
        told.append((key, tuple(value.shape), value.dtype) if is_tensor else (key, None, value))
    known = _broadcast(unit, told)
    held = {key: state_dict.pop(key) for key in keys}
    for key, shape, what in known:
        if shape is None:
            state_dict[key] = what
        else:
            value = held[key] if first else None
            state_dict[key] = FromFirst.of(shape, what, value, lambda tensor: _send(unit, tensor))


def _axes(unit: Unit) -> Iterator[Transport]:
    """Along which what the first rank has reaches all others: first the counterparts in other replicas."""
    for axis in (unit.replicate, unit.gather):
        if axis is not None:
            yield axis


def _send(unit: Unit, tensor: torch.Tensor) -> None:
    travelling = tensor.to(unit.groups.device).contiguous()
    for axis in _axes(unit):
        axis.broadcast(travelling)
    if travelling is not tensor:
        tensor.copy_(travelling)


def _broadcast(unit: Unit, value: Any) -> Any:
    content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(unit.groups.device)
    size = torch.tensor([content.numel()], device=unit.groups.device)
    for axis in _axes(unit):
        axis.broadcast(size)
    if not is_first(unit):
        content = content.new_empty(int(size))
    for axis in _axes(unit):
        axis.broadcast(content)
    return pickle.loads(content.cpu().numpy().tobytes())
