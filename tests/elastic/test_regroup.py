"""A model and its optimizer move to other ranks in memory: as a checkpoint would have moved them, bit for bit."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import flatfsdp
from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, checkpoint
from flatfsdp.elastic import api, regroup, transfer
from flatfsdp.elastic.holding import Holding
from flatfsdp.engine.wrapping.regrouping import Regrouping
from flatfsdp.errors import AgreementError, FlatFSDPError
from flatfsdp.layout import Whole
from flatfsdp.wrap import ModuleWrapPolicy
from tests.features import test_block_states as blocks
from tests.features import test_deterministic_sums as sums
from tests.harness import pool
from tests.harness.corners import seeded
from tests.harness.meshes import named_mesh
from tests.harness.thorough import spread

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    """Odd sizes, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 13))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        found: Tensor = x + self.scale * self.inner(x)
        return found


class Net(nn.Module):
    """Blocks, and layers that share a weight, or are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.one, self.other = nn.Linear(13, 13, bias=False), nn.Linear(13, 13)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.other(self.one(self.frozen(x)))
        return found


class Setting:
    """How a model is wrapped over a group: which front, and its options."""

    def __init__(self, front: str = "wrapper", strategy: str = "FULL_SHARD", **options: Any) -> None:
        self.front, self.strategy, self.options = front, strategy, options

    def __repr__(self) -> str:
        return "-".join([self.front, self.strategy, *map(str, self.options)])

    @property
    def is_hybrid(self) -> bool:
        return "HYBRID" in self.strategy

    def group(self, ranks: Sequence[int]) -> Any:
        """The ranks as the argument `group`; None on others. Collective over all ranks."""
        if not self.is_hybrid:
            made = dist.new_group([*ranks])
            return made if dist.get_rank() in ranks else None
        half = len(ranks) // 2
        pairs = [ranks[:half], ranks[half:]]
        mine = dist.get_rank()
        shards = [dist.new_group(sorted(each)) for each in pairs]
        copies = [dist.new_group(sorted(each)) for each in zip(*pairs, strict=True)]
        if mine not in ranks:
            return None
        shard = next(group for group, each in zip(shards, pairs, strict=True) if mine in each)
        copy = next(group for group, each in zip(copies, zip(*pairs, strict=True), strict=True) if mine in each)
        if self.front == "wrapper":
            return shard, copy
        return DeviceMesh.from_group([copy, shard], "cpu", torch.tensor(pairs), mesh_dim_names=("replicate", "shard"))

    def wrap(self, model: nn.Module, group: Any) -> Any:
        if self.front == "wrapper":
            return FullyShardedDataParallel(
                model,
                process_group=group,
                sharding_strategy=flatfsdp.ShardingStrategy[self.strategy],
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                **self.options,
            )
        mesh = group
        if not isinstance(group, DeviceMesh):
            mesh = DeviceMesh.from_group(group, "cpu")
        for module in [each for each in model.modules() if isinstance(each, Block)] + [model]:
            flatfsdp.fully_shard(module, mesh=mesh, **self.options)
        return model

    def optimize(self, model: nn.Module) -> torch.optim.Optimizer:
        params = [*model.parameters()]
        if self.options.get("use_orig_params", True) is False:
            return torch.optim.AdamW(params, lr=0.01)
        return torch.optim.AdamW([{"params": params[:3], "lr": 0.02}, {"params": params[3:]}], lr=0.01)


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, steps: int = 2) -> None:
    for step in range(first, first + steps):
        data = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def whole(model: Any, optimizer: torch.optim.Optimizer, setting: Setting) -> dict[str, Any]:
    """All values by name. Collective over the ranks of the model."""
    if setting.front == "wrapper":
        with FullyShardedDataParallel.state_dict_type(model, "FULL"):
            values = {f"model.{name}": each.clone() for name, each in model.state_dict().items()}
    else:
        values = {
            f"model.{name}": each.full_tensor() if hasattr(each, "full_tensor") else each.clone()
            for name, each in model.state_dict().items()
        }
    found = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    for name, state in found["state"].items():
        values |= {f"{name}.{key}": each for key, each in state.items()}
    values |= {f"group {number}": each for number, each in enumerate(found["param_groups"])}
    return values


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def own(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What this rank has of all values: the same names and shards under the same setting on the same ranks."""
    values: dict[str, Any] = {
        f"group {number}": {key: value for key, value in each.items() if key != "params"}
        for number, each in enumerate(optimizer.param_groups)
    }
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        values |= {name: each} | {f"{name}.{key}": value for key, value in optimizer.state.get(each, {}).items()}
    return {name: each.to_local() if hasattr(each, "to_local") else each for name, each in values.items()}


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Counter[tuple[str, str, int]]:
    """The bytes that this rank has, by the tensor and the number of the element."""
    entries = Holding.of(model, optimizer).facts.entries
    return Counter(
        {(each.name, each.state, at): each.dtype.itemsize for each in entries for at in range(each.start, each.stop)}
    )


def moves(rank: int, world: int, path: str, setting: Setting, worlds: Sequence[Sequence[int]]) -> None:
    """Trains on all ranks of the first of `worlds`, then on the next ..., beside a model that a checkpoint moves."""
    saving = [dist.new_group(sorted(ranks)) for ranks in worlds]
    group = setting.group(worlds[0])
    model = setting.wrap(seeded(Net), group)
    optimizer = setting.optimize(model)
    holders = [*model.parameters()]
    in_old, step = True, 0
    train(model, optimizer, 0)
    for number, ranks in enumerate(worlds[1:]):
        if in_old:
            checkpoint.save(f"{path}/{number}", model=model, optimizer=optimizer, process_group=saving[number])
        dist.barrier()
        group = setting.group(ranks)
        before = held(model, optimizer) if in_old else Counter[Any]()
        moved = regroup(model, optimizer, group=group, holdings=None if in_old else ())
        after = held(model, optimizer) if rank in ranks else Counter[Any]()
        assert moved.received == (after - before).total() and moved.kept == (after & before).total()
        sent: list[Any] = [None] * world
        dist.all_gather_object(sent, (moved.sent, moved.received))
        assert sum(each for each, _ in sent) == sum(each for _, each in sent)
        in_old = rank in ranks
        step += 2
        if not in_old:
            assert not optimizer.state
            continue
        assert [*map(id, model.parameters())] == [*map(id, holders)]
        twin = setting.wrap(seeded(Net), group)
        others = setting.optimize(twin)
        checkpoint.load(f"{path}/{number}", model=twin, optimizer=others, process_group=saving[number + 1])
        if number == 0:  # by name, as both are saved
            same(whole(model, optimizer, setting), whole(twin, others, setting))
        same(own(model, optimizer), own(twin, others))
        train(model, optimizer, step, 1)
        train(twin, others, step, 1)
        same(own(model, optimizer), own(twin, others))


SHRINKS_AND_GROWS = ((0, 1, 2, 3), (0, 1, 2), (1, 2), (0, 1, 2), (0, 1, 2, 3))
AT_ONCE = ((0, 1, 2, 3), (1, 2), (0, 1, 2, 3))


def steps_of(setting: Setting) -> Sequence[Sequence[int]]:
    """Each front goes through all numbers of ranks, and its other settings through the farthest ones."""
    return SHRINKS_AND_GROWS if [*setting.options] in ([], ["use_orig_params"]) else AT_ONCE


@pytest.mark.parametrize(
    "setting",
    [
        Setting(use_orig_params=True),
        Setting(use_orig_params=False),
        Setting("fully_shard"),
        Setting(strategy="SHARD_GRAD_OP", mixed_precision=MixedPrecision(torch.bfloat16), use_orig_params=True),
        Setting(strategy="NO_SHARD", use_orig_params=True),
        Setting(strategy="NO_SHARD", use_orig_params=False),
        Setting(use_orig_params=True, cpu_offload=CPUOffload(offload_params=True)),
        Setting(use_orig_params=True, layout="rows"),
    ],
    ids=str,
)
def test_a_model_moves_as_through_a_checkpoint(tmp_path: Any, setting: Setting) -> None:
    pool.run(4, moves, str(tmp_path), setting, steps_of(setting))


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_hybrids_move_to_other_pairs_and_fewer_replicas(tmp_path: Any, front: str) -> None:
    setting = Setting(front, "HYBRID_SHARD")
    pool.run(4, moves, str(tmp_path), setting, ((0, 1, 2, 3), (0, 2, 1, 3), (1, 3), (0, 1, 2, 3)))


# --- the same bits as an undisturbed run ------------------------------------------------------------------------------


def made(kind: str, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model with deterministic sums, and an optimizer of this kind."""
    torch.manual_seed(0)
    if kind == "states of blocks":
        model = blocks.wrapped("wrapper", "LowBitAdam", Wide(), deterministic_sums=True, **options)
        return model, flatfsdp.block_states(blocks.make("LowBitAdam", model.parameters()))
    if kind == "post-forward shards":  # of two ranks, which three cannot have
        model = sums.sharded(sums.Net(), reshard_after_forward=2)
    else:
        model = (sums.sharded if kind == "fully_shard" else sums.wrapped)(sums.Net(), **options)
    params = [p for p in model.parameters() if p.requires_grad]
    if kind == "Muon":
        matrices = [p for name, p in model.named_parameters() if name.endswith("weight") and p.requires_grad]
        return model, flatfsdp.matrix_steps(partial(torch.optim.Muon, lr=1e-2), matrices).optimizer
    if kind == "whole matrices":
        return model, flatfsdp.matrix_steps(torch.optim.Adafactor(params, lr=1e-2)).optimizer
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    if kind == "fused":
        flatfsdp.fuse_optimizer_steps(optimizer)
    return model, optimizer


class Wide(sums.Net):
    """With parameters that are large enough for quantized states."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(13, 1024)


def one_step(model: Any, optimizer: torch.optim.Optimizer, step: int, number: int, ranks: int) -> None:
    for index, last in sums.rounds(sums.aligned(5, ranks), number):
        with sums.unsynchronized(model, last), flatfsdp.microbatch(index, of=5):
            model(sums.batch(step, index or 0), rarely=index is not None and index % 4 == 1).square().mean().backward()
    optimizer.step()
    model.zero_grad()


def deterministic(rank: int, world: int, kind: str, worlds: Sequence[int]) -> str:
    """The hash of the state after a step on each of `worlds`, the numbers of first ranks that take part."""
    model, optimizer = made(kind)
    taking = world
    for step, ranks in enumerate(worlds):
        if ranks != taking:
            first = dist.new_group([*range(ranks)])
            group = first if rank < ranks else None
            regroup(model, optimizer, group=group, holdings=None if rank < taking else ())
            taking = ranks
        if rank < ranks:
            one_step(model, optimizer, step, rank, ranks)
    return sums.digest(model, optimizer) if rank < taking else ""


@pytest.mark.parametrize(
    "kind", ["wrapper", "fully_shard", "post-forward shards", "fused", "whole matrices", "states of blocks"]
)
def test_the_bits_are_those_of_a_run_that_stays(kind: str) -> None:
    """On one rank, which has the bits of any number, and no post-forward shards."""
    (expected,) = pool.run(1, deterministic, kind.replace("post-forward shards", "fully_shard"), (1, 1, 1, 1, 1))
    assert {*pool.run(4, deterministic, kind, (4, 3, 2, 3, 4))} == {expected}


def in_small_messages(rank: int, world: int) -> tuple[str, list[str]]:
    """The hash of the state after moves by messages of at most 64 bytes, and what this rank said that it waited for."""
    seen: list[str] = []
    expecting, meets = transfer.expecting, api.meet_and_gather

    def expected(ranks: Sequence[int], what: str) -> Any:
        seen.append(what)
        return expecting(ranks, what)

    def met(*given: Any, waiting: str, **named: Any) -> Any:
        seen.append(waiting)
        return meets(*given, waiting=waiting, **named)

    with (
        patch.object(transfer, "LARGEST", 64),
        patch.object(transfer, "expecting", expected),
        patch.object(api, "meet_and_gather", met),
    ):
        return deterministic(rank, world, "wrapper", (3, 2, 3)), seen


def test_a_long_move_is_many_waits_with_the_words_of_its_end() -> None:
    """A rank that has its shards waits for others in the words of their waits: other words, which stay, would be a
    deadlock."""
    (expected,) = pool.run(1, deterministic, "wrapper", (1, 1, 1))
    call = ["compares what ranks have and need in regroup()", "makes room for its new shards in regroup()"]
    for found, seen in pool.run(3, in_small_messages):
        assert found == expected
        assert [words for words, _ in groupby(seen)] == 2 * [*call, "moves a model to other ranks in regroup()"]
        assert len(seen) > 50


def one_replica(rank: int, world: int, kind: str, gone: int) -> str:
    """The hash of the state after two steps on two replicas, and two more, where all but the rank `gone` go on in one
    replica, with what they have themselves. Of four ranks in two replicas, each shard has two."""
    hybrid = {"sharding_strategy": "HYBRID_SHARD"} | ({} if kind == "states of blocks" else {"mesh": (2, 2)})
    model, optimizer = made(kind, **({"mesh": named_mesh(2, 2)} if kind == "fully_shard" else hybrid))
    left = [each for each in range(world) if each != gone]
    for step in range(2):
        one_step(model, optimizer, step, rank, world)
    shard = dist.new_group(left)
    alone = [dist.new_group([each]) for each in range(world)][rank]
    if rank == gone:
        regroup(model, optimizer, group=None, holdings=())
        return ""
    mesh = DeviceMesh.from_group([alone, shard], "cpu", torch.tensor([left]), mesh_dim_names=("replicate", "shard"))
    regroup(model, optimizer, group=mesh)
    for step in range(2, 4):
        one_step(model, optimizer, step, left.index(rank), len(left))
    return sums.digest(model, optimizer)


@pytest.mark.parametrize(
    ("gone", "kind"), spread([0, 3], ["wrapper", "fully_shard", "whole matrices", "Muon", "states of blocks"])
)
def test_what_replicas_hold_alike_one_of_them_has(gone: int, kind: str) -> None:
    (expected,) = pool.run(1, deterministic, kind, (1, 1, 1, 1))
    assert {*pool.run(4, one_replica, kind, gone)} == {"", expected}


# --- ranks that were not there ----------------------------------------------------------------------------------------


def joins(rank: int, world: int, front: str) -> None:
    """Two ranks train; a third builds the model, and gets all from them."""
    setting = Setting(front)
    old, new, alone = (dist.new_group(ranks) for ranks in ([0, 1], [0, 1, 2], [2]))
    if rank < 2:
        model = setting.wrap(seeded(Net), old)
        optimizer = setting.optimize(model)
        train(model, optimizer, 0)
        expected = whole(model, optimizer, setting)
    elif front == "wrapper":
        model = setting.wrap(Net(), new)  # waits for the others, which come with regroup()
        optimizer = setting.optimize(model)
    else:
        with torch.device("meta"):
            net = Net()
        model = setting.wrap(net, alone)
        optimizer = setting.optimize(model)
    holders = [*model.parameters()]
    moved = regroup(model, optimizer, group=new, holdings=None if rank < 2 else ())
    assert rank < 2 or (moved.received > 0 and moved.sent == 0)
    assert [*map(id, holders)] == [*map(id, model.parameters())]
    assert {id(each) for group in optimizer.param_groups for each in group["params"]} == {*map(id, holders)}
    found = whole(model, optimizer, setting)
    if rank < 2:
        same(found, expected)
    train(model, optimizer, 2)
    values: list[Any] = [None] * 3
    dist.all_gather_object(values, whole(model, optimizer, setting))
    same(values[2], values[0])
    assert model.blocks[1].scale.item() == 0.5


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_a_rank_joins_that_has_just_built_the_model(front: str) -> None:
    pool.run(3, joins, front)


def methods(rank: int, world: int) -> None:
    """Registered methods gather, prefetch lists are of the new units, and copies can be made."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Net()
    setting = Setting("fully_shard")
    setting.wrap(model, dist.group.WORLD)
    flatfsdp.register_fsdp_forward_method(model.blocks[0], "extra_repr")
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    optimizer = setting.optimize(model)
    train(model, optimizer, 0)
    before = whole(model, optimizer, setting)
    for _ in range(2):
        regroup(model, optimizer, group=dist.group.WORLD)
    same(whole(model, optimizer, setting), before)
    assert model.blocks[0].extra_repr() == ""
    twin = copy.deepcopy(model)
    train(model, optimizer, 2)
    train(twin, setting.optimize(twin), 2)


def test_what_belongs_to_modules_stays() -> None:
    pool.run(2, methods)


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(rank: int, world: int) -> list[str]:
    """The refusals on each rank; everything goes on afterwards."""
    setting = Setting(use_orig_params=True)
    model = setting.wrap(seeded(Net), dist.group.WORLD)
    optimizer = setting.optimize(model)
    train(model, optimizer, 0)
    words: list[str] = []

    def tried(**arguments: Any) -> None:
        with pytest.raises(FlatFSDPError) as caught:
            regroup(arguments.pop("model", model), arguments.pop("optimizer", optimizer), **arguments)
        words.append(str(caught.value))

    tried(group="all")
    tried(group=(dist.group.WORLD, dist.group.WORLD))
    tried(group=dist.group.WORLD, model=nn.Linear(2, 2))
    tried(group=dist.group.WORLD, model=model.blocks[0])
    tried(group=dist.group.WORLD, holdings=() if rank == 1 else None)  # its elements are nowhere else
    tried(group=dist.group.WORLD, optimizer=None if rank else optimizer)
    data = torch.randn(6, 7)
    loss = model(data).sum()
    tried(group=dist.group.WORLD)
    loss.backward()
    tried(group=dist.group.WORLD)
    optimizer.zero_grad()
    with model.no_sync():
        model(data).sum().backward()
    tried(group=dist.group.WORLD)
    model(data).sum().backward()
    optimizer.zero_grad()
    stepping = flatfsdp.optimizer_in_backward(model, optimizer)
    tried(group=dist.group.WORLD)
    stepping.remove()
    if rank == 1:
        model.one.weight.grad = torch.zeros_like(model.one.weight)
    tried(group=dist.group.WORLD)
    optimizer.zero_grad()
    train(model, optimizer, 2)
    regroup(model, optimizer, group=dist.group.WORLD)
    train(model, optimizer, 4)
    return words


def test_what_cannot_move_is_refused_on_all_ranks() -> None:
    found = pool.run(2, refused)
    for first, other, expected in zip(
        *found,
        [
            r"regroup: group: got .* Accepted: a process group, a pair of them",
            "has the strategy FULL_SHARD; expected one process group",
            "found no sharded module in it",
            "is not the outermost module of one sharded model",
            r"element \d+ of '.*', of shape .*, is on no rank",
            "ranks call it differently: rank 0 with an optimizer; rank 1 without one",
            "still waits for its backward",
            "has gradients, which would be lost",
            "has gradients of microbatches that are not reduced yet, which would be lost",
            r"was passed to optimizer_in_backward\(\): end that first",
            "has gradients, which would be lost",
        ],
        strict=True,
    ):
        assert re.search(expected, first) and re.search(expected, other), (expected, first, other)


def fails(rank: int, world: int) -> str:
    setting = Setting(use_orig_params=True)
    model = setting.wrap(seeded(Net), dist.group.WORLD)
    if rank == 1:
        Regrouping.rebuild = no_memory  # type: ignore[method-assign]
    try:
        with pytest.raises(AgreementError) as caught:
            regroup(model, group=dist.group.WORLD)
    finally:
        Regrouping.rebuild = _REBUILD  # type: ignore[method-assign]
    return str(caught.value)


_REBUILD = Regrouping.rebuild


def no_memory(*args: Any, **kwargs: Any) -> None:
    raise MemoryError("nothing is left")


def test_a_failure_half_way_is_one_on_all_ranks() -> None:
    for words in pool.run(2, fails):
        assert "rank 1: MemoryError: nothing is left. regroup() had begun: the model has no values" in words


def left(rank: int, world: int) -> tuple[str, int]:
    setting = Setting(use_orig_params=True)
    model = setting.wrap(seeded(Net), dist.group.WORLD)
    optimizer = setting.optimize(model)
    train(model, optimizer, 0)
    first = dist.new_group([0])
    regroup(model, optimizer, group=first if rank == 0 else None)
    if rank == 0:
        train(model, optimizer, 2)
        return "", 0
    with pytest.raises(AgreementError) as caught:
        model(torch.randn(6, 7))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}
    return str(caught.value), sum(storages.values())


def test_a_rank_that_leaves_has_nothing_and_says_so() -> None:
    _, (words, nbytes) = pool.run(2, left)
    assert "this rank has left the model in regroup()" in words
    assert nbytes < 200


# --- grains -----------------------------------------------------------------------------------------------------------


def with_padding(name: str, parameter: nn.Parameter) -> Whole:
    return Whole(padding=1.0)


def keeps_grains(rank: int, world: int, kind: str) -> list[int]:
    """Four equal matrices, each whole on one of four ranks, move to three. Returned: of each its elements here."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    before = [each.detach().clone() for each in net.parameters()]
    layout: Any = torch.optim.Muon if kind == "Muon" else with_padding
    model: Any = FullyShardedDataParallel(net, use_orig_params=True, layout=layout)
    assert sorted(each.numel() for each in model.parameters()) == [0, 0, 0, 256]
    few = dist.new_group([0, 1, 2])
    regroup(model, group=few if rank < 3 else None)
    if rank == 3:
        return []
    sizes = [each.numel() for each in model.parameters()]
    with FullyShardedDataParallel.summon_full_params(model):
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    return sizes


@pytest.mark.parametrize("kind", ["Muon", "Whole(padding=1.0)"])
def test_grains_are_those_that_were_chosen(kind: str) -> None:
    sizes = pool.run(4, keeps_grains, kind)[:3]
    assert [sum(each) for each in zip(*sizes, strict=True)] == [256] * 4
    if kind != "Muon":  # which only prefers whole matrices
        assert {size for each in sizes for size in each} == {0, 256}
