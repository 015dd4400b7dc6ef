"""The one entrance for everything that works between iterations.

[Note: rest] What a user calls between iterations finds parameters that show their shards, gradients that are there, and
nothing left of a backward that failed, or that was to be differentiated again. `quiesce` sees to that, and refuses the
call where a unit computes. No other module finishes what an iteration has left (a test counts the calls).

[Note: left unreduced] A backward may reach units and no trainable parameter, on all ranks alike, and be the last of a
step whose other microbatches ran under no_sync(). It reduces nothing: `torch.autograd.grad` looks the same, and another
backward may follow. Who needs the sum, an optimizer's step or `clip_grad_norm_`, has it reduced then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from ...errors import UsageError
from ..base import _torch
from ..comm.error_feedback import Residuals
from ..flat.states import IDLE, SUMMONED
from . import param_registry as registry
from .model import Model, model_of
from .persistence import evict_all
from .unit import Unit


def check_outside(unit: Unit, method: str) -> None:
    """Refuse a change while a forward or a backward runs: what its ranks have agreed on would no longer hold."""
    if _torch.in_backward() or model_of(unit).iteration.in_forward:
        raise UsageError(
            f"{method} of unit {unit.label} was called inside a "
            f"{'backward' if _torch.in_backward() else 'forward'}; call it before the forward, or between forward and "
            "backward"
        )


def check_idle(unit: Unit, call: str) -> None:
    """Refuse `call` while `unit` computes, or has its parameters whole in `summon_full_params()`."""
    if unit.phase is not IDLE:
        hint = "; leave summon_full_params() first, or call it on the whole model inside" * (unit.phase is SUMMONED)
        raise UsageError(
            f"{call} while unit {unit.label} is in {unit.phase.value}: expected a call between forward, backward "
            f"and step{hint}"
        )


def models_of(units: Iterable[Unit]) -> list[Model]:
    """The models that `units` belong to, each once."""
    return list(dict.fromkeys(map(model_of, units)))


def initialize(model: Model) -> None:
    """Prepare a collective call: units are named and connected (collective the first time), and what a backward that
    failed or may be differentiated again has left is finished. [Note: rest]"""
    model.setup.lazy_init()
    model.iteration.finish_interrupted()


def quiesce(
    units: Sequence[Unit],
    *,
    collective: bool = True,
    shards: bool = True,
    frees: bool = False,
    check: Callable[[Unit], None] | None = None,
) -> None:
    """Bring what the iterations of `units` have left to rest. [Note: rest]

    Args:
        collective: the call communicates, so that models are initialized, which is collective the first time.
        shards: parameters show their shards after it, with what users put in their place.
        frees: even what stays unsharded between iterations is freed.
        check: raises for a unit that the call refuses, once what a failed backward left is finished.

    Raises:
        UsageError: what users put in the place of parameters cannot be taken over.
    """
    models = models_of(units)
    for model in models:
        if collective:
            initialize(model)
        else:
            model.iteration.finish_interrupted()
    if check is not None:
        for unit in units:
            check(unit)
    if shards:
        for model in models:
            if frees or not all(unit.shows_shard for unit in units if model_of(unit) is model):
                model.iteration.reset_to_idle()
        for model in models:
            model.setup.write_back([unit for unit in units if model_of(unit) is model])


def residuals_of(unit: Unit) -> list[Residuals]:
    """What gradients of `unit` have lost, for each kind with error feedback, in order with what the caller computes.
    [Note: error feedback]"""
    found = [grads.residuals for grads in unit.grads if grads.residuals is not None]
    streams = unit.resources.streams
    for stream in (streams.reduce, streams.replicate) if found else ():
        unit.resources.device.await_mark(stream.mark())
    return found


def free_unsharded(model: Model) -> None:
    """Parameters of `model` show their shards, and nothing of it is unsharded, for whatever reason it was kept."""
    model.iteration.reset_to_idle()


def free_unit(unit: Unit) -> None:
    """The shards of `unit` hold what its parameters are, and nothing of it is unsharded. Precondition: its parameters
    show their shards."""
    model_of(unit).setup.write_back([unit])
    unit.reset_to_idle()
    evict_all(unit)


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


def reduce_left(model: Model) -> None:
    """Reduce what microbatches without synchronization left, if the backward that was to did not. Collective then.
    [Note: left unreduced]"""
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
    """All ranks make this `call`, which gathers the parameters of `units` or sends them; it is collective inside.

    `always`: ranks exchange something even where no unit is sharded. Nothing happens unless `when`.

    Raises:
        AgreementError: on every rank: some do something else.
    """
    with ExitStack() as calls:
        for model in models_of(units) if when else ():
            model.setup.lazy_init()
            indices = [unit.place.index for unit in units if model_of(unit) is model]
            calls.enter_context(model.agreement.collective_call(call, indices, always=always))
        yield
