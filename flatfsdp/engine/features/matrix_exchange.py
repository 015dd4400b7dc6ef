"""The exchange of matrices over one axis: parts of gradients and parameters go to owners, updated parts come back.

[Note: matrix exchange] A step has one small gather, by which ranks learn which matrices have a gradient, and for each
bucket of matrices two all-to-alls. In the first, each rank sends each owner its parts of the owner's matrices, of the
gradient and of the parameter. The owner steps on the whole matrices, and sends updated parts back. The parameter is
sent although the owner could keep a copy: a program may write to its shards in any way, of which versions show only
some, and an owner with an old copy would silently undo it. While a bucket is computed, the next one is sent, and the
one before comes back.

Bytes of a step, for elements of `size` bytes (`OwnerPlan` has the sums): a rank sends `2 * size * sent(rank)` to owners
and `size * returned(rank)` back. A matrix that is not cut is stepped on where it lies, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ...errors import UsageError, ranks_in_words
from ..comm.transport import Transport
from ..device.streams import DONE, PendingWork
from ..flat.flat_param import FlatParamHandle
from ..flat.layout_views import dense, stored_in_order
from ..layout.layout import Span
from ..planning.owners import OwnerPlan, Piece
from ..transports.all_to_all import start_all_to_all
from ..transports.blocking import gather_now
from .matrix_adapters import Seen

# Flags of a matrix on one rank: of its gradient, if the rank has elements; and of its optimizer state, which is that of
# the whole matrix, or of the rank's part.
WITHOUT_GRADIENT, WITH_GRADIENT, WITH_STATE, IN_PARTS, OTHER_GRADIENT = 1, 2, 4, 8, 16


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter that an optimizer steps on as whole matrices.

    Attributes:
        parameter: the holder, of which this rank may have nothing.
        handle, index: its place in the model.
        group: the number of its param group.
        name: for messages.
    """

    parameter: nn.Parameter
    handle: FlatParamHandle
    index: int
    group: int
    name: str

    @property
    def start(self) -> int:
        """The first element of the parameter that this rank has."""
        return self.handle.layout.span_in_param(self.index, self.handle.rank).start

    def own(self) -> torch.Tensor:
        """This rank's elements of the parameter, in memory order, as a view."""
        return dense(self.handle.face.local_of(self.parameter).detach())

    def gradient(self) -> torch.Tensor:
        """This rank's elements of the gradient, in the order of `own`. Precondition: there is a gradient."""
        assert self.parameter.grad is not None
        grad = self.handle.face.local_of(self.parameter.grad).detach()
        return dense(stored_in_order(grad, self.handle.face.local_of(self.parameter).stride()))

    def has_other_gradient(self) -> bool:
        """Whether its gradient cannot be sent together with the parameter: it is of another dtype, or not dense."""
        assert self.parameter.grad is not None
        grad = self.handle.face.local_of(self.parameter.grad)
        return grad.layout is not torch.strided or grad.dtype != self.parameter.dtype


class Entry(NamedTuple):
    """One matrix: its parameter, and how an optimizer sees it."""

    slot: Slot
    seen: Seen

    def within(self, flat: torch.Tensor, span: Span) -> torch.Tensor:
        """The elements `span` of the matrix, all of them this rank's, in `flat`, which is ordered like `Slot.own`."""
        return flat.narrow(0, self.seen.span.start + span.start - self.slot.start, span.numel)


class Whole(NamedTuple):
    """One matrix at its owner, for a step.

    Attributes:
        entry: which one.
        flat: the parameter's elements in memory order; the shard itself if the matrix is not cut.
        parameter: the same, as the optimizer sees them, with the gradient.
    """

    entry: Entry
    flat: torch.Tensor
    parameter: nn.Parameter


Steps = Callable[[Sequence[Whole]], None]


class MatrixExchange:
    """The matrices of an optimizer that are spread over the ranks of one axis.

    Attributes:
        transport: over the axis.
        plan: the owners.
        entries: the matrices, in the order of the plan.
    """

    def __init__(self, transport: Transport, plan: OwnerPlan, entries: Sequence[Entry]) -> None:
        self.transport, self.plan, self.entries = transport, plan, entries
        self.rank = transport.group.rank

    def look(self, form_of: Callable[[Entry], int]) -> tuple[frozenset[int], bool]:
        """The matrices that have a gradient, and whether any rank has optimizer state of a part of one. Collective: a
        byte for each matrix and rank. `form_of`: the flag of this rank's state.

        Raises:
            UsageError: on all ranks: only some of the ranks that have elements of a matrix have a gradient, or have
                state of their parts; a rank that is not the owner has state of all of it; a gradient of another dtype.
        """
        flags = torch.tensor([self._flag(i, form_of) for i in range(len(self.entries))], dtype=torch.uint8)
        found = gather_now(self.transport, flags.to(self.transport.device.device)).tolist()
        present, in_parts = [], False
        for index, of_ranks in enumerate(zip(*found, strict=True)):
            having = [rank for rank, flag in enumerate(of_ranks) if flag & WITH_GRADIENT]
            lacking = [rank for rank, flag in enumerate(of_ranks) if flag & WITHOUT_GRADIENT]
            if having and lacking:
                raise UsageError(
                    f"matrix_steps: {self._named(having)} {'have' if len(having) > 1 else 'has'} a gradient of "
                    f"{self.entries[index].slot.name}, but {self._named(lacking)}, with other elements of it, "
                    f"{'have' if len(lacking) > 1 else 'has'} none. A matrix is stepped on as a whole: set `.grad` to "
                    "None on all ranks or on none"
                )
            if any(flag & OTHER_GRADIENT for flag in of_ranks):
                raise UsageError(
                    f"matrix_steps: the gradient of {self.entries[index].slot.name} is not a dense tensor of "
                    f"{self.entries[index].slot.parameter.dtype}, as the parameter is. Use matrix_steps without "
                    "keep_low_precision_grads=True"
                )
            strangers = [rank for rank, flag in enumerate(of_ranks) if flag & WITH_STATE]
            parts = [rank for rank, flag in enumerate(of_ranks) if flag & IN_PARTS]
            in_parts = in_parts or bool(parts)
            if parts and not {*having, *lacking} <= {*parts}:
                without = sorted({*having, *lacking} - {*parts})
                raise UsageError(
                    f"matrix_steps: {self._named(parts)} has optimizer state of its part of "
                    f"{self.entries[index].slot.name}, but {self._named(without)}, with other elements of it, has "
                    "none. Load states on all ranks"
                )
            if strangers and (parts or strangers != [self.plan.owners[index]]):
                raise UsageError(
                    f"matrix_steps: {self._named(strangers)} has optimizer state of {self.entries[index].slot.name}, "
                    f"whose owner is {self._named([self.plan.owners[index]])}"
                    f"{f', and {self._named(parts)} of parts of it' if parts else ''}: it was loaded with other "
                    "owners, or on some ranks only. Load by name (optim_state_dict_to_load() of the wrapper, or "
                    "checkpoint.load) on all ranks, or pass the owners with which it was made as owners="
                )
            if having:
                present.append(index)
        return frozenset(present), in_parts

    def _flag(self, index: int, form_of: Callable[[Entry], int]) -> int:
        entry = self.entries[index]
        state = form_of(entry)
        if self.plan.matrices[index].span_of(self.rank).is_empty:
            return state
        if entry.slot.parameter.grad is None:
            return WITHOUT_GRADIENT + state
        return WITH_GRADIENT + state + OTHER_GRADIENT * entry.slot.has_other_gradient()

    def _named(self, ranks: Iterable[int]) -> str:
        return ranks_in_words([self.transport.group.ranks[rank] for rank in ranks])

    def step(self, present: Collection[int], step: Steps) -> None:
        """Call `step` with this rank's matrices of each bucket, those that are `present`, and distribute the results.
        Collective."""
        buckets = [kept for bucket in self.plan.buckets if (kept := [i for i in bucket if i in present])]
        exchanges = [_Bucket(self, bucket) for bucket in buckets]
        for number, bucket in enumerate(exchanges):
            if not number:
                bucket.send()
            if number + 1 < len(exchanges):
                exchanges[number + 1].send()
            bucket.step(step)
            bucket.send_back()
            if number:
                exchanges[number - 1].finish()
        if exchanges:
            exchanges[-1].finish()


class _Bucket:
    """One bucket on its way: `send`, `step`, `send_back` and `finish` are called in this order."""

    def __init__(self, exchange: MatrixExchange, indices: Sequence[int]) -> None:
        self._exchange_of, self._entries = exchange, exchange.entries
        self._plan, self._rank = exchange.plan, exchange.rank
        self._indices = indices
        self._moves = self._plan.is_exchanged(indices)
        self._outgoing = self._plan.outgoing(indices, self._rank)
        self._incoming = self._plan.incoming(indices, self._rank)
        self._arriving: PendingWork = DONE
        self._wholes: dict[int, Whole] = {}
        self._locals: dict[Slot, tuple[torch.Tensor, torch.Tensor]] = {}

    def send(self) -> None:
        """Send this rank's parts of gradients and parameters to their owners."""
        sections = []
        for index, span in each_piece(self._outgoing):
            entry = self._entries[index]
            own, gradient = self._local(entry.slot)
            sections += [entry.within(gradient, span), entry.within(own, span)]
        self._arrived = self._exchange(sections, self._incoming, self._outgoing, each=2)

    def step(self, step: Steps) -> None:
        """Wait for the parts that others send, and step on this rank's matrices."""
        self._arriving.wait()
        wholes, gradients = self._wholes, dict[int, torch.Tensor]()
        for index in self._indices:
            if self._plan.owners[index] == self._rank:
                wholes[index], gradients[index] = self._prepare(index)
        arrived = self._arrived
        for index, span in each_piece(self._incoming):
            gradients[index][span.slice].copy_(arrived[: span.numel])
            wholes[index].flat[span.slice].copy_(arrived[span.numel : 2 * span.numel])
            arrived = arrived[2 * span.numel :]
        del self._arrived, arrived
        if wholes:
            step([*wholes.values()])
        for index, whole in wholes.items():
            whole.parameter.grad = None
            span = self._plan.matrices[index].span_of(self._rank)
            if 0 < span.numel < whole.flat.numel():
                whole.entry.within(self._local(whole.entry.slot)[0], span).copy_(whole.flat[span.slice])

    def send_back(self) -> None:
        """Send the updated parts of this rank's matrices to the ranks that they are of."""
        sections = [self._wholes[index].flat[span.slice] for index, span in each_piece(self._incoming)]
        self._returned = self._exchange(sections, self._outgoing, self._incoming, each=1)
        self._wholes = {}

    def finish(self) -> None:
        """Wait for updated parts of this rank, and write them to the shards."""
        self._arriving.wait()
        returned = self._returned
        for index, span in each_piece(self._outgoing):
            entry = self._entries[index]
            entry.within(self._local(entry.slot)[0], span).copy_(returned[: span.numel])
            returned = returned[span.numel :]
        del self._returned
        self._locals.clear()

    def _local(self, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's elements of a parameter and of its gradient; without elements both are empty."""
        found = self._locals.get(slot)
        if found is None:
            own = slot.own()
            found = self._locals[slot] = own, slot.gradient() if own.numel() else own
        return found

    def _prepare(self, index: int) -> tuple[Whole, torch.Tensor]:
        """A matrix of this rank, and its gradient, both with the parts that are here already."""
        entry, matrix = self._entries[index], self._plan.matrices[index]
        (own, gradient), span = self._local(entry.slot), matrix.span_of(self._rank)
        if span.numel == matrix.numel:
            flat, whole_gradient = entry.within(own, span), entry.within(gradient, span)
        else:
            flat, whole_gradient = own.new_empty(matrix.numel), own.new_empty(matrix.numel)
            if not span.is_empty:
                flat[span.slice].copy_(entry.within(own, span))
                whole_gradient[span.slice].copy_(entry.within(gradient, span))
        parameter = nn.Parameter(entry.seen.view(flat))
        parameter.grad = entry.seen.view(whole_gradient)
        return Whole(entry, flat, parameter), whole_gradient

    def _exchange(
        self,
        sections: Sequence[torch.Tensor],
        coming: Sequence[Sequence[Piece]],
        going: Sequence[Sequence[Piece]],
        *,
        each: int,
    ) -> torch.Tensor:
        """Start to send `sections`, those of the pieces `going` to each rank, and return the memory that those
        `coming` from each will have; `each`: the numbers for an element."""
        reference = self._local(self._entries[self._indices[0]].slot)[0]
        arriving, sending = counted(coming, each), counted(going, each)
        arrived = reference.new_empty(sum(arriving))
        if self._moves:
            sent = torch.cat([*sections]) if sections else reference.new_empty(0)
            self._arriving = start_all_to_all(self._exchange_of.transport, arrived, sent, arriving, sending)
        return arrived


def each_piece(of_ranks: Iterable[Iterable[Piece]]) -> Iterable[Piece]:
    """The pieces of all ranks, in rank order."""
    return (piece for pieces in of_ranks for piece in pieces)


def counted(of_ranks: Iterable[Iterable[Piece]], each: int = 1) -> list[int]:
    """The numbers that are sent for the pieces of each rank; `each`: for an element."""
    return [each * sum(span.numel for _, span in pieces) for pieces in of_ranks]


def exchange_pieces(
    exchange: MatrixExchange,
    indices: Sequence[int],
    sections: Sequence[torch.Tensor],
    coming: Sequence[Sequence[Piece]],
    going: Sequence[Sequence[Piece]],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Send `sections`, the pieces `going` to each rank, of these matrices, and return those that are `coming`, one
    after the other. Collective, if any rank sends something."""
    arrived = torch.empty(sum(counted(coming)), dtype=dtype, device=device)
    if exchange.plan.is_exchanged(indices):
        sent = torch.cat([*sections]) if sections else arrived.new_empty(0)
        start_all_to_all(exchange.transport, arrived, sent, counted(coming), counted(going)).wait()
    return arrived
