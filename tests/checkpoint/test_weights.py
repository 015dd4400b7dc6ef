"""Checkpoints with the model as safetensors inside: any program may read the model; the whole one needs trust."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

from flatfsdp import checkpoint
from flatfsdp.checkpoint import folders, lock, saving, weights
from flatfsdp.checkpoint.__main__ import main
from flatfsdp.checkpoint.disk import through
from flatfsdp.errors import CheckpointError, FlatFSDPWarning
from flatfsdp.messages import gather_bytes
from tests.checkpoint.test_safetensors import build, whole
from tests.harness.corners import Setting
from tests.harness.disks import Counting, Full, Killed, Mortal
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.distributed

TIED = {"last.weight"}


def optimizer_of(model: nn.Module, number: float) -> torch.optim.Optimizer:
    """With `number` as its state."""
    optim = torch.optim.SGD([p for p in model.parameters() if p.is_floating_point()], lr=0.1, momentum=0.9)
    for parameter in optim.param_groups[0]["params"]:
        optim.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    return optim


def config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "corners"}')
    (folder / "tokens").mkdir()
    (folder / "tokens" / "words.txt").write_text("a b c")


def save(rank: int, world: int, path: str, setting: Setting, **kwargs: Any) -> dict[str, Tensor]:
    model = build(setting)
    expected = whole(model)
    optim = optimizer_of(model, 3.0)
    kwargs = {"model": model, "optimizer": optim, "model_format": "safetensors", "files": config, **kwargs}
    counting = Counting()
    with through(counting):
        checkpoint.save(path, extra={"step": 3}, **kwargs)
    later = checkpoint.async_save(f"{path}-later", extra={"step": 4}, **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # during the save, which does not see it
    later.result()
    assert (rank == 0) == any(name == "config.json" for _, name, _ in counting.operations)
    return expected


def load(rank: int, world: int, path: str, setting: Setting, step: int = 3) -> dict[str, Tensor]:
    model = build(setting, scale=0.0)
    optim = optimizer_of(model, 0.0)
    assert checkpoint.load(path, model=model, optimizer=optim) == {"step": step}
    assert all(state["momentum_buffer"].eq(3.0).all() for state in optim.state.values())
    return whole(model)


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


@pytest.mark.parametrize(
    ("world", "setting", "reader", "other"),
    [
        (3, Setting(orig=False), 2, Setting()),
        (4, Setting("HYBRID_SHARD"), 3, Setting("SHARD_GRAD_OP")),
        (2, Setting("NO_SHARD"), 1, Setting()),
    ],
    ids=["flat", "hybrid", "not sharded"],
)
def test_the_library_and_any_world_read_the_model(
    run: Any, tmp_path: Path, world: int, setting: Setting, reader: int, other: Setting
) -> None:
    path = tmp_path / "x"
    expected, *_ = run(world, save, str(path), setting)
    for folder, step in ((path, 3), (tmp_path / "x-later", 4)):
        found = load_file(folder / "model.safetensors")
        require_equal(found, {key: value for key, value in expected.items() if key not in TIED})
        for read in run(reader, load, str(folder), other, step):
            require_equal(read, expected)
    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert names == {
        *(f"__{rank}_0.distcp" for rank in range(world)),
        *(".metadata", "flatfsdp.json", "config.json", "tokens/words.txt"),
        *("model.safetensors", "model.safetensors.checksums.json"),
    }
    assert not any(key.startswith("model.") for key in dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


def read_by_others(rank: int, world: int, path: str) -> dict[str, Tensor]:
    """As an export, which it is too; and the entries that torch.distributed.checkpoint sees."""
    model = build(Setting(), scale=0.0)
    checkpoint.load_safetensors(model, path)
    state = {"extra": {"step": 0}, "optimizer": {"state": {"head.bias": {"momentum_buffer": torch.zeros(3)}}}}
    state["optimizer"]["state"] = {"gain": {"momentum_buffer": torch.zeros(())}}
    dcp.load(state, checkpoint_id=path)
    assert state["extra"] == {"step": 3} and state["optimizer"]["state"]["gain"]["momentum_buffer"] == 3.0
    return whole(model)


def test_it_is_an_export_too_and_the_rest_is_torchs_to_read(pool2: Any, tmp_path: Path, capsys: Any) -> None:
    expected, _ = pool2(save, str(tmp_path / "x"), Setting())
    for found in pool2(read_by_others, str(tmp_path / "x")):
        require_equal(found, expected)
    assert main(["show", str(tmp_path / "x")]) == 0 and main(["verify", str(tmp_path / "x")]) == 0
    texts = capsys.readouterr().out
    assert "optimizer: " in texts and "is complete: the checksums of 7 files match" in texts, texts
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "weights"), "--to", "safetensors"]) == 0
    require_equal(load_file(tmp_path / "weights" / "model.safetensors"), expected)


def several_files(rank: int, world: int, path: str) -> dict[str, Tensor]:
    sizes = weights._LARGEST_FILE, weights.BLOCK
    weights._LARGEST_FILE, weights.BLOCK = 2000, 512
    saving._plans.clear()  # made with other sizes
    try:
        return save(rank, world, path, Setting())
    finally:
        saving._plans.clear()
        weights._LARGEST_FILE, weights.BLOCK = sizes


def test_large_models_are_several_files_of_several_blocks(pool2: Any, tmp_path: Path) -> None:
    expected, _ = pool2(several_files, str(tmp_path / "x"))
    places = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())["weight_map"]
    assert places.keys() == expected.keys() - TIED and len(set(places.values())) > 2
    for read in pool2(load, str(tmp_path / "x"), Setting()):
        require_equal(read, expected)
    checksums = json.loads((tmp_path / "x" / "model.safetensors.checksums.json").read_text())
    assert max(map(len, checksums["crc32"].values())) > 2


def message(rank: int, world: int, work: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        work(rank, world, *args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return ""


def test_damage_in_any_file_is_found_by_all(pool2: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    pool2(save, str(path), Setting())
    for name in ("model.safetensors", "config.json", "tokens/words.txt"):
        good = (path / name).read_bytes()
        (path / name).write_bytes(good[:-2] + bytes([good[-2] ^ 1]) + good[-1:])
        for text in pool2(message, load, str(path), Setting()):
            assert f"{path / name} is damaged: its CRC-32 is " in text
        (path / name).write_bytes(good[:-1])
        (listed,) = [each for each in checkpoint.listing(tmp_path) if each.path == path]
        assert f"{path / name} has {len(good) - 1} bytes, {len(good)} were written" in listed.problem
        (path / name).write_bytes(good)
    pool2(load, str(path), Setting())


# --- further files ----------------------------------------------------------------------------------------------------


def failing(folder: Path) -> None:
    raise KeyError("tokenizer")


def overwriting(folder: Path) -> None:
    (folder / "model.safetensors").write_text("mine")


def test_what_files_does_wrong_reaches_all_ranks(pool2: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    for files, expected in (
        (failing, "rank 0: the function given as files= raised KeyError: 'tokenizer'"),
        (overwriting, "rank 0: the function given as files= wrote or removed model.safetensors: the checkpoint's own"),
    ):
        for text in pool2(message, save, str(path), Setting(), files=files):
            assert text == f"saving {path}: {expected}"
    assert not list(tmp_path.iterdir())


def test_its_own_files_are_no_obstacle_to_replacing_it_and_others_are(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for number in (1.0, 2.0):
        state = {"w": torch.full((2, 3), number)}
        checkpoint.save(path, model=state, model_format="safetensors", files=config, overwrite=True)
        assert torch.equal(load_file(path / "model.safetensors")["w"], state["w"])
    (path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds 1 files that were not written by a save \(notes.txt\)"):
        checkpoint.save(path, model=state, model_format="safetensors", overwrite=True)


def test_killed_at_any_moment_a_whole_checkpoint_is_there(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lock, "EMPTY", 0.0)
    path = tmp_path / "x"
    before = 1.0

    def save(number: float) -> None:
        state = {f"w{each}": torch.full((each + 1,), number) for each in range(6)}
        checkpoint.save(
            path,
            model=state,
            extra={"n": number},
            overwrite=True,
            model_format="safetensors",
            files=lambda folder: void((folder / "config.json").write_text(str(number))),
        )

    def good() -> float:
        held = {f"w{each}": torch.zeros(each + 1) for each in range(6)}
        number: float = checkpoint.load(path, model=held)["n"]
        assert all(torch.equal(value, torch.full_like(value, number)) for value in held.values())
        return number

    save(before)
    counting = Counting()
    with through(counting):
        save(before)
    moments = sum(operation not in ("read", "open") for operation, _, _ in counting.operations)
    for moment in range(0, moments, 1 if is_thorough() else 3):
        with through(Mortal(moment)), pytest.raises(Killed):
            save(moment + 2.0)
        assert good() in (before, moment + 2.0), moment
        before = moment + 2.5
        save(before)  # clears up
        assert good() == before and {each.name for each in tmp_path.iterdir()} == {"x"}, moment
        assert (path / "config.json").read_text() == str(before)


def void(_: object) -> None: ...


# --- nodes ------------------------------------------------------------------------------------------------------------


def on_own_disks(rank: int, world: int, path: str, setting: Setting, nodes: int) -> dict[str, Tensor]:
    """Ranks of a node share a disk."""
    folders.PATIENCE = 0.2
    node = rank * nodes // world
    where = f"{path}/node{node}/x"
    model = build(setting)
    optim = optimizer_of(model, 3.0)
    call = {"model": model, "optimizer": optim, "model_format": "safetensors", "files": config, "per_node": True}
    extra = {"step": 3, "large": {"of 0": torch.ones(5)}} if rank == 0 else {"step": 3}
    if setting.strategy == "HYBRID_SHARD":
        checkpoint.save(where, extra=extra, **call)
    else:
        words = "the ranks of a node do not hold the whole model between them"
        with pytest.warns(FlatFSDPWarning, match=words) if rank == 0 else nullcontext():
            checkpoint.save(where, extra=extra, **call)
    again = build(setting, scale=0.0)
    found = checkpoint.load(where, model=again)
    assert found["step"] == 3 and found["large"]["of 0"].tolist() == [1.0] * 5  # sent by the node that has it
    (listed,) = checkpoint.listing(f"{path}/node{node}")
    assert not listed.problem and listed.world == world
    require_equal(whole(again), whole(model))
    return whole(model)


def test_each_node_has_the_model_where_its_ranks_hold_it(run: Any, tmp_path: Path) -> None:
    expected, *_ = run(4, on_own_disks, str(tmp_path / "hybrid"), Setting("HYBRID_SHARD"), 2)
    for node in range(2):
        found = load_file(tmp_path / "hybrid" / f"node{node}" / "x" / "model.safetensors")
        require_equal(found, {key: value for key, value in expected.items() if key not in TIED})
    run(2, on_own_disks, str(tmp_path / "sharded"), Setting(), 2)
    names = {file.name for file in (tmp_path / "sharded" / "node1" / "x").iterdir()}
    assert "config.json" in names and not any("safetensors" in name for name in names)


# --- which are there --------------------------------------------------------------------------------------------------


def exchanged(rank: int, world: int, path: str) -> list[int]:
    sizes: list[int] = []

    def counted(content: bytes, group: Any) -> list[bytes]:
        sizes.append(len(content))
        return gather_bytes(content, group)

    model = build(Setting())
    for name in ("first", "second"):
        sizes.clear()
        with patch("flatfsdp.messages.gather_bytes", counted):
            checkpoint.save(f"{path}/{name}", model=model, model_format="safetensors")
    assert len(checkpoint.listing(path)) == 2
    return sizes


def test_the_plan_is_made_once_for_checkpoints_in_other_folders(pool2: Any, tmp_path: Path) -> None:
    for sizes in pool2(exchanged, str(tmp_path)):
        assert max(sizes) < 500, sizes


def test_older_ones_go_when_the_new_one_is_complete(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / ".step-9.new").mkdir()
    keeping = checkpoint.Keeping(last=1, best=1, by="loss", named="step-*", unfinished=True)
    state = {"w": torch.zeros(3)}
    checkpoint.save(tmp_path / "mine", model=state)
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0)):
        if step == 3:
            with pytest.raises(CheckpointError, match="No space left"), through(Full(10)):
                checkpoint.save(tmp_path / "step-x", model=state, keeping=keeping)
            assert {each.path.name for each in checkpoint.listing(tmp_path)} == {"mine", "step-1", "step-2"}
        checkpoint.save(tmp_path / f"step-{step}", model=state, metrics={"loss": loss}, keeping=keeping)
    assert {each.name for each in tmp_path.iterdir()} == {"notes", "mine", "step-1", "step-3"}
    assert [each.path.name for each in checkpoint.listing(tmp_path, named="step-*")] == ["step-1", "step-3"]


def test_a_listing_reports_what_is_wrong(tmp_path: Path) -> None:
    state = {"w": torch.zeros(300)}
    for name in ("good", "short", "lost", "unread"):
        checkpoint.save(tmp_path / name, model=state, metrics={"loss": 1.5})
    with through(Mortal(12)), pytest.raises(Killed):
        checkpoint.save(tmp_path / "killed", model=state)
    (tmp_path / "short" / "__0_0.distcp").write_bytes(b"")
    (tmp_path / "lost" / "__0_0.distcp").unlink()
    (tmp_path / "unread" / "flatfsdp.json").write_text("{}")
    found = {each.path.name: each for each in checkpoint.listing(tmp_path)}
    assert found.keys() == {"good", "short", "lost", "unread", "killed"}
    assert (found["good"].problem, found["good"].world, found["good"].metrics) == ("", 1, {"loss": 1.5})
    assert "has 0 bytes" in found["short"].problem and found["lost"].problem == "__0_0.distcp is missing"
    assert "/unread/flatfsdp.json is damaged: " in found["unread"].problem and not found["unread"].unfinished
    assert found["killed"].unfinished and found["killed"].problem.endswith("its save did not finish")
    assert checkpoint.listing(tmp_path / "nowhere") == []
