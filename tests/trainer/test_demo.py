"""The demonstration that the trainer comes with: its options, its text, its model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.demo.model import TOGETHER, ByteTransformer, spread
from flatfsdp.trainer.demo.options import DemoOptions, corpus_files, temperature

pytestmark = pytest.mark.unit

# options


def test_heads_divide_the_width_in_even_parts() -> None:
    with pytest.raises(ConfigValueError, match=r"DemoOptions.heads: got 3, but width 128 must"):
        DemoOptions(heads=3)


def test_the_task_reads_the_text_when_data_is_requested(tmp_path: Path) -> None:
    path = tmp_path / "text"
    task = DemoOptions(text=path, context=4, valid_part=0.5).task()
    path.write_bytes(bytes(range(40)))
    train, valid = task.train_data(), task.eval_data()
    assert (len(train), len(valid)) == (5, 5)
    assert train[1]["input_ids"].tolist() == [4, 5, 6, 7]
    assert valid[0]["input_ids"].tolist() == [20, 21, 22, 23]


# text


def test_the_default_text_is_the_standard_library_without_tests() -> None:
    files = corpus_files(None)
    root = Path(os.__file__).parent
    assert root / "os.py" in files
    assert not [file for file in files if {"test", "site-packages"} & set(file.relative_to(root).parts[:-1])]
    assert files == sorted(files)


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"b.txt": "bb", "a.txt": "aaaa", "sub/c": "cccc", ".git/x": "xx"}.items():
        (tmp_path / name).write_text(text)
    task = DemoOptions(text=tmp_path, valid_part=0.4, context=3).task()
    train, valid = task.train_data().tokens, task.eval_data().tokens
    assert bytes(torch.cat((train, valid)).tolist()) == b"aaaabbcccc"
    assert (train.numel(), valid.numel()) == (6, 4)


def test_an_empty_folder_and_a_short_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigValueError, match="holds no files"):
        corpus_files(tmp_path)
    with pytest.raises(ConfigValueError, match="100 bytes leave 95 for training and 5 for evaluation; context=8 needs"):
        DemoOptions(valid_part=0.05, context=8).held_out(100)


def test_the_split_follows_from_the_sizes_of_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(70))
    (tmp_path / "b").write_bytes(bytes(30))
    options = DemoOptions(text=tmp_path, valid_part=0.2, context=5)
    assert options.held_out() == 20
    assert options.task().train_data().tokens.numel() == 80


# model


def small_model() -> ByteTransformer:
    torch.manual_seed(0)
    model = ByteTransformer(width=16, layers=2, heads=2, context=12)
    torch.nn.init.normal_(model.head.weight)
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.out.weight)
        torch.nn.init.normal_(block.down.weight)
    return model


def test_an_untrained_model_knows_nothing() -> None:
    model = ByteTransformer(width=16, layers=2, heads=2, context=12)
    assert torch.equal(model(torch.zeros(3, 12, dtype=torch.long)), torch.zeros(3, 12, 256))


def test_a_position_sees_itself_and_what_came_before_only() -> None:
    model, tokens = small_model(), torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 6] = 99
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:6].max() == 0
    assert difference[6:].min() > 0


def test_a_position_sees_the_order_of_what_came_before() -> None:
    model, tokens = small_model(), torch.arange(12)[None]
    swapped = tokens.clone()
    swapped[0, [2, 3]] = tokens[0, [3, 2]]
    assert (model(tokens) - model(swapped))[0, -1].abs().max() > 1e-3


def test_what_bytes_spell_together_is_spread_over_the_table() -> None:
    pairs = torch.arange(256)[:, None] * 256 + torch.arange(97, 123)
    places = spread(pairs.flatten())
    assert int(places.min()) >= 0 and int(places.max()) < TOGETHER
    assert int(places.bincount(minlength=TOGETHER).max()) <= 6, "of 6,656 among 4,096"
    assert spread(torch.tensor([256**4 - 1])) < TOGETHER, "no number of four bytes is too large"


def test_a_word_is_spelled_with_less_chance_than_it_is_chosen() -> None:
    assert temperature(ord("e")) < temperature(ord("_")) == temperature(ord(" "))
