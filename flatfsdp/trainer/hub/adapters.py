"""LoRA through PEFT: adapters on a frozen model, and a folder that `PeftModel.from_pretrained` loads."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from flatfsdp.errors import CheckpointError, ConfigTypeError, ConfigValueError, did_you_mean, few
from flatfsdp.trainer.hub.cache import library
from flatfsdp.trainer.model.fronts import inside, whole_parameters
from flatfsdp.trainer.process_group import TrainerRanks
from flatfsdp.trainer.settings import nearest
from flatfsdp.trainer.settings.references import takes
from flatfsdp.trainer.settings.types import PlainValidator, options, separate

ADAPTER = "adapter_config.json"

_SHORT = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}


def lora_options(value: Any) -> dict[str, Any]:
    """A table of LoRA's options, from a mapping, from `key=value` texts, or from one comma-separated text."""
    texts = value if isinstance(value, list) else [value]
    split = [part for each in texts for part in (separate(each) if isinstance(each, str) else [each])]
    found = options(split)
    targets = found.get("targets")
    if isinstance(targets, str) and targets != "all-linear":
        found["targets"] = targets.split(",")
    for name in ("rank", "alpha"):
        number = found.get(name, 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigTypeError(f"Accepted for {name}: a whole number from 1; found {number!r}.")
    return found


LoraOptions = Annotated[dict[str, Any], PlainValidator(lora_options)]


def add_lora(model: nn.Module, given: Mapping[str, Any], *, wanted_by: str, classifies: bool) -> nn.Module:
    """`model` inside a `PeftModel`, its own parameters frozen; on the meta device, only the adapters have values.

    Args:
        given: rank (8), alpha (twice the rank), dropout, targets (PEFT's for the model, or "all-linear"), and
            other arguments of PEFT's `LoraConfig` by their names there.

    Raises:
        ConfigValueError: PEFT is missing, has no such option, or rejects it; or a target names no module.
    """
    peft = library("peft", wanted_by=f"{wanted_by} with lora")
    chosen = {_SHORT.get(name, name): value for name, value in {"rank": 8, **given}.items()}
    for name in given:
        if name not in _SHORT and not takes(peft.LoraConfig, name):
            known = [*_SHORT, *inspect.signature(peft.LoraConfig).parameters]
            raise ConfigValueError(f"lora: there is no option {name!r}. {nearest(name, known)}")
    chosen.setdefault("lora_alpha", 2 * chosen["r"])
    _check_targets(model, chosen.get("target_modules"))
    kind = "SEQ_CLS" if classifies else "CAUSAL_LM"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of PEFT's calls
            adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(task_type=kind, **chosen))
    except (TypeError, ValueError, NotImplementedError) as error:
        why = f"{error}{'' if str(error).endswith('.') else '.'}"
        raise ConfigValueError(f"lora: PEFT rejects {dict(given)}: {why} {_linear_layers(model)}") from error
    for layer in adapted.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            _give_values(layer)
    return adapted


def _check_targets(model: nn.Module, targets: Any) -> None:
    """Refuse targets that name no module: PEFT ignores them if at least one other target names some."""
    paths = [path for path, _ in model.named_modules()]
    for target in targets if isinstance(targets, list) else ():
        if not any(path == target or path.endswith(f".{target}") for path in paths):
            ends = dict.fromkeys(path.rpartition(".")[2] for path in paths)
            hint = did_you_mean(target, (end for end in ends if end and not end.isdigit()))
            raise ConfigValueError(
                f"lora: the model has no module named {target!r}, which targets lists. "
                f"{hint}{' ' * bool(hint)}{_linear_layers(model)}"
            )


def _linear_layers(model: nn.Module) -> str:
    names = {path.rpartition(".")[2] for path, each in model.named_modules() if isinstance(each, nn.Linear)}
    return f"Its linear layers: {', '.join(sorted(names)) or 'none'}"


def _give_values(layer: Any) -> None:
    """Give adapters PEFT's own initial values, which they lack where the model is on the meta device."""
    parts = [layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B]
    if any(parameter.is_meta for part in parts for parameter in part.parameters()):
        for part in parts:
            part.to_empty(device="cpu")
        for name in layer.active_adapters:
            layer.reset_lora_parameters(name, init_lora_weights=True)


def name_in_base(name: str) -> str | None:
    """The name of a `PeftModel`'s parameter in the adapted model; None for parameters that the latter lacks."""
    own = name.removeprefix("base_model.model.")
    if ".lora_" in own or ".modules_to_save." in own:
        return None
    return own.replace(".base_layer.", ".").replace(".original_module.", ".")


def is_adapted(model: nn.Module) -> bool:
    """Whether `model`, sharded or not, is a model of PEFT."""
    return hasattr(inside(model), "peft_config")


def entries_without_base(model: nn.Module) -> Callable[[str], bool]:
    """Whether an entry of the state dict of `model`, before it is sharded, is more than a frozen parameter of the
    adapted model, or what its quantization keeps with it."""
    frozen = {
        name
        for name, each in model.named_parameters(remove_duplicate=False)
        if not each.requires_grad and name_in_base(name) is not None
    }

    def is_saved(name: str) -> bool:
        parts = name.split(".")
        return not any(".".join(parts[:end]) in frozen for end in range(1, len(parts) + 1))

    return is_saved


def adapter_files(
    model: nn.Module, *, everywhere: bool, ranks: TrainerRanks, files: Callable[[Path], None] | None
) -> Callable[[Path], None]:
    """A function that writes the adapters of `model` like `PeftModel.save_pretrained`, with their values of now.
    Collective; the function communicates nothing. The first rank can call it, or with `everywhere` each."""
    found = _gathered(model, kept=everywhere or ranks.rank == 0, dtype=None)

    def write(folder: Path) -> None:
        _write(model, folder, found)
        if files is not None:
            files(folder)

    return write


def _gathered(model: nn.Module, *, kept: bool, dtype: torch.dtype | None) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, whole in whole_parameters(model, lambda name: name_in_base(name) is None):
        if kept:
            found[name] = whole.to("cpu", dtype, copy=True)
    return found


def _write(model: nn.Module, folder: Path, found: Mapping[str, Tensor]) -> None:
    adapted: Any = inside(model)
    # Adapted embeddings are stored with the adapters only; PEFT would ask the Hub whether the base has others.
    adapted.save_pretrained(folder, state_dict=dict(found), save_embedding_layers=False)


def export_adapter(
    model: nn.Module,
    folder: Path,
    *,
    ranks: TrainerRanks,
    files: Callable[[Path], None] | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Write the adapters of `model` like `PeftModel.save_pretrained`, on rank 0. Collective.

    Units, or parameters, are gathered one after the other, so that no rank holds more than one of them unsharded.

    Args:
        files: writes small files next to the adapters, such as the tokenizer's.
        dtype: the dtype of written tensors; None for their own.
        overwrite: replace an existing adapter.

    Raises:
        CheckpointError: on every rank: the folder is not empty, or cannot be written to.
    """
    doing = f"exporting to {folder}"
    leads = ranks.rank == 0

    def look() -> None:
        there = sorted(each.name for each in folder.iterdir()) if leads and folder.is_dir() else []
        if there and not (overwrite and ADAPTER in there):
            hint = "overwrite=True replaces it" if ADAPTER in there else "choose another folder"
            raise CheckpointError(f"{folder} holds {few(there)}: {hint}")

    ranks.collective_call(doing, look)
    found = _gathered(model, kept=leads, dtype=dtype)

    def write() -> None:
        if leads:
            _write(model, folder, found)
            if files is not None:
                files(folder)

    ranks.collective_call(doing, write)
