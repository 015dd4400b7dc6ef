"""Small deterministic models, each with a property that engines get wrong, and batches that differ on every rank.

Sizes are odd on purpose: shards are uneven on two, three and four ranks, and parameters cross their borders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]  # the model's inputs, then the target


@dataclass(frozen=True)
class Case:
    """A model and its batches.

    Attributes:
        build: makes a new model, the same at every call and on every rank, in training mode.
        batch: ``batch(rank, step, micro)``, of equal size everywhere.
        units: the module classes to wrap, in addition to the root.
        loss: computes the loss of a model and a batch, a mean over the batch in fp32 or wider.
        concatenable: whether the mean of the ranks' losses is the loss of their batches put together (not under batch
            norm, whose statistics are those of one rank).
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    units: frozenset[type[nn.Module]]
    loss: Callable[[nn.Module, Batch], Tensor]
    concatenable: bool = True


# --- pieces -----------------------------------------------------------------------------------------------------------


class Feedforward(nn.Module):
    """A residual block of two linear layers, ``width`` to ``width``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Causal self-attention of two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.feedforward = Feedforward(width, 2 * width + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.feedforward(self.attention(x))


class Transformer(nn.Module):
    """Tokens in, logits out; ``tied`` shares the embedding with the head."""

    vocabulary, width, length = 19, 14, 6

    def __init__(self, *, tied: bool, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, self.width)
        self.position = nn.Parameter(torch.randn(self.length, self.width) * 0.1)
        self.blocks = nn.ModuleList(Block(self.width) for _ in range(depth))
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, self.vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Low(nn.Module):
    """A frozen linear layer with a trainable low-rank addition."""

    def __init__(self, width: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Motley(nn.Module):
    """Parameters of four dtypes: fp32 and fp64 trainable, bf16 trainable, int8 frozen (a quantized weight)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.wide = nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.scale = nn.Parameter(torch.randn(width).bfloat16())
        self.packed = nn.Parameter(torch.randint(-8, 8, (width, width), dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.packed.to(self.weight.dtype) / 64
        x = x + F.linear(x, weight) * self.scale.to(x.dtype)
        return x + torch.sin(self.wide).to(x.dtype)


class Convolution(nn.Module):
    """A 3x3 and a 1x1 convolution in channels_last, with a batch norm between them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(channels, channels + 2, 3, padding=1, bias=False)  # a norm cancels a bias
        self.norm = nn.BatchNorm2d(channels + 2)
        self.narrow = nn.Conv2d(channels + 2, channels, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.relu(self.norm(self.wide(x))))


class Pooled(nn.Module):
    """Mean over the pixels, then a linear layer."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(dim=(2, 3)))


class Spare(nn.Module):
    """A feed-forward block with parameters that its forward never uses, first and last of the unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(width, 2))
        self.inner = Feedforward(width, width + 4)
        self.last = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Nest(nn.Module):
    """Two blocks and its own parameters: a scalar (which FSDP1 refuses), an empty one and a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.first = Feedforward(width, width + 2)
        self.nothing = nn.Parameter(torch.empty(0, width))
        self.second = Feedforward(width, width + 3)
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.gain + self.nothing.sum()
        return self.second(x + self.shift)


class Rows(Nest):
    """The same without a scalar, which `fully_shard` refuses."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gain = nn.Parameter(torch.tensor([0.5]))


class Encoding(nn.Module):
    """A model with an encoder, which is also called directly, before and after the model."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Feedforward(width, width + 2), Feedforward(width, width + 5))
        self.shift = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x + self.shift))


class Chosen(nn.Module):
    """Uses the weights whose bits, from `first` on, are set in `bits`; without any, returns its input."""

    def __init__(self, width: int, bits: list[int], first: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(width, width) / width) for _ in range(3))
        self.bits, self.first = bits, first

    def forward(self, x: Tensor) -> Tensor:
        for place, weight in enumerate((self.a, self.b, self.c)):
            if self.bits[0] >> (self.first + place) & 1:
                x = x + torch.tanh(x @ weight)
        return x


class Reached(nn.Module):
    """Units of which a batch uses some parameters and outputs: a weight, or a unit, sometimes has no gradient.

    The bits of the second input choose. `spare` is never used; `aside` always runs, but is rarely part of the loss.
    """

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.bits = [0]  # shared with the units: attributes set on a wrapper do not reach its module
        self.first, self.second = Chosen(width, self.bits, 0), Chosen(width, self.bits, 3)
        self.aside = Feedforward(width, width + 2)
        self.spare = nn.Parameter(torch.randn(3, width))
        self.shift = nn.Parameter(torch.zeros(width))  # otherwise the first unit would have no graph on some ranks
        self.head = nn.Linear(width, out)

    def forward(self, x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        self.bits[0] = int(bits)
        x = self.first(x + self.shift)
        return self.head(self.second(x)), self.aside(x)


# --- cases ------------------------------------------------------------------------------------------------------------

WIDTH, OUT, ROWS = 13, 3, 4  # features, outputs, rows of a batch


def _vectors(rank: int, step: int, micro: int = 0) -> Batch:
    generator = _generator(rank, step, micro)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, OUT, generator=generator)


def _tokens(rank: int, step: int, micro: int = 0) -> Batch:
    shape = (ROWS, Transformer.length + 1)
    text = torch.randint(Transformer.vocabulary, shape, generator=_generator(rank, step, micro))
    return text[:, :-1], text[:, 1:]


def _images(rank: int, step: int, micro: int = 0) -> Batch:
    generator = _generator(rank, step, micro)
    image = torch.randn(ROWS, 3, 5, 6, generator=generator).contiguous(memory_format=torch.channels_last)
    return image, torch.randn(ROWS, OUT, generator=generator)


def _chosen(rank: int, step: int, micro: int = 0) -> Batch:
    x, target = _vectors(rank, step, micro)
    drawn = torch.rand(7, generator=_generator(rank, step, micro + 50)) < (0.08 if micro else 0.35)
    return x, (drawn * 2 ** torch.arange(7)).sum(0, keepdim=True), target


def _generator(rank: int, step: int, micro: int) -> torch.Generator:
    return torch.Generator().manual_seed((step * 97 + micro) * 1009 + rank)


def _squared_error(model: nn.Module, batch: Batch) -> Tensor:
    *inputs, target = batch
    return F.mse_loss(model(*inputs).float(), target)


def _some_outputs(model: nn.Module, batch: Batch) -> Tensor:
    x, bits, target = batch
    output, aside = model(x, bits)
    loss = F.mse_loss(output.float(), target)
    return loss + aside.float().square().mean() if int(bits) >> 6 else loss


def _encoded_apart(model: Any, batch: Batch) -> Tensor:
    x, target = batch
    before = model.encoder[0](x).float().square().mean()
    output = model(x)
    return F.mse_loss(output.float(), target) + before + model.encoder[1](x).float().square().mean()


def unit_first(case: Case) -> Case:
    """The case with a loss that includes the output of the first unit, which runs before the model does. The model must
    have units."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        unit = next(module for module in model.modules() if isinstance(module, tuple(case.units)))
        x = batch[0] if batch[0].is_floating_point() else F.one_hot(batch[0] % Transformer.width, Transformer.width)
        before = unit(x.to(next(unit.parameters()).dtype)).float().square().mean()
        return case.loss(model, batch) + before

    return replace(case, loss=loss, concatenable=False)


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    tokens, target = batch
    return F.cross_entropy(model(tokens).float().flatten(0, 1), target.flatten())


def _built(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            return make()

    return build


def _stack(make: Callable[[], nn.Module], depth: int) -> nn.Module:
    return nn.Sequential(*(make() for _ in range(depth)), nn.Linear(WIDTH, OUT))


def _vector_case(name: str, make: Callable[[], nn.Module], depth: int, *units: type[nn.Module]) -> Case:
    return Case(name, _built(lambda: _stack(make, depth)), _vectors, frozenset(units), _squared_error)


def _token_case(name: str, make: Callable[..., nn.Module] = Transformer, **options: Any) -> Case:
    return Case(name, _built(lambda: make(**options)), _tokens, frozenset({Block}), _cross_entropy)


def _partly_frozen(**options: Any) -> nn.Module:
    """A transformer with frozen attentions and positions."""
    model = Transformer(**options)
    model.position.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.requires_grad_(False)
    return model


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _vector_case("mlp", lambda: Feedforward(WIDTH, 22), 3, Feedforward),
        _token_case("transformer", tied=False),
        _token_case("tied", tied=True),
        _token_case("tied and frozen", _partly_frozen, tied=True),
        _vector_case("frozen", lambda: Low(WIDTH), 3, Low),
        _vector_case("dtypes", lambda: Motley(WIDTH), 2, Motley),
        Case(
            "conv",
            _built(lambda: nn.Sequential(Convolution(3), Convolution(3), Pooled(3, OUT))),
            _images,
            frozenset({Convolution}),
            _squared_error,
            concatenable=False,
        ),
        _vector_case("unused", lambda: Spare(WIDTH), 2, Spare),
        _vector_case("nested", lambda: Nest(WIDTH), 2, Nest, Feedforward),
        Case(
            "reached",
            _built(lambda: Reached(WIDTH, OUT)),
            _chosen,
            frozenset({Chosen, Feedforward}),
            _some_outputs,
            concatenable=False,
        ),
    )
}

# Only under `fully_shard`: the wrapper accepts no forward of an inner module before its root's.
OF_FULLY_SHARD: dict[str, Case] = {
    case.name: case
    for case in (
        _vector_case("rows", lambda: Rows(WIDTH), 2, Rows, Feedforward),
        Case(
            "encoder",
            _built(lambda: Encoding(WIDTH, OUT)),
            _vectors,
            frozenset({Feedforward}),
            _encoded_apart,
            concatenable=False,
        ),
    )
}
