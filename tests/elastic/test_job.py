"""Survivors agree on who goes on, whoever sees what when; who is not among them is fenced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from flatfsdp.elastic.job import Job
from flatfsdp.engine.watchdog.store import StoreClient
from flatfsdp.errors import FencedError, UsageError

pytestmark = pytest.mark.unit


@pytest.fixture
def job() -> Iterator[Callable[..., list[Job]]]:
    """Makes the views of all members of a job, all in this process."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: list[Job] = []

    def make(members: int, lost_after: float = 60.0, noticed: list[int] | None = None, joining: int = 0) -> list[Job]:
        notes = StoreClient(dist.TCPStore("127.0.0.1", server.port, is_master=False))
        notes.post("epoch/0/members", str([*range(members)]))
        for number in range(members + joining):

            def on_loss(number: int = number) -> None:
                if noticed is not None:
                    noticed.append(number)

            store = StoreClient(dist.TCPStore("127.0.0.1", server.port, is_master=False))
            first = range(members if number < members else 0)
            made.append(Job(store, number, first, lost_after=lost_after, on_loss=on_loss))
        return made

    yield make


def learn(jobs: list[Job]) -> None:
    for each in jobs:
        each.learn()


def together(jobs: list[Job], joining: dict[int, list[int]] | None = None) -> dict[int, dict[int, str] | Exception]:
    """`go_on` of each in a thread of its own, with its number as the offer; `joining`: those that come by each."""
    found: dict[int, dict[int, str] | Exception] = {}

    def run(each: Job) -> None:
        try:
            found[each.own] = each.go_on(f"of {each.own}", (joining or {}).get(each.own, ()))
        except Exception as error:
            found[each.own] = error

    threads = [threading.Thread(target=run, args=(each,)) for each in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == len(jobs)
    return found


def test_a_loss_reaches_all_at_once_and_survivors_go_on(job: Callable[..., list[Job]]) -> None:
    noticed: list[int] = []
    zero, one, two, three = jobs = job(4, noticed=noticed)
    one.report(2, "was killed")
    assert noticed == [1]  # the others are notified
    learn(jobs)
    assert sorted(noticed) == [0, 1, 2, 3]
    assert all(each.losses == {2} for each in jobs)
    assert zero.losses_in_words() == "rank 2, which was killed"
    found = together([zero, one, three])
    assert all(each == {0: "of 0", 1: "of 1", 3: "of 3"} for each in found.values())
    assert [(each.epoch, each.members) for each in (zero, one, three)] == [(1, (0, 1, 3))] * 3
    assert not zero.losses
    with pytest.raises(FencedError, match=r"number 2 of the job.*was killed"):
        two.check_fence()
    with pytest.raises(FencedError):
        two.go_on("late")


def test_a_second_loss_in_the_meantime_is_not_waited_for(job: Callable[..., list[Job]]) -> None:
    zero, _, two, _ = jobs = job(4)
    zero.report(3, "was killed")
    learn(jobs)
    threading.Timer(0.3, lambda: two.report(1, "has ended")).start()
    found = together([zero, two])
    assert all(each == {0: "of 0", 2: "of 2"} for each in found.values())
    zero.report(2, "failed")
    assert together([zero]) == {0: {0: "of 0"}}
    assert (zero.epoch, zero.members) == (2, (0,))


def test_who_does_not_come_counts_as_lost_after_a_time_and_is_fenced(job: Callable[..., list[Job]]) -> None:
    _, one, two = job(3, lost_after=0.6)
    one.report(0, "was killed")
    learn([one, two])
    assert together([one]) == {1: {1: "of 1"}}
    with pytest.raises(FencedError, match="did not come to the others for"):
        two.check_fence()


def test_a_lost_process_reports_no_other(job: Callable[..., list[Job]]) -> None:
    zero, one, two = job(3)
    zero.report(1, "has sent nothing for 60 s")
    one.report(0, "has ended")  # it wakes, and all its connections are closed
    learn([two])
    assert two.losses == zero.losses == {1}


def test_one_that_leaves_is_no_loss_and_one_that_is_lost_does_not_leave(job: Callable[..., list[Job]]) -> None:
    noticed: list[int] = []
    zero, one, two = jobs = job(3, noticed=noticed)
    zero.leave("after step 4")
    one.is_gone(0, "has ended: it has closed its connections")
    learn(jobs)
    assert not noticed and not one.losses and one.left == two.left == {0: "after step 4"}
    one.report(two.own, "has sent nothing for 60 s")
    two.learn()
    two.leave("after step 3")
    one.learn()
    assert one.losses == {2} and one.left == {0: "after step 4"}


def test_values_of_others(job: Callable[..., list[Job]]) -> None:
    zero, one, two = job(3)
    one.publish("address", ["10.0.0.1", 5])
    two.publish("address", None)
    assert zero.published("address") == {1: ["10.0.0.1", 5]}


def test_others_do_not_wait_for_one_that_has_left(job: Callable[..., list[Job]]) -> None:
    zero, one, two, joiner = job(3, joining=1)
    zero.leave("after step 4")
    one.is_gone(0, "closed its connection")
    assert not one.losses
    two.report(1, "was killed")
    assert together([two]) == {2: {2: "of 2"}}
    assert two.members == (2,) and two.lost == {1: "was killed", 0: "had left the loop after step 4"}
    joiner.learn()
    assert not joiner.left  # the job has not ended


def test_one_that_is_lost_and_does_not_know_ends_no_job(job: Callable[..., list[Job]]) -> None:
    zero, one = job(2)
    one.report(0, "was stopped")
    zero.leave("after step 3")
    learn([zero, one])
    assert not zero.left and not one.left


def test_a_process_that_ends_while_it_reports_leaves_no_gap(
    job: Callable[..., list[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one, two, _ = job(4)
    written: list[str] = []

    def once(does: Callable[..., Any]) -> Callable[..., Any]:
        def writes(store: StoreClient, *what: Any) -> Any:
            if written:
                raise SystemExit
            written.append(what[0])
            return does(store, *what)

        return writes

    with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
        for name in ("append", "post", "count"):
            patch.setattr(StoreClient, name, once(getattr(StoreClient, name)))
        one.report(3, "was killed")
    two.report(1, "has ended")
    zero.learn()
    assert 1 in zero.losses


def test_of_two_that_report_each_other_one_goes_on(
    job: Callable[..., list[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one, two = job(3)
    with monkeypatch.context() as patch:
        patch.setattr(one, "learn", lambda: None)  # it has read just before
        zero.report(1, "has sent nothing for 60 s")
        one.report(0, "has sent nothing for 60 s")
    learn([zero, one, two])
    assert zero.losses == one.losses == two.losses == {1}
    two.report(0, "has ended")
    zero.learn()
    assert zero.losses == {0, 1}


def test_members_bring_along_those_that_are_connected_to_them(job: Callable[..., list[Job]]) -> None:
    zero, one, two, joins, late = job(3, joining=2)
    offers: list[dict[int, str]] = []
    waiting = threading.Thread(target=lambda: offers.append(joins.join(lambda: True, 30.0)))
    waiting.start()
    zero.report(2, "was killed")
    found = together([zero, one], {0: [4], 1: [3, 4]})
    waiting.join(30)
    assert offers == [found[0]] == [found[1]] == [{0: "of 0", 1: "of 1"}]
    assert late.join(lambda: True, 30.0) == offers[0]
    assert [(each.epoch, each.members) for each in (zero, one, joins, late)] == [(1, (0, 1, 3, 4))] * 4
    assert joins.members_of(0) == (0, 1, 2) and joins.members_of(1) == (0, 1, 3, 4)
    two.learn()
    assert two.losses == {2}


def test_one_that_ends_before_it_has_joined_is_left_out(job: Callable[..., list[Job]]) -> None:
    noticed: list[int] = []
    zero, one = job(2, noticed=noticed)
    one.report(2, "has ended")
    assert together([zero, one], {1: [2]})[0] == {0: "of 0", 1: "of 1"}
    assert (zero.epoch, zero.members, noticed) == (1, (0, 1), [])


def test_one_that_is_no_member_yet_reports_its_own_loss_only(job: Callable[..., list[Job]]) -> None:
    zero, _, joins = job(2, joining=1)
    joins.catch_up()
    joins.report(1, "has ended")
    joins.report(2, "failed")
    zero.learn()
    assert zero.lost == {2: "failed"}
    with pytest.raises(FencedError, match=r"number 2 of the job.*failed"):
        joins.join(lambda: True, 30.0)


def test_one_that_waits_learns_of_the_end(job: Callable[..., list[Job]]) -> None:
    zero, joins = job(1, joining=1)
    with pytest.raises(UsageError, match="has come to no refresh for 0 s"):
        joins.join(lambda: True, 0.2)
    with pytest.raises(UsageError, match="none of its ranks can be reached"):
        joins.join(lambda: False, 30.0)
    zero.leave("after step 4")
    with pytest.raises(UsageError, match=r"the job has ended \(after step 4\)"):
        joins.join(lambda: True, 30.0)
