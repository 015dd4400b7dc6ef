"""`survive`: steps that outlive the loss of ranks.

[Note: survival] A loss ends the step on all survivors, wherever they are in it: the watch of each breaks the
connections to the others, and lets everything that waits for them raise. The `with` of the step swallows that.
Survivors agree on who goes on and on the last version that all of them have complete ([Note: epochs], [Note: two
versions]), make process groups anew, read what the lost ones have left ([Note: blocks of a machine]) or rebuild it
([Note: parity]), and the model moves to the ranks that are left, and to those that join ([Note: joining]). The same
step is handed out again. Another loss in the meantime begins that anew, from the same version: it is dropped only when
the next one is complete in the new epoch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.saving import latest
from ..engine.agreement.collective_calls import forget_calls
from ..engine.agreement.process_groups import Connecting, with_time_limit
from ..engine.base import _torch
from ..engine.base.plain_data import encode
from ..engine.cpu.exchange import give_up_all
from ..engine.models.rest import abandon
from ..engine.models.walks import units_in
from ..engine.watchdog.process_exit import print_immediately
from ..engine.watchdog.regions import current_watch
from ..engine.watchdog.watchdog import Watchdog
from ..errors import (
    AgreementError,
    AuditError,
    FencedError,
    LostRankError,
    UsageError,
    refuse_type,
    refuse_value,
    set_rank,
)
from . import connections, joining, own_state
from .api import NoValuesError, regroup
from .beginning import base_of, checked, own_host
from .connections import Connection
from .exchange import EpochRanks
from .inventory import Inventory
from .job import Job
from .keeper import Keeper
from .neighbors import Neighbors
from .own_state import Stateful

NOTICED = 5.0  # seconds in which a broken connection is explained by a loss
CONNECTED = 30.0  # seconds in which the ranks of a new group are connected, at the first try; gloo waits for a multiple
TRIES = 4  # to connect the same ranks, each in twice the time of the one before


def survive(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: int | range,
    state: Mapping[str, Stateful] = MappingProxyType({}),
    every: int = 1,
    group: int = 4,
    least_ranks: int = 1,
    lost_after: float = 60.0,
    before_change: Callable[[], object] = lambda: None,
) -> Iterator[Step]:
    """Steps that outlive the loss of ranks: the others go on with the same step, without a restart.

        for step in survive(model, optimizer, steps=1000, state={"scheduler": scheduler}):
            with step:
                train(step.number)

    Each rank keeps copies of its own state in host memory, which others of its machine can read when it has ended
    ([Note: blocks of a machine]), and a parity of that of ranks on other machines ([Note: parity]), refreshed after a
    step. When a rank is lost (killed, by an exception, with its connections, or without a sign of life for
    `lost_after` seconds), the `with` of all others swallows the errors that follow. They make the process groups anew,
    go back to the last copy, rebuild the state of the lost rank, divide it among them, and the loop hands out the step
    after that copy again. Get the rank and the number of ranks from `torch.distributed` in each step, and deal out the
    data by them.

    Collective over the default process group, when the loop begins and at each refresh.

    Args:
        model: the outermost module of a model that is sharded over all ranks, over gloo, at rest. A hybrid
            strategy keeps its number of shards if that divides the number of ranks that are left; it takes the next
            larger number that does otherwise.
        optimizer: that of the model.
        steps: how many, or a range of their numbers, whose step is 1.
        state: what else goes back with them: objects with ``state_dict()``, of plain data and tensors, and
            ``load_state_dict()``. Random numbers of Python, torch and numpy are included.
        every: steps from one refresh to the next; so many are taken again after a loss at most.
        group: ranks of different machines that keep one another's state, two at least, and all machines at most. Larger
            groups need less memory for the parity (an (n - 1)-th of the state for n ranks), and can lose one machine
            between two refreshes, as any. Where there are several replicas, these keep one another's state instead.
        least_ranks: with fewer ranks, which the model may not fit on, the job ends.
        lost_after: seconds without a sign of life after which a rank counts as lost; after a loss also the seconds in
            which the others have to leave their step. It is fenced then: when it goes on, it raises `FencedError` in
            its step.
        before_change: called after a loss, when all ranks have left the step, before the process groups are destroyed:
            to end what refers to the present ranks, as an `Audit`, or a save in the background. Not collective.

    Yields:
        `Step`: to be entered by `with`.

    Raises:
        ConfigTypeError, ConfigValueError: an argument is not accepted; or the store of the process group is not a
            TCPStore.
        UsageError: a rank serves the store of the process group, so that its loss would be that of the job; or the
            model is not sharded over all ranks.
        LostRankError: on all survivors, with the name of the last checkpoint: two ranks of one group are lost, one of
            them with all ranks of its machine, or the machines of all that had some shard, or too few are left.
        FencedError: the others have gone on without this rank.
    """
    if isinstance(steps, int) and not isinstance(steps, bool):
        steps = range(steps)
    if not isinstance(steps, range):
        refuse_type("survive: steps", steps, "a number of steps, or a range")
    if steps.step != 1:
        refuse_value("survive: steps", steps, "a range whose step is 1")
    for name, value, least in (("every", every, 1), ("group", group, 2), ("least_ranks", least_ranks, 1)):
        if type(value) is not int or value < least:
            refuse_value(f"survive: {name}", value, f"an integer of at least {least}")
    if not lost_after > 0:
        refuse_value("survive: lost_after", lost_after, "a number of seconds greater than 0")
    if not isinstance(state, Mapping):
        refuse_type("survive: state", state, "a mapping of names to objects with state_dict() and load_state_dict()")
    options: dict[str, Any] = {"every": every, "group": group, "least_ranks": least_ranks, "lost_after": lost_after}
    return iter(Survival(model, optimizer, steps, state, before_change=before_change, **options))


class Survived(NamedTuple):
    """A change of the ranks of the job that this process has been through.

    Attributes:
        step: the number of the step with which the job went on.
        lost: the numbers of the lost processes, their ranks when the job began, each with words that follow "rank 3 ".
        ranks: how many there are now.
        seconds: from the error in the step, or from when the others met those that joined, until the job went on.
        joined: the numbers of the processes that joined: those that follow.
    """

    step: int
    lost: Mapping[int, str]
    ranks: int
    seconds: float
    joined: tuple[int, ...] = ()


class Step:
    """One step, whose `with` swallows a loss.

    Attributes:
        number: of the step; the same again after a loss.
        completed: whether its `with` came to its end, without a loss. A completed step is taken again, too, if a rank
            is lost before the next refresh is complete on all ranks.
        survived: the losses that this process has survived so far, in this loop, and the joins.
    """

    completed = False

    def __init__(self, survival: Survival, number: int) -> None:
        self.number = number
        self._survival = survival
        self.survived = (*survival.survived,)
        self.left = False

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.left = True
        swallowed = self._survival.leave(self.number, error)
        self.completed = error is None and not swallowed
        return swallowed


class Survival:
    """The steps of one `survive`, on this rank.

    [Note: versions of two epochs] The first refresh of an epoch ends on one rank, and fails on another, if a third is
    lost just then. So each keeps the versions of the epoch before, too, until a second refresh is complete: then the
    first one is on all ranks. A version has the number of its epoch, and survivors go back to one that all of them
    have.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        steps: range,
        state: Mapping[str, Stateful],
        *,
        every: int,
        group: int,
        least_ranks: int,
        lost_after: float,
        before_change: Callable[[], object],
    ) -> None:
        self.survived: list[Survived] = []
        self._before_change = before_change
        self._model, self._optimizer = model, optimizer
        self._steps, self._state = steps, state
        self._every, self._group, self._least, self._lost_after = every, group, least_ranks, lost_after
        self._next = steps.start
        self._refreshing: Future[bool] | None = None
        self._some_join = False  # whether the last refresh has found any that wait to join, on any rank
        self._joins = False  # whether this process is one
        self._recovers = False  # whether it has left its step because of a loss
        # The connection to the store by which the groups of this epoch wait for each other while they are made.
        self._forming: frozenset[Connection] = frozenset()
        self._switching = threading.Lock()  # held while waits are broken, and while they become those of another epoch
        self._executor = ThreadPoolExecutor(1, "flatfsdp parity")
        self._inventory = Inventory(model, optimizer)

    def __iter__(self) -> Iterator[Step]:
        self._begin()
        try:
            while self._next < self._steps.stop:
                step = Step(self, self._next)
                yield step
                if not step.left:
                    raise UsageError(
                        "survive: take each step inside of its `with`: for step in survive(...): with step:"
                    )
        finally:
            self._end()

    # -- the beginning and the end -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._replicas = checked(self._model)
        self._backend = dist.get_backend(dist.group.WORLD)
        self._limit = _torch.time_limit(dist.group.WORLD)
        self._watch: Watchdog = current_watch()
        self._base, self._name = base_of(dist.group.WORLD)
        host, port = self._base.host, self._base.port
        world = dist.get_world_size()
        settings = {"steps": self._steps, "every": self._every, "group": self._group, "lost_after": self._lost_after}
        facts = joining.facts_of(self._model, self._optimizer, {**settings, "state": sorted(self._state)})
        name = joining.TO_JOIN.pop(dist.group.WORLD, None)
        self._joins, self._name = name is not None, name or self._name
        notes = joining.notes_of(self._base, self._name)
        own, members = dist.get_rank(), range(world)
        if self._joins:
            (own, self._replicas.least), members = joining.new_number(notes, facts), range(0)
        self._job = Job(notes, own, members, lost_after=self._lost_after, on_loss=self._break)
        self._port = port
        self._ports: set[int] = set()  # of the connections to neighbors
        self._neighbors = Neighbors(
            own,
            own_host(host, port),
            lost_after=self._lost_after,
            gone=self._job.is_gone,
            news=self._job.learn,
            beat=self._break_again,
        )
        self._job.publish("address", self._neighbors.address)
        self._published: Set[Connection] = frozenset()
        self._kept: list[Keeper] = []  # by epoch: the present one is the last
        if self._joins:
            self._join()
            return
        if own == 0:
            joining.announce(self._base, self._name, world, facts, self._replicas.least)
        self._meet(self._job.members)
        self._refresh(self._next, in_background=False)

    def _join(self) -> None:
        """Become a member, at a boundary of steps. [Note: joining]"""
        began = time.monotonic()
        try:
            offers = self._job.join(self.reach, self._limit)
            self._next, before = self._recovered(LostRankError("while it joined"), offers)
        except BaseException as error:
            self._job.report(self._job.own, f"failed to join, with {type(error).__name__}: {error}")
            self._end()
            raise
        self._joins = False
        now = self._change(before, began)
        self.survived.append(now)
        print_immediately(
            f"[flatfsdp, rank {dist.get_rank()}] joins, as one of {now.ranks} ranks, with step {now.step}, after "
            f"{now.seconds:.2f} s"
        )

    def reach(self) -> bool:
        """Be connected to members, which learn by that that this process joins; returns whether it is."""
        members, addresses = {*self._job.members}, dict[int, Any]()
        for number in self._job.members if not self._neighbors.known & members else ():
            addresses = addresses or self._addresses()
            with contextlib.suppress(LostRankError):  # the others find out
                self._neighbors.connect((number, self._job.own), addresses)
            if len(self._neighbors.known & members) == 2:
                break
        return bool(self._neighbors.known & members)

    def _joining(self) -> set[int]:
        """The processes that are connected to this one, and no members: they join."""
        return self._neighbors.known - {*self._job.members} - self._job.lost.keys()

    def _addresses(self) -> dict[int, Any]:
        addresses: dict[int, Any] = self._job.published("address")
        self._ports |= {self._neighbors.address[1], *(port for _, port, _ in addresses.values())}
        return addresses

    def _end(self) -> None:
        if self._refreshing is not None:
            wait([self._refreshing])
        with contextlib.suppress(RuntimeError):  # the store may be gone by now
            self._job.leave(f"after step {self._next - 1}")
        self._neighbors.close()
        self._executor.shutdown()

    def _meet(self, numbers: Sequence[int]) -> None:
        """Make what belongs to the present epoch. Collective."""
        watch = current_watch()
        with self._switching:
            self._watch = watch
        self._check_losses()
        self._ranks = EpochRanks(self._joining)
        self._publish_connections()  # so that others can break waits of this epoch
        self._ranks.finish()  # all addresses are there
        self._neighbors.connect(numbers, self._addresses())
        self._kept.append(Keeper.of_epoch(self._job.epoch, self._ranks, self._group, self._replicas.alike))

    # -- the step ----------------------------------------------------------------------------------------------------

    def leave(self, number: int, error: BaseException | None) -> bool:
        """The end of the `with` of a step; returns whether `error` is swallowed."""
        if error is None:
            try:
                self._check_losses()
                done, some_join = number + 1, False
                if (done - self._steps.start) % self._every == 0 or done == self._steps.stop:
                    self._finish_refresh()
                    some_join = self._some_join and done < self._steps.stop  # the same on all ranks
                    self._refresh(done, in_background=not some_join)
                    if done == self._steps.stop:
                        self._finish_refresh()
                self._next = done
                if not some_join:
                    return False
            except Exception as found:
                if not self._is_loss(found):  # as there is no memory for a block
                    self._report(found)
                    raise
                error = found
        elif not self._is_loss(error):
            self._report(error)
            return False
        try:
            self._recover(error)
        except BaseException as failed:
            self._report(failed)
            raise
        return error is not None

    def _report(self, error: BaseException) -> None:
        self._job.report(self._job.own, f"failed with {type(error).__name__}: {error}")

    def _is_loss(self, error: BaseException, *, explained: bool = False) -> bool:
        """Whether `error` follows from the loss of a rank: one that is known, or, if a connection broke, will be.
        `explained`: a rank that joins may have failed, and then reports that."""
        if not isinstance(error, RuntimeError) or isinstance(error, AuditError):  # that one is raised on all ranks
            return False
        broken = connections.is_broken(error, AgreementError)
        deadline = time.monotonic() + NOTICED * (broken or explained) / (5 if self._joins else 1)
        while not self._job.losses and time.monotonic() < deadline:
            time.sleep(0.005)
        return bool(self._job.losses)

    # -- versions ----------------------------------------------------------------------------------------------------

    def _refresh(self, done: int, *, in_background: bool) -> None:
        """Take a version of the state after so many steps. Collective."""
        self._finish_refresh()
        self._publish_connections()
        holding = self._inventory.holding()
        keeper, own = self._kept[-1], encode(own_state.take(self._state))
        version = keeper.begin(done, holding, self._inventory.encoded(holding.facts), own)
        if in_background:
            self._refreshing = self._executor.submit(keeper.complete, version, self._ranks)
        else:
            self._some_join = keeper.complete(version, self._ranks)

    def _finish_refresh(self) -> None:
        if self._refreshing is not None:
            refreshing, self._refreshing = self._refreshing, None
            self._some_join = refreshing.result()
            del self._kept[:-1]  # [Note: versions of two epochs]

    def _publish_connections(self) -> None:
        if (now := connections.open_connections().keys()) != self._published:
            self._published = now
            self._job.publish("connections", [*now])
            self._check_losses()

    def _check_losses(self) -> None:
        """Called after something that `_break` breaks has become known to it: before, it has not broken that.

        Raises:
            LostRankError: a rank is lost.
        """
        if self._job.losses:
            raise LostRankError(self._job.losses_in_words())

    # -- after a loss ------------------------------------------------------------------------------------------------

    def _break(self) -> None:
        """End all waits of this process for others in the present epoch. Called from any thread."""
        self._neighbors.notify()
        with self._switching:
            if not (words := self._job.losses_in_words()):
                return  # those of the epoch before: this one is whole
            self._watch.abandon(LostRankError(words))
            give_up_all(f"connection closed by peer: {words}")
            self._sever()
            connections.shut(self._forming)

    def _break_again(self) -> None:
        """The same for waits on connections that others have published since: those of groups that the step has made
        are known only when some ranks have left it."""
        with self._switching, contextlib.suppress(RuntimeError):  # the store is gone: waits end by their own limits
            if self._job.losses and not self._recovers:
                self._sever()

    def _sever(self) -> None:
        connections.sever(self._job.published("connections").values(), keep=(self._port, *self._ports))

    def _recover(self, error: BaseException | None) -> None:
        """Go on without the lost ranks; and with those that join: for these alone if there is no `error`."""
        began, before, self._recovers = time.monotonic(), self._job.members, True
        try:
            self._next, _ = self._recovered(error)
        except FencedError:
            raise
        except LostRankError as last:
            found = f"from {latest[-1]}, the last checkpoint that" if latest else "from the beginning: no checkpoint"
            raise LostRankError(f"{last}. Start the job again {found} was saved or loaded here") from last
        now, self._recovers = self._change(before, began), False
        self.survived += [now] if now.lost or now.joined else []
        print_immediately(
            f"[flatfsdp, rank {dist.get_rank()}] goes on with {now.ranks} ranks from step {now.step}, "
            f"{now.seconds:.2f} s after {'others came' if error is None else type(error).__name__}"
        )

    def _change(self, before: Sequence[int], began: float) -> Survived:
        """The change from the members `before` to those that are there now."""
        self._job.learn()  # the list that others have made may lack one whose loss is not known here
        lost = {number: self._job.lost[number] for number in before if number not in self._job.members}
        joined = tuple(number for number in self._job.members if number not in before)
        return Survived(self._next, lost, dist.get_world_size(), time.monotonic() - began, joined)

    def _recovered(
        self, error: BaseException | None, offers: Mapping[int, Any] | None = None
    ) -> tuple[int, Sequence[int]]:
        """Go on in the next epoch, or in this one, which has begun with those `offers`; returns the number of the next
        step, and the members when the version of that step was taken."""
        seconds, tried = CONNECTED, list[Sequence[int]]()
        while True:
            if self._refreshing is not None:
                wait([self._refreshing])
                self._refreshing = None
            self._break()
            words = self._job.losses_in_words()
            if offers is None:
                # Those that were made since the last refresh, as by a first save in the background, are not known yet.
                self._job.publish("connections", [*connections.open_connections()])
                own = [(kept.epoch, number) for kept in self._kept for number in kept.numbers]
                offers = self._job.go_on(own, self._joining())
            offered = {number: {(*each,) for each in offer} for number, offer in offers.items()}
            # Of an epoch, those that have joined since have no version, and need none.
            whole = [
                each
                for each in set().union(*offered.values())
                if all(each in offered.get(number, (each,)) for number in self._job.members_of(each[0]))
            ]
            if not whole:
                raise LostRankError(f"{words}, before the first refresh was complete") from error
            epoch, number = max(whole)
            self._kept = [kept for kept in self._kept if kept.epoch == epoch]  # of others, some rank lacks them
            before, members = self._job.members_of(epoch), self._job.members
            lost = [rank for rank, each in enumerate(before) if each not in members]
            if len(members) < self._least:
                raise LostRankError(f"{len(members)} of least_ranks={self._least} are left after the loss of {words}")
            for kept in self._kept:
                kept.check(lost)
            rank_of = {rank: members.index(each) for rank, each in enumerate(before) if each in members}
            if lost:
                self._sever()
            connecting = Connecting(seconds)
            try:
                with connecting:
                    self._move(number, lost, rank_of)
            except Exception as again:
                joins = len(rank_of) < len(members)
                if isinstance(again, NoValuesError) and not joins:
                    # It does not fit on those that are left. All know that: the first to end for it is no further loss.
                    raise LostRankError(str(again)) from again
                # A rank that has only paused is not lost: the others try again, and come to it. For some of them it may
                # have been in time: these wait for one that tries again, or lose their connection to it.
                if self._is_loss(again, explained=joins) or connecting.failed or connections.is_broken(again):
                    self._sever()
                    tried.append(members)  # as all others do
                    if tried.count(members) == TRIES:
                        self._give_up([each for each in members if each not in before], again)
                    error, offers, seconds = again, None, 2 * seconds
                    continue
                if isinstance(again, AgreementError):
                    raise LostRankError(str(again)) from again
                raise
            return number, before

    def _give_up(self, joining: Sequence[int], last: Exception) -> None:
        """Try no more to connect the present members, on all of them: go on without those that join, if any do.

        Raises:
            LostRankError: none join.
        """
        if not joining:
            raise LostRankError(
                f"the {len(self._job.members)} ranks that are left could not be connected to each other in {TRIES} "
                f"tries, the last of which failed with {type(last).__name__}: {last}"
            ) from last
        for each in joining:
            self._job.report(each, f"could not be connected to the others in {TRIES} tries")

    def _move(self, number: int, lost: Sequence[int], rank_of: Mapping[int, int]) -> None:
        """Let the model move to the members of this epoch, in the state of the version of that number in `_kept`, which
        is empty if this process joins. `rank_of`: of the ranks of that version those that are left, and what they are
        now."""
        kept = self._kept[0] if self._kept else None
        self._bring_to_rest()
        self._before_change()
        self._make_groups(self._job.members)
        self._replicas.move_to(len(self._job.members))
        self._meet(self._job.members)
        holdings = [] if kept is None else kept.brought(number, lost, rank_of, self._ranks)
        own = b"" if kept is None else kept.version(number).own
        state = joining.shared_state(own, sorted(rank_of.values()), self._ranks, self._job.own)
        self._inventory.forget()  # the old shards go
        regroup(self._model, self._optimizer, group=self._replicas.groups(), holdings=holdings)
        own_state.give(self._state, state)
        self._refresh(number, in_background=False)

    def _bring_to_rest(self) -> None:
        """End what is left of the step that was abandoned."""
        abandon(units_in(self._model))
        self._model.zero_grad(set_to_none=True)
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)

    def _make_groups(self, members: Sequence[int]) -> None:
        """Make the default process group anew, of the processes with these numbers. Collective over them."""
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_calls()
        before = connections.open_connections().keys()
        store = self._base.clone()
        made = connections.open_connections().keys() - before
        with self._switching:
            self._forming = frozenset(each for each in made if each.other[1] == self._port)
        self._check_losses()

        def make(timeout: timedelta | None) -> Any:
            dist.init_process_group(
                self._backend,
                store=dist.PrefixStore(f"{self._name}/epoch {self._job.epoch}", store),
                rank=members.index(self._job.own),
                world_size=len(members),
                timeout=timeout,
            )
            return dist.group.WORLD

        # By default it has the number of groups that this process has tried to make, which differs after a failure.
        with _torch.name_of_group(f"epoch {self._job.epoch}"):
            with_time_limit(self._limit, make)
        set_rank(dist.get_rank())
