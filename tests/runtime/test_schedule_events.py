"""Schedules that users change while training goes on, as lists of events; and errors."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ensure_unit_participation
from flatfsdp.errors import ConfigTypeError, ConfigValueError, UsageError
from flatfsdp.wrap import ModuleWrapPolicy
from tests.comm.test_communication import (
    BACKWARD,
    UNITS,
    Collectives,
    forward,
    settled,
    story,
    tower,
    wrapped,
)
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice

pytestmark = pytest.mark.single_process

FORWARD = ("gather", "forward", "reshard", "end")


def live(model: FullyShardedDataParallel) -> set[str]:
    """The kinds of memory that are in use."""
    return set(inspect.memory(model).held)


def evaluate(model: FullyShardedDataParallel) -> None:
    with torch.no_grad():
        forward(model)


def gathers(model: FullyShardedDataParallel) -> list[str]:
    """The units that a forward gathers."""
    return story(model, lambda: evaluate(model), "gather").split()


def test_units_kept_after_forward_are_not_gathered_in_backward() -> None:
    with tower() as model:
        model.module.b.set_reshard_after_forward(False)
        assert story(model, lambda: forward(model).backward(), *FORWARD) == (
            "gather:root forward:root gather:a forward:a reshard:a gather:b forward:b gather:c forward:c reshard:c "
            "gather:c reshard:c gather:a reshard:b reshard:a reshard:root end:root"
        )


def test_the_root_can_be_resharded_after_forward() -> None:
    with tower() as model:
        model.set_reshard_after_forward(True, recurse=False)
        assert story(model, lambda: forward(model).backward(), "gather", "reshard") == (
            "gather:root gather:a reshard:a gather:b reshard:b gather:c reshard:c reshard:root "
            "gather:root gather:c gather:b reshard:c gather:a reshard:b reshard:a reshard:root"
        )


def test_evaluations_gather_once_without_reshard_after_forward() -> None:
    with tower() as model:
        model.set_reshard_after_forward(False)
        assert len(gathers(model)) == UNITS
        assert gathers(model) == []
        model.set_reshard_after_forward(True)
        assert gathers(model) == [] and live(model) == {"shard"}
        assert len(gathers(model)) == UNITS


def test_units_kept_after_backward_are_not_gathered_in_the_next_forward() -> None:
    with tower() as model:
        model.set_reshard_after_backward(False)
        forward(model).backward()
        assert live(model) == {"shard", "unsharded"}
        model.set_reshard_after_backward(True)
        again = story(model, lambda: forward(model).backward(), "gather", "reshard")
        assert again.startswith("reshard:a reshard:b reshard:c gather:c")
        assert live(model) == {"shard"}


def test_what_was_kept_is_gathered_anew_after_the_optimizers_step() -> None:
    with tower() as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.set_reshard_after_backward(False)
        for _ in range(2):
            forward(model).backward()
            assert gathers(model) == []
            optimizer.step()
            optimizer.zero_grad()
            assert len(gathers(model)) == UNITS


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_unsynchronized_backwards_reduce_nothing(strategy: str) -> None:
    with fake_world(4):
        model = wrapped(strategy)
        settled(model)
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            with Collectives() as seen:
                forward(model).backward()
            assert seen.counts["scatter"] == UNITS * sync


def test_shards_of_gradients_add_up_without_all_reduce() -> None:
    with fake_world(4):
        model = wrapped("HYBRID_SHARD", mesh=(2, 2))
        settled(model)
        for complete in (False, False, True, True):
            model.set_requires_all_reduce(complete)
            with Collectives() as seen:
                forward(model).backward()
            assert (seen.counts["scatter"], seen.counts["all_reduce"]) == (UNITS, UNITS * complete)
            assert live(model) == {"shard"} if complete else {"shard", "partial"}
            assert (next(model.parameters()).grad is not None) == complete
        model.set_requires_all_reduce(False)
        forward(model).backward()
        with refused(UsageError, "cannot be copied or pickled while gradients accumulate"):
            copy.deepcopy(model)


def test_gradient_synchronization_is_all_of_it() -> None:
    with fake_world(4):
        model = wrapped("HYBRID_SHARD", mesh=(2, 2))
        model.set_requires_gradient_sync(False)
        forward(model).backward()
        model.set_requires_gradient_sync(True)
        with Collectives() as seen:
            forward(model).backward()
        assert (seen.counts["scatter"], seen.counts["all_reduce"]) == (UNITS, UNITS)


def test_hooks_run_in_the_order_of_reductions() -> None:
    with tower() as model:
        seen: list[str] = []
        wrappers = {"a": model.module.a, "b": model.module.b, "c": model.module.c, "root": model}
        for name, each in wrappers.items():

            def hook(total: torch.Tensor, name: str = name) -> None:
                seen.append(name)
                assert total.dim() == 1 and not total.requires_grad

            each.set_all_reduce_hook(hook)
        forward(model).backward()
        assert seen == ["c", "b", "a", "root"]
        model.set_all_reduce_hook(None)
        forward(model).backward()
        assert seen[4:] == ["c", "b", "a"]


def test_a_hook_may_have_a_stream_of_its_own() -> None:
    with fake_world(4), FakeDevice() as device:
        model = wrapped("FULL_SHARD")
        stream = device.Stream()
        where: list[object] = []
        model.set_all_reduce_hook(lambda total: where.append(device.current_stream()), stream=stream)
        settled(model)
        assert where == [stream]
    assert device.races == []


def test_factors_and_hooks_are_checked() -> None:
    with tower() as model:
        for factor in (0, -1.0, float("inf"), float("nan")):
            with refused(ConfigValueError, "set_gradient_divide_factor: factor: got .*Accepted: a positive number"):
                model.set_gradient_divide_factor(factor)
        with refused(ConfigTypeError, "set_gradient_divide_factor: factor: got '2'"):
            model.set_gradient_divide_factor("2")  # type: ignore[arg-type]
        with refused(ConfigTypeError, "set_all_reduce_hook: hook: got 1"):
            model.set_all_reduce_hook(1)  # type: ignore[arg-type]
        with refused(ConfigValueError, "set_all_reduce_hook: stream: got .*Accepted: None, unless on an accelerator"):
            model.set_all_reduce_hook(print, stream=object())


def test_one_unit_may_do_without_synchronization() -> None:
    with tower() as model:
        model.module.b.set_requires_gradient_sync(False)
        assert story(model, forward(model).backward, "reduce", "grads", "end") == (
            "grads:c reduce:c grads:b grads:a reduce:a grads:root reduce:root end:root"
        )
        assert live(model) == {"shard", "slots"}
        model.module.b.set_requires_gradient_sync(True)
        assert "reduce:b" in story(model, forward(model).backward, "reduce")
        assert live(model) == {"shard"}


def test_a_unit_that_backward_does_not_read_is_not_gathered_for_it() -> None:
    with tower() as model:
        model.module.b.set_unshard_in_backward(False)
        loss = forward(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # it does read them
            assert "gather:b" not in story(model, loss.backward, *BACKWARD)
    with fake_world(4):
        net = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
        embedder = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({nn.Embedding}))
        embedder[0].set_unshard_in_backward(False)
        with inspect.events(embedder).listening() as events:
            embedder(torch.arange(3)).sum().backward()
        assert [event.kind for event in events if event.unit == "0"] == (
            "gather gathered forward reshard backward grads reduce".split()
        )


def test_some_settings_are_for_a_wrapper_and_none_inside() -> None:
    with tower() as model:
        reduced: list[torch.Tensor] = []
        model.set_unshard_in_backward(False)  # it is unsharded in any case
        model.set_gradient_divide_factor(2.0)
        model.set_all_reduce_hook(reduced.append)
        assert story(model, forward(model).backward, "gather") == "gather:c gather:b gather:a"
        assert len(reduced) == 1
        units = {unit.name: unit.schedule.divide_by for unit in inspect.units(model)}
        assert units == {"a": None, "b": None, "c": None, "": 2.0}


def test_listed_units_are_gathered_ahead_in_forward() -> None:
    with tower(forward_prefetch=True) as model:
        a, b, c = model.module.a, model.module.b, model.module.c
        a.set_modules_to_forward_prefetch([b, c])
        assert story(model, lambda: forward(model), *FORWARD) == (
            "gather:root gather:a forward:root gather:b gather:c forward:a reshard:a forward:b reshard:b "
            "forward:c reshard:c"
        )
        a.set_modules_to_forward_prefetch([])
        assert story(model, lambda: forward(model), *FORWARD).startswith(
            "gather:a forward:root gather:b forward:a reshard:a gather:c forward:b"
        )


def test_listed_units_are_gathered_ahead_in_backward() -> None:
    with tower(backward_prefetch=None) as model:
        a, b, c = model.module.a, model.module.b, model.module.c
        c.set_modules_to_backward_prefetch([b, a])
        assert story(model, forward(model).backward, "gather", "backward", "reshard") == (
            "backward:root gather:c gather:b gather:a backward:c reshard:c backward:b reshard:b backward:a reshard:a "
            "reshard:root"
        )


def test_a_list_may_skip_a_unit() -> None:
    with tower() as model:
        model.module.c.set_modules_to_backward_prefetch([model.module.a])
        assert story(model, forward(model).backward, "gather", "backward") == (
            "gather:c backward:root gather:a backward:c gather:b backward:b backward:a"
        )


def test_what_a_forward_does_not_use_is_freed_at_its_end() -> None:
    with tower() as model:
        model.module.c.set_modules_to_forward_prefetch([model.module.a])
        assert story(model, lambda: forward(model).backward(), "gather", "reshard").startswith(
            "gather:root gather:a reshard:a gather:b reshard:b gather:c gather:a reshard:c reshard:a gather:c gather:b"
        )
        assert live(model) == {"shard"}


def test_no_more_units_are_ahead_than_are_listed() -> None:
    with tower() as model:
        units = inspect.units(model)
        a, b, c = model.module.a, model.module.b, model.module.c
        a.set_modules_to_forward_prefetch([b, c])
        c.set_modules_to_backward_prefetch([b, a])
        most = 0

        def count(event: inspect.Event) -> None:
            nonlocal most
            most = max(most, sum(not unit.is_sharded for unit in units[:-1]))

        with inspect.events(model).listening(count):
            for _ in range(2):
                forward(model).backward()
        assert most == 3


def test_what_cannot_be_gathered_ahead_is_refused() -> None:
    with tower() as model:
        other = wrapped("FULL_SHARD")
        a = model.module.a
        for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
            listing = getattr(a, method)
            with refused(ConfigTypeError, f"{method}: modules: got .*Accepted: a list of FullyShardedDataParallel"):
                listing(model)
            with refused(ConfigTypeError, f"{method}: modules: got .*Accepted: a list of FullyShardedDataParallel"):
                listing([a.module])
            with refused(ConfigValueError, f"{method} of unit 'a': modules: got itself"):
                listing([model.module.b, a])
            with refused(ConfigValueError, "got a Tower that is wrapped in another model"):
                listing([other])


def test_a_unit_may_be_gathered_before_its_forward() -> None:
    with tower() as model:
        b = model.module.b

        def run() -> None:
            handle = b.unshard(async_op=True)
            assert handle is not None
            forward(model).backward()
            handle.wait()

        assert story(model, run, *FORWARD).startswith(
            "gather:b gather:root forward:root gather:a forward:a reshard:a forward:b reshard:b gather:c forward:c"
        )
        assert live(model) == {"shard"}


def test_unshard_and_reshard_between_iterations() -> None:
    with fake_world(4):
        model = wrapped("FULL_SHARD", use_orig_params=True)
        settled(model)
        b = model.module.b
        assert b.unshard() is None
        assert [tuple(p.shape) for p in b.parameters()] == [(12, 6), (12,), (6, 12), (6,)][: len(list(b.parameters()))]
        assert live(model) == {"shard", "unsharded"}
        b.reshard()
        assert all(p.dim() == 1 for p in b.parameters())
        assert live(model) == {"shard"}
        assert "gather:b" in gathers(model)


@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_what_no_backward_came_to_may_be_requested_again(strategy: str, offload: bool, waits: bool) -> None:
    """Its leaves have no values while it is gathered: no code can have written to them."""
    with fake_world(2):
        model = wrapped(strategy, use_orig_params=True, cpu_offload=CPUOffload(offload))
        forward(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # everything is at rest, and a backward may still come
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            unit.unshard()
            unit.reshard()
            handle = unit.unshard(async_op=True)
            if waits:
                handle.wait()
        forward(model).sum().backward()
        assert live(model) <= {"shard", "grad_shard", "accumulated"}


def replaced(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


def written(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.zero_()


def given_a_whole_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (replaced, "parameter 'up.weight' of unit 'b': its .data was replaced"),
        (written, "unit 'b': parameters were written to while they were unsharded by unshard(): up.weight"),
        (given_a_whole_gradient, "parameter 'up.weight' of unit 'b': its .grad was replaced"),
    ],
)
@pytest.mark.parametrize("orig", [True, False])
def test_what_would_be_lost_with_requested_parameters_is_refused(
    change: Callable[[nn.Parameter], None], what: str, orig: bool
) -> None:
    with fake_world(4):
        model = wrapped("FULL_SHARD", use_orig_params=orig)
        settled(model)
        for then in (lambda: forward(model), model.module.b.reshard, model.state_dict):
            b = model.module.b
            b.unshard()
            with pytest.raises(UsageError, match=re.escape(what)):
                change(b.module.up.weight)
                then()
        forward(model).backward()


@pytest.mark.parametrize("orig", [True, False])
def test_a_step_writes_to_requested_parameters_that_are_the_shard(orig: bool) -> None:
    with fake_world(2):
        model = wrapped("NO_SHARD", use_orig_params=orig)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for then in (lambda: forward(model), model.state_dict, model.reshard, optimizer.step):
            forward(model).backward()
            model.module.b.unshard()
            before = model.module.b.module.up.weight.detach().clone()
            optimizer.step()
            then()
            assert not torch.equal(model.module.b.module.up.weight, before)


def test_a_unit_may_be_freed_between_forward_and_backward() -> None:
    with tower() as model:
        loss = forward(model)
        model.reshard()
        assert story(model, loss.backward, "gather").startswith("gather:root gather:c")
        loss = forward(model)
        model.module.a.unshard()
        assert story(model, loss.backward, "gather") == "gather:c gather:b"


def test_units_may_be_gathered_from_inside_an_outer_forward() -> None:
    with tower(backward_prefetch=None) as model:
        a, c = model.module.a, model.module.c
        a.register_forward_pre_hook(lambda module, args: c.unshard(async_op=True) and None)
        assert story(model, lambda: forward(model), *FORWARD) == (
            "gather:root forward:root gather:c gather:a forward:a reshard:a gather:b forward:b reshard:b "
            "forward:c reshard:c"
        )


def test_what_is_gathered_on_request_and_not_used_is_freed() -> None:
    with tower() as model:
        other = model.module.b
        model.module.b = nn.Identity()
        other.unshard(async_op=True)
        assert "gather:b" not in gathers(model)
        assert live(model) == {"shard"}


def test_writes_after_a_request_are_seen() -> None:
    with tower() as model:
        b = model.module.b
        for write in (True, False):
            b.unshard(async_op=True)
            if write:
                with torch.no_grad():
                    b.flat_param.add_(1)
            assert ("gather:b" in gathers(model)) == write


def test_requests_at_the_wrong_time_are_refused() -> None:
    with tower() as model:
        model.module.between = lambda: None
        with FullyShardedDataParallel.summon_full_params(model):
            with refused(UsageError, "unshard.. of unit <root> was called inside summon_full_params"):
                model.unshard()
            with refused(UsageError, "reshard.. of unit <root>: its parameters are still being read"):
                model.reshard()
        for method in (model.unshard, model.reshard):
            loss = forward(model)
            model.module.between = method
            with refused(UsageError, f"{method.__name__}.. of unit <root> was called inside a backward"):
                loss.backward()
        with refused(ConfigTypeError, "unshard: async_op: got 1 .int.. Accepted: True or False"):
            model.unshard(1)  # type: ignore[arg-type]


@contextmanager
def refused(error: type[Exception], words: str) -> Iterator[None]:
    with pytest.raises(error, match=words):
        yield


def test_settings_are_checked() -> None:
    with tower() as model:
        for setter in (
            model.set_requires_gradient_sync,
            model.set_requires_all_reduce,
            model.set_reshard_after_backward,
            model.set_unshard_in_backward,
            model.set_is_last_backward,
            model.set_force_sum_reduction_for_comms,
        ):
            with refused(ConfigTypeError, f"{setter.__name__}: .*got 1 .int.. Accepted: True or False"):
                setter(1)  # type: ignore[arg-type]
            setter(True)


@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_is_last_backward"])
def test_settings_do_not_change_inside_a_backward(setter: str) -> None:
    with tower() as model:
        model.module.between = lambda: getattr(model, setter)(False)
        with refused(UsageError, f"{setter} of unit <root> was called inside a backward"):
            forward(model).backward()


def test_counts_without_reshard_after_forward_are_those_of_shard_grad_op() -> None:
    with tower() as model:
        model.set_reshard_after_forward(False)
        settled(model)
        with Collectives() as seen:
            forward(model).backward()
        assert seen.counts == Counter(gather=UNITS, scatter=UNITS)


def test_copies_have_the_settings() -> None:
    with tower() as model:
        model.set_reshard_after_forward(False)
        twin: Any = copy.deepcopy(model)
        settled(twin)
        with Collectives() as seen:
            forward(twin).backward()
        assert seen.counts["gather"] == UNITS


def first_piece(state: object, gradient: torch.Tensor, piece: torch.Tensor | None = None) -> None:
    """A communication hook that communicates nothing."""
    if piece is not None:
        piece.copy_(gradient[: piece.numel()])


CHOICES: dict[str, Callable[[Any], object]] = {
    "reshard": lambda model: model.set_reshard_after_forward(True),
    "post-forward": lambda model: model.set_reshard_after_forward(2),
    "all-reduce": lambda model: model.set_requires_all_reduce(False),
    "divide": lambda model: model.set_gradient_divide_factor(3.0),
    "hook": lambda model: model.register_comm_hook(None, first_piece),
    "branch": lambda model: ensure_unit_participation(model.module.b),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_units_do_what_is_chosen_from_the_choice_on(strategy: str, choice: str) -> None:
    mixed = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    with fake_world(8):
        model = wrapped(strategy, mixed_precision=mixed, **{"mesh": (2, 4)} if strategy == "HYBRID_SHARD" else {})
        settled(model)
        CHOICES[choice](model)
        assert inspect.does_what_is_chosen(model)
        twin: Any = copy.deepcopy(model)
        settled(twin)
        assert inspect.does_what_is_chosen(twin)
