"""Checkpoints in one process: the command line, and which ones stay."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from flatfsdp import checkpoint
from flatfsdp.checkpoint import lock
from flatfsdp.checkpoint.__main__ import in_mib, main
from flatfsdp.checkpoint.disk import through
from flatfsdp.errors import CheckpointError, ConfigValueError
from tests.harness.disks import Killed, Mortal

pytestmark = pytest.mark.distributed

WEIGHT = torch.arange(12.0).view(3, 4)


@pytest.fixture
def saved(pool2: Any, tmp_path: Path) -> Path:
    pool2(save, str(tmp_path / "x"))
    return tmp_path / "x"


def save(rank: int, world: int, path: str) -> None:
    from flatfsdp.engine.layout.layout import ParamSpec, Span
    from flatfsdp.engine.state.owned_interval import OwnedInterval

    half = OwnedInterval(
        WEIGHT.view(-1)[6 * rank : 6 * rank + 6].clone(), ParamSpec("w", (3, 4)), Span(6 * rank, 6 * rank + 6)
    )
    model = {"w": half, "b": torch.ones(3, dtype=torch.bfloat16)}
    optimizer = {"state": {"w": {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    checkpoint.save(path, model=model, optimizer=optimizer, extra={"epoch": 3}, metrics={"loss": 0.25})


def test_show_and_verify(saved: Path, capsys: Any) -> None:
    assert main(["show", str(saved), "--tensors"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("saved 20") and " by 2 ranks (flatfsdp " in first
    sizes = sum(each.stat().st_size for each in saved.iterdir() if each.name != "flatfsdp.json")
    assert lines == [
        f"3 files of {sizes:,} bytes",
        "metric loss: 0.25",
        "model: 2 tensors of 15 elements, 54 bytes",
        "optimizer: 1 tensors of 1 elements, 4 bytes",
        "optimizer: 2 plain values",
        "extra: 1 plain values",
        "  model.w: float32 [3, 4] in 4 pieces",
        "  model.b: bfloat16 [3] in 1 pieces",
        "  optimizer.state.w.step: float32 [] in 1 pieces",
        "  optimizer.param_groups.0.lr: 0.1",
        "  optimizer.param_groups.0.params: ['w']",
        "  extra.epoch: 3",
    ]
    (saved.parent / "half").mkdir()
    (saved.parent / ".half.new").mkdir()
    assert main(["show", str(saved.parent)]) == 0
    when = first.partition(" (")[0]
    row, half = capsys.readouterr().out.splitlines()[::-1]
    assert row == f"x: {when}, {sizes:,} bytes, loss 0.25"
    assert half.startswith("half: it has no flatfsdp.json")
    assert (in_mib(54), in_mib(3 * 2**30)) == ("54 bytes", "3,072.00 MiB")
    assert main(["verify", str(saved)]) == 0
    assert capsys.readouterr().out == f"{saved} is complete: the checksums of 3 files match\n"
    data = bytearray((saved / "__1_0.distcp").read_bytes())
    data[100] ^= 1
    (saved / "__1_0.distcp").write_bytes(data)
    assert main(["verify", str(saved)]) == 1
    assert "__1_0.distcp is damaged: its CRC-32 is" in capsys.readouterr().err
    assert main(["show", str(saved.parent / "y")]) == 1
    assert (
        capsys.readouterr().err == f"{saved.parent}/y: no complete checkpoint there. Pass the path that was saved to\n"
    )


def test_to_a_file_of_torchs_and_back(saved: Path, tmp_path: Path, capsys: Any) -> None:
    file, again = tmp_path / "x.pt", tmp_path / "again"
    assert main(["convert", str(saved), str(file), "--to", "torch"]) == 0
    state = torch.load(file)
    assert torch.equal(state["model"]["w"], WEIGHT) and state["optimizer"]["param_groups"] == [
        {"lr": 0.1, "params": ["w"]}
    ]
    assert state["extra"] == {"epoch": 3} and state["optimizer"]["state"]["w"]["step"] == 2.0
    assert main(["convert", str(saved), str(file), "--to", "torch"]) == 1
    assert "pass --overwrite" in capsys.readouterr().err
    assert main(["convert", str(file), str(again), "--to", "dcp"]) == 0
    target = {"w": torch.zeros(3, 4), "b": torch.zeros(3, dtype=torch.bfloat16)}
    assert checkpoint.load(again, model=target) == {"epoch": 3}
    assert torch.equal(target["w"], WEIGHT)


def test_to_safetensors_and_back(saved: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "hf"
    assert main(["convert", str(saved), str(folder), "--to", "safetensors"]) == 0
    found = load_file(folder / "model.safetensors")
    assert torch.equal(found["w"], WEIGHT) and found["b"].dtype == torch.bfloat16
    assert main(["show", str(folder), "--tensors"]) == 0 and main(["verify", str(folder)]) == 0
    assert "2 tensors of 54 bytes in 1 safetensors files\n  w: float32 [3, 4] in model" in capsys.readouterr().out
    assert main(["convert", str(folder), str(tmp_path / "back"), "--to", "dcp"]) == 0
    target = {"w": torch.zeros(3, 4), "b": torch.zeros(3, dtype=torch.bfloat16)}
    checkpoint.load(tmp_path / "back", model=target)
    assert torch.equal(target["w"], WEIGHT)
    assert main(["convert", str(saved), str(tmp_path / "o"), "--to", "safetensors", "--part", "optimizer"]) == 1
    assert "optimizer: param_groups, state are not tensors; safetensors hold tensors only" in capsys.readouterr().err


def test_what_dcp_saved_is_converted_on_trust(tmp_path: Path, capsys: Any) -> None:
    dcp.save({"model": {"w": WEIGHT}, "step": 4}, checkpoint_id=tmp_path / "x", no_dist=True)
    arguments = ["convert", str(tmp_path / "x"), str(tmp_path / "x.pt"), "--to", "torch"]
    assert main(arguments) == 1
    assert "reading a pickle runs whatever code it names" in capsys.readouterr().err
    assert main([*arguments, "--trust"]) == 0
    state = torch.load(tmp_path / "x.pt")
    assert state["step"] == 4 and torch.equal(state["model"]["w"], WEIGHT)


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


def test_nothing_of_a_file_is_executed_without_trust(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Evil()}, tmp_path / "x.pt")
    assert main(["convert", "x.pt", "y", "--to", "dcp"]) == 1
    assert "Pass --trust to read a file that holds more than tensors and plain values" in capsys.readouterr().err
    checkpoint.save(tmp_path / "x", model={"w": torch.ones(2)}, extra={"a": 1})
    table = tmp_path / "x" / ".metadata"
    table.write_bytes(pickle.dumps(Evil()).ljust(table.stat().st_size, b"\0"))
    assert checkpoint.load(tmp_path / "x", model={"w": torch.ones(2)}, verify=False) == {"a": 1}
    assert not (tmp_path / "touched").exists()


# --- which stay -------------------------------------------------------------------------------------------------------


def several(folder: Path) -> list[Path]:
    folder.mkdir()
    paths = []
    for step, loss in enumerate([0.5, 0.1, 0.3, float("nan"), 0.4, 0.6]):
        paths.append(folder / f"step{step}")
        checkpoint.save(paths[-1], extra={"step": step}, metrics={"loss": loss})
    (folder / "notes").mkdir()
    return paths


def test_the_last_and_the_best_stay(tmp_path: Path) -> None:
    paths = several(tmp_path / "a")
    assert checkpoint.keep(tmp_path / "a", last=2, best=2, by="loss") == [paths[0], paths[3]]
    assert checkpoint.keep(tmp_path / "a", last=1, best=1, by="loss", mode="max") == [paths[1], paths[2], paths[4]]
    assert checkpoint.load(paths[5]) == {"step": 5}
    assert {each.name for each in (tmp_path / "a").iterdir()} == {"step5", "notes"}
    with pytest.raises(ConfigValueError, match=r"^last: got 0\. Accepted: at least 1"):
        checkpoint.keep(tmp_path / "a", last=0)
    with pytest.raises(ConfigValueError, match=r"^best, by: got 1 and None"):
        checkpoint.keep(tmp_path / "a", best=1)
    with pytest.raises(CheckpointError, match=r"/b is not a folder"):
        checkpoint.keep(tmp_path / "b")


def test_a_removal_that_is_killed_leaves_whole_checkpoints(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lock, "EMPTY", 0.0)
    for moment in range(1, 13):
        folder = tmp_path / str(moment)
        paths = several(folder)
        with through(Mortal(moment)), pytest.raises(Killed):
            checkpoint.keep(folder, last=4)
        for step, path in enumerate(paths):
            if path.exists():
                assert checkpoint.load(path) == {"step": step}
        checkpoint.keep(folder, last=4)
        assert {each.name for each in folder.iterdir()} == {"notes", *(path.name for path in paths[2:])}


def removed(rank: int, world: int, folder: str) -> list[str]:
    return [path.name for path in checkpoint.keep(folder, last=5)]


def test_all_ranks_know_what_was_removed(pool2: Any, tmp_path: Path) -> None:
    several(tmp_path / "a")
    assert pool2(removed, str(tmp_path / "a")) == [["step0"], ["step0"]]
    assert json.loads((tmp_path / "a" / "step1" / "flatfsdp.json").read_text())["manifest"]["metrics"] == {"loss": 0.1}
