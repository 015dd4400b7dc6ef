"""Datasets of text, and samples of different lengths in one batch."""

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
    """A long text cut into windows of `context` tokens, one after the other; sample i is the i-th window.

    A sample is {"input_ids": ..., "labels": ...}, both int64, (context,), and the window's tokens unless labels are
    given: what is to be predicted from a token is the one behind it, and whoever computes the loss shifts. Tokens at
    the end that do not fill a window are left out.

    Args:
        tokens: 1-D, of any integer dtype; it is not copied.
        context: tokens of a window.
        labels: those of the tokens, in place of these, as many.

    Raises:
        ConfigValueError: `tokens` has another shape, or does not fill one window.
    """

    def __init__(self, tokens: Tensor, *, context: int, labels: Tensor | None = None) -> None:
        if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise ConfigValueError(
                f"tokens: got {tokens.dtype} of shape {tuple(tokens.shape)}. Accepted: whole numbers in one dimension."
            )
        if context < 2 or tokens.numel() < context:
            raise ConfigValueError(
                f"context: got {context}. Accepted: from 2, to predict one token from another, up to the "
                f"{tokens.numel()} tokens that there are."
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

    Lines are read when they are asked for; where they begin is held in memory, 8 bytes a line.

    Raises:
        ConfigValueError: there is no such file, or it has no lines.
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
        with self.path.open("rb") as file:  # each time: workers would share an open one's position
            file.seek(self._starts[number])
            return json.loads(file.readline())


@dataclass(frozen=True)
class PadCollate:
    """Pads token ids, and what comes with them, on the right, to the longest sample of the microbatch.

    A sample is a mapping. Its "input_ids", "labels", "attention_mask" and "token_type_ids", as far as it has them, are
    sequences of numbers or 1-D tensors; the batch holds them as int64 of shape (samples, longest). "attention_mask" is
    there always, 1 where a sample has a token. What else a sample has, "labels" that are one number, a class, included,
    is left to torch's `default_collate`.

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
        names = [name for name in first if name in fills and not isinstance(first[name], int)]
        padded = {name: [_row(name, sample[name]) for sample in samples] for name in names}
        if not padded:
            raise ConfigValueError(f"PadCollate: a sample has {', '.join(map(str, first))}, and no 'input_ids' to pad")
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
