"""Selection of units among submodules: by a path or a class, or as the repeated blocks of the model.

[Note: repeated blocks] Repeated modules stand in lists (`nn.ModuleList`, `nn.Sequential`) of modules of one class. Only
the outermost lists count: experts or heads listed in a block are parts of it. Two kinds of lists are lists of lists,
whose members are searched instead: a list of `nn.Sequential`s of whole modules, and a list with one member of more than
half its size, such as the stages of a pyramid. A model of transformers names its repeated classes in
`_no_split_modules`.
"""

from __future__ import annotations

import difflib
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from flatfsdp.errors import ConfigValueError, refuse_type, refuse_value
from flatfsdp.trainer.process_group import warn_for_all
from flatfsdp.trainer.terminal import size_in_words
from flatfsdp.wrap import CustomPolicy

AUTO, NONE = "auto", "none"
ACCEPTED = (
    "'auto', 'none', the path of a list of layers ('model.layers') or of one module, the name of a class, several of "
    "these in a list, or an auto_wrap_policy"
)
_SMALL = 0.02  # the share of a model below which blocks of another class than the largest stay with the root

Modules = dict[str, nn.Module]


def policy_for(model: nn.Module, units: Any, *, fallback: bool = False, param_dtype: torch.dtype | None = None) -> Any:
    """The `auto_wrap_policy` of `FullyShardedDataParallel` for this instance of `model`; None for a single unit.

    Args:
        model: before it is wrapped.
        units: "auto" for the blocks that the model repeats, "none" for a single unit; a path to a container, whose
            children become units, or to another module, which becomes one; the name of a class; several of these; or a
            module class, a set of classes, or a policy.
        fallback: leave out names of nothing, with a warning; the whole model is one unit if no name is left.
        param_dtype: the dtype in which units compute; only for the bytes in messages.

    Raises:
        ConfigTypeError, ConfigValueError: for anything else; a path or a class that names nothing, without `fallback`.

    Rank 0 warns, with the memory cost, if the model becomes a single unit because no other was found.
    """
    if units is None or units == NONE:
        return None
    if _is_policy(units):
        policy = frozenset({units}) if isinstance(units, type) else units
        if isinstance(policy, (set, frozenset)) and not _of_class(model, lambda kind: kind in policy):
            _complain(model, sorted(policy, key=str), alone=True, fallback=fallback, param_dtype=param_dtype)
            return None
        return policy
    chosen = unit_modules(model, units, fallback=fallback, param_dtype=param_dtype)
    ids = {id(module) for module in chosen.values()}
    return CustomPolicy(lambda module: id(module) in ids) if ids else None


def unit_modules(
    model: nn.Module, units: Any, *, fallback: bool = False, param_dtype: torch.dtype | None = None
) -> Modules:
    """The modules of `model` that `units` names, by path, as in `policy_for`; with the same warnings.

    Raises:
        ConfigTypeError, ConfigValueError: `units` is no name nor a list of names, or a policy; or, without `fallback`,
            one of them names nothing.
    """
    named = isinstance(units, (list, tuple))
    chosen: Modules = {}
    missing = []
    for each in units if named else [units]:
        if isinstance(each, type) and issubclass(each, nn.Module):
            found = _of_class(model, partial(operator.is_, each))
        elif not isinstance(each, str):
            refuse_type("units", each, ACCEPTED)
        elif not each or (named and each == NONE):
            refuse_value("units", each, ACCEPTED)
        elif each == NONE:
            continue
        else:
            found = repeated_blocks(model) if each == AUTO else _named(model, each)
        chosen.update(found)
        if not found:
            missing.append(each)
    if missing:
        _complain(model, missing, alone=not chosen, fallback=fallback, param_dtype=param_dtype)
    return chosen


def repeated_blocks(model: nn.Module) -> Modules:
    """The repeated blocks of `model` that share no parameter with the rest of the model, by path.

    [Note: repeated blocks]
    """
    found = _named_by_transformers(model) or _largest(_lists(model, "", {model}))
    return _without_ties(model, found)


def _is_policy(units: Any) -> bool:
    if isinstance(units, type):
        return issubclass(units, nn.Module)
    is_set = isinstance(units, (set, frozenset)) and all(isinstance(each, type) for each in units)
    return is_set or callable(units) or hasattr(units, "_run_policy")


# --- names ------------------------------------------------------------------------------------------------------------


def _named(model: nn.Module, name: str) -> Modules:
    module = dict(model.named_modules()).get(name)
    if module is not None:
        return dict(_inside(module, name)) if _is_list(module) else _with_parameters({name: module})
    return _of_class(model, lambda kind: getattr(kind, "__name__", None) == name)


def _inside(container: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The members of a container, and those of inner containers without a forward."""
    for name, member in container.named_children():
        if not has_forward(member):
            yield from _inside(member, f"{path}.{name}")
        elif next(member.parameters(), None) is not None:
            yield f"{path}.{name}", member


def _of_class(model: nn.Module, is_meant: Callable[[type], bool]) -> Modules:
    return _with_parameters(
        {
            path: module
            for path, module in model.named_modules()
            if module is not model and has_forward(module) and any(map(is_meant, type(module).__mro__))
        }
    )


def _with_parameters(modules: Mapping[str, nn.Module]) -> Modules:
    return {path: module for path, module in modules.items() if next(module.parameters(), None) is not None}


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called, which lists of modules cannot."""
    return type(module).forward is not nn.Module.forward


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) or not has_forward(module)


# --- repeated blocks --------------------------------------------------------------------------------------------------


def _named_by_transformers(model: nn.Module) -> Modules:
    names: set[str] = set()
    for module in model.modules():
        named = getattr(module, "_no_split_modules", None)
        names.update(named if isinstance(named, (list, tuple, set, frozenset)) else ())
    found: Modules = {}
    covered: set[nn.Module] = {model}
    for path, module in model.named_modules():  # parents first
        if module not in covered and type(module).__name__ in names:
            covered.update(module.modules())
            found[path] = module
    return _with_parameters(found)


def _lists(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[Modules]:
    """The outermost groups of modules of one class in one list."""
    children = {
        (f"{path}.{name}" if path else name): child
        for name, child in module.named_children()
        if child not in seen and next(child.parameters(), None) is not None
    }
    seen.update(children.values())
    kinds = Counter(type(child) for child in children.values())
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    groups: dict[type[nn.Module], Modules] = {}
    for name, child in children.items():
        if is_list and kinds[type(child)] > 1 and has_forward(child):
            groups.setdefault(type(child), {})[name] = child
        else:
            yield from _lists(child, name, seen)
    for group in groups.values():
        inner = [each for name, member in group.items() for each in _lists(member, name, set(seen))]
        yield from inner if _is_list_of_lists(group, inner) else [group]


def _is_list_of_lists(group: Modules, inner: Collection[Modules]) -> bool:
    if not inner:
        return False
    if all(_is_sequence_of_whole_modules(member) for member in group.values()):
        return True
    whole = _numel(group.values())
    return max(_numel([member]) for member in group.values()) > whole / 2 and sum(map(_size, inner)) > whole / 2


def _is_sequence_of_whole_modules(module: nn.Module) -> bool:
    inside = [child for child in module.children() if next(child.parameters(), None) is not None]
    return type(module) is nn.Sequential and all(next(child.children(), None) is not None for child in inside)


def _largest(groups: Iterable[Modules]) -> Modules:
    """The largest group, those of its class, and others that are large enough for separate units."""
    found = list(groups)
    if not found:
        return {}
    whole = max(found, key=_size)
    kind, least = type(next(iter(whole.values()))), _SMALL * _size(whole)
    kept = [group for group in found if type(next(iter(group.values()))) is kind or _size(group) >= least]
    return {path: module for group in kept for path, module in group.items()}


def _without_ties(model: nn.Module, modules: Modules) -> Modules:
    """Those of `modules` that share no parameter with a module outside of them: that would be gathered for both."""
    homes = _homes(model)
    return {path: each for path, each in modules.items() if all(homes[key] == n for key, n in _homes(each).items())}


def _homes(module: nn.Module) -> Counter[int]:
    """The number of inner modules that have each parameter, by its id."""
    return Counter(id(parameter) for each in module.modules() for parameter in each.parameters(recurse=False))


def _size(group: Modules) -> int:
    return _numel(group.values())


def _numel(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


# --- warnings ---------------------------------------------------------------------------------------------------------


def _complain(
    model: nn.Module, missing: Sequence[Any], *, alone: bool, fallback: bool, param_dtype: torch.dtype | None
) -> None:
    """Raise for names without modules, or warn if `fallback`; "auto" may find nothing."""
    kind = type(model).__name__
    absent = [_absence(model, each) for each in missing]
    if not fallback and any(each != AUTO for each in missing):
        whole = size_in_words(_bytes([model], param_dtype))
        one = f"units_fallback=True makes {kind} a single unit, all of it ({whole}) gathered at once on every rank"
        raise ConfigValueError(f"units: {'; '.join(absent)}. {one}")
    words = f"units: {'; '.join(absent)}"
    if not alone:
        warn_for_all(f"{words}. It is ignored; the other units that were named are used")
        return
    whole = size_in_words(_bytes([model], param_dtype))
    blocks = {} if AUTO in missing else repeated_blocks(model)
    instead = "Name its units by path or class, or pass units='none' if this is intentional"
    if blocks:
        largest = max(_bytes([block], param_dtype) for block in blocks.values())
        rest = _bytes([model], param_dtype) - _bytes(blocks.values(), param_dtype)
        path, block = next(iter(blocks.items()))
        instead = (
            f"units='auto' would make {len(blocks)} units of it ({path!r}, a {type(block).__name__}, and others like "
            f"it), the largest of {size_in_words(largest)}, and leave {size_in_words(rest)} to the root unit"
        )
    warn_for_all(
        f"{words}. The model becomes a single unit: all of it, {whole}, is gathered at once on every rank. {instead}"
    )


def _absence(model: nn.Module, units: Any) -> str:
    kind = type(model).__name__
    if units == AUTO:
        return f"'auto' finds no list of modules of the same class with parameters in {kind}"
    name = units if isinstance(units, str) else units.__name__
    near = _nearest(model, name)
    nearest = f" (nearest: {', '.join(map(repr, near))})" if near else ""
    return f"{name!r} is neither a submodule of {kind} with parameters nor the class of one{nearest}"


def _nearest(model: nn.Module, name: str) -> list[str]:
    paths = [path for path, _ in model.named_modules() if not path.rpartition(".")[2].isdigit() and path]
    ends = [path for path in paths if path.endswith(f".{name}")]
    classes = {type(module).__name__ for module in model.modules() if module is not model}
    return (ends or difflib.get_close_matches(name, [*paths, *sorted(classes)], n=3))[:3]


def _bytes(modules: Iterable[nn.Module], dtype: torch.dtype | None) -> int:
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return sum(
        each.numel() * (dtype.itemsize if dtype is not None and each.is_floating_point() else each.itemsize)
        for each in parameters
    )
