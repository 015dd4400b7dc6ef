"""Steps on whole matrices in the middle of what programs do with an optimizer: the bits of one process that does the
same, or an error in words."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, ShardedGradScaler, fully_shard
from flatfsdp.engine.features.matrix_states import at_owner
from flatfsdp.engine.state.optim.descriptions import KeptWhole
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.features.test_matrix_steps import whole
from tests.features.test_matrix_steps_of_any_class import Plain
from tests.harness import inspect
from tests.harness.corners import seeded
from tests.harness.low_bit import LowBitAdam

pytestmark = pytest.mark.distributed

WAYS = [None, "matrices"]


def chain() -> nn.Sequential:
    shapes = ((8, 13), (13, 8), (8, 5), (5, 8), (8, 8))
    return nn.Sequential(*(nn.Linear(one, other, bias=False) for one, other in shapes))


def muon(params: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, **({"lr": 0.05, "weight_decay": 0.1} | more))


class Program:
    """A model over ranks and one process with its gradients, whose optimizers are treated alike.

    Attributes:
        model: the sharded model.
        params: for each optimizer the parameters, in the same order.
        optimizers: that over ranks, and that of one process.
    """

    def __init__(self, front: str, sees: str | None, held: int = 5, make: Any = muon) -> None:
        net = seeded(chain)
        alone = [nn.Parameter(each.detach().clone()) for each in net.parameters()]
        on_front = fully_shard if front == "fully_shard" else partial(FullyShardedDataParallel, use_orig_params=True)
        self.model: Any = on_front(net)
        self.params = [*self.model.parameters()], alone
        self.steps = flatfsdp.matrix_steps(make, self.params[0][:held], sees=sees, bucket_bytes=400)
        self.optimizers = [self.steps.optimizer, make(alone[:held])]
        self.sees = sees

    def backward(self, rank: int, number: int, scaler: ShardedGradScaler | None = None) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        loss = self.model(x).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()

    def share_gradients(self) -> None:
        for parameter, grad in zip(self.params[1], whole(self.model, "grad").values(), strict=True):
            parameter.grad = grad

    def step(self, rank: int, number: int) -> None:
        self.backward(rank, number)
        self.share_gradients()
        for optimizer, params in zip(self.optimizers, self.params, strict=True):
            optimizer.step()
            for parameter in params:
                parameter.grad = None

    def unlike(self) -> list[int]:
        found = whole(self.model, "data").values()
        pairs = zip(self.params[1], found, strict=True)
        return [index for index, (one, other) in enumerate(pairs) if not torch.equal(one, other)]  # type: ignore[arg-type]


def eventful(rank: int, world: int, front: str, sees: str | None) -> list[int]:
    program = Program(front, sees, held=3)
    program.step(rank, 0)
    for optimizer, params in zip(program.optimizers, program.params, strict=True):
        optimizer.add_param_group({"params": params[3:], "lr": 0.02})
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda epoch: 0.9**epoch) for each in program.optimizers]
    for number in range(1, 10):
        if number == 2:  # an average of the weights, as programs keep one
            averaged = copy.deepcopy(program.model)
        if number in (3, 5):  # frozen, and thawed
            for params in program.params:
                params[1].requires_grad_(number == 5)
        if number == 6:
            for optimizer in program.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if number == 7:  # a state dict in the middle of accumulation
            program.backward(rank, 20)
            if front == "wrapper":
                FullyShardedDataParallel.optim_state_dict(program.model, program.optimizers[0])
            else:
                program.optimizers[0].state_dict()
        if number == 8:
            for optimizer in program.optimizers:
                optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
                optimizer.param_groups[1]["weight_decay"] = 0.0
        program.step(rank, number)
        for scheduler in schedulers:
            scheduler.step()
    del averaged
    return program.unlike()


@pytest.mark.parametrize("sees", WAYS)
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_groups_rates_freezing_state_dicts_and_copies_of_models(front: str, sees: str | None, pool3: Run) -> None:
    assert pool3(eventful, front, sees) == [[]] * 3


def scaled(rank: int, world: int, sees: str | None, scaler_class: Any = ShardedGradScaler) -> list[int]:
    """Steps with scaled losses, of which one is skipped for a gradient that only one rank sees overflow."""
    program = Program("wrapper", sees)
    scaler = scaler_class("cpu", init_scale=1024.0)
    for number in range(4):
        program.backward(rank, number, scaler)
        if number == 1 and rank == world - 1:
            next(each.grad for each in program.params[0] if each.numel()).fill_(float("inf"))
        scaler.unscale_(program.optimizers[0])
        program.share_gradients()
        before = scaler.get_scale()
        scaler.step(program.optimizers[0])
        scaler.update()
        assert (scaler.get_scale() < before) is (number == 1)
        if number != 1:
            program.optimizers[1].step()
        program.model.zero_grad()
    return program.unlike()


@pytest.mark.parametrize("sees", WAYS)
def test_a_step_is_skipped_where_any_rank_has_an_overflow(sees: str | None, pool2: Run) -> None:
    assert pool2(scaled, sees) == [[]] * 2


@pytest.mark.parametrize("sees", WAYS)
def test_torchs_own_scaler_skips_a_step_on_one_rank(sees: str | None, run: Run) -> None:
    assert run(1, scaled, sees, torch.amp.GradScaler) == [[]]


def replaced(rank: int, world: int) -> list[int]:
    """How many matrices of new models, some in the memory of earlier ones, are given to an owner of before."""
    optimizer: Any = None
    found = []
    for _ in range(8):
        layers = (nn.Linear(6, 6, bias=False) for _ in range(12))
        model = FullyShardedDataParallel(nn.Sequential(*layers), use_orig_params=True)
        params = [*model.parameters()]
        if optimizer is None:
            steps = flatfsdp.matrix_steps(muon, params, owners=dict.fromkeys(params, 0))
            optimizer = steps.optimizer
        optimizer.param_groups[0]["params"] = params
        optimizer.state.clear()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        found.append(sum(matrix.asked is not None for matrix in steps.plans[0].matrices))
        del model, params
        gc.collect()
    return found


def test_an_owner_is_that_of_a_parameter_and_not_of_its_id(run: Run) -> None:
    assert run(1, replaced) == [[12] + [0] * 7]


def test_step_counts_at_owners_are_where_kernels_read_them() -> None:
    """As `load_state_dict()` of torch does it: states come from a state dict on the CPU."""
    count, device = torch.tensor(3.0), torch.device("meta")
    of_group = {"capturable": True}, {"fused": True}, {"capturable": False, "fused": None}, {}
    assert [at_owner(count, group, device).device.type for group in of_group] == ["meta", "meta", "cpu", "cpu"]
    assert at_owner(4, {"capturable": True}, device) == 4
    rows = torch.ones(2).as_subclass(KeptWhole)
    assert at_owner(rows, {}, device).is_meta and type(at_owner(rows, {}, device)) is Tensor


def compiled(rank: int, world: int, sees: str | None) -> list[int]:
    program = Program("wrapper", sees)
    steps = torch.compile(program.optimizers[0].step, backend="eager")
    for number in range(3):
        program.backward(rank, number)
        program.share_gradients()
        steps()
        program.optimizers[1].step()
        program.model.zero_grad()
    return program.unlike()


def test_compiled_steps(pool2: Run) -> None:
    assert pool2(compiled, None, timeout=100) == [[]] * 2


def copied(rank: int, world: int, late: bool) -> list[str]:
    """What steps of copies of optimizers say, which do not see whole matrices."""
    found = []
    model = FullyShardedDataParallel(seeded(chain), use_orig_params=True)
    made = flatfsdp.matrix_steps(Plain(model.parameters()), sees="tensors").optimizer
    net = nn.Sequential(nn.Linear(64, 96, bias=False))
    its = FullyShardedDataParallel(net, use_orig_params=True, layout=flatfsdp.layout.state_blocks())
    low = flatfsdp.block_states(LowBitAdam(its.parameters()))
    for wrapped, optimizer, width in ((model, made, 8), (its, low, 64)):
        wrapped(torch.ones(2, width)).square().sum().backward()
        if late:
            optimizer.step()
        other, its_optimizer = copy.deepcopy((wrapped, optimizer))
        other(torch.ones(2, width)).square().sum().backward()
        with pytest.raises(UsageError) as caught:
            its_optimizer.step()
        found.append(str(caught.value))
        marked: Any = pickle.loads(pickle.dumps(optimizer.defaults))
        assert marked.seen and marked == optimizer.defaults
    return found


@pytest.mark.parametrize("late", [False, True])
def test_copies_of_optimizers_that_saw_wholes_are_refused(late: bool, pool2: Run) -> None:
    for of_tensors, of_blocks in pool2(copied, late):
        assert re.search(r"Plain looks at whole tensors.*flatfsdp.matrix_steps\(\), for copies of an opt", of_tensors)
        assert re.search(r"LowBitAdam looks at blocks.*flatfsdp.block_states\(.*for copies", of_blocks)


def widened(rank: int, world: int) -> list[int]:
    """Units of which one gets another dtype after a step: their matrices no longer travel together."""
    net = seeded(chain)
    alone = [nn.Parameter(each.detach().clone()) for each in net.parameters()]
    model = FullyShardedDataParallel(net, use_orig_params=True, auto_wrap_policy={nn.Linear})
    params = [*model.parameters()]
    optimizers = [flatfsdp.matrix_steps(Plain(params), sees="tensors").optimizer, Plain(alone)]
    for number in range(2):
        if number:
            model.module[0].double()
            alone[0].data = alone[0].data.double()
        for index, (parameter, other) in enumerate(zip(params, alone, strict=True)):
            made = torch.randn(other.shape, generator=torch.Generator().manual_seed(index)).to(other.dtype)
            other.grad = made
            span = model_span(model, index, rank)
            parameter.grad = made.flatten()[span[0] : span[1]].reshape(parameter.shape)
            assert parameter.dtype == other.dtype
        for optimizer in optimizers:
            optimizer.step()
    found = whole(model, "data").values()
    return [index for index, (one, other) in enumerate(zip(alone, found, strict=True)) if not torch.equal(one, other)]


def model_span(model: nn.Module, index: int, rank: int) -> tuple[int, int]:
    """The elements of the weight of layer `index` that a rank has."""
    (flat,) = inspect.unit(model.module[index]).flat_params  # type: ignore[index, union-attr]
    span = flat.layout.span_in_param(0, rank)
    return span.start, span.stop


def test_units_that_get_another_dtype_after_a_step(pool2: Run) -> None:
    assert pool2(widened) == [[]] * 2


def reloaded(rank: int, world: int) -> str:
    """A state dict that brings settings with which torch's Muon goes wrong."""
    net = nn.Linear(8, 8, bias=False).bfloat16()
    model = FullyShardedDataParallel(net, use_orig_params=True, sharding_strategy="NO_SHARD")
    optimizer = flatfsdp.matrix_steps(muon(model.parameters())).optimizer
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    loaded = optimizer.state_dict()
    loaded["param_groups"][0]["nesterov"] = False
    optimizer.load_state_dict(loaded)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return str(caught.value)


def test_settings_that_are_loaded_are_checked(pool2: Run) -> None:
    for text in pool2(reloaded):
        assert "nesterov=False divides the momentum of bfloat16 parameters" in text


def deleted(rank: int, world: int) -> list[bool]:
    """Whether parameters, optimizers and states are gone once a program has dropped them, without a collector."""
    found = []
    for kind in ("parts", "matrices", "blocks"):
        model = FullyShardedDataParallel(
            nn.Linear(64, 96, bias=False), use_orig_params=True, layout=flatfsdp.layout.state_blocks()
        )
        if kind == "blocks":
            optimizer = flatfsdp.block_states(LowBitAdam(model.parameters()))
        else:
            steps = flatfsdp.matrix_steps(muon, model.parameters(), sees=None if kind == "parts" else kind)
            optimizer = steps.optimizer
            del steps  # its hooks go on
        for _ in range(2):
            model(torch.ones(2, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = [weakref.ref(optimizer), weakref.ref(model), weakref.ref(next(model.parameters()))]
        gc.collect()
        gc.disable()
        try:
            del model, optimizer
            found.append(all(each() is None for each in kept))
        finally:
            gc.enable()
    return found


def test_a_deleted_model_frees_its_memory_without_the_collector(pool2: Run) -> None:
    assert pool2(deleted) == [[True] * 3] * 2
