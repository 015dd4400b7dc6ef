"""Settings of a wrapper's schedule that may change during training, under FSDP2's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from ...api import BackwardPrefetch, check_bool
from ...errors import ConfigValueError, UsageError, refuse_type, refuse_value
from ..base import _functorch, _torch
from ..config.schedule_options import reshard_choices
from ..config.unit_options import PrefetchTargets
from ..device.streams import Device
from ..features.comm_hook import all_reduce_hook
from ..features.deferred_gradients import set_defers
from ..features.persistent_params import keep_frozen
from ..features.post_forward import attach_post_forward_shards
from ..flat.states import IDLE, SUMMONED
from ..models import rest
from ..models.rest import check_outside
from ..models.walks import units_in
from ..runtime.model import model_of
from ..runtime.module_tree import units_at
from ..runtime.unit import Unit


class UnshardHandle:
    """A gather in flight: the result of `unshard(async_op=True)`."""

    _unit: Unit

    def wait(self) -> None:
        """Wait until the parameters are unsharded. Does nothing if they are already, or have been resharded in the
        meantime."""
        waiting = model_of(self._unit).agreement.waiting(f"unshard() of unit {self._unit.label}")
        with waiting, _functorch.outside():
            for each in (*self._unit.owning_units, self._unit):
                if each.is_unsharded and each.phase is IDLE:
                    each.wait_unshard()
                    each.track_writes(requested=True)


class ScheduleControls:
    """Methods of the wrapper that change when it communicates and when it frees memory. [Note: schedule]

    Settings apply until they are changed again, also in copies and pickles of a model. Every rank must choose the same
    settings; the next forward or backward compares them.
    """

    _unit: Unit

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this wrapper's parameters before its forward does; not those of wrappers inside.

        They stay unsharded for that forward, or until the end of the forward or backward in which they are not used. If
        any rank writes to its shards in the meantime, the forward gathers again. The unsharded tensors are copies: the
        forward refuses writes to them, and replacements of their `.data` or `.grad`. Between a forward and its
        backward, it allows a loss to use parameters of a wrapper that the forward did not call; their gradients are
        reduced with the others. Collective over the shard group; every rank calls it at the same point, between
        iterations or inside the forward of an outer wrapper.

        Args:
            async_op: whether to return a handle at once; otherwise it returns None once the parameters are unsharded,
                in their own shapes. A forward waits by itself.

        In a checkpoint's recomputation it does nothing: forwards gather themselves.

        Raises:
            ConfigTypeError: `async_op` is not a bool.
            UsageError: inside a backward, or inside `summon_full_params()`.
            AgreementError: ranks make different calls.
        """
        check_bool("unshard: async_op", async_op)
        unit = self._unit
        handle = UnshardHandle()
        handle._unit = unit
        if unit.phase is not SUMMONED and _torch.is_recomputing():
            return handle if async_op else None
        if unit.phase is SUMMONED or _torch.in_backward():
            where = (
                "inside a backward"
                if _torch.in_backward()
                else "inside summon_full_params(), where it is unsharded already"
            )
            raise UsageError(f"unshard() of unit {unit.label} was called {where}; call it between iterations")
        with _functorch.outside():  # [Note: selective checkpoints]
            rest.unshard(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this wrapper's unsharded parameters; not those of wrappers inside. All ranks call it at the same point.

        A backward that reads them gathers them again, over all ranks of the shard group.

        Raises:
            UsageError: inside the wrapper's forward, inside a backward or `summon_full_params()`, or after a backward
                with `create_graph=True`.
            AgreementError: ranks make different calls.
        """
        if _torch.in_backward():
            raise UsageError(
                f"reshard() of unit {self._unit.label} was called inside a backward; call it after the backward"
            )
        rest.reshard(self._unit)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the next backwards reduce gradients; `no_sync()` does the same for a whole model, inside a context.

        If not, unsharded gradients accumulate in memory of their own until a backward that reduces them.

        Args:
            requires_gradient_sync: False to accumulate.
            recurse: whether for all wrappers inside as well.

        Raises:
            ConfigTypeError: an argument is not a bool.
            UsageError: inside a forward or a backward.
        """
        self._set(recurse, "requires_gradient_sync", requires_gradient_sync, "reduce", "all_reduce")

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether the next backwards reduce gradients over replicas as well, if parameters are replicated.

        If not, their sums over the shard group, of the size of one shard, accumulate until a backward that reduces all
        of them over replicas. Until then `.grad` is unchanged, and `zero_grad()` does not affect the accumulated sums.

        Args:
            requires_all_reduce: False to accumulate. `set_requires_gradient_sync` sets it, too.
            recurse: whether for all wrappers inside as well.

        Raises:
            ConfigTypeError: an argument is not a bool.
            UsageError: inside a forward or a backward.
        """
        self._set(recurse, "requires_all_reduce", requires_all_reduce, "all_reduce")

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of the sum of this wrapper's gradients over all ranks, in place of the number of ranks.

        It does not apply to wrappers inside.

        Args:
            factor: a positive number.

        Raises:
            ConfigTypeError, ConfigValueError: not such a number.
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
        divided yet (with a communication hook: its result, or the mean of that over replicas); the hook changes it in
        place. Hooks run in the same order on every rank, once per flat gradient in each backward that reduces: if
        parameters lie on several meshes, on the sum of each mesh, so that a hook that communicates must suit them all.
        Copies of a model have copies of the hook; pickles do not have it, and warn.

        Args:
            hook: a callable that returns None, or an object with a `wait()`; None to remove the previous one.
            stream: its stream, for parameters on an accelerator that are not replicated; None for the stream of the
                backward.

        Raises:
            ConfigTypeError, ConfigValueError: not callable; a stream if there is none, or of a hybrid.
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
        model_of(unit).setup.set_options(unit, all_reduce_hook=all_reduce_hook(hook) if hook is not None else None)

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Whether parameters are freed between a forward and its backward, in place of the strategy's choice.

        True also applies to the outermost wrapper, which otherwise stays unsharded until its backward. With False
        parameters also stay unsharded after a forward without gradients, until a backward or the next write to them:
        several evaluations gather once.

        A number n is between the two: n consecutive ranks keep the parameters among them, 1/n each, in the dtype of
        computation, and the backward gathers them there, often on one host. The ranks of the shard group are split into
        such runs in their order; the next forward makes process groups for them, once for each n. The pieces are
        copies, and are freed when the backward has gathered them; a second backward of the same graph gathers over the
        whole shard group.

        Args:
            reshard_after_forward: False saves a gather in backward and takes the memory of unsharded parameters. A
                number divides the number of shards: 1 means False, the number of shards True.
            recurse: whether for all wrappers inside as well.

        Raises:
            ConfigTypeError: an argument is neither bool nor, for the first, int.
            ConfigValueError: a number that does not divide the number of shards of an affected wrapper.
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
        for model in rest.models_of(units):
            attach_post_forward_shards(model)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after a backward, in place of the strategy's choice.

        With False, parameters stay unsharded between microbatches, which then gather nothing. Once an optimizer has
        written to the shards of any rank, the next forward gathers all kept parameters again.

        Args:
            reshard_after_backward: False saves gathers in the next forward, but takes the memory of unsharded
                parameters.
            recurse: whether for all wrappers inside as well.

        Raises:
            ConfigTypeError: an argument is not a bool.
            UsageError: inside a forward or a backward.
        """
        self._set(recurse, "reshard_after_backward", reshard_after_backward, "reshard_after_backward")

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this wrapper's backward reads its parameters; it does not apply to wrappers inside.

        That of an embedding does not: with False, parameters are not gathered for it. If the backward reads them
        nevertheless, autograd raises an error.

        Args:
            unshard_in_backward: False saves a gather.

        Raises:
            ConfigTypeError: not a bool.
            UsageError: inside a forward or a backward.
        """
        self._set(False, "unshard_in_backward", unshard_in_backward, "unshard_in_backward")

    def set_modules_to_forward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Gather these wrappers' parameters when this one's forward begins, in place of `forward_prefetch`.

        All listed wrappers may be gathered ahead of their use, and take memory for that time; those that the forward
        does not use are freed at its end. Every rank lists the same.

        Args:
            modules: wrappers of the same model, in the order of their gathers; none to return to `forward_prefetch`.

        Raises:
            ConfigTypeError, ConfigValueError: not a list of wrappers of this model, or this one is in it.
            UsageError: inside a forward or a backward.
        """
        model_of(self._unit).setup.set_options(
            self._unit, forward_targets=_targets(self._unit, "set_modules_to_forward_prefetch", modules)
        )

    def set_modules_to_backward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Gather these wrappers' parameters when this one's backward begins, in place of `backward_prefetch`.

        All listed wrappers may be gathered ahead of their use. A backward gathers a wrapper where it is first listed
        or needed; a wrapper that the forward did not use is not gathered. Every rank lists the same.

        Args:
            modules: wrappers of the same model, in the order of their gathers; none to return to `backward_prefetch`.

        Raises:
            ConfigTypeError, ConfigValueError: not a list of wrappers of this model, or this one is in it.
            UsageError: inside a forward or a backward.
        """
        model_of(self._unit).setup.set_options(
            self._unit, backward_targets=_targets(self._unit, "set_modules_to_backward_prefetch", modules)
        )

    def keep_frozen_unsharded(self, max_bytes: int | None = None, *, on: str = "device") -> None:
        """Keep frozen parameters of this wrapper, and of those inside, unsharded once they are gathered: the next
        forward gathers them, later forwards and backwards do not. Replaces earlier calls.

        All frozen parameters of a wrapper are kept, or none; wrappers are taken in the order of their modules, parents
        last, up to `max_bytes`, and those that do not fit are left out. Every rank must choose the same, which the next
        forward compares; that forward gathers. The next forward sees values that are loaded into them, or written to
        them on all ranks. Parameters that are trained later are no longer kept. `flatfsdp.summary` shows the kept ones.

        Args:
            max_bytes: the bytes of unsharded parameters that each rank keeps, in the dtype in which they compute; None
                for all frozen parameters, 0 to keep nothing.
            on: "device", where the next use costs nothing; or "host", in page-locked memory, from which each use copies
                them into the memory that a gather would have filled.

        Raises:
            ConfigTypeError, ConfigValueError: not such a number, or another value of `on`.
            UsageError: inside a forward or a backward, or inside `inference()`.
        """
        keep_frozen(self._unit, units_in(cast(nn.Module, self)), max_bytes, on)

    def set_unshard_async_op(self, async_op: bool) -> None:
        """Whether gathers are issued on the stream of the computation, for the whole model.

        They then allocate their memory there, so that on an accelerator none is tied up in the pool of another stream;
        they still overlap with computation, but casts and uploads before them do not. There is no automatic prefetch,
        on CPU either: BACKWARD_PRE, the default of `backward_prefetch`, has no effect. Prefetch with
        `set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`, or `unshard()`.

        Args:
            async_op: True for the stream of the computation, False for a stream of their own.

        Raises:
            ConfigTypeError: not a bool.
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
                f"{method} of unit {unit.label} was called on a nested wrapper, but all gathers of a model share one "
                f"order; call it on the outermost wrapper ({model.outermost.entries.class_name})"
            )
        if async_op:
            for each in model.units:
                check_prefetches_on_request(each, method)
        rest.set_unshard_async_op(model, async_op)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backwards of the whole model finish all of their reductions, as the last of several must.

        With False the reduction that is issued last continues in the background, until code reads a `.grad` that it
        fills, or the next backward begins. It is that of the wrapper whose forward begins first. Its unsharded
        gradients stay allocated for that time, in the reduce dtype, outside of the parameters' memory. A backward
        nevertheless finishes all reductions if parameters are replicated or not sharded, or of a user-defined class, if
        gradients are offloaded or of another dtype than they are reduced in, if hooks or an optimizer wait for them,
        inside `detect_nonfinite()`, and for modules given to `ensure_unit_participation()` that no rank used. Unlike
        with the other methods ranks may differ: the order of collectives is the same.

        Args:
            is_last_backward: False before microbatches that are not the last; True before the last.

        Raises:
            ConfigTypeError: not a bool.
            UsageError: inside a forward or a backward.
        """
        check_bool("set_is_last_backward: is_last_backward", is_last_backward)
        check_outside(self._unit, "set_is_last_backward")
        set_defers(model_of(self._unit), later=not is_last_backward)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Has no effect: all reductions are sums, scaled before or after them. For programs written for FSDP2.

        Args:
            enable: checked for its type.

        Raises:
            ConfigTypeError: not a bool.
        """
        check_bool("set_force_sum_reduction_for_comms: enable", enable)

    def _set(self, recurse: bool, name: str, value: object, *fields: str) -> None:
        method = f"set_{name}"
        check_bool(f"{method}: {name}", value)
        for unit in self._meant(method, recurse):
            model_of(unit).setup.set_schedule(unit, **dict.fromkeys(fields, value))

    def _meant(self, method: str, recurse: bool) -> list[Unit]:
        """The units that a setting applies to; refuses it inside a forward or a backward."""
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
    what = "modules of fully_shard()" if in_place else "FullyShardedDataParallel modules"
    accepted = f"a list of {what} inside the same outermost module"
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
                "before choosing the modules to prefetch"
            )
        targets.append(target)
    return PrefetchTargets(dict.fromkeys(targets))


def check_prefetches_on_request(unit: Unit, method: str) -> None:
    """Refuse a unit with automatic prefetch, if `method` requires prefetch by the user's lists."""
    post, mid = BackwardPrefetch.BACKWARD_POST, BackwardPrefetch.BACKWARD_MID  # the default is no explicit request
    for setting, is_made, instead in (
        ("forward_prefetch=True", unit.options.forward_prefetch, "forward"),
        ("backward_prefetch=BACKWARD_POST", unit.options.backward_prefetch is post, "backward"),
        ("backward_prefetch=BACKWARD_MID", unit.options.backward_prefetch is mid, "backward"),
    ):
        if is_made:
            raise ConfigValueError(
                f"{method}: a {unit.entries.class_name} inside was wrapped with {setting}, which prefetches "
                "automatically. Wrap without it, and list the modules to prefetch with "
                f"set_modules_to_{instead}_prefetch"
            )
