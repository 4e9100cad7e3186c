"""Finds out what a driver runs: its command, its script, and the git commit of its code."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import polytrain
from polytrain.record.configuration import shown
from polytrain.record.entries import CommitFound
from polytrain.record.journal import Journal
from polytrain.text.described import shortened

_MOST_ARGUMENTS = 200
_LONGEST_ARGUMENT = 1000
_ANSWERS_WITHIN_S = 10.0
"""Seconds for each command of git, which reads every file's times."""

_AT_ONCE_WITHIN_S = 0.5
"""The same while a run waits for it."""


def command_line() -> tuple[str, ...]:
    """Return this process's command as it was typed, without secrets; empty in a notebook.

    Code after `-c` is left out.
    """
    typed = list(sys.orig_argv)
    if not typed or Path(sys.argv[0] if sys.argv else "").stem == "ipykernel_launcher":
        return ()
    if sys.argv and sys.argv[0] == "-c":
        typed[len(typed) - len(sys.argv)] = "…"
    more = ["…"] if len(typed) > _MOST_ARGUMENTS else []
    return tuple(
        shortened(each, _LONGEST_ARGUMENT) for each in [*shown(typed)[:_MOST_ARGUMENTS], *more]
    )


def script() -> str:
    """Return this process's Python file; empty if it is a console command, or there is none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(file, str):
        return ""
    path = Path(file).absolute()
    places = [sysconfig.get_path(each) for each in ("scripts", "purelib", "platlib", "stdlib")]
    places.append(os.path.dirname(polytrain.__file__))
    return "" if any(map(path.is_relative_to, places)) else str(path)


class CommitSearch:
    """Asks git for the commit of this driver's code, on a thread of its own.

    The code is in the directory of the script, or in the working directory if there is none.
    """

    def __init__(self, *, wake: Callable[[], None], at_once: bool) -> None:
        """
        Args:
            wake: called from the thread when git has answered.
            at_once: whether to return with the answer. A framework that is used in this process is
                disturbed by a child process: until that is git, it holds copies of ports that the
                framework binds, and its end interrupts system calls.
        """
        self._wake = wake
        self._file, self._directory = script(), os.getcwd()
        self._within_s = _AT_ONCE_WITHIN_S if at_once else _ANSWERS_WITHIN_S
        self._found: CommitFound | None = None
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="polytrain-git", daemon=True)
        self._thread.start()
        if at_once:
            self._thread.join()

    def note(self, journal: Journal, *, within_s: float = 0.0) -> None:
        """Write the commit to the journal, once, if git answers in time."""
        self._answered.wait(within_s)
        found, self._found = self._found, None
        if found is not None:
            journal.write(found)

    def _ask(self) -> None:
        directory = os.path.dirname(self._file) or self._directory
        self._found = found_commit(directory, self._file, within_s=self._within_s)
        self._answered.set()
        self._wake()


def found_commit(
    directory: str, file: str, *, within_s: float = _ANSWERS_WITHIN_S
) -> CommitFound | None:
    """Return the commit of a directory's repository; None without git or a repository.

    Args:
        file: the script. If the commit lacks it, the code differs from the commit.
        within_s: seconds for each command of git.
    """
    git = partial(_git, directory, within_s)
    # The name of no branch is HEAD.
    answer = git("rev-parse", "HEAD", "--abbrev-ref", "HEAD")
    if answer is None:
        return None
    commit, _, branch = answer.strip().partition("\n")
    changes = git("status", "--porcelain", "--untracked-files=no")
    is_dirty = None if changes is None else bool(changes)
    if file and is_dirty is False:
        is_dirty = git("ls-files", "--", os.path.basename(file)) == ""
    return CommitFound(
        commit=commit, branch="" if branch == "HEAD" else shortened(branch), is_dirty=is_dirty
    )


def _git(directory: str, within_s: float, *arguments: str) -> str | None:
    """Return what a command of git prints; None if it fails, or takes longer."""
    # Without a lock of the index, which would disturb what the user does with git meanwhile.
    command: Sequence[str] = ("git", "--no-optional-locks", "-C", directory, *arguments)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=within_s,
            # Ctrl-C is for the program, which asks for a checkpoint, and not for git.
            process_group=0,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
