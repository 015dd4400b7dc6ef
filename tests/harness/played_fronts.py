"""Operations of random programs on a sharded model, for each of the two fronts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from flatfsdp import FSDPModule, FullyShardedDataParallel, StateDictType, fully_shard_by_policy
from tests.harness.corners import full_gradients
from tests.harness.gradients import Gradients, plain
from tests.harness.meshes import named_mesh, replicas_of_shards

Shown = list[tuple[str, Tensor, Tensor | None]]


class Wrapper:
    """`FullyShardedDataParallel`."""

    @staticmethod
    def shard(net: nn.Module, policy: Any, strategy: str, settings: dict[str, Any]) -> Any:
        mesh = replicas_of_shards() if strategy == "HYBRID_SHARD" else None
        return FullyShardedDataParallel(
            net, auto_wrap_policy=policy, sharding_strategy=strategy, device_mesh=mesh, **settings
        )

    @staticmethod
    def at_rest(model: Any) -> None:
        """Called for a new `model`, whose parameters are sharded."""

    @staticmethod
    def inner(model: Any) -> Any:
        return model.module

    @staticmethod
    def units(model: Any) -> list[Any]:
        return FullyShardedDataParallel.fsdp_modules(model)

    @staticmethod
    def no_sync(model: Any) -> AbstractContextManager[None]:
        return model.no_sync()

    @staticmethod
    def shown(model: Any, with_grads: bool) -> Shown:
        """Names, unsharded values and gradients. Collective."""
        with FullyShardedDataParallel.summon_full_params(model, with_grads=with_grads, writeback=False):
            return [
                (name, p.detach().clone(), p.grad.clone() if with_grads and p.grad is not None else None)
                for name, p in model.named_parameters()
            ]

    @staticmethod
    def gradients(model: Any) -> Gradients:
        """The unsharded gradient of each trainable parameter, by name. Collective."""
        return full_gradients(model)

    @staticmethod
    def write(model: Any) -> None:
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.95)

    @staticmethod
    def state(model: Any) -> dict[str, Tensor]:
        return model.state_dict()

    @staticmethod
    def load(model: Any, state: dict[str, Tensor]) -> None:
        model.load_state_dict(state)

    @staticmethod
    def kinds(layout: str) -> list[StateDictType]:
        # The layout of rows has no local state dict.
        return [kind for kind in StateDictType if layout == "flat" or kind is not StateDictType.LOCAL_STATE_DICT]

    @staticmethod
    def own_state(model: Any, kind: StateDictType) -> AbstractContextManager[Any]:
        return FullyShardedDataParallel.state_dict_type(model, kind)


# The DTensors of a model, which modules hold only at rest.
_held: WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = WeakKeyDictionary()


class InPlace(Wrapper):
    """`fully_shard`."""

    @staticmethod
    def shard(net: nn.Module, policy: Any, strategy: str, settings: dict[str, Any]) -> Any:
        world = torch.distributed.get_world_size()
        made = fully_shard_by_policy(
            net,
            policy,
            mesh=named_mesh(2, world // 2) if strategy == "HYBRID_SHARD" else named_mesh(world),
            reshard_after_forward=settings.get("reshard_after_forward", False if strategy == "SHARD_GRAD_OP" else None),
            mp_policy=settings["mixed_precision"],
            offload_policy=_offload(settings["cpu_offload"]),
            **{name: settings[name] for name in ("backward_prefetch", "forward_prefetch", "limit_all_gathers")},
        )
        InPlace.at_rest(made)
        return made

    @staticmethod
    def at_rest(model: Any) -> None:
        _held[model] = {plain(name): parameter for name, parameter in model.named_parameters()}

    @staticmethod
    def inner(model: Any) -> Any:
        return model

    @staticmethod
    def units(model: Any) -> list[Any]:
        return [each for each in model.modules() if isinstance(each, FSDPModule)]

    @staticmethod
    @contextmanager
    def no_sync(model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    @staticmethod
    def shown(model: Any, with_grads: bool) -> Shown:
        return [
            (name, whole(p), whole(p.grad) if with_grads and p.grad is not None else None)
            for name, p in _held[model].items()
        ]

    @staticmethod
    def gradients(model: Any) -> Gradients:
        trained = {name for name, p in _held[model].items() if p.requires_grad}
        return {name: grad for name, _, grad in InPlace.shown(model, True) if name in trained}

    @staticmethod
    def write(model: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list(_held[model].values()), 0.95)

    @staticmethod
    def state(model: Any) -> dict[str, Tensor]:
        return {name: whole(value) for name, value in model.state_dict().items()}

    @staticmethod
    def load(model: Any, state: dict[str, Tensor]) -> None:
        own = model.state_dict()
        model.load_state_dict(
            {
                name: distribute_tensor(value, own[name].device_mesh, own[name].placements)
                for name, value in state.items()
            }
        )

    @staticmethod
    def kinds(layout: str) -> list[StateDictType]:
        return [StateDictType.SHARDED_STATE_DICT]

    @staticmethod
    @contextmanager
    def own_state(model: Any, kind: StateDictType) -> Iterator[None]:
        yield


def _offload(offload: Any) -> Any:
    from flatfsdp import CPUOffloadPolicy

    return CPUOffloadPolicy() if offload.offload_params else None


def whole(value: Any) -> Tensor:
    """An unsharded copy; also accepts a plain tensor. Collective for a DTensor."""
    found: Tensor = value.detach().full_tensor().clone() if isinstance(value, DTensor) else value.detach().clone()
    return found
