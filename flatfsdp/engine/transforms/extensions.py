"""Parameters that are stored in one form and computed with in another (a quantized or a distributed tensor).

[Note: extensions] The *stored* form of a parameter lies in the flat parameter: its leaf has this form, and so has the
holder on which optimizers step. While a unit computes, its modules hold the *seen* form, computed from the leaf, so
that gradients flow back into the leaf. FSDP1 has two hooks for that, which users set; DTensors are stored and seen in
the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn

from ...errors import ConfigTypeError, UsageError
from ..comm.axes import Axis
from ..flat.param_refs import ParamRef
from ..flat.views import ParamViews, TransformedLeaf
from ..layout.layout import Part


def marks_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes that users have set on `parameter`. [Note: marks of parameters]

    [Note: marks of parameters] Models mark parameters (`parameter.no_decay = True`), and code that groups them for an
    optimizer reads the marks. They are kept on whatever object stands for a parameter: a holder shares the attributes
    of its leaf, copies and replacements get them. torch drops them in copies and in `load_state_dict(assign=True)`.
    The tensors that a tensor is made of are attributes, too, and no marks: they would keep its whole memory.
    """
    flatten = getattr(parameter, "__tensor_flatten__", None)
    inner = () if flatten is None else flatten()[0]
    return {name: value for name, value in vars(parameter).items() if name != _IS_PARAMETER and name not in inner}


_IS_PARAMETER = "_is_param"  # torch's, on parameters of other classes than its own


class FlatParamExtensions(Protocol):
    """The two transformations, inverse to each other. Both are called on every rank in the same way."""

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """(the tensor to store for a parameter, a state that undoes it); a state of None leaves it unchanged."""

    def post_unflatten_transform(self, tensor: torch.Tensor, state: Any) -> torch.Tensor:
        """The tensor that modules compute with, differentiably from the unsharded stored `tensor`."""


_extensions: FlatParamExtensions | None = None


def set_extensions(extensions: FlatParamExtensions | None) -> None:
    """Apply `extensions` to parameters of models that are wrapped from now on in this process; None to stop.

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


class Transform:
    """Storage of one kind of parameters, and its conversion for modules. The same on every rank."""

    def applies(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` is of the kind."""
        return True

    def check(self, path: str, parameter: torch.Tensor) -> None:
        """Refuse a parameter of the kind that cannot be stored. Precondition: it `applies`."""

    def store(self, path: str, parameter: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """(the tensor to store for a parameter, a state for `see`); a state of None leaves it unchanged."""
        raise NotImplementedError

    def see(self, leaf: torch.Tensor, state: Any) -> torch.Tensor:
        """The tensor that modules compute with, differentiably from the unsharded `leaf`."""
        raise NotImplementedError

    def attach(self, state: Any, module: nn.Module, mesh: Any) -> None:
        """Register `module` as one that computes with the parameter; `mesh`: that of its unit, if any."""

    def part(self, state: Any) -> Part | None:
        """The position of the stored part in its whole; None for an independent tensor. [Note: parts of wholes]"""
        return None

    def describe(self, state: Any) -> str:
        """The facts that ranks compare about it, as the end of a phrase."""
        return ""

    def can_be_pickled(self, state: Any) -> bool:
        """Whether a pickle can hold `state`."""
        return True

    def assemble(self, stored: torch.Tensor, state: Any) -> torch.Tensor:
        """The whole tensor of which a part is `stored` here. Collective over the axes."""
        raise NotImplementedError

    def around(self, stored: torch.Tensor, state: Any) -> torch.Tensor | None:
        """The seen form of `stored`, sharing its memory, without a graph; None if there is no such form."""
        return None

    def stored_in(self, seen: torch.Tensor) -> torch.Tensor:
        """The stored form of a tensor that `around` made, or of a user's replacement for it."""
        return seen

    def sharded(self, rows: torch.Tensor, dp_mesh: Any, state: Any) -> torch.Tensor:
        """`rows`, this rank's rows of the stored tensor, as one tensor of the whole with the rows of all ranks."""
        raise NotImplementedError

    def axes(self, state: Any, device: torch.device) -> list[tuple[Axis, bool]]:
        """The axes of ranks that store the other parts, each with True if it splits the whole; False: copies."""
        return []


class UsersTransform(Transform):
    """The transform of an object with FSDP1's hooks."""

    def __init__(self, extensions: FlatParamExtensions) -> None:
        self.extensions = extensions

    def store(self, path: str, parameter: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """The result of `pre_flatten_transform` for `parameter`."""
        stored, state = self.extensions.pre_flatten_transform(parameter)
        if state is not None and not isinstance(stored, torch.Tensor):
            raise UsageError(
                f"pre_flatten_transform of {path!r} returned {type(stored).__name__}; expected a tensor and a state"
            )
        return stored, state

    def see(self, leaf: torch.Tensor, state: Any) -> torch.Tensor:
        """The result of `post_unflatten_transform` for `leaf`."""
        return self.extensions.post_unflatten_transform(leaf, state)


class TransformedParam(TransformedLeaf):
    """One transformed parameter of a unit and where its modules hold it.

    Attributes:
        state: the state that `transform` returned for it.
    """

    def __init__(
        self,
        leaf: nn.Parameter,
        state: Any,
        transform: Transform,
        param_refs: Sequence[ParamRef],
        original: nn.Parameter | None = None,
    ) -> None:
        super().__init__(leaf, list(param_refs), partial(_seen, transform, state))
        self._original = weakref.ref(original) if original is not None else None
        self.state = state
        self.transform = transform

    @property
    def part(self) -> Part | None:
        """The position of the leaf in its whole, if it is a part."""
        return self.transform.part(self.state)

    def describe(self) -> str:
        """`Transform.describe` of it."""
        return self.transform.describe(self.state)

    def replaced(self, parameter: nn.Parameter) -> bool:
        """Whether the leaf stands for `parameter`, which some other module still holds."""
        return self._original is not None and self._original() is parameter

    def dissolve(self, whole: nn.Parameter) -> None:
        """Let the modules hold a parameter like the one they had before. `whole`: the unsharded stored form."""
        seen = self.transform.see(whole, self.state)
        restored = nn.Parameter(seen.detach().clone(), requires_grad=self.leaf.requires_grad)
        vars(restored).update(marks_of(self.leaf))
        for param_ref in self.param_refs:
            param_ref.of(restored).register()

    def show(self, stored: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Let the modules list the seen form of unsharded `stored` memory and its gradient as a parameter, until they
        hold what they do at rest; kinds without such a form keep their stored form."""
        if (seen := self.transform.around(stored, self.state)) is not None:
            shown = nn.Parameter(seen, requires_grad=self.leaf.requires_grad)
            vars(shown).update(marks_of(self.leaf))
            if grad is not None:
                shown.grad = self.transform.around(grad, self.state)
            for param_ref in self.param_refs:
                param_ref.hold(shown)

    def taken(self, whole: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The value that the modules hold now, in its stored form, and its gradient: those that `show` has shown, or a
        user's replacement."""
        held = self.param_refs[0].current
        if not isinstance(held, nn.Parameter):
            return whole, whole.grad
        grad = None if held.grad is None else self.transform.stored_in(held.grad)
        return self.transform.stored_in(held.detach()), grad


def _seen(transform: Transform, state: Any, leaf: nn.Parameter) -> torch.Tensor:
    with torch.enable_grad():  # also where a backward gathers for a recomputation
        value = transform.see(leaf, state)
    if marks := marks_of(leaf):
        vars(value).update(marks)
    return value


def transformed_in(views: ParamViews) -> list[TransformedParam]:
    """The transformed ones of the leaves of `views`."""
    return cast(list[TransformedParam], views.extended)


def as_transform(found: Transform | FlatParamExtensions) -> Transform:
    """`found` itself, or the transform of a user-defined object, which older pickles have."""
    return found if isinstance(found, Transform) else UsersTransform(found)


def users_transforms() -> list[Transform]:
    """The transform that a user has set, if any."""
    return [] if _extensions is None else [UsersTransform(_extensions)]


def transform(
    param_refs: Iterable[ParamRef], transforms: Sequence[Transform]
) -> tuple[list[ParamRef], list[TransformedParam]]:
    """`param_refs` with the leaves that are to be flattened, registered, and the transformed ones among them, each
    transformed by the first of `transforms` that has a state for it."""
    param_refs = list(param_refs)
    if not transforms:
        return param_refs, []
    made: dict[int, TransformedParam | None] = {}
    out: list[ParamRef] = []
    for param_ref in param_refs:
        original = param_ref.leaf
        if id(original) not in made:
            made[id(original)] = _transformed(param_ref, transforms)
        transformed = made[id(original)]
        if transformed is not None:
            param_ref = param_ref.of(transformed.leaf)
            transformed.param_refs.append(param_ref)
        out.append(param_ref)
    for param_ref in out:
        param_ref.register()
    return out, [each for each in made.values() if each is not None]


def _transformed(param_ref: ParamRef, transforms: Sequence[Transform]) -> TransformedParam | None:
    original = param_ref.leaf
    for each in transforms:
        if each.applies(original):
            each.check(param_ref.path, original)
            stored, state = each.store(param_ref.path, original)
            if state is not None:
                leaf = nn.Parameter(stored.detach(), requires_grad=original.requires_grad)
                vars(leaf).update(marks_of(original))
                return TransformedParam(leaf, state, each, [], original)
    return None
