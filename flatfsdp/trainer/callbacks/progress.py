"""A progress bar, or lines where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from flatfsdp.trainer.byte_format import sizes_in_words
from flatfsdp.trainer.callbacks.base import Callback
from flatfsdp.trainer.reports import MemoryFootprint, StepReport, TrainingResult, shown
from flatfsdp.trainer.run import Run
from flatfsdp.trainer.terminal import columns, print_line

PLAIN_LINES = 20  # lines of a run whose output is not a terminal
BAR = 23  # columns: percentage, bar, hours, minutes and seconds that remain, what stands between, and one to spare


class ProgressBar(Callback):
    """tqdm's bar on a terminal, some lines on stderr elsewhere; of rank 0.

    The first of the callbacks: what others print at the end comes when the bar is closed.
    """

    def __init__(self) -> None:
        self._lines: int | None = None
        self._bar: Any = None

    def on_begin(self, trainer: Run) -> None:
        self._lines = None

    def on_step(self, trainer: Run, report: StepReport) -> None:
        if not trainer.world.leads:
            return
        done = min(report.done, 1.0)
        if self._bar is None and self._lines is None:
            self._bar = _tqdm_bar(done)
        text = f"step {report.step}: loss {report.loss:.3f}, {report.tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(fitting(text, report.footprint, columns(sys.stderr)), refresh=False)
            self._bar.update(done - self._bar.n)
        elif self._lines is None or done * PLAIN_LINES >= self._lines + 1:
            self._lines = int(done * PLAIN_LINES)
            print(f"{done:4.0%} {text}; per rank {report.footprint}", file=sys.stderr, flush=True)

    def on_evaluation(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        if trainer.world.leads:
            values = ", ".join(f"{name} {shown(value)}" for name, value in metrics.items())
            print_line(f"step {trainer.progress.step}: {values}")

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def fitting(text: str, footprint: MemoryFootprint, width: int | None) -> str:
    """`text`, and of a rank's bytes what a line of `width` has room for beside the bar: each kind, or their sum."""
    whole = footprint.parameters + footprint.gradients + footprint.optimizer + footprint.in_flight
    room = (width or 1000) - BAR - len(text)
    ends = (f"; per rank {footprint}", f"; {footprint}", f"; {sizes_in_words(whole)} per rank")
    return text + next((end for end in ends if len(end) <= room), "")


def _tqdm_bar(done: float) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    form = "{percentage:3.0f}% {bar:5} {remaining}{postfix}"
    return tqdm(total=1.0, initial=done, dynamic_ncols=True, bar_format=form)
