"""Objectives: sums and weights against torch's own losses; and the head fused with its loss, under sharding."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import FlatFSDPWarning, UsageError
from flatfsdp.trainer.arguments import FSDPArguments
from flatfsdp.trainer.fused_loss import fused, linear_cross_entropy
from flatfsdp.trainer.model.sharding import shard
from flatfsdp.trainer.objectives import CausalLM, Classification, FromOutput, Objective, objective_for
from tests.conftest import Run
from tests.harness import memory
from tests.harness.fake import fake_world
from tests.harness.models import Transformer
from tests.harness.thorough import spread

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
TOKENS = torch.arange(12).view(2, 6) * 7 % 19
EXAMPLE = TOKENS[:1], TOKENS[:1]
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])


class Answering(nn.Module):
    """A transformer with the usual arguments and outputs of models."""

    def __init__(self, form: str = "object") -> None:
        super().__init__()
        self.inside = transformer()
        self.form = form

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits = self.inside(input_ids)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {
            "object": SimpleNamespace(logits=logits, loss=loss),
            "mapping": {"logits": logits, "loss": loss},
            "tuple": (logits if loss is None else loss, None),
            "tensor": logits if loss is None else loss,
        }[self.form]


def transformer(*, tied: bool = False) -> Transformer:
    torch.manual_seed(3)
    return Transformer(tied=tied)


FORMS = ("object", "mapping", "tuple", "tensor")

# --- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_predicted_from_those_before_them(form: str) -> None:
    model, objective = Answering(form), CausalLM()
    expected = F.cross_entropy(model.inside(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum")
    found = objective.loss(model, {"input_ids": TOKENS})
    assert found.dtype == torch.float32 and found.shape == ()
    torch.testing.assert_close(found, expected)
    assert objective.weight({"input_ids": TOKENS}) == 10


def test_what_is_masked_or_has_no_label_does_not_count() -> None:
    model, objective = Answering(), CausalLM()
    labels = TOKENS.masked_fill(MASK == 0, -100)
    labeled = {"input_ids": TOKENS, "attention_mask": MASK, "labels": labels}
    masked = {"input_ids": TOKENS, "attention_mask": MASK}
    each = F.cross_entropy(model.inside(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="none")
    for batch in (labeled, masked):
        assert objective.weight(batch) == 8
        torch.testing.assert_close(objective.loss(model, batch), (each * MASK[:, 1:].flatten()).sum())


def test_nothing_to_predict_is_a_zero_with_gradients() -> None:
    model, batch = Answering(), {"input_ids": TOKENS, "labels": torch.full_like(TOKENS, -100)}
    assert CausalLM().weight(batch) == 0
    loss = CausalLM().loss(model, batch)
    loss.backward()
    assert loss.item() == 0 and all(not parameter.grad.any() for parameter in model.parameters())


def test_pairs_have_their_targets_in_place() -> None:
    model, batch = transformer(), (TOKENS, TOKENS.roll(-1, 1))
    expected = F.cross_entropy(model(TOKENS).flatten(0, 1), batch[1].flatten(), reduction="sum")
    torch.testing.assert_close(CausalLM().loss(model, batch), expected)
    assert CausalLM().weight(batch) == 12
    assert CausalLM(ignore_index=0).weight(batch) == 11


def test_tokens_of_bytes_are_targets() -> None:
    model, narrow = Answering(), TOKENS.to(torch.uint8)
    batch = {"input_ids": TOKENS, "attention_mask": MASK}
    assert CausalLM().weight({**batch, "labels": narrow}) == 10
    assert CausalLM().weight({"input_ids": narrow, "attention_mask": MASK}) == 8
    expected = CausalLM().loss(model, {"input_ids": TOKENS})
    torch.testing.assert_close(CausalLM().loss(model, {**batch, "labels": narrow}), expected)


class Speaking(Transformer):
    """Computes something for itself after its logits."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.value = nn.Linear(self.vocabulary, 1)

    def forward(self, tokens: Tensor) -> Any:
        logits = super().forward(tokens)
        return logits, self.value(torch.ones(self.vocabulary))


def test_a_head_need_not_come_last() -> None:
    with fake_world(1), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = FullyShardedDataParallel(Speaking())
        expected = CausalLM().loss(model, (TOKENS, TOKENS))
        torch.testing.assert_close(fused(CausalLM(), model, example=EXAMPLE).loss(model, (TOKENS, TOKENS)), expected)


def test_classes_are_summed_over_what_has_a_label() -> None:
    model, inputs = nn.Linear(3, 4), torch.randn(5, 3)
    labels = torch.tensor([0, 3, -100, 1, 2])
    expected = sum(F.cross_entropy(model(inputs)[i], labels[i]) for i in (0, 1, 3, 4))
    torch.testing.assert_close(Classification().loss(model, (inputs, labels)), expected)
    assert Classification().weight((inputs, labels)) == 4
    assert Classification().weight({"input": inputs, "labels": labels}) == 4
    torch.testing.assert_close(Classification().loss(model, {"input": inputs, "labels": labels}), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_models_own_loss_counts_for_all_that_it_averages(form: str) -> None:
    model, batch = Answering(form), {"input_ids": TOKENS, "labels": TOKENS}
    mean = F.cross_entropy(model.inside(TOKENS).flatten(0, 1), TOKENS.flatten())
    torch.testing.assert_close(FromOutput().loss(model, batch), 12 * mean)
    torch.testing.assert_close(FromOutput(lambda batch: 2).loss(model, batch), 2 * mean)


def test_what_models_average_over_is_counted() -> None:
    weight = FromOutput().weight
    assert weight({"input_ids": TOKENS, "labels": TOKENS.masked_fill(MASK == 0, -100)}) == 10
    assert weight({"input_ids": TOKENS, "labels": torch.tensor([1, -100])}) == 1
    assert weight({"features": torch.ones(2, 3), "labels": torch.ones(2, 5)}) == 2
    assert weight((torch.ones(3, 1), torch.ones(3))) == weight(torch.ones(3)) == 3


def test_an_objective_is_chosen_for_a_model() -> None:
    class TinyForCausalLM(Answering):
        def save_pretrained(self) -> None: ...

    assert objective_for(TinyForCausalLM()) == CausalLM()
    assert objective_for(Answering()) == objective_for(nn.Linear(2, 2)) == FromOutput()


@pytest.mark.parametrize(
    ("objective", "batch", "words"),
    [
        (CausalLM(), (TOKENS, TOKENS[:, 1:]), r"logits for each of the targets \(2, 5\) and found \(2, 6, 19\)"),
        (CausalLM(), TOKENS, r"CausalLM: expected a mapping or a pair \(inputs, targets\), and found Tensor"),
        (FromOutput(), (TOKENS,), "expected a scalar loss from Transformer and found Tensor"),
        (FromOutput(lambda batch: 0), {"tokens": TOKENS}, "FromOutput: expected a scalar loss"),
    ],
)
def test_what_does_not_fit_is_explained(objective: Any, batch: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        objective.loss(transformer(), batch)
    with pytest.raises(UsageError, match="has nothing to average over"):
        FromOutput(lambda batch: 0).loss(Answering(), {"input_ids": TOKENS, "labels": TOKENS})


def test_a_model_without_logits_is_explained() -> None:
    with pytest.raises(UsageError, match="expected logits and found list"):
        CausalLM().loss(Model(lambda tokens: []), (TOKENS, TOKENS))


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


# --- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, 1, 4, 7, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunks_add_up_to_the_whole(rows: int | None, with_bias: bool) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(3, 5, 6), torch.randn(11, 6), torch.randn(11)]
    targets = torch.randint(11, (3, 5)).index_fill(1, torch.tensor([2]), -100)

    def run(function: Callable[..., Tensor]) -> list[Tensor | None]:
        hidden, weight, bias = (each.clone().requires_grad_() for each in leaves)
        loss = function(hidden, weight, bias if with_bias else None)
        (loss * 0.25).backward()
        return [loss.detach(), hidden.grad, weight.grad, bias.grad]

    def whole(*given: Any) -> Tensor:
        return F.cross_entropy(F.linear(*given).flatten(0, 1), targets.flatten(), reduction="sum")

    found = run(lambda *given: linear_cross_entropy(*given, targets, rows=rows))
    torch.testing.assert_close(found, run(whole), rtol=1e-6, atol=1e-6)


def test_gradients_of_low_precision_add_up_in_full() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 8).bfloat16(), torch.randn(5, 8).bfloat16().requires_grad_()
    linear_cross_entropy(hidden, weight, None, targets := torch.randint(5, (512,)), rows=1).backward()
    exact = weight.detach().float().requires_grad_()
    F.cross_entropy(F.linear(hidden.float(), exact), targets, reduction="sum").backward()
    assert weight.grad is not None and exact.grad is not None and weight.grad.dtype == torch.bfloat16
    assert (weight.grad - exact.grad).norm() < 0.01 * exact.grad.norm()


@torch.no_grad()
def test_an_evaluation_makes_no_gradients() -> None:
    hidden, weight = torch.ones(64, 32, requires_grad=True), torch.ones(512, 32, requires_grad=True)
    peak, _ = memory.peak_bytes(lambda: linear_cross_entropy(hidden, weight, None, torch.arange(64), rows=1))
    assert 0 < peak < 512 * 32 * 4


def test_a_second_backward_fails_instead_of_being_wrong() -> None:
    weight = torch.randn(5, 4, requires_grad=True)
    loss = linear_cross_entropy(torch.randn(3, 4), weight, None, torch.arange(3))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- fused ------------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "flat parameters": {"use_orig_params": False, "strategy": "shard_grad_op"},
    "a head of its own": {"units": ["blocks", "head"], "activation_checkpointing": True},
    "whole": {"strategy": "no_shard"},
    "freed after forward": {"reshard_after_forward": True},
}


@pytest.mark.parametrize(("tied", "setting"), spread([False, True], SETTINGS))
def test_fused_is_what_it_is_unfused(setting: str, tied: bool, pool2: Run) -> None:
    assert not [line for lines in pool2(compared, SETTINGS[setting], tied) for line in lines]


def compared(rank: int, world: int, given: dict[str, Any], tied: bool) -> list[str]:
    return list(_compared(rank, FSDPArguments(**given), tied))


def _compared(rank: int, given: FSDPArguments, tied: bool) -> Iterator[str]:
    """Losses and gradients of two microbatches, the first without communication, one with tokens that do not count."""
    plain = CausalLM()
    models = [shard(transformer(tied=tied), given, device=CPU) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objectives: list[Objective] = [plain, fused(plain, models[1], example=EXAMPLE, rows=5)]
    batches = [(TOKENS.roll(rank, 1), TOKENS.roll(3, 1).masked_fill(mask, -100)) for mask in (MASK < 1, MASK > 0)]
    results = []
    for model, objective in zip(models, objectives, strict=True):
        with model.no_sync():
            first = objective.loss(model, batches[0])
            (first / 3).backward()
        second = objective.loss(model, batches[1])
        (second / 3).backward()
        assert [objective.weight(batch) for batch in batches] == [10, 2]
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            gradients = {name: each.grad for name, each in model.named_parameters()}
        with torch.no_grad():
            results.append({"first": first, "second": second, "third": objective.loss(model, batches[0]), **gradients})
    for name, expected in results[0].items():
        found = results[1][name]
        if not torch.allclose(found, expected, rtol=1e-6, atol=1e-6):
            yield f"rank {rank}: {name} is off by {(found - expected).abs().max()}"


def test_low_precision_is_that_of_the_model() -> None:
    with fake_world(1):
        given = FSDPArguments(param_dtype="bf16", reduce_dtype="fp32")
        models = [shard(transformer(), given, device=CPU) for _ in range(2)]
        objectives = [CausalLM(), fused(CausalLM(), models[1], example=EXAMPLE)]
        losses = [each.loss(model, (TOKENS, TOKENS)) for each, model in zip(objectives, models, strict=True)]
        for loss in losses:
            loss.backward()
        assert losses[1].dtype == torch.float32
        torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
        for found, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert found.grad is not None and expected.grad is not None
            torch.testing.assert_close(found.grad, expected.grad, rtol=0.02, atol=0.02)


def test_a_frozen_head_gets_no_gradient() -> None:
    model = transformer()
    model.head.requires_grad_(False)
    with fake_world(1):
        sharded = shard(model, FSDPArguments(), device=CPU)
        fused(CausalLM(), sharded, example=EXAMPLE).loss(sharded, (TOKENS, TOKENS)).backward()
        assert model.head.weight.grad is None and model.norm.weight.grad is not None


class Wide(nn.Module):
    """A model that is all vocabulary."""

    vocabulary, width, tokens = 4096, 16, 512

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, self.width)
        self.head = nn.Linear(self.width, self.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def test_logits_are_never_whole_in_memory() -> None:
    logits, weights = Wide.tokens * Wide.vocabulary * 4, 2 * Wide.vocabulary * Wide.width * 4
    batch = [torch.arange(Wide.tokens)] * 2
    peaks = []
    with fake_world(1):
        for fuse in (False, True):
            with memory.Recording() as recording:
                model = shard(Wide(), FSDPArguments(units="none"), device=CPU)
                objective: Objective = fused(CausalLM(), model, rows=32) if fuse else CausalLM()
                for step in range(2):
                    recording.mark(f"step {step}")
                    objective.loss(model, batch).backward()
                recording.mark("end")
            usage = recording.between("step 1", "end")
            peaks.append(usage.peak - usage.start)
    assert peaks[0] >= 2 * logits, "or the measurement is wrong"
    assert peaks[1] <= logits / 2 + 2 * weights, "chunks of a sixteenth, a few of them at a time, and gradients"


def test_the_objective_does_not_keep_its_model_nor_take_another() -> None:
    with fake_world(1):
        model, other = (shard(transformer(), FSDPArguments(), device=CPU) for _ in range(2))
        objective = fused(CausalLM(), model, example=EXAMPLE)
        with pytest.raises(UsageError, match="this objective is for another model"):
            objective.loss(other, (TOKENS, TOKENS))
        assert model.training and all(module.training for module in model.modules())
        head = weakref.ref(model.head.weight)
        gc.disable()
        try:
            del model
            assert head() is None
        finally:
            gc.enable()


class Ending(Transformer):
    """A transformer that does something with its logits."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__(tied=False)
        nn.init.zeros_(self.head.weight)  # logits that no cap changes
        self.end = end

    def forward(self, tokens: Tensor) -> Tensor:
        return self.end(super().forward(tokens))


def twice() -> nn.Module:
    model = transformer()
    ending = Model(
        lambda tokens: model.head(model.norm(model.embedding(tokens)) + model.head(model.position[:2])[0, 0])
    )
    ending.inside = model
    return ending


CHANGED = "the output of 'head' is changed"
UNFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "capped": (lambda: Ending(lambda logits: 30 * torch.tanh(logits / 30)), CHANGED),
    "scaled": (lambda: Ending(lambda logits: logits * 0.5), CHANGED),
    "cast": (lambda: Ending(lambda logits: logits.bfloat16()), CHANGED),
    "reshaped": (
        lambda: Ending(lambda logits: logits.view(*logits.shape[:2], 19)),
        "a trial forward failed .* RuntimeError: ",
    ),
    "no linear layer": (lambda: nn.Sequential(nn.Embedding(19, 19)), "no nn.Linear of .* the shape of its logits"),
    "called twice": (twice, "'inside.head' is called more than once"),
    "not for two tokens": (transformer, r"a trial forward failed \(another example= may help\): RuntimeError"),
}


@pytest.mark.parametrize("how", UNFUSED)
def test_a_model_whose_head_cannot_be_fused_reports_why_and_trains_on(how: str) -> None:
    build, words = UNFUSED[how]
    example = None if how == "not for two tokens" else EXAMPLE
    with fake_world(1):
        model = FullyShardedDataParallel(build())
        objective = CausalLM()
        with pytest.warns(FlatFSDPWarning, match=f"fused_loss has no effect, and the full logits .*{words}"):
            assert fused(objective, model, example=example) is objective
        objective.loss(model, (TOKENS, TOKENS)).backward()


def test_only_causal_language_models_are_fused() -> None:
    with fake_world(1), pytest.warns(FlatFSDPWarning, match="a Classification is not known to be"):
        model = FullyShardedDataParallel(nn.Linear(2, 2))
        assert fused(Classification(), model) == Classification()


def test_a_head_inside_of_what_is_computed_again_is_not_fused() -> None:
    model = nn.Sequential(nn.Embedding(19, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 19)))
    with fake_world(1):
        given = FSDPArguments(units=["1.0", "Sequential"], activation_checkpointing=True)
        sharded = shard(model, given, device=CPU)
        with pytest.warns(FlatFSDPWarning, match=r"'1\.1' is inside '1', which is recomputed"):
            fused(CausalLM(), sharded)
