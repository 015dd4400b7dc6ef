"""Requirements of the parts, checked before the first one runs.

They are torch with CUDA and NCCL, and, for two parts only, compute-sanitizer.
"""

from __future__ import annotations

import glob
import os
import shutil

import torch
import torch.distributed as dist

from .card import Card
from .report import Report

OLDEST, NEWEST = (2, 11), (2, 13)  # versions of torch that the parts were written for
SANITIZER = "compute-sanitizer"
PLACES = ("/usr/local/cuda*/bin", "/opt/nvidia/compute-sanitizer*", "/opt/nvidia/*/*", "/usr/lib/nvidia-cuda-toolkit*")


def sanitizer() -> str | None:
    """The path of compute-sanitizer: from the environment variable COMPUTE_SANITIZER, or else as found."""
    named = os.environ.get("COMPUTE_SANITIZER")
    found = [path for place in PLACES for path in glob.glob(f"{place}/{SANITIZER}")]
    candidates = [named, shutil.which(SANITIZER), *sorted(found, reverse=True)]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def look(report: Report, card: Card) -> None:
    """Report a row for each requirement."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    wanted = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    report.goal("torch", wanted, torch.__version__, OLDEST <= version <= NEWEST)
    if card.is_real:
        free = card.free_bytes() / 2**30
        report.goal(
            "memory that is free on the card", "24 GiB for the GPT of 1B parameters", f"{free:.0f} GiB", free >= 24
        )
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
        report.goal("NCCL", "there", nccl, dist.is_nccl_available())
        path = sanitizer()
        report.goal(SANITIZER, "there, for two parts (COMPUTE_SANITIZER names it)", path or "not found", bool(path))
    report.goal("gloo", "there", str(dist.is_gloo_available()), dist.is_gloo_available())
