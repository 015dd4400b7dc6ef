"""Numbers as few bits: the error of decoded ones, their bytes, and the effect of NaN and inf."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatfsdp.engine.few_bits.block_codec import BLOCK, BlockCodec

pytestmark = pytest.mark.unit

INT8, INT4 = BlockCodec.of_bits(8), BlockCodec.of_bits(4)
FP8 = BlockCodec.of_dtype(torch.float8_e4m3fn)
CODECS = {"int8": INT8, "int4": INT4, "fp8": FP8}
SIZES = [0, 1, 2, 3, 255, 256, 257, 511, 1000, 66_003]  # the last in several chunks


def through(codec: BlockCodec, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.full((values.shape[0], codec.encoded_bytes(values.shape[1])), 255, dtype=torch.uint8)
    codec.encode(values, rows)
    outputs = torch.full(values.shape, 7.0, dtype=dtype)
    codec.decode_into(outputs, rows)
    return outputs


def of_many_sizes(rows: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    numbers = torch.randn(rows, numel, generator=generator, dtype=torch.float64)
    return (numbers * 10.0 ** torch.randint(-6, 5, numbers.shape, generator=generator)).to(dtype)


def largest_of_block(values: Tensor) -> Tensor:
    """For each number the largest absolute value of its block."""
    if not values.numel():
        return values
    blocks = [block.abs().amax(1, keepdim=True).expand_as(block) for block in values.split(BLOCK, dim=1)]
    return torch.cat(blocks, dim=1)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", CODECS)
def test_decoded_numbers_are_near(name: str, numel: int) -> None:
    codec = CODECS[name]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)[: 4 if numel < 2000 else 1]:
        values = of_many_sizes(3, numel, dtype)
        wide = values.double()
        scale = largest_of_block(wide) / codec.largest
        error = (through(codec, values).double() - wide).abs()
        step = wide.abs() / 8 if name == "fp8" else 0 * scale  # three bits behind the first
        bound = torch.maximum(scale * (2**-9 if name == "fp8" else 1), step) / 2
        assert (error <= bound * (1 + 1e-4) + 1e-37).all()


@pytest.mark.parametrize("numel", SIZES)
def test_bytes_of_rows(numel: int) -> None:
    scales, padding = 4 * -(-numel // 256), 3
    assert numel <= INT8.encoded_bytes(numel) - scales <= numel + padding
    assert -(-numel // 2) <= INT4.encoded_bytes(numel) - scales <= -(-numel // 2) + padding
    assert FP8.encoded_bytes(numel) == INT8.encoded_bytes(numel)
    assert {codec.encoded_bytes(numel) % 4 for codec in CODECS.values()} == {0}


@pytest.mark.parametrize("name", CODECS)
def test_zeros_small_and_large_numbers(name: str) -> None:
    codec = CODECS[name]
    assert torch.equal(through(codec, torch.zeros(2, 300)), torch.zeros(2, 300))
    for extreme in (1e-45, 1e-38, 3e-38, 1e38, torch.finfo(torch.float32).max):
        values = torch.full((1, 300), extreme)
        values[0, ::3] *= -1
        found = through(codec, values)
        assert (found - values).abs().max() <= max(extreme * 1e-6, 1.2e-38 / 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e39])
@pytest.mark.parametrize("name", CODECS)
def test_a_block_with_what_is_not_finite_is_nan_as_a_whole(name: str, bad: float) -> None:
    values = torch.ones(2, 1000, dtype=torch.float64)
    values[0, 300] = values[1, 999] = bad
    found = through(CODECS[name], values).isnan()
    assert found[0].nonzero().flatten().tolist() == list(range(256, 512))
    assert found[1].nonzero().flatten().tolist() == list(range(768, 1000))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("codec", [INT8, INT4], ids=["int8", "int4"])
def test_what_is_decoded_and_what_is_lost_are_what_there_was(codec: BlockCodec, dtype: torch.dtype, numel: int) -> None:
    values = of_many_sizes(3, numel, dtype)
    lost = (of_many_sizes(3, numel).flip(0) / 10).to(dtype)
    there = values.double() + lost.double()
    size = largest_of_block(there)
    rows = torch.empty(3, codec.encoded_bytes(numel), dtype=torch.uint8)
    codec.encode(values, rows, lost)
    decoded = torch.empty(3, numel)
    codec.decode_into(decoded, rows)
    assert ((decoded + lost.double() - there).abs() <= size * (2**-11 if dtype is torch.bfloat16 else 2**-22)).all()
    assert (lost.double().abs() <= size / codec.largest / 2 * (1 + 2**-8)).all()
    assert numel < 255 or lost.count_nonzero() > numel


@pytest.mark.parametrize("codec", [INT8, INT4], ids=["int8", "int4"])
def test_zeros_and_blocks_that_are_nan_lose_nothing_and_wait(codec: BlockCodec) -> None:
    values, lost = of_many_sizes(2, 1000), of_many_sizes(2, 1000).flip(0)
    values[:, ::3], values[0, 300], values[1, 999] = 0, torch.nan, torch.inf
    before, rows = lost.clone(), torch.empty(2, codec.encoded_bytes(1000), dtype=torch.uint8)
    codec.encode(values, rows, lost)
    found = torch.empty(2, 1000)
    codec.decode_into(found, rows)
    waits = (values == 0) | found.isnan()
    assert waits[0, 256:512].all() and waits[1, 768:].all() and not waits[0, 1]
    assert torch.equal(lost[waits], before[waits])
    assert lost.isfinite().all() and not torch.equal(lost[~waits], before[~waits])
    assert not found[(values == 0) & ~found.isnan()].any()


def test_what_is_decoded_is_rounded_once_to_the_output() -> None:
    values = of_many_sizes(2, 513)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(through(INT8, values, dtype), through(INT8, values).to(dtype))


def test_rows_may_lie_apart_and_values_anywhere() -> None:
    """As in a buffer of several tensors, and in a table of pieces."""
    table = torch.zeros(3, 2 * INT8.encoded_bytes(300) + 8, dtype=torch.uint8)
    values = of_many_sizes(3, 700)[:, 100:400]
    for offset in (4, 4 + INT8.encoded_bytes(300)):
        rows = table[:, offset : offset + INT8.encoded_bytes(300)]
        INT8.encode(values, rows)
        found = torch.empty(300, 3).T
        INT8.decode_into(found, rows)
        assert torch.equal(found, through(INT8, values))
    assert not table[:, :4].any() and not table[:, -4:].any()


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("name", CODECS)
def test_sums_are_in_the_order_of_places(name: str, place: int) -> None:
    codec, numel = CODECS[name], 66_003
    others, own = of_many_sizes(3, numel), of_many_sizes(1, numel)[0] * 1.7
    rows = torch.empty(3, codec.encoded_bytes(numel), dtype=torch.uint8)
    codec.encode(others, rows)
    terms = list(through(codec, others))
    terms.insert(place, own)
    expected = terms[0] + terms[1] + terms[2] + terms[3]
    codec.add_up(own, rows, own, place)
    assert torch.equal(own, expected)
