"""Advice on ways to shard a model: which are tried, their figures, and which one is recommended."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import Advice, FullyShardedDataParallel, Way, advise, dry_run, fully_shard_by_policy, memory_plan
from flatfsdp.engine.inspection.advise import recommended, shard_sizes
from flatfsdp.errors import ConfigTypeError, ConfigValueError, UsageError
from flatfsdp.layout import Rows
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

WIDTH, BLOCKS = 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """With a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def net() -> Net:
    with torch.device("meta"):
        return Net()


BLOCK = 2 * 4 * WIDTH * WIDTH + 5 * WIDTH
ROOT = 100 * WIDTH
WHOLE = 4 * (BLOCKS * BLOCK + ROOT)  # bytes
FLAT = {"flat": "flat"}


def ways(advice: Advice) -> list[tuple[int, int, str, str]]:
    return [(c.way.shards, c.way.replicas, c.way.units, c.way.layout) for c in advice.choices]


@pytest.mark.parametrize(
    ("ranks", "node", "sizes"),
    [
        (1, 8, [1]),
        (8, 8, [8, 4, 2, 1]),
        (6, 8, [6, 3, 1]),
        (64, 8, [64, 32, 16, 8, 4, 2, 1]),
        (24, 8, [24, 8, 4, 2, 1]),
        (1000, 8, [1000, 8, 4, 2, 1]),
        (9, 3, [9, 3, 1]),
    ],
)
def test_shards_are_over_nodes_and_parts_of_them(ranks: int, node: int, sizes: list[int]) -> None:
    assert shard_sizes(ranks, node) == sizes


def test_every_way_is_tried_and_has_the_figures_of_its_dry_run() -> None:
    model = Net()
    advice = advise(model, ranks=2, optimizer=adam, accelerator=False, use_orig_params=True)
    expected = [(s, 2 // s, u, x) for s in (2, 1) for u in ("model", "blocks", "layers") for x in ("flat", "rows")]
    assert ways(advice) == expected and not advice.left_out
    assert type(model.blocks[0]) is Block and model.head.weight is model.embedding.weight  # it is as it was
    with dry_run(2):
        sharded = FullyShardedDataParallel(net(), auto_wrap_policy={Block}, use_orig_params=True, layout="rows")
        assert advice.choices[3].plan == memory_plan(sharded, adam(sharded))


def test_traffic_is_divided_between_a_node_and_the_others() -> None:
    found = {(c.way.shards, c.way.units): c for c in advise(net(), ranks=8, node=4, layouts=FLAT).choices}
    # Gathers for forward and backward (the root's only once), and a reduction.
    blocks, root = 4 * BLOCKS * BLOCK, 4 * ROOT
    sent = 2 * blocks + root + WHOLE
    assert (found[8, "blocks"].inside, found[8, "blocks"].across) == (sent * 3 // 8, sent // 2)
    # Shards on a node, and two replicas, which reduce a quarter of all gradients to all.
    assert (found[4, "blocks"].inside, found[4, "blocks"].across) == (sent * 3 // 4, 2 * (WHOLE // 4) // 2)
    # Of four replicas, two are on this node.
    assert (found[2, "blocks"].inside, found[2, "blocks"].across) == (sent // 2 + WHOLE // 4, 2 * (WHOLE // 2) // 2)
    assert (found[1, "blocks"].inside, found[1, "blocks"].across) == (2 * WHOLE * 3 // 8, WHOLE)
    assert found[8, "model"].across == (WHOLE + WHOLE) // 2
    assert found[8, "blocks"].largest.name == "blocks.0" and found[8, "model"].largest.parameters == WHOLE // 4


def test_the_recommendation_is_the_least_traffic_that_fits() -> None:
    choices = list(advise(net(), ranks=8, node=4, layouts=FLAT, optimizer=adam, use_orig_params=True).choices)
    peaks = {(choice.way.shards, choice.way.units): choice.plan.peak for choice in choices}

    def advised(memory: int | None) -> tuple[int, str, str]:
        best, sentence = recommended(choices, memory)
        assert best in choices and (memory is None or memory == 1 or best.plan.peak <= memory)
        return best.way.shards, best.way.units, sentence

    shards, units, sentence = advised(10 * WHOLE)
    assert (shards, units) == (4, "blocks")  # half as much across nodes as with eight, or with copies everywhere
    # Only one unit overlaps nothing, except that of copies.
    assert sentence.startswith(
        "Recommended: 4 shards x 2 replicas, units 'blocks', layout 'flat': of the 9 of 12 ways that overlap "
        "communication and fit into 5.3 MiB, it receives the least from other nodes, 135.5 KiB a step, then the least "
    )
    least = min(peak for (_, units), peak in peaks.items() if units != "model")
    assert advised(peaks[4, "blocks"] - 1)[:2] == (8, "blocks")  # units are so small that layers are joined
    assert peaks[advised(None)[:2]] == least and "it has the smallest peak of 9 ways that overlap" in advised(None)[2]
    assert advised(1)[2].startswith("None of 12 ways fits into 1 B: the smallest peak is that of 8 shards x 1 replicas")


def test_units_layouts_and_the_call_that_shards_are_given() -> None:
    layouts = {"in rows of blocks": {"blocks": Rows(16)}, "flat": "flat"}
    advice = advise(net(), ranks=2, units={"mine": {Block}}, layouts=layouts)
    assert ways(advice)[:2] == [(2, 1, "mine", "in rows of blocks"), (2, 1, "mine", "flat")]
    assert ["by grains" in choice.plan.units[1].kinds for choice in advice.choices[:2]] == [True, False]

    def in_place(model: nn.Module, way: Way) -> nn.Module:
        if way.replicas > 1:
            raise ConfigValueError("no replicas here")
        return fully_shard_by_policy(model, way.policy)

    advice = advise(net(), ranks=2, shard=in_place, optimizer=adam, layouts={"rows": None})
    assert ways(advice) == [(2, 1, "model", "rows"), (2, 1, "blocks", "rows"), (2, 1, "layers", "rows")]
    assert [why for _, why in advice.left_out] == ["no replicas here"] * 3
    assert "left out: 1 shards x 2 replicas, units 'model', layout 'rows': no replicas here" in str(advice)


def test_a_single_unit_is_recommended_if_nothing_else_fits() -> None:
    first, *others = advise(net(), ranks=2, layouts=FLAT).choices
    assert not first.overlaps
    small = replace(first, plan=replace(first.plan, params=0, grads=0, buffers=0, at_peak={}))
    best, sentence = recommended([small, *others], 1)
    assert best is small and "of the 1 of 6 ways that fit into 1 B, it receives the least" in sentence
    with torch.device("meta"):
        alone = advise(nn.Linear(64, 64), ranks=4, layouts=FLAT)
    assert [choice.overlaps for choice in alone.choices] == [False, False, True]
    least = min(alone.choices, key=lambda choice: choice.plan.peak)
    assert alone.recommended is least and f"{least.way.words}: it has the smallest peak of 3 ways, " in alone.sentence


def test_options_are_about_the_modules_and_parameters_of_the_model() -> None:
    model = net()
    rows = {"by module": {model.blocks[0]: Rows(16)}}

    def parameters(**options: Any) -> int:
        advice = advise(model, ranks=2, units={"one": None}, layouts=rows, **options)
        assert not advice.left_out and "by grains" in advice.choices[0].plan.units[0].kinds
        (of_shards,), (of_copies,) = (choice.plan.units for choice in advice.choices)
        assert of_shards.parameters == of_copies.parameters
        return of_shards.parameters

    assert parameters() == WHOLE // 4
    assert parameters(ignored_modules=[model.blocks[1]]) == WHOLE // 4 - BLOCK
    assert parameters(ignored_states=model.blocks[1].parameters()) == WHOLE // 4 - BLOCK


def test_gathers_among_fewer_ranks_are_not_counted_as_those_over_all() -> None:
    advice = advise(net(), ranks=4, units={"model": None}, layouts=FLAT, reshard_after_forward=2)
    assert ways(advice) == [(2, 2, "model", "flat")]
    assert [way.shards for way, _ in advice.left_out] == [4, 1]
    assert advice.left_out[0][1].startswith("reshard_after_forward=2: some gathers are among fewer ranks than there")


def test_the_table_marks_the_recommendation() -> None:
    lines = str(advise(net(), ranks=2, units={"blocks": {Block}}, layouts=FLAT, memory=2**30)).split("\n")
    assert [line.split("  ")[0] for line in lines[:3]] == ["shards x replicas", "2 x 1", "1 x 2"]
    assert [line.endswith("<") for line in lines[:3]] == [False, False, True] or lines[1].endswith("<")
    assert lines[-1].startswith("Recommended: ")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"ranks": 0}, ConfigValueError, "advise: ranks: got 0. Accepted: a whole number from 1"),
        ({"ranks": 2, "node": True}, ConfigValueError, "advise: node: got True"),
        ({"ranks": 2, "memory": 1.5}, ConfigValueError, "advise: memory: got 1.5"),
        ({"ranks": 2, "units": {nn.Linear}}, ConfigTypeError, "advise: units: got .* a mapping from names"),
        ({"ranks": 2, "layouts": {}}, ConfigTypeError, "advise: layouts: got .* with at least one"),
        (
            {"ranks": 2, "sharding_strategy": "SHARD_GRAD_OP"},
            ConfigValueError,
            "advise: sharding_strategy: got a value, but it differs between the ways",
        ),
        (
            {"ranks": 2, "shard": lambda model, way: model, "use_orig_params": True},
            ConfigValueError,
            "advise: got use_orig_params with shard=, which makes the sharded model",
        ),
        (
            {"ranks": 2, "layouts": {"x": "x"}},
            ConfigValueError,
            "no way to shard the model is permitted.*layout: got 'x'",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_words(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        advise(net(), **given)


def test_an_optimizer_that_refuses_a_way_leaves_it_out() -> None:
    """As Muon does, which takes matrices: shards of the wrapper are none."""

    def of_matrices(model: Any) -> torch.optim.Optimizer:
        if any(each.dim() != 2 for each in model.parameters()):
            raise ValueError("only 2D parameters are supported")
        return adam(model)

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    advice = advise(model, ranks=2, units={"one": None}, layouts=FLAT, optimizer=of_matrices, use_orig_params=True)
    assert ways(advice) == [(1, 2, "one", "flat")]
    ((way, why),) = advice.left_out
    assert way.shards == 2 and why == "its optimizer cannot be made: ValueError: only 2D parameters are supported"


def test_marks_of_parameters_are_on_the_copies() -> None:
    model = net()
    model.head.weight.no_decay = True  # type: ignore[attr-defined]

    def optimizer(model: Any) -> torch.optim.Optimizer:
        marked = [each for each in model.parameters() if getattr(each, "no_decay", False)]
        assert len(marked) == 1
        return adam(model)

    assert advise(model, ranks=2, units={"model": None}, use_orig_params=True, optimizer=optimizer).choices


def test_a_rank_of_a_job_gets_an_error() -> None:
    with fake_world(2), pytest.raises(UsageError, match="this process is already a rank of a job"):
        flatfsdp.advise(net(), ranks=2)


def of_all(model: Any) -> torch.optim.Optimizer:
    return flatfsdp.matrix_steps(partial(torch.optim.Muon, lr=0.1), model.parameters()).optimizer


def test_matrices_of_an_optimizer_have_traffic_and_owners() -> None:
    def muon(model: Any) -> torch.optim.Optimizer:
        shapes = flatfsdp.unsharded_shapes(model)
        matrices = [each for name, each in model.named_parameters() if len(shapes[name]) == 2]
        return flatfsdp.matrix_steps(partial(torch.optim.Muon, lr=0.1), matrices).optimizer

    advice = advise(net(), ranks=8, node=4, optimizer=muon, units={"blocks": {Block}}, use_orig_params=True)
    for choice in advice.choices:
        plan, way = choice.plan, choice.way
        assert plan.imbalance is not None and plan.imbalance >= 1
        assert ("all_to_all" in plan.comm) == (way.shards > 1)
        assert plan.optimizer.keys() == {"momentum_buffer"}
    with pytest.raises(
        ConfigValueError, match=r"optimizer cannot be made: UsageError: matrix_steps: .* flat parameter"
    ):
        advise(net(), ranks=4, optimizer=of_all, units={"blocks": {Block}})
    layouts = {"as Muon prefers": torch.optim.Muon, "whole": lambda name, parameter: flatfsdp.layout.Whole()}
    ways: Any = {"units": {"blocks": {Block}}, "layouts": layouts, "use_orig_params": True}
    chosen = advise(net(), ranks=2, optimizer=muon, **ways)
    assert {choice.way.layout for choice in chosen.choices} >= {"as Muon prefers"}
    assert all(choice.padding <= 0.06 for choice in chosen.choices)
    assert "owners" in str(advice)
    assert "the longest step of one, as a multiple of the mean" in str(advice)
    of_elements = advise(net(), ranks=2, optimizer=adam, units={"blocks": {Block}}, layouts=FLAT, use_orig_params=True)
    assert "owners" not in str(of_elements)
