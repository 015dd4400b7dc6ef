"""The checkpoints of one run, from the one that it resumes from to its last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from flatfsdp.trainer.process_group import TrainerRanks
from flatfsdp.trainer.state.checkpoints import CheckpointManager, SaveResult
from flatfsdp.trainer.state.components import Component


class SavedAdapters(NamedTuple):
    """How the checkpoints of a model with adapters are saved.

    Attributes:
        names: whether to save an entry of the model's state dict; None for all of them.
        base: the model that has the other entries.
        gather: collective; returns a function that writes the adapters as files.
    """

    names: Callable[[str], bool] | None
    base: str
    gather: Callable[[nn.Module], Callable[[Path], None]]


@dataclass(eq=False)
class RunCheckpoints:
    """The contents of a run's checkpoints, and the last one. `save` and `load` are collective.

    Attributes:
        manager: saves and finds them.
        components: the state in them except model and optimizer.
        files: writes small files next to the weights; None for none.
        adapters: where only adapters are saved: the entries to save, the model under them, and a function that gathers
            the adapters and returns one that writes them as files; None for the whole model.
        last: the last saved one, or the one that the run resumes from; None for none.
        complete_at: the step of a checkpoint that includes all metrics of that step; -1 for none.
        broken_off: whether one that was being saved when ranks were lost is not there.
    """

    manager: CheckpointManager
    components: Sequence[Component]
    files: Callable[[Path], None] | None
    adapters: SavedAdapters | None = None
    last: Path | None = None
    complete_at: int = -1
    broken_off: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether the run continues from a checkpoint in its own folder."""
        return self.last is not None and self.last.absolute().parent == self.manager.folder

    def save(
        self, step: int, *, model: nn.Module, optimizer: Optimizer, metrics: Mapping[str, float] | None
    ) -> SaveResult:
        """Save a checkpoint of `step` with its known metrics, and remove those that need not stay."""
        files, names, base = self.files, None, ""
        if self.adapters is not None:
            self.manager.finish()
            names, base, gather = self.adapters
            files = gather(model)
        saved = self.manager.save(
            step, model=model, optimizer=optimizer, components=self.components, metrics=metrics, files=files,
            names=names, base=base,
        )  # fmt: skip
        self.last, self.complete_at, self.broken_off = saved.path, step, False
        return saved

    def abandon(self) -> None:
        """Wait until a save in the background has ended, on a rank that others have left."""
        try:
            self.manager.finish()
        except RuntimeError:
            self.broken_off = True

    def agree(self, ranks: TrainerRanks) -> None:
        """Let all ranks know the last checkpoint of any, and whether a save failed on some. Collective.

        These facts do not go back with the state of the run: a save of an abandoned step may be complete on some ranks
        only, and one that joins knows none. Saves are collective, so that all ranks have to skip the same ones.
        """
        last = "" if self.last is None else str(self.last)
        found = ranks.values((self.goes_on, last, self.complete_at, self.broken_off))
        # One in the run's folder is later than the one of another folder that the run has begun with.
        _, last = max((goes_on, last) for goes_on, last, *_ in found)
        self.last = Path(last) if last else None
        self.broken_off = any(broken_off for *_, broken_off in found)
        self.complete_at = -1 if self.broken_off else max(complete_at for _, _, complete_at, _ in found)

    def load(self, path: Path, *, model: nn.Module, optimizer: Optimizer) -> None:
        """Load a checkpoint that the manager has found; the caller sets `complete_at`, once it knows the step."""
        names, base = (None, "") if self.adapters is None else self.adapters[:2]
        self.manager.load(path, model=model, optimizer=optimizer, components=self.components, names=names, base=base)
        self.last = path
