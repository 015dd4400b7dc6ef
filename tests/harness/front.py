"""`fully_shard`, flatfsdp's or torch's, as an engine of `parity`, and the settings whose combinations must all train
like one process: a covering array of all pairs, and any requested number of other cells."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from itertools import combinations, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_common as torchs_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.harness import parity
from tests.harness.gradients import Gradients, Together, plain
from tests.harness.matrix import Pair, covering_array, hostile_world, pairs_of
from tests.harness.meshes import named_mesh
from tests.harness.parity import Unsharded
from tests.harness.reference import Recipe, Story, Tensors

TORCHS = "torch.distributed.fsdp"


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FullyShard(Unsharded):
    """The ``fully_shard`` of a package.

    Attributes:
        accumulation: the setting of all backwards before a step except the last: one of `ACCUMULATIONS`.
    """

    package: str = "flatfsdp"
    accumulation: str = "plain"

    def wrap(self, model: nn.Module, recipe: Recipe, options: dict[str, Any]) -> nn.Module:
        """Options: those of a `Cell`, by its names, and the shape of a `mesh`, or None."""
        full, meta = model, options["meta"]
        if meta != "no meta":
            with torch.device("meta"):
                model = recipe.model.build()
        units = [module for module in model.modules() if type(module) in recipe.model.units]
        checkpointing = options["checkpointing"]
        if checkpointing in ("checkpoints inside units", "reentrant checkpoints inside"):
            parity.recompute_forwards(units, reentrant=checkpointing == "reentrant checkpoints inside")
        self._shard(model, units, recipe, options)
        if meta == "to_empty":
            model.to_empty(device="cpu")
        if meta != "no meta":
            states = {name: _like(value, model.state_dict()[name]) for name, value in full.state_dict().items()}
            model.load_state_dict(states, assign=meta == "assigned")
        if checkpointing in ("checkpoints around units", "reentrant checkpoints"):
            _recompute(model, units, reentrant=checkpointing == "reentrant checkpoints")
        return model

    def _shard(self, model: nn.Module, units: list[nn.Module], recipe: Recipe, options: dict[str, Any]) -> None:
        api = import_module(self.package)
        mesh, policy = options["mesh"], api.MixedPrecisionPolicy
        settings: dict[str, Any] = {"reshard_after_forward": options["reshard"]}
        if mesh is not None:
            settings["mesh"] = named_mesh(*mesh)
        if options["placement"] == "columns":
            settings["shard_placement_fn"] = partial(_columns, even=options.get("even", False))
        if options["placement"] == "meshes":
            settings["shard_placement_fn"] = _over_others(api, mesh)
        if options["offload"]:
            settings["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
        dtypes = recipe.compute, recipe.reduce
        shard = partial(api.fully_shard, **settings, mp_policy=policy(*dtypes, cast_forward_inputs=options["cast"]))
        innermost = [unit for unit in units if not any(each in units for each in unit.modules() if each is not unit)]
        if options["units"] == "lists":
            for first in range(0, len(innermost), 2):
                shard(innermost[first : first + 2])
            units = [unit for unit in units if unit not in innermost]
        for unit in reversed(units):
            shard(unit)
        if options["roots"] != "several":
            api.fully_shard(model, **settings, mp_policy=policy(*dtypes, output_dtype=options["output_dtype"]))
        else:
            for child in model.children():
                if child not in units:
                    shard(child)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self._set(model, "set_requires_gradient_sync", False)
        yield
        self._set(model, "set_requires_gradient_sync", True)

    @contextmanager
    def communicate(self, model: nn.Module) -> Iterator[None]:
        method = ACCUMULATIONS[self.accumulation]
        self._set(model, method, False)
        yield
        self._set(model, method, True)

    def _set(self, model: nn.Module, method: str | None, value: bool) -> None:
        if method is None:
            return
        front = import_module(self.package).FSDPModule
        for root in [model] if isinstance(model, front) else model.children():
            root = getattr(root, "module", root)  # the module inside a checkpoint around it
            getattr(root, method)(value)

    def gradients(self, model: nn.Module) -> Gradients:
        return {
            plain(name): None if parameter.grad is None else parameter.grad.full_tensor().clone()  # type: ignore[attr-defined]
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def together(self, model: nn.Module) -> Together:
        return ()

    def tensors(self, model: nn.Module) -> tuple[Tensors, Tensors]:
        parameters = {plain(name): whole(parameter) for name, parameter in model.named_parameters()}
        return parameters, {plain(name): buffer.detach().clone() for name, buffer in model.named_buffers()}


def whole(parameter: Any) -> Tensor:
    """An unsharded copy of a DTensor. Collective."""
    full: Tensor = parameter.detach().full_tensor().clone()
    return full


def _like(value: Tensor, state: Any) -> Tensor:
    return distribute_tensor(value, state.device_mesh, state.placements) if isinstance(state, DTensor) else value


def _columns(parameter: nn.Parameter, *, even: bool) -> Shard | None:
    """`even`: only where torch's can split it over two ranks."""
    return Shard(1) if parameter.dim() == 2 and not (even and parameter.shape[1] % 2) else None


def _over_others(api: Any, shape: tuple[int, ...] | None) -> Callable[[nn.Parameter], Any]:
    """Weights are sharded over the axes on which the other parameters are replicated, and vice versa."""
    world = dist.get_world_size()
    other = named_mesh(world) if shape is not None and len(shape) == 2 and shape[0] > 1 else named_mesh(world, 1)
    if api.__name__ == TORCHS:
        two = other.ndim == 2
        info = HSDPMeshInfo(other, 1, 0) if two else FSDPMeshInfo(other, 0)
        result: Any = torchs_common.ShardPlacementResult(None, info)
    else:
        result = api.ShardPlacementResult(None, other)
    return lambda parameter: result if parameter.dim() == 2 else None


class _Recomputed(nn.Module):
    """A module that is recomputed in the backward, including the hooks of its call."""

    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x: Tensor) -> Any:
        if self.reentrant and not x.requires_grad:  # otherwise a reentrant checkpoint has no gradients
            x = x.detach().requires_grad_()
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


def _recompute(model: nn.Module, units: list[nn.Module], *, reentrant: bool) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in units:
                setattr(parent, name, _Recomputed(child, reentrant))


# --- cells ------------------------------------------------------------------------------------------------------------

BF16 = torch.bfloat16
MESHES: dict[str, Callable[[int], tuple[int, ...] | None]] = {
    "no mesh": lambda world: None,
    "1-D": lambda world: (world,),
    "replicas": lambda world: (world, 1),
    "one replica": lambda world: (1, world),
    "2x2": lambda world: (2, 2),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "bf16": {"compute": BF16},
    "bf16 reduced in fp32": {"compute": BF16, "reduce": torch.float32},
    "bf16 cast by the root": {"compute": BF16},  # units inside have cast_forward_inputs=False
    "fp16 reduce": {"reduce": torch.float16},
}
ACCUMULATIONS: dict[str, str | None] = {
    "plain": None,
    "no sync": None,
    "not the last": "set_is_last_backward",
    "kept whole": "set_reshard_after_backward",
    "within replicas": "set_requires_all_reduce",
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "strategy": tuple(MESHES),
    "world": (2, 3, 4),
    "placement": ("rows", "columns", "meshes"),
    "units": ("single", "lists"),
    "reshard": (None, True, False, "int"),
    "precision": tuple(PRECISIONS),
    "offload": (False, True),
    "model": ("mlp", "rows", "tied", "frozen", "tied and frozen", "dtypes", "unused", "encoder"),
    "meta": ("no meta", "to_empty", "assigned"),
    "checkpointing": ("no checkpointing", *parity.CHECKPOINTING, "reentrant checkpoints inside"),
    "accumulation": tuple(ACCUMULATIONS),
    "roots": ("one", "several", "after a unit"),
}
SEQUENTIAL = ("mlp", "rows", "frozen", "dtypes", "unused")  # models that only chain their children


@dataclass(frozen=True)
class Cell:
    """One combination; each field is a factor."""

    strategy: str = "1-D"
    world: int = 2
    placement: str = "rows"
    units: str = "single"
    reshard: Any = None
    precision: str = "full"
    offload: bool = False
    model: str = "mlp"
    meta: str = "no meta"
    checkpointing: str = "no checkpointing"
    accumulation: str = "plain"
    roots: str = "one"

    @property
    def mesh(self) -> tuple[int, ...] | None:
        """The shape of its mesh."""
        return MESHES[self.strategy](self.world)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the cell."""
        micro: dict[str, Any] = {} if self.accumulation == "plain" else {"micro": 2, "accumulate": "communicate"}
        if self.accumulation == "no sync":
            micro["accumulate"] = "no_sync"
        mesh = self.mesh
        replicas = mesh[0] if mesh is not None and len(mesh) == 2 else 1
        early = self.roots == "after a unit"
        return Recipe(self.model, **PRECISIONS[self.precision], **micro, steps=2, replicas=replicas, early=early)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the engine."""
        options = {name: getattr(self, name) for name in ("placement", "units", "offload", "meta", "roots")}
        options |= {"checkpointing": self.checkpointing, "mesh": self.mesh}
        options["cast"] = self.precision != "bf16 cast by the root"
        options["output_dtype"] = torch.float32 if self.precision == "bf16 reduced in fp32" else None
        shards = self.world if self.mesh is None else self.mesh[-1]
        options["reshard"] = (2 if shards == 4 else 1) if self.reshard == "int" else self.reshard
        return options

    def engine(self, package: str = "flatfsdp") -> FullyShard:
        """The engine that trains the cell."""
        return FullyShard(package, self.accumulation)

    @property
    def bound(self) -> float:
        """0: every bit is equal. A kernel sums products of columns in another order than those of rows;
        microbatches are summed before replicas are; each call in a reentrantly recomputed unit is reduced
        individually, or added individually to accumulated gradients, in the reduce dtype."""
        early = self.model == "encoder" or self.roots == "after a unit"
        calls = early or (self.units == "lists" and self.accumulation == "no sync")
        apart = self.checkpointing == "reentrant checkpoints inside" and calls
        if early and self.checkpointing == "reentrant checkpoints":
            apart = self.accumulation == "no sync" or self.recipe.reduce is not None
        rows = self.placement == "rows" or (self.placement == "meshes" and self.strategy != "2x2")
        if rows and self.accumulation != "within replicas" and not apart:
            return 0.0
        return self._rounding

    @property
    def _rounding(self) -> float:
        return 1e-5 if self.precision == "full" and self.model != "dtypes" else 2e-2

    @property
    def bound_to_torchs(self) -> float:
        """0: on two ranks, every bit equals torch's. A kernel sums products of columns in another order than those
        of rows; torch divides numbers after casting them to fp16, where the smallest lose bits; with one replica, it
        sums microbatches in 16 bits, which are summed in `.grad` here; and in a list with reentrantly recomputed
        modules, it adds up accumulated gradients in parts, where flatfsdp equals one process."""
        if self.units == "lists" and self.accumulation == "no sync" and self.checkpointing == "reentrant checkpoints":
            return self._rounding
        narrow = self.precision in ("bf16", "bf16 cast by the root", "fp16 reduce")
        alone = self.accumulation == "within replicas" and self.strategy == "one replica" and narrow
        if self.placement == "columns" or alone:
            return self.bound
        return 1e-4 if self.precision == "fp16 reduce" else 0.0

    def check(self, *, hostile: bool = False) -> Story:
        """Train on the pool, and compare with one process that runs the ranks' batches one after the other."""
        how: dict[str, Any] = {"mode": "close", "bound": self.bound} if self.bound else {}
        context = hostile_world if hostile else nullcontext
        return parity.check(self.world, self.recipe, engine=self.engine(), context=context, **how, **self.options)

    def __str__(self) -> str:
        return ", ".join(
            f"{each.name}={getattr(self, each.name)}"
            if isinstance(getattr(self, each.name), bool | None)
            else str(getattr(self, each.name))
            for each in fields(self)
        )


def illegal(cell: Cell) -> str | None:
    """The reason why there is no such cell, or None."""
    around = cell.checkpointing in ("checkpoints around units", "reentrant checkpoints")
    if (cell.world == 4) != (cell.strategy == "2x2" or (cell.strategy == "1-D" and cell.reshard == "int")):
        return "four ranks are for two axes, and for parts of an axis"
    if cell.placement == "meshes" and cell.reshard == "int" and cell.world == 4:
        return "a number of ranks divides the shards of both meshes"
    if cell.roots == "several" and (cell.model not in SEQUENTIAL or cell.units == "lists"):
        return "what is around modules of a list, and has parameters, is a module of fully_shard"
    if cell.model in ("dtypes",) and cell.precision != "full":
        return "integers are not cast"
    if cell.accumulation == "within replicas" and not (cell.mesh is not None and len(cell.mesh) == 2):
        return "there is one replica only"
    if cell.model == "encoder" and (around or "bf16" in cell.precision):
        return "the encoder is called by its name, and the oracle casts what the root is given"
    if cell.precision == "bf16 cast by the root" and cell.roots != "one":
        return "nothing casts what is given to another module than the root"
    return None


def legal_cells(count: int, seed: int = 0) -> list[Cell]:
    """`count` randomly drawn legal cells."""
    drawn = random.Random(f"cells {seed}")
    cells: list[Cell] = []
    while len(cells) < count:
        cells += _drawn(drawn, {})
    return cells


def _drawn(drawn: random.Random, fixed: dict[str, Any], tries: int = 1) -> list[Cell]:
    """A legal cell with the `fixed` levels; empty if no try succeeds."""
    for _ in range(tries):
        cell = Cell(**{name: fixed.get(name, drawn.choice(levels)) for name, levels in FACTORS.items()})
        if illegal(cell) is None:
            return [cell]
    return []


def all_pairs() -> set[Pair]:
    """Every pair of levels of two factors."""
    return {
        ((one, a), (two, b)) for one, two in combinations(FACTORS, 2) for a, b in product(FACTORS[one], FACTORS[two])
    }


def array(taken: Callable[[Cell], bool] = lambda cell: True) -> list[Cell]:
    """A few cells that cover every legal pair of levels in `taken` cells; the same at every call."""
    drawn = random.Random(0)
    cells = [cell for cell in legal_cells(400) if taken(cell)]
    missing = all_pairs().difference(*(pairs_of(cell, FACTORS) for cell in cells))
    for pair in sorted(missing, key=str):
        cells += filter(taken, _drawn(drawn, dict(pair), tries=50))
    return covering_array(dict.fromkeys(cells), FACTORS)


# --- next to torch's -------------------------------------------------------------------------------------------------


def torch_takes(cell: Cell) -> bool:
    """Whether torch's runs this cell on two ranks without an accelerator, with the same meaning."""
    return (
        cell.world == 2
        and not cell.offload
        and cell.model not in ("dtypes", "rows")  # several dtypes are trained; one parameter is empty
        and cell.model != "encoder"
        and cell.roots != "after a unit"  # a unit runs before its root
        # torch's loses gradients where several modules of a list finish at different times
        and not (cell.accumulation == "within replicas" and cell.units == "lists" and "reentr" in cell.checkpointing)
    )


def beside(rank: int, world: int, cell: Cell) -> list[str]:
    """A job for the pool: differences from torch's, in losses, gradients, parameters, DTensors."""
    stories, models = [], []
    for package in ("flatfsdp", TORCHS):
        engine = _Keeping(package, cell.accumulation)
        stories.append(parity.train(rank, world, cell.recipe, engine, cell.options | {"even": True}))
        models.append(_kept.pop())
    (one, of_one), (two, of_two) = stories
    bound = cell.bound_to_torchs
    found = parity.compare(one, two, mode="close" if bound else "bit", bound=bound)
    if not bound and of_one != of_two:
        found.append("fingerprints")
    for (name, ours), (its, other) in zip(*(model.named_parameters() for model in models), strict=True):
        if name != its or facts(ours) != facts(other):
            found.append(f"{name}: {facts(ours)}, {its}: {facts(other)}")
    return found


_kept: list[nn.Module] = []


class _Keeping(FullyShard):
    def wrap(self, model: nn.Module, recipe: Recipe, options: dict[str, Any]) -> nn.Module:
        _kept.append(super().wrap(model, recipe, options))
        return _kept[-1]


def facts(parameter: Any) -> tuple[Any, ...]:
    """The metadata of a DTensor."""
    local = parameter._local_tensor
    return (
        parameter.shape,
        parameter.stride(),
        parameter.dtype,
        parameter.device_mesh,
        parameter.placements,
        parameter.requires_grad,
        local.shape,
    )
