"""The optimizer `"muon"`: torch's Muon for matrices, and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import flatfsdp
from flatfsdp.errors import ConfigValueError

DEFAULTS: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"}


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices, and AdamW for everything else: vectors, embeddings, output heads and convolutions
    (`matrices_of`).

    Updates of both are of about one size with `adjust_lr_fn="match_rms_adamw"`, the default here, so that they share a
    learning rate and a weight decay. Its param groups are those of Muon, then those of AdamW; its state has that of all
    parameters. Matrices are stepped on as wholes, by `flatfsdp.matrix_steps`.

    Attributes:
        matrix_steps: the steps of Muon; None without matrices. State dicts read it.

    Args:
        model: the sharded model.
        groups: param groups of its parameters, with settings that both optimizers have.
        lr, weight_decay: of both, where groups have none.
        only_muon: further arguments of Muon.

    Raises:
        ConfigValueError: flat parameters.
        UsageError: a parameter of which matrices cannot be put together; see `flatfsdp.matrix_steps`.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[dict[str, Any]], *, lr: float, weight_decay: float, **only_muon: Any
    ) -> None:
        if any(getattr(each, "_fsdp_flattened", False) for group in groups for each in group["params"]):
            raise ConfigValueError(
                "optimizer: muon steps on matrices, but the model has flat parameters. Set use_orig_params=True"
            )
        chosen = {id(each) for each in matrices_of(model)}
        split = [
            [{**group, "params": [p for p in group["params"] if (id(p) in chosen) is of_muon]} for group in groups]
            for of_muon in (True, False)
        ]
        of_muon, others = ([group for group in each if group["params"]] for each in split)
        common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._inner: list[tuple[torch.optim.Optimizer, int]] = []
        self.matrix_steps: flatfsdp.MatrixSteps | None = None
        if of_muon:
            self.matrix_steps = flatfsdp.matrix_steps(
                partial(torch.optim.Muon, **common, **DEFAULTS | only_muon), of_muon
            )
            self._inner.append((self.matrix_steps.optimizer, len(of_muon)))
        if others:
            adamw = torch.optim.AdamW(others, **common)
            flatfsdp.fuse_optimizer_steps(adamw)
            self._inner.append((adamw, len(others)))
        self._is_built = False
        super().__init__([group for inner, _ in self._inner for group in inner.param_groups], common)
        self._is_built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: which optimizer would step on it?"""
        if self._is_built:
            raise ConfigValueError(
                "optimizer: muon takes no more parameter groups. Let all parameters require gradients when it is made, "
                "and freeze them with requires_grad_(False)"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both optimizers. Collective, if there are matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for inner, count in self._inner:
            # Loading a state dict, or a user, may have put others in their place.
            inner.state, inner.param_groups = self.state, self.param_groups[first : first + count]
            inner.step()
            first += count
        return loss


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `model` that Muon steps on: of two dimensions, or of three (a matrix for each expert), unless
    they are those of an embedding, a convolution or an output head.

    Heads are what `get_output_embeddings()` of transformers' models returns; and outside of every `nn.ModuleList`, in
    which models keep their layers, matrices of the shape of an embedding, and the last one of the model.
    """
    named = flatfsdp.unsharded_shapes(model)
    shapes = {parameter: tuple(named[name]) for name, parameter in model.named_parameters()}
    modules = dict(model.named_modules(remove_duplicate=False))
    lists = tuple(f"{path}." for path, module in modules.items() if isinstance(module, nn.ModuleList))
    others: set[nn.Parameter] = set()
    outside: list[nn.Parameter] = []
    tables: set[tuple[int, ...]] = set()
    last: nn.Parameter | None = None
    for path, module in modules.items():
        if callable(get := getattr(type(module), "get_output_embeddings", None)):
            head = get(module)
            others.update(head.parameters() if isinstance(head, nn.Module) else ())
        for parameter in module._parameters.values():
            if parameter is None or len(shapes.get(parameter, ())) < 2:
                continue
            last = parameter
            if isinstance(module, nn.Embedding):
                tables.add(shapes[parameter])
            if isinstance(module, (nn.Embedding, nn.Conv1d, nn.ConvTranspose1d)):
                others.add(parameter)
            elif not path.startswith(lists):
                outside.append(parameter)
    others.update(each for each in outside if shapes[each] in tables or each is last)
    return [
        each for each, shape in shapes.items() if each.requires_grad and len(shape) in (2, 3) and each not in others
    ]
