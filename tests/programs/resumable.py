"""A run of the trainer that can be interrupted: `resumable.py OUTPUT RANKS DROPOUT [SIGNAL MICROBATCH]`.

It goes on from the latest checkpoint in OUTPUT. With SIGKILL the last rank ends itself as it computes its MICROBATCH-th
loss, between the backwards of one step; SIGTERM it sends to the process that started the ranks. Which samples each rank
trained on, by step, is in OUTPUT/ids-RANK.jsonl; losses are in its metrics.jsonl.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from flatfsdp.trainer import FSDPArguments, Task, Trainer, TrainingArguments
from flatfsdp.trainer.callbacks import Callback, MetricsLog
from flatfsdp.trainer.launch import Placement, RankContext, run
from flatfsdp.trainer.run import StepReport

SAMPLES, EPOCHS, GLOBAL_BATCH, SAVE_EVERY = 25, 3, 6, 3


class Model(nn.Module):
    """Scores a vector for each of its four places."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Squares:
    """Squared distance to the target, over as many places as the sample has: samples weigh differently."""

    def __init__(self, signal_number: int, at: int) -> None:
        self._signal, self._at = signal_number, at

    def weight(self, batch: dict[str, Tensor]) -> int:
        return int(batch["places"].sum())

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if self._at:
            self._at -= 1
            if not self._at:
                launcher = multiprocessing.parent_process()
                to_launcher = self._signal != signal.SIGKILL and launcher is not None
                os.kill(launcher.pid if to_launcher else os.getpid(), self._signal)
        given = torch.arange(4) < batch["places"][:, None]
        return ((model(batch["x"]) - batch["y"]).square() * given).sum()


class Ids(Callback):
    """The samples on which this rank trained."""

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        with (trainer.output / f"ids-{trainer.world.rank}.jsonl").open("a") as file:
            file.write(f"{json.dumps({'step': report.step, 'ids': report.ids})}\n")


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(8, generator=generator),
            "y": torch.randn(4, generator=generator),
            "places": torch.tensor(1 + number % 4),
        }
        for number in range(SAMPLES)
    ]


def job(world: RankContext, output: str, dropout: float, signal_number: int, at: int) -> int:
    own_at = at if world.rank == world.size - 1 else 0
    trainer = Trainer(
        Task(model=partial(Model, dropout), train_data=samples(), objective=Squares(signal_number, own_at)),
        TrainingArguments(
            output=Path(output), epochs=EPOCHS, batch=1, global_batch=GLOBAL_BATCH, lr=0.03, clip=1.0, warmup=0.2,
            save_every=SAVE_EVERY, keep_last=1, resume="latest", seed=3, device="cpu",
        ),
        FSDPArguments(units="layers"),
        callbacks=[MetricsLog(), Ids()],
    )  # fmt: skip
    return trainer.train().exit_code


def main() -> int:
    output, ranks, dropout, *fault = sys.argv[1:]
    number, at = (int(getattr(signal, fault[0])), int(fault[1])) if fault else (0, 0)
    return run(job, Placement.of(int(ranks), "cpu"), output, float(dropout), number, at)


if __name__ == "__main__":
    sys.exit(main())
