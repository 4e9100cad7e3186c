"""The pages about porting: the files and diffs that they show, and how these are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(r"```(python|diff) (\S+)\n(.*?)```", flags=re.DOTALL)


def files_of(page: str) -> dict[str, str]:
    """The files that a page shows in full, by name."""
    return {name: text for kind, name, text in _blocks(page) if kind == "python"}


def diffs_of(page: str) -> dict[str, tuple[str, str]]:
    """The files of which a page shows a diff: what they were, and what they become."""
    return {
        name: (_side(text, "-"), _side(text, "+"))
        for kind, name, text in _blocks(page)
        if kind == "diff"
    }


def _blocks(page: str) -> Iterator[tuple[str, str, str]]:
    for match in _BLOCK.finditer((ROOT / "docs" / page).read_text()):
        yield match[1], match[2], match[3]


def _side(diff: str, sign: str) -> str:
    lines = [line for line in diff.splitlines() if not line or line[0] in (" ", sign)]
    return "\n".join(line[1:] for line in lines) + "\n"


def printed(directory: Path, command: Sequence[str]) -> dict[str, float]:
    """Run a Python command; return the numbers that it prints as `name number`.

    Args:
        directory: the working directory; also the home, where runs are stored by default.
        command: arguments of the Python interpreter.
    """
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env={**os.environ, "HOME": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return numbers_in(done.stdout)


def numbers_in(output: str) -> dict[str, float]:
    """Return the numbers that are printed as `name number`."""
    # Output of workers begins with their rank in parentheses.
    numbers = re.findall(r"^(?:\(rank \d+\) )?([a-z]+) (-?\d\S*)$", output, flags=re.MULTILINE)
    return {name: float(number) for name, number in numbers}
