"""The comparison of an optimizer's options over ranks, once, at its first step.

Each rank steps its own shards, so with another learning rate on one rank the pieces of one parameter follow different
ones, without any sign. No rank waits for another: the first leaves its options in the store, and one that has others
warns. That is one request of each rank for an optimizer.

Optimizers are matched by their class and the set of their parameters, in the order of their first steps, so that ranks
may build several in any order. Numbers, strings, and tuples or lists of these are compared, and tensors in CPU memory
by value; other tensors are not, because reading them would wait for the device, nor are functions and other objects, or
options that choose an implementation (`IMPLEMENTATION`). The parameters of each group are compared with their order.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections import Counter
from typing import Any

import torch

from ...errors import one_rank_warns, warn
from ..agreement.agreement import agreement_of
from ..base import _dtensor
from ..base.foreign_text import parse
from ..base.hashing import hash63
from ..runtime.model import Model

IMPLEMENTATION = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
MOST = 3  # differences in a message

_compared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_had: Counter[int] = Counter()  # optimizers by their class and parameters, the same on all ranks

Groups = list[tuple[str, dict[str, str]]]  # of each group: a digest of its parameters, and the values of its options


def is_compared(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `compare_options` has run for this optimizer."""
    return optimizer in _compared


def compare_options(optimizer: torch.optim.Optimizer, models: list[Model]) -> None:
    """Warn, on one rank, if the options of `optimizer`, which steps these `models`, differ from those of another rank.
    Not collective; one request to the store, at the first call for an optimizer."""
    _compared.add(optimizer)
    known = [(model, each) for model in models if (each := agreement_of(model.agreement).peers).watch is not None]
    if not known:  # no model has run, or no other rank
        return
    peers = known[0][1]
    names = {
        id(holder): f"{each.scope} {number} {kind} {position}"
        for model, each in known
        for number, unit in enumerate(model.units)
        for kind, handle in enumerate(unit.handles)
        for position, holder in enumerate(handle.face.holders)
    }
    held = [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
    name = type(optimizer).__name__
    which = hash63(f"{name} {sorted(each for group in held for each in group)}")
    _had[which] += 1
    groups: Groups = [
        (f"{hash63(str(those)):x}", _comparable(group))
        for those, group in zip(held, optimizer.param_groups, strict=True)
    ]
    store, key = peers.store, f"optimizer/{which:x}/{_had[which]}"
    with contextlib.suppress(RuntimeError):  # the store is gone
        rank, theirs = _published(store.set_if_absent(key, json.dumps([peers.rank, groups])))
        if theirs is None or not (found := differences(groups, theirs, rank=peers.rank, other=rank)):
            return
        first = store.set_if_absent(f"{key}/warned", str(peers.rank)) == str(peers.rank)
        with one_rank_warns(this_rank=first):
            more = f"; and {len(found) - MOST} more" if len(found) > MOST else ""
            warn(
                f"{name} has different options on ranks: {'; '.join(found[:MOST])}{more}. Each rank steps its "
                "own shards, so that parts of one parameter would be trained differently. Build the optimizer, and "
                "its learning rate scheduler, alike on all ranks"
            )


def differences(mine: Groups, theirs: Groups, *, rank: int, other: int) -> list[str]:
    """The differences between the groups of this `rank` and those of the `other`, in words; the lower rank first."""
    if other > rank:
        return differences(theirs, mine, rank=other, other=rank)
    if len(mine) != len(theirs):
        return [f"it has {len(theirs)} param groups on rank {other} and {len(mine)} on rank {rank}"]
    found = []
    for number, ((own, options), (their, their_options)) in enumerate(zip(mine, theirs, strict=True)):
        if own != their:
            found.append(
                f"param group {number} has other parameters on rank {other} than on rank {rank}, or in another order"
            )
        for option in dict.fromkeys([*their_options, *options]):
            values = their_options.get(option, "not set"), options.get(option, "not set")
            if values[0] != values[1]:
                found.append(
                    f"{option} of param group {number} is {values[0]} on rank {other} and {values[1]} on rank {rank}"
                )
    return found


def _published(text: str) -> tuple[int, Groups | None]:
    """The rank and its groups that `text` has; None for groups if it is anything else. [Note: trust]"""
    match parse(text):
        case [int(rank), [*groups]]:
            found: Groups = []
            for group in groups:
                match group:
                    case [str(those), dict(options)]:
                        found.append((those, {str(name): str(value) for name, value in options.items()}))
                    case _:
                        return rank, None
            return rank, found
    return 0, None


def _comparable(group: dict[str, Any]) -> dict[str, str]:
    values = {name: _value(value) for name, value in group.items() if name not in IMPLEMENTATION}
    return {name: value for name, value in values.items() if value is not None}


def _value(value: object) -> str | None:
    """The value in words; None if it is not compared."""
    if isinstance(value, torch.Tensor):
        compares = value.device.type == "cpu" and value.numel() == 1 and not _dtensor.is_dtensor(value)
        return _value(value.detach().item()) if compares else None
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, (int, float)):
        return f"{float(value):.12g}"
    if isinstance(value, (tuple, list)):
        values = [_value(each) for each in value]
        return f"({', '.join(each for each in values if each is not None)})" if None not in values else None
    return None
