"""Metrics in TensorBoard and on Weights & Biases, written by rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.callbacks import Callback
from flatfsdp.trainer.hub.cache import library
from flatfsdp.trainer.run import Run, StepReport, TrainingResult

_LEFT_OUT = ("step", "tokens")  # of a row: the axis, and a number that total_tokens shows


class _Tracker(Callback):
    """The common part of both trackers: numbers go to `_log` at a step."""

    def _log(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def on_step(self, trainer: Run, report: StepReport) -> None:
        if trainer.world.leads:
            row = {f"train/{name}": value for name, value in report.row().items() if name not in _LEFT_OUT}
            self._log(row, report.step)

    def on_evaluation(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        if trainer.world.leads:
            named = {f"eval/{name.removeprefix('eval_')}": value for name, value in metrics.items()}
            self._log(named, trainer.progress.step)


class TensorBoard(_Tracker):
    """Writes event files for TensorBoard into the run's folder: `tensorboard --logdir OUTPUT`.

    A resumed run hides the events that were written after its checkpoint.

    Args:
        folder: the folder of the files inside the run's folder.

    Raises:
        ConfigValueError: when the run begins: tensorboard is not installed.
    """

    def __init__(self, folder: str = "tensorboard") -> None:
        self._folder = folder
        self._writer: Any = None

    def on_begin(self, trainer: Run) -> None:
        if not trainer.world.leads:
            return
        library("tensorboard", wanted_by="callback tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        path = trainer.output / self._folder
        if self._writer is not None:
            self._writer.close()
        self._writer = SummaryWriter(str(path), purge_step=trainer.progress.step + 1)
        trainer.written["tensorboard"] = path

    on_other_ranks = on_begin

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases(_Tracker):
    """Logs to Weights & Biases; a resumed run continues the same run of that service.

    Args:
        project: the project of the run.
        mode: "online"; "offline", which writes into the run's folder for `wandb sync`; None for the mode in the
            environment (`WANDB_MODE`).
        options: other arguments of `wandb.init`, such as `name`, `tags`, `entity`.

    Raises:
        ConfigValueError: when the run begins: wandb is not installed.
    """

    ID = "wandb-id"  # the file with the service's id of the run

    def __init__(self, project: str = "flatfsdp", mode: str | None = None, **options: Any) -> None:
        if mode not in (None, "online", "offline", "disabled"):
            raise ConfigValueError(f"callback wandb: got mode={mode!r}. Accepted: 'online', 'offline' or 'disabled'")
        self._options = {"project": project, "mode": mode, **options}
        self._run: Any = None

    def on_begin(self, trainer: Run) -> None:
        self._open(trainer, goes_on=not trainer.begins)

    def on_other_ranks(self, trainer: Run) -> None:
        self._open(trainer, goes_on=True)

    def _open(self, trainer: Run, *, goes_on: bool) -> None:
        if not trainer.world.leads or self._run is not None:
            return
        wandb = library("wandb", wanted_by="callback wandb")
        path: Path = trainer.output / self.ID
        known = path.read_text().strip() if path.is_file() and goes_on else None
        self._run = wandb.init(
            dir=str(trainer.output), id=known, resume="allow", config=_config(trainer), **self._options
        )
        path.write_text(f"{self._run.id}\n")
        trainer.written["wandb"] = Path(self._run.dir)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        if self._run is not None:
            self._run.finish(exit_code=result.exit_code)
            self._run = None


def _config(trainer: Run) -> dict[str, str]:
    tables = {"training": trainer.training, "fsdp": trainer.fsdp}
    return {f"{table}.{name}": str(value) for table, given in tables.items() for name, value in vars(given).items()}
