"""Ranks that part after their first iteration, when nothing is exchanged any more: every rank ends with our error,
within seconds, those that wait for the others in a collective included."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flatfsdp.engine.base.processes import ProcessIdentity
from flatfsdp.errors import UsageError
from tests.agreement.test_agreement import PARTING, REMEDY, Net, step, wrap
from tests.flat.test_requires_grad import batch, freeze_in_turn
from tests.flat.test_requires_grad import wrapped as wrapped_game
from tests.harness import fresh, inspect
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.process

LIMIT = 120.0  # seconds for all ranks to end once they have started; on idle cores it takes 3


def trained(**kwargs: Any) -> Any:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrap(Net(), **kwargs)
    step(model)
    step(model)
    return model


def part(rank: int, world: int, case: str) -> None:
    second_half = case == "second half"  # of the last block's all-reduce, which waits for the other rank's
    model = trained(**({"sharding_strategy": "NO_SHARD", "join_units_below": 0} if second_half else {}))
    odd = rank == world - 1
    if case == "skips a unit":
        step(model, order=(0, 2) if odd else (0, 1, 2))
    elif case == "another order":
        step(model, order=(1, 0, 2) if odd else (0, 1, 2))
    elif case == "forwards":
        with contextlib.suppress(ValueError):
            step(model, fail_at=2 if odd else 1)
    elif case in ("backward", "second half"):

        def refuse(grad: torch.Tensor) -> None:
            if odd:
                raise ValueError("bad gradient")

        model.module.blocks[0 if second_half else 1].linear.weight.register_hook(refuse)
        with contextlib.suppress(ValueError):
            step(model)
    elif case == "hook":

        def bad(state: dict[str, Any], *tensors: torch.Tensor) -> None:
            state["calls"] += 1
            if odd and state["calls"] == 2:
                raise ValueError("bad hook")
            dist.all_reduce(tensors[0])

        model.register_comm_hook({"calls": 0}, bad)
        with contextlib.suppress(ValueError):
            step(model)
    elif case == "a value's shape":
        weight = model.module.blocks[1].linear.weight
        good = weight.data
        weight.data = torch.zeros(3) if odd else good
        with contextlib.suppress(UsageError):
            step(model)
        weight.data = good
    elif case == "a state dict of rank 0":
        if not odd:
            model.state_dict()
    elif case == "an optimizer's state of rank 0":
        optimizer = torch.optim.Adam(model.parameters())
        if not odd:
            model.optim_state_dict(model, optimizer)
    elif case == "a checkpoint of rank 0":
        from flatfsdp import checkpoint  # slow to import, and of no use to the other cases

        if not odd:
            checkpoint.save(tempfile.mkdtemp(), model=model)
    elif case == "whole parameters of rank 0":
        with contextlib.nullcontext() if odd else model.summon_full_params(model):
            pass
    step(model)
    step(model)


def reported_to_all(outcomes: list[fresh.Outcome]) -> str:
    """The one sentence that every rank printed as it ended."""
    messages = set()
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 1, (rank, outcome)
        found = re.findall(rf"^\[flatfsdp, rank {rank}\] AgreementError: (.*)$", outcome.output, re.MULTILINE)
        assert found, (rank, outcome.output)
        messages.update(found)
    assert len(messages) == 1, messages
    return messages.pop()


@pytest.mark.ranks(2, part, of=["case"], timeout=LIMIT)
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("another order", "rank 0 entered unit 'blocks.0'; rank 1 entered unit 'blocks.1'"),
        (
            "forwards",
            "rank 0 abandoned its iteration in the forward of unit 'blocks.0' after ValueError: out of luck; "
            "rank 1 entered unit 'blocks.1'",
        ),
        ("backward", "rank 0 went on in a backward; rank 1 abandoned its iteration in a backward"),
        ("second half", "rank 0 went on in a backward; rank 1 abandoned its iteration in a backward"),
        ("hook", "rank 0 went on in a backward; rank 1 abandoned its iteration in a backward"),
        (
            "a value's shape",
            "rank 0 began a training forward at unit <root>; rank 1 abandoned its iteration in the beginning of a "
            "forward after UsageError: the .data of 'linear.weight' was replaced by a tensor of shape (3,); expected "
            "this rank's shard of it, (6,), or the full parameter, (4, 4). Inside summon_full_params(), parameters "
            "have their full shape",
        ),
        ("a state dict of rank 0", "rank 0 called state_dict(); rank 1 began a training forward at unit <root>"),
        (
            "whole parameters of rank 0",
            "rank 0 called summon_full_params(); rank 1 began a training forward at unit <root>",
        ),
        # `test_calls.py` has the other calls.
        *(
            (f"{what} of rank 0", f"rank 0 called {call}(); rank 1 began a training forward at unit <root>")
            for what, call in (("an optimizer's state", "optim_state_dict"), ("a checkpoint", "checkpoint.save"))
            if is_thorough()
        ),
    ],
)
def test_ranks_part(outcomes: list[fresh.Outcome], case: str, text: str) -> None:
    begun = 2 if case == "a value's shape" or "rank 0" in case else 3  # there the third iteration has not begun
    remedy = REMEDY if case == "another order" else ""
    expected = f"ranks diverged at step {begun}: {text}{PARTING}{remedy}"
    if case.endswith("of rank 0"):
        either = "Either rank 0 alone did what all ranks must do, or rank 0, unlike rank 1, skipped a batch"
        assert reported_to_all(outcomes).startswith(f"ranks diverged at step {begun}: {text}. {either}")
        return
    assert reported_to_all(outcomes) == expected


class Aside(Net):
    """Returns its input, too: a gradient of that reaches no parameter."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), 2 * x


class Behind(Net):
    """Returns what a frozen block made of its input, too: a gradient of that reaches the block and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x = self.blocks[0](x)
        return super().forward(x, order=(1, 2)), 2 * x


class Frozen(Aside):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def reach(rank: int, world: int, usual: str, accumulates: bool, net: type[Net] = Aside, **kwargs: Any) -> None:
    """Backwards of one kind on all ranks, then one that is not on the last."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrap(net(), **kwargs)
    for i in range(5):
        reaches = (usual == "parameters") != (i == 3 and rank == world - 1)
        with model.no_sync() if accumulates else contextlib.nullcontext():
            output, aside = model(torch.ones(2, 4, requires_grad=True))
            (output if reaches else aside).sum().backward()


@pytest.mark.ranks(2, reach, of=["usual"], accumulates=False, timeout=LIMIT)
@pytest.mark.parametrize(
    ("usual", "text"),
    [
        (
            "parameters",
            "rank 0 began a backward through 4 units, 3 flat gradients; rank 1 began a backward through 4 units, "
            "3 flat gradients, which computes no gradient of a parameter",
        ),
        (
            "nothing",
            "rank 0 began a backward through 4 units, 3 flat gradients, which computes no gradient of a parameter; "
            "rank 1 began a backward through 4 units, 3 flat gradients",
        ),
    ],
)
def test_one_backward_reaches_no_parameter(outcomes: list[fresh.Outcome], usual: str, text: str) -> None:
    assert reported_to_all(outcomes).startswith(f"ranks diverged at step 4: {text}.")


@pytest.mark.ranks(2, reach, "parameters", accumulates=False, net=Behind, join_units_below=0, timeout=LIMIT)
def test_so_it_is_where_that_backward_waits_for_a_frozen_unit(outcomes: list[fresh.Outcome]) -> None:
    """Which the others gather when they have reduced, with that rank, what it does not reach."""
    began_with = "began a backward through 4 units, 2 flat gradients"
    text = f"rank 0 {began_with}; rank 1 {began_with}, which computes no gradient of a parameter."
    assert reported_to_all(outcomes).startswith(f"ranks diverged at step 4: {text}")


class AfterFirst(Net):
    """Returns the output of its first block, too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        first = self.blocks[0](x)
        return first, super().forward(first, order=(1, 2))


def _fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError


def fail_afterwards(rank: int, world: int) -> None:
    """Queries of gradients that fail, and go on: on rank 0 after it has passed two units without gradients."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrap(AfterFirst(), sharding_strategy="SHARD_GRAD_OP", join_units_below=0)
    for _ in range(3):
        sum(output.sum() for output in model(torch.ones(2, 4))).backward()
    given = torch.ones(2, 4, requires_grad=True)
    x = given * 1.0
    first, last = model(x)
    (x if rank == 0 else last).register_hook(_fail)
    with contextlib.suppress(ZeroDivisionError):
        torch.autograd.grad((last if rank else first).sum(), given)
    model(torch.ones(2, 4))


@pytest.mark.ranks(2, fail_afterwards, timeout=LIMIT)
def test_a_backward_without_gradients_fails_later_than_another(outcomes: list[fresh.Outcome]) -> None:
    """Ranks have issued the same until then, nothing: so they go on."""
    assert all(outcome.error is None for outcome in outcomes), outcomes


@pytest.mark.ranks(2, reach, "parameters", accumulates=True, timeout=LIMIT)
def test_so_it_is_where_that_backward_accumulates(outcomes: list[fresh.Outcome]) -> None:
    began_with = "began a backward under no_sync() through 4 units, 3 flat gradients"
    text = f"rank 0 {began_with}; rank 1 {began_with}, which computes no gradient of a parameter."
    assert reported_to_all(outcomes).startswith(f"ranks diverged at step 4: {text}")


@pytest.mark.ranks(2, reach, "parameters", accumulates=False, net=Frozen, join_units_below=0, timeout=LIMIT)
def test_so_it_is_where_nothing_is_trained_and_that_backward_gathers_less(outcomes: list[fresh.Outcome]) -> None:
    text = "rank 1 ended a backward that computed no gradient of a parameter, and gathered 'blocks.2'"
    assert reported_to_all(outcomes) == f"ranks diverged at step 4: rank 0 went on in a backward; {text}{PARTING}"


@pytest.mark.ranks(3, part, "skips a unit", timeout=LIMIT)
def test_one_of_three_parts(outcomes: list[fresh.Outcome]) -> None:
    text = "ranks 0, 1 entered unit 'blocks.1'; rank 2 entered unit 'blocks.2'"
    assert reported_to_all(outcomes) == f"ranks diverged at step 3: {text}{PARTING}{REMEDY}"
    for outcome in outcomes[:2]:  # their wait ended with the error, not by force
        assert "AgreementError" in (outcome.error or ""), outcome


def stay(rank: int, world: int) -> None:
    model = trained()
    try:
        step(model, order=(0, 2) if rank == 1 else (0, 1, 2))
    finally:
        if rank == 1:  # its connections stay open: nothing wakes rank 0
            first = ProcessIdentity(*json.loads(inspect.note(model, "here/0")))
            deadline = time.monotonic() + LIMIT
            while not first.is_gone() and time.monotonic() < deadline:
                time.sleep(0.1)


@pytest.mark.ranks(2, stay, timeout=LIMIT)
def test_a_wait_that_nothing_ends_is_ended_by_force(outcomes: list[fresh.Outcome]) -> None:
    outcome = outcomes[0]
    assert outcome.exit_code == 1
    assert "AgreementError: ranks diverged at step 3" in outcome.output
    assert outcome.error is None, "it was not the exception that ended it"


def destroy_early(rank: int, world: int) -> None:
    """Rank 0 destroys its process group, and lives on; the other one then runs its units in another order."""
    model = trained()
    if rank == 0:
        dist.destroy_process_group()
        time.sleep(20)
    else:
        time.sleep(2)
        step(model, order=(1, 0, 2))


@pytest.mark.ranks(2, destroy_early, timeout=LIMIT)
def test_a_rank_that_destroyed_its_process_group_is_named(outcomes: list[fresh.Outcome]) -> None:
    text = "LostRankError: rank 0 destroyed its process group, after a backward in step 2. The remaining ranks cannot"
    assert outcomes[0].error is None and outcomes[1].exit_code == 1
    assert text in f"{outcomes[1].error}{outcomes[1].output}", outcomes[1]


def raise_uncaught(rank: int, world: int) -> None:
    model = trained()
    step(model, fail_at=2 if rank == 1 else None)


@pytest.mark.ranks(2, raise_uncaught, timeout=LIMIT)
def test_a_rank_that_dies_of_its_own_exception_is_named_by_the_others(outcomes: list[fresh.Outcome]) -> None:
    waiting, dying = outcomes
    assert "ValueError: out of luck" in (dying.error or "")
    # Which of its two notes is found first depends on how long it takes to die of it.
    text = (
        r"rank 1 (abandoned its iteration in the forward of unit 'blocks.1' after|ended with) ValueError: out of luck"
    )
    assert re.search(text, waiting.output), waiting
    assert waiting.exit_code == 1


def wrap_differently(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    if rank > 0:
        axes = pairs[rank // 2], pairs[2 + rank % 2]
        step(wrap(Net(), sharding_strategy="HYBRID_SHARD", process_group=axes))
    else:
        step(wrap(Net()))


@pytest.mark.ranks(4, wrap_differently, timeout=LIMIT)
def test_ranks_that_wrap_over_different_ranks(outcomes: list[fresh.Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code not in (0, None), (rank, outcome)
    for rank in (0, 1):
        assert (
            "AgreementError: ranks wait for each other in different places: "
            "rank 0 wraps a module over ranks 0, 1, 2, 3; rank 1 wraps a module over ranks 0, 1"
        ) in outcomes[rank].output


def leave(rank: int, world: int, destroys: bool) -> list[str]:
    model = trained()
    globals()["kept"] = model  # alive, with its thread, when the interpreter ends
    with torch.no_grad():
        model(torch.ones(2, 4))
    if destroys:
        dist.destroy_process_group()
    return sorted(thread.name for thread in threading.enumerate() if "watch" in thread.name)


@pytest.mark.parametrize("destroys", [False, True])
@pytest.mark.ranks(2, leave, of=["destroys"], timeout=LIMIT)
def test_a_program_ends_quietly_with_a_model_alive(outcomes: list[fresh.Outcome], destroys: bool) -> None:
    """Threads end with the process group at the latest: those who count them after it find none."""
    for outcome in outcomes:
        assert outcome.result == ([] if destroys else ["flatfsdp watch", "flatfsdp watch's clock"])
        assert outcome.exit_code == 0
        assert outcome.output == ""


def flip(rank: int, world: int, in_pattern: bool) -> None:
    dist.init_process_group("gloo")
    strategy = "NO_SHARD" if in_pattern else "FULL_SHARD"
    model = wrapped_game(strategy, use_orig_params=True)
    for number in range(8):
        if in_pattern:
            freeze_in_turn(model.module, number)
        weight = model.module.first.weight
        if number == 5 and rank == 1:
            weight.requires_grad_(not weight.requires_grad)
        model(batch(rank, number)).square().mean().backward()
        model.zero_grad()


@pytest.mark.parametrize("in_pattern", [False, True])
@pytest.mark.ranks(2, flip, of=["in_pattern"], timeout=LIMIT)
def test_a_parameter_that_one_rank_freezes_is_an_error_on_all(outcomes: list[fresh.Outcome], in_pattern: bool) -> None:
    # In the pattern it is the step in which all others train the second player.
    trains, freezes = (1, 0) if in_pattern else (0, 1)
    text = f"Parameter 'first.weight' requires a gradient on rank {trains}, but not on rank {freezes}. Set"
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert text in f"{outcome.error}{outcome.output}"


def skip(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    model = wrapped_game("NO_SHARD", use_orig_params=True)
    for number in range(3):
        model.module.skips_second = number == 2 and rank == 1
        model(batch(rank, number)).square().mean().backward()
        model.zero_grad()


@pytest.mark.ranks(2, skip, timeout=LIMIT)
def test_a_unit_that_one_rank_does_not_run_is_not_taken_for_a_frozen_one(outcomes: list[fresh.Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.exit_code == 1
        text = f"{outcome.error}{outcome.output}"
        assert "All ranks must run the same units" in text and "requires a gradient" not in text
