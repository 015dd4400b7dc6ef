"""Models of transformers by name: built on the meta device and sharded, then each rank reads its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from flatfsdp import checkpoint
from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.hub.adapters import LoraOptions, add_lora, name_in_base
from flatfsdp.trainer.hub.cache import folder_of, library
from flatfsdp.trainer.model.hugging_face import build_pretrained
from flatfsdp.trainer.settings import Settings, dataclass, setting
from flatfsdp.trainer.settings.types import Count, Name, PlainValidator

PREFIX = "hf:"
_FOUR_BITS = ("nf4", "fp4")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Settings):
    """Changes to a model of transformers, `--model hf:NAME`, before it is sharded."""

    from_scratch: bool = setting(False, "start from random weights, using only the model's configuration")
    labels: Count | None = setting(None, "number of classes; the model gets a head that classifies sequences")
    lora: LoraOptions | None = setting(
        None,
        "train low-rank adapters only: rank=8, alpha=16, targets=q_proj,v_proj or all-linear, and other "
        "arguments of PEFT's LoraConfig",
    )
    quantize: Annotated[str, PlainValidator(Name(_FOUR_BITS))] | None = setting(
        None, "keep the frozen weights under the adapters in 4 bits, with bitsandbytes"
    )

    def __post_init__(self) -> None:
        if self.quantize is not None and self.lora is None:
            self.refuse("quantize", f"4-bit weights cannot be trained: it applies only with {self.called('lora')}")
        if self.quantize is not None and self.from_scratch:
            self.refuse("quantize", f"{self.called('from_scratch')} loads no weights to quantize")


class Pretrained:
    """A causal language model or a classifier of transformers, by its folder or its name on the Hugging Face Hub.

    As the `model` of a `Task`: built on the meta device, sharded, then filled from the folder's safetensors files; each
    rank reads only its elements. Its tokenizer becomes the task's. Folders with only `pytorch_model.bin`, and weights
    in 4 bits, are loaded unsharded on each rank first.

    Args:
        name: a folder with `config.json`, or a repository, for which the cache is searched first.
        options: the fields of `ModelOptions`.

    Raises:
        ConfigTypeError, ConfigValueError: an option that is not accepted.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.options = ModelOptions(**options)

    def __repr__(self) -> str:
        return f"{PREFIX}{self.name}"

    @cached_property
    def folder(self) -> Path:
        """The folder of its files. Raises ConfigValueError where there is none."""
        folder = folder_of(self.name)
        if not (folder / "config.json").is_file():
            raise ConfigValueError(f"{self}: {folder} has no config.json, so it is not a model of transformers")
        return folder

    @property
    def loads_sharded(self) -> bool:
        """Whether ranks read only the weights that they own, after sharding."""
        options = self.options
        return not options.from_scratch and options.quantize is None and any(self.folder.glob("*.safetensors"))

    def make(self) -> nn.Module:
        """The model, before it is sharded; on the meta device where its weights are loaded later.

        Raises:
            ConfigValueError: a library is missing, or transformers cannot build it.
        """
        transformers = library("transformers", wanted_by=str(self))
        config = transformers.AutoConfig.from_pretrained(self.folder, local_files_only=True)
        kind = transformers.AutoModelForCausalLM
        if self.options.labels is not None:
            config.num_labels = self.options.labels
            config.architectures = None
            kind = transformers.AutoModelForSequenceClassification
        elif any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
            kind = transformers.AutoModelForSequenceClassification
        config.pad_token_id = config.pad_token_id if config.pad_token_id is not None else self._tokenizer_pad()
        if self.loads_sharded or self.options.from_scratch:
            model = build_pretrained(self.folder, device="meta", config=config, kind=kind)
        else:
            model = kind.from_pretrained(self.folder, config=config, local_files_only=True, **self._quantized()).train()
            _keep_storage(model)
        if self.options.lora is None:
            return model
        return add_lora(model, self.options.lora, wanted_by=str(self), classifies=self.options.labels is not None)

    def load_into(self, model: nn.Module) -> None:
        """Read the weights into the sharded `model`, each rank its own elements. Collective.

        Raises:
            CheckpointError: on every rank: files are damaged, or do not fit the model.
        """
        if self.loads_sharded:
            names: Callable[[str], str | None] | None = name_in_base if self.options.lora is not None else None
            # A classification head may be new: it keeps its random values.
            checkpoint.load_safetensors(model, self.folder, strict=self.options.labels is None, names=names)

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer; None where the folder has none."""
        transformers = library("transformers", wanted_by=str(self))
        if not any(self.folder.glob("tokenizer*")) and not any(self.folder.glob("vocab*")):
            return None
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def _tokenizer_pad(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.pad_token_id

    def _quantized(self) -> dict[str, Any]:
        if self.options.quantize is None:
            return {}
        library("bitsandbytes", wanted_by=f"{self} with quantize={self.options.quantize}")
        transformers = library("transformers", wanted_by=str(self))
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=self.options.quantize)
        return {"quantization_config": config}


def _keep_storage(model: nn.Module) -> None:
    """Keep bitsandbytes from converting the storage of weights in an evaluation on a CPU: it does so only once, on the
    gathered weights of that time, and then takes weights that are gathered later for converted ones."""
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False
