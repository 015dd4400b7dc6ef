"""Values that travel between ranks without a pickle."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from collections import Counter, OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from flatfsdp.checkpoint.manifest import SavedFile
from flatfsdp.engine.base.plain_data import bytes_of, decode, encode
from flatfsdp.engine.base.processes import ProcessIdentity
from flatfsdp.errors import UsageError
from tests.harness.thorough import seeds

pytestmark = pytest.mark.unit

LEAVES: tuple[Any, ...] = (
    None, True, 0, -1, 2**80, 1.5, float("inf"), "", "text \n\x00 \U0001f600", b"", b"\x00\xff" * 9, torch.bfloat16,
    torch.device("cuda", 3), Path("a/b"), SavedFile("name", 1, 2), ProcessIdentity("host", "", 1, "now"),
    Counter({3: 1}), 1 + 2j, torch.Size((1, 2)),
)  # fmt: skip


def drawn_value(drawn: random.Random, depth: int = 3) -> Any:
    if not depth or drawn.random() < 0.3:
        return drawn.choice(LEAVES)
    inside = [drawn_value(drawn, depth - 1) for _ in range(drawn.randrange(4))]
    made = drawn.choice((list, tuple, dict, OrderedDict, set, frozenset))
    if made in (list, tuple):
        return made(inside)
    keys = [drawn.choice(("dict", "tuple", 1, None, (1, "a"), torch.float32, "Tensor", "pickle")) for _ in inside]
    return made(zip(keys, inside, strict=True)) if made in (dict, OrderedDict) else made(keys)


def types_in(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(types_in(key), types_in(each)) for key, each in value.items()]
    if type(value) in (list, tuple):
        return type(value), [types_in(each) for each in value]
    return type(value)


@pytest.mark.parametrize("seed", seeds(50, 5000))
def test_a_value_arrives_as_it_was(seed: int) -> None:
    value = drawn_value(random.Random(seed))
    found = decode(encode(value))
    assert found == value
    assert types_in(found) == types_in(value)  # 1 == 1.0, and a tuple equals a named one


def test_tensors_arrive_bit_for_bit() -> None:
    sent = [torch.randn(3, 5)[:, ::2], torch.tensor(float("nan")), torch.empty(0, 4), torch.arange(3, dtype=torch.int8)]
    sent += [torch.randn(7).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64)]
    found = decode(memoryview(encode({"tensors": sent, "bools": torch.tensor([True, False])})))
    for one, other in zip(sent, found["tensors"], strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        raw = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        assert torch.equal(*raw)
    found["tensors"][0].add_(1)  # it is there to be used


def test_bytes_keep_their_tensor() -> None:
    tensor = torch.arange(4, dtype=torch.uint8)
    owner, view = weakref.ref(tensor), bytes_of(tensor)
    del tensor
    gc.collect()
    assert bytes(view) == bytes(range(4)) and owner() is not None
    del view
    assert owner() is None


def test_objects_travel_only_where_they_are_expected() -> None:
    value = {"state": [Fraction(1, 3)]}
    with pytest.raises(UsageError, match=r"a fractions\.Fraction cannot be sent to other ranks here. Only plain data"):
        encode(value)
    assert decode(encode(value, objects=True), objects=True) == value
    with pytest.raises(ValueError, match="a pickle where plain data was expected"):
        decode(encode(value, objects=True))
    with pytest.raises(UsageError, match="cannot be sent to other ranks, not even as a pickle"):
        encode(lambda: 0, objects=True)


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code of another rank runs')",)


@pytest.mark.parametrize(
    "header",
    [
        '{"os:system": ["true"]}',
        '{"flatfsdp.plain_data:sys.modules": []}',
        '{"flatfsdp.plain_data:encode": [1]}',
        '{"flatfsdp.plain_data:Path.home": []}',
        '{"flatfsdp.absent:Thing": []}',
        '{"Tensor": ["load", [1], 0, 4]}',
        '{"Tensor": ["float32", [4], 0, 4]}',
        '{"Tensor": ["float32", [1], 999, 4]}',
        '{"dtype": "manual_seed"}',
        '{"dict": [[[], 1]]}',
        '{"tuple": [1], "list": [2]}',
        "[" * 100_000,
        "no json",
    ],
)
def test_what_nobody_sends_is_refused(header: str) -> None:
    with pytest.raises(ValueError):
        decode(len(header).to_bytes(8, "little") + header.encode() + bytes(64))


def test_a_pickle_is_not_read() -> None:
    for data in (pickle.dumps(Bomb()), b"", b"\xff" * 40):
        with pytest.raises(ValueError):
            decode(data)
