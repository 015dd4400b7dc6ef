"""Layers of torch's that compute with the weights of modules inside of them, and call none of these.

[Note: fast paths] In evaluation `nn.TransformerEncoderLayer` does so, unless a module in it has a hook on its forward.
Where such a module is of a unit of its own, its weights are not gathered then. So it has a hook that does nothing. Of a
unit that is alone nobody knows what is around it; in a model it is known at the first forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ..base import autograd as hooks
from .unit import Unit

_READ = (nn.MultiheadAttention, nn.Linear, nn.LayerNorm)  # whose weights such a layer knows by their names


def _nothing(module: nn.Module, args: Any) -> None:
    return


def keep_out(modules: Iterable[nn.Module]) -> None:
    """Let layers around those of `modules` whose weights they could read call them."""
    for module in modules:
        if isinstance(module, _READ) and _nothing not in module._forward_pre_hooks.values():
            hooks.before_forward(module, _nothing)


def keep_out_inside(modules: Iterable[nn.Module], units: Sequence[Unit]) -> None:
    """All `modules` of a model are known, the outermost first: of those of `units` only the ones inside of such layers
    need hooks."""
    outermost, *rest = modules
    inside: set[nn.Module] = set()
    for layer in [each for each in (outermost, *rest) if isinstance(each, nn.TransformerEncoderLayer)]:
        inside.update(each for each in layer.modules() if each is not layer)
    apart = {entry for unit in units for entry in unit.entries}
    for entry in apart - inside - {outermost}:
        found = entry._forward_pre_hooks
        for key in [key for key, hook in found.items() if hook is _nothing] if found else ():
            del found[key]
    if inside := inside & apart:
        keep_out(inside)
        for encoder in [each for each in (outermost, *rest) if isinstance(each, nn.TransformerEncoder)]:
            # Which makes nested tensors of its input where it takes the layers' fast path for granted.
            encoder.use_nested_tensor = encoder.use_nested_tensor and inside.isdisjoint(encoder.modules())
