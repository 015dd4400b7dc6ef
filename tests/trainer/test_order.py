"""The order of samples: steps, cells, permutations, and resumption; datasets and collate of the trainer."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from flatfsdp.errors import ConfigTypeError, ConfigValueError
from flatfsdp.trainer.data_loading import JsonLines, PadCollate, TokenWindows
from flatfsdp.trainer.data_loading.batch_sources import pack, unpack
from flatfsdp.trainer.data_loading.sampling import SampleOrder, StepLayout
from flatfsdp.trainer.randomness import seed_of

pytestmark = pytest.mark.unit


def steps_of(**settings: object) -> StepLayout:
    return StepLayout(**{"global_batch": 4, "batch": 2, "ranks": 2, "total": None, "drop_last": False, **settings})


def walk(steps: StepLayout, position: int = 0) -> list[range]:
    """Every step from `position` to the end."""
    found = []
    while step := steps.at(position):
        found.append(step)
        position = step.stop
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("samples", [1, 2, 5, 6, 7, 12, 13, 31])
def test_cells_tile_a_step_evenly_and_are_as_few_as_batch_allows(ranks: int, batch: int, samples: int) -> None:
    steps = steps_of(batch=batch, ranks=ranks, global_batch=samples)
    step = range(100, 100 + samples)
    shares = steps.shares(step, range(ranks))
    cells = [cell for share in shares for cell in share]
    assert [position for cell in cells for position in cell] == list(step)
    assert {len(share) for share in shares} == {steps.microbatches(samples)}
    sizes = [len(cell) for cell in cells]
    assert max(sizes) <= batch and max(sizes) - min(sizes) <= 1
    owned = [sum(map(len, share)) for share in shares]
    assert max(owned) - min(owned) <= 1
    assert (steps.microbatches(samples) - 1) * ranks * batch < samples
    middle = range(ranks // 2, ranks)
    assert steps.shares(step, middle) == shares[middle.start :]


def test_steps_cross_the_borders_of_epochs_and_the_last_may_be_smaller() -> None:
    assert walk(steps_of(total=10)) == [range(0, 4), range(4, 8), range(8, 10)]
    assert walk(steps_of(total=10, drop_last=True)) == [range(0, 4), range(4, 8)]
    assert steps_of(total=10).left(1) == 3 and steps_of(total=10, drop_last=True).left(1) == 2
    assert steps_of(total=10).left(12) == 0 and steps_of().left(12) is None


def test_any_interruption_on_any_number_of_ranks_sees_what_an_uninterrupted_run_sees() -> None:
    draw = random.Random(0)
    for _ in range(100):
        length, epochs, seed = draw.randint(1, 23), draw.randint(1, 4), draw.randint(0, 3)
        global_batch, shuffle = draw.randint(1, 12), draw.random() < 0.7
        total = length * epochs
        whole = SampleOrder(length, shuffle=shuffle, seed=seed)
        straight = [whole.ids(step) for step in walk(steps_of(global_batch=global_batch, total=total))]
        seen, position = [], 0
        while position < total:
            steps = steps_of(batch=draw.randint(1, 4), ranks=draw.randint(1, 5), global_batch=global_batch, total=total)
            order = SampleOrder(length, shuffle=shuffle, seed=seed)  # as a new process begins
            for step in walk(steps, position)[: draw.randint(1, 3)]:
                cells = itertools.chain.from_iterable(steps.shares(step, range(steps.ranks)))
                seen.append(tuple(number for cell in cells for number in order.ids(cell)))
                position = step.stop
        assert seen == straight
        flat = [number for ids in seen for number in ids]
        for epoch in range(epochs):
            assert sorted(flat[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_epochs_are_different_permutations_that_follow_from_the_seed() -> None:
    def epoch(number: int, **settings: object) -> tuple[int, ...]:
        return SampleOrder(50, **{"shuffle": True, "seed": 3, **settings}).ids(range(50 * number, 50 * number + 50))

    assert epoch(0) == epoch(0)
    assert len({epoch(0), epoch(1), epoch(0, seed=4), epoch(1, seed=4)}) == 4
    assert epoch(1, shuffle=False) == tuple(range(50))


def test_a_position_is_an_epoch_and_an_offset() -> None:
    place = SampleOrder(10, shuffle=True, seed=0).place(27)
    assert (place.position, place.epoch, place.offset) == (27, 2, 7)


def test_seeds_are_stable() -> None:
    # The meaning of a checkpoint's position must not change with the version of anything.
    assert seed_of(0, 0) == 3679321338066202065
    assert SampleOrder(8, shuffle=True, seed=0).ids(range(8)) == (5, 3, 2, 1, 7, 4, 6, 0)


def test_a_packed_value_comes_back() -> None:
    shared = torch.arange(3, dtype=torch.int16)
    value = {
        "nested": [(torch.randn(2, 3), torch.tensor(True)), {"empty": torch.empty(0, 4), "text": "x"}],
        "views": torch.arange(12).view(3, 4)[:, 1:3],
        "half": torch.randn(5).bfloat16(),
        "complex": torch.randn(2, dtype=torch.complex128),
        "shared": [shared, shared],
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "words": range(3),
    }
    packed = pack(value)
    assert packed.dtype is torch.uint8 and packed.dim() == 1
    back = unpack(torch.cat([packed, torch.full((40,), 255, dtype=torch.uint8)]))
    assert isinstance(back["parameter"], torch.nn.Parameter)
    assert back["shared"][0] is back["shared"][1]
    assert back.pop("words") == value.pop("words") and back["nested"][1].pop("text") == value["nested"][1].pop("text")
    torch.testing.assert_close(back, value, rtol=0, atol=0)


def test_large_tensors_are_not_pickled() -> None:
    size = pack([torch.zeros(1000, 1000)]).numel() - 4_000_000
    assert 0 < size < 500


def test_windows_cut_a_text_into_samples() -> None:
    windows = TokenWindows(torch.arange(11, dtype=torch.uint8), context=4)
    assert len(windows) == 2
    assert windows[1]["input_ids"].tolist() == windows[1]["labels"].tolist() == [4, 5, 6, 7]
    assert windows[0]["input_ids"].dtype is torch.int64
    with pytest.raises(IndexError, match="window 2 of 2"):
        windows[2]
    with pytest.raises(ConfigValueError, match=r"context: got 12. Accepted: from 2 .* to 11, the number of tokens"):
        TokenWindows(torch.arange(11), context=12)
    with pytest.raises(ConfigValueError, match=r"tokens: got torch.float32 of shape \(11,\)"):
        TokenWindows(torch.arange(11.0), context=4)


def test_lines_of_a_file_are_samples(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "ä"}\n\n  \n{"text": "b"}\n[1, 2]', encoding="utf-8")
    lines = JsonLines(path)
    assert [lines[number] for number in (2, 0, 1)] == [[1, 2], {"text": "ä"}, {"text": "b"}] and len(lines) == 3
    with pytest.raises(IndexError, match="line 3 of 3"):
        lines[3]
    path.write_text("\n")
    with pytest.raises(ConfigValueError, match=r"the file '.*text.jsonl' has no lines"):
        JsonLines(path)
    with pytest.raises(ConfigValueError, match=r"cannot read '.*none': No such file"):
        JsonLines(tmp_path / "none")


def test_samples_of_different_lengths_are_padded_to_the_longest() -> None:
    samples = [
        {"input_ids": [5, 6, 7], "labels": torch.tensor([5, 6, 7]), "weight": 0.5},
        {"input_ids": [8], "labels": torch.tensor([8]), "weight": 1.5},
    ]
    batch = PadCollate(pad=9, multiple_of=2)(samples)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert batch["labels"].tolist() == [[5, 6, 7, -100], [8, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["weight"].tolist() == [0.5, 1.5]
    masked = PadCollate()([{"input_ids": [1, 2], "attention_mask": [0, 1]}, {"input_ids": [3], "attention_mask": [1]}])
    assert masked["attention_mask"].tolist() == [[0, 1], [1, 0]]


def test_samples_that_cannot_be_padded_are_refused_in_words() -> None:
    with pytest.raises(ConfigValueError, match="a sample has input_ids, but the first one has input_ids, labels; all"):
        PadCollate()([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}])
    with pytest.raises(ConfigValueError, match="'labels' of a sample is not as long as its 'input_ids'"):
        PadCollate()([{"input_ids": [1, 2], "labels": [1]}])
    with pytest.raises(ConfigValueError, match=r"'input_ids' of a sample has shape \(1, 2\)"):
        PadCollate()([{"input_ids": torch.ones(1, 2)}])
    with pytest.raises(ConfigValueError, match="a sample has x, but no 'input_ids' to pad"):
        PadCollate()([{"x": 1}])
    with pytest.raises(ConfigTypeError, match=r"got 3 \(int\) as a sample"):
        PadCollate()([3])
