"""The cost of lists of tensors on an accelerator: one kernel for all copies made together, not one for each tensor."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatfsdp.engine.comm.axes import Axis
from flatfsdp.engine.device.memory import MemoryTracker
from flatfsdp.engine.transports import staged
from flatfsdp.engine.transports.staged import SMALL, TensorList

pytestmark = pytest.mark.unit

WORLD, RANK = 4, 2
SIZES = (5, SMALL // 2, 3, 0, SMALL // 2, 7)  # elements of a piece: four small tensors, two large ones
COPIES = {"copy_", "_foreach_copy_", "cat", "split_with_sizes_copy"}


class Copies(TorchDispatchMode):
    """Counts the calls that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name.split("::")[1]) in COPIES:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def random(numel: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(numel).to(dtype)


def list_of(tensors: list[Tensor]) -> TensorList:
    axis = Axis(None, tuple(range(WORLD)), RANK, "any")
    return TensorList(tensors, axis, MemoryTracker(), fewest=2, forget=lambda gone: None)


@pytest.fixture(params=[False, True], ids=["host", "accelerator"])
def ordered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether lists are served as an accelerator's are."""
    monkeypatch.setattr(staged, "is_ordered", lambda target: request.param)
    return bool(request.param)


def test_a_gather_casts_and_packs_with_one_call_and_unpacks_with_another(ordered: bool) -> None:
    shards = [[random(size, torch.float32) for size in SIZES] for _ in range(WORLD)]
    outputs = [random(WORLD * size) for size in SIZES]
    listed = list_of(outputs)
    listed.to_gather(shards[RANK])
    listed.finish_gather()  # from now on all is planned
    with Copies() as copies:
        filled, sources = listed.to_gather(shards[RANK])
    assert copies.calls == {"_foreach_copy_": 1}
    others = [[shards[rank][1], shards[rank][4], None] for rank in range(WORLD)]
    for rank, own in enumerate(others):
        own[2] = torch.cat([shards[rank][index] for index in (0, 2, 3, 5)])
    for number, (whole, source) in enumerate(zip(filled, sources, strict=True)):
        assert torch.equal(source, others[RANK][number].bfloat16())  # type: ignore[union-attr]
        whole.copy_(torch.cat([own[number] for own in others]))  # type: ignore[misc]
    with Copies() as copies:
        listed.finish_gather()
    assert copies.calls == {"split_with_sizes_copy" if ordered else "_foreach_copy_": 1}
    for output, each in zip(outputs, zip(*shards, strict=True), strict=True):
        assert torch.equal(output, torch.cat(each).bfloat16())


def test_shards_of_each_dtype_are_copied_with_one_call(ordered: bool) -> None:
    dtypes = [torch.float32, torch.float64] * 3
    listed = list_of([random(WORLD * size) for size in SIZES])
    shards = [random(size, dtype) for size, dtype in zip(SIZES, dtypes, strict=True)]
    listed.to_gather(shards)
    listed.finish_gather()
    with Copies() as copies:
        listed.to_gather(shards)
    assert copies.calls == {"_foreach_copy_": 2}


def test_what_needs_neither_a_cast_nor_staging_is_not_copied(ordered: bool) -> None:
    listed = list_of([random(WORLD * size) for size in (SMALL, SMALL)])
    shards = [random(SMALL), random(SMALL)]
    with Copies() as copies:
        _, sources = listed.to_gather(shards)
        listed.finish_gather()
    assert not copies.calls and all(a is b for a, b in zip(sources, shards, strict=True))


def test_a_reduction_packs_with_one_call_and_unpacks_with_another(ordered: bool) -> None:
    fulls = [random(WORLD * size) for size in SIZES]
    output = torch.zeros(sum(SIZES), dtype=torch.bfloat16)
    listed = list_of(fulls)
    listed.to_reduce(output)
    listed.finish_reduction(output)
    with Copies() as copies:
        outputs, packed = listed.to_reduce(output)
    assert copies.calls == {"cat": 1}
    small = torch.cat([fulls[index].view(WORLD, -1) for index in (0, 2, 3, 5)], dim=1)
    assert torch.equal(packed[-1].view(WORLD, -1), small)
    for total, full in zip(outputs, packed, strict=True):
        total.copy_(full.view(WORLD, -1)[RANK])
    with Copies() as copies:
        listed.finish_reduction(output)
    assert copies.calls == {"_foreach_copy_": 1}
    assert torch.equal(output, torch.cat([full.view(WORLD, -1)[RANK] for full in fulls]))
