"""Copies of state for saves in the background, on a device that finds races."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flatfsdp import checkpoint
from flatfsdp.checkpoint import background
from flatfsdp.checkpoint.host_copies import HostCopies
from tests.harness.fake_device import FakeDevice

pytestmark = pytest.mark.single_process


def test_the_host_waits_once_and_memory_is_kept() -> None:
    host, tensors = HostCopies(), [torch.randn(4), torch.randn(4), torch.randn(2, 3)]
    with FakeDevice() as device:
        first = host.of(tensors)
        assert device.host_waits == ["compute"]
        with device.by_host():
            assert all(map(torch.equal, first, tensors))
        places = {each.data_ptr() for each in first}
        again = host.of([tensor + 1 for tensor in tensors])
        assert {each.data_ptr() for each in again} == places
    assert device.races == []


def test_a_save_overwrites_none_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = background.save_contents

    def slowly(*args: Any) -> None:
        time.sleep(0.2)
        save(*args)

    monkeypatch.setattr(background, "save_contents", slowly)
    with FakeDevice():
        savings = [checkpoint.async_save(tmp_path / f"{step}", model={"x": torch.full((8,), step)}) for step in (1, 2)]
        for saving in savings:
            saving.result()
    for step in (1, 2):
        state = {"x": torch.zeros(8, dtype=torch.int64)}
        checkpoint.load(tmp_path / f"{step}", model=state)
        assert state["x"].tolist() == [step] * 8
