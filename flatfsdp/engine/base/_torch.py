"""All private names of torch that flatfsdp uses, each with the reason why no public name suffices.

No other file of the package may use `torch._something`. `missing()` lists the names that the installed torch lacks, so
that an upgrade fails with a clear message.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from types import CellType, FrameType
from typing import Any, NoReturn

import torch

from . import _functorch

# Versions that this release was tested with; a newer one works or raises a clear error, and warns once.
TESTED = ((2, 11), (2, 14))

_AS_IT_IS: AbstractContextManager[Any] = nullcontext()

REASONS = {
    "torch._C._autograd._unsafe_set_version_counter": "a unit gathered again with unchanged weights must appear "
    "unchanged to saved tensors (retain_graph), and only this sets a version back",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "a dry run counts the memory of the kernel of an accelerator",
    "torch.autograd.graph._engine_run_backward": "distinguishes such sums from those of a model",
    "torch._C._current_graph_task_id": "a forward inside a backward is a recomputation; nothing public shows it",
    "torch._C._autograd._top_saved_tensors_default_hooks": "shows which units a non-reentrant checkpoint will "
    "recompute together; ranks whose backwards do not reach all of them need it",
    "torch._C._autograd._pop_saved_tensors_default_hooks": "only the innermost of nested checkpoints is shown, and "
    "the enclosing ones recompute more",
    "torch._C._autograd._push_saved_tensors_default_hooks": "restores the hooks that were popped for that",
    "torch._C._current_autograd_node": "units that run in one reentrant checkpoint's backward are recomputed together",
    "torch._C._will_engine_execute_node": "which of several gradients a backward computes; nothing public shows it",
    "torch.autograd.Variable._execution_engine.queue_callback": "the end of a backward has no public hook",
    "torch._C._any_requires_grad": "checking each of a list of small tensors takes as long as an operation on it",
    "torch.Tensor._use_count": "whether other code may hold a leaf's node (access creates one), or a kept gradient",
    "torch._C._storage_Use_Count": "whether other code may hold the memory of a kept gradient, or one that autograd "
    "adds to in place",
    "torch.nn.modules.module._global_backward_hooks": "hooks of all modules may look at gradients before we take them",
    "torch.nn.modules.module._global_backward_pre_hooks": "the same before a module's backward",
    "torch.Tensor._post_accumulate_grad_hooks": "a user's hook must run on the sharded gradient, after ours",
    "torch.nn.RNNBase._flat_weight_refs": "a recurrent module copies weights that are not those of its last forward to "
    "memory of its own for cuDNN; likewise _flat_weights_names",
    "torch.autograd.graph.Node._register_hook_dict": "the removable handle is most of the cost of a hook of each unit",
    "torch.amp.GradScaler._unscale_grads_": "ranks must agree on found-inf between unscaling and the step, and this is "
    "the only place in between",
    "torch.distributed.distributed_c10d._process_group_name": "a group created only by its members is named after the "
    "number of groups that the process is in; ranks with different numbers of groups would deadlock",
    "torch.distributed.ProcessGroup._get_backend": "its options hold the time limit of a group's operations",
    "torch.distributed.distributed_c10d._world.pg_map": "torch drops its entry when a process group is destroyed, "
    "without any notification, and threads that serve the group would outlive it",
    "torch._C.DisableTorchFunctionSubclass": "every backward reads the gradients of hidden parameters",
    "torch.autograd.profiler._is_profiler_enabled": "ranges in a profiler's trace are worth their cost only while one "
    "runs, in any thread; nothing public shows it",
    "torch._C._autograd._enable_record_function": "a profiler's record of a collective of gloo that ends after the "
    "profiler was stopped is written to memory that was freed with the profiler; nothing public leaves a call out",
    "torch.distributed.ProcessGroup._allgather_base": "torch.distributed's own functions repeat known checks at "
    "every call, for longer than a small collective takes; likewise _reduce_scatter_base",
    "torch.distributed.ProcessGroup.*_coalesced": "NCCL coalesces several small operations into one without a copy; "
    "the public way to do so, a list per tensor, copies",
    "torch.nn.utils.clip_grad._no_grad": "programs import clip_grad_norm_ by name before a model is sharded, and what "
    "the wrapper of this decorator calls is the one place that all these names share; likewise get_total_norm",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module": "the composable replicate() runs a model inside a "
    "DistributedDataParallel that no module holds, and units compare their ranks with it",
    "torch.distributed._composable.contract.REGISTRY_KEY": "replicate() leaves alone modules that are registered as "
    "sharded there, and would broadcast the shards of others",
    "torch.Tensor._make_wrapper_subclass": "a value of a sharded state dict has the shape of the whole parameter and "
    "memory for a piece; torch's own tensors of that kind are made by it",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "torch's distributed checkpoint locates the pieces of a "
    "tensor by these, so checkpoints that it is to read must contain them",
    "torch._subclasses.FakeTensorMode": "dry runs compute with tensors that have a device, but no memory",
    "torch.testing._internal.distributed.fake_pg": "the process group of a dry run; importing it is the only way to "
    "register its backend",
    "torch.optim._muon._zeropower_via_newtonschulz": "the part of Muon's step that needs whole matrices; its step has "
    "only all parts together, so that an owner would need the momentum and the parameter as well; likewise _adjust_lr",
    "torch.foreach": "torch._foreach_copy_ moves many small gradients in one call; torch.optim uses the same family",
}


def missing() -> list[str]:
    """The names above that this torch does not have (empty on every supported version)."""
    probes: dict[str, Callable[[], object]] = {  # for names that a plain attribute lookup does not find
        "torch.distributed.ProcessGroup._allgather_base": lambda: (
            torch.distributed.ProcessGroup._allgather_base,
            torch.distributed.ProcessGroup._reduce_scatter_base,
        ),
        "torch.distributed.ProcessGroup.*_coalesced": lambda: (_gather_grouped(), _reduce_scatter_grouped()),
        "torch.distributed.checkpoint.filesystem._StorageInfo": storage_info,
        "torch.nn.utils.clip_grad._no_grad": lambda: (
            implementation_of(torch.nn.utils.clip_grad_norm_),
            implementation_of(torch.nn.utils.get_total_norm),
        ),
        "torch.nn.RNNBase._flat_weight_refs": lambda: attrgetter("_flat_weight_refs", "_flat_weights_names")(_rnn()),
        "torch.distributed._composable.contract.REGISTRY_KEY": _registry_key,
        "torch._subclasses.FakeTensorMode": lambda: fake_tensors().FakeTensorMode,
        "torch.testing._internal.distributed.fake_pg": _fake_backend,
        "torch.foreach": lambda: (torch._foreach_copy_, torch._foreach_add_, torch._foreach_mul_, torch._foreach_norm),
    }
    absent = []
    for name in REASONS:
        try:
            probes[name]() if name in probes else attrgetter(name.removeprefix("torch."))(torch)
        except AttributeError:
            absent.append(name)
    return absent + _functorch.missing()


def _rnn() -> torch.nn.RNNBase:
    return torch.nn.RNN(1, 1)


def untested() -> str | None:
    """A warning if the installed torch is newer than those that this release was tested with; None otherwise."""
    newest = ".".join(map(str, TESTED[-1]))
    if tuple(map(int, torch.__version__.split(".")[:2])) <= TESTED[-1]:
        return None
    absent = missing()
    return (
        f"torch {torch.__version__} is newer than {newest}, the newest version that this release of flatfsdp has been "
        "tested with; "
        + (f"it lacks {', '.join(absent)}" if absent else "it still has all the private names that flatfsdp uses")
    )


def _options(name: str) -> tuple[Any, Any]:
    """Options for an operation on the caller's stream, and for one on the backend's stream."""
    made = getattr(torch.distributed.distributed_c10d, name)(), getattr(torch.distributed.distributed_c10d, name)()
    for options, asynchronous in zip(made, (False, True), strict=True):
        options.asyncOp = asynchronous
    return made


_GATHER, _SCATTER, _ALL_REDUCE = map(_options, ("AllgatherOptions", "ReduceScatterOptions", "AllreduceOptions"))


class FlatCollectives:
    """The collectives of one process group on flat tensors, each of which returns its work, or None.

    Attributes:
        gather: (output, shard): fills `output` with every rank's `shard`. Runs no Python: every unit calls it.
        reduce_scatter: (output, full): sums `full` over ranks, and writes this rank's piece to `output`; likewise.
        all_reduce: ([tensor]): sums the tensor over ranks in place.
    """

    def __init__(self, process_group: Any, *, beside: bool) -> None:
        """`beside`: collectives run on a stream of the backend; otherwise on the caller's, after its earlier work."""
        self._group = process_group
        self._options = _GATHER[beside], _SCATTER[beside]
        self.gather: Callable[..., Any] = partial(process_group._allgather_base, opts=_GATHER[beside])
        self.reduce_scatter: Callable[..., Any] = partial(process_group._reduce_scatter_base, opts=_SCATTER[beside])
        self.all_reduce: Callable[..., Any] = partial(process_group.allreduce, opts=_ALL_REDUCE[beside])

    def gather_grouped(self, outputs: list[torch.Tensor], shards: list[torch.Tensor]) -> Any:
        """Fill each of `outputs` with every rank's shard, as one operation."""
        return _gather_grouped()(self._group, outputs, shards, self._options[0])

    def reduce_scatter_grouped(self, outputs: list[torch.Tensor], fulls: list[torch.Tensor]) -> Any:
        """Sum each of `fulls` over ranks into `outputs`, as one operation."""
        return _reduce_scatter_grouped()(self._group, outputs, fulls, self._options[1])


def _grouped(newer: str, older: str) -> Any:
    """The method of process groups that has the first of these names that exists in this torch."""
    cls: Any = torch.distributed.ProcessGroup
    return getattr(cls, newer, None) or getattr(cls, older)


_gather_grouped = partial(_grouped, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_reduce_scatter_grouped = partial(_grouped, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


def _lacking(name: str) -> Any:
    def fail(*args: Any) -> NoReturn:
        raise AttributeError(f"this version of torch has no {name}")

    return fail


# Sets the version counters of tensors; torch's function itself, because every unit calls it.
set_versions: Callable[[Sequence[torch.Tensor], Sequence[int]], None] = getattr(
    torch._C._autograd, "_unsafe_set_version_counter", _lacking("_unsafe_set_version_counter")
)


# A context in which the slow `__torch_function__` of tensor subclasses is not called; torch's class itself, because
# every unit calls it.
as_plain_tensors: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


def no_grad() -> AbstractContextManager[Any]:
    """`torch.no_grad()`, without its cost if gradient recording is already off, as in most backwards."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


# The id of the running graph task, -1 outside a backward; torch's function itself, because every gradient calls it.
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def in_backward() -> bool:
    """Whether the calling thread runs inside an autograd graph task."""
    return graph_task() != -1


_top_hooks: Callable[[bool], tuple[Any, Any] | None] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None
)
# The two hooks of the innermost context of saved-tensor hooks; None outside of all. The second identifies the context,
# and lives at least as long as any tensor saved in it. Runs no Python, because every unit calls it.
saving = partial(_top_hooks, True)


def segments() -> list[object]:
    """The second hooks, as of `saving`, of the non-reentrant checkpoints whose functions run; the innermost first."""
    found: list[tuple[Any, Any]] = []
    try:
        while (hooks := saving()) is not None:
            found.append(hooks)
            torch._C._autograd._pop_saved_tensors_default_hooks()
    finally:  # only the innermost hooks can be read, so all are popped and pushed again
        for hooks in reversed(found):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    return [unpack for _, unpack in found if getattr(unpack, "__module__", None) == "torch.utils.checkpoint"]


def custom_forward() -> weakref.ref[Any] | None:
    """The node of the outermost custom autograd Function whose forward runs, for example a reentrant checkpoint of any
    library; None if there is none. In such a forward, a missing graph does not mean a user's `no_grad()`."""
    node = _outermost("forward")
    return None if node is None else weakref.ref(node)


def custom_backward() -> Any:
    """The node of the outermost custom autograd Function whose backward runs; None if there is none."""
    node = _outermost("backward")
    return node if isinstance(node, torch.autograd.function.BackwardCFunction) else None


def custom_function_of(tensor: torch.Tensor) -> str | None:
    """The name of the innermost custom Function whose forward or backward runs, if it has `tensor` in a variable."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            values = frame.f_locals
            node = values["ctx"]
            if isinstance(node, torch.autograd.function.BackwardCFunction) and any(
                each is tensor for each in values.values()
            ):
                return type(node).__name__.removesuffix("Backward")
            return None
        frame = frame.f_back
    return None


def is_recomputing() -> bool:
    """Whether the caller runs in the recomputation of a checkpoint, of either kind."""
    return in_backward() and (bool(segments()) or custom_backward() is not None)


def _outermost(method: str) -> Any:
    found: FrameType | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == method and code.co_varnames[:1] == ("ctx",):
            found = frame
        frame = frame.f_back
    return None if found is None else found.f_locals["ctx"]


# The node of the graph whose backward runs; torch's function itself, because every unit calls it.
node_now: Callable[[], Any] = torch._C._current_autograd_node


def will_compute(node: Any) -> bool:
    """Whether the running graph task computes a gradient for `node`, which does not belong to a leaf."""
    return torch._C._will_engine_execute_node(node)


def will_accumulate(node: Any) -> bool:
    """Whether the running graph task accumulates a gradient in `node`, which belongs to a leaf."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `autograd.grad` captures it instead
        return True


def is_captured(node: Any) -> bool:
    """Whether the running graph task returns the gradient for `node`, which belongs to a leaf."""
    try:
        torch._C._will_engine_execute_node(node)
        return False
    except RuntimeError:
        return True


any_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", _lacking("_any_requires_grad"))
# More than 1 if a graph, or other code, may hold the autograd node that accumulates the gradients of a leaf.
use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda tensor: 2)
# The number of references to the untyped storage of that `_cdata`: one per tensor in it, one for all Python objects.
# NaN, which equals nothing, if torch does not count: there may be other references.
storage_uses: Callable[[int], float] = getattr(torch._C, "_storage_Use_Count", lambda cdata: float("nan"))


def expect_weight(module: torch.nn.RNNBase, name: str, weight: torch.nn.Parameter | None) -> None:
    """Let a recurrent module find `weight` unchanged under `name`: its forward lays out anew what was replaced."""
    refs = module._flat_weight_refs
    if name in module._flat_weights_names and len(refs) == len(module._flat_weights_names):
        refs[module._flat_weights_names.index(name)] = None if weight is None else weakref.ref(weight)


def applies_in_backward() -> bool:
    """Whether torch's `_apply_optimizer_in_backward` was called on any live parameter; faster than checking each."""
    module: Any = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return module is not None and bool(module.param_to_acc_grad_map.data)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once when the running graph task has ended without an exception.

    After an exception the task drops the callback without calling it; only its destructor shows that.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def profiler_runs() -> bool:
    """Whether a torch profiler is recording in this process."""
    return torch.autograd.profiler._is_profiler_enabled


def unrecorded(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, of which a profiler records nothing: for collectives that may outlive the profiler.

    gloo's thread ends the record of a collective, also in the freed memory of a profiler that has been stopped.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        torch._C._autograd._enable_record_function(False)
        try:
            return call(*args, **kwargs)
        finally:
            torch._C._autograd._enable_record_function(True)

    return run


_HOOKS = attrgetter("_post_accumulate_grad_hooks")


def accumulate_hooks(leaves: Iterable[torch.Tensor]) -> list[dict[int, Callable[[torch.Tensor], None]]]:
    """The live dictionaries of those of `leaves` that have more than one post-accumulate hook."""
    return [hooks for hooks in map(_HOOKS, leaves) if hooks is not None and len(hooks) > 1]


# The live dictionary of post-accumulate hooks of a tensor; None if no hook was ever registered.
hooks_on: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], None]] | None] = _HOOKS
# The hooks registered on a tensor with `register_hook` and not removed; false if there are none.
has_hooks: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether code of users runs in the backward of `module`."""
    modules = torch.nn.modules.module
    of_all = modules._global_backward_hooks or modules._global_backward_pre_hooks
    return bool(of_all or module._backward_hooks or module._backward_pre_hooks)


def implementation_of(function: Any) -> CellType:
    """The cell that holds what `function` of `torch.nn.utils.clip_grad` calls, under whichever name it was imported.

    Raises:
        AttributeError: this torch, or a library that has replaced the function, wraps it in another way.
    """
    names: tuple[str, ...] = function.__code__.co_freevars
    if "func" not in names:
        raise AttributeError(f"{function.__name__} is not wrapped by _no_grad")
    cell: CellType = function.__closure__[names.index("func")]
    return cell


def in_functional_call() -> bool:
    """Whether the caller runs inside `torch.func.functional_call`: found in the stack, because torch sets no flag."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.utils.stateless":
            return True
        frame = frame.f_back
    return False


@contextmanager
def name_of_group(name: str) -> Iterator[None]:
    """A context in which `torch.distributed.new_group` uses this name, by which the members find each other."""
    c10d: Any = torch.distributed.distributed_c10d
    by_count = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        c10d._process_group_name = by_count


@contextmanager
def without_split() -> Iterator[None]:
    """A context in which `torch.distributed.new_group` connects the members of an NCCL group anew.

    Otherwise it splits the default group's communicator if that is bound to a device (`init_process_group(device_id=)`)
    and so has one already. NCCL's split is collective over all ranks of the group that is split, and waits for those
    that do not take part in `new_group(use_local_synchronization=True)`.
    """
    world: Any = torch.distributed.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def nccl_options(process_group: Any) -> Any:
    """The options of the NCCL backend of `process_group` (as the priority of its stream, and NCCL's own), for a group
    of its own; None if it has no such backend. No public function returns them."""
    for device in process_group._device_types:
        backend = process_group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        options = getattr(backend, "options", None)
        if hasattr(options, "is_high_priority_stream"):
            own: Any = copy.deepcopy(options)  # the new group writes its name and its ranks into it
            own.split_from = None  # whatever `process_group` was split from
            return own
    return None


def time_limit(process_group: Any) -> float:
    """Seconds after which an operation of `process_group` fails; infinity if its backend has no limit."""
    backends = map(process_group._get_backend, process_group._device_types)
    options: list[Any] = [getattr(each, "options", None) for each in backends]
    limits = [each._timeout.total_seconds() for each in options if hasattr(each, "_timeout")]
    return min(limits, default=math.inf)


def when_destroyed(process_group: Any, callback: Callable[[], None]) -> None:
    """Call `callback` when `process_group` is destroyed: torch then drops the only reference to the store's Python
    object, which the group itself does not keep alive."""
    _, store = torch.distributed.distributed_c10d._world.pg_map[process_group]
    weakref.finalize(store, callback).atexit = False


# `target.copy_(source)`, with a cast if the dtypes differ, and `target.add_(source)`, for each pair of two lists;
# `target.mul_(scalar)` for each of a list.
foreach_copy_: Callable[..., None] = getattr(torch, "_foreach_copy_", _lacking("_foreach_copy_"))
foreach_add_: Callable[..., None] = getattr(torch, "_foreach_add_", _lacking("_foreach_add_"))
foreach_mul_: Callable[..., None] = getattr(torch, "_foreach_mul_", _lacking("_foreach_mul_"))
# (tensors, order, dtype=): the norm of each tensor of a list, on one device.
foreach_norm: Callable[..., list[torch.Tensor]] = getattr(torch, "_foreach_norm", _lacking("_foreach_norm"))


def _registry_key() -> str:
    # Not by an attribute of the package, where a function hides the module.
    key: str = importlib.import_module(f"{torch.__name__}.distributed._composable.contract").REGISTRY_KEY
    return key


def register_as_sharded(cls: type[torch.nn.Module]) -> None:
    """Let torch's composable functions see each module of class `cls` as sharded, besides what is registered for it.

    A property of the class, since the attribute's name differs between processes and would be in pickles."""
    key = _registry_key()
    setattr(cls, key, property(lambda module: {**vars(module).get(key, {}), "fully_shard": None}))


def active_ddp() -> tuple[torch.nn.parallel.DistributedDataParallel, set[int]] | None:
    """The DistributedDataParallel whose forward runs now, that of a replicate() too, and its ranks."""
    found = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return None if found is None else (found, set(torch.distributed.get_process_group_ranks(found.process_group)))


def end_active_ddp() -> None:
    """Let no DistributedDataParallel count as running, before an exception from inside its forward."""
    torch.nn.parallel.DistributedDataParallel._active_ddp_module = None


def tensor_without_memory(
    cls: type[torch.Tensor], shape: Sequence[int], stride: Sequence[int] | None, like: torch.Tensor
) -> Any:
    """A tensor of class `cls` with this shape, and the dtype and device of `like`, but without memory."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=like.dtype, device=like.device)


def group_of_sharded_tensor(value: Any) -> Any:
    """The process group of a `ShardedTensor`."""
    return value._process_group


def sharded_tensor_of_rows(rows: torch.Tensor, first: int, shape: Sequence[int], process_group: Any) -> Any:
    """A `ShardedTensor` whose shard on this rank is `rows`, from row `first` on. Collective.

    Programs written for FSDP1 use this class, which has no public name; it is imported only for them.
    """
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    offsets = [first, *(0,) * (len(shape) - 1)]
    rank = torch.distributed.get_rank()  # placements name ranks of the whole job
    shards = [Shard.from_tensor_and_offsets(rows, offsets, rank)] if rows.shape[0] else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the class is deprecated, but the user requested it by name
        return init_from_local_shards(shards, *shape, process_group=process_group)


def shard(tensor: torch.Tensor, offsets: Sequence[int]) -> Any:
    """torch's `Shard`, a part of a `ShardedTensor`: this rank's `tensor`, which begins at `offsets`."""
    from torch.distributed._shard.sharded_tensor import Shard

    initialized = torch.distributed.is_initialized()
    return Shard.from_tensor_and_offsets(tensor, [*offsets], torch.distributed.get_rank() if initialized else 0)


def storage_info() -> Any:
    """The class of entries in distributed checkpoints (relative_path, offset, length)."""
    if not hasattr(torch.distributed, "checkpoint"):  # imported here, since only checkpoints need it
        importlib.import_module("torch.distributed.checkpoint")
    whole: Any = torch.distributed
    return whole.checkpoint.filesystem._StorageInfo


def loads_as_usual(module: torch.nn.Module) -> bool:
    """Whether the state dict of `module` is loaded by a class of torch."""
    return type(module)._load_from_state_dict.__module__.startswith("torch.")


def saves_as_usual(module: torch.nn.Module) -> bool:
    """Whether the class of `module` does not override `_save_to_state_dict`, which has no public name."""
    return type(module)._save_to_state_dict is torch.nn.Module._save_to_state_dict


def fake_tensors() -> Any:
    """The module of `FakeTensorMode` and `FakeTensor`."""
    importlib.import_module("torch._subclasses.fake_tensor")
    return torch._subclasses.fake_tensor


def fused_attention() -> Any:
    """The operation that attention is on an accelerator."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention


def is_sum_of_autograd(func: Any, args: Any) -> bool:
    """Whether `func` is autograd's own sum of two gradients, the first of which nothing else holds: on a device the sum
    takes its place, but not that of a fake tensor."""
    if func is not torch.ops.aten.add.Tensor:
        return False
    graph: Any = torch.autograd.graph
    frame: Any = sys._getframe(1)
    for _ in range(5):
        if frame is not None and frame.f_code is graph._engine_run_backward.__code__:
            one_tensor = 2  # uses of its storage
            return bool(torch._C._storage_Use_Count(args[0].untyped_storage()._cdata) <= one_tensor)
        frame = frame and frame.f_back
    return False


def _fake_backend() -> Any:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    testing: Any = torch.testing
    return testing._internal.distributed.fake_pg


@contextmanager
def fake_world(ranks: int, *, rank: int) -> Iterator[None]:
    """A context with a fake default process group of `ranks` ranks, where this process is `rank`; sends no data."""
    _fake_backend()
    c10d: Any = torch.distributed
    c10d.init_process_group("fake", store=c10d.HashStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        c10d.destroy_process_group()


def muon_functions() -> tuple[Callable[..., torch.Tensor], Callable[..., Any]]:
    """The functions in Muon's step for the matrix (gradient, coefficients, steps, eps) and for the learning rate (rate,
    name of the adjustment, shape)."""
    muon: Any = torch.optim._muon
    return muon._zeropower_via_newtonschulz, muon._adjust_lr
