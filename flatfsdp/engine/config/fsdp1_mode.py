"""Whether this process runs an unmodified program for FSDP1 (`as_torch.install()`).

If the behavior of FSDP1 and of flatfsdp differs, and neither is wrong, this flag selects that of FSDP1.
"""

from __future__ import annotations

active = False
