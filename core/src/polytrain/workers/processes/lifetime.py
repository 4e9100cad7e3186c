"""How long a zygote stays, and what it answers about itself.

A zygote ends with its last client. A warm one serves scripts that come one after another, so it
stays for a time after its last use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a zygote holds."""

    pid: int
    modules: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that were set for its imports."""

    kept_s: float
    """Seconds after its last use for which it stays without clients."""

    left_s: float
    """How many of them are left, if nobody uses it from now on."""

    users: int
    """Clients for which it has forked worker processes."""

    is_current: bool
    """Whether files of code that it has imported are as they were."""


@dataclass(slots=True, kw_only=True)
class Lifetime:
    """A zygote's, in that process."""

    kept_s: float = 0.0
    """Seconds after its last use for which it stays without clients; 0 unless it is warm."""

    _used_at: float = field(default_factory=time.monotonic)
    _users: set[Hashable] = field(default_factory=set)

    @property
    def is_warm(self) -> bool:
        """Whether it serves several scripts."""
        return self.kept_s > 0

    @property
    def left_s(self) -> float:
        """For how many seconds it still stays without clients; not above 0 if it doesn't."""
        return self._used_at + self.kept_s - time.monotonic() if self.is_warm else 0.0

    def begin_use(self, client: Hashable) -> None:
        """Note that it has forked for a client."""
        self._users.add(client)

    def end_use(self, client: Hashable) -> None:
        """Note that a client is gone. If it has only asked, that was no use."""
        if client in self._users:
            self._users.discard(client)
            self._used_at = time.monotonic()

    def stop(self) -> None:
        """End with the last client from now on."""
        self.kept_s = 0.0

    def description(
        self, modules: Sequence[str], environment: Mapping[str, str], *, is_current: bool
    ) -> list[Any]:
        """Return the answer to "describe".

        Args:
            modules: those that the zygote was started to import.
            environment: the variables that were set for it.
            is_current: whether files of code that it has imported are as they were.
        """
        held = [list(modules), dict(environment), self.kept_s, self.left_s]
        return ["holds", os.getpid(), *held, len(self._users), is_current]


def described(answer: Sequence[Any]) -> Description:
    """Read the answer to "describe"."""
    _, pid, modules, environment, kept_s, left_s, users, is_current = answer
    return Description(
        pid=pid,
        modules=tuple(modules),
        environment=environment,
        kept_s=kept_s,
        left_s=left_s,
        users=users,
        is_current=is_current,
    )
