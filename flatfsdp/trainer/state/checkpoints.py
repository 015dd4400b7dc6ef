"""The checkpoints of a run: one folder each, saved beside the training, found and loaded again.

[Note: folders of a run] `OUTPUT/step-00001000/` appears at once and complete. It is a checkpoint of flatfsdp's, which
any number of ranks loads, and a folder of Hugging Face's: `model.safetensors` with what `files` puts beside it.
`components.json` shows people who wrote what. A run that goes on from another one than the last, and so begins a
branch, finds the later ones in `OUTPUT/aside-1/`: steps of the same numbers are to come.
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
    """A save that began, or ended.

    Attributes:
        path: the folder of the checkpoint.
        stall_seconds: for how long training stood still for it, which with ``asynchronous`` is the copying to host
            memory, and the waiting for the save before where that has not ended.
    """

    path: Path
    stall_seconds: float


@dataclass(frozen=True)
class LoadResult:
    """What came back.

    Attributes:
        path: from where.
        step: the step after which it was saved; None where no manager saved it.
        world: how many ranks saved it; None as above.
        notes: sentences for the log: what begins anew, and how.
    """

    path: Path
    step: int | None
    world: int | None
    notes: tuple[str, ...]


class CheckpointManager:
    """Saves the checkpoints of a run, keeps the last and the best, finds and loads them. Its methods are collective.

    Args:
        folder: in which there is one folder for each checkpoint; made at the first save.
        keep_last: how many of the checkpoints saved last stay; None for all. Others go when a new one is complete.
        keep_best: how many of those stay besides whose metric `best_by` is best.
        best_by: the name of a metric that is given to `save`.
        best_mode: "min" if smaller is better, "max" if larger is.
        asynchronous: a thread writes, from copies in host memory, while training goes on.
        format: "safetensors": the model is in ``model.safetensors``, each rank writing its own elements. "torch": it
            is in flatfsdp's own format, and besides, whole, in ``pytorch_model.bin``, for which rank 0 has all of it
            in host memory during the save.
        per_node: for nodes that share no file system: each has the folder, with what its own ranks hold
            (``pytorch_model.bin`` is on that of rank 0).
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
    ) -> SaveResult:
        """Save ``step-<step>``; one of that name is replaced when the new one is complete.

        Args:
            step: how many steps the run has made.
            model, optimizer: what is trained.
            components: the rest of the run's state. What depends on them is taken before this returns.
            metrics: numbers of this checkpoint, by which the best are known.
            files: puts small files beside the weights, as for `flatfsdp.checkpoint.save`; called in a thread where
                saving is asynchronous.

        Raises:
            CheckpointError: on every rank: this save, or the one before it in the background, failed; checkpoints
                from before are there. After an error of the save before, nothing of this one has been done: call again.
            AgreementError: on every rank: ranks differ in components that they have in common.
        """
        start = time.monotonic()
        self.finish()
        states, table = take(components, self._ranks)
        described = {"step": step, "world": self._ranks.world, "components": table}
        # The table in a tuple: one value, not one for each of its leaves.
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
            model_format="safetensors" if self._format == "safetensors" else "flatfsdp",
            files=self._beside(model, described, files),
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
        self, model: nn.Module, described: Mapping[str, Any], files: Callable[[Path], None] | None
    ) -> Callable[[Path], None]:
        whole = _whole(model, self._ranks) if self._format == "torch" else {}
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

        What saves have left that did not end is passed over, with a warning; so are damaged checkpoints.

        Args:
            which: "latest" (saved last), "best" (by the metric that checkpoints are kept by), or a path: of a
                checkpoint, or of a folder with weights as Hugging Face has them.

        Returns:
            None where "latest" or "best" is asked for and no checkpoint has ever been complete.

        Raises:
            CheckpointError: on every rank, with what there is: no such checkpoint, or none that is whole.
        """
        self.finish()
        if which not in ("latest", "best"):
            return self._at(Path(os.path.abspath(which)))
        there = self._listing(self.folder, NAMED)
        whole = [each for each in there if not each.problem]
        damaged = [each for each in there if each.problem and not each.unfinished]
        if not whole and damaged:
            raise CheckpointError(f"no checkpoint of {self.folder} is whole: {_listed(damaged)}")
        for each in there:
            if each.problem:
                self._ranks.warn(f"{each.path} is passed over: {each.problem}")
        if which == "latest" or not whole:
            return whole[-1].path if whole else None
        sign = -1.0 if self._best_mode == "max" else 1.0
        values = {each.path: sign * each.metrics.get(self._best_by, math.nan) for each in reversed(whole)}
        measured = [path for path, value in values.items() if not math.isnan(value)]
        if not measured:
            raise CheckpointError(
                f"no checkpoint of {self.folder} has the metric {self._best_by!r}, by which the best is to be found: "
                f"{_listed(whole)}"
            )
        return min(measured, key=values.__getitem__)  # of equal ones the later

    def _listing(self, folder: Path, named: str = "*") -> list[Listed]:
        return checkpoint.listing(folder, named=named, process_group=self._ranks.group)

    def _at(self, path: Path) -> Path:
        for each in self._listing(path.parent, glob.escape(path.name)):
            if each.problem:
                raise CheckpointError(f"{path} cannot be loaded: {each.problem}")
            return path
        if all(self._ranks.collective_call(f"looking for {path}", lambda: bool(_weights_in(path)))):
            return path
        inside, beside = self._listing(path), self._listing(path.parent)
        around = f"in it are {_listed(inside)}" if inside else f"beside it are {_listed(beside)}" if beside else ""
        raise CheckpointError(
            f"{path} is neither a checkpoint nor a folder with *.safetensors or {WHOLE}, on all ranks"
            f"{'; ' * bool(around)}{around}"
        )

    def set_aside(self, path: Path) -> Path | None:
        """Move the checkpoints that were saved after `path`, one of this run's, into a folder `aside-<number>`.

        Of a run that goes on from `path`, all that is found and kept in its folder is its own then: what is latest is
        its last, and no other is the best. Where it is the last one, or lies elsewhere, nothing is moved.

        Returns:
            The folder where they are now; None where nothing was moved.

        Raises:
            CheckpointError: on every rank: the disk refused, or another job is saving to one of them.
        """
        self.finish()
        there = [each.path for each in self._listing(self.folder, NAMED)]
        real = os.path.realpath(path)  # a link to one of this run's is that one
        number = next((place for place, each in enumerate(there) if os.path.realpath(each) == real), len(there))
        later = there[number + 1 :]
        if not later:
            return None
        path = Path(real)
        doing = f"setting aside what was saved after {path}"
        taken = {
            name for names in self._ranks.collective_call(doing, lambda: os.listdir(self.folder)) for name in names
        }
        aside = self.folder / next(name for number in count(1) if (name := ASIDE.format(number)) not in taken)

        def move() -> None:
            if self._ranks.rank != 0 and not self._per_node:
                return
            try:
                aside.mkdir()
            except FileExistsError:  # another rank of this node moves them
                return
            try:
                with checkpoint.locked(*later):
                    for each in later:
                        each.rename(aside / each.name)
            except CheckpointError:  # none has been moved
                aside.rmdir()
                raise

        self._ranks.collective_call(doing, move)
        self._ranks.warn(
            f"this run resumes from {path.name}; what was saved after it, {few([each.name for each in later])}, is in "
            f"{aside} now"
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
    ) -> LoadResult:
        """Load what `find` has found. Of a folder with weights only the weights: everything else begins anew.

        Raises:
            CheckpointError: on every rank: required components are missing (all are named), or it is damaged, or does
                not fit. Nothing has been loaded then, unless files could not be read, or a component refused its state.
            AgreementError: on every rank: ranks have other components.
        """
        self.finish()
        where = Path(os.path.abspath(path))
        if not self._listing(where.parent, glob.escape(where.name)):
            return self._load_weights(where, model)
        group = self._ranks.group
        head = checkpoint.load(where, verify=False, extra=lambda keys: keys[:1] == ("trainer",), process_group=group)
        trainer: dict[str, Any] = (head or {}).get("trainer", {})  # empty: `checkpoint.save` wrote it, without one
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

        extra = checkpoint.load(where, model=model, optimizer=optimizer, extra=wanted, process_group=group)
        states = (extra or {}).get("components", {})
        notes = self._ranks.collective_call(f"loading {where}", lambda: give(components, parts, states, step=step or 0))
        return self._loaded(where, step, world, [*warnings, *notes[self._ranks.rank]])

    def _load_weights(self, path: Path, model: nn.Module) -> LoadResult:
        found = self._ranks.collective_call(f"loading {path}", lambda: _weights_in(path))
        if not all(found):
            self._at(path)  # raises, with what is there
        if found[0].startswith(WHOLE):
            _load_whole(model, path, self._ranks)
        else:
            checkpoint.load_safetensors(model, path, process_group=self._ranks.group)
        note = f"{path} holds weights only: optimizer, schedule, data and random numbers start over"
        return self._loaded(path, None, None, [note])

    def _loaded(self, path: Path, step: int | None, world: int | None, notes: list[str]) -> LoadResult:
        for note in notes:
            logger.info(note)
        return LoadResult(path, step, world, tuple(notes))


def _listed(there: Sequence[Listed]) -> str:
    """What there is, in words."""
    return few([f"{each.path.name}{f' ({each.problem})' * bool(each.problem)}" for each in reversed(there)])


# --- whole weights ----------------------------------------------------------------------------------------------------


def _whole(model: nn.Module, ranks: TrainerRanks) -> dict[str, torch.Tensor]:
    """The model's state dict in host memory of its own, on rank 0; on the others nothing. Collective."""
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
    """The name of a file with weights, or of an index of such; empty where there is none."""
    patterns = ("*.safetensors", "*.safetensors.index.json", WHOLE, f"{WHOLE}.index.json")
    return next((found.name for pattern in patterns for found in sorted(folder.glob(pattern))), "")
