"""The submodules that become units of their own: policies, and annotations in the model's own code.

A *policy* is a function ``(module, recurse, nonwrapped_numel) -> bool``, or an object that decides on the whole tree at
once: ``_run_policy(root_module, ignored_modules, root_kwargs)`` maps each module to wrap (the root may be among them)
to the arguments of its wrapper, a dict of its own. torch's own policies are of these forms and work unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

from .api import check_module_classes
from .errors import ConfigTypeError, UsageError

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


class ModuleWrapPolicy:
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


class CustomPolicy:
    """Wrap the modules that a function chooses, with arguments of its own for each module.

    ``lambda_fn(module)`` returns False (or an empty dict): not a unit; True: a unit with the root's arguments; or a
    dict of arguments of ``FullyShardedDataParallel`` that replace the root's for this unit.

    Raises:
        ConfigTypeError: while wrapping, if ``lambda_fn`` returns another type or names no argument of the wrapper.

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
                    f"{described(name, module)}. Accepted: True, False, or a dict of the unit's arguments."
                )
            if answer:
                chosen[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return chosen

    def __repr__(self) -> str:
        return f"CustomPolicy({getattr(self._lambda_fn, '__qualname__', self._lambda_fn)})"


# --- Policies that are functions -------------------------------------------------------------------------------------
# Called twice for a module: with recurse=True whether to look inside it, then, after its children are decided, with
# recurse=False whether to wrap it. `nonwrapped_numel` counts the elements of its parameters: first all of them,
# then those in no chosen unit. Argument names and order are FSDP1's, since programs bind them by name.


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
        force_leaf_modules: classes that are neither wrapped themselves nor searched. None: the attribute
            ``FORCE_LEAF_MODULES`` of this function.
        exclude_wrap_modules: classes that are searched, but never wrapped. None: the attribute
            ``EXCLUDE_WRAP_MODULES``.
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
    """Wrap each module that any of ``policies`` chooses; later ones are not called once one has chosen it."""
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
        raise UsageError(
            "enable_wrap: it is already active, so it is unclear whose arguments apply. Leave the outer context first."
        )
    token = _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module`` wrapped by the surrounding :func:`enable_wrap`, with ``wrap_overrides`` taking precedence;
    outside of one, ``module`` itself.

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


def described(path: str, module: nn.Module) -> str:
    """A module at `path` of the root, for messages."""
    return f"{path!r} ({type(module).__name__})" if path else f"the root ({type(module).__name__})"
