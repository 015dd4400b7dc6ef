"""`python -m flatfsdp.train`: train under FSDP on this machine, or in torchrun's world.

With `--model` and `--train-data` a model of your own, or one of transformers by name; without them a transformer over
bytes.

Exit codes: 0 when trained, 1 when a rank failed, 2 for a wrong option, 128 + its number when a signal ended the run.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import site
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from flatfsdp.errors import (
    AgreementError,
    CheckpointError,
    ConfigTypeError,
    ConfigValueError,
    FlatFSDPWarning,
    LostRankError,
    few,
)

try:
    from flatfsdp.trainer.settings import Settings, dataclass, fields_of, setting
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    print(f"flatfsdp.train: {error}", file=sys.stderr)
    sys.exit(2)
from flatfsdp.trainer.arguments import ElasticArguments, FSDPArguments, Task, TrainingArguments, check_run
from flatfsdp.trainer.callbacks import Callback, LossPlot, MetricsLog, Summary, generate
from flatfsdp.trainer.demo.options import DEFAULTS, DemoOptions
from flatfsdp.trainer.hub.by_name import changed_flag, with_options
from flatfsdp.trainer.hub.chat import prompt_tokens
from flatfsdp.trainer.hub.pretrained import ModelOptions
from flatfsdp.trainer.hub.text_data import DataOptions, TextData
from flatfsdp.trainer.instantiate import check_options, make
from flatfsdp.trainer.launch import Placement, RankContext, run, under_launcher
from flatfsdp.trainer.memory_estimate import compared, forecast, on_meta
from flatfsdp.trainer.preemption import in_words
from flatfsdp.trainer.settings.command_line import Parser, in_flags
from flatfsdp.trainer.settings.types import Count, Data, FilePath, Module, Name, NotNegative, Positive, Text
from flatfsdp.trainer.state.run_folder import DEFAULT, refuse_run_in, run_in, unused
from flatfsdp.trainer.terminal import print_line, sizes_in_words
from flatfsdp.trainer.trainer import Trainer
from flatfsdp.trainer.watching.configuration import Configuration
from flatfsdp.trainer.watching.named import check_callbacks

PROGRAM = "python -m flatfsdp.train"
DESCRIPTION = (
    "Train with FullyShardedDataParallel: your own model, one of transformers (--model hf:NAME), or, by default, a "
    "byte-level transformer that generates text at the end. Started directly, it spawns its ranks on this machine; "
    "under torchrun, it joins the ranks that torchrun started."
)
ONE_LINE = (ConfigValueError, ConfigTypeError, CheckpointError)
"""Errors whose message is enough, unless code of the user is part of the traceback."""

COMMON = (
    "export dry_run advise generate model train_data eval_data lora sequence_length output steps epochs minutes batch "
    "global_batch optimizer lr warmup clip seed eval_every save_every resume callbacks device ranks strategy units "
    "bf16 activation_checkpointing text"
).split()
"""The settings that people set, for `--help`."""

ANOTHER_FIRST = 1.0  # seconds for the rank that failed to print its traceback, before a launcher ends it with this one
LIBRARIES = (__file__, mp.__file__)


@dataclass(frozen=True, kw_only=True)
class Command(Settings):
    """Actions other than training."""

    export: FilePath | None = setting(
        None, "instead of training, export the checkpoint that --resume names as a Hugging Face folder"
    )
    overwrite: bool = setting(False, "with --export: replace an existing export, and nothing else")
    dry_run: bool = setting(False, "instead of training, print units, bytes per rank and traffic; needs no accelerator")
    advise: bool = setting(
        False, "instead of training, compare ways to shard the model, by memory and traffic, and recommend one"
    )
    world_size: Count | None = setting(
        None, "with --dry-run or --advise: number of ranks to plan for (default: the number that would start)"
    )
    memory: Positive | None = setting(
        None,
        "with --advise: GiB of a rank, with --activations for all that the allocator reserves, otherwise for all but "
        "activations (default: the smallest peak is recommended)",
    )
    activations: bool = setting(
        False,
        "with --dry-run or --advise, for an accelerator: read a batch, and include activations and what torch's "
        "allocator reserves",
    )
    node: Count = setting(8, "with --advise: number of ranks on a node")
    measure: bool = setting(False, "with --dry-run: also run one real step and print the size of the saved activations")

    generate: Text | None = setting(
        None, "instead of training, continue this prompt, with the checkpoint that --resume names, if any"
    )
    max_new_tokens: Count = setting(100, "with --generate: maximum number of tokens to add")
    temperature: NotNegative = setting(0.8, "with --generate: sampling temperature; 0 for the most likely tokens")

    def __post_init__(self) -> None:
        for name, default in (("max_new_tokens", 100), ("temperature", 0.8)):
            if getattr(self, name) != default and self.generate is None:
                self.refuse(name, f"it applies only with {self.called('generate')}")
        for action, others in (("generate", ("dry_run", "export", "advise")), ("advise", ("dry_run", "export"))):
            for other in others:
                if getattr(self, action) and getattr(self, other):
                    self.refuse(action, f"it cannot be combined with {self.called(other)}")
        if self.measure and not self.dry_run:
            self.refuse("measure", f"it applies only with {self.called('dry_run')}")
        if self.world_size and not self.plans:
            self.refuse("world_size", f"it applies only with {self.called('dry_run')} and {self.called('advise')}")
        if self.activations and not self.plans:
            self.refuse("activations", f"it applies only with {self.called('dry_run')} and {self.called('advise')}")
        for name, is_set in (("memory", self.memory is not None), ("node", self.node != 8)):
            if is_set and not self.advise:
                self.refuse(name, f"it applies only with {self.called('advise')}")
        if self.overwrite and self.export is None:
            self.refuse("overwrite", f"it applies only with {self.called('export')}")
        if self.export is not None and self.dry_run:
            self.refuse("export", f"{self.called('dry_run')} writes nothing")

    @property
    def plans(self) -> bool:
        """Whether figures are printed instead of training."""
        return self.dry_run or self.advise


@dataclass(frozen=True, kw_only=True)
class OwnTask(Task):
    """Your own model and data: names, or "module:name" of an object or of a function that makes it.

    Without a model, the demonstration's is trained.
    """

    model: Module | None = setting(
        None,
        "the model, or a function that returns it, as module:name; or hf:NAME, a model of transformers "
        "(folder or name)",
    )
    train_data: Data | None = setting(
        None,
        "the training dataset, or a function that returns it, as module:name; or text:PATH, jsonl:FILE, hf:DATASET",
    )

    def __post_init__(self) -> None:
        if (self.model is None) != (self.train_data is None):
            given, missing = ("model", "train_data") if self.train_data is None else ("train_data", "model")
            self.refuse(given, f"{self.called(missing)} is not given")


@dataclasses.dataclass(frozen=True)
class Job:
    """The parsed command line, and the work of one rank; it is sent to spawned processes as a pickle."""

    command: Command
    task: Task
    training: TrainingArguments
    fsdp: FSDPArguments
    elastic: ElasticArguments
    demo: DemoOptions | None
    placement: Placement
    program: str
    given: tuple[str, ...]  # the command line
    settings: Mapping[str, Settings]  # the values from it and its file

    def __call__(self, world: RankContext) -> int:
        """Run; returns the exit code."""
        with warnings_with_flags():  # a spawned process has its own
            return self._run(world)

    def _run(self, world: RankContext) -> int:
        trainer = Trainer(self.task, self.training, self.fsdp, self.elastic, callbacks=self.callbacks())
        if self.command.measure:
            kept = trainer.measure()
            if world.leads:
                what = f"activations saved for the backward pass, measured on {world.size} ranks"
                print(f"\n{what}: {sizes_in_words(kept)}", flush=True)
            return 0
        if self.command.export is not None:
            trainer.resume()
            if trainer.checkpoint is None:
                raise ConfigValueError(f"--export: {self.training.output} has no checkpoint to export")
            trainer.export(self.command.export, overwrite=self.command.overwrite)
            if world.leads:
                print(f"exported the model of {trainer.checkpoint} to {self.command.export}", flush=True)
            return 0
        if self.command.generate is not None:
            self._generate(trainer, self.command.generate)
            return 0
        result = trainer.train()
        if trainer.world.leads:  # it may be another rank than in the beginning
            goes_on = {"--resume": "latest", "--output": str(trainer.output)}
            if result.stopped_by:
                print_line(f"stopped by {in_words(result.stopped_by)} after step {result.steps}; to resume:")
                print_line(f"  {self.program} {shlex.join(changed(self.given, goes_on))}")
            elif self.demo is not None:
                print_line(self._what_next(result.steps, goes_on), sys.stdout)
        return result.exit_code

    def _generate(self, trainer: Trainer, prompt: str) -> None:
        """Print a continuation of `prompt`, or an answer to it if the training data are conversations."""
        tokenizer = make(self.task, "tokenizer")
        if not callable(getattr(tokenizer, "decode", None)):
            raise ConfigValueError(
                "generate: the model has no tokenizer. Pass tokenizer=module:name, or a model hf:NAME"
            )
        trainer.resume()
        data = self.task.train_data
        plain_text = isinstance(data, TextData) and data.name.startswith("text:")
        tokens = prompt_tokens(tokenizer, prompt, chat=not plain_text)
        if not tokens:
            raise ConfigValueError("generate: the prompt has no tokens")
        made = generate(
            trainer.model,
            tokens,
            length=self.command.max_new_tokens,
            device=trainer.world.device,
            seed=self.training.seed,
            temperature=self.command.temperature,
            end=getattr(tokenizer, "eos_token_id", None),
        )
        if trainer.world.leads:
            print(tokenizer.decode(made[len(tokens) :], skip_special_tokens=True), flush=True)

    def _what_next(self, steps: int, goes_on: dict[str, str]) -> str:
        longer = goes_on | {"--steps": str(2 * max(steps, self.training.steps or 0))}
        if self.training.minutes is not None:
            longer["--minutes"] = f"{2 * self.training.minutes:g}"
        tries = {
            shlex.join(changed(self.given, longer)): "train for longer",
            "--text FOLDER": "learn another text",
            "--dry-run --world-size 64 --layers 24 --width 1024": "plan",
            "--model module:function --train-data module:function": "yours",
        }
        lines = [(f"  {self.program} {each}", f"  # {why}") for each, why in tries.items()]
        return "\n".join(["try next", *(line + why * (len(line + why) <= 80) for line, why in lines)])

    def advice(self) -> str:
        """A comparison of ways to shard the model, as text."""
        command, ranks = self.command, self.command.world_size or self.placement.ranks
        memory = None if command.memory is None else int(command.memory * 2**30)
        return compared(self.meta_model, ranks=ranks, node=command.node, memory=memory, **self._planned())

    def forecast(self) -> str:
        """An estimate of memory and traffic, as text."""
        ranks = self.command.world_size or self.placement.ranks
        return forecast(self.meta_model, ranks=ranks, elastic=self.elastic, **self._planned()).render()

    def _planned(self) -> dict[str, Any]:
        task = self.task if self.command.activations else None
        return {"fsdp": self.fsdp, "training": self.training, "task": task}

    def meta_model(self) -> nn.Module:
        """The model without memory; called on the meta device."""
        model = make(self.task, "model")
        return on_meta(model) if model is self.task.model else model

    def callbacks(self) -> tuple[Callback, ...]:
        """The callbacks of a run from the command line in addition to a bar."""
        chosen: list[Callback] = [Configuration(self.settings), MetricsLog(self.training.log_every)]
        if self.training.plot and "loss_plot" not in dict(self.training.callbacks):
            chosen.append(LossPlot())
        return (*chosen, *(self.demo.callbacks() if self.demo is not None else ()), Summary())

    def announcement(self) -> str:
        """A line about the run that starts."""
        ranks, kind = self.placement.ranks, self.placement.device_type
        where = f"starting {ranks} rank{'' if ranks == 1 else 's'} on {'CPU' if kind == 'cpu' else kind}"
        if self.demo is None:
            return f"{where}; model: {self.task.model}"
        text = "Python's library" if self.demo.text is None else self.demo.text
        blocks = "1 block" if self.demo.layers == 1 else f"{self.demo.layers} blocks"
        return f"{where}; text: {text}; model: {blocks} of width {self.demo.width}"


def changed(given: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command line `given`, with the flags in `values` set to those values only."""
    kept: list[str] = []
    of_flag = False
    for word in given:
        flag, has_value, _ = word.partition("=")
        if not of_flag and flag not in values:
            kept.append(word)
        of_flag = not of_flag and flag in values and not has_value
    return kept + [word for pair in values.items() for word in pair]


def main(arguments: Sequence[str] | None = None, *, program: str = PROGRAM, announced: bool = False) -> int:
    """Run the trainer with `arguments` (default: the command line's); returns the exit code.

    Args:
        program: the command that started it, for messages.
        announced: whether the line about the run has been printed.

    A wrong option raises `SystemExit(2)` after one line on stderr, before any process is started.
    """
    with warnings_with_flags():
        job = read(sys.argv[1:] if arguments is None else arguments, program)
        if job.command.dry_run:
            print(job.forecast(), flush=True)
        if job.command.advise:
            print(job.advice(), flush=True)
    if job.command.plans and not job.command.measure:
        return 0
    if job.command.export is None and job.command.generate is None and not announced and not under_launcher():
        print_line(job.announcement())
    try:
        return run(job, job.placement, outlives=job.elastic.enabled, restarts=job.elastic.restarts)
    except ONE_LINE:  # of this rank, under a launcher
        if not (complaint := complaint_in(traceback.format_exc())):
            raise
        print(f"flatfsdp.train: {complaint}", file=sys.stderr, flush=True)
        return 2
    except AgreementError as error:  # likewise
        if not isinstance(error, LostRankError) and not is_of_libraries(traceback.format_exc()):
            raise
        if not isinstance(error, LostRankError):
            time.sleep(ANOTHER_FIRST)
        # The place where this rank learned of it is of no use. It is still raised, for the report to the others.
        raise error.with_traceback(None) from None
    except mp.ProcessRaisedException as error:
        if complaint := complaint_in(str(error)):
            print(f"flatfsdp.train: {complaint}", file=sys.stderr)
            return 2
        print(f"flatfsdp.train: rank {error.error_index} failed{error}", file=sys.stderr)
        return 1
    except mp.ProcessExitedException as error:
        print(f"flatfsdp.train: rank {error.error_index} died: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print_line("flatfsdp.train: killed by a second signal")
        return 130


def complaint_in(report: str) -> str:
    """The message, with flags, about a setting or a checkpoint that only the ranks show to be wrong; "" if the user's
    code is part of the traceback `report`, which is useful then."""
    names = "|".join(each.__name__ for each in ONE_LINE)
    found = re.search(rf"^(.*)\nflatfsdp\.errors\.(?:{names}): (.*)$", report, re.DOTALL)
    if found is None:
        return ""
    if not is_of_libraries(found[1]):
        return ""
    return in_flags(found[2].strip(), map(type, groups().values()))


def is_of_libraries(report: str) -> bool:
    """Whether no code of the user is part of the traceback `report`."""
    return not any(map(is_of_user, re.findall(r'^  File "(.*?)", line', report, re.MULTILINE)))


def is_of_user(file: str) -> bool:
    """Whether a source file is of neither Python, nor torch, nor an installed package, nor flatfsdp."""
    libraries = (sysconfig.get_path("stdlib"), *site.getsitepackages(), *(str(Path(f).parent) for f in LIBRARIES))
    return not file.startswith(("<frozen", *(f"{folder}{os.sep}" for folder in libraries)))


@contextmanager
def warnings_with_flags() -> Iterator[None]:
    """A context in which warnings of flatfsdp are one line that names flags, with a place only in code of the user."""
    before = warnings.formatwarning

    def form(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        if not issubclass(category, FlatFSDPWarning):
            return before(message, category, filename, lineno, line)
        place = f" ({filename}:{lineno})" if is_of_user(filename) else ""
        return f"flatfsdp.train: warning: {in_flags(str(message), map(type, groups().values()))}{place}\n"

    warnings.formatwarning = form
    try:
        yield
    finally:
        warnings.formatwarning = before


def groups() -> dict[str, Settings]:
    """The tables of settings with their defaults, by name."""
    return {
        "command": Command(),
        "task": OwnTask(),
        "model": ModelOptions(),
        "data": DataOptions(),
        "training": TrainingArguments(),
        "fsdp": FSDPArguments(),
        "elastic": ElasticArguments(),
        "demo": DemoOptions(),
    }


def read(arguments: Sequence[str], program: str = PROGRAM) -> Job:
    """Read the command line, and check devices, data and the output folder before any process starts.

    Raises:
        SystemExit: an option is wrong, or this machine does not support it.
    """
    parser = Parser(program, description=DESCRIPTION, groups=groups(), common=COMMON)
    given = parser.read(arguments)
    shows = given["task"].model is None
    if shows:  # the demonstration, which has other defaults
        parser = Parser(program, description=DESCRIPTION, groups={**groups(), "training": DEFAULTS}, common=COMMON)
        given = parser.read(arguments)
    command, task, model, data, training, fsdp, elastic, demo = given.values()
    try:
        task = with_options(task, model, data)
        if not shows and (flag := changed_flag(demo)):
            raise ConfigValueError(f"{flag} applies only to the demonstration model, but --model is given")
        if shows and (flag := changed_flag(task)):
            raise ConfigValueError(f"{flag} applies only to your own model, but --model is not given")
        if command.generate is not None and shows:
            raise ConfigValueError("--generate applies only to a model that --model names, but --model is not given")
        if command.export is not None and training.resume is None:
            raise ConfigValueError("--export: name the checkpoint to export: --resume latest, best or a path")
        if command.export is not None and not command.overwrite:
            refuse_full(command.export)
        if training.resume not in (None, "latest", "best") and not under_launcher():
            refuse_missing(Path(training.resume))  # nodes with disks of their own may lack it
        placement = _placement(command, training)
        if command.activations and placement.device_type == "cpu":
            command.refuse(
                "activations",
                "what CPUs allocate for them is not known. Add --device cuda and --world-size, for which this machine "
                "needs no accelerator; or, to run a step on CPUs, use --dry-run --measure",
            )
        if fsdp.replicas is not None and placement.ranks % fsdp.replicas:
            raise ConfigValueError(f"--replicas: {placement.ranks} ranks do not make {fsdp.replicas} equal replicas")
        if shows:
            demo.held_out()  # reads the sizes of its files
        own = demo.task() if shows else task
        check_run(training, own, fsdp, elastic)
        if elastic.enabled and placement.device_type != "cpu":
            elastic.refuse("enabled", f"ranks go on only over gloo yet, and here they are on {placement.device_type}")
        if elastic.restarts and under_launcher():
            elastic.refuse("restarts", "a launcher has started these ranks, and only it can start them again")
        if command.plans and (code := code_named_by(own, training, fsdp, measured=command.measure)):
            print(f"importing and calling, with your permissions: {'; '.join(code)}\n", flush=True)
        check_options(own)
        if not command.plans or command.measure:  # a plan makes no callbacks
            check_callbacks(training)
        if not command.plans:
            numbered = training.resume is None and training.output == DEFAULT
            trains = command.export is None and command.generate is None
            if trains and not numbered:
                refuse_run_in(training, run_in(training.output))
            make_folder(unused(training.output) if numbered else training.output)  # before time is spent on training
    except ConfigValueError as error:
        parser.error(str(error))
    anew = dataclasses.replace(training, resume=None, ranks=placement.ranks)
    settings = {**given, "command": Command(), "training": anew}
    return Job(
        command, own, training, fsdp, elastic, demo if shows else None, placement, program, tuple(arguments), settings
    )


def _placement(command: Command, training: TrainingArguments) -> Placement:
    """The ranks and their devices. Those that are only planned need not exist.

    Raises:
        ConfigValueError: this machine cannot provide them; there are no such devices anywhere.
    """
    if not command.plans or command.measure or command.world_size is None or training.device == "auto":
        return Placement.of(training.ranks, training.device)
    try:
        return Placement(command.world_size, torch.device(training.device).type)
    except RuntimeError:
        raise ConfigValueError(f"device: torch knows no {training.device!r} devices") from None


def code_named_by(task: Task, training: TrainingArguments, fsdp: FSDPArguments, *, measured: bool) -> list[str]:
    """The settings that name code to import, each as "name = value". A config file can name any.

    `measured`: a step is run, for which callbacks are made, too.
    """
    tables: tuple[Settings, ...] = (task, training, fsdp)
    called = [f"callbacks = {name}" for name, _ in training.callbacks if measured and ":" in name]
    return called + [
        f"{name} = {value}"
        for table in tables
        for name, parts in fields_of(type(table)).items()
        if isinstance(value := getattr(table, name), str)
        if any(isinstance(part, Name) and part.thing and value not in part.names for part in parts)
    ]


def refuse_missing(checkpoint: Path) -> None:
    """Refuse a checkpoint that does not exist."""
    if not checkpoint.exists():
        raise ConfigValueError(f"--resume: there is no folder {str(checkpoint)!r}. Accepted: latest, best, or a path")


def refuse_full(folder: Path) -> None:
    """Refuse a folder to export to that holds anything."""
    there = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    if there:
        raise ConfigValueError(
            f"--export: {folder} holds {few(there)}. Choose another folder, or add --overwrite to replace an export"
        )


def make_folder(path: Path) -> None:
    """Make the output folder.

    Raises:
        ConfigValueError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigValueError(f"--output: cannot create the folder {str(path)!r}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
