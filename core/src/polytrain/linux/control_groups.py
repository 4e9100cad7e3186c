"""Reads the limits of this process's control groups: of a container, a batch job or a service.

The kernel's figures for the whole machine, such as its free memory, ignore these limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60
"""Bytes above which a limit of version 1 means no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroups:
    """Control groups of version 1 or 2. A group is also bound by the limits of those above it."""

    mounts: Path = Path("/sys/fs/cgroup")
    """Mount point of the groups. In a container the root is the container's own group."""

    membership: Path = Path("/proc/self/cgroup")
    """File that names this process's groups."""

    def cpus(self) -> float | None:
        """Return the CPUs that this process may use on average; None without a limit."""
        limits = []
        for group in self._groups("cpu"):
            limit, _, period = _read(group / "cpu.max").partition(" ")
            if not limit:
                limit = _read(group / "cpu.cfs_quota_us")
                period = _read(group / "cpu.cfs_period_us")
            if limit.isdigit() and period.isdigit():
                limits.append(int(limit) / int(period))
        return min(limits, default=None)

    def memory(self) -> int | None:
        """Return the bytes of memory that this process's groups may use; None without a limit."""
        return min((limit for _, limit in self._memory_limits()), default=None)

    def free_memory(self) -> int | None:
        """Return the bytes of that limit that aren't in use; None without a limit."""
        free = (limit - _used_memory(group) for group, limit in self._memory_limits())
        return max(0, least) if (least := min(free, default=None)) is not None else None

    def _memory_limits(self) -> Iterator[tuple[Path, int]]:
        for group in self._groups("memory"):
            # Beyond memory.high, processes are slowed down until they hardly run.
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
                limit = _read(group / name)
                if limit.isdigit() and int(limit) < _NO_LIMIT:
                    yield group, int(limit)

    def _groups(self, controller: str) -> Iterator[Path]:
        """Yield the directories of this process's groups; some may not exist here."""
        yield self.mounts
        yield self.mounts / controller
        for line in _read(self.membership).splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = self.mounts / controller if controllers else self.mounts
            path = PurePosixPath(name.lstrip("/"))
            # The path of a group outside the container's namespace begins with two dots.
            if ".." not in path.parts:
                yield from (top / each for each in (path, *path.parents[:-1]))


OWN_GROUPS = ControlGroups()


def available_memory(groups: ControlGroups = OWN_GROUPS) -> int:
    """Return the bytes that this process can allocate now without swapping.

    It is the machine's free memory, or the rest of a control group's limit if that is less.
    """
    # Import it late: that takes a while, and a driver without data doesn't need it.
    import psutil

    machine: int = psutil.virtual_memory().available
    free = groups.free_memory()
    return machine if free is None else min(machine, free)


def _used_memory(group: Path) -> int:
    """Return the bytes in use, without droppable page cache."""
    used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
    fields = [line.split() for line in _read(group / "memory.stat").splitlines()]
    counts = {name: int(count) for name, count in fields}
    # In version 1 only the total includes child groups.
    cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
    return int(used or 0) - cached


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
