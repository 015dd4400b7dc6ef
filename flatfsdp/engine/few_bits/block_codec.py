"""Block-wise quantization to few bits, and its inverse: blocks that share a scale, packed as bytes.

[Note: blocks] Encoded numbers begin with the scales of all blocks, in float32, followed by their codes. A block is
`BLOCK` consecutive numbers; the last block has the remaining ones. Its scale is its largest absolute value divided by
the largest code, so the error of a number is at most half a scale (with fp8 codes of `e4m3fn`: a sixteenth of the
number). A block that contains an infinity or a NaN has NaN as its scale, and all of its numbers are decoded as NaN.
Everything is computed in float32; numbers beyond its range count as infinite. The work is done in spans, which stay in
a CPU's cache and bound the scratch memory.

[Note: lost] Encoding can take the errors of earlier encodings of the same numbers: it adds them, and replaces them by
the errors of this encoding. For two kinds of numbers the stored error stays unchanged: for a zero, which may stand for
a missing gradient and is encoded as zero, and for a number in a block that is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...api import MixedPrecision

BLOCK = 256
_SCALE = 4  # bytes
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # zeros need one, and smaller ones would lose precision
_LESS = 1 + 2**-22  # keeps the largest code times its scale below the encoded number: decoding cannot overflow
_SPAN_ON_CPU, _SPAN = 2**16, 2**22  # numbers


@dataclass(frozen=True)
class BlockCodec:
    """The encoding of numbers as codes of a few bits.

    Attributes:
        bits: of a code; 4 or 8.
        largest: the largest code; codes are symmetric.
        dtype: of a code; two codes of 4 bits share a byte.
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
        """Integer codes of `bits`, 4 or 8."""
        return BlockCodec(bits, float(2 ** (bits - 1) - 1), torch.int8)

    def encoded_bytes(self, numel: int) -> int:
        """Bytes of `numel` encoded numbers; a multiple of 4, so that several lists can be stored back to back."""
        codes = -(-numel * self.bits // 8)
        return -(-numel // BLOCK) * _SCALE + -(-codes // _SCALE) * _SCALE

    def scratch_bytes(self, numel: int, device: torch.device, *, with_lost: bool = False) -> int:
        """The most scratch memory, in bytes, that encoding or decoding uses in addition to the encoded bytes."""
        return min(numel, _longest_span(device)) * (16 if with_lost else 8)

    def encode(self, values: torch.Tensor, encoded: torch.Tensor, lost: torch.Tensor | None = None) -> None:
        """Write `values`, shape (R, n), of any real dtype and on any device, to `encoded`, shape (R, at least
        encoded_bytes(n)), uint8. `lost`, as `values`, for integer codes: read and written. [Note: lost]"""
        numel = values.shape[1]
        if not numel:
            return  # empty tensors have no strides that could be read as scales
        scales = self._scales(encoded, numel)
        for start, stop in self._spans(encoded, numel):
            blocks = values[:, start:stop].to(encoded.device, torch.float32, non_blocking=True)
            blocks = blocks.unflatten(1, (-1, min(BLOCK, stop - start)))
            if lost is not None:
                kept = lost[:, start:stop].unflatten(1, blocks.shape[1:])
                owed, given = kept.to(torch.float32), torch.ne(blocks, 0, out=torch.empty_like(blocks))  # 0 or 1
                blocks = torch.addcmul(blocks, owed, given)
            largest = torch.maximum(blocks.amax(2), blocks.amin(2).neg_())
            scale = largest.div_(self.largest * _LESS).clamp_(min=_SMALLEST_SCALE)
            scale.add_(scale * 0)  # inf becomes NaN
            scales[:, start // BLOCK :][:, : scale.shape[1]] = scale
            numbers = blocks / scale.unsqueeze(2)
            if lost is None:
                del blocks
            self._write(numbers, self._codes(encoded, numel, start, stop))
            if lost is not None:  # float arithmetic is several times as fast as masks
                error = blocks.addcmul_(numbers, scale.unsqueeze(2), value=-1)  # rounding has left codes in `numbers`
                given.mul_(scale.isfinite().to(torch.float32).unsqueeze(2))
                kept.copy_(torch.lerp(owed, error.nan_to_num_(0, 0, 0), given))

    def decode(self, encoded: torch.Tensor, numel: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Decode `encoded`, R times `numel` numbers: yields slices of the numbers, with values (R, length), float32."""
        if not numel:
            return
        scales = self._scales(encoded, numel)
        for start, stop in self._spans(encoded, numel):
            values = self._read(self._codes(encoded, numel, start, stop), min(BLOCK, stop - start))
            values.mul_(scales[:, start // BLOCK :][:, : values.shape[1]].unsqueeze(2))
            yield slice(start, stop), values.flatten(1)

    def decode_into(self, outputs: torch.Tensor, encoded: torch.Tensor) -> None:
        """Fill `outputs`, shape (R, n), of any floating-point dtype, from `encoded`."""
        for span, values in self.decode(encoded, outputs.shape[1]):
            outputs[:, span] = values

    def add_up(self, output: torch.Tensor, encoded: torch.Tensor, own: torch.Tensor, rank: int) -> None:
        """Sum all of `encoded`, and `own`, the term of this `rank`, into `output`, which may be `own`: one term after
        the other, in float32. Shapes (R, ...) and (n,)."""
        for span, values in self.decode(encoded, own.numel()):
            terms: Sequence[torch.Tensor] = values.unbind()
            terms = [*terms[:rank], own[span].to(torch.float32), *terms[rank:]]
            total = terms[0] + terms[1]
            for term in terms[2:]:
                total += term
            output[span] = total

    def _spans(self, encoded: torch.Tensor, numel: int) -> Iterator[tuple[int, int]]:
        """Spans of complete blocks, then the remaining numbers."""
        whole = numel - numel % BLOCK
        step = max(_longest_span(encoded.device) // BLOCK // max(encoded.shape[0], 1), 1) * BLOCK
        for start in range(0, whole, step):
            yield start, min(start + step, whole)
        if numel > whole:
            yield whole, numel

    def _scales(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        return encoded[:, : -(-numel // BLOCK) * _SCALE].view(torch.float32)

    def _codes(self, encoded: torch.Tensor, numel: int, start: int, stop: int) -> torch.Tensor:
        """Shape (R, blocks, bytes of a block), int8 or the dtype of codes."""
        begin = -(-numel // BLOCK) * _SCALE
        codes = encoded[:, begin + start * self.bits // 8 : begin + -(-stop * self.bits // 8)]
        return codes.view(self.dtype).unflatten(1, (-1, -(-min(BLOCK, stop - start) * self.bits // 8)))

    def _write(self, numbers: torch.Tensor, codes: torch.Tensor) -> None:
        if self.dtype.is_floating_point:
            codes.copy_(numbers)
            return
        numbers.round_()
        if self.bits == 8:
            codes.copy_(numbers)
            return
        # A byte has one code of each half of the block, so that both halves are read contiguously.
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
        numbers[..., :half] = (codes << 4) >> 4  # extends the sign
        numbers[..., half:] = (codes >> 4)[..., : width - half]
        return numbers


def codecs(mixed: MixedPrecision) -> tuple[BlockCodec | None, BlockCodec | None]:
    """The codec of parameters and that of gradients; None if they are communicated unquantized."""
    return (
        BlockCodec.of_dtype(mixed.gather_dtype) if mixed.gather_dtype is not None else None,
        BlockCodec.of_bits(mixed.reduce_bits) if mixed.reduce_bits is not None else None,
    )


def _longest_span(device: torch.device) -> int:
    return _SPAN_ON_CPU if device.type == "cpu" else _SPAN
