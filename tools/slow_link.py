"""Step times over a slow link, simulated: flatfsdp with few-bit communication, with full precision, and torch's FSDP1.

`python tools/slow_link.py [--out FILE]`: two ranks on this machine, each sending through a link of the bandwidth in the
header of the table (tests/harness/slow_link.py). This compares bytes with the work of packing them, not networks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flatfsdp import FullyShardedDataParallel, MixedPrecision
from tests.harness import pool
from tests.harness.slow_link import slow_link

RANKS, WARMUP, STEPS, ROUNDS = 2, 2, 8, 3
WIDTH, LAYERS, LENGTH, BATCH = 384, 6, 32, 2
LINKS = {"1 Gbit/s": 125e6, "10 Gbit/s": 1250e6}  # bytes per second
DELAY = 50e-6
WAYS: dict[str, MixedPrecision | None] = {
    "FSDP1": None,
    "flatfsdp": MixedPrecision(),
    "gather_dtype=int8": MixedPrecision(gather_dtype=torch.int8),
    "gather_dtype=int8, reduce_bits=8": MixedPrecision(gather_dtype=torch.int8, reduce_bits=8),
    "gather_dtype=int8, reduce_bits=4": MixedPrecision(gather_dtype=torch.int8, reduce_bits=4),
}


def build() -> nn.Module:
    """A transformer of 11 million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS))
    )


def measure(rank: int, world: int, way: str, bandwidth: float) -> tuple[list[float], int]:
    """Seconds of each step, and bytes that this rank sends in one."""
    units: Any = {nn.TransformerEncoderLayer}
    with slow_link(bandwidth, DELAY) as link:
        precision = WAYS[way]
        model: nn.Module = (
            FSDP1(
                build(), auto_wrap_policy=ModuleWrapPolicy(units), use_orig_params=True, device_id=torch.device("cpu")
            )
            if precision is None
            else FullyShardedDataParallel(
                build(), auto_wrap_policy=units, use_orig_params=True, mixed_precision=precision
            )
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        seconds = []
        for _ in range(WARMUP + STEPS):
            sent, begin = link.sent, time.monotonic()
            model(torch.randn(BATCH, LENGTH, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.monotonic() - begin)
        return seconds[WARMUP:], link.sent - sent


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    found: dict[tuple[str, str], list[float]] = {}
    sent: dict[str, int] = {}
    for _ in range(ROUNDS):
        for link, bandwidth in LINKS.items():
            for way in WAYS:
                seconds, sent[way] = pool.run(RANKS, measure, way, bandwidth, timeout=120)[0]
                found.setdefault((link, way), []).extend(seconds)
    numel = sum(parameter.numel() for parameter in build().parameters())
    lines = [
        f"{numel / 1e6:.1f}M parameters in {LAYERS} units, {RANKS} ranks, torch {torch.__version__}; medians of "
        f"{ROUNDS} x {STEPS} steps. The links are simulated, with a delay of {DELAY * 1e6:.0f} us and "
        "the bandwidth above each column.",
        "",
        f"| setting | MiB sent per rank and step | {' | '.join(f'ms, {link}' for link in LINKS)} |",
        f"|---|---|{'---|' * len(LINKS)}",
    ]
    for way in WAYS:
        times = [f"{1e3 * statistics.median(found[link, way]):.0f}" for link in LINKS]
        lines.append(f"| {way} | {sent[way] / 2**20:.1f} | {' | '.join(times)} |")
    print("\n".join(lines))
    if given.out is not None:
        given.out.write_text("# Steps over a slow link\n\n" + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
