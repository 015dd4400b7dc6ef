"""Ranks that are started again in front of a store in which an earlier start left its reports, as by torchrun."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flatfsdp
from tests.agreement.test_agreement import Net, step, wrap
from tests.harness import fresh
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.process


def train(rank: int, world: int, port: int, *, fails: bool) -> Any:
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False),
        rank=rank,
        world_size=world,
    )
    flatfsdp.set_collective_timeout(report_after=0.5)
    torch.manual_seed(0)
    model = wrap(Net())
    step(model)
    if rank == 1:
        if fails:
            raise ValueError("out of data")
        time.sleep(2.5)  # rank 0 requests the others' states
    step(model)


@pytest.mark.skipif(not is_thorough(), reason="two jobs: --thorough; tests/watchdog/test_start_name.py has the rule")
def test_a_start_does_not_read_reports_of_the_one_before() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = fresh.run(2, train, store.port, fails=True)
    assert "ValueError: out of data" in first[0].output
    for key in store.list_keys():  # as the backend's addresses are found again, too, and no process listens there
        if "flatfsdp" not in key:
            store.delete_key(key)
    second = fresh.run(2, train, store.port, fails=False)
    assert [each.exit_code for each in second] == [0, 0], second
    assert "Status of all ranks" in second[0].output
    assert "out of data" not in second[0].output
