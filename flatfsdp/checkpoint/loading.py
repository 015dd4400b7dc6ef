"""Loading into an existing nested state: choosing a checkpoint, checking it, and reading its tensors and values."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import torch

from ..engine.agreement.once_per_job import warn_once_per_job
from ..engine.base.plain_data import dtype_named
from ..engine.state.optim.loading import TensorSpec
from ..errors import CheckpointError, few
from . import manifest as manifest_file
from . import metadata
from .disk import Files
from .folders import CheckpointFolder, candidates, choose
from .manifest import NAME, Manifest, SavedTensor, id_in
from .nested_state import decode, plain, unflatten
from .ranks import BRIEF, CheckpointRanks
from .reading import TensorReader, verify
from .validation import prove

Wanted = Callable[[tuple[str | int, ...]], bool]  # by the keys that lead to a value


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint.

    Attributes:
        folder: the one that it is in, which is not always the path that was given ([Note: siblings]).
        manifest: its table of contents.
        here: for each rank, the names of the files that it sees.
    """

    folder: FilePath
    manifest: Manifest
    here: Sequence[frozenset[str]] = ()

    @property
    def missing(self) -> list[str]:
        """The files that no rank sees."""
        return [file.name for file in self.manifest.files if not any(file.name in each for each in self.here)]

    def require_whole(self) -> None:
        """Require that some rank sees each file.

        Raises:
            CheckpointError: naming the files that no rank sees.
        """
        if self.missing:
            raise CheckpointError(self._lacks())

    def require_seen(self, keys: Iterable[str]) -> None:
        """Require that all elements of these tensors lie in files that some rank sees; warn about the other files that
        no rank sees.

        Raises:
            CheckpointError: naming files and tensors.
        """
        if not self.missing:
            return
        lost = [key for key in keys if not self.sees(frozenset().union(*self.here), key)]
        if lost:
            raise CheckpointError(f"{self._lacks()}. The missing files hold elements of {few(lost)}")
        warn_once_per_job(f"{self._lacks()}. They hold nothing that is being loaded")

    def _lacks(self) -> str:
        names = [str(self.folder / name) for name in self.missing]
        problem = f"{few(names)} {'are' if len(names) > 1 else 'is'} missing{' on all ranks' * (len(self.here) > 1)}"
        return (
            f"{problem}. After a save with per_node=True each node has its own ranks' files: copy them into one folder"
        )

    def tensors(self) -> dict[str, TensorSpec]:
        """All tensors, by key ([Note: keys])."""
        saved = self.manifest.tensors.items()
        return {key: TensorSpec(each.shape, dtype_named(each.dtype)) for key, each in saved}

    def empty_tensors(self, wanted: Wanted = lambda path: True) -> dict[str, torch.Tensor]:
        """Memory on the CPU for the tensors that are `wanted`, by their keys."""
        return {key: _empty(saved) for key, saved in self.manifest.tensors.items() if wanted(plain(saved.path))}

    def nested(self, tensors: Mapping[str, torch.Tensor], wanted: Wanted = lambda path: True) -> dict[Any, Any]:
        """The saved state, nested: the plain values that are `wanted`, and `tensors` by their keys."""
        paths = {key: path for key, (path, _) in self.manifest.values.items() if wanted(plain(path))}
        values = {key: decode(self.manifest.values[key][1]) for key in paths}
        paths |= {key: self.manifest.tensors[key].path for key in tensors}
        return unflatten({**values, **tensors}, paths)

    def read(
        self,
        ranks: CheckpointRanks,
        doing: str,
        targets: Mapping[str, torch.Tensor],
        sections: Collection[str],
        wanted: Wanted,
    ) -> tuple[dict[Any, Any], Any]:
        """Fill `targets`. Returned: the targets with the plain values whose first names are in `sections`, nested; and
        the `wanted` extra values. Collective."""
        inside = {key: target for key, target in targets.items() if key in self.manifest.tensors}

        def prepare() -> dict[str, torch.Tensor]:
            extra = self.empty_tensors(lambda path: path[0] == "extra" and wanted(path[1:]))
            self.require_seen([*inside, *extra])
            return extra

        extra = ranks.together(doing, prepare)
        self._read_all(ranks, doing, inside, extra)
        read = self.nested(inside, lambda path: path[0] in sections)
        return read, self.nested(extra, lambda path: path[0] == "extra" and wanted(path[1:])).get("extra")

    def read_tensors(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Read tensors by key, in place: intervals and whole tensors."""
        try:
            with torch.no_grad(), Files(self.folder) as files:
                reader = TensorReader([self.folder / file.name for file in self.manifest.files], files)
                for key, target in targets.items():
                    reader.read(self.manifest.tensors[key], target)
        finally:  # files of a replaced checkpoint may be gone, or have other contents of the same size
            if targets and id_in(self.folder) != self.manifest.id:
                raise CheckpointError(f"{self.folder} was replaced by another save while it was read; load it again")

    def _read_all(
        self,
        ranks: CheckpointRanks,
        doing: str,
        own: Mapping[str, torch.Tensor],
        shared: Mapping[str, torch.Tensor],
    ) -> None:
        """Read tensors by key, in place: `own` from files that this rank sees, and `shared`, whole tensors, from files
        that any rank sees. Collective."""
        mine = {key: each for key, each in shared.items() if ranks.rank in self._readers(key)}
        ranks.exchange(doing, lambda: self.read_tensors({**own, **mine}))
        if all(here == self.here[0] for here in self.here):
            return
        missing = ranks.exchange(doing, lambda: shared.keys() - mine.keys())

        def read_for_others() -> dict[str, torch.Tensor]:
            keys = {key for each in missing for key in each if self._readers(key)[0] == ranks.rank}
            read = {key: _empty(self.manifest.tensors[key]) for key in keys}
            self.read_tensors(read)
            return read

        for read in ranks.exchange(doing, read_for_others):
            for key in read.keys() & missing[ranks.rank]:
                shared[key].copy_(read[key])

    def _readers(self, key: str) -> list[int]:
        """The ranks that see the files with the tensor `key`.

        Raises:
            CheckpointError: no rank sees all of them.
        """
        readers = [rank for rank, here in enumerate(self.here) if self.sees(here, key)]
        if not readers:
            raise CheckpointError(f"{self.folder}: no rank sees all files with {key!r}; copy them into one folder")
        return readers

    def sees(self, names: Collection[str], key: str) -> bool:
        """Whether the files `names` have all elements of a tensor."""
        found: dict[int, bool] = {}
        for chunk in self.manifest.tensors[key].chunks():
            found[chunk.start] = found.get(chunk.start, False) or self.manifest.files[chunk.file].name in names
        return all(found.values())


def is_foreign(path: str | os.PathLike[str]) -> bool:
    """Whether a folder was saved by torch.distributed.checkpoint and not by flatfsdp."""
    folder = FilePath(path)
    return (folder / metadata.NAME).is_file() and not (folder / manifest_file.NAME).is_file()


def find(ranks: CheckpointRanks, path: str | os.PathLike[str], *, check: bool) -> FoundCheckpoint:
    """The newest checkpoint at `path` that all ranks see, required to be complete. Collective.

    All sizes are compared; with `check`, also the checksums, each file's on one of the ranks that see it.

    Raises:
        CheckpointError: on every rank.
    """
    location = CheckpointFolder.at(path)
    doing = f"loading {location.path}"
    mine: dict[str, FoundCheckpoint] = {}

    def look() -> list[str]:
        if is_foreign(location.path):
            raise CheckpointError(
                f"torch.distributed.checkpoint saved it, or its {NAME} is lost, and with it the checksums. Its table "
                "of contents is a pickle, and reading a pickle runs whatever code it names; pass trust=True if you "
                "know who wrote it"
            )
        mine.update({found.id: FoundCheckpoint(folder, found) for folder, found in candidates(location)})
        return list(mine)

    found = mine[choose(ranks.exchange(doing, look), location.path)]
    files = found.manifest.files
    names = frozenset(file.name for file in files)
    here = ranks.exchange(doing, lambda: frozenset(name for name in names if os.path.lexists(found.folder / name)))

    def check_mine() -> None:
        prove(found.manifest, str(found.folder / NAME))
        # Nodes without a shared file system have some of the files each; files that no rank has: see
        # `FoundCheckpoint.missing`.
        mine = [file for file in files if file.name in here[ranks.rank]]
        verify(found.folder, mine, contents=False)
        if check:
            seeing = {file.name: [rank for rank, names in enumerate(here) if file.name in names] for file in mine}
            numbered = [(seeing[file.name], number, file) for number, file in enumerate(files) if file.name in seeing]
            share = [file for those, number, file in numbered if those[number % len(those)] == ranks.rank]
            verify(found.folder, share)

    ranks.exchange(doing, check_mine)
    return replace(found, here=here)


def compare(
    there: Mapping[str, tuple[int, ...]],
    targets: Mapping[str, torch.Tensor],
    sections: Collection[str] | None,
    *,
    strict: bool,
    entries: tuple[Collection[str], Collection[str]] | None = None,
) -> None:
    """Compare the tensors to load with the saved shapes.

    `entries`: the keys of entries that are not tensors, own ones and saved ones.

    Raises:
        CheckpointError: with everything that has another shape in the checkpoint, and, where `strict`, that is missing
            there, or is there under the first names `sections` (None: under any) without a target.
    """
    problems = []
    missing = [key for key in targets if key not in there]
    inside = [key for key in there if sections is None or key.partition(".")[0] in sections]
    unexpected = [key for key in inside if key not in targets]
    if entries is not None:
        here, saved = entries
        missing += [key for key in here if key not in saved]
        unexpected += [key for key in saved if key not in here]
    if missing and strict:
        problems.append(f"missing from the checkpoint: {few(missing)}")
    if unexpected and strict:
        problems.append(f"unexpected in the checkpoint: {few(unexpected)}")
    shapes = [
        f"{key} has shape {there[key]} in the checkpoint, {tuple(target.shape)} here"
        for key, target in targets.items()
        if key in there and tuple(target.shape) != there[key]
    ]
    problems += shapes[:3]
    if len(shapes) > 3:
        problems.append(f"and {len(shapes) - 3} more of other shapes: it belongs to another model")
    if problems:
        error = CheckpointError("; ".join(problems))
        counts = {"of another shape": len(shapes)}
        if strict:
            counts = {"missing": len(missing), "unexpected": len(unexpected), **counts}
        if sum(counts.values()) > 3:
            listed = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            setattr(error, BRIEF, f"it belongs to another model or optimizer ({listed})")
        raise error


def _empty(saved: SavedTensor) -> torch.Tensor:
    return torch.empty(saved.shape, dtype=dtype_named(saved.dtype))
