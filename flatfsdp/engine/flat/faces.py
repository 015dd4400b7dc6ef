"""The form of a handle's parameters between iterations: for modules, for optimizers, for code that reads a `.grad`.

[Note: faces] Inside a forward and a backward, modules compute with the *leaves*, and autograd accumulates gradients in
them. At rest users meet the handle's *face*: *holders*, which modules list, optimizers step on, and whose `.grad` is
the reduced gradient. They are the user's own parameters, each with its piece of the shard, one flat parameter for all
of them (`FlatFace`), or a distributed tensor for each. A handle is given its face as a value, and no other file tests
the class of a face: every difference is a method or an attribute here (two are questions: `is_flat`, `is_distributed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ...errors import UsageError
from ..layout.layout import FlatLayout, ParamSpec
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


class Keeps(Protocol):
    """Memory kept from gradients that were shown, for showing the next ones.

    Attributes:
        shows: whether current gradients use the memory.
    """

    shows: bool

    def release(self) -> bool:
        """Release the memory if users have dropped all of the gradients; returns whether they have."""


class Face(Protocol):
    """The form of one handle's parameters at rest. [Note: faces]

    A face keeps the leaves and the views of the shard, but no reference to the handle, so that it cannot keep a deleted
    model alive. Every index is that of a leaf, in layout order. No method communicates. Method bodies here are right
    for holders that are plain tensors in memory of the shard, one for each leaf.

    Attributes:
        holders: the parameters that modules list and optimizers step on, the same objects for as long as the handle
            lives, unless a user replaces one of them.
        words: for messages.
        apart: the holders that are other objects than the leaves: all, or none.
        is_flat: whether one holder has all of the shard, so that an optimizer has one state for it.
        leaves: the leaves.
        originals: the parameters for which the face was made, the user's: they show whole parameters while users have
            these (`summon_full_params()`).
        private: the leaves that users do not have: all, or none. [Note: two lives]
        graded: those of `originals` that have a `.grad` of their own: all, or none.
        pieces: the holders that show their pieces of the shard as views of it, if any do.
        refusing: the holders that a guard lets refuse to be used from a forward to the end of its backward.
        computes: whether modules hold the leaves instead of other holders now.
        is_distributed: whether holders are distributed tensors of whole parameters. Torch's own functions see whole
            parameters (norms, state dicts), and every rank has each gradient.
        counters: tensors whose versions count writes through holders that the shard's version does not count; always
            the same list.
        kept: memory to release when a forward or a backward begins, if any.
        flat_ref: of a flat face: where a module has the flat parameter.
        flags: whether each leaf requires a gradient, if that is known without reading it from the leaves.
        flagged: for each leaf, the object on which users set `requires_grad` now, which others follow later.
    """

    holders: list[nn.Parameter]
    words: FaceWords
    apart: Sequence[nn.Parameter] = ()
    is_flat: bool = False
    is_distributed: bool = False
    leaves: Sequence[nn.Parameter]
    originals: Sequence[nn.Parameter]
    private: Sequence[nn.Parameter] = ()
    graded: Sequence[nn.Parameter] = ()
    pieces: Sequence[nn.Parameter] = ()
    refusing: Sequence[nn.Parameter] = ()
    computes: bool = False
    counters: list[torch.Tensor]
    kept: Keeps | None = None
    flat_ref: ParamRef | None = None
    flags: tuple[bool, ...] | None = None
    flagged: Sequence[nn.Parameter]
    _at_rest: ShardViews

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
        """The leaves whose holders should show their piece of the shard but do not: the user replaced their memory.
        Called at rest; those that are in `pieces` are left out."""
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
        on, if it can be a holder; then `holder_of(index)` returns it. Returns whether it may be one."""
        return False

    def local_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's local tensor of a holder, of its `.grad`, or of a state that an optimizer made like one."""
        return value

    def like_holder(self, indices: tuple[int, ...], piece: torch.Tensor) -> torch.Tensor:
        """A view of `piece`, laid out like these leaves in the shard, in the form that the `.grad` of their holder, or
        a state that an optimizer keeps for it, can have."""
        return piece

    def piece_of(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of `value` that belongs to a leaf; `value` itself if it is not like the holder. The inverse
        of `like_holder` if each holder has one leaf."""
        return value

    def moved(self, at_rest: ShardViews, shard: torch.Tensor) -> None:
        """Use `shard` as the handle's from now on (also at first), maybe with a new dtype or device; `at_rest`
        has its views. Precondition: holders have no `.grad`. Postcondition: they show the shard."""

    def follow_requires_grad(self) -> None:
        """Copy the `requires_grad` that users have set on holders to the leaves, or the one that they have set on
        leaves to distributed holders. Called only if these differ."""

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
        """The `.grad` of each leaf's piece of the shard, in the shape of `ShardViews.views_of`; [] if no leaf has
        one."""

    def add_grads(self, total: torch.Tensor, trained: frozenset[int], taken: Mapping[int, torch.Tensor]) -> Sums:
        """Make `total`, of shape (shard_numel,), the `.grad` of the holders of `trained` leaves; if a holder has a
        `.grad` already, return that with the tensor to add to it.

        `taken`: the `.grad` of leaves that was taken away before the backward; it is restored. The gradients own the
        memory of `total` afterwards.
        """

    def window_shares(
        self, flat: torch.Tensor, awaited: frozenset[int]
    ) -> list[tuple[nn.Parameter, torch.Tensor, tuple[int, ...]]]:
        """For unsharded gradients `flat`, 1-D and padded: each holder of `awaited` leaves, this rank's part of its
        gradient, and the leaves of that part. [Note: marks]"""
        shares = enumerate(zip(self.holders, self._at_rest.views_in(flat), strict=True))
        return [(holder, share, (i,)) for i, (holder, share) in shares if i in awaited]


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
    """`use_orig_params=True`: the holders are the leaves themselves, each with its piece of the shard."""

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
        self.leaves = self.flagged = self.originals = self.graded = self.pieces = self.holders

    def check_copied(self, what: str) -> None:
        raise UsageError(
            f"{what} and each rank has whole parameters ({self.words.setting}): they could not be used as they are any "
            "more. Convert the module before wrapping, or pass another param_dtype"
        )

    def put(self, param_ref: ParamRef) -> None:
        param_ref.register()

    def moved(self, at_rest: ShardViews, shard: torch.Tensor) -> None:
        self._at_rest, self._dtype = at_rest, shard.dtype

    def take_grads(self) -> Mapping[int, torch.Tensor]:
        taken = {i: leaf.grad for i, leaf in enumerate(self.holders) if leaf.grad is not None}
        for i in taken:
            self.holders[i].grad = None
        return taken

    def give_grads(self, taken: Mapping[int, torch.Tensor]) -> None:
        for i, grad in taken.items():
            assign_grad(self.holders[i], grad)

    def grads_of_leaves(self) -> Sequence[torch.Tensor | None]:
        return [leaf.grad for leaf in self.holders]

    def add_grads(self, total: torch.Tensor, trained: frozenset[int], taken: Mapping[int, torch.Tensor]) -> Sums:
        leaves, fits = self.holders, total.dtype == self._dtype
        sums = []
        for i, grad in zip(*self._at_rest.pieces_of(total), strict=True):
            if i not in trained:
                continue
            if i in taken:
                sums.append((taken[i], grad))
            elif fits:
                leaves[i].grad = grad
            else:
                assign_grad(leaves[i], grad)
        for i, old in taken.items():
            assign_grad(leaves[i], old)
        return sums


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
    is_flat = True
    flat_ref: ParamRef

    def __init__(
        self, leaves: Sequence[nn.Parameter], flat_param: FlatParameter, layout: FlatLayout, rank: int
    ) -> None:
        self._leaves, self._flat_param, self._layout, self._rank = leaves, flat_param, layout, rank
        self.leaves = self.flagged = self.originals = leaves
        self._every = tuple(range(len(leaves)))
        self.holders: list[nn.Parameter] = [flat_param]
        self.apart = self.holders
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

    def put(self, param_ref: ParamRef) -> None:
        param_ref.register_for(self._listed, with_leaves=param_ref is not self.flat_ref)

    def compute(self) -> None:
        self._listed.leaves = True

    def rest(self) -> None:
        self._listed.leaves = False

    def after_forward(self, *, requested: bool, in_use: bool) -> Left:
        if in_use:
            return Left.COMPUTING
        self.rest()
        return Left.SET_ASIDE

    def moved(self, at_rest: ShardViews, shard: torch.Tensor) -> None:
        self._at_rest = at_rest

    def follow_requires_grad(self) -> None:
        wanted = self._flat_param.requires_grad
        if (found := list(map(REQUIRES_GRAD, self._leaves))).count(wanted) != len(self._leaves):
            if wanted is self._followed:
                self._refuse_of_one(found.index(not wanted))
            for leaf in self._leaves:
                leaf.requires_grad_(wanted)
        if wanted is not self._followed:  # users may have set it on all leaves, too
            self._followed, self.flags = wanted, (wanted,) * len(self._leaves)

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

    def window_shares(
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
