"""Writes to a flat parameter, detected by version counters: through its shard, the flat parameter, or a leaf.

[Note: versions] A freed storage must not be read through a saved view: on CPU that crashes the process, after a refill
with other weights it yields a wrong gradient. So freeing increments the version counters of the parameters that live
there, and autograd raises an error for such a view. Filling the buffer with *unchanged* weights sets the counters back
(else `retain_graph` and every backward would be refused); a changed weight keeps the increment, so a graph older than
the optimizer's step is refused as in an unsharded model.

[Note: one counter] Parameters of a small unit are filled, used, freed and written over together, and nobody may write
to one of them meanwhile. So their leaves share one counter, and what is done for each unit and step takes one tensor
instead of one for each parameter. torch lets tensors share a counter only as they are made: a leaf that is an object of
the user's is made anew, and swapped with it. One that other code may refer to keeps its own.
"""

from __future__ import annotations

import weakref
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


def share_counter(leaves: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Let `leaves`, of one dtype and device, count writes together as far as they can. Returns a tensor for each
    counter: one that is none of them, and the leaves that keep their own. [Note: one counter]"""
    with torch.inference_mode(False), torch.no_grad():
        first = torch.empty(0, dtype=leaves[0].dtype, device=leaves[0].device)
        counted: list[torch.Tensor] = [first]
        for leaf in leaves:
            if _is_unseen(leaf) and (leaf.dtype, leaf.device) == (first.dtype, first.device):
                made = nn.Parameter(first.detach(), leaf.requires_grad)
                made.set_(leaf.detach())  # type: ignore[call-overload]  # the stubs lack it
                made.__dict__ = vars(leaf)
                torch.utils.swap_tensors(leaf, made)
            else:
                counted.append(leaf)
    return counted


def _is_unseen(leaf: nn.Parameter) -> bool:
    """Whether `leaf` is a plain parameter that no graph, hook or weak reference has met, and without a gradient."""
    return (
        type(leaf) is nn.Parameter
        and not (leaf.is_inference() or leaf.is_meta)
        and leaf.grad is None
        and not (_torch.has_hooks(leaf) or _torch.hooks_on(leaf) or weakref.getweakrefs(leaf))
        and _torch.use_count(leaf) == 1
    )


class WriteTracker:
    """The version counters of one shard and of the leaves, since the shard last moved. [Note: versions]

    Attributes:
        counted: a tensor for each counter of the leaves: they themselves, or fewer. [Note: one counter]
        only: that tensor if there is one, which is no leaf.
        known: their versions while the buffer is filled and no other code writes; empty before it is.
        gathered: the number of writes to the shard when its last gather was issued.
        in_buffer: that number when the gather that filled the unsharded buffer was issued.
        counters: tensors whose versions also count writes to the shard. [Note: faces]
        replacements: a number that changes with each replaced holder.
    """

    def __init__(
        self,
        shard: torch.Tensor,
        flat_param: nn.Parameter,
        counted: Sequence[torch.Tensor],
        counters: Sequence[torch.Tensor] = (),
    ) -> None:
        self.counters = counters
        self.replacements = 0
        self._shard = shard
        self._flat_param = flat_param
        self.counted = counted
        self.only = counted[0] if len(counted) == 1 and type(counted[0]) is torch.Tensor else None
        self._saved: list[int] = []  # the versions in tensors that autograd saved of the buffer's content
        self.known: list[int] = []
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
        return self.of_shard, *map(VERSION, self.counted)

    def show_shard(self) -> None:
        """Record that the leaves show the shard itself, which is the whole parameter."""
        writes = self.of_shard
        if writes != self.in_buffer:
            # The leaves see the write, made through the flat parameter, without a change of their versions.
            torch.autograd.graph.increment_version(self.counted)
            self.in_buffer = writes
        with _torch.as_plain_tensors():
            self._saved = self.known = list(map(VERSION, self.counted))

    def on_overwrite(self, indices: Collection[int]) -> None:
        """Before the memory of these parameters, whose leaves have counters of their own, is overwritten: make autograd
        refuse saved views of them."""
        self.known = list(self.known)
        for i in indices:
            self.known[i] += 1
        torch.autograd.graph.increment_version([self.counted[i] for i in indices])

    def on_fill(self, *, changed: bool) -> None:
        """Record that the buffer holds weights again; `changed`: the shard was written to, not through a leaf.

        A leaf that other code wrote to since the last fill also keeps its version.
        """
        if self.only is not None:
            found = [self.only._version]
        else:
            with _torch.as_plain_tensors():  # they may refuse to be used
                found = list(map(VERSION, self.counted))
        if changed or not self.known:
            self._saved = self.known = found
            return
        at_rest = [self.known[0] + 1] if self.only is not None else list(map(_NEXT, self.known))
        if found != at_rest:
            entries = zip(found, self._saved, at_rest, strict=True)
            self._saved = [saved if version == known else version for version, saved, known in entries]
        self.known = self._saved
        _torch.set_versions(self.counted, self.known)

    @property
    def is_stale(self) -> bool:
        """Whether the shard was written to since the unsharded buffer was filled."""
        writes = self.of_shard if self.counters else self._shard._version + self._flat_param._version
        return writes != self.in_buffer or list(map(VERSION, self.counted)) != self.known

    @property
    def was_written_since_gathered(self) -> bool:
        """Whether the shard was written to since the last gather of it was issued."""
        return self.of_shard != self.gathered

    @property
    def was_edited(self) -> bool:
        """Whether a leaf was written to in place since the unsharded buffer was filled."""
        return list(map(VERSION, self.counted)) != self.known

    @property
    def edited(self) -> list[int]:
        """The indices of the counters of these leaves."""
        return [i for i, found in enumerate(map(VERSION, self.counted)) if found != self.known[i]]
