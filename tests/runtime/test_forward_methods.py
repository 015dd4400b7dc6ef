"""Methods that gather like `forward` does, as lists of events; and the behavior of unregistered ones."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import FullyShardedDataParallel, register_fsdp_forward_method
from flatfsdp.errors import ConfigTypeError, ConfigValueError, UsageError
from tests.comm.test_communication import story
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

WIDTH = 6


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()

    def project(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Not the forward."""
        return self.layer(x) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.encoder = Encoder()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(self.embedding(tokens)) * self.scale

    def score(self, tokens: Tensor) -> Tensor:
        return self.encoder.project(self.embedding(tokens), scale=2.0) * self.scale

    @torch.no_grad()
    def generate(self, tokens: Tensor) -> Tensor:
        for _ in range(2):
            tokens = self(tokens).argmax(-1) % 9
        return tokens

    def encode(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.encoder(x)
        return encoded

    def scaled(self, x: Tensor) -> Tensor:
        return x @ torch.outer(self.scale, self.scale)

    def stream(self, tokens: Tensor) -> Iterator[Tensor]:
        yield self(tokens)

    async def serve(self, tokens: Tensor) -> Tensor:
        return self(tokens)

    def broken(self) -> None:
        raise RuntimeError("no model of this name")

    def length(self) -> int:
        return len(self.scale)


TOKENS = torch.arange(4)


def wrapped() -> Any:
    return FullyShardedDataParallel(Model(), auto_wrap_policy={Encoder}, use_orig_params=True)


def registered() -> Any:
    model = wrapped()
    register_fsdp_forward_method(model, "score")
    register_fsdp_forward_method(model, "generate")
    register_fsdp_forward_method(model.encoder, "project")
    return model


KINDS = ("gather", "forward", "reshard", "backward", "reduce", "end")


def test_a_registered_method_is_gathered_for_and_differentiated_as_forward_is() -> None:
    with fake_world(4):
        model = registered()
        usual = story(model, lambda: model(TOKENS).sum().backward(), *KINDS)
        assert story(model, lambda: model.score(TOKENS).sum().backward(), *KINDS) == usual
        assert all(p.grad is not None for p in model.parameters() if p.numel())


def test_a_method_without_gradients_leaves_nothing_behind() -> None:
    with fake_world(4):
        model = registered()
        assert story(model, lambda: model.generate(TOKENS), *KINDS) == (
            "gather:root forward:root gather:encoder forward:encoder reshard:encoder gather:encoder forward:encoder "
            "reshard:encoder reshard:root"
        )
        model(TOKENS).sum().backward()


def test_the_method_looks_as_it_did() -> None:
    with fake_world(4):
        model = registered()
        for method, inside in ((model.encoder.project, Encoder.project), (model.length, Model.length)):
            expected = inspect.signature(inside.__get__(object()))
            assert (inspect.signature(method), method.__doc__) == (expected, inside.__doc__)


def test_copies_have_registered_methods_of_their_own() -> None:
    with fake_world(4), torch.no_grad():
        model = registered()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert story(model, lambda other=other: other.score(TOKENS), *KINDS) == ""
            assert story(other, lambda other=other: other.score(TOKENS), "gather") == "gather:root gather:encoder"


def test_registering_twice_and_without_fsdp_is_no_matter() -> None:
    with fake_world(4):
        model = registered()
        register_fsdp_forward_method(model, "score")
        assert story(model, lambda: model.score(TOKENS), "gather") == "gather:root gather:encoder"
    plain = Model()
    register_fsdp_forward_method(plain, "score")
    assert "score" not in vars(plain)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: model.score(TOKENS), "score() used parameter 'embedding.weight' of unit <root>"),
        (lambda model: model.generate(TOKENS), "generate() used parameter 'embedding.weight' of unit <root>"),
        (lambda model: model.encoder.project(torch.ones(2, WIDTH)), "parameter 'layer.weight' of unit 'encoder'"),
        (lambda model: model.scaled(torch.ones(2, WIDTH)), "scaled() used parameter 'scale' of unit <root>"),
    ],
)
def test_an_unregistered_method_that_meets_shards_reports_what_to_do(call: Any, words: str) -> None:
    with fake_world(4, rank=3):
        model = wrapped()
        with torch.no_grad():
            model(TOKENS)
        with pytest.raises(UsageError) as caught:
            call(model)
        assert words in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)
        assert "flatfsdp.register_fsdp_forward_method(model, '" in str(caught.value)


def test_other_failures_stay_what_they_are() -> None:
    with fake_world(4):
        model = registered()
        with pytest.raises(RuntimeError, match=r"^no model of this name$"):
            model.broken()
        model(TOKENS)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model.encoder.project(torch.ones(2, WIDTH + 1))
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"^mat1 and mat2"):
            model.encode(torch.ones(2, WIDTH + 1))  # in a unit that runs
        assert model.length() <= WIDTH


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        (3, ConfigTypeError, "method_name: got 3 (int). Accepted: the name of a method"),
        ("scores", ConfigValueError, "method_name: got 'scores', but Model has no such method"),
        ("scale", ConfigValueError, "method_name: got 'scale', but Model has no such method"),
        ("forward", ConfigValueError, "which FullyShardedDataParallel defines itself"),
        ("no_sync", ConfigValueError, "method_name: got 'no_sync', but Model has no such method"),
        ("stream", ConfigValueError, "'stream', a generator or a coroutine of Model"),
        ("serve", ConfigValueError, "'serve', a generator or a coroutine of Model"),
    ],
)
def test_what_cannot_be_registered(name: Any, error: type[Exception], words: str) -> None:
    with fake_world(4), pytest.raises(error) as caught:
        register_fsdp_forward_method(wrapped(), name)
    assert words in str(caught.value) and "register_fsdp_forward_method: " in str(caught.value)


def test_only_modules_have_methods_to_register() -> None:
    with pytest.raises(ConfigTypeError, match=r"module: got 'model' .*Accepted: a module"):
        register_fsdp_forward_method("model", "score")  # type: ignore[arg-type]


class Recomputing(Model):
    """Its encoder is recomputed inside the backward where `forward` calls it, and not where `encode` does."""

    def forward(self, x: Tensor) -> Tensor:
        encoded: Tensor = checkpoint(self.encoder, x * self.scale, use_reentrant=True)
        return encoded


def test_a_method_reads_parameters_that_a_recomputed_forward_read_before_it() -> None:
    with fake_world(2):
        model = FullyShardedDataParallel(Recomputing(), auto_wrap_policy={Encoder}, use_orig_params=True)
        register_fsdp_forward_method(model, "encode")
        for _ in range(2):
            x = model.encode(torch.ones(2, WIDTH))
            loss = model(x).sum()
            assert story(model, loss.backward, "gather") == "gather:encoder"  # for both
