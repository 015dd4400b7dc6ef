"""The needs of a job that is to outlive losses, checked when its `survive` begins: a model, a backend, a store."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from typing import Any

import torch.distributed as dist
from torch import nn

from ..engine.agreement.process_groups import require_process_group
from ..engine.models.rest import check_outermost
from ..engine.models.walks import units_in
from ..engine.wrapping.regrouping import at_rest
from ..errors import UsageError, refuse_type
from ..messages import gather
from . import connections
from .replicas import Replicas


def checked(model: nn.Module) -> Replicas:
    """The replicas of `model`. Collective.

    Raises:
        UsageError: the model, or the job, cannot outlive a loss. On all ranks.
    """
    require_process_group("survive()")
    if not hasattr(os, "memfd_create"):
        raise UsageError(
            f"survive(): ranks leave their state in files of Linux without a name, but this is {sys.platform}"
        )
    units = units_in(model)
    if not units or check_outermost(units[-1], "survive()").outermost is not units[-1]:
        raise UsageError("survive(): model: expected a sharded model, found no sharded module in it")
    backend = str(dist.get_backend_config(dist.group.WORLD))
    if {each.rpartition(":")[2] for each in backend.split(",")} != {"gloo"}:
        raise UsageError(
            f"survive(): the backend of the process group is {backend}. Waits can be broken from outside, and groups "
            "made anew, over gloo only so far"
        )
    replicas = Replicas(units)
    for unit in units:
        for handle in unit.handles:
            if handle.precision.error_feedback:
                raise UsageError(
                    f"survive(): unit {unit.label} has reduce_error_feedback=True, whose residuals would be lost"
                )
    try:
        at_rest(model)
    except UsageError as error:
        raise UsageError(
            f"survive(): after a loss the model could not move to the ranks that are left: {error}"
        ) from None
    return replicas


def base_of(process_group: Any) -> tuple[Any, str]:
    """The store of the default process group, without prefixes, and a prefix there that no other `survive` has, of this
    program or of an earlier start with the same store.

    Raises:
        ConfigTypeError: it is no TCPStore.
        UsageError: on all ranks: a rank serves it.
    """
    store = tcp_store(process_group.get_group_store(), "survive: the store of the process group")
    own = store.port in connections.listening_ports(), uuid.uuid4().hex
    found = gather(own, process_group, call="called survive()")
    serves = [each for each, _ in found]
    if any(serves):
        raise UsageError(
            f"survive(): rank {serves.index(True)} serves the store of the process group, and its loss would end the "
            "job. Launch with torchrun, which serves it, or pass init_process_group(store=) one that another process "
            "serves"
        )
    return store, f"elastic/{found[0][1]}"


def tcp_store(store: Any, what: str) -> Any:
    """`store` without prefixes.

    Raises:
        ConfigTypeError: it is of another kind.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        refuse_type(what, store, "a TCPStore, which processes reach also when others are lost, or come later")
    return store


def own_host(host: str, port: int) -> str:
    """The address of this machine by which those reach it that reach the store."""
    with socket.create_connection((host, port), timeout=10.0) as line:
        return str(line.getsockname()[0])
