"""The trainer: from a task and its settings to a trained model, once or in several runs.

[Note: resuming] A step's checkpoint contains the full state of a run: model, optimizer, learning rates, position in the
data, progress, random numbers of each rank, callbacks. A resumed run takes the next samples in the order of the whole
run, on any number of ranks. On the same number of ranks, it computes exactly the same steps as an uninterrupted run; on
another number, sums are computed in another order, and random numbers start anew, unless sums are deterministic.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import flatfsdp
from flatfsdp import ShardedGradScaler, checkpoint
from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.arguments import ElasticArguments, FSDPArguments, Task, TrainingArguments, check_run
from flatfsdp.trainer.callbacks import Callback, ProgressBar
from flatfsdp.trainer.data_loading import Loader
from flatfsdp.trainer.fused_loss import fused
from flatfsdp.trainer.hub.adapters import adapter_files, entries_without_base, export_adapter, is_adapted
from flatfsdp.trainer.hub.pretrained import Pretrained
from flatfsdp.trainer.instantiate import check_options, collate_for, make, named
from flatfsdp.trainer.launch import RankContext
from flatfsdp.trainer.loop import Loop
from flatfsdp.trainer.memory_estimate import activations_counted
from flatfsdp.trainer.model.hugging_face import files_of
from flatfsdp.trainer.model.sharding import shard
from flatfsdp.trainer.objectives import objective_for
from flatfsdp.trainer.optimizers import WarmupDecayLR, make_optimizer, make_scheduler, options_kept, warn_of_other_rates
from flatfsdp.trainer.process_group import TrainerRanks, node
from flatfsdp.trainer.randomness import seed_all
from flatfsdp.trainer.run import Evaluation, ModelSize, Progress, Run, TrainingResult, planned_steps
from flatfsdp.trainer.state.checkpoints import CheckpointManager
from flatfsdp.trainer.state.components import Component, rng_component, stateful_component
from flatfsdp.trainer.state.run_checkpoints import RunCheckpoints, SavedAdapters
from flatfsdp.trainer.state.run_folder import begins, refuse_run_in, run_in, with_folder
from flatfsdp.trainer.terminal import print_line
from flatfsdp.trainer.utilization import flops_per_token
from flatfsdp.trainer.watching.named import callbacks_of

_NO_END = "the dataset has no known length, so the end of the run is unknown: set steps= or minutes="


class Trainer(Run):
    """Trains a task under FSDP.

    The constructor shards the model, and then builds the optimizer on its sharded parameters. It is collective, as are
    all methods: every rank makes a trainer of the same task and settings. If there is no process group yet, it is made:
    of the launcher's ranks, or of this process alone. Its attributes are those of `Run`.

    Args:
        task: model, data, and their objective, collation and tokenizer.
        training, fsdp: how to train and how to shard.
        elastic: whether the others go on when a rank is lost, and how.
        callbacks: called in this order; the same number, of the same kinds, on every rank. A `ProgressBar` precedes
            them, unless there is one, or `training.progress` is off; so do those that `training` names.

    Raises:
        ConfigValueError, ConfigTypeError: settings that contradict one another, or this machine.
    """

    def __init__(
        self,
        task: Task,
        training: TrainingArguments | None = None,
        fsdp: FSDPArguments | None = None,
        elastic: ElasticArguments | None = None,
        *,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        training = TrainingArguments() if training is None else training
        fsdp = FSDPArguments() if fsdp is None else fsdp
        elastic = ElasticArguments() if elastic is None else elastic
        callbacks = (*callbacks_of(training), *callbacks)
        shows = training.progress and not any(isinstance(each, ProgressBar) for each in callbacks)
        callbacks = (ProgressBar(), *callbacks) if shows else tuple(callbacks)
        world = RankContext.join(training.device, outlives=elastic.enabled)
        self._asked_output = training.output
        if not world.joins:
            training = with_folder(training)
        with flatfsdp.fail_together("making the trainer"):
            check_run(training, task, fsdp, elastic)
            check_options(task)
            if fsdp.deterministic_sums:  # fewer ranks have more threads otherwise, and with them other bits
                torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "").split(",")[0] or 1))
            seed_all(training.seed)  # the same initial weights on all ranks
            plain = make(task, "model")
            elements = sum(parameter.numel() for parameter in plain.parameters())
            size = ModelSize(elements, flops_per_token(plain.parameters()))
            files = files_of(plain, make(task, "tokenizer"))
            adapts, without_base = is_adapted(plain), entries_without_base(plain)
            # A model that was made elsewhere may have different values on each rank.
            synced = dataclasses.replace(fsdp, sync_module_states=fsdp.sync_module_states or plain is task.model)
            if world.joins and fsdp.strategy.startswith("hybrid"):
                synced = dataclasses.replace(synced, replicas=1)
            model = shard(plain, synced, device=world.device)
            pretrained = named(task, "model")
            objective = make(task, "objective") or objective_for(plain)
            if training.fused_loss:
                objective = fused(objective, model)
            optimizer = make_optimizer(model, training)
            scaler = ShardedGradScaler(world.device.type, enabled=fsdp.scales_losses)
            collate, eval_data = collate_for(task), make(task, "eval_data")
            loader = _loader(
                task, training, collate=collate, weigh=objective.weight, whole_batches=fsdp.deterministic_sums
            )
            scheduler = make_scheduler(optimizer, training, planned_steps(training, loader))
            progress = Progress()
            states: dict[str, Any] = {"progress": progress, "scheduler": scheduler, "data": loader}
            components = [stateful_component(name, each) for name, each in states.items()]
            components += _optional_components(scaler, callbacks, training.seed)
            adapters = None
            if adapts:
                base = pretrained.name if isinstance(pretrained, Pretrained) else ""
                # Only a model by name has a base that can be loaded again.
                again = bool(base) and not pretrained.options.from_scratch and not training.save_frozen
                gather = partial(
                    adapter_files, everywhere=training.save_on_each_node, ranks=TrainerRanks(), files=files
                )
                adapters = SavedAdapters(without_base if again else None, base if again else "", gather)
            super().__init__(
                task=task, training=training, fsdp=fsdp, elastic=elastic, callbacks=callbacks, world=world, size=size,
                model=model, objective=objective, optimizer=optimizer, scaler=scaler, scheduler=scheduler,
                loader=loader, evaluation=Evaluation(eval_data, collate), progress=progress,
                checkpoints=RunCheckpoints(_manager(training), components, files, adapters),
            )  # fmt: skip
            if training.audit_every is not None and not loader.reads_by_number:
                training.refuse("audit_every", "samples of an iterable dataset cannot be read again by another rank")
            # A checkpoint of adapters has no base.
            loads = not world.joins and (is_adapted(model) or not self._finds_checkpoint())
            if isinstance(pretrained, Pretrained) and loads:
                pretrained.load_into(model)
            seed_all(training.seed + 1 + world.rank)  # dropout differs between ranks

    def train(self) -> TrainingResult:
        """Train up to the limits of the settings, from their checkpoint, if they name one.

        SIGTERM, SIGINT and SIGUSR1 end it within three steps, with a checkpoint ([Note: stopping]). An evaluation that
        was due then is done when the run is resumed, and the checkpoint is saved again, with its metrics. A run that
        resumes from another checkpoint than its last, "best" or a path, sets the later ones aside first.

        Raises:
            Exception: from a callback, the objective, the optimizer or the scheduler on this rank.
            AgreementError: another rank raised such an exception ([Note: failing alone]).
            CheckpointError: on every rank: the checkpoint is missing or does not fit, or one could not be saved.
            ConfigValueError: the run's folder has checkpoints, and this run resumes from none of them; or there is no
                training data, or no known end for the schedule of the learning rate.
        """
        looking = flatfsdp.detect_nonfinite(self.model) if self.training.detect_nonfinite else nullcontext()
        # A rank that fails is lost to the others otherwise: they do not fail with it.
        together = flatfsdp.fail_together("training") if not self.elastic.enabled else nullcontext(lambda error: None)
        with together as self.report:
            here = (node(), os.getpid())
            peers = [pid for where, pid in self.ranks.values(here) if where == here[0] and pid != here[1]]
            with self.stop.handling_signals(peers), looking:
                if not self.world.joins:  # a run that has begun
                    self._begin()
                loop = Loop(self)
                loop.run()
            self.loader.close()
            result = loop.result()
            self.call("on_end", result)
            self._print_folder("this run is in")
        return result

    def _begin(self) -> None:
        self._check_folder()
        self._print_folder("this run writes to")
        self.resume()
        self._print_from_where()
        if self.checkpoint is not None and self.training.resume != "latest":
            self.aside = self.checkpoints.manager.set_aside(self.checkpoint)
        self._check_schedule()
        self.call("on_begin")

    def resume(self) -> None:
        """Load the checkpoint that `training.resume` names; `train` begins with this. Nothing is moved or removed.

        The learning rate, weight decay and optimizer options are this run's; a user-defined scheduler keeps those of
        its state, with a warning.

        With "latest", a run that has no checkpoint yet starts from the beginning.

        Raises:
            CheckpointError: on every rank: the checkpoint is missing or does not fit.
            ConfigValueError: `training.resume` is "best", and there is no checkpoint yet.
        """
        given = self.training.resume
        if given is None:
            return
        path = self.checkpoints.manager.find(given)
        if path is None and given == "latest":
            return
        if path is None:
            raise ConfigValueError(f"resume: got 'best', but {self.output} has no checkpoint yet")
        kept = options_kept(self.optimizer, self.training)
        with kept, warn_of_other_rates(self.scheduler, leads=self.world.leads):
            self.checkpoints.load(path, model=self.model, optimizer=self.optimizer)
        if isinstance(self.scheduler, WarmupDecayLR):
            # The loader's global batch is the checkpoint's now, and this run may be longer than the one that saved it.
            self.scheduler.follow(steps=self.planned_steps(), done=self.time_over)
        self.checkpoints.complete_at = self.progress.step

    def _finds_checkpoint(self) -> bool:
        given = self.training.resume
        return given is not None and (given != "latest" or self.checkpoints.manager.find(given) is not None)

    def _print_from_where(self) -> None:
        if not self.world.leads or self.training.resume is None:
            return
        if self.checkpoint is None:
            print_line(f"nothing to resume: {self.output} has no checkpoint yet, so a new run begins")
        else:
            print_line(f"resuming from {self.shown(self.checkpoint)}, after step {self.progress.step:,}")

    def measure(self) -> int:
        """Run forwards and backwards for the next step's samples, which consumes them, and drop the gradients.

        Returns:
            The peak bytes of saved activations, on the rank with the most.
        """
        step = self.loader.next_step()
        if step is None:
            raise ConfigValueError("train_data: there is no sample to measure a step with")
        with activations_counted() as activations:
            self.add_gradients(step)
        self.optimizer.zero_grad(set_to_none=True)
        return max(most for (most,) in self.ranks.rows(activations.peak_bytes))

    def export(self, folder: str | Path, *, dtype: torch.dtype | None = None, overwrite: bool = False) -> None:
        """Write the model, with its configuration and tokenizer if it has them, as a folder that `from_pretrained`
        of transformers loads; floating-point values as `dtype`. For a model with adapters of PEFT, write only the
        adapters, like its `save_pretrained`.

        Raises:
            CheckpointError: on every rank: it could not be written; or the folder is not empty, and `overwrite` is
                False, or its contents are not an export.
        """
        files = self.checkpoints.files
        if is_adapted(self.model):
            export_adapter(self.model, Path(folder), files=files, ranks=self.ranks, dtype=dtype, overwrite=overwrite)
            return
        checkpoint.export_safetensors(self.model, folder, dtype=dtype, overwrite=overwrite, files=files)

    def _check_folder(self) -> None:
        """Refuse to begin a run in the folder of another, which any of the ranks may see."""
        if begins(self.training):
            refuse_run_in(self.training, max(self.ranks.values(run_in(self.output))))

    def _print_folder(self, what: str) -> None:
        """The folder of this run, where it is not the one in the settings."""
        if self.world.leads and self.output != self._asked_output:
            print_line(f"{what} {self.output}, because {self._asked_output} holds an earlier run")

    def _check_schedule(self) -> None:
        training, planned = self.training, self.planned_steps()
        if planned == 0 and self.progress.step == 0:
            raise ConfigValueError(
                f"drop_last: the data do not fill one step of {self.loader.global_batch} samples, so there is nothing "
                "to train on"
            )
        if planned is None and training.minutes is None and isinstance(self.scheduler, WarmupDecayLR):
            if training.warmup:
                training.refuse("warmup", f"{_NO_END}; otherwise the learning rate would stay at its initial value")
            if training.scheduler != "constant":
                training.refuse("scheduler", f"{_NO_END}, or scheduler='constant'")


def _loader(task: Task, training: TrainingArguments, **more: Any) -> Loader:
    return Loader(
        make(task, "train_data"),
        batch=training.batch,
        accumulate=training.accumulate,
        global_batch=training.global_batch,
        shuffle=training.shuffle,
        seed=training.seed,
        epochs=1 if training.is_unlimited else training.epochs,
        drop_last=training.drop_last,
        mode=training.data_mode,
        workers=training.workers,
        **more,
    )


def _manager(training: TrainingArguments) -> CheckpointManager:
    return CheckpointManager(
        training.output,
        keep_last=training.keep_last,
        keep_best=training.keep_best,
        best_by=training.best_by,
        best_mode=training.best_mode,
        asynchronous=training.save_async,
        format=training.save_format,
        per_node=training.save_on_each_node,
    )


def _optional_components(scaler: ShardedGradScaler, callbacks: Sequence[Callback], seed: int) -> Iterator[Component]:
    """Components that a checkpoint may lack. Random numbers come last: loading the others may draw some."""
    if scaler.is_enabled():  # a disabled one has no state, and loads none
        yield stateful_component("scaler", scaler, required=False)
    names: Counter[str] = Counter()  # numbers within each kind: other kinds may come and go
    for callback in callbacks:
        if type(callback).state_dict is not Callback.state_dict:  # even if empty now: it may be filled when saved
            kind = type(callback).__name__
            yield stateful_component(f"callback.{kind}.{names[kind]}", callback, required=False)
            names[kind] += 1
    yield rng_component(seed)
