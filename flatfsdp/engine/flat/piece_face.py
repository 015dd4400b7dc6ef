"""Original parameters that are the shard at any time, and private leaves with which their modules compute."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..layout.layout import FlatLayout, ParamSpec
from .faces import Face, OriginalFace
from .guard import ORIGINAL
from .layout_views import ShardViews
from .paired_face import PairedFace
from .param_refs import ParamRef
from .states import Left
from .write_tracker import FlatParameter


def _leaf_for(holder: nn.Parameter) -> nn.Parameter:
    """A parameter of the class of `holder`, with which it shares its attributes. [Note: marks of parameters]"""
    # `.data`: a version counter of its own.
    made = nn.Parameter(holder.data, holder.requires_grad)
    with contextlib.suppress(TypeError):  # objects of another layout
        made.__class__ = ORIGINAL[type(holder)]
    made.__dict__ = vars(holder)
    return made


@dataclass(frozen=True)
class PieceFaces:
    """Makes the faces of original parameters.

    Attributes:
        copied: whether the unsharded form is a copy of the shard on an axis of one rank, too: in another dtype, or on
            another device. Otherwise it is the shard itself there, and a parameter is its own leaf.
    """

    copied: bool

    @classmethod
    def lay_out(cls, specs: Sequence[ParamSpec], *, world: int, align: int) -> FlatLayout:
        return FlatLayout.pack(specs, world=world, align=align, pad_total=True)

    def __call__(
        self, leaves: Sequence[nn.Parameter], flat_param: FlatParameter, layout: FlatLayout, rank: int
    ) -> Face:
        make: type[PieceFace | OriginalFace] = PieceFace if self.copied or layout.world > 1 else OriginalFace
        return make(leaves, flat_param, layout, rank)


class PieceFace(PairedFace):
    """`use_orig_params=True`: the user's parameters, each this rank's piece of what it was. [Note: two lives]"""

    words = OriginalFace.words
    originals_get_grads = misses_data_writes = holders_refuse = True

    def __init__(
        self, leaves: Sequence[nn.Parameter], flat_param: FlatParameter, layout: FlatLayout, rank: int
    ) -> None:
        super().__init__([_leaf_for(each) for each in leaves], list(leaves))
        self.originals = self.showing = self.holders
        self._layout = layout

    # -- the shard ---------------------------------------------------------------------------------------------------

    def moved(self, at_rest: ShardViews, shard: torch.Tensor) -> None:
        super().moved(at_rest, shard)
        self.counters[:] = self.holders

    # -- modules -----------------------------------------------------------------------------------------------------

    def leaf_of(self, parameter: nn.Parameter) -> nn.Parameter:
        found = (leaf for leaf, holder in zip(self.leaves, self.holders, strict=True) if holder is parameter)
        return next(found, parameter)

    def name_of_holder(self, number: int) -> str:
        return repr(self._layout.params[number].name)

    def after_forward(self, *, requested: bool, in_use: bool) -> Left:
        if requested or in_use:
            return Left.REQUESTED if requested else Left.COMPUTING
        self.rest()
        return Left.SET_ASIDE

    def list_whole(self, param_ref: ParamRef) -> None:
        param_ref.hold(self.holders[self._index[id(param_ref.leaf)]])
