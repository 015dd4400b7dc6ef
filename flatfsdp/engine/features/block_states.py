"""Public function for optimizers that keep quantized states, of which a block of elements shares a scale.

[Note: block states] torchao's low-bit optimizers step on each element by itself, but quantize states in blocks, each
with a scale; and only those of parameters that have enough elements, and whole blocks. On a rank's part of a parameter,
both would depend on the number of ranks. So parameters are cut between blocks (`layout.state_blocks`), and the sizes of
whole parameters decide which states are quantized: then a state has the bits that it has in one process.

For state dicts, a quantized state is two plain ones: *codes*, a byte for each element, split as the parameter is, with
how to read them in their name; and *scales*, one for each block, of which every rank gets all. So they are saved by
name, and cut for any number of ranks. A step, or `load_state_dict()`, puts them together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UsageError, refuse_type
from ..base import _dtensor
from ..base.overrides import is_memoryless
from ..comm.transport import Transport
from ..flat.faces import adoptions
from ..guards.optimizer_hooks import OfOptimizer, check_shapes, give_wholes, steps_on_wholes
from ..layout.layout import ParamSpec, Span
from ..models import param_registry as registry
from ..models.rest import quiesce
from ..planning.grains import LEAST_QUANTIZED
from ..planning.owners import parts_of
from ..state.optim.descriptions import KeptWhole
from ..state.owned_interval import OwnedInterval
from ..transports.blocking import all_reduce_now
from .matrix_exchange import Slot
from .matrix_states import like_holder
from .matrix_steps import each_managed

State = dict[str, Any]
CODES, SCALES = ".codes", ".scales"
AVERAGE = "exp_avg"  # the signed one of torchao's states
NAMES = (AVERAGE, "exp_avg_sq", "max_exp_avg_sq")


class BlockStates(OfOptimizer):
    """The states of one optimizer in blocks of whole parameters; made by `block_states`, and kept by the hooks.

    Attributes:
        exchanges: False: each rank steps by itself.
        imbalance: None.
    """

    exchanges = False
    imbalance = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._slots: dict[int, Slot | None] = {}
        self._facts: Any = None
        self._codes = CODES + _form_of(self._quantized_zeros(torch.zeros(int(self.optimizer.block_size)), True))
        self.ranks_changed()
        optimizer._new_buffer = self._new_state  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_load_state_dict_pre_hook(self._before_loading)
        give_wholes(optimizer, self, blocks=True)

    def _parameters(self) -> list[torch.Tensor]:
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    def slot_of(self, parameter: torch.Tensor) -> Slot | None:
        """The place of a parameter in its model; None if it is in no unit.

        Raises:
            UsageError: its states cannot be divided into blocks as in one process.
        """
        facts = registry.generation, adoptions.count
        if facts != self._facts:
            self._facts, self._slots = facts, {}
        if id(parameter) not in self._slots:
            slots = {id(slot.parameter): slot for slot in each_managed(self.optimizer, "block_states")}
            for slot in slots.values():
                self._check(slot)
            self._slots |= slots
            self._slots.setdefault(id(parameter), None)
        return self._slots[id(parameter)]

    def is_quantized(self, slot: Slot) -> bool:
        """Whether one process would quantize states of the parameter."""
        numel = slot.spec.numel
        return numel >= LEAST_QUANTIZED and numel % int(self.optimizer.block_size) == 0

    def _check(self, slot: Slot) -> None:
        spec, block = slot.spec, int(self.optimizer.block_size)
        replicas = slot.unit.axes.own.replicate
        is_rounded = getattr(self.optimizer, "bf16_stochastic_round", False) and slot.parameter.dtype == torch.bfloat16
        if is_rounded and replicas is not None and replicas.size > 1:
            raise UsageError(
                f"block_states: each rank rounds {slot.name} by random numbers (bf16_stochastic_round=True), but "
                f"{replicas.size} ranks have the same elements of it, and would part. Use FULL_SHARD, or float32 "
                "parameters"
            )
        if not self.is_quantized(slot):
            return
        if spec.part is not None or spec.stride is not None:
            raise UsageError(
                f"block_states: {slot.name} is "
                + ("a part of a tensor that tensor parallelism has split" if spec.part else "not row-major in memory")
                + ", so that its blocks are not those of one process. Give it to an optimizer without quantized states"
            )
        for part in parts_of(slot.handle.layout, slot.index, Span(0, spec.numel)).values():
            if part.start % block:
                other = "Shard over fewer ranks, or use the wrapper" if _dtensor.is_dtensor(slot.parameter) else "Wrap"
                raise UsageError(
                    f"block_states: {slot.name} of shape {spec.shape} is cut after {part.start:,} elements, inside"
                    f" of a block of {block} whose states share a scale. {other} with "
                    f"layout=flatfsdp.layout.state_blocks({block})"
                )

    def _new_state(self, parameter: torch.Tensor, signed: bool) -> torch.Tensor:
        """In place of the method of torchao's class: zeros, for the parameter's elements here."""
        if (slot := self.slot_of(parameter)) is None:
            found: torch.Tensor = type(self.optimizer)._new_buffer(self.optimizer, parameter, signed)
            return found
        local = slot.handle.face.local_of(parameter).detach()
        quantized = self.is_quantized(slot) and local.numel()
        made = self._quantized_zeros(local, signed) if quantized else torch.zeros_like(local)
        whole: torch.Tensor = made
        if _dtensor.is_dtensor(parameter):
            whole = _dtensor.dtensor(made, _dtensor.spec_of(parameter))
        return whole

    def _quantized_zeros(self, local: torch.Tensor, signed: bool) -> Any:
        return self.optimizer._subclass_zeros(local, signed, int(self.optimizer.block_size))

    # -- state dicts ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def to_shards(self) -> None:
        """Let each quantized state be its codes, and all scales of the parameter. Collective over shards' axes."""
        optimizer = self.optimizer
        slots = [slot for each in self._parameters() if (slot := self.slot_of(each)) and self.is_quantized(slot)]
        quiesce([*dict.fromkeys(slot.unit for slot in slots)], shards=False)
        by_axis: dict[int, tuple[Transport, list[Slot]]] = {}
        for slot in slots:
            self._join(slot, optimizer.state.get(slot.parameter, {}))
            axis = slot.unit.axes.transports_of(slot.handle).gather
            by_axis.setdefault(id(axis.group.process_group), (axis, []))[1].append(slot)
        for axis, members in by_axis.values():
            self._divide(axis, members)

    def _divide(self, axis: Transport, slots: Sequence[Slot]) -> None:
        device, block = axis.device.device, int(self.optimizer.block_size)
        own = [(slot, name, self.optimizer.state.get(slot.parameter, {}).get(name)) for slot in slots for name in NAMES]
        there = torch.tensor([value is not None for _, _, value in own], dtype=torch.uint8, device=device)
        kept = all_reduce_now(axis, there, maximum=True).tolist() if not is_memoryless() else there.tolist()
        own = [each for each, is_there in zip(own, kept, strict=True) if is_there]
        sizes = [slot.spec.numel // block for slot, _, _ in own]
        every = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        for scales, (slot, _, value) in zip(every.split(sizes), own, strict=True):
            if value is not None and (local := self._local(slot, value)).numel():
                scales.narrow(0, slot.start // block, local.scale.numel()).copy_(local.scale)
        all_reduce_now(axis, every)  # each is one rank's, and zero on others
        divided: dict[Slot, dict[str, State]] = {}
        for scales, (slot, name, value) in zip(every.split(sizes), own, strict=True):
            if value is not None:
                local = self._local(slot, value)
                codes = _codes_of(local) if local.numel() else torch.zeros_like(local, dtype=torch.uint8)
                divided.setdefault(slot, {})[name] = {
                    name + self._codes: like_holder(slot, codes.reshape(-1)),
                    name + SCALES: scales.to(local.device, copy=True).as_subclass(KeptWhole),
                }
        for slot, parts in divided.items():
            state = self.optimizer.state[slot.parameter]
            found: State = {}
            for key, value in state.items():
                found |= parts.get(key, {key: value})
            state.clear()
            state.update(found)

    def _local(self, slot: Slot, value: torch.Tensor) -> Any:
        return slot.handle.face.local_of(value)

    def _join(self, slot: Slot, state: State) -> None:
        """The inverse of `_divide` for one parameter; nothing if its states are quantized ones. No communication.

        Raises:
            UsageError: they were coded otherwise than this optimizer does.
        """
        if not any(CODES in str(key) for key in state):
            return
        block = int(self.optimizer.block_size)
        found: State = {}
        for key, value in state.items():
            name = key.partition(CODES)[0].removesuffix(SCALES)
            if name == key:
                found[key] = value
            elif name not in found:
                scales = state[name + SCALES].as_subclass(torch.Tensor)
                if name + self._codes not in state or scales.numel() * block != slot.spec.numel:
                    kinds = sorted(each for each in state if CODES in each)
                    raise UsageError(
                        f"block_states: the optimizer states {', '.join(kinds)} of {slot.name} with {scales.numel():,} "
                        f"scales are of another low-bit optimizer: this {type(self.optimizer).__name__} has {name}"
                        f"{self._codes} and {slot.spec.numel // block:,} scales, for blocks of {block}. Load them into "
                        "one of the class and block size with which they were saved"
                    )
                made = found[name] = self._new_state(slot.parameter, name == AVERAGE)
                local = self._local(slot, made)
                if local.numel():
                    codes = self._local(slot, state[name + self._codes])
                    _fill(local, codes, scales.narrow(0, slot.start // block, local.numel() // block))
        state.clear()
        state.update(found)

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in self._parameters():
            state = optimizer.state.get(parameter)
            if state and (slot := self.slot_of(parameter)) is not None:
                self._join(slot, state)
                check_shapes(optimizer, parameter, slot.name)

    @torch.no_grad()
    def _before_loading(self, optimizer: torch.optim.Optimizer, state_dict: State) -> State:
        """Put states together before torch casts them to the dtype of their parameters."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        states = dict(state_dict["state"])
        for key, parameter in zip(keys, self._parameters(), strict=False):
            if states.get(key) and (slot := self.slot_of(parameter)) is not None:
                states[key] = dict(states[key])
                self._join(slot, states[key])
        return {**state_dict, "state": states}

    @torch.no_grad()
    def held(self, parameter: torch.Tensor) -> tuple[list[OwnedInterval], State] | None:
        """The codes of this rank's elements and the scales of their blocks, and other states; None if none of them is
        quantized."""
        state, slot = self.optimizer.state.get(parameter, {}), self.slot_of(parameter)
        if slot is None or not self.is_quantized(slot) or any(CODES in str(key) for key in state):
            return None
        found: list[OwnedInterval] = []
        others: State = {}
        block = int(self.optimizer.block_size)
        for name, value in state.items():
            if name not in NAMES:
                others[name] = value
            elif (local := self._local(slot, value)).numel():
                codes, scales = _codes_of(local).reshape(-1), local.scale.detach().reshape(-1)
                of_codes = ParamSpec(name + self._codes, slot.spec.shape)
                of_scales, at = ParamSpec(name + SCALES, (slot.spec.numel // block,)), Span(0, scales.numel())
                found.append(OwnedInterval(codes, of_codes, Span(slot.start, slot.start + codes.numel())))
                found.append(OwnedInterval(scales, of_scales, at.shift(slot.start // block)))
        return found, others

    def ranks_changed(self) -> None:
        """A step puts states together again, from codes and scales.

        Raises:
            UsageError: a parameter is cut inside of a block.
        """
        self._facts = None
        for parameter in self._parameters():
            self.slot_of(parameter)

    def state_before_first_step(self, parameter: torch.Tensor) -> State | None:
        """This rank's part of the state before the first step, as `to_shards` divides it; None if it is in no unit."""
        if (slot := self.slot_of(parameter)) is None:
            return None
        like = slot.handle.at_rest.views[slot.index]
        groups = self.optimizer.param_groups
        group = next(group for group in groups if any(each is parameter for each in group["params"]))
        found: State = {"step": torch.tensor(0.0)}
        for name in NAMES[: 3 if group["amsgrad"] else 2]:
            if self.is_quantized(slot):
                found[name + self._codes] = torch.zeros_like(like, dtype=torch.uint8)
                scales = torch.zeros(slot.spec.numel // int(self.optimizer.block_size), device=like.device)
                found[name + SCALES] = scales.as_subclass(KeptWhole)
            else:
                found[name] = torch.zeros_like(like)
        return found


def _form_of(local: Any) -> str:
    """The end of the key of codes, which are read in one way only; "" for 8 bits."""
    if 2 * local.codes.numel() == local.numel():
        return "_4bit"
    dtype = local.codes.dtype
    return "" if dtype in (torch.uint8, torch.int8) else "_" + str(dtype).removeprefix("torch.")


def _codes_of(local: Any) -> torch.Tensor:
    """A byte for each element of a quantized state."""
    codes: torch.Tensor = local.codes
    if 2 * codes.numel() == local.numel():  # two in a byte
        codes = torch.stack([codes >> 4, codes & 15], -1)
    return codes.view(torch.uint8).reshape(local.shape)


def _fill(local: Any, codes: torch.Tensor, scales: torch.Tensor) -> None:
    flat = codes.reshape(-1).to(local.codes.device)
    if 2 * local.codes.numel() == local.numel():
        flat = (flat[::2] << 4) | flat[1::2]
    local.codes.view(torch.uint8).view(-1).copy_(flat)
    local.scale.copy_(scales)


def block_states(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let a low-bit optimizer of torchao (Adam and AdamW with 8 or 4 bits, or float8) have the states of one process.

    These optimizers quantize states in blocks, each with a scale, if a parameter has at least 4,096 elements and whole
    blocks of them. On shards both would depend on the number of ranks. With this, the sizes of whole parameters decide,
    and cuts inside of blocks are refused: wrap with `layout=flatfsdp.layout.state_blocks()`. Under `fully_shard`, the
    rows of a rank must be whole blocks.

    `FullyShardedDataParallel.optim_state_dict` and checkpoints have `exp_avg.codes` (`codes_4bit`, or
    `codes_float8_e4m3fn`), a byte for each element, and `exp_avg.scales` in place of `exp_avg`, for any number of ranks
    and any cuts; so has one process that calls this. That is collective. `optimizer_in_backward` and schedulers work as
    before.

    Args:
        optimizer: over parameters of models that were wrapped before (`use_orig_params=True`, or `fully_shard`). It is
            changed, and returned. Copies and pickles of it need this call again.

    Raises:
        ConfigTypeError: it is no low-bit optimizer of torchao.
        UsageError: a parameter that is cut inside of a block, flat, of tensor parallelism, or not row-major; it was
            called before.
    """
    wanted = ("_new_buffer", "_subclass_zeros")
    if not isinstance(optimizer, torch.optim.Optimizer) or not all(hasattr(optimizer, each) for each in wanted):
        refuse_type("block_states: optimizer", optimizer, "a low-bit Adam or AdamW of torchao.optim")
    if optimizer in steps_on_wholes:
        raise UsageError(f"block_states(): it was called for this {type(optimizer).__name__} before, or matrix_steps()")
    BlockStates(optimizer)
    return optimizer
