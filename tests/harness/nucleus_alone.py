"""Trains with the nucleus of the engine alone, on 4 ranks: ranks 0 and 1 train with each other, then all of them as two
replicas of two shards, then rank 0 by itself.

Every other file of flatfsdp is blocked from import, except the errors, the public values, `base` and `config`. What the
process has imported of flatfsdp is dropped first, and is imported anew: that it was imported before changes nothing, as
`tests/repository/test_import.py` finds. The nucleus's units are made here, and every loss is compared with that of a
plain model on the data of all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.abc
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUCLEUS = frozenset("layout device comm flat schedule runtime".split())
BESIDE = frozenset("base config".split())  # import nothing of the others
ROOT = Path(__file__).resolve().parents[2] / "flatfsdp"


class Blocked(importlib.abc.MetaPathFinder):
    """Refuses every module of flatfsdp but those of the nucleus, and what is beside it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        parts = name.split(".")
        if parts[0] != "flatfsdp" or name in ("flatfsdp.api", "flatfsdp.errors", "flatfsdp.engine"):
            return
        if parts[1] != "engine" or parts[2] not in NUCLEUS | BESIDE:
            raise ImportError(f"{name} is no part of the nucleus")


def block() -> None:
    """Import from now on from the nucleus only, without the public package, which imports all."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "flatfsdp"]:
        del sys.modules[name]
    public = types.ModuleType("flatfsdp")
    public.__path__ = [str(ROOT)]
    sys.modules["flatfsdp"] = public
    sys.meta_path.insert(0, Blocked())


def trained(rank: int, world: int, file: str) -> list[str]:
    """Train every case on two ranks, or if it is a hybrid on two times two, and on rank 0 alone. Ranks meet through
    `file`. Returned: the packages of the engine that were imported."""
    block()
    import torch.distributed as dist

    if rank < 2:
        play(rank, 2, dist.FileStore(f"{file}.pair", 2))
    play(rank, world, dist.FileStore(file, world))
    if rank == 0:
        play(0, 1, dist.HashStore())
    return sorted({name.split(".")[2] for name in sys.modules if name.startswith("flatfsdp.engine.")})


def play(rank: int, world: int, store: Any) -> None:
    """Train every case for this number of ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for case, settings in CASES.items():
        if (world == 4) != ("HYBRID" in settings.get("strategy", "")):
            continue
        try:
            train(rank, world, **settings)
        except BaseException as error:
            error.add_note(f"case: {case}, on {world} ranks")
            raise
    dist.barrier()
    dist.destroy_process_group()


CASES: dict[str, dict[str, Any]] = {
    "one flat parameter": {"flat": True},
    "original parameters": {},
    "kept from forward to backward": {"strategy": "SHARD_GRAD_OP"},
    "replicated": {"strategy": "NO_SHARD"},
    "replicated, one flat parameter": {"strategy": "NO_SHARD", "flat": True},
    "hybrid": {"strategy": "HYBRID_SHARD"},
    "hybrid, kept": {"strategy": "_HYBRID_SHARD_ZERO2", "flat": True},
    "accumulation": {"microbatches": 3},
    "accumulation without reduction": {"microbatches": 3, "sync": False},
    "prefetch in forward, none in backward": {"options": {"forward_prefetch": True, "backward_prefetch": None}},
    "low precision": {"low": True, "rtol": 3e-2},
    "offloaded": {"offload": True, "flat": True},
}


def train(
    rank: int,
    world: int,
    *,
    strategy: str = "FULL_SHARD",
    flat: bool = False,
    microbatches: int = 1,
    sync: bool = True,
    low: bool = False,
    offload: bool = False,
    options: dict[str, Any] | None = None,
    rtol: float = 1e-4,
) -> None:
    """Three steps, and one evaluation."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), *(nn.Sequential(nn.Tanh(), nn.Linear(7, 7)) for _ in range(3)))
    model = wrapped(copy.deepcopy(plain), world, strategy, flat=flat, low=low, offload=offload, options=options or {})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    for step in range(4):
        batches = torch.randn(microbatches, world, 6, 5)
        with contextlib.nullcontext() if step < 3 else torch.no_grad():
            for number, batch in enumerate(batches):
                last = number == microbatches - 1
                with contextlib.nullcontext() if sync or last else no_sync(model):
                    loss = model(batch[rank]).float().square().mean()
                    if step < 3:
                        loss.backward()
                whole = [plain(each).square().mean() for each in batch]
                if step < 3:
                    (sum(whole) / world).backward()  # type: ignore[union-attr]
                torch.testing.assert_close(loss, whole[rank], rtol=rtol, atol=1e-5)
        if step < 3:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def wrapped(
    module: Any, world: int, strategy: str, *, flat: bool, low: bool, offload: bool, options: dict[str, Any]
) -> Any:
    """`module`, each of whose blocks is a unit, and the rest another one around them."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from flatfsdp.api import CPUOffload, MixedPrecision, ShardingStrategy
    from flatfsdp.engine.comm.axes import Axis, ProcessGroups
    from flatfsdp.engine.comm.transport import Exchanges
    from flatfsdp.engine.config.strategy import traits
    from flatfsdp.engine.config.unit_options import UnitOptions
    from flatfsdp.engine.device.memory import MemoryTracker
    from flatfsdp.engine.device.streams import Device
    from flatfsdp.engine.flat.faces import FlatFace
    from flatfsdp.engine.flat.flat_param import FlatParamHandle, FlatParamOptions
    from flatfsdp.engine.flat.param_refs import ParamRef
    from flatfsdp.engine.flat.piece_face import PieceFaces
    from flatfsdp.engine.runtime.entries import Entries
    from flatfsdp.engine.runtime.model import Model, model_of
    from flatfsdp.engine.runtime.module_tree import put_at_rest, units_at
    from flatfsdp.engine.runtime.resources import ModelSettings, Resources
    from flatfsdp.engine.runtime.unit import Unit
    from flatfsdp.engine.runtime.unit_state import BuiltWith

    cpu, chosen = torch.device("cpu"), ShardingStrategy[strategy]
    group, alone = dist.group.WORLD, Axis.alone()
    shard, across = Axis.of(group, cpu) if world > 1 else alone, None
    if not traits(chosen).shards:
        shard, across = alone, shard if world > 1 else None
    elif traits(chosen).replicates:  # two replicas of two shards; all ranks make all groups
        made = [dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
        shard, across = (
            next(Axis.of(each, cpu) for each in pair if dist.get_rank(each) >= 0) for pair in (made[:2], made[2:])
        )
    groups = ProcessGroups(shard, shard, across, chosen, group, cpu)
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecision()

    class Wrapper(nn.Module):
        def __init__(self, inside: nn.Module, model: Any) -> None:
            super().__init__()
            self._fsdp_wrapped_module = inside
            self.__dict__["_unit"], self.__dict__["_kept_root"] = model.outermost, model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            unit = self.__dict__["_unit"]
            return model_of(unit).forwards.run(unit, args, kwargs, call=self._fsdp_wrapped_module)

    def wrap(inside: nn.Module) -> Wrapper:
        below = {each for child in inside.modules() if units_at(child) for each in child.modules()}
        modules = {path: each for path, each in inside.named_modules() if each not in below}
        param_refs = [
            ParamRef(each, name, f"{path}.{name}".lstrip("."), parameter)
            for path, each in modules.items()
            for name, parameter in each.named_parameters(recurse=False)
        ]
        tracker = MemoryTracker()
        handle = FlatParamHandle.flatten(
            [param_ref.leaf for param_ref in param_refs],
            [param_ref.path for param_ref in param_refs],
            world=groups.shard.size,
            rank=groups.shard.rank,
            device=cpu,
            options=FlatParamOptions(
                mixed,
                offload,
                face=FlatFace if flat else PieceFaces(copied=low or offload),
                trainable=True,
                packed=False,
                pin_memory=False,
            ),
            tracker=tracker,
        )
        unit = Unit(
            Entries([inside], in_place=False),
            [handle],
            param_refs,
            built=BuiltWith(traits(chosen), mixed, CPUOffload(offload), modules=[*modules.values()]),
            groups=groups,
            options=UnitOptions(**options),
        )
        put_at_rest(unit)
        settings = ModelSettings(cpu, limit_all_gathers=True, check_values="off", join_units_below=0)
        resources = Resources(Device(cpu), tracker, Exchanges(), limit_all_gathers=True)
        model = Model(unit, resources, settings)
        model.adopt([nested for each in inside.modules() for nested in units_at(each)])
        return Wrapper(inside, model)

    for index in range(1, len(module)):
        module[index] = wrap(module[index])
    return wrap(module)


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Backwards inside reduce nothing."""
    backwards = model.__dict__["_kept_root"].backwards
    backwards.sync = False
    try:
        yield
    finally:
        backwards.sync = True
