"""A worker process's positions in its data: what is said of loops that count as epochs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polytrain.data.plan.cursor import Cursor
from polytrain.data.plan.position import DataPosition
from polytrain.data.plan.row_plan import Plan
from polytrain.workers.session.data_cursors import DataCursors


def read(cursor: Cursor[Any], *, batches: int, of: int) -> None:
    with cursor.epoch() as epoch:
        for batch in range(batches):
            epoch.given(10 * (batch + 1))
        if batches < of:
            raise StopIteration


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_look_that_changes_the_order_is_warned_of_once(
    shuffle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cursor = Cursor(DataPosition(plan=Plan(rows=40, shards=1, shuffle=shuffle)))
    cursor.skips = True
    shards: Any = {"train": SimpleNamespace(cursor=cursor)}
    cursors = DataCursors(shards, saved={}, skipped={})
    for _ in range(3):
        read(cursor, batches=4, of=4)
        cursors.reported()
        with pytest.raises(StopIteration):
            read(cursor, batches=2, of=4)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(": a")[0] for message in messages] == ["'train'"] * shuffle
    assert all("left after 2 batch(es)" in message for message in messages)
    assert all("It counts as epoch 1" in message for message in messages)
