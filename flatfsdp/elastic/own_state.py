"""The state of a process besides its model and optimizer, which goes back with them: random states, and objects that
the program names (schedulers, positions in data, loss scales).

[Note: states of one that joins] It gets the objects of the first member. A generator of random numbers that has the
same state on all members is one that the program keeps alike (it shuffles data by it), and has that state on a new one,
too. Others differ by intent (dropout): the new one's is seeded from that of the first member and the new number, which
no other ever has.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping, Set
from typing import Any, Protocol

import torch

from ..engine.base.plain_data import encode
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


GENERATORS = frozenset({"python", "torch", "numpy", "accelerator"})


def digests(state: Mapping[str, Any]) -> dict[str, str]:
    """A digest of the state of each generator in what `take` has returned."""
    return {name: hashlib.sha256(encode(state[name])).hexdigest() for name in sorted(GENERATORS & state.keys())}


def of_new_member(state: Mapping[str, Any], alike: Set[str], number: int) -> dict[str, Any]:
    """The state of a process that joins with this number, from that of the first member; the generators `alike` have
    one state on all members. [Note: states of one that joins]"""
    made = dict(state)
    for name in GENERATORS & state.keys() - alike:
        seed = int.from_bytes(hashlib.sha256(encode((state[name], number))).digest()[:4], "little")
        if name == "python":
            made[name] = random.Random(seed).getstate()
        elif name == "numpy":
            kind, words, *rest = sys.modules["numpy"].random.RandomState(seed).get_state()
            made[name] = kind, words.tolist(), *rest
        else:
            device = accelerator() if name == "accelerator" else "cpu"
            made[name] = torch.Generator(device or "cpu").manual_seed(seed).get_state()
    return made
