"""Optimizers and schedulers that the trainer makes of its arguments, over sharded parameters."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

import flatfsdp
from flatfsdp import FullyShardedDataParallel, checkpoint
from flatfsdp.errors import ConfigTypeError, ConfigValueError, FlatFSDPError
from flatfsdp.trainer.arguments import NOT_BY_NAME, OF_MATRICES, OPTIMIZERS, TrainingArguments
from flatfsdp.trainer.muon import matrices_of
from flatfsdp.trainer.optimizers import make_optimizer, make_scheduler, options_kept
from tests.conftest import Run
from tests.harness.fake import fake_world

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.down = nn.Linear(6, 2, bias=False)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(self.down(self.norm(self.up(x))))
        return out


def wrapped(**options: Any) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    return FullyShardedDataParallel(Net(), auto_wrap_policy={nn.LayerNorm}, **{"use_orig_params": True, **options})


def decaying(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The weight decay of each parameter that the optimizer holds."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}


def plain(steps: int | None = None, **arguments: Any) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer that nothing shards, and the scheduler of these arguments."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=arguments.get("lr", 1e-3))
    return optimizer, make_scheduler(optimizer, TrainingArguments(**arguments), steps)


def rates(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    """The learning rates of the next steps."""
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


class Tokens(nn.Module):
    """An embedding and its head, matrices, vectors, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.net = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6, bias=False))
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 9, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.frozen(self.norm(self.net(self.table(x)))))
        return out


def _muon(rank: int, world: int, front: str, folder: str) -> dict[str, bool]:
    """Whether parameters are those of one process, and stay so after a checkpoint."""
    arguments = TrainingArguments(optimizer="muon", lr=0.05, weight_decay=0.1, optimizer_options={"ns_steps": 3})
    torch.manual_seed(0)
    reference = Tokens()
    matrices = [reference.net[0].weight, reference.net[2].weight]
    vectors = [reference.net[0].bias, reference.norm.weight, reference.norm.bias]
    tables = [reference.table.weight, reference.head.weight]
    alone: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1, ns_steps=3, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(tables, lr=0.05, weight_decay=0.1),
        torch.optim.AdamW(vectors, lr=0.05, weight_decay=0.0),
    ]

    def sharded() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        if front == "fully_shard":
            net: Any = Tokens()
            flatfsdp.fully_shard(net.net)
            made: Any = flatfsdp.fully_shard(net)
        else:
            made = FullyShardedDataParallel(Tokens(), auto_wrap_policy={nn.Sequential}, use_orig_params=True)
        return made, make_optimizer(made, arguments)

    model, optimizer = sharded()
    for step in range(4):
        x = torch.randint(9, (5,), generator=torch.Generator().manual_seed(step))
        for net, optimizers in ((reference, alone), (model, [optimizer])):
            net(x).square().mean().backward()
            for each in optimizers:
                each.step()
            net.zero_grad()
        if step == 1:
            checkpoint.save(folder, model=model, optimizer=optimizer)
            model, optimizer = sharded()
            checkpoint.load(folder, model=model, optimizer=optimizer)
    if front == "fully_shard":
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}
    else:
        with FullyShardedDataParallel.summon_full_params(model):
            whole = {name.replace("_fsdp_wrapped_module.", ""): p.clone() for name, p in model.named_parameters()}
    return {name: torch.allclose(whole[name], p, atol=1e-5) for name, p in reference.named_parameters()}


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_muon_steps_on_matrices_and_adamw_on_the_rest_as_in_one_process(front: str, tmp_path: Path, pool2: Run) -> None:
    for same in pool2(_muon, front, str(tmp_path / "x")):
        assert len(same) == 9
        assert not [name for name, equal in same.items() if not equal]


class Medium(nn.Module):
    """Positions whose table has the shape of hidden matrices, a convolution, experts, and a head of its own, as the
    last module or not."""

    def __init__(self, *, last: bool = True) -> None:
        super().__init__()
        if not last:
            self.head = nn.Linear(6, 9, bias=False)
        self.words, self.positions = nn.Embedding(9, 6), nn.Embedding(6, 6)
        self.mix = nn.Conv1d(6, 6, 2, groups=6)
        self.blocks = nn.ModuleList(nn.ModuleDict({"out": nn.Linear(6, 6)}) for _ in range(2))
        self.blocks.append(nn.ParameterList([torch.randn(2, 6, 6)]))
        if last:
            self.head = nn.Linear(6, 9, bias=False)

    def forward(self) -> None:
        return


class Named(Medium):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(6, 7, bias=False))

    def get_output_embeddings(self) -> nn.Module:
        return self.blocks[-1]


class Bytes(nn.Module):
    """A head of another shape than the table's, as the demo has it, and one that is the table."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6)])
        self.head = nn.Linear(6, 40 if tied else 9, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self) -> None:
        return


HIDDEN = ["blocks.0.out.weight", "blocks.1.out.weight", "blocks.2.0"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Medium, HIDDEN),
        (partial(Medium, last=False), HIDDEN),
        (Named, HIDDEN),
        (partial(Bytes, tied=False), ["blocks.0.weight"]),
        (partial(Bytes, tied=True), ["blocks.0.weight"]),
    ],
)
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_muon_steps_on_hidden_matrices(front: str, make: Any, expected: list[str]) -> None:
    with fake_world(2):
        if front == "wrapper":
            model: Any = FullyShardedDataParallel(make(), auto_wrap_policy={nn.Linear}, use_orig_params=True)
        else:
            model = flatfsdp.fully_shard(make())
        chosen = {id(each) for each in matrices_of(model)}
        found = [name for name, each in model.named_parameters() if id(each) in chosen]
        assert [name.replace("_fsdp_wrapped_module.", "") for name in found] == expected


def test_muon_takes_no_group_later() -> None:
    with fake_world(2):
        optimizer = make_optimizer(wrapped(), TrainingArguments(optimizer="muon"))
        with pytest.raises(ConfigValueError, match="muon takes no more parameter groups"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_muon_without_matrices_of_its_own_is_refused() -> None:
    with fake_world(2):
        model = wrapped(use_orig_params=False)
        with pytest.raises(ConfigValueError, match=r"flat parameter.*use_orig_params"):
            make_optimizer(model, TrainingArguments(optimizer="muon"))
    with pytest.raises(ConfigValueError, match="muon steps on whole matrices, after all gradients"):
        TrainingArguments(optimizer="muon", optimizer_in_backward=True)


# optimizers


def test_matrices_decay_and_vectors_do_not_whatever_a_rank_has_of_them() -> None:
    for rank in range(3):
        with fake_world(3, rank):
            model = wrapped()
            found = decaying(model, make_optimizer(model, TrainingArguments(weight_decay=0.1)))
            expected = {"up.weight": 0.1, "up.bias": 0.0, "norm.weight": 0.0, "norm.bias": 0.0, "down.weight": 0.1}
            assert found == expected
            shapes = {name: tuple(shape) for name, shape in flatfsdp.unsharded_shapes(model).items()}
            assert shapes == {name: tuple(parameter.shape) for name, parameter in Net().named_parameters()}


def test_a_flat_parameter_decays_as_a_whole() -> None:
    with fake_world(2):
        model = wrapped(use_orig_params=False)
        optimizer = make_optimizer(model, TrainingArguments(weight_decay=0.1))
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        (group,) = optimizer.param_groups
        assert (group["weight_decay"], group["params"]) == (0.1, trainable)


def test_every_optimizer_of_torch_is_named_or_refused_with_a_reason() -> None:
    found = {
        name.lower()
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert found | {"muon"} == set(OPTIMIZERS) | set(OF_MATRICES) | set(NOT_BY_NAME)


def _step_of_each(rank: int, world: int) -> dict[str, bool]:
    """Whether a step of every named optimizer on shards equals its step on the whole model."""
    same = {}
    for name, kind in OPTIMIZERS.items():
        for in_backward in (False, True) if name in ("adamw", "sgd") else (False,):
            arguments = TrainingArguments(optimizer=name, lr=0.05, weight_decay=0.01, optimizer_in_backward=in_backward)
            torch.manual_seed(0)
            reference = Net()
            options = {"weight_decay": 0.01} if name != "rprop" else {}
            matrices = [p for p in reference.parameters() if p.requires_grad and p.dim() > 1]
            vectors = [p for p in reference.parameters() if p.requires_grad and p.dim() == 1]
            groups = [{"params": matrices, **options}, {"params": vectors, **dict.fromkeys(options, 0.0)}]
            alone = kind(groups, lr=0.05)
            model = wrapped()
            sharded = make_optimizer(model, arguments)
            for step in range(3):
                x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
                for net, optimizer in ((reference, alone), (model, sharded)):
                    net(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            with FullyShardedDataParallel.summon_full_params(model):
                pairs = zip(model.parameters(), reference.parameters(), strict=True)
                same[f"{name}, {in_backward}"] = all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    return same


def test_every_named_optimizer_gives_the_numbers_of_one_process(pool2: Run) -> None:
    for same in pool2(_step_of_each):
        assert len(same) == len(OPTIMIZERS) + 2
        assert not [name for name, equal in same.items() if not equal]


def test_a_function_gets_what_it_takes() -> None:
    seen: list[Any] = []

    def without_decay(params: Any, momentum: float) -> torch.optim.Optimizer:
        seen.extend((list(params), momentum))
        return torch.optim.SGD(seen[0], lr=0.3, momentum=momentum)

    with fake_world(1):
        model = wrapped()
        arguments = TrainingArguments(optimizer=without_decay, optimizer_options={"momentum": 0.5})
        optimizer = make_optimizer(model, arguments)
    assert [type(each) for each in seen[0]] == [nn.Parameter] * 5
    assert (seen[1], optimizer.param_groups[0]["lr"]) == (0.5, 0.3)


@pytest.mark.parametrize(
    ("arguments", "kind", "complaint"),
    [
        ({"optimizer_options": {"beta": 1}}, ConfigValueError, "AdamW takes no option 'beta'. Did you mean 'betas'?"),
        ({"optimizer_options": {"eps": -1}}, ConfigValueError, "Invalid epsilon value: -1"),
        ({"optimizer": "rprop", "weight_decay": 0.5}, ConfigValueError, "weight_decay: got 0.5, but the class Rprop"),
        ({"optimizer": "torch.optim:nosuch"}, ConfigValueError, "optimizer: torch.optim has no 'nosuch'"),
        ({"optimizer": "math:pi"}, ConfigTypeError, "optimizer: math:pi is 3.14159"),
        ({"optimizer": lambda params: params}, ConfigTypeError, "Accepted: a torch.optim.Optimizer."),
    ],
)  # fmt: skip
def test_an_optimizer_that_cannot_be_made_is_reported(
    arguments: dict[str, Any], kind: type[FlatFSDPError], complaint: str
) -> None:
    with fake_world(2), pytest.raises(kind) as error:
        make_optimizer(wrapped(), TrainingArguments(**arguments))
    assert complaint in str(error.value)


def test_a_model_without_trainable_parameters_is_reported() -> None:
    with fake_world(2), pytest.raises(ConfigValueError, match="no parameter of the model is trainable"):
        make_optimizer(FullyShardedDataParallel(Net().requires_grad_(False)), TrainingArguments())


def _groups_after(rank: int, world: int, folder: str, weight_decay: float) -> list[tuple[float, int]]:
    """Weight decay and number of parameters by group, after a load of a state saved with another weight decay."""
    model = wrapped()
    checkpoint.save(folder, model=model, optimizer=make_optimizer(model, TrainingArguments(weight_decay=0.3)))
    arguments = TrainingArguments(weight_decay=weight_decay)
    optimizer = make_optimizer(model, arguments)
    with options_kept(optimizer, arguments):
        checkpoint.load(folder, model=model, optimizer=optimizer)
    return [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]


def test_a_checkpoint_goes_into_a_run_of_another_weight_decay(pool2: Run, tmp_path: Path) -> None:
    for weight_decay in (0.0, 0.1):
        groups = pool2(_groups_after, str(tmp_path / str(weight_decay)), weight_decay)
        assert groups == [[(weight_decay, 2), (0.0, 3)]] * 2


def test_what_this_run_was_given_counts_after_a_load() -> None:
    with fake_world(2):
        model = wrapped()
        old = make_optimizer(model, TrainingArguments(weight_decay=0.5, optimizer_options={"eps": 1e-3})).state_dict()
        arguments = TrainingArguments(weight_decay=0.1, optimizer_options={"betas": [0.5, 0.6]})
        optimizer = make_optimizer(model, arguments)
        with options_kept(optimizer, arguments):
            optimizer.load_state_dict(old)
        groups = [(group["weight_decay"], *group["betas"], group["eps"]) for group in optimizer.param_groups]
        assert groups == [(0.1, 0.5, 0.6, 1e-3), (0.0, 0.5, 0.6, 1e-3)]


# schedulers


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 0.853553, 0.5, 0.146447]),
        ("wsd", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_courses(name: str, expected: list[float]) -> None:
    assert rates(*plain(4, scheduler=name, lr=1), 4) == pytest.approx(expected, abs=1e-6)


def test_the_warmup_rises_to_the_highest_rate_and_no_step_is_for_nothing() -> None:
    found = rates(*plain(10, scheduler="linear", warmup=0.4, lr=1), 11)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0])


def test_a_rate_that_stays_then_decays_to_the_least() -> None:
    found = rates(*plain(10, scheduler="wsd", decay=0.5, lr=1, min_lr=0.2), 11)
    assert found == pytest.approx([1, 1, 1, 1, 1, 1, 0.84, 0.68, 0.52, 0.36, 0.2])


def test_a_warmup_in_steps() -> None:
    found = rates(*plain(8, scheduler="linear", warmup_steps=3, lr=1), 9)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    assert rates(*plain(2, scheduler="linear", warmup_steps=4, lr=1), 2) == pytest.approx([0.2, 0.4])
    assert rates(*plain(None, scheduler="linear", warmup_steps=1, lr=1), 2) == pytest.approx([0.5, 1.0])


def test_a_run_limited_by_the_clock_follows_the_share_that_it_is_given() -> None:
    optimizer, scheduler = plain(None, scheduler="linear", warmup=0.5, lr=1)
    found = []
    for done in (0.25, 0.5, 0.75, 1.0, 1.5):
        optimizer.step()
        scheduler.done = done
        scheduler.step()
        found += scheduler.get_last_lr()
    assert found == pytest.approx([0.5, 1.0, 0.5, 0.0, 0.0], abs=1e-3)
    both = plain(10, scheduler="linear", lr=1)[1]
    both.done = 0.5
    assert both.factor(both.last_epoch) == 0.5


def test_a_resumed_course_goes_on_with_this_runs_steps_and_rate() -> None:
    whole = rates(*plain(8, lr=1), 8)
    optimizer, scheduler = plain(8, lr=1)
    assert rates(optimizer, scheduler, 3) == whole[:3]
    saved = optimizer.state_dict(), scheduler.state_dict()
    optimizer, scheduler = plain(8, lr=1)
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    assert rates(optimizer, scheduler, 5) == whole[3:]

    optimizer, scheduler = plain(6, scheduler="linear", lr=10)
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    assert rates(optimizer, scheduler, 3) == pytest.approx([5.0, 10 / 3, 5 / 3])


def test_a_function_makes_the_scheduler_of_the_number_of_steps() -> None:
    def halving(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return StepLR(optimizer, steps // 2, gamma=0.5)

    assert rates(*plain(4, scheduler=halving, lr=1), 4) == [1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("scheduler", "steps", "complaint"),
    [
        (lambda optimizer, steps: None, None, "needs the number of steps, but this run is limited only by"),
        (lambda optimizer, steps: steps, 3, "returned 3 (int). Accepted: an LRScheduler of torch."),
        ("math:pi", 3, "scheduler: math:pi is 3.14"),
    ],
)
def test_a_scheduler_that_cannot_be_made_is_reported(scheduler: Any, steps: int | None, complaint: str) -> None:
    with pytest.raises(FlatFSDPError) as error:
        plain(steps, scheduler=scheduler)
    assert complaint in str(error.value)


def _trained(rank: int, world: int, in_backward: bool) -> list[float]:
    warnings.simplefilter("error")  # of steps in the wrong order, as torch counts them
    arguments = TrainingArguments(lr=0.1, optimizer_in_backward=in_backward, scheduler="linear")
    model = wrapped()
    optimizer = make_optimizer(model, arguments)
    scheduler = make_scheduler(optimizer, arguments, 4)
    losses = []
    for step in range(4):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_a_schedule_is_followed_by_an_optimizer_in_the_backward_without_a_warning(pool2: Run) -> None:
    after, inside = pool2(_trained, False)[0], pool2(_trained, True)[0]
    assert after == inside
    assert after[-1] < after[0]
