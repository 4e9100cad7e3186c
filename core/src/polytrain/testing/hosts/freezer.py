"""Control groups that stop all processes of a host, as a pause of its virtual machine does."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from polytrain.testing.processes import eventually

_ROOTS = {
    Path("/sys/fs/cgroup/freezer"): "cgroup.procs",
    # Version 2, alone or beside version 1.
    Path("/sys/fs/cgroup"): "cgroup.subtree_control",
    Path("/sys/fs/cgroup/unified"): "cgroup.subtree_control",
}


def freezer_roots() -> list[Path]:
    """Where control groups that can be frozen are made, of version 1 and of version 2."""
    return [root for root, file in _ROOTS.items() if os.access(root / file, os.W_OK)]


class Freezer:
    """The control group of one host. Its processes move into it by themselves."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.members = directory / "cgroup.procs"
        self._directory = directory
        self._is_v1 = (directory / "freezer.state").exists()

    def freeze(self) -> None:
        """Stop all processes, and return when they stand still."""
        self._write("FROZEN", "1")
        if not eventually(self._is_frozen):
            raise TimeoutError(f"{self._directory} isn't frozen after 30 s")

    def thaw(self) -> None:
        # A host that is gone has nothing to thaw.
        with suppress(FileNotFoundError):
            self._write("THAWED", "0")

    def _write(self, v1: str, v2: str) -> None:
        if self._is_v1:
            (self._directory / "freezer.state").write_text(v1)
        else:
            (self._directory / "cgroup.freeze").write_text(v2)

    def _is_frozen(self) -> bool:
        if self._is_v1:
            return (self._directory / "freezer.state").read_text().strip() == "FROZEN"
        return "frozen 1" in (self._directory / "cgroup.events").read_text()
