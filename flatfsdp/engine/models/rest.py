"""The single entry for all operations between iterations.

[Note: rest] An operation between iterations expects that parameters show their shards, that gradients have arrived, and
that no state is left of a backward that failed, or that was to be differentiated again. `quiesce` ensures this, and can
refuse calls while a unit computes. Beside the drivers of steps, no other file finishes iterations (a test looks).

[Note: left unreduced] A backward may reach units and no trainable parameter, on all ranks alike, and be the last of a
step whose other microbatches ran under no_sync(). It reduces nothing: `torch.autograd.grad` looks the same, and another
backward may follow. An operation that needs the sum, an optimizer's step or `clip_grad_norm_`, reduces it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import nn

from ...errors import UsageError, refuse_type
from ..base import _torch
from ..base.peers import Peers
from ..flat.sources import DEVICE
from ..flat.states import IDLE, SHARDED, SUMMONED, UNSHARDED
from ..flat.views import SHOWS_NOTHING, SHOWS_SHARD
from ..runtime.forward_driver import unshard_at_first_gradient
from ..runtime.iteration import IDLE as AT_REST
from ..runtime.iteration import LEFT_BEHIND, RETAINED
from ..runtime.model import Model, model_of
from ..runtime.module_tree import units_at
from ..runtime.unit import Unit
from ..runtime.user_writes import follow_other_ranks
from ..schedule.forward_schedule import ForwardRecord
from . import param_registry as registry
from .unnoticed_writes import copy_shards, is_compared


def check_outside(unit: Unit, method: str) -> None:
    """Refuse a change while a forward or a backward runs: it would differ from the options that ranks have compared."""
    if _torch.in_backward() or model_of(unit).iteration.in_forward:
        raise UsageError(
            f"{method} of unit {unit.label} was called inside a {'backward' if _torch.in_backward() else 'forward'}; "
            "call it before the forward, or between forward and backward"
        )


def check_idle(unit: Unit, call: str) -> None:
    """Refuse `call` while `unit` computes, or is unsharded in `summon_full_params()`."""
    if unit.phase is not IDLE:
        hint = "; leave summon_full_params() first, or call it on the whole model inside" * (unit.phase is SUMMONED)
        raise UsageError(
            f"{call} while unit {unit.label} is in {unit.phase.value}: expected a call between forward, backward "
            f"and step{hint}"
        )


def models_of(units: Iterable[Unit]) -> list[Model]:
    """The models that `units` belong to, each once."""
    return list(dict.fromkeys(map(model_of, units)))


def check_outermost(unit: Unit, call: str) -> Model:
    """The model of `unit`; raises UsageError for a `call` on any but the outermost unit."""
    model = model_of(unit)
    if model.outermost is not unit:
        what = "module of fully_shard()" if unit.entries.in_place else "FullyShardedDataParallel module"
        raise UsageError(
            f"{call} was called on a nested unit ({unit.entries.class_name}); call it on the outermost {what} "
            f"({model.outermost.entries.class_name})"
        )
    return model


def outermost_model(wrapper: object, function: str) -> Model:
    """The model of `wrapper`, which was passed to `function` as the outermost one.

    Raises:
        ConfigTypeError: it is no wrapper.
        UsageError: it is a nested one.
    """
    units = units_at(wrapper) if isinstance(wrapper, nn.Module) else []
    if not units:
        refuse_type(f"{function}: model", wrapper, "the outermost FullyShardedDataParallel module of a model")
    return check_outermost(units[0], f"{function}()")


def quiesce(
    units: Sequence[Unit],
    *,
    collective: bool = True,
    shards: bool = True,
    frees: bool = False,
    check: Callable[[Unit], None] | None = None,
) -> None:
    """Bring `units` to rest after their iterations. [Note: rest]

    Args:
        collective: the call communicates, so that units are named and connected, which is collective the first time.
        shards: let parameters show their shards, with tensors that users assigned instead of parameters taken over.
        frees: free also parameters that stay unsharded between iterations.
        check: raises for a unit that the call refuses; called once a failed backward is finished.

    Raises:
        UsageError: a tensor that a user assigned instead of a parameter cannot be taken over.
    """
    models = models_of(units)
    for model in models:
        if collective:
            model.setup.lazy_init()
        model.iteration.finish_interrupted()
    if check is not None:
        for unit in units:
            check(unit)
    if shards:
        for model in models:
            if frees or not all(unit.shows_shard for unit in units if model_of(unit) is model):
                model.iteration.reset_to_idle()
        take_over(units)


def abandon(units: Sequence[Unit]) -> None:
    """Bring `units` to rest whose connections to other ranks are broken: what was in flight has failed, and is dropped.
    No communication."""
    for unit in units:
        for handle in unit.handles:
            if handle.pending is not None:
                with suppress(RuntimeError):
                    handle.pending.wait()
                handle.pending = None
        for grads in unit.grads:
            for each in grads.reducing:
                with suppress(RuntimeError):
                    each.discard()
            grads.reducing.clear()
    for model in models_of(units):
        with suppress(RuntimeError):
            model.iteration.wait_for_gradients()
    quiesce(units, collective=False, frees=True)
    for model in models_of(units):
        iteration = model.iteration
        iteration.record = ForwardRecord()
        iteration.executor.ahead.clear()
        iteration.requested.clear()
        iteration.enter(AT_REST)
    for unit in units:
        for grads in unit.grads:
            grads.drop()  # also what a window has accumulated


def take_over(units: Collection[Unit]) -> None:
    """Take over tensors that users assigned instead of parameters of `units`, if these show their shards, or raise."""
    for model in models_of(units):
        model.setup.take_over([unit for unit in units if model_of(unit) is model])


def free_unsharded(model: Model) -> None:
    """Let parameters of `model` show their shards, and free all that are unsharded."""
    model.iteration.reset_to_idle()


def free_unit(unit: Unit) -> None:
    """Take over assigned tensors into the shards of `unit`, and free all its unsharded parameters. Precondition: its
    parameters show their shards."""
    take_over([unit])
    unit.reset_to_idle()
    evict(unit)


def evict(unit: Unit, *kinds: int) -> None:
    """Free the kept parameters of these `kinds` of `unit`, or of all. Those that a backward may read are freed after
    it. The next forward gathers them."""
    for kind in kinds or range(len(unit.handles)):
        handle, views, _ = unit.kinds[kind]
        if handle.kept_source is not None and not handle.kept_source.as_of_forward:
            handle.drop_kept_source()
        if handle.persistence is DEVICE and handle.state is UNSHARDED:
            if views.mode is SHOWS_SHARD:
                unit.resources.free(handle)
            else:
                handle.persistence = None


def free_at_once(model: Model) -> None:
    """Release freed memory of `model` now, before the next iteration begins."""
    model.resources.limiter.free_all()


def wait_for_gradients(units: Iterable[Unit]) -> None:
    """Wait for the deferred reductions of the last backward over `units`."""
    for model in models_of(units):
        model.iteration.wait_for_gradients()


def before_step(optimizer: torch.optim.Optimizer) -> None:
    """Let models that `optimizer` steps show shards and gradients, as between iterations."""
    busy = [model for model in registry.models if not model.iteration.shows_shards]
    if busy:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in busy:
            handles = (handle for unit in model.units for handle in unit.handles)
            if any(id(parameter) in stepped for handle in handles for parameter in handle.face.holders):
                model.iteration.show_shards()
                reduce_left(model)


def before_norm(model: Model, call: str) -> None:
    """Finish the iteration of `model`, before a `call` about its gradients. Collective the first time.

    Raises:
        UsageError: inside a backward; a unit computes, or shows whole parameters.
    """
    if _torch.in_backward():
        raise UsageError(
            f"{call} was called inside a backward, as by a hook on a gradient, which ranks without elements of that "
            "parameter do not run. Call it after the backward; hooks may clip by value"
        )
    model.setup.lazy_init()
    model.iteration.finish_interrupted()
    for unit in model.units:
        if unit.phase is not IDLE:
            check_idle(unit, call)


def reduce_left(model: Model) -> None:
    """Reduce the gradients of microbatches without synchronization, if the last backward did not. Collective in this
    case. [Note: left unreduced]"""
    iteration = model.iteration
    if not (iteration.left_unreduced and model.backwards.sync) or iteration.in_forward or _torch.in_backward():
        return
    iteration.left_unreduced = False
    units = [unit for unit in model.units if unit.options.schedule.reduce]
    if any([grads.accumulation.window_open for unit in units for grads in unit.grads]):
        with model.agreement.collective_call("the reduction of gradients that the last backward left"):
            model.backwards.reduce_accumulated()


@contextmanager
def collective_call(units: Collection[Unit], call: str, *, always: bool = False, when: bool = True) -> Iterator[None]:
    """A context for a `call` that all ranks make, and that gathers the parameters of `units` or sends them. Collective.

    `always`: ranks compare even if no unit is sharded. No effect unless `when`.

    Raises:
        AgreementError: on every rank, if some make another call.
    """
    with ExitStack() as calls:
        for model in models_of(units) if when else ():
            model.setup.lazy_init()
            if model.iteration.stage in LEFT_BEHIND:  # inside of a context that began at rest
                model.iteration.leave_backward()
            indices = [unit.position.index for unit in units if model_of(unit) is model]
            calls.enter_context(model.agreement.collective_call(call, indices, always=always))
        yield


# -- requests of users -------------------------------------------------------------------------------------------------


def set_unshard_async_op(model: Model, async_op: bool) -> None:
    """Issue gathers on the caller's stream, and ahead only if a user requests it; or on a stream of their own."""
    if model.setup.ready:
        free_unsharded(model)  # memory of one stream is not reused by the other
        for unit in model.units:
            evict(unit)
    for unit in model.units:
        model.setup.set_schedule(unit, unshard_async_op=async_op)
    model.setup.choose_unshard_stream()


def may_list_leaves(model: Model) -> bool:
    """Whether modules may list unsharded parameters now, which have no gradients, instead of this rank's shards."""
    return not model.iteration.shows_shards


def unshard(unit: Unit) -> None:
    """Start to gather `unit` on a user's request, in a forward or between iterations. Collective."""
    model = model_of(unit)
    iteration = model.iteration
    if not iteration.in_forward:
        quiesce([unit], shards=False)
        if torch.is_grad_enabled():
            for observe in model.observers.training_begins:
                observe(model.units)
    model.agreement.check_request(unit.position.index, "unshard")
    if not iteration.in_forward:
        model.resources.streams.unshard.follow_compute()
    for each in (*unit.owning_units, unit):
        at_rest = iteration.is_at_rest and each.phase is IDLE
        if at_rest:
            each.guard.end_request(each, written=False)  # an earlier one
        model.setup.take_over([each])
        follow_before_request(each, model.agreement, at_rest=at_rest)
        each.kept.by_choice = (at_rest or each.shows_shard) and each.axes.is_spread
        copy_shards(each)
        iteration.executor.do([("ahead", (each,))], iteration.backward)
        iteration.executor.ahead[each] = None
        if torch.is_grad_enabled():
            iteration.requested[each] = None
            unshard_at_first_gradient(each, model.backwards.of_unit[each])


def follow_before_request(unit: Unit, agreement: Peers, *, at_rest: bool) -> None:
    """`follow_other_ranks` when a user requests `unit`, and the same for its parameters that stay unsharded."""
    stays = [handle for handle in unit.handles if handle.persistence is not None]
    if stays and not unit.kept.maybe_stale and not any([is_compared(unit, handle) for handle in stays]):
        stays = []
    shows = at_rest or unit.shows_shard  # else a computation has used it since
    if agreement.forwards_are_local or not shows or not (unit.kept.by_choice or stays):
        return
    with agreement.waiting(f"unshard() of unit {unit.label}"):
        follow_other_ranks((unit,), agreement)
        missing = [handle.state is SHARDED and handle.kept_source is None for handle in stays]
        if stays and agreement.any_rank(any(missing)):
            evict(unit)


def reshard(unit: Unit) -> None:
    """Free the unsharded parameters of `unit` on a user's request."""
    model = model_of(unit)
    iteration = model.iteration
    is_read = iteration.stage is RETAINED
    if not is_read:
        quiesce([unit], shards=False)
    if is_read or unit.backward.keep_unsharded or unit.phase is not IDLE:
        raise UsageError(
            f"reshard() of unit {unit.label}: its parameters are still being read, by its own forward or by a backward "
            "that needs them unchanged. Call it afterwards"
        )
    model.agreement.check_request(unit.position.index, "reshard")
    if iteration.is_at_rest:
        unit.guard.end_request(unit, written=True)
    unit.guard.check_left(unit)
    awaits_backward = not iteration.record.consumed and unit in iteration.record.entered
    unit.reshard(SHOWS_NOTHING if awaits_backward else SHOWS_SHARD, unreached=iteration.backward is not None)
    unit.drop_retained()
    unit.kept.end_choice()
