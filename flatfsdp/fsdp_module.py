"""`fully_shard` and related functions: signatures, documentation, delegation. No logic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from .api import DEFAULT_PREFETCH, BackwardPrefetch
from .engine.base import _dynamo
from .engine.facade.schedule_api import UnshardHandle
from .engine.fully_shard import in_place
from .engine.fully_shard.arguments import check_call
from .engine.fully_shard.class_swap import new_does_not_init, new_plain
from .engine.fully_shard.controls import FSDP2Controls, share_streams
from .engine.fully_shard.copies import reduce
from .engine.fully_shard.meshes import DataParallelMeshDims, ShardPlacementResult
from .engine.fully_shard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .engine.runtime.model import model_of
from .engine.wrapping.serialization import deep_copy

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "UnshardHandle",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "fully_shard_by_policy",
    "share_comm_ctx",
]

M = TypeVar("M", bound=nn.Module)
Given = TypeVar("Given", bound=nn.Module | list[Any])


class FSDPModule(FSDP2Controls):
    """The class that a module additionally has after `fully_shard`: it gathers its parameters around its forward.

    Its class derives from this one and from the class that it had; `type(module)(...)` makes an instance of the latter.
    Calling it runs hooks, checkpointing around its forward, and the result of `module.compile()`, with unsharded
    parameters. `module.forward(...)` does not gather. It may be copied between steps, and pickled if no parameter was a
    DTensor.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return new_plain(cls, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _dynamo.stay_out_of_graphs()
        unit = self.__dict__["_unit"]
        model = unit.model() or model_of(unit)  # which refuses; every unit comes here
        return model.forwards.run(unit, args, kwargs, call=super().__call__, entry=self)  # type: ignore

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        in_place.apply(self, fn, lambda: super(FSDPModule, self)._apply(fn, recurse))  # type: ignore[misc, arg-type]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deep_copy(self, memo)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduce(self, FSDPModule)  # type: ignore[arg-type]


def fully_shard(
    module: Given,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    layout: Mapping[Any, Any] | Callable[[str, nn.Parameter], Any] | type[torch.optim.Optimizer] | None = None,
    deterministic_sums: bool = False,
) -> Given:
    """Shard the parameters of a module over ranks, in place: as FSDP2's function of that name.

    Parameters of `module` that do not belong to a module that is already sharded become one *unit*: each rank keeps a
    part of them, they are gathered for the module's forward and backward, and their gradients are averaged over ranks.
    Shard inner modules first, the whole model last; then build the optimizer. The model is called as before. A module
    inside may also be called separately, before the model or after it.

    All modules of a list form one unit. It is gathered for the first of them that runs in a forward, and freed when
    all have run, else at the end of the model's forward or in its backward; one that is called separately later stays
    gathered until the backward. Modules of the list that are inside other modules of the list are ignored.

    Tensors on the meta device stay there until `model.to_empty(device=...)`, or until a state dict is loaded; the first
    forward refuses tensors that are still there, by name.

    Args:
        module: a module with a forward, or a list of such.
        mesh: the ranks: a 1-D DeviceMesh, or a 2-D one with named axes (replicate, shard); its device type is that of
            the computation. None for all ranks of the default process group, which must exist.
        reshard_after_forward: whether parameters are freed between forward and backward, or the number of ranks among
            which they stay, as in `set_reshard_after_forward`. None: freed, except for the outermost module.
        shard_placement_fn: `shard_placement_fn(parameter)` is the placement of a parameter: `Shard(dim)`, or None for
            `Shard(0)`. Sizes need not be multiples of the number of ranks. A parameter is stored with `dim` as the
            slowest dimension in memory, which its views in forwards show by their strides. For a DTensor each rank's
            local tensor is split, along a dimension of its placements or another one. A `ShardPlacementResult`, ours
            or torch's, also has a mesh, over which this parameter is sharded instead of `mesh`, for example those of
            experts. It is gathered, freed and reduced together with the other parameters of the unit.
        mp_policy: a `MixedPrecisionPolicy`; None leaves all dtypes unchanged. Or the wrapper's `MixedPrecision`, for
            its additional fields: the dtype of buffers, parameters and gradients that are sent in few bits.
        offload_policy: a `CPUOffloadPolicy`, or None for none. torch's own policies are accepted.
        ignored_params: parameters that are left unchanged, in any module.
        dp_mesh_dims: a `DataParallelMeshDims`, ours or torch's. Then `mesh` is the mesh of all axes, and parameters are
            DTensors on it with `Replicate()` along the named dimensions, with which modules compute there: inputs are
            also DTensors of that mesh. Gradients that are partial sums along these dimensions are summed, and divided
            as set by `set_gradient_divide_factor`. Needs torch 2.13.
        layout: the grains of parameters, see `flatfsdp.layout`: by names of parameters or of modules, by modules, or a
            callable `(name, parameter)` that returns a grain or None; or a class of optimizers, for the grains that
            suit it. Here they are checked: each rank has the rows that `torch.chunk` gives it, and where these end
            inside of a grain that is not `Preferred`, the call is refused. Not in FSDP2.
        deterministic_sums: as for `FullyShardedDataParallel`. Not in FSDP2.

    Returns:
        `module`, or the list, whose classes now derive from `FSDPModule` as well.

    Raises:
        ConfigTypeError, ConfigValueError: an argument; the message names it, the given value and the accepted ones.
        UsageError: there is no process group, or a module was sharded before, or has a `FullyShardedDataParallel`
            inside.

    Communicates only to create communicators over the ranks of the mesh, the first time.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> for layer in model:
        ...     _ = flatfsdp.fully_shard(layer)
        >>> flatfsdp.fully_shard(model)(torch.ones(4, 2)).shape
        torch.Size([4, 1])
    """
    call = check_call(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
        layout=layout,
        deterministic_sums=deterministic_sums,
    )
    in_place.shard(call, FSDPModule)
    return module


def fully_shard_by_policy(
    module: M,
    policy: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    sync_module_states: bool = False,
    backward_prefetch: BackwardPrefetch | str | None = DEFAULT_PREFETCH,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    layout: Mapping[Any, Any] | Callable[[str, nn.Parameter], Any] | type[torch.optim.Optimizer] | None = None,
    deterministic_sums: bool = False,
) -> M:
    """`fully_shard` for the modules inside `module` that a policy chooses, children first, then for `module`.

    Tensors on the meta device get memory and values as they are sharded, one unit after the other, so that no rank ever
    has more than one of them unsharded. With the wrapper's `MixedPrecision` as `mp_policy` batch norms become units in
    full precision, as there.

    Args:
        module: the whole model.
        policy: as the wrapper's `auto_wrap_policy`: a set of module classes, a policy of `flatfsdp.wrap`, or a callable
            `(module, recurse, nonwrapped_numel) -> bool`; None for a single unit. A policy that sets arguments for
            single units may set some of those below.
        mesh, reshard_after_forward, shard_placement_fn, mp_policy, offload_policy, ignored_params: as for
            `fully_shard`, for every unit. With None for `reshard_after_forward`, only the outermost unit stays
            unsharded.
        param_init_fn, sync_module_states, backward_prefetch, forward_prefetch, limit_all_gathers, deterministic_sums:
            as for `FullyShardedDataParallel`.
        layout: as for `fully_shard`, with names in `module`.

    Returns:
        `module`.

    Raises:
        ConfigTypeError, ConfigValueError: an argument; the message names it, the given value and the accepted ones.
        UsageError: as for `fully_shard`; a module on the meta device cannot be given values. Units that were sharded
            before stay so.

    Communicates only to create communicators, the first time, and with `sync_module_states`.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> flatfsdp.fully_shard_by_policy(model, {torch.nn.Linear})(torch.ones(4, 2)).shape
        torch.Size([4, 1])
    """
    given = {name: value for name, value in locals().items() if name not in ("module", "policy")}
    in_place.shard_by_policy(module, policy, FSDPModule, given)
    return module


def disable_fsdp_module_new_init() -> AbstractContextManager[None]:
    """A context in which `type(module)(...)` of a sharded module makes an instance that is not initialized."""
    return new_does_not_init()


def share_comm_ctx(modules: list[Any]) -> None:
    """Let outermost modules of several models issue their collectives on the same streams, like stages of a pipeline.

    Without effect if there are no streams.

    Args:
        modules: outermost modules of `fully_shard`, between iterations.

    Raises:
        ConfigTypeError: one of them is not such a module.
        UsageError: one is inside another, or a forward or a backward runs.
    """
    share_streams(modules, FSDPModule)
