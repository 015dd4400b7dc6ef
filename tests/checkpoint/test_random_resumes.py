"""Random resumes: a model saved under drawn settings continues under others, over another number of ranks, like a
model in one process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, checkpoint, fuse_optimizer_steps
from tests.conftest import Run
from tests.harness.gradients import fill, names_of, together
from tests.harness.meshes import replicas_of_shards
from tests.harness.thorough import seeds
from tests.runtime.test_random_programs import WIDTH, Block, Outer

pytestmark = pytest.mark.distributed

FSDP = FullyShardedDataParallel
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.002, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-3, initial_accumulator_value=0.2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-3),
}
WORLDS = ((2, 3), (3, 2), (4, 2), (2, 1), (1, 2), (3, 4))
FORMATS = ("checkpoint", "full", "dcp", "in the background")


class Net(nn.Module):
    """Of parts that are units or around some; tied and frozen parameters, a scalar, none, bytes, another dtype."""

    def __init__(self, drawn: random.Random) -> None:
        super().__init__()
        torch.manual_seed(drawn.randrange(1000))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(drawn.choice((Block, Outer))() for _ in range(drawn.randint(1, 3)))
        self.gain, self.nothing = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.empty(0, 3))
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.table = nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))
        if drawn.random() < 0.4:
            self.last.weight = self.first.weight
        if drawn.random() < 0.4:
            drawn.choice(self.parts).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.gain + self.nothing.sum() + self.table.sum()
        for part in self.parts:
            x = part(x)
        return self.last(x)


class Pair:
    """A sharded model under settings of `draw`, and on the side the same model in one process."""

    def __init__(self, rank: int, world: int, seed: int, draw: str) -> None:
        self.rank, self.world, self.wrong, self.number = rank, world, list[str](), 0
        self.alone, net = (Net(random.Random(seed)) for _ in range(2))
        drawn = random.Random(f"{seed} {draw}")
        strategy = drawn.choice(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] + ["HYBRID_SHARD"] * 3 * (world == 4))
        if uses_spares := random.Random(f"{seed} spares").random() < 0.5:
            original = drawn.random() < 0.6
        else:  # a parameter without a state cannot be loaded as a part of a flat one
            original = random.Random(f"{seed} original").random() < 0.6
        for module in [*net.modules(), *self.alone.modules()]:
            if isinstance(module, Block):
                module.uses_spare = uses_spares
        self._names = names_of(net)
        self.model: Any = FSDP(
            net,
            auto_wrap_policy=drawn.choice((None, {Block}, {Outer}, {Block, Outer})),
            sharding_strategy=strategy,
            device_mesh=replicas_of_shards() if strategy == "HYBRID_SHARD" else None,
            use_orig_params=original,
            cpu_offload=CPUOffload(offload_params=drawn.random() < 0.15),
            mixed_precision=MixedPrecision(reduce_dtype=torch.float64) if drawn.random() < 0.2 else None,
            join_units_below=drawn.choice((0, 2**20)),
            layout=random.Random(f"{seed} {draw} layout").choice(("flat", "rows")),
        )
        if drawn.random() < 0.3:
            self.model.set_reshard_after_backward(False)
        make = OPTIMIZERS[random.Random(f"{seed} optimizer").choice(list(OPTIMIZERS))]
        self.optimizer, self.plain = (
            make([p for p in each.parameters() if p.is_floating_point()]) for each in (self.model, self.alone)
        )
        if original and drawn.random() < 0.4:
            fuse_optimizer_steps(self.optimizer)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.number += 1
            self.model(self._data(self.rank)).square().mean().backward()
            for of in range(self.world):
                (self.alone(self._data(of)).square().mean() / self.world).backward()
            fill(self.alone, together(self.model, self._names))
            for net, optimizer in (self.model, self.optimizer), (self.alone, self.plain):
                optimizer.step()
                optimizer.zero_grad()
                next(net.buffers()).add_(1)

    def _data(self, of: int) -> Tensor:
        return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * self.number + of))

    def compare(self, when: str) -> None:
        """Parameters, buffers, and the optimizer's states."""
        found, expected = self.model.state_dict(), self.alone.state_dict()
        names = {id(parameter): name for name, parameter in self.alone.named_parameters()}
        states = FSDP.full_optim_state_dict(self.model, self.optimizer, rank0_only=False)["state"]
        plain = {names[id(parameter)]: state for parameter, state in self.plain.state.items()}
        if found.keys() != expected.keys() or states.keys() != plain.keys():
            self.wrong.append(f"{when}: {found.keys() ^ expected.keys()}, {states.keys() ^ plain.keys()}")
            return
        found |= {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}
        expected |= {f"{name}.{key}": value for name, state in plain.items() for key, value in state.items()}
        for name, value in expected.items():
            if found[name].dtype != value.dtype or not torch.allclose(found[name], value, rtol=1e-3, atol=1e-5):
                self.wrong.append(f"{when}: {name}")


def _save(rank: int, world: int, seed: int, how: str, path: str) -> list[str]:
    pair = Pair(rank, world, seed, "before")
    pair.train(2)
    plain = copy.deepcopy((pair.number, pair.alone.state_dict(), pair.plain.state_dict()))
    model, optimizer, saving = pair.model, pair.optimizer, None
    if how == "checkpoint":
        checkpoint.save(f"{path}/saved", model=model, optimizer=optimizer)
    elif how == "in the background":
        saving = checkpoint.async_save(f"{path}/saved", model=model, optimizer=optimizer)
    else:
        with FSDP.state_dict_type(model, "SHARDED" if how == "dcp" else "FULL"):
            state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
            if how == "dcp":
                dcp.save(state, checkpoint_id=f"{path}/saved")
            elif rank == 0:
                torch.save(state, f"{path}/saved")
    pair.train(1)
    pair.compare("saved, and gone on")
    if saving is not None:
        saving.result()
    if rank == 0:
        torch.save(plain, f"{path}/plain")
    return pair.wrong


def _resume(rank: int, world: int, seed: int, how: str, path: str) -> list[str]:
    pair = Pair(rank, world, seed, "after")
    pair.train(seed % 2)  # its own state is replaced by the load
    model, optimizer = pair.model, pair.optimizer
    if how in ("checkpoint", "in the background"):
        checkpoint.load(f"{path}/saved", model=model, optimizer=optimizer)
    else:
        with FSDP.state_dict_type(model, "SHARDED" if how == "dcp" else "FULL"):
            if how == "dcp":
                state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
                there = dcp.FileSystemReader(f"{path}/saved").read_metadata().state_dict_metadata
                states = state["optimizer"]["state"]  # as of a first step, in which all parameters have gradients
                for name in [*states]:
                    if not any(key.startswith(f"optimizer.state.{name}.") for key in there):
                        del states[name]
                dcp.load(state, checkpoint_id=f"{path}/saved")
            else:
                state = torch.load(f"{path}/saved")
            model.load_state_dict(state["model"])
            FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"], load_directly=True)
    pair.number, weights, states = torch.load(f"{path}/plain")
    pair.alone.load_state_dict(weights)
    pair.plain.load_state_dict(states)
    pair.compare("loaded")
    pair.train(3)
    pair.compare("resumed")
    return pair.wrong


@pytest.mark.parametrize("seed", seeds(4, 200))
def test_another_number_of_ranks_goes_on_as_one_process_does(run: Run, tmp_path: Path, seed: int) -> None:
    before, after = WORLDS[seed % len(WORLDS)]
    how = FORMATS[seed % len(FORMATS)]
    assert not any(run(before, _save, seed, how, str(tmp_path)))
    assert not any(run(after, _resume, seed, how, str(tmp_path)))
