"""Optimizers and learning-rate schedules, by name or by a user-defined function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import flatfsdp
from flatfsdp.errors import ConfigTypeError, ConfigValueError, few, shown, warn
from flatfsdp.trainer.arguments import OF_MATRICES, OPTIMIZERS, SCHEDULERS, TrainingArguments, stay_then_decay
from flatfsdp.trainer.muon import MuonAndAdamW
from flatfsdp.trainer.settings.references import check_all_taken, resolve, takes


def make_optimizer(model: nn.Module, arguments: TrainingArguments) -> Optimizer:
    """The optimizer over the trainable parameters of `model`, which has been sharded.

    Weight decay applies to parameters of two dimensions and more: norms, biases and other vectors are in a param group
    without it. A flat parameter holds both kinds; with `use_orig_params=False`, all of it decays.

    A user-defined function is called with parameters, or param groups if it takes `weight_decay`; with `lr` if it takes
    that; and with `optimizer_options`. With `optimizer_in_backward`, the optimizer steps in the backward, and its
    `step()` has nothing left to do, but must still be called. One of `OPTIMIZERS` takes fused steps
    (`flatfsdp.fuse_optimizer_steps`). One of `OF_MATRICES` is a `MuonAndAdamW`.

    Every rank calls it at the same point; nothing is communicated.

    Raises:
        ConfigValueError: it cannot be imported, an option is not one of its arguments, `lr` or `weight_decay` were
            given for one without them, or it rejects its arguments.
        ConfigTypeError: its result is not an optimizer.
        UsageError: with `optimizer_in_backward`: the optimizer cannot step on some parameters at a time.
    """
    factory = _function(arguments, "optimizer", OPTIMIZERS | OF_MATRICES)
    check_all_taken(arguments.optimizer_options, {shown(factory): factory}, argument="optimizer_options")
    options = dict(arguments.optimizer_options)
    for name in ("lr", "weight_decay"):
        if takes(factory, name):
            options[name] = getattr(arguments, name)
        elif getattr(arguments, name) != getattr(TrainingArguments(), name):
            raise ConfigValueError(
                f"{name}: got {getattr(arguments, name)!r}, but {shown(factory)} takes no argument {name!r}"
            )
    parameters: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigValueError("optimizer: no parameter of the model is trainable; each has requires_grad=False")
    if "weight_decay" in options:  # for 0, too: a checkpoint needs the same number of groups
        parameters = _groups(model, arguments.weight_decay)
    try:
        if factory in OF_MATRICES.values():
            return MuonAndAdamW(model, parameters, **options)
        optimizer = factory(parameters, **options)
    except (TypeError, ValueError) as error:  # for the value of an option
        raise ConfigValueError(f"optimizer_options: {shown(factory)} rejects {options}: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigTypeError(
            f"optimizer: {shown(factory)} returned {shown(optimizer)}. Accepted: a torch.optim.Optimizer."
        )
    if type(optimizer) in OPTIMIZERS.values():
        flatfsdp.fuse_optimizer_steps(optimizer)
    if arguments.optimizer_in_backward:
        flatfsdp.optimizer_in_backward(model, optimizer)
    return optimizer


@contextmanager
def options_kept(optimizer: Optimizer, arguments: TrainingArguments) -> Iterator[None]:
    """A context for loading a checkpoint's state into `optimizer`: afterwards, the options of `arguments` apply.

    The state of an optimizer holds the weight decay and the other options of the saving run, and loading it would
    replace those of this run. The learning rate is the scheduler's.
    """
    names = {"weight_decay", *arguments.optimizer_options}
    own = [{name: group[name] for name in names & group.keys()} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)


@contextmanager
def warn_of_other_rates(scheduler: LRScheduler, *, leads: bool) -> Iterator[None]:
    """A context for loading a checkpoint's state into `scheduler`.

    A user-defined scheduler may restore other learning rates than this run's; the rank that `leads` warns of that.
    Schedules of the trainer follow the run.
    """
    given = _base_rates(scheduler)
    yield
    kept = _base_rates(scheduler)
    if leads and kept != given and not isinstance(scheduler, WarmupDecayLR):
        warn(
            f"lr: the learning rates {few(kept)} of the resumed run are kept, not {few(given)} of this one: "
            f"{shown(type(scheduler))} has them in its state. To change them, leave base_lrs out of its "
            f"state_dict(), set them in on_begin of a callback, or choose one of {', '.join(SCHEDULERS)}"
        )


def _base_rates(scheduler: LRScheduler) -> list[str]:
    return list(dict.fromkeys(f"{float(rate):g}" for rate in getattr(scheduler, "base_lrs", ())))


def _function(arguments: TrainingArguments, name: str, known: Mapping[str, Any]) -> Callable[..., Any]:
    """The value of argument `name`: from its `known` names, or the function that it is or names."""
    given = getattr(arguments, name)
    found = known[given] if isinstance(given, str) and given in known else resolve(given, argument=name)
    if not callable(found):
        raise ConfigTypeError(f"{name}: {given} is {shown(found)}. Accepted: a callable.")
    return found


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two param groups: with and without weight decay."""
    shapes = flatfsdp.unsharded_shapes(model)
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = len(shapes[name]) >= 2 or getattr(parameter, "_fsdp_flattened", False)
            (decaying if decays else others).append(parameter)
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


# --- Learning-rate schedules ------------------------------------------------------------------------------------------


class WarmupDecayLR(LambdaLR):
    """The learning rate as a function of the finished share of the run: it rises linearly, then follows a schedule.

    The share follows from steps where their number is known, and also from the clock: a run that is limited by minutes
    sets `done` before each `step()`, and the larger of both applies. The base learning rates and the number of steps
    are this run's, not in the state: a resumed run with other values follows these.

    Args:
        optimizer: whose param groups get their own learning rates times the factor.
        schedule: the factor of the learning rate as a function of the finished share (0 to 1) of the run after warmup.
        warmup: the share of the run in which the factor rises to 1; from 0 to below 1.
        warmup_steps: the number of steps in which it rises; replaces `warmup`.
        least: the factor at the end of the schedule.
        steps: the number of steps of the run; None if unknown.

    Attributes:
        done: the finished share of the run, 0 to 1, by the clock.
        steps: as given.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Callable[[float], float],
        *,
        warmup: float = 0.0,
        warmup_steps: int = 0,
        least: float = 0.0,
        steps: int | None = None,
    ) -> None:
        self.done = 0.0
        self._schedule = schedule
        self._warmup, self._warmup_steps = warmup, warmup_steps
        self._least = least
        self.steps = steps
        super().__init__(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """The factor of the highest learning rates after so many steps."""
        # Positive from the first step on: a step with a learning rate of 0 would be wasted.
        if step < self._warmup_steps:
            return (step + 1) / (self._warmup_steps + 1)
        done = min(1.0, max(self.done, step / self.steps if self.steps else 0.0))
        warmup = self._warmup_steps / self.steps if self._warmup_steps and self.steps else self._warmup
        if done < warmup:
            first = 1.0 / self.steps if self.steps else 1e-3
            return (done + first) / (warmup + first)
        left = self._schedule((done - warmup) / (1.0 - warmup)) if warmup < 1.0 else 0.0
        return self._least + (1.0 - self._least) * left

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The learning rates of the param groups."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The progress of the run: plain values."""
        return {"last_epoch": self.last_epoch, "done": self.done}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume at such a state, with the learning rates of this run; to be called after the optimizer's."""
        self.last_epoch, self.done = state_dict["last_epoch"], state_dict["done"]
        self._set_rates()

    def follow(self, *, steps: int | None, done: float) -> None:
        """Continue as in a run of `steps` steps with a share `done` finished by the clock; sets the rates at once."""
        self.steps, self.done = steps, done
        self._set_rates()

    def _set_rates(self) -> None:
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["initial_lr"], group["lr"] = base, base * self.factor(self.last_epoch)


def make_scheduler(optimizer: Optimizer, arguments: TrainingArguments, steps: int | None) -> LRScheduler:
    """The scheduler of `arguments`, whose `step()` is called after every step of the optimizer.

    Args:
        optimizer: the result of `make_optimizer`.
        arguments: name the schedule, or a function `(optimizer, steps) -> LRScheduler`.
        steps: the number of steps of the run; None if only the clock ends it: then set `done` of the
            `WarmupDecayLR`.

    Raises:
        ConfigValueError: a function cannot be imported, or needs a number of steps that is unknown.
        ConfigTypeError: its result is not a scheduler.
    """
    found = _function(arguments, "scheduler", SCHEDULERS)
    if found in SCHEDULERS.values():
        if found is stay_then_decay and arguments.decay is not None:
            found = partial(stay_then_decay, decay=arguments.decay)
        return WarmupDecayLR(
            optimizer,
            found,
            warmup=arguments.warmup,
            warmup_steps=arguments.warmup_steps,
            least=arguments.min_lr / arguments.lr,
            steps=steps,
        )
    if steps is None:
        raise ConfigValueError(
            f"scheduler: {shown(found)} needs the number of steps, but this run is limited only by the clock. "
            f"Set steps= or epochs=, or choose one of {', '.join(SCHEDULERS)}."
        )
    scheduler = found(optimizer, steps)
    if not isinstance(scheduler, LRScheduler):
        raise ConfigTypeError(
            f"scheduler: {shown(found)} returned {shown(scheduler)}. Accepted: an LRScheduler of torch."
        )
    return scheduler
