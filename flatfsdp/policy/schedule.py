"""What users say about the schedule of one unit beyond its strategy, as data.

[Note: schedule] The settings of a unit may change between iterations, and between a forward and its backward. They
decide which collectives a unit issues, so they are part of what ranks compare when a forward or a backward begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Schedule:
    """The settings of one unit; None leaves a choice to the strategy.

    Attributes:
        reshard_after_forward: whether its parameters are freed between forward and backward.
        reshard_after_backward: whether they are freed after backward.
        reduce: whether its backward reduces gradients, or adds them up unsharded.
        all_reduce: whether what is reduced over the shard axis is reduced over the replicate axis as well, or adds up.
        unshard_in_backward: whether its backward reads the parameters.
        divide_by: what the sum of gradients over ranks is divided by; None for the number of ranks.
    """

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool | None = None
    reduce: bool = True
    all_reduce: bool = True
    unshard_in_backward: bool = True
    divide_by: float | None = None

    def told(self) -> Iterator[str]:
        """What was set, in words."""
        if self is not AS_BUILT:
            for field in fields(self):
                value = getattr(self, field.name)
                if value != field.default:
                    yield f"{field.name}={value}"

    @property
    def keeps_by_choice(self) -> bool:
        """Whether parameters may stay unsharded between iterations because a user said so."""
        return self.reshard_after_forward is False or self.reshard_after_backward is False


AS_BUILT = Schedule()
