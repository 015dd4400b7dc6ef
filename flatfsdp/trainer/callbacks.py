"""Callbacks of a run: progress bar, logs, plots, generated text, a summary, early stopping."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

import flatfsdp
from flatfsdp.errors import ConfigValueError, did_you_mean, ranks_in_words
from flatfsdp.trainer.objectives import evaluating, logits_of
from flatfsdp.trainer.run import MemoryFootprint, Progress, Run, StepReport, TrainingResult
from flatfsdp.trainer.state.checkpoints import ASIDE
from flatfsdp.trainer.state.run_folder import METRICS
from flatfsdp.trainer.terminal import columns, print_line, shown, sizes_in_words

__all__ = ["Callback", "EarlyStop", "LossPlot", "MetricsLog", "ProgressBar", "SampleText", "Summary", "read_metrics"]

PICTURE = "loss.png"
PLAIN_LINES = 20  # progress lines of a run where the output is not a terminal
BAR = 23  # columns: percentage, bar, remaining time, separators, and one to spare
TEMPERATURE = 0.8  # at lower ones, small models repeat themselves, mostly spaces


# Hooks of other trainers, and ours for the same moment.
ELSEWHERE = {
    **dict.fromkeys(("on_train_begin", "on_train_start", "on_fit_start"), "on_begin"),
    **dict.fromkeys(("on_train_batch_start", "on_batch_start", "on_batch_begin"), "on_step_begin"),
    **dict.fromkeys(("on_step_end", "on_train_batch_end", "on_batch_end", "on_log", "on_after_backward"), "on_step"),
    **dict.fromkeys(("on_evaluate", "on_validation_end", "on_validation_epoch_end"), "on_evaluation"),
    **dict.fromkeys(("on_save_checkpoint", "on_checkpoint"), "on_save"),
    **dict.fromkeys(("on_train_end", "on_fit_end"), "on_end"),
}


class Callback:
    """The base of callbacks; each method does nothing.

    All methods are called on every rank, at the same points and with the same values (except for a report's `ids`). So
    they may make collective calls, and call `trainer.ask_to_stop()`; to print or write, check `trainer.world.leads`.
    An exception on one rank ends the run on all: the others raise an `AgreementError` that names it.

    Raises:
        ConfigValueError: where a class is derived, for a method whose name begins with `on_` and is no hook.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in dir(cls):
            if name.startswith("on_") and name not in hooks and callable(getattr(cls, name)):
                meant = ELSEWHERE.get(name)
                hint = f"Did you mean {meant!r}?" if meant else did_you_mean(name, hooks)
                raise ConfigValueError(
                    f"{cls.__name__}.{name}: callbacks have no such hook, so it would never be called. "
                    f"{hint}{' ' * bool(hint)}Hooks: {', '.join(hooks)}"
                )

    def on_begin(self, trainer: Run) -> None:
        """Called before the first step, after a checkpoint was loaded; not on a rank that joins later."""

    def on_step_begin(self, trainer: Run, step: int) -> None:
        """Called before step number `step`, counted from 1, is computed."""

    def on_step(self, trainer: Run, report: StepReport) -> None:
        """Called after a step, once its metrics have arrived: often during the next step."""

    def on_evaluation(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation."""

    def on_save(self, trainer: Run, path: Path, stall_seconds: float) -> None:
        """Called once a save has begun, which stalled training so long. An asynchronous one completes later."""

    def on_other_ranks(self, trainer: Run) -> None:
        """Called with `[elastic]` after ranks were lost, or have joined: the run has gone back to `trainer.progress`,
        and goes on with those in `trainer.world`, whose numbers may have changed."""

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        """Called after the last step, its evaluation and its checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run restores: plain values and tensors, the same on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`."""


def keep_earlier(trainer: Run, name: str) -> None:
    """Move the file `name` of an earlier run, which this run will write again, to `aside-<number>` in its folder.
    For `on_begin`, on the rank that leads. A run that resumes from its last checkpoint keeps writing the file.
    """
    path = trainer.output / name
    if not (path.is_file() and path.stat().st_size):
        return
    if trainer.aside is None and trainer.begins:
        folders = (trainer.output / ASIDE.format(number) for number in count(1))
        trainer.aside = next(each for each in folders if not each.exists())
        trainer.aside.mkdir()
        print_line(f"files of an earlier run in {trainer.output} have been moved to {trainer.aside}")
    if trainer.begins and trainer.aside is not None:
        path.rename(trainer.aside / name)
    elif trainer.aside is not None:  # a branch continues it
        shutil.copyfile(path, trainer.aside / name)


class EarlyStop(Callback):
    """Stop when `by` has not improved for `patience` evaluations in a row.

    Args:
        by: a metric of evaluations.
        mode: "min" if smaller is better, "max" if larger is.
        least: the smallest difference that counts as an improvement.

    Raises:
        ConfigValueError: an invalid patience or mode.
    """

    def __init__(self, patience: int = 3, *, by: str = "eval_loss", mode: str = "min", least: float = 0.0) -> None:
        if patience < 1 or mode not in ("min", "max"):
            raise ConfigValueError(
                f"EarlyStop: got patience={patience!r}, mode={mode!r}. Accepted: at least 1, and 'min' or 'max'"
            )
        self._patience, self._by, self._least = patience, by, least
        self._sign = 1.0 if mode == "min" else -1.0
        self._best = math.inf
        self._since = 0

    def on_evaluation(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        if self._by not in metrics:
            raise ConfigValueError(
                f"EarlyStop: evaluations have {', '.join(sorted(metrics))}, but no metric {self._by!r}"
            )
        value = self._sign * metrics[self._by]
        if value < self._best - self._least:
            self._best, self._since = value, 0
            return
        self._since += 1
        if self._since >= self._patience:
            trainer.ask_to_stop()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._since = state["best"], state["since"]


class ProgressBar(Callback):
    """A tqdm bar on a terminal, otherwise some lines on stderr; on rank 0.

    The first of the callbacks: the others print at the end, when the bar is closed.
    """

    def __init__(self) -> None:
        self._lines: int | None = None
        self._bar: Any = None

    def on_step(self, trainer: Run, report: StepReport) -> None:
        if not trainer.world.leads:
            return
        done = min(report.done, 1.0)
        if self._bar is None and self._lines is None:
            self._bar = _tqdm_bar(done)
        text = f"step {report.step}: loss {report.loss:.3f}, {report.tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(fitting(text, report.footprint, columns(sys.stderr)), refresh=False)
            self._bar.update(done - self._bar.n)
        elif self._lines is None or done * PLAIN_LINES >= self._lines + 1:
            self._lines = int(done * PLAIN_LINES)
            print(f"{done:4.0%} {text}; per rank {report.footprint}", file=sys.stderr, flush=True)

    def on_evaluation(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        if trainer.world.leads:
            values = ", ".join(f"{name} {shown(value)}" for name, value in metrics.items())
            text = f"step {trainer.progress.step}: {values}"
            print_line(textwrap.fill(text, columns(sys.stderr) or 10_000, subsequent_indent="  "))

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = self._lines = None


def fitting(text: str, footprint: MemoryFootprint, width: int | None) -> str:
    """`text`, with the longest form of a rank's bytes that fits into a line of `width` next to the bar, if any."""
    whole = footprint.parameters + footprint.gradients + footprint.optimizer + footprint.in_flight
    room = (width or 1000) - BAR - len(text)
    ends = (f"; per rank {footprint}", f"; {footprint}", f"; {sizes_in_words(whole)} per rank")
    return text + next((end for end in ends if len(end) <= room), "")


def _tqdm_bar(done: float) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    form = "{percentage:3.0f}% {bar:5} {remaining}{postfix}"
    return tqdm(total=1.0, initial=done, dynamic_ncols=True, bar_format=form)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a log, in order. An incomplete last line is left out. Without a file, there are no rows."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class MetricsLog(Callback):
    """Write `metrics.jsonl` into the run's folder, by rank 0.

    A resumed run drops the rows after its checkpoint, which will be written again: each step and each evaluation is
    there once. Before a branch, the log is set aside, as is the log of another run. Losses are in the objective's units
    (nats per token), times in seconds of training, sizes in bytes.

    Args:
        every: one row for every so many steps.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._file: TextIO | None = None

    def on_begin(self, trainer: Run) -> None:
        if trainer.world.leads:
            keep_earlier(trainer, METRICS)
        self.on_other_ranks(trainer)

    def on_other_ranks(self, trainer: Run) -> None:
        if not trainer.world.leads:
            return
        path = trainer.output / METRICS
        rows = [row for row in read_metrics(path) if _is_before(row, trainer.progress)]
        fresh = path.with_suffix(".new")
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        os.replace(fresh, path)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        trainer.written["metrics"] = path

    def on_step(self, trainer: Run, report: StepReport) -> None:
        if report.step % self._every == 0:
            self._write(report.row())

    def on_evaluation(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        self._write({"step": trainer.progress.step, **metrics})

    def on_save(self, trainer: Run, path: Path, stall_seconds: float) -> None:
        self._write({"step": trainer.progress.step, "checkpoint": path.name, "stall_seconds": stall_seconds})

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(f"{json.dumps(row)}\n")


def _is_before(row: Mapping[str, Any], progress: Progress) -> bool:
    is_evaluation = "loss" not in row and "checkpoint" not in row
    if is_evaluation and row["step"] == progress.step:
        return progress.evaluated == progress.step
    return bool(row["step"] <= progress.step)


class LossPlot(Callback):
    """At the end, plot the losses of `metrics.jsonl` (see `MetricsLog`) to `loss.png` next to it, on rank 0.

    Without matplotlib, a line in the log has the command that installs it.

    Args:
        beside: the folder of another run, whose losses are plotted beside those of this one.

    Raises:
        ConfigValueError: as a run begins, if that folder has no metrics.
    """

    def __init__(self, beside: str | Path | None = None) -> None:
        self._beside = None if beside is None else Path(beside)

    def on_begin(self, trainer: Run) -> None:
        if self._beside is not None and not (self._beside / METRICS).is_file():
            raise ConfigValueError(f"LossPlot: beside: got {str(self._beside)!r}, which has no {METRICS}")
        if trainer.world.leads:
            keep_earlier(trainer, PICTURE)

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        if trainer.world.leads:
            try:
                other = None
                if self._beside is not None:
                    other = str(self._beside), read_metrics(self._beside / METRICS)
                plot_loss(read_metrics(trainer.output / METRICS), trainer.output / PICTURE, beside=other)
                trainer.written["plot"] = trainer.output / PICTURE
            except ImportError:
                install = "pip install '.[train]' in a clone of flatfsdp"
                logging.getLogger("flatfsdp").warning(
                    f"the loss is not plotted: matplotlib is not installed ({install})"
                )


def plot_loss(
    rows: Sequence[Mapping[str, Any]], path: Path, *, beside: tuple[str, Sequence[Mapping[str, Any]]] | None = None
) -> None:
    """Plot the loss of every step, the smoothed loss, and evaluations; `rows` are from `read_metrics`. `beside`: a name
    for another run, and its rows.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    others = [] if beside is None else [(beside[1], f"{beside[0]}, ", "tab:gray", "tab:red")]
    for its, name, color, of_evaluations in ((rows, "", "tab:blue", "tab:orange"), *others):
        steps = [(row["step"], row["loss"]) for row in its if "loss" in row]
        evaluations = [(row["step"], row["eval_loss"]) for row in its if "eval_loss" in row]
        if steps:
            numbers, losses = zip(*steps, strict=True)
            axes.plot(numbers, losses, color=color, alpha=0.25, linewidth=1)
            axes.plot(numbers, smoothed(losses), color=color, label=f"{name}training")
        if evaluations:
            label = f"{name}evaluation (last: {evaluations[-1][1]:.3f})"
            axes.plot(*zip(*evaluations, strict=True), "o-", color=of_evaluations, label=label)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=130)


def smoothed(losses: Sequence[float], *, keep: float = 0.95) -> list[float]:
    """Exponential moving average of `losses`, corrected for its bias towards zero at the start."""
    averages, average, weight = [], 0.0, 0.0
    for loss in losses:
        average = keep * average + (1 - keep) * loss
        weight = keep * weight + (1 - keep)
        averages.append(average / weight)
    return averages


@dataclass(eq=False)
class SampleText(Callback):
    """Generate `length` tokens after `prompt`, after each evaluation or only at the end, and print the text.

    Collective: all ranks generate, rank 0 prints.

    Args:
        prompt: the beginning of the text, at least one token.
        length: how many tokens to add.
        encode, decode: text to tokens and back.
        context: how many of the last tokens the model sees; None for all.
        only_at_end: not after evaluations.
        temperature: divides the logits; or a function of the previous token that returns it.
    """

    prompt: str
    _: KW_ONLY
    length: int
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    context: int | None = None
    only_at_end: bool = False
    temperature: float | Callable[[int], float] = TEMPERATURE

    def on_evaluation(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        if not self.only_at_end:
            self._show(trainer, sys.stderr, f"step {trainer.progress.step}: {self.sample(trainer)!r}")

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        if result.stopped_by:  # a stopped run must end quickly
            return
        self._show(trainer, sys.stdout, f"\ntext generated by all ranks together:\n{self.sample(trainer)}\n")

    def sample(self, trainer: Run) -> str:
        """The prompt and its generated continuation; the same on all ranks."""
        tokens = generate(
            trainer.model,
            self.encode(self.prompt),
            length=self.length,
            context=self.context,
            device=trainer.world.device,
            seed=trainer.training.seed,
            temperature=self.temperature,
        )
        return self.decode(tokens)

    @staticmethod
    def _show(trainer: Run, where: TextIO, text: str) -> None:
        if trainer.world.leads:
            print_line(text, where)


def generate(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    length: int,
    context: int | None = None,
    device: torch.device,
    seed: int,
    temperature: float | Callable[[int], float] = TEMPERATURE,
    end: int | None = None,
) -> list[int]:
    """`tokens`, followed by `length` tokens generated by `model`.

    Collective: parameters are gathered once, at the beginning (`flatfsdp.inference`). All ranks draw from equally
    seeded generators and get the same tokens. Modules keep their modes (training or not).

    Args:
        model: a wrapper; takes tokens, int64 (1, time), and returns logits (1, time, vocabulary), as a tensor or in an
            output of transformers.
        tokens: at least one.
        context: how many of the last tokens the model sees; None for all.
        temperature: divides the logits; 0 always takes the likeliest token. A function is called for each token, with
            the previous token.
        end: the token after which nothing is added; None for none.
    """
    generator = torch.Generator().manual_seed(seed)
    made = list(tokens)
    with evaluating(model), flatfsdp.inference(model):
        for _ in range(length):
            window = torch.tensor([made[-context:] if context else made], device=device)
            last = logits_of(model(window))[0, -1].float().cpu()
            divisor = temperature(made[-1]) if callable(temperature) else temperature
            if divisor == 0:
                made.append(int(last.argmax()))
            else:
                odds = torch.softmax(last / divisor, dim=-1)
                made.append(int(torch.multinomial(odds, 1, generator=generator)))
            if made[-1] == end:
                break
    return made


class Summary(Callback):
    """Print the units at the beginning, and the facts of the run at the end, one per line; on rank 0, to stdout.

    The last of the callbacks: the facts include the files written by the others.
    """

    def on_begin(self, trainer: Run) -> None:
        if trainer.world.leads:
            print_line(f"{flatfsdp.summary(trainer.model, compact=True)}\n\n{self.plan(trainer)}", sys.stdout)

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        facts = self.facts(trainer, result)
        if trainer.world.leads:
            room, width = columns(sys.stdout) or 10_000, max(map(len, facts))
            wrap = textwrap.TextWrapper(
                room, subsequent_indent=" " * (width + 4), break_long_words=False, break_on_hyphens=False
            )
            lines = (wrap.fill(f"  {name:<{width}}  {fact}") for name, fact in facts.items())
            print_line("\n".join(["summary", *lines]), sys.stdout)

    @staticmethod
    def plan(trainer: Run) -> str:
        """The limits of the run, and its output folder."""
        training, planned = trainer.training, trainer.planned_steps()
        limits = [] if planned is None else [f"step {planned:,}"]
        limits += [] if training.minutes is None else [f"{training.minutes:g} minutes of training"]
        return f"training until {' or '.join(limits) or 'the data end'}; output folder: {trainer.output}"

    @staticmethod
    def facts(trainer: Run, result: TrainingResult) -> dict[str, str]:
        """The facts, by name."""
        world, dtype = trainer.world, trainer.fsdp.param_dtype
        sent = ", ".join(
            f"{kind} {sizes_in_words(size)} in {calls} call{'' if calls == 1 else 's'}"
            for kind, (calls, size) in sorted(result.communication.items())
        )
        held = f", {sizes_in_words(result.footprint.parameters)} per rank" if result.taken else ""
        facts = {
            "ranks": f"{world.size} on {world.device.type}, {trainer.fsdp.strategy}"
            + (f", computing in {str(dtype).removeprefix('torch.')}" if isinstance(dtype, torch.dtype) else ""),
            "parameters": f"{trainer.size.parameters:,} in total{held}",
            "units": f"{flatfsdp.stats(trainer.model).units:,}",
        }
        if result.taken:  # measured in a step
            facts |= {"per rank": f"{result.footprint}", "per step": sent or "no communication"}
        facts |= {"steps": f"{result.steps:,} ({result.tokens:,} tokens)", "stopped because": result.ended_by}
        steps = f"{result.taken:,} step{'' if result.taken == 1 else 's'}"
        facts["speed"] = f"{steps} at {result.tokens_per_second:,.0f} tokens/s" if result.taken else "no step was taken"
        if result.losses:
            facts["loss"] = f"{result.losses[0]:.3f} -> {result.losses[-1]:.3f}"
        facts |= {name.replace("_", " "): shown(value) for name, value in result.evaluation.items()}
        if result.checkpoint is not None:
            facts["checkpoint"] = trainer.shown(result.checkpoint)
        lost = [
            f"the loss of {ranks_in_words([*each.lost])} in step {each.step:,}, in {each.seconds:.1f} s, by "
            f"{each.ranks} rank{'' if each.ranks == 1 else 's'}"
            for each in result.survived
            if each.lost
        ]
        joined = [
            f"{ranks_in_words(each.joined)} in step {each.step:,}, {each.ranks} ranks from then on"
            for each in result.survived
            if each.joined
        ]
        facts |= {name: "; ".join(words) for name, words in (("survived", lost), ("joined", joined)) if words}
        return facts | {name: str(path) for name, path in trainer.written.items()}
