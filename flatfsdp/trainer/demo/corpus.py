"""The text: bytes of files, split by position into a part to train on and a part held out.

The default text is one that every machine has: the sources of the Python standard library.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flatfsdp.errors import ConfigValueError

# Other people's packages, and what is full of data: tests, which are a third of the bytes, and tables.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)


def corpus_files(path: Path | None) -> list[Path]:
    """The files of the text, in sorted order: `path` itself, the files below it, or the standard library's sources.

    Raises:
        ConfigValueError: `path` does not exist, or there is no file below it.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return sorted(
            file for file in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts[:-1])
        )
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigValueError(f"text: there is no file or folder {str(path)!r}")
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise ConfigValueError(f"text: the folder {str(path)!r} holds no files")
    return files


@dataclass(frozen=True)
class Split:
    """How many bytes of the text are trained on and how many are held out."""

    train: int
    valid: int

    @classmethod
    def of(cls, size: int, *, valid_part: float, context: int) -> Split:
        """Split `size` bytes.

        Raises:
            ConfigValueError: a part is too short for one sequence of `context` bytes.
        """
        valid = int(size * valid_part)
        split = cls(train=size - valid, valid=valid)
        if min(split.train, split.valid) < context:
            raise ConfigValueError(
                f"text: {size} bytes make {split.train} to train on and {split.valid} to evaluate on; "
                f"context {context} needs as many of each"
            )
        return split


@dataclass(frozen=True)
class Corpus:
    """The text in memory.

    Attributes:
        train: uint8, 1-D, the first part of the text.
        valid: uint8, 1-D, the rest, never trained on.
    """

    train: Tensor
    valid: Tensor

    @classmethod
    def read(cls, path: Path | None, *, valid_part: float, context: int) -> Corpus:
        """Read the text at `path`, see `corpus_files`."""
        joined = bytearray(b"".join(file.read_bytes() for file in corpus_files(path)))
        text = torch.frombuffer(joined, dtype=torch.uint8)
        split = Split.of(text.numel(), valid_part=valid_part, context=context)
        return cls(train=text[: split.train], valid=text[split.train :])


def split_of(path: Path | None, *, valid_part: float, context: int) -> Split:
    """How `Corpus.read` would split the text, from the sizes of its files alone; refuses what that would refuse."""
    return Split.of(sum(file.stat().st_size for file in corpus_files(path)), valid_part=valid_part, context=context)
