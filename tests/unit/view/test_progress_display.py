"""What is shown of a run goes to the stream that is there, and never ends the run."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import logging
import os
import pty
import struct
import sys
import termios
import threading
import time
from typing import Any

import pytest
from tests.unit.record.lines import entry_of

from polytrain.record.entries import AttemptEnded, Entry
from polytrain.record.ledger import Ledger
from polytrain.view.progress.display import shown_progress
from polytrain_plugins import RunInfo

RUN = RunInfo(name="größe", backend="reference", num_workers=2, path="/runs/r", cluster="here")


def line(event: str, **fields: Any) -> Entry:
    return entry_of({"time": 100.0, "event": event, **fields})


OPENED = line("Opened", anew=True, world_size=2, began=100.0)
CONCLUDED = line("Concluded", succeeded=True, stopped=None, reason="every rank finished")


def shown(progress: str | bool, *entries: Entry) -> None:
    """Show a run of these lines."""
    ledger = Ledger()
    with shown_progress(RUN, progress, ledger, now=time.time) as take:
        for entry in entries:
            ledger.take(entry)
            take(entry)


def test_a_stream_that_knows_few_characters_gets_the_others_as_escapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="ascii"))
    shown("plain", OPENED, CONCLUDED)
    sys.stderr.flush()
    assert written.getvalue().decode("ascii").splitlines() == [
        "gr\\xf6\\xdfe: starting (2 workers here), in /runs/r",
        "gr\\xf6\\xdfe: finished after 0.0 s",
        "  more: polytrain show /runs/r",
    ]


class Broken(io.StringIO):
    """A stream whose reader is gone."""

    tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("progress", ["plain", "json"])
def test_a_reader_that_is_gone_is_left_alone(
    progress: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    monkeypatch.setattr(sys, "stderr", broken)
    shown(progress, OPENED, CONCLUDED)
    assert broken.tries == 1
    assert caplog.records == []


def test_a_line_that_cannot_be_shown_is_logged_once_and_ends_nothing(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        shown("plain", OPENED, line("Joined", phase="Training", attempt=0), CONCLUDED)
        with shown_progress(RUN, "plain", Ledger(), now=time.time) as take:
            no_failure: Any = "nothing"
            broken = AttemptEnded(attempt=0, failure=no_failure, reason="")
            take(broken)
            take(broken)
    assert len(caplog.records) == 1
    assert "the run continues" in caplog.text


@pytest.mark.parametrize("progress", [False, "none"])
def test_nothing_starts_no_thread(progress: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = {*threading.enumerate()}
    with shown_progress(RUN, progress, Ledger(), now=time.time) as take:
        take(OPENED)
        assert {*threading.enumerate()} <= before
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("progress", ["plain", "json"])
def test_the_thread_ends_with_the_run(progress: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Threads that earlier tests have left may end meanwhile.
    before = {*threading.enumerate()}
    with shown_progress(RUN, progress, Ledger(), now=time.time) as take:
        take(OPENED)
        assert len({*threading.enumerate()} - before) == 1
    assert {*threading.enumerate()} <= before
    assert "interrupted" in capsys.readouterr().err


def test_the_end_of_a_run_is_the_last_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown("json", OPENED, CONCLUDED)
    found = [json.loads(each) for each in capsys.readouterr().err.splitlines()]
    assert [each["event"] for each in found] == ["run_started", "run_ended"]


def test_of_two_runs_at_once_one_has_the_bottom_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        second = dataclasses.replace(RUN, name="second")
        with (
            shown_progress(RUN, "auto", Ledger(), now=time.time),
            shown_progress(second, "auto", Ledger(), now=time.time),
        ):
            pass
        with shown_progress(second, "auto", Ledger(), now=time.time):
            pass
        monkeypatch.undo()
        data = b""
        # What was written last may be on its way for a moment.
        while data.count(b": interrupted") < 3:
            data += os.read(ours, 1 << 16)
        written = data.decode()
    os.close(ours)
    first, _, rest = written.partition("second: interrupted")
    assert "größe · waiting for workers" in first
    assert "second: starting" in first
    assert "second ·" not in first
    assert "second · waiting for workers" in rest
