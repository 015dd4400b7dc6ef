"""The model's part of a checkpoint as safetensors, so that its folder is one of Hugging Face's, too.

[Note: weights] The tensors of a model then lie in `model.safetensors` (or numbered files with an index) inside the
checkpoint and nowhere else. They are planned, written and checked as the others are ([Note: cached plan]), each element
by one of the ranks that own it, and the manifest says where in those files they lie, as it does of all; a parameter
with several names (a tied one) is there once, and the manifest has it under each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ..engine.layout.layout import ParamSpec, Span
from .crc32 import joined
from .disk import disk
from .hugging_face import BLOCK, INDEX, Files, bytes_in, checksums_of, files_of, index_of, write_interval
from .manifest import SavedFile, SavedTensor
from .plan import PlannedInterval
from .raw import LARGEST, cut, dtype_named, name_of
from .tensor_file import CHECKSUMS, Entry
from .writing import interval_of

__all__ = ["WeightFiles", "is_weight", "is_whole_everywhere"]

_LARGEST_FILE = bytes_in("5GB")


def is_weight(held: PlannedInterval) -> bool:
    """Whether it is a tensor of the model's state dict. What modules nest in their extra state is none."""
    return held.path[0] == "model" and len(held.path) == 2


def is_whole_everywhere(
    tensors: Iterable[PlannedInterval], writes: Sequence[Sequence[PlannedInterval]], nodes: Sequence[int]
) -> bool:
    """Whether on each node the ranks write all of `tensors` between them: `writes` and `nodes` by rank."""
    for node in set(nodes):
        found = {held.key: 0 for held in tensors}
        for rank, mine in enumerate(writes):
            for held in mine if nodes[rank] == node else ():
                if held.key in found:
                    found[held.key] += held.stop - held.start
        if any(found[held.key] < held.spec.numel for held in tensors):
            return False
    return True


@dataclass(frozen=True)
class WeightFiles:
    """How a model lies in safetensors files: the same on all ranks.

    Attributes:
        headers: how each file begins, by its name.
        entries: where each tensor lies, by its key ([Note: keys]); the files are names inside the checkpoint's folder.
    """

    headers: Mapping[str, bytes]
    entries: Mapping[str, Entry]

    @classmethod
    def of(cls, tensors: Iterable[PlannedInterval]) -> WeightFiles:
        """Of any interval of each tensor.

        Raises:
            ConfigTypeError: a dtype that the format does not know.
        """
        keys = {str(held.path[1]): held.key for held in tensors}
        described = [(str(held.path[1]), dtype_named(held.dtype), held.shape) for held in tensors]
        files = files_of(Path(), described, _LARGEST_FILE)
        entries = {keys[entry.name]: entry for _, inside in files.values() for entry in inside}
        return cls({path.name: header for path, (header, _) in files.items()}, entries)

    def create(self, folder: Path) -> None:
        """Make the files in their final sizes."""
        for name, header in self.headers.items():
            with disk().create(folder / name) as file:
                file.write(header, 0)
                file.allocate(self._size(name))  # zeros until they are written

    def write(self, folder: Path, writes: Iterable[PlannedInterval], tensors: Mapping[str, torch.Tensor]) -> None:
        """Write intervals of `tensors` to their places."""
        with torch.no_grad(), Files(folder, write=True) as files:
            for held in writes:
                entry = self.entries[held.key]
                write_interval(files.of(entry), entry, interval_of(held, tensors[held.key]))
            files.sync()

    def conclude(self, folder: Path, checksums: Sequence[Mapping[tuple[str, int], int]]) -> list[SavedFile]:
        """Write what goes with the files, given the checksums of their blocks; all files, for the manifest.

        The weights themselves come first, in the order of `headers`.
        """
        found = {key: crc32 for each in checksums for key, crc32 in each.items()}
        saved = []
        for name in self.headers:
            size = self._size(name)
            sizes = [min(BLOCK, size - start) for start in range(0, size, BLOCK)]
            crc32 = joined((found[name, block], length) for block, length in enumerate(sizes))
            saved.append(SavedFile(name, size, crc32))
        beside = {CHECKSUMS: checksums_of(checksums)}
        if len(self.headers) > 1:
            inside = [[entry for entry in self.entries.values() if entry.file.name == name] for name in self.headers]
            beside[INDEX] = index_of(inside)
        for name, data in beside.items():
            disk().write_file(folder / name, data)
            saved.append(SavedFile.of(name, data))
        return saved

    def saved(self, first: int) -> dict[str, SavedTensor]:
        """Where each tensor lies, for the manifest, in whose list the files begin at number `first`."""
        numbers = {name: first + place for place, name in enumerate(self.headers)}
        found = {}
        for key, entry in self.entries.items():
            # In pieces, each of them a box, for what is to be read into another order of memory.
            most = LARGEST // entry.dtype.itemsize
            pieces = [box.span for box in cut(ParamSpec(entry.name, entry.shape), Span(0, prod(entry.shape)), most)]
            row = [numbers[entry.file.name], 0]
            for span in pieces:
                row += (span.numel, entry.offset + span.start * entry.dtype.itemsize)
            found[key] = SavedTensor(("model", entry.name), name_of(entry.dtype), entry.shape, None, [row])
        return found

    def _size(self, name: str) -> int:
        header = len(self.headers[name])
        return max(
            (each.offset + each.size for each in self.entries.values() if each.file.name == name), default=header
        )
