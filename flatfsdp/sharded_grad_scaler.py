"""A gradient scaler that agrees across ranks: an overflow on one rank skips the step on all."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from .engine.base import autograd as hooks
from .engine.features.error_feedback import residuals_of
from .engine.features.optimizer_in_backward import note_scaled_loss, optimizers_of
from .engine.guards.optimizer_hooks import stepped_by, waiting_in
from .engine.models import param_registry as registry
from .engine.models.rest import before_step
from .engine.runtime.model import Model
from .engine.transports.blocking import agree_on_maximum


class ShardedGradScaler(GradScaler):
    """`torch.amp.GradScaler` for sharded gradients, also on CPU (`device="cpu"`).

    The arguments are the same, in the order of FSDP1's scaler: `backoff_factor` comes before `growth_factor`.
    `process_group=None` is the default group.

    Each rank sees only its shards, so an infinity may occur on one rank alone. `unscale_` (and with it `step`)
    therefore takes the maximum of found-inf over `process_group`: collective, one scalar. The group must cover all
    ranks that hold the model (the default group does).

    Example:
        >>> import torch
        >>> scaler = ShardedGradScaler("cpu", init_scale=1024.0, enabled=True)
        >>> float(scaler.scale(torch.ones(())))
        1024.0
    """

    # Models whose gradients were unscaled since the last update.
    _unscaled: tuple[weakref.ref[Model], ...] = ()

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 65536.0,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """`outputs`, a tensor or an iterable of tensors, times the scale, each in its own dtype.

        A loss in low precision keeps its dtype, as with FSDP1; `torch.amp.GradScaler` makes it float32.
        """
        if not self.is_enabled():
            return outputs
        if not isinstance(outputs, Tensor):
            if not isinstance(outputs, Iterable):
                return super().scale(outputs)  # refuses it
            each = map(self.scale, outputs)
            return type(outputs)(each) if isinstance(outputs, (list, tuple)) else each
        scaled = super().scale(outputs).to(outputs.dtype)
        if scaled.requires_grad and any(optimizers_of(root).all for root in registry.models):
            hooks.before_backward_of(scaled, lambda grad: note_scaled_loss())
        return scaled

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        before_step(optimizer)
        # fp16 gradients are legal here: keep_low_precision_grads leaves them to the optimizer on purpose. `unscale_` of
        # the base class passes False, so `allow_fp16` is ignored.
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        self._unscaled += tuple(map(weakref.ref, stepped_by(optimizer)))
        # A rank may hold no gradient at all (its shard is padding): it contributes "nothing found".
        with waiting_in("ShardedGradScaler.unscale_()", optimizer):
            return agree_on_maximum(found or {found_inf.device: found_inf}, self.process_group)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As in the base class, `new_scale` included. The residuals of error feedback grow with the scale; if the scale
        falls, as after a skipped step, they are dropped together with the skipped gradients."""
        units = {unit for ref in self._unscaled if (model := ref()) is not None for unit in model.units}
        self._unscaled = ()
        residuals = [each for unit in units for each in residuals_of(unit)]
        before = self.get_scale() if residuals else 1.0  # which waits for the device
        super().update(new_scale)
        if residuals and (after := self.get_scale()) != before:
            for each in residuals:
                each.rescale(after / before if after > before else 0.0)


__all__ = ["ShardedGradScaler"]
