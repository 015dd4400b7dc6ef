"""Optimizer state by names, against the same optimizer over the model that nothing wrapped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.engine.config.state_dict_configs import FullOptimStateDictConfig
from flatfsdp.engine.state.optim.descriptions import alike, shown
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import (
    ALL,
    HYBRID,
    HYBRID_HALVES,
    Setting,
    chosen,
    data,
    full_gradients,
    joined,
    loss_of,
    seeded,
)
from tests.harness.models import WIDTH, Convolution, Feedforward, Low, Motley, Pooled
from tests.harness.thorough import some, spread

pytestmark = pytest.mark.distributed

UNITS = (Feedforward, Low, Motley)
BOTH = (Setting(orig=True), Setting(orig=False))


class Corners(nn.Module):
    """Frozen and trainable parameters, four dtypes, tied ones, a scalar, an empty one, and some outside of FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Feedforward(WIDTH, 20), Low(WIDTH), Motley(WIDTH)])
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.outside = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.outside(self.last(self.first(x * self.gain))) + self.nothing.sum()


class Odd(torch.optim.Optimizer):
    """State of every kind: tensors of the parameter's shape in two dtypes, scalars, flags, nested values, None."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "schedule": ("cosine", [1, 2])})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, seen=torch.tensor(0), flags={"warm": True, "at": [1, 2.5]}, nothing=None)
                    state["slow"] = p.detach().clone().double()
                    state["sign"] = torch.zeros_like(p, dtype=torch.int8)
                state["step"] += 1
                state["seen"] += 2
                state["slow"].lerp_(p.double(), 0.5)
                state["sign"].copy_(p.grad.sign())
                p.add_(p.grad, alpha=-group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch casts states to the parameter's dtype, which these are not of."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, state in state_dict["state"].items():
            self.state[parameters[key]] = state


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.3),
    "odd": Odd,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[type[nn.Module], ...]]] = {
    "corners": (Corners, UNITS),
    "one unit": (lambda: nn.Sequential(Feedforward(WIDTH, 20), nn.Linear(WIDTH, 3)), ()),
    "channels_last": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 48), nn.Unflatten(1, (3, 4, 4)), Convolution(3), Pooled(3, 3)),
        (Convolution,),
    ),
}


class Pair:
    """A wrapped model and the same one not wrapped, each with its optimizer; they step on the same gradients."""

    def __init__(self, setting: Setting, model: str = "corners", optimizer: str = "adam") -> None:
        build, units = MODELS[model]
        self.plain = seeded(build)
        inside = seeded(build)
        ignored = [inside.outside] if hasattr(inside, "outside") else None
        self.model = setting.wrap(inside, units, ignored_modules=ignored)
        make = OPTIMIZERS[optimizer]
        self.optim = make(self.floating(self.model))
        self.plain_optim = make(self.floating(self.plain))

    @staticmethod
    def floating(model: nn.Module) -> list[nn.Parameter]:
        """No optimizer takes parameters of integers."""
        return [p for p in model.parameters() if p.is_floating_point()]

    def train(self, rank: int, steps: int = 2, *, first: int = 0) -> Pair:
        for step in range(first, first + steps):
            self.optim.zero_grad()
            loss_of(self.model(data(rank, step))).backward()
            for parameter in self.model.outside.parameters() if hasattr(self.plain, "outside") else ():
                dist.all_reduce(parameter.grad)  # ignored parameters are reduced by user code
            grads = full_gradients(self.model)
            for name, parameter in self.plain.named_parameters():
                parameter.grad = grads.get(name)
            self.optim.step()
            self.plain_optim.step()
        return self

    def expected(self) -> dict[str, Any]:
        """The plain optimizer's state by names."""
        return FSDP.rekey_optim_state_dict(
            self.plain_optim.state_dict(),
            "PARAM_NAME",
            self.plain,
            optim=self.plain_optim,  # type: ignore[arg-type]
        )

    def full(self, **more: Any) -> dict[str, Any]:
        return FSDP.full_optim_state_dict(self.model, self.optim, **{"rank0_only": False, **more})


def different(found: Mapping[str, Any], expected: Mapping[str, Any], *, bound: float = 0.0) -> Iterator[str]:
    """A line for each parameter whose state is another one; tensors may differ by `bound` relative to their values."""
    for name in {**found, **expected}:
        if name not in found or name not in expected:
            yield f"{name}: {'not ' if name not in found else ''}there"
        elif found[name].keys() != expected[name].keys():
            yield f"{name}: {sorted(found[name])}, not {sorted(expected[name])}"
        else:
            for state, value in expected[name].items():
                other = found[name][state]
                if bound and isinstance(value, Tensor) and state != "step":
                    if not torch.allclose(other, value, rtol=bound, atol=0.0):
                        yield f"{name}: {state} differs by {(other - value).abs().max()}"
                elif not alike(other, value):
                    yield f"{name}: {state} is {shown(other)}, not {shown(value)}"


def gathered(rank: int, world: int, settings: tuple[Setting, ...], optimizer: str, model: str = "corners") -> list[str]:
    lines = []
    for setting in settings:
        with setting.doubles():
            pair = Pair(setting, model, optimizer).train(rank)
            full, expected = pair.full(), pair.expected()
            bound = 1e-5 if optimizer == "fused" else 0.0  # rounds by where an element lies in its vectors
            lines += [f"{setting}: {line}" for line in different(full["state"], expected["state"], bound=bound)]
            groups = [{**group, "params": sorted(group["params"])} for group in full["param_groups"]]
            if groups != expected["param_groups"]:
                lines.append(f"{setting}: groups {groups}, not {expected['param_groups']}")
    return lines


@pytest.mark.parametrize(("number", "optimizer"), list(enumerate(OPTIMIZERS)))
def test_whole_states_are_those_of_the_plain_optimizer(number: int, optimizer: str, pool2: Run) -> None:
    assert not joined(pool2(gathered, some(ALL, 4, number), optimizer))


def test_in_channels_last(pool2: Run) -> None:
    assert not joined(pool2(gathered, chosen(gathered), "adam", "channels_last"))


def test_offloaded(pool2: Run) -> None:
    settings = (Setting(orig=True, offload=True), Setting("NO_SHARD", orig=False, offload=True))
    assert not joined(pool2(gathered, settings, "adam"))


@pytest.mark.parametrize("world", [1, 3, 4])
def test_on_other_worlds(world: int, run: Run) -> None:
    assert not joined(run(world, gathered, BOTH if world < 4 else chosen(gathered, HYBRID_HALVES), "adam"))


# --- loading ----------------------------------------------------------------------------------------------------------


def load_full(pair: Pair, saved: dict[str, Any] | None, way: str) -> None:
    """Load whole states into the pair's optimizer, by one of FSDP1's ways."""
    model, optim = pair.model, pair.optim
    if way == "shard":
        optim.load_state_dict(FSDP.shard_full_optim_state_dict(saved, model, optim=optim))  # type: ignore[arg-type]
    elif way == "scatter":
        optim.load_state_dict(FSDP.scatter_full_optim_state_dict(saved, model, optim=optim))
    else:
        with FSDP.state_dict_type(model, "FULL", None, FullOptimStateDictConfig(rank0_only=way == "rank 0")):
            FSDP.optim_state_dict_to_load(model, optim, saved, load_directly=True)  # type: ignore[arg-type]


WAYS = ("shard", "scatter", "to load", "rank 0")


def resumed(rank: int, world: int, setting: Setting, optimizer: str, way: str) -> list[str]:
    """An optimizer that loads the state of another one steps like it."""
    lines = []
    with setting.doubles():
        pair, other = Pair(setting, optimizer=optimizer).train(rank), Pair(setting, optimizer=optimizer)
        rank0_only = way in ("scatter", "rank 0")
        saved = pair.full(rank0_only=rank0_only)
        if rank0_only and bool(saved) is not (rank == 0):
            lines.append("rank 0 alone gets a dict")
        before = copy.deepcopy(saved)
        load_full(other, saved, way)
        if list(different(saved.get("state", {}), before.get("state", {}))):
            lines.append("the dict was changed")
        with FSDP.summon_full_params(pair.model), FSDP.summon_full_params(other.model), torch.no_grad():
            for one, two in zip(pair.model.parameters(), other.model.parameters(), strict=True):
                two.copy_(one)
        for each in (pair, other):
            each.train(rank, 2, first=2)
        lines += different(other.full()["state"], pair.full()["state"])
        lines += different(pair.full()["state"], pair.expected()["state"])
    return [f"{setting}, {way}: {line}" for line in lines]


@pytest.mark.parametrize(("optimizer", "way"), spread(["adam", "odd"], WAYS))
def test_what_is_loaded_steps_on(optimizer: str, way: str, pool2: Run) -> None:
    settings = [setting for setting in ALL if setting.strategy != "SHARD_GRAD_OP"]
    for setting in some(settings, 4, WAYS.index(way) + 2 * (optimizer == "odd")):
        assert not joined(pool2(resumed, setting, optimizer, way))


# --- through torch's distributed checkpoint ---------------------------------------------------------------------------


def save(rank: int, world: int, setting: Setting, path: str) -> dict[str, Any]:
    """Save intervals; values outlive the steps that follow."""
    pair = Pair(setting).train(rank)
    traffic = inspect.comm_stats(pair.model)
    traffic.reset()
    with FSDP.state_dict_type(pair.model, "SHARDED_STATE_DICT"):
        state = FSDP.optim_state_dict(pair.model, pair.optim)
    assert set(traffic.counts) <= {"scalar"}, dict(traffic.counts)
    whole = pair.full()
    pair.train(rank, 1, first=2)
    dcp.save({"optimizer": state}, checkpoint_id=path)
    return whole


def load(rank: int, world: int, setting: Setting, path: str, whole: dict[str, Any]) -> list[str]:
    """Into an optimizer that has not stepped: its state lists the values to load."""
    pair = Pair(setting)
    with FSDP.state_dict_type(pair.model, "SHARDED_STATE_DICT"):
        state = FSDP.optim_state_dict(pair.model, pair.optim)
        dcp.load({"optimizer": state}, checkpoint_id=path)
        FSDP.optim_state_dict_to_load(pair.model, pair.optim, state, load_directly=True)
    return list(different(pair.full()["state"], whole["state"]))


@pytest.mark.parametrize(
    ("before", "saved_as", "after", "loaded_as"),
    [
        (3, Setting(orig=True), 2, Setting(orig=False)),
        (2, Setting(orig=False), 3, Setting(orig=True)),
        (2, Setting("NO_SHARD", orig=True), 3, Setting(orig=False)),
        (2, Setting(orig=True), 1, Setting("NO_SHARD", orig=True)),
    ],
    ids=str,
)
def test_saved_and_loaded_by_dcp(
    before: int, saved_as: Setting, after: int, loaded_as: Setting, run: Run, tmp_path: Path
) -> None:
    whole = run(before, save, saved_as, str(tmp_path))[0]
    assert not joined(run(after, load, loaded_as, str(tmp_path), whole))


def test_hybrids_step_on(pool4: Run) -> None:
    for number, setting in enumerate(HYBRID[:2]):
        for way in some(("shard", "scatter"), 2, number):
            assert not joined(pool4(resumed, setting, "adam", way))


def saved(rank: int, world: int, setting: Setting, optimizer: str, way: str) -> dict[str, Any]:
    pair = Pair(setting, optimizer=optimizer).train(0)
    pair.optim.param_groups[0]["lr"] = 0.123
    return pair.full(rank0_only=way == "scatter")


def loaded(rank: int, world: int, dicts: list[dict[str, Any]], setting: Setting, optimizer: str, way: str) -> list[str]:
    pair = Pair(setting, optimizer=optimizer)
    load_full(pair, dicts[0] if rank == 0 or way != "scatter" else None, way)
    found = pair.full()
    lines = list(different(found["state"], dicts[0]["state"]))
    if found["param_groups"][0]["lr"] != dicts[0]["param_groups"][0]["lr"]:
        lines.append("another learning rate")
    return lines


@pytest.mark.parametrize(
    ("before", "after", "way"),
    [(*worlds, way) for worlds, way in zip([(4, 2), (3, 1), (2, 4), (1, 3)], ["shard", "scatter"] * 2, strict=True)],
)
def test_another_world_and_other_parameters(before: int, after: int, way: str, run: Run) -> None:
    for one, two in some((BOTH, BOTH[::-1]), 2, (before + after) // 2):
        dicts = run(before, saved, one, "adam", way)
        assert not joined(run(after, loaded, dicts, two, "adam", way))
