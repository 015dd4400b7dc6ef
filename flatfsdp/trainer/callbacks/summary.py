"""What a run came to, on a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import flatfsdp
from flatfsdp.trainer.callbacks.base import Callback
from flatfsdp.trainer.reports import Result
from flatfsdp.trainer.settings.dtypes import dtype_name
from flatfsdp.trainer.sizes import sizes_in_words
from flatfsdp.trainer.stopping import in_words

if TYPE_CHECKING:
    from flatfsdp.trainer.trainer import Trainer


class Summary(Callback):
    """Print the units at the beginning, and at the end the facts of the run, one a line; by rank 0, on stdout."""

    def on_begin(self, trainer: Trainer) -> None:
        if trainer.world.leads:
            print(f"{flatfsdp.summary(trainer.model)}\n", flush=True)

    def on_end(self, trainer: Trainer, result: Result) -> None:
        facts = self.facts(trainer, result)
        if trainer.world.leads:
            print("\n".join(["summary", *(f"  {name:<11} {fact}" for name, fact in facts.items())]), flush=True)

    @staticmethod
    def facts(trainer: Trainer, result: Result) -> dict[str, str]:
        """The lines, by name."""
        world, dtype = trainer.world, trainer.fsdp.param_dtype
        sent = ", ".join(
            f"{kind} {sizes_in_words(size)} in {calls} call{'' if calls == 1 else 's'}"
            for kind, (calls, size) in sorted(result.communication.items())
        )
        stopped = f", stopped by {in_words(result.stopped_by)}" if result.stopped_by else ""
        held = sizes_in_words(result.footprint.parameters)
        facts = {
            "ranks": f"{world.size} on {world.device.type}, {trainer.fsdp.strategy}"
            + (f", computing in {dtype_name(dtype)}" if isinstance(dtype, torch.dtype) else ""),
            "parameters": f"{trainer.parameters:,} in total, {held} of them per rank",
            "units": f"{flatfsdp.stats(trainer.model).units:,}",
            "per rank": f"{result.footprint}",
            "per step": sent or "no communication",
            "steps": f"{result.steps:,} of {result.tokens:,} tokens{stopped}",
            "speed": f"{result.taken:,} steps at {result.tokens_per_second:,.0f} tokens/s",
        }
        if result.losses:
            facts["loss"] = f"{result.losses[0]:.3f} -> {result.losses[-1]:.3f}"
        facts |= {name.replace("_", " "): f"{value:,.4g}" for name, value in result.evaluation.items()}
        if result.checkpoint is not None:
            facts["checkpoint"] = str(result.checkpoint)
        return facts
