"""Parameters with grains in any world: how grains are given, where each parameter is cut, and what users see of it."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import MixedPrecision, StateDictType
from flatfsdp.errors import ConfigTypeError, ConfigValueError, FlatFSDPWarning, UsageError
from flatfsdp.layout import Blocks, Elements, Grain, PlannedLayout, Preferred, Rows, Whole, declared, for_optimizer
from flatfsdp.wrap import CustomPolicy
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.low_bit import LowBitAdam

pytestmark = pytest.mark.single_process


class Net(nn.Module):
    """Parameters of many shapes, also frozen, tied, in another memory order, and without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2))
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.randn(8, 3), requires_grad=False)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        for block in self.blocks:
            y = y + block(y)
        return self.head(y).sum() + self.conv(torch.ones(1, 3, 4, 4)).sum() + self.frozen.sum() + self.nothing.sum()


GRAINS: dict[str, Grain] = {
    "embedding.weight": Rows(2),
    "blocks.0": Whole(padding=inf),  # much: the model is small
    "blocks.1.0.weight": Blocks(3),
    "conv.weight": Rows(),
    "frozen": Elements(5),
    "nothing": Whole(padding=inf),
}
EXPECTED = {
    "embedding.weight": 12,
    "blocks.0.0.weight": 60,
    "blocks.0.0.bias": 10,
    "blocks.0.2.weight": 60,
    "blocks.0.2.bias": 6,
    "blocks.1.0.weight": 18,
    "conv.weight": 12,
    "frozen": 5,
}


def wrapped(layout: Any = GRAINS, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "layout: of a unit", FlatFSDPWarning)
        return FSDP(Net(), layout=layout, **({"use_orig_params": True} | more))


def grains_of(model: nn.Module) -> dict[str, int]:
    """Those of more than an element, by name."""
    return {
        f"{path}.{spec.name}" if path else spec.name: grain
        for path, module in model.named_modules()
        if isinstance(module, FSDP)
        for flat in inspect.unit(module).flat_params
        if isinstance(flat.layout, PlannedLayout)
        for spec, grain in zip(flat.layout.params, flat.layout.grains, strict=True)
        if grain > 1
    }


# --- what is given ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, {nn.Linear}, {nn.Sequential}])
def test_names_are_those_of_the_outermost_module(policy: Any) -> None:
    with fake_world(4):
        found = grains_of(wrapped(auto_wrap_policy=policy))
    if "head.weight" in found:  # with the policy of linear layers, `head` owns the tied weight
        found["embedding.weight"] = found.pop("head.weight")
    assert found == EXPECTED


def test_grains_are_given_by_modules_and_by_functions_too() -> None:
    def grain_of(name: str, parameter: nn.Parameter) -> Grain | None:
        if name.startswith("blocks.0"):
            return Whole(padding=inf)
        return Rows(2) if parameter.shape == (12, 6) else GRAINS.get(name)

    with fake_world(3):
        assert grains_of(wrapped(grain_of)) == EXPECTED
        net = Net()
        rules: Any = {net.blocks[0]: Whole(padding=inf), net.head: Rows(2), "conv.weight": Rows()}
        rules |= {name: GRAINS[name] for name in ("frozen", "blocks.1.0.weight")}
        assert grains_of(FSDP(net, layout=rules, use_orig_params=True)) == EXPECTED


def test_a_policy_gives_a_unit_grains_of_its_own() -> None:
    def chosen(module: nn.Module) -> bool | dict[str, Any]:
        return {"layout": {"0.weight": Rows(5)}} if isinstance(module, nn.Sequential) else False

    with fake_world(2):
        found = grains_of(wrapped({"frozen": Rows(2)}, auto_wrap_policy=CustomPolicy(chosen)))
    assert found == {"blocks.0.0.weight": 30, "blocks.1.0.weight": 30, "frozen": 6}


def test_parameters_on_the_meta_device_have_their_grains() -> None:
    with fake_world(2):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
        model = FSDP(
            net, layout={"0.weight": Rows(5), "1": Rows(3)}, auto_wrap_policy={nn.Linear}, use_orig_params=True
        )
        assert grains_of(model) == {"0.weight": 30, "1.weight": 30, "1.bias": 3}


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        ("planned", ConfigValueError, 'layout: got \'planned\'. Accepted: "flat", "rows"'),
        (
            3,
            ConfigTypeError,
            r"layout: got 3 \(int\). Accepted: .*a mapping from names or modules to grains, a callable",
        ),
        ({"blocks.0": 3}, ConfigTypeError, r"layout\['blocks.0'\]: got 3 \(int\). Accepted: Elements\(\), Rows\(\)"),
        (
            {3: Rows()},
            ConfigTypeError,
            r"a key of layout: got 3 \(int\). Accepted: the name of a parameter or of a mod",
        ),
        (
            {"frosen": Rows()},
            ConfigValueError,
            r"layout\['frosen'\]: Net has no parameter or module of that name. Did you mean 'frozen'",
        ),
        ({"blocks.0.1": Rows()}, ConfigValueError, r"layout\['blocks.0.1'\]: that module holds no parameters in Net"),
        (
            {"embedding.weight": Rows(2), "head": Rows(3)},
            ConfigValueError,
            r"layout\['embedding.weight'\] and layout\['head'\] are for the same parameter, but give it different "
            r"grains, Rows\(count=2\) and Rows\(count=3\)",
        ),
        (
            {"conv.weight": Blocks(3, 3)},
            ConfigValueError,
            "parameter 'conv.weight': tiles of 3 x 3 do not divide the 2",
        ),
        (lambda name, parameter: "whole", ConfigTypeError, r"layout\('nothing', ...\): got 'whole' \(str\)"),
    ],
)
def test_wrong_layouts_are_refused_in_words(layout: Any, error: type[Exception], message: str) -> None:
    with fake_world(2), pytest.raises(error, match=message):
        wrapped(layout)


def test_parameters_that_a_call_does_not_shard_are_refused() -> None:
    with fake_world(2):
        net = Net()
        net.blocks[0] = FSDP(net.blocks[0], use_orig_params=True, layout={"0.weight": Rows(5)})
        with pytest.raises(UsageError, match=r"layout\['blocks.0.0.weight'\]: this parameter is in a unit already"):
            FSDP(net, use_orig_params=True, layout={"blocks.0.0.weight": Rows()})
        with pytest.raises(UsageError, match=r"layout\['frozen'\]: this parameter is ignored. Give grains only to"):
            FSDP(net, use_orig_params=True, layout={"frozen": Rows()}, ignored_states=[net.frozen])
        rest = FSDP(net, use_orig_params=True, layout={"blocks": Whole(padding=inf)})
        assert grains_of(rest)["blocks.0.0.weight"] == 30 and grains_of(rest)["blocks.1.2.weight"] == 60


# --- what users see ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("mixed", [None, MixedPrecision(param_dtype=torch.bfloat16)])
def test_ranks_hold_parameters_between_their_grains(world: int, mixed: Any) -> None:
    plain = {name: parameter.detach() for name, parameter in Net().named_parameters()}
    held: dict[str, list[Tensor]] = {name: [] for name in plain}
    for rank in range(world):
        with fake_world(world, rank):
            model = wrapped(mixed_precision=mixed)
            for name, parameter in model.named_parameters():
                in_memory = parameter.permute(0, 2, 3, 1) if parameter.dim() == 4 else parameter
                held[name].append(in_memory.detach().reshape(-1).clone())
            for flat in inspect.unit(model).flat_params:
                assert {span.start % (8 if mixed else 4) for span in flat.layout.spans} == {0}
    for name, whole in plain.items():
        in_memory = whole.permute(0, 2, 3, 1) if name == "conv.weight" else whole
        assert torch.equal(torch.cat(held[name]), in_memory.reshape(-1)), name
        sizes = [each.numel() for each in held[name] if each.numel()]
        assert all(size % EXPECTED.get(name, 1) == 0 for size in sizes[:-1]), name


def test_whole_parameters_keep_their_shapes_and_have_no_rows_elsewhere() -> None:
    found: dict[str, list[tuple[int, ...]]] = {}
    for rank in range(3):
        with fake_world(3, rank):
            for name, parameter in wrapped().named_parameters():
                found.setdefault(name, []).append(tuple(parameter.shape))
    assert sorted(found["blocks.0.0.weight"]) == [(0, 6), (0, 6), (10, 6)]
    assert sorted(found["blocks.0.2.bias"]) == [(0,), (0,), (6,)]
    assert all(len(shape) == 1 for shape in found["embedding.weight"] + found["blocks.1.2.weight"])


def test_a_matrix_that_only_happens_to_be_on_one_rank_is_no_whole_one_to_an_optimizer() -> None:
    with fake_world(2):
        model = FSDP(matrices((16, 16), (16, 16)), use_orig_params=True)
        assert [tuple(each.shape) for each in model.parameters()] == [(256,), (0,)]
        with pytest.raises(
            UsageError, match=r"Adafactor looks at.*one rank has a 1-D tensor of .* '0.weight'.*matrix_"
        ):
            torch.optim.Adafactor(model.parameters()).step()


def test_the_summary_reports_grains_and_segments() -> None:
    with fake_world(4):
        layout = {"0.weight": Rows(4)}
        text = flatfsdp.summary(FSDP(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16)), layout=layout))
    assert "416         416        0  FULL_SHARD  4 x 1  float32 by grains in 2 segments" in text


def test_much_padding_is_reported_with_cheaper_choices() -> None:
    with (
        fake_world(8),
        pytest.warns(FlatFSDPWarning, match="layout: of a unit of weight, bias, padding adds") as caught,
    ):
        FSDP(nn.Linear(16, 64), layout={"weight": Rows(32)}, use_orig_params=True)
    text = str(caught[0].message)
    assert "shards over 2 ranks with 4 replicas" in text and "Rows(count=8) for Rows(count=32)" in text


def matrices(*shapes: tuple[int, int]) -> nn.Sequential:
    """Linear layers with weights of these shapes."""
    return nn.Sequential(*(nn.Linear(columns, rows, bias=False) for rows, columns in shapes))


def test_whole_parameters_that_add_much_padding_are_refused_with_the_choices() -> None:
    net = matrices((16, 16), (8, 16))
    before = [each.detach().clone() for each in net.parameters()]
    with fake_world(2), pytest.raises(ConfigValueError) as caught:
        FSDP(net, layout={"0.weight": Whole()}, use_orig_params=True)
    text = str(caught.value)
    assert "of a unit of 0.weight, 1.weight, Whole() is refused for 0.weight: padding adds 33.33% to 384 ele" in text
    assert "Whole(padding=0.05) of '0.weight' with 256 elements, where an equal part of all has 192" in text
    assert "Preferred(Whole()) cuts what does not fit" in text
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
    with fake_world(2):  # they add nothing if they fit, and what is asked for if it is permitted
        FSDP(matrices((16, 16), (16, 16)), layout={"0.weight": Whole()}, use_orig_params=True)
        FSDP(net, layout={"0.weight": Whole(padding=0.4)}, use_orig_params=True)


def test_padding_that_other_grains_add_is_no_fault_of_whole_parameters() -> None:
    layout: Any = {"0.weight": Whole(), "1.weight": Rows(16)}
    with fake_world(4), pytest.warns(FlatFSDPWarning, match="layout: of a unit of .*padding adds"):
        FSDP(matrices((2, 16), (32, 16)), layout=layout, use_orig_params=True)


def test_shards_with_whole_parameters_have_to_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatfsdp.engine.wrapping import chosen_grains

    monkeypatch.setattr(chosen_grains, "memory_of", lambda device: 1000)
    message = r"Whole\(\) is refused for 0.weight: a shard has 1,024 bytes, more than the memory of cpu, 1,000"
    with fake_world(2), pytest.raises(ConfigValueError, match=message):
        FSDP(matrices((16, 16)), layout={"0.weight": Whole(padding=inf)}, use_orig_params=True)


def test_this_machine_has_memory() -> None:
    from flatfsdp.engine.wrapping import chosen_grains

    found = chosen_grains.memory_of(torch.device("cpu"))
    assert found is not None and found > 2**28


def test_the_summary_has_what_is_cut_in_spite_of_a_preferred_grain() -> None:
    with fake_world(2):
        net = matrices((32, 16), (8, 8), (8, 8))
        model = FSDP(net, layout=lambda name, parameter: Preferred(Whole()), use_orig_params=True)
        assert grains_of(model) == {"1.weight": 64, "2.weight": 64}
        text = flatfsdp.summary(model)
    assert "float32 by grains, 1 cut where their grains need too much padding" in text


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(4, 3, 5))
        self.matrix = nn.Parameter(torch.zeros(6, 10))
        self.frozen = nn.Parameter(torch.zeros(6, 10), requires_grad=False)
        self.vector = nn.Parameter(torch.zeros(10))
        self.filters = nn.Parameter(torch.zeros(2, 2, 2, 2))

    def forward(self) -> None:
        return


@pytest.mark.parametrize(
    "layout", [torch.optim.Muon, partial(torch.optim.Muon, lr=0.1), for_optimizer(torch.optim.Muon)]
)
def test_a_class_of_optimizers_gives_the_grains_that_suit_it(layout: Any) -> None:
    with fake_world(2):
        assert grains_of(FSDP(Experts(), layout=layout, use_orig_params=True)) == {"experts": 15, "matrix": 60}


def test_other_classes_of_optimizers_give_grains() -> None:
    with fake_world(2):
        whole = FSDP(Experts(), layout=torch.optim.Adafactor, use_orig_params=True)
        assert grains_of(whole) == {"experts": 60, "matrix": 60, "vector": 10, "filters": 16}
        sees: Any = for_optimizer(torch.optim.SGD, sees="matrices")
        assert grains_of(FSDP(Experts(), layout=sees, use_orig_params=True)) == {"experts": 15, "matrix": 60}
        net = matrices((64, 64), (64, 60))
        assert grains_of(FSDP(net, layout=LowBitAdam, use_orig_params=True)) == {"0.weight": 256}
        layout = partial(LowBitAdam, block_size=128)
        assert grains_of(FSDP(matrices((64, 64)), layout=layout, use_orig_params=True)) == {"0.weight": 128}


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        (
            torch.optim.AdamW,
            UsageError,
            "not known what torch.optim.adamw.AdamW has to see.*element-wise optimizer nee",
        ),
        (nn.Linear, ConfigTypeError, "layout: got .*, or a class of optimizers"),
    ],
)
def test_classes_without_grains_are_refused_in_words(layout: Any, error: type[Exception], message: str) -> None:
    with fake_world(2), pytest.raises(error, match=message):
        FSDP(Experts(), layout=layout, use_orig_params=True)
    with pytest.raises(ConfigTypeError, match="for_optimizer: optimizer: got"):
        for_optimizer(nn.Linear)
    with pytest.raises(ConfigValueError, match="for_optimizer: sees: got 'rows'"):
        for_optimizer(torch.optim.SGD, sees="rows")


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("original", [True, False])
def test_a_grain_that_is_declared_after_wrapping_is_refused(front: str, original: bool) -> None:
    with fake_world(1):
        net = matrices((16, 16), (16, 16))
        net[0].weight.fsdp_grain = Rows(4)
        weight = net[1].weight
        if front == "wrapper":
            model: Any = FSDP(net, layout=declared, use_orig_params=original)
        else:
            model = flatfsdp.fully_shard(net, layout=declared)
            weight = net[1].weight
        weight.fsdp_grain = Rows(2)
        with pytest.raises(
            UsageError, match=r"'1.weight' of unit .* fsdp_grain was None when .* is Rows\(count=2\) now"
        ):
            model(torch.ones(2, 16))
        del weight.fsdp_grain
        model(torch.ones(2, 16))


def test_parameters_declare_grains_of_their_own() -> None:
    def made() -> nn.Sequential:
        net = matrices((16, 16), (16, 16), (16, 16))
        net[0].weight.fsdp_grain = net[1].weight.fsdp_grain = Rows(4)
        net[2].weight.quant_state = SimpleNamespace(blocksize=64)  # packed: two weights in a byte of float32 elements
        return net

    with fake_world(2):
        for layout in (declared, {"1.weight": Rows(2)}):
            model = FSDP(made(), layout=layout, use_orig_params=True)
            its = 64 if layout is declared else 32
            assert grains_of(model) == {"0.weight": 64, "1.weight": its, "2.weight": 8}
        assert grains_of(FSDP(made(), use_orig_params=True)) == {}  # not asked for


def test_layers_share_the_costs_of_whole_matrices_evenly() -> None:
    """Each of four layers has two matrices of one size, of which one costs more: on the same rank in each of them, they
    would take that rank twice as long."""

    def layer() -> nn.Sequential:
        return matrices((64, 64), (1024, 4))

    with fake_world(2):
        net = nn.Sequential(*(layer() for _ in range(4)))
        layout = lambda name, parameter: Whole()  # noqa: E731
        policy = CustomPolicy(lambda module: isinstance(module, nn.Sequential) and module is not net)
        model = FSDP(net, layout=layout, auto_wrap_policy=policy, use_orig_params=True)
        holders = []
        for unit in inspect.units(model):
            for flat in unit.flat_params:
                index = next(i for i, spec in enumerate(flat.layout.params) if spec.shape == (64, 64))
                holders.append(next(rank for rank in (0, 1) if flat.layout.span_in_param(index, rank).numel))
    assert sorted(holders) == [0, 0, 1, 1]


def test_local_state_dicts_are_refused_in_words() -> None:
    with fake_world(2):
        model = FSDP(nn.Linear(6, 5), layout={"weight": Rows()})
        words = pytest.raises(UsageError, match="it was wrapped with grains as its layout, where a shard has pieces")
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT), words:
            model.state_dict()


def test_copies_and_pickles_keep_the_plan() -> None:
    with fake_world(3, 2):
        model = wrapped(auto_wrap_policy={nn.Sequential})
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for one, its in zip(inspect.units(model), inspect.units(other), strict=True):
                for mine, theirs in zip(one.flat_params, its.flat_params, strict=True):
                    assert mine.layout == theirs.layout and torch.equal(mine.shard, theirs.shard)
            other(torch.tensor([1])).backward()
