"""The wrapper: signature, documentation, delegation. No logic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from .api import (
    DEFAULT_PREFETCH,
    JOIN_UNITS_BELOW,
    BackwardPrefetch,
    Config,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from .engine.agreement.process_groups import groups_in_words, is_first_of, resolve_groups
from .engine.base import _dynamo, _torch
from .engine.config.arguments import as_fsdp1, check_arguments
from .engine.facade.fsdp1_compat import FSDP1Names
from .engine.facade.gradients_api import GradientControls
from .engine.facade.schedule_api import ScheduleControls
from .engine.features.comm_hook import register_comm_hook
from .engine.features.forward_methods import put_through_wrapper, through_wrapper
from .engine.guards import enclosing_ddp
from .engine.models.walks import units_in, with_owning_units
from .engine.runtime.model import model_of
from .engine.runtime.module_tree import units_at
from .engine.state import full_params
from .engine.state.model import loading, saving
from .engine.state.model.types import StateDictTypes
from .engine.state.optim.api import OptimStates
from .engine.wrapping import serialization as copying
from .engine.wrapping import wrapper_support
from .engine.wrapping.auto_wrap import auto_wrapped
from .engine.wrapping.build import build_unit
from .engine.wrapping.chosen_grains import chosen_grains
from .errors import one_rank_warns


class FullyShardedDataParallel(FSDP1Names, GradientControls, ScheduleControls, StateDictTypes, OptimStates, nn.Module):
    """Train `module` with its parameters, gradients and optimizer state split over ranks.

    The parameters of `module` that no nested wrapper owns become one *unit*: they are stored in a flat parameter, of
    which each rank keeps a shard. The unit is gathered for the module's forward and for its backward; its gradients are
    averaged over ranks and arrive as shards in `.grad`. Calling the wrapper calls the module. Attributes and items of
    the module are reached through the wrapper, and names (`named_parameters()`, `named_modules()`) do not show it.

    Build the optimizer on the wrapper's parameters. Every rank must create the same wrappers in the same order and call
    the model equally often. Between steps, a parameter of the module shows this rank's part of it, flattened, which may
    be empty; full parameters are available inside `summon_full_params()`.

    Arguments have FSDP1's names, order and defaults. Enums may be given by the names of their members, and torch's own
    enums, configs and policies are accepted.

    Args:
        module: the module to wrap. Refused: a class, a module that is wrapped already, and one without its own forward
            (`nn.ModuleList`) unless all of its parameters are in wrappers inside, which are then called directly.
        process_group: the ranks to shard over; None for all. The hybrid strategies take the pair (shard group,
            replicate group), where None means the ranks of each node and their counterparts on the others.
        sharding_strategy: which tensors are sharded, and how long a unit stays gathered, see `ShardingStrategy`; None
            for FULL_SHARD.
        cpu_offload: `CPUOffload`, or a bool for its `offload_params`: whether shards and their gradients are kept in
            host memory, where the optimizer then steps. None: they are not.
        auto_wrap_policy: the modules inside that become units of their own, with the same arguments: a set of module
            classes, a policy of `flatfsdp.wrap`, or a callable `(module, recurse, nonwrapped_numel) -> bool`. None for
            no such modules. Warns if it chooses nothing. A module without its own forward is skipped, or refused if its
            parameters would never be gathered.
        backward_prefetch: when backward gathers the next unit, see `BackwardPrefetch`; None: when that unit is reached.
        mixed_precision: `MixedPrecision`, or a dtype for its `param_dtype`. None leaves all dtypes unchanged.
        ignored_modules: modules inside that are left unchanged with all of their parameters and submodules: not
            sharded, not moved, their gradients not averaged.
        param_init_fn: initializes a module that has parameters or buffers on the meta device, once they have memory on
            the compute device: `param_init_fn(module)` fills those that `module` itself holds. None for the module's
            `reset_parameters()`.
        device_id: where units compute: an index among the accelerators, a device, or its name. None for the device of
            the parameters, else the current accelerator if the process group serves it, else the CPU.
        sync_module_states: whether the constructor overwrites parameters and buffers with those of rank 0.
        forward_prefetch: whether forward gathers the next unit early, in the order of the previous forward.
        limit_all_gathers: whether gathers wait until memory is free, so that at most the unit in use and the next one
            are unsharded.
        use_orig_params: whether the optimizer sees the original parameters, each this rank's part of it, or one flat
            parameter per unit (and kind). With True, each parameter starts on 16 bytes.
        ignored_states: as `ignored_modules`, for modules or for parameters, not both.
        device_mesh: in place of `process_group`: a 1-D mesh, or 2-D (replicate, shard) for the hybrid strategies.
        check_values: the reaction to different initial values on ranks, or to replicas (of the hybrids, and under
            `NO_SHARD`) that differ later, which is checked in every thousandth backward that reduces: "warn", "raise",
            or "off". Not in FSDP1.
        reshard_after_forward: whether parameters are freed between forward and backward, or the number of ranks among
            which they stay, as in `set_reshard_after_forward`; also for wrappers by policy. None leaves it to the
            strategy. Not in FSDP1.
        join_units_below: the number of bytes of unsharded parameters up to which consecutive units are gathered and
            reduced as one, through a staging buffer of at most that size; the outermost wrapper's applies. 0 for
            never. Not in FSDP1.
        layout: the tensors that ranks split evenly. "flat": all parameters of a unit (and kind) as one, cut anywhere,
            with the least padding. "rows": each parameter by slices of its first dimension (for another memory order:
            of the slowest one), as `torch.chunk` divides them. Each rank then has whole, consecutive rows of every
            parameter, which optimizers that compute by row need; one with fewer rows than ranks is padded to a row per
            rank. Or the grains of parameters, which set where they may be cut, see `flatfsdp.layout`: a mapping from
            names of parameters or of modules, or from modules, or a callable `(name, parameter)` that returns a grain
            or None; names are those in `module`, and parameters without a grain are cut anywhere. Or a class of
            optimizers, for the grains that suit it (`flatfsdp.layout.for_optimizer`). Except with "flat", there is no
            `LOCAL_STATE_DICT`. Other state dicts and checkpoints equal "flat"'s. Not in FSDP1.
        deterministic_sums: whether gradients have the same bits on any number of ranks: the mean over the microbatches
            that `flatfsdp.microbatch` numbers, added up in an order that does not depend on ranks; of the whole model,
            if set for any part. What computes a microbatch must be the same on all ranks: the type of processor, torch,
            the number of threads and the switches of `torch.backends`, which ranks compare; and the shape of the batch
            and the kernels that `torch.compile` makes, which nobody compares. Not in FSDP1.

    Raises:
        ConfigTypeError, ConfigValueError: an argument; the message names it, the given value and the accepted ones.
        UsageError: there is no process group, or `module` cannot be wrapped.
        AgreementError: with `sync_module_states`, ranks pass different modules, or the constructor of another rank
            failed. Without it, this constructor failed in a user-defined function after it had wrapped modules by
            policy, and other ranks continued.

    After an error, `module` is unchanged, except in that last case, in which other ranks keep its shards.

    Forward, backward, and the methods described as collective must be called on all ranks. The first such call after
    construction compares the models of the ranks, and raises `AgreementError` on all of them if they differ.
    Construction sends no values unless `sync_module_states` requests it; the first construction over a process group
    creates communicators over the same ranks, in which all of them must take part.

    Example (in a process group of one rank):
        >>> import torch
        >>> model = FullyShardedDataParallel(torch.nn.Linear(2, 1), use_orig_params=True)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> [(name, parameter.shape) for name, parameter in model.named_parameters()]
        [('weight', torch.Size([1, 2])), ('bias', torch.Size([1]))]
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | str | None = None,
        cpu_offload: CPUOffload | bool | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | str | None = DEFAULT_PREFETCH,
        mixed_precision: MixedPrecision | torch.dtype | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        device_id: int | torch.device | str | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
        *,
        check_values: str = "warn",
        reshard_after_forward: bool | int | None = None,
        join_units_below: int = JOIN_UNITS_BELOW,
        layout: Literal["flat", "rows"]
        | Mapping[Any, Any]
        | Callable[[str, nn.Parameter], Any]
        | type[torch.optim.Optimizer] = "flat",
        deterministic_sums: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "module", "__class__")}
        with one_rank_warns(this_rank=is_first_of(process_group, device_mesh)):
            config = as_fsdp1(check_arguments(module, **given), module)
            super().__init__()
            self._wrap(module, resolve_groups(config))

    def _wrap(self, module: nn.Module, config: Config, *, island: bool = False) -> None:
        config = config.replace(layout=chosen_grains(module, config))
        with auto_wrapped(module, config, FullyShardedDataParallel._of) as undo:
            model = build_unit(module, config, island=island)
            undo.pop_all()
        enclosing_ddp.watch(FullyShardedDataParallel)
        self._fsdp_wrapped_module = module
        wrapper_support.keep_model(self, model)
        self.register_load_state_dict_post_hook(loading.end)

    @classmethod
    def _of(cls, module: nn.Module, config: Config, *, island: bool = False) -> FullyShardedDataParallel:
        """A wrapper inside another one, for checked arguments and resolved groups."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._wrap(module, config, island=island)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its parameters gathered. Collective over the shard group, as its backward will be.

        Tensors among the outermost wrapper's arguments are moved to the compute device; floating-point ones are cast as
        set by `mixed_precision`. Returns the module's result.
        """
        if torch.compiler.is_compiling():
            _dynamo.stay_out_of_graphs()
        if loading.UNDER_WAY in self.__dict__:
            loading.forget(self)
        module: Any = self._modules["_fsdp_wrapped_module"]  # apply_activation_checkpointing replaces it
        unit = self._unit
        model = unit.model() or model_of(unit)  # which refuses; every unit comes here
        return model.forwards.run(unit, args, kwargs, call=module)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def extra_repr(self) -> str:
        """The text for `repr`: the sharding strategy and the groups of this unit, in one line."""
        return f"{self._unit.built.traits.strategy.name}: {groups_in_words(self._unit.groups)}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
            return through_wrapper(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and _torch.in_functional_call():
            put_through_wrapper(self, name, value)  # the forward refuses it, like replacements elsewhere
        elif (inside := wrapper_support.owner_of(self, name, value)) is not None:
            setattr(inside, name, value)
        else:
            super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a submodule to the wrapped module; arguments as in torch. A forward refuses it if it has parameters."""
        self.module.add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter in the wrapped module; arguments as in torch. A forward refuses it."""
        self.module.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Register a buffer in the wrapped module; arguments as in torch."""
        self.module.register_buffer(name, tensor, persistent)

    def __getitem__(self, key: Any) -> Any:
        """`module[key]` of a wrapped container such as `nn.Sequential`."""
        return self.module[key]  # type: ignore[index]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Arguments as in torch. Yields the wrapper, then the wrapped module under the same name, then its submodules.

        `dict(model.named_modules())` therefore holds wrapped modules, under names that do not show the wrappers.
        """
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        wrapper_support.apply_to_tensors(self, fn, lambda: super(FullyShardedDataParallel, self)._apply(fn, recurse))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copying.deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copying.reduce(self, copying.blank, type(self))

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state of the module under plain names, of the kind that `state_dict_type` sets; arguments as in torch.

        Values of parameters are copies. With `FULL_STATE_DICT` they are full, in the dtype that optimizers see, on the
        compute device; no more than one unit is gathered at a time. With `SHARDED_STATE_DICT` they are this rank's
        elements, for `torch.distributed.checkpoint`, and with `LOCAL_STATE_DICT` one flat shard per unit (and kind).
        Ignored parameters have this rank's values. So do buffers, which may differ between ranks (running statistics),
        except with `FULL_STATE_DICT` of sharded parameters: then every rank has rank 0's. Inside
        `summon_full_params()` values are the summoned parameters themselves.

        Collective for full values, and if a module inside computes with values in the process; otherwise without
        communication.

        Raises:
            UsageError: inside a forward or a backward; wrappers inside are set to different types.
        """
        given: Any = (*args, *(destination, prefix, keep_vars)[len(args) :])
        destination, prefix, keep_vars = given
        if loading.UNDER_WAY in self.__dict__:
            loading.forget(self)
        return saving.state_dict(self, destination, prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a result of `state_dict()` of any type, from here or from an unwrapped model; returns as in torch.

        Values may be full tensors on any device, from which each rank copies its elements; this rank's elements, as
        `torch.distributed.checkpoint` has loaded them into a `SHARDED_STATE_DICT`; flat shards; DTensors and
        ShardedTensors. Under `FullStateDictConfig(rank0_only=True)`, rank 0's values are used, and other ranks may pass
        an empty dict. With `assign`, values are copied as well, and dtypes stay.

        Collective with `rank0_only`, with DTensors and ShardedTensors.

        Raises:
            RuntimeError: with all keys that are missing or unexpected (if `strict`), or of another shape.
            UsageError: inside a forward or a backward.
        """
        return loading.load_state_dict(
            self, state_dict, lambda found: super(FullyShardedDataParallel, self).load_state_dict(found, strict, assign)
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        loading.begin(self, *args)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn(module)` on every module inside, children first, with full parameters; its writes are kept.

        For initialization, as `nn.Module.apply`. Every rank must write the same. Collective.
        """
        with self.summon_full_params(self, recurse=False):
            super().apply(fn)
        return self

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward sends nothing: unsharded gradients accumulate until the next backward outside.

        Only for the outermost wrapper; every rank must enter it. Inside, it takes the memory of unsharded gradients;
        without it, sharded gradients accumulate in `.grad` at the cost of a reduction per backward.

        Raises:
            UsageError: on a nested wrapper.
        """
        return wrapper_support.no_sync(self._unit)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Average gradients with `hook` instead of the engine's reduction, in all units, from now on.

        If parameters are sharded it is called as `hook(state, grad, shard)`: `grad` is this rank's unsharded flat
        gradient of one unit (and kind), and the hook leaves this rank's piece of the mean over ranks in `shard`. Under
        `NO_SHARD`, and on one rank, it is called as `hook(state, grad)` and leaves the mean in `grad`. Tensors are 1-D
        in the reduce dtype, `grad` padded with zeros to a multiple of the number of ranks and not scaled. The hook owns
        them: it may overwrite and keep them. Gradients therefore do not reuse the memory of parameters, which costs the
        memory of one more unit.

        "Ranks" are those of `process_group`; for the hybrid strategies, those of the shard group, whose replicas the
        engine averages afterwards. Hooks run in the same order on every rank, once per flat gradient in each backward
        that reduces, and may communicate over any process group. While one waits for other ranks, on a CPU, this rank
        computes and gathers nothing: a hook that returns its work instead overlaps with the backward.
        `flatfsdp.comm_hooks` provides some; torch's reference hooks and their states work unchanged. Copies of a model
        have copies of the hook and its state; pickles contain neither, and pickling warns.

        Only for the outermost wrapper, and only once; every rank must register the same hook, which the next forward or
        backward compares.

        Args:
            state: passed to every call.
            hook: a callable that returns None, or an object with a `wait()` after which the result is available, such
                as a work: it is waited for when the result is needed.

        Raises:
            ConfigTypeError: `hook` cannot be called.
            UsageError: on a nested wrapper; inside a forward or a backward; a hook is registered already, gradients
                accumulate, a gradient divide factor is set, or the shard group of a hybrid is one rank.
        """
        register_comm_hook(self._unit, state, hook)

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: torch.nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """A context in which parameters are full, in their own shapes and the dtype that optimizers see. Collective.

        With `use_orig_params=False`, `module.named_parameters()` returns them inside, instead of flat parameters.
        Forwards without gradients may run inside: summoned parameters need no communication, and other wrappers inside
        are gathered as usual.

        Args:
            module: a wrapper, or any module with wrappers inside.
            recurse: whether all wrappers inside, or only `module` itself, with parameters tied to its own.
            writeback: whether changes made inside are kept. Every rank must make the same changes, except with
                `rank0_only`.
            rank0_only: only rank 0 gets full parameters, and the others keep seeing their shards; with `writeback`,
                rank 0's changes reach all ranks.
            offload_to_cpu: whether the full parameters are in host memory.
            with_grads: whether `.grad` is also full, and written back like the parameters.

        Raises:
            UsageError: inside itself, and inside a forward or a backward; a forward with gradients inside.
        """
        loading.forget(module)
        units = with_owning_units(units_in(module) if recurse else units_at(module))
        with full_params.summon(
            units, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads
        ):
            yield
