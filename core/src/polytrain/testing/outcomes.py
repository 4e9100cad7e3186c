"""A plugin of pytest that collects how the kit's tests end.

It imports no tier: pytest rewrites their assertions when it imports them itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How one test has ended."""

    end: str = "passed"
    """passed, failed, skipped or "known failure"."""

    seconds: float = 0.0
    """With its fixtures."""

    properties: dict[str, Any] = field(default_factory=dict)


class Outcomes:
    """A plugin of pytest that collects how tests end."""

    def __init__(self) -> None:
        self.by_test: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a part of a test: its setup, its call or its teardown."""
        name = report.nodeid.rpartition("::")[2]
        outcome = self.by_test.setdefault(name, Outcome())
        outcome.seconds += report.duration
        outcome.properties.update(report.user_properties)
        if report.failed:
            outcome.end = "failed"
        elif report.skipped:
            outcome.end = "known failure" if hasattr(report, "wasxfail") else "skipped"
