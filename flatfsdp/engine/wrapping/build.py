"""From a module and a config to a unit: checks, materialization, synchronization, kinds.

Constructors communicate only to make process groups and, on request, to copy rank 0's values (`sync_module_states`).
All checks that depend on the user's input run before the first parameter is changed.

[Note: packed bytes] Quantized weights are bytes, which bitsandbytes stores as a floating-point dtype of the user's
choice (`quant_storage`), so that FSDP1 flattens them together with others. A cast would silently change the weights.
They are recognized by their `quant_state`, with which they are dequantized. The parameter has it or, after a stay on
the meta device, only the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ...api import BackwardPrefetch, Config, MixedPrecision
from ...errors import UsageError, warn
from ..agreement.agreement import Agreement
from ..agreement.checksums import InitialChecksums
from ..agreement.process_groups import plan_groups, resolve_groups
from ..base.overrides import is_memoryless
from ..config.arguments import check_shardable
from ..config.precision import resolve
from ..config.schedule_options import AS_BUILT, Schedule, reshard_choices
from ..config.strategy import traits
from ..config.unit_options import UnitOptions
from ..cpu.huge_pages import tracker_for
from ..device.memory import MemoryTracker
from ..device.streams import Device
from ..dtensor.data_mesh import DataMesh, DataMeshes
from ..dtensor.extended_handle import ExtendedOptions, handle_class
from ..dtensor.gather_extensions import hooks_by_leaf
from ..dtensor.gather_hooks import GatherHooks, has_gather_hooks
from ..dtensor.spmd_mesh import SpmdMesh
from ..dtensor.tensor_parallel import TensorParallel
from ..features.buffer_casting import attach_buffer_casting
from ..features.clip import serve_torchs_norms
from ..features.coalescing import coalescer_for
from ..features.compaction import attach_compaction, keep_apart
from ..features.conditional_units import attach_conditional_units
from ..features.deferred_gradients import defer_as
from ..features.deterministic_sums import attach_deterministic_sums
from ..features.error_feedback import attach_residuals
from ..features.gradient_hooks import attach_gradient_hooks
from ..features.halfway import attach_halfway
from ..features.optimizer_trials import TRIALS
from ..features.persistent_params import attach_persistent_params
from ..features.pipelines import serve_stages
from ..features.post_forward import attach_post_forward_shards
from ..features.profiler_ranges import ProfilerRanges
from ..features.substitutes import SharedGiven
from ..features.unstepped import UnsteppedCheck
from ..features.value_checks import ValueChecks, check_values_of
from ..flat.faces import FaceMaker, FlatFace
from ..flat.flat_param import FlatParamHandle, FlatParamOptions
from ..flat.param_refs import ParamRef
from ..flat.piece_face import PieceFaces
from ..guards.assignments import AssignedTensors
from ..guards.fast_paths import keep_out
from ..guards.optimizer_hooks import guard_optimizers, looking
from ..guards.param_guard import GUARDED
from ..guards.reparametrizations import refuse_reparametrizations
from ..guards.setup_checks import SetupChecks
from ..guards.window_marks import attach_marks
from ..layout.layout import Part
from ..models.introduction import introduce, own_pieces
from ..models.param_registry import extended, models, own, own_besides, owner_of, owners_of, unit_around
from ..models.rest import wait_for_gradients
from ..models.walks import ignore, ignored_of, leaves_of, modules_of, param_refs_of, units_in
from ..parts.strides import stride_by_rows
from ..planning.grains import Grain
from ..planning.planned import PlannedLayout
from ..planning.rows import pack_rows
from ..runtime.entries import Entries, WeakModules, plain_class
from ..runtime.model import Model, model_of
from ..runtime.module_tree import put_at_rest
from ..runtime.resources import ModelSettings, Resources
from ..runtime.unit import Unit
from ..runtime.unit_state import BuiltWith
from ..state.model.submodules import watch
from ..state.optim.stamp import stamp_state_dicts
from ..transforms.extensions import Transform, TransformedParam, transform, transformed_in, users_transforms
from .auto_wrap import check_called
from .chosen_grains import ChosenGrains, plan_unit
from .exchanges import EXCHANGES
from .init_sync import meeting_axes, reporting_failure, synchronize
from .materialize import compute_device, materialize, move_buffers, replace_referenced
from .shared_storage import follow_ties

# From the transformed parameters, the leaves of one handle, and the mesh over which they are sharded, to the function
# that makes the handle's face.
Faces = Callable[[Sequence[TransformedParam], Sequence[nn.Parameter], Any], FaceMaker]


@dataclass(frozen=True)
class Front:
    """The public function for which a unit is built.

    Attributes:
        words: its name, for messages.
        entries: the modules that hold the unit in place; none for a wrapper. [Note: entries]
        output_dtype: the dtype to which outputs are cast; None: they are not cast.
        faces: gives a face to the leaves of a handle; None for FSDP1's, as chosen by the config.
        transforms: those of parameters that it accepts in addition to plain ones, among them that of DTensors.
        materializes: whether tensors on the meta device get memory and values when they are sharded; otherwise the user
            gives them memory later.
        spmd: the mesh on which all parameters lie, of which the config's is a part, if there is one.
        elsewhere: the configs of parameters that are sharded over other ranks, each with its `spmd` mesh.
        orders: the dimensions that are to be the slowest in memory, by paths of parameters. [Note: stored order]
    """

    words: str = "FullyShardedDataParallel"
    entries: Sequence[nn.Module] = ()
    output_dtype: torch.dtype | None = None
    faces: Faces | None = None
    transforms: Callable[[TensorParallel], Sequence[Transform]] = lambda parallel: (parallel,)
    materializes: bool = True
    spmd: SpmdMesh | None = None
    elsewhere: Mapping[nn.Parameter, tuple[Config, SpmdMesh | None]] = field(default_factory=dict)
    orders: Mapping[str, int] = field(default_factory=dict)

    def meshes(self, config: Config, device: torch.device) -> DataMeshes:
        """The meshes of ranks over which parameters are sharded; `config`: the unit's. Makes groups for reductions."""
        made: dict[int, DataMesh] = {}
        others = {}
        for parameter, (other, spmd) in self.elsewhere.items():
            if id(other) not in made:
                made[id(other)] = DataMesh(plan_groups(resolve_groups(other), device), other.device_mesh, spmd)
            others[id(parameter)] = made[id(other)]
        return DataMeshes(DataMesh(plan_groups(config, device), config.device_mesh, self.spmd), others)


WRAPPER = Front()
_BY_HOOKS = ". flatfsdp.fully_shard() supports it: it gathers the result of fsdp_pre_all_gather"


@torch.inference_mode(False)  # tensors made in inference mode have no versions, and cannot be trained
def build_unit(module: nn.Module, config: Config, *, island: bool = False, front: Front = WRAPPER) -> Model:
    """Shard the parameters of `module` that no nested unit owns, as the outermost unit of a model. `config` has its
    groups resolved.

    For several entries `module` is a list of them, used for building only.

    Collective only for `sync_module_states`. Raises before any parameter is changed, except out of user functions.
    """
    device = compute_device(module, config)
    meshes = front.meshes(config, device)
    meeting = {mesh: meeting_axes(mesh.groups, Device(device)) for mesh in meshes.all if config.sync_module_states}
    axes = [axis for each in meeting.values() for axis in each]
    nested = units_in(module)
    with reporting_failure(axes):
        _check_new(module, nested, front)
        shards = (each.groups.shard.size for each in meshes.all)
        reshard = reshard_choices("reshard_after_forward", config.reshard_after_forward, shards=shards)
        ignored_modules, ignored_params = ignored_of(module, config)
        modules = modules_of(module, ignored_modules)
        memory = follow_ties(module, ignored_modules, ignored_params)
        replaced = _off_meta(modules, device, config, ignored_params, front, meshes)
        param_refs, shared_refs, ignored_refs = _homes(module, config, ignored_modules, ignored_params, front)
        if not front.entries:
            check_called(module, [param_ref.path for param_ref in param_refs])
        _check_untransformed(param_refs)
        users = users_transforms()
        transforms = [*users, *front.transforms(TensorParallel(meshes))]
        if not users:
            _check_plain(param_refs, transforms)
        move_buffers(modules, device)
    synchronize(module, modules, leaves_of(param_refs), axes, lambda tensor: meeting[meshes.of(tensor)])
    tracker = tracker_for(device)
    keep_apart(tracker, Device(device))
    handles, param_refs, transformed, initial_checksums = _shard(
        param_refs, transforms, config, meshes, device, tracker, front.faces or _fsdp1_faces(config), front.orders
    )
    unit = Unit(
        Entries(front.entries or [module], in_place=bool(front.entries)),
        [handle for handle, _ in handles],
        param_refs,
        built=_built_with(config, [each for _, each in modules], front, island=island),
        groups=meshes.own.groups,
        elsewhere={handle: mesh.groups for handle, mesh in handles if mesh is not meshes.own},
        options=_options(config, reshard),
        owning_units=owners_of(shared_refs),
        shared_refs=shared_refs,
        guard=GUARDED,
    )
    install_extensions(unit, transformed)
    if not front.entries:
        watch((*param_refs, *shared_refs, *unit.flat_refs))
    put_at_rest(unit)
    keep_out(unit.entries)
    _ignore(ignored_modules, ignored_refs)
    model = new_model(unit, ModelSettings.of(config, device), tracker, nested)
    own_besides(unit, replaced)
    memory.remember(unit)
    if initial_checksums is not None and (checks := model.observers.find(ValueChecks)) is not None:
        initial_checksums.seal(own_pieces(unit))
        checks.initial[unit] = initial_checksums
    return model


def _off_meta(
    modules: list[tuple[str, nn.Module]],
    device: torch.device,
    config: Config,
    ignored_params: set[nn.Parameter],
    front: Front,
    meshes: DataMeshes,
) -> list[nn.Parameter]:
    """Give memory and values to tensors on the meta device, or make sure that they can get memory later. Returns the
    parameters that were replaced for that. New parameters in their places get the same `meshes`."""
    places, replaced = meshes.places(each for _, each in modules), []
    if front.materializes or is_memoryless():
        materialize(modules, device, config.param_init_fn, skip=ignored_params, owner_of=owner_of)
    else:
        replaced = replace_referenced(modules, skip=ignored_params, owner_of=owner_of)
    meshes.follow(places)
    return replaced


def _ignore(modules: Iterable[nn.Module], refs: Mapping[nn.Module, set[str]]) -> None:
    for each, attributes in (*dict.fromkeys(modules).items(), *refs.items()):
        ignore(each, attributes)


def _options(config: Config, reshard: bool | int | None) -> UnitOptions:
    return UnitOptions(
        AS_BUILT if reshard is None else Schedule(reshard_after_forward=reshard),
        backward_prefetch=config.backward_prefetch,
        names_prefetch=config.names_prefetch,
        forward_prefetch=config.forward_prefetch,
    )


def _built_with(config: Config, modules: Sequence[nn.Module], front: Front, *, island: bool) -> BuiltWith:
    return BuiltWith(
        traits(config.sharding_strategy),
        config.mixed_precision,
        config.cpu_offload,
        modules=WeakModules(modules) if front.entries else modules,
        output_dtype=front.output_dtype,
        island=island,
        device_mesh=config.device_mesh,
        counts_gradients=config.backward_prefetch is BackwardPrefetch.BACKWARD_MID,
    )


def install_extensions(unit: Unit, extended: Sequence[TransformedParam]) -> None:
    """Let modules of `unit` hold the results of extensions for some leaves."""
    for handle, views, _ in unit.kinds:
        for each in extended:
            each.leaf = handle.face.leaf_of(each.leaf)
        leaves = set(map(id, handle.leaves))
        views.extended = own = [each for each in extended if id(each.leaf) in leaves]
        for each in own:
            mesh = getattr(handle.options.face, "mesh", unit.built.device_mesh)
            each.transform.attach(each.state, each.param_refs[0].module, mesh)


def _homes(
    module: nn.Module, config: Config, ignored_modules: set[nn.Module], ignored_params: set[nn.Parameter], front: Front
) -> tuple[list[ParamRef], list[ParamRef], dict[nn.Module, set[str]]]:
    """(places of parameters that the unit will own, those of other units' parameters, attributes of ignored ones)."""
    param_refs: list[ParamRef] = []
    shared_refs: list[ParamRef] = []
    ignored: dict[nn.Module, set[str]] = {}
    for inside, attribute, path in param_refs_of(module, ignored_modules):
        leaf = inside._parameters[attribute]
        assert leaf is not None
        if leaf in ignored_params:
            ignored.setdefault(inside, set()).add(attribute)
        elif getattr(leaf, "_fsdp_flattened", False):
            raise UsageError(
                f"{path!r} is a FlatParameter: the module is already wrapped by FullyShardedDataParallel. Wrap the "
                "original module, and only once"
            )
        elif (owning_unit := owner_of(leaf)) is not None:
            _check_tie(owning_unit, module, path, config, front)
            shared_refs.append(ParamRef(inside, attribute, path, leaf))
        else:
            check_shardable(path, leaf)
            param_refs.append(ParamRef(inside, attribute, path, leaf))
    return param_refs, shared_refs, ignored


def _shard(
    param_refs: list[ParamRef],
    transforms: list[Transform],
    config: Config,
    meshes: DataMeshes,
    device: torch.device,
    tracker: MemoryTracker,
    faces: Faces,
    orders: Mapping[str, int],
) -> tuple[list[tuple[FlatParamHandle, DataMesh]], list[ParamRef], list[TransformedParam], InitialChecksums | None]:
    """Handles of the parameters that the unit will own, with the mesh of each; the transformed parameters, and the
    checksums of values that ranks compare.

    On failure, all parameters are registered as before.
    """
    with ExitStack() as undo:
        for param_ref in param_refs:
            undo.callback(param_ref.register)
        over = [meshes.of(param_ref.leaf) for param_ref in param_refs]
        chosen = config.layout if isinstance(config.layout, ChosenGrains) else {}
        grains = [chosen.get((param_ref.module, param_ref.attribute)) for param_ref in param_refs]
        param_refs, transformed = transform(param_refs, transforms)
        _check_plain(param_refs)
        leaves = leaves_of(param_refs)
        packed = {id(param_ref.leaf) for param_ref in param_refs if _is_packed(param_ref)}
        parts = {id(each.leaf): part for each in transformed if (part := each.part) is not None}
        hooks = hooks_by_leaf(transformed)
        valued = [each for each in leaves if not ((its := hooks.get(id(each[0]))) and its.keeps_rows)]
        initial_checksums = InitialChecksums(valued) if config.check_values != "off" else None
        mesh_of = {id(param_ref.leaf): mesh for param_ref, mesh in zip(param_refs, over, strict=True)}
        faced, stored = partial(faces, transformed), {id(each.leaf) for each in transformed}
        sorted_by = [(leaf, orders[path]) for leaf, path in leaves if path in orders and id(leaf) not in stored]
        strides = {id(leaf): stride_by_rows(leaf.shape, dim) for leaf, dim in sorted_by}
        grain_of = {id(param_ref.leaf): grain for param_ref, grain in zip(param_refs, grains, strict=True) if grain}
        handles = _flatten(leaves, packed, parts, hooks, grain_of, config, mesh_of, device, tracker, faced, strides)
        undo.pop_all()
    if dropped := [path for leaf, path in leaves if leaf.grad is not None]:
        warn(f"module: gradients from before wrapping are dropped: {', '.join(dropped)}")
    for leaf, _ in leaves:
        leaf.grad = None
    return handles, param_refs, transformed, initial_checksums


def _is_packed(param_ref: ParamRef) -> bool:
    """Whether the parameter must stay bitwise unchanged. [Note: packed bytes]"""
    marked: list[nn.Parameter | nn.Module] = [param_ref.leaf]
    if param_ref.attribute == "weight":
        marked.append(param_ref.module)
    return not param_ref.leaf.requires_grad and any(getattr(each, "quant_state", None) is not None for each in marked)


def _flatten(
    leaves: list[tuple[nn.Parameter, str]],
    packed: set[int],
    parts: dict[int, Part],
    hooks: dict[int, GatherHooks],
    grain_of: Mapping[int, Grain],
    config: Config,
    mesh_of: Mapping[int, DataMesh],
    device: torch.device,
    tracker: MemoryTracker,
    faces: Callable[[Sequence[nn.Parameter], Any], FaceMaker],
    strides: Mapping[int, tuple[int, ...]],
) -> list[tuple[FlatParamHandle, DataMesh]]:
    """A handle for each kind among `leaves`, given with their paths, and its mesh. They still show their own memory.

    `packed`: the ids of packed bytes. By ids: `parts`: positions of parts in their wholes, `hooks`: the gather hooks of
    some leaves, `grain_of`: the grains of some, `mesh_of`: the ranks over which each leaf is sharded, `strides`: as of
    `FlatParamHandle.flatten`.
    """
    kinds: dict[tuple[DataMesh, torch.dtype, bool, bool, bool, bool, bool], list[tuple[nn.Parameter, str]]] = {}
    for leaf, path in leaves:
        its = hooks.get(id(leaf))
        keeps_rows = its is not None and its.keeps_rows
        on_meta = its.is_on_meta if its is not None and keeps_rows else leaf.is_meta
        kind = leaf.dtype, leaf.requires_grad, id(leaf) in packed, on_meta, keeps_rows, its is not None
        kinds.setdefault((mesh_of[id(leaf)], *kind), []).append((leaf, path))
    made = []
    rows = pack_rows if config.layout == "rows" else None
    for (mesh, _, trainable, is_packed_kind, *_, is_extended), members in kinds.items():
        grains = {path: grain_of[id(leaf)] for leaf, path in members if id(leaf) in grain_of}
        options = FlatParamOptions(
            mixed_precision=MixedPrecision() if is_packed_kind else config.mixed_precision,
            offload=config.cpu_offload.offload_params,
            pin_memory=config.cpu_offload.pin_memory,
            face=faces([leaf for leaf, _ in members], mesh.mesh),
            trainable=trainable,
            packed=is_packed_kind,
            layout=config.layout if isinstance(config.layout, str) else "planned" if grains else "flat",
            plan=_planning(config, grains, members[0][0], mesh, device) if grains else rows,
        )
        if is_extended:
            options = ExtendedOptions.of(options, [hooks[id(leaf)] for leaf, _ in members])
        handle = handle_class(options).flatten(
            [leaf for leaf, _ in members],
            [path for _, path in members],
            world=mesh.groups.shard.size,
            rank=mesh.groups.shard.rank,
            device=device,
            options=options,
            tracker=tracker,
            parts=parts,
            strides=strides,
        )
        made.append((handle, mesh))
    return made


def _planning(
    config: Config, grains: Mapping[str, Grain], leaf: nn.Parameter, mesh: DataMesh, device: torch.device
) -> Callable[..., PlannedLayout]:
    """Makes the layout of a kind that has `leaf`."""
    shard = mesh.groups.shard
    loads = config.layout.loads.setdefault(tuple(shard.ranks), [0] * shard.size)
    home = torch.device("cpu") if config.cpu_offload.offload_params else device
    return partial(plan_unit, grains=grains, loads=loads, itemsize=leaf.element_size(), device=home)


def _fsdp1_faces(config: Config) -> Faces:
    if not config.use_orig_params:
        return lambda transformed, leaves, mesh: FlatFace

    def original(transformed: Any, leaves: Sequence[nn.Parameter], mesh: Any) -> FaceMaker:
        stored = leaves[0].dtype
        cast = resolve(config.mixed_precision, stored).compute is not stored
        return PieceFaces(copied=cast or config.cpu_offload.offload_params)

    return original


def new_model(unit: Unit, settings: ModelSettings, tracker: MemoryTracker, nested: list[Unit]) -> Model:
    """A model of `unit`, whose handles count in `tracker`, and the units nested in it."""
    resources = Resources(Device(settings.device), tracker, EXCHANGES, limit_all_gathers=settings.limit_all_gathers)
    attach_marks(unit)
    attach_buffer_casting(unit)
    agreement = Agreement(check_values=settings.check_values)
    axes = [axis for axis in (unit.axes.own.scatter, unit.axes.own.replicate) if axis is not None and axis.size > 1]
    agreement.member.count(axes[0] if axes else None, unit.entries.class_name)
    model = Model(unit, resources, settings, agreement, coalescer_for(most=settings.join_units_below))
    model.setup.introduce = introduce
    model.forwards.given = SharedGiven
    wait_for_gradients(nested)
    model.observers.set(SetupChecks([unit, *nested]), AssignedTensors(), ProfilerRanges(model), UnsteppedCheck(model))
    attach_gradient_hooks(model, nested)
    check_values_of(model, nested)
    defer_as(model, nested)
    attach_deterministic_sums(model, nested)
    model.adopt(nested)
    attach_halfway(model)
    attach_compaction(model)
    attach_residuals(model)
    own(unit)
    models[model] = None
    guard_optimizers()
    looking.add(TRIALS)
    refuse_reparametrizations()
    attach_post_forward_shards(model)
    attach_persistent_params(model)
    attach_conditional_units(model)
    stamp_state_dicts()
    serve_stages()
    serve_torchs_norms()
    return model


def _check_unwrapped(module: nn.Module) -> None:
    """Refuse a module that is in a unit already, as a wrapper or inside one."""
    wrapped = module.__dict__.get("_unit")
    if isinstance(wrapped, Unit) and wrapped.entries.in_place:
        raise UsageError(
            f"module: {plain_class(module).__name__} was already passed to fully_shard(). Shard each module only "
            "once, inner modules before outer ones, and do not wrap it as well"
        )
    if isinstance(wrapped, Unit):
        raise UsageError(
            f"module: {type(module).__name__} is already a wrapper, of {wrapped.entries.class_name}. Wrap the "
            "original module, and only once"
        )
    unit = unit_around(module)
    if unit is not None:
        raise UsageError(
            f"module: {type(module).__name__} is already part of the unit of {unit.entries.class_name}, where its "
            "parameters are flattened. Wrap inner modules before outer ones, each only once"
        )


def _check_new(module: nn.Module, nested: Iterable[Unit], front: Front) -> None:
    """Refuse modules that are in a unit already, and models that use both public functions."""
    for each in front.entries or [module]:
        _check_unwrapped(each)
    _check_unattended(nested)
    for unit in nested:
        if unit.entries.in_place is not bool(front.entries):
            made = "fully_shard()" if unit.entries.in_place else "FullyShardedDataParallel"
            raise UsageError(
                f"module: {unit.entries.class_name} inside was sharded by {made}, but the outer module was passed to "
                f"{front.words}. Use the same one for all modules of a model"
            )


def _check_unattended(nested: Iterable[Unit]) -> None:
    """Refuse to take units from a root that other objects track: they would lose the units without an error."""
    for unit in nested:
        if given := [each.requested_by for each in model_of(unit).observers.all if each.requested_by]:
            raise UsageError(
                f"module: {unit.entries.class_name} inside belongs to a model that was passed to {given[0]} and "
                f"cannot become part of a larger model. Wrap the whole model first, then call {given[0]} on the "
                "outermost wrapper"
            )


def _check_tie(owning_unit: Unit, module: nn.Module, path: str, config: Config, front: Front) -> None:
    if front.entries:
        raise UsageError(
            f"{path!r} of {type(module).__name__} is tied to a parameter of another unit "
            f"({owning_unit.entries.class_name}), which is already sharded. Pass both modules to {front.words} in one "
            "call, as a list"
        )
    if owning_unit.groups.shard.ranks != plan_groups(config, owning_unit.handles[0].device).shard.ranks:
        raise UsageError(
            f"{path!r} of {type(module).__name__} is tied to a parameter of another unit "
            f"({owning_unit.entries.class_name}) that is sharded over other ranks, so no order of all-gathers works "
            "for both. Put both modules into one unit, or wrap them with the same process group"
        )


def _check_untransformed(param_refs: Iterable[ParamRef]) -> None:
    for unit in extended:
        for each in (each for views in unit.views for each in transformed_in(views)):
            for param_ref in param_refs:
                if each.replaced(param_ref.leaf):
                    raise UsageError(
                        f"{param_ref.path!r} is tied to a parameter of another unit ({unit.entries.class_name}) "
                        "that an extension transformed. Put both modules into one unit"
                    )


def _check_plain(param_refs: Iterable[ParamRef], transforms: Iterable[Transform] = ()) -> None:
    """Refuse tensors that are not plain, unless one of `transforms` applies, and those that it refuses."""
    for param_ref in param_refs:
        applying = next((each for each in transforms if each.applies(param_ref.leaf)), None)
        if applying is not None:
            applying.check(param_ref.path, param_ref.leaf)
        elif hasattr(type(param_ref.leaf), "__tensor_flatten__"):
            raise UsageError(
                f"{param_ref.path!r} is a {type(param_ref.leaf).__name__}, a tensor that wraps other tensors: a flat "
                "parameter holds plain elements. List its module in ignored_modules=, which keeps it unsharded on "
                "every rank, or define how it is stored with "
                f"flatfsdp.extensions.set_extensions(){_BY_HOOKS if has_gather_hooks(param_ref.leaf) else ''}"
            )
