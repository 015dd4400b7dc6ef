"""Reports of a step, and of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatfsdp import Stats
from flatfsdp.trainer.preemption import ASKED
from flatfsdp.trainer.terminal import sizes_in_words


@dataclass(frozen=True)
class MemoryFootprint:
    """Bytes of one rank: what it holds between steps, and the most that was unsharded at one time."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    in_flight: int = 0

    @classmethod
    def measure(cls, stats: Stats, optimizer: torch.optim.Optimizer) -> MemoryFootprint:
        """Read `flatfsdp.stats` and the optimizer's tensors; call it while the gradients of a step are there."""
        tensors = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
        return cls(
            parameters=stats.bytes_params,
            gradients=stats.bytes_grads,
            optimizer=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            in_flight=stats.bytes_unsharded_peak,
        )

    def __str__(self) -> str:
        sizes = sizes_in_words(self.parameters, self.gradients, self.optimizer, self.in_flight).split(", ")
        names = ("params", "grads", "optim", "unsharded")
        return ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))


@dataclass(frozen=True)
class StepReport:
    """One step.

    Attributes:
        step: its number, from 1.
        loss: mean over the tokens of all ranks.
        tokens: their number: what the objective weighs, tokens, samples or whatever it counts.
        total_tokens: of all steps until this one, those before the run was resumed included.
        lr: learning rate of the optimizer's first group in this step.
        grad_norm: over all ranks, before clipping; None without clipping.
        seconds: of training until this step, by rank 0's clock, those before the run was resumed included.
        tokens_per_second: since the run was started or resumed.
        peak_bytes: of the rank that has held most: by the device's allocator, or of a CPU the process' largest resident
            set.
        done: the share of the run that is over, 0 to 1.
        footprint: this rank's bytes, as its third step showed them, or an earlier one until then.
        ids: the samples that this rank has trained on in the step.
    """

    step: int
    loss: float
    tokens: int
    total_tokens: int
    lr: float
    grad_norm: float | None
    seconds: float
    tokens_per_second: float
    peak_bytes: int
    done: float
    footprint: MemoryFootprint
    ids: tuple[int, ...]

    def row(self) -> dict[str, Any]:
        """What a log has of it."""
        rounded = {"seconds": round(self.seconds, 3), "tokens_per_second": round(self.tokens_per_second, 1)}
        left_out = ("done", "footprint", "ids", *(("grad_norm",) if self.grad_norm is None else ()))
        return {name: value for name, value in (vars(self) | rounded).items() if name not in left_out}


@dataclass
class Progress:
    """How far a run is; the same on all ranks.

    Attributes:
        step: steps taken.
        tokens: trained on, as the objective counts, up to the last step whose numbers have arrived.
        seconds: of training, by rank 0's clock, up to the same.
        evaluated: after which step the last evaluation was; -1 for none.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    evaluated: int = -1

    def copy(self) -> Progress:
        return Progress(**vars(self))

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


@dataclass(frozen=True)
class TrainingResult:
    """A run that ended.

    Attributes:
        steps: taken in all, those before the run was resumed included.
        tokens, seconds: the same.
        taken: steps that this run took.
        tokens_per_second: of them.
        losses: of the first and the last of them; empty where there was none.
        evaluation: the last one's metrics.
        stopped_by: 0 for the end that was planned, `preemption.ASKED`, or a signal's number.
        ended_by: what ended it, in words: its steps, the data, the clock, or who stopped it.
        checkpoint: the one saved last, by this run or the one that it goes on from.
        footprint: this rank's bytes.
        communication: kind of collective to (calls, bytes) of this rank in one of the steps that it took.
    """

    steps: int
    tokens: int
    seconds: float
    taken: int
    tokens_per_second: float
    losses: tuple[float, ...]
    stopped_by: int
    checkpoint: Path | None
    footprint: MemoryFootprint
    ended_by: str = ""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    communication: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """What a program exits with: 0, or 128 and the number of the signal that ended the run before its time."""
        return 128 + self.stopped_by if self.stopped_by > ASKED else 0
