"""Flat tensors seen through their layout: unsharded parameters as N-D views, those of a shard as pieces.

Tensors that are split evenly over ranks are seen as two lists that pair up: the segments of an unsharded tensor, and
the pieces of a shard. Empty ones are left out, since they are not exchanged. [Note: pieces]
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..comm.tensor_groups import TensorGroup
from ..layout.layout import FlatLayout, ParamSpec, Part, Span

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
Form = tuple[tuple[int, ...], tuple[int, ...] | None]  # shape, and stride if it is not row-major


def dense(leaf: torch.Tensor) -> torch.Tensor:
    """`leaf`'s elements in memory order, 1-D, without a copy; `leaf` must be dense (channels_last is)."""
    if leaf.is_contiguous():
        return leaf.reshape(-1)
    return leaf.as_strided((leaf.numel(),), (1,), leaf.storage_offset())


def is_dense(leaf: torch.Tensor) -> bool:
    """Whether the elements of `leaf` fill their memory exactly once."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(leaf.stride(), leaf.shape, strict=True) if n > 1):
        if stride != expected:
            return leaf.numel() == 0
        expected *= size
    return True


def stored_in_order(tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """`tensor`, or a copy with this stride ([Note: stored order]); None to keep the order of one that is dense."""
    if stride is None:
        return tensor if is_dense(tensor) else tensor.contiguous()
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def spec_of(name: str, leaf: torch.Tensor, part: Part | None = None) -> ParamSpec:
    """The layout's entry for `leaf`, which must be dense; strides that are not row-major are kept. `part`: its position
    in a whole."""
    return ParamSpec(name, tuple(leaf.shape), tuple(leaf.stride()), part)


def full_views(flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """The parameters of `layout` as N-D views of `flat` (1-D, padded or not; also one number that is expanded)."""
    members = zip(layout.params, layout.spans, strict=True)
    return [_formed(flat.narrow(0, span.start, span.numel), (spec.shape, spec.stride)) for spec, span in members]


def _formed(elements: torch.Tensor, form: Form | None) -> torch.Tensor:
    """`elements`, 1-D, in this form; themselves if it is None."""
    shape, stride = form or (elements.shape, None)
    # The strides of a dense parameter would leave the memory of a number that is expanded.
    return elements.as_strided(shape, stride) if stride and elements.stride(0) else elements.view(shape)


def segments_of(flat: torch.Tensor, layout: FlatLayout) -> TensorGroup:
    """The segments of `flat` (unsharded, 1-D, padded), each of which holds a piece for every rank, as views; `flat`
    itself if there is only one."""
    return _slices(flat, [segment.span for segment in layout.segments])


def pieces_of(shard: torch.Tensor, layout: FlatLayout) -> TensorGroup:
    """The piece of each segment in `shard` (1-D), as views; `shard` itself if there is one segment."""
    return _slices(shard, layout.pieces_in_shard)


def own_pieces_of(flat: torch.Tensor, layout: FlatLayout, rank: int) -> list[torch.Tensor]:
    """The pieces of `rank` in `flat` (unsharded, 1-D, padded), as views."""
    found = [flat[span.slice] for span in layout.pieces(rank) if not span.is_empty]
    return found or [flat[layout.pieces(rank)[0].slice]]


def shard_of(flat: torch.Tensor, layout: FlatLayout, rank: int) -> torch.Tensor:
    """The shard of `rank` in `flat` (unsharded, 1-D, padded); a view if there is one segment."""
    pieces = own_pieces_of(flat, layout, rank)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _slices(flat: torch.Tensor, spans: Sequence[Span]) -> TensorGroup:
    found = [span for span in spans if not span.is_empty] or spans[:1]
    return TensorGroup([flat] if len(spans) == 1 else [flat.narrow(0, span.start, span.numel) for span in found])


class ShardViews:
    """Views of one shard for its leaves, and the division of tensors that are laid out like it.

    Attributes:
        views: for each leaf its view of the shard: a 1-D piece, maybe empty. One that is not to be cut has its own
            shape on the rank that has it, and no rows elsewhere.
        shown: the parameters that show the shard at rest, each with its view; none, or one for each.
        pieces: the shard's piece of each segment. [Note: pieces]
        empty: a tensor without elements, in the compute dtype, on the compute device.
        present: the leaves with elements here, or with none anywhere.
    """

    def __init__(
        self, shown: Sequence[nn.Parameter], layout: FlatLayout, rank: int, shard: torch.Tensor, empty: torch.Tensor
    ) -> None:
        self._layout = layout
        spans = [layout.span_in_shard(i, rank) for i in range(len(layout.params))]
        self._pieces = [(span.start, span.numel) for span in spans]
        self._owned = [layout.span_in_param(i, rank) for i in range(len(layout.params))]
        forms = map(_form_of, layout.params, spans)
        self._forms = [form if layout.is_uncut(i) else None for i, form in enumerate(forms)]
        self._all_flat = not any(self._forms)
        self.present = [i for i, spec in enumerate(layout.params) if spans[i].numel or 0 in spec.shape]
        self._present_forms = [self._forms[i] for i in self.present]
        # The cuts divide a shard into them, in one call.
        self._cuts, self._kept = _cuts([spans[i] for i in self.present], layout.shard_numel)
        self._device = shard.device
        self.pieces = pieces_of(shard, layout)
        self.views = self.views_of(shard)
        held = self.views if not shard.is_meta else [empty.detach() for _ in self.views]  # they are never on it
        self.shown = list(zip(shown, held, strict=False))
        self.empty = empty
        self._parameters = [parameter for parameter, _ in self.shown]
        self._expected = self._facts([view for _, view in self.shown])

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views for the leaves of `flat`, which is laid out like the shard."""
        found = [flat.narrow(0, start, numel) for start, numel in self._pieces]
        return found if self._all_flat else [*map(_formed, found, self._forms)]

    def view_of(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """One of `views_of(flat)`."""
        return _formed(flat.narrow(0, *self._pieces[index]), self._forms[index])

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros that is laid out like the shard, on its device."""
        return torch.zeros(self._layout.shard_numel, dtype=dtype, device=self._device)

    def views_in(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views for the leaves of this rank's part of `flat`, unsharded, 1-D and padded."""
        places = zip(self._layout.spans, self._owned, strict=True)
        found = [flat.narrow(0, span.start + piece.start, piece.numel) for span, piece in places]
        return [*map(_formed, found, self._forms)]

    def present_in(self, flat: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
        """The non-empty ones of `views_of(flat)`, and those of parameters without elements, after their indices.

        For autograd they are not views, and they share no version counter.
        """
        pieces = flat.unsafe_split_with_sizes(self._cuts)
        found = [pieces[k] for k in self._kept]
        return [*self.present], found if self._all_flat else [*map(_formed, found, self._present_forms)]

    def replaced(self) -> list[int]:
        """The leaves whose parameters do not show the shard although they should: users replaced their
        `.data`."""
        if not self._parameters or (found := self._facts(self._parameters)) == self._expected:
            return []
        return [i for i, facts in enumerate(zip(*found, strict=True)) if facts != tuple(f[i] for f in self._expected)]

    def _facts(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...]:
        # Facts that change when a tensor's memory is replaced; lists, since whole lists are compared at every forward.
        extent = torch.Tensor.numel if self._all_flat else _SHAPE
        found = list(map(torch.Tensor.data_ptr, tensors)), list(map(extent, tensors)), list(map(_DTYPE, tensors))
        return found if self._all_flat else (*found, list(map(torch.Tensor.stride, tensors)))


def _form_of(spec: ParamSpec, own: Span) -> Form:
    """The form in which a rank shows an uncut parameter; a matrix without rows remains one to optimizers of them."""
    return ((0, *spec.shape[1:]), None) if own.is_empty and spec.numel else (spec.shape, spec.stride)


def _cuts(spans: Sequence[Span], numel: int) -> tuple[list[int], list[int]]:
    """The sizes into which `numel` elements are divided, and the indices of the `spans` among them."""
    sizes, kept, end = [], [], 0
    for span in spans:
        if span.numel and span.start > end:
            sizes.append(span.start - end)
        kept.append(len(sizes))
        sizes.append(span.numel)
        end = span.stop if span.numel else end
    return [*sizes, numel - end], kept
