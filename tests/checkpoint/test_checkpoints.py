"""A model and its optimizer, saved by some ranks and loaded by others, wrapped otherwise; for and by torch's own."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as FSDP1Policy

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import checkpoint
from flatfsdp.checkpoint.disk import Disk, through
from flatfsdp.checkpoint.nested_state import flatten
from flatfsdp.checkpoint.sections import sections_of
from flatfsdp.errors import AgreementError, CheckpointError, ConfigValueError
from tests.harness import inspect, pool
from tests.harness.corners import Net, Setting, data, loss_of, seeded
from tests.harness.models import Feedforward, Low, Motley
from tests.state.optim.test_optim_state import Corners, different

pytestmark = pytest.mark.distributed

UNITS = (Feedforward, Low, Motley)


class Trained:
    """A wrapped model and its AdamW, which all ranks feed the same."""

    def __init__(self, setting: Setting, units: tuple[type[nn.Module], ...] = UNITS) -> None:
        inside = seeded(Corners)
        inside.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.model = setting.wrap(inside, units, ignored_modules=[inside.outside])
        floating = [p for p in self.model.parameters() if p.is_floating_point()]
        self.optim = torch.optim.AdamW(floating, lr=0.01)

    def train(self, first: int, steps: int = 2) -> Trained:
        for step in range(first, first + steps):
            self.optim.zero_grad()
            loss_of(self.model(data(0, step))).backward()
            self.model.mean += step
            self.optim.step()
        return self

    def whole(self) -> dict[str, Any]:
        """The whole state of both. Collective."""
        with FSDP.state_dict_type(self.model, "FULL"):
            return {
                "model": {key: value.clone() for key, value in self.model.state_dict().items()},
                "optimizer": FSDP.full_optim_state_dict(self.model, self.optim, rank0_only=False),
            }


def save(rank: int, world: int, path: str, setting: Setting) -> None:
    trained = Trained(setting).train(0)
    checkpoint.save(f"{path}/now", model=trained.model, optimizer=trained.optim, extra={"step": 2})
    saving = checkpoint.async_save(f"{path}/later", model=trained.model, optimizer=trained.optim, extra={"step": 2})
    states = {"saved": trained.whole()}
    states["next"] = trained.train(2).whole()
    saving.result()
    if rank == 0:
        torch.save((world, states), f"{path}/whole.pt")


def load(rank: int, world: int, path: str, setting: Setting, units: tuple[type[nn.Module], ...]) -> None:
    saved_by, states = torch.load(f"{path}/whole.pt", weights_only=False)
    for name in ("now", "later"):
        trained = Trained(setting, units)
        assert checkpoint.load(f"{path}/{name}", model=trained.model, optimizer=trained.optim) == {"step": 2}
        require_equal(trained.whole(), states["saved"])
    found, expected = trained.train(2).whole(), states["next"]
    if saved_by == world and setting.strategy == "FULL_SHARD" and units == UNITS:
        require_equal(found, expected)
    else:  # sums come in another order
        for key, value in expected["model"].items():
            torch.testing.assert_close(
                found["model"][key], value, rtol=2e-2 if value.dtype.itemsize == 2 else 1e-4, atol=1e-5
            )


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["model"].keys() == expected["model"].keys()
    for key, value in expected["model"].items():
        assert found["model"][key].dtype == value.dtype and torch.equal(found["model"][key], value), key
    assert not list(different(found["optimizer"]["state"], expected["optimizer"]["state"]))
    groups = [found["optimizer"]["param_groups"], expected["optimizer"]["param_groups"]]
    for one, other in zip(*groups, strict=True):
        assert {**one, "params": sorted(one["params"])} == {**other, "params": sorted(other["params"])}


ORIG, FLAT = Setting(orig=True), Setting(orig=False)


@pytest.mark.parametrize(
    ("world", "setting", "readers"),
    [
        (4, Setting("HYBRID_SHARD"), [(2, Setting("NO_SHARD"), UNITS), (3, ORIG, ())]),
        (3, FLAT, [(3, FLAT, UNITS), (4, Setting("SHARD_GRAD_OP"), (Low,))]),
        (2, Setting(offload=True), [(1, FLAT, UNITS)]),
    ],
    ids=["hybrid", "flat", "offload"],
)
def test_any_world_and_wrapping_loads_what_any_saved(
    tmp_path: Path, world: int, setting: Setting, readers: list[tuple[int, Setting, tuple[type[nn.Module], ...]]]
) -> None:
    pool.run(world, save, str(tmp_path), setting)
    for reader, as_setting, units in readers:
        pool.run(reader, load, str(tmp_path), as_setting, units)


def before_the_first_step(rank: int, world: int, path: str) -> None:
    fresh = Trained(ORIG)
    checkpoint.save(path, model=fresh.model, optimizer=fresh.optim)
    resumed = Trained(FLAT)
    checkpoint.load(path, model=resumed.model, optimizer=resumed.optim)
    require_equal(resumed.train(0).whole(), fresh.train(0).whole())


def test_resuming_before_the_first_step_restores_everything(pool2: Any, tmp_path: Path) -> None:
    pool2(before_the_first_step, str(tmp_path / "x"))


class Noting(nn.Linear):
    """A module whose extra state is a plain value and a tensor."""

    def __init__(self, note: int) -> None:
        super().__init__(3, 3)
        self.note = {"count": note, "mean": torch.full((2,), float(note))}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def extra_state_and_compiled(rank: int, world: int, path: str) -> None:
    def build(note: int) -> nn.Module:
        return FSDP(nn.Sequential(Noting(note), nn.Linear(3, 2)), auto_wrap_policy=FSDP1Policy({Noting}))

    model: Any = build(1)
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    checkpoint.save(path, model=torch.compile(model), optimizer=optim)
    again: Any = build(2)
    checkpoint.load(path, model=again)
    assert again.module[0].note["count"] == 1 and again.module[0].note["mean"].tolist() == [1.0, 1.0]
    checkpoint.load(path, model=torch.compile(build(3)))
    with FSDP.state_dict_type(model, "SHARDED"):
        optim.param_groups[0]["lr"] = 0.1
        states: dict[str, Any] = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optim)}
    states["model"]["0._extra_state"] = {"count": 0, "mean": torch.zeros(2)}
    checkpoint.load(path, **states)
    assert states["optimizer"]["param_groups"][0]["lr"] == 0.5
    assert states["model"]["0._extra_state"]["count"] == 1


def test_plain_values_are_restored_and_a_compiled_model_has_the_same_names(pool2: Any, tmp_path: Path) -> None:
    pool2(extra_state_and_compiled, str(tmp_path / "x"))


def memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors if each.numel()}


def shown_for_a_save(rank: int, world: int, setting: Setting) -> set[int]:
    """Memory that a save reads, apart from the shards, the optimizer, and unsharded tensors of the model."""
    trained = Trained(setting).train(0)
    held = [flat.shard for flat in inspect.flat_params(trained.model)]
    held += [*trained.model.buffers(), *trained.model.outside.parameters()]
    held += [value for state in trained.optim.state.values() for value in state.values()]
    read = []
    for part in sections_of(trained.model, trained.optim):
        part.take(in_use=True)
        read += [each for each in flatten(part.state)[0].values() if isinstance(each, torch.Tensor) and each.dim()]
    assert len(read) > 20
    return memory_of(getattr(each, "local", each) for each in read) - memory_of(held)


@pytest.mark.parametrize("setting", [ORIG, FLAT, Setting("NO_SHARD")], ids=str)
def test_a_save_takes_no_memory_for_copies(setting: Setting, pool2: Any) -> None:
    assert pool2(shown_for_a_save, setting) == [set(), set()]


class Waiting(Disk):
    """Does nothing before it may."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def before(self, operation: str, path: Path, size: int) -> None:
        assert self.may_go_on.wait(timeout=60)


def saved_before_it_changed(rank: int, world: int, path: str) -> bool:
    """A model that is no wrapper, of whose parameters some are in one."""
    model = nn.Sequential(FSDP(nn.Linear(3, 3)), nn.Linear(3, 3))
    before = {name: value.clone() for name, value in model[1].state_dict().items()}
    disk = Waiting()
    with through(disk):
        saving = checkpoint.async_save(path, model=model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        disk.may_go_on.set()
        saving.result()
    checkpoint.load(path, model=model)
    return all(torch.equal(value, before[name]) for name, value in model[1].state_dict().items())


def test_a_save_in_the_background_has_the_values_of_its_call_outside_of_wrappers(pool2: Any, tmp_path: Path) -> None:
    assert pool2(saved_before_it_changed, str(tmp_path / "x")) == [True, True]


class Noted(nn.Linear):
    """A module whose extra state is a plain value."""

    note = 0

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def extra_states_of_another_model(rank: int, world: int, path: str) -> list[str]:
    def build(*kinds: type[nn.Linear]) -> Any:
        return FSDP(nn.Sequential(*(kind(3, 3) for kind in kinds)))

    checkpoint.save(path, model=build(Noted, nn.Linear))
    checkpoint.load(path, model=build(Noted, nn.Linear))
    messages = []
    for others in (build(nn.Linear, Noted), {"1._extra_state": 0, **build(nn.Linear, nn.Linear).state_dict()}):
        try:
            checkpoint.load(path, model=others)
        except CheckpointError as error:
            messages.append(str(error))
        checkpoint.load(path, model=others, strict=False)
    return messages


def test_a_strict_load_misses_plain_values_of_modules(pool2: Any, tmp_path: Path) -> None:
    for messages in pool2(extra_states_of_another_model, str(tmp_path / "x")):
        for text in messages:
            assert "missing from the checkpoint: model.1._extra_state; " in text
            assert text.endswith("unexpected in the checkpoint: model.0._extra_state")
        assert len(messages) == 2


def other_calls(rank: int, world: int, path: str) -> list[str]:
    model = seeded(Net)
    messages = []
    checkpoint.save(path, model=model)
    calls: list[Any] = [
        lambda: checkpoint.save(f"{path}2", model=model if rank else None),
        lambda: checkpoint.load(path, model=model if rank else None),
        lambda: checkpoint.load(path, model=model) if rank else checkpoint.save(f"{path}2", model=model),
    ]
    for call in calls:
        try:
            call()
            messages.append("nothing")
        except (CheckpointError, AgreementError) as error:
            messages.append(str(error))
    return messages


def test_ranks_that_make_different_calls_get_an_error(pool2: Any, tmp_path: Path) -> None:
    for *messages, last in pool2(other_calls, str(tmp_path / "x")):
        assert all("ranks make different calls (rank 0: a " in message for message in messages), messages
        assert last.startswith("rank 0 called checkpoint.save(); rank 1 called checkpoint.load(). These calls are")


def only_the_model(rank: int, world: int, path: str) -> str:
    trained = Trained(ORIG).train(0)
    checkpoint.save(path, model=trained.model, optimizer=trained.optim)
    whole = trained.whole()["model"]
    other = Trained(FLAT)
    checkpoint.load(path, model=other.model)
    found = other.whole()["model"]
    assert all(torch.equal(found[key], whole[key]) for key in whole)
    plain = {key: torch.zeros_like(value) for key, value in whole.items()}
    checkpoint.load(path, model=plain)  # a state dict of whole tensors will do
    assert all(torch.equal(plain[key], whole[key]) for key in whole)
    smaller = Setting().wrap(seeded(lambda: Net(depth=1)), UNITS)
    try:
        checkpoint.load(path, model=smaller)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_part_may_be_loaded_alone_and_another_model_is_refused(pool2: Any, tmp_path: Path) -> None:
    texts, in_brief = pool2(only_the_model, str(tmp_path / "x"))
    assert "missing from the checkpoint: model.head.weight, model.head.bias; unexpected in the checkpoint: " in texts
    assert "model.gain" in texts and texts.endswith(" more") and "optimizer" not in texts
    assert "on all 2 ranks: it belongs to another model or optimizer (2 missing, " in in_brief
    assert in_brief.endswith(" unexpected); the error of rank 0 has the names")


def of_another_optimizer(rank: int, world: int, path: str) -> list[str]:
    model = Setting().wrap(seeded(Net), UNITS)
    step = model(data(0, 0)).sum().backward
    adam = torch.optim.Adam(model.parameters())
    step()
    adam.step()
    checkpoint.save(path, model=model, optimizer=adam)
    texts = []
    for momentum in (0.0, 0.9):
        with pytest.raises(CheckpointError) as raised:
            checkpoint.load(path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=momentum))
        texts.append(str(raised.value))
    return texts


def test_the_state_of_another_optimizer_is_refused(pool2: Any, tmp_path: Path) -> None:
    (plain, with_momentum), in_brief = pool2(of_another_optimizer, str(tmp_path / "x"))
    assert "unexpected in the checkpoint: optimizer.state." in plain and "missing" not in plain
    assert "momentum_buffer" in with_momentum.split("unexpected in the checkpoint:")[0]
    assert ".exp_avg" in with_momentum.split("unexpected in the checkpoint:")[1]
    assert all("it belongs to another model or optimizer" in text for text in in_brief)


def test_an_optimizer_needs_its_model(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigValueError, match=r"^optimizer: its state is saved by the names of the model's param"):
        checkpoint.save(tmp_path / "x", optimizer=torch.optim.Adam(model.parameters()))


def test_a_model_that_nothing_wrapped_is_a_model_too(tmp_path: Path) -> None:
    def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 3)
        return model, torch.optim.Adam(model.parameters())

    model, optim = plain()
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    checkpoint.save(tmp_path / "x", model=model, optimizer=optim)
    other, other_optim = plain()
    checkpoint.load(tmp_path / "x", model=other, optimizer=other_optim)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other_optim.state[other.bias]["exp_avg"], optim.state[model.bias]["exp_avg"])


# --- torch's own ------------------------------------------------------------------------------------------------------


def peer(kind: str, depth: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = seeded(lambda: Net(depth=depth))
    if kind == "fsdp1":
        model: nn.Module = FSDP1(
            net, auto_wrap_policy=FSDP1Policy({Feedforward}), use_orig_params=True, device_id=torch.device("cpu")
        )
    elif kind == "fsdp2":
        for block in net.blocks:
            fully_shard(block)
        model = fully_shard(net)
    elif kind == "ours":
        model = Setting().wrap(net, UNITS)
    else:
        model = net
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def steps(model: nn.Module, optim: torch.optim.Optimizer, first: int) -> list[float]:
    losses = []
    for step in range(first, first + 3):
        optim.zero_grad()
        loss = loss_of(model(data(0, step)))
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses


def torchs_state(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optim = dcp_state.get_state_dict(model, optim)
    return {"model": of_model, "optimizer": of_optim}


def from_torch(rank: int, world: int, path: str, kind: str) -> list[str]:
    warnings.simplefilter("ignore", FutureWarning)  # FSDP1's, of its own ShardedTensor
    model, optim = peer(kind)
    steps(model, optim, 0)
    dcp.save(torchs_state(model, optim) | {"step": 3, "noise": torch.arange(3)}, checkpoint_id=path)
    expected = steps(model, optim, 3)
    model, optim = peer("ours")
    texts = []
    try:
        checkpoint.load(path, model=model, optimizer=optim)
    except CheckpointError as error:
        texts.append(str(error))
    rest = checkpoint.load(path, model=model, optimizer=optim, trust=True)
    assert rest["step"] == 3 and torch.equal(rest["noise"], torch.arange(3))
    found = steps(model, optim, 3)
    assert found == pytest.approx(expected, rel=1e-5), kind
    return texts


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "plain"])
def test_what_torch_saved_is_loaded_on_trust(pool2: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    for (text,) in pool2(from_torch, str(path), kind):
        assert text == (
            f"loading {path}: on all 2 ranks: torch.distributed.checkpoint saved it, or its flatfsdp.json is "
            "lost, and with it the checksums. Its table of contents is a pickle, and reading a pickle runs whatever "
            "code it names; pass trust=True if you know who wrote it"
        )


def to_torch(rank: int, world: int, path: str, kind: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    model, optim = peer("ours")
    steps(model, optim, 0)
    checkpoint.save(path, model=model, optimizer=optim)
    expected = steps(model, optim, 3)
    model, optim = peer(kind)
    state = torchs_state(model, optim)
    dcp.load(state, checkpoint_id=path)
    dcp_state.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert steps(model, optim, 3) == pytest.approx(expected, rel=1e-5), kind


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "plain"])
def test_torch_loads_what_we_saved(pool2: Any, tmp_path: Path, kind: str) -> None:
    pool2(to_torch, str(tmp_path / "x"), kind)


def write_as(rank: int, world: int, path: str, kind: str) -> list[float]:
    """Save as `kind` does; the next losses."""
    warnings.simplefilter("ignore", FutureWarning)
    model, optim = peer(kind)
    steps(model, optim, 0)
    if kind == "ours":
        checkpoint.save(path, model=model, optimizer=optim)
    else:
        dcp.save(torchs_state(model, optim), checkpoint_id=path)
    return steps(model, optim, 3)


def read_as(rank: int, world: int, path: str, kind: str) -> list[float]:
    warnings.simplefilter("ignore", FutureWarning)
    model, optim = peer(kind)
    if kind == "ours":
        checkpoint.load(path, model=model, optimizer=optim, trust=True)
    else:
        state = torchs_state(model, optim)
        dcp.load(state, checkpoint_id=path)
        dcp_state.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return steps(model, optim, 3)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_torchs_and_ours_read_each_other_at_other_worlds(run: Any, tmp_path: Path, kind: str) -> None:
    for writer, reader in ((kind, "ours"), ("ours", kind)):
        path = str(tmp_path / writer)
        expected = run(2, write_as, path, writer)[0]
        assert run(3, read_as, path, reader)[0] == pytest.approx(expected, rel=1e-4)


def bare_names(rank: int, world: int, path: str) -> None:
    plain = seeded(Net)
    dcp.save(
        {"head.weight": torch.ones_like(plain.head.weight)} | plain.blocks.state_dict(prefix="blocks."),
        checkpoint_id=path,
    )
    model, _ = peer("ours")
    checkpoint.load(path, model=model, trust=True, strict=False)
    with FSDP.state_dict_type(model, "FULL"):
        found = model.state_dict()
    assert torch.equal(found["head.weight"], torch.ones_like(plain.head.weight))
    assert torch.equal(found["head.bias"], plain.head.bias)
    try:
        checkpoint.load(path, model=model, trust=True)
    except CheckpointError as error:
        assert "missing from the checkpoint: model.head.bias" in str(error)
    else:
        raise AssertionError


def test_bare_names_of_torchs_are_those_of_the_model(pool2: Any, tmp_path: Path) -> None:
    pool2(bare_names, str(tmp_path / "x"))


def some_have_state(rank: int, world: int, path: str) -> None:
    """A layer without gradients has no state: a program that loads needs no knowledge of that, stepped or not."""

    def build(*, trained: tuple[str, ...]) -> tuple[FSDP, torch.optim.Optimizer]:
        module = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 13))
        model = FSDP(module, use_orig_params=True)
        optim = torch.optim.AdamW(model.parameters())
        if trained:
            model(torch.ones(2, 13)).sum().backward()
            for name, parameter in model.named_parameters():
                if name.partition(".")[0] not in trained:
                    parameter.grad = None
            optim.step()
        return model, optim

    model, optim = build(trained=("0",))
    checkpoint.save(path, model=model, optimizer=optim)
    expected = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    assert set(expected["state"]) == {"0.weight", "0.bias"}
    for trained in ((), ("1",), ("0", "1")):
        again, fresh = build(trained=trained)
        checkpoint.load(path, model=again, optimizer=fresh)
        found = FSDP.full_optim_state_dict(again, fresh, rank0_only=False)
        assert not [*different(found["state"], expected["state"])]
    model, optim = build(trained=())
    checkpoint.save(f"{path}-model", model=model)
    words = "missing from the checkpoint: optimizer.state.0.weight.exp_avg" if rank == 0 else "12 missing"
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(f"{path}-model", model=model, optimizer=optim)


def test_parameters_without_state(pool3: Any, tmp_path: Path) -> None:
    pool3(some_have_state, str(tmp_path / "x"))
