"""Full parameters for the user: summon them, write them back, or dissolve a unit.

Summoned parameters lie in memory of their own, in the master dtype, so that references to them stay readable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..base import _torch
from ..flat.faces import assign_grad
from ..flat.flat_param import FlatParamHandle
from ..flat.layout_views import full_views, shard_of
from ..flat.param_refs import ParamRef
from ..flat.states import IDLE, SUMMONED
from ..flat.views import SHOWS_UNSHARDED
from ..flat.write_tracker import share_counter
from ..guards.assignments import check_param_refs, pass_over, unaliased
from ..models.rest import collective_call, quiesce
from ..models.spread import own_axes
from ..models.walks import register_leaves
from ..runtime.model import model_of
from ..runtime.module_tree import put_at_rest
from ..runtime.unit import Unit
from ..transforms.extensions import transformed_in
from ..transports.blocking import all_reduce_now
from .consolidate import consolidated, gather_shard, is_first, scatter, store
from .named_param import refuse_rows_of_their_class
from .parts import broadcast_tensor


def _original_of(handle: FlatParamHandle, leaf: nn.Parameter) -> nn.Parameter:
    """The user's parameter for which `handle` has `leaf`."""
    return next(original for each, original in zip(handle.leaves, handle.face.originals, strict=True) if each is leaf)


def _gradient_shard(handle: FlatParamHandle) -> tuple[torch.Tensor, torch.Tensor]:
    """(the sharded gradient as one flat tensor, zero where there is none; which parameters have one, as 0/1)."""
    grads = handle.face.grads_of_leaves()
    dtype = next((grad.dtype for grad in grads if grad is not None), handle.precision.grad)
    flat = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.shard.device)
    present = torch.zeros(len(handle.leaves), dtype=torch.int32, device=handle.device)
    for index, (grad, piece) in enumerate(zip(grads, handle.at_rest.views_of(flat), strict=False)):
        if grad is not None:
            present[index] = 1
            piece.copy_(grad)
    return flat, present


class _SummonedHandle:
    """One handle's full parameters while the user has them."""

    def __init__(self, unit: Unit, kind: int, *, keep: bool, offload_to_cpu: bool, with_grads: bool) -> None:
        self.unit = unit
        self.kind = kind
        self.handle = unit.handles[kind]
        self.whole = self.handle.face.originals
        self.views = unit.views[kind]
        self.keep = keep
        handle = self.handle
        with torch.no_grad():
            self.flat = gather_shard(unit, kind)
            self.grads: list[torch.Tensor | None] | None = None
            if with_grads:
                shard, present = _gradient_shard(handle)
                unsharded = gather_shard(unit, kind, shard)
                all_reduce_now(unit.axes.transports_of(handle).gather, present, maximum=True)
                self.grad_dtype = unsharded.dtype
                views = full_views(unsharded.cpu() if offload_to_cpu else unsharded, handle.layout) if keep else []
                self.grads = [view if there else None for view, there in zip(views, present.tolist(), strict=False)]
            if offload_to_cpu:
                self.flat = self.flat.cpu() if self.flat.device.type != "cpu" else self.flat
        self.bytes = self.flat.numel() * self.flat.element_size()
        handle.tracker.add("summoned", self.bytes)
        self._sharded_grads: list[torch.Tensor | None] = []

    def show(self) -> None:
        """Let users see the full parameters, and their full gradients."""
        if self.keep:
            self._sharded_grads = [leaf.grad for leaf in self.whole]
            for leaf in self.whole:
                leaf.grad = None
            self.views.show_borrowed_views(full_views(self.flat, self.handle.layout))
            self.views.show_flat(self.flat[: self.handle.layout.numel])
            for leaf, grad in zip(self.whole, self.grads or [], strict=False):
                if grad is not None:
                    assign_grad(leaf, grad)

    def show_seen(self) -> None:
        """Let modules list the seen forms of parameters, if these differ from the stored ones. Precondition: `show`."""
        for each in transformed_in(self.views) if self.keep else ():
            whole = _original_of(self.handle, each.leaf)
            each.show(whole.detach(), whole.grad)

    def _seen(self, put: Mapping[int, nn.Parameter]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The value and the gradient of each parameter as users see it now: of the object that they have `put` in its
        place, of its seen form, or its own."""
        forms = {id(each.leaf): each.taken(_original_of(self.handle, each.leaf)) for each in transformed_in(self.views)}
        found = []
        for leaf, whole in zip(self.handle.leaves, self.whole, strict=True):
            if (held := put.get(id(leaf))) is not None:
                found.append((held.detach(), whole.grad if held.grad is None else held.grad))
            else:
                found.append(forms.get(id(leaf), (whole, whole.grad)))
        return found

    def hide(self, put: Mapping[int, nn.Parameter], *, writeback: bool, from_rank0: bool) -> list[str]:
        """Let users see the shard again, after copying this rank's piece back with `writeback`; returns messages about
        tensors that do not fit. `put`: what users have put in the places of parameters, by the ids of leaves.

        Collective if `from_rank0`.
        """
        handle = self.handle
        unlike = []
        with torch.no_grad():
            seen = self._seen(put) if self.keep else []
            if self.keep and writeback:
                # Replacements of a parameter count, too, not only in-place writes.
                unlike += self._take_flat()
                replaced = []
                views = full_views(self.flat, handle.layout)
                for spec, (value, _), view in zip(handle.layout.params, seen, views, strict=True):
                    if value.shape != view.shape:
                        unlike.append(f"{spec.name} of unit {self.unit.label}: {tuple(value.shape)}, not {spec.shape}")
                    elif value.data_ptr() != view.data_ptr() or value.stride() != view.stride():
                        replaced.append((view, unaliased(value, self.flat)))
                for view, value in replaced:
                    view.copy_(value)
            unsharded_grads = [grad for _, grad in seen] or [None for _ in self.whole]
            if self.keep:
                for leaf in self.whole:
                    leaf.grad = None
                self.views.show_again()
                for leaf, grad in zip(self.whole, self._sharded_grads, strict=True):
                    if grad is not None:
                        assign_grad(leaf, grad)
            if writeback:
                self.unit.kept.maybe_stale = True
                if from_rank0:
                    own = scatter(self.unit, self.kind, full_views(self.flat, handle.layout) if self.keep else None)
                else:
                    own = shard_of(self.flat, handle.layout, handle.rank)
                if not torch.equal(own.to(handle.shard.device), handle.shard):
                    handle.shard.copy_(own)
                if self.grads is not None:
                    self._write_grads(unsharded_grads, from_rank0=from_rank0)
        handle.tracker.remove("summoned", self.bytes)
        return unlike

    def _take_flat(self) -> list[str]:
        """Copy a user's replacement for the flat parameter's `.data`; returns messages if it does not fit."""
        flat, unsharded = self.handle.flat_param, self.flat[: self.handle.layout.numel]
        if flat.data_ptr() == unsharded.data_ptr():
            return []
        if flat.shape != unsharded.shape:
            return [f"the flat parameter of unit {self.unit.label}: {tuple(flat.shape)}, not {tuple(unsharded.shape)}"]
        unsharded.copy_(flat.detach())
        return []

    def _write_grads(self, unsharded: list[torch.Tensor | None], *, from_rank0: bool) -> None:
        """Copy this rank's part of the user's `unsharded` gradients back. Collective if `from_rank0`."""
        handle = self.handle
        layout = handle.layout
        present = torch.tensor([grad is not None for grad in unsharded], dtype=torch.int32, device=handle.device)
        if from_rank0:
            present = broadcast_tensor(own_axes([self.unit]), present, present.shape, present.dtype, handle.device)
            shard = scatter(self.unit, self.kind, unsharded, dtype=self.grad_dtype)
        else:
            shard = torch.zeros(layout.shard_numel, dtype=self.grad_dtype, device=handle.device)
            for index, grad in enumerate(unsharded):
                if grad is not None:
                    store(layout, handle.rank, shard, index, grad)
        for holder in handle.face.holders:
            holder.grad = None
        if there := frozenset(index for index, has_grad in enumerate(present.tolist()) if has_grad):
            # Zero in a flat parameter where the user has dropped it, if others are left.
            handle.face.add_grads(shard.to(handle.shard.device), there, {})


def _end_replaced(unit: Unit, *, takes: bool) -> tuple[dict[int, nn.Parameter], list[str]]:
    """Let modules hold the stored parameters again where the user replaced them. Returns the replacements by the ids of
    leaves, if `takes`, and messages about those whose values cannot be taken."""
    model_of(unit).setup.placed = False  # modules may hold parameters that are in no unit
    every = [views for each in (unit, *unit.owning_units) for views in each.views]
    extended = {param_ref for views in every for each in transformed_in(views) for param_ref in each.param_refs}
    changed = [each for each in ParamRef.changed((*unit.param_refs, *unit.shared_refs)) if each not in extended]
    put: dict[int, nn.Parameter] = {}
    refused = []
    try:
        if changed and takes:
            check_param_refs(unit, changed)
    except UsageError as error:
        takes = False
        refused.append(str(error))
    for param_ref in changed:
        held = param_ref.current
        param_ref.hold(param_ref.held)
        if not isinstance(held, nn.Parameter):
            continue
        pass_over(held, param_ref.path)
        if not takes:
            continue
        if held.is_meta or held.layout is not torch.strided:
            # All others are taken, so that this rank does not leave the waiting ones.
            found = "has no memory (meta)" if held.is_meta else f"is a {type(held).__name__} of {held.layout}"
            where = f"{param_ref.path!r} of unit {unit.label} was changed after wrapping"
            refused.append(f"{where}, and keeps its value: it {found}; expected dense values")
        else:
            put[id(param_ref.leaf)] = held
    return put, refused


def _check_summonable(unit: Unit, *, with_grads: bool) -> None:
    if unit.phase is SUMMONED:
        raise UsageError(
            f"summon_full_params() inside summon_full_params(): the parameters of unit {unit.label} are already "
            "unsharded"
        )
    if unit.phase is not IDLE or _torch.in_backward():
        raise UsageError(
            f"summon_full_params() inside a forward or backward (unit {unit.label} is in {unit.phase.value}); call "
            "it between iterations"
        )
    refuse_rows_of_their_class([unit], "summon_full_params()")
    if with_grads and any(grads.accumulation.window_open for grads in unit.grads):
        raise UsageError(
            f"summon_full_params(with_grads=True): the gradients of unit {unit.label} were accumulated under "
            "no_sync() and differ between ranks, so there is no whole gradient to show. Summon them after a backward "
            "outside of no_sync(), or leave with_grads out"
        )


def _run_summoned(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], called: Callable[..., Any]) -> Any:
    """Run `called` with the parameters that modules of `unit` show. No communication, except that of units inside that
    are not summoned."""
    if torch.is_grad_enabled():
        raise UsageError(
            f"unit {unit.label}: forward inside summon_full_params() would train on parameters that are written "
            "back later; leave the context first. Without gradients (torch.no_grad()) it may run there"
        )
    if any(views.mode is not SHOWS_UNSHARDED for each in (unit, *unit.owning_units) for views in each.views):
        raise UsageError(
            f"unit {unit.label}: forward inside summon_full_params(rank0_only=True), which gives this rank no "
            "whole parameters; leave the context first, or run it on rank 0 alone with all units summoned"
        )
    given = model_of(unit).forwards.given()
    given.args, given.kwargs = args, kwargs
    try:
        given.substitute(device=unit.resources.device.device, dtype=None)
        return called(*given.args, **given.kwargs)
    finally:
        given.ended(None)


@contextmanager
def summon(
    units: Sequence[Unit],
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Full parameters for the units' modules inside the context. Collective over their axes, on entry (and on exit
    with `writeback` and `rank0_only`)."""
    quiesce(units, check=partial(_check_summonable, with_grads=with_grads))
    with ExitStack() as undo:
        summoned = []
        with collective_call(units, f"summon_full_params({'with_grads=True' if with_grads else ''})"):
            for unit in units:
                for kind in range(len(unit.handles)):
                    summoned.append(
                        _SummonedHandle(
                            unit,
                            kind,
                            keep=is_first(unit.groups) or not rank0_only,
                            offload_to_cpu=offload_to_cpu,
                            with_grads=with_grads,
                        )
                    )
                    if not summoned[-1].keep and not writeback:
                        summoned[-1].flat = summoned[-1].flat.new_empty(0)
        for unit in units:
            unit.phase, unit.run_summoned = SUMMONED, _run_summoned
            undo.callback(setattr, unit, "phase", IDLE)
        for each in summoned:
            each.show()
        for unit in units:
            register_leaves(unit)
            undo.callback(put_at_rest, unit)
        for each in summoned:
            each.show_seen()
        unlike: list[str] = []
        try:
            yield
        finally:
            put: dict[int, nn.Parameter] = {}
            refused = list[str]()
            for unit in units:
                found, messages = _end_replaced(unit, takes=writeback and (is_first(unit.groups) or not rank0_only))
                put |= found
                refused += messages
            sends = writeback and rank0_only
            with collective_call(units, "the end of summon_full_params()") if sends else nullcontext():
                for each in summoned:
                    unlike += each.hide(put, writeback=writeback, from_rank0=rank0_only)
    if unlike:
        refused += ["parameters were given another shape inside it, so they keep their values: " + "; ".join(unlike)]
    if refused:
        raise UsageError(f"at the end of summon_full_params() {'; '.join(refused)}")


def unwrap(unit: Unit) -> nn.Module:
    """Give the unit's parameters their full values back and return its module. Collective over the shard
    axis.

    It undoes a wrap, for a constructor that fails after some units were made.
    """
    model_of(unit).setup.connect(unit)
    for kind, views in enumerate(unit.views):
        with consolidated(unit, kind) as whole:
            views.show_borrowed_views([view.clone() for view in whole])
            views.give_back()
            for original in views.handle.face.originals:  # it gets a counter of its own, as in a plain module
                share_counter([original])
    register_leaves(unit)
    for param_ref in unit.flat_refs:
        del param_ref.module.__dict__[param_ref.attribute]
    for handle, views, _ in unit.kinds:
        for extended in transformed_in(views):
            extended.dissolve(_original_of(handle, extended.leaf))
    return unit.entries.first
