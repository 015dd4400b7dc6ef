"""Other features of the wrapper on modules of fully_shard: they work, and give the numbers of the plain program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import distribute_tensor

import flatfsdp
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.fully_shard.test_beside_torchs import WORDS, Case, Net, differences, sharded
from tests.harness.front import TORCHS
from tests.harness.meshes import named_mesh

pytestmark = pytest.mark.distributed


def batches(rank: int, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(17 + rank)
    return list(torch.randint(0, WORDS, (count, 3, 4), generator=generator))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def plainly(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(rank):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def joined(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with flatfsdp.join(model) as joins:
        for batch in joins(batches(rank)):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def looked_at(model: nn.Module, rank: int) -> None:
    assert "norm, head" in str(flatfsdp.summary(model)) and flatfsdp.stats(model)
    model.keep_frozen_unsharded()  # type: ignore[operator]
    with flatfsdp.inference(model):
        model(batches(rank)[0])
    with flatfsdp.detect_nonfinite(model):
        plainly(model, rank)
    flatfsdp.check_replicas(model)


def fused(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    flatfsdp.fuse_optimizer_steps(optimizer)
    for batch in batches(rank):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_backward(model: nn.Module, rank: int) -> None:
    flatfsdp.optimizer_in_backward(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for batch in batches(rank):
        loss_of(model, batch).backward()


def gathered_ahead(model: Any, rank: int) -> None:
    one, two = model.blocks[:2]
    one.set_modules_to_forward_prefetch([two, model.norm])
    two.set_modules_to_backward_prefetch([one])
    handle = one.unshard(async_op=True)
    handle.wait()
    assert not hasattr(one.up.weight, "placements")
    one.reshard()
    assert hasattr(one.up.weight, "placements")
    plainly(model, rank)


PROGRAMS = {each.__name__: each for each in (joined, looked_at, fused, in_backward, gathered_ahead)}


def feature(rank: int, world: int, program: Callable[[nn.Module, int], None]) -> list[str]:
    torch.manual_seed(0)
    model = Net()
    one, two = (sharded(copy.deepcopy(model), flatfsdp, named_mesh(2), Case()) for _ in range(2))
    plainly(one, rank)
    program(two, rank)
    return differences(one, two)


@pytest.mark.parametrize("name", PROGRAMS)
def test_features(name: str, pool2: Run) -> None:
    assert pool2(feature, PROGRAMS[name]) == [[], []]


class Uneven(nn.Module):
    """Of some parameters the last ranks have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


def momenta(rank: int, world: int, fuses: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = flatfsdp.fully_shard(Uneven(), mesh=named_mesh(world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if fuses:
        flatfsdp.fuse_optimizer_steps(optimizer)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert list(map(id, optimizer.state)) == list(map(id, model.parameters()))
    options = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    return {name: state["momentum_buffer"] for name, state in states.items()}


def test_states_of_fused_steps_are_gathered_in_one_order(pool4: Run) -> None:
    """torch gathers them in the order of the optimizer's state, which may differ between ranks."""
    expected = pool4(momenta, False)[0]
    for found in pool4(momenta, True)[:1]:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=name)


# --- recurrent modules ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A module with a list of its weights and weak references to them, tied inside its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(6, 6, batch_first=True, num_layers=2), nn.GRU(6, 6, batch_first=True)
        self.gru.weight_hh_l0 = self.gru.weight_ih_l0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(x)[0])[0]


def to_empty(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    for module in (model.lstm, model.gru):
        module.reset_parameters()  # type: ignore[operator]


def assigned(model: nn.Module) -> None:
    torch.manual_seed(5)
    whole = Recurrent().state_dict()
    own = model.state_dict()
    state = {name: distribute_tensor(whole[name], own[name].device_mesh, own[name].placements) for name in own}
    model.load_state_dict(state, assign=True)


def loaded(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    whole = Recurrent().state_dict()
    for name, value in model.state_dict().items():
        value.copy_(distribute_tensor(whole[name], value.device_mesh, value.placements))


def recurrent(rank: int, world: int, api: str) -> list[Any]:
    """The losses of models that begin on the meta device, and, first, of one that does not."""
    found: list[Any] = []
    fully_shard = import_module(api).fully_shard
    for give_values in (None, loaded, assigned):
        with torch.device("meta" if give_values else "cpu"):
            torch.manual_seed(5)
            model = Recurrent()
        fully_shard(model.lstm)
        fully_shard(model)
        if give_values is not None:
            give_values(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            loss = model(torch.ones(2, 3, 6) * (rank + step + 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    with torch.device("meta"):
        model = Recurrent()
    fully_shard(model)
    to_empty(model)
    found.append(bool(model(torch.ones(2, 3, 6)).isfinite().all()))
    return found


def test_recurrent_modules_on_the_meta_device(pool2: Run) -> None:
    """As torch's do."""
    for found, torchs in zip(*(pool2(recurrent, api, timeout=60) for api in ("flatfsdp", TORCHS)), strict=True):
        assert found == torchs and found[0] == found[1] == found[2] and found[3]


def tied_outside(rank: int, world: int) -> str:
    with torch.device("meta"):
        model = nn.ModuleDict({"lstm": nn.LSTM(4, 4), "other": nn.Linear(4, 16, bias=False)})
    model.other.weight = model.lstm.weight_ih_l0
    flatfsdp.fully_shard(model.lstm)
    with pytest.raises(UsageError, match="tied to a parameter of another unit") as caught:
        flatfsdp.fully_shard(model.other)
    return str(caught.value)


def test_ties_to_recurrent_modules_are_found(pool2: Run) -> None:
    pool2(tied_outside)
