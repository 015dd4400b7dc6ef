"""Models of transformers: built without weights, initialized from the meta device, saved in their format.

transformers is imported only by `build_pretrained`; the other functions recognize its objects by their methods. Weights
are read and written by `flatfsdp.checkpoint.load_safetensors` and `export_safetensors`, under their names in the
model, which are those that `from_pretrained` expects.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatfsdp.errors import UsageError, refuse_type, refuse_value
from flatfsdp.trainer.model.fronts import class_of, inside

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def build_pretrained(
    pretrained: str | os.PathLike[str] | Any, *, device: str = "cpu", config: Any = None, kind: Any = None
) -> nn.Module:
    """The model that a folder's `config.json` describes, without its weights, in fp32 and in training mode.

    Shard it, then `flatfsdp.checkpoint.load_safetensors(model, folder)`: no rank ever holds more than its elements if
    it was built on the meta device.

    Args:
        pretrained: the folder, or a config of transformers.
        device: "cpu", where weights are random; or "meta", where they have no memory until the model is sharded.
        config: replaces the folder's config.
        kind: a class of transformers' auto models, for a config that names no architecture; None for causal ones.

    Raises:
        ConfigValueError: there is no `config.json`, another device, or a transformers before version 5 for "meta".
        ImportError: transformers is not installed.
    """
    import transformers

    if device not in ("cpu", "meta"):
        refuse_value(
            "build_pretrained: device", device, "'cpu' or 'meta'; sharding moves the model to where it computes"
        )
    if device == "meta" and int(transformers.__version__.partition(".")[0]) < 5:
        # Before, initialisation left buffers to the constructor.
        refuse_value("build_pretrained: device", device, f"'cpu', with transformers {transformers.__version__}")
    folder = Path(pretrained) if isinstance(pretrained, (str, os.PathLike)) else None
    if folder is not None and not (folder / CONFIG).is_file():
        refuse_value(
            "build_pretrained: pretrained", str(folder), f"a folder with {CONFIG}, or a config of transformers"
        )
    if config is None:
        config = (
            pretrained if folder is None else transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        )
    named = getattr(transformers, next(iter(getattr(config, "architectures", None) or ()), ""), None)
    with torch.device(device):
        model = named(config) if named is not None else (kind or transformers.AutoModelForCausalLM).from_config(config)
    if folder is not None and (folder / GENERATION_CONFIG).is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    trained: nn.Module = model.train()
    return trained


def files_of(model: nn.Module, tokenizer: Any = None) -> Callable[[Path], None] | None:
    """A function that writes the files that `from_pretrained` reads besides weights into a folder; None without any.

    They are `config.json` and `generation_config.json` of a model of transformers in its current state, and the files
    that `tokenizer` (or a processor) saves. The function communicates nothing and holds no parameters: one rank calls
    it, from any thread.

    Args:
        model: sharded or not. Adapter models of PEFT have no config of their own, so only the tokenizer is written.
        tokenizer: anything with `save_pretrained(folder)`; None for none.

    Raises:
        ConfigTypeError: `tokenizer` cannot be saved.
    """
    if tokenizer is not None and not _can_be_saved(tokenizer):
        refuse_type("tokenizer", tokenizer, "a tokenizer, a processor, or anything with save_pretrained()")
    own = inside(model)
    saved = [] if tokenizer is None else [tokenizer]
    config: Any = getattr(own, "config", None)
    if _can_be_saved(config) and not hasattr(own, "peft_config"):
        config = copy.deepcopy(config)
        config.architectures = [class_of(own).__name__]
        dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(dtype).removeprefix("torch."))
        saved.append(config)
        generation = getattr(own, "generation_config", None)
        if _can_be_saved(generation):
            saved.append(copy.deepcopy(generation))

    def write(folder: Path) -> None:
        for each in saved:
            each.save_pretrained(folder)

    return write if saved else None


def initializer_of(model: nn.Module) -> Callable[[nn.Module], None] | None:
    """`param_init_fn` for a model with models of transformers in it; None where there are none.

    Raises (the returned function):
        UsageError: floating-point values of a module are still missing.
    """
    owners: dict[nn.Module, Any] = {}
    for owner in model.modules():
        if callable(getattr(owner, "_init_weights", None)):
            owners.update(dict.fromkeys(owner.modules(), owner))  # the innermost takes precedence
    if not owners:
        return None

    def initialize(module: nn.Module) -> None:
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        floating = [(name, tensor) for name, tensor in own if tensor.is_floating_point()]
        for _, tensor in floating:
            tensor.fill_(torch.nan)
        if module in owners:
            owners[module]._init_weights(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        missing = [name for name, tensor in floating if tensor.isnan().any()]
        if missing:
            raise UsageError(
                f"{', '.join(missing)} of a {type(module).__name__} on the meta device were not initialized by "
                f"{type(owners.get(module, module)).__name__}. Build the model on the CPU, or pass param_init_fn="
            )

    return initialize


def without_cache(model: nn.Module) -> dict[str, Any]:
    """The argument that disables the cache of keys and values in a model of transformers; empty for others.

    Training reads no cache, and a recomputed layer would add to it twice.
    """
    own = plain(model)
    uses_it = getattr(getattr(own, "config", None), "use_cache", False)
    return {"use_cache": False} if uses_it and "use_cache" in inspect.signature(own.forward).parameters else {}


def is_causal(model: nn.Module) -> bool:
    """Whether `model` is a model of transformers that predicts the next token."""
    own = plain(model)
    named = class_of(own).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return _can_be_saved(own) and (named or getattr(own, "loss_type", None) == "ForCausalLM")


def classifies(model: nn.Module) -> bool:
    """Whether `model` is a model of transformers that sorts sequences into more than one class."""
    own = plain(model)
    config = getattr(own, "config", None)
    named = class_of(own).__name__.endswith("ForSequenceClassification")
    several = getattr(config, "num_labels", 1) > 1
    return named and several and getattr(config, "problem_type", None) in (None, "single_label_classification")


def takes_input_ids(model: nn.Module) -> bool:
    """Whether the token argument of `model` has the name used by transformers."""
    return "input_ids" in inspect.signature(plain(model).forward).parameters


def plain(model: nn.Module) -> nn.Module:
    """The model as its author wrote it, without the wrappers of FSDP and PEFT."""
    own = inside(model)
    base = getattr(own, "get_base_model", None)
    return base() if callable(base) else own


def _can_be_saved(thing: Any) -> bool:
    return callable(getattr(thing, "save_pretrained", None))
