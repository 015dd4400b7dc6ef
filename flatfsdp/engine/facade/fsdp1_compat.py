"""FSDP1's names for our state in one place: those that Accelerate, transformers, PEFT, Lightning, verl and DCP use.

Read-only except those that programs set after construction: both kinds of prefetch, the limit of gathers, `_is_root`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, TrainingState, check_bool
from ...errors import ConfigValueError, UsageError
from ..config.arguments import member
from ..flat.faces import fact_of
from ..flat.flat_param import FlatParameter, FlatParamHandle
from ..flat.states import IDLE, SUMMONED, UNSHARDED
from ..flat.views import SHOWS_UNSHARDED
from ..models.rest import check_outside, free_unit, quiesce, reshard
from ..models.walks import ignored_in
from ..runtime.model import model_of
from ..runtime.unit import Unit
from ..state.dcp_state_dict import register_wrappers
from .schedule_api import check_prefetches_on_request


class FSDP1Handle:
    """The handle of a flat parameter of `unit`: verl uses it to move shards to the CPU between phases of a step. Names
    that are not here are the engine's own."""

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
        """The dtype that optimizers see. Accelerate sets it after `flat_param.data`, which the next forward adopts."""
        return self._engines.precision.master

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        if dtype != self._engines.flat_param.dtype:
            raise UsageError(
                f"_orig_param_dtype of unit {self._unit.label}: got {dtype}, but its flat parameter has "
                f"{self._engines.flat_param.dtype}; assign flat_param.data first"
            )

    @property
    def _offload_params(self) -> bool:
        """Whether the shard is on the CPU, and only its unsharded form on the device."""
        return self._engines.options.offload

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move or cast the shard, and its gradient, as `torch.Tensor.to`.

        Raises:
            UsageError: a forward awaits its backward.
        """
        unit, handle = self._unit, self._engines
        if not unit.shows_shard:
            raise UsageError(
                f"flat_param_to() of unit {unit.label}: expected to be called between iterations, but a forward here "
                "is still waiting for its backward"
            )
        free_unit(unit)
        with torch.no_grad():
            moved = handle.shard.to(*args, **kwargs)
            if moved is not handle.shard:
                unit.views[unit.handles.index(handle)].replace_shard(moved)
        model_of(unit).setup.placed = False

    @contextmanager
    def to_cpu(self) -> Iterator[torch.Tensor]:
        """A context in which the unsharded flat parameter is on the CPU only, 1-D and without padding.

        Yields it; `flat_param` shows it, too, and the leaves refuse to be used. Writes to it are kept for as long as
        the parameters stay unsharded. On a CPU it is a copy in memory of its own.

        Raises:
            UsageError: the parameters are sharded, or the unsharded ones are the shard itself.
        """
        handle = self._engines
        views, buffer = self._unit.views[self._unit.handles.index(handle)], handle.unsharded.buffer
        if handle.state is not UNSHARDED or buffer is None:
            found = "not sharded at all" if handle.is_unsharded_at_rest else handle.state.value
            raise UsageError(
                f"to_cpu() of unit {handle.label}: expected unsharded parameters in memory separate from their shard, "
                f"as inside its forward; they are {found}"
            )
        numel = handle.layout.numel
        on_cpu = torch.empty(numel, dtype=buffer.tensor.dtype, device="cpu")
        on_cpu.copy_(buffer.tensor[:numel])
        views.hide(range(len(handle.leaves)))
        views.show_flat(on_cpu)
        buffer.free()
        try:
            yield on_cpu
        finally:
            buffer.allocate()
            buffer.tensor[:numel].copy_(handle.flat_param.detach())
            buffer.tensor[numel:].zero_()
            views.show_flat(handle.shard)
            views.show(SHOWS_UNSHARDED)

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Free the unit's unsharded parameters that are kept, if `free_unsharded_flat_param`. Every rank calls it at
        the same point."""
        if free_unsharded_flat_param:
            reshard(self._unit)


class FSDP1Names:
    """Properties of the wrapper under the names that FSDP1 gave them."""

    _is_fsdp_managed_module = True
    _fsdp_use_orig_params = True  # for torch.compile: it may look into the forward of a module that holds this one
    _unit: Unit

    @property
    def params(self) -> list[FlatParameter]:
        """The flat parameters of this unit."""
        return [handle.flat_param for handle in self._unit.handles]

    @property
    def _all_handles(self) -> list[FSDP1Handle]:
        """The whole model's handles, on its outermost wrapper after the first forward; as in FSDP1, none elsewhere."""
        units = model_of(self._unit).units if self._is_root else []
        return [FSDP1Handle(unit, handle) for unit in units for handle in unit.handles]

    @property
    def _handle(self) -> FSDP1Handle | None:
        """The handle of the first kind of parameters of this unit."""
        return FSDP1Handle(self._unit, self._unit.handles[0]) if self._unit.handles else None

    @property
    def flat_param(self) -> FlatParameter | None:
        """The flat parameter of the first kind."""
        return self._unit.handles[0].flat_param if self._unit.handles else None

    _flat_param = flat_param
    _has_params = property(lambda self: bool(self._unit.handles))

    @property
    def _is_root(self) -> bool | None:
        """Whether this is the outermost wrapper; None before the first forward."""
        model = model_of(self._unit)
        return model.outermost is self._unit if model.setup.ready else None

    @_is_root.setter
    def _is_root(self, value: bool) -> None:
        # verl sets it so that FSDP1 lets it summon the parameters of a wrapper inside, which is always allowed here.
        pass

    @property
    def _fqn_modifiers(self) -> Any:
        # torch's get_state_dict and set_state_dict read this first. [Note: get_state_dict]
        register_wrappers(FSDP1Names)
        raise AttributeError("_fqn_modifiers")  # the wrapped module's own, if it has one

    def _lazy_init(self) -> None:
        """Run the initialization of the first forward: name and connect units, compare ranks. Collective."""
        quiesce([self._unit], shards=False)

    @property
    def process_group(self) -> Any:
        """The process group over which parameters are sharded (replicated, under NO_SHARD)."""
        group = self._unit.groups.given
        return group[0] if isinstance(group, tuple) else group

    @property
    def rank(self) -> int:
        """This rank in `process_group`."""
        return int(self.process_group.rank())

    @property
    def world_size(self) -> int:
        """The size of `process_group`."""
        return int(self.process_group.size())

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy of this unit."""
        return self._unit.groups.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes of this unit."""
        return self._unit.built.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """The placement of shards between iterations."""
        return self._unit.built.cpu_offload

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward gathers ahead. May be set between iterations, on all ranks, except to BACKWARD_MID."""
        return self._unit.options.backward_prefetch

    @backward_prefetch.setter
    def backward_prefetch(self, value: BackwardPrefetch | str | None) -> None:
        chosen = member("backward_prefetch", value, BackwardPrefetch)
        _change_prefetch(self._unit, "backward_prefetch", chosen, self._unit.options.forward_prefetch)

    @property
    def forward_prefetch(self) -> bool:
        """Whether forward gathers the next unit early. May be set between iterations, on all ranks."""
        return self._unit.options.forward_prefetch

    @forward_prefetch.setter
    def forward_prefetch(self, value: bool) -> None:
        check_bool("forward_prefetch", value)
        _change_prefetch(self._unit, "forward_prefetch", self._unit.options.backward_prefetch, value)

    @property
    def limit_all_gathers(self) -> bool:
        """Whether gathers of the model wait until memory is free. May be set between iterations, on any wrapper of the
        model, for all of them."""
        return self._unit.resources.limiter.limit

    @limit_all_gathers.setter
    def limit_all_gathers(self, value: bool) -> None:
        check_bool("limit_all_gathers", value)
        check_outside(self._unit, "limit_all_gathers")
        self._unit.resources.limiter.limit = value

    @property
    def _use_orig_params(self) -> bool:
        # A wrapper without parameters reports the others' value: all wrappers of an FSDP1 model agree.
        units = [self._unit, *model_of(self._unit).units]
        return fact_of(handle.face for unit in units for handle in unit.handles)[1] == str(True)

    _device_mesh = property(attrgetter("_unit.built.device_mesh"))
    _use_full_prec_in_eval = property(attrgetter("_unit.built.mixed_precision.full_precision_in_eval"))
    _state_dict_type = property(attrgetter("_unit.options.state_dict.state_dict_type"))
    _state_dict_config = property(attrgetter("_unit.options.state_dict.state_dict_config"))
    _optim_state_dict_config = property(attrgetter("_unit.options.state_dict.optim_state_dict_config"))

    _comm_hook = property(lambda self: getattr(self._unit.options.comm_hook, "function", None))
    _comm_hook_state = property(lambda self: getattr(self._unit.options.comm_hook, "state", None))
    _inter_node_pg = property(lambda self: group[1] if isinstance(group := self._unit.groups.given, tuple) else None)

    @property
    def _sync_gradients(self) -> bool:
        """Whether the next backward reduces this unit's gradients."""
        return model_of(self._unit).backwards.sync and self._unit.options.schedule.reduce

    @property
    def _gradient_predivide_factor(self) -> float:
        """FSDP1's, for hooks that divide before and after a sum: a power of two near the root of the number of ranks.

        The engine's own divisor, and when it applies, follows from `MixedPrecision`.
        """
        world, factor = self.world_size, 1
        while factor * factor < world and world % factor == 0:
            factor *= 2
        return float(factor)

    _gradient_postdivide_factor = property(lambda self: self.world_size / self._gradient_predivide_factor)

    @property
    def _ignored_modules(self) -> set[nn.Module]:
        return {module for module, attributes in ignored_in(self._unit.entries.first) if attributes is None}

    @property
    def _ignored_params(self) -> set[nn.Parameter]:
        return {
            parameter
            for module, attributes in ignored_in(self._unit.entries.first)
            for name, parameter in module._parameters.items()
            if parameter is not None and (attributes is None or name in attributes)
        }

    @property
    def compute_device(self) -> torch.device:
        """The device on which this unit computes."""
        return model_of(self._unit).resources.device.device

    @property
    def training_state(self) -> TrainingState:
        """Idle, in forward or backward, or summoned."""
        phase = self._unit.phase
        if phase is IDLE:
            return TrainingState.IDLE
        return TrainingState.SUMMON_FULL_PARAMS if phase is SUMMONED else TrainingState.FORWARD_BACKWARD

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper of its model. Collective if no collective operation came before."""
        self._lazy_init()
        return bool(self._is_root)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        """The wrappers in `module`, itself included, parents first; with `root_only` only outermost ones."""
        found = [each for each in module.modules() if isinstance(each, FSDP1Names)]
        return [each for each in found if not root_only or model_of(each._unit).outermost is each._unit]


def _change_prefetch(unit: Unit, setting: str, backward: BackwardPrefetch | None, forward: bool) -> None:
    check_outside(unit, setting)
    if backward is BackwardPrefetch.BACKWARD_MID and not unit.built.counts_gradients:
        raise ConfigValueError(
            f"backward_prefetch of unit {unit.label}: got BACKWARD_MID, which counts gradients from the first "
            "forward on. Pass it to the constructor"
        )
    set_options, before = model_of(unit).setup.set_options, unit.options
    named = {"prefetch_was_set": True, "names_prefetch": True}
    set_options(unit, backward_prefetch=backward, forward_prefetch=forward, **named)
    if unit.options.schedule.unshard_async_op:
        try:
            check_prefetches_on_request(unit, "set_unshard_async_op")
        except ConfigValueError:
            set_options(
                unit, backward_prefetch=before.backward_prefetch, forward_prefetch=before.forward_prefetch, **named
            )
            raise
