"""What each rank owns of a model whose modules hold their units in place. Their state dicts are plain ones, of
DTensors, which know neither the layout of shards nor which of several ranks saves what."""

from __future__ import annotations

import torch
from torch import nn

from ...runtime.module_tree import units_in
from ...runtime.rest import check_idle, quiesce
from ..named_param import NamedParam, named_state
from ..owned_interval import OwnedInterval


def params_held_in_place(model: nn.Module) -> dict[str, NamedParam]:
    """By each of its names, every parameter of `model` in a unit without a wrapper; the shards have what users put in
    the place of parameters. No communication.

    Raises:
        UsageError: a unit computes, or has its parameters whole in `summon_full_params()`.
    """
    units = [unit for unit in units_in(model) if unit.entries.in_place]
    if not units:
        return {}
    quiesce(units, collective=False, check=lambda unit: check_idle(unit, "state_dict()"))
    named = (each for each in named_state(model) if each.unit is not None and each.unit.entries.in_place)
    return {name: each for each in named for name in each.names}


def as_held(named: NamedParam, owned: OwnedInterval) -> torch.Tensor:
    """`owned`, what this rank owns of a parameter, as modules hold it, for `load_state_dict()`."""
    handle = named.handle
    home = handle.shard.device
    if home.type == "meta":
        home = torch.device("cpu") if handle.options.offload else handle.device
    return handle.face.like_holder((named.index,), owned.local.to(home))
