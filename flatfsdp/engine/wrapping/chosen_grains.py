"""From the argument `layout=` to the grain of each parameter, by the place where a module holds it, and to the layouts
of units.

Names are resolved once, from the outermost module, before modules inside become units with names of their own and
parameters on the meta device are replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...api import Config
from ...errors import ConfigValueError, UsageError, did_you_mean, few, refuse_type, warn_once
from ..base.fqns import clean, fqn
from ..base.overrides import is_memoryless
from ..features.optimizer_grains import for_optimizer, is_optimizer
from ..layout.layout import ParamSpec, Span
from ..models.param_registry import owner_of
from ..models.walks import ignored_of
from ..planning.grains import BUDGET, Blocks, Elements, Grain, Preferred, Rows, Whole, declared
from ..planning.owners import parts_of
from ..planning.plan import cheaper, cost_of, plan
from ..planning.planned import PlannedLayout

_GRAINS = (Elements, Rows, Blocks, Whole, Preferred)


class ChosenGrains(dict[tuple[nn.Module, str], Grain]):
    """The grains of parameters by their places, (module, attribute); parameters without one are cut anywhere.

    Attributes:
        loads: the costs of whole parameters in the units that were made so far, of each rank; by these ranks.
    """

    def __init__(self, grains: Mapping[tuple[nn.Module, str], Grain] | None = None) -> None:
        super().__init__(grains or {})
        self.loads: dict[tuple[int, ...], list[int]] = {}


def chosen_grains(module: nn.Module, config: Config) -> Any:
    """The layout in `config`; a mapping or function as the grains of parameters in `module`.

    Raises:
        ConfigTypeError, ConfigValueError: a key that is no name of a parameter or module, a value that is no grain, or
            different grains for one parameter.
        UsageError: a parameter that is ignored, or that another unit has already sharded.
    """
    layout = config.layout
    if isinstance(layout, (str, ChosenGrains)):
        return layout
    if is_optimizer(layout):
        layout = for_optimizer(layout)
    modules, ignored = ignored_of(module, config)
    ignored = ignored.union(*(each.parameters() for each in modules))
    excluded = {
        parameter: "is ignored" if parameter in ignored else "is in a unit already"
        for parameter in module.parameters()
        if parameter in ignored or owner_of(parameter) is not None
    }
    rules = _rules(module, layout, excluded) if isinstance(layout, Mapping) else _answers(module, layout, excluded)
    ruled = [*rules]
    given = {parameter for parameter, _, _ in ruled}
    ruled += (each for each in _answers(module, declared, excluded) if each[0] not in given)
    known: dict[nn.Parameter, tuple[Grain, str]] = {}
    for parameter, grain, source in ruled:
        if not isinstance(grain, _GRAINS):
            accepted = "Elements(), Rows(), Blocks(), Whole(), or Preferred() of flatfsdp.layout"
            refuse_type(source, grain, accepted)
        before, other = known.setdefault(parameter, (grain, source))
        if before != grain:
            raise ConfigValueError(
                f"{other} and {source} are for the same parameter, but give it different grains, {before} and {grain}. "
                "Accepted: one grain for a parameter, also where modules share it."
            )
    found = {(inside, name): known[p][0] for inside, name, _, p in _places(module) if p in known}
    return ChosenGrains(found)


def plan_unit(
    params: Iterable[ParamSpec],
    *,
    world: int,
    align: int,
    grains: Mapping[str, Grain],
    loads: list[int],
    itemsize: int,
    device: torch.device,
) -> PlannedLayout:
    """The layout of a unit's parameters of one kind, with `itemsize` bytes for an element, on `device`. Their costs are
    added to `loads`.

    Raises:
        ConfigValueError: `Whole()` of some adds much padding, or needs more memory than the device has.
    """
    params = tuple(params)
    layout = plan(params, grains, world=world, align=align, loads=loads)
    subject = f"layout: of a unit of {few([param.name for param in params])}, "
    wholes = {name: grain for name, grain in grains.items() if isinstance(grain, Whole)}
    others = {name: grain for name, grain in grains.items() if name not in wholes}
    rest = layout
    if wholes and world > 1:
        rest = plan(params, others, world=world, align=align)
        added = layout.padding - rest.padding
        total, most = sum(param.numel for param in params), min(grain.padding for grain in wholes.values())
        size, memory = layout.shard_numel * itemsize, memory_of(device)
        if added > most * total:
            words = f"{cheaper(layout, grains, budget=min(most, BUDGET))}"
        elif memory is not None and size > memory:
            words = f"a shard has {size:,} bytes, more than the memory of {device}, {memory:,}"
        else:
            words = ""
        if words:
            raise ConfigValueError(
                f"{subject}Whole() is refused for {few([*wholes])}: {words}. Preferred(Whole()) cuts what does not fit,"
                " and matrix_steps exchanges that; Whole(padding=...) permits more padding"
            )
    if words := cheaper(rest, others) or "":
        warn_once(words, subject + words)
    for index, param in enumerate(layout.params):
        if param.name not in layout.given_up and (cost := cost_of(param, grains.get(param.name))):
            loads[min(parts_of(layout, index, Span(0, param.numel)))] += cost
    return layout


def memory_of(device: torch.device) -> int | None:
    """The bytes of all memory of `device`; None where that is not known."""
    if is_memoryless() or device.type == "meta":
        return None
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if properties is None else getattr(properties(device), "total_memory", None)


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """(module, attribute, path, parameter) of every place; a shared module's occur for each of its paths."""
    for path, inside in module.named_modules(remove_duplicate=False):
        for attribute, parameter in inside._parameters.items():
            if parameter is not None:
                yield inside, attribute, clean(fqn(path, attribute)), parameter


def _rules(
    module: nn.Module, layout: Mapping[Any, Any], excluded: Mapping[nn.Parameter, str]
) -> Iterator[tuple[nn.Parameter, Any, str]]:
    places = list(_places(module))
    modules = {clean(path): inside for path, inside in module.named_modules(remove_duplicate=False)}
    parameters = {path: parameter for _, _, path, parameter in places}
    for key, grain in layout.items():
        source = f"layout[{key!r}]" if isinstance(key, str) else f"layout[{type(key).__name__}]"
        if isinstance(key, str) and key in parameters:
            if parameters[key] in excluded:
                raise UsageError(
                    f"{source}: this parameter {excluded[parameters[key]]}. Give grains only to parameters that this "
                    "call shards, and those of units inside where these are wrapped."
                )
            yield parameters[key], grain, source
            continue
        inside = modules.get(key) if isinstance(key, str) else key
        if not isinstance(inside, nn.Module):
            if not isinstance(key, str):
                refuse_type("a key of layout", key, "the name of a parameter or of a module, or a module")
            hint = did_you_mean(key, [*parameters, *modules])
            raise ConfigValueError(
                f"{source}: {type(module).__name__} has no parameter or module of that name.{hint and ' ' + hint}"
            )
        held = {parameter for _, _, _, parameter in _places(inside) if parameter not in excluded}
        mine = [parameter for parameter in parameters.values() if parameter in held]
        if not mine:
            raise ConfigValueError(f"{source}: that module holds no parameters in {type(module).__name__} to shard.")
        yield from ((parameter, grain, source) for parameter in dict.fromkeys(mine))


def _answers(
    module: nn.Module, layout: Any, excluded: Mapping[nn.Parameter, str]
) -> Iterator[tuple[nn.Parameter, Any, str]]:
    for _, _, path, parameter in _places(module):
        if parameter not in excluded and (grain := layout(path, parameter)) is not None:
            yield parameter, grain, f"layout({path!r}, ...)"
