"""An optimizer that steps in backwards: the numbers of one that steps after them, less memory, and errors for the rest.

Every combination with other settings is in `test_parity.py`; here are its effects on a program.
"""

from __future__ import annotations

import gc
import operator
import re
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatfsdp
import flatfsdp.checkpoint
from flatfsdp import FullyShardedDataParallel, ShardedGradScaler
from flatfsdp.errors import AgreementError, ConfigTypeError, UsageError
from tests.agreement.test_agreement import mixed_gathers
from tests.conftest import Run
from tests.device.test_memory import BLOCK, Block
from tests.device.test_memory import WIDTH as WIDE
from tests.harness import inspect
from tests.harness.corners import full_parameters, seeded
from tests.harness.memory import Recording
from tests.harness.meshes import replicas_of_shards
from tests.harness.models import WIDTH, Feedforward

pytestmark = pytest.mark.distributed


class Stack(nn.Module):
    """Three blocks and a layer of the root's own; `broken` raises between the backwards of the second and the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feedforward(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.broken = False
        self.again: set[int] = set()  # blocks that are called twice
        self.recomputed = False

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 1 and self.broken and torch.is_grad_enabled():
                x.register_hook(_break)
            x = checkpoint(block, x, use_reentrant=True) if self.recomputed else block(x)
            if number in self.again:
                x = block(x)
        return self.head(x)


def _break(grad: Tensor) -> None:
    raise ZeroDivisionError("broken")


def wrapped(build: Any = Stack, *, orig: bool = True, **options: Any) -> Any:
    options.setdefault("join_units_below", 0)
    return FullyShardedDataParallel(seeded(build), auto_wrap_policy={Feedforward}, use_orig_params=orig, **options)


def loss_of(model: Any, rank: int, step: int = 0) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), requires_grad=True)
    return model(x).square().mean()


def stepping(model: Any, kind: Any = torch.optim.AdamW, **settings: Any) -> tuple[Any, Any]:
    optimizer = kind(model.parameters(), lr=0.05, **settings)
    return optimizer, flatfsdp.optimizer_in_backward(model, optimizer)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# --- memory -----------------------------------------------------------------------------------------------------------

DEPTH = 9
SHARD = BLOCK // 2 * 4  # bytes of a block's shard on two ranks


def bytes_of_a_step(rank: int, world: int, orig: bool, prefetch: str, in_backward: bool) -> dict[str, int]:
    with Recording() as recording:
        model: Any = FullyShardedDataParallel(
            nn.Sequential(*(Block() for _ in range(DEPTH))),
            auto_wrap_policy={Block},
            use_orig_params=orig,
            backward_prefetch=prefetch,
            join_units_below=0,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if in_backward:
            flatfsdp.optimizer_in_backward(model, optimizer)
        ledger = inspect.memory(model)
        for step in range(3):
            loss = model(torch.ones(2, WIDE)).sum()
            ledger.reset_peaks()
            recording.mark(f"backward {step}")
            loss.backward()
            recording.mark(f"step {step}")
            grads = flatfsdp.stats(model).bytes_grads
            optimizer.step()
            optimizer.zero_grad()
            del loss
    usage = recording.between("backward 2", "step 2")
    return {"reduced": ledger.peak("reduced"), "grads": grads, "peak": usage.peak, "end": usage.end}


@pytest.mark.parametrize(
    ("orig", "prefetch", "units"), [(False, "BACKWARD_PRE", 3), (True, "BACKWARD_PRE", 3), (True, "BACKWARD_MID", 2)]
)
def test_gradients_of_three_units_are_there_at_a_time(pool2: Run, orig: bool, prefetch: str, units: int) -> None:
    """Or of two."""
    (after, _), (within, _) = (pool2(bytes_of_a_step, orig, prefetch, inside) for inside in (False, True))
    assert after["reduced"] == DEPTH * SHARD
    assert within["reduced"] == units * SHARD
    assert (after["grads"], within["grads"]) == (DEPTH * SHARD, 0)
    assert abs(after["end"] - within["end"] - DEPTH * SHARD) < 4096  # scalars and probes more or less
    # DEPTH - 3 of them; peaks vary by some shards, with the moment when gloo's threads let go.
    assert after["peak"] - within["peak"] >= DEPTH // 3 * SHARD


def order_of_events(rank: int, world: int) -> list[list[str]]:
    model = wrapped()
    stepping(model)
    found = []
    for step in range(2):
        with inspect.events(model).listening() as events:
            loss_of(model, rank, step).backward()
        found.append([f"{event.kind} {event.unit}" for event in events if event.kind in ("reduce", "step", "end")])
    return found


def test_a_unit_steps_beside_the_backward_once_it_is_known_to_be_called_once(pool2: Run) -> None:
    first, second = pool2(order_of_events)[0]
    reduces = ["reduce blocks.2", "reduce blocks.1", "reduce blocks.0", "reduce "]
    assert first == [*reduces, "step blocks.0", "step blocks.1", "step blocks.2", "step ", "end "]
    assert second == [
        "reduce blocks.2",
        "reduce blocks.1",
        "reduce blocks.0",
        "step blocks.2",
        "reduce ",
        "step blocks.1",
        "step blocks.0",
        "step ",
        "end ",
    ]


# --- numbers ----------------------------------------------------------------------------------------------------------


def trained(rank: int, world: int, in_backward: bool, orig: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    """A usual loop with groups, a scheduler, and accumulation; its `step()` and `zero_grad()` stay where they were."""
    model = wrapped(orig=orig, **settings)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1], "lr": 0.01}, {"params": parameters[1:], "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if in_backward:
        flatfsdp.optimizer_in_backward(model, optimizer)
    for step in range(4):
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                loss_of(model, rank, 10 * step + micro).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert not in_backward or all(parameter.grad is None for parameter in model.parameters())
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return full_parameters(model) | {f"{n}.{s}": v for n, each in state.items() for s, v in each.items()}


@pytest.mark.parametrize("orig", [False, True])
def test_a_usual_loop_gives_the_same_numbers_and_state(pool2: Run, orig: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = (pool2(trained, within, orig, {})[0] for within in (False, True))
    assert len(found) > 60 and same(found, expected)


def resumed(rank: int, world: int, folder: str) -> list[bool]:
    """Continue training after a load of the own checkpoint, and without."""
    ends = []
    for load in (False, True):
        model = wrapped()
        optimizer, _ = stepping(model)
        for step in range(3):
            if load and step == 2:
                model, before = wrapped(), model
                optimizer, _ = stepping(model)
                flatfsdp.checkpoint.load(folder, model=model, optimizer=optimizer)
                del before
            loss_of(model, rank, step).backward()
            if not load and step == 1:
                flatfsdp.checkpoint.save(folder, model=model, optimizer=optimizer)
        ends.append(full_parameters(model))
    return [same(*ends)]


def test_a_checkpoint_goes_on_where_it_ended(pool2: Run, tmp_path: Any) -> None:
    assert pool2(resumed, str(tmp_path / "saved")) == [[True]] * 2


def accumulated(rank: int, world: int, how: str) -> dict[str, Tensor]:
    """Two backwards that reduce, then one step on the sum."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    within = flatfsdp.optimizer_in_backward(model, optimizer) if how != "after" else None
    for step in range(3):
        for micro in range(2):
            paused = within is not None and (micro == 0 or how == "step inside")
            with within.no_step() if paused and within is not None else nullcontext():
                loss_of(model, rank, 10 * step + micro).backward()
                if how == "step inside" and micro == 1:
                    model.clip_grad_norm_(1e9)
                    optimizer.step()
                    optimizer.zero_grad()
        if how == "removed" and step == 1 and within is not None:
            within.remove()
        if how == "after" or (how == "removed" and step == 2):
            optimizer.step()
            optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize("how", ["within", "step inside", "removed"])
def test_no_step_lets_reduced_gradients_add_up(pool2: Run, how: str) -> None:
    expected = pool2(accumulated, "after")[0]
    found = pool2(accumulated, how)
    assert same(found[0], expected) and same(found[1], expected)


class Passing(Stack):
    """Blocks that are in `over` are passed over: they run, and nothing of them reaches the loss."""

    over: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            y = block(x)
            x = x + y.detach() if number in self.over else y
        return self.head(x)


def passed_over_at_last(rank: int, world: int, in_backward: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    """The first microbatch brings all gradients; the last passes over a block, on one rank or on all."""
    model = wrapped(Passing, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if in_backward:
        flatfsdp.optimizer_in_backward(model, optimizer)
    for step in range(4):
        for micro in range(2):
            model.module.over = () if micro == 0 or step == 0 else (step % 3,) if step == 2 or rank == 1 else ()
            with model.no_sync() if micro == 0 else nullcontext():
                loss_of(model, rank, 10 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST"])
def test_what_the_last_microbatch_passes_over_steps_on_what_earlier_ones_brought(
    pool2: Run, strategy: str, prefetch: str
) -> None:
    options = {"sharding_strategy": strategy, "backward_prefetch": prefetch}
    expected = pool2(passed_over_at_last, False, options)[0]
    found = pool2(passed_over_at_last, True, options)
    assert same(found[0], expected) and same(found[1], expected)


def partial_sums(rank: int, world: int, in_backward: bool) -> dict[str, Tensor]:
    """Sums over replicas that are put off: the shard axis's alone step nothing."""
    model = wrapped(sharding_strategy="HYBRID_SHARD", device_mesh=replicas_of_shards())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if in_backward:
        flatfsdp.optimizer_in_backward(model, optimizer)
    for step in range(3):
        before = full_parameters(model)
        model.set_requires_all_reduce(False)
        loss_of(model, rank, 10 * step).backward()
        assert same(full_parameters(model), before)
        model.set_requires_all_reduce(True)
        loss_of(model, rank, 10 * step + 1).backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    return full_parameters(model)


def same_in_backward(run: Run, program: Callable[[int, int, bool], dict[str, Tensor]]) -> bool:
    return all(same(*pair) for pair in zip(run(program, True), run(program, False), strict=True))


def test_partial_sums_of_a_hybrid_step_once_they_are_whole(pool4: Run) -> None:
    assert same_in_backward(pool4, partial_sums)


def several(rank: int, world: int, in_backward: bool) -> dict[str, Tensor]:
    """Two optimizers; some parameters belong to none, some are frozen, and one has a user-defined hook."""
    model = wrapped()
    named = dict(model.named_parameters())
    first = [p for n, p in named.items() if "up" in n]
    second = [p for n, p in named.items() if "down" in n]
    named["blocks.1.norm.weight"].requires_grad_(False)
    named["blocks.1.up.weight"].register_post_accumulate_grad_hook(_halve)
    optimizers = [torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(second, lr=0.02)]
    if in_backward:
        for optimizer in optimizers:
            flatfsdp.optimizer_in_backward(model, optimizer)
    for step in range(3):
        loss_of(model, rank, step).backward()
        kept = {n: p.grad for n, p in named.items() if p.grad is not None and p.numel()}
        if in_backward:
            assert kept and not [
                name for name in kept if "up" in name or "down" in name or name.endswith("1.norm.weight")
            ]
        else:
            for optimizer in optimizers:
                optimizer.step()
        grad = named["blocks.0.norm.bias"].grad
        assert grad is None or not grad.numel() or grad.any()
        model.zero_grad()
    return full_parameters(model)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def test_each_of_several_optimizers_steps_on_its_own(pool2: Run) -> None:
    expected, found = (pool2(several, within)[0] for within in (False, True))
    assert same(found, expected)


def called_again(rank: int, world: int, in_backward: bool, how: str) -> dict[str, Tensor]:
    """Units that are read several times in one backward are stepped when it ends."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if in_backward:
        flatfsdp.optimizer_in_backward(model, optimizer)
    model.module.recomputed = how == "reentrant"
    model.module.again = {0, 2} if how == "twice" else set()
    for step in range(3):
        loss = loss_of(model, rank, step)
        if how == "two forwards":
            loss = loss + loss_of(model, rank, step + 7)
        loss.backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize("how", ["reentrant", "twice", "two forwards"])
def test_what_is_read_again_steps_at_the_end(pool2: Run, how: str) -> None:
    expected, found = (pool2(called_again, within, how)[0] for within in (False, True))
    assert same(found, expected)


class Experts(nn.Module):
    """Each rank and step runs another of the experts, and some step none of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Feedforward(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, which: int, part: float) -> Tensor:
        x = self.first(x)
        found = self.experts[which](x)
        return self.head(x + found * part if part else x)


def branching(rank: int, world: int, in_backward: bool) -> dict[str, Tensor]:
    model = wrapped(Experts)
    flatfsdp.ensure_unit_participation(model.module.experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if in_backward:
        flatfsdp.optimizer_in_backward(model, optimizer)
    for step in range(5):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        # The last one does not run in the first step and in the third, and is not trained in the fourth.
        which = 2 if step in (1, 3) else (rank + step) % 2
        model(x, which, 0.0 if step == 3 else 0.5).square().mean().backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    return full_parameters(model)


def test_branches_that_no_rank_has_run_are_not_stepped(pool2: Run) -> None:
    assert same_in_backward(pool2, branching)


# --- failures ---------------------------------------------------------------------------------------------------------


class Deep(Stack):
    """The backward of the last blocks has been reduced when that of the first fails."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feedforward(WIDTH, WIDTH) for _ in range(4))


def test_a_failed_backward_reports_what_was_stepped(pool2: Run) -> None:
    results = pool2(failing_deep)
    (text,) = (text for texts, *_ in results for text in texts)  # one of the job
    assert re.sub(r"^rank [01]: ", "", text) == (
        "a backward failed after the optimizer had stepped 1 of 5 units ('blocks.3'); a step cannot be undone. The "
        "other units ('blocks.0', 'blocks.1', 'blocks.2' and 1 more) still have the parameters and the optimizer "
        "state of the previous step. Load a checkpoint to have all of them at the same step, or continue with the "
        "next batch"
    )
    assert all(only_those and goes_on for _, only_those, goes_on in results)


def failing_deep(rank: int, world: int) -> tuple[list[str], bool, bool]:
    model = wrapped(Deep)
    stepping(model)
    for step in range(2):
        loss_of(model, rank, step).backward()
    before = full_parameters(model)
    model.module.broken = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError, match="broken"):
            loss_of(model, rank, 2).backward()
    model.module.broken = False
    after = full_parameters(model)
    moved = {".".join(name.split(".")[:2]) for name in after if not torch.equal(after[name], before[name])}
    loss_of(model, rank, 3).backward()
    assert not any(parameter.grad is not None for parameter in model.parameters())
    texts = [str(each.message) for each in caught if "stepped" in str(each.message)]
    return texts, moved == {"blocks.3"}, not same(full_parameters(model), after)


def mixing_deep(rank: int, world: int) -> list[str]:
    model = wrapped(Deep)
    stepping(model)
    for step in range(2):
        loss_of(model, rank, step).backward()
    with warnings.catch_warnings(record=True) as caught, mixed_gathers(here=rank == 1):
        warnings.simplefilter("always")
        with pytest.raises(AgreementError, match="Values of different units were exchanged for each other"):
            for step in range(2, 2 + world):  # a rank whose backward was expected raises in its next step
                loss_of(model, rank, step).backward()
                while not inspect.verdict_of(model)():
                    time.sleep(0.05)
    return [str(each.message) for each in caught if "stepped" in str(each.message)]


def test_where_ranks_have_diverged_nobody_is_to_continue(pool2: Run) -> None:
    """The steps of units were taken with gradients of others."""
    results = pool2(mixing_deep)
    texts = [text for texts in results for text in texts]
    assert texts and all(text.endswith("Load a checkpoint to have all of them at the same step") for text in texts)


MOODS: list[str] = []  # of the next steps of `Moody`


class Moody(torch.optim.SGD):
    """Fails when its mood is bad."""

    def step(self, closure: Any = None) -> Any:
        if MOODS and MOODS.pop(0) == "bad":
            raise ZeroDivisionError("moody")
        return super().step(closure)


def moody(rank: int, world: int) -> tuple[list[str], bool]:
    model = wrapped(Deep)
    optimizer, _ = stepping(model, Moody)
    parameters = list(model.parameters())
    for step in range(2):
        loss_of(model, rank, step).backward()
    MOODS[:] = ["good", "bad"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError, match="moody"):
            loss_of(model, rank, 2).backward()
    loss_of(model, rank, 3).backward()
    (group,) = optimizer.param_groups
    same_group = all(map(operator.is_, group["params"], parameters)) and len(group["params"]) == len(parameters)
    return [str(each.message) for each in caught if "stepped" in str(each.message)], same_group


def test_an_optimizer_that_fails_is_left_as_it_was(pool2: Run) -> None:
    results = pool2(moody)
    (text,) = (text for texts, _ in results for text in texts)
    assert "a backward failed after the optimizer had stepped 2 of 5 units ('blocks.2', 'blocks.3')" in text
    assert all(same_group for _, same_group in results)


def let_go(rank: int, world: int) -> list[bool]:
    """A model goes with its last reference, though its optimizer and the way to pause it stay."""
    stepping(wrapped())  # torch keeps the frames of a process's first optimizer, and their contents
    gc.collect()
    gc.disable()
    try:
        model = wrapped()
        optimizer, within = stepping(model)
        for step in range(2):
            loss_of(model, rank, step).backward()
        root = inspect.shared_state(model)
        del model
        gone = [root() is None]
        within.remove()
        with within.no_step():
            pass
        return [*gone, within.optimizer is optimizer]
    finally:
        gc.enable()


def test_stepping_keeps_no_model_alive(pool2: Run) -> None:
    assert pool2(let_go) == [[True, True]] * 2


def late(rank: int, world: int) -> str:
    """The same graph once more: its weights have been stepped since."""
    model = wrapped()
    stepping(model)
    for step in range(2):
        loss_of(model, rank, step).backward()
    loss = loss_of(model, rank, 2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    loss_of(model, rank, 3).backward()
    return str(caught.value)


def test_a_graph_older_than_its_step_is_refused(pool2: Run) -> None:
    for text in pool2(late):
        assert "has been modified by an inplace operation" in text


def read_after_its_step(rank: int, world: int) -> list[str]:
    """A user-defined hook runs a block again when a later backward has stepped it."""
    model = wrapped(Deep)
    stepping(model)
    blocks = model.module.blocks
    for step in range(2):
        loss_of(model, rank, step).backward()
    taken = torch.zeros(2, WIDTH)

    def again(grad: Tensor) -> None:
        blocks[3](taken)

    x = blocks[0].register_forward_pre_hook(lambda module, inputs: inputs[0].register_hook(again) and None)
    with pytest.raises(UsageError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_of(model, rank, 2).backward()
    x.remove()
    loss_of(model, rank, 3).backward()
    return [str(caught.value)]


def test_a_unit_that_was_stepped_is_not_read_again(pool2: Run) -> None:
    for (text,) in pool2(read_after_its_step):
        assert text.startswith(
            "unit 'blocks.3': its forward ran again after its parameters had been stepped in the same backward"
        )


# --- refusals ---------------------------------------------------------------------------------------------------------


class Asking(torch.optim.SGD):
    """Steps only with a closure."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Keeps one count of steps for all parameters of a group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def words(rank: int, world: int) -> dict[str, str]:
    """The messages of errors, by case."""
    texts: dict[str, str] = {}

    def refused(name: str, kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as caught:
            call()
        texts[name] = str(caught.value)

    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin = flatfsdp.optimizer_in_backward
    refused("model", ConfigTypeError, lambda: begin(nn.Linear(1, 1), optimizer))
    refused("optimizer", ConfigTypeError, lambda: begin(model, "SGD"))  # type: ignore[arg-type]
    refused("nested", UsageError, lambda: begin(model.module.blocks[0], optimizer))
    refused("products", UsageError, lambda: begin(model, torch.optim.LBFGS(model.parameters())))
    refused("closure", UsageError, lambda: begin(model, Asking(model.parameters(), lr=0.1)))
    refused("counting", UsageError, lambda: begin(model, Counting(model.parameters(), lr=0.1)))
    within = begin(model, optimizer)
    refused("twice", UsageError, lambda: begin(model, torch.optim.Adam(list(model.parameters())[:1])))
    loss_of(model, rank).backward()
    refused("clip", UsageError, lambda: model.clip_grad_norm_(1.0))
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    refused("scaled", UsageError, lambda: scaler.scale(loss_of(model, rank, 1)).backward())
    refused("differentiated", UsageError, lambda: loss_of(model, rank, 2).backward(create_graph=True))
    before = full_parameters(model)
    with within.no_step():  # where gradients stay, a scaler is welcome
        scaler.scale(loss_of(model, rank, 3)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert not same(full_parameters(model), before)
    loss_of(model, rank, 4).backward()
    refused("wrapped again", UsageError, lambda: FullyShardedDataParallel(nn.Sequential(model)))
    within.remove()
    model.clip_grad_norm_(1.0)
    within.remove()
    return texts


def test_what_cannot_be_is_refused_in_words(pool2: Run) -> None:
    one, other = pool2(words)
    assert one == other
    for name, text in {
        "model": "optimizer_in_backward: model: got Linear(in_features=1, out_features=1, bias=True) (Linear).",
        "optimizer": "optimizer_in_backward: optimizer: got 'SGD' (str). Accepted: an optimizer of torch.optim",
        "nested": "optimizer_in_backward() was called on a nested unit (Feedforward); call it on the outermost",
        "products": "LBFGS computes products over all parameters, but ranks have parts of them",
        "closure": "a copy of this Asking cannot step on some of its parameters (TypeError:",
        "counting": "a step of this Counting changes state that is shared by all parameters (k of param group 0)",
        "twice": "a SGD that steps in backwards of this model already holds parameters of this Adam",
        "clip": "clip_grad_norm_: SGD steps during backwards, so gradients are gone before their norm is known",
        "wrapped again": "module: Feedforward inside belongs to a model that was passed to optimizer_in_backward()",
        "scaled": "SGD steps during backwards, and the loss of this backward was scaled by ShardedGradScaler",
        "differentiated": "SGD steps during backwards, and this backward has create_graph=True",
    }.items():
        assert text in one[name], (name, one[name])


def report(rank: int, world: int) -> list[str]:
    model = wrapped()
    found = [inspect.schedule_in_words(model)]
    _, within = stepping(model)
    found.append(inspect.schedule_in_words(model))
    with within.no_step():
        found.append(inspect.schedule_in_words(model))
    found.append(inspect.schedule_in_words(model))
    within.remove()
    return [*found, inspect.schedule_in_words(model)]


def test_ranks_compare_who_steps_with_what_else_users_set(pool2: Run) -> None:
    steps = "AdamW steps during backwards"
    assert pool2(report)[0] == ["", steps, "", steps, ""]
