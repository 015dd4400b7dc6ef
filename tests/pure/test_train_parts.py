"""The parts of the trainer, each alone: options, text, model, generation, report."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from flatfsdp import train
from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer import launch, report
from flatfsdp.trainer.data import Corpus, Split, corpus_files
from flatfsdp.trainer.generate import generate
from flatfsdp.trainer.launch import Plan
from flatfsdp.trainer.loop import learning_rate_factor
from flatfsdp.trainer.model import ByteTransformer
from flatfsdp.trainer.options import STRATEGIES, Options, make_parser, parse
from flatfsdp.trainer.plot import plot_loss, smoothed

# options


def test_no_arguments_give_the_defaults() -> None:
    assert parse(make_parser(), []) == Options()


def test_every_option_is_on_the_command_line_and_reaches_its_field() -> None:
    line = (
        "--data d --valid-part 0.5 --layers 2 --width 32 --heads 2 --context 16 --steps 3 --minutes 0.5 --batch 2 "
        "--accumulate 3 --lr 0.1 --warmup 0.2 --weight-decay 0 --clip 0 --seed 7 --ranks 4 --device cpu "
        "--strategy hybrid_shard_zero2 --replicas 2 --precision bf16 --cpu-offload --no-use-orig-params --out o "
        "--no-plot --sample 9 --prompt x --quiet"
    )
    options = parse(make_parser(), line.split())
    assert options == Options(
        data=Path("d"), valid_part=0.5, layers=2, width=32, heads=2, context=16, steps=3, minutes=0.5, batch=2,
        accumulate=3, lr=0.1, warmup=0.2, weight_decay=0.0, clip=0.0, seed=7, ranks=4, device="cpu",
        strategy="hybrid_shard_zero2", replicas=2, precision="bf16", cpu_offload=True, use_orig_params=False,
        out=Path("o"), plot=False, sample=9, prompt="x", quiet=True,
    )  # fmt: skip
    default = Options()
    assert not [name for name in vars(options) if getattr(options, name) == getattr(default, name)]


def test_strategies_are_spelt_like_fsdps_in_lower_case() -> None:
    assert sorted(STRATEGIES) == ["full_shard", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "shard_grad_op"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--layers 0", "argument --layers: expected a whole number from 1 up, got '0'"),
        ("--steps 1e3", "argument --steps: expected a whole number from 1 up, got '1e3'"),
        ("--lr nan", "argument --lr: expected a number above 0, got 'nan'"),
        ("--valid-part 1", "argument --valid-part: expected a number between 0 and 1, got '1'"),
        ("--heads 3", "argument --heads: --width 128 must be a multiple of twice --heads 3"),
        ("--replicas 2", "argument --replicas: only the hybrid strategies replicate, and --strategy is full_shard"),
        (
            "--strategy hybrid_shard --replicas 2 --ranks 3",
            "argument --replicas: 3 ranks cannot form 2 equal replicas",
        ),
        ("--device nosuch", "argument --device: this machine has no 'nosuch' device that torch can use"),
        ("--data /no/such/file", "argument --data: there is no file or folder '/no/such/file'"),
        ("--prompt=", "argument --prompt: needs at least one character to continue from"),
        ("--out /dev/null", "argument --out: cannot make the folder '/dev/null': File exists"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    line: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "run", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as exit_:
        train.main(["--device", "cpu", *line.split()])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"flatfsdp.train: {complaint} (--help lists the options)\n"


def test_help_has_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        train.main(["--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n{group}:\n" in shown for group in ("data", "model", "training", "engine", "output"))


def test_a_run_ends_at_the_limit_that_was_given() -> None:
    steps, minutes, both = Options(steps=10), Options(minutes=2), Options(steps=10, minutes=2)
    assert steps.done(5, 1e9) == 0.5
    assert minutes.done(10**9, 60) == 0.5
    assert both.done(5, 90) == 0.75
    assert both.done(10, 0) == 1
    assert 0 < Options().done(1, 1) < 1 <= Options().done(0, 120)


# ranks


def test_plain_start_takes_two_ranks_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert Plan.of(Options(device="cpu")) == Plan(ranks=2, device_type="cpu")
    assert Plan.of(Options(device="cpu", ranks=3)).ranks == 3


def test_auto_takes_one_rank_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "_device_count", lambda type_: {"cpu": 1, "cuda": 4}[type_])
    assert Plan.of(Options()) == Plan(ranks=4, device_type="cuda")
    with pytest.raises(ConfigValueError, match="5 ranks on this machine, but 4 cuda devices"):
        Plan.of(Options(ranks=5))


def test_a_launchers_world_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert Plan.of(Options(device="cpu")).ranks == 8
    with pytest.raises(ConfigValueError, match="the launcher started 8 ranks, not 2"):
        Plan.of(Options(device="cpu", ranks=2))


# text


def test_the_default_text_is_the_standard_library_without_tests() -> None:
    files = corpus_files(None)
    root = Path(os.__file__).parent
    assert root / "os.py" in files
    assert not [file for file in files if {"test", "site-packages"} & set(file.relative_to(root).parts[:-1])]
    assert files == sorted(files)


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"b.txt": "bb", "a.txt": "aaaa", "sub/c": "cccc", ".git/x": "xx"}.items():
        (tmp_path / name).write_text(text)
    corpus = Corpus.read(tmp_path, valid_part=0.4, context=3)
    assert bytes(torch.cat((corpus.train, corpus.valid)).tolist()) == b"aaaabbcccc"
    assert (corpus.train.numel(), corpus.valid.numel()) == (6, 4)


def test_an_empty_folder_and_a_short_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigValueError, match="holds no files"):
        corpus_files(tmp_path)
    with pytest.raises(ConfigValueError, match="100 bytes make 95 to train on and 5 to validate on; --context 8 needs"):
        Split.of(100, valid_part=0.05, context=8)


def test_targets_are_the_next_bytes_and_the_held_out_part_is_never_sampled() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    corpus = Corpus(train=text[:100], valid=text[100:], context=10)
    tokens, targets = corpus.sample(500, generator=torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (500, 10)
    assert torch.equal(targets, tokens + 1)
    assert (tokens.min(), targets.max()) == (0, 99)  # every position is reached, the last byte of the part included


def test_ranks_share_out_the_validation_sequences_evenly() -> None:
    corpus = Corpus(train=torch.zeros(1), valid=torch.arange(250, dtype=torch.uint8), context=10)
    shares = [list(corpus.validation(24, batch=4, rank=rank, world=3)) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 2, 2]
    starts = [int(start) for share in shares for tokens, _ in share for start in tokens[:, 0]]
    assert len(set(starts)) == 24
    assert (min(starts), max(starts)) == (0, 239)


# model


def small_model() -> ByteTransformer:
    torch.manual_seed(0)
    model = ByteTransformer(width=16, layers=2, heads=2, context=12)
    torch.nn.init.normal_(model.head.weight)
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.out.weight)
        torch.nn.init.normal_(block.down.weight)
    return model


def test_an_untrained_model_knows_nothing() -> None:
    model = ByteTransformer(width=16, layers=2, heads=2, context=12)
    assert torch.equal(model(torch.zeros(3, 12, dtype=torch.long)), torch.zeros(3, 12, 256))


def test_a_position_sees_itself_and_what_came_before_only() -> None:
    model, tokens = small_model(), torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 6] = 99
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:6].max() == 0
    assert difference[6:].min() > 0


def test_a_position_sees_the_order_of_what_came_before() -> None:
    model, tokens = small_model(), torch.arange(12)[None]
    swapped = tokens.clone()
    swapped[0, [2, 3]] = tokens[0, [3, 2]]
    assert (model(tokens) - model(swapped))[0, -1].abs().max() > 1e-3


def test_generation_continues_the_prompt_the_same_way_every_time() -> None:
    texts = [
        generate(small_model(), "ab", length=30, context=12, device=torch.device("cpu"), seed=seed)
        for seed in (1, 1, 2)
    ]
    assert texts[0].startswith("ab")
    assert texts[0] == texts[1] != texts[2]


# schedule and report


def test_the_learning_rate_rises_and_falls() -> None:
    factors = [learning_rate_factor(step / 100, warmup=0.1) for step in range(100)]
    assert factors[0] < 0.02
    assert factors[10] == pytest.approx(1.0)
    assert factors[99] == pytest.approx(0.05, abs=0.001)
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert learning_rate_factor(0.0, warmup=0.0) == 1.0


def test_bytes_for_people() -> None:
    shown = [report.human(size) for size in (0, 1023, 1024, 1.5 * 2**20, 2.0**31, 2.0**40)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "2.0 GiB", "1024.0 GiB"]
    assert report.human(0.5 * 2**20, 0, 2 * 2**20) == "0.5, 0.0, 2.0 MiB"


def test_progress_without_a_terminal_is_some_lines(capsys: pytest.CaptureFixture[str]) -> None:
    footprint = report.Footprint(parameters=1024, gradients=2048, optimizer=4096, in_flight=512)
    with report.Progress(shown=True) as progress:
        for step in range(1, 1001):
            progress.show(step, step / 1000, 2.0, 12345.6, footprint)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == report.PLAIN_LINES + 1
    assert lines[-1] == (
        "100% step 1000: loss 2.000, 12,346 tokens/s; per rank params 1.0, grads 2.0, optim 4.0, unsharded 0.5 KiB"
    )
    with report.Progress(shown=False) as progress:
        progress.show(1, 1.0, 2.0, 1.0, footprint)
    assert capsys.readouterr().err == ""


def test_the_summary() -> None:
    summary = report.Summary(
        data="text",
        ranks="2 on cpu, full_shard, fp32",
        parameters=1000,
        units=3,
        footprint=report.Footprint(parameters=2000, gradients=2000, optimizer=4000, in_flight=1000),
        communication={"reduce_scatter": (3.0, 4096.0), "all_gather": (5.0, 2048.0)},
        steps=10,
        seconds=2.0,
        tokens_per_step=100,
        first_loss=5.5,
        last_loss=2.0,
        validation_loss=2.1,
        plot="out/loss.png",
    )
    assert summary.render() == (
        "summary\n"
        "  data        text\n"
        "  ranks       2 on cpu, full_shard, fp32\n"
        "  parameters  1,000 in total, 2.0 KiB of them per rank\n"
        "  units       3\n"
        "  per rank    params 2.0, grads 2.0, optim 3.9, unsharded 1.0 KiB\n"
        "  per step    all_gather 2.0 KiB in 5 calls, reduce_scatter 4.0 KiB in 3 calls\n"
        "  speed       10 steps in 2.0 s, 500 tokens/s\n"
        "  loss        5.500 -> 2.000 nats/byte\n"
        "  validation  2.100 nats/byte\n"
        "  plot        out/loss.png"
    )


def test_smoothing_starts_at_the_first_loss() -> None:
    assert smoothed([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert smoothed([4.0] + [1.0] * 200)[-1] == pytest.approx(1.0, abs=1e-3)


def test_without_matplotlib_the_plot_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'flatfsdp[train]'" in plot_loss([2.0, 1.0], 1.0, tmp_path)
    assert not list(tmp_path.iterdir())
