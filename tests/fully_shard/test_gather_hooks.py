"""Parameters with gather hooks of their own: compared with torch's `fully_shard` if that supports them on a CPU, else
with one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

import flatfsdp
from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import checkpoint
from flatfsdp.errors import AgreementError, UsageError
from tests.conftest import Run
from tests.fully_shard.test_beside_torchs import (
    ROWS,
    WORDS,
    Case,
    Net,
    differences,
    same,
    sharded,
    train,
)
from tests.fully_shard.test_copies import saved, step
from tests.fully_shard.test_features import PROGRAMS, plainly
from tests.harness import inspect, tensor_parallel, thorough
from tests.harness.gather_hooks import AsBfloat16, AsInt8, Gathered, extend
from tests.harness.inner_tensors import Columns
from tests.harness.meshes import named_mesh

pytestmark = pytest.mark.distributed


def net(kind: Any, case: Case = ROWS) -> Net:
    torch.manual_seed(0)
    model = Net(tied=case.tied)
    if kind is AsInt8:
        for block in model.blocks:
            extend(block.down, kind)  # torch's takes no uneven rows without their padding
    else:
        extend(model, kind)
    if case.tied:
        model.words.weight = model.head.weight
    if case.frozen:
        model.blocks[1].down.weight.requires_grad_(False)
    return model


def compared(one: Any, two: Any, case: Case, rank: int, steps: int = thorough.steps()) -> list[str]:
    found = differences(one, two)
    for number, (a, b) in enumerate(zip(train(one, case, rank, steps), train(two, case, rank, steps), strict=True)):
        if not same(a, b, case):
            found.append(f"value {number}: {a} and {b}")
    return found + differences(one, two, case)


# -- compared with torch's ---------------------------------------------------------------------------------------------


def beside_torchs(rank: int, world: int, shape: tuple[int, ...], kind: Any, case: Case) -> list[str]:
    warnings.simplefilter("ignore")
    model, mesh = net(kind, case), named_mesh(*shape)
    Gathered.calls.clear()
    one = sharded(copy.deepcopy(model), flatfsdp, mesh, case)
    two = sharded(model, theirs, mesh, case)
    found = compared(one, two, case, rank)
    if type(one.blocks[0].down.weight._local_tensor) is not kind or not Gathered.calls:
        found.append("nothing was gathered by hooks")
    return found


CASES = {
    "default": Case(),
    "reshard": Case(reshard=True, frozen=True, clip=True),
    "no-reshard": Case(reshard=False, micro="ns"),
    "bf16-accumulated": Case(dtype=torch.bfloat16, micro="nns", reshard=True),
    "tied": Case(tied=True, micro="ss"),
    "root-only": Case(as_list=False, micro="ns", offload=True),
}


PAIRS = [*((AsBfloat16, name) for name in CASES), (AsInt8, "reshard"), (AsInt8, "bf16-accumulated")]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_two_ranks(kind: Any, name: str, pool2: Run) -> None:
    assert not [each for found in pool2(beside_torchs, (2,), kind, CASES[name]) for each in found]


def test_hybrids(pool4: Run) -> None:
    assert not [each for found in pool4(beside_torchs, (2, 2), AsBfloat16, Case(clip=True)) for each in found]


def columns(parameter: Any) -> Any:
    return Shard(1) if isinstance(getattr(parameter, "_local_tensor", parameter), Columns) else None


def under_tensor_parallelism(rank: int, world: int, shape: tuple[int, ...], kind: Any, sequence: bool) -> list[str]:
    warnings.simplefilter("ignore")
    mesh, models, losses = tensor_parallel.mesh_of(*shape), [], []
    for package in (flatfsdp, theirs):
        made: Any = tensor_parallel.seeded(lambda: tensor_parallel.Net(hidden=24))
        for block in made.blocks:
            extend(block, kind)
        made = tensor_parallel.parallelized(made, mesh["tp"], sequence=sequence, source=None)
        for block in made.blocks:
            package.fully_shard(block, mesh=mesh["dp"], shard_placement_fn=columns)
        package.fully_shard(made, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, foreach=False)
        losses.append([])
        for number in range(thorough.steps()):
            losses[-1].append(tensor_parallel.step_ours(made, shape, number))
            optimizer.step()
            optimizer.zero_grad()
        models.append(made)
    found = differences(*models)
    if type(models[0].blocks[0].up.weight._local_tensor) is not kind:
        found.append("no hooks")
    return found if losses[0] == losses[1] else [*found, f"{losses}"]


@pytest.mark.parametrize("kind", [AsBfloat16, AsInt8, Columns])
def test_inside_of_dtensors(kind: Any, pool4: Run) -> None:
    assert not [each for found in pool4(under_tensor_parallelism, (2, 2), kind, kind is AsInt8) for each in found]


# -- compared with one process, and with each other --------------------------------------------------------------------


class Rounded(nn.Module):
    """The computation of one process: a weight with rounded rows; the gradient of the result is the weight's."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        scale = weight.detach().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return weight + ((weight.detach() / scale).round() * scale - weight.detach())


def uneven(rank: int, world: int) -> list[str]:
    """Rows that no number of ranks divides, some ranks with none, are filled up."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 2 * world + 1), nn.Tanh(), nn.Linear(2 * world + 1, world + 1))
    model: Any = extend(copy.deepcopy(one), AsInt8)
    for layer in (one[0], one[2]):
        nn.utils.parametrize.register_parametrization(layer, "weight", Rounded())
    for layer in (model[0], model[2], model):
        flatfsdp.fully_shard(layer)
    its, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, model))
    for number in range(3):
        batches = torch.randn(world, 3, 4, generator=torch.Generator().manual_seed(number))
        (one(batches).square().mean(dim=(1, 2)).sum() / world).backward()
        model(batches[rank]).square().mean().backward()
        for optimizer in (its, others):
            optimizer.step()
            optimizer.zero_grad()
    pairs = [
        (one[0].parametrizations.weight.original, model[0].weight),
        (one[2].parametrizations.weight.original, model[2].weight),
        (one[2].bias, model[2].bias),
    ]
    return [f"{a} {b}" for a, b in pairs if not torch.allclose(a, b.full_tensor(), rtol=1e-4, atol=1e-5)]


@pytest.mark.parametrize("world", [1, 3])
def test_uneven_rows(world: int, run: Run) -> None:
    assert not [each for found in run(world, uneven) for each in found]


def pieces_on_ranks(rank: int, world: int) -> list[str]:
    """Shards among fewer ranks after a forward are stored as bytes, too."""
    case = Case(micro="ns")
    one, two = (sharded(net(AsBfloat16), flatfsdp, named_mesh(world), replace(case, reshard=n)) for n in (2, True))
    return compared(one, two, case, rank)


def test_fewer_ranks_after_a_forward(pool4: Run) -> None:
    assert not [each for found in pool4(pieces_on_ranks) for each in found]


def in_any_order(rank: int, world: int) -> list[str]:
    """Evaluation before training; a graph that is kept; outputs that are parameters; written shards."""
    case, found = Case(reshard=True), []
    plain, model = (sharded(net(AsBfloat16), flatfsdp, named_mesh(world), case) for _ in range(2))
    batch = torch.arange(8).view(2, 4)
    with torch.inference_mode():
        model(batch)
    with torch.no_grad():
        found += ["evaluation"] if not torch.equal(model(batch), plain(batch)) else []
    for each in (plain, model):
        loss = each(batch).square().mean()
        loss.backward(retain_graph=each is model)
        if each is model:
            loss.backward()
    for (name, one), two in zip(plain.named_parameters(), model.parameters(), strict=True):
        if not torch.allclose(2 * one.grad.to_local(), two.grad.to_local()):
            found.append(f"gradient of {name}")
    with torch.no_grad():
        for each in (plain, model):
            for parameter in each.parameters():
                parameter.mul_(0.5)
    found += ["written"] if not torch.equal(model(batch), plain(batch)) else []
    model.unshard()
    weight = model.one_row
    found += ["unsharded"] if isinstance(weight, DTensor) else []
    model.reshard()
    return found


def test_any_order_of_passes(pool2: Run) -> None:
    assert not [each for found in pool2(in_any_order) for each in found]


def features(rank: int, world: int, program: Callable[[nn.Module, int], None]) -> list[str]:
    model = net(AsBfloat16, Case(frozen=True))
    one, two = (sharded(copy.deepcopy(model), flatfsdp, named_mesh(world), ROWS) for _ in range(2))
    plainly(one, rank)
    program(two, rank)
    return differences(one, two)


def checkpointed(model: Any, rank: int) -> None:
    """Forwards of blocks run again in the backward."""
    for block in model.blocks:
        block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    plainly(model, rank)


@pytest.mark.parametrize("name", [*PROGRAMS, "checkpointed"])
def test_features(name: str, pool2: Run) -> None:
    assert pool2(features, PROGRAMS.get(name, checkpointed)) == [[], []]


def returned(rank: int, world: int) -> list[bool]:
    """Tensors that a forward returns keep their values when its parameters are freed."""

    class Returning(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.weight.t(), self.weight

    torch.manual_seed(0)
    model: Any = extend(Returning(4, 4), AsBfloat16)
    expected = model.weight.detach().to(torch.bfloat16).float()
    flatfsdp.fully_shard(model, reshard_after_forward=True)
    _, transposed, weight = model(torch.ones(1, 4))
    return [torch.equal(transposed.t(), expected), torch.equal(weight, expected)]


def test_what_is_returned_stays(pool2: Run) -> None:
    assert pool2(returned) == [[True, True]] * 2


def memory_of_bytes(rank: int, world: int) -> tuple[int, int, int]:
    """The most bytes of unsharded parameters in a step, and at its end."""
    torch.manual_seed(0)
    model = nn.Linear(64, 32, bias=False)
    extend(model, AsBfloat16)
    policy = flatfsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    flatfsdp.fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    model(torch.ones(2, 64)).float().sum().backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.float32
    found = inspect.memory(model)
    return found.peak("unsharded"), found.live["unsharded"], inspect.comm_stats(model).bytes["all_gather"]


def test_only_what_hooks_return_is_allocated_and_gathered(pool2: Run) -> None:
    assert pool2(memory_of_bytes) == [(2 * 64 * 32, 0, 2 * 2 * 64 * 32)] * 2


def in_few_bits(rank: int, world: int, kind: Any) -> list[str]:
    """Gathers in int8 of a model whose first weight has hooks: what those return arrives as it is."""
    found = []
    values: list[list[torch.Tensor]] = []
    for dtype in (None, torch.int8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 8, bias=False))
        model[0] = extend(model[:1], kind)[0]
        flatfsdp.fully_shard(model, mp_policy=flatfsdp.MixedPrecision(gather_dtype=dtype))
        seen: list[torch.Tensor] = []
        model[0].register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.detach().clone()))
        model(torch.randn(2, 64, generator=torch.Generator().manual_seed(rank))).sum().backward()
        values.append([*seen, model[1].weight.grad.full_tensor()])
        quantized = "by int8" in flatfsdp.summary(model)
        if quantized != (dtype is torch.int8):
            found.append(f"{dtype}: {flatfsdp.summary(model)}")
    for number, (plain, few) in enumerate(zip(*values, strict=True)):
        if not torch.equal(plain, few):
            found.append(f"value {number}: {plain} and {few}")
    return found


@pytest.mark.parametrize("kind", [AsBfloat16, AsInt8])
def test_what_hooks_return_is_not_quantized_beside_parameters_that_are(kind: Any, pool2: Run) -> None:
    assert pool2(in_few_bits, kind) == [[]] * 2


# -- copies, state dicts, checkpoints ----------------------------------------------------------------------------------


def copies(rank: int, world: int, how: str) -> list[str]:
    model: Any = sharded(net(AsBfloat16), flatfsdp, named_mesh(world), Case())
    batches = torch.randint(0, WORDS, (4, 3, 4), generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, batches[0])
    if how == "copy":
        twin, its = copy.deepcopy((model, optimizer))
    else:
        twin = saved(model)
        its = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found = differences(model, twin)
    for batch in batches[1:]:
        one, two = step(model, optimizer, batch), step(twin, its, batch)
        if not torch.equal(one, two):
            found.append(f"{one} and {two}")
    found += differences(model, twin)
    if type(twin.head.weight._local_tensor) is not AsBfloat16:
        found.append("a plain tensor")
    step(twin, its, batches[0])
    return found if differences(model, twin) else [*found, "memory is shared"]


@pytest.mark.parametrize("how", ["copy", "saved"])
def test_copies_train_on(how: str, pool2: Run) -> None:
    assert not [each for found in pool2(copies, how) for each in found]


def checkpoints(rank: int, world: int, folder: str) -> list[str]:
    """Whole and sharded state dicts, DCP's files, values that are assigned, a model on the meta device."""
    warnings.simplefilter("ignore")
    case, found = Case(), []
    model: Any = sharded(net(AsBfloat16), flatfsdp, named_mesh(world), case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randint(0, WORDS, (2, 3, 4), generator=torch.Generator().manual_seed(rank))
    step(model, optimizer, batches[0])
    of_model, of_optimizer = get_state_dict(model, optimizer)
    found += [
        f"{k} is saved as {type(v._local_tensor)}"
        for k, v in of_model.items()
        if type(v._local_tensor) in (AsBfloat16,)
    ]
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if any(type(each) is not torch.Tensor for each in whole.values()):
        found.append(f"whole values are { ({type(each) for each in whole.values()}) }")

    torch.manual_seed(1)
    other: Any = sharded(extend(Net(), AsBfloat16), flatfsdp, named_mesh(world), case)  # type: ignore[arg-type]
    others = torch.optim.AdamW(other.parameters(), lr=1e-2)
    step(other, others, batches[1])
    read = dict(zip(("model", "optimizer"), get_state_dict(other, others), strict=True))
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(other, others, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    found += [f"read {each}" for each in differences(model, other)]

    with torch.device("meta"):
        empty: Any = extend(Net(), AsBfloat16)
    assigned = sharded(empty, flatfsdp, named_mesh(world), case)
    assigned.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    made: Any = sharded(extend(Net(), AsBfloat16), flatfsdp, named_mesh(world), case)  # type: ignore[arg-type]
    set_model_state_dict(
        made,
        whole if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    losses = []
    for each in (model, other, assigned, made):
        its = torch.optim.SGD(each.parameters(), lr=1e-2)
        losses.append(step(each, its, batches[1]))
        found += differences(model, each)
        found += [] if type(each.head.weight._local_tensor) is AsBfloat16 else ["a plain tensor"]
    return found if all(torch.equal(losses[0], each) for each in losses) else [*found, f"losses {losses}"]


def test_checkpoints(pool2: Run, tmp_path: Path) -> None:
    assert not [each for found in pool2(checkpoints, str(tmp_path), timeout=60) for each in found]


def own_files(rank: int, world: int, folder: str) -> list[str]:
    """Checkpoints and exports of this package have the masters, and what is summoned are these."""
    warnings.simplefilter("ignore")
    batches = torch.randint(0, WORDS, (2, 3, 4), generator=torch.Generator().manual_seed(rank))
    model: Any = sharded(net(AsBfloat16), flatfsdp, named_mesh(world), Case())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, batches[0])
    whole = {name: each.full_tensor() for name, each in model.state_dict().items()}
    with FSDP.summon_full_params(model):
        shown = [getattr(each, "_data", each).detach().clone() for each in model.parameters()]
    found = ["other values are summoned"] * (not all(map(torch.equal, shown, whole.values())))
    checkpoint.save(f"{folder}/saved", model=model, optimizer=optimizer)
    checkpoint.export_safetensors(model, f"{folder}/exported")
    for name in ("saved", "exported"):
        torch.manual_seed(1)
        other: Any = sharded(extend(Net(), AsBfloat16), flatfsdp, named_mesh(world), Case())  # type: ignore[arg-type]
        its = torch.optim.AdamW(other.parameters(), lr=1e-2)
        if name == "saved":
            checkpoint.load(f"{folder}/{name}", model=other, optimizer=its)
        else:
            checkpoint.load_safetensors(other, f"{folder}/{name}")
        found += [f"{name}: {each}" for each in differences(model, other)]
    with FSDP.summon_full_params(other), torch.no_grad():
        for each in other.parameters():
            each.mul_(2.0)
    written = [each.full_tensor() for each in other.parameters()]
    found += ["not written back"] * (not all(torch.equal(a, b * 2.0) for a, b in zip(written, shown, strict=True)))
    step(other, its, batches[1])
    return found


def test_own_files(pool2: Run, tmp_path: Path) -> None:
    assert not [each for found in pool2(own_files, str(tmp_path), timeout=60) for each in found]


# -- refusals ----------------------------------------------------------------------------------------------------------


def variant(**methods: Any) -> type[Gathered]:
    return type("Odd", (AsInt8,), methods)


def gives(*what: Any) -> Callable[..., Any]:
    return lambda self, mesh: (tuple(each(self._data) if callable(each) else each for each in what), None)


def fails_on_rank_1(self: Any, mesh: Any) -> Any:
    assert mesh.get_local_rank() == 0, "no"
    return (self._data,), None


class NoPost(Gathered):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError


AT_ONCE: list[tuple[Any, str]] = [
    (NoPost, "'weight' \\(NoPost\\) has fsdp_pre_all_gather but no fsdp_post_all_gather"),
    (variant(fsdp_pre_all_gather=lambda self, mesh, more: None), "takes 2 arguments; expected \\(mesh\\), or"),
    (variant(__tensor_flatten__=lambda self: (["_data"], None)), ""),
]
AT_FIRST: list[tuple[Any, str]] = [
    (gives(), "returned no tensor; expected one at least"),
    (gives(3), "returned a int as tensor 0 of 1; expected tensors"),
    (gives(lambda data: data.t()), r"with strides \(1, 3\) as tensor 0 of 1; expected contiguous tensors"),
    (lambda self, mesh: self._data, r"returned Tensor; expected \(the tensors to gather, metadata\)"),
    (
        lambda self, mesh: ((self._data[: 1 + mesh.get_local_rank()],), None),
        "(rank 1 of the shards gathers|and rank 0)",
    ),
    (
        lambda self, mesh: ((self._data,) * (1 + mesh.get_local_rank()), None),
        r"rank 1 of the shards gathers float32\[2, 3\], float32\[2, 3\], and rank 0 float32\[2, 3\]",
    ),
    (
        lambda self, mesh: ((self._data.t() if mesh.get_local_rank() else self._data,), None),
        "(on rank 1 of the shards: parameter 'weight'|returned)",
    ),
]
AT_FIRST.append((fails_on_rank_1, "fsdp_pre_all_gather raised AssertionError: no"))
POSTS: list[tuple[Any, str]] = [
    (lambda self, outputs, metadata, dtype, *, out=None: outputs[0], "returned Tensor; expected \\(the tensor that"),
    (lambda self, outputs, metadata, dtype, *, out=None: (outputs[1], ()), r"shape \(4, 1\); expected a floating"),
    (lambda self, outputs, metadata, dtype, *, out=None: (outputs[0], ()), "returned torch.int8 of shape"),
]


def layer(kind: Any) -> Any:
    torch.manual_seed(0)
    return extend(nn.Linear(3, 4), kind)


def refused(rank: int, world: int) -> None:
    for kind, match in AT_ONCE:
        if match:
            made = layer(kind)
            with pytest.raises(UsageError, match=match):
                flatfsdp.fully_shard(made)
            assert type(made.weight) is nn.Parameter or isinstance(made.weight, Gathered)
    for pre, match in AT_FIRST:
        model = flatfsdp.fully_shard(layer(variant(fsdp_pre_all_gather=pre)))
        with pytest.raises(UsageError, match=match):
            model(torch.ones(1, 3))
    for post, match in POSTS:
        model = flatfsdp.fully_shard(layer(variant(fsdp_post_all_gather=post)))
        with pytest.raises(UsageError, match=match):
            model(torch.ones(1, 3))


def test_what_is_refused(pool2: Run) -> None:
    pool2(refused, timeout=60)


def refused_along_columns(rank: int, world: int) -> None:
    def sharded_by_columns(kind: Any, width: int = 4) -> Any:
        model = extend(nn.Linear(width, 4), kind)
        return flatfsdp.fully_shard(model, shard_placement_fn=lambda each: Shard(1) if each.dim() == 2 else None)

    match = r"'weight' \(Columns\) of shape \(4, 3\) is split along dimension 1, whose 3 elements are no multiple of"
    with pytest.raises(UsageError, match=match):
        sharded_by_columns(Columns, 3)
    few = type("Few", (Columns,), {"fsdp_pre_all_gather": lambda self, mesh: ((self._data[:1].contiguous(),), None)})
    with pytest.raises(UsageError, match=r"returned \(1, 2\).* of 1; expected 8 elements, as many as the rows"):
        sharded_by_columns(few)(torch.ones(1, 4))


def test_what_is_refused_along_another_dimension(pool2: Run) -> None:
    pool2(refused_along_columns, timeout=60)


def changes(rank: int, world: int) -> None:
    """The second gather has tensors of another size."""

    class Growing(AsInt8):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            inputs, metadata = super().fsdp_pre_all_gather(mesh)
            return ((*inputs, inputs[1]) if self.calls.count("pre") > 2 else inputs), metadata

    Gathered.calls.clear()
    model: Any = flatfsdp.fully_shard(layer(Growing), reshard_after_forward=True)
    model(torch.ones(1, 3))
    model(torch.ones(1, 3))
    with pytest.raises(UsageError, match=r"'weight' .Growing.: its fsdp_pre_all_gather returned int8.*at the first"):
        model(torch.ones(1, 3))


def test_sizes_that_change_are_refused(pool2: Run) -> None:
    pool2(changes)


def other_classes(rank: int, world: int) -> None:
    model = flatfsdp.fully_shard(layer(AsInt8 if rank else AsBfloat16))
    with pytest.raises(AgreementError, match=r"by the hooks of AsBfloat16[\s\S]*by the hooks of AsInt8"):
        model(torch.ones(1, 3))


def test_ranks_have_the_same_hooks(pool2: Run) -> None:
    pool2(other_classes)


def under_a_wrapper(rank: int, world: int) -> None:
    with pytest.raises(UsageError, match=r"'weight' is a AsInt8.*flatfsdp.fully_shard"):
        flatfsdp.FullyShardedDataParallel(layer(AsInt8))
    F.linear(torch.ones(1, 3), layer(AsInt8).weight)


def test_wrappers_refuse_them(pool2: Run) -> None:
    pool2(under_a_wrapper)
