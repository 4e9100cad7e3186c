"""The rows of a Ray pipeline, computed in their order."""

from __future__ import annotations

from polytrain.data.read.describe import Source, computed


def computed_in_order(source: Source) -> Source:
    """A data set with pieces: those that it has, or those of a pipeline that runs now.

    By itself Ray gives blocks as they are done. Another run would give other rows in the same
    place, so predictions could not be resumed.
    """
    if source.stream is None:
        return source
    # The settings of this data set alone, which is the user's.
    options = source.stream.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return computed(source)
    finally:
        options.preserve_order = before
