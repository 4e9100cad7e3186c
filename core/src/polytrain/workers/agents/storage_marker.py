"""Checks that a node sees the run's storage, by a marker file that the driver has written there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from polytrain.storage.beneath import Beneath
from polytrain.storage.location import Location
from polytrain.storage.retry import is_temporary

_SEEN_WITHIN_S = 5.0
"""Seconds within which a network file system shows a new file."""

_PAUSE_S = 0.1


async def storage_problem(location: Location, marker: str, *, host: str) -> str | None:
    """Return the problem of the run's storage on this node; None if there is none.

    Args:
        location: the run's location. Only a local path can mean another storage here.
        marker: the marker file's path in it.
        host: this node, for the message.
    """
    if not location.is_local:
        return None
    began, files = time.monotonic(), Beneath(Path(location.address))
    while (error := _error_of(files, marker)) is not None:
        is_unseen = isinstance(error, FileNotFoundError)
        limit_s = _SEEN_WITHIN_S if is_unseen else location.retry_s * is_temporary(error)
        if time.monotonic() - began <= limit_s:
            await asyncio.sleep(_PAUSE_S)
        elif is_unseen:
            return (
                f"the node {host} doesn't see the run's directory {location.address}, which the "
                "driver has made. Set RunConfig.storage_path to a directory that all nodes mount, "
                "or to object storage such as s3://bucket"
            )
        else:
            return f"the node {host} can't read the run's directory {location.address}: {error}"
    return None


def _error_of(files: Beneath, marker: str) -> OSError | None:
    try:
        files.status(marker)
    except OSError as error:
        return error
    return None
