"""Differences between the fronts of the engine, for the rest of the trainer: `FullyShardedDataParallel` wraps the
model; after `fully_shard`, the model itself holds its parameters, as DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import FSDPModule, FullStateDictConfig, FullyShardedDataParallel, collective_region
from flatfsdp.errors import CheckpointError, UsageError, few
from flatfsdp.trainer.process_group import TrainerRanks


def inside(model: nn.Module) -> nn.Module:
    """The model as its author wrote it, without a wrapper."""
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of `module` as its author wrote it."""
    kind = type(module)
    return kind.__bases__[-1] if isinstance(module, FSDPModule) else kind


def sharded_inside(model: nn.Module) -> list[nn.Module]:
    """The modules of the units inside `model` except the outermost, in the order of `modules()`."""
    if isinstance(model, FullyShardedDataParallel):
        wrappers = FullyShardedDataParallel.fsdp_modules(model)
        return [inside(each) for each in wrappers if each is not model]
    return [each for each in model.modules() if isinstance(each, FSDPModule) and each is not model]


@contextmanager
def without_reductions(model: Any) -> Iterator[None]:
    """A context whose backwards accumulate unsharded gradients, until the next backward outside of it reduces them."""
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    except BaseException:
        with suppress(UsageError):  # the failed backward may not be finished
            model.set_requires_gradient_sync(True)
        raise
    model.set_requires_gradient_sync(True)


# --- whole values -----------------------------------------------------------------------------------------------------


def whole_parameters(model: nn.Module, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """The parameters with `wanted` names, unsharded, one unit or one parameter after the other. Collective."""
    if not isinstance(model, FullyShardedDataParallel):
        for name, parameter in model.named_parameters():
            if wanted(name):
                yield name, _whole(parameter.detach())
        return
    wrappers = [(path, each) for path, each in model.named_modules() if isinstance(each, FullyShardedDataParallel)]
    for path, wrapper in wrappers:
        with FullyShardedDataParallel.summon_full_params(wrapper, recurse=False, writeback=False):
            yield from ((name, each.detach()) for name, each in _own_parameters(wrapper.module, path) if wanted(name))


def _own_parameters(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of `module` and its submodules outside of inner wrappers, by their names in the model."""
    yield from module.named_parameters(path, recurse=False)
    for name, child in module.named_children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _own_parameters(child, f"{path}.{name}" if path else name)


def whole_state(model: nn.Module, ranks: TrainerRanks) -> dict[str, Tensor]:
    """The unsharded state dict, in separate host memory, on rank 0; empty on the others. Collective."""
    if holds_wrappers(model):
        with _on_rank_0(model):
            state: dict[str, Tensor] = model.state_dict()
            return state if ranks.rank == 0 else {}
    found: dict[str, Tensor] = {}
    made: dict[int, Any] = {}  # tied parameters share memory
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in made:  # equal on all ranks: each gathers tied parameters once
            whole = _whole(value.detach()) if isinstance(value, Tensor) else value
            kept = whole.to("cpu", copy=True) if ranks.rank == 0 and isinstance(value, Tensor) else whole
            made[id(value)] = kept if ranks.rank == 0 else None
        if ranks.rank == 0:
            found[name] = made[id(value)]
    return found


def load_whole_state(model: nn.Module, state: dict[str, Tensor], ranks: TrainerRanks, *, doing: str) -> None:
    """Load the unsharded state dict of rank 0. Collective.

    Raises:
        CheckpointError: on every rank: it does not fit, or the model has extra state under fully_shard. Nothing has
            been loaded then.
    """
    if holds_wrappers(model) or not any(isinstance(each, FSDPModule) for each in model.modules()):

        def load() -> None:
            model.load_state_dict(state)

        with _on_rank_0(model):
            ranks.collective_call(doing, load)
        return
    own = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict(keep_vars=True).items()}
    if others := [name for name, value in own.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"{doing}: with front='fully_shard', extra state is not loaded from a file of whole "
            f"weights: {few(others)}. Resume from a checkpoint of flatfsdp, or load it in your own program"
        )
    ranks.collective_call(doing, lambda: _check_fits(state, own) if ranks.rank == 0 else None)
    done: set[int] = set()
    with torch.no_grad(), collective_region():
        for name, value in own.items():
            if isinstance(value, Tensor) and id(value) not in done:
                done.add(id(value))
                _take(value, state.get(name))


def _check_fits(state: dict[str, Tensor], own: dict[str, Any]) -> None:
    missing, unexpected = own.keys() - state.keys(), state.keys() - own.keys()
    shapes = [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape]
    lines = {"missing": missing, "not in the model": unexpected, "with another shape": shapes}
    if any(lines.values()):
        raise CheckpointError("; ".join(f"{words}: {few(sorted(names))}" for words, names in lines.items() if names))


def _take(value: Any, whole: Tensor | None) -> None:
    """Copy rank 0's `whole` tensor, or this rank's rows of it, into `value`."""
    if not hasattr(value, "to_local"):
        device = value.device
        sent = torch.empty_like(value) if whole is None else whole.to(device, value.dtype).contiguous()
        dist.broadcast(sent, 0)
        value.copy_(sent)
        return
    from torch.distributed.tensor import distribute_tensor

    device = value.device_mesh.device_type
    sent = torch.empty(value.shape, device=device) if whole is None else whole
    sent = sent.to(device, value.dtype)
    value.to_local().copy_(distribute_tensor(sent, value.device_mesh, value.placements).to_local())


def _whole(value: Any) -> Tensor:
    if not hasattr(value, "full_tensor"):
        return value
    with collective_region():
        # Shards may be on the host, where NCCL has no operation; gloo gathers DTensors only from the host.
        mesh = value.device_mesh
        by_host = all(dist.get_backend(group) == "gloo" for group in mesh.get_all_groups())
        found: Tensor = value.to("cpu" if by_host else mesh.device_type).full_tensor()
        return found.to(mesh.device_type)


def holds_wrappers(model: nn.Module) -> bool:
    """Whether `model` is or contains a `FullyShardedDataParallel`."""
    return any(isinstance(each, FullyShardedDataParallel) for each in model.modules())


def _on_rank_0(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, state dicts are unsharded, in the host memory of rank 0."""
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    return FullyShardedDataParallel.state_dict_type(model, "FULL", config)
