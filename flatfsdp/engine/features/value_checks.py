"""Comparisons of the values of parameters between ranks, attached to models: initial values, and those of replicas.

[Note: replicas] Ranks along the replicate axis hold bitwise equal pieces, at the beginning and, since their gradients
are equal, after every step. Differences (a checkpoint that one rank did not load, a write on one rank) persist, and
nothing else would show them. Checksums of each rank's pieces are exchanged as one number, and one by one only if those
differ; before the first training step, and once in `EVERY` backwards that reduce.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from ...errors import AgreementError, few, ranks_by_value, ranks_in_words
from ..agreement.agreement import Agreement, agreement_of
from ..agreement.checksums import InitialChecksums, checksum
from ..agreement.rank_exchange import RankExchange
from ..base.events import Observer
from ..base.hashing import hash63
from ..base.peers import Checksums
from ..models.introduction import own_pieces
from ..models.rest import check_outside, outermost_model, quiesce, take_over
from ..models.spread import all_part_axes, apart, beside
from ..runtime.model import Model, model_of
from ..runtime.unit import Unit

EVERY = 1000

# The ranks that hold the same piece of a parameter, the parameter's path, and the checksum of this rank's piece.
Replicated = tuple[Sequence[int], str, int]


class ValueChecks(Observer):
    """The comparisons of one model that has not trained yet: of its initial values, and of replicas when all ranks are
    known to train.

    Attributes:
        initial: the checksums of parameters before they were sharded, until they are compared.
    """

    def __init__(self, model: Model, agreement: Agreement) -> None:
        self.initial: dict[Unit, InitialChecksums] = {}
        self._model, self._agreement = weakref.ref(model), agreement
        model.setup.checksums = self.checksums

    def checksums(self) -> Checksums:
        """Checksums of the initial values of units that were not written to, once. Ranks that store other parts, or
        have parameters of their own, may have different ones. [Note: parameters apart]"""
        units, out = _units_of(self._model), list[tuple[str, int | None, int]]()
        parts, own = all_part_axes(units), {handle for _, handle in apart(units)}
        for unit in units:
            if (each := self.initial.pop(unit, None)) is not None:
                peers: dict[str, int] = {}
                for handle in [handle for handle in unit.handles if handle.has_memory]:
                    coordinates = [axis.group.rank for axis in beside(unit.axes.of(handle), parts)]
                    coordinates += unit.axes.of(handle).shard.ranks if handle in own else ()
                    peers.update(dict.fromkeys((spec.name for spec in handle.layout.params), hash63(str(coordinates))))
                values = each.unchanged(list(peers), own_pieces(unit))
                out += [(unit.entries.fqn(path), value, peers[path]) for path, value in values]
        return out

    def first_gather_agreed(self) -> None:
        """Ranks run the same forward: if it is a training one, all begin to train. Collective over all axes."""
        if torch.is_grad_enabled() and self._agreement.compares_forwards:
            self._compare_replicas()

    def backward_agreed(self, *, reduces: bool) -> None:
        """Where ranks may run different forwards, all have begun to train. Collective over all axes."""
        self._compare_replicas()

    def _compare_replicas(self) -> None:
        model = self._model()
        assert model is not None
        again = _RepeatedChecks(self._model, self._agreement)
        if found := again.compare():
            again.report(found)
        elif any(groups.replicate is not None for unit in model.units for groups in unit.axes.all):
            model.observers.add(again)
        model.observers.remove(self)


class _RepeatedChecks(Observer):
    """Comparisons of replicas, which were equal before, in one of `EVERY` backwards that reduce."""

    def __init__(self, model: weakref.ref[Model], agreement: Agreement) -> None:
        self._model, self._agreement = model, agreement
        self._due = EVERY

    def backward_agreed(self, *, reduces: bool) -> None:
        """Collective over all axes if a comparison is due."""
        if reduces:
            self._due -= 1
            if self._due == 0 and all(map(_stays_alike, _units_of(self._model))):
                if found := self.compare():  # reported once
                    self.report(f"{found}. They were the same {EVERY:,} backwards before")
                else:
                    self._due = EVERY

    def compare(self) -> str:
        """`differences` of the units. Collective over all axes."""
        return differences(self._agreement.peers, _replicated_pieces(_units_of(self._model)))

    def report(self, found: str) -> None:
        """Report what was `found`, according to `check_values`; on all ranks."""
        if not self._agreement.initial_values.differ:  # else it was reported, for all ranks
            self._agreement.initial_values.report(self._agreement.peers, found)


def _units_of(model: weakref.ref[Model]) -> Sequence[Unit]:
    found = model()
    return found.units if found is not None else ()


def check_values_of(model: Model, nested: Sequence[Unit]) -> None:
    """Compare the values of `model`, which is new, according to its argument `check_values`. `nested`: units that it
    will take over, and whose models may have yet to compare theirs."""
    agreement = agreement_of(model.agreement)
    if agreement.initial_values.check != "off":
        checks = ValueChecks(model, agreement)
        model.observers.add(checks)
        for unit in nested:
            before = model_of(unit).observers.find(ValueChecks)
            if before is not None and unit in before.initial:
                checks.initial[unit] = before.initial.pop(unit)


def _replicated_pieces(units: Sequence[Unit]) -> list[Replicated]:
    """For each parameter with replicas, the ranks that hold the same piece, and this rank's checksum of it; 0 without a
    piece."""
    listed: list[Replicated] = []
    for unit in units:
        if all(groups.replicate is None for groups in unit.axes.all):
            continue
        pieces = own_pieces(unit)
        for handle in unit.handles:
            if (replicate := unit.axes.of(handle).replicate) is not None:
                for spec in handle.layout.params:
                    own = checksum(pieces[spec.name]) if spec.name in pieces else 0
                    listed.append((replicate.ranks, unit.entries.fqn(spec.name), own))
    return listed


def _stays_alike(unit: Unit) -> bool:
    """Whether replicas of `unit` get the same gradients: a user-defined hook instead of the all-reduce need not ensure
    that."""
    hook = unit.options.comm_hook
    return hook is None or unit.groups.shard.size > 1 or hook.alike


def differences(peers: RankExchange, listed: Sequence[Replicated]) -> str:
    """The parameters and ranks for which replicas differ, in words; "" for none. Collective over all axes."""
    if not listed:
        return ""
    sums = [checksum for _, _, checksum in listed]
    replicas = hash63(str([list(ranks) for ranks, _, _ in listed]))  # equal on ranks with the same replicas
    answers = peers.numbers_of_ranks(replicas, hash63(str(sums)))
    groups = ranks_by_value({rank: answers[rank][0] for rank in sorted(answers)})
    if all(len({answers[rank][1] for rank in ranks}) == 1 for ranks in groups.values()):
        return ""
    found = peers.numbers_of_ranks(replicas, *sums)
    different: dict[str, list[list[int]]] = {}  # groups of equal ranks, by name
    for ranks in groups.values():
        for (_, name, _), *totals in zip(listed, *(found[rank][1:] for rank in ranks), strict=True):
            alike = ranks_by_value(dict(zip(ranks, totals, strict=True)))
            if len(alike) > 1:
                different.setdefault(name, list(alike.values()))
    first, *more = [name for _, name, _ in listed if name in different]
    return (
        f"replicas differ in {len(different)} of {len(listed)} parameters: {few([first, *more])}. {first!r} is one on "
        f"{', another on '.join(map(ranks_in_words, different[first]))}. Gradients are averaged over replicas as if "
        "they were one model. Load the same checkpoint on all ranks, and write the same values to parameters on all of "
        "them"
    )


def check_replicas(model: nn.Module) -> None:
    """Compare the parameters of ranks that hold the same pieces: replicas of the hybrids, all ranks under `NO_SHARD`.

    They must be bitwise equal. The checksums of each rank's shards are compared. The first training forward compares
    them, too, and then every thousandth backward that reduces; both report differences according to `check_values`.
    Without replicas nothing is compared. Collective, between iterations: one number per rank, and one per parameter
    if those differ.

    Args:
        model: the outermost wrapper.

    Raises:
        AgreementError: on every rank, with the first parameter that differs, and on which ranks.
        ConfigTypeError: `model` is no wrapper.
        UsageError: `model` is a nested wrapper; inside a forward or a backward.
    """
    root = outermost_model(model, "check_replicas")
    check_outside(root.outermost, "check_replicas()")
    quiesce(root.units, shards=False)
    take_over(root.units)
    with root.agreement.collective_call("check_replicas()", always=True):
        found = differences(agreement_of(root.agreement).peers, _replicated_pieces(root.units))
    if found:
        raise AgreementError(found)
