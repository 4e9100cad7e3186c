"""Writes the page of a run: where a user wants it, and into its own directory when it ends."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from polytrain.storage.location import Location

logger = logging.getLogger(__name__)

NAME = "report.html"

WRITTEN_AFTER_S = 30.0
"""Shorter runs get none by themselves: the fraction of a second that it takes would be felt."""

MOST_REPORTS = 2_000_000
"""Of all ranks together. Reading more takes seconds, and hundreds of megabytes in the driver."""


def write_page(location: Location, path: Path) -> Path:
    """Write the page of a run into a local file; return the file's path.

    Args:
        path: the file to write, or to replace.

    Raises:
        RunNotFoundError: there is no run.
        OSError: the storage can't be read, or the file can't be written.
    """
    from polytrain.view.page.reading import read_facts
    from polytrain.view.page.rendering import page

    path.write_text(page(read_facts(location)), encoding="utf-8")
    return path


def write_at_end(location: Location, *, wall_s: float, reports: int) -> None:
    """Write the page of a run that has ended into its directory. Never raises.

    Args:
        wall_s: how long the run has taken, over all its drivers.
        reports: how many reports are kept, of all ranks.
    """
    if wall_s < WRITTEN_AFTER_S or reports > MOST_REPORTS:
        return
    try:
        from polytrain.view.page.reading import read_facts
        from polytrain.view.page.rendering import page

        # The run is over: nobody waits for a storage that is away.
        no_retry = replace(location, retry_s=0)
        no_retry.open().write(NAME, page(read_facts(no_retry)).encode())
    except Exception as error:  # whatever it is, the run has ended well or badly without it
        logger.warning(
            "The page of the run in %s can't be written: %s. `polytrain report` makes it later.",
            location.address,
            error,
        )
