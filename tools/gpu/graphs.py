"""Whether a step can be captured as a CUDA graph, and whether replaying it trains."""

from __future__ import annotations

import torch

from tools.benchmark import ranks
from tools.benchmark.jobs import Setting, Training
from tools.benchmark.models import tiny_case
from tools.benchmark.ranks import World

from .card import Card, card_of
from .engines import FAKE, OURS
from .report import Report

TINY = tiny_case(4, 2)
WARM_UP = 3


def run(report: Report, card: Card, *, brief: bool) -> None:
    """Report whether it works; there is no goal."""
    if not card.is_real:
        report.figure("a step as a CUDA graph", "no card")
        return
    for name, world in (("fake group of 8", FAKE), ("one rank", World(1, card.backend))):
        for engine in OURS[:1] if brief else OURS[::2]:
            what = f"{engine}, {name}: a step as a CUDA graph"
            try:
                report.figure(what, ranks.run(world, capture, Setting(TINY, engine, device=card.kind), timeout=40.0)[0])
            except ranks.RankFailed as error:
                report.figure(what, f"cannot be captured: {str(error).strip().splitlines()[-1]}"[:300])


def capture(rank: int, setting: Setting) -> str:
    """Capture forward and backward, and replay them. Collective."""
    card = card_of(setting.device)
    card.begin()
    training = Training(rank, setting)
    batch = training.batch()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            training.model(*batch).backward()
            training.model.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = training.model(*batch)
        loss.backward()
    graph.replay()
    card.synchronize()
    return f"captured; replayed, with a loss of {float(loss.detach()):.4g}"
