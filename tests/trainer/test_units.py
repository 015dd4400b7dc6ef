"""The modules that become units: by path, by class, found; and the messages when nothing is found."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp.engine.wrapping.auto_wrap import plan_wrapping
from flatfsdp.errors import ConfigTypeError, ConfigValueError, FlatFSDPWarning
from flatfsdp.trainer.model.units import policy_for, repeated_blocks, unit_modules
from flatfsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.harness.models import Transformer

pytestmark = pytest.mark.unit


class Layer(nn.Module):
    def __init__(self, width: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self) -> None: ...


class Tower(nn.Module):
    """Layers between other things."""

    def __init__(self, depth: int, width: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Layer(width, experts) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self) -> None: ...


class Translator(nn.Module):
    """An encoder, a decoder of another class, a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Tower(3)
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(4, 2, 8) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1))

    def forward(self) -> None: ...


class Stage(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(depth))
        self.down = nn.Linear(width, 2 * width)

    def forward(self) -> None: ...


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(2, 4), Stage(2, 8), Stage(4, 16)])

    def forward(self) -> None: ...


class Pretrained(Translator):
    """Declares its repeated modules, as models of transformers do; a tied embedding is one of them."""

    _no_split_modules = ("TransformerDecoderLayer", "Embedding")

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.encoder.embedding.weight


def names(model: nn.Module, units: Any = "auto") -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return list(unit_modules(model, units))


def numbered(path: str, count: int) -> list[str]:
    return [f"{path}.{number}" for number in range(count)]


FOUND = {
    "layers": (lambda: Tower(3), numbered("layers", 3)),
    "experts belong to their layer": (lambda: Tower(2, experts=8), numbered("layers", 2)),
    "an encoder and a decoder, but not a small head": (
        Translator,
        [*numbered("encoder.layers", 3), *numbered("decoder", 2)],
    ),
    "a sequence with other things at its ends": (
        lambda: nn.Sequential(nn.Embedding(7, 4), Layer(), Layer(), nn.Linear(4, 7)),
        ["1", "2"],
    ),
    "sequences of blocks, as in a ResNet": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(8), Layer(8))),
        ["1.0", "1.1", "2.0", "2.1"],
    ),
    "blocks that are sequences": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3))),
        ["0", "1", "2"],
    ),
    "lists of lists": (
        lambda: nn.Sequential(nn.ModuleList(nn.ModuleList([Layer(), Layer()]) for _ in range(2))),
        ["0.0.0", "0.0.1", "0.1.0", "0.1.1"],
    ),
    "stages of which one holds most": (
        Pyramid,
        [*numbered("stages.0.blocks", 2), *numbered("stages.1.blocks", 2), *numbered("stages.2.blocks", 4)],
    ),
    "layers of an MLP": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"]),
    "what a model of transformers names": (Pretrained, numbered("decoder", 2)),
}


@pytest.mark.parametrize("what", FOUND)
def test_the_repeated_block_is_found(what: str) -> None:
    build, expected = FOUND[what]
    assert names(build()) == expected


def test_a_module_in_several_places_is_one_unit_and_tied_ones_are_none() -> None:
    shared = Layer()
    assert list(repeated_blocks(nn.Sequential(shared, Layer(), shared))) == ["0", "1"]
    model = Tower(3)
    model.layers[2].mix.weight = model.layers[0].mix.weight  # type: ignore[union-attr]
    assert list(repeated_blocks(model)) == ["layers.1"]


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("encoder.layers", numbered("encoder.layers", 3)),
        ("encoder.layers.1", ["encoder.layers.1"]),
        ("encoder", ["encoder"]),
        ("encoder.layers.0.mlp", ["encoder.layers.0.mlp.0", "encoder.layers.0.mlp.2"]),
        ("TransformerDecoderLayer", numbered("decoder", 2)),
        (["Tower", "decoder"], ["encoder", *numbered("decoder", 2)]),
        ([nn.Embedding, "head"], ["encoder.embedding", "head.0", "head.1"]),
        (("auto", "encoder.norm"), [*numbered("encoder.layers", 3), *numbered("decoder", 2), "encoder.norm"]),
        ("none", []),
    ],
)
def test_units_have_names(units: Any, expected: list[str]) -> None:
    assert names(Translator(), units) == expected


def test_a_policy_chooses_those_and_no_others() -> None:
    model = Translator()
    plan = plan_wrapping(model, policy_for(model, ["decoder", "Embedding"]), kwargs={})
    assert [planned.path for planned in plan] == ["encoder.embedding", *numbered("decoder", 2)]


def test_policies_and_classes_are_handed_on() -> None:
    model = Tower(2)
    for policy in (ModuleWrapPolicy({Layer}), size_based_auto_wrap_policy, frozenset({Layer})):
        assert policy_for(model, policy) is policy
    assert policy_for(model, Layer) == {Layer}
    assert policy_for(model, "none") is None and policy_for(model, None) is None


def test_what_names_nothing_ends_a_run_with_the_nearest_names() -> None:
    with pytest.raises(ConfigValueError) as refused:
        policy_for(Transformer(tied=False, depth=3), "block", param_dtype=torch.bfloat16)
    assert str(refused.value) == (
        "units: 'block' is neither a submodule of Transformer with parameters nor the class of one (nearest: 'blocks', "
        "'Block'). units_fallback=True makes Transformer a single unit, all of it (11.4 KiB) gathered at once on every "
        "rank"
    )
    for units in (nn.Conv2d, {nn.Conv2d, nn.Conv1d}, ["layers", nn.Conv2d]):
        with pytest.raises(ConfigValueError, match=r"^units: .*'Conv2d' is neither a submodule of Tower with"):
            policy_for(Tower(2), units)
    with pytest.raises(ConfigValueError, match=r"\(nearest: 'encoder.layers'\)"):  # the end of a path
        policy_for(Translator(), "layers")


def test_a_fallback_that_was_requested_is_reported_with_what_it_costs() -> None:
    model = Transformer(tied=False, depth=3)
    with pytest.warns(FlatFSDPWarning) as caught:
        assert policy_for(model, "block", fallback=True, param_dtype=torch.bfloat16) is None
    (message,) = [str(each.message) for each in caught]
    assert message == (
        "units: 'block' is neither a submodule of Transformer with parameters nor the class of one (nearest: 'blocks', "
        "'Block'). The model becomes a single unit: all of it, 11.4 KiB, is gathered at once on every "
        "rank. units='auto' would make 3 units of it ('blocks.0', a Block, and others like it), the largest of "
        "3.39 KiB, and leave 1.26 KiB to the root unit"
    )


def test_with_a_fallback_one_of_several_names_that_is_wrong_leaves_the_others() -> None:
    model = Tower(2)
    with pytest.warns(FlatFSDPWarning, match=r"'Leyer'.*nearest: 'Layer'.*It is ignored; the other units"):
        assert list(unit_modules(model, ["Leyer", "layers"], fallback=True)) == numbered("layers", 2)


def test_a_model_without_repetition_is_reported() -> None:
    with pytest.warns(FlatFSDPWarning, match=r"^units: 'auto' finds no list .* in Linear. .* 80 B, .* units='none'"):
        assert policy_for(nn.Linear(4, 4), "auto") is None


def test_a_submodule_without_parameters_is_no_unit() -> None:
    with pytest.raises(ConfigValueError, match="'1' is neither a submodule of Sequential with parameters"):
        policy_for(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "1")


@pytest.mark.parametrize(
    ("units", "error"),
    [(3, ConfigTypeError), ([3], ConfigTypeError), ("", ConfigValueError), (["none"], ConfigValueError)],
)
def test_what_cannot_be_meant_is_refused(units: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^units: got .* Accepted: 'auto', 'none', the path"):
        policy_for(Tower(2), units)
