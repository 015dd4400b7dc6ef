"""Golden traces: recordings of the engine's operations in each of the programs of `programs.py`.

A trace is text: the program's settings, then a paragraph for each operation with the actions of the schedules, what
came of them, both in order, and the memory held. Codes are fixed here, and are none of the engine's names. An action
is a verb and its units, in parentheses: the value that a schedule has returned, as it is executed.

    (g gather)   (a gather ahead)   (w wait)   (f free)   (k free but for what is kept)   (l leave unsharded)
    (z participate)   (c complete)   (s reduce)   (t end turn)   (i release inputs)
    G unsharded   u upload   f forward   p post-forward shard   r resharded   b backward
    d gradients done   t stepped   k kept   c consolidated   e end of a backward
                          all with the numbers of their units, in the order of modules; 0 is the outermost
    A all-gather   S reduce-scatter   R all-reduce   B broadcast   M message   with the bytes of their larger side
    <x>y stream x waits for y   +x an event on stream x   of an accelerator's streams, where the program has one

`traces.txt` has a line for each program: its number, and its trace, compressed. `python -m tests.golden.traces 17 23`
records the traces of these programs again, `--changed` those that differ now (and names them, for the commit);
`--show 17` prints a recorded one.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import gc
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flatfsdp import FullyShardedDataParallel, errors
from flatfsdp.engine.schedule.actions import Verb
from tests.golden.programs import COUNT, Player, world_of
from tests.harness import inspect

FILE = Path(__file__).with_name("traces.txt")
ACTIONS: dict[Verb, str] = {
    "gather": "g",
    "ahead": "a",
    "wait": "w",
    "free": "f",
    "retain": "k",
    "leave": "l",
    "participate": "z",
    "complete": "c",
    "reduce": "s",
    "end turn": "t",
    "release inputs": "i",
}
SHOWN = {"gather", "reduce"}  # events that actions and collectives show
EVENTS = {
    "gathered": "G",
    "upload": "u",
    "forward": "f",
    "post_forward_shard": "p",
    "reshard": "r",
    "backward": "b",
    "grads": "d",
    "step": "t",
    "keep": "k",
    "consolidate": "c",
    "end": "e",
}
KINDS = {"post_forward_shard": "portion"}  # kinds of memory that had another name when traces were written
COLLECTIVES = {"_allgather_base_": "A", "_reduce_scatter_base_": "S", "allreduce_": "R", "broadcast_": "B"}
LENGTH = 116  # of a line of a trace


class Collectives(TorchDispatchMode):
    """Writes down every operation on a process group."""

    def __init__(self, tokens: list[str]) -> None:
        super().__init__()
        self._tokens = tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
            size = max((x.numel() * x.element_size() for x in tensors), default=0)
            name = func._schema.name.removeprefix("c10d::")
            self._tokens.append(f"{COLLECTIVES.get(name, 'M')}{size}")
            if name in ("_allgather_base_", "_reduce_scatter_base_"):
                _answer(*tensors[:2])
        return func(*args, **(kwargs or {}))


def _answer(output: Tensor, own: Tensor) -> None:
    """Fill `output` as if all ranks were alike, which not every version of torch's fake group does: undefined
    values may be infinite, and then a scaler leaves out a step."""
    with _disable_current_modes(), torch.no_grad():
        smaller = min(output.numel(), own.numel())
        if smaller:
            output.view(-1, smaller).copy_(own.view(-1, smaller)[0].clone())


class StreamLog(list[str]):
    """The log of a double of a device, whose waits and records become tokens among the others."""

    def __init__(self, tokens: list[str]) -> None:
        super().__init__()
        self._tokens = tokens

    def append(self, entry: str) -> None:
        before, waits, after = entry.partition(" waits for ")
        if waits:
            self._tokens.append(f"<{_stream(before)}>{_stream(after)}")
        elif entry.startswith("record "):
            self._tokens.append(f"+{_stream(entry.removeprefix('record '))}")


def _stream(name: str) -> str:
    return {"replicate": "v", "the host": "h", "the backend": "x"}.get(name, name[:1])


class Recorder:
    """Records the operations of one program."""

    def __init__(self, player: Player) -> None:
        self.lines: list[str] = []
        self.tokens: list[str] = []
        self._player = player
        self._model: Any = None
        self._listening = ExitStack()
        self._total: dict[str, list[int]] = {}

    def begin(self, words: str) -> None:
        """An operation begins, and the one before it has ended."""
        self.end()
        self.lines.append(f"- {words}")

    def end(self) -> None:
        """Record the events since the operation began."""
        gc.collect()  # reference cycles are freed at the same place each time
        if self._model is not None:
            self._write(self._model)
        if self._model is not self._player.model:
            self._listening.close()
            self._model = self._player.model
            self._listening.enter_context(inspect.events(self._model).listening(self._note))
            self._listening.enter_context(inspect.actions(self._model, self._act))
            modules = FullyShardedDataParallel.fsdp_modules(self._model)
            names = {id(module): name for name, module in self._model.named_modules()}
            self._numbers = {names[id(each)]: f"{at}" for at, each in enumerate(modules)}
        inspect.memory(self._model).reset_peaks()

    def close(self) -> list[str]:
        """The program has ended: its trace."""
        self.end()
        self._listening.close()
        total = [f"{kind} {count}x{size}" for kind, (count, size) in sorted(self._total.items())]
        return [*self.lines, f"collectives: {', '.join(total) or 'none'}"]

    def _note(self, event: inspect.Event) -> None:
        if event.kind not in SHOWN:
            self.tokens.append(f"{EVENTS.get(event.kind, event.kind)}{self._numbers.get(event.unit, event.unit)}")

    def _act(self, verb: Verb, units: Sequence[str]) -> None:
        self.tokens.append(f"({ACTIONS[verb]}{','.join(self._numbers.get(unit, unit) for unit in units)})")

    def _write(self, model: Any) -> None:
        for token in self.tokens:
            if token[0] in "ASRBM":
                count = self._total.setdefault(token[0], [0, 0])
                count[0] += 1
                count[1] += int(token[1:])
        line = " "
        for token in self.tokens:
            if len(line) + len(token) >= LENGTH:
                self.lines.append(line)
                line = " "
            line += f" {token}"
        if line.strip():
            self.lines.append(line)
        self.tokens.clear()
        memory = inspect.memory(model)
        peaks, held = (
            " ".join(f"{KINDS.get(kind, kind)}={count}" for kind, count in sorted(counts.items()) if kind != left_out)
            for counts, left_out in ((memory.peaks(), ""), (memory.held, "shard"))
        )
        grads = "".join(".g"[parameter.grad is not None] for parameter in model.parameters())
        self.lines.append(f"  peaks: all={memory.peak_total} {peaks}")
        self.lines.append(f"  left: {held}{'; ' if held else ''}grads {grads}")


@contextmanager
def _by_itself() -> Iterator[None]:
    """A context in which warnings and garbage of earlier programs of this process have no effect."""
    with warnings.catch_warnings(), patch.object(errors, "_warned", set()):
        warnings.simplefilter("ignore")
        enabled = gc.isenabled()
        gc.disable()
        # Existing objects are skipped: collections inside are short. They stay frozen, as `conftest` has frozen most of
        # them: the collector would go through them all after each program.
        gc.freeze()
        try:
            yield
            gc.collect()
        finally:
            if enabled:
                gc.enable()


def trace_of(number: int) -> list[str]:
    """Play program `number` and record its trace."""
    with _by_itself(), torch.random.fork_rng(devices=[]), world_of(number) as (drawn, settings, device):
        player = Player(number, settings, drawn)
        recorder = Recorder(player)
        player.begin = recorder.begin
        player.beside = partial(Collectives, recorder.tokens)
        if device is not None:
            device.log = StreamLog(recorder.tokens)
        with Collectives(recorder.tokens):
            try:
                player.play()
            except errors.FlatFSDPError as error:
                recorder.tokens.append(type(error).__name__)
        lines = recorder.close()
        if device is not None:
            assert not device.races, f"program {number}: {'; '.join(device.races)}"
        del player, recorder
    return [f"program {number}: {', '.join(settings.words)}", *lines]


# --- the file ---------------------------------------------------------------------------------------------------------


def packed(lines: list[str]) -> str:
    """One line of the file, without the number."""
    return base64.b85encode(zlib.compress("\n".join(lines).encode(), 9)).decode()


def unpacked(text: str) -> list[str]:
    """The trace in such a line."""
    return zlib.decompress(base64.b85decode(text)).decode().splitlines()


def written() -> dict[int, str]:
    """The lines of the file, by number."""
    rows = (line.split(" ") for line in FILE.read_text().splitlines()) if FILE.exists() else ()
    return {int(number): text for number, text in rows}


@lru_cache
def golden() -> dict[int, list[str]]:
    """The traces that are written down."""
    return {number: unpacked(text) for number, text in written().items()}


def difference(expected: list[str], found: list[str]) -> str:
    """Line by line; "" where they are the same."""
    return "\n".join(difflib.unified_diff(expected, found, "golden", "found", n=2, lineterm=""))


def main() -> None:
    """Record traces again."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.traces", description=__doc__.partition("\n")[0])
    parser.add_argument("numbers", nargs="*", type=int, help="programs whose traces are written anew")
    parser.add_argument("--changed", action="store_true", help="the programs that do something else now")
    parser.add_argument("--show", action="store_true", help="print what is written down instead")
    asked = parser.parse_args()
    lines, traces = written(), golden()
    numbers = range(COUNT) if asked.changed else asked.numbers
    if asked.show:
        print("\n".join(line for number in numbers for line in traces[number]))
        return
    changed = []
    for number in numbers:
        found = trace_of(number)
        if found != traces.get(number):
            print(difference(traces.get(number, []), found) if number in traces else f"program {number} is new")
            changed.append(number)
            lines[number] = packed(found)  # the others' stay as they are: another zlib would compress them otherwise
    FILE.write_text("".join(f"{number} {text}\n" for number, text in sorted(lines.items())))
    print(f"written anew: {' '.join(map(str, changed)) or 'none'}", file=sys.stderr)


if __name__ == "__main__":
    main()
