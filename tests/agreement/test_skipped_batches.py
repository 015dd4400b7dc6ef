"""The message for ranks of which one skipped a batch, or a part of one; pure."""

from __future__ import annotations

import pytest

from flatfsdp.engine.agreement import ops
from flatfsdp.engine.agreement.divergence import ModelNames, divergence
from flatfsdp.engine.agreement.ops import EVALUATION, TRAINING, Op, StepConditions
from flatfsdp.engine.base.peers import BackwardPlan, UnitEntry
from flatfsdp.engine.watchdog.status_report import ExitRecord, Progress, in_one_sentence, steps_behind

pytestmark = pytest.mark.unit

UNITS = [UnitEntry("<root>", range(2))]


def forward(kind: str, **conditions: bool) -> Op:
    return ops.opening(kind, 0, "<root>", "", StepConditions(**conditions), (True, True) if kind == TRAINING else ())


def backward(*, sync: bool = True) -> Op:
    return ops.backward(BackwardPlan(sync, True, [0], [0], [(0, 0)], 3, [], ""), UNITS, None)


@pytest.mark.parametrize("other", [forward(EVALUATION), ops.called("state_dict()", (), UNITS)])
def test_a_rank_that_goes_on_after_its_last_batch(other: Op) -> None:
    message = divergence({(0, 2): forward(TRAINING), (1,): other}, 7, ModelNames(UNITS))
    assert (
        f"rank 1 {other.words}. Either rank 1 alone did what all ranks must do, or rank 1, unlike ranks 0, 2, "
        "skipped a batch (as by `continue` before its forward), or its data ended earlier. Skip" in message
    )
    assert "skipped" not in divergence({(0, 2): forward(TRAINING), (1,): other}, 0, ModelNames(UNITS)), "the first step"
    assert message.endswith("take the steps inside `with flatfsdp.join(model) as joined`")


@pytest.mark.parametrize("other", [forward(TRAINING), forward(EVALUATION), ops.called("state_dict()", (), UNITS)])
def test_a_rank_that_skips_the_backward(other: Op) -> None:
    message = divergence({(0,): other, (1, 2): backward()}, 4, ModelNames(UNITS))
    assert "Rank 0 skipped the backward that ranks 1, 2 began" in message
    assert "skipped a batch" not in message


def test_a_rank_that_skips_a_microbatch() -> None:
    message = divergence({(0,): backward(sync=False), (1,): backward()}, 3, ModelNames(UNITS))
    assert "Rank 0 accumulated gradients under no_sync() where rank 1 reduced them" in message
    assert "if it depends on the number of the batch, a rank skipped a batch" in message
    message = divergence({(0,): forward(TRAINING, stepped=True), (1,): forward(TRAINING)}, 4, ModelNames(UNITS))
    assert "Rank 0 took an optimizer step" in message and "a rank skipped a batch" in message


@pytest.mark.parametrize(
    "other", [ops.requested(0, UNITS[0], "unshard"), ops.entered(0, UNITS[0]), ops.abandoned(1, "a forward", "")]
)
def test_other_ops_are_no_skipped_batch(other: Op) -> None:
    assert "skipped" not in divergence({(0,): forward(TRAINING), (1,): other}, 4, ModelNames(UNITS))


def test_a_rank_that_ended_after_fewer_steps() -> None:
    ended = ExitRecord(1, "exited normally", None, {"a": (3, 3), "b": (7, 7)})
    message = in_one_sentence([ended], {"a": Progress(3, 3), "b": Progress(8, 7)}, rank=0)
    assert message == (
        "rank 1 exited normally. It ran 7 steps of the model, and rank 0 is in step 8: rank 1 skipped a batch (as by "
        "`continue` before its forward), or its data ended earlier. Skip a batch on all ranks or on none. The "
        "remaining ranks cannot continue. Where ranks have different numbers of batches, take the steps inside `with "
        "flatfsdp.join(model) as joined`"
    )


def test_a_rank_that_ended_without_its_last_backward() -> None:
    ended = ExitRecord(1, "exited normally", None, {"a": (8, 7)})
    message = in_one_sentence([ended], {"a": Progress(8, 8)}, rank=0)
    assert "7 instead of 8 backwards: rank 1 skipped a backward" in message


def test_a_rank_that_ended_after_as_many_steps_or_by_an_error_skipped_none() -> None:
    same = ExitRecord(1, "exited normally", None, {"a": (8, 8)})
    failed = ExitRecord(1, "ended with ValueError: x", None, {"a": (7, 7)})
    for ended in (same, failed, ExitRecord(1, "exited normally")):
        assert "skipped" not in in_one_sentence([ended], {"a": Progress(8, 8)}, rank=0)


def test_ranks_behind_others_in_a_report() -> None:
    behind = steps_behind({0: {"a": (8, 7)}, 1: {"a": (7, 7)}, 2: {"a": (8, 7)}, 3: {}})
    assert behind == [
        "rank 1 did not begin the last step: late, or skipped a batch (as by `continue` before its forward), or its "
        "data ended earlier"
    ]
    assert steps_behind({0: {"a": (8, 8)}, 1: {"a": (8, 7)}}) == []
