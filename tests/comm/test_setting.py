"""Whether this process shares memory with others on its host, as the user chooses."""

from __future__ import annotations

import logging
import os
import platform
import sys
from typing import Any
from unittest.mock import patch

import pytest

import flatfsdp
from flatfsdp import env
from flatfsdp.engine.cpu import groups
from flatfsdp.engine.cpu.groups import of_group, would_share
from flatfsdp.errors import ConfigTypeError

pytestmark = pytest.mark.unit


class Pair:
    def size(self) -> int:
        return 2


def test_a_choice_stays_until_another_one() -> None:
    able = flatfsdp.share_host_memory(None) == ""
    try:
        assert would_share(Pair()) == able
        flatfsdp.share_host_memory(False)
        assert not would_share(Pair())
        assert f"shared memory: {'yes' if able else 'no: '}" in env.describe()  # which changes nothing
        assert not would_share(Pair())
    finally:
        flatfsdp.share_host_memory()
    assert would_share(Pair()) == able


class Nine:
    """A process group that is too large to share memory, and whose collectives are not there."""

    group_name = "nine"

    def size(self) -> int:
        return 9


def test_a_group_of_more_ranks_has_its_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_reasons", {})
    why, group = "it has 9 ranks, and at most 8 can share memory", Nine()
    with caplog.at_level(logging.DEBUG, logger="flatfsdp"):
        assert [of_group(group) for _ in range(2)] == [None, None]
    assert caplog.messages == [f"process group nine does not share memory: {why}"]
    if would_share(Pair()):
        assert f"\nshared memory: no: in process group nine: {why}\n" in env.describe()


def test_a_choice_is_a_bool() -> None:
    with pytest.raises(ConfigTypeError, match="share_host_memory: enabled"):
        flatfsdp.share_host_memory(1)
    with pytest.raises(ConfigTypeError, match="share_host_memory: early_waits"):
        flatfsdp.share_host_memory(False, early_waits=0)
    assert would_share(Pair()) == (flatfsdp.share_host_memory(None) == "")  # a refused setting changes nothing


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        (platform, "machine", lambda: "aarch64", "it needs an x86-64 processor, but this is aarch64"),
        (sys, "platform", "darwin", "it needs Linux, but this is darwin"),
    ],
)
def test_other_processors_and_systems_leave_everything_to_gloo(owner: Any, name: str, value: Any, reason: str) -> None:
    """Processors that make stores visible in another order than x86-64's among them."""
    with patch.object(owner, name, value):
        assert flatfsdp.share_host_memory(None) == reason
        assert not would_share(Pair())


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("memfd_create", PermissionError(1, "Operation not permitted")),
        ("posix_fallocate", OSError(28, "No space left")),
    ],
)
def test_a_bug_report_has_why_memory_cannot_be_shared(function: str, error: OSError) -> None:
    """As in a container without the right, or without the memory."""
    with patch.object(os, function, side_effect=error):
        assert (f"\nshared memory: no: this system does not provide shared memory: {error}\n") in env.describe()
