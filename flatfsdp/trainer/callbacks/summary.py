"""A summary of a run, on one page."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import torch

import flatfsdp
from flatfsdp.trainer.byte_format import sizes_in_words
from flatfsdp.trainer.callbacks.base import Callback
from flatfsdp.trainer.reports import TrainingResult, shown
from flatfsdp.trainer.run import Run
from flatfsdp.trainer.terminal import columns, print_line

HANGING: dict[str, Any] = {"subsequent_indent": " " * 14, "break_long_words": False, "break_on_hyphens": False}


class Summary(Callback):
    """Print the units at the beginning, and at the end the facts of the run, one a line; by rank 0, on stdout.

    The last of the callbacks: the facts name what the others have written.
    """

    def on_begin(self, trainer: Run) -> None:
        if trainer.world.leads:
            print_line(f"{flatfsdp.summary(trainer.model, compact=True)}\n\n{self.plan(trainer)}", sys.stdout)

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        facts = self.facts(trainer, result)
        if trainer.world.leads:
            width = columns(sys.stdout) or 10_000
            lines = (textwrap.fill(f"  {name:<11} {fact}", width, **HANGING) for name, fact in facts.items())
            print_line("\n".join(["summary", *lines]), sys.stdout)

    @staticmethod
    def plan(trainer: Run) -> str:
        """Until when the run trains, and where it writes."""
        training, planned = trainer.training, trainer.planned_steps()
        limits = [] if planned is None else [f"step {planned:,}"]
        limits += [] if training.minutes is None else [f"{training.minutes:g} minutes of training"]
        return f"until {' or '.join(limits) or 'the data end'}, into {trainer.output}"

    @staticmethod
    def facts(trainer: Run, result: TrainingResult) -> dict[str, str]:
        """The lines, by name."""
        world, dtype = trainer.world, trainer.fsdp.param_dtype
        sent = ", ".join(
            f"{kind} {sizes_in_words(size)} in {calls} call{'' if calls == 1 else 's'}"
            for kind, (calls, size) in sorted(result.communication.items())
        )
        held = f", {sizes_in_words(result.footprint.parameters)} of them per rank" if result.taken else ""
        facts = {
            "ranks": f"{world.size} on {world.device.type}, {trainer.fsdp.strategy}"
            + (f", computing in {str(dtype).removeprefix('torch.')}" if isinstance(dtype, torch.dtype) else ""),
            "parameters": f"{trainer.parameters:,} in total{held}",
            "units": f"{flatfsdp.stats(trainer.model).units:,}",
        }
        if result.taken:  # what a step shows
            facts |= {"per rank": f"{result.footprint}", "per step": sent or "no communication"}
        facts |= {"steps": f"{result.steps:,} of {result.tokens:,} tokens", "ended by": result.ended_by}
        steps = f"{result.taken:,} step{'' if result.taken == 1 else 's'}"
        facts["speed"] = f"{steps} at {result.tokens_per_second:,.0f} tokens/s" if result.taken else "no step was taken"
        if result.losses:
            facts["loss"] = f"{result.losses[0]:.3f} -> {result.losses[-1]:.3f}"
        facts |= {name.replace("_", " "): shown(value) for name, value in result.evaluation.items()}
        if result.checkpoint is not None:
            facts["checkpoint"] = trainer.shown(result.checkpoint)
        return facts | {name: str(path) for name, path in trainer.written.items()}
