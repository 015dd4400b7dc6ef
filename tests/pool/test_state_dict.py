"""State dicts of models: what they hold, and that whoever loads them has the same model."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import (
    FullyShardedDataParallel,
    StateDictType,
)
from flatfsdp.owned import OwnedInterval
from tests.conftest import Run
from tests.harness.models import CASES
from tests.pool.corners import HYBRID, Setting, joined

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
as_type = FullyShardedDataParallel.state_dict_type
SETTINGS = tuple(Setting(s, orig) for s in ("FULL_SHARD", "NO_SHARD") for orig in (True, False))


def settings(world: int) -> tuple[Setting, ...]:
    return (*SETTINGS, *(HYBRID if world == 4 else ()))


def unlike(found: Any, expected: Any) -> list[str]:
    """Names whose tensors differ, bit by bit, or that only one has; "order" where only their order differs."""
    if list(found) != list(expected):
        return sorted(set(found) ^ set(expected)) or ["order"]
    return [
        name
        for name, value in expected.items()
        if found[name].dtype != value.dtype or found[name].shape != value.shape or not torch.equal(found[name], value)
    ]


def other(build: Callable[[], nn.Module]) -> nn.Module:
    """The module with other values."""
    model = build()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.full_like(tensor, 3))
    return model


# --- every model, every type ------------------------------------------------------------------------------------------


def whole(rank: int, world: int, name: str) -> list[str]:
    """Full dicts equal those of the plain model, and are loaded from and into plain and wrapped models."""
    case = CASES[name]
    lines = []
    for setting in settings(world):
        plain = case.build()
        expected = plain.state_dict()
        model = setting.wrap(case.build(), case.units)
        found = model.state_dict()
        ordered = found if setting.orig else {key: found[key] for key in expected if key in found}
        lines += [f"{setting}: {line}" for line in unlike(ordered, expected)]
        if len(found) != len(expected):
            lines.append(f"{setting}: more keys")
        again = setting.wrap(other(case.build), case.units)
        again.load_state_dict(expected)
        lines += [f"{setting}, loaded: {line}" for line in unlike(again.state_dict(), found)]
        plain = other(case.build)
        plain.load_state_dict(found)
        lines += [f"{setting}, plain: {line}" for line in unlike(plain.state_dict(), expected)]
    return lines


def pieces(rank: int, world: int, name: str) -> list[str]:
    """Sharded and local dicts say what each rank owns, without communication, and load as they are."""
    case = CASES[name]
    lines = []
    for setting in settings(world):
        expected = case.build().state_dict()
        for kind in (SHARDED, LOCAL):
            model = setting.wrap(case.build(), case.units)
            again = setting.wrap(other(case.build), case.units)
            with as_type(model, kind), as_type(again, kind):
                state = model.state_dict()
                for key, value in state.items() if kind is SHARDED else ():
                    if isinstance(value, OwnedInterval):
                        filled = value.with_local(torch.zeros_like(value.local))
                        filled.copy_(expected[key])
                        if not torch.equal(filled.local, value.local):
                            lines.append(f"{setting}: {key} differs")
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                again.load_state_dict(torch.load(file, weights_only=True))
            lines += [f"{setting}, {kind.name}: {line}" for line in unlike(again.state_dict(), model.state_dict())]
    return lines


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_whole_state_dicts_are_those_of_the_plain_model(run: Run, world: int, name: str) -> None:
    assert not joined(run(world, whole, name))


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("world", [1, 3, 4])
def test_a_rank_saves_and_loads_what_it_owns(run: Run, world: int, name: str) -> None:
    assert not joined(run(world, pieces, name))
