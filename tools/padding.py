"""The padding of planned layouts on published models, computed without tensors, and the time that planning takes.

`python tools/padding.py [--write]` prints the table and compares it with the one in `bench_results/padding.md`, which
`--write` replaces. One transformer layer is a unit; elements are of two bytes. All pieces of all ranks are checked
against the grains one by one, besides the proof in `PlannedLayout` itself.

Shapes are those of the modules in Hugging Face Transformers, from the models' `config.json`: `openai/gpt-oss-120b`
(hidden_size 2880, 36 layers, 64 heads and 8 key-value heads of 64, 128 experts of intermediate_size 2880, with biases)
and `deepseek-ai/DeepSeek-V3` (arXiv 2412.19437; hidden_size 7168, 61 layers, 128 heads of 128 + 64, kv_lora_rank 512,
q_lora_rank 1536, 256 routed experts and a shared one of 2048, the first 3 layers dense with 18432).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flatfsdp.engine.layout.layout import ParamSpec
from flatfsdp.engine.planning.grains import Blocks, Grain
from flatfsdp.engine.planning.plan import _search, plan
from flatfsdp.engine.planning.planned import PlannedLayout

RESULTS = Path(__file__).resolve().parent / "bench_results" / "padding.md"
RANKS = (64, 128, 256, 512, 1024)
ROWS = (128, 16, 1)
ALIGN = 8  # 16 bytes of bfloat16

Shapes = Mapping[str, tuple[int, ...]]


def gpt_oss() -> list[Shapes]:
    """The units of GPT-OSS-120B: 36 layers, and the parameters around them."""
    width, heads, keys, experts, vocabulary = 2880, 4096, 512, 128, 201088
    layer = {
        "self_attn.q_proj.weight": (heads, width),
        "self_attn.q_proj.bias": (heads,),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (width, heads),
        "self_attn.o_proj.bias": (width,),
        "self_attn.sinks": (64,),
        "mlp.router.weight": (experts, width),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, width, 2 * width),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * width),
        "mlp.experts.down_proj": (experts, width, width),
        "mlp.experts.down_proj_bias": (experts, width),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    around = {
        "embed_tokens.weight": (vocabulary, width),
        "norm.weight": (width,),
        "lm_head.weight": (vocabulary, width),
    }
    return [layer] * 36 + [around]


def deepseek_v3(*, stacked: bool = False) -> list[Shapes]:
    """The units of DeepSeek-V3: 3 dense layers, 58 with experts, and the parameters around them. `stacked`: one tensor
    for each matrix of all routed experts, as for grouped products."""
    width, hidden, experts, vocabulary = 7168, 2048, 256, 129280

    def mlp(prefix: str, hidden: int, *stack: int) -> Shapes:
        wide, narrow = (*stack, hidden, width), (*stack, width, hidden)
        return {f"{prefix}.{name}.weight": wide for name in ("gate_proj", "up_proj")} | {
            f"{prefix}.down_proj.weight": narrow
        }

    attention = {
        "self_attn.q_a_proj.weight": (1536, width),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.q_b_proj.weight": (128 * 192, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (512 + 64, width),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (128 * 256, 512),
        "self_attn.o_proj.weight": (width, 128 * 128),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    routed: dict[str, tuple[int, ...]] = {}
    for each in range(0 if stacked else experts):
        routed.update(mlp(f"mlp.experts.{each}", hidden))
    if stacked:
        routed.update(mlp("mlp.experts", hidden, experts))
    gate = {"mlp.gate.weight": (experts, width), "mlp.gate.e_score_correction_bias": (experts,)}
    layer = {**attention, **gate, **routed, **mlp("mlp.shared_experts", hidden)}
    around = {
        "embed_tokens.weight": (vocabulary, width),
        "norm.weight": (width,),
        "lm_head.weight": (vocabulary, width),
    }
    return [{**attention, **mlp("mlp", 18432)}] * 3 + [layer] * 58 + [around]


def planned(shapes: Shapes, rows: int, world: int, *, shared: bool = True) -> PlannedLayout:
    """The layout of a unit with blocks of `rows` rows on the matrices of experts; without the shared one on request."""
    return plan(*_arguments(shapes, rows, shared=shared), world=world, align=ALIGN)


def _arguments(shapes: Shapes, rows: int, *, shared: bool = True) -> tuple[list[ParamSpec], dict[str, Grain]]:
    cut = [name for name in shapes if "experts" in name and not name.endswith("bias")]
    grain = Blocks(rows)
    params = [ParamSpec(name, shape) for name, shape in shapes.items()]
    return params, {name: grain for name in cut if shared or "shared" not in name}


def percent(layout: PlannedLayout) -> float:
    """Padding in percent of the parameters' elements."""
    return 100 * layout.padding / sum(span.numel for span in layout.spans)


def check(layout: PlannedLayout) -> None:
    """Require of every piece of every rank that it begins and ends where parameters may be cut, and that the pieces
    hold each parameter exactly once.

    Raises:
        AssertionError: they do not.
    """
    held = [0] * len(layout.params)
    for rank in range(layout.world):
        for owned in layout.owned(rank):
            numel, grain = layout.params[owned.index].numel, layout.grains[owned.index]
            assert held[owned.index] == owned.in_param.start, layout.params[owned.index].name
            assert owned.in_param.start % grain == 0, layout.params[owned.index].name
            assert owned.in_param.stop in (numel, owned.in_param.stop // grain * grain), layout.params[owned.index].name
            held[owned.index] = owned.in_param.stop
    assert held == [param.numel for param in layout.params]


def line(model: str, unit: Shapes, rows: int, *, shared: bool = True) -> str:
    """A line of the table."""
    cells = []
    for world in RANKS:
        layout = planned(unit, rows, world, shared=shared)
        check(layout)
        cells.append(f"{percent(layout):.2f} % ({len(layout.segments)})")
    return f"| {model} | {rows} | {' | '.join(cells)} |"


def table() -> list[str]:
    """The lines of the table."""
    separate, stacked = deepseek_v3()[3], deepseek_v3(stacked=True)[3]
    found = [f"| layer of | rows of a block | {' | '.join(f'{world} ranks' for world in RANKS)} |"]
    found.append("|---" * (len(RANKS) + 2) + "|")
    found += [line("GPT-OSS-120B", gpt_oss()[0], rows) for rows in ROWS]
    found += [line("DeepSeek-V3", separate, rows) for rows in ROWS]
    found += [line("DeepSeek-V3, experts stacked", stacked, rows) for rows in ROWS]
    found += [
        line("DeepSeek-V3, experts stacked, the shared one cut anywhere", stacked, rows, shared=False) for rows in ROWS
    ]
    return found


def seconds_of(units: list[Shapes], rows: int, world: int) -> float:
    """Seconds of one core for planning a whole model, in a process that has planned no equal unit."""
    _search.cache_clear()
    arguments = [_arguments(unit, rows) for unit in units]
    start = time.process_time()
    for params, grains in arguments:
        plan(params, grains, world=world, align=ALIGN)
    return time.process_time() - start


def main() -> int:
    """Print the table and times; 1 if the table is not the stored one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the stored table")
    write = parser.parse_args().write
    for name, units in (("GPT-OSS-120B", gpt_oss()), ("DeepSeek-V3", deepseek_v3())):
        print(f"{name}, whole model at 1024 ranks: {seconds_of(units, 128, 1024):.2f} s of one core")
    lines = table()
    print("\n".join(lines))
    text = RESULTS.read_text() if RESULTS.exists() else ""
    if write:
        before = text.partition("| layer of")[0]
        RESULTS.write_text(before + "\n".join(lines) + "\n")
        return 0
    stored = [each for each in text.splitlines() if each.startswith("|")]
    print("equal to the stored table" if stored == lines else "NOT equal to the stored table")
    return int(stored != lines)


if __name__ == "__main__":
    sys.exit(main())
