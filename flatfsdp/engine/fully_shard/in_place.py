"""Operations of modules that hold their unit themselves: sharding and moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import one_rank_warns
from ..agreement.process_groups import is_first_of, resolve_groups
from ..dtensor.gather_extensions import ExtendedParam, GatherExtensions
from ..dtensor.row_face import RowFaces
from ..dtensor.tensor_parallel import StoredDTensor
from ..guards import enclosing_ddp
from ..runtime.unit import Unit
from ..transforms.extensions import TransformedParam
from ..wrapping.build import Front, build_unit
from ..wrapping.shared_storage import follow_ties
from ..wrapping.wrapper_support import apply_to_tensors, keep_model
from .arguments import CALL, Call
from .class_swap import swap_class
from .placements import orders_of
from .state_dicts import watch

# Units whose shards the running call of `_apply` has changed; None outside of one.
_changed: list[Unit] | None = None


def shard(call: Call, front_class: type) -> None:
    """Make one unit of the modules of `call`, and give them classes that also derive from `front_class`."""
    dims = _by_path(call, call.dims)
    with one_rank_warns(this_rank=is_first_of(None, call.config.device_mesh)):
        if call.dims:
            follow_ties(call.holder, (), call.config.ignored_params)  # before memory is laid out in another order
        orders = orders_of(call.dims)
        front = Front(
            f"{CALL}()",
            call.modules,
            call.output_dtype,
            _faces,
            lambda parallel: (GatherExtensions(parallel, call.policy, dims), parallel),
            call.materializes,
            call.mesh.spmd,
            call.elsewhere,
            _by_path(call, orders),
        )
        model = build_unit(call.holder, resolve_groups(call.config), island=call.island, front=front)
    enclosing_ddp.watch(front_class)
    for module in call.modules:
        swap_class(module, front_class)
        module.__dict__["_unit"] = model.outermost
    keep_model(call.modules[0], model)
    watch(model.outermost)


def _by_path(call: Call, dims: Mapping[nn.Parameter, int]) -> dict[str, int]:
    by_path = call.holder.named_parameters(remove_duplicate=False)
    return {path: dims[parameter] for path, parameter in by_path if parameter in dims}


def _faces(transformed: Sequence[TransformedParam], leaves: Sequence[nn.Parameter], mesh: Any) -> RowFaces:
    """Makes the DTensors of `leaves` on `mesh`, and also on that of tensor parallelism if they lie on one."""
    states = {id(each.leaf): each.state for each in transformed}
    found = [states.get(id(leaf)) for leaf in leaves]
    extended = [each if isinstance(each, ExtendedParam) else None for each in found]
    outer = [one if more is None else more.outer for one, more in zip(found, extended, strict=True)]
    stored = [each if isinstance(each, StoredDTensor) else None for each in outer]
    return RowFaces(mesh, tuple(stored), tuple(None if each is None else each.hooks for each in extended))


# -- moves and casts ---------------------------------------------------------------------------------------------------


def apply(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], change_others: Callable[[], Any]) -> None:
    """Let `change` cast, move or empty the shards of the unit of `module`, once for all of its entries, and
    `change_others()` all other tensors in `module`."""
    unit: Unit = module.__dict__["_unit"]
    with _applying() as changed:
        is_first = unit not in changed
        changed.append(unit)
        apply_to_tensors(module, change, change_others, shards=is_first)


@contextmanager
def _applying() -> Iterator[list[Unit]]:
    global _changed
    before = _changed
    _changed = [] if before is None else before
    try:
        yield _changed
    finally:
        _changed = before
