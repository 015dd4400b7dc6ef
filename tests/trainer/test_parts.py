"""The parts of the trainer that need no ranks: where they start, requests to stop, callbacks, reports."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer import launch, preemption
from flatfsdp.trainer.callbacks import (
    BAR,
    PLAIN_LINES,
    EarlyStop,
    LossPlot,
    MetricsLog,
    ProgressBar,
    fitting,
    plot_loss,
    read_metrics,
    smoothed,
)
from flatfsdp.trainer.launch import Placement
from flatfsdp.trainer.memory_estimate import activations_counted
from flatfsdp.trainer.preemption import REQUESTED, StopRequest
from flatfsdp.trainer.run import MemoryFootprint, Progress, StepReport, TrainingResult
from flatfsdp.trainer.state.checkpoints import CheckpointManager
from flatfsdp.trainer.state.run_checkpoints import RunCheckpoints
from flatfsdp.trainer.terminal import size_in_words, sizes_in_words

pytestmark = pytest.mark.unit

MIB = 2**20


def a_trainer(tmp_path: Path, *, step: int = 0, rank: int = 0) -> Any:
    """As much of a trainer as callbacks see."""
    asked: list[bool] = []
    return SimpleNamespace(
        world=SimpleNamespace(rank=rank, leads=rank == 0),
        output=tmp_path,
        progress=Progress(step=step),
        aside=None,
        begins=not step,
        written={},
        asked=asked,
        ask_to_stop=lambda: asked.append(True),
    )


def a_report(step: int, *, done: float = 0.0) -> StepReport:
    return StepReport(
        step=step, loss=2.0, tokens=10, total_tokens=10 * step, lr=0.1, grad_norm=None, seconds=0.5 * step,
        tokens_per_second=12345.6, tflops=0.5, utilization=None, peak_bytes=1000, done=done,
        footprint=MemoryFootprint(parameters=1024, gradients=2048, optimizer=4096, in_flight=512), ids=(1, 2),
    )  # fmt: skip


# ranks


def test_plain_start_takes_two_ranks_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert Placement.of(None, "cpu") == Placement(ranks=2, device_type="cpu")
    assert Placement.of(3, "cpu").ranks == 3


def test_auto_takes_one_rank_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "_device_count", lambda type_: {"cpu": 1, "cuda": 4}[type_])
    assert Placement.of() == Placement(ranks=4, device_type="cuda")
    with pytest.raises(ConfigValueError, match="5 ranks on this machine, but 4 cuda devices"):
        Placement.of(5)


def test_a_launchers_world_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert Placement.of(None, "cpu").ranks == 8
    with pytest.raises(ConfigValueError, match="the launcher started 8 ranks, not 2"):
        Placement.of(2, "cpu")


# preemption


def test_a_signal_is_a_request_and_the_second_one_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    found = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background jobs ignore it
    try:
        with stop.handling_signals():
            signal.raise_signal(signal.SIGINT)
            assert (stop.number, preemption.in_words(stop.number)) == (signal.SIGINT, "SIGINT")
            signal.raise_signal(signal.SIGINT)  # the same one, on another way
            monkeypatch.setattr(preemption, "ECHO_SECONDS", 0.0)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, found)


def test_a_signal_that_is_ignored_stays_so() -> None:
    stop = StopRequest()
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with stop.handling_signals():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert stop.number == 0


def test_what_started_the_ranks_reports_which_signal_was_meant(capfd: pytest.CaptureFixture[str]) -> None:
    stop = StopRequest()
    preemption.meant_by(SimpleNamespace(value=signal.SIGINT))
    try:
        with stop.handling_signals():
            signal.raise_signal(signal.SIGTERM)
    finally:
        preemption.meant_by(None)
    assert stop.number == signal.SIGINT
    assert capfd.readouterr().err == "SIGINT: stopping after this step, saving\n"


def test_what_is_started_after_a_request_to_stop_hears_of_it_alone() -> None:
    signals: list[int] = []
    first, second = (SimpleNamespace(terminate=lambda number=number: signals.append(number)) for number in (0, 1))
    stop = SimpleNamespace(value=0)
    with launch.signals_forwarded(stop) as started:
        started([first])
        signal.raise_signal(signal.SIGTERM)
        assert signals == [0] and stop.value == signal.SIGTERM
        started([second])
    assert signals == [0, 1]


LOST = "flatfsdp.errors.LostRankError: rank 1, which has ended"
AGAIN = "\n\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("errors", "restarted"),
    [
        ([LOST], False),
        (["ValueError: 1", LOST], False),
        (["flatfsdp.errors.UsageError: cannot join: the job has ended"], False),
        ([LOST, "flatfsdp.errors.FencedError: the others go on"], True),
        (["ValueError: out of luck"], True),
        ([], True),
    ],
)
def test_a_rank_is_not_started_again_for_a_job_that_is_lost(errors: list[str], restarted: bool, tmp_path: Path) -> None:
    report = AGAIN.join(f"Traceback (most recent call last):\n  File\n{each}" for each in errors)
    (tmp_path / "report").write_bytes(pickle.dumps(report))
    ends = [os.pipe(), os.pipe()]  # a sentinel is ready when the other end is closed
    processes = [
        SimpleNamespace(sentinel=own, pid=number, exitcode=1 - number, join=lambda: None)
        for number, (own, _) in enumerate(ends)
    ]
    os.close(ends[0][1])
    ending = threading.Timer(0.2, os.close, (ends[1][1],))
    ending.start()
    ranks = SimpleNamespace(processes=processes, error_files=[str(tmp_path / "report"), ""], pids=lambda: [0, 1])
    asked: list[int] = []
    assert launch.outlive(ranks, lambda rank: asked.append(rank))  # type: ignore
    assert asked == [0] * restarted
    ending.join()
    for own, _ in ends:
        os.close(own)


def test_a_program_requests_and_a_signal_goes_first() -> None:
    stop = StopRequest()
    stop.request()
    assert (stop.number, preemption.in_words(stop.number)) == (REQUESTED, "the program")
    with stop.handling_signals():
        signal.raise_signal(signal.SIGTERM)
        stop.request()
        assert stop.number == signal.SIGTERM


ALONE = """
import importlib.util, os, signal, subprocess, sys, time, types
print_line = lambda text: print(text, file=sys.stderr, flush=True)
sys.modules["flatfsdp.trainer.terminal"] = types.SimpleNamespace(print_line=print_line)  # torch need not be imported
sys.modules["flatfsdp.messages"] = types.SimpleNamespace(end_if_a_rank_is_lost=lambda *unused: None)
spec = importlib.util.spec_from_file_location("preemption", sys.argv[1])
preemption = importlib.util.module_from_spec(spec)
spec.loader.exec_module(preemption)
"""
DEAF = f"""{ALONE}
import ctypes
preemption.ECHO_SECONDS, preemption.REPORT_SECONDS, preemption.BLOCKED_SECONDS = 0.1, 0.2, 0.1
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)

def deaf():
    library.pthread_mutex_lock(mutex)
    print("deaf", flush=True)
    library.pthread_mutex_lock(mutex)  # never returns, whatever signal comes

with preemption.StopRequest().handling_signals():
    if not (child := os.fork()):  # as those that read data may be
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.5)  # what it was asked is not the run's business
    deaf()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a lock that is zeros when it is free")
def test_a_run_in_a_call_that_never_returns_reports_where_and_ends_by_the_second_signal() -> None:
    command = [sys.executable, "-W", "ignore", "-c", DEAF, preemption.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "deaf\n"
            process.send_signal(signal.SIGTERM)
            assert process.stderr.readline() == "SIGTERM: stopping after this step, saving\n"
            assert re.search(r"rank 0\] was asked to stop .* in deaf$", process.stderr.readline())
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
            assert "ends after a second SIGTERM" in process.stderr.read()
        finally:
            process.kill()


def test_in_other_threads_signals_stay_what_they_are() -> None:
    def listen() -> None:
        with StopRequest().handling_signals():
            handlers.append(signal.getsignal(signal.SIGTERM))

    handlers: list[Any] = []
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(60)
    assert handlers == [signal.getsignal(signal.SIGTERM)]


# callbacks


def test_no_improvement_for_long_enough_ends_the_run(tmp_path: Path) -> None:
    trainer, callback = a_trainer(tmp_path), EarlyStop(patience=2, least=0.1)
    for loss, asked in ((3.0, 0), (2.95, 0), (2.0, 0), (2.5, 0)):
        callback.on_evaluation(trainer, {"eval_loss": loss})
        assert len(trainer.asked) == asked
    again = EarlyStop(patience=2, least=0.1)
    again.load_state_dict(callback.state_dict())
    again.on_evaluation(trainer, {"eval_loss": 1.95})
    assert len(trainer.asked) == 1
    with pytest.raises(ConfigValueError, match=r"evaluations have .*, but no metric 'eval_loss'"):
        again.on_evaluation(trainer, {"accuracy": 1.0})
    with pytest.raises(ConfigValueError, match="patience=0"):
        EarlyStop(0)


def test_a_run_that_goes_on_has_each_step_once_in_its_log(tmp_path: Path) -> None:
    first, trainer = MetricsLog(), a_trainer(tmp_path)
    first.on_begin(trainer)
    for step in (1, 2, 3):
        first.on_step(trainer, a_report(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed
    second = MetricsLog()
    resumed = a_trainer(tmp_path, step=2)
    second.on_begin(resumed)
    for step in (3, 4):
        second.on_step(resumed, a_report(step))
    second.on_end(resumed, None)  # type: ignore[arg-type]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[3] == {
        "step": 4, "loss": 2.0, "tokens": 10, "total_tokens": 40, "lr": 0.1, "seconds": 2.0,
        "tokens_per_second": 12345.6, "tflops": 0.5, "peak_bytes": 1000,
    }  # fmt: skip


def test_an_evaluation_that_comes_again_is_there_once(tmp_path: Path) -> None:
    """It was made after the checkpoint of its step."""
    first, trainer = MetricsLog(), a_trainer(tmp_path, step=2)
    first.on_begin(trainer)
    first.on_step(trainer, a_report(2))
    first.on_evaluation(trainer, {"eval_loss": 1.0})
    for evaluated, there in ((2, 2), (-1, 1)):
        resumed = a_trainer(tmp_path, step=2)
        resumed.progress.evaluated = evaluated
        again = MetricsLog()
        again.on_begin(resumed)
        again.on_end(resumed, None)  # type: ignore[arg-type]
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == there


def test_another_run_in_the_same_folder_keeps_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loss.png").write_bytes(b"picture")
    for number in (1, 2):
        log, trainer = MetricsLog(), a_trainer(tmp_path)
        log.on_begin(trainer)
        LossPlot().on_begin(trainer)
        log.on_step(trainer, a_report(number))
        log.on_end(trainer, None)  # type: ignore[arg-type]
        assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [number]
        assert trainer.written == {"metrics": tmp_path / "metrics.jsonl"}
    assert (tmp_path / "aside-1" / "loss.png").read_bytes() == b"picture"
    assert [row["step"] for row in read_metrics(tmp_path / "aside-2" / "metrics.jsonl")] == [1]
    assert "files of an earlier run" in capsys.readouterr().err


def test_other_ranks_log_nothing(tmp_path: Path) -> None:
    log, trainer = MetricsLog(), a_trainer(tmp_path, rank=1)
    log.on_begin(trainer)
    log.on_step(trainer, a_report(1))
    assert not list(tmp_path.iterdir())


def test_progress_without_a_terminal_is_some_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar, trainer = ProgressBar(), a_trainer(tmp_path)
    bar.on_begin(trainer)
    for step in range(1, 1001):
        bar.on_step(trainer, a_report(step, done=step / 1000))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == PLAIN_LINES + 1
    assert lines[-1] == (
        "100% step 1000: loss 2.000, 12,346 tokens/s; per rank params 1.0, grads 2.0, optim 4.0, unsharded 0.5 KiB"
    )
    other = a_trainer(tmp_path, rank=1)
    bar.on_begin(other)
    bar.on_step(other, a_report(1))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("width", "end"),
    [
        (None, "; per rank params 1.1, grads 1.1, optim 2.1, unsharded 0.5 MiB"),
        (120, "; params 1.1, grads 1.1, optim 2.1, unsharded 0.5 MiB"),
        (80, "; 4.8 MiB per rank"),
        (60, ""),
    ],
)
def test_beside_the_bar_stands_what_a_terminal_has_room_for(width: int | None, end: str) -> None:
    text = "step 1400: loss 1.909, 5,312 tokens/s"
    footprint = MemoryFootprint(
        parameters=11 * MIB // 10, gradients=11 * MIB // 10, optimizer=21 * MIB // 10, in_flight=MIB // 2
    )
    shown = fitting(text, footprint, width)
    assert shown == text + end
    assert not end or len(shown) + BAR <= (width or 1000)


def test_the_losses_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"step": step, "loss": 3.0 / step} for step in range(1, 30)] + [{"step": 29, "eval_loss": 0.2}]
    plot_loss(rows, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_losses_of_another_run_are_beside_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("adamw", "muon"):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": 1, "loss": 1.0}), json.dumps({"step": 1, "eval_loss": 0.5})]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    sizes = []
    for plot in (LossPlot(), LossPlot(beside=str(tmp_path / "adamw"))):
        plot.on_end(a_trainer(tmp_path / "muon"), None)  # type: ignore[arg-type]
        sizes.append(len((tmp_path / "muon" / "loss.png").read_bytes()))
    assert sizes[0] < sizes[1]
    with pytest.raises(ConfigValueError, match="LossPlot: beside: got 'nowhere', which has no metrics"):
        LossPlot("nowhere").on_begin(a_trainer(tmp_path))


def test_without_matplotlib_the_log_reports_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n")
    LossPlot().on_end(a_trainer(tmp_path), None)  # type: ignore[arg-type]
    assert "pip install '.[train]'" in caplog.text
    assert not (tmp_path / "loss.png").exists()


def test_smoothing_starts_at_the_first_loss() -> None:
    assert smoothed([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert smoothed([4.0] + [1.0] * 200)[-1] == pytest.approx(1.0, abs=1e-3)


# reports


def test_bytes_for_people() -> None:
    shown = [sizes_in_words(size) for size in (0, 1023, 1024, 3 * 2**19, 2**31, 2**40)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "2.0 GiB", "1.0 TiB"]
    assert [size_in_words(size) for size in (0, 1023, 1536, 2**20 * 100, 3 * 2**39)] == [
        "0 B", "1023 B", "1.50 KiB", "100 MiB", "1.50 TiB",
    ]  # fmt: skip
    assert sizes_in_words(2**19, 0, 2**21) == "0.5, 0.0, 2.0 MiB"


def test_a_signal_is_the_exit_code() -> None:
    def code(stopped_by: int) -> int:
        return TrainingResult(
            steps=1, tokens=1, seconds=1.0, taken=1, tokens_per_second=1.0, losses=(1.0,), stopped_by=stopped_by,
            checkpoint=None, footprint=MemoryFootprint(),
        ).exit_code  # fmt: skip

    assert [code(0), code(REQUESTED), code(signal.SIGTERM)] == [0, 0, 143]


# memory that a step keeps


def test_activations_are_storages_that_operations_keep_and_no_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    with activations_counted() as found:
        loss = model(x).sum()
        kept = 4 * (5 * 8 + 5 * 16)  # the input, and ReLU's output: it and the layer behind it keep the same
        assert found.peak_bytes == kept
        loss.backward()
        model(x).sum().backward()
        assert found.peak_bytes == kept, "the first ones are gone"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("reaped", [False, True])
def test_a_signal_after_a_peer_has_ended_announces_no_save(reaped: bool) -> None:
    """It comes from the process that started the ranks, which ends the others."""
    program = f"""{ALONE}
peer = subprocess.Popen(["true"] if sys.argv[2] != "lives" else ["sleep", "60"])
if sys.argv[2] == "reaped":
    peer.wait()
if sys.argv[2] == "zombie":
    os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
stop = preemption.StopRequest()
with stop.handling_signals([peer.pid]):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
peer.kill()
print(stop.number)
"""

    def output_with(peer: str) -> tuple[str, str]:
        command = [sys.executable, "-c", program, preemption.__file__, peer]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.stdout, done.stderr

    assert output_with("reaped" if reaped else "zombie") == ("15\n", "")
    assert output_with("lives") == ("15\n", "SIGTERM: stopping after this step, saving\n")


class FakeRanks:
    """The ranks of a fake world, one after the other: once `adds` is False, each gets the values of all."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.adds = True

    def values(self, value: Any) -> list[Any]:
        self.all += [value] * self.adds
        return self.all


@pytest.mark.parametrize(
    ("states", "agreed"),
    [
        ([("here/step-2", 2, False), ("other/step-9", -1, False), ("", -1, False)], ("here/step-2", 2, False)),
        ([("here/step-2", 2, True), ("here/step-2", 2, False), ("", -1, False)], ("here/step-2", -1, True)),
        ([("other/step-9", 9, False), ("", -1, False)], ("other/step-9", 9, False)),
        ([("", -1, False), ("", -1, False)], ("", -1, False)),
    ],
)
def test_ranks_agree_on_the_last_checkpoint(states: Any, agreed: Any, tmp_path: Path) -> None:
    """The last of them knows of none, as one that joins."""
    runs, ranks = [], FakeRanks()
    for last, complete_at, broken_off in states:
        path = tmp_path / last if last else None
        runs.append(RunCheckpoints(CheckpointManager(tmp_path / "here"), [], None, None, path, complete_at, broken_off))
    for each in runs:
        dataclasses.replace(each).agree(ranks)  # type: ignore
    ranks.adds = False
    for each in runs:
        each.agree(ranks)  # type: ignore
        assert (each.last, each.complete_at, each.broken_off) == (
            tmp_path / agreed[0] if agreed[0] else None,
            *agreed[1:],
        )
