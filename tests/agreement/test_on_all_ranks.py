"""Work and failures that all ranks share, with given answers of the other ranks."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from flatfsdp.engine.agreement.object_collectives import on_all_ranks
from flatfsdp.engine.base.plain_data import encode
from flatfsdp.errors import AgreementError, CheckpointError, by_ranks

pytestmark = pytest.mark.unit


def together(failed: Mapping[int, str], own: Exception | None) -> CheckpointError:
    return CheckpointError(by_ranks(failed, ": "))


def with_others(*others: tuple[Any, str | None]) -> Callable[[bytes], dict[int, bytes]]:
    """An exchange of this rank, 0, with ranks that have these values, or failed with these messages."""
    return lambda content: {0: content, **{rank + 1: encode(each) for rank, each in enumerate(others)}}


def fails(error: Exception) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


def test_all_have_what_each_returned() -> None:
    assert on_all_ranks(lambda: [3], with_others(([4], None), ([3], None)), raises=together) == {0: [3], 1: [4], 2: [3]}


def test_alone_a_value_is_what_was_returned_whatever_it_is() -> None:
    made = object()
    assert on_all_ranks(lambda: made, None, raises=together)[0] is made


def test_others_failures_are_raised_here() -> None:
    with pytest.raises(CheckpointError, match=r"^ranks 1, 2: no space$"):
        on_all_ranks(lambda: 3, with_others((None, "no space"), (None, "no space")), raises=together)


@pytest.mark.parametrize(("error", "cause"), [(OSError("full"), OSError), (CheckpointError("full"), type(None))])
def test_this_ranks_failure_is_reported_and_the_cause(error: Exception, cause: type) -> None:
    words = "full" if isinstance(error, CheckpointError) else "OSError: full"
    with pytest.raises(CheckpointError, match=f"^rank 0: {words}; rank 1: lost$") as raised:
        on_all_ranks(fails(error), with_others((None, "lost")), raises=together)
    assert isinstance(raised.value.__cause__, cause)


def test_what_cannot_be_sent_fails_on_all() -> None:
    with pytest.raises(CheckpointError, match=r"^rank 0: "):
        on_all_ranks(object, with_others((3, None)), raises=together)


def test_an_exchange_that_fails_is_raised_from_this_ranks_failure() -> None:
    def exchange(content: bytes) -> dict[int, bytes]:
        raise AgreementError("rank 1 has ended")

    with pytest.raises(AgreementError, match="rank 1 has ended") as raised:
        on_all_ranks(fails(OSError("full")), exchange, raises=together)
    assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(AgreementError) as raised:
        on_all_ranks(lambda: 3, exchange, raises=together)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("own", [True, False])
def test_nothing_is_held_once_a_failure_has_been_caught(own: bool) -> None:
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError, CheckpointError):
            on_all_ranks(
                lambda held=held: 1 / 0,
                with_others((3, None)),
                raises=(lambda failed, error: error or AssertionError()) if own else together,
            )
        del held
        assert gone() is None
    finally:
        gc.enable()
