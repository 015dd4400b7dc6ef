"""The contents of checkpoints, without files or ranks: nested states, plain values, plans, boxes of bounded size."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch

from flatfsdp.checkpoint.intervals import cut, filling
from flatfsdp.checkpoint.manifest import Manifest, SavedFile, SavedTensor
from flatfsdp.checkpoint.nested_state import decode, encode, flatten, unflatten
from flatfsdp.checkpoint.plan import PlannedInterval, assign
from flatfsdp.checkpoint.writing import archive
from flatfsdp.engine.base.plain_data import bytes_of
from flatfsdp.engine.layout.layout import ParamSpec, Span
from flatfsdp.errors import CheckpointError, ConfigTypeError, ConfigValueError
from tools.checkpoint_scale import measure

pytestmark = pytest.mark.unit

VALUES = [
    None,
    True,
    3,
    0.1,
    math.inf,
    "text",
    [1, [2.5, "x"]],
    (0.9, 0.999),
    {"a": (1,), 3: [None], (1, 2): {}},
    Counter({30: 1, 80: 2}),
    OrderedDict(b=1, a=2),
    b"\x00\xff",
    1 + 2j,
    torch.bfloat16,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value, "it"))))
    assert back == value and type(back) is type(value)


def test_what_only_a_pickle_could_hold_is_refused_by_its_place() -> None:
    with pytest.raises(ConfigTypeError, match=r"^it\['hooks'\]\[1\]: got a value of type builtin_function_or_method"):
        encode({"hooks": [1, print]}, "it")


def test_a_state_comes_back_from_its_leaves_in_any_order() -> None:
    tensor = torch.ones(2)
    state = {
        "model": {"a.b": tensor, "c": {}},
        "list": [{"x": 1}, {"x": tensor}, 3],
        "plain": [1, 2],
        5: {7: "seven"},
        "tuple": (1, tensor),
    }
    leaves, paths = flatten(state)
    assert leaves["model.a.b"] is tensor and leaves["plain"] == [1, 2] and leaves["list.1.x"] is tensor
    back = unflatten(dict(reversed(leaves.items())), paths)
    assert back == state | {"tuple": [1, tensor]}


def test_keys_that_cannot_be_distinguished_are_refused() -> None:
    with pytest.raises(ConfigValueError, match=r"two values have the key 'a\.b'"):
        flatten({"a": {"b": 1}, "a.b": 2})
    with pytest.raises(ConfigTypeError, match=r"a: got the key \(1, 2\)\. Accepted: strings and integers"):
        flatten({"a": {(1, 2): torch.ones(1)}})


def held(start: int, stop: int, *, dtype: str = "float32") -> PlannedInterval:
    return PlannedInterval("w", ("w",), dtype, (10,), None, start, stop, 4 * (stop - start))


def test_each_interval_is_written_once_and_replicas_share_the_work() -> None:
    other = held(0, 10)._replace(key="v", path=("v",))
    plans = [[held(0, 5), other], [held(5, 10), other], [held(0, 5), other], [held(5, 10), other]]
    assert assign(plans, [0] * 4) == [[held(0, 5)], [held(5, 10)], [other], []]
    assert assign(plans, [0, 0, 2, 2]) == [[held(0, 5), other], [held(5, 10)]] * 2  # two nodes with disks of their own


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([[held(0, 5)], [held(6, 10)]], r"elements \[5, 6\) are held by no rank"),
        ([[held(0, 5)]], r"elements \[5, 10\) are held by no rank"),
        ([[held(0, 6)], [held(5, 10)]], r"elements \[5, 6\) are held twice, in different intervals"),
        (
            [[held(0, 5)], [held(5, 10, dtype="int64")]],
            r"'w' is float32 \(10,\) on rank 0, but int64 \(10,\) on rank 1; every",
        ),
    ],
)
def test_plans_that_do_not_make_a_whole_are_refused(plans: list[list[PlannedInterval]], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        assign(plans, [0] * len(plans))


@pytest.mark.parametrize(
    "spec", [ParamSpec("p", (3, 4, 5)), ParamSpec("p", (2, 3, 4, 5), (60, 1, 15, 3)), ParamSpec("p", (7,))]
)
@pytest.mark.parametrize("most", [1, 4, 7, 100])
def test_boxes_are_cut_to_size_and_stay_in_order(spec: ParamSpec, most: int) -> None:
    for start in range(spec.numel):
        for stop in range(start, spec.numel + 1, 3):
            boxes = list(cut(spec, Span(start, stop), most))
            assert all(math.prod(box.sizes) == box.span.numel <= most for box in boxes)
            ends = [start, *(box.span.stop for box in boxes)]
            assert [box.span.start for box in boxes] == ends[:-1] and ends[-1] == max(start, stop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 1001)])
def test_elements_lie_in_an_archive_where_it_records_them(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).to(dtype).view(shape)
    data, inside = archive(tensor)
    raw = data[inside : inside + tensor.numel() * tensor.element_size()]
    assert raw == bytes(bytes_of(tensor))


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(torch.zeros(2, 3), id="row-major"),
        pytest.param(torch.zeros(3, 2).t(), id="transposed"),
        pytest.param(torch.zeros(2, 3, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(torch.zeros(2, 6)[:, ::2], id="strided"),
    ],
)
def test_a_whole_tensor_is_filled_whatever_its_memory(target: torch.Tensor) -> None:
    written = torch.arange(6).to(target.dtype) + (1j if target.is_complex() else 0)
    with filling("w", target) as (interval,):
        bytes_of(interval.local)[:] = bytes_of(written)
    assert torch.equal(target.resolve_conj(), written.view(2, 3))


def test_a_manifest_finds_its_own_damage() -> None:
    saved = SavedTensor(("m", "w"), "float32", (4, 2), (1, 4), [[0, 0, 3, 64, 1, 128], [1, 4, 4, 0]])
    manifest = Manifest(2, [SavedFile("a", 7, 5)], {"m.w": saved}, {"x": (("x", (0,)), {"tuple": [1]})}, {"loss": 0.5})
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data, "it") == manifest
    assert [(c.file, c.start, c.stop, c.offset) for c in saved.chunks()] == [
        (0, 0, 3, 64),
        (0, 3, 4, 128),
        (1, 4, 8, 0),
    ]
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 4
        with pytest.raises(CheckpointError, match=r"^it is damaged"):
            Manifest.from_bytes(bytes(damaged), "it")
    with pytest.raises(CheckpointError, match=r"^it is damaged"):
        Manifest.from_bytes(data[:-10], "it")


def test_what_a_checkpoint_records_of_itself_stays_small() -> None:
    found = measure(world=256, layers=2)
    # A 70B model with Adam at 1024 ranks has 748,173 boxes (tools/checkpoint_scale.py); 64 MiB are 89 bytes for each.
    assert found["boxes"] > 4000 and (found["metadata"] + found["manifest"]) / found["boxes"] < 89
