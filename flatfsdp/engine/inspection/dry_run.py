"""One process that simulates a rank of a job of any size: everything but memory, values and other ranks; and the plan
of that rank's memory and traffic.

[Note: dry run] The memory and traffic of a rank follow from the engine's own decisions, so a dry run takes them all:
units, schedule and accounting are those of any run. Tensors have shapes and no memory, and process groups send nothing.

[Note: stand-in forwards] The schedule depends on the order of units and on the positions at which gradients arrive, not
on the computation of modules. So each unit's module gets a forward that uses its parameters, and calls the units
inside, in the order of their declaration; in most models that is the order of use.

[Note: predicted memory] What ends a run is what torch's allocator has reserved: blocks in use, and free ones that fit
nothing. It is predicted by a model of the allocator, with the settings of `PYTORCH_ALLOC_CONF`, from the storages of
steps whose operations have shapes but no values. Kernels are assumed to be those of CUDA on a card like the H100
([Note: workspaces], [Note: attention], [Note: sums over rows]); masks of dropout are counted in the dtype of the
activations. What the CUDA context, the communication library and compiled code take outside of the allocator is not in.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigValueError, FlatFSDPError, UsageError, rank_kept
from ..base import _torch
from ..base._dtensor import local_bytes
from ..base.overrides import is_memoryless
from ..base.overrides import without_memory as without_memory_now
from ..comm import transport as comm
from ..comm.axes import served_as
from ..device.streams import standing_in
from ..features.deterministic_sums import DeterministicSums
from ..features.fake_tensors import without_memory
from ..features.matrix_exchange import MATRICES
from ..features.microbatches import microbatch
from ..features.optimizer_in_backward import OptimizerInBackward
from ..guards.optimizer_hooks import wholes_of
from ..models.rest import outermost_model
from ..runtime.model_facts import steppable_of
from ..runtime.unit import Unit
from .activations import Activations, recording
from .allocator import Settings
from .assumed import kernels_of
from .simulated import SimulatedDevice
from .summary import UnitSummary, stats, units_in_order

SETTLING = 2  # iterations until the order, coalescing and memory sharing, which depends on these, are known


@contextmanager
def dry_run(
    ranks: int, *, rank: int = 0, accelerator: bool = False, activations: bool = False
) -> Iterator[Activations | None]:
    """A context in which this process is one rank of a job of `ranks`, on any machine, and models need no memory.

    Models that are wrapped inside (and made before, best on the meta device) are trained and read through `stats()` as
    usual, and give the figures of the real job: its bytes, its collectives. Tensors that are made inside have no
    values, so code that depends on values (`item()`, an `if` on a tensor) raises; neither tensors nor models are usable
    outside. Nothing is communicated.

    Args:
        ranks: the number of ranks of the job; those of a small one (up to 8) are assumed to be on one host.
        rank: the rank that this process simulates.
        accelerator: whether the job runs on accelerators with NCCL; none is needed here. Memory is then given back at
            the latest point that the engine permits. Otherwise it runs on CPUs with gloo. Tensors show "cpu" in
            both cases.
        activations: whether forwards are recorded: then the context returns an object that shows which modules hold
            most for the backward, and what checkpointing them would save and cost. [Note: activations]

    Raises:
        ConfigValueError: `rank` is not one of the `ranks` ranks.
        UsageError: a process group exists: a dry run makes its own.

    Example:
        >>> import torch, flatfsdp
        >>> layer = torch.nn.Linear(65536, 65536, bias=False, device="meta")
        >>> with flatfsdp.dry_run(1024):
        ...     model = flatfsdp.FullyShardedDataParallel(layer)
        ...     model(torch.ones(1, 65536)).sum().backward()
        ...     flatfsdp.stats(model).bytes_params
        16777216
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise ConfigValueError(f"dry_run: expected ranks >= 1 and 0 <= rank < ranks, found rank {rank} of {ranks}")
    if comm.is_initialized():
        raise UsageError(
            "dry_run: this process is already a rank of a job. Call it in a process that has not called "
            "init_process_group()"
        )
    with ExitStack() as stack:
        stack.enter_context(rank_kept())
        stack.enter_context(_torch.fake_world(ranks, rank=rank))
        stack.enter_context(served_as("nccl" if accelerator else "gloo"))
        device, recorded = SimulatedDevice(Settings.of_environment()), None
        if accelerator:
            stack.enter_context(standing_in(device))
            stack.enter_context(kernels_of(device))
        if activations:
            recorded = stack.enter_context(recording(device))
        stack.enter_context(device.storages.resizing())
        stack.enter_context(without_memory(device))
        yield recorded


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Memory and traffic of one rank. All sizes are bytes.

    Attributes:
        units: of the model, as in `summary`.
        params: shards, padding included.
        grads: sharded gradients, between the end of a backward and the optimizer's step, if all parameters get one.
        optimizer: the optimizer's state after a step, by the name of the state; empty without an optimizer.
        buffers: the model's buffers, and parameters that no unit owns.
        unsharded_peak: unsharded parameters at their peak, as `stats(model).bytes_unsharded_peak`.
        at_peak: the engine's memory when that is the largest, by kind, as `stats(model).bytes_at_peak`.
        comm: kind of collective to (calls, bytes) in one step, as `stats(model).comm`.
        residuals: the errors of quantized gradients, with error feedback.
        matrices: what owners put together and exchange at a time in a step on whole matrices (`matrix_steps`).
        imbalance: the cost of the rank that computes longest in such a step, as a multiple of the mean; None if there
            are none.
        in_use, reserved: the peaks, in a step with activations, of what tensors hold on the accelerator, and of what
            torch's allocator has taken from it for them; None without a `loss`. [Note: predicted memory]
    """

    units: tuple[UnitSummary, ...]
    params: int
    grads: int
    optimizer: dict[str, int]
    buffers: int
    unsharded_peak: int
    at_peak: dict[str, int]
    comm: dict[str, tuple[int, int]]
    residuals: int = 0
    matrices: int = 0
    imbalance: float | None = None
    in_use: int | None = None
    reserved: int | None = None

    @property
    def between_steps(self) -> int:
        """The memory held after `zero_grad()`."""
        return self.params + self.residuals + sum(self.optimizer.values()) + self.buffers

    @property
    def peak(self) -> int:
        """The most held at one time, except activations and an optimizer's temporary memory during its step."""
        during_step = self.params + self.grads + self.residuals + self.matrices
        return max(sum(self.at_peak.values()), during_step) + sum(self.optimizer.values()) + self.buffers

    @property
    def needed(self) -> int:
        """The memory that a rank must have: `reserved`, or where that is not known, `peak`."""
        return self.peak if self.reserved is None else self.reserved


def memory_plan(
    model: Any,
    optimizer: torch.optim.Optimizer | OptimizerInBackward | None = None,
    *,
    microbatches: int = 1,
    max_norm: float | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Plan:
    """Memory and traffic of a rank of the simulated job in a step of training, once it has settled.

    It runs steps of `model` in which its modules compute nothing: every unit once, and its parameters, in the order of
    declaration. For a model that uses them in another order, several times or not at all, the plan differs accordingly.
    It does not include the traffic of `detect_nonfinite()` and of a gradient scaler.

    Args:
        model: the outermost wrapper, or module of `fully_shard`, made inside `dry_run()`.
        optimizer: built on its parameters, or the result of `optimizer_in_backward`.
        microbatches: backwards of a step; all but the last only accumulate.
        max_norm: the norm to which the step clips gradients, by `model.clip_grad_norm_`; the traffic of torch's
            function of that name for DTensors is not in the plan.
        loss: makes a batch, and returns the loss of a model of it, as ``lambda model: model(tokens, targets)``. With
            it, in a dry run with `accelerator=True`, steps are run with the model's own forwards, checkpoints included,
            and the plan has `in_use` and `reserved`. [Note: predicted memory]

    Raises:
        ConfigValueError: `microbatches` below 1; a `loss` without an accelerator.
        UsageError: outside of a dry run; `model` is a nested wrapper; a step of the optimizer, or the loss, reads
            values.

    Example:
        >>> import torch, flatfsdp
        >>> with flatfsdp.dry_run(8):
        ...     model = flatfsdp.FullyShardedDataParallel(torch.nn.Linear(1024, 1024), use_orig_params=True)
        ...     figures = flatfsdp.memory_plan(model, torch.optim.SGD(model.parameters(), momentum=0.9))
        >>> figures.params, figures.comm["reduce_scatter"]
        (524800, (1, 4198400))
    """
    outermost = outermost_model(model, "memory_plan")
    units = outermost.units
    if not is_memoryless():
        raise UsageError(
            "memory_plan() was called outside of dry_run(), where its steps would train the model on tensors without "
            "data. Wrap the model, and call it, inside dry_run()"
        )
    if microbatches < 1:
        raise ConfigValueError(f"memory_plan(): expected microbatches of at least 1, found {microbatches}")
    stepper = optimizer.optimizer if isinstance(optimizer, OptimizerInBackward) else optimizer
    wholes = None if stepper is None else wholes_of(stepper)
    deterministic = outermost.observers.find(DeterministicSums) is not None
    figures = stats(model)
    in_use = reserved = None
    if loss is not None:
        device = _accelerator_of(units)
        for _ in range(SETTLING + 1):
            device.allocator.forget_peaks()
            for number in range(microbatches):
                model.set_requires_gradient_sync(number == microbatches - 1)
                with microbatch(number, of=microbatches) if deterministic else nullcontext():
                    _backward(loss, model)
            if max_norm is not None:
                model.clip_grad_norm_(max_norm)
            if optimizer is stepper and stepper is not None:
                with _as_on_accelerator(stepper, units):
                    _step(stepper)
            model.zero_grad()
        in_use, reserved = device.allocator.active.peak, device.allocator.reserved.peak
    with _stand_in_forwards(units):
        for _ in range(SETTLING + 1):
            figures.reset()
            for number in range(microbatches):
                model.set_requires_gradient_sync(number == microbatches - 1)
                with microbatch(number, of=microbatches) if deterministic else nullcontext():
                    model(torch.zeros(())).float().backward()
            if max_norm is not None:
                model.clip_grad_norm_(max_norm)
            at_peak, unsharded, grads = figures.bytes_at_peak, figures.bytes_unsharded_peak, figures.bytes_grads
            if stepper is not None:
                _step(stepper)
            comm = figures.comm
            model.zero_grad()
        return Plan(
            units=tuple(units_in_order(model)),
            params=figures.bytes_params,
            grads=grads,
            optimizer=_state_of(stepper),
            buffers=_besides(model, units),
            unsharded_peak=unsharded,
            at_peak=at_peak,
            comm=comm,
            residuals=figures.bytes_residuals,
            matrices=outermost.resources.tracker.peak(MATRICES),
            imbalance=None if wholes is None else wholes.imbalance,
            in_use=in_use,
            reserved=reserved,
        )


def _accelerator_of(units: list[Unit]) -> SimulatedDevice:
    """The simulated device of `units`, whose memory is empty but for what they hold."""
    device: SimulatedDevice | None = without_memory_now.value.device
    if device is None or not units[-1].resources.device.has_streams:
        raise ConfigValueError(
            "memory_plan(): got loss=, but the dry run is of a job on CPUs, whose allocator is not known. Accepted: "
            "within dry_run(..., accelerator=True)"
        )
    gc.collect()
    device.allocator.empty_cache()
    return device


@contextmanager
def _as_on_accelerator(optimizer: torch.optim.Optimizer, units: list[Unit]) -> Iterator[None]:
    """A context in which a step of `optimizer` takes parameters together where it does by default on an accelerator:
    those of torch's classes, which flat parameters are not."""
    flat = {id(handle.flat_param) for unit in units for handle in unit.handles}
    groups = optimizer.param_groups
    chosen = [group for group in groups if group.get("foreach", True) is None and not group.get("fused")]
    for group in chosen:
        group["foreach"] = flat.isdisjoint(map(id, group["params"]))
    try:
        yield
    finally:
        for group in chosen:
            group["foreach"] = None


@contextmanager
def _stand_in_forwards(units: list[Unit]) -> Iterator[None]:
    """Replace the forwards of `units` by ones that compute nothing with all parameters. [Note: stand-in forwards]"""
    leaves: dict[nn.Module, list[nn.Parameter]] = {}
    for unit in units:
        for param_ref in (*unit.param_refs, *unit.shared_refs):
            leaves.setdefault(param_ref.module, []).append(param_ref.leaf)
    own = [(entry, entry.__dict__.get("forward")) for unit in units for entry in unit.entries]
    for module, _ in own:
        module.forward = _stand_in_forward(list(_used(module, leaves)))
    try:
        yield
    finally:
        for module, forward in own:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _used(module: nn.Module, leaves: dict[nn.Module, list[nn.Parameter]]) -> Iterator[nn.Module | nn.Parameter]:
    """The parameters of `module`'s unit, and the units inside, in the order of declaration."""
    yield from leaves.get(module, ())
    for child in module._modules.values():
        if child is not None:
            yield from [child] if isinstance(child.__dict__.get("_unit"), Unit) else _used(child, leaves)


def _stand_in_forward(used: list[nn.Module | nn.Parameter]) -> Callable[[Tensor], Tensor]:
    calls: list[Callable[[Tensor], Tensor]] = []
    for _, run in groupby(used, lambda each: isinstance(each, nn.Module)):
        members = list(run)
        inner = [each for each in members if isinstance(each, nn.Module)]
        calls += inner or [partial(_use, members)]

    def forward(x: Tensor) -> Tensor:
        for call in calls:
            x = call(x)
        return x

    return forward


def _use(parameters: list[Any], x: Tensor) -> Tensor:
    used: Tensor = _UseParams.apply(x, *parameters)
    return used


class _UseParams(torch.autograd.Function):
    """An operation that takes parameters: its backward returns gradients for those that are trainable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            torch.empty(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.like, ctx.needs_input_grad[1:], strict=True)
        ]
        return (grad, *grads)


def _step(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:
        raise UsageError(
            f"memory_plan(): a step of {type(optimizer).__name__} fails on tensors without values "
            f"({type(error).__name__}: {error}). Its state cannot be estimated; call memory_plan() without it"
        ) from error


def _backward(loss: Callable[[Any], Tensor], model: Any) -> None:
    try:
        loss(model).backward()
    except FlatFSDPError:
        raise
    except Exception as error:
        raise UsageError(
            f"memory_plan(): the forward or backward of loss= fails on tensors without values ({type(error).__name__}: "
            f"{error}). Its activations cannot be estimated; call memory_plan() without loss="
        ) from error


def _state_of(optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes of an optimizer's state by name."""
    found: dict[str, int] = {}
    states: list[Any] = [*optimizer.state.values()] if optimizer is not None else []
    for state in states:  # grows by states in others: of the matrices of one parameter
        for name, value in state.items():
            if isinstance(value, Tensor):
                found[name] = found.get(name, 0) + local_bytes(value)
            elif isinstance(value, dict):
                states.append(value)
    return found


def _besides(model: nn.Module, units: list[Unit]) -> int:
    """Bytes of buffers and of parameters that no unit owns."""
    owned = {id(each) for unit in units for handle in unit.handles for each in handle.parameters}
    owned |= {id(each) for unit in units for each in steppable_of(unit)}
    others: list[Any] = [parameter for parameter in model.parameters() if id(parameter) not in owned]
    return sum(tensor.nbytes for tensor in [*model.buffers(), *others])
