"""Checks of deterministic sums: refused models, options, optimizers and forwards, and words about kernels, which ranks
compare. [Note: deterministic sums]"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from ...errors import UsageError, few, label_of, warn_once
from ..base._dynamo import is_compiled, is_compiled_around
from ..base.events import Observer
from ..device.streams import Device
from ..guards import optimizer_hooks
from ..models.param_registry import owner_of
from ..runtime.model import model_of
from ..runtime.unit import Unit
from .microbatches import running

# Switches of torch.backends that choose kernels, by their usual values. Those of attention choose for CPUs, too.
_SWITCHES: dict[object, str] = {
    True: "mkldnn.enabled cudnn.enabled cuda.flash_sdp_enabled cuda.mem_efficient_sdp_enabled cuda.math_sdp_enabled "
    "cuda.cudnn_sdp_enabled cuda.matmul.allow_fp16_reduced_precision_reduction "
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    False: "mkldnn.deterministic cudnn.benchmark cudnn.deterministic cuda.matmul.allow_fp16_accumulation "
    "cuda.fp16_bf16_reduction_math_sdp_allowed",
    "none": "mkldnn.matmul.fp32_precision mkldnn.conv.fp32_precision mkldnn.rnn.fp32_precision "
    "cuda.matmul.fp32_precision",
    "tf32": "cudnn.conv.fp32_precision cudnn.rnn.fp32_precision",
}
_READERS = [(name, attrgetter(name), usual) for usual, names in _SWITCHES.items() for name in names.split()]


def kernels_of(device: Device) -> str:
    """The facts that decide on the bits of a microbatch's gradient, as far as ranks can compare them; of switches those
    that do not have their usual values."""
    kernels = torch.backends.cpu.get_cpu_capability()
    if device.has_streams and device.device.type == "cuda":
        kernels = f"{kernels}, {torch.get_device_module(device.device).get_device_name(device.device)}"
    facts = [f"torch {torch.__version__}", f"{torch.get_num_threads()} threads", f"{kernels} of {_processor()}"]
    if torch.are_deterministic_algorithms_enabled():
        facts.append("deterministic algorithms")
    for name, read, usual in _READERS:
        value = read(torch.backends)
        if (value := value() if callable(value) else value) != usual:
            facts.append(f"{name}={value}")
    return ", ".join(facts)


NORMS: Any = torch.nn.InstanceNorm1d.mro()[2]  # the base of batch and instance norms, which has no public name


@lru_cache(maxsize=1)
def _processor() -> str:
    """The model of this machine's processor, as far as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or platform.machine())


def check_units(units: Sequence[Unit]) -> None:
    """Refuse models of which something is added up in another order, or by nobody."""
    outside = [
        name
        for entry in units[-1].entries
        for name, each in entry.named_parameters()
        if each.requires_grad and owner_of(each) is None
    ]
    if outside:
        raise UsageError(
            f"deterministic_sums=True: no unit holds {few(outside)}, which are trained: autograd adds up gradients of "
            "this rank's microbatches in their order, and nobody divides by their number. Freeze them, or do not "
            "ignore them"
        )
    groups = [unit.axes.own for unit in units]
    axes = {(each.shard.ranks, each.replicate and each.replicate.ranks) for each in groups}
    for unit in units:
        _check_unit(unit, alone=len(axes) == 1)
    modules = dict(named for entry in units[-1].entries for named in entry.named_modules())
    if synchronized := [label_of(name) for name, each in modules.items() if isinstance(each, torch.nn.SyncBatchNorm)]:
        raise UsageError(
            f"deterministic_sums=True: SyncBatchNorm ({few(synchronized)}) normalizes a batch of all ranks, so a "
            "microbatch has other outputs on another number of ranks. Use GroupNorm or LayerNorm"
        )
    if updated := [name for name, each in modules.items() if _updates_statistics(each)]:
        raise UsageError(
            f"deterministic_sums=True: {few(list(map(label_of, updated)))} updates statistics of the batches that its "
            "rank has seen, which are others on another number of ranks. Use GroupNorm or LayerNorm, or "
            "track_running_stats=False, or put it into eval()"
        )
    if is_compiled_around() or any(map(is_compiled, modules.values())):
        warn_once(
            "deterministic sums of compiled modules",
            "deterministic_sums=True: torch.compile makes kernels of this model, which ranks do not compare. The bits "
            "are the same on any number of ranks if the kernels are: let all jobs compile with the same versions, "
            "options and shapes, and without max_autotune, which chooses kernels by their times",
        )


def _updates_statistics(module: torch.nn.Module) -> bool:
    return isinstance(module, NORMS) and module.training and module.track_running_stats


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
    if problem:
        raise UsageError(f"deterministic_sums=True: unit {unit.label}: {problem}")


def check_options(units: Iterable[Unit]) -> None:
    """Refuse options of `units` by which gradients are added up, or divided, in another way."""
    for unit in units:
        options, problem = unit.options, ""
        if options.comm_hook is not None or options.all_reduce_hook is not None:
            problem = "a communication hook sums gradients in an order of its own"
        elif options.schedule.divide_by is not None:
            problem = "set_gradient_divide_factor() was called, but gradients are divided by the `of` of microbatch()"
        elif options.schedule.reduce and not options.schedule.all_reduce:
            problem = "set_requires_all_reduce(False) was called, but partial sums follow from the microbatches"
        if problem:
            raise UsageError(f"deterministic_sums=True: unit {unit.label}: {problem}. Use only one of the two")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse steps of which the bits follow from where ranks' shards end."""
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


class WrittenBuffers(Observer):
    """Refuses forwards that write to buffers: these would follow from the microbatches of one rank.

    The first forward may fill caches. It compares what is in buffers before and after the second one, since not all
    writes are counted (not those of `torch.nn.functional.batch_norm`), and some that are change nothing (as casts of
    buffers that are taken back). Then it leaves: what begins later is not seen.
    """

    def __init__(self) -> None:
        self._before: dict[str, torch.Tensor | tuple[int, int]] | None = None
        self._forwards = 0

    def forward_begins(self, unit: Unit, inputs: Any, *, outermost: bool) -> None:
        if outermost and running.value is not None:
            self._forwards += 1
            self._before = _buffers_of(unit) if self._forwards > 1 else None

    def forward_ended(self, unit: Unit, output: Any, *, outermost: bool) -> None:
        if not outermost or self._before is None:
            return
        before, after, self._before = self._before, _buffers_of(unit), None
        if written := [name for name in {**before, **after} if not _same(before.get(name), after.get(name))]:
            raise UsageError(
                f"deterministic_sums=True: a forward writes to buffers ({few(written)}), which then follow from the "
                "microbatches of this rank, and are others on another number of ranks. Use modules without such "
                "buffers, as GroupNorm, LayerNorm or BatchNorm with track_running_stats=False or in eval(), or write "
                "to them between steps, alike on all ranks"
            )
        model_of(unit).observers.remove(self)


def _buffers_of(unit: Unit) -> dict[str, torch.Tensor | tuple[int, int]]:
    """By name what is in the buffers, in bytes; of those that are no plain tensors, the object and its version."""
    return {name: _contents(each) for entry in unit.entries for name, each in entry.named_buffers()}


def _contents(buffer: torch.Tensor) -> torch.Tensor | tuple[int, int]:
    is_plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided and buffer.device.type != "meta"
    if is_plain and not (buffer.is_quantized or buffer.is_nested):
        return buffer.detach().resolve_conj().resolve_neg().reshape(-1).clone().view(torch.uint8)
    return id(buffer), 0 if buffer.is_inference() else buffer._version


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
