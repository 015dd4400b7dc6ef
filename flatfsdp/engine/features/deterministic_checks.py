"""Checks of deterministic sums: refused models, options, optimizers and forwards, and words about kernels, which ranks
compare. [Note: deterministic sums]"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...errors import UsageError, few
from ..base.events import Observer
from ..device.streams import Device
from ..guards import optimizer_hooks
from ..models.param_registry import owner_of
from ..runtime.model import model_of
from ..runtime.unit import Unit
from .microbatches import running


def kernels_of(device: Device) -> str:
    """The facts that decide on the bits of a microbatch's gradient, as far as ranks can compare them."""
    kernels = torch.backends.cpu.get_cpu_capability()
    if device.has_streams and device.device.type == "cuda":
        kernels = f"{kernels}, {torch.get_device_module(device.device).get_device_name(device.device)}"
    switches = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "no mkldnn": not torch.backends.mkldnn.enabled,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
    }
    return ", ".join(
        (
            f"torch {torch.__version__}",
            f"{torch.get_num_threads()} threads",
            f"{kernels} of {_processor()}",
            f"float32 products of {torch.get_float32_matmul_precision()} precision",
            *(name for name, is_on in switches.items() if is_on),
        )
    )


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

    The first forward may fill caches. It looks at the second one, and then leaves: what begins later is known only of
    norms (`check_units`).
    """

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[torch.Tensor, int]] | None = None
        self._forwards = 0

    def forward_begins(self, unit: Unit, inputs: Any, *, outermost: bool) -> None:
        if outermost and running.value is not None:
            self._forwards += 1
            self._before = _buffers_of(unit) if self._forwards > 1 else None

    def forward_ended(self, unit: Unit, output: Any, *, outermost: bool) -> None:
        if not outermost or self._before is None:
            return
        before, after, self._before = self._before, _buffers_of(unit), None
        model_of(unit).observers.remove(self)
        written = []
        for key in {**before, **after}:
            (one, version), (other, later) = (each.get(key, (None, 0)) for each in (before, after))
            if one is not other or version != later:
                written.append(key[1])
        if written:
            raise UsageError(
                f"deterministic_sums=True: a forward writes to buffers ({few(written)}), which then follow from the "
                "microbatches of this rank, and are others on another number of ranks. Use modules without such "
                "buffers, as GroupNorm, LayerNorm or BatchNorm with track_running_stats=False, or write to them "
                "between steps, alike on all ranks"
            )


def _buffers_of(unit: Unit) -> dict[tuple[int, str], tuple[torch.Tensor, int]]:
    """The buffers, with their versions, by number of the entry and name."""
    named = ((number, *each) for number, entry in enumerate(unit.entries) for each in entry.named_buffers())
    return {(number, name): (each, each._version) for number, name, each in named}
