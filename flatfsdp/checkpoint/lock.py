"""One save at a time to a path.

[Note: lock] Whoever writes to the folders of a place ([Note: siblings]) has `.<name>.lock` beside them, which the
system makes for one only (O_CREAT | O_EXCL; `flock` is not to be had on every network file system). It names the
process ([Note: processes]), which counts up a number in it while it has it. A lock is *stale* where its process is
gone, as seen on its own machine, and elsewhere where the number has stood still for `PATIENCE` seconds of the one who
looks: clocks of two machines are never compared. A stale lock is given another name first, and only what has that name
then is removed: of two who find it stale at once, one may have made its own by the time that the other acts, and gets
that back. Whoever has a lock looks for it again before what cannot be undone: it may have stood still for so long that
it was stale.
"""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError
from .disk import File, disk
from .holder import LockHolder, Machine

LOCK = ".lock"
TOKEN = ".token"
BEAT = 3.0  # seconds between two numbers
PATIENCE = 60.0  # network file systems show what others have written after as much as that
EMPTY = 5.0  # the same for a lock in which nothing stands yet: its maker was killed before its first write
POLL = 0.5
_MOST = 4096  # bytes of a lock

# The tokens of this process's locks, and of the files by which its ranks find each other.
_busy: set[str] = set()
_putting_away = threading.RLock()  # again by the same thread: in a signal handler
# When this process saw a lock first as it is: kept from one look to the next.
_seen: dict[Path, tuple[bytes, float]] = {}


class Lock:
    """The lock of the place at `path`.

    Args:
        path: the folder that is saved to.
        machine: for tests; None for this one.
    """

    def __init__(self, path: Path, machine: Machine | None = None) -> None:
        self.path = path
        self.file = path.with_name(f".{path.name}{LOCK}")
        self._machine = machine or Machine()
        self._mine: LockHolder | None = None
        self._beat: _Heartbeat | None = None

    # --- take and give back -------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Have the lock, however long a stale one takes to be known as such (at most `PATIENCE` seconds).

        Raises:
            CheckpointError: another one has it.
            OSError: the disk refused.
        """
        other = self._other(patient=True)
        if other is not None:
            raise CheckpointError(
                f"{other} is saving to {self.path} at this moment, or removes it (its lock is {self.file.name}). Let "
                "every job save to a folder of its own"
            )

    def take_now(self) -> bool:
        """Have the lock unless somebody else does, or may do; whether it is had.

        Raises:
            OSError: the disk refused.
        """
        return self._other(patient=False) is None

    def release(self) -> None:
        """Give the lock back; errors of the disk are ignored, for nobody waits for this process then."""
        mine, beat, self._mine, self._beat = self._mine, self._beat, None, None
        if mine is None:
            return
        if beat is not None:
            beat.end()
        try:
            with suppress(OSError):
                found = self._read()
                if found is not None and LockHolder.from_bytes(found) == mine:
                    self._put_away(found)
        finally:  # and not before: what this process is not at any more, its other threads may put away
            _busy.discard(mine.token)

    def check(self) -> None:
        """Require that the lock is still this one's.

        Raises:
            CheckpointError: it is not; another save may have begun.
        """
        if self._mine is None or not self._is(self._mine):
            raise CheckpointError(
                f"{self.path}: the lock of this save, {self.file.name}, is lost: this process stood still for so long "
                "that another job took it, or somebody removed it. Nothing has been replaced; save again"
            )

    # --- who has it ---------------------------------------------------------------------------------------------------

    def _other(self, *, patient: bool) -> str | None:
        """Take the lock; who has it, in words, where that is another one."""
        watched: bytes | None = None
        vanished = 0
        while not self._create():
            found = self._read()
            if found is None:  # given back meanwhile
                vanished += 1
                if vanished > 100:  # a link that leads nowhere is there and is not
                    raise CheckpointError(f"{self.file} is no lock of a save's. Remove it")
                continue
            holder = LockHolder.from_bytes(found)
            gone = None if holder is None else self._machine.is_gone(holder, _busy)
            if gone is None:
                gone = self._stands_still(found)
            moves = watched is not None and watched != found
            if gone:
                self._put_away(found)
            elif gone is False or moves or not patient:
                return "somebody" if holder is None else str(holder)
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
        mine = self._machine.holder()
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
                disk().remove(self.file)  # where the disk is full: an empty lock would be nobody's
            raise
        self._beat = _Heartbeat(file, len(mine.to_bytes()))
        return True

    def _read(self, file: Path | None = None) -> bytes | None:
        try:
            return disk().read_file(file or self.file, _MOST)
        except FileNotFoundError:
            return None

    def _is(self, mine: LockHolder) -> bool:
        found = self._read()
        return found is not None and LockHolder.from_bytes(found) == mine

    def _stands_still(self, found: bytes) -> bool | None:
        """True: for so long that it is stale; None: not yet."""
        now = self._machine.now()
        before, since = _seen.get(self.file, (None, now))
        if before != found:
            since = now
        _seen[self.file] = found, since
        return True if now - since >= (PATIENCE if found else EMPTY) else None

    def _put_away(self, known: bytes) -> None:
        """Remove the lock if it is the one that is `known`, and nobody else's by now."""
        away = self.file.with_name(f".{self.path.name}.{self._machine.holder().name}{TOKEN}")
        # Threads of this process take turns: none gives a lock another name between the look and the rename of one.
        with _putting_away:
            if self._read() != known:
                return
            try:
                disk().rename(self.file, away)
            except FileNotFoundError:
                return
            if self._read(away) != known:  # another process was faster
                with suppress(OSError):  # there is a third one's; who had this finds it lost (`check`)
                    os.link(away, self.file)
            disk().remove(away)


class _Heartbeat:
    """Counts up in a lock, in a thread, until `end`. It writes to the file that it was given, whatever is made of its
    name."""

    def __init__(self, file: File, place: int) -> None:
        self._file, self._place = file, place
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flatfsdp checkpoint lock", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        with self._file:
            while not self._ended.wait(BEAT):
                number += 1
                with suppress(OSError):
                    self._file.write(b"%012d\n" % number, self._place)
                    self._file.sync()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(5.0)  # a disk that does not answer holds up nobody


@contextmanager
def locked(*paths: Path) -> Iterator[None]:
    """Inside, no save writes to these paths, and no other process removes what is there. Not collective.

    Raises:
        CheckpointError: a save to one of them is under way.
        OSError: the disk refused.
    """
    with ExitStack() as stack:
        for path in sorted(paths):
            lock = Lock(Path(os.path.realpath(path)))
            stack.callback(lock.release)
            lock.take()
        yield


@contextmanager
def locked_now(path: Path) -> Iterator[bool]:
    """As `locked`, but without waiting: False is given where somebody saves there, or may."""
    lock = Lock(path)
    try:
        yield lock.take_now()
    finally:
        lock.release()


# --- tokens -----------------------------------------------------------------------------------------------------------


def leave_token(path: Path) -> Path:
    """A file beside the folder `path` by which the ranks of a save find each other, to be given to `drop_token`."""
    mine = Machine().holder()
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
    """Remove such a file, if the disk lets."""
    holder = _holder_of(token)
    _busy.discard("" if holder is None else holder.token)
    with suppress(OSError):
        disk().remove(token)


def sweep_tokens(path: Path) -> None:
    """Remove what killed saves to `path` have left of such files, and of stale locks on their way out.

    Those of processes of which nothing is known from here go when they are old by the file system's own clock: that
    of the lock of `path`, which the caller has.
    """
    machine = Machine()
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{TOKEN}"):
        if left.is_symlink() or not left.is_file():
            continue
        with suppress(FileNotFoundError):
            holder = _holder_of(left)
            gone = None if holder is None else machine.is_gone(holder, _busy)
            if gone is None:
                gone = Lock(path).file.stat().st_mtime - left.stat().st_mtime > PATIENCE
            if gone:
                disk().remove(left)


def path_of_token(token: Path) -> Path:
    """Of which folder a file is a token."""
    return token.with_name(token.name[1 : -len(TOKEN)].rpartition(".")[0])


def _holder_of(token: Path) -> LockHolder | None:
    return LockHolder.from_name(token.name[: -len(TOKEN)].rpartition(".")[2])
