"""The model's part of a checkpoint as safetensors, so that its folder is also one for Hugging Face.

[Note: weights] The tensors of a model then lie only in `model.safetensors` (or numbered files with an index) inside the
checkpoint. They are planned, written and checked like the others ([Note: cached plan]), each element by one of the
ranks that own it, and the manifest has their offsets in those files, as for all tensors. A parameter
with several names (a tied one) is stored once, and the manifest has it under each of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import torch

from ..engine.state.owned_interval import OwnedInterval
from ..errors import CheckpointError
from . import form
from .disk import Files, disk
from .manifest import SavedFile, SavedTensor
from .plan import PlannedInterval
from .reading import checksum
from .tensor_file import CHECKSUMS, SINGLE, SUFFIX, Entry, header_of, write_interval

INDEX = f"{SINGLE}.index.json"
BLOCK = 2**26  # bytes of a file for each checksum
_LARGEST_FILE = 5 * 10**9

Described = tuple[str, torch.dtype, tuple[int, ...]]  # a tensor's name, dtype and shape
BlockChecksums = Mapping[tuple[str, int], int]  # by name of the file and number of the block


def is_weight(interval: PlannedInterval) -> bool:
    """Whether it is a tensor of the model's state dict. Tensors nested in extra states of modules are not."""
    return interval.path[0] == "model" and len(interval.path) == 2


def is_whole_everywhere(
    tensors: Iterable[PlannedInterval], writes: Sequence[Sequence[PlannedInterval]], nodes: Sequence[int]
) -> bool:
    """Whether the ranks of each node together write all of `tensors`: `writes` and `nodes` are by rank."""
    for node in set(nodes):
        found = {interval.key: 0 for interval in tensors}
        for rank, mine in enumerate(writes):
            for interval in mine if nodes[rank] == node else ():
                if interval.key in found:
                    found[interval.key] += interval.stop - interval.start
        if any(found[interval.key] < interval.spec.numel for interval in tensors):
            return False
    return True


@dataclass(frozen=True)
class WeightFiles:
    """The layout of a model in safetensors files: the same on all ranks.

    Attributes:
        headers: the header of each file, by its name.
        entries: the offset of each tensor, by its name; the files are names inside a folder.
    """

    headers: Mapping[str, bytes]
    entries: Mapping[str, Entry]

    @classmethod
    def of(cls, tensors: Iterable[Described], largest: int | None = None) -> WeightFiles:
        """The layout of these tensors in files of at most `largest` bytes, or of one larger tensor.

        Raises:
            ConfigTypeError: a dtype that the format does not know.
        """
        largest = _LARGEST_FILE if largest is None else largest
        groups: list[list[Described]] = [[]]
        room = largest
        for tensor in tensors:
            size = prod(tensor[2]) * tensor[1].itemsize
            if size > room and groups[-1]:
                groups.append([])
                room = largest
            groups[-1].append(tensor)
            room -= size
        count = len(groups)
        names = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}{SUFFIX}" for n in range(count)]
        files = {name: header_of(Path(name), group) for name, group in zip(names, groups, strict=True)}
        entries = {entry.name: entry for _, inside in files.values() for entry in inside}
        return cls({name: header for name, (header, _) in files.items()}, entries)

    def create(self, folder: Path) -> None:
        """Make the files in their final sizes."""
        for name, header in self.headers.items():
            with disk().create(folder / name) as file:
                file.write(header, 0)
                file.allocate(self._size(name))  # zeros until they are written

    def write(self, folder: Path, pieces: Iterable[tuple[str, OwnedInterval]]) -> None:
        """Write pieces of tensors, given with the tensors' names, to their offsets."""
        with torch.no_grad(), Files(folder, write=True) as files:
            for name, piece in pieces:
                write_interval(files[self.entries[name].file], self.entries[name], piece)
            files.sync()

    def checksums(self, folder: Path, share: int, shares: int) -> BlockChecksums:
        """The checksums of share number `share` of `shares` of the blocks of all files."""
        return block_checksums([folder / name for name in self.headers], share, shares)

    def index(self) -> bytes | None:
        """The index (tensors to files) in the format that readers expect; None for a single file."""
        if len(self.headers) == 1:
            return None
        weight_map = {entry.name: entry.file.name for entry in self.entries.values()}
        total = sum(entry.size for entry in self.entries.values())
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"

    def conclude(self, folder: Path, checksums: Sequence[BlockChecksums]) -> list[SavedFile]:
        """Write the files that accompany the weights of a checkpoint, given the checksums of their blocks. Returned:
        all files, for the manifest.

        The weights themselves come first, in the order of `headers`.
        """
        found = {key: crc32 for each in checksums for key, crc32 in each.items()}
        saved = []
        for name in self.headers:
            size = self._size(name)
            sizes = [min(BLOCK, size - start) for start in range(0, size, BLOCK)]
            crc32 = joined((found[name, block], length) for block, length in enumerate(sizes))
            saved.append(SavedFile(name, size, crc32))
        for name, data in ((CHECKSUMS, checksums_of(checksums)), (INDEX, self.index())):
            if data is not None:
                disk().write_file(folder / name, data)
                saved.append(SavedFile.of(name, data))
        return saved

    def saved(self, first: int) -> list[SavedTensor]:
        """The chunks of each tensor of a model, for the manifest, in whose list the files begin at number `first`."""
        numbers = {name: first + index for index, name in enumerate(self.headers)}
        return [each.saved(numbers[each.file.name], ("model", each.name)) for each in self.entries.values()]

    def _size(self, name: str) -> int:
        header = len(self.headers[name])
        return max(
            (each.offset + each.size for each in self.entries.values() if each.file.name == name), default=header
        )


def block_checksums(files: Sequence[Path], share: int, shares: int) -> BlockChecksums:
    """The checksums of share number `share` of `shares` of the blocks, by name of the file and number of the block."""
    blocks = [(path, block) for path in files for block in range(-(-path.stat().st_size // BLOCK))]
    found = {}
    for path, block in blocks[share::shares]:
        found[path.name, block] = checksum(path, block * BLOCK, min(path.stat().st_size, (block + 1) * BLOCK))
    return found


def checksums_of(found: Sequence[BlockChecksums], *, beside: Sequence[str] = ()) -> bytes:
    """The checksum file of weights: the checksums of their blocks, and the other files written with them."""
    files: dict[str, list[str]] = {}
    for name, block in sorted(key for each in found for key in each):
        files.setdefault(name, []).append(f"{next(each[name, block] for each in found if (name, block) in each):08x}")
    others = sorted({name.partition("/")[0] for name in beside})
    return json.dumps({"block": BLOCK, "crc32": files, "beside": others}, indent=1).encode() + b"\n"


def verify_checksums(files: Sequence[Path], share: int, shares: int) -> None:
    """Compare share number `share` of `shares` of the blocks of a folder's files with their checksums, if any.

    Raises:
        CheckpointError: naming the blocks that differ.
    """
    path = files[0].parent / CHECKSUMS if files else Path(CHECKSUMS)
    if not path.is_file():
        return
    try:
        by_file = form.mapping(form.mapping(form.parse(disk().read_file(path)), "it").get("crc32"), "crc32")
        sums = {name: form.items(each, f"crc32 of {name}") for name, each in by_file.items()}
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    known = [file for file in files if file.name in sums]
    damaged = [
        f"{name} (bytes {block * BLOCK} to {(block + 1) * BLOCK})"
        for (name, block), crc32 in block_checksums(known, share, shares).items()
        if sums[name][block : block + 1] != [f"{crc32:08x}"]
    ]
    if damaged:
        raise CheckpointError(f"{files[0].parent}: damaged, or changed since it was exported: {', '.join(damaged)}")


# [Note: CRC-32] A CRC is the remainder of the data, read as a polynomial over the integers modulo 2. So the CRC of two
# concatenated blocks is that of the first, times x^(bits of the second), plus that of the second. Polynomials are
# 32-bit integers here, the highest bit being x^0, as in zlib.
_MODULUS = 0xEDB88320  # without its x^32
_ONE = 1 << 31
_X = 1 << 30


def joined(blocks: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of concatenated blocks, each given as (CRC-32, bytes): several ranks share the reading of one file."""
    whole = 0
    for crc32, size in blocks:
        whole = _times(_shift(size), whole) ^ crc32
    return whole


@lru_cache(maxsize=64)
def _shift(size: int) -> int:
    """x^(8 * size)."""
    power, square, exponent = _ONE, _X, 8 * size
    while exponent:
        if exponent & 1:
            power = _times(power, square)
        square = _times(square, square)
        exponent >>= 1
    return power


def _times(one: int, other: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_MODULUS if other & 1 else 0)
    return product
