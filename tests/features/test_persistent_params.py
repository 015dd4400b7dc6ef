"""Frozen parameters that stay unsharded, and models under `inference()`: the numbers are those of one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, checkpoint, inference, register_fsdp_forward_method, stats
from flatfsdp.errors import AgreementError
from tests.conftest import Run
from tests.flat.test_post_forward_shards import hostile_world
from tests.harness import parity
from tests.harness.corners import Net, Setting, data, differences, joined, loss_of, seeded
from tests.harness.models import Low
from tests.harness.reference import Recipe
from tests.harness.thorough import spread
from tests.runtime.test_schedule_api import call_ours

pytestmark = pytest.mark.distributed

WIDTH = 13


@dataclass(frozen=True)
class Keeping(parity.FSDP):
    """The engine with frozen parameters kept."""

    on: str = "device"

    def wrap(self, model: nn.Module, recipe: Recipe, options: dict[str, Any]) -> nn.Module:
        wrapped: Any = super().wrap(model, recipe, options)
        wrapped.keep_frozen_unsharded(on=self.on)
        return wrapped


@pytest.mark.parametrize(
    ("on", "job"),
    spread(
        ["device", "host"],
        [
            (3, Recipe("frozen", steps=3), {"use_orig_params": True}),
            (2, Recipe("dtypes", steps=2), {"sharding_strategy": "SHARD_GRAD_OP"}),
            (2, Recipe("frozen", steps=2, micro=3, accumulate="no_sync"), {"cpu_offload": True}),
            (4, Recipe("frozen", steps=2, replicas=2), {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}),
            (4, Recipe("frozen", steps=2), {"reshard_after_forward": 2, "use_orig_params": True}),
            (
                2,
                Recipe(
                    "frozen", steps=2, micro=2, accumulate="communicate", compute=torch.bfloat16, reduce=torch.float32
                ),
                {"sharding_strategy": "NO_SHARD"},
            ),
        ],
    ),
)
def test_like_one_process(job: tuple[int, Recipe, dict[str, Any]], on: str) -> None:
    world, recipe, options = job
    parity.check(world, recipe, engine=Keeping(on=on), context=hostile_world, **options)


TRAINED = 15 * 4  # bytes of the trainable layer of the model below, with its padding


def branching(net: Net, x: Tensor, *, turn: bool) -> Tensor:
    """The second block's output counts, or does not: then a backward passes it over."""
    x = net.blocks[0](x)
    y = net.blocks[1](x)
    return net.head(net.blocks[2](x + y if turn else x))


def passing_over(model: Any, rank: int, step: int, *, on: str | None) -> Tensor:
    if on is not None:
        call_ours(model, "keep_frozen_unsharded", on=on)
    for micro in range(2):
        loss = loss_of(model(data(rank, step, micro), turn=(rank + step) % 2 == 0))
        loss.backward()
    call_ours(model, "keep_frozen_unsharded", 0)
    return loss.detach()


def passed_over(rank: int, world: int, on: str | None) -> list[str]:
    build = partial(Net, branching, block=partial(Low, WIDTH))
    under = (Setting(doubled=True), Setting("SHARD_GRAD_OP", orig=False))
    return differences(rank, world, build, partial(passing_over, on=on), units=(Low,), under=under, bound=2e-6)


@pytest.mark.parametrize("on", [None, "device", "host"])
def test_units_that_a_backward_passes_over(on: str | None, pool2: Run) -> None:
    assert not joined(pool2(passed_over, on))


def small() -> nn.Module:
    """Frozen units with fewer elements than ranks, and a trainable layer: on most ranks there is nothing to write."""
    model = nn.Sequential(nn.Linear(WIDTH, 1), nn.LayerNorm(1), nn.Linear(1, 1), nn.Linear(1, 5))
    for layer in model[:3]:
        layer.requires_grad_(False)
    return model


def change(model: Any, how: str, folder: str) -> None:
    """Add 1 to a frozen bias that most ranks own nothing of, in a plain model too."""
    if how == "load_state_dict":
        model.load_state_dict({"2.bias": model.state_dict()["2.bias"] + 1}, strict=False)
    elif how == "checkpoint" and isinstance(model, FullyShardedDataParallel):
        before = model.state_dict()
        model.load_state_dict(before | {"2.bias": before["2.bias"] + 1})
        checkpoint.save(folder, model=model)
        model.load_state_dict(before)
        outputs_of(model)
        checkpoint.load(folder, model=model)
    elif how == "summon" and isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            pass  # ranks search for changes together even if there are none
        outputs_of(model)
        with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model):
            model[2].module.bias.add_(1)
    else:
        with torch.no_grad():
            getattr(model[2], "module", model[2]).bias.add_(1)


def outputs_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH))
    return output


def changing(rank: int, world: int, how: str, on: str, folder: str) -> list[str]:
    plain, model = seeded(small), Setting().wrap(seeded(small), (nn.Linear, nn.LayerNorm))
    model.keep_frozen_unsharded(on=on)
    figures, lines = stats(model), []
    for step in range(3):
        if step:
            for each in (plain, model):
                change(each, how, f"{folder}/{step}")
        for again in (False, True):
            figures.reset()
            if not torch.equal(outputs_of(model), outputs_of(plain)):
                lines.append(f"step {step}, again {again}: another output")
            if again and figures.comm.get("all_gather") != (1, TRAINED):
                lines.append(f"step {step}: {figures.comm}")
    return lines


@pytest.mark.parametrize(
    ("on", "how"), spread(["device", "host"], ["load_state_dict", "checkpoint", "in place", "summon"])
)
def test_new_values_are_seen(how: str, on: str, tmp_path: Path, pool3: Run) -> None:
    assert not joined(pool3(changing, how, on, str(tmp_path)))


def differing(rank: int, world: int, what: str) -> str:
    """Ranks keep different units, or one of them trains the units that the others keep."""
    model = Setting().wrap(seeded(lambda: nn.Sequential(Low(WIDTH), Low(WIDTH))), (Low,))
    if what == "a choice":
        model.keep_frozen_unsharded(0 if rank else None)
    else:
        model.keep_frozen_unsharded()
        model(torch.ones(2, WIDTH)).sum().backward()
        if rank == 1:
            model[1].module.base.requires_grad_(True)
    with pytest.raises(AgreementError) as texts:
        model(torch.ones(2, WIDTH))
    return str(texts.value)


@pytest.mark.parametrize(("what", "words"), [("a choice", "keep_frozen=device"), ("a flip", "no longer frozen: '1'")])
def test_ranks_that_keep_different_units_get_an_error(what: str, words: str, pool2: Run) -> None:
    for line in pool2(differing, what):
        assert "rank 0" in line and "rank 1" in line and words in line


class Head(nn.Module):
    """One causal attention layer that keeps its earlier inputs, `cache`: a list of (keys, values)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if cache:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        cache[:] = [k, v]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Speaker(nn.Module):
    """A language model that generates with a cache."""

    vocabulary = 19

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, WIDTH)
        self.layers = nn.ModuleList(Head(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, self.vocabulary)

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches or [[] for _ in self.layers], strict=True):
            x = layer(x, cache)
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens: Tensor, length: int, *, end: int) -> Tensor:
        """`tokens`, (1, n), and up to `length` more until `end`, which the largest odds choose."""
        caches: list[list[Tensor]] = [[] for _ in self.layers]
        line, new = tokens, tokens
        while line.shape[1] < tokens.shape[1] + length and new[0, -1] != end:
            new = self(new, caches)[:, -1:].argmax(-1)
            line = torch.cat([line, new], 1)
        return line


def prompt(rank: int) -> Tensor:
    return torch.randint(4, Speaker.vocabulary, (1, 3), generator=torch.Generator().manual_seed(rank))


def generating(rank: int, world: int, registered: bool, keep_all: bool) -> list[str]:
    """Ranks generate text of their own, of different lengths where nothing is gathered for them."""
    plain = seeded(Speaker)
    model: Any = Setting(orig=registered).wrap(seeded(Speaker), (Head,))
    figures, lines = stats(model), []
    if registered:
        register_fsdp_forward_method(model, "generate")
    generate = model.generate if registered else type(model.module).generate.__get__(model)
    for turn in range(3):
        wanted = {"length": 5 + 4 * rank + turn, "end": 3} if keep_all else {"length": 5, "end": -1}
        with inference(model, None if keep_all else 4096):
            figures.reset()
            line = generate(prompt(10 * turn + rank), **wanted)
            if keep_all and figures.comm:
                lines.append(f"rank {rank}, turn {turn}: {figures.comm}")
        if not torch.equal(line, plain.generate(prompt(10 * turn + rank), **wanted)):
            lines.append(f"rank {rank}, turn {turn}: other tokens")
    loss, expected = (F.softplus(each(prompt(rank))).mean() for each in (model, plain))
    loss.backward()
    return lines if torch.equal(loss, expected) else [*lines, "trains differently after it"]


@pytest.mark.parametrize("keep_all", [True, False])
@pytest.mark.parametrize("registered", [True, False])
def test_generation_with_a_cache(registered: bool, keep_all: bool, pool2: Run) -> None:
    assert not joined(pool2(generating, registered, keep_all))


def leaving(rank: int, world: int, how: str) -> str:
    """One rank does something else than enter, or leave, the context."""
    model: Any = Setting().wrap(seeded(Speaker), (Head,))
    model(prompt(0)).sum().backward()
    with pytest.raises(AgreementError) as texts:
        if how == "enters" and rank == 1:
            model.state_dict()
        with inference(model):
            if how == "leaves" and rank == 1:
                FullyShardedDataParallel.summon_full_params(model).__enter__()
    return str(texts.value)


@pytest.mark.parametrize(
    ("how", "words"), [("enters", "called inference(max_bytes=None)"), ("leaves", "called the end of inference()")]
)
def test_ranks_that_enter_or_leave_alone_get_an_error(how: str, words: str, pool2: Run) -> None:
    for line in pool2(leaving, how):
        assert "rank 0" in line and "rank 1" in line and words in line


def requested(rank: int, world: int, on: str, wait: bool) -> list[str]:
    """A program requests units that are to be kept from the next forward on, and waits later than that."""
    torch.manual_seed(0)
    net = small()
    model = FullyShardedDataParallel(copy.deepcopy(net), auto_wrap_policy={nn.Linear}, use_orig_params=True)
    model.keep_frozen_unsharded(on=on)
    handles = [unit.unshard(async_op=True) for unit in FullyShardedDataParallel.fsdp_modules(model)]
    if wait:
        for handle in handles:
            handle.wait()
    wrong = [] if torch.allclose(outputs_of(model), outputs_of(net)) else ["first"]
    for handle in handles:
        handle.wait()
    return wrong if torch.allclose(outputs_of(model), outputs_of(net)) else [*wrong, "second"]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("on", ["device", "host"])
def test_units_that_a_user_has_requested(on: str, wait: bool, pool2: Run) -> None:
    assert pool2(requested, on, wait) == [[], []]
