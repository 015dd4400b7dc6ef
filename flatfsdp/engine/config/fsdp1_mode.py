"""Whether this process runs a program for FSDP1 as it is (`as_torch.install()`).

Where FSDP1's way and flatfsdp's own differ, and neither is wrong, flatfsdp's holds unless this is `active`.
"""

from __future__ import annotations

active = False
