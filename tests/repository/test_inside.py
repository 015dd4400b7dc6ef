"""Tests look inside models through `tests/harness/inspect.py`, so that the engine can change and they need not."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "flatfsdp"
LOOKS_INSIDE = TESTS / "harness" / "inspect.py"
BUILDS_OF_DOUBLES = TESTS / "harness" / "outbox_model.py"  # objects whose memory is a model's

# Through these a model's engine is reached. None of them may be read elsewhere, from any object.
WAYS_IN = frozenset(
    "_unit _root _kept_root tracker limiter agreement accumulators streams handles _store _verdict _met".split()
)
# FSDP1's underscored names, which are ours, too, and public in effect; and words that torch or Python mean as well.
PUBLIC_IN_EFFECT = re.compile(
    r"_(all_handles|handle|flat_param|fqns|shapes|numels\w*|is_root|lazy_init|has_params|use_orig_params|state_dict_type"
    r"|comm_hook\w*|device_mesh|ignored_\w+|inter_node_pg|is_padding_mask|sync_gradients|orig_param_dtype|local_shard"
    r"|offload_params|fsdp_\w+|shard_param_infos|sharded_size|unpadded_unsharded_size|use_full_prec_in_eval|or_policy|parameters"
    r"|module_classes_to_ignore|stand_in|step_count|optimizer|config|version|replace|exit|save_to_state_dict"
    r"|load_from_state_dict|backward_hooks|schema|C|value|torch|world|unscale_grads_|HYBRID_SHARD_ZERO2)"
)
# Private names of single flatfsdp classes that tests of these classes read. It may only shrink.
OF_SINGLE_CLASSES = frozenset(
    """
    device/test_downloads.py:_event
    device/test_downloads.py:_keep
    device/test_streams.py:_stream
    harness/fake_device.py:_category
    agreement/test_calls.py:_lost
    checkpoint/test_weights.py:_LARGEST_FILE
    checkpoint/test_weights.py:_plans
    runtime/test_parity.py:_scatter
    flat/test_requires_grad.py:_reachable
    trainer/test_checkpoints.py:_saving
    agreement/test_predictions.py:_letters
    agreement/test_predictions.py:_past
    agreement/test_predictions.py:_symbols
    base/test_foreign_text.py:_lost
    watchdog/test_watchdog.py:_polls
    watchdog/test_watchdog.py:_outlive_the_store
    """.split()
)


@lru_cache
def reaches() -> tuple[tuple[str, int, str], ...]:
    """Private attributes of other objects that tests read: file, line, name."""
    read = re.compile(rf"([\w)\]]+)\.(_[a-zA-Z]\w*|{'|'.join(WAYS_IN)})\b")
    return tuple(
        (path.relative_to(TESTS).as_posix(), number, found[2])
        for path in sorted(TESTS.rglob("*.py"))
        if path not in (LOOKS_INSIDE, BUILDS_OF_DOUBLES)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if not line.lstrip().startswith(("from ", "import "))
        for found in read.finditer(line)
        if found[1] not in ("self", "cls")
    )


def private_names() -> frozenset[str]:
    """The names with an underscore that our own files give to something."""
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    return frozenset(re.findall(r"(?:\bself\.|\bdef |^|\s)(_[a-zA-Z]\w*)(?=\s*[:=(])", text))


def test_models_are_looked_into_in_one_place() -> None:
    found = [f"{file}:{line}: .{name}" for file, line, name in reaches() if name in WAYS_IN]
    assert not found, "ask tests/harness/inspect.py instead, or teach it:\n" + "\n".join(found)


def test_private_names_are_read_no_more_than_today() -> None:
    ours = private_names()
    found = {f"{file}:{name}" for file, _, name in reaches() if name in ours and not PUBLIC_IN_EFFECT.fullmatch(name)}
    more, gone = sorted(found - OF_SINGLE_CLASSES), sorted(OF_SINGLE_CLASSES - found)
    assert not more, f"assert what can be observed, or teach tests/harness/inspect.py: {more}"
    assert not gone, f"take these out of the list, which may only shrink: {gone}"
