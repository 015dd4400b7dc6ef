"""The options of the demonstration, and the task that they make."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated

from flatfsdp.trainer.arguments import Task, TrainingArguments
from flatfsdp.trainer.callbacks import Callback, SampleText
from flatfsdp.trainer.data_loading import TokenWindows
from flatfsdp.trainer.demo.corpus import Corpus, Split, split_of
from flatfsdp.trainer.demo.model import ByteTransformer
from flatfsdp.trainer.objectives.objectives import CausalLM
from flatfsdp.trainer.settings.field_types import Count, FilePath, Text, Whole
from flatfsdp.trainer.settings.schema import Field, Settings, dataclass, setting

# Steps, so that two runs do the same; minutes, for a machine slower than expected.
DEFAULTS = TrainingArguments(
    steps=1200, minutes=1.5, batch=8, lr=4e-3, warmup=0.05, weight_decay=0.1, clip=1.0, eval_batches=64,
    plot=True,
)  # fmt: skip
"""Settings of a run that is given no others."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Settings):
    """The text and the model over its bytes.

    Raises:
        ConfigTypeError, ConfigValueError: at construction, for a field or a combination that is not accepted.
    """

    text: FilePath | None = setting(
        None, "a file, or a folder whose files are read in sorted order; none for the Python library's sources"
    )
    valid_part: Annotated[float, Field(gt=0, lt=1)] = setting(
        0.05, "share of the bytes, at the end, held out for evaluation"
    )
    layers: Count = setting(2, "transformer blocks")
    width: Count = setting(128, "features per position")
    heads: Count = setting(4, "attention heads, among which the width is divided")
    context: Annotated[int, Field(ge=2)] = setting(64, "bytes per sequence")
    sample: Whole = setting(300, "bytes of text to generate at the end")
    prompt: Text = setting("def ", "beginning of that text")

    def check_together(self) -> None:
        if self.width % (2 * self.heads):
            # Rotary positions turn pairs of features, so every head needs an even number of them.
            self.refuse("heads", f"{self.called('width')} {self.width} must be a multiple of twice {self.heads}")

    def split(self) -> Split:
        """How the text is split; reads the sizes of its files only.

        Raises:
            ConfigValueError: there is no such text, or it is too short.
        """
        return split_of(self.text, valid_part=self.valid_part, context=self.context)

    def task(self) -> Task:
        """The task; the text is read when a rank asks for it."""
        data = _Data(self)
        return Task(model=self.model, train_data=data.train, eval_data=data.valid, objective=CausalLM())

    def model(self) -> ByteTransformer:
        """The model, untrained."""
        return ByteTransformer(width=self.width, layers=self.layers, heads=self.heads, context=self.context)

    def callbacks(self) -> list[Callback]:
        """The text at the end, if any."""
        if not self.sample:
            return []
        sample = SampleText(
            self.prompt,
            length=self.sample,
            context=self.context,
            encode=encode,
            decode=decode,
            only_at_end=True,
            temperature=temperature,
        )
        return [sample]


def encode(text: str) -> list[int]:
    """The bytes of `text`."""
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    """The text that bytes make, as far as they do."""
    return bytes(tokens).decode(errors="replace")


def temperature(byte: int) -> float:
    """Of what follows `byte`: a word that has begun is spelled as the model knows it, while what comes next, and how
    far a line is indented, is drawn more freely. (Runs of blanks would never end otherwise.)"""
    return 0.3 if chr(byte).isalpha() else 0.8


class _Data:
    """The text's two parts as datasets, read once."""

    def __init__(self, options: DemoOptions) -> None:
        self._options = options

    @cached_property
    def _corpus(self) -> Corpus:
        options = self._options
        return Corpus.read(options.text, valid_part=options.valid_part, context=options.context)

    def train(self) -> TokenWindows:
        return TokenWindows(self._corpus.train, context=self._options.context)

    def valid(self) -> TokenWindows:
        return TokenWindows(self._corpus.valid, context=self._options.context)
