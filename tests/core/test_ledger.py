"""Where a run's time went: every second between a driver's first and last line is told once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.errors import Failure, FailureKind
from polytrain.policy.failure import FailurePolicy
from polytrain.run.chronicle import read_chronicle
from polytrain.run.events import AgentsPlaced, Done, Exited, Failed, Offered, PlacementFailed
from polytrain.run.journal import JOURNAL, Journal
from polytrain.run.ledger import Ledger
from polytrain.run.machine import begin, step
from polytrain.run.states import State
from polytrain.storage.location import Location
from polytrain_plugins import Offer

PHASES = ["Placing", "Gathering", "Training", "Leaving", "Ending"]


def ledger_of(*entries: tuple[float, str, str | None]) -> Ledger:
    """Of lines of a journal: time, event and phase."""
    ledger = Ledger()
    for time, event, phase in entries:
        ledger.take({"time": time, "event": event, **({"phase": phase} if phase else {})})
    return ledger


def test_each_phase_has_the_time_until_the_next_one() -> None:
    ledger = ledger_of(
        (10, "Opened", None),
        (11, "Begun", "Placing"),
        (13, "AgentsPlaced", "Gathering"),
        (13, "Launched", None),
        (16, "Offered", "Training"),
        (17, "Reported", None),
        (20, "Done", "Leaving"),
        (21, "Exited", "Concluded"),
        (29, "Concluded", None),
    )
    assert ledger.seconds == {
        "placing workers": 2,
        "starting trainers": 3,
        "training": 4,
        "leaving": 1,
    }
    assert ledger.wall_s == 10


def test_a_restart_adds_to_what_was_spent_before() -> None:
    ledger = ledger_of(
        (0, "Opened", None),
        (0, "Begun", "Placing"),
        (1, "AgentsPlaced", "Gathering"),
        (2, "Offered", "Training"),
        (5, "Failed", "Ending"),
        (6, "Exited", "Gathering"),
        (8, "Offered", "Training"),
        (12, "Exited", "Concluded"),
    )
    assert ledger.seconds["training"] == 7
    assert ledger.seconds["starting trainers"] == 3
    assert ledger.seconds["ending failed attempts"] == 1
    assert ledger.wall_s == 12


def test_nobody_knows_how_long_a_killed_driver_has_lived_after_its_last_line() -> None:
    ledger = ledger_of(
        (0, "Opened", None),
        (0, "Begun", "Placing"),
        (4, "Reported", None),
        (1000, "Opened", None),
        (1001, "Begun", "Placing"),
        (1003, "AgentsPlaced", "Gathering"),
    )
    assert ledger.seconds == {"placing workers": 6}


lines = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from([*PHASES, None])), min_size=1, max_size=10
)


@given(drivers=st.lists(st.tuples(st.integers(0, 100), lines), max_size=4))
def test_the_accounts_add_up_to_the_time_of_all_drivers(
    drivers: list[tuple[int, list[tuple[int, str | None]]]],
) -> None:
    now, spent = 0, 0
    entries: list[tuple[float, str, str | None]] = []
    for pause, told in drivers:
        now += pause
        entries += [(now, "Opened", None), (now, "Begun", "Placing")]
        begun = now
        for seconds, phase in told:
            now += seconds
            entries.append((now, "Something", phase))
        spent += now - begun
    ledger = ledger_of(*entries)
    assert ledger.wall_s == sum(ledger.seconds.values()) == spent
    assert all(seconds >= 0 for seconds in ledger.seconds.values())


def test_it_prints_as_a_table_that_adds_up() -> None:
    ledger = Ledger({"training": 12.25, "leaving": 0.5})
    rows = re.findall(r"^(.+?) +([\d.]+) s$", str(ledger), flags=re.MULTILINE)
    assert {name: float(seconds) for name, seconds in rows} == {
        "training": 12.25,
        "leaving": 0.5,
        "in all": 12.75,
    }


def live(journal: Journal, *events: Any) -> None:
    """Let a run of one worker live through the events."""
    journal.opened(anew=False, identity={}, world_size=1)
    transition = begin(State(world_size=1, policy=FailurePolicy()))
    journal.transition(None, transition)
    for event in events:
        transition = step(transition.state, event)
        journal.transition(event, transition)


FAILED = Failed(
    generation=0, failure=Failure(kind=FailureKind.USER_ERROR, rank=0, message="ValueError: no")
)
OFFERED = Offered(generation=0, rank=0, offer=Offer())
GONE = Exited(generation=0, rank=0, how="exited with code 0", killed=False)


@pytest.mark.parametrize(
    "events",
    [
        (AgentsPlaced(nodes=("node",)), OFFERED, Done(generation=0, rank=0), GONE),
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
    ledger = Ledger()
    for claim in (1, 2):
        with Journal(storage, claim=claim, ledger=ledger) as journal:
            live(journal, *events)
        chronicle = read_chronicle(storage.read_log(JOURNAL))
        assert chronicle is not None
        assert chronicle.ledger.seconds == journal.ledger.seconds
        ledger = chronicle.ledger
    assert ledger.wall_s > 0
