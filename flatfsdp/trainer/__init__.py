"""A trainer on top of the engine: from a model and data to checkpoints that any number of ranks goes on from.

It is a program like any user's: of flatfsdp it imports public names only, so what it does, any training script can do.
"""

from __future__ import annotations

from .arguments import FSDPArguments, Task, TrainingArguments
from .objectives.objectives import CausalLM, Classification, FromOutput, Objective
from .trainer import Trainer

__all__ = [
    "CausalLM",
    "Classification",
    "FSDPArguments",
    "FromOutput",
    "Objective",
    "Task",
    "Trainer",
    "TrainingArguments",
]
