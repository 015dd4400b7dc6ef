"""The options of the demonstration, and the task made from them.

The text is the bytes of files, split by position into a part to train on and a held-out part. By default, it is the
sources of the Python standard library, which every machine has.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.arguments import Task, TrainingArguments
from flatfsdp.trainer.callbacks import Callback, SampleText
from flatfsdp.trainer.data_loading import TokenWindows
from flatfsdp.trainer.demo.model import ByteTransformer
from flatfsdp.trainer.hub.records import files_below
from flatfsdp.trainer.objectives import CausalLM
from flatfsdp.trainer.settings import Field, Settings, dataclass, setting
from flatfsdp.trainer.settings.types import Count, FilePath, Text, Whole

# Third-party packages, and files that are mostly data: tests, which are a third of the bytes, and tables.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)

# Steps, so that two runs are equal; minutes, for machines that are slower than expected.
DEFAULTS = TrainingArguments(
    steps=1200, minutes=1.5, batch=8, lr=4e-3, warmup=0.05, weight_decay=0.1, clip=1.0, eval_batches=64,
    plot=True,
)  # fmt: skip
"""Default settings of a run."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Settings):
    """The text, and the model of its bytes.

    Raises:
        ConfigTypeError, ConfigValueError: at construction, for a field or a combination that is not accepted.
    """

    text: FilePath | None = setting(
        None,
        "a file, or a folder whose files are read in sorted order (default: the sources of Python's standard library)",
    )
    valid_part: Annotated[float, Field(gt=0, lt=1)] = setting(
        0.05, "fraction of the bytes, at the end, to hold out for evaluation"
    )
    layers: Count = setting(2, "number of transformer blocks")
    width: Count = setting(128, "features per position")
    heads: Count = setting(4, "number of attention heads; twice as many must divide the width")
    context: Annotated[int, Field(ge=2)] = setting(64, "bytes per sequence")
    sample: Whole = setting(300, "bytes of text to generate at the end")
    prompt: Text = setting("def ", "beginning of that text")

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            # Rotary positions turn pairs of features, so every head needs an even number of them.
            self.refuse("heads", f"{self.called('width')} {self.width} must be a multiple of twice the number of heads")

    def held_out(self, size: int | None = None) -> int:
        """The number of bytes held out at the end of a text of `size` bytes; None for this text's size, from its files.

        Raises:
            ConfigValueError: the text does not exist, or a part of it is too short for one sequence.
        """
        size = sum(file.stat().st_size for file in corpus_files(self.text)) if size is None else size
        valid = int(size * self.valid_part)
        if min(size - valid, valid) < self.context:
            raise ConfigValueError(
                f"text: {size} bytes leave {size - valid} for training and {valid} for evaluation; "
                f"context={self.context} needs at least that many of each"
            )
        return valid

    def task(self) -> Task:
        """The task; the text is read when a rank first needs it."""
        train, valid = (partial(_windows, self, part) for part in (0, 1))
        return Task(model=self.model, train_data=train, eval_data=valid, objective=CausalLM())

    def model(self) -> ByteTransformer:
        """The model, untrained."""
        return ByteTransformer(width=self.width, layers=self.layers, heads=self.heads, context=self.context)

    def callbacks(self) -> list[Callback]:
        """The callback that generates text at the end, if any."""
        if not self.sample:
            return []
        sample = SampleText(
            self.prompt,
            length=self.sample,
            context=self.context,
            encode=encode,
            decode=decode,
            only_at_end=True,
            temperature=temperature,
        )
        return [sample]


def corpus_files(path: Path | None) -> list[Path]:
    """The files of the text, in sorted order: `path` itself, the files below it, or the standard library's sources.

    Raises:
        ConfigValueError: `path` does not exist, or there is no file below it.
    """
    if path is None:
        sources = []
        for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
            inside[:] = {*inside} - SKIPPED_FOLDERS  # walks through these only
            sources += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted(sources)
    if not (path.is_file() or path.is_dir()):
        raise ConfigValueError(f"text: there is no file or folder {str(path)!r}")
    files = files_below(path)
    if not files:
        raise ConfigValueError(f"text: the folder {str(path)!r} holds no files")
    return files


def encode(text: str) -> list[int]:
    """The bytes of `text`."""
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    """The text of bytes, with invalid ones replaced."""
    return bytes(tokens).decode(errors="replace")


def temperature(byte: int) -> float:
    """The temperature after `byte`: low inside words, so that they are spelled as learned, and higher for the next word
    and the indentation of lines. (Runs of blanks would never end otherwise.)"""
    return 0.3 if chr(byte).isalpha() else 0.8


@lru_cache(1)
def _parts(options: DemoOptions) -> tuple[Tensor, Tensor]:
    """The training bytes and the held-out bytes; uint8, 1-D; read once."""
    joined = bytearray(b"".join(file.read_bytes() for file in corpus_files(options.text)))
    valid = options.held_out(len(joined))
    train, held_out = torch.frombuffer(joined, dtype=torch.uint8).split([len(joined) - valid, valid])
    return train, held_out


def _windows(options: DemoOptions, part: int) -> TokenWindows:
    return TokenWindows(_parts(options)[part], context=options.context)
