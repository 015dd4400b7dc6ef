"""`python -m flatfsdp.train` where it starts no ranks: plans, and options that contradict one another."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import traceback
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from flatfsdp import train
from flatfsdp.errors import ConfigTypeError, FlatFSDPWarning
from flatfsdp.trainer import FSDPArguments
from flatfsdp.trainer.settings.command_line import flag_of, in_flags, key_of
from flatfsdp.trainer.settings.usual_names import USUAL_NAMES
from flatfsdp.trainer.state.run_folder import with_folder

pytestmark = pytest.mark.single_process

OWN = "--model flatfsdp.examples.own_model:make_model --train-data flatfsdp.examples.own_model:make_data".split()


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "run", lambda *_, **__: pytest.fail("ranks were started"))


def test_a_dry_run_plans_for_any_number_of_ranks(
    no_ranks: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--dry-run", "--world-size", "64", "--device", "cpu", "--units", "blocks", "--optimizer", "sgd"]
    assert train.main([*OWN, *options]) == 0
    shown = capsys.readouterr().out
    assert "64 ranks (CPUs, gloo), SGD" in shown
    assert "blocks.0 .. 1 (2)  TransformerEncoderLayer" in shown
    block = 4 * (64 * 192 + 192 + 64 * 64 + 64 + 2 * 4 * 64 * 64 + 4 * 64 + 64 + 4 * 64) * 2 // 64
    assert f"{block:,}" in shown
    assert not list(tmp_path.iterdir()), "no folder is made"
    assert train.main([*OWN, *options, "--front", "fully_shard"]) == 0
    shown = capsys.readouterr().out
    assert "each unit: FULL_SHARD, 64 x 1, float32 in rows" in shown
    assert "for lost ranks" not in shown
    assert train.main([*OWN, *options, "--elastic", "--elastic-group", "3"]) == 0
    assert "for lost ranks, state" not in capsys.readouterr().out, "nothing is sent on one machine"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert train.main([*OWN, *options, "--elastic", "--elastic-group", "3"]) == 0
    shown = capsys.readouterr().out
    (between,) = re.findall(r"^total, without activations +([\d.]+) KiB", shown, re.MULTILINE)
    (kept,) = re.findall(r"^for lost ranks, on the host +([\d.]+) KiB", shown, re.MULTILINE)
    assert float(kept) == pytest.approx(3 * float(between), rel=0.01)  # two copies, and twice a half of those of others
    assert re.search(rf"^for lost ranks, state +{between} KiB", shown, re.MULTILINE)


def test_a_plan_for_accelerators_that_are_not_there_includes_activations(
    no_ranks: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--device", "cuda", "--world-size", "2", "--activations", "--objective", "flatfsdp.trainer:CausalLM"]
    assert train.main([*OWN, *options, "--dry-run", "--units", "blocks", "--fused-loss"]) == 0
    shown = capsys.readouterr().out
    assert "2 ranks (accelerators, NCCL), AdamW" in shown
    assert re.search(r"with activations +in use +reserved\npeak of a step +[\d.]+ MiB +[\d.]+ MiB\n", shown)
    assert re.search(r"TransformerEncoderLayer +blocks.0 +2 .* of the forward", shown)
    assert "Not included: activations" not in shown
    assert train.main([*OWN, *options, "--advise", "--node", "1", "--memory", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search("in use +reserved", shown) and "fit into 1.0 GiB" in shown
    assert not list(tmp_path.iterdir()), "no folder is made"


def test_advice_compares_ways_to_shard_the_model(
    no_ranks: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--advise", "--world-size", "2", "--node", "1", "--device", "cpu", "--clip", "1"]
    assert train.main([*OWN, *options, "--memory", "1"]) == 0
    lines = capsys.readouterr().out.strip().split("\n")
    shown = [tuple(re.split("  +", line)[:3]) for line in lines if re.match(r"\d+ x \d+ ", line)]
    expected = [(f"{s} x {2 // s}", unit, way) for s in (2, 1) for unit in ("none", "auto") for way in ("flat", "rows")]
    assert shown == expected
    assert lines[-1].startswith("Recommended: ") and "fit into 1.0 GiB" in lines[-1]
    assert not list(tmp_path.iterdir()), "no folder is made"
    assert train.main([*OWN, *options, "--front", "fully_shard", "--units", "blocks"]) == 0
    shown_in_place = capsys.readouterr().out
    assert "left out: 1 shards x 2 replicas" in shown_in_place and "parameters are always sharded" in shown_in_place
    assert re.search("2 x 1 +blocks +rows", shown_in_place) and not re.search("2 x 1 +blocks +flat", shown_in_place)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--strategi full_shard", "unknown argument '--strategi'. Did you mean '--strategy'?"),
        ("--learning_rate 1", "unknown argument '--learning_rate'. Did you mean '--lr'?"),
        ("--learning-rate=1", "unknown argument '--learning-rate'. Did you mean '--lr'?"),
        (
            "--per_device_train_batch_size 8",
            "unknown argument '--per_device_train_batch_size'. Did you mean '--batch'?",
        ),
        ("--save_every 8", "unknown argument '--save_every'. Did you mean '--save-every'?"),
        ("--layers 0", "argument --layers: got '0'. Input should be greater than or equal to 1."),
        ("--heads 3", "argument --heads: got 3, but --width 128 must be a multiple of twice the number of heads"),
        ("--ranks 3 --strategy hybrid_shard --replicas 2", "--replicas: 3 ranks do not make 2 equal replicas"),
        (
            "--front fully_shard --strategy no_shard",
            "argument --strategy: got 'no_shard', but with --front",
        ),
        ("--device nosuch", "argument --device: this machine has no 'nosuch' device that torch can use"),
        ("--text /no/such/file", "argument --text: there is no file or folder '/no/such/file'"),
        ("--output /dev/null", "--output: cannot create the folder '/dev/null': File exists"),
        ("--export folder", "--export: name the checkpoint to export: --resume latest, best or a path"),
        ("--resume no/such", "--resume: there is no folder 'no/such'. Accepted: latest, best, or a path"),
        ("--overwrite", "argument --overwrite: got True, but it applies only with --export"),
        ("--measure", "argument --measure: got True, but it applies only with --dry-run"),
        ("--memory 80", "argument --memory: got 80.0, but it applies only with --advise"),
        ("--world-size 8", "argument --world-size: got 8, but it applies only with --dry-run and --advise"),
        ("--activations", "argument --activations: got True, but it applies only with --dry-run and --advise"),
        ("--dry-run --activations", "argument --activations: got True, but what CPUs allocate for them is not known."),
        ("--dry-run --world-size 2 --device nosuch", "argument --device: torch knows no 'nosuch' devices"),
        ("--elastic-group 3", "argument --elastic-group: got 3, but it applies only with --elastic"),
        (
            "--elastic --elastic-group 1",
            "argument --elastic-group: got '1'. Input should be greater than or equal to 2.",
        ),
        ("--elastic --detect-nonfinite", "argument --detect-nonfinite: got True, but with it, the others cannot go on"),
        ("--advise --dry-run", "argument --advise: got True, but it cannot be combined with --dry-run"),
        ("--model a:b", "argument --model: got 'a:b', but --train-data is not given"),
        ("--model os:path --train-data os:path", "argument --model: os:path gives a module. Accepted: a torch.nn"),
        ("--callbacks tensorbord", "argument --callbacks: got 'tensorbord'. Did you mean 'tensorboard'?"),
        ("--tokenizer a:b", "--tokenizer applies only to your own model, but --model is not given"),
        (f"{' '.join(OWN)} --layers 3", "--layers applies only to the demonstration model, but --model is given"),
        (f"{' '.join(OWN)} --options depth=3", "argument --options: --model and --train-data take no option 'depth'. "),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    no_ranks: None, line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        train.main(["--device", "cpu", *line.split()])
    assert exit_.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith(f"flatfsdp.train: {complaint}")
    assert text.endswith(" (--help lists the options)\n")
    assert text.count("\n") == 1


def test_an_export_onto_other_files_is_refused_before_anything_starts(
    no_ranks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").touch()
    line = ["--device", "cpu", "--resume", "latest", "--export", "export"]
    with pytest.raises(SystemExit):
        train.main(line)
    remedy = "Choose another folder, or add --overwrite to replace an export"
    text = f"flatfsdp.train: --export: export holds model.safetensors. {remedy} (--help lists the options)\n"
    assert capsys.readouterr().err == text
    assert train.read([*line, "--overwrite"]).command.overwrite


def test_names_of_other_trainers_lead_to_settings() -> None:
    fields = {name for each in train.groups().values() for name in vars(each)}
    assert set(USUAL_NAMES.values()) <= fields
    assert not USUAL_NAMES.keys() & fields
    with pytest.raises(ConfigTypeError, match=r"'gradient_checkpointing'\. Did you mean 'activation_checkpointing'"):
        FSDPArguments(gradient_checkpointing=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("lora: PEFT rejects it", "argument --lora: PEFT rejects it"),
        ("TrainingArguments.min_lr: got 1", "argument --min-lr: got 1"),
        ("ElasticArguments.every: got 0", "argument --elastic-every: got 0"),
        ("it is full; pass overwrite=True: then", "it is full; pass --overwrite: then"),
        ("pass resume='a/b-1': set global_batch=2", "pass --resume a/b-1: set --global-batch 2"),
        ("set steps= or epochs=; batch= is 3.", "set --steps or --epochs; --batch is 3."),
        (
            'read on rank 0: data_mode="dispatch", a plan of steps',
            "read on rank 0: --data-mode dispatch, a plan of steps",
        ),
        ("epochs=1. Or lora=, text='' and units='none'", "--epochs 1. Or --lora, --text and --units none"),
        ("with 'save_every' in /a/save_every, not plot=False", "with 'save_every' in /a/save_every, not --no-plot"),
    ],
)
def test_messages_of_a_command_line_name_flags(message: str, expected: str) -> None:
    assert in_flags(message, map(type, train.groups().values())) == expected


def test_a_warning_is_one_line_that_names_flags() -> None:
    """Its place is shown only in code of the user; warnings of others are shown as before."""
    outside = warnings.formatwarning
    message = "units: a warning. Name its units, or pass units='none'"
    shown = "flatfsdp.train: warning: argument --units: a warning. Name its units, or pass --units none"
    with train.warnings_with_flags():
        form = warnings.formatwarning
        assert form(FlatFSDPWarning(message), FlatFSDPWarning, train.__file__, 3) == f"{shown}\n"
        assert form(FlatFSDPWarning(message), FlatFSDPWarning, "/home/model.py", 3) == f"{shown} (/home/model.py:3)\n"
        assert form(UserWarning(message), UserWarning, "/m.py", 3) == f"/m.py:3: UserWarning: {message}\n"
    assert warnings.formatwarning is outside


def failed_in(code: str, file: str) -> str:
    """torch's report of a rank that failed in `code`."""
    try:
        exec(compile(code, file, "exec"), {})
    except Exception:
        _, _, rest = traceback.format_exc().partition("\n  File")  # that of this test
        return f"\n\n-- Process 1 terminated with the following error:\nTraceback\n  File{rest.partition('  File')[2]}"
    raise AssertionError


def test_what_the_model_shows_to_be_a_wrong_option_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its traceback is of use only if it contains user code."""
    wrong = "from flatfsdp.errors import ConfigValueError\nraise ConfigValueError('units: no such unit')"
    monkeypatch.chdir(tmp_path)
    for code, file, exit_code, rest in (
        (wrong, train.__file__, 2, "flatfsdp.train: argument --units: no such unit\n"),
        (
            wrong.replace("ConfigValueError", "CheckpointError"),
            torch.__file__,
            2,
            "flatfsdp.train: argument --units: no",
        ),
        (wrong, "/home/model.py", 1, "flatfsdp.train: rank 1 failed\n\n-- Process 1 terminated"),
        ("1 / 0", train.__file__, 1, "flatfsdp.train: rank 1 failed\n\n-- Process 1 terminated"),
    ):
        error = ProcessRaisedException(failed_in(code, file), 1, 0)
        monkeypatch.setattr(train, "run", Mock(side_effect=error))
        assert train.main(["--device", "cpu"], announced=True) == exit_code
        assert capsys.readouterr().err.startswith(rest)


def test_help_has_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        train.main(["--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n{group}:\n" in shown for group in ("command", "task", "training", "fsdp", "demo"))
    flags = set(re.findall(r"^  (--[a-z][\w-]*)", shown, re.MULTILINE)) - {"--config"}
    assert flags == {flag_of(name) for name in train.COMMON} and len(flags) == 31
    with pytest.raises(SystemExit):
        train.main(["--steps", "3", "--help", "all"])
    every = set(re.findall(r"^  (--[a-z][\w-]*)", capsys.readouterr().out, re.MULTILINE)) - {"--config"}
    assert every == {flag_of(key_of(type(each), name)) for each in train.groups().values() for name in vars(each)}
    assert {"--elastic", "--elastic-every"} <= every


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--generate text", "--generate applies only to a model that --model names"),
        ("--temperature 0", "argument --temperature: got 0.0, but it applies only with --generate"),
        ("--generate text --dry-run", "argument --generate: got 'text', but it cannot be combined with --dry-run"),
    ],
)
def test_generation_is_of_a_model_by_name(
    no_ranks: None, line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.main(["--device", "cpu", *line.split()])
    assert capsys.readouterr().err.startswith(f"flatfsdp.train: {complaint}")


def test_a_config_file_sets_what_flags_do_not(
    no_ranks: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"training": {"optimizer": "sgd", "accumulate": 3}, "fsdp": {"strategy": "no_shard"}}')
    line = ["--config", str(path), "--dry-run", "--device", "cpu", "--accumulate", "2", "--text", __file__]
    assert train.main(line) == 0
    shown = capsys.readouterr().out
    assert "2 ranks (CPUs, gloo), SGD, 2 microbatches per step" in shown
    assert "NO_SHARD" in shown


def test_a_dry_run_names_the_code_of_a_config_file_before_it_runs(
    no_ranks: None, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_a_stranger.py").write_text("print('code of a stranger runs')\nmodel = data = None\n")
    path = tmp_path / "run.json"
    path.write_text('{"task": {"model": "of_a_stranger:model", "train_data": "of_a_stranger:data"}}')
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(Exception, SystemExit):
        train.main(["--config", str(path), "--dry-run", "--device", "cpu"])
    first, _, then = capfd.readouterr().out.partition("code of a stranger runs")
    named = "model = of_a_stranger:model; train_data = of_a_stranger:data"
    assert first == f"importing and calling, with your permissions: {named}\n\n"
    assert "code of a stranger runs" not in first and named not in then


def test_the_line_before_torch_is_imported_is_that_of_the_run(no_ranks: None, tmp_path: Path) -> None:
    path = Path(train.__file__).parents[1] / "tools" / "start_train.py"
    spec = importlib.util.spec_from_file_location("start_train", path)
    assert spec is not None and spec.loader is not None
    early = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(early)
    (tmp_path / "run.json").write_text('{"demo": {"layers": 3}, "training": {"device": "cpu", "ranks": 1}}')
    for line in (
        "--device cpu",
        "--device=cpu --ranks 3 --width 64 --layers=4 --layers 5 --seed 3",
        "--device cpu --layers 1",
        f"--text {path} --device cpu",
        "--config run.json --width 8 --heads 4",
        " ".join([*OWN, "--device", "cpu"]),
    ):
        assert early.announcement(line.split()) == train.read(line.split()).announcement()
    for line in ("--dry-run --layers 3", "--help", "--export=folder"):
        assert early.announcement(line.split()) == ""


def test_a_run_after_another_has_a_folder_of_its_own(no_ranks: None, tmp_path: Path) -> None:
    for name in ("train-out", "train-out-2", "train-out-3"):
        assert with_folder(train.read(["--device", "cpu"]).training).output == Path(name)
        if name == "train-out":
            Path(name, "metrics.jsonl").touch()
        else:
            Path(name, "step-00000001").mkdir()
    assert train.read(["--device", "cpu", "--resume", "latest"]).training.output == Path("train-out")


def test_a_named_folder_that_holds_a_run_is_refused_with_the_remedies(
    no_ranks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run1" / "step-00000100").mkdir(parents=True)
    (tmp_path / "run2").mkdir()
    (tmp_path / "run2" / "metrics.jsonl").touch()
    for line, found in (
        ("--output run1", "run1 holds a run, whose last checkpoint is step-00000100"),
        ("--output run2", "run2 holds a run that saved no checkpoint"),
        ("--output run2 --resume run1/step-00000100", "run2 holds a run that saved no checkpoint"),
    ):
        with pytest.raises(SystemExit):
            train.main(["--device", "cpu", *line.split()])
        remedies = "Pass --resume latest to continue that run, or choose another folder"
        shown = capsys.readouterr().err
        assert shown == f"flatfsdp.train: argument --output: {found}. {remedies} (--help lists the options)\n"
    for resumed in ("latest", "run1/step-00000100"):
        assert train.read(["--device", "cpu", "--output", "run1", "--resume", resumed])
    assert not (tmp_path / "run1-2").exists()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "--resume latest --output run"),
        ("--steps 5 --output there --no-plot", "--steps 5 --no-plot --resume latest --output run"),
        ("--output=there --plot --resume best --text -", "--plot --text - --resume latest --output run"),
    ],
)
def test_a_command_line_that_goes_on_prints_nothing_twice(given: str, expected: str) -> None:
    values = {"--resume": "latest", "--output": "run"}
    assert train.changed(given.split(), values) == expected.split()
