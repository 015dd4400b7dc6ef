"""The output folder of a run: which run it holds, and the folder of the next one."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.arguments import TrainingArguments
from flatfsdp.trainer.process_group import TrainerRanks

METRICS = "metrics.jsonl"
DEFAULT = Path("train-out")


def run_in(folder: Path) -> str:
    """The last checkpoint of the run in `folder`, or its log if it has none; "" where there is no run."""
    steps = sorted(each.name for each in folder.glob("step-*"))
    return steps[-1] if steps else METRICS * (folder / METRICS).exists()


def unused(folder: Path) -> Path:
    """`folder`, or if it holds a run, the first of `folder-2`, `folder-3`, ... that holds none."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in range(2, 10_000))
    return next(each for each in chain([folder], numbered) if not run_in(each))


def with_folder(training: TrainingArguments) -> TrainingArguments:
    """`training`, where a new run goes to the default folder and that holds a run: in the first numbered one that
    holds none. Nodes with disks of their own may see other folders in use: all take rank 0's. Collective."""
    if training.resume is not None or training.output != DEFAULT:
        return training
    chosen = TrainerRanks().values(str(unused(training.output)))[0]
    return replace(training, output=Path(chosen)) if chosen != str(training.output) else training


def begins(training: TrainingArguments) -> bool:
    """Whether a run would begin in its folder: it resumes from nothing, or from a path elsewhere. (A job that its
    scheduler restarts would go back to such a path each time.)"""
    given = training.resume
    if given in (None, "latest", "best"):
        return given is None
    return Path(str(given)).absolute().parent != training.output.absolute()


def refuse_run_in(training: TrainingArguments, found: str) -> None:
    """Raise for a folder that holds the run `found`, as of `run_in`, where another one is to begin.

    Raises:
        ConfigValueError: with the remedies.
    """
    if not found or not begins(training):
        return
    what = "a run that saved no checkpoint" if found == METRICS else f"a run, whose last checkpoint is {found}"
    raise ConfigValueError(
        f"output: {training.output} holds {what}. Pass resume='latest' to continue that run, or choose another folder"
    )
