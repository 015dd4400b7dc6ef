"""Frozen parameters that stay unsharded, and models under `inference()`, as counts, bytes and events."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, MixedPrecision, inference, stats, summary
from flatfsdp.errors import ConfigTypeError, ConfigValueError, UsageError
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice
from tests.harness.models import Low

pytestmark = pytest.mark.single_process

WIDTH, WORLD, UNITS = 16, 4, 3  # without padding
BASE = (WIDTH * WIDTH + WIDTH) * 4  # bytes of the frozen part of a unit, unsharded
ADAPTER = 2 * 3 * WIDTH * 4
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def adapted(**options: Any) -> FullyShardedDataParallel:
    """Units of a frozen base and a trainable adapter each; the root owns nothing."""
    model = nn.Sequential(*(Low(WIDTH) for _ in range(UNITS)))
    options = {"use_orig_params": True, "auto_wrap_policy": {Low}} | options
    return FullyShardedDataParallel(model, **options)


def gathers(model: nn.Module, *, grad: bool = True) -> tuple[int, int]:
    """The number of gathers that a step issues (a forward, without gradients), and the bytes gathered."""
    figures = stats(model)
    figures.reset()
    with torch.set_grad_enabled(grad):
        loss: Tensor = model(torch.ones(2, WIDTH)).sum()
        if grad:
            loss.backward()
    return figures.comm.get("all_gather", (0, 0))


def live(model: FullyShardedDataParallel) -> dict[str, int]:
    """Bytes in use besides the shards."""
    return {kind: count for kind, count in inspect.memory(model).live.items() if count and kind != "shard"}


@contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    for part in words:
        assert part in str(caught.value)


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("on", ["device", "host"])
def test_what_is_frozen_is_gathered_once(on: str, orig: bool) -> None:
    with fake_world(WORLD):
        model = adapted(use_orig_params=orig)
        kept = {"unsharded": UNITS * BASE} if on == "device" else {"host copy": UNITS * BASE}
        assert gathers(model)[0] == 2 * 2 * UNITS
        model.zero_grad()
        model.keep_frozen_unsharded(on=on)
        assert live(model) == {}
        adapters = 2 * UNITS, 2 * UNITS * ADAPTER
        assert gathers(model) == (adapters[0] + UNITS, adapters[1] + UNITS * BASE)
        for _ in range(2):
            model.zero_grad()
            assert live(model) == kept
            assert gathers(model) == adapters
            assert gathers(model, grad=False) == (UNITS, UNITS * ADAPTER)
        model.zero_grad()
        model.keep_frozen_unsharded(0)
        assert live(model) == {}
        assert gathers(model)[0] == 2 * 2 * UNITS


def kept_units(model: nn.Module) -> list[str]:
    return [line.split()[0] for line in summary(model).splitlines() if "kept on" in line]


@pytest.mark.parametrize(
    ("budget", "expected"), [(BASE - 1, 0), (BASE, 1), (3 * BASE - 1, 2), (3 * BASE, 3), (None, 3)]
)
def test_the_budget_is_of_bytes_on_the_device(budget: int | None, expected: int) -> None:
    with fake_world(WORLD):
        model = adapted()
        model.keep_frozen_unsharded(budget)
        assert len(kept_units(model)) == expected
        gathers(model)
        model.zero_grad()
        assert live(model) == ({"unsharded": expected * BASE} if expected else {})
        assert gathers(model)[0] == 2 * (2 * UNITS - expected)


def test_bytes_are_those_of_the_dtype_of_computation() -> None:
    with fake_world(WORLD):
        model = adapted(mixed_precision=LOW)
        model.keep_frozen_unsharded(UNITS * BASE // 2)
        assert "float32 frozen as bfloat16, kept on the device (544 bytes)" in summary(model)
        gathers(model)
        model.zero_grad()
        assert live(model) == {"unsharded": UNITS * BASE // 2}


@pytest.mark.parametrize("on", ["device", "host"])
def test_what_is_unsharded_when_it_is_to_be_kept_is_not_gathered_again(on: str) -> None:
    """It stayed so after the backward before."""
    with fake_world(WORLD):
        model = adapted()
        model.set_reshard_after_backward(False)
        gathers(model)
        model.zero_grad()
        model.keep_frozen_unsharded(on=on)
        assert gathers(model, grad=False) == (0, 0)
        assert gathers(model) == (2 * UNITS, 2 * UNITS * ADAPTER)
        assert live(model).get("host copy", 0) == (UNITS * BASE if on == "host" else 0)


@pytest.mark.parametrize("on", ["device", "host"])
def test_a_unit_that_is_trained_after_all_is_not_kept(on: str) -> None:
    with fake_world(WORLD):
        model = adapted()
        model.keep_frozen_unsharded(on=on)
        gathers(model)
        first = model[0].module.base
        first.requires_grad_(True)
        assert gathers(model)[0] == 2 * UNITS + 2
        model.zero_grad()
        assert sum(live(model).values()) == 2 * BASE
        first.requires_grad_(False)
        assert gathers(model)[0] == 2 * UNITS + 1
        model.zero_grad()
        assert sum(live(model).values()) == 3 * BASE


@pytest.mark.parametrize("change", ["a load", "in place", "data", "float64"])
@pytest.mark.parametrize("on", ["device", "host"])
def test_what_was_written_to_is_gathered_anew(change: str, on: str) -> None:
    with fake_world(WORLD):
        model = adapted()
        model.keep_frozen_unsharded(on=on)
        gathers(model)
        assert gathers(model)[0] == 2 * UNITS
        base = model[0].module.base.weight
        if change == "a load":
            model.load_state_dict({"0.base.weight": torch.zeros(WIDTH, WIDTH)}, strict=False)
        elif change == "in place":
            with torch.no_grad():
                base.zero_()
        elif change == "data":
            base.data = torch.zeros_like(base.data)
        else:
            model.double()
            with torch.no_grad():
                assert model(torch.ones(2, WIDTH, dtype=torch.float64)).dtype == torch.float64
            model.float()
        model.zero_grad()
        assert gathers(model)[0] == 2 * UNITS + (3 if change == "float64" else 1)
        assert gathers(model)[0] == 2 * UNITS


def test_copies_keep_the_same() -> None:
    with fake_world(WORLD):
        model = adapted()
        model.keep_frozen_unsharded(2 * BASE)
        gathers(model)
        model.zero_grad()
        twin = copy.deepcopy(model)
        assert kept_units(twin) == kept_units(model) and live(twin) == {}
        gathers(twin)
        assert gathers(twin)[0] == gathers(model)[0] == 2 * (2 * UNITS - 2)


@pytest.mark.parametrize("on", ["device", "host"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_uploads_and_kept_memory_race_with_nothing(strategy: str, on: str) -> None:
    with FakeDevice() as device, fake_world(WORLD):
        model = adapted(sharding_strategy=strategy, mixed_precision=LOW)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model.keep_frozen_unsharded(on=on)
        for _ in range(3):
            gathers(model)
            optimizer.step()
            optimizer.zero_grad()
        with inference(model):
            gathers(model, grad=False)
        gathers(model)
    assert device.races == []


def test_nothing_is_gathered_inside_inference() -> None:
    with fake_world(WORLD):
        model = adapted()
        gathers(model)
        model.zero_grad()
        figures = stats(model)
        figures.reset()
        with inference(model):
            assert figures.comm["all_gather"] == (2 * UNITS, UNITS * (BASE + ADAPTER))
            assert live(model) == {"unsharded": UNITS * (BASE + ADAPTER)}
            for _ in range(3):
                assert gathers(model, grad=False) == (0, 0)
                assert "scalar" not in figures.comm
        assert live(model) == {}
        assert gathers(model)[0] == 4 * UNITS


@pytest.mark.parametrize(("budget", "kept"), [(0, 0), (BASE, 1), (BASE + ADAPTER, 2), (2 * BASE, 3), (10**6, 6)])
def test_inference_keeps_what_the_budget_allows(budget: int, kept: int) -> None:
    with fake_world(WORLD):
        model = adapted()
        with inference(model, budget):
            assert sum(live(model).values()) <= budget
            assert gathers(model, grad=False)[0] == 2 * UNITS - kept
        assert live(model) == {}


@pytest.mark.parametrize("on", ["device", "host"])
def test_inference_leaves_what_is_kept_as_it_was(on: str) -> None:
    with fake_world(WORLD):
        model = adapted()
        model.keep_frozen_unsharded(on=on)
        gathers(model)
        model.zero_grad()
        before = live(model)
        figures = stats(model)
        figures.reset()
        with inference(model, UNITS * (ADAPTER if on == "device" else ADAPTER + BASE)):
            assert figures.comm["all_gather"] == (UNITS, UNITS * ADAPTER)
            assert gathers(model, grad=False) == (0, 0)
        assert live(model) == before
        assert gathers(model)[0] == 2 * UNITS


def test_a_failed_forward_inside_inference_leaves_all_kept() -> None:
    with fake_world(WORLD):
        model = adapted()
        with inference(model):
            with pytest.raises(RuntimeError):
                model(torch.ones(2, WIDTH + 1))
            assert gathers(model, grad=False) == (0, 0)
        with pytest.raises(KeyError), inference(model):
            raise KeyError
        assert live(model) == {}
        assert gathers(model)[0] == 4 * UNITS


def test_what_inference_refuses() -> None:
    with fake_world(WORLD):
        model = adapted()
        loss = model(torch.ones(2, WIDTH)).sum()
        with inference(model):
            with torch.enable_grad(), refused(UsageError, "a forward of unit <root> inside inference() has gradients"):
                model(torch.ones(2, WIDTH))
            with refused(UsageError, "a backward was started inside inference()"):
                loss.backward()
            with refused(UsageError, "inference() of unit '0' was entered inside inference()"), inference(model):
                pass
            with refused(UsageError, "keep_frozen_unsharded of unit <root> was called inside inference()"):
                model.keep_frozen_unsharded()
            model[0].module.up.weight.zero_()
            with refused(UsageError, "inside inference(), parameters of unit '0' were written to"):
                model(torch.ones(2, WIDTH))
        gathers(model)
        summoned = FullyShardedDataParallel.summon_full_params(model)
        with summoned, refused(UsageError, "was entered inside summon_full_params()"), inference(model):
            pass
        with refused(UsageError, "no module in Linear is wrapped"), inference(nn.Linear(1, 1)):
            pass


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_bytes": "1G"}, ConfigTypeError, "max_bytes: got '1G' (str). Accepted: 0 or more bytes, or None"),
        ({"max_bytes": True}, ConfigTypeError, "max_bytes: got True"),
        ({"max_bytes": -1}, ConfigValueError, "max_bytes: got -1. Accepted: 0 or more bytes"),
        ({"on": "disk"}, ConfigValueError, "on: got 'disk'. Accepted: 'device' or 'host'"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with fake_world(WORLD):
        model = adapted()
        with refused(error, "keep_frozen_unsharded: ", words):
            model.keep_frozen_unsharded(**arguments)
        if "max_bytes" in arguments:
            with refused(error, "inference: ", words), inference(model, **arguments):
                pass
