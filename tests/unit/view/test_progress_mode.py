"""How progress is shown depends on what standard error is connected to."""

from __future__ import annotations

import io
import os
import pty
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

import pytest

from polytrain.record.ledger import Ledger
from polytrain.view.progress.display import mode_of, shown_progress
from polytrain_plugins import RunInfo

RUN = RunInfo(name="a", backend="reference", num_workers=1, path="/runs/a", cluster="here")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stream:
        yield stream
    os.close(ours)


class WriteOnly:
    """A program's own stream: text goes to a terminal and to a log."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.text = ""
        if is_terminal:
            self.isatty = lambda: True

    def write(self, text: str) -> None:
        self.text += text


TABLE = [
    ("auto", "live", "plain"),
    (True, "live", "plain"),
    ("live", "live", "plain"),
    ("plain", "plain", "plain"),
    ("json", "json", "json"),
    ("none", "none", "none"),
    (False, "none", "none"),
]


@pytest.mark.parametrize(("progress", "on_a_terminal", "elsewhere"), TABLE)
def test_each_value_on_a_terminal_and_elsewhere(
    terminal: TextIO, progress: Any, on_a_terminal: str, elsewhere: str
) -> None:
    assert mode_of(progress, terminal) == on_a_terminal
    assert mode_of(progress, io.StringIO()) == elsewhere


@pytest.mark.parametrize("kind", ["dumb", "unknown", ""])
def test_a_terminal_that_cannot_keep_lines_in_place_gets_lines(
    terminal: TextIO, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TERM", kind)
    assert mode_of("auto", terminal) == "plain"


def test_without_a_standard_error_nothing_is_shown() -> None:
    closed = io.StringIO()
    closed.close()
    assert mode_of("json", None) == "none"
    assert mode_of("auto", closed) == "none"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_object_that_can_only_write_gets_lines(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream := WriteOnly(is_terminal=is_terminal))
    with shown_progress(RUN, "live", Ledger(), now=lambda: 0.0):
        pass
    assert "a: starting (1 worker here), in /runs/a\n" in stream.text


@pytest.mark.parametrize(
    ("progress", "mode"), [("auto", "notebook"), ("live", "notebook"), ("plain", "plain")]
)
def test_a_notebook_has_an_output_of_its_own(
    monkeypatch: pytest.MonkeyPatch, progress: str, mode: str
) -> None:
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)  # type: ignore[arg-type]  # a fake module
    assert mode_of(progress, io.StringIO()) == mode


def test_ipythons_prompt_is_a_terminal(terminal: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", prompt)  # type: ignore[arg-type]  # a fake module
    assert mode_of("auto", terminal) == "live"


def test_a_library_that_imports_ipython_meanwhile_is_no_notebook(
    terminal: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    assert mode_of("auto", terminal) == "live"
