"""Walks over a tree of modules: the units inside, the modules and the parameters of one unit, ignored modules."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import nn

from ...api import Config
from ...errors import ConfigValueError
from ..base.fqns import WRAPPED, fqn
from ..flat.param_refs import ParamRef, unlist
from ..runtime.module_tree import faced_refs, units_at
from ..runtime.unit import Unit

# Ignored by wrapping: the attributes of a module with ignored parameters; None for an ignored module with all that it
# will hold. Parameters in no unit and not here were registered later.
_ignored: weakref.WeakKeyDictionary[nn.Module, frozenset[str] | None] = weakref.WeakKeyDictionary()

# Recursive functions are at module level: a nested one would be in a reference cycle, with all modules that it has
# visited, until garbage collection.


def units_in(module: nn.Module) -> list[Unit]:
    """The units of wrapped modules inside `module`, children before parents."""
    found = list(_units_below(module, {id(module)}))
    return list(dict.fromkeys(reversed(found)))[::-1]  # one with several entries at the last


def units_inside(unit: Unit) -> list[Unit]:
    """The units nested in `unit`, children before parents."""
    found = [each for entry in unit.entries for each in units_in(entry) if each is not unit]
    return list(dict.fromkeys(found))


def _units_below(module: nn.Module, seen: set[int]) -> Iterator[Unit]:
    for child in module._modules.values():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            yield from _units_below(child, seen)
    yield from units_at(module)


def with_owning_units(units: Sequence[Unit]) -> list[Unit]:
    """`units`, preceded by the owners of tied parameters that they hold."""
    return list(dict.fromkeys([owning_unit for unit in units for owning_unit in unit.owning_units] + list(units)))


def ignored_of(module: nn.Module, config: Config) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Ignored modules and parameters, including all inside of ignored modules."""
    modules: set[nn.Module] = set()
    for ignored in config.ignored_modules:
        for inside in ignored.modules():
            for unit in units_at(inside):
                raise ConfigValueError(
                    f"ignored_modules: {unit.entries.class_name} is already "
                    "wrapped by FullyShardedDataParallel, and sharded; pass the modules to ignore unwrapped"
                )
        modules.update(ignored.modules())
    params = set(config.ignored_params)
    for each in modules:
        params.update(p for p in each._parameters.values() if p is not None)
    return modules, params


def param_refs_of(module: nn.Module, ignored: set[nn.Module]) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, attribute, path) of every parameter registered in `module` outside nested units and ignored modules."""
    for prefix, inside in modules_of(module, ignored):
        for attribute, parameter in inside._parameters.items():
            if parameter is not None:
                yield inside, attribute, fqn(prefix, attribute)


def register_leaves(unit: Unit) -> None:
    """Let modules of `unit` list the leaves themselves, until `put_at_rest`."""
    unlist(unit.flat_refs)
    for param_ref, face in faced_refs(unit):
        face.list_whole(param_ref)


def leaves_of(param_refs: Iterable[ParamRef]) -> list[tuple[nn.Parameter, str]]:
    """Each leaf once, with its first path."""
    first: dict[int, tuple[nn.Parameter, str]] = {}
    for param_ref in param_refs:
        first.setdefault(id(param_ref.leaf), (param_ref.leaf, param_ref.path))
    return list(first.values())


def names_of_leaves(units: Iterable[Unit]) -> dict[int, str]:
    """The path of every parameter of `units` in their model, by the ids of its leaf and its holder."""
    return {
        id(parameter): unit.entries.fqn(spec.name)
        for unit in units
        for handle in unit.handles
        for index, spec in enumerate(handle.layout.params)
        for parameter in handle.face.objects_of(index)
    }


def modules_of(module: nn.Module, ignored: set[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules of `module` outside nested units and ignored modules, with their paths."""
    found: dict[nn.Module, str] = {}
    waiting = [("", module)]
    while waiting:
        path, each = waiting.pop()
        if each not in found and each not in ignored and not units_at(each):
            found[each] = path
            children = [(fqn(path, name), child) for name, child in each._modules.items() if child is not None]
            waiting += reversed(children)
    return [(path, each) for each, path in found.items()]


def ignore(module: nn.Module, attributes: Collection[str] | None) -> None:
    """Record that wrapping ignores these parameters of `module`, or, for None, the module itself."""
    _ignored[module] = None if attributes is None else frozenset(attributes)


def ignored_in(module: nn.Module) -> list[tuple[nn.Module, frozenset[str] | None]]:
    """The ignored modules and parameters in `module`, as arguments of `ignore`."""
    return [(each, _ignored[each]) for each in module.modules() if each in _ignored]


def unmanaged_parameters(module: nn.Module, units: Collection[Unit]) -> dict[str, nn.Parameter]:
    """The parameters in `module`, by their paths, that none of its `units` holds and wrapping did not ignore.

    Wrappers of other units are skipped: they are models of their own.
    """
    held = {
        (id(param_ref.module), param_ref.attribute)
        for unit in units
        for param_ref in (*unit.param_refs, *unit.shared_refs)
    }
    flat = {id(handle.flat_param) for unit in units for handle in unit.handles}
    found: dict[str, nn.Parameter] = {}
    own, seen = set(units), set[int]()
    waiting = [("", module)]
    while waiting:
        path, module = waiting.pop()
        ignored: frozenset[str] | None = _ignored.get(module, frozenset())
        if id(module) in seen or not own.issuperset(units_at(module)) or ignored is None:
            continue
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            known = name in ignored or (id(module), name) in held or id(parameter) in flat
            if parameter is not None and not known:
                found[fqn(path, name)] = parameter
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        waiting += [(path if name == WRAPPED else fqn(path, name), child) for name, child in reversed(children)]
    return found
