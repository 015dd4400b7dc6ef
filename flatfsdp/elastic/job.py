"""The processes of a job, as they come to agree on them: who is lost, who goes on, and who is fenced.

[Note: epochs] Each process of a job has a *number*, which no other ever has. The job goes through *epochs*, each with
its members, whose ranks follow from the order of their numbers. A process that notices a loss writes it to the store,
once and for all, and notifies its neighbors, which read it there and notify theirs ([Note: neighbors]). Survivors then
come to the next epoch, each with an *offer*, its versions. The first that finds there all members who are not lost
writes the list of those who go on; whatever the others see, the list is that one.

A process that is not in the list of an epoch after its own is *fenced*, although it runs: it was stopped, or cut off,
and counted as lost. It has nothing to do with the job any more, and finds that out before it does anything for it: its
connections to the others are shut down, and it reads the list before it goes on.

A process that *leaves*, at the end of its steps or by an error outside of them, writes that before it closes its
connections: neighbors that find them closed read it there, and no loss. To those that come to join the job has ended.
After a loss the others do not wait for one that has left: it counts as lost, too.

A process that *joins* takes a new number, connects to members, and waits for a list that it is in. Members that it is
connected to bring it along, and so a member notices when it ends, before the list is written and after.

Costs, in requests to the store: none in normal operation. Per loss up to 3 to report it, and 1 by each process to learn
of it; per epoch 3 by each, and looks at the list; 2 by each that leaves, and 1 by each of its neighbors.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..engine.base.foreign_text import parse
from ..engine.watchdog.process_exit import print_immediately
from ..engine.watchdog.store import StoreClient
from ..errors import FencedError, UsageError, ranks_in_words

REPORT = 10.0  # seconds after which a process that waits for others in the next epoch reports these


class Job:
    """This process's view of the job.

    Attributes:
        own: its number.
        epoch: the number of the present epoch.
        members: the numbers of its members, in the order of their ranks.
        lost: the numbers of all that were ever lost, each with words that follow "rank 3 ".
        left: the numbers of those that have left, each with the words of its `leave`.
    """

    def __init__(
        self, store: StoreClient, own: int, members: Sequence[int], *, lost_after: float, on_loss: Callable[[], None]
    ) -> None:
        """`members`: of the first epoch; none for a process that joins. `on_loss` is called after new losses, also if
        this process is the lost one, in the thread that reads them."""
        self.own = own
        self.epoch = 0 if members else -1
        self.members = tuple(members)
        self.lost: dict[int, str] = {}
        self.left: dict[int, str] = {}
        self._store = store
        self._lost_after = lost_after
        self._on_loss = on_loss
        self._known = 0  # losses that were read
        self._learning = threading.Lock()

    def report(self, number: int, words: str) -> None:
        """Write the loss of a process: `words` follow "rank 3 ". What a process writes that counts as lost itself is
        ignored: to it, all others are gone. One that is no member yet writes its own loss only."""
        self.learn()
        if number in self.lost or self.own in self.lost or self.own not in {*self.members, number}:
            return
        # In one request: a process that ends while it reports leaves a line, or none.
        self._store.append("losses", json.dumps([self.own, number, words]) + "\n")
        self.learn()

    def is_gone(self, number: int, words: str) -> None:
        """Report a process that has closed its connections, unless it has left."""
        self.learn()
        if number not in self.left:
            self.report(number, words)

    def leave(self, words: str) -> None:
        """Write that this process leaves the job, which ends as in these `words`. It is written when this returns."""
        if self.own not in self.lost:
            self._store.append("losses", json.dumps([self.own, words]) + "\n")
            self.learn()

    def learn(self) -> None:
        """Read from the store who else is lost, or has left. May be called from any thread."""
        new = False
        with self._learning:
            lines = (self._store.read("losses") or "").splitlines()
            for line in lines[self._known :]:
                match parse(line):
                    # Two processes that a cut network separates report each other. The first line counts for all.
                    case [int(reporter), int(number), str(words)] if not {reporter, number} & self.lost.keys():
                        self.lost[number] = words
                        self.left.pop(number, None)  # the job goes on without it
                        new |= {number, self.own} <= {*self.members}
                    case [int(number), str(words)] if number not in self.lost:
                        self.left[number] = words
            self._known = max(self._known, len(lines))
        if new:
            self._on_loss()

    def publish(self, what: str, value: object) -> None:
        """Write a value of this process that others may read."""
        self._store.post(f"{what}/{self.own}", json.dumps(value))

    def members_of(self, epoch: int) -> tuple[int, ...]:
        """The numbers of the members of an epoch up to the present one."""
        return tuple(self._listed(epoch) or ())

    def published(self, what: str) -> dict[int, object]:
        """That value of each other member that has written one."""
        others = [number for number in self.members if number != self.own]
        found = {number: parse(self._store.read(f"{what}/{number}")) for number in others}
        return {number: value for number, value in found.items() if value is not None}

    @property
    def losses(self) -> set[int]:
        """The members that are lost."""
        return {number for number in self.members if number in self.lost}

    def check_fence(self) -> None:
        """
        Raises:
            FencedError: the others go on without this process.
        """
        self.learn()
        if self.own in self.lost:
            self._refuse(self.lost[self.own])
        listed = self._listed(self.epoch + 1)
        if listed is not None and self.own not in listed:
            self._refuse("was not there when the others went on")

    def go_on(self, offer: object, joining: Collection[int] = ()) -> dict[int, Any]:
        """Come to the next epoch with all survivors, and processes that join. Returned: the offers of the survivors.
        `members` and `epoch` are those of the new one then. `joining`: those that are connected to this process.

        Raises:
            FencedError: the others go on without this process.
        """
        epoch = self.epoch + 1
        key = f"epoch/{epoch}"
        self.check_fence()
        self._store.append(f"{key}/here", json.dumps([self.own, offer, [*joining]]) + "\n")
        began, reported = time.monotonic(), False
        while (listed := self._listed(epoch)) is None:
            here = self._here(epoch)
            missing = [number for number in self.members if number not in here and number not in self.lost]
            waited = time.monotonic() - began
            if not missing:
                going = [number for number in self.members if number in here and number not in self.lost]
                going += sorted({each for number in going for each in here[number][1]} - self.lost.keys())
                self._store.set_if_absent(f"{key}/members", json.dumps(going))
            elif gone := [number for number in missing if number in self.left]:  # they do not come any more
                for number in gone:
                    self.report(number, f"had left the loop {self.left.get(number, '')}")
            elif waited > self._lost_after:
                for number in missing:
                    self.report(number, f"did not come to the others for {waited:.0f} s after a loss")
            elif waited > REPORT and not reported:
                reported = True
                after = f"after the loss of {self.losses_in_words()}" if self.losses else "to let others join"
                print_immediately(
                    f"[flatfsdp] {after}, waiting for {ranks_in_words(missing)}, "
                    f"for at most {self._lost_after - waited:.0f} s more"
                )
            time.sleep(min(0.25, 0.002 + waited / 10))
        if self.own not in listed:
            self._refuse(self.lost.get(self.own, "was not there when the others went on"))
        self.epoch, self.members = epoch, tuple(listed)
        return self._offers()

    def join(self, reach: Callable[[], bool], seconds: float) -> dict[int, Any]:
        """Wait until the members take this process, which is none yet, into an epoch. Returned: as by `go_on`.

        `reach`: connects this process to some of `members`, unless it is; returns whether it could.

        Raises:
            FencedError: they took it for lost.
            UsageError: the job has ended, or has not taken it for so many seconds.
        """
        began, reported = time.monotonic(), False
        while self.own not in self.catch_up():
            self.check_end(reach())
            if self.own in self.lost:
                self._refuse(self.lost[self.own])
            waited = time.monotonic() - began
            if waited > seconds:
                raise UsageError(f"cannot join: the job has come to no refresh for {waited:.0f} s")
            if waited > REPORT and not reported:
                reported = True
                print_immediately("[flatfsdp] waits for the next refresh of the job, to join it there")
            time.sleep(min(0.25, 0.002 + waited / 10))
        return self._offers()

    def catch_up(self) -> tuple[int, ...]:
        """Let `epoch` and `members` be those of the newest epoch, for a process that is no member; returns these."""
        while (listed := self._listed(self.epoch + 1)) is not None:
            self.epoch, self.members = self.epoch + 1, tuple(listed)
        return self.members

    def check_end(self, is_there: bool) -> None:
        """
        Raises:
            UsageError: the job has ended. `is_there`: whether one of its members can be reached.
        """
        self.learn()
        if self.left or not is_there:
            why = next(iter(self.left.values()), "none of its ranks can be reached")
            raise UsageError(f"cannot join: the job has ended ({why}). A new job needs a new store")

    def losses_in_words(self) -> str:
        """The lost members, in words. May be called from any thread."""
        lost = dict(self.lost)
        gone = [(rank, lost[number]) for rank, number in enumerate(self.members) if number in lost]
        return "; ".join(f"rank {rank}, which {words}" for rank, words in gone)

    def _refuse(self, words: str) -> None:
        raise FencedError(
            f"the others go on without this process (number {self.own} of the job), which {words}. It takes no more "
            "steps and writes no checkpoint. Start it again to let it join"
        )

    def _listed(self, epoch: int) -> list[int] | None:
        match parse(self._store.read(f"epoch/{epoch}/members")):
            case [*listed] if all(type(each) is int for each in listed):
                return listed
        return None

    def _offers(self) -> dict[int, Any]:
        return {number: offer for number, (offer, _) in self._here(self.epoch).items() if number in self.members}

    def _here(self, epoch: int) -> Mapping[int, tuple[Any, Sequence[int]]]:
        """By the number of a process that has come to an epoch its offer, and the numbers of those that join by it."""
        found = {}
        for line in (self._store.read(f"epoch/{epoch}/here") or "").splitlines():
            match parse(line):
                case [int(number), offer, [*joining]]:
                    found[number] = offer, joining
        return found
