"""Commands on a run in which every stored text, and its own name, would control a terminal."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from tests.unit.record.recorded import RUN, Line, journal, opened

import polytrain
from polytrain.checkpoint.manifest import MANIFEST_NAME, AttemptId, Manifest, StoredFile
from polytrain.errors import CheckpointError, RunOwnedError
from polytrain.events.output import Output
from polytrain.linux.processes import started_at
from polytrain.output.echo import echo, output_line
from polytrain.output.line_layout import printable
from polytrain.output.worker_output import WorkerOutput
from polytrain.run.lease import leased
from polytrain.run.requests import RemoteRequests
from polytrain.storage.location import Location
from polytrain.view.cli import main
from polytrain.view.cli.found import _run_names
from polytrain_plugins import Stopped

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\u202e\x9b31m\ntwice"
SHOWN = "\\x1b]0;owned"
"""How a command shows it."""

_OUR_WORDS = frozenset({"event", "phase", "kind", "status", "checkpoint", "start"})
"""Keys of an entry whose values polytrain looks up."""


DAMAGED = Manifest(
    number=0,
    attempt_id=AttemptId(token=1, attempt=0),
    step=1,
    metrics={HOSTILE: HOSTILE},
    backend=HOSTILE,
    written_by="rank_0",
    versions={HOSTILE: HOSTILE},
    created=HOSTILE,
    world_size=1,
    positions={},
    files=(StoredFile(name=f"weights{HOSTILE}", size=1, sha256=HOSTILE, rank=0),),
)


def hostile(value: Any, key: str = "") -> Any:
    """The same with all texts in it hostile, and the names in dicts of names."""
    if isinstance(value, dict):
        ours = key in ("", "failure", "identity", "configuration", "stopped", "content")
        return {name if ours else name + HOSTILE: hostile(it, name) for name, it in value.items()}
    if isinstance(value, list):
        return [hostile(each, key) for each in value]
    return value + HOSTILE if isinstance(value, str) and key not in _OUR_WORDS else value


def entry_of(line: Line) -> Line:
    return {key: hostile(value, key) for key, value in line.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / f"run{HOSTILE}"
    lines = [entry_of(line) for line in RUN]
    for line in lines:
        for number, stacks in (line.get("failure") or {}).get("stacks", {}).copy().items():
            line["failure"]["stacks"] = {number.removesuffix(HOSTILE): stacks}
    write(run / "journal.jsonl", b"".join(journal(lines)))
    write(run / "logs/rank_0.log", f"{HOSTILE}\n\x1b[31mred\n".encode())
    write(run / f"logs/rank_1{HOSTILE}.log", b"text\n")
    write(run / f"checkpoints/{DAMAGED.directory}/{MANIFEST_NAME}", DAMAGED.to_json().encode())
    return run


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def said(capsys: pytest.CaptureFixture[str], *, has_lines: bool = False) -> str:
    """All that was printed since, in which nothing controls a terminal."""
    output, errors = capsys.readouterr()
    text = output + errors
    assert [each for each in text if each != "\n" and printable(each) != each] == []
    assert has_lines or "\ntwice" not in output, "a name stays in its line"
    return text


@pytest.mark.parametrize(
    "command",
    [
        ["show", "RUN"],
        ["show", "RUN", "-f"],
        ["show", "RUN", "--json"],
        ["diff", "RUN", "RUN"],
        ["diff", "RUN", "RUN", "--json"],
        ["report", "RUN"],
        ["report", "RUN", "--json"],
        ["verify", "RUN"],
        ["verify", "RUN", "--json"],
        ["logs", "RUN"],
        ["logs", "RUN", "--rank", "0"],
        ["runs", "STORAGE"],
        ["runs", "STORAGE", "--json"],
        ["stop", "RUN"],
        ["stacks", "RUN"],
        ["sync", "RUN"],
        ["predict", "RUN", f"rows{HOSTILE}.parquet", "-o", f"out{HOSTILE}"],
        ["doctor", "--storage", "STORAGE", "--backend", f"none{HOSTILE}"],
        ["run", f"nowhere{HOSTILE}:trainer"],
        ["run", f"{HOSTILE}.toml"],
        ["conformance", f"none{HOSTILE}"],
        ["show", f"no run{HOSTILE}"],
        [f"none{HOSTILE}"],
    ],
    ids=lambda command: " ".join(map(printable, command)),
)
def test_nothing_that_is_stored_controls_a_terminal(
    command: list[str],
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"RUN": str(run), "STORAGE": str(tmp_path)}
    main([places.get(word, word) for word in command])
    assert r"\u202e" in said(capsys, has_lines=command[0] == "logs")


def test_a_tracker_that_cannot_be_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run / "trackers/csv-00000000.json", json.dumps({"format": HOSTILE}).encode())
    assert main(["sync", str(run)]) == 1
    assert SHOWN in said(capsys)


@pytest.fixture
def active(run: Path) -> Iterator[Path]:
    """A run whose driver is this process, and answers requests."""
    storage = Location.of(run).open()
    file = run / "journal.jsonl"
    with leased(storage, storage) as lease:
        lines = [entry_of(line) for line in (opened(0, token=lease.token), *RUN[1:9])]
        write(file, b"".join(journal(lines)))

        def stop(stopped: Stopped) -> None:
            ended = {"time": 9, "token": lease.token, "event": "Concluded", "succeeded": True}
            ended |= {"stopped": {"by": "command", "reason": stopped.reason}, "reason": HOSTILE}
            with file.open("ab") as opened_file:
                opened_file.write(json.dumps(ended).encode() + b"\n")
            lease.release()

        def answer(request: str) -> None:
            requests.answer(request, {"stacks": {"0": HOSTILE, HOSTILE: HOSTILE}})

        with RemoteRequests(storage, lease.token, stop=stop, stacks=answer) as requests:
            yield run


@pytest.mark.parametrize(
    "command",
    [["stacks"], ["stacks", "--json"], ["stacks", "--rank", "7"], ["stop", "--reason", HOSTILE]],
    ids=lambda command: " ".join(map(printable, command)),
)
def test_nothing_that_a_driver_answers_controls_a_terminal(
    command: list[str], active: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([command[0], str(active), *command[1:]])
    assert r"\u202e" in said(capsys, has_lines=command[0] == "stacks")


def test_errors_of_a_program_control_no_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Python prints them as they are."""
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / DAMAGED.directory
    write(checkpoint / MANIFEST_NAME, DAMAGED.to_json().encode())
    write(run / "journal.jsonl", b"".join(journal(list(RUN))))
    with pytest.raises(CheckpointError) as damaged:
        polytrain.load(checkpoint)
    assert polytrain.load(run).checkpoint is None
    storage = Location.of(run).open()
    with leased(storage, storage) as lease:
        pass
    released = json.loads(storage.read(lease.path))
    process = {"pid": os.getppid(), "process_started": started_at(os.getppid())}
    owner = {**released, **process, "host": HOSTILE, "since": HOSTILE, "released": False}
    write(run / f"leases/{lease.token + 1:06d}", json.dumps(owner).encode())
    with pytest.raises(RunOwnedError) as owned, leased(storage, storage):
        pass
    for text in (str(damaged.value), caplog.messages[0], str(owned.value)):
        assert SHOWN in text
        assert printable(text) == text


def test_a_warning_of_a_command_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    record = logging.makeLogRecord({"msg": "lost: %s", "args": (HOSTILE,), "levelno": 30})
    assert logging.lastResort is not None
    logging.lastResort.emit(record)
    assert SHOWN in said(capsys)


class Screen(io.StringIO):
    """A stream that is a terminal, or isn't."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("line", "on_a_terminal", "elsewhere"),
    [
        ("loss 0.5", "loss 0.5", "loss 0.5"),
        ("\x1b[1;31mred\x1b[0m on", "\x1b[1;31mred\x1b[0m on\x1b[0m", "red on"),
        ("\x1b[38;2;1;2;3mred", "\x1b[38;2;1;2;3mred\x1b[0m", "red"),
        ("a\tb", "a       b", "a       b"),
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("\x1b[2J\x1b[1A\x9b2J", r"\x1b[2J\x1b[1A\x9b2J", r"\x1b[2J\x1b[1A\x9b2J"),
        ("\x1b[31m\x1b[2J", "\x1b[31m\\x1b[2J\x1b[0m", r"\x1b[2J"),
        ("back\x08\u202eward", r"back\x08\u202eward", r"back\x08\u202eward"),
    ],
)
def test_what_a_rank_prints_keeps_its_colours_on_a_terminal_and_nothing_else(
    line: str, on_a_terminal: str, elsewhere: str
) -> None:
    assert output_line(line, Screen(is_terminal=True)) == on_a_terminal
    assert output_line(line, Screen(is_terminal=False)) == elsewhere


def test_live_output_controls_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with WorkerOutput(tmp_path / "logs", retry_s=0) as output:
        for stream in ("stdout", "stderr"):
            text = f"\x1b[31mred{HOSTILE}\n\x1b]52;c;aGk=\x07\n"
            output.write(Output(attempt=0, rank=0, stream=stream, text=text))
    assert said(capsys, has_lines=True).count("(rank 0) twice") == 2
    assert b"\x1b]52;c;aGk=\x07\n" in (tmp_path / "logs/rank_0.log").read_bytes()


def test_shells_complete_only_names_that_can_be_printed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(run.parent))
    (run.parent / "polytrain_results").mkdir()
    run.rename(run.parent / "polytrain_results" / run.name)
    assert _run_names(click.Context(click.Command("show")), click.Argument(["run"]), "") == []


def test_a_line_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    echo("one\ntwo")
    assert capsys.readouterr().out == "one\\ntwo\n"
