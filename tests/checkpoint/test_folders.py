"""Folders of checkpoints: any world reads what any saved; damage, full disks and lost ranks raise clear errors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from flatfsdp import checkpoint
from flatfsdp.checkpoint import folders, lock
from flatfsdp.checkpoint.disk import Disk, through
from flatfsdp.errors import CheckpointError
from flatfsdp.messages import gather_bytes
from tests.harness import pool
from tests.harness.disks import Counting, Full, Killed, Mortal
from tests.harness.thorough import is_thorough
from tests.state.test_owned_interval import SPECS, piece, whole

pytestmark = pytest.mark.distributed

Run = Any


def state_of(rank: int, world: int, *, fill: float | None = None, add: float = 0.0) -> dict[str, Any]:
    """A model's state as one rank holds it: intervals of every kind, whole tensors, and plain values."""
    model: dict[str, Any] = {name: piece(spec, rank, world, fill=fill) for name, spec in SPECS.items()}
    for value in model.values():
        if fill is None:
            value.local.add_(add)
    model["buffer"] = torch.full((3, 2), 7.0 + add) if fill is None else torch.full((3, 2), fill)
    return model


def require_equal(state: dict[str, Any], rank: int, world: int, add: float = 0.0) -> None:
    for key, value in state_of(rank, world, add=add).items():
        mine = state[key]
        assert torch.equal(getattr(mine, "local", mine), getattr(value, "local", value)), key


def save(rank: int, world: int, path: str, add: float = 0.0, **kwargs: Any) -> None:
    extra = {"step": 3, "betas": (0.9, 0.999), "rng": {str(rank): torch.arange(rank + 1)}}
    checkpoint.save(path, model=state_of(rank, world, add=add), extra=extra, **kwargs)


def load(rank: int, world: int, path: str, add: float = 0.0) -> set[int]:
    """Returns the ranks whose own extra tensors there are."""
    state = state_of(rank, world, fill=-1.0)
    extra = checkpoint.load(path, model=state)
    require_equal(state, rank, world, add)
    assert extra["step"] == 3 and extra["betas"] == (0.9, 0.999)
    assert all(numbers.tolist() == list(range(int(saver) + 1)) for saver, numbers in extra["rng"].items())
    return {int(saver) for saver in extra["rng"]}


def message(rank: int, world: int, path: str, **kwargs: Any) -> str:
    """The message of the CheckpointError that `save` raises on this rank; empty if it raises none."""
    try:
        save(rank, world, path, **kwargs)
    except CheckpointError as error:
        return str(error)
    return ""


# --- worlds -----------------------------------------------------------------------------------------------------------


def test_any_world_loads_what_any_world_saved(tmp_path: Path) -> None:
    for saved in (1, 3):
        pool.run(saved, save, str(tmp_path / str(saved)))
    for saved in (1, 3):
        for world in (1, 2, 3):
            assert pool.run(world, load, str(tmp_path / str(saved))) == [set(range(saved))] * world


def through_dcp(rank: int, world: int, path: str) -> None:
    save(rank, world, f"{path}/ours")
    state = state_of(rank, world, fill=-1.0)
    dcp.load({"model": state}, checkpoint_id=f"{path}/ours")
    require_equal(state, rank, world)
    plain = {"model": {name: torch.full_like(whole(spec), -1.0) for name, spec in SPECS.items()}}
    dcp.load(plain, checkpoint_id=f"{path}/ours")
    for name, spec in SPECS.items():
        assert torch.equal(plain["model"][name], whole(spec)), name


def test_torchs_distributed_checkpoint_reads_ours(pool2: Run, tmp_path: Path) -> None:
    pool2(through_dcp, str(tmp_path))
    torch_file = tmp_path / "whole.pt"
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "ours", torch_file)
    read = torch.load(torch_file)
    assert torch.equal(read["model"]["channels_last"], whole(SPECS["channels_last"]))
    assert read["extra"]["step"] == 3 and read["extra"]["rng"]["1"].tolist() == [0, 1]


def replicas(rank: int, world: int, path: str) -> list[int]:
    """Two copies of two shards: ranks 0 and 2 hold the same, and so do 1 and 3."""
    counting = Counting()
    with through(counting):
        checkpoint.save(path, model=state_of(rank % 2, 2))
    state = state_of(rank, world, fill=-1.0)
    checkpoint.load(path, model=state)
    require_equal(state, rank, world)
    return [size for operation, name, size in counting.operations if operation == "write" and name.endswith("distcp")]


def test_replicas_share_the_writing(run: Run, tmp_path: Path) -> None:
    written = run(4, replicas, str(tmp_path / "x"))
    archives = [len(sizes) for sizes in written]
    assert sum(archives) == sum(
        len(getattr(value, "boxes", [0])) for rank in (0, 1) for value in state_of(rank, 2).values()
    ) - len(["buffer"])  # held whole by both
    assert all(archives), archives


def fewer_bytes(rank: int, world: int, path: str) -> int:
    state = state_of(rank, world, fill=-1.0)
    counting = Counting()
    with through(counting):
        checkpoint.load(path, model=state, verify=False)
    require_equal(state, rank, world)
    return sum(size for operation, name, size in counting.operations if operation == "read" and "distcp" in name)


def test_a_rank_reads_only_what_it_requests(run: Run, tmp_path: Path) -> None:
    run(2, save, str(tmp_path / "x"))
    read = run(3, fewer_bytes, str(tmp_path / "x"))
    for rank, size in enumerate(read):
        own = sum(piece(spec, rank, 3).local.numel() * 4 for spec in SPECS.values())
        extra = sum(8 * (saver + 1) for saver in range(2))
        assert size == own + 24 + extra, rank


def cached(rank: int, world: int, path: str) -> list[int]:
    """The numbers of messages in each of three saves, and the size of the largest message in the last."""
    sizes: list[list[int]] = []

    def counted(content: bytes, group: Any) -> list[bytes]:
        sizes[-1].append(len(content))
        return gather_bytes(content, group)

    with patch("flatfsdp.messages.gather_bytes", counted):
        for add in (0.0, 1.0, 2.0):
            sizes.append([])
            checkpoint.save(
                path, model=state_of(rank, world, add=add), extra={"log": "x" * int(add * 99)}, overwrite=True
            )
    state = state_of(rank, world, fill=-1.0)
    assert checkpoint.load(path, model=state) == {"log": "x" * 198}
    require_equal(state, rank, world, 2.0)
    of_dcp: dict[str, Any] = {"model": state_of(rank, world, fill=-1.0), "extra": {"log": ""}}
    dcp.load(of_dcp, checkpoint_id=path)  # whose table of contents follows the values' lengths
    assert of_dcp["extra"] == {"log": "x" * 198}
    require_equal(of_dcp["model"], rank, world, 2.0)
    return [len(sizes[0]), len(sizes[1]), len(sizes[2]), max(sizes[2])]


def test_a_plan_is_made_once(pool2: Run, tmp_path: Path) -> None:
    for first, second, third, largest in pool2(cached, str(tmp_path / "x")):
        assert (first - 1, second, largest) == (second, third, largest) and largest < 500


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_complete_checkpoint_is_replaced_only_on_demand(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    run(2, save, path)
    for text in run(2, message, path, add=1.0):
        assert text == (
            f"saving {path}: rank 0: {path} is complete already. Save to another folder, or pass "
            "overwrite=True: then the old one stays until the new one is complete"
        )
    run(2, load, path)
    run(2, save, path, add=1.0, overwrite=True)
    run(2, load, path, 1.0)
    (tmp_path / "x" / "notes.txt").write_text("mine")
    for text in run(2, message, path, overwrite=True):
        assert "holds 1 files that were not written by a save (notes.txt); saving would remove them" in text
    assert {each.name for each in tmp_path.iterdir()} == {"x"}


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    checkpoint.save(tmp_path / "link", model={"w": torch.ones(2)})
    held = {"w": torch.zeros(2)}
    checkpoint.load(tmp_path / "real", model=held)
    assert held["w"].tolist() == [1.0, 1.0] and (tmp_path / "link").is_symlink()
    assert {each.name for each in tmp_path.iterdir()} == {"real", "link"}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.ones(1).expand(3, 2),
        torch.tensor([1 + 2j]).conj(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(True),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
    ],
    ids=["transposed", "expanded", "conjugated", "channels_last", "bool", "float8"],
)
def test_tensors_of_every_kind_come_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    checkpoint.save(tmp_path / "x", model={"t": tensor}, extra={"t": tensor})
    held = {"t": torch.empty_like(tensor, memory_format=torch.preserve_format)}
    extra = checkpoint.load(tmp_path / "x", model=held)
    for found in (held["t"], extra["t"]):
        assert found.dtype == tensor.dtype and torch.equal(found.view(found.shape), tensor)
    of_dcp = {"model": {"t": torch.empty_like(tensor.resolve_conj()).contiguous()}}
    dcp.load(of_dcp, checkpoint_id=tmp_path / "x", no_dist=True)
    assert torch.equal(of_dcp["model"]["t"], tensor)


def different_values(rank: int, world: int, path: str) -> str:
    try:
        checkpoint.save(path, extra={"seed": rank, "same": 1})
    except CheckpointError as error:
        return str(error)
    return ""


def test_values_that_differ_between_ranks_need_names_that_differ(pool2: Run, tmp_path: Path) -> None:
    for text in pool2(different_values, str(tmp_path / "x")):
        assert text.endswith(
            "extra.seed is '0' on rank 0, but '1' on rank 1. Give values that differ between ranks different keys, "
            "such as the rank's number"
        )


def one_rank_fails(rank: int, world: int, path: str) -> str:
    value = (lambda: None) if rank == 1 else None
    try:
        checkpoint.save(path, extra={f"hook{rank}": value})
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_value_that_one_rank_cannot_save_is_reported_on_all(pool2: Run, tmp_path: Path) -> None:
    for text in pool2(one_rank_fails, str(tmp_path / "x")):
        assert "rank 1: ConfigTypeError: extra.hook1: got a value of type function. Accepted: tensors, None" in text


def unfit(rank: int, world: int, path: str, strict: bool) -> str:
    state = state_of(rank, world, fill=-1.0)
    state["another"] = state.pop("buffer")
    state["one"] = torch.zeros(5)
    try:
        checkpoint.load(path, model=state, strict=strict)
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_does_not_fit_is_listed_together(pool2: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    pool2(save, path)
    for text in pool2(unfit, path, True):
        assert text == (
            f"loading {path}: on all 2 ranks: missing from the checkpoint: model.another; unexpected in the "
            "checkpoint: model.buffer; model.one has shape (2,) in the checkpoint, (5,) here"
        )
    for text in pool2(unfit, path, False):
        assert text == f"loading {path}: on all 2 ranks: model.one has shape (2,) in the checkpoint, (5,) here"


def test_nothing_there_is_reported_by_all(pool2: Run, tmp_path: Path) -> None:
    with pytest.raises(pool.JobFailed) as caught:
        pool2(load, str(tmp_path / "x"))
    assert len(caught.value.errors) == 2
    for error in caught.value.errors.values():
        assert f"{tmp_path}/x: no complete checkpoint there" in error


# --- whose files ------------------------------------------------------------------------------------------------------


def own_folder(rank: int, world: int, path: str, per_node: bool) -> str:
    """Each rank has a disk of its own."""
    folders.PATIENCE = 0.2
    text = message(rank, world, f"{path}/node{rank}/x", per_node=per_node)
    if per_node:
        assert load(rank, world, f"{path}/node{rank}/x") == set(range(world))  # nodes send each other small values
        save(rank, world, f"{path}/node{rank}/x", per_node=True, overwrite=True, add=1.0)
        load(rank, world, f"{path}/node{rank}/x", 1.0)
    return text


def load_reported(rank: int, world: int, path: str) -> str:
    try:
        checkpoint.load(path, model=state_of(rank, world, fill=-1.0))
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_see_the_folder_are_named_and_may_have_their_own(run: Run, tmp_path: Path) -> None:
    for text in run(3, own_folder, str(tmp_path), False):
        assert "ranks 1, 2 of 3 do not see the files of rank 0 in " in text and "or pass per_node=True" in text
    assert run(3, own_folder, str(tmp_path), True) == [""] * 3
    assert not list(tmp_path.glob("**/*.token"))
    (text,) = run(1, load_reported, str(tmp_path / "node1" / "x"))
    assert "__2_0.distcp are missing. After a save with per_node=True each node has its own ranks' files: copy" in text
    for node in (0, 2):
        for file in (tmp_path / f"node{node}" / "x").glob("*.distcp"):
            file.rename(tmp_path / "node1" / "x" / file.name)
    assert run(1, load, str(tmp_path / "node1" / "x"), 1.0) == [{0, 1, 2}]


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_and_a_lost_end_are_found_by_all(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x"
    run(2, save, str(path))
    file = path / "__1_0.distcp"
    whole_file = file.read_bytes()
    file.write_bytes(whole_file[:-1])
    for text in run(2, load_reported, str(path)):
        assert f"{file} has {len(whole_file) - 1} bytes, {len(whole_file)} were written" in text
    damaged = bytearray(whole_file)
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    for text in run(2, load_reported, str(path)):
        assert f"{file} is damaged: its CRC-32 is " in text
    file.unlink()
    for text in run(2, load_reported, str(path)):
        assert f"{file} is missing" in text


def full_disk(rank: int, world: int, path: str, room: int) -> str:
    with through(Full(room if rank == 1 else 2**40)):
        return message(rank, world, path, add=1.0, overwrite=True)


def test_a_full_disk_is_reported_on_all_and_the_old_checkpoint_stays(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    run(2, save, path)
    for room in (0, 3000):
        for text in run(2, full_disk, path, room):
            assert text.startswith(f"saving {path}: rank 1: OSError: [Errno 28] No space left on device: ")
        assert {each.name for each in tmp_path.iterdir()} == {"x"}  # the disk space is freed
        run(2, load, path)


def test_a_path_below_a_plain_file_is_reported_on_all(pool2: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in pool2(message, str(tmp_path / "file" / "x")):
        assert text.startswith(f"saving {tmp_path}/file/x: rank 0: ") and f"{tmp_path}/file" in text


def test_killed_at_any_moment_a_good_checkpoint_is_there(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        lock, "EMPTY", 0.0
    )  # else to be waited for, where the maker of a lock had not written to it yet
    path = tmp_path / "x"
    before = 1.0

    def state(number: float) -> dict[str, Any]:
        return {"model": {f"w{each}": torch.full((each + 1,), number) for each in range(40)}, "extra": {"n": number}}

    def good() -> float:
        held = {f"w{each}": torch.full((each + 1,), -1.0) for each in range(40)}
        found: float = checkpoint.load(path, model=held)["n"]
        assert all(torch.equal(value, torch.full_like(value, found)) for value in held.values())
        return found

    def kill(moment: int, number: float) -> None:
        with through(Mortal(moment)), pytest.raises(Killed):
            checkpoint.save(path, **state(number), overwrite=True)

    checkpoint.save(path, **state(0.0))
    counting = Counting()
    with through(counting):
        checkpoint.save(path, **state(1.0), overwrite=True)
    moments = sum(operation not in ("read", "open") for operation, _, _ in counting.operations)
    assert moments > 50
    step = 1 if is_thorough() else 3
    for moment in range(0, moments, step):
        kill(moment, moment + 2.0)
        assert good() in (before, moment + 2.0), moment
        before = moment + 2.5
        checkpoint.save(path, **state(before), overwrite=True)  # clears up
        assert good() == before and {each.name for each in tmp_path.iterdir()} == {"x"}, moment
    for moment in (*range(0, moments, 7 * step), *range(moments - 1, 0, -5 * step)):  # killed again and again
        kill(moment, 1000.0 + moment)
        after = good()
        assert after in (before, 1000.0 + moment), moment
        before = after


# --- in the background ------------------------------------------------------------------------------------------------


def in_background(rank: int, world: int, path: str) -> None:
    state = state_of(rank, world)
    saving = checkpoint.async_save(f"{path}/x", model=state, extra={"step": 3})
    for value in state.values():
        getattr(value, "local", value).fill_(-5.0)  # the training goes on
    total = torch.ones(1)
    dist.all_reduce(total)  # and its messages do not meet those of the thread
    saving.result()
    assert saving.done() and total.item() == world
    held = state_of(rank, world, fill=-1.0)
    checkpoint.load(f"{path}/x", model=held)
    require_equal(held, rank, world)


def test_training_goes_on_while_a_thread_saves(run: Run, tmp_path: Path) -> None:
    run(3, in_background, str(tmp_path))


class Slow(Counting):
    """Takes its time over the first write."""

    def before(self, operation: str, path: Path, size: int) -> None:
        if operation == "write" and all(each != "write" for each, _, _ in self.operations):
            time.sleep(0.3)
        super().before(operation, path, size)


def test_a_save_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    with through(Slow()):
        saving = checkpoint.async_save(tmp_path / "x", model=state_of(0, 1))
        assert not saving.done()
        with pytest.raises(TimeoutError, match=r"not complete after 0\.01 seconds"):
            saving.result(0.01)
        saving.result()
    state = state_of(0, 1, fill=-1.0)
    checkpoint.load(tmp_path / "x", model=state)
    require_equal(state, 0, 1)


def errors_later(rank: int, world: int, path: str) -> list[str]:
    texts = []
    with through(Full(100 if rank == 1 else 2**40)):
        saving = checkpoint.async_save(f"{path}/a", model=state_of(rank, world))
        try:
            saving.result()
        except CheckpointError as error:
            texts.append(str(error))
        checkpoint.async_save(f"{path}/b", model=state_of(rank, world)).done()
        try:
            checkpoint.save(f"{path}/c", model=state_of(rank, world))
        except CheckpointError as error:
            texts.append(str(error))
    checkpoint.save(f"{path}/d", model=state_of(rank, world))
    return texts


def test_an_error_in_the_background_is_reported_by_its_result_or_by_the_next_save(pool2: Run, tmp_path: Path) -> None:
    for first, second in pool2(errors_later, str(tmp_path)):
        assert first.startswith(f"saving {tmp_path}/a: rank 1: OSError: [Errno 28]")
        assert f"failed: saving {tmp_path}/b: rank 1: OSError: [Errno 28]" in second
        assert "the previous save in the background failed" in second
    assert (tmp_path / "d" / "flatfsdp.json").exists()


def fails_to_stage(rank: int, world: int, path: str) -> str:
    state = {"w": torch.zeros(2, device="meta") if rank == 0 else torch.zeros(2)}
    try:
        checkpoint.async_save(path, model=state).result()
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_copy_its_state_is_reported_by_all(pool2: Run, tmp_path: Path) -> None:
    for text in pool2(fails_to_stage, str(tmp_path / "x")):
        assert "rank 0: ConfigTypeError: model.w: got a Tensor of layout torch.strided on meta" in text


class Locks(Disk):
    """Notes which locks are made."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def before(self, operation: str, path: Path, size: int) -> None:
        if operation == "create" and path.suffix == ".lock":
            self.made.append(path.name)


def locks_taken(rank: int, world: int, folder: str) -> list[str]:
    """The locks that this rank takes in saves, an export and a removal."""
    locks = Locks()
    with through(locks):
        for step in (1, 2):
            checkpoint.save(f"{folder}/step-{step}", extra={"step": step})
        checkpoint.async_save(f"{folder}/step-3", extra={"step": 3}).result()
        checkpoint.export_safetensors(torch.nn.Linear(2, 2), f"{folder}/export")
        checkpoint.keep(folder, last=2)
    return locks.made


def test_only_the_rank_that_writes_for_all_takes_locks(pool2: Any, tmp_path: Path) -> None:
    first, second = pool2(locks_taken, str(tmp_path))
    assert first == [".step-1.lock", ".step-2.lock", ".step-3.lock", ".export.lock", ".step-1.lock"]
    assert second == []
