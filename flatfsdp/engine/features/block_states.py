"""Public function for optimizers that keep quantized states, of which a block of elements shares a scale.

[Note: block states] Low-bit optimizers of torchao and bitsandbytes step on each element by itself, but quantize states
in blocks, each with a scale; and only those of parameters that have enough elements (torchao: and whole blocks). On a
rank's part of a parameter, both would depend on the number of ranks. So parameters are cut between blocks
(`layout.state_blocks`), and the sizes of whole parameters decide which states are quantized: then a state has the bits
that it has in one process.

For state dicts, a quantized state is two plain ones: *codes*, a byte for each element, split as the parameter is, with
how to read them in their name; and *scales*, one for each block, of which every rank gets all. So they are saved by
name, and cut for any number of ranks. A step, or `load_state_dict()`, puts them together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ...errors import UsageError, refuse_type
from ..base import _dtensor
from ..comm.transport import Transport
from ..flat.faces import adoptions
from ..guards.optimizer_hooks import OfOptimizer, check_shapes, give_wholes, is_at_work, steps_on_wholes
from ..layout.layout import ParamSpec, Span
from ..models import param_registry as registry
from ..models.rest import quiesce
from ..planning.grains import LEAST_QUANTIZED
from ..planning.owners import parts_of
from ..state.optim.descriptions import KeptWhole
from ..state.optim.stamp import comparing
from ..state.owned_interval import OwnedInterval
from ..transports.blocking import all_reduce_now
from .matrix_adapters import Slot
from .matrix_states import like_holder
from .matrix_steps import each_managed

State = dict[str, Any]
CODES, SCALES = ".codes", ".scales"
AVERAGE = "exp_avg"  # the signed one of torchao's states


class BlockStates(OfOptimizer):
    """The states of one optimizer of torchao in blocks of whole parameters; made by `block_states`, and kept by the
    hooks. A state is a tensor of a class with codes and scales.

    Attributes:
        exchanges: False: each rank steps by itself.
        imbalance: None.
        names: the names of its quantized states.
        block: the number of elements that share a scale.
        begin: the step count of a new state.
        plain: the dtype of states that are not quantized; None for that of the parameter.
    """

    exchanges = False
    imbalance = None
    names: tuple[str, ...] = (AVERAGE, "exp_avg_sq", "max_exp_avg_sq")
    block: int
    begin: Any = torch.tensor(0.0)
    plain: torch.dtype | None = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._slots: dict[int, Slot | None] = {}
        self._facts: Any = None
        self._codes = CODES
        self._take(self.optimizer)
        self.ranks_changed()
        optimizer.register_step_pre_hook(self._before_step)
        give_wholes(optimizer, self, blocks=True)

    def _take(self, optimizer: Any) -> None:
        """Let new states of `optimizer` be those made here."""
        self.block = int(optimizer.block_size)
        self._codes += _form_of(self._quantized_zeros(torch.zeros(self.block), True))
        optimizer._new_buffer = self._new_state
        optimizer.register_load_state_dict_pre_hook(self._before_loading)

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

    def _group_of(self, slot: Slot) -> tuple[int, int, dict[str, Any]]:
        """The number of the param group that has the parameter now, that of the parameter there, and the group. In a
        backward an optimizer may have some of its groups only."""
        for number, group in enumerate(self.optimizer.param_groups):
            for position, each in enumerate(group["params"]):
                if each is slot.parameter:
                    return number, position, group
        raise AssertionError(f"{slot.name} is in no group")

    def is_quantized(self, slot: Slot) -> bool:
        """Whether one process would quantize states of the parameter."""
        return slot.spec.numel >= LEAST_QUANTIZED and slot.spec.numel % self.block == 0

    def _count(self, numel: int) -> int:
        """The number of blocks of so many elements."""
        return -(-numel // self.block)

    def _check(self, slot: Slot) -> None:
        spec, block = slot.spec, self.block
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
                    f"layout= of the optimizer's class, or of flatfsdp.layout.state_blocks({block})"
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
        return self.optimizer._subclass_zeros(local, signed, self.block)

    def _made(self, slot: Slot, name: str) -> State:
        """A new state of this rank's elements, as the optimizer keeps it."""
        return {name: self._new_state(slot.parameter, name == AVERAGE)}

    def _local(self, slot: Slot, state: State, name: str) -> Any:
        """The codes and scales of this rank's elements of a quantized state; None if there is none."""
        return None if name not in state else slot.handle.face.local_of(state[name])

    def _name_of(self, key: str) -> str:
        """The state that an entry is a part of."""
        return key

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
        device, states = axis.device.device, self.optimizer.state
        own = [(s, name, self._local(s, states.get(s.parameter, {}), name)) for s in slots for name in self.names]
        sizes = [self._count(slot.spec.numel) for slot, _, _ in own]
        every = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        for scales, (slot, _, local) in zip(every.split(sizes), own, strict=True):
            if local is not None and local.numel():
                scales.narrow(0, slot.start // self.block, local.scale.numel()).copy_(local.scale)
        all_reduce_now(axis, every)  # each is one rank's, and zero on others
        divided: dict[Slot, dict[str, State]] = {}
        for scales, (slot, name, local) in zip(every.split(sizes), own, strict=True):
            if local is not None:
                here = slot.own().device
                codes = _codes_of(local) if local.numel() else torch.empty(0, dtype=torch.uint8, device=here)
                divided.setdefault(slot, {})[name] = {
                    name + self._codes: like_holder(slot, codes.reshape(-1)),
                    name + SCALES: scales.to(here, copy=True).as_subclass(KeptWhole),
                }
        for slot, parts in divided.items():
            state = states[slot.parameter]
            found: State = {}
            for key, value in state.items():
                found |= parts.get(self._name_of(key), {key: value})
            state.clear()
            state.update(found)

    def _join(self, slot: Slot, state: State) -> None:
        """The inverse of `_divide` for one parameter; nothing if its states are quantized ones. No communication.

        Raises:
            UsageError: they were coded otherwise than this optimizer does.
        """
        if not any(CODES in str(key) for key in state):
            return
        count = self._count(slot.spec.numel)
        found: State = {}
        for key, value in state.items():
            name = key.partition(CODES)[0].removesuffix(SCALES)
            if name == key:
                found[key] = value
            elif name not in found:
                scales = state[name + SCALES].as_subclass(torch.Tensor)
                fits = name + self._codes in state and name in self.names and scales.numel() == count
                if not (fits and self.is_quantized(slot)):
                    kinds = sorted(each for each in state if CODES in each)
                    raise UsageError(
                        f"block_states: the optimizer states {', '.join(kinds)} of {slot.name} with {scales.numel():,} "
                        f"scales are of another low-bit optimizer: this {type(self.optimizer).__name__} has "
                        f"{self.names[0]}{self._codes} and {count:,} scales, for blocks of {self.block}. Load them "
                        "into one of the class and block size with which they were saved"
                    )
                found |= self._made(slot, name)
                local = self._local(slot, found, name)
                if local.numel():
                    codes = slot.handle.face.local_of(state[name + self._codes])
                    _fill(local, codes, scales.narrow(0, slot.start // self.block, self._count(local.numel())))
        state.clear()
        state.update(found)

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in self._parameters():
            state = optimizer.state.get(parameter)
            if state and (slot := self.slot_of(parameter)) is not None:
                self._join(slot, state)
                check_shapes({name: state[name] for name in self.names if name in state}, parameter, slot.name)

    @torch.no_grad()
    def _before_loading(self, optimizer: torch.optim.Optimizer, state_dict: State) -> State:
        """Put states together before torch casts them to the dtype of their parameters."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        states = dict(state_dict["state"])
        for key, parameter in zip(keys, self._parameters(), strict=False):
            if states.get(key) and (slot := self.slot_of(parameter)) is not None:
                states[key] = dict(states[key])
                self._join(slot, states[key])
                self._check_quantized(slot, states[key])
        return {**state_dict, "state": states}

    def _check_quantized(self, slot: Slot, state: State) -> None:
        """
        Raises:
            UsageError: a state of this rank's elements is not quantized, as this optimizer would have it.
        """
        for name in self.names if self.is_quantized(slot) and slot.own().numel() else ():
            if name in state and not hasattr(self._local(slot, state, name), "codes"):
                raise UsageError(
                    f"block_states: {name} of {slot.name} is not quantized, and this {type(self.optimizer).__name__} "
                    "would step in full precision. Load states that an optimizer of this class has saved"
                )

    @torch.no_grad()
    def held(self, parameter: torch.Tensor) -> tuple[list[OwnedInterval], State] | None:
        """The codes of this rank's elements and the scales of their blocks, and other states; None if none of them is
        quantized."""
        state, slot = self.optimizer.state.get(parameter, {}), self.slot_of(parameter)
        if slot is None or not self.is_quantized(slot) or any(CODES in str(key) for key in state):
            return None
        found: list[OwnedInterval] = []
        others: State = {}
        for name, value in state.items():
            if self._name_of(name) not in self.names:
                others[name] = value
            elif name in self.names and (local := self._local(slot, state, name)).numel():
                codes, scales = _codes_of(local).reshape(-1), local.scale.detach().reshape(-1)
                of_codes = ParamSpec(name + self._codes, slot.spec.shape)
                of_scales = ParamSpec(name + SCALES, (self._count(slot.spec.numel),))
                found.append(OwnedInterval(codes, of_codes, Span(slot.start, slot.start + codes.numel())))
                at = Span(0, scales.numel()).shift(slot.start // self.block)
                found.append(OwnedInterval(scales, of_scales, at))
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
        found: State = {"step": self.begin}
        amsgrad = self._group_of(slot)[2].get("amsgrad", False)
        for name in self.names[: 3 if amsgrad else 2]:
            if self.is_quantized(slot):
                found[name + self._codes] = torch.zeros_like(like, dtype=torch.uint8)
                scales = torch.zeros(self._count(slot.spec.numel), device=like.device)
                found[name + SCALES] = scales.as_subclass(KeptWhole)
            else:
                found[name] = torch.zeros_like(like, dtype=self.plain)
        return found


class _OfBitsandbytes(BlockStates):
    """The states of one optimizer of bitsandbytes. A state is three tensors: codes, scales, and the values of codes,
    which are the same for all parameters."""

    names: tuple[str, ...] = ("state1", "state2")
    block = 256
    begin = 0
    plain = torch.float32

    def _take(self, optimizer: Any) -> None:
        cls = type(optimizer)
        if not any(each.__name__ == "Optimizer2State" for each in cls.__mro__):
            self.names = self.names[:1]
        optimizer.check_overrides()  # of single parameters, by its `GlobalOptimManager`; else called in the first step
        optimizer.initialized = True
        optimizer.init_state = self._begin
        # Those of the class hide states from FSDP1, and call no hooks.
        optimizer.state_dict = self._state_dict
        optimizer.load_state_dict = self._load

    def is_quantized(self, slot: Slot) -> bool:
        """Whether one process would quantize states of the parameter."""
        config = self.optimizer.get_config(*self._group_of(slot))
        return bool(config["optim_bits"] == 8 and slot.spec.numel >= config["min_8bit_size"])

    def _check(self, slot: Slot) -> None:
        if _dtensor.is_dtensor(slot.parameter):
            raise UsageError(
                f"block_states: {slot.name} is a DTensor, which bitsandbytes' kernels do not take. Use "
                "FullyShardedDataParallel in place of fully_shard"
            )
        if (most := self.optimizer.get_config(*self._group_of(slot)).get("max_unorm", 0.0)) > 0.0:
            raise UsageError(
                f"block_states: max_unorm={most} of {slot.name} needs the norm of the whole parameter, of which this "
                "rank has a part. Use 0.0"
            )
        super()._check(slot)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_at_work(optimizer) and self.optimizer.mng.index2config:
            raise UsageError(
                f"block_states: {type(optimizer).__name__} has settings for parameters by their places in its groups "
                "(GlobalOptimManager), which are others while optimizer_in_backward steps on some of them. Give these "
                "parameters groups of their own with such settings, or step after the backward"
            )
        super()._before_step(optimizer, args, kwargs)

    def _begin(self, group: Any, parameter: torch.Tensor, *numbers: int) -> None:
        """In place of the method of the class."""
        if (slot := self.slot_of(parameter)) is None:
            return type(self.optimizer).init_state(self.optimizer, group, parameter, *numbers)
        state = self.optimizer.state[parameter]
        state["step"] = self.begin
        for name in self.names:
            state |= self._made(slot, name)

    def _made(self, slot: Slot, name: str) -> State:
        local, number = slot.handle.face.local_of(slot.parameter).detach(), name[-1]
        if not self.is_quantized(slot):
            return {name: torch.zeros_like(local, dtype=self.plain)}
        if not self.optimizer.name2qmap:
            self.optimizer.fill_qmap()
        values = self.optimizer.name2qmap["dynamic" if number == "1" else "udynamic"].to(local.device)
        scales = torch.zeros(self._count(local.numel()), device=local.device)
        return {name: torch.zeros_like(local, dtype=torch.uint8), f"qmap{number}": values, f"absmax{number}": scales}

    def _local(self, slot: Slot, state: State, name: str) -> Any:
        if (scales := state.get(f"absmax{name[-1]}")) is None:
            return None
        codes = state[name]
        return SimpleNamespace(codes=codes, scale=scales, shape=codes.shape, numel=codes.numel)  # as torchao has it

    def _state_dict(self) -> State:
        return torch.optim.Optimizer.state_dict(self.optimizer)

    def _load(self, state_dict: State, **settings: Any) -> None:
        def load(optimizer: Any, state_dict: State) -> None:
            type(optimizer).load_state_dict(optimizer, self._before_loading(optimizer, state_dict), **settings)

        comparing(load)(self.optimizer, state_dict)

    def _name_of(self, key: str) -> str:
        return f"state{key[-1]}" if key[:-1] in ("absmax", "qmap") else key


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
    """Let a low-bit optimizer of torchao (Adam and AdamW with 8 or 4 bits, or float8), or one of bitsandbytes with 8
    bits (Adam, AdamW, Lion, SGD, RMSprop, Adagrad), have the states of one process.

    These optimizers quantize states in blocks, each with a scale, if a parameter has at least 4,096 elements (torchao:
    and whole blocks of them). On shards both would depend on the number of ranks. With this, the sizes of whole
    parameters decide, and cuts inside of blocks are refused: wrap with the class of the optimizer as `layout=`. Under
    `fully_shard`, the rows of a rank must be whole blocks, and optimizers of bitsandbytes are refused.

    `FullyShardedDataParallel.optim_state_dict` and checkpoints have `exp_avg.codes` (`codes_4bit`, or
    `codes_float8_e4m3fn`), a byte for each element, and `exp_avg.scales` in place of `exp_avg`; with bitsandbytes
    `state1.codes` and `state1.scales` in place of `state1`, `absmax1` and `qmap1`. They are for any number of ranks and
    any cuts; so are those of one process that calls this. That is collective. `optimizer_in_backward` and schedulers
    work as before.

    Args:
        optimizer: over parameters of models that were wrapped before (`use_orig_params=True`, or `fully_shard`). It is
            changed, and returned. Copies and pickles of it need this call again.

    Raises:
        ConfigTypeError: it is no low-bit optimizer of torchao or bitsandbytes, or one that looks at whole tensors
            (LAMB, LARS), has states of two averages (AdEMAMix), or moves states to the host (paged ones).
        UsageError: a parameter that is cut inside of a block, flat, of tensor parallelism, or not row-major; it was
            called before.
    """
    forms = {("_new_buffer", "_subclass_zeros"): BlockStates, ("init_state", "name2qmap"): _OfBitsandbytes}
    found = [form for wanted, form in forms.items() if all(hasattr(optimizer, each) for each in wanted)]
    others = "lamb", "lars", "ademamix"
    is_other = getattr(optimizer, "optimizer_name", "") in others or getattr(optimizer, "is_paged", False)
    if not isinstance(optimizer, torch.optim.Optimizer) or not found or is_other:
        accepted = "a low-bit Adam or AdamW of torchao.optim; or an 8-bit one of bitsandbytes.optim, other than LAMB, "
        refuse_type("block_states: optimizer", optimizer, f"{accepted}LARS, AdEMAMix and paged ones")
    if optimizer in steps_on_wholes:
        raise UsageError(f"block_states(): it was called for this {type(optimizer).__name__} before, or matrix_steps()")
    found[0](optimizer)
    return optimizer
