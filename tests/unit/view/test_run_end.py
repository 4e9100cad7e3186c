"""What has become of a run, in the same words on a page and in a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.record.recorded import RUN, journal

from polytrain.storage.location import Location
from polytrain.view.cli import main
from polytrain.view.page.reading import read_facts
from polytrain.view.page.verdict import run_end, verdict
from polytrain.view.run_state import RunState


def test_a_page_and_a_terminal_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal.jsonl").write_bytes(b"".join(journal(RUN)))
    main(["show", str(tmp_path)])
    printed = capsys.readouterr().out.splitlines()[0]
    facts = read_facts(Location.of(tmp_path))
    end = printed.removeprefix(f"{facts.source.name}: ")
    assert verdict(facts).casefold().startswith(end.casefold())
    assert "13.0 s" in end


@pytest.mark.parametrize("driver", [None, "process 7 on a"])
def test_who_died_is_named_if_it_is_known(driver: str | None) -> None:
    said = run_end(RunState.INTERRUPTED, seconds=90, reason="", was_stopped=False, driver=driver)
    assert said.startswith("interrupted after 1 min 30 s: its driver")
    assert (driver or "its driver died") in said
    assert said.endswith("fit() resumes it")


def test_a_failure_has_its_reason() -> None:
    said = run_end(
        RunState.FAILED, seconds=2, reason="no restart is left", was_stopped=False, driver=None
    )
    assert said == "failed after 2.0 s (no restart is left)"


def test_a_run_of_which_every_validation_failed_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = "all 5 validations failed: it has no rows"
    concluded = [
        {**each, "validation_failure": failure} if each["event"] == "Concluded" else each
        for each in RUN
    ]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(journal(concluded)))
    main(["show", str(tmp_path)])
    printed = capsys.readouterr().out.splitlines()[0]
    assert printed.endswith(f"finished in 13.0 s, but no checkpoint has a score: {failure}")
    facts = read_facts(Location.of(tmp_path))
    assert f" No checkpoint has a score: {failure}." in verdict(facts)
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b"".join(journal([{**RUN[0], "token": 3, "anew": False}])))
    assert "score" not in verdict(read_facts(Location.of(tmp_path)))
