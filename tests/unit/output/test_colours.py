"""Colours are where they are wanted, and nowhere else."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from polytrain.events.output import Output
from polytrain.output.echo import Style, has_colours, painted
from polytrain.output.worker_output import WorkerOutput

NAMES = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TERM")


class Shown(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


@pytest.mark.parametrize(
    ("stream", "variables", "expected"),
    [
        (Shown(), {}, True),
        (Shown(), {"NO_COLOR": "1"}, False),
        (Shown(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (Shown(), {"NO_COLOR": ""}, True),
        (Shown(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (io.StringIO(), {"CLICOLOR_FORCE": "1"}, True),
        (io.StringIO(), {"FORCE_COLOR": "0", "CLICOLOR_FORCE": "0"}, False),
    ],
)
def test_who_asks_decides(
    environment: pytest.MonkeyPatch,
    stream: io.StringIO,
    variables: dict[str, str],
    expected: bool,
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    assert has_colours(stream) is expected


@pytest.mark.parametrize("kind", [Shown, io.StringIO])
def test_the_rank_in_front_of_a_line_is_dim(
    environment: pytest.MonkeyPatch, tmp_path: Path, kind: type[io.StringIO]
) -> None:
    target = kind()
    environment.setattr(sys, "stdout", target)
    with WorkerOutput(tmp_path / "logs", retry_s=30) as output:
        output.write(Output(attempt=0, rank=3, stream="stdout", text="loss 0.5\n"))
    prefix = painted("(rank 3)", Style.DIM) if kind is Shown else "(rank 3)"
    assert target.getvalue() == f"{prefix} loss 0.5\n"
