"""A forecast as text for readers, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from expecttest import assert_expected_inline

from flatfsdp import Plan
from flatfsdp.trainer.memory_estimate import MemoryEstimate

pytestmark = pytest.mark.unit

GIB = 2**30
SHARDS = 448 * 2**20


FIGURES = Plan(
    units=(),
    params=SHARDS,
    grads=SHARDS,
    optimizer={"step": 944, "exp_avg": SHARDS, "exp_avg_sq": SHARDS},
    buffers=12_288,
    unsharded_peak=2 * GIB,
    at_peak={"shard": SHARDS, "unsharded": 2 * GIB, "slots": 26 * GIB, "reduced": 12 * 2**20, "novel": 7},
    comm={"all_gather": (212, 110 * GIB), "reduce_scatter": (27, 26 * GIB), "scalar": (1, 4)},
)
FORECAST = MemoryEstimate(
    ranks=64,
    microbatches=4,
    accelerator=True,
    cpu_offload=False,
    optimizer="AdamW",
    optimizer_unknown="",
    units="unit  module  ...\n(the table of flatfsdp.summary)",
    plan=FIGURES,
)


def test_a_forecast_for_people() -> None:
    assert_expected_inline(
        FORECAST.render(),
        """\
64 ranks (accelerators, NCCL), AdamW, 4 microbatches per step

unit  module  ...
(the table of flatfsdp.summary)

each rank holds                       between steps  at the peak
parameters (shards)                         448 MiB      448 MiB
parameters, gathered                            0 B     2.00 GiB
gradients, to reduce                            0 B     26.0 GiB
gradients, reduced (shards)                     0 B     12.0 MiB
novel                                           0 B          7 B
optimizer: step, exp_avg, exp_avg_sq        896 MiB      896 MiB
buffers                                    12.0 KiB     12.0 KiB
total, without activations                 1.31 GiB     29.3 GiB

sent per step              calls     bytes
all-gather, parameters       212   110 GiB
reduce-scatter, gradients     27  26.0 GiB
norms and agreements           1       4 B

Not included: activations; temporary memory of the optimizer step; torch, the backend and fragmentation.
Each unit is assumed to run once, in the order in which the model declares them.""",
    )


def test_host_and_device_are_distinguished_and_what_is_unknown_is_reported() -> None:
    plan = replace(FIGURES, optimizer={}, buffers=0)
    offloaded = replace(FORECAST, cpu_offload=True, optimizer_unknown="a step of Odd fails", plan=plan)
    lines = offloaded.render().splitlines()
    texts = [line for line in lines if "host" in line or "Odd" in line or "optimizer" in line]
    assert_expected_inline(
        "\n".join(texts),
        """\
of which on the host               448 MiB      460 MiB
Not included: activations; temporary memory of the optimizer step; torch, the backend and fragmentation.
Not included, either: the optimizer's state: a step of Odd fails""",
    )


def test_the_peak_may_be_the_optimizers() -> None:
    """One rank: nothing is gathered, and gradients are there when the backward is over."""
    lines = replace(FORECAST, plan=replace(FIGURES, at_peak={"shard": SHARDS})).render().splitlines()
    assert_expected_inline(
        "\n".join(lines[4:10]),
        """\

each rank holds                       between steps  at the peak
parameters (shards)                         448 MiB      448 MiB
gradients, reduced (shards)                     0 B      448 MiB
optimizer: step, exp_avg, exp_avg_sq        896 MiB      896 MiB
buffers                                    12.0 KiB     12.0 KiB""",
    )


def test_what_quantized_gradients_lose_is_held_between_steps() -> None:
    plan = replace(FIGURES, residuals=2 * GIB, at_peak=FIGURES.at_peak | {"residual": 2 * GIB})
    lines = replace(FORECAST, plan=plan).render().splitlines()
    found = [line for line in lines if line.startswith(("gradients, rounding", "total"))]
    assert_expected_inline(
        "\n".join(found),
        """\
gradients, rounding errors                 2.00 GiB     2.00 GiB
total, without activations                 3.31 GiB     31.3 GiB""",
    )


def test_a_forecast_goes_through_json() -> None:
    found = json.loads(json.dumps(asdict(FORECAST)))
    assert found["plan"]["comm"]["all_gather"] == [212, 110 * GIB]
