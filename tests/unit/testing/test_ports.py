"""Ranges of ports as numbers with masks."""

from __future__ import annotations

import pytest

from polytrain.testing.hosts.namespaces import blocks_of


@pytest.mark.parametrize("ports", [range(1, 65_536), range(20_000, 65_536), range(0, 65_536)])
@pytest.mark.parametrize("port", [0, 1, 19_999, 20_000, 32_767, 32_768, 65_535])
def test_a_port_matches_one_block_if_it_is_in_the_range(ports: range, port: int) -> None:
    matches = [first for first, mask in blocks_of(ports) if port & mask == first]
    assert len(matches) == (port in ports)


def test_blocks_are_few() -> None:
    assert len(list(blocks_of(range(1, 65_536)))) == 16
    assert list(blocks_of(range(22, 23))) == [(22, 0xFFFF)]
