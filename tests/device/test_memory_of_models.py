"""Memory of training processes, by torch's own allocator: the peak of a step as a sum, and nothing left after."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.wrap import ModuleWrapPolicy
from tests.harness import fresh, inspect
from tests.harness.memory import Recording

pytestmark = pytest.mark.process

MIB = 1024 * 1024
VOCABULARY, WIDTH, LENGTH = 2048, 512, 8
LAST = 8  # step


class Block(nn.Module):
    """Two layers of 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Model(nn.Module):
    """An embedding first and an untied head last, both in the root; four blocks between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def _model(strategy: str, prefetch: str | None) -> Any:
    torch.manual_seed(0)
    return FullyShardedDataParallel(
        Model(),
        sharding_strategy=strategy,
        **({} if prefetch == "default" else {"backward_prefetch": prefetch}),  # type: ignore[arg-type]
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
    )


def _step(model: Any, rank: int, step: int) -> None:
    tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(2 * step + rank))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


def measure(rank: int, world: int, strategy: str, prefetch: str | None) -> dict[str, float]:
    """Peaks in MiB over the memory live before the step, at steps 2 and LAST; and memory live between steps."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with Recording() as recording:
        model = _model(strategy, prefetch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(LAST + 1):
            if step in (2, LAST):
                recording.mark(f"before {step}")
            _step(model, rank, step)
            if step in (2, LAST):
                recording.mark(f"after {step}")
            optimizer.step()
            optimizer.zero_grad()
    usage = {step: recording.between(f"before {step}", f"after {step}") for step in (2, LAST)}
    return {
        "peak 2": (usage[2].peak - usage[2].start) / MIB,
        "peak later": (usage[LAST].peak - usage[LAST].start) / MIB,
        "left 2": (usage[2].end - usage[2].start) / MIB,
        "at rest 2": usage[2].start / MIB,
        "at rest later": usage[LAST].start / MIB,
    }


ROOT, BLOCK, BLOCKS = 2 * VOCABULARY * WIDTH * 4 / MIB, 2 * WIDTH * WIDTH * 4 / MIB, 4  # 8 MiB and 2 MiB


# The peak of a step: unsharded parameters (gradients that have come lie in their parameters' places), the gradient
# that has just arrived, and the shards of all reductions that were issued.
@pytest.mark.parametrize(
    ("strategy", "prefetch", "expected"),
    [
        # The root's last gradient, that of the embedding, arrives.
        ("FULL_SHARD", None, ROOT + ROOT / 2 + 4 * BLOCK / 2),
        # As without: never more than two whole blocks at once, since a reduction as large as a block's is waited for at
        # once where ranks share memory. No schedule needs less.
        ("FULL_SHARD", "default", ROOT + ROOT / 2 + 4 * BLOCK / 2),
        ("FULL_SHARD", "BACKWARD_MID", ROOT + ROOT / 2 + 4 * BLOCK / 2),
        # The root's first gradient, that of the head, arrives: all blocks are still unsharded.
        ("SHARD_GRAD_OP", "BACKWARD_PRE", ROOT + 4 * BLOCK + ROOT / 2),
    ],
)
def test_peak_of_a_step_is_a_stated_sum(strategy: str, prefetch: str | None, expected: float) -> None:
    for outcome in fresh.run(2, measure, strategy, prefetch, timeout=120):
        assert outcome.error is None, outcome.error
        found = outcome.result
        shards = (ROOT + BLOCKS * BLOCK) / 2
        assert found["at rest 2"] == pytest.approx(shards, abs=0.1)
        assert found["at rest later"] == pytest.approx(found["at rest 2"], abs=0.01)
        assert found["left 2"] == pytest.approx(shards, abs=0.1)  # the gradients
        for when in ("2", "later"):
            assert expected <= found[f"peak {when}"] <= expected + 0.25, found  # 0.25 for activations


class Gate(nn.Module):
    """A unit that is given two tensors of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.linear(x) * gate


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = gate(x, torch.sigmoid(x))
        return x


def activations(rank: int, world: int) -> list[int]:
    """Bytes alive after each of some steps, with the collector off."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = FullyShardedDataParallel(Gated(), auto_wrap_policy=ModuleWrapPolicy({Gate}), sync_module_states=True)
    gc.collect()
    gc.disable()
    with Recording() as recording:
        recording.mark("begin")
        for step in range(4):
            model(torch.ones(256, WIDTH, requires_grad=True)).sum().backward()
            recording.mark(f"{step}")
    return [recording.between("begin", f"{step}").end for step in range(4)]


def test_a_unit_with_several_inputs_keeps_no_activations() -> None:
    for outcome in fresh.run(2, activations, timeout=120):
        assert outcome.error is None, outcome.error
        first, *_, last = outcome.result
        assert last - first < 256 * WIDTH * 4, outcome.result  # one activation


def delete(rank: int, world: int, orig: bool) -> tuple[int, list[str]]:
    """Memory still alive of a trained model without references, with the collector off: bytes, and kinds of objects."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # torch keeps the frames around the first step of its first optimizer alive: those must not hold the model.
    warm = nn.Parameter(torch.zeros(1))
    warm.grad = torch.zeros(1)
    torch.optim.AdamW([warm]).step()
    gc.collect()
    gc.disable()
    with Recording() as recording:
        recording.mark("empty")
        watched = _train(rank, orig)
        recording.mark("deleted")
    usage = recording.between("empty", "deleted")
    return usage.end - usage.start, [type(it).__name__ for ref in watched if (it := ref()) is not None]


def _train(rank: int, orig: bool) -> list[weakref.ref[Any]]:
    """Train a model and let it go; weak references to its parts."""
    torch.manual_seed(0)
    module = Model()
    model = FullyShardedDataParallel(module, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=orig)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        _step(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    _step(model, rank, 3)
    parts = [weakref.ref(each) for each in (module, model, *model.parameters())]
    return parts + inspect.parts(model)


@pytest.mark.parametrize("orig", [True, False])
def test_deleting_a_model_frees_it_without_the_collector(orig: bool) -> None:
    for outcome in fresh.run(2, delete, orig, timeout=120):
        assert outcome.error is None, outcome.error
        left, alive = outcome.result
        assert alive == []
        assert left < 64 * 1024, f"{left} bytes are left"
