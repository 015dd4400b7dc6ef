"""From the argument `layout=` to the grain of each parameter, by the place where a module holds it.

Names are resolved once, from the outermost module, before modules inside become units with names of their own and
parameters on the meta device are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ...api import Config
from ...errors import ConfigValueError, UsageError, did_you_mean, refuse_type
from ..base.fqns import clean, fqn
from ..models.param_registry import owner_of
from ..models.walks import ignored_of
from ..planning.grains import Blocks, Elements, Grain, Rows, Whole

_GRAINS = (Elements, Rows, Blocks, Whole)


class ChosenGrains(dict[tuple[nn.Module, str], Grain]):
    """The grains of parameters by their places, (module, attribute); parameters without one are cut anywhere."""


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
    modules, ignored = ignored_of(module, config)
    ignored = ignored.union(*(each.parameters() for each in modules))
    excluded = {
        parameter: "is ignored" if parameter in ignored else "is in a unit already"
        for parameter in module.parameters()
        if parameter in ignored or owner_of(parameter) is not None
    }
    rules = _rules(module, layout, excluded) if isinstance(layout, Mapping) else _answers(module, layout, excluded)
    known: dict[nn.Parameter, tuple[Grain, str]] = {}
    for parameter, grain, source in rules:
        if not isinstance(grain, _GRAINS):
            refuse_type(source, grain, "Elements(), Rows(), Blocks(), or Whole() of flatfsdp.layout")
        before, other = known.setdefault(parameter, (grain, source))
        if before != grain:
            raise ConfigValueError(
                f"{other} and {source} are for the same parameter, but give it different grains, {before} and {grain}. "
                "Accepted: one grain for a parameter, also where modules share it."
            )
    return ChosenGrains({(inside, name): known[p][0] for inside, name, _, p in _places(module) if p in known})


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
