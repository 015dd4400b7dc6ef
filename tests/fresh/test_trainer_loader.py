"""A rank that ends while the others wait for samples."""

from __future__ import annotations

import os

import torch.distributed as dist

from flatfsdp.errors import LostRankError
from flatfsdp.trainer.data_loading import Loader
from tests.harness import fresh


def end_at_the_second_step(rank: int, world: int) -> str:
    dist.init_process_group("gloo")
    loader = Loader(range(100), batch=2, mode="dispatch")
    loader.next_step()
    if rank == 0:
        os._exit(3)
    try:
        while True:
            loader.next_step()
    except LostRankError as error:
        return str(error)


def test_ranks_do_not_wait_for_samples_of_one_that_ended() -> None:
    outcomes = fresh.run(2, end_at_the_second_step, timeout=150)
    assert outcomes[0].exit_code == 3
    words = "rank 1 cannot reach the others for its next samples; one of them ended, or does something else: "
    assert outcomes[1].result is not None and outcomes[1].result.startswith(words), outcomes[1]
