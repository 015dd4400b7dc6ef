"""Flat parameters with gather hooks: tensors other than their elements are gathered. [Note: gather hooks]

[Note: opaque bytes] Shards, gradients and optimizer states are those of any handle with a layout in rows. The unsharded
buffer differs: it holds bytes in a layout of its own, on which ranks agree at the first gather, with a segment for
each tensor of a parameter. Its storage and address stay ([Note: one storage]). The tensors that modules compute with
are built from it once, and refilled later. Leaves show their shape meanwhile, without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..base import _torch
from ..base.overrides import is_memoryless
from ..base.plain_data import decode, encode, gathered
from ..comm.transport import Transport
from ..device.memory import FlatBuffer, MemoryTracker
from ..device.streams import DONE, PendingWork, Stream
from ..flat.flat_param import FlatParamHandle, FlatParamOptions
from ..flat.sources import UnshardedParam, UnshardSource
from ..flat.write_tracker import VERSION
from ..layout.layout import FlatLayout, ParamSpec, Part
from ..planning.rows import pack_rows
from ..transports.blocking import gather_now
from .gather_hooks import GatherHooks, Input, described, fitting, hollow, listed

ALIGN = 16  # bytes: the alignment that kernels expect, and a multiple of the size of every element


@dataclass(frozen=True)
class ExtendedOptions(FlatParamOptions):
    """The options of a flat parameter with gather hooks.

    Attributes:
        gathers: the hooks of each parameter.
    """

    gathers: tuple[GatherHooks, ...] = ()

    @classmethod
    def of(cls, options: FlatParamOptions, gathers: Sequence[GatherHooks]) -> ExtendedOptions:
        """`options` with these hooks, which return bytes, so that nothing is quantized in gathers."""
        plain = {each.name: getattr(options, each.name) for each in fields(options)}
        plain["mixed_precision"] = replace(options.mixed_precision, gather_dtype=None)
        return cls(**plain, gathers=tuple(gathers))


class OpaqueParam(UnshardedParam):
    """The gathered bytes of one handle's parameters, and the tensors in one dtype that modules compute with.

    Attributes:
        agreed: for each parameter, the tensors that each rank contributes; empty before the first gather.
    """

    has_inner = True

    def __init__(self, handle: ExtendedHandle, dtype: torch.dtype) -> None:
        self._device, self._tracker, self._world = handle.device, handle.tracker, handle.layout.world
        buffer = FlatBuffer(0, torch.uint8, self._device, tracker=self._tracker, category="unsharded")
        super().__init__(buffer.tensor, buffer, handle.layout)
        self._dtype = dtype
        with torch.inference_mode(False):
            nothing = handle.at_rest.empty.new_full((), torch.nan, dtype=dtype)
        self.views = [nothing.expand(spec.shape) for spec in handle.layout.params]
        self.shown = list(zip(handle.leaves, self.views, strict=True))
        self._hooks = handle.options.gathers
        self.agreed: list[list[Input]] = []
        self._inputs: list[torch.Tensor] = []
        self._metadata: list[Any] = []
        self._slices: list[torch.Tensor] = []
        self._seen: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._inner: list[tuple[torch.UntypedStorage, int]] = []
        self._is_by_rank = False  # the bytes of each tensor are in the order of ranks, as a gather leaves them

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def inner_addresses(self) -> list[int]:
        return [storage.data_ptr() for storage, _ in self._inner]

    # -- the gather --------------------------------------------------------------------------------------------------

    def prepare(self, handle: ExtendedHandle, transport: Transport) -> None:
        """Call the hooks of the parameters for the tensors to gather now. Collective at the first call."""
        given: list[list[torch.Tensor]] = []
        problem: UsageError | None = None
        self._metadata = []
        try:
            for hooks, rows in zip(self._hooks, handle.rows, strict=True):
                inputs, metadata = hooks.inputs(rows, self._device)
                given.append(inputs)
                self._metadata.append(metadata)
        except UsageError as error:
            if self.agreed:
                raise
            problem = error
        if not self.agreed:
            self._agree([described(inputs) for inputs in given], problem, handle, transport)
        self._inputs = []
        for i, (hooks, inputs) in enumerate(zip(self._hooks, given, strict=True)):
            self._inputs += hooks.fit(inputs, self.agreed[i], *_rows_of(handle.layout, i, handle.rank))

    def _agree(
        self, own: list[list[Input]], problem: UsageError | None, handle: ExtendedHandle, transport: Transport
    ) -> None:
        """Adopt the first rank's layout of the bytes. Collective; a mismatch on any rank raises on all ranks."""
        facts, device = encode((str(problem or ""), own)), transport.device.device
        given = [facts] * self._world if is_memoryless() else gathered(facts, device, partial(gather_now, transport))
        decoded: list[tuple[str, list[list[Input]]]] = list(map(decode, given))
        for rank, (wrong, _) in enumerate(decoded):
            if wrong:
                raise problem or UsageError(f"on rank {rank} of the shards: {wrong}")
        first = decoded[0][1]
        for rank, (_, found) in enumerate(decoded):
            for i, hooks in enumerate(self._hooks):
                if not fitting(found[i], first[i], *_rows_of(handle.layout, i, rank)):
                    raise UsageError(
                        f"parameter {hooks.name!r}: rank {rank} of the shards gathers {listed(found[i])}, and rank 0 "
                        f"{listed(first[i])}; expected tensors of the same shapes and dtypes, but for fewer rows"
                    )
        self.agreed = first
        self.layout = _layout_of(self._hooks, first, self._world)
        self.buffer = FlatBuffer(
            self.layout.padded_numel, torch.uint8, self._device, tracker=self._tracker, category="unsharded"
        )
        self.flat = self.buffer.tensor

    def fill(self, transport: Transport, stream: Stream) -> PendingWork:
        """Gather the prepared tensors. Collective. Precondition: the buffer has its memory."""
        slices, pieces, self._inputs = self._cut(), self._inputs, []
        given = [(target, piece) for target, piece in zip(slices, pieces, strict=True) if target.numel()]
        if not given:
            return DONE
        self._is_by_rank = True
        return transport.all_gather_coalesced([target for target, _ in given], [piece for _, piece in given], stream)

    def _cut(self) -> list[torch.Tensor]:
        """Views of the buffer for all tensors. Precondition at the first call: the buffer has memory."""
        if not self._slices:
            self._slices = [self.flat[span.slice] for span in self.layout.spans]
        return self._slices

    # -- tensors that modules see ------------------------------------------------------------------------------------

    def unpack(self, rows: Sequence[torch.Tensor], *, changed: bool) -> None:
        """Show modules the gathered values; `changed`: they differ from those shown before. Precondition: gathered."""
        for storage, size in self._inner:
            storage.resize_(size)
            self._tracker.add("unsharded", size)
        slices, made = iter(self._cut()), []
        for i, (hooks, agreed) in enumerate(zip(self._hooks, self.agreed, strict=True)):
            gathered = [each.view(next(slices), self._world) for each in agreed]
            if self._is_by_rank:
                for each in gathered:
                    hooks.reorder(each)
            before = self._seen[i] if self._seen else None
            seen, inner = hooks.outputs(rows[i], gathered, self._metadata[i], self._dtype, before)
            made.append(seen)
            hooks.seen = seen
            if before is None:
                self._own(inner)
        self._is_by_rank = False
        refilled, self._seen = bool(self._seen), made
        if refilled and not changed:  # earlier graphs may read it [Note: versions]
            _torch.set_versions(made, self._versions)
        self._versions = list(map(VERSION, made))

    def _own(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate and free the memory of `tensors` together with the buffer's."""
        known = {self.flat.untyped_storage()._cdata, *(storage._cdata for storage, _ in self._inner)}
        plain = [each for each in tensors if not hasattr(type(each), "__tensor_flatten__") and each.numel()]
        for storage in map(torch.Tensor.untyped_storage, plain):
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._inner.append((storage, storage.nbytes()))
                self._tracker.add("unsharded", storage.nbytes())

    def free(self) -> None:
        """Make the tensors that modules have seen unreadable. The caller frees the buffer."""
        for hooks in self._hooks:
            hooks.seen = None
        torch.autograd.graph.increment_version(self._seen)
        for storage, size in self._inner:
            storage.resize_(0)
            self._tracker.remove("unsharded", size)


class ExtendedSource(UnshardSource):
    """The tensors that the parameters of a handle contribute, gathered over the shard axis."""

    def __init__(self, dtype: torch.dtype, transport: Transport, *, offload: bool) -> None:
        self.dtype, self.transport, self.reads_host = dtype, transport, offload

    def fill(self, unsharded: UnshardedParam, stream: Stream) -> PendingWork:
        assert isinstance(unsharded, OpaqueParam)
        return unsharded.fill(self.transport, stream)


class ExtendedHandle(FlatParamHandle):
    """A handle whose parameters have gather hooks ([Note: opaque bytes]). Either all of their classes keep their rows,
    or none does ([Note: rows of their class])."""

    options: ExtendedOptions
    gathers_elements = False

    def __init__(
        self,
        leaves: Sequence[nn.Parameter],
        layout: FlatLayout,
        shard: torch.Tensor,
        *,
        rank: int,
        device: torch.device,
        options: ExtendedOptions,
        tracker: MemoryTracker,
    ) -> None:
        if (rows := options.gathers[0].rows) is not None:
            shard = hollow(shard, rows.device)
        super().__init__(leaves, layout, shard, rank=rank, device=device, options=options, tracker=tracker)

    @classmethod
    def flatten(
        cls,
        leaves: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        world: int,
        rank: int,
        device: torch.device,
        options: ExtendedOptions,  # type: ignore[override]
        tracker: MemoryTracker,
        parts: Mapping[int, Part] = MappingProxyType({}),
        strides: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    ) -> FlatParamHandle:
        home = torch.device("cpu") if options.offload else device
        for hooks in options.gathers:
            if hooks.keeps_rows:
                hooks.cut(rank, world, home, pinned=options.offload and options.pin_memory)
        return super().flatten(
            leaves,
            names,
            world=world,
            rank=rank,
            device=device,
            options=options,
            tracker=tracker,
            parts=parts,
            strides=strides,
        )

    @property
    def has_memory(self) -> bool:
        return self.options.gathers[0].rows is None

    @property
    def shard_bytes(self) -> int:
        return self.shard.nbytes if self.has_memory else sum(hooks.nbytes for hooks in self.options.gathers)

    def replace_shard(self, shard: torch.Tensor) -> None:
        if not self.has_memory:
            shard = hollow(shard)
            for hooks in self.options.gathers:
                if hooks.rows is not None and hooks.rows.is_meta and not shard.is_meta:
                    hooks.rows = torch.empty_like(hooks.rows, device=shard.device)
        super().replace_shard(shard)

    def changed_by(self, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        if self.has_memory:
            return super().changed_by(change)
        every = self.options.gathers
        made = [hooks.changed(change) for hooks in every]
        if all(one is hooks.rows for one, hooks in zip(made, every, strict=True)):
            return None
        for one, hooks in zip(made, every, strict=True):
            hooks.rows = one
        return torch.zeros((), dtype=made[0].dtype, device=made[0].device).expand(self.shard.shape)

    @property
    def rows(self) -> list[torch.Tensor]:
        """This rank's rows of each parameter, tensors of their classes. They are the same objects while the shard
        exists, since users set attributes on them (a scale, for example)."""
        return [self.face.local_of(holder) for holder in self.face.holders]

    def _target(self, dtype: torch.dtype) -> UnshardedParam:
        made = self._unsharded.get(dtype)
        if made is None:
            made = self._unsharded[dtype] = OpaqueParam(self, dtype)
        return made

    def shard_source(self, transport: Transport, dtype: torch.dtype) -> ExtendedSource:
        return ExtendedSource(dtype, transport, offload=self.options.offload)

    def launch_unshard(self, source: UnshardSource, stream: Stream) -> None:
        if isinstance(source, ExtendedSource):
            target = self._target(source.dtype)
            assert isinstance(target, OpaqueParam)
            with stream.running():
                target.prepare(self, source.transport)
        super().launch_unshard(source, stream)

    def wait_unshard(self) -> None:
        changed = self.writes.gathered != self.writes.in_buffer
        super().wait_unshard()
        assert isinstance(self.unsharded, OpaqueParam)
        self.unsharded.unpack(self.rows, changed=changed)

    def reshard(self) -> FlatBuffer | None:
        active = self.unsharded
        buffer = super().reshard()
        assert isinstance(active, OpaqueParam)
        active.free()
        return buffer

    def is_shard_in(self, dtype: torch.dtype) -> bool:
        return False

    @property
    def unsharded_bytes(self) -> int:
        known = [each.layout.padded_numel for each in self._unsharded.values()]
        return max(known, default=0) or super().unsharded_bytes


def handle_class(options: FlatParamOptions) -> type[FlatParamHandle]:
    """The class of handles with these `options`."""
    return ExtendedHandle if isinstance(options, ExtendedOptions) else FlatParamHandle


def _rows_of(layout: FlatLayout, index: int, rank: int) -> tuple[int, int]:
    """The number of rows of a parameter that `rank` has, and the maximum over ranks."""
    rows = layout.params[index].rows
    most = -(-rows // layout.world)
    return max(0, min(most, rows - rank * most)), most


def _layout_of(hooks: Sequence[GatherHooks], inputs: Sequence[Sequence[Input]], world: int) -> FlatLayout:
    """The layout of bytes, with a row for each rank of each tensor."""
    named = [(f"{each.name}[{k}]", one) for each, own in zip(hooks, inputs, strict=True) for k, one in enumerate(own)]
    return pack_rows([ParamSpec(name, (world, one.nbytes)) for name, one in named], world=world, align=ALIGN)
