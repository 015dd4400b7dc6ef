"""Private names of torch.distributed.tensor: they exist, one that is absent is named, and nothing imports them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.engine.base import _dtensor
from flatfsdp.engine.dtensor.specs import require_dtensors
from flatfsdp.errors import UsageError


def test_every_private_name_exists() -> None:
    assert _dtensor.missing() == []


def test_an_older_torch_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DeviceMesh, "_concatenate")
    with pytest.raises(
        UsageError, match=r"need torch 2\.13 or newer: .* lacks torch\.distributed\.device_mesh\.Device"
    ):
        require_dtensors()


def test_flatfsdp_does_not_import_dtensors() -> None:
    program = "import sys, flatfsdp; sys.exit('torch.distributed.tensor' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
