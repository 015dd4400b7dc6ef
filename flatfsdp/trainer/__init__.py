"""A trainer on top of the engine: it trains a model on data, and any number of ranks can resume its checkpoints.

It imports only public names of flatfsdp, so any training script can do the same.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import ElasticArguments, FSDPArguments, Task, TrainingArguments
    from .callbacks import Callback
    from .hub.pretrained import Pretrained
    from .hub.text_data import TextData
    from .objectives import CausalLM, Classification, FromOutput, Objective
    from .run import Run, StepReport, TrainingResult
    from .trainer import Trainer

__all__ = [
    "Callback",
    "CausalLM",
    "Classification",
    "ElasticArguments",
    "FSDPArguments",
    "FromOutput",
    "Objective",
    "Pretrained",
    "Run",
    "StepReport",
    "Task",
    "TextData",
    "Trainer",
    "TrainingArguments",
    "TrainingResult",
]

_MODULES = {
    **dict.fromkeys(("CausalLM", "Classification", "FromOutput", "Objective"), ".objectives"),
    **dict.fromkeys(("ElasticArguments", "FSDPArguments", "Task", "TrainingArguments"), ".arguments"),
    **dict.fromkeys(("Run", "StepReport", "TrainingResult"), ".run"),
    "Callback": ".callbacks",
    "Pretrained": ".hub.pretrained",
    "TextData": ".hub.text_data",
    "Trainer": ".trainer",
}


def __getattr__(name: str) -> Any:
    """Import at first access: data loading, launching and checkpoints need no package of the extra `train`."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
