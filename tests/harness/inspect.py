"""The only file of tests that inspects the internals of a model.

Tests read all internals of a wrapped model here, under names that do not change with the engine's classes and members:
after a rename in the engine, only this file needs a change. Functions take a wrapper; their results read the engine at
each use.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flatfsdp.engine.agreement.unused_params import bitmaps_in
from flatfsdp.engine.base import per_group
from flatfsdp.engine.base.events import Observer
from flatfsdp.engine.cpu import exchange as exchanges
from flatfsdp.engine.cpu import groups
from flatfsdp.engine.cpu.exchange import CONTROL, Attendant
from flatfsdp.engine.features.borrowed_memory import BorrowedBuffer, borrowed_buffer
from flatfsdp.engine.features.deferred_gradients import defers
from flatfsdp.engine.features.gradient_hooks import GradientHooks
from flatfsdp.engine.flat import flat_param
from flatfsdp.engine.flat import gradient_slots as grads
from flatfsdp.engine.flat.states import PHASE_STEPS, SHARD_STEPS, SHARDED, UNSHARDED
from flatfsdp.engine.models.rest import quiesce
from flatfsdp.engine.models.walks import units_in
from flatfsdp.engine.runtime.iteration import STAGE_STEPS
from flatfsdp.engine.runtime.model import model_of
from flatfsdp.engine.schedule.actions import Verb
from flatfsdp.engine.state.consolidate import store
from flatfsdp.engine.watchdog.regions import current_watch
from flatfsdp.engine.wrapping import shared_storage


class Event(NamedTuple):
    """One event of the engine: its kind, the path of the unit's module ("" of the outermost), and its phase."""

    kind: str
    unit: str
    phase: str

    def __str__(self) -> str:
        return f"{self.kind} {self.unit or '<root>'} ({self.phase})"


# Names of event kinds in tests, where they differ from the engine's.
KINDS: dict[str, str] = {}
MEMORY_KINDS: dict[str, str] = {}  # the same for kinds of memory


class Events:
    """The events of a model, in order."""

    def __init__(self, trace: Any) -> None:
        self._trace = trace

    def record(self, kind: str, unit: str = "") -> None:
        """Record an event of the test, in order with the others."""
        self._trace.record(kind, unit, "")

    @contextmanager
    def listening(self, listener: Callable[[Event], None] | None = None) -> Iterator[list[Event]]:
        """Collect the events inside the context, and pass them to `listener`."""
        seen: list[Event] = []

        def note(event: Any) -> None:
            found = Event(KINDS.get(event.name, event.name), event.unit, event.phase)
            seen.append(found)
            if listener is not None:
                listener(found)

        with self._trace.listening(note):
            yield seen


class Memory:
    """Live bytes of a model by kind."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    @property
    def live(self) -> dict[str, int]:
        """Live bytes by kind, possibly with zeros. The same object at each call."""
        found: dict[str, int] = self._ledger.live
        return found

    @property
    def held(self) -> dict[str, int]:
        """Live bytes by kind, without zeros."""
        return {MEMORY_KINDS.get(kind, kind): count for kind, count in self.live.items() if count}

    def peak(self, kind: str) -> int:
        """The peak bytes of `kind` since `reset_peaks`."""
        found: int = self._ledger.peak(kind)
        return found

    def peaks(self) -> dict[str, int]:
        """`peak` of every kind with a peak above zero."""
        return {MEMORY_KINDS.get(kind, kind): peak for kind in self.live if (peak := self.peak(kind))}

    @property
    def total(self) -> int:
        """Live bytes of all kinds."""
        found: int = self._ledger.total
        return found

    @property
    def peak_total(self) -> int:
        """The peak bytes of all kinds together since `reset_peaks`."""
        found: int = self._ledger.peak_total
        return found

    def reset_peaks(self) -> None:
        """Restart all peaks from the live bytes."""
        self._ledger.reset_peaks()


class CommStats:
    """Collectives of a model by kind: `all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`, `scalar` (control)."""

    def __init__(self, traffic: Any) -> None:
        self._traffic = traffic

    @property
    def counts(self) -> dict[str, int]:
        """The number of issued collectives by kind."""
        found: dict[str, int] = self._traffic.counts
        return found

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of their unsharded sides, by kind."""
        found: dict[str, int] = self._traffic.bytes
        return found

    @property
    def messages(self) -> int:
        """The number of messages, sent and received, of scatters from one rank."""
        found: int = self._traffic.messages
        return found

    @property
    def staged(self) -> int:
        """Bytes copied through staging buffers."""
        found: int = self._traffic.staged
        return found

    def reset(self) -> None:
        """Count from now on."""
        self._traffic.reset()


class FlatParam:
    """One flat parameter of a unit.

    Attributes:
        layout: the places of parameters. originals: the users' parameters, in the order of the layout.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.layout = handle.layout
        self.originals: list[nn.Parameter] = list(handle.face.originals)

    @property
    def shard(self) -> Tensor:
        """This rank's part of it."""
        found: Tensor = self._handle.shard
        return found

    @property
    def unsharded(self) -> Tensor:
        """The unsharded flat parameter; without memory while it is sharded."""
        found: Tensor = self._handle.unsharded.flat
        return found

    @property
    def sharded_views(self) -> list[Tensor]:
        """This rank's part of each parameter."""
        found: list[Tensor] = self._handle.at_rest.views
        return found

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter for optimizers that do not see the original parameters."""
        found: nn.Parameter = self._handle.flat_param
        return found

    @property
    def rank(self) -> int:
        """This rank's place on the shard axis."""
        found: int = self._handle.rank
        return found

    def own_gradients(self) -> list[Tensor | None]:
        """This rank's piece of the gradient of each of `originals`."""
        return list(self._handle.face.grads_of_leaves()) or [None] * len(self.originals)

    def own_piece(self, index: int, whole: Tensor) -> Tensor:
        """This rank's piece of `whole`, a value in the shape of `originals[index]`."""
        shard = torch.zeros(self.layout.shard_numel, dtype=whole.dtype)
        store(self.layout, self.rank, shard, index, whole)
        piece: Tensor = self._handle.at_rest.view_of(shard, index)
        return piece

    @property
    def has_orig_params(self) -> bool:
        """Whether optimizers see the original parameters."""
        return all(holder is not self._handle.flat_param for holder in self._handle.face.holders)

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard lives on the CPU, by the user's choice."""
        return bool(self._handle.options.offload)

    @property
    def is_alone(self) -> bool:
        """Whether the shard axis has one rank, so that the shard is the whole flat parameter."""
        found: bool = self._handle.is_unsharded_at_rest
        return found

    @property
    def is_sharded(self) -> bool:
        """Whether it is neither unsharded nor being gathered."""
        return bool(self._handle.state is SHARDED)

    @property
    def is_unsharded(self) -> bool:
        """Whether it is unsharded, with a finished gather."""
        return bool(self._handle.state is UNSHARDED)


class Unit:
    """One unit of a model.

    Attributes:
        flat_params: by dtype and kind.
    """

    def __init__(self, unit: Any) -> None:
        self._inner = unit
        self.flat_params = [FlatParam(handle) for handle in unit.handles]

    @property
    def name(self) -> str:
        """The path of its module, "" of the outermost one; known once the first forward has begun."""
        found: str = self._inner.position.name
        return found

    @property
    def label(self) -> str:
        """The name in messages."""
        found: str = self._inner.label
        return found

    @property
    def is_sharded(self) -> bool:
        """Whether all its parameters are sharded, except persistent ones."""
        found: bool = self._inner.is_sharded
        return found

    @property
    def options(self) -> Any:
        """The options chosen by users; comparable."""
        return self._inner.options

    @property
    def schedule(self) -> Any:
        """The options chosen by users for the time of communication."""
        return self._inner.options.schedule

    @property
    def comm_hook(self) -> Any:
        """The registered communication hook, or None."""
        return self._inner.options.comm_hook

    @property
    def reduction_group(self) -> Any:
        """The process group over which its gradients are averaged."""
        groups = self._inner.groups
        return (groups.replicate or groups.scatter).process_group

    @property
    def post_forward_axis(self) -> Any:
        """The axis over which parameters stay sharded between forward and backward: `ranks`, and its `rank` there."""
        (transport,) = self._inner.kept.retain.transports.values()
        return transport.group

    @property
    def forward_prefetch(self) -> list[str]:
        """Names of the units that users chose for prefetching in forwards."""
        return [each.position.name for each in self._inner.options.forward_targets.units()]

    @property
    def backward_prefetch(self) -> list[str]:
        """Names of the units that users chose for prefetching in backwards."""
        return [each.position.name for each in self._inner.options.backward_targets.units()]

    @property
    def prefetches_own(self) -> bool:
        """Whether the units prefetched in backwards belong to this unit's model."""
        targets = self._inner.options.backward_targets.units()
        return all(model_of(each) is model_of(self._inner) for each in targets)


def _model(model: Any) -> Any:
    return model_of(model._unit)


def events(model: Any) -> Events:
    """The events of `model` from now on."""
    return Events(_model(model).resources.events)


@contextmanager
def actions(model: Any, note: Callable[[Verb, Sequence[str]], None]) -> Iterator[None]:
    """A context in which `note` gets each action of the schedules before the engine executes it: the verb, and the
    names of the units."""
    executor = _model(model).iteration.executor
    do = executor.do

    def noted(actions: Any) -> Iterator[Any]:
        for verb, units in actions:
            note(verb, [unit.position.name for unit in units])
            yield verb, units

    with patch.object(executor, "do", lambda actions, backward=None: do(noted(actions), backward)):
        yield


# The engine's tables of legal transitions, by what has such a state.
STATE_MACHINES: Mapping[str, Mapping[Any, frozenset[Any]]] = {
    "shards": SHARD_STEPS,
    "phases": PHASE_STEPS,
    "stages": STAGE_STEPS,
}


def states(model: Any) -> Iterator[tuple[str, str, str, str, str]]:
    """For each flat parameter of `model` now: the stage of the iteration, the phase of the unit, the place of the data,
    what leaves show, and where this rank's gradients are."""
    root = _model(model)
    for each in root.units:
        for handle, views, own in each.kinds:
            yield root.iteration.stage.value, each.phase.value, handle.state.value, views.mode.value, _place_of(own)


def _place_of(own: Any) -> str:
    if any(each.reduction is None or each.reduction.inputs for each in own.reducing):
        return "being reduced"
    if own.reducing:
        return "reduced"
    if own.slots.buffer is not None or own.slots.collected:
        return "in slots"
    return "awaited" if own.missing else "none"


def memory(model: Any) -> Memory:
    """The live bytes of `model`."""
    return Memory(_model(model).resources.tracker)


def comm_stats(model: Any) -> CommStats:
    """The collectives of `model`."""
    return CommStats(_model(model).resources.comm_stats)


def units(model: Any) -> list[Unit]:
    """All units of the model with the wrapper `model`, which may be an inner one; the outermost last."""
    return [Unit(each) for each in _model(model).units]


def borrow_gathers_memory(model: Any) -> BorrowedBuffer:
    """Let the late slots of the outermost unit of `model`, which had no backward yet, be a buffer that may borrow."""
    made = borrowed_buffer(_model(model).outermost)
    assert made is not None
    return made


def held_by_units(model: Any) -> list[set[str]]:
    """For each unit, the classes of the objects that it references, directly or not. User modules and tensors are not
    followed, since their hooks reference the engine; of functions, closures and defaults are, but not globals."""
    return [_held_by(each) for each in _model(model).units]


def _held_by(start: object) -> set[str]:
    seen: dict[int, object] = {}
    left = [start]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, nn.Module, Tensor, weakref.ref)):
            continue
        seen[id(each)] = each
        if isinstance(each, FunctionType):
            left += [each.__closure__, each.__defaults__, each.__kwdefaults__]
        else:
            left += gc.get_referents(each)
    return {type(each).__name__ for each in seen.values()}


def copies_of_shards(model: Any) -> int:
    """The number of shards of which units keep a copy, to notice writes to them."""
    return sum(len(each.kept.shards) for each in units_in(model))


def kept_gradient_bytes(model: Any) -> int:
    """The bytes that are kept allocated for gradients of small parameters."""
    faces = [handle.face for each in units_in(model) for handle in each.handles]
    kept = [getattr(face, "shown", None) for face in faces]  # of DTensors
    return sum(each._storage.nbytes() for each in kept if each is not None)


def unit(wrapper: Any) -> Unit:
    """The unit of this `wrapper`."""
    return Unit(wrapper._unit)


def opens_ranges(wrapper: Any) -> bool:
    """Whether actions of its unit open ranges of a profiler."""
    return "reshard" in wrapper._unit.__dict__


def bring_to_rest(model: Any) -> None:
    """What a call between iterations begins with. No communication."""
    quiesce(_model(model).units, collective=False)


def flat_params(model: Any) -> list[FlatParam]:
    """All flat parameters, unit by unit."""
    return [each for found in units(model) for each in found.flat_params]


def owed(model: Any) -> list[Tensor]:
    """For each of `flat_params`, this rank's residuals of its gradients under error feedback, unsharded, after cleaning
    up any failed backward: shape (padded numel,), float32, in the units of the communicated gradients; zeros where
    there are none."""
    _model(model).iteration.finish_interrupted()
    found = []
    for handle, _, own in (kind for each in _model(model).units for kind in each.kinds):
        layout, flat = handle.layout, torch.zeros(handle.layout.padded_numel)
        held = getattr(own.carried, "held", {})  # of residuals
        others = [rank for rank in range(layout.world) if rank != handle.rank]
        sent = held["shard"].view(len(others), -1) if "shard" in held else torch.zeros(len(others), layout.shard_numel)
        shards = dict(zip(others, sent, strict=True))
        if "replicate" in held:
            shards[handle.rank] = held["replicate"]
        for rank, shard in shards.items():
            for piece, place in zip(layout.pieces(rank), layout.pieces_in_shard, strict=True):
                flat[piece.slice] = shard[place.slice].float()
        found.append(flat)
    return found


def wrappers_called(model: Any) -> set[int]:
    """The ids of the wrapped modules whose forwards are called by users."""
    return {id(each.entries.first) for each in _model(model).setup.entries}


def parts(model: Any) -> list[weakref.ref[Any]]:
    """Weak references to objects that the engine made for `model`, which must be freed with the model."""
    root = _model(model)
    held = [root, *root.units, *(handle.shard for each in root.units for handle in each.handles)]
    return [weakref.ref(each) for each in held]


def shared_state(model: Any) -> weakref.ref[Any]:
    """A weak reference to the state shared by all units of `model`."""
    return weakref.ref(_model(model))


def begin(model: Any, *, training: bool = False) -> None:
    """Run the setup of the first forward."""
    _model(model).setup.lazy_init(training=training)


def move(model: Any, device: torch.device) -> None:
    """Let the engine treat `device` as the compute device of `model`."""
    _model(model).resources.device.device = device


def check_shards_on(model: Any, device: torch.device) -> None:
    """Run a forward's check for shards of `model` on `device`, which this machine may lack."""
    with FakeTensorMode():
        for unit in _model(model).units:
            for handle in unit.handles:
                handle.shard = torch.empty(handle.shard.shape, device=device)
    _model(model).setup.check_placed()


def limits_gathers(model: Any) -> bool:
    """Whether gathers wait for free memory."""
    found: bool = _model(model).resources.limiter.limit
    return found


def is_last_backward(model: Any) -> bool:
    """Whether backwards wait for all of their reductions at the end."""
    return not defers(_model(model))


def weight(model: Any) -> float:
    """The weight of this rank's gradients in the mean over ranks."""
    found: float = _model(model).backwards.weight
    return found


def schedule_in_words(model: Any) -> str:
    """The description of the settings that ranks compare."""
    found: str = _model(model).setup.description
    return found


def does_what_is_chosen(model: Any) -> bool:
    """Whether the resolved options of units include all choices that users have made since."""
    setup = _model(model).setup
    settled = [unit.resolved for unit in setup.units]
    for unit in setup.units:
        setup._resolve(unit)
    return settled == [unit.resolved for unit in setup.units]


def waits_for_gradients(model: Any) -> bool:
    """Whether a gradient accumulation node is held for the next backward."""
    hooks = _model(model).observers.find(GradientHooks)
    return hooks is not None and bool(hooks.expects_gradients)


def drop_observers(model: Any, *, all_of_them: bool = False) -> None:
    """Remove all observers of ended backwards, or all observers; a later forward does not restore them."""
    observers = _model(model).observers
    kept = [each for each in observers.all if type(each).backward_ended is Observer.backward_ended]
    observers.set(*[] if all_of_them else kept)


def non_finite_detector(model: Any) -> Any:
    """The detector of non-finite values, None where it was not requested."""
    return next((each for each in _model(model).observers.all if each.requested_by == "detect_nonfinite()"), None)


def replicate_stream(model: Any) -> Any:
    """The stream of sums over replicas."""
    return _model(model).resources.streams.replicate._stream


def counters_of(model: Any) -> list[int]:
    """How many counters the leaves of each unit have: those whose versions change with one of them."""
    found = []
    for unit in units_in(model):
        for handle in unit.handles:
            left, counters = set(range(len(handle.leaves))), 0
            while left:
                counters += 1
                before = [leaf._version for leaf in handle.leaves]
                torch.autograd.graph.increment_version(handle.leaves[min(left)])
                left -= {i for i in left if handle.leaves[i]._version != before[i]}
            found.append(counters)
    return found


@contextmanager
def large_gradients() -> Iterator[None]:
    """Treat gradients as large ones, which are moved individually as they arrive."""
    with patch.object(grads, "SMALL_BYTES", 0), patch.object(flat_param, "SMALL_BYTES", 0):
        yield


# --- transports -------------------------------------------------------------------------------------------------------


def arguments_of(transport: Any) -> dict[str, Any]:
    """The arguments for constructing a double of `transport`."""
    names = ("group", "device", "comm_stats", "tracker")
    return {name: getattr(transport, name) for name in names}


def comm_stats_of(transport: Any) -> CommStats:
    """The collectives of `transport`, and of other transports of its model."""
    return CommStats(transport.comm_stats)


def memory_of(transport: Any) -> Memory:
    """The live bytes of the model of `transport`."""
    return Memory(transport.tracker)


def outbox_rests(exchange: Any) -> bool:
    """Whether the outbox of an `exchange` through shared memory has released its pages, or does so now."""
    return bool(exchange._shared.trim())


def looks(exchange: Any) -> int:
    """The number of polls by a rank that waits for an `exchange` through shared memory before it sleeps."""
    return int(exchange._shared.looks)


def issued_by_group() -> dict[str, tuple[int, int]]:
    """The places of all exchanges through shared memory of this process, by the names of their groups."""
    return {each._name: each.position for each in exchanges._all()}


def bitmaps_by_group() -> dict[str, str]:
    """The bitmaps of gradients that this process has reduced, by the names of their groups."""
    return {f"bitmaps in {each.group_name}": bitmaps_in(each) for each in [*per_group._made]}


_LOOKS_ALONE = exchanges._LOOKS_ALONE


def issued_in_common(model: Any) -> int:
    """The collectives of backwards that are kept for a comparison with those of other models."""
    return sum(len(each) for turns in _model(model).agreement.member.turns for each in turns.in_common.values())


def forget_kept_memory() -> None:
    """Forget memory of earlier models that other tensors keep, with which each new unit is compared."""
    shared_storage._left.clear()


def share_processors(shared: bool = True) -> None:
    """Set whether ranks of this process assume more ranks than processors, as when several jobs run at once."""
    exchanges._LOOKS_ALONE = exchanges._LOOKS if shared else _LOOKS_ALONE


def make_small_outboxes() -> None:
    """Give outboxes of this process 128 KiB: tests wrap around more often, and fewer pages are allocated again after
    each rest, which took a seventh of the time of ranks."""
    groups.CAPACITY = 128 * 1024


def share_one_device() -> None:
    """Let all gloo groups of this process use one device: each device has a thread that wakes up a hundred times a
    second, and jobs leave many groups behind."""
    device = dist.ProcessGroupGloo.create_default_device()

    class OnOneDevice(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OnOneDevice


def attendant_loop(attended: Any, wanted: Any, hurried: Any) -> Callable[[], None]:
    """The loop of the thread that progresses exchanges, with two events: one wakes it, one shortens its period."""
    made = Attendant(lambda: attended)
    made._wanted, made._hurried = wanted, hurried
    return made._run


def outbox_bytes(exchange: Any) -> int:
    """The bytes of pages that this rank's outbox of an `exchange` through shared memory has now."""
    return int(exchange._shared._segment.held) - CONTROL


def outboxes(model: Any) -> dict[str, int]:
    """The same for the exchanges of a model's units: parameters ("gather") and gradients ("reduce")."""
    found = {}
    for each in _model(model).units:
        own = each.axes.own_transports
        for name, transport in (("gather", own.gather), ("reduce", own.scatter)):
            made = vars(transport).get("_in_memory")  # set by the first exchange
            found[name] = outbox_bytes(made) if made is not None else 0
    return found


# --- agreement --------------------------------------------------------------------------------------------------------


def verdict_of(model: Any) -> Callable[[], BaseException | None]:
    """A function that returns the error that ends all collective operations of the ranks; None without one."""
    agreement = _model(model).agreement
    return lambda: agreement.peers.verdict


def doing() -> str:
    """This rank's current operation, as reported to other ranks."""
    return current_watch()._local.status().doing


def is_busy(model: Any) -> bool:
    """Whether this rank is known to be inside of an iteration, where it may wait for others."""
    busy: bool = _model(model).agreement.sequence.busy
    return busy


def meetings(model: Any) -> int:
    """The number of places where this rank left a note about an unexpected event."""
    return len(_model(model).agreement.sequence.meetings.noted_at)


def note(model: Any, key: str) -> str | None:
    """The value of `key` in the store, None without one."""
    found: str | None = _model(model).agreement.peers.store.read(key)
    return found
