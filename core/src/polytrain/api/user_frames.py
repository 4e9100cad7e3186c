"""What the user sees of an interruption: the lines of the user's own code."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from polytrain.data_errors import is_library

_OURS = f"{Path(__file__).parents[1]}{os.sep}"


class UserFramesOnly:
    """Takes the frames of polytrain out of the traceback of an interruption that leaves this block.

    The frame that has the block is taken out too: a frame isn't entered a second time when `with`
    raises the exception again, and `contextlib` would put the whole traceback back.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            error.__traceback__ = _of_user(traceback)


def _of_user(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback with the user's frames and those of the libraries that they call."""
    kept: list[TracebackType] = []
    is_users = False
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        # Libraries that polytrain calls are as little the user's as polytrain is.
        is_users = not file.startswith(_OURS) and (is_users or not is_library(file))
        if is_users:
            kept.append(traceback)
        traceback = traceback.tb_next
    shown = None
    for entry in reversed(kept):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown
