"""Whether this process shares memory with others on its host, as the user chooses."""

from __future__ import annotations

import pytest

import flatfsdp
from flatfsdp import env
from flatfsdp.engine.comm.shared_memory.groups import would_share
from flatfsdp.errors import ConfigTypeError


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


def test_a_choice_is_a_bool() -> None:
    with pytest.raises(ConfigTypeError, match="share_host_memory: enabled"):
        flatfsdp.share_host_memory(1)
    with pytest.raises(ConfigTypeError, match="share_host_memory: early_waits"):
        flatfsdp.share_host_memory(False, early_waits=0)
    assert would_share(Pair()) == (flatfsdp.share_host_memory(None) == "")  # what is refused changes nothing
