"""Facts of a run for pages: a test says what is between its first launch and its end."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.record.lines import entry_of

from polytrain.view.page.facts import Facts, Source, facts_of
from polytrain.view.present import RunRecord
from polytrain.view.run_state import RunState


def facts(fill: Callable[[RunRecord], None] = lambda record: None) -> Facts:
    record = RunRecord(since_token=1, world_size=2)
    identity = {"backend": "reference", "options": {}, "datasets": {}, "content": {}}
    record.take(entry_of({"event": "Opened", "time": 0.0, "began": 0.0, "identity": identity}))
    launched = {"attempt": 0, "step": 0, "start": None, "world_size": 2}
    record.take(entry_of({"event": "Launched", "time": 1.0, **launched}))
    fill(record)
    record.take(entry_of({"event": "Closed", "time": 9.0}))
    source = Source(
        name="run", path="/r", state=RunState.FINISHED, driver=None, read=0.0, version="1"
    )
    return facts_of(record, source)
