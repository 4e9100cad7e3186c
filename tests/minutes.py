"""Where a test run's time went: minutes by folder, printed at its end."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath

import pytest

_seconds: Counter[str] = Counter()
_tests: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called in the process that prints, for all processes that run tests."""
    folder = str(PurePosixPath(report.nodeid.partition("::")[0]).parent)
    _seconds[folder] += report.duration
    _tests[folder] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if sum(_seconds.values()) < 60:
        return
    terminalreporter.section("minutes by folder, summed over processes")
    for folder, seconds in _seconds.most_common():
        terminalreporter.line(f"{seconds / 60:6.1f}  {folder} ({_tests[folder]} tests)")
    terminalreporter.line(f"{_seconds.total() / 60:6.1f}  in all")
