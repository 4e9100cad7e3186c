"""The wall clock of a host, shifted against the machine's."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from polytrain.testing.hosts.available import HostsUnavailable

_SHIFT = Path("/tmp/.polytrain-clock-shift")
_LIBRARY = Path("/tmp/.polytrain-clock.so")


class HostClock:
    """Shifts the clock of all programs that a host starts from now on.

    The kernel's clock stays: times of files, and programs that don't use the C library, have it.

    Args:
        root: the host's file system, as this process sees it.
    """

    def __init__(self, root: Path) -> None:
        self._shift = root / _SHIFT.relative_to("/")
        self.set(0)
        (root / _LIBRARY.relative_to("/")).write_bytes(_library())
        self.env = {"LD_PRELOAD": str(_LIBRARY)}
        """What a program needs to have the clock."""

    def set(self, seconds: int) -> None:
        """Shift it, for programs that run already too."""
        # Programs have mapped the file: it must never be empty.
        with self._shift.open("r+b" if self._shift.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))


def _library() -> bytes:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise HostsUnavailable("a clock takes a C compiler, and neither cc nor gcc is installed")
    source = Path(__file__).with_name("clock.c")
    define = f'-DSHIFT_FILE="{_SHIFT}"'
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory, "clock.so")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", define, "-o", built, source, "-ldl"], check=True
        )
        return built.read_bytes()
