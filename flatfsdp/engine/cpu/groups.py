"""The choice of process groups that share memory: all of their ranks support it, and none has switched it off."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch

from ...api import check_bool
from ..base.overrides import Override, is_memoryless
from ..base.per_group import for_group, known_for_group
from ..comm.axes import Axis
from .bell import SIZE as BELL_SIZE
from .bell import own_bell
from .collectives import LARGE, choose_early_waits, is_waited_for_early
from .exchange import CAPACITY, CONTROL, SharedMemory
from .peers import connect_peers, obstacle
from .segments import MemorySegment, create

logger = logging.getLogger(__name__)

MOST_RANKS = 8  # the most that was measured
_KEY = "shared memory"  # of the state of a process group
_ONLY_REDUCES = "only reduces"  # the key of that mark of one

_wanted = True
_reasons: dict[str, str] = {}  # reasons why process groups of this process share no memory, and the first such group

_over_gloo = Override(False)
# A context in which transports use gloo even if groups could share memory: for tests of gloo.
over_gloo = functools.partial(_over_gloo.being, True)


def share_host_memory(enabled: bool | None = True, *, early_waits: bool | None = None) -> str:
    """Choose whether ranks on one host exchange parameters and gradients through shared memory; by default they do if
    they can.

    It applies to tensors on the CPU, in process groups of gloo of at most 8 ranks, all on one host with Linux on
    x86-64. Otherwise, or if one rank cannot share memory or has turned it off, all ranks of the group use gloo, and the
    reason is logged at level DEBUG. Results are bitwise identical. Each rank uses up to 4 MiB for a process group in
    which parameters are gathered, and 2 MiB for one in which gradients are reduced. This memory is freed after 0.2
    seconds without exchanges, and at the beginning of a backward that gathers nothing (`SHARD_GRAD_OP`), unless
    `retain_host_memory()` was called.

    Such an exchange makes progress while ranks wait, not while they compute. Therefore a reduction for which a rank
    sends at least 1 MiB is waited for where it is issued, and the peak of a step is lower by one unit's gradients. This
    does not apply to units for which `backward_prefetch` was passed, even if its value is the default. `summary(model)`
    shows for how many units reductions are waited for early.

    Call it on every rank, before the first forward: it does not change a process group that has been used. Not
    collective.

    Args:
        enabled: False to use gloo for everything; None to change nothing.
        early_waits: False to wait for all reductions as late as with gloo; effective from the next backward on, with
            the same results. None to change nothing.

    Returns:
        The reason why this process cannot share memory; "" if it can. If `enabled` is None, also the reasons why
        process groups of this process do not share memory.

    Raises:
        ConfigTypeError: `enabled` or `early_waits` is not a bool.

    Example:
        >>> import flatfsdp
        >>> obstacle = flatfsdp.share_host_memory(False)
        >>> obstacle = flatfsdp.share_host_memory()  # back to the default
    """
    global _wanted
    for name, value in (("enabled", enabled), ("early_waits", early_waits)):
        if value is not None:
            check_bool(f"share_host_memory: {name}", value)
    if enabled is not None:
        _wanted = enabled
    if early_waits is not None:
        choose_early_waits(early_waits)
    groups = "; ".join(f"in process group {group}: {why}" for why, group in _reasons.items())
    return obstacle() or (groups if enabled is None else "")


def mark_for_reductions(process_group: Any) -> None:
    """Only gradients are exchanged in `process_group`."""
    for_group(process_group, _ONLY_REDUCES, lambda: True)


def capacity_of(process_group: Any) -> int:
    """Bytes of an outbox of `process_group`, the same on all ranks.

    Where only gradients are exchanged it may be small: reductions from `LARGE` on are waited for at once, so they need
    not fit as a whole, unlike shards that are prefetched.
    """
    only_reduces = known_for_group(process_group, _ONLY_REDUCES, bool)
    return 2 * LARGE if only_reduces else CAPACITY


def of_group(process_group: Any) -> SharedMemory | None:
    """The shared memory of `process_group`, if it has some. Collective over the group at its first call."""
    if _over_gloo.value:
        return None  # without communication

    def make() -> SharedMemory | None:
        if (ranks := process_group.size()) > MOST_RANKS:  # without communication, too
            shared, why = None, f"it has {ranks} ranks, and at most {MOST_RANKS} can share memory"
        else:
            shared, why = connect(process_group, capacity=capacity_of(process_group))
        if shared is None:
            _reasons.setdefault(why, process_group.group_name)
            logger.debug("process group %s does not share memory: %s", process_group.group_name, why)
        return shared

    return for_group(process_group, _KEY, make)


def shares(process_group: Any) -> bool | None:
    """Whether the ranks of `process_group` share memory; None before they have exchanged anything. Not collective."""
    if process_group.size() > MOST_RANKS or _over_gloo.value:
        return False
    known: bool | None = known_for_group(process_group, _KEY, lambda shared: shared is not None)
    return known


def issued_in(process_group: Any) -> str:
    """The chunks that this rank has issued through the shared memory of `process_group`, in words; "" if it has none.
    Not collective."""
    position = known_for_group(process_group, _KEY, lambda shared: shared and shared.position)
    return f"{position[0]} chunks up to byte {position[1]} in group {process_group.group_name}" if position else ""


def would_share(process_group: Any) -> bool:
    """Whether a dry run assumes that the ranks of `process_group` will share memory: they may be on one host."""
    could = process_group.size() <= MOST_RANKS and not _over_gloo.value
    return could and _wanted and not obstacle()


def waits_early(group: Axis, device: torch.device, sent: int) -> bool | None:
    """Whether a reduction over `group`, on `device`, for which a rank sends so many bytes is waited for early; None if
    the group's first exchange will decide. No communication. [Note: in waits]"""
    if group.served_as != "gloo" or device.type != "cpu" or not is_waited_for_early(sent):
        return False
    known = shares(group.process_group)
    if known is None and would_share(group.process_group):
        return True if is_memoryless() else None
    return bool(known)


def connect(process_group: Any, *, capacity: int = CAPACITY) -> tuple[SharedMemory | None, str]:
    """Make the shared memory of `process_group`; or None and the reason. Collective over the group.

    All ranks return the same reason.
    """
    why = obstacle() if _wanted else "share_host_memory(False) was called"
    outbox, own, descriptors = None, -1, []
    try:
        if not why:
            own = create(CONTROL + capacity)
            outbox = MemorySegment(own, CONTROL + capacity)
            descriptors = [own, (bell := own_bell()).descriptor]
    except OSError as error:
        why = f"cannot create shared memory: {error}"
    try:
        peers, why = connect_peers(process_group, descriptors, (CONTROL + capacity, BELL_SIZE), why)
    finally:
        if own >= 0:
            os.close(own)
    if not peers or outbox is None:
        return None, why
    return SharedMemory(process_group, peers, outbox, bell), ""
