"""Ranges in a profiler's trace: every stage of every unit by name while a profiler runs, and no work otherwise."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.features import profiler_ranges as labels
from flatfsdp.errors import logger
from tests.harness.calls import calls_of
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


def model_of(**options: Any) -> FullyShardedDataParallel:
    net = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 8))
    return FullyShardedDataParallel(net, auto_wrap_policy={Block}, use_orig_params=True, **options)


def step(model: nn.Module) -> None:
    model(torch.randn(2, 8)).sum().backward()
    model.zero_grad()


def ranges_of(work: Callable[[], object]) -> dict[str, set[str]]:
    """The stages in a trace of `work`, by unit."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        work()
    found: defaultdict[str, set[str]] = defaultdict(set)
    for event in recorded.events():
        family, _, label = event.name.partition("::")
        if family == "flatfsdp":
            stage, _, unit = label.rpartition(" ")
            found[unit].add(stage)
            assert event.time_range.elapsed_us() > 0
    return dict(found)


STAGES = {
    "forward",
    "gather",
    "wait for gather",
    "reshard",
    "before backward",
    "gradient",
    "reduce",
    "wait for reduction",
    "finalize gradients",
}


@pytest.mark.parametrize("step_before", [False, True], ids=["first step", "later step"])
def test_a_trace_has_every_stage_of_every_unit_by_name(step_before: bool) -> None:
    with fake_world(4):
        model = model_of()
        if step_before:
            step(model)
        assert ranges_of(lambda: step(model)) == {"<root>": STAGES, "1": STAGES, "2": STAGES}


def test_hybrids_wait_for_two_stages() -> None:
    with fake_world(4):
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
        model = model_of(sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
        assert ranges_of(lambda: step(model))["1"] == {*STAGES, "wait for all-reduce"}


def test_a_profiler_may_start_between_forward_and_backward() -> None:
    with fake_world(4):
        model = model_of()
        loss = model(torch.randn(2, 8)).sum()
        found = ranges_of(loss.backward)
        assert found["1"] == STAGES - {"forward"}


def test_without_a_profiler_nothing_is_labeled_and_nothing_costs_more() -> None:
    with fake_world(4):
        model = model_of()
        for _ in range(6):
            step(model)
        with patch.object(labels, "record_function", side_effect=AssertionError("nobody looks")):
            before = calls_of(lambda: step(model))
        ranges_of(lambda: step(model))
        step(model)  # which finds that no profiler runs any more
        with patch.object(labels, "record_function", side_effect=AssertionError("nobody looks")):
            assert calls_of(lambda: step(model)) == before


def test_a_unit_more_costs_nothing_more() -> None:
    """Each forward, each backward, and the last collective of it, checks once whether a profiler runs."""

    def asked(blocks: int) -> int:
        net = nn.Sequential(*(Block() for _ in range(blocks)))
        model = FullyShardedDataParallel(net, auto_wrap_policy={Block})
        with patch.object(labels._torch, "profiler_runs", wraps=labels._torch.profiler_runs) as ask:
            step(model)
        return ask.call_count

    with fake_world(4):
        assert asked(2) == asked(6) == 3


def test_the_logger_at_debug_is_somebody_who_looks() -> None:
    with fake_world(4), patch.object(labels, "record_function", wraps=labels.record_function) as opened:
        model = model_of()
        step(model)
        assert not opened.called
        before = logger.level
        logger.setLevel(logging.DEBUG)
        try:
            step(model)
        finally:
            logger.setLevel(before)
        assert opened.called
        opened.reset_mock()
        step(model)
        assert opened.call_count <= 1  # the outermost forward is found unwatched inside its own range


def test_a_failure_leaves_no_range_open() -> None:
    class Fails(Exception):
        pass

    def fail(*args: Any) -> None:
        raise Fails

    with fake_world(4):
        model = model_of()
        model[1].module.register_forward_hook(fail)

        def broken() -> None:
            with pytest.raises(Fails):
                step(model)

        assert "forward" in ranges_of(broken)["1"]


def test_units_that_share_a_collective_are_named_together() -> None:
    with fake_world(4, joined=True):
        model = model_of()
        step(model)
        found = ranges_of(lambda: step(model))
    assert found["<root>+1+2"] == {"gather"}  # forwards
    assert found["<root>+2+1"] == {"gather"}
    assert found["2+1+<root>"] == {"reduce", "wait for reduction"}
    assert found["1"] == STAGES - {"gather", "reduce", "wait for reduction"}
