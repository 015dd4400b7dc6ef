"""A block outlives its process: what a killed process has left of it is whole, or is not taken for that."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flatfsdp.elastic.snapshot import Block

pytestmark = pytest.mark.unit

SIZE = 8_000_000  # bytes of a block, which take about a millisecond to copy

# A process that copies into two blocks in turns, in each copy the number of it everywhere, until it is killed.
COPIES = f"""
import torch
from flatfsdp.elastic.holding import Entry, Facts, Holding
from flatfsdp.elastic.keeper import Keeper
from flatfsdp.elastic.machines import Machines
from flatfsdp.elastic.snapshot import Block

blocks = Block(), Block()
print(*(block.descriptor for block in blocks), flush=True)
keeper = Keeper(0, blocks, Machines((0,), {{}}))
state = [torch.empty({SIZE // 32}, dtype=torch.int64) for _ in range(4)]
entries = tuple(Entry(name, "", torch.int64, ({SIZE // 32},), None, 0, {SIZE // 32}) for name in "abcd")
for number in range(1_000_000):
    for each in state:
        each.fill_(number)
    version = keeper.begin(number, Holding(Facts(entries, {{}}, ()), state), str(number).encode())
    version.complete = True
"""


def values_of(block: Block, size: int) -> set[int]:
    """The smallest and the largest: one value, if there is no other; none of a block that has no memory yet."""
    values = block.memory[:size].view(torch.int64)
    return {int(each) for each in values.aminmax()} if values.numel() else set()


def test_a_process_that_is_killed_in_a_copy_leaves_the_other_block_whole() -> None:
    in_a_copy = 0
    process = subprocess.Popen([sys.executable, "-c", COPIES], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        blocks = [Block.of_process(process.pid, int(each)) for each in process.stdout.readline().split()]
        for _ in range(40):  # stopped at so many places, the last of which is the end
            time.sleep(0.005)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            for block in blocks:
                block.map()
            whole = [block for block in blocks if block.number is not None]
            for block in whole:
                assert values_of(block, block.state) == {block.number}
                assert block.tail == str(block.number).encode()
            if len(whole) == 1:
                (unfinished,) = {*blocks} - {*whole}
                in_a_copy += values_of(unfinished, min(SIZE, unfinished.memory.numel())) != {whole[0].number - 1}
            os.kill(process.pid, signal.SIGCONT)
    finally:
        process.kill()
        process.wait()
    assert in_a_copy  # some stop was in the middle of one
    assert any(block.number is not None for block in blocks)


def test_a_block_is_whole_from_its_last_byte_to_the_first_of_the_next() -> None:
    block = Block()
    seen = Block.of_process(os.getpid(), block.descriptor)
    assert seen.number is None
    block.take([torch.arange(3)], [0], 24, b"tail")
    assert seen.number is None
    block.set_whole(-5)
    seen.map()
    assert (seen.number, seen.state, seen.tail) == (-5, 24, b"tail")
    block.take_back()
    assert seen.number is None


def test_a_block_grows_in_place() -> None:
    block = Block()
    seen = Block.of_process(os.getpid(), block.descriptor)
    block.take([torch.arange(100)], [0], 800, b"a long tail")
    block.take([torch.arange(2)], [0], 16, b"t")
    assert (block.nbytes, block.tail) == (17, b"t")
    block.take([torch.arange(80_000)], [0], 640_000, b"t")
    seen.map()
    assert seen.tail == b"t" and torch.equal(seen.memory, block.memory)
    assert torch.equal(seen.memory[:640_000].view(torch.int64), torch.arange(80_000))


def test_nothing_is_left_of_a_block_that_nobody_holds() -> None:
    def files() -> int:
        names = []
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                names.append(os.readlink(each))
        return sum("memfd:flatfsdp" in name for name in names)

    before = files()
    block = Block()
    seen = Block.of_process(os.getpid(), block.descriptor)
    block.take([torch.arange(3)], [0], 24, b"")
    assert files() > before
    del block, seen
    assert files() == before
