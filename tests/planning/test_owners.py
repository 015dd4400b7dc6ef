"""Owners of cut matrices: parts partition each matrix, owners are balanced, and the sums of what ranks send are those
of the lists by which they send it."""

from __future__ import annotations

import random
from math import prod

import pytest

from flatfsdp.engine.layout.layout import FlatLayout, ParamSpec, Span
from flatfsdp.engine.planning.owners import Matrix, OwnerPlan, parts_of
from flatfsdp.engine.planning.rows import pack_rows
from flatfsdp.errors import ConfigValueError, InternalError

pytestmark = pytest.mark.unit


def layouts(drawn: random.Random, world: int) -> list[FlatLayout]:
    shapes = [tuple(drawn.randint(1, 9) for _ in range(drawn.randint(1, 3))) for _ in range(drawn.randint(1, 8))]
    specs = [ParamSpec(f"p{number}", shape) for number, shape in enumerate(shapes)]
    return [
        FlatLayout.pack(specs, world=world, align=4, pad_total=True),
        pack_rows(specs, world=world),
        FlatLayout.pack(specs, world=world),
    ]


def matrices_of(layout: FlatLayout, drawn: random.Random, replicas: int) -> list[Matrix]:
    found = []
    for index, spec in enumerate(layout.params):
        count = spec.shape[0] if len(spec.shape) == 3 else 1
        shape = spec.shape[1:] if len(spec.shape) == 3 else spec.shape
        size = spec.numel // count
        for number in range(count):
            within = Span(0, size).shift(number * size)
            asked = drawn.choice([None, None, drawn.randrange(layout.world * replicas)])
            parts = parts_of(layout, index, within)
            found.append(Matrix(f"{spec.name}.{number}", shape, parts, prod(shape) ** 2, asked))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_lists_of_what_ranks_send_fit_together_and_have_the_stated_sums(seed: int) -> None:
    drawn = random.Random(seed)
    world, replicas = drawn.randint(1, 7), drawn.choice([1, 1, 2, 3])
    members = range(world * replicas)
    for layout in layouts(drawn, world):
        matrices = matrices_of(layout, drawn, replicas)
        made = OwnerPlan.of(matrices, world=world, replicas=replicas, bucket=drawn.choice([1, 20, 1000]))
        sent, returned, copied, calls = ([0] * len(members) for _ in range(4))
        for bucket in made.buckets:
            outgoing = [made.outgoing(bucket, member) for member in members]
            incoming = [made.incoming(bucket, member) for member in members]
            for source in members:
                assert not outgoing[source][source % world]
                for owner in members:
                    if not made.in_one_replica(source, owner):
                        continue
                    pieces = outgoing[source][owner % world]
                    assert pieces == incoming[owner][source % world]
                    sent[source] += sum(span.numel for _, span in pieces)
                    returned[owner] += sum(span.numel for _, span in pieces)
                replica = source // world * world
                moves = made.is_exchanged(bucket, source)
                assert moves == any(any(each) for each in outgoing[replica : replica + world])
                copies = made.copies(bucket, source % world)
                copied[source] += (replicas - 1) * sum(span.numel for _, span in copies[source // world])
                calls[source] += 2 * moves + any(copies)
        assert sent == [made.sent(member) for member in members]
        assert returned == [made.returned(member) for member in members]
        assert copied == [made.copied(member) for member in members]
        assert calls == [made.exchanges(member) for member in members]
        for matrix, owner in zip(made.matrices, made.owners, strict=True):
            if matrix.asked is not None:
                assert owner == matrix.asked
            elif not matrix.is_cut:
                assert [owner % world] == [*matrix.parts]


def test_every_rank_gets_the_results_for_all_of_its_elements_once() -> None:
    matrices = [cut(f"m{i}", 8, (0, 3), (1, 5)) for i in range(4)] + [cut("one", 1, (1, 4))]
    made = OwnerPlan.of(matrices, world=2, replicas=3, bucket=1000)
    (bucket,) = made.buckets
    for member in range(6):
        rank, replica = member % 2, member // 2
        own = [(i, matrices[i].span_of(rank)) for i, owner in enumerate(made.owners) if owner == member]
        found = [piece for pieces in made.outgoing(bucket, member) for piece in pieces]
        found += [piece for piece in own if not piece[1].is_empty]
        for other, pieces in enumerate(made.copies(bucket, rank)):
            found += pieces if other != replica else []
        assert sorted(i for i, _ in found) == [i for i in range(5) if not matrices[i].span_of(rank).is_empty]
    assert sorted(made.loads) == [0, 1, 8, 8, 8, 8]  # the last one lies on one rank, which then gets no other


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
    assert (made.exchanges(0), made.sent(0), made.returned(0), made.sent(1)) == (2, 4, 0, 0)


def test_buckets_give_every_owner_work_and_begin_with_large_matrices() -> None:
    matrices = [cut(f"m{i}", 8, (0, 4), (1, 4)) for i in range(6)] + [cut("small", 1, (0, 1), (1, 1))]
    made = OwnerPlan.of(matrices, world=2, bucket=16)
    assert [sorted(made.owners[index] for index in bucket) for bucket in made.buckets] == [[0, 1]] * 3 + [[0]]
    assert made.buckets[-1] == (6,)


def test_no_bucket_is_exchanged_if_nothing_is_cut() -> None:
    assert OwnerPlan.of([cut("a", 1, (0, 4)), cut("b", 1, (1, 4))], world=2, bucket=1).exchanges(0) == 0


def test_wrong_owners_and_wrong_parts_are_errors() -> None:
    with pytest.raises(ConfigValueError, match="owners: expected a rank from 0 to 1 for 'a', found 2"):
        OwnerPlan.of([Matrix("a", (2,), {0: Span(0, 2)}, 1, asked=2)], world=2, bucket=1)
    with pytest.raises(InternalError, match="no partition"):
        OwnerPlan.of([Matrix("a", (2,), {0: Span(1, 2)}, 1)], world=2, bucket=1)
