"""Settings of the trainer: values that dataclasses accept, read from tables, files and command lines."""

from __future__ import annotations

import functools
import json
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from flatfsdp import ShardingStrategy
from flatfsdp.errors import ConfigTypeError, ConfigValueError, FlatFSDPError
from flatfsdp.trainer.arguments import FSDPArguments, Task, TrainingArguments, check_run
from flatfsdp.trainer.instantiate import check_options, make
from flatfsdp.trainer.settings import Settings, dataclass, fields_of, setting
from flatfsdp.trainer.settings.command_line import Parser, flag_of, read_file
from flatfsdp.trainer.settings.references import check_all_taken, resolve
from flatfsdp.trainer.settings.types import DTYPES, Count, FilePath

pytestmark = pytest.mark.unit

GROUPS = {"training": TrainingArguments(), "fsdp": FSDPArguments()}


@dataclass(frozen=True)
class Model(Settings):
    """A small transformer."""

    layers: Count = setting(4, "transformer blocks")
    width: int = setting(128, "features")
    dropout: float = 0.0
    text: FilePath | None = None

    def __post_init__(self) -> None:
        if self.width % self.layers:
            self.refuse("width", f"it is no multiple of {self.called('layers')} {self.layers}")


def sentence(call: Callable[[], object]) -> str:
    with pytest.raises(FlatFSDPError) as error:
        call()
    return str(error.value)


# fields


def test_values_have_one_normal_form() -> None:
    hybrid: Any = ShardingStrategy._HYBRID_SHARD_ZERO2
    found = FSDPArguments(strategy=hybrid, param_dtype="torch.BF16", backward_prefetch="none", replicas=2)
    assert (found.strategy, found.param_dtype, found.backward_prefetch) == (
        "hybrid_shard_zero2",
        torch.bfloat16,
        None,
    )
    given: Any = "here"
    training = TrainingArguments(output=given, lr=1, resume="best", optimizer="SGD")
    read: Any = [' {"a": "b=c"}', "d=1"]
    assert TrainingArguments(optimizer_options=read).optimizer_options == {"a": "b=c", "d": 1}
    assert (training.output, training.lr, training.resume, training.optimizer) == (Path("here"), 1.0, "best", "sgd")
    assert isinstance(training.lr, float)
    assert TrainingArguments(resume="runs/best").resume == Path("runs/best")
    assert FSDPArguments(units=["blocks", "Head"]).units == ("blocks", "Head")


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (
            lambda: FSDPArguments(strategy="hybrid"),
            "FSDPArguments.strategy: got 'hybrid'. Accepted: one of full_shard, shard_grad_op, no_shard, hybrid_shard, "
            "hybrid_shard_zero2. Did you mean 'hybrid_shard'?",
        ),
        (
            lambda: FSDPArguments(param_dtype="bfloat6"),
            "FSDPArguments.param_dtype: got 'bfloat6'. Accepted: one of bfloat16, bf16, float16, "
            "fp16, half, float32, fp32, float, single, float64, fp64, double. Did you mean 'bfloat16'?",
        ),
        (
            lambda: FSDPArguments(reduce_dtype=torch.int32),
            "FSDPArguments.reduce_dtype: got torch.int32. Accepted: one of bfloat16",
        ),  # type: ignore[arg-type]
        (
            lambda: FSDPArguments(gather_dtype="bf16"),
            "FSDPArguments.gather_dtype: got 'bf16'. Accepted: one of int8, fp8, float8_e4m3fn.",
        ),
        (lambda: FSDPArguments(reduce_bits=16), "FSDPArguments.reduce_bits: got 16 (int). Accepted: one of 8, 4."),
        (
            lambda: FSDPArguments(reduce_error_feedback=True),
            "FSDPArguments.reduce_error_feedback: got True, but without reduce_bits there are no errors",
        ),
        (
            lambda: FSDPArguments(gather_dtype="int8", strategy="no_shard"),
            "FSDPArguments.gather_dtype: got torch.int8, but with strategy no_shard, parameters are never gathered",
        ),
        (
            lambda: FSDPArguments(replicas=2),
            "FSDPArguments.replicas: got 2, but only hybrid_shard and hybrid_shard_zero2 replicate, and strategy is "
            "full_shard",
        ),
        (
            lambda: FSDPArguments(strategy="no_shard", reshard_after_forward=2),
            "FSDPArguments.reshard_after_forward: got",
        ),
        (lambda: FSDPArguments(strategy="hybrid_shard", units="none"), "FSDPArguments.units: got 'none', but strategy"),
        (
            lambda: FSDPArguments(front="fully"),
            "FSDPArguments.front: got 'fully'. Accepted: one of wrapper, fully_shard",
        ),
        (
            lambda: FSDPArguments(front="fully_shard", strategy="no_shard"),
            "FSDPArguments.strategy: got 'no_shard', but with front fully_shard, parameters are always sharded",
        ),
        (
            lambda: FSDPArguments(front="fully_shard", use_orig_params=False),
            "FSDPArguments.use_orig_params: got False, but with front fully_shard, each parameter is a DTensor",
        ),
        (
            lambda: FSDPArguments(front="fully_shard", layout="flat"),
            "FSDPArguments.layout: got 'flat', but with front fully_shard, each parameter is split by rows",
        ),
        (
            lambda: FSDPArguments(reshard_after_forward=0),
            "got 0. Input should be greater than or equal to 1. Or: Input should be a valid boolean.",
        ),
        (
            lambda: FSDPArguments(units=["blocks", 3]),
            "FSDPArguments.units: got ['blocks', 3]. 3 cannot be in a li",
        ),
        (
            lambda: FSDPArguments(units="model layers"),
            "FSDPArguments.units: got 'model layers'. Accepted: 'auto', 'none'",
        ),
        (lambda: FSDPArguments(units=[]), "FSDPArguments.units: got [] (list). Accepted: 'auto', 'none', "),
        (
            lambda: FSDPArguments(cpu_offload=1),
            "FSDPArguments.cpu_offload: got 1 (int). Input should be a valid bool",
        ),  # type: ignore[arg-type]
        (
            lambda: TrainingArguments(batch=0),
            "TrainingArguments.batch: got 0. Input should be greater than or equal to 1.",
        ),
        (
            lambda: TrainingArguments(batch=True),
            "batch: got True (bool). Input should be a valid integer.",
        ),
        (
            lambda: TrainingArguments(batch=None),
            "TrainingArguments.batch: got None (NoneType). Input should be a valid integer.",
        ),  # type: ignore[arg-type]
        (
            lambda: TrainingArguments(steps=1.0),
            "TrainingArguments.steps: got 1.0 (float). Input should be a valid integer.",
        ),  # type: ignore[arg-type]
        (lambda: TrainingArguments(lr=10**400), "lr: got a value of type int. Input should be a valid number."),
        (lambda: TrainingArguments(lr=0.0), "TrainingArguments.lr: got 0.0. Input should be greater than 0."),
        (lambda: TrainingArguments(lr=float("inf")), "TrainingArguments.lr: got inf. Input should be a finite number."),
        (lambda: TrainingArguments(lr=float("nan")), "TrainingArguments.lr: got nan. Input should be a finite number."),
        (lambda: TrainingArguments(warmup=1), "TrainingArguments.warmup: got 1. Input should be less than 1."),
        (
            lambda: TrainingArguments(device=""),
            "device: got ''. String should have at least 1 character.",
        ),
        (lambda: TrainingArguments(output=3), "TrainingArguments.output: got 3 (int). Accepted: a path."),  # type: ignore[arg-type]
        (
            lambda: TrainingArguments(optimizer="adanw"),
            "TrainingArguments.optimizer: got 'adanw'. Accepted: adamw, adam, sgd, adadelta, adagrad, adamax, asgd, "
            "nadam, radam, rmsprop, rprop, muon, 'package.module:name', or (in Python) a callable (params, **options) "
            "-> Optimizer. Did you mean 'adamw'?",
        ),
        (lambda: TrainingArguments(optimizer="Adafactor"), "Adafactor looks at rows and columns, of which a rank may"),
        (lambda: TrainingArguments(optimizer=3), "TrainingArguments.optimizer: got 3 (int). Accepted: adamw, "),
        (lambda: TrainingArguments(optimizer_options=[1]), "TrainingArguments.optimizer_options: got [1] (list). Acc"),  # type: ignore[arg-type]
        (lambda: TrainingArguments(optimizer_options={"lr": 1}), "'lr' is set by lr"),
        (
            lambda: TrainingArguments(global_batch=64, accumulate=2),
            "TrainingArguments.accumulate: got 2, but global_batch 64 determines their number",
        ),
        (
            lambda: TrainingArguments(clip=1, optimizer_in_backward=True),
            "TrainingArguments.clip: got 1.0, but with optimizer_in_backward, gradients are freed before their norm "
            "is known",
        ),
        (lambda: TrainingArguments(keep_best=1), "eval_loss is known only for evaluated checkpoints: set eval_every"),
        (
            lambda: TrainingArguments(eval_batches=1, eval_at_end=False),
            "nothing is evaluated: set eval_every or eval_at",
        ),
        (lambda: TrainingArguments(scheduler="a.b:c", warmup=0.1), "scheduler 'a.b:c' sets all learning rates itself"),
        (
            lambda: Task(None, "a:b"),
            "Task.model: got None (NoneType). Accepted: 'hf:...', 'package.module:name', or (in Python) ",
        ),
        (
            lambda: Task("my model", "a:b"),
            "Task.model: got 'my model'. Accepted: 'hf:...', 'package.module:name', or (in Python)",
        ),
        (
            lambda: FSDPArguments(strategy="torch.full_shard"),
            "FSDPArguments.strategy: got 'torch.full_shard'. Accepted:",
        ),
        (lambda: Task("a:b", Path("a.b")), "Task.train_data: got "),
        (lambda: Task("a:b", "a:b", collate=[1]), "Task.collate: got [1] (list). Accepted: 'package.module:name', or"),
    ],
)
def test_what_is_refused_is_named_with_what_is_accepted(call: Callable[[], object], complaint: str) -> None:
    assert complaint in sentence(call)


def test_every_name_of_a_dtype_is_one() -> None:
    for name, dtype in DTYPES.items():
        assert FSDPArguments(param_dtype=name.upper()).param_dtype is dtype
    assert set(DTYPES.values()) == {torch.bfloat16, torch.float16, torch.float32, torch.float64}


def test_a_field_that_there_is_not_is_named_with_the_nearest_one() -> None:
    given: Any = {"save_evry": 3}
    assert sentence(lambda: TrainingArguments(**given)) == (
        "TrainingArguments: unknown setting 'save_evry'. Did you mean 'save_every'?"
    )
    assert sentence(lambda: Model(**{"qqq": 3})) == (
        "Model: unknown setting 'qqq'. Accepted: 'layers', 'width', 'dropout', 'text'."
    )
    task: Any = Task
    assert sentence(lambda: task("a:b")) == "Task.train_data: not given, and it has no default"
    assert sentence(lambda: task(*["a:b"] * 7, {}, 9)) == "Task: got 9 (int) without a name. Give settings by name."


def test_settings_travel_to_other_processes() -> None:
    for settings in (TrainingArguments(steps=3), FSDPArguments(param_dtype="bf16"), Task("a:b", "c:d")):
        assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_run_has_no_evaluations_that_its_task_cannot_give() -> None:
    report = sentence(lambda: check_run(TrainingArguments(eval_every=5), Task("a:b", "c:d"), FSDPArguments()))
    assert report == "TrainingArguments.eval_every: got 5, but there is nothing to evaluate on: eval_data is not set"
    check_run(TrainingArguments(eval_every=5), Task("a:b", "c:d", "e:f"), FSDPArguments())
    check_run(TrainingArguments(), Task("a:b", "c:d"), FSDPArguments())


# files


def test_toml_and_json_mean_the_same(tmp_path: Path) -> None:
    toml, js = tmp_path / "run.toml", tmp_path / "run.JSON"
    toml.write_text(
        '[training]\nsteps = 3\nclip = "none"\noptimizer_options = {betas = [0.9, 0.95]}\n'
        '[fsdp]\nparam_dtype = "bf16"\nunits = ["blocks", "Head"]\n'
    )
    js.write_text(json.dumps(read_file(str(toml))))
    for path in (toml, js):
        assert read("--config", str(path)) == {
            "training": TrainingArguments(steps=3, optimizer_options={"betas": [0.9, 0.95]}),
            "fsdp": FSDPArguments(param_dtype="bf16", units=["blocks", "Head"]),
        }


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"trainin": {}}, "unknown table 'trainin'. Did you mean 'training'?"),
        ({"qqq": {}}, "unknown table 'qqq'. Accepted: 'training', 'fsdp'."),
        ({"training": {"save_evry": 3}}, "training: unknown setting 'save_evry'. Did you mean 'save_every'?"),
        ({"training": {"strategy": "x"}}, "training: unknown setting 'strategy'. It belongs in [fsdp]."),
        ({"strategy": "x"}, "unknown table 'strategy'. It belongs in [fsdp]."),
        ({"fsdp": 3}, "fsdp: got 3 (int). Accepted: a table of settings."),
        ({"training": {"batch": "8"}}, "training.batch: got '8' (str). Input should be a valid integer."),
        ({"training": {"shuffle": 1}}, "training.shuffle: got 1 (int). Input should be a valid boolean."),
        ({"fsdp": {"replicas": 2}}, "fsdp.replicas: got 2, but only hybrid_shard and hybrid_shard_zero2 replicate, and "
         "--strategy is full_shard"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_named_with_its_place(
    tables: dict[str, Any], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "t.json").write_text(json.dumps(tables))
    with pytest.raises(SystemExit) as exit_:
        read("--config", str(path))
    assert exit_.value.code == 2
    assert capsys.readouterr() == ("", f"flatfsdp.train: {path}: {complaint} (--help lists the options)\n")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("no.json", None, "no.json: cannot be read: No such file or directory"),
        ("run.yaml", "a: 3", "run.yaml: the name ends with '.yaml'. Accepted: .toml or .json."),
        ("run.json", "{", "run.json: not valid JSON: Expecting property name"),
        ("run.json", "[1]", "run.json: got a list. Accepted: an object with one table per group."),
        ("run.json", "\udcff", "run.json: not valid JSON: 'utf-8' codec can't decode"),
    ],
)
def test_a_wrong_file_is_reported_by_its_name(tmp_path: Path, name: str, text: str | None, complaint: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert f"{tmp_path}/{complaint}" in sentence(lambda: read_file(str(tmp_path / name)))


# the command line


def read(*line: str, **groups: Any) -> dict[str, Any]:
    return Parser("python -m flatfsdp.train", groups=groups or GROUPS).read(line)


def test_no_arguments_give_the_defaults() -> None:
    assert read() == {"training": TrainingArguments(), "fsdp": FSDPArguments()}


def test_every_setting_is_a_flag_and_reaches_its_field() -> None:
    training = TrainingArguments(
        output=Path("o"), steps=3, epochs=2, minutes=0.5, batch=2, global_batch=6, data_mode="dispatch", shuffle=False,
        workers=1, drop_last=True, optimizer="a.b:c", lr=0.1, weight_decay=0.0, optimizer_options={"x": 1, "y": "z"},
        scheduler="wsd", warmup=0.1, clip=2.0, fused_loss=True, seed=7, eval_every=5, eval_at_end=False,
        eval_batches=2, save_every=4, save_at_end=False, save_async=False, save_format="torch", save_frozen=True,
        save_on_each_node=True,
        keep_last=1, keep_best=3, best_by="eval_accuracy", best_mode="max", resume="latest", log_every=9,
        progress=False, plot=True, device="cpu", ranks=4, audit_every=7, detect_nonfinite=True, min_lr=0.01,
        decay=0.5, early_stop=2, callbacks=[{"name": "wandb", "project": "p"}, "tensorboard"], profile="2..3",
        peak_tflops=1.5,
    )  # fmt: skip
    fsdp = FSDPArguments(
        strategy="hybrid_shard", reshard_after_forward=2, replicas=2, units=("a.b", "C"), units_fallback=True,
        param_dtype="bf16", reduce_dtype="fp32", buffer_dtype="double", gather_dtype="fp8", reduce_bits=4,
        reduce_error_feedback=True, cpu_offload=True, use_orig_params=False, layout="rows",
        activation_checkpointing=True, backward_prefetch=None, forward_prefetch=True, limit_all_gathers=False,
        sync_module_states=True, checkpoint_every=2, checkpoint_policy="a.b:c", compile=True,
        keep_frozen_unsharded=True, deterministic_sums=True,
    )  # fmt: skip
    line = (
        "--output o --steps 3 --epochs 2 --minutes 0.5 --batch 2 --global-batch 6 --data-mode dispatch --no-shuffle "
        "--workers 1 --drop-last --optimizer a.b:c --lr 0.1 --weight-decay 0 --optimizer-options x=1 y=z --scheduler "
        "wsd --warmup 0.1 --clip 2 --fused-loss --seed 7 --eval-every 5 --no-eval-at-end --eval-batches 2 "
        "--save-every 4 --no-save-at-end --no-save-async --save-format torch --save-frozen "
        "--save-on-each-node --keep-last 1 "
        "--keep-best 3 --best-by eval_accuracy --best-mode max --resume latest --log-every 9 --no-progress --plot "
        "--min-lr 0.01 --decay 0.5 --early-stop 2 --callbacks wandb:project=p --callbacks tensorboard --profile "
        "steps=2..3 --peak-tflops 1.5 --device cpu --ranks 4 --audit-every 7 --detect-nonfinite "
        "--strategy hybrid-shard --reshard-after-forward 2 --replicas 2 "
        "--units a.b,C --units-fallback --param-dtype bf16 --reduce-dtype fp32 --buffer-dtype double "
        "--gather-dtype fp8 --reduce-bits 4 --reduce-error-feedback --cpu-offload --no-use-orig-params --layout rows "
        "--activation-checkpointing --backward-prefetch none --forward-prefetch --no-limit-all-gathers "
        "--sync-module-states --checkpoint-every 2 --checkpoint-policy a.b:c --compile --keep-frozen-unsharded "
        "--deterministic-sums"
    )
    assert read(*line.split()) == {"training": training, "fsdp": fsdp}
    for given, default in ((training, TrainingArguments()), (fsdp, FSDPArguments())):
        same = {each.name for each in fields(given) if getattr(given, each.name) == getattr(default, each.name)}
        assert same <= {
            "accumulate",
            "optimizer_in_backward",
            "warmup_steps",
            "bf16",
            "fp16",
            "front",
        }  # which other flags of this line exclude
    assert read("--accumulate", "3", "--optimizer-in-backward")["training"] == TrainingArguments(
        accumulate=3, optimizer_in_backward=True
    )
    assert read("--front", "fully-shard")["fsdp"] == FSDPArguments(front="fully_shard")
    assert read("--reshard-after-forward", "false")["fsdp"].reshard_after_forward is False


def test_a_word_for_a_precision_stands_in_its_fields() -> None:
    half = FSDPArguments(bf16=True)
    assert (half.param_dtype, half.reduce_dtype, half.scales_losses) == (torch.bfloat16, torch.float32, False)
    assert FSDPArguments(fp16=True).scales_losses
    with pytest.raises(ConfigValueError, match=r"fp16: got True, but param_dtype is torch\.bfloat16"):
        FSDPArguments(bf16=True, fp16=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"warmup": 0.1, "warmup_steps": 3}, "warmup_steps: got 3, but warmup is 0.1"),
        ({"lr": 0.1, "min_lr": 0.2}, "min_lr: got 0.2, but the peak learning rate, lr, is 0.1"),
        ({"scheduler": "constant", "min_lr": 1e-4}, "min_lr: got 0.0001, but scheduler 'constant' does not use it"),
        ({"decay": 0.1}, "decay: got 0.1, but scheduler 'cosine' does not use it"),
        ({"early_stop": 2}, "early_stop: got 2, but nothing is evaluated during the run: set eval_every"),
        ({"profile": "5..4"}, "profile: got '5..4'. Accepted: steps such as 10..12, counted from 1."),
        ({"callbacks": [3]}, "callbacks: got 3 (int). Accepted: names, with options as in wandb:project=mine"),
    ],
)
def test_settings_that_contradict(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigTypeError, ConfigValueError)) as raised:
        TrainingArguments(**given)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "given",
    ["wandb:project=p,mode=offline", [{"name": "wandb", "project": "p", "mode": "offline"}]],
    ids=["text", "table"],
)
def test_callbacks_are_named_with_their_options(given: Any) -> None:
    assert TrainingArguments(callbacks=given).callbacks == (("wandb", {"project": "p", "mode": "offline"}),)
    assert TrainingArguments(callbacks=["a.b:C", "tensorboard"]).callbacks == (("a.b:C", {}), ("tensorboard", {}))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.json"
    options = {"betas": [0.9, 0.95], "eps": 1e-6}
    path.write_text(json.dumps({"training": {"steps": 3, "clip": 1.0, "optimizer_options": options}, "model": {}}))
    return str(path)


def test_flags_count_over_the_file_and_the_file_over_the_defaults(config: str) -> None:
    groups = {"training": TrainingArguments(steps=9, seed=5, clip=4.0), "model": Model()}
    line = ["--config", config, "--clip", "none", "--optimizer-options", '{"eps": 0.5}', "amsgrad=true"]
    assert read(*line, **groups) == {
        "training": TrainingArguments(
            steps=3, seed=5, optimizer_options={"betas": [0.9, 0.95], "eps": 0.5, "amsgrad": True}
        ),
        "model": Model(),
    }


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--save-evry 3", "unknown argument '--save-evry'. Did you mean '--save-every'?"),
        ("--no-progres", "unknown argument '--no-progres'. Did you mean '--no-progress'?"),
        ("--save 3", "unknown argument '--save'. Did you mean '--save-every'?"),
        ("rest", "unknown argument 'rest'."),
        ("--steps", "argument --steps: expected one argument"),
        ("--steps 1e3", "argument --steps: got '1e3'. Input should be a valid integer, unable to parse string as an "
         "integer."),
        ("--steps 0", "argument --steps: got '0'. Input should be greater than or equal to 1."),
        ("--optimizer-options lr", "argument --optimizer-options: got 'lr' (str). Accepted: a table of names "
         "and values, key=value, or a JSON object."),
        (
            "--optimizer-options {x}",
            "argument --optimizer-options: got '{x}' (str). Accepted: a table of names and values, key=value, "
            "or a JSON object.",
        ),
        ("--replicas 2", "argument --replicas: got 2, but only hybrid_shard and hybrid_shard_zero2 replicate, and "
         "--strategy is full_shard"),
        ("--config no.json", "no.json: cannot be read: No such file or directory"),
        ("--config {config}", "{config}: unknown table 'model'. Accepted: 'training', 'fsdp'."),
    ],
)  # fmt: skip
def test_a_wrong_line_is_one_line_and_exit_code_2(
    line: str, complaint: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        read(*line.replace("{config}", config).split())
    assert exit_.value.code == 2
    expected = complaint.replace("{config}", config)
    assert capsys.readouterr() == ("", f"flatfsdp.train: {expected} (--help lists the options)\n")


def test_what_contradicts_is_called_as_it_was_given(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--config", config, "--optimizer-in-backward", training=TrainingArguments(), model=Model())
    assert f"{config}: training.clip: got 1.0, but with --optimizer-in-backward, gradients" in capsys.readouterr().err


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        read("--help", training=TrainingArguments(seed=77), model=Model())
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert exit_.value.code == 0
    assert all(flag_of(name) in shown for name in (*fields_of(TrainingArguments), *fields_of(Model)))
    assert "training: Training, evaluation and checkpoints." in shown
    assert "weight decay; norms and biases are excluded (default: 0.01)" in shown
    assert "dropout (default: 77)" in shown
    assert "save a checkpoint at the end (the default)" in shown
    assert "format of the weights in a checkpoint; values: safetensors, torch (default: safetensors)" in shown


# factories


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    (tmp_path / "my_task_of_this_test.py").write_text(
        "class Model:\n    @classmethod\n    def tiny(cls, layers=1): return layers\ndata = []\n_hidden = 1\n"
    )
    (tmp_path / "broken_task_of_this_test.py").write_text("import numbers_that_nobody_has\n")
    (tmp_path / "failing_task_of_this_test.py").write_text("1 / 0\n")
    return tmp_path


def test_references_are_imported_from_the_current_directory_too(here: Path) -> None:
    for reference in ("my_task_of_this_test:Model.tiny", "my_task_of_this_test.Model.tiny"):
        assert resolve(reference, argument="model")(layers=3) == 3
    assert resolve("torch.nn.functional.cross_entropy", argument="x") is torch.nn.functional.cross_entropy
    model = torch.nn.Linear(1, 1)
    assert resolve(model, argument="model") is model


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("my_task_of_this_tst:Model", "model: there is no module 'my_task_of_this_tst'; looked in "),
        ("my_task_of_this_tst:Model", "Did you mean 'my_task_of_this_test'?"),
        ("torch.nn.nosuch:x", "model: there is no module 'torch.nn.nosuch'; looked in "),
        ("my_task_of_this_test:Modell", "model: my_task_of_this_test has no 'Modell'. Did you mean 'Model'?"),
        ("my_task_of_this_test:xyz", "model: my_task_of_this_test has no 'xyz'. There are Model, data."),
        ("my_task_of_this_test:Model.huge", "model: Model has no 'huge'. There are tiny."),
        (
            "broken_task_of_this_test:x",
            "failed to import 'broken_task_of_this_test:x': ModuleNotFoundError: No module",
        ),
        ("failing_task_of_this_test:x", "failed to import 'failing_task_of_this_test:x': ZeroDivisionError: division"),
        (
            "failing_task_of_this_test.inner.x",
            "failed to import 'failing_task_of_this_test.inner.x': ZeroDivision",
        ),
        ("my_task_of_this_test.Model.huge", "model: Model has no 'huge'. There are tiny."),
        ("model", "model: got 'model'. Accepted: 'package.module:name'."),
    ],
)
def test_a_reference_to_nothing_is_reported_with_what_is_there(here: Path, reference: str, complaint: str) -> None:
    assert complaint in sentence(lambda: resolve(reference, argument="model"))


def made(thing: Any, options: dict[str, Any], name: str) -> Any:
    task = {"model": torch.nn.Identity(), "train_data": [1]} | {name: thing}
    return make(Task(**task, options=options), name)


def test_what_a_setting_makes_is_called_and_what_it_is_stays() -> None:
    options = {"in_features": 2, "out_features": 3, "unknown": 4}
    layer = made("torch.nn:Linear", options, "model")
    assert layer.weight.shape == (3, 2)
    assert made(layer, options, "model") is layer
    assert made(functools.partial(torch.nn.Linear, 5), {"out_features": 1}, "model").weight.shape == (1, 5)
    assert made([1, 2], options, "train_data") == [1, 2]
    for other in ("os:path", lambda: 3):
        with pytest.raises(ConfigValueError, match=r"model: .* gives a (module|int)\. Accepted: a torch.nn.Module"):
            made(other, {}, "model")
    with pytest.raises(ConfigValueError, match="model: os:path gives a module"):
        check_options(Task(model="os:path", train_data=[1]))


def test_functions_get_the_options_that_they_take_and_no_option_is_lost() -> None:
    def model(width: int, /, *, layers: int = 1) -> tuple[int, int]:
        return width, layers

    def data(**anything: int) -> dict[str, int]:
        return anything

    options = {"layers": 2, "context": 3}
    assert made(functools.partial(model, 8), options, "objective") == (8, 2)
    assert made(data, options, "train_data") == options
    check_all_taken(options, {"model": model, "train_data": data}, argument="task.options")
    assert sentence(lambda: check_all_taken({"layer": 1}, {"model": model}, argument="task.options")) == (
        "task.options: model takes no option 'layer'. Did you mean 'layers'?"
    )
