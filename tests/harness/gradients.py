"""Gradients, of which some are None. That differs from zeros: an optimizer with momentum or weight decay changes a
parameter whose gradient is zeros, but not one without a gradient.

One process is the reference: a parameter has a gradient where any rank's loss reached it in any microbatch of a window.
Parameters that share one flat parameter (`use_orig_params=False`) have gradients together, with zeros where needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness import inspect

Gradients = dict[str, Tensor | None]
Names = dict[nn.Parameter, str]
Together = tuple[frozenset[str], ...]  # sets of parameters, by their plain names, that have gradients together

_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")  # added to names by wrappers


class RunsBackward(torch.autograd.Function):
    """The identity, whose backward runs a backward of another graph, as reentrant checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.run()
        return grad, None


def plain(name: str) -> str:
    """A parameter's or buffer's name without the prefixes of wrappers."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name


def gradients_of(model: nn.Module) -> Gradients:
    """A copy of the gradient of every trainable parameter, by its plain name."""
    return {plain(name): copied(param.grad) for name, param in model.named_parameters() if param.requires_grad}


def copied(grad: Tensor | None) -> Tensor | None:
    """A copy with separate memory."""
    return None if grad is None else grad.detach().clone()


def fill(model: nn.Module, sets: Together) -> None:
    """Add the zero gradients that parameters of a plain `model` have where gradients come together."""
    params = dict(model.named_parameters())
    for name, grad in filled(gradients_of(model), sets, lambda name: torch.zeros_like(params[name])).items():
        if params[name].grad is None:
            params[name].grad = grad


def averaged_over_ranks(grads: Sequence[Tensor | None]) -> Tensor | None:
    """The mean of the ranks' gradients of one parameter, summed in rank order: None if all are None."""
    there = [grad for grad in grads if grad is not None]
    if not there:
        return None
    total = reduce(torch.add, [torch.zeros_like(there[0]) if grad is None else grad for grad in grads])
    return total * (1 / len(grads))


def names_of(model: nn.Module) -> Names:
    """The plain names of the parameters: of a plain model, or of a wrapped one while it is unsharded."""
    return {param: plain(name) for name, param in model.named_parameters()}


def together(model: Any, names: Names) -> Together:
    """The sets of parameters of flatfsdp's wrapper that have gradients together."""
    found = [each for each in inspect.flat_params(model) if not each.has_orig_params]
    return tuple(frozenset(names[leaf] for leaf in each.originals if leaf in names) for each in found)


def together_in_torchs(model: Any) -> Together:
    """The same sets for torch's FSDP1: all parameters of a unit, even with original parameters."""
    sets = []
    for name, module in model.named_modules():
        if isinstance(module, type(model)) and module._handle is not None:
            fqns = module._handle.flat_param._fqns
            sets.append(frozenset(plain(f"{name}.{fqn}" if name else fqn) for fqn in fqns))
    return tuple(sets)


def filled(gradients: Gradients, sets: Together, zeros: Callable[[str], Tensor]) -> Gradients:
    """`gradients`, where missing ones of a set with other gradients are `zeros(name)`."""
    result = dict(gradients)
    for names in sets:
        if any(gradients.get(name) is not None for name in names):
            result |= {name: zeros(name) for name in names if name in gradients and gradients[name] is None}
    return result


def unlike(found: Tensor | None, expected: Tensor | None, *, rtol: float = 0.0, atol: float = 0.0) -> str:
    """A description of the difference beyond the bounds; "" without one."""
    if found is None and expected is not None and not expected.numel():
        return ""  # no rank holds a piece of it
    if found is None or expected is None:
        return "" if found is expected else f"{_in_words(found)}, expected {_in_words(expected)}"
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if torch.allclose(found, expected, rtol=rtol, atol=atol):
        return ""
    return f"differs by {(found - expected).abs().max():.3g}"


def unlike_but_for_rounding(found: Tensor | None, expected: Tensor | None, *, rtol: float, atol: float) -> str:
    """The same, where rounding of float32 reaches small elements from the largest: random models are deep, and some
    recursive. `atol` is a multiple of the largest one, if that exceeds 1."""
    largest = 1.0 if expected is None or not expected.numel() else max(1.0, float(expected.abs().max()))
    return unlike(found, expected, rtol=rtol, atol=atol * largest)


def _in_words(grad: Tensor | None) -> str:
    if grad is None:
        return "None"
    return f"a gradient of norm {grad.double().norm():.3g}" if grad.count_nonzero() else "zeros"
