"""Statistics of the communication: collectives, bytes and messages."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class CommStats:
    """Counts of collectives by category and the bytes of their unsharded side (input of a reduction, output of a
    gather); the number of messages, sent and received, of scatters from one rank; and the bytes that were copied
    through staging buffers."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    messages: int = 0
    staged: int = 0
    issued: int = 0  # all collectives, and the second halves of some, for comparison over ranks; never reset

    def log(self, category: str, count: int) -> None:
        """Count one collective of `category` that moves `count` bytes."""
        self.issued += 1
        self.counts[category] += 1
        self.bytes[category] += count

    def reset(self) -> None:
        """Set all counts but `issued` to zero."""
        self.counts.clear()
        self.bytes.clear()
        self.messages = 0
        self.staged = 0
