"""torch.compile inside and around wrapped models: the graphs that it makes, and the numbers of the eager model."""

from __future__ import annotations

import shutil
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import flatfsdp
from flatfsdp import MixedPrecision
from tests.conftest import Run
from tests.harness import thorough
from tests.harness.corners import Setting, data, full_gradients, full_parameters, joined, loss_of, seeded
from tests.harness.models import WIDTH, Feedforward

pytestmark = pytest.mark.distributed

SETTINGS = (Setting(), Setting("SHARD_GRAD_OP", orig=False), Setting("NO_SHARD"))
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
UNITS = 3  # besides the root
BACKEND = "aot_eager"  # traces forward and backward, and computes with torch's own kernels


class Stack(nn.Module):
    """Units one after the other, then a layer of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (Feedforward(WIDTH, 20 + i) for i in range(UNITS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x)
        x = self.c(x)
        return self.head(x)


def compiled(setting: Setting, how: str, **more: Any) -> tuple[Any, Any]:
    """(the callable, the wrapper): blocks compiled in place, or as modules of their own, or the whole model; or nothing
    ("eager")."""
    net = seeded(Stack)
    for name in "abc":
        block = getattr(net, name)
        if how == "in place":
            block.compile(backend=BACKEND, fullgraph=True)
        elif how == "as modules":
            wrapped = setting.wrap(torch.compile(block, backend=BACKEND, fullgraph=True), (), **more)
            setattr(net, name, wrapped)
    model = setting.wrap(net, () if how == "as modules" else (Feedforward,), **more)
    return (torch.compile(model, backend=BACKEND) if how == "whole" else model), model


def trained(called: Any, model: Any, rank: int) -> list[Tensor]:
    """The losses of some steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(thorough.steps()):
        loss = loss_of(called(data(rank, step)).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    state = full_parameters(model)
    return [*losses, *(value for name, value in sorted(state.items()))]


def like_eager(rank: int, world: int, how: str, low: bool, under: tuple[Setting, ...], ranks: int) -> list[str]:
    """The first `ranks` compile."""
    from torch._dynamo.utils import counters

    lines = []
    more = {"mixed_precision": LOW} if low else {}
    for setting in under:
        torch._dynamo.reset()
        counters.clear()
        called, model = compiled(setting, how if rank < ranks else "eager", **more)
        found = trained(called, model, rank)
        expected = trained(eager := setting.wrap(seeded(Stack), (Feedforward,), **more), eager, rank)
        if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
            lines.append(f"{setting}: computes something else")
        graphs = counters["stats"]["unique_graphs"]
        if graphs != (UNITS + (how == "whole") if rank < ranks else 0):
            lines.append(f"{setting}: {graphs} graphs; breaks: {dict(counters['graph_break'])}")
        if how != "whole" and counters["graph_break"]:
            lines.append(f"{setting}: breaks {dict(counters['graph_break'])}")
    torch._dynamo.reset()
    return lines


# Each setting, each way to compile, and each precision.
SOME = {
    ("in place", True): SETTINGS[2:],
    ("as modules", False): SETTINGS[1:2],
    ("whole", False): SETTINGS[:1],
}


@pytest.mark.parametrize(
    ("how", "low"), [*product(("in place", "as modules", "whole"), (False, True))] if thorough.is_thorough() else SOME
)
def test_as_many_graphs_as_units_and_the_numbers_of_the_eager_model(how: str, low: bool, pool2: Run) -> None:
    under = SETTINGS if thorough.is_thorough() else SOME[how, low]
    # A unit that is compiled in place keeps its name, so the other rank notices nothing.
    ranks = 1 if how == "in place" and not thorough.is_thorough() else 2
    assert not joined(pool2(like_eager, how, low, under, ranks, timeout=120))


def in_place(rank: int, world: int) -> list[str]:
    """Modules that are compiled before they are given to fully_shard, and one of them after it; one is in torch's
    wrapper of checkpoints."""
    from torch._dynamo.utils import counters

    stories, counts = [], []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        net: Any = seeded(Stack)
        net.b = checkpoint_wrapper(net.b)
        blocks = (net.a, net.b, net.c)
        for block in blocks[: 2 * is_compiled]:
            block.compile(backend=BACKEND)
        for block in blocks:
            flatfsdp.fully_shard(block)
        if is_compiled:
            net.c.compile(backend=BACKEND)
        flatfsdp.fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        got = []
        for step in range(2):
            loss = loss_of(net(data(rank, step)).float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            got.append(loss.detach())
        stories.append([*got, *(parameter.full_tensor() for parameter in net.parameters())])
        counts.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    lines = [] if all(map(torch.equal, *stories)) else ["computes something else"]
    return lines if counts[0] == 0 and counts[1] >= UNITS else [*lines, f"graphs: {counts}"]


def test_modules_of_fully_shard_are_compiled_inside_of_their_units(pool2: Run) -> None:
    assert not joined(pool2(in_place, timeout=120))


def one_block(rank: int, world: int) -> list[str]:
    """Eager and machine code, a step of each. Rank 0 alone takes the time to compile: both have its gradients."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # else every rank starts a pool of processes
    # Else g++ first tries every instruction set of the processor, and compiles headers for many kernels in advance.
    inductor.cpp.vec_isa_ok, inductor.cpp_cache_precompile_headers = False, False
    stories = []
    for is_compiled in (False, True):
        net = seeded(lambda: Feedforward(WIDTH, 8))
        if is_compiled and rank == 0:
            net.compile(fullgraph=True)
        model = Setting().wrap(net, ())
        loss = loss_of(model(data(rank, 0)))
        loss.backward()
        stories.append([loss.detach(), *full_gradients(model).values()])
    torch._dynamo.reset()
    return [f"{one} instead of {other}" for one, other in zip(*stories, strict=True) if not torch.allclose(one, other)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs g++ on a CPU")
def test_compiled_to_machine_code(pool2: Run) -> None:
    assert not joined(pool2(one_block, timeout=240))
