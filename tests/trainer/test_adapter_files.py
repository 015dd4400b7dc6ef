"""The files of adapters that a run writes, with its checkpoints and by its export: in the format of PEFT, which is not
needed here. A model with its names takes its place, and is compared with it where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flatfsdp.checkpoint.conversion import read_state
from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer import CausalLM, FSDPArguments, Task, Trainer, TrainingArguments
from flatfsdp.trainer.hub.adapters import _check_targets
from flatfsdp.trainer.hub.pretrained import Pretrained
from flatfsdp.trainer.model.fronts import whole_parameters
from tests.conftest import Run
from tests.harness.tiny_peft import WIDTH, AdaptedModel, Decoder

pytestmark = pytest.mark.distributed

RANK, ALPHA, TARGETS = 3, 5, ["q_proj", "down_proj"]
BASE = "maker/base-model"
SHAPES = {"lora_A": (RANK, WIDTH), "lora_B": (WIDTH, RANK)}
EXPECTED = {
    f"base_model.model.layers.{layer}.{target}.{part}.weight": shape
    for layer in (0, 1)
    for target in TARGETS
    for part, shape in SHAPES.items()
}


class Named(Pretrained):
    """A model that has a name, as those of transformers."""

    tokenizer = None

    def make(self) -> nn.Module:
        return AdaptedModel(Decoder(self.name), rank=RANK, alpha=ALPHA, targets=TARGETS)

    @property
    def folder(self) -> Path:
        return Path()

    def load_into(self, model: nn.Module) -> None:
        """Its weights are those of its constructor."""


def adapted_run(rank: int, world: int, folder: str, front: str, save_frozen: bool) -> dict[str, Tensor]:
    """Trains, saves and exports; returns the adapters, gathered."""
    rows = [{"input_ids": torch.arange(8) % 5 + number % 3} for number in range(16)]
    task = Task(model=Named(BASE), train_data=rows, objective=CausalLM())
    training = TrainingArguments(
        output=Path(folder, "run"), steps=3, batch=2, lr=0.1, progress=False, save_frozen=save_frozen
    )
    trainer = Trainer(task, training, FSDPArguments(front=front, units="Layer"))
    trainer.train()
    trainer.export(Path(folder, "export"), dtype=torch.bfloat16)
    return {name: each.clone() for name, each in whole_parameters(trainer.model, lambda name: "lora_" in name)}


@pytest.mark.parametrize("save_frozen", [False, True])
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_adapters_are_written_in_the_format_of_peft(front: str, save_frozen: bool, pool2: Run, tmp_path: Path) -> None:
    trained, _ = pool2(adapted_run, str(tmp_path), front, save_frozen)
    saved = tmp_path / "run" / "step-00000003"
    for folder, dtype in ((saved, torch.float32), (tmp_path / "export", torch.bfloat16)):
        found = load_file(folder / "adapter_model.safetensors")
        assert {name: tuple(each.shape) for name, each in found.items()} == EXPECTED
        assert {each.dtype for each in found.values()} == {dtype}
        for name, value in trained.items():
            assert torch.equal(found[name.replace(".default.", ".")], value.to(dtype))
        assert any(each.any() for name, each in found.items() if "lora_B" in name), "trained"
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == BASE
        assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (RANK, ALPHA, sorted(TARGETS))
        assert (folder / "model.safetensors").exists() == (save_frozen and folder == saved)
    held = [*read_state(saved, trust=False)["model"]]
    assert any("base_layer" in name for name in held) == save_frozen
    assert {name.replace(".default.", ".") for name in held if "lora_" in name} == EXPECTED.keys()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about PEFT
def test_the_model_in_place_of_one_of_peft_writes_the_same_files(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    own = AdaptedModel(Decoder(BASE), rank=RANK, alpha=ALPHA, targets=TARGETS)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="FEATURE_EXTRACTION")
    of_peft = peft.get_peft_model(Decoder(BASE), config)
    assert [*of_peft.state_dict()] == [*own.state_dict()]
    of_peft.load_state_dict(own.state_dict())
    models: list[tuple[str, Any]] = [("own", own), ("peft", of_peft)]
    for name, model in models:
        model.save_pretrained(tmp_path / name, state_dict=dict(own.state_dict()), save_embedding_layers=False)
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name, _ in models]
    assert files[0] == files[1]
    mine, theirs = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name, _ in models)
    assert {**mine, "target_modules": sorted(theirs["target_modules"])} == {
        name: sorted(theirs[name]) if name == "target_modules" else theirs[name] for name in mine
    }


@pytest.mark.parametrize(
    ("targets", "hint"),
    [
        (["nonexistent"], ""),
        (["q_prj"], "Did you mean 'q_proj'? "),
        (["q_proj", "layers.2.down_proj"], "Did you mean 'down_proj'? "),
    ],
)
def test_a_target_that_names_no_module_is_refused_with_the_nearest(targets: list[str], hint: str) -> None:
    """Also beside one that does, where PEFT ignores it."""
    with pytest.raises(ConfigValueError) as raised:
        _check_targets(Decoder(BASE), targets)
    assert str(raised.value) == (
        f"lora: the model has no module named {targets[-1]!r}, which targets lists. {hint}"
        "Its linear layers: down_proj, lm_head, q_proj"
    )
    _check_targets(Decoder(BASE), ["q_proj", "layers.1.down_proj"])
