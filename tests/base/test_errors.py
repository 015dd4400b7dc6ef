"""Messages of flatfsdp and their places: the exception family, warnings at the user's line, the rank in the log."""

from __future__ import annotations

import logging
import pickle
import sys
import types
import warnings

import pytest

from flatfsdp import errors
from flatfsdp.errors import FlatFSDPError, FlatFSDPWarning, InternalError, UsageError

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _rank_unset(monkeypatch):
    monkeypatch.setattr(errors, "_rank", None)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigTypeError", TypeError),
        ("ConfigTypeError", ValueError),  # which FSDP1 raises for many of these
        ("ConfigValueError", ValueError),
        ("UsageError", RuntimeError),
        ("AgreementError", RuntimeError),
        ("InternalError", AssertionError),
        ("FlatFSDPWarning", UserWarning),
    ],
)
def test_each_is_of_the_family_and_of_the_builtin_kind(name, builtin):
    kind = getattr(errors, name)
    assert issubclass(kind, FlatFSDPError) and issubclass(kind, builtin)
    assert name in errors.__all__


def test_internal_error_requests_a_report_also_after_pickling():
    expected = (
        "span 3 overlaps span 4\nThis is a bug in flatfsdp, not in your program. "
        "Please report it together with the output of `python -m flatfsdp.env`."
    )
    error = InternalError("span 3 overlaps span 4")
    assert str(error) == expected
    assert str(pickle.loads(pickle.dumps(error))) == expected


def test_fail_prints_rank_and_message_and_raises_the_same_error(capfd):
    errors.set_rank(3)
    error = UsageError("unit 'head' was reached twice")
    with pytest.raises(UsageError) as caught:
        errors.fail(error)
    assert caught.value is error
    assert capfd.readouterr().err == "[flatfsdp, rank 3] UsageError: unit 'head' was reached twice\n"


def test_rank_comes_from_the_launcher_until_it_is_set(monkeypatch):
    assert errors.current_rank() == 0
    monkeypatch.setenv("RANK", "5")
    assert errors.current_rank() == 5
    monkeypatch.setenv("RANK", "none")
    assert errors.current_rank() == 0
    errors.set_rank(2)
    assert errors.current_rank() == 2


def _module_named(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(errors=errors)
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    return module


def test_a_warning_points_at_the_users_line_through_frames_of_flatfsdp_and_torch():
    ours = _module_named("flatfsdp.somewhere", "def inner():\n    errors.warn('odd setting')\n")
    torchs = _module_named("torch.nn.somewhere", "def call(fn):\n    fn()\n")
    with pytest.warns(FlatFSDPWarning, match="^odd setting$") as caught:
        torchs.call(ours.inner)
        line = sys._getframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_by_default_a_repeated_warning_of_one_line_shows_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for _ in range(3):
            errors.warn("odd setting")
        errors.warn("odd setting")
    assert [str(warning.message) for warning in caught] == ["odd setting"] * 2


def test_what_is_reported_of_an_object_is_new_of_the_next_one() -> None:
    """The next one may have the address of a freed object."""

    class Model:
        pass

    for _ in range(20):
        model = Model()
        assert errors.is_new("a failure", of=model)
        assert not errors.is_new("a failure", of=model)
        del model


def test_warn_once_is_once_per_key_whatever_the_filter_and_the_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        key = object()
        errors.warn_once(("anchor", key), "unit 'a' stays unsharded")
        errors.warn_once(("anchor", key), "unit 'a' stays unsharded")
        errors.warn_once(("order", key), "the order changed")
    assert [str(warning.message) for warning in caught] == ["unit 'a' stays unsharded", "the order changed"]


def test_the_log_is_silent_by_default_and_carries_the_rank(capfd):
    errors.set_rank(7)
    errors.logger.error("nobody listens")
    assert errors.logger.name == "flatfsdp"
    assert any(isinstance(handler, logging.NullHandler) for handler in errors.logger.handlers)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    errors.logger.addHandler(handler)
    try:
        errors.logger.warning("gathering %s", "blocks.0")
    finally:
        errors.logger.removeHandler(handler)
    assert logging.Formatter("%(rank)s %(name)s %(message)s").format(records[0]) == "7 flatfsdp gathering blocks.0"
    assert capfd.readouterr() == ("", "")


def test_did_you_mean_offers_only_what_is_close():
    assert errors.did_you_mean("FULL_SHRAD", ["NO_SHARD", "FULL_SHARD"]) == "Did you mean 'FULL_SHARD'?"
    assert errors.did_you_mean("zero3", ["NO_SHARD", "FULL_SHARD"]) == ""


def test_shown_keeps_messages_to_one_short_line():
    def build() -> None: ...

    assert errors.shown(3) == "3 (int)"
    assert errors.shown(int) == "the class int"
    assert errors.shown(build) == "the function build"
    assert errors.shown("x" * 100) == "a value of type str"
    assert errors.shown(object()) == "a value of type object"


def test_what_ranks_report_is_there_once_for_those_that_report_the_same() -> None:
    texts = {2: "has ended", 0: "waits", 5: "has ended"}
    assert errors.ranks_by_value(texts) == {"has ended": [2, 5], "waits": [0]}
    assert errors.by_ranks(texts) == "ranks 2, 5 has ended; rank 0 waits"
    assert errors.by_ranks(texts, ": ") == "ranks 2, 5: has ended; rank 0: waits"
    assert errors.by_ranks({}) == ""
