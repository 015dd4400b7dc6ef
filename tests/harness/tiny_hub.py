"""A folder with a small Llama of transformers and a tokenizer of bytes; and a tokenizer that needs no library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def write_llama(folder: Path, *, tied: bool = False) -> Path:
    """Random weights of seed 0 and their tokenizer, in the format of `save_pretrained`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{each: number for number, each in enumerate(alphabet, 3)}}
    tokens = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_chat(path: Path) -> None:
    """Conversations of a question and an answer, as lines of JSON."""
    with path.open("w") as file:
        for number in range(12):
            turns = [("user", f"what is {number}?"), ("assistant", f"{number} is a number")]
            record = {"messages": [{"role": role, "content": text} for role, text in turns]}
            file.write(f"{json.dumps(record)}\n")


class Letters:
    """A tokenizer of single characters, with the methods that the trainer calls."""

    eos_token_id, pad_token_id = 2, 0

    def __init__(self, chat_template: str | None = "plain") -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [*([1] if add_special_tokens else []), *map(ord, text)]}

    def get_vocab(self) -> dict[str, int]:
        return {chr(number): number for number in range(3, 128)}

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool = False, **options: Any) -> list[int]:
        written = "".join(f"<{each['role'][0]}{each['content']}>" for each in messages)
        if self.chat_template == "drops" and len(messages) > 2:  # drops earlier turns
            written = written.replace("<a", "<b", 1)
        return [ord(each) for each in written + "<a" * add_generation_prompt]
