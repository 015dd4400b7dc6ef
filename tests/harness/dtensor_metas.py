"""The server of ranks imports this: operations on DTensors find the shapes of their outputs once in a process.

torch computes them again for each mesh and each placement, on fake tensors, and notes the stack of its caller for each
time: together a twentieth of the ranks' time.
"""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._sharding_prop import ShardingPropagator

_compute = ShardingPropagator._propagate_tensor_meta_non_cached
_known: dict[Any, Any] = {}


def _key(value: Any) -> Any:
    """What the outputs depend on."""
    if isinstance(value, DTensorSpec):
        return value.mesh.device_type, value.tensor_meta
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return type(value), value


def _of_outputs(self: ShardingPropagator, schema: Any) -> Any:
    arguments = _key(schema.args_schema), _key(tuple(schema.kwargs_schema.items()))
    key = schema.op, torch.get_default_dtype(), arguments
    try:
        found = _known.get(key)
    except TypeError:  # sizes that are not known yet, as torch.compile has them, have no hash
        return _compute(self, schema)
    if found is None:
        found = _known[key] = _compute(self, schema)
    return found


ShardingPropagator._propagate_tensor_meta_non_cached = _of_outputs  # type: ignore[method-assign]
fake_tensor.traceback = SimpleNamespace(  # type: ignore[attr-defined]
    extract_stack=list, format_list=traceback.format_list
)
