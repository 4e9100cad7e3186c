"""What a data set is known by, and what differs between two that should be the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = "names of files"
ORDER = "order of files"
VERSIONS = "sizes or times of files"
ORDER_WITHOUT_NAMES = "sizes and times of files in their order"
VERSIONS_WITHOUT_NAMES = "sizes and times of files"
"""Of files that are known by their names, and of renamed ones."""


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is other now than it was then, each difference once.

    What only one of them is known by isn't compared: the other one doesn't read it.

    Args:
        then: what a data set is known by → a digest of it.
        now: the same of the data set in its place.
    """
    changed = [what for what in then if what in now and then[what] != now[what]]
    if NAMES in changed:
        # Renamed files differ in whatever is listed by name.
        if VERSIONS_WITHOUT_NAMES in changed:
            return ["other files"]
        order = [ORDER] if ORDER_WITHOUT_NAMES in changed else []
        changed = [NAMES, *order]
    without_names = (ORDER_WITHOUT_NAMES, VERSIONS_WITHOUT_NAMES)
    return [f"other {what}" for what in changed if what not in without_names]
