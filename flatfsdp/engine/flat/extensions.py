"""Parameters that are stored as one thing and computed with as another (a quantised or a distributed tensor).

[Note: extensions] What `pre_flatten_transform` makes of a parameter is what the flat parameter stores, the leaf of
autograd, and what optimizers step on. While a unit computes, its modules hold `post_unflatten_transform` of the leaf
instead, through which gradients flow back into the leaf. FSDP1 has the same two hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ...errors import ConfigTypeError, UsageError
from .param_refs import ParamRef


class FlatParamExtensions(Protocol):
    """The two transformations, inverse to each other. Both are called on every rank alike."""

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """(what to store of a parameter, a state that says how to undo it); a state of None leaves it as it is."""
        ...

    def post_unflatten_transform(self, tensor: torch.Tensor, state: Any) -> torch.Tensor:
        """What modules compute with, differentiably from the unsharded stored `tensor`."""
        ...


_extensions: FlatParamExtensions | None = None


def set_extensions(extensions: FlatParamExtensions | None) -> None:
    """Apply `extensions` to parameters of models wrapped from now on in this process; None ends that.

    A transformed parameter is a new `Parameter` in its module: build the optimizer after wrapping. Inside
    `summon_full_params()` it has the shape in which it is stored.

    Raises:
        ConfigTypeError: an object without the two methods.

    Example:
        >>> class Transposed:
        ...     def pre_flatten_transform(self, tensor):
        ...         return (tensor.t().contiguous(), "transposed") if tensor.dim() == 2 else (tensor, None)
        ...     def post_unflatten_transform(self, tensor, state):
        ...         return tensor.t()
        >>> set_extensions(Transposed())
        >>> set_extensions(None)
    """
    global _extensions
    for name in ("pre_flatten_transform", "post_unflatten_transform"):
        if extensions is not None and not callable(getattr(extensions, name, None)):
            raise ConfigTypeError(
                f"extensions: got {extensions!r}, which has no method {name}. Accepted: an object "
                "with pre_flatten_transform and post_unflatten_transform, or None"
            )
    _extensions = extensions


class TransformedParam:
    """One transformed parameter of a unit and where its modules hold it."""

    def __init__(
        self,
        leaf: nn.Parameter,
        state: Any,
        extensions: FlatParamExtensions,
        param_refs: Sequence[ParamRef],
        original: nn.Parameter | None = None,
    ) -> None:
        self.leaf = leaf
        self._original = weakref.ref(original) if original is not None else None
        self.state = state
        self.extensions = extensions
        self.param_refs = list(param_refs)

    def replaced(self, parameter: nn.Parameter) -> bool:
        """Whether the leaf stands for `parameter`, which some other module still holds."""
        return self._original is not None and self._original() is parameter

    def _value(self) -> torch.Tensor:
        return self.extensions.post_unflatten_transform(self.leaf, self.state)

    def install(self) -> None:
        """Let the modules hold what they compute with. Precondition: the leaf is unsharded."""
        with torch.enable_grad():  # also where a backward gathers for a recomputation
            value = self._value()
        for param_ref in self.param_refs:
            param_ref.assign(value)

    def dissolve(self) -> None:
        """Let the modules hold a parameter like the one they had before. Precondition: the leaf is unsharded."""
        restored = nn.Parameter(self._value().detach().clone(), requires_grad=self.leaf.requires_grad)
        for param_ref in self.param_refs:
            param_ref.of(restored).register()

    def uninstall(self, put: Callable[[ParamRef], None]) -> None:
        """Let the modules hold what they hold at rest, which `put` gives to one."""
        for param_ref in self.param_refs:
            put(param_ref)


def can_transform() -> bool:
    """Whether parameters may be stored as something else."""
    return _extensions is not None


def transform(param_refs: Iterable[ParamRef]) -> tuple[list[ParamRef], list[TransformedParam]]:
    """`param_refs` with the leaves that are to be flattened, registered, and those of them that were transformed."""
    param_refs = list(param_refs)
    if _extensions is None:
        return param_refs, []
    made: dict[int, TransformedParam | None] = {}
    out: list[ParamRef] = []
    for param_ref in param_refs:
        original = param_ref.leaf
        if id(original) not in made:
            stored, state = _extensions.pre_flatten_transform(original)
            if state is not None and not isinstance(stored, torch.Tensor):
                raise UsageError(
                    f"pre_flatten_transform of {param_ref.path!r} returned {type(stored).__name__}; expected a "
                    "tensor and a state"
                )
            made[id(original)] = None
            if state is not None:
                leaf = nn.Parameter(stored.detach(), requires_grad=original.requires_grad)
                made[id(original)] = TransformedParam(leaf, state, _extensions, [], original)
        transformed = made[id(original)]
        if transformed is not None:
            param_ref = param_ref.of(transformed.leaf)
            transformed.param_refs.append(param_ref)
        out.append(param_ref)
    for param_ref in out:
        param_ref.register()
    return out, [each for each in made.values() if each is not None]
