"""One part in this process: `python -m tools.gpu PART --found FILE --out FOLDER [--device cpu] [--brief]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.benchmark import ranks

from .card import card_of
from .parts import PARTS
from .report import Report

# Modules that each rank would otherwise import itself, which takes seconds.
PRELOADED = ("torch._dynamo", "torch.profiler", "tools.benchmark.host", "tools.gpu.scenarios", "tools.gpu.streams")


def main() -> int:
    """Run the part; an exception becomes its last row."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--found", type=Path, required=True, help="the file of its findings")
    parser.add_argument("--out", type=Path, required=True, help="the folder of its traces")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--brief", action="store_true")
    given = parser.parse_args()
    ranks.preload(PRELOADED)
    report = Report(given.found, given.out)
    try:
        PARTS[given.part].run(report, card_of(given.device), brief=given.brief)
    except Exception as error:
        report.reload()
        report.failed("the part itself", "runs to its end", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
