"""A rank that is alone in a collective call of ours while the others train: every rank ends with our error."""

from __future__ import annotations

import re
import tempfile

import pytest
import torch
import torch.distributed as dist

import flatfsdp
from flatfsdp import FullOptimStateDictConfig, FullStateDictConfig
from flatfsdp import FullyShardedDataParallel as FSDP
from tests.agreement.test_agreement import step
from tests.agreement.test_calls import CALLS, Setting
from tests.harness import fresh
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.process

LIMIT = 120.0
USUAL = ["FullyShardedDataParallel", "checkpoint.keep"]
_FIRST_ONLY = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)


def load_of_first(setting: Setting) -> None:
    with FSDP.state_dict_type(setting.model, "FULL", *_FIRST_ONLY):
        setting.model.load_state_dict({})


def load_optimizer_of_first(setting: Setting) -> None:
    with FSDP.state_dict_type(setting.model, "FULL", *_FIRST_ONLY):
        FSDP.optim_state_dict_to_load(setting.model, setting.optimizer, {})


def loop(setting: Setting) -> None:
    with flatfsdp.join(setting.model) as joined:
        for batch in joined([torch.ones(2, 4)]):
            setting.model(batch).sum().backward()


def scale(setting: Setting) -> None:
    scaler = flatfsdp.ShardedGradScaler("cpu")
    scaler.scale(setting.model(torch.ones(2, 4)).sum()).backward()
    scaler.unscale_(setting.optimizer)


# Those that wait in the backend, from which nothing but the end of the others calls a rank back.
WAITS = {
    "FullyShardedDataParallel.clip_grad_norm_": lambda setting: setting.model.clip_grad_norm_(1.0),
    "FullyShardedDataParallel.load_state_dict": load_of_first,
    "FullyShardedDataParallel.optim_state_dict_to_load": load_optimizer_of_first,
    "ShardedGradScaler": scale,
    "join": loop,
    "torch.nn.utils.clip_grad_norm_": lambda s: torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0),
    "torch.nn.utils.get_total_norm": lambda s: torch.nn.utils.get_total_norm([p.grad for p in s.model.parameters()]),
}
EVERY = CALLS | WAITS if is_thorough() else {name: CALLS[name] for name in USUAL}


def alone(rank: int, world: int, name: str) -> None:
    dist.init_process_group("gloo")
    flatfsdp.set_collective_timeout(report_after=1)
    setting = Setting(tempfile.mkdtemp())
    if rank == 1:
        (CALLS | WAITS)[name](setting)
    for _ in range(3):
        step(setting.model)


@pytest.mark.ranks(2, alone, of=["name"], timeout=LIMIT)
@pytest.mark.parametrize("name", EVERY)
def test_one_rank_calls_and_the_others_train(outcomes: list[fresh.Outcome], name: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 1, outcome
        assert re.search(r"^\[flatfsdp, rank \d\] AgreementError: |AgreementError: ", outcome.output, re.MULTILINE), (
            rank
        )
        assert not re.search("does not answer|construct different", outcome.output), outcome
