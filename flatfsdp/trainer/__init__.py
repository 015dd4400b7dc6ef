"""A trainer on top of the engine: it trains a model on data, and any number of ranks can resume its checkpoints.

It imports only public names of flatfsdp, so any training script can do the same.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import FSDPArguments, Task, TrainingArguments
    from .hub.pretrained import Pretrained
    from .hub.text_data import TextData
    from .objectives import CausalLM, Classification, FromOutput, Objective
    from .trainer import Trainer

__all__ = [
    "CausalLM",
    "Classification",
    "FSDPArguments",
    "FromOutput",
    "Objective",
    "Pretrained",
    "Task",
    "TextData",
    "Trainer",
    "TrainingArguments",
]

_MODULES = {
    **dict.fromkeys(("CausalLM", "Classification", "FromOutput", "Objective"), ".objectives"),
    **dict.fromkeys(("FSDPArguments", "Task", "TrainingArguments"), ".arguments"),
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
