"""Public function for optimizers that need whole matrices, to step on parameters of which each rank has a part.

[Note: matrix steps] In a step of the optimizer one rank, the owner of a matrix, puts it together as far as this is
needed. It is chosen by a plan ([Note: owners]) and gets its matrices in buckets ([Note: matrix exchange]). There is a
way for any class ([Note: own steps]) and one for torch's Muon ([Note: Muon in parts]); both compute the numbers of one
process. Programs see the same optimizer, over the same parameters, at all times; parameters of it that are in no unit
are stepped on by each rank as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import ConfigValueError, UsageError, refuse_type, refuse_value
from ..base._dtensor import is_dtensor
from ..base.hashing import hash63
from ..comm.transport import Transport
from ..flat.faces import adoptions
from ..guards.optimizer_hooks import OfOptimizer, give_wholes, looking, steps_on_wholes
from ..layout.layout import ParamSpec, Span
from ..models import param_registry as registry
from ..models.rest import collective_call, models_of, quiesce
from ..planning.owners import Matrix, OwnerPlan, parts_of
from ..runtime.unit import Unit
from ..state.optim.optimizer_clone import Changes, Settings, clone_over, set_changes
from ..state.owned_interval import OwnedInterval
from ..state.parts import every_axis
from .fused_steps import is_fused
from .matrix_adapters import ADAPTERS, NAMED, Adapter, Entry, Shape, Slot
from .matrix_exchange import MatrixExchange, raise_failures
from .matrix_states import to_owners, to_shards
from .muon_steps import MuonSteps
from .optimizer_in_backward import optimizers_of
from .optimizer_trials import try_on_matrices
from .own_steps import WITH_STATE, OwnSteps, State, form_of, whole_state

MEBIBYTE = 2**20


class MatrixSteps:
    """The steps of one optimizer on whole matrices; returned by `matrix_steps`, and constructed only there.

    Args:
        optimizer: the optimizer, also an attribute.
        stepper: the work of its hooks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stepper: _Stepper) -> None:
        self.optimizer, self._stepper = optimizer, stepper

    @property
    def plans(self) -> tuple[OwnerPlan, ...]:
        """The owners of all matrices, for each axis of ranks and dtype; empty before the first step."""
        return tuple(exchange.plan for exchange in self._stepper.exchanged)

    @property
    def imbalance(self) -> float:
        """The cost of the rank that computes longest in a step, as a multiple of the mean; 1 before the first step."""
        return self._stepper.imbalance

    def summary(self) -> str:
        """The matrices, their owners' balance and the traffic of a step, in two lines for each axis and dtype."""
        lines = []
        for exchange in self._stepper.exchanged:
            plan, work = exchange.plan, self._stepper.work
            size = work.dtype_of(exchange.entries[0].slot).itemsize
            cut, count = sum(matrix.is_cut for matrix in plan.matrices), len(plan.buckets)
            lines.append(
                f"{len(plan.matrices)} matrices on {plan.world} ranks, {cut} of them cut, in {count} "
                f"bucket{'s' * (count != 1)}: the longest step costs {plan.imbalance:.2f} of the mean"
            )
            lines.append(
                f"rank {exchange.transport.group.ranks[exchange.rank]} sends "
                f"{work.sent * size * plan.sent(exchange.rank):,} bytes to owners, "
                f"{size * plan.returned(exchange.rank):,} back, in {plan.exchanges} all-to-alls"
            )
        return "\n".join(lines) or "no step so far"


class _Stepper(OfOptimizer):
    """The work of an optimizer's hooks, for its `MatrixSteps`.

    Attributes:
        exchanges: True: ranks take its steps together.
        work: what a step does with matrices.
        exchanged: the matrices, by axis and dtype, as `_find` has found them last; none before the first step.

    Args:
        optimizer, cost, bucket_bytes: as for `matrix_steps`.
        adapter: of the class of the optimizer.
        owners: as for `matrix_steps`.
    """

    exchanges = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        adapter: Adapter,
        owners: Mapping[nn.Parameter, int],
        cost: Callable[[Shape], int],
        bucket_bytes: int,
    ) -> None:
        super().__init__(optimizer)
        self._changes: list[Changes] = []  # by steps on matrices
        self.work = MuonSteps(optimizer) if adapter.in_parts else OwnSteps(optimizer, self._changes)
        self._adapter, self._asked, self._cost, self._bucket_bytes = adapter, dict(owners), cost, bucket_bytes
        # By the parameter and the number of the matrix: an owner keeps its matrices, since it has their states. By ids,
        # it would keep those of a parameter whose memory another one has got since, on some ranks.
        self._owners: dict[tuple[nn.Parameter, int | None], int] = {}
        self._facts: Any = None  # from which these were found:
        self.exchanged: tuple[MatrixExchange, ...] = ()
        self._entries: dict[int, list[Entry]] = {}  # the matrices of each parameter, by its id
        self._rest: list[list[nn.Parameter]] = []  # what each rank steps on as it is, by param group
        self._units: tuple[Unit, ...] = ()
        self._axes: list[Transport] = []  # all over which these are spread
        self._call = ""  # the name of a step for comparison over ranks, with a hash of all plans
        self._stand_in: tuple[torch.optim.Optimizer, Settings] | None = None  # with its settings before its step
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(self._before_state_dict)
        self._last_as_of = RemovableHandle.next_id  # when ours was the last hook before a step
        looking.add(self)
        self._has_wholes = False  # whether there may be states of whole matrices, on any rank
        give_wholes(optimizer, self)

    @property
    def imbalance(self) -> float:
        """As of `MatrixSteps`."""
        return max((exchange.plan.imbalance for exchange in self.exchanged), default=1.0)

    @torch.no_grad()
    def to_shards(self) -> None:
        """Divide the states of matrices among the shards, as for an element-wise optimizer; the next step brings them
        to the owners again. Collective, unless they are in parts already. [Note: states of matrices]"""
        if self._has_wholes and not self.work.in_parts:
            self._find()
            for exchange in self.exchanged:
                to_shards(exchange, self.optimizer.state)
        self._has_wholes = False

    def _before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        """A hook: a state dict has this rank's parts."""
        if self._has_wholes and not self.work.in_parts:
            call = f"optimizer.state_dict() of {type(optimizer).__name__}, whose matrices have owners"
            self._find()
            with collective_call(self._units, call):
                self.to_shards()

    def held(self, parameter: torch.Tensor) -> tuple[list[OwnedInterval], State] | None:
        """The states of whole matrices of `parameter` that this rank has as their owner, and other values of these;
        None if it has none."""
        states = self.optimizer.state
        owned = [each for each in self._entries.get(id(parameter), ()) if form_of(states, each) == WITH_STATE]
        if self.work.in_parts or not owned:
            return None
        found: list[OwnedInterval] = []
        others: State = {}
        for entry in owned:
            for name, value in whole_state(states, entry).items():
                if not isinstance(value, torch.Tensor) or not value.dim():
                    others[name] = value
                elif tuple(value.shape) == entry.seen.shape:
                    spec = ParamSpec(name, entry.slot.spec.shape)
                    found.append(OwnedInterval(entry.seen.flat(value), spec, entry.seen.span))
                else:
                    flat, number, of_all = value.detach().contiguous().view(-1), entry.seen.expert, tuple(value.shape)
                    if number is not None:
                        of_all = entry.slot.spec.shape[0], *of_all
                    span = Span(0, flat.numel()).shift(flat.numel() * (number or 0))
                    found.append(OwnedInterval(flat, ParamSpec(name, of_all), span))
        return found, others

    def ranks_changed(self) -> None:
        """Matrices get owners among the ranks that there are now; those that the user has named are of earlier ones."""
        self._owners.clear()
        self._asked.clear()
        self._facts, self.exchanged, self._entries, self._has_wholes = None, (), {}, False

    def state_before_first_step(self, parameter: torch.Tensor) -> State | None:
        """This rank's part of the state of `parameter` before its first step, as for an element-wise optimizer; None if
        it has no matrices."""
        self._find()
        entries = self._entries.get(id(parameter))
        return None if entries is None else self.work.state_before_first_step(entries)

    # -- a step --------------------------------------------------------------------------------------------------------

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the hooks of `optimizer.step()`: let ours be the last. Others may change gradients."""
        if optimizer is self.optimizer and RemovableHandle.next_id != self._last_as_of:
            self._hook.remove()
            self._hook = optimizer.register_step_pre_hook(self._before_step)
            self._last_as_of = RemovableHandle.next_id

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """A pre-hook of `optimizer.step()`: steps on all matrices, and leaves the other parameters to a stand-in."""
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise UsageError(
                "matrix_steps: step() was called with a closure, which would compute gradients after matrices were "
                "exchanged. Run the backward before step()"
            )
        self._find()
        work = self.work
        with torch.no_grad(), ExitStack() as calls:
            for model in models_of(self._units):
                calls.enter_context(model.agreement.collective_call(self._call))
            failed: list[Exception] = []
            self._changes.clear()
            self._has_wholes = True
            for exchange in self.exchanged:
                present, in_parts = exchange.look(work)
                if in_parts and not work.in_parts:
                    to_owners(exchange, optimizer)
                work.prepare([exchange.entries[i] for i in present])
                failed += exchange.step(present, work)
                written = {id(slot): slot.parameter for i in present for slot in [exchange.entries[i].slot]}
                torch.autograd.graph.increment_version([*written.values()])  # writes to local tensors do not always
            raise_failures(self._axes, failed)
            if not optimizer.state and self.exchanged:
                # Without any state, torch's functions for state dicts take a step, which is collective, on this rank.
                optimizer.state[self.exchanged[0].entries[0].slot.parameter] = {}
        made = clone_over(optimizer, self._rest)
        self._stand_in = made, Settings(made)
        return (made, *args[1:]), kwargs

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A post-hook of `optimizer.step()`: takes over what steps changed for all parameters of a group."""
        if self._stand_in is not None:
            (made, before), self._stand_in = self._stand_in, None
            for changes in (*self._changes, before.changes(made)):
                set_changes(optimizer, changes)

    # -- what is stepped on --------------------------------------------------------------------------------------------

    def _find(self) -> None:
        """Find the present parameters of the optimizer, again after changes of its param groups or of models."""
        groups = self.optimizer.param_groups
        held = [[(id(each), each.dtype) for each in group["params"]] for group in groups]
        if (facts := (registry.generation, adoptions.count, held)) == self._facts:
            return
        managed = [*each_managed(self.optimizer, "matrix_steps")]
        taken, units = {id(slot.parameter) for slot in managed}, tuple(dict.fromkeys(slot.unit for slot in managed))
        quiesce([*units], shards=False)  # connects them, before a first forward
        together: dict[Any, tuple[Transport, list[Entry]]] = {}
        by_parameter: dict[int, list[Entry]] = {}
        for slot in managed:
            axis = slot.unit.axes.transports_of(slot.handle).gather
            found = entries_of(slot, self._adapter, groups[slot.group])
            together.setdefault((id(axis.group.process_group), self.work.dtype_of(slot)), (axis, []))[1].extend(found)
            if found:
                by_parameter[id(slot.parameter)] = found
        exchanges = tuple(self._exchange(*each) for each in together.values() if each[1])
        words = "\n".join((str(len(groups)), *(line for exchange in exchanges for line in exchange.plan.facts())))
        count = sum(len(exchange.entries) for exchange in exchanges)
        self._call = f"step() of {type(self.optimizer).__name__} on {count} whole matrices (plan {hash63(words):x})"
        self._rest = [[each for each in group["params"] if id(each) not in taken] for group in groups]
        self._axes = every_axis(units)
        self.exchanged, self._entries, self._units, self._facts = exchanges, by_parameter, units, facts

    def _exchange(self, transport: Transport, entries: list[Entry]) -> MatrixExchange:
        matrices: list[Matrix] = []
        for entry in entries:
            slot, seen = entry
            key = slot.parameter, seen.expert
            asked = self._owners.get(key, self._asked.get(key[0]))
            parts = parts_of(slot.handle.layout, slot.index, seen.span)
            name = slot.name if seen.expert is None else f"matrix {seen.expert} of {slot.name}"
            matrices.append(Matrix(name, seen.shape, parts, int(self._cost(entry.shape)), asked))
        size = self.work.dtype_of(entries[0].slot).itemsize
        plan = OwnerPlan.of(matrices, world=transport.group.size, bucket=max(1, self._bucket_bytes // size))
        for (slot, seen), owner in zip(entries, plan.owners, strict=True):
            self._owners[slot.parameter, seen.expert] = owner
        return MatrixExchange(transport, plan, entries)


def entries_of(slot: Slot, adapter: Adapter, group: Mapping[str, Any]) -> list[Entry]:
    """The matrices of one parameter, none if it has no elements: a step on a matrix without elements divides by zero in
    some optimizers, and does nothing otherwise.

    Raises:
        UsageError: the optimizer cannot step on them, or they cannot be put together.
    """
    _check_place(slot)
    spec = slot.spec
    if not spec.numel:
        return []
    if spec.part is not None and not (adapter.in_parts and len(spec.shape) == 2):
        raise UsageError(
            f"matrix_steps: {slot.name} is a part of a tensor that tensor parallelism has split, of shape "
            f"{tuple(spec.part.shape)}. Only torch's Muon steps on parts, of matrices. Give it to an element-wise "
            "optimizer"
        )
    try:
        adapter.check(group, slot.parameter.dtype)
        return [Entry(slot, seen) for seen in adapter.seen(spec)]
    except UsageError as error:
        raise UsageError(f"matrix_steps: {slot.name}: {error}") from None


def each_managed(optimizer: torch.optim.Optimizer, call: str) -> Iterator[Slot]:
    """The parameters of units that `optimizer` holds, in the order of its param groups, which is that of all ranks.
    Those that are no shards, `check_parameters` refuses before a step.

    Raises:
        UsageError: a flat parameter, in the words of a `call`.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            unit = registry.owner_of(parameter)
            for kind, handle in enumerate(unit.handles if unit is not None else ()):
                index = next((i for i, holder in enumerate(handle.face.holders) if holder is parameter), None)
                if unit is None or index is None:
                    continue
                if handle.face.shares_holder:
                    raise UsageError(
                        f"{call}: param group {number} of the optimizer holds a flat parameter, in which there are no "
                        f"matrices: {handle.face.words.remedy}"
                    )
                name = handle.layout.params[index].name
                yield Slot(parameter, unit, kind, index, number, f"parameter {name!r} of unit {unit.label}")


def _check_place(slot: Slot) -> None:
    handle, leaf = slot.handle, slot.handle.leaves[slot.index]
    if slot.spec.part is None and any(each.leaf is leaf for each in slot.unit.views[slot.kind].extended):
        raise UsageError(
            f"matrix_steps: {slot.name} is stored in another form than modules see it (gather hooks, quantized "
            "parameters): its shards do not make the matrix. Give it to an element-wise optimizer"
        )
    local = handle.face.local_of(slot.parameter)
    if is_dtensor(slot.parameter) and type(local) is not torch.Tensor:
        raise UsageError(f"matrix_steps: the rows of {slot.name} are a {type(local).__name__}, not a plain tensor")
    here = local.device
    if here.type != handle.device.type:
        raise UsageError(
            f"matrix_steps: {slot.name} is on {here}, but its unit communicates on {handle.device}. Matrices cannot be "
            "exchanged with CPUOffload(offload_params=True)"
        )


def matrix_steps(
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
    params: Iterable[Any] | None = None,
    *,
    sees: str | None = None,
    owners: Mapping[nn.Parameter, int] | None = None,
    cost: Callable[[tuple[int, ...]], int] | None = None,
    bucket_bytes: int = 64 * MEBIBYTE,
) -> MatrixSteps:
    """Let an optimizer that needs whole matrices (Muon, Adafactor, Shampoo) step on sharded parameters.

    For `use_orig_params=True` and `fully_shard`. In `optimizer.step()`, each matrix that shards have parts of is put
    together on one rank, its owner, which computes on the whole of it, with the numbers that one process would compute
    from the same gradients, bit for bit. Owners are balanced by cost, and keep their matrices.

    - *torch's Muon*: the momentum stays with the shards, like the state of AdamW; owners get it in bfloat16, which is
      what Muon orthogonalizes, and send the update back: 4 bytes for each element of a matrix that is cut.
    - *Others*: owners get gradient and parameter, run the optimizer's own step, send the parameter back, and keep the
      optimizer state, which only they have between steps: 3 times the bytes of the parameter.

    The optimizer is the same object over the same parameters: schedulers, clipping, hooks and gradient scalers work as
    before. Every rank must call its `step()`, which is collective: two small exchanges, and two all-to-alls for each
    bucket of matrices. If a matrix has a gradient on some of its ranks and none on others, or a step fails on an owner,
    all ranks raise.

    - *Replicas* (HYBRID_SHARD, NO_SHARD): each of them computes all matrices.
    - *State dicts*: `FullyShardedDataParallel.optim_state_dict` and checkpoints have states by name, for any number of
      ranks. `optimizer.state_dict()` has this rank's parts, or distributed tensors under `fully_shard`, which
      torch.distributed.checkpoint saves; it is collective, except with torch's Muon. States of other shapes than their
      matrix (Adafactor's rows and columns) are copied to all ranks for these.
    - *Tensor parallelism*: a matrix that it splits is one matrix for torch's Muon, and each of its ranks computes it.
    - *Copies* and pickles of the optimizer do not have it: call `matrix_steps` for them again.
    - *Refused*, in words: flat parameters (`use_orig_params=False`), other parts of tensor parallelism, parameters
      offloaded to the CPU, gradients of another dtype than the parameter, `optimizer_in_backward`, closures.

    Args:
        optimizer: over parameters of models that were wrapped before; or, for a class that refuses to be built on parts
            of matrices as Muon does, a function that builds it from `params`, like `functools.partial(Muon, lr=0.02)`.
            It is called with a single matrix, in place of which the result then gets the parameters.
        params: the parameters, or param groups, for that function.
        sees: what the optimizer has to see completely: `"matrices"`, one for each expert of tensors with three
            dimensions; `"tensors"`, whole ones of any shape; or `"shampoo"`, the same with the costs of its roots. By
            default what is known of torch's Muon and Adafactor.
        owners: owners of some parameters, as ranks of the shard group; the others are balanced.
        cost: of a step on a matrix, from its shape, by which owners are balanced; by default that of the optimizer.
        bucket_bytes: bytes of a bucket's matrices, over all ranks.

    Raises:
        ConfigTypeError, ConfigValueError: an argument of another type; an owner that is no rank, at the first step.
        UsageError: an optimizer of another class, without `sees`; one whose step on a matrix depends on others, in a
            trial on random numbers; parameters that cannot be exchanged; steps that are fused, or taken in backwards;
            state from before.

    Example (in a process group of one rank):
        >>> import functools, torch, flatfsdp
        >>> model = flatfsdp.FullyShardedDataParallel(torch.nn.Linear(4, 4, bias=False), use_orig_params=True)
        >>> steps = flatfsdp.matrix_steps(functools.partial(torch.optim.Muon, lr=0.1), model.parameters())
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> steps.optimizer.step()
        >>> steps.optimizer.state[model.weight]["momentum_buffer"].shape
        torch.Size([4, 4])
    """
    name = "matrix_steps"
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer) or params is None:
            refuse_type(
                f"{name}: optimizer",
                optimizer,
                "an optimizer of torch.optim, or a class derived from it; or a function that makes one, with params=",
            )
        optimizer = _built(optimizer, params)
    elif params is not None:
        raise ConfigValueError(f"{name}: params= is for a function that builds the optimizer, which holds its own")
    if sees is not None and sees not in NAMED:
        refuse_value(f"{name}: sees", sees, ", ".join(map(repr, NAMED)))
    cls = type(optimizer)
    adapter = ADAPTERS.get(cls) if sees is None else NAMED[sees]
    if adapter is None:
        raise UsageError(
            f"{name}(): it is not known what {cls.__module__}.{cls.__qualname__} has to see completely; known are "
            f"{', '.join(each.__name__ for each in ADAPTERS)}. Pass sees='matrices' if it steps on each matrix by "
            "itself (as Muon), sees='tensors' if on each parameter; an element-wise optimizer needs no matrices"
        )
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
        refuse_value(f"{name}: bucket_bytes", bucket_bytes, "an int of at least 1")
    _check_alone(optimizer)
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    asked = dict(owners or {})
    if strangers := asked.keys() - held:
        raise ConfigValueError(f"{name}: owners= has {len(strangers)} parameters that the optimizer does not hold")
    for slot in each_managed(optimizer, name):
        entries_of(slot, adapter, optimizer.param_groups[slot.group])
        if optimizer.state.get(slot.parameter) and not adapter.in_parts:
            raise UsageError(
                f"{name}(): the optimizer has state of {slot.name} already, which would be that of a part of it. Call "
                f"{name}() before the first step, and load states afterwards"
            )
    if not adapter.in_parts:
        try_on_matrices(optimizer)
    return MatrixSteps(optimizer, _Stepper(optimizer, adapter, asked, cost or adapter.cost, bucket_bytes))


def _check_alone(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if something else steps for `optimizer`."""
    name = type(optimizer).__name__
    if not {"state", "param_groups"} <= vars(optimizer).keys():
        raise UsageError(f"matrix_steps(): this {name} has no state of its own; pass the optimizer that it contains")
    for attribute, value in vars(optimizer).items():
        inside = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(each, torch.optim.Optimizer) for each in inside):
            raise UsageError(
                f"matrix_steps(): this {name} holds another optimizer, {attribute!r}, which would step on this rank's "
                "parts. Pass that one"
            )
    if optimizer in steps_on_wholes:
        raise UsageError(f"matrix_steps(): this {name} steps on whole matrices already")
    if is_fused(optimizer):
        raise UsageError(f"matrix_steps(): steps of this {name} are fused; call remove() of its FusedSteps first")
    if any(optimizer is each.optimizer for model in registry.models for each in optimizers_of(model).all):
        raise UsageError(
            f"matrix_steps(): this {name} steps in backwards, unit by unit; matrices are exchanged by all ranks "
            "together. Call remove() of its OptimizerInBackward first"
        )


def _built(make: Callable[[Any], torch.optim.Optimizer], params: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer that `make` builds, over `params` in spite of their shapes: it is built on a matrix of one element,
    which is then replaced."""
    given = list(params)
    optimizer = make([nn.Parameter(torch.zeros(1, 1))])
    optimizer.param_groups.clear()
    for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
        optimizer.add_param_group(dict(group))
    return optimizer
