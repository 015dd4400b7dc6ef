"""Tokens from a model whose odds are known."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.trainer.callbacks import generate
from flatfsdp.trainer.data_loading import Microbatch
from flatfsdp.trainer.gradients import evaluate
from flatfsdp.trainer.launch import RankContext
from flatfsdp.trainer.objectives import CausalLM
from flatfsdp.trainer.preemption import StopRequest
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


class Odds(nn.Module):
    """The same logits after any earlier operation."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([3.0, 2.0, 1.0, 0.0]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits.expand(*tokens.shape, 4)


def test_a_temperature_may_hang_on_the_token_before() -> None:
    with fake_world(1):
        model = FullyShardedDataParallel(Odds())
        asked = {"length": 200, "device": torch.device("cpu"), "seed": 0}
        made = generate(model, [3], temperature=lambda token: 0.0 if token else 1e9, **asked)  # type: ignore[arg-type]
    after = {token: {two[1] for two in itertools.pairwise(made) if two[0] == token} for token in range(4)}
    assert after == {0: {0, 1, 2, 3}, 1: {0}, 2: {0}, 3: {0}}
    assert len(made) == 201


def test_modules_keep_the_modes_that_they_were_in() -> None:
    """A layer that a program keeps in eval mode while it trains the others."""
    cpu = torch.device("cpu")
    with fake_world(1):
        kept, others = nn.Dropout(), nn.Dropout()
        model = FullyShardedDataParallel(nn.Sequential(Odds(), kept.eval(), others))
        generate(model, [3], length=2, device=cpu, seed=0)
        assert (kept.training, others.training, model.training) == (False, True, True)
        tokens = torch.zeros(1, 3, dtype=torch.int64)
        evaluate(
            model, [Microbatch((tokens, tokens), (0,))], CausalLM(), world=RankContext(0, 1, cpu), stop=StopRequest()
        )
        assert (kept.training, others.training, model.training) == (False, True, True)
