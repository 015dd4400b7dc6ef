"""Forwards without gradients that gather nothing: for generation and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ...errors import UsageError
from ..base import _torch
from ..flat.sources import DEVICE
from ..flat.states import SUMMONED
from ..runtime.model import Model, model_of
from ..runtime.module_tree import units_in
from ..runtime.rest import collective_call, free_unsharded, models_of, quiesce
from ..runtime.unit import Unit
from .persistent_params import HandleRef, budget, persistence_of, persistent_params_of


@contextmanager
def inference(model: nn.Module, max_bytes: int | None = None) -> Iterator[None]:
    """A context for generation and evaluation: parameters are gathered once, at its beginning, and kept until its end.

    Forwards inside are under `torch.no_grad()`, give the same results, and gather only what `max_bytes` left out. Where
    all is kept they communicate nothing, and ranks may run different numbers of them. Between forwards parameters show
    shards, as always. Parameters are not to be changed inside; call `model.eval()` before, if at all. Collective at its
    beginning and, unless an exception ends it, at its end.

    Args:
        model: a wrapper, or any module with wrappers inside.
        max_bytes: how many bytes of unsharded parameters each rank keeps, besides what `keep_frozen_unsharded` does;
            None for all. Flat parameters are taken in the order of modules, parents last, as far as that reaches, and
            what does not fit is left out: ranks then run as many forwards, as always.

    Raises:
        ConfigTypeError, ConfigValueError: no such number.
        UsageError: nothing in `model` is wrapped; inside itself, a forward, a backward or `summon_full_params()`; for a
            forward with gradients, a backward, or a forward after parameters were written to, inside.
        AgreementError: ranks do different things.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> model = flatfsdp.FullyShardedDataParallel(torch.nn.Linear(2, 1))
        >>> with flatfsdp.inference(model):
        ...     model(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """
    budget("inference", max_bytes)
    units = units_in(model)
    if not units:
        raise UsageError(
            f"inference(): no module in {type(model).__name__} is wrapped by FullyShardedDataParallel. Wrap the model "
            "first, and pass the wrapper"
        )
    roots = models_of(units)
    for unit in units:
        _check_idle(unit)
    with ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        for root in roots:
            undo.callback(_end, root)
        _begin(roots, units, max_bytes)
        yield
    with collective_call(units, "the end of inference()"):
        pass


def _check_idle(unit: Unit) -> None:
    where = None
    if _torch.in_backward() or model_of(unit).iteration.in_forward:
        where = "a backward" if _torch.in_backward() else "a forward"
    elif unit.phase is SUMMONED:
        where = "summon_full_params()"
    elif persistent_params_of(model_of(unit)).pinned is not None:
        where = "inference()"
    if where is not None:
        raise UsageError(f"inference() of unit {unit.label} was entered inside {where}; leave that first")


def _begin(roots: list[Model], units: list[Unit], max_bytes: int | None) -> None:
    refs = _chosen(units, max_bytes)
    chosen = f"inference(max_bytes={max_bytes}), {len(refs)} flat parameters"
    quiesce(units, frees=True)
    with collective_call(units, chosen, always=True):
        for root in roots:
            root.resources.streams.unshard.follow_compute()
            persistent_params_of(root).pin(root, [ref for ref in refs if model_of(ref.unit) is root])
            root.agreement.forwards_are_silent = all(
                HandleRef(unit, kind) in refs
                for unit in root.units
                if unit.groups.shard.size > 1
                for kind in range(len(unit.handles))
            )


def _end(root: Model) -> None:
    if persistent_params_of(root).pinned is None:
        return
    root.agreement.forwards_are_silent = False
    free_unsharded(root)
    persistent_params_of(root).unpin(root)
    for unit in root.units:
        unit.kept.by_choice = False
    root.resources.limiter.free_all()


def _chosen(units: list[Unit], max_bytes: int | None) -> list[HandleRef]:
    """What is kept, within the budget."""
    left = budget("inference", max_bytes)
    chosen = []
    for unit in units:
        for kind, handle in enumerate(unit.handles):
            if handle.is_shard_in(unit.dtype_of(handle)):
                continue
            is_kept = persistence_of(unit, handle) is DEVICE
            size = 0 if is_kept else handle.unsharded_bytes
            if size <= left:
                left -= size
                chosen.append(HandleRef(unit, kind))
    return chosen
