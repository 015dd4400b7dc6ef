"""Memory of a GPT of about 1B parameters in bf16, next to FSDP1 and FSDP2, and the formula next to the allocator.

One rank of a fake group of 8, and a world of one rank, where FSDP1 shards nothing. Memory of a process does not depend
on other processes, so several are measured at the same time, if the card has room for them: except for FSDP1's, which
frees memory that another stream still reads, so that its figures depend on the speed of the card.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

import flatfsdp
from tools.benchmark import ranks
from tools.benchmark.engines import ENGINES
from tools.benchmark.gpu import FAKE_RANKS
from tools.benchmark.jobs import Setting, Training
from tools.benchmark.models import GPT, Case, GPTBlock
from tools.benchmark.ranks import World

from . import books, trace
from .card import MIB, Card, card_of
from .engines import ALONE, FAKE, OURS, PEERS
from .report import Report

# 19 blocks of 50.4 million parameters, and 67 million in the embedding and the head.
BILLION = Case("gpt 1B", partial(GPT, 16384, 1024, 2048, 19, 16), GPTBlock, 1024, 16384, 1)
TINY = Case("gpt", partial(GPT, 64, 8, 16, 2, 2), GPTBlock, 8, 64, 1)
EARLY, LATE = 2, 50  # steps between which memory must not grow
NEEDS = {"fake group of 8": 8, "one rank": 25}  # GiB of the card for one process
CLOSE = 0.02  # relative to the formula's term: blocks are rounded up, and small tensors are not included


def run(report: Report, card: Card, *, brief: bool) -> None:
    """Measure peaks, growth and terms."""
    case = BILLION if card.is_real else TINY
    for name, world in zip(NEEDS, (FAKE, World(1, card.backend)), strict=True):
        figures: dict[str, Any] = {}
        settings = {
            engine: Setting(case, engine, device=card.kind, bf16=True, made_there=card.is_real)
            for engine in (*(OURS[:1] if brief else OURS), *(() if brief else PEERS))
        }
        jobs = {
            engine: partial(ranks.run, world, measure, setting, _last(engine, brief), timeout=90.0)
            for engine, setting in settings.items()
        }
        together = {engine: job for engine, job in jobs.items() if engine != PEERS[0]}
        found = dict(zip(together, _side_by_side(list(together.values()), _room(card, NEEDS[name])), strict=True))
        found |= {engine: _side_by_side([job], 1)[0] for engine, job in jobs.items() if engine not in together}
        for engine in settings:
            if isinstance(found[engine], Exception):
                report.failed(f"{name}, {engine}", "is measured", found[engine])
                continue
            figures[engine] = found[engine][0]
            if engine in OURS:
                _grows(report, card, f"{name}, {engine}", figures[engine])
        report.numbers(name, figures)
        keys = ("in use", "allocated", "reserved", "between")
        rows = [[e, *(f"{f[key] / MIB:.0f}" for key in keys)] for e, f in figures.items()]
        header = ("engine", "peak in use", "peak allocated", "peak reserved", "between steps")
        report.table(f"{case.name}, {name}: MiB", header, rows)
        _compare(report, card, name, figures)
    _terms(report, card, case)


def _last(engine: str, brief: bool) -> int:
    return LATE if engine in OURS[::2] and not brief else EARLY


def _room(card: Card, need: int) -> int:
    """The number of processes that fit on the card, at most the number of processors."""
    return max(1, min(card.free_bytes() // 2**30 // need, (os.cpu_count() or 1) // 2))


def _side_by_side(jobs: Sequence[Callable[[], Any]], room: int) -> list[Any]:
    """The results of all jobs, or their exceptions."""

    def carry_out(job: Callable[[], Any]) -> Any:
        try:
            return job()
        except Exception as error:
            return error

    if room == 1:
        return list(map(carry_out, jobs))
    with ThreadPoolExecutor(room) as threads:
        return list(threads.map(carry_out, jobs))


def measure(rank: int, setting: Setting, last: int) -> dict[str, Any]:
    """Bytes at the peak of a step and after it, early and at the `last` one; retries. Collective."""
    card = card_of(setting.device)
    card.begin()
    training = Training(rank, setting)
    card.give_back()
    found: dict[str, Any] = {}
    for step in range(last + 1):
        card.forget_peaks()
        trace.step(training, training.batch())
        if step in (EARLY, last):
            card.synchronize()
            allocated, reserved = card.peaks()
            here = {"allocated": allocated, "reserved": reserved, "between": card.allocated()}
            here["in use"] = card.peak_in_use()
            found |= here if step == EARLY else {}
            found["late"] = {"step": step, **here}
    return found | {"retries": card.retries()}


def _grows(report: Report, card: Card, name: str, found: dict[str, Any]) -> None:
    late = found["late"]
    if late["step"] > EARLY:
        same = all(late[key] == found[key] for key in ("allocated", "between"))
        peaks, rests = ([f"{one[key] / MIB:.1f}" for one in (found, late)] for key in ("allocated", "between"))
        words = f"peak {' then '.join(peaks)} MiB, between steps {' then '.join(rests)}"
        goal = f"equal at steps {EARLY} and {late['step']}"
        report.goal(
            f"{name}: memory over steps", goal, words if card.is_real else "no card", same if card.is_real else None
        )
    report.goal(
        f"{name}: allocator retries", "none", str(found["retries"]), found["retries"] == 0 if card.is_real else None
    )


def _compare(report: Report, card: Card, name: str, figures: dict[str, Any]) -> None:
    """Compare peaks: in the fake group below both peers; alone, where FSDP1 shards nothing, at most theirs.

    Memory in use is compared: after `record_stream`, FSDP1 frees memory that other streams still read, so that less
    counts as allocated than is in use.
    """
    for key in ("in use", "reserved"):
        for engine in OURS:
            others = {peer: figures[peer][key] for peer in PEERS if peer in figures}
            if engine not in figures or not others:
                continue
            mine, least = figures[engine][key], min(others.values())
            met = mine <= least if name == "one rank" else mine < least
            words = ", ".join(f"{peer} {size / MIB:.0f}" for peer, size in others.items())
            goal = f"{'at most' if name == 'one rank' else 'below'} {' and '.join(others)}"
            found = f"{mine / MIB:.0f} MiB; {words}" if card.is_real else "no card"
            report.goal(f"{name}, {engine}: peak {key}", goal, found, met if card.is_real else None)


def _terms(report: Report, card: Card, case: Case) -> None:
    """Compare the results of `memory_plan` with the allocator's figures."""
    engine = OURS[0]
    setting = Setting(case, engine, device=card.kind, bf16=True, made_there=card.is_real)
    jobs = [
        partial(ranks.run, world, job, setting, timeout=90.0) for world, job in ((ALONE, plan_of), (FAKE, terms_of))
    ]
    both = _side_by_side(jobs, _room(card, NEEDS["fake group of 8"]))
    if failed := [each for each in both if isinstance(each, Exception)]:
        report.failed("the formula's terms", "are read", failed[0])
        return
    (plan,), (found,) = both
    report.numbers("terms", {"formula": plan, "allocator": found})
    after, later = found["after backward"], found["after step"]
    for term, least, most, theirs in (
        ("shards and gradients after a backward", *2 * [plan["params"] + plan["grads"]], after.get("engine", 0)),
        ("optimizer state after a step", *2 * [plan["optimizer"]], later.get("optimizer", 0)),
        ("shards after a step", *2 * [plan["params"]], later.get("engine", 0)),
        # The formula's term excludes gradients that are already in `.grad`.
        (
            "the engine's peak",
            plan["at peak"],
            plan["at peak"] + plan["grads"],
            found["peak of the engine"].get("engine", 0),
        ),
    ):
        formula = " to ".join(dict.fromkeys(f"{size / MIB:.1f}" for size in (least, most)))
        words = f"{formula} MiB by the formula, {theirs / MIB:.1f} by the allocator"
        met = least * (1 - CLOSE) <= theirs <= most * (1 + CLOSE)
        report.goal(term, f"within {CLOSE:.0%}", words if card.is_real else "no card", met if card.is_real else None)
    rows = [[owner, *(f"{found[at].get(owner, 0) / MIB:.1f}" for at in books.MOMENTS)] for owner in books.OWNERS]
    report.table("MiB by owner, by the allocator's books", ("owner", *books.MOMENTS), rows)


def plan_of(rank: int, setting: Setting) -> dict[str, int]:
    """The formula's terms."""
    with flatfsdp.dry_run(FAKE_RANKS, accelerator=True):
        with torch.device("meta"):
            model = setting.case.make()
        mixed = flatfsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        wrapped = flatfsdp.FullyShardedDataParallel(model, auto_wrap_policy={setting.case.unit}, mixed_precision=mixed)
        plan = flatfsdp.memory_plan(wrapped, ENGINES[setting.engine].optimize(wrapped))
    return {
        "params": plan.params,
        "grads": plan.grads,
        "optimizer": sum(plan.optimizer.values()),
        # Unsharded gradients belong to autograd's memory.
        "at peak": sum(plan.at_peak.values()) - plan.at_peak.get("arrived", 0),
    }


def terms_of(rank: int, setting: Setting) -> dict[str, dict[str, int]]:
    """Bytes by owner at the moments of a step. Collective."""
    card = card_of(setting.device)
    card.begin()
    with card.recording():
        training = Training(rank, setting)
        for _ in range(EARLY):
            trace.step(training, training.batch())
        training.model(*training.batch()).backward()
        card.synchronize()
        found = {"after backward": books.held(card.snapshot())}
        training.optimizer.step()
        training.optimizer.zero_grad()
        card.synchronize()
        snapshot = card.snapshot()
    return found | {"after step": books.held(snapshot), "peak of the engine": books.at_peak_of("engine", snapshot)}
