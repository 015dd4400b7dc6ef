"""Initial values of a model: meta device, user-defined functions, rank 0's values for all, and the cost."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.comm.transport import Transport
from flatfsdp.engine.transports.blocking import broadcast
from flatfsdp.engine.wrapping import init_sync
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import Net, data, full_parameters, joined, loss_of, seeded
from tests.harness.memory import Recording
from tests.harness.meshes import replicas_of_shards
from tests.harness.models import WIDTH, Feedforward

pytestmark = pytest.mark.distributed


def wrap(net: nn.Module, orig: bool = True, **options: Any) -> FullyShardedDataParallel:
    options.setdefault("auto_wrap_policy", {Feedforward})
    return FullyShardedDataParallel(net, use_orig_params=orig, **options)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def differing(found: dict[str, Tensor], expected: nn.Module) -> list[str]:
    whole = dict(expected.named_parameters())
    lines = [] if found.keys() == whole.keys() else [f"found {sorted(found)}"]
    return lines + [f"{n} differs" for n in whole.keys() & found.keys() if not torch.equal(found[n], whole[n])]


# --- the meta device --------------------------------------------------------------------------------------------------


def initialized_again(net: nn.Module) -> nn.Module:
    """`net`, every module initialised in the order in which units are made: children before parents."""
    for block in net.blocks:
        for module in block.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    net.head.reset_parameters()
    return net


def from_meta(rank: int, world: int) -> list[str]:
    lines = []
    for orig in (True, False):
        net = on_meta(Net)
        identities = [id(p) for p in net.parameters()]
        torch.manual_seed(5)
        model = wrap(net, orig)
        if orig and [id(p) for p in model.parameters()] != identities:
            lines.append("parameters are other objects than on the meta device")
        torch.manual_seed(5)
        expected = initialized_again(Net())
        lines += differing(full_parameters(model), _reseeded(expected))
        loss_of(model(data(rank, 0))).backward()
    return lines


def _reseeded(net: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    return initialized_again(net)


def test_reset_parameters(pool2: Run) -> None:
    assert not joined(pool2(from_meta))


def by_function(rank: int, world: int) -> list[str]:
    called: list[str] = []

    def initialize(module: nn.Module) -> None:
        called.append(type(module).__name__)
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.25)

    model = wrap(on_meta(Net), param_init_fn=initialize)
    lines = [] if called == ["LayerNorm", "Linear", "Linear"] * 3 + ["Linear"] else [f"called for {called}"]
    return lines + [f"{n} differs" for n, p in full_parameters(model).items() if not (p == 0.25).all()]


def test_param_init_fn(pool2: Run) -> None:
    assert not joined(pool2(by_function))


def guarded(rank: int, world: int, chosen: Callable[[nn.Parameter], bool]) -> list[str]:
    """A function for FSDP1: skips parameters not on the meta device, and restores ties that to_empty() would break."""
    net = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    net[2].weight = net[0].weight
    lines = []

    def initialize(module: nn.Module) -> None:
        if not any(chosen(p) for p in module.parameters(recurse=False)):
            return
        module.to_empty(device="cpu", recurse=False)
        for p in module.parameters(recurse=False):
            if chosen(p):
                lines.append("on the meta device after to_empty()")
            nn.init.constant_(p, 0.25)
        if module is net[0]:
            net[2].weight = module.weight

    model = FullyShardedDataParallel(net, param_init_fn=initialize, use_orig_params=True)
    lines += [f"{n} has no values" for n, p in full_parameters(model).items() if not (p == 0.25).all()]
    return lines if len(list(model.parameters())) == 3 else [*lines, "the tie is lost"]


def is_meta(parameter: nn.Parameter) -> bool:
    return parameter.is_meta


def has_meta_device(parameter: nn.Parameter) -> bool:
    return parameter.device == torch.device("meta")


@pytest.mark.parametrize("chosen", [is_meta, has_meta_device])
def test_a_param_init_fn_that_looks_for_the_meta_device(chosen: Callable[[nn.Parameter], bool], pool2: Run) -> None:
    assert not joined(pool2(guarded, chosen))


def values_beside(rank: int, world: int) -> list[str]:
    """A function may make values on the device of a parameter, after it has looked at it."""

    def initialize(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            p.data.copy_(torch.full(p.shape, 0.25, device=p.device))

    model = wrap(on_meta(Net), param_init_fn=initialize)
    return [f"{n} differs" for n, p in full_parameters(model).items() if not (p == 0.25).all()]


def test_a_param_init_fn_that_makes_values_on_a_parameters_device(pool2: Run) -> None:
    assert not joined(pool2(values_beside))


class Bare(nn.Module):
    """Has a parameter and no way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def refusals(rank: int, world: int) -> list[str]:
    texts = []
    inits: list[Any] = [None, lambda module: setattr(module, "scale", nn.Parameter(torch.empty(3, device="meta")))]
    for init in (*inits, lambda module: None):
        net = on_meta(Bare)
        with pytest.raises(UsageError) as info:
            FullyShardedDataParallel(net, param_init_fn=init)
        texts.append(str(info.value))
        if not net.scale.is_meta:
            texts.append("no longer on the meta device")
    return texts


def test_what_cannot_be_initialized(pool2: Run) -> None:
    assert pool2(refusals)[0] == [
        "module <root> (Bare) is on the meta device and has no reset_parameters(); define that method, or pass "
        "param_init_fn=, a function that takes a module and initializes the module's own parameters and buffers",
        "param_init_fn left scale of module <root> on the meta device, without values. It must allocate memory for "
        "them, for example with module.to_empty(device=..., recurse=False), and initialize them",
        "param_init_fn did nothing with scale of module <root> (Bare), which were on the meta device and would have "
        "no values. Initialize them in place or, if values are loaded later, call module.to_empty(device=..., "
        "recurse=False)",
    ]


class Head(nn.Linear):
    """A tied head with a bias of its own, whose initialisation writes to both."""


class Language(nn.Module):
    """Embedding and head are tied across two units, or inside the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.block = Feedforward(WIDTH, 9)
        self.head = Head(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(x.abs().long().clamp(max=WIDTH - 1)).mean(1)))


def tied_on_meta(rank: int, world: int) -> list[str]:
    lines = []
    for orig in (True, False):
        for classes in ({nn.Embedding, Head}, {nn.Embedding}, {Feedforward}):
            net = on_meta(Language)
            torch.manual_seed(3)
            model = wrap(net, orig, auto_wrap_policy=classes)
            torch.manual_seed(3)
            expected = nn.Embedding(WIDTH, WIDTH).weight
            whole = full_parameters(model)
            if "head.weight" in whole:
                lines.append(f"{classes}: the tie is gone")
            if classes == {nn.Embedding, Head} and not torch.equal(whole["embedding.weight"], expected):
                lines.append(f"{classes}: the tied weight was initialised twice")
            if not all(p.isfinite().all() for p in whole.values()):
                lines.append(f"{classes}: undefined values")
            loss_of(model(data(rank, 0))).backward()
    return lines


def test_ties_on_the_meta_device(pool2: Run) -> None:
    assert not joined(pool2(tied_on_meta))


def mixed(rank: int, world: int) -> list[str]:
    """Some modules, and some parameters of one module, have values already."""
    net = seeded(Net)
    kept = {n: p.detach().clone() for n, p in net.named_parameters()}
    net.blocks[1].to_empty(device="meta")
    net.blocks[0].up.bias = nn.Parameter(torch.empty(20, device="meta"))
    whole = full_parameters(wrap(net))
    fresh = {n for n in kept if not torch.equal(kept[n], whole[n])}
    expected = {"blocks.0.up.bias"} | {f"blocks.1.{n}.{k}" for n in ("up", "down") for k in ("weight", "bias")}
    return [] if fresh == expected else [f"initialised {sorted(fresh)}, expected {sorted(expected)}"]


def test_partly_on_the_meta_device(pool2: Run) -> None:
    assert not joined(pool2(mixed))


class Recurrent(nn.Module):
    """Keeps weak references to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0]


def recurrent(rank: int, world: int) -> list[str]:
    torch.manual_seed(4)
    model = FullyShardedDataParallel(on_meta(Recurrent), use_orig_params=True)
    torch.manual_seed(4)
    expected = Recurrent()
    lines = differing(full_parameters(model), expected)
    x = data(rank, 0)
    return lines if torch.equal(model(x), expected(x)) else [*lines, "another output"]


def test_an_lstm_on_the_meta_device(pool2: Run) -> None:
    assert not joined(pool2(recurrent))


class Normed(nn.Module):
    """Buffers that are saved and buffers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Feedforward(WIDTH, 9)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x)) * self.table.sum()


def buffers_on_meta(rank: int, world: int) -> list[str]:
    model = wrap(on_meta(Normed))
    model(data(rank, 0))
    plain = Normed()
    return [n for n, b in model.named_buffers() if b.is_meta or b.shape != plain.get_buffer(n).shape] + (
        [] if torch.equal(model.table, torch.arange(3.0)) else ["table"]
    )


def test_buffers_on_the_meta_device(pool2: Run) -> None:
    assert not joined(pool2(buffers_on_meta))


# --- rank 0's values --------------------------------------------------------------------------------------------------


def synchronized(rank: int, world: int, hybrid: bool, meta: bool) -> list[str]:
    """Every rank begins differently, or (all but the first) without values."""
    lines = []
    options: dict[str, Any] = {}
    if hybrid:
        options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": replicas_of_shards()}
    for orig in (True, False):
        torch.manual_seed(rank)
        net = on_meta(Normed) if meta and rank else Normed()
        if not (meta and rank):
            net.norm.running_mean.fill_(rank)
            net.table.fill_(rank + 1.0)
        init = (lambda module: module.to_empty(device="cpu", recurse=False)) if meta and rank else None
        model = wrap(net, orig, sync_module_states=True, param_init_fn=init, device_id="cpu", **options)
        torch.manual_seed(0)
        expected = Normed()
        lines += [f"{orig}: {line}" for line in differing(full_parameters(model), expected)]
        if not (model.norm.running_mean == 0).all() or not (model.table == 1).all():
            lines.append(f"{orig}: buffers are not rank 0's")
        loss_of(model(data(rank, 0))).backward()
    return lines


@pytest.mark.parametrize("meta", [False, True])
def test_sync_module_states(meta: bool, pool2: Run) -> None:
    assert not joined(pool2(synchronized, False, meta))


@pytest.mark.parametrize("meta", [False, True])
def test_sync_module_states_over_a_mesh(meta: bool, pool4: Run) -> None:
    assert not joined(pool4(synchronized, True, meta))


# --- the cost ---------------------------------------------------------------------------------------------------------

WIDE, DEPTH = 128, 8


class Wide(nn.Module):
    """One unit of WIDE * WIDE elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDE, WIDE))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def patient(axis: Transport, tensor: Tensor) -> None:
    """`broadcast` that returns when gloo's thread has released `tensor`, too.

    Else that thread is sometimes the last to hold it, and the recording misses memory that is freed there.
    """
    broadcast(axis, tensor)
    time.sleep(0.1)


def peak(rank: int, world: int, sync: bool) -> tuple[int, int]:
    """(peak, end) in units of one unsharded unit, while a model is made from the meta device."""
    gc.collect()  # garbage of an earlier job would be freed meanwhile
    net = on_meta(lambda: nn.Sequential(*(Wide() for _ in range(DEPTH))))
    with Recording() as recording, patch.object(init_sync, "broadcast", patient):
        recording.mark("begin")
        model = FullyShardedDataParallel(net, auto_wrap_policy={Wide}, sync_module_states=sync, check_values="off")
        recording.mark("end")
    usage = recording.between("begin", "end")
    assert inspect.memory(model).live["shard"] == DEPTH * WIDE * WIDE * 4 // world
    unit = WIDE * WIDE * 4
    return round((usage.peak - usage.start) / unit, 2), round((usage.end - usage.start) / unit, 2)  # type: ignore[return-value]


@pytest.mark.parametrize("sync", [False, True])
def test_the_peak_is_the_shards_and_one_unit(sync: bool, pool2: Run) -> None:
    for most, end in pool2(peak, sync):
        assert most <= DEPTH / 2 + 1.1
        # The last broadcast's tensor is released on a thread of gloo's, which the recording does not see.
        assert DEPTH / 2 <= end <= DEPTH / 2 + sync
