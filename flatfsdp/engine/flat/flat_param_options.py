"""What a flat parameter is made with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...api import MixedPrecision
from ..config.precision import Precision, resolve


@dataclass(frozen=True)
class FlatParamOptions:
    """What a flat parameter is made with, and keeps.

    Attributes:
        trainable: whether a parameter required a gradient at construction.
        packed: whether elements are no numbers, and stay as they are. [Note: packed bytes]
        offload: whether the shard lives on the CPU; pin_memory: in page-locked memory.
    """

    mixed_precision: MixedPrecision
    offload: bool
    pin_memory: bool
    use_orig_params: bool
    trainable: bool
    packed: bool

    def precision(self, master: torch.dtype) -> Precision:
        """The dtypes for a shard of `master`. [Note: dtypes]"""
        return resolve(self.mixed_precision, master)
