"""Graphs over what parameters show while they are sharded, which a backward would end in an error of autograd's.

[Note: uses of shards] At rest parameters show this rank's shard, and programs may compute with it: for example a
penalty over `model.parameters()` before the forward. If the backward reaches that graph, autograd complains of the
shape of a gradient, or of a variable that was modified, and names no parameter: the error cannot be replaced, so the
backward is refused when it begins. Looking for such graphs takes time, so it is done where something may have made one:
in the first backward, and in the first after one that failed; if this thread has added nodes to graphs while parameters
were at rest, which it rarely does; and if a unit is gathered in a forward, and a graph over it exists that did not when
the forward began: then a custom Function of another unit has got a weight.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from ...errors import UsageError, fail
from ..base import _torch
from ..base import autograd as hooks
from ..flat.flat_param import FlatParamHandle
from .unit import Unit

_KNOWN = 1000  # more numbers are not kept


class UsesOfShards:
    """Refuses backwards of one model that reach graphs over its shards.

    Attributes:
        none_known: the last backward was looked at, and has not failed.
        maybe: something indicates such a graph in the running iteration.
        starts_clean: no graph over any parameter existed when the running forward began.
        whole: units that a user has unsharded at rest, and may compute with.
        at_rest_from: the number of the first node that could be made since parameters came to rest; None if they are
            not at rest.
        forward_ended_at, thread: that number when the last forward had ended, and the thread in which it ran.
        made: of nodes that were made at rest: the first number, and the one after the last, of each rest.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.none_known = self.maybe = self.starts_clean = False
        self.whole: set[Unit] = set()
        self._units = units
        self.thread = threading.get_ident()
        self.forward_ended_at = 0
        self.at_rest_from: int | None = _torch.next_sequence_nr()
        self.made: deque[tuple[int, int]] = deque(maxlen=8)
        self._harmless: set[int] = set()  # how many nodes were made at rest before backwards that did not reach any

    def rest_begins(self, *, anew: bool = False) -> None:
        """Parameters show their shards from now on; `anew`: and graphs of earlier rests are not used any more."""
        if anew:
            self.made.clear()
            self.whole.clear()
            self.at_rest_from = None
        if self.at_rest_from is None:  # on an accelerator another thread ends the backward: it numbers its own nodes
            here = threading.get_ident() == self.thread
            self.at_rest_from = _torch.next_sequence_nr() if here else self.forward_ended_at

    def rest_ends(self) -> None:
        """Parameters will show something else than their shards."""
        first, now = self.at_rest_from, _torch.next_sequence_nr()
        self.at_rest_from = None
        if first is not None and now > first and threading.get_ident() == self.thread:
            if self.made and self.made[-1][1] == first:
                first, _ = self.made.pop()
            self.made.append((first, now))

    def look(self, entered: Iterable[Unit]) -> None:
        """Raise if the backward that begins, over units that forwards have `entered`, reaches a graph over shards, as
        far as something indicates one."""
        made = sum([after - first for first, after in self.made])
        if self.none_known and not self.maybe and (not made or made in self._harmless):
            return
        self.none_known = False
        if made:
            self._refuse_made_at_rest()
            if len(self._harmless) < _KNOWN:
                self._harmless.add(made)
        self._refuse_other_shapes(entered)
        self.none_known, self.maybe = True, False

    def _refuse_made_at_rest(self) -> None:
        used = {id(leaf) for leaf in hooks.leaves_used_in(self.made, _torch.roots_of_backwards())}
        if not used:
            return
        for unit in [each for each in self._units if each not in self.whole]:
            for handle in unit.handles:
                for leaf, spec in zip(handle.face.originals, handle.layout.params, strict=True):
                    if id(leaf) in used and not _is_usable_at_rest(unit, handle):
                        fail(
                            UsageError(
                                f"this backward brings gradients to {spec.name!r} of unit {unit.label}, with which "
                                "something was computed before the forward, where parameters show this rank's shard: "
                                "a term over parameters (for example an L2 penalty). Compute it inside the forward of "
                                "the module that holds the parameter, or under torch.no_grad()"
                            )
                        )

    def _refuse_other_shapes(self, entered: Iterable[Unit]) -> None:
        """Raise if the backward brings gradients to accumulators that were created while parameters showed the
        shard."""
        with _torch.as_plain_tensors():
            for unit in entered:
                for handle in unit.handles:
                    usable = handle.face.two_lives and _is_usable_at_rest(unit, handle)
                    for leaf, spec in zip(handle.face.originals, handle.layout.params, strict=True):
                        fits = None if handle.face.two_lives else spec.shape
                        if leaf.requires_grad and not usable and hooks.will_accumulate(leaf, unless=fits):
                            fail(
                                UsageError(
                                    f"this backward brings gradients to {spec.name!r} of unit {unit.label}, with which "
                                    "something was computed outside the forward of that unit, where it is sharded, of "
                                    f"shape {tuple(hooks.shape_awaited(leaf))} instead of {tuple(spec.shape)}: a term "
                                    "over parameters (for example an L2 penalty), or a custom autograd Function of "
                                    "another unit. Compute it inside the forward of the module that holds the "
                                    "parameter, or under torch.no_grad()"
                                )
                            )


def _is_usable_at_rest(unit: Unit, handle: FlatParamHandle) -> bool:
    """Whether a parameter at rest is what the unit computes with: graphs over it are as in a model without units."""
    shard = handle.shard
    if handle.face.two_lives and unit.axes.of(handle).world > 1:
        return False  # gradients of holders are not reduced
    return handle.is_unsharded_at_rest and shard.dtype == unit.dtype_of(handle) and shard.device == handle.device
