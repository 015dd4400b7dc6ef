"""The exchange of matrices between ranks: owners get what they need of each part, and what they compute goes back.

[Note: matrix exchange] A step on matrices has three parts (`Work`). Each rank begins with its own elements, which makes
numbers for the owner; the owner computes on whole matrices; each rank ends with the results for its elements. A bucket
of matrices takes two all-to-alls between the ranks that have different parts, to the owners and back. Where parts have
replicas and one owner computes for all, results then go to the other replicas in a third one. A step begins with a
small gather, by which ranks learn which matrices have a gradient. While a bucket is computed, the next one is sent, and
the one before comes back.

Bytes of a step, for results of `size` bytes and `work.sent` numbers for an owner (`OwnerPlan` has the sums): a member
sends `work.sent * size * sent(member)` to owners, `size * returned(member)` back and `size * copied(member)` to other
replicas. A matrix that is not cut is computed where it lies, and nothing is sent between parts.

[Note: failed owners] An owner whose part of a step raises leaves out its later ones, and sends results that change as
little as possible: its peers wait for them. A rank whose own elements raise sends zeros, and keeps these elements. When
all are back, a byte of each rank is its report of a failure, and all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ...errors import AgreementError, UsageError, by_ranks, ranks_in_words
from ..agreement.object_collectives import all_or_none, description_of
from ..base.overrides import is_memoryless
from ..comm.transport import Transport
from ..flat.flat_param import FlatParamHandle
from ..flat.layout_views import dense, stored_in_order
from ..layout.layout import ParamSpec, Span
from ..planning.owners import OwnerPlan, Piece, elements_of
from ..runtime.unit import Unit
from ..transports.all_to_all import start_all_to_all
from ..transports.blocking import all_reduce_now, gather_now
from .matrix_adapters import Seen

# Flags of a matrix on one rank: of its gradient, if the rank has elements; and of its optimizer state, which is that of
# the whole matrix, or of the rank's part.
WITHOUT_GRADIENT, WITH_GRADIENT, WITH_STATE, IN_PARTS = 1, 2, 4, 8
MATRICES = "matrices"  # the category of their memory: what is sent, what arrives, what owners put together
FAILED = "reports what failed in a step on whole matrices"


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter that an optimizer steps on as whole matrices.

    Attributes:
        parameter: the holder, of which this rank may have nothing.
        unit, kind, index: its place in the model: leaf `index` of `unit.handles[kind]`.
        group: the number of its param group.
        name: for messages.
    """

    parameter: nn.Parameter
    unit: Unit
    kind: int
    index: int
    group: int
    name: str

    @property
    def handle(self) -> FlatParamHandle:
        """The handle that it belongs to."""
        return self.unit.handles[self.kind]

    @property
    def spec(self) -> ParamSpec:
        """The layout's entry."""
        return self.handle.layout.params[self.index]

    @property
    def start(self) -> int:
        """The first element of the parameter that this rank has."""
        return self.handle.layout.span_in_param(self.index, self.handle.rank).start

    def own(self) -> torch.Tensor:
        """This rank's elements of the parameter, in memory order, as a view."""
        return dense(self.handle.face.local_of(self.parameter).detach())

    def like_own(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a gradient, or of a state that has one for each of the parameter's, in the order of
        `own`; a view if they are stored in that order."""
        local = self.handle.face.local_of(value).detach()
        return dense(stored_in_order(local, self.handle.face.local_of(self.parameter).stride()))

    def gradient(self) -> torch.Tensor:
        """This rank's elements of the gradient, in the order of `own`. Precondition: there is a gradient.

        Raises:
            UsageError: it cannot be sent together with the parameter.
        """
        assert self.parameter.grad is not None
        grad = self.handle.face.local_of(self.parameter.grad)
        if grad.layout is not torch.strided or grad.dtype != self.parameter.dtype:
            raise UsageError(
                f"matrix_steps: the gradient of {self.name} is not a dense tensor of {self.parameter.dtype}, as the "
                "parameter is. Use matrix_steps without keep_low_precision_grads=True"
            )
        return self.like_own(self.parameter.grad)


class Entry(NamedTuple):
    """One matrix: its parameter, and how an optimizer sees it."""

    slot: Slot
    seen: Seen

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, of which tensor parallelism may store a part here."""
        part = self.slot.spec.part
        return self.seen.shape if part is None else tuple(part.shape)

    def within(self, flat: torch.Tensor, span: Span) -> torch.Tensor:
        """The elements `span` of the matrix, all of them this rank's, in `flat`, which is ordered like `Slot.own`."""
        return flat.narrow(0, self.seen.span.start + span.start - self.slot.start, span.numel)


class Whole(NamedTuple):
    """One matrix at its owner.

    Attributes:
        entry: which one.
        numbers: those that ranks began with, of all elements, in memory order: a tensor for each of `Work.sent`.
    """

    entry: Entry
    numbers: tuple[torch.Tensor, ...]


class Work(Protocol):
    """A step of an optimizer on matrices, in parts. No method communicates. [Note: matrix exchange]

    Attributes:
        sent: how many numbers an owner gets for each element of a matrix; one comes back.
        in_parts: whether each rank keeps the optimizer state of its elements. Then `compute` depends on nothing else,
            so that one owner can compute for all replicas; and it may be collective, over other axes.
    """

    sent: int
    in_parts: bool

    def dtype_of(self, slot: Slot) -> torch.dtype:
        """The dtype of what is sent in both directions."""

    def state_of(self, entry: Entry) -> int:
        """`WITH_STATE` if this rank has the state of a whole matrix, `IN_PARTS` if of its part, or 0."""

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Called at the beginning of a step, with the matrices that have a gradient on any rank."""

    def begin(self, entry: Entry, span: Span) -> Sequence[torch.Tensor]:
        """Numbers of this rank's elements of a matrix, `span`, for the owner: 1-D tensors in memory order. Called on
        every rank that has elements, once for each step and matrix that has a gradient."""

    def compute(self, wholes: Sequence[Whole]) -> Sequence[torch.Tensor]:
        """The results for all elements of these matrices, which this rank owns: 1-D, in memory order."""

    def unchanged(self, whole: Whole) -> torch.Tensor:
        """The result in place of one that `compute` failed to give."""

    def end(self, entry: Entry, span: Span, result: torch.Tensor) -> None:
        """Apply the results to this rank's elements."""


class MatrixExchange:
    """The matrices of an optimizer that are spread over the ranks of an axis, and maybe over replicas of it.

    Attributes:
        transport: over the ranks that have different parts.
        replicas: over those that have the same parts, if they share the work; None otherwise.
        axes: all axes over which parts or copies are spread.
        plan: the owners.
        entries: the matrices, in the order of the plan.
        member: this rank, as a member of the plan.
    """

    def __init__(
        self,
        transport: Transport,
        replicas: Transport | None,
        axes: Sequence[Transport],
        plan: OwnerPlan,
        entries: Sequence[Entry],
    ) -> None:
        self.transport, self.replicas, self.axes = transport, replicas, axes
        self.plan, self.entries = plan, entries
        self.rank = transport.group.rank
        self.member = self.rank + (replicas.group.rank * plan.world if replicas is not None else 0)

    def look(self, work: Work) -> tuple[frozenset[int], bool]:
        """The matrices that have a gradient, and whether any rank has optimizer state of a part of one. Collective: a
        byte for each matrix and rank.

        Raises:
            UsageError: on all ranks: only some of the ranks that have elements of a matrix have a gradient, or have
                state of their parts.
        """
        flags = torch.tensor([self._flag(i, work) for i in range(len(self.entries))], dtype=torch.uint8)
        found = gather_now(self.transport, flags.to(self.transport.device.device))
        if self.replicas is not None:
            found = gather_now(self.replicas, found).flatten(0, 1)
        if is_memoryless():
            return frozenset(range(len(self.entries))), False
        present, in_parts = [], False
        for index, of_members in enumerate(zip(*found.tolist(), strict=True)):
            name = self.entries[index].slot.name
            having = [member for member, flag in enumerate(of_members) if flag & WITH_GRADIENT]
            lacking = [member for member, flag in enumerate(of_members) if flag & WITHOUT_GRADIENT]
            if having and lacking:
                raise UsageError(
                    f"matrix_steps: {self._named(having)} {'have' if len(having) > 1 else 'has'} a gradient of "
                    f"{name}, but {self._named(lacking)}, with elements of it, {'have' if len(lacking) > 1 else 'has'} "
                    "none. A matrix is stepped on as a whole: set `.grad` to None on all ranks or on none"
                )
            parts = [member for member, flag in enumerate(of_members) if flag & IN_PARTS]
            without = sorted({*having, *lacking}.difference(parts))
            if parts and without:
                raise UsageError(
                    f"matrix_steps: {self._named(parts)} {'have' if len(parts) > 1 else 'has'} optimizer state of "
                    f"parts of {name}, but not {self._named(without)}, with elements of it. Load by name "
                    "(optim_state_dict_to_load() of the wrapper, or checkpoint.load) on all ranks"
                )
            in_parts = in_parts or bool(parts)
            if having:
                present.append(index)
        return frozenset(present), in_parts

    def _flag(self, index: int, work: Work) -> int:
        entry = self.entries[index]
        state = work.state_of(entry)
        if self.plan.matrices[index].span_of(self.rank).is_empty:
            return state
        if entry.slot.parameter.grad is None:
            return WITHOUT_GRADIENT + state
        return WITH_GRADIENT + state

    def _named(self, members: Iterable[int]) -> str:
        ranks = self.transport.group.ranks
        if self.replicas is None:
            return ranks_in_words([ranks[member] for member in members])
        offsets = [rank - ranks[self.rank] for rank in ranks]  # the same in all replicas of a mesh
        of_replicas = self.replicas.group.ranks
        world = self.plan.world
        return ranks_in_words([of_replicas[member // world] + offsets[member % world] for member in members])

    def step(self, present: Collection[int], work: Work) -> list[Exception]:
        """Take a step on the matrices that are `present`. Returned: what this rank failed in. Collective."""
        failed: list[Exception] = []
        buckets = [kept for bucket in self.plan.buckets if (kept := [i for i in bucket if i in present])]
        ahead = [_Bucket(self, bucket, work, failed) for bucket in buckets]
        for number, bucket in enumerate(ahead):
            if not number:
                bucket.send()
            if number + 1 < len(ahead):
                ahead[number + 1].send()
            bucket.compute()
            bucket.send_back()
            if number:
                ahead[number - 1].finish()
        if ahead:
            ahead[-1].finish()
        return failed


class Pieces:
    """Pieces of matrices on their way between the ranks of a transport. Making it is collective.

    Attributes:
        free: no longer counts their memory.

    Args:
        over: the transport.
        going, coming: for each of its ranks the pieces that it gets from this one, and this one from it.
        read: for a piece that is sent, its elements in each of `count` tensors.
        dtype: of these.
    """

    def __init__(
        self,
        over: Transport,
        going: Sequence[Sequence[Piece]],
        coming: Sequence[Sequence[Piece]],
        read: Callable[[int, Span], Sequence[torch.Tensor]],
        dtype: torch.dtype,
        *,
        count: int = 1,
        category: str = "all_to_all",
    ) -> None:
        arriving, sending = ([count * elements_of([pieces]) for pieces in each] for each in (coming, going))
        sections = [each for index, span in each_piece(going) for each in read(index, span)]
        device = over.device.device
        sent = torch.cat(sections) if sections else torch.empty(0, dtype=dtype, device=device)
        self._arrived = torch.empty(sum(arriving), dtype=dtype, device=device)
        self._work = start_all_to_all(over, self._arrived, sent, arriving, sending, category=category)
        self._coming, self._count = [*each_piece(coming)], count
        self.free = over.tracker.allocate(MATRICES, sent.nbytes + self._arrived.nbytes)

    def arrive(self) -> Iterator[tuple[int, Span, torch.Tensor]]:
        """Wait for those that come: each with its elements, a row for each tensor."""
        self._work.wait()
        of_pieces = self._arrived.split([self._count * span.numel for _, span in self._coming])
        for (index, span), elements in zip(self._coming, of_pieces, strict=True):
            yield index, span, elements.view(self._count, span.numel)


class _Bucket:
    """One bucket on its way: `send`, `compute`, `send_back` and `finish` are called in this order."""

    def __init__(self, exchange: MatrixExchange, indices: Sequence[int], work: Work, failed: list[Exception]) -> None:
        """`failed`: gets what fails on this rank. [Note: failed owners]"""
        self._exchange, self._entries, self._work, self._indices = exchange, exchange.entries, work, indices
        self._failed = failed
        self._kept: set[int] = set()  # the matrices of which this rank's elements stay as they are
        self._plan, self._rank, member = exchange.plan, exchange.rank, exchange.member
        self._spans = {index: self._plan.matrices[index].span_of(self._rank) for index in indices}
        self._moves = self._plan.is_exchanged(indices, member)
        self._outgoing, self._incoming = self._plan.outgoing(indices, member), self._plan.incoming(indices, member)
        self._owned = [index for index in indices if self._plan.owners[index] == member]
        self._dtype = work.dtype_of(self._entries[indices[0]].slot)
        self._pieces: Pieces | None = None  # on their way
        self._numbers: dict[int, Sequence[torch.Tensor]] = {}  # of this rank's elements
        self._results: dict[int, torch.Tensor] = {}  # for all elements of its matrices; then for its elements
        self._held: list[Callable[[], None]] = []  # to be called when counted memory is free

    def send(self) -> None:
        """Begin with this rank's elements, and send owners what they need of these."""
        for index, span in self._spans.items():
            if not span.is_empty:
                self._numbers[index] = self._begin(index, span)
        if self._moves:
            ways = self._exchange.transport, self._outgoing, self._incoming
            self._pieces = Pieces(*ways, lambda i, _: self._numbers[i], self._dtype, count=self._work.sent)
        self._numbers = {index: self._numbers[index] for index in self._owned if index in self._numbers}

    def _begin(self, index: int, span: Span) -> Sequence[torch.Tensor]:
        try:
            return self._work.begin(self._entries[index], span)
        except Exception as error:
            self._failed.append(error)
            self._kept.add(index)
            nothing = torch.zeros(span.numel, dtype=self._dtype, device=self._exchange.transport.device.device)
            return [nothing] * self._work.sent

    def compute(self) -> None:
        """Wait for what others send, and compute on this rank's matrices, unless it has failed."""
        failed, wholes = self._failed, self._wholes()
        results: Sequence[torch.Tensor] = []
        # Other ranks wait for results, so a failure is reported when all have come back. [Note: failed owners]
        try:
            if wholes and (self._work.in_parts or not failed):
                results = self._work.compute([*wholes.values()])
        except Exception as error:
            failed.append(error)
        if failed:
            results = [self._work.unchanged(whole) for whole in wholes.values()]
        self._results = dict(zip(wholes, results, strict=True))

    def _wholes(self) -> dict[int, Whole]:
        """This rank's matrices with their numbers: in place if all of these were here."""
        wholes = {index: self._begun(index) for index in self._owned}
        self._numbers = {}
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            for index, span, elements in pieces.arrive():
                for numbers, arrived in zip(wholes[index].numbers, elements, strict=True):
                    numbers[span.slice].copy_(arrived)
            pieces.free()
        return wholes

    def _begun(self, index: int) -> Whole:
        """A matrix of this rank with the numbers that were here."""
        matrix, span = self._plan.matrices[index], self._spans[index]
        own = self._numbers.get(index, ())
        if span.numel == matrix.numel:
            return Whole(self._entries[index], tuple(own))
        device, tracker = self._exchange.transport.device.device, self._exchange.transport.tracker
        made = [torch.empty(matrix.numel, dtype=self._dtype, device=device) for _ in range(self._work.sent)]
        self._held.append(tracker.allocate(MATRICES, sum(each.nbytes for each in made)))
        for numbers, here in zip(made, own, strict=False):
            numbers[span.slice].copy_(here)
        return Whole(self._entries[index], tuple(made))

    def send_back(self) -> None:
        """Send results to the ranks whose elements they are for."""
        if self._moves:
            ways = self._exchange.transport, self._incoming, self._outgoing
            self._pieces = Pieces(*ways, lambda i, span: [self._results[i][span.slice]], self._dtype)
        self._results = {index: each[self._spans[index].slice] for index, each in self._results.items()}

    def finish(self) -> None:
        """Wait for results of owners in this replica, then in others, and end with this rank's elements."""
        self._take()
        copies, over = self._plan.copies(self._indices, self._rank), self._exchange.replicas
        if over is not None and any(copies):
            here = over.group.rank
            going = [copies[here] if other != here else [] for other in range(len(copies))]
            ways = over, going, [*copies[:here], [], *copies[here + 1 :]]
            self._pieces = Pieces(*ways, lambda i, _: [self._results[i]], self._dtype, category="to_replicas")
        self._end()
        self._take()
        self._end()
        for free in self._held:
            free()

    def _end(self) -> None:
        for index, result in self._results.items():
            if self._spans[index].is_empty or index in self._kept:
                continue
            try:
                self._work.end(self._entries[index], self._spans[index], result)
            except Exception as error:
                self._failed.append(error)
        self._results = {}

    def _take(self) -> None:
        """Wait for results, if some are on their way."""
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            self._results |= {index: elements[0] for index, _, elements in pieces.arrive()}
            self._held.append(pieces.free)


def raise_failures(exchanges: Sequence[MatrixExchange], failed: list[Exception]) -> None:
    """Raise what `failed` on this rank, or an error with the reports of others. Collective over all axes: a byte
    of each rank, and descriptions if any failed. [Note: failed owners]

    Raises:
        AgreementError: a step failed on other ranks.
    """
    flags = []
    for exchange in exchanges:
        flag = torch.full((), bool(failed), dtype=torch.uint8, device=exchange.transport.device.device)
        for axis in exchange.axes:
            flag = all_reduce_now(axis, flag, maximum=True)
        flags.append(flag)
    if is_memoryless():
        return
    words: dict[int, str | None] = {}
    for exchange, flag in zip(exchanges, flags, strict=True):
        if flag.item():
            doing = FAILED
            words |= all_or_none(exchange.axes, lambda: description_of(failed[0]) if failed else None, doing=doing)
    if failed:
        del failed[1:]
        raise failed.pop()  # a frame that holds it would keep the model alive
    if others := {rank: text for rank, text in sorted(words.items()) if text is not None}:
        raise AgreementError(
            "matrix_steps: the step on whole matrices failed, and others may have been stepped on: "
            f"{by_ranks(others, ': ')}. Load a checkpoint to have all of them at the same step"
        )


def each_piece(of_ranks: Iterable[Iterable[Piece]]) -> Iterable[Piece]:
    """The pieces of all ranks, in rank order."""
    return (piece for pieces in of_ranks for piece in pieces)
