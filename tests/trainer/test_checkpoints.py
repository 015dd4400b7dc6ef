"""The trainer's checkpoints: the state that a run restores, on other numbers of ranks, after various faults."""

from __future__ import annotations

import json
import random
import threading
import warnings
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import checkpoint
from flatfsdp.checkpoint import folders, lock
from flatfsdp.checkpoint.conversion import read_state
from flatfsdp.checkpoint.disk import Disk, through
from flatfsdp.errors import CheckpointError, ConfigValueError, FlatFSDPWarning
from flatfsdp.trainer.model.hugging_face import files_of
from flatfsdp.trainer.state.checkpoints import CheckpointManager
from flatfsdp.trainer.state.components import Component, Sharing, rng_component, stateful_component
from tests.harness.corners import Setting, data, loss_of, seeded
from tests.harness.disks import Counting, Full, Killed, Mortal
from tests.harness.models import Feedforward, Low, Motley
from tests.harness.thorough import is_thorough
from tests.state.optim.test_optim_state import Corners

pytestmark = pytest.mark.distributed

ORIG, FLAT = Setting(), Setting(orig=False)
UNITS = (Feedforward, Low, Motley)


class Run:
    """The state of a trainer: a model, its optimizer and schedule, progress, and a loader's position."""

    def __init__(self, setting: Setting = ORIG) -> None:
        inside = seeded(Corners)
        self.model = setting.wrap(inside, UNITS, ignored_modules=[inside.outside])
        floating = [p for p in self.model.parameters() if p.is_floating_point()]
        self.optim = torch.optim.AdamW(floating, lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optim, total_iters=10)
        self.progress = {"step": 0, "loss": torch.zeros(())}
        self.seen: dict[str, Any] = {}

    def train(self, steps: int) -> Run:
        for step in range(steps):
            self.optim.zero_grad()
            loss = loss_of(self.model(data(0, step)))
            loss.backward()
            self.optim.step()
            self.schedule.step()
            self.progress = {"step": self.progress["step"] + 1, "loss": loss.detach()}
        return self

    def components(self) -> list[Component]:
        return [
            stateful_component("schedule", self.schedule),
            Component("progress", sharing=Sharing.GLOBAL, save=lambda: self.progress, load=lambda s: self._take(s)),
            rng_component(7),
        ]

    def _take(self, state: Any) -> None:
        self.progress = dict(state)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optim, "components": self.components()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Collective."""
        with FSDP.state_dict_type(self.model, "FULL"):
            return {key: value.clone() for key, value in self.model.state_dict().items()}


def drawn() -> list[float]:
    """The next random numbers of every kind."""
    import numpy

    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def save(rank: int, world: int, path: str, settings: dict[str, Any], step: int = 3) -> list[float]:
    torch.manual_seed(rank)
    random.seed(rank)
    run = Run().train(step)
    manager = CheckpointManager(path, **settings)
    saved = manager.save(step, **run.parts(), metrics={"eval_loss": 1.0 / step})
    assert saved.path == Path(path) / f"step-{step:08}" and saved.stall_seconds > 0.0
    weights, numbers = run.weights(), drawn()
    run.train(1)  # during the save, which does not see this
    manager.finish()
    if rank == 0:
        torch.save((weights, {**run.optim.state_dict()["param_groups"][0], "params": None}), f"{path}/expected.pt")
    return numbers


def load(rank: int, world: int, path: str, saved_by: int, which: str = "latest") -> tuple[list[float], list[str]]:
    run = Run(FLAT)
    manager = CheckpointManager(path)
    found = manager.find(which)
    assert found is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = manager.load(found, **run.parts())
    assert (loaded.path, loaded.step, loaded.world) == (found, 3, saved_by)
    weights, _ = torch.load(f"{path}/expected.pt", weights_only=False)
    assert all(torch.equal(value, weights[key]) for key, value in run.weights().items())
    assert run.progress["step"] == 3 and run.progress["loss"].item() > 0.0
    assert run.schedule.last_epoch == 3 and run.optim.param_groups[0]["lr"] == run.schedule.get_last_lr()[0]
    return drawn(), list(loaded.notes)


@pytest.mark.parametrize("settings", [{}, {"asynchronous": False, "format": "torch"}], ids=["safetensors", "torch"])
def test_a_run_goes_on_with_two_three_and_one_ranks(run: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    path = str(tmp_path)
    next_numbers = run(2, save, path, settings)
    assert [numbers for numbers, _ in run(2, load, path, 2)] == next_numbers  # each rank draws on
    assert next_numbers[0] != next_numbers[1]
    again = run(3, load, path, 2)
    assert len({tuple(numbers) for numbers, _ in again}) == 3 and run(3, load, path, 2) == again
    for rank, (_, notes) in enumerate(again):
        assert notes == [f"random numbers: reseeded from (seed 7, step 3, rank {rank})"]
    run(1, load, path, 2)
    if not settings:
        run(3, save, path, settings)
        run(1, load, path, 3, "best")


def test_a_folder_holds_the_model_once_and_reports_who_wrote_what(run: Any, tmp_path: Path) -> None:
    run(2, save, str(tmp_path), {})
    folder = tmp_path / "step-00000003"
    weights, _ = torch.load(tmp_path / "expected.pt", weights_only=False)
    found = load_file(folder / "model.safetensors")
    assert all(torch.equal(value, weights[key]) for key, value in found.items())
    assert weights.keys() - found.keys() == {"last.weight"}  # tied to the first one
    model = sum(value.nbytes for value in found.values())
    assert model < sum(file.stat().st_size for file in folder.glob("*.safetensors")) < model + 4096
    listed = json.loads((folder / "flatfsdp.json").read_text())["manifest"]
    assert not [key for key, each in listed["tensors"].items() if key.startswith("model") and each["chunks"][0][0] < 2]
    table = json.loads((folder / "components.json").read_text())
    assert (table["step"], table["world"]) == (3, 2)
    assert table["components"]["progress"] == {
        "sharing": "global",
        "required": True,
        "parts": {"all": {"written_by": 0}},
    }
    assert table["components"]["rng"]["parts"] == {
        "0": {"written_by": 0, "ranks": [0]},
        "1": {"written_by": 1, "ranks": [1]},
    }


# --- in the background ------------------------------------------------------------------------------------------------


def failing_in_the_background(rank: int, world: int, path: str) -> tuple[list[str], list[str]]:
    run = Run()
    manager = CheckpointManager(path, keep_last=1)
    manager.save(1, **run.parts())
    manager.finish()
    texts = []
    for step in (2, 3):
        disk = Full(3000 if rank == 1 and step == 2 else 2**40)
        with through(disk):
            manager.save(step, **run.parts())
            _settle(manager)  # the thread has finished with this disk
        for tell in (manager.finish, lambda: manager.save(4, **run.parts()), manager.finish):
            try:
                tell()
            except CheckpointError as error:
                texts.append(str(error))
        if step == 2:
            dist.barrier()
            there = [each.path.name for each in checkpoint.listing(path)]
    return texts, there


def _settle(manager: CheckpointManager) -> None:
    assert manager._saving is not None
    wait([manager._saving._saved], 60)


def test_a_save_that_failed_in_the_background_is_reported_to_all_once_and_costs_nothing(
    pool2: Any, tmp_path: Path
) -> None:
    for texts, there in pool2(failing_in_the_background, str(tmp_path)):
        assert len(texts) == 1 and "rank 1: OSError: [Errno 28] No space left on device" in texts[0], texts
        assert there == ["step-00000004"]  # and until that was complete, the first one
    assert {each.name for each in tmp_path.iterdir()} == {"step-00000004"}


class Gated(Disk):
    """Lets no elements of a model through before `gate` is set; records the main thread's accesses."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.by_main: list[tuple[str, str]] = []

    def before(self, operation: str, path: Path, size: int) -> None:
        if threading.current_thread() is threading.main_thread():
            self.by_main.append((operation, path.name))
        elif operation == "write" and path.suffix == ".safetensors":
            assert self.gate.wait(60)


def overlapping(rank: int, world: int, path: str) -> tuple[list[tuple[str, str]], list[bool]]:
    """The main thread's accesses to the disk for an asynchronous save, and whether a checkpoint exists, during the save
    and after it."""
    run = Run().train(1)
    gated = Gated(threading.Event())
    manager = CheckpointManager(path)
    there = []
    with through(gated):
        folder = manager.save(1, **run.parts()).path
        run.train(2)  # while nothing of the model has been written yet
        there.append(folder.exists())
        gated.gate.set()
        manager.finish()
    there.append(folder.exists())
    return gated.by_main, there


def test_training_goes_on_while_a_thread_writes(pool2: Any, tmp_path: Path) -> None:
    for by_main, there in pool2(overlapping, str(tmp_path)):
        assert by_main == [] and there == [False, True]
    pool2(load_step, str(tmp_path), 1)


def load_step(rank: int, world: int, path: str, step: int) -> None:
    run = Run()
    found = CheckpointManager(path).find("latest")
    assert found is not None and CheckpointManager(path).load(found, **run.parts()).step == step
    assert run.progress["step"] == step


# --- which ones -------------------------------------------------------------------------------------------------------


def several(rank: int, world: int, path: str, losses: list[float], **settings: Any) -> None:
    run = Run()
    manager = CheckpointManager(path, **settings)
    for step, loss in enumerate(losses, start=1):
        run.progress["step"] = step
        manager.save(step, **run.parts(), metrics={"loss": loss})
    manager.finish()


def found(rank: int, world: int, path: str, *whiches: str, **settings: Any) -> list[str]:
    manager = CheckpointManager(path, **settings)
    answers = []
    for which in whiches:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FlatFSDPWarning)
            try:
                answers.append(str(manager.find(which)))
            except CheckpointError as error:
                answers.append(str(error))
        answers += [str(each.message) for each in caught if rank == 0]
    return answers


def test_the_last_and_the_best_stay_and_are_found(pool2: Any, tmp_path: Path) -> None:
    path = str(tmp_path)
    settings = {"keep_last": 2, "keep_best": 1, "best_by": "loss", "best_mode": "max"}
    pool2(several, path, [1.0, 3.0, 2.0, 3.0, 1.0, 2.0], **settings)
    steps = [f"{path}/step-0000000{step}" for step in (4, 5, 6)]
    assert {str(each) for each in tmp_path.iterdir()} == set(steps)
    for answers in pool2(found, path, "latest", "best", steps[1], **settings):
        assert answers == [steps[2], steps[0], steps[1]]
    for (text,) in pool2(found, path, "best"):
        assert text.startswith(f"no checkpoint in {path} has the metric 'eval_loss', which determines the best: ")
        assert text.endswith("step-00000006, step-00000005, step-00000004")
    for (text,) in pool2(found, path, f"{path}/step-00000007"):
        assert text == (
            f"{path}/step-00000007 is neither a checkpoint nor a folder with *.safetensors or pytorch_model.bin, on "
            "all ranks; next to it are step-00000006, step-00000005, step-00000004"
        )
    for (text,) in pool2(found, path, path):
        assert text.endswith("it contains step-00000006, step-00000005, step-00000004")


def test_what_is_not_whole_is_passed_over(pool2: Any, tmp_path: Path) -> None:
    path = str(tmp_path)
    for answers in pool2(found, path, "latest", "best", f"{path}/nowhere"):
        assert answers[:2] == ["None", "None"] and answers[2].startswith(f"{path}/nowhere is neither a checkpoint nor")
    pool2(several, path, [1.0, 1.0, 1.0], keep_last=None)
    one, two, three = (tmp_path / f"step-0000000{step}" for step in (1, 2, 3))
    weights = (three / "model.safetensors").read_bytes()
    (three / "model.safetensors").write_bytes(weights[:-1])
    (tmp_path / ".step-00000004.new").mkdir()
    first, other = pool2(found, path, "latest")
    assert first[0] == other[0] == str(two)
    assert f"skipping {three}: {three}/model.safetensors has {len(weights) - 1} bytes, " in "\n".join(first)
    assert f"skipping {tmp_path}/step-00000004: it has no flatfsdp.json: its save did not finish" in first
    for name in (one, two):
        (name / "__1_0.distcp").unlink()
    for (text,) in pool2(found, path, "latest"):
        assert text.startswith(f"no checkpoint in {path} is intact: step-00000003 (")
    for (text,) in pool2(found, path, str(one)):
        assert text == f"{one} cannot be loaded: __1_0.distcp is missing"


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
def test_killed_at_any_moment_a_run_finds_its_last_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lock, "EMPTY", 0.0)
    model = torch.nn.Linear(3, 3)
    manager = CheckpointManager(tmp_path, keep_last=1, asynchronous=False)

    def save(step: int) -> None:
        with torch.no_grad():
            model.weight.fill_(step)
        progress = Component("progress", sharing=Sharing.GLOBAL, save=lambda: {"step": step}, load=print)
        manager.save(step, model=model, components=[progress])

    def last() -> int:
        path, again = manager.find("latest"), torch.nn.Linear(3, 3)
        assert path is not None
        loaded = manager.load(path, model=again)
        assert loaded.step is not None and again.weight.eq(loaded.step).all()
        return loaded.step

    save(1)
    counting = Counting()
    with through(counting):
        save(2)
    moments = sum(operation not in ("read", "open") for operation, _, _ in counting.operations)
    assert "step-00000001" not in {each.name for each in tmp_path.iterdir()}
    step, known = 2, 2
    for number, moment in enumerate(range(0, moments, 1 if is_thorough() else 3)):
        step += 1
        with through(Mortal(moment)), pytest.raises(Killed):
            save(step)
        found = last()
        assert found in (known, step), moment
        known = found
        if number % 8 == 7:
            known = step = step + 1
            save(step)  # removes the remains of all of them
            assert last() == step and {each.name for each in tmp_path.iterdir()} == {f"step-{step:08}"}, moment


def test_what_is_requested_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigValueError, match=r"^format: got 'pickle'. Accepted: 'safetensors' or 'torch'"):
        CheckpointManager(tmp_path, format="pickle")
    with pytest.raises(ConfigValueError, match=r"^last: got 0"):
        CheckpointManager(tmp_path, keep_last=0)


# --- weights that others wrote ----------------------------------------------------------------------------------------


def weights_only(rank: int, world: int, path: str) -> list[str]:
    run = Run(FLAT)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    manager = CheckpointManager(f"{path}/new")
    found = manager.find(path)
    assert found == Path(path)
    loaded = manager.load(found, **run.parts())
    weights = torch.load(f"{path}/../expected.pt", weights_only=False)[0]
    assert all(torch.equal(value, weights[key]) for key, value in run.weights().items())
    assert (loaded.step, loaded.world, run.progress["step"]) == (None, None, 0)
    return list(loaded.notes)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_a_folder_of_weights_gives_the_weights_only(pool2: Any, tmp_path: Path, format: str) -> None:
    pool2(save, str(tmp_path), {"format": format, "asynchronous": False})
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in (tmp_path / "step-00000003").glob("model.safetensors" if format == "safetensors" else "*.bin"):
        file.rename(plain / file.name)
    for notes in pool2(weights_only, str(plain)):
        assert notes == [
            f"{plain} holds only weights: optimizer, schedule, data position and random numbers start over"
        ]


# --- nodes ------------------------------------------------------------------------------------------------------------


def on_own_disks(rank: int, world: int, path: str) -> None:
    folders.PATIENCE = 0.2
    where = f"{path}/node{rank}"
    run = Run(Setting("NO_SHARD")).train(2)
    manager = CheckpointManager(where, per_node=True, keep_last=1)
    for step in (1, 2):
        run.progress["step"] = step
        manager.save(step, **run.parts(), files=lambda folder: void((folder / "config.json").write_text("{}")))
    manager.finish()
    assert {each.name for each in Path(where).iterdir()} == {"step-00000002"}
    again = Run(Setting("NO_SHARD"))
    found = manager.find("latest")
    assert found == Path(where) / "step-00000002"
    manager.load(found, **again.parts())
    assert again.progress["step"] == 2 and torch.equal(again.progress["loss"], run.progress["loss"])
    expected = run.weights()
    assert all(torch.equal(value, expected[key]) for key, value in again.weights().items())


def void(_: object) -> None: ...


def test_each_node_may_have_its_own_folder(pool2: Any, tmp_path: Path) -> None:
    pool2(on_own_disks, str(tmp_path))
    for node in range(2):
        names = {each.name for each in (tmp_path / f"node{node}" / "step-00000002").iterdir()}
        assert {"model.safetensors", "config.json", "components.json", f"__{node}_0.distcp"} <= names


# --- transformers -----------------------------------------------------------------------------------------------------


def through_transformers(rank: int, world: int, path: str, tied: bool) -> float:
    """The largest error of logits: of `from_pretrained` on the run's checkpoints, and of a run that loads a folder that
    transformers has saved."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
    tokens = torch.arange(12).view(2, 6)

    def sharded(seed: int) -> FSDP:
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).eval()
        return FSDP(model, auto_wrap_policy={LlamaDecoderLayer}, use_orig_params=True)

    model = sharded(0)
    expected = model(tokens).logits.detach()
    worst = 0.0
    for format in ("safetensors", "torch"):
        manager = CheckpointManager(f"{path}/{format}", format=format)
        folder = manager.save(1, model=model, files=files_of(model)).path
        manager.finish()
        alone = transformers.AutoModelForCausalLM.from_pretrained(folder)
        worst = max(worst, (alone(tokens).logits - expected).abs().max().item())
        if rank == 0:
            alone.save_pretrained(f"{path}/theirs-{format}")
        dist.barrier()
        again = sharded(1)
        found = manager.find(f"{path}/theirs-{format}")
        assert found is not None and manager.load(found, model=again).step is None
        worst = max(worst, (again(tokens).logits - expected).abs().max().item())
    return worst


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_a_checkpoint_and_a_run_begins_from_its_folders(
    pool2: Any, tmp_path: Path, tied: bool
) -> None:
    pytest.importorskip("transformers")
    assert max(pool2(through_transformers, str(tmp_path), tied, timeout=180.0)) < 1e-5


def some_entries(rank: int, world: int, folder: str) -> tuple[list[str], list[bool]]:
    """The entries in a checkpoint of some, and whether loading changes the first and the second layer."""
    torch.manual_seed(0)
    model = FSDP(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)))

    def chosen(name: str) -> bool:
        return name.startswith("1.")

    checkpoint.save(folder, model=model, names=chosen, overwrite=True)
    with FSDP.summon_full_params(model):
        for parameter in model.parameters():
            parameter.data.fill_(7.0)
    checkpoint.load(folder, model=model, names=chosen)
    with FSDP.summon_full_params(model):
        changed = [bool((layer.weight != 7.0).all()) for layer in model.module]
    return [*read_state(Path(folder), trust=False)["model"]], changed


def test_a_checkpoint_of_some_entries_leaves_the_others(pool2: Any, tmp_path: Path) -> None:
    for entries, changed in pool2(some_entries, str(tmp_path / "some")):
        assert entries == ["1.weight", "1.bias"]
        assert changed == [False, True]
