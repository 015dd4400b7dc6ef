"""Figures that are counted instead of timed: live bytes, collectives, copied and scaled bytes. They are exact, even on
a busy machine.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .clock import PHASES, train_step
from .jobs import Setting, Training
from .memory import Counter

COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}
# The operators, with the place of the argument that is read.
COPIES = {
    "aten::copy_": 1,
    "aten::_foreach_copy_": 1,
    "aten::_to_copy": 0,
    "aten::clone": 0,
    "aten::cat": 0,
    "aten::stack": 0,
    "aten::repeat": 0,
    "aten::constant_pad_nd": 0,
    "aten::_chunk_cat": 0,
    "aten::split_with_sizes_copy": 0,
    "fsdp::all_gather_copy_in": 0,
    "fsdp::split_with_sizes_copy": 0,
    "fsdp::chunk_cat": 0,
}
SCALINGS = frozenset(f"aten::{prefix}{op}{suffix}" for op in ("mul", "div") for prefix, suffix in
                     (("", ""), ("", "_"), ("_foreach_", ""), ("_foreach_", "_")))  # fmt: skip


def sent(kind: str, size: int, world: int) -> float:
    """The least number of bytes that a rank sends for a collective whose input on that rank has ``size`` bytes."""
    factors = {"all_gather": world - 1, "reduce_scatter": (world - 1) / world, "all_reduce": 2 * (world - 1) / world}
    return 0 if kind == "recv" else size * factors.get(kind, 1)


class Counting(TorchDispatchMode):
    """Counts operators in torch's dispatcher: collectives, copies and scalings, by phase.

    Attributes:
        calls: the number of collectives by kind, including messages between two ranks.
        bytes: `sent` by kind.
        copied: bytes written by copies, by phase; copies from a parameter's shard into this rank's slot of a gather
            belong to the exchange, and are under "own slot".
        scaled: bytes multiplied by a number in the backward.
        operators: the number of operators.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls, self.bytes, self.copied = Tally[str](), Tally[str](), Tally[str]()
        self.scaled = self.operators = 0
        self._shards = {_memory(parameter) for parameter in model.parameters()}
        self._phases = iter(PHASES)
        self._phase = ""

    def mark(self) -> None:
        """Begin the next phase."""
        self._phase = next(self._phases, "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.operators += 1
        if name.startswith("c10d::"):
            self._collective(name.removeprefix("c10d::"), args)
        elif self._phase == "optimizer":
            pass
        elif name in COPIES:
            source = list(_tensors(args[COPIES[name]]))
            own = bool(source) and all(_memory(tensor) in self._shards for tensor in source)
            self.copied["own slot" if own else self._phase] += _bytes(source)
        elif name in SCALINGS and self._phase == "backward" and _is_number(args[1]):
            self.scaled += _bytes(_tensors(args[0]))
        return result

    def _collective(self, name: str, args: Any) -> None:
        kind = COLLECTIVES.get(name)
        if kind is None:
            return  # a barrier
        self.calls[kind] += 1
        # Operators with an output and an input take them in this order.
        read = args[1] if isinstance(args[1], torch.Tensor | list) else args[0]
        size = _bytes(_tensors(read))
        if kind == "all_to_all" and len(args) > 4 and args[4]:
            size = size * (sum(args[4]) - args[4][dist.get_rank()]) // max(1, sum(args[4]))
        self.bytes[kind] += int(sent(kind, size, dist.get_world_size()))

    def totals(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "calls": dict(self.calls),
            "bytes": dict(self.bytes),
            "copied": dict(self.copied),
            "scaled": self.scaled,
            "operators": self.operators,
        }


def inspect(rank: int, setting: Setting) -> dict[str, Any]:
    """Bytes of live tensors in a step (``peak``) and after it (``held``), of the third step and of the fourth; under
    FULL_SHARD also the counts of `Counting` for a fifth. Collective.
    """
    counter = Counter()
    training = Training(rank, setting)
    training.warm_up()
    peak, held = [], []
    for _ in range(2):
        if dist.is_initialized():
            dist.barrier()
        time.sleep(0.05)  # the backend's threads release sent tensors
        counter.peak()
        training.step()
        peak.append(counter.peak())
        time.sleep(0.05)
        held.append(counter.live())
    figures: dict[str, Any] = {"peak": peak, "held": held}
    return figures | (count(training) if setting.strategy == "FULL_SHARD" else {})


def count(training: Training) -> dict[str, Any]:
    """The counts of `Counting` for the next step. Collective."""
    counting, batch = Counting(training.model), training.batch()
    with counting:
        train_step(training.model, training.optimizer, batch, counting)
    return counting.totals()


def _memory(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, int | float)
