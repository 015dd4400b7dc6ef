"""Samples for a training run: in one order for all ranks, from any position on any number of them. [Note: position]"""

from __future__ import annotations

from .datasets import JsonLines, PadCollate, TokenWindows
from .loader import Loader, Step, evaluation
from .sample_reader import DataError, Microbatch

__all__ = ["DataError", "JsonLines", "Loader", "Microbatch", "PadCollate", "Step", "TokenWindows", "evaluation"]
