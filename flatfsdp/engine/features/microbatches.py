"""The microbatches of a step: which one runs, and which have run. [Note: deterministic sums]"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from ...api import check_number
from ...errors import UsageError, fail, few, ranks_in_words, refuse_value
from ..base.overrides import Override
from ..comm.sum_tree import SumTree
from ..flat.flat_param import FlatParamHandle
from ..runtime.model import Model


@dataclass(eq=False)
class Microbatch:
    """One microbatch: its index, None for a stand-in, and the number of all; whether a backward has begun in it, and
    whether it runs again, so that its gradients are only looked at."""

    index: int | None
    of: int
    begun: bool = False
    again: bool = False


running: Override[Microbatch | None] = Override(None)


@contextmanager
def microbatch(index: int | None, *, of: int) -> Iterator[None]:
    """A context around the forward and the backward of one microbatch of a step, for models with
    `deterministic_sums=True`.

    A step consists of `of` microbatches, whose indices are those of all ranks together: every index from 0 to `of` - 1
    occurs once, on any rank, in any order. Gradients are the mean over them, so the loss of a microbatch is the mean of
    its own samples, and is not divided. `.grad` is set by the backward that completes the step; under `no_sync()`
    the last backward of each rank reduces, as always.

    Every forward and backward of a model is collective. A rank with fewer microbatches than others runs the rest with
    any batch and with `index=None`: gradients of that backward are dropped.

    Args:
        index: of this microbatch among those of the step; None for a stand-in.
        of: the number of microbatches of the step, the same on all ranks.

    Raises:
        ConfigTypeError, ConfigValueError: `index` or `of` is not such a number.
        UsageError: inside of another `microbatch`. In the backward: this index, or another `of`, ran before in this
            step, here or on another rank; on all ranks, before anything is added up. At its end: no backward of a
            model with `deterministic_sums=True` ran inside.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> net = torch.nn.Linear(2, 1)
        >>> model = flatfsdp.FullyShardedDataParallel(net, use_orig_params=True, deterministic_sums=True)
        >>> for index in range(3):
        ...     with flatfsdp.microbatch(index, of=3):
        ...         model(torch.full((4, 2), float(index))).mean().backward()
        >>> model.weight.grad
        tensor([[1., 1.]])
    """
    check_number("microbatch: of", of, "the number of microbatches of a step, at least 1", 1)
    if index is not None:
        accepted = f"an index from 0 to {of - 1}, or None for a batch whose gradients are dropped"
        if check_number("microbatch: index", index, accepted, 0) >= of:
            refuse_value("microbatch: index", index, accepted)
    if running.value is not None and running.value.again:
        yield
        return
    if running.value is not None:
        raise UsageError(f"microbatch({index}, of={of}) inside of microbatch({running.value.index}): use one at a time")
    made = Microbatch(index, of)
    with running.being(made):
        yield
    if not made.begun:
        raise UsageError(
            f"microbatch({index}, of={of}): no backward of a model with deterministic_sums=True ran inside, so nothing "
            "was numbered, or divided by the number of microbatches. Wrap the model with deterministic_sums=True, and "
            "call backward() inside of the context; or leave the context out"
        )


@dataclass
class Step:
    """The microbatches of the running step, as far as this rank knows.

    Attributes:
        tree: over its microbatches.
        own: those whose backward this rank has run.
        exchanged: what ranks have added in each exchange, by global rank.
        is_complete: whether the last exchange has brought all.
    """

    tree: SumTree
    own: set[int] = field(default_factory=set)
    exchanged: list[Mapping[int, frozenset[int]]] = field(default_factory=list)
    is_complete: bool = False

    def begin(self, next: Microbatch) -> str:
        """A backward of `next` begins: why it is none of this step, or ""."""
        called = f"microbatch({next.index}, of={next.of})"
        if next.of != self.tree.leaves:
            return (
                f"{called}: earlier microbatches of this step had of={self.tree.leaves}, of which "
                f"{few(list(map(str, self.missing))) or 'none'} did not come on this rank. All microbatches of a step "
                "have the same number"
            )
        if next.index in self.own:
            return (
                f"{called}: a backward of this microbatch has run in this step. Each index belongs to one backward. To "
                "run the step again, drop what has run of it by zero_grad() of the outermost module, on all ranks"
            )
        if next.index is not None:
            self.own.add(next.index)
        return ""

    def exchange(self, added: Mapping[int, frozenset[int]], *, of: int) -> None:
        """Take what ranks have added since the last exchange, each of them in place of `of`, where ranks are simulated
        and do as much as this one. Raises UsageError if a microbatch was there already."""
        owners: dict[int, list[int]] = {}
        for rank, indices in [item for each in (*self.exchanged, added) for item in each.items()]:
            for index in indices:
                owners.setdefault(index, []).append(rank)
        if repeated := sorted(index for index, ranks in owners.items() if len(ranks) > 1):
            raise UsageError(
                f"deterministic_sums=True: microbatch {repeated[0]} of {self.tree.leaves} ran on "
                f"{ranks_in_words(sorted(owners[repeated[0]]))}, but each belongs to one rank"
                f"{f' (and {len(repeated) - 1} more like it)' if len(repeated) > 1 else ''}. Number the microbatches "
                "of all ranks together, for example rank * count + number"
            )
        self.exchanged.append(added)
        self.is_complete = len(owners) * of >= self.tree.leaves

    def added_by(self, ranks: Iterable[int], first: int = 0, last: int | None = None) -> frozenset[int]:
        """The microbatches that these ranks have added in exchanges from `first` to before `last`."""
        found = [each[rank] for each in self.exchanged[first:last] for rank in ranks if rank in each]
        return found[0] if len(found) == 1 else frozenset().union(*found)

    @property
    def missing(self) -> list[int]:
        """Those that no rank has added, as far as this rank knows."""
        found = self.own.union(*(indices for each in self.exchanged for indices in each.values()))
        return [index for index in range(self.tree.leaves) if index not in found]


class Ledger:
    """The microbatches of the steps of one model.

    Attributes:
        step: the running one; None between steps.
        groups: by global rank, the ranks of its shard group.
        look: if anything is attached that looks at gradients before they are added to others: called with a flat
            parameter, the index of the microbatch (None for a stand-in), and the unsharded gradient.
    """

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self.step: Step | None = None
        self.groups: dict[int, frozenset[int]] = {}
        self.look: Callable[[FlatParamHandle, int | None, torch.Tensor], object] | None = None

    @property
    def running(self) -> Step:
        """The running step."""
        assert self.step is not None
        return self.step

    def refuse(self, problem: str) -> NoReturn:
        """Refuse a backward of this rank, which others may not: autograd does not pass the reason on to them."""
        error, model = UsageError(problem), self._model()
        if model is not None:
            model.agreement.refuse(error)
        fail(error)
