"""Components of a run: the ranks that write and read them, the values that other worlds load, and the errors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flatfsdp import checkpoint
from flatfsdp.errors import AgreementError, CheckpointError, ConfigTypeError, ConfigValueError, FlatFSDPWarning
from flatfsdp.trainer.process_group import TrainerRanks
from flatfsdp.trainer.state.checkpoints import CheckpointManager
from flatfsdp.trainer.state.components import (
    Component,
    Sharing,
    rng_component,
    stateful_component,
    take,
    verify,
)

pytestmark = pytest.mark.distributed


class Held:
    """A component's state, and the number of its saves."""

    def __init__(self, name: str, sharing: Sharing, value: Any, **kwargs: Any) -> None:
        self.value = value
        self.saves = 0
        self.component = Component(name, sharing=sharing, save=self.save, load=self.load, **kwargs)

    def save(self) -> dict[str, Any]:
        self.saves += 1
        return {"value": self.value, "tensor": torch.full((2,), float(self.value))}

    def load(self, state: Any) -> None:
        assert state["tensor"].tolist() == [float(state["value"])] * 2
        self.value = state["value"]


def group_of(rank: int, world: int, size: int) -> Any:
    return [dist.new_group(list(range(start, start + size))) for start in range(0, world, size)][rank // size]


def every(rank: int, world: int, group: Any, add: int) -> list[Held]:
    """A component of each sharing, whose state identifies its owner."""
    return [
        Held("global", Sharing.GLOBAL, rank + add),
        Held("replicated", Sharing.REPLICATED, add),
        Held("per rank", Sharing.PER_RANK, rank + add),
        Held("per group", Sharing.PER_GROUP, rank // 2 + add, group=group),
        Held("per node", Sharing.PER_NODE, rank // 2 + add),
    ]


def save_and_load(rank: int, world: int, path: str) -> tuple[list[int], list[int], dict[str, Any]]:
    os.environ["GROUP_RANK"] = str(rank // 2)
    try:
        group = group_of(rank, world, 2)
        held = every(rank, world, group, 100)
        components = [each.component for each in held]
        manager = CheckpointManager(path)
        model = torch.nn.Linear(2, 2)
        manager.save(1, model=model, components=components)
        for each in held:
            each.value = -1
        found = manager.find("latest")
        assert found is not None
        manager.load(found, model=model, components=components)
        table = dict(take(components, TrainerRanks())[1])
        return [each.value for each in held], [each.saves for each in held], table
    finally:
        del os.environ["GROUP_RANK"]


def test_each_sharing_comes_back_to_whom_it_belongs(run: Any, tmp_path: Any) -> None:
    answers = run(4, save_and_load, str(tmp_path))
    for rank, (values, saves, table) in enumerate(answers):
        assert values == [100, 100, 100 + rank, 100 + rank // 2, 100 + rank // 2]
        writes = [rank == 0, True, True, rank % 2 == 0, rank % 2 == 0]
        assert [count > 0 for count in saves] == writes  # ranks that write no part save nothing, except to compare
        assert table["per group"]["parts"] == table["per node"]["parts"]
        assert table["per group"]["parts"] == {
            "0": {"written_by": 0, "ranks": [0, 1]},
            "2": {"written_by": 2, "ranks": [2, 3]},
        }
        assert table["global"] == {"sharing": "global", "required": True, "parts": {"all": {"written_by": 0}}}


# --- other worlds -----------------------------------------------------------------------------------------------------


def saved(rank: int, world: int, path: str) -> None:
    held = [
        Held("all", Sharing.GLOBAL, 7),
        Held("needed", Sharing.PER_RANK, rank),
        Held("wanted", Sharing.PER_RANK, rank, required=False),
        Held("left", Sharing.GLOBAL, 1),
    ]
    components = [*(each.component for each in held), rng_component(3)]
    CheckpointManager(path, asynchronous=False).save(5, model=torch.nn.Linear(2, 2), components=components)


def loaded(rank: int, world: int, path: str, *, restarts: bool) -> tuple[list[int], list[str], list[str]]:
    """Values, notes, and warnings; or the error as the only note."""
    restart: Callable[[int], str] | None = (lambda step: f"needed: anew at {step}") if restarts else None
    held = [
        Held("all", Sharing.GLOBAL, -1),
        Held("needed", Sharing.PER_RANK, -1, restart=restart),
        Held("wanted", Sharing.PER_RANK, -1, required=False),
        Held("new", Sharing.GLOBAL, -1, required=False),
    ]
    manager = CheckpointManager(path)
    found = manager.find("latest")
    assert found is not None
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(9.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlatFSDPWarning)
        try:
            notes = manager.load(found, model=model, components=[each.component for each in held]).notes
        except CheckpointError as error:
            assert model.weight.eq(9.0).all()  # nothing has been loaded
            notes = (str(error),)
    texts = [str(each.message) for each in caught if issubclass(each.category, FlatFSDPWarning)]
    return [each.value for each in held], list(notes), texts


def test_what_belongs_to_a_rank_needs_as_many_ranks_or_a_rule(run: Any, tmp_path: Any) -> None:
    path = str(tmp_path)
    run(2, saved, path)
    for rank, (values, notes, texts) in enumerate(run(2, loaded, path, restarts=False)):
        assert values == [7, rank, rank, -1]
        assert notes == [
            "component 'new' is not in the checkpoint and keeps its initial state",
            "the checkpoint has left, rng, for which this run has no component; ignored",
        ]
        assert len(texts) == (2 if rank == 0 else 0)
    for world in (3, 1):
        for values, notes, _ in run(world, loaded, path, restarts=True):
            assert values == [7, -1, -1, -1] and "needed: anew at 5" in notes
            assert (
                "component 'wanted' is per_rank: 2 ranks saved 2 parts, none is for "
                f"{world} ranks; it keeps its initial state" in notes
            )
        for values, (error,), _ in run(world, loaded, path, restarts=False):
            assert values == [-1] * 4
            assert error == (
                f"{path}/step-00000005: required components are missing: needed (per_rank: 2 ranks saved 2 parts, none "
                f"is for {world} ranks divided as they are now). The checkpoint has all, needed, wanted, left, rng. "
                "Nothing has been loaded"
            )


def test_all_that_is_missing_is_listed(tmp_path: Any) -> None:
    model = torch.nn.Linear(2, 2)
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=model, components=[Held("there", Sharing.GLOBAL, 1).component])
    wanted = [Held(name, Sharing.GLOBAL, 1).component for name in ("there", "one", "two")]
    with pytest.raises(
        CheckpointError, match=r"missing: one \(not in the checkpoint\); two \(not in the .*The checkpoint has there"
    ):
        manager.load(tmp_path / "step-00000001", model=model, components=wanted)


def test_what_no_trainer_saved_has_no_components(tmp_path: Any) -> None:
    model = torch.nn.Linear(2, 2)
    extras: list[Any] = [None, {}, {"components": {"a": 1}, "step": 4}]
    for place, extra in enumerate(extras):
        path = tmp_path / str(place)
        checkpoint.save(path, model=model, extra=extra)
        again = torch.nn.Linear(2, 2)
        optional = Held("a", Sharing.GLOBAL, 5, required=False)
        with pytest.warns(FlatFSDPWarning, match="component 'a' is not in the checkpoint and keeps its initial state"):
            loaded = CheckpointManager(tmp_path).load(path, model=again, components=[optional.component])
        assert (loaded.step, loaded.world, optional.value) == (None, None, 5) and torch.equal(
            again.weight, model.weight
        )
        with pytest.raises(
            CheckpointError, match=r"required components are missing: b \(not in the checkpoint\)\. The checkpoint has"
        ):
            CheckpointManager(tmp_path).load(path, model=again, components=[Held("b", Sharing.GLOBAL, 5).component])


# --- ranks that differ ------------------------------------------------------------------------------------------------


def differing(rank: int, world: int) -> list[str]:
    ranks = TrainerRanks()
    other = rank == 1

    def refuse() -> dict[str, Any]:
        if other:
            raise OSError("no such device")
        return {}

    def empty() -> dict[str, Any]:
        return {}

    cases: list[list[Component]] = [
        [Held("a" if other else "b", Sharing.GLOBAL, 1).component],
        [Held("a", Sharing.PER_RANK if other else Sharing.GLOBAL, 1).component],
        [Held("a", Sharing.GLOBAL, 1).component] * 2,
        [Component("broken", sharing=Sharing.PER_RANK, save=refuse, load=print)],
        [Held("same", Sharing.REPLICATED, 4).component, Held("odd", Sharing.REPLICATED, rank // 2).component],
    ]
    if rank == 2:
        cases[3] = [Component("broken", sharing=Sharing.PER_RANK, save=empty, load=print)]
    messages = []
    for components in cases:
        with pytest.raises((AgreementError, CheckpointError)) as caught:
            take(components, ranks)
        messages.append(str(caught.value))
    verify(cases[4][:1], ranks)
    return messages


def test_ranks_that_differ_get_the_same_error(run: Any) -> None:
    answers = run(3, differing)
    assert all(messages == answers[0] for messages in answers)
    names, sharing, twice, broken, odd = answers[0]
    assert "ranks have different components: ('b', 'global', True) on rank 0, ('a', 'global', True) on rank 1" in names
    assert "('a', 'global', True) on rank 0, ('a', 'per_rank', True) on rank 1" in sharing
    assert "components: 2 of them are named 'a'; rename all but one" in twice
    assert broken == "saving the components of the run: rank 1: component 'broken': OSError: no such device"
    assert odd.startswith(
        "component 'odd' differs in value between rank 0 and rank 2. It is declared replicated, so all ranks must"
    )


def odd_groups(rank: int, world: int) -> str:
    pair, alone = dist.new_group([0, 1]), dist.new_group([1])
    held = Held("a", Sharing.PER_GROUP, 1, group=pair if rank == 0 else alone)
    with pytest.raises(AgreementError) as caught:
        take([held.component], TrainerRanks())
    return str(caught.value)


def test_groups_of_a_component_do_not_overlap(pool2: Any) -> None:
    for text in pool2(odd_groups):
        assert "component 'a': the group of rank 0 is [0, 1], that of rank 1 is [1]" in text


# --- one process ------------------------------------------------------------------------------------------------------


def test_what_a_component_is_made_of_is_checked() -> None:
    def make(**kwargs: Any) -> Component:
        return Component(**({"name": "a", "sharing": Sharing.GLOBAL, "save": dict, "load": print} | kwargs))

    with pytest.raises(ConfigTypeError, match=r"^name: got ''"):
        make(name="")
    with pytest.raises(ConfigTypeError, match=r"^sharing of component 'a': got 'global'. Accepted: Sharing.GLOBAL, "):
        make(sharing="global")
    with pytest.raises(ConfigValueError, match=r"^component 'a': sharing is Sharing.PER_GROUP and group is None"):
        make(sharing=Sharing.PER_GROUP)


def test_things_with_a_state_dict_are_components(tmp_path: Any) -> None:
    def plan(step: int) -> Any:
        optim = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 2)
        for _ in range(step):
            optim.step()
            schedule.step()
        return schedule

    saved, fresh, model = plan(5), plan(0), torch.nn.Linear(1, 1)
    manager = CheckpointManager(tmp_path)
    manager.save(5, model=model, components=[stateful_component("schedule", saved)])
    manager.load(
        tmp_path / "step-00000005",
        model=model,
        components=[stateful_component("schedule", fresh, sharing=Sharing.GLOBAL)],
    )
    assert fresh.state_dict() == saved.state_dict() and fresh.last_epoch == 5
