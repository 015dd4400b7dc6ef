"""Writes to shards, by any means, while the unit of their parameters is kept unsharded: to DTensors, and to original
parameters of the wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.pool import JobFailed
from tests.harness.thorough import is_thorough, some, spread

pytestmark = pytest.mark.distributed

Write = Callable[[list[Any]], object]


def lists(parameters: list[Any]) -> None:
    torch._foreach_mul_(parameters, 0.5)


def lists_of_data(parameters: list[Any]) -> None:
    torch._foreach_mul_([each.data for each in parameters], 0.5)


def lists_of_detached(parameters: list[Any]) -> None:
    torch._foreach_add_([each.detach() for each in parameters], 0.25)


def data(parameters: list[Any]) -> None:
    for each in parameters:
        each.data.mul_(0.5)


def local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def data_of_local(parameters: list[Any]) -> None:
    for each in parameters:
        local(each).data.add_(1.0)


def numpys(parameters: list[Any]) -> None:
    for each in parameters:
        local(each).numpy()[...] *= 0.5


def in_place(parameters: list[Any]) -> None:
    for each in parameters:
        each.mul_(0.5)


def on_one_rank(parameters: list[Any]) -> None:
    """What the first rank has."""
    if dist.get_rank() == 0:
        local(parameters[0]).data[0].fill_(3.0)


WRITES: list[Write] = [
    lists,
    lists_of_data,
    lists_of_detached,
    data,
    data_of_local,
    numpys,
    in_place,
    on_one_rank,  # the last one
]


def model_of(wrapped: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))  # of which the second rank has no row
    if wrapped:
        mixed = MixedPrecision(torch.bfloat16, torch.float32) if options.get("mp_policy") else None
        policy = {nn.Linear}
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, mixed_precision=mixed, use_orig_params=True)
    for layer in (model[0], model[2]):
        flatfsdp.fully_shard(layer, **options)
    return flatfsdp.fully_shard(model, **options)


def after_backward(model: Any) -> None:
    model.set_reshard_after_backward(False)
    model(torch.ones(2, 4)).sum().backward()


def after_forward(model: Any) -> None:
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(torch.ones(2, 4))


def requested(model: Any) -> None:
    for layer in (model[0], model[2]):
        layer.unshard()


def on_its_way(model: Any) -> None:
    for layer in (model[0], model[2]):
        layer.unshard(async_op=True)


def frozen(model: Any) -> None:
    model.keep_frozen_unsharded()
    model(torch.ones(2, 4))


def frozen_on_the_host(model: Any) -> None:
    model.keep_frozen_unsharded(on="host")
    model(torch.ones(2, 4))


FROZEN = (frozen, frozen_on_the_host)
KEPT = (after_backward, after_forward, requested, on_its_way, *FROZEN)
LOW = flatfsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def outputs(
    rank: int,
    world: int,
    wrapped: bool,
    keep: Callable[[Any], None],
    policies: Sequence[Any],
    writes: Sequence[Write],
) -> list[str]:
    """The writes after which a model that was kept whole computes with other values than one that was not; "gathers"
    where it gathers without a write."""
    found = []
    for policy in policies:
        for write in writes:
            kept, other = model_of(wrapped, mp_policy=policy), model_of(wrapped, mp_policy=policy)
            if keep in FROZEN:
                kept.requires_grad_(False)
            parameters = [list(each.parameters()) for each in (kept, other)]
            keep(kept)
            with torch.no_grad():
                for each in parameters:
                    write(each)
            if not torch.equal(kept(torch.ones(2, 4)), other(torch.ones(2, 4))):
                found.append(f"{write.__name__}, {policy}")
        model = model_of(wrapped, mp_policy=policy)
        if keep in FROZEN:
            model.requires_grad_(False)
        keep(model)
        with torch.no_grad():
            model(torch.ones(2, 4))  # requested, or kept: gathered already
        figures = flatfsdp.stats(model)
        figures.reset()
        if keep in (after_forward, *FROZEN):
            with torch.no_grad():
                model(torch.ones(2, 4))
            if "all_gather" in figures.comm:
                found.append(f"gathers, {policy}")
    return found


@pytest.mark.parametrize(("wrapped", "keep"), spread([False, True], KEPT))
def test_what_was_written_is_computed_with(keep: Callable[[Any], None], wrapped: bool, pool2: Run) -> None:
    everything = is_thorough() or keep is after_forward
    policies = (None, LOW) if everything else (None,)
    writes = WRITES if everything else [*some(WRITES[:-1], 2, KEPT.index(keep) // 2 + wrapped), on_one_rank]
    assert pool2(outputs, wrapped, keep, policies, writes, timeout=120) == [[], []]


def refused(rank: int, world: int) -> list[str]:
    """The writes after a forward, whose output was dropped, that the next forward computes without: none."""
    found = []
    for write in WRITES[:-1]:
        for reshard in (None, False):
            model, other = model_of(reshard_after_forward=reshard), model_of()
            both = [list(each.parameters()) for each in (model, other)]
            model(torch.ones(2, 4))
            with torch.no_grad():
                for parameters in both:
                    write(parameters)
            try:
                if not torch.equal(model(torch.ones(2, 4)), other(torch.ones(2, 4))):
                    found.append(f"{write.__name__}, {reshard}")
            except UsageError as error:
                if "written to between forward and backward" not in str(error):
                    found.append(str(error))
    return found


def test_what_was_written_after_a_forward_is_refused_by_the_next(pool2: Run) -> None:
    assert pool2(refused, timeout=120) == [[], []]


def on_their_way(rank: int, world: int, wrapped: bool) -> bool:
    """Whether what is written while a unit is being gathered on request, after a forward without its backward, is what
    the next forward computes with."""
    model, other = model_of(wrapped), model_of(wrapped)
    both = [list(each.parameters()) for each in (model, other)]
    model(torch.ones(2, 4))
    for layer in (model[0], model[2]):
        layer.unshard(async_op=True)
    with torch.no_grad():
        for parameters in both:
            in_place(parameters)
    return torch.equal(model(torch.ones(2, 4)), other(torch.ones(2, 4)))


@pytest.mark.parametrize("wrapped", [False, True], ids=["fully_shard", "wrapper"])
def test_what_was_written_on_the_way_after_a_forward_is_computed_with(wrapped: bool, pool2: Run) -> None:
    assert pool2(on_their_way, wrapped, timeout=60) == [True, True]


def toggled(rank: int, world: int) -> list[str]:
    """`requires_grad_()` holds when it is called before and after a forward without a backward, as PEFT's
    `disable_adapter()` does around a reference forward."""
    model, x = model_of(), torch.ones(2, 4)
    model.requires_grad_(False)
    with torch.no_grad():
        model(x)
    model.requires_grad_(True)
    model(x).sum().backward()
    found = [f"{name} has no gradient" for name, each in model.named_parameters() if each.grad is None]
    with torch.no_grad():
        model(x)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, flatfsdp.FSDPModule):
            module.reshard()
    return found + [f"{name} is trained" for name, each in model.named_parameters() if each.requires_grad]


def test_what_is_frozen_and_trained_between_forwards_stays_so(pool2: Run) -> None:
    assert pool2(toggled, timeout=60) == [[], []]


class Adapted(nn.Module):
    """A frozen layer with an adapter that can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
        self.enabled = True

    def enable(self, enabled: bool) -> None:
        self.adapter.requires_grad_(enabled)
        self.enabled = enabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x).tanh()
        return y + self.adapter(x) if self.enabled else y


class Policy(nn.Sequential):
    """Its layers, each under a checkpoint of the kind `reentrant`, unless that is None."""

    reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            if self.reentrant is None or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = checkpoint(layer, x.requires_grad_(), use_reentrant=self.reentrant)
        return x


def preferred(model: Any, *, first: bool) -> list[float]:
    """Losses of steps whose reference is the model without its adapters, run after it or `first`."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []

    def reference(x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            layer.enable(False)
        with torch.no_grad():
            found: torch.Tensor = model(x)
        for layer in model:
            layer.enable(True)
        return found

    for step in range(3):
        for micro in range(2):
            x = torch.linspace(-1, 1, 8).view(2, 4) * (1 + step + micro)
            known = reference(x) if first else None
            out = model(x)
            loss = -nn.functional.logsigmoid(out - (reference(x) if known is None else known)).mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        model.zero_grad()
    return losses


def preferences(rank: int, world: int, reshard: bool | None) -> list[str]:
    found = []
    cases = list(product((None, False, True), (False, True), (True, False)))
    if not is_thorough():  # half of them under each way to reshard, with all pairs of settings
        cases = [case for case in cases if sum(map(bool, case)) % 2 == (reshard is None)]
    for reentrant, first, root in cases:
        results = []
        for shard in (False, True):
            torch.manual_seed(0)
            model: Any = Policy(*(Adapted() for _ in range(3)))
            model.reentrant = reentrant
            if shard:
                for layer in list(model)[int(root) :]:  # the others belong to the root
                    flatfsdp.fully_shard(layer, reshard_after_forward=reshard)
                flatfsdp.fully_shard(model)
            results.append(preferred(model, first=first))
        if len(set(results[0])) < 4 or not torch.allclose(*map(torch.tensor, results), rtol=1e-6, atol=0):
            found.append(f"reentrant={reentrant}, first={first}, in the root: {root}: {results}")
    return found


@pytest.mark.parametrize("reshard", [None, False])
def test_adapters_are_switched_off_between_a_forward_and_its_backward(reshard: bool | None, pool2: Run) -> None:
    assert pool2(preferences, reshard, timeout=120) == [[], []]


def between(rank: int, world: int) -> list[str]:
    """Changes of the parameters that modules hold between a forward and its backward."""
    found, x = [], torch.ones(2, 4)
    for reshard in (None, True, False):
        model = model_of(reshard_after_forward=reshard)
        model(x).sum().backward()
        before = [each.grad.full_tensor().clone() for each in model.parameters()]
        out = model(x)
        model.zero_grad()
        out.sum().backward()
        if not all(map(torch.equal, before, [each.grad.full_tensor() for each in model.parameters()])):
            found.append(f"{reshard}: gradients that zero_grad() has dropped")
        out = model(x)
        model.zero_grad(set_to_none=False)
        model[2].requires_grad_(False)
        out.sum().backward()
        flags = [each.requires_grad for each in model.parameters()]
        if flags != [True, True, False, False]:
            found.append(f"{reshard}: requires_grad {flags}")
        if any(each.grad.full_tensor().any() for each in model[2].parameters()):
            found.append(f"{reshard}: a gradient of what was frozen")
        if not all(map(torch.equal, before, [each.grad.full_tensor() for each in model[0].parameters()])):
            found.append(f"{reshard}: other gradients of the rest")
        out = model(x)
        model[2].requires_grad_(True)
        out.sum().backward()
        if any(each.grad.full_tensor().any() for each in model[2].parameters()):
            found.append(f"{reshard}: a gradient of what was frozen in its forward")
        model.zero_grad()
        model(x).sum().backward()
        if not all(map(torch.equal, before, [each.grad.full_tensor() for each in model.parameters()])):
            found.append(f"{reshard}: gradients at the end")
    return found


def test_what_is_done_between_a_forward_and_its_backward_is_kept(pool2: Run) -> None:
    assert pool2(between, timeout=60) == [[], []]


def frozen_on_one_rank(rank: int, world: int) -> None:
    """Between a forward that has freed its units and the backward, after steps in which ranks did the same."""
    model, x = model_of(reshard_after_forward=True), torch.ones(2, 4)
    for _ in range(2):
        model(x).sum().backward()
    out = model(x)
    model[2].requires_grad_(rank == 0)
    out.sum().backward()


def test_what_one_rank_freezes_between_a_forward_and_its_backward_is_reported(pool2: Run) -> None:
    named = "Parameter '2.weight' requires a gradient on rank 0, but not on rank 1; ranks also differ in 2.bias"
    with pytest.raises(JobFailed, match=named):
        pool2(frozen_on_one_rank, timeout=60)


def requested_again(rank: int, world: int) -> list[str]:
    """The writes after which requested units have other values than the shards; and the effect of requests."""
    found = []
    for keep in KEPT:
        for write in (lists, on_one_rank):
            kept, other = model_of(), model_of()
            kept.requires_grad_(keep not in FROZEN)
            both = [list(each.parameters()) for each in (kept, other)]
            keep(kept)
            layers = (kept[0], kept[2])
            for times in (1, 2):
                for index, layer in enumerate(layers):
                    layer.unshard(async_op=(index + times) % 2 == 0)
                with torch.no_grad():
                    for parameters in both:
                        write(parameters)
            for layer in layers:
                layer.unshard()
            if not torch.equal(kept(torch.ones(2, 4)), other(torch.ones(2, 4))):
                found.append(f"{keep.__name__}, {write.__name__}")
            if inspect.copies_of_shards(kept):
                found.append(f"{keep.__name__}: copies of shards")
    return found


def test_what_was_written_is_there_where_units_are_requested(pool2: Run) -> None:
    assert pool2(requested_again, timeout=120) == [[], []]


# -- inside a forward --------------------------------------------------------------------------------------------------


class Replacing(nn.Linear):
    """Puts something else in the place of its weight, in its own forward."""

    how: Callable[[nn.Linear], object] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how is not None:
            self.how(self)
        return super().forward(x) if len(self.weight) == len(self.bias) else x


def other_data(module: nn.Linear) -> None:
    module.weight.data = module.weight.data * 2


def another_view(module: nn.Linear) -> None:
    module.weight.data = module.weight.data.t()


def fewer_rows(module: nn.Linear) -> None:
    module.weight.data = module.weight.data[:2]


def another_parameter(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach() * 2, requires_grad=module.weight.requires_grad)


REPLACE = (other_data, another_view, fewer_rows, another_parameter)


def inside(rank: int, world: int) -> list[str]:
    """A refused write leaves the model as it was. Frozen, trained, in evaluation; in a unit of its own or not."""
    found, x = [], torch.ones(2, 4)
    for number, how in enumerate((*REPLACE, *REPLACE)):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), Replacing(4, 4), nn.Linear(4, 1))
        model[1].weight.requires_grad_(number % 2 == 0)
        if number < len(REPLACE):
            flatfsdp.fully_shard(model[1])
        flatfsdp.fully_shard(model)
        for training in (True, False):
            with torch.set_grad_enabled(training):
                expected = model(x)
                model[1].how = how
                words = r"written to inside a forward: (1\.)?weight"
                with pytest.raises(UsageError, match=words):
                    model(x)
                model[1].how = None
                if not torch.equal(model(x), expected) or not hasattr(model[0].weight, "grad"):
                    found.append(f"{how.__name__}, {training}")
        model(x).sum().backward()
        if model[1].weight.requires_grad is (model[1].weight.grad is None):
            found.append(f"{how.__name__}: a gradient")
    return found


def test_what_a_module_replaces_in_its_own_forward_is_refused(pool2: Run) -> None:
    assert pool2(inside) == [[], []]
