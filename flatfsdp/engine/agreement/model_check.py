"""The comparison of ranks before a model's first iteration: of its units, and of their initial values.

[Note: parted streams] Chunks in shared memory are matched by their numbers alone. When ranks have diverged, one may
have issued collectives that others have not: a new model over their group would take one unit's chunks for another's
without an error. A bitmap of gradients, for which a rank does not wait ([Note: unused]), would meet any collective of
the others. So ranks compare what they have issued before a model first runs, and do so in the store: an exchange could
meet a bitmap. Models that had run fail with the one that diverged.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ...errors import AgreementError, by_ranks, few, one_rank_warns, ranks_in_words, warn
from ..base.foreign_text import parse
from ..base.hashing import hash63
from ..base.peers import Checksums, Fact
from ..comm.transport import Transport
from ..cpu.groups import issued_in
from ..transports.blocking import gather_now
from ..watchdog.regions import expecting
from .collective_calls import meet
from .object_collectives import ranks_over
from .rank_exchange import NO_ANSWER, RankExchange
from .unused_params import bitmaps_in

_PARTED = "ranks that have diverged before have issued different collectives since, or then: "


def _compared(facts: Iterable[Fact]) -> list[tuple[str, str]]:
    return [(subject if named else "", value) for subject, value, named in facts]


def _fingerprint(facts: Iterable[Fact]) -> int:
    return hash63(json.dumps(_compared(facts)))


def compare_facts(axes: list[Transport], facts: Sequence[Fact], *, doing: str, reason: str | None = None) -> None:
    """Compare `facts`, in a fixed order, inside constructors. Collective over all axes.

    `doing` completes "rank 0 ..." while this rank waits for the others. `reason` is not compared, and is reported with
    the first fact if ranks differ.

    Raises:
        AgreementError: on every rank, names the first difference.
    """
    if not axes:
        return
    peers = RankExchange()
    peers.spread_over(axes)
    answers = exchange_facts(peers, facts, doing=doing)
    if answers is not None and len({code for code, *_ in answers.values()}) > 1:
        peers.know(list(answers))
        (subject, value, named), *more = facts
        refuse_differences(peers, [(subject, value if reason is None else f"{value}: {reason}", named), *more], answers)


def exchange_facts(
    peers: RankExchange, facts: Sequence[Fact], *, doing: str = "", extra: int = 0, position: Sequence[int] = (0, 0, 0)
) -> dict[int, list[int]] | None:
    """Every rank's fingerprint of its `facts`, its `extra` number, and the `position` of its model; None with fake
    process groups. Collective over all axes."""
    members = ranks_over(peers.axes)
    with expecting(members, doing or f"compares its model with that of ranks {', '.join(map(str, members))}"):
        # One kind of meeting for comparisons in constructors and at the first forward. [Note: calls]
        parted = ""
        for axis in peers.axes:
            group = axis.group
            groups = {
                each.group.process_group: None for each in (axis, *peers.gathers) if each.group.ranks == group.ranks
            }
            issued = "; ".join(filter(None, [*map(issued_in, groups), bitmaps_in(group.process_group)]))
            # Ranks that have met nobody who diverged learn it along the next axis.
            found = meet(group.process_group, group.ranks, "compares its model", parted or issued)
            parted = parted or _difference(found)
        if parted:
            raise AgreementError(
                f"{parted}. The next ones would be matched with earlier ones of other ranks, and values mixed up. "
                "Create the process group again, use another one, or restart the program"
            )
        return peers.exchange(_fingerprint(facts), extra, *position)


def _difference(issued: Mapping[int, str]) -> str:
    """The collectives that ranks have `issued` in groups that all of them use, in words, if they differ; else "".
    Models that differ may use other groups."""
    if known := [text for text in issued.values() if text.startswith(_PARTED)]:
        return known[0]
    by_rank = {
        rank: {(each.split(" ")[1], each.partition(" in group ")[2]): each for each in text.split("; ") if each}
        for rank, text in issued.items()
    }
    common = set[tuple[str, str]].intersection(*map(set, by_rank.values())) if by_rank else set()
    texts = {rank: ", ".join(found[key] for key in sorted(common)) for rank, found in by_rank.items()}
    return f"{_PARTED}{by_ranks(texts, ': ')}" if len({*texts.values()}) > 1 else ""


def refuse_differences(peers: RankExchange, facts: Sequence[Fact], answers: Mapping[int, list[int]]) -> None:
    """If ranks differ by their `answers`, raise an AgreementError with the first of the `facts` in which they do."""
    codes = {rank: code for rank, (code, *_) in answers.items()}
    if len(set(codes.values())) > 1:
        texts = peers.publish(json.dumps([*facts]), codes)
        peers.fail_with(AgreementError(_first_difference({ranks: _facts(text) for ranks, text in texts.items()})))


class InitialValues:
    """The comparison of the initial values of all ranks.

    Attributes:
        check: the reaction to differences: "warn", "raise" or "off".
        due: whether values have yet to be compared.
        differ: whether they were found to differ, on all ranks.
    """

    def __init__(self, check: str) -> None:
        self.check = check
        self.due = check != "off"
        self.differ = False

    def take(self, checksums: Callable[[], Checksums]) -> Checksums:
        """This rank's `checksums` at the first call; none later, or if nothing is compared."""
        if not self.due:
            return []
        self.due = False
        return checksums()

    def compare(self, peers: RankExchange, own: Checksums, sums: Mapping[int, int]) -> None:
        """Compare ranks by `sums`, hashes of their checksums. Collective over all axes if they differ.

        Raises:
            AgreementError: they differ, and `check` is "raise"; on every rank.
        """
        if len(set(sums.values())) == 1 or 0 in sums.values():
            return  # equal, or a rank does not train: its op is compared next
        # Values of different parts may differ legitimately: all ranks know of it, and exchange all checksums.
        axes = peers.axes
        entries = [[value is not None, value or 0, peers] for _, value, peers in own]
        block = torch.tensor(entries, device=axes[0].device.device)
        for axis in axes:
            block = gather_now(axis, block)
        names = [own[index][0] for index in _differing(block.view(-1, len(own), 3).cpu())]
        if names:
            self.differ = True
            self.report(
                peers,
                f"ranks begin with different values of {len(names)} of {len(own)} parameters: {few(names)}. Gathered "
                "parameters consist of pieces of different models. Pass sync_module_states=True, give all ranks the "
                'same seed, or load a checkpoint before the first step; check_values="off" if this is intentional',
            )

    def report(self, peers: RankExchange, message: str) -> None:
        """Raise or warn, depending on `check`, that ranks have different values; called on all ranks."""
        if self.check == "raise":
            raise AgreementError(message)
        with one_rank_warns(this_rank=peers.is_first):
            warn(message)


def _differing(block: torch.Tensor) -> list[int]:
    """The indices of parameters whose checksums differ on ranks that must have equal values, without parameters that
    were written to. `block` is indexed by rank and parameter."""
    held, found, peers = block[..., 0].bool(), block[..., 1], block[..., 2]
    different = torch.zeros(block.shape[1], dtype=torch.bool)
    for each in peers.unique():
        others = peers != each
        least = found.masked_fill(others, torch.iinfo(found.dtype).max).amin(0)
        most = found.masked_fill(others, torch.iinfo(found.dtype).min).amax(0)
        different |= (least != most) & (held | others).all(0) & ~others.all(0)
    return different.nonzero().flatten().tolist()


def _facts(text: str) -> list[Fact]:
    """The facts that a rank published as `text`; a single one without a value if it did not publish any."""
    found = parse(text)
    facts = [each for each in found if isinstance(each, list) and len(each) == 3] if isinstance(found, list) else []
    return [(str(subject), str(value), bool(named)) for subject, value, named in facts] or [(NO_ANSWER, "", True)]


def _first_difference(reported: Mapping[tuple[int, ...], list[Fact]]) -> str:
    for facts in itertools.zip_longest(*reported.values(), fillvalue=("nothing more", "", True)):
        if len(set(_compared(facts))) > 1:
            break
    subjects = {subject for subject, _, _ in facts}
    together = len(subjects) == 1
    words = "; ".join(
        f"{ranks_in_words(ranks)}: {value if together else f'{subject} {value}'.strip()}"
        for ranks, (subject, value, _) in zip(reported, facts, strict=True)
    )
    where = f" in {subjects.pop()}" if together else ""
    return (
        f"ranks construct different models; the first difference is{where}: {words}. Build the same module with the "
        "same arguments of FullyShardedDataParallel on every rank"
    )
