"""Checkpoints that are kept, and the newest one, in one process: links, folders of others, clocks that are set."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flatfsdp import checkpoint
from flatfsdp.checkpoint import lock
from flatfsdp.checkpoint.disk import through
from flatfsdp.checkpoint.manifest import Manifest
from flatfsdp.errors import CheckpointError
from flatfsdp.trainer.state.checkpoints import CheckpointManager
from tests.harness.disks import Killed, Mortal
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.unit


def save(path: Path, number: int = 1, **kwargs: Any) -> None:
    checkpoint.save(path, model={"w": torch.full((3,), float(number))}, extra={"n": number}, **kwargs)


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def listed(folder: Path) -> list[str]:
    found = checkpoint.listing(folder)
    assert not any(each.problem for each in found), found
    return [each.path.name for each in found]


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_link_to_a_checkpoint_is_neither_counted_nor_followed(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save(tmp_path / f"step-{step}", step)
    (tmp_path / "latest").symlink_to("step-300")
    (tmp_path / "first").symlink_to("step-100")
    assert listed(tmp_path) == ["step-100", "step-200", "step-300"]
    assert [each.path.name for each in checkpoint.listing(tmp_path, named="latest")] == ["latest"]
    assert checkpoint.keep(tmp_path, last=2) == [tmp_path / "step-100"]
    assert names(tmp_path) == {"step-200", "step-300", "latest", "first"}
    assert checkpoint.load(tmp_path / "latest") == {"n": 300}


def test_a_link_to_a_checkpoint_elsewhere_is_listed_and_stays(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    save(there / "step-1")
    save(here / "step-2", 2)
    (here / "step-1").symlink_to(there / "step-1")
    assert listed(here) == ["step-1", "step-2"]
    save(here / "step-3", 3)
    assert checkpoint.keep(here, last=1) == [here / "step-2"]
    assert names(here) == {"step-1", "step-3"} and checkpoint.load(here / "step-1") == {"n": 1}


def test_a_save_never_replaces_what_a_link_leads_to(tmp_path: Path) -> None:
    save(tmp_path / "step-1", 1)
    (tmp_path / "latest").symlink_to("step-1")
    for path in (tmp_path / "latest", f"{tmp_path}/latest/"):
        with pytest.raises(CheckpointError, match=r"/latest is a symbolic link to .*/step-1; a save"):
            save(path, 2, overwrite=True)  # type: ignore[arg-type]
    assert checkpoint.load(tmp_path / "step-1") == {"n": 1} and (tmp_path / "latest").is_symlink()
    model = torch.nn.Linear(2, 2)
    checkpoint.export_safetensors(model, tmp_path / "export")
    (tmp_path / "weights").symlink_to("export")
    with pytest.raises(CheckpointError, match=r"/weights is a symbolic link to "):
        checkpoint.export_safetensors(model, tmp_path / "weights", overwrite=True)


def test_folders_of_others_in_the_places_of_saves_are_left_alone(tmp_path: Path) -> None:
    keeping = checkpoint.Keeping(last=1, unfinished=True)
    foreign = tmp_path / "foreign"
    save(foreign, 7)
    (foreign / "thesis.txt").write_text("all of it")
    run = tmp_path / "run"
    for name in (".x.new", ".y.old", ".step-1.new"):
        (run / name).mkdir(parents=True)
        (run / name / "thesis.txt").write_text("all of it")
    (run / ".z.old").symlink_to(foreign)
    (run / ".step-2.new").symlink_to(foreign)
    (run / ".w.123-4.token").symlink_to(foreign)
    for name in (".step-1.new", ".step-2.new"):
        with pytest.raises(CheckpointError, match=rf"{name} lies where saves to .* no save made it"):
            save(run / name[1:-4], keeping=keeping)
    save(run / "step-3", keeping=keeping)
    save(run / "step-4", keeping=keeping)
    assert checkpoint.keep(run) == []
    assert names(run) == {".x.new", ".y.old", ".step-1.new", ".step-2.new", ".z.old", ".w.123-4.token", "step-4"}
    assert names(foreign) == {"thesis.txt", ".metadata", "__0_0.distcp", "flatfsdp.json"}
    assert all((run / name / "thesis.txt").is_file() for name in (".x.new", ".y.old", ".step-1.new"))


def test_files_that_somebody_put_into_a_folder_of_a_checkpoint_stay(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab").write_text("a b")

    save(tmp_path / "x", files=write)
    save(tmp_path / "x", 2, files=write, overwrite=True)
    (tmp_path / "x" / "tokenizer" / "mine").write_text("c")
    with pytest.raises(CheckpointError, match=r"holds 1 files that were not written by a save \(tokenizer/mine\)"):
        save(tmp_path / "x", 3, overwrite=True)
    (tmp_path / "x" / "tokenizer" / "mine").unlink()
    (tmp_path / "x" / "other").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds 1 files that were not written by a save \(other\)"):
        save(tmp_path / "x", 3, overwrite=True)


def test_what_a_killed_save_or_removal_has_left_is_known_by_its_mark(tmp_path: Path, monkeypatch: Any) -> None:
    """With user files inside, which have any names."""
    monkeypatch.setattr(lock, "EMPTY", 0.0)  # locks whose makers were killed before their first write

    def write(folder: Path) -> None:
        (folder / "anything").write_text("goes")

    keeping = checkpoint.Keeping(last=1, unfinished=True)
    for moment in range(0, 60, 1 if is_thorough() else 5):
        folder = tmp_path / str(moment)
        for step in (1, 2):
            save(folder / f"step-{step}", step, files=write)
        killed = False
        try:
            with through(Mortal(moment)):
                save(folder / "step-3", 3, files=write, keeping=keeping)
        except Killed:
            killed = True
        save(folder / "step-4", 4, files=write, keeping=keeping)
        assert names(folder) == {"step-4"}, moment
        if not killed:
            return
    raise AssertionError("the save has no end")


# --- order ------------------------------------------------------------------------------------------------------------


def test_which_is_newest_does_not_hang_on_the_clock(tmp_path: Path) -> None:
    now = time.time()
    for step, shift in ((100, 0.0), (200, 60.0), (300, -3600.0), (400, -3540.0), (500, 9e8), (600, 0.0)):
        with mock.patch("time.time", lambda shift=shift: now + shift):
            save(tmp_path / f"step-{step}", step, keeping=checkpoint.Keeping(last=2))
        assert listed(tmp_path) == [f"step-{each}" for each in (step - 100, step) if each]
    assert [each.sequence for each in checkpoint.listing(tmp_path)] == [5, 6]


def test_a_run_that_goes_on_from_an_older_step_saves_what_is_newest(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save(tmp_path / f"step-{step}", step)
    for step in (150, 200):  # the second of that name
        save(tmp_path / f"step-{step}", step, overwrite=True, keeping=checkpoint.Keeping(last=3))
    assert listed(tmp_path) == ["step-300", "step-150", "step-200"]
    save(tmp_path / "step-10", 10, keeping=checkpoint.Keeping(last=1))
    assert listed(tmp_path) == ["step-10"]


def test_a_save_never_removes_what_it_has_just_completed(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    as_saved(tmp_path / "step-1", sequence=2**40)  # as of another job that has gone on saving
    with mock.patch("flatfsdp.checkpoint.saving.last_sequence", lambda folder: 3):
        save(tmp_path / "step-2", keeping=checkpoint.Keeping(last=1))
    assert names(tmp_path) == {"step-1", "step-2"}


def as_saved(path: Path, **changes: Any) -> None:
    """Write the manifest again, with other contents."""
    from dataclasses import replace

    file = path / "flatfsdp.json"
    file.write_bytes(replace(Manifest.from_bytes(file.read_bytes(), "it"), **changes).to_bytes())


def test_of_two_saves_of_one_place_the_later_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "x", 1)
    with mock.patch("time.time", lambda: 1.0):
        save(tmp_path / "y" / "x", 2)
        save(tmp_path / "y" / "x", 3, overwrite=True)
    os.rename(tmp_path / "y" / "x", tmp_path / ".x.new")  # complete, and killed before it took its place
    assert checkpoint.load(tmp_path / "x") == {"n": 3}


# --- the trainer's ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
def test_a_run_finds_its_own_last_checkpoint_whatever_the_clock_shows(tmp_path: Path) -> None:
    model, run = torch.nn.Linear(2, 2), CheckpointManager(tmp_path, asynchronous=False)
    now = time.time()

    def play(shift: float, *steps: int) -> None:
        with mock.patch("time.time", lambda: now + shift):
            for step in steps:
                run.save(step, model=model)

    play(0.0, 5, 10)
    play(-3600.0, 15, 20)
    assert run.find("latest") == tmp_path / "step-00000020"
    assert names(tmp_path) == {"step-00000015", "step-00000020"}
    play(-7200.0, 25)
    (tmp_path / "chosen").symlink_to("step-00000020")
    assert run.set_aside(tmp_path / "chosen") == tmp_path / "aside-1"
    assert names(tmp_path) == {"step-00000020", "chosen", "aside-1"}
    assert run.find("latest") == tmp_path / "step-00000020" and run.find(tmp_path / "chosen") == tmp_path / "chosen"
    play(-9000.0, 21, 22)
    assert run.find("latest") == tmp_path / "step-00000022"
    assert names(tmp_path) == {"step-00000021", "step-00000022", "chosen", "aside-1"}
