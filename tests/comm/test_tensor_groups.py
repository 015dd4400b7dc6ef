"""Groups of tensors that are known by which list they are."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from flatfsdp.engine.comm.tensor_groups import TensorGroup

pytestmark = pytest.mark.unit


def group(*values: float) -> TensorGroup:
    return TensorGroup([torch.tensor([value]) for value in values])


def test_the_same_groups_are_joined_once() -> None:
    one, two, three = group(1, 2), group(3), group(4)
    joined = TensorGroup.join([one, two])
    assert [float(each) for each in joined] == [1, 2, 3] and all(
        a is b for a, b in zip(joined, [*one, *two], strict=True)
    )
    assert TensorGroup.join([one, two]) is joined
    assert [float(each) for each in TensorGroup.join([one, three])] == [1, 2, 4]
    assert [float(each) for each in TensorGroup.join([one, two, three])] == [1, 2, 3, 4]
    assert [float(each) for each in TensorGroup.join([two, one])] == [3, 1, 2]


def test_a_single_group_is_itself() -> None:
    one = group(1)
    assert TensorGroup.join([one]) is one


def test_what_was_joined_goes_with_the_first_of_them() -> None:
    gc.disable()
    try:
        one, two = group(1), group(2)
        joined = weakref.ref(TensorGroup.join([one, two]))
        assert joined() is not None
        del one
        assert joined() is None
    finally:
        gc.enable()
