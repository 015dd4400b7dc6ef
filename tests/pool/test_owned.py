"""Owned intervals through torch.distributed.checkpoint: saved at one world, read at another, whole or in pieces."""

from __future__ import annotations

import copy
import io
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from flatfsdp.errors import UsageError
from flatfsdp.layout import ParamSpec, Span
from flatfsdp.owned import OwnedInterval
from tests.harness import pool

SPECS = {
    "three": ParamSpec("three", (5, 7, 3)),
    "empty": ParamSpec("empty", (0, 3)),
    "scalar": ParamSpec("scalar", ()),
    "one": ParamSpec("one", (2,)),
    "channels_last": ParamSpec("channels_last", (2, 3, 4, 5), (60, 1, 15, 3)),
}


def whole(spec: ParamSpec) -> torch.Tensor:
    numbers = torch.arange(float(spec.numel))
    return numbers.view(spec.shape) if spec.stride is None else numbers.as_strided(spec.shape, spec.stride)


def piece(spec: ParamSpec, rank: int, world: int, *, fill: float | None = None) -> OwnedInterval:
    numel = prod(spec.shape)
    each = -(-numel // world)
    span = Span(min(numel, rank * each), min(numel, (rank + 1) * each))
    local = torch.arange(float(span.start), float(span.stop))
    return OwnedInterval(local if fill is None else local.fill_(fill), spec, span, names_empty=rank == 0)


def save(rank: int, world: int, path: str) -> None:
    state = {name: piece(spec, rank, world) for name, spec in SPECS.items()}
    dcp.save(state, checkpoint_id=f"{path}/now")
    dcp.async_save(state, checkpoint_id=f"{path}/later").result()


def load(rank: int, world: int, path: str) -> None:
    for folder in ("now", "later"):
        state = {name: piece(spec, rank, world, fill=-1.0) for name, spec in SPECS.items()}
        dcp.load(state, checkpoint_id=f"{path}/{folder}")
        for name, spec in SPECS.items():
            assert torch.equal(state[name].local, piece(spec, rank, world).local), name
        plain = {name: torch.full_like(whole(spec), -1.0) for name, spec in SPECS.items()}
        dcp.load(plain, checkpoint_id=f"{path}/{folder}")
        for name, spec in SPECS.items():
            assert torch.equal(plain[name], whole(spec)), name


def test_any_world_reads_what_any_world_saved(tmp_path: Path) -> None:
    for world in (1, 3):
        pool.run(world, save, str(tmp_path / str(world)))
    for world in (2, 3):
        for saved in (1, 3):
            pool.run(world, load, str(tmp_path / str(saved)))


def test_it_travels_as_a_tensor_does() -> None:
    held = piece(SPECS["channels_last"], 1, 2)
    file = io.BytesIO()
    torch.save({"p": held}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["p"]
    for each in (loaded, copy.deepcopy(held), held.clone(), held.detach(), held.to(torch.float64).float(), held.cpu()):
        assert isinstance(each, OwnedInterval)
        assert each.shape == held.shape and each.stride() == held.stride() and each.span == held.span
        assert torch.equal(each.local, held.local)
    assert held.clone().local.data_ptr() != held.local.data_ptr()


def test_a_whole_tensor_fills_it_and_it_fills_a_whole_tensor() -> None:
    spec = SPECS["channels_last"]
    held = piece(spec, 1, 2, fill=0.0)
    held.copy_(whole(spec).contiguous())
    assert torch.equal(held.local, piece(spec, 1, 2).local)
    target = torch.zeros(spec.shape)
    assert torch.equal(target.copy_(piece(spec, 0, 1)), whole(spec))


def test_what_it_cannot_do_is_refused() -> None:
    held, other = piece(SPECS["three"], 1, 2), piece(SPECS["three"], 0, 2)
    with pytest.raises(UsageError, match=r"aten.add.Tensor of 'three': .* only elements \[53, 105\) of shape \(5, 7,"):
        held + 1
    with pytest.raises(UsageError, match=r"different intervals"):
        held.copy_(other)
    with pytest.raises(UsageError, match=r"copying 'three' into a whole tensor"):
        torch.zeros(5, 7, 3).copy_(held)
    with pytest.raises(UsageError, match=r"does not fit a tensor of shape \(3,\)"):
        OwnedInterval(torch.zeros(3), SPECS["three"], Span(0, 4))
