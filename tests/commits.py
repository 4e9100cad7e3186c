"""Runs of tests don't ask git for the commit of this checkout.

Each would start three processes of git, one of which looks at every file. Tests of what git answers
make repositories of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polytrain.record.entries import CommitFound
from polytrain.run import program

CHECKOUT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def no_commit_of_the_checkout() -> Iterator[None]:
    found_commit = program.found_commit

    def found(directory: str, file: str, *, within_s: float) -> CommitFound | None:
        if Path(directory).is_relative_to(CHECKOUT):
            return None
        return found_commit(directory, file, within_s=within_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "found_commit", found)
        yield
