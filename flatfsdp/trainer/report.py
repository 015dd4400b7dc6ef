"""What rank 0 tells its user: progress while training, and the summary at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from flatfsdp import Stats

PLAIN_LINES = 20  # progress lines of a run whose output is not a terminal


def human(*sizes: float) -> str:
    """Bytes with the binary unit that suits the largest: "1.6 MiB" or, of several, "0.8, 1.6 MiB"."""
    power = min(max(int(max(sizes)).bit_length() - 1, 0) // 10, 3)
    numbers = (f"{size / 1024**power:.{1 if power else 0}f}" for size in sizes)
    return f"{', '.join(numbers)} {('B', 'KiB', 'MiB', 'GiB')[power]}"


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank: what it holds between steps, and the most that was unsharded at one time."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    in_flight: int = 0

    @classmethod
    def measure(cls, stats: Stats, optimizer: torch.optim.Optimizer) -> Footprint:
        """Read `flatfsdp.stats` and the optimizer's tensors; call it while the gradients of a step are there."""
        tensors = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
        return cls(
            parameters=stats.bytes_params,
            gradients=stats.bytes_grads,
            optimizer=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            in_flight=stats.bytes_unsharded_peak,
        )

    def __str__(self) -> str:
        sizes = human(self.parameters, self.gradients, self.optimizer, self.in_flight).split(", ")
        names = ("params", "grads", "optim", "unsharded")
        return ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))


class Progress:
    """How far a run is: tqdm's bar on a terminal, a line now and then elsewhere.

    Does nothing unless `shown`, so that all ranks can run the same code.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._lines = 0
        self._bar = _tqdm_bar() if shown and sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, step: int, done: float, loss: float, tokens_per_second: float, footprint: Footprint) -> None:
        """`step` steps, the share `done` of the run, are over; the last had `loss` nats per byte."""
        if not self._shown:
            return
        text = f"step {step}: loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s; per rank {footprint}"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(min(done, 1.0) - self._bar.n)
        elif step == 1 or done * PLAIN_LINES >= self._lines + 1:
            self._lines = int(done * PLAIN_LINES)
            print(f"{min(done, 1.0):4.0%} {text}", file=sys.stderr, flush=True)


def _tqdm_bar() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=1.0, dynamic_ncols=True, bar_format="{percentage:3.0f}% {bar:8} {remaining}{postfix}")


@dataclass(frozen=True)
class Summary:
    """The facts of a finished run, see `render` for what they look like."""

    data: str
    ranks: str
    parameters: int
    units: int
    footprint: Footprint
    communication: Mapping[str, tuple[float, float]]
    steps: int
    seconds: float
    tokens_per_step: int
    first_loss: float
    last_loss: float
    validation_loss: float
    plot: str

    def render(self) -> str:
        """The summary as lines of text, one fact a line."""
        sent = ", ".join(
            f"{kind} {human(size)} in {calls:.4g} call{'' if calls == 1 else 's'}"
            for kind, (calls, size) in sorted(self.communication.items())
        )
        rows = {
            "data": self.data,
            "ranks": self.ranks,
            "parameters": f"{self.parameters:,} in total, {human(self.footprint.parameters)} of them per rank",
            "units": f"{self.units:,}",
            "per rank": f"{self.footprint}",
            "per step": sent or "no communication",
            "speed": f"{self.steps:,} steps in {self.seconds:.1f} s, "
            f"{self.steps * self.tokens_per_step / self.seconds:,.0f} tokens/s",
            "loss": f"{self.first_loss:.3f} -> {self.last_loss:.3f} nats/byte",
            "validation": f"{self.validation_loss:.3f} nats/byte",
            "plot": self.plot,
        }
        return "\n".join(["summary", *(f"  {name:<11} {fact}" for name, fact in rows.items())])
