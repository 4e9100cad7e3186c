"""Where a run's time went: every second between a driver's first and last line is told once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.record.lines import entry_of, write_transition

from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import AgentsPlaced, Done, Exited, Failed, Offered, PlacementFailed
from polytrain.policy.failure import FailurePolicy
from polytrain.record.entries import Opened
from polytrain.record.history import JOURNAL, RunHistory, read_history
from polytrain.record.journal import Journal
from polytrain.record.ledger import Ledger
from polytrain.run.machine import begin, step
from polytrain.run.states import State
from polytrain.storage.location import Location
from polytrain.view.timeline import Timeline
from polytrain_plugins import Offer

Line = dict[str, Any]


def line(time: float, event: str, phase: str | None = None, attempt: int = 0, **more: Any) -> Line:
    """A line of a journal."""
    found = {} if phase is None else {"phase": phase, "attempt": attempt}
    return {"time": time, "event": event, **found, **more}


def ledger_of(*lines: Line) -> Ledger:
    ledger = Ledger()
    for message in lines:
        ledger.take(entry_of(message))
    return ledger


def spent(ledger: Ledger) -> dict[str, float]:
    """What there was time for."""
    return {account: seconds for account, seconds in ledger.seconds.items() if seconds}


def opened(time: float, *, began: float | None = None) -> Line:
    return line(time, "Opened", began=time if began is None else began)


def launched(time: float, *, step: int = 0, world_size: int = 1) -> Line:
    return line(time, "Launched", step=step, world_size=world_size)


def trained_from(time: float, *, step: int = 0, attempt: int = 0) -> list[Line]:
    """An attempt of one rank that begins to train at once."""
    return [
        line(time, "AgentsPlaced", "Gathering", attempt),
        launched(time, step=step),
        line(time, "Started"),
        line(time, "Offered", "Training", attempt),
        line(time, "Joined", "Training", attempt),
    ]


def reports(*steps: tuple[float, int]) -> list[Line]:
    """Of rank 0: time and step."""
    return [line(time, "Reported", step=step) for time, step in steps]


def test_every_second_of_a_run_with_a_restart_has_its_account() -> None:
    ledger = ledger_of(
        opened(10, began=8),
        line(11, "Begun", "Placing"),
        line(13, "AgentsPlaced", "Gathering"),
        launched(13.5, world_size=2),
        line(15, "Started"),
        line(17, "Offered", "Training"),
        line(18, "Joined", "Training"),
        line(19, "Joined", "Training"),
        *reports((22, 1), (24, 2)),
        line(26, "Reported", step=3, stalled_s=0.5, copied_s=0.25),
        line(30, "Exited", "Ending", since_s=0.25),
        line(31, "Exited", "Gathering", 1),
        launched(33, step=1, world_size=2),
        line(34, "Started"),
        line(35, "Offered", "Training", 1),
        line(36, "Joined", "Training", 1),
        line(36.5, "Joined", "Training", 1),
        *reports((38, 2), (40, 3), (41, 4)),
        line(43, "Done", "Leaving", 1, stalled_s=1, copied_s=0.5),
        line(44, "Exited", "Concluded", 1, since_s=0.5),
        line(44, "Concluded"),
        line(45, "Closed"),
    )
    assert ledger.seconds == {
        "start": 5.5,
        "data_load": 1.5,
        "import": 2 + 1,
        "rendezvous": 2 + 1.5,
        "train": (11 - 0.5 - 0.25 - 0.25) + (3 - 1 - 0.5),
        "checkpoint_stall": 0.5 + 1,
        "snapshot": 0.25 + 0.5,
        "detect": 0.25,
        "teardown": 1,
        "reschedule": 2,
        "data_reload": 1,
        "replayed_work": 3.5,
        "ending": 2,
    }
    assert ledger.wall_s == 45 - 8
    assert ledger.goodput == 11.5 / 37
    assert (ledger.lost_steps, ledger.restarts) == (2, 1)


def test_placing_workers_once_more_is_rescheduling() -> None:
    ledger = ledger_of(
        opened(0),
        *trained_from(1),
        line(3, "AgentLost", "Ending"),
        line(4, "Exited", "Placing", 1),
        *trained_from(9, attempt=1),
    )
    assert spent(ledger) == {"start": 1, "train": 2, "teardown": 1, "reschedule": 5}


def test_one_rank_that_ends_and_is_launched_by_the_same_line_has_restarted() -> None:
    ledger = ledger_of(
        opened(0),
        *trained_from(1),
        line(6, "Exited", "Gathering", 1, since_s=2),
        launched(7),
        line(10, "Exited", "Gathering", 2),
        launched(10.5),
    )
    assert spent(ledger) == {
        "start": 1,
        "train": 3,
        "detect": 2,
        "reschedule": 1.5,
        "data_reload": 3,
    }
    assert ledger.restarts == 2


def test_what_peers_raise_first_doesnt_hide_how_long_a_lost_process_was_gone() -> None:
    ledger = ledger_of(
        opened(0),
        *trained_from(0),
        line(5, "Failed", "Ending"),
        line(5.5, "Exited", "Ending", since_s=1.5),
        line(5.75, "Exited", "Ending", since_s=1),
        line(6, "Exited", "Gathering", 1),
    )
    assert spent(ledger) == {"train": 4, "detect": 1, "teardown": 1}


def test_a_stall_is_taken_from_the_work_that_it_has_interrupted() -> None:
    ledger = ledger_of(
        opened(0),
        *trained_from(0),
        *reports((4, 1)),
        line(4, "Failed", "Gathering", 1),
        *trained_from(4, attempt=1),
        line(6, "Reported", step=1, stalled_s=1.5),
        line(8, "Reported", step=2, stalled_s=1.5),
    )
    assert spent(ledger) == {"train": 4 + 2, "replayed_work": 0.5, "checkpoint_stall": 1.5}


def test_a_copy_is_taken_from_the_work_once_however_many_reports_say_it() -> None:
    ledger = ledger_of(
        opened(0),
        *trained_from(0),
        line(2, "Reported", step=1, copied_s=0.5),
        line(4, "Reported", step=2, copied_s=0.5),
        line(6, "Reported", step=3, copied_s=0.75, stalled_s=0.25),
        line(8, "Drained", "Ending", copied_s=1, stalled_s=0.25),
    )
    assert spent(ledger) == {"train": 8 - 1 - 0.25, "snapshot": 1, "checkpoint_stall": 0.25}
    assert ledger.trained_s() == 8


def test_steps_are_lost_once_and_repeated_until_all_of_them_are_done_again() -> None:
    """Twice from step 1: of 4 steps three are lost, of the two after that one."""
    ledger = ledger_of(
        opened(0),
        *trained_from(0),
        *reports((1, 1), (2, 2), (3, 3), (4, 4)),
        line(4, "Failed", "Gathering", 1),
        *trained_from(4, step=1, attempt=1),
        *reports((5, 2)),
        line(5, "Failed", "Gathering", 2),
        *trained_from(5, step=1, attempt=2),
        *reports((6, 2), (7, 3), (8, 4), (9, 5)),
    )
    assert ledger.lost_steps == 3 + 1
    assert spent(ledger) == {"train": 4 + 1, "replayed_work": 1 + 3}


def test_a_restart_from_the_last_report_repeats_nothing() -> None:
    ledger = ledger_of(
        opened(0),
        *trained_from(0),
        *reports((1, 1), (2, 2)),
        line(2, "Drained", "Ending"),
        line(3, "Exited", "Placing", 1),
        *trained_from(3, step=2, attempt=1),
        *reports((5, 3)),
    )
    assert ledger.lost_steps == 0
    assert spent(ledger) == {"train": 4, "teardown": 1}


def test_a_later_driver_repeats_what_a_killed_one_has_lost() -> None:
    """And nobody knows how long the killed one has lived after its last line."""
    ledger = ledger_of(
        opened(0),
        *trained_from(1),
        *reports((2, 1), (3, 2)),
        opened(1000, began=998),
        line(1001, "Begun", "Placing"),
        *trained_from(1002, step=1),
        *reports((1004, 2), (1007, 3)),
    )
    assert ledger.lost_steps == 1
    assert spent(ledger) == {"start": 1 + 4, "train": 2 + 3, "replayed_work": 2}
    assert ledger.wall_s == 3 + 9


def test_no_time_passes_while_a_clock_is_set_back() -> None:
    ledger = ledger_of(opened(50), *trained_from(51), *reports((40, 1), (43, 2)))
    assert spent(ledger) == {"start": 1, "train": 3}


EIGHTHS = st.integers(0, 400).map(lambda number: number / 8)
MORE = st.fixed_dictionaries(
    {}, optional={"stalled_s": EIGHTHS, "copied_s": EIGHTHS, "since_s": EIGHTHS}
)
LINES = st.one_of(
    st.builds(
        lambda phase, attempt, event: {"event": event, "phase": phase, "attempt": attempt},
        st.sampled_from(["Placing", "Gathering", "Training", "Leaving", "Ending", "Concluded"]),
        st.integers(0, 3),
        st.sampled_from(["Joined", "Exited", "Failed", "Done", "Offered"]),
    ),
    st.builds(lambda step: {"event": "Reported", "step": step}, st.integers(0, 9)),
    st.builds(
        lambda step, size: {"event": "Launched", "step": step, "world_size": size},
        st.integers(0, 9),
        st.integers(1, 3),
    ),
    st.sampled_from(["Started", "Concluded", "StacksDumped"]).map(lambda event: {"event": event}),
)
DRIVERS = st.lists(
    st.tuples(EIGHTHS, EIGHTHS, st.lists(st.tuples(EIGHTHS, LINES, MORE), max_size=30)), max_size=3
)


@given(drivers=DRIVERS)
def test_whatever_the_lines_the_accounts_add_up_to_the_time_of_all_drivers(
    drivers: list[tuple[float, float, list[tuple[float, Line, Line]]]],
) -> None:
    now = wall_s = 0.0
    ledger = Ledger()
    for pause, opening, message in drivers:
        now += pause
        began = now
        now += opening
        ledger.take(entry_of(opened(now, began=began)))
        for seconds, entry, more in message:
            now += seconds
            ledger.take(entry_of({"time": now, **entry, **more}))
            assert min(ledger.seconds.values()) >= 0
        now += 1
        ledger.take(entry_of(line(now, "Closed")))
        wall_s += now - began
    assert ledger.wall_s == wall_s
    assert 0 <= ledger.goodput <= 1
    assert ledger.lost_steps >= 0


@given(drivers=DRIVERS)
def test_the_spans_of_a_timeline_add_up_to_the_ledger(
    drivers: list[tuple[float, float, list[tuple[float, Line, Line]]]],
) -> None:
    now = 0.0
    ledger, timeline = Ledger(), Timeline()
    for pause, opening, message in drivers:
        began, now = now + pause, now + pause + opening
        lines: list[Line] = [opened(now, began=began)]
        for seconds, entry, more in message:
            now += seconds
            lines.append({"time": now, **entry, **more})
        for each in lines:
            ledger.take(entry_of(each))
            timeline.take(entry_of(each))
    assert timeline.seconds == ledger.seconds
    sums = dict.fromkeys(ledger.seconds, 0.0)
    end = 0.0
    for span in timeline.spans:
        assert span.start == pytest.approx(end)
        end = span.start + span.seconds
        sums[span.account] += span.seconds
    assert sums == pytest.approx(ledger.seconds)


def test_a_timeline_puts_what_is_known_late_where_it_happened() -> None:
    timeline = Timeline()
    for each in (
        opened(0),
        *trained_from(1),
        line(4, "Reported", step=1, stalled_s=1.0),
        line(10, "Exited", "Ending", since_s=2.0),
        line(11, "Exited", "Gathering", 1),
        line(12, "Launched", step=0, world_size=1),
    ):
        timeline.take(entry_of(each))
    assert [(span.account, span.start, span.seconds) for span in timeline.spans] == [
        ("start", 0, 1),
        ("train", 1, 2),
        ("checkpoint_stall", 3, 1),
        ("train", 4, 4),
        ("detect", 8, 2),
        ("teardown", 10, 1),
        ("reschedule", 11, 1),
    ]
    assert [span.time for span in timeline.spans] == [0, 1, 3, 4, 8, 10, 11]


def test_it_prints_as_a_table_that_adds_up() -> None:
    ledger = ledger_of(
        opened(0),
        *trained_from(2.5),
        *reports((10, 1), (17.5, 2)),
        line(17.5, "Failed", "Gathering", 1),
        *trained_from(17.5, step=1, attempt=1),
        *reports((20, 2)),
        line(20, "Closed"),
    )
    rows = re.findall(r"^(.+?) +([\d.]+) s +([\d.]+) %$", str(ledger), flags=re.MULTILINE)
    found = {name: (float(seconds), float(share)) for name, seconds, share in rows}
    assert found["start"] == (2.5, 12.5)
    assert found["train"] == (15, 75)
    assert found["replayed_work"] == (2.5, 12.5)
    assert found.pop("wall time") == (20, 100)
    assert [sum(column) for column in zip(*found.values(), strict=True)] == [20, 100]
    assert len({len(row) for row in str(ledger).splitlines() if row.endswith("%")}) == 1
    assert re.search(r"^goodput +75.0 %$", str(ledger), flags=re.MULTILINE)
    assert re.search(r"^lost steps +1$", str(ledger), flags=re.MULTILINE)
    assert re.search(r"^restarts +1$", str(ledger), flags=re.MULTILINE)


def live(journal: Journal, *events: Any) -> None:
    """Let a run of one worker live through the events."""
    journal.write(Opened(anew=False, identity={}, world_size=1))
    transition = begin(State(world_size=1, policy=FailurePolicy()))
    write_transition(journal, None, transition)
    for event in events:
        transition = step(transition.state, event)
        write_transition(journal, event, transition)


FAILED = Failed(
    attempt=0, failure=Failure(kind=FailureKind.USER_ERROR, rank=0, message="ValueError: no")
)
OFFERED = Offered(attempt=0, rank=0, offer=Offer())
GONE = Exited(attempt=0, rank=0, how="exited with code 0", killed=False)


@pytest.mark.parametrize(
    "events",
    [
        (AgentsPlaced(nodes=("node",)), OFFERED, Done(attempt=0, rank=0), GONE),
        (AgentsPlaced(nodes=("node",)), OFFERED, FAILED, GONE),
        (PlacementFailed(reason="no room"),),
        (AgentsPlaced(nodes=("node",)),),
    ],
    ids=["finished", "failed", "never placed", "killed"],
)
def test_whoever_reads_the_journal_has_the_drivers_own_account(
    tmp_path: Path, events: tuple[Any, ...]
) -> None:
    """Over two drivers, of which the second goes on with the first one's."""
    storage = Location.of(tmp_path).open()
    history = RunHistory()
    for token in (1, 2):
        with Journal(storage, token=token, history=history) as journal:
            live(journal, *events)
        run_history = read_history(storage.read_log(JOURNAL))
        assert run_history is not None
        assert run_history.ledger.seconds == journal.history.ledger.seconds
        history = run_history
    assert history.ledger.wall_s > 0
