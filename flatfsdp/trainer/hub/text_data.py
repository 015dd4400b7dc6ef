"""Training text by name: files, JSON lines, and datasets of the `datasets` library; tokenized for a model.

[Note: samples of text] In a record with "messages", a conversation, the answers count; with "prompt" and "completion",
the completion. In any other, a column is text that counts as a whole, or the text for a "label".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.data_loading.datasets import PadCollate
from flatfsdp.trainer.hub.chat import IGNORED, Encoded, encode_chat
from flatfsdp.trainer.hub.packing import packed_on_disk
from flatfsdp.trainer.hub.records import SOURCES, Records, records_of
from flatfsdp.trainer.settings import Settings, dataclass, setting
from flatfsdp.trainer.settings.types import Count, Text

__all__ = ["SOURCES", "DataOptions", "TextData"]


@dataclass(frozen=True, kw_only=True)
class DataOptions(Settings):
    """How text given by name (`--train-data text:PATH`, `jsonl:FILE` or `hf:DATASET`) becomes samples."""

    column: Text = setting("text", "column that holds the text, for records that are not conversations")
    sequence_length: Count = setting(512, "maximum number of tokens per sample")
    packing: bool | None = setting(
        None, "concatenate samples and cut them to sequence_length (default: only for plain text)"
    )
    streaming: bool = setting(False, "hf: stream the dataset rather than download it first")
    train_split: Text = setting("train", "hf: split to train on")
    eval_split: Text = setting("validation", "hf: split to evaluate on")


class TextData:
    """Samples of text, as `train_data` or `eval_data` of a `Task`.

    A sample is a mapping with "input_ids" and "labels", int64, at most `sequence_length` of them; labels are -100
    for tokens that do not count ([Note: samples of text]), or one number for a class. Packed samples all have
    the same length, and attention reaches from one text into the one before it.

    Args:
        name: `text:PATH` (a file, or a folder of them, each one text), `jsonl:FILE`, or `hf:DATASET` (a folder or a
            name on the Hub, also `hf:DATASET:CONFIG`).
        split: of a dataset.
        options: the fields of `DataOptions`.

    Raises:
        ConfigTypeError, ConfigValueError: no such kind, or an option that is not accepted.
    """

    def __init__(self, name: str, *, split: str | None = None, **options: Any) -> None:
        if name.partition(":")[0] not in SOURCES or not name.partition(":")[2]:
            raise ConfigValueError(f"TextData: got {name!r}. Accepted: {', '.join(f'{each}:...' for each in SOURCES)}")
        self.name = name
        self.options = DataOptions(**options)
        self.split = split or self.options.train_split

    def __repr__(self) -> str:
        return self.name

    def make(self, tokenizer: Any) -> Any:
        """The samples: a sequence, or an iterable dataset with a state where they are streamed.

        Raises:
            ConfigValueError: there is no tokenizer or no such data; records have no column of that name.
        """
        if tokenizer is None:
            raise ConfigValueError(f"{self}: text needs a tokenizer, but the task has none: set tokenizer=")
        options = self.options
        records = records_of(self.name, split=self.split, streaming=options.streaming)
        encode = Encode(self.name, tokenizer, options.column, options.sequence_length)
        packs = encode.is_plain(records.first) if options.packing is None else options.packing
        if options.streaming:
            return TextStream(records, encode, options.sequence_length, packs=packs)
        if packs:
            return packed_on_disk(records, encode, options.sequence_length)
        return EncodedRecords(records, encode)

    def collate(self, tokenizer: Any) -> PadCollate:
        """The function that collates its samples."""
        return PadCollate(pad=tokenizer.pad_token_id or 0)


@plain_dataclass(frozen=True)
class Encode:
    """Converts a record to tokens and labels.

    Attributes:
        name: the name of the data, for messages.
        column: the column with the text, for records that are not conversations.
        longest: the number of tokens that are kept of a record; packing keeps all.
    """

    name: str
    tokenizer: Any
    column: str
    longest: int

    def is_plain(self, record: Mapping[str, Any]) -> bool:
        """Whether all tokens of the record count."""
        return not ({"messages", "label"} & record.keys() or {"prompt", "completion"} <= record.keys())

    def __call__(self, record: Mapping[str, Any]) -> Encoded:
        """All tokens of a record, and their labels.

        Raises:
            ConfigValueError: it has no such column.
        """
        if "messages" in record:
            return encode_chat(self.tokenizer, record["messages"], where=self.name)
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        if {"prompt", "completion"} <= record.keys():
            before = self._tokens(record["prompt"], special=True)
            after = [*self._tokens(record["completion"], special=False), *end]
            return Encoded([*before, *after], [*[IGNORED] * len(before), *after])
        if self.column not in record:
            there = ", ".join(map(repr, record))
            raise ConfigValueError(f"{self.name}: a record has no column {self.column!r}; it has {there}. Set column=")
        tokens = [*self._tokens(record[self.column], special=True), *end]
        return Encoded(tokens, int(record["label"]) if "label" in record else tokens)

    def sample(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A record as a separate sample, truncated to `longest`."""
        return self(record).sample(self.longest)

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        eos = self.tokenizer.eos_token_id
        return found[:-1] if special and found and found[-1] == eos else found  # some tokenizers add it


@plain_dataclass(frozen=True, eq=False)
class EncodedRecords:
    """Sample i is record i, tokenized on access."""

    records: Records
    encode: Encode

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.encode.sample(self.records[number])


class TextStream(IterableDataset[dict[str, Tensor]]):
    """Samples of a stream of records, separate or packed. Its state has its position."""

    def __init__(self, records: Records, encode: Encode, length: int, *, packs: bool) -> None:
        self._records, self._encode = records, encode
        self._length, self._packs = length, packs
        self._rest: list[tuple[int, int]] = []  # tokens with their labels that do not fill a sample yet

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._packs:
            yield from map(self._encode.sample, self._records)
            return
        yield from self._windows()
        for record in self._records:
            self._rest += self._encode(record).pairs()
            yield from self._windows()
        self._rest = []

    def _windows(self) -> Iterator[dict[str, Tensor]]:
        while len(self._rest) >= self._length:
            window, self._rest = self._rest[: self._length], self._rest[self._length :]
            tokens, labels = torch.tensor(window).unbind(1)
            yield {"input_ids": tokens.contiguous(), "labels": labels.contiguous()}

    def state_dict(self) -> dict[str, Any]:
        """Its position in the records, and the tokens left over from earlier ones."""
        return {"records": self._records.state_dict(), "rest": list(self._rest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a position."""
        self._records.load_state_dict(state["records"])
        self._rest = [(int(token), int(label)) for token, label in state["rest"]]
