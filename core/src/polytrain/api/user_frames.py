"""What the user sees of an error or an interruption: the lines of the user's own code."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from polytrain.data_errors import is_library
from polytrain_plugins import PolytrainError

P = ParamSpec("P")
R = TypeVar("R")

_OURS = f"{Path(__file__).parents[1]}{os.sep}"


def user_frames_only(function: Callable[P, R]) -> Callable[P, R]:
    """Take polytrain's frames out of the traceback of what leaves a function on purpose.

    That is an interruption, or an error whose text says what is wrong.
    """

    @wraps(function)
    def called(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return function(*arguments, **named)
        except (KeyboardInterrupt, SystemExit, PolytrainError) as error:
            error.__traceback__ = _of_user(error.__traceback__)
            # Without a name: to raise by name would put this frame back.
            raise

    return called


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
