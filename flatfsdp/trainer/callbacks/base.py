"""When a trainer calls, and with what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatfsdp.trainer.reports import Result, StepReport
    from flatfsdp.trainer.trainer import Trainer


class Callback:
    """The base of callbacks; each method does nothing.

    All of them are called on every rank, at the same points and with the same values (but for a report's `ids`). So
    they may call what is collective, and `trainer.ask_to_stop()`; what speaks or writes asks `trainer.world.leads`.
    What one raises on a rank ends the run on all: the others raise an `AgreementError` that says so.
    """

    def on_begin(self, trainer: Trainer) -> None:
        """Before the first step, after a checkpoint was loaded."""

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """After a step, when its numbers have arrived: often during the next one."""

    def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""

    def on_save(self, trainer: Trainer, path: Path, stall_seconds: float) -> None:
        """After a checkpoint was begun; training waited for it so long. An asynchronous one is complete later."""

    def on_end(self, trainer: Trainer, result: Result) -> None:
        """After the last step, its evaluation and its checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What it wants back when a run goes on: plain values and tensors, the same on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
