"""Low-rank adapters on frozen bases, also on bases of packed bytes: the results of one process, in the memory of the
adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, MixedPrecision, stats, summary
from flatfsdp.layout import Elements, Grain
from tests.features.test_persistent_params import Keeping
from tests.harness import inspect, parity
from tests.harness.corners import Setting, seeded
from tests.harness.fake import fake_world
from tests.harness.matrix import hostile_world
from tests.harness.models import Case
from tests.harness.reference import Recipe
from tests.harness.thorough import spread

pytestmark = pytest.mark.distributed

WIDTH, HIDDEN, WORDS, LENGTH, GROUP = 24, 36, 17, 5, 12
Base = Callable[[int, int], nn.Module]


class Packed(nn.Module):
    """A frozen linear layer without bias of 4 bits a weight: two in a byte, and a scale for `GROUP` of them.

    Both are parameters of bytes, as quantised layers store them to prevent casts; `bytes_in_all` says in every
    forward that they came as they were.
    """

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        packed = torch.randint(256, (fan_out * fan_in // 2,), dtype=torch.uint8)
        scales = torch.rand(fan_out * fan_in // GROUP).add(0.5).div(8 * fan_in**0.5)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales.view(torch.uint8), requires_grad=False)
        self.fan_in = fan_in
        self.bytes_in_all = self.sums()

    def sums(self) -> list[tuple[int, int]]:
        """The sum of the bytes, and one that their order counts for."""
        wide = [each.detach().long() for each in (self.packed, self.scales)]
        return [(int(each.sum()), int((each * torch.arange(len(each))).sum())) for each in wide]

    def forward(self, x: Tensor) -> Tensor:
        assert self.packed.dtype == self.scales.dtype == torch.uint8 and self.sums() == self.bytes_in_all
        halves = torch.stack([self.packed & 15, self.packed >> 4], 1).view(-1, GROUP)
        weight = (halves.float() - 8) * self.scales.clone().view(torch.float32)[:, None]
        return F.linear(x, weight.view(-1, self.fan_in).to(x.dtype))


class Adapter(nn.Module):
    """A frozen base and a trainable low-rank addition, in one unit with others."""

    rank = 4

    def __init__(self, base: Base, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.base = base(fan_in, fan_out).requires_grad_(False)
        self.down = nn.Linear(fan_in, self.rank, bias=False)
        self.up = nn.Linear(self.rank, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """A block of a LLaMA: rotated attention and a gated feed-forward, each after a root mean square norm."""

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH).requires_grad_(False) for _ in range(2))
        self.qkv, self.out = Adapter(base, WIDTH, 3 * WIDTH), Adapter(base, WIDTH, WIDTH)
        self.gate, self.up = Adapter(base, WIDTH, HIDDEN), Adapter(base, WIDTH, HIDDEN)
        self.down = Adapter(base, HIDDEN, WIDTH)
        angles = torch.arange(LENGTH)[:, None] / 10 ** torch.linspace(0, 2, WIDTH // 2)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]))

    def rotated(self, x: Tensor) -> Tensor:
        cos, sin = self.turns
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Adapted(nn.Module):
    """Two blocks between a frozen embedding and a frozen head."""

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(base) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def dense(fan_in: int, fan_out: int) -> nn.Module:
    return nn.Linear(fan_in, fan_out)


def batch(rank: int, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed((step * 97 + micro) * 1009 + rank)
    text = torch.randint(WORDS, (3, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def loss(model: nn.Module, given: Any) -> Tensor:
    tokens, target = given
    return F.cross_entropy(model(tokens).float().flatten(0, 1), target.flatten())


def case(name: str, base: Base) -> Case:
    return Case(name, lambda: seeded(lambda: Adapted(base)), batch, frozenset({Block}), loss)


MODELS = {"lora": case("lora", dense), "qlora": case("qlora", Packed)}


@dataclass(frozen=True)
class Tuning(Recipe):
    """A recipe for one of the models above."""

    @property
    def model(self) -> Case:
        return MODELS[self.case]


@pytest.mark.parametrize(
    ("world", "name", "on"), [(w, *each) for w, each in spread([2, 3], product(MODELS, [None, "device", "host"]))]
)
def test_steps_under_a_bf16_policy(name: str, on: str | None, world: int) -> None:
    recipe = Tuning(name, steps=4, optimizer="adamw", compute=torch.bfloat16, reduce=torch.float32)
    engine = parity.FSDP() if on is None else Keeping(on=on)
    parity.check(world, recipe, engine=engine, context=hostile_world, use_orig_params=world == 2)


def between_blocks(name: str, parameter: nn.Parameter) -> Grain | None:
    """Each rank has whole blocks of packed weights, and of their scales."""
    return Elements({"packed": GROUP // 2, "scales": 4}.get(name.rpartition(".")[2], 1))


@pytest.mark.parametrize("accumulate", ["no_sync", "communicate"])
@pytest.mark.parametrize(
    "options", [{"sharding_strategy": "SHARD_GRAD_OP"}, {"cpu_offload": True}, {"layout": between_blocks}]
)
def test_packed_bytes_under_other_settings(options: dict[str, Any], accumulate: str) -> None:
    recipe = Tuning("qlora", steps=2, micro=2, accumulate=accumulate, compute=torch.bfloat16, reduce=torch.float32)
    parity.check(2, recipe, context=hostile_world, use_orig_params=True, **options)


def test_blocks_of_quantized_weights_stay_whole() -> None:
    held: dict[str, list[int]] = {}
    for rank in range(WORLD):
        with fake_world(WORLD, rank):
            model = FullyShardedDataParallel(
                seeded(lambda: Adapted(Packed)),
                auto_wrap_policy={Block},
                layout=between_blocks,
                use_orig_params=True,
            )
            for name, parameter in model.named_parameters():
                if name.endswith(("packed", "scales")):
                    held.setdefault(name, []).append(parameter.numel())
    for name, sizes in held.items():
        assert not any(size % (GROUP // 2 if name.endswith("packed") else 4) for size in sizes), (name, sizes)
    assert any(sum(map(bool, sizes)) > 1 for sizes in held.values())


WORLD = 4


def padded(model: nn.Module, trained: bool) -> Iterator[int]:
    """Elements of the flat parameters of each block, of those parameters only."""
    for block in model.blocks:
        numels = [p.numel() for p in block.parameters() if p.requires_grad == trained]
        yield sum(numels) + -sum(numels) % WORLD
        assert not any(numel % 8 for numel in numels)  # hence nothing is padded in between


def test_gradients_and_optimizer_state_take_the_memory_of_the_adapters() -> None:
    plain = seeded(lambda: Adapted(Packed))
    adapters = list(padded(plain, trained=True))
    with fake_world(WORLD):
        mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = Setting().wrap(seeded(lambda: Adapted(Packed)), (Block,), mixed_precision=mixed)
        for wrapper in model.blocks:
            for layer in (wrapper.module.qkv, wrapper.module.out, wrapper.module.gate, wrapper.module.up):
                layer.base.sums = lambda base=layer.base: base.bytes_in_all  # nothing is sent in this world
            wrapper.module.down.base.sums = lambda base=wrapper.module.down.base: base.bytes_in_all
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        ledger = inspect.memory(model)
        for _ in range(2):
            optimizer.zero_grad()
            ledger.reset_peaks()
            loss(model, batch(0, 0)).backward()
            assert stats(model).bytes_grads == sum(adapters) // WORLD * 4
            # of unsharded gradients, the block's that computes and the one's whose gradients are on their way
            assert ledger.peak("slots") <= sum(adapters) * 4
            optimizer.step()
        moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        assert sum(value.numel() * value.element_size() for value in moments) == 2 * sum(adapters) // WORLD * 4
        assert "uint8 frozen" in summary(model) and "uint8 frozen as" not in summary(model)
