"""Stages of torch.distributed.pipelining that have units, under schedules that split backwards.

[Note: split backwards] Zero-bubble schedules and DualPipeV compute gradients of a stage's inputs first. Those of its
parameters come later, by `autograd.grad` for what `stage.parameters()` shows then: of units these are shards, which no
graph knows, so that nothing was trained, without an error. Here a stage with units computes all of them when those of
its inputs are asked for, by a backward as others are, and nothing is left for later. As in `get_state_dict` ([Note:
get_state_dict]), torch's function is replaced where it is called, when a model first runs: whoever has a stage has
imported it by then.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..base.events import Observer
from ..flat.write_tracker import FlatParameter
from ..runtime.model import Model
from ..runtime.param_registry import owner_of

MODULE, NAME = "torch.distributed.pipelining.stage", "stage_backward_input"


class PipelineStages(Observer):
    """Lets torch's stages know units, at the first step of a model."""

    def __init__(self, model: Model) -> None:
        self._observers = weakref.proxy(model.observers)  # which hold it: a circle keeps models alive

    def step_begins(self, unit: Any) -> bool:
        """Replaces what splits backwards, if it is loaded."""
        names: dict[str, Any] = vars(sys.modules[MODULE]) if MODULE in sys.modules else {}
        if NAME in names and not hasattr(names[NAME], "knows_units"):
            names[NAME] = _whole_with_units(names[NAME], names["stage_backward"])
        self._observers.remove(self)
        return False


def _whole_with_units(split: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    """`split`, which leaves the gradients of `weights` for later; `whole` where any of them is a unit's. [Note: split
    backwards]"""

    @functools.wraps(split)
    def stage_backward_input(
        outputs: Sequence[torch.Tensor],
        output_grads: Sequence[torch.Tensor | None] | None,
        inputs: Sequence[Any],
        weights: Iterable[torch.nn.Parameter],
    ) -> tuple[Sequence[torch.Tensor | None], list[Any]]:
        weights = [*weights]
        if not any(isinstance(each, FlatParameter) or owner_of(each) is not None for each in weights):
            result: tuple[Sequence[torch.Tensor | None], list[Any]] = split(
                outputs, output_grads, inputs, iter(weights)
            )
            return result
        if output_grads is None:  # of a loss
            output_grads = [torch.ones_like(each) for each in outputs]
        return whole(tuple(outputs), tuple(output_grads), inputs), []

    stage_backward_input.knows_units = True  # type: ignore[attr-defined]
    return stage_backward_input
