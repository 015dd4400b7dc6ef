"""The host cost of saving a 70B model with Adam at 1024 ranks, computed without ranks: boxes, bytes, seconds.

`python tools/checkpoint_scale.py [--world N] [--layers N]`: layouts are flatfsdp's for Llama 3 70B, with one unit per
layer; plans, `.metadata` and the manifest are made by the functions that `flatfsdp.checkpoint.save` calls, without
tensors.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flatfsdp.checkpoint import metadata
from flatfsdp.checkpoint.intervals import LARGEST, cut
from flatfsdp.checkpoint.manifest import Manifest, SavedFile
from flatfsdp.checkpoint.plan import PlannedInterval, assign, digest
from flatfsdp.checkpoint.saving import tensors_of_files
from flatfsdp.checkpoint.validation import prove
from flatfsdp.checkpoint.writing import ArchivedChunk, Archives
from flatfsdp.engine.layout.layout import FlatLayout, ParamSpec, Span

MIB = 2**20
WIDTH, KEYS, HIDDEN, WORDS = 8192, 1024, 28672, 128256
STATES = (("model",), ("optimizer", "exp_avg"), ("optimizer", "exp_avg_sq"))
FRAME = 704, 1577  # bytes of an archive before its elements, and in total without them

T = TypeVar("T")


def layouts(layers: int, world: int) -> list[FlatLayout]:
    """The layouts of the units: each layer, and one for the other parameters."""

    def layer(number: int) -> list[ParamSpec]:
        shapes = {
            "self_attn.q_proj": (WIDTH, WIDTH),
            "self_attn.k_proj": (KEYS, WIDTH),
            "self_attn.v_proj": (KEYS, WIDTH),
            "self_attn.o_proj": (WIDTH, WIDTH),
            "mlp.gate_proj": (HIDDEN, WIDTH),
            "mlp.up_proj": (HIDDEN, WIDTH),
            "mlp.down_proj": (WIDTH, HIDDEN),
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
        }
        return [ParamSpec(f"model.layers.{number}.{name}.weight", shape) for name, shape in shapes.items()]

    around = {"model.embed_tokens": (WORDS, WIDTH), "model.norm": (WIDTH,), "lm_head": (WORDS, WIDTH)}
    units = [layer(number) for number in range(layers)]
    units.append([ParamSpec(f"{name}.weight", shape) for name, shape in around.items()])
    return [FlatLayout.pack(params, world=world, align=4, pad_total=True) for params in units]


def plan_of(units: list[FlatLayout], rank: int) -> list[PlannedInterval]:
    """The plan of one rank: an interval of each parameter and of both its moments, and the step counts of all."""
    found = []
    for part, *state in STATES:
        for layout in units:
            for owned in layout.owned(rank):
                spec, span = layout.params[owned.index], owned.in_param
                path = (part, spec.name) if not state else (part, "state", spec.name, *state)
                key = ".".join(path)
                found.append(
                    PlannedInterval(key, path, "float32", spec.shape, None, span.start, span.stop, 4 * span.numel)
                )
    return found


def steps_of(units: list[FlatLayout]) -> list[PlannedInterval]:
    """The step counts, which every rank holds."""
    names = [spec.name for layout in units for spec in layout.params]
    paths = [("optimizer", "state", name, "step") for name in names]
    return [PlannedInterval(".".join(path), path, "float32", (), None, 0, 1, 4) for path in paths]


def rows_of(writes: list[PlannedInterval]) -> Archives:
    """The places that a rank's pieces would have in its file."""
    rows: Archives = []
    offset = 0
    for held in writes:
        pieces = []
        for numel in _sizes(held):
            length = FRAME[1] + 4 * numel
            pieces.append(ArchivedChunk(numel, offset, FRAME[0], length))
            offset += length
        rows.append((held.key, held.start, pieces))
    return rows


def _sizes(held: PlannedInterval) -> Iterator[int]:
    for box in cut(held.spec, Span(held.start, held.stop), LARGEST // 4):
        yield box.span.numel


class Clock:
    """Runs work and prints its time, in seconds of one core."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, what: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        result = work()
        self.seconds[what] = time.process_time() - start
        print(f"{self.seconds[what]:8.2f} s  {what}", flush=True)
        return result


def measure(*, world: int, layers: int) -> dict[str, Any]:
    """Measure counts, bytes, and seconds of one core."""
    clock = Clock()
    units = layouts(layers, world)
    steps = steps_of(units)
    first = clock("one rank's plan and its hash, at every save", lambda: (plan := plan_of(units, 0), digest(plan))[0])
    plans = [first, *(plan_of(units, rank) for rank in range(1, world))]
    sent = sum(len(pickle.dumps(plan)) for plan in plans)
    writes = clock(
        "the plan of all writes, on every rank, at the first save",
        lambda: assign([plan + steps for plan in plans], [0] * world),
    )
    files = [(rows_of(mine), []) for mine in writes]
    boxes = sum(len(pieces) for rows, _ in files for _, _, pieces in rows)
    tensors = {held.key: held for plan in plans for held in plan} | {held.key: held for held in steps}
    named = [(f"__{rank}_0.distcp", rows, plain) for rank, (rows, plain) in enumerate(files)]
    table = clock(".metadata, on rank 0, at the first save", lambda: metadata.metadata_of(tensors, named, {}))
    saved = clock("places in the manifest, on rank 0, at every save", lambda: tensors_of_files(tensors, files))
    listed = [SavedFile(name, 2**30, 1) for name, _, _ in named]
    text = clock("the manifest's text, on rank 0, at every save", lambda: Manifest(world, listed, saved, {}).to_bytes())
    read = clock("reading the manifest, on every rank, at a load", lambda: Manifest.from_bytes(text, "it"))
    clock("proving the manifest, on every rank, at a load", lambda: prove(read, "it"))
    again = [name for name in clock.seconds if name.endswith("at every save")]
    print(
        f"{sum(spec.numel for unit in units for spec in unit.params) / 1e9:.1f}B parameters, {len(tensors)} tensors, "
        f"{boxes} boxes; plans sent at the first save {sent / MIB:.1f} MiB\n"
        f".metadata {len(table) / MIB:.1f} MiB, manifest {len(text) / MIB:.1f} MiB\n"
        f"with a cached plan: {sum(clock.seconds[name] for name in again):.2f} s"
    )
    return {
        "boxes": boxes,
        "metadata": len(table),
        "manifest": len(text),
        "cached": sum(clock.seconds[name] for name in again),
        "first": sum(seconds for name, seconds in clock.seconds.items() if not name.endswith("at a load")),
    }


def main() -> int:
    """Print the figures. The exit status is 1 where they exceed the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=80)
    given = parser.parse_args()
    found = measure(world=given.world, layers=given.layers)
    return 0 if found["cached"] < 10.0 and found["metadata"] + found["manifest"] < 64 * MIB else 1


if __name__ == "__main__":
    sys.exit(main())
