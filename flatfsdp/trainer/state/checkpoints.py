"""The checkpoints of a run: one folder each, saved while training goes on, found and loaded again.

[Note: folders of a run] `OUTPUT/step-00001000/` appears atomically, when it is complete. It is a checkpoint of
flatfsdp, which any number of ranks can load, and a folder for Hugging Face: `model.safetensors` with the files of
`files`. `components.json` shows human readers which rank wrote which part. A run that resumes from an earlier
checkpoint, and so begins a branch, moves the later ones to `OUTPUT/aside-1/`: steps with the same numbers will follow.
"""

from __future__ import annotations

import glob
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flatfsdp import checkpoint
from flatfsdp.checkpoint import Keeping, Listed, Saving
from flatfsdp.errors import CheckpointError, few, refuse_value
from flatfsdp.trainer.model.fronts import load_whole_state, whole_state
from flatfsdp.trainer.process_group import TrainerRanks
from flatfsdp.trainer.state.components import Component, choose, give, take

__all__ = ["CheckpointManager", "LoadResult", "SaveResult"]

NAMED = "step-*"
ASIDE = "aside-{}"
COMPONENTS = "components.json"
WHOLE = "pytorch_model.bin"
FORMATS = ("safetensors", "torch")
logger = logging.getLogger("flatfsdp")


@dataclass(frozen=True)
class SaveResult:
    """A save that has begun or ended.

    Attributes:
        path: the folder of the checkpoint.
        stall_seconds: how long training was stopped for it; with ``asynchronous``, for the copy to host memory, and for
            an earlier save that had not ended.
    """

    path: Path
    stall_seconds: float


@dataclass(frozen=True)
class LoadResult:
    """The result of a load.

    Attributes:
        path: the folder that was loaded.
        step: the step after which it was saved; None where no manager saved it.
        world: how many ranks saved it; None as above.
        notes: sentences for the log: the parts of the state that start anew, and how.
    """

    path: Path
    step: int | None
    world: int | None
    notes: tuple[str, ...]


class CheckpointManager:
    """Saves the checkpoints of a run, keeps the last and the best, finds and loads them. Its methods are collective.

    Args:
        folder: contains one folder for each checkpoint; made at the first save.
        keep_last: how many of the last saved checkpoints stay; None for all. Others go when a new one is complete.
        keep_best: how many of those with the best metric `best_by` stay in addition.
        best_by: the name of a metric that is given to `save`.
        best_mode: "min" if smaller is better, "max" if larger is.
        asynchronous: a thread writes, from copies in host memory, while training goes on.
        format: "safetensors": the model is in ``model.safetensors``, each rank writing its own elements. "torch": it
            is in flatfsdp's own format, and also, unsharded, in ``pytorch_model.bin``; for that, rank 0 has all of it
            in host memory during the save.
        per_node: for nodes that share no file system: each has the folder, with the state of its own ranks
            (``pytorch_model.bin`` is on the node of rank 0).
        process_group: the ranks of the run; None for all.

    Raises:
        ConfigValueError: a format or numbers that are not accepted.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = 2,
        keep_best: int = 0,
        best_by: str = "eval_loss",
        best_mode: str = "min",
        asynchronous: bool = True,
        format: str = "safetensors",
        per_node: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if format not in FORMATS:
            refuse_value("format", format, " or ".join(map(repr, FORMATS)))
        self.folder = Path(os.path.abspath(folder))
        self._keeping = None
        if keep_last is not None:
            by = best_by if keep_best else None
            self._keeping = Keeping(last=keep_last, best=keep_best, by=by, mode=best_mode, named=NAMED, unfinished=True)
        self._best_by, self._best_mode = best_by, best_mode
        self._asynchronous, self._format, self._per_node = asynchronous, format, per_node
        self._ranks = TrainerRanks(process_group)
        self._saving: Saving | None = None

    # --- save ---------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        components: Sequence[Component] = (),
        metrics: Mapping[str, float] | None = None,
        files: Callable[[Path], None] | None = None,
        names: Callable[[str], bool] | None = None,
        base: str = "",
    ) -> SaveResult:
        """Save ``step-<step>``; an existing one is replaced when the new one is complete.

        Args:
            step: the number of steps that the run has taken.
            model, optimizer: the trained objects.
            components: the rest of the run's state. Their state is taken before this returns.
            metrics: metrics of this checkpoint, by which the best are chosen.
            files: writes small files next to the weights, as for `flatfsdp.checkpoint.save`; called in a thread for an
                asynchronous save.
            names: the entries of the model's state dict to save; None for all.
            base: the model that has the other entries, for the error of a load without it.

        Raises:
            CheckpointError: on every rank: this save, or the earlier one in the background, failed; older checkpoints
                still exist. After an error of the earlier save, nothing of this one has been done: call again.
            AgreementError: on every rank: ranks differ in the components that they have.
        """
        start = time.monotonic()
        self.finish()
        states, table = take(components, self._ranks)
        described = {"step": step, "world": self._ranks.world, "components": table} | ({"base": base} if base else {})
        # The table in a tuple is one value, instead of one for each of its leaves.
        extra = {"trainer": described | {"components": (table,)}} | ({"components": states} if states else {})
        save = checkpoint.async_save if self._asynchronous else checkpoint.save
        path = self.folder / f"step-{step:08}"
        self._saving = save(
            path,
            model=model,
            optimizer=optimizer,
            extra=extra,
            overwrite=True,
            per_node=self._per_node,
            metrics=metrics,
            model_format="safetensors" if self._format == "safetensors" and names is None else "flatfsdp",
            files=self._beside(None if names is not None else model, described, files),
            names=names,
            keeping=self._keeping,
            process_group=self._ranks.group,
        )
        return SaveResult(path, time.monotonic() - start)

    def finish(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: on every rank: it failed; raised once.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _beside(
        self, model: nn.Module | None, described: Mapping[str, Any], files: Callable[[Path], None] | None
    ) -> Callable[[Path], None]:
        whole = _whole(model, self._ranks) if self._format == "torch" and model is not None else {}
        text = json.dumps(described, indent=1).encode() + b"\n"

        def write(folder: Path) -> None:
            (folder / COMPONENTS).write_bytes(text)
            if whole:
                torch.save(whole, folder / WHOLE)
            if files is not None:
                files(folder)

        return write

    # --- find ---------------------------------------------------------------------------------------------------------

    def find(self, which: str | os.PathLike[str]) -> Path | None:
        """The folder to load: the same on all ranks.

        Leftovers of saves that did not end, and damaged checkpoints, are skipped, with a warning.

        Args:
            which: "latest" (saved last), "best" (by the metric that decides which checkpoints stay), or the path of a
                checkpoint, or of a folder with weights in the format of Hugging Face.

        Returns:
            None for "latest" or "best" where no checkpoint has ever been complete.

        Raises:
            CheckpointError: on every rank, with a list of the checkpoints: no such one, or none that is complete.
        """
        self.finish()
        if which not in ("latest", "best"):
            return self._at(Path(os.path.abspath(which)))
        there = self._listing(self.folder, NAMED)
        whole = [each for each in there if not each.problem]
        damaged = [each for each in there if each.problem and not each.unfinished]
        if not whole and damaged:
            raise CheckpointError(f"no checkpoint in {self.folder} is intact: {_listed(damaged)}")
        for each in there:
            if each.problem:
                self._ranks.warn(f"skipping {each.path}: {each.problem}")
        if which == "latest" or not whole:
            return whole[-1].path if whole else None
        sign = -1.0 if self._best_mode == "max" else 1.0
        values = {each.path: sign * each.metrics.get(self._best_by, math.nan) for each in reversed(whole)}
        measured = [path for path, value in values.items() if not math.isnan(value)]
        if not measured:
            raise CheckpointError(
                f"no checkpoint in {self.folder} has the metric {self._best_by!r}, which determines the best: "
                f"{_listed(whole)}"
            )
        return min(measured, key=values.__getitem__)  # of equal ones, the later

    def _listing(self, folder: Path, named: str = "*") -> list[Listed]:
        return checkpoint.listing(folder, named=named, process_group=self._ranks.group)

    def _at(self, path: Path) -> Path:
        for each in self._listing(path.parent, glob.escape(path.name)):
            if each.problem:
                raise CheckpointError(f"{path} cannot be loaded: {each.problem}{self._another_than(path)}")
            return path
        if all(self._ranks.collective_call(f"looking for {path}", lambda: bool(_weights_in(path)))):
            return path
        inside, beside = self._listing(path), self._listing(path.parent)
        around = f"it contains {_listed(inside)}" if inside else f"next to it are {_listed(beside)}" if beside else ""
        raise CheckpointError(
            f"{path} is neither a checkpoint nor a folder with *.safetensors or {WHOLE}, on all ranks"
            f"{'; ' * bool(around)}{around}"
        )

    def _another_than(self, path: Path) -> str:
        """The end of an error about a checkpoint: if that is damaged, the newest good one beside it."""
        if self._is_good(path):  # it does not fit the model
            return ""
        others = [each.path for each in self._listing(path.parent, NAMED) if not each.problem and each.path != path]
        good = next((each for each in reversed(others) if self._is_good(each)), None)
        return f". The newest good checkpoint is {good}: pass resume={str(good)!r}" if good is not None else ""

    def _is_good(self, path: Path) -> bool:
        """Whether all files are there and have their checksums."""
        if any(each.problem for each in self._listing(path.parent, glob.escape(path.name))):
            return False
        try:
            checkpoint.load(path, extra=lambda keys: False, process_group=self._ranks.group)
        except CheckpointError:
            return False
        return True

    def set_aside(self, path: Path) -> Path | None:
        """Move the checkpoints that were saved after `path`, one of this run, into a folder `aside-<number>`.

        Afterwards, a run that resumes from `path` finds only its own checkpoints in its folder, as the latest and as
        the best. If `path` is the last one, or lies elsewhere, nothing is moved.

        Returns:
            The folder where they are now; None where nothing was moved.

        Raises:
            CheckpointError: on every rank: the disk reported an error, or another job is saving to one of them.
        """
        self.finish()
        there = [each.path for each in self._listing(self.folder, NAMED)]
        real = os.path.realpath(path)  # a link to a checkpoint of this run counts as that one
        number = next((place for place, each in enumerate(there) if os.path.realpath(each) == real), len(there))
        later = there[number + 1 :]
        if not later:
            return None
        path = Path(real)
        doing = f"setting aside the checkpoints saved after {path}"
        taken = {
            name for names in self._ranks.collective_call(doing, lambda: os.listdir(self.folder)) for name in names
        }
        aside = self.folder / next(name for number in count(1) if (name := ASIDE.format(number)) not in taken)

        def move() -> None:
            if self._ranks.rank != 0 and not self._per_node:
                return
            try:
                aside.mkdir()
            except FileExistsError:  # another rank of this node has moved them
                return
            try:
                with checkpoint.locked(*later):
                    for each in later:
                        each.rename(aside / each.name)
            except CheckpointError:  # nothing has been moved
                aside.rmdir()
                raise

        self._ranks.collective_call(doing, move)
        self._ranks.warn(
            f"this run resumes from {path.name}; later checkpoints ({few([each.name for each in later])}) have been "
            f"moved to {aside}"
        )
        return aside

    # --- load ---------------------------------------------------------------------------------------------------------

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        components: Sequence[Component] = (),
        names: Callable[[str], bool] | None = None,
        base: str = "",
    ) -> LoadResult:
        """Load a result of `find`. From a folder with weights, only these: all other state starts anew.

        Args:
            path: the checkpoint, or the folder with weights.
            model, optimizer, components: the objects to load into.
            names, base: as at the save; of use only for a checkpoint that was saved with them. The other entries of the
                model, which it does not hold, have to be loaded already.

        Raises:
            CheckpointError: on every rank: required components are missing (all are named), or it is damaged, or does
                not fit. Nothing has been loaded then, unless files could not be read, or a component raised.
            AgreementError: on every rank: ranks have other components.
        """
        self.finish()
        where = Path(os.path.abspath(path))
        if not self._listing(where.parent, glob.escape(where.name)):
            return self._load_weights(where, model)
        group = self._ranks.group
        head = checkpoint.load(where, verify=False, extra=lambda keys: keys[:1] == ("trainer",), process_group=group)
        trainer: dict[str, Any] = (head or {}).get("trainer", {})  # empty where `checkpoint.save` was called directly
        step, world = trainer.get("step"), trainer.get("world")
        (table,) = trainer.get("components", ({},))
        try:
            parts, warnings = choose(table, world, components, self._ranks)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        for problem in warnings:
            self._ranks.warn(f"{where}: {problem}")

        def wanted(keys: tuple[str | int, ...]) -> bool:
            name, part = keys[1:3] if len(keys) > 2 else ("", "")
            return keys[:1] == ("components",) and parts.get(str(name)) == part

        saved_over = str(trainer.get("base", ""))
        if saved_over and names is None:
            raise CheckpointError(
                f"{where} holds only the adapters of {saved_over}: resume with that model and lora=, or load its "
                "adapter files with PEFT"
            )
        if saved_over not in ("", base):
            self._ranks.warn(f"{where} holds adapters of {saved_over}; they are now applied to {base}")
        selected = names if saved_over else None
        try:
            extra = checkpoint.load(
                where, model=model, optimizer=optimizer, extra=wanted, names=selected, process_group=group
            )
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self._another_than(where)}") from None
        states = (extra or {}).get("components", {})
        notes = self._ranks.collective_call(f"loading {where}", lambda: give(components, parts, states, step=step or 0))
        return self._loaded(where, step, world, [*warnings, *notes[self._ranks.rank]])

    def _load_weights(self, path: Path, model: nn.Module) -> LoadResult:
        found = self._ranks.collective_call(f"loading {path}", lambda: _weights_in(path))
        if not all(found):
            self._at(path)  # raises, with a list of the checkpoints
        if found[0].startswith(WHOLE):
            _load_whole(model, path, self._ranks)
        else:
            checkpoint.load_safetensors(model, path, process_group=self._ranks.group)
        note = f"{path} holds only weights: optimizer, schedule, data position and random numbers start over"
        return self._loaded(path, None, None, [note])

    def _loaded(self, path: Path, step: int | None, world: int | None, notes: list[str]) -> LoadResult:
        for note in notes:
            logger.info(note)
        return LoadResult(path, step, world, tuple(notes))


def _listed(there: Sequence[Listed]) -> str:
    """A list of checkpoints for messages."""
    return few([f"{each.path.name}{f' ({each.problem})' * bool(each.problem)}" for each in reversed(there)])


# --- whole weights ----------------------------------------------------------------------------------------------------


def _whole(model: nn.Module, ranks: TrainerRanks) -> dict[str, torch.Tensor]:
    """The unsharded state dict in separate host memory, on rank 0; empty on the others. Collective."""
    return {key.replace("_orig_mod.", ""): value for key, value in whole_state(model, ranks).items()}


def _load_whole(model: nn.Module, folder: Path, ranks: TrainerRanks) -> None:
    """Load ``pytorch_model.bin``, which rank 0 reads. Collective."""

    def read() -> dict[str, torch.Tensor]:
        if ranks.rank != 0:
            return {}
        index = folder / f"{WHOLE}.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [WHOLE]
        found: dict[str, torch.Tensor] = {}
        for name in names:
            found |= torch.load(folder / name, map_location="cpu", weights_only=True)
        return found

    state: dict[str, torch.Tensor] = {}
    doing = f"loading {folder}"
    ranks.collective_call(doing, lambda: state.update(read()))
    load_whole_state(model, state, ranks, doing=doing)


def _weights_in(folder: Path) -> str:
    """The name of a file with weights, or of an index of such; "" where there is none."""
    patterns = ("*.safetensors", "*.safetensors.index.json", WHOLE, f"{WHOLE}.index.json")
    return next((found.name for pattern in patterns for found in sorted(folder.glob(pattern))), "")
