"""A part of a checkpoint: something that is saved and loaded under a name of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch

from ..engine.state.optim.load_plan import TensorSpec


class Section:
    """One part, under its name in the checkpoint; as it is here, a state dict that the user has made, and will load.

    Attributes:
        state: nested mappings.
        ties: names in `state` of a parameter or buffer that has several, with the first of them.
        buffers: names in `state` of buffers, of which each rank may have another one.
        is_optional: a checkpoint may be without it, or have another one: what is there is not compared with `state`.
    """

    ties: Mapping[str, str] = MappingProxyType({})
    buffers: Collection[str] = ()
    is_optional = False

    def __init__(self, name: str, state: Mapping[str, Any]) -> None:
        self.name, self.state = name, state

    def take(self, *, in_use: bool) -> None:
        """Find `state`, whose tensors may be `in_use`; otherwise they are there to be filled. Collective."""

    def expect(self, there: Mapping[str, TensorSpec]) -> None:
        """Make `state` what is to be loaded from a checkpoint that has these tensors, by key ([Note: keys])."""

    def load(self, read: Mapping[str, Any]) -> None:
        """Take back `read`, which is `state` with the values of the checkpoint. Collective."""
        _replace_values(self.state, read)


def _replace_values(state: Any, read: Any) -> None:
    """Put what was read in the place of plain values of `state`; its tensors have been filled."""
    if isinstance(state, list) and isinstance(read, list) and len(state) == len(read):
        places: Iterable[Any] = range(len(state))
    elif isinstance(state, MutableMapping) and isinstance(read, Mapping):
        places = [key for key in state if key in read]
    else:
        return
    for place in places:
        if isinstance(state[place], Mapping | list) and isinstance(read[place], Mapping | list):
            _replace_values(state[place], read[place])
        elif not isinstance(state[place], torch.Tensor):
            state[place] = read[place]
