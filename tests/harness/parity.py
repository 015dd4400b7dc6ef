"""Training under an engine and under an oracle, compared at every step: losses, gradients, parameters.

    parity.check(2, Recipe("mlp", steps=3), sharding_strategy="SHARD_GRAD_OP", use_orig_params=True)

trains on two ranks of the pool under flatfsdp and, in this process, under the sequential reference, and fails with the
list of differences. An oracle's run is cached: a recipe is independent of the engine, so all engines share it.
"""

from __future__ import annotations

import hashlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import inspect, pool, reference
from tests.harness.gradients import (
    Gradients,
    Together,
    gradients_of,
    names_of,
    plain,
    together,
    together_in_torchs,
    unlike,
)
from tests.harness.meshes import shared_mesh
from tests.harness.plain_fsdp import PlainFSDP
from tests.harness.reference import Recipe, Story, Tensors

if TYPE_CHECKING:
    from flatfsdp import OptimizerInBackward

# --- engines ----------------------------------------------------------------------------------------------------------


class Engine(ABC):
    """An engine that can train a recipe. Engines are pickled for the workers."""

    @abstractmethod
    def wrap(self, model: nn.Module, recipe: Recipe, options: dict[str, Any]) -> nn.Module:
        """The model to train in place of ``model``, which may be consumed."""

    def optimize(self, model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
        """A new optimizer of the recipe's kind."""
        return recipe.optimize(model.parameters())

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """A context whose backwards only accumulate."""
        context: AbstractContextManager[None] = model.no_sync()
        return context

    def communicate(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context whose backwards reduce, but are not the last before a step."""
        return nullcontext()

    @abstractmethod
    def clip(self, model: nn.Module, bound: float) -> None:
        """Clip the norm of all gradients."""

    @abstractmethod
    def gradients(self, model: nn.Module) -> Gradients | None:
        """The full gradient of every trainable parameter by its plain name; None where the engine has none."""

    def together(self, model: nn.Module) -> Together:
        """The sets of parameters that have gradients together."""
        return ()

    @abstractmethod
    def tensors(self, model: nn.Module) -> tuple[Tensors, Tensors]:
        """The unsharded parameters, and this rank's buffers, by their plain names."""


@dataclass(frozen=True)
class FSDP(Engine):
    """The ``FullyShardedDataParallel`` of a package: flatfsdp's, or torch's FSDP1, which has the same interface.

    Options are its arguments, ``mesh``: the shape of a device mesh to make, and ``checkpointing``: one of
    `CHECKPOINTING`. Strategies may be given by name.
    """

    package: str = "flatfsdp"

    def wrap(self, model: nn.Module, recipe: Recipe, options: dict[str, Any]) -> nn.Module:
        package, policies = import_module(self.package), import_module(f"{self.package}.wrap")
        arguments = dict(options)
        checkpointing = arguments.pop("checkpointing", None)
        if checkpointing == "checkpoints inside units":
            recompute_forwards([module for module in model.modules() if type(module) in recipe.model.units])
        if isinstance(strategy := arguments.get("sharding_strategy"), str):
            arguments["sharding_strategy"] = package.ShardingStrategy[strategy]
        if "cpu_offload" in arguments:
            arguments["cpu_offload"] = package.CPUOffload(offload_params=arguments["cpu_offload"])
        if "mesh" in arguments:
            arguments["device_mesh"] = shared_mesh(*arguments.pop("mesh"))
        if recipe.nested:
            arguments["auto_wrap_policy"] = policies.ModuleWrapPolicy(recipe.model.units)
        if recipe.mixed:
            dtypes = {"param_dtype": recipe.compute, "reduce_dtype": recipe.reduce, "buffer_dtype": recipe.buffers}
            if recipe.accumulated is not None:
                dtypes["accumulate_dtype"] = recipe.accumulated
            arguments["mixed_precision"] = package.MixedPrecision(**dtypes)
        if self.package != "flatfsdp":
            arguments.setdefault("device_id", torch.device("cpu"))  # otherwise FSDP1 selects an accelerator
        wrapped: nn.Module = package.FullyShardedDataParallel(model, **arguments)
        if checkpointing in ("checkpoints around units", "reentrant checkpoints"):
            inside = [module for module in wrapped.modules() if type(module) is type(wrapped) and module is not wrapped]
            recompute_forwards(inside, reentrant=checkpointing == "reentrant checkpoints")
        return wrapped

    def clip(self, model: Any, bound: float) -> None:
        model.clip_grad_norm_(bound)

    def gradients(self, model: Any) -> Gradients | None:
        if self.package != "flatfsdp" and not model._use_orig_params:
            return None
        with type(model).summon_full_params(model, with_grads=True, writeback=False):
            return gradients_of(model)

    def together(self, model: Any) -> Together:
        if self.package != "flatfsdp":
            return together_in_torchs(model)
        if all(each.has_orig_params for each in inspect.flat_params(model)):
            return ()
        with type(model).summon_full_params(model, writeback=False):
            return together(model, names_of(model))

    def tensors(self, model: Any) -> tuple[Tensors, Tensors]:
        with type(model).summon_full_params(model, writeback=False):
            return _tensors(model)


@dataclass(frozen=True)
class StepsInBackward(FSDP):
    """flatfsdp with an optimizer that steps in backwards, so that gradients cannot be inspected."""

    def optimize(self, model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
        import flatfsdp

        optimizer = super().optimize(model, recipe)
        _stepping[model] = flatfsdp.optimizer_in_backward(model, optimizer)
        return optimizer

    def communicate(self, model: nn.Module) -> AbstractContextManager[None]:
        return _stepping[model].no_step()

    def gradients(self, model: Any) -> Gradients | None:
        assert not any(parameter.grad is not None for parameter in model.parameters())
        return None


_stepping: weakref.WeakKeyDictionary[nn.Module, OptimizerInBackward] = weakref.WeakKeyDictionary()

CHECKPOINTING = ("checkpoints inside units", "checkpoints around units", "reentrant checkpoints")


def recompute_forwards(modules: list[nn.Module], *, reentrant: bool = False) -> None:
    """Make the forward of each module recompute in the backward."""
    for module in modules:
        module.forward = partial(_recomputed, module.forward, reentrant)  # type: ignore[method-assign]


def _recomputed(forward: Callable[[Tensor], Tensor], reentrant: bool, x: Tensor) -> Tensor:
    if reentrant and not x.requires_grad:  # otherwise a reentrant checkpoint has no gradients
        x = x.detach().requires_grad_()
    result: Tensor = checkpoint(forward, x, use_reentrant=reentrant)
    return result


class Unsharded(Engine):
    """The common part of DDP and the plain FSDP."""

    def clip(self, model: nn.Module, bound: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), bound)

    def gradients(self, model: nn.Module) -> Gradients | None:
        return gradients_of(model)

    def tensors(self, model: nn.Module) -> tuple[Tensors, Tensors]:
        return _tensors(model)


class DDP(Unsharded):
    """torch's DistributedDataParallel."""

    def wrap(self, model: nn.Module, recipe: Recipe, options: dict[str, Any]) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, **options)


class Plain(Unsharded):
    """`PlainFSDP`: one microbatch, one dtype, no clipping."""

    def wrap(self, model: nn.Module, recipe: Recipe, options: dict[str, Any]) -> nn.Module:
        return PlainFSDP(model, recipe.model.units if recipe.nested else (), **options)

    def optimize(self, model: Any, recipe: Recipe) -> torch.optim.Optimizer:
        return recipe.optimize(model.shards)

    def gradients(self, model: nn.Module) -> Gradients | None:
        return None  # they exist only as shards

    def tensors(self, model: Any) -> tuple[Tensors, Tensors]:
        both: tuple[Tensors, Tensors] = model.whole(_tensors)
        return both


def _tensors(model: nn.Module) -> tuple[Tensors, Tensors]:
    parameters = {plain(name): param.detach().clone() for name, param in model.named_parameters()}
    return parameters, {plain(name): buffer.detach().clone() for name, buffer in model.named_buffers()}


# --- training ---------------------------------------------------------------------------------------------------------


def train(
    rank: int,
    world: int,
    recipe: Recipe,
    engine: Engine,
    options: dict[str, Any],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Story, str]:
    """A job for the pool: train by the recipe. This rank's story, and a fingerprint of its gradients and parameters.

    Only rank 0's story holds tensors other than losses: equal fingerprints show that the others' are the same.
    """
    with context():
        case, story = recipe.model, Story()
        model = engine.wrap(case.build(), recipe, options)
        optimizer = engine.optimize(model, recipe)
        accumulating = engine.no_sync if recipe.accumulate == "no_sync" else engine.communicate
        for step in range(recipe.steps):
            optimizer.zero_grad()
            story.losses.append([])
            for micro in range(recipe.micro):
                last = micro == recipe.micro - 1
                with nullcontext() if last else accumulating(model):
                    loss = case.loss(model, case.batch(rank, step, micro))
                    loss.backward()
                story.losses[-1].append([loss.detach()])
            if recipe.clip is not None:
                engine.clip(model, recipe.clip)
            gradients = engine.gradients(model)
            if gradients is not None:
                story.gradients.append(gradients)
            optimizer.step()
        story.parameters, story.buffers = engine.tensors(model)
        story.together = engine.together(model)
    fingerprint = _fingerprint([*story.gradients, {**story.parameters}])
    return (story if rank == 0 else Story(losses=story.losses)), fingerprint


def _fingerprint(groups: list[Gradients]) -> str:
    digest = hashlib.sha256()
    for group in groups:
        for name, tensor in group.items():
            if tensor is None:
                digest.update(f"{name} None".encode())
                continue
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --- comparison -------------------------------------------------------------------------------------------------------

Mode = Literal["bit", "close"]


def check(
    world: int,
    recipe: Recipe,
    *,
    engine: Engine | None = None,
    oracle: Literal["sequential", "concatenated"] = "sequential",
    mode: Mode = "bit",
    bound: float = 1e-5,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    timeout: float = 120.0,
    **options: Any,
) -> Story:
    """Train ``recipe`` on ``world`` ranks of the pool and compare with the oracle; the engine's story with all losses.

    Args:
        engine: default: flatfsdp.
        oracle: "sequential" (the ranks' batches one after the other) or "concatenated" (all at once).
        mode: "bit" (every tensor equal in every bit) or "close" (the norm of a difference is at most ``bound`` times
            the norm of the oracle's tensor).
        context: entered by every rank around the training; a function at the top of a module.
        options: for the engine.

    Raises:
        AssertionError: with a line for each tensor that differs, the first step first.
        JobFailed: a rank failed.
    """
    engine = FSDP() if engine is None else engine
    results = pool.run(world, train, recipe, engine, options, context, timeout=timeout)
    story = _joined([story for story, _ in results])
    differences = [
        f"rank {rank} ended with other gradients or parameters than rank 0"
        for rank, (_, fingerprint) in enumerate(results)
        if fingerprint != results[0][1]
    ]
    differences += compare(story, oracle_steps(recipe, world, oracle, story.together), mode=mode, bound=bound)
    what = f"{engine!r} {options} on {world} ranks, against the {oracle} reference, {recipe}"
    assert not differences, "\n".join([what, *differences[:20]])
    return story


@lru_cache(maxsize=256)
def oracle_steps(recipe: Recipe, world: int, oracle: str = "sequential", together: Together = ()) -> Story:
    """The oracle's training, computed once in this process. `together` matters where some gradients are missing."""
    if together:
        alone = oracle_steps(recipe, world, oracle)
        if all(grad is not None for gradients in alone.gradients for grad in gradients.values()):
            return alone
    if oracle == "concatenated":
        assert recipe.model.concatenable, f"the ranks' losses of {recipe.case!r} do not add up to that of one batch"
        return reference.concatenated(recipe, world, together)
    return reference.sequential(recipe, world, together)


def _joined(stories: list[Story]) -> Story:
    """Rank 0's story with the losses of all ranks."""
    joined = stories[0]
    for other in stories[1:]:
        for step, other_step in zip(joined.losses, other.losses, strict=True):
            for micro, other_micro in zip(step, other_step, strict=True):
                micro += other_micro
    return joined


def compare(story: Story, oracle: Story, *, mode: Mode, bound: float = 1e-5) -> list[str]:
    """A line for each tensor in which the stories differ. Gradients are compared where ``story`` has any."""
    lines: list[str] = []
    same = _equal if mode == "bit" else _close(bound)
    for step, (found_step, expected_step) in enumerate(zip(story.losses, oracle.losses, strict=True)):
        for micro, (found_losses, expected_losses) in enumerate(zip(found_step, expected_step, strict=True)):
            found, expected = torch.stack(found_losses), torch.stack(expected_losses)
            if found.numel() != expected.numel():  # the oracle used all ranks' batches as one
                found = found.mean(0, keepdim=True)
            lines += same(f"step {step}, microbatch {micro}: the ranks' losses", found, expected)
    for step, gradients in enumerate(story.gradients):
        lines += _compared(f"step {step}: gradient of", gradients, oracle.gradients[step], same)
    lines += _compared("at the end: parameter", story.parameters, oracle.parameters, same)
    if oracle.buffers:
        lines += _compared("at the end: rank 0's buffer", story.buffers, oracle.buffers, same)
    return lines


_Same = Callable[[str, Tensor, Tensor], Iterator[str]]


def _compared(
    what: str, found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], same: _Same
) -> Iterator[str]:
    if found.keys() != expected.keys():
        yield f"{what}: found the names {sorted(found)}, expected {sorted(expected)}"
    for name in found.keys() & expected.keys():
        mine, others = found[name], expected[name]
        if mine is not None and others is not None:
            yield from same(f"{what} {name}", mine, others)
        elif words := unlike(mine, others):
            yield f"{what} {name}: {words}"


def _equal(what: str, found: Tensor, expected: Tensor) -> Iterator[str]:
    yield from _alike(what, found, expected)
    if found.shape == expected.shape and found.dtype == expected.dtype and not torch.equal(found, expected):
        yield f"{what}: {_apart(found, expected)}"


def _close(bound: float) -> _Same:
    def close(what: str, found: Tensor, expected: Tensor) -> Iterator[str]:
        yield from _alike(what, found, expected)
        if found.shape == expected.shape:
            difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
            if not difference <= bound * size:  # NaN counts as a difference
                yield f"{what}: {_apart(found, expected)}, more than {bound:g} of its norm {size:.3g}"

    return close


def _alike(what: str, found: Tensor, expected: Tensor) -> Iterator[str]:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        found_as, expected_as = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (found, expected))
        yield f"{what}: found {found_as}, expected {expected_as}"


def _apart(found: Tensor, expected: Tensor) -> str:
    difference = found.double() - expected.double()
    count = int((found != expected).sum())
    return f"{count} of {found.numel()} elements differ, by a norm of {difference.norm():.3g}"


@contextmanager
def deprecations_allowed() -> Iterator[None]:
    """A ``context`` for engines that use deprecated functions of torch, like FSDP1 itself."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
