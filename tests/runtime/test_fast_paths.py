"""Layers of torch's that would compute with weights of modules inside of them in evaluation, where these are units."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

WIDTH = 8
PLACES = ["self_attn", "linear1", "linear2", "norm1"]


def layer() -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True).eval()


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(), 2).eval()


def in_place(module: nn.Module) -> nn.Module:
    flatfsdp.fully_shard(module)
    return module


FRONTS: dict[str, Callable[..., Any]] = {
    "fully_shard": in_place,
    "wrapper": FullyShardedDataParallel,
    "flat": lambda module: FullyShardedDataParallel(module, use_orig_params=False),
}
X = torch.linspace(-1, 1, 2 * 3 * WIDTH).view(2, 3, WIDTH)
PADDED = torch.tensor([[False, False, False], [False, False, True]])


def shard_inside(net: nn.Module, front: str, places: list[str]) -> None:
    for each in [each for each in net.modules() if isinstance(each, nn.TransformerEncoderLayer)]:
        for place in places:
            setattr(each, place, FRONTS[front](getattr(each, place)))


def check(net: Any, expected: Tensor, **masks: Any) -> None:
    for _ in "cold", "warm":
        with torch.no_grad():
            found = net(X, **masks)
        kept = ~PADDED if masks else slice(None)
        torch.testing.assert_close(found[kept], expected[kept])


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("places", [*map(lambda place: [place], PLACES), PLACES], ids="+".join)
@pytest.mark.parametrize("world", [1, 2])
def test_a_layer_calls_the_units_inside(front: str, places: list[str], world: int) -> None:
    """They gather there, alone and in a model; with one rank the values can be compared."""
    for outer in False, True:
        with torch.no_grad():
            expected = layer()(X)
        with fake_world(world):
            net: Any = layer()
            shard_inside(net, front, places)
            net = FRONTS[front](net) if outer else net
            if world == 1:
                check(net, expected)
            else:
                with torch.no_grad():
                    assert net(X).shape == X.shape


@pytest.mark.parametrize("front", FRONTS)
def test_an_encoder_makes_no_nested_tensors_for_them(front: str) -> None:
    with torch.no_grad():
        expected = encoder()(X, src_key_padding_mask=PADDED)
    with fake_world(1):
        net: Any = encoder()
        shard_inside(net, front, ["self_attn"])
        check(FRONTS[front](net), expected, src_key_padding_mask=PADDED)


@pytest.mark.parametrize("front", FRONTS)
def test_layers_that_are_units_compute_fast(front: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: (taken.append(1), fast(*args))[1])
    with torch.no_grad():
        expected = encoder()(X, src_key_padding_mask=PADDED)
    with fake_world(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that nested tensors are new
        net: Any = encoder()
        net.layers = nn.ModuleList(map(FRONTS[front], net.layers))
        check(FRONTS[front](net), expected, src_key_padding_mask=PADDED)
    assert len(taken) == 2 + 2 * 2


def test_copies_and_other_models() -> None:
    """Copies are called, too; modules of no such layer have no hook once that is known."""
    with torch.no_grad():
        expected = layer()(X)
    with fake_world(1):
        net: Any = layer()
        shard_inside(net, "fully_shard", ["self_attn"])
        check(copy.deepcopy(in_place(net)), expected)
        check(pickle.loads(pickle.dumps(net)), expected)
        chain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        for module in [*chain, chain]:
            flatfsdp.fully_shard(module)
        chain(X)
        assert not any(module._forward_pre_hooks for module in chain.modules())
