"""What a handle's parameters look like between iterations: to modules, to optimizers, to whoever reads a `.grad`.

[Note: faces] Inside a forward and a backward the *leaves* are what modules compute with and what autograd brings
gradients to. At rest users meet the handle's *face*: *holders*, which modules list, optimizers step on, and reduced
gradients are the `.grad` of. They are the leaves themselves (`OriginalFace`), one flat parameter for all of them
(`FlatFace`), or a distributed tensor for each. A handle is given its face as a value, and no code checks which it is:
what they do differently is a method here, or one of the few facts that the interface has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ...errors import UsageError
from ..layout.layout import FlatLayout
from .layout_views import ShardViews, shard_of
from .param_refs import ParamRef
from .write_tracker import FlatParameter

Sums = list[tuple[torch.Tensor, torch.Tensor]]  # local tensors: to the first of each pair the second is to be added


@dataclass(frozen=True)
class FaceWords:
    """How messages call a face.

    Attributes:
        argument, value: the argument of users that chooses it, and what that is.
        setting: both as they are written.
        holder: what has the gradients where leaves have none.
        remedy: how to get holders that are the leaves; "" where there is no way.
        names: why a search for parameters by their names finds none; "" where it does.
    """

    argument: str
    value: str
    setting: str
    holder: str = "the parameter"
    remedy: str = ""
    names: str = ""

    @property
    def or_remedy(self) -> str:
        """The end of a sentence: what to do."""
        return f", or {self.remedy}" if self.remedy else ""


class Keeps(Protocol):
    """What is kept of gradients that were shown, to show the next ones.

    Attributes:
        indices: the leaves that have them.
        shows: it has their memory.
    """

    indices: list[int]
    shows: bool

    def release(self) -> bool:
        """Let go of the memory, if users have dropped all of the gradients; whether that is so."""


class Face(Protocol):
    """What the parameters of one handle look like at rest. [Note: faces]

    A face keeps the leaves and the views of the shard, and never the handle: nothing that it has keeps a deleted model
    alive. Every index is that of a leaf, in layout order. No method communicates. What has a body here is right for
    holders that are plain tensors in memory of the shard, one for each leaf.

    Attributes:
        holders: what modules list and optimizers step on, the same objects for as long as the handle lives, unless a
            user puts another one in the place of one of them.
        words: for messages.
        holds_leaves: whether the holders are the leaves, so that gradients come to where users see them, and leaves
            are described as their shards for as long as users may meet them.
        is_flat: whether one holder has all of the shard, so that an optimizer has one state for it.
        by_parameter: whether each parameter has a holder of its own, which kernels want to begin on 16 bytes.
        is_distributed: whether holders are distributed tensors of whole parameters: modules hold them at rest, and the
            leaves for as long as these are unsharded (`compute`, `rest`). Torch's own functions see whole parameters
            (norms, state dicts), and every rank has each gradient.
        counters: tensors whose versions count what is written through holders and not seen in the shard's; always the
            same list.
        displaced: of distributed holders, gives the leaves in whose places modules hold something else, between
            `compute` and `rest`. Of others, whose modules hold the same at any time, changes are found at rest.
        kept: what is released where a forward begins, or a backward; None: nothing.
    """

    holders: list[nn.Parameter]
    words: FaceWords
    holds_leaves: bool
    is_flat: bool
    by_parameter: bool
    is_distributed: bool = False
    counters: list[torch.Tensor]
    displaced: Callable[[], set[int]]
    kept: Keeps | None = None
    _at_rest: ShardViews

    def holder_of(self, index: int) -> nn.Parameter:
        """What an optimizer steps on in order to step on that leaf."""
        return self.holders[index]

    def put(self, param_ref: ParamRef) -> None:
        """Let a module hold what it holds at rest, in the place `param_ref` of a leaf; `compute` and `rest` reach that
        place from now on."""

    def leave(self, param_ref: ParamRef) -> None:
        """Undo `put`. Called of distributed holders only."""

    def compute(self) -> None:
        """Let modules hold the leaves, which are about to be unsharded. Called of distributed holders only."""

    def rest(self) -> None:
        """End of `compute`: `follow_requires_grad`, where users have set it on leaves. Called of distributed holders
        only."""

    def replaced(self) -> list[int]:
        """The leaves whose holders do not show their place in the shard, though they should: the user put something
        in the place of their memory. Called of distributed holders only, at rest."""
        return []

    def value_of(self, index: int, held: nn.Parameter) -> torch.Tensor:
        """What `held`, which a user put in the place of a holder, has for the shard: of the shape that
        `ShardViews.views` has, or of the whole parameter's.

        Raises:
            UsageError: it lies on other ranks, or is split in another way.
        """
        return held.detach()

    def adopt(self, index: int, held: nn.Parameter) -> None:
        """`held` is what a user put in the place of a holder, its value is in the shard: show the shard in it from now
        on, if it can be a holder; that is `holder_of(index)` then."""

    def local_of(self, value: torch.Tensor) -> torch.Tensor:
        """What this rank has of a holder, of its `.grad`, or of a state that an optimizer made like one."""
        return value

    def like_holder(self, indices: tuple[int, ...], piece: torch.Tensor) -> torch.Tensor:
        """`piece`, laid out as the shard has these leaves, as it can be the `.grad` of their holder, or a state that an
        optimizer keeps of it. A view."""
        return piece

    def piece_of(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """What this rank has of a leaf's part of `value` (see `like_holder`, whose inverse this is where holders have
        one leaf each); `value` itself where it is not like the holder."""
        return value

    def moved(self, at_rest: ShardViews, shard: torch.Tensor) -> None:
        """`shard` is the handle's from now on (also at first), of a dtype and on a device that may be new; `at_rest`
        are its views. Holders have no `.grad`, and show it when this returns."""

    def show_flat(self, flat: torch.Tensor) -> None:
        """Let the flat parameter show `flat`, 1-D and of any length, if that is what modules list. The shard ends
        it."""
        return

    def follow_requires_grad(self) -> None:
        """Give the leaves the `requires_grad` that users have set on holders, and distributed holders that which they
        have set on leaves. Not called where these are the same."""

    def grads_of_leaves(self) -> Sequence[torch.Tensor | None]:
        """What is the `.grad` of each leaf's place in the shard; [] where there is none of any. Of the shape that
        `ShardViews.views_of` gives."""

    def add_grads(self, total: torch.Tensor, trained: frozenset[int], taken: Mapping[int, torch.Tensor]) -> Sums:
        """Make `total`, of shape (shard_numel,), the `.grad` of the holders of `trained` leaves; where one has a
        `.grad` already, return that with what is to be added to it.

        `taken`: what was taken from the `.grad` of leaves before the backward, which is shown again. The memory of
        `total` belongs to the gradients afterwards.
        """

    def shown(self) -> Keeps | None:
        """`kept`, if holders have the gradients that it showed last, and show their places in the shard; None where
        that is not known."""
        return None

    def window_shares(
        self, flat: torch.Tensor, awaited: frozenset[int]
    ) -> list[tuple[nn.Parameter, torch.Tensor, tuple[int, ...]]]:
        """Of gradients `flat`, unsharded, 1-D and padded: each holder of leaves that are `awaited`, this rank's part of
        it, and the leaves of that part. [Note: marks]"""
        rows = enumerate(zip(self.holders, self._at_rest.views_in(flat), strict=True))
        return [(holder, share, (i,)) for i, (holder, share) in rows if i in awaited]


class _Adoptions:
    """What users put in the place of holders in this process.

    Attributes:
        count: how many there were: who keeps what he found out of holders looks again.
    """

    def __init__(self) -> None:
        self.count = 0
        self._passed_over: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}

    def pass_over(self, held: nn.Parameter, name: str) -> None:
        """The holder called `name` stays one, and only values were taken of what was put in its place."""
        self.count += 1
        known, key = self._passed_over, id(held)

        def forget(gone: weakref.ref[nn.Parameter]) -> None:
            if (found := known.get(key)) is not None and found[0] is gone:
                del known[key]

        known[key] = weakref.ref(held, forget), name

    def name_in_place_of(self, parameter: torch.Tensor) -> str | None:
        """What stayed a holder where only values were taken of `parameter`."""
        found = self._passed_over.get(id(parameter))
        return found[1] if found is not None and found[0]() is parameter else None


adoptions = _Adoptions()


class FaceMaker(Protocol):
    """What makes the face of a handle; the classes below are such."""

    by_parameter: bool

    def __call__(
        self, leaves: Sequence[nn.Parameter], flat_param: FlatParameter, layout: FlatLayout, rank: int
    ) -> Face:
        """A face of `leaves`, whose shard `flat_param` shows; `moved` is called before anything else."""


class OriginalFace(Face):
    """`use_orig_params=True`: the leaves themselves, each its piece of the shard."""

    words = FaceWords("use_orig_params", "True", "use_orig_params=True")
    holds_leaves, is_flat, by_parameter = True, False, True

    def __init__(
        self, leaves: Sequence[nn.Parameter], flat_param: FlatParameter, layout: FlatLayout, rank: int
    ) -> None:
        self.holders, self.counters = list(leaves), list[torch.Tensor]()

    def put(self, param_ref: ParamRef) -> None:
        param_ref.register()

    def moved(self, at_rest: ShardViews, shard: torch.Tensor) -> None:
        self._at_rest, self._dtype = at_rest, shard.dtype

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
        names="so groups that are picked by names such as 'bias' are empty; use_orig_params=True keeps the original "
        "names",
    )
    holds_leaves, is_flat, by_parameter = False, True, False

    def __init__(
        self, leaves: Sequence[nn.Parameter], flat_param: FlatParameter, layout: FlatLayout, rank: int
    ) -> None:
        self._leaves, self._flat_param, self._layout, self._rank = leaves, flat_param, layout, rank
        self._every = tuple(range(len(leaves)))
        self.holders: list[nn.Parameter] = [flat_param]
        self.counters: list[torch.Tensor] = []
        self._followed = any(map(REQUIRES_GRAD, leaves))  # what was given to the leaves

    def holder_of(self, index: int) -> nn.Parameter:
        return self._flat_param

    def put(self, param_ref: ParamRef) -> None:
        param_ref.unregister()

    def moved(self, at_rest: ShardViews, shard: torch.Tensor) -> None:
        self._at_rest = at_rest

    def show_flat(self, flat: torch.Tensor) -> None:
        self._flat_param.data = flat

    def follow_requires_grad(self) -> None:
        wanted = self._flat_param.requires_grad
        if (found := list(map(REQUIRES_GRAD, self._leaves))).count(wanted) != len(self._leaves):
            if wanted is self._followed:
                self._refuse_of_one(found.index(not wanted))
            for leaf in self._leaves:
                leaf.requires_grad_(wanted)
        self._followed = wanted

    def _refuse_of_one(self, index: int) -> NoReturn:
        words, wanted = self.words, self._followed
        raise UsageError(
            f"requires_grad of {self._layout.params[index].name!r} was set to {not wanted} after wrapping. With "
            f"{words.setting} it lies in a flat parameter, which requires a gradient as a whole ({wanted}). Set it "
            f"before wrapping, or that of the flat parameter in model.parameters(){words.or_remedy}"
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
# `parameter.grad = grad`, of a parameter whose gradient is not awaited.
set_grad: Callable[[torch.Tensor, torch.Tensor], None] = _GRAD.__set__


def assign_grad(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """`parameter.grad = grad`, also where low-precision gradients are kept for a master of another dtype."""
    if grad.dtype != parameter.dtype:
        parameter.grad_dtype = None  # any: with this one, autograd would cast what arrives before it is scaled
    parameter.grad = grad


def fact_of(faces: Iterable[Face]) -> tuple[str, str]:
    """What the ranks of a model compare of the faces of a unit: the argument that chooses them, and its value."""
    words = next((face.words for face in faces), None)
    return (words.argument, words.value) if words is not None else ("use_orig_params", "")


def pickled_face(options: Mapping[str, Any]) -> FaceMaker:
    """The face among a handle's `options` as pickles of earlier versions have them: as the argument that chose it."""
    return OriginalFace if options["use_orig_params"] else FlatFace
