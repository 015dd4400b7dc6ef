"""The table of `tools/bench --exchange`, from figures that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from tools.benchmark import exchange

pytestmark = pytest.mark.unit


def cell(number: int, unit: str, way: str, listed: float) -> dict[str, Any]:
    costs = {f"{kind} flat": {"cpu": 0.010, "wall": 0.02} for kind in exchange.KINDS}
    costs |= {f"{kind} list": {"cpu": listed, "wall": 0.02} for kind in exchange.KINDS}
    return {"round": number, "model": unit, "engine": way, "ranks": [{"staged": 8192, **costs}]}


def test_ratios_are_of_rounds_and_what_failed_is_named() -> None:
    unit = next(iter(exchange.UNITS))
    cells = [cell(number, unit, "gloo", listed) for number, listed in enumerate((0.011, 0.012, 0.010))]
    cells.append({"round": 0, "model": unit, "engine": "shared memory", "error": "rank 1 died"})
    lines = exchange.table_of(cells)
    (row,) = [line for line in lines if "| gather |" in line]
    assert row == (
        f"| {unit} | gloo | gather | 10.00 (10.00 to 10.00) | 11.00 (10.00 to 12.00) | 1.10 (1.00 to 1.20) | 8192 |"
    )
    assert f"{unit}, shared memory: rank 1 died" in lines
