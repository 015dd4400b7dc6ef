"""What the server of ranks imports last: finalizers of what it has imported so far, such as those of all of torch's
operators, are not for the end of a process that it forks."""

from __future__ import annotations

import weakref

for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    each.atexit = False
