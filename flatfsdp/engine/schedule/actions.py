"""The actions that schedules return, and that `runtime/executor.py` executes.

[Note: actions] An action is a verb, and the units that it applies to, together. All actions of an event are executed,
in order, before another event is reported, except those that occur inside of an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

U = TypeVar("U")

# In forwards and backwards:
#   gather, ahead       issue the all-gather of those units that are sharded, when one is needed, or ahead of that
#   free                free the unsharded parameters
# In forwards:
#   retain              free, except for the part that is kept for the backward
#   leave               leave them unsharded between forward and backward
# In backwards:
#   wait                a gradient flows into a unit: wait for the gathers of these, which are it and its owners, as far
#                       as they are unsharded
#   participate         provide gradients: zeros where this backward computes none
#   complete            stop awaiting gradients
#   reduce              issue the reduction
#   end turn            all reductions whose turn it is have been issued; with the unit that has its turn to come, if
#                       there is only one
#   release inputs      let reductions release their inputs, because much memory is about to be allocated
Verb = Literal[
    "gather",
    "ahead",
    "free",
    "retain",
    "leave",
    "wait",
    "participate",
    "complete",
    "reduce",
    "end turn",
    "release inputs",
]
Action = tuple[Verb, Sequence[U]]
