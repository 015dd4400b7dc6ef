"""Random training programs for golden traces: one rank's side of them, under torch's fake process group.

Program `number` is the same on every machine and in every version of Python: only `random.Random.random` is drawn from.
Numbers that are computed mean nothing and decide nothing. A recorded program does not change: new features are
covered by new kinds of programs, with numbers behind the last.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, StateDictType, comm_hooks
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice

OLDEST = 300  # programs up to here have no forward with a backward inside
PARTIAL = 320  # from here on, programs add up partial sums on the double of a device
COUNT = 340
WIDTH, ROWS = 4, 2
T = TypeVar("T")


class Drawn:
    """Draws the choices of a program, by nothing but `random()`."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number).random

    def below(self, bound: int) -> int:
        return int(self._random() * bound)

    def chance(self, share: float) -> bool:
        return self._random() < share

    def one(self, of: Sequence[T]) -> T:
        return of[self.below(len(of))]

    def some(self, of: Sequence[T], share: float = 0.5) -> list[T]:
        return [each for each in of if self._random() < share]


class Planned(Exception):
    """The exception that a program raises and catches."""


def _fail(grad: Tensor) -> Tensor:
    raise Planned


# --- models -----------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """A unit, or several; `fails` names the pass that raises. Sizes differ from part to part."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.fails == "forward":
            raise Planned
        if self.fails == "backward" and y.requires_grad:
            y.register_hook(_fail)
        return x + self.down(torch.tanh(y))


class Around(nn.Module):
    """A unit around another one."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before, self.inner, self.scale = nn.Linear(WIDTH, WIDTH), Part(hidden), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.before(x)) * self.scale


class Within(nn.Module):
    """Goes backward through the unit inside while its own forward runs."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), Part(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if torch.is_grad_enabled() and isinstance(self.inner, FullyShardedDataParallel):
            loss = _loss(self.inner(x.detach()))
            if loss.requires_grad:
                loss.backward()
        return self.inner(x)


class Adapter(nn.Module):
    """A frozen layer and a trainable one."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, hidden // 2, bias=False), nn.Linear(hidden // 2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Motley(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(hidden, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(x) + torch.tanh(self.wide).sum().to(x.dtype)


class Fork(nn.Module):
    """Two outputs, of which a loss may use one; a parameter that nothing uses."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, hidden)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.side(x)


class Expert(nn.Module):
    """One of a mixture."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight.t()).sum(1, keepdim=True)


class Mixture(nn.Module):
    """Experts of which a forward runs some, in some order. [Note: conditional units]"""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert(hidden + index) for index in range(3))
        self.used: list[int] = [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        for index in self.used:
            x = self.experts[index](x)
        return x


KINDS: tuple[type[nn.Module], ...] = (Part, Part, Part, Around, Around, Adapter, Motley, Fork)
MORE_KINDS: tuple[type[nn.Module], ...] = (Within, Within, Within, Part, Around, Fork)


class Net(nn.Module):
    """Parts between two layers of the root's own.

    Attributes:
        order: which parts a forward runs. recompute: of each part, None or whether its checkpoint is reentrant.
        pair: where two parts that follow each other are recomputed together. counts: which of the second outputs the
            loss sees; those that it does not are computed all the same.
    """

    def __init__(self, drawn: Drawn, kinds_of_parts: Sequence[type[nn.Module]] = KINDS) -> None:
        super().__init__()
        kinds = [drawn.one(kinds_of_parts) for _ in range(2 + drawn.below(3))]
        if drawn.chance(0.15):
            kinds.append(Mixture)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(kind(5 + 2 * index) for index, kind in enumerate(kinds))
        self.recompute = [drawn.one((None, None, None, True, False)) for _ in kinds]
        self.order = [*range(len(kinds))]
        if drawn.chance(0.25):
            self.order.append(drawn.below(2))  # is called again
        self.pair = drawn.one((None, None, None, True, False))
        self.counts = True
        if Mixture in kinds:  # with such parts reentrant checkpoints are refused in accumulation
            self.recompute = [None if each else each for each in self.recompute[:-1]] + [None]
            self.pair = None if self.pair else self.pair
        if Within in kinds:  # recomputed, they would go backward once more
            self.recompute, self.pair = [None for _ in self.recompute], None
        if drawn.chance(0.2):
            self.parts[drawn.below(2)].requires_grad_(False)
        if drawn.chance(0.15):
            self.last.weight = self.first.weight
        if drawn.chance(0.1) and isinstance(self.parts[0], Part) and isinstance(self.parts[1], Part):
            self.parts[1].up.bias = nn.Parameter(torch.zeros(self.parts[1].up.out_features))
            self.parts[0].down.bias = self.parts[1].down.bias  # of another unit

    @property
    def is_reentrant(self) -> bool:
        """Whether `torch.autograd.grad` is refused."""
        return True in self.recompute or self.pair is True

    def _run(self, indices: Sequence[int], x: Tensor) -> Tensor:
        for index in indices:
            part = self.parts[index]
            found = part(x)
            if isinstance(found, tuple):
                x = found[0] + found[1].sum() if self.counts else found[0]
            else:
                x = found
        return x

    def encode(self, x: Tensor) -> Tensor:
        return self._run([0], self.first(x))

    def forward(self, x: Tensor, most: int = 99) -> Tensor:
        """`most`: of its parts, run as many."""
        x = self.first(x)
        left = self.order[:most]
        if self.pair is not None and len(left) > 1:
            together, left = left[:2], left[2:]
            x = checkpoint(partial(self._run, together), x, use_reentrant=self.pair)
        for index in left:
            how = self.recompute[index]
            run = partial(self._run, [index])
            x = run(x) if how is None else checkpoint(run, x, use_reentrant=how)
        return self.last(x)


# --- settings ---------------------------------------------------------------------------------------------------------

STRATEGIES = ["FULL_SHARD"] * 4 + ["SHARD_GRAD_OP"] * 2 + ["NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD"]
STRATEGIES.append("_HYBRID_SHARD_ZERO2")
OF_REPLICAS = ["NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
PRECISIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {"param_dtype": torch.bfloat16}),
    ("bf16, fp32 reduce", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    ("fp64 reduce", {"reduce_dtype": torch.float64}),
    ("bf16, full in eval", {"param_dtype": torch.bfloat16, "full_precision_in_eval": True}),
)


class Settings:
    """The settings by which a program wraps its model; `words` describe them."""

    def __init__(self, drawn: Drawn, *, partial_sums: bool = False) -> None:
        self.partial_sums = partial_sums
        self.strategy = drawn.one(OF_REPLICAS if partial_sums else STRATEGIES)
        hybrid = "HYBRID" in self.strategy
        self.world = drawn.one((4, 8) if hybrid else (2, 2, 3, 4, 4, 1))
        self.rank = drawn.below(self.world)
        self.original = drawn.chance(0.6)
        self.device = drawn.chance(0.15) or partial_sums
        self.large = drawn.chance(0.3)
        self.options: dict[str, Any] = {
            "sharding_strategy": self.strategy,
            "use_orig_params": self.original,
            "backward_prefetch": drawn.one(("BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_MID", "BACKWARD_POST", None)),
            "forward_prefetch": drawn.chance(0.25),
            "limit_all_gathers": drawn.chance(0.7),
            "join_units_below": drawn.one((0, 0, 400, 2**20)),
        }
        self.words = [self.strategy, "orig" if self.original else "flat", f"rank {self.rank} of {self.world}"]
        self.words += [f"{name} {value}" for name, value in [*self.options.items()][2:]]
        self._more(drawn)
        self.nested = drawn.one(({Part, Around}, {Part}, {Around}, None))

    def _more(self, drawn: Drawn) -> None:
        if drawn.chance(0.12):
            self.options["cpu_offload"] = CPUOffload(offload_params=True)
            self.words.append("offload")
        if drawn.chance(0.25):
            name, fields = drawn.one(PRECISIONS)
            self.options["mixed_precision"] = MixedPrecision(**fields)
            self.words.append(name)
        if self.world in (4, 8) and self.strategy in ("FULL_SHARD", "HYBRID_SHARD") and drawn.chance(0.25):
            self.options["reshard_after_forward"] = 2
            self.words.append("reshard to 2")
        self.hook = self.strategy in ("FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP") and drawn.chance(0.1)
        self.in_backward = self.original and not self.hook and drawn.chance(0.12)
        self.on_callers = drawn.chance(0.3) and not (
            self.options["forward_prefetch"] or self.options["backward_prefetch"]
        )
        self.words += [name for name in ("device", "large", "hook", "in_backward", "on_callers") if getattr(self, name)]

    def wrap(self, net: Net) -> Any:
        options = dict(self.options)
        if "HYBRID" in self.strategy:
            options["device_mesh"] = dist.init_device_mesh("cpu", (2, self.world // 2))
        nested: set[type[nn.Module]] = {Adapter, Motley, Fork, Mixture, Expert, Within}
        policy = None if self.nested is None else nested | self.nested
        return FullyShardedDataParallel(net, auto_wrap_policy=policy, **options)


# --- programs ---------------------------------------------------------------------------------------------------------


class Player:
    """Plays one program.

    Attributes:
        begin: called with a description of each operation before it is carried out.
        beside: entered by threads that a program starts.
    """

    def __init__(self, number: int, settings: Settings, drawn: Drawn) -> None:
        self.drawn, self.settings = drawn, settings
        self.begin: Callable[[str], None] = lambda words: None
        self.beside: Callable[[], AbstractContextManager[Any]] = nullcontext
        torch.manual_seed(number)
        self.net = Net(drawn, KINDS if number < OLDEST or settings.partial_sums else MORE_KINDS)
        self.model: Any = settings.wrap(self.net)
        flatfsdp.register_fsdp_forward_method(self.model, "encode")
        mixtures = [module for module in self.net.modules() if isinstance(module, Mixture)]
        for mixture in mixtures if settings.nested is not None else ():
            flatfsdp.ensure_unit_participation(mixture.experts, any_order=drawn.chance(0.5))
        if settings.hook:
            hooks = comm_hooks.reduce_scatter_hook, comm_hooks.allreduce_hook
            state = comm_hooks.DefaultState(dist.group.WORLD)
            self.model.register_comm_hook(state, hooks[settings.strategy == "NO_SHARD"])
        if settings.on_callers:
            self.model.set_unshard_async_op(True)
        self.momentum = drawn.one((0.0, 0.9))
        self.optimizer = self.made_optimizer()
        self.within = flatfsdp.optimizer_in_backward(self.model, self.optimizer) if settings.in_backward else None
        if self.within is None and settings.original and drawn.chance(0.2):
            flatfsdp.fuse_optimizer_steps(self.optimizer)
        self.mixtures = mixtures
        self.reduced = True  # no gradient is this rank's own
        self.exposed = False  # parameters may be unsharded
        self.nodes: list[Any] = []
        self._batches = 0

    def made_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=self.momentum)

    @property
    def units(self) -> list[Any]:
        return FullyShardedDataParallel.fsdp_modules(self.model)

    @property
    def blocks(self) -> list[Part]:
        return [module for module in self.model.modules() if isinstance(module, Part)]

    def data(self) -> Tensor:
        self._batches += 1
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(self._batches))

    def play(self) -> None:
        train(self)
        for _ in range(3 + self.drawn.below(3)):
            kinds = ANYTIME + (add_up_within_replicas,) * 20 * self.settings.partial_sums
            if self.reduced and self.within is None:
                kinds = ANYTIME + WHEN_REDUCED
            operation = self.drawn.one(kinds)
            operation(self)
            if operation in (drop, show, input_gradient, show_while_computing, keep_frozen):
                self.exposed = True
            elif operation in (train, accumulate, summon):
                self.exposed = False
        train(self)
        if self.within is None:
            step(self)


def _loss(y: Tensor) -> Tensor:
    return y.float().square().mean()


# Forwards and backwards of one batch.


def once(player: Player) -> None:
    _loss(player.model(player.data())).backward()


def twice_through_one_graph(player: Player) -> None:
    loss = _loss(player.model(player.data()))
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(player: Player) -> None:
    y = player.model(player.data())
    y[0].float().square().mean().backward(retain_graph=True)
    y[1:].sin().mean().backward()


def two_forwards(player: Player) -> None:
    y, z = player.model(player.data()), player.model(player.data())
    (_loss(y) + z.sin().mean()).backward()


def two_forwards_backwards_apart(player: Player) -> None:
    y, z = player.model(player.data()), player.model(player.data())
    _loss(y).backward()
    _loss(z).backward()


def backwards_in_reverse(player: Player) -> None:
    y, z = player.model(player.data()), player.model(player.data())
    _loss(z).backward()
    _loss(y).backward()


def one_after_the_other(player: Player) -> None:
    _loss(player.model(player.model(player.data()))).backward()


def with_the_inputs_gradient(player: Player) -> None:
    _loss(player.model(player.data().requires_grad_())).backward()


def beside_an_evaluation(player: Player) -> None:
    y = player.model(player.data())
    with torch.no_grad():
        player.model(player.data())
    _loss(y).backward()


def some_parts(player: Player) -> None:
    _loss(player.model(player.data(), most=1)).backward()


def without_second_outputs(player: Player) -> None:
    player.net.counts = False
    try:
        _loss(player.model(player.data())).backward()
    finally:
        player.net.counts = True


def through_a_method(player: Player) -> None:
    _loss(player.model(player.model.encode(player.data()).float())).backward()


def edited_in_place(player: Player) -> None:
    y = player.model(player.data())
    y.mul_(2)
    (y.float() * player.model(player.data()).float()).mean().backward()


def in_a_thread(player: Player) -> None:
    loss = _loss(player.model(player.data()))

    def work() -> None:
        with player.beside():
            loss.backward()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def with_a_penalty(player: Player) -> None:
    x = player.data().requires_grad_()
    loss = _loss(player.model(x))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def other_experts(player: Player) -> None:
    for mixture in player.mixtures:
        before, mixture.used = mixture.used, mixture.used[:1]
        try:
            _loss(player.model(player.data())).backward()
        finally:
            mixture.used = before
    if not player.mixtures:
        once(player)


BACKWARDS: tuple[Callable[[Player], None], ...] = (
    once,
    once,
    once,
    twice_through_one_graph,
    two_losses,
    two_forwards,
    two_forwards_backwards_apart,
    backwards_in_reverse,
    one_after_the_other,
    with_the_inputs_gradient,
    beside_an_evaluation,
    some_parts,
    without_second_outputs,
    through_a_method,
    edited_in_place,
    in_a_thread,
    with_a_penalty,
    other_experts,
)


def _train(player: Player, *, sync: bool) -> None:
    drawn, how = player.drawn, player.drawn.one(BACKWARDS)
    if how is with_a_penalty and (player.net.is_reentrant or player.within is not None):
        how = once  # reentrant checkpoints refuse it
    if how is in_a_thread and player.settings.device:
        how = once  # the double of a device knows one thread
    if player.within is not None and how in (twice_through_one_graph, two_losses, two_forwards_backwards_apart):
        how = two_forwards
    if player.within is not None and how in (backwards_in_reverse, edited_in_place):
        how = once
    last = player.within is not None or not sync or drawn.chance(0.85)
    by_flag = drawn.chance(0.5)
    words = f"{'train' if sync else 'accumulate'} {how.__name__}"
    player.begin(f"{words}{'' if last else ', not the last'}{', by flag' if not sync and by_flag else ''}")
    player.model.set_is_last_backward(last)
    context: AbstractContextManager[Any] = nullcontext()
    if not sync and by_flag:
        player.model.set_requires_gradient_sync(False)
    elif not sync:
        context = player.model.no_sync()
    with context:
        how(player)
    if not sync and by_flag:
        player.model.set_requires_gradient_sync(True)
    player.reduced = sync


def train(player: Player) -> None:
    _train(player, sync=True)


def accumulate(player: Player) -> None:
    _train(player, sync=False)


def add_up_within_replicas(player: Player) -> None:
    """Backwards whose sums are reduced over shards alone, with a failed one between, and one that completes them."""
    drawn = player.drawn
    count, fails, deferred = 1 + drawn.below(3), drawn.chance(0.4), player.within is None and drawn.chance(0.3)
    player.begin(f"{count} sums within replicas{', deferred' if deferred else ''}")
    player.model.set_requires_all_reduce(False)
    player.model.set_is_last_backward(not deferred)
    for _ in range(count):
        drawn.one((once, once, two_forwards, some_parts))(player)
        if fails:
            fail(player)
    player.model.set_requires_all_reduce(True)
    player.model.set_is_last_backward(True)
    once(player)
    player.reduced = True


def evaluate(player: Player) -> None:
    inference_mode, training = player.drawn.chance(0.5), player.drawn.chance(0.5)
    player.begin(f"evaluate {'inference_mode' if inference_mode else 'no_grad'}{' training' if training else ''}")
    player.model.train(training)
    with torch.inference_mode() if inference_mode else torch.no_grad():
        player.model(player.data())
    player.model.train()


def drop(player: Player) -> None:
    player.begin("drop a forward")
    player.model(player.data())


def input_gradient(player: Player) -> None:
    if player.net.is_reentrant or player.within is not None:
        once_more(player)
        return
    player.begin("gradient of the input alone")
    x = player.data().requires_grad_()
    torch.autograd.grad(_loss(player.model(x)), x)


def once_more(player: Player) -> None:
    player.begin("train once")
    once(player)
    player.reduced = True


def fail(player: Player) -> None:
    if not player.blocks:
        once_more(player)
        return
    block = player.drawn.one(player.blocks)
    block.fails = player.drawn.one(("forward", "backward"))
    sync = player.within is not None or player.drawn.chance(0.5)
    player.begin(f"fail in a {block.fails}{'' if sync else ' without sync'}")
    trains = any(parameter.requires_grad for parameter in block.parameters())
    with nullcontext() if sync else player.model.no_sync():
        try:
            _loss(player.model(player.data())).backward()
            if not trains or player.net.pair is not None:
                player.reduced = player.reduced and sync
        except Planned:
            pass
    player.reduced = player.reduced or block.fails == "backward"
    block.fails = ""


def summon(player: Player) -> None:
    drawn = player.drawn
    write, grads = drawn.chance(0.5), player.settings.original and player.reduced and drawn.chance(0.5)
    whole, recurse = drawn.chance(0.7), drawn.chance(0.5)
    on_host = not write and drawn.chance(0.3)
    of = player.model if whole else drawn.one(player.units)
    player.begin(f"summon {'all' if whole else 'a part'} {write=:d} {grads=:d} {recurse=:d} {on_host=:d}")
    with FullyShardedDataParallel.summon_full_params(
        of, writeback=write, with_grads=grads, recurse=whole or recurse, offload_to_cpu=on_host
    ):
        if write:
            with torch.no_grad():
                for parameter in of.parameters():
                    parameter.mul_(0.95)


def save(player: Player) -> None:
    whole = player.drawn.chance(0.7)
    of = player.model if whole else player.drawn.one(player.units)
    player.begin(f"state_dict of {'all' if whole else 'a part'}")
    of.state_dict()


def save_and_load(player: Player) -> None:
    kind = player.drawn.one(list(StateDictType))
    player.begin(f"save and load {kind.name}")
    with FullyShardedDataParallel.state_dict_type(player.model, kind):
        player.model.load_state_dict({name: value.clone() for name, value in player.model.state_dict().items()})


def show(player: Player) -> None:
    chosen = player.drawn.some(player.units) or [player.model]
    back, later = player.drawn.chance(0.5), player.drawn.chance(0.5)
    player.begin(f"unshard {len(chosen)}{' later' if later else ''}{' and reshard' if back else ''}")
    handles = [unit.unshard(async_op=later) for unit in chosen]
    for handle in handles if later else ():
        handle.wait()
    for unit in chosen if back else ():
        unit.reshard()


def show_while_computing(player: Player) -> None:
    player.begin("unshard while computing")
    handles = [unit.unshard(async_op=True) for unit in player.units]
    with torch.no_grad():
        player.model(player.data())
    for handle in handles:
        handle.wait()


def infer(player: Player) -> None:
    player.begin("inference")
    with flatfsdp.inference(player.model):
        player.model(player.data())
        player.model(player.data())


def keep_frozen(player: Player) -> None:
    on = player.drawn.one(("device", "host"))
    player.begin(f"keep_frozen_unsharded on {on}")
    player.model.keep_frozen_unsharded(on=on)
    with torch.no_grad():
        player.model(player.data())


def control(player: Player) -> None:
    drawn, units = player.drawn, player.units
    at, flag, recurse = drawn.below(len(units)), drawn.chance(0.5), drawn.chance(0.5)
    unit, others = units[at], drawn.some([each for each in units if each is not units[at]])
    choices: dict[str, Callable[[], Any]] = {
        "reshard_after_forward": lambda: unit.set_reshard_after_forward(flag, recurse=recurse),
        "reshard_after_backward": lambda: unit.set_reshard_after_backward(flag, recurse=recurse),
        "forward_prefetch": lambda: unit.set_modules_to_forward_prefetch(others),
        "backward_prefetch": lambda: unit.set_modules_to_backward_prefetch(others),
        "unshard_in_backward": lambda: unit.set_unshard_in_backward(True),
        "all_reduce": lambda: player.model.set_requires_all_reduce(True),
    }
    name = drawn.one(list(choices))
    player.begin(f"set {name} of unit {at} {flag=:d} {recurse=:d}, {len(others)} others; an iteration")
    choices[name]()
    once(player)
    player.reduced = True


def shape_reductions(player: Player) -> None:
    """An iteration with a hook, or a divide factor, for the reduction of gradients."""
    if player.settings.hook:
        once_more(player)
        return
    hooked = "HYBRID" in player.settings.strategy and player.drawn.chance(0.6)
    player.begin(f"{'an all-reduce hook' if hooked else 'a factor of its own for gradients'}; an iteration")
    if hooked:
        player.model.set_all_reduce_hook(lambda total: None)
    else:
        player.model.set_gradient_divide_factor(2.0)
    once(player)
    player.reduced = True


def uneven_inputs(player: Player) -> None:
    count = 1 + player.drawn.below(2)
    player.begin(f"join, {count} batches")
    with flatfsdp.join(player.model) as joined:
        for x in joined([player.data() for _ in range(count)]):
            _loss(player.model(x)).backward()
    player.reduced = True


def look_for_nonfinite(player: Player) -> None:
    player.begin("detect_nonfinite; an iteration")
    with flatfsdp.detect_nonfinite(player.model):
        once(player)
    player.reduced = True


def scaled(player: Player) -> None:
    player.begin("an iteration and a step under a scaler")
    scaler = flatfsdp.ShardedGradScaler(device="cpu", init_scale=4.0)
    scaler.scale(_loss(player.model(player.data()))).backward()
    scaler.step(player.optimizer)
    scaler.update()


def hold_nodes(player: Player) -> None:
    player.begin("hold nodes of gradients")
    parameters = [each for each in player.model.parameters() if each.requires_grad]
    player.nodes = [each.expand_as(each).grad_fn.next_functions[0][0] for each in parameters]
    once(player)
    player.nodes = []
    player.reduced = True


def move(player: Player) -> None:
    player.begin("move to where it is, within an iteration")
    loss = _loss(player.model(player.data()))
    player.model.to("cpu")
    loss.backward()
    player.reduced = True


def save_within(player: Player) -> None:
    player.begin("state_dict within an iteration")
    loss = _loss(player.model(player.data()))
    player.model.state_dict()
    loss.backward()
    player.reduced = True


def show_within(player: Player) -> None:
    chosen = player.drawn.some(player.units) or [player.model]
    player.begin(f"unshard {len(chosen)} within an iteration")
    loss = _loss(player.model(player.data()))
    for unit in chosen:
        unit.unshard()
    loss.backward()
    player.reduced = True


def step(player: Player) -> None:
    to_none = player.drawn.chance(0.6)
    player.begin(f"step, zero_grad {to_none=:d}")
    player.optimizer.step()
    player.optimizer.zero_grad(to_none)


def clip(player: Player) -> None:
    kind = player.drawn.one((2.0, float("inf")))
    player.begin(f"clip_grad_norm_ {kind}")
    player.model.clip_grad_norm_(0.01, kind)


def resume(player: Player) -> None:
    kind = player.drawn.one(("FULL_STATE_DICT", "SHARDED_STATE_DICT"))
    player.begin(f"save and load the optimizer's {kind}")
    with FullyShardedDataParallel.state_dict_type(player.model, kind):
        state = FullyShardedDataParallel.optim_state_dict(player.model, player.optimizer)
        player.optimizer = player.made_optimizer()
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(player.model, player.optimizer, state)
        player.optimizer.load_state_dict(loaded)


def edit_shards(player: Player) -> None:
    if player.exposed:
        once_more(player)
        return
    player.begin("write to shards; an evaluation")
    with torch.no_grad():
        for index, parameter in enumerate(player.model.parameters()):
            (parameter.data if index % 2 else parameter).mul_(0.9)
        player.model(player.data())


def go_on_with_a_copy(player: Player) -> None:
    player.begin("go on with a copy")
    player.model = copy.deepcopy(player.model)
    player.net = player.model.module
    player.mixtures = [module for module in player.net.modules() if isinstance(module, Mixture)]
    player.optimizer = player.made_optimizer()


def freeze_or_thaw(player: Player) -> None:
    if not player.settings.original or not player.blocks:
        once_more(player)
        return
    block = player.drawn.one(player.blocks)
    player.begin("freeze or thaw a part; an iteration")
    player.model.zero_grad()
    block.requires_grad_(not block.up.weight.requires_grad)
    once(player)


ANYTIME: tuple[Callable[[Player], None], ...] = (
    *(train, train, train, accumulate, accumulate, accumulate, accumulate, evaluate, drop, input_gradient, fail, fail),
    *(summon, save, show, show_while_computing, show_within, infer, keep_frozen, control, control),
    *(hold_nodes, move, save_within, shape_reductions, uneven_inputs, look_for_nonfinite),
)
WHEN_REDUCED: tuple[Callable[[Player], None], ...] = (
    *(step, step, clip, scaled, resume, save_and_load, edit_shards, go_on_with_a_copy, freeze_or_thaw),
)


@contextmanager
def world_of(number: int) -> Iterator[tuple[Drawn, Settings, FakeDevice | None]]:
    """The settings of a program, and inside their process group, and device."""
    drawn = Drawn(number)
    settings = Settings(drawn, partial_sums=number >= PARTIAL)
    with ExitStack() as stack:
        stack.enter_context(fake_world(settings.world, settings.rank, joined=True))
        if settings.large:
            stack.enter_context(inspect.large_gradients())
        device = stack.enter_context(FakeDevice()) if settings.device else None
        yield drawn, settings, device
