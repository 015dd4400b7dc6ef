"""The ways in which models exchange tensors."""

from __future__ import annotations

from ..comm.transport import Exchanges
from ..cpu.gloo import DeterministicGloo
from ..few_bits.quantized import in_few_bits
from ..transports.staged import CoalescingNccl, StagedTransport

EXCHANGES = Exchanges({"gloo": DeterministicGloo, "nccl": CoalescingNccl}, StagedTransport, in_few_bits)
