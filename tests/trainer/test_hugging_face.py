"""Models of transformers under the trainer's parts: built without memory, trained, exported, and loaded alone.

Skipped if transformers is not installed, except for tests that use doubles.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, checkpoint
from flatfsdp.errors import ConfigTypeError, ConfigValueError, FlatFSDPWarning, UsageError
from flatfsdp.trainer import Trainer
from flatfsdp.trainer.arguments import FSDPArguments, Task, TrainingArguments
from flatfsdp.trainer.fused_loss import fused
from flatfsdp.trainer.model.hugging_face import build_pretrained, files_of, initializer_of
from flatfsdp.trainer.model.sharding import shard
from flatfsdp.trainer.objectives import CausalLM, FromOutput, Objective, objective_for
from tests.conftest import Run
from tests.harness.fake import fake_world

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
WORDS = 31


def config(tied: bool = False) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )


def tokens(rank: int) -> Tensor:
    return torch.randint(3, WORDS, (2, 7), generator=torch.Generator().manual_seed(rank))


def gradients(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def trained_and_exported(rank: int, world: int, folder: str, tied: bool) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of transformers are ignored
        warnings.simplefilter("error", FlatFSDPWarning)
        return list(_trained_and_exported(rank, Path(folder), tied))


def _trained_and_exported(rank: int, folder: Path, tied: bool) -> Iterator[str]:
    from transformers import AutoModelForCausalLM

    batch = {"input_ids": tokens(rank), "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    losses, found = [], []
    for fuse in (False, True):
        torch.manual_seed(0)
        given = FSDPArguments(activation_checkpointing=fuse)
        model = shard(build_pretrained(config(tied), device="meta"), given, device=CPU)
        if len(FullyShardedDataParallel.fsdp_modules(model)) != 3:
            yield f"units: {model}"
        objective: Objective = objective_for(model)
        if fuse:
            objective = fused(objective, model, rows=4)
        losses.append(objective.loss(model, batch))
        (losses[-1] / objective.weight(batch)).backward()
        found.append(gradients(model))
    if not torch.allclose(*losses, rtol=1e-6):
        yield f"losses: {losses}"
    own = FromOutput(CausalLM().weight).loss(model, {**batch, "labels": batch["input_ids"]})
    if not torch.allclose(own, losses[0], rtol=1e-5):
        yield f"the model's own loss is {own}, not {losses[0]}"
    for name, gradient in found[0].items():
        if not torch.allclose(found[1][name], gradient, rtol=1e-5, atol=1e-7):
            yield f"gradient of {name}: off by {(found[1][name] - gradient).abs().max()}"
    torch.optim.SGD(model.parameters(), lr=0.5).step()

    checkpoint.export_safetensors(model, folder)
    write = files_of(model)
    assert write is not None
    if rank == 0:
        write(folder)
    dist.barrier()
    with torch.no_grad():
        logits = model(**batch).logits
        alone, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        if any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            yield f"from_pretrained: {report}"
        if not torch.equal(alone(**batch).logits, logits):
            yield f"other logits: off by {(alone(**batch).logits - logits).abs().max()}"
        loaded = shard(build_pretrained(folder, device="meta"), FSDPArguments(), device=CPU)
        checkpoint.load_safetensors(loaded, folder)
        if not torch.equal(loaded(**batch).logits, logits):
            yield "loaded from the folder it is another model"
    if (alone.lm_head.weight is alone.model.embed_tokens.weight) is not tied:
        yield "from_pretrained ties something else"


@pytest.mark.parametrize("tied", [False, True])
def test_what_was_trained_is_what_from_pretrained_loads(tied: bool, pool2: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    results = pool2(trained_and_exported, str(tmp_path / "export"), tied, timeout=300)  # imports take long
    assert not [line for lines in results for line in lines]


def trained_by_the_trainer(rank: int, world: int, folder: str, tied: bool) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", FlatFSDPWarning)
        return list(_trained_by_the_trainer(Path(folder), tied))


def _trained_by_the_trainer(folder: Path, tied: bool) -> Iterator[str]:
    """A run, its checkpoint and its export; then a run that begins from the export, as from any such folder."""
    from transformers import AutoModelForCausalLM

    task = Task(
        model=lambda: build_pretrained(config(tied), device="meta"),
        train_data=[{"input_ids": line} for number in range(6) for line in tokens(number)],
        eval_data=[{"input_ids": line} for line in tokens(6)],
    )
    fsdp = FSDPArguments(activation_checkpointing=True)
    given = {"batch": 2, "lr": 0.02, "fused_loss": True, "progress": False, "scheduler": "constant"}
    trainer = Trainer(task, TrainingArguments(output=folder / "run", steps=6, **given), fsdp)
    trainer.train()
    trainer.export(folder / "export")
    if not isinstance(trainer.objective, type(fused(CausalLM(), trainer.model))):
        yield f"the objective is {trainer.objective}"
    batch = {"input_ids": tokens(6)}
    with torch.no_grad():
        logits = trainer.model.eval()(**batch).logits
        for path in (trainer.checkpoint, folder / "export"):
            alone, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
            if any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
                yield f"from_pretrained: {report}"
            if not torch.equal(alone(**batch).logits, logits):
                yield f"{path}: other logits, off by {(alone(**batch).logits - logits).abs().max()}"
    first = Trainer(task, TrainingArguments(output=folder / "other", steps=1, **given), fsdp)
    begun = Trainer(task, TrainingArguments(output=folder / "more", steps=1, resume=folder / "export", **given), fsdp)
    begun.resume()
    losses = [each.evaluate()["eval_loss"] for each in (first, trainer, begun)]
    if losses[1] != losses[2] or losses[0] == losses[1]:
        yield f"losses of a new, a trained and a resumed model: {losses}"


@pytest.mark.parametrize("tied", [False, True])
def test_the_trainer_trains_a_llama(tied: bool, pool2: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    results = pool2(trained_by_the_trainer, str(tmp_path), tied, timeout=300)
    assert not [line for lines in results for line in lines]


def test_files_beside_the_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    with fake_world(1):
        model = shard(build_pretrained(config()), FSDPArguments(param_dtype="bf16", reduce_dtype="fp32"), device=CPU)
        model.generation_config.max_new_tokens = 5
        write = files_of(model, tokenizer)
    assert write is not None
    write(tmp_path)
    held = json.loads((tmp_path / "config.json").read_text())
    assert (held["architectures"], held.get("dtype", held.get("torch_dtype"))) == (["LlamaForCausalLM"], "float32")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("b")["input_ids"] == [1]
    again = build_pretrained(tmp_path)
    assert type(again).__name__ == "LlamaForCausalLM" and again.training
    assert again.generation_config.max_new_tokens == 5


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(
        ConfigValueError, match=r"build_pretrained: pretrained: got .* Accepted: a folder with config\.json"
    ):
        build_pretrained(tmp_path)
    with pytest.raises(ConfigValueError, match="Accepted: 'cpu' or 'meta'"):
        build_pretrained(tmp_path, device="cuda")


# --- doubles ----------------------------------------------------------------------------------------------------------


class Saved:
    """An object with `save_pretrained`, which writes the object's attributes."""

    def __init__(self, name: str, dtype: Any = None) -> None:
        self.name, self.dtype = name, dtype

    def save_pretrained(self, folder: Path) -> None:
        (folder / self.name).write_text(json.dumps(vars(self)))


class Own(nn.Linear):
    """Has a config, and values that its model gives."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.config = Saved("config.json", "unknown")
        self.generation_config = Saved("generation_config.json")

    def _init_weights(self, module: nn.Linear) -> None:
        nn.init.ones_(module.weight)


def test_files_of_a_model_are_its_own_at_that_moment(tmp_path: Path) -> None:
    model = Own().bfloat16()
    write = files_of(model, Saved("tokenizer.json"))
    model.config.name = "moved.json"
    assert write is not None
    write(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
    ]
    held = json.loads((tmp_path / "config.json").read_text())
    assert (held["architectures"], held["dtype"]) == (["Own"], "bfloat16")


def test_other_models_have_no_files(tmp_path: Path) -> None:
    assert files_of(nn.Linear(2, 2)) is None
    write = files_of(nn.Linear(2, 2), Saved("tokenizer.json"))
    assert write is not None
    write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    with pytest.raises(ConfigTypeError, match="tokenizer: got 'gpt2'"):
        files_of(nn.Linear(2, 2), "gpt2")


def test_what_a_model_leaves_without_a_value_on_the_meta_device_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Own(), nn.Linear(2, 2))
    with fake_world(1), pytest.raises(UsageError, match="bias of a Own on the meta device were not initialized by Own"):
        shard(model, FSDPArguments(units="none"), device=CPU)
    with torch.device("meta"):
        model = nn.Sequential(Own(), nn.Linear(2, 2))
    model[0].register_parameter("bias", None)
    with fake_world(1):
        shard(model, FSDPArguments(units="none"), device=CPU)
    assert model[0].weight.unique().tolist() == [1.0] and model[1].weight.isfinite().all()
    assert initializer_of(nn.Linear(2, 2)) is None
