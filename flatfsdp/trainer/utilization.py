"""Model FLOPs per token, and the peak FLOPs of devices, for the utilization.

Source of the formula: Kaplan et al., arXiv:2001.08361, section 2.1: a forward multiplies and adds once with each
parameter, 2 operations for each token, and a backward does so twice, for the gradients of activations and of
parameters. Frozen parameters have no gradients. Attention over the sequence, which grows with its length, and
recomputation for activation checkpointing are left out, so that the same work gives the same number.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

# 10^12 operations per second in bf16 without sparsity, from NVIDIA's data sheets.
_PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "V100": 125.0}


def flops_per_token(parameters: Iterable[nn.Parameter]) -> int:
    """Operations of a forward and a backward for one token: 6 for each trained parameter, 4 for a frozen one."""
    return sum((6 if each.requires_grad else 4) * each.numel() for each in parameters)


def peak_tflops(device: torch.device, given: float | None) -> float | None:
    """The peak of `device` in 10^12 operations per second: the given one, or that of its data sheet; None if neither is
    known."""
    if given is not None or device.type != "cuda":
        return given
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAKS.items() if known in name), None)
