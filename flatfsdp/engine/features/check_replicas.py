"""The public comparison of replicas. [Note: replicas]"""

from __future__ import annotations

from torch import nn

from ...errors import AgreementError
from ..runtime.model import outermost_model
from ..runtime.replica_checks import differences, replicated_pieces
from ..runtime.rest import check_outside, quiesce, take_over


def check_replicas(model: nn.Module) -> None:
    """Compare the parameters of ranks that hold the same pieces: replicas of the hybrids, all ranks under `NO_SHARD`.

    They must be bitwise equal. The checksums of each rank's shards are compared. The first training forward compares
    them, too, and then every thousandth backward that reduces; both report differences according to `check_values`.
    Without replicas nothing is compared. Collective, between iterations: one number per rank, and one per parameter
    if those differ.

    Args:
        model: the outermost wrapper.

    Raises:
        AgreementError: on every rank, with the first parameter that differs, and on which ranks.
        ConfigTypeError: `model` is no wrapper.
        UsageError: `model` is a nested wrapper; inside a forward or a backward.
    """
    root = outermost_model(model, "check_replicas")
    check_outside(root.outermost, "check_replicas()")
    quiesce(root.units, shards=False)
    take_over(root.units)
    with root.agreement.collective_call("check_replicas()", always=True):
        found = differences(root.agreement.peers, replicated_pieces(root.units))
    if found:
        raise AgreementError(found)
