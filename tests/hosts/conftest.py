"""Hosts of a test, which is skipped with the reason where this machine can't have any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polytrain.testing.hosts import Host, hosts, why_no_hosts


@pytest.fixture(autouse=True)
def can_have_hosts() -> None:
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def two(tmp_path: Path, can_have_hosts: None) -> Iterator[tuple[Host, ...]]:
    """Two hosts that share `tmp_path`."""
    with hosts(2, shared=tmp_path) as pair:
        yield pair
