"""What is shown of a run follows from the lines of its journal alone: no run, no clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.unit.record.lines import entry_of

from polytrain.output.line_layout import columns
from polytrain.record.ledger import Ledger
from polytrain.record.progress import Progress, Stage
from polytrain.view.progress.as_json import ended_line, event_line, progress_line, started_line
from polytrain.view.progress.text import (
    ASCII,
    UNICODE,
    duration,
    end_style,
    ended,
    event_lines,
    event_style,
    heartbeat,
    signs_for,
    started,
    state_lines,
    state_styled,
)
from polytrain_plugins import RunInfo

RUN = RunInfo(name="higgs", backend="xgboost", num_workers=2, path="/runs/higgs", cluster="here")
T0 = 1_000_000.0

FAILURE = {
    "kind": "WORKER_LOST",
    "rank": 1,
    "host": "10.0.0.3",
    "step": 14,
    "message": "killed by SIGKILL before its training was done",
    "traceback": "",
    "output": "",
    "last_lines": ["batch 900", "CUDA \x1b[31merror\x1b[0m"],
    "stacks": {},
}


@dataclass(kw_only=True)
class Play:
    """A journal that a test writes."""

    progress: Progress = field(default_factory=lambda: Progress(ledger=Ledger()))
    now: float = T0
    said: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def take(self, event: str, *, after_s: float = 0.0, **fields: Any) -> None:
        self.now += after_s
        entry = entry_of({"time": self.now, "event": event, **fields})
        # As the journal does it.
        self.progress.ledger.take(entry)
        self.progress.take(entry)
        self.said += event_lines(RUN, self.progress, entry)
        line = event_line(RUN, entry)
        self.lines += [] if line is None else [line]

    def open(self, total: int | None = None, **limits: float) -> None:
        self.take("Opened", anew=True, world_size=2, began=self.now, total_steps=total, **limits)
        self.take("Begun", phase="Placing", attempt=0, reason="placing 2 workers")

    def launch(self, attempt: int = 0, *, step: int = 0, start: str | None = None) -> None:
        self.take("AgentsPlaced", phase="Gathering", attempt=attempt, reason="2 ranks have agents")
        self.take("Launched", attempt=attempt, step=step, start=start, world_size=2)

    def join(self, attempt: int = 0) -> None:
        self.take("Started", attempt=attempt, after_s=1)
        self.take("Offered", phase="Training", attempt=attempt, reason="all", after_s=2)
        for rank in range(2):
            self.take("Joined", phase="Training", attempt=attempt, reason=f"rank {rank} joined")

    def report(self, steps: Sequence[int], metrics: Mapping[str, Any] | None = None) -> None:
        """One step a second."""
        for step in steps:
            shown = {"loss": 1 / step} if metrics is None else metrics
            self.take("Reported", after_s=1, n=0, step=step, metrics=shown)

    def fail(
        self,
        attempt: int = 0,
        decision: str = "failure 1 of max_failures=3",
        *,
        noticed_after_s: float = 0.0,
        **failure: Any,
    ) -> None:
        self.take(
            "Exited",
            phase="Ending",
            attempt=attempt,
            reason="rank 1: killed",
            after_s=noticed_after_s,
            since_s=noticed_after_s,
        )
        self.take("AttemptEnded", attempt=attempt, failure={**FAILURE, **failure}, reason=decision)

    def shown(self, width: int = 120) -> tuple[str, str]:
        return state_lines(RUN, self.progress, now=self.now, width=width)


def trained(total: int | None = 2000) -> Play:
    play = Play()
    play.open(total)
    play.launch()
    play.join()
    play.report(range(1, 21))
    return play


def test_while_a_run_starts_it_says_what_it_waits_for() -> None:
    play = Play()
    play.open()
    play.now += 5
    assert play.shown()[0] == "higgs · waiting for workers (5.0 s)"
    play.launch()
    assert "reading data and the checkpoint to start from" in play.shown()[0]
    play.take("Started", attempt=0)
    assert play.shown()[0] == "higgs · starting worker processes (0.0 s)"
    play.take("Offered", phase="Training", attempt=0, reason="all")
    play.take("Joined", phase="Training", attempt=0, reason="rank 0 joined")
    assert play.shown()[0] == "higgs · 1 of 2 ranks have joined (0.0 s)"
    play.take("Joined", phase="Training", attempt=0, reason="rank 1 joined")
    play.now += 130
    assert play.shown()[0] == "higgs · training, no report yet (2 min)"


def test_a_run_that_trains_shows_step_rate_time_left_metrics_and_what_is_saved() -> None:
    play = trained()
    play.take("Committed", checkpoint="checkpoint_000001", step=10)
    first, second = play.shown()
    assert first == "higgs · step 20 of 2000 · 1 steps/s · 33 min left · loss 0.05 · saved 10"
    assert second == "2 ranks · 0:23 elapsed · goodput 87%"


def test_without_a_total_there_is_no_time_left() -> None:
    assert trained(total=None).shown()[0] == "higgs · step 20 · 1 steps/s · loss 0.05"


def test_a_time_budget_limits_the_time_that_is_left() -> None:
    play = Play()
    play.open(2000, time_budget_s=100.0)
    play.launch()
    play.join()
    play.report(range(1, 21))
    assert play.progress.left_s(play.now) == 80
    assert play.progress.left_s(play.now + 30) == 50


def test_time_passes_between_two_reports_of_slow_steps() -> None:
    play = trained()
    left_s = play.progress.left_s(play.now)
    assert left_s == 1980
    assert play.progress.left_s(play.now + 30) == 1950


def test_a_run_that_stands_still_has_no_time_left_but_says_for_how_long() -> None:
    """Its estimate is used up: the next step would have been its last one."""
    play = trained(total=30)
    play.now += 9
    assert "1.0 s left" in play.shown()[0]
    play.now += 32
    first = play.shown()[0]
    assert "no step for 41 s" in first
    assert "left" not in first
    assert "no step for 41 s" in heartbeat(RUN, play.progress, now=play.now)
    assert json.loads(progress_line(RUN, play.progress, now=play.now))["left_s"] is None
    # The next step corrects the estimate.
    play.report([21])
    assert "no step" not in play.shown()[0]
    assert "left" in play.shown()[0]


def test_after_its_last_step_a_run_is_not_said_to_stand_still() -> None:
    """What follows, such as an evaluation, isn't a step, and nobody knows how long it takes."""
    play = trained(total=20)
    play.now += 41
    first = play.shown()[0]
    assert "reported 41 s ago" in first
    assert "left" not in first


def test_a_restart_bends_neither_the_rate_nor_the_time_left() -> None:
    play = trained()
    play.fail(noticed_after_s=600)
    play.now += 600  # until there are workers again
    play.launch(1, step=10, start="checkpoint_000001")
    play.join(1)
    play.report(range(11, 15))
    assert play.progress.steps_per_s == pytest.approx(1, rel=0.1)
    assert play.progress.left_s(play.now) == pytest.approx(2000 - 14, rel=0.1)


def test_steps_that_are_done_once_more_are_said_to_be() -> None:
    play = trained()
    play.fail()
    play.launch(1, step=10, start="checkpoint_000001")
    play.join(1)
    play.report(range(11, 15))
    assert "step 14 of 2000 · repeating up to 20" in play.shown()[0]
    play.report(range(15, 22))
    assert "step 21 of 2000" in play.shown()[0]
    assert "repeating" not in play.shown()[0]


def test_a_report_that_is_only_in_the_ledger_yet_is_no_repetition() -> None:
    play = trained()
    # What draws is on another thread than what takes reports, first for the ledger.
    entry = entry_of(
        {"time": play.now, "event": "Reported", "n": 0, "step": 21, "metrics": {"loss": 0.0}}
    )
    play.progress.ledger.take(entry)
    assert "step 20 of 2000" in play.shown()[0]
    assert "repeating" not in play.shown()[0]


def test_restarts_and_their_last_cause_are_in_the_second_line() -> None:
    play = trained()
    play.fail()
    play.launch(1)
    play.join(1)
    play.take("Load", attempt=1, window=0, busy=[0.93, 0.4])
    assert play.shown()[1] == (
        "2 ranks █▄ · 1 restart, last: rank 1 on 10.0.0.3: killed by SIGKILL before its "
        "training wa… · 0:26 elapsed · goodput 77%"
    )


def test_many_ranks_have_the_least_and_the_most_busy_one() -> None:
    play = trained()
    play.take("Load", attempt=0, window=0, busy=[0.9] * 99 + [0.1])
    assert "busy 10% (rank 99) to 90%" in play.shown()[1]


FAILED = [
    "higgs: failed: rank 1 on 10.0.0.3: killed by SIGKILL before its training was done, "
    "after step 14 (failure 1 of max_failures=3)",
    "    batch 900",
    "    CUDA \\x1b[31merror\\x1b[0m",
    "  more: polytrain logs /runs/higgs --rank 1",
]


def test_a_failure_is_reported_once_with_rank_host_last_lines_and_the_next_command() -> None:
    play = trained()
    play.said.clear()
    play.fail()
    assert play.said == FAILED


def test_the_failure_that_ends_a_run_is_left_to_the_exception() -> None:
    play = trained()
    play.said.clear()
    play.take("Exited", phase="Concluded", attempt=0, reason="failure 1 of max_failures=0")
    play.fail(decision="failure 1 of max_failures=0")
    play.take("Concluded", succeeded=False, stopped=None, reason="failure 1 of max_failures=0")
    assert play.said == []
    assert [*ended(RUN, play.progress)] == ["higgs: failed after 23 s: failure 1 of max_failures=0"]


def test_a_failure_before_a_stop_is_reported_since_nothing_is_raised() -> None:
    play = trained()
    play.said.clear()
    play.take("Exited", phase="Concluded", attempt=0, reason="stopped")
    play.fail()
    stopped = {"by": "signal", "reason": "SIGINT"}
    play.take("Concluded", succeeded=False, stopped=stopped, reason="stopped by SIGINT")
    assert play.said == FAILED


def test_a_resumed_run_tells_its_failures_again() -> None:
    play = trained()
    play.take("Exited", phase="Concluded", attempt=0, reason="stopped")
    play.open()
    play.launch()
    play.said.clear()
    play.fail()
    assert play.said == FAILED


def test_a_rank_that_has_printed_nothing_has_no_log_to_look_at() -> None:
    play = trained()
    play.fail(last_lines=[])
    assert play.said[-1] == "  more: polytrain show /runs/higgs"


def test_where_lines_stay_there_is_one_for_each_event() -> None:
    play = Play()
    play.open()
    play.launch()
    play.join()
    play.report(range(1, 50))
    play.take("Committed", checkpoint="checkpoint_000001", step=40)
    play.fail()
    play.launch(1, step=40, start="checkpoint_000001")
    play.join(1)
    play.take("Concluded", succeeded=True, stopped=None, reason="every rank finished")
    assert started(RUN) == "higgs: starting (2 workers here), in /runs/higgs"
    assert [line for line in play.said if line.startswith("higgs")] == [
        "higgs: training on 2 ranks",
        "higgs: failed: rank 1 on 10.0.0.3: killed by SIGKILL before its training was done, "
        "after step 14 (failure 1 of max_failures=3)",
        "higgs: restart 1: resumes after step 40, from checkpoint_000001",
        "higgs: training on 2 ranks",
    ]
    assert [*ended(RUN, play.progress)] == [
        "higgs: finished after 55 s, 1 restart",
        "  step 40: loss 0.02041",
        "  checkpoint of step 40: /runs/higgs/checkpoints/checkpoint_000001",
        "  more: polytrain show /runs/higgs",
    ]


def test_the_last_line_says_that_every_validation_failed() -> None:
    play = trained()
    why = "its validation failed: ValueError: no"
    play.take("Concluded", succeeded=True, stopped=None, reason="", validation_failure=why)
    first, *_ = ended(RUN, play.progress)
    assert first == f"higgs: finished after 23 s, but no checkpoint has a score: {why}"
    assert json.loads(ended_line(RUN, play.progress, now=play.now))["validation_failure"] == why


def test_a_driver_that_ends_without_a_conclusion_was_interrupted() -> None:
    assert next(ended(RUN, trained().progress)) == "higgs: interrupted after 23 s"


def test_a_request_to_stop_is_shown_until_the_run_has_stopped() -> None:
    play = trained()
    reason = "stopped by a signal: SIGINT"
    play.take("DrainWanted", phase="Training", attempt=0, reason=reason)
    assert "stops after its next checkpoint: stopped by a signal: SIGINT" in play.shown()[1]
    play.take("AttemptEnded", attempt=0, failure=None, reason="")
    play.take("Concluded", succeeded=False, stopped={"by": "signal", "reason": ""}, reason=reason)
    assert next(ended(RUN, play.progress)) == f"higgs: stopped after 23 s: {reason}"


def test_a_resumed_run_that_stops_before_a_report_has_a_step_and_no_metrics() -> None:
    play = Play()
    play.open()
    play.launch(step=40, start="checkpoints/checkpoint_000001")
    stopped = {"by": "signal", "reason": "SIGINT"}
    play.take("Concluded", succeeded=False, stopped=stopped, reason="stopped by a signal")
    assert [*ended(RUN, play.progress)][1:] == [
        "  step 40",
        "  checkpoint of step 40: /runs/higgs/checkpoints/checkpoint_000001",
        "  more: polytrain show /runs/higgs",
    ]


def test_a_heartbeat_is_one_line_with_all_of_it() -> None:
    play = trained()
    assert heartbeat(RUN, play.progress, now=play.now) == (
        "higgs: step 20 of 2000, 1 steps/s, 33 min left, loss 0.05, 2 ranks, 0:23 elapsed, "
        "goodput 87%"
    )


HOSTILE: Mapping[str, Any] = {
    "a\nb\x1b[2J": 1.0,
    "x" * 500: 2,
    "nested": {"数据": float("nan"), "text": "\x1b]0;title\x07" * 40},
    "ignored": [1, 2],
    "<script>": 10**40,
}


@pytest.mark.parametrize("width", [0, 1, 10, 20, 40, 79, 200])
@pytest.mark.parametrize("signs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_no_metric_breaks_a_line_and_no_line_is_too_wide(width: int, signs: Any) -> None:
    play = trained()
    play.report([21], HOSTILE)
    play.fail()
    play.launch(1)
    for line in state_lines(RUN, play.progress, now=play.now, width=width, signs=signs):
        assert columns(line) <= width
        assert line.isprintable()


def test_forty_columns_hold_the_step_and_the_time_left() -> None:
    assert trained().shown(40) == (
        "step 20 of 2000 · 33 min left",
        "2 ranks · 0:23 elapsed · goodput 87%",
    )


@pytest.mark.parametrize(
    ("encoding", "signs"),
    [("utf-8", UNICODE), ("latin-1", ASCII), ("ascii", ASCII), (None, ASCII), ("no such", ASCII)],
)
def test_a_stream_gets_only_signs_that_it_knows(encoding: str | None, signs: Any) -> None:
    assert signs_for(encoding) is signs


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (41.2, "41 s"),
        (119, "119 s"),
        (125, "2 min"),
        (7199, "120 min"),
        (7200, "2 h 00 min"),
        (172_799, "47 h 59 min"),
        (176_400, "2 d 1 h"),
    ],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_every_json_line_says_its_schema_run_event_and_time() -> None:
    play = trained()
    play.take("Committed", checkpoint="checkpoint_000001", step=10)
    play.fail()
    play.launch(1, step=10, start="checkpoint_000001")
    play.take("Concluded", succeeded=True, stopped=None, reason="every rank finished")
    lines = [
        started_line(RUN, now=T0),
        progress_line(RUN, play.progress, now=play.now),
        *play.lines,
        ended_line(RUN, play.progress, now=play.now),
    ]
    read = [json.loads(line) for line in lines]
    assert [each["event"] for each in read] == [
        "run_started",
        "progress",
        "attempt_started",
        "checkpoint_committed",
        "attempt_ended",
        "attempt_started",
        "run_ended",
    ]
    for each in read:
        assert (each["schema_version"], each["run"]) == (1, "higgs")
        assert each["time"] >= T0
    assert read[4]["failure"]["host"] == "10.0.0.3"
    assert read[4]["failure"]["command"] == "polytrain logs /runs/higgs --rank 1"
    assert read[5]["first_step"] == 11
    assert read[6]["state"] == "finished"


def test_json_lines_have_no_number_that_json_lacks() -> None:
    play = trained()
    play.report([21], {"loss": float("nan"), "best": float("inf")})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} isn't JSON")

    line = progress_line(RUN, play.progress, now=play.now)
    read = json.loads(line, parse_constant=refuse)
    assert read["metrics"] == {"loss": None, "best": None}
    assert read["step"] == 21


def test_the_lines_of_a_second_driver_begin_where_the_first_one_ended() -> None:
    first = trained()
    second = Play(progress=Progress(ledger=first.progress.ledger), now=first.now + 60)
    second.take("Opened", anew=False, world_size=2, began=second.now, total_steps=2000)
    second.launch(0, step=10, start="checkpoint_000001")
    second.join()
    second.report(range(11, 13))
    assert "step 12 of 2000 · repeating up to 20" in second.shown()[0]
    assert second.progress.stage is Stage.TRAINING
    assert second.said[0] == "higgs: restart 1: resumes after step 10, from checkpoint_000001"


def test_a_long_step_shows_that_time_passes() -> None:
    play = trained(total=None)
    assert "ago" not in play.shown()[0]
    assert "0:23 elapsed" in play.shown()[1]
    play.now += 30
    assert "· 1 steps/s · reported 30 s ago ·" in play.shown()[0]
    assert "0:53 elapsed" in play.shown()[1]


def test_the_first_report_already_has_a_rate() -> None:
    play = Play()
    play.open(total=10)
    play.launch()
    play.join()
    play.now += 29
    play.report([1])
    first, _ = play.shown()
    assert "step 1 of 10 · 30 s/step · 270 s left" in first or "30 s/step · 4 min left" in first


def test_the_end_has_the_best_value_of_the_metric_that_ranks_checkpoints() -> None:
    play = Play()
    play.take("Opened", anew=True, world_size=2, began=T0, ranking=["auc", "max"])
    play.launch()
    play.join()
    for step, auc in ((1, 0.5), (2, 0.9), (3, float("nan")), (4, 0.7)):
        play.report([step], {"auc": auc})
    play.take("Concluded", succeeded=True, stopped=None, reason="every rank finished")
    assert "  best auc: 0.9, of step 2" in [*ended(RUN, play.progress)]


def test_a_validation_may_return_the_metric_that_ranks_checkpoints() -> None:
    play = Play()
    play.take("Opened", anew=True, world_size=2, began=T0, ranking=["valid/auc", "max"])
    play.launch()
    play.join()
    play.report([1], {"valid": {"auc": 0.5}})
    play.report([2, 3])
    validated = {"checkpoint": "checkpoint_000001-1.0", "status": "validated", "reason": ""}
    play.take("ValidationEnded", **validated, step=2, metrics={"valid": {"auc": 0.9}})
    play.take("Concluded", succeeded=True, stopped=None, reason="every rank finished")
    assert "  best valid/auc: 0.9, of step 2" in [*ended(RUN, play.progress)]


def test_the_traceback_of_a_failure_is_shown_though_the_run_goes_on() -> None:
    play = trained()
    frames = [f"  frame {number}" for number in range(60)]
    play.fail(kind="USER_ERROR", traceback="\n".join(["Traceback:", *frames, "ValueError: no"]))
    assert "    ValueError: no" in play.said
    assert "      frame 59" in play.said
    assert "      frame 0" not in play.said


def test_states_have_colours_that_suit_any_background() -> None:
    play = trained()
    play.fail()
    play.launch(1, step=20)
    play.join(1)
    first, second = state_styled(play.shown(), signs=UNICODE)
    assert first.startswith("\x1b[1mhiggs\x1b[0m · ")
    assert "\x1b[35m1 restart\x1b[0m, last: " in second
    assert end_style(play.progress) == "35"
    play.take("Concluded", succeeded=True, stopped=None, reason="every rank finished")
    assert end_style(play.progress) == "32"
    bar = state_styled(["(rank 1) 10%", "higgs", "2 ranks"], signs=UNICODE)[0]
    assert bar == "\x1b[2m(rank 1)\x1b[0m 10%"


@pytest.mark.parametrize(
    ("event", "fields", "style"),
    [
        ("AttemptEnded", {"attempt": 0, "failure": FAILURE, "reason": ""}, "31"),
        ("AttemptEnded", {"attempt": 0, "failure": None, "reason": ""}, "35"),
        ("Launched", {"attempt": 1, "step": 0, "start": None, "world_size": 2}, "35"),
        ("Joined", {"phase": "Training", "attempt": 0}, ""),
    ],
)
def test_an_event_has_the_colour_of_what_it_means(
    event: str, fields: dict[str, Any], style: str
) -> None:
    assert event_style(entry_of({"time": T0, "event": event, **fields})) == style
