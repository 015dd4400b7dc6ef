"""Random programs with `deterministic_sums=True`, divided over ranks at random, have the parameters and
optimizer states of one rank."""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import flatfsdp
from flatfsdp.engine.cpu.groups import over_gloo
from tests.conftest import Run
from tests.features.test_deterministic_sums import BF16, WRAPS, Net, batch, clip, contents, unsynchronized, wrapped
from tests.harness.thorough import seeds

pytestmark = pytest.mark.distributed

STEPS = 3
Found = list[dict[str, str]]


def play(rank: int, world: int, seed: int) -> Found:
    """Train the program of `seed`, divided over these ranks in a random way."""
    same, here = random.Random(seed), random.Random(f"{seed} on {world} ranks")
    recomputed, bf16, most = same.random() < 0.3, same.random() < 0.3, same.choice([None, 0.3, 3.0])
    make = same.choice([torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
    counts = [same.randint(1, 11) for _ in range(STEPS)]
    rare = same.random()
    inner = [same.randint(1, 70) * same.choice([1, 1, -1]) for _ in range(same.randint(1, 4))]
    torch.manual_seed(seed)
    net = Net(recomputed, width=same.randint(2, 40), inner=inner, out=same.choice([1, 30, 700, 3001]))
    ways = {name: wrap for name, wrap in WRAPS.items() if name not in ("offloaded", *(["fully_shard"] if bf16 else []))}
    if world == 4:
        ways |= {
            name: partial(wrapped, mesh=(2, 2), sharding_strategy=name)
            for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        }
    kind = here.choice([*ways])
    messages = world > 1 and here.random() < 0.3
    with over_gloo() if messages else nullcontext():
        model = ways[kind](net, **({"mixed_precision": BF16} if bf16 else {}))
        optimizer = make((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        found = []
        for step, count in enumerate(counts):
            owners = [here.randrange(world) for _ in range(count)]
            own: list[int | None] = [index for index, owner in enumerate(owners) if owner == rank]
            rounds = max(map(owners.count, owners))
            order = random.Random(f"{seed} {step} {rank}")
            order.shuffle(own)  # any order, and stand-ins anywhere
            for _ in range(rounds - len(own)):
                own.insert(order.randint(0, len(own)), None)
            reduces = [here.random() < 0.4 for _ in range(rounds - 1)] + [True]
            for index, sync in zip(own, reduces, strict=True):
                with unsynchronized(model, sync), flatfsdp.microbatch(index, of=count):
                    # One that no microbatch uses has no gradient, but zeros in a flat parameter.
                    rarely = index is not None and (
                        index == 0 or random.Random(f"{seed} {step} {index}").random() < rare / 2
                    )
                    model(batch(100 * seed + step, index or 0), rarely=rarely).float().square().mean().backward()
            if most is not None:
                clip(model, most)
            optimizer.step()
            optimizer.zero_grad()
            found.append(contents(model, optimizer))
        return found


def difference(found: Found, expected: Found) -> str:
    """The first step and parameter that differ; "" if none does."""
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name in other:
            if one.get(name) != other[name]:
                return f"step {step}: {name}"
    return ""


@pytest.mark.parametrize("seed", seeds(3, 400))
def test_random_programs(run: Run, seed: int) -> None:
    (expected,) = run(1, play, seed)
    worlds = [2, 3, 4] if seed % 2 else [2 + seed // 2 % 3]
    for world in worlds:
        for rank, found in enumerate(run(world, play, seed)):
            where = difference(found, expected)
            assert not where, f"seed {seed} on {world} ranks, rank {rank}: first difference in {where}"


def test_a_difference_is_named() -> None:
    assert difference([{"a": "1"}, {"a": "2"}], [{"a": "1"}, {"a": "3"}]) == "step 1: a"
