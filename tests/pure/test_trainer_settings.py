"""Settings of the trainer: what dataclasses accept, and how they are read from tables, files and command lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flatfsdp import ShardingStrategy
from flatfsdp.trainer.arguments import FSDPArguments, Task, TrainingArguments
from flatfsdp.trainer.settings import from_dict, to_dict


def test_values_have_one_normal_form() -> None:
    found = FSDPArguments(strategy=ShardingStrategy._HYBRID_SHARD_ZERO2, param_dtype="BF16", backward_prefetch="none")  # type: ignore[arg-type]
    assert found == FSDPArguments(strategy="hybrid-shard-zero2", param_dtype=torch.bfloat16, backward_prefetch=None)
    assert TrainingArguments(output="here", lr=1, resume="best") == TrainingArguments(  # type: ignore[arg-type]
        output=Path("here"), lr=1.0, resume="best"
    )


@pytest.mark.parametrize("settings", [TrainingArguments(), FSDPArguments(param_dtype="half"), Task("a.b:c", "a.b:d")])
def test_what_is_written_is_read_as_the_same(settings: object) -> None:
    assert from_dict(type(settings), json.loads(json.dumps(to_dict(settings)))) == settings
