"""The state of a process besides its model and optimizer, which goes back with them: random states, and objects that
the program names (schedulers, positions in data, loss scales)."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..engine.device.streams import accelerator


class Stateful(Protocol):
    """An object with a state of plain data and tensors."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def take(things: Mapping[str, Stateful]) -> dict[str, Any]:
    """The states of `things`, and of the generators of random numbers: Python's, torch's, numpy's if it is in use."""
    state: dict[str, Any] = {"things": {name: each.state_dict() for name, each in things.items()}}
    state["python"], state["torch"] = random.getstate(), torch.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, words, *rest = numpy.random.get_state()
        state["numpy"] = kind, words.tolist(), *rest
    if (device := accelerator()) is not None:
        state["accelerator"] = torch.get_device_module(device).get_rng_state()
    return state


def give(things: Mapping[str, Stateful], state: Mapping[str, Any]) -> None:
    """Load what `take` has returned."""
    for name, each in things.items():
        each.load_state_dict(state["things"][name])
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        kind, words, *rest = state["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.array(words, dtype="uint32"), *rest))
    if "accelerator" in state and (device := accelerator()) is not None:
        torch.get_device_module(device).set_rng_state(state["accelerator"])
