"""A rank that is alone in a collective call of flatfsdp: an AgreementError on all, for any operation of the others."""

from __future__ import annotations

import inspect
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, checkpoint, messages
from flatfsdp.engine.watchdog import store as stores
from flatfsdp.engine.watchdog import watchdog as watch
from flatfsdp.engine.watchdog.regions import current_watch
from flatfsdp.errors import AgreementError
from flatfsdp.trainer.process_group import TrainerRanks
from tests.agreement.test_agreement import Net, step, wrap
from tests.conftest import Run
from tests.harness.thorough import is_thorough, seeds

pytestmark = pytest.mark.distributed


class Setting:
    """The objects of the calls: a model that has taken two steps, and a folder."""

    def __init__(self, folder: str) -> None:
        torch.manual_seed(0)
        self.model: Any = wrap(Net())
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for _ in range(2):
            step(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.folder = Path(folder)


def infer(setting: Setting) -> None:
    with flatfsdp.inference(setting.model):
        pass


def summon(setting: Setting) -> None:
    with setting.model.summon_full_params(setting.model):
        pass


def gather_a_value(setting: Setting) -> None:
    with FullyShardedDataParallel.state_dict_type(setting.model, "SHARDED"):
        next(iter(setting.model.state_dict().values())).full_tensor()


CALLS: dict[str, Callable[[Setting], Any]] = {
    "FullyShardedDataParallel": lambda s: FullyShardedDataParallel(nn.Linear(4, 4), sync_module_states=True),
    "FullyShardedDataParallel.apply": lambda s: s.model.apply(lambda module: None),
    "FullyShardedDataParallel.full_optim_state_dict": lambda s: s.model.full_optim_state_dict(s.model, s.optimizer),
    "FullyShardedDataParallel.sharded_optim_state_dict": lambda s: s.model.sharded_optim_state_dict(
        s.model, s.optimizer
    ),
    "FullyShardedDataParallel.optim_state_dict": lambda s: s.model.optim_state_dict(s.model, s.optimizer),
    "FullyShardedDataParallel.reduce_accumulated_gradients": lambda s: s.model.reduce_accumulated_gradients(),
    "FullyShardedDataParallel.state_dict": lambda s: s.model.state_dict(),
    "FullyShardedDataParallel.summon_full_params": summon,
    "FullyShardedDataParallel.unshard": lambda s: s.model.unshard(),
    "check_replicas": lambda s: flatfsdp.check_replicas(s.model),
    "inference": infer,
    "checkpoint.async_save": lambda s: checkpoint.async_save(s.folder / "a", model=s.model, overwrite=True),
    "checkpoint.export_safetensors": lambda s: checkpoint.export_safetensors(s.model, s.folder / "b", overwrite=True),
    "checkpoint.keep": lambda s: checkpoint.keep(s.folder),
    "checkpoint.listing": lambda s: checkpoint.listing(s.folder),
    "checkpoint.load": lambda s: checkpoint.load(s.folder / "c", model=s.model),
    "checkpoint.load_safetensors": lambda s: checkpoint.load_safetensors(s.model, s.folder / "b"),
    "checkpoint.save": lambda s: checkpoint.save(s.folder / "c", model=s.model, overwrite=True),
    "full_tensor": gather_a_value,
    "trainer": lambda s: TrainerRanks().values(1),
}
# Collective by their arguments, or in their results, and then by one of the above; or they wait in the backend, where
# no rank can be interrupted (`tests/agreement/test_calls_while_others_train.py`).
ELSEWHERE = {
    "FullyShardedDataParallel.check_is_root",
    "FullyShardedDataParallel.forward",
    "join",
    "FullyShardedDataParallel.clip_grad_norm_",
    "FullyShardedDataParallel.flatten_sharded_optim_state_dict",
    "FullyShardedDataParallel.load_state_dict",
    "FullyShardedDataParallel.optim_state_dict_to_load",
    "FullyShardedDataParallel.scatter_full_optim_state_dict",
    "ShardedGradScaler",
    "register_fsdp_forward_method",
}


def collective() -> Iterator[str]:
    """The public names whose docstrings state that they are collective."""
    says_so = re.compile(
        r"(^|[.:] )Collective\b(?! if nothing)|collective at its|[:;] collective,|calls are collective"
    )
    for prefix, module in (("", flatfsdp), ("checkpoint.", checkpoint)):
        for name in module.__all__:
            each = getattr(module, name)
            doc = " ".join((inspect.getdoc(each) or "").split())
            if says_so.search(doc) and (inspect.isfunction(each) or inspect.isclass(each)):
                yield prefix + name
    for name, method in inspect.getmembers(FullyShardedDataParallel, callable):
        doc = " ".join((inspect.getdoc(method) or "").split())
        if not name.startswith("_") and method.__module__.startswith("flatfsdp") and says_so.search(doc):
            yield f"FullyShardedDataParallel.{name}"


def without_numpy(rank: int, world: int, folder: str, names: list[str]) -> None:
    setting = Setting(folder)
    with patch.object(torch.Tensor, "numpy", side_effect=RuntimeError("Numpy is not available")):
        for name in names:
            CALLS[name](setting)
        assert messages.gather(torch.full((3,), rank), dist.group.WORLD, call="gathers")[1].tolist() == [1, 1, 1]


def test_no_call_needs_numpy(pool2: Run, tmp_path: Path) -> None:
    """torch alone is enough for exchanges between ranks on the host."""
    names = [f"FullyShardedDataParallel.{name}" for name in ("state_dict", "full_optim_state_dict")]
    if is_thorough():
        names += ["checkpoint.save", *sorted(CALLS.keys() - {"checkpoint.keep"}), "checkpoint.keep"]
    pool2(without_numpy, str(tmp_path), names)


def test_every_collective_call_is_known_here() -> None:
    assert set(collective()) <= CALLS.keys() | ELSEWHERE, set(collective()) - CALLS.keys() - ELSEWHERE


@contextmanager
def watched_closely() -> Iterator[None]:
    """The watch looks twenty times as often, and reports at once; its findings are dropped at the end."""
    with patch.object(stores, "PERIOD", 0.02):
        flatfsdp.set_collective_timeout(report_after=0.1)
        try:
            yield
        finally:
            flatfsdp.set_collective_timeout()
            current_watch()._lost = None


def call(rank: int, world: int, folder: str, *calls: str) -> str:
    with watched_closely():
        setting = Setting(folder)
        with pytest.raises(AgreementError) as caught:
            CALLS[calls[rank]](setting)
        return str(caught.value)


# One operation by two names: both ranks get the requested result.
ALIKE = {"FullyShardedDataParallel.full_optim_state_dict", "FullyShardedDataParallel.optim_state_dict"}
PARTNERS = list(CALLS) if is_thorough() else ["checkpoint.keep"]


@pytest.mark.parametrize("other", PARTNERS)
@pytest.mark.parametrize("name", CALLS)
def test_ranks_make_different_calls(pool2: Run, name: str, other: str, tmp_path: Path) -> None:
    if name == other or {name, other} == ALIKE:
        return
    text = pool2(call, str(tmp_path), name, other)
    for message in text:
        assert "rank 0" in message and "rank 1" in message, text
        assert not re.search("does not answer|construct different", message), text


def delayed(rank: int, world: int, seed: int, folder: str) -> tuple[int, list[str]]:
    """A healthy run in which ranks are late at random places; the reports, and the errors raised."""
    texts: list[str] = []
    both, own = random.Random(seed), random.Random(f"{seed} {rank}")

    def late() -> None:
        if own.random() < 0.15:
            time.sleep(own.uniform(0.3, 1.2))

    with patch.object(watch, "print_immediately", texts.append), patch.object(stores, "PERIOD", 0.1):
        flatfsdp.set_collective_timeout(report_after=0.3)
        try:
            setting = Setting(folder)
            model = setting.model
            for block in model.module.blocks:
                block.register_forward_pre_hook(lambda *unused: late())
                block.module.linear.weight.register_hook(lambda grad: late())
            for _ in range(3):
                late()
                step(model)
                setting.optimizer.step()
                setting.optimizer.zero_grad()
                late()
                CALLS[both.choice([name for name in CALLS if not name.startswith(("checkpoint.load", "join"))])](
                    setting
                )
                setting = Setting(folder) if both.random() < 0.1 else setting
        finally:
            flatfsdp.set_collective_timeout()
    return sum("Status of all ranks" in each for each in texts), [each for each in texts if "Error" in each]


@pytest.mark.parametrize("seed", seeds(1, 200))
def test_runs_that_are_only_late_are_never_ended(pool2: Run, seed: int, tmp_path: Path) -> None:
    for _, errors in pool2(delayed, seed, str(tmp_path)):
        assert not errors
