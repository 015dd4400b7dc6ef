"""The programs and their arguments, as `tests.harness.programs` runs them."""

from __future__ import annotations

from tests.harness.programs import Case

TITAN, ACCELERATE, TRANSFORMERS = ("torchtitan",), ("accelerate", "transformers"), ("transformers",)
LIGHTNING = ("lightning",)
RESUMED, LOADED = ("first-", ""), ("", "again-")
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def titan(name: str, *arguments: str, ranks: int = 2, **more: object) -> Case:
    return Case(f"torchtitan: Llama 3, {name}", "with_torchtitan.py", arguments, TITAN, ranks, **more)  # type: ignore[arg-type]


CASES = [
    titan("FSDP", "fsdp"),
    titan("FSDP, activation checkpointing, bf16, accumulated", "fsdp", "ac", "bf16", "accumulate", "always"),
    titan("FSDP, tied embeddings", "fsdp", "tied"),
    titan("FSDP from torch's checkpoint", "fsdp", "from={theirs}/checkpoint", runs=(("fsdp", "save"),)),
    titan("HSDP 2x2", "hsdp", ranks=4),
    titan("FSDP + TP 2x2, sequence parallel", "tp", ranks=4),
    titan("FSDP + TP 2x2, activation checkpointing, bf16", "tp", "ac", "bf16", "no-sp", ranks=4),
    titan("FSDP + PP 2x2, 1F1B", "pp", ranks=4),
    Case("accelerate: meta load", "with_accelerate.py", (SHARDED,), ACCELERATE),
    Case("accelerate: bf16, activation checkpointing", "with_accelerate.py", (FULL, "bf16", "ac"), ACCELERATE),
    Case("accelerate: no meta load, units kept", "with_accelerate.py", (FULL, "eager", "keep"), ACCELERATE),
    Case("accelerate: a tied Llama", "with_accelerate.py", (FULL, "llama", "tied"), ACCELERATE),
    *(
        Case(
            f"accelerate: a Llama, save_state and load_state, {kind}",
            "with_accelerate.py",
            (kind, "llama", "load"),
            ACCELERATE,
            parts=("saved-", ""),
            runs=((kind, "llama", "save"),),
        )
        for kind in (FULL, SHARDED)
    ),
    *(
        Case(f"transformers: Trainer, {name}", "with_trainer.py", arguments, ACCELERATE, parts=RESUMED)
        for name, arguments in {
            "sharded checkpoints": (SHARDED,),
            "full checkpoints, tied": (FULL, "tied"),
            "bf16, activation checkpointing": (SHARDED, "bf16", "ac"),
        }.items()
    ),
    *(
        Case(f"transformers: own FSDP, {name}", "with_transformers.py", options, TRANSFORMERS, ranks, parts=LOADED)
        for name, ranks, options in (
            ("2 ranks", 2, ("fsdp=2",)),
            ("bf16", 2, ("fsdp=2", "bf16")),
            ("HSDP 2x2", 4, ("fsdp=2", "replicate=2")),
            ("FSDP + TP 2x2", 4, ("fsdp=2", "tp=2")),
        )
    ),
    Case("torchao: float8", "with_torchao.py", ("clip",), ("torchao",)),
    # torch's gathers nothing in float8 on gloo: its yardstick gathers in full precision, and rounds after that.
    Case("torchao: float8, gathered in float8", "with_torchao.py", ("gather",), ("torchao",), theirs=()),
    *(
        Case(f"Lightning: ModelParallelStrategy, {name}", "with_lightning.py", options, LIGHTNING, ranks, parts=RESUMED)
        for name, ranks, options in (
            ("sharded checkpoint", 2, ()),
            ("one file, bf16, accumulated", 2, ("one-file", "bf16", "accumulate")),
            ("FSDP + TP 2x2", 4, ("tp",)),
        )
    ),
]  # fmt: skip
