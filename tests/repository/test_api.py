"""The public enums and configs compared with torch's own: equal names, values, fields, defaults and order."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp._common_utils import TrainingState as TorchTrainingState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler

from flatfsdp import ShardedGradScaler, api
from flatfsdp.api import CPUOffload, MixedPrecision
from flatfsdp.errors import ConfigTypeError, ConfigValueError

pytestmark = pytest.mark.unit


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
        (
            MixedPrecision,
            torch_fsdp.MixedPrecision,
            [
                ("accumulate_dtype", None),
                ("full_precision_in_eval", False),
                ("gather_dtype", None),
                ("reduce_bits", None),
                ("reduce_error_feedback", False),
            ],
        ),
        (CPUOffload, torch_fsdp.CPUOffload, [("pin_memory", True)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_configs_have_torchs_fields_defaults_and_order_then_our_own(ours, torchs, only_ours):
    described = [[(field.name, field.default) for field in dataclasses.fields(kind)] for kind in (ours, torchs)]
    assert described[0] == described[1] + only_ours


def parameters_of(function: object) -> list[tuple[str, object, object]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]  # type: ignore[arg-type]


def test_the_scaler_has_the_signatures_of_torchs():
    theirs = {name: value for name, value in vars(TorchScaler).items() if inspect.isfunction(value)}
    # A part of FSDP1's own update(), which the base class does.
    found = {
        name: parameters_of(getattr(ShardedGradScaler, name)) for name in theirs.keys() - {"_amp_update_scale_cpu_"}
    }
    assert found == {name: parameters_of(theirs[name]) for name in found}
    overridden = {name for name, value in vars(ShardedGradScaler).items() if inspect.isfunction(value)} - {"__init__"}
    for name in overridden:
        own, base = (parameters_of(getattr(kind, name)) for kind in (ShardedGradScaler, torch.amp.GradScaler))
        # torch's amp has no default where FSDP1 has one.
        assert [each[:2] for each in own] == [each[:2] for each in base], name


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
