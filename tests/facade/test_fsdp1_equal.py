"""FSDP1 in the same process, side by side: signatures, enums, layouts and attributes that other programs read."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from enum import Enum
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.api as torch_api
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TheirScaler
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp import FullyShardedDataParallel as Ours
from flatfsdp import ShardedGradScaler as OurScaler
from flatfsdp import api, as_torch
from flatfsdp.engine.base.fqns import clean
from flatfsdp.wrap import ModuleWrapPolicy
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.models import Block, Feedforward, Transformer

pytestmark = pytest.mark.single_process

Theirs = torch_fsdp.FullyShardedDataParallel


# --- signatures and enums ---------------------------------------------------------------------------------------------


def test_the_constructor() -> None:
    ours, theirs = (signature(cls.__init__).parameters for cls in (Ours, Theirs))
    shared = [p for p in ours.values() if p.kind is not p.KEYWORD_ONLY]
    assert [p.name for p in shared] == list(theirs)
    for name in theirs:
        ours_default, theirs_default = ours[name].default, theirs[name].default
        if isinstance(theirs_default, Enum):
            assert ours_default.name == theirs_default.name
        else:
            assert ours_default is theirs_default


@pytest.mark.parametrize(
    "method",
    [
        *("summon_full_params", "clip_grad_norm_", "no_sync", "fsdp_modules", "apply", "check_is_root", "forward"),
        *("optim_state_dict", "optim_state_dict_to_load", "full_optim_state_dict", "sharded_optim_state_dict"),
        *("shard_full_optim_state_dict", "flatten_sharded_optim_state_dict", "scatter_full_optim_state_dict"),
        "rekey_optim_state_dict",
    ],
)
def test_methods(method: str) -> None:
    ours, theirs = (signature(getattr(cls, method)).parameters for cls in (Ours, Theirs))
    shared = [p for p in ours.values() if p.kind is not p.KEYWORD_ONLY]
    assert [(p.name, p.kind, p.default) for p in shared] == [(p.name, p.kind, p.default) for p in theirs.values()]


@pytest.mark.parametrize("name", ["ShardingStrategy", "BackwardPrefetch"])
def test_enums(name: str) -> None:
    ours, theirs = getattr(api, name), getattr(torch_api, name)
    assert {m.name: m.value for m in ours}.items() >= {m.name: m.value for m in theirs}.items()


def test_training_state_names() -> None:
    from torch.distributed.fsdp._common_utils import TrainingState

    assert [m.name for m in api.TrainingState] == [m.name for m in TrainingState]


@pytest.mark.parametrize("name", ["MixedPrecision", "CPUOffload"])
def test_configs(name: str) -> None:
    ours, theirs = getattr(flatfsdp, name)(), getattr(torch_fsdp, name)()
    for field in vars(theirs):
        expected = getattr(theirs, field)
        assert (
            tuple(getattr(ours, field)) == tuple(expected)
            if isinstance(expected, (list, tuple))
            else (getattr(ours, field) == expected)
        )


def test_the_scaler() -> None:
    for method in ("__init__", "scale", "unscale_", "_unscale_grads_", "step", "update"):
        ours, theirs = (signature(getattr(cls, method)).parameters for cls in (OurScaler, TheirScaler))
        assert list(ours) == list(theirs), method
        defaults = [(p.name, p.default) for p in theirs.values() if p.name != "process_group"]
        assert [(p.name, p.default) for p in ours.values() if p.name != "process_group"] == defaults, method
    with fake_world(1):
        scalers = [cls("cpu", init_scale=8.0) for cls in (OurScaler, TheirScaler)]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            losses = [torch.ones((), dtype=dtype), (torch.ones((), dtype=dtype), [torch.ones(1, dtype=dtype)])]
            ours, theirs = (scaler.scale(losses) for scaler in scalers)
            assert ours == theirs and ours[0].dtype == theirs[0].dtype == ours[1][1][0].dtype == dtype
            assert isinstance(ours[1], tuple) and isinstance(ours[1][1], list)
            assert [each.dtype for each in scalers[0].scale(iter(losses[:1]))] == [dtype]
            assert scalers[0].scale(losses[0]).dtype == scalers[1].scale(losses[0]).dtype == dtype
        with pytest.raises(ValueError, match="must be a Tensor or an iterable of Tensors"):
            scalers[0].scale(3)
        off = OurScaler("cpu", enabled=False)
        assert off.scale(losses[0]) is losses[0]


@pytest.mark.parametrize(
    "given",
    [
        {"ignored_modules": [1]},
        {"ignored_states": [1, 2]},
        {"ignored_states": [nn.Linear(1, 1), nn.Parameter(torch.ones(1))]},
        {"ignored_modules": [], "ignored_states": []},
        {"sharding_strategy": "HYBRID_SHARD"},
    ],
    ids=lambda given: ", ".join(given),
)
def test_what_is_refused(given: dict[str, Any]) -> None:
    """With an error that an `except` for FSDP1's catches."""
    with fake_world(2):
        theirs = dict(given)
        if "sharding_strategy" in given:
            theirs["sharding_strategy"] = torch_fsdp.ShardingStrategy[given["sharding_strategy"]]
        with pytest.raises(Exception) as refused:
            Theirs(nn.Linear(2, 2), device_id=torch.device("cpu"), **theirs)
        with pytest.raises(refused.type):
            Ours(nn.Linear(2, 2), device_id=torch.device("cpu"), **given)


class Bare(nn.Module):
    """Two modules and no forward, as an encoder and a decoder that are called separately."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Feedforward(5, 3), nn.Linear(5, 5))
        self.decoder = Feedforward(5, 3)


@pytest.mark.parametrize("manually", [True, False])
def test_a_root_without_a_forward(manually: bool) -> None:
    """FSDP1 makes the child that is called first a root: its inputs are cast and moved as the root's are."""
    with fake_world(2):
        for cls, package in ((Theirs, torch_fsdp), (Ours, flatfsdp)):
            how: dict[str, Any] = {
                "device_id": torch.device("cpu"),
                "mixed_precision": package.MixedPrecision(torch.bfloat16, torch.float32),
            }
            bare: Any = Bare()
            if manually:
                bare.encoder[0], bare.decoder = cls(bare.encoder[0], **how), cls(bare.decoder, **how)
                bare.encoder = cls(bare.encoder, **how)
            else:
                how["auto_wrap_policy"] = package.wrap.ModuleWrapPolicy({Feedforward, nn.Sequential})
            with warnings.catch_warnings(record=True):
                model: Any = cls(bare, **how)
            code = model.encoder(torch.ones(2, 5))
            found = model.decoder(code), model.decoder(code.float())
            assert [each.dtype for each in (code, *found)] == [torch.bfloat16] * 3
            found[0].sum().backward()
        assert inspect.wrappers_called(model) == {id(model.encoder.module), id(model.decoder.module)}
        with pytest.raises(NotImplementedError):
            model(code)
        with pytest.raises(flatfsdp.errors.UsageError, match=r"ModuleList defines no forward.*\(0.weight, 0.bias\)"):
            Ours(nn.ModuleList([nn.Linear(2, 2)]))
        empty: Any = Ours(nn.ModuleList([nn.ReLU()]))
        assert not empty._has_params


@pytest.mark.parametrize("cls", [Ours, Theirs])
def test_modules_of_a_policy_are_not_of_a_subclass(cls: Any) -> None:
    """A user's subclass changes the outermost forward alone: its constructor has not made the wrappers inside."""

    class Doubled(cls):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            self.factor = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.factor * super().forward(x)

    with fake_world(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        expected = 2.0 * net(torch.ones(1, 2))
        policy = torch_fsdp.wrap.ModuleWrapPolicy({nn.Linear})
        model = Doubled(net, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
        assert [type(each) for each in model.module] == [cls, cls]
        assert torch.equal(model(torch.ones(1, 2)), expected)


# --- layouts ----------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Sizes that need padding of both kinds; a buffer; a parameter of the outer module between children."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Feedforward(5, 3)
        self.scale = nn.Parameter(torch.randn(7))
        self.second = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
        self.matrix = nn.Parameter(torch.randn(3, 5))
        self.tied = self.matrix

    def forward(self, x: Any) -> Any:
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], set[type[nn.Module]]]] = {
    "transformer": (lambda: Transformer(tied=False), {Block}),
    "tied": (lambda: Transformer(tied=True), {Block}),
    "flat": (lambda: Transformer(tied=False), set()),
    "odd": (Odd, {Feedforward}),
    "low": (lambda: Odd().bfloat16(), {Feedforward}),
}


@pytest.fixture(params=[(1, 0), (2, 1), (3, 2), (8, 3), (64, 63)], ids=str)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(world, rank) of a fake group."""
    world, rank = request.param
    with fake_world(world, rank):
        yield world, rank


def both(name: str, orig: bool, **options: Any) -> tuple[Any, Any]:
    build, classes = MODELS[name]
    models = []
    for cls, policy in ((Ours, ModuleWrapPolicy), (Theirs, torch_fsdp.wrap.ModuleWrapPolicy)):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models.append(
                cls(
                    build(),
                    auto_wrap_policy=policy(classes) if classes else None,
                    device_id=torch.device("cpu"),
                    use_orig_params=orig,
                    **options,
                )
            )
    return models[0], models[1]


def units(ours: Any, theirs: Any) -> Iterator[tuple[Any, Any]]:
    mine, others = Ours.fsdp_modules(ours), Theirs.fsdp_modules(theirs)
    assert len(mine) == len(others)
    yield from zip(mine, others, strict=True)


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_layouts(name: str, orig: bool, place: tuple[int, int]) -> None:
    world, _ = place
    for mine, other in units(*both(name, orig)):
        flat, their_flat = mine._flat_param, other._flat_param
        theirs_local = their_flat.detach()  # FSDP1 gives it its name at the first forward
        assert tuple(flat._fqns) == tuple(their_flat._fqns)
        assert tuple(flat._shapes) == tuple(their_flat._shapes)
        # FSDP1 counts alignment padding among the parameters of a flat parameter.
        assert tuple(flat._numels) == tuple(their_flat._numels)
        assert flat.shape == flat._local_shard.shape
        if world == 1:  # FSDP1 makes it NO_SHARD there, where nothing is padded to the world
            continue
        assert flat._local_shard.shape == theirs_local.shape
        layout = mine._handle.layout
        assert layout.padded_numel == world * theirs_local.numel()
        assert flat._unpadded_unsharded_size == their_flat._unpadded_unsharded_size
        numels, are_padding = their_flat._numels_with_padding, their_flat._is_padding_mask
        offset, starts = 0, []
        for numel, is_padding in zip(numels, are_padding, strict=True):
            if not is_padding:
                starts.append(offset)
            offset += numel
        assert [span.start for span in layout.spans] == starts
        # Bytes of this rank's shard, where it holds parameters: FSDP1's alignment padding holds arbitrary bytes.
        for owned in layout.owned(mine.rank):
            assert torch.equal(flat._local_shard[owned.in_shard.slice], theirs_local[owned.in_shard.slice])


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_names(name: str, orig: bool) -> None:
    with fake_world(2):
        ours, theirs = both(name, orig)
        plain = MODELS[name][0]()

        def clean(names: list[str]) -> list[str]:
            return [each.replace("_fsdp_wrapped_module.", "").replace("._fsdp_wrapped_module", "") for each in names]

        for method in ("named_parameters", "named_buffers"):
            found = [n for n, _ in getattr(ours, method)()]
            assert sorted(found) == sorted(clean([n for n, _ in getattr(theirs, method)()]))
        if orig:
            assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert [n for n, _ in ours.named_buffers()] == [n for n, _ in plain.named_buffers()]
        modules = dict(ours.named_modules())
        assert list(modules) == [n for n, _ in plain.named_modules()]
        assert [type(m) for m in modules.values()] == [type(m) for m in plain.modules()]


def test_what_other_programs_read() -> None:
    with fake_world(4, 2):
        for mine, other in units(*both("transformer", True)):
            for attribute in (
                "_is_root",
                "_has_params",
                "rank",
                "world_size",
                "compute_device",
                "_is_fsdp_managed_module",
            ):
                assert getattr(mine, attribute) == getattr(other, attribute), attribute
            for attribute in ("sharding_strategy", "training_state", "backward_prefetch"):
                assert getattr(mine, attribute).name == getattr(other, attribute).name, attribute
            assert mine.process_group is other.process_group
            assert isinstance(mine.mixed_precision, flatfsdp.MixedPrecision)
            assert mine.cpu_offload.offload_params is other.cpu_offload.offload_params
            assert mine._all_handles == []  # before the first forward
            assert mine._handle._orig_param_dtype == other._handle._orig_param_dtype
            assert [p.shape for p in mine.params] == [p.shape for p in other.params]
            assert mine.flat_param is mine._flat_param is mine._handle.flat_param
            assert mine._flat_param._fsdp_flattened is other._flat_param._fsdp_flattened is True
            assert mine.module is mine._fsdp_wrapped_module


READ = (
    *("forward_prefetch", "limit_all_gathers", "_use_orig_params", "_use_full_prec_in_eval", "_sync_gradients"),
    *("_device_mesh", "_comm_hook", "_comm_hook_state", "_gradient_predivide_factor", "_gradient_postdivide_factor"),
)


@pytest.mark.parametrize("orig", [True, False])
def test_underscored_attributes_that_other_programs_read(orig: bool) -> None:
    for world in (2, 6, 8):
        with fake_world(world):
            models = both("transformer", orig, forward_prefetch=True, limit_all_gathers=False)
            for mine, other in units(*models):
                assert [getattr(mine, name) for name in READ] == [getattr(other, name) for name in READ]
                assert mine._state_dict_type.name == other._state_dict_type.name
                for config in ("_state_dict_config", "_optim_state_dict_config"):
                    assert type(getattr(mine, config)).__name__ == type(getattr(other, config)).__name__
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for cls, package in ((Ours, flatfsdp), (Theirs, torch_fsdp)):
            strategy = package.ShardingStrategy.HYBRID_SHARD
            policy = package.wrap.ModuleWrapPolicy({Feedforward})
            model: Any = cls(
                nn.Sequential(Feedforward(5, 3), nn.Linear(5, 5)),
                device_mesh=mesh,
                sharding_strategy=strategy,
                auto_wrap_policy=policy,
                device_id=torch.device("cpu"),
            )
            for unit in cls.fsdp_modules(model):
                assert unit._device_mesh is mesh
                assert unit._inter_node_pg is mesh.get_group(0) and unit.process_group is mesh.get_group(1)
        assert copy.deepcopy(Ours(nn.Linear(2, 2), device_mesh=init_device_mesh("cpu", (4,))))._device_mesh is not None
    with fake_world(2):
        for cls, package in ((Ours, flatfsdp), (Theirs, torch_fsdp)):
            net = nn.Sequential(Feedforward(5, 3), nn.Linear(5, 5), nn.ReLU())
            model = cls(net, ignored_modules=[net[0]], use_orig_params=orig, device_id=torch.device("cpu"))
            assert model._ignored_modules == set(net[0].modules())
            assert model._ignored_params == set(net[0].parameters())
            hook = lambda state, grad, shard: None  # noqa: E731
            model.register_comm_hook("state", hook)
            assert model._comm_hook is hook and model._comm_hook_state == "state"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's wants get_state_dict()
                cls.set_state_dict_type(model, package.StateDictType.SHARDED_STATE_DICT)
            assert model._state_dict_type.name == "SHARDED_STATE_DICT"
            with model.no_sync():
                assert not model._sync_gradients
            assert model._sync_gradients


def trace_of(model: Any) -> list[str]:
    """The events of the second of two iterations."""
    for _ in range(2):
        with inspect.events(model).listening() as events:
            model(torch.zeros(1, Transformer.length, dtype=torch.long)).sum().backward()
    return [str(event) for event in events]


@pytest.mark.parametrize(
    ("setting", "built", "then"),
    [("forward_prefetch", False, True), ("forward_prefetch", True, False), ("backward_prefetch", "BACKWARD_PRE", None)],
)
def test_attributes_that_are_set(setting: str, built: Any, then: Any) -> None:
    """As FSDP1's: with the effect that the argument would have had."""
    traces = []
    with fake_world(2):
        for first, second in ((then, then), (built, then), (built, built)):
            model = Ours(Transformer(tied=False), auto_wrap_policy={Block}, **{setting: first})
            for unit in Ours.fsdp_modules(model):
                setattr(unit, setting, second)
                assert getattr(unit, setting) in (second, getattr(api.BackwardPrefetch, str(second), second))
            traces.append(trace_of(model))
            with pytest.raises(flatfsdp.errors.FlatFSDPError, match=setting):
                setattr(model, setting, 3)
            change = partial(setattr, Ours.fsdp_modules(model)[1], setting, then)
            model.module.register_forward_pre_hook(lambda *_, change=change: change())
            with pytest.raises(flatfsdp.errors.UsageError, match=f"{setting} of unit .* inside a forward"):
                trace_of(model)
    assert traces[0] == traces[1] != traces[2]


def test_the_limit_of_gathers_is_set() -> None:
    with fake_world(2):
        model: Any = Ours(Transformer(tied=False), auto_wrap_policy={Block})
        for unit in Ours.fsdp_modules(model):
            unit.limit_all_gathers = False
            assert not (model.limit_all_gathers or inspect.limits_gathers(unit))
        model.set_unshard_async_op(True)
        assert not inspect.limits_gathers(model)
        with pytest.raises(flatfsdp.errors.ConfigValueError, match="forward_prefetch=True"):
            model.forward_prefetch = True
        assert not model.forward_prefetch
        with pytest.raises(flatfsdp.errors.ConfigValueError, match="BACKWARD_MID"):
            model.backward_prefetch = "BACKWARD_MID"


def test_absent_attributes() -> None:
    with fake_world(2):
        for model in both("flat", True):
            assert model.vocabulary == Transformer.vocabulary
            assert model.head.in_features == Transformer.width
            assert not hasattr(model, "no_such_thing")
            with pytest.raises(AttributeError, match="'Transformer' object has no attribute 'no_such_thing'"):
                model.no_such_thing  # noqa: B018


def test_torchs_modules_are_reached_by_their_paths_under_as_torch() -> None:
    as_torch.install()
    try:
        assert torch.distributed.fsdp.wrap.ModuleWrapPolicy is ModuleWrapPolicy
        assert torch.distributed.fsdp.api.ShardingStrategy is api.ShardingStrategy
    finally:
        as_torch.uninstall()
    assert torch.distributed.fsdp.wrap.ModuleWrapPolicy is not ModuleWrapPolicy


def test_submodules() -> None:
    with fake_world(2):
        model = Ours(Transformer(tied=False), auto_wrap_policy={Block})
        block = model.get_submodule("blocks.0")
        assert isinstance(block, Ours)
        assert block.attention.qkv.out_features == 3 * Transformer.width
        assert isinstance(dict(model.named_modules())["blocks.0"], Block)
        assert [m for m in model.modules() if isinstance(m, Ours)] == Ours.fsdp_modules(model)
        assert Ours.fsdp_modules(model, root_only=True) == [model]
        assert isinstance(Ours(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))[1], nn.ReLU)


class Holding(nn.Module):
    """Holds parameters of its own, one of which is to be ignored, and modules that hold some."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.scale = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        self.first, self.last = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.scale).sum() + self.left.sum()  # type: ignore[no-any-return]


def held(wrapper: type[Any], **settings: Any) -> Any:
    torch.manual_seed(0)
    net = Holding()
    net.first = wrapper(net.first, device_id=torch.device("cpu"), **settings)
    return wrapper(net, ignored_states=[net.left], device_id=torch.device("cpu"), **settings)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("orig", [True, False])
def test_the_wrapped_module_lists_what_its_wrapper_lists(orig: bool, world: int) -> None:
    """In FSDP1's order, at any time between steps. Code that trains, clears or freezes them reaches all."""

    def listed(net: nn.Module) -> list[str]:
        return [clean(name) for name, _ in net.named_parameters()]

    with fake_world(world):
        model, theirs = held(Ours, use_orig_params=orig), held(Theirs, use_orig_params=orig)
        before = list(model.parameters())
        for _ in range(2):
            assert listed(model.module) == listed(model) == listed(theirs) == listed(theirs.module)
            assert list(map(id, model.module.parameters())) == list(map(id, before))
            model(torch.ones(3)).backward()
        with Ours.summon_full_params(model, recurse=False):
            assert [name for name in listed(model) if "_flat_param" in name] == ([] if orig else ["first._flat_param"])
        shards = [handle.flat_param.detach().clone() for handle in model._all_handles]
        for parameter in model.module.parameters():
            if parameter.grad is not None:  # from a fake group, which reduces nothing
                parameter.grad.fill_(1.0)
        torch.optim.SGD(model.module.parameters(), lr=0.1).step()
        pairs = zip(shards, model._all_handles, strict=True)
        assert not any(torch.equal(shard, handle.flat_param) for shard, handle in pairs)
        model.module.zero_grad()
        assert not any(parameter.grad is not None for parameter in model.parameters())
        model.module.requires_grad_(False)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        if not orig:  # refused with original parameters
            model.module.double()
            assert {value.dtype for value in model.state_dict().values()} == {torch.float64}
        assert not list(model._parameters)


@pytest.mark.parametrize("orig", [True, False])
def test_state_dicts_of_a_module_that_holds_parameters_beside_modules_of_its_unit(orig: bool) -> None:
    with fake_world(1):
        model, alone = held(Ours, use_orig_params=orig), Holding()
        listed = [name for name, _ in model.named_parameters()]
        for net in model.module, model:
            state = net.state_dict()
            assert list(state) == list(alone.state_dict())
            assert not alone.load_state_dict(state).missing_keys
            with torch.no_grad():
                for parameter in alone.parameters():
                    parameter.add_(1)
            net.load_state_dict(alone.state_dict())
            found = model.state_dict()
            assert all(torch.equal(found[name], value) for name, value in alone.state_dict().items())
            assert [name for name, _ in model.named_parameters()] == listed
            assert [name for name, _ in copy.deepcopy(model).named_parameters()] == listed


class Asking(nn.Module):
    """Reads its parameters inside of its forward, as models do that look up their dtype or add a penalty."""

    def __init__(self, *, holds: bool, reentrant: bool | None = None) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2)) if holds else None
        self.found: list[Any] = []
        self.fails, self.reentrant = False, reentrant

    def forward(self, x: torch.Tensor, call: float = 0.0) -> torch.Tensor:
        if self.fails:
            raise ValueError
        if self.reentrant is None:
            return self.part(x, call)
        return checkpoint(self.part, x, call, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def part(self, x: torch.Tensor, call: float) -> torch.Tensor:
        self.found = [(name, *p.shape, p.dtype) for name, p in self.named_parameters()]
        self.linear_found = next(self.linear.parameters()).dtype
        penalty: Any = sum(p.square().sum() for p in self.parameters())
        return self.linear(x).sum() + call * penalty


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("orig", [True, False])
def test_modules_list_their_parameters_inside_a_forward(orig: bool, holds: bool, reentrant: bool | None) -> None:
    """In the recomputation of a checkpoint inside of it, too."""
    with fake_world(1):
        torch.manual_seed(0)
        alone = Asking(holds=holds, reentrant=reentrant)
        inner = copy.deepcopy(alone)
        model = Ours(inner, use_orig_params=orig)
        listed = [name for name, _ in model.named_parameters()]
        for net in alone, model, model:  # a second one begins after a backward
            net.zero_grad()
            net(torch.ones(3, requires_grad=True), call=0.5).backward()
            assert [name for name, _ in model.named_parameters()] == listed
        assert inner.found == alone.found and inner.linear_found is torch.float32
        with Ours.summon_full_params(model, with_grads=True):
            pairs = zip(model.parameters(), alone.parameters(), strict=True)
            assert all(torch.allclose(mine.grad, other.grad) for mine, other in pairs)
        inner.fails = True
        with pytest.raises(ValueError):
            model(torch.ones(3))
        assert [name for name, _ in model.named_parameters()] == listed


def _put_another(net: Any) -> None:
    net[0].weight = nn.Parameter(torch.full((2, 2), 7.0))


def _put_a_larger_one(net: Any) -> None:
    net[0].weight = nn.Parameter(torch.zeros(3, 2))


def _tie(net: Any) -> None:
    net[0].weight = net[1].weight


def _delete(net: Any) -> None:
    net[0].bias = None


def _put_a_module(net: Any) -> None:
    net[1] = nn.Linear(2, 2)


def _put_one_without_memory(net: Any) -> None:
    net[0].weight = nn.Parameter(torch.zeros(2, 2, device="meta"))


def _put_a_sparse_one(net: Any) -> None:
    net[0].weight = nn.Parameter(torch.eye(2).to_sparse())


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize(
    ("edit", "refused"),
    [
        (_put_another, ""),
        (_put_a_larger_one, r"\(3, 2\)"),
        (_tie, "was tied to '1.weight'"),
        (_delete, "'0.bias' of unit <root> was changed after wrapping: it was deleted"),
        (_put_a_module, "registered after wrapping: 1.weight, 1.bias"),
    ],
)
def test_what_is_put_in_a_parameters_place_inside_summon_is_taken_or_refused(
    edit: Callable[[Any], None], refused: str, orig: bool
) -> None:
    with fake_world(1):
        model: Any = Ours(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), use_orig_params=orig)
        model(torch.ones(1, 2)).sum().backward()
        expected = pytest.raises(flatfsdp.errors.UsageError, match=refused) if refused else nullcontext()
        with expected:
            with Ours.summon_full_params(model):
                edit(model.module)
            model(torch.ones(1, 2)).sum().backward()
        if not refused:
            assert torch.equal(model.state_dict()["0.weight"], torch.full((2, 2), 7.0))


@pytest.mark.parametrize("edit", [_put_one_without_memory, _put_a_sparse_one])
def test_what_cannot_be_taken_inside_summon_leaves_the_others(edit: Callable[[Any], None]) -> None:
    with fake_world(1):
        model: Any = Ours(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        leaf = model.module[0].weight
        expected = pytest.raises(flatfsdp.errors.UsageError, match=r"'0.weight' of unit <root> .* keeps its value")
        with expected, Ours.summon_full_params(model):
            edit(model.module)
            model.module[1].weight.data.fill_(7.0)
        model.module[0].weight = leaf
        model(torch.ones(1, 2)).sum().backward()
        assert model.state_dict()["1.weight"].eq(7.0).all()


def test_an_optimizer_of_what_was_put_in_a_parameters_place_is_refused() -> None:
    with fake_world(1):
        model: Any = Ours(nn.Linear(2, 2), use_orig_params=True)
        wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
        model.module.weight = nn.Parameter(torch.zeros(2, 2))
        late = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(flatfsdp.errors.UsageError, match="replaced 'weight' after wrapping"):
            late.step()
        wrapped.step()
        assert model.state_dict()["weight"].eq(-0.1).all()


@pytest.mark.parametrize("summoned", [True, False])
@pytest.mark.parametrize("orig", [True, False])
def test_a_recurrent_module_computes_with_what_is_trained_when_a_weight_was_replaced(
    orig: bool, summoned: bool
) -> None:
    """It has its weights in a list, besides."""
    with fake_world(1):
        plain = nn.LSTM(2, 2)
        model: Any = Ours(nn.LSTM(2, 2), use_orig_params=orig)
        inputs = torch.ones(1, 1, 2)
        model(inputs)[0].sum().backward()
        with Ours.summon_full_params(model) if summoned else nullcontext():
            model.module.weight_ih_l0 = nn.Parameter(torch.full((8, 2), 0.5))
        for _ in range(2):
            model.zero_grad()
            model(inputs)[0].sum().backward()
            torch.optim.SGD(model.parameters(), lr=1.0).step()
            plain.load_state_dict(model.state_dict())
            assert torch.equal(model(inputs)[0], plain(inputs)[0])


def test_a_part_of_a_flat_parameter_is_not_frozen_by_itself() -> None:
    with fake_world(1):
        model: Any = Ours(nn.Linear(2, 2))
        for flat in False, True:  # as a whole it is
            model.requires_grad_(flat)
            assert model(torch.ones(1, 2)).requires_grad is flat
        model.module.bias.requires_grad_(False)
        with pytest.raises(flatfsdp.errors.UsageError, match="requires_grad of 'bias' was set to False after wrapping"):
            model(torch.ones(1, 2)).sum().backward()
        model.module.bias.requires_grad_(True)
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("orig", [True, False])
def test_assigning_flat_data_in_another_dtype(orig: bool) -> None:
    """Accelerate's way to fp32 masters of a low-precision checkpoint."""
    with fake_world(2):
        model = Ours(Transformer(tied=False).bfloat16(), auto_wrap_policy={Block}, use_orig_params=orig)
        for unit in Ours.fsdp_modules(model):
            unit._flat_param.data = unit._flat_param.data.to(torch.float32)
            unit._handle._orig_param_dtype = torch.float32
        model(torch.zeros(1, Transformer.length, dtype=torch.long)).sum().backward()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


class Stored(nn.Module):
    """Hands its flat parameter to the CPU inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.handle: Any = None
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.linear.weight.detach().clone()
        with self.handle[0].to_cpu() as flat:
            self.seen = (flat.shape, flat.device.type, self.handle[0].flat_param.data_ptr())
            with pytest.raises(flatfsdp.errors.UsageError, match=r"reads parameter 'linear\.weight'"):
                self.linear.weight.sum()
            self.at = flat.data_ptr()
            assert torch.equal(flat[:12].view(3, 4), before)
            flat.mul_(2.0)
        assert torch.equal(self.linear.weight, 2 * before)
        return self.linear(x)


def test_shards_move_by_handles() -> None:
    """As verl moves them between phases of a step; to another dtype here, where there is one device."""
    with fake_world(2):
        model: Any = Ours(nn.Sequential(*(Ours(nn.Linear(4, 4)) for _ in range(2)), nn.Linear(4, 3)))
        model._lazy_init()
        assert [*map(bool, model._all_handles)] == 3 * [True] and not model.module[0]._all_handles
        model.module[0]._is_root = True
        with Ours.summon_full_params(model.module[0]):
            pass
        model.module[0]._is_root = False
        assert model._is_root and model.module[0]._is_root is False
        model(torch.ones(1, 4)).sum().backward()
        for dtype in (torch.float64, torch.float32):
            before = [handle.flat_param.detach().clone() for handle in model._all_handles]
            for handle in model._all_handles:
                assert not handle._offload_params
                handle.flat_param_to(dtype=dtype, non_blocking=True)
                flat = handle.flat_param
                flat._local_shard = flat.data
                assert flat._local_shard.data_ptr() == flat.data.data_ptr() and flat.grad.dtype == dtype
            assert all(
                torch.equal(handle.flat_param.to(was.dtype), was)
                for handle, was in zip(model._all_handles, before, strict=True)
            )
            model(torch.ones(1, 4, dtype=dtype)).sum().backward()
            model._handle.reshard(True)
        with pytest.raises(flatfsdp.errors.UsageError, match=r"the tensor in its `\.data`"):
            model._flat_param._local_shard = torch.zeros(3)
        model(torch.ones(1, 4))
        with pytest.raises(flatfsdp.errors.UsageError, match="waiting for its backward"):
            model._handle.flat_param_to("cpu")


def test_to_cpu() -> None:
    with fake_world(2):
        model = Ours(Stored(), use_orig_params=True)
        model.module.handle = (model._handle,)
        shard = model._handle.shard.clone()
        model(torch.ones(1, 4)).sum().backward()
        assert model.module.seen == (torch.Size((16,)), "cpu", model.module.at)
        assert torch.equal(model._handle.shard, shard)
        assert model._flat_param.data_ptr() == model._handle.shard.data_ptr()
        with pytest.raises(flatfsdp.errors.UsageError, match="expected unsharded parameters"), model._handle.to_cpu():
            pass
