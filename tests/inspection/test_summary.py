"""`summary`, `stats` and `repr` of a model report the tensors that the engine holds and sends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision, stats, summary
from flatfsdp.engine.cpu.groups import over_gloo
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.fake import fake_world

pytestmark = pytest.mark.distributed

F32 = 4  # bytes


class Tower(nn.Module):
    """Two blocks of 20 and 24 elements, and 5 of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4).double()
        self.second.extra = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x * self.scale[:4]).double()).sum()


def wrapped(**options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(Tower(), auto_wrap_policy={nn.Linear}, join_units_below=0, **options)


# --- summary and repr -------------------------------------------------------------------------------------------------


def summarize(rank: int, world: int) -> str:
    return summary(wrapped())


def test_a_table_of_the_units_equal_on_every_rank(pool2: Run) -> None:
    first, second = pool2(summarize)
    assert first == second
    assert_expected_inline(
        first,
        """\
unit     module  parameters  bytes/rank  padding  strategy    ranks  kinds
<root>   Tower            5          12        1  FULL_SHARD  2 x 1  float32
first    Linear          20          40        0  FULL_SHARD  2 x 1  float32
second   Linear          24          88        0  FULL_SHARD  2 x 1  float64, float32
3 units                  49         140        1
ranks 2 x 1: 2 shards on ranks 0-1""",
    )


def summarize_alike(rank: int, world: int) -> str:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)), nn.Linear(4, 1))
    model = nn.ModuleDict({"layers": layers})
    return summary(FullyShardedDataParallel(model, auto_wrap_policy={nn.Linear}), compact=True)


def test_what_is_alike_is_there_once(pool2: Run) -> None:
    assert_expected_inline(
        pool2(summarize_alike)[0],
        """\
unit                 module      parameters  bytes/rank  padding  kinds
<root>               ModuleDict           0           0        0  none of its own
layers.0 .. 11 (12)  Linear             240         480        0  float32
layers.12            Linear               5          12        1  float32
14 units                                245         492        1
each unit: FULL_SHARD, 2 x 1
ranks 2 x 1: 2 shards on ranks 0-1""",
    )


def summarize_hybrid(rank: int, world: int) -> tuple[str, str]:
    tower = Tower()
    tower.first.requires_grad_(False)
    head = nn.Linear(1, 7)
    model = FullyShardedDataParallel(
        nn.Sequential(tower, head),
        auto_wrap_policy={nn.Linear},
        device_mesh=init_device_mesh("cpu", (world // 2, 2)),
        sharding_strategy="HYBRID_SHARD",
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        ignored_modules=[head],
        use_orig_params=True,
    )
    return summary(model), repr(model)


def test_the_table_shows_groups_frozen_kinds_casts_and_what_is_left_out(pool4: Run) -> None:
    tables, texts = zip(*pool4(summarize_hybrid), strict=True)
    assert_expected_inline(
        tables[3],
        """\
unit      module      parameters  bytes/rank  padding  strategy      ranks  kinds
<root>    Sequential           5          12        1  HYBRID_SHARD  2 x 2  float32 as bfloat16
0.first   Linear              20          40        0  HYBRID_SHARD  2 x 2  float32 frozen as bfloat16
0.second  Linear              24          88        0  HYBRID_SHARD  2 x 2  float64 as bfloat16, float32 as bfloat16
3 units                       49         140        1
ranks 2 x 2: 2 shards on ranks 2-3, 2 replicas on ranks 1, 3
not sharded: 14 parameters that no unit owns (ignored, or outside of every wrapper)""",
    )
    # Ranks differ in nothing but the groups that they are in.
    assert [table.splitlines()[:5] for table in tables] == [tables[0].splitlines()[:5]] * 4
    assert_expected_inline(
        texts[0],
        """\
FullyShardedDataParallel(
  HYBRID_SHARD: 2 shards on ranks 0-1, 2 replicas on ranks 0, 2
  (_fsdp_wrapped_module): Sequential(
    (0): Tower(
      (first): FullyShardedDataParallel(
        HYBRID_SHARD: 2 shards on ranks 0-1, 2 replicas on ranks 0, 2
        (_fsdp_wrapped_module): Linear(in_features=4, out_features=4, bias=True)
      )
      (second): FullyShardedDataParallel(
        HYBRID_SHARD: 2 shards on ranks 0-1, 2 replicas on ranks 0, 2
        (_fsdp_wrapped_module): Linear(in_features=4, out_features=4, bias=True)
      )
    )
    (1): Linear(in_features=1, out_features=7, bias=True)
  )
)""",
    )


def summarize_replicas(rank: int, world: int) -> tuple[str, str]:
    text = repr(FullyShardedDataParallel(nn.Linear(1, 1), sharding_strategy="NO_SHARD"))
    group = dist.new_group([0, 2]) if world == 3 else None
    other = FullyShardedDataParallel(nn.Linear(1, 1), process_group=group) if rank != 1 else None
    return text.splitlines()[1].strip(), repr(other).splitlines()[1].strip() if other is not None else ""


def test_repr_names_the_ranks_in_one_line(pool3: Run) -> None:
    texts = pool3(summarize_replicas)
    assert texts[0] == ("NO_SHARD: 3 replicas on ranks 0-2", "FULL_SHARD: 2 shards on ranks 0, 2")
    assert texts[2] == texts[0]


def test_many_ranks_stay_one_line_also_when_their_groups_are_gone() -> None:
    with fake_world(64, rank=9):
        mesh = init_device_mesh("cpu", (8, 8))
        model = FullyShardedDataParallel(nn.Linear(1, 1), device_mesh=mesh, sharding_strategy="HYBRID_SHARD")
    line = repr(model).splitlines()[1].strip()
    assert line == "HYBRID_SHARD: 8 shards on ranks 8-15, 8 replicas on ranks 1, 9, .. 57"


def test_a_model_that_is_not_wrapped_is_refused() -> None:
    message = (
        "no module in Linear is wrapped by FullyShardedDataParallel or was given to fully_shard(). Shard the model "
        "first, and pass the wrapper, or the model"
    )
    for look in (summary, stats):
        with pytest.raises(UsageError) as refusal:
            look(nn.Linear(1, 1))
        assert str(refusal.value) == message


# --- stats ------------------------------------------------------------------------------------------------------------


def step_by_step(rank: int, world: int, use_orig_params: bool) -> dict[str, Any]:
    model = wrapped(use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    figures = stats(model)
    seen: dict[str, Any] = {"units": figures.units, "wrapped": (figures.bytes_params, figures.bytes_grads)}
    model(torch.ones(2, 4)).backward()
    optimizer.zero_grad()
    figures.reset()
    seen["reset"] = (figures.comm, figures.bytes_unsharded, figures.bytes_unsharded_peak)
    inside: list[int] = []
    model.second.module.register_forward_hook(lambda *_: inside.append(figures.bytes_unsharded))
    loss = model(torch.ones(2, 4))
    seen["forward"] = (inside, figures.bytes_unsharded)
    loss.backward()
    seen["backward"] = (figures.bytes_unsharded, figures.bytes_unsharded_peak, figures.bytes_grads)
    seen["grads"] = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    seen["comm"] = figures.comm
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seen["zeroed"] = figures.bytes_grads
    return seen


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_figures_of_a_step(pool2: Run, use_orig_params: bool) -> None:
    seen = pool2(step_by_step, use_orig_params)[0]
    # Per unit and kind: root scale, first, second's doubles, second's float. With original parameters each starts on
    # 16 bytes, and all sizes are even.
    root, first, doubles, floats = (6 * 4, 20 * 4, 20 * 8, 4 * 4)
    second = doubles + floats
    everything = root + first + second
    assert seen["units"] == 3
    assert seen["wrapped"] == (everything // 2, 0)
    assert seen["reset"] == ({}, 0, 0)
    # The root stays unsharded from its forward on; `first` was freed before `second` was gathered.
    assert seen["forward"] == ([root + second], root)
    # Gathered ahead, both blocks are there at once; so is the root, whose gradient comes last.
    assert seen["backward"][:2] == (0, root + first + second)
    assert seen["backward"][2] == seen["grads"] > 0
    # Root, first and the two kinds of second; again for backward all but the root. A byte for each parameter
    # says which had a gradient on any rank.
    assert seen["comm"] == {
        "all_gather": (4 + 3, everything + first + second),
        "reduce_scatter": (4, everything),
        "scalar": (1, 6),
    }
    assert seen["zeroed"] == 0


def look_after_deletion(rank: int, world: int) -> str:
    gc.disable()
    try:
        model = wrapped()
        figures = stats(model)
        del model
        return refusal_of(lambda: figures.units)
    finally:
        gc.enable()


def look_at_a_part(rank: int, world: int) -> str:
    model = wrapped()
    return refusal_of(lambda: stats(model.first))


def refusal_of(look: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as refusal:
        look()
    return str(refusal.value)


def test_stats_keep_no_model_alive_and_want_a_whole_one(pool2: Run) -> None:
    assert pool2(look_after_deletion)[0] == (
        "these stats belong to a model that was deleted; call flatfsdp.stats() on another"
    )
    assert pool2(look_at_a_part)[0] == (
        "stats() of Linear, which is a part of the wrapped Tower: bytes and collectives are counted for whole models. "
        "Pass the outermost module"
    )


def show_stats(rank: int, world: int) -> str:
    halves = nn.ModuleList(FullyShardedDataParallel(nn.Linear(3, 5)) for _ in range(2))
    return repr(flatfsdp.stats(halves))


def test_several_models_in_one_container_are_added_up(pool2: Run) -> None:
    assert pool2(show_stats)[0] == (
        "Stats(units=2, bytes_params=80, bytes_grads=0, bytes_unsharded=0, bytes_unsharded_peak=0, comm={})"
    )


# --- reductions that are waited for early -----------------------------------------------------------------------------


def large_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 800), *(nn.Linear(800, 800) for _ in range(4)), nn.Linear(800, 8))


def early_waits(rank: int, world: int, way: str) -> tuple[str, str, int]:
    """The table's line on early waits, before and after some steps, and the peak of the last step."""
    group = dist.new_group()  # which has exchanged nothing
    model = FullyShardedDataParallel(
        large_layers(),
        process_group=group,
        auto_wrap_policy={nn.Linear},
        mixed_precision=MixedPrecision(reduce_bits=8) if way == "few bits" else None,
        sharding_strategy="NO_SHARD" if way == "NO_SHARD" else "FULL_SHARD",
        **({"backward_prefetch": "BACKWARD_PRE"} if way == "named" else {}),
    )

    def line(model: Any = model) -> str:
        return "".join(text for text in summary(model).splitlines() if "early waits" in text)

    with over_gloo() if way == "gloo" else nullcontext():
        flatfsdp.share_host_memory(None, early_waits=way != "late")
        try:
            before = line()
            for _ in range(3):
                stats(model).reset()
                model(torch.ones(1, 8)).sum().backward()
                model.zero_grad()
            after = line()
        finally:
            flatfsdp.share_host_memory(None, early_waits=True)
    peak = stats(model).bytes_peak
    del model, line
    dist.destroy_process_group(group)
    return before, after, peak


def test_early_waits_are_shown_and_can_be_turned_off(pool2: Run) -> None:
    found = {way: pool2(early_waits, way)[0] for way in ("early", "late", "gloo", "few bits", "NO_SHARD", "named")}
    counted = "the reductions of 4 of 6 units"
    assert found.pop("early")[:2] == (f"early waits if ranks share memory: {counted}", f"early waits: {counted}")
    assert [texts for *texts, _ in found.values()] == [["", ""]] * len(found)


def test_early_waits_hold_less_at_the_peak_and_in_a_plan(pool2: Run) -> None:
    early, late = (pool2(early_waits, way)[0][2] for way in ("early", "late"))
    assert late > early
    assert pool2(early_waits, "named")[0][2] == late
    planned = []
    with flatfsdp.dry_run(2):
        model = FullyShardedDataParallel(large_layers(), auto_wrap_policy={nn.Linear})
        for wanted in (False, True):
            flatfsdp.share_host_memory(None, early_waits=wanted)
            planned.append(sum(flatfsdp.memory_plan(model).at_peak.values()))
    assert planned == [late, early]


def test_a_dry_run_knows_of_early_waits() -> None:
    with flatfsdp.dry_run(8):
        model = FullyShardedDataParallel(nn.Linear(800, 800))
        assert summary(model).endswith("early waits: the reductions of 1 of 1 units")
    with flatfsdp.dry_run(9):
        model = FullyShardedDataParallel(nn.Linear(800, 800))
        assert "early waits" not in summary(model)
