"""The command line of the trainer: one frozen record of options, and the parser that fills it.

Defaults stand once, in `Options`; the parser reads them there. Everything that can be refused without touching data,
devices or other ranks is refused here, in one line and with exit code 2.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from flatfsdp import ShardingStrategy

# The command line spells FSDP's names in lower case, without the underscore of the private one.
STRATEGIES = {member.name.lower().lstrip("_"): member for member in ShardingStrategy}

# Limits of a run that is given none. Steps, so that two runs do the same; minutes, for a machine slower than expected.
DEFAULT_STEPS = 700
DEFAULT_MINUTES = 1.4


@dataclass(frozen=True)
class Options:
    """What one run of the trainer does; one field per option of the command line, see there for the meanings."""

    # data
    data: Path | None = None
    valid_part: float = 0.05
    # model
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    # training
    steps: int | None = None
    minutes: float | None = None
    batch: int = 4
    accumulate: int = 1
    lr: float = 3e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    # engine
    ranks: int | None = None
    device: str = "auto"
    strategy: str = "full_shard"
    replicas: int | None = None
    precision: str = "fp32"
    cpu_offload: bool = False
    use_orig_params: bool = True
    # output
    out: Path = Path("train-out")
    plot: bool = True
    sample: int = 300
    prompt: str = "def "
    quiet: bool = False

    def done(self, step: int, seconds: float) -> float:
        """The share of the run that is over after `step` steps and `seconds` of training: 1 or more is the end."""
        steps, minutes = self.steps, self.minutes
        if steps is None and minutes is None:
            steps, minutes = DEFAULT_STEPS, DEFAULT_MINUTES
        return max(step / steps if steps else 0.0, seconds / 60 / minutes if minutes else 0.0)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line on stderr and exit with code 2."""
        print(f"flatfsdp.train: {message} (--help lists the options)", file=sys.stderr)
        raise SystemExit(2)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows the defaults worth showing: not those of flags and not None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or isinstance(action.default, bool)
        return action.help if silent else super()._get_help_string(action)


@dataclass(frozen=True)
class _Number:
    """A conversion for argparse: text to a number of `kind` that `accepts` takes, `wanted` in words."""

    kind: type[int] | type[float]
    accepts: Callable[[float], bool]
    wanted: str

    @property
    def metavar(self) -> str:
        return "N" if self.kind is int else "X"

    def __call__(self, text: str) -> float:
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and self.accepts(value)):
            raise argparse.ArgumentTypeError(f"expected {self.wanted}, got {text!r}")
        return value


_count = _Number(int, lambda value: value >= 1, "a whole number from 1 up")
_whole = _Number(int, lambda value: value >= 0, "a whole number from 0 up")
_positive = _Number(float, lambda value: value > 0, "a number above 0")
_not_negative = _Number(float, lambda value: value >= 0, "a number from 0 up")
_fraction = _Number(float, lambda value: 0 < value < 1, "a number between 0 and 1")
_part = _Number(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")


def make_parser() -> Parser:
    """The parser of `python -m flatfsdp.train`."""
    parser = Parser(
        prog="python -m flatfsdp.train",
        description="Train a byte-level transformer under FullyShardedDataParallel and show what it learned. Started "
        "plainly it spawns its own ranks on this machine; under torchrun it joins that world.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    defaults = {field.name: field.default for field in fields(Options)}

    def add(group: Any, flag: str, meaning: str, **settings: Any) -> None:
        if isinstance(settings.get("type"), _Number):
            settings["metavar"] = settings["type"].metavar
        group.add_argument(flag, default=defaults[flag[2:].replace("-", "_")], help=meaning, **settings)

    data = parser.add_argument_group("data")
    text = "a file, or a folder whose files are read in sorted order (default: the Python standard library's sources)"
    add(data, "--data", text, type=Path, metavar="PATH")
    add(data, "--valid-part", "share of the bytes, at the end, held out for validation", type=_fraction)

    model = parser.add_argument_group("model")
    add(model, "--layers", "transformer blocks; each is one FSDP unit", type=_count)
    add(model, "--width", "features per position", type=_count)
    add(model, "--heads", "attention heads, among which the width is divided", type=_count)
    add(model, "--context", "bytes per sequence", type=_count)

    limits = f"Without --steps and --minutes a run ends after {DEFAULT_STEPS} steps or {DEFAULT_MINUTES} minutes."
    training = parser.add_argument_group("training", limits)
    add(training, "--steps", "end after so many optimizer steps", type=_count)
    add(training, "--minutes", "end after so many minutes of training, by the clock of rank 0", type=_positive)
    add(training, "--batch", "sequences per rank and microbatch", type=_count)
    add(training, "--accumulate", "microbatches per step; all but the last run under no_sync", type=_count)
    add(training, "--lr", "highest learning rate of AdamW: after the warmup, before the cosine", type=_positive)
    add(training, "--warmup", "share of the run in which the learning rate rises", type=_part)
    add(training, "--weight-decay", "weight decay of AdamW", type=_not_negative)
    add(training, "--clip", "largest gradient norm; 0 does not clip", type=_not_negative)
    add(training, "--seed", "seed of weights, batches and the generated text", type=_whole)

    engine = parser.add_argument_group("engine")
    names = ", ".join(sorted(STRATEGIES))
    add(engine, "--ranks", "processes to spawn (default: one per accelerator, 2 on CPU)", type=_count)
    add(engine, "--device", "cpu, cuda or another accelerator; auto takes cuda where there is one", metavar="TYPE")
    add(engine, "--strategy", f"one of {names}", choices=sorted(STRATEGIES), metavar="NAME")
    add(engine, "--replicas", "copies of the model in the hybrid strategies (default: one per node)", type=_count)
    add(engine, "--precision", "dtype to compute in; weights and reductions stay fp32", choices=["fp32", "bf16"])
    add(engine, "--cpu-offload", "keep shards and gradients in host memory between uses", action="store_true")
    original = "the optimizer sees the original parameters (the default), or one flat parameter per unit"
    add(engine, "--use-orig-params", original, action=argparse.BooleanOptionalAction)

    output = parser.add_argument_group("output")
    add(output, "--out", "folder for the loss plot", type=Path, metavar="DIR")
    add(output, "--plot", "draw the loss plot (the default), or do not", action=argparse.BooleanOptionalAction)
    add(output, "--sample", "bytes of text to generate at the end", type=_whole)
    add(output, "--prompt", "beginning of that text", metavar="TEXT")
    add(output, "--quiet", "no progress, only the summary", action="store_true")
    return parser


def parse(parser: Parser, arguments: Sequence[str]) -> Options:
    """The options in `arguments`; a wrong one ends the program through `parser.error`."""
    options = Options(**vars(parser.parse_args(arguments)))
    if options.width % (2 * options.heads):
        # Rotary positions turn pairs of features, so every head needs an even number of them.
        parser.error(f"argument --heads: --width {options.width} must be a multiple of twice --heads {options.heads}")
    if options.replicas is not None and "hybrid" not in options.strategy:
        parser.error(f"argument --replicas: only the hybrid strategies replicate, and --strategy is {options.strategy}")
    if options.sample and not options.prompt:
        parser.error("argument --prompt: needs at least one character to continue from")
    return options
