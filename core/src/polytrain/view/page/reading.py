"""Reads what a page shows of a run from the run's storage."""

from __future__ import annotations

import time
from importlib.metadata import version

from polytrain.checkpoint.store import CheckpointStore
from polytrain.errors import RunNotFoundError
from polytrain.record.near_runs import no_run_text
from polytrain.storage.location import Location
from polytrain.view.page.facts import Facts, Source, facts_of
from polytrain.view.present import PresentRun, read_present


def read_facts(location: Location) -> Facts:
    """Read a run, whether or not it has ended.

    Raises:
        RunNotFoundError: there is no run.
        RunFormatError: another version of polytrain wrote it.
        OSError: the storage can't be read.
    """
    run = read_present(location)
    if run is None:
        raise RunNotFoundError(no_run_text(location))
    return facts_of_run(run)


def facts_of_run(run: PresentRun) -> Facts:
    """Return what a page shows of a run that was read, with its checkpoints.

    Raises:
        OSError: the storage can't be read.
    """
    store = CheckpointStore(location=run.location)
    found = store.find(since_token=run.history.since_token)
    source = Source(
        name=run.location.name,
        path=run.location.address,
        state=run.state,
        driver=run.driver,
        read=time.time(),
        version=version("polytrain-core"),
    )
    return facts_of(run.history, source, found.manifests, store.still_there(found.damaged))
