"""The pure part of agreement: what is expected next, and how differences are put into words."""

from __future__ import annotations

import pytest

from flatfsdp.engine.agreement.model_check import _compared, _first_difference
from flatfsdp.engine.agreement.sequence_predictor import PAST, SYMBOLS, SequencePredictor
from flatfsdp.engine.base.hashing import hash63
from flatfsdp.errors import few, ranks_in_words

ROOT, A, B, C, END, BACKWARD = range(6)
TRAIN = 10


def forward(habit: SequencePredictor, *units: int, end: int = END, opening: int = TRAIN) -> list[int | None]:
    """Run a forward through `habit`; what it expected at each symbol."""
    expected = []
    expected.append(habit.expected())
    habit.learn(opening, unit=ROOT)
    for unit in units:
        expected.append(habit.expected())
        habit.learn(unit, unit=unit)
    expected.append(habit.expected())
    habit.learn(end, completes=end != END)
    return expected


def backward(habit: SequencePredictor, symbol: int = BACKWARD) -> int | None:
    expected = habit.expected()
    habit.learn(symbol, completes=True)
    return expected


def test_nothing_is_expected_at_first_and_everything_after_one_iteration() -> None:
    habit = SequencePredictor()
    assert forward(habit, A, B) == [None] * 4
    assert backward(habit) is None
    for _ in range(3):
        assert forward(habit, A, B) == [TRAIN, A, B, END]
        assert backward(habit) == BACKWARD


def test_a_unit_may_be_followed_by_another_at_each_visit() -> None:
    habit = SequencePredictor()
    forward(habit, A, B, A, C)
    backward(habit)
    assert forward(habit, A, B, A, C) == [TRAIN, A, B, A, C, END]


def test_a_changed_order_surprises_once_per_change() -> None:
    habit = SequencePredictor()
    for _ in range(2):
        forward(habit, A, B, C)
        backward(habit)
    assert forward(habit, A, C) == [TRAIN, A, B, END]
    backward(habit)
    assert forward(habit, A, C) == [TRAIN, A, C, END]


def test_evaluation_expects_the_units_of_training() -> None:
    habit = SequencePredictor()
    forward(habit, A, B)
    backward(habit)
    assert forward(habit, A, B, end=6, opening=11) == [TRAIN, A, B, END]


def test_a_window_of_accumulation_becomes_expected() -> None:
    habit = SequencePredictor()
    surprises = []
    for _ in range(8):
        count = 0
        for micro in range(4):
            symbol = BACKWARD if micro == 3 else 7
            count += sum(e != s for e, s in zip(forward(habit, A), [TRAIN, A, END], strict=True))
            count += backward(habit, symbol) != symbol
        surprises.append(count)
    assert surprises[0] > 0 and surprises[-2:] == [0, 0], surprises


def test_after_a_cut_nothing_is_expected() -> None:
    habit = SequencePredictor()
    forward(habit, A)
    backward(habit)
    habit.learn(TRAIN, unit=ROOT)
    habit.forget_present()
    assert habit.expected() is None
    habit.learn(99)
    assert forward(habit, A) == [None, A, END]


def iteration(habit: SequencePredictor, symbol: int = BACKWARD, *, opening: int = TRAIN, sharded: bool = True) -> int:
    """A forward and a backward, or an evaluation, and how often something else was expected."""
    expected: list[int | None] = []
    came: list[int | None] = []
    if sharded:
        end = END if opening == TRAIN else 6
        expected, came = forward(habit, A, B, opening=opening, end=end), [opening, A, B, end]
    if opening == TRAIN:
        expected, came = [*expected, backward(habit, symbol)], [*came, symbol]
    return sum(found != symbol for found, symbol in zip(expected, came, strict=True))


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 8, 16, 100])
def test_players_in_turns_are_expected_from_the_second_period_on(length: int, sharded: bool) -> None:
    habit = SequencePredictor()
    surprises = [
        sum(iteration(habit, 20 + (place == length), sharded=sharded) for place in range(length + 1)) for _ in range(4)
    ]
    assert surprises[0] > 0 and not any(surprises[1:]), surprises


@pytest.mark.parametrize("length", [1, 7, 100])
def test_evaluations_at_a_rhythm_become_expected(length: int) -> None:
    habit = SequencePredictor()
    surprises = [
        sum(iteration(habit) for _ in range(length)) + sum(iteration(habit, opening=11) for _ in range(3))
        for _ in range(5)
    ]
    assert surprises[1] <= 1 and not any(surprises[2:]), surprises


def test_an_evaluation_out_of_turn_leaves_steps_expected() -> None:
    """What came after it once, early in a run of steps, is not expected again at each of the steps that follow."""
    habit = SequencePredictor()
    for _ in range(200):
        iteration(habit)
    iteration(habit, opening=11)
    assert sum(iteration(habit) for _ in range(200)) <= 2


def test_a_long_past_is_bounded() -> None:
    habit = SequencePredictor()
    for _ in range(2 * PAST):
        iteration(habit)
        assert len(habit._past) < PAST
    assert sum(iteration(habit, 20 + place % 9) for place in range(90)) > 0
    assert sum(iteration(habit, 20 + place % 9) for place in range(90)) == 0


def test_what_never_repeats_does_not_pile_up() -> None:
    habit = SequencePredictor()
    for plan in range(100, 100 + 2 * SYMBOLS):
        backward(habit, plan)
    assert len(habit._symbols) == len(habit._letters) <= SYMBOLS


def test_numbers_are_the_same_on_every_machine() -> None:
    assert hash63("unit 0") == 4690386452413026678
    assert 0 <= hash63("x") < 2**63


def test_words() -> None:
    assert ranks_in_words((3,)) == "rank 3" and ranks_in_words((0, 2)) == "ranks 0, 2"
    assert few(["a", "b", "c"]) == "a, b, c" and few(["a", "b", "c", "d"]) == "a, b, c and 1 more"


def test_a_model_that_ends_earlier_differs_there() -> None:
    longer = [("unit 'a'", "of class A", False), ("unit 'b'", "of class B", False)]
    text = _first_difference({(0,): longer, (1, 2): longer[:1]})
    assert ": rank 0: unit 'b' of class B; ranks 1, 2: nothing more. " in text


def test_what_parameters_are_called_is_reported_and_not_compared() -> None:
    facts = {
        (rank,): [("a", "x", False), (f"parameter {rank}.weight", shape, False)]
        for rank, shape in enumerate(["(3, 3)", "(3, 4)"])
    }
    expected = ": rank 0: parameter 0.weight (3, 3); rank 1: parameter 1.weight (3, 4). "
    assert expected in _first_difference(facts)
    assert _compared([("a", "x", False), ("construction", "failed", True)]) == [("", "x"), ("construction", "failed")]
