"""Hooks around an optimizer's step: before it, bring its models to rest and check its parameters; after it, increment
the versions of written parameters.

One global pre-hook and post-hook of torch.optim serve all optimizers. After an optimizer's first step they cost one
pass over the live models, and one over the parameters if its writes change no versions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...errors import UsageError, is_new
from ..agreement.once_per_job import warn_once_per_job
from ..base import _dtensor, _dynamo
from ..base.overrides import Override
from ..flat.faces import adoptions
from ..flat.flat_param import FlatParamHandle
from ..layout.layout import Span
from ..models import param_registry as registry
from ..models.rest import before_step
from ..planning.owners import parts_of
from ..runtime.model import Model
from ..runtime.unit import Unit
from .assignments import name_in_place_of
from .optimizer_options import compare_options, is_compared
from .setup_checks import check_registered
from .window_marks import WindowMarks, open_windows


class _CheckedOptimizer(NamedTuple):
    """The state of an optimizer at its last check: the registry's generation, its number of param groups, the models
    that it steps, and whether it holds distributed tensors."""

    generation: int
    groups: int
    models: tuple[weakref.ref[Model], ...]
    distributed: bool


class StatesOfWholes(Protocol):
    """The states of an optimizer that steps on whole matrices, or has states of blocks.

    Attributes:
        imbalance: the cost of the rank that computes longest in a step, as a multiple of the mean; None if each rank
            steps on its own elements.
        exchanges: whether ranks take its steps together.
    """

    exchanges: bool

    @property
    def imbalance(self) -> float | None: ...

    def to_shards(self) -> None:
        """Let each rank have its parts of them, as of an element-wise optimizer. Collective."""

    def state_before_first_step(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """This rank's part of that of `parameter`; None if there are no whole matrices of it."""

    def held(self, parameter: torch.Tensor) -> tuple[list[Any], dict[str, Any]] | None:
        """This rank's elements of the states of `parameter`, each an `OwnedInterval` with the name of the state, and
        its other states; None if they are as of any optimizer. No communication."""

    def ranks_changed(self) -> None:
        """The model is over other ranks, and each rank has its parts of the states, as `to_shards` leaves them."""


class Called(dict[weakref.ref[Any], None]):
    """Objects that hooks call, in the order in which they were added, and do not keep alive. Some of them communicate,
    so a set, whose order is that of addresses, would let ranks wait for each other."""

    def add(self, each: object) -> None:
        """Call `each`, unless it is called already."""
        self.setdefault(weakref.ref(each, self.pop))

    def discard(self, each: object) -> None:
        """Do not call `each`."""
        self.pop(weakref.ref(each), None)


# Objects whose `optimizer_steps(optimizer)` is called before a step of any optimizer.
looking = Called()
# Objects whose `optimizer_stepped(optimizer)` is called after a step.
following = Called()
# Optimizers of which a rank's states are not always those of its elements alone.
steps_on_wholes: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[StatesOfWholes]]
steps_on_wholes = weakref.WeakKeyDictionary()
# What known optimizers that are not element-wise see, and the remedy, by their classes' names: most programs do not
# import them.
_MATRICES = "whole tensors, at their norms, rows or products", "Let it step on whole ones with flatfsdp.matrix_steps()"
_BLOCKS = (
    "blocks of states",
    "Wrap with layout= of its class, and call flatfsdp.block_states(optimizer)",
)
_SEE_WHOLES: dict[str, tuple[str, str]] = {
    "torch.optim.Muon": _MATRICES,
    "torch.optim.Adafactor": _MATRICES,
    "transformers.optimization.Adafactor": _MATRICES,
    **{f"torchao.optim.adam.Adam{kind}": _BLOCKS for kind in ("8bit", "4bit", "Fp8", "W8bit", "W4bit", "WFp8")},
    **{
        f"bitsandbytes.optim.{kind.lower()}.{kind}8bit": _BLOCKS
        for kind in ("Adam", "AdamW", "Lion", "SGD", "RMSprop", "Adagrad")
    },
}
_at_work: Override[torch.optim.Optimizer | None] = Override(None)
engine_steps = _at_work.being  # inside, the engine steps an optimizer, in a backward
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, _CheckedOptimizer] = weakref.WeakKeyDictionary()
_installed = False


class OfOptimizer:
    """An object that hooks of an optimizer keep alive, and that does not keep the optimizer alive: in a circle, both
    would wait for the garbage collector, with the memory of parameters and states."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer, which exists while it calls its hooks, or another object has it."""
        found = self._optimizer()
        assert found is not None
        return found


class _DefaultsOfWholes(dict[str, Any]):
    """The defaults of an optimizer in `steps_on_wholes`: copies and pickles, which lack its hooks, have them as well.

    Attributes:
        seen: what it sees, and the remedy where it is not given that.
    """

    seen: tuple[str, str]


def give_wholes(optimizer: torch.optim.Optimizer, states: StatesOfWholes, *, blocks: bool = False) -> None:
    """Let `states` be those of an optimizer of whole matrices, or of `blocks`."""
    steps_on_wholes[optimizer] = weakref.ref(states)
    optimizer.defaults = marked = _DefaultsOfWholes(optimizer.defaults)
    marked.seen = _BLOCKS if blocks else _MATRICES


def _sees(optimizer: torch.optim.Optimizer) -> tuple[str, str] | None:
    cls = type(optimizer)
    known = _SEE_WHOLES.get(f"{cls.__module__}.{cls.__qualname__}")
    return known or getattr(getattr(optimizer, "defaults", None), "seen", None)


def sees_wholes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` looks at whole matrices, and was not given them."""
    found = _sees(optimizer)
    return found is not None and found[0] == _MATRICES[0] and optimizer not in steps_on_wholes


def guard_optimizers() -> None:
    """Install the hooks, once per process."""
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)


def is_at_work(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the engine is stepping `optimizer`, in a backward."""
    return optimizer is _at_work.value


def wholes_of(optimizer: torch.optim.Optimizer) -> StatesOfWholes | None:
    """The states of `optimizer`, if it steps on whole matrices; or if it contains one that does, as its attribute
    `matrix_steps`, or `optimizer` (as accelerate's)."""
    if optimizer not in steps_on_wholes:
        inner = vars(optimizer)
        optimizer = getattr(inner.get("matrix_steps"), "optimizer", inner.get("optimizer", optimizer))
    ref = steps_on_wholes.get(optimizer)
    return None if ref is None else ref()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _dynamo.is_compiled_around():
        for parameter in [each for group in optimizer.param_groups for each in group["params"]]:
            if _dtensor.is_dtensor(parameter.grad):
                parameter.grad = _dtensor.as_of_torch(parameter.grad)
    if not is_at_work(optimizer):
        before_step(optimizer)
        for model in stepped_by(optimizer):
            if windows := open_windows(model):
                _check_reduced(optimizer, windows)
        compare_at_first_step(optimizer)
    for ref in [*looking]:
        if (each := ref()) is not None:
            each.optimizer_steps(optimizer)


def _look_at(optimizer: torch.optim.Optimizer) -> _CheckedOptimizer:
    """The state of an optimizer, checked again after changes.

    Raises:
        UsageError: it holds parameters that it could not step.
    """
    known, groups = _checked.get(optimizer), len(optimizer.param_groups)
    generation = registry.generation + adoptions.count
    if known is None or known[:2] != (generation, groups):
        check_parameters(optimizer)
        models = models_of(optimizer)
        distributed = any(_dtensor.is_dtensor(each) for group in optimizer.param_groups for each in group["params"])
        known = _CheckedOptimizer(generation, groups, tuple(map(weakref.ref, models)), distributed)
        _checked[optimizer] = known
    return known


def _check_reduced(optimizer: torch.optim.Optimizer, windows: list[WindowMarks]) -> None:
    """Warn if `optimizer` would step on gradients of `windows`, which are not reduced over ranks."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(window.is_stepped_by(held) for window in windows) and is_new("unreduced"):
        warn_once_per_job(
            f"{type(optimizer).__name__} steps on gradients that are not averaged over ranks: they were "
            "accumulated under no_sync(), and no backward has reduced them, so each rank's shard depends on that "
            "rank's data alone. Run the last backward before a step outside of no_sync(), under fully_shard "
            "after set_requires_gradient_sync(True)"
        )


def compare_at_first_step(optimizer: torch.optim.Optimizer) -> None:
    """Compare the options of an optimizer over ranks, if it was not done before; not collective."""
    if not is_compared(optimizer):
        compare_options(optimizer, models_of(optimizer))


def stepped_by(optimizer: torch.optim.Optimizer) -> list[Model]:
    """`models_of` an optimizer that steps, from its last check."""
    return [model for ref in _look_at(optimizer).models if (model := ref()) is not None]


@contextmanager
def waiting_in(call: str, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, this rank may wait for others in a `call` about the models that `optimizer` steps. No communication.

    Raises:
        AgreementError: a connection broke; reports the calls of the others.
    """
    with ExitStack() as waits:
        for model in stepped_by(optimizer):
            waits.enter_context(model.agreement.waiting(call))
        yield


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known = _checked.get(optimizer)
    if known is not None and not is_at_work(optimizer):
        for ref in known.models:
            if (model := ref()) is not None:
                model.agreement.stepped = True
    # If a stand-in has stepped, versions of the parameters that it fused are incremented elsewhere.
    groups = (args[0] if args and isinstance(args[0], torch.optim.Optimizer) else optimizer).param_groups
    if known is not None and known.distributed:  # writes to a list of DTensors change no versions, either
        stepped = [p for group in groups for p in group["params"] if p.grad is not None]
    else:
        groups = [group for group in groups if _writes_unnoticed(optimizer, group)]
        with_grads = [p for group in groups for p in group["params"] if p.grad is not None]
        stepped = [p for p in with_grads if registry.owner_of(p) is not None or registry.is_orphan(p)]
    if stepped:
        torch.autograd.graph.increment_version(stepped)
    for of_follower in [*following]:
        if (follower := of_follower()) is not None:
            follower.optimizer_stepped(optimizer)


def _writes_unnoticed(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether a step may change no versions: torch's fused kernels do not, nor may kernels of other libraries.
    Unsharded parameters that outlive the step, and older graphs, would not be recognized as out of date."""
    return bool(group.get("fused")) or not type(optimizer).__module__.startswith("torch.optim.")


def handles_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Model, FlatParamHandle]]:
    """The handles of the parameters that `optimizer` steps on, with their models."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in registry.models:
        for handle in (handle for unit in model.units for handle in unit.handles):
            if not held.isdisjoint(map(id, handle.face.holders)):
                yield model, handle


def models_of(optimizer: torch.optim.Optimizer) -> list[Model]:
    """The models of which `optimizer` steps parameters on every rank: a rank without elements of these parameters may
    have no optimizer for them."""
    held = handles_of(optimizer)  # the last rank is the first without elements of a handle
    return list({model: None for model, handle in held if handle.layout.owned(handle.layout.world - 1)})


def _place_of(unit: Unit, parameter: torch.Tensor) -> tuple[FlatParamHandle, int] | None:
    """The handle and the index for which `parameter` of `unit` is the leaf, or the user's own parameter."""
    for handle in unit.handles:
        for index, pair in enumerate(zip(handle.leaves, handle.face.originals, strict=True)):
            if any(each is parameter for each in pair):
                return handle, index
    return None


def _check_uncut(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if `optimizer` is known to look at whole tensors, and ranks have parts of one that it steps on.

    DTensors are whole to it: torch computes their norms and products, and torchao has rules for them.
    """
    cls = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        for _, handle in handles_of(optimizer):
            if handle.layout.world > 1 and not _dtensor.is_dtensor(handle.face.holders[0]):
                raise UsageError(
                    f"{cls.__name__} computes products over all parameters, but ranks have parts of them: each would "
                    "take steps of its own. Wrap with NO_SHARD, or use fully_shard, whose DTensors are whole to it"
                )
    known = _sees(optimizer)
    if known is None or optimizer in steps_on_wholes:
        return
    seen, remedy = known
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for _, handle in handles_of(optimizer):
        layout = handle.layout
        for index, spec in enumerate(layout.params):
            holder = handle.face.holder_of(index)
            if id(holder) not in held or _dtensor.is_dtensor(holder):
                continue
            is_cut = handle.face.shares_holder or len(parts_of(layout, index, Span(0, spec.numel))) > 1
            is_flattened = seen == _MATRICES[0] and len(spec.shape) > 1 and not layout.is_uncut(index)
            if is_cut or is_flattened:
                found = "ranks have parts of" if is_cut else "one rank has a 1-D tensor of all elements of"
                raise UsageError(
                    f"{cls.__name__} looks at {seen}, but {found} parameter {spec.name!r}: steps on these would "
                    f"compute something else. {remedy}, for copies of an optimizer again{handle.face.words.or_remedy}"
                )


def check_shapes(state: Mapping[str, Any], parameter: torch.Tensor, where: str) -> None:
    """Raise UsageError if a `state` of `parameter`, found `where`, has another shape than this rank's part of it."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
            raise UsageError(
                f"the optimizer has state from before wrapping, or of another rank: {key!r} of {where} has shape "
                f"{tuple(value.shape)}, but this rank's shard of it has {tuple(parameter.shape)}. Build the optimizer "
                "after wrapping, or wrap before its first step; and save and load "
                "FullyShardedDataParallel.optim_state_dict(model, optimizer), because optimizer.state_dict() holds the "
                "pieces of one rank"
            )


def check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer can step the parameters that it holds.

    Raises:
        UsageError: they were flattened or replaced, or its state is from before wrapping; they were registered in a
            model after its first forward, which checks those from before; it looks at whole tensors, of which ranks
            have parts.
    """
    _check_uncut(optimizer)
    strangers = set[int]()
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if (name := name_in_place_of(parameter)) is not None:
                raise UsageError(
                    f"param group {number} of the optimizer holds a parameter that replaced {name!r} "
                    "after wrapping. A forward, or the end of summon_full_params(), takes over only the values; the "
                    "wrapped parameter stays, so this one would never be updated. Build the "
                    "optimizer after that, or copy values into the parameter"
                )
            if registry.is_orphan(parameter) and is_new("copied flat"):
                warn_once_per_job(
                    f"param group {number} of the optimizer holds a flat parameter that no module computes with. "
                    "Either it was copied with the module inside a wrapper (as by copy.deepcopy(model.module)), or its "
                    "model was deleted. Copy the wrapper, or the module before wrapping"
                )
            unit = registry.owner_of(parameter)
            if unit is None and parameter.requires_grad:
                strangers.add(id(parameter))
            if unit is None:
                continue
            if (found := _place_of(unit, parameter)) is None:
                if any(parameter is each for handle in unit.handles for each in handle.parameters):
                    continue  # it was made by wrapping: no optimizer had it, or a state of it, before
                raise UsageError(
                    f"param group {number} of the optimizer holds a parameter of shape {tuple(parameter.shape)} on the "
                    f"meta device, which unit {unit.label} has replaced: it is never updated. Build the optimizer from "
                    "model.parameters() after wrapping"
                )
            handle, index = found
            spec = handle.layout.params[index]
            where = f"parameter {spec.name!r} of unit {unit.label} (param group {number})"
            if handle.face.holder_of(index) is not parameter:
                raise UsageError(f"the optimizer holds {where}, {handle.face.words.unstepped}")
            # Others check their states themselves, some on all ranks together; those of whole tensors have any shape.
            if optimizer not in steps_on_wholes and not handle.layout.is_uncut(index):
                check_shapes(optimizer.state.get(parameter, {}), parameter, where)
    for model in registry.models if strangers else ():
        for module in model.outermost.entries if model.setup.placed else ():  # modules may be deleted before the model
            check_registered(module, model.units, among=strangers)
