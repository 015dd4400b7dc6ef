"""Flat parameters that stay unsharded, and when they are gathered again: frozen ones on request, and all of them for
forwards without gradients, for generation and evaluation.

[Note: persistent parameters] A flat parameter that no optimizer steps need not be gathered for every use. A
*persistent* one was gathered once, and stays unsharded on the device, or as a copy in host memory from which the device
is filled again: this costs memory, or the transfer from the host, instead of a collective. Whether a handle is
persistent, and whether it must be gathered, is decided where a forward begins, and is part of the facts that ranks
compare there, so that no rank skips a gather alone. A persistent parameter that was written to is gathered again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn

from ...api import check_number
from ...errors import UsageError, refuse_value
from ..base import _torch
from ..base.events import Observer
from ..device.memory import MemoryTracker
from ..device.streams import PendingWork, Stream, pinned_like
from ..flat.faces import REQUIRES_GRAD
from ..flat.flat_param import FlatParamHandle
from ..flat.sources import DEVICE, HOST, KeptSource, ParamPersistence, UnshardedParam
from ..flat.states import GATHERING, SHARDED, SUMMONED, UNSHARDED
from ..flat.views import SHOWS_SHARD
from ..models.rest import check_outside, collective_call, evict, free_at_once, free_unsharded, models_of, quiesce
from ..models.unnoticed_writes import is_compared
from ..models.walks import units_in
from ..runtime.model import Model, model_of
from ..runtime.unit import Unit


class HostCache(KeptSource):
    """The unsharded parameter in host memory, page-locked if there is an accelerator. [Note: persistent parameters]"""

    is_local = reads_host = True

    def __init__(self, unsharded: UnshardedParam, *, tracker: MemoryTracker) -> None:
        """The host waits until `unsharded` is copied."""
        flat = unsharded.flat.detach()
        self.copy: torch.Tensor = pinned_like(flat)
        self.copy.copy_(flat)
        self._free = tracker.allocate("host copy", flat.nbytes)
        self.dtype = unsharded.dtype  # the compute dtype when it was made
        self.versions = ()

    def serves(self, dtype: torch.dtype) -> bool:
        return dtype == self.dtype

    def fill(self, unsharded: UnshardedParam, stream: Stream) -> PendingWork:
        return stream.upload(unsharded.flat, self.copy)

    def free(self) -> None:
        self._free()


class HandleRef(NamedTuple):
    """One handle of a unit."""

    unit: Unit
    kind: int

    @property
    def handle(self) -> FlatParamHandle:
        """The handle itself."""
        return self.unit.handles[self.kind]

    @property
    def is_fetched(self) -> bool:
        """Whether its parameters are kept unsharded, in the compute dtype."""
        handle, dtype = self.handle, self.unit.dtype_of(self.handle)
        if handle.persistence is HOST:
            return handle.kept_source is not None and handle.kept_source.serves(dtype)
        return handle.state is UNSHARDED

    def fetch(self) -> None:
        """Gather its parameters, and keep them where they are to stay. Collective over the shard axis.

        Precondition: users see the shard.
        """
        unit, handle, resources = self.unit, self.handle, self.unit.resources
        if handle.state is SHARDED:  # not if a user has unsharded the unit, or it stayed unsharded after a backward
            source = unit.source_of(handle)
            if resources.limiter.held:
                resources.limiter.make_room(handle.buffer(source.dtype), ahead=False)
            handle.launch_unshard(source, resources.streams.unshard)
            if source.is_local:
                resources.limiter.record_upload()
        if handle.state is GATHERING:
            handle.wait_unshard()
        unit.record_event("keep")
        if handle.persistence is HOST:
            handle.drop_kept_source()
            cache = HostCache(handle.unsharded, tracker=handle.tracker)
            handle.keep(cache)
            resources.free(handle)
            cache.versions = handle.writes.all


class NoTraining(Observer):
    """Raises UsageError for training inside `inference()`."""

    def step_begins(self, unit: Unit | None) -> bool:
        if unit is None:
            raise UsageError(
                "a backward was started inside inference() for a forward from before the context; run the backward "
                "first, or leave the context"
            )
        if torch.is_grad_enabled() and not _torch.in_backward():
            raise UsageError(
                f"a forward of unit {unit.label} inside inference() has gradients enabled, but parameters are kept "
                "there for forwards without gradients. Leave the context to train"
            )
        return False


class PersistentParams(Observer):
    """The persistent parameters of one model.

    Attributes:
        pinned: the handles kept by `inference()`; None outside of it.
    """

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._wanted: list[HandleRef] | None = None  # of units with `keep_frozen`; None if options were changed
        self._due: list[HandleRef] = []
        self._maybe_stale: list[HandleRef] = []
        self.pinned: list[HandleRef] | None = None
        self._no_training = NoTraining()

    def options_changed(self) -> None:
        """An option of a unit was changed."""
        self._wanted = None

    def before_first_gather(self) -> str:
        """Find the parameters to keep; a description of the gathers that this needs, "" if none.

        Raises:
            UsageError: inside `inference()`, if parameters would have to be gathered again.
        """
        model = self._model()
        assert model is not None  # its forward runs
        if self._wanted is None:
            self._wanted = [
                HandleRef(unit, kind)
                for unit in model.units
                if unit.options.schedule.keep_frozen is not None
                for kind in range(len(unit.handles))
            ]
        self._due, self._maybe_stale = [], []
        for ref in self.pinned or ():
            if not ref.is_fetched:
                raise UsageError(
                    f"inside inference(), parameters of unit {ref.unit.label} were written to, or its module was "
                    "switched between train() and eval(), which changes its compute dtype. Parameters that the "
                    "context keeps are not gathered again: leave the context before the change and enter it again "
                    "afterwards"
                )
        reported: dict[str, list[str]] = {}
        for ref in self._wanted:
            unit, handle = ref.unit, ref.handle
            if self.pinned is not None and ref in self.pinned:
                continue
            wanted = persistence_of(unit, handle)
            if handle.persistence is not wanted:
                evict(unit, ref.kind)
                handle.persistence = wanted
            if wanted is None:
                if not handle.options.trainable:
                    reported.setdefault("no longer frozen", []).append(unit.label)
            elif unit.views[ref.kind].mode is not SHOWS_SHARD:
                continue
            elif not (ref.is_fetched or unit.kept.maybe_stale or handle.face.users_swap_holders):
                self._due.append(ref)  # all ranks count the same writes, unless users swap holders
                reported.setdefault("gathering frozen parameters to keep them", []).append(unit.label)
            elif unit.kept.maybe_stale or is_compared(unit, handle):
                self._maybe_stale.append(ref)
                reported.setdefault("comparing kept parameters with their shards", []).append(unit.label)
            elif not ref.is_fetched:
                self._due.append(ref)
                reported.setdefault("gathering frozen parameters to keep them", []).append(unit.label)
        return "; ".join(f"{words}: {', '.join(labels)}" for words, labels in reported.items())

    def first_gather_agreed(self) -> None:
        """Gather the parameters found by `before_first_gather`. Collective over the shard axis if there are any."""
        model, due, maybe_stale = self._model(), self._due, self._maybe_stale
        self._due, self._maybe_stale = [], []
        if (
            maybe_stale
            and model is not None
            and model.agreement.any_rank(not all(ref.is_fetched for ref in maybe_stale))
        ):
            for ref in maybe_stale:
                evict(ref.unit, ref.kind)
            due = [*due, *maybe_stale]
        for ref in maybe_stale:
            ref.unit.kept.maybe_stale = False
        for ref in due:
            ref.fetch()

    def pin(self, model: Model, refs: Iterable[HandleRef]) -> None:
        """Let `refs` stay unsharded on the device until `unpin`. Collective over the shard axes.

        Precondition: at rest.
        """
        self.pinned = list(refs)
        model.observers.add(self._no_training)
        if model.agreement.any_rank(any(not ref.is_fetched for ref in self.pinned if ref.handle.persistence)):
            for ref in self.pinned:
                evict(ref.unit, ref.kind)
        for ref in self.pinned:
            handle, ref.unit.kept.trusted = ref.handle, True
            handle.persistence = DEVICE
            if not ref.is_fetched:
                ref.fetch()

    def unpin(self, model: Model) -> None:
        """Undo `pin`: free parameters that were not kept before it. Precondition: at rest."""
        pinned, self.pinned = self.pinned or [], None
        model.observers.remove(self._no_training)
        for ref in pinned:
            handle, ref.unit.kept.trusted = ref.handle, False
            handle.persistence = persistence_of(ref.unit, handle)
            if handle.persistence is not DEVICE and handle.state is UNSHARDED:
                model.resources.free(handle)


def persistent_params_of(model: Model) -> PersistentParams:
    """The persistent parameters of `model`, attached to it from now on."""
    found = model.observers.find(PersistentParams)
    if found is None:
        found = PersistentParams(model)
        model.observers.add(found)
    return found


def attach_persistent_params(model: Model) -> None:
    """Attach them to `model` if a unit has the option."""
    if any(unit.options.schedule.keep_frozen is not None for unit in model.units):
        persistent_params_of(model)


def _is_pinned(model: Model) -> bool:
    """Whether `inference()` keeps parameters of `model`."""
    found = model.observers.find(PersistentParams)
    return found is not None and found.pinned is not None


def _budget(method: str, max_bytes: object) -> float:
    """The argument `max_bytes` of `method`, validated; infinite for None."""
    accepted = "0 or more bytes, or None for all"
    return math.inf if max_bytes is None else check_number(f"{method}: max_bytes", max_bytes, accepted, 0)


def _can_stay(handle: FlatParamHandle) -> bool:
    """Whether all parameters of `handle` are frozen, and its shard is not already its unsharded form."""
    frozen = True not in map(REQUIRES_GRAD, handle.face.holders)
    return frozen and not handle.is_shard_in(handle.precision.compute)


def persistence_of(unit: Unit, handle: FlatParamHandle) -> ParamPersistence | None:
    """Where `handle` is kept unsharded according to the options of its `unit`; None if it is not."""
    where = unit.options.schedule.keep_frozen
    return ParamPersistence(where) if where is not None and _can_stay(handle) else None


def keep_frozen(outer: Unit, units: Sequence[Unit], max_bytes: object, on: str) -> None:
    """`keep_frozen_unsharded` of a module whose own unit is `outer`, with these `units` inside."""
    method = "keep_frozen_unsharded"
    left = _budget(method, max_bytes)
    choices = [residence.value for residence in ParamPersistence]
    if on not in choices:
        refuse_value(f"{method}: on", on, " or ".join(map(repr, choices)))
    check_outside(outer, method)
    if any(_is_pinned(model_of(unit)) for unit in units):
        raise UsageError(
            f"{method} of unit {outer.label} was called inside inference(); call it outside of that context"
        )
    for unit in units:
        size = sum(handle.unsharded_bytes for handle in unit.handles if _can_stay(handle))
        fits = 0 < size <= left
        evict(unit)
        model_of(unit).setup.set_schedule(unit, keep_frozen=on if fits else None)
        for handle in unit.handles:
            handle.persistence = persistence_of(unit, handle)
        left -= size if fits else 0
    for model in models_of(units):
        attach_persistent_params(model)


# --- inference() ------------------------------------------------------------------------------------------------------


@contextmanager
def inference(model: nn.Module, max_bytes: int | None = None) -> Iterator[None]:
    """A context for generation and evaluation: parameters are gathered once, at its beginning, and kept until its end.

    Forwards inside run under `torch.no_grad()`, give the same results, and gather only parameters beyond `max_bytes`.
    If all are kept, forwards do not communicate, and ranks may run different numbers of them. Between forwards,
    parameters are sharded, as usual. Do not change parameters inside; if you call `model.eval()`, do so before entering
    the context. Collective at its beginning and, unless an exception ends it, at its end.

    Args:
        model: a wrapper, or any module with wrappers inside.
        max_bytes: how many bytes of unsharded parameters each rank keeps, in addition to `keep_frozen_unsharded`; None
            for all. Flat parameters are selected in the order of modules, parents last, and those that do not fit are
            left out; then all ranks must run the same number of forwards, as usual.

    Raises:
        ConfigTypeError, ConfigValueError: for such a `max_bytes`.
        UsageError: nothing in `model` is wrapped; inside itself, a forward, a backward or `summon_full_params()`; for a
            forward with gradients, a backward, or a forward after parameters were written to, inside.
        AgreementError: ranks make different calls.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> model = flatfsdp.FullyShardedDataParallel(torch.nn.Linear(2, 1))
        >>> with flatfsdp.inference(model):
        ...     model(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """
    _budget("inference", max_bytes)
    units = units_in(model)
    if not units:
        raise UsageError(
            f"inference(): no module in {type(model).__name__} is wrapped by FullyShardedDataParallel. Wrap the model "
            "first and pass the wrapper"
        )
    models = models_of(units)
    for unit in units:
        _check_idle(unit)
    with ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        for each in models:
            undo.callback(_end, each)
        _begin(models, units, max_bytes)
        yield
    with collective_call(units, "the end of inference()"):
        pass


def _check_idle(unit: Unit) -> None:
    where = None
    if _torch.in_backward() or model_of(unit).iteration.in_forward:
        where = "a backward" if _torch.in_backward() else "a forward"
    elif unit.phase is SUMMONED:
        where = "summon_full_params()"
    elif _is_pinned(model_of(unit)):
        where = "inference()"
    if where is not None:
        raise UsageError(f"inference() of unit {unit.label} was entered inside {where}; enter it outside")


def _begin(models: list[Model], units: list[Unit], max_bytes: int | None) -> None:
    refs = _chosen(units, max_bytes)
    chosen = f"inference(max_bytes={max_bytes}), {len(refs)} flat parameters"
    quiesce(units, frees=True)
    with collective_call(units, chosen, always=True):
        for model in models:
            model.resources.streams.unshard.follow_compute()
            persistent_params_of(model).pin(model, [ref for ref in refs if model_of(ref.unit) is model])
            model.agreement.forwards_are_local = all(
                HandleRef(unit, kind) in refs
                for unit in model.units
                if unit.axes.is_spread
                for kind in range(len(unit.handles))
            )


def _end(model: Model) -> None:
    if not _is_pinned(model):
        return
    model.agreement.forwards_are_local = False
    free_unsharded(model)
    found = persistent_params_of(model)
    found.unpin(model)
    model.observers.remove(found)
    attach_persistent_params(model)
    for unit in model.units:
        unit.kept.end_choice()
    free_at_once(model)


def _chosen(units: list[Unit], max_bytes: int | None) -> list[HandleRef]:
    """The handles to keep, within the budget."""
    left = _budget("inference", max_bytes)
    chosen = []
    for unit in units:
        for kind, handle in enumerate(unit.handles):
            if handle.is_shard_in(unit.dtype_of(handle)):
                continue
            is_kept = persistence_of(unit, handle) is DEVICE
            size = 0 if is_kept else handle.unsharded_bytes
            if size <= left:
                left -= size
                chosen.append(HandleRef(unit, kind))
    return chosen
