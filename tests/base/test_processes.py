"""A process is found gone only where that can be known."""

from __future__ import annotations

import json

import pytest

from flatfsdp.engine.base.processes import ProcessIdentity

pytestmark = pytest.mark.unit


def test_a_process_is_found_gone_only_where_it_can_be() -> None:
    this = ProcessIdentity.this()
    assert ProcessIdentity.of(json.loads(json.dumps(this))) == this
    assert not this.is_gone()
    if this.start:
        assert this.is_gone() is False
        assert this._replace(start="1").is_gone(), "another one took its number"
        assert this._replace(system="elsewhere").is_gone() is None
