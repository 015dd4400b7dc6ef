"""Process groups and their axes: groups that a user passed, groups of a node's ranks, and groups of pickled models.

[Note: groups] Each group is created once and kept for as long as the group that it was created for. The creation is
collective over its members; while it waits, the watchdog's reports name the missing ones. A group of less than the
world is never split from the world's communicator, which would be collective over the world: ranks outside do not know
of it. It has the backends and the options of the group that it is like, or of these the backend that serves one device.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...api import HYBRIDS, Config, ShardingStrategy
from ...errors import ConfigValueError, UsageError, set_rank, warn_once
from ..base import _torch
from ..base.hashing import hash63
from ..base.per_group import for_group, forget_after, mark_as_made_for
from ..comm.axes import Axis, ProcessGroups, backend_for
from ..cpu.groups import mark_for_reductions
from ..device.streams import accelerator, accelerator_count
from ..watchdog.regions import expecting

# The plans in use: units over the same groups share one, so that the ranks of a large group are queried only once.
_plans: weakref.WeakValueDictionary[tuple[object, ...], ProcessGroups] = weakref.WeakValueDictionary()


def require_process_group(who: str = "FullyShardedDataParallel") -> None:
    """Raise UsageError if there is no default process group; the message has the lines that create one."""
    if not dist.is_initialized():
        raise UsageError(
            f"no process group: {who} needs torch.distributed to be initialized. Under torchrun, add\n"
            "    torch.distributed.init_process_group()\n"
            "before wrapping; in a single process without a launcher, add\n"
            '    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, '
            "world_size=1)"
        )


def resolve_groups(config: Config) -> Config:
    """`config` with its process groups made explicit: one group, or (shard group, replicate group) for the hybrids.

    Collective over the default group if a hybrid strategy was given neither groups nor a mesh.
    """
    require_process_group()
    set_rank(dist.get_rank())
    if newer := _torch.untested():
        warn_once("newer torch", newer)
    mesh, given = config.device_mesh, config.process_group
    hybrid = config.sharding_strategy in HYBRIDS
    if mesh is not None:
        if mesh.get_coordinate() is None:
            raise ConfigValueError(
                f"device_mesh: rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}. Wrap the module only "
                "on ranks that are in the mesh"
            )
        group = (mesh.get_group(1), mesh.get_group(0)) if hybrid else mesh.get_group(0)
    elif given is not None:
        group = given
    else:
        group = (
            for_group(dist.group.WORLD, "nodes", _groups_of_nodes, usable=_all_exist) if hybrid else dist.group.WORLD
        )
    return config.replace(process_group=group)


def is_first_of(process_group: Any, device_mesh: Any) -> bool:
    """Whether this rank is the lowest of those in these arguments of the user, which are not yet validated."""
    if not dist.is_initialized():
        return True
    groups = process_group if isinstance(process_group, (tuple, list)) else [process_group]
    if isinstance(getattr(device_mesh, "mesh", None), torch.Tensor):
        members = [int(device_mesh.mesh.min())]
    elif all(isinstance(group, dist.ProcessGroup) for group in groups):
        members = [min(dist.get_process_group_ranks(group)) for group in groups]
    else:
        members = [0] if process_group is None else [dist.get_rank()]
    return all(member == dist.get_rank() for member in members)


def plan_groups(config: Config, device: torch.device) -> ProcessGroups:
    """The axes for `config`, whose groups are resolved. Creates the communicator for reductions, once per group."""
    return plan_in(config.sharding_strategy, config.process_group, device)


def plan_in(strategy: ShardingStrategy, given: Any, device: torch.device) -> ProcessGroups:
    """The axes of `strategy` over the group, or the pair of groups, `given`. As `plan_groups`."""
    # A plan holds references to its groups, so their ids stay unique for as long as it exists.
    key = strategy, device, *map(id, given if isinstance(given, tuple) else [given])
    plan = _plans.get(key)
    if plan is None or not _is_usable(plan):
        plan = _plans[key] = _new_plan(strategy, given, device)
    return plan


def _is_usable(plan: ProcessGroups) -> bool:
    axes = (plan.shard, plan.scatter, plan.replicate)
    return all(_exists(axis.process_group) for axis in axes if axis is not None and axis.process_group is not None)


def _new_plan(strategy: ShardingStrategy, given: Any, device: torch.device) -> ProcessGroups:
    alone = Axis.alone()
    if strategy in HYBRIDS:
        shard_group, replicate_group = given
        across = _axis(replicate_group, device)
        mark_for_reductions(replicate_group)
        axes = _axis(shard_group, device), _axis(_for_reductions(shard_group, device), device), across
    elif strategy is ShardingStrategy.NO_SHARD:
        axes = alone, alone, _axis(_for_reductions(given, device), device)
    else:
        axes = _axis(given, device), _axis(_for_reductions(given, device), device), alone
    shard, scatter, replicate = axes
    plan = ProcessGroups(shard, scatter, replicate if replicate.size > 1 else None, strategy, given, device)
    if strategy in HYBRIDS and shard.size == 1 and plan.replicate is not None:
        count = replicate.size
        warn_once(
            ("shards nothing", replicate.ranks),
            f"{strategy.name} over {groups_in_words(plan)}, each of one rank: nothing is sharded, and every rank "
            "holds all parameters, gradients and optimizer states. A 2-D device_mesh is (replicate, shard): "
            f"({count}, 1) has one shard, (1, {count}) has {count}; in a pair of process groups the shard group comes "
            'first. Pass sharding_strategy="NO_SHARD" if this is intentional',
        )
    return plan


def _axis(process_group: Any, device: torch.device) -> Axis:
    return Axis.alone() if dist.get_world_size(process_group) == 1 else Axis.of(process_group, device)


def _for_reductions(process_group: Any, device: torch.device) -> Any:
    if dist.get_world_size(process_group) == 1:
        return process_group
    ranks = tuple(dist.get_process_group_ranks(process_group))
    backend = backend_for(process_group, device)

    def make() -> Any:
        made = new_group(ranks, "wraps a module", like=process_group, backend=backend)
        forget_after(process_group, made)  # for example shared memory
        mark_for_reductions(made)
        mark_as_made_for(process_group, made)
        return made

    return for_group(process_group, ("reductions", backend), make, usable=_exists)


def post_forward_axis(axis: Axis, count: int, device: torch.device) -> Axis:
    """The axis of this rank's `count` consecutive ranks, where `axis` is split into such runs.

    Collective over these ranks when the group is created: once per process group and `count`, which divides its size.
    """
    first, like = axis.rank - axis.rank % count, axis.process_group
    members = axis.ranks[first : first + count]
    backend = backend_for(like, device)

    def make() -> Any:
        return new_group(members, "keeps parameters after forward", like=like, backend=backend)

    return Axis.of(for_group(like, ("run", count, backend), make, usable=_exists), device)


def new_group(ranks: tuple[int, ...], doing: str, *, like: Any = None, backend: str | None = None) -> Any:
    """One more group over `ranks`, created only by them: models on different halves of the world are independent.

    Collective over `ranks`; `doing` completes "rank 0 ..." in reports of ranks that wait. Backends, time limit and
    options are those of `like`, or of the default group; `backend`: another one, or one of its. [Note: groups]
    Inside of `Connecting` the watch knows nothing of the wait.
    """
    like = dist.group.WORLD if like is None else like
    counts = for_group(dist.group.WORLD, "counts", Counter[tuple[int, ...]])  # of groups over the same ranks
    counts[ranks] += 1
    name = f"flatfsdp {hash63(str(ranks)):x} {counts[ranks]}"
    is_world = len(ranks) == dist.get_world_size()
    with (
        nullcontext() if _connecting else expecting(ranks, f"{doing} over ranks {', '.join(map(str, ranks))}"),
        _torch.name_of_group(name),
        nullcontext() if is_world else _torch.without_split(),
    ):
        return with_time_limit(
            _torch.time_limit(like),
            lambda timeout: dist.new_group(
                list(ranks),
                timeout,
                backend=backend or dist.get_backend(like),
                pg_options=_torch.nccl_options(like),
                use_local_synchronization=True,
                group_desc="flatfsdp",
            ),
        )


class Connecting:
    """Limits, inside of its `with`, the time in which the ranks of a new group connect to each other: gloo tries to
    reach one that has ended for as long as an operation may take, and nothing can break that. To the watch such a wait
    would be in vain, and one that has ended at this limit a sign that those of all ranks are: it would end processes
    that are about to try again.

    Attributes:
        failed: whether some group could not be made.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.failed = seconds, False

    def __enter__(self) -> Connecting:
        _connecting.append(self)
        return self

    def __exit__(self, *unused: object) -> None:
        _connecting.remove(self)


_connecting: list[Connecting] = []


def with_time_limit(seconds: float, make: Callable[[timedelta | None], Any]) -> Any:
    """The group that `make` returns, given a time limit, whose operations are limited to so many seconds."""
    timeout = None if math.isinf(seconds) else timedelta(seconds=seconds)
    if not _connecting or timeout is None:
        return make(timeout)
    try:
        made = make(min(timeout, timedelta(seconds=_connecting[-1].seconds)))
    except Exception:
        _connecting[-1].failed = True
        raise
    made.set_timeout(timeout)
    return made


def _exists(process_group: Any) -> bool:
    """Whether `process_group` has not been destroyed."""
    try:
        dist.get_group_rank(process_group, dist.get_rank())
    except ValueError:
        return False
    return True


def _all_exist(groups: tuple[Any, ...]) -> bool:
    return all(map(_exists, groups))


def _groups_of_nodes() -> tuple[Any, Any]:
    """This rank's groups: over the ranks of its node, and over the same local rank of all nodes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or accelerator_count()
    if local < 1 or size % local:
        source = (
            "LOCAL_WORLD_SIZE" if os.environ.get("LOCAL_WORLD_SIZE") else "the number of accelerators of this machine"
        )
        count = (
            f"{local}, from {source}, does not divide the world size of {size}" if local else "their number is unknown"
        )
        raise ConfigValueError(
            f"process_group: the hybrid strategies shard over the ranks of a node, but {count}. Launch with torchrun, "
            "or pass process_group=(shard group, replicate group) or a 2-D device_mesh (replicate, shard)"
        )
    shard = replicate = None
    with expecting(range(size), f"wraps a module over nodes of {local} ranks"):
        for start in range(0, size, local):
            members = list(range(start, start + local))
            group = dist.new_group(members)
            shard = group if rank in members else shard
        for offset in range(local):
            members = list(range(offset, size, local))
            group = dist.new_group(members)
            replicate = group if rank in members else replicate
    return shard, replicate


def plan_over(strategy: ShardingStrategy, ranks: tuple[Any, ...], device: torch.device) -> ProcessGroups:
    """The axes of `strategy` over these global ranks, in existing or new groups.

    Collective over the members if a group is created.
    """
    if strategy in HYBRIDS:
        return plan_in(strategy, tuple(_group_over(each) for each in ranks), device)
    return plan_in(strategy, _group_over(ranks), device)


def _group_over(ranks: tuple[int, ...]) -> Any:
    require_process_group()
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    if dist.get_rank() not in ranks:
        raise UsageError(
            f"this model was pickled on a rank of the group {ranks}; rank {dist.get_rank()} is not in that group"
        )
    return for_group(dist.group.WORLD, ranks, lambda: new_group(ranks, "loads a pickled model"))


def world_mesh() -> Any:
    """A 1-D mesh of all ranks, on the current accelerator if the default process group supports it, else on the CPU."""
    device = accelerator()
    device_type = device.type if device is not None and serves(dist.group.WORLD, device) else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def mesh_over(plan: ProcessGroups, device_type: str, ranks: Any, names: Any) -> Any:
    """The mesh of `ranks` (nested lists) on devices of that type, over the groups `plan.given`."""
    group = [*plan.given[::-1]] if isinstance(plan.given, tuple) else plan.given  # a mesh is (replicate, shard)
    return DeviceMesh.from_group(group, device_type, torch.tensor(ranks), mesh_dim_names=names)


def given_ranks(plan: ProcessGroups) -> tuple[Any, ...]:
    """The global ranks of the group that the user passed; a pair of such tuples for a pair."""
    if isinstance(plan.given, tuple):
        return tuple(tuple(dist.get_process_group_ranks(group)) for group in plan.given)
    return tuple(dist.get_process_group_ranks(plan.given))


def groups_of(plan: ProcessGroups) -> set[Any]:
    """The groups of all axes, those that the user passed, and the default group."""
    given = plan.given if isinstance(plan.given, tuple) else (plan.given,)
    axes = (axis.process_group for axis in (plan.shard, plan.scatter, plan.replicate) if axis is not None)
    return {group for group in (*given, *axes, dist.group.WORLD) if group is not None}


def serves(process_group: Any, device: torch.device) -> bool:
    """Whether a backend of `process_group` (of a pair: the first) supports tensors on `device`."""
    group = process_group[0] if isinstance(process_group, tuple) else process_group
    return device.type in str(dist.get_backend_config(group))


# -- in words ----------------------------------------------------------------------------------------------------------


def extent_of(plan: ProcessGroups) -> str:
    """The numbers of shards and replicas, for example "2 x 4"."""
    return f"{plan.shard.size} x {plan.replicate.size if plan.replicate is not None else 1}"


def groups_in_words(plan: ProcessGroups) -> str:
    """The axes in words, for example "2 shards on ranks 0-1, 2 replicas on ranks 0, 2"."""
    axes = []
    if plan.shard.size > 1 or plan.replicate is None:
        axes.append(f"{_counted(plan.shard, 'shard')} on {_ranks(plan.shard)}")
    if plan.replicate is not None:
        axes.append(f"{_counted(plan.replicate, 'replica')} on {_ranks(plan.replicate)}")
    return ", ".join(axes)


def _counted(group: Axis, noun: str) -> str:
    return f"{group.size} {noun}{'' if group.size == 1 else 's'}"


def _ranks(group: Axis) -> str:
    """The global ranks in short form: "ranks 0-7", "ranks 0, 8, .. 56", "rank 3"."""
    ranks = group.ranks
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4:
        return f"ranks {ranks[0]}, {ranks[1]}, .. {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
