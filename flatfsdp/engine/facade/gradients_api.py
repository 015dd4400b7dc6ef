"""Operations of users on gradients between a backward and a step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import cast

import torch
from torch import nn

from ...errors import UsageError
from ..features.clip import clip_grad_norm
from ..features.deterministic_sums import DeterministicSums
from ..models.rest import check_outermost, check_outside, may_list_leaves, quiesce
from ..models.walks import units_in
from ..runtime.model import model_of
from ..runtime.model_facts import steppable_of
from ..runtime.unit import Unit


class GradientControls:
    """Methods of the outermost wrapper, or module of `fully_shard`. The mixin expects `_unit`."""

    _unit: Unit

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before.

        Ignored parameters count once. Every rank gets the same norm, a tensor without dimensions. Collective.
        `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` does the same, for modules of `fully_shard` with
        operations on DTensors.

        Args:
            max_norm: the upper limit.
            norm_type: the p of the p-norm, 0 or larger; `inf` for the largest absolute value. With
                `deterministic_sums=True` 1, 2 or `inf`.
            error_if_nonfinite: whether a norm that is infinite or not a number is an error, which names the first
                gradient with such values, and its rank; gradients then stay unchanged.

        Raises:
            NonFiniteError: for such a norm, on every rank.
            AgreementError: on every rank, within seconds, if other ranks do something else.
            UsageError: on a nested wrapper or module; an optimizer steps in backwards; inside of a forward, of
                `summon_full_params()`, or after a `no_sync()` whose gradients are not reduced.
            ConfigTypeError, ConfigValueError: for arguments that are not such numbers.
        """
        model = check_outermost(self._unit, "clip_grad_norm_")
        parameters: Iterable[torch.Tensor] = cast(nn.Module, self).parameters()
        if self._unit.entries.in_place or may_list_leaves(model):
            parameters = chain(*map(steppable_of, model.units), parameters)
        return clip_grad_norm([model], parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for any module: drop the gradients of all parameters inside, or set them to zero. Where modules hold
        unsharded parameters, from a forward to its backward or after `unshard()`, this applies to the shards. With
        `deterministic_sums=True`, the outermost wrapper also drops what has run of a step.

        Args:
            set_to_none: False to keep `.grad`, filled with zeros.
        """
        model = model_of(self._unit)
        if model.outermost is self._unit and (sums := model.observers.find(DeterministicSums)) is not None:
            sums.drop_step()
        for unit in units_in(cast(nn.Module, self)):
            for handle in unit.handles if not unit.shows_shard else ():  # others are listed, as in any module
                for holder in handle.face.holders:
                    if set_to_none:
                        holder.grad = None
                    elif holder.grad is not None:
                        with torch.no_grad():
                            holder.grad.zero_()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def reduce_accumulated_gradients(self) -> None:
        """Reduce the gradients accumulated by backwards without synchronization into `.grad`, without a backward.

        For the whole model: a pipeline's schedule calls it for a stage after the backwards of all microbatches.
        Parameters for which no rank has gradients get none. Wrappers whose gradients are not to be synchronized
        (`set_requires_gradient_sync(False)`) keep theirs. Collective over the shard groups and the replicate groups.

        Raises:
            UsageError: inside a forward or a backward, inside `no_sync()`, or on a nested wrapper.
            AgreementError: on every rank, if some ranks make a different call.
        """
        call, unit = "reduce_accumulated_gradients()", self._unit
        check_outside(unit, call)
        model = check_outermost(unit, call)
        if not model.backwards.sync:
            raise UsageError(
                f"{call} was called inside no_sync(), where nothing is reduced; call it after leaving that context"
            )
        quiesce([unit], shards=False)
        with model.agreement.collective_call(call):
            model.backwards.reduce_accumulated()
