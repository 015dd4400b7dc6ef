"""Audits of a model, which find and name faults of memory and processors that raise no error by themselves.

[Note: audit] With deterministic sums, a microbatch has the same gradient on every rank. So in some steps each rank
computes a microbatch of the next one again, and they compare checksums. If any differ, the ranks after those compute
the same ones once more: two ranks that agree are right. And nobody writes to parameters and optimizer states between
steps, so their checksums stay; versions show where a program has written to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.random import fork_rng

from ...api import check_number
from ...errors import AuditError, UsageError, fail, few, ranks_in_words, refuse_type
from ..agreement.agreement import agreement_of
from ..agreement.checksums import checksum
from ..agreement.object_collectives import all_or_none
from ..base import _torch
from ..base.events import Observer
from ..base.hashing import hash63
from ..base.nested_tensors import tensors_in
from ..flat.flat_param import FlatParamHandle
from ..flat.states import UNSHARDED
from ..flat.write_tracker import VERSION
from ..guards import optimizer_hooks
from ..models.rest import check_outside, outermost_model
from ..runtime.model import Model
from ..runtime.unit import Unit
from .deterministic_sums import DeterministicSums
from .microbatches import Step, running

Memory = tuple[weakref.ref[torch.Tensor], tuple[int, ...]]  # a tensor, and versions that show writes to it
Checksums = dict[str, int]  # of one microbatch, by words, in the order in which they were taken

OF_UNIT = " of unit "
COMPARES = "compares what an audit has found"
REMEDY = "No optimizer has stepped with it: go on, on other machines, from a checkpoint that was saved before"


class Audit:
    """Finds bits that flip in memory, and ranks that compute something else than others, where no error shows them, and
    names rank, unit, parameter and step. For a model with `deterministic_sums=True`.

    In every step of which the number is a multiple of `every`, before the optimizer changes anything, each rank calls
    `run(index)` for a microbatch of the next rank, with gathered parameters. Outputs of units, and gradients before
    they are added to others, must have the bits that they had there. If not, another rank (of two, the same one) runs
    it, too, and ranks are named whose values no other rank confirms. `.grad` and torch's random numbers stay as they
    are. In all steps, this rank's parameters, and tensors that optimizers keep for them, must have the bits before the
    next step that they had after the last one, and parameters before each forward, unless they were written to since.

    Not seen are flips after gradients were added to others, until the optimizer's step has ended; in microbatches that
    are not chosen; and in what is neither a parameter nor a tensor of an optimizer's state, such as buffers. What is
    compared are sums of words: a word that changes is seen, but not several whose changes add up to zero.

    Writes that torch does not count are taken for flips: through `.data` of original parameters, numpy, and list
    operations on DTensors such as `torch._foreach_mul_`. Call `accept()` after them.

    Each step of an optimizer is collective, reads shards and states twice more, and each forward reads shards once; an
    audited one takes a forward and a backward. All ranks construct it at the same point, between steps. It ends with
    the model, or by `remove()`.

    Args:
        model: the outermost wrapper.
        run: runs forward and backward of any microbatch of the running step, as the loop does, outside of `no_sync()`.
            Everything in it follows from the index: data and random numbers.
        every: a number of steps.

    Raises:
        AuditError: in a step or in a forward, on all ranks.
        ConfigTypeError, ConfigValueError: not such an argument.
        UsageError: no `deterministic_sums=True`, an audit that is there already, a nested wrapper, or inside of a
            `microbatch`; in a step: it is one in a backward, or microbatches of it ran before the audit was
            constructed, or its number set.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> net = torch.nn.Linear(2, 1)
        >>> model = flatfsdp.FullyShardedDataParallel(net, use_orig_params=True, deterministic_sums=True)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def run(index: int) -> None:
        ...     with flatfsdp.microbatch(index, of=1):
        ...         model(torch.ones(4, 2)).mean().backward()
        >>> audit = flatfsdp.Audit(model, run, every=1)
        >>> run(0)
        >>> optimizer.step()
        >>> audit.step
        2
    """

    def __init__(self, model: nn.Module, run: Callable[[int], object], *, every: int) -> None:
        inner = outermost_model(model, "Audit")
        if not callable(run):
            refuse_type("Audit: run", run, "a function of an index: the forward and the backward of a microbatch")
        self._step, self._every = 1, check_number("Audit: every", every, "a number of steps, at least 1", 1)
        check_outside(inner.outermost, "Audit()")
        _check_between_microbatches("Audit()")
        sums = inner.observers.find(DeterministicSums)
        if sums is None or inner.observers.find(_Calls) is not None:
            problem = "it has one already" if sums is not None else "it was wrapped without deterministic_sums=True"
            raise UsageError(f"Audit(): expected a model with deterministic_sums=True and without an audit; {problem}")
        self._model: Callable[[], Model | None] = weakref.ref(inner)
        self._sums, self._run = sums, run
        self._kept: dict[str, tuple[Memory, int]] = {}  # what lies still, and its checksum, by name
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._seen: dict[int, Checksums] = {}  # of this rank's microbatches of an audited step
        self._again: Checksums | None = None  # of the one that is computed again
        sums.ledger.look = self._look
        self._calls = _Calls(self)
        for called in (optimizer_hooks.looking, optimizer_hooks.following):
            called.add(self._calls)
        for unit in inner.units:
            unit.around = partial(self._around, unit.around)
        inner.observers.add(self._calls)
        inner.setup.options_changed()

    @property
    def step(self) -> int:
        """The number of the running step, from 1. Programs may set it between steps, on all ranks alike."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        if number != self._step:
            _check_between_microbatches("Audit.step = ...")
            self._step = number
            self._seen.clear()

    def remove(self) -> None:
        """End it, on all ranks at the same point. The model may be regrouped then, or get another one."""
        if (model := self._model()) is None:
            return
        check_outside(model.outermost, "Audit.remove()")
        for called in (optimizer_hooks.looking, optimizer_hooks.following):
            called.discard(self._calls)
        for unit in model.units:
            if isinstance(around := unit.around, partial) and around.func == self._around:
                unit.around = around.args[0]
        self._sums.ledger.look = None
        model.observers.remove(self._calls)
        model.setup.options_changed()
        self._model = lambda: None
        self._kept.clear()
        self._seen.clear()

    # -- between steps -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare parameters and optimizer states now, as before they are saved. Collective, between iterations.
        Raises AuditError on all ranks."""
        if (model := self._model()) is not None:
            with model.agreement.collective_call("Audit.check()", always=True):
                self._compare(model, self._optimizers)

    def accept(self) -> None:
        """Take this rank's parameters and optimizer states for right as they are now, after writes that torch does not
        count. Between iterations; not collective."""
        if (model := self._model()) is not None:
            check_outside(model.outermost, "Audit.accept()")
            found = self._at_rest(model, self._optimizers)
            self._kept = {name: (memory, checksum(values)) for name, _, memory, values in found}

    def _before_gather(self) -> None:
        model = self._model()
        if model is not None and agreement_of(model.agreement).compares_forwards:
            self._compare(model, [])

    def _compare(self, model: Model, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Compare parameters, and states of these optimizers. Collective over all axes."""
        agreement, found = agreement_of(model.agreement), self._at_rest(model, optimizers)
        changed = [name for name, _, memory, v in found if self._kept_of(name, memory) not in (None, checksum(v))]
        if agreement.any_rank(bool(changed)):
            every = all_or_none(agreement.peers.axes, lambda: few(changed), doing=COMPARES)
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in every.items() if text)
            raise AuditError(
                f"step {self.step}: memory has changed since the last step, and nobody has written to it: {texts}. Its "
                "bits flipped, or it was written to in a way that torch does not count (through .data, numpy, another "
                "library, torch._foreach_mul_() of DTensors): call accept() of the audit after such a write. "
                f"{REMEDY}"
            )

    def _kept_of(self, name: str, memory: Memory) -> int | None:
        """Its checksum at the end of the last step, unless it was written to since."""
        (tensor, versions), found = self._kept.get(name, ((None, ()), 0))
        return found if tensor is memory[0] and versions == memory[1] else None

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the checksums of what `optimizer` may have written to."""
        model = self._model()
        if model is None or model not in optimizer_hooks.stepped_by(optimizer):
            return
        self._optimizers.add(optimizer)
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        kept = {}
        for name, holder, memory, values in self._at_rest(model, self._optimizers):
            found = None if id(holder) in stepped else self._kept_of(name, memory)
            kept[name] = memory, checksum(values) if found is None else found
        self._kept = kept

    def _at_rest(
        self, model: Model, optimizers: Iterable[torch.optim.Optimizer]
    ) -> Iterator[tuple[str, nn.Parameter, Memory, torch.Tensor]]:
        """This rank's parameters, and what `optimizers` keep for them: by name, with the parameter that users hold."""
        states = [*{id(each.state): each.state for each in optimizers}.values()]
        for unit in model.units:
            for handle in unit.handles:
                with _torch.as_plain_tensors():  # holders may be guarded
                    written = handle.writes.of_shard, *map(VERSION, handle.face.holders)
                for index, spec in enumerate(handle.layout.params):
                    name, span = _name(unit, spec.name), handle.layout.span_in_shard(index, handle.rank)
                    holder, shard = handle.face.holder_of(index), handle.shard
                    if handle.has_memory and not span.is_empty:
                        yield name, holder, (weakref.ref(shard), written), shard[span.slice]
                    for key, value in [pair for each in states if holder in each for pair in each[holder].items()]:
                        for part, each in enumerate(_plain(value)):
                            own = handle.face.elements_in(index, each) if each.shape == shard.shape else each
                            words = f"{key}{f' ({part})' if part else ''} of {name}"
                            yield words, holder, (weakref.ref(each), (each._version,)), own

    # -- microbatches ------------------------------------------------------------------------------------------------

    def _checksums(self, index: int | None) -> Checksums | None:
        """Those of a microbatch that runs, or has run; None if it is not audited."""
        if self._again is not None or index is None or self.step % self._every:
            return self._again
        return self._seen.setdefault(index, {})

    def _around(
        self, inside: Callable[..., Any] | None, unit: Unit, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forward of `unit`, and look at the parameters that it has computed with, and at its outputs."""
        run = call if inside is None else partial(inside, unit, call)
        index = running.value.index if running.value is not None else None
        found, model = self._checksums(index), self._model()
        if found is None or model is None:
            return run(*args, **kwargs)
        if unit is model.outermost:
            found.clear()  # of a step that was dropped
        for handle in unit.handles:
            for spec in handle.layout.params:
                found.setdefault(_name(unit, spec.name), 0)  # they come before what is computed with them
        try:
            output = run(*args, **kwargs)
        finally:  # a checkpoint stops a recomputation by an exception, where it has what it needs
            for handle in [each for each in unit.handles if each.state is UNSHARDED]:
                self._add(found, "", unit, handle, handle.unsharded.flat)
        sums = [checksum(each) for each in tensors_in(output) if type(each) is torch.Tensor]
        _add_to(found, f"the output{OF_UNIT}{unit.label}", sum(sums))
        return output

    def _add(self, found: Checksums, of: str, unit: Unit, handle: FlatParamHandle, values: Any) -> None:
        """Add the checksums of unsharded `values` of parameters."""
        for spec, span in zip(handle.layout.params, handle.layout.spans, strict=True):
            _add_to(found, f"{of}{_name(unit, spec.name)}", checksum(values[span.slice]))

    def _look(self, handle: FlatParamHandle, index: int | None, gradient: torch.Tensor) -> None:
        """Look at the unsharded `gradient` of one microbatch, before it is added to others."""
        model, found = self._model(), self._checksums(index)
        if model is not None and found is not None:
            unit = next(each for each in model.units if handle in each.handles)
            self._add(found, "the gradient of ", unit, handle, -gradient)  # -0.0, where none came, counts as zero

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare, before the first optimizer of a step changes anything. Collective; every rank runs the model."""
        model, step = self._model(), self._sums.ledger.step
        if model is None or model not in optimizer_hooks.stepped_by(optimizer):
            return
        if optimizer_hooks.is_at_work(optimizer):
            fail(UsageError("Audit: an optimizer steps in backwards, before gradients were compared. Do not let it"))
        if step is None:
            return  # another optimizer of the same step
        self._sums.check_complete(f"{type(optimizer).__name__}.step()")
        self.check()
        if self.step % self._every == 0:
            self._compare_microbatches(model, step)
        self._sums.drop_step()  # it has ended
        self._seen.clear()
        self._step += 1

    def _compare_microbatches(self, model: Model, step: Step) -> None:
        """Collective: every rank runs the model."""
        peers, turn, of = agreement_of(model.agreement).peers, self.step // self._every, step.tree.leaves
        ranks = sorted(step.exchanged[-1])
        chosen = {rank: sorted(own)[turn % len(own)] for rank in ranks if (own := step.added_by([rank]))}
        here, world = ranks.index(peers.rank), len(ranks)
        found = [self._seen.get(chosen.get(peers.rank, -1), {})]
        lacks = peers.rank in chosen and not found[0]
        for distance in (1, 2):
            # If that rank has none, nobody reads what is found.
            found.append(self._run_again(model, chosen.get(ranks[(here + distance) % world], 0), of))
            if distance == 1:
                with model.agreement.collective_call("the comparison of an audit", always=True):
                    digests = [hash63(str(sorted(each.items()))) for each in found]
                    sums = peers.numbers_of_ranks(*digests, int(lacks))
                if unseen := [rank for rank in ranks if sums[rank][2]]:
                    raise UsageError(
                        f"Audit: step {self.step} is audited, and microbatches of it ran on {ranks_in_words(unseen)} "
                        "before the audit was constructed, or its step set. Do both between steps, on all ranks"
                    )
                pairs = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
                if all(sums[rank][1] == sums[owner][0] for rank, owner in pairs if owner in chosen):
                    return
        every = [*all_or_none(peers.axes, lambda: found, doing=COMPARES).values()]
        problems = []
        for index, rank in enumerate(ranks):
            indices = [(index - distance) % world for distance in range(3)]
            votes = [(ranks[each], every[each][distance]) for distance, each in enumerate(indices)]
            if rank in chosen and (words := _judged(votes, alone=world == 1)):
                problems.append(f"of microbatch {chosen[rank]} of {of}, {words}")
        raise AuditError(
            f"step {self.step}: {'; '.join(problems[:3])}. Bits flipped in memory or in a processor; or what computes "
            "a microbatch does not follow from its index alone, as with random numbers that are not seeded by it, or "
            f"kernels that are not deterministic. {REMEDY}"
        )

    def _run_again(self, model: Model, index: int, of: int) -> Checksums:
        """The checksums of a microbatch that this rank computes again. Collective."""
        device = model.resources.device
        forked: Any = {"device_type": device.device.type, "devices": [device.device]} if device.has_streams else {}
        self._again = again = Checksums()
        try:
            with fork_rng(**({"devices": []} | forked)), torch.enable_grad(), self._sums.again(index, of):
                self._run(index)
        except BaseException as error:
            agreement_of(model.agreement).leave("the microbatch of an audit", error)  # others may wait for this rank
            raise
        finally:
            self._again = None
        return again


class _Calls(Observer):
    """Calls an audit."""

    requested_by = "Audit()"

    def __init__(self, audit: Audit) -> None:
        self.first_gather_agreed = audit._before_gather  # type: ignore[method-assign]
        self.optimizer_steps, self.optimizer_stepped = audit._before_step, audit._after_step

    def first_gather_agreed(self) -> None: ...


def _check_between_microbatches(call: str) -> None:
    if running.value is not None:
        raise UsageError(
            f"{call} inside of microbatch({running.value.index}): the audit would see a part of it. Do it between steps"
        )


def _judged(votes: list[tuple[int, Checksums]], *, alone: bool) -> str:
    """Which of the ranks that have computed the same have found something else than the others, and where that begins;
    "" if none has. If no two agree, all have. `alone`: there is one rank."""
    pairs = combinations(votes, 2)
    right = next((one for (rank, one), (other, same) in pairs if one == same and (alone or rank != other)), None)
    wrong = sorted({rank for rank, found in votes if found != right})
    if not wrong:
        return ""
    one = right if right is not None else votes[0][1]
    other = next(found for _, found in votes if found != one)
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    inside = [name for name in names if name.endswith(names[0].rpartition(OF_UNIT)[2])]
    return f"{ranks_in_words(wrong)} computed what no other rank confirms: {few(inside)}, first of {len(names)} values"


def _name(unit: Unit, parameter: str) -> str:
    return f"parameter {unit.entries.fqn(parameter)!r}{OF_UNIT}{unit.label}"


def _plain(value: Any) -> list[torch.Tensor]:
    """The plain tensors of which a value of an optimizer's state consists."""
    if hasattr(value, "__tensor_flatten__") and type(value) is not torch.Tensor:
        return [each for name in value.__tensor_flatten__()[0] for each in _plain(getattr(value, name))]
    if isinstance(value, (dict, list, tuple)):  # as of the matrices of one parameter
        return [each for inside in (value.values() if isinstance(value, dict) else value) for each in _plain(inside)]
    return [value] if isinstance(value, torch.Tensor) and value.layout is torch.strided else []


def _add_to(found: Checksums, name: str, value: int) -> None:
    """Add a checksum to those of the same name, as of a recomputation; nothing for zeros, which may be missing."""
    if value:
        found[name] = hash63(f"{found.get(name, 0)} {value}")
