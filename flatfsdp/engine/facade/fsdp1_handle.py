"""The handle of a flat parameter under FSDP1's names: verl moves shards to the CPU by it between phases of a step."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UsageError
from ..flat.flat_param import FlatParamHandle
from ..runtime.model import model_of
from ..runtime.rest import free_unit
from ..runtime.unit import Unit


class FSDP1Handle:
    """A handle of `unit`; names that are not here are the engine's own."""

    def __init__(self, unit: Unit, handle: FlatParamHandle) -> None:
        self._unit = unit
        self._engines = handle

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_engines":  # while it is copied
            raise AttributeError(name)
        return getattr(self._engines, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FSDP1Handle) and other._engines is self._engines

    def __hash__(self) -> int:
        return hash(self._engines)

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The dtype that optimizers see. Accelerate sets it after `flat_param.data`."""
        return self._engines._orig_param_dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        self._engines._orig_param_dtype = dtype

    @property
    def _offload_params(self) -> bool:
        """Whether the shard is on the CPU, and only its unsharded form elsewhere."""
        return self._engines.options.offload

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move or cast the shard, and its gradient, as `torch.Tensor.to`.

        Raises:
            UsageError: a forward awaits its backward.
        """
        unit, handle = self._unit, self._engines
        if not unit.shows_shard:
            raise UsageError(
                f"flat_param_to() of unit {unit.label}: expected to be called between iterations; a forward here still "
                "awaits its backward"
            )
        free_unit(unit)
        with torch.no_grad():
            moved = handle.shard.to(*args, **kwargs)
            if moved is not handle.shard:
                unit.views[unit.handles.index(handle)].replace_shard(moved)
        model_of(unit).setup.placed = False

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Free what is kept of the unit unsharded, if `free_unsharded_flat_param`. Every rank calls it at the same
        point."""
        if free_unsharded_flat_param:
            model_of(self._unit).reshard(self._unit)
