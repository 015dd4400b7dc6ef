"""A stamp in an optimizer's own state dict that identifies its shards.

[Note: stamps] `optimizer.state_dict()` holds the pieces that this rank steps on, under numbers. On another rank they
are other elements, which remains unnoticed if shards are equally large. So the dict carries a stamp next to "state" and
"param_groups", which other code ignores, and `load_state_dict()` compares it. torch has hooks for both methods, but per
optimizer, and no event for a new one. So the two methods are wrapped in the class, once per process. If every
rank holds all elements (one rank, NO_SHARD) there is no stamp and no comparison.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch

from ....errors import UsageError
from ...base._dtensor import is_dtensor
from ...guards.optimizer_hooks import handles_of, models_of

KEY = "flatfsdp_shards"

_installed = False


def stamp_state_dicts() -> None:
    """Add a stamp of its shards to the state dict of every optimizer of this process. Idempotent."""
    global _installed
    if not _installed:
        _installed = True
        cls: Any = torch.optim.Optimizer
        cls.state_dict = _stamping(cls.state_dict)
        cls.load_state_dict = comparing(cls.load_state_dict)


def _stamping(torchs_own: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(torchs_own)
    def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
        made = torchs_own(self)
        stamp = stamp_of(self)
        return made if stamp is None else {**made, KEY: stamp}

    return state_dict


def comparing(torchs_own: Callable[..., None]) -> Callable[..., None]:
    """A method `load_state_dict` of an optimizer's class that refuses the shards of another rank first."""

    @functools.wraps(torchs_own)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        given = state_dict.get(KEY) if isinstance(state_dict, dict) else None
        if isinstance(given, dict):
            _compare(given, stamp_of(self))
        torchs_own(self, state_dict)
        for root in models_of(self):
            root.agreement.loaded = True

    return load_state_dict


def stamp_of(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The identity of the shards that `optimizer` steps on, as plain data: "shards", a [rank, number of ranks] for each
    axis over which its parameters are split, and "layout", their digest. None if nothing is split. No communication."""
    split = [h for _, h in handles_of(optimizer) if h.layout.world > 1 and not is_dtensor(h.face.holders[0])]
    layouts = {(h.rank, h.layout.world, h.layout.digest()) for h in split}
    if not layouts:
        return None
    digests = sorted(digest for _, _, digest in layouts)
    return {
        "shards": [[rank, world] for rank, world in sorted({each[:2] for each in layouts})],
        "layout": digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest(),
    }


def _compare(given: dict[str, Any], own: dict[str, Any] | None) -> None:
    """Refuse a state dict stamped `given` if the optimizer's own stamp differs.

    Raises:
        UsageError: naming both, possible causes and remedies.
    """
    if own is None or given == own:
        return
    theirs, ours = _words(given), _words(own)
    if given.get("shards") == own["shards"]:
        theirs, ours = f"{theirs} of a different layout", f"{ours} of its own"
    raise UsageError(
        f"optimizer.load_state_dict(): the state dict holds {theirs}, this optimizer steps on {ours}. "
        "optimizer.state_dict() returns only the shards of one rank: either rank 0's was saved and is loaded on every "
        "rank, or it was created with a different number of ranks or a different wrapping. Save what "
        "FullyShardedDataParallel.optim_state_dict(model, optimizer) returns, and load what "
        "optim_state_dict_to_load(model, optimizer, saved) returns for it, on any number of ranks; or save one file "
        "per rank, for the same ranks"
    )


def _words(stamp: dict[str, Any]) -> str:
    """A stamp's shards for messages; any file may contain it."""
    try:
        return " and ".join(f"shard {int(rank)} of {int(world)}" for rank, world in stamp["shards"])
    except (KeyError, TypeError, ValueError):
        return "shards of unknown ranks"
