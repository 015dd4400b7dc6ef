"""What changes the numbers of a step and shows in no message: whether ranks have it in common.

[Note: conditions] An optimizer's step, a state dict that is loaded, autocast: where one rank does it alone, all go on
together, with pieces of different models or in different precision. So a forward begins with them in the stream
([Note: agreement]), at no cost while they are as expected; where nothing is sharded, and ranks may differ in their
forwards, a backward does, with those of its forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...errors import ranks_in_words


class StepConditions(NamedTuple):
    """What a step begins with.

    `stepped`, `loaded`: whether an optimizer stepped, or a state dict was loaded, since the last one began. `autocast`:
    its dtype, "" where it is off.
    """

    stepped: bool = False
    loaded: bool = False
    autocast: str = ""


def autocast_on(device_type: str) -> str:
    """The dtype of autocast on devices of this type; "" where it is off."""
    if not torch.is_autocast_enabled(device_type):
        return ""
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


def differences(found: Mapping[tuple[int, ...], StepConditions]) -> str:
    """What the ranks do not have in common, and what to do about it; "" for nothing."""
    out = []
    if len(ranks := _by(found, "stepped")) > 1:
        out.append(
            f"{ranks[True]} took an optimizer step since the step before, {ranks[False]} took none. Step on all ranks "
            "or on none; what decides it must be alike on all, as ShardedGradScaler's verdict is, and GradScaler's not"
        )
    if len(ranks := _by(found, "loaded")) > 1:
        out.append(
            f"{ranks[True]} loaded a state dict since the step before, {ranks[False]} loaded none. Load it on all "
            "ranks; what one of them alone has read goes to the others by rank0_only=True or broadcast_from_rank0=True"
        )
    if len(ranks := _by(found, "autocast")) > 1:
        ways = [f"{f'computes in {dtype}' if dtype else 'is off'} on {ranks[dtype]}" for dtype in sorted(ranks)]
        out.append(f"autocast {', and '.join(ways)}. Enter the same one on all ranks")
    return ". ".join(text[0].upper() + text[1:] for text in out)


def _by(found: Mapping[tuple[int, ...], StepConditions], what: str) -> dict[Any, str]:
    """The ranks for each value of one of the conditions, in words."""
    by: dict[Any, list[int]] = {}
    for ranks, each in found.items():
        by.setdefault(getattr(each, what), []).extend(ranks)
    return {value: ranks_in_words(sorted(ranks)) for value, ranks in by.items()}
