"""A module after `fully_shard`, on one rank of one: its class, its moves, its memory, its messages."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.pipelining import stage
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatfsdp
from flatfsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from flatfsdp.errors import ConfigTypeError, ConfigValueError, FlatFSDPError, UsageError
from tests.harness import inspect
from tests.harness.gather_hooks import AsBfloat16, AsInt8, extend
from tests.harness.inner_tensors import Columns, PairOfColumns

pytestmark = pytest.mark.single_process

SHAPE = (4, 8)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def model_of(device: str = "cpu") -> Any:
    model = plain(device)
    fully_shard([model[1], model[2]])
    return fully_shard(model)


def values() -> dict[str, torch.Tensor]:
    return plain().state_dict()


# -- classes -----------------------------------------------------------------------------------------------------------


def test_a_module_stays_what_it_was() -> None:
    before = plain()
    layer = before[0]
    layer.note = "kept"
    assert fully_shard(layer) is layer
    assert isinstance(layer, nn.Linear) and isinstance(layer, FSDPModule) and layer.note == "kept"
    assert type(layer).__name__ == "FSDPLinear" and type(layer) is type(fully_shard(nn.Linear(2, 2)))
    assert not isinstance(nn.Linear(2, 2), FSDPModule)


def test_its_class_makes_plain_siblings() -> None:
    layer = fully_shard(nn.Linear(2, 3))
    made = type(layer)(4, 5)
    assert type(made) is nn.Linear and made.weight.shape == (5, 4)
    with flatfsdp.disable_fsdp_module_new_init():
        assert "_parameters" not in type(layer)(4, 5).__dict__
    sequence = fully_shard(plain())
    assert type(sequence[:2]) is nn.Sequential


class _Sealed(nn.Linear):
    """Refuses attributes after its construction."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.sealed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("sealed"):
            raise AttributeError(f"{name}: sealed")
        super().__setattr__(name, value)


def test_a_module_that_refuses_attributes_trains() -> None:
    layer = _Sealed()
    model = fully_shard(nn.Sequential(layer))
    model(torch.ones(2, 4)).sum().backward()
    assert isinstance(layer.weight, DTensor) and layer.weight.grad is not None


def test_parameters_are_distributed_tensors_of_rows() -> None:
    model = model_of()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert {name: value.full_tensor().shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in values().items()
    }


def test_hooks_and_methods_run_with_whole_parameters() -> None:
    class Layer(nn.Linear):
        def norm(self) -> torch.Tensor:
            return self.weight.square().sum()

    seen: list[Any] = []
    layer = Layer(4, 8)
    layer.register_forward_pre_hook(lambda module, args: seen.append(type(module.weight)))
    layer.register_forward_hook(lambda module, args, out: seen.append(type(module.weight)))
    fully_shard(layer)
    layer(torch.ones(2, 4)).sum().backward()
    flatfsdp.register_fsdp_forward_method(layer, "norm")
    seen.append(type(layer.norm()))
    assert seen == [nn.Parameter, nn.Parameter, torch.Tensor]
    flatfsdp.register_fsdp_forward_method(nn.Linear(2, 2), "no such method")  # not sharded: as it is


def test_outputs_and_inputs_are_cast() -> None:
    model = plain()
    policy = flatfsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float64)
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=theirs.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with pytest.raises(RuntimeError, match=r"dtype|Double"):
        model(torch.ones(2, 4))
    assert seen == [(torch.bfloat16, torch.bfloat16), torch.float64]


# -- roots -------------------------------------------------------------------------------------------------------------


def test_a_nested_module_runs_before_the_root_and_after_it() -> None:
    model, reference = plain(), plain()
    fully_shard(model[0])
    fully_shard([model[1], model[2]])
    fully_shard(model)
    batch = torch.ones(3, 4)
    for layers in (model, reference):
        encoded = layers[0](batch)
        (layers(batch).sum() + layers[2](layers[1](encoded)).sum()).backward()
    for one, two in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad.full_tensor(), two.grad)


def test_one_entry_may_call_another() -> None:
    class Norm(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head[0](super().forward(x)) * self.weight.sum()

    norm, head = Norm(4), nn.Linear(4, 4)
    norm.head = [head]
    model = nn.Sequential(norm)
    model.head = head
    fully_shard([norm, head])
    fully_shard(nn.ModuleDict({"head": head, "model": model}).get_submodule("model"))
    model[0](torch.randn(2, 4)).sum().backward()
    assert norm.weight.grad is not None and head.weight.grad is not None


def test_a_list_without_a_root_is_refused() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert fully_shard(layers) is layers
    with pytest.raises(UsageError, match="as a list, and no module around them"):
        layers[0](torch.ones(1, 2))


# -- meta --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["to_empty", "assign"])
def test_the_meta_device(how: str) -> None:
    model = model_of("meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    if how == "to_empty":
        model.to_empty(device="cpu")
    states = {
        name: distribute_tensor(value, parameter.device_mesh, parameter.placements)
        for (name, value), parameter in zip(values().items(), model.parameters(), strict=True)
    }
    model.load_state_dict(states, assign=how == "assign")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert torch.equal(model(torch.ones(2, 4)), plain()(torch.ones(2, 4)))
    model(torch.ones(2, 4)).sum().backward()
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(a, b.full_tensor()) for a, b in zip(before, model.parameters(), strict=True))


def test_parameters_of_tensor_parallelism_are_assigned_in_the_place_of_meta_ones() -> None:
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model: Any = plain("meta")
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    for name, parameter in [*model.named_parameters()]:
        value = DTensor.from_local(values()[name], parameter.device_mesh, parameter.placements, run_check=False)
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, nn.Parameter(value))
    assert torch.equal(model(torch.ones(2, 4)), plain()(torch.ones(2, 4)))


def test_what_was_not_loaded_is_named() -> None:
    model = model_of("meta")
    with pytest.raises(UsageError, match=r"1.weight, 1.bias, 2.weight, 2.bias, 0.weight, 0.bias"):
        model(torch.ones(2, 4))
    parameter = model[1].bias
    state = {"1.bias": distribute_tensor(values()["1.bias"], parameter.device_mesh, parameter.placements)}
    model.load_state_dict(state, strict=False, assign=True)
    with pytest.raises(UsageError, match=r"values: 1.weight, 2.weight, 2.bias, 0.weight, 0.bias") as refused:
        model(torch.ones(2, 4))
    assert "to_empty" in str(refused.value)


def test_dtypes_change() -> None:
    model = model_of().to(torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    expected = plain().to(torch.float64)(torch.ones(2, 4).double())
    assert torch.equal(model(torch.ones(2, 4).double()), expected)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_deleted_model_is_freed_without_the_collector() -> None:
    model = model_of()
    flatfsdp.register_fsdp_forward_method(model, "get_submodule")
    model(torch.ones(2, 4)).sum().backward()
    alive = [weakref.ref(each) for each in (model, model[1], model[0].weight)]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [each() for each in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_an_optimizer_steps_beside_a_model_whose_modules_are_gone() -> None:
    """A part of the engine that is kept alive, as by the traceback of an error in a backward, keeps no module alive."""
    model = model_of()
    model(torch.ones(2, 4)).sum().backward()
    kept, module = inspect.shared_state(model)(), weakref.ref(model)
    del model
    assert kept is not None and module() is None
    own = nn.Linear(1, 1)
    own(torch.ones(1)).backward()
    before = own.bias.item()
    torch.optim.SGD(own.parameters(), lr=0.5).step()
    assert own.bias.item() == before - 0.5


def test_modules_may_be_deleted() -> None:
    model = model_of()
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    del model[1]
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    other = model_of()
    other[0] = nn.Identity()  # before anything ran
    other(torch.ones(2, 8)).sum().backward()
    assert torch.equal(other(torch.ones(2, 8)), plain()[1:](torch.ones(2, 8)))


@pytest.mark.parametrize("make", [Columns, PairOfColumns.of])
def test_one_rank_has_all_columns_of_what_has_gather_hooks(make: Any) -> None:
    """And their class keeps them: the shard of this rank has no memory for them."""
    layer, dims = plain()[0], {2: Shard(1)}
    alone, layer.weight = nn.Linear(4, 8), nn.Parameter(make(layer.weight.detach().clone()))
    alone.load_state_dict(plain()[0].state_dict())
    fully_shard(layer, shard_placement_fn=lambda parameter: dims.get(parameter.dim()))
    for each in (layer, alone):
        each(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(layer.bias.grad.full_tensor(), alone.bias.grad)
    torch.testing.assert_close(layer.weight.grad.full_tensor(), alone.weight.grad)


# -- messages ----------------------------------------------------------------------------------------------------------


def tied_over_calls() -> None:
    model = plain()
    model[2].weight = nn.Parameter(torch.ones(8, 8))
    model.append(nn.Linear(8, 8))
    model[3].weight = model[2].weight
    fully_shard(model[2])
    fully_shard(model)


def twice() -> None:
    fully_shard(fully_shard(nn.Linear(2, 2)))


def after_the_outer_one() -> None:
    model = fully_shard(plain())
    fully_shard(model[0])


def wrapper_inside() -> None:
    fully_shard(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2))))


def inside_a_wrapper() -> None:
    FullyShardedDataParallel(nn.Sequential(fully_shard(nn.Linear(2, 2))))


def wrapped() -> None:
    FullyShardedDataParallel(fully_shard(nn.Linear(2, 2)))


def scalar() -> None:
    layer = nn.Linear(2, 2)
    layer.scale = nn.Parameter(torch.tensor(1.0))
    fully_shard(layer)


def taken() -> None:
    layer = nn.Linear(2, 2)
    setattr(layer, "_unit", 3)  # noqa: B010 - of a user's class
    fully_shard(layer)


def of(**arguments: Any) -> Any:
    return lambda: fully_shard(nn.Linear(2, 2), **arguments)


THREE_D = SimpleNamespace(ndim=3, get_group=lambda: None)
UNNAMED = SimpleNamespace(ndim=2, get_group=lambda: None, mesh_dim_names=None)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: fully_shard(nn.Linear), ConfigTypeError, r"Create an instance first: Linear"),
        (lambda: fully_shard("layers"), ConfigTypeError, r"a module, or a list of modules"),
        (lambda: fully_shard([nn.Linear(2, 2), 3]), ConfigTypeError, r"module\[1\]"),
        (lambda: fully_shard([]), ConfigValueError, r"at least one"),
        (
            lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])),
            ConfigValueError,
            r"ModuleList, which defines no forward",
        ),
        (of(mesh=3), ConfigTypeError, r"mesh: .*1-D DeviceMesh"),
        (of(mesh=THREE_D), ConfigValueError, r"3-D mesh.*data-parallel part"),
        (of(mesh=UNNAMED), ConfigValueError, r"axes have no names"),
        (of(reshard_after_forward="yes"), ConfigTypeError, r"reshard_after_forward"),
        (of(reshard_after_forward=3), ConfigValueError, r"divisor of the 1"),
        (of(mp_policy=torch.bfloat16), ConfigTypeError, r"MixedPrecisionPolicy"),
        (of(mp_policy=theirs.MixedPrecisionPolicy(torch.int8)), ConfigValueError, r"param_dtype"),
        (of(offload_policy=True), ConfigTypeError, r"OffloadPolicy"),
        (of(ignored_params=["weight"]), ConfigTypeError, r"set of parameters"),
        (of(shard_placement_fn=lambda p: 1), ConfigValueError, r"got 1 for parameter 'weight'"),
        (of(shard_placement_fn=lambda p: Shard(2)), ConfigValueError, r"which has 2 dimensions"),
        (
            of(shard_placement_fn=lambda p: SimpleNamespace(mesh_info=1)),
            ConfigTypeError,
            r"mesh_info of parameter 'weight'.*HSDPMeshInfo",
        ),
        (lambda: flatfsdp.ShardPlacementResult(None, 3), ConfigTypeError, r"ShardPlacementResult.mesh_info.*1-D Dev"),
        (of(shard_placement_fn=0), ConfigTypeError, r"shard_placement_fn"),
        (of(dp_mesh_dims=object()), ConfigTypeError, r"dp_mesh_dims: .*DataParallelMeshDims, ours or torch's"),
        (of(dp_mesh_dims=flatfsdp.DataParallelMeshDims("dp")), ConfigTypeError, r"mesh: got None with dp_mesh_dims"),
        (lambda: flatfsdp.DataParallelMeshDims(), ConfigValueError, r"at least one name"),
        (lambda: flatfsdp.DataParallelMeshDims(shard=3), ConfigTypeError, r"DataParallelMeshDims.shard"),
        (tied_over_calls, UsageError, r"tied to a parameter of another unit \(Linear\).*as a list"),
        (twice, UsageError, r"already passed to fully_shard\(\)"),
        (after_the_outer_one, UsageError, r"is already part of the unit"),
        (wrapper_inside, UsageError, r"sharded by FullyShardedDataParallel.*passed to fully_shard\(\)"),
        (inside_a_wrapper, UsageError, r"sharded by fully_shard\(\).*FullyShardedDataParallel"),
        (wrapped, UsageError, r"already passed to fully_shard\(\)"),
        (scalar, ConfigValueError, r"'scale' is a scalar"),
        (taken, UsageError, r"named _unit"),
    ],
)
def test_misuse_is_refused_in_words(call: Any, kind: type[FlatFSDPError], words: str) -> None:
    with pytest.raises(kind) as refused:
        call()
    assert re.search(words, str(refused.value)), refused.value


def test_without_a_process_group() -> None:
    dist.destroy_process_group()
    try:
        with pytest.raises(UsageError, match="no process group: fully_shard needs"):
            fully_shard(nn.Linear(2, 2))
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# -- methods -----------------------------------------------------------------------------------------------------------


def test_every_method_of_torchs_is_there() -> None:
    assert {
        name
        for name in vars(theirs.FSDPModule)
        if not name.startswith("__") and callable(getattr(theirs.FSDPModule, name))
    } <= set(dir(FSDPModule))


def test_methods_without_effect_check_their_arguments() -> None:
    model = model_of()
    model.set_reduce_scatter_unused_params(True)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_reduce_scatter_divide_factor(1.0)
    model.set_unshard_async_op(False)
    model.reset_iter_state()
    model.set_post_optim_event(SimpleNamespace(wait=lambda: None))
    model.set_post_optim_event(None)
    flatfsdp.share_comm_ctx([model, fully_shard(nn.Linear(2, 2))])
    for name, argument in [
        ("set_reduce_scatter_unused_params", 1),
        ("set_reduce_scatter_max_input_buffers", 0),
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_symm_mem_for_comm", "NCCL"),
        ("set_custom_all_gather", None),
        ("set_custom_reduce_scatter", None),
        ("set_post_optim_event", 1),
    ]:
        with pytest.raises(FlatFSDPError, match=name):
            getattr(model, name)(argument)
    with pytest.raises(ConfigTypeError, match="share_comm_ctx"):
        flatfsdp.share_comm_ctx([nn.Linear(2, 2)])


def test_what_is_gathered_ahead_is_listed_before_the_root_is_known() -> None:
    layers = plain()
    for layer in (layers[0], layers[2]):
        fully_shard(layer)
    layers[0].set_modules_to_forward_prefetch([layers[2]])
    layers[2].set_modules_to_backward_prefetch([layers[0], layers[0]])
    model = fully_shard(layers)
    model(torch.ones(2, 4)).sum().backward()
    other = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4))))
    apart = fully_shard(nn.Linear(4, 4))
    other[0].set_modules_to_forward_prefetch([apart])
    with pytest.raises(UsageError, match="not part of the model"):
        other(torch.ones(2, 4))
    with pytest.raises(ConfigTypeError, match="modules of fully_shard"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])


# -- pipelines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
def test_a_stage_with_units_computes_all_gradients_when_those_of_inputs_are_asked_for(front: str) -> None:
    sharded = model_of() if front == "fully_shard" else flatfsdp.FullyShardedDataParallel(plain())
    alone, x, other = plain(), torch.ones(2, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    loss = sharded(x).sum()  # the first forward
    (found,), rest = stage.stage_backward_input([loss], None, [x], sharded.parameters())
    stage.stage_backward_weight(sharded.parameters(), rest)
    assert x.grad is None  # it goes to the stage before
    (expected,), rest = stage.stage_backward_input([alone(other).sum()], None, [other], alone.parameters())
    stage.stage_backward_weight(alone.parameters(), rest)
    assert torch.equal(found, expected) and rest  # not so where there are no units
    grads: list[Any] = [each.grad for each in sharded.parameters()]
    whole = [each.full_tensor().ravel() if front == "fully_shard" else each.ravel() for each in grads]
    assert torch.equal(torch.cat(whole), torch.cat([p.grad.ravel() for p in alone.parameters() if p.grad is not None]))


def test_a_move_between_forward_and_backward_leaves_modules_what_they_compute_with() -> None:
    """Recomputation in the backward reads it."""
    model = fully_shard(nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    computed_with = model.weight
    assert not hasattr(computed_with, "placements")
    assert model.to("cpu").float().weight is computed_with
    loss.backward()
    assert hasattr(model.weight, "placements")


# -- state dicts while parameters are unsharded ------------------------------------------------------------------------


@pytest.mark.parametrize("unsharded_by", ["forward", "unshard()"])
def test_state_dicts_have_what_is_at_rest_while_parameters_are_unsharded(unsharded_by: str) -> None:
    layers = plain()
    layers.append(nn.RNN(2, 2))
    layers[0].weight = nn.Parameter(AsInt8(layers[0].weight.detach()))
    model: Any = fully_shard(layers)
    at_rest = model.state_dict()
    if unsharded_by == "forward":
        loss = model(torch.ones(2, 4))[0].sum()
    else:
        model.unshard()
    assert not isinstance(model[2].weight, DTensor)
    for found, expected in ((model.state_dict(), at_rest), (model[2].state_dict(prefix="2."), at_rest)):
        assert all(isinstance(value, DTensor) and torch.equal(value, expected[name]) for name, value in found.items())
        assert [type(value.to_local()) for value in found.values()] == [
            type(expected[name].to_local()) for name in found
        ]
    assert model.state_dict().keys() == at_rest.keys()
    kept = model[2].state_dict(keep_vars=True)
    assert not isinstance(model[2].weight, DTensor)  # nothing was freed
    if unsharded_by == "forward":
        loss.backward()
    model.reshard()
    assert kept["weight"] is model[2].weight


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("unsharded_by", ["forward", "unshard()"])
def test_state_dicts_are_loaded_while_parameters_are_unsharded(unsharded_by: str, assign: bool) -> None:
    model, x = model_of(), torch.ones(2, 4)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    loss = model(x).sum()
    if unsharded_by == "unshard()":
        loss.backward()
        model.unshard()
    model.load_state_dict(state, assign=assign)
    assert model(x).abs().sum() == 0
    if unsharded_by == "forward" and not assign:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as in one process
            loss.backward()


def test_shards_move_into_shared_memory_and_are_trained_there() -> None:
    model = model_of()
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    assert model.share_memory() is model
    assert all(handle.shard.is_shared() for handle in inspect.flat_params(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = model(torch.ones(2, 4)).sum()
    found.backward()
    optimizer.step()
    assert not any(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))
    assert not torch.equal(model(torch.ones(2, 4)).sum(), found)


def test_a_compiled_step_of_the_optimizer() -> None:
    """Of gradients that are kept, and of others; torch.compile makes one graph of it, as over torch's modules."""
    from torch._dynamo.utils import counters

    counters.clear()
    models = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 2048)), fully_shard(nn.Linear(2048, 2))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiles else optimizer.step
        for scale in (1, 2):
            model(torch.ones(2, 4) * scale).square().mean().backward()
            step()
            optimizer.zero_grad()
        models.append(model.state_dict())
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name].full_tensor(), value.full_tensor(), msg=name)


def test_a_tensor_inside_of_a_parameter_is_not_kept_as_an_attribute_of_it() -> None:
    model = extend(nn.Sequential(nn.Linear(4, 4)), AsBfloat16)
    model[0].weight.tag = "marked"  # type: ignore[index]
    whole = weakref.ref(model[0].weight._data)  # type: ignore[index]
    flatfsdp.fully_shard(model)
    weight = model.get_parameter("0.weight")
    assert weight.tag == "marked" and not hasattr(weight, "_data")  # type: ignore[attr-defined]
    assert whole() is None
