"""Training is the same under every schedule; and ranks that set different ones get an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import AgreementError
from flatfsdp.wrap import ModuleWrapPolicy
from tests.conftest import Run
from tests.harness.corners import (
    HYBRID,
    HYBRID_HALVES,
    PAIRS,
    Net,
    Setting,
    chosen,
    data,
    differences,
    joined,
    loss_of,
    seeded,
)
from tests.harness.models import Feedforward
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed


def call_ours(model: Any, method: str, *args: Any, **kwargs: Any) -> None:
    """Call a method that plain models lack."""
    if isinstance(model, FullyShardedDataParallel):
        getattr(model, method)(*args, **kwargs)


def microbatch(model: Any, rank: int, step: int, micro: int) -> torch.Tensor:
    loss = loss_of(model(data(rank, step, micro)))
    loss.backward()
    return loss.detach()


def accumulate(model: Any, rank: int, step: int, *, keep: bool, sync: str, parts: bool) -> list[torch.Tensor]:
    """Microbatches, reduced where `sync` has an s; in `parts`, only some units do without."""
    losses = []
    for micro, kind in enumerate(sync):
        last = micro == len(sync) - 1
        if keep:
            call_ours(model, "set_reshard_after_backward", last)
        call_ours(model.blocks[1] if parts else model, "set_requires_gradient_sync", kind == "s")
        losses.append(microbatch(model, rank, step, micro))
    return losses


def accumulated(rank: int, world: int, keep: bool, sync: str, parts: bool, under: tuple[Setting, ...]) -> list[str]:
    program = partial(accumulate, keep=keep, sync=sync, parts=parts)
    return differences(rank, world, Net, program, under=under, steps=3, bound=2e-6)


# Any two of these, and each under other settings.
@pytest.mark.parametrize(
    ("sync", "keep", "parts", "pair"),
    [
        ("nns", False, False, 0),
        ("nns", True, True, 3),
        ("sns", False, True, 2),
        ("sns", True, False, 1),
        ("ss", False, True, 1),
        ("ss", True, False, 2),
    ],
)
def test_accumulation(sync: str, keep: bool, parts: bool, pair: int, pool2: Run) -> None:
    assert not joined(pool2(accumulated, keep, sync, parts, PAIRS[pair]))


def test_accumulation_under_hybrids(pool4: Run) -> None:
    assert not joined(pool4(accumulated, True, "nns", True, chosen(accumulated, HYBRID_HALVES)))


def add_up_shards(model: Any, rank: int, step: int, *, of: str) -> list[torch.Tensor]:
    """Microbatches: p for a partial sum, n for none, s for the whole reduction."""
    losses = []
    for micro, kind in enumerate(of):
        call_ours(model, "set_requires_gradient_sync", kind != "n")
        call_ours(model, "set_requires_all_reduce", kind == "s")
        losses.append(microbatch(model, rank, step, micro))
    return losses


def partial_sums(rank: int, world: int, of: str, under: tuple[Setting, ...]) -> list[str]:
    return differences(rank, world, Net, partial(add_up_shards, of=of), under=under, bound=2e-6)


@pytest.mark.parametrize(("number", "of"), list(enumerate(["pps", "nps", "pns", "sps"])))
def test_partial_sums_of_hybrids(number: int, of: str, pool4: Run) -> None:
    assert not joined(pool4(partial_sums, of, some(HYBRID, 4, number)))


def test_partial_sums_of_one_axis(pool2: Run) -> None:
    assert not joined(pool2(partial_sums, "pps", chosen(partial_sums)))


def partial_sum_and_a_failure(rank: int, world: int) -> list[str]:
    def program(model: Any, rank: int, step: int) -> list[torch.Tensor]:
        call_ours(model, "set_requires_all_reduce", False)
        first = microbatch(model, rank, step, 0)
        if isinstance(model, FullyShardedDataParallel):
            x = data(rank, step, 1).requires_grad_()
            x.register_hook(_fail)
            with pytest.raises(ZeroDivisionError):
                loss_of(model(x)).backward()
        call_ours(model, "set_requires_all_reduce", True)
        return [first, microbatch(model, rank, step, 1)]

    return differences(
        rank, world, Net, program, under=[Setting("NO_SHARD", orig) for orig in (True, False)], bound=2e-6
    )


def _fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
def test_a_failed_backward_leaves_partial_sums_alone(pool2: Run) -> None:
    assert not joined(pool2(partial_sum_and_a_failure))


def own_hybrid(rank: int, world: int) -> None:
    """Shards over pairs, and hooks that sum over the pairs, are a hybrid."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    replicas, shards = mesh["replicas"].get_group(), mesh["shards"].get_group()
    policy = ModuleWrapPolicy({Feedforward})
    ours = FullyShardedDataParallel(seeded(Net), shards, auto_wrap_policy=policy, use_orig_params=True)
    for wrapper in FullyShardedDataParallel.fsdp_modules(ours):
        wrapper.set_all_reduce_hook(lambda total: dist.all_reduce(total, group=replicas))
        wrapper.set_gradient_divide_factor(world)
    hybrid = Setting("HYBRID_SHARD").wrap(seeded(Net), (Feedforward,))
    for step in range(2):
        for model in (ours, hybrid):
            model.zero_grad()
            microbatch(model, rank, step, 0)
        for own, other in zip(ours.parameters(), hybrid.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)


def test_a_hybrid_of_hooks(pool4: Run) -> None:
    pool4(own_hybrid)


@pytest.mark.parametrize("reduce", [torch.float32, torch.float16])
def test_sums_are_divided_by_the_factor(reduce: torch.dtype, pool2: Run) -> None:
    pool2(divided, reduce)


def divided(rank: int, world: int, reduce: torch.dtype) -> None:
    def gradients(factor: float | None) -> list[torch.Tensor]:
        mixed = MixedPrecision(reduce_dtype=reduce)
        model = FullyShardedDataParallel(seeded(lambda: nn.Linear(8, 3)), mixed_precision=mixed, use_orig_params=True)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        loss_of(model(torch.ones(2, 8))).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for own, usual in zip(gradients(0.5), gradients(None), strict=True):
        assert torch.equal(own, usual * (world / 0.5))


def kept_for_evaluation(model: Any, rank: int, step: int, *, root: bool) -> list[torch.Tensor]:
    """Evaluations between training steps, without a gather each; the root resharded or not."""
    call_ours(model, "set_reshard_after_forward", False)
    with torch.no_grad():
        evaluated = [model(data(rank, step, micro)) for micro in range(2)]
    call_ours(model, "set_reshard_after_forward", True)
    call_ours(model, "set_reshard_after_forward", root, recurse=False)
    return [*evaluated, microbatch(model, rank, step, 0)]


def evaluations(rank: int, world: int, root: bool, under: tuple[Setting, ...]) -> list[str]:
    return differences(rank, world, Net, partial(kept_for_evaluation, root=root), under=under, steps=3)


@pytest.mark.parametrize("root", [False, True])
def test_evaluations_between_steps(root: bool, pool2: Run) -> None:
    assert not joined(pool2(evaluations, root, PAIRS[1 + 2 * root]))


def tiny() -> nn.Module:
    """Units with fewer elements than ranks: on most ranks an optimizer has nothing of them to write."""
    return nn.Sequential(nn.Linear(13, 1), nn.LayerNorm(1), nn.Linear(1, 1), nn.LayerNorm(1), nn.Linear(1, 2))


class ByData(torch.optim.SGD):
    """Writes to parameters unknown to autograd, as kernels of other libraries do."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


def kept_for_good(rank: int, world: int, orig: bool, kind: str) -> list[torch.Tensor]:
    """Losses where nothing is ever resharded after a backward."""
    model = Setting(orig=orig).wrap(seeded(tiny), (nn.LayerNorm,))
    model.set_reshard_after_backward(False)
    make = ByData if kind == "by data" else partial(torch.optim.SGD, fused=kind == "fused")
    optimizer = make(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        loss = loss_of(model(torch.ones(2, 13)))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("job", "how"),
    [
        *(("kept_for_good", (orig, kind)) for orig in (True, False) for kind in ("foreach", "fused", "by data")),
        *(("requested_before_the_step", (orig, wait)) for orig in (True, False) for wait in (True, False)),
    ],
)
def test_what_is_kept_follows_an_optimizer_that_writes_on_some_ranks_only(
    job: str, how: tuple[bool | str, ...], pool3: Run
) -> None:
    plain = seeded(tiny)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    expected = []
    for _ in range(4):
        loss = loss_of(plain(torch.ones(2, 13)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    for losses in pool3(globals()[job], *how):
        torch.testing.assert_close(losses, expected)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


def embedded(rank: int, world: int) -> list[str]:
    def program(model: Any, rank: int, step: int) -> torch.Tensor:
        call_ours(model.embedding, "set_unshard_in_backward", False)
        loss = loss_of(model(torch.arange(5) + rank))
        loss.backward()
        return loss.detach()

    return differences(rank, world, Embedded, program, units=(nn.Embedding,))


def test_an_embedding_needs_no_gather_in_backward(pool2: Run) -> None:
    assert not joined(pool2(embedded))


def listed(model: Any, rank: int, step: int) -> list[torch.Tensor]:
    """Units gathered ahead by lists that change from step to step: good ones, and ones that miss."""
    blocks = model.blocks
    call_ours(blocks[0], "set_modules_to_forward_prefetch", [blocks[1 + step % 2], blocks[2]])
    call_ours(blocks[2], "set_modules_to_forward_prefetch", [blocks[0]] * (step % 2))
    call_ours(blocks[2], "set_modules_to_backward_prefetch", [blocks[0], blocks[1]][step % 2 :])
    call_ours(blocks[0], "set_modules_to_backward_prefetch", [blocks[2]])
    return [microbatch(model, rank, step, 0)]


def lists(rank: int, world: int, under: tuple[Setting, ...]) -> list[str]:
    return differences(rank, world, Net, listed, under=under, steps=3)


def test_lists_of_what_is_gathered_ahead(pool2: Run) -> None:
    assert not joined(pool2(lists, chosen(lists)))


def on_the_callers_stream(model: Any, rank: int, step: int) -> list[torch.Tensor]:
    """Gathers that go ahead by lists only, in every other step, and from between a forward and its backward on."""
    call_ours(model, "set_unshard_async_op", step % 2 == 1)
    losses = listed(model, rank, step)
    loss = loss_of(model(data(rank, step, 1)))
    call_ours(model, "set_unshard_async_op", step % 2 == 0)
    loss.backward()
    return [*losses, loss.detach()]


def callers(rank: int, world: int, under: tuple[Setting, ...]) -> list[str]:
    return differences(rank, world, Net, on_the_callers_stream, under=under, steps=3, bound=2e-6)


def test_gathers_on_the_callers_stream(pool2: Run) -> None:
    assert not joined(pool2(callers, chosen(callers)))


def listing_differently(rank: int, world: int) -> str:
    model = Setting().wrap(seeded(Net), (Feedforward,))
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1 + rank]])
    with pytest.raises(AgreementError) as caught:
        microbatch(model, rank, 0, 0)
    return str(caught.value)


def test_ranks_that_list_different_units_get_an_error(pool2: Run) -> None:
    for text in pool2(listing_differently):
        assert "in unit 'blocks.0', schedule: rank 0: prefetch in forward of 'blocks.1'; rank 1: " in text


def test_ranks_that_gather_on_different_streams_get_an_error(pool2: Run) -> None:
    for text in pool2(differing, "set_unshard_async_op", True):
        assert "schedule: rank 0: as built; rank 1: unshard_async_op=True" in text


def on_request(model: Any, rank: int, step: int, *, wait: bool) -> list[torch.Tensor]:
    """Units gathered and freed by hand, in time and in vain."""
    for wrapper in (model.blocks[step % 2], model):
        call_ours(wrapper, "unshard", async_op=not wait)
    if step == 1:
        call_ours(model, "reshard")
    loss = loss_of(model(data(rank, step)))
    call_ours(model.blocks[1], "unshard", async_op=wait)
    call_ours(model, "reshard")
    loss.backward()
    return [loss.detach()]


def requests(rank: int, world: int, wait: bool, under: tuple[Setting, ...]) -> list[str]:
    return differences(rank, world, Net, partial(on_request, wait=wait), under=under, steps=4)


@pytest.mark.parametrize("wait", [False, True])
def test_requests(wait: bool, pool2: Run) -> None:
    assert not joined(pool2(requests, wait, PAIRS[2 * wait]))


def requested_before_the_step(rank: int, world: int, orig: bool, wait: bool) -> list[torch.Tensor]:
    """Gathers that begin, or end, before the optimizer writes: the forward has the new values."""
    model = Setting(orig=orig).wrap(seeded(tiny), (nn.LayerNorm,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        loss = loss_of(model(torch.ones(2, 13)))
        loss.backward()
        losses.append(loss.detach())
        for wrapper in FullyShardedDataParallel.fsdp_modules(model):
            wrapper.unshard(async_op=not wait)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def asking_differently(rank: int, world: int) -> str:
    model = Setting().wrap(seeded(Net), (Feedforward,))
    with pytest.raises(AgreementError) as caught:
        model.blocks[rank].unshard()
    return str(caught.value)


def test_ranks_that_request_different_units_get_an_error(pool2: Run) -> None:
    for text in pool2(asking_differently):
        assert "rank 0 called unshard() of unit 'blocks.0'; rank 1 called unshard() of unit 'blocks.1'" in text


DIFFERENT = {
    "set_requires_gradient_sync": "reduce=False in all units",
    "set_requires_all_reduce": "all_reduce=False in all units",
    "set_reshard_after_forward": "reshard_after_forward=False in all units",
    "set_reshard_after_backward": "reshard_after_backward=False in all units",
}


def differing(rank: int, world: int, method: str, early: bool) -> str:
    """The ranks' settings differ, and differ from each one's earlier ones: every rank detects it locally."""
    model = Setting().wrap(seeded(Net), (Feedforward,))
    if not early:
        microbatch(model, rank, 0, 0)
        model.set_unshard_in_backward(rank == 0)
    getattr(model, method)(rank == 1)
    with pytest.raises(AgreementError) as caught:
        microbatch(model, rank, 1, 0)
    return str(caught.value)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("method", DIFFERENT)
def test_ranks_that_set_different_schedules_get_an_error(method: str, early: bool, pool2: Run) -> None:
    for text in pool2(differing, method, early):
        assert "rank 0" in text and "rank 1" in text
        assert (DIFFERENT[method].removesuffix(" in all units") if early else DIFFERENT[method]) in text
