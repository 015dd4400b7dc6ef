"""Parameters whose class keeps its rows (several inner tensors, quantized blocks), beside torch's `fully_shard`."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

import flatfsdp
from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import checkpoint
from flatfsdp.errors import FlatFSDPError
from tests.conftest import Run
from tests.harness import inspect, thorough
from tests.harness.gather_hooks import Gathered, Halving, extend
from tests.harness.inner_tensors import Blocks, Columns, Net, OfThree, Pair, PairOfColumns, Rounded, Stored, Unnamed
from tests.harness.meshes import adamw, named_mesh

pytestmark = pytest.mark.distributed

WIDTH = 8


@dataclass(frozen=True)
class Case:
    """The settings by which a model is sharded and trained."""

    reshard: bool | int | None = None
    dtype: torch.dtype | None = None
    micro: str = "s"  # microbatches: with s ones that reduce
    offload: bool = False
    hidden: int = 12
    optimizer: str = "adamw"
    units: bool = True  # each layer is one


ROWS = Case()
BY_COLUMNS = (Columns, PairOfColumns)  # split along dimension 1


def sharded(model: Any, api: Any, mesh: Any, case: Case) -> Any:
    settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard}
    if case.dtype is not None:
        settings["mp_policy"] = api.MixedPrecisionPolicy(param_dtype=case.dtype, reduce_dtype=torch.float32)
    if any(isinstance(each, BY_COLUMNS) for each in model.parameters()):
        settings["shard_placement_fn"] = lambda each: Shard(1) if isinstance(each, BY_COLUMNS) else None
    if case.offload:
        settings["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
    for layer in model.layers if case.units else ():
        api.fully_shard(layer, **settings)
    return api.fully_shard(model, **settings)


def parts(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors of a tensor, or of a DTensor's local one."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if isinstance(tensor, Pair):
        return [tensor.one, tensor.two]
    if isinstance(tensor, Stored):
        return [tensor.codes, tensor.scales]
    return [tensor._data] if hasattr(tensor, "_data") else [tensor]


def facts(value: Any) -> list[Any]:
    local = getattr(value, "_local_tensor", value)
    kind = torch.Tensor if isinstance(local, Gathered) else type(local)  # ours saves what is around one tensor as that
    placements = getattr(value, "placements", ())
    # Plain parts along another dimension than the first lie in the stored order here.
    strides = [] if Shard(1) in placements else [value.stride(), local.stride()]
    return [type(value), kind, value.shape, *strides, value.dtype, local.shape, value.requires_grad, placements]


def unlike(what: str, one: Any, two: Any) -> list[str]:
    if one is None or two is None:
        return [] if one is two else [f"{what}: {one} and {two}"]
    if facts(one) != facts(two):
        return [f"{what}: {facts(one)} and {facts(two)}"]
    if all(torch.equal(a.detach(), b.detach()) for a, b in zip(parts(one), parts(two), strict=True)):
        return []
    return [f"{what}: {parts(one)} and {parts(two)}"]


def differences(one: Any, two: Any) -> list[str]:
    pairs = zip(one.named_parameters(), two.named_parameters(), strict=True)
    found = [each for (name, a), (_, b) in pairs for each in unlike(name, a, b)]
    ours, torchs = one.state_dict(), two.state_dict()
    if [*ours] != [*torchs]:
        found.append(f"{[*ours]} and {[*torchs]}")
    return found + [each for key in ours for each in unlike(f"state {key}", ours[key], torchs[key])]


def optimizer_of(model: Any, case: Case) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=0.1)
    return adamw(trained)


def train(
    model: Any, optimizer: torch.optim.Optimizer, case: Case, rank: int, steps: int = thorough.steps()
) -> list[Any]:
    """Losses, gradients and the optimizer's state."""
    seen: list[Any] = []
    generator = torch.Generator().manual_seed(17 + rank)
    for _ in range(steps):
        for kind in case.micro:
            model.set_requires_gradient_sync(kind == "s")
            loss = model(torch.randn(3, WIDTH, generator=generator)).float().square().mean()
            loss.backward()
            seen.append(loss.detach())
        seen += [each.grad if each.grad is None else each.grad.clone() for each in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    for state in optimizer.state.values():
        seen += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return seen


def compared(one: Any, two: Any, case: Case, rank: int, steps: int = thorough.steps()) -> list[str]:
    found = differences(one, two)
    both = [train(each, optimizer_of(each, case), case, rank, steps) for each in (one, two)]
    if len(both[0]) != len(both[1]):
        return [*found, f"{len(both[0])} and {len(both[1])} values"]
    for number, (a, b) in enumerate(zip(*both, strict=True)):
        found += unlike(f"value {number}", a, b)
    return found + differences(one, two)


def beside_torchs(rank: int, world: int, shape: tuple[int, ...], kind: Any, case: Case) -> list[str]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, mesh = Net(kind, WIDTH, case.hidden), named_mesh(*shape)
    one = sharded(copy.deepcopy(model), flatfsdp, mesh, case)
    two = sharded(model, theirs, mesh, case)
    return compared(one, two, case, rank)


CASES = {
    "default": Case(),
    "reshard": Case(reshard=True, optimizer="sgd"),
    "no-reshard": Case(reshard=False, micro="ns"),
    "bf16-accumulated": Case(dtype=torch.bfloat16, micro="nns", reshard=True),
    "root-only": Case(units=False, micro="ns"),
    "offload": Case(offload=True),
    "uneven": Case(hidden=13),
}
UNEVEN = (Pair, Unnamed)  # torch's takes no uneven rows from the others
KINDS = (Pair, Rounded, Blocks, Unnamed, *BY_COLUMNS)
EACH = ("no-reshard", "bf16-accumulated")  # of every kind; the others in turn
PAIRS = [
    *((kind, name) for kind in KINDS for name in EACH),
    *thorough.some([(kind, name) for kind in KINDS for name in CASES if name not in (*EACH, "uneven")], 3),
    *((kind, "uneven") for kind in UNEVEN),
]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_two_ranks(kind: Any, name: str, pool2: Run) -> None:
    assert not [each for found in pool2(beside_torchs, (2,), kind, CASES[name]) for each in found]


@pytest.mark.parametrize("kind", [OfThree, Pair, PairOfColumns])
def test_hybrids(kind: Any, pool4: Run) -> None:
    assert not [each for found in pool4(beside_torchs, (2, 2), kind, Case(micro="ns")) for each in found]


def stepped(model: Any, optimizer: torch.optim.Optimizer, rank: int, number: int) -> torch.Tensor:
    batch = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
    loss = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def made(kind: Any, mesh: Any, case: Case = ROWS, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = sharded(Net(kind, WIDTH, case.hidden), flatfsdp, mesh, case)
    return model, optimizer_of(model, case)


def uneven(rank: int, world: int, kind: Any) -> list[str]:
    """Ranks with fewer rows, or without: the losses of one process, to rounding, for a model that is only evaluated."""
    torch.manual_seed(0)
    one = Net(kind, WIDTH, world + 2)
    model = sharded(copy.deepcopy(one), flatfsdp, named_mesh(world), ROWS)
    with torch.no_grad():
        found, expected = (each(torch.ones(2, WIDTH)) for each in (model, one))
    return [] if torch.equal(found, expected) else [f"{found} and {expected}"]


@pytest.mark.parametrize("kind", [Pair, Rounded])
def test_uneven_rows(kind: Any, pool4: Run) -> None:
    assert not [each for found in pool4(uneven, kind) for each in found]


def kept_and_restored(rank: int, world: int, kind: Any, folder: str) -> list[str]:
    """Copies, pickles, state dicts, files, meta models and assigned values go on as the original does."""
    warnings.simplefilter("ignore")
    mesh = named_mesh(world)
    model, optimizer = made(kind, mesh)
    stepped(model, optimizer, rank, 0)
    twins: dict[str, tuple[Any, torch.optim.Optimizer]] = {"copy": copy.deepcopy((model, optimizer))}

    def fresh(name: str, *, meta: bool = False, seed: int = 1) -> Any:
        if meta:
            torch.manual_seed(seed)
            empty = Net(kind, WIDTH).to("meta")
            other = sharded(empty, flatfsdp, mesh, ROWS)
            twins[name] = other, optimizer_of(other, ROWS)
        else:
            twins[name] = made(kind, mesh, seed=seed)
        return twins[name][0]

    fresh("loaded").load_state_dict(model.state_dict())
    other = fresh("read")
    stepped(other, twins["read"][1], rank, 1)
    read = other.state_dict()
    torch.serialization.add_safe_globals([Pair, Rounded, Blocks, *BY_COLUMNS])
    dcp.save(model.state_dict(), checkpoint_id=folder)
    dcp.load(read, checkpoint_id=folder)
    other.load_state_dict(read)
    empty = fresh("meta", meta=True)
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    twins["meta"] = empty, optimizer_of(empty, ROWS)
    assigned = fresh("assigned", meta=True)
    assigned.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    twins["assigned"] = assigned, optimizer_of(assigned, ROWS)
    data = fresh("data")
    stepped(data, twins["data"][1], rank, 1)
    kept = [each.data for each in data.parameters()]
    for one, value in zip(data.parameters(), model.parameters(), strict=True):
        one.data = value.data.clone()
    changed = [all(map(torch.equal, parts(a), parts(b))) for a, b in zip(kept, data.parameters(), strict=True)]
    found = ["what was put aside was overwritten"] * (all(changed) and kind is not Blocks)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    twins["pickle"] = saved, optimizer_of(saved, ROWS)
    for name, (twin, _) in twins.items():
        found += [f"{name}: {each}" for each in differences(twin, model)]
    expected = stepped(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), rank, 2)
    for name, (twin, _) in twins.items():
        its = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1)
        found += unlike(f"{name}: loss", stepped(twin, its, rank, 2), expected)
        found += [f"{name} after a step: {each}" for each in differences(twin, model)]
    return found


@pytest.mark.parametrize("kind", [Pair, Rounded, Blocks, *thorough.some(BY_COLUMNS, 2)])
def test_kept_and_restored(kind: Any, pool2: Run, tmp_path: Path) -> None:
    assert not [each for found in pool2(kept_and_restored, kind, str(tmp_path)) for each in found]


WHOLE = StateDictOptions(full_state_dict=True)


def values_in(tree: Any) -> list[torch.Tensor]:
    """Copies of the plain tensors in a state dict."""
    found = [each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]
    return [part.detach().clone() for each in found for part in parts(each)]


def whole_states(model: Any, optimizer: torch.optim.Optimizer, twin: Any, its: torch.optim.Optimizer) -> Any:
    yield values_in([each.full_tensor() for each in model.parameters()])
    yield values_in(get_model_state_dict(model, options=WHOLE))
    yield values_in(get_optimizer_state_dict(model, optimizer, options=WHOLE))


def sharded_states(model: Any, optimizer: torch.optim.Optimizer, twin: Any, its: torch.optim.Optimizer) -> Any:
    set_model_state_dict(twin, get_model_state_dict(model))
    set_optimizer_state_dict(twin, its, get_optimizer_state_dict(model, optimizer))
    yield values_in(twin.state_dict())
    yield values_in(get_optimizer_state_dict(twin, its))


def from_whole_states(model: Any, optimizer: torch.optim.Optimizer, twin: Any, its: torch.optim.Optimizer) -> Any:
    set_model_state_dict(twin, get_model_state_dict(model, options=WHOLE), options=WHOLE)
    set_optimizer_state_dict(twin, its, get_optimizer_state_dict(model, optimizer, options=WHOLE), options=WHOLE)
    yield values_in(twin.state_dict())
    yield values_in(get_optimizer_state_dict(twin, its))


def torchs_state_dicts(rank: int, world: int, kind: Any, *states: Callable[..., Any]) -> list[str]:
    """What torch's functions read and set, and the step after it, beside torch's units."""
    warnings.simplefilter("ignore")
    mesh, found = named_mesh(world), []
    for api in (flatfsdp, theirs):
        both: list[Any] = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = sharded(Net(kind, WIDTH), api, mesh, ROWS)
            both += [model, optimizer_of(model, ROWS)]
        stepped(*both[:2], rank, 0)
        seen = []
        for each in states:
            seen += each(*both)
            stepped(*both[2:], rank, 1)
            seen.append(values_in(both[2].state_dict()))
        found.append(seen)
    ours, torchs = found
    same = [len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(ours, torchs, strict=True)]
    return [f"{number} of {len(same)} differs" for number, each in enumerate(same) if not each]


# With whole states of `Pair`, torch frees memory that its own gathers still write to.
@pytest.mark.parametrize("kind", [Pair, Rounded, Blocks, Columns])
def test_state_dicts_of_torch(kind: Any, pool2: Run) -> None:
    states = [whole_states, *([from_whole_states] if kind in (Rounded, Blocks) else []), sharded_states]
    assert not [each for found in pool2(torchs_state_dicts, kind, *states) for each in found]


def summoned(model: nn.Module) -> None:
    with FSDP.summon_full_params(model):
        pass


PLAIN = {
    "checkpoint.save": lambda model, optimizer, folder: checkpoint.save(
        f"{folder}/saved", model=model, optimizer=optimizer
    ),
    "checkpoint.load": lambda model, optimizer, folder: checkpoint.load(f"{folder}/saved", model=model),
    "export_safetensors": lambda model, optimizer, folder: checkpoint.export_safetensors(model, f"{folder}/exported"),
    "load_safetensors": lambda model, optimizer, folder: checkpoint.load_safetensors(model, f"{folder}/plain"),
    "summon_full_params": lambda model, optimizer, folder: summoned(model),
    "optim_state_dict": lambda model, optimizer, folder: FSDP.optim_state_dict(model, optimizer),
}


def refused(rank: int, world: int, folder: str) -> dict[str, str]:
    checkpoint.export_safetensors(nn.Linear(2, 2), f"{folder}/plain")
    model, optimizer = made(Pair, named_mesh(world))
    stepped(model, optimizer, rank, 0)
    messages = {}
    for name, call in PLAIN.items():
        with pytest.raises(FlatFSDPError) as error:
            call(model, optimizer, folder)
        messages[name] = str(error.value)
    return messages


def test_functions_of_plain_elements_refuse_them(pool2: Run, tmp_path: Path) -> None:
    """Their shards have no values, and files would have zeros."""
    for messages in pool2(refused, str(tmp_path)):
        for name, message in messages.items():
            of_state = "state of 'weight' is a Pair"
            what = of_state if name == "optim_state_dict" else "'layers.0.weight' is a Pair, whose class"
            assert what in message and "torch.distributed.checkpoint" in message, message


def written(rank: int, world: int, folder: str, kind: Any) -> Any:
    model, optimizer = made(kind, named_mesh(world))
    stepped(model, optimizer, 0, 0)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return [[part.full_tensor() for part in parts_in(each)] for each in model.parameters()]


def parts_in(parameter: Any) -> list[Any]:
    """A DTensor of each of the inner tensors."""
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return [DTensor.from_local(each, mesh, placements, shape=shape, stride=stride) for each in parts(parameter)]


def on_other_ranks(rank: int, world: int, folder: str, kind: Any, expected: list[list[torch.Tensor]]) -> list[str]:
    torch.serialization.add_safe_globals([kind])
    model, _ = made(kind, named_mesh(world), seed=1)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    found = [[part.full_tensor() for part in parts_in(each)] for each in model.parameters()]
    pairs = zip(found, expected, model.named_parameters(), strict=True)
    return [name for ones, twos, (name, _) in pairs if not all(map(torch.equal, ones, twos))]


@pytest.mark.parametrize("kind", [Pair, *BY_COLUMNS])
def test_files_are_read_by_another_number_of_ranks(kind: Any, pool2: Run, pool4: Run, tmp_path: Path) -> None:
    expected = pool2(written, str(tmp_path), kind)[0]
    assert pool4(on_other_ranks, str(tmp_path), kind, expected) == [[]] * 4


def by_hand(rank: int, world: int, kind: Any) -> list[str]:
    """Unshard by hand, casts, fused optimizer steps, and the bytes that are kept."""
    mesh = named_mesh(world)
    (model, optimizer), (other, its) = (made(kind, mesh, Case(reshard=True)) for _ in range(2))
    flatfsdp.fuse_optimizer_steps(its)
    found = []
    for number in range(2):
        other.layers[0].unshard()
        found += unlike("loss", stepped(other, its, rank, number), stepped(model, optimizer, rank, number))
        other.layers[0].unshard()
        other.layers[0].reshard()
    found += differences(other, model)
    held = sum(part.nbytes for each in model.parameters() for part in parts(each))
    if (counted := inspect.memory(model).live["shard"]) != held and kind is not Pair:
        found.append(f"{counted} bytes, {held} held")
    if kind is Pair:
        model.double()
        if [part.dtype for part in parts(model.layers[0].weight)] != [torch.float64] * 2:
            found.append("not cast")
        model(torch.ones(1, WIDTH, dtype=torch.float64))
    return found


@pytest.mark.parametrize("kind", [Pair, Rounded, Blocks, Columns])
def test_by_hand(kind: Any, pool2: Run) -> None:
    assert not [each for found in pool2(by_hand, kind) for each in found]


class Passing(Halving):
    """What is gathered is what modules compute with, in its place among the gathered bytes."""

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)


def in_place(rank: int, world: int) -> bool:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[extend(nn.Linear(2, 3, bias=False).bfloat16(), Passing) for _ in range(3)])
    expected = [each.weight._data.clone() for each in model]
    flatfsdp.fully_shard(model)
    model.unshard()
    return all(torch.equal(each.weight, value) for each, value in zip(model, expected, strict=True))


def test_padded_rows_are_cut_off_where_they_lie(pool2: Run) -> None:
    assert pool2(in_place) == [True, True]


def pieces_on_ranks(rank: int, world: int) -> list[str]:
    (one, first), (two, second) = (
        made(Columns, named_mesh(world), Case(reshard=ranks, micro="ns")) for ranks in (2, True)
    )
    found = []
    for number in range(3):
        found += unlike("loss", stepped(one, first, rank, number), stepped(two, second, rank, number))
    return found + differences(one, two)


def test_columns_on_fewer_ranks_after_a_forward(pool4: Run) -> None:
    """What these keep of the gathered bytes is in the parameter's order already."""
    assert not [each for found in pool4(pieces_on_ranks) for each in found]
