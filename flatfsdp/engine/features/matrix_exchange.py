"""The exchange of matrices between ranks: owners get what they need of each part, and what they compute goes back.

[Note: matrix exchange] A step on matrices (`Work`) has three parts. Each rank begins with its own elements, which makes
numbers for the owner; the owner computes on whole matrices; each rank ends with the results for its elements. A bucket
of matrices takes two all-to-alls between the ranks that have different parts, to the owners and back. A step begins
with a small gather, by which ranks learn which matrices have a gradient. While a bucket is computed, the next one is
sent, and the one before comes back.

Bytes of a step, for results of `size` bytes and `work.sent` numbers for an owner (`OwnerPlan` has the sums): a rank
sends `work.sent * size * sent(rank)` to owners, and `size * returned(rank)` back. A matrix that is not cut is computed
where it lies, and nothing is sent.

[Note: failed owners] An owner whose part of a step raises leaves out its later ones, and sends results that change as
little as possible: its peers wait for them. A rank whose own elements raise sends zeros, and keeps these elements. When
all are back, a byte of each rank is its report of a failure, and all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ...errors import AgreementError, UsageError, by_ranks, ranks_in_words
from ..agreement.object_collectives import all_or_none, description_of
from ..base.overrides import is_memoryless
from ..comm.transport import Transport
from ..layout.layout import Span
from ..planning.owners import OwnerPlan, Piece, elements_of
from ..transports.all_to_all import start_all_to_all
from ..transports.blocking import all_reduce_now, gather_now
from .matrix_adapters import Entry, Whole
from .muon_steps import MuonSteps
from .own_steps import IN_PARTS, OwnSteps

T = TypeVar("T")
Work = OwnSteps | MuonSteps
# Flags of a matrix on one rank with elements of it, of its gradient; besides that of its optimizer state.
WITHOUT_GRADIENT, WITH_GRADIENT = 1, 2
ALL_OR_NONE = "A matrix is stepped on as a whole: set `.grad` to None on all ranks or on none"
LOAD_BY_NAME = "Load by name (optim_state_dict_to_load() of the wrapper, or checkpoint.load) on all ranks"
MATRICES = "matrices"  # the category of their memory: what is sent, what arrives, what owners put together


class MatrixExchange:
    """The matrices of an optimizer that are spread over the ranks of an axis.

    Attributes:
        transport: over these ranks.
        plan: the owners.
        entries: the matrices, in the order of the plan.
        rank: this one, among them.
    """

    def __init__(self, transport: Transport, plan: OwnerPlan, entries: Sequence[Entry]) -> None:
        self.transport, self.plan, self.entries, self.rank = transport, plan, entries, transport.group.rank

    def look(self, work: Work) -> tuple[frozenset[int], bool]:
        """The matrices that have a gradient, and whether any rank has optimizer state of a part of one. Collective: a
        byte for each matrix and rank.

        Raises:
            UsageError: on all ranks: only some of the ranks that have elements of a matrix have a gradient, or have
                state of their parts.
        """
        flags = [self._flag(i, work) for i in range(len(self.entries))]
        found = gather_now(self.transport, torch.tensor(flags, dtype=torch.uint8, device=self.transport.device.device))
        if is_memoryless():
            return frozenset(range(len(self.entries))), False
        present, in_parts = [], False
        for index, of_ranks in enumerate(zip(*found.tolist(), strict=True)):
            having, lacking, parts = (
                [rank for rank, flags_of_it in enumerate(of_ranks) if flags_of_it & flag]
                for flag in (WITH_GRADIENT, WITHOUT_GRADIENT, IN_PARTS)
            )
            for some, others, what, remedy in (
                (having, lacking, "a gradient", ALL_OR_NONE),
                (parts, {*having, *lacking}.difference(parts), "optimizer state of parts", LOAD_BY_NAME),
            ):
                if some and others:
                    raise UsageError(
                        f"matrix_steps: {self._named(some)} {'have' if len(some) > 1 else 'has'} {what} of "
                        f"{self.entries[index].slot.name}, but {self._named(others)}, with elements of it, "
                        f"{'have' if len(others) > 1 else 'has'} none. {remedy}"
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
        return state + (WITHOUT_GRADIENT if entry.slot.parameter.grad is None else WITH_GRADIENT)

    def _named(self, ranks: Iterable[int]) -> str:
        return ranks_in_words([self.transport.group.ranks[rank] for rank in sorted(ranks)])

    def step(self, present: Collection[int], work: Work) -> list[Exception]:
        """Take a step on the matrices that are `present`. Returned: what this rank failed in. Collective."""
        failed: list[Exception] = []
        buckets = [kept for bucket in self.plan.buckets if (kept := [i for i in bucket if i in present])]
        running = [self._bucket(bucket, work, failed) for bucket in buckets]
        for number, bucket in enumerate(running):
            if not number:
                next(bucket)
            if number + 1 < len(running):
                next(running[number + 1])
            next(bucket)
            if number:
                next(running[number - 1], None)
        if running:
            next(running[-1], None)
        return failed

    def _bucket(self, indices: Sequence[int], work: Work, failed: list[Exception]) -> Iterator[None]:
        """A step on the matrices of one bucket, which stops twice: while numbers are on their way to owners, and while
        results are on their way back. `failed`: gets what fails on this rank. [Note: failed owners]"""
        plan, entries, axis = self.plan, self.entries, self.transport
        spans = {i: plan.matrices[i].span_of(self.rank) for i in indices}
        outgoing, incoming = plan.outgoing(indices, self.rank), plan.incoming(indices, self.rank)
        moves, dtype = plan.is_exchanged(indices), work.dtype_of(entries[indices[0]].slot)
        make = partial(torch.empty, dtype=dtype, device=axis.device.device)
        begun = {i: _tried(failed, work.begin, entries[i], span) for i, span in spans.items() if not span.is_empty}
        numbers = {i: each or [make(spans[i].numel).zero_()] * work.sent for i, each in begun.items()}
        ends = {i for i, each in begun.items() if each}
        arriving = exchanged(axis, outgoing, incoming, lambda i, _: numbers[i], dtype, work.sent) if moves else ()
        numbers, begun = {i: numbers.get(i, ()) for i in indices if plan.owners[i] == self.rank}, {}
        yield
        wholes, held = {}, []
        for i, own in numbers.items():
            if spans[i].numel < (numel := plan.matrices[i].numel):  # else in place: all of these were here
                made = [make(numel) for _ in range(work.sent)]
                held.append(axis.tracker.allocate(MATRICES, sum(each.nbytes for each in made)))
                for whole, here in zip(made, own, strict=False):
                    whole[spans[i].slice].copy_(here)
                own = made
            wholes[i] = Whole(entries[i], tuple(own))
        numbers = {}
        for i, span, elements in arriving:
            for whole, arrived in zip(wholes[i].numbers, elements, strict=True):
                whole[span.slice].copy_(arrived)
        computes = wholes and (work.in_parts or not failed)
        found = _tried(failed, work.compute, [*wholes.values()]) if computes else None
        if failed or found is None:  # an update of nothing, or the parameters as they came
            kept = (each.numbers[-1] for each in wholes.values())
            found = [torch.zeros_like(each) if work.in_parts else each for each in kept]
        results = dict(zip(wholes, found, strict=True))
        wholes = {}
        arriving = exchanged(axis, incoming, outgoing, lambda i, span: [results[i][span.slice]], dtype) if moves else ()
        results = {i: result[spans[i].slice] for i, result in results.items()}
        yield
        results |= {i: elements[0] for i, _, elements in arriving}
        for i in ends:
            _tried(failed, work.end, entries[i], spans[i], results[i])
        for free in held:
            free()


def _tried(failed: list[Exception], call: Callable[..., T], *args: Any) -> T | None:
    """The result of `call`; None if it raises, and then its exception is in `failed`."""
    try:
        return call(*args)
    except Exception as error:
        failed.append(error)
        return None


def raise_failures(axes: Sequence[Transport], failed: list[Exception]) -> None:
    """Raise what `failed` on this rank, or an error with the reports of others. Collective over the axes: a byte of
    each rank, and descriptions if any failed. [Note: failed owners]

    Raises:
        AgreementError: a step failed on other ranks.
    """
    flag = torch.tensor(bool(failed), dtype=torch.uint8)
    for axis in axes:
        flag = all_reduce_now(axis, flag.to(axis.device.device), maximum=True)
    if is_memoryless() or not flag.item():
        return
    doing = "reports what failed in a step on whole matrices"
    words = all_or_none(axes, lambda: description_of(failed[0]) if failed else None, doing=doing)
    if failed:
        del failed[1:]
        raise failed.pop()  # a frame that holds it would keep the model alive
    raise AgreementError(
        "matrix_steps: the step on whole matrices failed, and others may have been stepped on: "
        f"{by_ranks({rank: text for rank, text in words.items() if text}, ': ')}. Load a checkpoint to have all of "
        "them at the same step"
    )


def exchanged(
    over: Transport,
    going: Sequence[Sequence[Piece]],
    coming: Sequence[Sequence[Piece]],
    read: Callable[[int, Span], Sequence[torch.Tensor]],
    dtype: torch.dtype,
    count: int = 1,
) -> Iterator[tuple[int, Span, torch.Tensor]]:
    """Send pieces of matrices between the ranks of a transport. The result waits for those that come: each with its
    elements, a row for each tensor. Collective.

    Args:
        over: the transport.
        going, coming: for each of its ranks the pieces that it gets from this one, and this one from it.
        read: for a piece that is sent, its elements in each of `count` tensors.
        dtype: of these.
    """
    arriving, sending = ([count * elements_of([pieces]) for pieces in each] for each in (coming, going))
    sections = [each for pieces in going for index, span in pieces for each in read(index, span)]
    device = over.device.device
    sent = torch.cat(sections) if sections else torch.empty(0, dtype=dtype, device=device)
    arrived = torch.empty(sum(arriving), dtype=dtype, device=device)
    work = start_all_to_all(over, arrived, sent, arriving, sending)
    free = over.tracker.allocate(MATRICES, sent.nbytes + arrived.nbytes)

    def arrive() -> Iterator[tuple[int, Span, torch.Tensor]]:
        work.wait()
        pieces = [piece for of_rank in coming for piece in of_rank]
        sections = arrived.split([count * span.numel for _, span in pieces])
        for (index, span), elements in zip(pieces, sections, strict=True):
            yield index, span, elements.view(count, span.numel)
        free()

    return arrive()
