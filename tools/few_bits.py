"""The effect of few-bit communication on training: validation losses of two small models, several seeds each.

`python tools/few_bits.py [--out FILE]`: two ranks on this machine train byte models on the sources of Python's standard
library, the one of `tools/train` and a small Llama, in full precision and with ever fewer bits. The seed determines
the initial values and the batches, equally for all settings.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.trainer.demo.model import Block, ByteTransformer, rotate
from flatfsdp.trainer.demo.options import corpus_files
from tests.harness import pool

RANKS, SEEDS, STEPS, WARMUP, BATCH, LENGTH = 2, (0, 1), 180, 20, 8, 64
HELD_OUT = 2**15  # bytes
INT8 = torch.int8
WAYS = {
    "full precision": MixedPrecision(),
    "gather_dtype=int8, reduce_bits=8": MixedPrecision(gather_dtype=INT8, reduce_bits=8),
    "gather_dtype=float8_e4m3fn, reduce_bits=8": MixedPrecision(gather_dtype=torch.float8_e4m3fn, reduce_bits=8),
    "gather_dtype=int8, reduce_bits=4": MixedPrecision(gather_dtype=INT8, reduce_bits=4),
    "the same, reduce_error_feedback": MixedPrecision(gather_dtype=INT8, reduce_bits=4, reduce_error_feedback=True),
}


class LlamaBlock(nn.Module):
    """Attention with rotary positions and keys and values shared by two heads, and a SwiGLU; both after an RMSNorm."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.pairs = heads, width // heads // 2
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv, self.out = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        angles = torch.outer(torch.arange(time), 10000.0 ** (-torch.arange(self.pairs) / self.pairs))
        normed = self.norm(x)
        q = self.q(normed).view(batch, time, self.heads, -1).transpose(1, 2)
        k, v = self.kv(normed).view(batch, time, 2, self.heads // 2, -1).permute(2, 0, 3, 1, 4)
        q, k = (rotate(each, angles.cos(), angles.sin()) for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Logits for the next byte."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, 4, 176) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS: dict[str, tuple[Callable[[], nn.Module], type[nn.Module]]] = {
    "the model of tools/train": (lambda: ByteTransformer(width=64, layers=2, heads=4, context=LENGTH), Block),
    "a small Llama": (Llama, LlamaBlock),
}


# Optimizers, with their highest learning rates.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "AdamW": (partial(torch.optim.AdamW, weight_decay=0.1), 1.5e-3),
    "SGD, momentum 0.9": (partial(torch.optim.SGD, momentum=0.9), 0.1),
}


def text() -> tuple[Tensor, Tensor]:
    """The training bytes and the held-out bytes; 1-D."""
    files = bytearray(b"".join(file.read_bytes() for file in corpus_files(None)))
    every = torch.frombuffer(files, dtype=torch.uint8)
    return every[:-HELD_OUT], every[-HELD_OUT:].long()


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """The mean loss over windows, shape (N, LENGTH + 1)."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def trained(rank: int, world: int, name: str, kind: str, way: str, seed: int) -> tuple[float, int, float]:
    """The loss on held-out bytes, the bytes that a rank reduces in a step, and its seconds of CPU time."""
    begin = time.process_time()
    train, held_out = text()
    make, unit = MODELS[name]
    torch.manual_seed(seed)
    model = FullyShardedDataParallel(
        make(), auto_wrap_policy={unit}, mixed_precision=WAYS[way], use_orig_params=True, sync_module_states=True
    )
    optimizer_of, highest = OPTIMIZERS[kind]
    optimizer = optimizer_of(model.parameters(), lr=highest)
    figures = flatfsdp.stats(model)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = highest * min((step + 1) / WARMUP, 1 - step / STEPS)
        generator = torch.Generator().manual_seed((seed * STEPS + step) * world + rank)
        starts = torch.randint(len(train) - LENGTH, (BATCH, 1), generator=generator)
        figures.reset()
        loss_of(model, train[starts + torch.arange(LENGTH + 1)].long()).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        windows = held_out.unfold(0, LENGTH + 1, LENGTH).split(64)
        loss = statistics.fmean(float(loss_of(model, each)) for each in windows)
    return loss, figures.comm["reduce_scatter"][1], time.process_time() - begin


def main() -> int:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    seconds, rows = 0.0, []
    most, spread = dict.fromkeys(WAYS, 0.0), 0.0
    for name, kind in product(MODELS, OPTIMIZERS):
        full: list[float] = []
        numel = sum(parameter.numel() for parameter in MODELS[name][0]().parameters())
        for way in WAYS:
            results = [pool.run(RANKS, trained, name, kind, way, seed, timeout=300) for seed in SEEDS]
            seconds += sum(own for ranks in results for _, _, own in ranks)
            losses = [ranks[0][0] for ranks in results]
            if not full:
                full, spread = losses, max(spread, max(losses) / min(losses) - 1)
            apart = [loss / exact - 1 for loss, exact in zip(losses, full, strict=True)]
            most[way] = max(most[way], *map(abs, apart))
            cells = (
                f"{name}, {numel / 1e6:.2f}M, {kind}",
                way,
                " / ".join(f"{loss:.4f}" for loss in losses),
                " / ".join(f"{each:+.2%}" for each in apart),
                f"{results[0][0][1] / 2**10:,.0f}",
            )
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    lines = [
        f"{datetime.date.today()}, torch {torch.__version__}, {RANKS} ranks, FULL_SHARD, {STEPS} steps of "
        f"{RANKS} x {BATCH} x {LENGTH} bytes, {len(SEEDS)} seeds; losses in nats, over {HELD_OUT:,} held-out bytes. "
        f"Made by `tools/few_bits.py` in {seconds:.0f} seconds of CPU time.",
        "",
        "Largest deviation from full precision, over all models and seeds: "
        + "; ".join(f"{way}: {each:.2%}" for way, each in most.items() if way != "full precision")
        + f". Seeds of one model in full precision differ by up to {spread:.1%}.",
        "",
        "| model, optimizer | setting | validation loss, by seed | from full precision | KiB reduced per step |",
        "|---|---|---|---|---|",
        *rows,
    ]
    print("\n".join(lines))
    if given.out is not None:
        given.out.write_text("# Training in few bits\n\n" + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
