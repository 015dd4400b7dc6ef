"""One step in the profiler's trace: the work of the device, waits of the host, and called operators."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from tools.benchmark.gpu import Kernel, kernels_of
from tools.benchmark.jobs import Training

from .card import Card

STEP = "gpu_check: step"
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cuCtxSynchronize")
RUNTIME = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Trace:
    """A trace of `record`, as exported by the profiler; ``led``: its first kernel does not belong to the step."""

    content: dict[str, Any]
    led: bool = False

    def kernels(self) -> list[Kernel]:
        """The work of the device."""
        found = kernels_of(self.content)
        if not self.led:
            return found
        first = min((kernel for kernel in found if "spin_kernel" in kernel.name), key=lambda kernel: kernel.place)
        return [kernel for kernel in found if kernel is not first]

    def calls(self) -> Counter[str]:
        """The CUDA calls of the host within the step, of all threads."""
        events = self.content["traceEvents"]
        spans = [
            (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == STEP and e.get("cat") == "user_annotation"
        ]
        begin, end = spans[0] if spans else (0.0, -1.0)
        return Counter(e["name"] for e in events if e.get("cat") in RUNTIME and begin <= e["ts"] <= end)

    def waits(self) -> dict[str, int]:
        """The calls that made the host wait within the step."""
        calls = self.calls()
        return {name: calls[name] for name in WAITS if calls[name]}

    def write(self, path: Path) -> None:
        """Write the trace for a viewer."""
        path.write_bytes(gzip.compress(json.dumps(self.content).encode()))


def step(training: Training, batch: Any) -> None:
    """Run a step without reading the loss."""
    training.model(*batch).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def record(training: Training, card: Card, within: TorchDispatchMode, lead: float = 0.0) -> Trace:
    """Trace the next step. ``lead``: milliseconds for which the device is kept busy first, so that it does not wait for
    the host, which the profiler and ``within`` slow down several times."""
    batch = training.batch()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if card.is_real else [])]
    card.synchronize()
    with profile(activities=activities) as recorded, within:
        if lead:
            card.spin(lead)
        with record_function(STEP):
            step(training, batch)
        card.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return Trace(json.loads(path.read_text()), led=bool(lead))


class Operators(TorchDispatchMode):
    """Counts the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))
