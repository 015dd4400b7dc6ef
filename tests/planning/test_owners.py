"""Owners of cut matrices: parts partition each matrix, owners are balanced, and the sums of what ranks send are those
of the lists by which they send it."""

from __future__ import annotations

import random
from math import prod

import pytest

from flatfsdp.engine.layout.layout import FlatLayout, ParamSpec, Span
from flatfsdp.engine.planning.owners import Matrix, OwnerPlan, parts_of
from flatfsdp.engine.planning.rows import pack_rows
from flatfsdp.errors import ConfigValueError

pytestmark = pytest.mark.unit


def layouts(drawn: random.Random, world: int) -> list[FlatLayout]:
    shapes = [tuple(drawn.randint(1, 9) for _ in range(drawn.randint(1, 3))) for _ in range(drawn.randint(1, 8))]
    specs = [ParamSpec(f"p{number}", shape) for number, shape in enumerate(shapes)]
    return [
        FlatLayout.pack(specs, world=world, align=4, pad_total=True),
        pack_rows(specs, world=world),
        FlatLayout.pack(specs, world=world),
    ]


def matrices_of(layout: FlatLayout, drawn: random.Random) -> list[Matrix]:
    found = []
    for index, spec in enumerate(layout.params):
        count = spec.shape[0] if len(spec.shape) == 3 else 1
        shape = spec.shape[1:] if len(spec.shape) == 3 else spec.shape
        size = spec.numel // count
        for number in range(count):
            within = Span(0, size).shift(number * size)
            asked = drawn.choice([None, None, drawn.randrange(layout.world)])
            parts = parts_of(layout, index, within)
            found.append(Matrix(f"{spec.name}.{number}", shape, parts, prod(shape) ** 2, asked))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_lists_of_what_ranks_send_fit_together_and_have_the_stated_sums(seed: int) -> None:
    drawn = random.Random(seed)
    world = drawn.randint(1, 7)
    ranks = range(world)
    for layout in layouts(drawn, world):
        matrices = matrices_of(layout, drawn)
        made = OwnerPlan.of(matrices, world=world, bucket=drawn.choice([1, 20, 1000]))
        sent, returned, calls = [0] * world, [0] * world, 0
        for bucket in made.buckets:
            outgoing = [made.outgoing(bucket, rank) for rank in ranks]
            incoming = [made.incoming(bucket, rank) for rank in ranks]
            for source in ranks:
                assert not outgoing[source][source]
                for owner in ranks:
                    pieces = outgoing[source][owner]
                    assert pieces == incoming[owner][source]
                    sent[source] += sum(span.numel for _, span in pieces)
                    returned[owner] += sum(span.numel for _, span in pieces)
            moves = made.is_exchanged(bucket)
            assert moves == any(any(each) for each in outgoing)
            calls += 2 * moves
        assert sent == [made.sent(rank) for rank in ranks]
        assert returned == [made.returned(rank) for rank in ranks]
        assert calls == made.exchanges
        for matrix, owner in zip(made.matrices, made.owners, strict=True):
            if matrix.asked is not None:
                assert owner == matrix.asked
            elif not matrix.is_cut:
                assert [owner] == [*matrix.parts]


def cut(name: str, cost: int, *parts: tuple[int, int]) -> Matrix:
    """A matrix of which these ranks have so many elements each."""
    found, end = {}, 0
    for rank, numel in parts:
        found[rank] = Span(end, end + numel)
        end += numel
    return Matrix(name, (end,), found, cost)


def test_the_longest_are_given_out_first_to_the_rank_with_least() -> None:
    costs = [7, 7, 6, 5, 5, 4, 4, 4]
    matrices = [cut(f"m{i}", cost, (0, 2), (1, 2)) for i, cost in enumerate(costs)]
    made = OwnerPlan.of(matrices, world=3, bucket=100)
    assert made.loads == (12, 15, 15)
    assert made.imbalance == pytest.approx(15 * 3 / 42)


def test_among_equal_ranks_the_one_with_most_of_it_is_the_owner() -> None:
    matrices = [cut("a", 5, (1, 1), (2, 3)), cut("b", 5, (0, 3), (1, 1)), cut("c", 5, (0, 1), (2, 1))]
    assert OwnerPlan.of(matrices, world=3, bucket=1).owners == (2, 0, 1)


def test_uncut_matrices_are_stepped_on_where_they_lie_and_count_as_work() -> None:
    matrices = [cut("a", 9, (0, 4)), cut("b", 5, (0, 2), (1, 2)), cut("c", 3, (0, 2), (1, 2))]
    made = OwnerPlan.of(matrices, world=2, bucket=100)
    assert made.owners == (0, 1, 1)
    assert (made.exchanges, made.sent(0), made.returned(0), made.sent(1)) == (2, 4, 0, 0)


def test_buckets_give_every_owner_work_and_begin_with_large_matrices() -> None:
    matrices = [cut(f"m{i}", 8, (0, 4), (1, 4)) for i in range(6)] + [cut("small", 1, (0, 1), (1, 1))]
    made = OwnerPlan.of(matrices, world=2, bucket=16)
    assert [sorted(made.owners[index] for index in bucket) for bucket in made.buckets] == [[0, 1]] * 3 + [[0]]
    assert made.buckets[-1] == (6,)


def test_no_bucket_is_exchanged_if_nothing_is_cut() -> None:
    assert OwnerPlan.of([cut("a", 1, (0, 4)), cut("b", 1, (1, 4))], world=2, bucket=1).exchanges == 0


def test_wrong_owners_are_errors() -> None:
    with pytest.raises(ConfigValueError, match="owners: expected a rank from 0 to 1 for 'a', found 2"):
        OwnerPlan.of([Matrix("a", (2,), {0: Span(0, 2)}, 1, asked=2)], world=2, bucket=1)
