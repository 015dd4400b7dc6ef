"""The public enums and configs beside torch's own: equal names, values, fields, defaults and order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp._common_utils import TrainingState as TorchTrainingState

from flatfsdp import api
from flatfsdp.api import CPUOffload, MixedPrecision
from flatfsdp.errors import ConfigTypeError, ConfigValueError


@pytest.mark.parametrize(
    ("ours", "torchs", "only_ours"),
    [
        (api.ShardingStrategy, torch_fsdp.ShardingStrategy, []),
        (api.BackwardPrefetch, torch_fsdp.BackwardPrefetch, [("BACKWARD_MID", 3)]),
        (api.TrainingState, TorchTrainingState, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_enums_have_torchs_names_and_values_then_our_own(ours, torchs, only_ours):
    assert ours.__name__ == torchs.__name__
    described = [[(member.name, member.value) for member in kind] for kind in (ours, torchs)]
    assert described[0] == described[1] + only_ours


@pytest.mark.parametrize(
    ("ours", "torchs", "only_ours"),
    [
        (MixedPrecision, torch_fsdp.MixedPrecision, [("accumulate_dtype", None), ("full_precision_in_eval", False)]),
        (CPUOffload, torch_fsdp.CPUOffload, [("pin_memory", True)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_configs_have_torchs_fields_defaults_and_order_then_our_own(ours, torchs, only_ours):
    described = [[(field.name, field.default) for field in dataclasses.fields(kind)] for kind in (ours, torchs)]
    assert described[0] == described[1] + only_ours


def test_configs_are_values():
    assert MixedPrecision(torch.float16) == MixedPrecision(param_dtype=torch.float16) != MixedPrecision()
    assert hash(CPUOffload(True)) == hash(CPUOffload(offload_params=True))
    with pytest.raises(dataclasses.FrozenInstanceError):
        MixedPrecision().param_dtype = torch.float16  # type: ignore[misc]


def test_module_classes_to_ignore_takes_any_collection():
    assert MixedPrecision(_module_classes_to_ignore=[nn.LayerNorm])._module_classes_to_ignore == (nn.LayerNorm,)
    assert MixedPrecision(_module_classes_to_ignore=())._module_classes_to_ignore == ()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: MixedPrecision(param_dtype="bf16"),
            ConfigTypeError,
            "MixedPrecision.param_dtype: got 'bf16' (str). Accepted: a floating-point torch.dtype, or None.",
        ),
        (
            lambda: MixedPrecision(accumulate_dtype=torch.int32),
            ConfigValueError,
            "MixedPrecision.accumulate_dtype: got torch.int32. Accepted: a floating-point torch.dtype, or None.",
        ),
        (
            lambda: MixedPrecision(cast_forward_inputs=None),
            ConfigTypeError,
            "MixedPrecision.cast_forward_inputs: got None (NoneType). Accepted: True or False.",
        ),
        (
            lambda: MixedPrecision(_module_classes_to_ignore=[nn.Linear(2, 2)]),
            ConfigTypeError,
            "MixedPrecision._module_classes_to_ignore: got Linear(in_features=2, out_features=2, bias=True) (Linear). "
            "Accepted: a collection of module classes. Pass its class, Linear.",
        ),
        (lambda: CPUOffload(1), ConfigTypeError, "CPUOffload.offload_params: got 1 (int). Accepted: True or False."),
        (
            lambda: CPUOffload(True, pin_memory="yes"),
            ConfigTypeError,
            "CPUOffload.pin_memory: got 'yes' (str). Accepted: True or False.",
        ),
    ],
)
def test_a_wrong_field_is_refused_when_the_config_is_made(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message
