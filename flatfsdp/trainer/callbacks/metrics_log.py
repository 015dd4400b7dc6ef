"""The numbers of a run as lines of JSON, one for each step, evaluation and checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from flatfsdp.trainer.callbacks.base import Callback, keep_earlier
from flatfsdp.trainer.reports import Progress, StepReport, TrainingResult
from flatfsdp.trainer.run import Run

NAME = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a log, in order. A last line that was not written to its end is left out; no file, no rows."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class MetricsLog(Callback):
    """Write `metrics.jsonl` into the run's folder, by rank 0.

    A run that goes on from a checkpoint drops the rows of what came after it, which comes again: each step is there
    once, and each evaluation. The log as it was before a branch is set aside, and so is that of another run. Losses are
    in the objective's units (nats per token), times in seconds of training, sizes in bytes.

    Args:
        every: of so many steps one has a row.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._file: TextIO | None = None

    def on_begin(self, trainer: Run) -> None:
        if not trainer.world.leads:
            return
        path = trainer.output / NAME
        keep_earlier(trainer, NAME)
        rows = [row for row in read_metrics(path) if _is_before(row, trainer.progress)]
        fresh = path.with_suffix(".new")
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        os.replace(fresh, path)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        trainer.written["metrics"] = path

    def on_step(self, trainer: Run, report: StepReport) -> None:
        if report.step % self._every == 0:
            self._write(report.row())

    def on_evaluation(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        self._write({"step": trainer.progress.step, **metrics})

    def on_save(self, trainer: Run, path: Path, stall_seconds: float) -> None:
        self._write({"step": trainer.progress.step, "checkpoint": path.name, "stall_seconds": stall_seconds})

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(f"{json.dumps(row)}\n")


def _is_before(row: Mapping[str, Any], progress: Progress) -> bool:
    is_evaluation = "loss" not in row and "checkpoint" not in row
    if is_evaluation and row["step"] == progress.step:
        return progress.evaluated == progress.step
    return bool(row["step"] <= progress.step)
