"""Arguments are the caller's: what a program sees of the containers and tensors that it passes, with casts and without,
is what it sees with the same module in one process. [Note: substitutes]"""

from __future__ import annotations

import types
from collections import UserDict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import CPUOffload, MixedPrecision
from tests.conftest import Run
from tests.harness.played_fronts import InPlace, Wrapper
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

WIDTH = 4
STEPS = 2
FRONTS: dict[str, type[Wrapper]] = {"wrapper": Wrapper, "fully_shard": InPlace}
# Casts in float64, in which nothing is lost: everywhere, of the outermost module's inputs only, and of outputs, too.
CASTS: dict[str, MixedPrecision | None] = {
    "no cast": None,
    "casts": MixedPrecision(param_dtype=torch.float64, cast_forward_inputs=True),
    "casts for the root": MixedPrecision(param_dtype=torch.float64),
}

SETTINGS: dict[str, Any] = dict(
    use_orig_params=True,
    cpu_offload=CPUOffload(),
    backward_prefetch="BACKWARD_PRE",
    forward_prefetch=False,
    limit_all_gathers=True,
)

Pair = namedtuple("Pair", "first second")


class Planned(Exception):
    pass


class Named(list[Any]):
    """A list with a constructor of its own."""

    def __init__(self, name: str, items: list[Any]) -> None:
        super().__init__(items)
        self.name = name


class Output(dict[str, Any]):
    """A mapping whose entries are attributes, too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


class Sealed(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("is sealed")


class View(Mapping[str, Any]):
    """A read-only mapping of the program's own."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass
class Box:
    tensor: Tensor | None = None
    items: list[Any] = field(default_factory=list)
    parent: Any = None


@dataclass(frozen=True)
class Frozen:
    tensor: Tensor
    items: list[Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.ends = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor, use: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        y = x + self.one(x).tanh()
        returned = use(self, y, *args, **kwargs)
        return y if returned is None else returned


class Net(nn.Module):
    """`how`: how blocks run."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first, self.blocks, self.last = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()]), Block()
        self.last.ends = True

    def forward(self, x: Tensor, use: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            if self.how == "plain":
                x = block(x, use, *args, **kwargs)
            else:
                x = checkpoint(partial(block, **kwargs), x, use, *args, use_reentrant=self.how == "reentrant")
        if self.how == "plain":
            return self.last(x, use, *args, **kwargs)
        # Inside of the root: the part that is recomputed calls no forward of another unit first.
        return checkpoint(partial(self.tail, **kwargs), x, use, *args, use_reentrant=self.how == "reentrant")

    def tail(self, x: Tensor, use: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for each in tensors_of([args, kwargs]):
            x = x + 0.1 * torch.nn.functional.linear(each, self.first.weight)
        return self.last(x, use, *args, **kwargs)


def tensors_of(tree: Any) -> list[Tensor]:
    """Those of the first levels."""
    if isinstance(tree, Tensor):
        return [tree] if tree.shape[-1:] == (WIDTH,) else []
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple, deque)) else ()
    return [each for value in [*values] for each in tensors_of(value)]


Seen = list[Any]
# The loss of one step of a model, and what the program saw.
Program = Callable[[Any, Tensor], tuple[Tensor, Seen]]


def _list(model: Any, x: Tensor, make: Callable[[list[Any]], Any] = list) -> tuple[Tensor, Seen]:
    """Losses on the side, of which some are computed last in their units; an entry moves."""
    seen: Seen = []

    def use(block: Block, y: Tensor, aux: Any, same: Any) -> None:
        seen.extend((aux is same["aux"], type(aux).__name__, aux[0].shape))
        aux.append(block.two(aux[0] + y).square().mean())
        if len(aux) == 3:
            aux.append(aux[0])
        del same

    scale = x * 2
    aux, same = make([scale]), {}
    same["aux"] = aux
    y = model(x, use, aux, same=same)
    seen += [aux[0] is scale, scale.dtype, len(aux), aux[3] is scale, same["aux"] is aux]
    return y.square().mean() + sum(each.float().sum() for each in aux), seen


def _mapping(model: Any, x: Tensor, make: Callable[[dict[str, Any]], Any] = dict) -> tuple[Tensor, Seen]:
    """States that blocks hand on; entries are replaced, renamed and deleted."""
    seen: Seen = []

    def use(block: Block, y: Tensor, shared: Any, alias: Any) -> None:
        seen.extend((shared is alias, sorted(shared)))
        if "last" in shared:
            y.add_(shared["last"])
        shared["last"] = block.two(y + shared["scale"])
        if "old" in shared:
            shared["renamed"] = shared["old"]
            del shared["old"]
            shared["scale2"] = shared["scale2"] * 2

    scale, old, pair = x * 2, x * 3, Pair(x + 1, [])
    shared = make({"scale": scale, "old": old, "scale2": x * 4, "pair": pair, "text": "a"})
    y = model(x, use, shared, alias=shared)
    seen += [shared["scale"] is scale, shared["renamed"] is old, sorted(shared), shared["pair"] is pair]
    if hasattr(shared, "scale"):
        seen += [shared.scale is scale]
    return y.square().mean() + shared["last"].float().square().mean() + shared["scale2"].float().sum(), seen


def _dataclass(model: Any, x: Tensor) -> tuple[Tensor, Seen]:
    """A box that contains itself."""
    seen: Seen = []

    def use(block: Block, y: Tensor, *, box: Box) -> None:
        seen.extend((box.parent is box, box.items[0].shape))
        box.items.append(block.two(y + box.items[0]).mean())
        box.tensor = y if box.tensor is None else box.tensor + y

    box, item = Box(items=[x * 2]), x
    box.parent, box.items[0] = box, item
    y = model(x, use, box=box)
    assert box.tensor is not None
    seen += [box.items[0] is item, len(box.items), box.parent is box]
    return y.square().mean() + box.tensor.float().mean() + sum(each.float().sum() for each in box.items), seen


def _read_only(model: Any, x: Tensor) -> tuple[Tensor, Seen]:
    """What cannot be written to is handed over with the same lists inside."""
    seen: Seen = []
    written: list[Any] = []

    def use(block: Block, y: Tensor, proxy: Any, frozen: Frozen, pair: Pair, sealed: Any, view: Any) -> None:
        seen.extend(
            each is written for each in (proxy["items"], frozen.items, pair.second, sealed["items"], view["items"])
        )
        seen.extend(type(each).__name__ for each in (proxy, frozen, pair, sealed, view))
        given = proxy["scale"] + frozen.tensor + pair.first + sealed["scale"] + view["scale"]
        written.append(block.two(y + given).mean())

    entries: dict[str, Any] = {"scale": x * 2, "items": written}
    arguments = (
        types.MappingProxyType(entries),
        Frozen(x * 3, written),
        Pair(x * 4, written),
        Sealed(entries),
        View(entries),
    )
    y = model(x, use, *arguments)
    seen += [len(written), entries["scale"].dtype]
    return y.square().mean() + sum(each.float() for each in written), seen


def _two_names(model: Any, x: Tensor) -> tuple[Tensor, Seen]:
    seen: Seen = []

    def use(block: Block, y: Tensor, first: Tensor, *, second: Tensor, boxes: list[Box]) -> None:
        seen.extend((first is second, boxes[0] is boxes[1], boxes[0].tensor is first))

    given, box = x * 2, Box()
    box.tensor = given
    y = model(x, use, given, second=given, boxes=[box, box])
    return y.square().mean(), [*seen, box.tensor is given]


def _filled(model: Any, x: Tensor) -> tuple[Tensor, Seen]:
    """Tensors that the forward fills, with and without a graph, one of another shape."""

    def use(
        block: Block, y: Tensor, out: Tensor, empty: Tensor, holder: Mapping[str, Tensor], *, with_graph: Tensor
    ) -> None:
        with torch.no_grad():
            out.copy_(y)
            torch.add(y, 1, out=empty)
            holder["part"][:, 1].fill_(3)
        with_graph[0] = block.two(y).mean(0)

    out, empty, part, with_graph = torch.zeros(2, WIDTH), torch.zeros(0), torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)
    y = model(x, use, out, empty, {"part": part}, with_graph=with_graph)
    values = [each.detach().clone() for each in (out, empty, part, with_graph)]
    return y.square().mean() + with_graph.square().sum(), values


def _raises(model: Any, x: Tensor) -> tuple[Tensor, Seen]:
    """A forward that fails in the middle; the next one gets the same containers."""
    seen: Seen = []
    calls = []

    def use(block: Block, y: Tensor, shared: dict[str, Any], out: Tensor) -> None:
        calls.append(1)
        shared[f"step {len(calls)}"] = shared["scale"].sum().item()
        out.add_(1)
        if len(calls) == 2:
            raise Planned

    scale, out = x.detach() * 2, torch.zeros(WIDTH)
    shared: dict[str, Any] = {"scale": scale, "pair": (x, out)}
    pair = shared["pair"]
    for _ in range(2):
        with suppress(Planned):
            y = model(x, use, shared, out)
        seen += [shared["scale"] is scale, shared["pair"] is pair, scale.dtype, sorted(shared), out.clone()]
    return y.square().mean(), seen


def _one_after_the_other(model: Any, x: Tensor) -> tuple[Tensor, Seen]:
    """One container in two calls, before one backward."""

    def use(block: Block, y: Tensor, shared: dict[str, Any]) -> None:
        shared["sum"] = shared["sum"] + block.two(y * shared["scale"]).mean()

    scale = x * 2
    shared: dict[str, Any] = {"scale": scale, "sum": x.new_zeros(())}
    y = model(x, use, shared)
    seen = [shared["scale"] is scale]
    z = model(x + 1, use, shared)
    return y.square().mean() + z.square().mean() + shared["sum"].float(), [*seen, shared["scale"] is scale]


def _returned(model: Any, x: Tensor) -> tuple[Tensor, Seen]:
    """An output that is an argument."""

    def use(block: Block, y: Tensor, shared: dict[str, Any]) -> Any:
        shared["y"] = block.two(y * shared["scale"])
        return (y, shared) if block.ends else None

    shared = {"scale": x * 2}
    y, found = model(x, use, shared)
    return y.square().mean() + shared["y"].float().mean(), [found is shared, found["y"] is shared["y"]]


PROGRAMS: dict[str, Program] = {
    "list": _list,
    "list with a constructor": partial(_list, make=partial(Named, "a")),
    "deque": partial(_list, make=deque),
    "dict": _mapping,
    "user dict": partial(_mapping, make=UserDict),
    "attributes": partial(_mapping, make=lambda entries: _filled_by(Output(), entries)),
    "dataclass": _dataclass,
    "read-only": _read_only,
    "two names": _two_names,
    "filled": _filled,
    "raises": _raises,
    "one after the other": _one_after_the_other,
    "returned": _returned,
}


def _filled_by(mapping: Any, entries: Mapping[str, Any]) -> Any:
    for key, value in entries.items():
        mapping[key] = value
    return mapping


def _same(seen: Any, expected: Any) -> None:
    assert len(seen) == len(expected), (seen, expected)
    for one, other in zip(seen, expected, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other, (seen, expected)


def play(rank: int, world: int, program: str, front: str, casts: str, how: str) -> None:
    alone, net = Net(how), Net(how)
    mixed = CASTS[casts]
    model = FRONTS[front].shard(net, {Block}, "FULL_SHARD", {**SETTINGS, "mixed_precision": mixed})
    one, many = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model))
    torch.manual_seed(1)
    for _ in range(STEPS):
        batch = torch.randn(2 * world, WIDTH)
        one.zero_grad()
        expected: list[Seen] = []
        for mine in batch.chunk(world):
            loss, seen = PROGRAMS[program](alone, mine)
            (loss / world).backward()
            expected.append(seen)
        one.step()
        many.zero_grad()
        loss, seen = PROGRAMS[program](model, batch.chunk(world)[rank])
        _same(seen, expected[rank])
        loss.float().backward()
        many.step()
    for (name, value, _), each in zip(FRONTS[front].shown(model, False), alone.parameters(), strict=True):
        torch.testing.assert_close(value, each.detach(), msg=f"{name} differs")


def crossed(kinds: Sequence[str]) -> list[Any]:
    """All pairs of a kind, a front and casts; with --thorough, all three."""
    return [
        pytest.param(kind, front, casts, id=f"{kind}-{front}-{casts}")
        for row, kind in enumerate(kinds)
        for column, casts in enumerate(CASTS)
        for front in some([*FRONTS], 2, row + column)
    ]


@pytest.mark.parametrize(("program", "front", "casts"), crossed([*PROGRAMS]))
def test_containers_and_tensors_are_as_in_one_process(run: Run, program: str, front: str, casts: str) -> None:
    run(2, play, program, front, casts, "plain")


class Reader:
    """A program whose blocks read from containers that a checkpoint refers to, and write what is the same when they run
    again."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach().requires_grad_()
        self.scale, self.part = x * 0.2, x * 0.3
        self.box, self.pair = Box(x * 0.4), (x * 0.5, x)
        self.shared: dict[Any, Any] = {"scale": self.scale, "pair": self.pair}
        self.parts = [self.part, self.part]
        self.fails = False

    def loss(self, model: Any) -> Tensor:
        y = model(self.x, self.use, self.shared, self.parts, box=self.box)
        if self.fails:
            y.register_hook(_fail)
        self.check()
        return y.float().square().mean()

    def use(self, block: Block, y: Tensor, shared: Any, parts: list[Tensor], *, box: Box) -> Tensor:
        assert shared is self.shared and parts is self.parts and box is self.box and parts[0] is parts[1]
        read = shared["scale"] + parts[0] + box.tensor + shared["pair"][0]
        shared[block.ends] = "written"
        z = block.two(y + read)
        if self.fails and z.requires_grad:
            z.register_hook(_fail)
        return y + z

    def check(self) -> None:
        """The containers are as they were made, and what has been written."""
        assert self.shared["scale"] is self.scale and self.shared["pair"] is self.pair and self.parts[1] is self.part
        assert self.shared[True] == "written" and self.box.tensor is not None
        assert {each.dtype for each in (self.scale, self.part, self.box.tensor, *self.pair)} == {torch.float32}


def _fail(grad: Tensor) -> Tensor:
    raise Planned


def recompute(rank: int, world: int, front: str, casts: str, how: str) -> None:
    alone, net = Net(how), Net(how)
    model = FRONTS[front].shard(net, {Block}, "FULL_SHARD", {**SETTINGS, "mixed_precision": CASTS[casts]})
    one, many = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model))
    torch.manual_seed(1)
    for step in range(3):
        batch = torch.randn(2 * world, WIDTH)
        if step == 1:
            reader = Reader(batch)
            reader.fails = True  # in the backward
            with pytest.raises(Planned):
                reader.loss(model).backward()
            reader.check()
        one.zero_grad()
        for mine in batch.chunk(world):
            (Reader(mine).loss(alone) / world).backward()
        one.step()
        many.zero_grad()
        reader = Reader(batch.chunk(world)[rank])
        loss = reader.loss(model)
        loss.backward()
        reader.check()
        many.step()
    for (name, value, _), each in zip(FRONTS[front].shown(model, False), alone.parameters(), strict=True):
        torch.testing.assert_close(value, each.detach(), msg=f"{name} differs")


@pytest.mark.parametrize(("how", "front", "casts"), crossed(["plain", "reentrant", "not reentrant"]))
def test_also_where_a_checkpoint_runs_a_forward_again(run: Run, front: str, casts: str, how: str) -> None:
    run(2, recompute, front, casts, how)
