"""Records of text by name: from files, from lines of JSON, from datasets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.data_loading.datasets import JsonLines
from flatfsdp.trainer.hub.cache import library

SOURCES = ("text", "jsonl", "hf")


class Records:
    """Records in an order, each a mapping; with a length unless they are a stream.

    Attributes:
        identity: a text that changes whenever the records do.
    """

    def __init__(self, name: str, source: Any, identity: str) -> None:
        self.name, self._source = name, source
        self.identity = hashlib.sha256(identity.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self._mapping(self._source[number])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(self._mapping, self._source)

    @cached_property
    def first(self) -> Mapping[str, Any]:
        """The first record, which shows the form of the others. Raises ConfigValueError where there is none."""
        state = self.state_dict() if hasattr(self._source, "state_dict") else None
        found = next(iter(self), None)
        if found is None:
            raise ConfigValueError(f"{self.name}: there are no records")
        if state is not None:
            self.load_state_dict(state)
        return found

    def state_dict(self) -> Any:
        """The position in a stream."""
        return self._source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue from such a position."""
        self._source.load_state_dict(state)

    def _mapping(self, record: Any) -> Mapping[str, Any]:
        if isinstance(record, str):
            return {"text": record}
        if not isinstance(record, Mapping):
            raise ConfigValueError(f"{self.name}: a record is a {type(record).__name__}. Accepted: an object, or text")
        return record


class _TextFiles:
    """Each file is one text."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> str:
        return self._files[number].read_text(encoding="utf-8", errors="replace")


def records_of(name: str, *, split: str, streaming: bool = False) -> Records:
    """The records for `name`: `text:PATH`, `jsonl:FILE`, `hf:DATASET` or `hf:DATASET:CONFIG`.

    Raises:
        ConfigValueError: there are none of that name; files cannot be streamed; `datasets` is missing.
    """
    kind, _, rest = name.partition(":")
    if kind == "hf":
        return _of_library(name, rest, split, streaming)
    if streaming:
        raise ConfigValueError(f"streaming: {name} is read from local files; only hf:DATASET can be streamed")
    path = Path(rest).expanduser()
    if kind == "jsonl":
        return Records(name, JsonLines(path), _identity([path]))
    files = files_below(path)
    if not files:
        raise ConfigValueError(f"{name}: there is no file, and no folder with files, at {str(path)!r}")
    return Records(name, _TextFiles(files), _identity(files))


def _of_library(name: str, rest: str, split: str, streaming: bool) -> Records:
    datasets = library("datasets", wanted_by=name)
    place, _, config = rest.partition(":")
    folder = Path(place).expanduser()
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(folder))
            found = found[split] if isinstance(found, Mapping) else found
            found = found.to_iterable_dataset() if streaming else found
        else:
            found = datasets.load_dataset(place, config or None, split=split, streaming=streaming)
    except Exception as error:  # many classes: of files, of the network, of names
        why = str(error).strip().partition("\n")[0]
        raise ConfigValueError(f"{name}: cannot load split {split!r}: {type(error).__name__}: {why}") from error
    return Records(name, found, json.dumps([rest, split, getattr(found, "_fingerprint", "")]))


def files_below(path: Path) -> list[Path]:
    """`path` itself if it is a file, or the files below it in sorted order, without hidden ones."""
    if path.is_file():
        return [path]
    files = (each for each in path.rglob("*") if each.is_file())
    return sorted(each for each in files if not any(part.startswith(".") for part in each.relative_to(path).parts))


def _identity(files: list[Path]) -> str:
    looked = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return json.dumps(looked)
