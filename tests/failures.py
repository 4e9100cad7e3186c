"""Each failure is printed when it happens: a run that is killed has no summary.

A test that hangs shows where its processes are: afterwards they are gone, and often only they know
what they have waited for.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from polytrain.testing.processes import title

_PROCESSES, _STACKS_S, _ALL_S = 30, 10, 60
"""How many are shown at most, and seconds for the stacks of one and of all: those of a stopped
process can't be had."""

_terminal: pytest.TerminalReporter | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Have the stacks of other processes follow those of this one's threads."""
    plugin: Any = config.pluginmanager.get_plugin("timeout")
    if plugin is None:
        return
    own: Callable[[Any], None] = plugin.dump_stacks

    def dump_stacks(terminal: Any) -> None:
        own(terminal)
        below = psutil.Process().children(recursive=True)
        pythons = [each for each in below if "python" in title(each) or "ray::" in title(each)]
        ends = time.monotonic() + _ALL_S
        for process in pythons[:_PROCESSES]:
            if time.monotonic() > ends:
                break
            terminal.sep("~", title=f"Stacks of {process.pid}: {title(process)[:60]}")
            terminal.write(_stacks_of(process.pid))

    plugin.dump_stacks = dump_stacks
    config.add_cleanup(lambda: setattr(plugin, "dump_stacks", own))


def _stacks_of(pid: int) -> str:
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", f"{pid}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_STACKS_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}\n"
    return found.stdout or found.stderr


def pytest_sessionstart(session: pytest.Session) -> None:
    """Called in each process; a process that only runs tests prints nothing itself."""
    global _terminal
    if not hasattr(session.config, "workerinput"):
        _terminal = session.config.pluginmanager.get_plugin("terminalreporter")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called in the process that prints, for all processes that run tests."""
    if report.failed and _terminal is not None:
        _terminal.write_line("")
        _terminal.write_sep("!", f"{report.nodeid} ({report.when})")
        _terminal.write_line(report.longreprtext)
