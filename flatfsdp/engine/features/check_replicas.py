"""Whether replicas hold the same parameters, for users. [Note: replicas]"""

from __future__ import annotations

from torch import nn

from ...errors import AgreementError
from ..runtime.model import outermost_model
from ..runtime.replica_checks import differences, replicated_pieces
from ..runtime.rest import check_outside, quiesce, take_over


def check_replicas(model: nn.Module) -> None:
    """Compare the parameters of ranks that hold the same pieces: replicas of the hybrids, all ranks under `NO_SHARD`.

    They must be equal in every bit. Checksums are compared, of what each rank keeps; the first training forward does
    the same, and after it each thousandth backward that reduces, and both report it by `check_values`. Where nothing
    is replicated there is nothing to compare. Collective, between iterations: one number a rank, and one for each
    parameter where those differ.

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
