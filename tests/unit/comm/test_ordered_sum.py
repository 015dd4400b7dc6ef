"""Sums whose pieces are received in turns, without a backend. [Note: turns]"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flatfsdp.engine.comm.ordered_sum import OrderedSum, SumWorker
from flatfsdp.engine.comm.pieces import Row, copy

WORLD = 7


class Message:
    """A piece that arrives at a wait, and not before it was `sent`."""

    def __init__(self, row: Row, piece: Tensor, sent: threading.Event) -> None:
        self._row, self._piece, self._sent = row, piece, sent

    def wait(self) -> None:
        assert self._sent.wait(timeout=20)
        copy(self._row.pieces, self._piece.split(self._row.sizes))


class Lost:
    def wait(self) -> None:
        raise RuntimeError("gloo: connection closed")


def pieces_of(seed: int) -> Tensor:
    """One piece per rank, of very different sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)  # one for each: threads use them
    return torch.randn(WORLD, 5, generator=generator) * 10.0 ** torch.randint(-3, 4, (WORLD, 5), generator=generator)


def in_order(pieces: Tensor) -> Tensor:
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def row_of(values: Tensor) -> Row:
    """In two pieces, and one without elements."""
    return Row(values.clone().split([2, 0, 3]))


def room_for(count: int) -> list[Row]:
    return [row_of(torch.full((5,), torch.nan)) for _ in range(count)]


def values_of(row: Row) -> Tensor:
    return torch.cat(row.pieces)


SENT = threading.Event()
SENT.set()


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("count", [2, 3, WORLD - 1])
def test_pieces_are_added_in_rank_order_and_received_as_there_is_room(rank: int, count: int) -> None:
    pieces, room, posted = pieces_of(rank), room_for(count), []

    def receive(peer: int, row: Row) -> Message:
        posted.append((peer, next(index for index, each in enumerate(room) if each is row)))
        return Message(row, pieces[peer], SENT)

    total = OrderedSum(rank, WORLD, own=row_of(pieces[rank]), room=room, receive=receive)
    assert [index for _, index in posted] == list(range(count))
    total.run()
    total.wait()
    assert torch.equal(values_of(room[0]), in_order(pieces))
    assert [peer for peer, _ in posted] == [peer for peer in range(WORLD) if peer != rank]
    assert all(index != 0 for _, index in posted[1:])  # the sum is not received into


def sums(turns: SumWorker, count: int, receive: Callable[[int, int, Row], object]) -> list[tuple[OrderedSum, Row]]:
    handed_over = []
    for number in range(count):
        room = room_for(3)
        total = OrderedSum(
            0,
            WORLD,
            own=row_of(pieces_of(number)[0]),
            room=room,
            receive=lambda peer, row, number=number: receive(number, peer, row),
        )
        turns.submit(total)
        handed_over.append((total, room[0]))
    return handed_over


def test_handing_over_waits_for_nobody_and_sums_run_in_that_order() -> None:
    sent, order = threading.Event(), []

    def receive(number: int, peer: int, row: Row) -> Message:
        order.append((number, peer))
        return Message(row, pieces_of(number)[peer], sent)

    handed_over = sums(SumWorker(), 3, receive)
    assert order == [(number, peer) for number in range(3) for peer in (1, 2, 3)]  # as many as fit
    sent.set()
    for number, (total, output) in reversed(list(enumerate(handed_over))):
        total.wait()
        assert torch.equal(values_of(output), in_order(pieces_of(number)))
    assert order[9:] == [(number, peer) for number in range(3) for peer in (4, 5, 6)]


def test_a_lost_connection_is_raised_where_its_sum_is_waited_for_each_time() -> None:
    def receive(number: int, peer: int, row: Row) -> Message | Lost:
        return Lost() if (number, peer) == (1, 5) else Message(row, pieces_of(number)[peer], SENT)

    before, lost, after = sums(SumWorker(), 3, receive)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection closed"):
            lost[0].wait()
    for number, (total, output) in ((0, before), (2, after)):
        total.wait()
        assert torch.equal(values_of(output), in_order(pieces_of(number)))


def test_no_thread_is_left_where_nothing_is_under_way() -> None:
    turns = SumWorker()
    for _ in range(2):  # and another begins with the next sum
        for total, _ in sums(turns, 2, lambda number, peer, row: Message(row, values_of(row), SENT)):
            total.wait()
        for thread in [each for each in threading.enumerate() if each.name == "flatfsdp sums"]:
            thread.join(timeout=20)
            assert not thread.is_alive()
