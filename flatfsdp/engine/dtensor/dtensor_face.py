"""Parameters that are DTensors of rows between iterations: the form in which `fully_shard` shows flat parameters.

[Note: assigned data] torch's setter changes a DTensor's outer tensor and leaves its local tensor as it was, so that the
statement does nothing. Programs that put weights back (moving averages, sharpness-aware steps, learning-rate finders)
use it. From the first sharded parameter on, the setter of DTensors also sets the local tensor of parameters that are
sharded here, and of other DTensors on their meshes, such as gradients. A parameter's value goes to the shard where it
is next used, as that of any other replaced tensor. DTensors of other engines keep torch's setter.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, count
from operator import attrgetter, is_not
from typing import Any, NoReturn

import torch
from torch import nn

from ...errors import UsageError
from ..base import _dtensor, _torch
from ..base.overrides import is_memoryless
from ..flat.faces import FaceWords, Sums, adoptions, assign_grad, set_own_grad
from ..flat.layout_views import ShardViews
from ..flat.paired_face import PairedFace
from ..flat.write_tracker import FlatParameter
from ..layout.layout import FlatLayout, ParamSpec
from ..planning.rows import pack_rows
from .gather_hooks import GatherHooks, has_gather_hooks, hollow, inner_of
from .holder_classes import mark
from .kept_gradients import KeptGradients
from .specs import spec_at_rest

_LOCAL, _GRAD = attrgetter("_local_tensor"), attrgetter("grad")


@dataclass(frozen=True, eq=False)
class DTensorFaces:
    """Makes `DTensorFace`s: each parameter a DTensor, split over the last dimension of `mesh` along the dimension that
    is the slowest in its memory. Its layout has a segment of rows for each parameter ([Note: pieces]).

    Attributes:
        mesh: the DeviceMesh of data parallelism, (shard,) or (replicate, shard); None in a copy for another process.
        stored: for each leaf its `StoredDTensor`, if it was a DTensor; None for a plain tensor. Empty if all are plain.
        hooks: for each leaf its gather hooks, or None; with hooks the local tensor is of the parameter's own class.
            Empty if none has hooks.
    """

    mesh: Any
    stored: tuple[Any, ...] = ()
    hooks: tuple[GatherHooks | None, ...] = ()

    @classmethod
    def lay_out(cls, specs: Sequence[ParamSpec], *, world: int, align: int) -> FlatLayout:
        return pack_rows(specs, world=world, align=align)

    def __call__(
        self, leaves: Sequence[nn.Parameter], flat_param: FlatParameter, layout: FlatLayout, rank: int
    ) -> DTensorFace:
        """The face of `leaves`.

        Raises:
            UsageError: a parameter without dimensions; or this torch lacks names that DTensors need.
        """
        nothing = (None,) * len(leaves)
        return DTensorFace(leaves, layout, rank, self.mesh, self.stored or nothing, self.hooks or nothing)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensorFaces:
        # Copies of a model communicate over the same mesh.
        return DTensorFaces(self.mesh, self.stored, copy.deepcopy(self.hooks, memo))


class _Rows:
    """The memory layout of one parameter's rows on this rank, and the spec of their DTensor.

    Attributes:
        numel: the elements of these rows.
    """

    def __init__(
        self, spec: ParamSpec, layout: FlatLayout, rank: int, mesh: Any, stored: Any, hooks: GatherHooks | None
    ) -> None:
        if not spec.shape:
            raise UsageError(
                f"parameter {spec.name!r} has no dimensions, so it has no rows to split over ranks. Give it the shape "
                "(1,)"
            )
        self.name, self._mesh, self._stored, self.hooks = spec.name, mesh, stored, hooks
        self._whole = ParamSpec(spec.name, spec.shape)
        self._dim = spec.order[0]
        most = -(-spec.rows // layout.world)
        rows = max(0, min(most, spec.rows - rank * most))
        self._shape = tuple(rows if dim == self._dim else size for dim, size in enumerate(spec.shape))
        self._order, self._stride = spec.order, spec.stride
        self.numel = rows * (spec.numel // spec.rows if spec.rows else 0)
        self._specs: dict[torch.dtype, Any] = {}

    def spec(self, dtype: torch.dtype) -> Any:
        """The DTensorSpec of the parameter, or of a gradient of it, in `dtype`."""
        made = self._specs.get(dtype)
        if made is None:
            made = self._specs[dtype] = spec_at_rest(self._mesh, self._whole, self._dim, dtype, self._stored)
            _follow(made, self)
        return made

    def local(self, piece: torch.Tensor) -> torch.Tensor:
        """A view of `piece`, these rows in the shard's layout, in the parameter's shape. Without elements it is
        memory of its own, since other parameters begin at its end."""
        if not self.numel:
            return piece.new_empty(1)[:0].view(self._shape)
        if piece.shape == self._shape:
            return piece
        if self._stride is None:
            return piece.view(self._shape)
        return piece.as_strided(self._shape, self._stride, piece.storage_offset())

    def held(self, piece: torch.Tensor) -> torch.Tensor:
        """`local` as the parameter holds it: in a storage of its own, and as a tensor of the parameter's class if that
        is not a plain one."""
        if self.kept is not None:
            return self.kept
        local = self.local(_in_own_storage(piece))
        return local if self.hooks is None else self.hooks.around(local)

    @property
    def kept(self) -> torch.Tensor | None:
        """The rows, if the parameter's class keeps them. [Note: rows of their class]"""
        return None if self.hooks is None else self.hooks.rows

    def plain(self, value: torch.Tensor) -> torch.Tensor:
        """The value of `value`, which may be of the parameter's class, for the shard.

        Raises:
            UsageError: it has no plain one. [Note: rows of their class]
        """
        if self.hooks is None:
            return value
        if self.kept is not None and isinstance(value, self.hooks.cls):
            raise UsageError(
                f"a gradient or an optimizer's state of {self.name!r} is a {type(value).__name__}; expected plain "
                "elements. The state dicts of torch.distributed.checkpoint.state_dict keep it as it is"
            )
        return self.hooks.master_of(value)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape for a view of a non-empty piece of a shard: () for the piece itself, None if `local` decides."""
        if not self.numel or self._stride is not None:
            return None
        return () if len(self._shape) == 1 else self._shape

    def piece(self, local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """`local`, of the parameter's shape, in the shard's layout; `like`: the shard's piece. A view if possible."""
        return local if local.shape == like.shape else local.permute(self._order).reshape(-1)

    def check(self, value: Any, what: str) -> None:
        """Refuse a `value` that is not a DTensor split like this parameter."""
        expected = self.spec(value.dtype)
        if not _dtensor.is_dtensor(value):
            found = f"a {type(value).__name__} of shape {tuple(value.shape)}"
        else:
            spec = _dtensor.spec_of(value)
            if (
                (spec.shape, spec.mesh) == (expected.shape, expected.mesh)
                # On one rank all placements are the same, and older versions of torch name either.
                and (spec.placements == expected.placements or spec.mesh.size() == 1)
                and _dtensor.local_of(value).shape == self._shape
            ):
                return
            found = f"a DTensor of shape {tuple(spec.shape)} with placements {spec.placements} on {spec.mesh}"
        raise UsageError(
            f"{what} of {self.name!r} was replaced by {found}; expected a DTensor of shape {tuple(expected.shape)} "
            f"with placements {expected.placements} on {expected.mesh}. Create one with "
            "torch.distributed.tensor.distribute_tensor(value, parameter.device_mesh, parameter.placements)"
        )


def _in_own_storage(piece: torch.Tensor) -> torch.Tensor:
    """The memory of `piece`, a view of the shard, as a tensor whose storage is these bytes alone. A DTensor has its
    local tensor's offset: torch pickles and copies none with an offset, and writes whole storages to files.

    It is made from a view, so that a write to it increments the shard's version."""
    if piece.is_meta or is_memoryless() or not piece.numel():
        return piece
    storage, start = piece.untyped_storage(), piece.storage_offset() * piece.itemsize
    own = storage[start : start + piece.nbytes]
    return piece.narrow(0, 0, 0).set_(own, 0, piece.shape, piece.stride())


class DTensorFace(PairedFace):
    """One `Parameter` that is a DTensor for each leaf: this rank's rows, in memory of the shard. [Note: faces]

    Holders are made once. A user's replacement for one (`load_state_dict(assign=True)`, `swap_tensors`) becomes a
    holder if it is split alike: its values go to the shard, and it shows the shard. Gradients are also DTensors, split
    like their parameters, on every rank if any has rows.
    """

    words = FaceWords(
        "parameters at rest",
        "DTensors",
        "fully_shard",
        holder="the DTensor",
        unstepped=(
            "which was flattened: with fully_shard it is never updated. Build the optimizer from model.parameters() "
            "after wrapping"
        ),
    )

    users_swap_holders = misses_data_writes = True

    def __init__(
        self,
        leaves: Sequence[nn.Parameter],
        layout: FlatLayout,
        rank: int,
        mesh: Any,
        stored: Sequence[Any],
        hooks: Sequence[GatherHooks | None],
    ) -> None:
        super().__init__(leaves, [])
        self.originals, self.present = leaves, range(len(leaves))
        specs = zip(layout.params, stored, hooks, strict=True)
        self._rows = [_Rows(spec, layout, rank, mesh, one, other) for spec, one, other in specs]
        self._without = [i for i, rows in enumerate(self._rows) if not rows.numel]
        self._shapes = [rows.shape for rows in self._rows]
        self._folded = [i for i, shape in enumerate(self._shapes) if shape != ()]
        self._specs: dict[torch.dtype, list[Any]] = {}
        self.shown: KeptGradients | None = None

    # -- the shard ---------------------------------------------------------------------------------------------------

    def moved(self, at_rest: ShardViews, shard: torch.Tensor) -> None:
        self._at_rest, self.shown, self.release = at_rest, None, None
        with torch.no_grad():
            for i, (rows, view) in enumerate(zip(self._rows, at_rest.views, strict=True)):
                local, spec = rows.held(view), rows.spec(shard.dtype)
                if i == len(self.holders):
                    made = nn.Parameter(_dtensor.dtensor(local, spec), self.leaves[i].requires_grad)
                    mark(made, self.leaves[i])
                    self.holders.append(made)
                holder = self.holders[i]
                if holder.dtype != shard.dtype or holder.device != shard.device:
                    made = nn.Parameter(_dtensor.dtensor(local, spec), holder.requires_grad)
                    mark(made, self.leaves[i])
                    torch.utils.swap_tensors(holder, made)  # keeps the object, to which optimizers refer
                _dtensor.set_local(holder, local, spec)
        self._note_memory()

    def _note_memory(self) -> None:
        self._locals = list(map(_LOCAL, self.holders))
        # An operation on a DTensor increments its own version, one on its local tensor the shard's; except for local
        # tensors of another class, which have the shard inside.
        inside = [local for local, rows in zip(self._locals, self._rows, strict=True) if rows.hooks is not None]
        kept = [inner for rows in self._rows if rows.kept is not None for inner in inner_of(rows.kept)]
        self.counters[:] = [*self.holders, *inside, *kept]

    def replaced(self) -> list[int]:
        others = map(is_not, map(_LOCAL, self.holders), self._locals)
        return list(compress(count(), others))

    def value_of(self, index: int, held: nn.Parameter) -> torch.Tensor:
        rows = self._rows[index]
        if not _dtensor.is_dtensor(held) and held.shape == self.holders[index].shape:
            if rows.kept is not None:
                return hollow(self._at_rest.views[index])  # `adopt` takes the value
            return rows.plain(held.detach())  # the full tensor, from which the shard takes its part
        rows.check(held, "the parameter")
        local = _dtensor.local_of(held).detach()
        if local.is_meta:
            raise UsageError(
                f"the parameter {rows.name!r} was replaced by one on the meta device, which has no values. Load a "
                "state dict with values, or call to_empty() of the module first to allocate memory"
            )
        if rows.kept is not None:
            return hollow(self._at_rest.views[index])
        return rows.piece(rows.plain(local), self._at_rest.views[index])

    def adopt(self, index: int, held: nn.Parameter) -> bool:
        rows, view, before = self._rows[index], self._at_rest.views[index], self.holders[index]
        if held is not before:
            before.grad = None  # not of the new parameter; a window drops it, too
        if rows.hooks is not None and rows.kept is not None:
            rows.hooks.take(_dtensor.local_of(held) if _dtensor.is_dtensor(held) else held)
            if not _dtensor.is_dtensor(held):
                held = before
        if _dtensor.is_dtensor(held):
            if held is not before:
                self.holders[index] = held
                self._slots = None  # it is another object in the places
            mark(held, self.leaves[index])
            adoptions.count += 1  # also for the same object: it may have been swapped with another one
            _dtensor.set_local(held, rows.held(view), rows.spec(view.dtype))
            self._note_memory()
        return True

    # -- gradients ---------------------------------------------------------------------------------------------------

    def local_of(self, value: torch.Tensor) -> torch.Tensor:
        return _dtensor.local_of(value) if _dtensor.is_dtensor(value) else value

    def like_holder(self, indices: tuple[int, ...], piece: torch.Tensor) -> torch.Tensor:
        (index,) = indices
        rows = self._rows[index]
        made: torch.Tensor = _dtensor.dtensor(rows.local(piece), rows.spec(piece.dtype))
        return made

    def piece_of(self, index: int, value: torch.Tensor) -> torch.Tensor:
        if not _dtensor.is_dtensor(value) or value.shape != self.holders[index].shape:
            return value
        rows = self._rows[index]
        return rows.piece(rows.plain(_dtensor.local_of(value)), self._at_rest.views[index])

    def grads_of_leaves(self) -> Sequence[torch.Tensor | None]:
        grads = [holder.grad for holder in self.holders]
        return [None if grad is None else self.piece_of(i, grad) for i, grad in enumerate(grads)]

    def add_grads(self, total: torch.Tensor, trained: frozenset[int], taken: Mapping[int, torch.Tensor]) -> Sums:
        with _torch.as_plain_tensors():  # halves the time for attributes of DTensors
            specs = self._specs.get(total.dtype) or self._specs_in(total.dtype)
            holders, fits = self.holders, total.dtype == self.holders[0].dtype
            have_none = list(map(_GRAD, holders)).count(None) == len(holders)
            if fits and have_none:
                kept = self.shown
                if kept is None or kept.trained != trained:
                    kept, self.release = self._new_kept(total, trained, specs), None
                    self.shown = kept
                if kept is not None:
                    if (made := kept.show(total)) is not None:
                        self.release = kept.release
                        shown = holders if kept.is_whole else [holders[i] for i in kept.indices]
                        deque(map(set_own_grad, shown, made), 0)
                        return []
                    self.shown = self.release = None
            new, fresh = self._locals_of(total, trained)  # parameters with gradients, and their local tensors
            sums: Sums = []
            if not have_none:
                found = [(i, holders[i].grad, local) for i, local in zip(new, fresh, strict=True)]
                for i, grad, local in found:
                    if grad is not None:
                        self._rows[i].check(grad, "the .grad")
                        sums.append((_dtensor.local_of(grad), local))
                new = [i for i, grad, _ in found if grad is None]
                fresh = [local for _, grad, local in found if grad is None]
            grads = _dtensor.dtensors(fresh, map(specs.__getitem__, new))
            deque(map(set_own_grad if fits else assign_grad, map(holders.__getitem__, new), grads), 0)
            return sums

    def _new_kept(self, total: torch.Tensor, trained: frozenset[int], specs: Sequence[Any]) -> KeptGradients | None:
        """An object that shows gradients like `total`, those of `trained` parameters; None if they are large."""
        if not KeptGradients.serve(total, len(trained)):
            return None
        return KeptGradients(trained, specs, total, partial(self._locals_of, trained=trained))

    def _locals_of(self, total: torch.Tensor, trained: frozenset[int]) -> tuple[list[int], list[torch.Tensor]]:
        """The indices of `trained` parameters, and their local tensors, views of `total`, in their shapes."""
        rows, folded = self._rows, self._folded
        new, shown = self._at_rest.present_in(total)
        if self._without or len(trained) < len(rows):
            pairs = [(i, piece) for i, piece in zip(new, shown, strict=True) if i in trained and rows[i].numel]
            # Also empty ones: computations with a gradient are collective.
            pairs += [(i, total) for i in self._without if i in trained]
            new, shown = [i for i, _ in pairs], [piece for _, piece in pairs]
            folded = [k for k, i in enumerate(new) if i in self._folded]
        for k in folded:
            shape = self._shapes[new[k]]
            shown[k] = shown[k].view(shape) if shape else rows[new[k]].local(shown[k])
        return new, shown

    def _specs_in(self, dtype: torch.dtype) -> list[Any]:
        made = self._specs[dtype] = [rows.spec(dtype) for rows in self._rows]
        return made


# -- assigned data -----------------------------------------------------------------------------------------------------

_TORCHS: Any = torch.Tensor.data

# The owners of specs by the ids of these, which they keep; and the meshes of all of them.
_owners: weakref.WeakValueDictionary[int, _Rows] = weakref.WeakValueDictionary()
_meshes: set[Any] = set()


def _follow(spec: Any, owner: _Rows) -> None:
    """Let assignments to the `.data` of DTensors with this spec take effect, for as long as `owner` lives, which keeps
    the spec."""
    dtensor_class = _dtensor.dtensor_type()
    if "data" not in vars(dtensor_class):
        dtensor_class.data = property(_TORCHS.__get__, _assign, _TORCHS.__delete__)
    _owners[id(spec)] = owner
    _meshes.add(spec.mesh)


def _assign(this: Any, value: Any) -> None:
    spec = _dtensor.spec_of(this)
    owner = _owners.get(id(spec))
    if owner is None and (isinstance(this, nn.Parameter) or spec.mesh not in _meshes):
        _TORCHS.__set__(this, value)
        return
    what = "the .data of a DTensor" if owner is None else f"the .data of {owner.name!r}, or of its gradient,"
    held = _dtensor.local_of(this)
    local = _local_of(value, spec, held, what)
    if (local.dtype, local.device) != (held.dtype, held.device):
        remedy = "; call to_empty(device=...) of the model first to allocate memory" if held.is_meta else ""
        raise UsageError(
            f"{what} was replaced by a tensor of {local.dtype} on {local.device}; expected {held.dtype} on "
            f"{held.device}. Convert the value, or convert the whole model with its .to(){remedy}"
        )
    elsewhere = has_gather_hooks(held) or local.data_ptr() != held.data_ptr() or local.stride() != held.stride()
    if elsewhere or not local.numel():
        _dtensor.set_local(this, local, spec)


def _local_of(value: Any, spec: Any, held: torch.Tensor, what: str) -> torch.Tensor:
    """This rank's local tensor of `value`, without communication."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{what} was replaced by a {type(value).__name__}; expected a tensor")
    value = value.detach()
    if _dtensor.is_dtensor(value):
        other = _dtensor.spec_of(value)
        local = _dtensor.local_of(value)
        if value.shape != spec.shape or other.mesh != spec.mesh:
            _refuse(value, spec, held, what)
        if other.placements == spec.placements:
            return local if local.shape == held.shape else _refuse(value, spec, held, what)
        if not all(each.is_replicate() for each in other.placements):
            _refuse(value, spec, held, what)
        value = local
    if value.shape == spec.shape:
        value = _dtensor.local_of(_dtensor.split_alike(value, spec))
    return value if value.shape == held.shape else _refuse(value, spec, held, what)


def _refuse(value: torch.Tensor, spec: Any, held: torch.Tensor, what: str) -> NoReturn:
    found = f"a tensor of shape {tuple(value.shape)}"
    if _dtensor.is_dtensor(value):
        other = _dtensor.spec_of(value)
        found = f"a DTensor of shape {tuple(value.shape)} with placements {other.placements} on {other.mesh}"
    raise UsageError(
        f"{what} was replaced by {found}; expected the full value of shape {tuple(spec.shape)}, from which each rank "
        f"takes its part, this rank's part of shape {tuple(held.shape)}, or a DTensor with placements "
        f"{spec.placements} on {spec.mesh}"
    )
