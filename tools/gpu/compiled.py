"""Parity with one process with compiled blocks, or a compiled model."""

from __future__ import annotations

import torch

from tools.benchmark import ranks
from tools.benchmark.ranks import World

from . import alone, parity
from .alone import Story
from .card import Card, card_of
from .net import Net
from .plays import Stage, steps
from .report import Report
from .scenarios import Scenario
from .wraps import Wrap, front, whole_parameters, wrapper

WITHIN = 1e-3  # compiled kernels sum in another order


def run(report: Report, card: Card, *, brief: bool) -> None:
    """With inductor on a card, or only with tracing on a CPU."""
    backend = "inductor" if card.is_real and not brief else "aot_eager"
    ranks.run(World(1, card.backend), play_compiled, report.path, card.kind, backend, brief, timeout=600.0)
    report.reload()


def play_compiled(rank: int, path: object, kind: str, backend: str, brief: bool) -> None:
    """A job: train with compiled modules. Collective."""
    card, report = card_of(kind), Report(path)  # type: ignore[arg-type]
    card.begin()
    found = [
        Scenario(f"blocks compiled ({backend})", _blocks(wrapper(use_orig_params=True), backend), within=WITHIN),
        Scenario(f"fully_shard, blocks compiled ({backend})", _blocks(front(), backend), within=WITHIN),
        Scenario(
            f"the whole model compiled ({backend})", wrapper(use_orig_params=True), _Whole(backend), within=WITHIN
        ),
    ]
    for scenario in found[:1] if brief else found:
        torch.compiler.reset()
        parity.play(rank, 1, card, report, scenario)


def _blocks(inner: Wrap, backend: str) -> Wrap:
    def wrap(model: Net, device: torch.device) -> object:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return inner(model, device)

    return wrap


class _Whole:
    """A play that compiles the wrapped model."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def __call__(self, stage: Stage) -> Story:
        model = stage.model()
        called = torch.compile(model, backend=self._backend)
        losses = steps(stage, called, alone.optimizer_of(model), range(alone.STEPS))
        return Story(losses, whole_parameters(model))
