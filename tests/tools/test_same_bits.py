"""The runs of `tools.same_bits`, and its report."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.harness.pool import JobFailed
from tools.same_bits import COUNT, WORLDS, Job, Result, jobs, report, run_job

pytestmark = pytest.mark.unit


@cache
def every() -> list[Job]:
    return [*jobs(list(WORLDS))]


def test_all_ways_on_all_numbers_of_ranks() -> None:
    assert len({job.key for job in every()}) == len(every())
    for world in WORLDS:
        own = [job for job in every() if job.world == world and job.group != "resumed"]
        names = {(job.group, job.name) for job in own}
        assert {job.group for job in own} == {"clipped", "in backward", "bf16"}
        assert {(*name, True) for name in names} | {(*name, False) for name in names} == {
            (job.group, job.name, job.accumulates) for job in own
        }
        if world > 1:
            assert {job.owners for job in own} == {"aligned", "in turns", "unevenly"}
            assert {job.messages for job in own} == {True, False}
        hybrids = {job.name.split(", ")[-1] for job in own if "HYBRID" in job.name}
        assert hybrids == {4: {"2 x 2"}, 6: {"3 x 2", "2 x 3"}, 8: {"4 x 2", "2 x 4"}}.get(world, set())
    ways = {(job.world, job.owners, job.accumulates, job.messages) for job in every() if job.world > 1}
    assert len(ways) == (len(WORLDS) - 1) * 3 * 2 * 2
    assert COUNT % 8, "on eight ranks, numbers of microbatches differ"


def test_a_report_names_runs_with_another_hash() -> None:
    results = {job.key: Result(job.key, 50, f"{job.compared} hash", 1.0, "abc", "2026-01-01T") for job in every()}
    text, wrong = report(every(), results, "same_bits")
    assert not wrong and f"{len(every())} of {len(every())} runs, 0 of them" in text
    bad, failed = every()[60].key, every()[90].key
    results[bad] = replace(results[bad], hash="other")
    results[failed] = replace(results[failed], hash="", words="rank 1 raised")
    del results[every()[100].key]
    text, wrong = report(every(), results, "same_bits")
    assert [line.split(":")[0] for line in wrong] == [every()[60].group, every()[90].group]
    assert "other, expected" in wrong[0] and "rank 1 raised" in wrong[1]
    assert f"{len(every()) - 1} of {len(every())} runs, 2 of them" in text


@pytest.mark.parametrize("error", [JobFailed("rank 1 did not answer", {}), OSError("rank 1 did not answer")])
def test_a_run_that_fails_is_a_result(error: Exception) -> None:
    def play(steps: int) -> str:
        raise error

    job = replace(every()[60], play=play)
    result = run_job(job, 50, "abc")
    assert (result.key, result.hash) == (job.key, "") and "rank 1 did not answer" in result.words
    assert report([job], {job.key: result}, "same_bits")[1] == [f"{job.key}: {result.words.strip()}"]
