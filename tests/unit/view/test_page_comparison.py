"""Two runs side by side."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from tests.unit.record.recorded import RUN, Line, journal, page_of

from polytrain.output.line_layout import columns
from polytrain.view.cli import main
from polytrain.view.page.comparison import Difference, comparison, overlays_of


def with_option(value: object) -> list[Line]:
    identity = {**RUN[0]["identity"], "options": {"rounds": 3, "rate": value}}
    return [{**each, "identity": identity} if "identity" in each else each for each in RUN]


def test_what_is_the_same_is_not_reported() -> None:
    found = comparison(page_of(RUN), page_of(RUN))
    assert found.configuration == ()
    assert all(each.first == each.second for each in (*found.outcome, *found.seconds))


def test_options_that_differ_are_reported() -> None:
    found = comparison(page_of(with_option(0.1)), page_of(with_option(0.2)))
    assert found.configuration == (Difference(name="option rate", first=0.1, second=0.2),)


def with_settings(settings: object) -> list[Line]:
    return [
        {**each, "configuration": {"options": settings}} if "configuration" in each else each
        for each in RUN
    ]


def test_settings_that_differ_are_reported() -> None:
    one = {"scaling_config.num_workers": 2, "run_config.track": None, "old.option": 1}
    other = {"scaling_config.num_workers": 4, "run_config.track": None}
    found = comparison(page_of(with_settings(one)), page_of(with_settings(other)))
    assert found.configuration == (
        Difference(name="scaling_config.num_workers", first=2, second=4),
        Difference(name="old.option", first=1, second=None),
    )


def test_not_a_number_is_itself() -> None:
    assert (
        comparison(page_of(with_option(math.nan)), page_of(with_option(math.nan))).configuration
        == ()
    )


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    for name, lines in (("a", with_option(0.1)), ("b", with_option(0.2)[:8])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").write_bytes(b"".join(journal(lines)))
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_the_command_prints_both(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *runs]) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["state"].split()[1:] == ["finished", "interrupted"]
    assert lines["reports"].split()[1:] == ["2", "1", "(-50.0", "%)"]
    # How much an option has changed says nothing.
    assert lines["option rate"].split()[2:] == ["0.1", "0.2"]
    # What one looks for first.
    assert list(lines).index("option rate") < list(lines).index("state")


def test_no_name_or_value_breaks_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {"a" * 300: 1, "名": 2, "new\nline": "b" * 300}
    lines = [{**each, "metrics": metrics} if "metrics" in each else each for each in RUN]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(journal(lines)))
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    values = [line for line in printed if line.startswith(("aaa", "名", r"new\nline"))]
    assert len(values) == len(metrics)
    assert all(64 < columns(line) < 64 + 2 * 44 for line in values)
    ends = {columns(line[: line.rindex("  ")]) for line in values}
    assert len(ends) == 1


def test_the_command_prints_json(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *runs, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["command"] == "diff"
    assert answer["data"]["names"] == ["a", "b"]
    rates = {"name": "option rate", "first": 0.1, "second": 0.2}
    assert rates in answer["data"]["configuration"]


def test_the_page_has_the_curves_of_both(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *runs, "-o", str(tmp_path / "diff.html")]) == 0
    assert "Wrote" in capsys.readouterr().out
    text = (tmp_path / "diff.html").read_text()
    found = re.search(r'id="facts">(.*?)</script>', text)
    assert found
    inside = json.loads(found[1])
    assert inside["runs"] == ["a", "b"]
    (loss,) = inside["drawn"]
    assert [curve["steps"] for curve in loss["curves"]] == [[1, 2], [1]]
    assert "option rate" in text


def test_a_metric_of_one_run_alone() -> None:
    (overlay,) = overlays_of(page_of(RUN), page_of(RUN[:7]))
    assert overlay.curves[0] is not None
    assert overlay.curves[1] is None


def test_a_run_that_is_not_there(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", runs[0], f"{runs[1]}-away"]) == 3
    assert "b-away" in capsys.readouterr().err
