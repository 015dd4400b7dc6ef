"""What ranks must have in common before a model's first iteration: its units, and the values that they begin with."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from ...api import MixedPrecision
from ...errors import AgreementError, few, one_voice, ranks_in_words, warn
from ..base.foreign_text import parse
from ..base.hashing import hash63
from ..comm.transport import Transport
from ..watchdog.watchdog import expecting
from .collective_calls import meet
from .op_sequence import Op, OpSequence
from .rank_exchange import NO_ANSWER, RankExchange

if TYPE_CHECKING:
    from ..runtime.model import Root


class Agreement(OpSequence):
    """One rank's side of the agreement of one model: what it is, what it begins with, and the order of what it does.

    Attributes:
        check_values: "warn", "raise" or "off": what becomes of ranks that begin from different values.
        values_differ: they did, and it was said.
    """

    def __init__(self, *, check_values: str) -> None:
        super().__init__()
        self.check_values = check_values
        self._values_due = check_values != "off"
        self.values_differ = False

    def compare(self, root: Root, *, training: bool) -> None:
        """Compare the units of all ranks, and with `training` the values they begin with. Collective over all axes.

        Raises:
            AgreementError: on every rank, naming the first difference.
        """
        self._over(_axes(root))
        if not self._axes:
            return
        self._flow(root)
        facts = describe(root)
        values = self._values(root) if training else []
        members = sorted({rank for axis in self._axes for rank in axis.group.ranks})
        with expecting(members, f"compares its model with that of ranks {', '.join(map(str, members))}"):
            _meet(self._axes)
            answers = self._exchange(_fingerprint(facts), hash63(str(values)) if values else 0)
        if answers is None:
            return
        watch = self._know(list(answers))
        self.unused.connect(
            self._rank, self.ranks, self._scope, watch, numbers=self._numbers, check=self._raise_verdict
        )
        watch.add(self, self.unused.publish_last_words)
        models = {rank: answer[0] for rank, answer in answers.items()}
        if len(set(models.values())) > 1:
            texts = self._publish(json.dumps(facts), models)
            self._fail(AgreementError(_first_difference({ranks: _facts(text) for ranks, text in texts.items()})))
        if training:
            self._judge_values(root, values, {rank: answer[1] for rank, answer in answers.items()})

    def compare_values(self, root: Root) -> None:
        """Compare the values that ranks began with, once. Collective over all axes at the first call, free after it."""
        if not self._values_due or not self._axes:
            return
        values = self._values(root)
        answers = self._exchange(hash63("values"), hash63(str(values)))
        if answers is not None:
            self._require_same({rank: answer[0] for rank, answer in answers.items()}, Op(0, "began to train"))
            self._judge_values(root, values, {rank: answer[1] for rank, answer in answers.items()})

    def numbers_of_ranks(self, code: int, extra: int) -> dict[int, tuple[int, int]]:
        """Every rank's two numbers; this rank's own where there is no other. Collective over all axes."""
        answers = self._exchange(code, extra) if self._axes else None
        return {self._rank: (code, extra)} if answers is None else answers

    def rows_of_ranks(self, row: Sequence[int]) -> dict[int, list[int]]:
        """Every rank's row of numbers, as many on each; this rank's own where there is no other. Collective over all
        axes."""
        block = torch.tensor([self._rank, *row], device=self._axes[0].device.device if self._axes else None)
        for axis in self._axes:
            block = axis.gather_now(block)
        return {rank: found for rank, *found in block.view(-1, len(row) + 1).tolist()}

    @property
    def compares_forwards(self) -> bool:
        """Whether all ranks run the same forwards; where nothing is sharded several need not."""
        return self._sharded or not self._axes

    def _values(self, root: Root) -> list[tuple[str, int | None]]:
        if not self._values_due:
            return []
        self._values_due = False
        out = []
        for unit in root.units:
            if unit.initial_checksums is not None:
                prefix = f"{unit.name}." if unit.name else ""
                out += [(prefix + path, value) for path, value in unit.initial_checksums.unchanged(unit.handles)]
                unit.initial_checksums = None
        return out

    def _judge_values(self, root: Root, values: list[tuple[str, int | None]], sums: dict[int, int]) -> None:
        if len(set(sums.values())) == 1 or 0 in sums.values():
            return  # equal, or a rank does not train: what it does instead is compared next
        # Ranks may merely hold different ones: now that all know it, each shows its own.
        block = torch.tensor([[value is not None, value or 0] for _, value in values], device=root.device.device)
        for axis in self._axes:
            block = axis.gather_now(block)
        block = block.view(len(sums), len(values), 2).cpu()
        held, found = block[..., 0].bool().all(0), block[..., 1]
        different = ((found != found[0]).any(0) & held).tolist()
        names = [path for (path, _), is_different in zip(values, different, strict=True) if is_different]
        if not names:
            return
        message = (
            f"ranks begin with different values of {len(names)} of {len(values)} parameters: {few(names)}. What they "
            "gather is pieced together from different models. Pass sync_module_states=True, give all ranks the same "
            'seed, or load a checkpoint before the first step; check_values="off" if it is meant'
        )
        self.values_differ = True
        if self.check_values == "raise":
            raise AgreementError(message)
        with one_voice(speaks=self.is_first):
            warn(message)


# A value that ranks must have in common: what it is of, the value, and whether the first has to be called the same.
# Parameters need not be: FSDP1 compares their order and shapes, and ranks that ignore different numbers of modules in a
# list count the others differently. Plain tuples: there are many.
Fact = tuple[str, str, bool]


def _compared(facts: Iterable[Fact]) -> list[tuple[str, str]]:
    return [(subject if named else "", value) for subject, value, named in facts]


def _fingerprint(facts: Iterable[Fact]) -> int:
    return hash63(json.dumps(_compared(facts)))


def compare_facts(axes: list[Transport], facts: Sequence[Fact], *, doing: str, reason: str | None = None) -> None:
    """Compare `facts`, in a fixed order, inside constructors. Collective over all axes.

    `doing` completes "rank 0 ..." while this rank waits for the others. `reason` is told with the first fact where
    ranks differ, and is not compared.

    Raises:
        AgreementError: on every rank, naming the first difference.
    """
    if not axes:
        return
    peers = RankExchange()
    peers._over(axes)
    (subject, value, named), *rest = facts
    members = sorted({rank for axis in axes for rank in axis.group.ranks})
    with expecting(members, doing):
        _meet(axes)
        answers = peers._exchange(_fingerprint(facts))
    if answers is not None and len({code for code, _ in answers.values()}) > 1:
        peers._know(list(answers))
        reported = [(subject, value if reason is None else f"{value}: {reason}", named), *rest]
        texts = peers._publish(json.dumps(reported), {rank: code for rank, (code, _) in answers.items()})
        peers._fail(AgreementError(_first_difference({ranks: _facts(text) for ranks, text in texts.items()})))


def _meet(axes: Sequence[Transport]) -> None:
    """Comparisons meet each other, be it in constructors or at the first forward. [Note: calls]"""
    for axis in axes:
        meet(axis.group.process_group, axis.group.ranks, "compares its model")


def _axes(root: Root) -> list[Transport]:
    """The axes over which the model is spread, each once."""
    found: dict[int, Transport] = {}
    for unit in reversed(root.units):
        for axis in (unit.scatter, unit.replicate):
            if axis is not None and axis.group.size > 1:
                found.setdefault(id(axis.group.process_group), axis)
    return list(found.values())


def describe(root: Root) -> list[Fact]:
    """All that the ranks of a model must have in common, in a fixed order."""
    facts = [("construction", "succeeded", True), ("check_values", root.agreement.check_values, True)]
    facts.append(("join_units_below", str(root.settings.join_units_below), True))
    places = {unit: str(place) for place, unit in enumerate(root.units)}
    for unit in root.units:
        subject = f"unit {unit.label}"
        groups = unit.groups
        facts += [
            (subject, f"of class {type(unit.module).__name__}", False),
            (f"{subject}, sharding_strategy", groups.strategy.name, False),
            (
                f"{subject}, ranks",
                f"{groups.shard.size} x {groups.replicate.size if groups.replicate is not None else 1}",
                False,
            ),
            (
                f"{subject}, use_orig_params",
                ", ".join(str(handle.use_orig_params) for handle in unit.handles[:1]),
                False,
            ),
            (f"{subject}, mixed_precision", _unlike_default(unit.mixed_precision), False),
            (f"{subject}, backward_prefetch", str(unit.backward_prefetch), False),
            (f"{subject}, forward_prefetch", str(unit.forward_prefetch), False),
            (f"{subject}, schedule", "; ".join(unit.options.describe()) or "as built", False),
            (
                f"{subject}, tied to units in places",
                ", ".join(places[owning_unit] for owning_unit in unit.owning_units),
                False,
            ),
        ]
        for handle in unit.handles:
            for spec, leaf in zip(handle.layout.params, handle.leaves, strict=True):
                dtype = str(handle.shard.dtype).removeprefix("torch.")
                grad = "requires_grad" if leaf.requires_grad else "no requires_grad"
                stride = "" if spec.stride is None else f" strides {spec.stride}"
                shape = f"{dtype} {spec.shape}{stride}, {grad}"
                facts.append((f"{subject}, parameter {spec.name}", shape, False))
    return facts


def _unlike_default(precision: MixedPrecision) -> str:
    plain = MixedPrecision()
    settings = [(field.name, getattr(precision, field.name)) for field in fields(precision)]
    return ", ".join(f"{name}={value}" for name, value in settings if value != getattr(plain, name)) or "none"


def _facts(text: str) -> list[Fact]:
    """The facts that a rank published as `text`; one without a value where it did not."""
    found = parse(text)
    rows = [row for row in found if isinstance(row, list) and len(row) == 3] if isinstance(found, list) else []
    return [(str(subject), str(value), bool(named)) for subject, value, named in rows] or [(NO_ANSWER, "", True)]


def _first_difference(reported: Mapping[tuple[int, ...], list[Fact]]) -> str:
    for rows in itertools.zip_longest(*reported.values(), fillvalue=("nothing more", "", True)):
        if len(set(_compared(rows))) > 1:
            break
    subjects = {subject for subject, _, _ in rows}
    together = len(subjects) == 1
    words = "; ".join(
        f"{ranks_in_words(ranks)}: {value if together else f'{subject} {value}'.strip()}"
        for ranks, (subject, value, _) in zip(reported, rows, strict=True)
    )
    place = f" in {subjects.pop()}" if together else ""
    return (
        f"ranks construct different models; the first difference is{place}: {words}. Build the same module with the "
        "same arguments of FullyShardedDataParallel on every rank"
    )
