"""Components: the state of a run except model and optimizer, each part with a declared sharing.

[Note: components] A component is a name, two functions (one returns its state, one loads it) and a `Sharing`: the ranks
that have the same state, and so the ranks that write and read it. A state shared by all ranks is restored on any number
of them. A state of one rank, group or node is restored if the run has the same number of ranks, divided in the same
way; otherwise `restart` is called instead of `load`, and each component describes its effect.

[Note: parts] A component has one *part* for each set of ranks that share a state: `"all"`, or the number of its first
rank, which writes it. The *table* has the sharing of each component, whether it is required, and the ranks of each
part; it is in the checkpoint with the states, and in `components.json`, for human readers.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flatfsdp.errors import AgreementError, CheckpointError, ConfigTypeError, ConfigValueError, ranks_in_words
from flatfsdp.trainer.process_group import TrainerRanks, node
from flatfsdp.trainer.randomness import host_states, restore_host, seed_all, seed_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

__all__ = ["Component", "Sharing", "rng_component", "stateful_component"]

State = Mapping[str, Any]
ALL = "all"


class Sharing(Enum):
    """Which ranks have the state of a component in common."""

    GLOBAL = "global"  # one state for the job: rank 0 has it and writes it, all read it
    REPLICATED = "replicated"  # equal on all ranks: rank 0 writes it, all read it, and each save compares
    PER_RANK = "per_rank"  # each rank has its own
    PER_GROUP = "per_group"  # the ranks of a process group share one; its first rank writes it
    PER_NODE = "per_node"  # the ranks of a node share one; its first rank writes it


@dataclass(frozen=True)
class Component:
    """A part of a run's state ([Note: components]).

    Attributes:
        name: its name in checkpoints; unique among the components of a run.
        sharing: the ranks that share its state.
        save: returns the state: nested mappings and lists of tensors and plain values, as for ``extra`` of
            `flatfsdp.checkpoint.save`. Called on the rank that writes; on all ranks where it is REPLICATED.
        load: loads such a state. Called on all ranks.
        required: whether a checkpoint without it is refused; otherwise a warning names it.
        group: the process group of this rank, for PER_GROUP.
        restart: called with the checkpoint's step instead of `load` where there is no state for this rank; returns a
            sentence for the log that describes its effect. None: then a required component is an error, and any other
            one stays unchanged, with a warning.

    Raises:
        ConfigTypeError, ConfigValueError: a group without PER_GROUP, or PER_GROUP without a group; an empty name.
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


def stateful_component(
    name: str, thing: Stateful, *, sharing: Sharing = Sharing.REPLICATED, **options: Any
) -> Component:
    """The component of a `thing` that has ``state_dict()`` and ``load_state_dict(state)``; `options` of `Component`."""

    def load(state: State) -> None:
        thing.load_state_dict(dict(state))

    return Component(name, sharing=sharing, save=thing.state_dict, load=load, **options)


# --- random numbers ---------------------------------------------------------------------------------------------------


def rng_component(seed: int, *, name: str = "rng", rank: int | None = None) -> Component:
    """The random numbers of this rank: Python's, numpy's where it is in use, torch's on the CPU and the accelerator.

    On another number of ranks than at the save, each rank seeds all generators with a number made from (`seed`, the
    step, its rank): the numbers differ from those of an uninterrupted run, and are reproducible.

    Args:
        seed: the seed of the run.
        name: the name of the component.
        rank: this rank's number; None for its number in the default process group.
    """
    if rank is None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def restart(step: int) -> str:
        seed_all(seed_of(seed, step, rank))
        return f"random numbers: reseeded from (seed {seed}, step {step}, rank {rank})"

    return Component(name, sharing=Sharing.PER_RANK, save=_rng_state, load=_load_rng, required=False, restart=restart)


def _rng_state() -> dict[str, Any]:
    (version, words, gauss), of_torch, of_numpy = host_states()
    # Numbers as tensors, and the rest as one value each: there is one such state for each rank.
    state: dict[str, Any] = {"python": (version, gauss), "python words": torch.tensor(words), "torch": of_torch}
    if of_numpy is not None:
        kind, words, *rest = of_numpy
        state |= {"numpy": (kind, *rest), "numpy words": torch.tensor(words.tolist())}
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        state["accelerator"] = torch.get_device_module(device).get_rng_state()
    return state


def _load_rng(state: State) -> None:
    version, gauss = state["python"]
    of_numpy = None
    if "numpy" in state:
        kind, *rest = state["numpy"]
        of_numpy = (kind, state["numpy words"].tolist(), *rest)
    restore_host((version, tuple(state["python words"].tolist()), gauss), state["torch"], of_numpy)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and "accelerator" in state:
        torch.get_device_module(device).set_rng_state(state["accelerator"])


# --- saving -----------------------------------------------------------------------------------------------------------


def take(components: Sequence[Component], ranks: TrainerRanks) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The states that this rank writes, by component and part, and the table, equal on all ranks. Collective.

    Raises:
        CheckpointError, AgreementError: on every rank: a component raised, ranks have other components or
            divide one differently, or a replicated one differs.
    """
    doing = "saving the components of the run"
    divided = _divided(components, ranks, doing)
    verify(components, ranks)
    states: dict[str, dict[str, Any]] = {}

    def save() -> None:
        for component in components:
            for part, members in divided[component.name].items():
                if members[0] == ranks.rank:
                    with _named(component):
                        states[component.name] = {part: component.save()}

    ranks.collective_call(doing, save)
    table = {
        component.name: {
            "sharing": component.sharing.value,
            "required": component.required,
            "parts": {
                part: {"written_by": members[0]} | ({} if part == ALL else {"ranks": list(members)})
                for part, members in divided[component.name].items()
            },
        }
        for component in components
    }
    return states, table


@contextmanager
def _named(component: Component) -> Iterator[None]:
    """Inside, exceptions of a function of `component` become a CheckpointError with its name."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"component {component.name!r}: {type(error).__name__}: {error}") from error


def _divided(components: Sequence[Component], ranks: TrainerRanks, doing: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """The ranks of each part of each component. Collective."""
    names = [component.name for component in components]

    def declare() -> tuple[str, list[tuple[str, str, bool, tuple[int, ...]]]]:
        for name in names:
            if names.count(name) > 1:
                raise ConfigValueError(
                    f"components: {names.count(name)} of them are named {name!r}; rename all but one"
                )
        own = [(each.name, each.sharing.value, each.required, ranks.members(each.group)) for each in components]
        return node(), own

    answers = ranks.collective_call(doing, declare)
    declared = [[each[:3] for each in own] for _, own in answers]
    for rank, each in enumerate(declared):
        if each != declared[0]:
            raise AgreementError(
                f"{doing}: ranks have different components: {_few(declared[0], each)} on rank 0, "
                f"{_few(each, declared[0])} on rank {rank}. Give every rank the same, in the same order"
            )
    nodes = [name for name, _ in answers]
    divided: dict[str, dict[str, tuple[int, ...]]] = {}
    for place, component in enumerate(components):
        if component.sharing in (Sharing.GLOBAL, Sharing.REPLICATED):
            divided[component.name] = {ALL: tuple(range(ranks.world))}
            continue
        if component.sharing is Sharing.PER_NODE:
            sets = [tuple(rank for rank, each in enumerate(nodes) if each == mine) for mine in nodes]
        else:
            sets = [own[place][3] for _, own in answers]
        for rank, members in enumerate(sets):
            odd = [other for other in members if sets[other] != members]
            if odd:
                raise AgreementError(
                    f"{doing}: component {component.name!r}: the group of rank {rank} is {list(members)}, that of rank "
                    f"{odd[0]} is {list(sets[odd[0]])}. Each rank must be in exactly one group of a component"
                )
        divided[component.name] = {str(members[0]): members for members in dict.fromkeys(sets)}
    return divided


def _few(own: Sequence[Any], other: Sequence[Any]) -> str:
    return ", ".join(str(each) for each in own if each not in other) or "no other"


# --- loading ----------------------------------------------------------------------------------------------------------


def choose(
    table: Mapping[str, Any], world: int | None, components: Sequence[Component], ranks: TrainerRanks
) -> tuple[dict[str, str | None], list[str]]:
    """The part of each component that this rank loads from a checkpoint with this `table`, saved by `world` ranks (None
    if there is none for it), and a list of other differences. Collective.

    Raises:
        CheckpointError: on every rank: the checkpoint lacks a required component, or its state for these ranks.
        AgreementError: on every rank: ranks have other components, or divide one differently.
    """
    divided = _divided(components, ranks, "loading the components of the run")
    parts: dict[str, str | None] = {}
    missing: list[str] = []
    warnings: list[str] = []
    for component in components:
        name = component.name
        parts[name] = None
        if name not in table:
            if component.required:
                missing.append(f"{name} (not in the checkpoint)")
            else:
                warnings.append(f"component {name!r} is not in the checkpoint and {_begins(component)}")
            continue
        saved = table[name]["parts"]
        if ALL in saved:
            parts[name] = ALL
            continue
        part_of = {tuple(each["ranks"]): part for part, each in saved.items()}
        # All ranks do the same: where some have no part of theirs, none uses one.
        if world == ranks.world and part_of.keys() == set(divided[name].values()):
            parts[name] = next(part for members, part in part_of.items() if ranks.rank in members)
        elif component.restart is None:
            why = f"{table[name]['sharing']}: {world} ranks saved {len(saved)} parts, none is for {ranks.world} ranks"
            if component.required:
                missing.append(f"{name} ({why} divided as they are now)")
            else:
                warnings.append(f"component {name!r} is {why}; it {_begins(component)}")
    if missing:
        raise CheckpointError(
            f"required components are missing: {'; '.join(missing)}. The checkpoint has {', '.join(table) or 'none'}. "
            "Nothing has been loaded"
        )
    unknown = [name for name in table if name not in parts]
    if unknown:
        warnings.append(f"the checkpoint has {', '.join(unknown)}, for which this run has no component; ignored")
    return parts, warnings


def _begins(component: Component) -> str:
    return "keeps its initial state" if component.restart is None else "starts over"


def give(
    components: Sequence[Component], parts: Mapping[str, str | None], states: Mapping[str, Any], *, step: int
) -> list[str]:
    """Let `components` load their `states` (by name and part) or restart. Returned: their notes. Not collective."""
    notes = []
    for component in components:
        with _named(component):
            if (part := parts[component.name]) is not None:
                component.load(states[component.name][part])
            elif component.restart is not None:
                notes.append(component.restart(step))
    return notes


# --- replicas ---------------------------------------------------------------------------------------------------------


def verify(components: Sequence[Component], ranks: TrainerRanks) -> None:
    """Compare replicated components between ranks, by hashes; others are skipped. Collective.

    Raises:
        AgreementError: on every rank, with every component that differs, where, and on which ranks.
    """
    replicated = [component for component in components if component.sharing is Sharing.REPLICATED]
    if ranks.world == 1 or not replicated:
        return
    leaves: dict[str, dict[str, str]] = {}

    def hashed() -> dict[str, str]:
        for each in replicated:
            with _named(each):
                leaves[each.name] = dict(_hashes(each.save(), ""))
        return {name: _hash(repr(sorted(inside.items())).encode()) for name, inside in leaves.items()}

    doing = "comparing replicated components"
    hashes = ranks.collective_call(doing, hashed)
    differing = [name for name in leaves if len({each.get(name) for each in hashes}) > 1]
    if not differing:
        return
    found = ranks.collective_call(doing, lambda: {name: leaves[name] for name in differing})
    problems = []
    for name in differing:
        keys = dict.fromkeys(key for each in found for key in each[name])
        key = next(key for key in keys if len({each[name].get(key) for each in found}) > 1)
        others = [rank for rank, each in enumerate(found) if each[name].get(key) != found[0][name].get(key)]
        problems.append(
            f"component {name!r} differs in {key or 'its state'} between rank 0 and {ranks_in_words(others)}"
        )
    raise AgreementError(
        f"{'; '.join(problems)}. It is declared replicated, so all ranks must have the same state; declare it "
        "per_rank, or global to keep rank 0's"
    )


def _hashes(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """A hash of each leaf of a nested state, with its place."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _hashes(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple) and value:
        for place, inner in enumerate(value):
            yield from _hashes(inner, f"{where}[{place}]")
    elif isinstance(value, torch.Tensor):
        held = value.detach().to("cpu").contiguous()
        size = held.numel() * held.element_size()
        data = bytes((ctypes.c_char * size).from_address(held.data_ptr())) if size else b""
        yield where, _hash(f"{held.dtype} {tuple(held.shape)} ".encode() + data)
    else:
        text = repr(value)
        yield where, _hash((type(value).__name__ if " at 0x" in text else text).encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
