"""Saving a nested state, step by step; after each step all ranks know that all have done it.

[Note: cached plan] Who writes what is found once: every rank tells all others what it holds, and all work out the
same. At the next save ranks tell hashes of what they hold; where nothing has changed, plan and DCP's `.metadata` are
those of the save before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, NamedTuple, TypeVar

import torch

from ..errors import CheckpointError, ConfigTypeError
from ..owned import OwnedInterval
from . import manifest, metadata
from .disk import disk
from .folders import Place, candidates, leader_of
from .manifest import Manifest, Saved, SavedFile
from .nested import Path, decode, encode, flatten
from .plan import Held, assign, digest
from .ranks import Ranks
from .writing import Rows, held_by, write

__all__ = ["Contents", "Request", "save_contents"]

T = TypeVar("T")


@dataclass(frozen=True)
class Contents:
    """What one rank has to save: tensors, values as JSON and the paths of both, by key ([Note: keys])."""

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    paths: Mapping[str, Path]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Contents:
        """Of a nested state.

        Raises:
            ConfigTypeError: a value that neither tensors nor JSON can hold.
        """
        leaves, paths = flatten(state)
        tensors = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        for key, tensor in tensors.items():
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or not _is_plain(tensor):
                raise ConfigTypeError(
                    f"{key}: got a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}. Accepted: "
                    "dense tensors with values, and those of a sharded state dict of flatfsdp. Others may be saved by "
                    "torch.distributed.checkpoint itself."
                )
        values = {key: encode(leaf, key) for key, leaf in leaves.items() if key not in tensors}
        return cls(tensors, values, paths)

    def staged(self) -> Contents:
        """The same with copies of the tensors, on the CPU: what becomes of the originals changes nothing."""
        copies = {key: _copied(tensor) for key, tensor in self.tensors.items()}
        return Contents(copies, self.values, self.paths)

    def __or__(self, other: Contents) -> Contents:
        return Contents(
            {**self.tensors, **other.tensors}, {**self.values, **other.values}, {**self.paths, **other.paths}
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, OwnedInterval | torch.nn.Parameter) or type(tensor) in (torch.Tensor, torch.nn.Buffer)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, OwnedInterval):
        return tensor.with_local(tensor.local.detach().to("cpu", copy=True))
    return tensor.detach().to("cpu", copy=True)


@dataclass(frozen=True)
class Request:
    """Where and how to save; see `flatfsdp.checkpoint.save`."""

    path: str | os.PathLike[str]
    overwrite: bool = False
    per_node: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class _Facts(NamedTuple):
    """What ranks tell of what they hold: hashes. `known` is the name of the plan that a rank has from a save before."""

    owned: str
    whole: str
    values: str
    leader: int
    known: str


@dataclass
class _Plan:
    """Who writes what ([Note: cached plan]), as one rank keeps it.

    Attributes:
        name: a hash of what all ranks hold.
        writes: what this rank writes.
        tensors: any interval of each tensor.
        digest: of the tensors in this rank's file at the last save.
        files: of all ranks' files at the last save, (tensors, values); empty where another rank acts on folders.
        metadata: a hash of `files`, and the `.metadata` that belongs to them.
    """

    name: str
    writes: list[Held]
    tensors: dict[str, Held]
    digest: str = ""
    files: list[tuple[Rows, Rows]] = field(default_factory=list)
    metadata: tuple[str, bytes] = ("", b"")


# The last plan of each group.
_plans: weakref.WeakKeyDictionary[Any, _Plan] = weakref.WeakKeyDictionary()


def save_contents(ranks: Ranks, request: Request, take: Callable[[], Contents]) -> None:
    """Save what `take` returns. Collective: a fixed number of exchanges, of hashes where the plan is cached.

    Raises:
        CheckpointError: on every rank.
    """
    _Save(ranks, request).run(take)


class _Save:
    """One save under way; `contents` once they are taken, `leader` is the rank that acts on folders for this one."""

    contents: Contents
    leader: int

    def __init__(self, ranks: Ranks, request: Request) -> None:
        self.ranks = ranks
        self.request = request
        self.place = Place.at(request.path)
        self.doing = f"saving {self.place.path}"

    def run(self, take: Callable[[], Contents]) -> None:
        self.all(lambda: self.take(take))
        self.leader = leader_of(self.place, self.ranks, self.doing, per_node=self.request.per_node)
        self.prepare()
        try:
            plan = self.fill()
        except CheckpointError:
            if self.leader == self.ranks.rank:
                with contextlib.suppress(OSError):  # the disk may be full: give back what was written
                    disk().remove(self.place.new)
            raise
        self.lead(self.place.swap)
        self.lead(self.place.drop_old)
        _plans[self.ranks.key] = plan

    def fill(self) -> _Plan:
        """Write the new folder, complete at the end."""
        plan, values = self.agree()
        files = self.write(plan, values)
        name, when = self.all(lambda: (uuid.uuid4().hex, time.time()))[0]
        self.lead(lambda: self.complete(plan, values, files, name, when))
        return plan

    def all(self, work: Callable[[], T]) -> list[T]:
        return self.ranks.exchange(self.doing, work)

    def lead(self, work: Callable[[], T]) -> list[T | None]:
        return self.all(lambda: work() if self.leader == self.ranks.rank else None)

    def take(self, take: Callable[[], Contents]) -> None:
        self.contents = take()

    def prepare(self) -> None:
        there: dict[str, FilePath] = {}

        def look() -> list[str]:
            there.update((each.id, folder) for folder, each in candidates(self.place, damaged=True))
            return list(there)

        seen = [ids for ids in self.lead(look) if ids is not None]
        common = [id for id in seen[0] if all(id in ids for ids in seen)][:1]
        keep = there[common[0]] if common and there else None
        self.lead(lambda: self.place.prepare(keep, overwrite=self.request.overwrite))

    def agree(self) -> tuple[_Plan, dict[str, tuple[Path, Any]]]:
        """The plan, and the values of all ranks."""
        owned: list[Held] = []
        whole: list[Held] = []
        paths = self.contents.paths
        for key, tensor in self.contents.tensors.items():
            (owned if isinstance(tensor, OwnedInterval) else whole).extend(held_by(key, paths[key], tensor))
        values = {key: (paths[key], value) for key, value in self.contents.values.items()}
        cached = _plans.get(self.ranks.key)
        mine = _Facts(
            digest(owned), digest(whole), _hash(json.dumps(values)), self.leader, cached.name if cached else ""
        )
        facts = self.all(lambda: mine)
        if len({each.values for each in facts}) > 1:
            values = _united(self.all(lambda: values))
        name = _hash(repr([(each.owned, each.whole, each.leader) for each in facts]))
        if cached is not None and all(each.known == name for each in facts):
            return cached, values
        # What all ranks hold whole is told by the first that holds just that.
        first = {each.whole: rank for rank, each in reversed(list(enumerate(facts)))}
        told = self.all(lambda: (owned, whole if first[mine.whole] == self.ranks.rank else []))
        plans = [own + told[first[fact.whole]][1] for (own, _), fact in zip(told, facts, strict=True)]
        writes = assign(plans, [each.leader for each in facts])
        tensors = {held.key: held for plan in plans for held in plan}
        return _Plan(name, writes[self.ranks.rank], tensors), values

    def write(self, plan: _Plan, values: Mapping[str, tuple[Path, Any]]) -> list[tuple[SavedFile, str]]:
        """Write all files, and know where in them everything lies; the files, and hashes of what lies where."""

        def write_mine() -> tuple[SavedFile, str, Rows | None, Rows]:
            plain = {key: decode(value) for key, (_, value) in values.items()} if self.ranks.rank == 0 else {}
            done = write(self.place.new / f"__{self.ranks.rank}_0.distcp", plan.writes, self.contents.tensors, plain)
            return done.file, done.digest, None if done.digest == plan.digest else done.tensors, done.values

        answers = self.all(write_mine)
        if self.leader == self.ranks.rank:
            plan.files = [
                (plan.files[rank][0] if tensors is None else tensors, plain)
                for rank, (_, _, tensors, plain) in enumerate(answers)
            ]
        plan.digest = answers[self.ranks.rank][1]
        return [(file, f"{digest} {plain}") for file, digest, _, plain in answers]

    def complete(
        self,
        plan: _Plan,
        values: Mapping[str, tuple[Path, Any]],
        files: Sequence[tuple[SavedFile, str]],
        name: str,
        when: float,
    ) -> None:
        """Write what makes the new folder complete, the manifest last."""
        saved = [file for file, _ in files]
        digests = _hash(repr([digest for _, digest in files]))
        if plan.metadata[0] != digests:
            rows = [(file.name, *rows) for file, rows in zip(saved, plan.files, strict=True)]
            paths = {key: path for key, (path, _) in values.items()}
            plan.metadata = digests, metadata.metadata_of(plan.tensors, rows, paths)
        data = plan.metadata[1]
        disk().write_file(self.place.new / metadata.NAME, data)
        whole = Manifest(
            world=self.ranks.world,
            files=[*saved, SavedFile(metadata.NAME, len(data), zlib.crc32(data))],
            tensors=tensors_of_files(plan.tensors, plan.files),
            values=values,
            metrics=self.request.metrics,
            id=name,
            saved=when,
        )
        disk().publish(self.place.new / manifest.NAME, whole.to_bytes())


def tensors_of_files(tensors: Mapping[str, Held], files: Sequence[tuple[Rows, Rows]]) -> dict[str, Saved]:
    """Where each tensor lies, given any interval of each, and of each file where in it what lies (tensors, values)."""
    rows: dict[str, list[list[int]]] = {key: [] for key in tensors}
    for number, (inside, _) in enumerate(files):
        for key, first, pieces in inside:
            row = [number, first]
            for piece in pieces:
                row += (piece.numel, piece.offset + piece.inside)
            rows[key].append(row)
    return {key: Saved(held.path, held.dtype, held.shape, held.stride, rows[key]) for key, held in tensors.items()}


def _united(values: Sequence[Mapping[str, tuple[Path, Any]]]) -> dict[str, tuple[Path, Any]]:
    """The values of all ranks, which must agree where they have the same key."""
    united: dict[str, tuple[Path, Any]] = {}
    holders: dict[str, int] = {}
    for rank, held in enumerate(values):
        for key, (path, value) in held.items():
            before = united.setdefault(key, (path, value))[1]
            if before != value:
                raise CheckpointError(
                    f"{key} is {str(decode(before))[:60]!r} on rank {holders[key]}, but {str(decode(value))[:60]!r} on "
                    f"rank {rank}. Give what differs between ranks keys that differ, such as the rank's number"
                )
            holders.setdefault(key, rank)
    return united


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
