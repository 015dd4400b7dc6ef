"""Parameters and other tensors over the same memory: ties that are followed, overlaps that are refused, and disjoint
parts, which are independent."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import spectral_norm

from flatfsdp import FullyShardedDataParallel, fully_shard
from flatfsdp.errors import UsageError
from tests.harness.fake import fake_world
from tests.harness.gather_hooks import AsBfloat16
from tests.harness.three_fronts import FRONTS, sharded

pytestmark = pytest.mark.single_process


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.d = (nn.Linear(6, 6, bias=False) for _ in range(2))
        self.o = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.o(torch.tanh(self.d(torch.tanh(self.e(x)))))


def by_data(net: Two) -> None:
    net.d.weight.data = net.e.weight.data


def by_views_of_one_storage(net: Two) -> None:
    net.d.weight = nn.Parameter(net.e.weight.data.view(6, 6))


def by_numpy(net: Two) -> None:
    net.d.weight = nn.Parameter(torch.from_numpy(net.e.weight.detach().numpy()))


def of_recurrent(net: Two) -> None:
    """A module with its weights in a list, too."""
    net.e, net.d = nn.RNN(6, 6), nn.RNN(6, 6)  # type: ignore[assignment]
    net.d.weight_hh_l0.data = net.e.weight_hh_l0.data  # type: ignore[union-attr]


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("alias", [by_data, by_views_of_one_storage, by_numpy, of_recurrent])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_same_whole_tensor_is_followed_as_a_tie(alias: Callable[[Two], None], front: str, device: str) -> None:
    if device == "meta" and alias is by_numpy:
        pytest.skip("there is no memory")
    with torch.device(device), fake_world(2):
        net, tied = Two(), Two()
        alias(net)
        alias(tied)
        if alias is of_recurrent:
            tied.d.weight_hh_l0 = tied.e.weight_hh_l0  # type: ignore[assignment]
        else:
            tied.d.weight = tied.e.weight
        shapes = []
        for each in (net, tied):
            model = sharded(front, each)
            if front != "fully_shard":
                with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                    found = [(name, parameter.shape) for name, parameter in model.named_parameters()]
            else:
                found = [(name, parameter.shape) for name, parameter in model.named_parameters()]
            shapes.append(found)
    assert shapes[0] == shapes[1]


def transposed(net: Two) -> None:
    net.d.weight = nn.Parameter(net.e.weight.data.t())


def overlapping(net: Two) -> None:
    w = torch.randn(9, 6)
    net.e.weight, net.d.weight = nn.Parameter(w[:6]), nn.Parameter(w[3:])


def overlapping_columns(net: Two) -> None:
    w = torch.randn(6, 11)
    net.e.weight, net.d.weight = nn.Parameter(w[:, :6]), nn.Parameter(w[:, 5:])


def part_of_another(net: Two) -> None:
    net.e.bias = nn.Parameter(net.e.weight.data[2])


def of_another_dtype(net: Two) -> None:
    net.d.weight = nn.Parameter(net.e.weight.data.view(torch.int32), requires_grad=False)


def frozen_beside_trained(net: Two) -> None:
    by_data(net)
    net.d.weight.requires_grad_(False)


def with_other_marks(net: Two) -> None:
    by_data(net)
    net.d.weight.no_decay = True  # type: ignore[attr-defined]


def with_a_hook(net: Two) -> None:
    by_data(net)
    net.d.weight.register_hook(lambda grad: grad)


def a_buffer(net: Two) -> None:
    net.e.register_buffer("copy", net.e.weight.data)


def a_buffer_of_a_part(net: Two) -> None:
    net.register_buffer("first", net.e.weight.data[0], persistent=False)


def an_attribute(net: Two) -> None:
    net.kept = net.e.weight.data  # type: ignore[assignment]


def an_attribute_with_a_graph(net: Two) -> None:
    net.kept = net.e.weight.view(-1)  # type: ignore[assignment]


REFUSED = {
    transposed: "different tensors",
    overlapping: "different tensors",
    overlapping_columns: "different tensors",
    part_of_another: "different tensors",
    of_another_dtype: "different tensors",
    frozen_beside_trained: "requires_grad",
    with_other_marks: "attributes differ",
    with_a_hook: "hooks",
    a_buffer: "a buffer",
    a_buffer_of_a_part: "a buffer",
    an_attribute: "an attribute",
    an_attribute_with_a_graph: "an attribute",
}


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("alias", REFUSED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_overlaps_are_refused_with_names(alias: Callable[[Two], None], front: str, device: str) -> None:
    with torch.device(device), fake_world(2):
        net = Two()
        alias(net)
        before = {name: id(parameter) for name, parameter in net.named_parameters()}
        with pytest.raises(UsageError, match=REFUSED[alias]) as caught:
            sharded(front, net)
        assert "'e.weight'" in str(caught.value) and "clone()" in str(caught.value)
        assert {name: id(parameter) for name, parameter in net.named_parameters()} == before


def rows(net: Two) -> None:
    w = torch.randn(12, 6)
    net.e.weight, net.d.weight = nn.Parameter(w[:6]), nn.Parameter(w[6:])


def columns(net: Two) -> None:
    w = torch.randn(6, 12)
    net.e.weight, net.d.weight = nn.Parameter(w[:, :6]), nn.Parameter(w[:, 6:])


def every_other_row(net: Two) -> None:
    w = torch.randn(12, 6)
    net.e.weight, net.d.weight = nn.Parameter(w[::2]), nn.Parameter(w[1::2])


def columns_of_two_dtypes(net: Two) -> None:
    w = torch.randn(6, 12)
    net.e.weight = nn.Parameter(w[:, :6])
    net.d.weight = nn.Parameter(w.view(torch.bfloat16)[:, 12:18])


def a_buffer_of_the_rest(net: Two) -> None:
    w = torch.randn(7, 6)
    net.e.weight = nn.Parameter(w[:6])
    net.e.register_buffer("rest", w[6])


def spectral(net: Two) -> None:
    spectral_norm(net.d)


def an_empty_one(net: Two) -> None:
    net.none = nn.Parameter(net.e.weight.data[:0])


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize(
    "parts", [rows, columns, every_other_row, columns_of_two_dtypes, a_buffer_of_the_rest, spectral, an_empty_one]
)
def test_disjoint_parts_of_one_storage_are_independent(parts: Callable[[Two], None], front: str) -> None:
    with fake_world(2):
        net = Two()
        parts(net)
        sharded(front, net)


def test_ignored_parameters_are_not_separated() -> None:
    with fake_world(2):
        net = Two()
        by_data(net)
        with pytest.raises(UsageError, match="ignore both"):
            FullyShardedDataParallel(net, ignored_states=[net.d.weight])
        FullyShardedDataParallel(net, ignored_modules=[net.e, net.d])


class Around(nn.Module):
    """Two blocks, each of which becomes a unit, and a head, whose weights can share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.second(self.first(x)))


def test_a_nested_unit_is_seen_by_the_unit_around_it() -> None:
    with fake_world(2):
        net = Around()
        net.head.weight.data = net.first.weight.data
        net.first = FullyShardedDataParallel(net.first)  # type: ignore[assignment]
        gc.collect()
        model = FullyShardedDataParallel(net, use_orig_params=True)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            assert net.head.weight is net.first.weight
            assert len(list(model.parameters())) == 2

        net = Around()
        net.head.weight = nn.Parameter(net.first.weight.data.t())
        net.first = FullyShardedDataParallel(net.first)  # type: ignore[assignment]
        with pytest.raises(UsageError, match="of a unit inside"):
            FullyShardedDataParallel(net)

        net = Around()
        net.head.weight.data = net.first.weight.data
        fully_shard(net.first)
        with pytest.raises(UsageError, match="in one call, as a list"):
            fully_shard(net)


@pytest.mark.parametrize("front", FRONTS)
def test_units_side_by_side_are_seen_by_the_unit_around_both(front: str) -> None:
    with fake_world(2):
        net = Around()
        net.second.weight.data = net.first.weight.data
        net.first = sharded(front, net.first)  # type: ignore[assignment]
        net.second = sharded(front, net.second)  # type: ignore[assignment]
        with pytest.raises(UsageError, match="were different parameters in the same memory"):
            sharded(front, net)


def test_models_of_their_own_may_come_from_the_same_memory() -> None:
    """As two models that were loaded from one file by assignment."""
    with fake_world(2):
        one, other = Around(), Around()
        state = one.state_dict()
        other.load_state_dict(state, assign=True)
        models = [FullyShardedDataParallel(each, use_orig_params=True) for each in (one, other)]
        with torch.no_grad():
            next(models[0].parameters()).zero_()
        assert next(models[1].parameters()).any()
        del models


def test_units_that_a_policy_chooses_are_tied() -> None:
    with fake_world(2):
        net = Around()
        net.second.weight.data = net.first.weight.data
        model = FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear}, use_orig_params=True)
        assert len(list(model.parameters())) == 2
        twin = copy.deepcopy(model)
        assert len(list(twin.parameters())) == 2

        net = Around()
        net.second.weight = nn.Parameter(net.first.weight.data.t())
        with pytest.raises(UsageError, match=r"'first.weight' and 'second.weight'"):
            FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear})
        assert type(net.first) is nn.Linear


@pytest.mark.parametrize("front", ["original", "fully_shard"])
def test_packed_weights(front: str) -> None:
    """bitsandbytes' parameters are bytes with a state."""

    class Packed(nn.Parameter):
        quant_state: Any = None

    def packed(data: Tensor, state: object) -> nn.Parameter:
        made = torch.Tensor._make_subclass(Packed, data)
        made.quant_state = state
        return made

    with fake_world(2):
        data, state = torch.arange(36, dtype=torch.uint8).view(36, 1), object()
        net = Two()
        net.e.weight, net.d.weight = packed(data, state), packed(data, state)
        sharded(front, net)
        assert net.e.weight is net.d.weight

        net = Two()
        net.e.weight, net.d.weight = packed(data, object()), packed(data, object())
        with pytest.raises(UsageError, match="attributes differ"):
            sharded(front, net)


def test_distributed_tensors() -> None:
    """Of tensor parallelism: one local tensor in two DTensors."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def split(local: Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(dim)], run_check=False))

        local = torch.randn(3, 6)
        net = Two()
        net.e.weight, net.d.weight = split(local, 0), split(local, 0)
        sharded("fully_shard", net, mesh=mesh["dp"])
        assert net.e.weight is net.d.weight

        net = Two()
        net.e.weight, net.d.weight = split(local, 0), split(local, 1)
        with pytest.raises(UsageError, match="distributed differently"):
            sharded("fully_shard", net, mesh=mesh["dp"])

        net = Two()
        net.e.weight, net.d.weight = split(local[:, :3], 0), split(local[:, 3:], 0)
        sharded("fully_shard", net, mesh=mesh["dp"])
        assert net.e.weight is not net.d.weight

        net = Two()
        net.e.weight, net.d.weight = split(local[:2], 0), split(local[1:], 0)
        with pytest.raises(UsageError, match="different tensors"):
            sharded("fully_shard", net, mesh=mesh["dp"])


def test_tensors_made_of_others() -> None:
    """Subclasses of tensors are compared by the tensors inside."""
    front = "fully_shard"
    with fake_world(2):
        whole = torch.randn(9, 6)
        net = Two()
        net.e.weight, net.d.weight = (nn.Parameter(AsBfloat16(whole[:6])) for _ in range(2))
        sharded(front, net)
        assert net.e.weight is net.d.weight

        net = Two()
        net.e.weight, net.d.weight = nn.Parameter(AsBfloat16(whole[:6])), nn.Parameter(whole[:6])
        with pytest.raises(UsageError, match=r"'e.weight' and 'd.weight'"):
            sharded(front, net)

        net = Two()
        net.e.weight, net.d.weight = nn.Parameter(AsBfloat16(whole[:6])), nn.Parameter(AsBfloat16(whole[3:]))
        with pytest.raises(UsageError, match="different tensors"):
            sharded(front, net)
