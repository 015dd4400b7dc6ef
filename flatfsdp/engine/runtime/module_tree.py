"""Units in a tree of modules: which is around which, and the parameters that modules list between iterations."""

from __future__ import annotations

from torch import nn

from ..config.arguments import has_forward
from ..flat.faces import Face
from ..flat.param_refs import ParamRef
from .unit import Unit


def nesting(outermost: Unit) -> list[tuple[Unit, Unit | None]]:
    """Every unit of a model with the one around it, in the order of registration, outer units first."""
    found: dict[Unit, Unit | None] = {outermost: None}
    seen: set[int] = set()
    waiting = [(child, outermost) for entry in outermost.entries for child in entry._modules.values()][::-1]
    while waiting:
        module, around = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            for unit in units_at(module):
                found.setdefault(unit, around)
                around = unit
            waiting += [(child, around) for child in reversed(module._modules.values())]
    return list(found.items())


def entries(outermost: Unit) -> frozenset[Unit]:
    """The units of a model whose forward is called from outside: those without an enclosing unit with a forward."""
    found: set[Unit] = set()
    never_called: set[Unit | None] = {None}
    for unit, around in nesting(outermost):
        if around in never_called:
            (found if any(map(has_forward, unit.entries)) else never_called).add(unit)
    return frozenset(found)


def units_at(module: nn.Module) -> list[Unit]:
    """The unit of `module`, if that is a wrapper or an entry in place."""
    unit = module.__dict__.get("_unit")
    return [unit] if isinstance(unit, Unit) else []


def faced_refs(unit: Unit) -> list[tuple[ParamRef, Face]]:
    """The places in which modules of `unit` hold parameters, each with the face that sets its parameter at rest."""
    units = (unit, *unit.owning_units)
    faces = {id(leaf): handle.face for each in units for handle in each.handles for leaf in handle.leaves}
    return [(param_ref, faces[id(param_ref.leaf)]) for param_ref in (*unit.param_refs, *unit.shared_refs)]


def put_at_rest(unit: Unit) -> None:
    """Let modules of `unit` hold the parameters of their faces, and list flat parameters."""
    for param_ref, face in faced_refs(unit):
        face.put(param_ref)
    for handle, param_ref in zip(unit.handles, unit.flat_refs, strict=False):  # each handle has one, or none has
        handle.face.put(param_ref)
