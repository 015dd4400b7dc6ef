"""Stop a run that no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.callbacks.base import Callback
from flatfsdp.trainer.run import Run


class EarlyStop(Callback):
    """Stop when `by` has not improved for `patience` evaluations in a row.

    Args:
        by: a metric of evaluations.
        mode: "min" if smaller is better, "max" if larger is.
        least: by how much it has to be better to have improved.

    Raises:
        ConfigValueError: no such patience or mode.
    """

    def __init__(self, patience: int = 3, *, by: str = "eval_loss", mode: str = "min", least: float = 0.0) -> None:
        if patience < 1 or mode not in ("min", "max"):
            raise ConfigValueError(
                f"EarlyStop: got patience={patience!r}, mode={mode!r}. Accepted: at least 1, and 'min' or 'max'"
            )
        self._patience, self._by, self._least = patience, by, least
        self._sign = 1.0 if mode == "min" else -1.0
        self._best = math.inf
        self._since = 0

    def on_evaluation(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        if self._by not in metrics:
            raise ConfigValueError(f"EarlyStop: no metric {self._by!r} in an evaluation; there are {sorted(metrics)}")
        value = self._sign * metrics[self._by]
        if value < self._best - self._least:
            self._best, self._since = value, 0
            return
        self._since += 1
        if self._since >= self._patience:
            trainer.ask_to_stop()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._since = state["best"], state["since"]
