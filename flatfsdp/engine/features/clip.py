"""The norm of all gradients of models, inside and outside of their units, and clipping by that norm.

[Note: torch's norms] `torch.nn.utils.clip_grad_norm_` and `get_total_norm` compute with the tensors of one process. For
shards each rank would scale by a factor of its own, so for shards these functions are executed here, over all ranks.
Programs have imported them by name before a model is sharded, so what is replaced is what these names call. They then
are collective; a rank that passes parameters without gradients takes part with zero, one that passes nothing does not.
A call with other tensors costs one comparison with the parameters of the live models, for which compiled code leaves
its graph. Norms that a program computes by itself (`p.grad.norm()`) stay those of a rank.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from ...api import check_bool
from ...errors import ConfigTypeError, ConfigValueError, NonFiniteError, UsageError, current_rank, warn
from ..agreement.agreement import agreement_of
from ..base import _dynamo, _torch
from ..base._dtensor import is_dtensor, locals_of
from ..comm.transport import Transport
from ..flat.flat_param import FlatParamHandle
from ..flat.states import SUMMONED
from ..guards.window_marks import open_windows
from ..models import param_registry as registry
from ..models.rest import before_norm, models_of, reduce_left
from ..models.spread import norm_axes, part_axes
from ..runtime.model import Model
from ..runtime.unit import Unit
from ..transports.blocking import all_reduce_now, gather_now
from .deterministic_sums import DeterministicSums
from .exact_sums import scale_for, side_by_side, sum_of_powers, value_of
from .nonfinite import first_gradient, of_all_ranks
from .optimizer_in_backward import optimizers_of

Grads = list[torch.Tensor]
_GRAD = attrgetter("grad")
COMPARED = 16  # different limits of the norm that ranks compare, of each model: a new one takes an exchange

_limits: weakref.WeakKeyDictionary[Model, set[float]] = weakref.WeakKeyDictionary()  # compared so far


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
    norms = [_norms(each, p, dtype).to(device) for each in together.values()]
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


def _norms(grads: Grads, p: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm of each of `grads`, which are nonempty and on one device; for p = inf, what has the same maximum."""
    if math.isinf(p) and grads[0].device.type == "cpu":
        # A fifth of the time of the norms, 8 instead of 40 ms for 12M elements.
        return torch.stack([end.to(dtype) for grad in grads for end in torch.aminmax(grad)]).abs()
    return torch.stack(_torch.foreach_norm(grads, p, dtype=dtype))


class _Gradients(NamedTuple):
    """Gradients of some parameters, as optimizers see them.

    Attributes:
        sharded: sharded gradients, by the process groups over which their norms are summed, with their transports. The
            same groups on all ranks, whichever parameters a rank has chosen.
        whole: gradients that every rank holds completely (NO_SHARD, ignored parameters).
        dtypes: of the gradients on any rank, including dtypes of which this rank holds none.
        summed: dtypes that the models have for gradients, the same on all ranks.
    """

    sharded: dict[tuple[Any, ...], tuple[list[Transport], list[torch.Tensor]]]
    whole: list[torch.Tensor]
    dtypes: set[torch.dtype]
    summed: set[torch.dtype]

    @classmethod
    def of(cls, models: Iterable[Model], chosen: Mapping[int, torch.Tensor]) -> _Gradients:
        """The gradients of the `chosen` parameters, by their ids, in units of `models` or outside of them."""
        found = cls({}, [], set(), set())
        managed: set[int] = set()
        own_grads = dict(zip(chosen, locals_of(map(_GRAD, chosen.values())), strict=True))
        spread = [(unit, axes) for model in models for axes in [norm_axes(model.setup.units)] for unit in model.units]
        for unit, axes_of in spread:
            for kind, handle in enumerate(unit.handles):
                managed.update(map(id, handle.parameters))
                found.summed.add(handle.precision.grad)
                if handle.trainable_indices() and not chosen.keys().isdisjoint(map(id, handle.face.holders)):
                    found.dtypes.add(handle.precision.grad)
                own = [] if handle.is_unsharded_at_rest else [unit.axes.transports_of(handle).gather]
                if unit.views[kind].extended:
                    for axes, grads in _by_axes(unit, kind, chosen):
                        found.over([*own, *axes]).extend(grads)
                    continue
                if handle in axes_of:
                    own = axes_of[handle]
                grads = found.whole  # `over`, without a call per unit
                if own:
                    key = (own[0].group.process_group,) if len(own) == 1 else tuple(a.group.process_group for a in own)
                    grads = found.sharded.setdefault(key, (own, []))[1]
                grads.extend([grad for p in handle.face.holders if (grad := own_grads.get(id(p))) is not None])
        found.add_whole(p.grad for key, p in chosen.items() if key not in managed and p.grad is not None)
        return found

    def add_whole(self, grads: Iterable[torch.Tensor]) -> None:
        """Add `grads` of parameters in no unit, which every rank holds completely."""
        added = list(grads)
        self.whole.extend(added)
        self.dtypes.update(map(attrgetter("dtype"), added))

    def in_their_dtype(self, norm: torch.Tensor) -> torch.Tensor:
        """`norm`, in the widest dtype of these gradients."""
        return norm.to(max(map(torch.dtype.to_real, self.dtypes), key=attrgetter("itemsize"))) if self.dtypes else norm

    def over(self, axes: list[Transport]) -> list[torch.Tensor]:
        """The list of gradients of which the ranks of `axes` hold different pieces; `whole` if there are no axes."""
        if not axes:
            return self.whole
        return self.sharded.setdefault(tuple(axis.group.process_group for axis in axes), (axes, []))[1]

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which norms are computed."""
        is_wide = not (self.dtypes | self.summed).isdisjoint((torch.float64, torch.complex128))
        return torch.float64 if is_wide else torch.float32

    def exact_norm(self, p: int, device: torch.device) -> torch.Tensor:
        """`norm` for p = 1 or 2, of which no bit depends on the order of ranks or elements. [Note: exact sums]"""
        every = [(axes, side_by_side(grads)) for axes, grads in (([], self.whole), *self.sharded.values())]
        largest = _power_sum(chain(*(grads for _, grads in every)), math.inf, device, torch.float64)
        for axis in chain(*(axes for axes, _ in every)):
            largest = gather_now(axis, largest).amax()  # of all that is added up over this axis
        scale, sums = scale_for(largest), []
        for axes, grads in every:
            sums.append(sum_of_powers(grads, p, scale))
            for axis in axes:
                all_reduce_now(axis, sums[-1])
        norm = value_of(torch.stack(sums).sum(0)) ** (1.0 / p) / scale
        return torch.where(largest.isfinite(), norm, largest).to(self.wide)

    def norm(self, p: float, device: torch.device) -> torch.Tensor:
        """The norm of all these gradients, in float32 or float64. Collective over the groups of `sharded`."""
        wide = self.wide
        total = _power_sum(self.whole, p, device, wide)
        for axes, grads in self.sharded.values():
            summed = _power_sum(grads, p, device, wide)
            for axis in axes:
                # the maximum of a backend may drop a NaN
                summed = gather_now(axis, summed).amax() if math.isinf(p) else all_reduce_now(axis, summed)
            total = torch.maximum(total, summed) if math.isinf(p) else total + summed
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
    models: Sequence[Model],
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale the gradients of `parameters`, as optimizers see them, by one factor on all ranks, so that their joint norm
    is at most `max_norm`; returns the norm before scaling. `models`: all those of which there are parameters.

    A sharded gradient counts once over its shard group, and over the ranks of tensor parallelism that split its
    parameter; a gradient that every rank holds counts once. Collective over these groups: one scalar each, with or
    without gradients, and 16 bytes more with deterministic sums. A norm that is not finite is so on all ranks; with
    `error_if_nonfinite` all of them then exchange the gradient that caused it.
    """
    call = "clip_grad_norm_"
    check_bool("error_if_nonfinite", error_if_nonfinite)
    if not isinstance(max_norm, (int, float)) or isinstance(max_norm, bool):
        raise ConfigTypeError(f"max_norm: got {max_norm!r}. Accepted: a number")
    p = _order_of(norm_type)
    for model in models:
        before_norm(model, f"{call}()")
        reduce_left(model)
    chosen = {id(parameter): parameter for parameter in parameters}
    with _collective_call(models, chosen.keys(), call, p, max_norm):
        found = _Gradients.of(models, chosen)
        norm = _norm_of(found, models, p, call, error_if_nonfinite=error_if_nonfinite)
        every = [*chain.from_iterable(map(itemgetter(1), found.sharded.values())), *found.whole]
        if not every:
            warn(
                f"clip_grad_norm_: no parameter of rank {current_rank()} has a gradient; the norm counts only "
                "other ranks' gradients"
            )
        _scale(every, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return found.in_their_dtype(norm)


def _order_of(norm_type: float) -> float:
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        raise ConfigTypeError(f"norm_type: got {norm_type!r}. Accepted: a number, or 'inf'") from None
    if math.isnan(p) or p < 0:
        raise ConfigValueError(f"norm_type: got {norm_type!r}. Accepted: 0, a positive number, or inf")
    return p


@contextmanager
def _collective_call(
    models: Iterable[Model], chosen: Set[int], call: str, p: float, limit: float | None = None
) -> Iterator[None]:
    """A context for a `call` that all ranks make about the gradients of parameters with the `chosen` ids, and about
    their norm of order `p`, on which the collectives depend, with the same `limit` of it.

    Raises:
        UsageError: these gradients are gone, or are not reduced.
        AgreementError: on every rank, if ranks make other calls.
    """
    with ExitStack() as calls:
        for model in models:
            if stepping := optimizers_of(model).active:
                raise UsageError(
                    f"{call}: {type(stepping[0]).__name__} steps during backwards, so gradients are gone before "
                    "their norm is known. Run the backward, the clipping and the optimizer's own step() inside "
                    "no_step() of the OptimizerInBackward, or clip each gradient by value, in a post-accumulate hook"
                )
            if (sums := model.observers.find(DeterministicSums)) is not None:
                sums.check_complete(call)
            for window in open_windows(model):
                if window.is_stepped_by(chosen):
                    raise UsageError(
                        f"{call}: the gradients were accumulated under no_sync(), and no backward has reduced them, so "
                        ".grad shows parts of this rank's own sums. Run the last backward outside of no_sync(), under "
                        "fully_shard after set_requires_gradient_sync(True), and make this call after it"
                    )
            given = [] if p == 2 else [f"norm_type={p:g}"]
            if limit is not None:
                known = _limits.setdefault(model, set())
                if len(known) < COMPARED:
                    known.add(float(limit))
                # One that differs in each step would take an exchange in each.
                given.insert(0, f"max_norm={float(limit)!r}" if limit in known else "another max_norm")
            calls.enter_context(model.agreement.collective_call(f"{call}({', '.join(given)})"))
        yield


def _norm_of(
    found: _Gradients, models: Sequence[Model], p: float, call: str, *, error_if_nonfinite: bool
) -> torch.Tensor:
    device = models[0].resources.device.device
    deterministic = [each.observers.find(DeterministicSums) is not None for each in models]
    if not math.isinf(p) and any(deterministic):
        if not all(deterministic):
            raise UsageError(
                f"{call}: some of these models have deterministic_sums=True, and others not, so the joint norm would "
                "depend on the number of ranks. Take the norm of each model, or set it for all"
            )
        if p not in (1, 2):
            raise UsageError(
                f"{call}: norm_type {p:g} with deterministic_sums=True, which supports 1, 2 and inf. Use one of these"
            )
        norm = found.exact_norm(int(p), device)
    else:
        norm = found.norm(p, device)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        culprits = [
            of_all_ranks(first_gradient(each.units), agreement_of(each.agreement), each.units) for each in models
        ]
        none = "each gradient of the units is finite, so parameters outside of them cause it, or it is too large"
        raise NonFiniteError(
            f"{call}: the norm of order {p:g} of all gradients is {float(norm)}: "
            f"{'; '.join(filter(None, culprits)) or none}. No gradient was changed"
        )
    return norm


def _scale(grads: Iterable[torch.Tensor], by: torch.Tensor) -> None:
    """Multiply `grads` by the scalar `by`, which is copied once to each device."""
    together, others = _by_device(grads)
    scales = {device: by.to(device) for device in {*together, *map(attrgetter("device"), others)}}
    for device, each in together.items():
        _torch.foreach_mul_(each, scales[device])
    for grad in others:
        grad.mul_(scales[grad.device])


# -- torch's functions -------------------------------------------------------------------------------------------------


@functools.cache
def serve_torchs_norms() -> None:
    """Let torch's functions of gradient norms see the shards of all ranks, once per process. [Note: torch's norms]"""
    try:
        cells = [_torch.implementation_of(function) for function in (nn.utils.clip_grad_norm_, nn.utils.get_total_norm)]
    except AttributeError:
        warn(
            f"clip_grad_norm_ and get_total_norm in torch.nn.utils, of torch {torch.__version__} or replaced by a "
            "library, cannot be made to see the shards of other ranks: each rank would scale by a factor of its own. "
            "Call model.clip_grad_norm_() of the outermost FullyShardedDataParallel"
        )
        return
    for cell, made in zip(cells, (_clips, _total), strict=True):
        cell.cell_contents = made(cell.cell_contents)


def _clips(torchs_own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.nn.utils.clip_grad_norm_`; `torchs_own` for parameters of which this rank has the whole."""

    @functools.wraps(torchs_own)
    def clip_grad_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        _leave_graph()
        given, owners = _listed(parameters), _owners()
        models = _models_among(given, owners)
        if not models:
            return torchs_own(given or parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        given = [owners[id(each)].holder if id(each) in owners else each for each in given]
        return clip_grad_norm(models, given, float(max_norm), norm_type, error_if_nonfinite=error_if_nonfinite)

    return clip_grad_norm_


def _total(torchs_own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.nn.utils.get_total_norm`; `torchs_own` for tensors that are no gradients of shards."""

    @functools.wraps(torchs_own)
    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        _leave_graph()
        given, owners, call = _listed(tensors), _owners(), "get_total_norm"
        holders = {id(grad): each.holder for each in owners.values() if (grad := each.holder.grad) is not None}
        chosen = {id(holder): holder for each in given if (holder := holders.get(id(each))) is not None}
        for each in given:
            if (owner := owners.get(id(each))) is not None and owner.is_split:
                raise UsageError(
                    f"{call}: got parameters of unit {owner.unit.label}, which show this rank's shards. Expected "
                    "gradients; compute norms of parameters inside summon_full_params()"
                )
        models = _models_among(chosen.values(), owners)
        if not models:
            return torchs_own(given, norm_type, error_if_nonfinite, foreach)
        p = _order_of(norm_type)
        for model in models:
            before_norm(model, f"{call}()")
        with _collective_call(models, chosen.keys(), call, p):
            found = _Gradients.of(models, chosen)
            found.add_whole(each for each in given if id(each) not in holders)
            norm = _norm_of(found, models, p, call, error_if_nonfinite=error_if_nonfinite)
            return found.in_their_dtype(norm)

    return get_total_norm


def _leave_graph() -> None:
    """End a graph that torch.compile traces: which models are alive, and which tensors are theirs, is no constant."""
    if torch.compiler.is_compiling():
        _dynamo.stay_out_of_graphs()


def _listed(given: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else list(given)


class _Owner(NamedTuple):
    """Where a parameter that optimizers see belongs."""

    holder: nn.Parameter
    unit: Unit
    handle: FlatParamHandle

    @property
    def is_split(self) -> bool:
        """Whether it shows the shard of this rank now."""
        return not (self.handle.is_unsharded_at_rest or self.unit.phase is SUMMONED)


def _owners() -> dict[int, _Owner]:
    """The parameters that optimizers see, by their ids, except DTensors, of which torch takes the norm over ranks, in
    an order that depends on them; also by the ids of private leaves, which modules list instead of them while they are
    unsharded."""
    return {
        id(each): _Owner(holder, unit, handle)
        for model in registry.models
        for ours in (model.observers.find(DeterministicSums) is not None,)
        for unit in model.units
        for handle in unit.handles
        if ours or not is_dtensor(handle.face.holders[0])
        for face in (handle.face,)
        for listed in (face.holders, handle.leaves if face.originals_get_grads else ())
        for each, holder in zip(listed, face.holders, strict=False)
    }


def _models_among(parameters: Iterable[torch.Tensor], owners: Mapping[int, _Owner]) -> list[Model]:
    """The models of `parameters`, in their order; [] if torch's own function does what is right for them."""
    units = [owner.unit for each in parameters if (owner := owners.get(id(each))) is not None]
    return [] if all(unit.phase is SUMMONED for unit in units) else models_of(units)
