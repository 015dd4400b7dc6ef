"""Saving a nested state, in steps; after each step, all ranks know that all have done it.

[Note: cached plan] The assignment of intervals to writers is computed once: every rank sends the intervals that it
holds to all others, and all compute the same plan. At the next save, ranks send hashes of these intervals; where
nothing has changed, they use the plan and DCP's `.metadata` of the previous save.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any, NamedTuple, TypeVar

import torch

from ..engine.agreement.checksums import checksum
from ..engine.base.plain_data import dtype_named
from ..engine.state.owned_interval import OwnedInterval
from ..errors import CheckpointError, ConfigTypeError, few, one_rank_warns, refuse_value, warn_once
from . import metadata
from .disk import disk
from .folders import CheckpointFolder, candidates, last_sequence, refuse_link
from .host_copies import HostCopies
from .manifest import Manifest, SavedFile, SavedTensor
from .nested_state import Path, decode, encode, flatten, shown
from .plan import PlannedInterval, assign, digest
from .ranks import CheckpointRanks
from .replacement import Replacement, written_by
from .retention import Keeping
from .weights import BlockChecksums, WeightFiles, is_weight, is_whole_everywhere
from .writing import Archives, held_by, pieces_of, write

T = TypeVar("T")

# The checkpoint that this process was the last to save, or to load a model from.
latest: deque[FilePath] = deque(maxlen=1)


@dataclass(frozen=True)
class Contents:
    """The state that one rank saves: tensors, values as JSON and the paths of both, by key ([Note: keys]).

    `ties` are the keys of further names of a tensor, with the key of its first; `buffers` the keys of tensors whose
    values may differ between ranks.
    """

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    paths: Mapping[str, Path]
    ties: Mapping[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, state: Mapping[str, Any], ties: Mapping[str, str] | None = None, buffers: frozenset[str] = frozenset()
    ) -> Contents:
        """The contents of a nested state.

        Raises:
            ConfigTypeError: a value that neither tensors nor JSON can hold.
        """
        leaves, paths = flatten(state)
        tensors = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        for key, tensor in tensors.items():
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or not _is_plain(tensor):
                raise ConfigTypeError(
                    f"{key}: got a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}. Accepted: "
                    "dense tensors with values, and those of a sharded state dict of flatfsdp. "
                    "torch.distributed.checkpoint itself may be able to save others."
                )
        values = {key: encode(leaf, key) for key, leaf in leaves.items() if key not in tensors}
        return cls(tensors, values, paths, ties or {}, buffers)

    def staged(self, host: HostCopies) -> Contents:
        """The same with copies of the tensors, by `host`, which later changes of the originals do not affect."""
        originals = {id(tensor): tensor for tensor in self.tensors.values()}  # one copy for all tied names
        locals_ = [each.local if isinstance(each, OwnedInterval) else each for each in originals.values()]
        copies = {
            key: each.with_local(copy) if isinstance(each, OwnedInterval) else copy
            for (key, each), copy in zip(originals.items(), host.of(locals_), strict=True)
        }
        return replace(self, tensors={key: copies[id(tensor)] for key, tensor in self.tensors.items()})

    def without_ties(self) -> Contents:
        """The same, with each tensor under its first name only."""
        return replace(self, tensors={key: each for key, each in self.tensors.items() if key not in self.ties})


def _is_plain(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, OwnedInterval | torch.nn.Parameter) or type(tensor) in (torch.Tensor, torch.nn.Buffer)


@dataclass(frozen=True)
class SaveRequest:
    """Where and how to save; see `flatfsdp.checkpoint.save`."""

    path: str | os.PathLike[str]
    overwrite: bool = False
    per_node: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    model_format: str = "flatfsdp"
    files: Callable[[FilePath], None] | None = None
    keeping: Keeping | None = None

    def __post_init__(self) -> None:
        if self.model_format not in ("flatfsdp", "safetensors"):
            refuse_value("model_format", self.model_format, '"flatfsdp" or "safetensors"')

    @property
    def safetensors(self) -> bool:
        """Whether the model is saved as safetensors."""
        return self.model_format == "safetensors"


class _Hashes(NamedTuple):
    """Hashes of the contents that a rank holds. `known` is the name of the rank's plan from an earlier save."""

    owned: str
    whole: str
    values: str
    buffers: str
    leader: int
    known: str


@dataclass
class _WritePlan:
    """The plan of a save ([Note: cached plan]), as one rank keeps it.

    Attributes:
        name: a hash of the contents that all ranks hold.
        writes: the intervals that this rank writes into its file.
        weighty: the intervals that it writes into `weights`.
        tensors: any interval of each tensor that is in ranks' files.
        weights: the safetensors of the checkpoint, if it has some.
        digest: of the tensors in this rank's file at the last save.
        files: (tensors, values) of all ranks' files at the last save; empty where another rank acts on folders.
        metadata: a hash of `files`, and the `.metadata` that belongs to them.
    """

    name: str
    writes: list[PlannedInterval]
    weighty: list[PlannedInterval]
    tensors: dict[str, PlannedInterval]
    weights: WeightFiles | None
    digest: str = ""
    files: list[tuple[Archives, Archives]] = field(default_factory=list)
    metadata: tuple[str, bytes] = ("", b"")


# The last plan of each group.
_plans: weakref.WeakKeyDictionary[Any, _WritePlan] = weakref.WeakKeyDictionary()


def save_contents(ranks: CheckpointRanks, request: SaveRequest, take: Callable[[], Contents]) -> None:
    """Save the contents that `take` returns. Collective: a fixed number of exchanges, of hashes if the plan is cached.

    Raises:
        CheckpointError: on every rank.
    """
    _Save(ranks, request).save(take)


class _Save(Replacement):
    """One save in progress. `contents` is set by `take`; `leaders` are the leaders of all ranks."""

    contents: Contents
    leaders: list[int]

    def __init__(self, ranks: CheckpointRanks, request: SaveRequest) -> None:
        location = CheckpointFolder.at(request.path)
        super().__init__(ranks, location, f"saving {location.path}")
        self.request = request

    def save(self, take: Callable[[], Contents]) -> None:
        self.all(lambda: self.take(take))
        _plans[self.ranks.key] = self.run(self.prepare, self.fill, per_node=self.request.per_node)
        latest.append(self.location.path)
        if (keeping := self.request.keeping) is not None:
            doing = f"removing older checkpoints, now that {self.location.path} is complete"
            folder, leads = self.location.path.parent, self.leads
            self.ranks.exchange(doing, lambda: keeping.remove(folder, self.location.path) if leads else [])

    def fill(self) -> _WritePlan:
        """Write the new folder, complete at the end."""
        plan, values = self.agree()
        if (weights := plan.weights) is not None:
            self.lead(lambda: weights.create(self.location.new))
        files = self.write(plan, values)
        checksums = [] if weights is None else self.checksums(weights)
        parent = self.location.path.parent
        stamps = self.all(lambda: (uuid.uuid4().hex, time.time(), last_sequence(parent) if self.leads else 0))
        (name, when, _), sequence = stamps[0], 1 + max(last for _, _, last in stamps)
        self.lead(lambda: self.complete(plan, values, files, checksums, name, when, sequence))
        return plan

    def take(self, take: Callable[[], Contents]) -> None:
        taken = take()
        self.contents = taken.without_ties() if self.request.safetensors else taken

    def prepare(self) -> None:
        there: dict[str, FilePath] = {}

        def look() -> list[str]:
            refuse_link(self.request.path, overwrite=self.request.overwrite)
            self.lock.take()
            there.update((each.id, folder) for folder, each in candidates(self.location, damaged=True))
            return list(there)

        seen = [ids for ids in self.lead(look) if ids is not None]
        common = [id for id in seen[0] if all(id in ids for ids in seen)][:1]
        keep = there[common[0]] if common and there else None
        self.lead(lambda: self.location.prepare(keep, overwrite=self.request.overwrite))

    def agree(self) -> tuple[_WritePlan, dict[str, tuple[Path, Any]]]:
        """The plan, and the values of all ranks."""
        owned: list[PlannedInterval] = []
        whole: list[PlannedInterval] = []
        paths = self.contents.paths
        tensors = self.contents.tensors
        for key, tensor in tensors.items():
            (owned if isinstance(tensor, OwnedInterval) else whole).extend(held_by(key, paths[key], tensor))
        values = {key: (paths[key], value) for key, value in self.contents.values.items()}
        cached = _plans.get(self.ranks.key)
        buffers = {key: checksum(tensors[key]) for key in sorted(self.contents.buffers & tensors.keys())}
        hashes = _hash(json.dumps(values)), _hash(json.dumps(buffers))
        mine = _Hashes(digest(owned), digest(whole), *hashes, self.leader, cached.name if cached else "")
        by_rank = self.all(lambda: mine)
        if len({each.buffers for each in by_rank}) > 1:
            self.warn_once(
                ("buffers of ranks", *buffers),
                f"buffers differ between ranks (of {few([*buffers])}), as running statistics of each rank's own data "
                "do. A checkpoint holds rank 0's, and every rank has them once it is loaded. Average them before "
                "saving, or use SyncBatchNorm, if this is not intended",
            )
        self.leaders = [each.leader for each in by_rank]
        if len({each.values for each in by_rank}) > 1:
            values = _united(self.all(lambda: values))
        name = _hash(repr([(each.owned, each.whole, each.leader) for each in by_rank] + [self.request.safetensors]))
        if cached is not None and all(each.known == name for each in by_rank):
            return cached, values
        # Of ranks with equal whole tensors, the first sends the list. Of buffers, the first rank's are written.
        first = {each.whole: rank for rank, each in reversed(list(enumerate(by_rank)))}
        sends = first[mine.whole] == self.ranks.rank
        sent = self.all(lambda: (owned, whole if sends else [], [*buffers] if sends else []))
        plans = [own + sent[first[each.whole]][1] for (own, _, _), each in zip(sent, by_rank, strict=True)]
        writes = assign(plans, self.leaders, {key for _, _, keys in sent for key in keys})
        planned = {interval.key: interval for plan in plans for interval in plan}
        weights = self.weights(planned, writes) if self.request.safetensors else None
        as_weights = {key for key, interval in planned.items() if weights is not None and is_weight(interval)}
        mine_own = [interval for interval in writes[self.ranks.rank] if interval.key not in as_weights]
        weighty = [interval for interval in writes[self.ranks.rank] if interval.key in as_weights]
        others = {key: interval for key, interval in planned.items() if key not in as_weights}
        return _WritePlan(name, mine_own, weighty, others, weights), values

    def weights(
        self, tensors: Mapping[str, PlannedInterval], writes: Sequence[Sequence[PlannedInterval]]
    ) -> WeightFiles | None:
        """The safetensors files of the model; None where it has no tensors, or no node has all of it."""
        own = [each for each in tensors.values() if is_weight(each)]
        if not own:
            return None
        if is_whole_everywhere(own, writes, self.leaders):
            try:
                return WeightFiles.of((str(each.path[1]), dtype_named(each.dtype), each.shape) for each in own)
            except ConfigTypeError as error:  # on all ranks: they see the same
                raise CheckpointError(f"{self.doing}: {error} Others are saved with model_format='flatfsdp'") from error
        self.warn_once(
            "weights per node",
            "the ranks of a node do not hold the whole model between them, and no node sees another's files; the model "
            "is saved as the optimizer is, not as safetensors. Save to a folder that all ranks share, or shard within "
            "each node (HYBRID_SHARD)",
        )
        return None

    def warn_once(self, key: Hashable, message: str) -> None:
        """Warn, on the first rank, of a fact that all ranks know."""
        with one_rank_warns(this_rank=self.ranks.rank == 0):
            warn_once(key, f"{self.doing}: {message}")

    def checksums(self, weights: WeightFiles) -> list[BlockChecksums]:
        """The checksums of the blocks of all safetensors files; each rank of this node reads its share."""
        mine = [rank for rank, leader in enumerate(self.leaders) if leader == self.leader]
        share = mine.index(self.ranks.rank)
        found = self.all(lambda: weights.checksums(self.location.new, share, len(mine)))
        return [found[rank] for rank in mine]

    def write(self, plan: _WritePlan, values: Mapping[str, tuple[Path, Any]]) -> list[tuple[SavedFile, str]]:
        """Write all files, and record the offsets in them. Returned: the files, each with a hash of these offsets."""

        def write_mine() -> tuple[SavedFile, str, Archives | None, Archives]:
            plain = {key: decode(value) for key, (_, value) in values.items()} if self.ranks.rank == 0 else {}
            done = write(self.location.new / f"__{self.ranks.rank}_0.distcp", plan.writes, self.contents.tensors, plain)
            if plan.weights is not None:
                pieces = pieces_of(plan.weighty, self.contents.tensors)
                plan.weights.write(self.location.new, ((str(each.path[1]), piece) for each, piece in pieces))
            return done.file, done.digest, None if done.digest == plan.digest else done.tensors, done.values

        answers = self.all(write_mine)
        if self.leads:
            plan.files = [
                (plan.files[rank][0] if tensors is None else tensors, plain)
                for rank, (_, _, tensors, plain) in enumerate(answers)
            ]
        plan.digest = answers[self.ranks.rank][1]
        return [(file, f"{digest} {plain}") for file, digest, _, plain in answers]

    def complete(
        self,
        plan: _WritePlan,
        values: Mapping[str, tuple[Path, Any]],
        files: Sequence[tuple[SavedFile, str]],
        checksums: Sequence[BlockChecksums],
        name: str,
        when: float,
        sequence: int,
    ) -> None:
        """Write the files that complete the new folder, the manifest last."""
        saved = [file for file, _ in files]
        tensors = tensors_of_files(plan.tensors, plan.files)
        if plan.weights is not None:
            tensors = {shown(each.path): each for each in plan.weights.saved(len(saved))} | tensors
        for key, first in self.contents.ties.items():
            if key not in tensors:
                tensors[key] = replace(tensors[first], path=self.contents.paths[key])
        digests = _hash(repr([digest for _, digest in files]))
        if plan.metadata[0] != digests:
            archives = [(file.name, *each) for (file, _), each in zip(files, plan.files, strict=True)]
            paths = {key: path for key, (path, _) in values.items()}
            plan.metadata = digests, metadata.metadata_of(plan.tensors, archives, paths)
        data = plan.metadata[1]
        disk().write_file(self.location.new / metadata.NAME, data)
        if plan.weights is not None:
            saved += plan.weights.conclude(self.location.new, checksums)
        saved.append(SavedFile.of(metadata.NAME, data))
        if self.request.files is not None:
            saved += written_by(self.request.files, self.location.new)
        whole = Manifest(
            world=self.ranks.world,
            files=saved,
            tensors=tensors,
            values=values,
            metrics=self.request.metrics,
            id=name,
            saved=when,
            sequence=sequence,
        )
        self.publish(whole.to_bytes())


def tensors_of_files(
    tensors: Mapping[str, PlannedInterval], files: Sequence[tuple[Archives, Archives]]
) -> dict[str, SavedTensor]:
    """The chunks of each tensor, given any interval of each, and for each file the archives of (tensors, values)."""
    runs: dict[str, list[list[int]]] = {key: [] for key in tensors}
    for number, (inside, _) in enumerate(files):
        for key, first, pieces in inside:
            run = [number, first]
            for piece in pieces:
                run += (piece.numel, piece.offset + piece.inside)
            runs[key].append(run)
    return {
        key: SavedTensor(each.path, each.dtype, each.shape, each.stride, runs[key]) for key, each in tensors.items()
    }


def _united(values: Sequence[Mapping[str, tuple[Path, Any]]]) -> dict[str, tuple[Path, Any]]:
    """The values of all ranks, which must agree where they have the same key."""
    united: dict[str, tuple[Path, Any]] = {}
    first_ranks: dict[str, int] = {}
    for rank, own in enumerate(values):
        for key, (path, value) in own.items():
            before = united.setdefault(key, (path, value))[1]
            if before != value:
                raise CheckpointError(
                    f"{key} is {str(decode(before))[:60]!r} on rank {first_ranks[key]}, but "
                    f"{str(decode(value))[:60]!r} on rank {rank}. Give values that differ between ranks different "
                    "keys, such as the rank's number"
                )
            first_ranks.setdefault(key, rank)
    return united


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
