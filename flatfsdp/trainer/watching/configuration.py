"""The effective settings of a run, in its folder: a file that another run can be started from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flatfsdp.trainer.callbacks import Callback, keep_earlier
from flatfsdp.trainer.run import Run
from flatfsdp.trainer.settings import Settings
from flatfsdp.trainer.settings.types import as_text

CONFIGURATION = "config.json"


class Configuration(Callback):
    """Writes `config.json` into the run's folder when it begins, on rank 0: `--config OUTPUT/config.json` has the
    settings of this run, also its folder.

    Args:
        groups: the settings, by the name of their table; fields with their defaults are left out.
    """

    def __init__(self, groups: Mapping[str, Settings]) -> None:
        self._tables = {name: table for name, group in groups.items() if (table := _changed(group))}

    def on_begin(self, trainer: Run) -> None:
        if trainer.world.leads:
            keep_earlier(trainer, CONFIGURATION)
            path = trainer.output / CONFIGURATION
            own = {"output": str(trainer.output)} | _samples_of_a_step(trainer)
            tables = {**self._tables, "training": self._tables.get("training", {}) | own}
            path.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
            trainer.written["settings"] = path


def _samples_of_a_step(trainer: Run) -> dict[str, Any]:
    """The global batch, if the settings imply another: a resumed run keeps it, on any number of ranks."""
    kept, training = trainer.loader.global_batch, trainer.training
    made = training.global_batch or trainer.world.size * training.batch * training.accumulate
    return {} if kept == made else {"global_batch": kept, "accumulate": 1}


def _changed(group: Settings) -> dict[str, Any]:
    default = vars(type(group)())
    return {name: _plain(value) for name, value in vars(group).items() if value != default[name]}


def _plain(value: Any) -> Any:
    """`value` in the form that settings are read from a file; None becomes "none"."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else as_text(value)
