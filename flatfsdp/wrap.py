"""Which submodules become units of their own: the policies, the plan they lead to, and its execution.

A *policy* says which modules to wrap. :func:`plan_wrapping` asks it once and answers with data, children before
parents; nothing is touched. :func:`apply_plan` then replaces the modules, and hands back what puts them all in place
again, so that a constructor that fails half-way leaves the model as it was.

A policy is a function ``(module, recurse, nonwrapped_numel) -> bool`` or an object with a method ``_run_policy``.
torch's own policies are of these forms and work unchanged.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .api import MixedPrecision, check_module_classes
from .engine.config.arguments import check_argument_names, has_forward
from .errors import ConfigTypeError, UsageError, few, logger, warn

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]


# --- Policies that are objects ---------------------------------------------------------------------------------------


class _Policy(ABC):
    """Decides on the whole tree at once."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Map each module to wrap (the root may be among them) to the arguments of its wrapper, a dict of its own."""


class ModuleWrapPolicy(_Policy):
    """Wrap every module that is an instance of one of ``module_classes`` (one class, or a collection of them).

    Also callable as ``policy(module, recurse, nonwrapped_numel)``, to be combined with functions.

    Raises:
        ConfigTypeError: for anything but module classes.

    Example::

        >>> from torch import nn
        >>> ModuleWrapPolicy({nn.Linear})
        ModuleWrapPolicy({Linear})
    """

    def __init__(self, module_classes: type[nn.Module] | Iterable[type[nn.Module]]) -> None:
        self._module_classes = frozenset(check_module_classes("module_classes", module_classes))

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        candidates = (module for module in root_module.modules() if module not in ignored_modules)
        return {module: dict(root_kwargs) for module in candidates if isinstance(module, tuple(self._module_classes))}

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int = -1) -> bool:
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(sorted(kind.__name__ for kind in self._module_classes))}}})"


class CustomPolicy(_Policy):
    """Wrap what a function of the module says, with arguments of its own for each module.

    ``lambda_fn(module)`` returns False (or an empty dict): not a unit; True: a unit with the root's arguments; or a
    dict of arguments of ``FullyShardedDataParallel`` that replace the root's for this unit.

    Raises:
        ConfigTypeError: while wrapping, if ``lambda_fn`` returns anything else or names no argument of the wrapper.

    Example::

        >>> from torch import nn
        >>> policy = CustomPolicy(lambda module: {"forward_prefetch": True} if isinstance(module, nn.Linear) else False)
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        chosen = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ConfigTypeError(
                    f"CustomPolicy: lambda_fn returned {answer!r} ({type(answer).__name__}) for "
                    f"{_described(name, module)}. Accepted: True, False, or a dict of the unit's arguments."
                )
            if answer:
                chosen[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return chosen

    def __repr__(self) -> str:
        return f"CustomPolicy({getattr(self._lambda_fn, '__qualname__', self._lambda_fn)})"


# --- Policies that are functions -------------------------------------------------------------------------------------
# Asked twice about a module: with recurse=True whether to look inside it, then, its children decided, with
# recurse=False whether to wrap it. `nonwrapped_numel` counts the elements of its parameters: at first all of them,
# then those in no chosen unit. Names and order of their arguments are those of FSDP1's, as programs bind them by name.


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap every module for which ``lambda_fn(module)`` is true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """Wrap every instance of the classes ``transformer_layer_cls``, usually the one class of a transformer's blocks."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Wrap a module as soon as the parameters in it that no chosen unit holds have ``min_num_params`` elements.

    Args:
        force_leaf_modules: classes never looked into, nor wrapped themselves. None: the attribute
            ``FORCE_LEAF_MODULES`` of this function.
        exclude_wrap_modules: classes looked into, but never wrapped. None: the attribute ``EXCLUDE_WRAP_MODULES``.
    """
    own = vars(size_based_auto_wrap_policy)
    leaves = own["FORCE_LEAF_MODULES"] if force_leaf_modules is None else force_leaf_modules
    excluded = own["EXCLUDE_WRAP_MODULES"] if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(leaves if recurse else excluded))


# nn.MultiheadAttention reads its projection's weight without calling the projection.
vars(size_based_auto_wrap_policy).update(
    FORCE_LEAF_MODULES={nn.MultiheadAttention},
    EXCLUDE_WRAP_MODULES={nn.ModuleList, nn.ModuleDict},
)


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """Wrap what any of ``policies`` wants wrapped; later ones are not asked once one has said yes."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


# --- Annotations in the model's own code -----------------------------------------------------------------------------

_enabled: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None] = ContextVar("_enabled", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Within this context :func:`wrap` wraps, by ``wrapper_cls(module, **wrapper_kwargs)``.

    Raises:
        ConfigTypeError: ``wrapper_cls`` is not callable.
        UsageError: the context is entered within itself.
    """
    if not callable(wrapper_cls):
        raise ConfigTypeError(f"wrapper_cls: got {wrapper_cls!r}. Accepted: a class such as FullyShardedDataParallel.")
    if _enabled.get() is not None:
        raise UsageError("enable_wrap: entered within itself, so it is unclear whose arguments count. Leave one first.")
    token = _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module`` wrapped as the surrounding :func:`enable_wrap` says, ``wrap_overrides`` first; outside of one, itself.

    Example::

        >>> from torch import nn
        >>> wrap(nn.Linear(2, 2))
        Linear(in_features=2, out_features=2, bias=True)
    """
    enabled = _enabled.get()
    if enabled is None:
        return module
    wrapper_cls, wrapper_kwargs = enabled
    return wrapper_cls(module, **{**wrapper_kwargs, **wrap_overrides})


# --- Plan, then execute ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedUnit:
    """One module that is to become a unit."""

    path: str
    """Where it stands in the root, the first of its places."""
    module: nn.Module
    homes: tuple[tuple[nn.Module, str], ...]
    """Every place that holds it, as (parent, attribute): a shared module is wrapped once and set everywhere."""
    kwargs: dict[str, Any]
    """The arguments of its wrapper."""
    in_full_precision: bool
    """Chosen (also) for its class, by ``MixedPrecision._module_classes_to_ignore``: ``kwargs["mixed_precision"]`` is
    None, and its inputs must be cast up and its outputs back, for its neighbours compute in the param dtype."""


def is_managed(module: nn.Module) -> bool:
    """Whether ``module`` is wrapped already, by the mark that wrappers carry for other programs to read."""
    return getattr(module, "_is_fsdp_managed_module", False) is True


def plan_wrapping(
    root: nn.Module,
    policy: Any,
    *,
    kwargs: Mapping[str, Any],
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
    is_wrapped: Callable[[nn.Module], bool] = is_managed,
) -> tuple[PlannedUnit, ...]:
    """Ask ``policy`` which modules inside ``root`` become units: children before parents, each once, ``root`` not.

    A chosen module without a forward (a ``ModuleList``) is passed over where all of its parameters lie in units inside.

    Differs from FSDP1 where that fails: a shared module has one wrapper in all its places, wrapped modules may be in
    the tree already (they are left alone), and a function's "do not look inside" holds under mixed precision as well.

    Args:
        policy: as in ``Config.auto_wrap_policy``, not None.
        kwargs: the arguments that every unit gets unless the policy replaces them. A ``mixed_precision`` among them
            that casts anything makes modules of its ``_module_classes_to_ignore`` units in full precision.
        ignored_modules: never chosen nor looked into; with their descendants, as a set.
        ignored_params: not counted in ``nonwrapped_numel``.

    Raises:
        UsageError: the policy chose a module that has no forward to be called, or ``root`` has none, and no other unit
            would gather its parameters.
        ConfigTypeError: the policy gave a unit an argument that does not exist.
    """
    if isinstance(policy, frozenset):
        policy = ModuleWrapPolicy(policy)
    wrapped = [module for module in root.modules() if module is not root and is_wrapped(module)]
    closed = set(ignored_modules).union(*(module.modules() for module in wrapped))
    uncounted = set(ignored_params).union(*(module.parameters() for module in wrapped))
    separate = _classes_in_full_precision(kwargs.get("mixed_precision"))

    if hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(root, closed, dict(kwargs))
    else:
        chosen = {module: dict(kwargs) for module in _ask_function(root, policy, closed, uncounted, separate)}
    if not wrapped and all(module is not root and _has_no_parameters(module) for module in chosen):
        _warn_nothing_chosen(root, policy, chosen)

    overridden = {module for module in root.modules() if module not in closed and isinstance(module, separate)}
    overridden.discard(root)
    for module in overridden:
        chosen[module] = {**chosen.get(module, kwargs), "mixed_precision": None}
    if overridden:
        _warn_in_full_precision(overridden)

    _pass_over(root, chosen, closed, uncounted)

    homes: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for attribute, child in parent._modules.items():
            if child is not None and child in chosen:
                homes.setdefault(child, []).append((parent, attribute))
    plan = tuple(
        PlannedUnit(path, module, tuple(homes[module]), chosen[module], module in overridden)
        for path, module in _children_first(root, closed)
        if module in chosen
    )
    for planned in plan:
        _check_planned(planned, kwargs)
        logger.debug("unit planned: %s", _described(planned.path, planned.module))
    return plan


def apply_plan(
    plan: Iterable[PlannedUnit],
    make: Callable[..., nn.Module],
    *,
    unmake: Callable[[nn.Module], object] | None = None,
) -> contextlib.ExitStack:
    """Replace each planned module in all its places by ``make(module, **kwargs)``.

    Returns what undoes it. Closed, it puts every module back where it was, the last first, then calls ``unmake`` with
    its wrapper, to give the module its whole parameters back; dropped, it does nothing. If a ``make`` raises, it is
    closed here, so that nothing is left half-wrapped.

    Example::

        with apply_plan(plan, make, unmake=unmake) as undo:
            ...  # what may still fail
            undo.pop_all()  # all went well: keep the wrappers
    """
    with contextlib.ExitStack() as undo:
        for planned in plan:
            wrapper = make(planned.module, **planned.kwargs)
            if unmake is not None:
                undo.callback(unmake, wrapper)
            for parent, attribute in planned.homes:
                undo.callback(_set_child, parent, attribute, planned.module)
                _set_child(parent, attribute, wrapper)
        return undo.pop_all()


def _set_child(parent: nn.Module, attribute: str, child: nn.Module) -> None:
    # Not setattr: a module may override __setattr__, to refuse or to redirect what is set after its construction.
    nn.Module.__setattr__(parent, attribute, child)


def _ask_function(
    root: nn.Module,
    policy: Callable[..., bool],
    closed: set[nn.Module],
    uncounted: set[nn.Parameter],
    separate: tuple[type[nn.Module], ...],
) -> list[nn.Module]:
    """The modules that a policy function wants wrapped; instances of ``separate`` count as units in its numels."""
    asked = _PolicyAnswers(root, policy, closed, uncounted, separate)
    asked.params_in_units(root, ask=True)
    return asked.chosen


@dataclass
class _PolicyAnswers:
    """What a policy function has been asked so far, and ``chosen``, what it wants wrapped."""

    root: nn.Module
    policy: Callable[..., bool]
    closed: set[nn.Module]
    uncounted: set[nn.Parameter]
    separate: tuple[type[nn.Module], ...]
    chosen: list[nn.Module] = field(default_factory=list)
    known: dict[nn.Module, set[nn.Parameter]] = field(default_factory=dict)

    def params_in_units(self, module: nn.Module, *, ask: bool) -> set[nn.Parameter]:
        """Decide about ``module`` and all below; return the parameters there that end in units of their own."""
        if module in self.known:  # shared: decided where it was met first
            return self.known[module]
        held: set[nn.Parameter] = set()
        self.known[module] = held
        params = {param for param in module.parameters() if param not in self.uncounted}
        ask = ask and self.policy(module=module, recurse=True, nonwrapped_numel=_numel(params))
        if not ask and not self.separate:
            return held
        for child in module.children():
            if child not in self.closed:
                held |= self.params_in_units(child, ask=ask)
        if module is not self.root:
            wanted = ask and self.policy(module=module, recurse=False, nonwrapped_numel=_numel(params - held))
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


def _children_first(root: nn.Module, closed: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of everything below ``root`` outside of ``closed``, each once, a parent after its children."""
    return _below(root, "", closed, {root})


def _below(
    module: nn.Module, prefix: str, closed: set[nn.Module], visited: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if child not in closed and child not in visited:
            visited.add(child)
            yield from _below(child, f"{prefix}{name}.", closed, visited)
            yield prefix + name, child


def check_called(module: nn.Module, own: Sequence[str]) -> None:
    """Refuse to wrap ``module`` if it has no forward: parameters of its ``own``, in no unit inside, need one.

    Raises:
        UsageError: naming them.
    """
    if own and not has_forward(module):
        raise UsageError(
            f"module: {type(module).__name__} defines no forward, so its wrapper would never be called and its "
            f"parameters never gathered ({few(own)}). Wrap the modules inside it, or the module that calls them."
        )


def _pass_over(
    root: nn.Module, chosen: dict[nn.Module, Any], closed: set[nn.Module], uncounted: set[nn.Parameter]
) -> None:
    """Take what has no forward from ``chosen``. Refuse it, and ``root``, where no other unit has its parameters."""
    never_called = [
        (path, each) for path, each in _children_first(root, closed) if each in chosen and not has_forward(each)
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
                f"auto_wrap_policy: chose {_described(path, module)}, which defines no forward: its wrapper would "
                f"never be called and its parameters never gathered ({few(lost)}). Choose the modules inside it "
                f"({inside}), or the one that calls them."
            )
    check_called(root, [path for path, param in root.named_parameters() if param not in gathered])


def _check_planned(planned: PlannedUnit, kwargs: Mapping[str, Any]) -> None:
    described = _described(planned.path, planned.module)
    own = {name: value for name, value in planned.kwargs.items() if name not in kwargs}
    check_argument_names(own, where=f"auto_wrap_policy, for {described}")


def _has_no_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None


def _warn_nothing_chosen(root: nn.Module, policy: Any, chosen: Collection[nn.Module]) -> None:
    function = getattr(policy, "func", policy)  # of a functools.partial
    name = getattr(function, "__name__", None) or repr(policy)
    matched = f"only submodules without parameters ({_names_of_classes(chosen)})" if chosen else "no submodule"
    warn(
        f"auto_wrap_policy: {name} matched {matched} of {type(root).__name__}, which becomes a single unit: all of its "
        f"parameters are gathered at once. Classes inside: {_names_of_classes(root.modules(), apart_from=root)}."
    )


def _warn_in_full_precision(modules: Iterable[nn.Module]) -> None:
    warn(
        f"mixed_precision: modules of {_names_of_classes(modules)} become units of their own in full precision, each "
        "with collectives of its own. To compute them in the param dtype, within the units around them, pass "
        "MixedPrecision(..., _module_classes_to_ignore=())."
    )


def _names_of_classes(modules: Iterable[nn.Module], *, apart_from: nn.Module | None = None) -> str:
    names = sorted({type(module).__name__ for module in modules if module is not apart_from})
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "none"


def _described(path: str, module: nn.Module) -> str:
    return f"{path!r} ({type(module).__name__})" if path else f"the root ({type(module).__name__})"
