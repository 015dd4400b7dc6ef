"""Owners of memory, by the Python frames that the allocator records for each block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

OWNERS = ("engine", "optimizer", "model", "rest")
MOMENTS = ("after backward", "after step", "peak of the engine")
# The innermost of these frames decides. Computation of a model is in modules, inside the engine's frames that call it.
_PLACES = (
    ("engine", ("/flatfsdp/engine/", "/flatfsdp/fully_sharded", "/flatfsdp/fsdp_module")),
    ("optimizer", ("/torch/optim/",)),
    ("model", ("/benchmark/models.py", "/torch/nn/modules/", "/torch/nn/functional.py")),
)


def owner(frames: Iterable[dict[str, Any]]) -> str:
    """The owner of a block; `frames` from the innermost."""
    for frame in frames:
        for name, places in _PLACES:
            if any(place in frame["filename"] for place in places):
                return name
    return "rest"


def held(snapshot: dict[str, Any]) -> dict[str, int]:
    """Allocated bytes, by owner."""
    found: Counter[str] = Counter()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found[owner(block.get("frames") or ())] += block.get("requested_size", block["size"])
    return dict(found)


def at_peak_of(whose: str, snapshot: dict[str, Any]) -> dict[str, int]:
    """Bytes by owner at the moment when `whose` had most, from the recorded events of the allocator."""
    live: dict[int, tuple[str, int]] = {}
    now: Counter[str] = Counter()
    peak: dict[str, int] = {}
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            live[event["addr"]] = owner(event.get("frames") or ()), event["size"]
            now[live[event["addr"]][0]] += event["size"]
            if now[whose] > peak.get(whose, 0):
                peak = dict(now)
        elif event["action"] == "free_completed" and event["addr"] in live:
            name, size = live.pop(event["addr"])
            now[name] -= size
    return peak
