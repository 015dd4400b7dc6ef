"""Random training programs: forwards and backwards of many kinds, some of which fail, between steps, clips, checkpoints
and summons, under random settings, against the same program in one process. All ranks do the same on data of their
own."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

from flatfsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    comm_hooks,
    errors,
    fuse_optimizer_steps,
    inference,
    register_fsdp_forward_method,
)
from flatfsdp.engine.cpu import exchange
from flatfsdp.engine.cpu.groups import over_gloo
from tests.comm.test_shared_memory import delayed as delayed_hand_shakes
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.delayed import backwards_released_late
from tests.harness.drops import drop_gradients, unlisted
from tests.harness.error_feedback import owed_by_all
from tests.harness.gradients import RunsBackward, fill, names_of, together, unlike
from tests.harness.played_fronts import InPlace, Wrapper, whole
from tests.harness.thorough import seeds

pytestmark = pytest.mark.distributed

WIDTH = 6
LENGTH = 14  # of a program
FAILS = -1.0  # the weight of a backward inside of a forward, which fails


# The second moments of AdamW would make a lot of tiny differences.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "decay": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.5),
    "AdamW": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.5, eps=0.01),
}


class Planned(Exception):
    """The exception that a program raises and catches."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(2 * WIDTH))
        self.fails, self.uses_spare, self.returns_views = "", False, False
        self.hook = self.callers_hook = ""  # on its output

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if self.uses_spare:
            y = y * self.spare
        if self.fails == "forward":
            raise Planned
        if self.fails == "backward" and y.requires_grad:
            y.register_hook(_fail)
        x = x + self.down(F.gelu(y))
        return hooked(x[:] if self.returns_views else x, self, self.hook)


# Kinds of hooks on outputs.
HOOKS = ("", "", "", "plain", "node", "retained", "implicit")


def hooked(y: Tensor, part: Any, kind: str) -> Tensor:
    """`y`, an output of a `part`, with a hook of this kind that reads a weight of that part."""
    if not kind or y.grad_fn is None:
        return y

    def row() -> Tensor:
        return (part.before if hasattr(part, "before") else part.up).weight[0]

    def scaled(grad: Tensor) -> Tensor:
        return grad * (1.0 + 0.1 * row().detach().tanh())

    start = y.detach().clone().requires_grad_()

    def implicit(grad: Tensor) -> Tensor:
        """As implicit layers solve for gradients; linear in `grad`, which in one process is divided by the world."""
        with torch.enable_grad():
            return grad + 0.1 * torch.autograd.grad((start * row()).tanh(), start, grad.detach())[0]

    if kind == "retained":
        y.retain_grad()
    if kind == "node":
        y.grad_fn.register_prehook(lambda grads: tuple(None if each is None else scaled(each) for each in grads))
    else:
        y.register_hook(implicit if kind == "implicit" else scaled)
    return y


def _fail(grad: Tensor) -> Tensor:
    raise Planned


class Outer(nn.Module):
    """A unit around another one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.block, self.scale = nn.Linear(WIDTH, WIDTH), Block(), nn.Parameter(torch.ones(WIDTH))
        self.returns_views = False
        self.hook = self.callers_hook = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x + self.before(x)) * self.scale
        return hooked(x[:] if self.returns_views else x, self, self.hook)


class Net(nn.Module):
    def __init__(self, drawn: random.Random) -> None:
        super().__init__()
        torch.manual_seed(drawn.randrange(1000))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(drawn.choice((Block, Outer))() for _ in range(drawn.randint(2, 4)))
        self.recompute = [drawn.choice((None, None, True, False)) for _ in self.parts]
        self.encodes_twice = drawn.random() < 0.5
        self.order = [*range(len(self.parts))]
        if drawn.random() < 0.3:
            self.order.append(drawn.choice(self.order))  # is called again
        if drawn.random() < 0.3:
            drawn.choice(self.parts).requires_grad_(False)
        if drawn.random() < 0.3:
            self.last.weight = self.first.weight
        self.inside: tuple[int, float] | None = None  # a part through which a forward goes backward, and a weight
        self.asks = False  # for its parameters, inside of its forward
        self.writes = False  # to the outputs of its parts, which are views of it

    def blocks(self) -> list[Block]:
        return [module for module in self.modules() if isinstance(module, Block)]

    def encode(self, x: Tensor) -> Tensor:
        return self.parts[0](self.first(x) if self.encodes_twice else x)

    def forward(self, x: Tensor, most: int = 99) -> Tensor:
        """`most`: of its parts, run as many."""
        x = self.first(x)
        if self.inside is not None and torch.is_grad_enabled():
            index, weight = self.inside
            loss = self.parts[index](x.detach()).sin().mean() * weight
            if loss.requires_grad:
                if weight == FAILS:
                    loss.register_hook(_fail)
                with suppress(Planned):
                    loss.backward()
        for index in self.order[:most]:
            part, recompute = self.parts[index], self.recompute[index]
            x = part(x) if recompute is None else checkpoint(part, x, use_reentrant=recompute)
            if recompute is not True:  # what that returns is no output of a unit
                x = hooked(x, part, part.callers_hook)
            if self.writes and recompute is not True:  # refused by torch of reentrant checkpoints
                x.mul_(1.1)
        if self.asks:
            x = x * (1 + 0.01 * sum(p.square().sum() for each in (self.first, self.last) for p in each.parameters()))
        return self.last(x)


class Player:
    """Plays one program with a sharded model, and on the side with the same model in one process."""

    def __init__(self, rank: int, world: int, seed: int, operations: Sequence[Callable[[Player], None]] = ()) -> None:
        """`operations`: the operations to draw from; default: all, or some."""
        drawn = random.Random(seed)
        self.rank, self.world, self.drawn = rank, world, drawn
        state = drawn.getstate()
        self.alone = Net(drawn)
        drawn.setstate(state)
        net = Net(drawn)
        self.alone.asks = net.asks = random.Random(f"asks {seed}").random() < 0.3
        if random.Random(f"views {seed}").random() < 0.3:
            for each in self.alone, net:
                each.writes = True
                for part in each.modules():
                    if isinstance(part, (Block, Outer)):
                        part.returns_views = True
        if random.Random(f"hooked {seed}").random() < 0.4:
            for each in self.alone, net:
                kinds = random.Random(f"hooks {seed}")
                for part in each.modules():
                    if isinstance(part, (Block, Outer)):
                        part.hook, part.callers_hook = kinds.choice(HOOKS), kinds.choice(HOOKS)
        strategies = ["FULL_SHARD"] * 3 + ["SHARD_GRAD_OP", "NO_SHARD"] + ["HYBRID_SHARD"] * 2 * (world == 4)
        strategy = drawn.choice(strategies)
        self.original = drawn.random() < 0.6
        self.strategy = strategy
        in_place = strategy != "NO_SHARD" and random.Random(f"front {seed}").random() < 0.35
        self.front: type[Wrapper] = InPlace if in_place else Wrapper
        self.original = self.original or in_place
        self.settings: dict[str, Any] = dict(
            use_orig_params=self.original,
            cpu_offload=CPUOffload(offload_params=drawn.random() < (0.5 if strategy == "NO_SHARD" else 0.15)),
            mixed_precision=MixedPrecision(reduce_dtype=torch.float64) if drawn.random() < 0.2 else None,
            backward_prefetch=drawn.choice(("BACKWARD_PRE", "BACKWARD_MID", "BACKWARD_POST", None)),
            forward_prefetch=drawn.random() < 0.3,
            limit_all_gathers=drawn.random() < 0.7,
            join_units_below=drawn.choice((0, 2000, 2**20)),
            layout=random.Random(f"layout {seed}").choice(("flat", "rows")),
        )
        if random.Random(f"wide {seed}").random() < 0.3:
            self.settings["mixed_precision"] = MixedPrecision(reduce_dtype=torch.float64)
        if random.Random(f"computes in another dtype {seed}").random() < 0.3:  # with casts, and without rounding
            mixed = self.settings["mixed_precision"] or MixedPrecision()
            self.settings["mixed_precision"] = replace(mixed, param_dtype=torch.float64)
        # Gradients in few bits, with error feedback.
        self.owes = random.Random(f"few bits {seed}").random() < 0.3
        if self.owes:
            mixed = self.settings["mixed_precision"] or MixedPrecision()
            self.settings["mixed_precision"] = replace(mixed, reduce_bits=4, reduce_error_feedback=True)
        if (world, strategy) == (4, "FULL_SHARD") and drawn.random() < 0.4:
            self.settings["reshard_after_forward"] = 2
        units = drawn.choice(({Block, Outer}, {Block, Outer}, {Block}, {Outer}, None))
        wraps = random.Random(f"checkpoint_wrapper {seed}")
        for index, part in enumerate(net.parts):
            if net.recompute[index] is None and wraps.random() < 0.2:
                net.parts[index] = checkpoint_wrapper(part)
        self.names = names_of(net)
        self.model: Any = self.front.shard(net, units, strategy, self.settings)
        late = random.Random(f"checkpoint_wrapper inside of units {seed}")
        for index, part in enumerate(self.front.inner(self.model).parts):
            if net.recompute[index] is None and not isinstance(part, CheckpointWrapper) and late.random() < 0.2:
                apply_activation_checkpointing(part, check_fn=lambda each: isinstance(each, Block | Outer))
        register_fsdp_forward_method(self.model, "encode")
        if strategy != "HYBRID_SHARD" and drawn.random() < 0.15 and not self.owes and not in_place:
            hooks = comm_hooks.reduce_scatter_hook, comm_hooks.allreduce_hook
            self.model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), hooks[strategy == "NO_SHARD"])
        self.kind = drawn.choice((*OPTIMIZERS,))
        # Programs also reach parameters through the wrapped module.
        wrapped = random.Random(f"wrapped {seed}").random() < 0.5
        self.parameters_of: Callable[[Any], Any] = self.front.inner if wrapped else lambda net: net
        self.flat_steps = self.original and drawn.random() < 0.3
        self.optimizer, self.plain = self._optimizer(self.parameters_of(self.model)), self._optimizer(self.alone)
        if self.flat_steps:
            fuse_optimizer_steps(self.optimizer)
        self.number = self.turn = 0
        self.inside, self.queries = random.Random(f"inside {seed}"), random.Random(f"queries {seed}")
        self.reduced = True  # no gradient is this rank's own
        self.before: list[Tensor | None] = []  # where some are: those of `alone` without them
        self.exposed = False  # parameters may be whole
        self.awaits_another = False  # the last backward may be differentiated again
        self.asked = False  # and be described so, by request
        # A few operations, repeated, reach states that all of them seldom reach.
        few = random.Random(f"few operations {seed}")
        some = few.sample(ANYTIME + WHEN_REDUCED, 6) if few.random() < 0.5 else ANYTIME + WHEN_REDUCED
        if random.Random(f"torch's functions {seed}").random() < 0.4:
            some = [*some, through_torchs_functions, through_torchs_functions]
        if random.Random(f"assigns {seed}").random() < 0.3:
            some = [*some, assign_new_data, assign_new_data]
        if random.Random(f"replaces {seed}").random() < 0.3:
            some = [*some, replace_a_parameter, replace_a_parameter]
        self.offered = [each for each in operations or some if not (in_place and each in OF_WRAPPERS)]
        self.wrong: list[str] = []
        self.nodes: list[Any] = []  # that are held
        self.described = self.describe()
        self.users = [*self.model.parameters()]
        self.drops = random.Random(f"ways to drop gradients {seed}")
        if self.original and self.front is Wrapper and random.Random(f"hooks of parameters {seed}").random() < 0.3:
            for parameter in self.users:  # frozen ones have hooks of before
                trained = parameter.requires_grad
                parameter.requires_grad_(True).register_hook(lambda grad: grad * 1.0)
                parameter.requires_grad_(trained)

    def describe(self) -> list[Any]:
        """Shape, number of elements, dtype and device that each parameter reports."""
        return [(each.shape, each.numel(), each.dtype, each.device) for each in self.model.parameters()]

    def _optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.kind](net.parameters())

    def play(self) -> list[str]:
        """Play the program; the differences found, by operation."""
        for _ in range(LENGTH):
            possible = [
                each
                for each in self.offered
                if self.reduced or each not in (*WHEN_REDUCED, through_torchs_functions, assign_new_data)
            ]
            if self.original and self.asked:  # modules list unsharded parameters, which no optimizer can step on
                possible = [each for each in possible if each not in WITH_NEW_OPTIMIZERS]
            if self.front is InPlace and self.exposed:  # modules hold unsharded parameters
                possible = [each for each in possible if each not in OF_HELD_PARAMETERS]
            operation = self.drawn.choice(possible or [train])
            operation(self)
            if operation in (drop, show_whole, request_the_inputs_gradient, show_while_computing, keep):
                self.exposed = True
            elif operation in (train, accumulate):
                self.exposed = self.awaits_another  # for which parameters stay as they are
            elif operation is look and self.front is Wrapper:
                self.exposed = False
            if operation in (show_whole, show_while_computing):
                self.asked = True
            elif operation in (train, accumulate) or (operation is look and self.front is Wrapper):
                self.asked = False
            casts = self.settings["mixed_precision"] is not None and self.settings["mixed_precision"].param_dtype
            # Modules of fully_shard hold the unsharded parameters themselves, in the dtype that they compute in.
            as_computed = casts and self.exposed and self.front is InPlace
            if not (self.asked or as_computed) and self.described != (found := self.describe()):
                self.wrong.append(f"parameters are described by {found}")
            if self.front is Wrapper and not self.asked and (names := unlisted(self.model, self.users)):
                self.wrong.append(f"modules list other parameters than the user's: {names}")
            if self.wrong:
                return [f"after {operation.__name__}: {each}" for each in self.wrong]
        if not self.reduced:
            self.train(sync=True)
        step(self)
        compare(self)
        return self.wrong

    def data(self, of: int) -> Tensor:
        return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * self.number + of))

    def same(self, what: str, found: Tensor | None, expected: Tensor | None) -> None:
        if found is not None and expected is not None:
            found = found.to(expected.dtype)  # computed with casts
        if unlikeness := unlike(found, expected, rtol=1e-3, atol=1e-5):
            self.wrong.append(f"{what}: {unlikeness}")

    def both(self, work: Callable[[nn.Module, Tensor, float], Any]) -> None:
        """`work(net, x, weight)` returns the values that must be equal."""
        self.number += 1
        found = work(self.model, self.data(self.rank), 1.0)
        for of in range(self.world):
            expected = work(self.alone, self.data(of), 1.0 / self.world)
            if of == self.rank and found is not None:
                self.same("output", found, expected)

    def train(self, *, sync: bool) -> None:
        how = self.drawn.choice(BACKWARDS)
        if how in (with_a_penalty, to_be_differentiated) and any(self.alone.recompute):
            how = once  # reentrant checkpoints refuse it
        if how is once and self.queries.random() < 0.2 and not any(self.alone.recompute):
            how = inside_of_a_query
        if how is written_to_in_between:
            how = partial(written_to_in_between, self) if self.writes_in_between_stay else once
        if how is with_an_interlude:
            interludes = (look, save, show_whole, peek, count, move, hold_nodes, read_shards)
            interlude = self.drawn.choice(interludes)
            if self.reduced and random.Random(f"drops {self.number}").random() < 0.3:
                interlude = drop_gradients_in_between
            if self.front is InPlace and interlude in (look, count, hold_nodes):
                interlude = peek  # modules hold unsharded parameters then
            how = partial(with_an_interlude, interlude, self)
        wrapped = self.parts_in_units()
        if how in WITH_MORE_INSIDE and wrapped and self.inside.random() < 0.3:
            how = partial(with_a_backward_inside, self.inside.choice(wrapped), how)
        elif how is once and wrapped and sync and self.reduced and self.inside.random() < 0.7:
            how = partial(with_a_failure_inside, self, self.inside.choice(wrapped))
        manual = self.drawn.random() < 0.5
        context: AbstractContextManager[Any] = nullcontext()
        if not sync and manual:
            self.model.set_requires_gradient_sync(False)
        elif not sync:
            context = self.front.no_sync(self.model)
        if self.reduced:
            self.before = [None if each.grad is None else each.grad.clone() for each in self.alone.parameters()]
        owed = owed_by_all(self.model) if self.owes and sync else {}
        with context:
            self.both(how)
        self.awaits_another = how is to_be_differentiated and not sync  # comparisons of reduced gradients end that
        if not sync and manual:
            self.model.set_requires_gradient_sync(True)
        self.reduced = sync
        if sync:
            self.compare_reduced(owed)

    def compare_reduced(self, owed: dict[str, Tensor]) -> None:
        """Gradients were reduced; `owed`: the residuals before that."""
        if self.front is Wrapper:
            fill(self.alone, together(self.model, self.names))
        if self.owes:
            self.take_what_was_delivered(owed)

    def take_what_was_delivered(self, owed: dict[str, Tensor]) -> None:
        """The delivered gradients and the growth of the residuals since `owed` (no names before the first forward) add
        up to all gradients; the one process continues with the delivered ones."""
        delivered, now = self.front.gradients(self.model), owed_by_all(self.model)
        for name, parameter in self.alone.named_parameters():
            found, more = delivered.get(name), now[name] - owed.get(name, torch.zeros(()))
            if found is None and more.any():
                self.wrong.append(f"{name}, which has no gradient, owes something else than before")
            if parameter.requires_grad:  # else it may have one of before it was frozen
                all_of_it = None if found is None else found + more
                self.same(f"what was delivered and is owed of {name}", all_of_it, parameter.grad)
                parameter.grad = found

    def parts_in_units(self) -> list[int]:
        """The parts of the model that are units."""
        units = set(self.front.units(self.model))
        return [at for at, part in enumerate(self.front.inner(self.model).parts) if part in units]

    @property
    def writes_in_between_stay(self) -> bool:
        """Whether writes between forward and backward change the parameters between steps."""
        stay = self.strategy == "NO_SHARD" and not self.settings["cpu_offload"].offload_params
        stay = stay and getattr(self.settings["mixed_precision"], "param_dtype", None) is None
        # A wrapped part is recomputed with the written values, and in one process no part is wrapped.
        return stay and not any(isinstance(module, CheckpointWrapper) for module in self.model.modules())


def _loss(y: Tensor) -> Tensor:
    return y.square().mean()


def once(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    y = net(x)
    (_loss(y) * weight).backward()
    return y.detach()


def twice_through_one_graph(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    y = net(x)
    loss = _loss(y) * weight
    loss.backward(retain_graph=True)
    loss.backward()
    return y.detach()


def two_losses(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    y = net(x)
    (y[0].square().mean() * weight).backward(retain_graph=True)
    (y[1:].sin().mean() * weight).backward()
    return y.detach()


def two_forwards(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    y, z = net(x), net(x + 1)
    ((_loss(y) + z.sin().mean()) * weight).backward()
    return z.detach()


def two_forwards_backwards_apart(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    y, z = net(x), net(x + 1)
    (_loss(y) * weight).backward()
    (_loss(z) * weight).backward()
    return z.detach()


def backwards_in_reverse(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    y, z = net(x), net(x + 1)
    (_loss(z) * weight).backward()
    (_loss(y) * weight).backward()
    return z.detach()


def one_after_the_other(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    """The second forward reads the first one's output."""
    y = net(net(x))
    (_loss(y) * weight).backward()
    return y.detach()


def with_the_inputs_gradient(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    x.requires_grad_()
    (_loss(net(x)) * weight).backward()
    assert x.grad is not None
    return x.grad / weight


def beside_an_evaluation(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    y = net(x)
    with torch.no_grad():
        z = net(x * 2)
    (_loss(y) * weight).backward()
    return z


def some_parts(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    y = net(x, most=1)
    (_loss(y) * weight).backward()
    return y.detach()


def some_of_a_unit(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    """The data select the parts in use: on some ranks, or on all, or on none."""
    blocks = [module for module in net.modules() if isinstance(module, Block)]
    for place, block in enumerate(blocks):
        block.uses_spare = bool(x.flatten()[place] > 0)
    y = net(x)
    (_loss(y) * weight).backward()
    for block in blocks:
        block.uses_spare = False
    return y.detach()


def with_a_backward_inside(
    index: int, how: Callable[[nn.Module, Tensor, float], Tensor], net: nn.Module, x: Tensor, weight: float
) -> Tensor:
    """Each forward goes backward through a unit inside, which then runs again."""
    inner: Any = net.module if isinstance(net, FullyShardedDataParallel) else net
    inner.inside = index, weight
    try:
        return how(net, x, weight)
    finally:
        inner.inside = None


def with_a_failure_inside(player: Player, index: int, net: Any, x: Tensor, weight: float) -> Tensor:
    """A backward through a unit inside of the forward fails, and is caught there; in one process there is none."""
    inner = getattr(net, "module", net)
    if net is player.model:
        inner.inside = index, FAILS
    try:
        return once(net, x, weight)
    finally:
        inner.inside = None


def written_to_in_between(player: Player, net: nn.Module, x: Tensor, weight: float) -> Tensor:
    """The backward computes with the written values; each rank's forward computed with the earlier ones."""
    parameters = [*net.parameters()] if net is player.alone else _leaves(net)
    before = [parameter.detach().clone() for parameter in parameters]
    y = net(x)
    for parameter in parameters:
        parameter.data.mul_(0.9)
    (_loss(y) * weight).backward()
    if net is player.alone:
        player.turn = player.turn % player.world + 1
        if player.turn < player.world:
            for parameter, value in zip(parameters, before, strict=True):
                parameter.data.copy_(value)
    return y.detach()


def through_a_method(net: Any, x: Tensor, weight: float) -> Tensor:
    y = net.encode(x)
    (_loss(net(y)) * weight).backward()
    return y.detach()


def edited_in_place(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    y = net(x)
    y.mul_(2)
    z = net(x.flip(0))
    ((y.double() * z.double()).mean().float() * weight).backward()
    return y.detach()


def in_a_thread(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    y = net(x)
    with ThreadPoolExecutor(1) as pool:
        pool.submit((_loss(y) * weight).backward).result()
    return y.detach()


def with_a_penalty(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    loss = _loss(net(x.requires_grad_()))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    ((loss + gradient.square().sum()) * weight).backward()
    return gradient.detach()


def to_be_differentiated(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    y = net(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        (_loss(y) * weight).backward(create_graph=True)
    for parameter in net.parameters():
        if parameter.grad is not None and parameter.grad.requires_grad:  # in one process, where the graph would live on
            parameter.grad = parameter.grad.detach()
    return y.detach()


def inside_of_a_query(net: nn.Module, x: Tensor, weight: float) -> Tensor:
    """Gradients of inputs, beside a Function that brings those of parameters."""
    y = net(x.requires_grad_())
    loss = _loss(net(x.detach().flip(0))) * weight
    beside = RunsBackward.apply(x * 1.0, loss.backward)
    (found,) = torch.autograd.grad(_loss(y) + beside.sum(), x)
    return found


def with_an_interlude(
    operation: Callable[[Player], None], player: Player, net: nn.Module, x: Tensor, weight: float
) -> Tensor:
    y = net(x)
    if net is player.model:
        operation(player)
    (_loss(y) * weight).backward()
    return y.detach()


def peek(player: Player) -> None:
    with torch.no_grad():
        player.model(torch.ones(1, WIDTH))


def count(player: Player) -> None:
    """Sharded parameters are described as this rank's shard."""
    for unit in player.front.units(player.model):
        for flat in inspect.unit(unit).flat_params:
            if flat.is_sharded:
                found = [(leaf.shape, leaf.dtype, leaf.device) for leaf in flat.originals]
                if found != [(shard.shape, shard.dtype, shard.device) for shard in flat.sharded_views]:
                    player.wrong.append(f"unit {inspect.unit(unit).label} is described by {found}")
    if player.described != (found := player.describe()):
        player.wrong.append(f"between forward and backward parameters are described by {found}")
    if not player.asked and (names := unlisted(player.model, player.users)):
        player.wrong.append(f"between forward and backward modules list other parameters than the user's: {names}")


def read_shards(player: Player) -> None:
    """Between forward and backward parameters show no shard, except where it is the whole parameter."""
    if player.front is InPlace or not player.original or player.strategy == "NO_SHARD":
        return
    for name, parameter in zip(player.names, player.users, strict=False):
        with suppress(errors.UsageError), torch.no_grad():
            parameter.norm()
            player.wrong.append(f"between forward and backward {name} shows {tuple(parameter.shape)}")


def move(player: Player) -> None:
    """To where everything is."""
    player.model.to("cpu").float().cpu()


BACKWARDS = (
    through_a_method,
    edited_in_place,
    in_a_thread,
    some_parts,
    some_of_a_unit,
    some_of_a_unit,
    written_to_in_between,
    with_a_penalty,
    to_be_differentiated,
    with_an_interlude,
    with_an_interlude,
    once,
    once,
    twice_through_one_graph,
    two_losses,
    two_forwards,
    two_forwards_backwards_apart,
    backwards_in_reverse,
    one_after_the_other,
    with_the_inputs_gradient,
    beside_an_evaluation,
)
# Programs into which a backward inside of the forward fits.
WITH_MORE_INSIDE = (once, twice_through_one_graph, two_losses, two_forwards, two_forwards_backwards_apart)


def hold_nodes(player: Player) -> None:
    """Hold the nodes that accumulate gradients, as Horovod does, for a while."""
    parameters = [p for p in player.model.parameters() if p.requires_grad]
    player.nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in parameters]
    if player.original:
        for node, parameter in zip(player.nodes, parameters, strict=True):
            node.register_hook(partial(_check_final, player, parameter))


def _check_final(player: Player, parameter: Tensor, before: Any, after: Any) -> None:
    if parameter.grad is not after[0] or parameter.grad.shape != parameter.shape:
        player.wrong.append("a hook of a node that is held ran on what is not the sharded gradient")


def let_nodes_go(player: Player) -> None:
    player.nodes = []


def train(player: Player) -> None:
    player.train(sync=True)


def accumulate(player: Player) -> None:
    player.train(sync=False)


def add_up_within_replicas(player: Player) -> None:
    """Microbatches whose sums are reduced over shards alone, and a last one that completes them; with a failure
    between, or not. Their gradients are deferred, or not."""
    drawn = random.Random(f"within replicas {player.number}")
    owed = owed_by_all(player.model) if player.owes else {}
    player.model.set_requires_all_reduce(False)
    deferred = drawn.random() < 0.5
    if deferred:
        player.model.set_is_last_backward(False)
    for index in range(drawn.choice((1, 2, 2, 3))):
        player.both(drawn.choice((once, two_losses, two_forwards, some_parts)))
        if index == 0 and not player.owes and player.strategy == "HYBRID_SHARD" and drawn.random() < 0.3:
            player.reduced = True  # a failure drops no gradient: none is accumulated without a reduction
            fail(player)
    player.model.set_requires_all_reduce(True)
    if deferred:
        player.model.set_is_last_backward(True)
    player.both(once)
    player.reduced = True
    player.compare_reduced(owed)


def reduce_accumulated(player: Player) -> None:
    owed = owed_by_all(player.model) if player.owes else {}
    player.model.reduce_accumulated_gradients()
    if not player.reduced:
        player.reduced = True
        player.compare_reduced(owed)


def evaluate(player: Player) -> None:
    inside = player.drawn.choice((torch.no_grad, torch.inference_mode))
    training = player.drawn.random() < 0.5

    def work(net: nn.Module, x: Tensor, weight: float) -> Tensor:
        net.train(training)
        with inside():
            y = net(x)
        net.train()
        return y.clone()

    player.both(work)


def drop(player: Player) -> None:
    """A forward without a backward."""
    player.both(lambda net, x, weight: net(x).detach())


def request_the_inputs_gradient(player: Player) -> None:
    if any(recompute for recompute in player.alone.recompute):
        return  # which reentrant checkpoints refuse

    def work(net: nn.Module, x: Tensor, weight: float) -> Tensor:
        (found,) = torch.autograd.grad(_loss(net(x.requires_grad_())), x)
        return found

    player.both(work)


def fail(player: Player) -> None:
    """A forward or a backward that a block ends. Gradients stay as they were; a backward also discards gradients
    that were accumulated and not reduced."""
    index = player.drawn.randrange(len(player.alone.blocks()))
    block = [each for each in player.model.modules() if isinstance(each, Block)][index]
    player.number += 1
    block.fails = player.drawn.choice(("forward", "backward"))
    late = [random.Random(f"late {player.number} {rank}").random() < 0.2 for rank in range(player.world)]
    held: list[object] = []
    with (
        nullcontext() if player.drawn.random() < 0.5 else player.front.no_sync(player.model),
        backwards_released_late(held) if late[player.rank] else nullcontext(),
    ):
        try:
            loss = _loss(player.model(player.data(player.rank)))
            if block.fails == "forward":
                player.wrong.append("nothing failed")
            loss.backward()
            player.wrong.append("nothing failed")
        except Planned:
            pass
    if block.fails == "backward" and not player.reduced:
        for parameter, grad in zip(player.alone.parameters(), player.before, strict=True):
            parameter.grad = grad
        player.reduced = True
    block.fails = ""
    if any(late):
        peek(player)  # the first operation after it that ranks do together


def look(player: Player) -> None:
    for (name, found, _), expected in zip(
        player.front.shown(player.model, False), player.alone.parameters(), strict=True
    ):
        player.same(name, found, expected)


def write(player: Player) -> None:
    player.front.write(player.model)
    with torch.no_grad():
        for parameter in player.alone.parameters():
            parameter.mul_(0.95)


def save(player: Player) -> None:
    expected = player.alone.state_dict()
    found = player.front.state(player.model)
    for name in expected:
        player.same(name, found[name], expected[name])


def load(player: Player) -> None:
    state = {name: value * 0.9 for name, value in player.alone.state_dict().items()}
    player.front.load(player.model, state)
    player.alone.load_state_dict(state)


def show_whole(player: Player) -> None:
    units = player.front.units(player.model)
    chosen = player.drawn.sample(units, player.drawn.randint(1, len(units)))
    for unit in chosen:
        unit.unshard()
    if player.drawn.random() < 0.5:
        for unit in chosen:
            unit.reshard()


def compare(player: Player) -> None:
    """Parameters, and gradients."""
    for (name, found, grad), expected in zip(
        player.front.shown(player.model, player.original), player.alone.parameters(), strict=True
    ):
        player.same(name, found, expected)
        if player.original:
            player.same(f"gradient of {name}", grad, expected.grad)


def step(player: Player) -> None:
    set_to_none = player.drawn.random() < 0.6
    for optimizer in player.optimizer, player.plain:
        optimizer.step()
        optimizer.zero_grad(set_to_none)


def clip(player: Player) -> None:
    kind = player.drawn.choice((2.0, 1.0, float("inf")))
    if player.front is InPlace and kind == float("inf"):
        kind = 2.0  # torch's functions fail on DTensors of which a rank has no elements, as under its FSDP2
    held = [parameter for group in player.optimizer.param_groups for parameter in group["params"]]
    grads = [each.grad for each in held if each.grad is not None]
    fewest = torch.tensor(len(grads))  # no gradients are not known to be those of shards
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
    match random.Random(f"clip {player.number} {player.turn}").randrange(4):
        case 0:
            found = nn.utils.clip_grad_norm_(held, 0.01, kind)
        case 1 if fewest:
            found = nn.utils.get_total_norm(grads, kind)
            nn.utils.clip_grads_with_norm_(held, 0.01, found)
        case _:
            found = player.model.clip_grad_norm_(0.01, kind)
    expected = nn.utils.clip_grad_norm_(player.alone.parameters(), 0.01, kind)
    player.same("norm", whole(found), expected)


def resume(player: Player) -> None:
    """The optimizer's state goes into another optimizer."""
    state = FullyShardedDataParallel.optim_state_dict(player.model, player.optimizer)
    player.optimizer = player._optimizer(player.model)
    player.optimizer.load_state_dict(
        FullyShardedDataParallel.optim_state_dict_to_load(player.model, player.optimizer, state)
    )
    if player.flat_steps:
        fuse_optimizer_steps(player.optimizer)


def through_torchs_functions(player: Player) -> None:
    """Model and optimizer, a new one, from the result of torch's functions. A step of all parameters comes first:
    torch makes states where it finds none, as of one step more. Whole ones of plain SGD, which has none, it refuses."""
    if player.kind == "SGD":
        return
    blocks = [each for net in (player.model, player.alone) for each in net.modules() if isinstance(each, Block)]
    owed = owed_by_all(player.model) if player.owes else {}
    for block in blocks:
        block.uses_spare = True
    player.both(once)
    for block in blocks:
        block.uses_spare = False
    player.compare_reduced(owed)
    step(player)
    for optimizer in player.optimizer, player.plain:
        optimizer.zero_grad()  # where there are gradients torch makes no states to load into
    options = StateDictOptions(full_state_dict=player.drawn.random() < 0.5)
    state, states = get_state_dict(player.model, player.optimizer, options=options)
    player.optimizer = player._optimizer(player.parameters_of(player.model))
    set_state_dict(player.model, player.optimizer, model_state_dict=state, optim_state_dict=states, options=options)
    for parameter in player.alone.parameters():
        if not parameter.requires_grad:
            player.plain.state.pop(parameter, None)  # as torch's functions lose it, also in one process
    if player.flat_steps:
        fuse_optimizer_steps(player.optimizer)


def edit_gradients(player: Player) -> None:
    for net in player.model, player.alone:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def edit_shards(player: Player) -> None:
    if player.exposed:
        return  # writes to unsharded parameters would be lost, and are errors
    how = random.Random(f"edits {player.number} {player.turn}").choice(("in turn", "all", "data", "lists"))
    with torch.no_grad():
        for net in player.model, player.alone:
            if how == "lists":
                torch._foreach_mul_([*net.parameters()], 0.9)
                continue
            for index, parameter in enumerate(net.parameters()):
                by_data = index % 2 if how == "in turn" else how == "data"
                (parameter.data if by_data else parameter).mul_(0.9)


def drop_gradients_inside_summon(player: Player) -> None:
    if not player.original:
        return  # flat gradients get zeros
    with FullyShardedDataParallel.summon_full_params(player.model, with_grads=True):
        for net in player.model, player.alone:
            for parameter in [*net.parameters()][::2]:
                parameter.grad = None


def assign_new_data(player: Player) -> None:
    """Other weights, a forward, and the weights again, as with moving averages; then new ones, and new gradients."""
    if player.exposed:
        return  # the weights would be unsharded
    for net in player.model, player.alone:
        kept = [parameter.data for parameter in net.parameters()]
        for parameter in net.parameters():
            parameter.data = parameter.data * 1.1
        with torch.no_grad():
            net(torch.ones(1, WIDTH))
        for parameter, value in zip(net.parameters(), kept, strict=True):
            parameter.data = value
            parameter.data = parameter.data * 0.9
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data * 0.5


def replace_a_parameter(player: Player) -> None:
    """A new parameter, which has no gradient, or a part of the former one's: not where that is of this rank's data
    alone. Optimizers keep the one that was wrapped."""
    if not player.original or player.exposed or player.alone.last.weight is player.alone.first.weight:
        return
    last, alone = player.front.inner(player.model).last, player.alone.last
    kept, with_gradient = last.weight, player.queries.random() < 0.3
    made = last.weight = nn.Parameter(kept.detach() * 0.9, kept.requires_grad)
    with torch.no_grad():
        alone.weight.mul_(0.9)
    if with_gradient and player.reduced and alone.weight.grad is not None:
        made.grad = None if kept.grad is None else kept.grad * 0.5
        alone.weight.grad.mul_(0.5)
    else:
        alone.weight.grad = None
    look(player)  # adopts it: operations on the model's parameters before that would go to the new one


def clear(player: Player) -> None:
    set_to_none = player.drawn.random() < 0.6
    drop_gradients(player.parameters_of(player.model), player.optimizer, player.drops, to_none=set_to_none)
    player.alone.zero_grad(set_to_none)


def drop_gradients_in_between(player: Player) -> None:
    """Those of earlier backwards, between a forward and its backward."""
    clear(player)
    player.before = [None if each.grad is None else each.grad.clone() for each in player.alone.parameters()]


def _leaves(model: Any) -> list[nn.Parameter]:
    return [leaf for flat in inspect.flat_params(model) for leaf in flat.originals]


def go_on_with_a_copy(player: Player) -> None:
    state = FullyShardedDataParallel.optim_state_dict(player.model, player.optimizer)
    before = _leaves(player.model)
    player.model = copy.deepcopy(player.model)
    player.front.at_rest(player.model)
    player.users = [*player.model.parameters()]
    player.names = {leaf: player.names[old] for leaf, old in zip(_leaves(player.model), before, strict=True)}
    player.optimizer = player._optimizer(player.model)
    player.optimizer.load_state_dict(
        FullyShardedDataParallel.optim_state_dict_to_load(player.model, player.optimizer, state)
    )
    player.alone.zero_grad()  # copies of parameters have no gradients


def save_and_load(player: Player) -> None:
    kind = player.drawn.choice(player.front.kinds(player.settings["layout"]))
    with player.front.own_state(player.model, kind):
        state = {name: value.clone() for name, value in player.model.state_dict().items()}
        if not player.exposed:
            with torch.no_grad():
                for parameter in player.model.parameters():
                    parameter.zero_()
        player.model.load_state_dict(state)


def freeze_or_thaw(player: Player) -> None:
    if not player.original:
        return
    index = player.drawn.randrange(len(player.alone.blocks()))
    for net in player.model, player.alone:
        block = [each for each in net.modules() if isinstance(each, Block)][index]
        clear(player)
        block.requires_grad_(not block.down.bias.requires_grad)


def control(player: Player) -> None:
    drawn, model = player.drawn, player.model
    units = player.front.units(model)
    unit, flag, recurse = drawn.choice(units), drawn.random() < 0.5, drawn.random() < 0.5
    others = [each for each in units if each is not unit and drawn.random() < 0.5]
    drawn.choice(
        (
            lambda: unit.set_reshard_after_forward(flag, recurse=recurse),
            lambda: unit.set_reshard_after_backward(flag, recurse=recurse),
            lambda: unit.set_modules_to_forward_prefetch(others),
            lambda: unit.set_modules_to_backward_prefetch(others),
            lambda: model.set_requires_all_reduce(True),
            lambda: model.set_is_last_backward(flag),
        )
    )()


def infer(player: Player) -> None:
    def work(net: nn.Module, x: Tensor, weight: float) -> Tensor:
        with inference(net) if net is player.model else torch.no_grad():
            return (net(x) + net(x)).clone()

    player.both(work)


def keep(player: Player) -> None:
    player.model.keep_frozen_unsharded()


def show_while_computing(player: Player) -> None:
    units = player.front.units(player.model)
    handles = [unit.unshard(async_op=True) for unit in units]
    player.number += 1
    player.same("output", player.model(player.data(0)), player.alone(player.data(0)))
    for handle in handles:
        handle.wait()


def summon_a_part(player: Player) -> None:
    index = player.drawn.randrange(len(player.alone.parts))
    part, alone = player.model.module.parts[index], player.alone.parts[index]
    with FullyShardedDataParallel.summon_full_params(part, recurse=player.drawn.random() < 0.5):
        pass
    with FullyShardedDataParallel.summon_full_params(player.model, offload_to_cpu=True, writeback=False):
        for found, expected in zip(part.parameters(), alone.parameters(), strict=True):
            player.same("part", found, expected)


def save_a_part(player: Player) -> None:
    index = player.drawn.randrange(len(player.alone.parts))
    if index not in player.parts_in_units():
        return
    found = player.front.state(player.front.inner(player.model).parts[index])
    for name, expected in player.alone.parts[index].state_dict().items():
        player.same(name, found[name], expected)


def replace_inside_summon(player: Player) -> None:
    if player.alone.last.weight is player.alone.first.weight:
        return  # of tied ones it is refused
    with FullyShardedDataParallel.summon_full_params(player.model), torch.no_grad():
        last = player.model.module.last
        last.weight = nn.Parameter(last.weight * 0.9)
        player.alone.last.weight.mul_(0.9)
    look(player)  # adopts it: operations on the model's parameters before that would go to the new one


ANYTIME = [
    hold_nodes,
    let_nodes_go,
    infer,
    keep,
    show_while_computing,
    summon_a_part,
    save_a_part,
    control,
    train,
    train,
    accumulate,
    accumulate,
    add_up_within_replicas,
    reduce_accumulated,
    evaluate,
    drop,
    request_the_inputs_gradient,
    fail,
    look,
    save,
    show_whole,
]
WHEN_REDUCED = [
    edit_gradients,
    edit_shards,
    clear,
    go_on_with_a_copy,
    save_and_load,
    freeze_or_thaw,
    step,
    step,
    step,
    step,
    compare,
    clip,
    resume,
    write,
    load,
    replace_inside_summon,
    drop_gradients_inside_summon,
]


# Missing from modules of fully_shard: nodes of unsharded parameters, and summons of parts.
OF_WRAPPERS = (
    hold_nodes,
    let_nodes_go,
    summon_a_part,
    replace_a_parameter,  # by a DTensor it would be another parameter, which optimizers do not have
    replace_inside_summon,
    drop_gradients_inside_summon,
)
# Operations on the parameters that modules hold, which must be those at rest.
OF_HELD_PARAMETERS = (
    resume,
    freeze_or_thaw,
    edit_gradients,
    edit_shards,
    assign_new_data,
    clear,
    write,
    through_torchs_functions,
)

WITH_NEW_OPTIMIZERS = (resume, go_on_with_a_copy, through_torchs_functions)

# A likely mistake is reported for programs that make it, and for no other.
SUSPICIONS = ("no optimizer steps on",)


# Operations that leave parameters unsharded, or find them so.
SHOWING = [drop, show_whole, show_whole, show_while_computing, show_while_computing, step, look, evaluate]


def _play(rank: int, world: int, seed: int, operations: Sequence[Callable[[Player], None]] = ()) -> list[str]:
    with (
        warnings.catch_warnings(record=True) as caught,
        # The delay before this rank's thread progresses pending work while the program computes.
        patch.object(exchange, "PERIOD", random.Random(f"period {seed} {rank}").choice((0.0001, exchange.PERIOD))),
        patch.object(
            exchange, "TRIM_AFTER", random.Random(f"rest {seed} {rank}").choice((0.0001, exchange.TRIM_AFTER))
        ),
        patch.object(errors, "_warned", set()),
        inspect.large_gradients() if random.Random(f"large {seed}").random() < 0.5 else nullcontext(),
    ):
        warnings.simplefilter("always", errors.FlatFSDPWarning)
        found = Player(rank, world, seed, operations).play()
    texts = [str(each.message) for each in caught if str(each.message).startswith(SUSPICIONS)]
    return found + texts


def world_of(seed: int) -> int:
    return (2, 2, 3, 4)[seed % 4]


@pytest.mark.parametrize("seed", seeds(4, 200))
def test_programs_do_what_they_do_in_one_process(run: Run, seed: int) -> None:
    assert run(world_of(seed), _play, seed, timeout=60) == [[]] * world_of(seed)


def _play_over_gloo(rank: int, world: int, seed: int) -> list[str]:
    with over_gloo():
        return _play(rank, world, seed)


def _play_late(rank: int, world: int, seed: int) -> list[str]:
    with delayed_hand_shakes(random.Random(f"late {seed} {rank}"), share=0.05):
        return _play(rank, world, seed)


@pytest.mark.parametrize("seed", seeds(1, 100))
def test_so_they_do_where_ranks_are_late_at_hand_shakes(run: Run, seed: int) -> None:
    assert run(world_of(seed), _play_late, seed, timeout=60) == [[]] * world_of(seed)


# Shared memory is the default.
@pytest.mark.parametrize("seed", seeds(1, 200))
def test_so_they_do_over_gloo(run: Run, seed: int) -> None:
    assert run(world_of(seed), _play_over_gloo, seed, timeout=60) == [[]] * world_of(seed)


def _play_showing(rank: int, world: int, seed: int) -> list[str]:
    return _play(rank, world, seed, SHOWING)


# 58: a unit left by a forward without a backward, freed by the user, is being gathered as the next forward begins.
@pytest.mark.parametrize("seed", sorted({*seeds(1, 100), 58}))
def test_so_they_do_where_users_show_parameters_again_and_again(run: Run, seed: int) -> None:
    assert run(world_of(seed), _play_showing, seed, timeout=60) == [[]] * world_of(seed)
