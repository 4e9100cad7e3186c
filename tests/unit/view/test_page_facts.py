"""What a page says of a run, from a journal that nobody had to make by training."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.record.lines import entry_of
from tests.unit.record.recorded import RUN, SETTINGS, attempt, journal, line, opened, page_of
from tests.unit.view import page_facts

from polytrain.record.history import read_history
from polytrain.view.page.facts import Facts
from polytrain.view.page.failures import folded, ranges
from polytrain.view.page.timeline_chart import chart_of, coarse, drawn_marks
from polytrain.view.page.verdict import duration, verdict
from polytrain.view.present import RunRecord
from polytrain.view.run_state import RunState
from polytrain.view.timeline import MarkKind, Span


@pytest.fixture(scope="module")
def facts() -> Facts:
    return page_of(RUN)


def test_its_times_are_those_of_the_ledger(facts: Facts) -> None:
    history = read_history(journal(RUN))
    assert history is not None
    assert facts.seconds == history.ledger.seconds
    assert facts.wall_s == history.ledger.wall_s
    sums = dict.fromkeys(facts.seconds, 0.0)
    for span in facts.spans:
        sums[span.account] += span.seconds
    assert sums == pytest.approx(history.ledger.seconds)


def test_its_attempts_are_those_of_all_drivers(facts: Facts) -> None:
    assert [(a.driver, a.number, a.workers, a.first_step, a.ended) for a in facts.attempts] == [
        (1, 0, 3, 0, 6),
        (1, 1, 2, 1, None),
        (2, 0, 2, 1, 103),
    ]
    # In the run's own time, without the pause between the drivers.
    assert [(each.start, each.stop) for each in facts.attempts] == [(1, 6), (7, 9), (10, 12)]
    assert (facts.began, facts.ended) == (0, 104)


def test_what_happened_is_marked(facts: Facts) -> None:
    assert [(mark.kind, mark.at, mark.rank) for mark in facts.marks] == [
        (MarkKind.CHECKPOINT, 2, None),
        (MarkKind.STRAGGLER, 4, 2),
        (MarkKind.FAILURE, 6, 1),
        (MarkKind.RESIZE, 7, None),
        (MarkKind.DRIVER, 9, None),
    ]


def test_a_validation_that_failed_says_why() -> None:
    def fill(record: RunRecord) -> None:
        ended = {"checkpoint": "c-1.0", "step": 1, "metrics": {}, "time": 2.0}
        for status, reason in (("validated", ""), ("failed", "ValueError: no data")):
            event = {"event": "ValidationEnded", **ended, "status": status, "reason": reason}
            record.take(entry_of(event))

    texts = [mark.text for mark in page_facts.facts(fill).marks]
    assert texts == ["c-1.0: validated", "c-1.0: failed: ValueError: no data"]


def test_repeated_steps_are_kept_apart(facts: Facts) -> None:
    (loss,) = facts.metrics
    assert loss.curve is not None
    assert (loss.curve.steps, loss.curve.values) == ((1, 2), (2.0, 102.0))
    assert [part.values for part in loss.undone] == [(3.0, 4.0), (8.0, 9.0)]


def test_its_ranks(facts: Facts) -> None:
    assert [(each.rank, each.attempts, each.failures, each.straggled) for each in facts.ranks] == [
        (0, 3, 0, 0),
        (1, 3, 1, 0),
        (2, 1, 0, 1),
    ]
    # The last attempt that had a rank tells where it was; a rank may be idle in a window.
    assert [(each.host, each.gpus, each.busy, each.memory) for each in facts.ranks] == [
        ("a", 0, pytest.approx(0.4), 9),
        ("c", 1, pytest.approx(1.0), 6),
        ("b", 1, 0.0, 7),
    ]
    # Windows of an earlier version have no CPU.
    assert [each.cpu for each in facts.ranks] == [2.5, 0.5, None]
    assert [(each.gpu, each.gpu_memory) for each in facts.ranks] == [
        (None, None),
        (pytest.approx(0.9), 9),
        (None, None),
    ]

    assert [(each.node, each.device, each.rows) for each in facts.ranks] == [
        ("node-0", "CPU", {"train": 10}),
        ("node-1", "NVIDIA L4", {"train": 11}),
        ("node-2", "NVIDIA L4", {"train": 12}),
    ]
    assert [each.place for each in facts.ranks] == ["node-0 (a)", "node-1 (c)", "node-2 (b)"]


def test_its_configuration(facts: Facts) -> None:
    assert facts.settings == SETTINGS
    assert facts.cluster == "on Ray: a driver is connected to it"
    assert facts.versions == {"torch": "2.9"}


def test_settings_that_were_chosen(facts: Facts) -> None:
    # An option that this version doesn't know has no default.
    assert facts.chosen_settings == SETTINGS
    default = {**SETTINGS, "scaling_config.num_workers": 1}
    assert replace(facts, settings=default).chosen_settings == {
        "run_config.track": "mlflow",
        "later.option": 1,
    }


def test_a_journal_that_says_little_of_its_ranks() -> None:
    lines = [opened(0), *attempt(1, 0)]
    lines[0].pop("configuration")
    for each in lines:
        for name in ("hosts", "gpus", "rows", "device", "node"):
            each.pop(name, None)
    facts = page_of(lines)
    assert [(each.host, each.node, each.device, each.gpus, each.busy) for each in facts.ranks] == [
        (None, None, None, 0, None)
    ] * 3
    assert [(each.place, each.computes_on, each.rows_in_short) for each in facts.ranks] == [
        ("", "", "")
    ] * 3
    assert (facts.settings, facts.cluster, facts.versions) == ({}, "", {})


def test_a_rank_that_has_not_joined_is_nowhere() -> None:
    launched = [line for line in attempt(7, 1, size=2) if line["event"] != "Joined"]
    first, second, third = page_of([opened(0), *attempt(1, 0), *launched]).ranks
    assert (first.node, first.device, second.node) == (None, None, None)
    assert third.node == "node-2"


def test_equal_stacks_are_reported_once(facts: Facts) -> None:
    failure = facts.attempts[0].failure
    assert failure is not None
    assert [(shared.title, shared.stack) for shared in failure.stacks] == [
        ("ranks 0, 2", "waits at 0x7f01"),
        ("rank 1", "works"),
    ]


def test_ranks_in_short() -> None:
    assert ranges([0, 2, 3, 4, 7]) == "0, 2–4, 7"
    assert folded({}) == ()


@pytest.mark.parametrize(
    ("state", "begin"),
    [
        (RunState.FINISHED, "Finished in 13.0 s"),
        (RunState.FAILED, "Failed after 13.0 s"),
        (RunState.RUNNING, "Still running after 13.0 s (read at 1970-01-01 00:00:00 UTC)"),
        (RunState.STOPPED, "Stopped after 13.0 s (every rank finished): fit() resumes it"),
        (RunState.INTERRUPTED, "Interrupted after 13.0 s: its driver died, and fit() resumes it"),
    ],
)
def test_the_verdict_says_what_became_of_it(state: RunState, begin: str) -> None:
    sentence = verdict(page_of(RUN, state))
    assert sentence.startswith(begin)
    assert "2 restarts, 4 steps done again" in sentence
    assert "rank 1 on b: killed by SIGKILL (step 3)" in sentence


def test_the_verdict_names_the_condition_that_ended_a_run() -> None:
    stopped = {"by": "condition", "reason": "loss <= 0.1 at step 2", "condition": "loss <= 0.1"}
    ended = line(
        9, "Concluded", succeeded=True, stopped=stopped, reason="stopped by loss <= 0.1 at step 2"
    )
    sentence = verdict(page_of([*RUN[:8], ended]))
    assert sentence.startswith("Finished in 9.0 s (stopped by loss <= 0.1 at step 2)")


def test_a_run_that_has_hardly_begun() -> None:
    facts = page_of([opened(5)], RunState.RUNNING)
    assert (facts.attempts, facts.metrics, facts.ranks) == ((), (), ())
    assert chart_of(facts).rows == ()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (245, "4 min 5 s"),
        (7260, "2 h 1 min"),
        (180_000, "2 d 2 h"),
    ],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_rank_is_drawn_in_its_own_attempts(facts: Facts) -> None:
    chart = chart_of(facts)
    assert [row.attempts for row in chart.rows] == [(0, 1, 2), (0, 1, 2), (0,)]
    assert [sign.kind for sign in chart.rows[1].signs] == ["failure"]
    assert sum(bar.width for bar in chart.bars) == pytest.approx(100, abs=0.1)


def test_of_many_ranks_those_with_marks_are_drawn() -> None:
    straggler = line(3, "Straggler", attempt=0, rank=777, host="b", reason="slow")
    chart = chart_of(page_of([opened(0), *attempt(1, 0, size=1000), straggler]))
    assert chart.ranks == 1000
    assert [row.rank for row in chart.rows] == [*range(31), 777]


def test_many_spans_become_those_of_a_screen() -> None:
    accounts = ["train", "checkpoint_stall"]
    lengths = [0.9, 0.1]
    spans, start = [], 0.0
    for at in range(20_000):
        seconds = lengths[at % 2]
        spans.append(Span(account=accounts[at % 2], start=start, seconds=seconds, time=start))
        start += seconds
    spans.append(Span(account="ending", start=start, seconds=start, time=start))
    few = coarse(spans, 2 * start)
    assert [span.account for span in few] == ["train", "ending"]
    assert sum(span.seconds for span in few) == pytest.approx(2 * start)


def test_many_marks_become_those_of_a_screen() -> None:
    commits = [line(1 + at / 10, "Committed", checkpoint=f"c{at}", step=at) for at in range(5000)]
    facts = page_of([opened(0), *attempt(1, 0), *commits])
    drawn = drawn_marks(facts.marks, facts.wall_s)
    assert len(drawn) <= 401
    assert drawn[-1].text == "c4999, step 4999"
