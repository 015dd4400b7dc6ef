"""From a module and a config to a unit: groups, device, materialisation, synchronisation, kinds.

Constructors communicate only to make process groups and, when asked, to copy rank 0's values (`sync_module_states`).
All that may fail in a user's hands is checked before the first parameter is touched.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import _torch
from .agree import compare_before_copy
from .api import HYBRIDS, Config, ShardingStrategy
from .arguments import check_arguments
from .comm import Group, GroupPlan, Traffic, transport
from .device import Device, accelerator, accelerator_count
from .errors import ConfigValueError, UsageError, set_rank, warn, warn_once
from .extensions import transform
from .flat_param import FlatParamHandle
from .full_params import unwrap
from .materialise import materialise
from .optimizers import guard_optimizers
from .policy.strategy import traits
from .registry import disown, extended, own, owner_of, roots, unit_around
from .root import Root, RootSettings
from .storage import Ledger
from .unit import Unit
from .values import Beginnings
from .views import Home
from .watch import expecting
from .wrap import apply_plan, plan_wrapping

# -- groups
# --------------------------------------------------------------------------------------------------------------

# Communicators for reductions, one per process group and living as long as it does.
_reduction_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# Groups of the ranks of a node and across nodes, made once per default process group.
_node_groups: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def require_process_group() -> None:
    """Refuse to go on without a default process group, with the lines that make one."""
    if not dist.is_initialized():
        raise UsageError(
            "no process group: FullyShardedDataParallel needs torch.distributed to be initialised. Under torchrun add\n"
            "    torch.distributed.init_process_group()\n"
            "before wrapping; in a single process without a launcher add\n"
            '    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), '
            "rank=0, world_size=1)"
        )


def resolve_groups(config: Config) -> Config:
    """`config` with its process groups made explicit: one group, or (shard group, replicate group) for the hybrids.

    Collective over the default group where a hybrid strategy was given neither groups nor a mesh.
    """
    require_process_group()
    set_rank(dist.get_rank())
    if newer := _torch.untested():
        warn_once("newer torch", newer)
    mesh, given = config.device_mesh, config.process_group
    hybrid = config.sharding_strategy in HYBRIDS
    if mesh is not None:
        group = (mesh.get_group(1), mesh.get_group(0)) if hybrid else mesh.get_group(0)
    elif given is not None:
        group = given
    else:
        group = _groups_of_nodes() if hybrid else dist.group.WORLD
    members: tuple[Any, ...] = tuple(group) if hybrid else (group,)
    for each in members:
        if dist.get_rank(each) < 0:
            raise ConfigValueError(f"process_group: rank {dist.get_rank()} is not a member of the group it was given")
    return config.replace(process_group=group, device_mesh=None)


def plan_groups(config: Config, device: torch.device) -> GroupPlan:
    """The axes for `config` (its groups resolved). Makes, once per group, the communicator for reductions."""
    return _plan(config.sharding_strategy, config.process_group, device)


def _plan(strategy: ShardingStrategy, given: Any, device: torch.device) -> GroupPlan:
    alone = Group.alone()
    if strategy in HYBRIDS:
        shard_group, replicate_group = given
        across = _axis(replicate_group, device)
        axes = _axis(shard_group, device), _axis(_for_reductions(shard_group), device), across
    elif strategy is ShardingStrategy.NO_SHARD:
        axes = alone, alone, _axis(_for_reductions(given), device)
    else:
        axes = _axis(given, device), _axis(_for_reductions(given), device), alone
    shard, scatter, replicate = axes
    return GroupPlan(shard, scatter, replicate if replicate.size > 1 else None, strategy, given, device)


def _axis(process_group: Any, device: torch.device) -> Group:
    return Group.alone() if dist.get_world_size(process_group) == 1 else Group.of(process_group, device)


def _for_reductions(process_group: Any) -> Any:
    if dist.get_world_size(process_group) == 1:
        return process_group
    made = _reduction_groups.get(process_group)
    if made is None or not _exists(made):
        ranks = dist.get_process_group_ranks(process_group)
        # Only members take part: models on different halves of the world are wrapped independently.
        with expecting(ranks, f"wraps a module over ranks {', '.join(map(str, ranks))}"):
            made = dist.new_group(ranks, use_local_synchronization=True, group_desc="flatfsdp reductions")
        _reduction_groups[process_group] = made
    return made


def _exists(process_group: Any) -> bool:
    """Whether nobody has destroyed `process_group` since it was made."""
    try:
        return bool(dist.get_process_group_ranks(process_group))
    except KeyError:
        return False


def _groups_of_nodes() -> tuple[Any, Any]:
    world = dist.group.WORLD
    found = _node_groups.get(world)
    if found is None or not all(map(_exists, found)):
        size, rank = dist.get_world_size(), dist.get_rank()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or accelerator_count()
        if local < 1 or size % local:
            raise ConfigValueError(
                "process_group: the hybrid strategies shard over the ranks of a node, but LOCAL_WORLD_SIZE is "
                f"{os.environ.get('LOCAL_WORLD_SIZE', 'not set')} and does not divide the world of {size}. Launch with "
                "torchrun, or give "
                "process_group=(shard group, replicate group) or a 2-D device_mesh (replicate, shard)"
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
        found = _node_groups[world] = (shard, replicate)
    return found


# -- device
# --------------------------------------------------------------------------------------------------------------


def compute_device(module: nn.Module, config: Config) -> torch.device:
    """Where the unit computes: `device_id`; else where parameters on an accelerator are; else what the backend
    serves."""
    if isinstance(config.device_id, torch.device):
        return config.device_id
    if isinstance(config.device_id, int):
        chosen = accelerator(config.device_id)
        if chosen is None:
            raise ConfigValueError(
                f"device_id: got {config.device_id}, but this machine has no accelerator; leave it out to train on CPU"
            )
        return chosen
    for parameter in module.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return parameter.device
    current = accelerator()
    group = config.process_group[0] if isinstance(config.process_group, tuple) else config.process_group
    if current is not None and current.type in str(dist.get_backend_config(group)):
        return current
    return torch.device("cpu")


# -- which parameters
# ----------------------------------------------------------------------------------------------------


# Recursion over modules stands in functions of the module: one inside another holds itself, and what it has seen, until
# the garbage collector comes.


def units_in(module: nn.Module) -> list[Unit]:
    """The units of wrapped modules inside `module`, children before parents."""
    return list(_units_below(module, {id(module)}))


def _units_below(module: nn.Module, seen: set[int]) -> Iterator[Unit]:
    for child in module._modules.values():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            yield from _units_below(child, seen)
    unit = module.__dict__.get("_unit")
    if isinstance(unit, Unit):
        yield unit


def ignored_of(module: nn.Module, config: Config) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Modules and parameters to leave alone, with everything inside ignored modules."""
    modules: set[nn.Module] = set()
    for ignored in config.ignored_modules:
        for inside in ignored.modules():
            if isinstance(inside.__dict__.get("_unit"), Unit):
                raise ConfigValueError(
                    f"ignored_modules: {type(inside.__dict__['_unit'].module).__name__} is wrapped by "
                    "FullyShardedDataParallel already, and sharded; give the modules to ignore unwrapped"
                )
        modules.update(ignored.modules())
    params = set(config.ignored_params)
    for each in modules:
        params.update(p for p in each._parameters.values() if p is not None)
    return modules, params


def homes_of(module: nn.Module, ignored: set[nn.Module]) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, attribute, path) of every parameter registered in `module` outside nested units and ignored modules."""
    for prefix, holder in _modules_of(module, ignored):
        for attribute, parameter in holder._parameters.items():
            if parameter is not None:
                yield holder, attribute, f"{prefix}.{attribute}" if prefix else attribute


def leaves_of(homes: Iterable[Home]) -> list[tuple[nn.Parameter, str]]:
    """Each leaf once, with its first path."""
    first: dict[int, tuple[nn.Parameter, str]] = {}
    for home in homes:
        first.setdefault(id(home.leaf), (home.leaf, home.path))
    return list(first.values())


def _modules_of(module: nn.Module, ignored: set[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules of `module` outside nested units and ignored modules, with their paths."""
    return list(_modules_below(module, "", ignored, set()))


def _modules_below(
    module: nn.Module, path: str, ignored: set[nn.Module], seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen or module in ignored or isinstance(module.__dict__.get("_unit"), Unit):
        return
    seen.add(id(module))
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules_below(child, f"{path}.{name}" if path else name, ignored, seen)


# -- the unit
# ------------------------------------------------------------------------------------------------------------


def build_unit(module: nn.Module, config: Config, *, island: bool = False) -> Unit:
    """Shard what no nested unit of `module` owns. `config` has its groups resolved.

    Collective only for `sync_module_states`. Raises before any parameter is changed, except out of user functions.
    """
    device = compute_device(module, config)
    groups = plan_groups(config, device)
    nested = units_in(module)
    ignored_modules, ignored_params = ignored_of(module, config)
    seam = Device(device)
    modules = _modules_of(module, ignored_modules)
    _check_unwrapped(module)
    materialise(modules, device, config.param_init_fn, skip=ignored_params, owner_of=owner_of)
    homes: list[Home] = []
    aliases: list[Home] = []
    tied: dict[int, Unit] = {}
    for holder, attribute, path in homes_of(module, ignored_modules):
        leaf = holder._parameters[attribute]
        assert leaf is not None
        if leaf in ignored_params:
            continue
        owner = owner_of(leaf)
        if owner is not None:
            _check_tie(owner, module, path, config)
            tied[id(owner)] = owner
            aliases.append(Home(holder, attribute, path, leaf))
            continue
        if getattr(leaf, "_fsdp_flattened", False):
            raise UsageError(
                f"{path!r} is a FlatParameter: the module is wrapped by FullyShardedDataParallel already. Wrap the "
                "original module, once"
            )
        homes.append(Home(holder, attribute, path, leaf))
    _check_untransformed(homes)
    _move_buffers(modules, device)
    if config.sync_module_states:
        _synchronise(module, modules, leaves_of(homes), groups, seam)
    homes, transformed = transform(homes)
    leaves = leaves_of(homes)
    beginnings = Beginnings(leaves) if config.check_values != "off" else None
    _drop_gradients(leaves)
    kinds: dict[tuple[torch.dtype, bool], list[tuple[nn.Parameter, str]]] = {}
    for leaf, path in leaves:
        kinds.setdefault((leaf.dtype, leaf.requires_grad), []).append((leaf, path))
    ledger = Ledger()
    handles = [
        FlatParamHandle.flatten(
            [leaf for leaf, _ in members],
            [path for _, path in members],
            world=groups.shard.size,
            rank=groups.shard.rank,
            mixed_precision=config.mixed_precision,
            device=device,
            offload=config.cpu_offload.offload_params,
            pin_memory=config.cpu_offload.pin_memory,
            use_orig_params=config.use_orig_params,
            ledger=ledger,
        )
        for members in kinds.values()
    ]
    unit = Unit(
        module,
        handles,
        homes,
        traits=traits(config.sharding_strategy),
        groups=groups,
        mixed_precision=config.mixed_precision,
        cpu_offload=config.cpu_offload,
        backward_prefetch=config.backward_prefetch,
        forward_prefetch=config.forward_prefetch,
        modules=[each for _, each in modules],
        owners=list(tied.values()),
        aliases=aliases,
        island=island,
    )
    unit.extend(transformed)
    if beginnings is not None:
        beginnings.seal(handles)
    unit.beginnings = beginnings
    for home in unit.hidden:
        home.unregister()
    settings = RootSettings(device, config.limit_all_gathers, config.check_values)
    new_root(unit, device, ledger, settings, nested)
    return unit


def new_root(unit: Unit, device: torch.device, ledger: Ledger, settings: RootSettings, nested: list[Unit]) -> Root:
    """A root over `unit`, whose handles count in `ledger`, and the units nested in it."""
    root = Root(unit, Device(device), ledger=ledger, settings=settings)
    unit.own_root = root
    unit.join(root)
    root.adopt(nested)
    own(unit)
    roots.add(root)
    guard_optimizers()
    return root


def _check_unwrapped(module: nn.Module) -> None:
    """Refuse a module that is in a unit already, as a wrapper or inside of one."""
    wrapped = module.__dict__.get("_unit")
    if isinstance(wrapped, Unit):
        raise UsageError(
            f"module: {type(module).__name__} is a wrapper already, of {type(wrapped.module).__name__}. Wrap the "
            "original module, once"
        )
    unit = unit_around(module)
    if unit is not None:
        raise UsageError(
            f"module: {type(module).__name__} is in a unit already, that of {type(unit.module).__name__}, and its "
            "parameters are flattened there. Wrap inner modules before outer ones, each once"
        )


def _check_tie(owner: Unit, module: nn.Module, path: str, config: Config) -> None:
    if owner.groups.shard.ranks != plan_groups(config, owner.handles[0].device).shard.ranks:
        raise UsageError(
            f"{path!r} of {type(module).__name__} is tied to a parameter of another unit "
            f"({type(owner.module).__name__}) that is sharded over other "
            "ranks, so no order of gathers serves both. Put both modules into one unit, or wrap them with the same "
            "process group"
        )


def _check_untransformed(homes: Iterable[Home]) -> None:
    for unit in extended:
        for each in (each for shown in unit.shown for each in shown.extended):
            for home in homes:
                if each.replaced(home.leaf):
                    raise UsageError(
                        f"{home.path!r} is tied to a parameter of another unit ({type(unit.module).__name__}) that an "
                        "extension transformed. Put both modules into one unit"
                    )


def _drop_gradients(leaves: list[tuple[nn.Parameter, str]]) -> None:
    dropped = [path for leaf, path in leaves if leaf.grad is not None]
    if dropped:
        warn(f"module: gradients from before wrapping are dropped, of {', '.join(dropped)}")
    for leaf, _ in leaves:
        leaf.grad = None


def _move_buffers(modules: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    for _, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _synchronise(
    module: nn.Module,
    modules: list[tuple[str, nn.Module]],
    leaves: list[tuple[nn.Parameter, str]],
    groups: GroupPlan,
    device: Device,
) -> None:
    """Overwrite parameters and buffers with those of rank 0. Collective over both axes.

    Raises:
        AgreementError: on every rank, where ranks would send tensors that do not fit each other.
    """
    traffic, ledger = Traffic(), Ledger()
    axes = [
        transport(axis, device, traffic=traffic, ledger=ledger)
        for axis in (groups.replicate, groups.shard)
        if axis is not None and axis.size > 1
    ]
    tensors: list[tuple[torch.Tensor, str]] = list(leaves)
    for path, each in modules:
        prefix = f"{path}." if path else ""
        tensors += [(buffer, prefix + name) for name, buffer in each._buffers.items() if buffer is not None]
    subject = f"a unit of class {type(module).__name__}"
    facts = [(f"{subject}, {path}", f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}") for t, path in tensors]
    compare_before_copy(axes, [(subject, f"of {len(tensors)} tensors"), *facts])
    with torch.no_grad():
        for tensor, _ in tensors:
            on_device = tensor.detach().to(device.device).contiguous()
            for axis in axes:
                axis.broadcast(on_device)
            if on_device.data_ptr() != tensor.data_ptr():
                tensor.copy_(on_device)


# -- the wrapper's side
# --------------------------------------------------------------------------------------------------


def auto_wrapped(module: nn.Module, config: Config, make: Callable[..., nn.Module]) -> ExitStack:
    """Wrap what `config.auto_wrap_policy` chooses inside `module`, by `make(child, config, island=...)`.

    Closing the result undoes it; `pop_all()` keeps it.
    """
    policy = config.auto_wrap_policy
    if policy is None:
        return ExitStack()
    ignored_modules, ignored_params = ignored_of(module, config)
    nested = config.replace(auto_wrap_policy=None)
    kwargs = {
        f.name: getattr(nested, f.name) for f in fields(nested) if f.name not in ("ignored_modules", "ignored_params")
    }
    plan = plan_wrapping(module, policy, kwargs=kwargs, ignored_modules=ignored_modules, ignored_params=ignored_params)
    islands = {id(planned.module) for planned in plan if planned.in_full_precision}

    def wrap(child: nn.Module, **overrides: Any) -> nn.Module:
        changed = {name for name, value in overrides.items() if value is not kwargs.get(name)}
        if {"ignored_modules", "ignored_states"} & changed:
            raise ConfigValueError(
                "auto_wrap_policy: it gives a unit ignored_modules or ignored_states of its own; give them to the "
                "outermost wrapper, which "
                "passes them to all units"
            )
        checked = resolve_groups(check_arguments(child, **overrides)) if changed else nested
        own_config = checked.replace(ignored_modules=tuple(ignored_modules), ignored_params=tuple(ignored_params))
        return make(child, own_config, island=id(child) in islands)

    def unmake(wrapper: nn.Module) -> None:
        unit: Unit = wrapper.__dict__["_unit"]
        disown(unit)
        failure = f"{type(sys.exc_info()[1]).__name__}: {sys.exc_info()[1]}"
        with expecting(unit.groups.shard.ranks, f"undoes its wrapping of {type(unit.module).__name__} after {failure}"):
            unwrap(unit)

    return apply_plan(plan, wrap, unmake=unmake)


def keep_root(wrapper: nn.Module, unit: Unit) -> None:
    """Let `wrapper` keep the root that was made over its `unit` alive, and with the root all units."""
    wrapper.__dict__["_kept_root"], unit.own_root = unit.own_root, None


def register_flat_params(wrapper: nn.Module, unit: Unit) -> None:
    """With `use_orig_params=False`, list the flat parameters as the wrapper's own."""
    for kind, handle in enumerate(unit.handles):
        if not handle.use_orig_params:
            wrapper._parameters["_flat_param" if kind == 0 else f"_flat_param_{kind}"] = handle.flat_param


@contextmanager
def flat_params_hidden(module: nn.Module) -> Iterator[None]:
    """No flat parameter among `module.parameters()`: the whole ones are listed instead."""
    wrappers = [m for m in module.modules() if isinstance(m.__dict__.get("_unit"), Unit)]
    for wrapper in wrappers:
        for name in [name for name in wrapper._parameters if name.startswith("_flat_param")]:
            del wrapper._parameters[name]
    try:
        yield
    finally:
        for wrapper in wrappers:
            register_flat_params(wrapper, wrapper.__dict__["_unit"])


def units_at(module: nn.Module) -> list[Unit]:
    """The unit whose wrapper `module` is, if it is one."""
    unit = module.__dict__.get("_unit")
    return [unit] if isinstance(unit, Unit) else []


def root_of(unit: Unit, method: str) -> Root:
    """The root that `unit` is the outermost unit of; refuses other units."""
    root = unit.root
    if root.unit is not unit:
        raise UsageError(
            f"{method} was called on a nested unit ({type(unit.module).__name__}); call it on the outermost "
            "FullyShardedDataParallel module "
            f"({type(root.unit.module).__name__})"
        )
    root.lazy_init()
    root.settle_down()
    return root


@contextmanager
def no_sync(unit: Unit) -> Iterator[None]:
    """Accumulate without communication; only on the root."""
    with root_of(unit, "no_sync()").no_sync():
        yield


# -- groups by their ranks, for pickles
# ------------------------------------------------------------------------------------

_groups_by_ranks: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def plan_over(strategy: ShardingStrategy, ranks: tuple[Any, ...], device: torch.device) -> GroupPlan:
    """The axes of `strategy` over these global ranks, in groups found or made for them. Collective where a group is
    made."""
    if strategy in HYBRIDS:
        return _plan(strategy, tuple(_group_over(each) for each in ranks), device)
    return _plan(strategy, _group_over(ranks), device)


def _group_over(ranks: tuple[int, ...]) -> Any:
    require_process_group()
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    if dist.get_rank() not in ranks:
        raise UsageError(
            f"this model was pickled on a rank of the group {ranks}; rank {dist.get_rank()} is not one of them"
        )
    known = _groups_by_ranks.setdefault(dist.group.WORLD, {})
    if ranks not in known:
        known[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return known[ranks]


# -- changes of the whole module
# -------------------------------------------------------------------------------------------


def apply_to_tensors(
    wrapper: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], rest: Callable[[], Any]
) -> None:
    """`change` (a cast or a move) the shards of `wrapper`'s own unit; `rest()` changes everything else in the
    wrapper."""
    unit: Unit = wrapper.__dict__["_unit"]
    if not unit.is_between():
        raise UsageError(
            f"unit {unit.label}: .to(), .half() and their like change parameters between iterations only; a forward "
            "here still awaits its backward"
        )
    if any(change(handle.shard.new_empty(0)).is_meta for handle in unit.handles):
        raise UsageError(
            f"unit {unit.label}: moving it to the meta device would throw away its values; use "
            "model.to_empty(device=...) for memory without values, or wrap a module that is on the meta device"
        )
    unit.write_back()
    unit.rest()
    flat = {name: wrapper._parameters.pop(name) for name in list(wrapper._parameters) if name.startswith("_flat_param")}
    homes, hidden = (*unit.homes, *unit.aliases), unit.hidden
    for home in homes:
        home.unregister()
    try:
        rest()
    finally:
        for home in homes:
            if not any(home is other for other in hidden):
                home.register()
        wrapper._parameters.update(flat)
    with torch.no_grad():
        for handle, shown in zip(unit.handles, unit.shown, strict=True):
            changed = change(handle.shard)
            if changed is not handle.shard:
                shown.replace_shard(changed.detach())
    unit.root.placed = False
