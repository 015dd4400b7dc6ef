"""Owned intervals through torch.distributed.checkpoint: saved at one world, read at another, whole or in pieces."""

from __future__ import annotations

import copy
import io
import re
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.engine.layout.layout import ParamSpec, Span
from flatfsdp.engine.state.owned_interval import OwnedInterval
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness import pool
from tests.harness.corners import Setting, joined, seeded

pytestmark = pytest.mark.distributed

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


def test_pickles_name_a_module_that_stays() -> None:
    """torch.load(weights_only=True) compares the names, and plain pickle imports the module."""
    spec = ParamSpec("weight", (3, 2))
    file = io.BytesIO()
    torch.save(piece(spec, 1, 2), file)
    named = {name for name in re.findall(rb"flatfsdp[\w.]+", file.getvalue())}
    assert named and all(name.startswith((b"flatfsdp.layout", b"flatfsdp.engine.layout")) for name in named), named
    sys.modules.pop("flatfsdp.layout", None)
    for safe in (True, False):
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=safe)
        assert torch.equal(loaded.local, piece(spec, 1, 2).local)


def save(rank: int, world: int, path: str) -> None:
    state = {name: piece(spec, rank, world) for name, spec in SPECS.items()}
    dcp.save(state, checkpoint_id=f"{path}/now")
    dcp.async_save(state, checkpoint_id=f"{path}/later").result()
    # For a storage writer torch stages by copies into tensors like these, but for those without dimensions, which need
    # to know the other ranks.
    state.pop("scalar")
    dcp.async_save(state, storage_writer=dcp.FileSystemWriter(f"{path}/written")).result()


def load(rank: int, world: int, path: str) -> None:
    for folder in ("now", "later", "written"):
        specs = {name: spec for name, spec in SPECS.items() if spec.shape or folder != "written"}
        state = {name: piece(spec, rank, world, fill=-1.0) for name, spec in specs.items()}
        dcp.load(state, checkpoint_id=f"{path}/{folder}")
        for name, spec in specs.items():
            assert torch.equal(state[name].local, piece(spec, rank, world).local), name
        plain = {name: torch.full_like(whole(spec), -1.0) for name, spec in specs.items()}
        dcp.load(plain, checkpoint_id=f"{path}/{folder}")
        for name, spec in specs.items():
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
    for like, fill in ((torch.zeros_like(held), 0.0), (torch.empty_like(held).copy_(held), None)):
        assert isinstance(like, OwnedInterval) and like.shape == held.shape and like.span == held.span
        assert torch.equal(like.local, held.local if fill is None else torch.full_like(held.local, fill))


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


# --- operations of programs on sharded values -------------------------------------------------------------------------


class Kinds(nn.Module):
    """Parameters of every shape; some lie on one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 7)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.low = nn.Parameter(torch.randn(6).bfloat16())
        self.scalar, self.empty = nn.Parameter(torch.tensor(2.5)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.scalar * self.low.sum() + self.conv.weight.sum() + self.empty.sum()


def stepped(rank: int, setting: Setting) -> tuple[Any, torch.optim.Optimizer, dict[str, Tensor], dict[str, Any]]:
    """A model and its optimizer after a step, and the full tensors of both."""
    model = setting.wrap(seeded(Kinds), (nn.Linear,))
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 5) * (rank + 1)).sum().backward()
    optim.step()
    return model, optim, model.state_dict(), FSDP.full_optim_state_dict(model, optim, rank0_only=False)["state"]


def asked(rank: int, world: int, setting: Setting) -> list[str]:
    model, optim, whole_of, moments = stepped(rank, setting)
    with FSDP.state_dict_type(model, "SHARDED"):
        values = model.state_dict()
        states = FSDP.optim_state_dict(model, optim)["state"]
    pairs = {key: (value, whole_of[key]) for key, value in values.items()}
    pairs |= {
        f"{key}.exp_avg": (each["exp_avg"], moments[key]["exp_avg"])
        for key, each in states.items()
        if each["exp_avg"].dim()
    }
    if setting.strategy != "NO_SHARD":
        with FSDP.state_dict_type(model, "LOCAL"):
            for key, value in model.state_dict().items():
                pairs[key] = value, torch.cat([*_gathered(value.to_local())])
    lines = []
    for key, (value, expected) in pairs.items():
        for twin in (value, value.clone(), copy.deepcopy(value)):
            found = twin.full_tensor()
            if (
                not torch.equal(found, expected)
                or found.stride() != expected.stride()
                or type(found) is not torch.Tensor
            ):
                lines.append(f"{setting}: {key}: {found} for {expected}")
        assembled = torch.full(value.shape, -1.0, dtype=expected.dtype)
        for shard in value.local_shards():
            block = assembled
            for dim, start in enumerate(shard.metadata.shard_offsets):
                block = block.narrow(dim, start, shard.metadata.shard_sizes[dim])
            block.copy_(shard.tensor)
        own = OwnedInterval(torch.empty_like(value.local), value.spec, value.span)
        own.take_from(assembled)
        if not torch.equal(own.local, value.to_local()) or (assembled != -1).sum() > value.local.numel():
            lines.append(f"{setting}: {key}: shards {value.local_shards()}")
    return lines


def staged(rank: int, world: int, path: str, setting: Setting) -> list[str]:
    """torch saves the copies that its writer makes, tensors without dimensions included."""
    model, optim, whole_of, moments = stepped(rank, setting)
    with FSDP.state_dict_type(model, "SHARDED"):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optim)["state"]}
    dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path)).result()
    found = {
        "model": {key: torch.full_like(value, -1.0) for key, value in whole_of.items()},
        "optim": {key: {"exp_avg": torch.full_like(each["exp_avg"], -1.0)} for key, each in moments.items()},
    }
    dcp.load(found, checkpoint_id=path)
    lines = [key for key, value in whole_of.items() if not torch.equal(found["model"][key], value)]
    lines += [key for key, each in moments.items() if not torch.equal(found["optim"][key]["exp_avg"], each["exp_avg"])]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with FSDP.state_dict_type(model, "SHARDED"):
        again = {"model": model.state_dict()}
        dcp.load(again, checkpoint_id=path)
        model.load_state_dict(again["model"])
    loaded: dict[str, torch.Tensor] = model.state_dict()
    return lines + [f"loaded {key}" for key, value in whole_of.items() if not torch.equal(loaded[key], value)]


@pytest.mark.parametrize("orig", [True, False])
def test_a_writer_of_torchs_stages_tensors_without_dimensions(pool3: Run, tmp_path: Path, orig: bool) -> None:
    assert not joined(pool3(staged, str(tmp_path), Setting(orig=orig)))


def _gathered(local: torch.Tensor) -> list[torch.Tensor]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, local)
    return found


def test_sharded_values_answer_as_dtensors_and_sharded_tensors(run: Run) -> None:
    settings = [Setting(orig=True), Setting(orig=False), Setting("NO_SHARD"), Setting(offload=True)]
    for world in (2, 3):
        for setting in settings:
            assert not joined(run(world, asked, setting))


def test_without_the_other_ranks_there_is_no_whole() -> None:
    with pytest.raises(UsageError, match=r"full_tensor\(\) of 'three': this rank has elements \[53, 105\)"):
        piece(SPECS["three"], 1, 2).full_tensor()
    assert torch.equal(piece(SPECS["channels_last"], 0, 1).full_tensor(), whole(SPECS["channels_last"]))
