"""Detection of `torch.nn.utils.clip_grad_norm_` on shards, with a different norm on each rank: one warning per job.

The call itself cannot be observed, so its effect is ([Note: local norms]): a sample of gradient elements is kept at the
end of a backward, and compared with the same elements when an optimizer that holds them steps.

[Note: local norms] `torch.nn.utils.clip_grad_norm_` computes the norm of the tensors of one process. For shards it
differs between ranks, so that each rank multiplies its gradients by a different factor. The effect: on every rank,
elements of several sizes have decreased by the same factor; these factors differ between ranks, although the ranks hold
pieces of one parameter, or although the resulting norms are equal (to the requested one). Both are needed: a program
may scale each parameter by its own factor, so that ranks with different parameters differ, too. Factors whose ratio is
a power of two come from loss scaling.

Other changes are not reported: clipping by value, noise, gradients that were set to zero.

[Note: sampled steps] Gradients are sampled in the first `FIRST` backwards that reduce, then in one of `RHYTHM`: some
views, two small copies, and one norm of this rank's gradients, for at most `MOST` flat parameters. On an accelerator
these are a few more kernels per sampled step; their results are copied to page-locked memory, and the watch ([Note:
watch]) polls for them, so that the host does not wait. The watch also writes this rank's finding to the store, where
the next rank compares it with its own: two requests per rank and sampled step, no collective. Other backwards and steps
cost one or two calls each.
"""

from __future__ import annotations

import functools
import json
import math
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ...errors import warn
from ..base.events import Observer
from ..base.foreign_text import parse
from ..comm.axes import Axis
from ..device.streams import Device
from ..flat.flat_param import FlatParamHandle
from ..runtime.backward import Backward
from ..runtime.model import Model
from ..runtime.optimizer_hooks import looking
from ..watchdog.process_exit import at_end
from ..watchdog.regions import current_watch
from ..watchdog.store import StoreClient
from .optimizer_in_backward import optimizers_of

FIRST, RHYTHM = 4, 64
MOST = 16  # sampled flat parameters, with three parameters each
ELEMENTS = 4  # per parameter
PATIENCE = 10.0  # seconds to wait for the finding of the previous rank
LEAST = 1e-4  # relative difference up to which factors count as equal
SMALLEST = 1e-30  # factor of a norm
REPORTED = "clipped by themselves"  # key in the store, for the rank that warns for the whole job

_found: list[str] = []  # findings of the watch, for warnings by the main thread


@functools.cache
def _warn_at_end() -> None:
    """Warn of findings after the last step, too."""
    at_end(lambda error: _warn())


def _warn() -> None:
    while _found:
        warn(_found.pop())


class Scaling(NamedTuple):
    """One `factor` by which a rank multiplied its gradients.

    Attributes:
        norm: of its gradients afterwards.
        numbers: of the parameters in its sample.
    """

    factor: float
    norm: float
    numbers: frozenset[int]


def tolerance(eps: float) -> float:
    """The relative difference up to which factors of gradients with this machine epsilon count as equal."""
    return max(LEAST, 2 * eps)


def one_factor(pairs: Iterable[tuple[float, float]], *, within: float, tiny: float) -> float | None:
    """The factor of all `pairs`, if it is a single one, not more than 1 and not 0; None otherwise.

    `pairs`: an element before and after. Elements below `tiny` are ignored; elements of a single size give None.
    """
    factors = []
    sizes = []
    for before, after in pairs:
        if not math.isfinite(before) or not math.isfinite(after) or (before == 0) != (after == 0):
            return None
        if min(abs(before), abs(after)) >= tiny:
            factors.append(after / before)
            sizes.append(abs(before))
    if not sizes or max(sizes) < min(sizes) * (1 + 10 * within):
        return None
    low, high = min(factors), max(factors)
    is_one = low > 0 and high <= 1 + within and high - low <= within * high
    return (low + high) / 2 if is_one else None


def are_apart(one: Scaling, other: Scaling, *, within: float) -> bool:
    """Whether these ranks have clipped by different norms. [Note: local norms]"""
    ratio = one.factor / other.factor
    if abs(ratio / 2 ** round(math.log2(ratio)) - 1) <= 2 * within:
        return False
    both_clipped = max(one.factor, other.factor) < 1 - within
    same_norm = both_clipped and math.isclose(one.norm, other.norm, rel_tol=2 * within)
    return same_norm or not one.numbers.isdisjoint(other.numbers)


class GradientPiece(NamedTuple):
    """This rank's piece of one parameter: `numel` elements from `start` on in the gradient of `parameter`.

    Attributes:
        number: of the parameter in the model, the same on all ranks.
        of: the number of elements of that gradient.
    """

    number: int
    parameter: torch.Tensor
    start: int
    numel: int
    of: int

    def elements(self) -> torch.Tensor | None:
        """A view of some elements of its gradient; None without a gradient, or for one that is not plain."""
        grad = self.parameter.grad
        if grad is None or not _is_plain(grad) or grad.numel() != self.of:
            return None
        piece = grad.detach().reshape(-1)[self.start : self.start + self.numel]
        return piece[:: max(1, self.numel // ELEMENTS)][:ELEMENTS]


class GradientSample(NamedTuple):
    """Elements of gradients at the end of a backward, concatenated piece by piece."""

    step: int
    pieces: list[GradientPiece]
    sizes: list[int]
    values: torch.Tensor


class LocalClipping(Observer):
    """Samples the gradients of one model. [Note: sampled steps]"""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._steps = 0  # backwards that reduced
        self._due = False
        self._pieces: list[GradientPiece] | None = None
        self._group: Axis | None = None  # that shards the parameters
        self._sample: GradientSample | None = None

    def backward_ended(self, backward: Backward) -> None:
        """Take a sample, if one is due."""
        model = self._model()
        if model is None or not backward.sync:
            return
        self._steps += 1
        self._due = self._due or self._steps <= FIRST or self._steps % RHYTHM == 0
        if not self._due or backward.deferred:
            return
        if self._pieces == [] or not model.agreement.peers.scope:  # nothing to compare, or no other rank
            self._due = False
        elif not optimizers_of(model).active:
            self._take(model)

    def _take(self, model: Model) -> None:
        if self._pieces is None:
            self._group, self._pieces = _pieces_of(model)
            looking.add(weakref.ref(self, looking.discard))
            _warn_at_end()
        found = [(piece, values) for piece in self._pieces if (values := piece.elements()) is not None]
        self._sample = None
        if found:
            sizes = [values.numel() for _, values in found]
            values = torch.cat([values for _, values in found])
            self._sample = GradientSample(self._steps, [piece for piece, _ in found], sizes, values)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the sample, if `optimizer` is the first since it was taken that holds parameters of this model."""
        if _found:
            _warn()
        model, sample = self._model(), self._sample
        if model is None or sample is None:
            return
        held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        if any(id(parameter) in held for parameter in model.steppable):
            self._sample, self._due = None, False
            self._compare(model, sample, held)

    def _compare(self, model: Model, sample: GradientSample, held: dict[int, torch.Tensor]) -> None:
        before = zip(sample.pieces, sample.values.split(sample.sizes), strict=True)
        pairs = [
            (piece, old, new)
            for piece, old in before
            if id(piece.parameter) in held and (new := piece.elements()) is not None and new.dtype == old.dtype
        ]
        if not pairs or self._group is None:
            return
        pieces, olds, news = zip(*pairs, strict=True)
        grads = [each.grad for each in held.values() if each.grad is not None and _is_plain(each.grad)]
        grads = [grad for grad in grads if grad.device == olds[0].device]
        infos = [torch.finfo(dtype) for dtype in {grad.dtype for grad in grads}]
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm(grads)
            values = torch.cat([*olds, *news, norm.reshape(1)])
        finding = SampleOnHost(
            sample.step,
            frozenset(piece.number for piece in pieces),
            *model.resources.device.to_host(values),
            model.resources.device,
            tolerance(max(info.eps for info in infos)),
            max(info.tiny for info in infos),
        )
        watch = current_watch()
        steps = _comparison(watch.store, f"{model.agreement.peers.scope}/scaled", self._group, finding)
        watch.run(lambda: next(steps, True) is not None)


class SampleOnHost(NamedTuple):
    """The elements of a sample, then and now, on their way to the host.

    Attributes:
        numbers: of the sampled parameters.
        values: elements before, the same after, and the norm of all gradients.
        arrived: an event of `device`, after which the host may read `values`.
        within, tiny: the tolerance of factors, and the smallest element that counts.
    """

    step: int
    numbers: frozenset[int]
    values: torch.Tensor
    arrived: Any
    device: Device
    within: float
    tiny: float

    @property
    def is_there(self) -> bool:
        """Whether the host may read `values`."""
        return self.device.is_past(self.arrived)

    def scaling(self) -> Scaling | None:
        """The scaling of this rank's gradients, if it has a single factor."""
        *elements, norm = self.values.tolist()
        count = len(elements) // 2
        pairs = zip(elements[:count], elements[count:], strict=True)
        factor = one_factor(pairs, within=self.within, tiny=self.tiny)
        return None if factor is None else Scaling(factor, norm, self.numbers)


def _comparison(store: StoreClient, key: str, group: Axis, sample: SampleOnHost) -> Iterator[None]:
    """Compare the finding of this rank with that of the previous rank; yields while either is not available."""
    deadline = time.monotonic() + PATIENCE
    while not sample.is_there:
        yield
    mine, rank, before = sample.scaling(), group.ranks[group.rank], group.ranks[group.rank - 1]
    has_norm = mine is not None and math.isfinite(mine.norm)
    found = [mine.factor, mine.norm, sorted(mine.numbers)] if mine is not None and has_norm else []
    store.post(f"{key}/{rank}", json.dumps([sample.step, *found]))
    while mine is not None and group.rank and time.monotonic() <= deadline:
        match parse(store.read(f"{key}/{before}")):
            case [int(step), float(factor), float(norm), list(numbers)] if step == sample.step:
                other = Scaling(factor, norm, frozenset(number for number in numbers if isinstance(number, int)))
                claim = f"{key}/{rank} in step {step}"
                # The store may contain any number.
                is_apart = SMALLEST < factor < 2 and are_apart(mine, other, within=sample.within)
                if is_apart and store.set_if_absent(REPORTED, claim) == claim:
                    _found.append(
                        "ranks clip their gradients by different norms: between a backward and the optimizer's step "
                        f"rank {before} multiplied its gradients by {factor:.4g}, rank {rank} by {mine.factor:.4g}, "
                        "so the step has a different direction. torch.nn.utils.clip_grad_norm_() sees only the shards "
                        "of one rank: call model.clip_grad_norm_() of the outermost FullyShardedDataParallel instead, "
                        "on all ranks"
                    )
                return
            case [int(step), *_] if step >= sample.step:
                return
        yield


def _pieces_of(model: Model) -> tuple[Axis | None, list[GradientPiece]]:
    """The axis that shards the sampled parameters, and this rank's pieces. All ranks select the same handles."""
    numbered: list[tuple[int, FlatParamHandle]] = []
    group: Axis | None = None
    count = 0
    for unit in model.units:
        for handle in unit.handles:
            if not (handle.is_unsharded_at_rest or handle.options.packed or handle.face.is_distributed):
                axis = unit.axes.of(handle).shard
                group = group or axis
                if axis.ranks == group.ranks:
                    numbered.append((count, handle))
            count += len(handle.leaves)
    pieces = []
    for first, handle in numbered[:: math.ceil(len(numbered) / MOST) or 1]:
        owned = handle.layout.owned(handle.rank)
        # The parameters at the ends of a shard may have pieces on other ranks, too.
        for place in sorted({0, len(owned) // 2, len(owned) - 1}) if owned else ():
            each = owned[place]
            numel = each.in_shard.numel
            if not handle.face.is_flat:
                holder = handle.face.holder_of(each.index)
                pieces.append(GradientPiece(first + each.index, holder, 0, numel, numel))
            else:
                of = handle.layout.shard_numel
                pieces.append(GradientPiece(first + each.index, handle.flat_param, each.in_shard.start, numel, of))
    return group, pieces


def _is_plain(grad: torch.Tensor) -> bool:
    return type(grad) is torch.Tensor and grad.layout is torch.strided and grad.is_floating_point()
