"""What the owner of a wrapper may set of its schedule while training goes on, under FSDP2's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from ...api import BackwardPrefetch, check_bool
from ...errors import ConfigValueError, UsageError, refuse_type, refuse_value
from ..base import _torch
from ..config.schedule_options import reshard_choices
from ..config.unit_options import PrefetchTargets
from ..device.streams import Device
from ..features.persistent_params import keep_frozen
from ..flat.states import IDLE, SUMMONED
from ..runtime import rest
from ..runtime.model import model_of
from ..runtime.module_tree import units_at, units_in
from ..runtime.rest import check_outside
from ..runtime.unit import Unit
from .gradients_api import GradientControls


class UnshardHandle:
    """A gather on its way: what `unshard(async_op=True)` returns."""

    _unit: Unit

    def wait(self) -> None:
        """Wait until the parameters are whole. At no cost if they are, or have been freed meanwhile."""
        with model_of(self._unit).agreement.waiting(f"unshard() of unit {self._unit.label}"):
            for each in (*self._unit.owning_units, self._unit):
                if each.is_unsharded and each.phase is IDLE:
                    each.wait_unshard()
                    each.track_writes(described_as_unsharded=True)


class ScheduleControls(GradientControls):
    """Methods of the wrapper that change when it communicates and when it gives memory back. [Note: schedule]

    They hold until they are changed again, and in copies and pickles of a model. Every rank sets the same; the next
    forward or backward compares it.
    """

    _unit: Unit

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this wrapper's parameters before its forward does; not those of wrappers inside.

        They stay whole for that forward, or until the end of the forward or backward in which they are not used. If any
        rank writes to its shards in the meantime, the forward gathers again. The unsharded tensors are copies: the
        forward refuses writes to them, and other tensors in the place of their `.data` or `.grad`. Between a forward
        and its backward it serves a loss that takes parameters directly, of a wrapper that the forward did not call;
        their gradients are reduced with the others. Collective over the shard group; every rank calls it at the same
        point, between iterations or inside the forward of an outer wrapper.

        Args:
            async_op: whether to return at once, with a handle; else the parameters are whole, in their own shapes, when
                it returns, and it returns None. The forward waits on its own.

        Raises:
            ConfigTypeError: `async_op` is no bool.
            UsageError: inside a backward, or inside `summon_full_params()`.
            AgreementError: ranks do different things.
        """
        check_bool("unshard: async_op", async_op)
        unit = self._unit
        if unit.phase is SUMMONED or _torch.in_backward():
            where = "inside a backward" if _torch.in_backward() else "inside summon_full_params(), where it is whole"
            raise UsageError(f"unshard() of unit {unit.label} was called {where}; call it between iterations")
        rest.unshard(unit)
        handle = UnshardHandle()
        handle._unit = unit
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this wrapper's whole parameters; not those of wrappers inside. Every rank calls it at the same point.

        A backward that reads them gathers them again, over all ranks of the shard group.

        Raises:
            UsageError: inside the wrapper's forward, inside a backward or `summon_full_params()`, or after a backward
                with `create_graph=True`.
            AgreementError: ranks do different things.
        """
        if _torch.in_backward():
            raise UsageError(f"reshard() of unit {self._unit.label} was called inside a backward; call it after that")
        rest.reshard(self._unit)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the next backwards reduce gradients, as `no_sync()` does for a whole model and a while.

        Without it whole gradients add up, in the memory that they take, until a backward that reduces them.

        Args:
            requires_gradient_sync: False to add up.
            recurse: whether for all wrappers inside as well.

        Raises:
            ConfigTypeError: an argument is no bool.
            UsageError: inside a forward or a backward.
        """
        self._set(recurse, "requires_gradient_sync", requires_gradient_sync, "reduce", "all_reduce")

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether the next backwards reduce gradients over replicas as well, where parameters are replicated.

        Without it their sums over the shard group add up, one shard in size, until a backward that goes on with all of
        them. Until then `.grad` is as it was before, and `zero_grad()` does not reach what has added up.

        Args:
            requires_all_reduce: False to add up. `set_requires_gradient_sync` sets it, too.
            recurse: whether for all wrappers inside as well.

        Raises:
            ConfigTypeError: an argument is no bool.
            UsageError: inside a forward or a backward.
        """
        self._set(recurse, "requires_all_reduce", requires_all_reduce, "all_reduce")

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of this wrapper's gradients over all ranks is divided by, in place of the number of ranks.

        Wrappers inside are not meant.

        Args:
            factor: a positive number.

        Raises:
            ConfigTypeError, ConfigValueError: no such number.
            UsageError: inside a forward or a backward; the model has a communication hook, which does the scaling.
        """
        method = "set_gradient_divide_factor"
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            refuse_type(f"{method}: factor", factor, "a number")
        if not 0 < factor < math.inf:
            refuse_value(f"{method}: factor", factor, "a positive number")
        check_outside(self._unit, method)
        if self._unit.options.comm_hook is not None:
            raise UsageError(
                f"{method} of unit {self._unit.label}: the model has a communication hook, which scales gradients. "
                "Divide by the factor there"
            )
        model_of(self._unit).setup.set_schedule(self._unit, divide_by=float(factor))

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None) -> None:
        """Call `hook(total)` on every sum of this wrapper's gradients, for example to reduce it further.

        `total` has this rank's shard of the sum over all ranks of the wrapper's groups, 1-D in the reduce dtype and not
        divided yet (with a communication hook: what that left, or its mean over replicas); the hook changes it in
        place. Hooks run in the same order on every rank, once per flat gradient in each backward that reduces: where
        parameters lie on several meshes, on the sum of each mesh, so that one that communicates has to suit them all.
        Copies of a model have copies of the hook; pickles do not have it, and warn.

        Args:
            hook: a callable that returns None, or what has a `wait()`; None to take the last one away.
            stream: where it runs, for parameters on an accelerator that are not replicated; None for the stream of the
                backward.

        Raises:
            ConfigTypeError, ConfigValueError: no callable; a stream where there is none, or of a hybrid.
            UsageError: inside a forward or a backward.
        """
        method, unit = "set_all_reduce_hook", self._unit
        if hook is not None and not callable(hook):
            refuse_type(f"{method}: hook", hook, "a callable that takes a tensor, or None")
        device = unit.resources.device
        replicated = any(groups.replicate is not None for groups in unit.axes.all)
        if stream is not None and (replicated or not device.has_streams):
            refuse_value(f"{method}: stream", stream, "None, unless on an accelerator and without replicas")
        check_outside(unit, method)
        if hook is not None and stream is not None:
            hook = _on_stream(hook, stream, device)
        model_of(unit).setup.set_options(unit, all_reduce_hook=hook)

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Whether parameters are freed between a forward and its backward, in place of the strategy's choice.

        True also for the outermost wrapper, which otherwise stays whole until its backward; with False parameters stay
        whole after a forward without gradients, too, until a backward or for as long as nobody writes to them: several
        evaluations gather once.

        A number n is between the two: n ranks in a row keep the parameters among them, 1/n each, in the dtype of
        computation, and the backward gathers them there, often on one host. The ranks of the shard group are cut into
        such rows in their order; the next forward makes process groups for them, once for each n. What is kept is
        copied, and freed as the backward has gathered it; a second backward of the same graph gathers over the whole
        shard group.

        Args:
            reshard_after_forward: False saves a gather in backward and takes the memory of whole parameters. A number
                divides that of the shards: 1 means False, that of all shards True.
            recurse: whether for all wrappers inside as well.

        Raises:
            ConfigTypeError: an argument is neither bool nor, for the first, int.
            ConfigValueError: a number that does not divide the number of shards, in a wrapper that is meant.
            UsageError: inside a forward or a backward.
        """
        method, name = "set_reshard_after_forward", "reshard_after_forward"
        if not isinstance(reshard_after_forward, int):
            refuse_type(f"{method}: {name}", reshard_after_forward, "True, False, or a number of ranks")
        units = self._meant(method, recurse)
        options = [
            reshard_choices(
                f"{method}: {name}, of a {unit.entries.class_name}",
                reshard_after_forward,
                shards=(groups.shard.size for groups in unit.axes.all),
            )
            for unit in units
        ]
        for unit, choice in zip(units, options, strict=True):
            model_of(unit).setup.set_schedule(unit, reshard_after_forward=choice)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after a backward, in place of the strategy's choice.

        With False, parameters stay whole between microbatches, which then gather nothing. Once an optimizer has written
        to the shards of any rank, the next forward gathers all that was kept again.

        Args:
            reshard_after_backward: False saves gathers in the next forward and takes the memory of whole parameters.
            recurse: whether for all wrappers inside as well.

        Raises:
            ConfigTypeError: an argument is no bool.
            UsageError: inside a forward or a backward.
        """
        self._set(recurse, "reshard_after_backward", reshard_after_backward, "reshard_after_backward")

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this wrapper's backward reads its parameters; wrappers inside are not meant.

        An embedding's does not: with False they are not gathered for it. A backward that reads them after all fails, in
        words of autograd's.

        Args:
            unshard_in_backward: False saves a gather.

        Raises:
            ConfigTypeError: no bool.
            UsageError: inside a forward or a backward.
        """
        self._set(False, "unshard_in_backward", unshard_in_backward, "unshard_in_backward")

    def set_modules_to_forward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Gather these wrappers' parameters when this one's forward begins, in place of what `forward_prefetch` sets.

        As many as are listed may be gathered ahead of their use, in the memory that they take; what the forward then
        does not use is freed at its end. Every rank lists the same.

        Args:
            modules: wrappers of the same model, in the order of their gathers; none to return to `forward_prefetch`.

        Raises:
            ConfigTypeError, ConfigValueError: no list of wrappers of this model, or this one is in it.
            UsageError: inside a forward or a backward.
        """
        model_of(self._unit).setup.set_options(
            self._unit, forward_targets=_targets(self._unit, "set_modules_to_forward_prefetch", modules)
        )

    def set_modules_to_backward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Gather these wrappers' parameters when this one's backward begins, in place of `backward_prefetch`'s.

        As many as are listed may be gathered ahead of their use. A backward gathers a wrapper where it is first listed
        or needed, those that the forward did not use not at all. Every rank lists the same.

        Args:
            modules: wrappers of the same model, in the order of their gathers; none to return to `backward_prefetch`.

        Raises:
            ConfigTypeError, ConfigValueError: no list of wrappers of this model, or this one is in it.
            UsageError: inside a forward or a backward.
        """
        model_of(self._unit).setup.set_options(
            self._unit, backward_targets=_targets(self._unit, "set_modules_to_backward_prefetch", modules)
        )

    def keep_frozen_unsharded(self, max_bytes: int | None = None, *, on: str = "device") -> None:
        """Keep frozen parameters of this wrapper, and of those inside, once they were gathered: the next forward
        gathers them, later ones and backwards do not. In place of earlier targets.

        All frozen parameters of a wrapper are kept, or none; wrappers are taken in the order of their modules, parents
        last, as far as `max_bytes` reaches, and what does not fit is left out. Every rank chooses the same, which the
        next forward compares; that one gathers. What is loaded into them, or written to them on all ranks, is seen by
        the next forward. One that is trained after all is not kept any more. `flatfsdp.summary` shows what is kept.

        Args:
            max_bytes: how many bytes of unsharded parameters each rank keeps, in the dtype in which they compute; None
                for all that is frozen, 0 to keep nothing.
            on: "device", where nothing has to be done for their next use; or "host", in page-locked memory, from which
                each use copies them into the memory that a gather would have filled.

        Raises:
            ConfigTypeError, ConfigValueError: no such number, or another place.
            UsageError: inside a forward or a backward, or inside `inference()`.
        """
        keep_frozen(self._unit, units_in(cast(nn.Module, self)), max_bytes, on)

    def set_unshard_async_op(self, async_op: bool) -> None:
        """Whether gathers are issued on the stream of the computation, for the whole model.

        They then take their memory there, so that on an accelerator none is tied up in the pool of another stream; they
        still run beside computation, but casts and uploads before them do not. Nothing is gathered ahead by itself, on
        CPU either: BACKWARD_PRE, the default of `backward_prefetch`, is without effect. What is to be there in time is
        listed by `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch`, or asked for by `unshard()`.

        Args:
            async_op: True for that, False for a stream of their own.

        Raises:
            ConfigTypeError: no bool.
            ConfigValueError: True, and a wrapper inside was made with `forward_prefetch=True`, `BACKWARD_POST` or
                `BACKWARD_MID`.
            UsageError: inside a forward or a backward, or on a nested wrapper.
        """
        method, unit = "set_unshard_async_op", self._unit
        check_bool(f"{method}: async_op", async_op)
        check_outside(unit, method)
        model = model_of(unit)
        if model.outermost is not unit:
            raise UsageError(
                f"{method} of unit {unit.label} was called on a nested wrapper, but gathers of a model share one "
                f"order; call it on the outermost ({model.outermost.entries.class_name})"
            )
        if async_op:
            for each in model.units:
                check_prefetches_on_request(each, method)
        rest.set_unshard_async_op(model, async_op)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backwards of the whole model end with all of their reductions, as the last of several does.

        With False the reduction that is issued last goes on beside what follows, until somebody reads a `.grad` that it
        brings, or the next backward begins. It is that of the wrapper whose forward begins first, and holds its whole
        gradients for so long, in the reduce dtype, which then lie in no parameter's place. A backward ends with all
        nevertheless where parameters are replicated or not sharded, or of a class of your own, where gradients are
        offloaded or of another dtype than they are reduced in, where hooks or an optimizer wait for them, inside
        `detect_nonfinite()`, and for what `ensure_unit_participation()` was given and no rank used. Unlike with the
        other methods ranks may differ: no collective moves.

        Args:
            is_last_backward: False before the microbatches that others follow; True before the last.

        Raises:
            ConfigTypeError: no bool.
            UsageError: inside a forward or a backward.
        """
        check_bool("set_is_last_backward: is_last_backward", is_last_backward)
        check_outside(self._unit, "set_is_last_backward")
        model_of(self._unit).backwards.is_last_backward = is_last_backward

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Without effect: all reductions are sums, scaled before or after them. For FSDP2's users.

        Args:
            enable: checked for its type.

        Raises:
            ConfigTypeError: no bool.
        """
        check_bool("set_force_sum_reduction_for_comms: enable", enable)

    def _set(self, recurse: bool, name: str, value: object, *fields: str) -> None:
        method = f"set_{name}"
        check_bool(f"{method}: {name}", value)
        for unit in self._meant(method, recurse):
            model_of(unit).setup.set_schedule(unit, **dict.fromkeys(fields, value))

    def _meant(self, method: str, recurse: bool) -> list[Unit]:
        """The units that a setting is for; refuses it inside a forward or a backward."""
        check_bool(f"{method}: recurse", recurse)
        check_outside(self._unit, method)
        return units_in(cast(nn.Module, self)) if recurse else [self._unit]


def _on_stream(hook: Callable[[torch.Tensor], None], stream: Any, device: Device) -> Callable[[torch.Tensor], None]:
    def run(total: torch.Tensor) -> None:
        stream.wait_stream(device.current_stream())
        with device.running_on(stream):
            hook(total)
        device.current_stream().wait_stream(stream)

    return run


def _targets(unit: Unit, method: str, modules: object) -> PrefetchTargets[Unit]:
    check_outside(unit, method)
    in_place = unit.entries.in_place
    kind = "modules of fully_shard()" if in_place else "FullyShardedDataParallel modules"
    accepted = f"a list of {kind} inside the same outermost one"
    if isinstance(modules, nn.Module) or not isinstance(modules, Iterable):
        refuse_type(f"{method}: modules", modules, accepted)
    targets = []
    for module in modules:
        if not isinstance(module, nn.Module) or not units_at(module):
            refuse_type(f"{method}: modules", module, accepted)
        (target,) = units_at(module)
        if in_place and target is not unit and not (model_of(unit).setup.ready or model_of(target).setup.ready):
            targets.append(target)  # the first forward, when the outermost module is known, checks the rest
            continue
        if target is unit or model_of(target) is not model_of(unit):
            found = "itself" if target is unit else f"a {target.entries.class_name} that is wrapped in another model"
            raise ConfigValueError(
                f"{method} of unit {unit.label}: modules: got {found}. Accepted: {accepted}. Wrap the whole model "
                "before you choose what is gathered ahead"
            )
        targets.append(target)
    return PrefetchTargets(dict.fromkeys(targets))


def check_prefetches_on_request(unit: Unit, method: str) -> None:
    """Refuse a unit that gathers ahead by itself, where `method` leaves that to lists of the user's."""
    post, mid = BackwardPrefetch.BACKWARD_POST, BackwardPrefetch.BACKWARD_MID  # nobody asked for the default
    for setting, is_made, instead in (
        ("forward_prefetch=True", unit.options.forward_prefetch, "forward"),
        ("backward_prefetch=BACKWARD_POST", unit.options.backward_prefetch is post, "backward"),
        ("backward_prefetch=BACKWARD_MID", unit.options.backward_prefetch is mid, "backward"),
    ):
        if is_made:
            raise ConfigValueError(
                f"{method}: a {unit.entries.class_name} inside was wrapped with {setting}, which gathers ahead by "
                f"itself. Wrap without it, and list what is gathered ahead by set_modules_to_{instead}_prefetch"
            )
