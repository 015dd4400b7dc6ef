"""Ways to train the small model under the engine: plain steps, and features that users combine with them.

A play takes a `Stage` and returns the resulting `Story`, which has to equal that of one process; or it raises.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flatfsdp
from flatfsdp import FullyShardedDataParallel, checkpoint
from flatfsdp.engine.device.memory import poison
from flatfsdp.errors import NonFiniteError

from . import alone, net, wraps
from .alone import STEPS, Course, Story


@dataclass(frozen=True)
class Stage:
    """The setting of a play: this rank, its device, and the wrapping of the model."""

    rank: int
    world: int
    device: torch.device
    wrap: wraps.Wrap
    course: Course

    def model(self) -> Any:
        """A new model, wrapped."""
        return self.wrap(self.net(), self.device)

    def net(self) -> net.Net:
        """A new model, not wrapped."""
        return net.build(self.device, frozen=self.course.frozen)


Play = Callable[[Stage], Story]


class Broken(Exception):
    """The engine broke a guarantee."""


def require(holds: bool, words: str) -> None:
    """Raise `Broken` with `words` unless `holds`."""
    if not holds:
        raise Broken(words)


def steps(stage: Stage, model: Any, optimizer: Any, numbers: range, accumulating: Any = None) -> list[list[float]]:
    """Run steps and return their losses. ``accumulating()``: a context for all backwards of a step but the last."""
    losses: list[list[float]] = []
    for step in numbers:
        losses.append(one_step(stage, model, optimizer, step, accumulating))
    return losses


def one_step(stage: Stage, model: Any, optimizer: Any, step: int, accumulating: Any = None) -> list[float]:
    """Run one step and return its losses."""
    found: list[Tensor] = []
    course = stage.course
    for micro in range(course.micro):
        last = micro == course.micro - 1
        with nullcontext() if last or accumulating is None else accumulating():
            loss = model(*net.batch(stage.device, stage.rank, step, micro))
            (loss / course.micro).backward()
        found.append(loss.detach())
    if course.clip is not None:
        wraps.clip(model, course.clip)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in found]


def plain(stage: Stage) -> Story:
    """Only steps."""
    model = stage.model()
    losses = steps(stage, model, alone.optimizer_of(model), range(STEPS))
    return Story(losses, wraps.whole_parameters(model))


def poisoned(stage: Stage) -> Story:
    """Memory is filled with NaN when allocated and before it is freed: code that reads it then trains on NaN."""
    with poison():
        return plain(stage)


def offloaded(stage: Stage, *, pinned: bool) -> Story:
    """Shards are on the host, page-locked or not."""
    model = stage.model()
    shards = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    require(all(shard.device.type == "cpu" for shard in shards), "a shard is not on the host")
    if torch.accelerator.is_available():
        locked = {shard.is_pinned() for shard in shards if shard.numel()}
        require(locked == {pinned}, f"shards are page-locked: {locked}, expected {pinned}")
    losses = steps(stage, model, alone.optimizer_of(model), range(STEPS))
    return Story(losses, wraps.whole_parameters(model))


def recomputed(stage: Stage, *, reentrant: bool) -> Story:
    """Each block's forward is recomputed in the backward."""
    model = stage.model()
    for module in model.modules():
        if isinstance(module, net.Block):
            module.recomputes = reentrant
    losses = steps(stage, model, alone.optimizer_of(model), range(STEPS))
    return Story(losses, wraps.whole_parameters(model))


def tripped(stage: Stage, *, where: str) -> Story:
    """A block raises on all ranks, in the forward or in the backward; the step is repeated."""
    model = stage.model()
    optimizer = alone.optimizer_of(model)
    block = [module for module in model.modules() if isinstance(module, net.Block)][1]
    losses: list[list[float]] = []
    for step in range(STEPS):
        if step in (1, 2):
            block.trips = where
            try:
                model(*net.batch(stage.device, stage.rank, step)).backward()
            except net.Tripped:
                optimizer.zero_grad()
            else:
                raise Broken("what the block raised did not come through")
        losses.append(one_step(stage, model, optimizer, step))
    return Story(losses, wraps.whole_parameters(model))


def resumed(stage: Stage) -> Story:
    """Halfway, the state is saved, and a new model loads it."""
    model = stage.model()
    optimizer = alone.optimizer_of(model)
    losses = steps(stage, model, optimizer, range(STEPS // 2))
    with _shared_folder(stage) as folder:
        checkpoint.save(folder / "saved", model=model, optimizer=optimizer, extra={"step": STEPS // 2})
        model = stage.model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = alone.optimizer_of(model)
        extra = checkpoint.load(folder / "saved", model=model, optimizer=optimizer)
        require(extra == {"step": STEPS // 2}, f"extra came back as {extra}")
    losses += steps(stage, model, optimizer, range(STEPS // 2, STEPS))
    return Story(losses, wraps.whole_parameters(model))


def through_state_dicts(stage: Stage, *, kind: str) -> Story:
    """Halfway, a new model loads the state dicts of the model and of the optimizer."""
    model = stage.model()
    optimizer = alone.optimizer_of(model)
    losses = steps(stage, model, optimizer, range(STEPS // 2))
    with FullyShardedDataParallel.state_dict_type(model, kind):
        state, moments = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
    model = stage.model()
    optimizer = alone.optimizer_of(model)
    with FullyShardedDataParallel.state_dict_type(model, kind):
        model.load_state_dict(state)
        fitting = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, moments)
    optimizer.load_state_dict(fitting)
    losses += steps(stage, model, optimizer, range(STEPS // 2, STEPS))
    return Story(losses, wraps.whole_parameters(model))


def through_dtensors(stage: Stage) -> Story:
    """Halfway, a new model of `fully_shard` loads the state dict, of DTensors, and the optimizer's."""
    model = stage.model()
    optimizer = alone.optimizer_of(model)
    losses = steps(stage, model, optimizer, range(STEPS // 2))
    state, moments = model.state_dict(), optimizer.state_dict()
    model = stage.model()
    optimizer = alone.optimizer_of(model)
    model.load_state_dict(state)
    optimizer.load_state_dict(moments)
    losses += steps(stage, model, optimizer, range(STEPS // 2, STEPS))
    return Story(losses, wraps.whole_parameters(model))


def in_backward(stage: Stage) -> Story:
    """The optimizer steps inside the backward."""
    model = stage.model()
    stepping = flatfsdp.optimizer_in_backward(model, alone.optimizer_of(model))
    losses = steps(stage, model, None, range(STEPS), stepping.no_step)
    require(all(p.grad is None for p in model.parameters()), "gradients are left")
    return Story(losses, wraps.whole_parameters(model))


def kept(stage: Stage, *, on: str) -> Story:
    """Frozen parameters stay unsharded, on the device or on the host."""
    model = stage.model()
    model.keep_frozen_unsharded(on=on)
    losses = steps(stage, model, alone.optimizer_of(model), range(STEPS))
    return Story(losses, wraps.whole_parameters(model))


def accumulated(stage: Stage, *, how: str) -> Story:
    """A step has several backwards: the earlier ones send nothing, or leave their last reduction in flight."""
    model = stage.model()
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "no_sync": lambda: model.no_sync(),
        "without synchronization": partial(_switched, model.set_requires_gradient_sync),
        "deferred reductions": partial(_switched, model.set_is_last_backward),
    }
    losses = steps(stage, model, alone.optimizer_of(model), range(STEPS), contexts[how])
    return Story(losses, wraps.whole_parameters(model))


def added_up_within_replicas(stage: Stage) -> Story:
    """The earlier backwards of a step are reduced over shards alone; after the first one, another one fails."""
    model = stage.model()
    optimizer, losses = alone.optimizer_of(model), []
    block = [module for module in model.modules() if isinstance(module, net.Block)][1]
    for step in range(STEPS):
        found: list[Tensor] = []
        for micro in range(stage.course.micro):
            model.set_requires_all_reduce(micro == stage.course.micro - 1)
            if micro == 1:
                block.trips = "backward"
                try:
                    model(*net.batch(stage.device, stage.rank, step, micro)).backward()
                except net.Tripped:
                    pass
                else:
                    raise Broken("what the block raised did not come through")
            loss = model(*net.batch(stage.device, stage.rank, step, micro))
            (loss / stage.course.micro).backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append([float(loss) for loss in found])
    return Story(losses, wraps.whole_parameters(model))


@contextmanager
def _switched(switch: Callable[[bool], None]) -> Iterator[None]:
    switch(False)
    yield
    switch(True)


def fused(stage: Stage) -> Story:
    """The optimizer step is fused over many parameters."""
    model = stage.model()
    optimizer = alone.optimizer_of(model)
    flatfsdp.fuse_optimizer_steps(optimizer)
    losses = steps(stage, model, optimizer, range(STEPS))
    return Story(losses, wraps.whole_parameters(model))


def watched(stage: Stage) -> Story:
    """The first NaN is found; until then, results are those without `detect_nonfinite`."""
    model = stage.model()
    optimizer = alone.optimizer_of(model)
    with flatfsdp.detect_nonfinite(model):
        losses = steps(stage, model, optimizer, range(STEPS))
    parameters = wraps.whole_parameters(model)
    with torch.no_grad():
        last = [p for p in model.parameters() if p.numel()][-1]
        getattr(last, "_local_tensor", last).fill_(float("nan"))
    try:
        with flatfsdp.detect_nonfinite(model):
            model(*net.batch(stage.device, stage.rank, 0)).backward()
    except NonFiniteError:
        return Story(losses, parameters)
    raise Broken("a parameter of NaN was not found")


def inferred(stage: Stage) -> Story:
    """After training, forwards inside `inference` return the same as those outside."""
    model = stage.model()
    losses = steps(stage, model, alone.optimizer_of(model), range(STEPS))
    batch = net.batch(stage.device, stage.rank, 0)
    model.eval()
    with torch.no_grad():
        outside = float(model(*batch))
        with flatfsdp.inference(model):
            inside = [float(model(*batch)) for _ in range(3)]
    with torch.inference_mode(), flatfsdp.inference(model):
        inside.append(float(model(*batch)))
    require(set(inside) == {outside}, f"{inside} inside, {outside} outside")
    return Story(losses, wraps.whole_parameters(model))


def scaled(stage: Stage) -> Story:
    """Losses are scaled; in one step, gradients of the last rank overflow, and all ranks skip it."""
    model = stage.model()
    optimizer = alone.optimizer_of(model)
    scaler = flatfsdp.ShardedGradScaler(stage.device.type, init_scale=2.0**10)
    losses: list[list[float]] = []
    for step in range(STEPS):
        loss = model(*net.batch(stage.device, stage.rank, step))
        overflows = step == stage.course.skipped
        scaler.scale(loss * float("inf") if overflows and stage.rank == stage.world - 1 else loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        halved = scaler.get_scale() == before / 2
        require(halved == overflows, f"step {step}: the scale went from {before} to {scaler.get_scale()}")
        losses.append([float(loss.detach())])
    return Story(losses, wraps.whole_parameters(model))


def in_few_bits(stage: Stage) -> Story:
    """Parameters and gradients are sent in few bits: the loss falls about as in one process."""
    return plain(stage)


@contextmanager
def _shared_folder(stage: Stage) -> Iterator[Path]:
    """A new folder, the same on all ranks; removed by rank 0."""
    box = [tempfile.mkdtemp() if stage.rank == 0 else ""]
    if stage.world > 1:
        dist.broadcast_object_list(box)
    try:
        yield Path(box[0])
        if stage.world > 1:
            dist.barrier()
    finally:
        if stage.rank == 0:
            shutil.rmtree(box[0], ignore_errors=True)
