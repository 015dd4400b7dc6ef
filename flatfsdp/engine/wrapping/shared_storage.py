"""Parameters and other tensors that are different objects over the same memory.

[Note: shared storage] `decoder.weight.data = encoder.weight.data` makes two parameters of one memory: in one process a
step on either changes both, and sharding would separate them. So the memory of all tensors of modules is compared
before any is sharded. A parameter that is the same whole tensor as another one (offset, shape, strides, dtype) is
replaced by it, and followed as a tie. Anything else is refused: parameters that overlap in part, buffers and plain
attributes made of a parameter's `.data`, parameters of ignored modules. Disjoint parts of one storage are independent.

Units may be wrapped one after the other. A tensor that still occupies the memory that a parameter of a nested unit had
before it was sharded is seen as long as that memory lives. If both are sharded by then, in units side by side, neither
call can know whether they are of one model; the unit around both is refused.

Memory is compared by addresses; on the meta device, and in dry runs, by storages and offsets.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import UsageError
from ..base import _dtensor, _torch
from ..base._torch import storage_uses
from ..base.fqns import clean, fqn
from ..base.overrides import is_memoryless
from ..dtensor.gather_hooks import has_gather_hooks, inner_of
from ..flat.param_refs import ParamRef
from ..models.param_registry import is_orphan, owner_of
from ..models.walks import units_in
from ..runtime.unit import Unit
from ..transforms.extensions import marks_of

# The memory of one tensor, or of one of the tensors that it is made of: its space (the device, or the storage of a
# tensor without memory); from which byte to before which; shape, strides, size of an element, and dtype.
_Extent = tuple[object, int, int, tuple[int, ...], tuple[int, ...], int, torch.dtype]


_IGNORED, _INSIDE = "an ignored parameter", "of a unit inside"


@dataclass(frozen=True)
class _Held:
    """A tensor and the place where a module holds it.

    Attributes:
        what: the kind of place, for messages.
        is_own: whether it is a parameter that is about to be sharded.
        leaf: the parameter that has taken the place of one of a nested unit, whose memory this was.
    """

    path: str
    what: str
    tensor: Any
    extents: tuple[_Extent, ...]
    is_own: bool = False
    leaf: nn.Parameter | None = None

    def __str__(self) -> str:
        name = repr(clean(self.path))
        return f"{name} ({self.what})" if self.what else name


@dataclass(frozen=True)
class _Left:
    """The memory that a parameter of a unit had before it was sharded, while other tensors keep it."""

    storages: tuple[StorageWeakRef, ...]
    held: _Held

    @property
    def is_kept(self) -> bool:
        return not any(storage.expired() for storage in self.storages)


@dataclass(frozen=True)
class _Met:
    """An earlier unit, whose parameter `other_name` shared memory with the parameter `name` of another unit."""

    unit: Callable[[], Unit | None]
    name: str
    other_name: str


# By unit: memory of its parameters that others keep, and the earlier units with which it shared some.
_left: weakref.WeakKeyDictionary[Unit, list[_Left]] = weakref.WeakKeyDictionary()
_met: weakref.WeakKeyDictionary[Unit, list[_Met]] = weakref.WeakKeyDictionary()


def follow_ties(
    module: nn.Module, ignored_modules: Collection[nn.Module], ignored_params: Collection[nn.Parameter]
) -> SharedMemory:
    """Make parameters in `module`, in no unit yet, that are the same whole tensor one parameter. [Note: shared storage]

    Raises:
        UsageError: two tensors, one of them such a parameter, overlap otherwise; nothing has changed then.
    """
    nested = units_in(module)
    _check_met(nested)
    held = [*_held_in(module, ignored_modules, ignored_params)]
    left = {id(each.held): (each.held, unit) for unit in list(_left) for each in _alive(unit)}
    replaced: dict[int, nn.Parameter] = {}
    met: list[_Met] = []
    for one, other in _overlapping([*held, *(each for each, _ in left.values())]):
        first, second = (other, one) if id(other) in left else (one, other)
        if not any(_share(mine, its) for mine in first.extents for its in second.extents):
            continue
        if id(first) in left and (unit := left[id(first)][1]) not in nested:
            if not is_memoryless():  # in a dry run one parameter has a simulated tensor in each place
                met.append(_Met(weakref.ref(unit), second.path, first.path))
            continue
        kept = first.leaf if first.leaf is not None else first.tensor if first.is_own else None
        if kept is None or not second.is_own or first.extents != second.extents:
            _refuse(first, second)
        _check_alike(first, second, kept)
        replaced[id(second.tensor)] = replaced.get(id(kept), kept)
    if replaced:
        for path, each in module.named_modules():
            for attribute, parameter in list(each._parameters.items()):
                if parameter is not None and (new := replaced.get(id(parameter))) is not None:
                    ParamRef(each, attribute, fqn(path, attribute), parameter).hold(new)
    own = [each for each in held if each.is_own and id(each.tensor) not in replaced]
    memory = SharedMemory(own, met)
    _separate(own)
    return memory


def _separate(held: Sequence[_Held]) -> None:
    """Give parts of larger storages memory of their own. Views of one tensor share a counter of versions, and a
    write to one would look like a write to the others, which are in use. The objects stay the same."""
    for parameter in (each.tensor for each in held):
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
            continue
        if parameter.untyped_storage().nbytes() <= parameter.nbytes:
            continue
        if _torch.has_hooks(parameter) or _torch.hooks_on(parameter):
            continue  # they are the old memory's
        made = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        vars(made).update(vars(parameter))
        try:
            torch.utils.swap_tensors(parameter, made)
        except RuntimeError:  # a recurrent module refers to it weakly; its weights are no views
            continue


def _check_met(nested: Sequence[Unit]) -> None:
    """Refuse to take units into one model that were sharded one after the other, from the same memory."""
    among = set(nested)
    for unit in nested if _met else ():
        for each in _met.get(unit, ()):
            if (other := each.unit()) is not None and other in among:
                raise UsageError(
                    f"{each.name!r} of unit {unit.entries.class_name} and {each.other_name!r} of unit "
                    f"{other.entries.class_name} were different parameters in the same memory before they were "
                    "sharded, and are separate now. Make them one parameter before the first of them is sharded "
                    "(module.weight = other.weight), or give one of them its own memory (.clone())"
                )


class SharedMemory:
    """The memory of parameters that are about to be sharded."""

    def __init__(self, held: Iterable[_Held], met: list[_Met]) -> None:
        # Held until they are sharded: then other tensors keep what is used elsewhere.
        self._found = [(each, _storages_of(each.tensor)) for each in held]
        self._met = met

    def remember(self, unit: Unit) -> None:
        """Note what other tensors keep of it, now that the parameters belong to `unit`, and the units whose parameters
        had the same."""
        left = []
        for each, storages in self._found:
            if storages and all([storage_uses(storage._cdata) > 1 for storage in storages]):
                # A transformed parameter has another leaf, which no other place can hold.
                leaf = each.tensor if owner_of(each.tensor) is unit else None
                held = replace(each, tensor=None, is_own=False, leaf=leaf, what=_INSIDE)
                left.append(_Left(tuple(map(StorageWeakRef, storages)), held))
        self._found = []
        if left:
            _left[unit] = left
        if self._met:
            _met[unit] = self._met


def _alive(unit: Unit) -> list[_Left]:
    """The memory that parameters of `unit` had, as far as other tensors keep it."""
    found = _left.get(unit)
    if not found:
        return []
    alive = [left for left in found if left.is_kept]
    if len(alive) < len(found):
        _left[unit] = alive
    return alive


# -- tensors of modules ------------------------------------------------------------------------------------------------


def _held_in(
    module: nn.Module, ignored_modules: Collection[nn.Module], ignored_params: Collection[nn.Parameter]
) -> Iterator[_Held]:
    """Every tensor that modules in `module` hold, once, with parameters first; without those that units own."""
    seen: set[int] = set()
    ignored = set(map(id, ignored_params))  # comparing tensors compares their elements
    others: list[tuple[str, str, torch.Tensor]] = []
    waiting, met = [("", module)], {id(module)}
    while waiting:  # for every module of a model, some thrice: without calls for each
        path, each = waiting.pop()
        values = each.__dict__
        for name, child in reversed(values["_modules"].items()):
            if child is not None and id(child) not in met:
                met.add(id(child))
                waiting.append((f"{path}{name}.", child))
        for name, parameter in values["_parameters"].items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if owner_of(parameter) is None and not is_orphan(parameter):
                own = not (each in ignored_modules or id(parameter) in ignored)
                yield _Held(f"{path}{name}", "" if own else _IGNORED, parameter, _extents_of(parameter), own)
        for name, buffer in values["_buffers"].items():
            if buffer is not None:
                others.append((f"{path}{name}", "a buffer", buffer))
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not _is_recomputed(each, name):
                others.append((f"{path}{name}", "an attribute", value))
    for path, what, tensor in others:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            if owner_of(tensor) is None:
                yield _Held(path, what, tensor, _extents_of(tensor))


def _is_recomputed(module: nn.Module, name: str) -> bool:
    """Whether a hook sets the attribute before each forward, as torch's `spectral_norm` does: it shares a parameter's
    memory until the first one."""
    return any(getattr(hook, "name", None) == name for hook in module._forward_pre_hooks.values())


def _inner(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors that `tensor` is made of; itself if it is one; none if it has no strided memory."""
    if type(tensor) is nn.Parameter or type(tensor) is torch.Tensor:
        return [tensor] if tensor.layout is torch.strided else []
    if _dtensor.is_dtensor(tensor):
        return _inner(_dtensor.local_of(tensor))
    if nn.parameter.is_lazy(tensor):
        return []
    if hasattr(type(tensor), "__tensor_flatten__") and not _is_fake(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [each for name in names for each in _inner(getattr(tensor, name))]
    if has_gather_hooks(tensor) and not _is_fake(tensor):  # it does not name them
        return inner_of(tensor)
    return [tensor] if tensor.layout is torch.strided else []


def _is_fake(tensor: torch.Tensor) -> bool:
    return is_memoryless() and isinstance(tensor, _torch.fake_tensors().FakeTensor)


def _storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in _inner(tensor) if each.numel()]


def _extents_of(tensor: torch.Tensor) -> tuple[_Extent, ...]:
    inner = [each for each in _inner(tensor) if each.numel()]
    by_storage = is_memoryless()
    found: list[_Extent] = []
    for each in inner:
        shape, stride, size = each.shape, each.stride(), each.itemsize
        last = each.numel() - 1
        if not each.is_contiguous():
            last = sum([(extent - 1) * step for extent, step in zip(shape, stride, strict=True)])
        if by_storage or each.is_meta:
            space: object = each.untyped_storage()._cdata
            start = int(each.storage_offset()) * size
        else:
            space, start = each.device, each.data_ptr()
        found.append((space, start, start + (last + 1) * size, tuple(shape), stride, size, each.dtype))
    return tuple(found)


# -- overlaps ----------------------------------------------------------------------------------------------------------


def _overlapping(held: Iterable[_Held]) -> list[tuple[_Held, _Held]]:
    """The pairs of tensors whose ranges overlap and of which one is about to be sharded, in the order of `held`."""
    every = list(held)
    spaces: dict[object, list[tuple[int, int, int]]] = {}
    for number, each in enumerate(every):
        for extent in each.extents:
            spaces.setdefault(extent[0], []).append((extent[1], extent[2], number))
    found: dict[tuple[int, int], None] = {}
    for ranges in spaces.values():
        ranges.sort()
        for index, (_, stop, number) in enumerate(ranges[:-1]):
            after = index + 1
            while after < len(ranges) and ranges[after][0] < stop:
                other = ranges[after][2]
                if number != other and (every[number].is_own or every[other].is_own):
                    found[min(number, other), max(number, other)] = None
                after += 1
    return [(every[one], every[other]) for one, other in sorted(found)]


def _share(one: _Extent, other: _Extent) -> bool:
    """Whether the two have a byte in common: exact for any strides."""
    if one[0] != other[0] or one[2] <= other[1] or other[2] <= one[1]:
        return False
    if _is_dense(one) and _is_dense(other):
        return True
    first, last = min(one[1], other[1]), max(one[2], other[2])
    unit = gcd(one[5], other[5], one[1] - first, other[1] - first)
    painted = torch.zeros((last - first) // unit, dtype=torch.bool, device="cpu")
    views = []
    for _, start, _, shape, stride, size, _ in (one, other):
        fine = size // unit
        steps = (*(step * fine for step in stride), 1)
        views.append(painted.as_strided((*shape, fine), steps, (start - first) // unit))
    views[0].fill_(True)
    return bool(views[1].any())


def _is_dense(extent: _Extent) -> bool:
    _, start, stop, shape, _, size, _ = extent
    return stop - start == math.prod(shape) * size


# -- words -------------------------------------------------------------------------------------------------------------


def _check_alike(first: _Held, second: _Held, kept: nn.Parameter) -> None:
    """Refuse to replace `second` by `kept`, the parameter of `first`, if that would change what a program does."""
    other = second.tensor
    assert isinstance(other, nn.Parameter)
    differs = ""
    if other.requires_grad != kept.requires_grad:
        differs = f"their requires_grad is {kept.requires_grad} and {other.requires_grad}"
    elif not _are_split_alike(first.tensor, other):
        differs = "they are distributed differently"
    elif first.leaf is None and type(other) is not type(kept):
        differs = f"their types are {type(kept).__name__} and {type(other).__name__}"
    elif _torch.has_hooks(other) or _torch.hooks_on(other):
        differs = f"{second} has hooks, which would never run"
    elif not _are_equal(marks_of(kept), marks_of(other)):
        differs = "their attributes differ"
    if differs:
        raise UsageError(
            f"{first} and {second} are different parameters in the same memory, which would be treated as one tied "
            f"parameter, but {differs}. Make them one parameter before sharding ({second.path} = {first.path}), or "
            "give one of them its own memory (.clone())"
        )


def _are_split_alike(one: Any, other: Any) -> bool:
    if not (_dtensor.is_dtensor(one) or _dtensor.is_dtensor(other)):
        return True
    return _dtensor.are_split_alike(one, other)


def _are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    try:
        return all(value is other[name] or bool(value == other[name]) for name, value in one.items())
    except (RuntimeError, TypeError, ValueError):  # tensors, and what defines == in its own way
        return False


def _refuse(first: _Held, second: _Held) -> NoReturn:
    both = all(each.is_own or each.what == _INSIDE for each in (first, second))
    if any(each.what == _IGNORED for each in (first, second)):
        remedy = "ignore both of them or neither, or give one of them its own memory (.clone())"
    elif first.what == _INSIDE and first.leaf is None:
        raise UsageError(
            f"{second} is tied to {first} or shares its memory, and that parameter of a unit inside is a DTensor or "
            "was transformed by an extension. Put both modules into one unit"
        )
    elif both:
        remedy = (
            "give each its own memory (.clone()), or make the whole memory one parameter and take slices of it in the "
            "forward; if both cover the same memory, assign one parameter to both places"
        )
    else:
        remedy = "give it its own memory (.detach().clone()), or read the parameter in the forward"
    raise UsageError(
        f"{first} and {second} share memory but are different tensors: without sharding, a change to one changes the "
        f"other, and sharding would separate them. Remedy: {remedy}"
    )
