"""Datasets of text."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from torch import Tensor

from flatfsdp.errors import ConfigValueError


class TokenWindows:
    """A long text cut into windows of `context` tokens, one after the other; sample i is the i-th window.

    A sample is {"input_ids": ..., "labels": ...}, both the window's tokens, int64, (context,): what is to be predicted
    from a token is the one behind it, and whoever computes the loss shifts. Tokens at the end that do not fill a window
    are left out.

    Args:
        tokens: 1-D, of any integer dtype; it is not copied.
        context: tokens of a window.

    Raises:
        ConfigValueError: `tokens` has another shape, or does not fill one window.
    """

    def __init__(self, tokens: Tensor, *, context: int) -> None:
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

    def __len__(self) -> int:
        return self.tokens.numel() // self.context

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(f"window {number} of {len(self)}")
        window = self.tokens[number * self.context :][: self.context].long()
        return {"input_ids": window, "labels": window.clone()}


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
