"""The kernels of one step, their overlap, and waits of the host: from the profiler's trace.

In a fake group of 8 ranks, each collective is a kernel that spins for a time that depends on its size, on the stream
that the engine chose. The group is treated like NCCL's, which runs several collectives as one. For backends that cannot
do that, so that small tensors are staged, the number of kernels that copy is measured separately.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flatfsdp.engine.comm.axes import served_as
from flatfsdp.engine.transports.staged import SMALL as STAGED
from tools.benchmark import gpu, ranks
from tools.benchmark.jobs import Setting, Training
from tools.benchmark.models import Case, MLPBlock, mlp, tiny_case

from . import trace
from .card import MIB, Card, card_of
from .engines import FAKE, OURS, PEERS
from .report import Report

# A block computes for longer than its collective spins.
LARGE = Case("large", partial(mlp, 8, 8, 2048), MLPBlock, 8192, 2048, 1)
SMALL = tiny_case(4, 2)
LEAD_MS = 250.0  # several times the host time for issuing a traced step
FLOOR, FRONT = "floor", OURS[2]
# The first gather of a step and the last reduction have nothing to hide behind.
HIDDEN = {"all_gather": 0.85, "reduce_scatter": 0.8}
COLUMNS = (
    "kernels",
    "copy kernels",
    "launches",
    "MiB allocated",
    "MiB reserved",
    "gathers hidden",
    "reductions hidden",
)


def run(report: Report, card: Card, *, brief: bool) -> None:
    """Measure flatfsdp and the others, in bf16 and (one of flatfsdp's, and the peers) in float32."""
    case = LARGE if card.is_real else SMALL
    for bf16, ours in ((True, OURS[:1] if brief else OURS), (False, OURS[:1])):
        kind, figures = "bf16" if bf16 else "float32", {}
        for engine in (*ours, *(() if brief else (*PEERS, FLOOR))):
            setting = Setting(case, engine, device=card.kind, bf16=bf16, made_there=card.is_real)
            world = ranks.World(1, "") if engine == FLOOR else FAKE
            keep = report.folder / f"trace-{engine}.json.gz" if engine in OURS[::2] and bf16 and card.is_real else None
            try:
                figures[engine] = ranks.run(world, inspect, setting, keep, timeout=60.0)[0]
            except Exception as error:
                report.failed(f"{engine}, {kind}", "is measured", error)
                continue
            if engine in ours:
                _judge(report, card, f"{engine}, {kind}", figures[engine], 2 * len(case.unit_bytes()) if bf16 else 0)
            if engine == FRONT and bf16:
                _stages(report, card, setting)
        report.numbers(kind, figures)
        report.table(f"One step, {kind}, 8 blocks", ("engine", *COLUMNS), [_line(e, f) for e, f in figures.items()])
        if not brief:
            _compare(report, card, kind, figures, ours)


def inspect(rank: int, setting: Setting, keep: Path | None) -> dict[str, Any]:
    """Figures of single steps after the warm-up. Collective."""
    card = card_of(setting.device)
    card.begin()
    with served_as("nccl"):
        training = Training(rank, setting)
        training.warm_up()
    card.forget_peaks()
    training.step()
    card.synchronize()
    allocated, reserved = card.peaks()
    figures: dict[str, Any] = {"allocated": allocated, "reserved": reserved}
    batch = training.batch()
    with trace.Operators() as operators:
        trace.step(training, batch)
    stand_ins, spun = _spun(training, card)
    if keep is not None:
        spun.write(keep)
    kernels, calls = [kernel for kernel in spun.kernels() if not kernel.communicates], spun.calls()
    launches = sum(count for name, count in calls.items() if "Launch" in name or "Memcpy" in name)
    return figures | {
        "kernels": len(kernels),
        "copy kernels": sum(kernel.copies for kernel in kernels),
        "launches": launches - len(stand_ins.issued) if card.is_real else launches,  # each stand-in is a launch
        "copies on streams": _copies_on_streams(spun),
        "host waits": spun.waits(),
        "memory calls": {name: calls[name] for name in ("cudaMalloc", "cudaFree", "cudaHostAlloc") if calls[name]},
        "record_stream": operators.calls["aten::record_stream"],
        "hidden": {k: gpu.hidden(v, spun.kernels()) for k, v in gpu.by_kind(spun.kernels(), stand_ins.issued).items()},
        "collectives": len(stand_ins.issued),
        "retries": card.retries(),
        "waits": _waits(training, card),  # last: it may fail
    }


def _spun(training: Training, card: Card) -> tuple[gpu.StandIns, trace.Trace]:
    """Trace a step whose collectives take time, while the host is ahead."""
    stand_ins = gpu.StandIns(gpu.SPIN_MS if card.is_real else 0.0, max(training.setting.case.unit_bytes()) // 4)
    return stand_ins, trace.record(training, card, stand_ins, LEAD_MS if card.is_real else 0.0)


def _copies_on_streams(spun: trace.Trace) -> int:
    """The number of kernels that copy on the streams of collectives."""
    kernels = spun.kernels()
    streams = {kernel.stream for kernel in kernels if kernel.communicates}
    return sum(kernel.copies and not kernel.communicates for kernel in kernels if kernel.stream in streams)


def copies_with_staging(rank: int, setting: Setting) -> int:
    """The number of copies on the streams of collectives in a step, with staging of small tensors. Collective."""
    card = card_of(setting.device)
    card.begin()
    training = Training(rank, setting)
    training.warm_up()
    return _copies_on_streams(_spun(training, card)[1])


def least_with_staging(setting: Setting) -> int:
    """The minimum for `copies_with_staging` in bf16, from the layout. Each gather of a unit casts all of its tensors in
    one kernel, which writes staged ones to their buffer, and copies these out of it in another. A reduction, in
    float32, copies them in, and out, unless all are staged: then the buffer is the result.
    """
    with torch.device("meta"):
        model = setting.case.make()
    copies = 0
    for unit in model.modules():
        if isinstance(unit, setting.case.unit):
            sizes = [parameter.numel() for parameter in unit.parameters()]
            gathered, reduced = (sum(size * width <= STAGED for size in sizes) for width in (2, 4))
            copies += 2 * (1 + (gathered > 1)) + (reduced > 1) * (1 + (reduced < len(sizes)))
    return copies


def _stages(report: Report, card: Card, setting: Setting) -> None:
    what, least = f"{setting.engine}, bf16: copies on the streams of collectives, staged", least_with_staging(setting)
    try:
        found = ranks.run(FAKE, copies_with_staging, setting, timeout=60.0)[0]
    except Exception as error:
        report.failed(what, f"at most {least}", error)
        return
    real = card.is_real
    report.goal(what, f"at most {least}", str(found) if real else "no card", found <= least if real else None)


def _waits(training: Training, card: Card) -> str:
    """The error of a step in which no operation may wait; "" if there is none."""
    batch = training.batch()
    card.synchronize()
    try:
        with card.refusing_to_wait() if card.is_real else nullcontext():
            trace.step(training, batch)
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return ""


def _judge(report: Report, card: Card, name: str, figures: dict[str, Any], casts: int) -> None:
    real = card.is_real

    def goal(what: str, wanted: str, found: str, met: bool) -> None:
        report.goal(f"{name}: {what}", wanted, found if real else "no card", met if real else None)

    for kind, least in HIDDEN.items():
        share = figures["hidden"].get(kind)
        goal(f"{kind} beside computation", f"at least {least:.0%}", _share(share), share is not None and share >= least)
    goal(
        "copies on the streams of collectives",
        f"at most {casts} (casts)",
        str(figures["copies on streams"]),
        figures["copies on streams"] <= casts,
    )
    goal("set_sync_debug_mode('error') in a step", "passes", figures["waits"] or "passes", not figures["waits"])
    waits = ", ".join(f"{count} {call}" for call, count in figures["host waits"].items())
    goal("host waits in a step", "none", waits or "none", not waits)
    report.goal(f"{name}: record_stream", "never", f"{figures['record_stream']} times", figures["record_stream"] == 0)
    goal("allocator retries", "none", str(figures["retries"]), figures["retries"] == 0)


def _compare(report: Report, card: Card, kind: str, figures: dict[str, Any], ours: tuple[str, ...]) -> None:
    """Compare peaks of memory with the peers'."""
    there = [peer for peer in PEERS if peer in figures]
    for engine in ours if there else ():
        if engine in figures:
            mine, least = figures[engine]["allocated"], min(figures[peer]["allocated"] for peer in there)
            others = ", ".join(f"{peer} {figures[peer]['allocated'] / MIB:.0f}" for peer in there)
            found = f"{mine / MIB:.0f} MiB; {others}" if card.is_real else "no card"
            report.goal(
                f"{engine}, {kind}: peak of a step",
                f"at most {' and '.join(there)}",
                found,
                mine <= least if card.is_real else None,
            )


def _line(engine: str, figures: dict[str, Any]) -> list[str]:
    hidden = [_share(figures["hidden"].get(kind)) for kind in HIDDEN]
    sizes = [f"{figures[key] / MIB:.0f}" for key in ("allocated", "reserved")]
    return [engine, *(str(figures[key]) for key in ("kernels", "copy kernels", "launches")), *sizes, *hidden]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
