"""What was communicated, in collectives, bytes and messages."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class CommStats:
    """Collectives by kind: how many were issued and the bytes of their unsharded side (input of a reduction, output of
    a gather); the messages, sent and received, of those that are carried out pairwise; and the bytes that went through
    staging buffers."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    messages: int = 0
    staged: int = 0
    issued: int = 0  # what other ranks wait for: collectives of all kinds, and second halves of some; never reset

    def log(self, kind: str, count: int) -> None:
        """One collective of `kind` that moves `count` bytes."""
        self.issued += 1
        self.counts[kind] += 1
        self.bytes[kind] += count

    def reset(self) -> None:
        """Forget everything."""
        self.counts.clear()
        self.bytes.clear()
        self.messages = 0
        self.staged = 0
