"""Models of transformers by name, LoRA on them, and text: trained on 2 ranks, resumed on 3, exported, loaded by the
libraries themselves. Skipped where these are missing."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp import FullyShardedDataParallel
from flatfsdp.checkpoint.conversion import read_state
from flatfsdp.errors import CheckpointError, ConfigValueError, FlatFSDPWarning
from flatfsdp.trainer import FSDPArguments, Task, Trainer, TrainingArguments
from flatfsdp.trainer.hub.pretrained import Pretrained
from flatfsdp.trainer.hub.text_data import TextData
from flatfsdp.trainer.objectives import CausalLM, Classification
from tests.conftest import Run
from tests.harness.tiny_hub import write_chat, write_llama

pytestmark = pytest.mark.distributed

LENGTH = 48
LORA = {"rank": 4, "targets": ["q_proj", "down_proj"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, its tokenizer, and conversations."""
    pytest.importorskip("transformers", minversion="5")
    write_chat(tmp_path / "chat.jsonl")
    write_llama(tmp_path / "llama")
    return tmp_path


def trainer_of(folder: Path, steps: int, model: dict[str, Any], **training: Any) -> Trainer:
    chat = TextData(f"jsonl:{folder / 'chat.jsonl'}", sequence_length=LENGTH)
    front = model.get("front", "wrapper")
    training["save_frozen"] = model.get("save_frozen", False)
    options = {name: value for name, value in model.items() if name not in ("front", "save_frozen")}
    task = Task(model=Pretrained(str(folder / "llama"), **options), train_data=chat, eval_data=chat)
    given = TrainingArguments(
        output=folder / "run", steps=steps, lr=0.01, progress=False, global_batch=6, batch=1, **training
    )
    return Trainer(task, given, FSDPArguments(keep_frozen_unsharded="lora" in model, front=front))


def quietly(rank: int, world: int, work: Any, folder: str, *given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the libraries are ignored
        warnings.simplefilter("error", FlatFSDPWarning)
        warnings.filterwarnings("ignore", ".*keeps the 6 samples.*", FlatFSDPWarning)
        return work(Path(folder), *given)


def first_logits(folder: Path, model: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Before any step, and of the model as transformers loads it, by as many threads."""
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(3, 13)[None]
    with torch.no_grad():
        found = trainer_of(folder, 1, model).model.eval()(input_ids=tokens).logits
        expected = AutoModelForCausalLM.from_pretrained(folder / "llama").eval()(input_ids=tokens).logits
    return found, expected


def run(folder: Path, steps: int, model: dict[str, Any], resume: str | None) -> dict[str, Any]:
    trainer = trainer_of(folder, steps, model, resume=resume)
    result = trainer.train()
    parameters = [*trainer.model.parameters()]
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    frozen = sum(each.nbytes for each in parameters if not each.requires_grad)
    return {"losses": result.losses, "trained": trained, "frozen": frozen, **result.evaluation}


def export(folder: Path, model: dict[str, Any]) -> list[str]:
    trainer = trainer_of(folder, 1, model, resume="latest")
    trainer.resume()
    trainer.export(folder / "export")
    found = []
    for overwrite in (False, True):
        try:
            trainer.export(folder / "export", overwrite=overwrite)
            found.append("written")
        except CheckpointError as error:
            found.append("refused" if "overwrite" in str(error) else str(error))
    return found


def alone(folder: Path, model: Any) -> tuple[float, int]:
    """The mean loss of `model` over the conversations, by one process."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    data = TextData(f"jsonl:{folder / 'chat.jsonl'}", sequence_length=LENGTH)
    rows, collate, objective = data.make(tokenizer), data.collate(tokenizer), CausalLM()
    batches = [collate([rows[number]]) for number in range(len(rows))]
    with torch.no_grad():
        total = sum(float(objective.loss(model.eval(), batch)) for batch in batches)
    weight = sum(objective.weight(batch) for batch in batches)
    return total / weight, weight


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about PEFT
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("model", [{}, {"lora": LORA}], ids=["all", "lora"])
def test_trained_on_two_resumed_on_three_exported(
    model: dict[str, Any], front: str, folder: Path, pool2: Run, pool3: Run
) -> None:
    from transformers import AutoModelForCausalLM

    lora, model = bool(model), {**model, "front": front}
    if lora:
        peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folder / "llama").eval()
    for logits, expected in pool2(quietly, first_logits, str(folder), model, timeout=120):
        assert torch.equal(logits, expected)  # each rank has read its own; adapters begin as nothing
    first, _ = pool2(quietly, run, str(folder), 4, model, None, timeout=120)
    whole = sum(parameter.numel() for parameter in base.parameters())
    # Of DTensors this counts whole parameters, under the wrapper this rank's parts.
    assert (first["trained"] < whole / (10 if front == "wrapper" else 5)) if lora else True
    second, *_ = pool3(quietly, run, str(folder), 7, model, "latest", timeout=120)
    assert second["eval_loss"] < first["eval_loss"] < first["losses"][0]
    refused = pool2(quietly, export, str(folder), model, timeout=120)
    assert refused == [["refused", "written"]] * 2
    kind = peft.PeftModel.from_pretrained(base, folder / "export") if lora else None
    loaded = kind or AutoModelForCausalLM.from_pretrained(folder / "export")
    loss, weight = alone(folder, loaded)
    assert weight == second["eval_tokens"]
    assert loss == pytest.approx(second["eval_loss"], rel=1e-5)
    saved = folder / "run" / "step-00000007"
    assert (saved / "model.safetensors").exists() == (not lora)
    if lora:  # adapters, and the base by its name
        assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
            folder / "llama"
        )
        base = AutoModelForCausalLM.from_pretrained(folder / "llama").eval()
        assert alone(folder, peft.PeftModel.from_pretrained(base, saved))[0] == pytest.approx(loss, rel=1e-6)
        assert not [name for name in model_entries(saved) if "base_layer" in name or "lora_" not in name]


def model_entries(path: Path) -> list[str]:
    """The names of the model's tensors in a checkpoint."""
    state = read_state(path, trust=False)["model"]
    return [*state]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about PEFT
def test_with_frozen_weights_a_checkpoint_of_adapters_is_whole(folder: Path, pool2: Run, pool3: Run) -> None:
    """As those of earlier versions were: both are resumed from."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = {"lora": LORA, "save_frozen": True}
    first, _ = pool2(quietly, run, str(folder), 4, model, None, timeout=120)
    saved = folder / "run" / "step-00000004"
    assert [name for name in model_entries(saved) if "base_layer" in name]
    base = AutoModelForCausalLM.from_pretrained(folder / "llama").eval()
    peft.PeftModel.from_pretrained(base, saved)
    second, *_ = pool3(quietly, run, str(folder), 7, {"lora": LORA}, "latest", timeout=120)
    assert second["eval_loss"] < first["eval_loss"]
    assert not [name for name in model_entries(folder / "run" / "step-00000007") if "base_layer" in name]
    for text in pool2(quietly, resumed_without_lora, str(folder), timeout=120):
        assert f"holds only the adapters of {folder / 'llama'}: resume with that model and lora=" in text


def resumed_without_lora(folder: Path) -> str:
    try:
        trainer_of(folder, 9, {}, resume="latest").resume()
    except CheckpointError as error:
        return str(error)
    return "resumed"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about PEFT
def test_adapters_over_four_bits(folder: Path, pool2: Run, pool3: Run) -> None:
    """Trained on 2, resumed on 3, exported; the same loss by the libraries alone."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    frozen = {}
    for quantize in (None, "nf4"):
        model = {"lora": LORA, "quantize": quantize}
        found = pool2(quietly, run, str(folder), 4, model, None, timeout=120)
        frozen[quantize] = sum(rank["frozen"] for rank in found)
        if quantize is None:
            shutil.rmtree(folder / "run")
    first, _ = found
    layers = 2 * (4 * 16 * 16 + 3 * 16 * 24)
    assert frozen[None] - frozen["nf4"] == pytest.approx(3.5 * layers, rel=0.02)  # bytes, of 4 for each number; padding
    second, *_ = pool3(quietly, run, str(folder), 7, model, "latest", timeout=120)
    assert second["eval_loss"] < first["eval_loss"] < first["losses"][0]
    pool2(quietly, export, str(folder), model, timeout=120)
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = AutoModelForCausalLM.from_pretrained(folder / "llama", quantization_config=packed)
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # the other form is for matrices of 32 rows
    loss, _ = alone(folder, peft.PeftModel.from_pretrained(base, folder / "export"))
    assert loss == pytest.approx(second["eval_loss"], rel=1e-5)


def classified(folder: Path) -> tuple[str, dict[str, float]]:
    data = TextData(f"jsonl:{folder / 'labels.jsonl'}")
    task = Task(model=Pretrained(str(folder / "llama"), labels=2), train_data=data, eval_data=data)
    trainer = Trainer(task, TrainingArguments(output=folder / "c", steps=20, lr=0.02, batch=2, progress=False))
    return type(trainer.objective).__name__, dict(trainer.train().evaluation)


def test_a_classifier_gets_a_head_and_its_accuracy(folder: Path, pool2: Run) -> None:
    records = [{"text": "ab"[number % 2] * 4, "label": number % 2} for number in range(8)]
    (folder / "labels.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    for objective, evaluation in pool2(quietly, classified, str(folder), timeout=120):
        assert objective == Classification.__name__
        assert evaluation["eval_accuracy"] == 1.0
        assert "eval_perplexity" not in evaluation


def of_datasets(folder: Path, streaming: bool, resume: str | None, steps: int) -> tuple[float, ...]:
    data = TextData(f"hf:{folder / 'data'}", streaming=streaming, sequence_length=8)
    task = Task(model=Pretrained(str(folder / "llama")), train_data=data)
    given = TrainingArguments(
        output=folder / "s", steps=steps, global_batch=6, batch=1, progress=False, shuffle=False, resume=resume,
        scheduler="constant",
    )  # fmt: skip
    return Trainer(task, given).train().losses


@pytest.mark.parametrize("streaming", [True, False])
def test_a_dataset_is_gone_on_with_on_another_number_of_ranks(
    streaming: bool, folder: Path, pool2: Run, pool3: Run
) -> None:
    pytest.importorskip("datasets")
    (folder / "data").mkdir()
    lines = [json.dumps({"text": chr(97 + number % 26) * (number % 11)}) for number in range(200)]
    (folder / "data" / "train.jsonl").write_text("\n".join(lines))
    whole, _ = pool2(quietly, of_datasets, str(folder), streaming, None, 4, timeout=120)
    for path in (folder / "s").glob("*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    pool2(quietly, of_datasets, str(folder), streaming, None, 2, timeout=120)
    second, *_ = pool3(quietly, of_datasets, str(folder), streaming, "latest", 4, timeout=120)
    assert second[-1] == pytest.approx(whole[-1], rel=1e-4)


def watched(folder: Path) -> None:
    chat = TextData(f"jsonl:{folder / 'chat.jsonl'}", sequence_length=LENGTH)
    task = Task(model=Pretrained(str(folder / "llama")), train_data=chat, eval_data=chat)
    names = ["tensorboard", "wandb:project=p,mode=offline"]
    given = TrainingArguments(output=folder / "w", steps=3, batch=1, progress=False, callbacks=names, profile="2")
    Trainer(task, given).train()


def test_tensorboard_and_weights_and_biases_have_the_numbers(folder: Path, pool2: Run) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("wandb")
    pool2(quietly, watched, str(folder), timeout=120)
    events = accumulator.EventAccumulator(str(folder / "w" / "tensorboard")).Reload()
    assert [each.step for each in events.Scalars("train/loss")] == [1, 2, 3]
    assert {"eval/loss", "eval/perplexity", "eval/accuracy", "train/lr"} <= set(events.Tags()["scalars"])
    assert list((folder / "w" / "wandb").glob("offline-run-*/run-*.wandb"))
    for rank in (0, 1):
        trace = json.loads((folder / "w" / f"trace-rank{rank}.json").read_text())
        assert any("aten::" in str(each.get("name")) for each in trace["traceEvents"])


def names_in_units(folder: Path) -> list[str]:
    return [str(each) for each in FullyShardedDataParallel.fsdp_modules(trainer_of(folder, 1, {}).model)]


def test_its_layers_become_units(folder: Path, pool2: Run) -> None:
    assert [len(found) for found in pool2(quietly, names_in_units, str(folder), timeout=60)] == [3, 3]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("none/at/all", {}, "hf:none/at/all: there is no folder"),
        ("./none", {}, "hf:./none: there is no folder"),
        ("", {}, "has no config.json"),
        (
            "llama",
            {"lora": {"rank": 2, "targets": "nothing_like_it"}},
            "lora: the model has no module named 'nothing_like_it'",
        ),
        ("llama", {"lora": {"ranks": 2}}, "lora: there is no option 'ranks'. Did you mean 'rank'"),
    ],
)
def test_what_cannot_be_made_is_named(name: str, options: dict[str, Any], text: str, folder: Path) -> None:
    if options:
        pytest.importorskip("peft")
    given = name if name.startswith((".", "none")) else str(folder / name)
    with pytest.raises(ConfigValueError, match=text):
        Pretrained(given, **options).make()
