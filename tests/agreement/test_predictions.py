"""The pure part of agreement: predictions, and messages about differences."""

from __future__ import annotations

import pytest

from flatfsdp.engine.agreement.model_check import _compared, _first_difference
from flatfsdp.engine.agreement.sequence_predictor import PAST, SYMBOLS, SequencePredictor
from flatfsdp.engine.base.hashing import hash63
from flatfsdp.errors import few, ranks_in_words

pytestmark = pytest.mark.unit

ROOT, A, B, C, END, BACKWARD = range(6)
TRAIN = 10


def forward(predictor: SequencePredictor, *units: int, end: int = END, opening: int = TRAIN) -> list[int | None]:
    """Run a forward through `predictor`; its prediction at each symbol."""
    expected = []
    expected.append(predictor.expected())
    predictor.learn(opening, unit=ROOT)
    for unit in units:
        expected.append(predictor.expected())
        predictor.learn(unit, unit=unit)
    expected.append(predictor.expected())
    predictor.learn(end, completes=end != END)
    return expected


def backward(predictor: SequencePredictor, symbol: int = BACKWARD) -> int | None:
    expected = predictor.expected()
    predictor.learn(symbol, completes=True)
    return expected


def test_nothing_is_expected_at_first_and_everything_after_one_iteration() -> None:
    predictor = SequencePredictor()
    assert forward(predictor, A, B) == [None] * 4
    assert backward(predictor) is None
    for _ in range(3):
        assert forward(predictor, A, B) == [TRAIN, A, B, END]
        assert backward(predictor) == BACKWARD


def test_a_unit_may_be_followed_by_another_at_each_visit() -> None:
    predictor = SequencePredictor()
    forward(predictor, A, B, A, C)
    backward(predictor)
    assert forward(predictor, A, B, A, C) == [TRAIN, A, B, A, C, END]


def test_a_changed_order_surprises_once_per_change() -> None:
    predictor = SequencePredictor()
    for _ in range(2):
        forward(predictor, A, B, C)
        backward(predictor)
    assert forward(predictor, A, C) == [TRAIN, A, B, END]
    backward(predictor)
    assert forward(predictor, A, C) == [TRAIN, A, C, END]


def test_evaluation_expects_the_units_of_training() -> None:
    predictor = SequencePredictor()
    forward(predictor, A, B)
    backward(predictor)
    assert forward(predictor, A, B, end=6, opening=11) == [TRAIN, A, B, END]


def test_a_window_of_accumulation_becomes_expected() -> None:
    predictor = SequencePredictor()
    surprises = []
    for _ in range(8):
        count = 0
        for micro in range(4):
            symbol = BACKWARD if micro == 3 else 7
            count += sum(e != s for e, s in zip(forward(predictor, A), [TRAIN, A, END], strict=True))
            count += backward(predictor, symbol) != symbol
        surprises.append(count)
    assert surprises[0] > 0 and surprises[-2:] == [0, 0], surprises


def test_after_a_cut_nothing_is_expected() -> None:
    predictor = SequencePredictor()
    forward(predictor, A)
    backward(predictor)
    predictor.learn(TRAIN, unit=ROOT)
    predictor.forget_present()
    assert predictor.expected() is None
    predictor.learn(99)
    assert forward(predictor, A) == [None, A, END]


def iteration(
    predictor: SequencePredictor, symbol: int = BACKWARD, *, opening: int = TRAIN, sharded: bool = True
) -> int:
    """A forward and a backward, or an evaluation, and how often something else was expected."""
    expected: list[int | None] = []
    came: list[int | None] = []
    if sharded:
        end = END if opening == TRAIN else 6
        expected, came = forward(predictor, A, B, opening=opening, end=end), [opening, A, B, end]
    if opening == TRAIN:
        expected, came = [*expected, backward(predictor, symbol)], [*came, symbol]
    return sum(found != symbol for found, symbol in zip(expected, came, strict=True))


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 8, 16, 100])
def test_players_in_turns_are_expected_from_the_second_period_on(length: int, sharded: bool) -> None:
    predictor = SequencePredictor()
    surprises = [
        sum(iteration(predictor, 20 + (place == length), sharded=sharded) for place in range(length + 1))
        for _ in range(4)
    ]
    assert surprises[0] > 0 and not any(surprises[1:]), surprises


@pytest.mark.parametrize("length", [1, 7, 100])
def test_evaluations_at_a_rhythm_become_expected(length: int) -> None:
    predictor = SequencePredictor()
    surprises = [
        sum(iteration(predictor) for _ in range(length)) + sum(iteration(predictor, opening=11) for _ in range(3))
        for _ in range(5)
    ]
    assert surprises[1] <= 1 and not any(surprises[2:]), surprises


def test_an_evaluation_out_of_turn_leaves_steps_expected() -> None:
    """Symbols that followed it once, early in a run of steps, are not expected again at each of the later steps."""
    predictor = SequencePredictor()
    for _ in range(200):
        iteration(predictor)
    iteration(predictor, opening=11)
    assert sum(iteration(predictor) for _ in range(200)) <= 2


def test_a_long_past_is_bounded() -> None:
    predictor = SequencePredictor()
    for _ in range(2 * PAST):
        iteration(predictor)
        assert len(predictor._past) < PAST
    assert sum(iteration(predictor, 20 + place % 9) for place in range(90)) > 0
    assert sum(iteration(predictor, 20 + place % 9) for place in range(90)) == 0


def test_what_never_repeats_does_not_pile_up() -> None:
    predictor = SequencePredictor()
    for plan in range(100, 100 + 2 * SYMBOLS):
        backward(predictor, plan)
    assert len(predictor._symbols) == len(predictor._letters) <= SYMBOLS


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
