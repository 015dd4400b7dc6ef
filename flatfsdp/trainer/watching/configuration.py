"""The settings that a run came to, in its folder: a file that another run can be started from."""

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
    """Writes `config.json` into the run's folder when it begins, by rank 0: `--config OUTPUT/config.json` starts the
    same run anew.

    Args:
        groups: the settings, by the name of their table; what has its default is left out.
    """

    def __init__(self, groups: Mapping[str, Settings]) -> None:
        self._tables = {name: table for name, group in groups.items() if (table := _changed(group))}

    def on_begin(self, trainer: Run) -> None:
        if trainer.world.leads:
            keep_earlier(trainer, CONFIGURATION)
            path = trainer.output / CONFIGURATION
            tables = {**self._tables, "training": self._tables.get("training", {}) | _samples_of_a_step(trainer)}
            path.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
            trainer.written["settings"] = path


def _samples_of_a_step(trainer: Run) -> dict[str, int]:
    """A run that is resumed keeps its samples of a step, also on other ranks: how many, if the settings make others."""
    kept, training = trainer.loader.global_batch, trainer.training
    made = training.global_batch or trainer.world.size * training.batch * training.accumulate
    return {} if kept == made else {"global_batch": kept, "accumulate": 1}


def _changed(group: Settings) -> dict[str, Any]:
    default = vars(type(group)())
    return {name: _plain(value) for name, value in vars(group).items() if value != default[name]}


def _plain(value: Any) -> Any:
    """`value` as the settings read it from a file; None is written "none"."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else as_text(value)
