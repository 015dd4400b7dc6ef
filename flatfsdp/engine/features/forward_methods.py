"""Methods of wrapped modules other than `forward`: registered ones gather; errors of others are explained."""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ...errors import ConfigValueError, FlatFSDPError, UsageError, current_rank, refuse_type
from ..flat.param_refs import ParamRef
from ..flat.states import IDLE
from ..guards.assignments import refuse_functional_call
from ..models import param_registry as registry
from ..models.walks import units_in
from ..runtime.entries import plain_class
from ..runtime.forward_driver import ForwardDriver
from ..runtime.model import model_of
from ..runtime.unit import Unit
from ..watchdog import process_exit

_RAISE = dis.opmap["RAISE_VARARGS"]
REGISTERED = "_forward_methods"  # attribute of a wrapper with their names; plain data, in copies and pickles, too


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let calls of `module.method_name(...)` gather parameters, as calls of `module` do, from now on.

    While the method runs, called through the wrapper, the wrapper's own parameters are unsharded; wrappers inside
    gather theirs when they are called, and a backward may follow. If no tensor in its result requires a gradient, the
    call counts as one without gradients. Such calls are collective; if the length of a loop inside differs between
    ranks, for example in generation, use `inference()` around it. A module that is not wrapped is not changed, so that
    a program also runs without FSDP. Equivalent to FSDP2's function of that name.

    Args:
        module: a wrapper, whose inner module has the method; or a module of `fully_shard`.
        method_name: the name of its method.

    Raises:
        ConfigTypeError: `module` is not a module, or `method_name` is not a string.
        ConfigValueError: there is no such method, the wrapper itself has a method of that name, or it is a generator or
            a coroutine, which runs after the call.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> class Model(torch.nn.Linear):
        ...     def encode(self, x):
        ...         return torch.tanh(self(x))
        >>> model = flatfsdp.FullyShardedDataParallel(Model(2, 3))
        >>> flatfsdp.register_fsdp_forward_method(model, "encode")
        >>> model.encode(torch.ones(4, 2)).shape
        torch.Size([4, 3])
    """
    argument = "register_fsdp_forward_method"
    if not isinstance(module, nn.Module):
        refuse_type(f"{argument}: module", module, "a module")
    if not isinstance(method_name, str):
        refuse_type(f"{argument}: method_name", method_name, "the name of a method")
    unit = module.__dict__.get("_unit")
    if not isinstance(unit, Unit):
        return
    in_place = unit.entries.in_place
    inside = module if in_place else unit.entries.first
    name = plain_class(inside).__name__
    found = getattr(inside, method_name, None)
    if not callable(found):
        raise ConfigValueError(f"{argument}: method_name: got {method_name!r}, but {name} has no such method")
    if hasattr(type(module), method_name) and not in_place:
        raise ConfigValueError(
            f"{argument}: method_name: got {method_name!r}, which {type(module).__name__} defines itself, so that "
            f"calls do not reach {name}. Give the method another name"
        )
    runs_later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_such(inspect.unwrap(found)) for is_such in runs_later):
        raise ConfigValueError(
            f"{argument}: method_name: got {method_name!r}, a generator or a coroutine of {name}, whose body would "
            "run after the parameters are sharded again. Register a method that returns its result"
        )
    registered = module.__dict__.get(REGISTERED, ())
    module.__dict__[REGISTERED] = tuple(dict.fromkeys((*registered, method_name)))
    if in_place and method_name not in registered:
        module.__dict__[method_name] = _gathering_in_place(module, found)


def _gathering_in_place(module: nn.Module, method: Any) -> Any:
    """`method` of `module`, with a gather around it. Holds `module`, which will hold the result, only weakly."""
    bound = inspect.ismethod(method) and method.__self__ is module
    function, ref = method.__func__ if bound else method, weakref.ref(module)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        owner = ref()
        if owner is None:
            raise UsageError(f"{function.__name__}() was called after the module that it belongs to was deleted")
        unit: Unit = owner.__dict__["_unit"]
        call = functools.partial(function, owner) if bound else function
        return model_of(unit).forwards.run(unit, args, kwargs, call=call, entry=owner, stays=False)

    return run


def through_wrapper(wrapper: nn.Module, name: str) -> Any:
    """The attribute `name` of the module in `wrapper`; registered methods gather, errors of others are explained."""
    inside: nn.Module = wrapper._fsdp_wrapped_module  # type: ignore[assignment]
    found = getattr(inside, name)
    if name in wrapper.__dict__.get(REGISTERED, ()):
        return _gathering(wrapper.__dict__["_unit"], found)
    if inspect.ismethod(found) and found.__self__ is inside:
        return _explaining(wrapper, name, found)
    return found


def put_through_wrapper(wrapper: nn.Module, name: str, value: torch.Tensor) -> None:
    """Set the tensor `name` of the module inside `wrapper`, or else of `wrapper`, to `value`, for `functional_call`.
    A forward raises unless this is undone before it.

    Raises:
        UsageError: `name` is a flat parameter, with which no module computes.
    """
    inside: nn.Module = wrapper._fsdp_wrapped_module  # type: ignore[assignment]
    unit: Unit = wrapper.__dict__["_unit"]
    if flat := [each for each in unit.flat_refs if each.attribute == name and each.held is not value]:
        refuse_functional_call(flat, unit.label)
    dictionaries: list[dict[str, Any]] = [inside._parameters, inside._buffers, inside.__dict__]
    found = next((each for each in dictionaries if name in each), wrapper.__dict__)
    found[name] = value


def _gathering(unit: Unit, method: Any) -> Any:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return model_of(unit).forwards.run(unit, args, kwargs, call=method, stays=False)

    return run


def _explaining(wrapper: nn.Module, name: str, method: Any) -> Any:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except FlatFSDPError:
            raise
        except (RuntimeError, IndexError) as error:  # torch's errors for wrong shapes
            found = _sharded_in(error.__traceback__, units_in(wrapper))
            if found is None:
                raise
            unit, param_ref = found
            raise UsageError(
                f"{name}() used parameter {param_ref.path!r} of unit {unit.label}, which is sharded there, and "
                f"failed: {type(error).__name__}: {error}. Parameters are gathered for forward(), and for methods "
                f"that are registered once after wrapping: flatfsdp.register_fsdp_forward_method(model, {name!r}), "
                "where model is the wrapper of the module that defines the method"
            ) from error

    return run


def explain(error: BaseException) -> str:
    """An explanation of an `error` of torch that ends the program; "" if there is none."""
    if isinstance(error, FlatFSDPError) or not isinstance(error, (RuntimeError, IndexError)):
        return ""
    units = [unit for model in registry.models for unit in model.units]
    found = _sharded_in(error.__traceback__, units)
    if found is not None:
        unit, param_ref = found
        name = type(param_ref.module).__name__
        return (
            f"{name} used parameter {param_ref.path!r} of unit {unit.label} outside of the forward of its wrapper, "
            "where it is sharded. Call the wrapper, not the module inside (model(x), not model.module(x) or "
            "model.module.forward(x)); register methods other than forward with "
            "flatfsdp.register_fsdp_forward_method()"
        )
    for model in [*registry.models] if "dtype" in str(error) else ():
        dtypes = {
            handle.precision.compute: f"{unit.label} in {str(handle.precision.compute).removeprefix('torch.')}"
            for unit in model.units
            for handle in unit.handles
            if handle.precision.compute.is_floating_point
        }
        if len(dtypes) > 1:
            return (
                f"parameters of the model have several dtypes (unit {', unit '.join(dtypes.values())}), and nothing "
                "casts tensors between them. Cast the model to one dtype before wrapping, or pass "
                "mixed_precision=MixedPrecision(param_dtype=..., cast_forward_inputs=True)"
            )
    return ""


def _sharded_in(traceback: TracebackType | None, units: list[Unit]) -> tuple[Unit, ParamRef] | None:
    """The sharded parameter of the innermost module in `traceback` that holds one.

    None also for exceptions raised outside of torch, whose messages need no explanation.
    """
    by_module: dict[int, tuple[Unit, ParamRef]] = {}
    for unit in units:
        if unit.phase is IDLE and unit.shows_shard:
            for param_ref in (*unit.param_refs, *unit.shared_refs):
                by_module.setdefault(id(param_ref.module), (unit, param_ref))
    found = None
    while traceback is not None:
        frame, at = traceback.tb_frame, traceback.tb_lasti
        receiver = frame.f_locals.get("self")
        if isinstance(receiver, ForwardDriver):
            # The forward of a unit: its parameters were unsharded, and modules around it did not compute.
            running = frame.f_locals.get("unit")
            by_module, found = {key: held for key, held in by_module.items() if held[0] is not running}, None
        found = by_module.get(id(receiver), found)
        traceback = traceback.tb_next
    is_torchs = frame.f_globals.get("__name__", "").partition(".")[0] == "torch"
    return None if not is_torchs and frame.f_code.co_code[at] == _RAISE else found


def _explain_at_end(error: BaseException) -> str:
    words = explain(error)
    return f"[flatfsdp, rank {current_rank()}] {words}" if words else ""


process_exit.explainers.append(_explain_at_end)
