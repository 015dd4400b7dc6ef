"""Optimizer state of optimizers, ranks and dicts that differ; its cost; errors and their messages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import FullOptimStateDictConfig, OptimStateKeyType
from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.engine.state.owned_interval import OwnedInterval
from flatfsdp.errors import FlatFSDPError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import Net, Setting, data, joined, loss_of, seeded
from tests.harness.models import WIDTH, Feedforward
from tests.state.optim.test_optim_state import Pair, different

pytestmark = pytest.mark.distributed

BOTH = (Setting(orig=True), Setting(orig=False))
ORIG, FLAT = BOTH


def wrapped(setting: Setting, build: Callable[[], nn.Module] = Net, **more: Any) -> Any:
    return setting.wrap(seeded(build), (Feedforward,), **more)


def stepped(model: Any, optim: torch.optim.Optimizer, rank: int, steps: int = 2) -> dict[str, Any]:
    """The whole state after some steps."""
    for step in range(steps):
        optim.zero_grad()
        loss_of(model(data(rank, step))).backward()
        optim.step()
    return FSDP.full_optim_state_dict(model, optim, rank0_only=False)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


# --- optimizers that are not alike ------------------------------------------------------------------------------------


def in_another_order(rank: int, world: int) -> list[str]:
    """Every rank builds its groups in an order of its own, and loads into another one."""
    lines = []

    def groups(model: Any, turn: int) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        biases = [p for name, p in named if "bias" in name]
        rest = [p for name, p in named if "bias" not in name]
        made = [{"params": biases[::-1], "lr": 0.5}, {"params": rest, "lr": 0.01, "weight_decay": 0.1}]
        return made[:: -1 if turn % 2 else 1]

    model, plain = wrapped(ORIG), wrapped(ORIG)
    found = stepped(model, adam(groups(model, rank)), rank)
    expected = stepped(plain, adam(groups(plain, 0)), rank)
    lines += list(different(found["state"], expected["state"]))
    optim = adam(groups(model, rank + 1))
    optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, found))
    again = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    lines += list(different(again["state"], expected["state"]))
    settings = {tuple(sorted(group["params"])): (group["lr"], group["weight_decay"]) for group in again["param_groups"]}
    if sorted(settings.values()) != [(0.01, 0.1), (0.5, 0)]:
        lines.append(str(settings))
    return lines


def test_groups_in_an_order_of_each_ranks_own(pool2: Run) -> None:
    assert not joined(pool2(in_another_order))


def split_and_merged(rank: int, world: int) -> list[str]:
    """Two groups with equal settings load into one, and one into two, between flat and original parameters."""
    lines = []
    model, optim = wrapped(ORIG), None
    params = list(model.parameters())
    optim = adam([{"params": params[:5]}, {"params": params[5:]}])
    whole = stepped(model, optim, rank)
    flat = wrapped(FLAT)
    flat_optim = adam(flat.parameters())
    flat_optim.load_state_dict(FSDP.shard_full_optim_state_dict(whole, flat, optim=flat_optim))
    one = FSDP.full_optim_state_dict(flat, flat_optim, rank0_only=False)
    lines += list(different(one["state"], whole["state"]))
    optim = adam([{"params": params[:5]}, {"params": params[5:]}])
    optim.load_state_dict(FSDP.shard_full_optim_state_dict(one, model, optim=optim))
    lines += list(different(FSDP.full_optim_state_dict(model, optim, rank0_only=False)["state"], whole["state"]))
    whole["param_groups"][1]["lr"] = 0.7
    lines += refused(
        lambda: FSDP.shard_full_optim_state_dict(whole, flat, optim=flat_optim),
        "param group 0 of this optimizer has parameters of its param groups 0 and 1, which differ in 'lr'",
    )
    return lines


def refused(call: Callable[[], Any], words: str) -> list[str]:
    """A line unless `call` raises a flatfsdp error with these words."""
    try:
        call()
    except FlatFSDPError as error:
        return [] if words in str(error) else [f"expected {words!r}, found {type(error).__name__}: {error}"]
    return [f"nobody refused: {words!r}"]


def test_groups_are_split_and_merged(pool2: Run) -> None:
    assert not joined(pool2(split_and_merged))


def shared(rank: int, world: int) -> list[str]:
    """Two optimizers on one model, one of which has not stepped; a unit without elements between them."""
    lines = []
    for setting in BOTH:
        model = setting.wrap(nn.Sequential(seeded(Net), Nothing()), (Feedforward, Nothing))
        params = list(model.parameters())
        first, second = adam(params[::2]), adam(params[1::2])
        loss_of(model(data(rank, 0))).backward()
        first.step()
        one, two = (FSDP.full_optim_state_dict(model, each, rank0_only=False) for each in (first, second))
        names = {name for name, _ in nn.Sequential(Net(), Nothing()).named_parameters()}
        if set(one["state"]) & set(two["state"]) or {*one["state"], *two["state"]} | {"1.nothing"} != names:
            lines.append(f"{setting}: {set(one['state'])}, {set(two['state'])}")
        steps = [{float(entry["step"]) for entry in each["state"].values()} for each in (one, two)]
        if steps != [{1.0}, {0.0}]:
            lines.append(f"{setting}: {steps}")
        for each, state in ((first, one), (second, two)):
            loaded = FSDP.scatter_full_optim_state_dict(state if rank == 0 else None, model, optim=each)
            each.load_state_dict(loaded)
            lines += different(FSDP.full_optim_state_dict(model, each, rank0_only=False)["state"], state["state"])
    return lines


class Nothing(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 2))

    def forward(self, x: Any) -> Any:
        return x + self.nothing.sum()


def test_two_optimizers_on_one_model(pool2: Run) -> None:
    assert not joined(pool2(shared))


class Partly(nn.Module):
    """The last layer has no gradients: a hook takes them away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x))


def without_last(optim: torch.optim.Optimizer, model: Any) -> torch.optim.Optimizer:
    def forget(*_: Any) -> None:
        for parameter in model.last.parameters():
            parameter.grad = None

    optim.register_step_pre_hook(forget)
    return optim


def partly(rank: int, world: int) -> list[str]:
    """Some parameters of a unit have no state yet: exactly so with original parameters, and refused in flat ones."""
    model = ORIG.wrap(Partly(), ())
    whole = stepped(model, without_last(adam(model.parameters()), model), rank)
    lines = [] if set(whole["state"]) == {"first.weight", "first.bias"} else [str(set(whole["state"]))]
    optim = adam(model.parameters())
    optim.load_state_dict(FSDP.shard_full_optim_state_dict(whole, model, optim=optim))
    lines += list(different(FSDP.full_optim_state_dict(model, optim, rank0_only=False)["state"], whole["state"]))
    flat = FLAT.wrap(Partly(), ())
    flat_optim = adam(flat.parameters())
    lines += refused(
        lambda: FSDP.shard_full_optim_state_dict(whole, flat, optim=flat_optim),
        "state 'step' is a tensor, 2.0, torch.float32 for 'first.weight' and missing for 'last.weight', 'last.bias'",
    )
    for entry in whole["state"].values():
        del entry["step"]
    loadable = FSDP.shard_full_optim_state_dict(whole, flat, optim=flat_optim)
    found = FSDP.optim_state_dict(flat, flat_optim, {"state": loadable["state"], "param_groups": [{"params": [0]}]})
    lines += list(different({k: found["state"][k] for k in whole["state"]}, whole["state"]))
    if found["state"]["last.weight"]["exp_avg"].any():
        lines.append("zeros for what has no state")
    return lines


def test_state_of_some_parameters_only(pool2: Run) -> None:
    assert not joined(pool2(partly))


def beside(rank: int, world: int) -> list[str]:
    """State that belongs to no parameter, and changed state dicts of the optimizer."""
    model = wrapped(ORIG)
    optim = adam(model.parameters())
    optim.state["seen"] = {"samples": 17}  # type: ignore[index]
    whole = stepped(model, optim, rank)
    lines = [] if whole["state"]["seen"] == {"samples": 17} else ["not kept"]
    fresh = adam(model.parameters())
    fresh.state["seen"] = {}  # type: ignore[index]
    FSDP.optim_state_dict_to_load(model, fresh, whole, load_directly=True)
    if fresh.state["seen"] != {"samples": 17}:  # type: ignore[index]
        lines.append("not loaded")
    changed = optim.state_dict()
    changed["param_groups"][0]["lr"] = 7.0
    if FSDP.optim_state_dict(model, optim, changed)["param_groups"][0]["lr"] != 7.0:
        lines.append("optim_state_dict= is not looked at")
    return lines


def test_state_beside_parameters(pool2: Run) -> None:
    assert not joined(pool2(beside))


class Rows(torch.optim.Optimizer):
    """State per row and column, as Adafactor's, where the parameter has two dimensions; else of two elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.numel():
                state = self.state[p]
                if p.dim() == 2:
                    state["row"], state["column"] = p.grad.square().mean(1), p.grad.square().mean(0)
                state["both"] = [p.grad.sum().reshape(1), 3]
                p.add_(p.grad, alpha=-0.1)


def odd_shapes(rank: int, world: int) -> list[str]:
    whole = Setting("NO_SHARD").wrap(seeded(Net), (Feedforward,))
    optim = Rows(whole.parameters())
    state = stepped(whole, optim, rank)
    lines = []
    if state["state"]["head.weight"]["row"].shape != (3,) or state["state"]["head.weight"]["column"].shape != (WIDTH,):
        lines.append(str(state["state"]["head.weight"]))
    fresh = Rows(whole.parameters())
    fresh.load_state_dict(FSDP.scatter_full_optim_state_dict(state if rank == 0 else None, whole, optim=fresh))
    again = FSDP.full_optim_state_dict(whole, fresh, rank0_only=False)["state"]
    lines += list(different(again, state["state"]))
    split = wrapped(ORIG)
    lines += refused(
        lambda: stepped(split, Rows(split.parameters()), rank),
        "is a list that holds tensors, but the parameter is split",
    )
    pieces = ORIG.wrap(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), ())
    optim = Rows(pieces.parameters())  # each parameter lies on one rank
    pieces(torch.ones(2, 4)).sum().backward()
    optim.step()
    found = FSDP.full_optim_state_dict(pieces, optim, rank0_only=False)["state"]
    if set(found) != {"0.weight", "1.weight"} or found["0.weight"]["both"][1] != 3:
        lines.append(f"of parameters on one rank: {found}")
    return lines


def test_states_of_other_shapes(pool2: Run) -> None:
    assert not joined(pool2(odd_shapes))


# --- ranks that are not alike -----------------------------------------------------------------------------------------


def on_one_rank(rank: int, world: int, what: str) -> str:
    """A fault on rank 1 only; the report of each rank."""
    model = wrapped(ORIG)
    optim = adam(model.parameters())
    whole = stepped(model, optim, rank)
    call: Callable[[], Any] = lambda: FSDP.full_optim_state_dict(model, optim)  # noqa: E731
    if rank == 1 and what == "another parameter":
        optim.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    elif rank == 1 and what == "without a parameter":
        for parameter in optim.param_groups[0]["params"][-2:]:
            del optim.state[parameter]
        del optim.param_groups[0]["params"][-2:]
    elif rank == 1 and what == "without a state":
        for state in optim.state.values():
            state.pop("exp_avg")
    elif rank == 1 and what == "without states":
        optim.state.clear()
    elif rank == 1 and what == "another count":
        for state in optim.state.values():
            state["step"] += 1
    elif rank == 1 and what == "what does not travel":
        for state in optim.state.values():
            state["function"] = lambda: 0
    elif rank == 1 and what == "another kind":
        call = lambda: FSDP.sharded_optim_state_dict(model, optim)  # noqa: E731
    elif rank == 1 and what == "another call":
        call = lambda: FSDP.optim_state_dict_to_load(model, optim, whole)  # noqa: E731
    elif what == "another source":
        load = FSDP.scatter_full_optim_state_dict if rank == 0 else FSDP.flatten_sharded_optim_state_dict
        call = lambda: load(whole, model, optim=optim)  # type: ignore[operator]  # noqa: E731
    elif what == "another dict":
        given = {"state": {}, "param_groups": []} if rank == 1 else whole
        call = lambda: FSDP.optim_state_dict_to_load(model, optim, given)  # noqa: E731
    elif what == "less in its dict":
        given = copy.deepcopy(whole)
        if rank == 1:
            del given["state"]["head.bias"]
        call = lambda: FSDP.optim_state_dict_to_load(model, optim, given)  # noqa: E731
    elif what == "no dict":
        given = {} if rank == 1 else whole
        call = lambda: FSDP.optim_state_dict_to_load(model, optim, given)  # noqa: E731
    elif what == "a wrong dict on rank 0":
        given = {"param_groups": []} if rank == 0 else None  # type: ignore[dict-item, assignment]
        call = lambda: FSDP.scatter_full_optim_state_dict(given, model, optim=optim)  # noqa: E731
    text = raised_by(call)
    if what == "another call":
        return text  # nothing goes on where ranks diverge
    assert dist.get_world_size() == int(torch.ones(1).mul_(world))
    other = adam(model.parameters())
    assert not list(different(stepped(model, other, rank)["state"], stepped(model, other, rank, 0)["state"]))
    return text


def raised_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except FlatFSDPError as error:
        return f"{type(error).__name__}: {error}"
    return ""


ON_ONE_RANK = {
    "another parameter": (
        "AgreementError: rank 1: param group 1 of the optimizer holds a parameter of shape (3,)",
        "UsageError: param group 1 of the optimizer holds a parameter of shape (3,) that is not in the model",
    ),
    "without a parameter": ("AgreementError: optimizer state of 'head.weight': ", "do not hold it"),
    "without a state": ("has exp_avg, exp_avg_sq, step, rank 1 has exp_avg_sq, step",) * 2,
    "without states": ("but the optimizers of rank 1, which also own elements of it, have no state for it",) * 2,
    "another count": ("rank 0 has a tensor, 2.0, torch.float32, rank 1 has a tensor, 3.0, torch.float32",) * 2,
    "what does not travel": (
        "AgreementError: rank 1: a builtins.function cannot be sent to other ranks",
        "UsageError: a builtins.function cannot be sent to other ranks",
    ),
    "another kind": (
        "AgreementError: rank 0 gathers the state of an optimizer; rank 1 takes this rank's elements of the state",
    )
    * 2,
    "another call": ("step 2: rank 0 called optim_state_dict(); rank 1 called optim_state_dict_to_load(). All ranks",)
    * 2,
    "another source": ("rank 0 loads the state of an optimizer from the first rank; rank 1 loads the state of",) * 2,
    "another dict": ("AgreementError: rank 1: optim_state_dict: none of its param groups has", "ConfigValueError: "),
    "less in its dict": (
        "difference is in 'head.bias': rank 0 exp_avg (3,) torch.float32, exp_avg_sq (3,) torch.float32; rank 1 no",
    )
    * 2,
    "no dict": (
        "AgreementError: rank 1: optim_state_dict: expected the keys",
        "pass FullOptimStateDictConfig(rank0_only",
    ),
    "a wrong dict on rank 0": (
        "ConfigValueError: optim_state_dict: expected the keys",
        "AgreementError: rank 0: optim_state_dict: expected the keys",
    ),
}


@pytest.mark.parametrize("what", ON_ONE_RANK)
def test_what_is_wrong_on_one_rank_fails_on_all(what: str, pool2: Run) -> None:
    for text, words in zip(pool2(on_one_rank, what), ON_ONE_RANK[what], strict=True):
        assert words in text


def apart(rank: int, world: int) -> list[str]:
    """A unit that rank 0 has no part in cannot be sent its state by rank 0."""
    groups = [dist.new_group([each]) for each in range(world)]
    alone = FSDP(nn.Linear(WIDTH, WIDTH), process_group=groups[rank], use_orig_params=True)
    model = nn.Sequential(alone, FSDP(nn.Linear(WIDTH, 3), use_orig_params=True))
    optim = adam(model.parameters())
    model(data(rank, 0)).sum().backward()
    for parameter in alone.parameters():
        dist.all_reduce(parameter.grad)
    optim.step()
    whole = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    loadable = FSDP.shard_full_optim_state_dict(whole, model, optim=optim)
    lines = list(different(loadable["state"], optim.state_dict()["state"]))
    return lines + refused(
        lambda: FSDP.scatter_full_optim_state_dict(whole, model, optim=optim),
        "is sharded over ranks that do not include rank 0, which has the state",
    )


def test_units_without_the_first_rank(pool2: Run) -> None:
    assert not joined(pool2(apart))


# --- dicts that do not fit --------------------------------------------------------------------------------------------


def misfits(rank: int, world: int, orig: bool) -> list[str]:
    model = wrapped(Setting(orig=orig))
    optim = adam(model.parameters())
    whole = stepped(model, optim, rank)

    def load(change: Callable[[Any], Any]) -> Callable[[], Any]:
        changed = copy.deepcopy(whole)
        change(changed)
        return lambda: FSDP.shard_full_optim_state_dict(changed, model, optim=optim)

    def rename(state_dict: Any) -> None:
        state_dict["state"]["head.wait"] = state_dict["state"].pop("head.weight")

    lines = refused(load(lambda d: d.pop("state")), 'expected the keys "state" and "param_groups", found [')
    lines += refused(load(rename), "the model has no parameters named 'head.wait'. Did you mean 'head.weight'?")
    lines += refused(
        load(lambda d: d["state"]["head.weight"].update(exp_avg=torch.zeros(2, 2))),
        "state 'exp_avg' of 'head.weight' has shape (2, 2), the parameter (3, 13)",
    )
    lines += refused(
        lambda: FSDP.shard_full_optim_state_dict(optim.state_dict(), model),
        "its parameters are identified by numbers (",
    )
    lines += refused(lambda: FSDP.shard_full_optim_state_dict(None, model), "got NoneType. Accepted: a dict")  # type: ignore[arg-type]
    few = adam(list(model.parameters())[:1])
    lines += refused(lambda: FSDP.shard_full_optim_state_dict(whole, model, optim=few), "this optimizer does not hold")
    lines += refused(
        load(lambda d: d["param_groups"][0]["params"].remove("head.bias")), "none of its param groups has 'head.bias'"
    )
    if not orig:
        lines += refused(
            load(lambda d: d["state"]["head.weight"].pop("exp_avg")),
            "'head.weight' has the states 'exp_avg_sq', 'step', 'head.bias' has 'exp_avg', 'exp_avg_sq', 'step'",
        )
        lines += refused(
            load(lambda d: d["state"]["head.bias"].update(step=torch.tensor(9.0))),
            "state 'step' is a tensor, 2.0, torch.float32 for 'head.weight', and a tensor, 9.0, torch.float32 for",
        )
        lines += refused(
            load(lambda d: d["state"]["head.bias"].update(exp_avg=torch.zeros(3).double())),
            "state 'exp_avg' has different dtypes: torch.float32 for 'head.weight', torch.float64 for 'head.bias'",
        )
        lines += refused(
            load(lambda d: d["state"]["head.bias"].update(exp_avg=1)),
            "state 'exp_avg' of 'head.weight' is a tensor, that of 'head.bias' is 1",
        )
    if not orig:
        leaf = model.blocks[0].module.up.weight
        lines += refused(
            lambda: FSDP.full_optim_state_dict(model, adam([leaf])), "holds 'blocks.0.up.weight', which was flattened"
        )
    return lines


@pytest.mark.parametrize("orig", [True, False])
def test_dicts_that_do_not_fit(orig: bool, pool2: Run) -> None:
    assert not joined(pool2(misfits, orig))


def foreign_intervals(rank: int, world: int) -> list[str]:
    """Intervals that another wrapping owns are refused on all ranks; those of the same one are loaded as they are."""
    model, other = wrapped(ORIG), ORIG.wrap(seeded(Net), ())
    optim, other_optim = adam(model.parameters()), adam(other.parameters())
    whole = stepped(model, optim, rank)
    stepped(other, other_optim, rank)
    mine = FSDP.sharded_optim_state_dict(model, optim)
    foreign = FSDP.sharded_optim_state_dict(other, other_optim)
    fresh = adam(model.parameters())
    fresh.load_state_dict(FSDP.flatten_sharded_optim_state_dict(mine, model, fresh))
    lines = list(different(FSDP.full_optim_state_dict(model, fresh, rank0_only=False)["state"], whole["state"]))
    return lines + refused(
        lambda: FSDP.flatten_sharded_optim_state_dict(foreign, model, fresh),
        "it was created on a different number of ranks",
    )


def test_intervals_of_another_wrapping(pool2: Run) -> None:
    assert not joined(pool2(foreign_intervals))


# --- keys, groups, and other forms of dicts ---------------------------------------------------------------------------


def rekeyed(rank: int, world: int) -> list[str]:
    """A single process goes on with the state of many, and many with its."""
    pair = Pair(ORIG, "one unit").train(rank)
    whole = pair.full()
    numbers = FSDP.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_ID, pair.plain)
    plain = adam(pair.plain.parameters())
    plain.load_state_dict(numbers)
    names = FSDP.rekey_optim_state_dict(plain.state_dict(), OptimStateKeyType.PARAM_NAME, pair.plain, optim=plain)
    lines = list(different(names["state"], whole["state"]))
    if FSDP.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_NAME, pair.plain) is not whole:
        lines.append("a dict that has such keys already")
    params = list(pair.plain.parameters())
    groups = [{"params": params[3:]}, {"params": params[0]}, {"params": params[1:3]}]
    other = adam(copy.deepcopy(groups))
    other = adam(groups)
    by_input = FSDP.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_ID, pair.plain, optim_input=groups)
    by_optim = FSDP.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_ID, pair.plain, optim=other)
    lines += list(different(by_input["state"], by_optim["state"]))
    if not torch.equal(by_input["state"][len(params) - 3]["exp_avg"], whole["state"]["0.norm.weight"]["exp_avg"]):
        lines.append("numbers are not those of optim_input")
    flat = FLAT.wrap(nn.Linear(3, 2), ())
    lines += refused(
        lambda: FSDP.rekey_optim_state_dict(
            {"state": {}, "param_groups": [{"params": ["weight", "bias"]}]}, OptimStateKeyType.PARAM_ID, flat
        ),
        "is a flat parameter of 2 parameters",
    )
    lines += refused(
        lambda: FSDP.rekey_optim_state_dict(
            {"state": {}, "param_groups": [{"params": ["wait"]}]}, OptimStateKeyType.PARAM_ID, pair.plain
        ),
        "the optimizer has no parameters 'wait'",
    )
    return lines


def test_names_and_numbers(pool2: Run) -> None:
    assert not joined(pool2(rekeyed))


def given_otherwise(rank: int, world: int) -> list[str]:
    """`optim_input`, `group` and optimizers that go by names."""
    lines = []
    for setting in BOTH:
        model = wrapped(setting)
        params = list(model.parameters())
        groups = [{"params": params[1:]}, {"params": params[:1]}]
        optim = adam([dict(each) for each in groups])
        whole = stepped(model, optim, rank)
        by_input = FSDP.full_optim_state_dict(model, optim, groups, rank0_only=False, group=dist.group.WORLD)
        lines += list(different(by_input["state"], whole["state"]))
        loadable = FSDP.shard_full_optim_state_dict(whole, model, groups)
        lines += list(
            different(loadable["state"], FSDP.shard_full_optim_state_dict(whole, model, optim=optim)["state"])
        )
        keys = {id(p): name for name, p in model.named_parameters()}
        by_name = {
            "state": {keys[id(p)]: state for p, state in optim.state.items()},
            "param_groups": [{"params": [keys[id(p)] for p in group["params"]]} for group in groups],
        }
        lines += list(different(FSDP.optim_state_dict(model, optim, by_name)["state"], whole["state"]))
        named = FSDP.optim_state_dict_to_load(model, optim, whole, is_named_optimizer=True)
        if set(named["state"]) != set(keys.values()):
            lines.append(f"{setting}: {set(named['state'])}")
        with FSDP.state_dict_type(model, "FULL", None, FullOptimStateDictConfig(rank0_only=True)):
            found = FSDP.optim_state_dict(model, optim)
        if bool(found) is not (rank == 0):
            lines.append("rank0_only")
    return lines


def test_other_ways_to_give_it(pool2: Run) -> None:
    assert not joined(pool2(given_otherwise))


def plain_root() -> nn.Module:
    return nn.Sequential(Feedforward(WIDTH, 20), nn.Linear(WIDTH, 3), Feedforward(3, 5))


def by_other_names(rank: int, world: int) -> list[str]:
    """A tied parameter under its second name, and names with the attributes of wrappers."""
    lines = []
    for setting in BOTH:
        pair = Pair(setting).train(rank)
        whole = pair.full()
        renamed = copy.deepcopy(whole)
        for old, new in {
            "first.weight": "last.weight",
            "blocks.0.up.bias": "blocks.0._fsdp_wrapped_module.up.bias",
        }.items():
            renamed["state"][new] = renamed["state"].pop(old)
            names = renamed["param_groups"][0]["params"]
            names[names.index(old)] = new
        for way in (FSDP.shard_full_optim_state_dict, FSDP.scatter_full_optim_state_dict):
            loaded = way(renamed, pair.model, optim=pair.optim)
            lines += different(loaded["state"], way(whole, pair.model, optim=pair.optim)["state"])
    return lines


def test_other_names_of_a_parameter(pool2: Run) -> None:
    assert not joined(pool2(by_other_names))


def without_elements(rank: int, world: int) -> list[str]:
    """A parameter without elements does not affect the state that its flat parameter loads."""
    pair = Pair(FLAT).train(rank)
    lines = []
    for change in (lambda d: d.pop("nothing"), lambda d: d["nothing"].update(step=torch.tensor(0.0))):
        whole = pair.full()
        change(whole["state"])  # type: ignore[no-untyped-call]
        loaded = FSDP.shard_full_optim_state_dict(whole, pair.model, optim=pair.optim)
        lines += different(loaded["state"], pair.optim.state_dict()["state"])
    return lines


def test_a_parameter_without_elements(pool2: Run) -> None:
    assert not joined(pool2(without_elements))


def local(rank: int, world: int) -> list[str]:
    """LOCAL_STATE_DICT: optimizer state knows no layout, so it is this rank's intervals, too."""
    lines = []
    for setting in BOTH:
        pair = Pair(setting).train(rank)
        with FSDP.state_dict_type(pair.model, "LOCAL_STATE_DICT"):
            found = FSDP.optim_state_dict(pair.model, pair.optim)
            loadable = FSDP.optim_state_dict_to_load(pair.model, pair.optim, found)
        if not isinstance(found["state"]["first.weight"]["exp_avg"], OwnedInterval):
            lines.append(f"{setting}: {type(found['state']['first.weight']['exp_avg'])}")
        expected = FSDP.shard_full_optim_state_dict(pair.full(), pair.model, optim=pair.optim)
        lines += different(loadable["state"], expected["state"])
    return lines


def test_local_state_dicts(pool2: Run) -> None:
    assert not joined(pool2(local))


def on_some_ranks(rank: int, world: int) -> list[str]:
    """A model on ranks 1 and 2 alone: the first of them gets the state of one rank."""
    group = dist.new_group([1, 2])
    if rank not in (1, 2):
        return []
    model = FSDP(seeded(Net), process_group=group, use_orig_params=True, auto_wrap_policy={Feedforward})
    optim = adam(model.parameters())
    stepped(model, optim, rank)
    one = FSDP.full_optim_state_dict(model, optim)
    lines = [] if bool(one) is (rank == 1) else [f"rank {rank} has {len(one)} entries"]
    loaded = FSDP.scatter_full_optim_state_dict(one, model, optim=optim, group=group)
    lines += different(loaded["state"], optim.state_dict()["state"])
    if rank == 2:
        optim.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
    text = raised_by(lambda: FSDP.full_optim_state_dict(model, optim))
    if ("AgreementError: rank 2: param group 0" if rank == 1 else "UsageError: param group 0") not in text:
        lines.append(text)
    return lines


def test_a_model_on_some_ranks(pool3: Run) -> None:
    assert not joined(pool3(on_some_ranks))


def several(rank: int, world: int) -> list[str]:
    """Wrapped parts of a root that is not wrapped, each with an optimizer of its own, and one over both."""
    module: Any = seeded(plain_root)
    names = {name for name, _ in module.named_parameters()}
    module[0], module[2] = ORIG.wrap(module[0], ()), FLAT.wrap(module[2], ())
    both = adam(module.parameters())
    whole = stepped(module, both, rank, 1)
    lines = [] if set(whole["state"]) == names else [f"found {set(whole['state'])}"]
    first = [name for name in whole["state"] if name.startswith("0.")]
    part = {
        "state": {name: whole["state"][name] for name in first},
        "param_groups": [{**whole["param_groups"][0], "params": first}],
    }
    one = adam(module[0].parameters())
    FSDP.optim_state_dict_to_load(module, one, part, load_directly=True)
    found = FSDP.full_optim_state_dict(module[0], one, rank0_only=False)["state"]
    return lines + list(different({f"0.{name}": entry for name, entry in found.items()}, part["state"]))


def test_several_models_and_optimizers(pool2: Run) -> None:
    assert not joined(pool2(several))


# --- the cost ---------------------------------------------------------------------------------------------------------


def costs(rank: int, world: int, orig: bool) -> list[str]:
    """At most one state of the largest unit is whole; intervals and their loading gather nothing."""
    model = wrapped(Setting(orig=orig))
    memory = inspect.memory(model)
    traffic = inspect.comm_stats(model)
    optim = adam(model.parameters())
    everywhere = stepped(model, optim, rank, 1)
    largest = max(flat.layout.padded_numel * flat.shard.element_size() for flat in inspect.flat_params(model))
    memory.reset_peaks()
    traffic.reset()
    whole = FSDP.full_optim_state_dict(model, optim)
    lines = []
    if memory.peak("consolidated") != largest:
        lines.append(f"whole: {memory.peak('consolidated')} bytes, not {largest}")
    if traffic.counts["all_gather"] != 2 * len(inspect.units(model)):  # Adam has two tensors
        lines.append(f"whole: {dict(traffic.counts)}")
    quiet = {"scalar"}
    calls: dict[str, tuple[Callable[[], Any], set[str]]] = {
        "intervals": (lambda: FSDP.sharded_optim_state_dict(model, optim), quiet),
        "whole dicts": (lambda: FSDP.optim_state_dict_to_load(model, optim, everywhere), quiet),
        "without communication": (lambda: FSDP.shard_full_optim_state_dict(everywhere, model), set()),
        "from rank 0": (
            lambda: FSDP.scatter_full_optim_state_dict(whole, model, optim=optim),
            {*quiet, "broadcast"},  # of the description; then a message for each state of each unit
        ),
    }
    for what, (call, expected) in calls.items():
        traffic.reset()
        call()
        if {kind for kind, count in traffic.counts.items() if count} != expected:
            lines.append(f"{what}: {dict(traffic.counts)}")
        if what in ("intervals", "whole dicts") and traffic.counts["scalar"] != 2:  # however many parameters
            lines.append(f"{what}: {traffic.counts['scalar']} exchanges")
        if traffic.messages != (2 * len(inspect.units(model)) if what == "from rank 0" else 0):
            lines.append(f"{what}: {traffic.messages} messages")
    return lines


@pytest.mark.parametrize("orig", [True, False])
def test_what_it_costs(orig: bool, pool2: Run) -> None:
    assert not joined(pool2(costs, orig))


def hybrid(rank: int, world: int) -> list[str]:
    """`group`: the ranks of which the first gets the dict; loading wants the model's first."""
    model = Setting("HYBRID_SHARD").wrap(seeded(Net), (Feedforward,))
    optim = adam(model.parameters())
    stepped(model, optim, rank, 1)
    whole = FSDP.full_optim_state_dict(model, optim, group=model.process_group)
    lines = [] if bool(whole) is (rank in (0, 2)) else [f"rank {rank}: {bool(whole)}"]
    return lines + refused(
        lambda: FSDP.scatter_full_optim_state_dict(whole, model, optim=optim, group=model.process_group),
        "group: its first rank must be rank 0",
    )


def test_group_of_a_hybrid(pool4: Run) -> None:
    assert not joined(pool4(hybrid))
