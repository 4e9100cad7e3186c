"""Environment variables that are set for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from polytrain_plugins.world import Member


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs, and restore the old values."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def nccl_variables(me: Member) -> dict[str, str]:
    """Return the variable that has NCCL use the network interface that the user has chosen.

    Empty if none is chosen, if the variable is set, or if all members are on one node.
    """
    if me.interface is None or me.node_count == 1 or "NCCL_SOCKET_IFNAME" in os.environ:
        return {}
    # Without the sign it would also be the prefix of other names.
    return {"NCCL_SOCKET_IFNAME": f"={me.interface}"}
