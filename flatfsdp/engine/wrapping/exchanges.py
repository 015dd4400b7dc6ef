"""The ways in which models exchange tensors."""

from __future__ import annotations

from ..comm.transport import CoalescingNccl, Exchanges
from ..cpu.gloo import DeterministicGloo
from ..few_bits.quantized import in_few_bits

EXCHANGES = Exchanges({"gloo": DeterministicGloo, "nccl": CoalescingNccl}, in_few_bits)
