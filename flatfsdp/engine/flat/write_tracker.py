"""Writes to a flat parameter, detected by version counters: through its shard, the flat parameter, or a leaf.

[Note: versions] A freed storage must not be read through a saved view: on CPU that crashes the process, after a refill
with other weights it yields a wrong gradient. So freeing increments the version counters of the parameters that live
there, and autograd raises an error for such a view. Filling the buffer with *unchanged* weights sets the counters back
(else `retain_graph` and every backward would be refused); a changed weight keeps the increment, so a graph older than
the optimizer's step is refused as in an unsharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..base import _torch
from ..base.fqns import clean


class TracksWrites:
    """A parameter whose version also counts in-place writes to its `.data`."""

    @property
    def data(self) -> torch.Tensor:
        """The data of the parameter; it shares the parameter's version counter."""
        return self.detach()  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


class FlatParameter(TracksWrites, nn.Parameter):
    """The shard of one handle as a parameter, 1-D, in the master dtype.

    The underscored attributes are FSDP1's names for facts of the layout; other programs read them.
    """

    _fsdp_flattened = True
    _handle_ref: Callable[[], Any] | None = None  # weak

    @property
    def has_handle(self) -> bool:
        """Whether its model exists and computes with it; False for copies."""
        return self._handle_ref is not None and self._handle_ref() is not None

    @property
    def _handle(self) -> Any:
        handle = self._handle_ref() if self._handle_ref is not None else None
        if handle is None:
            raise UsageError(
                "this FlatParameter no longer belongs to a FullyShardedDataParallel module (it is a copy, or the "
                "model was deleted); read the layout from the model's own `_flat_param`"
            )
        return handle

    _fqns = property(lambda self: tuple(clean(spec.name) for spec in self._handle.layout.params))
    _shapes = property(lambda self: tuple(torch.Size(spec.shape) for spec in self._handle.layout.params))
    _numels = property(lambda self: tuple(spec.numel for spec in self._handle.layout.params))
    _unpadded_unsharded_size = property(lambda self: torch.Size((self._handle.layout.numel,)))

    @property
    def _local_shard(self) -> torch.Tensor:
        shard: torch.Tensor = self._handle.shard
        return shard

    @_local_shard.setter
    def _local_shard(self, value: torch.Tensor) -> None:
        # verl assigns it after `flat_param_to()`, which has assigned it already.
        if value.data_ptr() != self.data_ptr():
            raise UsageError(
                "_local_shard of a FlatParameter: expected the tensor in its `.data`. Assign `.data`, or write to it "
                "in place"
            )


VERSION = attrgetter("_version")
_NEXT = (1).__add__
_NO_VERSION = 1 << 40  # larger than any sum of versions


class WriteTracker:
    """The version counters of one shard and of the leaves, since the shard last moved. [Note: versions]

    Attributes:
        known: the leaves' versions while the buffer is filled and no other code writes; empty before it is.
        gathered: the number of writes to the shard when its last gather was issued.
        in_buffer: that number when the gather that filled the unsharded buffer was issued.
        counters: tensors whose versions also count writes to the shard. [Note: faces]
        replacements: a number that changes with each replaced holder.
    """

    def __init__(
        self,
        shard: torch.Tensor,
        flat_param: nn.Parameter,
        leaves: Sequence[nn.Parameter],
        counters: Sequence[torch.Tensor] = (),
    ) -> None:
        self.counters = counters
        self.replacements = 0
        self._shard = shard
        self._flat_param = flat_param
        self._leaves = leaves
        self._saved: list[int] = []  # the versions in tensors that autograd saved of the buffer's content
        self.known: list[int] = []
        self._freed: list[int] = []  # the versions that leaves with those of `_freed_from` have once they are freed
        self._freed_from: list[int] | None = None
        self.in_buffer = self.gathered = self.of_shard

    @property
    def of_shard(self) -> int:
        """The number of writes to the shard, not counting those through leaves."""
        # Either may be written to, and after a replacement of the shard they no longer share one counter.
        writes = self._shard._version + self._flat_param._version
        if not self.counters:
            return writes
        with _torch.as_plain_tensors():  # their class is special
            return writes + self.replacements + sum(map(VERSION, self.counters))

    def on_replacement(self) -> None:
        """Count a replaced holder, whose new tensor may have any version."""
        self.replacements += _NO_VERSION

    @property
    def all(self) -> tuple[int, ...]:
        """Changes with every write to the shard, through any tensor that shows it."""
        return self.of_shard, *map(VERSION, self._leaves)

    def show_shard(self) -> None:
        """Record that the leaves show the shard itself, which is the whole parameter."""
        writes = self.of_shard
        if writes != self.in_buffer:
            # The leaves see the write, made through the flat parameter, without a change of their versions.
            torch.autograd.graph.increment_version(self._leaves)
            self.in_buffer = writes
        with _torch.as_plain_tensors():
            self._saved = self.known = list(map(VERSION, self._leaves))

    def on_overwrite(self, indices: Collection[int]) -> None:
        """Before the places of these parameters are overwritten: make autograd refuse saved views of them."""
        self.known = list(self.known)
        for i in indices:
            self.known[i] += 1
        torch.autograd.graph.increment_version([self._leaves[i] for i in indices])

    def on_fill(self, *, changed: bool) -> None:
        """Record that the buffer holds weights again; `changed`: the shard was written to, not through a leaf.

        A leaf that other code wrote to since the last fill also keeps its version.
        """
        with _torch.as_plain_tensors():  # they may refuse to be used
            found = list(map(VERSION, self._leaves))
        if changed or not self.known:
            self._saved = self.known = found
            return
        if self._freed_from is not self.known:  # the same list from step to step, unless other code writes
            self._freed_from, self._freed = self.known, list(map(_NEXT, self.known))
        if found != self._freed:
            rows = zip(found, self._saved, self._freed, strict=True)
            self._saved = [saved if version == freed else version for version, saved, freed in rows]
        self.known = self._saved
        _torch.set_versions(tuple(self._leaves), tuple(self.known))

    @property
    def is_stale(self) -> bool:
        """Whether the shard was written to since the unsharded buffer was filled."""
        writes = self.of_shard if self.counters else self._shard._version + self._flat_param._version
        return writes != self.in_buffer or list(map(VERSION, self._leaves)) != self.known

    @property
    def was_written_since_gathered(self) -> bool:
        """Whether the shard was written to since the last gather of it was issued."""
        return self.of_shard != self.gathered

    @property
    def was_edited(self) -> bool:
        """Whether a leaf was written to in place since the unsharded buffer was filled."""
        return list(map(VERSION, self._leaves)) != self.known

    @property
    def edited(self) -> list[int]:
        """The indices of these leaves."""
        return [i for i, found in enumerate(map(VERSION, self._leaves)) if found != self.known[i]]
