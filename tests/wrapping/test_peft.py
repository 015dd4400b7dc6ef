"""PEFT's adapters on a LLaMA of transformers, and its `generate`: as in one process. Skipped where they are missing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, inference, register_fsdp_forward_method, stats
from tests.conftest import Run
from tests.harness.corners import LR, Setting, joined, seeded

pytestmark = pytest.mark.distributed

WORDS = 31


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: nn.Module = get_peft_model(base(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, with which the others would get no gradient
            nn.init.normal_(parameter, std=0.02)
    return model


def base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
        )
    )


def tokens(rank: int, step: int, length: int = 7) -> Tensor:
    return torch.randint(3, WORDS, (2, length), generator=torch.Generator().manual_seed(10 * step + rank))


def step_of(model: Any, rank: int, step: int) -> Tensor:
    text = tokens(rank, step)
    loss: Tensor = model(input_ids=text, labels=text).loss
    loss.backward()
    return loss.detach()


def train(rank: int, world: int, folder: str) -> list[str]:
    """The lines of `trained`; warnings of transformers and PEFT are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(trained(rank, world, folder))


def trained(rank: int, world: int, folder: str) -> Iterator[str]:
    """Two steps, also in one process with both ranks' batches; then the adapter is saved from whole parameters."""
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    plain, model = seeded(adapted), Setting().wrap(seeded(adapted), (LlamaDecoderLayer,))
    model.keep_frozen_unsharded()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for step in range(2):
        losses = [step_of(plain, other, step) for other in range(world)]
        if not torch.equal(step_of(model, rank, step), losses[rank]):
            yield f"step {step}: another loss"
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / world * LR)
                    parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    state = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.state_dict().items()}
    adapter = get_peft_model_state_dict(plain, state_dict=state)
    if rank == 0:
        model.module.save_pretrained(folder, state_dict=state)
    torch.distributed.barrier()
    loaded = PeftModel.from_pretrained(seeded(adapted).unload(), folder)
    expected = get_peft_model_state_dict(plain)
    for where, found in (("saved", adapter), ("loaded", get_peft_model_state_dict(loaded))):
        if found.keys() != expected.keys() or not all(torch.allclose(found[n], expected[n]) for n in expected):
            yield f"the {where} adapter is another one"
    merged, whole = loaded.merge_and_unload(), plain.merge_and_unload()
    text = tokens(0, 9)
    if not torch.allclose(merged(input_ids=text).logits, whole(input_ids=text).logits, atol=1e-6):
        yield "the merged model computes something else"


def generate(rank: int, world: int) -> list[str]:
    """transformers' own `generate`, with its cache, for text of different lengths."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    plain = seeded(base).eval()
    model: Any = FullyShardedDataParallel(seeded(base).eval(), auto_wrap_policy={LlamaDecoderLayer})
    register_fsdp_forward_method(model, "generate")
    wanted = {"max_new_tokens": 5 + 4 * rank, "do_sample": False, "min_new_tokens": 5 + 4 * rank}
    figures = stats(model)
    with inference(model):
        figures.reset()
        line = model.generate(tokens(rank, 0), **wanted)
        quiet = not figures.comm
    lines = [] if quiet else [f"communicated {figures.comm}"]
    return (
        lines if torch.equal(line, plain.generate(tokens(rank, 0), **wanted)) else [*lines, "generated something else"]
    )


def test_an_adapter_is_trained_saved_loaded_and_merged(tmp_path: Path, pool2: Run) -> None:
    pytest.importorskip("peft")
    assert not joined(pool2(train, str(tmp_path), timeout=120))


def test_transformers_generate(pool2: Run) -> None:
    pytest.importorskip("transformers")
    assert not joined(pool2(generate, timeout=120))
