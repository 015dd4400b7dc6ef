"""The engine's actions in 340 random programs, and what comes of them byte by byte, are the recorded ones.

Record an intended change by `python -m tests.golden.traces --changed`, which names the programs; state in the commit
which they are, and why.
"""

from __future__ import annotations

import random

import pytest

from tests.golden import programs, traces
from tests.golden.traces import ACTIONS, EVENTS, difference, golden, packed, trace_of, unpacked
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.single_process

FEW = 40  # in every run; all with --thorough


@pytest.mark.parametrize(
    "number", [*range(programs.OLDEST if is_thorough() else FEW), *range(programs.OLDEST, programs.COUNT)]
)
def test_a_program_does_what_is_written_down(number: int) -> None:
    expected, found = golden()[number], trace_of(number)
    assert found == expected, (
        f"\n{difference(expected, found)}\n(If this is meant: python -m tests.golden.traces {number})"
    )


def test_every_program_is_written_down() -> None:
    assert sorted(golden()) == [*range(programs.COUNT)]
    assert traces.FILE.stat().st_size < 300_000


def test_programs_do_everything_that_programs_can_do() -> None:
    """So that every change changes a trace. No program ends with an error: errors are tested elsewhere."""
    lines = [line for trace in golden().values() for line in trace]
    assert not [line for line in lines if "Error" in line]
    tokens = {token.rstrip("0123456789") for line in lines if line.startswith("  ") for token in line.split()}
    actions = {token.partition("(")[2][:1] for token in tokens if token.startswith("(")}
    assert actions == {*ACTIONS.values()}
    assert tokens >= {*EVENTS.values(), *"ASR", "<u>c", "<c>u", "<r>c", "<v>r", "+r"}
    done = " ".join(line for line in lines if line.startswith("- "))
    for kind in programs.BACKWARDS:
        assert kind.__name__ in done
    for strategy in programs.STRATEGIES:
        assert sum(f": {strategy}, " in trace[0] for trace in golden().values()) > 10
    for word in ("orig", "flat", "offload", "bf16", "reshard to 2", "device", "large", "hook", "in_backward"):
        assert sum(f", {word}" in trace[0] for trace in golden().values()) > 5


def test_a_line_of_the_file_is_a_trace() -> None:
    drawn = random.Random(0)
    trace = [f"line {drawn.random()}" for _ in range(100)]
    assert unpacked(packed(trace)) == trace


def test_a_difference_is_shown_line_by_line() -> None:
    assert difference(["a", "b"], ["a", "c"]).splitlines()[2:] == ["@@ -1,2 +1,2 @@", " a", "-b", "+c"]
