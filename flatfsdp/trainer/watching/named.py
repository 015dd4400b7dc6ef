"""Callbacks that settings name, with their options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from flatfsdp.errors import ConfigTypeError, ConfigValueError
from flatfsdp.trainer.arguments import TrainingArguments
from flatfsdp.trainer.callbacks import Callback, EarlyStop, LossPlot
from flatfsdp.trainer.hub.cache import library
from flatfsdp.trainer.settings import nearest
from flatfsdp.trainer.settings.references import check_all_taken, resolve
from flatfsdp.trainer.watching.profile import Profile
from flatfsdp.trainer.watching.trackers import TensorBoard, WeightsAndBiases

CALLBACKS: Mapping[str, Callable[..., Callback]] = {
    "early_stop": EarlyStop,
    "loss_plot": LossPlot,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
"""Callbacks by name; any other is "package.module:name", a class or a function that makes one."""

LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb"}  # the packages that some of them need


def callbacks_of(training: TrainingArguments) -> Iterator[Callback]:
    """The callbacks that the settings `callbacks`, `early_stop` and `profile` name.

    Raises:
        ConfigValueError: there is none of that name, or it does not take an option.
        ConfigTypeError: the result of a function is not a callback.
    """
    for name, factory, options in _factories(training):
        try:
            made = factory(**options)
        except TypeError as error:
            raise ConfigValueError(f"callbacks: {name} rejects {dict(options)}: {error}") from error
        if not isinstance(made, Callback):
            raise ConfigTypeError(f"callbacks: {name} returned a {type(made).__name__}. Accepted: a Callback.")
        yield made
    if training.early_stop is not None:
        yield EarlyStop(training.early_stop, by=training.best_by, mode=training.best_mode)
    if training.profile is not None:
        yield Profile(*training.profile)


def check_callbacks(training: TrainingArguments) -> None:
    """Raise for unknown names, options that callbacks do not take, and missing libraries; no callback is made.

    Raises:
        ConfigValueError: with the first problem.
    """
    for name, _, _ in _factories(training):
        if name in LIBRARIES and find_spec(LIBRARIES[name]) is None:
            library(LIBRARIES[name], wanted_by=f"callback {name}")


def _factories(training: TrainingArguments) -> Iterator[tuple[str, Callable[..., Callback], Mapping[str, Any]]]:
    for name, options in training.callbacks:
        if name not in CALLBACKS and ":" not in name:
            raise ConfigValueError(f"callbacks: got {name!r}. {nearest(name, [*CALLBACKS, 'module:function'])}")
        factory = CALLBACKS[name] if name in CALLBACKS else resolve(name, argument="callbacks")
        check_all_taken(options, {f"callback {name}": factory}, argument="callbacks")
        yield name, factory, options
