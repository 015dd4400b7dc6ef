"""Ranks that fail, die, sleep or stay away: every rank ends within seconds, with an error that names the rank at fault.

Ranks that build different models, or run them in another order, are in
`tests/agreement/test_agreement.py` and `tests/agreement/test_ranks_that_part.py`;
one that is killed in the middle of a checkpoint is in `test_killed.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import flatfsdp
from flatfsdp.engine.watchdog import watchdog as watch
from tests.agreement.test_agreement import Net, step, wrap
from tests.harness import fresh, inspect
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.process

LIMIT = 120.0  # seconds for all ranks to end once they have started; on idle cores it takes 5 to 15


def trained() -> Any:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrap(Net())
    step(model)
    step(model)
    return model


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrong_dtype(rank: int, world: int) -> None:
    model = trained()
    for _ in range(3):
        model(torch.ones(2, 4, dtype=torch.float64 if rank == 1 else torch.float32)).sum().backward()


def exception_in_backward(rank: int, world: int) -> None:
    model = trained()

    def refuse(grad: torch.Tensor) -> None:
        if rank == 1:
            raise ValueError("bad gradient")

    model.module.blocks[1].linear.weight.register_hook(refuse)
    step(model)


def killed_in_forward(rank: int, world: int) -> None:
    model = trained()
    if rank == 1:
        model.module.blocks[1].register_forward_pre_hook(lambda *unused: killed())
    step(model)


def killed_in_backward(rank: int, world: int) -> None:
    model = trained()
    if rank == 1:
        model.module.blocks[0].register_full_backward_pre_hook(lambda *unused: killed())
    step(model)


def killed_before_a_state_dict(rank: int, world: int) -> None:
    model = trained()
    if rank == 1:
        killed()
    model.state_dict()


def served_by_the_last(rank: int, world: int) -> dist.TCPStore:
    """A process group in which the last process is rank 0, and serves the store; the launcher's store."""
    launcher = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == world - 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        launcher.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(launcher.get("port")), is_master=False)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    dist.init_process_group("gloo", store=store, rank=world - 1 - rank, world_size=world)
    torch.manual_seed(0)
    return launcher


def killed_with_the_store(rank: int, world: int) -> None:
    served_by_the_last(rank, world)
    model = wrap(Net())
    step(model)
    if rank == 1:
        killed()
    step(model)


def frozen_until_gone(pids: list[int]) -> None:
    """Stop this process; another one ends it when those of `pids` are gone, or after `LIMIT`."""
    this = os.getpid()
    if os.fork() == 0:
        deadline = time.monotonic() + LIMIT
        while any(map(is_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(this, signal.SIGKILL)
        os._exit(0)
    os.kill(this, signal.SIGSTOP)


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


def frozen_with_the_store(rank: int, world: int) -> None:
    """One waits in a collective, one has to leave a note in the store."""
    launcher = served_by_the_last(rank, world)
    launcher.set(f"pid of {rank}", str(os.getpid()))
    flatfsdp.set_collective_timeout(report_after=2, raise_after=5)
    model = wrap(Net())
    step(model)
    if rank == world - 1:
        frozen_until_gone([int(launcher.get(f"pid of {each}")) for each in range(world - 1)])
    if rank == 0:
        time.sleep(1)
        model.state_dict()
    step(model)


def one_batch_fewer(rank: int, world: int) -> None:
    model = trained()
    for _ in range(3 - (rank == 1)):
        step(model)


def sleep_until(ready: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT / 2
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.1)


def asleep(rank: int, world: int) -> None:
    texts: list[str] = []
    print_now = watch.print_immediately

    def post_and_note(sentence: str) -> None:
        print_now(sentence)
        texts.append(sentence)

    with patch.object(watch, "print_immediately", post_and_note):
        flatfsdp.set_collective_timeout(report_after=2)
        model = trained()
        if rank == 1:
            sleep_until(lambda: texts)
        step(model)
        flatfsdp.set_collective_timeout(report_after=2, raise_after=4)
        if rank == 1:
            sleep_until(inspect.verdict_of(model))
        step(model)


def slower_than_the_group(rank: int, world: int) -> None:
    """No limit was chosen, and a rank is later than torch allows."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    torch.manual_seed(0)
    model = wrap(Net())
    step(model)
    if rank == 1:
        sleep_until(inspect.verdict_of(model))
    step(model)


def never_together(rank: int, world: int) -> list[tuple[str, str]]:
    """The errors of torch before there is a process group; flatfsdp is not involved yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    texts = []
    for where, size in (("env://", world + 1), (nobody, world)):
        try:
            dist.init_process_group("gloo", where, rank=rank, world_size=size, timeout=timedelta(seconds=2))
        except dist.DistError as error:
            texts.append((type(error).__name__, str(error)))
    return texts


def ended(outcomes: list[fresh.Outcome]) -> list[fresh.Outcome]:
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code is not None, f"rank {rank} still ran: {outcome}"
    return outcomes


def job(case: Callable[..., Any], world: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.ranks(world, case, timeout=LIMIT)


PLACE = r"the forward of unit 'blocks.0'"


# By name: the case, of how many ranks, how rank 1 ends, and the reports of the others.
LOST: dict[str, tuple[Callable[[int, int], None], int, int, str]] = {
    "wrong_dtype": (
        wrong_dtype,
        3,
        1,
        rf"rank 1 (abandoned its iteration in {PLACE} after|ended with) RuntimeError: mat1 and mat2 must have the same "
        "dtype",
    ),
    "exception_in_backward": (
        exception_in_backward,
        2,
        1,
        "rank 1 (abandoned its iteration in a backward|ended with ValueError: bad gradient, after a backward)",
    ),
    "killed_in_forward": (
        killed_in_forward,
        3,
        -signal.SIGKILL,
        r"rank 1 was killed, or crashed: process \d+ on \S+ (does not answer|is gone)",
    ),
    "killed_in_backward": (
        killed_in_backward,
        2,
        -signal.SIGKILL,
        r"rank 1 was killed, or crashed: process \d+ on \S+ (does not answer|is gone)",
    ),
    "killed_before_a_state_dict": (
        killed_before_a_state_dict,
        2,
        -signal.SIGKILL,
        r"rank 1 was killed, or crashed: process \d+ on \S+ (does not answer|is gone)",
    ),
    "killed_with_the_store": (
        killed_with_the_store,
        2,
        -signal.SIGKILL,
        r"the store of the process group at \S+ is gone, and the process that served it: rank 0, which serves it "
        "unless a launcher does, has ended",
    ),
    "one_batch_fewer": (
        one_batch_fewer,
        2,
        0,
        r"rank 1 exited normally.*\. It ran \d+ steps? of the model, and rank 0 is in step \d+: rank 1 skipped a batch "
        r"\(as by `continue` before its forward\), or its data ended earlier\..* The remaining ranks cannot continue\. "
        r"Where ranks have different numbers of batches, take the steps inside `with flatfsdp.join\(model\)",
    ),
}


def over_gloo(case: Callable[[int, int], Any], rank: int, world: int) -> None:
    """The same where ranks share no memory."""
    flatfsdp.share_host_memory(False)
    case(rank, world)


def lost(*, gloo: bool) -> list[Any]:
    return [
        pytest.param(
            code, text, marks=job(partial(over_gloo, case) if gloo else case, world), id=f"{name}{' by gloo' * gloo}"
        )
        for name, (case, world, code, text) in LOST.items()
    ]


def by_both_ways(case: Callable[[int, int], Any], world: int = 2) -> pytest.MarkDecorator:
    """Through shared memory, and with --thorough over gloo, too."""
    ways = [pytest.param("shared memory", marks=job(case, world))]
    if is_thorough():
        ways.append(pytest.param("gloo", marks=job(partial(over_gloo, case), world)))
    return pytest.mark.parametrize("way", ways)


# By default gloo has its own in `test_exchange.py`.
@pytest.mark.parametrize(("exit_code", "text"), [*lost(gloo=False), *(lost(gloo=True) if is_thorough() else [])])
def test_a_rank_is_lost(outcomes: list[fresh.Outcome], exit_code: int, text: str) -> None:
    assert ended(outcomes)[1].exit_code == exit_code
    for outcome in (outcomes[0], *outcomes[2:]):
        assert outcome.exit_code == 1, outcome
        assert re.search(rf"(LostRankError|AgreementError): .*{text}", outcome.output), outcome.output
        assert "a backward failed" not in outcome.output, outcome.output  # a warning of causes in the model


@by_both_ways(frozen_with_the_store, 3)
def test_a_rank_is_stopped_that_serves_the_store(way: str, outcomes: list[fresh.Outcome]) -> None:
    """Ranks that can query no other one keep their limits, too: in a collective, and in a request to the store."""
    *waiting, stopped = ended(outcomes)
    assert stopped.exit_code == -signal.SIGKILL
    silent = r"The store of the process group at \S+ has not answered for \d+ s, and reports need it: rank 0, which"
    for outcome, doing in zip(waiting, ("waiting for the store", "waiting in the forward"), strict=True):
        assert outcome.exit_code == 1, outcome
        assert re.search(rf"^\[flatfsdp, rank \d\] {doing}.*, for \d s. {silent}", outcome.output, re.MULTILINE), (
            outcome
        )
        text = (
            rf"WaitError: this rank waited for 5 s \(set_collective_timeout\(raise_after=...\)\), {doing}.*\. {silent}"
        )
        assert re.search(text, outcome.output), outcome


@by_both_ways(asleep)
def test_a_rank_sleeps(way: str, outcomes: list[fresh.Outcome]) -> None:
    """First there is only a report, and training goes on; then it is an error."""
    waiting, sleeping = ended(outcomes)
    assert (waiting.exit_code, sleeping.exit_code) == (1, 1)
    for rank, outcome in enumerate((waiting, sleeping)):
        reports = re.findall(
            rf"^\[flatfsdp, rank {rank}\] .*Status of all ranks \(requested by rank 0\):\n"
            rf"    rank 0: waiting in the forward of unit .*, in step (\d+) \(last: gather .*\), for \d+ s\n"
            rf"    rank 1: in the program's own code since a backward in step \d+, for \d+ s$",
            outcome.output,
            re.MULTILINE,
        )
        assert reports[0] == "3" and len(reports) <= 2, outcome.output  # at most one for each of the two waits
        assert "WaitError: ranks waited for more than 4 s" in outcome.output, outcome.output
    assert re.search(r"^\[flatfsdp, rank 0\] resumed after \d+ s$", waiting.output, re.MULTILINE), waiting.output
    assert "resumed after" not in sleeping.output


@by_both_ways(slower_than_the_group)
def test_no_wait_is_longer_than_the_process_group_allows(way: str, outcomes: list[fresh.Outcome]) -> None:
    for outcome in ended(outcomes):
        assert outcome.exit_code == 1, outcome
        assert re.search(
            r"WaitError: ranks waited for as long as their process group allows \(timeout= of init_process_group or "
            r"new_group\): rank 0: waiting in the forward .*; rank 1: in the program's own code since ",
            outcome.output,
        ), outcome


@job(never_together)
def test_ranks_that_never_come_together_are_torchs_to_name(outcomes: list[fresh.Outcome]) -> None:
    for outcome in ended(outcomes):
        larger, refused = outcome.result
        assert larger[0] == "DistStoreError" and re.search("time(d )?out", larger[1]), larger
        assert refused[0] == "DistNetworkError" and "timed out" in refused[1], refused
