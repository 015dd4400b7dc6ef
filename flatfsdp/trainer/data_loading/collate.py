"""Collate samples of different lengths into one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from flatfsdp.errors import ConfigTypeError, ConfigValueError, shown


@dataclass(frozen=True)
class PadCollate:
    """Pads token ids, and what comes with them, on the right, to the longest sample of the microbatch.

    A sample is a mapping. Its "input_ids", "labels", "attention_mask" and "token_type_ids", as far as it has them, are
    sequences of numbers or 1-D tensors; the batch holds them as int64 of shape (samples, longest). "attention_mask" is
    there always, 1 where a sample has a token. What else a sample has is left to torch's `default_collate`.

    Attributes:
        pad: what to fill "input_ids" up with.
        label_pad: the same for "labels": what the loss passes over.
        multiple_of: the padded length is a multiple of this: fewer shapes for what is compiled.
    """

    pad: int = 0
    label_pad: int = -100
    multiple_of: int = 1

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch.

        Raises:
            ConfigTypeError, ConfigValueError: samples are no mappings, or have other names than the first one, or a
                sample's sequences have different lengths.
        """
        first = samples[0]
        if not isinstance(first, Mapping):
            raise ConfigTypeError(f"PadCollate: got {shown(first)} as a sample. Accepted: a mapping with 'input_ids'.")
        for sample in samples:
            if sample.keys() != first.keys():
                raise ConfigValueError(
                    f"PadCollate: a sample has {', '.join(map(str, sample))}, the first one "
                    f"{', '.join(map(str, first))}; all need the same"
                )
        fills = {"input_ids": self.pad, "labels": self.label_pad, "attention_mask": 0, "token_type_ids": 0}
        padded = {name: [_row(name, sample[name]) for sample in samples] for name in first if name in fills}
        if not padded:
            raise ConfigValueError(f"PadCollate: a sample has {', '.join(map(str, first))}, and no 'input_ids' to pad")
        lengths = [row.numel() for row in next(iter(padded.values()))]
        for name, rows in padded.items():
            if [row.numel() for row in rows] != lengths:
                raise ConfigValueError(f"PadCollate: {name!r} of a sample is not as long as its {next(iter(padded))!r}")
        padded.setdefault("attention_mask", [torch.ones(length, dtype=torch.int64) for length in lengths])
        width = -(-max(lengths) // self.multiple_of) * self.multiple_of
        others = default_collate([{name: sample[name] for name in first if name not in fills} for sample in samples])
        return others | {name: _stacked(rows, width, fills[name]) for name, rows in padded.items()}


def _row(name: str, values: Sequence[int] | Tensor) -> Tensor:
    row = torch.as_tensor(values).long()
    if row.dim() != 1:
        raise ConfigValueError(f"PadCollate: {name!r} of a sample has shape {tuple(row.shape)}; give one dimension")
    return row


def _stacked(rows: list[Tensor], width: int, fill: int) -> Tensor:
    whole = torch.full((len(rows), width), fill, dtype=torch.int64)
    for into, row in zip(whole, rows, strict=True):
        into[: row.numel()] = row
    return whole
