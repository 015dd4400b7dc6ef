"""Which flat parameters of a model are residents, and when they are gathered anew. [Note: residents]"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ...errors import UsageError
from ..flat.flat_param import FlatParamHandle
from ..flat.host_cache import DEVICE, HOST, ParamPersistence
from ..flat.states import UNSHARDED
from ..flat.views import SHARD
from .unit import Unit

if TYPE_CHECKING:
    from .model import Root


class HandleRef(NamedTuple):
    """One handle of a unit."""

    unit: Unit
    kind: int

    @property
    def handle(self) -> FlatParamHandle:
        """What is a resident, or not."""
        return self.unit.handles[self.kind]

    @property
    def stays(self) -> bool:
        """Whether it is a resident."""
        return self.handle.residence is not None

    @property
    def is_fetched(self) -> bool:
        """Whether it is where it stays, in the dtype of computation."""
        handle, dtype = self.handle, self.unit.dtype_of(self.handle)
        if handle.residence is HOST:
            return handle.host_copy is not None and handle.host_copy.dtype == dtype
        return handle.state is UNSHARDED


class PersistentParams:
    """The residents of one model.

    Attributes:
        lent: those for the time of an `inference()`, None outside of one.
    """

    def __init__(self) -> None:
        self._meant: list[HandleRef] | None = None  # of units that keep what is frozen; None to be found anew
        self._due: list[HandleRef] = []
        self._doubtful: list[HandleRef] = []
        self.lent: list[HandleRef] | None = None

    def choices_changed(self) -> None:
        """What users chose for a unit was changed."""
        self._meant = None

    def follow(self, units: Iterable[Unit]) -> str:
        """A forward begins: who is a resident, and what of them has to be gathered, in words that are equal on all
        ranks; "" where all is as it is meant to be.

        Raises:
            UsageError: inside `inference()`, where nothing is gathered again.
        """
        if self._meant is None:
            self._meant = [
                HandleRef(unit, kind)
                for unit in units
                if unit.choices.schedule.keep_frozen is not None
                for kind in range(len(unit.handles))
            ]
        self._due, self._doubtful = [], []
        if self.lent is not None:
            self._check_lent(self.lent)
        told: dict[str, list[str]] = {}
        for place in self._meant:
            unit, handle = place.unit, place.handle
            if self.lent is not None and place in self.lent:
                continue
            wanted = residence_of(unit, handle)
            if handle.residence is not wanted:
                unit.evict(place.kind)
                handle.residence = wanted
            if wanted is None:
                if not handle.trainable:
                    told.setdefault("not frozen any more", []).append(unit.label)
            elif unit.shown[place.kind].exposure is not SHARD:
                continue
            elif unit.doubtful:
                self._doubtful.append(place)
                told.setdefault("asking whether what is kept was written to", []).append(unit.label)
            elif not place.is_fetched:
                self._due.append(place)
                told.setdefault("gathering what is frozen, to keep it", []).append(unit.label)
        return "; ".join(f"{words}: {', '.join(labels)}" for words, labels in told.items())

    def fetch(self, root: Root) -> None:
        """Gather what `follow` found. Collective over the shard axis if it found anything."""
        due, doubtful = self._due, self._doubtful
        self._due, self._doubtful = [], []
        if doubtful and root.agreement.any_rank(not all(place.is_fetched for place in doubtful)):
            for place in doubtful:
                place.unit.evict(place.kind)
            due = [*due, *doubtful]
        for place in doubtful:
            place.unit.doubtful = False
        for place in due:
            place.unit.fetch(place.kind)

    def lend(self, root: Root, places: Iterable[HandleRef]) -> None:
        """Let `places` be residents of the device, for a while. Collective over the shard axes.

        Precondition: at rest.
        """
        self.lent = list(places)
        if root.agreement.any_rank(any(not place.is_fetched for place in self.lent if place.stays)):
            for place in self.lent:
                place.unit.evict(place.kind)
        for place in self.lent:
            handle = place.handle
            handle.residence = DEVICE
            if not place.is_fetched:
                place.unit.fetch(place.kind)

    def return_lent(self, root: Root) -> None:
        """End of `lend`: parameters rest as they did before. Precondition: at rest."""
        lent, self.lent = self.lent or [], None
        for place in lent:
            handle = place.handle
            handle.residence = residence_of(place.unit, handle)
            if handle.residence is not DEVICE and handle.state is UNSHARDED:
                root.free(handle)

    def _check_lent(self, lent: Iterable[HandleRef]) -> None:
        for place in lent:
            if not place.is_fetched:
                raise UsageError(
                    f"inside inference() parameters of unit {place.unit.label} were written to, or its module went "
                    "from train() to eval() or back, which has them computed with in another dtype. What is kept is "
                    "not gathered again there: leave the context first, and enter it anew"
                )


def can_stay(handle: FlatParamHandle) -> bool:
    """Whether `handle` is frozen and worth keeping; a shard that is the whole is there anyway."""
    return handle.is_frozen and not handle.is_shard_in(handle.precision.compute)


def residence_of(unit: Unit, handle: FlatParamHandle) -> ParamPersistence | None:
    """Where `handle` stays by what was chosen for its `unit`."""
    where = unit.choices.schedule.keep_frozen
    return ParamPersistence(where) if where is not None and can_stay(handle) else None


def keep_frozen(unit: Unit, where: str | None) -> None:
    """Let frozen parameters of `unit` stay there from now on, or nowhere; what stayed elsewhere is freed."""
    unit.evict_all()
    unit.choose_schedule(keep_frozen=where)
    for handle in unit.handles:
        handle.residence = residence_of(unit, handle)
