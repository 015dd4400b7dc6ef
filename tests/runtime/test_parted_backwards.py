"""Backwards that end early, run again or differ between ranks, and the state that they leave."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision, comm_hooks
from flatfsdp.engine.features.coalescing import uncoalesced
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.gradients import RunsBackward, averaged_over_ranks, copied, unlike
from tests.harness.thorough import some, spread

pytestmark = pytest.mark.distributed

WIDTH = 6


class Cut(nn.Module):
    """A chain of units; the backward stops in front of unit `cut`."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor, cut: int = -1) -> Tensor:
        for index, unit in enumerate(self.units):
            x = unit(x.detach() if index == cut else x)
        return x


def _net() -> Cut:
    torch.manual_seed(0)
    return Cut()


def _data(rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


def _wrap(net: nn.Module, **kwargs: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear}, **{"use_orig_params": True, **kwargs})


def _gradients(model: nn.Module) -> list[Tensor | None]:
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return [copied(p.grad) for p in model.parameters()]


def _expected(nets: list[nn.Module]) -> list[Tensor | None]:
    return [
        averaged_over_ranks([p.grad for p in of_ranks])
        for of_ranks in zip(*(net.parameters() for net in nets), strict=True)
    ]


def _same(found: list[Tensor | None], expected: list[Tensor | None], *, rtol: float = 0.0, atol: float = 0.0) -> bool:
    return not any(unlike(a, b, rtol=rtol, atol=atol) for a, b in zip(found, expected, strict=True))


def cut_on_one_rank(rank: int, world: int, prefetch: str | None) -> bool:
    for differentiable in (False, True):
        model = _wrap(_net(), backward_prefetch=prefetch)
        nets = [_net() for _ in range(world)]
        for _ in range(2):
            model(_data(rank), cut=3 * rank).tanh().sum().backward(create_graph=differentiable)
            for each, net in enumerate(nets):
                net(_data(each), cut=3 * each).tanh().sum().backward(create_graph=differentiable)
        if not _same(_gradients(model), _expected(nets), rtol=1e-5, atol=1e-6):
            return False
    return True


@pytest.mark.filterwarnings("ignore:Using backward. with create_graph=True:UserWarning")
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", "BACKWARD_MID", None])
def test_a_backward_that_does_not_reach_all_units_of_the_other_ranks(pool2: Run, prefetch: str | None) -> None:
    """Nor does one that may be differentiated."""
    assert all(pool2(cut_on_one_rank, prefetch))


class Sum(nn.Module):
    """Units whose outputs add up, of which the last `left_out` do not count; the first one's is recomputed."""

    def __init__(self, recompute: str | None) -> None:
        super().__init__()
        self.recompute = recompute
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        first, *others = self.units
        x = x.requires_grad_()
        if self.recompute is None:
            x = x + first(x)
        else:
            x = x + checkpoint(lambda x: first(x).tanh(), x, use_reentrant=self.recompute == "reentrant")
        for index, unit in enumerate(others):
            y = unit(x)
            x = x + (y.detach() if index >= len(others) - left_out else y)
        return x


def last_ones_left_out(
    rank: int, world: int, recompute: str | None, prefetch: str | None, counts: list[int], most: int
) -> bool:
    def build() -> Sum:
        torch.manual_seed(0)
        return Sum(recompute)

    model = _wrap(build(), backward_prefetch=prefetch, join_units_below=most)
    nets = [build() for _ in range(world)]
    for _ in range(2):
        model(_data(rank), left_out=counts[rank]).sum().backward()
        for each, net in enumerate(nets):
            net(_data(each), left_out=counts[each]).sum().backward()
    return _same(_gradients(model), _expected(nets))


PREFETCHES = ("BACKWARD_PRE", "BACKWARD_MID", None)


# Any two of these.
@pytest.mark.parametrize(
    ("recompute", "prefetch", "counts"),
    [
        (recompute, prefetch, counts)
        for i, recompute in enumerate((None, "in place", "reentrant"))
        for k, counts in enumerate(([0, 4], [0, 5], [3, 5]))
        for prefetch in some(PREFETCHES, 3, i + k)
    ],
)
def test_a_backward_that_begins_behind_units_of_the_other_ranks(
    pool2: Run, recompute: str | None, prefetch: str | None, counts: list[int]
) -> None:
    """It completes the units that it has passed before it waits for a gather, though no gradient has come yet."""
    for most in (0, 3 * 4 * (WIDTH * WIDTH + 2 * WIDTH)):
        assert all(pool2(last_ones_left_out, recompute, prefetch, counts, most))


class Alternating(nn.Module):
    """Every second unit is recomputed reentrantly, and so has no place in the plan; of the others one may not count."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        x = x.requires_grad_()
        for index, unit in enumerate(self.units):
            y = checkpoint(unit, x, use_reentrant=True) if index % 2 else unit(x)
            x = x + (y.detach() if index == left_out else y.tanh())
        return x


def left_out_between_recomputed(rank: int, world: int, prefetch: str | None, most: int) -> bool:
    def build() -> Alternating:
        torch.manual_seed(0)
        return Alternating()

    model = _wrap(build(), backward_prefetch=prefetch, join_units_below=most)
    nets = [build() for _ in range(world)]
    for _ in range(2):
        model(_data(rank), left_out=2 + 2 * rank).sum().backward()
        for each, net in enumerate(nets):
            net(_data(each), left_out=2 + 2 * each).sum().backward()
    return _same(_gradients(model), _expected(nets))


@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", "BACKWARD_MID", None])
def test_a_unit_that_is_left_out_before_one_that_is_recomputed_reentrantly(pool2: Run, prefetch: str | None) -> None:
    """All are of one size: in different orders they would be added to each other."""
    for most in (0, 3 * 4 * (WIDTH * WIDTH + 2 * WIDTH)):
        assert all(pool2(left_out_between_recomputed, prefetch, most))


class Aside(nn.Module):
    """A frozen unit, recomputed reentrantly, before one that is trained and may not count."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen.requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, counts: bool) -> Tensor:
        x = checkpoint(self.frozen, x.requires_grad_(), use_reentrant=True)
        y = self.trained(x) + self.bias
        return x + (y.tanh() if counts else y.detach())


def of_no_parameter_on_one_rank(rank: int, world: int, strategy: str, which: int) -> bool:
    def build() -> Aside:
        torch.manual_seed(0)
        return Aside()

    model = _wrap(build(), sharding_strategy=strategy, join_units_below=0)
    nets = [build() for _ in range(world)]
    for _ in range(2):
        model(_data(rank), counts=rank == which).sum().backward()
        for each, net in enumerate(nets):
            net(_data(each), counts=each == which).sum().backward()
    return _same(_gradients(model), _expected(nets))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_backward_that_passes_over_all_parameters_before_one_that_is_recomputed(
    pool2: Run, strategy: str, which: int
) -> None:
    """Once it has begun to reduce with the other ranks, it does so to the end."""
    assert all(pool2(of_no_parameter_on_one_rank, strategy, which))


class RunAgain(nn.Module):
    """Units of which the last two are recomputed reentrantly; the very last may not count."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor, counts: bool) -> Tensor:
        x = x.requires_grad_()
        for unit in self.units[:3]:
            x = unit(x).tanh()
        x = x + checkpoint(self.units[3], x, use_reentrant=True).tanh()

        def last(x: Tensor) -> Tensor:
            y = self.units[4](x).tanh()
            return x + (y if counts else y.detach())

        result: Tensor = checkpoint(last, x, use_reentrant=True)
        return result


def run_again_and_not_reached(rank: int, world: int, prefetch: str) -> bool:
    def build() -> RunAgain:
        torch.manual_seed(0)
        return RunAgain()

    model = _wrap(build(), backward_prefetch=prefetch, join_units_below=0)
    nets = [build() for _ in range(world)]
    for _ in range(2):
        model(_data(rank), counts=rank == 0).sum().backward()
        for each, net in enumerate(nets):
            net(_data(each), counts=each == 0).sum().backward()
    return _same(_gradients(model), _expected(nets), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_MID"])
def test_what_is_gathered_ahead_by_ranks_that_reach_what_was_run_again(pool2: Run, prefetch: str) -> None:
    """A rank that does not reach it gathers the same ahead, before the next checkpoint runs again."""
    assert all(pool2(run_again_and_not_reached, prefetch))


class Scaled(nn.Module):
    """A layer with a scale that may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, scaled: bool) -> Tensor:
        return self.linear(x) * self.scale if scaled else self.linear(x)


class Recomputed(nn.Module):
    """Units of one size, recomputed reentrantly, of which the last but one may not use all of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: Tensor, scaled: bool) -> Tensor:
        x = x.requires_grad_()
        for index, unit in enumerate(self.units):
            x = checkpoint(unit, x, scaled or index != 1, use_reentrant=True).tanh()
        return x


def partly_unused_and_recomputed(rank: int, world: int, prefetch: str | None, scaled: list[bool]) -> bool:
    def build() -> Recomputed:
        torch.manual_seed(0)
        return Recomputed()

    model = FullyShardedDataParallel(
        build(), auto_wrap_policy={Scaled}, use_orig_params=True, backward_prefetch=prefetch, join_units_below=0
    )
    nets: list[nn.Module] = [build() for _ in range(world)]
    for _ in range(2):
        model(_data(rank), scaled[rank]).sum().backward()
        for each, net in enumerate(nets):
            net(_data(each), scaled[each]).sum().backward()
    return _same(_gradients(model), _expected(nets))


@pytest.mark.parametrize("scaled", [[True, False], [False, True]])
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_MID", None])
def test_a_recomputed_unit_of_which_one_rank_uses_a_part(pool2: Run, prefetch: str | None, scaled: list[bool]) -> None:
    """Its reduction comes before that of the next on all ranks: gradients of the two would be exchanged for each
    other's."""
    assert all(pool2(partly_unused_and_recomputed, prefetch, scaled))


class Twice(nn.Module):
    """A unit that is called again, the second time under a reentrant checkpoint: its gradients come in that run's own
    graph task first, and in the backward around it again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x.requires_grad_(), True).tanh(), True).tanh()
        return checkpoint(self.first, x, True, use_reentrant=True).tanh()


def called_before_and_recomputed(rank: int, world: int, strategy: str, orig: bool, most: int) -> bool:
    def build() -> Twice:
        torch.manual_seed(0)
        return Twice()

    model = FullyShardedDataParallel(
        build(), sharding_strategy=strategy, auto_wrap_policy={Scaled}, use_orig_params=orig, join_units_below=most
    )
    nets: list[nn.Module] = [build() for _ in range(world)]
    for _ in range(2):
        model(_data(rank)).sum().backward()
        for each, net in enumerate(nets):
            net(_data(each)).sum().backward()
    return _same(_gradients(model), _expected(nets), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_a_unit_that_is_called_and_then_again_under_a_reentrant_checkpoint(
    pool2: Run, strategy: str, orig: bool
) -> None:
    for most in (0, 2**20):
        assert all(pool2(called_before_and_recomputed, strategy, orig, most))


class Around(nn.Module):
    """A unit around one that is recomputed reentrantly, which has no place in the plan. Only some ranks use its tail,
    half of its gradients, which come before the recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, uses_tail: bool) -> Tensor:
        x = checkpoint(self.inner, (x @ self.head).tanh(), use_reentrant=True)
        return x @ self.tail if uses_tail else x


class Layers(nn.Module):
    """Units of one size before and after it: gathered in different orders, they would be taken for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.around = Around()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, uses_tail: bool) -> Tensor:
        for unit in self.before:
            x = unit(x).tanh()
        return self.after(self.around(x, uses_tail))


def half_way_before_or_after(rank: int, world: int, tails: list[bool]) -> bool:
    def build() -> Layers:
        torch.manual_seed(0)
        return Layers()

    model = FullyShardedDataParallel(
        build(),
        auto_wrap_policy={nn.Linear, Around},
        use_orig_params=True,
        backward_prefetch="BACKWARD_MID",
        join_units_below=0,
    )
    nets: list[nn.Module] = [build() for _ in range(world)]
    for step in range(3):
        model(_data(rank), tails[rank] or step == 2).sum().backward()
        for each, net in enumerate(nets):
            net(_data(each), tails[each] or step == 2).sum().backward()
    return _same(_gradients(model), _expected(nets), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tails", [[True, False], [False, True], [False, False]])
def test_half_of_the_gradients_before_a_recomputation_on_one_rank_and_after_it_on_another(
    pool2: Run, tails: list[bool]
) -> None:
    assert all(pool2(half_way_before_or_after, tails))


def again_after_a_failure(rank: int, world: int, strategy: str, prefetch: str) -> bool:
    model = _wrap(_net(), sharding_strategy=strategy, backward_prefetch=prefetch)
    fail = [True]

    def refuse(grad: Tensor) -> None:
        if fail[0]:
            raise ValueError("out of luck")

    loss = model(_data(rank)).sum()
    model(_data(rank)).sum().backward()  # the earlier `.grad`
    output = model(_data(rank))
    hidden = output * 1.0
    model.module.units[1].register_forward_hook(lambda module, args, out: out.register_hook(refuse) and None)
    loss = model(_data(rank)).sum() + hidden.sum() * 0
    with pytest.raises(ValueError, match="out of luck"):
        loss.backward(retain_graph=True)
    fail[0] = False
    loss.backward()
    nets = [_net() for _ in range(world)]
    for each, net in enumerate(nets):
        net(_data(each)).sum().backward()
        net(_data(each)).sum().backward()
    return _same(_gradients(model), _expected(nets), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_MID"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_same_backward_again_after_it_failed(pool2: Run, strategy: str, prefetch: str) -> None:
    assert all(pool2(again_after_a_failure, strategy, prefetch))


def penalty(model: nn.Module, x: Tensor, zero: Callable[[], None]) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    zero()  # between the two: the gradients of the step before are to be gone
    slope.square().sum().backward()


def zero_between(rank: int, world: int, strategy: str, to_none: bool) -> bool:
    model = _wrap(_net(), sharding_strategy=strategy)
    nets = [_net() for _ in range(world)]
    for _ in range(3):
        penalty(model, _data(rank), lambda: model.zero_grad(set_to_none=to_none))
        for each, net in enumerate(nets):
            penalty(net, _data(each), lambda net=net: net.zero_grad(set_to_none=to_none))
    return _same(_gradients(model), _expected(nets), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_gradients_zeroed_between_a_differentiable_backward_and_the_next(
    pool2: Run, strategy: str, to_none: bool
) -> None:
    assert all(pool2(zero_between, strategy, to_none))


class UsesAnothersWeight(nn.Module):
    """A frozen weight that a nested unit owns and the root uses first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight.requires_grad_(False)
        self.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.weight)


def frozen_tie(rank: int, world: int) -> bool:
    torch.manual_seed(0)
    net = UsesAnothersWeight()
    nets = [copy.deepcopy(net) for _ in range(world)]
    model = FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear}, use_orig_params=True)
    x = _data(rank).requires_grad_()
    model(x).square().sum().backward()
    inputs = [_data(each).requires_grad_() for each in range(world)]
    for net, own in zip(nets, inputs, strict=True):
        net(own).square().sum().backward()
    return torch.equal(x.grad, inputs[rank].grad) and _same(_gradients(model), _expected(nets))


def test_a_frozen_parameter_that_two_units_hold(pool2: Run) -> None:
    assert all(pool2(frozen_tie))


def hooks_on_a_leaf(rank: int, world: int) -> int:
    model, prompt = _wrap(_net()), nn.Parameter(_data(rank))
    for _ in range(10):
        model(prompt).sum().backward()
    return len(prompt._backward_hooks or {})


def test_leaves_of_the_user_s_keep_no_old_hooks(pool2: Run) -> None:
    assert max(pool2(hooks_on_a_leaf)) <= 2


class Stack(nn.Module):
    """Residual units. The first rank uses and reaches all; of the others, "scales" go unused, or "units" unreached."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Scaled() for _ in range(8))

    def forward(self, x: Tensor, rank: int, without: str) -> Tensor:
        for index, unit in enumerate(self.units):
            y = unit(x, rank == 0 or without != "scales")
            x = x + (y.detach() if rank > 0 and without == "units" and index in (3, 5, 6) else y)
        return x


def _stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def used_on_one_rank(rank: int, world: int, without: str, prefetch: str | None, hooked: bool, joined: bool) -> bool:
    with nullcontext() if joined else uncoalesced():
        model = FullyShardedDataParallel(
            _stack(), auto_wrap_policy={Scaled}, use_orig_params=True, backward_prefetch=prefetch
        )
    if hooked:
        model.register_comm_hook(comm_hooks.DefaultState(model.process_group), comm_hooks.reduce_scatter_hook)
    nets: list[nn.Module] = [_stack() for _ in range(world)]
    for sync in (True, False, True):
        with nullcontext() if sync else model.no_sync():
            model(_data(rank), rank, without).sum().backward()
        for each, net in enumerate(nets):
            net(_data(each), each, without).sum().backward()
    return _same(_gradients(model), _expected(nets), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("without", "prefetch", "hooked"),
    [
        (without, prefetch, hooked)
        for row, without in enumerate(("scales", "units"))
        for column, prefetch in enumerate(("BACKWARD_PRE", "BACKWARD_POST", "BACKWARD_MID", None))
        for hooked in some((False, True), 2, row + column)  # all pairs of the three
    ],
)
def test_what_one_rank_alone_uses(pool2: Run, without: str, prefetch: str | None, hooked: bool) -> None:
    turn = ("BACKWARD_PRE", "BACKWARD_POST", "BACKWARD_MID", None).index(prefetch) // 2 + (without == "units")
    for joined in some((False, True), 2, turn):
        assert all(pool2(used_on_one_rank, without, prefetch, hooked, joined))


class Residual(nn.Module):
    """Residual units, of which some do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor, left_out: set[int]) -> Tensor:
        for index, unit in enumerate(self.units):
            y = unit(x)
            x = x + (y.detach() if index in left_out else y)
        return x


# Left out by each rank in a first and in a second call. With the first two, rank 0 has all gradients of unit 4 and
# awaits unit 0 after the second call, when rank 1 has none of unit 0's until the first call; with the others, mirrored.
LEFT_OUT = (
    [({0, 1, 4}, {1}), ({2}, {0, 1})],
    [({2}, {0, 1}), ({0, 1, 4}, {1})],
    [(set(), {3, 4}), ({1, 2}, set())],
)


def called_twice(rank: int, world: int, left_out: list[tuple[set[int], set[int]]], prefetch: str | None) -> bool:
    def build() -> Residual:
        torch.manual_seed(0)
        return Residual()

    def train(net: nn.Module, each: int) -> None:
        first, second = left_out[each]
        (net(_data(each), first) + net(_data(each + world), second)).sum().backward()

    nets = [build() for _ in range(world)]
    with uncoalesced():
        models = [_wrap(build(), backward_prefetch=prefetch)]
    models.append(_wrap(build(), backward_prefetch=prefetch))
    for _ in range(2):
        for model in models:
            train(model, rank)
        for each, net in enumerate(nets):
            train(net, each)
    expected = _expected(nets)
    return all(_same(_gradients(model), expected, rtol=1e-5, atol=1e-6) for model in models)


@pytest.mark.parametrize(("prefetch", "left_out"), spread(["BACKWARD_PRE", "BACKWARD_MID", None], LEFT_OUT))
def test_two_calls_of_which_ranks_leave_out_different_units(
    pool2: Run, left_out: list[tuple[set[int], set[int]]], prefetch: str | None
) -> None:
    assert all(pool2(called_twice, left_out, prefetch))


def slopes(rank: int, world: int) -> tuple[int, bool]:
    """Gradients of an input: how many reductions they take, and whether parameters get gradients."""
    model, x = _wrap(_net()), _data(rank).requires_grad_()
    figures = flatfsdp.stats(model)
    torch.autograd.grad(model(x * 2).sum(), x)
    return sum(figures.comm.get(kind, (0, 0))[0] for kind in ("reduce_scatter", "all_reduce")), any(
        p.grad is not None for p in model.parameters()
    )


def test_gradients_of_inputs_alone_reduce_nothing(pool2: Run) -> None:
    assert pool2(slopes) == [(0, False)] * 2


class GoesBackward(nn.Module):
    """A backward, or a gradient of an input, inside of the forward, through units inside."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix = nn.Parameter(torch.linspace(0.5, 1.0, WIDTH).diag())

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.mix
        if self.kind == "a unit that runs again":
            self.first(x.detach()).square().sum().backward()
            x = self.first(x)
        elif self.kind == "behind a unit that goes on":
            x = self.first(x.detach())
            self.second(x).square().sum().backward(retain_graph=True)
        elif self.kind == "a unit alone":
            self.second(self.first(x).detach()).square().sum().backward()
            x = self.first(x)
        elif self.kind in ("a gradient", "a differentiable gradient"):
            of = x.detach().requires_grad_()
            twice = self.kind != "a gradient"
            (found,) = torch.autograd.grad(self.second(of).square().sum(), of, create_graph=twice)
            x = self.first(x) + found
        else:
            (self.first(x) @ self.mix).sum().backward()
        result: Tensor = self.last(x) @ self.mix
        return result


GOES_ON = ("a unit that runs again", "behind a unit that goes on", "a unit alone", "a gradient")


def inside_a_forward(rank: int, world: int, options: dict[str, Any]) -> list[str]:
    def build(kind: str) -> GoesBackward:
        torch.manual_seed(0)
        return GoesBackward(kind)

    found = []
    for kind in (*GOES_ON, "a differentiable gradient"):
        model = _wrap(build(kind), **options)
        nets: list[nn.Module] = [build(kind) for _ in range(world)]
        for _ in range(2):
            model(_data(rank)).square().sum().backward()
            for each, net in enumerate(nets):
                net(_data(each)).square().sum().backward()
        if not _same(_gradients(model), _expected(nets), rtol=1e-5, atol=1e-5):
            found.append(kind)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"use_orig_params": False},
        {"backward_prefetch": "BACKWARD_MID", "sharding_strategy": "SHARD_GRAD_OP"},
        # Parameters that the root uses before and after it show another dtype than at rest.
        {"mixed_precision": MixedPrecision(param_dtype=torch.float64)},
        {"mixed_precision": MixedPrecision(param_dtype=torch.float64), "sharding_strategy": "NO_SHARD"},
    ],
)
def test_a_backward_inside_a_forward(pool2: Run, options: dict[str, Any]) -> None:
    assert pool2(inside_a_forward, options) == [[], []]


def through_what_runs(rank: int, world: int) -> str:
    model = _wrap(GoesBackward("its own parameter"))
    with pytest.raises(UsageError) as caught:
        model(_data(rank))
    model.module.kind = "none"
    model.module.forward = lambda x: model.module.last(x)
    model(_data(rank)).sum().backward()
    return str(caught.value)


def test_a_backward_through_a_unit_whose_forward_runs_is_refused(pool2: Run) -> None:
    for message in pool2(through_what_runs):
        assert message.startswith("unit <root>: a backward inside its own forward reaches its parameters")


def nested_in_queries(rank: int, world: int) -> bool:
    """Gradients of inputs: beside a chain of units a Function that brings gradients of the first one, in the second and
    third step. Then steps as usual."""
    model, nets = _wrap(_net(), join_units_below=0), [_net() for _ in range(world)]

    def run(net: nn.Module, x: Tensor, nests: bool) -> None:
        hidden = net(x.requires_grad_())
        aside = net(x + 1).square().sum()
        beside = x * 1.0
        if nests:
            beside = RunsBackward.apply(beside, aside.backward)
        torch.autograd.grad(hidden.sum() + beside.sum(), x)

    for step in range(6):
        for net in (model, *nets):
            net.zero_grad()
        for net, x in ((model, _data(rank)), *zip(nets, map(_data, range(world)), strict=True)):
            run(net, x, nests=step in (1, 2))
        if not _same(_gradients(model), _expected(nets), rtol=1e-5, atol=1e-6):
            return False
        for net, x in ((model, _data(rank)), *zip(nets, map(_data, range(world)), strict=True)):
            net(x).square().sum().backward()
        if not _same(_gradients(model), _expected(nets), rtol=1e-5, atol=1e-6):
            return False
    return True


def test_a_backward_that_seems_to_bring_none_has_another_one_inside(pool2: Run) -> None:
    """A rank that had announced that none came was taken for one that differs from the others."""
    assert all(pool2(nested_in_queries))


class BesideFrozen(Cut):
    """Returns what two frozen units made of its input, too; another one, recomputed reentrantly, follows both."""

    def __init__(self) -> None:
        super().__init__()
        for index in (0, 1, 4):
            self.units[index].requires_grad_(False)

    def forward(self, x: Tensor, cut: int = -1) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.units[1](self.units[0](x))
        of_all = self.units[3](self.units[2](x))
        return tuple(checkpoint(self.units[4], each, use_reentrant=True) for each in (of_all, x))


def reach_a_frozen_unit_alone(rank: int, world: int, prefetch: str | None) -> bool:
    """On the last rank, in some steps, the backward comes to no parameter but those of a recomputed frozen unit."""
    torch.manual_seed(0)
    net = BesideFrozen()
    model = _wrap(copy.deepcopy(net), join_units_below=0, backward_prefetch=prefetch)
    nets = [copy.deepcopy(net) for _ in range(world)]
    for step in range(5):
        for each in (model, *nets):
            each.zero_grad()
        for of, each in ((rank, model), *enumerate(nets)):
            output, aside = each(_data(of).requires_grad_())
            (aside if step in (1, 3) and of == world - 1 else output).sum().backward()
        if not _same(_gradients(model), _expected(nets), rtol=1e-5, atol=1e-6):
            return False
    return True


@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
def test_a_reentrant_checkpoint_may_bring_gradients(pool2: Run, prefetch: str | None) -> None:
    """Random model 33194: so a rank takes part, and does not wait for ever for what the others gather after that."""
    assert all(pool2(reach_a_frozen_unit_alone, prefetch))
