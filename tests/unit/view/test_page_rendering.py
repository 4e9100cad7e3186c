"""A run's page: one file without a network, in which no text of a run is markup."""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests.unit.record.lines import entry_of
from tests.unit.view.page_facts import facts

import polytrain
from polytrain import Checkpoint, Result, RunConfig, ScalingConfig, make_trainer
from polytrain.errors import TrainingFailedError
from polytrain.record.reports import Reports, encoded_numbers
from polytrain.record.run_facts import Program
from polytrain.view.cli import main
from polytrain.view.page.rendering import page
from polytrain.view.present import RunRecord
from polytrain.view.run_state import RunState

HOSTILE = """</script><script>alert("1")</script>'"&amp;/\u2028<!--"""

# As published: nobody has changed them.
VENDORED = {
    "uPlot-1.6.32.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot-1.6.32.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot-LICENSE.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


class Parsed(HTMLParser):
    """A page as a browser reads it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.facts, self.policy, self.texts = "", "", []
        self._inside: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag, dict(attrs)
        self.tags.append(self._inside)
        if self._inside[1].get("http-equiv") == "Content-Security-Policy":
            self.policy = str(self._inside[1]["content"])

    def handle_endtag(self, tag: str) -> None:
        self._inside = "", {}

    def handle_data(self, data: str) -> None:
        tag, attributes = self._inside
        if attributes.get("id") == "facts":
            self.facts += data
        elif tag not in ("script", "style"):
            self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def report_hostile(directory: str) -> None:
    for step in range(1, 4):
        (Path(directory) / "state").write_text(str(step))
        saved = Checkpoint.from_directory(directory)
        metrics = {HOSTILE: float(step), "nested": {HOSTILE: step}, "text": HOSTILE}
        polytrain.report({**metrics, "bad": float("nan")}, checkpoint=saved)
    raise ValueError(HOSTILE)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that does all it can to be markup."""
    work = tmp_path_factory.mktemp("work")
    storage = tmp_path_factory.mktemp("runs")
    with pytest.raises(TrainingFailedError):
        make_trainer(
            "reference",
            lambda: report_hostile(str(work)),
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="a <b> & 'c'", storage_path=storage, progress=False),
        ).fit()
    return storage / "a <b> & 'c'"


@pytest.fixture(scope="module")
def written(hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("pages") / "run.html"
    assert Result.from_path(hostile).report(file) == file
    return file.read_text(encoding="utf-8")


def test_no_text_of_a_run_is_markup(written: str) -> None:
    parsed = Parsed(written)
    assert len(parsed.of("script")) == 4
    assert not parsed.of("b")
    assert "alert" in "".join(parsed.texts)
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)


def test_columns_of_what_was_measured_alone() -> None:
    def shown(**load: Any) -> list[str]:
        def fill(record: RunRecord) -> None:
            line = {"event": "Load", "time": 2.0, "attempt": 0, "window": 0, "busy": [0.5, 1.0]}
            record.take(entry_of({**line, **load}))

        return re.findall('<t[hd] class="n">(CPU|GPU|GPU memory|250 %|75 %)<', page(facts(fill)))

    assert shown() == []
    assert shown(cpu=[2.5, 1.0]) == ["CPU", "250 %"]
    used = shown(cpu=[2.5, 1.0], gpus=[[[0.75, 7]], []])
    assert used == ["CPU", "GPU", "GPU memory", "250 %", "75 %"]
    assert shown(gpus=[[[None, 7]], []]) == ["GPU memory"]


def test_every_region_has_a_name_of_its_own(written: str) -> None:
    parsed = Parsed(written)
    titles = dict(re.findall(r'<h2 id="([^"]*)">([^<]*)</h2>', written))
    names = [titles[str(each["aria-labelledby"])] for each in parsed.of("section")]
    names += [str(each["aria-label"]) for each in parsed.of("div") if each.get("role") == "region"]
    assert len(names) > 10
    assert len(set(names)) == len(names)
    assert "<th></th>" not in written


def test_nothing_in_it_is_elsewhere(written: str) -> None:
    parsed = Parsed(written)
    for tag, attributes in parsed.tags:
        for name in ("src", "href", "data", "action", "style"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), (tag, name, value)
    assert parsed.policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in parsed.policy
    assert "http" not in parsed.policy


def test_the_same_facts_are_in_it_as_json(
    written: str, hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = json.loads(Parsed(written).facts)
    assert main(["report", str(hostile), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["data"]
    for each in (inside, printed):
        del each["source"]["read"]
    assert inside == printed
    assert inside["schema_version"] == 1
    ledger = Result.from_path(hostile).ledger
    assert inside["seconds"] == pytest.approx(ledger.seconds)
    names = [metric["name"] for metric in inside["metrics"]]
    assert names == [HOSTILE, f"nested/{HOSTILE}", "text", "bad"]


def test_the_table_of_times_adds_up_to_the_ledger(written: str, hostile: Path) -> None:
    ledger = Result.from_path(hostile).ledger
    rows = re.findall(r'</svg> (\w+)</td><td class="n">([\d.]+)</td>', written)
    assert {account: float(seconds) for account, seconds in rows} == {
        account: round(seconds, 2) for account, seconds in ledger.seconds.items()
    }


def test_its_settings_and_where_its_ranks_were(written: str) -> None:
    # Those that were chosen come first.
    chosen, _, every = written.partition("All settings")
    assert "<td>scaling_config.num_workers</td><td><code>0</code></td>" in chosen
    assert "run_config.failure_config.max_failures" not in chosen
    assert "<td>run_config.failure_config.max_failures</td><td><code>0</code></td>" in every
    assert f"<td>{os.uname().nodename}</td><td>CPU</td>" in written


def test_a_page_of_an_earlier_version_says_what_it_lacks() -> None:
    assert "didn't record its ScalingConfig and RunConfig" in page(facts())


def test_checkpoints_have_their_hashes(written: str, hostile: Path) -> None:
    newest = sorted((hostile / "checkpoints").iterdir())[-1]
    assert hashlib.sha256((newest / "state").read_bytes()).hexdigest() in written


def test_an_end_is_called_an_end_where_it_is_one() -> None:
    ended = facts()
    assert "<dt>Ended</dt>" in page(ended)
    running = replace(ended, source=replace(ended.source, state=RunState.RUNNING))
    assert "<dt>Last entry</dt>" in page(running)


@pytest.mark.parametrize(
    ("why_not", "said"),
    [
        (None, None),
        ((), "Exact over world sizes: yes."),
        (
            ("a rank has another CPU", "<b>"),
            "Exact over world sizes: no, a rank has another CPU; <b>.",
        ),
    ],
)
def test_whether_a_run_is_exact_over_world_sizes(
    why_not: tuple[str, ...] | None, said: str | None
) -> None:
    parsed = Parsed(page(replace(facts(), why_not_exact=why_not)))
    found = [text for text in parsed.texts if "over world sizes" in text]
    assert found == ([] if said is None else [said])


def test_values_close_to_each_other_can_be_told_apart() -> None:
    def fill(record: RunRecord) -> None:
        for step in range(1, 4):
            record.reports.add(step, {"m": 1 + 1e-7 * step})

    cells = re.findall(r'<td class="n">([^<]*)</td>', page(facts(fill)))
    assert cells[:3] == ["1.0000003", "1.0000001", "1.0000003"]


def test_the_first_thing_is_what_was_measured() -> None:
    def fill(record: RunRecord) -> None:
        for step, loss in enumerate((0.5, 0.25, 0.75), 1):
            record.reports.add(step, {"rate": 0.1, "val_loss": loss, "loss": loss / 2})

    text = page(facts(fill))
    first = text.index("<dt>val_loss</dt><dd>0.75 <small>best 0.25, step 2</small>")
    assert text.index("</header>") < first < text.index('class="chart"')
    assert text.index('class="chart"') < text.index('id="timeline"')
    assert text.count('class="chart"') == 2
    assert "<figcaption>loss</figcaption>" in text


def test_hyperparameters_come_first_each_in_a_row() -> None:
    known = replace(facts(), hyperparameters={"lr": 0.1, "layers": [1, 2], "rounds": 3})
    text = page(known)
    config = text[text.index('id="configuration"') :]
    rows = re.findall(r"<tr><td>(\w+)</td><td><code>([^<]*)</code>", config)
    assert rows[:3] == [("lr", "0.1"), ("layers", "[1, 2]"), ("rounds", "3")]


def test_the_command_and_the_commit_of_each_driver() -> None:
    first = Program(driver=1, command=("python", "a b.py"), commit="c0ffee" * 6 + "beef")
    second = replace(first, driver=2, branch="main", is_dirty=True)
    text = page(replace(facts(), programs=(first, second), nodes=("a", "b")))
    assert text.count("<code>python &#39;a b.py&#39;</code>") == 2
    assert f"<code>{first.commit}</code></td>" in text
    assert f"<code>{first.commit}</code> (main), with changes</td>" in text
    assert "on a, b." in text


def fill_with_reports(count: int) -> Callable[[RunRecord], None]:
    def fill(record: RunRecord) -> None:
        for step in range(1, count + 1):
            record.reports.add(step, {"loss": 1 / step, "accuracy": step / count, "rate": 0.1})

    return fill


@pytest.mark.parametrize("count", [100, 10_000, 100_000])
def test_the_page_of_a_usual_run_is_small(count: int) -> None:
    text = page(facts(fill_with_reports(count)))
    assert len(text.encode()) < 200_000
    assert ("the lowest and the highest of each stretch" in text) == (count > 1000)


@pytest.mark.only_in_sweep
def test_ten_million_points_are_decimated_and_the_page_says_so() -> None:
    count = 10_000_000
    values = array("d", [1.0]) * count
    # One value that nobody must miss.
    values[7_654_321] = 9.0
    column = {
        "name": "loss",
        "kind": "float64",
        "runs": [[0, 0]],
        "values": encoded_numbers(values),
    }
    written = {"count": count, "steps": [[0, 1]], "columns": [column]}
    text = page(facts(lambda record: record.reports.extend(Reports.from_json(written))))
    assert len(text.encode()) < 200_000
    assert "the lowest and the highest of each stretch" in text
    [metric] = json.loads(Parsed(text).facts)["metrics"]
    assert (metric["reports"], metric["highest"]) == (count, 9.0)
    drawn = dict(zip(metric["curve"]["steps"], metric["curve"]["values"], strict=True))
    assert drawn[7_654_322] == 9.0
    assert len(drawn) <= 1002


def test_ten_thousand_metrics() -> None:
    text = page(facts(lambda record: record.reports.add(1, {f"m{n}": n for n in range(10_000)})))
    assert "200 of 10000 metrics are listed, and 64 are drawn" in text
    assert len(json.loads(Parsed(text).facts)["metrics"]) == 10_000


def test_five_hundred_restarts() -> None:
    def fill(record: RunRecord) -> None:
        for number in range(1, 501):
            for step in (1, 2):
                record.reports.add(step, {"loss": float(number)})
            launched = {"attempt": number, "step": 0, "start": None, "world_size": 2}
            record.take(entry_of({"event": "Launched", "time": 1.0 + number / 100, **launched}))
        record.reports.add(1, {"loss": 0.0})

    text = page(facts(fill))
    assert "those of the last 20 restarts are drawn" in text
    assert len(text.encode()) < 400_000


def test_what_is_vendored_is_as_published() -> None:
    vendored = files("polytrain.view.page").joinpath("assets", "vendor")
    found = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in vendored.iterdir()
    }
    assert found == VENDORED


class TestBadInput:
    def test_no_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["report", str(tmp_path)]) == 3
        assert "There is no run in" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("name", "what"), [("away/run.html", "No such file"), (".", "Is a directory")]
    )
    def test_a_page_that_cannot_be_written(
        self,
        name: str,
        what: str,
        hostile: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert main(["report", str(hostile), "-o", str(tmp_path / name)]) == 1
        error = capsys.readouterr().err
        assert "--output" in error
        assert what in error

    def test_a_journal_of_another_version(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        opened = {"time": 1.0, "token": 1, "event": "Opened", "format": 99}
        (tmp_path / "journal.jsonl").write_text(json.dumps(opened) + "\n")
        assert main(["report", str(tmp_path)]) == 1
        assert "99" in capsys.readouterr().err

    def test_a_storage_that_is_away(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["report", "nowhere://runs/run"]) == 1
        assert "can't be read" in capsys.readouterr().err


def report_on_itself(config: dict[str, Any]) -> None:
    polytrain.report({"loss": 1.0})
    Result.from_path(config["run"]).report(config["page"])


def test_a_run_that_is_written_at_this_moment(tmp_path: Path) -> None:
    target = tmp_path / "run.html"
    make_trainer(
        "reference",
        report_on_itself,
        train_loop_config={"run": str(tmp_path / "run"), "page": str(target)},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path, progress=False),
    ).fit()
    text = target.read_text()
    assert "Still running after" in text
    assert "The run was being written when this page was made" in text
