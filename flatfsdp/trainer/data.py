"""The text: bytes of files, split by position into a part to train on and a part held out.

The default text is one that every machine has: the sources of the Python standard library.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flatfsdp.errors import ConfigValueError

# Other people's packages, and tests, which are a third of the bytes and full of data.
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


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
        raise ConfigValueError(f"argument --data: there is no file or folder {str(path)!r}")
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise ConfigValueError(f"argument --data: the folder {str(path)!r} holds no files")
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
            ConfigValueError: a part is too short for one sequence of `context` bytes and the byte after it.
        """
        valid = int(size * valid_part)
        split = cls(train=size - valid, valid=valid)
        if min(split.train, split.valid) < context + 1:
            raise ConfigValueError(
                f"argument --data: {size} bytes make {split.train} to train on and {split.valid} to validate on; "
                f"--context {context} needs at least {context + 1} of each"
            )
        return split


def check_corpus(path: Path | None, *, valid_part: float, context: int) -> None:
    """Refuse a text that `Corpus.read` would refuse, from the sizes of its files alone."""
    Split.of(sum(file.stat().st_size for file in corpus_files(path)), valid_part=valid_part, context=context)


@dataclass(frozen=True)
class Corpus:
    """The text in memory.

    Attributes:
        train: uint8, 1-D, the first part of the text.
        valid: uint8, 1-D, the rest, never trained on.
        context: bytes per sequence.
    """

    train: Tensor
    valid: Tensor
    context: int

    @classmethod
    def read(cls, path: Path | None, *, valid_part: float, context: int) -> Corpus:
        """Read the text at `path`, see `corpus_files`."""
        joined = bytearray(b"".join(file.read_bytes() for file in corpus_files(path)))
        text = torch.frombuffer(joined, dtype=torch.uint8)
        split = Split.of(text.numel(), valid_part=valid_part, context=context)
        return cls(train=text[: split.train], valid=text[split.train :], context=context)

    def sample(self, batch: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`batch` random sequences to train on and, for each position, the byte after it; (batch, context) int64."""
        starts = torch.randint(self.train.numel() - self.context, (batch,), generator=generator)
        return self._windows(self.train, starts)

    def validation(self, count: int, *, batch: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's batches of about `count` sequences spread evenly over the held-out part.

        Every rank gets the same number of batches of the same shape: under FSDP all ranks have to call forward
        equally often.
        """
        rounds = max(1, count // (batch * world))
        last = self.valid.numel() - self.context - 1
        starts = torch.linspace(0, last, rounds * world * batch, dtype=torch.float64).long()
        for own in starts.view(rounds, world, batch)[:, rank]:
            yield self._windows(self.valid, own)

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]
