"""Samples for a training run: in one order for all ranks, from any position on any number of them. [Note: position]"""

from __future__ import annotations

from .collate import PadCollate
from .datasets import JsonLines, TokenWindows
from .evaluation import evaluation
from .loader import Loader, Step
from .sample_reader import DataError, Microbatch

__all__ = ["DataError", "JsonLines", "Loader", "Microbatch", "PadCollate", "Step", "TokenWindows", "evaluation"]
