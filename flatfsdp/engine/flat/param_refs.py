"""The places where modules hold parameters.

[Note: parameter references] A *reference* is a (module, attribute) under which a parameter is registered. Tied
parameters have several, perhaps in modules of other units.

[Note: listing] Modules of a flat parameter have its leaves at any time, and list them, by `parameters()`, only while
these compute; the module inside the wrapper lists the flat parameter at other times ([Note: faces]). A step would have
to move each leaf four times. So it moves none: the dictionaries of these modules' parameters know what to list.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..base import _torch


class Listed:
    """The choice between a flat parameter and its leaves, of which modules list one. [Note: listing]

    Attributes:
        leaves: whether they list the leaves.
    """

    __slots__ = ("leaves",)

    def __init__(self) -> None:
        self.leaves = False


class Listing(dict[str, "nn.Parameter | None"]):
    """The parameters of a module, all of which are found by their names, and those of a flat parameter are listed only
    in their time; an object that other code has put in the place of one is listed. [Note: listing]

    Attributes:
        managed: by name, the choice, whether the parameter is a leaf, and the parameter.
    """

    def __init__(self, parameters: dict[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.managed: dict[str, tuple[Listed, bool, nn.Parameter]] = {}

    def _listed(self) -> dict[str, nn.Parameter | None]:
        found = dict(super().items())
        for name, (listed, with_leaves, parameter) in self.managed.items():
            if listed.leaves is not with_leaves and found.get(name) is parameter:
                del found[name]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._listed())

    def keys(self) -> Any:
        return self._listed().keys()

    def values(self) -> Any:
        return self._listed().values()

    def items(self) -> Any:
        return self._listed().items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles list the same."""
        items = dict(dict.items(self))
        kept = [(name, *each) for name, each in self.managed.items() if items.get(name) is each[2]]
        return _copied, (items, [(name, listed.leaves, with_leaves) for name, listed, with_leaves, _ in kept])


def _copied(items: dict[str, nn.Parameter | None], managed: list[tuple[str, bool, bool]]) -> Listing:
    made = Listing(items)
    for name, lists_leaves, with_leaves in managed:
        listed, parameter = Listed(), items[name]
        listed.leaves = lists_leaves
        assert parameter is not None
        made.managed[name] = listed, with_leaves, parameter
    return made


class ParamRef:
    """A place where a module holds a parameter: `module.attribute`, `path` from the unit's module.

    It does not keep the module alive: a module may own its unit, which owns the references.

    Attributes:
        leaf: the parameter.
        held: the parameter that the module must hold there now: the leaf, or its replacement at rest. Several places
            may have it in one list, which changes for all of them at once (`hold_in`).
        keeps_place: the module lists a parameter there at rest; its position among the parameters is kept meanwhile.
    """

    __slots__ = ("_held", "_number", "attribute", "keeps_place", "leaf", "module_ref", "path")

    def __init__(self, module: nn.Module, attribute: str, path: str, leaf: nn.Parameter) -> None:
        self.module_ref: Callable[[], nn.Module | None] = weakref.ref(module)
        self.attribute = attribute
        self.path = path
        self.leaf = leaf
        self._held, self._number = [leaf], 0
        self.keeps_place = False

    def hold_in(self, held: list[nn.Parameter], number: int) -> None:
        """From now on, the module must hold the current element `number` of `held`."""
        self._held, self._number = held, number

    @property
    def held(self) -> nn.Parameter:
        return self._held[self._number]

    @held.setter
    def held(self, parameter: nn.Parameter) -> None:
        self._held[self._number] = parameter

    @property
    def module(self) -> nn.Module:
        """The module that holds the parameter; a substitute once a user has deleted the module."""
        module = self.module_ref()
        if module is None:
            module = nn.Module()
            module._parameters[self.attribute] = self.held
            self.module_ref = partial(_itself, module)
        return module

    def of(self, leaf: nn.Parameter) -> ParamRef:
        """A reference to another parameter in the same place."""
        return ParamRef(self.module, self.attribute, self.path, leaf)

    @property
    def current(self) -> object:
        """The object that the module has under the attribute now; None if it was deleted."""
        if (module := self.module_ref()) is None:
            return None
        return module.__dict__.get(self.attribute, module._parameters.get(self.attribute))

    @staticmethod
    def changed(param_refs: Iterable[ParamRef]) -> list[ParamRef]:
        """Those of `param_refs` whose modules hold another object than they should."""
        suspects, last, module = [], None, None
        for param_ref in param_refs:  # once for every parameter and step
            if param_ref.module_ref is not last:  # those of one module follow each other
                last = param_ref.module_ref
                if (module := last()) is not None:
                    values = module.__dict__
                    parameters = values["_parameters"]
            if module is not None:
                held, attribute = param_ref._held[param_ref._number], param_ref.attribute
                if values.get(attribute, parameters.get(attribute)) is not held:
                    suspects.append(param_ref)
        return suspects and [param_ref for param_ref in suspects if param_ref.current is not param_ref.held]

    def register(self) -> None:
        """Let the module list the leaf among its parameters."""
        if (module := self.module_ref()) is not None:
            if isinstance(module._parameters, Listing):
                module._parameters.managed.pop(self.attribute, None)
            module.__dict__.pop(self.attribute, None)
            module._parameters[self.attribute] = self._held[self._number] = self.leaf

    def register_for(self, listed: Listed, *, with_leaves: bool) -> None:
        """Let the module have the leaf among its parameters, and list it with leaves, or with the flat parameter."""
        if (module := self.module_ref()) is not None:
            parameters = module._parameters
            if not isinstance(parameters, Listing):
                parameters = module.__dict__["_parameters"] = Listing(parameters)
            module.__dict__.pop(self.attribute, None)  # what was seen in its place
            parameters.managed[self.attribute] = listed, with_leaves, self.leaf
            parameters[self.attribute] = self._held[self._number] = self.leaf
            self.keeps_place = True

    def hold(self, parameter: nn.Parameter | None) -> None:
        """Let the module, if it exists, list `parameter` in this place: the leaf or its replacement at rest; for a
        moment also None."""
        module = self.module_ref()
        if module is None:
            return
        module.__dict__.pop(self.attribute, None)
        if type(module).__setattr__ is not nn.Module.__setattr__:
            # A recurrent module also has its weights in lists. One that refuses attributes has no list to update.
            with contextlib.suppress(Exception):
                setattr(module, self.attribute, parameter)
            if isinstance(module, nn.RNNBase):
                # Forwards meet leaves only, and a reference to a holder, even a weak one, forbids to swap it.
                _torch.expect_weight(module, self.attribute, parameter if parameter is self.leaf else None)
        module._parameters[self.attribute] = parameter
        if parameter is not None:
            self.held = parameter

    def unregister(self) -> None:
        """Keep the leaf as a plain attribute that `parameters()` does not list."""
        self.assign(self.leaf)
        self._held[self._number] = self.leaf

    def assign(self, value: torch.Tensor) -> None:
        """Let the module have `value` as a plain attribute in the parameter's place."""
        if (module := self.module_ref()) is None:
            return
        if self.keeps_place:
            module._parameters[self.attribute] = None
        else:
            module._parameters.pop(self.attribute, None)
        module.__dict__[self.attribute] = value


def flat_name(kind: int) -> str:
    """The name under which the flat parameter of a unit's handle is listed."""
    return f"_flat_param_{kind}" if kind else "_flat_param"


def enlist(param_refs: Iterable[ParamRef], *, listed: bool = True) -> list[ParamRef]:
    """Let modules list the plain attributes in these places as parameters, or the reverse if not `listed`. Returns the
    places that changed. A place where users have put another object is left unchanged."""
    moved = list[ParamRef]()
    for each in param_refs:
        if (module := each.module_ref()) is None:
            continue
        source, target = (vars(module), module._parameters) if listed else (module._parameters, vars(module))
        if source.get(each.attribute) is each.leaf:
            target[each.attribute] = source.pop(each.attribute)
            moved.append(each)
    return moved


unlist = partial(enlist, listed=False)


def _itself(module: nn.Module) -> nn.Module:
    return module
