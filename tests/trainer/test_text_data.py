"""Text by name: records, tokens, labels, windows, streams; with a tokenizer of single characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.hub.packing import FOLDER
from flatfsdp.trainer.hub.records import Records
from flatfsdp.trainer.hub.text_data import Encode, TextData, TextStream
from tests.harness.tiny_hub import Letters

pytestmark = pytest.mark.unit

OFF = -100


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def lines(path: Path, *records: Any) -> str:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    return f"jsonl:{path}"


def samples(name: str, tokenizer: Any = None, **options: Any) -> list[tuple[list[int], Any]]:
    data = TextData(name, **options).make(tokenizer or Letters())
    found = [data[number] for number in range(len(data))]
    return [(each["input_ids"].tolist(), each["labels"]) for each in found]


def codes(text: str) -> list[int]:
    return [ord(each) for each in text]


def test_plain_text_is_packed_into_windows_and_kept_for_the_next_run(tmp_path: Path, cache: Path) -> None:
    name = lines(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "cde"})
    whole = [1, *codes("ab"), 2, 1, *codes("cde"), 2]
    found = samples(name, sequence_length=4)
    assert [tokens for tokens, _ in found] == [whole[:4], whole[4:8]]  # the last fills no window
    assert [labels.tolist() for _, labels in found] == [whole[:4], whole[4:8]]
    (kept,) = cache.glob("*.i32")
    before = kept.stat().st_mtime_ns
    samples(name, sequence_length=2)
    assert kept.stat().st_mtime_ns == before
    lines(tmp_path / "a.jsonl", {"text": "another"})
    samples(name, sequence_length=2)
    assert len(list(cache.glob("*.i32"))) == 2


def test_files_of_a_folder_are_texts_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for name, text in (("b", "y"), ("a", "x"), (".hidden", "z")):
        (tmp_path / "t" / name).write_text(text)
    assert [tokens for tokens, _ in samples(f"text:{tmp_path / 't'}", packing=False)] == [
        [1, ord("x"), 2], [1, ord("y"), 2],
    ]  # fmt: skip


def test_only_a_completion_counts(tmp_path: Path) -> None:
    name = lines(tmp_path / "a.jsonl", {"prompt": "1+1=", "completion": "2"})
    ((tokens, labels),) = samples(name)
    assert tokens == [1, *codes("1+1=2"), 2]
    assert labels.tolist() == [OFF] * 5 + [ord("2"), 2]


def test_only_the_answers_of_a_conversation_count(tmp_path: Path) -> None:
    turns = [("user", "q"), ("assistant", "yes"), ("user", "r"), ("assistant", "no")]
    name = lines(tmp_path / "a.jsonl", {"messages": [{"role": role, "content": text} for role, text in turns]})
    ((tokens, labels),) = samples(name)
    assert "".join(map(chr, tokens)) == "<uq><ayes><ur><ano>"
    assert "".join("." if each == OFF else chr(each) for each in labels.tolist()) == "......yes>......no>"
    assert len(samples(name, sequence_length=5)[0][0]) == 5
    with pytest.raises(ConfigValueError, match="renders earlier turns differently"):
        samples(name, Letters("drops"))
    with pytest.raises(ConfigValueError, match="the tokenizer has no chat template"):
        samples(name, Letters(None))


def test_a_class_is_one_label_for_a_text(tmp_path: Path) -> None:
    name = lines(tmp_path / "a.jsonl", {"text": "ab", "label": 1}, {"text": "c", "label": 0})
    data = TextData(name)
    rows = data.make(Letters())
    batch = data.collate(Letters())([rows[0], rows[1]])
    assert batch["labels"].tolist() == [1, 0]
    assert batch["input_ids"].tolist() == [[1, *codes("ab"), 2], [1, ord("c"), 2, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"body": "a"}], {}, "a record has no column 'text'; it has 'body'. Set column"),
        ([{"text": "a"}], {"sequence_length": 9}, "its 3 tokens do not fill one sample of sequence_length=9"),
        ([3], {}, "a record is a int"),
        ([{"text": "a"}], {"streaming": True}, "streaming: jsonl:.* is read from local files"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, records: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigValueError, match=message):
        samples(lines(tmp_path / "a.jsonl", *records), **options)


def test_names_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigValueError, match="Accepted: text:"):
        TextData("csv:a")
    with pytest.raises(ConfigValueError, match="there is no file, and no folder with files"):
        samples(f"text:{tmp_path / 'none'}")
    with pytest.raises(ConfigValueError, match="text needs a tokenizer"):
        TextData(f"text:{tmp_path}").make(None)


class Counted:
    """A stream of records whose place is its state, as those of `datasets`."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.place = texts, 0

    def __iter__(self) -> Any:
        while self.place < len(self.texts):
            self.place += 1
            yield {"text": self.texts[self.place - 1]}

    def state_dict(self) -> int:
        return self.place

    def load_state_dict(self, place: int) -> None:
        self.place = place


@pytest.mark.parametrize("packs", [True, False])
def test_a_stream_goes_on_from_every_place(packs: bool) -> None:
    def stream() -> TextStream:
        records = Records("hf:x", Counted(["a", "bcdefghij", "k", "lm"]), "x")
        assert records.first == {"text": "a"}  # a look at it moves nothing
        return TextStream(records, Encode("hf:x", Letters(), "text", 5), 3, packs=packs)

    def taken(source: TextStream, count: int) -> list[list[int]]:
        each = iter(source)
        return [next(each)["input_ids"].tolist() for _ in range(count)]

    whole = [each["input_ids"].tolist() for each in stream()]
    assert len(whole) == (7 if packs else 4)
    for place in range(1, len(whole)):
        first, second = stream(), stream()
        assert taken(first, place) == whole[:place]
        second.load_state_dict(first.state_dict())
        assert [each["input_ids"].tolist() for each in second] == whole[place:]
