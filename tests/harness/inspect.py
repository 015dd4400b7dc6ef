"""The one place in tests that looks inside a model.

What tests need of a wrapped model beyond its public names they read here, under names that stay when the engine's
classes and members change theirs: whoever moves or renames those mends this file and no test. Functions take a wrapper;
what they return reads the engine at each use.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flatfsdp.engine.base.events import Observer
from flatfsdp.engine.comm.shared_memory import exchange as exchanges
from flatfsdp.engine.comm.shared_memory import groups
from flatfsdp.engine.comm.shared_memory.attendant import Attendant
from flatfsdp.engine.comm.shared_memory.exchange import CONTROL
from flatfsdp.engine.flat import gradient_slots as grads
from flatfsdp.engine.flat.states import SHARDED, UNSHARDED
from flatfsdp.engine.runtime.model import model_of
from flatfsdp.engine.runtime.module_tree import units_in
from flatfsdp.engine.watchdog.regions import current_watch


class Event(NamedTuple):
    """One thing that the engine did: its kind, the path of the unit's module ("" of the outermost), and its phase."""

    kind: str
    unit: str
    phase: str

    def __str__(self) -> str:
        return f"{self.kind} {self.unit or '<root>'} ({self.phase})"


# Kinds of events in the words of tests, where the engine's are others.
KINDS: dict[str, str] = {}
MEMORY_KINDS: dict[str, str] = {}  # and kinds of bytes


class Events:
    """What happens in a model, in order."""

    def __init__(self, trace: Any) -> None:
        self._trace = trace

    def record(self, kind: str, unit: str = "") -> None:
        """Something that happens in a test, in order with the rest."""
        self._trace.record(kind, unit, "")

    @contextmanager
    def listening(self, listener: Callable[[Event], None] | None = None) -> Iterator[list[Event]]:
        """Collect (and hand to `listener`) what happens inside the context."""
        seen: list[Event] = []

        def note(event: Any) -> None:
            found = Event(KINDS.get(event.kind, event.kind), event.unit, event.phase)
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
        """Bytes by kind; kinds of which nothing is alive may be there. The same object at each call."""
        found: dict[str, int] = self._ledger.live
        return found

    @property
    def held(self) -> dict[str, int]:
        """Bytes of the kinds of which something is alive."""
        return {MEMORY_KINDS.get(kind, kind): count for kind, count in self.live.items() if count}

    def peak(self, kind: str) -> int:
        """The most bytes of `kind` since `reset_peaks`."""
        found: int = self._ledger.peak(kind)
        return found

    def peaks(self) -> dict[str, int]:
        """`peak` of every kind of which something was alive."""
        return {MEMORY_KINDS.get(kind, kind): peak for kind in self.live if (peak := self.peak(kind))}

    @property
    def total(self) -> int:
        """Live bytes of all kinds."""
        found: int = self._ledger.total
        return found

    @property
    def peak_total(self) -> int:
        """The most bytes of all kinds together since `reset_peaks`."""
        found: int = self._ledger.peak_total
        return found

    def reset_peaks(self) -> None:
        """Measure from what is alive now."""
        self._ledger.reset_peaks()


class CommStats:
    """Collectives of a model by kind: `all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`, `scalar` (control)."""

    def __init__(self, traffic: Any) -> None:
        self._traffic = traffic

    @property
    def counts(self) -> dict[str, int]:
        """How many were issued."""
        found: dict[str, int] = self._traffic.counts
        return found

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of their unsharded side."""
        found: dict[str, int] = self._traffic.bytes
        return found

    @property
    def messages(self) -> int:
        """Sent and received, of what is carried out pairwise."""
        found: int = self._traffic.messages
        return found

    @property
    def staged(self) -> int:
        """Bytes that went through staging buffers."""
        found: int = self._traffic.staged
        return found

    def reset(self) -> None:
        """Count from now on."""
        self._traffic.reset()


class FlatParam:
    """One flat parameter of a unit.

    Attributes:
        layout: where which parameter lies. leaves: the original parameters, in its order.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.layout = handle.layout
        self.leaves: list[nn.Parameter] = handle.leaves

    @property
    def shard(self) -> Tensor:
        """This rank's part of it."""
        found: Tensor = self._handle.shard
        return found

    @property
    def unsharded(self) -> Tensor:
        """All of it; without memory while it is sharded."""
        found: Tensor = self._handle.unsharded.flat
        return found

    @property
    def sharded_views(self) -> list[Tensor]:
        """This rank's part of each parameter."""
        found: list[Tensor] = self._handle.at_rest.views
        return found

    @property
    def parameter(self) -> nn.Parameter:
        """What optimizers see of it where they do not see the original parameters."""
        found: nn.Parameter = self._handle.flat_param
        return found

    @property
    def rank(self) -> int:
        """This rank's place on the shard axis."""
        found: int = self._handle.rank
        return found

    @property
    def has_orig_params(self) -> bool:
        """Whether optimizers see the original parameters, each by itself."""
        found: bool = not self._handle.face.is_flat
        return found

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard lives on the CPU, by the user's choice."""
        return bool(self._handle.options.offload)

    @property
    def is_alone(self) -> bool:
        """Whether the shard axis has one rank, and its shard is all of it."""
        found: bool = self._handle.is_unsharded_at_rest
        return found

    @property
    def is_sharded(self) -> bool:
        """Whether it is neither unsharded nor on its way to that."""
        return bool(self._handle.state is SHARDED)

    @property
    def is_unsharded(self) -> bool:
        """Whether it is unsharded, and not only on its way to that."""
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
        found: str = self._inner.place.name
        return found

    @property
    def label(self) -> str:
        """The name in messages."""
        found: str = self._inner.label
        return found

    @property
    def is_sharded(self) -> bool:
        """Whether all is sharded that does not stay on the device."""
        found: bool = self._inner.is_sharded
        return found

    @property
    def options(self) -> Any:
        """What users chose for it, comparable."""
        return self._inner.options

    @property
    def schedule(self) -> Any:
        """What users chose of when it communicates."""
        return self._inner.options.schedule

    @property
    def comm_hook(self) -> Any:
        """What was registered, None without."""
        return self._inner.options.comm_hook

    @property
    def reduction_group(self) -> Any:
        """The process group over which its gradients are averaged."""
        groups = self._inner.groups
        return (groups.replicate or groups.scatter).process_group

    @property
    def post_forward_axis(self) -> Any:
        """Among which ranks parameters stay between forward and backward: `ranks`, and its `rank` there."""
        (transport,) = self._inner.kept.retain.transports.values()
        return transport.group

    @property
    def forward_prefetch(self) -> list[str]:
        """Names of the units that users want to be gathered ahead in forwards."""
        return [each.place.name for each in self._inner.options.forward_targets.units()]

    @property
    def backward_prefetch(self) -> list[str]:
        """Names of the units that users want to be gathered ahead in backwards."""
        return [each.place.name for each in self._inner.options.backward_targets.units()]

    @property
    def prefetches_own(self) -> bool:
        """Whether the units to be gathered ahead in backwards are of this unit's model."""
        targets = self._inner.options.backward_targets.units()
        return all(model_of(each) is model_of(self._inner) for each in targets)


def _model(model: Any) -> Any:
    return model_of(model._unit)


def events(model: Any) -> Events:
    """What happens in `model` from now on."""
    return Events(_model(model).resources.events)


def memory(model: Any) -> Memory:
    """The live bytes of `model`."""
    return Memory(_model(model).resources.tracker)


def comm_stats(model: Any) -> CommStats:
    """What `model` has communicated."""
    return CommStats(_model(model).resources.comm_stats)


def units(model: Any) -> list[Unit]:
    """All units of the model that `model` is the outermost wrapper of, or a part; the outermost last."""
    return [Unit(each) for each in _model(model).units]


def held_by_units(model: Any) -> list[set[str]]:
    """For each unit, the classes of what it holds, and of what that holds. Modules and tensors are the user's, whose
    hooks hold the engine; of functions counts what they were made with, not the globals of their module."""
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
    """How many shards units keep a copy of, to notice what is written to them."""
    return sum(len(each.kept.shards) for each in units_in(model))


def kept_gradient_bytes(model: Any) -> int:
    """The memory that is kept for gradients of small parameters."""
    faces = [handle.face for each in units_in(model) for handle in each.handles]
    return sum(face.kept._storage.nbytes() for face in faces if face.kept is not None)


def unit(wrapper: Any) -> Unit:
    """The unit of this `wrapper`."""
    return Unit(wrapper._unit)


def opens_ranges(wrapper: Any) -> bool:
    """Whether what its own unit does opens ranges of a profiler."""
    return "reshard" in wrapper._unit.__dict__


def flat_params(model: Any) -> list[FlatParam]:
    """All of them, unit by unit."""
    return [each for found in units(model) for each in found.flat_params]


def owed(model: Any) -> list[Tensor]:
    """Of each of `flat_params`, all of it, what this rank owes of its gradients by error feedback, once what a failed
    backward has left is over: shape (padded numel,), float32, in the units of what travels; zeros where that is
    nothing."""
    _model(model).iteration.finish_interrupted()
    found = []
    for handle, _, own in (kind for each in _model(model).units for kind in each.kinds):
        layout, flat = handle.layout, torch.zeros(handle.layout.padded_numel)
        held = own.residuals.held if own.residuals is not None else {}
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
    """The ids of the wrapped modules whose forward users call."""
    return {id(each.entries.first) for each in _model(model).setup.entries}


def parts(model: Any) -> list[weakref.ref[Any]]:
    """References to what the engine made for `model`, which goes when the model does."""
    root = _model(model)
    held = [root, *root.units, *(handle.shard for each in root.units for handle in each.handles)]
    return [weakref.ref(each) for each in held]


def shared_state(model: Any) -> weakref.ref[Any]:
    """A reference to what exists once for the units of `model`."""
    return weakref.ref(_model(model))


def begin(model: Any, *, training: bool = False) -> None:
    """What the first forward does before it computes."""
    _model(model).setup.lazy_init(training=training)


def move(model: Any, device: torch.device) -> None:
    """Let the engine take `device` for the one where `model` computes."""
    _model(model).resources.device.device = device


def check_shards_on(model: Any, device: torch.device) -> None:
    """What a forward checks that finds the shards of `model` on `device`, which this machine may lack."""
    with FakeTensorMode():
        for unit in _model(model).units:
            for handle in unit.handles:
                handle.shard = torch.empty(handle.shard.shape, device=device)
    _model(model).setup.check_placed()


def limits_gathers(model: Any) -> bool:
    """Whether gathers wait until memory is free."""
    found: bool = _model(model).resources.limiter.limit
    return found


def is_last_backward(model: Any) -> bool:
    """Whether backwards end with all of their reductions."""
    found: bool = _model(model).backwards.is_last_backward
    return found


def weight(model: Any) -> float:
    """What this rank's gradients count in the mean over ranks."""
    found: float = _model(model).backwards.weight
    return found


def schedule_in_words(model: Any) -> str:
    """What was set, as ranks compare it."""
    found: str = _model(model).setup.description
    return found


def waits_for_gradients(model: Any) -> bool:
    """Whether somebody holds a node that a gradient of the next backward is to come to."""
    return bool(_model(model).accumulators.expects_gradients)


def drop_observers(model: Any, *, all_of_them: bool = False) -> None:
    """Attach nothing that looks at what backwards leave, or nothing at all; a later forward does not change it."""
    observers = _model(model).observers
    kept = [each for each in observers.all if type(each).backward_ended is Observer.backward_ended]
    observers.set(*[] if all_of_them else kept)


def non_finite_detector(model: Any) -> Any:
    """What looks for values that are not finite, None where nobody asked for it."""
    return next((each for each in _model(model).observers.all if each.requested_by == "detect_nonfinite()"), None)


def replicate_stream(model: Any) -> Any:
    """The stream of sums over replicas."""
    return _model(model).resources.streams.replicate._stream


@contextmanager
def large_gradients() -> Iterator[None]:
    """Treat gradients as large ones, which are moved one by one as they come."""
    with patch.object(grads, "SMALL_BYTES", 0):
        yield


# --- transports -------------------------------------------------------------------------------------------------------


def arguments_of(transport: Any) -> dict[str, Any]:
    """What a double of `transport` is made with."""
    names = ("group", "device", "comm_stats", "tracker")
    return {name: getattr(transport, name) for name in names}


def comm_stats_of(transport: Any) -> CommStats:
    """What was communicated with `transport`, and others of its model."""
    return CommStats(transport.comm_stats)


def memory_of(transport: Any) -> Memory:
    """The live bytes of what `transport` is of."""
    return Memory(transport.tracker)


def outbox_rests(exchange: Any) -> bool:
    """Whether the outbox of an `exchange` through shared memory gives its pages back at once, or has."""
    return bool(exchange._shared.rest())


def looks(exchange: Any) -> int:
    """How often a rank that waits for an `exchange` through shared memory looks before it sleeps."""
    return int(exchange._shared.looks)


_LOOKS_ALONE = exchanges._LOOKS_ALONE


def share_processors(shared: bool = True) -> None:
    """Ranks of this process look as if there were more of them than processors: several jobs run at once. Or not."""
    exchanges._LOOKS_ALONE = exchanges._LOOKS if shared else _LOOKS_ALONE


def make_small_outboxes() -> None:
    """Outboxes of this process have 128 KiB, which tests get round more often, and take fewer pages again after each
    rest: that was a seventh of the time of ranks."""
    groups.CAPACITY = 128 * 1024


def attendant_loop(attended: Any, wanted: Any, hurried: Any) -> Callable[[], None]:
    """What the thread runs that attends to exchanges, with these events: what wakes it, and what hurries it."""
    made = Attendant(lambda: attended)
    made._wanted, made._hurried = wanted, hurried
    return made._run


def outbox_bytes(exchange: Any) -> int:
    """What this rank's outbox of an `exchange` through shared memory has of pages now."""
    return int(exchange._shared._segment.held) - CONTROL


def outboxes(model: Any) -> dict[str, int]:
    """The same for all that units of a model exchange by: parameters ("gather") and gradients ("reduce")."""
    found = {}
    for each in _model(model).units:
        own = each.axes.own_transports
        for name, transport in (("gather", own.gather), ("reduce", own.scatter)):
            made = vars(transport).get("_in_memory")  # by the first exchange
            found[name] = outbox_bytes(made) if made is not None else 0
    return found


# --- agreement --------------------------------------------------------------------------------------------------------


def verdict_of(model: Any) -> Callable[[], BaseException | None]:
    """Asks for the error that ends everything that the ranks do together; None while there is none."""
    agreement = _model(model).agreement
    return lambda: agreement.peers.verdict


def doing() -> str:
    """What this rank does, as it tells the others that ask."""
    return current_watch()._local.status().doing


def meetings(model: Any) -> int:
    """At how many places this rank left a note because something unexpected happened."""
    return len(_model(model).agreement.sequence.meetings.places)


def note(model: Any, key: str) -> str | None:
    """What stands at `key` in the store, None if nothing does."""
    found: str | None = _model(model).agreement.peers.store.read(key)
    return found
