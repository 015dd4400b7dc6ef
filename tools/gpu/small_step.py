"""Only a few small steps, for tools that check each access of the device."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flatfsdp import CPUOffload, MixedPrecision
from tools.benchmark.ranks import fake_world
from tools.gpu import alone, net
from tools.gpu.card import card_of
from tools.gpu.wraps import BF16, FP32, front_with_hooks, wrapper

STEPS = 2
DONE = "stepped"


def main() -> int:
    """Run both fronts, in a fake group of 4 ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    card = card_of(parser.parse_args().device)
    warnings.simplefilter("ignore")
    card.begin()
    fake_world(4)
    mixed = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
    offload = CPUOffload(offload_params=True)
    for wrap in (
        wrapper(mixed_precision=mixed),
        wrapper(cpu_offload=offload, use_orig_params=True),
        front_with_hooks(),
    ):
        model = wrap(net.build(card.device), card.device)
        optimizer = alone.optimizer_of(model)
        for step in range(STEPS):
            model(*net.batch(card.device, 0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        card.synchronize()
    print(DONE, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
