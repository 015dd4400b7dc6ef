"""`load_state_dict()` of wrapped modules, from any kind of state dict.

[Note: loading] Modules load their state dict themselves, into placeholders that record the values. After all modules of
a unit have loaded, each rank copies the elements that it owns into its shard: from full tensors and from its own
intervals without communication. In between torch walks from the wrapper to its modules, so the state of the load is
kept on the wrapper.
"""

from __future__ import annotations

import re
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ....errors import UsageError
from ...agreement.object_collectives import all_or_none, is_first_of
from ...agreement.once_per_job import warn_once_per_job
from ...base import _torch
from ...base.fqns import COMPILED, TRANSPARENT, WRAPPED, clean, clean_text, fqn
from ...config.state_dict_configs import StateDictType
from ...flat.faces import FlatFace
from ...flat.flat_param import FlatParamHandle
from ...flat.param_refs import flat_name
from ...flat.states import SUMMONED
from ...models.rest import check_idle, collective_call, quiesce
from ...models.walks import units_in
from ...runtime.model import model_of
from ...runtime.unit import Unit
from ..consolidate import scatter_from_first, store
from ..from_rank0 import FromRank0, spread
from ..full_params import summon
from ..named_param import NamedParam, by_handle, named_state, params_of
from ..owned_interval import OwnedInterval, unpadded_span
from ..parts import every_axis
from .distributed_values import DistributedValue, defer_distributed, whole_if_distributed
from .placeholders import PlaceholderReadError, Placeholders, placeholder_for
from .saving import check_flat, has_own_classes
from .types import only_rank0

UNDER_WAY = "_load_under_way"
# The start of torch's report of a state dict of another model, which lists every key, on every rank.
_BEGIN = "Error(s) in loading state_dict for "
_MOST = 3  # names of a kind
_LIST = re.compile(r"^(\t(?:Missing|Unexpected) key\(s\) in state_dict: )(.*?)\. ?$")
_NAME = re.compile(r'"[^"]*"')
# Units whose modules read values of parameters when they load.
_read_values: weakref.WeakSet[Unit] = weakref.WeakSet()
# Whether a wrapper was called: it retries and cleans up, which a module around wrappers does not.
_in_wrapper: ContextVar[bool] = ContextVar("a wrapper loads a state dict", default=False)


class UnitLoad:
    """The load of one unit, from the start of its wrapper's load until all modules inside have loaded.

    Attributes:
        errors: torch's list of errors.
    """

    def __init__(
        self, unit: Unit, state_dict: dict[str, Any], prefix: str, errors: list[str], *, within: nn.Module | None = None
    ) -> None:
        self.unit = unit
        self.errors = errors
        self._warned_of_dtypes = len(errors)
        self._unsharded = ExitStack()
        self._placeholders: Placeholders | None = None
        from_outside = within is None and not _in_wrapper.get()
        if has_own_classes(unit) or unit in _read_values or (from_outside and _may_read(unit)):
            taken = self._take_intervals(state_dict, prefix, within)
            self._unsharded.enter_context(summon([unit], writeback=True))
            state_dict.update((key, leaf.detach().clone()) for key, leaf in taken.items())
        else:
            self._placeholders = Placeholders(unit, receives=True, within=within)

    def _take_intervals(
        self, state_dict: dict[str, Any], prefix: str, within: nn.Module | None
    ) -> dict[str, torch.Tensor]:
        """Store the intervals that this rank owns, before modules see full values; returns the leaves by key."""
        keys = {
            id(param_ref.leaf): f"{prefix}{param_ref.path if within is None else param_ref.attribute}"
            for param_ref in self.unit.param_refs
            if within is None or param_ref.module is within
        }
        taken: dict[str, torch.Tensor] = {}
        for _, _, params in by_handle(params_of([self.unit])):
            own = {key: each for each in params if (key := keys.get(id(each.leaf))) is not None}
            own = {key: each for key, each in own.items() if isinstance(state_dict.get(key), OwnedInterval)}
            self._store_each([(each, state_dict[key]) for key, each in own.items()])
            taken |= {key: each.original for key, each in own.items()}
        return taken

    def close(self) -> None:
        """Store the received values. Collective if they come from the first rank, or in distributed tensors."""
        self._unsharded.close()
        if self._placeholders is None:
            return
        received = self._placeholders.remove()
        with torch.no_grad():
            for unit, kind, params in by_handle(params_of((self.unit, *self.unit.owning_units))):
                values = [(each, received[id(each.leaf)]) for each in params if id(each.leaf) in received]
                if any(isinstance(value, FromRank0) for _, value in values):
                    _store_from_first(unit, kind, [each for each in values if not isinstance(each[1], OwnedInterval)])
                    values = [each for each in values if isinstance(each[1], OwnedInterval)]
                self._store_each(values)

    def _store_each(self, values: Sequence[tuple[NamedParam, Any]]) -> None:
        """Copy this rank's elements of parameters of one handle from their values."""
        for param, value in values:
            handle = param.handle
            try:
                given = whole_if_distributed(value.value) if isinstance(value, DistributedValue) else value
                if not isinstance(given, torch.Tensor):  # tensor-like, reads a file when it is used (Lightning's)
                    given = torch.detach(given)
                if given.is_meta or given.layout is not torch.strided:  # also refused by ranks without elements of it
                    raise UsageError("it has no memory (meta)" if given.is_meta else f"it is {given.layout}, not dense")
                store(handle.layout, handle.rank, handle.shard, param.index, given)
            except Exception as error:
                assert param.unit is not None
                self.errors.append(f"{param.name!r} of unit {param.unit.label} keeps its value: {error}")
        _note_write(values)

    def abandon(self) -> None:
        """Forget the received values, after an error."""
        if self._placeholders is not None:
            self._placeholders.remove()
        self._unsharded.close()

    def clean_errors(self) -> None:
        """Drop wrappers' names from torch's error messages."""
        self.errors[self._warned_of_dtypes :] = [clean_text(text) for text in self.errors[self._warned_of_dtypes :]]


def _store_from_first(unit: Unit, kind: int, values: Sequence[tuple[NamedParam, Any]]) -> None:
    """Copy this rank's elements of parameters of one handle from the first rank's values. Collective."""
    handle = unit.handles[kind]
    wholes = {param.index: value.value if isinstance(value, FromRank0) else value for param, value in values}
    shard = scatter_from_first(unit, kind, wholes)
    for param, _ in values:
        param.local_view(handle.shard).copy_(param.local_view(shard))
    _note_write(values)


def _note_write(values: Sequence[tuple[NamedParam, Any]]) -> None:
    """Count a write to the shard on all ranks, also if this one owns none of the elements."""
    torch.autograd.graph.increment_version([param.handle.shard for param, _ in values[:1]])


def _may_read(unit: Unit) -> bool:
    return any(not _torch.loads_as_usual(param_ref.module) for param_ref in (*unit.param_refs, *unit.shared_refs))


def load_state_dict(wrapper: nn.Module, state_dict: Mapping[str, Any], load: Any) -> Any:
    """`load(state dict)` for the module that `load_state_dict` was called on, if that is a wrapper.

    If a module reads values of parameters, its unit is unsharded for it, and the whole load is repeated.
    """
    unit: Unit = wrapper.__dict__["_unit"]
    if isinstance(state_dict, Mapping) and unit.phase is not SUMMONED:
        state_dict = _with_metadata(wrapper, state_dict)
    sends = only_rank0(unit.options.state_dict) and unit.phase is not SUMMONED
    while True:
        token = _in_wrapper.set(True)
        try:
            with collective_call(units_in(wrapper), "load_state_dict()", when=sends):
                return load(_of_first(unit, state_dict) if sends else state_dict)
        except PlaceholderReadError:
            reading = [each for each in _under_way(wrapper) if each.unit not in _read_values]
            if not reading:
                raise
            _read_values.add(reading[-1].unit)
        except RuntimeError as error:
            if (brief := _in_brief(error)) is None:
                raise
            raise brief from None
        finally:
            _in_wrapper.reset(token)
            forget(wrapper)


def _of_first(unit: Unit, state_dict: Any) -> Any:
    """`state_dict`, or {} if only the first rank's matters and this one's is invalid. Collective over both axes.

    Raises:
        UsageError, AgreementError: on every rank: the first one's is not a state dict.
    """
    axes = every_axis([unit])

    def check() -> None:
        if is_first_of(axes) and not isinstance(state_dict, Mapping):
            given = type(state_dict).__name__
            raise UsageError(
                f"load_state_dict() with rank0_only=True: expected a state dict on rank 0, found a {given}"
            )

    all_or_none(axes, check, doing="loads a state dict of rank 0")
    return state_dict if isinstance(state_dict, Mapping) else {}


def forget(module: nn.Module) -> None:
    """Restore the wrappers in `module` to their state before a load that failed halfway."""
    if _in_wrapper.get():
        return
    for each in _under_way(module):
        each.abandon()
    for inside in module.modules():
        inside.__dict__.pop(UNDER_WAY, None)


def _under_way(wrapper: nn.Module) -> list[UnitLoad]:
    """The unfinished loads inside `wrapper`, outermost first."""
    return [module.__dict__[UNDER_WAY] for module in wrapper.modules() if UNDER_WAY in module.__dict__]


def begin(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Start the wrapper's load: let modules inside find their keys, and placeholders to copy into.

    `others`: as in `_load_from_state_dict`: the metadata of the module first, torch's list of errors last.
    """
    unit: Unit = wrapper.__dict__["_unit"]
    if (left := wrapper.__dict__.pop(UNDER_WAY, None)) is not None:  # of a call that raised
        left.abandon()
    for before in wrapper._load_state_dict_pre_hooks.values():
        before(state_dict, prefix, *others)
    if unit.phase is SUMMONED:
        _rename(state_dict, prefix, wrapper)
        return
    begin_unit(unit, state_dict)
    own = _take_own(wrapper, state_dict, prefix)
    if only_rank0(unit.options.state_dict):
        quiesce([unit], shards=False)
        spread(unit, state_dict, prefix)
    for key, interval in own.items():
        state_dict.setdefault(key, interval)
    _unpack_flat(unit, state_dict, prefix)
    wrapper.__dict__[UNDER_WAY] = UnitLoad(unit, state_dict, prefix, others[-1])
    _rename(state_dict, prefix, wrapper)
    if others[0].get("assign_to_params_buffers"):
        _warn_of_dtypes(unit, state_dict, prefix)


def begin_unit(unit: Unit, state_dict: dict[str, Any]) -> None:
    """Bring `unit` to rest, and convert `state_dict` into one that modules can load."""
    quiesce([unit], collective=False, check=lambda each: check_idle(each, "load_state_dict()"))
    model_of(unit).agreement.loaded = True
    defer_distributed(state_dict)


def _take_own(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Remove the parameters that `state_dict` holds in their own place, and return this rank's elements of them:
    torch's `set_model_state_dict()` adds such entries for parameters that it was not given."""
    if not any(isinstance(value, nn.Parameter) for value in state_dict.values()):
        return {}
    taken = {}
    for param in named_state(wrapper):
        for key in [prefix + name for name in param.names] if param.unit is not None else ():
            if any(state_dict.get(key) is each for each in (param.original, param.leaf, param.handle.flat_param)):
                del state_dict[key]
                taken[key] = param.in_place()
    return taken


def end(wrapper: nn.Module, incompatible: Any) -> None:
    """Finish the load after all modules inside have loaded."""
    load: UnitLoad | None = wrapper.__dict__.pop(UNDER_WAY, None)
    if load is not None:
        load.close()
        load.clean_errors()
    for keys in incompatible:
        keys[:] = [clean(key) for key in keys]


def _with_metadata(wrapper: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """`state_dict` with the modules' versions also under the paths that torch walks."""
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is None:
        return state_dict
    out: Any = OrderedDict(state_dict)
    out._metadata = OrderedDict(metadata)
    for path, _ in wrapper.named_modules(remove_duplicate=False):
        if clean(path) in metadata:
            out._metadata.setdefault(path, metadata[clean(path)])
    return out


def _rename(state_dict: dict[str, Any], prefix: str, wrapper: nn.Module) -> None:
    """Give keys the paths that torch walks from `wrapper` on: with the attributes under which torch.compile's modules
    hold their inner modules. Other wrappers find their keys themselves."""
    walked: dict[str, str] = {}  # by a module's path, as keys may contain it
    for path, _ in wrapper.get_submodule(WRAPPED).named_modules(remove_duplicate=False):  # inner modules come later
        walks = ".".join(each for each in path.split(".") if each == COMPILED or each not in TRANSPARENT)
        walked[clean(path)] = walked[walks] = walks
    for key in [key for key in state_dict if key.startswith(prefix)]:
        owner, _, name = key.removeprefix(prefix).rpartition(".")
        while owner not in walked:
            owner, _, outer = owner.rpartition(".")
            name = fqn(outer, name)
        state_dict[f"{prefix}{WRAPPED}.{fqn(walked[owner], name)}"] = state_dict.pop(key)


def _unpack_flat(unit: Unit, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace flat shards (LOCAL_STATE_DICT) by their interval of each parameter."""
    for kind, handle in enumerate(unit.handles):
        key = prefix + flat_name(kind)
        if key not in state_dict and (key := f"{prefix}{COMPILED}.{flat_name(kind)}") not in state_dict:
            continue
        check_flat(unit)
        layout, value = handle.layout, state_dict.pop(key)
        flat = _flat_of(value, handle, key)
        shard = torch.zeros(layout.shard_numel, dtype=flat.dtype, device=flat.device)
        shard[: flat.numel()] = flat
        intervals = {
            id(param.leaf): OwnedInterval(param.local_view(shard), layout.params[param.index], param.span_in_param)
            for param in params_of([unit])
            if param.kind == kind
        }
        for param_ref in unit.param_refs:
            if (interval := intervals.get(id(param_ref.leaf))) is not None:
                state_dict[prefix + clean(param_ref.path)] = interval  # FSDP1 may have put its 1-D shard there
    if unit.options.state_dict.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        for param_ref in unit.shared_refs:  # their values come with the flat shards of other units
            state_dict.setdefault(prefix + clean(param_ref.path), placeholder_for(param_ref.leaf, unit.owning_units))


def _flat_of(value: Any, handle: FlatParamHandle, key: str) -> torch.Tensor:
    """This rank's elements of a flat parameter, without world padding, of this package's or of FSDP1's format.

    Raises:
        UsageError: its layout differs.
    """
    value = value.value if isinstance(value, DistributedValue) else value
    layout = handle.layout
    span = unpadded_span(layout, handle.rank)
    what = (
        f"{clean(key)!r}: a LOCAL_STATE_DICT can only be loaded with the number of ranks, the "
        f"wrapping and the {FlatFace.words.argument} that it was made with; expected {layout.world} shards of "
        f"{layout.shard_numel} elements"
    )
    remedy = ". Load it into such a model, and save SHARDED_STATE_DICT or FULL_STATE_DICT there"
    if isinstance(value, OwnedInterval):
        digest = value.spec.name.rpartition(" ")[2]
        if digest != layout.digest() or value.span != span:
            raise UsageError(f"{what}; found elements {value.span} of a flat parameter of {value.spec.numel}{remedy}")
        return value.local
    if type(value).__name__ == "ShardedTensor":
        shards = value.local_shards()
        local = shards[0].tensor.reshape(-1) if shards else handle.shard.new_empty(0)
        offset = shards[0].metadata.shard_offsets[0] if shards else span.start
        numel = value.metadata().size.numel()
        if (numel, local.numel(), offset) != (layout.numel, span.numel, span.start):
            raise UsageError(
                f"{what}; found elements [{offset}, {offset + local.numel()}) of a flat parameter of {numel}{remedy}"
            )
        return local
    raise UsageError(f"{what}; found a {type(value).__name__}, which is not a value of such a state dict")


def _warn_of_dtypes(unit: Unit, state_dict: dict[str, Any], prefix: str) -> None:
    """Warn that `assign=True` does not change dtypes here."""
    inside = f"{prefix}{WRAPPED}."
    for param in params_of([unit]):
        value, master = state_dict.get(f"{inside}{param.name}"), param.handle.precision.master
        if isinstance(value, torch.Tensor) and value.dtype != master:
            warn_once_per_job(
                f"load_state_dict(assign=True): {param.name!r} is {value.dtype} in the state dict, and stays "
                f"{master} in unit {unit.label}: values are copied into its shards. To change the dtype call .to() on "
                "the wrapper"
            )
            return


def _in_brief(error: RuntimeError) -> RuntimeError | None:
    """`error` with some names of each kind, if torch reports a state dict that does not fit; None if that is not
    shorter, or for another error."""
    reported = str(error)
    if type(error) is not RuntimeError or not reported.startswith(_BEGIN):
        return None
    first, *lines = reported.split("\n")
    kept: list[str] = []
    shapes = 0
    for line in lines:
        if line.startswith("\tsize mismatch for "):
            shapes += 1
            kept += [line] if shapes <= _MOST else []
        elif (found := _LIST.match(line)) is not None and len(names := _NAME.findall(found[2])) > _MOST + 1:
            kept.append(f"{found[1]}{', '.join(names[:_MOST])} and {len(names) - _MOST} more. ")
        else:
            kept.append(line)
    if shapes > _MOST:
        kept.append(f"\tand {shapes - _MOST} more of other shapes. ")
    short = "\n".join([first, *kept])
    if len(short) == len(reported):
        return None
    return RuntimeError(f"{short}\n\tIt belongs to another model; strict=False returns the names of all keys.")
