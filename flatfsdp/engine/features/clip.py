"""The norm of all gradients of a model, inside and outside of its units, and clipping by that norm."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, NoReturn

import torch

from ...api import check_bool
from ...errors import ConfigTypeError, ConfigValueError, NonFiniteError, UsageError, current_rank, warn
from ..base import _torch
from ..base._dtensor import is_dtensor
from ..comm.transport import Transport
from ..runtime import param_registry as registry
from ..runtime.model import Model, model_of
from ..runtime.part_axes import part_axes
from ..runtime.rest import before_clipping
from ..runtime.unit import Unit
from .nonfinite import first_gradient, of_all_ranks
from .optimizer_in_backward import optimizers_of

Grads = list[torch.Tensor]


def _by_device(grads: Iterable[torch.Tensor]) -> tuple[dict[torch.device, Grads], Grads]:
    """Nonempty dense real gradients by device, which are treated by one call each; and all others."""
    together: dict[torch.device, Grads] = defaultdict(list)
    others: Grads = []
    for grad in grads:
        is_plain = type(grad) is torch.Tensor and grad.layout is torch.strided and not grad.is_complex()
        (together[grad.device] if is_plain and grad.numel() else others).append(grad)
    return together, others


def _power_sum(grads: Iterable[torch.Tensor], p: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The sum of |g|^p over `grads` (the maximum of |g| for p = inf; the number of non-zeros for p = 0), in `dtype`."""
    together, others = _by_device(grads)
    norms = [torch.stack(_torch.foreach_norm(each, p, dtype=dtype)).to(device) for each in together.values()]
    for grad in others:
        if not grad.numel():  # a rank without rows of the parameter: torch raises for the maximum of an empty tensor
            continue
        norm: Any = torch.linalg.vector_norm(
            grad.detach().to_dense() if grad.is_sparse else grad.detach(),
            p,
            dtype=dtype.to_complex() if grad.dtype.is_complex else dtype,
        )
        if type(norm) is not torch.Tensor and is_dtensor(norm):
            norm = norm.full_tensor()
        norms.append(norm.to(device).reshape(1))
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    every = torch.cat(norms)
    if math.isinf(p):
        return every.amax()
    return (every if p == 0 else every**p).sum()


class _Gradients(NamedTuple):
    """Gradients of some parameters, as optimizers see them.

    Attributes:
        sharded: sharded gradients, by the process groups over which their norms are summed, with their transports.
        whole: gradients that every rank holds completely (NO_SHARD, ignored parameters).
        dtypes: of the gradients on any rank, including dtypes of which this rank holds none.
    """

    sharded: dict[tuple[Any, ...], tuple[list[Transport], list[torch.Tensor]]]
    whole: list[torch.Tensor]
    dtypes: set[torch.dtype]

    @classmethod
    def of(cls, model: Model, parameters: Iterable[torch.Tensor]) -> _Gradients:
        """The gradients of `parameters`, in units of `model` or outside of them."""
        found = cls({}, [], set())
        managed: set[int] = set()
        norm_axes = model.setup.norm_axes
        chosen = {id(parameter): parameter for parameter in parameters}
        for unit in model.units:
            for kind, handle in enumerate(unit.handles):
                managed.update(map(id, handle.parameters))
                if chosen.keys().isdisjoint(map(id, handle.face.holders)):
                    continue
                if handle.trainable_indices():
                    found.dtypes.add(handle.precision.grad)
                own = [] if handle.is_unsharded_at_rest else [unit.axes.transports_of(handle).gather]
                if unit.views[kind].extended:
                    for axes, grads in _by_axes(unit, kind, chosen.keys()):
                        found.over([*own, *axes]).extend(grads)
                    continue
                if handle in norm_axes:
                    own = norm_axes[handle]
                grads = found.whole  # `over`, without a call per unit
                if own:
                    key = (own[0].group.process_group,) if len(own) == 1 else tuple(a.group.process_group for a in own)
                    grads = found.sharded.setdefault(key, (own, []))[1]
                present = [p.grad for p in handle.face.holders if id(p) in chosen and p.grad is not None]
                grads.extend(map(handle.face.local_of, present) if handle.face.is_distributed else present)
        found.whole.extend([p.grad for key, p in chosen.items() if key not in managed and p.grad is not None])
        found.dtypes.update(map(attrgetter("dtype"), found.whole))
        return found

    def over(self, axes: list[Transport]) -> list[torch.Tensor]:
        """The list of gradients of which the ranks of `axes` hold different pieces; `whole` if there are no axes."""
        if not axes:
            return self.whole
        return self.sharded.setdefault(tuple(axis.group.process_group for axis in axes), (axes, []))[1]

    def norm(self, p: float, device: torch.device) -> torch.Tensor:
        """The norm of all these gradients, in float32 or float64. Collective over the groups of `sharded`."""
        wide = torch.float32 if self.dtypes.isdisjoint((torch.float64, torch.complex128)) else torch.float64
        total = _power_sum(self.whole, p, device, wide)
        for axes, grads in self.sharded.values():
            part = _power_sum(grads, p, device, wide)
            for axis in axes:
                # the maximum of a backend may drop a NaN
                part = axis.gather_now(part).amax() if math.isinf(p) else axis.all_reduce_now(part)
            total = torch.maximum(total, part) if math.isinf(p) else total + part
        return total if math.isinf(p) or p == 0 else total ** (1.0 / p)


def _by_axes(unit: Unit, kind: int, chosen: Container[int]) -> Iterator[tuple[list[Transport], list[torch.Tensor]]]:
    """The gradients of one handle, as optimizers see them, for parameters with `chosen` ids; each with the axes, in
    addition to those of the unit, over which it is split. [Note: parts of wholes]"""
    handle = unit.handles[kind]
    grads = handle.face.grads_of_leaves()
    for index, axes in enumerate(part_axes(unit, kind)):
        grad = grads[index] if grads and id(handle.face.holder_of(index)) in chosen else None
        yield [axis.transport for axis in axes if axis.splits], [] if grad is None else [grad]


@torch.no_grad()
def clip_grad_norm(
    model: Model, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale the gradients of `parameters`, as optimizers see them, by one factor on all ranks, so that their joint norm
    is at most `max_norm`; returns the norm before scaling.

    A sharded gradient counts once over its shard group, and over the ranks of tensor parallelism that split its
    parameter; a gradient that every rank holds counts once. Collective over these groups: one scalar each, with or
    without gradients. A norm that is not finite is so on all ranks; with `error_if_nonfinite` all of them then exchange
    the gradient that caused it.
    """
    check_bool("error_if_nonfinite", error_if_nonfinite)
    if stepping := optimizers_of(model).active:
        raise UsageError(
            f"clip_grad_norm_: {type(stepping[0]).__name__} steps during backwards, so gradients are gone before "
            "their norm is known. Run the backward, the clipping and the optimizer's own step() inside no_step() of "
            "the OptimizerInBackward, or clip each gradient separately, in a post-accumulate hook"
        )
    if not isinstance(max_norm, (int, float)) or isinstance(max_norm, bool):
        raise ConfigTypeError(f"max_norm: got {max_norm!r}. Accepted: a number")
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        raise ConfigTypeError(f"norm_type: got {norm_type!r}. Accepted: a number, or 'inf'") from None
    if math.isnan(p) or p < 0:
        raise ConfigValueError(f"norm_type: got {norm_type!r}. Accepted: 0, a positive number, or inf")
    found = _Gradients.of(model, parameters)
    norm = found.norm(p, model.resources.device.device)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        _refuse_norm(model, norm, p)
    every = [*chain.from_iterable(map(itemgetter(1), found.sharded.values())), *found.whole]
    if not every:
        warn(
            f"clip_grad_norm_: no parameter of rank {current_rank()} has a gradient; the norm counts only "
            "other ranks' gradients"
        )
    _scale(every, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm.to(max(map(torch.dtype.to_real, found.dtypes), key=attrgetter("itemsize"))) if found.dtypes else norm


def _scale(grads: Iterable[torch.Tensor], by: torch.Tensor) -> None:
    """Multiply `grads` by the scalar `by`, which is copied once to each device."""
    together, others = _by_device(grads)
    scales = {device: by.to(device) for device in {*together, *(grad.device for grad in others)}}
    for device, each in together.items():
        _torch.foreach_mul_(each, scales[device])
    for grad in others:
        grad.mul_(scales[grad.device])


def clips_over_ranks(torchs_own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.nn.utils.clip_grad_norm_`, with the norm over all ranks if any of the parameters is of a wrapped model and
    no DTensor; collective in this case. In all other cases `torchs_own`."""

    @functools.wraps(torchs_own)
    def clip_grad_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = set(map(id, given))
        units = {unit for model in registry.models for unit in model.units}
        # A wrapper inside another one had a model of its own before, which may be collected: look up each unit's now.
        found = {
            model_of(unit)
            for unit in units
            for handle in unit.handles
            if not (handle.face.is_distributed or ids.isdisjoint(map(id, handle.face.holders)))
        }
        if not found:
            return torchs_own(given, max_norm, norm_type, error_if_nonfinite, foreach)
        if len(found) > 1:
            raise UsageError(
                f"clip_grad_norm_: got parameters of {len(found)} wrapped models. Clip the gradients of one at a time, "
                "or wrap them as one model"
            )
        (model,) = found
        before_clipping(model)
        with model.agreement.collective_call("clip_grad_norm_()"):
            return clip_grad_norm(model, given, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    return clip_grad_norm_


def _refuse_norm(model: Model, norm: torch.Tensor, p: float) -> NoReturn:
    found = of_all_ranks(first_gradient(model.units), model.agreement, model.units)
    raise NonFiniteError(
        f"clip_grad_norm_: the norm of order {p:g} of all gradients is {float(norm)}: "
        f"{found or 'each gradient of the units is finite, so parameters outside of them cause it, or it is too large'}"
        ". No gradient was changed"
    )
