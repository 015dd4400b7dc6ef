"""A trace of some steps by torch's profiler, for each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity

from flatfsdp.trainer.callbacks import Callback
from flatfsdp.trainer.run import Run, TrainingResult


class Profile(Callback):
    """Writes `trace-rank<rank>.json` into the run's folder, to be viewed in chrome://tracing and Perfetto.

    Args:
        first, last: the recorded steps, counted from 1.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._profiler: Any = None

    def on_step_begin(self, trainer: Run, step: int) -> None:
        if self._profiler is None and self._first <= step <= self._last:
            kinds = [ProfilerActivity.CPU]
            if trainer.world.device.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.__enter__()
        elif self._profiler is not None and step > self._last:
            self._write(trainer)

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        if self._profiler is not None:
            self._write(trainer)

    def _write(self, trainer: Run) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        path = trainer.output / f"trace-rank{trainer.world.rank}.json"
        profiler.export_chrome_trace(str(path))
        trainer.written["trace"] = path
