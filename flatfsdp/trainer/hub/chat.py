"""Conversations in the format of a tokenizer's chat template, with the loss only on the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatfsdp.errors import ConfigValueError

IGNORED = -100  # the label of a token that does not count


@dataclass(frozen=True)
class Encoded:
    """Tokens of a record, with a label for each; or one label for all, a class."""

    tokens: Sequence[int]
    labels: Sequence[int] | int

    def sample(self, longest: int) -> dict[str, Any]:
        """A sample of at most `longest` tokens."""
        labels = self.labels if isinstance(self.labels, int) else torch.tensor(self.labels[:longest])
        return {"input_ids": torch.tensor(self.tokens[:longest]), "labels": labels}

    def pairs(self) -> list[tuple[int, int]]:
        """Each token with its label."""
        if isinstance(self.labels, int):
            raise ConfigValueError("packing: samples with a class label cannot be packed")
        return list(zip(self.tokens, self.labels, strict=True))


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, where: str) -> Encoded:
    """The tokens of a conversation, and labels for the assistant's turns, their ends included.

    A template that marks the assistant's output is used for that. For others, the tokens up to each answer, including
    the generation prompt, have to be a prefix of the tokens up to its end.

    Raises:
        ConfigValueError: there is no chat template, or it renders earlier turns differently once more turns follow.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigValueError(f"{where}: the records are conversations, but the tokenizer has no chat template")
    if "generation %}" in str(tokenizer.chat_template):
        made = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        tokens, counts = made["input_ids"], made["assistant_masks"]
        return Encoded(tokens, [token if count else IGNORED for token, count in zip(tokens, counts, strict=True)])
    tokens = _written(tokenizer, messages)
    labels = [IGNORED] * len(tokens)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _written(tokenizer, messages[:place], add_generation_prompt=True)
        end = _written(tokenizer, messages[: place + 1])
        if tokens[: len(start)] != start or tokens[: len(end)] != end:
            raise ConfigValueError(
                f"{where}: the chat template renders earlier turns differently once more turns follow, so the answers "
                "cannot be located. Use a template with {% generation %} marks, or records of prompt and completion"
            )
        labels[len(start) : len(end)] = tokens[len(start) : len(end)]
    return Encoded(tokens, labels)


def prompt_tokens(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    """The tokens of `prompt`; with `chat`, as the question of a user, up to where the answer begins, if the tokenizer
    has a chat template."""
    if chat and getattr(tokenizer, "chat_template", None):
        return _written(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)
    found: list[int] = tokenizer(prompt)["input_ids"]
    if found and found[-1] == getattr(tokenizer, "eos_token_id", None):  # it would end the text
        found = found[:-1]
    return found


def _written(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    found: list[int] = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return found
