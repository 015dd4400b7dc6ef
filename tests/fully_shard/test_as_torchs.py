"""Interfaces that programs for FSDP2 use: signatures, policies, names in torch's modules, and a
manual that describes each method."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn

import flatfsdp
from flatfsdp import FSDPModule, as_torch
from tests.harness import inspect as harness

pytestmark = pytest.mark.single_process

MANUAL = Path(__file__).resolve().parents[2] / "docs" / "migration" / "fsdp2.md"
METHODS = sorted(
    name
    for name, value in vars(theirs.FSDPModule).items()
    if inspect.isfunction(value) and not name.startswith("__") and name != "_apply"
)
# Names that programs import, and their modules.
NAMES = (
    "fully_shard FSDPModule MixedPrecisionPolicy OffloadPolicy CPUOffloadPolicy UnshardHandle "
    "register_fsdp_forward_method share_comm_ctx"
).split()
PLACES = {
    "torch.distributed.fsdp": NAMES,
    "torch.distributed.fsdp._fully_shard": NAMES,
    "torch.distributed.fsdp._fully_shard._fully_shard": "fully_shard FSDPModule UnshardHandle "
    "register_fsdp_forward_method share_comm_ctx disable_fsdp_module_new_init MixedPrecisionPolicy "
    "OffloadPolicy".split(),
    "torch.distributed.fsdp._fully_shard._fsdp_api": "MixedPrecisionPolicy OffloadPolicy CPUOffloadPolicy "
    "DataParallelMeshDims".split(),
    "torch.distributed.fsdp._fully_shard._fsdp_common": ["DataParallelMeshDims", "ShardPlacementResult"],
    "torch.distributed._composable.fsdp.fully_shard": "fully_shard FSDPModule UnshardHandle "
    "register_fsdp_forward_method".split(),
    "torch.distributed._composable.fsdp": "fully_shard FSDPModule MixedPrecisionPolicy OffloadPolicy "
    "CPUOffloadPolicy UnshardHandle register_fsdp_forward_method".split(),
    "torch.distributed.pipelining.stage": ["FSDPModule", "fully_shard"],
}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.kind) for each in inspect.signature(function).parameters.values()]


def test_fully_shard_has_the_signature_of_torchs() -> None:
    ours, torchs = (dict(inspect.signature(each.fully_shard).parameters) for each in (flatfsdp, theirs))
    for name in {"dp_mesh_dims"} - {*torchs}:  # torch 2.11 does not have it
        del ours[name]
    for name in ("layout", "deterministic_sums"):  # our own, after torch's
        assert ours.pop(name).kind is inspect.Parameter.KEYWORD_ONLY
    assert [(name, each.kind) for name, each in ours.items()] == parameters(theirs.fully_shard)
    # Without a policy nothing is cast or offloaded, as with the one that torch's makes then.
    policies = {name for name in ours if ours[name].default != torchs[name].default}
    assert policies == {"mp_policy", "offload_policy"}
    assert torchs["mp_policy"].default == theirs.MixedPrecisionPolicy()
    assert type(torchs["offload_policy"].default) is theirs.OffloadPolicy


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_what_torchs_take(name: str) -> None:
    taken = dict(parameters(getattr(FSDPModule, name)))
    for parameter, kind in parameters(getattr(theirs.FSDPModule, name)):
        assert taken.get(parameter) in (kind, inspect.Parameter.POSITIONAL_OR_KEYWORD), parameter
        taken.pop(parameter)
    rest = set(taken)
    defaults = inspect.signature(getattr(FSDPModule, name)).parameters
    assert all(defaults[each].default is not inspect.Parameter.empty for each in rest), rest


@pytest.mark.parametrize("name", ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"])
def test_policies_have_torchs_fields(name: str) -> None:
    ours, torchs = (inspect.signature(getattr(each, name)).parameters.values() for each in (flatfsdp, theirs))
    assert [(each.name, each.default) for each in ours] == [(each.name, each.default) for each in torchs]


def test_torchs_offload_policies_are_understood() -> None:
    for policy, offloads in ((theirs.CPUOffloadPolicy(pin_memory=False), True), (theirs.OffloadPolicy(), False)):
        model = flatfsdp.fully_shard(nn.Linear(2, 2), offload_policy=policy)
        assert [each.is_offloaded for each in harness.unit(model).flat_params] == [offloads]
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None


def test_every_method_of_torchs_is_in_the_manual() -> None:
    text = MANUAL.read_text()
    named = set(re.findall(r"\b(\w+)\(", text))
    assert set(METHODS) - {"_get_fsdp_state"} <= named


def test_names_are_found_where_programs_look() -> None:
    modules = {place: importlib.import_module(place) for place in PLACES}
    before = {(place, name): getattr(module, name, None) for place, module in modules.items() for name in PLACES[place]}
    as_torch.install()
    try:
        for (place, name), torchs in before.items():
            found = getattr(modules[place], name, None)
            if torchs is None:  # this torch has no such name there
                assert found is None, (place, name)
            else:
                assert found is getattr(flatfsdp, name), (place, name)
        layer = theirs.fully_shard(nn.Linear(2, 2))
        assert isinstance(layer, theirs.FSDPModule) and isinstance(layer, FSDPModule)
        classes = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard").get_cls_to_fsdp_cls()
        assert classes[nn.Linear] is type(layer)
    finally:
        as_torch.uninstall()
    assert before == {(place, name): getattr(modules[place], name, None) for place, name in before}


def test_torchs_own_goes_on_beside() -> None:
    """Code that has imported torch's function before uses it with torch's classes."""
    file = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    kept = (file.fully_shard, file.FSDPModule)
    as_torch.install()
    try:
        ours = file.fully_shard(nn.Linear(2, 2))
        assert isinstance(ours, FSDPModule) and isinstance(ours, file.FSDPModule)
        torchs = nn.Sequential(kept[0](nn.Linear(2, 2)))
        kept[0](torchs)
        assert isinstance(torchs, kept[1]) and not isinstance(torchs, file.FSDPModule)
        torchs.set_requires_gradient_sync(False)
        torchs[0].set_modules_to_forward_prefetch([torchs[0]])
        for module in (ours, torchs):
            module(torch.ones(1, 2)).sum().backward()
        assert ours.weight.grad is not None and torchs[0].weight.grad is None  # as it was not to be reduced yet
        torchs.set_requires_gradient_sync(True)
        torchs(torch.ones(1, 2)).sum().backward()
        assert torch.equal(torchs[0].weight.grad.full_tensor(), torch.full((2, 2), 2.0))
    finally:
        as_torch.uninstall()
    assert file.FSDPModule is kept[1]


def test_every_file_of_torchs_fsdp2_gives_out_our_names() -> None:
    importlib.import_module("torch.distributed._composable.fsdp.fully_shard")
    packages = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")
    files = {path: module for path, module in sys.modules.items() if path.startswith(packages)}
    torchs = {id(getattr(theirs, name)): name for name in NAMES}
    found = {(path, name): torchs[id(value)] for path in files for name, value in vars(files[path]).items()
             if id(value) in torchs}  # fmt: skip
    assert len({path for path, _ in found}) >= 6, found
    as_torch.install()
    try:
        for (path, name), public in found.items():
            assert getattr(files[path], name) is getattr(flatfsdp, public), (path, name)
    finally:
        as_torch.uninstall()
