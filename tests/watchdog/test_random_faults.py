"""Random programs in which one rank does something else: every rank ends with our error, within seconds."""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, checkpoint
from tests.agreement.test_agreement import Net, step, wrap
from tests.harness import fresh
from tests.harness.thorough import seeds
from tests.watchdog.test_faults import frozen_until_gone, killed

pytestmark = pytest.mark.process

LIMIT = 120.0
FAULTS = (
    "stops",
    "another model",
    "skips the optimizer",
    "lists alone",
    "saves alone",
    "summons alone",
    "steps alone",
    "skips a unit",
    "raises in backward",
    "is killed",
    "leaves",
    "loads alone",
    "autocasts alone",
    "freezes for a forward",
    "raises",
    "skips a batch",
    "skips a backward",
)
QUIET = {  # as many steps of the same units, so that only this shows
    "skips the optimizer": "took an optimizer step",
    "loads alone": "loaded a state dict",
    "autocasts alone": "Autocast computes in bfloat16 on|Autocast is off on",
    "freezes for a forward": "requires a gradient on|no requires_grad",  # before the first one models differ
    "skips a batch": "skipped a batch",
    "skips a backward": "skipped (the|a) backward",
}
# In 1051 a rank ends before the first forward that trains, after a state_dict(); in 32 and 33 one skips something.
SEEDS = sorted({*seeds(3, 300), 32, 33, 1051})


def world_of(seed: int) -> int:
    return 2 + seed % 2


def drawn_from(seed: int) -> tuple[random.Random, str, int, int]:
    """The generator for all further draws, the fault, the step that it replaces, and its rank."""
    drawn = random.Random(seed)
    return drawn, FAULTS[seed % len(FAULTS)], drawn.randrange(4), drawn.randrange(world_of(seed))


def step_with(model: Any, fault: str) -> None:
    """A step under a condition that the others do not have."""
    weight = model.module.blocks[1].linear.weight
    weight.requires_grad_(fault != "freezes for a forward")
    with torch.autocast("cpu", torch.bfloat16, enabled=fault == "autocasts alone"):
        output = model(torch.ones(2, 4))
    weight.requires_grad_(True)
    output.sum().backward()


SKIPS = ("skips a batch", "skips a backward")


def misbehave(fault: str, model: Any, pids: list[int]) -> None:
    """Commit `fault` on one rank before a step."""
    if fault == "skips a unit":
        step(model, order=(0, 2))
    elif fault == "raises":
        raise ValueError("out of luck")
    elif fault == "raises in backward":
        output = model(torch.ones(2, 4))
        output.register_hook(lambda grad: 1 / 0)
        output.sum().backward()
    elif fault == "another model":
        other = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True)
        other(torch.ones(2, 4)).sum().backward()
    elif fault == "skips a backward":
        model(torch.ones(2, 4))
    elif fault == "stops":
        frozen_until_gone(pids)
    elif fault == "is killed":
        killed()
    elif fault == "saves alone":
        checkpoint.save(tempfile.mkdtemp(), model=model, overwrite=True)
    elif fault == "lists alone":
        checkpoint.listing(tempfile.mkdtemp())
    elif fault == "summons alone":
        with FullyShardedDataParallel.summon_full_params(model):
            pass
    elif fault == "steps alone":
        step(model)
        step(model)
    elif fault == "loads alone":
        with FullyShardedDataParallel.state_dict_type(model, "LOCAL_STATE_DICT"):
            model.load_state_dict(model.state_dict())


def play(rank: int, world: int, seed: int) -> str:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    drawn, fault, at, odd = drawn_from(seed)
    flatfsdp.share_host_memory(seed % 4 != 2)  # else by gloo's messages
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"pid of {rank}", str(os.getpid()))
    pids = [int(store.get(f"pid of {each}")) for each in range(world) if each != rank]
    flatfsdp.set_collective_timeout(report_after=1, raise_after=12)
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", *["NO_SHARD"] * (fault in QUIET)]
    model = wrap(Net(), sharding_strategy=drawn.choice(strategies))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index in range(6):
        if drawn.random() < 0.3:
            model.state_dict()
        if index % 2 and not (fault == "skips the optimizer" and index >= at and rank == odd):
            optimizer.step()
        if index == at and rank == odd:
            misbehave(fault, model, pids)
            if fault == "leaves":
                return "left"
            if fault not in SKIPS:
                step_with(model, fault)
        else:
            step(model)
        if drawn.random() < 0.2:
            time.sleep(0.1)
    return "ended without an error"


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.ranks(world_of(seed), play, seed, timeout=LIMIT)) for seed in SEEDS],
)
def test_one_rank_does_something_else(outcomes: list[fresh.Outcome], seed: int) -> None:
    _, fault, _, odd = drawn_from(seed)
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code is not None, f"still ran: {outcome}"
        if rank == odd and fault in ("raises", "raises in backward", "stops", "is killed", "leaves"):
            continue  # it ends in its own way
        if rank == odd and fault in SKIPS and outcome.result is not None:
            continue  # it had taken its last step before the others knew
        if rank != odd and fault == "steps alone" and outcome.result is not None:
            continue  # it had taken all its steps before the other one was missing its own
        assert outcome.exit_code == 1, (fault, outcome)
        text = (
            rf"AgreementError: .*({QUIET[fault]})" if fault in QUIET else "(AgreementError|LostRankError|WaitError): "
        )
        assert re.search(text, outcome.output), (fault, outcome)
