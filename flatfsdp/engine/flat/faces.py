"""The form of a handle's parameters between iterations: for modules, for optimizers, for code that reads a `.grad`.

[Note: faces] Inside a forward and a backward, modules compute with the *leaves*, and autograd accumulates gradients in
them. At rest users meet the handle's *face*: *holders*, which modules list, optimizers step on, and whose `.grad` is
the reduced gradient. They are the user's own parameters, each this rank's piece of what it was, one flat parameter for
all of them (`FlatFace`), or a distributed tensor for each. A handle is given its face as a value. No other file asks
which face it has, by its class, by the argument that chose it, or by a list that is empty for some: every difference is
a method here, or a value that the other file uses.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ...errors import UsageError
from ..layout.layout import FlatLayout, ParamSpec, Span
from .layout_views import ShardViews, shard_of
from .param_refs import Listed, ParamRef
from .states import Left
from .write_tracker import FlatParameter

Sums = list[tuple[torch.Tensor, torch.Tensor]]  # local tensors: add the second of each pair to the first


@dataclass(frozen=True)
class FaceWords:
    """The words for a face in messages.

    Attributes:
        argument, value: the user's argument that chooses it, and its value.
        setting: both in source form.
        holder: the name of the parameter that has the gradients if leaves have none.
        remedy: how to get holders that are the leaves; "" if there is no way.
        names: why a search for parameters by their names finds none; "" if it does.
        unstepped: why an optimizer that has a leaf never updates it, and what to do.
    """

    argument: str
    value: str
    setting: str
    holder: str = "the parameter"
    remedy: str = ""
    names: str = ""
    unstepped: str = ""

    @property
    def or_remedy(self) -> str:
        """The end of a sentence: what to do."""
        return f", or {self.remedy}" if self.remedy else ""


class Face(Protocol):
    """The form of one handle's parameters at rest. [Note: faces]

    A face keeps the leaves and the views of the shard, but no reference to the handle, so that it cannot keep a deleted
    model alive. Every index is that of a leaf, in layout order. No method communicates. Method bodies here are right
    for holders that are plain tensors in memory of the shard, one for each leaf.

    Attributes:
        holders: the parameters that modules list and optimizers step on, the same objects for as long as the handle
            lives, unless a user replaces one of them.
        words: for messages.
        holders_are_leaves: whether the leaves are the holders, so that autograd and users share their `.grad`.
        shares_holder: whether all leaves have one holder, so that they share its states and settings of an optimizer.
        leaves: the leaves.
        originals: the parameters for which the face was made, the user's: they show whole parameters while users have
            these (`summon_full_params()`).
        leaves_are_private: whether the `.grad` of leaves is that of their holders while no unit computes with them
            ([Note: two lives]).
        originals_get_grads: whether `originals` have a `.grad` of their own, so that hooks of users on them can run.
        showing: the holders that are views of the shard, if any are.
        holders_refuse: whether a guard lets holders refuse to be used from a forward to the end of its backward.
        computes: whether modules hold the leaves instead of other holders now.
        users_swap_holders: whether users may swap holders with other objects, so that nobody may refer to these, not
            even weakly.
        present: the leaves whose holders have a gradient on this rank, if any rank has one.
        gaps: the padding of the unsharded form to which users can write.
        counters: tensors whose versions count writes through holders that the shard's version does not count; always
            the same list.
        misses_data_writes: whether writes to the `.data` of holders change no version.
        release: where gradients have memory that is kept for the next ones: releases it, if users have dropped them;
            returns whether they have. Called when a forward or a backward begins.
        flags: whether each leaf requires a gradient, if that is known without reading it from the leaves.
        flagged: for each leaf, the object on which users set `requires_grad` now, which others follow later; or one
            for all of them.
    """

    holders: list[nn.Parameter]
    words: FaceWords
    holders_are_leaves: bool = False
    shares_holder: bool = False
    leaves: Sequence[nn.Parameter]
    originals: Sequence[nn.Parameter]
    leaves_are_private: bool = False
    originals_get_grads: bool = False
    showing: Sequence[nn.Parameter] = ()
    holders_refuse: bool = False
    computes: bool = False
    users_swap_holders: bool = False
    misses_data_writes: bool = False
    present: Container[int]
    gaps: Sequence[Span] = ()
    counters: list[torch.Tensor]
    release: Callable[[], bool] | None = None
    flags: tuple[bool, ...] | None = None
    flagged: Sequence[nn.Parameter]
    _at_rest: ShardViews
    _dtype: torch.dtype

    def holder_of(self, index: int) -> nn.Parameter:
        """The parameter that an optimizer steps on in order to step on that leaf."""
        return self.holders[index]

    def leaf_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The leaf of one of the `originals`; `parameter` itself if it is another."""
        return parameter

    def objects_of(self, index: int) -> list[nn.Parameter]:
        """The parameters that stand for that leaf alone."""
        return [self.leaves[index], self.holders[index]]

    def name_of_holder(self, number: int) -> str:
        """The name of that holder in messages."""
        return self.words.holder

    def check_copied(self, what: str) -> None:
        """Refuse a unit whose unsharded form becomes a copy of the shard, by `what`, if holders are its leaves."""
        return

    def list_in(self, module: nn.Module, name: str) -> list[ParamRef]:
        """Let `module` list, under `name`, a holder that stands in the place of no leaf, if there is one. Returns its
        place."""
        return []

    def put(self, param_ref: ParamRef) -> None:
        """Let a module hold, in the place `param_ref` of a leaf or of a flat parameter, the parameter for that place at
        rest; `compute` and `rest` include that place from now on."""

    def list_whole(self, param_ref: ParamRef) -> None:
        """Let a module list, in the place `param_ref` of a leaf, the parameter that shows the whole one while users
        have it, until `put`."""
        param_ref.register()

    def leave(self, param_ref: ParamRef) -> None:
        """Undo `put`. Called for distributed holders only."""

    def compute(self) -> None:
        """Let modules hold the leaves, which are about to be unsharded."""

    def rest(self) -> None:
        """End `compute`; calls `follow_requires_grad` if users have set it on leaves."""

    def after_forward(self, *, requested: bool, in_use: bool) -> Left:
        """A forward has left the leaves unsharded, for the backward or since a user has `requested` it; `in_use`: by
        modules of other units. Decides what modules hold until they are used again."""
        return Left.LISTED

    def displaced(self) -> set[int]:
        """The leaves whose places in modules hold other objects, between `compute` and `rest`. If modules hold the same
        at any time, changes are found at rest."""
        return set()

    def take_back(self) -> None:
        """Let modules hold the parameters that they should, in these places."""
        return

    def replaced(self) -> list[int]:
        """The leaves whose holders, if `users_swap_holders`, do not show the shard: the user replaced their memory.
        Called at rest."""
        return []

    def value_of(self, index: int, held: nn.Parameter) -> torch.Tensor:
        """The value of `held`, a user's replacement for a holder, for the shard: in the shape of `ShardViews.views`, or
        in that of the whole parameter.

        Raises:
            UsageError: it lies on other ranks, or is split differently.
        """
        return held.detach()

    def adopt(self, index: int, held: nn.Parameter) -> bool:
        """Let `held`, a user's replacement for a holder whose value is in the shard already, show the shard from now
        on, if it can be a holder; then `holder_of(index)` returns it. Returns False if an optimizer that has taken it
        for one would never update it."""
        return False

    def local_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's local tensor of a holder, of its `.grad`, or of a state that an optimizer made like one."""
        return value

    def like_holder(self, indices: tuple[int, ...], piece: torch.Tensor) -> torch.Tensor:
        """A view of `piece`, laid out like these leaves in the shard, in the form that the `.grad` of their holder, or
        a state that an optimizer keeps for it, can have."""
        return piece

    def piece_of(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """This rank's piece of `value` that belongs to a leaf; `value` itself if it is not like the holder. The inverse
        of `like_holder` if each holder has one leaf."""
        return value

    def elements_of(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """The elements that the holder of this leaf has, of `flat`, laid out like the shard; a view, or `flat`."""
        return self._at_rest.view_of(flat, index)

    def elements_in(self, index: int, elements: torch.Tensor) -> torch.Tensor:
        """This leaf's own of such `elements`."""
        return elements

    def joined(self, elements: Mapping[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """A tensor laid out like the shard with such `elements`, by leaf, and zeros for other holders; themselves, if
        they are all of it."""
        flat = self._at_rest.zeros(dtype)
        for index, each in elements.items():
            self._at_rest.view_of(flat, index).copy_(each)
        return flat

    def views_of_shard(self, *, is_whole: bool) -> Sequence[nn.Parameter]:
        """The parameters that show the shard; `is_whole`: it is the unsharded form, too."""
        return self.showing or (self.leaves if is_whole else ())

    def moved(self, at_rest: ShardViews, shard: torch.Tensor) -> None:
        """Use `shard` as the handle's from now on (also at first), maybe with a new dtype or device; `at_rest`
        has its views. Precondition: holders have no `.grad`. Postcondition: they show the shard."""
        self._at_rest, self._dtype, self.present = at_rest, shard.dtype, frozenset(at_rest.present)

    def follow_requires_grad(self, *, of_leaves: bool = True) -> None:
        """Copy the `requires_grad` that users have set on holders to the leaves, or the one that they have set on
        leaves to distributed holders. Called only if these differ. `of_leaves`: refuse what users may not set on
        leaves; else that is refused if gradients are `missing`, or next time."""

    def check_missing(self, indices: Iterable[int]) -> None:
        """No gradient came for these leaves, which count as zero: refuse that if the reason is a `requires_grad` which
        users may not set on them."""
        return

    def take_grads(self) -> Mapping[int, torch.Tensor]:
        """A backward begins: leave no `.grad` on the leaves, some of which have one. Returns those of leaves that are
        holders, by index."""
        for leaf in self.leaves:
            set_own_grad(leaf, None)
        return {}

    def give_grads(self, taken: Mapping[int, torch.Tensor]) -> None:
        """Undo `take_grads`."""
        return

    def grads_of_leaves(self) -> Sequence[torch.Tensor | None]:
        """The `.grad` of this rank's piece of each leaf, in the shape of `ShardViews.views_of`; [] if no leaf has
        one."""
        return [holder.grad for holder in self.holders]

    def add_grads(self, total: torch.Tensor, trained: frozenset[int], taken: Mapping[int, torch.Tensor]) -> Sums:
        """Make `total`, of shape (shard_numel,), the `.grad` of the holders of `trained` leaves; if a holder has a
        `.grad` already, return that with the tensor to add to it.

        `taken`: the `.grad` of leaves that was taken away before the backward; it is restored. The gradients own the
        memory of `total` afterwards.
        """
        if taken:
            self.give_grads(taken)
        holders, fits = self.holders, total.dtype == self._dtype
        sums = []
        for i, grad in zip(*self._at_rest.present_in(total), strict=True):
            if i not in trained:
                continue
            if (old := holders[i].grad) is not None:
                sums.append((old, grad))
            elif fits:
                holders[i].grad = grad
            else:
                assign_grad(holders[i], grad)
        return sums

    def window_pieces(
        self, flat: torch.Tensor, awaited: frozenset[int]
    ) -> list[tuple[nn.Parameter, torch.Tensor, tuple[int, ...]]]:
        """For unsharded gradients `flat`, 1-D and padded: each holder of `awaited` leaves, this rank's piece of its
        gradient, and the leaves of that. [Note: marks]"""
        pieces = enumerate(zip(self.holders, self._at_rest.views_in(flat), strict=True))
        return [(holder, piece, (i,)) for i, (holder, piece) in pieces if i in awaited]


class _Adoptions:
    """Users' replacements for holders in this process.

    Attributes:
        count: their number; code that caches facts about holders computes them again when it changes.
    """

    count = 0


adoptions = _Adoptions()


class FaceMaker(Protocol):
    """Makes the face of a handle; the classes below do."""

    @classmethod
    def lay_out(cls, specs: Sequence[ParamSpec], *, world: int, align: int) -> FlatLayout:
        """The layout of the handle's parameters, where kernels expect memory at multiples of `align` elements."""

    def __call__(
        self, leaves: Sequence[nn.Parameter], flat_param: FlatParameter, layout: FlatLayout, rank: int
    ) -> Face:
        """A face of `leaves`, whose shard `flat_param` shows; `moved` is called before any other method."""


class OriginalFace(Face):
    """`use_orig_params=True`: the holders are the leaves themselves, of which this rank has the whole."""

    holders_are_leaves = originals_get_grads = True
    words = FaceWords(
        "use_orig_params",
        "True",
        "use_orig_params=True",
        unstepped=(
            "as modules list it after unshard(), or where a forward has assigned it to another attribute: it is never "
            "updated. Build the optimizer from model.parameters() before, or after reshard()"
        ),
    )

    def __init__(
        self, leaves: Sequence[nn.Parameter], flat_param: FlatParameter, layout: FlatLayout, rank: int
    ) -> None:
        self.holders, self.counters = list(leaves), list[torch.Tensor]()
        self.leaves = self.flagged = self.originals = self.showing = self.holders

    def check_copied(self, what: str) -> None:
        raise UsageError(
            f"{what} and each rank has whole parameters ({self.words.setting}): they could not be used as they are any "
            "more. Convert the module before wrapping, or pass another param_dtype"
        )

    def put(self, param_ref: ParamRef) -> None:
        param_ref.register()

    def take_grads(self) -> Mapping[int, torch.Tensor]:
        taken = {i: leaf.grad for i, leaf in enumerate(self.holders) if leaf.grad is not None}
        for i in taken:
            self.holders[i].grad = None
        return taken

    def give_grads(self, taken: Mapping[int, torch.Tensor]) -> None:
        for i, grad in taken.items():
            assign_grad(self.holders[i], grad)


class FlatFace(Face):
    """`use_orig_params=False`: one flat parameter, 1-D, which is the shard."""

    words = FaceWords(
        "use_orig_params",
        "False",
        "use_orig_params=False",
        holder="the flat parameter",
        remedy="wrap with use_orig_params=True",
        names=(
            "so param groups selected by names such as 'bias' are empty; use_orig_params=True keeps the original names"
        ),
        unstepped=(
            "which was flattened: with use_orig_params=False it is never updated. Build the optimizer from "
            "model.parameters() after wrapping, or wrap with use_orig_params=True"
        ),
    )
    shares_holder = True
    _flat_ref: ParamRef | None = None  # where a module has the flat parameter

    def __init__(
        self, leaves: Sequence[nn.Parameter], flat_param: FlatParameter, layout: FlatLayout, rank: int
    ) -> None:
        self._leaves, self._flat_param, self._layout, self._rank = leaves, flat_param, layout, rank
        self.leaves = self.originals = leaves
        self._every = self.present = tuple(range(len(leaves)))
        self.gaps = layout.gaps
        self.holders: list[nn.Parameter] = [flat_param]
        self.flagged = self.holders
        self.counters: list[torch.Tensor] = []
        self._followed = any(map(REQUIRES_GRAD, leaves))  # the value that the leaves have
        self._listed = Listed()
        self.flags = (self._followed,) * len(leaves)

    @classmethod
    def lay_out(cls, specs: Sequence[ParamSpec], *, world: int, align: int) -> FlatLayout:
        return FlatLayout.pack(specs, world=world)  # FSDP1's flat parameter has padding only at its end

    def holder_of(self, index: int) -> nn.Parameter:
        return self._flat_param

    def objects_of(self, index: int) -> list[nn.Parameter]:
        return [self.leaves[index]]

    def list_in(self, module: nn.Module, name: str) -> list[ParamRef]:
        self._flat_ref = made = ParamRef(module, name, name, self._flat_param)
        return [made]

    def put(self, param_ref: ParamRef) -> None:
        param_ref.register_for(self._listed, with_leaves=param_ref is not self._flat_ref)

    def compute(self) -> None:
        self._listed.leaves = True

    def rest(self) -> None:
        self._listed.leaves = False

    def after_forward(self, *, requested: bool, in_use: bool) -> Left:
        if in_use:
            return Left.COMPUTING
        self.rest()
        return Left.HELD

    def adopt(self, index: int, held: nn.Parameter) -> bool:
        return True  # it was in the place of a leaf, and optimizers have the flat parameter

    def elements_of(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        return flat

    def elements_in(self, index: int, elements: torch.Tensor) -> torch.Tensor:
        return elements[self._layout.span_in_shard(index, self._rank).slice]

    def joined(self, elements: Mapping[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return next(iter(elements.values())) if elements else super().joined(elements, dtype)

    def moved(self, at_rest: ShardViews, shard: torch.Tensor) -> None:
        self._at_rest = at_rest

    def follow_requires_grad(self, *, of_leaves: bool = True) -> None:
        wanted = self._flat_param.requires_grad
        if wanted is self._followed and (wanted or not of_leaves):
            return  # a frozen leaf lacks its gradient, which is found (`check_missing`); a trained one's would be lost
        if (found := list(map(REQUIRES_GRAD, self._leaves))).count(wanted) != len(self._leaves):
            if wanted is self._followed:
                self._refuse_of_one(found.index(not wanted))
            for leaf in self._leaves:
                leaf.requires_grad_(wanted)
        if wanted is not self._followed:  # users may have set it on all leaves, too
            self._followed, self.flags = wanted, (wanted,) * len(self._leaves)

    def check_missing(self, indices: Iterable[int]) -> None:
        for i in indices:
            if self._followed and not self._leaves[i].requires_grad:
                self._refuse_of_one(i)

    def _refuse_of_one(self, index: int) -> NoReturn:
        words, wanted = self.words, self._followed
        raise UsageError(
            f"requires_grad of {self._layout.params[index].name!r} was set to {not wanted} after wrapping. With "
            f"{words.setting} it is part of a flat parameter, whose requires_grad ({wanted}) applies to all of it. "
            f"Set it before wrapping, or set that of the flat parameter in model.parameters(){words.or_remedy}"
        )

    def grads_of_leaves(self) -> Sequence[torch.Tensor | None]:
        flat = self._flat_param.grad
        return [] if flat is None else self._at_rest.views_of(flat)

    def add_grads(self, total: torch.Tensor, trained: frozenset[int], taken: Mapping[int, torch.Tensor]) -> Sums:
        flat = self._flat_param
        if flat.grad is not None:
            return [(flat.grad, total)]
        assign_grad(flat, total)
        return []

    def window_pieces(
        self, flat: torch.Tensor, awaited: frozenset[int]
    ) -> list[tuple[nn.Parameter, torch.Tensor, tuple[int, ...]]]:
        return [(self._flat_param, shard_of(flat, self._layout, self._rank), self._every)]


REQUIRES_GRAD = attrgetter("requires_grad")
_GRAD: Any = torch.Tensor.grad
# The `.grad` of a tensor itself: classes of parameters may wait there, or answer for another one.
own_grad: Callable[[torch.Tensor], torch.Tensor | None] = _GRAD.__get__
set_own_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD.__set__


def assign_grad(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """`parameter.grad = grad`, also if low-precision gradients are kept for a master of another dtype."""
    if grad.dtype != parameter.dtype:
        parameter.grad_dtype = None  # any: with this one, autograd would cast gradients before they are scaled
    parameter.grad = grad


def fact_of(faces: Iterable[Face]) -> tuple[str, str]:
    """The fact about the faces of a unit that ranks compare: the argument that chooses them, and its value."""
    words = next((face.words for face in faces), None)
    return (words.argument, words.value) if words is not None else ("use_orig_params", "")
