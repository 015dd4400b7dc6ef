"""State dicts of models: their contents, and that a model which loads them is the same."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedStateDictConfig,
    StateDictType,
)
from flatfsdp.engine.state.owned_interval import OwnedInterval
from flatfsdp.errors import FlatFSDPError
from tests.conftest import Run
from tests.harness.corners import HYBRID_HALVES, Net, Setting, chosen, data, joined, loss_of, seeded
from tests.harness.meshes import replicas_of_shards
from tests.harness.models import CASES, WIDTH, Feedforward
from tests.harness.thorough import some, spread

pytestmark = pytest.mark.distributed

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
as_type = FullyShardedDataParallel.state_dict_type
SETTINGS = tuple(Setting(s, orig) for s in ("FULL_SHARD", "NO_SHARD") for orig in (True, False))


def settings(world: int, name: str) -> tuple[Setting, ...]:
    """Both strategies, and both of everything else, for a case of that name."""
    return chosen(partial(settings, name=name), HYBRID_HALVES if world == 4 else (SETTINGS[::3], SETTINGS[1:3]))


def unlike(found: Any, expected: Any) -> list[str]:
    """Names whose tensors differ, bit by bit, or that only one has; "order" where only their order differs."""
    if list(found) != list(expected):
        return sorted(set(found) ^ set(expected)) or ["order"]
    return [
        name
        for name, value in expected.items()
        if found[name].dtype != value.dtype or found[name].shape != value.shape or not torch.equal(found[name], value)
    ]


def other(build: Callable[[], nn.Module]) -> nn.Module:
    """The module with other values."""
    model = build()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.full_like(tensor, 3))
    return model


# --- every model, every type ------------------------------------------------------------------------------------------


def whole(rank: int, world: int, name: str) -> list[str]:
    """Full dicts equal those of the plain model, and are loaded from and into plain and wrapped models."""
    case = CASES[name]
    lines = []
    for setting in settings(world, name):
        plain = case.build()
        expected = plain.state_dict()
        model = setting.wrap(case.build(), case.units)
        found = model.state_dict()
        ordered = found if setting.orig else {key: found[key] for key in expected if key in found}
        lines += [f"{setting}: {line}" for line in unlike(ordered, expected)]
        if len(found) != len(expected):
            lines.append(f"{setting}: more keys")
        again = setting.wrap(other(case.build), case.units)
        again.load_state_dict(expected)
        lines += [f"{setting}, loaded: {line}" for line in unlike(again.state_dict(), found)]
        plain = other(case.build)
        plain.load_state_dict(found)
        lines += [f"{setting}, plain: {line}" for line in unlike(plain.state_dict(), expected)]
    return lines


def pieces(rank: int, world: int, name: str) -> list[str]:
    """Sharded and local dicts describe each rank's elements, without communication, and load as they are."""
    case = CASES[name]
    lines = []
    for number, setting in enumerate(settings(world, name)):
        expected = case.build().state_dict()
        kinds = (SHARDED,) if setting.rows else (SHARDED, LOCAL)  # local dicts are of one flat parameter
        for kind in some(kinds, len(kinds), number):
            model = setting.wrap(case.build(), case.units)
            again = setting.wrap(other(case.build), case.units)
            with as_type(model, kind), as_type(again, kind):
                state = model.state_dict()
                for key, value in state.items() if kind is SHARDED else ():
                    if isinstance(value, OwnedInterval):
                        filled = value.with_local(torch.zeros_like(value.local))
                        filled.copy_(expected[key])
                        if not torch.equal(filled.local, value.local):
                            lines.append(f"{setting}: {key} differs")
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                again.load_state_dict(torch.load(file, weights_only=True))
            lines += [f"{setting}, {kind.name}: {line}" for line in unlike(again.state_dict(), model.state_dict())]
    return lines


# Worlds in an order that has no model on one rank in both tests.
@pytest.mark.parametrize(("world", "name"), spread([3, 2, 4, 1], sorted(CASES)))
def test_whole_state_dicts_are_those_of_the_plain_model(run: Run, world: int, name: str) -> None:
    assert not joined(run(world, whole, name))


@pytest.mark.parametrize(("world", "name"), spread([4, 3, 1], sorted(CASES)))
def test_a_rank_saves_and_loads_what_it_owns(run: Run, world: int, name: str) -> None:
    assert not joined(run(world, pieces, name))


# --- other operations of users ----------------------------------------------------------------------------------------


def wrapped(rank: int, *, orig: bool = True, **more: Any) -> Any:
    return Setting("FULL_SHARD", orig).wrap(seeded(Net), (Feedforward,), **more)


def at_any_time(rank: int, world: int) -> list[str]:
    """After a forward, between microbatches and after a step: values are those of the shards, training goes on
    unaffected, and returned values stay as they were."""
    lines = []
    for number, kind in enumerate((FULL, SHARDED, LOCAL)):
        for orig in some((True, False), 2, number):
            with_dicts, without = wrapped(rank, orig=orig), wrapped(rank, orig=orig)
            kept = []
            for model in (with_dicts, without):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

                def save(
                    model: Any = model, saves: bool = model is with_dicts, kind: Any = kind, kept: Any = kept
                ) -> None:
                    if saves:
                        with as_type(model, kind):
                            state = model.state_dict()
                        kept.append((state, {k: (getattr(v, "local", v)).clone() for k, v in state.items()}))

                for step in range(2):
                    optimizer.zero_grad()
                    loss = loss_of(model(data(rank, 2 * step)))
                    save()
                    loss.backward()
                    with model.no_sync():
                        loss_of(model(data(rank, 2 * step))).backward()
                        save()
                    save()
                    loss_of(model(data(rank, 2 * step + 1))).backward()
                    save()
                    optimizer.step()
                    save()
            lines += [f"{orig} {kind.name}: {line}" for line in unlike(with_dicts.state_dict(), without.state_dict())]
            for number, (state, then) in enumerate(kept):
                now = {key: getattr(value, "local", value) for key, value in state.items()}
                lines += [f"{orig} {kind.name}, dict {number} changed: {line}" for line in unlike(now, then)]
                if number % 5 and unlike(then, kept[number - 1][1]) and number % 5 != 4:
                    lines.append(f"{orig} {kind.name}: dict {number} is not that before it")
    return lines


def test_state_dicts_at_any_time(pool2: Run) -> None:
    assert not joined(pool2(at_any_time))


def rank0_only(rank: int, world: int, hybrid: bool) -> list[str]:
    """One rank has it all, in host memory of its own; loading distributes it, for any argument of the others."""
    lines = []
    for orig in (True, False):
        setting = Setting("HYBRID_SHARD" if hybrid else "FULL_SHARD", orig)
        build = lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), seeded(Net))  # noqa: E731
        model = setting.wrap(seeded(build), (Feedforward,))
        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with as_type(model, FULL, config):
            state = model.state_dict()
        if rank and state:
            lines.append(f"rank {rank} holds {list(state)}")
        if not rank:
            lines += unlike(
                state if orig else {k: state[k] for k in seeded(build).state_dict()}, seeded(build).state_dict()
            )
            state = {key: value + 1 for key, value in state.items()}
        again = setting.wrap(seeded(build), (Feedforward,))
        with as_type(again, FULL, config):
            again.load_state_dict(state)
        expected = {key: value + 1 for key, value in model.state_dict().items()}
        lines += [f"{setting}, loaded: {line}" for line in unlike(again.state_dict(), expected)]
        if rank == 0:
            del state["1.inner.0.up.weight" if "1.inner.0.up.weight" in state else list(state)[-1]]
        with as_type(again, FULL, config):
            try:
                again.load_state_dict(state)
                lines.append("a missing key was not reported")
            except RuntimeError as error:
                if "Missing key(s)" not in str(error) or "_fsdp" in str(error):
                    lines.append(str(error))
    return lines


@pytest.mark.parametrize("world", [1, 3, 4])
def test_only_the_first_rank_has_it(run: Run, world: int) -> None:
    assert not joined(run(world, rank0_only, world == 4))


def cannot_be_sent(rank: int, world: int) -> list[str]:
    model = wrapped(rank)
    good = model.state_dict()
    key = list(good)[-1]
    lines = []
    for value, words in (
        (good[key].to("meta"), "on meta"),
        (good[key].to_sparse(), "sparse"),
        (lambda: None, "cannot be sent"),
    ):
        with as_type(model, FULL, FullStateDictConfig(rank0_only=True)):
            try:
                model.load_state_dict({**good, key: value} if rank == 0 else {})
                lines.append(f"{words}: nothing was raised")
            except FlatFSDPError as error:
                if key not in str(error) or words not in str(error):
                    lines.append(str(error))
    with as_type(model, FULL, FullStateDictConfig(rank0_only=True)):
        try:
            model.load_state_dict(None)
            lines.append("None was loaded")
        except FlatFSDPError as error:
            if "expected a state dict on rank 0, found a NoneType" not in str(error):
                lines.append(str(error))
        model.load_state_dict(good if rank == 0 else None)  # others may pass any value
    try:
        model.load_state_dict({**good, key: good[key].to("meta")})
        lines.append("a value without memory was loaded")
    except RuntimeError as error:
        if key not in str(error) or "keeps its value" not in str(error):
            lines.append(str(error))
    lines += unlike(model.state_dict(), good)
    return lines


def test_what_the_first_rank_cannot_send_is_reported_on_all(pool2: Run) -> None:
    assert not joined(pool2(cannot_be_sent))


class Few(nn.Module):
    """Parameters of dtypes that backends do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randn(5, 3).to(torch.float8_e4m3fn), requires_grad=False)
        self.mask = nn.Parameter(torch.randn(7) > 0, requires_grad=False)
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.turn


def from_first_in_any_dtype(rank: int, world: int) -> list[str]:
    lines = []
    config = FullStateDictConfig(rank0_only=True)
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model, again = (Setting(strategy).wrap(seeded(Few), (), sync_module_states=True) for _ in range(2))
        with as_type(again, FULL, config):
            again.load_state_dict(
                {key: -value if value.is_complex() else value for key, value in seeded(Few).state_dict().items()}
            )
        expected = model.state_dict()
        expected["turn"] = -expected["turn"]
        found = again.state_dict()
        for key, value in expected.items():
            if not torch.equal(found[key].view(torch.uint8), value.view(torch.uint8)):
                lines.append(f"{strategy}: {key}")
    return lines


def test_the_first_rank_sends_any_dtype(pool2: Run) -> None:
    assert not joined(pool2(from_first_in_any_dtype))


class Renaming(nn.Module):
    """A module with hooks, an extra state, a buffer that is not kept, and a state dict method of its own below."""

    def __init__(self) -> None:
        super().__init__()
        self.low = Casting()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.register_buffer("counted", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.note = "as built"
        self._register_state_dict_hook(self.after)
        self._register_load_state_dict_pre_hook(self.before)

    @staticmethod
    def after(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    @staticmethod
    def before(state: Any, prefix: str, *_: Any) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x @ self.weight.t())


class Casting(nn.Linear):
    """Saves its weight transposed and in half precision, and knows how to read that."""

    def __init__(self) -> None:
        super().__init__(3, 4)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}half"] = self.weight.t().half()
        destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}half").float().t()
        super()._load_from_state_dict(state, prefix, *args)


def own_ways(rank: int, world: int) -> list[str]:
    lines = []
    for orig in (True, False):
        for units in ((), (Casting,), (Renaming,), (Casting, Renaming)):
            build = lambda: nn.Sequential(Renaming(), nn.Linear(4, 2))  # noqa: E731
            plain = seeded(build)
            model = Setting("FULL_SHARD", orig).wrap(seeded(build), units)
            plain[0].note = getattr(model[0], "module", model[0]).note = "later"
            expected, found = plain.state_dict(), model.state_dict()
            if set(expected) != set(found):
                lines.append(f"{orig} {units}: keys {list(found)}")
            texts = expected.pop("0._extra_state"), found["0._extra_state"]
            if texts[0] != texts[1]:
                lines.append(f"{orig} {units}: {texts}")
            lines += [f"{orig} {units}: {line}" for line in unlike({k: found[k] for k in expected}, expected)]
            torch.manual_seed(7)
            again = Setting("FULL_SHARD", orig).wrap(build(), units)
            again.load_state_dict(found)
            now: Any = again.state_dict()
            if now.pop("0._extra_state") != "later":
                lines.append(f"{orig} {units}: the extra state was not loaded")
            lines += [f"{orig} {units}, loaded: {line}" for line in unlike({k: now[k] for k in expected}, expected)]
    return lines


def test_modules_with_ways_of_their_own(pool2: Run) -> None:
    assert not joined(pool2(own_ways))


def wrappers(rank: int, world: int) -> list[str]:
    """Activation checkpointing and torch.compile around and inside of units; a root that is not wrapped; prefixes."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def build() -> nn.Module:
        model = nn.Sequential(OrderedDict(a=Feedforward(WIDTH, 9), b=Feedforward(WIDTH, 7), c=nn.BatchNorm1d(WIDTH)))
        return nn.Sequential(OrderedDict(inner=model, head=nn.Linear(WIDTH, 3)))

    lines = []
    expected = seeded(build).state_dict()
    changed = {key: value + 1 for key, value in expected.items()}
    ways = ("inside", "outside", "deep inside", "compiled", "compiled outside", "unwrapped root")
    for number, way in enumerate(ways):
        for orig in some((True, False), 2, number):
            model: Any = seeded(build)
            inner = model.inner
            if way == "inside":
                inner.a = FullyShardedDataParallel(checkpoint_wrapper(inner.a), use_orig_params=orig)
            elif way == "outside":
                inner.a = checkpoint_wrapper(FullyShardedDataParallel(inner.a, use_orig_params=orig))
            elif way == "deep inside":
                inner.a = checkpoint_wrapper(inner.a)
            elif way == "compiled":
                inner.a = FullyShardedDataParallel(torch.compile(inner.a), use_orig_params=orig)
            elif way == "compiled outside":
                inner.a = torch.compile(FullyShardedDataParallel(inner.a, use_orig_params=orig))
            if way == "unwrapped root":
                model.inner = FullyShardedDataParallel(inner, use_orig_params=orig)
            else:
                model = FullyShardedDataParallel(model, use_orig_params=orig)
            found = model.state_dict()
            if set(found) != set(expected):
                lines.append(f"{way}, {orig}: {sorted(set(found) ^ set(expected))}")
                continue
            lines += [f"{way}, {orig}: {line}" for line in unlike({k: found[k] for k in expected}, expected)]
            message = model.load_state_dict(changed)
            if message.missing_keys or message.unexpected_keys:
                lines.append(f"{way}, {orig}: {message}")
            now = model.state_dict()
            lines += [f"{way}, {orig}, loaded: {line}" for line in unlike({k: now[k] for k in changed}, changed)]
            for kind in (SHARDED, LOCAL) if way != "unwrapped root" else ():
                with FullyShardedDataParallel.state_dict_type(model, kind):
                    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
            below = (model.inner if way == "unwrapped root" else model.module.inner).state_dict()
            if way == "unwrapped root" and {f"inner.{key}" for key in below} != {k for k in expected if "inner" in k}:
                lines.append(f"{way}, {orig}: below {list(below)}")
            prefixed = model.state_dict(prefix="p.")
            if {f"p.{key}" for key in expected} != set(prefixed):
                lines.append(f"{way}, {orig}: prefixed {list(prefixed)}")
            versions = {
                k: v
                for k, v in getattr(prefixed, "_metadata", {}).items()
                if "batch" in str(v) or v.get("version", 1) > 1
            }
            if not any(key.endswith("inner.c") for key in versions):
                lines.append(f"{way}, {orig}: versions {versions}")
    return lines


def test_other_wrappers_leave_no_trace(pool2: Run) -> None:
    assert not joined(pool2(wrappers))


class Seeing(nn.Linear):
    """Looks at its values while it loads, and may fail then."""

    fails = False

    def _load_from_state_dict(self, *args: Any) -> None:
        if self.fails:
            raise ValueError("not this one")
        self.seen = float(self.weight.detach().sum())
        super()._load_from_state_dict(*args)


def below_a_plain_root(rank: int, world: int) -> list[str]:
    """Nothing clears up behind a module that is no wrapper, whose load raises half-way: the model still works."""
    lines = []
    for orig in (True, False):

        def build(orig: bool = orig) -> Any:
            inner = FullyShardedDataParallel(
                seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 5), Seeing(5, 3))), use_orig_params=orig
            )
            return nn.Sequential(inner, seeded(lambda: nn.Linear(3, 2)))

        model, untouched = build(), build()
        before = untouched.state_dict()
        changed = {key: value + 1 for key, value in before.items()}
        message = model.load_state_dict(changed)
        lines += [f"{orig}, {message}: {line}" for line in unlike(model.state_dict(), changed)]
        for use in ("forward", "state_dict", "summon"):
            model = build()
            model[0].module[1].fails = True
            try:
                model.load_state_dict(changed)
                lines.append(f"{orig}: did not raise")
            except ValueError:
                pass
            if use == "forward":
                model(data(rank, 0)).sum().backward()
            if use == "summon":
                with FullyShardedDataParallel.summon_full_params(model):
                    lines += [] if model[0].module[0].weight.shape == (5, WIDTH) else [f"{orig}: not whole"]
            for key, value in model.state_dict().items():  # as in torch, values before it may be loaded
                if not any(torch.equal(value, state[key]) for state in (before, changed)):
                    lines.append(f"{orig}, {use}: {key}")
    return lines


def test_a_plain_root_whose_load_fails_leaves_a_working_model(pool2: Run) -> None:
    assert not joined(pool2(below_a_plain_root))


def message(rank: int, world: int) -> list[str]:
    """All mismatches are listed at once, under plain names."""
    texts = []
    for orig in (True, False):
        model = wrapped(rank, orig=orig)
        state = model.state_dict()
        first, second, third = list(state)[:3]
        wrong = dict(state)
        del wrong[first]
        wrong[second] = torch.zeros(2, 2, 2)
        wrong["nowhere"] = torch.zeros(1)
        wrong[third] = state[third] + 1
        try:
            model.load_state_dict(wrong)
        except RuntimeError as error:
            texts.append(str(error))
        now = model.state_dict()
        if not torch.equal(now[third], state[third] + 1) or not torch.equal(now[second], state[second]):
            texts.append("what fits was not loaded, or more")
        found = model.load_state_dict({third: state[third]}, strict=False)
        texts.append(f"{sorted(found.missing_keys) == sorted(set(state) - {third})} {found.unexpected_keys}")
        loss_of(model(data(rank, 0))).backward()  # and the model is as good as new
        expected = state[third].float() * 0
        model.load_state_dict({third: expected}, strict=False, assign=True)
        if not torch.equal(model.state_dict()[third], expected):
            texts.append("assign")
    return texts


def test_what_does_not_fit_is_listed(pool2: Run) -> None:
    for text in pool2(message):
        assert len(text) == 4 and text[0] == text[2], text
        for word in ("Missing key(s)", "Unexpected key(s)", '"nowhere"', "size mismatch for"):
            assert word in text[0]
        assert "_fsdp_wrapped_module" not in text[0]
        assert text[1] == text[3] == "True []"


def of_another_model(rank: int, world: int) -> tuple[str, int]:
    model = FullyShardedDataParallel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))), auto_wrap_policy={nn.Linear})
    wrong = {f"{i}.{name}": torch.zeros(3) for i in range(6) for name in ("weight", "gain")}
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(wrong)
    found = model.load_state_dict({"1.gain": torch.zeros(3)}, strict=False)
    return str(raised.value), len(found.missing_keys)


def test_that_of_another_model_is_reported_in_a_few_lines(pool2: Run) -> None:
    for text, missing in pool2(of_another_model):
        _, lost, unknown, *shapes, rest, message = text.split("\n")
        assert lost.endswith(': "0.bias", "1.bias", "2.bias" and 9 more. ') and missing == 18
        assert unknown.endswith(': "0.gain", "1.gain", "2.gain" and 3 more. ')
        assert [line.split()[3] for line in shapes] == ["0.weight:", "1.weight:", "2.weight:"]
        assert (rest, message) == (
            "\tand 3 more of other shapes. ",
            "\tIt belongs to another model; strict=False returns the names of all keys.",
        )


def refused(rank: int, world: int) -> dict[str, str]:
    texts = {}

    def attempt(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except (FlatFSDPError, RuntimeError) as error:
            texts[name] = str(error)

    model = wrapped(rank)
    with as_type(model, SHARDED):
        pieces = model.state_dict()
    key, value = next((k, v) for k, v in pieces.items() if v.span.numel > 1)
    moved = OwnedInterval(value.local[1:], value.spec, type(value.span)(value.span.start + 1, value.span.stop))
    attempt("interval", lambda: model.load_state_dict({**pieces, key: moved}))
    with as_type(model, LOCAL):
        flat = model.state_dict()
    other = wrapped(rank, orig=False)
    attempt("layout", lambda: other.load_state_dict(flat))
    inner = next(each for each in model.modules() if each is not model and isinstance(each, FullyShardedDataParallel))
    FullyShardedDataParallel.set_state_dict_type(inner, SHARDED)
    attempt("types", model.state_dict)
    FullyShardedDataParallel.set_state_dict_type(inner, FULL)
    attempt("config", lambda: as_type(model, FULL, ShardedStateDictConfig()).__enter__())
    attempt("name", lambda: as_type(model, "FULL_STATE").__enter__())
    model.register_forward_pre_hook(lambda *_: None)
    inner.module.register_forward_hook(lambda *_: attempt("forward", model.state_dict))
    loss_of(model(data(rank, 0))).backward()
    return texts


def test_refusals(pool2: Run) -> None:
    for text in pool2(refused):
        assert "these are different intervals" in text["interval"]
        assert "a LOCAL_STATE_DICT can only be loaded with the number of ranks" in text["layout"]
        assert "set to SHARDED_STATE_DICT" in text["types"] and "set_state_dict_type()" in text["types"]
        assert "a FullStateDictConfig, the class for that state_dict_type" in text["config"]
        assert "FULL_STATE_DICT" in text["name"]
        assert "state_dict() while unit" in text["forward"] and "in forward" in text["forward"]


def parts(rank: int, world: int) -> list[str]:
    """A module inside a unit, no wrapper itself, has a state dict: full tensors, or this rank's elements."""
    build = lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), seeded(Net))  # noqa: E731
    lines = []
    for orig in (True, False):
        model = Setting("FULL_SHARD", orig).wrap(seeded(build), (Feedforward,))
        expected = seeded(build)[0].state_dict()
        lines += unlike(model.module[0].state_dict(), expected)
        lines += unlike(model.module[0].state_dict(prefix="a."), {f"a.{key}": value for key, value in expected.items()})
        lines += unlike(dict(model.module[0][0].state_dict(keep_vars=True)), seeded(build)[0][0].state_dict())
        with as_type(model, SHARDED):
            for name, value in model.module[0][0].state_dict().items():
                if not isinstance(value, OwnedInterval) or value.shape != expected[f"0.{name}"].shape:
                    lines.append(f"{orig} {name}: {value}")
        changed = {key: value + 1 for key, value in expected.items()}
        model.module[0].load_state_dict(changed)
        lines += unlike(model.module[0].state_dict(), changed)
        lines += unlike({key: model.state_dict()[f"0.{key}"] for key in changed}, changed)
        try:
            model.module[0].load_state_dict({"0.weight": torch.zeros(2)}, strict=False)
            lines.append("another shape was taken")
        except RuntimeError as error:
            if "size mismatch for 0.weight" not in str(error):
                lines.append(str(error))
        with as_type(model, SHARDED):
            copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for twin in (copied, pickled):
            if twin.get_state_dict_type(twin).state_dict_type is not SHARDED:
                lines.append(f"{orig}: a copy forgot its type")
            twin.set_state_dict_type(twin, FULL)
            lines += unlike(twin.module[0].state_dict(), changed)
        taken = copy.deepcopy(seeded(build)[0])
        lines += unlike(taken.state_dict(), expected)
        odd = FullyShardedDataParallel(nn.Sequential(Casting()), use_orig_params=orig)
        try:
            odd.module[0].state_dict()
            lines.append("a state dict of values that nobody has")
        except FlatFSDPError as error:
            if "Call it on the wrapper" not in str(error):
                lines.append(str(error))
    return lines


def test_parts_of_a_unit_answer_for_themselves(pool2: Run) -> None:
    assert not joined(pool2(parts))


class Reading(nn.Linear):
    """Loads by writing to `.data`."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.weight.data.copy_(state.pop(f"{prefix}weight"))
        self.bias.data.mul_(0).add_(state.pop(f"{prefix}bias"))


def reading(rank: int, world: int) -> list[str]:
    lines = []
    for orig in (True, False):
        for units in ((), (Reading,)):
            build = lambda: nn.Sequential(Reading(), seeded(Net))  # noqa: E731
            model = Setting("FULL_SHARD", orig).wrap(seeded(build), units)
            expected = {key: value + 1 for key, value in model.state_dict().items()}
            model.load_state_dict(expected)
            lines += [f"{orig} {units}: {line}" for line in unlike(model.state_dict(), expected)]
    return lines


def test_modules_that_read_values_while_they_load_see_whole_ones(pool2: Run) -> None:
    assert not joined(pool2(reading))


def scattered(rank: int, world: int) -> list[str]:
    """Other wrappings, ignored modules and parameters, a model from the meta device, models in one group."""
    lines = []
    expected = seeded(Net).state_dict()
    changed = {key: value + 1 for key, value in expected.items()}
    ignoring = seeded(Net)
    ignored = next(module for module in ignoring.modules() if isinstance(module, nn.Linear))
    with torch.device("meta"):
        unborn = Net()
    models = [
        FullyShardedDataParallel(seeded(Net)),
        Setting("SHARD_GRAD_OP", True).wrap(seeded(Net), (nn.Linear,)),
        FullyShardedDataParallel(ignoring, ignored_modules=[ignored], use_orig_params=True),
        FullyShardedDataParallel(seeded(Net), auto_wrap_policy={Feedforward}, cpu_offload=True),
        FullyShardedDataParallel(unborn, use_orig_params=True, check_values="off"),
    ]
    by_parameter = seeded(Net)
    models.append(FullyShardedDataParallel(by_parameter, ignored_states=[list(by_parameter.parameters())[-1]]))
    for number, model in enumerate(models):
        model.load_state_dict(changed)
        found = model.state_dict()
        lines += [f"{number}: {line}" for line in unlike({key: found[key] for key in changed}, changed)]
        with as_type(model, SHARDED):
            state = model.state_dict()
            if set(state) != set(expected):
                lines.append(f"{number}: {sorted(set(state) ^ set(expected))}")
            model.load_state_dict({key: value.clone() for key, value in state.items()})
        with model.summon_full_params(model):
            inside = {key: value.clone() for key, value in model.state_dict().items()}
            lines += [f"{number}, inside: {line}" for line in unlike({k: inside[k] for k in changed}, changed)]
            model.load_state_dict(expected)
        found = model.state_dict()
        lines += [f"{number}, loaded inside: {line}" for line in unlike({k: found[k] for k in expected}, expected)]
    return lines


def test_other_wrappings_read_it(pool3: Run) -> None:
    assert not joined(pool3(scattered))


def mixed(rank: int, world: int) -> list[str]:
    """Under mixed precision values are those of the masters, and buffers keep their own values and dtype."""
    build = lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), Feedforward(WIDTH, 9))  # noqa: E731
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    model = FullyShardedDataParallel(seeded(build), mixed_precision=precision, use_orig_params=True)
    expected = seeded(build).state_dict()
    lines = unlike(model.state_dict(), expected)
    loss_of(model(data(rank, 0)).float()).backward()
    return lines + [key for key, value in model.state_dict().items() if value.dtype != expected[key].dtype]


def test_masters_and_buffers_keep_their_dtypes(pool2: Run) -> None:
    assert not joined(pool2(mixed))


def carriers(rank: int, world: int) -> list[str]:
    """DTensors and ShardedTensors, on request, hold rows; both are loaded."""
    lines = []
    for orig in (True, False):
        for carrier in ("dtensor", "sharded_tensor"):
            model, again = wrapped(rank, orig=orig), wrapped(rank, orig=orig)
            expected = model.state_dict()
            zeros = {key: torch.zeros_like(value) for key, value in expected.items()}
            again.load_state_dict(zeros)
            config = ShardedStateDictConfig(sharded_as=carrier)
            with as_type(model, SHARDED, config):
                state = model.state_dict()
            kinds = {type(value).__name__ for value in state.values()}
            if kinds != {"DTensor" if carrier == "dtensor" else "ShardedTensor"}:
                lines.append(f"{carrier}: {kinds}")
            again.load_state_dict(state)
            lines += [f"{carrier} {orig}: {line}" for line in unlike(again.state_dict(), expected)]
    return lines


def test_torchs_carriers_on_request(pool3: Run) -> None:
    assert not joined(pool3(carriers))


def carriers_of_hybrids(rank: int, world: int) -> list[str]:
    """Over axes that begin with another rank than the job; a parameter without elements is among them."""
    lines = []
    for carrier in ("dtensor", "sharded_tensor"):
        module = nn.Linear(WIDTH, 3)
        module.nothing = nn.Parameter(torch.empty(0, 3))
        model = FullyShardedDataParallel(module, sharding_strategy="HYBRID_SHARD", device_mesh=replicas_of_shards())
        expected = {key: value.clone() for key, value in model.state_dict().items()}
        with as_type(model, SHARDED, ShardedStateDictConfig(sharded_as=carrier)):
            state = model.state_dict()
        model.load_state_dict({key: torch.zeros_like(value) for key, value in expected.items()})
        model.load_state_dict(state)
        lines += [f"{carrier}: {line}" for line in unlike(model.state_dict(), expected)]
    return lines


def test_torchs_carriers_over_each_axis_of_hybrids(pool4: Run) -> None:
    assert not joined(pool4(carriers_of_hybrids))


def exchanges(rank: int, world: int, path: str) -> list[int]:
    """The numbers of objects that torch's distributed checkpoint exchanges to save and load models of two depths."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    counts = []
    for depth in (1, 12):
        build = lambda depth=depth: nn.Sequential(*(Feedforward(WIDTH, 5) for _ in range(depth)))  # noqa: E731
        model = FullyShardedDataParallel(seeded(build), auto_wrap_policy={Feedforward})
        expected = model.state_dict()
        seen: list[int] = []
        names = ("gather_object", "scatter_object_list", "broadcast_object_list", "all_gather_object", "all_reduce")
        with as_type(model, SHARDED), pytest.MonkeyPatch.context() as patch:
            for name in names:
                real = getattr(dist, name)
                patch.setattr(dist, name, lambda *a, real=real, seen=seen, **k: (seen.append(1), real(*a, **k))[1])
            state = model.state_dict()
            dcp.save(state, checkpoint_id=f"{path}/{depth}")
            for value in state.values():
                value.local.zero_()
            dcp.load(state, checkpoint_id=f"{path}/{depth}")
            model.load_state_dict(state)
        assert not unlike(model.state_dict(), expected)
        counts.append(len(seen))
    return counts


def test_dcp_exchanges_as_many_objects_for_any_model(pool3: Run, tmp_path: Path) -> None:
    for few, many in pool3(exchanges, str(tmp_path)):
        assert 0 < few == many


class Ties(nn.Module):
    """Parameters that three units hold, one without elements, one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.third.weight, self.third.bias = self.first.weight, self.first.bias
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.again = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x))) * self.gain + self.nothing.sum() + self.again


def ties(rank: int, world: int) -> list[str]:
    lines = []
    expected = seeded(Ties).state_dict()
    for orig in (True, False):
        for units in ((), ("first",), ("first", "third"), ("second", "third", "first")):
            model: Any = seeded(Ties)
            for name in units:
                setattr(model, name, FullyShardedDataParallel(getattr(model, name), use_orig_params=orig))
            model = FullyShardedDataParallel(model, use_orig_params=orig)
            found = model.state_dict()
            lines += [f"{orig} {units}: {line}" for line in unlike({k: found[k] for k in expected}, expected)]
            if found["second.weight"].data_ptr() != found["first.weight"].data_ptr():
                lines.append(f"{orig} {units}: names of one parameter have two values")
            for kind in (FULL, SHARDED, LOCAL):
                with as_type(model, kind):
                    state = copy.deepcopy(model.state_dict())
                    for value in {id(value): value for value in state.values()}.values():
                        getattr(value, "local", value).add_(1)
                    message = model.load_state_dict(state)
                    if message.missing_keys or message.unexpected_keys:
                        lines.append(f"{orig} {units} {kind.name}: {message}")
                now = model.state_dict()
                more = {key: value + 1 for key, value in found.items()}
                lines += [f"{orig} {units} {kind.name}: {line}" for line in unlike(now, more)]
                found = now
            with as_type(model, SHARDED):
                model.load_state_dict(expected)  # full tensors, for each type
            now = model.state_dict()
            lines += [f"{orig} {units}, back: {line}" for line in unlike({k: now[k] for k in expected}, expected)]
    return lines


def test_ties_across_units_and_odd_shapes(pool3: Run) -> None:
    assert not joined(pool3(ties))


def gradients_stay(rank: int, world: int) -> list[str]:
    """Values are loaded between a backward and the step: the step uses the gradients that are there."""
    lines = []
    for orig in (True, False):
        model, plain = wrapped(rank, orig=orig), seeded(Net)
        loss_of(model(data(rank, 0))).backward()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        changed = {key: value + 1 for key, value in plain.state_dict().items()}
        model.load_state_dict(changed)
        after = [p.grad for p in model.parameters() if p.grad is not None]
        if not all(map(torch.equal, before, after)):
            lines.append(f"{orig}: gradients changed")
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        if not unlike({key: model.state_dict()[key] for key in changed}, changed):
            lines.append(f"{orig}: nothing was stepped")
        loss_of(model(data(rank, 1))).backward()
    return lines


def test_loading_leaves_gradients_alone(pool2: Run) -> None:
    assert not joined(pool2(gradients_stay))
