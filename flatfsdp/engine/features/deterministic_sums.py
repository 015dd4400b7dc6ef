"""Sums of gradients that have the same bits on any number of ranks. [Note: deterministic sums]

[Note: deterministic sums] A step consists of the microbatches 0 to n - 1 of all ranks, each of them one forward and one
backward of one rank. Their gradients are added in the order of a tree over the indices ([Note: tree of microbatches])
and divided by n at the end. Autograd adds no two of them: what a backward under `no_sync()` leaves is taken away when
the next one begins, and merged like the digits of a binary counter. A reduction sends each rank its pieces of the
blocks that have remained, and each adds up what it gets. If that is not the whole step yet, it keeps its piece of each
block, and the reduction is a partial one ([Note: partial sums]): no rank sees a `.grad` before the sum is complete.

Ranks learn who has which microbatches from one exchange, when a backward that reduces begins. A parameter without a
gradient in a microbatch counts as zero there, and so does a unit that it does not reach.
"""

from __future__ import annotations

import platform
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...api import check_number
from ...errors import UsageError, fail, few, ranks_in_words, refuse_value
from ..agreement.agreement import agreement_of
from ..base import _torch
from ..base.events import Observer
from ..base.overrides import Override
from ..comm.axes import Axis
from ..comm.sum_tree import SumTree
from ..flat.flat_param import FlatParameter
from ..flat.gradients import Gradients
from ..guards import optimizer_hooks
from ..models.param_registry import owner_of
from ..runtime.model import Model, model_of
from ..runtime.unit import Unit
from ..runtime.unit_state import Resolved
from .block_reducer import UNFORESEEN, BlockSums, Ledger, Step

NORMS: Any = torch.nn.InstanceNorm1d.mro()[2]  # the base of batch and instance norms, which has no public name


@dataclass(eq=False)
class Microbatch:
    """One microbatch: its index, None for a stand-in, and the number of all; whether a backward has begun in it, and
    whether it runs again, so that its gradients are only looked at."""

    index: int | None
    of: int
    begun: bool = False
    again: bool = False


_running: Override[Microbatch | None] = Override(None)


def running_index() -> int | None:
    """The index of the microbatch that runs; None outside of any, and for a stand-in."""
    return _running.value.index if _running.value is not None else None


@contextmanager
def microbatch(index: int | None, *, of: int) -> Iterator[None]:
    """A context around the forward and the backward of one microbatch of a step, for models with
    `deterministic_sums=True`.

    A step consists of `of` microbatches, whose indices are those of all ranks together: every index from 0 to `of` - 1
    occurs once, on any rank, in any order. Gradients are the mean over them, so the loss of a microbatch is the mean of
    its own samples, and is not divided. `.grad` is set by the backward that completes the step; under `no_sync()`
    the last backward of each rank reduces, as always.

    Every forward and backward of a model is collective. A rank with fewer microbatches than others runs the rest with
    any batch and with `index=None`: gradients of that backward are dropped.

    Args:
        index: of this microbatch among those of the step; None for a stand-in.
        of: the number of microbatches of the step, the same on all ranks.

    Raises:
        ConfigTypeError, ConfigValueError: `index` or `of` is not such a number.
        UsageError: inside of another `microbatch`. In the backward: this index, or another `of`, ran before in this
            step, here or on another rank; on all ranks, before anything is added up. At its end: no backward of a
            model with `deterministic_sums=True` ran inside.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> net = torch.nn.Linear(2, 1)
        >>> model = flatfsdp.FullyShardedDataParallel(net, use_orig_params=True, deterministic_sums=True)
        >>> for index in range(3):
        ...     with flatfsdp.microbatch(index, of=3):
        ...         model(torch.full((4, 2), float(index))).mean().backward()
        >>> model.weight.grad
        tensor([[1., 1.]])
    """
    check_number("microbatch: of", of, "the number of microbatches of a step, at least 1", 1)
    if index is not None:
        accepted = f"an index from 0 to {of - 1}, or None for a batch whose gradients are dropped"
        check_number("microbatch: index", index, accepted, 0)
        if index >= of:
            refuse_value("microbatch: index", index, accepted)
    if _running.value is not None and _running.value.again:
        yield
        return
    if _running.value is not None:
        raise UsageError(
            f"microbatch({index}, of={of}) inside of microbatch({_running.value.index}): use one at a time"
        )
    running = Microbatch(index, of)
    with _running.being(running):
        yield
    if not running.begun:
        raise UsageError(
            f"microbatch({index}, of={of}): no backward of a model with deterministic_sums=True ran inside, so nothing "
            "was numbered, or divided by the number of microbatches. Wrap the model with deterministic_sums=True, and "
            "call backward() inside of the context; or leave the context out"
        )


class DeterministicSums(Observer):
    """Attached to one model: follows the microbatches of its steps.

    Attributes:
        ledger: what is known of these.
    """

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self.ledger = Ledger()
        self._weight = 1.0
        self._backward: weakref.ref[Any] = weakref.ref(self)  # the last one that was seen
        self._partial: list[tuple[Unit, Resolved, Resolved]] = []
        self._has_reduced = False  # whether the last backward has
        self._checked_version = 0  # of the options; a program may go on after an error
        self._threads = 0  # on which this rank computes
        self.ledger.refuse = weakref.WeakMethod(self._refuse)
        optimizer_hooks.looking.add(self)

    @property
    def description(self) -> str:
        """With what decides on the bits of a microbatch's gradient, as far as it can be compared."""
        kernels, model = torch.backends.cpu.get_cpu_capability(), self._model()
        if model is not None and (device := model.resources.device).has_streams and device.device.type == "cuda":
            kernels = f"{kernels}, {torch.get_device_module(device.device).get_device_name(device.device)}"
        switches = {
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "no mkldnn": not torch.backends.mkldnn.enabled,
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.deterministic": torch.backends.cudnn.deterministic,
        }
        return ", ".join(
            (
                f"deterministic_sums=True with torch {torch.__version__}",
                f"{torch.get_num_threads()} threads",
                f"{kernels} of {_processor()}",
                f"float32 products of {torch.get_float32_matmul_precision()} precision",
                *(name for name, is_on in switches.items() if is_on),
            )
        )

    # -- setup -------------------------------------------------------------------------------------------------------

    def setup_begins(self, units: Sequence[Unit]) -> None:
        self._threads = torch.get_num_threads()
        _check_outside_of_units(units[-1])
        axes = {(unit.axes.own.shard.ranks, _ranks_of(unit.axes.own.replicate)) for unit in units}
        for unit in units:
            _check_unit(unit, alone=len(axes) == 1)
            for grads in unit.grads:
                grads.carried = BlockSums(grads.handle, self.ledger, grads.reuse)

    def options_changed(self) -> None:
        model = self._model()
        if model is not None:
            self._checked_version = -1
            for unit in model.setup.units:
                _check_options(unit)
            self._checked_version = model.setup.version

    # -- a backward --------------------------------------------------------------------------------------------------

    def backward_reaches(self) -> None:
        model = self._model()
        if model is None or model.iteration.backward is not None:
            return
        if model.backwards.weight != self._weight:
            raise UsageError(
                "deterministic_sums=True: the loop of flatfsdp.join() weighs the batches of ranks by itself. Leave it "
                "out: a rank without a microbatch runs any batch inside of microbatch(None, of=n)"
            )
        stands_in = _running.value is not None and _running.value.index is None
        self._weight = model.backwards.weight = 0.0 if stands_in else 1.0

    def backward_agreed(self, *, reduces: bool) -> None:
        """Of a reduction without a graph, of gradients that earlier backwards have left."""
        step = self.ledger.step
        if reduces and not _torch.in_backward() and step is not None and not step.is_complete:
            self._begin(None, reduces=True)

    def backward_begins(self, units: Sequence[Unit]) -> None:
        model = self._model()
        if model is None or (backward := model.iteration.backward) is None:
            return
        if backward is self._backward() or not backward.schedule.brings:
            return
        self._backward = weakref.ref(backward)
        if torch.get_num_threads() != self._threads:
            self._refuse(
                f"deterministic_sums=True: this rank computes on {torch.get_num_threads()} threads, and did so on "
                f"{self._threads} when the model first ran. Call torch.set_num_threads() before, on all ranks"
            )
        if (running := _running.value) is None:
            self._refuse(
                "deterministic_sums=True: a backward ran outside of flatfsdp.microbatch(), which names the microbatch "
                "of the step it belongs to. Write: with flatfsdp.microbatch(index, of=n): loss = ...; loss.backward()"
            )
        running.begun = True
        try:
            self._begin(running, reduces=backward.sync)
        except UsageError as error:
            model.agreement.refuse(error)  # autograd does not pass it on to other ranks
            raise

    def _begin(self, running: Microbatch | None, *, reduces: bool) -> None:
        """A backward begins; None: it only reduces."""
        ledger, model = self.ledger, self._model()
        if model is not None and model.setup.version != self._checked_version:
            self.options_changed()
        self._restore()
        if ledger.step is not None and ledger.step.is_complete:
            self._end_step()
        with _torch.as_plain_tensors():  # parameters may refuse to be used
            self._take_windows()
        if ledger.step is None and running is None:
            return  # nothing to reduce
        if running is not None and running.again:
            if not reduces:
                self._refuse("a microbatch of an audit runs again while gradients are not to be synchronized")
            ledger.step, ledger.current = Step(SumTree(running.of), exchanged=[{}]), None  # nobody adds anything
            self._sum_partially()
            return
        if ledger.step is None and running is not None:
            ledger.step = Step(SumTree(running.of))
        if running is not None and (problem := _problem_of_next(ledger.running, running)):
            self._refuse(problem)
        ledger.current = running.index if running is not None else None
        if ledger.current is not None:
            ledger.running.own.add(ledger.current)
            ledger.running.unsent.add(ledger.current)
        self._has_reduced = reduces
        if reduces and model is not None:
            try:
                self._exchange(model, ledger.running)
            except RuntimeError as error:  # a connection broke: the report of another rank explains it
                model.agreement.explain(error)
                raise
            if not ledger.running.is_complete:
                self._sum_partially()

    def _refuse(self, problem: str) -> NoReturn:
        """Refuse a backward of this rank, which others may not: autograd does not pass the reason on to them."""
        error, model = UsageError(problem), self._model()
        if model is not None:
            model.agreement.refuse(error)
        fail(error)

    @property
    def _states(self) -> list[tuple[Gradients, BlockSums]]:
        model = self._model()
        units = model.units if model is not None else []
        every = [grads for unit in units for grads in unit.grads]
        return [(grads, grads.carried) for grads in every if isinstance(grads.carried, BlockSums)]

    def _take_windows(self) -> None:
        """Take what the last backward has left in units, before the next one adds to it."""
        step, dropped, left = self.ledger.step, [], False
        for grads, _ in self._states:
            filled = set(grads.slots.filled) if grads.accumulation.window_open else set()
            grads.stash_grads()  # drops what users have dropped
            left = left or bool(grads.slots.filled)
            if filled != grads.slots.filled:
                dropped.append(grads)
        if dropped and (left or (step is not None and step.exchanged)):
            self._refuse(
                f"deterministic_sums=True: .grad of unit {dropped[0].handle.label} was dropped between microbatches of "
                "a step, and other gradients of the step were not. To begin the step again, drop all by zero_grad() of "
                "the outermost module, on all ranks"
            )
        if dropped:
            self._end_step()
        if step is None or dropped:
            return
        for grads, state in self._states:
            if self._has_reduced and state.since == len(step.exchanged):
                continue  # its gradients of the last backward were
            window = grads.take_window() if grads.accumulation.window_open else None
            if self.ledger.current is not None:
                state.add(self.ledger.current, window)

    def _end_step(self) -> None:
        if self.ledger.step is not None and self.ledger.step.is_complete:
            self._check_reduced("a backward of the next step")
        for grads, state in self._states:
            state.drop()
            grads.accumulation.contributed = set()
        self.ledger.step = self.ledger.current = None

    # -- ranks -------------------------------------------------------------------------------------------------------

    def _exchange(self, model: Model, step: Step) -> None:
        """Learn the microbatches that all ranks have added. Collective."""
        peers = agreement_of(model.agreement).peers
        if not self.ledger.groups:
            groups = peers.numbers_of_ranks(min(model.outermost.groups.shard.ranks))
            for rank, (group, *_) in groups.items():
                self.ledger.groups[rank] = frozenset(r for r, (other, *_) in groups.items() if other == group)
        own, step.unsent = sorted(step.unsent), set()
        run = range(own[0], own[-1] + 1, own[1] - own[0] if own[1:] else 1) if own else range(0)
        listed = 0 if own == [*run] else len(own)
        answers = peers.numbers_of_ranks(step.tree.leaves, listed, run.start, run.stop, run.step)
        sizes = {rank: leaves for rank, (leaves, *_) in answers.items()}
        if len(set(sizes.values())) > 1:
            texts = [f"rank {rank} has of={leaves}" for rank, leaves in sorted(sizes.items())]
            raise UsageError(f"deterministic_sums=True: microbatches of one step with different sizes: {few(texts)}")
        added = {rank: {*range(*ends)} for rank, (_, _, *ends) in answers.items()}
        if most := max(number for _, number, *_ in answers.values()):  # not in equal distances
            numbers = peers.numbers_of_ranks(*own[:listed], *[-1] * (most - listed))
            added |= {rank: {*numbers[rank]} - {-1} for rank, (_, number, *_) in answers.items() if number}
        self._check_repeated(step, added)
        step.exchanged.append({rank: frozenset(indices) for rank, indices in added.items()})
        world = model.outermost.groups.world
        found = sum(len(indices) for each in step.exchanged for indices in each.values())
        # Where ranks are simulated, the others are taken to do as much as this one.
        step.is_complete = found * (1 if len(answers) == world else world) >= step.tree.leaves
        if not all(added.values()):
            agreement_of(model.agreement).unused.compares = True  # ranks without a microbatch lack all gradients

    def _check_repeated(self, step: Step, added: dict[int, set[int]]) -> None:
        owners: dict[int, list[int]] = {}
        every: list[Mapping[int, Set[int]]] = [*step.exchanged, added]
        for rank, indices in [item for each in every for item in each.items()]:
            for index in indices:
                owners.setdefault(index, []).append(rank)
        if repeated := sorted(index for index, ranks in owners.items() if len(ranks) > 1):
            raise UsageError(
                f"deterministic_sums=True: microbatch {repeated[0]} of {step.tree.leaves} ran on "
                f"{ranks_in_words(sorted(owners[repeated[0]]))}, but each belongs to one rank"
                f"{f' (and {len(repeated) - 1} more like it)' if len(repeated) > 1 else ''}. Number the microbatches "
                "of all ranks together, for example rank * count + number"
            )

    def _sum_partially(self) -> None:
        """Let the reductions of this backward be partial ones, since some microbatches are to come."""
        model = self._model()
        for unit in model.units if model is not None else ():
            before = unit.resolved
            reducers = {handle: (scatter, None) for handle, (scatter, _) in before.reducers.items()}
            unit.resolved = replace(before, reducers=reducers, completes=frozenset())
            self._partial.append((unit, before, unit.resolved))

    def _restore(self) -> None:
        for unit, before, partial in self._partial:
            if unit.resolved is partial:
                unit.resolved = before
        self._partial.clear()

    # -- ends --------------------------------------------------------------------------------------------------------

    def backward_ends(self) -> None:
        """Refuse gradients that have come unforeseen. Keeps reductions from going on after a backward, too."""
        model = self._model()
        backward = model.iteration.backward if model is not None else None
        if backward is None or backward.task == -1 or backward is self._backward():
            return
        if backward.schedule.brings:
            self._refuse(UNFORESEEN)

    def backward_ended(self, backward: Any) -> None:
        self._restore()

    def gradients_lost(self, units: Sequence[Unit]) -> None:
        self._restore()
        self.drop_step()

    def drop_step(self) -> None:
        """Drop all sums of the running step, partial ones too."""
        for grads, state in self._states:
            state.drop()
            grads.accumulation.keep_partial(None, set())
        self.ledger.step = self.ledger.current = None

    @contextmanager
    def again(self, index: int, of: int) -> Iterator[None]:
        """A context around the forward and the backward of a microbatch of a step that is complete: its gradients go
        through the reductions, where `Ledger.look` sees them, and are dropped there. Nothing is exchanged for them."""
        try:
            with _running.being(Microbatch(index, of, again=True)):
                yield
        finally:
            self.drop_step()
            for grads, _ in self._states:
                grads.accumulation.close_window()

    def check_complete(self, call: str) -> None:
        """Refuse a `call` that needs gradients while some microbatches of the step are to come."""
        step = self.ledger.step
        if step is None:
            return
        if step.is_complete:
            self._check_reduced(call)
            return
        missing = step.missing
        which = f"microbatches {few(list(map(str, missing)))}" if missing else "a backward outside of no_sync()"
        raise UsageError(
            f"{call}: deterministic_sums=True, and the sum of the step's gradients is not complete: of "
            f"{step.tree.leaves} microbatches, {which} did not come. Run each index from 0 to "
            f"{step.tree.leaves - 1} on one rank, the last backward of each rank outside of no_sync(); or drop what "
            "has run of the step by zero_grad() of the outermost module, on all ranks. One that runs after the last of "
            "a step, also a stand-in, begins the next step"
        )

    def _check_reduced(self, call: str) -> None:
        """Refuse a `call` that needs gradients if some units did not reduce theirs of a step whose microbatches have
        all run."""
        for grads, _ in self._states:
            if grads.accumulation.pending:
                raise UsageError(
                    f"{call}: deterministic_sums=True, and unit {grads.handle.label} did not reduce its gradients of a "
                    "step whose microbatches have all run. Let all units reduce in the same backwards"
                )

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        if self._model() not in optimizer_hooks.stepped_by(optimizer):
            return
        name, fused = type(optimizer).__name__, [group for group in optimizer.param_groups if group.get("fused")]
        if any(parameter.device.type == "cpu" for group in fused for parameter in group["params"]):
            raise UsageError(
                f"{name}.step(): deterministic_sums=True, and torch's fused steps on CPUs round the last elements of a "
                "tensor in another way, which are others on another number of ranks. Build the optimizer with "
                "fused=False; flatfsdp.fuse_optimizer_steps() may be called"
            )
        if optimizer_hooks.sees_wholes(optimizer):
            raise UsageError(
                f"{name}.step(): deterministic_sums=True, and this optimizer takes norms of matrices of which ranks "
                "have parts, in the order of ranks. Let it step on whole ones with flatfsdp.matrix_steps()"
            )
        if not optimizer_hooks.is_at_work(optimizer):  # else in a backward, on gradients that are complete
            self.check_complete(f"{type(optimizer).__name__}.step()")


def attach_deterministic_sums(model: Model, nested: Iterable[Unit]) -> None:
    """Add up gradients of `model`, which is new, in the order of a tree, if that is set for it or for the models of the
    `nested` units, which become a part of it."""
    found = [model_of(unit).observers.find(DeterministicSums) is not None for unit in nested]
    if model.setup.settings.deterministic_sums or any(found):
        model.observers.add(DeterministicSums(model))
        model.observers.add(_WrittenBuffers(model))


class _WrittenBuffers(Observer):
    """Refuses forwards that write to buffers: these would follow from the microbatches of one rank.

    The first forward may fill caches. It looks at the second one, and then leaves.
    """

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._before: dict[tuple[int, str], tuple[torch.Tensor, int]] | None = None
        self._forwards = 0

    def forward_begins(self, unit: Unit, inputs: Any, *, outermost: bool) -> None:
        if outermost and _running.value is not None:
            self._forwards += 1
            self._before = self._buffers() if self._forwards > 1 else None

    def forward_ended(self, unit: Unit, output: Any, *, outermost: bool) -> None:
        if not outermost or self._before is None or (model := self._model()) is None:
            return
        before, after, self._before = self._before, self._buffers(), None
        model.observers.remove(self)
        nothing = None, 0
        written = []
        for key in {**before, **after}:
            (one, version), (other, later) = before.get(key, nothing), after.get(key, nothing)
            if one is not other or version != later:
                written.append(key[1])
        if written:
            raise UsageError(
                f"deterministic_sums=True: a forward writes to buffers ({few(written)}), which then follow from the "
                "microbatches of this rank, and are others on another number of ranks. Use modules without such "
                "buffers, as GroupNorm or LayerNorm, or write to them between steps, alike on all ranks"
            )

    def _buffers(self) -> dict[tuple[int, str], tuple[torch.Tensor, int]]:
        """The buffers, with their versions, by number of the entry and name."""
        model = self._model()
        entries = enumerate(model.outermost.entries if model is not None else ())
        named = ((number, name, each) for number, entry in entries for name, each in entry.named_buffers())
        return {(number, name): (each, each._version) for number, name, each in named}


@lru_cache(maxsize=1)
def _processor() -> str:
    """The model of this machine's processor, as far as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or platform.machine())


def _check_outside_of_units(outermost: Unit) -> None:
    """Refuse gradients of which nobody adds up microbatches."""
    outside = [
        name
        for entry in outermost.entries
        for name, each in entry.named_parameters()
        if each.requires_grad and not isinstance(each, FlatParameter) and owner_of(each) is None
    ]
    if outside:
        raise UsageError(
            f"deterministic_sums=True: no unit holds {few(outside)}, which are trained: autograd adds up gradients of "
            "this rank's microbatches in their order, and nobody divides by their number. Freeze them, or do not "
            "ignore them"
        )


def _ranks_of(axis: Axis | None) -> tuple[int, ...]:
    return axis.ranks if axis is not None else ()


def _problem_of_next(step: Step, running: Microbatch) -> str:
    if running.of != step.tree.leaves:
        return (
            f"microbatch({running.index}, of={running.of}): earlier microbatches of this step had "
            f"of={step.tree.leaves}, of which {few(list(map(str, step.missing))) or 'none'} did not come on this rank. "
            "All microbatches of a step have the same number"
        )
    if running.index in step.own:
        return (
            f"microbatch({running.index}, of={running.of}): a backward of this microbatch has run in this step. "
            "Each index belongs to one backward. To run the step again, drop what has run of it by zero_grad() of the "
            "outermost module, on all ranks"
        )
    return ""


def _check_unit(unit: Unit, *, alone: bool) -> None:
    """Refuse what sums in another order."""
    problem = ""
    if unit.axes.elsewhere or not alone:
        problem = "its parameters are spread over other ranks than those of other units. Shard all over the same ranks"
    if any(views.extended for views in unit.views):
        problem = (
            "it has DTensors (tensor parallelism), quantized weights or others that are stored in another form: their "
            "sums over ranks have an order of their own. Shard plain parameters"
        )
    for handle in unit.handles:
        precision = handle.precision
        reduces = handle.options.trainable and precision.master.is_floating_point
        if reduces and (precision.reduce_bits is not None or precision.reduce.itemsize < 4):
            problem = (
                f"gradients are reduced in {precision.reduce}, or in few bits. Pass "
                "MixedPrecision(reduce_dtype=torch.float32)"
            )
        elif reduces and precision.accumulate != precision.reduce:
            problem = f"accumulate_dtype is {precision.accumulate}, expected that of the sum, {precision.reduce}"
    for entry in unit.entries:
        for name, module in entry.named_modules():
            if isinstance(module, NORMS) and module.track_running_stats:
                problem = (
                    f"{name or type(module).__name__} updates statistics of the batches that its rank has seen, which "
                    "are others on another number of ranks. Use GroupNorm or LayerNorm, or track_running_stats=False"
                )
            elif isinstance(module, torch.nn.SyncBatchNorm):
                problem = (
                    f"{name or type(module).__name__} normalizes a batch of all ranks, so a microbatch has other "
                    "outputs on another number of ranks. Use GroupNorm or LayerNorm"
                )
    if problem:
        raise UsageError(f"deterministic_sums=True: unit {unit.label}: {problem}")
    _check_options(unit)


def _check_options(unit: Unit) -> None:
    options, problem = unit.options, ""
    if options.comm_hook is not None or options.all_reduce_hook is not None:
        problem = "a communication hook sums gradients in an order of its own"
    elif options.schedule.divide_by is not None:
        problem = "set_gradient_divide_factor() was called, but gradients are divided by the `of` of microbatch()"
    elif options.schedule.reduce and not options.schedule.all_reduce:
        problem = "set_requires_all_reduce(False) was called, but partial sums follow from the microbatches"
    if problem:
        raise UsageError(f"deterministic_sums=True: unit {unit.label}: {problem}. Use only one of the two")
