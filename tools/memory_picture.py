"""Plots the memory of each of two ranks over one step of training: `python tools/memory_picture.py [PICTURE.png]`.

A small GPT trains for three steps on two CPU ranks. Live memory is counted by torch's profiler, which sees every
allocation and release; the engine's own accounting, which is written into the profile as it changes, attributes it.
Dashed lines are the two totals that were predicted for the same run, before the run and in this process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.profiler import ProfilerActivity, profile, record_function

from flatfsdp.engine.device.memory import MemoryTracker
from flatfsdp.trainer.arguments import FSDPArguments, TrainingArguments
from flatfsdp.trainer.memory_estimate import MemoryEstimate, forecast
from flatfsdp.trainer.model.sharding import shard
from flatfsdp.trainer.optimizers import make_optimizer

RANKS, STEPS = 2, 3
VOCABULARY, WIDTH, DEPTH, HEADS, LENGTH, BATCH = 2048, 384, 6, 6, 64, 8
FSDP, TRAINING = FSDPArguments(), TrainingArguments(device="cpu")
MIB, SMALL = 2**20, 2**14

# From the bottom of the picture to its top: name, color, and the engine's books in it.
LAYERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("parameters (shards)", "#4c72b0", ("shard",)),
    ("optimizer state", "#8c8c8c", ("optimizer",)),
    ("parameters, gathered", "#64b5cd", ("unsharded", "staging", "quantized")),
    ("gradients", "#dd8452", ("arrived", "slots", "reduced", "partial", "grad")),
    ("reduction buffers", "#937860", ("exchange",)),
)
REST = "activations and temporary buffers", "#cfe3c8"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


# --- a rank's timeline ------------------------------------------------------------------------------------------------


@dataclass
class Timeline:
    """The live bytes of one rank, by layer and in total, after each change in one step.

    Attributes:
        phases: the number of changes before each phase of the step, by name.
    """

    layers: dict[str, list[int]]
    total: list[int]
    phases: dict[str, int]


@contextmanager
def books_in_the_profile() -> Iterator[dict[str, int]]:
    """Write every change of the engine's books into the profile; changes of the yielded dict go in with the next one.

    Gradient shards that the engine stores in `.grad` continue as "grad".
    """
    live: dict[str, int] = {}
    add, remove = MemoryTracker.add, MemoryTracker.remove

    def tell(kind: str, change: int) -> None:
        live[kind] = live.get(kind, 0) + change
        with record_function(f"books {json.dumps(live)}"):
            pass

    def added(ledger: MemoryTracker, kind: str, count: int) -> None:
        add(ledger, kind, count)
        tell(kind, count)

    def removed(ledger: MemoryTracker, kind: str, count: int) -> None:
        remove(ledger, kind, count)
        if kind == "reduced":
            live["grad"] = live.get("grad", 0) + count
        tell(kind, -count)

    with patch.object(MemoryTracker, "add", added), patch.object(MemoryTracker, "remove", removed):
        yield live


def train(rank: int, folder: str) -> None:
    """One rank's run; its timeline goes into `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, books_in_the_profile() as live:
        torch.manual_seed(0)
        model = shard(GPT(), FSDP, device=torch.device("cpu"))
        optimizer = make_optimizer(model, TRAINING)
        for step in range(STEPS):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
            with record_function(f"phase {step} forward"):
                loss = model(tokens)
            with record_function(f"phase {step} backward"):
                loss.backward()
            del loss
            with record_function(f"phase {step} optimizer"):
                optimizer.step()
                live["optimizer"] = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
                with record_function("books are late"):
                    optimizer.zero_grad()
                live["grad"] = 0
                with record_function(f"books {json.dumps(live)}"):
                    pass
    timeline = timeline_of(recorded, last=STEPS - 1)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(timeline.__dict__))
    dist.destroy_process_group()


def timeline_of(recorded: Any, *, last: int) -> Timeline:
    """The step `last` of a profile."""
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    phases: dict[str, int] = {}
    books: dict[str, int] = {}
    total = 0
    is_due = False  # memory was released that the books still have
    rows: list[tuple[int, dict[str, int]]] = []
    for event in events:
        name = event.name()
        if name.startswith(f"phase {last} "):
            phases[name.rpartition(" ")[2]] = len(rows)
        elif name == "books are late":
            is_due = True
        elif name == "[memory]":
            total += event.nbytes()
        elif name.startswith("books "):
            books, is_due = json.loads(name.removeprefix("books ")), False
            if rows:
                rows.pop()  # they directly follow the change that they record
        else:
            continue
        is_small = bool(rows) and rows[-1][1] is books and abs(total - rows[-1][0]) < SMALL
        if phases and not is_due and not is_small:
            rows.append((total, books))
    return Timeline(
        layers={name: [sum(books.get(kind, 0) for kind in kinds) for _, books in rows] for name, _, kinds in LAYERS},
        total=[total for total, _ in rows],
        phases=phases,
    )


# --- the picture ------------------------------------------------------------------------------------------------------


def draw(timelines: list[Timeline], predicted: MemoryEstimate, path: Path) -> None:
    """Plot both ranks, one above the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(timelines), 1, sharex=True, sharey=True, figsize=(10, 6.5), layout="constrained")
    for rank, (axis, timeline) in enumerate(zip(axes, timelines, strict=True)):
        known = [sum(row) for row in zip(*timeline.layers.values(), strict=True)]
        rest = [max(0, total - count) for total, count in zip(timeline.total, known, strict=True)]
        layers = [(name, colour, timeline.layers[name]) for name, colour, _ in LAYERS if any(timeline.layers[name])]
        names, colours, rows = zip(*layers, (*REST, rest), strict=True)
        areas = [[count / MIB for count in row] for row in rows]
        axis.stackplot(range(len(rest)), areas, labels=names, colors=colours, linewidth=0, step="post")
        for words, count in (
            ("memory between steps", predicted.plan.between_steps),
            ("peak without activations", predicted.plan.peak),
        ):
            axis.axhline(count / MIB, color="black", linestyle="--", linewidth=1)
            axis.annotate(
                f"predicted {words}: {count / MIB:.1f} MiB",
                (0.995, count / MIB),
                xycoords=("axes fraction", "data"),
                xytext=(0, 2),
                textcoords="offset points",
                ha="right",
                fontsize=8,
            )
        for name, moment in timeline.phases.items():
            axis.axvline(moment, color="white", linewidth=1)
            axis.annotate(
                name,
                (moment, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -11),
                textcoords="offset points",
                fontsize=9,
            )
        axis.set_ylabel(f"rank {rank}: MiB")
        axis.margins(x=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("one training step: allocations and releases, in order")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(
        f"Memory of each rank: GPT with {sum(u.parameters for u in predicted.plan.units) / 1e6:.1f}M parameters, "
        f"FULL_SHARD on {RANKS} ranks, AdamW",
        fontsize=11,
    )
    figure.savefig(path, dpi=100)


def main() -> None:
    """Predict, train, compare, plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = Path(__file__).with_suffix(".png")
    parser.add_argument("picture", type=Path, nargs="?", default=own, help=f"the image file to write (default: {own})")
    path: Path = parser.parse_args().picture
    predicted = forecast(GPT, fsdp=FSDP, training=TRAINING, ranks=RANKS)
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, (folder,), nprocs=RANKS)
        timelines = [Timeline(**json.loads((Path(folder) / f"{rank}.json").read_text())) for rank in range(RANKS)]
    for rank, timeline in enumerate(timelines):
        held = [sum(row) for row in zip(*timeline.layers.values(), strict=True)]
        lowest = min(total - known for total, known in zip(timeline.total, held, strict=True))
        print(
            f"rank {rank}: {max(held):,} bytes at the peak without activations, {predicted.plan.peak:,} predicted; "
            f"{held[-1]:,} between steps, {predicted.plan.between_steps:,} predicted; "
            f"{max(timeline.total):,} with activations; the rest is at least {lowest:,}"
        )
    draw(timelines, predicted, path)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
