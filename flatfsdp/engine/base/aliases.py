"""Modules under the names that they had before flatfsdp/engine existed: pickles and checkpoints hold such names.

[Note: old names] One table maps each old name to the current module, which is imported when the old name is, and is the
same object under both. The names are for existing files: nothing in this repository imports an old name. A module that
is moved or renamed gets an entry here if a release had it under the previous name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ROOT = "flatfsdp"
# By package below flatfsdp.engine: the modules of revision e07bc83, below flatfsdp, each with its new name if it is
# different.
_MOVED = {
    "base": "_torch hooks=autograd trace=events trees=nested_tensors waits=wait_limits state_dicts.names=fqns",
    "layout": "layout boxes runs",
    "schedule": """
        policy.order=forward_record policy.joining=issue_order policy.midway=mid_backward policy.branches=conditional
    """,
    "config": """
        arguments state_dict_configs policy.precision=precision policy.strategy=strategy
        policy.schedule=schedule_options choices=unit_options
    """,
    "watchdog": "board=store watch=watchdog roll_call=status_report farewell=process_exit",
    "device": "device=streams storage=memory limiter=memory memoryless=fake_tensors host_memory=malloc",
    "comm": """
        comm=transport gloo in_turns=ordered_sum at_exit=gloo groups=process_groups hooked=comm_hook
    """,
    "flat": """
        flat_param portion=sources resident=sources views hidden=param_guard awaited=deferred_grad
        grads=gradients reduction packed=param_refs buffers=buffer_casting placeholder lifecycle=states
    """,
    "agreement": """
        peers=rank_exchange stream=op_sequence agree=model_check values=checksums
        exchange=object_collectives policy.habit=sequence_predictor
    """,
    "runtime": """
        unit unit_data=unit root=resources backward links=gradient_flow joining=coalesced_collectives
        placement=device_checks replicas=replica_checks
        traversal=module_tree registry=param_registry optimizers=optimizer_hooks midway=backward_hooks
    """,
    "state": "owned=owned_interval consolidate full_params state_dicts.from_first=from_rank0",
    "state.model": """
        state_dicts.carriers=distributed_values state_dicts.deferred=distributed_values
        state_dicts.kinds=types state_dicts.lending=types state_dicts.loading=loading
        state_dicts.parts=submodules state_dicts.saving=saving state_dicts.stand_ins=placeholders
    """,
    "state.optim": """
        optim_state.api=api optim_state.facts=descriptions optim_state.held=param_map optim_state.keys=api
        optim_state.loading=loading optim_state.plan=load_plan optim_state.saving=saving optim_state.trial=initial_state
    """,
    "features": """
        nonfinite clip check_replicas participation uneven=uneven_inputs forward_methods optimizer_in_backward
        inference=persistent_params labels=profiler_ranges stepping=optimizer_in_backward residents=persistent_params
        flat_state=flat_optimizer.state flat_stepping=flat_optimizer.stepper step_flat=flat_optimizer.api
    """,
    "wrapping": """
        build auto_wrap materialise=materialize as_on_meta=materialize constructing=init_sync copying=serialization
        wrapper=wrapper_support
    """,
    "facade": "controls=schedule_api fsdp1_names=fsdp1_compat",
    "inspection": "summary plan=memory_plan rehearsal=dry_run",
}
_RENAMED = {"checkpoint.keeping": "checkpoint.retention"}  # outside the engine, with a class that users may pickle
_FOLDERS = frozenset(f"{_ROOT}.{each}" for each in ("policy", "state_dicts", "optim_state"))  # of modules alone


def _table() -> Iterator[tuple[str, str]]:
    for package, words in _MOVED.items():
        for old, _, new in (each.partition("=") for each in words.split()):
            yield f"{_ROOT}.{old}", f"{_ROOT}.engine.{package}.{new or old}"
    yield from ((f"{_ROOT}.{old}", f"{_ROOT}.{new}") for old, new in _RENAMED.items())


ALIASES = dict(_table())  # old dotted name to new one


class _Package(ModuleType):
    """The class of flatfsdp's module object once an old name was imported. An import binds the submodule's name in its
    package; this class prevents that for names that the package already has (`flatfsdp.summary` is a function)."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and f"{_ROOT}.{name}" in ALIASES and name in vars(self)):
            super().__setattr__(name, value)


class _Finder(MetaPathFinder, Loader):
    """The import hook for the old names. [Note: old names]"""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in ALIASES:
            return ModuleSpec(fullname, self)
        return ModuleSpec(fullname, self, is_package=True) if fullname in _FOLDERS else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[_ROOT].__class__ = _Package
        if module.__name__ in ALIASES:
            sys.modules[module.__name__] = importlib.import_module(ALIASES[module.__name__])


_FINDER = _Finder()


def install() -> None:
    """Make old names importable, after all modules that exist as files."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
