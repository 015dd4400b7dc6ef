"""One family of messages: errors, warnings, and the log.

Each class also derives from the built-in a Python programmer would expect, so that ``except ValueError`` and
``except FlatFSDPError`` both catch a user's wrong value. Warnings also belong to the family: turned into errors by a
filter, they are caught like the rest.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeVar

__all__ = [
    "AgreementError",
    "AuditError",
    "CheckpointError",
    "ConfigTypeError",
    "ConfigValueError",
    "FencedError",
    "FlatFSDPError",
    "FlatFSDPWarning",
    "InternalError",
    "LostRankError",
    "NonFiniteError",
    "UsageError",
    "WaitError",
]


V = TypeVar("V", bound=Hashable)


class FlatFSDPError(Exception):
    """Base class of every error and every warning that flatfsdp raises."""


class ConfigTypeError(FlatFSDPError, TypeError, ValueError):
    """An argument has a type that flatfsdp does not accept. It is also a ValueError, which FSDP1 raises."""


class ConfigValueError(FlatFSDPError, ValueError):
    """An argument has an accepted type, but a value (or a combination of values) that is not accepted."""


class UsageError(FlatFSDPError, RuntimeError):
    """A legal call at a moment, or on a module, where it cannot work: lifecycle, wrapping or order is wrong."""


class AgreementError(FlatFSDPError, RuntimeError):
    """Ranks differ in something that all of them must have in common."""


class AuditError(FlatFSDPError, RuntimeError):
    """Memory has changed that nobody wrote to, or ranks compute different values of the same microbatch; the message
    names rank, unit, parameter and step. Raised by an `audit()`, on all ranks."""


class LostRankError(AgreementError):
    """A rank that others need has ended, or does not respond any more; the message names it and contains its last
    report, if it left one."""


class WaitError(AgreementError):
    """Ranks have waited for others for longer than `set_collective_timeout(raise_after=...)` allows."""


class FencedError(LostRankError):
    """The other ranks count this one as lost, and go on without it: it was stopped, or cut off, for too long."""


class CheckpointError(FlatFSDPError, RuntimeError):
    """A checkpoint could not be written, found or read; its message names the ranks and the files."""


class NonFiniteError(FlatFSDPError, RuntimeError):
    """A value is infinite or not a number, in a `detect_nonfinite()`; raised on all ranks."""


class InternalError(FlatFSDPError, AssertionError):
    """An invariant of flatfsdp's own broke: never the user's mistake."""

    def __str__(self) -> str:
        return (
            f"{super().__str__()}\nThis is a bug in flatfsdp, not in your program. "
            "Please report it together with the output of `python -m flatfsdp.env`."
        )


class FlatFSDPWarning(FlatFSDPError, UserWarning):
    """A legal call that is probably unintended: a setting without effect, a default known to surprise."""


_rank: int | None = None


def set_rank(rank: int) -> None:
    """Fix the rank that messages carry; called once the process group is known."""
    global _rank
    _rank = rank


@contextmanager
def rank_kept() -> Iterator[None]:
    """A context after which messages carry the rank that they carried before."""
    global _rank
    before = _rank
    try:
        yield
    finally:
        _rank = before


def current_rank() -> int:
    """The rank that messages carry: the one set, else the launcher's ``RANK``, else 0."""
    if _rank is not None:
        return _rank
    from_launcher = os.environ.get("RANK", "")
    return int(from_launcher) if from_launcher.isdigit() else 0


def fail(error: FlatFSDPError) -> NoReturn:
    """Print ``error`` with the rank to stderr, then raise it.

    For code that autograd calls: there an exception may reach the user late, or as another one, or not at all.
    """
    print(f"[flatfsdp, rank {current_rank()}] {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    raise error


def refuse_type(argument: str, value: object, accepted: str, *, hint: str = "") -> NoReturn:
    """Raise :class:`ConfigTypeError`: the argument, the given value, the accepted ones, and perhaps a remedy."""
    raise ConfigTypeError(f"{argument}: got {shown(value)}. Accepted: {accepted}.{hint and f' {hint}'}")


def refuse_value(argument: str, value: object, accepted: str, *, hint: str = "") -> NoReturn:
    """Raise :class:`ConfigValueError`, of the same form as :func:`refuse_type`."""
    raise ConfigValueError(f"{argument}: got {value!r}. Accepted: {accepted}.{hint and f' {hint}'}")


def did_you_mean(name: str, accepted: Iterable[str]) -> str:
    """A sentence that suggests the closest accepted name; empty if none is close."""
    close = difflib.get_close_matches(name, list(accepted), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""


def ranks_in_words(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2", and for many "ranks 0-6, 8-1023": `ranks` in order."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 8:
        return f"ranks {', '.join(map(str, ranks))}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"ranks {', '.join('-'.join(map(str, run)) for run in runs)}"


def ranks_by_value(values: Mapping[int, V]) -> dict[V, list[int]]:
    """The ranks that have the same value, by that value; both in the order of `values`."""
    alike: dict[V, list[int]] = {}
    for rank, value in values.items():
        alike.setdefault(value, []).append(rank)
    return alike


def by_ranks(texts: Mapping[int, str], between: str = " ") -> str:
    """Reports of ranks, once for those with equal reports: "rank 0 ...; ranks 1, 2 ..."."""
    return "; ".join(f"{ranks_in_words(ranks)}{between}{text}" for text, ranks in ranks_by_value(texts).items())


def shown(value: object) -> str:
    """``value`` for a message: its repr and type if that is one short line, else its type only."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, kind = repr(value), type(value).__name__
    if isinstance(name := getattr(value, "__name__", None), str):
        return f"the {kind} {name}"
    short = len(text) <= 60 and "\n" not in text and " at 0x" not in text
    return f"{text} ({kind})" if short else f"a value of type {kind}"


def few(names: Sequence[str]) -> str:
    """Three of ``names``, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


ROOT = "<root>"  # the outermost module, in messages and tables


def label_of(name: str) -> str:
    """The label in messages for the unit, or the module, of this full name."""
    return repr(name) if name else ROOT


# Frames of these packages are never the user's code.
_NOT_THE_USER = frozenset({"flatfsdp", "torch"})


def warn(message: str) -> None:
    """Warn with :class:`FlatFSDPWarning`, pointing at the nearest caller outside of flatfsdp and torch.

    Found by the frames' packages instead of a counted ``stacklevel``, which is wrong whenever a helper is added.
    """
    if _only_logs:
        logger.info("%s", message)
        return
    frame = outermost = sys._getframe()
    while frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USER:
        if frame.f_back is None:  # a thread of this package: there is no user frame
            frame = outermost
            break
        frame = frame.f_back
    try:
        warnings.warn_explicit(
            message,
            FlatFSDPWarning,
            filename=frame.f_code.co_filename,
            lineno=frame.f_lineno,
            module=frame.f_globals.get("__name__"),
            registry=frame.f_globals.setdefault("__warningregistry__", {}),
        )
    finally:
        # A frame that holds itself keeps every caller's locals alive, models included, until the collector runs.
        del frame, outermost


_only_logs = False


@contextmanager
def one_rank_warns(*, this_rank: bool) -> Iterator[None]:
    """A context for code that all ranks run alike: its warnings are shown if `this_rank` is true, else logged."""
    global _only_logs
    before, _only_logs = _only_logs, _only_logs or not this_rank
    try:
        yield
    finally:
        _only_logs = before


_warned: set[Hashable] = set()
_warned_of: weakref.WeakKeyDictionary[object, set[Hashable]] = weakref.WeakKeyDictionary()


def warn_once(key: Hashable, message: str) -> None:
    """:func:`warn`, at most once per ``key`` in this process: for warnings that would repeat at every step or unit."""
    if is_new(key):
        warn(message)


def is_new(key: Hashable, *, of: object = None) -> bool:
    """Whether this is the first call for ``key`` in this process, or for that of one object."""
    known = _warned if of is None else _warned_of.setdefault(of, set())
    if key in known:
        return False
    known.add(key)
    return True


class _AddRank(logging.Filter):
    """Gives each record a ``rank``, for formats such as ``"%(rank)s %(message)s"``."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = current_rank()
        return True


# Filters of a logger do not apply to its children: everything in flatfsdp logs to this one.
logger = logging.getLogger("flatfsdp")
logger.addHandler(logging.NullHandler())
logger.addFilter(_AddRank())
