"""Low-bit optimizers, torchao's, bitsandbytes' and some like them, on shards: states of one process to the bit, on any
number of ranks, saved by name."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision, StateDictType, checkpoint, fully_shard
from flatfsdp.errors import ConfigTypeError, UsageError
from flatfsdp.layout import Elements, Rows, for_optimizer, state_blocks
from tests.conftest import Run
from tests.features.test_matrix_steps import unsynced
from tests.harness.corners import seeded
from tests.harness.gradients import plain
from tests.harness.low_bit import AdamOf8Bits, LowBitAdam, Quantized
from tests.harness.meshes import named_mesh, replicas_of_shards
from tests.harness.thorough import is_thorough, spread

pytestmark = pytest.mark.distributed

STEPS = 5 if is_thorough() else 3
NAMES = "exp_avg", "exp_avg_sq"
FP8 = "_float8_e4m3fn"
HAS_TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
KINDS = ["LowBitAdam", *(pytest.param(each, marks=HAS_TORCHAO) for each in ("AdamW8bit", "AdamW4bit", "AdamWFp8"))]
HAS_BITSANDBYTES = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
# Names of bitsandbytes' classes have its name before them.
ADAMS, LION = ["AdamOf8Bits", pytest.param("bnb.AdamW8bit", marks=HAS_BITSANDBYTES)], "bnb.Lion8bit"
EIGHT_BITS = ["LowBitAdam", pytest.param("AdamW8bit", marks=HAS_TORCHAO)]


class Net(nn.Module):
    """Parameters of which a whole one is quantized and its part on four ranks would not be, of one whose part would be
    and the whole not, and of few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 192)  # 6,144 elements
        self.odd = nn.Linear(192, 65)  # 12,480, of which no blocks of 256 or 128
        self.down = nn.Linear(65, 32)
        self.wide = nn.Parameter(torch.randn(64, 256))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.odd(torch.relu(self.up(x))))) + x @ self.wide[:32, :32]
        return y.square().mean() + (self.wide * torch.linspace(-1, 1, 256)).square().mean()


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """torchao compiles its steps, which takes a minute for each shape."""
    compiling = torch.compile
    torch.compile = lambda function, **options: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiling


def make(kind: str, parameters: Any) -> Any:
    if kind in ("LowBitAdam", "AdamOf8Bits"):
        return (LowBitAdam if kind == "LowBitAdam" else AdamOf8Bits)(parameters, lr=0.05)
    if kind.startswith("bnb."):
        import bitsandbytes.optim

        return getattr(bitsandbytes.optim, kind.removeprefix("bnb."))(parameters, lr=0.05)
    import torchao.optim

    return getattr(torchao.optim, kind)(parameters, lr=0.05)


def blocks(kind: str) -> int:
    return 128 if "4bit" in kind else 256


def layout_of(kind: str) -> Any:
    of_bitsandbytes = kind == "AdamOf8Bits" or kind.startswith("bnb.")
    return for_optimizer(AdamOf8Bits) if of_bitsandbytes else state_blocks(blocks(kind))


def wrapped(front: str, kind: str, net: nn.Module, **settings: Any) -> Any:
    if front == "fully_shard":
        if "mesh" in settings:
            settings["mesh"] = named_mesh(*settings["mesh"])
        return fully_shard(net, layout=state_blocks(blocks(kind)), **settings)
    if settings.get("sharding_strategy") == "HYBRID_SHARD":
        settings["device_mesh"] = replicas_of_shards()
    return FullyShardedDataParallel(net, layout=layout_of(kind), use_orig_params=True, **settings)


def wholes(model: Any, value: str) -> dict[str, Tensor]:
    """Full parameters, or gradients, by name. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=value == "grad"):
            named = {plain(name): each if value == "data" else each.grad for name, each in model.named_parameters()}
            return {name: each.detach().clone() for name, each in named.items() if each is not None}
    named = {name: each if value == "data" else each.grad for name, each in model.named_parameters()}
    return {name: each.full_tensor().detach().clone() for name, each in named.items()}


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * number + rank))


def states(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        found = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return {f"{plain(name)}.{key}": value for name, each in found.items() for key, value in each.items()}


def of_one(optimizer: Any, named: dict[str, nn.Parameter]) -> dict[str, Any]:
    """The states of one process, as they are by name."""
    found: dict[str, Any] = {}
    for name, parameter in named.items():
        for key, value in optimizer.state[parameter].items():
            number = key[-1]
            if "absmax1" in optimizer.state[parameter] and key != "step":
                if not key.startswith("qmap"):
                    found[f"{name}.state{number}.{'codes' if key.startswith('state') else 'scales'}"] = value
                continue
            if not hasattr(value, "codes"):
                found[f"{name}.{key}"] = value
                continue
            codes = value.codes.reshape(-1).view(torch.uint8)
            if 2 * codes.numel() == value.numel():
                codes = torch.stack([codes >> 4, codes & 15], -1).reshape(-1)
            form = "_4bit" if value.codes.numel() < value.numel() else "" if value.codes.dtype == torch.uint8 else FP8
            found[f"{name}.{key}.codes{form}"] = codes.view(value.shape)
            found[f"{name}.{key}.scales"] = value.scale
    return found


def unlike(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    pairs = {name: map(torch.as_tensor, (value, expected[name])) for name, value in found.items()}
    return [name for name, (one, other) in pairs.items() if not torch.equal(one, other)]


def trained(
    rank: int, world: int, front: str, kind: str, clip: bool = False, accumulate: bool = False, **settings: Any
) -> list[str]:
    """The differences to one process with the same gradients."""
    with eager():
        alone = seeded(Net)
        reference = make(kind, alone.parameters())
        model = wrapped(front, kind, seeded(Net), **settings)
        optimizer = flatfsdp.block_states(make(kind, model.parameters()))
        for number in range(STEPS):
            if accumulate:
                with unsynced(model):
                    model(batch(rank, number + 10)).backward()
            model(batch(rank, number)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            gradients = wholes(model, "grad")
            for name, parameter in alone.named_parameters():
                parameter.grad = gradients[name]
            reference.step()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                states(model, optimizer)  # a step puts together what a state dict has divided
        named = dict(alone.named_parameters())
        found = unlike(wholes(model, "data"), {name: each.detach() for name, each in named.items()})
        return found + unlike(states(model, optimizer), of_one(reference, named))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("front", "world"), spread(["wrapper", "fully_shard"], [3, 4, 4, 1, 2]))
def test_states_are_those_of_one_process(front: str, world: int, kind: str, run: Run) -> None:
    settings = {"clip": world != 4, "accumulate": world > 2}
    assert [line for each in run(world, trained, front, kind, **settings) for line in each] == []


@pytest.mark.parametrize("kind", [*ADAMS, pytest.param(LION, marks=HAS_BITSANDBYTES)])
@pytest.mark.parametrize("world", [3, 4, 1])
def test_states_of_bitsandbytes_are_those_of_one_process(world: int, kind: str, run: Run) -> None:
    settings = {"clip": world != 4, "accumulate": world > 2}
    assert [line for each in run(world, trained, "wrapper", kind, **settings) for line in each] == []


SETTINGS: list[dict[str, Any]] = [
    {"sharding_strategy": "SHARD_GRAD_OP", "clip": True, "accumulate": True},
    {"sharding_strategy": "NO_SHARD"},
    {"sharding_strategy": "HYBRID_SHARD"},
    {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    {"reshard_after_forward": False, "accumulate": True},
    {"mesh": (2, 2), "clip": True},
]


@pytest.mark.parametrize("kind", EIGHT_BITS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_states_are_those_of_one_process_under_other_settings(settings: dict[str, Any], kind: str, run: Run) -> None:
    front = "fully_shard" if {"mesh", "reshard_after_forward"} & settings.keys() else "wrapper"
    assert [line for each in run(4, trained, front, kind, **settings) for line in each] == []


@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_states_of_bitsandbytes_are_those_of_one_process_under_other_settings(
    settings: dict[str, Any], kind: str, run: Run
) -> None:
    assert [line for each in run(4, trained, "wrapper", kind, **settings) for line in each] == []


def in_backward(rank: int, world: int, kind: str) -> list[str]:
    """The differences of steps in the backward to steps after it."""
    with eager():
        found = []
        for early in (False, True):
            model = wrapped("wrapper", kind, seeded(Net))
            optimizer = flatfsdp.block_states(make(kind, model.parameters()))
            if early:
                flatfsdp.optimizer_in_backward(model, optimizer)
            for number in range(STEPS):
                model(batch(rank, number)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append({**wholes(model, "data"), **states(model, optimizer)})
        return unlike(*found)


@pytest.mark.parametrize("kind", [*EIGHT_BITS, *ADAMS])
def test_steps_in_the_backward(kind: str, pool2: Run) -> None:
    assert pool2(in_backward, kind) == [[], []]


def in_groups(rank: int, world: int) -> list[str]:
    """The differences of steps in the backward to steps after it, where units have parameters of some groups only; of
    groups with settings of single parameters what the first step says."""
    found = []
    for early in (False, True):
        model = wrapped("wrapper", "AdamOf8Bits", seeded(Net), auto_wrap_policy={nn.Linear})
        odd = [*model.odd.parameters()]
        others = [each for each in model.parameters() if all(each is not one for one in odd)]
        optimizer = AdamOf8Bits([{"params": others}, {"params": odd, "lr": 0.01}], lr=0.05)
        flatfsdp.block_states(optimizer)
        if early:
            flatfsdp.optimizer_in_backward(model, optimizer)
        stepped(model, optimizer, rank, range(3))
        found.append({**wholes(model, "data"), **states(model, optimizer)})
    optimizer.mng.index2config[(0, 0)] = {"optim_bits": 32}
    with pytest.raises(UsageError, match="by their places in its groups"):
        model(batch(rank, 0)).backward()
    return unlike(*found)


def test_steps_in_the_backward_on_some_groups(pool2: Run) -> None:
    assert pool2(in_groups) == [[], []]


def of_rank_0(rank: int, world: int) -> str:
    """What it says if states of rank 0 are loaded on all ranks; those of the same rank are."""
    model = wrapped("wrapper", "AdamOf8Bits", seeded(lambda: nn.Linear(64, 128, bias=False)))
    optimizer = flatfsdp.block_states(AdamOf8Bits(model.parameters(), lr=0.05))
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    own = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(own)
    box = [own]
    torch.distributed.broadcast_object_list(box, src=0)
    if rank == 0:
        return ""
    with pytest.raises(UsageError) as caught:
        optimizer.load_state_dict(box[0])
    return str(caught.value)


def test_states_of_rank_0_are_refused_on_others(pool2: Run) -> None:
    assert "holds shard 0 of 2, this optimizer steps on shard 1 of 2" in pool2(of_rank_0)[1]


def of_full_precision(rank: int, world: int, kind: str) -> None:
    model = wrapped("wrapper", kind, seeded(Net))
    optimizer = flatfsdp.block_states(make(kind, model.parameters()))
    stepped(model, optimizer, rank, range(1))
    plain_ones = copy.deepcopy(optimizer.state_dict())
    for number, parameter in enumerate(model.parameters()):
        if number in plain_ones["state"]:
            names = ("state1", "state2") if kind == "AdamOf8Bits" else NAMES
            plain_ones["state"][number] = {"step": 1, **{name: torch.zeros_like(parameter) for name in names}}
    with pytest.raises(UsageError, match=r"is not quantized, and this .* would step in full precision"):
        optimizer.load_state_dict(plain_ones)
    if kind == "AdamOf8Bits":
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            other = flatfsdp.block_states(AdamOf8Bits(model.parameters(), lr=0.05, min_8bit_size=2**20))
            mine = FullyShardedDataParallel.optim_state_dict_to_load(model, other, saved)
        with pytest.raises(UsageError, match="are of another low-bit optimizer"):
            other.load_state_dict(mine)


@pytest.mark.parametrize("kind", ["LowBitAdam", "AdamOf8Bits"])
def test_states_of_another_precision_are_refused(kind: str, pool2: Run) -> None:
    pool2(of_full_precision, kind)


def stepped(model: Any, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
    for number in numbers:
        model(batch(0, number)).backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(rank: int, world: int, path: str, kind: str, front: str) -> dict[str, Any]:
    with eager():
        model = wrapped(front, kind, seeded(Net))
        optimizer = flatfsdp.block_states(make(kind, model.parameters()))
        before = states(model, optimizer)
        assert all(not torch.as_tensor(value).any() for value in before.values())
        stepped(model, optimizer, rank, range(2))
        assert before.keys() == states(model, optimizer).keys()
        checkpoint.save(path, model=model, optimizer=optimizer)
        return states(model, optimizer)


def loaded(rank: int, world: int, path: str, kind: str, layout: Any) -> tuple[dict[str, Any], list[str]]:
    """The states as loaded; and differences of the next step to that of one process that has loaded the same."""
    with eager():
        model = FullyShardedDataParallel(seeded(Net), layout=layout, use_orig_params=True)
        optimizer = flatfsdp.block_states(make(kind, model.parameters()))
        stepped(model, optimizer, rank, range(1))
        checkpoint.load(path, model=model, optimizer=optimizer)
        found = states(model, optimizer)
        again = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(again)
        assert unlike(states(model, optimizer), found) == []
        values = wholes(model, "data")
        stepped(model, optimizer, rank, range(5, 6))
        later = {**wholes(model, "data"), **states(model, optimizer)}
        alone = FullyShardedDataParallel(seeded(Net), use_orig_params=True, sharding_strategy="NO_SHARD")
        reference = flatfsdp.block_states(make(kind, alone.parameters()))
        checkpoint.load(path, model=alone, optimizer=reference)
        assert unlike(wholes(alone, "data"), values) == []
        stepped(alone, reference, rank, range(5, 6))
        expected = {**wholes(alone, "data"), **states(alone, reference)}
        return found, [
            n for n, v in later.items() if not torch.allclose(*(torch.as_tensor(x).float() for x in (v, expected[n])))
        ]


@pytest.mark.parametrize(
    ("front", "kind"),
    [
        ("wrapper", "LowBitAdam"),
        ("fully_shard", "LowBitAdam"),
        ("wrapper", "AdamOf8Bits"),
        pytest.param("wrapper", "bnb.AdamW8bit", marks=HAS_BITSANDBYTES),
        pytest.param("wrapper", "AdamW8bit", marks=HAS_TORCHAO),
        pytest.param("wrapper", "AdamW4bit", marks=HAS_TORCHAO),
        pytest.param("fully_shard", "AdamWFp8", marks=HAS_TORCHAO),
    ],
)
def test_states_are_saved_by_name_and_loaded_on_other_ranks(front: str, kind: str, tmp_path: Path, run: Run) -> None:
    before = run(4, saved, str(tmp_path / "x"), kind, front)[0]
    other = {"up.weight": Elements(1024), "odd.weight": Elements(256), "wide": Rows(1 if blocks(kind) == 256 else 2)}
    for found, different in run(3, loaded, str(tmp_path / "x"), kind, other):
        assert unlike(found, before) == []
        assert different == []


class OtherCodes(LowBitAdam):
    """One whose codes are numbers of 8 bits."""

    @staticmethod
    def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Tensor:
        codes = torch.zeros(p.shape, dtype=torch.float8_e4m3fn)
        return Quantized(codes, torch.zeros(p.numel() // block_size), p.dtype)


def of_others(rank: int, world: int) -> list[str]:
    """What loads of the states of other low-bit optimizers say."""
    model = wrapped("wrapper", "LowBitAdam", seeded(Net))
    optimizer = flatfsdp.block_states(LowBitAdam(model.parameters()))
    stepped(model, optimizer, rank, range(1))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        found = []
        for cls, settings in ((OtherCodes, {}), (LowBitAdam, {"block_size": 128})):
            other = flatfsdp.block_states(cls(model.parameters(), **settings))
            mine = FullyShardedDataParallel.optim_state_dict_to_load(model, other, copy.deepcopy(saved))
            with pytest.raises(UsageError) as caught:
                other.load_state_dict(mine)
            found.append(str(caught.value))
    return found


def test_states_of_another_low_bit_optimizer_are_refused_in_words(pool2: Run) -> None:
    for codes, blocks in pool2(of_others):
        assert "this OtherCodes has exp_avg.codes_float8_e4m3fn and" in codes
        assert re.search(r"with (24|64) scales are of another low-bit.* and (48|128) scales, for blocks of 128", blocks)


def of_another_rank(rank: int, world: int) -> str:
    """What a step says with the states of the other rank, which has other elements."""
    model = wrapped("wrapper", "LowBitAdam", seeded(Net))
    optimizer = flatfsdp.block_states(LowBitAdam(model.parameters()))
    stepped(model, optimizer, rank, range(1))
    saved: list[Any] = [None, None]
    torch.distributed.all_gather_object(saved, [each.numel() for each in model.parameters()])
    mine = optimizer.state_dict()
    for number, numel in enumerate(saved[1 - rank]):
        if number in mine["state"]:
            zeros = LowBitAdam._subclass_zeros(torch.zeros(numel), True, 256)
            mine["state"][number] = {"step": torch.tensor(1.0), **dict.fromkeys(NAMES, zeros)}
    optimizer.load_state_dict(mine)
    model(batch(0, 0)).backward()
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return str(caught.value)


def test_states_of_another_ranks_elements_are_refused(pool2: Run) -> None:
    for text in pool2(of_another_rank):
        assert "from before wrapping, or of another rank: 'exp_avg' of parameter" in text


def refused(rank: int, world: int, kind: str) -> None:
    with eager():
        model = FullyShardedDataParallel(seeded(Net), use_orig_params=True)
        with pytest.raises(UsageError, match=r"is cut after .* inside of a block of 256 .*state_blocks\(256"):
            flatfsdp.block_states(make(kind, model.parameters()))
        model(batch(rank, 0)).backward()
        optimizer = make(kind, model.parameters())
        name = kind.removeprefix("bnb.")
        if kind not in ("LowBitAdam", "AdamOf8Bits"):
            with pytest.raises(UsageError, match=rf"{name} looks at blocks of states.*block_states\(optimizer\)"):
                optimizer.step()
        with pytest.raises(ConfigTypeError, match="a low-bit Adam or AdamW of torchao"):
            flatfsdp.block_states(torch.optim.AdamW(model.parameters()))
        optimizer = flatfsdp.block_states(make(kind, wrapped("wrapper", kind, Net()).parameters()))
        with pytest.raises(UsageError, match=f"it was called for this {name} before"):
            flatfsdp.block_states(optimizer)
        replicas = FullyShardedDataParallel(Net().bfloat16(), use_orig_params=True, sharding_strategy="NO_SHARD")
        rounding: Any = make(kind, replicas.parameters())
        rounding.bf16_stochastic_round = True
        with pytest.raises(
            UsageError, match=r"each rank rounds .* but 3 ranks have the same elements of it, and would"
        ):
            flatfsdp.block_states(rounding)
        if kind in ("AdamOf8Bits", "bnb.AdamW8bit"):
            distributed = fully_shard(seeded(Net))
            with pytest.raises(UsageError, match="is a DTensor, which bitsandbytes' kernels do not take"):
                flatfsdp.block_states(make(kind, distributed.parameters()))
            optimizer = make(kind, model.parameters())
            optimizer.optimizer_name = "lamb"
            with pytest.raises(ConfigTypeError, match=r"8-bit one of bitsandbytes.*other than LAMB, LARS"):
                flatfsdp.block_states(optimizer)
        flat = FullyShardedDataParallel(Net())
        with pytest.raises(UsageError, match="holds a flat parameter"):
            flatfsdp.block_states(make(kind, flat.parameters()))


@pytest.mark.parametrize("kind", [*EIGHT_BITS, *ADAMS])
def test_cuts_inside_of_blocks_are_refused_in_words(kind: str, pool3: Run) -> None:
    pool3(refused, kind)


def compiled(rank: int, world: int) -> list[str]:
    """The differences of torchao's compiled steps to those of one process."""
    with contextlib.nullcontext():
        alone, whole = seeded(lambda: nn.Linear(64, 128, bias=False)), seeded(lambda: nn.Linear(64, 128, bias=False))
        model = FullyShardedDataParallel(whole, layout=state_blocks(), use_orig_params=True)
        optimizer = flatfsdp.block_states(make("AdamW8bit", model.parameters()))
        reference = make("AdamW8bit", alone.parameters())
        for number in range(2):
            model(torch.randn(4, 64, generator=torch.Generator().manual_seed(number))).square().mean().backward()
            alone.weight.grad = wholes(model, "grad")["weight"]
            reference.step()
            optimizer.step()
            optimizer.zero_grad()
        found = unlike(wholes(model, "data"), {"weight": alone.weight.detach()})
        return found + unlike(states(model, optimizer), of_one(reference, {"weight": alone.weight}))


@HAS_TORCHAO
def test_compiled_steps_have_the_states_of_one_process(pool2: Run) -> None:
    assert pool2(compiled, timeout=400) == [[], []]
