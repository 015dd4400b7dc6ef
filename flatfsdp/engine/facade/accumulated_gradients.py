"""What a model's owner may do with gradients that backwards have added up unsharded."""

from __future__ import annotations

from ...errors import UsageError
from ..runtime.model import check_outermost
from ..runtime.rest import check_outside, initialize
from ..runtime.unit import Unit


class AccumulatedGradients:
    """A method of the outermost wrapper. The mixin expects `_unit`."""

    _unit: Unit

    def reduce_accumulated_gradients(self) -> None:
        """Reduce now what backwards without synchronization have added up, and make it `.grad`; no backward is needed.

        For the whole model: a pipeline's schedule calls it for a stage when all microbatches have come back. Parameters
        to which no rank's gradients came get none. Wrappers whose gradients are not to be synchronized
        (`set_requires_gradient_sync(False)`) keep theirs. Collective over the shard groups and the replicate groups.

        Raises:
            UsageError: inside a forward or a backward, inside `no_sync()`, or on a nested wrapper.
            AgreementError: on every rank: some do something else.
        """
        call, unit = "reduce_accumulated_gradients()", self._unit
        check_outside(unit, call)
        model = check_outermost(unit, call)
        if not model.backwards.sync:
            raise UsageError(f"{call} was called inside no_sync(), which reduces nothing; call it after that context")
        initialize(model)
        with model.agreement.collective_call(call):
            model.backwards.reduce_accumulated()
