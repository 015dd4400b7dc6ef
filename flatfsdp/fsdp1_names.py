"""FSDP1's names for our state, read-only and in one place: what Accelerate, transformers, PEFT, Lightning and DCP
touch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, TrainingState
from .dcp_state_dict import teach
from .flat_param import FlatParameter, FlatParamHandle
from .lifecycle import IDLE, SUMMONED

if TYPE_CHECKING:
    from .unit import Unit


class FSDP1Names:
    """Properties of the wrapper under the names that FSDP1 gave them."""

    _is_fsdp_managed_module = True
    _unit: Unit

    @property
    def params(self) -> list[FlatParameter]:
        """The flat parameters of this unit."""
        return [handle.flat_param for handle in self._unit.handles]

    @property
    def _all_handles(self) -> list[FlatParamHandle]:
        """One handle per kind of parameter in this unit."""
        return list(self._unit.handles)

    @property
    def _handle(self) -> FlatParamHandle | None:
        return self._unit.handles[0] if self._unit.handles else None

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.handles)

    @property
    def flat_param(self) -> FlatParameter | None:
        """The flat parameter of the first kind."""
        return self._unit.handles[0].flat_param if self._unit.handles else None

    @property
    def _flat_param(self) -> FlatParameter | None:
        return self.flat_param

    @property
    def _is_root(self) -> bool | None:
        """Whether this is the outermost wrapper; None before the first forward."""
        root = self._unit.root
        return root.unit is self._unit if root.ready else None

    @property
    def _fqn_modifiers(self) -> Any:
        # torch's get_state_dict and set_state_dict ask for this before anything else. [Note: get_state_dict]
        teach(FSDP1Names)
        raise AttributeError("_fqn_modifiers")  # the wrapped module's own, if it has one

    def _lazy_init(self) -> None:
        """Do what the first forward does first: name and connect units, compare ranks. Collective."""
        self._unit.root.lazy_init()

    @property
    def _fsdp_use_orig_params(self) -> bool:
        # torch.compile asks whether it may look into the forward of a module that holds this one.
        return True

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
        return self._unit.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Where shards rest."""
        return self._unit.cpu_offload

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward gathers ahead."""
        return self._unit.backward_prefetch

    @property
    def compute_device(self) -> torch.device:
        """Where this unit computes."""
        return self._unit.root.device.device

    @property
    def training_state(self) -> TrainingState:
        """Idle, in forward or backward, or summoned."""
        phase = self._unit.phase
        if phase is IDLE:
            return TrainingState.IDLE
        return TrainingState.SUMMON_FULL_PARAMS if phase is SUMMONED else TrainingState.FORWARD_BACKWARD


def wrapped_inside(module: nn.Module, *, root_only: bool) -> Iterator[nn.Module]:
    """Wrappers in `module`, itself included, in the order of `modules()`; with `root_only` outermost ones."""
    for each in module.modules():
        if isinstance(each, FSDP1Names) and (not root_only or each._unit.root.unit is each._unit):
            yield each
