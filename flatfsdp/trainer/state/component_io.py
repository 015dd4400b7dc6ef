"""Write and read the states of components: the ranks that write each, and those that get it back.

[Note: parts] A component has one *part* for each set of ranks that share a state: `"all"`, or one named by the number
of its first rank, which writes it. The *table* has of each component its sharing, whether it is required, and of each
part the ranks; it is in the checkpoint beside the states, and in `components.json`, for people.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatfsdp.errors import AgreementError, CheckpointError, ConfigValueError
from flatfsdp.trainer.process_group import TrainerRanks, node
from flatfsdp.trainer.state.components import Component, Sharing

__all__ = ["ComponentSelection", "LocalComponentStates", "as_json", "choose", "give", "take", "verify"]

ALL = "all"
_WHOLE = (Sharing.GLOBAL, Sharing.REPLICATED)


@dataclass(frozen=True)
class LocalComponentStates:
    """What this rank writes of components, by name and part, and the table of all, which all ranks have."""

    states: Mapping[str, Mapping[str, Any]]
    table: Mapping[str, Any]


def take(components: Sequence[Component], ranks: TrainerRanks) -> LocalComponentStates:
    """The states of `components`, where each is to be written. Collective.

    Raises:
        CheckpointError, AgreementError: on every rank: a rank cannot give a state, ranks have other components or
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
                    states[component.name] = {part: _saved(component)}

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
    return LocalComponentStates(states, table)


def _saved(component: Component) -> Any:
    try:
        return component.save()
    except Exception as error:
        raise CheckpointError(f"component {component.name!r}: {type(error).__name__}: {error}") from error


def _divided(components: Sequence[Component], ranks: TrainerRanks, doing: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Of each component the ranks of each part. Collective."""
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
                f"{doing}: ranks have other components: {_few(declared[0], each)} on rank 0, {_few(each, declared[0])} "
                f"on rank {rank}. Give every rank the same, in the same order"
            )
    nodes = [name for name, _ in answers]
    divided: dict[str, dict[str, tuple[int, ...]]] = {}
    for place, component in enumerate(components):
        if component.sharing in _WHOLE:
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
                    f"{odd[0]} is {list(sets[odd[0]])}. Each rank is in one group of a component"
                )
        divided[component.name] = {str(members[0]): members for members in dict.fromkeys(sets)}
    return divided


def _few(own: Sequence[Any], other: Sequence[Any]) -> str:
    return ", ".join(str(each) for each in own if each not in other) or "no other"


# --- loading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComponentSelection:
    """What a rank loads of a checkpoint.

    Attributes:
        parts: of each component the part of this rank; None where it has none.
        missing: required components that the checkpoint has not, or not for these ranks, with the reason.
        warnings: what else is not as it was.
    """

    parts: Mapping[str, str | None]
    missing: Sequence[str]
    warnings: Sequence[str]


def choose(
    table: Mapping[str, Any], world: int | None, components: Sequence[Component], ranks: TrainerRanks
) -> ComponentSelection:
    """What this rank loads of a checkpoint with this `table`, saved by `world` ranks. Collective.

    Raises:
        AgreementError: on every rank: ranks have other components, or divide one differently.
    """
    divided = _divided(components, ranks, "loading the components of the run")
    parts: dict[str, str | None] = {}
    missing, warnings = [], []
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
        # All ranks go one way: where some have no part of theirs, none uses one.
        if world == ranks.world and part_of.keys() == set(divided[name].values()):
            parts[name] = next(part for members, part in part_of.items() if ranks.rank in members)
        elif component.restart is None:
            why = f"{table[name]['sharing']}: {world} ranks saved {len(saved)} parts, none is for {ranks.world} ranks"
            if component.required:
                missing.append(f"{name} ({why} divided as they are now)")
            else:
                warnings.append(f"component {name!r} is {why}; it {_begins(component)}")
    unknown = [name for name in table if name not in parts]
    if unknown:
        warnings.append(f"the checkpoint has {', '.join(unknown)}, for which this run has no component; left out")
    return ComponentSelection(parts, missing, warnings)


def _begins(component: Component) -> str:
    return "stays as it was made" if component.restart is None else "starts anew"


def give(
    components: Sequence[Component], choice: ComponentSelection, states: Mapping[str, Any], *, step: int
) -> list[str]:
    """Let `components` load their `states`, by name and part, or start anew; the notes of those. Not collective."""
    notes = []
    for component in components:
        part = choice.parts[component.name]
        try:
            if part is not None:
                component.load(states[component.name][part])
            elif component.restart is not None:
                notes.append(component.restart(step))
        except Exception as error:
            raise CheckpointError(f"component {component.name!r}: {type(error).__name__}: {error}") from error
    return notes


# --- replicas ---------------------------------------------------------------------------------------------------------


def verify(components: Sequence[Component], ranks: TrainerRanks) -> None:
    """Compare replicated components over ranks, by hashes. Collective; others are not looked at.

    Raises:
        AgreementError: on every rank, with every component that differs, where, and on which ranks.
    """
    replicated = [component for component in components if component.sharing is Sharing.REPLICATED]
    if ranks.world == 1 or not replicated:
        return
    leaves: dict[str, dict[str, str]] = {}

    def hashed() -> dict[str, str]:
        leaves.update({each.name: dict(_hashes(_saved(each), "")) for each in replicated})
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
        problems.append(f"component {name!r} differs in {key or 'its state'} between rank 0 and {_ranks(others)}")
    raise AgreementError(
        f"{'; '.join(problems)}. It is declared replicated: all ranks must hold the same; declare it per_rank, or "
        "global where rank 0's is the one to keep"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"


def _hashes(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Of each leaf of a nested state, by its place, a hash."""
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


def as_json(table: Mapping[str, Any], *, step: int, world: int) -> bytes:
    """The contents of `components.json`."""
    return json.dumps({"step": step, "world": world, "components": table}, indent=1).encode() + b"\n"
