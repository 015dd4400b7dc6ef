"""Errors of torch 2.13's `fully_shard`, by the file that raises them: each is an error here, too, or supported here."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import flatfsdp
from flatfsdp import DataParallelMeshDims, fully_shard
from flatfsdp.errors import ConfigTypeError, ConfigValueError, FlatFSDPError, UsageError
from tests.harness import inspect

pytestmark = pytest.mark.single_process


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layer() -> Any:
    return fully_shard(nn.Linear(2, 2))


def mesh() -> DeviceMesh:
    return dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))


def on(choose: Callable[[DeviceMesh], DeviceMesh], *placements: Any, dp: bool = True) -> None:
    """The weight is a DTensor on a part of the mesh before it is sharded."""
    whole = mesh()
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), choose(whole), placements))
    fully_shard(linear, **({"mesh": whole["dp"]} if dp else {}))


def partial_sum() -> None:
    whole = mesh()
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), whole["tp"], [Partial()]))
    fully_shard(linear, mesh=whole["dp"])


def on_another_device() -> None:
    elsewhere = dist.init_device_mesh("meta", (1, 1), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), elsewhere["tp"], [Replicate()], run_check=False))
    fully_shard(linear, mesh=mesh()["dp"])


def nested() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    model[0].reset_iter_state()  # type: ignore[operator]


def offloaded_elsewhere() -> None:
    model = fully_shard(nn.Linear(2, 2), offload_policy=flatfsdp.CPUOffloadPolicy(pin_memory=False))
    inspect.check_shards_on(model, torch.device("cuda", 0))


def tied_over_lists() -> None:
    one, two, three = (nn.Linear(2, 2) for _ in range(3))
    two.weight = one.weight
    fully_shard([one, three])
    fully_shard(nn.Sequential(one, two, three))


def tied_dtensors() -> None:
    whole = mesh()
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    one.weight = two.weight = nn.Parameter(distribute_tensor(one.weight.detach(), whole["tp"], [Shard(0)]))
    model = nn.Sequential(one, two)
    fully_shard(one, mesh=whole["dp"])
    fully_shard(model, mesh=whole["dp"])


def on_all_axes(
    *placements: Any, dims: Any, names: tuple[str, ...] = ("dp", "tp"), given: Callable[[DeviceMesh], Any] | None = None
) -> None:
    """All parameters are DTensors on the mesh; plain ones without `placements`."""
    whole = dist.init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    linear = nn.Linear(2, 2, bias=False)
    if placements:
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), whole, placements))
    fully_shard(linear, mesh=whole if given is None else given(whole), dp_mesh_dims=dims)


def without_shards() -> None:
    whole = mesh()
    dims = flatfsdp.DataParallelMeshDims(replicate="dp")
    linear = nn.Linear(2, 2, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), whole, [Replicate()] * 2))
    info = SimpleNamespace(mesh=whole["dp"], shard_mesh_dim=None, dp_mesh_dims=dims, spmd_mesh=whole)
    fully_shard(linear, shard_placement_fn=lambda p: SimpleNamespace(placement=None, mesh_info=info))


DP = DataParallelMeshDims(shard="dp")


def of_another_shape() -> None:
    linear = layer()
    linear.weight = nn.Parameter(torch.ones(3, 2))
    linear(torch.ones(1, 2))


# The names are files of torch.distributed.fsdp._fully_shard.
REFUSED: list[tuple[str, Callable[[], Any], type[FlatFSDPError], str]] = [
    ("_fsdp_param: one mesh", lambda: on(lambda m: m["tp"], Shard(0), dp=False), UsageError, "named dimensions of one"),
    ("_fsdp_param: the data-parallel mesh", lambda: on(lambda m: m["dp"], Shard(0)), UsageError, "'dp' is in both"),
    ("_fsdp_param: all of it", lambda: on(lambda m: m, Replicate(), Shard(0)), UsageError, "'dp' is in both"),
    ("_fsdp_param: partial sums", partial_sum, UsageError, "'weight' is a DTensor.*partial sum is not a parameter"),
    ("_fsdp_param: tied", tied_over_lists, UsageError, "'1.weight' of Sequential is tied .*as a list"),
    ("_fsdp_param: tied DTensors", tied_dtensors, UsageError, "'1.weight' is tied .*into one unit"),
    ("_fsdp_param: another shape", of_another_shape, UsageError, r"shape \(3, 2\); expected .*distribute_tensor"),
    (
        "_fsdp_param: plain on all axes",
        lambda: on_all_axes(dims=DP),
        UsageError,
        "'weight' is a Parameter.*distribute_module.*ignored_params=",
    ),
    (
        "_fsdp_param: another mesh",
        lambda: on_all_axes(Replicate(), Replicate(), dims=DP, given=lambda m: m["tp", "dp"]),
        UsageError,
        "'weight' is a DTensor on .*was given .*the same mesh",
    ),
    (
        "_fsdp_param: split already",
        lambda: on_all_axes(Shard(0), Replicate(), dims=DP),
        UsageError,
        "is along 'dp'.*Expected Replicate",
    ),
    (
        "_fsdp_init: no such dimension",
        lambda: on_all_axes(Replicate(), Replicate(), dims=DataParallelMeshDims(shard="fsdp")),
        ConfigValueError,
        "dp_mesh_dims: got 'fsdp'.*'dp', 'tp'",
    ),
    (
        "_fsdp_init: for both",
        lambda: on_all_axes(Replicate(), Replicate(), dims=DataParallelMeshDims("dp", "dp")),
        ConfigValueError,
        "each dimension once",
    ),
    (
        "_fsdp_init: no neighbors",
        lambda: on_all_axes(*[Replicate()] * 3, dims=DataParallelMeshDims(("dp", "cp")), names=("dp", "tp", "cp")),
        ConfigValueError,
        "adjacent in the mesh",
    ),
    (
        "_fsdp_init: another device",
        on_another_device,
        UsageError,
        "'weight' is a DTensor.*meta.*on cpu",
    ),
    ("_fsdp_init: no names", lambda: on_all_axes(dims=DP, given=lambda m: 3), ConfigTypeError, "DeviceMesh of all"),
    ("_fsdp_init: replicas alone", without_shards, ConfigValueError, "parameter 'weight'.*no dimension to shard over"),
    (
        "_fsdp_common: places",
        lambda: fully_shard(
            nn.Linear(2, 2),
            shard_placement_fn=lambda p: flatfsdp.ShardPlacementResult(
                None, SimpleNamespace(mesh=mesh(), shard_mesh_dim=1, replicate_mesh_dim=None)
            ),
        ),
        ConfigValueError,
        r"parameter 'weight': got dimensions \(replicate, shard\) \(None, 1\) of a 2-D mesh",
    ),
    (
        "_fsdp_common: placements",
        lambda: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: Replicate()),
        ConfigValueError,
        "Replicate.*'weight'.*Shard",
    ),
    ("_fully_shard: no bool", lambda: layer().set_reshard_after_forward("yes"), ConfigTypeError, "a number of ranks"),
    (
        "_fully_shard: no factor",
        lambda: layer().set_reshard_after_forward(5),
        ConfigValueError,
        "divisor of the 1",
    ),
    (
        "_fully_shard: no method",
        lambda: flatfsdp.register_fsdp_forward_method(layer(), "nope"),
        ConfigValueError,
        "Linear has no such method",
    ),
    ("_fully_shard: no list", lambda: flatfsdp.share_comm_ctx(layer()), ConfigTypeError, "a list of outermost"),
    (
        "_fully_shard: a stream",
        lambda: layer().set_all_reduce_hook(print, stream=object()),
        ConfigValueError,
        "set_all_reduce_hook: stream: got .*Accepted: None, unless on an accelerator and without replicas",
    ),
    ("_fully_shard: nested", nested, UsageError, r"nested unit \(Linear\).*module of fully_shard\(\) \(Seq"),
    (
        "_fully_shard: its state",
        lambda: methodcaller("_get_fsdp_state")(layer()),
        UsageError,
        "private state of torch's.*summary",
    ),
    (
        "_fsdp_param: offloaded elsewhere",
        offloaded_elsewhere,
        UsageError,
        r"elsewhere: weight \(cuda:0, expected cpu\), bias .*stay on the CPU",
    ),
    ("_fully_shard: no hook", lambda: layer().set_all_reduce_hook(3), ConfigTypeError, "a callable"),
    (
        "_fully_shard: no number",
        lambda: layer().set_reduce_scatter_max_input_buffers(True),
        ConfigTypeError,
        "at least 1",
    ),
    (
        "_fully_shard: no modules",
        lambda: layer().set_modules_to_forward_prefetch(layer()),
        ConfigTypeError,
        "a list of modules",
    ),
    ("_fsdp_collectives: factor", lambda: layer().set_gradient_divide_factor(0), ConfigValueError, "a positive number"),
    ("flags", lambda: layer().set_requires_gradient_sync("no"), ConfigTypeError, "True or False"),
    ("flags", lambda: layer().set_is_last_backward(0), ConfigTypeError, "True or False"),
    ("flags", lambda: layer().unshard(async_op=1), ConfigTypeError, "True or False"),
    ("flags", lambda: layer().set_unshard_in_backward("no"), ConfigTypeError, "True or False"),
]


@pytest.mark.parametrize(("where", "call", "kind", "words"), REFUSED)
def test_refused(where: str, call: Callable[[], Any], kind: type[FlatFSDPError], words: str) -> None:
    with pytest.raises(kind) as refused:
        call()
    assert re.search(words, str(refused.value), re.DOTALL), refused.value


def transposed() -> Any:
    linear = nn.Linear(2, 3)
    linear.weight = nn.Parameter(torch.ones(2, 3).t())
    return fully_shard(linear)


def after_a_forward() -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])(torch.ones(1, 2))
    return fully_shard(model)


def of_two_dtypes() -> Any:
    linear = nn.Linear(2, 2)
    linear.scale = nn.Parameter(torch.ones(2).double())
    return fully_shard(linear)


def copied() -> Any:
    return copy.deepcopy(layer())


@pytest.mark.parametrize("make", [transposed, after_a_forward, of_two_dtypes, copied])
def test_torch_refuses_what_works_here(make: Callable[[], Any]) -> None:
    model = make()
    model(torch.ones(1, 2)).sum().backward()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
