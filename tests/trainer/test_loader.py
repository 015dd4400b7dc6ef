"""The loader on real ranks: the same samples in each mode, from any position, on any number of ranks; messages."""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import random
import re
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from flatfsdp.errors import CheckpointError, ConfigTypeError, ConfigValueError, FlatFSDPWarning
from flatfsdp.trainer.data_loading import DataError, Loader, Microbatch, evaluation
from tests.conftest import Run
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

Ids = list[tuple[int, ...]]


@dataclass
class Numbers:
    """Sample i holds i, and something drawn at random."""

    length: int
    broken: int | None = None  # the sample that cannot be read
    kill: int | None = None  # the sample at which the process that reads ends

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == self.broken:
            raise OSError("no such page")
        if number == self.kill:
            os._exit(3)
        drawn = torch.rand(2) + random.random()
        return {"x": torch.full((3,), float(number)), "nested": (torch.tensor(number), [drawn]), "name": f"n{number}"}


class Stream(IterableDataset[Any]):
    """The same, one after the other, and epoch e has e samples more than the first."""

    def __init__(self, length: int, *, broken: int | None = None) -> None:
        self.numbers = Numbers(length, broken)
        self.epoch = 0
        self.opened = 0  # samples that were made

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.numbers.length + self.epoch):
            self.opened += 1
            yield self.numbers[number]


class Stateful(Stream):
    """A stream that records its position."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = self.start = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for number in range(start, self.numbers.length + self.epoch):
            self.opened += 1
            self.at = number + 1
            yield self.numbers[number]


@pytest.fixture
def run(run: Run) -> Run:
    """With time for the first job on a busy machine, which imports all of the trainer."""
    return partial(run, timeout=200)


@contextlib.contextmanager
def may_have_workers() -> Iterator[None]:
    """The pool's ranks are daemons, which must not have children: these end with the loader."""
    config = multiprocessing.current_process()._config
    if not config.get("daemon"):
        yield
        return
    config["daemon"] = False
    try:
        yield
    finally:
        config["daemon"] = True
        assert not multiprocessing.active_children()


def contents(microbatch: Microbatch) -> list[list[float]]:
    """The values read of each sample, random ones included: one row each."""
    inputs = microbatch.inputs
    return torch.cat([inputs["x"], inputs["nested"][0][:, None], inputs["nested"][1][0]], dim=1).tolist()


def train(
    rank: int,
    world: int,
    dataset: Any,
    state: dict[str, Any] | None = None,
    steps: int | None = None,
    **settings: Any,
) -> tuple[list[list[tuple[tuple[int, ...], list[list[float]]]]], dict[str, Any]]:
    """Ids and contents of this rank's microbatches of `steps` steps after `state`, and the state then."""
    dataset = copy.deepcopy(dataset)  # where it stands is no matter of the caller's
    seen = []
    with may_have_workers(), Loader(dataset, **settings) as loader:
        if state is not None:
            loader.load_state_dict(state)
        before = torch.get_rng_state()
        while (steps is None or len(seen) < steps) and (step := loader.next_step()) is not None:
            seen.append([(each.ids, contents(each)) for each in step.microbatches])
        assert torch.equal(before, torch.get_rng_state())
        return seen, loader.state_dict()


def merged(answers: list[Any]) -> tuple[list[tuple[tuple[int, ...], list[list[float]]]], dict[str, Any]]:
    """Of all ranks' answers: ids and contents of each step in the order of ranks, without stand-ins; the state."""
    states = [state for _, state in answers]
    assert all(state == states[0] for state in states)
    assert len({tuple(len(step) for step in seen) for seen, _ in answers}) == 1, "microbatches differ in number"
    found = []
    for step in zip(*(seen for seen, _ in answers), strict=True):
        real = [each for share in step for each in share if each[0]]
        found.append((tuple(number for ids, _ in real for number in ids), [row for _, rows in real for row in rows]))
    return found, states[0]


DATASETS = {"map": Numbers(11), "stream": Stream(7), "stateful": Stateful(7)}


@pytest.mark.parametrize(
    ("kind", "mode", "workers"),
    [
        (kind, mode, workers)
        for row, kind in enumerate(DATASETS)
        for column, mode in enumerate(["sharded", "dispatch"])
        for workers in some((0, 1), 2, row + column)  # all pairs of the three
    ],
)
def test_interrupted_on_changing_numbers_of_ranks_it_sees_what_an_uninterrupted_run_sees(
    run: Run, mode: str, kind: str, workers: int
) -> None:
    settings = {"epochs": 3, "mode": mode, "shuffle": kind == "map"}
    dataset = DATASETS[kind]
    straight, end = merged([train(0, 1, dataset, batch=5, **settings)])
    # A step of 5 of 2 ranks, 3 ranks, then one that needs 3 microbatches for it; a stop after 1, 3, 4 and all steps.
    found, state = merged(run(2, train, dataset, None, 1, batch=2, global_batch=5, workers=workers, **settings))
    for world, batch, steps in ((3, 1, 2), (1, 2, 1), (2, 3, None)):
        arguments = (dataset, state, steps)
        rest = {"batch": batch, "workers": workers, **settings}
        # One rank needs no pool.
        answers = run(world, train, *arguments, **rest) if world > 1 else [train(0, 1, *arguments, **rest)]
        more, state = merged(answers)
        found += more
    assert found == straight
    total = 33 if kind == "map" else 7 + 8 + 9
    assert sum(len(ids) for ids, _ in found) == total == end["position"] == state["position"]


def test_a_stateful_stream_is_not_read_again(run: Run) -> None:
    for mode in ("sharded", "dispatch"):
        _, state = merged(run(2, train, Stateful(9), None, 2, batch=1, epochs=1, mode=mode, shuffle=False))
        assert state["dataset"] == {"at": 4}
        opened = run(2, samples_made, Stateful(9), state, mode=mode)
        assert opened == ([5, 5] if mode == "sharded" else [5, 0])
    assert run(2, samples_made, Stream(9), {**state, "dataset": None}, mode="sharded") == [9, 9]


def samples_made(rank: int, world: int, dataset: Any, state: dict[str, Any], mode: str) -> int:
    loader = Loader(dataset, batch=1, epochs=1, mode=mode, shuffle=False)
    loader.load_state_dict(state)
    while loader.next_step() is not None:
        pass
    return dataset.opened


def test_a_rank_without_a_sample_gets_one_that_counts_for_nothing(run: Run) -> None:
    for mode in ("sharded", "dispatch"):
        answers = run(3, train, Numbers(4), batch=1, epochs=1, mode=mode, shuffle=False)
        ids = [[[each for each, _ in step] for step in seen] for seen, _ in answers]
        assert ids == [[[(0,)], [(3,)]], [[(1,)], [()]], [[(2,)], [()]]]
        assert answers[1][0][1][0][1][0][:3] == [3.0, 3.0, 3.0]


def test_ranks_learn_what_a_step_counts_for(pool2: Run) -> None:
    for mode in ("sharded", "dispatch"):
        assert pool2(weights, Numbers(5), mode, None) == [[2, 2, 1]] * 2
        assert pool2(weights, Numbers(5), mode, largest) == [[0 + 1, 2 + 3, 4]] * 2
        for kind, text, _ in pool2(report, Numbers(12), mode=mode, weigh=refuse_the_second):
            assert kind == "DataError" and text.startswith(
                f"rank {int(mode == 'sharded')}: weight of samples 2, 3: Valu"
            )


def weights(rank: int, world: int, dataset: Any, mode: str, weigh: Any) -> list[int]:
    loader = Loader(dataset, batch=1, epochs=1, shuffle=False, mode=mode, weigh=weigh)
    return [step.weight for step in iter(loader.next_step, None)]


def largest(inputs: Any) -> int:
    return int(inputs["x"].max())


def refuse_the_second(inputs: Any) -> int:
    if "n2" in inputs["name"]:
        raise ValueError("two")
    return 1


def test_ranks_whose_group_has_no_collectives_on_the_host_get_one_beside_it(pool2: Run) -> None:
    for created, seen in pool2(beside_an_accelerator):
        assert created == 1 and [ids for step in seen for ids, _ in step]


def beside_an_accelerator(rank: int, world: int) -> tuple[int, Any]:
    """The number of groups that two loaders make on a group of nccl alone, and the samples that the second reads."""
    group = dist.new_group(backend="gloo")
    without_host = mock.patch.object(dist, "get_backend_config", lambda *_: "cuda:nccl")
    with without_host, mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        Loader(Numbers(4), batch=1, process_group=group)
        seen, _ = train(rank, world, Numbers(4), batch=1, epochs=1, process_group=group, mode="dispatch")
        return made.call_count, seen


def test_the_last_smaller_step_can_be_left_out(run: Run) -> None:
    for dataset in (Numbers(9), Stream(9)):
        found, state = merged(run(2, train, dataset, batch=2, epochs=1, shuffle=False, drop_last=True))
        assert [ids for ids, _ in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]
        assert state["position"] == 8


def test_evaluation_sees_every_sample_once_and_gives_ranks_equally_many(run: Run) -> None:
    for mode in ("sharded", "dispatch"):
        for limit, samples, workers in ((None, 11, 0), (2, 4, 1)):
            answers = run(3, evaluate, Numbers(11), limit, mode, workers)
            assert len({len(each) for each in answers}) == 1
            assert sorted(number for each in answers for ids in each for number in ids) == list(range(samples))


def evaluate(rank: int, world: int, dataset: Any, limit: int | None, mode: str, workers: int) -> Ids:
    with may_have_workers():
        return [each.ids for each in evaluation(dataset, batch=2, limit=limit, mode=mode, workers=workers)]


def report(rank: int, world: int, dataset: Any, at_rank: int | None = None, **settings: Any) -> tuple[str, str, int]:
    """Class and message of the error of `dataset`, which only `at_rank` has; others have an intact one. And the
    position then."""
    if at_rank not in (None, rank):
        dataset = Numbers(12)
    loader = None
    with may_have_workers():
        try:
            loader = Loader(dataset, batch=2, shuffle=False, epochs=1, **settings)
            while loader.next_step() is not None:
                pass
        except Exception as error:
            return type(error).__name__, str(error), 0 if loader is None else loader.position
    raise AssertionError("nothing went wrong")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", ["sharded", "dispatch"])
def test_a_sample_that_cannot_be_read_is_an_error_on_all_ranks(pool2: Run, mode: str, workers: int) -> None:
    rank = 1 if mode == "sharded" else 0
    words = rf"rank {rank}: sample 7: OSError: no such page \(.*test_loader.py:\d+, in __getitem__\)"
    answers = pool2(report, Numbers(12, broken=7), mode=mode, workers=workers)
    for kind, text, position in answers:
        assert (kind, position) == ("DataError", 4) and re.fullmatch(words, text), text
    answers = pool2(report, Stream(12, broken=7), mode=mode, workers=workers)
    who = "rank 0" if mode == "dispatch" else "ranks 0, 1"
    for kind, text, position in answers:
        assert (kind, position) == ("DataError", 4)
        assert text.startswith(f"{who}: sample 7 of epoch 0: OSError: no such page ("), text


def test_a_failure_names_what_collate_was_given_and_where_it_was_raised(pool2: Run) -> None:
    for kind, text, _ in pool2(report, Numbers(12), collate=refuse_five):
        assert kind == "DataError"
        assert re.fullmatch(r"rank 0: collate of samples 4, 5: ValueError: five \(.*, in refuse_five\)", text), text
    for kind, text, _ in pool2(report, Stream(12), collate=refuse_five, mode="dispatch"):
        assert kind == "DataError" and text.startswith("rank 0: collate of samples 4, 5: ValueError: five"), text


def refuse_five(samples: list[Any]) -> Any:
    if any(sample["name"] == "n5" for sample in samples):
        raise ValueError("five")
    return samples


def test_what_cannot_be_sent_is_an_error_on_all_ranks(pool2: Run) -> None:
    for kind, text, _ in pool2(report, Numbers(12), collate=with_a_function, mode="dispatch"):
        assert kind == "DataError" and text.startswith("rank 0: sending the result of collate: "), text


def with_a_function(samples: list[Any]) -> Any:
    return lambda: samples


def test_what_cannot_be_unpacked_is_an_error_on_all_ranks(pool2: Run) -> None:
    for kind, text, _ in pool2(report, Numbers(12), collate=Fragile, mode="dispatch"):
        assert kind == "DataError" and text.startswith("rank 1: ValueError: not here"), text


class Fragile:
    def __init__(self, samples: list[Any]) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        raise ValueError("not here")

    def __getstate__(self) -> Any:
        return {"x": 1}


def test_a_process_that_dies_as_it_reads_is_an_error_on_all_ranks(pool2: Run) -> None:
    for kind, text, _ in pool2(report, Numbers(12, kill=7), workers=1):
        assert kind == "DataError" and re.match(r"rank 1: RuntimeError: DataLoader worker .* exited unexpectedly", text)


@pytest.mark.parametrize("mode", ["sharded", "dispatch"])
def test_a_process_that_cannot_be_started_is_an_error_on_all_ranks(pool2: Run, mode: str) -> None:
    for kind, text, position in pool2(without_memory, mode):
        assert (kind, position) == ("DataError", 0) and text.startswith("rank 0: OSError: cannot allocate memory"), text


def without_memory(rank: int, world: int, mode: str) -> tuple[str, str, int]:
    failing = mock.patch.object(os, "fork", side_effect=OSError("cannot allocate memory"))
    with failing if rank == 0 else contextlib.nullcontext():
        return report(rank, world, Numbers(12), mode=mode, workers=1)


def test_a_failed_step_can_be_requested_again(pool2: Run) -> None:
    assert pool2(again) == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]


def again(rank: int, world: int) -> Ids:
    dataset = Numbers(8, broken=6)
    loader = Loader(dataset, batch=2, shuffle=False, epochs=1)
    first = loader.next_step()
    with contextlib.suppress(DataError):
        loader.next_step()
    dataset.broken = None
    second = loader.next_step()
    assert loader.next_step() is None and loader.next_step() is None
    return [step.microbatches[0].ids for step in (first, second)]


def test_ranks_that_differ_learn_in_what(pool2: Run) -> None:
    def words(dataset: Any, at_rank: int | None = None, **settings: Any) -> str:
        (kind, text, _), *others = pool2(report, dataset, at_rank, **settings)
        assert all(other[:2] == (kind, text) for other in others)
        return f"{kind}: {text}"

    assert words(Numbers(10), 1) == (
        "AgreementError: Loader: ranks differ in the length of the dataset: 12 samples on rank 0, 10 samples on rank 1"
        "; give every rank the same"
    )
    assert words(Stream(12), 1).startswith("AgreementError: Loader: ranks differ in the length of the dataset: 12 samp")
    assert words(PerRank()).startswith(
        "AgreementError: ranks read different data (rank 0: 11 samples so far; rank 1: 10 samples so far). In sharded"
    )
    (kind, text, _), (other, hint, _) = pool2(report, Numbers(0), 1)
    assert (kind, text) == (
        "DataError",
        "rank 1: ConfigValueError: dataset: it has no samples" + text[text.index(" (") :],
    )
    assert (other, hint) == ("ConfigValueError", "dataset: it has no samples")


class PerRank(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from range(11 - dist.get_rank())


def test_in_dispatch_mode_only_rank_0_needs_the_dataset(pool2: Run) -> None:
    found, _ = merged(pool2(only_on_first, Numbers(6)))
    assert [ids for ids, _ in found] == [(0, 1, 2, 3), (4, 5)]


def only_on_first(rank: int, world: int, dataset: Any) -> Any:
    return train(rank, world, None if rank else dataset, batch=2, epochs=1, shuffle=False, mode="dispatch")


def test_a_signal_to_all_processes_does_not_take_the_samples_from_a_rank(pool2: Run) -> None:
    assert pool2(signaled) == [[(0,), (2,), (4,)], [(1,), (3,), (5,)]]


def signaled(rank: int, world: int) -> Ids:
    with may_have_workers(), Loader(Numbers(6), batch=1, shuffle=False, epochs=1, workers=1) as loader:
        steps = [loader.next_step()]
        (worker,) = multiprocessing.active_children()
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True, timeout=60)  # by another process than its parent
        subprocess.run(["kill", "-INT", str(worker.pid)], check=True, timeout=60)
        while (step := loader.next_step()) is not None:
            steps.append(step)
    return [step.microbatches[0].ids for step in steps]


def test_a_rank_that_ends_ends_its_workers(pool2: Run) -> None:
    assert pool2(end_worker) == [0, 0]


def end_worker(rank: int, world: int) -> int | None:
    with may_have_workers(), Loader(Numbers(6), batch=1, shuffle=False, epochs=1, workers=1) as loader:
        loader.next_step()
        (worker,) = multiprocessing.active_children()
        worker.terminate()  # as multiprocessing does at the end of a process
        worker.join(40)
        return worker.exitcode


# one process


@pytest.mark.parametrize("kind", list(DATASETS))
def test_a_run_can_be_resumed_after_any_of_its_steps(kind: str) -> None:
    settings = {"global_batch": 4, "epochs": 3, "shuffle": kind == "map", "seed": 2}
    straight, _ = train(0, 1, DATASETS[kind], batch=2, **settings)
    for stop in range(len(straight) + 1):
        _, state = train(0, 1, DATASETS[kind], None, stop, batch=4, **settings)
        state = json.loads(json.dumps(state))  # as a checkpoint may keep it
        rest, end = train(0, 1, DATASETS[kind], state, batch=2, **settings)
        assert rest == straight[stop:]
        assert end["position"] == sum(len(ids) for step in straight for ids, _ in step)


def test_a_loader_reports_where_it_stands() -> None:
    loader = Loader(Numbers(10), batch=2, accumulate=2, epochs=3)
    assert (loader.global_batch, loader.accumulate, loader.steps_per_epoch, loader.steps_left) == (4, 2, 3, 8)
    for _ in range(3):
        loader.next_step()
    assert (loader.position, loader.epoch, loader.steps_left) == (12, 1, 5)
    endless = Loader(Numbers(10), batch=2)
    assert endless.steps_left is None and endless.steps_per_epoch == 5
    assert Loader(Stream(3), batch=2).steps_per_epoch is None


def test_a_resumed_loader_keeps_the_global_batch_and_the_order() -> None:
    first = Loader(Numbers(10), batch=4, seed=5, epochs=1)
    first.next_step()
    state = first.state_dict()
    rest = first.next_step().microbatches[0].ids
    other = Loader(Numbers(10), batch=1, seed=5, epochs=1)
    other.load_state_dict(state)
    assert [each.ids for each in other.next_step().microbatches] == [(number,) for number in rest]
    with pytest.warns(FlatFSDPWarning, match="seed=5 of the resumed run is kept; with seed=6"):
        (resumed := Loader(Numbers(10), batch=4, seed=6, epochs=1)).load_state_dict(state)
    assert resumed.next_step().microbatches[0].ids == rest and resumed.state_dict()["seed"] == 5
    with pytest.warns(
        FlatFSDPWarning, match="took 4 samples per step; from now on, it is global_batch=3, as requested"
    ):
        (asked := Loader(Numbers(10), batch=4, global_batch=3, seed=5, epochs=1)).load_state_dict(state)
    assert asked.next_step().microbatches[0].ids == rest[:3]


def test_a_state_of_other_data_is_refused() -> None:
    state = Loader(Numbers(10), batch=4).state_dict()
    with pytest.raises(CheckpointError, match=r"saved for 10 samples, but this loader has 11 samples\. A position"):
        Loader(Numbers(11), batch=4).load_state_dict(state)
    with pytest.raises(CheckpointError, match="this loader has an iterable dataset"):
        Loader(Stream(10), batch=4).load_state_dict(state)
    with pytest.raises(CheckpointError, match="the state of the loader lacks 'position', 'seed'"):
        Loader(Numbers(10), batch=4).load_state_dict(
            {name: value for name, value in state.items() if name not in ("position", "seed")}
        )


def test_a_stream_that_became_shorter_is_reported() -> None:
    loader = Loader(Stream(8), batch=6)
    loader.next_step()
    (shorter := Loader(Stream(4), batch=6)).load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="ended after 4 samples of epoch 0, but 6 were consumed before"):
        shorter.next_step()


def test_what_gives_samples_only_once_is_reported_in_its_second_epoch() -> None:
    loader = Loader((number for number in range(4)), batch=4, shuffle=False)
    assert loader.next_step().microbatches[0].ids == (0, 1, 2, 3)
    with pytest.raises(DataError, match=r"no samples in epoch 1; .* works only with epochs=1"):
        loader.next_step()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"batch": 0}, ConfigValueError, "batch: got 0. Accepted: a whole number from 1 up."),
        ({"batch": 2.0}, ConfigTypeError, r"batch: got 2.0 \(float\). Accepted: a whole number from 1 up."),
        ({"epochs": -1}, ConfigValueError, "epochs: got -1. Accepted: a whole number from 1 up or None."),
        ({"workers": -1}, ConfigValueError, "workers: got -1. Accepted: a whole number from 0 up."),
        ({"mode": "shards"}, ConfigValueError, "mode: got 'shards'. Accepted: 'sharded', 'dispatch'."),
    ],
)
def test_arguments_are_checked(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Loader(Numbers(3), **{"batch": 1, **settings})


def test_a_dataset_has_to_be_one() -> None:
    with pytest.raises(ConfigTypeError, match=r"got 3 \(int\). Accepted: a dataset with __len__ and __getitem__"):
        Loader(3, batch=1)


def test_settings_without_effect_are_reported() -> None:
    with pytest.warns(FlatFSDPWarning, match="shuffle=True has no effect on an iterable dataset"):
        Loader((number for number in range(3)), batch=1)
    with pytest.warns(FlatFSDPWarning, match="workers=2 has the effect of 1 for an iterable dataset"):
        Loader(Stream(3), batch=1, workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loader(Stream(3), batch=1, workers=1)


def given_up(rank: int, world: int, accumulate: int) -> tuple[int, list[str]]:
    state = Loader(Numbers(24), batch=2, shuffle=False).state_dict()
    loader = Loader(Numbers(24), batch=2, accumulate=accumulate, shuffle=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader.load_state_dict(state)
    return loader.global_batch, [str(each.message) for each in caught]


def test_a_batch_that_a_resumed_run_does_not_take_is_reported(pool2: Run) -> None:
    (size, texts), (_, by_another) = pool2(given_up, 3)
    assert (size, by_another) == (4, [])
    assert (
        len(texts) == 1 and "keeps the 4 samples of the resumed run" in texts[0] and "set global_batch=12" in texts[0]
    )
    assert pool2(given_up, 1) == [(4, []), (4, [])]
