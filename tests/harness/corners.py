"""Any training program under the engine and, rank after rank, under plain autograd in one process: both must agree.

A *program* is `program(model, rank, step)`: it runs forwards and backwards with that rank's data and returns further
tensors to compare (losses, gradients of inputs). The oracle runs it on one plain copy of the model per rank and
averages `.grad` in rank order, once for all settings; the engine runs it once per rank under each. Each step is
compared, and followed by an SGD step.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.comm.transport import doubled
from flatfsdp.engine.cpu import exchange
from flatfsdp.engine.device.memory import poison
from flatfsdp.wrap import ModuleWrapPolicy
from tests.harness import inspect
from tests.harness.delayed import DelayedTransport
from tests.harness.gradients import (
    Gradients,
    Names,
    Together,
    averaged_over_ranks,
    filled,
    gradients_of,
    names_of,
    plain,
    together,
    unlike,
)
from tests.harness.meshes import replicas_of_shards
from tests.harness.models import WIDTH, Feedforward
from tests.harness.thorough import is_thorough

Program = Callable[[Any, int, int], Any]
LR = 0.05


@dataclass(frozen=True)
class Setting:
    """The wrapping of a model.

    `doubled`: under a late communicator and poisoned buffers, and a thread that progresses exchanges at any moment.
    `post_forward`: the number of ranks that share parameters between forward and backward. `large`: units and
    gradients, which are small here, are treated as large ones: exchanged and moved individually as they arrive.
    `rows`: each parameter is split by rows.
    """

    strategy: str = "FULL_SHARD"
    orig: bool = True
    doubled: bool = False
    offload: bool = False
    post_forward: int | None = None
    large: bool = False
    rows: bool = False

    def __str__(self) -> str:
        flags = {
            "doubled": self.doubled,
            "offload": self.offload,
            f"post_forward {self.post_forward}": self.post_forward is not None,
        }
        flags |= {"large": self.large, "rows": self.rows}
        return " ".join([self.strategy, "orig" if self.orig else "flat", *(word for word, on in flags.items() if on)])

    def wrap(self, model: nn.Module, units: Collection[type[nn.Module]], **more: Any) -> FullyShardedDataParallel:
        """`model`, wrapped with the modules of the classes `units`, and the whole model, as units."""
        if "HYBRID" in self.strategy:
            more["device_mesh"] = replicas_of_shards()
        if self.large:
            more["join_units_below"] = 0
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self.strategy,
            use_orig_params=self.orig,
            cpu_offload=self.offload,
            reshard_after_forward=self.post_forward,
            layout="rows" if self.rows else "flat",
            auto_wrap_policy=ModuleWrapPolicy(set(units)) if units else None,
            **more,
        )

    def doubles(self) -> AbstractContextManager[Any]:
        """A context with the requested doubles and with large gradients."""
        stack = ExitStack()
        if self.large:
            stack.enter_context(inspect.large_gradients())
        if self.doubled:
            stack.enter_context(doubled(DelayedTransport))
            # With the shorter period, the thread uses a quarter of the processor.
            often = 0.0001 if is_thorough() else 0.001
            stack.enter_context(patch.multiple(exchange, PERIOD=often, TRIM_AFTER=2 * often))
            stack.enter_context(poison())
        return stack


PLAIN = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
# Every strategy with and without original parameters; alternately plain and doubled, small and large; some by rows.
ALL = tuple(
    Setting(s, orig, doubled=(i + orig) % 2 == 1, large=orig, rows=s == "SHARD_GRAD_OP" and orig)
    for i, s in enumerate(PLAIN)
    for orig in (True, False)
)
# Alternatives for many programs: each half has every strategy, and both values of all other fields.
HALVES = tuple(ALL[i] for i in (0, 2, 5)), tuple(ALL[i] for i in (1, 3, 4))
# Alternatives for more: FULL_SHARD and another strategy, one of them with original parameters.
PAIRS = (ALL[0], ALL[3]), (ALL[1], ALL[2]), (ALL[0], ALL[5]), (ALL[1], ALL[4])
HYBRID = tuple(
    Setting(s, orig, doubled=orig, large=not orig, rows=s != "HYBRID_SHARD" and not orig)
    for s in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    for orig in (True, False)
)

# The same for these settings: both strategies, and both values of all other fields.
HYBRID_HALVES = HYBRID[::3], HYBRID[1:3]
OFFLOADED = tuple(
    Setting(s, orig, offload=True) for s, orig in (("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("NO_SHARD", True))
)


def chosen(program: Callable[..., Any], sets: Sequence[tuple[Setting, ...]] = PAIRS) -> tuple[Setting, ...]:
    """One of the `sets`, chosen by the program's name and its text arguments; with --thorough all settings."""
    words = [each for each in getattr(program, "keywords", {}).values() if isinstance(each, str)]
    words.append(getattr(program, "func", program).__qualname__)
    every = tuple(dict.fromkeys(setting for each in sets for setting in each))
    return every if is_thorough() else sets[sum("".join(words).encode()) % len(sets)]


def differences(
    rank: int,
    world: int,
    build: Callable[[], nn.Module],
    program: Program,
    *,
    units: Collection[type[nn.Module]] = (Feedforward,),
    under: Iterable[Setting] | None = None,
    steps: int = 2,
    bound: float = 0.0,
) -> list[str]:
    """A line for each difference between engine and oracle: bit by bit, unless `bound` allows a relative
    error. Without `under`, under the `chosen` settings."""
    if under is None:
        under = chosen(program)
    lines: list[str] = []
    expected = _oracle(rank, world, build, program, steps)
    for setting in under:
        try:
            for line in _differences(expected, rank, build, program, units, setting, bound):
                lines.append(f"{setting}: rank {rank}: {line}")
        except Exception:
            lines.append(f"{setting}: rank {rank} raised: {traceback.format_exc(limit=-8)}")
    return lines


@dataclass
class Expected:
    """The results of a program on plain models: each step's results on this rank with the averaged gradients, and the
    final parameters."""

    steps: list[tuple[list[Tensor], Gradients]]
    parameters: dict[str, Tensor]


def _differences(
    expected: Expected,
    rank: int,
    build: Callable[[], nn.Module],
    program: Program,
    units: Collection[type[nn.Module]],
    setting: Setting,
    bound: float,
) -> Iterator[str]:
    with setting.doubles():
        model = setting.wrap(seeded(build), units)
        identities = {id(p) for p in model.parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step, (results, averaged) in enumerate(expected.steps):
            optimizer.zero_grad()
            found = program(model, rank, step)
            yield from (f"step {step}: {line}" for line in _compared("result", flat(found), results, bound))
            yield from (f"step {step}: {line}" for line in at_rest(model))
            if step == 0:
                names, sets = _names(model)
            right = filled(averaged, sets, partial(_zeros, expected.parameters))
            yield from (f"step {step}: {line}" for line in _own_gradients(model, names, right, bound))
            optimizer.step()
            if {id(p) for p in model.parameters()} != identities:
                yield f"step {step}: parameters are other objects than before"
        trained = full_parameters(model)
        for name, parameter in expected.parameters.items():
            yield from _compared(f"at the end: {name}", [trained[name]], [parameter], bound)


def _oracle(rank: int, world: int, build: Callable[[], nn.Module], program: Program, steps: int) -> Expected:
    """Run the program on a plain model per rank, with the same step for all."""
    plain = [seeded(build) for _ in range(world)]
    expected = []
    for step in range(steps):
        for model in plain:
            model.zero_grad()
        results = [program(model, r, step) for r, model in enumerate(plain)]
        averaged: Gradients = {}
        for parameters in zip(*(model.named_parameters() for model in plain), strict=True):
            name, first = parameters[0]
            if not first.requires_grad:
                continue
            average = averaged[name] = averaged_over_ranks([p.grad for _, p in parameters])
            if average is None:
                continue
            with torch.no_grad():
                for _, parameter in parameters:
                    parameter.add_(average, alpha=-LR)  # like SGD, to the bit
        expected.append((flat(results[rank]), averaged))
    return Expected(expected, {name: parameter.detach() for name, parameter in plain[0].named_parameters()})


def _zeros(parameters: dict[str, Tensor], name: str) -> Tensor:
    return torch.zeros_like(parameters[name])


def full_gradients(model: Any) -> Gradients:
    """The unsharded gradient of every trainable parameter by name, None where there is none. Collective.

    No rank holds a piece of a parameter without elements: its gradient, also without elements, counts as present.
    """
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        trained = {plain(name): p for name, p in model.named_parameters() if p.requires_grad}
        return gradients_of(model) | {name: torch.zeros_like(p) for name, p in trained.items() if not p.numel()}


def _names(model: Any) -> tuple[Names, Together]:
    """The names of parameters, and the sets of those that have gradients together. Collective."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        names = names_of(model)
        return names, together(model, names)


def _own_gradients(model: Any, names: Names, right: Gradients, bound: float) -> Iterator[str]:
    """A line for each gradient of which this rank's piece is not that of the `right` one. Other ranks compare the other
    pieces: no communication."""
    inspect.bring_to_rest(model)
    trained = set()
    for flat in inspect.flat_params(model):
        for index, (original, found) in enumerate(zip(flat.originals, flat.own_gradients(), strict=True)):
            if not original.requires_grad:
                continue
            trained.add(name := names[original])
            whole = right.get(name)
            expected = None if whole is None else flat.own_piece(index, whole)
            if found is not None and expected is not None:
                yield from _compared(name, [found], [expected], bound)
            elif expected is None or expected.numel():
                yield from (f"gradient of {name}: {what}" for what in [unlike(found, expected)] if what)
    if trained != right.keys():
        yield f"found gradients of {sorted(trained)}, expected {sorted(right)}"


def full_parameters(model: Any) -> dict[str, Tensor]:
    """The unsharded parameters by name. Collective."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def at_rest(model: Any) -> Iterator[str]:
    """A line for each sign that an iteration has not ended: memory besides the shards, gradients of another shape."""
    memory = inspect.memory(model)
    for kind, count in memory.live.items():
        if count and kind != "shard":
            yield f"at rest, {count} bytes of {kind!r} are live"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.shape != parameter.shape:
            yield f"at rest, the gradient of {name} has shape {tuple(parameter.grad.shape)}"


def _compared(what: str, found: list[Tensor], expected: list[Tensor], bound: float) -> Iterator[str]:
    if len(found) != len(expected):
        yield f"{what}: found {len(found)} tensors, expected {len(expected)}"
        return
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            yield f"{what} [{i}]: found {one.dtype} {tuple(one.shape)}, expected {other.dtype} {tuple(other.shape)}"
        elif not torch.equal(one, other):
            apart, size = (one - other).norm().item(), other.norm().item()
            if bound == 0.0 or not apart <= bound * size:
                yield f"{what} [{i}]: differs by a norm of {apart:.3g} of {size:.3g}"


def flat(results: Any) -> list[Tensor]:
    """The tensors of nested tuples and lists, detached; None counts as nothing."""
    if results is None:
        return []
    if isinstance(results, Tensor):
        return [results.detach().clone()]
    return [tensor for item in results for tensor in flat(item)]


# --- models and data --------------------------------------------------------------------------------------------------


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A new model, the same at every call and on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return build()


def data(rank: int, step: int, micro: int = 0, *, rows: int = 4, width: int = WIDTH) -> Tensor:
    """A batch of this rank, step and microbatch."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


class Net(nn.Module):
    """Blocks and a head; the forward is `route(net, x, **more)`."""

    def __init__(
        self, route: Callable[..., Any] | None = None, *, depth: int = 3, block: type[nn.Module] = Feedforward
    ) -> None:
        super().__init__()
        made = [Feedforward(WIDTH, 20 + i) if block is Feedforward else block() for i in range(depth)]
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(WIDTH, 3)
        self.route = route or chain

    def forward(self, x: Tensor, **more: Any) -> Any:
        return self.route(self, x, **more)


def chain(net: Net, x: Tensor) -> Tensor:
    """One block after the other, then the head."""
    for block in net.blocks:
        x = block(x)
    return net.head(x)


def loss_of(output: Tensor) -> Tensor:
    """A loss that is not trivial for any linear layer."""
    return F.softplus(output).mean()


def unsynced(model: Any) -> AbstractContextManager[None]:
    """`model.no_sync()`; also accepts a plain model."""
    context: AbstractContextManager[None] = (
        model.no_sync() if isinstance(model, FullyShardedDataParallel) else nullcontext()
    )
    return context


def joined(results: list[list[str]]) -> str:
    """All ranks' lines, the first ones of each, for an assertion."""
    return "\n".join(line for lines in results for line in lines[:6])
