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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..engine.base.plain_data import encode
from ..engine.device.streams import accelerator


class Stateful(Protocol):
    """An object with a state of plain data and tensors."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Generator(NamedTuple):
    """One of random numbers."""

    state: Callable[[], Any]
    set_state: Callable[[Any], object]
    seed: Callable[[int], object]


def generators() -> dict[str, Generator]:
    """Those of this process: Python's, torch's, numpy's if it is in use."""
    found = {
        "python": Generator(random.getstate, random.setstate, random.seed),
        "torch": Generator(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
    }
    if (numpy := sys.modules.get("numpy")) is not None:

        def state_of_numpy() -> tuple[Any, ...]:
            kind, words, *rest = numpy.random.get_state()
            return kind, words.tolist(), *rest

        found["numpy"] = Generator(state_of_numpy, numpy.random.set_state, numpy.random.seed)
    if (device := accelerator()) is not None:
        module = torch.get_device_module(device)
        found["accelerator"] = Generator(module.get_rng_state, module.set_rng_state, module.manual_seed)
    return found


def take(things: Mapping[str, Stateful]) -> dict[str, Any]:
    """The states of `things`, and of the generators."""
    states = {name: each.state_dict() for name, each in things.items()}
    return {"things": states, "numbers": {name: each.state() for name, each in generators().items()}, "seeds": {}}


def give(things: Mapping[str, Stateful], state: Mapping[str, Any]) -> None:
    """Load what `take` has returned, or `of_new_member`."""
    for name, each in things.items():
        each.load_state_dict(state["things"][name])
    for name, generator in generators().items():
        if name in state["seeds"]:
            generator.seed(state["seeds"][name])
        elif name in state["numbers"]:
            generator.set_state(state["numbers"][name])


def of_new_member(first: Mapping[str, Any], numbers: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any]:
    """The state of a process that joins with this number, from that of the first member, and the `numbers` in those of
    all. [Note: states of one that joins]"""
    seeds = {}
    for name, own in first["numbers"].items():
        if len({encode(each.get(name)) for each in numbers}) > 1:
            seeds[name] = int.from_bytes(hashlib.sha256(encode((own, number))).digest()[:4], "little")
    return {**first, "seeds": seeds}
