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
    steps: int = 800
    minutes: float = 1.5
    batch: int = 8
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


def _number(kind: type[int] | type[float], accepts: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    def convert(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}") from None
        if not (math.isfinite(value) and accepts(value)):
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
        return value

    return convert


_count = _number(int, lambda value: value >= 1, "a whole number from 1 up")
_whole = _number(int, lambda value: value >= 0, "a whole number from 0 up")
_positive = _number(float, lambda value: value > 0, "a number above 0")
_not_negative = _number(float, lambda value: value >= 0, "a number from 0 up")
_fraction = _number(float, lambda value: 0 < value < 1, "a number between 0 and 1")
_part = _number(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")


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

    def add(group: Any, flag: str, **settings: Any) -> None:
        group.add_argument(flag, default=defaults[flag[2:].replace("-", "_")], **settings)

    data = parser.add_argument_group("data")
    add(
        data,
        "--data",
        type=Path,
        metavar="PATH",
        help="a file, or a folder whose files are read in sorted order (default: the Python standard library's sources)",
    )
    add(
        data,
        "--valid-part",
        type=_fraction,
        metavar="X",
        help="share of the bytes, at the end, held out for validation",
    )

    model = parser.add_argument_group("model")
    add(model, "--layers", type=_count, metavar="N", help="transformer blocks; each is one FSDP unit")
    add(model, "--width", type=_count, metavar="N", help="features per position")
    add(model, "--heads", type=_count, metavar="N", help="attention heads; the width is divided among them")
    add(model, "--context", type=_count, metavar="N", help="bytes per sequence")

    training = parser.add_argument_group("training", "The run ends at the first of two limits, steps and minutes.")
    add(training, "--steps", type=_count, metavar="N", help="optimizer steps")
    add(training, "--minutes", type=_positive, metavar="X", help="minutes of training, by the clock of rank 0")
    add(training, "--batch", type=_count, metavar="N", help="sequences per rank and microbatch")
    add(
        training, "--accumulate", type=_count, metavar="N", help="microbatches per step; all but the last under no_sync"
    )
    add(
        training,
        "--lr",
        type=_positive,
        metavar="X",
        help="peak learning rate of AdamW, after warmup, before the cosine",
    )
    add(training, "--warmup", type=_part, metavar="X", help="share of the run in which the learning rate rises")
    add(training, "--weight-decay", type=_not_negative, metavar="X", help="weight decay of AdamW")
    add(training, "--clip", type=_not_negative, metavar="X", help="largest gradient norm; 0 does not clip")
    add(training, "--seed", type=_whole, metavar="N", help="seed of weights, batches and the generated text")

    engine = parser.add_argument_group("engine")
    add(engine, "--ranks", type=_count, metavar="N", help="processes to spawn (default: one per accelerator, 2 on CPU)")
    add(engine, "--device", metavar="TYPE", help="cpu, cuda or another accelerator; auto takes cuda where there is one")
    add(
        engine, "--strategy", choices=sorted(STRATEGIES), metavar="NAME", help=f"one of {', '.join(sorted(STRATEGIES))}"
    )
    add(
        engine,
        "--replicas",
        type=_count,
        metavar="N",
        help="replicas of the sharded model, for the hybrid strategies (default: one per node)",
    )
    add(engine, "--precision", choices=["fp32", "bf16"], help="dtype to compute in; weights and reductions stay fp32")
    add(engine, "--cpu-offload", action="store_true", help="keep shards and gradients in host memory between uses")
    add(
        engine,
        "--use-orig-params",
        action=argparse.BooleanOptionalAction,
        help="give the optimizer the original parameters (the default) or one flat parameter per unit",
    )

    output = parser.add_argument_group("output")
    add(output, "--out", type=Path, metavar="DIR", help="folder for the loss plot")
    add(output, "--plot", action=argparse.BooleanOptionalAction, help="draw the loss plot (the default), or do not")
    add(output, "--sample", type=_whole, metavar="N", help="bytes of text to generate at the end")
    add(output, "--prompt", metavar="TEXT", help="beginning of that text")
    add(output, "--quiet", action="store_true", help="no progress, only the summary")
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
