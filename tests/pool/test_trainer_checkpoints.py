"""The trainer's checkpoints: what a run finds again, on how many ranks, after what has happened."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.trainer.checkpoints import CheckpointManager
from flatfsdp.trainer.components import Component, Sharing, rng_component, stateful_component
from tests.harness.models import Feedforward, Low, Motley
from tests.pool.corners import Setting, data, loss_of, seeded
from tests.pool.test_optim_state import Corners

ORIG, FLAT = Setting(), Setting(orig=False)
UNITS = (Feedforward, Low, Motley)


class Run:
    """What a trainer has: a model, its optimizer and schedule, progress, and a loader's position."""

    def __init__(self, setting: Setting = ORIG) -> None:
        inside = seeded(Corners)
        self.model = setting.wrap(inside, UNITS, ignored_modules=[inside.outside])
        floating = [p for p in self.model.parameters() if p.is_floating_point()]
        self.optim = torch.optim.AdamW(floating, lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optim, total_iters=10)
        self.progress = {"step": 0, "loss": torch.zeros(())}
        self.seen: dict[str, Any] = {}

    def train(self, steps: int) -> Run:
        for step in range(steps):
            self.optim.zero_grad()
            loss = loss_of(self.model(data(0, step)))
            loss.backward()
            self.optim.step()
            self.schedule.step()
            self.progress = {"step": self.progress["step"] + 1, "loss": loss.detach()}
        return self

    def components(self) -> list[Component]:
        return [
            stateful_component("schedule", self.schedule),
            Component(
                name="progress", sharing=Sharing.GLOBAL, save=lambda: self.progress, load=lambda s: self._take(s)
            ),
            rng_component(7),
        ]

    def _take(self, state: Any) -> None:
        self.progress = dict(state)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optim, "components": self.components()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Collective."""
        with FSDP.state_dict_type(self.model, "FULL"):
            return {key: value.clone() for key, value in self.model.state_dict().items()}


def drawn() -> list[float]:
    """The next random numbers of every kind."""
    import numpy

    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def save(rank: int, world: int, path: str, settings: dict[str, Any], step: int = 3) -> list[float]:
    torch.manual_seed(rank)
    random.seed(rank)
    run = Run().train(step)
    manager = CheckpointManager(path, **settings)
    saved = manager.save(step, **run.parts(), metrics={"eval_loss": 1.0 / step})
    assert saved.path == Path(path) / f"step-{step:08}" and saved.stall_seconds > 0.0
    weights, numbers = run.weights(), drawn()
    run.train(1)  # beside the save: it does not see this
    manager.finish()
    if rank == 0:
        torch.save((weights, {**run.optim.state_dict()["param_groups"][0], "params": None}), f"{path}/expected.pt")
    return numbers


def load(rank: int, world: int, path: str, saved_by: int, which: str = "latest") -> tuple[list[float], list[str]]:
    run = Run(FLAT)
    manager = CheckpointManager(path)
    found = manager.find(which)
    assert found is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = manager.load(found, **run.parts())
    assert (loaded.path, loaded.step, loaded.world) == (found, 3, saved_by)
    weights, _ = torch.load(f"{path}/expected.pt", weights_only=False)
    assert all(torch.equal(value, weights[key]) for key, value in run.weights().items())
    assert run.progress["step"] == 3 and run.progress["loss"].item() > 0.0
    assert run.schedule.last_epoch == 3 and run.optim.param_groups[0]["lr"] == run.schedule.get_last_lr()[0]
    return drawn(), list(loaded.notes)


@pytest.mark.parametrize("settings", [{}, {"asynchronous": False, "format": "torch"}], ids=["safetensors", "torch"])
def test_a_run_goes_on_with_two_three_and_one_ranks(run: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    path = str(tmp_path)
    next_numbers = run(2, save, path, settings)
    assert [numbers for numbers, _ in run(2, load, path, 2)] == next_numbers  # each rank draws on
    assert next_numbers[0] != next_numbers[1]
    again = run(3, load, path, 2)
    assert len({tuple(numbers) for numbers, _ in again}) == 3 and run(3, load, path, 2) == again
    for rank, (_, notes) in enumerate(again):
        assert notes == [f"random numbers: seeded anew from (seed 7, step 3, rank {rank})"]
    run(1, load, path, 2)
    if not settings:
        run(3, save, path, settings)
        run(1, load, path, 3, "best")


def test_a_folder_holds_the_model_once_and_says_who_wrote_what(run: Any, tmp_path: Path) -> None:
    run(2, save, str(tmp_path), {})
    folder = tmp_path / "step-00000003"
    weights, _ = torch.load(tmp_path / "expected.pt", weights_only=False)
    found = load_file(folder / "model.safetensors")
    assert all(torch.equal(value, weights[key]) for key, value in found.items())
    assert weights.keys() - found.keys() == {"last.weight"}  # tied to the first one
    model = sum(value.nbytes for value in found.values())
    assert model < sum(file.stat().st_size for file in folder.glob("*.safetensors")) < model + 4096
    listed = json.loads((folder / "flatfsdp.json").read_text())["manifest"]
    assert not [key for key, each in listed["tensors"].items() if key.startswith("model") and each["chunks"][0][0] < 2]
    table = json.loads((folder / "components.json").read_text())
    assert (table["step"], table["world"]) == (3, 2)
    assert table["components"]["progress"] == {
        "sharing": "global",
        "required": True,
        "parts": {"all": {"written_by": 0}},
    }
    assert table["components"]["rng"]["parts"] == {
        "0": {"written_by": 0, "ranks": [0]},
        "1": {"written_by": 1, "ranks": [1]},
    }
