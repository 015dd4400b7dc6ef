"""The submodules that become units: the plan that follows from a policy, and its execution, all or nothing.

:func:`plan_wrapping` calls the policy once and returns data, children before parents; it changes nothing.
:func:`apply_plan` then replaces the modules, and returns a stack that undoes all replacements, so that a constructor
that fails halfway leaves the model unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from ...api import DEFAULT_PREFETCH, Config, MixedPrecision, ShardingStrategy
from ...errors import AgreementError, ConfigValueError, UsageError, few, logger, warn
from ...wrap import ModuleWrapPolicy, described
from ..agreement.process_groups import resolve_groups
from ..base._dtensor import local_bytes
from ..config.arguments import as_fsdp1, check_argument_names, check_arguments, has_forward
from ..device.streams import Device
from ..features.compaction import make_room_for_shards
from ..models.param_registry import disown
from ..models.walks import ignored_of, units_in
from ..runtime.unit import Unit
from ..state.full_params import unwrap
from .init_sync import agree_to_undo, meeting_axes
from .materialize import compute_device
from .shared_storage import follow_ties

PADDING = 1024  # bytes of a shard, at most, beside the parameters: to equal sizes on all ranks, and to whole blocks


def auto_wrapped(module: nn.Module, config: Config, make: Callable[..., nn.Module]) -> ExitStack:
    """Wrap the modules that `config.auto_wrap_policy` chooses inside `module`, by `make(child, config, island=...)`.

    Closing the result undoes it; `pop_all()` keeps it.
    """
    policy = config.auto_wrap_policy
    if policy is None:
        return ExitStack()
    ignored_modules, ignored_params = ignored_of(module, config)
    follow_ties(module, ignored_modules, ignored_params)  # across units, while all of them have their memory
    nested = config.replace(auto_wrap_policy=None)
    kwargs = {
        f.name: getattr(nested, f.name)
        for f in fields(nested)
        if f.name not in ("ignored_modules", "ignored_params", "names_prefetch")
    }
    if not config.names_prefetch:
        kwargs["backward_prefetch"] = DEFAULT_PREFETCH
    if config.device_mesh is not None:
        kwargs["process_group"] = None  # defined by the mesh, which units inherit
    plan = plan_wrapping(module, policy, kwargs=kwargs, ignored_modules=ignored_modules, ignored_params=ignored_params)
    islands = {id(planned.module) for planned in plan if planned.in_full_precision}
    made = _CreatedWrappers()
    if plan and not config.cpu_offload.offload_params:
        _make_room(module, config, ignored_params, units=len(plan) + 1)

    def wrap(child: nn.Module, **overrides: Any) -> nn.Module:
        changed = {name for name, value in overrides.items() if value is not kwargs.get(name)}
        if {"ignored_modules", "ignored_states"} & changed:
            raise ConfigValueError(
                "auto_wrap_policy: it sets ignored_modules or ignored_states for a single unit; pass them to the "
                "outermost wrapper, which passes them on to all units"
            )
        if "process_group" in changed:
            overrides["device_mesh"] = None
        checked = resolve_groups(as_fsdp1(check_arguments(child, **overrides), child)) if changed else nested
        own_config = checked.replace(ignored_modules=tuple(ignored_modules), ignored_params=tuple(ignored_params))
        return made.add(make(child, own_config, island=id(child) in islands))

    return apply_plan(plan, wrap, unmake=made.undo)


def _make_room(module: nn.Module, config: Config, ignored: Container[nn.Parameter], *, units: int) -> None:
    """Let the allocator have the memory of all shards in one piece, if none has been made before."""

    def count() -> int:
        if units_in(module):
            return 0
        group = config.process_group[0] if isinstance(config.process_group, tuple) else config.process_group
        ranks = 1 if config.sharding_strategy is ShardingStrategy.NO_SHARD else group.size()
        whole = sum(local_bytes(parameter) for parameter in module.parameters() if parameter not in ignored)
        return int(whole // ranks + units * PADDING)

    make_room_for_shards(Device(compute_device(module, config)), count)


class _CreatedWrappers:
    """The wrappers that one constructor has made."""

    def __init__(self) -> None:
        self._count = 0
        self._parted = False  # whether other ranks keep their wrappers

    def add(self, wrapper: nn.Module) -> nn.Module:
        """Count one more."""
        self._count += 1
        return wrapper

    def undo(self, wrapper: nn.Module) -> None:
        """Give the module of the last `wrapper` its whole parameters back. Collective over the unit's axes.

        Raises:
            AgreementError: other ranks did not fail, so their shards cannot be gathered.
        """
        unit: Unit = wrapper.__dict__["_unit"]
        disown(unit)
        count, self._count = self._count, self._count - 1
        if unit.groups.shard.size > 1:
            if self._parted:
                return
            try:
                agree_to_undo(count, meeting_axes(unit.groups, unit.resources.device), sys.exc_info()[1])
            except AgreementError:
                self._parted = True
                raise
        unwrap(unit)


# --- Plan, then execute ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedUnit:
    """One module that will become a unit."""

    path: str
    """Its path in the root, the first of its places."""
    module: nn.Module
    places: tuple[tuple[nn.Module, str], ...]
    """All its places, as (parent, attribute): a shared module is wrapped once and set everywhere."""
    kwargs: dict[str, Any]
    """The arguments of its wrapper."""
    in_full_precision: bool
    """Chosen (also) for its class, by `MixedPrecision._module_classes_to_ignore`: `kwargs["mixed_precision"]` is
    None, and its inputs must be cast up and its outputs back, since its neighbors compute in the param dtype."""


def is_managed(module: nn.Module) -> bool:
    """Whether `module` is wrapped already, by the mark that wrappers provide for other programs."""
    return getattr(module, "_is_fsdp_managed_module", False) is True


def plan_wrapping(
    root: nn.Module,
    policy: Any,
    *,
    kwargs: Mapping[str, Any],
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
) -> tuple[PlannedUnit, ...]:
    """The modules inside `root` that `policy` makes units: children before parents, each once, without `root`.

    A chosen module without a forward (a `ModuleList`) is skipped if all of its parameters lie in units inside.

    It differs from FSDP1 in cases where FSDP1 fails: a shared module has one wrapper in all its places, wrapped modules
    may be in the tree already (they are left unchanged), and a function's refusal to recurse holds under mixed
    precision as well.

    Args:
        policy: as in `Config.auto_wrap_policy`, not None.
        kwargs: the arguments of every unit unless the policy replaces them. A `mixed_precision` among them
            that casts anything makes modules of its `_module_classes_to_ignore` units in full precision.
        ignored_modules: never chosen nor visited; with their descendants, as a set.
        ignored_params: not counted in `nonwrapped_numel`.

    Raises:
        UsageError: the policy chose a module without a forward, or `root` has none, and no other unit would gather its
            parameters.
        ConfigTypeError: the policy gave a unit an argument that does not exist.
    """
    if isinstance(policy, frozenset):
        policy = ModuleWrapPolicy(policy)
    wrapped = [module for module in root.modules() if module is not root and is_managed(module)]
    closed = set(ignored_modules).union(*(module.modules() for module in wrapped))
    uncounted = set(ignored_params).union(*(module.parameters() for module in wrapped))
    separate = _classes_in_full_precision(kwargs.get("mixed_precision"))

    if hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(root, closed, dict(kwargs))
    else:
        answers = _PolicyAnswers(root, policy, closed, uncounted, separate)
        answers.params_in_units(root, call=True)
        chosen = {module: dict(kwargs) for module in answers.chosen}
    if not wrapped and all(module is not root and next(module.parameters(), None) is None for module in chosen):
        _warn_nothing_chosen(root, policy, chosen)

    overridden = {module for module in root.modules() if module not in closed and isinstance(module, separate)}
    overridden.discard(root)
    for module in overridden:
        chosen[module] = {**chosen.get(module, kwargs), "mixed_precision": None}
    if overridden:
        _warn_in_full_precision(overridden)

    _pass_over(root, chosen, closed, uncounted)

    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for attribute, child in parent._modules.items():
            if child is not None and child in chosen:
                places.setdefault(child, []).append((parent, attribute))
    plan = tuple(
        PlannedUnit(path, module, tuple(places[module]), chosen[module], module in overridden)
        for path, module in _children_first(root, closed, {root})
        if module in chosen
    )
    for planned in plan:
        unit = described(planned.path, planned.module)
        own = {name: value for name, value in planned.kwargs.items() if name not in kwargs}
        check_argument_names(own, where=f"auto_wrap_policy, for {unit}")
        logger.debug("unit planned: %s", unit)
    return plan


def apply_plan(
    plan: Iterable[PlannedUnit],
    make: Callable[..., nn.Module],
    *,
    unmake: Callable[[nn.Module], object] | None = None,
) -> ExitStack:
    """Replace each planned module in all its places by `make(module, **kwargs)`.

    Returns a stack that undoes it. When closed, it puts every module back in its place, the last first, then calls
    `unmake` with its wrapper, to give the module its full parameters back; when dropped, it does nothing. If a `make`
    raises, it is closed here, so that no module stays wrapped.

    Example::

        with apply_plan(plan, make, unmake=unmake) as undo:
            ...  # code that may still fail
            undo.pop_all()  # success: keep the wrappers
    """
    with ExitStack() as undo:
        for planned in plan:
            wrapper = make(planned.module, **planned.kwargs)
            if unmake is not None:
                undo.callback(unmake, wrapper)
            for parent, attribute in planned.places:
                undo.callback(_set_child, parent, attribute, planned.module)
                _set_child(parent, attribute, wrapper)
        return undo.pop_all()


def _set_child(parent: nn.Module, attribute: str, child: nn.Module) -> None:
    # Not setattr: a module may override __setattr__, to refuse or to redirect assignments after its construction.
    nn.Module.__setattr__(parent, attribute, child)


@dataclass
class _PolicyAnswers:
    """The results of a policy function so far, and the modules that it has `chosen`; instances of `separate`
    count as units in its numels."""

    root: nn.Module
    policy: Callable[..., bool]
    closed: set[nn.Module]
    uncounted: set[nn.Parameter]
    separate: tuple[type[nn.Module], ...]
    chosen: list[nn.Module] = field(default_factory=list)
    known: dict[nn.Module, set[nn.Parameter]] = field(default_factory=dict)

    def params_in_units(self, module: nn.Module, *, call: bool) -> set[nn.Parameter]:
        """Decide about `module` and its descendants; return the parameters there that will be in units of their own."""
        if module in self.known:  # shared: decided at its first place
            return self.known[module]
        held: set[nn.Parameter] = set()
        self.known[module] = held
        params = {param for param in module.parameters() if param not in self.uncounted}
        call = call and self.policy(module=module, recurse=True, nonwrapped_numel=_numel(params))
        if not call and not self.separate:
            return held
        for child in module.children():
            if child not in self.closed:
                held |= self.params_in_units(child, call=call)
        if module is not self.root:
            wanted = call and self.policy(module=module, recurse=False, nonwrapped_numel=_numel(params - held))
            if wanted:
                self.chosen.append(module)
            if wanted or isinstance(module, self.separate):
                held |= params
        return held


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def _classes_in_full_precision(precision: MixedPrecision | None) -> tuple[type[nn.Module], ...]:
    if precision is None or precision.param_dtype is precision.reduce_dtype is precision.buffer_dtype is None:
        return ()
    return precision._module_classes_to_ignore


def _children_first(
    module: nn.Module, closed: set[nn.Module], visited: set[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of all modules below `module` outside of `closed`, each once, a parent after its children."""
    for name, child in module.named_children():
        if child not in closed and child not in visited:
            visited.add(child)
            yield from _children_first(child, closed, visited, f"{prefix}{name}.")
            yield prefix + name, child


def check_called(module: nn.Module, own: Sequence[str]) -> None:
    """Refuse to wrap `module` if it has no forward: parameters of its `own`, in no unit inside, need one.

    Raises:
        UsageError: naming them.
    """
    if own and not has_forward(module):
        raise UsageError(
            f"module: {type(module).__name__} defines no forward, so its wrapper would never be called and its "
            f"parameters never gathered ({few(own)}). Wrap the modules inside it instead, or the module that calls "
            "them."
        )


def _pass_over(
    root: nn.Module, chosen: dict[nn.Module, Any], closed: set[nn.Module], uncounted: set[nn.Parameter]
) -> None:
    """Drop modules without a forward from `chosen`. Refuse them, and `root`, if no other unit has their parameters."""
    never_called = [
        (path, each) for path, each in _children_first(root, closed, {root}) if each in chosen and not has_forward(each)
    ]
    if not never_called and has_forward(root):
        return
    for _, module in never_called:
        del chosen[module]
    gathered = uncounted.union(*(module.parameters() for module in chosen if module is not root))
    for path, module in never_called:
        if lost := [name for name, param in module.named_parameters() if param not in gathered]:
            inside = _names_of_classes(module.children())
            raise UsageError(
                f"auto_wrap_policy: chose {described(path, module)}, which defines no forward: its wrapper would "
                f"never be called and its parameters never gathered ({few(lost)}). Choose the modules inside it "
                f"({inside}), or the module that calls them."
            )
    check_called(root, [path for path, param in root.named_parameters() if param not in gathered])


def _warn_nothing_chosen(root: nn.Module, policy: Any, chosen: Collection[nn.Module]) -> None:
    function = getattr(policy, "func", policy)  # of a functools.partial
    name = getattr(function, "__name__", None) or repr(policy)
    matched = f"only submodules without parameters ({_names_of_classes(chosen)})" if chosen else "no submodule"
    warn(
        f"auto_wrap_policy: {name} matched {matched} of {type(root).__name__}, which becomes a single unit: all of its "
        f"parameters are gathered at once. Classes inside: {_names_of_classes(root.modules(), except_for=root)}."
    )


def _warn_in_full_precision(modules: Iterable[nn.Module]) -> None:
    warn(
        f"mixed_precision: modules of {_names_of_classes(modules)} become units of their own in full precision, each "
        "with collectives of its own. To compute them in the param dtype, as part of the units around them, pass "
        "MixedPrecision(..., _module_classes_to_ignore=())."
    )


def _names_of_classes(modules: Iterable[nn.Module], *, except_for: nn.Module | None = None) -> str:
    names = sorted({type(module).__name__ for module in modules if module is not except_for})
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "none"
