"""Private names of torch.distributed.tensor: they exist, and one that is absent is named."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.engine.base import _dtensor
from flatfsdp.engine.dtensor.specs import require_dtensors
from flatfsdp.errors import UsageError

pytestmark = pytest.mark.unit


def test_every_private_name_exists() -> None:
    assert _dtensor.missing() == []


def test_an_older_torch_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DeviceMesh, "_concatenate")
    with pytest.raises(
        UsageError, match=r"need torch 2\.13 or newer: .* lacks torch\.distributed\.device_mesh\.Device"
    ):
        require_dtensors()


@pytest.mark.parametrize(
    ("kind", "backends", "by_host"),
    [
        ("cpu", ["gloo"], False),
        ("cuda", ["gloo"], True),
        ("cuda", ["gloo", "gloo"], True),
        ("cuda", ["nccl"], False),
        ("cuda", ["cpu:gloo,cuda:nccl"], False),
        ("cuda", ["gloo", "nccl"], False),
    ],
)
def test_what_gloo_gathers_of_an_accelerator_goes_by_the_host(
    kind: str, backends: list[str], by_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: group)
    device, mesh = torch.device(kind), Mock(get_all_groups=lambda: backends)
    value = Mock(_local_tensor=Mock(device=device), device_mesh=mesh)
    _dtensor.whole_of(value)
    assert (value.cpu.call_count, value.full_tensor.call_count) == (by_host, not by_host)
    source = value.cpu() if by_host else value
    source.full_tensor().to.assert_called_once_with(device)


class FewOperations(torch.Tensor):
    """As torchao's float8: an operation that it does not know is an error."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_of_tensors_that_know_few_operations_none_is_asked_for() -> None:
    local = torch.Tensor._make_wrapper_subclass(FewOperations, (2,), dtype=torch.float64)
    found = _dtensor.nothing_like(local)
    assert type(found) is torch.Tensor and found.dtype == torch.float64 and not found.numel()
