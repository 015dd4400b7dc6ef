"""An optimizer's own state dict belongs to one rank: it records the rank, and another one refuses it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.engine.state.optim.stamp import KEY
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.corners import HYBRID, Setting, joined, seeded

pytestmark = pytest.mark.distributed

BOTH = (Setting(orig=True), Setting(orig=False))


def even() -> nn.Module:
    """Shards of two ranks are equally large, so that only a stamp distinguishes them."""
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


def made(setting: Setting) -> tuple[Any, torch.optim.Optimizer]:
    model = setting.wrap(seeded(even), (nn.Linear,))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def stepped(rank: int, setting: Setting) -> tuple[Any, torch.optim.Optimizer]:
    model, optim = made(setting)
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    optim.step()
    return model, optim


def traveled(state: Any) -> Any:
    """`state` through a file that may hold plain data only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def from_rank(source: int, value: Any) -> Any:
    objects = [value]
    dist.broadcast_object_list(objects, src=source)
    return objects[0]


def refusal(optim: torch.optim.Optimizer, state: Any) -> str:
    """The error with which `optim` refuses `state`; empty if it loads it."""
    try:
        optim.load_state_dict(state)
    except UsageError as error:
        return str(error)
    return ""


def of_rank_0(rank: int, world: int) -> list[str]:
    lines = []
    for setting in BOTH:
        model, optim = stepped(rank, setting)
        own = traveled(optim.state_dict())
        first = from_rank(0, own)
        another = made(setting)
        for what, holder in (("stepped", optim), ("new", another[1])):
            before = copy.deepcopy(holder.state_dict())
            text = refusal(holder, first)
            if rank == 0 and text:
                lines.append(f"{setting} {what}: rank 0's on rank 0: {text}")
            if rank and not all(
                word in text
                for word in ("holds shard 0 of 2", "steps on shard 1 of 2", "every rank", "optim_state_dict(")
            ):
                lines.append(f"{setting} {what}: rank 0's on rank 1: {text!r}")
            if rank and repr(holder.state_dict()) != repr(before):
                lines.append(f"{setting} {what}: refused, but changed")
            if text := refusal(holder, own):
                lines.append(f"{setting} {what}: its own: {text}")
            older = {key: value for key, value in first.items() if key != KEY}
            if text := refusal(holder, older):
                lines.append(f"{setting} {what}: without a stamp: {text}")
        optim.load_state_dict(own)
        named = FSDP.optim_state_dict(model, optim, own)
        if set(named) != {"state", "param_groups"} or repr(named) != repr(FSDP.optim_state_dict(model, optim)):
            lines.append(f"{setting}: names from a stamped dict: {list(named)}")
        plain = torch.optim.AdamW([nn.Parameter(torch.zeros_like(p)) for p in model.parameters()])
        plain.load_state_dict(own)
        if len(plain.state) != len(own["state"]) or KEY in plain.state_dict():
            lines.append(f"{setting}: an optimizer of torch's own did not leave the stamp alone")
    return lines


def test_rank_0s_on_every_rank_is_refused(pool2: Run) -> None:
    assert not joined(pool2(of_rank_0))


def given(rank: int, world: int, setting: Setting) -> Any:
    _model, optim = stepped(rank, setting)
    return optim.state_dict()


def taken(rank: int, world: int, setting: Setting, states: list[Any]) -> str:
    _model, optim = made(setting)
    return refusal(optim, states[rank % len(states)])


def test_another_number_of_ranks_is_named(run: Run) -> None:
    for setting in BOTH:
        states = run(2, given, setting)
        for text in run(3, taken, setting, states):
            assert "of 2, this optimizer steps on shard" in text and "number of ranks" in text
        other = run(2, taken, Setting(orig=setting.orig), run(2, one_unit, setting.orig))
        assert all("of a different layout" in text and "a different wrapping" in text for text in other), other


def one_unit(rank: int, world: int, orig: bool) -> Any:
    model = Setting(orig=orig).wrap(seeded(even), ())
    groups = [{"params": [p]} for p in model.parameters()]
    optim = torch.optim.AdamW(groups)
    model(torch.ones(1, 8)).sum().backward()
    optim.step()
    return optim.state_dict()


def unstamped(rank: int, world: int, strategy: str, orig: bool) -> list[str]:
    _model, optim = stepped(rank, Setting(strategy, orig))
    return list(optim.state_dict())


@pytest.mark.parametrize(("world", "strategy"), [(1, "FULL_SHARD"), (2, "NO_SHARD")])
def test_where_every_rank_holds_all_there_is_no_stamp(world: int, strategy: str, run: Run) -> None:
    for orig in (True, False):
        assert run(world, unstamped, strategy, orig) == [["state", "param_groups"]] * world


def test_replicas_take_each_others(run: Run) -> None:
    for setting in HYBRID[:2]:
        states = run(4, given, setting)
        assert run(4, taken, setting, states[2:] + states[:2]) == [""] * 4
        assert all("shard 1 of 2" in text for text in run(4, taken, setting, states[1:] + states[:1]))
