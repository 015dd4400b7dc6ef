"""`fully_shard` for the modules that a policy chooses, and for the model around them."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...api import MixedPrecision
from ...errors import ConfigTypeError, did_you_mean, one_rank_warns, refuse_type
from ..agreement.process_groups import is_first_of
from ..config.arguments import check_arguments, own
from ..wrapping.auto_wrap import plan_wrapping
from ..wrapping.shared_storage import follow_ties
from .arguments import Call, check_call
from .in_place import shard

CALL = "fully_shard_by_policy"


def shard_by_policy(module: Any, policy: Any, front_class: type, settings: dict[str, Any]) -> None:
    """Shard the modules that `policy` chooses inside `module`, children first, then `module`, each by `settings`: the
    arguments of `fully_shard`, and others of the wrapper."""
    if not isinstance(module, nn.Module):
        refuse_type("module", module, "an nn.Module")
    with one_rank_warns(this_rank=is_first_of(None, settings["mesh"])):
        whole = _checked(module, {**settings, "shard_placement_fn": None})  # the rest, before any module is sharded
        settings = {**settings, "mesh": whole.config.device_mesh}
        policy = check_arguments(module, auto_wrap_policy=policy).auto_wrap_policy
        follow_ties(module, (), whole.config.ignored_params)  # across units, while all of them have their memory
        planned = () if policy is None else _plan(module, policy, settings, whole)
    for each, own_settings, island in planned:
        shard(_checked(each, own_settings, island=island), front_class)
    shard(_checked(module, settings), front_class)


def _checked(module: nn.Module, settings: dict[str, Any], *, island: bool = False) -> Call:
    return check_call(module, **settings, materializes=True, island=island)


def _plan(
    root: nn.Module, policy: Any, settings: dict[str, Any], whole: Call
) -> list[tuple[nn.Module, dict[str, Any], bool]]:
    # The wrapper's config has classes that compute in full precision, FSDP2's does not.
    precision = whole.config.mixed_precision if own(settings["mp_policy"], MixedPrecision) is not None else None
    kwargs = {**settings, "mixed_precision": precision}
    plan = []
    for planned in plan_wrapping(root, policy, kwargs=kwargs, ignored_params=whole.config.ignored_params):
        chosen = {name: value for name, value in planned.kwargs.items() if name != "mixed_precision"}
        for name in (name for name in chosen if name not in settings):
            hint = did_you_mean(name, list(settings))
            raise ConfigTypeError(
                f"auto_wrap_policy, for {planned.path!r}: {name!r} is not an argument of {CALL}. Accepted: "
                f"{', '.join(settings)}.{hint and ' ' + hint}"
            )
        if planned.in_full_precision:
            chosen["mp_policy"] = None
        plan.append((planned.module, chosen, planned.in_full_precision))
    return plan
