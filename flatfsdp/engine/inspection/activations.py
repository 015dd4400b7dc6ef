"""Activations of a forward: the modules that hold most, and what checkpointing them would save and cost.

[Note: activations] The activations of a forward are the memory that it has taken and still holds when it ends, each
block attributed to the module that took it. Checkpointing a module frees what it took, except what it returns; its
forward is computed again in the backward, for one module at a time, so what the largest one holds comes back.
Parameters do not count: units gather them again. The cost is counted in floating-point operations of products and
attention, of which nearly all of a forward consists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...errors import ROOT
from ...fully_sharded_data_parallel import FullyShardedDataParallel
from ..base import _torch
from ..base.fqns import clean
from ..base.nested_tensors import tensors_in
from .allocator import MIB, Block
from .simulated import SimulatedDevice, Storages
from .summary import aligned


@dataclass(frozen=True)
class ModuleActivations:
    """The modules of one class in a forward.

    Attributes:
        module: the name of the class; first: the path of the first of them; count: the number of calls.
        held: bytes that they took and that are held when the forward ends.
        saves: bytes that are held less, and that the backward's peak is lower by, if each of them is checkpointed.
        operations: floating-point operations that this computes again; share: as a part of the whole forward's.
    """

    module: str
    first: str
    count: int
    held: int
    saves: int
    operations: int
    share: float


@dataclass(eq=False)
class _Call:
    """A call of a module inside of the call `within`.

    Attributes:
        outputs: the memory that it returns; held: bytes that it took and that stay; inner: those among them that it
            does not return.
    """

    module: nn.Module
    within: _Call | None
    outputs: set[Block | None] = field(default_factory=set)
    held: int = 0
    inner: int = 0
    operations: int = 0

    def enclosing(self) -> Iterator[_Call]:
        """It, and the calls around it."""
        call: _Call | None = self
        while call is not None:
            yield call
            call = call.within


class Activations:
    """The memory that the last forward of an outermost module holds for its backward. [Note: activations]

    Attributes:
        held: bytes, of all modules.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._begin()

    def _begin(self) -> None:
        self.call: _Call | None = None  # that runs
        self._calls: list[_Call] = []
        self._names: dict[nn.Module, str] = {}
        self.held = 0

    @property
    def modules(self) -> tuple[ModuleActivations, ...]:
        """By class of modules, those first whose checkpoints save most."""
        by_class: dict[type, list[_Call]] = {}
        for call in self._calls:
            cls = type(call.module)
            around = call.within.enclosing() if call.within is not None else ()
            if cls is not FullyShardedDataParallel and all(type(each.module) is not cls for each in around):
                by_class.setdefault(cls, []).append(call)
        found = []
        for cls, calls in by_class.items():
            inner = [call.inner for call in calls]
            operations = sum(call.operations for call in calls)
            found.append(
                ModuleActivations(
                    module=cls.__name__,
                    first=self._names.get(calls[0].module) or ROOT,
                    count=len(calls),
                    held=sum(call.held for call in calls),
                    saves=sum(inner) - max(inner),
                    operations=operations,
                    share=operations / max(1, self._calls[0].operations),
                )
            )
        return tuple(sorted(found, key=lambda each: (-each.saves, -each.held)))

    def __str__(self) -> str:
        header = ("modules", "first", "calls", "hold", "checkpointing saves", "and computes again")
        rows: list[tuple[str, ...]] = [header]
        for each in self.modules:
            sizes = (f"{size / MIB:,.1f} MiB" for size in (each.held, each.saves))
            rows.append((each.module, each.first, f"{each.count}", *sizes, f"{each.share:.1%} of the forward"))
        return "\n".join([f"activations: {self.held / MIB:,.1f} MiB", *aligned(rows, right=(2, 3, 4, 5))])

    def computed(self, func: Any, args: Any, result: Any) -> None:
        """Count the floating-point operations of `func`, which the running module calls."""
        if self.call is not None and (operations := _operations(func, args, result)):
            for call in self.call.enclosing():
                call.operations += operations

    def entered(self, module: nn.Module, args: Any) -> None:
        """The forward of `module` begins."""
        if _torch.in_backward():  # a recomputation
            return
        if self.call is None:
            self._begin()
            self._names = {each: clean(name) for name, each in module.named_modules()}
        self.call = _Call(module, self.call)
        self._calls.append(self.call)

    def left(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward of `module` has ended."""
        if _torch.in_backward() or self.call is None:
            return
        self.call.outputs = {self._storages.of(each.untyped_storage()) for each in tensors_in(output)}
        self.call = self.call.within
        if self.call is None:
            self._end()

    def _end(self) -> None:
        calls = set(self._calls)
        for block in self._storages.allocator.live():
            if block.label not in calls:
                continue
            self.held += block.size
            for call in block.label.enclosing():
                call.held += block.size
                call.inner += 0 if block in call.outputs else block.size


@contextmanager
def recording(device: SimulatedDevice) -> Iterator[Activations]:
    """A context in which forwards on `device` are recorded."""
    recorded = Activations(device.storages)
    device.observers.append(recorded.computed)
    device.label = lambda: recorded.call
    hooks = [register_module_forward_pre_hook(recorded.entered), register_module_forward_hook(recorded.left)]
    try:
        yield recorded
    finally:
        for each in hooks:
            each.remove()


def _operations(func: Any, args: Any, result: Any) -> int:
    """The floating-point operations of `func`, which returned `result`; 0 where torch does not count them."""
    from torch.utils.flop_counter import flop_registry  # takes a second

    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, out_val=result))
