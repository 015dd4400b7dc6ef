"""Components: the state of a run besides model and optimizer, each part with a declared sharing.

[Note: components] A component is a name, two functions (one returns its state, one takes it back) and a `Sharing`: who
has the same state, and so who writes it and who reads it. What all ranks share comes back on any number of them. What
belongs to one rank (a group, a node) comes back where the run has as many ranks as before, divided as before; elsewhere
`restart` is called in place of `load`: each component states in words what it does then.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flatfsdp.errors import ConfigTypeError, ConfigValueError

__all__ = ["Component", "Sharing", "Stateful", "rng_component", "stateful_component"]

State = Mapping[str, Any]


class Sharing(Enum):
    """Which ranks have the state of a component in common."""

    GLOBAL = "global"  # one for the job: rank 0 has it and writes it, all read it
    REPLICATED = "replicated"  # all have the same: rank 0 writes it, all read it, and each save compares
    PER_RANK = "per_rank"  # each has its own
    PER_GROUP = "per_group"  # those of a process group have one; its first rank writes it
    PER_NODE = "per_node"  # those of a node have one; its first rank writes it


@dataclass(frozen=True)
class Component:
    """A part of a run's state ([Note: components]).

    Attributes:
        name: under which it is in checkpoints; of one run's components each has its own.
        sharing: whose state it is.
        save: returns the state: nested mappings and lists of tensors and plain values, as ``extra`` of
            `flatfsdp.checkpoint.save` takes them. Called on the rank that writes; on all ranks where it is REPLICATED.
        load: takes it back. Called on all ranks.
        required: whether a checkpoint without it is refused; otherwise a warning names it.
        group: the process group of this rank, for PER_GROUP.
        restart: called with the checkpoint's step in place of `load` where there is no state for this rank; returns
            what it did, as a sentence for the log. None: a required component is refused then, another one stays as
            it was made, with a warning.

    Raises:
        ConfigTypeError, ConfigValueError: a group without PER_GROUP, or the other way round; an empty name.
    """

    name: str
    _: KW_ONLY
    sharing: Sharing
    save: Callable[[], State]
    load: Callable[[State], None]
    required: bool = True
    group: dist.ProcessGroup | None = None
    restart: Callable[[int], str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigTypeError(f"name: got {self.name!r}. Accepted: a string that is not empty.")
        if not isinstance(self.sharing, Sharing):
            accepted = ", ".join(str(each) for each in Sharing)
            raise ConfigTypeError(f"sharing of component {self.name!r}: got {self.sharing!r}. Accepted: {accepted}.")
        if (self.group is not None) != (self.sharing is Sharing.PER_GROUP):
            raise ConfigValueError(
                f"component {self.name!r}: sharing is {self.sharing} and group is {self.group!r}. Accepted: a process "
                "group for PER_GROUP, and None otherwise."
            )


class Stateful(Protocol):
    """Anything that gives its state and takes it back: schedulers, loaders, scalers, ..."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take it back."""


def stateful_component(
    name: str,
    thing: Stateful,
    *,
    sharing: Sharing = Sharing.REPLICATED,
    required: bool = True,
    group: dist.ProcessGroup | None = None,
    restart: Callable[[int], str] | None = None,
) -> Component:
    """The component of a `thing` that has ``state_dict()`` and ``load_state_dict(state)``."""
    return Component(
        name,
        sharing=sharing,
        save=thing.state_dict,
        load=lambda state: void(thing.load_state_dict(dict(state))),
        required=required,
        group=group,
        restart=restart,
    )


def void(_: object) -> None:
    """Drop what a function returns."""


# --- random numbers ---------------------------------------------------------------------------------------------------


def rng_component(seed: int, *, name: str = "rng", rank: int | None = None) -> Component:
    """The random numbers of this rank: Python's, numpy's where it is in use, torch's on the CPU and the accelerator.

    On another number of ranks than saved them, each rank seeds all of them with a number made from (`seed`, the step,
    its rank): other numbers than an uninterrupted run would draw, and the same whenever this is repeated.

    Args:
        seed: that of the run.
        name: the component's.
        rank: this rank's number; None for that in the default process group.
    """
    if rank is None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def restart(step: int) -> str:
        seed_all(derived_seed(seed, step, rank))
        return f"random numbers: seeded anew from (seed {seed}, step {step}, rank {rank})"

    return Component(name, sharing=Sharing.PER_RANK, save=_rng_state, load=_load_rng, required=False, restart=restart)


def derived_seed(*numbers: int) -> int:
    """A seed of 63 bits from numbers: others for others."""
    text = " ".join(map(str, numbers))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_all(seed: int) -> None:
    """Seed Python's random numbers, numpy's where it is in use, and torch's on every device."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _rng_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    # Numbers as tensors and the rest as one value each: there is one of these for each rank.
    state: dict[str, Any] = {
        "python": (version, gauss),
        "python words": torch.tensor(words),
        "torch": torch.get_rng_state(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, words, *rest = numpy.random.get_state()
        state["numpy"] = (kind, *rest)
        state["numpy words"] = torch.tensor(words.tolist())
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        state["accelerator"] = torch.get_device_module(device).get_rng_state()
    return state


def _load_rng(state: State) -> None:
    version, gauss = state["python"]
    random.setstate((version, tuple(state["python words"].tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if (numpy := sys.modules.get("numpy")) is not None and "numpy" in state:
        kind, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(state["numpy words"].tolist(), dtype=numpy.uint32), *rest))
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and "accelerator" in state:
        torch.get_device_module(device).set_rng_state(state["accelerator"])
