"""The ways in which models exchange tensors."""

from __future__ import annotations

from ..comm.transport import CoalescingNccl, Exchanges
from ..cpu.gloo import DeterministicGloo

EXCHANGES = Exchanges({"gloo": DeterministicGloo, "nccl": CoalescingNccl})
