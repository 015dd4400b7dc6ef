"""User-defined settings of the schedule of one unit, in addition to its strategy, as data.

[Note: schedule] The settings of a unit may change between iterations, and between a forward and its backward. They
determine which collectives a unit issues, so ranks compare them when a forward or a backward begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from ...errors import refuse_value


@dataclass(frozen=True, eq=False)
class Branch:
    """A conditional part of a model, to which its units refer. [Note: conditional units]

    Attributes:
        any_order: whether units may run in any order, and again.
    """

    any_order: bool = False

    def __str__(self) -> str:
        return "in any order" if self.any_order else "in order"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The settings of one unit; None leaves a choice to the strategy.

    Attributes:
        reshard_after_forward: whether its parameters are freed between forward and backward; a number: they stay
            sharded over that many ranks, more than one and fewer than all. [Note: post-forward shards]
        reshard_after_backward: whether they are freed after backward.
        reduce: whether its backward reduces gradients, or accumulates them unsharded.
        all_reduce: whether gradients reduced over the shard axis are also reduced over the replicate axis, or added up.
        unshard_in_backward: whether its backward reads the parameters.
        unshard_async_op: whether gathers are issued on the caller's stream, and prefetched only on request of the user.
            The same for all units of a model.
        divide_by: the divisor of the sum of gradients over ranks; None for the number of ranks.
        keep_frozen: where frozen parameters stay unsharded, "device" or "host"; None: nowhere. [Note: persistent
            parameters]
        branch: the conditional part of the model that it belongs to; None if all ranks always run it.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool | None = None
    reduce: bool = True
    all_reduce: bool = True
    unshard_in_backward: bool = True
    unshard_async_op: bool = False
    divide_by: float | None = None
    keep_frozen: str | None = None
    branch: Branch | None = None

    def describe(self) -> Iterator[str]:
        """The settings that differ from the defaults, in words."""
        if self is not AS_BUILT:
            for field in fields(self):
                value = getattr(self, field.name)
                if value != field.default:
                    yield f"{field.name}={value}"

    @property
    def post_forward_ranks(self) -> int | None:
        """The number of ranks over which parameters stay sharded between forward and backward; None: they do not."""
        count = self.reshard_after_forward
        return None if count is None or isinstance(count, bool) or not self.unshard_in_backward else count

    @property
    def gathers_alone(self) -> bool:
        """Whether its gathers are never coalesced with others: over fewer ranks, or issued on request of the user."""
        return self.post_forward_ranks is not None or self.unshard_async_op

    @property
    def keeps_by_choice(self) -> bool:
        """Whether parameters may stay unsharded between iterations by the user's choice."""
        return self.reshard_after_forward is False or self.reshard_after_backward is False


AS_BUILT = Schedule()


def reshard_choices(argument: str, value: bool | int | None, *, shards: Iterable[int]) -> bool | int | None:
    """`reshard_choice` for a unit whose parameters have different numbers of `shards`: a number if it is one for any of
    them. Parameters with fewer shards are treated as with True."""
    if value is None or isinstance(value, bool):
        return value
    counts = list(shards)
    least = min(value, max(counts))
    choices = [reshard_choice(argument, value, shards=each) if each >= least else True for each in counts]
    return next((each for each in choices if not isinstance(each, bool)), choices[0])


def reshard_choice(argument: str, value: bool | int | None, *, shards: int) -> bool | int | None:
    """`value` for parameters with so many `shards`; False instead of 1, and True instead of the number of all shards.

    Raises:
        ConfigValueError: a number that does not divide `shards`.
    """
    if value is None or isinstance(value, bool):
        return value
    if value < 1 or shards % value:
        divisors = ", ".join(str(count) for count in range(1, shards + 1) if shards % count == 0)
        ranks = "rank that holds" if shards == 1 else "ranks that share"
        refuse_value(argument, value, f"True, False, or a divisor of the {shards} {ranks} the parameters: {divisors}")
    return False if value == 1 else True if value == shards else value
