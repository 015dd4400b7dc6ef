"""The package as pip sees it: metadata, what is shipped, and that installing it leaves torch alone."""

from __future__ import annotations

import flatfsdp


def test_version_is_a_release_number() -> None:
    assert all(part.isdigit() for part in flatfsdp.__version__.split("."))
