"""What a prompt or a notebook shows of an object is short, and holds no secret."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any

import pytest

from polytrain import (
    Checkpoint,
    CheckpointConfig,
    DataConfig,
    Failure,
    FailureKind,
    InvalidJobError,
    PredictionOutput,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
    Result,
    RunConfig,
    RunHandle,
    RunStatus,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    ValidationConfig,
    ValidationTaskConfig,
)
from polytrain.api.shown import Resumption
from polytrain.backends.reference import Reference
from polytrain.record.reports import Reports
from polytrain.run.requests import StopRequests
from polytrain_plugins import Problem

SECRET = "sk-12345"
LONG = "x" * 100_000
MANY = {f"metric {number}": number / 7 for number in range(10_000)}
ADDRESS = f"s3://user:{SECRET}@bucket/{LONG}"


def history() -> Reports:
    found = Reports()
    for step in range(1, 10_001):
        found.add(step, {"loss": 1 / step, "rank": {"mean": step}})
    return found


def failure() -> Failure:
    return Failure(
        kind=FailureKind.USER_ERROR,
        rank=1,
        message=f"ValueError: {LONG}",
        traceback=LONG,
        output=LONG,
        last_lines=(LONG,) * 10,
        stacks={0: LONG},
        error=LONG.encode(),
    )


def error() -> TrainingFailedError:
    return TrainingFailedError("no restart", (failure(),), path="/runs/run")


def result(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "metrics": {"loss": 0.00012345, "rank": {"mean": 10_000}},
        "history": history(),
        "checkpoint": Checkpoint("/runs/baseline/checkpoint_000003"),
        "path": "/runs/baseline",
        "restarts": 2,
    }
    return Result(**{**fields, **changes})


def handle() -> RunHandle:
    return RunHandle(
        lambda _: result(),
        name=LONG,
        requests=StopRequests(),
        resumption=Resumption(address="/runs/run", new_name=None, starts_over=False),
    )


def trainer() -> Trainer:
    return Trainer(
        Reference(label="y"),
        datasets={"train": {"x": [1.0] * 1000, "y": [1.0] * 1000}},
        run_config=RunConfig(storage_path="/tmp", worker_runtime_env={"env_vars": {"A": SECRET}}),
    )


BIG: dict[str, Any] = {
    "result": lambda: result(),
    "failed result": lambda: result(error=error(), finished=False, metrics=MANY, path=ADDRESS),
    "history": history,
    "history of many": lambda: result(history=[MANY] * 1000),
    "checkpoint": lambda: Checkpoint(ADDRESS),
    "run config": lambda: RunConfig(
        name=LONG,
        storage_path=ADDRESS,
        storage_filesystem=SECRET,
        observers=tuple(range(1000)),
        worker_runtime_env={"env_vars": {"API_KEY": SECRET}},
        checkpoint_config=CheckpointConfig(num_to_keep=3),
    ),
    "scaling config": lambda: ScalingConfig(
        num_workers=4, resources_per_worker={f"r{number}": 1 for number in range(1000)}
    ),
    "data config": lambda: DataConfig(columns=[LONG] * 1000),
    "validation config": lambda: ValidationConfig(
        fn=print, task_config=ValidationTaskConfig(fn_kwargs={"api_key": SECRET, "text": LONG})
    ),
    "status": lambda: RunStatus(state="training", step=3, metrics=MANY),
    "handle": handle,
    "trainer": trainer,
    "failure": failure,
    "error": error,
    "invalid job": lambda: InvalidJobError((Problem(field="a", what=LONG, remedy=LONG),) * 100),
    "reported checkpoint": lambda: ReportedCheckpoint(
        checkpoint=Checkpoint(ADDRESS), metrics=MANY, status=ReportedCheckpointStatus.COMMITTED
    ),
    "prediction output": lambda: PredictionOutput(path=LONG, num_rows=1, files=(LONG,) * 1000),
}


@pytest.mark.parametrize("name", BIG)
def test_what_is_shown_is_short_and_holds_no_secret(name: str) -> None:
    value = BIG[name]()
    text = repr(value)
    assert len(text) < 600
    assert not re.search(r" object at 0x|sk-1", text)
    shown = getattr(value, "_repr_html_", str)()
    assert SECRET not in shown


def test_a_result_is_a_few_lines() -> None:
    assert repr(result()).splitlines() == [
        "Result of baseline: finished",
        "  steps      10000",
        "  metrics    loss 0.0001234, rank/mean 10000",
        "  checkpoint /runs/baseline/checkpoint_000003",
        "  restarts   2",
        "  path       /runs/baseline",
    ]


def test_a_failed_result_says_why_in_a_line() -> None:
    failed = Failure(kind=FailureKind.USER_ERROR, rank=0, message="ValueError: no\nsuch column")
    text = repr(result(error=TrainingFailedError("no restart", (failed,)), finished=False))
    assert text.startswith("Result of baseline: failed\n")
    assert "\n  error      rank 0: ValueError: no\n" in text


class Elements(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("value", [result(metrics={"<script>": 1.0}), handle()])
def test_a_notebook_shows_the_same_as_a_table(value: Any) -> None:
    page = value._repr_html_()
    found = Elements()
    found.feed(page)
    assert found.tags <= {"div", "strong", "table", "tr", "th", "td"}
    assert len(page) < 3000
    # Colours are those of the page around it, light or dark; nothing is loaded.
    assert not re.search(r"color|#[0-9a-f]{3}|url\(|src=|href=", page)
    lines = [word for line in repr(value).splitlines()[1:] for word in line.split(maxsplit=1)]
    assert [word.strip() for word in found.words[1:]] == lines


def test_a_configuration_shows_what_was_chosen() -> None:
    assert repr(ScalingConfig(num_workers=4)) == "ScalingConfig(num_workers=4)"
    assert repr(RunConfig(name="a", checkpoint_config=CheckpointConfig(num_to_keep=2))) == (
        "RunConfig(name='a', checkpoint_config=CheckpointConfig(num_to_keep=2))"
    )


def test_a_trainer_says_what_it_trains(tmp_path: Path) -> None:
    def train() -> None: ...

    config = RunConfig(name="a", storage_path=tmp_path)
    shown = repr(Trainer(Reference(), train, run_config=config))
    assert shown.startswith("<Trainer reference, train, ScalingConfig(), RunConfig(name='a', stor")
