"""`start`: one call for a process that starts with others, and for one that comes later and joins them.

[Note: joining] A process that comes when the job runs makes a default process group of its own, of one rank, so that
the same program builds and wraps its model, without the others. In `survive` it compares what it has built with what
the job has noted, takes a new number, and waits for the members: these go on with their steps, and learn from the
all-reduce that ends each refresh that one waits. At the next boundary at which they refresh they all come to a new
epoch, as after a loss, but of the version that they have just taken, so that no step is taken again. What begins from
there is a recovery in which nobody is lost, and the new process brings nothing. Another loss in the meantime, also its
own, is one in a recovery: the others begin anew, from the same version.

Each rank of a start claims its place in the store. A process that finds its place claimed has come anew, whatever the
environment has, and joins. All these keys are below the number of the restart of torchrun's agent.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.base.foreign_text import parse
from ..engine.base.plain_data import decode, encode
from ..engine.cpu.collectives import waits_early_if_large
from ..engine.models import introduction
from ..engine.models.walks import units_in
from ..engine.runtime.model import model_of
from ..engine.state.optim.param_map import ParamMap, groups_of
from ..engine.watchdog.store import StoreClient, launcher_serves_it
from ..errors import UsageError
from . import own_state
from .beginning import tcp_store
from .exchange import EpochRanks
from .job import Job

TO_JOIN: dict[Any, str] = {}  # the default process group that `start` has made of this process alone: the job's name


def start(
    backend: str = "gloo",
    *,
    store: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | None = None,
    wait: float = 60.0,
) -> bool:
    """`torch.distributed.init_process_group`, for processes that start together and for those that join later.

    Example::

        joins = start()
        model = FullyShardedDataParallel(...)
        if not joins:
            load(model)
        for step in survive(model, optimizer, steps=1000):
            ...

    Ranks that start together make the default process group of all. A process that comes later, when a job of the same
    program takes the steps of its `survive`, makes one of its own, of one rank: it builds its model alone, and becomes
    a rank of the job in `survive`, with a new default process group and a new rank. So between the two calls it does
    nothing that others have to take part in, and writes nothing that is the job's.

    Args:
        backend: that of the process group.
        store: the client of a store that no rank serves; by default that of `MASTER_ADDR` and `MASTER_PORT`.
        rank, world_size: of this process among those that start together; by default `RANK` and `WORLD_SIZE`. They mean
            nothing to a process that joins.
        timeout: the time limit of operations of the process group.
        wait: seconds in which the store has to answer; and for a process that comes too late to start with others and
            too early to join, those in which these have to begin their steps.

    Returns:
        Whether this process joins.

    Raises:
        ConfigTypeError: `store` is no TCPStore.
        UsageError: there is no store outside of the ranks; or the job has ended, or has not begun its steps.
    """
    rank = int(os.environ.get("RANK", -1)) if rank is None else rank
    world = int(os.environ.get("WORLD_SIZE", -1)) if world_size is None else world_size
    base = _store_outside(store, wait)
    starts, own, began = notes_of(base, _starts()), uuid.uuid4().hex, time.monotonic()
    while (name := starts.read("job")) is None:
        if 0 <= rank < world and starts.set_if_absent(f"rank/{rank}", own) == own:
            start_store = dist.PrefixStore(f"{_starts()}/start", base)
            dist.init_process_group(backend, store=start_store, rank=rank, world_size=world, timeout=timeout)
            return False
        if (waited := time.monotonic() - began) > wait:
            why = f"another process has started as rank {rank}" if rank >= 0 else "RANK is not set"
            raise UsageError(
                f"start(): cannot start with others, since {why}, nor join them: no job has come to its steps in "
                f"survive() at {base.host}:{base.port} for {waited:.0f} s. A new job needs a new store"
            )
        time.sleep(0.1)
    Job(notes_of(base, name), -1, (), lost_after=wait, on_loss=lambda: None).check_end(is_there=True)
    alone = dist.PrefixStore(f"{_starts()}/alone/{own}", base)
    dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
    TO_JOIN[dist.group.WORLD] = name
    return True


def has_begun(store: Any) -> bool:
    """Whether a job has come to the steps of its `survive`, so that processes that call `start` from now on join it, or
    are refused when it has ended; for a program that starts lost ranks again. Not collective.

    Args:
        store: the client, or the server, of the store of that job.
    """
    return notes_of(store, _starts()).read("job") is not None


def _starts() -> str:
    return f"flatfsdp elastic/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def notes_of(base: Any, name: str) -> StoreClient:
    """The notes in a store below a name, also of processes that were started before this one."""
    return StoreClient(dist.PrefixStore(name, base), of_start=False)


def announce(base: Any, name: str, world: int, facts: Mapping[str, str], shards: int) -> None:
    """Let processes that come from now on join the job of this name, which begins with so many ranks, and with so many
    shards at least (`Replicas.least`)."""
    notes = notes_of(base, name)
    notes.post("facts", json.dumps(facts))
    notes.count("numbers", world)
    notes.count("shards", shards)
    notes.post("epoch/0/members", json.dumps([*range(world)]))
    notes_of(base, _starts()).post("job", name)


def new_number(notes: StoreClient, facts: Mapping[str, str]) -> tuple[int, int]:
    """The number of this process, which joins the job of these notes, and how many shards that has at least.

    Raises:
        UsageError: what it has built, in the words of `facts_of`, differs from what the job has noted.
    """
    theirs = parse(notes.read("facts")) or {}
    for what in {**facts, **theirs}:
        if facts.get(what) != theirs.get(what):
            raise UsageError(
                f"cannot join: {what}: {facts.get(what, 'nothing')} here, and {theirs.get(what, 'nothing')} in the "
                "job. Start the same program, with the same settings"
            )
    return notes.count("numbers") - 1, notes.count("shards", 0)


def facts_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Mapping[str, object]
) -> dict[str, str]:
    """The facts that have to be the same in a process that joins, in words. `settings`: those of `survive`, by name."""
    units = units_in(model)
    of_model = model_of(units[-1]).setup.settings
    names = ("deterministic_sums", "join_units_below", "limit_all_gathers")
    settings = {**settings, **{name: getattr(of_model, name) for name in names}, "early_waits": waits_early_if_large()}
    facts = {name: str(value) for name, value in settings.items()}
    of_ranks = (", ranks", ", places of its parameters")
    facts |= {what: value for what, value, _ in introduction.facts_of(units) if not what.endswith(of_ranks)}
    if optimizer is not None:
        facts["optimizer"] = type(optimizer).__name__
        for number, group in enumerate(groups_of(model, optimizer)):
            facts[f"optimizer, param group {number}"] = ", ".join(ParamMap(model, [group]).by_name)
    plain: dict[str, str] = parse(json.dumps(facts))  # as it will be read
    return plain


def shared_state(own: bytes, members: Sequence[int], ranks: EpochRanks, number: int) -> Mapping[str, Any]:
    """The state of this rank besides model and optimizer: its `own`, encoded, or, if it has none, since it joins with
    that `number`, one made from those of `members`, the ranks that have their own. [Note: states of one that joins].
    Called by all ranks."""
    new = [rank for rank in range(dist.get_world_size()) if rank not in members]
    state = decode(own) if own else {}
    sent = encode((state if dist.get_rank() == members[0] else {}, state.get("numbers")))
    found = [decode(each) for each in ranks.send(sent, new if own else (), () if own else members).values()]
    return state or own_state.of_new_member(found[0][0], [numbers for _, numbers in found], number)


def _store_outside(store: Any, wait: float) -> Any:
    if store is None:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if not (host and port and launcher_serves_it()):
            raise UsageError(
                "start(): expected a store that no rank serves, by MASTER_ADDR, MASTER_PORT and "
                f"TORCHELASTIC_USE_AGENT_STORE=True, or as store=; found MASTER_ADDR={host}, MASTER_PORT={port}, "
                f"TORCHELASTIC_USE_AGENT_STORE={os.environ.get('TORCHELASTIC_USE_AGENT_STORE')}"
            )
        return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=wait))
    return tcp_store(store, "start: store")
