"""Replicas that are no replicas, and meshes that shard nothing, do not go unnoticed."""

from __future__ import annotations

import logging
import warnings
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, comm_hooks
from flatfsdp.engine.features import value_checks
from flatfsdp.errors import AgreementError, ConfigTypeError, UsageError
from tests.conftest import Run
from tests.harness.corners import seeded
from tests.harness.meshes import replicas_of_shards
from tests.harness.models import WIDTH, Feedforward

pytestmark = pytest.mark.distributed


def build() -> nn.Module:
    return nn.Sequential(Feedforward(WIDTH, WIDTH), Feedforward(WIDTH, 3))


def wrapped(world: int, kind: str, *, orig: bool = True, **options: Any) -> Any:
    if kind == "HYBRID_SHARD":
        options["device_mesh"] = replicas_of_shards()
    return FullyShardedDataParallel(
        seeded(build), sharding_strategy=kind, auto_wrap_policy={Feedforward}, use_orig_params=orig, **options
    )


def train(model: Any, rank: int) -> list[str]:
    """One step; its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.full((2, WIDTH), 1.0 + rank)).square().mean().backward()
    return [str(each.message) for each in caught]


def write(model: Any, rank: int, by: int) -> None:
    """One rank changes its piece of a parameter."""
    if rank == by:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.numel() and ("1.up.weight" in name or "_flat_param" in name):
                    parameter.view(-1)[0] += 1
                    return


TEXT = (
    "replicas differ in 1 of 12 parameters: 1.up.weight. '1.up.weight' is one on {}, another on {}. Gradients are "
    "averaged over replicas as if they were one model. Load the same checkpoint on all ranks, and write the same "
    "values to parameters on all of them"
)


def on_demand(rank: int, world: int, kind: str, by: int) -> list[str]:
    model = wrapped(world, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    flatfsdp.check_replicas(model)
    for _ in range(2):
        assert not train(model, rank)
        optimizer.step()
        optimizer.zero_grad()
        flatfsdp.check_replicas(model)  # two replicas' optimizers keep them equal
    write(model, rank, by)
    texts = []
    for _ in range(2):
        with pytest.raises(AgreementError) as caught:
            flatfsdp.check_replicas(model)
        texts.append(str(caught.value))
    assert not train(model, rank)  # only the first forward looks, and a late backward
    return texts


@pytest.mark.parametrize(
    ("world", "kind", "by", "ranks"),
    [
        (4, "HYBRID_SHARD", 3, ("rank 1", "rank 3")),
        (3, "NO_SHARD", 1, ("ranks 0, 2", "rank 1")),
    ],
)
def test_replicas_are_compared_on_demand(run: Run, world: int, kind: str, by: int, ranks: tuple[str, str]) -> None:
    assert run(world, on_demand, kind, by) == [[TEXT.format(*ranks)] * 2] * world


def at_first(rank: int, world: int, kind: str, orig: bool, check: str) -> list[str]:
    model = wrapped(world, kind, orig=orig, check_values=check)
    write(model, rank, 2)
    if check == "raise":
        with pytest.raises(AgreementError) as caught:
            train(model, rank)
        return [str(caught.value)]
    return train(model, rank)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("check", ["warn", "raise", "off"])
def test_the_first_training_forward_compares_replicas(pool4: Run, orig: bool, check: str) -> None:
    for rank, texts in enumerate(pool4(at_first, "HYBRID_SHARD", orig, check)):
        if check == "off" or (check == "warn" and rank > 0):  # once per job
            assert texts == []
        else:
            (text,) = texts
            assert (
                text.startswith("replicas differ in 1 of 12 parameters: ") and " on rank 0, another on rank 2" in text
            )


@pytest.mark.parametrize("check", ["warn", "raise"])
def test_the_first_backward_compares_what_is_not_sharded(pool3: Run, check: str) -> None:
    texts = pool3(at_first, "NO_SHARD", True, check)
    text = TEXT.format("ranks 0, 1", "rank 2")
    assert texts == ([[text], [], []] if check == "warn" else [[text]] * 3)


def different_from_the_start(rank: int, world: int) -> list[str]:
    torch.manual_seed(rank)
    model: Any = FullyShardedDataParallel(build(), sharding_strategy="NO_SHARD")
    return train(model, rank)


def test_what_was_reported_of_the_beginning_is_not_reported_twice(pool2: Run) -> None:
    texts, of_rank_1 = pool2(different_from_the_start)
    assert len(texts) == 1 and texts[0].startswith("ranks begin with different values of 8 of 12 parameters")
    assert not of_rank_1


def sharded_only(rank: int, world: int) -> list[str]:
    model = wrapped(world, "FULL_SHARD")
    flatfsdp.check_replicas(model)
    texts = []
    for kind, wrong in ((ConfigTypeError, build()), (UsageError, model.module[0])):
        with pytest.raises(kind) as caught:
            flatfsdp.check_replicas(wrong)
        texts.append(str(caught.value))
    return texts


def test_where_nothing_is_replicated_nothing_is_compared(pool2: Run) -> None:
    no_model, nested = pool2(sharded_only)[0]
    assert no_model.startswith("check_replicas: model: got ")
    assert nested.startswith("check_replicas() was called on a nested unit (Feedforward); call it on the outermost")


# --- the group plan ---------------------------------------------------------------------------------------------------


def plans(rank: int, world: int, shape: tuple[int, int]) -> tuple[list[str], list[str]]:
    """Warnings and log records of a hybrid model that is built, built again, and run for the first time."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("flatfsdp")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model: Any = FullyShardedDataParallel(
                    seeded(build),
                    sharding_strategy="HYBRID_SHARD",
                    auto_wrap_policy={Feedforward},
                    device_mesh=dist.init_device_mesh("cpu", shape),
                )
            model(torch.ones(2, WIDTH)).sum().backward()
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return [str(each.message) for each in caught], records


def test_a_mesh_that_shards_nothing_is_reported_once(pool4: Run) -> None:
    for rank, (texts, logged) in enumerate(pool4(plans, (4, 1))):
        words = (
            "HYBRID_SHARD over 4 replicas on ranks 0-3, each of one rank: nothing is sharded, and every rank holds "
            "all parameters, gradients and optimizer states. A 2-D device_mesh is (replicate, shard): (4, 1) has one "
            "shard, (1, 4) has 4; in a pair of process groups the shard group comes first. Pass "
            'sharding_strategy="NO_SHARD" if this is intentional'
        )
        assert texts == ([words] if rank == 0 else [])  # the others log it
        assert words in logged if rank else words not in logged
        logged = [line for line in logged if line != words]
        assert logged == ["HYBRID_SHARD over 1 x 4: 4 replicas on ranks 0-3"]


def test_the_group_plan_of_a_hybrid_is_logged(pool4: Run) -> None:
    results = pool4(plans, (2, 2))
    assert [texts for texts, _ in results] == [[]] * 4
    shards, replicas = ("ranks 0-1", "ranks 2-3"), ("ranks 0, 2", "ranks 1, 3")
    for rank, (_, logged) in enumerate(results):
        own = f"2 shards on {shards[rank // 2]}, 2 replicas on {replicas[rank % 2]}"
        assert logged == [f"HYBRID_SHARD over 2 x 2: {own}"]


def parting(rank: int, world: int) -> str:
    """Nothing is sharded, and yet both calls talk to the other rank."""
    model = wrapped(world, "NO_SHARD", mixed_precision=torch.bfloat16)
    with pytest.raises(AgreementError) as caught:
        if rank == 0:
            flatfsdp.check_replicas(model)
        with flatfsdp.inference(model):
            pass
    return str(caught.value)


def test_what_only_some_ranks_call_is_reported_to_all_where_nothing_is_sharded(pool2: Run) -> None:
    first, second = pool2(parting)
    assert first == second
    assert "rank 0 called check_replicas(); rank 1 called inference(max_bytes=None), 2 flat parameters" in first


def in_the_course(rank: int, world: int, kind: str, check: str, hook: str) -> list[str]:
    """The report of each step; one rank writes to a parameter between the second step and the third."""
    model = wrapped(world, kind, check_values=check)
    if hook:
        function = comm_hooks.allreduce_hook if hook == "ours" else of_a_user
        model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), function)
    texts = []
    with patch.object(value_checks, "EVERY", 3):
        for step in range(9):
            if step == 2:
                write(model, rank, 1)
            try:
                with model.no_sync() if step == 1 else nullcontext():  # which reduces nothing, and does not count
                    texts.append("; ".join(train(model, rank)))
            except AgreementError as error:
                return [*texts, f"raised {error}"]
    return texts


def of_a_user(state: Any, grad: torch.Tensor) -> None:
    """Leaves each rank its own gradients."""


@pytest.mark.parametrize(
    ("kind", "check", "hook", "finds"),
    [
        ("HYBRID_SHARD", "warn", "", True),
        ("HYBRID_SHARD", "off", "", False),
        ("NO_SHARD", "raise", "", True),
        ("NO_SHARD", "warn", "ours", True),
        ("NO_SHARD", "warn", "a user's", False),
        ("FULL_SHARD", "warn", "", False),
    ],
)
def test_replicas_are_compared_at_a_rhythm(pool4: Run, kind: str, check: str, hook: str, finds: bool) -> None:
    # The third backward that reduces after the first comparison; where nothing is sharded that is in the first one.
    due = 3 if kind == "HYBRID_SHARD" else 4
    for rank, texts in enumerate(pool4(in_the_course, kind, check, hook)):
        if not finds or (check == "warn" and rank > 0):  # once per job
            assert texts == [""] * 9
        elif check == "raise":
            assert len(texts) == due + 1 and texts[due].startswith("raised replicas differ in 1 of 12 parameters: ")
        else:
            assert [index for index, each in enumerate(texts) if each] == [due], texts
            assert "on rank 1" in texts[due] and texts[due].endswith(". They were the same 3 backwards before")
