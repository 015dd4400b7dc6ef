"""The inputs of one forward, cast or moved to another device where that is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from ..base._functorch import inside
from ..base.nested_tensors import map_tensors, survey
from .unit import Unit

_VERSION, _REQUIRES_GRAD = attrgetter("_version"), attrgetter("requires_grad")

_PLAIN = {torch.Tensor}

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Given:
    """The inputs of one call.

    Attributes:
        args, kwargs: as the forward gets them.
        is_cast: whether some tensors in them are not the caller's.
    """

    # Assigned after the construction: a constructor would be one more call in each forward of a unit.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_cast = False
    # The tensors, and the containers except tuples by their ids, when first asked for.
    _found: tuple[list[torch.Tensor], dict[int, Any]] | None = None
    _known: Sequence[torch.Tensor] = ()  # all, and what the forward gets for them
    _versions: Sequence[int] = ()  # of the originals

    def __contains__(self, key: object) -> bool:
        """Whether `key` is the id of a container, which remains the same object if the forward returns it."""
        return key in self._survey()[1]

    def _survey(self) -> tuple[list[torch.Tensor], dict[int, Any]]:
        if self._found is None:
            self._found = survey((*self.args, *self.kwargs.values()) if self.kwargs else self.args)
        return self._found

    @property
    def dtype(self) -> torch.dtype | None:
        """That of the first floating-point tensor."""
        return next((tensor.dtype for tensor in self._survey()[0] if tensor.is_floating_point()), None)

    def substitute(self, *, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Give the forward tensors on `device`, and floating-point ones in `dtype` (None: as they are). Differentiable.
        The caller may overwrite the originals at once, even pinned ones."""

        def needs(tensor: torch.Tensor) -> bool:
            return (device is not None and tensor.device != device) or (
                dtype is not None and tensor.dtype != dtype and tensor.is_floating_point()
            )

        def make(tensor: torch.Tensor) -> torch.Tensor:
            if not needs(tensor):
                return tensor
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():  # what is made inside has no version, to show writes
                    return tensor.to(device or tensor.device, target)
            return inside(tensor.to, device or tensor.device, target)

        if any([needs(tensor) for tensor in self._survey()[0]]):
            self.is_cast = True
            self.args, self.kwargs = self._cast(make)

    def _cast(self, make: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """The inputs with what `make` returns for each tensor, in copies of the containers."""
        return map_tensors(make, self.args), map_tensors(make, self.kwargs)

    def ended(self, unit: Unit | None) -> None:
        """The forward of `unit` has ended; None: it failed, or makes no graph."""

    def trained(self) -> list[torch.Tensor]:
        """The tensors that require a gradient, as the forward gets them."""
        if self._found is None:
            values = (*self.args, *self.kwargs.values()) if self.kwargs else self.args
            # Plain tensors, as most units have, are found without a call.
            self._found = (list(values), {}) if set(map(type, values)) == _PLAIN else survey(values)
        self._known = originals = tensors = self._found[0]
        if self.is_cast:
            tensors = survey((*self.args, *self.kwargs.values()))[0]
            self._known = originals + tensors
        try:
            self._versions = list(map(_VERSION, originals))
        except RuntimeError:  # some were made in inference mode
            self._versions = []
        return list(filter(_REQUIRES_GRAD, tensors))

    def made(self) -> list[torch.Tensor]:
        """The tensors with a graph that the forward has written to the inputs: more outputs. Precondition: `trained`
        was called before it."""
        originals, containers = self._found or self._survey()
        found: list[torch.Tensor] = []
        if self._versions and (versions := list(map(_VERSION, originals))) != self._versions:
            found = [each for each, a, b in zip(originals, versions, self._versions, strict=True) if a != b]
        if containers:
            known = set(map(id, self._known))
            found += [tensor for tensor in survey(containers.values())[0] if id(tensor) not in known]
        return [tensor for tensor in found if tensor.grad_fn is not None] if found else found
