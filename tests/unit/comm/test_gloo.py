"""Waiting for messages, without a backend."""

from __future__ import annotations

import pytest

from flatfsdp.engine.comm import gloo
from flatfsdp.engine.comm.gloo import FIRST_TAG, TAGS, PeerConnection, PeerMessages


class Group:
    """Stands for a process group."""

    def __init__(self, ranks: int = 2) -> None:
        self._ranks = ranks

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._ranks


class Message:
    """A message that fails `failures` times before it completes."""

    def __init__(self, log: list[str], name: str, failures: int = 0) -> None:
        self._log, self._name, self._failures = log, name, failures

    def wait(self) -> None:
        self._log.append(self._name)
        if self._failures:
            self._failures -= 1
            raise RuntimeError("gloo: connection closed")


def test_messages_are_waited_for_once_each_and_the_last_one_first() -> None:
    log: list[str] = []
    messages = PeerMessages([Message(log, name) for name in ("sent", "received", "end")], PeerConnection(Group()))
    messages.wait()
    messages.wait()
    assert log == ["end", "received", "sent"]


def test_what_failed_is_kept_and_can_be_waited_for_again() -> None:
    log: list[str] = []
    line = PeerConnection(Group())
    messages = PeerMessages([Message(log, "sent"), Message(log, "received", failures=2)], line)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection closed"):
            messages.wait()
        assert line.under_way == {messages}
    messages.wait()
    assert not line.under_way
    assert log == ["received"] * 3 + ["sent"]


def test_tags_are_out_of_the_way_and_do_not_run_out() -> None:
    line = PeerConnection(Group())
    tags = [line.tag() for _ in range(TAGS + 3)]
    assert min(tags) == FIRST_TAG == 2**30
    assert max(tags) < 2**31  # gloo's largest
    assert len(set(tags[:TAGS])) == TAGS
    assert tags[TAGS:] == tags[:3]


@pytest.mark.parametrize(("ranks", "one_host", "near"), [(2, True, True), (8, True, True), (8, False, False)])
def test_messages_are_for_few_ranks_on_one_host(
    ranks: int, one_host: bool, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "_on_one_host", lambda group: one_host)
    assert gloo.is_near(Group(ranks)) is near


def test_many_ranks_send_nothing_to_find_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gloo, "_on_one_host")
    assert not gloo.is_near(Group(9))
