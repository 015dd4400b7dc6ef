"""Arguments at the public interface: accepted values and their meaning, errors and their messages, warnings."""

from __future__ import annotations

import functools
import inspect
import warnings

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from flatfsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatfsdp.engine.config.arguments import check_argument_names, check_arguments, has_forward
from flatfsdp.errors import ConfigTypeError, ConfigValueError, FlatFSDPWarning
from flatfsdp.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy, size_based_auto_wrap_policy

pytestmark = pytest.mark.unit


class Group:
    """As much of a ProcessGroup as the checks look at."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


class Mesh:
    def __init__(self, ndim: int) -> None:
        self.ndim = ndim

    def get_group(self, mesh_dim: int) -> Group:
        return Group()


MODEL = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
LINEAR = MODEL[0]
GROUP, OTHER_GROUP, MESH_2D = Group(), Group(), Mesh(2)


@pytest.fixture(autouse=True)
def _no_surprising_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlatFSDPWarning)
        yield


def test_names_order_and_defaults_of_arguments_are_torchs():
    def described(function) -> list[tuple[str, str]]:
        # By their text: each library has an enum of its own.
        return [
            (name, str(parameter.default))
            for name, parameter in inspect.signature(function).parameters.items()
            if name != "self"
        ]

    ours, torchs = described(check_arguments), described(torch_fsdp.FullyShardedDataParallel.__init__)
    expected = [
        ("check_values", "warn"),
        ("reshard_after_forward", "None"),
        ("join_units_below", str(2**20)),
        ("layout", "flat"),
        ("deterministic_sums", "False"),
    ]
    assert ours == [*torchs, *expected]


def test_defaults_are_normalized():
    config = check_arguments(MODEL)
    assert config.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert config.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    assert config.mixed_precision == MixedPrecision()
    assert config.cpu_offload == CPUOffload()
    assert (config.ignored_modules, config.ignored_params) == ((), ())
    assert (config.process_group, config.device_mesh, config.device_id, config.auto_wrap_policy) == (None,) * 4
    assert config.replace(use_orig_params=True).use_orig_params and not config.use_orig_params


REDUCE_IN_FP32 = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("argument", "given", "expected"),
    [
        ("sharding_strategy", "full_shard", ShardingStrategy.FULL_SHARD),
        ("sharding_strategy", "SHARD_GRAD_OP", ShardingStrategy.SHARD_GRAD_OP),
        ("sharding_strategy", torch_fsdp.ShardingStrategy.NO_SHARD, ShardingStrategy.NO_SHARD),
        ("backward_prefetch", None, None),
        ("backward_prefetch", "backward_post", BackwardPrefetch.BACKWARD_POST),
        ("backward_prefetch", "backward_mid", BackwardPrefetch.BACKWARD_MID),
        ("backward_prefetch", torch_fsdp.BackwardPrefetch.BACKWARD_POST, BackwardPrefetch.BACKWARD_POST),
        ("mixed_precision", torch.float64, MixedPrecision(param_dtype=torch.float64)),
        ("mixed_precision", REDUCE_IN_FP32, REDUCE_IN_FP32),
        (
            "mixed_precision",
            torch_fsdp.MixedPrecision(torch.bfloat16, torch.float32, _module_classes_to_ignore=[nn.LayerNorm]),
            MixedPrecision(torch.bfloat16, torch.float32, _module_classes_to_ignore=(nn.LayerNorm,)),
        ),
        ("cpu_offload", True, CPUOffload(offload_params=True)),
        ("cpu_offload", torch_fsdp.CPUOffload(True), CPUOffload(offload_params=True)),
        ("auto_wrap_policy", nn.Linear, frozenset({nn.Linear})),
        ("auto_wrap_policy", [nn.Linear, nn.ReLU], frozenset({nn.Linear, nn.ReLU})),
        ("auto_wrap_policy", always_wrap_policy, always_wrap_policy),
        ("device_id", 0, 0),
        ("device_id", "cuda:1", torch.device("cuda", 1)),
        ("device_id", torch.device("cpu"), torch.device("cpu")),
        ("process_group", GROUP, GROUP),
        ("check_values", "raise", "raise"),
        ("reshard_after_forward", True, True),
        ("reshard_after_forward", 4, 4),
        ("join_units_below", 0, 0),
        ("layout", "rows", "rows"),
        ("param_init_fn", print, print),
    ],
)
def test_accepted_as(argument, given, expected):
    assert getattr(check_arguments(MODEL, **{argument: given}), argument) == expected


@pytest.mark.parametrize("name", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "hybrid_shard_zero2"])
def test_hybrid_takes_a_pair_of_groups_a_2d_mesh_or_a_policy(name):
    config = check_arguments(MODEL, sharding_strategy=name, process_group=[GROUP, OTHER_GROUP])
    assert config.sharding_strategy.name.lstrip("_") == name.upper().lstrip("_")
    assert config.process_group == (GROUP, OTHER_GROUP)
    assert check_arguments(MODEL, sharding_strategy=name, device_mesh=MESH_2D).device_mesh is MESH_2D
    assert check_arguments(MODEL, sharding_strategy=name, auto_wrap_policy={nn.Linear}).process_group is None


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({nn.Linear}),
        CustomPolicy(lambda module: False),
        torch_wrap.ModuleWrapPolicy({nn.Linear}),
        torch_wrap.CustomPolicy(lambda module: False),
        functools.partial(size_based_auto_wrap_policy, min_num_params=3),
        functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_policies_of_flatfsdp_and_of_torch_pass_as_they_are(policy):
    assert check_arguments(MODEL, auto_wrap_policy=policy).auto_wrap_policy is policy


def test_a_policy_whose_arguments_have_other_names_is_called_by_position():
    policy = check_arguments(MODEL, auto_wrap_policy=lambda m, r, n: (m, r, n)).auto_wrap_policy
    assert policy(module=LINEAR, recurse=False, nonwrapped_numel=6) == (LINEAR, False, 6)


def test_ignored_states_and_modules_end_in_one_form():
    assert check_arguments(MODEL, ignored_modules=iter([LINEAR])).ignored_modules == (LINEAR,)
    assert check_arguments(MODEL, ignored_modules=LINEAR).ignored_modules == (LINEAR,)
    assert check_arguments(MODEL, ignored_states={LINEAR}).ignored_modules == (LINEAR,)
    params = check_arguments(MODEL, ignored_states=MODEL.parameters()).ignored_params
    assert [id(param) for param in params] == [id(LINEAR.weight), id(LINEAR.bias)]
    (single,) = check_arguments(MODEL, ignored_states=LINEAR.weight).ignored_params
    assert single is LINEAR.weight


STRATEGIES = "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _HYBRID_SHARD_ZERO2"
POLICIES = (
    "None, a policy of flatfsdp.wrap, a callable (module, recurse, nonwrapped_numel) -> bool, "
    "or a set of module classes."
)
DEVICES = 'None, the index of an accelerator, a torch.device, or its name such as "cuda:0".'
PRECISIONS = "None, a floating-point torch.dtype (the param_dtype), or a MixedPrecision."


def needs_classes(module, recurse, nonwrapped_numel, classes):
    return recurse or isinstance(module, classes)


TYPE_ERRORS = [
    (
        {"sharding_strategy": 1},
        f"sharding_strategy: got 1 (int). Accepted: None, a ShardingStrategy, or its name ({STRATEGIES}).",
    ),
    (
        {"backward_prefetch": True},
        "backward_prefetch: got True (bool). "
        "Accepted: None, a BackwardPrefetch, or its name (BACKWARD_PRE, BACKWARD_POST, BACKWARD_MID).",
    ),
    (
        {"sharding_strategy": BackwardPrefetch.BACKWARD_PRE},
        "sharding_strategy: got <BackwardPrefetch.BACKWARD_PRE: 1> (BackwardPrefetch). "
        f"Accepted: None, a ShardingStrategy, or its name ({STRATEGIES}).",
    ),
    ({"use_orig_params": "yes"}, "use_orig_params: got 'yes' (str). Accepted: True or False."),
    ({"sync_module_states": 1}, "sync_module_states: got 1 (int). Accepted: True or False."),
    ({"forward_prefetch": None}, "forward_prefetch: got None (NoneType). Accepted: True or False."),
    ({"limit_all_gathers": 2}, "limit_all_gathers: got 2 (int). Accepted: True or False."),
    ({"param_init_fn": 3}, "param_init_fn: got 3 (int). Accepted: None, or a callable (module) -> None."),
    ({"mixed_precision": "bf16"}, f"mixed_precision: got 'bf16' (str). Accepted: {PRECISIONS}"),
    ({"cpu_offload": "cpu"}, "cpu_offload: got 'cpu' (str). Accepted: None, a bool, or a CPUOffload."),
    (
        {"process_group": 5},
        "process_group: got 5 (int). Accepted: None, or one torch.distributed.ProcessGroup, for FULL_SHARD.",
    ),
    (
        {"process_group": -100},
        "process_group: got -100 (int). Accepted: None, or one torch.distributed.ProcessGroup, for FULL_SHARD. "
        "torch.distributed.new_group returns this on ranks outside of the group.",
    ),
    (
        {"device_mesh": (2, 2)},
        "device_mesh: got (2, 2) (tuple). Accepted: None, or a 1-D or 2-D DeviceMesh, for FULL_SHARD.",
    ),
    ({"auto_wrap_policy": 3}, f"auto_wrap_policy: got 3 (int). Accepted: {POLICIES}"),
    (
        {"auto_wrap_policy": ModuleWrapPolicy},
        f"auto_wrap_policy: got the class ModuleWrapPolicy. Accepted: {POLICIES}",
    ),
    (
        {"auto_wrap_policy": ["Linear"]},
        "auto_wrap_policy: got 'Linear' (str). Accepted: a collection of module classes. "
        "Pass the class itself, not its name.",
    ),
    (
        {"auto_wrap_policy": MODEL[1]},
        "auto_wrap_policy: got ReLU() (ReLU). Accepted: a collection of module classes. Pass its class, ReLU.",
    ),
    (
        {"auto_wrap_policy": needs_classes},
        "auto_wrap_policy: the function needs_classes cannot be called as policy(module=..., recurse=..., "
        "nonwrapped_numel=...): missing a required argument: 'classes'. Bind its other arguments with "
        "functools.partial.",
    ),
    (
        {"ignored_modules": ["0"]},
        "ignored_modules[0]: got '0' (str). Accepted: nn.Module instances. "
        "Pass the objects themselves, not their names.",
    ),
    (
        {"ignored_modules": [MODEL[1], 3]},
        "ignored_modules[1]: got 3 (int). Accepted: nn.Module instances.",
    ),
    (
        {"ignored_states": 3},
        "ignored_states: got 3 (int). Accepted: None, or an iterable of nn.Parameter or nn.Module instances.",
    ),
    ({"device_id": 1.5}, f"device_id: got 1.5 (float). Accepted: {DEVICES}"),
    ({"device_id": True}, f"device_id: got True (bool). Accepted: {DEVICES}"),
    ({"join_units_below": 0.5}, "join_units_below: got 0.5 (float). Accepted: a number of bytes; 0 joins no units."),
    ({"join_units_below": True}, "join_units_below: got True (bool). Accepted: a number of bytes; 0 joins no units."),
    (
        {"layout": None},
        'layout: got None (NoneType). Accepted: "flat", "rows", a mapping from names or modules to grains, a '
        "callable (name, parameter) -> grain, or a class of optimizers.",
    ),
    ({"check_values": None}, 'check_values: got None (NoneType). Accepted: "warn", "raise", "off".'),
    (
        {"reshard_after_forward": "2"},
        "reshard_after_forward: got '2' (str). Accepted: True, False, a number of ranks, or None.",
    ),
]


@pytest.mark.parametrize(("given", "message"), TYPE_ERRORS, ids=lambda value: "")
def test_wrong_types(given, message):
    with pytest.raises(ConfigTypeError) as caught:
        check_arguments(MODEL, **given)
    assert str(caught.value) == message


VALUE_ERRORS = [
    (
        {"sharding_strategy": "full_shrad"},
        f"sharding_strategy: got 'full_shrad'. Accepted: None, a ShardingStrategy, or its name ({STRATEGIES}). "
        "Did you mean 'FULL_SHARD'?",
    ),
    (
        {"backward_prefetch": "early"},
        "backward_prefetch: got 'early'. "
        "Accepted: None, a BackwardPrefetch, or its name (BACKWARD_PRE, BACKWARD_POST, BACKWARD_MID).",
    ),
    (
        {"mixed_precision": torch.int8},
        "MixedPrecision.param_dtype: got torch.int8. Accepted: a floating-point torch.dtype, or None.",
    ),
    (
        {"auto_wrap_policy": set()},
        "auto_wrap_policy: got set(). Accepted: at least one class, or None to wrap no submodules.",
    ),
    ({"device_id": -1}, f"device_id: got -1. Accepted: {DEVICES}"),
    ({"device_id": "gpu"}, f"device_id: got 'gpu'. Accepted: {DEVICES}"),
    (
        {"device_id": "meta"},
        f"device_id: got device(type='meta'). Accepted: {DEVICES} The meta device cannot compute anything.",
    ),
    (
        {"layout": "row"},
        "layout: got 'row'. Accepted: \"flat\", \"rows\". Did you mean 'rows'?",
    ),
    (
        {"check_values": "rise"},
        'check_values: got \'rise\'. Accepted: "warn", "raise", "off". Did you mean \'raise\'?',
    ),
    (
        {"process_group": (GROUP, OTHER_GROUP)},
        "process_group: got 2 process groups. Accepted: None, or one torch.distributed.ProcessGroup, for FULL_SHARD. "
        "A pair is for the strategies HYBRID_SHARD and _HYBRID_SHARD_ZERO2.",
    ),
    (
        {"process_group": GROUP, "sharding_strategy": "HYBRID_SHARD"},
        "process_group: got a single process group. "
        "Accepted: None, or a pair (shard group, replicate group), for HYBRID_SHARD.",
    ),
    (
        {"process_group": (GROUP,) * 3, "sharding_strategy": "HYBRID_SHARD"},
        "process_group: got 3 process groups. "
        "Accepted: None, or a pair (shard group, replicate group), for HYBRID_SHARD.",
    ),
    (
        {"process_group": GROUP, "device_mesh": Mesh(1)},
        "process_group, device_mesh: got both. Accepted: one of them.",
    ),
    (
        {"device_mesh": Mesh(1), "sharding_strategy": "HYBRID_SHARD"},
        "device_mesh: got a 1-D mesh. Accepted: None, or a 2-D DeviceMesh, for HYBRID_SHARD. "
        "Its axes are (replicate, shard).",
    ),
    (
        {"device_mesh": Mesh(3)},
        "device_mesh: got a 3-D mesh. Accepted: None, or a 1-D or 2-D DeviceMesh, for FULL_SHARD.",
    ),
    (
        {"sharding_strategy": "HYBRID_SHARD"},
        "sharding_strategy: got HYBRID_SHARD without process_group, device_mesh or auto_wrap_policy. Units that are "
        "wrapped one by one would each create groups of their own. Accepted: a pair (shard group, replicate group) as "
        "process_group, a 2-D device_mesh, or an auto_wrap_policy, whose units share one pair.",
    ),
    (
        {"ignored_modules": [LINEAR], "ignored_states": [LINEAR]},
        "ignored_modules, ignored_states: got both. Accepted: one of them; ignored_states takes modules as well.",
    ),
    (
        {"ignored_states": [LINEAR.weight, MODEL[1]]},
        "ignored_states: got 1 parameters and 1 modules. Accepted: only parameters, or only modules. Pass the "
        "parameters of those modules instead of the modules.",
    ),
]


@pytest.mark.parametrize(("given", "message"), VALUE_ERRORS, ids=lambda value: "")
def test_wrong_values(given, message):
    with pytest.raises(ConfigValueError) as caught:
        check_arguments(MODEL, **given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"gather_dtype": torch.bfloat16},
            "MixedPrecision.gather_dtype: got torch.bfloat16. Accepted: None, torch.int8 or torch.float8_e4m3fn. To "
            "gather in torch.bfloat16, pass it as the param_dtype.",
        ),
        (
            {"gather_dtype": "int8"},
            "MixedPrecision.gather_dtype: got 'int8' (str). Accepted: None, torch.int8 or torch.float8_e4m3fn.",
        ),
        ({"reduce_bits": 2}, "MixedPrecision.reduce_bits: got 2. Accepted: None, 8 or 4."),
        ({"reduce_bits": True}, "MixedPrecision.reduce_bits: got True (bool). Accepted: None, 8 or 4."),
        (
            {"reduce_error_feedback": True},
            "MixedPrecision: got reduce_error_feedback=True without reduce_bits. Accepted: with reduce_bits=8 or "
            "reduce_bits=4; reductions in the reduce_dtype leave no quantization errors to compensate.",
        ),
        (
            {"reduce_bits": 4, "reduce_error_feedback": 1},
            "MixedPrecision.reduce_error_feedback: got 1 (int). Accepted: True or False.",
        ),
        (
            {"gather_dtype": torch.int8, "full_precision_in_eval": True},
            "MixedPrecision: got gather_dtype=torch.int8 and full_precision_in_eval=True. Accepted: one of them; "
            "parameters that were gathered in gather_dtype do not have full precision.",
        ),
    ],
    ids=lambda value: "",
)
def test_wrong_precisions(given, message):
    with pytest.raises((ConfigTypeError, ConfigValueError)) as caught:
        MixedPrecision(**given)
    assert str(caught.value) == message


def build_model() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (build_model, "module: got the function build_model. Accepted: an nn.Module."),
        (
            nn.Linear,
            "module: got the class Linear. Accepted: an instance of nn.Module. Create an instance first: Linear(...).",
        ),
    ],
)
def test_wrong_module(module, message):
    with pytest.raises(ConfigTypeError) as caught:
        check_arguments(module)
    assert str(caught.value) == message


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_has_forward():
    class Bare(nn.Module):
        pass

    class WithForward(Bare):
        def forward(self) -> None: ...

    set_on_instance = Bare()
    set_on_instance.forward = lambda: None
    assert has_forward(WithForward()) and has_forward(set_on_instance) and has_forward(torch.jit.script(LINEAR))
    containers = Bare(), nn.ModuleList(), nn.ModuleDict(), nn.ParameterList(), nn.ParameterDict(), nn.Module()
    assert not any(has_forward(container) for container in containers)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"ignored_modules": [LINEAR, MODEL]},
            "ignored_modules: got the module to be wrapped itself (Sequential), which leaves nothing to shard and no "
            "gradient to average. Pass modules inside it.",
        ),
        (
            {"device_mesh": MESH_2D},
            "device_mesh: FULL_SHARD uses only axis 0 of a 2-D mesh; ranks along axis 1 exchange nothing here. If "
            "this is intentional (tensor parallelism), pass the 1-D mesh of axis 0; to replicate, use HYBRID_SHARD.",
        ),
        (
            {"sharding_strategy": "NO_SHARD", "forward_prefetch": True},
            "forward_prefetch: True has no effect with NO_SHARD, which never gathers parameters.",
        ),
        (
            {"sharding_strategy": "NO_SHARD", "mixed_precision": MixedPrecision(gather_dtype=torch.int8)},
            "mixed_precision: gather_dtype has no effect with NO_SHARD, which never gathers parameters.",
        ),
        (
            {"mixed_precision": MixedPrecision(keep_low_precision_grads=True)},
            "mixed_precision: keep_low_precision_grads=True has no effect while param_dtype and reduce_dtype are None: "
            "there are no low-precision gradients to keep.",
        ),
        (
            {"mixed_precision": torch.bfloat16},
            "mixed_precision: param_dtype=torch.bfloat16 with reduce_dtype=None sums gradients across ranks in "
            "torch.bfloat16, too: small gradients are lost when there are many ranks. Pass reduce_dtype=torch.float32 "
            "for full-precision sums, or reduce_dtype=torch.bfloat16 to keep this behavior without the warning.",
        ),
    ],
)
def test_traps_are_warned_about_at_the_users_line_and_kept(given, message):
    with pytest.warns(FlatFSDPWarning) as caught:
        config = check_arguments(MODEL, **given)
    assert [str(warning.message) for warning in caught] == [message]
    assert caught[0].filename == __file__
    assert config.mixed_precision.reduce_dtype is None


def test_argument_names_from_elsewhere():
    check_argument_names({"forward_prefetch": True, "check_values": "off"}, where="here")
    with pytest.raises(ConfigTypeError) as caught:
        check_argument_names({"shardin_strategy": "NO_SHARD"}, where="CustomPolicy, for 'head' (Linear)")
    accepted = ", ".join(list(inspect.signature(check_arguments).parameters)[1:])
    assert str(caught.value) == (
        "CustomPolicy, for 'head' (Linear): 'shardin_strategy' is not an argument of FullyShardedDataParallel. "
        f"Accepted: {accepted}. Did you mean 'sharding_strategy'?"
    )
