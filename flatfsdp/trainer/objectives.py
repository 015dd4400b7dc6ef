"""Objectives: the weight of a batch, and the sum of its losses.

[Note: sums] An objective returns sums, not means, so that a step's loss is averaged over the tokens of all microbatches
on all ranks, however unevenly distributed. `weight` is their number, without running the model.

A batch is a mapping (passed to the model by keywords, except for "labels"), a pair (inputs, targets), or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp.errors import UsageError
from flatfsdp.trainer.model.hugging_face import classifies, is_causal, without_cache

IGNORED = -100


class Objective(Protocol):
    """The interface of objectives for the trainer.

    Optionally also `metrics(logits, batch)`: sums by name over the counted items, whose means evaluations report.
    """

    def weight(self, batch: Any) -> int:
        """The number of tokens, samples, ... that the loss of this batch sums over, without a forward."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The sum of their losses, an fp32 scalar, with its graph. Runs `model` once; collective if that is."""


@dataclass(frozen=True)
class CausalLM:
    """Cross entropy of each next token, summed over tokens that have a target.

    In a mapping, "input_ids" (batch, time) are the tokens and "labels", of the same shape, the targets before the shift
    by one; without labels, the targets are the tokens, except for those masked by "attention_mask". In a pair
    (tokens, targets), the targets are already shifted. The model returns logits (batch, time, vocabulary): a tensor,
    the first element of a tuple, or an object with `.logits` or ["logits"].

    Attributes:
        ignore_index: the target of tokens that do not count.
    """

    ignore_index: int = IGNORED
    has_perplexity: ClassVar[bool] = True  # evaluations report the exponential of its mean

    def weight(self, batch: Any) -> int:
        """The number of tokens that have a target."""
        return int((self.targets(batch) != self.ignore_index).sum())

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The sum of the tokens' cross entropies, in nats."""
        logits, targets = logits_of(call(model, batch)), self.targets(batch)
        check_fit(logits, targets, model)
        flat = logits.float().flatten(0, -2)
        return F.cross_entropy(flat, targets.to(flat.device).flatten(), ignore_index=self.ignore_index, reduction="sum")

    def metrics(self, logits: Tensor, batch: Any) -> dict[str, Tensor]:
        """Sums whose means evaluations report: "accuracy", tokens whose target has the highest logit."""
        return {"accuracy": (logits.argmax(-1) == self.targets(batch).to(logits.device)).sum()}

    def targets(self, batch: Any) -> Tensor:
        """The target of each position of the logits, or `ignore_index`; int64, of the shape of the tokens."""
        if not isinstance(batch, Mapping):
            return _pair(batch, "CausalLM")[1].long()
        if (labels := batch.get("labels")) is None:
            labels, mask = batch["input_ids"], batch.get("attention_mask")
            if mask is not None:
                labels = labels.long().where(mask.bool(), self.ignore_index)
        shifted: Tensor = F.pad(labels[..., 1:].long(), (0, 1), value=self.ignore_index)
        return shifted


@dataclass(frozen=True)
class Classification:
    """Cross entropy of classes, summed over labeled items.

    Labels are a mapping's "labels", or the second element of a pair: (batch, ...) int64, for logits
    (batch, classes, ...), which the model returns as described for `CausalLM`.

    Attributes:
        ignore_index: the label of items that do not count.
    """

    ignore_index: int = IGNORED

    def weight(self, batch: Any) -> int:
        """The number of labels."""
        return int((self._labels(batch) != self.ignore_index).sum())

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The sum of the items' cross entropies, in nats."""
        logits = logits_of(call(model, batch)).float()
        labels = self._labels(batch).to(logits.device)
        return F.cross_entropy(logits, labels, ignore_index=self.ignore_index, reduction="sum")

    def metrics(self, logits: Tensor, batch: Any) -> dict[str, Tensor]:
        """Sums whose means evaluations report: "accuracy", labels with the highest logit."""
        return {"accuracy": (logits.argmax(1) == self._labels(batch).to(logits.device)).sum()}

    def _labels(self, batch: Any) -> Tensor:
        labels: Tensor = batch["labels"] if isinstance(batch, Mapping) else _pair(batch, "Classification")[1]
        return labels


def counted_in(batch: Any) -> int:
    """The number of items that models average over: labels other than -100 if a mapping has integers under "labels";
    otherwise samples, the size of the first dimension of the first tensor."""
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            return int((labels != IGNORED).sum())
    tensors = batch.values() if isinstance(batch, Mapping) else [batch] if isinstance(batch, Tensor) else batch
    return next(int(each.shape[0]) for each in tensors if isinstance(each, Tensor) and each.dim())


@dataclass(frozen=True)
class FromOutput:
    """The loss that the model computes itself, a mean over `count(batch)` items.

    The model gets the whole batch, by keywords, as a tuple, or as it is. The loss is the tensor that the model returns,
    the first element of a tuple, or `.loss` or ["loss"] of an object.

    Attributes:
        count: returns the number of items that the model averages over.
    """

    count: Callable[[Any], int] = counted_in

    def weight(self, batch: Any) -> int:
        """The result of `count`."""
        return self.count(batch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The model's mean, times the weight. Raises UsageError where the weight is 0: the mean is undefined."""
        weight = self.weight(batch)
        output = call(model, batch, labels=True)
        mean = _found(output, "loss")
        if mean is None or mean.dim():
            raise UsageError(
                f"FromOutput: expected a scalar loss from {type(model).__name__} and found "
                f"{type(output).__name__}. Does the batch have labels? Otherwise choose CausalLM or Classification, or "
                "write an objective with weight(batch) and loss(model, batch)"
            )
        if not weight:
            raise UsageError(
                f"FromOutput: the batch has nothing to average over, so the mean loss of {type(model).__name__} is "
                "undefined. Drop such batches, or choose CausalLM or Classification, which sum"
            )
        return mean.float() * weight


# --- models and batches -----------------------------------------------------------------------------------------------


def check_fit(logits: Tensor, targets: Tensor, model: nn.Module) -> None:
    """Raise for logits, or hidden states before them, that do not have one row for each target."""
    if logits.shape[:-1] != targets.shape:
        raise UsageError(
            f"CausalLM: expected logits for each of the targets {tuple(targets.shape)} and found "
            f'{tuple(logits.shape)} of {type(model).__name__}. Targets must match the logits: the "labels" of a '
            "mapping are shifted by one, the targets of a pair (tokens, targets) are not"
        )


def objective_for(model: nn.Module) -> Objective:
    """The default objective of `model`: for a model of transformers, `CausalLM`, or `Classification` for one that sorts
    sequences into several classes; otherwise its own loss."""
    if is_causal(model):
        return CausalLM()
    return Classification() if classifies(model) else FromOutput()


def call(model: nn.Module, batch: Any, *, labels: bool = False) -> Any:
    """The output of `model` for a batch, which includes the labels only if `labels`."""
    if isinstance(batch, Mapping):
        given = {name: value for name, value in batch.items() if labels or name != "labels"}
        return model(**{**without_cache(model), **given})
    if isinstance(batch, (tuple, list)):
        return model(*batch) if labels else model(*batch[:-1])
    return model(batch)


def logits_of(output: Any) -> Tensor:
    """The logits in an output of a model.

    Raises:
        UsageError: there are none.
    """
    logits = _found(output, "logits")
    if logits is None:
        raise UsageError(
            f"expected logits and found {type(output).__name__}: the model must return them as a tensor, as the first "
            'of a tuple, or as .logits or ["logits"]'
        )
    return logits


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, modules are in eval mode, without random numbers and statistics; then each in its previous mode."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was


def _found(output: Any, name: str) -> Tensor | None:
    found = getattr(output, name, None)
    if found is None and isinstance(output, Mapping):
        found = output.get(name)
    if found is None:
        found = output[0] if isinstance(output, (tuple, list)) and output else output
    return found if isinstance(found, torch.Tensor) else None


def _pair(batch: Any, objective: str) -> tuple[Any, Tensor]:
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], torch.Tensor)):
        raise UsageError(
            f"{objective}: expected a mapping or a pair (inputs, targets), and found {type(batch).__name__}. Convert "
            "it with collate="
        )
    return batch[0], batch[1]
