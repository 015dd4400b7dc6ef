"""The oracles: one process without any engine, slow and simple.

`sequential` runs the ranks' batches one after the other and combines their gradients as the engine is specified to:
cast, add in rank order, scale. An engine must equal it bit for bit wherever its exchange adds in that order.
`concatenated` is plain training on all ranks' batches at once, which must agree within rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.gradients import Gradients, Together, fill, gradients_of
from tests.harness.models import CASES, OF_FULLY_SHARD, Batch, Case, unit_first

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """The training of a model, for both the engine and its reference.

    Attributes:
        case: a name in `models.CASES`, or in `models.OF_FULLY_SHARD`.
        steps: optimizer steps.
        micro: microbatches per step.
        accumulate: with several microbatches, "no_sync" (gradients add up unsharded and are reduced once) or
            "communicate" (every microbatch is reduced and the sharded results add up).
        optimizer: "sgd" (with momentum) or "adamw"; both decay weights.
        compute, reduce, accumulated, buffers: dtypes of `MixedPrecision`; None for unchanged ones.
        nested: the case's units are wrapped, and, where a dtype is given, batch norms, in full precision; otherwise
            the whole model is one unit.
        replicas: replica groups of a hybrid strategy. Each group sums over its own ranks first.
        clip: the bound for the norm of all gradients; None does not clip.
        early: a unit's forward runs separately before the root's, and its output is in the loss (`models.unit_first`).
    """

    case: str = "mlp"
    steps: int = 3
    micro: int = 1
    accumulate: str = "no_sync"
    optimizer: str = "sgd"
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulated: torch.dtype | None = None
    buffers: torch.dtype | None = None
    nested: bool = True
    replicas: int = 1
    clip: float | None = None
    early: bool = False

    @property
    def mixed(self) -> bool:
        """Whether any dtype is given."""
        return bool(self.compute or self.reduce or self.accumulated or self.buffers)

    @property
    def model(self) -> Case:
        """The case with this name."""
        case = (CASES | OF_FULLY_SHARD)[self.case]
        return unit_first(case) if self.early else case

    def optimize(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
        return torch.optim.SGD(parameters, lr=5e-2, momentum=0.9, weight_decay=0.1)


@dataclass
class Story:
    """The results of a training run: ``losses[step][micro][rank]``, the gradients of each step, the final state."""

    losses: list[list[list[Tensor]]] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    together: Together = ()  # parameters that have gradients together in each step
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)  # rank 0's, in the dtypes that the model was built with


def sequential(recipe: Recipe, world: int, together: Together = ()) -> Story:
    """Train on ``world`` ranks' batches, one rank after the other, on a full copy each.

    Gradients are cast to the reduce dtype, added in rank order (within a replica group, then over the groups), scaled
    by 1 / ``world`` and cast to the parameter's dtype. A missing gradient of one rank counts as zero; one that is
    missing on all is None, unless another one of its set ``together`` exists. fp16 is divided before the sum by the
    next power of two, and the remaining factor is applied afterwards.
    """
    with _one_thread():
        case, story = recipe.model, Story(together=together)
        master = case.build()
        ranks = [_Rank(master, recipe, world) for _ in range(world)]
        optimizer = recipe.optimize(master.parameters())
        trained = {name: param for name, param in master.named_parameters() if param.requires_grad}
        for step in range(recipe.steps):
            optimizer.zero_grad()
            story.losses.append([])
            for micro in range(recipe.micro):
                story.losses[-1].append([rank.run(master, case.batch(i, step, micro)) for i, rank in enumerate(ranks)])
                if recipe.accumulate == "communicate" or micro == recipe.micro - 1:
                    averaged = _average([rank.release() for rank in ranks], recipe)
                    for name, average in averaged.items():
                        param = trained[name]
                        grad = average.to(param.dtype)
                        param.grad = grad if param.grad is None else param.grad + grad
            _finish_step(master, optimizer, recipe, story)
        story.parameters = {name: param.detach() for name, param in master.named_parameters()}
        story.buffers = ranks[0].buffers
        return story


def concatenated(recipe: Recipe, world: int, together: Together = ()) -> Story:
    """Train one model on the ranks' concatenated batches: no casts, no ranks. ``losses`` has one rank."""
    with _one_thread():
        case, story = recipe.model, Story(together=together)
        model = case.build()
        optimizer = recipe.optimize(model.parameters())
        for step in range(recipe.steps):
            optimizer.zero_grad()
            story.losses.append([])
            for micro in range(recipe.micro):
                batches: list[Batch] = [case.batch(rank, step, micro) for rank in range(world)]
                loss = case.loss(model, tuple(torch.cat(parts) for parts in zip(*batches, strict=True)))
                loss.backward()
                story.losses[-1].append([loss.detach()])
            _finish_step(model, optimizer, recipe, story)
        story.parameters = {name: param.detach() for name, param in model.named_parameters()}
        return story


def _finish_step(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, story: Story) -> None:
    fill(model, story.together)
    if recipe.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    story.gradients.append(gradients_of(model))
    optimizer.step()


class _Rank:
    """The state of one rank: buffers, a copy of the model in the compute dtypes, unreduced gradients."""

    def __init__(self, master: nn.Module, recipe: Recipe, world: int) -> None:
        self.model = copy.deepcopy(master)
        self.case = recipe.model
        # Batch norms in separate units: full precision, with inputs and outputs cast.
        norms = [module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        full = norms if recipe.nested and recipe.mixed else []
        kept = {id(param) for module in full for param in module.parameters()}
        self.reduce_dtypes: dict[str, torch.dtype] = {}
        self.window_dtypes: dict[str, torch.dtype] = {}
        for name, param in self.model.named_parameters():
            lower = param.is_floating_point() and id(param) not in kept
            if lower and recipe.compute is not None:
                param.data = param.data.to(recipe.compute)
            self.reduce_dtypes[name] = recipe.reduce if lower and recipe.reduce else param.dtype
            accumulates = recipe.micro > 1 and recipe.accumulate == "no_sync"
            self.window_dtypes[name] = (
                recipe.accumulated if lower and accumulates and recipe.accumulated else self.reduce_dtypes[name]
            )
        # Computation may read buffers in a lower dtype, but only its writes to them lose precision.
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if recipe.buffers is not None and module not in full and buffer.is_floating_point():
                    setattr(module, name, buffer.to(recipe.buffers))
        if recipe.compute is not None:
            self.model.register_forward_pre_hook(lambda _, inputs: _cast(inputs, recipe.compute))
            for module in full:
                module.register_forward_pre_hook(lambda _, inputs: _cast(inputs, torch.float32))
                module.register_forward_hook(lambda _, inputs, output: output.to(recipe.compute))
        # Sums of normal gradients can overflow fp16: divide before, exactly, and apply the remaining factor after.
        self.divisors = {
            name: 2 ** (world - 1).bit_length() if dtype == torch.float16 else 1
            for name, dtype in self.reduce_dtypes.items()
        }
        self.window: Tensors = {}

    def run(self, master: nn.Module, batch: Batch) -> Tensor:
        """One forward and backward on the weights of ``master``; returns the loss. Gradients add to the window."""
        with torch.no_grad():
            for param, source in zip(self.model.parameters(), master.parameters(), strict=True):
                param.copy_(source)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.buffers[name])
        loss = self.case.loss(self.model, batch)
        for name, buffer in self.model.named_buffers():
            before = self.buffers[name]
            self.buffers[name] = torch.where(buffer != before.to(buffer.dtype), buffer.to(before.dtype), before)
        loss.backward()
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                grad = param.grad / self.divisors[name]
                if name in self.window:
                    self.window[name].add_(grad)
                else:
                    self.window[name] = grad.to(self.window_dtypes[name])
                param.grad = None
        return loss.detach()

    def release(self) -> Tensors:
        """The window's gradients of parameters that this rank has reached, in the reduce dtype; starts a new window."""
        window, self.window = self.window, {}
        return {name: grad.to(self.reduce_dtypes[name]) for name, grad in window.items()}


def _average(of_ranks: list[Tensors], recipe: Recipe) -> Tensors:
    """The ranks' average gradients, in the reduce dtype, of the parameters that any rank has reached."""
    world = len(of_ranks)
    per_group = world // recipe.replicas
    averaged = {}
    for name in dict.fromkeys(name for grads in of_ranks for name in grads):
        there = next(grads[name] for grads in of_ranks if name in grads)
        grads = [grads[name] if name in grads else torch.zeros_like(there) for grads in of_ranks]
        groups = [reduce(torch.add, grads[start : start + per_group]) for start in range(0, world, per_group)]
        divided = 2 ** (world - 1).bit_length() if grads[0].dtype == torch.float16 else 1
        averaged[name] = reduce(torch.add, groups) * (divided / world)
    return averaged


def _cast(inputs: tuple[Any, ...], dtype: torch.dtype | None) -> tuple[Any, ...]:
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


class _one_thread:
    """A context with one thread, as in the workers: with more, a product is split, and rounds, differently."""

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *exception: Any) -> None:
        torch.set_num_threads(self.before)
