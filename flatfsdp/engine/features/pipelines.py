"""Stages of torch.distributed.pipelining that have units, under schedules that split backwards.

[Note: split backwards] Zero-bubble schedules and DualPipeV compute gradients of a stage's inputs first. Those of its
parameters come later, by `autograd.grad` for the tensors in `stage.parameters()`: for units these are shards, which are
in no graph, so that nothing would be trained, without an error. Here a stage with units computes all gradients in an
ordinary backward when those of its inputs are requested, and none later. As for `get_state_dict` ([Note:
get_state_dict]), torch's function is replaced in the module that calls it: when the first model is constructed, or when
the program imports that module later, since this import takes a second.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from ..models.param_registry import owner_of

MODULE, NAME = "torch.distributed.pipelining.stage", "stage_backward_input"


def serve_stages() -> None:
    """Let stages compute the gradients of units, now or once torch's module is imported. Idempotent."""
    if (module := sys.modules.get(MODULE)) is not None:
        _serve(module)
    elif _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _WhenImported(MetaPathFinder):
    """Finds torch's module as usual, and patches it after its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of that module; None for others."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == MODULE else None
        if spec is not None and (loader := spec.loader) is not None:
            execute = loader.exec_module

            def execute_and_serve(module: ModuleType) -> None:
                execute(module)
                _serve(module)

            loader.exec_module = execute_and_serve  # type: ignore[method-assign]
        return spec


_FINDER = _WhenImported()


def _serve(module: ModuleType) -> None:
    names = vars(module)
    if NAME in names and not hasattr(names[NAME], "knows_units"):
        names[NAME] = _whole_with_units(names[NAME], names["stage_backward"])


def _whole_with_units(split: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    """`split`, which defers the gradients of `weights`; `whole` if any of them belongs to a unit. [Note: split
    backwards]"""

    @functools.wraps(split)
    def stage_backward_input(
        outputs: Sequence[torch.Tensor],
        output_grads: Sequence[torch.Tensor | None] | None,
        inputs: Sequence[Any],
        weights: Iterable[torch.nn.Parameter],
    ) -> tuple[Sequence[torch.Tensor | None], list[Any]]:
        weights = [*weights]
        if not any(owner_of(each) is not None for each in weights):
            result: tuple[Sequence[torch.Tensor | None], list[Any]] = split(
                outputs, output_grads, inputs, iter(weights)
            )
            return result
        if output_grads is None:  # of a loss
            output_grads = [torch.ones_like(each) for each in outputs]
        return whole(tuple(outputs), tuple(output_grads), inputs), []

    stage_backward_input.knows_units = True  # type: ignore[attr-defined]
    return stage_backward_input
