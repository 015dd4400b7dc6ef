"""The model: a decoder-only transformer over bytes, pre-norm, with rotary positions.

The vector of a position begins as the sum of vectors for its byte and the preceding bytes, individually and together:
two blocks are enough to spell words after a minute.

The trainer wraps each `Block` as one FSDP unit; embedding, last norm and head stay with the root. The output of each
block's layers starts at zero, and so do the logits: the first loss is ln 256.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # every byte is a token
RECENT = 4  # bytes in the first vector of a position: its own and the preceding ones
TOGETHER = 4096  # vectors for the last two bytes together; as many for the last three, and so on


class RecentBytes(nn.Module):
    """Each position as the sum of vectors: for each of the last `RECENT` bytes by its distance, and for the last two,
    three, ... `RECENT` bytes together. Groups of bytes that hash to the same place of the table share a vector.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(RECENT * VOCABULARY + (RECENT - 1) * TOGETHER, width)
        nn.init.normal_(self.table.weight, std=0.05)

    def forward(self, input_ids: Tensor) -> Tensor:
        time = input_ids.shape[1]
        padded = F.pad(input_ids, (RECENT - 1, 0))  # zeros before the text
        rows = []
        together = torch.zeros_like(input_ids)
        for back in range(RECENT):
            byte = padded[:, RECENT - 1 - back :][:, :time]
            rows.append(byte + back * VOCABULARY)
            together = together * VOCABULARY + byte
            if back:
                rows.append(spread(together) + RECENT * VOCABULARY + (back - 1) * TOGETHER)
        return self.table(torch.stack(rows, dim=-1)).sum(dim=-2)


def spread(numbers: Tensor) -> Tensor:
    """Map any numbers to numbers below `TOGETHER`, by a multiplicative hash."""
    return (numbers * 2654435761 & 0xFFFFFFFF) * TOGETHER >> 32


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` is (batch, time, width); `cos` and `sin` are (time, width / heads / 2)."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features of `x` (..., time, features) by the angle of its position; the dtype is kept."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).type_as(x)


class Block(nn.Module):
    """One transformer layer: attention and a squared-ReLU MLP, each added to the stream it reads."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads=heads)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class ByteTransformer(nn.Module):
    """Predicts the next byte at every position.

    Args:
        width: features per position, a multiple of twice `heads`.
        layers: number of blocks.
        heads: attention heads per block.
        context: the longest sequence it accepts, in bytes.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, *, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = RecentBytes(width)
        self.blocks = nn.ModuleList(Block(width, heads=heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.zeros_(self.head.weight)
        pairs = width // heads // 2
        angles = torch.outer(torch.arange(context), 10000.0 ** (-torch.arange(pairs) / pairs))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (batch, time, 256) for the byte after each of `input_ids` (batch, time), int64 in 0..255."""
        time = input_ids.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
