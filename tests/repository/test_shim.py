"""The shim over torch: every private name exists, and its absence or a newer torch is reported."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from flatfsdp import FullyShardedDataParallel, errors
from flatfsdp.engine.base import _torch
from flatfsdp.errors import FlatFSDPWarning
from tests.harness.fake import fake_world

pytestmark = pytest.mark.unit


def test_every_private_name_exists() -> None:
    absent = [f"{name}: needed because {_torch.REASONS[name]}" for name in _torch.missing()]
    assert not absent, f"torch {torch.__version__} lacks private names that flatfsdp leans on:\n" + "\n".join(absent)


def test_an_absent_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_add_")
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch.amp.GradScaler, "_unscale_grads_")
    assert _torch.missing() == [
        "torch._C._current_graph_task_id",
        "torch.amp.GradScaler._unscale_grads_",
        "torch.foreach",
    ]


def test_every_name_has_a_reason_and_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        pass

    monkeypatch.setattr(_torch, "torch", Nothing())
    assert _torch.missing() == list(_torch.REASONS)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch from the future, without a warning yet."""
    monkeypatch.setattr(torch, "__version__", "3.4.0+cpu")
    monkeypatch.setattr(errors, "_warned", set())
    with fake_world(2):
        yield


def test_a_newer_torch_is_reported_once(newer: None) -> None:
    with pytest.warns(FlatFSDPWarning) as caught:
        FullyShardedDataParallel(nn.Linear(2, 2))
        FullyShardedDataParallel(nn.Linear(2, 2))
    (one,) = caught
    newest = ".".join(map(str, _torch.TESTED[-1]))
    assert_expected_inline(
        str(one.message).replace(newest, "NEWEST"),
        """\
torch 3.4.0+cpu is newer than NEWEST, the newest version that this release of flatfsdp has been tested with; it still \
has all the private names that flatfsdp uses""",
    )


def test_a_newer_torch_without_a_name(newer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_add_")
    sentence = _torch.untested()
    assert sentence is not None and sentence.endswith("; it lacks torch.foreach")


def test_a_tested_torch_is_not_reported() -> None:
    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        FullyShardedDataParallel(nn.Linear(2, 2))


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cu130", "2.12.0a0+git1234"])
def test_tested_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert _torch.untested() is None
