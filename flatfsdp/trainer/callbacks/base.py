"""The base class of callbacks: the events of a run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from flatfsdp.trainer.reports import StepReport, TrainingResult
from flatfsdp.trainer.run import Run
from flatfsdp.trainer.state.checkpoints import ASIDE
from flatfsdp.trainer.terminal import print_line


class Callback:
    """The base of callbacks; each method does nothing.

    All of them are called on every rank, at the same points and with the same values (but for a report's `ids`). So
    they may call what is collective, and `trainer.ask_to_stop()`; what prints or writes checks `trainer.world.leads`.
    What one raises on a rank ends the run on all: the others raise an `AgreementError` that names it.
    """

    def on_begin(self, trainer: Run) -> None:
        """Before the first step, after a checkpoint was loaded."""

    def on_step(self, trainer: Run, report: StepReport) -> None:
        """After a step, when its numbers have arrived: often during the next one."""

    def on_evaluation(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""

    def on_save(self, trainer: Run, path: Path, stall_seconds: float) -> None:
        """After a checkpoint was begun; training waited for it so long. An asynchronous one is complete later."""

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        """After the last step, its evaluation and its checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What it wants back when a run goes on: plain values and tensors, the same on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""


def keep_earlier(trainer: Run, name: str) -> None:
    """Keep what another run has written as `name` into the run's folder, where this one will write it: in a folder
    `aside-<number>`. By the rank that leads, in `on_begin`; a run that goes on after its last checkpoint keeps writing.
    """
    path = trainer.output / name
    if not (path.is_file() and path.stat().st_size):
        return
    if trainer.aside is None and trainer.begins:
        trainer.aside = _fresh(trainer.output)
        print_line(f"{trainer.output} has files of an earlier run, which are in {trainer.aside} now")
    if trainer.begins and trainer.aside is not None:
        path.rename(trainer.aside / name)
    elif trainer.aside is not None:  # a branch goes on with it
        shutil.copyfile(path, trainer.aside / name)


def _fresh(folder: Path) -> Path:
    for number in count(1):
        try:
            (path := folder / ASIDE.format(number)).mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers do not end")
