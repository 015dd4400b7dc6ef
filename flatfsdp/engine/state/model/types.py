"""The kind of a model's state dict: a setting of all wrappers in a module, for the time of a context or permanently;
the form of values that follows from it; and whether values share memory with the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import nn

from ....errors import UsageError
from ...config.state_dict_configs import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    settings,
)
from ...models.walks import units_in
from ...runtime.unit import Unit


def settings_of(module: nn.Module) -> StateDictSettings:
    """The settings of the wrappers inside `module`, which are all the same; the defaults if there are none.

    Raises:
        UsageError: they differ.
    """
    units = units_in(module)
    found = [unit.options.state_dict for unit in units]
    for unit, other in zip(units, found, strict=True):
        if other != found[-1]:
            raise UsageError(
                f"unit {_described(unit)} was set to {other.state_dict_type.name} and unit {_described(units[-1])} to "
                f"{found[-1].state_dict_type.name}, or to other configs; one state dict holds values of one kind. Call "
                "set_state_dict_type() on the module whose state dict you take"
            )
    return found[-1] if found else StateDictSettings()


@dataclass(frozen=True)
class StateDictRequest:
    """The form of the values of a state dict, of a model or of an optimizer.

    Attributes:
        carrier: "whole" tensors; otherwise this rank's elements: an "interval", which takes no communication, rows as
            "sharded_tensor" or "dtensor", or "fsdp1" (see `carrier_of`).
        offload_to_cpu: whether tensors are copied to the CPU.
        rank0_only: whether only the first rank gets, or has, values; for whole tensors.
    """

    carrier: str
    offload_to_cpu: bool = True
    rank0_only: bool = False

    @classmethod
    def of(cls, config: StateDictConfig | OptimStateDictConfig) -> StateDictRequest:
        """The request that `config` stands for."""
        whole = isinstance(config, FullStateDictConfig | FullOptimStateDictConfig)
        carrier = "whole" if whole else getattr(config, "sharded_as", "interval")
        return cls(carrier, config.offload_to_cpu, getattr(config, "rank0_only", False))

    @property
    def device(self) -> torch.device | None:
        """The device for tensors; None: each stays on its own."""
        return torch.device("cpu") if self.offload_to_cpu else None

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in memory of its own, on the requested device."""
        return tensor.detach().to(self.device or tensor.device, copy=True)


def only_rank0(chosen: StateDictSettings) -> bool:
    """Whether only the first rank gets, or has, the values of a model's state dict."""
    return StateDictRequest.of(chosen.state_dict_config).rank0_only


class StateDictTypes:
    """Methods of the wrapper that choose the kind of its state dicts."""

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType | str,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """A context in which state dicts of `module`, and of its optimizers, are of one type. No communication.

        Args:
            module: a wrapper, or any module with wrappers inside.
            state_dict_type: a `StateDictType`, or the name of a member ("FULL", "SHARDED", "LOCAL" will do).
            state_dict_config: the config for models that belongs to the type; None for its defaults.
            optim_state_dict_config: the config for optimizers; None for its defaults.

        Raises:
            ConfigTypeError, ConfigValueError: no such type, or a config that belongs to another one.
        """
        units = units_in(module)
        before = [unit.options.state_dict for unit in units]
        _choose(units, settings(state_dict_type, state_dict_config, optim_state_dict_config))
        try:
            yield
        finally:
            for unit, earlier in zip(units, before, strict=True):
                _choose([unit], earlier)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType | str,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """As `state_dict_type`, with the same arguments (`module`, `state_dict_type`, `state_dict_config`,
        `optim_state_dict_config`), but until the next call; returns the settings before. No communication."""
        before = settings_of(module)
        _choose(units_in(module), settings(state_dict_type, state_dict_config, optim_state_dict_config))
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of all wrappers in `module`.

        Raises:
            UsageError: they differ.
        """
        return settings_of(module)


def _choose(units: list[Unit], chosen: StateDictSettings) -> None:
    for unit in units:
        unit.options = replace(unit.options, state_dict=chosen)


def _described(unit: Unit) -> str:
    return f"{unit.label} ({unit.entries.class_name})"


_shares_memory: ContextVar[bool] = ContextVar("values of state dicts share memory", default=False)


@contextmanager
def sharing_memory() -> Iterator[None]:
    """Inside, values of sharded state dicts share memory with the model or optimizer.

    [Note: shared values] A checkpoint that is written at once needs no copies: this rank's elements of parameters, and
    of an optimizer's states, are returned in place. Full values are gathered, and are always copies.
    """
    token = _shares_memory.set(True)
    try:
        yield
    finally:
        _shares_memory.reset(token)


def shares_memory() -> bool:
    """Whether the caller is inside `sharing_memory()`."""
    return _shares_memory.get()
