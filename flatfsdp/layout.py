"""Where parameters may be cut, and layouts of shards that are cut nowhere else. [Note: grains]

A *grain* is given for a parameter by `layout=` of the wrapper. By default parameters are cut anywhere. `Rows(k)` keeps
groups of `k` rows on one rank, `Blocks(k)` those of matrices in tensors of any dimension, `Blocks(k, n)` tiles,
`Elements(n)` runs of `n` elements, and `Whole()` everything; `Preferred(grain)` keeps it where that needs little
padding. `for_optimizer` has the grains that suit an optimizer, and `declared` those that parameters have themselves.
`plan` finds shards of equal size that obey them, and `cheaper` names other choices if these need much padding. Both
compute with shapes only, for any number of ranks.

Files of sharded state dicts name `flatfsdp.layout.OwnedInterval` and `flatfsdp.layout._rebuild`.
"""

from __future__ import annotations

from .engine.features.optimizer_grains import for_optimizer
from .engine.layout.layout import ParamSpec
from .engine.planning.grains import Blocks, Elements, Grain, Preferred, Rows, Whole, declared, state_blocks
from .engine.planning.plan import cheaper, plan
from .engine.planning.planned import PlannedLayout
from .engine.state.owned_interval import OwnedInterval as OwnedInterval
from .engine.state.owned_interval import _rebuild as _rebuild

__all__ = [
    "Blocks",
    "Elements",
    "Grain",
    "ParamSpec",
    "PlannedLayout",
    "Preferred",
    "Rows",
    "Whole",
    "cheaper",
    "declared",
    "for_optimizer",
    "plan",
    "state_blocks",
]
