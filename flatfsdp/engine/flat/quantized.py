"""Parameters of a floating-point dtype whose elements are no numbers.

[Note: packed bytes] Quantised weights are bytes, which bitsandbytes stores as a dtype of the user's choice
(`quant_storage`), so that FSDP1 flattens them together with others. A cast of them would give other weights without a
word. They are told by the `quant_state` that undoes their quantisation, which the parameter has, or, after a stay on
the meta device, only the module.
"""

from __future__ import annotations

from torch import nn

from .param_refs import ParamRef


def is_packed(param_ref: ParamRef) -> bool:
    """Whether the parameter there must be left as it is, bit by bit."""
    if param_ref.leaf.requires_grad:
        return False
    holders: list[nn.Parameter | nn.Module] = [param_ref.leaf]
    if param_ref.attribute == "weight":
        holders.append(param_ref.module)
    return any(getattr(holder, "quant_state", None) is not None for holder in holders)
