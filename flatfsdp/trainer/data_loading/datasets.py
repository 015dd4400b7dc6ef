"""Datasets of text, and collation of samples of different lengths."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from flatfsdp.errors import ConfigTypeError, ConfigValueError, shown


class TokenWindows:
    """A long text split into consecutive windows of `context` tokens; sample i is the i-th window.

    A sample is {"input_ids": ..., "labels": ...}, both int64 of shape (context,). Labels are the window's tokens unless
    `labels` are given. They are not shifted: the target of a token is the label after it, and the loss shifts. Tokens
    at the end that do not fill a window are left out.

    Args:
        tokens: 1-D, of any integer dtype; it is not copied.
        context: the number of tokens in a window.
        labels: the labels of the tokens, in the same number; None for the tokens themselves.

    Raises:
        ConfigValueError: `tokens` is not 1-D, or does not fill one window.
    """

    def __init__(self, tokens: Tensor, *, context: int, labels: Tensor | None = None) -> None:
        if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise ConfigValueError(
                f"tokens: got {tokens.dtype} of shape {tuple(tokens.shape)}. Accepted: whole numbers in one dimension."
            )
        if context < 2 or tokens.numel() < context:
            raise ConfigValueError(
                f"context: got {context}. Accepted: from 2 (one token predicts another) to {tokens.numel()}, "
                "the number of tokens."
            )
        self.tokens = tokens
        self.context = context
        self.labels = tokens if labels is None else labels

    def __len__(self) -> int:
        return self.tokens.numel() // self.context

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(f"window {number} of {len(self)}")
        place = slice(number * self.context, (number + 1) * self.context)
        return {"input_ids": self.tokens[place].long(), "labels": self.labels[place].to(torch.int64, copy=True)}


class JsonLines:
    """A file of lines, each of which is a JSON value; sample i is the i-th line that is not blank.

    Lines are read on access; memory holds only their offsets, 8 bytes a line.

    Raises:
        ConfigValueError: the file does not exist, or has no lines.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._starts = array("q")
        start = 0
        try:
            with self.path.open("rb") as file:
                for line in file:
                    if not line.isspace():
                        self._starts.append(start)
                    start += len(line)
        except OSError as error:
            raise ConfigValueError(f"path: cannot read {str(self.path)!r}: {error.strerror}") from None
        if not self._starts:
            raise ConfigValueError(f"path: the file {str(self.path)!r} has no lines")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(f"line {number} of {len(self)}")
        with self.path.open("rb") as file:  # each time: workers would share the position of an open file
            file.seek(self._starts[number])
            return json.loads(file.readline())


@dataclass(frozen=True)
class PadCollate:
    """Pads token ids, and sequences of the same length, on the right, to the longest sample of the microbatch.

    A sample is a mapping. Those of "input_ids", "labels", "attention_mask" and "token_type_ids" that it has are
    sequences of numbers or 1-D tensors; the batch holds them as int64 of shape (samples, longest). "attention_mask" is
    always there, 1 where a sample has a token. Other entries of a sample, including "labels" that are one number, a
    class, are left to torch's `default_collate`.

    Attributes:
        pad: fills "input_ids".
        label_pad: fills "labels": a value that the loss ignores.
        multiple_of: the padded length is a multiple of this, for fewer shapes with torch.compile.
    """

    pad: int = 0
    label_pad: int = -100
    multiple_of: int = 1

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch.

        Raises:
            ConfigTypeError, ConfigValueError: samples are not mappings, or have other keys than the first one, or a
                sample's sequences have different lengths.
        """
        first = samples[0]
        if not isinstance(first, Mapping):
            raise ConfigTypeError(f"PadCollate: got {shown(first)} as a sample. Accepted: a mapping with 'input_ids'.")
        for sample in samples:
            if sample.keys() != first.keys():
                raise ConfigValueError(
                    f"PadCollate: a sample has {', '.join(map(str, sample))}, but the first one has "
                    f"{', '.join(map(str, first))}; all need the same"
                )
        fills = {"input_ids": self.pad, "labels": self.label_pad, "attention_mask": 0, "token_type_ids": 0}
        names = [name for name in first if name in fills and not isinstance(first[name], int)]
        padded = {name: [_row(name, sample[name]) for sample in samples] for name in names}
        if not padded:
            raise ConfigValueError(f"PadCollate: a sample has {', '.join(map(str, first))}, but no 'input_ids' to pad")
        lengths = [row.numel() for row in next(iter(padded.values()))]
        for name, rows in padded.items():
            if [row.numel() for row in rows] != lengths:
                raise ConfigValueError(f"PadCollate: {name!r} of a sample is not as long as its {next(iter(padded))!r}")
        padded.setdefault("attention_mask", [torch.ones(length, dtype=torch.int64) for length in lengths])
        width = -(-max(lengths) // self.multiple_of) * self.multiple_of
        others = default_collate([{name: sample[name] for name in first if name not in padded} for sample in samples])
        return others | {name: _stacked(rows, width, fills[name]) for name, rows in padded.items()}


def _row(name: str, values: Sequence[int] | Tensor) -> Tensor:
    row = torch.as_tensor(values).long()
    if row.dim() != 1:
        raise ConfigValueError(f"PadCollate: {name!r} of a sample has shape {tuple(row.shape)}; give one dimension")
    return row


def _stacked(rows: list[Tensor], width: int, fill: int) -> Tensor:
    whole = pad_sequence(rows, batch_first=True, padding_value=fill)
    return F.pad(whole, (0, width - whole.shape[1]), value=fill)
