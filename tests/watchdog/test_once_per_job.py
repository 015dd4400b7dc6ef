"""Warnings of ranks that train: once per job if all ranks raise it, else on the one rank that does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.errors import FlatFSDPWarning
from tests.conftest import Run

pytestmark = pytest.mark.distributed


class Opaque(nn.Module):
    """Returns its output in an object that hides it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return _Box(self.linear(x))


class _Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def no_parameters(rank: int) -> None:
    FSDP(nn.ReLU())(torch.ones(1, 4))


def nothing_to_anchor(rank: int) -> None:
    model = FSDP(nn.Sequential(Opaque()), auto_wrap_policy={Opaque}, sync_module_states=True)
    model(torch.ones(1, 4)).value.sum().backward()


def assigned(rank: int) -> None:
    model = FSDP(nn.Linear(4, 4), use_orig_params=True)
    model.load_state_dict(nn.Linear(4, 4).double().state_dict(), assign=True)


def values_differ(rank: int) -> None:
    torch.manual_seed(rank)
    model = FSDP(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()


def _fail(grad: torch.Tensor) -> None:
    raise ValueError("planned")


def fails(who: tuple[int, ...]) -> Callable[[int], None]:
    def program(rank: int) -> None:
        """A hook raises in the second microbatch, on some ranks."""
        torch.manual_seed(0)
        model: Any = FSDP(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            sharding_strategy="SHARD_GRAD_OP",
            auto_wrap_policy={nn.Linear},
            use_orig_params=True,
        )
        with model.no_sync():  # nothing is sent in these backwards
            model(torch.ones(1, 4)).sum().backward()
            x = torch.ones(1, 4, requires_grad=True)
            if rank in who:
                x.register_hook(_fail)
            loss = model(x).sum()
            with pytest.raises(ValueError, match="planned") if rank in who else nullcontext():
                loss.backward()

    return program


PROGRAMS: dict[str, tuple[Callable[[int], None], str, set[str]]] = {
    "no parameters": (no_parameters, "no unit of it has parameters", {""}),
    "nothing to anchor": (nothing_to_anchor, "its forward returned no tensor that requires a gradient", {""}),
    "assigned": (assigned, "load_state_dict(assign=True)", {""}),
    "values differ": (values_differ, "ranks begin with different values", {""}),
    "all fail": (fails((0, 1)), "a backward failed inside an accumulation window", {"rank 0: ", "rank 1: "}),
    "rank 1 fails": (fails((1,)), "a backward failed inside an accumulation window", {"rank 1: "}),
}


def reported(rank: int, world: int, case: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PROGRAMS[case][0](rank)
    return [str(each.message) for each in caught if issubclass(each.category, FlatFSDPWarning)]


@pytest.mark.parametrize("case", list(PROGRAMS))
def test_it_is_reported_once_per_job(pool2: Run, case: str) -> None:
    _, words, begins = PROGRAMS[case]
    for _ in range(2 if case == "rank 1 fails" else 1):  # each rank counts its own warnings
        results = pool2(reported, case)
        (text,) = (text for texts in results for text in texts if words in text)
        before, _, _ = text.partition(words)
        assert any(before.startswith(each) for each in begins) and ("rank" in before) == (begins != {""}), text
        if case == "rank 1 fails":
            assert text in results[1]
