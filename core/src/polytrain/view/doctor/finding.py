"""What a check has found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Whether runs can rely on what was checked."""

    OK = "ok"

    WARNING = "warning"
    """Runs work, but something is slower, or is missing when it is needed."""

    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Verdict
    what: str
    """What was measured, or what is wrong."""

    remedy: str = ""
    seconds: float = 0.0


class CheckFailed(Exception):
    """What was tried doesn't work."""

    def __init__(self, what: str, remedy: str, *, verdict: Verdict = Verdict.FAILED) -> None:
        super().__init__(what)
        self.remedy = remedy
        self.verdict = verdict


def checked(name: str, check: Callable[[], str]) -> Finding:
    """Run a check, and return what it has found.

    Args:
        name: the check's.
        check: returns what it has measured, or raises `CheckFailed`. Any other exception counts as
            a failure, too.
    """
    began = time.monotonic()
    verdict, remedy = Verdict.OK, ""
    try:
        what = check()
    except CheckFailed as failed:
        verdict, what, remedy = failed.verdict, str(failed), failed.remedy
    except Exception as error:  # whatever the system raises is what the user wants to know
        return failed_with(name, error)
    seconds = time.monotonic() - began
    return Finding(check=name, verdict=verdict, what=what, remedy=remedy, seconds=seconds)


def failed_with(name: str, error: Exception) -> Finding:
    """Return the finding of a check that an error has ended."""
    return Finding(check=name, verdict=Verdict.FAILED, what=f"{type(error).__name__}: {error}")
