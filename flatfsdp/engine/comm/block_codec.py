"""Numbers as few bits, and back: blocks that share a scale, packed into rows of bytes.

[Note: blocks] A row has the scales of all blocks first, in float32, then their codes. A block is `BLOCK` numbers that
follow each other, the last one what is left. Its scale is its largest absolute value over the largest code, so that a
number is off by half a scale at most (with fp8 codes by a sixteenth of itself, at `e4m3fn`). A block in which something
is infinite or not a number has NaN for its scale, and so is NaN as a whole when it is decoded. All is computed in
float32, beyond whose range numbers count as infinite. Work is done in chunks, which stay in a CPU's cache and bound the
scratch.

[Note: lost] Encoding may be given what earlier encodings of the same numbers have lost, which it adds, and in whose
place it leaves what it loses itself. Two kinds of numbers lose nothing, and what they are owed waits: a zero, which may
stand for a gradient that is not there and is encoded as zero, and one in a block that is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...api import MixedPrecision

BLOCK = 256
_SCALE = 4  # bytes
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # zeros need one, and smaller ones would lose precision
_LESS = 1 + 2**-22  # a largest code times its scale is no more than what it stands for, or float32 might not have it
_CHUNK_ON_CPU, _CHUNK = 2**16, 2**22  # numbers


@dataclass(frozen=True)
class BlockCodec:
    """How numbers become codes.

    Attributes:
        bits: of a code; 4 or 8.
        largest: the largest code; codes are symmetric.
        dtype: of a code; those of 4 bits lie in pairs in a byte.
    """

    bits: int
    largest: float
    dtype: torch.dtype

    @staticmethod
    def of_dtype(dtype: torch.dtype) -> BlockCodec:
        """Codes of `dtype`: int8, or a floating-point dtype of 8 bits."""
        return BlockCodec(8, 127.0 if dtype is torch.int8 else torch.finfo(dtype).max, dtype)

    @staticmethod
    def of_bits(bits: int) -> BlockCodec:
        """Integers of `bits`, 4 or 8."""
        return BlockCodec(bits, float(2 ** (bits - 1) - 1), torch.int8)

    def row_bytes(self, numel: int) -> int:
        """Bytes of the row of `numel` numbers; a multiple of 4, so that rows may follow each other."""
        codes = -(-numel * self.bits // 8)
        return -(-numel // BLOCK) * _SCALE + -(-codes // _SCALE) * _SCALE

    def scratch_bytes(self, numel: int, device: torch.device, *, with_lost: bool = False) -> int:
        """Bytes that encoding and decoding take at most beside their rows, for as long as they run."""
        return min(numel, _chunk(device)) * (16 if with_lost else 8)

    def encode(self, values: torch.Tensor, rows: torch.Tensor, lost: torch.Tensor | None = None) -> None:
        """Write `values`, shape (R, n), of any real dtype and on any device, to `rows`, shape (R, at least
        row_bytes(n)), uint8. `lost`, as `values`, for integer codes: read and written. [Note: lost]"""
        numel = values.shape[1]
        if not numel:
            return  # such rows have no strides that could be read as scales
        scales = self._scales(rows, numel)
        for start, stop in self._parts(rows, numel):
            blocks = values[:, start:stop].to(rows.device, torch.float32, non_blocking=True)
            blocks = blocks.unflatten(1, (-1, min(BLOCK, stop - start)))
            if lost is not None:
                place = lost[:, start:stop].unflatten(1, blocks.shape[1:])
                owed, given = place.to(torch.float32), torch.ne(blocks, 0, out=torch.empty_like(blocks))  # 0 or 1
                blocks = torch.addcmul(blocks, owed, given)
            largest = torch.maximum(blocks.amax(2), blocks.amin(2).neg_())
            scale = largest.div_(self.largest * _LESS).clamp_(min=_SMALLEST_SCALE)
            scale.add_(scale * 0)  # inf becomes NaN
            scales[:, start // BLOCK :][:, : scale.shape[1]] = scale
            numbers = blocks / scale.unsqueeze(2)
            if lost is None:
                del blocks
            self._write(numbers, self._codes(rows, numel, start, stop))
            if lost is not None:  # in arithmetic of floats, several times as fast as with masks
                error = blocks.addcmul_(numbers, scale.unsqueeze(2), value=-1)  # rounding has left codes in `numbers`
                given.mul_(scale.isfinite().to(torch.float32).unsqueeze(2))
                place.copy_(torch.lerp(owed, error.nan_to_num_(0, 0, 0), given))

    def decode(self, rows: torch.Tensor, numel: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """What `rows` have, each `numel` numbers: slices of them, with their values, shape (R, length), float32."""
        if not numel:
            return
        scales = self._scales(rows, numel)
        for start, stop in self._parts(rows, numel):
            values = self._read(self._codes(rows, numel, start, stop), min(BLOCK, stop - start))
            values.mul_(scales[:, start // BLOCK :][:, : values.shape[1]].unsqueeze(2))
            yield slice(start, stop), values.flatten(1)

    def decode_into(self, outputs: torch.Tensor, rows: torch.Tensor) -> None:
        """Fill `outputs`, shape (R, n), of any floating-point dtype, from `rows`."""
        for part, values in self.decode(rows, outputs.shape[1]):
            outputs[:, part] = values

    def add_up(self, output: torch.Tensor, rows: torch.Tensor, own: torch.Tensor, place: int) -> None:
        """Sum all `rows` and `own`, which belongs at `place` among them, one after the other in float32; `output` may
        be `own`. Shapes (R, ...) and (n,)."""
        for part, values in self.decode(rows, own.numel()):
            terms: Sequence[torch.Tensor] = values.unbind()
            terms = [*terms[:place], own[part].to(torch.float32), *terms[place:]]
            total = terms[0] + terms[1]
            for term in terms[2:]:
                total += term
            output[part] = total

    def _parts(self, rows: torch.Tensor, numel: int) -> Iterator[tuple[int, int]]:
        """Chunks of whole blocks, and the rest."""
        whole = numel - numel % BLOCK
        step = max(_chunk(rows.device) // BLOCK // max(rows.shape[0], 1), 1) * BLOCK
        for start in range(0, whole, step):
            yield start, min(start + step, whole)
        if numel > whole:
            yield whole, numel

    def _scales(self, rows: torch.Tensor, numel: int) -> torch.Tensor:
        return rows[:, : -(-numel // BLOCK) * _SCALE].view(torch.float32)

    def _codes(self, rows: torch.Tensor, numel: int, start: int, stop: int) -> torch.Tensor:
        """Shape (R, blocks, bytes of a block), int8 or the dtype of codes."""
        begin = -(-numel // BLOCK) * _SCALE
        codes = rows[:, begin + start * self.bits // 8 : begin + -(-stop * self.bits // 8)]
        return codes.view(self.dtype).unflatten(1, (-1, -(-min(BLOCK, stop - start) * self.bits // 8)))

    def _write(self, numbers: torch.Tensor, codes: torch.Tensor) -> None:
        if self.dtype.is_floating_point:
            codes.copy_(numbers)
            return
        numbers.round_()
        if self.bits == 8:
            codes.copy_(numbers)
            return
        # The halves of a block, not neighbors, share bytes: both are read in one go.
        integers, half = numbers.to(torch.int8), codes.shape[2]
        low, high = integers[..., :half], integers[..., half:]
        torch.bitwise_and(low, 15, out=codes)
        codes[..., : high.shape[2]] |= high << 4

    def _read(self, codes: torch.Tensor, width: int) -> torch.Tensor:
        """Shape (R, blocks, width), float32."""
        if self.bits == 8:
            return codes.to(torch.float32, copy=True)
        half = codes.shape[2]
        numbers = torch.empty(*codes.shape[:2], width, dtype=torch.float32, device=codes.device)
        numbers[..., :half] = (codes << 4) >> 4  # the sign goes along
        numbers[..., half:] = (codes >> 4)[..., : width - half]
        return numbers


def codecs(mixed: MixedPrecision) -> tuple[BlockCodec | None, BlockCodec | None]:
    """Those of parameters and of gradients; None for what travels as it is."""
    return (
        BlockCodec.of_dtype(mixed.gather_dtype) if mixed.gather_dtype is not None else None,
        BlockCodec.of_bits(mixed.reduce_bits) if mixed.reduce_bits is not None else None,
    )


def _chunk(device: torch.device) -> int:
    return _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK
