"""The way of one unit through the engine's files: `python -m tests.harness.walk` prints the figures of both fronts.

Units have two tensors each and are fully sharded, in one process as a rank of a simulated world of 4. A figure of one
unit is the slope between a model of few units and one of many, in a step after the first ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import flatfsdp
from tests.harness.fake import fake_world

HOME = os.path.dirname(os.path.abspath(flatfsdp.__file__)) + os.sep
COLLECTIVES = "_allgather_base", "_reduce_scatter_base", "allreduce"
FRONTS = "wrapper", "fully_shard"
FEW, MANY = 6, 12  # units


@dataclass
class Figures:
    """The calls in flatfsdp during one trip: a forward, a backward, or a whole step.

    Attributes:
        calls: Python functions entered.
        changes: of file: calls into another file than the call before.
        deepest: the most frames of flatfsdp on the stack.
        to_collective: the most frames from one that torch or the program has called, a hook, to one that issues a
            collective.
    """

    calls: float = 0
    changes: float = 0
    deepest: int = 0
    to_collective: int = 0


def is_ours(frame: Any) -> bool:
    """Whether `frame` is one of flatfsdp."""
    name: str = frame.f_code.co_filename
    return name.startswith(HOME)


@contextmanager
def watched_collectives(found: Figures) -> Iterator[None]:
    """A context in which process groups that are used for the first time record `to_collective` in `found`."""

    def watched(issue: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(issue)
        def issue_watched(*args: Any, **kwargs: Any) -> Any:
            depth, frame = 0, sys._getframe(1)
            while frame is not None and is_ours(frame):
                depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
            found.to_collective = max(found.to_collective, depth)
            return issue(*args, **kwargs)

        return issue_watched

    with ExitStack() as patches:
        for name in COLLECTIVES:
            kind: Any = dist.ProcessGroup
            patches.enter_context(mock.patch.object(kind, name, watched(getattr(kind, name))))
        yield


def figures_of(run: Callable[[], object], found: Figures) -> Figures:
    """The figures of what `run` does, with those that `found` gets meanwhile."""
    last: str | None = None
    calls = changes = deepest = depth = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal last, calls, changes, deepest, depth
        if event not in ("call", "return") or not is_ours(frame):
            return
        if event == "return":
            depth -= 1
            return
        calls, depth = calls + 1, depth + 1
        deepest = max(deepest, depth)
        changes += last is not None and frame.f_code.co_filename != last
        last = frame.f_code.co_filename

    found.to_collective = 0
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return Figures(calls, changes, deepest, found.to_collective)


def sharded(front: str, units: int, group: Any) -> nn.Module:
    """A model of so many `units`, and an outermost one without parameters."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16)) for _ in range(units)))
    if front == "wrapper":
        how: dict[str, Any] = {"process_group": group, "use_orig_params": True}
        for i in range(units):
            net[i] = flatfsdp.FullyShardedDataParallel(net[i], **how)
        return flatfsdp.FullyShardedDataParallel(net, join_units_below=0, **how)
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    for each in net:
        flatfsdp.fully_shard(each, mesh=mesh)
    return flatfsdp.fully_shard(net, mesh=mesh)


def walk_of(front: str, units: int) -> dict[str, Figures]:
    """The figures of a model of so many `units`: of a forward, a backward, and a whole step."""
    found = Figures()
    with watched_collectives(found), fake_world(4) as group:
        model = sharded(front, units, group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, kept = torch.randn(2, 16), []

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(5):
            step()
        forward = figures_of(lambda: kept.append(model(x)), found)
        backward = figures_of(lambda: kept.pop().sum().backward(), found)
        optimizer.step()
        optimizer.zero_grad()
        return {"forward": forward, "backward": backward, "step": figures_of(step, found)}


def walk(front: str) -> dict[str, Figures]:
    """The figures of one unit, by trip; depths are those of the larger model."""
    few, many = walk_of(front, FEW), walk_of(front, MANY)
    return {
        trip: Figures(
            (b.calls - a.calls) / (MANY - FEW), (b.changes - a.changes) / (MANY - FEW), b.deepest, b.to_collective
        )
        for (trip, a), b in zip(few.items(), many.values(), strict=True)
    }


def main() -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    print(f"{'front':12} {'trip':9} {'calls':>7} {'changes of file':>16} {'deepest':>8} {'hook to collective':>19}")
    for front in FRONTS:
        for trip, each in walk(front).items():
            print(
                f"{front:12} {trip:9} {each.calls:7.1f} {each.changes:16.1f} {each.deepest:8} {each.to_collective:19}"
            )


if __name__ == "__main__":
    main()
