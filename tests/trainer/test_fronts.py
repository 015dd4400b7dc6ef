"""The trainer with the front fully_shard: the wrapper's results, with the same bits if ranks split by rows there."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from flatfsdp.checkpoint import load_safetensors
from flatfsdp.errors import CheckpointError
from flatfsdp.trainer import CausalLM, FSDPArguments, Task, Trainer
from flatfsdp.trainer.model.fronts import whole_state
from flatfsdp.trainer.process_group import TrainerRanks
from tests.conftest import Run
from tests.harness.thorough import is_thorough, some
from tests.trainer.test_trainer import Record, make_model, sentences, training

pytestmark = pytest.mark.distributed

FRONTS: dict[str, dict[str, Any]] = {"wrapper": {"layout": "rows"}, "fully_shard": {"front": "fully_shard"}}

# How they are trained, and how they are sharded.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped, with fused steps": ({"clip": 0.5, "optimizer": "adamw", "lr": 0.01, "eval_every": 3}, {}),
    "as it comes": ({}, {"units": "blocks"}),
    "a head in chunks": ({"fused_loss": True, "clip": 0.5}, {"units": "blocks"}),
    "steps in the backward": ({"optimizer_in_backward": True, "detect_nonfinite": True}, {}),
    "computed again": ({}, {"activation_checkpointing": True, "forward_prefetch": True, "checkpoint_every": 2}),
    "on the host": ({"clip": 0.5}, {"cpu_offload": True, "backward_prefetch": "backward_post"}),
    "bf16": ({"eval_every": 3}, {"bf16": True, "buffer_dtype": "bf16"}),
    "fp16, with scaled losses": ({"clip": 0.5}, {"fp16": True}),
    "few bits": ({}, {"gather_dtype": "int8", "reduce_bits": 8, "reduce_error_feedback": True}),
    "kept until the backward": ({"eval_every": 2, "data_mode": "dispatch"}, {"strategy": "shard_grad_op"}),
    "one unit": ({"batch": 2}, {"units": "none", "limit_all_gathers": False, "backward_prefetch": None}),
}


def trained(given: dict[str, Any], fsdp: dict[str, Any]) -> tuple[Any, ...]:
    """Losses, norms, evaluations, and the parameters at the end, whole, on rank 0."""
    record = Record()
    task = Task(model=make_model, train_data=sentences, eval_data=partial(sentences, 7), objective=CausalLM())
    trainer = Trainer(task, training(**given), FSDPArguments(**fsdp), callbacks=[record])
    trainer.train()
    reports = [(each.loss, each.grad_norm, each.footprint.optimizer) for each in record.reports]
    return reports, record.evaluations, whole_state(trainer.model, trainer.ranks), trainer


def both(rank: int, world: int, names: list[str]) -> list[str]:
    found = []
    warnings.simplefilter("ignore")
    for name in names:
        given, fsdp = SETTINGS[name]
        given = {"eval_every": None, **given}
        one, two = (trained(given, {**fsdp, **front}) for front in FRONTS.values())
        assert isinstance(one[3].model, FullyShardedDataParallel) and isinstance(two[3].model, FSDPModule)
        if one[:2] != two[:2]:
            found.append(f"{name}: {one[:2]} and {two[:2]}")
        if not (
            one[2].keys() == two[2].keys() and all(torch.equal(value, two[2][key]) for key, value in one[2].items())
        ):
            found.append(f"{name}: other parameters")
    return found


def test_numbers_are_those_of_the_wrapper(pool2: Run) -> None:
    assert pool2(both, some(list(SETTINGS), 2), timeout=300) == [[], []]


# --- checkpoints ------------------------------------------------------------------------------------------------------

STEPS = {"optimizer": "adamw", "lr": 0.01, "clip": 1.0, "steps": 4, "epochs": None}


def run_of(rank: int, world: int, front: str, given: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
    reports, _, state, _ = trained({**STEPS, **given}, FRONTS[front])
    return [each[:2] for each in reports], state


def alike(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(value, two[key]) for key, value in one.items())


@pytest.mark.parametrize("saves", FRONTS)
def test_either_front_goes_on_from_a_checkpoint_of_the_other(run: Run, tmp_path: Path, saves: str) -> None:
    """On another number of ranks: optimizer, schedule and data included."""
    save_format = "torch" if saves == "wrapper" else "safetensors"
    given = {"output": tmp_path, "save_at_end": True, "save_format": save_format, "keep_last": 9}
    run(2, run_of, saves, given)
    first = tmp_path / "step-00000004"
    results = []
    for number, goes_on in enumerate(FRONTS):
        # From a path each begins a branch: with its own folder, of the same checkpoint.
        again = {**given, "output": tmp_path / str(number), "resume": "latest", "steps": 7}
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / first.name).symlink_to(first)
        results.append(run(3, run_of, goes_on, again)[0])
    assert results[0][0] == results[1][0] and len(results[0][0]) == 3
    assert alike(results[0][1], results[1][1])


class Tied(nn.Module):
    """A head that is tied to the embedding, and is not the last parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.scale = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)) + self.scale(self.embed(ids))


def tied_state(rank: int, world: int) -> bool:
    """Whether the expected whole state of a model with tied weights is found, under the front fully_shard."""
    torch.manual_seed(0)
    model = Tied()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    state = whole_state(fully_shard(model), TrainerRanks())
    return (alike(state, expected) and state["head.weight"] is state["embed.weight"]) if rank == 0 else not state


def test_tied_weights_are_gathered_once_on_all_ranks(run: Run) -> None:
    assert run(2, tied_state) == [True, True]


def from_whole_weights(rank: int, world: int, folder: Path, output: Path) -> tuple[str, dict[str, Tensor]]:
    trainer = Trainer(
        Task(model=make_model, train_data=sentences, objective=CausalLM()),
        training(output=output, resume=folder, seed=9),
        FSDPArguments(**FRONTS["fully_shard"]),
    )
    try:
        trainer.resume()
    except CheckpointError as error:
        return str(error), {}
    trainer.export(output / "export", overwrite=True)
    return "", whole_state(trainer.model, trainer.ranks)


def test_whole_weights_come_in_and_go_out(run: Run, tmp_path: Path) -> None:
    expected = make_model()
    folder = tmp_path / "whole"
    folder.mkdir()
    torch.save(expected.state_dict(), folder / "pytorch_model.bin")
    (text, found), _ = run(2, from_whole_weights, folder, tmp_path)
    assert not text and alike(found, expected.state_dict())
    written = make_model()
    load_safetensors(written, tmp_path / "export")
    assert alike(written.state_dict(), expected.state_dict())
    state = expected.state_dict()
    name = next(iter(state))
    torch.save({key: value for key, value in state.items() if key != name}, folder / "pytorch_model.bin")
    for text, _ in run(2, from_whole_weights, folder, tmp_path):
        assert f"missing: {name}" in text


# --- models -----------------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Frozen parts, ties inside a unit, a batch norm, buffers; on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.layers[0].parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def of_parts(rank: int, world: int, compiles: bool) -> list[bool]:
    from flatfsdp.trainer.model.sharding import shard

    warnings.simplefilter("ignore")
    made: list[Any] = []
    for front in FRONTS.values():
        torch.manual_seed(3)
        with torch.device("meta"):
            model = Parts()
        arguments = FSDPArguments(units="layers", bf16=True, keep_frozen_unsharded=True, compile=compiles, **front)
        sharded = shard(model, arguments, device=torch.device("cpu"))
        optimizer = torch.optim.AdamW([each for each in sharded.parameters() if each.requires_grad], lr=0.1)
        losses = []
        for step in range(3):
            x = torch.randint(9, (5,), generator=torch.Generator().manual_seed(step + rank))
            loss = nn.functional.cross_entropy(sharded(x).float(), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        made.append((losses, [each.float().sum().item() for each in sharded.buffers()]))
    return [one == two for one, two in zip(*made, strict=True)]


def test_models_from_the_meta_device_begin_alike(pool2: Run) -> None:
    assert pool2(of_parts, is_thorough(), timeout=120) == [[True, True]] * 2
