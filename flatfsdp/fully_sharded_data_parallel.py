"""The wrapper: signature, documentation, delegation. No logic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from . import build, copying, full_params
from .api import BackwardPrefetch, Config, CPUOffload, MixedPrecision, ShardingStrategy
from .arguments import check_arguments
from .clip import clip_grad_norm
from .fsdp1_names import FSDP1Names, wrapped_inside
from .summary import group_line
from .unit import Unit


class FullyShardedDataParallel(FSDP1Names, nn.Module):
    """Shard a module's parameters, gradients and optimizer state over ranks."""

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | str | None = None,
        cpu_offload: CPUOffload | bool | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | str | None = BackwardPrefetch.BACKWARD_PRE,
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
    ) -> None:
        config = check_arguments(
            module,
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            auto_wrap_policy=auto_wrap_policy,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            ignored_modules=ignored_modules,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored_states=ignored_states,
            device_mesh=device_mesh,
            check_values=check_values,
        )
        super().__init__()
        self._wrap(module, build.resolve_groups(config))

    def _wrap(self, module: nn.Module, config: Config, *, island: bool = False) -> None:
        with build.auto_wrapped(module, config, type(self)._of) as undo:
            self._unit: Unit = build.build_unit(module, config, island=island)
            undo.pop_all()
        self._fsdp_wrapped_module = module
        build.register_flat_params(self, self._unit)

    @classmethod
    def _of(cls, module: nn.Module, config: Config, *, island: bool = False) -> FullyShardedDataParallel:
        """A wrapper inside another one: arguments are checked, groups resolved."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._wrap(module, config, island=island)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward with its parameters unsharded. Collective over the shard axis."""
        return self._unit.run(args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def extra_repr(self) -> str:
        """The sharding strategy and the groups of this unit, in one line."""
        return group_line(self._unit)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """`module[key]` of a wrapped container such as `nn.Sequential`."""
        return self.module[key]  # type: ignore[index]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper, then the wrapped module under the same name, then what is inside: names never show the
        wrapper."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        build.apply_to_tensors(self, fn, lambda: super(FullyShardedDataParallel, self)._apply(fn, recurse))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copying.deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copying.reduce(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        copying.restore(self, state)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The whole state under plain names, inside `summon_full_params()`; refused elsewhere, where it would hold
        shards."""
        full_params.require_summoned(self._unit, "state_dict()")
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        full_params.require_summoned(self._unit, "load_state_dict()")
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}_fsdp_wrapped_module.{key[len(prefix) :]}"] = state_dict.pop(key)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` on every module inside, parameters whole and written back; as `nn.Module.apply`. Collective."""
        with self.summon_full_params(self, recurse=False):
            super().apply(fn)
        return self

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper of its model. Collective before the first forward."""
        self._lazy_init()
        return bool(self._is_root)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        """The wrappers in `module`, itself included; with `root_only` the outermost of each tree."""
        return list(wrapped_inside(module, root_only=root_only))

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients inside the context without communication."""
        return build.no_sync(self._unit)

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Whole parameters inside the context. Collective."""
        units = build.units_in(module) if recurse else build.units_at(module)
        with (
            build.flat_params_hidden(module),
            full_params.summon(
                units, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads
            ),
        ):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the joint norm of all gradients. Collective."""
        return clip_grad_norm(build.root_of(self._unit, "clip_grad_norm_"), self, max_norm, norm_type)
