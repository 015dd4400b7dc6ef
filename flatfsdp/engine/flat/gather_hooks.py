"""Parameters whose tensors define the tensors to gather for them: FSDP2's extensions of its all-gather.

[Note: gather hooks] Such a parameter is a tensor around another one, the *master*, of its own shape and dtype. The
master is stored, sharded by rows and trained as any parameter is; gradients come in high precision. But the gathered
tensors are the result of `fsdp_pre_all_gather` for this rank's rows (float8 and its scale, for example), and modules
compute with the result of `fsdp_post_all_gather` for those of all ranks. The whole master is never allocated.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import UsageError

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
    """The name of the inner tensor of the wrapper subclass `tensor` that is its master."""
    names = tensor.__tensor_flatten__()[0]
    alike = (
        name for name in names if (inner := getattr(tensor, name)).shape == tensor.shape and inner.dtype == tensor.dtype
    )
    return next(alike, None)


def master_of(tensor: torch.Tensor) -> torch.Tensor:
    """The master of a tensor with gather hooks."""
    found: torch.Tensor = getattr(tensor, _master_in(tensor) or "")
    return found


def rebuilt(tensor: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Parameter:
    """A parameter like `tensor`, built from the results of `change` for its inner tensors."""
    names, context = tensor.__tensor_flatten__()
    inner = {name: change(getattr(tensor, name)) for name in names}
    made = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return nn.Parameter(made, requires_grad=tensor.requires_grad)


class GatherHooks:
    """The hooks of one parameter. [Note: gather hooks]

    Attributes:
        name: of the parameter, for messages.
        kind: the class of its tensor.
        seen: the tensor that modules compute with, while the parameter is unsharded.
    """

    def __init__(self, name: str, tensor: torch.Tensor, policy: Any) -> None:
        """Refuse a `tensor` that cannot be rebuilt around other memory. `policy`: the user's, for hooks."""
        self.name = name
        self.seen: torch.Tensor | None = None
        self.kind = type(tensor)
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
        self._others: dict[str, torch.Tensor] = {}
        self._attribute = self._find_master(tensor)
        master = self.master_of(tensor)
        with torch.no_grad():
            made = self.around(master)
        if type(made) is not self.kind or getattr(made, self._attribute, None) is not master:
            raise UsageError(
                f"{self._what}: its __tensor_unflatten__ made a {type(made).__name__} of another tensor; expected one "
                f"of {self.kind.__name__} around the very tensor {self._attribute!r} that it was given"
            )

    @property
    def _what(self) -> str:
        return f"parameter {self.name!r} ({self.kind.__name__})"

    def _find_master(self, tensor: Any) -> str:
        try:
            names, self._context = tensor.__tensor_flatten__()
        except AttributeError:
            raise UsageError(
                f"{self._what} has {PRE}, but no __tensor_flatten__, so it is unknown which tensor is to be "
                "sharded. Define __tensor_flatten__ and __tensor_unflatten__, as traceable wrapper subclasses have them"
            ) from None
        inner = {name: getattr(tensor, name) for name in names}
        master = _master_in(tensor)
        rest = {name: each for name, each in inner.items() if name != master}
        if master is None or any(each.numel() != 1 for each in rest.values()):
            found = ", ".join(f"{name} {each.dtype} {tuple(each.shape)}" for name, each in inner.items())
            raise UsageError(
                f"{self._what} of {tensor.dtype} and shape {tuple(tensor.shape)} is made of {found}; expected one "
                "tensor of its own dtype and shape, which is sharded and trained, and scalars"
            )
        self._others = rest
        return master

    # -- the tensor at rest ------------------------------------------------------------------------------------------

    def around(self, master: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's class around `master`, the whole or some rows of it."""
        inner = {self._attribute: master, **self._others}
        make: Callable[..., torch.Tensor] = self.kind.__tensor_unflatten__  # type: ignore[attr-defined]
        return make(inner, self._context, master.shape, master.stride())

    def master_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The master of `tensor`; `tensor` itself if it is of another class."""
        return getattr(tensor, self._attribute) if isinstance(tensor, self.kind) else tensor

    def attach(self, module: nn.Module, mesh: Any) -> None:
        """Set the `module` that computes with the parameter, and the `mesh` whose last dimension shards it."""
        self._module = weakref.ref(module)
        self._mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherHooks:
        twin = memo[id(self)] = GatherHooks.__new__(GatherHooks)
        twin.__setstate__(self.__getstate__())
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
        if not inputs:
            self._refuse("no tensor", "one at least")
        return list(inputs), metadata

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
            if seen.shape != self._size and seen.shape[1:] == self._size[1:] and seen.shape[0] > self._size[0]:
                seen = seen.as_strided(self._size, self._stride, 0)  # without the padding rows
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
