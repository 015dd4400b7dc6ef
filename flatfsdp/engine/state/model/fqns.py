"""The names under which state dicts know parameters: those of the model as it was before anything wrapped it.

[Note: clean names] A path through the model without the attributes under which wrappers hold what they wrap: ours,
torch's checkpoint_wrapper and torch.compile's. A parameter that several modules hold has several names, the first of
which, in the order of `modules()`, is the one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ...runtime.module_tree import units_in
from ...runtime.unit import Unit

WRAPPED = "_fsdp_wrapped_module"
_TRANSPARENT = frozenset({WRAPPED, "_checkpoint_wrapped_module", "_orig_mod"})


@dataclass(frozen=True)
class NamedParam:
    """A parameter of a model.

    Attributes:
        name: its first clean name; `names`: all of them.
        unit: the unit that owns it; None outside of every unit (ignored, or not wrapped).
        kind, index: it is leaf number `index` of `unit.handles[kind]`; 0 without a unit.
        leaf: the user's parameter, which shows a shard of itself at rest if it is in a unit.
    """

    name: str
    names: tuple[str, ...]
    unit: Unit | None
    kind: int
    index: int
    leaf: nn.Parameter


def clean(name: str) -> str:
    """`name`, a path of attributes, without those of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _TRANSPARENT)


def clean_text(text: str) -> str:
    """`text`, in which there are paths, without the attributes of wrappers."""
    for part in _TRANSPARENT:
        text = text.replace(f"{part}.", "")
    return text


def named_state(module: nn.Module) -> list[NamedParam]:
    """Every parameter inside `module` once, units' own and others, in the order of its state dict. No communication."""
    units = units_in(module)
    places: dict[int, tuple[Unit | None, int, int]] = {
        id(leaf): (unit, kind, index)
        for unit in units
        for kind, handle in enumerate(unit.handles)
        for index, leaf in enumerate(handle.leaves)
    }
    held: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for unit in units:
        for param_ref in (*unit.param_refs, *unit.shared_refs):
            held.setdefault(id(param_ref.module), []).append((param_ref.attribute, param_ref.leaf))
    flat = {id(handle.flat_param) for unit in units for handle in unit.handles}
    names: dict[int, list[str]] = {}
    leaves: dict[int, nn.Parameter] = {}
    for path, inside in _modules(module, ""):
        own = dict(held.get(id(inside), ()))
        for attribute, parameter in inside._parameters.items():
            if parameter is not None and id(parameter) not in flat:
                own.setdefault(attribute, parameter)
        for attribute, leaf in own.items():
            leaves[id(leaf)] = leaf
            names.setdefault(id(leaf), []).append(f"{path}{attribute}")
    out = []
    for key, found in names.items():
        owning_unit, kind, index = places.get(key, (None, 0, 0))
        out.append(NamedParam(found[0], tuple(found), owning_unit, kind, index, leaves[key]))
    return out


def _modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """(clean path with a dot at its end, module) of all modules, several times if held several times, as state dicts
    walk."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, prefix if name in _TRANSPARENT else f"{prefix}{name}.")
