"""Reads what a page shows of a run from the run's storage."""

from __future__ import annotations

import time
from importlib.metadata import version

from polytrain.checkpoint.store import CheckpointStore
from polytrain.errors import RunNotFoundError
from polytrain.record.near_runs import no_run_text
from polytrain.storage.location import Location
from polytrain.view.page.facts import Facts, Source, facts_of
from polytrain.view.page.record import RunRecord
from polytrain.view.present import read_present
from polytrain.view.run_state import state_of


def read_facts(location: Location) -> Facts:
    """Read a run, whether or not it has ended.

    Raises:
        RunNotFoundError: there is no run.
        RunFormatError: another version of polytrain wrote it.
        OSError: the storage can't be read.
    """
    storage = location.open()
    present = read_present(RunRecord, storage)
    if present is None:
        raise RunNotFoundError(no_run_text(location))
    record, owner = present
    found = CheckpointStore(location=location).find(since_token=record.since_token)
    source = Source(
        name=location.name,
        path=location.address,
        state=state_of(record, owner),
        driver=None if owner is None else owner.description,
        read=time.time(),
        version=version("polytrain-core"),
    )
    return facts_of(record, source, found.manifests, found.damaged)
