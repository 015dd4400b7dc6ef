"""The trainer as a whole: any number of ranks, and any settings, give the result of one process on all samples."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.checkpoint import load_safetensors
from flatfsdp.errors import CheckpointError, ConfigValueError
from flatfsdp.trainer import CausalLM, FSDPArguments, Task, Trainer, TrainingArguments
from flatfsdp.trainer.callbacks import Callback, EarlyStop, MetricsLog, Summary, read_metrics
from flatfsdp.trainer.demo.model import ByteTransformer
from flatfsdp.trainer.preemption import REQUESTED
from flatfsdp.trainer.run import StepReport
from flatfsdp.trainer.state import run_folder
from tests.conftest import Run
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.distributed

SAMPLES, BATCH = 22, 4  # the last step of an epoch is smaller


def make_model() -> nn.Module:
    model = ByteTransformer(width=16, layers=2, heads=2, context=8)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)  # some begin as zeros, behind which nothing has a gradient
    return model


def sentences(count: int = SAMPLES) -> list[dict[str, Tensor]]:
    """Samples with different numbers of targets."""
    generator = torch.Generator().manual_seed(7)
    samples = []
    for number in range(count):
        tokens = torch.randint(256, (8,), generator=generator)
        labels = tokens.clone()
        labels[2 + number % 6 :] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def training(**given: Any) -> TrainingArguments:
    chosen = {
        "epochs": 1, "batch": 1, "global_batch": BATCH, "lr": 0.1, "optimizer": "sgd", "device": "cpu",
        "shuffle": False, "save_at_end": False, "eval_at_end": False,
    }  # fmt: skip
    return TrainingArguments(**{**chosen, **given})


class Record(Callback):
    """The reports, evaluations and saves of a run."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.evaluations: list[dict[str, float]] = []
        self.saves: list[str] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.reports.append(report)

    def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.evaluations.append(dict(metrics))

    def on_save(self, trainer: Trainer, path: Path, stall_seconds: float) -> None:
        self.saves.append(path.name)


def train(
    rank: int, world: int, given: dict[str, Any], fsdp: dict[str, Any], **task: Any
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and norms of the steps, and the parameters at the end."""
    record = Record()
    chosen = {"model": make_model, "train_data": sentences, "objective": CausalLM(), **task}
    trainer = Trainer(Task(**chosen), training(**given), FSDPArguments(**fsdp), callbacks=[record])
    trainer.train()
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return [each.loss for each in record.reports], [each.grad_norm or 0.0 for each in record.reports], state


def one_process(clip: float | None = None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same in plain torch, on whole steps: the loss of each token, averaged over all."""
    torch.manual_seed(0)
    model, samples = make_model(), sentences()
    vectors = [each for each in model.parameters() if each.dim() < 2]
    others = [each for each in model.parameters() if each.dim() >= 2]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    steps = -(-SAMPLES // BATCH)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses, norms = [], []
    for start in range(0, SAMPLES, BATCH):
        batch = torch.utils.data.default_collate(samples[start : start + BATCH])
        logits, targets = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it comes": ({}, {}),
    "two samples a microbatch": ({"batch": 2}, {}),
    "rank 0 reads": ({"data_mode": "dispatch"}, {}),
    "a head in chunks": ({"fused_loss": True}, {"units": "blocks"}),
    "steps in the backward": ({"optimizer_in_backward": True}, {}),
    "activations computed again": ({}, {"activation_checkpointing": True}),
    "on the host": ({}, {"cpu_offload": True}),
    "whole": ({}, {"strategy": "no_shard", "units": "none"}),
    "kept until the backward": ({"detect_nonfinite": True}, {"reshard_after_forward": False}),
}
if is_thorough():
    SETTINGS["compiled"] = ({}, {"compile": True})  # half a minute


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_two_ranks_are_as_one_process(run: Run, settings: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Samples have different numbers of targets, ranks different numbers of samples, the last step fewer."""
    losses, _, state = one_process()
    for found in run(2, train, *settings):
        assert found[0] == pytest.approx(losses, rel=2e-5)
        assert found[2].keys() == state.keys()
        for name, value in found[2].items():
            torch.testing.assert_close(value, state[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("world", [1, 3])
def test_any_number_of_ranks_clips_the_same_norm(run: Run, world: int) -> None:
    losses, norms, state = one_process(clip=0.5)
    for found in run(world, train, {"clip": 0.5}, {}):
        assert found[0] == pytest.approx(losses, rel=2e-5)
        assert found[1] == pytest.approx(norms, rel=1e-4)
        for name, value in found[2].items():
            torch.testing.assert_close(value, state[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_learns(run: Run, dtype: str) -> None:
    """With fp16 losses are scaled, and a step whose gradients overflow is left out."""
    found = run(
        2,
        train,
        {"epochs": 5, "clip": 1.0, "optimizer": "adamw", "lr": 0.02},
        {"param_dtype": dtype, "reduce_dtype": "fp32"},
    )
    assert found[0][0] == found[1][0]
    assert found[0][0][0] == pytest.approx(5.545, abs=0.2)
    assert found[0][0][-1] < 4.0


# --- evaluation, saving, stopping -------------------------------------------------------------------------------------


def own_metrics(logits: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums over the targets: how many they are, and how likely the model takes them to be."""
    targets = batch["labels"][:, 1:]
    likely = logits[:, :-1].log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    return {"targets": (targets >= 0).sum(), "likely": likely[targets >= 0].sum()}


def run_with(
    rank: int, world: int, output: Path, given: dict[str, Any], callbacks: Callable[[], list[Callback]] = list
) -> dict[str, Any]:
    """The results of a run with evaluation data, and the checkpoints in its folder."""
    record = Record()
    task = Task(
        model=make_model,
        train_data=sentences,
        eval_data=partial(sentences, 7),
        objective=CausalLM(),
        metrics=own_metrics,
    )
    trainer = Trainer(task, training(output=output, **given), callbacks=[record, MetricsLog(), *callbacks()])
    result = trainer.train()
    return {
        "losses": [each.loss for each in record.reports],
        "evaluations": record.evaluations,
        "saves": record.saves,
        "result": result,
        "left": sorted(path.name for path in output.glob("step-*")),
        "facts": Summary.facts(trainer, result),
    }


def test_evaluations_weigh_tokens_and_the_best_checkpoint_stays(run: Run, tmp_path: Path) -> None:
    given = {"epochs": 3, "eval_every": 2, "save_every": 2, "keep_last": 1, "keep_best": 1, "eval_at_end": True}
    found = run(3, run_with, tmp_path, given)
    assert found[0]["evaluations"] == found[1]["evaluations"] == found[2]["evaluations"]
    evaluations = found[0]["evaluations"]
    assert [each["eval_tokens"] for each in evaluations] == [sum(1 + number % 6 for number in range(7))] * 9
    assert {type(each["eval_tokens"]) for each in evaluations} == {int}
    for each in evaluations:
        assert each["eval_targets"] == 1.0  # of which the samples that stand in for missing ones have none
        assert each["eval_likely"] == pytest.approx(-each["eval_loss"], rel=1e-5)
        assert each["eval_perplexity"] == pytest.approx(math.exp(each["eval_loss"]))
    best = min(range(8), key=lambda number: evaluations[number]["eval_loss"])  # the ninth is of the last step, the 17th
    assert found[0]["left"] == sorted({f"step-{2 * best + 2:08}", "step-00000016"})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 18))
    assert [row["eval_loss"] for row in rows if "eval_loss" in row] == [each["eval_loss"] for each in evaluations]
    assert all(row["stall_seconds"] >= 0 for row in rows if "checkpoint" in row)


def best_again(rank: int, world: int, output: Path) -> tuple[int, float, float]:
    task = Task(model=make_model, train_data=sentences, eval_data=partial(sentences, 7), objective=CausalLM())
    given = training(output=output, resume="best", keep_best=1, eval_every=100)
    trainer = Trainer(task, given)
    trainer.resume()
    return trainer.progress.step, trainer.evaluate()["eval_loss"], trainer.optimizer.param_groups[0]["lr"]


def test_the_best_checkpoint_comes_back(run: Run, tmp_path: Path) -> None:
    given = {"epochs": 2, "eval_every": 3, "save_every": 3, "keep_best": 1, "keep_last": 1, "lr": 0.3}
    (first, *_) = run(2, run_with, tmp_path, given)
    best = min(first["evaluations"], key=lambda each: each["eval_loss"])["eval_loss"]
    step = 3 * (1 + [each["eval_loss"] for each in first["evaluations"]].index(best))
    for found in run(3, best_again, tmp_path):
        assert found[0] == step
        assert found[1] == pytest.approx(best, rel=1e-5)


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_ended(run: Run, tmp_path: Path) -> None:
    whole, *_ = run(2, run_with, tmp_path / "whole", {"epochs": 2})
    output = tmp_path / "parts"
    steps = {"epochs": 2, "save_every": 4, "keep_last": 1}
    first, *_ = run(2, run_with, output, {**steps, "resume": "latest"}, partial(stop_after, 3))
    assert first["result"].stopped_by == REQUESTED
    # The numbers of step 3 come while step 4 is on, and the request with those of step 5, while step 6 is.
    assert first["left"] == ["step-00000006"]
    second, *_ = run(2, run_with, output, {**steps, "resume": "latest"})
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["result"].steps == len(whole["losses"]) == 11


def test_a_run_that_goes_on_from_an_earlier_checkpoint_is_a_branch(run: Run, tmp_path: Path) -> None:
    """Later checkpoints and records are set aside, so that "latest" finds the branch, compared with itself alone."""
    given = {"epochs": 2, "save_every": 2, "keep_last": 9, "eval_every": 2, "keep_best": 1}
    run(2, run_with, tmp_path, given)
    before = tmp_path / "step-00000008" / "model.safetensors"
    weights = before.read_bytes()
    branch = {**given, "lr": 0.02, "resume": tmp_path / "step-00000006"}
    first, *_ = run(2, run_with, tmp_path, branch, partial(stop_after, 8))
    assert first["left"] == [f"step-{step:08}" for step in (2, 4, 6, 8)]
    assert before.read_bytes() != weights
    aside = tmp_path / "aside-1"
    assert sorted(path.name for path in aside.iterdir()) == ["metrics.jsonl", "step-00000008", "step-00000010"]
    assert read_metrics(aside / "metrics.jsonl")[-1]["step"] == 11
    assert (aside / "step-00000008" / "model.safetensors").read_bytes() == weights
    second, *_ = run(2, run_with, tmp_path, {**branch, "resume": "latest"})
    assert len(second["losses"]) == 3, "from its own step 8 on"
    assert len(list(tmp_path.glob("aside-*"))) == 1


def stop_after(step: int) -> list[Callback]:
    class Stop(Callback):
        def on_step(self, trainer: Trainer, report: StepReport) -> None:
            if report.step == step and trainer.world.rank == 1:
                trainer.ask_to_stop()

    return [Stop()]


def test_no_improvement_ends_the_run(run: Run, tmp_path: Path) -> None:
    given = {"epochs": 50, "eval_every": 1, "lr": 1e-9}
    found, *_ = run(2, run_with, tmp_path, given, partial(early_stop))
    assert len(found["evaluations"]) == 3
    assert len(found["losses"]) == 4
    assert found["result"].exit_code == 0


def early_stop() -> list[Callback]:
    return [EarlyStop(patience=2, least=0.5)]


def started_anew(rank: int, world: int, output: Path, resume: str | None) -> str:
    task = Task(model=make_model, train_data=sentences, objective=CausalLM())
    try:
        Trainer(task, training(output=output, resume=resume)).train()
    except ConfigValueError as error:
        return str(error)
    return "trained"


def by_the_clock(rank: int, world: int, output: Path) -> tuple[str, str]:
    """The reason why a run without time left ends, and its output at the beginning."""
    with contextlib.redirect_stderr(io.StringIO()) as texts:
        found = run_with(rank, world, output, {"minutes": 1e-9, "resume": "latest", "progress": False})
    return found["result"].ended_by, texts.getvalue()


def test_a_run_reports_where_it_begins_and_that_the_clock_ended_it(run: Run, tmp_path: Path) -> None:
    text, others = run(2, by_the_clock, tmp_path)
    assert text[0] == others[0] and text[0].startswith("the limit of 1e-09 minutes was reached")
    assert text[1] == f"nothing to resume: {tmp_path} has no checkpoint yet, so a new run begins\n" and not others[1]


def test_a_folder_with_checkpoints_is_not_written_over(run: Run, tmp_path: Path) -> None:
    run(2, run_with, tmp_path, {"save_at_end": True})
    for text in run(2, started_anew, tmp_path, None):
        remedies = "Pass resume='latest' to continue that run, or choose another folder"
        assert text == f"output: {tmp_path} holds a run, whose last checkpoint is step-00000006. {remedies}"
    for text in run(2, started_anew, tmp_path / "none", "best"):
        assert "has no checkpoint yet" in text


def trained_in_the_default_folder(rank: int, world: int, folder: Path) -> tuple[str, list[str]]:
    """The output folder of a run that names none, and its lines."""
    task = Task(model=make_model, train_data=sentences, objective=CausalLM())
    with patch.object(run_folder, "DEFAULT", folder), contextlib.redirect_stderr(io.StringIO()) as texts:
        trainer = Trainer(task, training(output=folder, progress=False, save_at_end=True, steps=1))
        trainer.train()
    return str(trainer.output), texts.getvalue().splitlines()


def test_a_run_in_the_default_folder_says_which_number_it_has(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "train-out"
    assert run(2, trained_in_the_default_folder, folder) == [(str(folder), [])] * 2
    because = f"{folder}-2, because {folder} holds an earlier run"
    for rank, (output, lines) in enumerate(run(2, trained_in_the_default_folder, folder)):
        assert output == f"{folder}-2"
        assert lines == [f"this run writes to {because}", f"this run is in {because}"] * (rank == 0)


def resumed_from(rank: int, world: int, output: Path, resume: Any) -> str:
    task = Task(model=make_model, train_data=sentences, objective=CausalLM())
    try:
        Trainer(task, training(output=output, resume=resume, epochs=2)).resume()
    except CheckpointError as error:
        return str(error)
    return "resumed"


def test_a_damaged_newest_checkpoint_names_the_newest_good_one(run: Run, tmp_path: Path) -> None:
    run(2, run_with, tmp_path, {"save_every": 2, "keep_last": 3})
    for number in (4, 6):
        with open(tmp_path / f"step-{number:08}" / "model.safetensors", "r+b") as file:
            file.seek(-8, 2)
            file.write(b"changed!")
    good = tmp_path / "step-00000002"
    for resume in ("latest", tmp_path / "step-00000006"):
        for text in run(3, resumed_from, tmp_path, resume):
            assert "step-00000006/model.safetensors is damaged: its CRC-32 is " in text
            assert text.endswith(f". The newest good checkpoint is {good}: pass resume={str(good)!r}")
    assert run(2, resumed_from, tmp_path, good) == ["resumed"] * 2


def exported(rank: int, world: int, output: Path, folder: Path) -> None:
    task = Task(model=make_model, train_data=sentences, objective=CausalLM())
    trainer = Trainer(task, training(output=output, resume="latest"))
    trainer.resume()
    trainer.export(folder, dtype=torch.bfloat16)


def test_an_export_is_the_checkpoints_model(run: Run, tmp_path: Path) -> None:
    run(2, run_with, tmp_path, {"save_at_end": True})
    run(3, exported, tmp_path, tmp_path / "export")
    saved, written = make_model(), make_model().bfloat16()
    load_safetensors(saved, tmp_path / "step-00000006")
    load_safetensors(written, tmp_path / "export")
    for one, other in zip(saved.state_dict().values(), written.state_dict().values(), strict=True):
        assert torch.equal(one.bfloat16(), other)


def from_weights(rank: int, world: int, folder: Path, output: Path) -> tuple[int, dict[str, Tensor]]:
    task = Task(model=make_model, train_data=sentences, objective=CausalLM())
    trainer = Trainer(task, training(output=output, resume=folder, seed=9))
    trainer.resume()
    return trainer.progress.step, {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_a_run_begins_with_weights_that_it_did_not_write(run: Run, tmp_path: Path) -> None:
    run(2, run_with, tmp_path, {"save_at_end": True})
    run(2, exported, tmp_path, tmp_path / "export")
    expected = make_model()
    load_safetensors(expected, tmp_path / "export")
    for step, state in run(3, from_weights, tmp_path / "export", tmp_path / "new"):
        assert step == 0
        for name, value in expected.state_dict().items():
            assert torch.equal(state[name], value), name


def made_elsewhere(rank: int, world: int) -> Tensor:
    torch.manual_seed(rank)
    trainer = Trainer(Task(model=make_model(), train_data=sentences, objective=CausalLM()), training())
    return trainer.model.state_dict()["embedding.table.weight"].clone()


def test_a_model_that_ranks_made_differently_begins_as_rank_0_has_it(run: Run) -> None:
    torch.manual_seed(0)
    expected = make_model().embedding.table.weight
    for found in run(2, made_elsewhere):
        assert torch.equal(found, expected)


def test_without_a_limit_a_run_goes_through_the_data_once(run: Run) -> None:
    for losses, _, _ in run(2, train, {"epochs": None}, {}):
        assert len(losses) == -(-SAMPLES // BATCH)


def refused(rank: int, world: int) -> str:
    try:
        train(rank, world, {"optimizer_in_backward": True}, {"param_dtype": "fp16"})
    except ConfigValueError as error:
        return str(error)
    return "trained"


def test_fp16_and_steps_in_the_backward_are_refused(run: Run) -> None:
    assert all("with fp16, gradients must be checked" in text for text in run(1, refused))


def stop_while_evaluating() -> list[Callback]:
    class Stop(Callback):
        def on_step(self, trainer: Trainer, report: StepReport) -> None:
            if report.step == 6 and trainer.world.rank == 1:  # the last one, before an evaluation
                trainer.ask_to_stop()

    return [Stop()]


def test_a_stop_in_the_last_evaluation_is_reported(run: Run, tmp_path: Path) -> None:
    for found in run(2, run_with, tmp_path, {"eval_at_end": True}, stop_while_evaluating):
        assert found["evaluations"] == []
        assert found["result"].stopped_by == REQUESTED
        assert found["left"] == ["step-00000006"]


@pytest.mark.parametrize(("every", "asked_at", "stopped_at"), [(3, 3, 3), (6, 3, 6)], ids=["in it", "before it"])
def test_an_evaluation_that_a_stop_prevented_is_made_up_for(
    run: Run, tmp_path: Path, every: int, asked_at: int, stopped_at: int
) -> None:
    given = {"epochs": 2, "eval_every": every, "keep_best": 1, "keep_last": 9, "resume": "latest"}
    whole, *_ = run(2, run_with, tmp_path / "whole", given)
    output = tmp_path / "parts"
    first, *_ = run(2, run_with, output, given, partial(stop_after, asked_at))
    assert (first["evaluations"], first["left"]) == ([], [f"step-{stopped_at:08}"])
    second, *_ = run(2, run_with, output, given)
    assert second["evaluations"] == whole["evaluations"]
    assert second["saves"][0] == f"step-{stopped_at:08}", "with its metrics it may be the best"
    evaluations = [
        [(row["step"], row["eval_loss"]) for row in read_metrics(path / "metrics.jsonl") if "eval_loss" in row]
        for path in (tmp_path / "whole", output)
    ]
    assert evaluations[0] == evaluations[1]


def test_a_run_that_is_over_has_nothing_to_evaluate_once_more(run: Run, tmp_path: Path) -> None:
    given = {"eval_at_end": True, "save_at_end": True, "resume": "latest"}
    (first, _), (second, _) = (run(2, run_with, tmp_path, given) for _ in range(2))
    assert (len(first["losses"]), len(first["evaluations"])) == (6, 1)
    assert (len(second["losses"]), len(second["evaluations"])) == (0, 0)
    lacks = first["facts"].keys() - second["facts"].keys()
    evaluated = {f"eval {name}" for name in ("loss", "tokens", "perplexity", "accuracy", "targets", "likely")}
    assert lacks == {"per rank", "per step", "loss", *evaluated}, "what only a step shows"
    assert second["facts"]["speed"] == "no step was taken" and second["facts"]["parameters"].endswith(" in total")
    assert len([row for row in read_metrics(tmp_path / "metrics.jsonl") if "eval_loss" in row]) == 1
