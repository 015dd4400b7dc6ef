"""A flat parameter between its uses."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import InternalError
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


def test_the_unsharded_form_that_is_not_there_is_refused_by_its_units_name() -> None:
    with fake_world(2):
        inner = FullyShardedDataParallel(nn.Linear(3, 2), use_orig_params=True)
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 3), inner), use_orig_params=True)
        model(torch.ones(1, 3))
        handle = inner._handle
        assert handle.unsharded.buffer is None
        with pytest.raises(InternalError, match=re.escape("unit '1': 'flat' of the unsharded parameters weight, bias")):
            _ = handle.unsharded.flat
