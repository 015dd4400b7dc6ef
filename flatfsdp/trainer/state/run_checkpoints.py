"""The checkpoints of one run, from the one that it goes on from to its last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from flatfsdp.trainer.state.checkpoints import CheckpointManager, SaveResult
from flatfsdp.trainer.state.components import Component


@dataclass(eq=False)
class RunCheckpoints:
    """What the checkpoints of a run hold, and which is its last. `save` and `load` are collective.

    Attributes:
        manager: saves and finds them.
        components: what they hold besides model and optimizer.
        files: writes small files beside the weights; None for none.
        last: saved last, or the one that the run goes on from; None for none.
        complete_at: the step of a checkpoint that has all that is known after it; -1 for none.
    """

    manager: CheckpointManager
    components: Sequence[Component]
    files: Callable[[Path], None] | None
    last: Path | None = None
    complete_at: int = -1

    @property
    def goes_on(self) -> bool:
        """Whether the run continues one of its own folder."""
        return self.last is not None and self.last.absolute().parent == self.manager.folder

    def save(
        self, step: int, *, model: nn.Module, optimizer: Optimizer, metrics: Mapping[str, float] | None
    ) -> SaveResult:
        """Save a checkpoint of `step`, with the metrics known of it, and remove those that need not stay."""
        saved = self.manager.save(
            step, model=model, optimizer=optimizer, components=self.components, metrics=metrics, files=self.files
        )
        self.last, self.complete_at = saved.path, step
        return saved

    def load(self, path: Path, *, model: nn.Module, optimizer: Optimizer) -> None:
        """Load what the manager has found; `complete_at` is for who knows the step then."""
        self.manager.load(path, model=model, optimizer=optimizer, components=self.components)
        self.last = path
