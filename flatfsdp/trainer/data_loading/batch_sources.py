"""Distribution of a step's microbatches: each rank reads its own, or rank 0 reads all and sends them.

A failed read of one rank is reported to all ranks before any of them waits for the others: they exchange two numbers
for this in every step.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp import collective_region
from flatfsdp.errors import AgreementError, by_ranks, ranks_by_value, ranks_in_words
from flatfsdp.messages import on_all_ranks, start_unrecorded
from flatfsdp.trainer.process_group import EXCHANGE, LocalFailure, TrainerRanks

from .sample_reader import DataError, StepPart

# Opens a stream of the parts of each step for a range of ranks, read by this process.
OpenParts = Callable[[range], Iterator[StepPart]]

ALIGNMENT = 16  # of tensors in a message, in bytes: the itemsize of the largest dtype

# In place of a number of samples or bytes:
END = -1
FAILED = -2


class ShardedSource:
    """Each rank reads its own microbatches. Methods are collective."""

    def __init__(self, open_parts: OpenParts, ranks: TrainerRanks) -> None:
        self._ranks = ranks
        self._parts = open_parts(range(ranks.rank, ranks.rank + 1))

    def next(self, local: LocalFailure | None = None) -> StepPart | None:
        """This rank's part of the next step, with the weight of all ranks'; otherwise as `Loader.next_step`."""
        part, failure = (None, None) if local is not None else _attempt(self._parts)
        own = FAILED if failure or local else END if part is None else part.after.position
        found, weights = zip(*self._ranks.rows(own, 0 if part is None else part.weight), strict=True)
        if FAILED in found:
            _raise_failures(self._ranks, local, failure)
        if len(set(found)) > 1:
            raise AgreementError(_difference(found))
        return None if part is None else replace(part, weight=sum(weights))

    def close(self) -> None:
        """End the reading ahead; called at the same step on all ranks."""
        self._parts = iter(())


@dataclass(frozen=True)
class _PrefetchedStep:
    """A step that was read during the previous one."""

    size: int  # bytes of each rank's message, END or FAILED
    part: StepPart | None = None  # rank 0's own part; None on the others
    failure: DataError | None = None  # on rank 0, the error of reading it
    message: Tensor | None = None  # on the others, the message to receive
    work: Any = None  # the pending transfer
    buffers: list[Tensor] = field(default_factory=list)  # memory of the transfer, kept until it is done


class DispatchedSource:
    """Rank 0 reads for all ranks, one step ahead; its messages are sent while the previous step is computed."""

    def __init__(self, open_parts: OpenParts, ranks: TrainerRanks) -> None:
        self._ranks = ranks
        self._parts = open_parts(range(ranks.world)) if ranks.rank == 0 else iter(())
        self._coming: _PrefetchedStep | None = None

    def next(self, local: LocalFailure | None = None) -> StepPart | None:
        coming = self._coming = self._coming or self._send_ahead(None)
        if coming.size == END:
            return None
        if coming.size == FAILED:
            _raise_failures(self._ranks, local, coming.failure)
        with collective_region():
            coming.work.wait()
        arrived, problem = (coming.part, None) if coming.message is None else _attempt(map(unpack, [coming.message]))
        self._coming = self._send_ahead(problem, local)
        return arrived

    def close(self) -> None:
        if self._coming is not None and self._coming.work is not None:
            with collective_region():
                self._coming.work.wait()
        self._coming, self._parts = None, iter(())

    def _send_ahead(self, problem: DataError | None, local: LocalFailure | None = None) -> _PrefetchedStep:
        """Read and send the next step, once no rank has a `problem` with the previous one. Collective."""
        part, failure, messages = self._read_ahead() if self._ranks.rank == 0 else (None, None, [])
        size = FAILED if failure is not None else max((message.numel() for message in messages), default=END)
        rows = self._ranks.rows(FAILED if problem is not None or local is not None else 0, size)
        if any(outcome == FAILED for outcome, _ in rows):
            _raise_failures(self._ranks, local, problem)
        size = rows[0][1]
        if size < 0:
            return _PrefetchedStep(size, failure=failure)
        own = torch.empty(size, dtype=torch.uint8)
        sent = [torch.nn.functional.pad(message, (0, size - message.numel())) for message in messages]
        group = self._ranks.host
        first = dist.get_global_rank(group, 0)
        work = start_unrecorded(dist.scatter, own, sent or None, src=first, group=group, async_op=True)
        return _PrefetchedStep(size, part=part, message=own if part is None else None, work=work, buffers=[own, *sent])

    def _read_ahead(self) -> tuple[StepPart | None, DataError | None, list[Tensor]]:
        """This rank's part of the next step, and for each rank a message with its part; at the end, none."""
        whole, failure = _attempt(self._parts)
        if whole is None:
            return None, failure, []
        parts = [replace(whole, shares=(share,)) for share in whole.shares]
        try:
            return parts[0], None, [torch.empty(1, dtype=torch.uint8), *map(pack, parts[1:])]
        except Exception as error:  # of pickle, about user-defined values
            return None, DataError.of(error, at="sending the result of collate"), []


def _attempt(parts: Iterator[StepPart]) -> tuple[StepPart | None, DataError | None]:
    """The next of `parts` (None at the end), or the error that reading it raised."""
    try:
        return next(parts, None), None
    except Exception as error:  # for example, a worker process has died
        found = error if isinstance(error, DataError) and error.trace else DataError.of(error)
        return None, found.with_traceback(None)  # frames of a traceback keep the workers alive


def _raise_failures(ranks: TrainerRanks, local: LocalFailure | None, failure: DataError | None) -> None:
    """Raise failures of some ranks on all ranks: first `local` ones, which are outside of reading. Collective."""

    def fail() -> None:
        if failure is not None:
            raise failure from DataError(f"as it was raised\n{failure.trace}")

    ranks.share(local)
    on_all_ranks(fail, ranks.host, call=EXCHANGE, raises=lambda failed, own: DataError(by_ranks(failed, ": ")))


def _difference(found: Sequence[int]) -> str:
    each = "; ".join(
        f"{ranks_in_words(ranks)}: {'no more samples' if position == END else f'{position} samples so far'}"
        for position, ranks in ranks_by_value(dict(enumerate(found))).items()
    )
    return (
        f"ranks read different data ({each}). In sharded mode, the dataset must give every rank the same samples, of "
        'which each rank takes its own. Give every rank the whole stream, or let rank 0 read it: data_mode="dispatch", '
        'of a Loader mode="dispatch"'
    )


def pack(value: Any) -> Tensor:
    """Any value as a 1-D tensor of uint8. Tensors inside are copied once, on the sending rank.

    The bytes are the number of pickled bytes, the value pickled without its tensors, then the tensors, each at a
    multiple of 16.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    pickled = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    start = ALIGNMENT + _aligned(pickled.numel())
    packed = torch.zeros(start + pickler.size, dtype=torch.uint8)
    packed[:8].view(torch.int64)[0] = pickled.numel()
    packed[ALIGNMENT:][: pickled.numel()] = pickled
    for offset, tensor in pickler.tensors:
        packed[start + offset :][: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return packed


def unpack(packed: Tensor) -> Any:
    """The inverse of `pack`; trailing bytes are ignored. Tensors inside are views of `packed`."""
    size = int(packed[:8].view(torch.int64)[0])
    pickled = ctypes.string_at(packed[ALIGNMENT:].data_ptr(), size)
    return _Unpickler(io.BytesIO(pickled), packed[ALIGNMENT + _aligned(size) :]).load()


class _Pickler(pickle.Pickler):
    """Replaces a plain tensor by its place."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, Tensor]] = []
        self.size = 0
        self._seen: dict[int, tuple[Any, ...]] = {}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) is not Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return None
        if value.requires_grad or value.is_quantized:
            return None
        if id(value) not in self._seen:  # `tensors` keeps it alive, so its id stays unique
            self._seen[id(value)] = self.size, value.dtype, tuple(value.shape)
            self.tensors.append((self.size, value))
            self.size += _aligned(value.nbytes)
        return self._seen[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: Tensor) -> None:
        super().__init__(buffer)
        self._tensors = tensors
        self._seen: dict[int, Tensor] = {}

    def persistent_load(self, found: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
        offset, dtype, shape = found
        size = dtype.itemsize * torch.Size(shape).numel()
        if not size:
            return torch.empty(shape, dtype=dtype)
        if offset not in self._seen:
            self._seen[offset] = self._tensors[offset:][:size].view(dtype).view(shape)
        return self._seen[offset]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
