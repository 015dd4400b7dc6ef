"""Models of unusual construction train like plain ones, and a constructor that raises leaves the module as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.flat.flat_param import FlatParamHandle
from flatfsdp.engine.wrapping import init_sync
from flatfsdp.errors import AgreementError, ConfigValueError
from flatfsdp.wrap import CustomPolicy
from tests.conftest import Run
from tests.harness.corners import (
    ALL,
    HALVES,
    HYBRID_HALVES,
    OFFLOADED,
    Setting,
    data,
    differences,
    full_gradients,
    full_parameters,
    joined,
    loss_of,
    seeded,
)
from tests.harness.models import WIDTH, Feedforward
from tests.harness.thorough import is_thorough, spread

pytestmark = pytest.mark.distributed

# --- models -----------------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[type[nn.Module], ...]]] = {}


def model(*units: type[nn.Module]) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Enter a class of models, with the classes to wrap, into the table."""

    def enter(cls: type[nn.Module]) -> type[nn.Module]:
        MODELS[cls.__name__] = (cls, units)
        return cls

    return enter


class Table(nn.Module):
    """A matrix that is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Transposed(Table):
    """The same, transposed, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


class TiedTwo(nn.Module):
    """The first and last of three modules hold the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Table(), Feedforward(WIDTH, 9), Transposed()
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@model(Table, Feedforward)
class TiedUnitAndUnit(TiedTwo):
    """The tie crosses two units."""


@model(Feedforward)
class TiedInRoot(TiedTwo):
    """The tie is inside of the root, around another unit."""


@model(Table)
class TiedOwnerLast(TiedTwo):
    """The module that is called first is declared last."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.middle(self.last(x)))


@model(Transposed)
class TiedUnitAndRoot(nn.Module):
    """The root computes with the parameter of a unit, before, inside and after that unit's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transposed()
        self.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.weight) @ self.weight


@model(Feedforward)
class SharedModule(nn.Module):
    """One module in three places."""

    def __init__(self) -> None:
        super().__init__()
        shared = Feedforward(WIDTH, 9)
        self.blocks = nn.ModuleList([shared, Feedforward(WIDTH, 8), shared])
        self.other = nn.ModuleDict({"again": shared})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.other["again"](x)


@model(nn.LSTM)
class Recurrent(nn.Module):
    """Modules that keep lists of their parameters in addition to the registry."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRUCell(10, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x[:, None])
        return self.out(self.gru(hidden[:, 0]))


@model(Feedforward)
class Guarded(nn.Module):
    """Modules that redirect the setting and getting of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Feedforward(WIDTH, 9)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.sealed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("sealed"):
            raise AttributeError(f"{name}: sealed")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "anything":
            return 1.0
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.scale * self.anything


class Conv(nn.Conv2d):
    """A convolution that insists on its weight's layout."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.is_contiguous(memory_format=torch.channels_last)
        return super().forward(x)


@model(Conv)
class ChannelsLast(nn.Module):
    """Convolutions whose weights lie in channels_last, in a unit and in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Conv(2, 5, 3, padding=1)
        self.deep = nn.Conv3d(5, 3, (1, 2, 2))
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.deep.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        assert self.deep.weight.is_contiguous(memory_format=torch.channels_last_3d)
        return self.deep(self.conv(x[:, :8].view(-1, 2, 2, 2))[:, :, None])


@model(Feedforward)
class Odd(nn.Module):
    """Parameters without dimensions, without elements, not contiguous, and expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.block = Feedforward(WIDTH, 9)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.strided = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.transposed = nn.Parameter(torch.randn(3, WIDTH).t())
        self.last = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        assert self.gain.shape == self.last.shape == ()
        return (self.block(x) * self.gain + self.nothing.sum()) @ self.strided @ self.transposed * self.last


@model(nn.ParameterList, Feedforward)
class Lists(nn.Module):
    """Containers of parameters and modules, which define no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
        self.shifts = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(())})
        self.blocks = nn.ModuleDict({"x": nn.Sequential(Feedforward(WIDTH, 5), nn.Tanh())})

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks["x"](x * self.scales[0] + self.shifts["a"]) * self.scales[1] + self.shifts["b"]


def program(model: Any, rank: int, step: int) -> Any:
    x = data(rank, step).requires_grad_()
    loss = loss_of(model(x))
    loss.backward()
    return loss, x.grad


def trains(rank: int, world: int, name: str, under: tuple[Setting, ...]) -> list[str]:
    build, units = MODELS[name]
    units = tuple(unit for unit in units if unit is not nn.ParameterList)
    return differences(rank, world, build, program, units=units, under=under, bound=2e-6)


@pytest.mark.parametrize(("number", "name"), list(enumerate(MODELS)))
def test_trains(number: int, name: str, pool2: Run) -> None:
    under = (*ALL, Setting(offload=True)) if is_thorough() else (*HALVES[number % 2], *OFFLOADED[: number % 2])
    assert not joined(pool2(trains, name, under))


@pytest.mark.parametrize("name", ["Odd", "TiedUnitAndUnit", "Recurrent"])
def test_trains_on_three_ranks(name: str, pool3: Run) -> None:
    assert not joined(pool3(trains, name, HALVES[name == "Odd"]))


@pytest.mark.parametrize("name", ["TiedUnitAndRoot", "SharedModule"])
def test_trains_on_a_mesh(name: str, pool4: Run) -> None:
    assert not joined(pool4(trains, name, HYBRID_HALVES[name == "SharedModule"]))


class Padded(nn.Module):
    """Thirteen elements and one: the second parameter lies on the last of three ranks, next to padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 1))
        self.bias = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Tiny(nn.Module):
    """One element: two of three ranks have only padding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def small(rank: int, world: int) -> list[str]:
    lines = []
    for build in (Padded, Tiny):
        lines += differences(rank, world, build, program, units=(), bound=2e-6, steps=3)
    wrapped = FullyShardedDataParallel(Tiny(), use_orig_params=True)
    program(wrapped, rank, 0)
    found = [None if p.grad is None else tuple(p.grad.shape) for p in wrapped.parameters()]
    if found != ([(1,)] if rank == 0 else [None]):
        lines.append(f"rank {rank}: gradients of shapes {found}")
    return lines


def test_ranks_of_nothing_but_padding(pool3: Run) -> None:
    assert not joined(pool3(small))


# --- groups that overlap ----------------------------------------------------------------------------------------------


def over_pairs(rank: int, world: int) -> list[tuple[int, ...]]:
    """Wrap and train over each pair of ranks that this rank is in: ranks have been in different numbers of groups."""
    trained = []
    for pair in ((0, 1), (0, 2), (1, 2), (0, 2)):
        group = dist.new_group(list(pair))
        if rank in pair:
            model = FullyShardedDataParallel(seeded(Padded), process_group=group)
            loss_of(model(data(rank, 0))).backward()
            trained.append(pair)
    return trained


def test_overlapping_groups(pool3: Run) -> None:
    assert pool3(over_pairs) == [[(0, 1), (0, 2), (0, 2)], [(0, 1), (1, 2)], [(0, 2), (1, 2), (0, 2)]]


# --- nothing is left half-wrapped -------------------------------------------------------------------------------------


class Broken(Exception):
    """The exception that user functions and the network raise here."""


def stack(depth: int = 3) -> nn.Module:
    net = nn.Sequential(*(Feedforward(WIDTH, 9) for _ in range(depth)), nn.Linear(WIDTH, 3))
    net[3].weight.requires_grad_(False)
    return net


def bad_argument(net: nn.Module, orig: bool) -> None:
    def third_is_wrong(module: nn.Module) -> bool | dict[str, Any]:
        if module is net[2]:
            return {"sharding_strategy": "NO_SUCH"}
        return isinstance(module, Feedforward)

    with pytest.raises(ConfigValueError, match="NO_SUCH"):
        FullyShardedDataParallel(net, auto_wrap_policy=CustomPolicy(third_is_wrong), use_orig_params=orig)


def failing_initialization(net: nn.Module, orig: bool) -> None:
    net[2].to("meta")

    def initialize(module: nn.Module) -> None:
        raise Broken

    with pytest.raises(Broken):
        FullyShardedDataParallel(net, auto_wrap_policy={Feedforward}, param_init_fn=initialize, use_orig_params=orig)
    assert all(p.is_meta for p in net[2].parameters())
    net[2].to_empty(device="cpu")
    net[2].load_state_dict(seeded(stack)[2].state_dict())


class Failing:
    """Broadcasts of values of which only so many succeed."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, axis: object, tensor: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise Broken


def failing_synchronization(net: nn.Module, orig: bool) -> None:
    failing = Failing(14)  # two units of six parameters, and two of the third
    with patch.object(init_sync, "broadcast", failing), pytest.raises(Broken):
        FullyShardedDataParallel(net, auto_wrap_policy={Feedforward}, sync_module_states=True, use_orig_params=orig)
    assert failing.left == -1


def failing_root(net: nn.Module, orig: bool) -> None:
    failing = Failing(19)  # all units, and one parameter of the root
    with pytest.raises(Broken), patch.object(init_sync, "broadcast", failing):
        FullyShardedDataParallel(net, auto_wrap_policy={Feedforward}, sync_module_states=True, use_orig_params=orig)


def failing_memory(net: nn.Module, orig: bool) -> None:
    flatten, calls = FlatParamHandle.flatten, itertools.count()

    def second_kind_of_the_root(*args: Any, **kwargs: Any) -> FlatParamHandle:
        if next(calls) == 4:
            raise Broken
        return flatten(*args, **kwargs)

    net[3].weight.grad = torch.ones_like(net[3].weight)
    with patch.object(FlatParamHandle, "flatten", second_kind_of_the_root), pytest.raises(Broken):
        FullyShardedDataParallel(net, auto_wrap_policy={Feedforward}, use_orig_params=orig)
    assert next(calls) == 5 and (net[3].weight.grad == 1).all()


FAILURES = {
    f.__name__: f for f in (bad_argument, failing_initialization, failing_synchronization, failing_root, failing_memory)
}


def usable_after(rank: int, world: int, failure: str, orig: bool) -> list[str]:
    lines = []
    net, twin = seeded(stack), seeded(stack)
    identities = [id(p) for p in net.parameters()]
    FAILURES[failure](net, orig)
    if any(isinstance(module, FullyShardedDataParallel) for module in net.modules()):
        lines.append("a wrapper is left")
    if [name for name, _ in net.named_parameters()] != [name for name, _ in twin.named_parameters()]:
        lines.append(f"found parameters {[name for name, _ in net.named_parameters()]}")
    if failure != "failing_initialization" and [id(p) for p in net.parameters()] != identities:
        lines.append("parameters are other objects")
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        if not torch.equal(p, q) or p.requires_grad != q.requires_grad:
            lines.append(f"{name} changed")
    # It trains, as plain module and wrapped once more.
    loss_of(net(data(rank, 0))).backward()
    loss_of(twin(data(rank, 0))).backward()
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        if p.requires_grad and not torch.equal(p.grad, q.grad):
            lines.append(f"{name} has another gradient")
    net.zero_grad()
    wrapped = FullyShardedDataParallel(net, auto_wrap_policy={Feedforward}, use_orig_params=orig)
    other = FullyShardedDataParallel(seeded(stack), auto_wrap_policy={Feedforward}, use_orig_params=orig)
    for each in (wrapped, other):
        loss_of(each(data(rank, 0))).backward()
    found, expected = full_gradients(wrapped), full_gradients(other)
    lines += [f"wrapped again, {name} differs" for name in expected if not torch.equal(found[name], expected[name])]
    return lines


@pytest.mark.parametrize(("orig", "failure"), spread([True, False], FAILURES))
def test_a_constructor_that_raises(failure: str, orig: bool, pool2: Run) -> None:
    assert not joined(pool2(usable_after, failure, orig))


# --- a constructor that raises on one rank only -----------------------------------------------------------------------


def constant(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        nn.init.constant_(p, 0.25)


def out_of_luck(module: nn.Module) -> None:
    raise Broken("out of luck")


def wrapped_with_luck(rank: int, net: nn.Module, **options: Any) -> tuple[Any, str]:
    """`net` wrapped, its third block from the meta device, where initializing it fails on rank 1; the messages."""
    net[2].to("meta")
    try:
        model = FullyShardedDataParallel(net, param_init_fn=out_of_luck if rank == 1 else constant, **options)
        return model, ""
    except (Broken, AgreementError) as error:
        return None, f"{type(error).__name__}: {error}"


def one_fails(rank: int, world: int, **options: Any) -> tuple[str, list[str]]:
    """The error on this rank, and whether ranks without the failure can wrap the module in a second try."""
    net, expected = seeded(stack), seeded(stack)
    model, text = wrapped_with_luck(rank, net, use_orig_params=True, **options)
    if model is None:
        model = FullyShardedDataParallel(net, param_init_fn=constant, use_orig_params=True, **options)
    expected[2].apply(constant)
    other = FullyShardedDataParallel(expected, use_orig_params=True, **options)
    for each in (model, other):
        loss_of(each(data(rank, 0))).backward()
    found, right = full_gradients(model), full_gradients(other)
    return text, [f"{name} has another gradient" for name in right if not torch.equal(found[name], right[name])]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_one_constructor_fails_while_values_are_copied(strategy: str, nested: bool, pool2: Run) -> None:
    """All constructors fail, and all modules are usable."""
    policy = {Feedforward} if nested else None
    ends = pool2(one_fails, sync_module_states=True, sharding_strategy=strategy, auto_wrap_policy=policy)
    assert [lines for _, lines in ends] == [[], []]
    assert [text for text, _ in ends] == [
        "AgreementError: ranks construct different models; the first difference is in construction: rank 0: "
        "continues; rank 1: failed: Broken: out of luck. Build the same module with the same arguments of "
        "FullyShardedDataParallel on every rank",
        "Broken: out of luck",
    ]


def one_fails_on_a_mesh(rank: int, world: int) -> tuple[str, list[str]]:
    mesh = dist.init_device_mesh("cpu", (2, world // 2))
    options: dict[str, Any] = {"device_mesh": mesh, "sharding_strategy": "HYBRID_SHARD"}
    return one_fails(rank, world, sync_module_states=True, auto_wrap_policy={Feedforward}, **options)


def test_one_constructor_fails_on_a_mesh(pool4: Run) -> None:
    ends = pool4(one_fails_on_a_mesh)
    assert [lines for _, lines in ends] == [[]] * 4
    assert "ranks 0, 2, 3: continues; rank 1: failed: Broken: out of luck" in ends[0][0]
    assert [text for text, _ in ends] == [ends[0][0], "Broken: out of luck", ends[0][0], ends[0][0]]


@pytest.mark.parametrize(("strategy", "nested"), [("FULL_SHARD", False), ("NO_SHARD", False), ("NO_SHARD", True)])
def test_one_constructor_fails_where_nothing_is_sharded_yet(strategy: str, nested: bool, pool2: Run) -> None:
    """It fails alone, and its second try joins the others."""
    policy = {Feedforward} if nested else None
    ends = pool2(one_fails, sharding_strategy=strategy, auto_wrap_policy=policy)
    assert ends == [("", []), ("Broken: out of luck", [])]


def one_fails_late(rank: int, world: int, mesh: bool = False) -> tuple[str, str]:
    """The error of the constructor, and in the first forward where it went well."""
    options: dict[str, Any] = {"auto_wrap_policy": {Feedforward}}
    if mesh:
        options["device_mesh"] = dist.init_device_mesh("cpu", (2, world // 2))
        options["sharding_strategy"] = "HYBRID_SHARD"
    model, text = wrapped_with_luck(rank, seeded(stack), **options)
    if model is None:
        return text, ""
    with pytest.raises(AgreementError) as info:
        model(data(rank, 0))
    return text, f"AgreementError: {info.value}"


def test_one_constructor_fails_where_others_hold_its_shards(pool2: Run) -> None:
    """It meets the others in their first forward: its shards do not come back."""
    message = (
        "AgreementError: ranks construct different models; the first difference is in construction: rank 0: succeeded; "
        "rank 1: failed with 2 modules wrapped: Broken: out of luck. Build the same module with the same arguments of "
        "FullyShardedDataParallel on every rank"
    )
    assert pool2(one_fails_late) == [("", message), (message, "")]


def test_one_constructor_fails_where_others_of_a_mesh_hold_its_shards(pool4: Run) -> None:
    (_, message), *_ = ends = pool4(one_fails_late, mesh=True)
    assert "ranks 0, 2, 3: succeeded; rank 1: failed with 2 modules wrapped: Broken: out of luck" in message
    assert ends == [("", message), (message, ""), ("", message), ("", message)]


# --- ties as users see them -------------------------------------------------------------------------------------------


def test_what_apply_and_summon_see_of_ties(pool2: Run) -> None:
    assert not joined(pool2(tied_names))


def tied_names(rank: int, world: int) -> list[str]:
    lines = []
    for orig in (True, False):
        plain = seeded(TiedUnitAndUnit)
        model = FullyShardedDataParallel(seeded(TiedUnitAndUnit), auto_wrap_policy={Table}, use_orig_params=orig)
        names = [name for name, _ in model.named_parameters()]
        flat = ["_flat_param", "first._flat_param", "last._flat_param"]
        if sorted(names) != (sorted(name for name, _ in plain.named_parameters()) if orig else sorted(flat)):
            lines.append(f"{orig}: found parameters {names}")
        whole = full_parameters(model)
        for name, p in plain.named_parameters():
            if not torch.equal(whole[name], p):
                lines.append(f"{orig}: {name} differs")
        if [name for name, _ in model.named_parameters()] != names:
            lines.append(f"{orig}: other parameters after summon_full_params")
        model.double()
        model(data(rank, 0).double()).sum().backward()
        if {p.dtype for p in model.parameters()} != {torch.float64}:
            lines.append(f"{orig}: .double() missed a parameter")
    return lines
