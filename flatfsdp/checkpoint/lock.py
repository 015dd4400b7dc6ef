"""One save at a time to a path.

[Note: lock] A process that writes to the folders of a location ([Note: siblings]) holds `.<name>.lock` beside them. The
system creates that file for one process only (O_CREAT | O_EXCL; not every network file system has `flock`). The file
names its process ([Note: processes]), which increments a counter in it while it holds the lock. A lock is *stale* where
its process has ended, as seen on its own machine, or, on other machines, where the counter has not changed for
`PATIENCE` seconds on the clock of the reader: clocks of two machines are never compared. A stale lock is renamed first,
and removed only if the renamed file is still that lock: of two processes that find it stale, the slower one may have
renamed the lock of the faster one, and restores it. The owner checks its lock again before irreversible steps: it may
have been paused for so long that the lock became stale.
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..engine.base.processes import ProcessIdentity, start_of
from ..errors import CheckpointError
from .disk import File, disk

LOCK = ".lock"
TOKEN = ".token"
BEAT = 3.0  # seconds between two increments
PATIENCE = 60.0  # seconds: network file systems may show writes of other machines as late as this
EMPTY = 5.0  # seconds, for an empty lock: its process was killed before its first write
POLL = 0.5
_MOST = 4096  # size limit of a lock, in bytes
_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")

# The tokens of this process's locks, and of the files by which its ranks find each other.
_busy: set[str] = set()
_putting_away = threading.RLock()  # reentrant for signal handlers
# By lock: its contents, and when this process first read these contents.
_seen: dict[Path, tuple[bytes, float]] = {}


@dataclass(frozen=True)
class LockOwner:
    """A process, and one operation of it.

    Attributes:
        job: a description for messages.
        token: identifies the operation.
    """

    process: ProcessIdentity
    job: str
    token: str

    def __str__(self) -> str:
        return f"{self.process}{f' ({self.job})' if self.job else ''}"

    @classmethod
    def new(cls, process: ProcessIdentity) -> LockOwner:
        """A new operation of `process`, which is this one."""
        jobs = [f"{name} {os.environ[name]}" for name in _JOBS if name in os.environ]
        program = os.path.basename(sys.argv[0]) if sys.argv else ""
        words = "".join(filter(str.isprintable, ", ".join(filter(None, (program, *jobs)))))
        return cls(process, words[:100], uuid.uuid4().hex)

    def to_bytes(self) -> bytes:
        """Serialize to one line."""
        host, boot, pid, start = self.process
        line = {"host": host, "boot": boot, "pid": pid, "start": start, "job": self.job, "token": self.token}
        return json.dumps(line).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> LockOwner | None:
        """Read from data that begins with such a line; None where it does not."""
        try:
            line = json.loads(data.partition(b"\n")[0])
            process = ProcessIdentity.of([line[name] for name in ("host", "boot", "pid", "start")])
            job, token = line["job"], line["token"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if process is None or not all(isinstance(text, str) and text.isprintable() for text in (job, token)):
            return None
        return cls(process, job, token)

    @property
    def name(self) -> str:
        """The fields that `is_over` needs, as a part of a file's name."""
        return "-".join(map(str, (*self.process[1:], self.token)))

    @classmethod
    def from_name(cls, name: str) -> LockOwner | None:
        """Read from such a name; None for any other."""
        found = re.fullmatch(r"([0-9a-f]*)-([1-9]\d*)-(\d*)-([0-9a-f]+)", name)
        return None if found is None else cls(ProcessIdentity("", found[1], int(found[2]), found[3]), "", found[4])


class Machine:
    """The machine as this process sees it. Tests simulate another one."""

    def __init__(self) -> None:
        self.process = ProcessIdentity.this()

    def now(self) -> float:
        """Seconds of a monotonic clock."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def start_of(self, pid: int) -> str | None:
        """As `processes.start_of`."""
        return start_of(pid)

    def is_over(self, owner: LockOwner) -> bool | None:
        """Whether the process has ended, or, where it is this one, the operation; None where unknown."""
        if self.process.system and owner.process[1:] == self.process[1:]:
            return owner.token not in _busy
        return owner.process.is_gone(self.process, self.start_of)


class Lock:
    """The lock of the location `path`.

    Args:
        path: the folder that is saved to.
        machine: for tests; None for this one.
    """

    def __init__(self, path: Path, machine: Machine | None = None) -> None:
        self.path = path
        self.file = path.with_name(f".{path.name}{LOCK}")
        self._machine = machine or Machine()
        self._mine: LockOwner | None = None
        self._beat: _Heartbeat | None = None

    # --- take and give back -------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Acquire the lock; waits as long as a stale one takes to be recognized (at most `PATIENCE` seconds).

        Raises:
            CheckpointError: another process has it.
            OSError: the disk reported an error.
        """
        other = self._other(patient=True)
        if other is not None:
            raise CheckpointError(
                f"{other} is saving to {self.path} right now, or removing it (its lock is {self.file.name}). Give "
                "every job a separate folder to save to"
            )

    def take_now(self) -> bool:
        """Try to acquire the lock without waiting; False where another process has it, or may have it.

        Raises:
            OSError: the disk reported an error.
        """
        return self._other(patient=False) is None

    def release(self) -> None:
        """Release the lock. Errors of the disk are ignored: no other process waits for this one."""
        mine, beat, self._mine, self._beat = self._mine, self._beat, None, None
        if mine is None:
            return
        if beat is not None:
            beat.end()
        try:
            with suppress(OSError):
                found = self._read()
                if found is not None and LockOwner.from_bytes(found) == mine:
                    self._put_away(found)
        finally:  # not earlier: other threads of this process may remove locks whose tokens are not busy
            _busy.discard(mine.token)

    def check(self) -> None:
        """Require that this object still holds the lock.

        Raises:
            CheckpointError: it does not; another save may have begun.
        """
        if self._mine is None or not self._is(self._mine):
            raise CheckpointError(
                f"{self.path}: the lock of this save, {self.file.name}, is lost: this process was suspended for so "
                "long that another job took it, or somebody removed it. Nothing has been replaced; save again"
            )

    # --- its owner ---------------------------------------------------------------------------------------------------

    def _other(self, *, patient: bool) -> str | None:
        """Try to acquire the lock. Returned: None, or a description of the process that holds it."""
        watched: bytes | None = None
        vanished = 0
        while not self._create():
            found = self._read()
            if found is None:  # released in the meantime
                vanished += 1
                if vanished > 100:  # a dangling link: it exists, and cannot be read
                    raise CheckpointError(f"{self.file} is not the lock of a save. Remove it")
                continue
            owner = LockOwner.from_bytes(found)
            gone = None if owner is None else self._machine.is_over(owner)
            if gone is None:
                gone = self._stands_still(found)
            moves = watched is not None and watched != found
            if gone:
                self._put_away(found)
            elif gone is False or moves or not patient:
                return "somebody" if owner is None else str(owner)
            else:
                watched = found
                self._machine.wait(POLL)
        return None

    def _create(self) -> bool:
        try:
            file = disk().create(self.file, exclusive=True)
        except FileExistsError:
            return False
        _seen.pop(self.file, None)
        mine = LockOwner.new(self._machine.process)
        _busy.add(mine.token)
        self._mine = mine
        try:
            file.write(mine.to_bytes(), 0)
            file.sync()
        except BaseException:
            file.__exit__()
            _busy.discard(mine.token)
            self._mine = None
            with suppress(OSError):
                disk().remove(self.file)  # where the disk is full: an empty lock names no process
            raise
        self._beat = _Heartbeat(file, len(mine.to_bytes()))
        return True

    def _read(self, file: Path | None = None) -> bytes | None:
        try:
            return disk().read_file(file or self.file, _MOST)
        except FileNotFoundError:
            return None

    def _is(self, mine: LockOwner) -> bool:
        found = self._read()
        return found is not None and LockOwner.from_bytes(found) == mine

    def _stands_still(self, found: bytes) -> bool | None:
        """True where the counter has not changed for so long that the lock is stale; None: not yet."""
        now = self._machine.now()
        before, since = _seen.get(self.file, (None, now))
        if before != found:
            since = now
        _seen[self.file] = found, since
        return True if now - since >= (PATIENCE if found else EMPTY) else None

    def _put_away(self, known: bytes) -> None:
        """Remove the lock if its contents are still `known`."""
        away = self.file.with_name(f".{self.path.name}.{LockOwner.new(self._machine.process).name}{TOKEN}")
        # Threads of this process take turns: no other thread renames a lock between this read and this rename.
        with _putting_away:
            if self._read() != known:
                return
            try:
                disk().rename(self.file, away)
            except FileNotFoundError:
                return
            if self._read(away) != known:  # another process was faster
                with suppress(OSError):  # a third process has one; this owner finds its own lost (`check`)
                    os.link(away, self.file)
            disk().remove(away)


class _Heartbeat:
    """Increments the counter of a lock, in a thread, until `end`. It writes to the file that it was given, even after a
    rename."""

    def __init__(self, file: File, offset: int) -> None:
        self._file, self._offset = file, offset
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flatfsdp checkpoint lock", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        with self._file:
            while not self._ended.wait(BEAT):
                number += 1
                with suppress(OSError):
                    self._file.write(b"%012d\n" % number, self._offset)
                    self._file.sync()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(5.0)  # a disk that does not answer must not block


@contextmanager
def locked(*paths: Path) -> Iterator[None]:
    """Inside, no save writes to these paths, and no other process removes their contents. Not collective.

    Raises:
        CheckpointError: a save to one of them is in progress.
        OSError: the disk reported an error.
    """
    with ExitStack() as stack:
        for path in sorted(paths):
            lock = Lock(Path(os.path.realpath(path)))
            stack.callback(lock.release)
            lock.take()
        yield


@contextmanager
def locked_now(path: Path) -> Iterator[bool]:
    """As `locked`, but without waiting: yields False where another process saves there, or may."""
    lock = Lock(path)
    try:
        yield lock.take_now()
    finally:
        lock.release()


# --- tokens -----------------------------------------------------------------------------------------------------------


def leave_token(path: Path) -> Path:
    """Write a file next to the folder `path` by which the ranks of a save find each other; `drop_token` removes it."""
    mine = LockOwner.new(ProcessIdentity.this())
    token = path.with_name(f".{path.name}.{mine.name}{TOKEN}")
    _busy.add(mine.token)
    try:
        disk().make_folder(path.parent)
        disk().write_file(token, b"")
    except BaseException:
        drop_token(token)
        raise
    return token


def drop_token(token: Path) -> None:
    """Remove such a file, if possible."""
    owner = _owner_of(token)
    _busy.discard("" if owner is None else owner.token)
    with suppress(OSError):
        disk().remove(token)


def sweep_tokens(path: Path) -> None:
    """Remove leftovers of killed saves to `path`: such files, and stale locks that were renamed for removal.

    Those of processes of which nothing can be known from here are removed when they are old by the file system's own
    clock, that is, compared with the lock of `path`, which the caller holds.
    """
    machine = Machine()
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{TOKEN}"):
        if left.is_symlink() or not left.is_file():
            continue
        with suppress(FileNotFoundError):
            owner = _owner_of(left)
            gone = None if owner is None else machine.is_over(owner)
            if gone is None:
                gone = Lock(path).file.stat().st_mtime - left.stat().st_mtime > PATIENCE
            if gone:
                disk().remove(left)


def path_of_token(token: Path) -> Path:
    """The folder that a token belongs to."""
    return token.with_name(token.name[1 : -len(TOKEN)].rpartition(".")[0])


def _owner_of(token: Path) -> LockOwner | None:
    return LockOwner.from_name(token.name[: -len(TOKEN)].rpartition(".")[2])
