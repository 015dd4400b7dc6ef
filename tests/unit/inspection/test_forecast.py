"""A forecast as people read it, and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

from expecttest import assert_expected_inline

from flatfsdp import UnitSummary
from flatfsdp.trainer.memory_estimate import MemoryEstimate

GIB = 2**30
SHARDS = 448 * 2**20


def unit(name: str, module: str, parameters: int, *, padding: int = 0) -> UnitSummary:
    size = (parameters + padding) * 4 // 64
    return UnitSummary(name, module, parameters, size, padding, "FULL_SHARD", "64 x 1", "float32 as bfloat16")


FORECAST = MemoryEstimate(
    ranks=64,
    microbatches=4,
    accelerator=True,
    cpu_offload=False,
    optimizer="AdamW",
    units=(unit("", "Decoder", 2**29), *(unit(f"blocks.{i}", "Block", 2**28 - 5, padding=5) for i in range(26))),
    parameters=SHARDS,
    gradients=SHARDS,
    optimizer_state={"step": 944, "exp_avg": SHARDS, "exp_avg_sq": SHARDS},
    optimizer_unknown="",
    buffers=12_288,
    unsharded_peak=2 * GIB,
    at_peak={"shard": SHARDS, "unsharded": 2 * GIB, "slots": 26 * GIB, "reduced": 12 * 2**20, "novel": 7},
    between_steps=3 * SHARDS + 13_232,
    peak=3 * SHARDS + 28 * GIB + 12 * 2**20 + 13_239,
    traffic={"all_gather": (212, 110 * GIB), "reduce_scatter": (27, 26 * GIB), "scalar": (1, 4)},
)


def test_a_forecast_for_people() -> None:
    assert_expected_inline(
        FORECAST.render(),
        """\
64 ranks (accelerators, NCCL), AdamW, 4 microbatches a step

unit                        module      parameters  a rank holds  padding
<root>                      Decoder    536,870,912      32.0 MiB        0
blocks.0 .. blocks.25 (26)  Block    6,979,321,726       416 MiB      130
27 units                             7,516,192,638       448 MiB      130
each unit: FULL_SHARD, 64 x 1, float32 as bfloat16

each rank holds                       between steps  at the peak
parameters (shards)                         448 MiB      448 MiB
parameters, gathered                            0 B     2.00 GiB
gradients, to be reduced                        0 B     26.0 GiB
gradients, reduced (shards)                     0 B     12.0 MiB
novel                                           0 B          7 B
optimizer: step, exp_avg, exp_avg_sq        896 MiB      896 MiB
buffers                                    12.0 KiB     12.0 KiB
total, besides activations                 1.31 GiB     29.3 GiB

sent in a step             calls        of
all-gather, parameters       212   110 GiB
reduce-scatter, gradients     27  26.0 GiB
norms                          1       4 B

Not in it: activations; what the optimizer needs while it steps; torch, the backend and fragmentation.
Units are taken to run once each, in the order in which the model declares them.""",
    )


def test_host_and_device_are_told_apart_and_what_is_unknown_is_said() -> None:
    offloaded = replace(
        FORECAST, cpu_offload=True, optimizer_state={}, buffers=0, optimizer_unknown="a step of Odd fails"
    )
    lines = replace(offloaded, between_steps=SHARDS, peak=sum(FORECAST.at_peak.values())).render().splitlines()
    told = [line for line in lines if "host" in line or "Odd" in line or "optimizer" in line]
    assert_expected_inline(
        "\n".join(told),
        """\
of it on the host                  448 MiB      460 MiB
Not in it: activations; what the optimizer needs while it steps; torch, the backend and fragmentation.
Nor the optimizer's state: a step of Odd fails""",
    )


def test_the_peak_may_be_the_optimizers() -> None:
    """One rank: nothing is gathered, and gradients are there when the backward is over."""
    state = sum(FORECAST.optimizer_state.values())
    small = replace(FORECAST, at_peak={"shard": SHARDS}, peak=2 * SHARDS + state + 12_288)
    lines = small.render().splitlines()
    assert_expected_inline(
        "\n".join(lines[7:13]),
        """\

each rank holds                       between steps  at the peak
parameters (shards)                         448 MiB      448 MiB
gradients, reduced (shards)                     0 B      448 MiB
optimizer: step, exp_avg, exp_avg_sq        896 MiB      896 MiB
buffers                                    12.0 KiB     12.0 KiB""",
    )


def test_a_forecast_goes_through_json() -> None:
    found = json.loads(json.dumps(FORECAST.to_dict()))
    assert found["traffic"]["all_gather"] == [212, 110 * GIB]
    assert found["units"][1]["name"] == "blocks.0"
