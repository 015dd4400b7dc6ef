"""A simple, slow FSDP: gather, compute, free, gather again, reduce, one step at a time.

A second oracle in addition to the references: it communicates like an engine, and is short enough to be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class PlainUnit:
    """One module's own parameters as one flat vector, of which every rank keeps a chunk in `shard`.

    The parameters are views of `full`, whose memory is freed while the module does not compute.
    """

    def __init__(self, module: nn.Module, params: list[nn.Parameter]) -> None:
        self.params, self.rank, self.world = params, dist.get_rank(), dist.get_world_size()
        numel = sum(param.numel() for param in params)
        self.full = params[0].new_zeros(-(-numel // self.world) * self.world)
        offset = 0
        for param in params:
            place = self.full[offset : offset + param.numel()].view_as(param)
            place.copy_(param.detach())
            param.data = place
            offset += param.numel()
            param.register_post_accumulate_grad_hook(self._arrived)
        self.shard = nn.Parameter(self.full.chunk(self.world)[self.rank].clone())
        self.free()
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(lambda *_: self.free())
        module.register_full_backward_pre_hook(lambda *_: self.gather())
        self.waiting = {param for param in params if param.requires_grad}

    def gather(self) -> None:
        """Fill `full` from every rank's shard. Views saved by autograd stay valid: the bytes are the same again."""
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.full):
            dist.all_gather(list(self.full.chunk(self.world)), self.shard.detach())

    def free(self) -> None:
        """Free the memory of `full`."""
        self.full.untyped_storage().resize_(0)

    def _arrived(self, param: nn.Parameter) -> None:
        self.waiting.discard(param)
        if not self.waiting:
            self.reduce()

    def reduce(self) -> None:
        """Average gradients over the ranks, summed in rank order; keep this rank's chunk as the shard's gradient."""
        grads = [p.grad for p in self.params if p.grad is not None]
        assert len(grads) == len(self.params)
        pieces = [grad.reshape(-1) for grad in grads]
        flat = torch.nn.functional.pad(torch.cat(pieces), (0, self.full.numel() - sum(p.numel() for p in self.params)))
        of_all = [torch.empty_like(flat) for _ in range(self.world)]
        dist.all_gather(of_all, flat)
        mine = [other.chunk(self.world)[self.rank] for other in of_all]
        self.shard.grad = reduce(torch.add, mine) * (1 / self.world)
        for param in self.params:
            param.grad = None
        self.waiting = {param for param in self.params if param.requires_grad}
        self.free()


class PlainFSDP(nn.Module):
    """The units of ``module`` (instances of ``classes``, and the rest as one), of one dtype; every parameter is used.

    No parameter may be frozen. Optimize `shards`.
    """

    def __init__(self, module: nn.Module, classes: Iterable[type[nn.Module]]) -> None:
        super().__init__()
        self.module = module
        taken: set[nn.Parameter] = set()
        self.units: list[PlainUnit] = []
        for child in reversed(list(module.modules())):  # inner modules before outer ones
            if child is module or isinstance(child, tuple(classes)):
                own = [param for param in child.parameters() if param not in taken]
                taken.update(own)
                self.units.append(PlainUnit(child, own))

    @property
    def shards(self) -> list[nn.Parameter]:
        """The parameters for this rank's optimizer."""
        return [unit.shard for unit in self.units]

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def whole(self, read: Callable[[nn.Module], Any]) -> Any:
        """``read(module)`` while every parameter is unsharded."""
        for unit in self.units:
            unit.gather()
        result = read(self.module)
        for unit in self.units:
            unit.free()
        return result
