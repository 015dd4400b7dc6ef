"""The programs and their arguments, as `tests.harness.programs` runs them."""

from __future__ import annotations

from tests.harness.programs import Case

TITAN, ACCELERATE, TRANSFORMERS = ("torchtitan",), ("accelerate", "transformers"), ("transformers",)
LIGHTNING, PEFT, TRL = ("lightning",), ("accelerate", "transformers", "peft"), ("trl", "peft")
RESUMED, LOADED = ("first-", ""), ("", "again-")
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def titan(name: str, *arguments: str, ranks: int = 2, **more: object) -> Case:
    return Case(f"torchtitan: Llama 3, {name}", "with_torchtitan.py", arguments, TITAN, ranks, **more)  # type: ignore[arg-type]


def sharded(name: str, program: str, arguments: tuple[str, ...], *more: object, **others: object) -> Case:
    """A case whose reference does not offload: torch's pins offloaded tensors, for which it needs an accelerator."""
    theirs = tuple(each for each in arguments if each != "offload")
    return Case(name, program, arguments, *more, theirs=theirs, **others)  # type: ignore[arg-type]


CASES = [
    titan("FSDP", "fsdp"),
    titan("FSDP, activation checkpointing, bf16, accumulated", "fsdp", "ac", "bf16", "accumulate", "always"),
    titan("FSDP, tied embeddings", "fsdp", "tied"),
    titan("FSDP, each from the other's checkpoint", "fsdp", "from={other}/checkpoint", runs=(("fsdp", "save"),)),
    titan("HSDP 2x2", "hsdp", ranks=4),
    titan("FSDP + TP 2x2, sequence parallel", "tp", ranks=4),
    titan("FSDP + TP 2x2, activation checkpointing, bf16", "tp", "ac", "bf16", "no-sp", ranks=4),
    titan("HSDP + TP 2x2x2, sequence parallel", "hsdp-tp", ranks=8),
    titan(
        "FSDP + TP 2x2, each from the other's checkpoint", "tp", "from={other}/checkpoint", ranks=4,
        runs=(("tp", "save"),),
    ),
    titan("FSDP + PP 2x2, 1F1B", "pp", ranks=4),
    titan("FSDP by full DTensors", "fsdp", "full-dtensor"),
    titan("HSDP 2x2 by full DTensors", "hsdp", "full-dtensor", ranks=4),
    titan("FSDP + TP 2x2 by full DTensors", "tp", "full-dtensor", ranks=4),
    titan("FSDP + TP 2x2, float8", "tp", "float8", ranks=4),
    titan("FSDP, LoRA", "fsdp", "lora"),
    Case("torchtitan: Qwen 3 with experts, FSDP", "with_torchtitan.py", ("fsdp", "experts"), TITAN),
    Case("torchtitan: Qwen 3 with experts, FSDP + TP 2x2, experts over 2", "with_torchtitan.py", ("etp", "experts"),
         TITAN, 4),
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
    sharded("accelerate: offload, size-based units, save_model", "with_accelerate.py",
         (SHARDED, "eager", "offload", "size", "weights"), ACCELERATE),
    Case("accelerate: LoRA, each from the other's state", "with_accelerate.py",
         (SHARDED, "llama", "lora", "load={other}"), PEFT, runs=((SHARDED, "llama", "lora", "save"),)),
    Case("accelerate: LoRA, bf16, activation checkpointing", "with_accelerate.py",
         (FULL, "llama", "lora", "bf16", "ac"), PEFT),
    Case("accelerate: HSDP 2x2", "with_accelerate.py", (SHARDED, "llama", "hsdp"), ACCELERATE, 4),
    *(
        sharded(f"accelerate, FSDP1: {name}", "with_accelerate.py", (kind, "v1", *options), ACCELERATE, runs=runs)
        for name, kind, options, runs in (
            ("flat parameters, save_state and load_state", FULL, ("flat", "unclipped", "load"),
             ((FULL, "v1", "flat", "unclipped", "save"),)),
            ("bf16, activation checkpointing, SHARD_GRAD_OP", FULL,
             ("llama", "unclipped", "bf16", "ac", "keep"), ()),
            ("offload, size-based units, save_model", FULL, ("unclipped", "offload", "size", "weights"), ()),
        )
    ),
    # FSDP1 adds up norms in the order of a set.
    Case("accelerate, FSDP1: clipped", "with_accelerate.py", (FULL, "v1"), ACCELERATE, bound=1e-5),
    *(
        sharded(f"transformers: Trainer, {name}", "with_trainer.py", arguments, needs, parts=RESUMED)
        for name, needs, arguments in (
            ("sharded checkpoints", ACCELERATE, (SHARDED,)),
            ("full checkpoints, tied, evaluated", ACCELERATE, (FULL, "tied", "evaluate")),
            ("bf16, activation checkpointing", ACCELERATE, (SHARDED, "bf16", "ac")),
            ("LoRA", PEFT, (FULL, "lora", "evaluate")),
            ("offload", ACCELERATE, (FULL, "offload")),
        )
    ),
    *(
        Case(f"TRL: {name}", "with_trl.py", options, TRL)
        for name, options in (
            ("SFTTrainer, LoRA", ("sft", "lora")),
            ("SFTTrainer, bf16, packed", ("sft", "bf16", "packed")),
            ("DPOTrainer with a reference model", ("dpo",)),
            ("DPOTrainer, LoRA, activation checkpointing", ("dpo", "lora", "ac")),
        )
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
    Case("torchao: float8 gathered by torchao, FSDP + TP 2x2", "with_torchao.py", ("gather", "tp"), ("torchao",), 4,
         theirs=("tp",)),
    *(
        Case(f"Lightning: ModelParallelStrategy, {name}", "with_lightning.py", options, LIGHTNING, ranks, parts=RESUMED)
        for name, ranks, options in (
            ("sharded checkpoint", 2, ()),
            ("one file, bf16, accumulated", 2, ("one-file", "bf16", "accumulate")),
            ("FSDP + TP 2x2", 4, ("tp",)),
        )
    ),
]  # fmt: skip
