"""Observers that would never be called, or can't be, are named before the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polytrain import RunConfig
from polytrain.output.observers import installed_observers
from polytrain_plugins import Report, hookimpl


class Unmarked:
    def polytrain_reported(self, report: Report) -> None:
        """Its author has forgotten the mark."""


class Misspelt:
    @hookimpl
    def polytrain_report(self, report: Report) -> None:
        """There is no such hook."""


class WrongArgument:
    @hookimpl
    def polytrain_reported(self, metrics: dict[str, Any]) -> None:
        """The hook has a report, no metrics."""


class Unawaited:
    @hookimpl
    async def polytrain_reported(self, report: Report) -> None:
        """Nobody awaits it."""


class Good:
    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        """What an observer looks like."""

    @property
    def broken(self) -> None:
        raise RuntimeError("a property isn't read")


GOOD = Good()


def exits() -> None:
    raise SystemExit("no licence")


def test_installed_observers_that_cannot_be_used_are_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed = [
        SimpleNamespace(name="exits", load=exits),
        SimpleNamespace(name="unmarked", load=Unmarked),
        SimpleNamespace(name="good", load=lambda: GOOD),
    ]
    monkeypatch.setattr("polytrain.output.observers.installed_entry_points", lambda _: installed)
    assert installed_observers() == [GOOD]
    exited, unmarked = (record.getMessage() for record in caplog.records)
    assert exited == "The observer 'exits' can't be imported. It is ignored."
    assert "unmarked.polytrain_reported: it isn't marked as a hook" in unmarked
    assert "Write @hookimpl above it" in unmarked


@pytest.mark.parametrize(
    ("observers", "field", "what", "remedy"),
    [
        (Good(), "", "it is a Good", "observers=[…]"),
        (None, "", "it is None", "observers=[…]"),
        ([Unmarked()], "[0].polytrain_reported", "isn't marked", "@hookimpl"),
        ([Good(), Misspelt()], "[1].polytrain_report", "no such hook", "'polytrain_reported'?"),
        ((WrongArgument(),), "[0].polytrain_reported", "no argument 'metrics'", "run, report"),
        ([Unawaited()], "[0].polytrain_reported", "makes a coroutine", "a plain function"),
        ([Good], "[0]", "it is the class Good", "Give Good(…)"),
        ([print], "[0]", "has no hook", "polytrain_reported"),
        (["mlflow"], "[0]", "'mlflow' is text", "RunConfig(track=…)"),
        ([GOOD, GOOD], "[1]", "given twice", "Leave one of them out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_observer_that_would_not_be_called(
    problems: Any, observers: Any, field: str, what: str, remedy: str
) -> None:
    problem = problems(run_config=RunConfig(observers=observers)).only(
        f"RunConfig.observers{field}"
    )
    assert what in problem.what
    assert remedy in problem.remedy
