"""A journal that is read while another process writes it: each line comes once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.record.journal_writer import JournalWriter
from tests.unit.record.lines import entry_of
from tests.unit.record.recorded import RUN, opened

from polytrain.record.entries import Entry, MetricsReported
from polytrain.view.cli.following import tail_of

ENTRIES = [entry_of(line) for line in RUN]


@given(st.lists(st.integers(0, len(RUN)), max_size=6))
def test_each_line_is_yielded_once_however_often_it_is_read(reads: Sequence[int]) -> None:
    tail = tail_of(ENTRIES[:1])
    yielded: list[Entry] = []
    for count in [*sorted(reads), len(RUN)]:
        yielded += tail.news(ENTRIES[:count])
    assert yielded == ENTRIES
    assert list(tail.news(ENTRIES)) == []


@pytest.mark.parametrize("at_once", [1, 20, 40])
def test_reports_that_became_columns_come_once(tmp_path: Path, at_once: int) -> None:
    """They are read as drafts first, or not."""
    with JournalWriter(tmp_path) as writer:
        writer.do("report")
        tail = tail_of(writer.entries())
        steps: list[int] = []
        for number in range(40):
            writer.do("report")
            if number % at_once == 0:
                steps += [
                    e.step for e in tail.news(writer.entries()) if isinstance(e, MetricsReported)
                ]
        writer.finish()
        steps += [e.step for e in tail.news(writer.entries()) if isinstance(e, MetricsReported)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 41
    history = writer.history()
    assert tail.ledger.seconds == pytest.approx(history.ledger.seconds)
    assert tail.ledger.highest_step == 41


def test_a_run_that_was_started_over_is_followed_from_there() -> None:
    again = [replace(entry, token=entry.token + 2) for entry in ENTRIES]
    both = [*ENTRIES, *again]
    assert list(tail_of(both).news(both)) == again


def test_a_driver_that_has_lost_the_run_is_not_heard() -> None:
    resumed = entry_of(opened(200, token=3, anew=False))
    late = replace(ENTRIES[-1], token=2, time=201.0)
    tail = tail_of(ENTRIES)
    assert list(tail.news([*ENTRIES, resumed, late])) == [*ENTRIES, resumed]
