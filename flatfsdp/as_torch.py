"""flatfsdp under the names of torch's FSDP1 and FSDP2.

`python -m flatfsdp.as_torch script.py args...` (or `-m module args...`), and under torchrun
`torchrun ... -m flatfsdp.as_torch script.py args...`, runs a program that was written for FSDP1 or FSDP2 unchanged. In
a program of your own `install()` does the same.

Names are replaced in modules: in torch's public modules, in `torch.distributed.checkpoint.state_dict`,
whose `get_state_dict` and `set_state_dict` then work on flatfsdp's models, and in every module that has imported one
of them by then. References that a program keeps elsewhere (in an object, a default argument) before `install()` stay
torch's. Sharded state dicts hold torch's classes from then on, as FSDP1's do.
"""

from __future__ import annotations

import functools
import gc
import os
import runpy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed._composable.fsdp as torchs_composable
import torch.distributed._composable.fsdp.fully_shard
import torch.distributed.checkpoint.state_dict as dcp_state_dict
import torch.distributed.fsdp as torchs
import torch.distributed.fsdp._fully_shard as torchs_fully_shard
import torch.distributed.fsdp._fully_shard._fully_shard as torchs_classes
import torch.distributed.fsdp._runtime_utils as torchs_runtime
import torch.distributed.fsdp.api as torchs_api
import torch.distributed.fsdp.fully_sharded_data_parallel as torchs_wrapper
import torch.distributed.fsdp.sharded_grad_scaler as torchs_scaler
import torch.distributed.fsdp.wrap as torchs_wrap
import torch.distributed.pipelining.stage
from torch import nn

from . import FullyShardedDataParallel, ShardedGradScaler, fsdp_module, wrap
from .api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .engine.config import fsdp1_mode, state_dict_configs
from .engine.cpu.gloo import wait_at_exit
from .engine.features.forward_methods import register_fsdp_forward_method
from .engine.flat import flat_param
from .engine.fully_shard.class_swap import swapped
from .engine.models import param_registry as registry
from .engine.state.dcp_state_dict import replacements
from .errors import UsageError, current_rank

__all__ = ["install", "is_installed", "uninstall"]

_OURS: dict[str, Any] = {
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "FlatParameter": flat_param.FlatParameter,
    "ShardedGradScaler": ShardedGradScaler,
    **{kind.__name__: kind for kind in (BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy)},
    **{name: getattr(state_dict_configs, name) for name in state_dict_configs.__all__},
    **{name: getattr(wrap, name) for name in wrap.__all__},
    **{name: getattr(fsdp_module, name) for name in fsdp_module.__all__},
    "register_fsdp_forward_method": register_fsdp_forward_method,
}
# The package's attribute of that name is the function.
_composable_file = sys.modules["torch.distributed._composable.fsdp.fully_shard"]
_PUBLIC = (
    torchs, torchs_api, torchs_wrapper, torchs_scaler, torchs_wrap, torchs_fully_shard, torchs_composable,
    _composable_file,
)  # fmt: skip
_IN_TORCH = (
    "torch.distributed.pipelining.stage",
    "torch.distributed.pipelining.schedules",
    "torch.distributed.fsdp._runtime_utils",
)

_torchs_own, _torchs_module = torchs.FullyShardedDataParallel, torchs.FSDPModule
_MISSING = object()
_replaced: list[tuple[dict[str, Any], str, Any]] = []  # (a module's names, one of them, its original value)
_offering: list[tuple[ModuleType, type[ModuleType]]] = []  # a file of torch's FSDP2, and its type


def is_installed() -> bool:
    """Whether programs find flatfsdp under torch's names now."""
    return bool(_replaced)


def install() -> None:
    """Let programs in this process find flatfsdp under FSDP1's and FSDP2's names. Does nothing the second time.

    Models that torch's FSDP has wrapped before stay unchanged.
    """
    if _replaced:
        return
    fsdp1_mode.active = True
    by_id: dict[int, Any] = {}
    by_id[id(torchs_runtime._lazy_init)] = _of_either(torchs_runtime._lazy_init)
    for module in _PUBLIC:
        for name, ours in _OURS.items():
            if name in vars(module) and not isinstance(vars(module)[name], ModuleType):  # one is `wrap`
                by_id[id(vars(module)[name])] = ours
    for module in [*sys.modules.values()]:
        if isinstance(module, ModuleType) and _has_names_to_replace(module):
            names = vars(module)
            for name, value in [*names.items()]:
                if id(value) in by_id:
                    _replace(names, name, by_id[id(value)])
    its_classes = torchs_classes.get_cls_to_fsdp_cls
    _replace(
        vars(torchs_classes), "get_cls_to_fsdp_cls", lambda: {**its_classes(), **swapped}
    )  # dynamo's guards call it
    _replace(vars(fsdp_module.fully_shard), "state", StateOfModule, missing=True)
    for path, module in [*sys.modules.items()]:
        if path.startswith(f"{torchs_fully_shard.__name__}."):
            _offer(module)
    names = vars(dcp_state_dict)
    for name, made in replacements(FullyShardedDataParallel).items():
        if name in names:  # some versions of torch lack some of them
            _replace(names, name, made(names[name]))


def uninstall() -> None:
    """Restore the original value of every replaced name. Names imported meanwhile stay flatfsdp's."""
    fsdp1_mode.active = False
    while _replaced:
        names, name, before = _replaced.pop()
        if before is _MISSING:
            del names[name]
        else:
            names[name] = before
    while _offering:
        module, kind = _offering.pop()
        module.__class__ = kind


def _has_names_to_replace(module: ModuleType) -> bool:
    """Whether the names of `module` are a program's, or those under which programs find torch's FSDP."""
    if module in (*_PUBLIC, dcp_state_dict) or module.__name__ in _IN_TORCH:
        return True
    package = module.__name__.partition(".")[0]
    return package not in ("torch", "flatfsdp") or module.__name__ == __name__ == "__main__"


def _replace(names: dict[str, Any], name: str, value: Any, *, missing: bool = False) -> None:
    _replaced.append((names, name, _MISSING if missing else names[name]))
    names[name] = value


class _Offered:
    """An attribute of a module that is not among the names which the module's own functions read."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __get__(self, module: ModuleType, kind: type) -> Any:
        return self.value

    def __set__(self, module: ModuleType, value: Any) -> None:
        self.value = value


def _offer(module: ModuleType) -> None:
    """Let imports from `module`, a file of torch's FSDP2, return our classes. Its functions keep reading torch's,
    which torch's own modules in the same process need."""
    kind = type(module)
    names = {name: _Offered(ours) for name, ours in _OURS.items() if name in vars(module)}
    module.__class__ = type(kind.__name__, (kind,), names)
    _offering.append((module, kind))


def _of_either(lazy_init: Any) -> Any:
    """`lazy_init`, FSDP1's, for our wrappers as well: verl calls it before it moves shards."""

    @functools.wraps(lazy_init)
    def initializes(state: Any, root_module: Any) -> Any:
        if isinstance(state, FullyShardedDataParallel):
            return state._lazy_init()
        return lazy_init(state, root_module)

    return initializes


class StateOfModule:
    """The private state of an FSDP2 module that torch's pipeline schedules read to reduce a stage's gradients:
    `fully_shard.state(module)`."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._state_ctx = SimpleNamespace(all_states=[])

    def _root_post_backward_final_callback(self) -> None:
        self._module.reduce_accumulated_gradients()


def main() -> None:
    """Run the program that the command line names, under torch's names for flatfsdp."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    program = arguments[as_module : as_module + 1]
    if not program:
        raise UsageError(
            "python -m flatfsdp.as_torch: expected a script, or -m and a module, followed by its arguments"
        )
    sys.argv = arguments[as_module:]
    if not as_module:
        sys.path.insert(0, os.path.dirname(os.path.realpath(program[0])))  # like python, for imports from its folder
    install()
    wait_at_exit()  # for programs that make no wrapper of ours, too: DDP on gloo may hang or abort as it exits
    before = registry.generation
    run = functools.partial(runpy.run_module, alter_sys=True) if as_module else runpy.run_path
    try:
        names: object = run(program[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
        names = ended  # its frames keep the program's objects alive
    if registry.generation == before and current_rank() == 0:
        sys.stderr.write(f"[flatfsdp.as_torch] {_what_trained()}\n")
    del names


def _what_trained() -> str:
    """A sentence for a program that made no wrapper of ours."""
    # By type alone: a deprecated object of torch's warns when its class is read.
    held = [each for each in gc.get_objects() if issubclass(type(each), (nn.Module, torch.optim.Optimizer))]
    kinds: dict[str, type] = {
        "DistributedDataParallel, with the whole model on every rank": nn.parallel.DistributedDataParallel,
        "torch's FSDP2, under a name imported before install()": _torchs_module,
        "torch's FSDP1, under a name imported before install()": _torchs_own,
    }
    found = [words for words, kind in kinds.items() if any(isinstance(each, kind) for each in held)]
    if not found and any(isinstance(each, torch.optim.Optimizer) for each in held):
        found = ["modules without any wrapper: each process trained its own copy"]
    trained = f"What trained: {', '.join(found)}. " if found else ""
    return (
        "the program ended without creating a FullyShardedDataParallel or calling fully_shard(), so flatfsdp was not "
        f"used. {trained}Frameworks enable FSDP with their own settings; docs/migration/frameworks.md shows those "
        "that Accelerate needs, especially on a CPU"
    )


if __name__ == "__main__":
    # The module of that name, not this run of it, records the replacements.
    from flatfsdp.as_torch import main as main_of_module

    main_of_module()
