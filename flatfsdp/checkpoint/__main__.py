"""`python -m flatfsdp.checkpoint show|verify|convert`: checkpoints and weights from the command line, one process."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..engine.base.plain_data import name_of
from ..errors import FlatFSDPError
from .conversion import FORMATS, convert, holds_safetensors
from .folders import CheckpointFolder
from .hugging_face import entries_of
from .listing import Listed, listing
from .loading import find
from .manifest import Manifest
from .ranks import CheckpointRanks


def show(path: Path, *, tensors: bool) -> None:
    """Print the contents of a checkpoint or of safetensors files, or the list of checkpoints in a folder."""
    if not holds_safetensors(path):
        ranks = CheckpointRanks()
        if not CheckpointFolder(path).complete() and (inside := listing(path)):
            print("\n".join(map(_row, inside)))
        else:
            print("\n".join(described(find(ranks, path, check=False).manifest, tensors=tensors)))
        return
    entries = entries_of(path, check=False)
    files = {entry.file for entry in entries}
    whole = in_mib(sum(entry.size for entry in entries))
    print(f"{len(entries)} tensors of {whole} in {len(files)} safetensors files")
    for entry in entries if tensors else ():
        print(f"  {entry.name}: {name_of(entry.dtype)} {list(entry.shape)} in {entry.file.name}")


def _row(each: Listed) -> str:
    if each.problem:
        return f"{each.path.name}: {each.problem}"
    manifest = find(CheckpointRanks(), each.path, check=False).manifest
    metrics = "".join(f", {name} {value:.6g}" for name, value in each.metrics.items())
    return f"{each.path.name}: {_saved(manifest)}, {in_mib(sum(file.size for file in manifest.files))}{metrics}"


def _saved(manifest: Manifest) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.saved))
    return f"saved {when} by {manifest.world} rank{'s' * (manifest.world > 1)}"


def in_mib(size: int) -> str:
    """A human-readable size: in MiB, or in bytes where MiB would round to almost nothing."""
    return f"{size / 2**20:,.2f} MiB" if size >= 2**20 / 10 else f"{size:,} bytes"


def described(manifest: Manifest, *, tensors: bool) -> list[str]:
    """A checkpoint as lines of text."""
    sections: dict[str, list[int]] = {}
    for saved in manifest.tensors.values():
        sums = sections.setdefault(str(saved.path[0]), [0, 0, 0])
        for each, more in enumerate((1, saved.spec.numel, saved.size)):
            sums[each] += more
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    lines = [
        f"{_saved(manifest)} ({versions})",
        f"{len(manifest.files)} files of {in_mib(sum(file.size for file in manifest.files))}",
    ]
    lines += [f"metric {name}: {value}" for name, value in manifest.metrics.items()]
    for name, (count, numel, size) in sections.items():
        lines.append(f"{name}: {count} tensors of {numel:,} elements, {in_mib(size)}")
    values = Counter(str(path[0]) for path, _ in manifest.values.values())
    lines += [f"{name}: {count} plain values" for name, count in values.items()]
    if tensors:
        lines += [
            f"  {key}: {saved.dtype} {list(saved.shape)} in {sum(1 for _ in saved.chunks())} pieces"
            for key, saved in manifest.tensors.items()
        ]
        lines += [f"  {key}: {value}" for key, (_, value) in manifest.values.items()]
    return lines


def verify(path: Path) -> None:
    """Compare all files with their sizes and checksums."""
    if holds_safetensors(path):
        files = {entry.file for entry in entries_of(path, check=True)}
        print(f"{path} is complete: {len(files)} safetensors files")
    else:
        found = find(CheckpointRanks(), path, check=True)
        found.require_whole()
        print(f"{found.folder} is complete: the checksums of {len(found.manifest.files)} files match")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flatfsdp.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("show", help="the contents of a checkpoint, or the checkpoints in a folder")
    shown.add_argument("path", type=Path)
    shown.add_argument("--tensors", action="store_true", help="every tensor and every plain value")
    verified = commands.add_parser("verify", help="check that all files are as they were written")
    verified.add_argument("path", type=Path)
    converted = commands.add_parser("convert", help="write a checkpoint, or weights, in another format")
    converted.add_argument(
        "source", type=Path, help="a checkpoint, a DCP folder, safetensors, or a file written by torch.save"
    )
    converted.add_argument("target", type=Path)
    converted.add_argument("--to", choices=FORMATS, required=True)
    converted.add_argument(
        "--part", default="model", help='for safetensors: which part of the source (default "model")'
    )
    converted.add_argument("--overwrite", action="store_true")
    converted.add_argument("--trust", action="store_true", help="read pickles, which run any code that they name")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 with the problem described on standard error."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "show":
            show(given.path, tensors=given.tensors)
        elif given.command == "verify":
            verify(given.path)
        else:
            convert(
                given.source, given.target, to=given.to, part=given.part, overwrite=given.overwrite, trust=given.trust
            )
            print(f"wrote {given.target}")
    except (FlatFSDPError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
