"""Grains of parameters of `fully_shard`: the rows of DTensors are checked against them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FSDPModule, fully_shard, fully_shard_by_policy
from flatfsdp.errors import ConfigTypeError, ConfigValueError, UsageError
from flatfsdp.layout import Blocks, Elements, Rows, Whole
from flatfsdp.wrap import CustomPolicy
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


def net() -> nn.Sequential:
    """Weights of 6 and of 8 rows, 12 and 6 elements each."""
    return nn.Sequential(nn.Linear(12, 6), nn.Linear(6, 8))


@pytest.mark.parametrize(
    "layout",
    [
        {"0.weight": Rows(3), "1.weight": Blocks(4)},
        {"0.weight": Elements(18), "1": Rows(2)},
        {"1.bias": Rows(4)},
        lambda name, parameter: Rows() if parameter.dim() == 2 else None,
        {},
        None,
    ],
)
def test_grains_between_rows_are_accepted(layout: Any) -> None:
    with fake_world(2):
        assert isinstance(fully_shard(net(), layout=layout), FSDPModule)
        by_policy = fully_shard_by_policy(net(), {nn.Linear}, layout=layout)
        by_policy(torch.ones(2, 12)).sum().backward()


@pytest.mark.parametrize("by_policy", [False, True])
def test_cuts_inside_of_grains_are_refused_with_the_remedies(by_policy: bool) -> None:
    layout: Any = {"0.weight": Rows(3)}
    message = (
        r"layout: '(0\.)?weight' of shape \(6, 12\) is split over 4 ranks after each 2 of its 6 rows along dimension 0,"
        r" which is inside of its grain, Rows\(count=3\), of 36 elements.*shard over 2 of these ranks"
    )
    with fake_world(4), pytest.raises(ConfigValueError, match=message):
        fully_shard_by_policy(net(), {nn.Linear}, layout=layout) if by_policy else fully_shard(net(), layout=layout)


def test_the_last_rank_may_have_fewer_rows_and_one_rank_all() -> None:
    with fake_world(4, 3):
        fully_shard(net(), layout={"0.weight": Rows(2)})  # 2, 2, 2, 0
    with fake_world(1):
        fully_shard(net(), layout={"0": Whole()})
    with fake_world(2), pytest.raises(ConfigValueError, match=r"its grain, Whole.*shard over 1 of these ranks"):
        fully_shard(net(), layout={"0.weight": Whole()})


def test_rows_are_those_of_the_dimension_that_is_split() -> None:
    from torch.distributed.tensor import Shard

    layout: Any = {"0.weight": Rows(4)}
    with fake_world(3):
        along_the_last: Any = {"layout": layout, "shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)}
        fully_shard(net(), **along_the_last)
        fully_shard_by_policy(net(), {nn.Linear}, **along_the_last)
        with pytest.raises(ConfigValueError, match="after each 2 of its 6 rows along dimension 0"):
            fully_shard(net(), layout=layout)


def test_a_policy_gives_a_unit_grains_of_its_own() -> None:
    def chosen(module: nn.Module) -> bool | dict[str, Any]:
        return {"layout": {"weight": Rows(5)}} if getattr(module, "out_features", 0) == 8 else False

    with fake_world(2), pytest.raises(ConfigValueError, match="after each 4 of its 8 rows"):
        fully_shard_by_policy(net(), CustomPolicy(chosen))


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        ("rows", ConfigTypeError, r"layout: got 'rows' \(str\). Accepted: None, a mapping from names or modules"),
        (Rows, ConfigTypeError, "layout: got .*. Accepted: None, a mapping"),
        ({"0.wait": Rows()}, ConfigValueError, r"layout\['0.wait'\]: Sequential has no .* Did you mean '0.weight'"),
        ({"0.weight": Rows(), "0": Rows(2)}, ConfigValueError, "are for the same parameter, but give it different"),
        ({"0.weight": 2}, ConfigTypeError, r"layout\['0.weight'\]: got 2 \(int\). Accepted: Elements"),
    ],
)
@pytest.mark.parametrize("by_policy", [False, True])
def test_wrong_layouts_are_refused_in_words(layout: Any, error: Any, message: str, by_policy: bool) -> None:
    with fake_world(2), pytest.raises(error, match=message):
        fully_shard_by_policy(net(), {nn.Linear}, layout=layout) if by_policy else fully_shard(net(), layout=layout)


def test_grains_of_a_sharded_module_are_given_where_it_is_sharded() -> None:
    with fake_world(2):
        model = net()
        fully_shard(model[0], layout={"weight": Rows(3)})
        with pytest.raises(UsageError, match="this parameter is in a unit already"):
            fully_shard(model, layout={"0.weight": Rows(3)})
