"""How a list of tensors travels where memory is not shared: large ones in place, small ones together.

[Note: staging] A collective, or a message, for each of many small tensors would take longer than copies. So those of at
most `SMALL` bytes travel as one in a *staging buffer*, which has a row for each rank, and in the row a piece of each.
Copies into it and out of it are counted apart (`CommStats.staged`). Larger ones are sent from where they lie and
received there: nothing of them is staged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from ..base import _torch
from ..device.memory import FlatBuffer, MemoryTracker
from .axes import Axis
from .pieces import Row, copy, is_ordered, rows_of
from .tensor_groups import TensorGroup

SMALL = 64 * 1024  # bytes of an unsharded tensor
KNOWN = 256  # lists of a transport


class StagingBuffer:
    """A staging buffer for certain unsharded tensors, and its views, which take longer to make than to fill.

    Attributes:
        memory: shape (world * n,): a row of n elements for each rank.
        rows: the same, shape (world, n); own: this rank's, shape (n,); own_pieces: that cut, a piece for each tensor.
        wholes: the tensors, of world rows each.
        unpack: copies all rows to the tensors.
        sums: shape (n,): for what a reduction leaves of them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], group: Axis, tracker: MemoryTracker) -> None:
        first, world = tensors[0], group.size
        sizes = [tensor.numel() // world for tensor in tensors]
        self.memory, self.sums = (
            FlatBuffer(numel, first.dtype, first.device, tracker=tracker, kind="staging")
            for numel in (world * sum(sizes), sum(sizes))
        )
        self.memory.allocate()
        self.rows = self.memory.tensor.view(world, sum(sizes))
        self.own = self.rows[group.rank]
        self.own_pieces = self.own.split(sizes)
        self.wholes = [tensor.view(world, size) for tensor, size in zip(tensors, sizes, strict=True)]
        self._sizes = sizes
        if is_ordered(first):  # one kernel, where the other way takes one for each tensor
            self.unpack = partial(torch.split_with_sizes_copy, self.rows, sizes, 1, out=self.wholes)
        else:
            self.unpack = partial(_torch.foreach_copy_, self.wholes, self.rows.split(sizes, dim=1))

    def unpack_sums(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy what a reduction left to its place."""
        copy(targets, self.sums.tensor.split(self._sizes))


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """How certain shards are gathered.

    Attributes:
        shards: these, which live as long; given: their ids.
        outputs, sources: what is gathered, and of what.
        copies: what is copied first, to where, by dtype and device of what: shards that are cast, and small ones to the
            staging buffer. All of one dtype are one kernel of an accelerator.
        ordered: whether what reads a copy is in order behind it.
    """

    shards: list[torch.Tensor]
    given: list[int]
    outputs: list[torch.Tensor]
    sources: list[torch.Tensor]
    copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    ordered: bool


class TensorList:
    """Unsharded tensors of one dtype that travel as one, and how. [Note: rows]

    Attributes:
        nbytes, numel, device: of all of them.
        staged: bytes that are staged each time.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: Axis,
        tracker: MemoryTracker,
        *,
        fewest: int,
        forget: Callable[[object], None],
    ) -> None:
        """`fewest`: so many small ones, at least, are staged. `forget` is called when one of the tensors is gone."""
        self._kept = [weakref.ref(tensor, forget) for tensor in tensors]
        self._given = list(map(id, tensors))  # of those that live, or this is forgotten
        self._group_of: Callable[[], object] = lambda: None  # the group that was given last
        self._tensors = [tensor.data for tensor in tensors]  # views of these keep none of the caller's alive
        self._group, self._tracker = group, tracker
        self._plan: _Gather | None = None
        self.device = tensors[0].device
        self.nbytes, self.numel = sum(each.nbytes for each in tensors), sum(each.numel() for each in tensors)
        small = [index for index, tensor in enumerate(tensors) if tensor.nbytes <= SMALL]
        self._sizes = [tensor.numel() // group.size for tensor in tensors]  # of a rank's pieces
        self._small = small if len(small) >= fewest else []
        self._large = [index for index in range(len(tensors)) if index not in {*self._small}]
        self.staged = sum(tensors[index].nbytes for index in self._small)

    def serves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it was made for these very `tensors`, and its staging buffer is not in use."""
        in_use = self.staged and "staging" in vars(self) and self.staging.memory.allocated
        if in_use or (tensors is not self._group_of() and list(map(id, tensors)) != self._given):
            return False
        if isinstance(tensors, TensorGroup):
            self._group_of = weakref.ref(tensors)
        return self._tensors[0].data_ptr() == tensors[0].data_ptr()  # or somebody gave them other memory

    @cached_property
    def rows(self) -> list[Row]:
        """What each rank has of them: a tensor for each rank and tensor, for those who exchange them by themselves."""
        return rows_of(self._tensors, self._group.size)

    @cached_property
    def staging(self) -> StagingBuffer:
        """For those that are staged."""
        return StagingBuffer([self._tensors[index] for index in self._small], self._group, self._tracker)

    def to_gather(self, shards: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs that are to be gathered, and of what; shards of another dtype, or elsewhere, are cast here.

        `finish_gather` follows when they were.
        """
        plan = self._plan
        if plan is None or list(map(id, shards)) != plan.given:
            plan = self._plan = self._planned(shards)
        if self._small:
            self.staging.memory.allocate()
        for targets, copied in plan.copies:
            _torch.foreach_copy_(targets, copied, non_blocking=plan.ordered)
        return plan.outputs, plan.sources

    def _planned(self, shards: Sequence[torch.Tensor]) -> _Gather:
        rank = self._group.rank
        own = [each.narrow(0, rank * size, size) for each, size in zip(self._tensors, self._sizes, strict=True)]
        targets = {index: own[index] for index in self._large if _differs(own[index], shards[index])}
        outputs = [self._tensors[index] for index in self._large]
        sources = [targets.get(index, shards[index]) for index in self._large]
        if self._small:
            outputs.append(self.staging.memory.tensor)
            sources.append(self.staging.own)
            targets |= zip(self._small, self.staging.own_pieces, strict=True)
        copies: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for index, target in targets.items():
            into, of = copies.setdefault((shards[index].dtype, shards[index].device), ([], []))
            into.append(target)
            of.append(shards[index])
        ordered = is_ordered(self._tensors[0])
        return _Gather(list(shards), list(map(id, shards)), outputs, sources, list(copies.values()), ordered)

    def finish_gather(self) -> None:
        """What was staged comes to its place."""
        if self._small:
            staging = self.staging
            staging.unpack()
            staging.memory.free()

    def to_reduce(self, output: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs that are to be filled, and with the sums of what. `finish_reduction` follows when they were."""
        if self._small:
            staging = self.staging
            staging.memory.allocate()
            torch.cat(staging.wholes, 1, out=staging.rows)
            if not self._large:
                return [output], [self.staging.memory.tensor]
            self.staging.sums.allocate()
        results = output.split(self._sizes)
        outputs, fulls = [results[index] for index in self._large], [self._tensors[index] for index in self._large]
        if self._small:
            outputs.append(self.staging.sums.tensor)
            fulls.append(self.staging.memory.tensor)
        return outputs, fulls

    def finish_reduction(self, output: torch.Tensor) -> None:
        """What was staged comes to its place in `output`."""
        if self._small and self._large:
            results = output.split(self._sizes)
            self.staging.unpack_sums([results[index] for index in self._small])
            self.staging.sums.free()
        if self._small:
            self.staging.memory.free()


def _differs(target: torch.Tensor, source: torch.Tensor) -> bool:
    return target.dtype != source.dtype or target.device != source.device


class TensorLists:
    """The lists of one transport that are known, for as long as all of their tensors live."""

    def __init__(self, group: Axis, tracker: MemoryTracker, *, fewest: int) -> None:
        self._group, self._tracker, self._fewest = group, tracker, fewest
        self._known: dict[tuple[int, int, int], TensorList] = {}

    def of(self, tensors: Sequence[torch.Tensor]) -> TensorList:
        """The list of these `tensors`."""
        key = id(tensors[0]), id(tensors[-1]), len(tensors)
        known = self._known.get(key)
        if known is not None and known.serves(tensors):
            return known
        lists = weakref.ref(self)

        def forget(gone: object) -> None:
            if (found := lists()) is not None:
                found._known.pop(key, None)

        if len(self._known) == KNOWN:  # of a model that joins others at every step
            self._known.clear()
        made = TensorList(tensors, self._group, self._tracker, fewest=self._fewest, forget=forget)
        self._known[key] = made
        return made
