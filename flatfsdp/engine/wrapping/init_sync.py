"""Joint actions of all ranks' constructors: copy rank 0's values, fail, and undo their wrapping.

[Note: constructors] Ranks meet in exchanges of one size, over the axes and in the order of the comparison at the first
forward. So a rank that waits for the others gets a report of their position instead of a hang, be it in another
constructor, in one that failed, or in a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from ..agreement.model_check import compare_facts
from ..base.fqns import fqn
from ..comm.axes import ProcessGroups
from ..comm.comm_stats import CommStats
from ..comm.transport import Transport
from ..device.memory import MemoryTracker
from ..device.streams import Device
from ..dtensor.gather_hooks import inner_of
from ..transports.blocking import broadcast
from .exchanges import EXCHANGES


def meeting_axes(groups: ProcessGroups, device: Device) -> list[Transport]:
    """The axes over which the constructors of a unit meet. [Note: constructors]"""
    comm_stats, tracker = CommStats(), MemoryTracker()
    return [
        EXCHANGES.transport(axis, device, comm_stats=comm_stats, tracker=tracker)
        for axis in (groups.scatter, groups.replicate)
        if axis is not None and axis.size > 1
    ]


@contextmanager
def reporting_failure(axes: list[Transport]) -> Iterator[None]:
    """If the enclosed code fails on this rank, ranks that reach `synchronize` fail as well.

    Collective over `axes` if it fails.
    """
    try:
        yield
    except Exception as error:
        failure = _in_words(error)
        with suppress(RuntimeError):  # the other ranks' reaction matters less than `error`
            facts = [("construction", "failed", True)]
            compare_facts(axes, facts, reason=failure, doing=f"fails to wrap after {failure}")
        raise


def agree_to_undo(count: int, axes: list[Transport], error: BaseException | None) -> None:
    """After `error` in a constructor that has wrapped `count` modules: all ranks undo it. Collective over `axes`.

    Raises:
        AgreementError: some do not. `error` is reported to them, in a constructor that copies values or at their first
            forward.
    """
    failure = _in_words(error)
    facts = [("construction", f"failed with {count} modules wrapped", True)]
    compare_facts(axes, facts, reason=failure, doing=f"undoes the wrapping of {count} modules after {failure}")


def synchronize(
    module: nn.Module,
    modules: list[tuple[str, nn.Module]],
    leaves: list[tuple[nn.Parameter, str]],
    axes: list[Transport],
    axes_of: Callable[[torch.Tensor], list[Transport]],
) -> None:
    """Overwrite parameters and buffers with those of rank 0, each over those of `axes` along which ranks have equal
    ones, its `axes_of`. Collective over `axes`.

    Raises:
        AgreementError: on every rank, if ranks would send tensors that do not fit each other.
    """
    if not axes:
        return
    tensors: list[tuple[torch.Tensor, str]] = list(leaves)
    for path, each in modules:
        tensors += [(buffer, fqn(path, name)) for name, buffer in each._buffers.items() if buffer is not None]
    subject = f"a unit of class {type(module).__name__}"
    facts = [("construction", "continues", True), (subject, f"of {len(tensors)} tensors", True)]
    for tensor, path in tensors:
        found = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        facts.append((f"{subject}, {path}", found, False))
    compare_facts(axes, facts, doing=f"copies the values of {subject} from rank 0")
    with torch.no_grad():
        for tensor, _ in tensors:
            if not (same := axes_of(tensor)):
                continue
            # The ranks of a DTensor's own axes have the same part; other ranks of the unit may have other parts.
            here: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            for plain in inner_of(here.detach()):
                on_device = plain.to(axes[0].device.device).contiguous()
                for axis in same:
                    broadcast(axis, on_device)
                if on_device.data_ptr() != plain.data_ptr():
                    plain.copy_(on_device)


def _in_words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
