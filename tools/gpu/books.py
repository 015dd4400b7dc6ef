"""Whose memory it is, by the Python frames that the allocator notes with each block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

OWNERS = ("engine", "optimizer", "model", "rest")
MOMENTS = ("after backward", "after step", "peak of the engine")
# Where the innermost of these frames lies. What a model computes is in modules, above the engine's frames that call it.
_PLACES = (
    ("engine", ("/flatfsdp/engine/", "/flatfsdp/fully_sharded", "/flatfsdp/fsdp_module")),
    ("optimizer", ("/torch/optim/",)),
    ("model", ("/benchmark/models.py", "/torch/nn/modules/", "/torch/nn/functional.py")),
)


def owner(frames: Iterable[dict[str, Any]]) -> str:
    """Whose a block is; `frames` from the innermost."""
    for frame in frames:
        for name, places in _PLACES:
            if any(place in frame["filename"] for place in places):
                return name
    return "rest"


def held(snapshot: dict[str, Any]) -> dict[str, int]:
    """Bytes that are allocated now, by owner."""
    found: Counter[str] = Counter()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found[owner(block.get("frames") or ())] += block.get("requested_size", block["size"])
    return dict(found)


def at_peak_of(whose: str, snapshot: dict[str, Any]) -> dict[str, int]:
    """Bytes by owner at the moment when one of them had most, from what the allocator did while it was recorded."""
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
