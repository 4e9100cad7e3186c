"""What can be wrong with a data set: when it is described, and when its rows are read.

DataError
├── SourceError       it can't be used; reported before any worker starts, as a `Problem`
├── ReadError         rows can't be read that existed when it was described
├── TransformError    the user's `transform` failed on some rows
└── StreamLostError   a pipeline failed while it was read

All of them survive pickling, with their cause where that can be pickled. If the user's code raised
an exception, the message begins with it.
"""

from __future__ import annotations

import pickle
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from polytrain.text.described import numbered
from polytrain.text.secret_names import without_credentials_in
from polytrain_plugins import Problem

_OURS = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LONGEST = 300
"""Characters of an exception's text in a message."""


class DataError(Exception):
    """Something is wrong with a data set. Its cause travels with it to other processes."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*map(without_credentials_in, texts))

    def __reduce__(self) -> tuple[Any, ...]:
        cause = self.__cause__
        try:
            pickle.loads(pickle.dumps(cause))
        except Exception:
            # Any class may fail to pickle, in any way. Our message contains its message.
            cause = None
        return type(self), self.args, {**self.__dict__, "__cause__": cause}


class SourceError(DataError):
    """A data set can't be used. Becomes a `Problem` with the data set's name."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what, self.remedy = self.args

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


class ReadError(DataError):
    """Rows of a data set can't be read that existed when it was described."""


class TransformError(DataError):
    """A data set's `transform` failed; the message has the rows and the file."""


class StreamLostError(DataError):
    """A stream of data has failed; the message says why."""


def raised_at(error: BaseException) -> str:
    """An exception's type and text, and the user's line that raised it, for a message."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_library(frame.filename)
    ]
    text = one_line(error)
    if not frames:
        return text
    at = frames[-1]
    return f"{text} ({at.filename}, line {at.lineno}, in {at.name})"


def is_library(file: str) -> bool:
    """Whether a file of Python code is not the user's own."""
    compiled = (".pxi", ".pyx")
    return (
        "site-packages" in file
        or file.endswith(compiled)
        or file.startswith((_OURS, _STANDARD_LIBRARY, "<frozen"))
    )


def text_of(error: BaseException) -> str:
    """An exception's text; "" if its class raises an error instead of it.

    Several texts are joined: an exception without a text of its own shows them as a tuple.
    """
    try:
        text = str(error)
        are_texts = all(isinstance(each, str) for each in error.args)
        if len(error.args) > 1 and text == str(error.args) and are_texts:
            return ". ".join(each.rstrip(". ") for each in error.args)
        return text
    except Exception:  # the class is a user's
        return ""


def one_line(error: BaseException) -> str:
    """An exception's type and text, short enough for a message."""
    text = " ".join(text_of(error).split())
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def too_few(dataset: str, count: int, what: str, num_workers: int) -> Problem:
    """The problem of a data set with fewer rows, or groups, than workers.

    Args:
        dataset: its name.
        count: how many there are.
        what: "row", or what `count` counts instead.
        num_workers: how many need one.
    """
    return Problem(
        field=f"datasets[{dataset!r}]",
        what=f"its {numbered(count, what)} can't be divided among "
        f"{numbered(num_workers, 'worker')}",
        remedy="Use fewer workers: ScalingConfig(num_workers=…)",
    )
