"""The interval of a parameter that one rank owns, as a value of a state dict.

[Note: owned intervals] A sharded state dict has for each parameter its name, its global shape and the interval that
this rank owns, and nothing about flat parameters. So any number of ranks, wrapped in any way, can read it, and making
it needs no communication. `OwnedInterval` is that value. It is a tensor of the whole parameter's shape, because
torch.distributed.checkpoint (DCP) sees tensors only, but it has memory for the interval alone. DCP gets its boxes
([Note: boxes]) from it, and saves them from and loads them into that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...errors import UsageError
from ..agreement.collective_calls import meet
from ..base import _torch
from ..base.wait_limits import blocked
from ..layout.layout import FlatLayout, ParamSpec, Part, Span
from ..parts.part import is_whole
from ..watchdog.regions import expecting
from .boxes import Box, PartBox, boxes_of, boxes_of_whole, runs_of_whole

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["OwnedInterval"]

_aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class RemoteElements:
    """Access to the elements that a rank does not own. Pickles of its interval do not contain it.

    Attributes:
        process_group: the group over which the tensor is split, in the order of its elements.
        device: the device for its communication.
        sizes: the number of elements of each of its ranks; a function, since most uses do not need it.
    """

    process_group: Any
    device: torch.device
    sizes: Callable[[], Sequence[int]]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """All elements in memory order, where `local`, this rank's own, are. Collective over the process group."""
        sizes = self.sizes()
        most = max(sizes)
        own = torch.zeros(most, dtype=local.dtype, device=self.device)
        own[: local.numel()] = local
        every = torch.empty(most * len(sizes), dtype=local.dtype, device=self.device)
        if most:
            ranks = dist.get_process_group_ranks(self.process_group)
            with expecting(ranks, "gathers a value of a sharded state dict"):
                meet(self.process_group, ranks, "called full_tensor() of a value of a sharded state dict")
                gather = _torch.FlatCollectives(self.process_group, beside=False).gather
                with blocked():
                    work = gather(every.view(torch.uint8), own.view(torch.uint8))
                    if work is not None:
                        work.wait()
        blocks = every.view(len(sizes), most)
        return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)]).to(local.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteElements:
        return self


class OwnedInterval(torch.Tensor):
    """This rank's interval of one parameter (or of a state of its shape): `shape` is the whole parameter's.

    It is not the whole tensor: computing with it is refused. Supported operations: `detach`, `clone`, `to` (device,
    dtype), `zeros_like`, `empty_like`, `copy_` from another one of the same interval or from a whole tensor, pickling,
    `copy.deepcopy`, `torch.save` and `torch.load(weights_only=True)`, and everything of torch.distributed.checkpoint.
    `to_local()` and `local_shards()` return this rank's elements in the form of DTensors and ShardedTensors. Only
    `full_tensor()` communicates.

    Attributes:
        local: the elements of the interval in the parameter's memory order; shape (span.numel,).
        spec: the parameter's name, global shape and memory order; of a part those of the part, while the tensor has
            the shape of the whole. [Note: parts of wholes]
        span: the elements of the parameter, or of the part, in it.
        names_empty: whether this rank is the one that saves the parameter if it has no elements at all.
        is_local: whether other ranks may have another tensor under the same name: no checkpoint can distinguish these.
        others: access to the other elements; None if it is lost, as in another process.
        assemble: makes the whole of the part that `spec` describes, collective over the ranks that have the other
            parts; None as `others`.
    """

    local: torch.Tensor
    spec: ParamSpec
    span: Span
    names_empty: bool
    is_local: bool
    others: RemoteElements | None
    assemble: Callable[[torch.Tensor], torch.Tensor] | None

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        spec: ParamSpec,
        span: Span,
        *,
        names_empty: bool = False,
        others: RemoteElements | None = None,
        assemble: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> OwnedInterval:
        if local.shape != (span.numel,) or span.stop > spec.numel:
            raise UsageError(
                f"an interval of {spec.name!r}: {span} of its {spec.numel} elements does not fit a tensor of shape "
                f"{tuple(local.shape)}"
            )
        self: OwnedInterval = _torch.tensor_without_memory(cls, spec.whole.shape, spec.whole.stride, local)
        self.local = local
        self.spec = spec
        self.span = span
        self.names_empty = names_empty
        self.is_local = False
        self.others = others
        self.assemble = assemble
        return self

    def with_local(self, local: torch.Tensor) -> OwnedInterval:
        """The same interval with other elements; shape (span.numel,)."""
        made = OwnedInterval(
            local, self.spec, self.span, names_empty=self.names_empty, others=self.others, assemble=self.assemble
        )
        made.is_local = self.is_local
        return made

    def _refuse_local(self) -> None:
        if self.is_local:
            raise UsageError(
                f"{self.spec.name!r} is a flat shard (LOCAL_STATE_DICT) of a unit with parts of DTensors: "
                "tensor-parallel ranks have other shards under the same name, and all would be taken for the same one. "
                "Save SHARDED_STATE_DICT, or save the state dict of each rank with torch.save"
            )

    @property
    def boxes(self) -> tuple[Box, ...] | tuple[PartBox, ...]:
        """The interval as boxes of the parameter, or of the whole that it is a part of. An empty parameter is a box of
        the rank that names it."""
        whole = self.spec.whole
        if whole.numel == 0:
            return boxes_of(whole, Span(0, 0)) if self.names_empty else ()
        return () if self.span.is_empty else boxes_of_whole(self.spec, self.span)

    def data_of(self, box: Box | PartBox) -> torch.Tensor:
        """The elements of one of `boxes`, a view of `local` in the shape of the box."""
        if isinstance(box, PartBox):
            return block_of(self.data_of(box.source), box.inside, box.sizes)
        piece = self.local[box.span.shift(-self.span.start).slice]
        return piece.view(box.sizes_in_memory).permute(box.back)

    def of_whole(self) -> list[OwnedInterval]:
        """The same elements as intervals of the whole, in memory shared with this one: a single interval, or one for
        each contiguous run of a part's elements in the whole. [Note: parts of wholes]"""
        self._refuse_local()
        spec, whole = self.spec, self.spec.whole
        if spec.part is None:
            return [self]
        if whole.numel == 0:
            return [OwnedInterval(self.local[:0], whole, Span(0, 0), names_empty=self.names_empty)]
        start = -self.span.start
        runs = runs_of_whole(spec, self.span) if self.span.numel else ()
        return [OwnedInterval(self.local[own.shift(start).slice], whole, there) for own, there in runs]

    def take_from(self, unsharded: torch.Tensor) -> None:
        """Copy this interval from a tensor of the parameter's shape or, if the parameter is a part, of the shape of its
        whole."""
        if self.span.is_empty:
            return
        of_part = tuple(unsharded.shape) == self.spec.shape
        for box in boxes_of(self.spec, self.span) if of_part else self.boxes:
            self.data_of(box).copy_(block_of(unsharded, box.offsets, box.sizes))

    # -- the interface of DTensors and ShardedTensors ----------------------------------------------------------------

    def full_tensor(self) -> torch.Tensor:
        """The whole, in memory of its own on the device of `local`. Collective over the ranks that it is split over.

        They meet in the store for it, with six requests each: for whole state dicts, use `FULL_STATE_DICT`.

        Raises:
            AgreementError: on every rank: some ranks make another call, or can never reach this one.
            UsageError: it has no record of the other ranks, because it was pickled, or made by hand.
        """
        spec = self.spec
        if self.others is not None:
            flat = self.others.gather(self.local.detach())
        elif self.span.numel == spec.numel and (spec.part is None or self.assemble is not None):
            flat = self.local.detach().clone()
        else:
            raise UsageError(
                f"full_tensor() of {spec.name!r}: this rank has elements {self.span} of shape {spec.shape}, and the "
                "value has no record of the ranks that hold the others: it was pickled or comes from a file. Load it "
                "into a model, and take its state_dict() under StateDictType.FULL_STATE_DICT"
            )
        unsharded = flat.view(spec.shape) if spec.stride is None else flat.as_strided(spec.shape, spec.stride)
        if spec.part is None:
            return unsharded
        assert self.assemble is not None
        return self.assemble(unsharded)

    def to_local(self) -> torch.Tensor:
        """`local`: this rank's elements, in the memory order of the whole; shape (span.numel,). Not a copy."""
        return self.local

    def local_shards(self) -> list[Any]:
        """This rank's elements as torch's `Shard`s, one for each of `boxes`: `.tensor`, a view of `local`, and
        `.metadata`, with its position in the whole."""
        return [_torch.shard(self.data_of(box), box.offsets) for box in self.boxes if 0 not in box.sizes]

    # -- the interface for DCP ---------------------------------------------------------------------------------------
    # Imported only here, after its caller has imported it: the import of DCP imports torch's own FSDP.

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._refuse_local()
        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_dcp_chunk(box), properties, self.shape),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._refuse_local()
        return [_dcp_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box in self.boxes:
            if index.offset is None or torch.Size(box.offsets) == index.offset:
                return self.data_of(box)
        raise UsageError(f"{index.fqn}: no box at {index.offset} in elements {self.span} of shape {self.spec.shape}")

    # -- as a tensor -------------------------------------------------------------------------------------------------

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # the contents are never those of a whole
        return f"OwnedInterval({self.spec.name!r}, elements {self.span} of {self.spec.shape}, {self.local})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        spec = self.spec
        parts = () if spec.part is None else (astuple(spec.part),)
        return _rebuild, (
            self.local,
            spec.name,
            spec.shape,
            spec.stride,
            self.span.start,
            self.span.stop,
            self.names_empty,
            *parts,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedInterval:
        return memo.setdefault(id(self), self.with_local(self.local.clone()))

    def data_ptr(self) -> int:
        """0: the whole has no memory. DCP's staging then copies `local`."""
        return 0

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves `func` out of its stub
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Execute the few operations that make sense on an interval; refuse all others."""
        carry_out = _OPERATIONS.get(func)
        if carry_out is None:
            own = next(each for each in args if isinstance(each, cls))
            raise UsageError(
                f"{func} of {own.spec.name!r}: this value of a sharded state dict holds only elements {own.span} of "
                f"shape {own.spec.shape}, those that this rank owns. Its `.local` has them; whole values are in "
                "state_dict() under StateDictType.FULL_STATE_DICT"
            )
        return carry_out(*args, **(kwargs or {}))


def unpadded_span(layout: FlatLayout, rank: int) -> Span:
    """The span of `rank`'s shard in the flat space, without world padding; ``[0, 0)`` if that is empty. Precondition:
    `layout` has one segment."""
    shared = layout.shard(rank).intersect(Span(0, layout.numel))
    return Span(0, 0) if shared.is_empty else shared


def block_of(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The view of the block of `whole` that begins at `offsets`."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def _dcp_chunk(box: Box | PartBox) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _rebuild(
    local: torch.Tensor,
    name: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    start: int,
    stop: int,
    names_empty: bool,
    part: tuple[Any, ...] | None = None,
) -> OwnedInterval:
    spec = ParamSpec(name, shape, stride, None if part is None else Part(*part))
    return OwnedInterval(local, spec, Span(start, stop), names_empty=names_empty)


def _new_empty(interval: OwnedInterval, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    if tuple(size) != tuple(interval.shape):
        return interval.local.new_empty(size, dtype=dtype, device=device)
    return interval.with_local(torch.empty_like(interval.local, dtype=dtype, device=device))


def _position(interval: OwnedInterval) -> object:
    """The position in the whole of the parameter to which `interval` belongs."""
    part = interval.spec.part
    return interval.spec.shape if part is None or is_whole(part) else (part.shape, part.ranges)


def _copied(function: Callable[..., torch.Tensor]) -> Callable[..., OwnedInterval]:
    def on_local(interval: OwnedInterval, *args: Any, **kwargs: Any) -> OwnedInterval:
        kwargs.pop("memory_format", None)  # the interval keeps the parameter's order
        return interval.with_local(function(interval.local, *args, **kwargs))

    return on_local


_STAGED = (
    ". torch.distributed.checkpoint.async_save(storage_writer=...) copies tensors without dimensions, for which values "
    "from a file or a pickle do not suffice: take the state dict from a model, whose values know the other ranks, or "
    "use flatfsdp.checkpoint.async_save()"
)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(target, OwnedInterval):
        assert isinstance(source, OwnedInterval)
        if not source.spec.shape and source.others is not None:
            # [Note: staged scalars] torch.distributed.checkpoint.async_save(storage_writer=...) copies tensors without
            # dimensions into such targets, on all ranks and in the same order; only the owner has the element.
            return target.copy_(source.full_tensor(), non_blocking=non_blocking)
        if source.span.numel != source.spec.numel or not is_whole(source.spec.part):
            raise UsageError(
                f"copying {source.spec.name!r} into a whole tensor: this rank owns only elements {source.span} of "
                f"shape {source.spec.shape}; full_tensor() returns the whole value" + _STAGED * (not source.spec.shape)
            )
        for box in source.boxes:
            block_of(target, box.offsets, box.sizes).copy_(source.data_of(box), non_blocking=non_blocking)
    elif not isinstance(source, OwnedInterval):
        target.take_from(source)
    elif source.span == target.span and _position(source) == _position(target):
        target.local.copy_(source.local, non_blocking=non_blocking)
    else:
        raise UsageError(
            f"copying elements {source.span} of {source.spec.name!r} {source.spec.shape} into elements {target.span} "
            f"of {target.spec.name!r} {target.spec.shape}: these are different intervals. Save and load with "
            "torch.distributed.checkpoint, which moves elements between ranks"
        )
    return target


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _copied(lambda local: local.detach()),
    _aten.alias.default: _copied(lambda local: local),
    _aten.clone.default: _copied(lambda local: local.clone()),
    _aten._to_copy.default: _copied(_aten._to_copy.default),
    _aten.empty_like.default: _copied(torch.empty_like),
    _aten.zeros_like.default: _copied(torch.zeros_like),
    _aten.is_pinned.default: lambda interval, *args, **kwargs: interval.local.is_pinned(*args, **kwargs),
    _aten._pin_memory.default: _copied(lambda local, *args, **kwargs: local.pin_memory()),
    _aten.new_empty.default: _new_empty,
    _aten.copy_.default: _copy,
}

# Files contain these names, and `torch.load(weights_only=True)` looks them up: so they do not change with the
# place of this module, and `flatfsdp/layout.py` has them.
OwnedInterval.__module__ = _rebuild.__module__ = "flatfsdp.layout"
torch.serialization.add_safe_globals([OwnedInterval, _rebuild])
