"""A rank that ends while the others wait for samples."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import LostRankError
from flatfsdp.trainer.data_loading import Loader
from tests.harness import fresh

pytestmark = pytest.mark.process


def end_at_the_second_step(rank: int, world: int) -> str:
    dist.init_process_group("gloo")
    model = FullyShardedDataParallel(torch.nn.Linear(1, 1))
    loader = Loader([torch.ones(1)] * 100, batch=2, mode="dispatch")
    model(loader.next_step().microbatches[0].inputs).sum().backward()
    if rank == 0:
        raise KeyError("step 2")
    try:
        while True:
            loader.next_step()
    except LostRankError as error:
        return str(error)


def test_ranks_that_wait_for_samples_learn_of_one_that_ended() -> None:
    _, waiting = fresh.run(2, end_at_the_second_step, timeout=150)
    assert waiting.result is not None, waiting
    assert waiting.result.startswith("rank 0 ended with KeyError: 'step 2', after a backward in step 1."), (
        waiting.result
    )
