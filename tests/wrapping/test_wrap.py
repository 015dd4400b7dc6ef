"""Wrapping: the same units as torch's FSDP1 for every kind of policy, and features that FSDP1 lacks.

torch's own auto-wrapping is the oracle: both sides wrap a copy of the same tree in a recorder, and the order, the
places and the arguments of all wrappers are compared.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import warnings

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp._wrap_utils import _auto_wrap as torch_auto_wrap

from flatfsdp import wrap as our_wrap
from flatfsdp.api import MixedPrecision
from flatfsdp.engine.wrapping.auto_wrap import apply_plan, plan_wrapping
from flatfsdp.errors import ConfigTypeError, FlatFSDPWarning, UsageError
from flatfsdp.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap

pytestmark = pytest.mark.unit

HALF = {"param_dtype": torch.float16, "reduce_dtype": torch.float32}


class Recorder(nn.Module):
    """A wrapper that only stores its arguments, in the order in which wrappers were made."""

    made: list[Recorder] = []  # noqa: RUF012

    def __init__(self, module: nn.Module, **kwargs) -> None:
        super().__init__()
        self.inner, self.kwargs = module, kwargs
        Recorder.made.append(self)


@pytest.fixture(autouse=True)
def _forget_recorders():
    Recorder.made = []


def conv_block(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 3, 3))


class Net(nn.Module):
    """Containers without forward among modules that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(3)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 10), "b": nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))})

    def forward(self) -> None: ...


def random_tree(seed: int) -> nn.Module:
    pick = random.Random(seed)

    def grow(depth: int) -> nn.Module:
        if depth == 0 or pick.random() < 0.3:
            width = pick.choice([1, 3, 10])
            return pick.choice([nn.Linear(width, width), nn.BatchNorm1d(width), nn.LayerNorm(width), nn.ReLU()])
        return nn.Sequential(*(grow(depth - 1) for _ in range(pick.randint(1, 4))))

    return nn.Sequential(*(grow(3) for _ in range(4)))


TREES = {
    "leaf": lambda: nn.Linear(2, 2),
    "flat": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False)),
    "conv": lambda: nn.Sequential(conv_block(4), conv_block(8), nn.Flatten(), nn.Linear(12, 2)),
    "batch-norm root": lambda: nn.BatchNorm1d(3),
    "containers": Net,
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, dim_feedforward=16, batch_first=True),
    **{f"random {seed}": functools.partial(random_tree, seed) for seed in range(8)},
}
KINDS = {nn.Linear, nn.TransformerEncoderLayer, nn.Conv2d}


def is_wide(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.in_features > 3


def is_3d(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv3d)


def own_arguments(module: nn.Module) -> bool | dict[str, object]:
    if isinstance(module, nn.LayerNorm):
        return {}
    if isinstance(module, nn.Linear):
        return {"forward_prefetch": True, "mixed_precision": None} if is_wide(module) else True
    if isinstance(module, nn.BatchNorm2d):
        return {"limit_all_gathers": False}
    return isinstance(module, nn.BatchNorm1d)


def odd_numels(module: nn.Module, recurse: bool, nonwrapped_numel: int, offset: int = 0) -> bool:
    """A policy whose result depends on every number it receives, so that it shows each wrong one."""
    odd = (nonwrapped_numel + offset) % 2 == 1
    return recurse or (odd and not isinstance(module, (nn.ModuleList, nn.ModuleDict)))


# Each takes the library, `flatfsdp.wrap` or `torch.distributed.fsdp.wrap`.
POLICIES = {
    "module": lambda lib: lib.ModuleWrapPolicy(KINDS),
    "module, called": lambda lib: functools.partial(lib._or_policy, policies=[lib.ModuleWrapPolicy({nn.Conv2d})]),
    "transformer": lambda lib: functools.partial(lib.transformer_auto_wrap_policy, transformer_layer_cls=KINDS),
    "lambda": lambda lib: functools.partial(lib.lambda_auto_wrap_policy, lambda_fn=is_wide),
    "or": lambda lib: functools.partial(
        lib._or_policy,
        policies=[
            functools.partial(lib.lambda_auto_wrap_policy, lambda_fn=is_wide),
            functools.partial(lib.transformer_auto_wrap_policy, transformer_layer_cls={nn.Conv2d}),
        ],
    ),
    "size, default": lambda lib: lib.size_based_auto_wrap_policy,
    **{
        f"size {numel}": lambda lib, numel=numel: functools.partial(
            lib.size_based_auto_wrap_policy, min_num_params=numel
        )
        for numel in (1, 12, 100, 300)
    },
    "size, excluded": lambda lib: functools.partial(
        lib.size_based_auto_wrap_policy,
        min_num_params=10,
        exclude_wrap_modules={nn.ModuleList, nn.ModuleDict, nn.Linear},
    ),
    "custom": lambda lib: lib.CustomPolicy(own_arguments),
    "odd numels": lambda lib: odd_numels,
    "odd numels, partial": lambda lib: functools.partial(odd_numels, offset=1),
}


def describe(root: nn.Module, paths: dict[nn.Module, str]) -> tuple[list[object], list[object]]:
    """Each wrapper's path before wrapping and its arguments, in the order of making; and the tree that came of it."""
    described = []
    for recorder in Recorder.made:
        kwargs = {name: value for name, value in recorder.kwargs.items() if name != "auto_wrap_policy"}
        precision = kwargs.pop("mixed_precision")
        described.append((paths[recorder.inner], kwargs, getattr(precision, "param_dtype", None)))
    places = [(path.replace(".inner", ""), type(module)) for path, module in root.named_modules()]
    return described, places


def wrapped_by_torch(root: nn.Module, policy, ignored: tuple[str, ...], mixed: bool, kwargs: dict[str, object]):
    paths = {module: path for path, module in root.named_modules()}
    ignored_modules = {module for path in ignored for module in root.get_submodule(path).modules()}
    ignored_params = {param for module in ignored_modules for param in module.parameters()}
    precision = torch_fsdp.MixedPrecision(**HALF) if mixed else None
    root_kwargs = {**kwargs, "mixed_precision": precision}
    torch_auto_wrap(root, policy, ignored_modules, ignored_params, root_kwargs, Recorder)
    return describe(root, paths)


def wrapped_by_us(root: nn.Module, policy, ignored: tuple[str, ...], mixed: bool, kwargs: dict[str, object]):
    paths = {module: path for path, module in root.named_modules()}
    ignored_modules = {module for path in ignored for module in root.get_submodule(path).modules()}
    ignored_params = {param for module in ignored_modules for param in module.parameters()}
    root_kwargs = {**kwargs, "mixed_precision": MixedPrecision(**HALF) if mixed else MixedPrecision()}
    plan = plan_wrapping(
        root, policy, kwargs=root_kwargs, ignored_modules=ignored_modules, ignored_params=ignored_params
    )
    assert [planned.path for planned in plan] == [paths[planned.module] for planned in plan]
    apply_plan(plan, Recorder)
    assert [recorder.inner for recorder in Recorder.made] == [planned.module for planned in plan]
    return describe(root, paths)


def check_against_torch(tree: str, policy: str, *, ignored: tuple[str, ...] = (), mixed: bool = False) -> int:
    original, kwargs = TREES[tree](), {"use_orig_params": True, "backward_prefetch": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Recorder.made = []
        expected = wrapped_by_torch(copy.deepcopy(original), POLICIES[policy](torch_wrap), ignored, mixed, kwargs)
        for library in (our_wrap, torch_wrap):  # torch's policy objects work here as well
            Recorder.made = []
            assert wrapped_by_us(copy.deepcopy(original), POLICIES[policy](library), ignored, mixed, kwargs) == expected
    return len(expected[0])


# Where a function refuses to look inside, FSDP1 under mixed precision looks nevertheless, and wraps an attention's
# projection, whose weight is then read while sharded: tested below as ours.
FSDP1_FAILS = {("transformer", policy) for policy in ("size 1", "size 12", "size 100", "size, excluded")}


@pytest.mark.parametrize("policy", POLICIES)
def test_units_are_those_of_fsdp1(policy):
    units = 0
    for tree in TREES:
        units += check_against_torch(tree, policy)
        if (tree, policy) not in FSDP1_FAILS:
            check_against_torch(tree, policy, mixed=True)
    assert (units == 0) == (policy == "size, default"), "the trees must show what the policy does"


@pytest.mark.parametrize("policy", POLICIES)
def test_units_are_those_of_fsdp1_beside_ignored_modules(policy):
    check_against_torch("conv", policy, ignored=("0.1", "3"), mixed=True)
    check_against_torch("containers", policy, ignored=("layers.1", "heads.b"))


def test_always_wrap_policy_wraps_every_module_as_in_fsdp1():
    POLICIES["always"] = lambda lib: lib.always_wrap_policy
    try:
        assert check_against_torch("conv", "always", mixed=True) == 12
    finally:
        del POLICIES["always"]


@pytest.mark.parametrize(
    "name",
    [
        "_or_policy",
        "lambda_auto_wrap_policy",
        "size_based_auto_wrap_policy",
        "transformer_auto_wrap_policy",
        "enable_wrap",
        "wrap",
    ],
)
def test_functions_have_the_argument_names_order_and_defaults_of_fsdp1(name):
    ours, torchs = (
        [
            (parameter.name, parameter.kind, parameter.default)
            for parameter in inspect.signature(function).parameters.values()
        ]
        for function in (getattr(our_wrap, name), getattr(torch_wrap, name))
    )
    assert ours == torchs


def test_size_policy_has_the_attributes_of_fsdp1_and_reads_them(monkeypatch):
    ours, torchs = our_wrap.size_based_auto_wrap_policy, torch_wrap.size_based_auto_wrap_policy
    assert ours.EXCLUDE_WRAP_MODULES == torchs.EXCLUDE_WRAP_MODULES
    assert ours.FORCE_LEAF_MODULES == torchs.FORCE_LEAF_MODULES
    asked = functools.partial(ours, nonwrapped_numel=10, min_num_params=10)
    monkeypatch.setattr(ours, "FORCE_LEAF_MODULES", {nn.ReLU})
    monkeypatch.setattr(ours, "EXCLUDE_WRAP_MODULES", {nn.GELU})
    assert [asked(nn.ReLU(), True), asked(nn.ReLU(), False)] == [False, True]
    assert [asked(nn.GELU(), True), asked(nn.GELU(), False)] == [True, False]


# --- Features that FSDP1 lacks ---------------------------------------------------------------------------------------


def test_a_leaf_stays_a_leaf_under_mixed_precision():
    policy = functools.partial(our_wrap.size_based_auto_wrap_policy, min_num_params=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plans = [
            plan_wrapping(TREES["transformer"](), policy, kwargs={"mixed_precision": precision})
            for precision in (MixedPrecision(), MixedPrecision(**HALF))
        ]
    assert [planned.path for planned in plans[0]] == [planned.path for planned in plans[1]]
    assert not any("out_proj" in planned.path for planned in plans[0])


def test_a_batch_norm_inside_a_leaf_is_still_computed_in_full_precision():
    def only_linears(module, recurse, nonwrapped_numel):
        return not isinstance(module, nn.Sequential) if recurse else isinstance(module, nn.Linear)

    root = TREES["containers"]()
    with pytest.warns(FlatFSDPWarning):
        plan = plan_wrapping(root, only_linears, kwargs={"mixed_precision": MixedPrecision(**HALF)})
    assert [(planned.path, planned.in_full_precision) for planned in plan] == [("heads.a", False), ("heads.b.0", True)]
    assert plan[1].kwargs == {"mixed_precision": None}


def test_modules_in_full_precision_are_reported_with_the_way_out():
    root, kwargs = conv_block(4), {"mixed_precision": MixedPrecision(**HALF)}
    with pytest.warns(FlatFSDPWarning) as caught:
        plan_wrapping(root, ModuleWrapPolicy(nn.Conv2d), kwargs=kwargs)
    assert [str(warning.message) for warning in caught] == [
        "mixed_precision: modules of BatchNorm2d become units of their own in full precision, each with collectives "
        "of its own. To compute them in the param dtype, as part of the units around them, pass MixedPrecision(..., "
        "_module_classes_to_ignore=())."
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the user has chosen the root's class
        assert plan_wrapping(nn.BatchNorm2d(4), ModuleWrapPolicy(nn.BatchNorm2d), kwargs=kwargs) == ()
    kwargs["mixed_precision"] = MixedPrecision(**HALF, _module_classes_to_ignore=())
    assert [planned.path for planned in plan_wrapping(root, ModuleWrapPolicy(nn.Conv2d), kwargs=kwargs)] == ["0", "3"]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.deeper = nn.Sequential(nn.ReLU(), self.first)

    def forward(self) -> None: ...


@pytest.mark.parametrize(
    "policy",
    [ModuleWrapPolicy(nn.Linear), functools.partial(our_wrap.size_based_auto_wrap_policy, min_num_params=12)],
    ids=["object", "function"],
)
def test_a_shared_module_gets_one_wrapper_in_all_its_places(policy):
    root = Shared()
    plan = plan_wrapping(root, policy, kwargs={})
    assert [planned.path for planned in plan] == ["first"]
    assert plan[0].places == ((root, "first"), (root, "again"), (root.deeper, "1"))
    undo = apply_plan(plan, Recorder)
    assert len(Recorder.made) == 1
    assert root.first is root.again is root.deeper[1] is Recorder.made[0]
    undo.close()
    assert root.first is root.again is root.deeper[1] is plan[0].module


def test_a_policy_function_decides_on_a_shared_module_once():
    root, asked = Shared(), []

    def ask(module, recurse, nonwrapped_numel):
        asked.append((module, recurse, nonwrapped_numel))
        return recurse or module is root.first

    plan_wrapping(root, ask, kwargs={})
    assert asked == [
        (root, True, 12),
        (root.first, True, 12),
        (root.first, False, 12),
        (root.deeper, True, 12),
        (root.deeper[0], True, 0),
        (root.deeper[0], False, 0),
        (root.deeper, False, 0),
    ]


@pytest.mark.filterwarnings("error::flatfsdp.errors.FlatFSDPWarning")
def test_modules_wrapped_by_hand_are_left_alone_and_not_counted():
    class Managed(Recorder):
        _is_fsdp_managed_module = True

    root = nn.Sequential(Managed(nn.Sequential(nn.Linear(3, 3))), nn.Sequential(nn.Linear(3, 3)))
    assert [planned.path for planned in plan_wrapping(root, ModuleWrapPolicy(nn.Linear), kwargs={})] == ["1.0"]
    numels = []

    def ask(module, recurse, nonwrapped_numel):
        numels.append((module, recurse, nonwrapped_numel))
        return False if recurse and module is not root else recurse

    plan_wrapping(root, ask, kwargs={})
    assert numels == [(root, True, 12), (root[1], True, 12)]


@pytest.mark.parametrize("refuses", [False, True])
def test_parents_that_override_setattr_are_wrapped_and_restored(refuses):
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            super().__setattr__("layer", nn.Linear(2, 2))

        def __setattr__(self, name, value):
            if "_parameters" in self.__dict__ and isinstance(value, nn.Module):
                if refuses:
                    raise AttributeError(f"{name} is fixed")
                value = copy.deepcopy(value)  # redirects assignments
            super().__setattr__(name, value)

        def forward(self) -> None: ...

    root = Frozen()
    layer = root.layer
    undo = apply_plan(plan_wrapping(root, frozenset({nn.Linear}), kwargs={}), Recorder)
    assert root.layer is Recorder.made[0] and root.layer.inner is layer
    undo.close()
    assert root.layer is layer


def test_if_a_wrapper_cannot_be_made_everything_is_put_back():
    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    before, events = list(root.named_modules()), []

    def make(module: nn.Module, **kwargs) -> nn.Module:
        if len(Recorder.made) == 3:
            raise MemoryError("no room for the last one")
        return Recorder(module, **kwargs)

    def unmake(wrapper: nn.Module) -> None:
        events.append(wrapper)
        assert all(not isinstance(module, Recorder) for module in root[1:].modules())

    plan = plan_wrapping(root, our_wrap.always_wrap_policy, kwargs={})
    assert [planned.path for planned in plan] == ["0.0", "0.1", "0", "1"]
    with pytest.raises(MemoryError, match="no room"):
        apply_plan(plan, make, unmake=unmake)
    assert list(root.named_modules()) == before
    assert events == Recorder.made[::-1]


def test_undo_covers_what_fails_afterwards_and_can_be_dropped():
    root = nn.Sequential(nn.Linear(2, 2))
    linear = root[0]
    plan = plan_wrapping(root, our_wrap.always_wrap_policy, kwargs={})
    with pytest.raises(ValueError, match="the root"), apply_plan(plan, Recorder):
        assert isinstance(root[0], Recorder)
        raise ValueError("the root itself failed")
    assert root[0] is linear
    with apply_plan(plan, Recorder) as undo:
        undo.pop_all()
    assert isinstance(root[0], Recorder)


def test_planning_touches_nothing():
    root = TREES["conv"]()
    before = [(path, module, dict(vars(module))) for path, module in root.named_modules()]
    kwargs = {"mixed_precision": MixedPrecision(**HALF)}
    with pytest.warns(FlatFSDPWarning):
        plan = plan_wrapping(root, ModuleWrapPolicy(nn.Conv2d), kwargs=kwargs)
    assert [(path, module, dict(vars(module))) for path, module in root.named_modules()] == before
    assert kwargs == {"mixed_precision": MixedPrecision(**HALF)}
    assert len({id(planned.kwargs) for planned in plan}) == len(plan)


# --- Refusals and warnings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            ModuleWrapPolicy(nn.ModuleList),
            "auto_wrap_policy: chose 'layers' (ModuleList), which defines no forward: its wrapper would never be "
            "called and its parameters never gathered (0.0.weight, 0.0.bias, 0.1.weight and 9 more). Choose the "
            "modules inside it (Sequential), or the module that calls them.",
        ),
        (
            functools.partial(
                our_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.ModuleDict)
            ),
            "auto_wrap_policy: chose 'heads' (ModuleDict), which defines no forward: its wrapper would never be "
            "called and its parameters never gathered (a.weight, a.bias, b.0.weight and 3 more). Choose the modules "
            "inside it (Linear, Sequential), or the module that calls them.",
        ),
    ],
    ids=["object", "function"],
)
def test_containers_without_forward_are_refused(policy, message):
    with pytest.raises(UsageError) as caught:
        plan_wrapping(Net(), policy, kwargs={})
    assert str(caught.value) == message


class Holder(nn.Module):
    """A parameter next to a module, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.extra = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("root", [Net(), nn.ModuleList([Net()]), nn.ModuleDict({"net": Net()})])
def test_what_has_no_forward_is_passed_over_where_units_inside_hold_its_parameters(root):
    """FSDP1 wraps it, warns, and never gathers through it: the other units are the same."""
    root = copy.deepcopy(root)
    everything = [path for path, module in root.named_modules() if path and type(module).__name__[:6] != "Module"]
    for policy in (our_wrap.always_wrap_policy, CustomPolicy(lambda module: True), ModuleWrapPolicy(nn.Module)):
        plan = plan_wrapping(root, policy, kwargs={})
        assert sorted(planned.path for planned in plan) == sorted(everything)
    some = plan_wrapping(root, ModuleWrapPolicy({nn.ModuleList, nn.Sequential, nn.Linear, Net}), kwargs={})
    assert not any(isinstance(planned.module, nn.ModuleList) for planned in some)


@pytest.mark.parametrize("policy", [our_wrap.always_wrap_policy, ModuleWrapPolicy(nn.Linear)])
def test_own_parameters_of_what_has_no_forward_are_refused(policy):
    with pytest.raises(UsageError, match=r"Holder defines no forward.* never gathered \(extra\)"):
        plan_wrapping(Holder(), policy, kwargs={})
    ignored = Holder()
    assert plan_wrapping(ignored, policy, kwargs={}, ignored_params={ignored.extra})
    inside = nn.Sequential(Holder())
    if policy is our_wrap.always_wrap_policy:
        with pytest.raises(UsageError, match=r"chose '0' \(Holder\), which defines no forward.* \(extra\)"):
            plan_wrapping(inside, policy, kwargs={})
    else:
        assert [planned.path for planned in plan_wrapping(inside, policy, kwargs={})] == ["0.linear"]


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (frozenset({nn.Conv3d}), "ModuleWrapPolicy({Conv3d})"),
        (CustomPolicy(is_3d), "CustomPolicy(is_3d)"),
        (our_wrap.size_based_auto_wrap_policy, "size_based_auto_wrap_policy"),
        (functools.partial(our_wrap.size_based_auto_wrap_policy, min_num_params=999), "size_based_auto_wrap_policy"),
    ],
    ids=["module", "custom", "function", "partial"],
)
def test_a_policy_that_matches_nothing_warns(policy, name):
    with pytest.warns(FlatFSDPWarning) as caught:
        assert plan_wrapping(Net(), policy, kwargs={}) == ()
    assert [str(warning.message) for warning in caught] == [
        f"auto_wrap_policy: {name} matched no submodule of Net, which becomes a single unit: all of its parameters are "
        "gathered at once. Classes inside: BatchNorm1d, Embedding, Linear, ModuleDict, ModuleList, Sequential."
    ]


def test_a_policy_that_matches_what_has_no_parameters_warns():
    root = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout())
    with pytest.warns(FlatFSDPWarning) as caught:
        plan = plan_wrapping(root, ModuleWrapPolicy({nn.ReLU, nn.Dropout}), kwargs={})
    assert [planned.path for planned in plan] == ["1", "2"]
    assert [str(warning.message) for warning in caught] == [
        "auto_wrap_policy: ModuleWrapPolicy({Dropout, ReLU}) matched only submodules without parameters (Dropout, "
        "ReLU) of Sequential, which becomes a single unit: all of its parameters are gathered at once. Classes inside: "
        "Dropout, Linear, ReLU."
    ]


def test_a_policy_whose_one_match_is_the_root_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_wrapping(nn.Linear(2, 2), ModuleWrapPolicy(nn.Linear), kwargs={}) == ()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            None,
            "CustomPolicy: lambda_fn returned None (NoneType) for the root (Sequential). "
            "Accepted: True, False, or a dict of the unit's arguments.",
        ),
        (
            {"shardin_strategy": "NO_SHARD"},
            "auto_wrap_policy, for '0' (Linear): 'shardin_strategy' is not an argument of FullyShardedDataParallel. "
            "Accepted: process_group, sharding_strategy, cpu_offload, auto_wrap_policy, backward_prefetch, "
            "mixed_precision, ignored_modules, param_init_fn, device_id, sync_module_states, forward_prefetch, "
            "limit_all_gathers, use_orig_params, ignored_states, device_mesh, check_values, reshard_after_forward, "
            "join_units_below, layout, deterministic_sums. "
            "Did you mean 'sharding_strategy'?",
        ),
    ],
    ids=["type", "name"],
)
def test_wrong_answers_of_a_custom_policy(answer, message):
    with pytest.raises(ConfigTypeError) as caught:
        plan_wrapping(nn.Sequential(nn.Linear(2, 2)), CustomPolicy(lambda module: answer), kwargs={})
    assert str(caught.value) == message


def test_module_wrap_policy_takes_classes_only_and_shows_them():
    assert repr(ModuleWrapPolicy([nn.Linear, nn.Conv2d])) == "ModuleWrapPolicy({Conv2d, Linear})"
    assert ModuleWrapPolicy(nn.Linear)(nn.Linear(1, 1), recurse=False)
    with pytest.raises(ConfigTypeError) as caught:
        ModuleWrapPolicy([nn.ReLU()])
    assert str(caught.value) == (
        "module_classes: got ReLU() (ReLU). Accepted: a collection of module classes. Pass its class, ReLU."
    )


# --- enable_wrap and wrap --------------------------------------------------------------------------------------------


def test_wrap_wraps_inside_its_context_only():
    plain = nn.Linear(2, 2)
    assert wrap(plain, use_orig_params=True) is plain
    with enable_wrap(wrapper_cls=Recorder, forward_prefetch=True, use_orig_params=False):
        wrapped = wrap(plain, use_orig_params=True)
    assert wrapped.inner is plain and wrapped.kwargs == {"forward_prefetch": True, "use_orig_params": True}
    with pytest.raises(ZeroDivisionError), enable_wrap(wrapper_cls=Recorder):
        raise ZeroDivisionError
    assert wrap(plain) is plain


def test_enable_wrap_refuses_what_is_unclear():
    with pytest.raises(ConfigTypeError) as wrong, enable_wrap(wrapper_cls=3):
        pass
    assert str(wrong.value) == "wrapper_cls: got 3. Accepted: a class such as FullyShardedDataParallel."
    with enable_wrap(wrapper_cls=Recorder), pytest.raises(UsageError) as nested, enable_wrap(wrapper_cls=Recorder):
        pass
    assert str(nested.value) == (
        "enable_wrap: it is already active, so it is unclear whose arguments apply. Leave the outer context first."
    )
