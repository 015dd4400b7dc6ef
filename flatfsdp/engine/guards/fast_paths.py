"""Layers of torch that compute with the weights of modules inside of them without calling these modules.

[Note: fast paths] In evaluation `nn.TransformerEncoderLayer` does so, unless a module in it has a hook on its forward.
If such a module has a unit of its own, its weights would not be gathered. So it gets a hook that does nothing. The
modules around a unit are unknown when it is constructed, and known at the first forward of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ..base import autograd as hooks
from ..runtime.unit import Unit

_READ = (nn.MultiheadAttention, nn.Linear, nn.LayerNorm)  # modules whose weights such a layer reads


def _nothing(module: nn.Module, args: Any) -> None:
    return


def keep_out(modules: Iterable[nn.Module]) -> None:
    """Let such layers call those of `modules` whose weights they could read."""
    for module in modules:
        if isinstance(module, _READ) and _nothing not in module._forward_pre_hooks.values():
            hooks.before_forward(module, _nothing)


def keep_out_inside(units: Sequence[Unit]) -> None:
    """Remove these hooks from entries of `units`, all of a model, that are not inside of such layers."""
    outermost, *inner = units[-1].entries.first.modules()
    inside: set[nn.Module] = set()
    for layer in [each for each in (outermost, *inner) if isinstance(each, nn.TransformerEncoderLayer)]:
        inside.update(each for each in layer.modules() if each is not layer)
    entries = {entry for unit in units for entry in unit.entries}
    for entry in entries - inside - {outermost}:
        found = entry._forward_pre_hooks
        for key in [key for key, hook in found.items() if hook is _nothing] if found else ():
            del found[key]
    if inside := inside & entries:
        keep_out(inside)
        for encoder in [each for each in (outermost, *inner) if isinstance(each, nn.TransformerEncoder)]:
            # An encoder makes nested tensors of its input if it expects its layers to take the fast path.
            encoder.use_nested_tensor = encoder.use_nested_tensor and inside.isdisjoint(encoder.modules())
