"""Mistakes with a wrapped model, or at its construction, and the messages of the errors raised for them."""

from __future__ import annotations

import copy
import pickle
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

from flatfsdp import FullyShardedDataParallel, fully_shard
from flatfsdp.engine.agreement import process_groups as groups
from flatfsdp.errors import ConfigTypeError, ConfigValueError, FlatFSDPWarning, UsageError
from flatfsdp.extensions import set_extensions
from flatfsdp.wrap import CustomPolicy
from tests.harness import inspect
from tests.harness.fake import fake_world

pytestmark = pytest.mark.distributed


@pytest.fixture
def world() -> Iterator[None]:
    """A fake world of two ranks, this process the first."""
    with fake_world(2):
        yield


def reported(call: Callable[[], Any], error: type[Exception] = UsageError) -> str:
    """The message that `call` raises, in short lines."""
    with pytest.raises(error) as info:
        call()
    return in_lines(info.value)


def in_lines(message: object) -> str:
    """A message in lines that fit into this file."""
    return "\n".join(textwrap.fill(line, 100, replace_whitespace=False) for line in str(message).splitlines())


def linear(**kwargs: Any) -> nn.Linear:
    return nn.Linear(4, 4, **kwargs)


class Pair(nn.Module):
    """An embedding and a head, tied on request."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


TOKENS = torch.tensor([0, 1, 2])


# --- wrapping ---------------------------------------------------------------------------------------------------------


def test_no_process_group() -> None:
    assert_expected_inline(
        reported(lambda: FullyShardedDataParallel(linear())),
        """\
no process group: FullyShardedDataParallel needs torch.distributed to be initialized. Under
torchrun, add
    torch.distributed.init_process_group()
before wrapping; in a single process without a launcher, add
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0,
world_size=1)""",
    )


@pytest.mark.parametrize("orig", [True, False])
def test_wrapping_a_wrapper(world: None, orig: bool) -> None:
    model = FullyShardedDataParallel(linear(), use_orig_params=orig)
    message = reported(lambda: FullyShardedDataParallel(model, use_orig_params=orig))
    assert_expected_inline(
        message,
        """\
module: FullyShardedDataParallel is already a wrapper, of Linear. Wrap the original module, and only
once""",
    )


@pytest.mark.parametrize("orig", [True, False])
def test_wrapping_what_is_in_a_unit(world: None, orig: bool) -> None:
    model = FullyShardedDataParallel(nn.Sequential(linear()), use_orig_params=orig)
    for inside in (model.module, model.module[0]):
        message = reported(lambda inside=inside: FullyShardedDataParallel(inside, use_orig_params=orig))  # type: ignore[misc]
    assert_expected_inline(
        message,
        """\
module: Linear is already part of the unit of Sequential, where its parameters are flattened. Wrap
inner modules before outer ones, each only once""",
    )


def test_a_flat_parameter_in_another_module(world: None) -> None:
    model = FullyShardedDataParallel(linear())
    other = nn.Sequential()
    other.register_parameter("stolen", model._flat_param)
    assert_expected_inline(
        reported(lambda: FullyShardedDataParallel(other)),
        """\
'stolen' is a FlatParameter: the module is already wrapped by FullyShardedDataParallel. Wrap the
original module, and only once""",
    )


@pytest.mark.parametrize("shard", [FullyShardedDataParallel, fully_shard])
def test_a_lazy_module_before_its_first_forward(world: None, shard: Callable[[nn.Module], nn.Module]) -> None:
    assert_expected_inline(
        reported(lambda: shard(nn.Sequential(nn.LazyLinear(4))), ConfigValueError),
        """\
parameter '0.weight' is not initialized: it belongs to a lazy module, which sets the shape in its
first forward. Run a forward with inputs of the right size before sharding the model, or exclude
that module (ignored_modules=, ignored_params=)""",
    )


def test_a_lazy_module_that_is_left_alone(world: None) -> None:
    lazy = nn.LazyLinear(4)
    model = FullyShardedDataParallel(nn.Sequential(lazy, linear()), ignored_modules=[lazy])
    assert model(torch.ones(1, 3)).shape == (1, 4)


@pytest.mark.parametrize("shard", [FullyShardedDataParallel, fully_shard])
def test_a_module_made_in_inference_mode(world: None, shard: Callable[[nn.Module], nn.Module]) -> None:
    with torch.inference_mode():
        module = nn.Sequential(linear())
    assert_expected_inline(
        reported(lambda: shard(module), ConfigValueError),
        """\
parameter '0.weight' was created inside torch.inference_mode(), where tensors have no version
counters; expected one created outside of it. Build the module outside; it may be sharded and called
inside""",
    )


@pytest.mark.parametrize("shard", [FullyShardedDataParallel, fully_shard])
def test_a_sparse_parameter(world: None, shard: Callable[[nn.Module], nn.Module]) -> None:
    module = linear()
    module.weight = nn.Parameter(torch.eye(2).to_sparse())
    assert_expected_inline(
        reported(lambda: shard(nn.Sequential(module)), ConfigValueError),
        """\
parameter '0.weight' has the layout torch.sparse_coo; expected torch.strided, since ranks divide the
memory of parameters among them. Call to_dense() of it before sharding the model, or exclude it
(ignored_modules=, ignored_params=)""",
    )


def test_ignoring_a_wrapper(world: None) -> None:
    inner = FullyShardedDataParallel(linear())
    outer = nn.Sequential(inner, linear())
    message = reported(lambda: FullyShardedDataParallel(outer, ignored_modules=[inner]), ConfigValueError)
    assert_expected_inline(
        message,
        """\
ignored_modules: Linear is already wrapped by FullyShardedDataParallel, and sharded; pass the
modules to ignore unwrapped""",
    )


def test_ignoring_what_is_not_inside(world: None) -> None:
    with pytest.warns(FlatFSDPWarning) as caught:
        FullyShardedDataParallel(linear(), ignored_modules=[linear()])
    assert_expected_inline(
        in_lines(caught[0].message), """ignored_modules: Linear not found inside Linear; ignoring them has no effect."""
    )


def test_ignoring_everything(world: None) -> None:
    net = nn.Sequential(linear())
    model = FullyShardedDataParallel(net, ignored_modules=[net[0]])
    with pytest.warns(FlatFSDPWarning) as caught:
        model(torch.ones(1, 4))
    assert_expected_inline(
        in_lines(caught[0].message),
        """\
Sequential is wrapped, but no unit of it has parameters: they are all ignored, or there are none.
Nothing is sharded, and no gradient is averaged""",
    )


def test_a_unit_without_parameters_works(world: None) -> None:
    model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(nn.ReLU()), linear()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(torch.ones(1, 4)).shape == (1, 4)


def test_a_group_without_this_rank(world: None) -> None:
    other = dist.new_group([1])
    accepted = reported(
        lambda: FullyShardedDataParallel(linear(), process_group=other), (ConfigTypeError, ConfigValueError)
    )  # type: ignore[arg-type]
    assert_expected_inline(
        accepted,
        """\
process_group: got -100 (int). Accepted: None, or one torch.distributed.ProcessGroup, for
FULL_SHARD. torch.distributed.new_group returns this on ranks outside of the group.""",
    )


def test_group_and_mesh(world: None) -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    message = reported(
        lambda: FullyShardedDataParallel(linear(), process_group=dist.group.WORLD, device_mesh=mesh), ConfigValueError
    )
    assert_expected_inline(message, """process_group, device_mesh: got both. Accepted: one of them.""")


def test_hybrid_over_one_group(world: None) -> None:
    message = reported(
        lambda: FullyShardedDataParallel(linear(), process_group=dist.group.WORLD, sharding_strategy="HYBRID_SHARD"),
        ConfigValueError,
    )
    assert_expected_inline(
        message,
        """\
process_group: got a single process group. Accepted: None, or a pair (shard group, replicate group),
for HYBRID_SHARD.""",
    )


def test_hybrid_over_a_line(world: None) -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    message = reported(
        lambda: FullyShardedDataParallel(linear(), device_mesh=mesh, sharding_strategy="HYBRID_SHARD"),
        ConfigValueError,
    )
    assert_expected_inline(
        message,
        """\
device_mesh: got a 1-D mesh. Accepted: None, or a 2-D DeviceMesh, for HYBRID_SHARD. Its axes are
(replicate, shard).""",
    )


def test_a_policy_that_matches_nothing(world: None) -> None:
    with pytest.warns(FlatFSDPWarning) as caught:
        FullyShardedDataParallel(nn.Sequential(linear(), nn.ReLU()), auto_wrap_policy={nn.Conv2d})
    assert_expected_inline(
        in_lines(caught[0].message),
        """\
auto_wrap_policy: ModuleWrapPolicy({Conv2d}) matched no submodule of Sequential, which becomes a
single unit: all of its parameters are gathered at once. Classes inside: Linear, ReLU.""",
    )


def test_a_mesh_without_this_rank() -> None:
    with fake_world(4):
        mesh = DeviceMesh("cpu", [2, 3])
        assert_expected_inline(
            reported(lambda: FullyShardedDataParallel(linear(), device_mesh=mesh), ConfigValueError),
            """device_mesh: rank 0 is not in the mesh [2, 3]. Wrap the module only on ranks that are in the mesh""",
        )


@pytest.mark.parametrize(
    ("variable", "accelerators", "found"),
    [
        ("3", 0, "3, from LOCAL_WORLD_SIZE, does not divide the world size of 4"),
        (None, 3, "3, from the number of accelerators of this machine, does not divide the world size of 4"),
        (None, 0, "their number is unknown"),
    ],
)
def test_hybrid_over_unknown_nodes(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, accelerators: int, found: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", variable or "")
    monkeypatch.setattr(groups, "accelerator_count", lambda: accelerators)
    net = nn.Sequential(linear())
    options: Any = {"sharding_strategy": "HYBRID_SHARD", "auto_wrap_policy": {nn.Linear}}
    with fake_world(4):
        message = reported(lambda: FullyShardedDataParallel(net, **options), ConfigValueError).replace("\n", " ")
    assert message == (
        f"process_group: the hybrid strategies shard over the ranks of a node, but {found}. Launch with torchrun, or "
        "pass process_group=(shard group, replicate group) or a 2-D device_mesh (replicate, shard)"
    )


def test_a_policy_that_ignores(world: None) -> None:
    net = nn.Sequential(nn.Sequential(linear(), linear()))
    policy = CustomPolicy(lambda module: {"ignored_modules": [net[0][1]]} if module is net[0] else False)
    assert_expected_inline(
        reported(lambda: FullyShardedDataParallel(net, auto_wrap_policy=policy), ConfigValueError),
        """\
auto_wrap_policy: it sets ignored_modules or ignored_states for a single unit; pass them to the
outermost wrapper, which passes them on to all units""",
    )


def test_a_tie_over_different_ranks() -> None:
    with fake_world(4):
        net = Pair(tied=True)
        half = dist.new_group([0, 1])
        net.embedding = FullyShardedDataParallel(net.embedding, process_group=half)
        assert_expected_inline(
            reported(lambda: FullyShardedDataParallel(net)),
            """\
'head.weight' of Pair is tied to a parameter of another unit (Embedding) that is sharded over other
ranks, so no order of all-gathers works for both. Put both modules into one unit, or wrap them with
the same process group""",
        )


# --- before the first step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orig", [True, False])
def test_left_on_the_meta_device(world: None, orig: bool) -> None:
    net = nn.Sequential(linear(), linear(device="meta"), nn.BatchNorm1d(4, device="meta"), linear())
    model = FullyShardedDataParallel(net, ignored_modules=[net[1], net[2]], use_orig_params=orig)
    assert_expected_inline(
        reported(lambda: model(torch.ones(2, 4))),
        """\
these parameters or buffers are on the meta device, which has no values: 1.weight, 1.bias, 2.weight,
2.bias, 2.running_mean, 2.running_var, 2.num_batches_tracked. The constructor allocates and
initializes wrapped modules; initialize ignored modules, and tensors that are moved to the meta
device after wrapping, before the first forward""",
    )


@pytest.mark.parametrize("orig", [True, False])
def test_moved_to_the_meta_device(world: None, orig: bool) -> None:
    net = nn.Sequential(linear(), linear())
    model = FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear}, use_orig_params=orig)
    assert_expected_inline(
        reported(lambda: model.to("meta")),
        """\
unit <root>: moving it to the meta device would discard its values; use model.to_empty(device=...)
for uninitialized memory, or wrap a module that is on the meta device""",
    )
    assert_expected_inline(
        reported(lambda: model[0].to("meta")),
        """\
unit <root>: moving it to the meta device would discard its values; use model.to_empty(device=...)
for uninitialized memory, or wrap a module that is on the meta device""",
    )
    model(torch.ones(2, 4))


def test_on_another_device(world: None) -> None:
    model = FullyShardedDataParallel(nn.Sequential(linear(), nn.BatchNorm1d(4)), use_orig_params=True)
    # Any device that is not the model's; this machine may have only one that computes.
    inspect.move(model, torch.device("cuda", 0))
    assert_expected_inline(
        reported(lambda: model._lazy_init()),
        """\
the model computes on cuda:0, but these are elsewhere: 0.weight (cpu, expected cuda:0), 0.bias (cpu,
expected cuda:0), 1.weight (cpu, expected cuda:0), 1.bias (cpu, expected cuda:0), buffer
running_mean of BatchNorm1d (cpu), buffer running_var of BatchNorm1d (cpu), buffer
num_batches_tracked of BatchNorm1d (cpu). Move the whole model with model.to(device) before
wrapping, or pass device_id=""",
    )


def test_no_sync_on_a_nested_unit(world: None) -> None:
    model = FullyShardedDataParallel(nn.Sequential(linear(), linear()), auto_wrap_policy={nn.Linear})
    assert_expected_inline(
        reported(lambda: model[0].no_sync().__enter__()),
        """\
no_sync() was called on a nested unit (Linear); call it on the outermost FullyShardedDataParallel
module (Sequential)""",
    )


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double])
def test_a_cast_before_the_backward(world: None, change: Callable[[nn.Module], Any], orig: bool) -> None:
    net = nn.Sequential(linear(), linear())
    model = FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear}, use_orig_params=orig)
    output = model(torch.ones(1, 4)).sum()
    assert_expected_inline(
        reported(lambda: change(model)),
        """\
unit '0': .to(), .half() and similar methods can be called only between iterations, but a forward
here is still waiting for its backward. Run the backward first; if there will be none, run a forward
of the model under torch.no_grad() to end the wait""",
    )
    output.backward()
    change(model)


def test_a_cast_after_an_evaluation_in_the_place_of_the_backward(world: None) -> None:
    model = FullyShardedDataParallel(nn.Sequential(linear(), linear()), auto_wrap_policy={nn.Linear})
    model(torch.ones(1, 4))
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert model.double()(torch.ones(1, 4, dtype=torch.double)).dtype is torch.double


def test_stepping_a_flat_parameter_that_was_copied_without_its_model(world: None) -> None:
    model = FullyShardedDataParallel(linear())
    optimizer = torch.optim.SGD(copy.deepcopy(model.module).parameters(), lr=0.1)
    with pytest.warns(FlatFSDPWarning) as caught:
        optimizer.step()
    assert_expected_inline(
        in_lines(caught[0].message),
        """\
param group 0 of the optimizer holds a flat parameter that no module computes with. Either it was
copied with the module inside a wrapper (as by copy.deepcopy(model.module)), or its model was
deleted. Copy the wrapper, or the module before wrapping""",
    )


# --- pickles ----------------------------------------------------------------------------------------------------------


def test_a_pickle_of_another_rank() -> None:
    with fake_world(4):
        pair = pickle.dumps(FullyShardedDataParallel(linear(), process_group=dist.new_group([0, 1])))
        all_four = pickle.dumps(FullyShardedDataParallel(linear()))
    with fake_world(4, rank=3):
        assert_expected_inline(
            reported(lambda: pickle.loads(pair)),
            """this model was pickled on a rank of the group (0, 1); rank 3 is not in that group""",
        )
        assert_expected_inline(
            reported(lambda: pickle.loads(all_four)),
            """\
this model was pickled on rank 0 of its shard group but is loaded on rank 3; each rank must load its
own pickle""",
        )


# --- optimizers built before wrapping ---------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(1)  # a fake group leaves the memory unchanged
    optimizer.step()


def test_an_optimizer_from_before_with_original_parameters(world: None) -> None:
    net = linear()
    optimizer = torch.optim.Adam(net.parameters(), lr=1.0)
    model = FullyShardedDataParallel(net, use_orig_params=True)
    before = inspect.flat_params(model)[0].shard.clone()
    step(model, optimizer)
    assert not torch.equal(before, inspect.flat_params(model)[0].shard)


def test_an_optimizer_from_before_that_has_state(world: None) -> None:
    net = linear()
    optimizer = torch.optim.Adam(net.parameters())
    step(net, optimizer)
    with pytest.warns(FlatFSDPWarning, match="gradients from before wrapping are dropped: weight, bias"):
        model = FullyShardedDataParallel(net, use_orig_params=True)
    assert_expected_inline(
        reported(lambda: step(model, optimizer)),
        """\
the optimizer has state from before wrapping, or of another rank: 'exp_avg' of parameter 'weight' of
unit <root> (param group 0) has shape (4, 4), but this rank's shard of it has (10,). Build the
optimizer after wrapping, or wrap before its first step; and save and load
FullyShardedDataParallel.optim_state_dict(model, optimizer), because optimizer.state_dict() holds
the pieces of one rank""",
    )


def test_an_optimizer_from_before_with_flat_parameters(world: None) -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = FullyShardedDataParallel(net)
    assert_expected_inline(
        reported(lambda: step(model, optimizer)),
        """\
the optimizer holds parameter 'weight' of unit <root> (param group 0), which was flattened: with
use_orig_params=False it is never updated. Build the optimizer from model.parameters() after
wrapping, or wrap with use_orig_params=True""",
    )


# --- modules changed after wrapping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_parameter_deleted(world: None, orig: bool, stepped: bool) -> None:
    model = FullyShardedDataParallel(linear(), use_orig_params=orig)
    if stepped:
        model(torch.ones(1, 4)).sum().backward()
    del model.module.weight
    assert_expected_inline(
        reported(lambda: model(torch.ones(1, 4))),
        """\
'weight' of unit <root> was changed after wrapping: it was deleted. Delete parameters before
wrapping, or keep them""",
    )


@pytest.mark.parametrize("orig", [True, False])
def test_a_parameter_of_another_shape(world: None, orig: bool) -> None:
    model = FullyShardedDataParallel(linear(), use_orig_params=orig)
    model.module.weight = nn.Parameter(torch.zeros(5, 4))
    assert_expected_inline(
        reported(lambda: model(torch.ones(1, 4))),
        """\
the parameter now registered as 'weight' was replaced by a tensor of shape (5, 4); expected this
rank's shard of it, (10,), or the full parameter, (4, 4). Inside summon_full_params(), parameters
have their full shape""",
    )


@pytest.mark.parametrize("orig", [True, False])
def test_a_parameter_of_another_dtype(world: None, orig: bool) -> None:
    model = FullyShardedDataParallel(linear(), use_orig_params=orig)
    model.module.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    assert_expected_inline(
        reported(lambda: model(torch.ones(1, 4))),
        """the parameter now registered as 'weight' has dtype torch.float64; expected the shard's torch.float32""",
    )


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_with_hooks_in_place_of_another(world: None, orig: bool, method: str) -> None:
    model = FullyShardedDataParallel(linear(), use_orig_params=orig)
    model.module.weight = new = nn.Parameter(torch.zeros(4, 4))
    hook = getattr(new, method)(lambda _: None)
    assert_expected_inline(
        reported(lambda: model(torch.ones(1, 4))),
        """\
'weight' of unit <root> was changed after wrapping: it is a different parameter now, which has
hooks. Its values would be copied into the parameter that was wrapped, which stays in place, so the
hooks would never run. Assign the parameter, run a forward, and register the hooks then; or copy the
values into the existing parameter""",
    )
    hook.remove()
    assert not model(torch.ones(1, 4)).any()


@pytest.mark.parametrize("orig", [True, False])
def test_a_tensor_in_place_of_a_parameter(world: None, orig: bool) -> None:
    model = FullyShardedDataParallel(linear(), use_orig_params=orig)
    del model.module.weight
    model.module.weight = torch.zeros(4, 4)
    assert_expected_inline(
        reported(lambda: model(torch.ones(1, 4))),
        """\
'weight' of unit <root> was changed after wrapping: it is a Tensor now; expected that parameter or a
new nn.Parameter""",
    )


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("classes", [set(), {nn.Embedding}, {nn.Embedding, nn.Linear}])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_tie_made_after_wrapping(world: None, orig: bool, classes: set[type[nn.Module]], stepped: bool) -> None:
    net = Pair()
    model = FullyShardedDataParallel(net, auto_wrap_policy=classes or None, use_orig_params=orig)
    if stepped:
        model(TOKENS).sum().backward()
    embedding, head = (getattr(m, "module", m) for m in (net.embedding, net.head))
    head.weight = embedding.weight
    message = reported(lambda: model(TOKENS)).replace("\n", " ")
    unit = "'head'" if nn.Linear in classes else "<root>"
    place = "'weight'" if nn.Linear in classes else "'head.weight'"
    assert message.startswith(f"{place} of unit {unit} was changed after wrapping: it was tied to 'embedding.weight'")
    assert message.endswith("Wrapping determines which unit owns a tied parameter; tie parameters before wrapping")


@pytest.mark.parametrize("orig", [True, False])
def test_a_tie_undone_after_wrapping(world: None, orig: bool) -> None:
    net = Pair(tied=True)
    model = FullyShardedDataParallel(net, auto_wrap_policy={nn.Embedding}, use_orig_params=orig)
    model(TOKENS).sum().backward()
    net.head.weight = nn.Parameter(torch.zeros(6, 4))
    assert_expected_inline(
        reported(lambda: model(TOKENS)),
        """\
'head.weight' of unit <root> was changed after wrapping: it was tied to 'embedding.weight', and is a
different parameter now. Untie parameters before wrapping, or copy values in place""",
    )


def test_another_module_wide_dtype_one_by_one(world: None) -> None:
    model = FullyShardedDataParallel(linear(), use_orig_params=True)
    for original in inspect.flat_params(model)[0].originals:
        original.data = original.data.half()
    assert_expected_inline(
        reported(lambda: model(torch.ones(1, 4))),
        """\
the parameters of unit <root> were converted from torch.float32 to torch.float16 one by one after
wrapping; call .to()/.half()/.double() on the FullyShardedDataParallel module itself, or before
wrapping""",
    )


@pytest.mark.parametrize("orig", [True, False])
def test_parameters_registered_after_wrapping(world: None, orig: bool) -> None:
    net = nn.Sequential(linear(bias=False), nn.Sequential(linear()))
    model = FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear}, use_orig_params=orig)
    net[0].module.bias = nn.Parameter(torch.zeros(4))
    net[1].append(linear())
    net[1].shift = nn.Parameter(torch.zeros(4))
    assert_expected_inline(
        reported(lambda: model(torch.ones(1, 4))),
        """\
these parameters were registered after wrapping: 0.bias, 1.shift, 1.1.weight, 1.1.bias. No unit
holds them, so they are not sharded and their gradients are not averaged over ranks. Register them
before wrapping, or keep them outside, in a module that ignored_modules= lists""",
    )


def wrapped(*, orig: bool) -> Callable[[nn.Module], Any]:
    return lambda module: FullyShardedDataParallel(module, use_orig_params=orig)


@pytest.mark.parametrize("shard", [wrapped(orig=True), wrapped(orig=False), fully_shard])
def test_pruning_what_is_sharded(world: None, shard: Callable[[nn.Module], nn.Module]) -> None:
    net = nn.Sequential(linear())
    model = shard(net)
    assert_expected_inline(
        reported(lambda: prune.l1_unstructured(net[0], "weight", 0.5)),
        """\
'weight' of a Linear is a parameter of unit <root>, and cannot become 'weight_orig', as
torch.nn.utils.prune names a parameter that it replaces. Call it before the module is sharded.
Parameters that were pruned before wrapping are pruned further inside summon_full_params()""",
    )
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("shard", [wrapped(orig=True), wrapped(orig=False), fully_shard])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_norms_of_weights_of_what_is_sharded(
    world: None, norm: str, shard: Callable[[nn.Module], nn.Module], trained: bool
) -> None:
    net = nn.Sequential(linear())
    model = shard(net)
    if trained:
        model(torch.ones(1, 4)).sum().backward()
    by_name = {"dim": 0, "name": "weight"}
    for words, call in (
        (norm, lambda: getattr(torch.nn.utils, norm)(net[0])),
        (norm, lambda: getattr(torch.nn.utils, norm)(net[0], **by_name)),
        ("parametriz", lambda: getattr(parametrizations, norm)(net[0], **by_name)),
        ("parametriz", lambda: parametrizations.orthogonal(net[0])),
        ("parametrize", lambda: parametrize.register_parametrization(net[0], tensor_name="bias", parametrization=net)),
    ):
        for whole in (True, False):
            with FullyShardedDataParallel.summon_full_params(model) if whole else nullcontext():
                text = reported(call)
            assert f"cannot be reparametrized by torch.nn.utils.{words}" in text.replace("\n", " ")
            assert "before the module is sharded" in text.replace("\n", " ")
    model(torch.ones(1, 4)).sum().backward()
    assert getattr(torch.nn.utils, norm)(linear())(torch.ones(1, 4)).requires_grad


@pytest.mark.parametrize("shard", [wrapped(orig=True), wrapped(orig=False), fully_shard])
@pytest.mark.filterwarnings("ignore:.*_norm.* is deprecated")
def test_reparametrizations_of_what_is_sharded_stay(world: None, shard: Callable[[nn.Module], nn.Module]) -> None:
    """To undo them, torch computes with whole parameters; its kernel reads shards beyond their end."""
    for make, undo in (
        (parametrizations.weight_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight")),
        (torch.nn.utils.weight_norm, torch.nn.utils.remove_weight_norm),
        (torch.nn.utils.spectral_norm, torch.nn.utils.remove_spectral_norm),
    ):
        net = nn.Sequential(make(linear()))
        model = shard(net)
        model(torch.ones(1, 4)).sum().backward()
        text = reported(partial(undo, net[0])).replace("\n", " ")
        assert "'weight' of a" in text and "cannot be reparametrized by torch.nn.utils." in text
        model(torch.ones(1, 4)).sum().backward()
        alone = make(linear())
        undo(alone)
        assert isinstance(alone.weight, nn.Parameter)


@pytest.mark.parametrize("shard", [wrapped(orig=True), wrapped(orig=False), fully_shard])
@pytest.mark.parametrize(("place", "other"), [("embedding", "head"), ("head", "embedding")])
def test_a_tie_in_one_unit_undone(world: None, shard: Callable[..., Any], place: str, other: str) -> None:
    net = Pair(tied=True)
    model = shard(net)
    model(TOKENS).sum().backward()
    before = getattr(net, place).weight
    getattr(net, place).weight = nn.Parameter(torch.zeros(6, 4))
    message = reported(lambda: model(TOKENS)).replace("\n", " ")
    assert f"it was tied to '{other}.weight', and is a different parameter now" in message
    getattr(net, place).weight = before
    model(TOKENS).sum().backward()


@pytest.mark.parametrize("orig", [True, False])
def test_norms_of_weights_before_wrapping(orig: bool) -> None:
    with fake_world(1):
        net = parametrizations.weight_norm(linear())
        plain = copy.deepcopy(net)
        model: Any = wrapped(orig=orig)(net)
        inputs = torch.ones(1, 4)
        assert torch.equal(model(inputs), plain(inputs))
        model(inputs).sum().backward()


@pytest.mark.parametrize("orig", [True, False])
def test_pruning_before_wrapping_and_further(orig: bool) -> None:
    net = linear()
    prune.l1_unstructured(net, "weight", 0.5)
    with fake_world(1):
        model = wrapped(orig=orig)(net)
        for zeros in (8, 12):
            model(torch.ones(1, 4)).sum().backward()
            assert (net.weight == 0).sum() == zeros
            with FullyShardedDataParallel.summon_full_params(model):
                prune.l1_unstructured(net, "weight", 0.5)


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
def test_what_may_be_registered_after_wrapping(world: None, argument: str, copied: bool, orig: bool) -> None:
    """In ignored modules and in the place of ignored parameters anything, elsewhere new values and new wrappers."""
    net = nn.Sequential(linear(), nn.Sequential(linear(bias=False)))
    ignored = {"ignored_modules": [net[1]], "ignored_states": [net[1][0].weight]}[argument]
    model: Any = FullyShardedDataParallel(net, use_orig_params=orig, **{argument: ignored})  # type: ignore[arg-type]
    if copied:
        model = copy.deepcopy(model)
    if argument == "ignored_modules":
        model[1].append(linear())
    model[1][0].weight = nn.Parameter(torch.zeros(4, 4))
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    model.module.append(nn.ReLU())
    model.module.append(FullyShardedDataParallel(linear(), use_orig_params=orig))
    assert model(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize("front", ["flat", "orig", "fully_shard"])
def test_an_optimizer_of_what_was_registered_after_the_first_forward(world: None, front: str) -> None:
    """No forward looks for it any more, and each rank would step on its own gradient."""
    model: Any = nn.Sequential(linear(), nn.Sequential(linear()))
    net = model
    if front == "fully_shard":
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(net, use_orig_params=front == "orig")
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    net[1].append(linear(bias=False))
    model(torch.ones(1, 4)).sum().backward()
    expected = """\
these parameters were registered after wrapping: 1.1.weight. No unit holds them, so they are not
sharded and their gradients are not averaged over ranks. Register them before wrapping, or keep them
outside, in a module that ignored_modules= lists"""
    assert_expected_inline(reported(torch.optim.SGD(model.parameters(), lr=0.1).step), expected)
    own = nn.Linear(1, 1)  # of no model
    own(torch.ones(1)).backward()
    torch.optim.SGD([*own.parameters(), *net[0].parameters()], lr=0.1).step()


@pytest.mark.parametrize("orig", [True, False])
def test_modules_and_parameters_set_on_a_wrapper_are_the_wrapped_modules(world: None, orig: bool) -> None:
    """It lists that module's attributes, and computes with no others: they would be neither trained nor saved."""
    net = Pair()
    net.register_buffer("scale", torch.ones(1))
    model: Any = FullyShardedDataParallel(net, use_orig_params=orig)
    model.loss, model.scale, model.head = nn.CrossEntropyLoss(), torch.zeros(1), linear()
    model.shift = nn.Parameter(torch.zeros(4))
    model.register_buffer("seen", torch.zeros(1))
    model.register_module("gate", nn.Sigmoid())
    model.note = "plain"
    assert "seen" in dict(net.named_buffers()) and net.gate is model.gate
    assert net.loss is model.loss and net.scale is model.scale and net.head is model.head
    assert net.shift is model.shift and not hasattr(net, "note")
    assert "loss" in dict(model.named_modules()) and "shift" in dict(model.named_parameters())
    assert [*model.children()] == [net]
    message = reported(lambda: model(torch.ones(1, 4)))
    assert message.startswith("these parameters were registered after wrapping: shift, head.weight, head.bias.")


# --- parameters used where they are not whole -------------------------------------------------------------------------


def test_a_parameter_used_between_forward_and_backward(world: None) -> None:
    model = FullyShardedDataParallel(
        nn.Sequential(linear(), linear()), auto_wrap_policy={nn.Linear}, use_orig_params=True
    )
    weight = model.module[0].module.weight
    output = model(torch.ones(1, 4)).sum()
    expected = """\
pow() reads parameter 'weight' of unit '0' outside the forward of its unit, in a forward of the
model or between that forward and its backward, where it is sharded. Use it in the forward of the
module that holds it (this includes functions of parameters such as an L2 penalty), call unshard()
of that unit's wrapper first, or make the module that uses it the unit; to look at values, use
summon_full_params() between steps"""
    assert_expected_inline(reported(lambda: weight.pow(2)), expected)
    for use in (lambda: 2 * weight, lambda: torch.stack([weight]), lambda: torch._foreach_norm([weight])):
        assert "reads parameter 'weight' of unit '0'" in reported(use)
    assert weight.requires_grad
    assert weight.grad is None
    assert isinstance(weight, nn.Parameter)
    copied = copy.deepcopy([weight, weight])
    assert copied[0] is copied[1] and type(copied[0]) is nn.Parameter
    output.backward()
    assert type(weight) is nn.Parameter and torch.equal(copied[0], weight)
    (2 * weight).sum()


@pytest.mark.parametrize("call", ["grad", "backward"])
def test_gradients_of_parameters_are_not_requested(world: None, call: str) -> None:
    model = FullyShardedDataParallel(
        nn.Sequential(linear(), linear()), auto_wrap_policy={nn.Linear}, use_orig_params=True
    )
    parameters = list(model.parameters())
    loss = model(torch.ones(1, 4)).sum()
    asks = {"grad": lambda: torch.autograd.grad(loss, parameters), "backward": lambda: loss.backward(inputs=parameters)}
    words = reported(asks[call])
    assert words.startswith(f"{call}() needs the gradients of parameter 'weight' of unit '0'")
    loss.backward()
    assert parameters[0].grad is not None


class Reader(nn.Module):
    """Uses the weight of `head`, a part of its own, before or after it calls it, instead, or never."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.body, self.head, self.when = linear(), linear(bias=False), when

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.when == "before":
            x = x * self.weight.square().sum()
        if self.when in ("before", "after"):
            x = self.head(x)
        return x @ self.weight if self.when in ("after", "instead") else x

    @property
    def weight(self) -> Tensor:
        return self.head.weight  # type: ignore[return-value]  # through the wrapper


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("when", ["before", "after", "instead"])
def test_a_parameter_of_another_unit_used_in_a_forward(world: None, when: str, training: bool, orig: bool) -> None:
    model = FullyShardedDataParallel(Reader(when), auto_wrap_policy={nn.Linear}, use_orig_params=orig)
    weight, numel = model.module.weight, model.module.weight.numel()
    with torch.set_grad_enabled(training):
        words = reported(lambda: model(torch.ones(1, 4)))
    assert f"{'square' if when == 'before' else 'matmul'}() reads parameter 'weight' of unit 'head'" in words
    assert isinstance(weight, nn.Parameter) and weight.numel() == numel
    assert type(weight) is nn.Parameter or not orig  # the shard again


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("orig", [True, False])
def test_a_parameter_of_a_unit_that_did_not_run(world: None, orig: bool, strategy: str) -> None:
    """Between forward and backward, and not before or after; attributes other than values can be read."""
    model = FullyShardedDataParallel(
        Reader("never"), auto_wrap_policy={nn.Linear}, sharding_strategy=strategy, use_orig_params=orig
    )
    weight = model.module.weight
    for _ in range(2):
        weight.data.square().sum()
        for _ in range(2):  # the second while the first awaits its backward
            output = model(torch.ones(1, 4))
        for use in (weight.square, lambda: torch.ones(1, 4) @ weight, weight.detach):
            assert "reads parameter 'weight' of unit 'head'" in reported(use)
        assert weight.requires_grad and weight.device.type == "cpu" and weight.numel() == 8
        output.sum().backward()
        assert type(weight) is nn.Parameter or not orig
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert type(weight) is nn.Parameter or not orig


class Reading(nn.Module):
    """A hook on the input of `head`, or on what is computed from its output, reads the weight of `head`."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.body, self.head, self.where = linear(), linear(), where
        self.read: Callable[[Tensor], Tensor] = torch.detach

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        weight, read = self.head.weight, self.read  # through the wrapper
        if self.where == "input":
            x.register_hook(lambda grad: grad * read(weight))
        x = self.head(x) * 1.0
        if self.where != "input":
            x.register_hook(lambda grad: grad * read(weight))
        return x


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("where", ["input", "computed from the output"])
def test_a_hook_reads_a_unit_that_is_not_gathered(world: None, where: str, orig: bool) -> None:
    """Element by element, which is legal in forwards; a shard of one element would broadcast."""
    model = FullyShardedDataParallel(Reading(where), auto_wrap_policy={nn.Linear}, use_orig_params=orig)
    for read in (torch.detach, lambda weight: weight.data, lambda weight: weight * 2.0):
        model.module.read = read
        words = reported(model(torch.ones(1, 4)).sum().backward)
        assert "reads parameter 'weight' of unit 'head'" in words, words
        assert "in a hook on an output" in words


class Scale(torch.autograd.Function):
    """Keeps a weight for its backward, and does not compute with it before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.shape = 4, 4
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * 2.0, torch.ones(ctx.shape)


class Handing(nn.Module):
    """Hands the weight of `head`, a unit, to a custom Function, before it calls that unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = linear(), linear(bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Scale.apply(self.body(x), self.head.weight))  # through the wrapper


@pytest.mark.parametrize("orig", [True, False])
def test_a_parameter_handed_to_a_function_of_another_unit(world: None, orig: bool) -> None:
    model = FullyShardedDataParallel(Handing(), auto_wrap_policy={nn.Linear}, use_orig_params=orig)
    for _ in range(2):
        loss = model(torch.ones(1, 4)).sum()
        if orig:  # it was given the shard
            with pytest.raises(RuntimeError, match="ScaleBackward returned an invalid gradient at index 1"):
                loss.backward()
        else:  # it was given the leaf
            loss.backward()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_used_before_a_forward(world: None, steps: int) -> None:
    model = FullyShardedDataParallel(
        nn.Sequential(linear(), linear()), auto_wrap_policy={nn.Linear}, use_orig_params=True
    )
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
    loss = model.module[0].weight.square().sum() + model(torch.ones(1, 4)).sum()
    assert_expected_inline(
        reported(loss.backward),
        """\
parameter 'weight' of unit '0' received a gradient of shape (10,), which no rank would reduce. It
was used outside the forward of its unit, where it shows this rank's shard of (4, 4), or inside
summon_full_params(): compute functions of parameters (for example an L2 penalty) inside the forward
of the module that holds them, or under torch.no_grad()""",
    )


def test_a_gradient_of_a_shard(world: None) -> None:
    model = FullyShardedDataParallel(nn.Sequential(linear(), linear()), use_orig_params=True)
    model(torch.ones(1, 4)).sum().backward()
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    assert_expected_inline(
        reported(lambda: penalty.backward()),  # type: ignore[union-attr]
        """\
parameter '1.bias' of unit <root> received a gradient of shape (0,), which no rank would reduce. It
was used outside the forward of its unit, where it shows this rank's shard of (4,), or inside
summon_full_params(): compute functions of parameters (for example an L2 penalty) inside the forward
of the module that holds them, or under torch.no_grad()""",
    )


def test_gradients_of_a_window_are_not_summoned(world: None) -> None:
    model = FullyShardedDataParallel(linear(), use_orig_params=True)
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    assert_expected_inline(
        reported(lambda: FullyShardedDataParallel.summon_full_params(model, with_grads=True).__enter__()),
        """\
summon_full_params(with_grads=True): the gradients of unit <root> were accumulated under no_sync()
and differ between ranks, so there is no whole gradient to show. Summon them after a backward
outside of no_sync(), or leave with_grads out""",
    )


def test_a_tensor_made_of_others(world: None) -> None:
    module = linear()
    module.weight = nn.Parameter(TwoTensor(module.weight.detach(), module.weight.detach()))
    assert_expected_inline(
        reported(lambda: FullyShardedDataParallel(nn.Sequential(module))),
        """\
'0.weight' is a TwoTensor, a tensor that wraps other tensors: a flat parameter holds plain elements.
List its module in ignored_modules=, which keeps it unsharded on every rank, or define how it is
stored with flatfsdp.extensions.set_extensions()""",
    )


def test_a_dtensor_over_ranks_of_its_unit(world: None) -> None:
    module = linear()
    mesh = init_device_mesh("cpu", (2,))
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    assert_expected_inline(
        reported(lambda: FullyShardedDataParallel(nn.Sequential(module))),
        """\
'0.weight' is a DTensor on DeviceMesh((2,), 'cpu', stride=(1,)), of which ranks 0, 1 are also among
the ranks over which its unit is sharded. A parameter is sharded over the ranks that hold the same
part of it: pass device_mesh=mesh["dp"] of the mesh on whose mesh["tp"] the parameter is distributed""",
    )
    FullyShardedDataParallel(nn.Sequential(module, linear()), ignored_modules=[module])


def test_a_part_of_a_model_that_is_gone(world: None) -> None:
    """Also where the part is wrapped again, as a library does that wraps a module for each of its runs."""
    module = nn.Sequential(FullyShardedDataParallel(linear()))
    model = FullyShardedDataParallel(module)
    model(torch.ones(1, 4)).sum().backward()
    del model
    expected = """\
unit '0': the outermost wrapper of its model has been deleted, and with it the communicators that
its units share. Keep a reference to the outermost wrapper while any part of it is in use; or wrap
the part again, and load the model's state dict into it"""
    assert reported(lambda: module(torch.ones(1, 4))) == reported(lambda: FullyShardedDataParallel(module)) == expected


# --- arguments of methods, and objects that other programs hand over --------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (("1",), ConfigTypeError, "max_norm: got '1'. Accepted: a number"),
        ((True,), ConfigTypeError, "max_norm: got True. Accepted: a number"),
        ((1.0, "two"), ConfigTypeError, "norm_type: got 'two'. Accepted: a number, or 'inf'"),
        ((1.0, -1), ConfigValueError, "norm_type: got -1. Accepted: 0, a positive number, or inf"),
    ],
)
def test_arguments_of_clip_grad_norm(world: None, given: Any, error: type[Exception], message: str) -> None:
    model = FullyShardedDataParallel(linear())
    assert reported(lambda: model.clip_grad_norm_(*given), error) == message


def test_extensions_without_the_methods() -> None:
    assert_expected_inline(
        reported(lambda: set_extensions(len), ConfigTypeError),  # type: ignore[arg-type]
        """\
extensions: got <built-in function len>, which has no method pre_flatten_transform. Accepted: an
object with pre_flatten_transform and post_unflatten_transform, or None""",
    )


def test_an_extension_that_makes_no_tensor(world: None) -> None:
    class Listing:
        def pre_flatten_transform(self, tensor: Tensor) -> Any:
            return tensor.tolist(), "a list"

        def post_unflatten_transform(self, tensor: Tensor, state: Any) -> Tensor:
            raise AssertionError

    net = linear()
    set_extensions(Listing())
    try:
        message = reported(lambda: FullyShardedDataParallel(net))
    finally:
        set_extensions(None)
    assert message == "pre_flatten_transform of 'weight' returned list; expected a tensor and a state"
    assert net(torch.ones(1, 4)).shape == (1, 4)


def test_a_flat_parameter_without_its_model(world: None) -> None:
    flat_param = FullyShardedDataParallel(linear())._flat_param
    assert_expected_inline(
        reported(lambda: flat_param._fqns),
        """\
this FlatParameter no longer belongs to a FullyShardedDataParallel module (it is a copy, or the
model was deleted); read the layout from the model's own `_flat_param`""",
    )


def test_a_flat_parameter_of_another_shape(world: None) -> None:
    model = FullyShardedDataParallel(linear())
    model._flat_param.data = torch.zeros(3)
    assert_expected_inline(
        reported(lambda: model(torch.ones(1, 4))),
        """the flat parameter of unit <root> was assigned data of shape (3,); expected this rank's shard, (10,)""",
    )
