"""Ranks' descriptions of an optimizer's states, and the result of their comparison."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp.engine.state.optim.descriptions import (
    OtherState,
    ParamShaped,
    UnsupportedState,
    agree,
    alike,
    value_of,
)
from flatfsdp.errors import AgreementError, UsageError

pytestmark = pytest.mark.unit

STEP = torch.tensor(3.0)
FLOATS = ParamShaped(torch.float32)


def described(*each_rank: Any) -> dict[int, dict[str, Any]]:
    """One description of the parameter "w" per rank; ... for a rank that owns no element of it."""
    return {rank: {} if each is ... else {"w": each} for rank, each in enumerate(each_rank)}


def test_what_owners_describe_holds_for_all() -> None:
    states = {"exp_avg": FLOATS, "step": STEP}
    assert agree(described(..., states, dict(states), ...)) == {"w": states}
    assert agree(described({}, {}, None)) == {}
    assert agree(described(..., {"row": OtherState(torch.ones(2))})).keys() == {"w"}


@pytest.mark.parametrize(
    ("each_rank", "words"),
    [
        pytest.param(
            ({"step": STEP}, {}, {}), "rank 0 has step, but the optimizers of ranks 1, 2, .* no state", id="missing"
        ),
        pytest.param((None, {"step": STEP}), "rank 1 has step, but the optimizers of rank 0, .*hold it", id="not held"),
        pytest.param(({"a": 1, "b": 2}, {"a": 1}), "rank 0 has a, b, rank 1 has a", id="names"),
        pytest.param(
            ({"m": FLOATS}, {"m": ParamShaped(torch.float64)}), "float32, rank 1 has .*torch.float64", id="dtypes"
        ),
        pytest.param(({"step": STEP}, {"step": STEP + 1}), "3.0, torch.float32, rank 1 has a tensor, 4.0", id="values"),
        pytest.param(({"on": True}, {"on": 1}), "'on' of 'w': rank 0 has True, rank 1 has 1", id="types"),
    ],
)
def test_differences(each_rank: tuple[Any, ...], words: str) -> None:
    with pytest.raises(AgreementError, match=words):
        agree(described(*each_rank))


def test_what_cannot_be_put_together() -> None:
    for each_rank in (
        ({"row": UnsupportedState("a tensor of shape (3,)")},),
        ({"row": FLOATS}, {"row": UnsupportedState("a tensor of shape (3,)")}),
    ):
        with pytest.raises(UsageError, match=r"'row' of 'w' is a tensor of shape \(3,\), but the parameter is split"):
            agree(described(*each_rank))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (float("nan"), float("nan"), True),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.tensor(1), torch.tensor(1.0), False),
        ({"a": [1, (torch.ones(2), None)]}, {"a": [1, (torch.ones(2), None)]}, True),
        ({"a": [1, (torch.ones(2), None)]}, {"a": [1, (torch.zeros(2), None)]}, False),
        ([1, 2], [1], False),
    ],
)
def test_alike_is_bit_for_bit(one: Any, other: Any, expected: bool) -> None:
    assert alike(one, other) is expected


def test_values_are_copies() -> None:
    held = {"a": [torch.zeros(1)], "b": (torch.zeros(()),)}
    copied = value_of(held)
    held["a"][0] += 1
    held["b"][0].add_(1)
    assert copied["a"][0] == 0 and copied["b"][0] == 0
