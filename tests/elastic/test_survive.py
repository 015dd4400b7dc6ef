"""A job outlives a killed rank: the same bits at the end as of an undisturbed run, and no step left out."""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from flatfsdp.checkpoint.ranks import CheckpointRanks
from flatfsdp.elastic import machines, start, survive
from flatfsdp.elastic.exchange import EpochRanks
from flatfsdp.elastic.keeper import Keeper
from flatfsdp.elastic.snapshot import Block
from flatfsdp.engine.agreement import process_groups
from flatfsdp.engine.watchdog.regions import current_watch, expecting
from flatfsdp.engine.wrapping.regrouping import Regrouping
from flatfsdp.errors import LostRankError, UsageError
from flatfsdp.trainer.demo.model import ByteTransformer
from tests.harness import fresh, pool
from tests.harness.fresh import Outcome
from tests.harness.thorough import spread

pytestmark = pytest.mark.process

MICROBATCHES, STEPS = 6, 5
PARTS = (range(2), range(2, STEPS))


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    return nn.Sequential(*layers)


class Tried(NamedTuple):
    """A model: a function that makes it, the class of its units, the path of the second one, and its loss."""

    make: Callable[[], nn.Module]
    unit: str
    second: str
    loss: Callable[[nn.Module, torch.Generator], torch.Tensor]


def demo() -> nn.Module:
    torch.manual_seed(0)
    return ByteTransformer(width=16, layers=2, heads=2, context=8)


def llama() -> nn.Module:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes))
    return made


def of_numbers(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    found: torch.Tensor = model(torch.randn(3, 16, generator=generator)).square().mean()
    return found


def of_tokens(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    tokens = torch.randint(256, (3, 8), generator=generator)
    found = model(tokens)
    return nn.functional.cross_entropy(getattr(found, "logits", found).flatten(0, 1), tokens.flatten())


MODELS = {
    "net": Tried(lambda: net(), "Linear", "2", of_numbers),  # which tests replace
    "demo": Tried(demo, "Block", "blocks.1", of_tokens),
    "llama": Tried(llama, "LlamaDecoderLayer", "model.layers.1", of_tokens),
}

WAYS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "fully_shard", "fully_shard, kept")
HYBRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "fully_shard, hybrid")


def sharded(way: str, tried: Tried) -> Any:
    """The model, sharded in one of `WAYS`, or of `HYBRIDS`: two replicas. Collective."""
    world = dist.get_world_size()
    names = ("replicate", "shard")
    replicas = 1 if world % 2 else 2  # a rank that joins builds the model alone
    shape = (replicas, world // replicas)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names) if way in HYBRIDS else None
    model = tried.make()
    units = [each for each in model.modules() if type(each).__name__ == tried.unit]
    if "fully_shard" not in way:
        options: dict[str, Any] = {
            "device_mesh": mesh,
            "auto_wrap_policy": {type(units[0])},
            "use_orig_params": True,
        }
        return FullyShardedDataParallel(model, sharding_strategy=way, deterministic_sums=True, **options)
    for module in [*units, model]:
        flatfsdp.fully_shard(module, mesh=mesh, reshard_after_forward="kept" not in way, deterministic_sums=True)
    return model


def die_in(moment: str, loss: torch.Tensor) -> None:
    """Kill this process in the backward of `loss`, or now."""
    if moment == "backward":
        loss.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    elif moment == "exception":
        raise ValueError("no such file")
    elif moment == "save":
        CheckpointRanks.exchange = lambda *unused: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    elif moment == "refresh":
        Block.take = is_killed_in_a_copy  # type: ignore
    elif moment.startswith("stopped for"):
        stop_for(float(moment.split()[2]))
    elif moment.startswith("slow save of"):
        slow_save(float(moment.split()[3]))
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def is_killed_in_a_copy(block: Block, *args: Any) -> None:
    block.memory[: block.nbytes // 2] = 77
    os.kill(os.getpid(), signal.SIGKILL)


def stop_for(seconds: float, after: float = 0.0) -> None:
    """Stop this process, or let it be stopped soon by another one, which wakes it."""
    if os.fork() == 0:
        if after:
            time.sleep(after)
            os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    if not after:
        os.kill(os.getpid(), signal.SIGSTOP)


def slow_save(seconds: float) -> None:
    """Let the next save of this rank take so long: others wait for it."""
    exchange = CheckpointRanks.exchange

    def exchanges(*given: Any) -> Any:
        CheckpointRanks.exchange = exchange  # type: ignore
        time.sleep(seconds)
        return exchange(*given)

    CheckpointRanks.exchange = exchanges  # type: ignore


# Moments of a recovery, with what `survive` calls then: there a process dies that has another loss to survive.
RECOVERY = {"as groups are made": "forget_calls", "as blocks are brought": "brought", "as the model moves": "regroup"}


def die_in_recovery(moment: str) -> None:
    owner = Keeper if moment == "as blocks are brought" else importlib.import_module("flatfsdp.elastic.survive")
    setattr(owner, RECOVERY[moment], lambda *unused, **named: os.kill(os.getpid(), signal.SIGKILL))


def train(
    rank: int,
    world: int,
    kills: dict[int, tuple[int, str]],
    group: int = 4,
    lost_after: float = 60.0,
    every: int = 1,
    pause: float = 0.0,
    parts: Sequence[range] = (range(STEPS),),
    saves: str = "",
    before: Callable[[int], None] = lambda rank: None,
    way: str = "FULL_SHARD",
    least_ranks: int = 1,
    at: Callable[[int, int], None] = lambda rank, number: None,
    name: str = "net",
) -> tuple[str, list[tuple[int, int]]]:
    """`kills`: by rank, the step and the moment in which it dies. Returned: a hash of the model, and (step, ranks) for
    each step that was taken to its end. `parts`: the steps, one loop for each; `saves`: the folder for checkpoints, of
    which each step writes one; `before`: called first, with the rank; `way`: of `sharded`; `at`: called in each step,
    with the rank and its number; `name`: of the model."""
    before(rank)
    start()
    tried = MODELS[name]
    model = sharded(way, tried)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    dies_in, moment = kills.get(rank, (-1, ""))
    if moment in RECOVERY:
        die_in_recovery(moment)
    taken = []
    state = {"scheduler": scheduler}
    options: dict[str, Any] = {"state": state, "group": group, "lost_after": lost_after, "every": every}
    options["least_ranks"] = least_ranks
    for step in itertools.chain.from_iterable(survive(model, optimizer, steps=part, **options) for part in parts):
        if step.number == dies_in and moment.startswith("after "):
            threading.Timer(float(moment.split()[1]), os.kill, (os.getpid(), signal.SIGKILL)).start()
        if step.number == dies_in and moment.startswith("pause of "):
            stop_for(float(moment.split()[2]), after=float(moment.split()[4]))
        with step:
            time.sleep(pause)
            at(rank, step.number)
            world, own = dist.get_world_size(), dist.get_rank()
            count = -(-MICROBATCHES // world)
            for number in range(count):
                index = own * count + number
                dies = step.number == dies_in and number == count - 1
                generator = torch.Generator().manual_seed(100 * step.number + index)
                with flatfsdp.microbatch(index if index < MICROBATCHES else None, of=MICROBATCHES):
                    if dies and moment == "forward":
                        hooked = model.get_submodule(tried.second)
                        hooked.register_forward_pre_hook(lambda *unused: die_in(moment, torch.ones(())))
                    loss = tried.loss(model, generator)
                    if dies and moment in ("backward", "exception"):
                        die_in(moment, loss)
                    loss.backward()
            if step.number == dies_in and (moment == "before the optimizer" or "stopped" in moment):
                die_in(moment, loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step.number == dies_in and (moment in ("boundary", "save", "refresh") or "slow" in moment):
                die_in(moment, loss)
            if saves:
                flatfsdp.checkpoint.save(f"{saves}/{step.number}", model=model, optimizer=optimizer, overwrite=True)
        if step.completed:
            taken.append((step.number, dist.get_world_size()))
    whole = FullyShardedDataParallel.summon_full_params(model) if "fully_shard" not in way else nullcontext()
    with whole:
        tensors = [getattr(each, "full_tensor", each.detach)().detach() for each in model.parameters()]
        values = b"".join(bytes(each.view(torch.uint8).flatten().tolist()) for each in tensors)
    dist.destroy_process_group()
    return hashlib.sha256(values + repr(optimizer.param_groups[0]["lr"]).encode()).hexdigest(), taken


def undisturbed(name: str = "net") -> str:
    (outcome,) = fresh.run(1, train, {}, name=name)
    assert outcome.error is None, outcome
    return outcome.result[0]


@pytest.fixture(scope="module")
def expected() -> str:
    return undisturbed()


def one_machine(rank: int) -> None:
    """All ranks are on this machine."""


def machine_each(rank: int) -> None:
    """Each rank is on a machine of its own."""
    machines.this_system = lambda: f"machine {rank}"  # type: ignore


def machine_of_two(rank: int) -> None:
    """Ranks 0 and 1 are on one machine, 2 and 3 on another."""
    machines.this_system = lambda: f"machine {rank // 2}"  # type: ignore


MOMENTS = ["forward", "backward", "exception", "before the optimizer", "boundary"]
JOBS = [(2, 0, one_machine), (4, 1, machine_of_two)]  # the number of ranks, the lost one, and where they are


@pytest.mark.parametrize(("job", "moment"), [*product([(3, 2, machine_each)], MOMENTS), *spread(JOBS, MOMENTS)])
def test_a_lost_rank_costs_nothing(job: tuple[int, int, Callable[[int], None]], moment: str, expected: str) -> None:
    world, lost, on = job
    outcomes = fresh.run(world, train, {lost: (2, moment)}, before=on, timeout=60)
    assert outcomes[lost].exit_code == (1 if moment == "exception" else -signal.SIGKILL), outcomes[lost]
    assert moment != "exception" or "ValueError: no such file" in (outcomes[lost].error or ""), outcomes[lost]
    check(outcomes, {lost}, expected)


def check(outcomes: list[Outcome], lost: set[int], expected: str, *, again: int = 1) -> None:
    """The survivors have taken all steps, at most so many of them again, and have the `expected` model."""
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank not in lost]
    for outcome in survivors:
        assert outcome.error is None and outcome.exit_code == 0, outcome
    for outcome in survivors:
        digest, taken = outcome.result
        assert sorted(dict(taken)) == list(range(STEPS)) and len(taken) <= STEPS + again, taken
        assert taken[-1] == (STEPS - 1, len(survivors)), outcome
        assert digest == expected


@pytest.mark.parametrize("way", ["fully_shard", "NO_SHARD"])
def test_other_ways_to_shard(way: str, expected: str) -> None:
    check(fresh.run(3, train, {1: (2, "backward")}, way=way, timeout=90), {1}, expected)


# Two replicas of two shards each: ranks 0 and 1 are a replica, and so are 2 and 3.
@pytest.mark.parametrize(
    ("way", "kills"),
    [
        ("HYBRID_SHARD", {1: (2, "backward")}),
        ("fully_shard, hybrid", {2: (2, "forward")}),
        ("_HYBRID_SHARD_ZERO2", {0: (2, "boundary"), 1: (2, "boundary")}),  # a replica
        ("fully_shard, hybrid", {0: (2, "backward"), 3: (2, "backward")}),  # another shard of each
    ],
)
def test_hybrids(way: str, kills: dict[int, tuple[int, str]], expected: str) -> None:
    check(fresh.run(4, train, kills, way=way, timeout=90), {*kills}, expected, again=2)


def test_a_shard_that_no_replica_has_ends_the_others_in_words() -> None:
    kills = {0: (2, "boundary"), 2: (2, "boundary")}
    outcomes = fresh.run(4, train, kills, way="HYBRID_SHARD", before=machine_each, timeout=60)
    for rank in (1, 3):
        assert "LostRankError: ranks 0, 2 are lost at once" in (outcomes[rank].error or ""), outcomes[rank]


def test_two_losses_in_different_groups(expected: str) -> None:
    kills = {0: (2, "backward"), 3: (2, "boundary")}
    check(fresh.run(4, train, kills, group=2, before=machine_each, timeout=90), {0, 3}, expected, again=2)


# Of one machine two ranks are no loss, and a machine with both of its ranks is one in each of two groups.
@pytest.mark.parametrize(("world", "on"), [(3, one_machine), (4, machine_of_two)])
def test_two_losses_of_one_machine(world: int, on: Callable[[int], None], expected: str) -> None:
    kills = {0: (2, "boundary"), 1: (2, "boundary")}
    check(fresh.run(world, train, kills, before=on, timeout=90), {0, 1}, expected, again=2)


def in_its_fourth_copy(end: Callable[[Block], None]) -> Callable[[int], None]:
    """What lets rank 1 come to an `end` in the middle of its fourth copy."""
    take, calls = Block.take, []

    def takes(self: Block, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 4:
            end(self)
        take(self, *args)

    def before(rank: int) -> None:
        if rank == 1:
            Block.take = takes  # type: ignore

    return before


def is_killed(rank: int) -> None:
    in_its_fourth_copy(is_killed_in_a_copy)(rank)


def has_no_memory(rank: int) -> None:
    def end(block: Block) -> None:
        raise OSError("no space left")

    in_its_fourth_copy(end)(rank)


@pytest.mark.parametrize("before", [is_killed, has_no_memory])
def test_a_rank_that_is_lost_in_a_copy_has_left_the_one_before(before: Callable[[int], None], expected: str) -> None:
    outcomes = fresh.run(3, train, {}, before=before, timeout=60)
    assert outcomes[1].exit_code == (-signal.SIGKILL if before is is_killed else 1), outcomes[1]
    check(outcomes, {1}, expected)


def test_one_loss_after_another(expected: str) -> None:
    kills = {1: (1, "forward"), 3: (3, "backward")}
    check(fresh.run(4, train, kills, timeout=90), {1, 3}, expected, again=2)


def test_steps_since_a_refresh_are_taken_again(expected: str) -> None:
    check(fresh.run(3, train, {1: (3, "backward")}, every=2, timeout=90), {1}, expected, again=2)


def test_two_losses_in_one_group_end_the_others_in_words(tmp_path: Path) -> None:
    kills = {0: (2, "boundary"), 1: (2, "boundary")}
    outcomes = fresh.run(3, train, kills, saves=str(tmp_path), before=machine_each, timeout=60)
    assert "LostRankError: ranks 0, 1 are lost at once" in (outcomes[2].error or ""), outcomes[2]
    assert f"again from {tmp_path}/1, the last checkpoint" in (outcomes[2].error or ""), outcomes[2]


def no_memory(rank: int) -> None:
    """Let `regroup` fail on rank 0."""

    def rebuild(self: Regrouping, **named: Any) -> None:
        raise MemoryError("nothing is left")

    if rank == 0:
        Regrouping.rebuild = rebuild  # type: ignore


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"least_ranks": 3}, "2 of least_ranks=3 are left after the loss of rank 1, which"),
        ({"before": no_memory}, "rank 0: MemoryError: nothing is left. "),
    ],
)
def test_too_few_ranks_end_in_words(options: Any, words: str) -> None:
    outcomes = fresh.run(3, train, {1: (2, "boundary")}, timeout=60, **options)
    for rank in (0, 2):
        found = outcomes[rank].error or ""
        assert "LostRankError: " + words in found, outcomes[rank]
        assert "Start the job again from the beginning: no checkpoint was saved" in found, outcomes[rank]


def test_a_pause_ends_nothing(expected: str) -> None:
    check(fresh.run(2, train, {1: (2, "stopped for 8")}, timeout=90), set(), expected)


def test_a_rank_that_wakes_too_late_is_fenced(expected: str) -> None:
    outcomes = fresh.run(3, train, {1: (2, "stopped for 14")}, lost_after=4.0, timeout=90)
    assert "FencedError: the others go on without this process" in (outcomes[1].error or ""), outcomes[1]
    check(outcomes, {1}, expected)


def with_a_store_of_rank_0(rank: int, world: int) -> None:
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    launcher = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        launcher.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(launcher.get("port")), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = FullyShardedDataParallel(net())
    next(iter(survive(model, steps=1)))


def test_a_store_that_a_rank_serves_is_refused() -> None:
    for outcome in fresh.run(2, with_a_store_of_rank_0, timeout=60):
        assert "UsageError: survive(): rank 0 serves the store" in (outcome.error or ""), outcome


def refused(rank: int, world: int) -> list[str]:
    """The refusals of models that a loss would end."""
    words = []
    stage, hooked = net(), FullyShardedDataParallel(net())  # a stage has a group of its own
    alone = [dist.new_group([each]) for each in range(world)][rank]
    hooked.register_comm_hook(None, lambda *unused: None)
    for model in (FullyShardedDataParallel(stage, process_group=alone), hooked):
        with pytest.raises(UsageError) as caught:
            next(survive(model, steps=1))
        words.append(str(caught.value))
    return words


def test_what_could_not_go_on_is_refused_when_it_begins() -> None:
    for of_stage, of_hook in pool.run(2, refused):
        assert "unit <root> is sharded over" in of_stage and "not survived by stages of a pipeline" in of_stage
        assert "the model could not move to the ranks that are left: " in of_hook and "register_comm_hook()" in of_hook


def test_a_kill_in_a_save_is_survived(tmp_path: Path, expected: str) -> None:
    outcomes = fresh.run(3, train, {1: (2, "save")}, saves=str(tmp_path), timeout=90)
    check(outcomes, {1}, expected)


def in_a_group_of_the_step(rank: int, number: int) -> None:
    """Let rank 1 die while all wait in a group that this step has made, rank 3 for ranks that live."""
    if number == 2 and dist.get_world_size() == 4:
        group = dist.new_group(range(4))
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1_000_000), group=group)


def test_waits_in_a_group_that_the_step_has_made_end(expected: str) -> None:
    check(fresh.run(4, train, {}, at=in_a_group_of_the_step, timeout=40), {1}, expected)


def test_each_of_two_loops_survives_a_loss(expected: str) -> None:
    outcomes = fresh.run(4, train, {2: (1, "backward"), 0: (3, "forward")}, parts=PARTS, timeout=90)
    check(outcomes, {0, 2}, expected, again=2)


# -- a second loss while the others recover from a first one -----------------------------------------------------------


def lost_between(rank: int) -> None:
    """Let the last rank die when the next epoch is agreed on, before groups are made, and others learn of it there."""

    def waits() -> None:
        if rank == started() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0)
        forget()

    module = importlib.import_module("flatfsdp.elastic.survive")
    forget, module.forget_calls = module.forget_calls, waits  # type: ignore


def lost_in_regroup(rank: int) -> None:
    """Let the last rank die in the first `regroup`."""
    if rank == started() - 1:
        module = importlib.import_module("flatfsdp.elastic.survive")
        module.regroup = lambda *unused, **named: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore


def lost_in_the_last_refresh(rank: int) -> None:
    """Let the last rank die at the end of the refresh after a recovery, which returns on rank 0 and fails on others."""
    finish, calls = EpochRanks.finish, []

    def finishes(self: EpochRanks) -> None:
        finish(self)
        calls.append(dist.get_world_size())
        if calls.count(started() - 1) == 2 and calls[-1] == started() - 1 and rank:  # the first is of `_meet`
            if rank == started() - 1:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            raise LostRankError("it has not returned here")

    EpochRanks.finish = finishes  # type: ignore


def started() -> int:
    """The number of ranks at the start."""
    return int(os.environ["WORLD_SIZE"])


@pytest.mark.parametrize(("world", "before"), [(4, lost_between), (5, lost_in_regroup), (4, lost_in_the_last_refresh)])
def test_another_loss_while_others_recover(world: int, before: Callable[[int], None], expected: str) -> None:
    outcomes = fresh.run(world, train, {1: (2, "backward")}, group=2, before=before, timeout=60)
    check(outcomes, {1, world - 1}, expected, again=2)


def runs_out(timeout: Any) -> None:
    raise RuntimeError("Gloo connectFullMesh failed: timed out")


def not_connected_in_time(rank: int) -> None:
    """Let the first try to connect the survivors fail on rank 0, while the others wait for it with groups that are
    whole."""

    def brings(*given: Any) -> Any:
        Keeper.brought = brought  # type: ignore
        process_groups.with_time_limit(60.0, runs_out)

    if rank == 0:
        brought, Keeper.brought = Keeper.brought, brings  # type: ignore


def never_connected(odd: int, rank: int) -> None:
    """Let all tries to connect others fail on the rank `odd`."""
    module = importlib.import_module("flatfsdp.elastic.survive")
    module.TRIES, module.NOTICED = 2, 0.5  # type: ignore
    if rank == odd:
        EpochRanks.send = lambda *unused: process_groups.with_time_limit(60.0, runs_out)  # type: ignore


def test_ranks_that_cannot_be_connected_end_in_words() -> None:
    before = functools.partial(never_connected, 0)
    outcomes = fresh.run(3, train, {1: (2, "backward")}, before=before, timeout=60)
    for rank in (0, 2):
        words = "the 2 ranks that are left could not be connected to each other in 2 tries, the last of which failed "
        assert "LostRankError: " + words in (outcomes[rank].error or ""), outcomes[rank]
        assert "Start the job again from the beginning" in (outcomes[rank].error or ""), outcomes[rank]


def test_survivors_that_are_not_connected_in_time_all_try_again(expected: str) -> None:
    outcomes = fresh.run(4, train, {1: (2, "backward")}, before=not_connected_in_time, timeout=40)
    check(outcomes, {1}, expected)


def tries_to_connect(rank: int, world: int) -> str:
    """Rank 1 does not come to a group that rank 0 tries to make, and waits for that rank elsewhere. Returned: why its
    own wait would be in vain."""
    dist.init_process_group("gloo")
    if rank == 0:
        with process_groups.Connecting(0.5), pytest.raises(RuntimeError):
            process_groups.new_group((0, 1), "tries")
        time.sleep(3.0)  # a poll of the watch takes less
        dist.send(torch.zeros(1), 1)
        return ""
    with expecting((0, 1), "waits for rank 0"):
        dist.recv(torch.zeros(1), 0)
    return str(current_watch().failure or "")


def test_one_that_was_not_connected_in_time_ends_no_other_rank() -> None:
    """The time limit was that of connecting. It was reported as that of the process group, for which waits of all ranks
    are in vain."""
    outcomes = fresh.run(2, tries_to_connect, timeout=60)
    assert [(each.result, each.exit_code) for each in outcomes] == [("", 0), ("", 0)], outcomes
