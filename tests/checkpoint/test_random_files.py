"""Checkpoints that were damaged or forged at random: the right values, or an error that names the fault.

Every file of a good checkpoint is played with: bytes and lengths, the fields of JSON (with its checksum made
right again), links, pipes and folders in place of files. After every change, `verify`, `load`, `listing` and `keep` end
within seconds, and no error but a CheckpointError that names the folder comes out of them; where values are given back,
they are those that were saved, unless a manifest with a right checksum records others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from flatfsdp import checkpoint
from flatfsdp.checkpoint.__main__ import main
from flatfsdp.errors import CheckpointError, FlatFSDPWarning
from tests.harness.thorough import seeds

pytestmark = pytest.mark.unit

MODEL = {
    "w": torch.arange(40.0).view(5, 8),
    "t": torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "e": torch.zeros(0, 3),
    "b": torch.tensor([True, False]),
}
EXTRA = {"step": 7, "list": [{"a": (1, b"x")}, {"a": None}], "rng": torch.arange(5), "dtype": torch.bfloat16}
MANIFEST = "flatfsdp.json"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"nothing after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def beside(folder: Path) -> None:
        (folder / "config.json").write_text('{"a": 1}')
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab").write_text("a b c")

    folder = tmp_path_factory.mktemp("good")
    for kind in ("flatfsdp", "safetensors"):
        checkpoint.save(folder / kind, model=MODEL, extra=EXTRA, model_format=kind, files=beside, metrics={"loss": 0.5})
    model = torch.nn.Linear(8, 5, bias=False)
    with torch.no_grad():
        model.weight.copy_(MODEL["w"])
    checkpoint.export_safetensors(model, folder / "export", max_shard_size=64)
    return {each.name: each for each in folder.iterdir()}


# --- changes of files -------------------------------------------------------------------------------------------------


def flip(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 5])):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) + 1)] + rng.randbytes(rng.choice([0, 0, 9, 5000])))


def lose(rng: random.Random, path: Path) -> None:
    path.unlink()


def another_kind(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    elsewhere = next(parent for parent in path.parents if parent.name == "x").with_name("elsewhere")
    elsewhere.write_bytes(data)
    rng.choice(
        [
            os.mkfifo,
            Path.mkdir,
            lambda path: path.symlink_to(elsewhere),
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.symlink_to(path.name),
            lambda path: path.symlink_to("nowhere"),
        ]
    )(path)


VALUES: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice([0, 1, -1, 3, 2**31, 2**63, 10**400, 1.5, 1e308, float("nan")]),
    lambda rng: rng.choice(["", "x", "../out", "/etc/passwd", "a/../b", "float32", "float7", "cat", "\0", "\u001b[2J"]),
    lambda rng: rng.choice([None, True, [], {}, [[]], [None], {"tuple": 3}, {"dict": [1]}, {"a": 1, "b": 2}]),
    lambda rng: nested(rng.choice([3, 900, 100_000])),
]


def nested(depth: int) -> Any:
    return Raw("[" * depth + "]" * depth)


class Raw(str):
    """JSON as it stands."""


def dumped(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {dumped(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dumped, value)) + "]"
    return json.dumps(value)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found: list[tuple[Any, Any]] = []
    for key in keys:
        found += [(value, key), *places(value[key])]
    return found


def change(rng: random.Random, value: Any) -> None:
    """Change something in a JSON value; numbers often by little."""
    container, key = rng.choice(places(value))
    old = container[key]
    kind = rng.randrange(4)
    if kind == 0 and type(old) is int:
        container[key] = old + rng.choice([-64, -1, 1, 4, 64, 10**6])
    elif kind == 1:
        del container[key]
    elif kind == 2 and isinstance(container, list):
        container.insert(key, old)
    elif kind == 2 and isinstance(old, dict):
        container[key + "x"] = old
    else:
        container[key] = rng.choice(VALUES)(rng)


def reseal(path: Path, body: str) -> None:
    data = body.encode()
    path.write_bytes(b'{"crc32": "%08x", "manifest": ' % zlib.crc32(data) + data + b"}\n")


def forge(rng: random.Random, path: Path) -> None:
    """Change fields of a file that is JSON, or begins with it; checksums are those of the change."""
    data = path.read_bytes()
    if path.name == MANIFEST:
        read = json.loads(data)["manifest"]
        change(rng, read)
        reseal(path, dumped(read))
    elif path.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + length])
        change(rng, head)
        text = dumped(head).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    elif path.suffix == ".json":
        read = json.loads(data)
        change(rng, read)
        path.write_text(dumped(read))
    else:
        flip(rng, path)


DEEDS = (flip, cut, lose, another_kind, forge, forge, forge, forge)


# --- results ----------------------------------------------------------------------------------------------------------


def message(path: Path, function: Callable[[], Any]) -> Any:
    """The result of `function`, or its error, which names the folder."""
    try:
        with warnings.catch_warnings(), within(20.0):
            warnings.simplefilter("ignore", FlatFSDPWarning)
            return function()
    except CheckpointError as error:
        assert path.name in str(error) and "Error:" not in str(error), f"not in our words: {error}"
        return error


def load(path: Path, verify: bool) -> Any:
    held = {key: torch.full_like(value, -1) for key, value in MODEL.items()}
    extra = checkpoint.load(path, model=held, verify=verify)
    return held, extra


def is_right(found: Any) -> bool:
    held, extra = found
    right = all(torch.equal(held[key], value) for key, value in MODEL.items())
    rng = extra.pop("rng")
    return right and torch.equal(rng, EXTRA["rng"]) and extra == {k: v for k, v in EXTRA.items() if k != "rng"}


def files_of(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file())


@pytest.mark.parametrize("seed", seeds(40, 2500))
def test_a_damaged_checkpoint_is_right_or_is_reported(good: dict[str, Path], tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kind = rng.choice(["flatfsdp", "safetensors"])
    for name in ("before", "x", "after"):
        shutil.copytree(good[kind], tmp_path / name)
    path = tmp_path / "x"
    files = files_of(path)
    file = rng.choice([path / MANIFEST, rng.choice(files)])
    deed = rng.choice(DEEDS)
    deed(rng, file)
    as_saved = deed is not forge or file.name != MANIFEST
    for verify in (True, False):
        found = message(path, lambda verify=verify: load(path, verify))
        if not isinstance(found, CheckpointError) and as_saved and verify:
            assert is_right(found), (deed.__name__, file.name)
    code = message(path, lambda: main(["verify", str(path)]))
    if as_saved and (file.exists() or deed is lose):
        same = file.is_file() and file.read_bytes() == (good[kind] / file.relative_to(path)).read_bytes()
        assert code == 0 if same and not file.is_symlink() else code == 1, (deed.__name__, file.name)
    assert message(path, lambda: main(["show", str(path), "--tensors"])) in (0, 1)
    listed = {each.path.name: each.problem for each in message(tmp_path, lambda: checkpoint.listing(tmp_path))}
    assert listed["before"] == listed["after"] == "", listed
    message(tmp_path, lambda: checkpoint.keep(tmp_path, last=3))
    assert {"before", "after"} <= {each.name for each in tmp_path.iterdir()}
    assert is_right(load(tmp_path / "before", True))


@pytest.mark.parametrize("seed", seeds(25, 1500))
def test_damaged_safetensors_are_right_or_are_reported(good: dict[str, Path], tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "x"
    shutil.copytree(good["export"], path)
    file = rng.choice(files_of(path))
    deed = rng.choice(DEEDS)
    deed(rng, file)
    model = torch.nn.Linear(8, 5, bias=False)
    found = message(path, lambda: checkpoint.load_safetensors(model, path))
    message(path, lambda: checkpoint.load_safetensors(model, path, verify=False, strict=False))
    if found is None and deed in (flip, cut) and file.suffix == ".safetensors":
        raise AssertionError((deed.__name__, file.name, "damage was not found"))
    assert message(path, lambda: main(["verify", str(path)])) in (0, 1)
    assert message(path, lambda: main(["show", str(path)])) in (0, 1)


# --- chosen ones ------------------------------------------------------------------------------------------------------


def resealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    read = json.loads((path / MANIFEST).read_bytes())["manifest"]
    change(read)
    reseal(path / MANIFEST, dumped(read))


def row(read: dict[str, Any], key: str = "model.w") -> list[int]:
    """File, first element, number of elements, offset."""
    found: list[int] = read["tensors"][key]["chunks"][0]
    return found


Change = Callable[[dict[str, Any]], object]
WRONG: dict[str, tuple[Change, str]] = {
    "hole": (lambda read: row(read).__setitem__(2, 39), r"'model\.w': elements \[39, 40\) lie in no file"),
    "twice": (
        lambda read: read["tensors"]["model.w"]["chunks"].append([0, 39, 1, 0]),
        r"'model\.w': elements \[39, 40\) lie in two places",
    ),
    "behind": (
        lambda read: row(read).__setitem__(3, 10**9),
        r"'model\.w': elements \[0, 40\) end at byte 10+160 of",
    ),
    "before": (lambda read: row(read).__setitem__(3, -1), r"'model\.w': chunks is -1, not an integer of at least 0"),
    "file": (lambda read: row(read).__setitem__(0, 9), r"'model\.w': it is in file number 9, and there are"),
    "shared": (
        lambda read: row(read).__setitem__(3, row(read, "extra.rng")[3]),
        r"__0_0\.distcp: tensor .* overlap in the file",
    ),
    "dtype": (lambda read: read["tensors"]["model.w"].update(dtype="float7"), r"'model\.w': 'float7' is not a dtype"),
    "shape": (
        lambda read: read["tensors"]["model.w"].update(shape=[5, 9]),
        r"'model\.w': elements \[40, 45\) lie",
    ),
    "stride": (lambda read: read["tensors"]["model.t"].update(stride=[1, 1, 1, 1]), r"tensor 'model\.t': .* stride"),
    "name": (
        lambda read: read["files"][0].__setitem__(0, "../out"),
        r"a name is '\.\./out', which names no file",
    ),
    "value": (
        lambda read: read["values"]["extra.step"].update(value={"dtype": "load"}),
        r"'extra\.step': 'load'",
    ),
    "deep": (lambda read: read["values"]["extra.step"].update(value=nested(5000)), r"nested too deeply"),
    "newer": (
        lambda read: read.update(version=2, tensors="other"),
        r"of a newer flatfsdp \(.*\): it has version 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_manifest_has_wrong_is_named(good: dict[str, Path], tmp_path: Path, name: str) -> None:
    change, words = WRONG[name]
    shutil.copytree(good["flatfsdp"], tmp_path / "x")
    resealed(tmp_path / "x", change)
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/x/flatfsdp\.json.*{words}"):
            load(tmp_path / "x", verify)
    (listed,) = checkpoint.listing(tmp_path)
    assert listed.problem


def test_a_file_that_is_lost_is_named_with_what_lies_in_it(good: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "x"
    shutil.copytree(good["safetensors"], path)
    (path / "__0_0.distcp").unlink()
    assert main(["verify", str(path)]) == 1
    assert f"{path}/__0_0.distcp is missing" in capsys.readouterr().err
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=r"/x/__0_0\.distcp is missing\. .* hold elements of extra\.rng"):
            checkpoint.load(path, verify=verify)
    with pytest.warns(FlatFSDPWarning, match=r"__0_0\.distcp is missing\. .* They hold nothing that is being loaded"):
        assert checkpoint.load(path, strict=False, extra=lambda keys: keys == ("step",)) == {"step": 7}


def test_a_newer_flatfsdps_checkpoint_is_neither_damaged_nor_replaced(good: dict[str, Path], tmp_path: Path) -> None:
    keeping = checkpoint.Keeping(last=1, unfinished=True)
    for number, body in enumerate((None, b'{"version": 3, "all": "new"}', b'{"manifest": {"version": 4}}')):
        path = tmp_path / f"step-{number}"
        shutil.copytree(good["flatfsdp"], path)
        if body is None:
            resealed(path, lambda read: read.update(version=2))
        else:
            (path / MANIFEST).write_bytes(body)
        (listed,) = checkpoint.listing(tmp_path, named=path.name)
        assert "is of a newer flatfsdp" in listed.problem and "damaged" not in listed.problem
        for place in (path, tmp_path / f".{path.name}.new", tmp_path / f".{path.name}.old"):
            if place != path:
                path.rename(place)
            with pytest.raises(CheckpointError, match=r"newer flatfsdp.* this version does not replace it"):
                checkpoint.save(path, extra=EXTRA, overwrite=True)
            checkpoint.save(tmp_path / "last", extra={"a": 1}, overwrite=True, keeping=keeping)
            checkpoint.keep(tmp_path)
            assert (place / MANIFEST).is_file() and (place / "__0_0.distcp").is_file()
            place.rename(path)
    assert checkpoint.load(tmp_path / "last") == {"a": 1}


def test_a_folder_that_cannot_be_read_breaks_no_other(good: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("a", "b", "c"):
        shutil.copytree(good["flatfsdp"], tmp_path / name)

    listdir = os.listdir

    def refused(path: Any) -> list[str]:
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    (tmp_path / "b" / MANIFEST).unlink()
    assert [bool(each.problem) for each in checkpoint.listing(tmp_path)] == [True, False, False]
    assert checkpoint.keep(tmp_path) == [tmp_path / "a"]
