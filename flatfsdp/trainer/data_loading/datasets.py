"""Datasets of text."""

from __future__ import annotations

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
