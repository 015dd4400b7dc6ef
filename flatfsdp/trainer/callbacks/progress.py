"""How far a run is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flatfsdp.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from flatfsdp.trainer.reports import Result, StepReport
    from flatfsdp.trainer.trainer import Trainer

PLAIN_LINES = 20  # lines of a run whose output is not a terminal


class ProgressBar(Callback):
    """tqdm's bar on a terminal, some lines on stderr elsewhere; of rank 0."""

    def __init__(self) -> None:
        self._lines: int | None = None
        self._bar: Any = None

    def on_begin(self, trainer: Trainer) -> None:
        self._lines = None
        self._bar = _tqdm_bar() if trainer.world.leads and sys.stderr.isatty() else None

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if not trainer.world.leads:
            return
        done = min(report.done, 1.0)
        text = (
            f"step {report.step}: loss {report.loss:.3f}, {report.tokens_per_second:,.0f} tokens/s; "
            f"per rank {report.footprint}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
        elif self._lines is None or done * PLAIN_LINES >= self._lines + 1:
            self._lines = int(done * PLAIN_LINES)
            print(f"{done:4.0%} {text}", file=sys.stderr, flush=True)

    def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if trainer.world.leads:
            values = ", ".join(f"{name} {value:,.4g}" for name, value in metrics.items())
            self._say(f"step {trainer.progress.step}: {values}")

    def on_end(self, trainer: Trainer, result: Result) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


def _tqdm_bar() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=1.0, dynamic_ncols=True, bar_format="{percentage:3.0f}% {bar:8} {remaining}{postfix}")
