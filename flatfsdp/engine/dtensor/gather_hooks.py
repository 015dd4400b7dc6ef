"""Parameters whose tensors define the tensors to gather for them: FSDP2's extensions of its all-gather.

[Note: gather hooks] Such a parameter is a tensor around another one, the *master*, of its own shape and dtype. The
master is stored, sharded by rows and trained as any parameter is; gradients come in high precision. But the gathered
tensors are the result of `fsdp_pre_all_gather` for this rank's rows (float8 and its scale, for example), and modules
compute with the result of `fsdp_post_all_gather` for those of all ranks. The whole master is never allocated.

[Note: rows of their class] A tensor without such a master (made of several tensors, quantized in blocks), or one that
cannot be rebuilt around other memory, is split by its own operations, those that FSDP2 uses: `split`, `new_zeros`,
`slice`, `copy_`. Optimizers, loads and state dicts use its rows as they are. Their handle has the layout for gradients,
but no values: its shard has a length, and memory for one zero.

[Note: rows along another dimension] A tensor that is split along another dimension than the first also keeps its rows,
since hooks rely on contiguous tensors, and rows of the stored order have strides. Its hooks return tensors with as many
elements as these rows, and get what FSDP2 passes: the memory of the whole, in the order of the parameter, in a shape
that begins with -1 and ends as theirs did.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import UsageError
from ..device.streams import pin
from ..parts.strides import stride_by_rows

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class Input(NamedTuple):
    """Shape and dtype of one of the tensors that a rank contributes for a parameter: the same at every gather."""

    shape: tuple[int, ...]
    dtype: str  # without "torch."

    @property
    def nbytes(self) -> int:
        """The size of one rank's tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * dtype.itemsize

    def view(self, memory: torch.Tensor, ranks: int) -> torch.Tensor:
        """`memory`, the bytes of `ranks` ranks, as their tensors, concatenated along the first dimension."""
        first = self.shape[0] if self.shape else 1
        dtype: torch.dtype = getattr(torch, self.dtype)
        return memory.view(dtype).view(ranks * first, *self.shape[1:])

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def has_gather_hooks(tensor: torch.Tensor) -> bool:
    """Whether `tensor` defines which tensors are gathered for it."""
    return hasattr(tensor, PRE) or hasattr(tensor, POST)


def _master_in(tensor: Any) -> str | None:
    """The name of the inner tensor of the wrapper subclass `tensor` that is its master; None if it has none.

    The answer is the same for the whole tensor and for rows of it."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    alike = [name for name, one in inner.items() if (one.shape, one.dtype) == (tensor.shape, tensor.dtype)]
    if not alike or any(one.dim() for name, one in inner.items() if name != alike[0]):
        return None
    try:
        with torch.no_grad():
            made = _unflatten(type(tensor), inner, context, tensor.shape, tensor.stride())
    except Exception:  # FSDP2 never calls it, so that it may be missing, or wrong
        return None
    return alike[0] if type(made) is type(tensor) and getattr(made, alike[0], None) is inner[alike[0]] else None


def _unflatten(cls: Any, inner: dict[str, torch.Tensor], context: Any, shape: Any, stride: Any) -> Any:
    """A tensor of class `cls` around the `inner` ones; some classes take no strides."""
    make = cls.__tensor_unflatten__
    known = inspect.signature(make).parameters.values()
    given = inner, context, shape, stride
    if any(each.kind is each.VAR_POSITIONAL for each in known):
        return make(*given)
    return make(*given[: len([each for each in known if each.kind is not each.KEYWORD_ONLY])])


def master_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The master of a tensor with gather hooks; None if its class keeps its rows. [Note: rows of their class]"""
    name = _master_in(tensor)
    return None if name is None else getattr(tensor, name)


def inner_of(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors that `tensor` is made of; itself if it is plain."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [plain for name in tensor.__tensor_flatten__()[0] for plain in inner_of(getattr(tensor, name))]
    if not has_gather_hooks(tensor):
        return [tensor]
    return [plain for each in vars(tensor).values() if isinstance(each, torch.Tensor) for plain in inner_of(each)]


def hollow(like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Zeros of the shape and dtype of `like` in the memory of one."""
    return torch.zeros((), dtype=like.dtype, device=device or like.device).expand(like.shape)


def rebuilt(tensor: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Parameter:
    """A parameter like `tensor`, built from the results of `change` for its inner tensors."""
    names, context = tensor.__tensor_flatten__()
    inner = {name: change(getattr(tensor, name)) for name in names}
    made = _unflatten(type(tensor), inner, context, tensor.shape, tensor.stride())
    return nn.Parameter(made, requires_grad=tensor.requires_grad)


class GatherHooks:
    """The hooks of one parameter. [Note: gather hooks]

    Attributes:
        name: of the parameter, for messages.
        cls: the class of its tensor.
        seen: the tensor that modules compute with, while the parameter is unsharded.
        dim: the dimension along which ranks split it.
        keeps_rows: whether its class keeps the rows, and the shard has none. [Note: rows of their class]
        rows: then this rank's rows, after `cut`.
    """

    rows: torch.Tensor | None = None

    def __init__(self, name: str, tensor: torch.Tensor, policy: Any, dim: int = 0) -> None:
        """The hooks of `tensor`, the whole parameter, split along `dim`. `policy`: the user's, for hooks."""
        self.name, self.dim = name, dim
        self.seen: torch.Tensor | None = None
        self.cls = type(tensor)
        self._policy = policy
        self._size = tensor.shape
        self._stride = tuple(prod(max(size, 1) for size in tensor.shape[dim + 1 :]) for dim in range(tensor.dim()))
        if absent := next((each for each in (PRE, POST) if not callable(getattr(tensor, each, None))), None):
            raise UsageError(
                f"{self._what} has {POST if absent == PRE else PRE} but no {absent}: the first makes the tensors "
                "to gather, the second those that modules compute with. Define both, or none"
            )
        self._takes = len(inspect.signature(getattr(tensor, PRE)).parameters)
        if self._takes not in (1, 5):
            raise UsageError(
                f"{self._what}: its {PRE} takes {self._takes} arguments; expected (mesh), or (mesh, outer_size, "
                "outer_stride, module, mp_policy)"
            )
        self._attribute = "" if dim else _master_in(tensor) or ""
        self.keeps_rows = not self._attribute
        self._whole: torch.Tensor | None = tensor if self.keeps_rows else None
        if not self.keeps_rows:
            names, self._context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            self._others = {name: getattr(tensor, name) for name in names if name != self._attribute}

    @property
    def _what(self) -> str:
        return f"parameter {self.name!r} ({self.cls.__name__})"

    # -- the tensor at rest ------------------------------------------------------------------------------------------

    def around(self, master: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's class around `master`, the whole or some rows of it."""
        inner = {self._attribute: master, **self._others}
        made: torch.Tensor = _unflatten(self.cls, inner, self._context, master.shape, master.stride())
        return made

    def stored_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to lay out for the whole `tensor`: its master; one on the meta device if its class keeps rows."""
        if self.keeps_rows:
            stride = stride_by_rows(tensor.shape, self.dim)
            return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")
        return self.master_of(tensor).contiguous()

    def master_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The master of `tensor`; `tensor` itself if it is of another class."""
        return getattr(tensor, self._attribute) if isinstance(tensor, self.cls) else tensor

    # -- rows that the class keeps [Note: rows of their class] -------------------------------------------------------

    @property
    def is_on_meta(self) -> bool:
        """Whether the tensor that `cut` will split is on the meta device."""
        return self._whole is not None and self._whole.is_meta

    def cut(self, rank: int, world: int, home: torch.device, *, pinned: bool) -> None:
        """Keep the rows of `rank`, one of `world` ranks, on `home`, and not the whole tensor. Precondition: the class
        keeps rows.

        Raises:
            UsageError: ranks would have parts of different sizes along a dimension other than the first, where the
                gathered tensors have no room for padding.
        """
        assert self._whole is not None
        if self.dim and self._size[self.dim] % world:
            raise UsageError(
                f"{self._what} of shape {tuple(self._size)} is split along dimension {self.dim}, whose "
                f"{self._size[self.dim]} elements are no multiple of the {world} ranks. Expected one for a tensor with "
                f"{PRE}: let shard_placement_fn return Shard(0), or pad the parameter"
            )
        whole, self._whole = self._whole, None
        rows = self._rows_of(whole, rank, world)
        if rows.device != home and not rows.is_meta:
            rows = rows.to(home)
        self.rows = pin(rows) if pinned and not rows.is_meta else rows
        self._cut_for = rank, world

    @torch.no_grad()
    def _rows_of(self, whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        """The rows of `rank`, in memory of their own, by the operations and in the order of FSDP2's."""
        shards = torch.chunk(whole, world, self.dim)
        padded = whole.new_zeros(shards[0].size())
        own = shards[rank].size(self.dim) if rank < len(shards) else 0
        if own and padded.numel():
            padded.narrow(self.dim, 0, own).copy_(shards[rank])
        return padded.narrow(self.dim, 0, own)

    def take(self, value: torch.Tensor) -> None:
        """Keep a copy of `value`, a user's, the whole or this rank's rows, of the class or plain."""
        assert self.rows is not None
        value, before = value.detach(), self.rows
        with torch.no_grad(), torch.inference_mode(False):
            if value.shape != before.shape:
                value = self._rows_of(value, *self._cut_for)
            home = value.device if before.is_meta else before.device
            if isinstance(value, self.cls):
                self.rows = (value if value.device == home else value.to(home)).clone()
            else:
                self.rows = torch.empty_like(before, device=home)
                self.rows.copy_(value)

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The result of `change`, a move or a cast, for the kept rows.

        Raises:
            UsageError: it is of another class.
        """
        assert self.rows is not None
        made = change(self.rows)
        if not isinstance(made, self.cls):
            raise UsageError(
                f"{self._what}: a move or cast of its rows made a {type(made).__name__}; expected one of its class. "
                "Leave it out, or convert the module before sharding it"
            )
        return made

    @property
    def nbytes(self) -> int:
        """The size of the kept rows."""
        return sum(each.nbytes for each in inner_of(self.rows))

    # -- the unit ----------------------------------------------------------------------------------------------------

    def attach(self, module: nn.Module, mesh: Any) -> None:
        """Set the `module` that computes with the parameter, and the `mesh` whose last dimension shards it."""
        self._module = weakref.ref(module)
        self._mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherHooks:
        twin = memo[id(self)] = GatherHooks.__new__(GatherHooks)
        twin.__setstate__(self.__getstate__())
        twin.rows = copy.deepcopy(self.rows, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_module", "_mesh", "seen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, seen=None)

    # -- gathers -----------------------------------------------------------------------------------------------------

    def inputs(self, rows: torch.Tensor, device: torch.device) -> tuple[list[torch.Tensor], Any]:
        """The tensors to gather for `rows`, this rank's, a tensor of the parameter's class; and metadata for `outputs`.

        Raises:
            UsageError: it cannot be gathered.
        """
        arguments = (self._mesh, self._size, self._stride, self._module(), self._policy)
        if rows.device != device:
            rows = rows.to(device, non_blocking=True)
        with torch.no_grad(), self._naming(PRE):
            found = getattr(rows, PRE)(*arguments[: self._takes])
        if not (isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[0], (tuple, list))):
            self._refuse(f"{type(found).__name__}", "(the tensors to gather, metadata)")
        inputs, metadata = found
        for position, each in enumerate(inputs):
            where = f"as tensor {position} of {len(inputs)}"
            if not isinstance(each, torch.Tensor):
                self._refuse(f"a {type(each).__name__} {where}", "tensors")
            if hasattr(type(each), "__tensor_flatten__"):
                self._refuse(f"a {type(each).__name__} {where}", "plain tensors, those that it is made of")
            if not each.is_contiguous():
                self._refuse(f"{tuple(each.shape)} with strides {each.stride()} {where}", "contiguous tensors")
            if each.device != device:
                self._refuse(f"one on {each.device} {where}", f"tensors on {device}")
            if self.dim and each.numel() != rows.numel():
                expected = f"{rows.numel()} elements, as many as the rows, which are split along dimension {self.dim}"
                self._refuse(f"{tuple(each.shape)} {where}", expected)
        if not inputs:
            self._refuse("no tensor", "one at least")
        return list(inputs), metadata

    def reorder(self, gathered: torch.Tensor) -> None:
        """Bring `gathered`, the tensors of all ranks one after the other, into the parameter's order, in its memory.
        [Note: rows along another dimension]"""
        if not self.dim or not gathered.numel():
            return
        ranks = self._size[self.dim] // self.rows.shape[self.dim]  # type: ignore[union-attr]
        with torch.no_grad(), torch.inference_mode(False):
            by_rank = gathered.clone().view(ranks, *self.rows.shape)  # type: ignore[union-attr]
            torch.cat(by_rank.unbind(), self.dim, out=gathered.view(self._size))

    @contextmanager
    def _naming(self, hook: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error of a user-defined hook
            raise UsageError(f"{self._what}: its {hook} raised {type(error).__name__}: {error}") from error

    def _refuse(self, found: str, expected: str) -> None:
        raise UsageError(f"{self._what}: its {PRE} returned {found}; expected {expected}")

    def fit(self, inputs: Sequence[torch.Tensor], agreed: Sequence[Input], rows: int, most: int) -> list[torch.Tensor]:
        """`inputs` as bytes, of the sizes that all ranks have `agreed` on; this rank's `rows` are padded to `most`, the
        maximum over ranks.

        Raises:
            UsageError: their number, dtypes or sizes differ.
        """
        if not fitting(found := described(inputs), agreed, rows, most):
            self._refuse(listed(found), f"{listed(agreed)}, as at the first gather")
        pieces = [each.reshape(-1).view(torch.uint8) for each in inputs]
        lacking = [expected.nbytes - piece.numel() for expected, piece in zip(agreed, pieces, strict=True)]
        return [
            torch.cat([piece, piece.new_zeros(n)]) if n else piece for piece, n in zip(pieces, lacking, strict=True)
        ]

    def outputs(
        self,
        rows: torch.Tensor,
        gathered: Sequence[torch.Tensor],
        metadata: Any,
        dtype: torch.dtype,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The tensor that modules compute with, made from the `gathered` tensors of all ranks, in `dtype`: `out`, that
        of an earlier gather, refilled, if given. And tensors with memory of their own that belong to it.

        Raises:
            UsageError: its shape is not the parameter's.
        """
        with torch.no_grad(), torch.inference_mode(False):
            with self._naming(POST):
                made = getattr(rows, POST)(tuple(gathered), metadata, dtype, out=out)
            if out is not None:
                return out, []
            if not (isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], torch.Tensor)):
                raise UsageError(
                    f"{self._what}: its {POST} returned {type(made).__name__}; expected (the tensor that modules "
                    "compute with, the tensors whose memory is to be freed with it)"
                )
            seen, inner = made
            if self.dim and seen.shape != self._size and seen.numel() == self._size.numel():
                seen = torch.as_strided(seen, self._size, self._stride, 0)
            if seen.shape != self._size and seen.shape[1:] == self._size[1:] and seen.shape[0] > self._size[0]:
                seen = seen.narrow(0, 0, self._size[0])  # without the padding rows, wherever it lies in our buffer
        if seen.shape != self._size or not seen.dtype.is_floating_point:
            raise UsageError(
                f"{self._what}: its {POST} returned {seen.dtype} of shape {tuple(seen.shape)}; expected a "
                f"floating-point tensor of shape {tuple(self._size)}"
            )
        return seen, [each for each in inner if isinstance(each, torch.Tensor)]


def described(inputs: Sequence[torch.Tensor]) -> list[Input]:
    """The shapes and dtypes of `inputs`, for other ranks."""
    return [Input(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in inputs]


def listed(inputs: Sequence[Input]) -> str:
    """`inputs` in a message."""
    return ", ".join(map(str, inputs)) or "nothing"


def fitting(found: Sequence[Input], agreed: Sequence[Input], rows: int, most: int) -> bool:
    """Whether a rank with `rows` rows of a parameter, of at most `most`, may contribute `found` if the first rank
    contributes `agreed`: the same shapes and dtypes, or fewer rows, which can be padded."""
    if len(found) != len(agreed):
        return False
    filled = [Input((most, *each.shape[1:]), each.dtype) if each.shape[:1] == (rows,) else each for each in found]
    return all(each in pair for *pair, each in zip(found, filled, agreed, strict=True))
