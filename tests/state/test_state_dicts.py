"""Communication for state dicts, and the part of a model that they hold unsharded at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from flatfsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from flatfsdp.engine.state.owned_interval import OwnedInterval
from flatfsdp.wrap import ModuleWrapPolicy
from tests.comm.test_communication import WORLDS, Block, Collectives, Tower
from tests.harness import inspect
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
as_type = FullyShardedDataParallel.state_dict_type


def tower(**options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(Tower(), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def padded_bytes(model: FullyShardedDataParallel) -> list[int]:
    return [4 * each.layout.padded_numel for each in inspect.flat_params(model)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("kind", [SHARDED, LOCAL])
def test_what_a_rank_owns_needs_no_communication(world: int, orig: bool, kind: StateDictType) -> None:
    with fake_world(world, rank=world - 1):
        model = tower(use_orig_params=orig)  # not even a forward has come before
        with as_type(model, kind), Collectives() as seen:
            state = model.state_dict()
            model.load_state_dict(state)
        assert not seen.counts
        memory = {value.local.untyped_storage().data_ptr(): value.local for value in state.values()}
        if kind is SHARDED:
            assert set(state) == set(Tower().state_dict())
        # One copy of each shard, independent of its references.
        assert sum(each.untyped_storage().nbytes() for each in memory.values()) == sum(padded_bytes(model)) // world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("orig", [True, False])
def test_whole_state_dicts_gather_each_unit_once_one_at_a_time(world: int, orig: bool) -> None:
    with fake_world(world, rank=world - 1):
        model = tower(use_orig_params=orig)
        model(torch.randn(3, 6)).sum().backward()
        sizes = padded_bytes(model)
        ledger = inspect.memory(model)
        for config in (FullStateDictConfig(), FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            ledger.reset_peaks()
            before = ledger.total
            with as_type(model, FULL, config), Collectives() as seen:
                state = model.state_dict()
            assert ledger.peak_total - before == max(sizes)
            assert ledger.total == before
            # Whether all ranks call it is settled by notes where a forward was expected, and by an exchange of three
            # numbers of each rank the first time that nothing was.
            compared = config.rank0_only
            gathers = len(sizes) + compared if world > 1 else 0
            assert +seen.counts == ({"gather": gathers} if gathers else {})
            assert seen.bytes["gather"] == (sum(sizes) + 24 * world * compared if gathers else 0)
            holds = world == 1 or not config.rank0_only
            assert {key: value.shape for key, value in state.items()} == (
                {key: value.shape for key, value in Tower().state_dict().items()} if holds else {}
            )
            storages = {value.untyped_storage().data_ptr() for value in state.values()}
            assert len(storages) == len(state)  # each value has memory of its own


class Story(TorchDispatchMode):
    """Gathers and copies to another place, in the order in which they are issued."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.calls += "G" if "allgather" in name else "c" if name == "aten::_to_copy" else ""
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("orig", [True, False])
def test_a_unit_has_left_the_device_before_the_next_is_gathered(orig: bool) -> None:
    with fake_world(8):
        model = tower(use_orig_params=orig)
        model(torch.randn(3, 6)).sum().backward()
        with as_type(model, FULL, FullStateDictConfig(offload_to_cpu=True)), Story() as story:
            model.state_dict()
        assert story.calls == "GccccGccccGccccGcccc"  # the layers of a unit, and their biases


def test_whole_values_are_loaded_without_communication() -> None:
    with fake_world(8, rank=3):
        model = tower()
        whole = Tower().state_dict()
        with Collectives() as seen:
            model.load_state_dict(whole)
        assert not seen.counts
        with as_type(model, SHARDED):
            state = model.state_dict()
        for name, value in state.items():
            assert isinstance(value, OwnedInterval)
            assert torch.equal(value.local, whole[name].flatten()[value.span.slice])


@pytest.mark.parametrize("world", [2, 64])
def test_the_first_rank_sends_each_other_its_shard(world: int) -> None:
    with fake_world(world):
        model = tower()
        model(torch.randn(3, 6)).sum().backward()
        sizes = padded_bytes(model)
        ledger = inspect.memory(model)
        with as_type(model, FULL, FullStateDictConfig(rank0_only=True)), Messages() as sent:
            model.load_state_dict(Tower().state_dict())
        assert sorted(sent.bytes) == sorted(size // world for size in sizes for _ in range(world - 1))
        assert ledger.peak("consolidated") == 0


class Messages(TorchDispatchMode):
    """Messages to single ranks inside the context: the bytes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._schema.name == "c10d::send":
            self.bytes.append(sum(tensor.numel() * tensor.element_size() for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def test_a_frozen_model_and_one_without_parameters() -> None:
    with fake_world(4):
        frozen = FullyShardedDataParallel(nn.Linear(3, 3).requires_grad_(False))
        assert list(frozen.state_dict()) == ["weight", "bias"]
        with pytest.warns(UserWarning, match="no unit of it has parameters"):
            assert list(FullyShardedDataParallel(nn.BatchNorm1d(3, affine=False)).state_dict()) == [
                "running_mean",
                "running_var",
                "num_batches_tracked",
            ]
    assert not dist.is_initialized()


class Lazy:
    """A value that is like a tensor and reads its elements when it is used, as Lightning's are."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value.to("meta"), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[each._value if isinstance(each, Lazy) else each for each in args], **(kwargs or {}))


def test_values_that_are_like_tensors_are_loaded() -> None:
    with fake_world(2):
        model = tower(use_orig_params=True)
        values = {name: torch.full_like(value, 3.0) for name, value in Tower().state_dict().items()}
        model.load_state_dict({name: Lazy(value) for name, value in values.items()})
        assert all(bool((parameter == 3).all()) for parameter in model.parameters())


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("rank0_only", [True, False])
def test_parameters_that_a_state_dict_has_in_their_own_place_stay(orig: bool, rank0_only: bool) -> None:
    """torch's set_model_state_dict() adds those not given to the dict: a frozen unit, and one next to others."""
    given: dict[str, Any] = {name: torch.full_like(value, 3.0) for name, value in Tower().state_dict().items()}
    given = {name: value for name, value in given.items() if not name.startswith("b.") and name != "inlet.weight"}
    with fake_world(4):
        net = Tower()
        net.b.requires_grad_(False)
        model = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=orig)
        with as_type(model, SHARDED):
            before = {name: value.local.clone() for name, value in model.state_dict().items()}
            options = StateDictOptions(
                full_state_dict=True, ignore_frozen_params=True, strict=False, cpu_offload=rank0_only
            )
            set_model_state_dict(model, given, options=options)
            for name, value in model.state_dict().items():
                assert torch.equal(value.local, given.get(name, before[name]).flatten()[: value.span.numel]), name
