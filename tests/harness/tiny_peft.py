"""A model with low-rank adapters that has the names, the attributes and the saved files of PEFT's `PeftModel`, without
PEFT. `tests/trainer/test_adapter_files.py` compares both where PEFT is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

VOCABULARY, WIDTH = 11, 6


class Layer(nn.Module):
    """Two linear layers with the names of a Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.tanh(self.q_proj(x)))


class Decoder(nn.Module):
    """The adapted model; `name_or_path` is what models of transformers call the name that they were loaded by."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name_or_path = name
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class AdaptedLinear(nn.Module):
    """A frozen linear layer, plus a product of two small ones."""

    def __init__(self, base: nn.Linear, *, rank: int, alpha: int) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, alpha / rank
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling


class AdaptedModel(nn.Module):
    """`model` with adapters on its linear layers of these names, all else frozen."""

    def __init__(self, model: nn.Module, *, rank: int, alpha: int, targets: Sequence[str]) -> None:
        super().__init__()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for path, module in list(model.named_modules()):
            parent, _, name = path.rpartition(".")
            if name in targets and isinstance(module, nn.Linear):
                setattr(model.get_submodule(parent), name, AdaptedLinear(module, rank=rank, alpha=alpha))
        self.base_model = nn.Module()
        self.base_model.model = model
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(targets)}
        self.peft_config = {"default": SimpleNamespace(**config)}

    def forward(self, input_ids: Tensor) -> Any:
        return self.get_base_model()(input_ids)

    def get_base_model(self) -> Any:
        """The adapted model."""
        return self.base_model.model

    def save_pretrained(self, folder: Path, *, state_dict: Mapping[str, Tensor], save_embedding_layers: bool) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors`."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name.replace(".default.", "."): value for name, value in state_dict.items() if ".lora_" in name}
        save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        base = self.get_base_model().name_or_path
        config = {**vars(self.peft_config["default"]), "base_model_name_or_path": base, "inference_mode": True}
        (folder / "adapter_config.json").write_text(json.dumps(config))
