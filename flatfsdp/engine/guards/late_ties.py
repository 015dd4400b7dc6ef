"""Parameters that were tied after `fully_shard`, and before anything was computed.

[Note: late ties] Functions that load weights tie them again afterwards: a module then holds the parameter that another
one shows at rest, instead of its own. This place refers to the other parameter from then on, as if both had been tied
before. The former parameter stays in the shards of its unit, and is not trained if no other place refers to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ...errors import UsageError
from ..flat.param_refs import ParamRef
from ..runtime.unit import Unit
from ..transforms.extensions import transformed_in
from .assignments import abandon

LeafKey = tuple[Unit, int, int]  # a leaf: its unit, the number of its handle, its own


def follow_ties(units: Sequence[Unit]) -> None:
    """Tie places in which modules of `units`, all of a model, hold a parameter of another place to that one. No
    communication.

    Raises:
        UsageError: impossible: it is sharded over other ranks, transformed, or units would own parameters mutually.
    """
    changed = [(unit, param_ref) for unit in units for param_ref in ParamRef.changed(unit.param_refs)]
    if not changed:
        return
    keys: dict[int, LeafKey] = {}
    shown: dict[int, LeafKey] = {}  # by id of the parameter that modules hold at rest
    for unit in units:
        for kind, handle in enumerate(unit.handles):
            for index, leaf in enumerate(handle.leaves):
                keys[id(leaf)] = shown[id(handle.face.holder_of(index))] = unit, kind, index
    ties: list[tuple[Unit, ParamRef, LeafKey, LeafKey]] = []
    owners: dict[Unit, list[Unit]] = {}  # new owning units, by unit
    for unit, param_ref in changed:
        held = param_ref.current
        if isinstance(held, nn.Parameter):
            before = keys[id(param_ref.leaf)]
            key = shown.setdefault(id(held), before)  # of a new parameter: the first leaf that it replaced
            if _leaf(key) is not param_ref.leaf:
                _check(unit, param_ref, key, before, owners)
                owners.setdefault(unit, []).append(key[0])
                ties.append((unit, param_ref, key, before))
    for tie in ties:  # none if one of them is refused
        _tie(*tie)
    for *_, (unit, kind, index) in ties:
        holding = (unit, *unit.alive_sharing_units())
        leaf = unit.handles[kind].leaves[index]
        if not any(ref.leaf is leaf for each in holding for ref in (*each.param_refs, *each.shared_refs)):
            abandon(unit.views[kind], index)


def _leaf(key: LeafKey) -> nn.Parameter:
    unit, kind, index = key
    return unit.handles[kind].leaves[index]


def _tie(unit: Unit, param_ref: ParamRef, key: LeafKey, before: LeafKey) -> None:
    """Let `param_ref` of `unit` refer to the leaf at `key` instead of the one at `before`."""
    owner, kind, _ = key
    made = param_ref.of(_leaf(key))
    unit.handles[before[1]].face.leave(param_ref)
    at = next(number for number, each in enumerate(unit.param_refs) if each is param_ref)
    if owner is unit:
        unit.param_refs[at] = made
    else:
        del unit.param_refs[at]
        unit.shared_refs.append(made)
        unit.share_params_of(list(dict.fromkeys([*unit.owning_units, owner])))
    views = unit.views[before[1]]
    extended = transformed_in(views)
    for each in extended:
        each.param_refs[:] = [ref for ref in each.param_refs if ref is not param_ref]
    views.extended = [each for each in extended if each.param_refs]
    for each in transformed_in(owner.views[kind]):
        if each.leaf is made.leaf:
            each.param_refs.append(made)
    owner.handles[kind].face.put(made)


def _check(
    unit: Unit, param_ref: ParamRef, key: LeafKey, before: LeafKey, owners: Mapping[Unit, Sequence[Unit]]
) -> None:
    owner, kind, index = key
    name = owner.entries.fqn(owner.handles[kind].layout.params[index].name)
    where = f"{param_ref.path!r} of unit {unit.label} was tied to {name!r} after fully_shard()"
    remedy = "Tie parameters earlier, and pass their modules to fully_shard() in one call, as a list"
    if owner is unit:
        return
    ranks = [each.axes.of(each.handles[at]).shard.ranks for each, at in ((owner, kind), (unit, before[1]))]
    if ranks[0] != ranks[1] or unit.groups.shard.ranks != ranks[0]:
        raise UsageError(f"{where}, which is sharded over other ranks. {remedy}")
    if any(each.leaf is _leaf(of) for of in (key, before) for each in of[0].views[of[1]].extended):
        raise UsageError(f"{where}, and one of them is a DTensor before it is sharded, or has gather hooks. {remedy}")
    if unit in _owners_of(owner, owners):
        raise UsageError(f"{where}, whose unit holds parameters of this one, too, so neither comes first. {remedy}")


def _owners_of(unit: Unit, owners: Mapping[Unit, Sequence[Unit]]) -> set[Unit]:
    found: set[Unit] = set()
    following = [unit]
    while following:
        at = following.pop()
        for each in (*at.owning_units, *owners.get(at, ())):
            if each not in found:
                found.add(each)
                following.append(each)
    return found
