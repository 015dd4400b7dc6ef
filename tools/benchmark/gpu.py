"""Figures that need a GPU: kernels, copies among them, peaks of the allocator, and overlap of kernels.

One GPU is enough. Real collectives have as many ranks as there are GPUs. The cost of a larger world for one rank is
measured in a fake group, whose collectives move nothing (`StandIns`); to measure overlap, each of them is a kernel that
spins for a time that depends on its size, on the stream that the engine chose.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from .figures import COLLECTIVES, count
from .jobs import Setting, Training

FAKE_RANKS = 8
SPIN_MS = 0.5  # of the stand-in for a unit's collective: shorter than a block of gpu_check's model computes in bf16
COPIES = ("memcpy dtod", "copy", "catarray", "chunk_cat", "split_with_sizes")


class StandIns(TorchDispatchMode):
    """Every collective is preceded by a kernel on the stream that it is issued on, which spins for ``milliseconds`` for
    every ``of`` elements that it would move; none for 0. A gather of a fake group moves nothing, but would fill the
    places of all ranks, with a kernel for each: its arguments are emptied.

    Attributes:
        issued: the names of the collectives, in order.
    """

    def __init__(self, milliseconds: float = 0.0, of: int = 1) -> None:
        super().__init__()
        self.issued: list[str] = []
        self._cycles = milliseconds * cycles_per_ms() / of if milliseconds else 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.issued.append(func._schema.name.removeprefix("c10d::"))
            if self._cycles:
                torch.cuda._sleep(max(1, int(self._cycles * _most_elements(args))))
            if "allgather" in func._schema.name and dist.get_backend() == "fake":
                args = _emptied(args)
        return func(*args, **(kwargs or {}))


def _most_elements(value: Any) -> int:
    """The size of the largest list or tensor in a collective's arguments: a gather's output or a reduction's input."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, list | tuple):
        sizes = [_most_elements(each) for each in value]
        return sum(sizes) if all(isinstance(each, torch.Tensor) for each in value) else max(sizes, default=0)
    return 0


def _emptied(value: Any) -> Any:
    """`value` with its tensors, in lists or not, emptied."""
    if isinstance(value, torch.Tensor):
        return value.new_empty(0)
    return type(value)(map(_emptied, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Kernel:
    """One piece of work of the device: microseconds from ``start`` to ``end`` on a stream; ``place``: a number that
    increases in the order in which the host issued the work."""

    name: str
    stream: int
    start: float
    end: float
    place: int = 0

    @property
    def communicates(self) -> bool:
        """Whether it is a collective or the stand-in for one."""
        return "spin_kernel" in self.name or self.name.startswith("nccl")

    @property
    def copies(self) -> bool:
        """Whether it only moves bytes within the device."""
        return any(word in self.name.lower() for word in COPIES)


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """The device's work in a trace exported by the profiler."""
    return [
        Kernel(
            event["name"],
            event["args"].get("stream", 0),
            event["ts"],
            event["ts"] + event["dur"],
            event["args"].get("correlation", 0),
        )
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def overlap(kernels: Sequence[Kernel]) -> float | None:
    """The share of the time in collectives during which other kernels compute; None without collectives."""
    return hidden([k for k in kernels if k.communicates], kernels)


def hidden(some: Sequence[Kernel], kernels: Sequence[Kernel]) -> float | None:
    """The share of the time in `some`, collectives of all `kernels`, during which other kernels compute."""
    busy = _union((k.start, k.end) for k in kernels if not k.communicates)
    communicating = _union((k.start, k.end) for k in some)
    total = sum(end - start for start, end in communicating)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in communicating for b in busy)
    return both / total if total else None


def by_kind(kernels: Sequence[Kernel], issued: Sequence[str]) -> dict[str, list[Kernel]]:
    """The stand-ins for collectives, by kind, in the order `issued`; empty if their number differs."""
    spins = sorted((k for k in kernels if "spin_kernel" in k.name), key=lambda k: k.place)
    found: dict[str, list[Kernel]] = {}
    if len(spins) == len(issued):
        for kernel, name in zip(spins, issued, strict=True):
            found.setdefault(COLLECTIVES.get(name, name), []).append(kernel)
    return found


def _union(ranges: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of `ranges` as disjoint ranges, in order."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def record(training: Training, stand_ins: StandIns) -> list[Kernel]:
    """The device's work in one step."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded, stand_ins:
        training.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text()))


def inspect(rank: int, setting: Setting) -> dict[str, Any]:
    """Figures of one step: bytes allocated and reserved at its peak and left after it, allocator retries since the
    start, kernels and copies among them, the same on the streams of collectives, overlap, and the results of `count`.
    Collective.
    """
    training = Training(rank, setting)
    training.warm_up()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    torch.cuda.synchronize()
    figures: dict[str, Any] = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "left": torch.cuda.memory_allocated(),
    }
    plain = record(training, StandIns())
    figures |= {"kernels": len(plain), "copy kernels": sum(kernel.copies for kernel in plain)}
    spun = record(training, StandIns(SPIN_MS, max(setting.case.unit_bytes()) // 4))
    streams = {kernel.stream for kernel in spun if kernel.communicates}
    on_streams = [kernel for kernel in spun if kernel.stream in streams and not kernel.communicates]
    figures["overlap"] = overlap(spun)
    figures["on streams"] = {"kernels": len(on_streams), "copies": sum(kernel.copies for kernel in on_streams)}
    return {**figures, **count(training), "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0)}


@cache
def cycles_per_ms() -> float:
    """The number of cycles that a kernel spins in a millisecond."""
    torch.cuda._sleep(1_000_000)  # the first call compiles
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / start.elapsed_time(end)
