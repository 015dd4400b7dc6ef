"""Walks over a tree of modules: the units inside, the modules and the parameters of one unit, what is left alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from .api import Config
from .errors import ConfigValueError
from .unit import Unit
from .views import Home

# Recursion over modules stands in functions of the module: one inside another holds itself, and what it has seen, until
# the garbage collector comes.


def units_in(module: nn.Module) -> list[Unit]:
    """The units of wrapped modules inside `module`, children before parents."""
    return list(_units_below(module, {id(module)}))


def _units_below(module: nn.Module, seen: set[int]) -> Iterator[Unit]:
    for child in module._modules.values():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            yield from _units_below(child, seen)
    unit = module.__dict__.get("_unit")
    if isinstance(unit, Unit):
        yield unit


def units_at(module: nn.Module) -> list[Unit]:
    """The unit whose wrapper `module` is, if it is one."""
    unit = module.__dict__.get("_unit")
    return [unit] if isinstance(unit, Unit) else []


def ignored_of(module: nn.Module, config: Config) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Modules and parameters to leave alone, with everything inside ignored modules."""
    modules: set[nn.Module] = set()
    for ignored in config.ignored_modules:
        for inside in ignored.modules():
            if isinstance(inside.__dict__.get("_unit"), Unit):
                raise ConfigValueError(
                    f"ignored_modules: {type(inside.__dict__['_unit'].module).__name__} is wrapped by "
                    "FullyShardedDataParallel already, and sharded; give the modules to ignore unwrapped"
                )
        modules.update(ignored.modules())
    params = set(config.ignored_params)
    for each in modules:
        params.update(p for p in each._parameters.values() if p is not None)
    return modules, params


def homes_of(module: nn.Module, ignored: set[nn.Module]) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, attribute, path) of every parameter registered in `module` outside nested units and ignored modules."""
    for prefix, holder in modules_of(module, ignored):
        for attribute, parameter in holder._parameters.items():
            if parameter is not None:
                yield holder, attribute, f"{prefix}.{attribute}" if prefix else attribute


def leaves_of(homes: Iterable[Home]) -> list[tuple[nn.Parameter, str]]:
    """Each leaf once, with its first path."""
    first: dict[int, tuple[nn.Parameter, str]] = {}
    for home in homes:
        first.setdefault(id(home.leaf), (home.leaf, home.path))
    return list(first.values())


def modules_of(module: nn.Module, ignored: set[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules of `module` outside nested units and ignored modules, with their paths."""
    return list(_modules_below(module, "", ignored, set()))


def _modules_below(
    module: nn.Module, path: str, ignored: set[nn.Module], seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen or module in ignored or isinstance(module.__dict__.get("_unit"), Unit):
        return
    seen.add(id(module))
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules_below(child, f"{path}.{name}" if path else name, ignored, seen)
