"""Ranks that share memory and die, stop, fork, free it, or cannot share; and strangers at their sockets."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import mmap
import multiprocessing
import os
import re
import resource
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import flatfsdp
from flatfsdp import FullyShardedDataParallel, env
from flatfsdp.engine.cpu import groups, peers
from flatfsdp.engine.watchdog.watchdog import is_lost_connection
from tests.comm.test_shared_memory import KINDS, at_random, exchange, issue, wrong
from tests.harness import fresh
from tests.harness.thorough import is_thorough
from tests.watchdog.test_faults import frozen_until_gone, is_running

pytestmark = pytest.mark.process

SECONDS = 12.0  # in which a rank has to end once a peer has
LONG = 45.0  # for work of two seconds without a wait


def job(case: Callable[..., Any], world: int = 2, **kwargs: Any) -> pytest.MarkDecorator:
    return pytest.mark.ranks(world, case, timeout=120, **kwargs)


def well(outcomes: list[fresh.Outcome]) -> list[Any]:
    """The result of each rank, none of which failed."""
    for outcome in outcomes:
        assert (outcome.exit_code, outcome.error) == (0, None), outcome
    return [outcome.result for outcome in outcomes]


def die(rank: int, world: int, how: str) -> tuple[str, float, bool]:
    """Rank 1 ends with an exchange under way that is larger than an outbox; the others' reports, and when; whether
    the group still holds the exchanged tensors."""
    dist.init_process_group("gloo")
    way = exchange()
    assert wrong([issue(way, "gather", rank, world, 1000, torch.float32)]) == []
    dist.barrier()
    kind = "all-reduce" if how == "killed" else "reduce-scatter"
    if rank == 1:
        if how != "before it issues":
            issue(way, kind, rank, world, 100_000, torch.float32)
        os._exit(7) if how == "exits" else os.kill(os.getpid(), signal.SIGKILL)
    began, text = time.monotonic(), []
    exchanged = [issue(way, kind, rank, world, 100_000, torch.float32) for _ in range(2)]
    held = [weakref.ref(output.untyped_storage()) for _, _, output, _ in exchanged]
    for each in exchanged:
        try:
            wrong([each])
        except RuntimeError as error:
            assert is_lost_connection(error)
            text.append(str(error))
    seconds = time.monotonic() - began
    assert text == text[:1] * 2  # for each kind of wait
    del exchanged, each
    gc.collect()
    return text[0], seconds, any(each() is not None for each in held)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("killed", marks=job(die, 3, of=["how"])),
        *([pytest.param("exits", marks=job(die, of=["how"]))] if is_thorough() else []),
        *([pytest.param("before it issues", marks=job(die, of=["how"]))] if is_thorough() else []),
    ],
)
def test_a_peer_ends_in_the_middle_of_an_exchange(how: str, outcomes: list[fresh.Outcome]) -> None:
    first, dead, *others = outcomes
    assert dead.exit_code == (7 if how == "exits" else -signal.SIGKILL)
    for survivor in (first, *others):
        assert survivor.error is None, survivor
        text, seconds, is_held = survivor.result
        assert not is_held
        # The one that has noticed it first may be gone, too, when the other looks.
        assert re.search(r"connection closed by peer: the process of rank [012] of the group has ended", text), text
        assert seconds < SECONDS
    assert any("process of rank 1 of" in survivor.result[0] for survivor in (first, *others))


def leave_first(rank: int, world: int) -> list[str]:
    """The last rank is late, and ends as soon as its part is done: when the others, which sleep, look for it, it is
    gone. They have more files open than `select` supports."""
    dist.init_process_group("gloo")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1200)]
    way = exchange()
    dist.barrier()
    if rank == world - 1:
        time.sleep(0.4)
    found = wrong([issue(way, "gather", rank, world, 100, torch.float32)])
    if rank == world - 1:
        os._exit(0)
    for each in many:
        os.close(each)
    return found


@job(leave_first, 3)
def test_a_peer_that_has_done_its_part_may_end(outcomes: list[fresh.Outcome]) -> None:
    assert outcomes[2].exit_code == 0
    assert well(outcomes[:2]) == [[]] * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(400, 400)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


def wrapped() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    return FullyShardedDataParallel(
        model, auto_wrap_policy=flatfsdp.wrap.ModuleWrapPolicy({Block}), use_orig_params=True
    )


def step(model: Any, seed: int = 0) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(2, 400, generator=torch.Generator().manual_seed(seed))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def begun(world: int) -> tuple[Any, list[int]]:
    """A model after a step, with short limits, and the processes of all ranks."""
    dist.init_process_group("gloo")
    flatfsdp.set_collective_timeout(report_after=1, raise_after=3)
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    model = wrapped()
    step(model)
    return model, pids


def stopped(rank: int, world: int) -> None:
    model, pids = begun(world)
    if rank == 1:
        frozen_until_gone([pids[0]])
    step(model)


@pytest.mark.parametrize("limit", [pytest.param(3, marks=job(stopped))] if is_thorough() else [])
def test_a_stopped_peer_is_reported_by_the_watch(limit: int, outcomes: list[fresh.Outcome]) -> None:
    """`test_faults.py` has one in every run."""
    waiting, other = outcomes
    assert other.exit_code == -signal.SIGKILL
    assert waiting.exit_code == 1, waiting
    assert re.search(r"^\[flatfsdp, rank 0\] .* for \d+ s\. Status of all ranks", waiting.output, re.MULTILINE), waiting
    assert re.search(rf"WaitError: .*{limit} s", waiting.output), waiting


def child_of(parent: Callable[[], None]) -> int:
    """The exit status of a forked child that runs `parent`'s function."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            parent()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_between_steps(rank: int, world: int) -> tuple[list[float], list[float], list[int]]:
    dist.init_process_group("gloo")
    model = wrapped()
    plain = [step(model, seed) for seed in range(4)]
    model = wrapped()
    forked, statuses = [], []

    def read_and_write() -> None:
        with torch.no_grad():
            for p in model.parameters():
                assert torch.isfinite(p).all()
                p.zero_()

    for seed in range(4):
        forked.append(step(model, seed))
        if rank == 0:
            statuses.append(child_of(read_and_write))
    return plain, forked, statuses


@job(fork_between_steps)
def test_forked_children_read_and_write_and_change_nothing(outcomes: list[fresh.Outcome]) -> None:
    for plain, forked, statuses in well(outcomes):
        assert plain == forked
        assert set(statuses) <= {0}, statuses


class Weights(Dataset[Tensor]):
    """A data set whose worker reads all weights of a model for each batch, and writes over them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        whole = torch.cat([p.detach().flatten() for p in self._model.parameters()])
        for p in self._model.parameters():
            p.detach().fill_(index)
        return whole.clone()


def load_by_workers(rank: int, world: int) -> tuple[list[float], list[float], bool, bool]:
    """Losses without workers and with them, and whether these saw the weights first, and then their own writes."""
    dist.init_process_group("gloo")
    model = wrapped()
    plain = [step(model, seed) for seed in range(6)]
    model = wrapped()
    step(model)
    model = wrapped()
    now = torch.cat([p.detach().flatten() for p in model.parameters()])
    loader = DataLoader(Weights(model), batch_size=None, num_workers=1, multiprocessing_context="fork")
    worked, seen = [], []
    this: Any = multiprocessing.current_process()
    with patch.dict(this._config, daemon=False):  # or it may have no children
        for seed, weights in enumerate(loader):
            seen.append(weights)
            worked.append(step(model, seed))
    return plain, worked, torch.equal(seen[0], now), all((w == n).all() for n, w in enumerate(seen[1:]))


@job(load_by_workers)
def test_workers_of_a_data_loader_read_the_weights_and_change_nothing(outcomes: list[fresh.Outcome]) -> None:
    for plain, worked, saw_weights, saw_own in well(outcomes):
        assert plain == worked
        assert (saw_weights, saw_own) == (True, True)


def many(rank: int, world: int) -> tuple[list[str], list[float], list[float]]:
    """More than there are processors on most machines."""
    dist.init_process_group("gloo")
    way = exchange()
    found = wrong([issue(way, kind, rank, world, 1001, torch.float32) for kind in KINDS])
    shared = [step(model := wrapped(), seed) for seed in range(2)]
    del model
    with groups.over_gloo():
        return found, shared, [step(wrapped(), seed) for seed in range(2)]


@job(many, 8 if is_thorough() else 5)
def test_many_ranks(outcomes: list[fresh.Outcome]) -> None:
    for found, shared, plain in well(outcomes):
        assert found == []
        assert shared == plain


def let_go_in_a_child(rank: int, world: int) -> int:
    """A child that clears up: its own memory does not go with that which it never had."""
    dist.init_process_group("gloo")
    way: Any = exchange(1024 * 1024)
    assert wrong([issue(way, "gather", rank, world, 100, torch.float32)]) == []

    def let_go() -> None:
        nonlocal way
        blocks = [mmap.mmap(-1, 100_000 * n) for n in range(1, 30)]  # which may lie where it was
        way = None
        gc.collect()
        for n, block in enumerate(blocks):
            block.write(bytes([n]) * len(block))

    return child_of(let_go)


@job(let_go_in_a_child)
def test_a_forked_child_lets_go_of_what_it_has_not_got(outcomes: list[fresh.Outcome]) -> None:
    assert well(outcomes) == [0, 0]


def exchange_in_a_child(rank: int, world: int) -> str:
    """A child that goes on as a rank gets an error, and does not end by a signal."""
    dist.init_process_group("gloo")
    way, text = exchange(), Path(f"report{os.getpid()}")
    assert wrong([issue(way, "gather", rank, world, 100, torch.float32)]) == []

    def exchanges() -> None:
        try:
            wrong([issue(way, "gather", rank, world, 100, torch.float32)])
        except RuntimeError as error:
            text.write_text(str(error))

    try:
        status = child_of(exchanges)
        return f"{status}: {text.read_text() if text.exists() else 'nothing'}"
    finally:
        text.unlink(missing_ok=True)


@job(exchange_in_a_child)
def test_a_forked_child_is_refused_an_exchange_in_words(outcomes: list[fresh.Outcome]) -> None:
    for text in well(outcomes):
        assert re.search(r"^0: .*forked", text), text


def child_outlives(rank: int, world: int) -> tuple[str, bool]:
    """Rank 1 is killed while a child that it has forked lives; the report of rank 0."""
    dist.init_process_group("gloo")
    way = exchange()
    child = torch.zeros(1, dtype=torch.int64)
    if rank == 1:
        child[0] = forked = os.fork()
        if forked == 0:
            time.sleep(30)
            os._exit(0)
    dist.broadcast(child, 1)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    text = "nothing"
    try:
        wrong([issue(way, "gather", rank, world, 100, torch.float32)])
    except RuntimeError as error:
        text = str(error)
    assert time.monotonic() - began < SECONDS
    lives = is_running(int(child))
    os.kill(int(child), signal.SIGKILL)
    return text, lives


@job(child_outlives)
def test_a_forked_child_keeps_no_connection_alive(outcomes: list[fresh.Outcome]) -> None:
    text, lives = outcomes[0].result
    assert "process of rank 1 of the group has ended" in text
    assert lives


def held() -> tuple[int, int]:
    """The numbers of open descriptors and of mapped segments of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:flatfsdp")


def shared_descriptors() -> tuple[int, int]:
    """The numbers of open descriptors of segments, and of local sockets."""
    of_segments, inodes = 0, set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            of_segments += "memfd:flatfsdp" in target
            inodes.add(target)
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return of_segments, sum(f"socket:[{line[6]}]" in inodes for line in lines)


def rewrap(rank: int, world: int, how: str) -> list[tuple[int, int]]:
    """Descriptors and segments held with one model, after many more, and once the process group is destroyed; and the
    descriptors of segments and local sockets before, with the model, and at the end."""
    dist.init_process_group("gloo")
    ours = [shared_descriptors()]
    model = wrapped()
    step(model)
    found = [held()]
    for _ in range(10 if how == "again" else 3):
        if how == "again":
            model = wrapped()
            step(model)
            continue
        group = dist.new_group()
        other = FullyShardedDataParallel(nn.Linear(8, 8), process_group=group, use_orig_params=True)
        other(torch.ones(2, 8)).sum().backward()
        dist.destroy_process_group(group)
        del other, group
    found.append(held())
    ours.append(shared_descriptors())
    del model
    dist.destroy_process_group()
    return [*found, held(), *ours, shared_descriptors()]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("again", marks=job(rewrap, of=["how"])),
        pytest.param("other groups", marks=job(rewrap, of=["how"])),
    ],
)
def test_nothing_is_left_of_what_is_let_go(how: str, outcomes: list[fresh.Outcome]) -> None:
    for first, then, last, before, during, after in well(outcomes):
        assert then[1] == first[1] > 1
        assert before[0] == 0 and during[1] > before[1]
        assert after == before
        if how == "again":
            assert then[0] <= first[0] + 2
        assert last[1] == 0


PLAIN: Any = contextlib.nullcontext()


class Reasons(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def refuse(*args: Any) -> Any:
    raise OSError(28, "No space left on device")


def unsealed(descriptor: int, request: int, *args: Any) -> Any:
    """`fcntl`, which adds no seals."""
    return 0 if request == fcntl.F_ADD_SEALS else plain_fcntl(descriptor, request, *args)


plain_fcntl = fcntl.fcntl


def forbid(*args: Any) -> Any:
    raise PermissionError(1, "Operation not permitted")


def unable(rank: int, world: int, how: str) -> tuple[list[str], list[float], list[float], tuple[int, int], float]:
    """Rank 1 cannot, or rank 0 in one case; losses with and without, and for how long ranks looked for a way."""
    dist.init_process_group("gloo")
    log, reasons = logging.getLogger("flatfsdp"), Reasons()
    log.addHandler(reasons)
    log.setLevel(logging.DEBUG)
    maps = iter((mmap.mmap,) * 2)  # its outbox, and its bell

    def late_failure(*args: Any) -> mmap.mmap:
        for make in maps:
            return make(*args)
        return refuse()

    failures: dict[str, Any] = {
        "memory": patch.object(os, "posix_fallocate", side_effect=refuse),
        "no such files": patch.object(os, "memfd_create", side_effect=refuse),
        "maps": patch.object(mmap, "mmap", late_failure),
        "sockets": patch.object(socket.socket, "bind", side_effect=refuse),
        "connections": patch.object(socket.socket, "connect", side_effect=refuse),
        "forbidden": patch.object(os, "memfd_create", side_effect=forbid),
        "another user": patch.object(os, "getuid", return_value=12345),
        "another network": patch.object(Path, "stat", return_value=os.stat_result(range(10))),
        "no /proc": patch.object(Path, "read_text", side_effect=forbid),
        "switched off": patch.object(groups, "connect", groups.connect),
        "not sealed": patch.object(fcntl, "fcntl", unsealed),
        "accepted from another user": patch.object(os, "getuid", return_value=12345),
    }
    odd = 0 if how == "accepted from another user" else 1
    if how == "switched off" and rank == 1:
        flatfsdp.share_host_memory(False)
    before = held()
    began = time.monotonic()
    with patch.object(peers, "SECONDS", LONG if odd else 3.0), failures[how] if rank == odd else PLAIN:
        model = wrapped()
        found = [step(model, seed) for seed in range(3)]
    after, seconds = held(), time.monotonic() - began
    model = None
    with groups.over_gloo():
        model = wrapped()
        plain = [step(model, seed) for seed in range(3)]
    left = (after[0] - before[0], after[1] - before[1])
    texts = [*reasons.lines, *env.describe().splitlines()]
    lines = [line for line in texts if re.search("share[sd]? memory", line)]
    return lines, found, plain, left, seconds


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        pytest.param(how, reason, marks=job(unable, of=["how"]), id=how)
        for how, reason in {
            "memory": "rank 1 of the group: this system does not provide shared memory: .*No space left",
            "no such files": "rank 1 of the group: .*No space left",
            "maps": "rank 1 of the group: .*No space left",
            "sockets": "rank 1 of the group: cannot open a local socket: .*No space left",
            "connections": "rank 1 of the group: .*No space left",
            "forbidden": "rank 1 of the group: this system does not provide shared memory: .*not permitted",
            "another user": (
                "rank 1 of the group: ValueError: a process of another user is listening on the name of this socket"
            ),
            "another network": "the ranks are on several hosts, or in containers that do not share a network namespace",
            "no /proc": "the ranks are on several hosts, or .* or some of which may not read /proc",
            "switched off": r"rank 1 of the group: share_host_memory\(False\) was called",
            "not sealed": "rank 0 of the group: ValueError: the memory shared by rank 1 of the group is not sealed",
            # It closes the connection, which the other one notices when it sends its memory, or receives none.
            "accepted from another user": "rank 1 of the group: (BrokenPipe|ConnectionReset|Value)Error",
        }.items()
        if is_thorough() or how in ("maps", "connections", "another network", "accepted from another user")
    ],
)
def test_one_rank_that_cannot_takes_all_back_to_gloo(how: str, reason: str, outcomes: list[fresh.Outcome]) -> None:
    for lines, found, plain, left, seconds in well(outcomes):
        assert len(lines) > 1  # the log, and a report
        assert seconds < LONG  # no rank waits for one that cannot come
        assert all(re.search(reason, line) for line in lines), lines
        assert found == plain
        assert left[1] == 0, left


def strangers(rank: int, world: int) -> tuple[bool, float]:
    """Others connect to rank 0's socket before rank 1: they send nothing, hang up, send garbage, or lack the secret."""
    dist.init_process_group("gloo")
    known = listening()
    silent: list[socket.socket] = []

    def disturb() -> None:
        deadline = time.monotonic() + 5
        while not (names := listening() - known) and time.monotonic() < deadline:
            time.sleep(0.01)
        for name in names:
            for sent in (None, b"", b"x" * 7, b"GET / HTTP/1.0\r\n" * 20, (1).to_bytes(4, "little") + b"y" * 32):
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stranger.connect(b"\0" + name)
                if sent is None or sent == b"x" * 7:
                    silent.append(stranger)
                with contextlib.suppress(OSError):
                    stranger.sendall(sent or b"")
                if stranger not in silent:
                    stranger.close()

    plain = socket.socket.connect

    def late(self: socket.socket, address: Any) -> None:
        if isinstance(address, bytes):
            time.sleep(1)
        plain(self, address)

    troubling = threading.Thread(target=disturb)
    if rank == 0:
        troubling.start()
    began = time.monotonic()
    with patch.object(socket.socket, "connect", late) if rank == 1 else PLAIN:
        way = exchange()
    seconds = time.monotonic() - began
    if rank == 0:
        troubling.join()
        assert silent
    return wrong([issue(way, "all-reduce", rank, world, 5000, torch.float32)]) == [], seconds


def listening() -> set[bytes]:
    """The names of this process's local sockets."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[7][1:].encode() for line in lines if len(line) > 7 and f"socket:[{line[6]}]" in own}


@job(strangers)
def test_strangers_at_the_socket_are_ignored(outcomes: list[fresh.Outcome]) -> None:
    for right, seconds in well(outcomes):
        assert right
        assert seconds < SECONDS


def random_exchanges(rank: int, world: int) -> list[str]:
    dist.init_process_group("gloo")
    return [each for seed in range(40 if is_thorough() else 4) for each in at_random(rank, world, seed)]


def test_two_jobs_at_once() -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(fresh.run, 2, random_exchanges) for _ in range(2)]
        assert [well(each.result()) for each in jobs] == [[[], []]] * 2
