"""Each failure is printed when it happens: a run that is killed has no summary."""

from __future__ import annotations

import pytest

_terminal: pytest.TerminalReporter | None = None


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
