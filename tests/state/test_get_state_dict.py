"""torch's `get_state_dict` and `set_state_dict` on flatfsdp models, without `as_torch.install()`, and FSDP1's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import FullyShardedDataParallel as Torchs
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsPolicy

from flatfsdp import FullyShardedDataParallel as FSDP
from tests.conftest import Run
from tests.harness.corners import HYBRID, Net, Setting, data, joined, loss_of, seeded
from tests.harness.models import Feedforward
from tests.harness.thorough import some
from tests.state.optim.test_optim_state import different

pytestmark = pytest.mark.distributed

BOTH = (Setting(orig=True), Setting(orig=False))
OPTIONS = {
    "sharded": {},
    "on the CPU": {"cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "whole": {"full_state_dict": True},
}


class Normed(nn.Module):
    """Units inside of a plain module, buffers, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.norm = nn.BatchNorm1d(3)
        self.norm.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def made(setting: Setting | None) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = seeded(Normed)
    if setting is None:
        model = Torchs(
            model, auto_wrap_policy=TorchsPolicy({Feedforward}), use_orig_params=True, device_id=torch.device("cpu")
        )
    else:
        model = setting.wrap(model, (Feedforward,))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def stepped(rank: int, setting: Setting | None) -> tuple[Any, torch.optim.Optimizer]:
    model, optim = made(setting)
    loss_of(model(data(rank, 0))).backward()
    optim.step()
    optim.zero_grad()
    return model, optim


def whole(model: Any, optim: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    return model.state_dict(), FSDP.full_optim_state_dict(model, optim, rank0_only=False)


def saved(rank: int, world: int, path: str, setting: Setting | None) -> Any:
    warnings.simplefilter("ignore", FutureWarning)  # of FSDP1
    model, optim = stepped(rank, setting)
    for name, options in OPTIONS.items():
        of_model, of_optim = dcp_state.get_state_dict(model, optim, options=StateDictOptions(**options))
        dcp.save({"model": of_model, "optim": of_optim}, checkpoint_id=f"{path}/{name}")
    return whole(model, optim) if setting is not None else whole(*stepped(rank, BOTH[0]))


def loaded(rank: int, world: int, path: str, setting: Setting, expected: Any) -> list[str]:
    warnings.simplefilter("ignore", FutureWarning)
    lines = []
    for number, (name, options) in some([*enumerate(OPTIONS.items())], 2, world):
        # One that has stepped has no states of parameters of which its rank holds nothing.
        model, optim = stepped(rank, setting) if (number // 2 + setting.orig) % 2 == 0 else made(setting)
        chosen = StateDictOptions(**options)
        of_model, of_optim = dcp_state.get_state_dict(model, optim, options=chosen)
        state = {"model": of_model, "optim": of_optim}
        if of_optim or not options.get("full_state_dict"):
            dcp.load(state, checkpoint_id=f"{path}/{name}")
        dcp_state.set_state_dict(
            model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"], options=chosen
        )
        of_model, of_optim = whole(model, optim)
        what = f"{setting}, {name}"
        buffers = {key for key, _ in model.named_buffers()}
        lines += [
            f"{what}: {key}"
            for key, value in expected[0].items()
            if key not in buffers and not torch.equal(of_model[key], value)
        ]
        lines += [f"{what}: {line}" for line in different(of_optim["state"], expected[1]["state"])]
    return lines


@pytest.mark.parametrize("setting", [*BOTH, None], ids=str)
def test_what_torch_gets_is_what_torch_sets(run: Run, tmp_path: Path, setting: Setting | None) -> None:
    expected = run(2, saved, str(tmp_path), setting)[0]
    for world, target in ((2, BOTH[setting is BOTH[0]]), (3, setting or BOTH[0])):
        assert not joined(run(world, loaded, str(tmp_path), target, expected))


def test_of_hybrids(run: Run, tmp_path: Path) -> None:
    expected = run(4, saved, str(tmp_path), HYBRID[0])[0]
    assert not joined(run(2, loaded, str(tmp_path), BOTH[0], expected))
