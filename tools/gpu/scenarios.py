"""All trainings for parity: a name, the wrapping of the model, the play, and the tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flatfsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from . import plays
from .alone import Course
from .plays import Play
from .wraps import BF16, FP16, FP32, Wrap, front, front_with_hooks, wrapper

EXACT = 1e-5  # sums over ranks in another order, and kernels chosen by alignment
LOW = 2e-2  # between two runs in bf16 or fp16
PLAIN = Course()
FEW_BITS = 0.5  # parameters change in about the same direction


@dataclass(frozen=True)
class Scenario:
    """One training."""

    name: str
    wrap: Wrap
    play: Play = plays.plain
    course: Course = PLAIN
    within: float = EXACT


def all_scenarios() -> list[Scenario]:
    """The scenarios of both fronts."""
    return [*_strategies(), *_precision(), *_schedules(), *_memory(), *_features(), *_fully_shard()]


def _strategies() -> Iterator[Scenario]:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        across = {"HYBRID_SHARD": {"across": (0, 1)}, "_HYBRID_SHARD_ZERO2": {"across": (1, 0)}}.get(strategy, {})
        for orig in (False, True):
            words = f"{strategy}, {'original' if orig else 'flat'} parameters"
            yield Scenario(words, wrapper(sharding_strategy=strategy, use_orig_params=orig, **across))
    yield Scenario("layout in rows", wrapper(layout="rows", use_orig_params=True))
    yield Scenario("small units joined", wrapper(join_units_below=2**20))
    yield Scenario("small units joined, bf16", wrapper(join_units_below=2**20, mixed_precision=_bf16()), **_low())


def _joined() -> dict[str, Any]:
    return {"join_units_below": 2**20}


def _bf16() -> MixedPrecision:
    return MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)


def _low(seen: str = "bfloat16", **more: object) -> dict[str, object]:
    return {"course": Course(seen, **more), "within": LOW}  # type: ignore[arg-type]


def _precision() -> Iterator[Scenario]:
    half = MixedPrecision(param_dtype=FP16, reduce_dtype=FP32)
    few = MixedPrecision(gather_dtype=torch.int8, reduce_bits=8, reduce_error_feedback=True)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        yield Scenario(f"bf16, {strategy}", wrapper(sharding_strategy=strategy, mixed_precision=_bf16()), **_low())
    yield Scenario("bf16, original parameters", wrapper(mixed_precision=_bf16(), use_orig_params=True), **_low())
    yield Scenario(
        "fp16 with a scaler, one step of which overflows",
        wrapper(mixed_precision=half),
        plays.scaled,
        **_low("float16", skipped=2),
    )
    yield Scenario("8 bits with error feedback", wrapper(mixed_precision=few), plays.in_few_bits, within=FEW_BITS)


def _schedules() -> Iterator[Scenario]:
    for prefetch in (None, "BACKWARD_POST", "BACKWARD_MID"):
        yield Scenario(
            f"backward_prefetch {prefetch}", wrapper(backward_prefetch=prefetch, mixed_precision=_bf16()), **_low()
        )
    yield Scenario("forward_prefetch", wrapper(forward_prefetch=True, mixed_precision=_bf16()), **_low())
    yield Scenario("limit_all_gathers off", wrapper(limit_all_gathers=False, mixed_precision=_bf16()), **_low())
    yield Scenario(
        "blocks recomputed", wrapper(mixed_precision=_bf16()), partial(plays.recomputed, reentrant=False), **_low()
    )
    yield Scenario("blocks recomputed, by reentrance", wrapper(), partial(plays.recomputed, reentrant=True))


def _memory() -> Iterator[Scenario]:
    pinned, plain = CPUOffload(offload_params=True), CPUOffload(offload_params=True, pin_memory=False)
    yield Scenario("offload, pinned", wrapper(cpu_offload=pinned), partial(plays.offloaded, pinned=True))
    yield Scenario(
        "offload, pinned, bf16",
        wrapper(cpu_offload=pinned, mixed_precision=_bf16()),
        partial(plays.offloaded, pinned=True),
        **_low(),
    )
    yield Scenario("offload, not pinned", wrapper(cpu_offload=plain), partial(plays.offloaded, pinned=False))
    for words, options in (
        ("FULL_SHARD", {}),
        ("bf16", {"mixed_precision": _bf16()}),
        ("bf16, BACKWARD_MID", {"mixed_precision": _bf16(), "backward_prefetch": "BACKWARD_MID"}),
        ("bf16, limit_all_gathers off", {"mixed_precision": _bf16(), "limit_all_gathers": False}),
        ("bf16, offload", {"mixed_precision": _bf16(), "cpu_offload": pinned}),
    ):
        more = _low() if "mixed_precision" in options else {}
        yield Scenario(f"freed memory poisoned, {words}", wrapper(**options), plays.poisoned, **more)


def _features() -> Iterator[Scenario]:
    for where in ("forward", "backward"):
        yield Scenario(
            f"an exception in the {where}",
            wrapper(mixed_precision=_bf16()),
            partial(plays.tripped, where=where),
            **_low(),
        )
    yield Scenario("a checkpoint half-way", wrapper(use_orig_params=True), plays.resumed)
    yield Scenario(
        "a checkpoint half-way, flat parameters, bf16", wrapper(mixed_precision=_bf16()), plays.resumed, **_low()
    )
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        yield Scenario(f"{kind} half-way", wrapper(use_orig_params=True), partial(plays.through_state_dicts, kind=kind))
    yield Scenario("optimizer_in_backward", wrapper(use_orig_params=True), plays.in_backward)
    yield Scenario("optimizer_in_backward, two microbatches", wrapper(), plays.in_backward, Course(micro=2))
    for on in ("device", "host"):
        frozen = wrapper(use_orig_params=True, mixed_precision=_bf16())
        yield Scenario(f"keep_frozen_unsharded on the {on}", frozen, partial(plays.kept, on=on), **_low(frozen=True))
    for how in ("no_sync", "without synchronization", "deferred reductions"):
        yield Scenario(f"two microbatches, {how}", wrapper(), partial(plays.accumulated, how=how), Course(micro=2))
    replicas, partial_sums = {"sharding_strategy": "HYBRID_SHARD", "across": (0, 1)}, plays.added_up_within_replicas
    for words, options in (
        ("replicas", replicas),
        ("replicas, original parameters, small units joined", replicas | {"use_orig_params": True, **_joined()}),
        ("NO_SHARD", {"sharding_strategy": "NO_SHARD"}),
        ("NO_SHARD, small units joined", {"sharding_strategy": "NO_SHARD", **_joined()}),
    ):
        yield Scenario(f"partial sums, {words}", wrapper(**options), partial_sums, Course(micro=3))
    yield Scenario("clip_grad_norm_", wrapper(), course=Course(clip=0.1))
    yield Scenario("fuse_optimizer_steps", wrapper(use_orig_params=True), plays.fused)
    yield Scenario("detect_nonfinite", wrapper(use_orig_params=True), plays.watched)
    yield Scenario("inference", wrapper(), plays.inferred)


def _fully_shard() -> Iterator[Scenario]:
    mixed = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for reshard in (True, False):
        yield Scenario(f"fully_shard, reshard_after_forward {reshard}", front(reshard_after_forward=reshard))
    yield Scenario("fully_shard, bf16", front(mp_policy=mixed), **_low())
    yield Scenario("fully_shard, small units joined, bf16", front(joined=True, mp_policy=mixed), **_low())
    yield Scenario("fully_shard, replicas", front(across=(0, 1)))
    yield Scenario(
        "fully_shard, replicas, partial sums", front(across=(0, 1)), plays.added_up_within_replicas, Course(micro=3)
    )
    yield Scenario(
        "fully_shard, offload", front(offload_policy=CPUOffloadPolicy()), partial(plays.offloaded, pinned=True)
    )
    yield Scenario("fully_shard, gather hooks", front_with_hooks(), course=Course("rounded"), within=LOW)
    yield Scenario("fully_shard, gather hooks, poisoned", front_with_hooks(), plays.poisoned, Course("rounded"), LOW)
    yield Scenario("fully_shard, freed memory poisoned, bf16", front(mp_policy=mixed), plays.poisoned, **_low())
    yield Scenario(
        "fully_shard, two microbatches",
        front(),
        partial(plays.accumulated, how="without synchronization"),
        Course(micro=2),
    )
    yield Scenario("fully_shard, clip by torch", front(), course=Course(clip=0.1))
    yield Scenario("fully_shard, state dicts half-way", front(), plays.through_dtensors)
    yield Scenario("fully_shard, fuse_optimizer_steps", front(), plays.fused)
    for where in ("forward", "backward"):
        yield Scenario(f"fully_shard, an exception in the {where}", front(), partial(plays.tripped, where=where))
